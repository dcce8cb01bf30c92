// A state followed down the whole tree of a vocabulary: automaton.py's walk of many positions, in one pass. Positions are numbered level by level, so a
// parent comes before its children.
#pragma once

#include <cstdint>
#include <vector>

namespace {

struct Trie {
    const int32_t *parent, *child0, *kids, *first, *own, *order;
    const uint8_t* byte;
    int64_t nodes;
};

// The states of positions from..nodes-1, by their parents'; those that have one, below a parent that has none, keep it. Stops where a parent's state is
// not `expanded`, and returns that position: the caller expands the state and goes on from there.
int64_t trie_walk(const Trie& trie, const int32_t* delta, const uint8_t* expanded, int32_t loop, int64_t from, int32_t* state, int32_t* source,
                  int32_t* count) {
    for (int64_t i = from; i < trie.nodes; i++) {
        const int32_t above = trie.parent[i], q = state[above];
        if (q < 0) continue;
        if (!expanded[q]) return i;
        state[i] = delta[256 * (int64_t)q + trie.byte[i]];
        if (source) source[i] = source[above];
        if (count) count[i] = count[above] + (q == loop);
    }
    return trie.nodes;
}

struct Item { int32_t node, state, source, count, next; };  // next: of the same position, -1

// The same where several states may be at a position: `items`, `size` of them at first, in lists that begin at head[node] (-1: none). An item is
// left out where one of the same position, state and count, and of the same marks[source], is there. Returns the position to go on from, -1 where
// there is no room for an item.
int64_t trie_walk_several(const Trie& trie, const int32_t* delta, const uint8_t* expanded, int32_t loop, int64_t from, Item* items, int64_t* size,
                          int64_t room, int32_t* head, const int32_t* marks) {
    for (int64_t i = from; i < trie.nodes; i++) {
        for (int32_t at = head[i]; at >= 0; at = items[at].next)
            if (!expanded[items[at].state]) return i;
        for (int32_t at = head[i]; at >= 0; at = items[at].next) {
            const Item above = items[at];
            const int32_t count = above.count + (above.state == loop);
            for (int32_t kid = trie.child0[i]; kid < trie.child0[i] + trie.kids[i]; kid++) {
                const int32_t to = delta[256 * (int64_t)above.state + trie.byte[kid]];
                if (to < 0) continue;
                int32_t other = head[kid];
                while (other >= 0 && (items[other].state != to || items[other].count != count ||
                                      (marks && marks[items[other].source] != marks[above.source])))
                    other = items[other].next;
                if (other >= 0) continue;
                if (*size == room) return -1;
                items[*size] = {kid, to, above.source, count, head[kid]};
                head[kid] = (*size)++;
            }
        }
    }
    return trie.nodes;
}

// Numbers for keys, in the order in which they are met: keys[number].
struct Numbers {
    int64_t* keys;
    int64_t size = 0, last_key = -1, last = 0;
    std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // by linear probing

    explicit Numbers(int64_t* keys) : keys(keys) {}

    int64_t slot_of(int64_t key) const {
        const int64_t most = table.size() - 1;
        int64_t at = (uint64_t)key * 0x9E3779B97F4A7C15u >> 32 & most;
        while (table[at] >= 0 && keys[table[at]] != key) at = (at + 1) & most;
        return at;
    }

    int64_t operator()(int64_t key) {
        if (key == last_key) return last;
        const int64_t at = slot_of(key);
        last_key = key, last = table[at];
        if (last >= 0) return last;
        last = table[at] = size, keys[size++] = key;
        if (2 * size > (int64_t)table.size()) {
            table.assign(2 * table.size(), -1);
            for (int64_t i = 0; i < size; i++) table[slot_of(keys[i])] = i;
        }
        return last;
    }
};

// The tokens that end in a state, each with its class: the number of a (state, count) in `keys`; and the positions where a state accepts and tokens
// go on. sizes: tokens, classes, positions.
void trie_collect(const Trie& trie, const uint8_t* accepts, const int32_t* state, const int32_t* source, const int32_t* count, int32_t* tokens,
                  int32_t* cls, int32_t* sources, int64_t* keys, int32_t* exits, int64_t* sizes) {
    Numbers number(keys);
    int64_t n = 0, ends = 0;
    for (int64_t i = 0; i < trie.nodes; i++) {
        if (state[i] < 0) continue;
        if (accepts[state[i]] && trie.kids[i] > 0) exits[ends++] = i;
        if (!trie.own[i]) continue;
        const int64_t which = number(count ? 4096 * (int64_t)state[i] + count[i] : state[i]);
        for (int32_t at = trie.first[i]; at < trie.first[i] + trie.own[i]; at++) {
            tokens[n] = trie.order[at], cls[n] = which;
            if (source) sources[n] = source[i];
            n++;
        }
    }
    sizes[0] = n, sizes[1] = number.size, sizes[2] = ends;
}

}  // namespace
