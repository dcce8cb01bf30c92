// A state followed down the tree of a vocabulary: automaton.py's walks. Nodes are numbered level by level, so a parent comes before its children.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Item { int32_t node, state, source, count, next; };  // a position that was reached; next: of the same node, -1

// One walk; native.py's struct. It begins at the positions `starts`, or at those whose `members` is not negative, in `state`. It is called again and
// again, each time with some more states expanded, and ends in one of two ways. LISTED: tokens, and exits, where a state accepts and tokens go on,
// are columns of a list. SWEPT, where by a guess more than the part `many` of all nodes is reached: they are arrays by token and by node.
struct Walk {
    const int32_t *parent, *child0, *kids, *first, *end, *own, *order, *node_of, *by_byte, *byte_starts, *levels;  // the tree, of vocab.py
    const uint8_t *byte, *inner;                // inner: has children
    const int32_t* delta;                       // the automaton: state -> byte -> state, -1: none, UNKNOWN where the state is not expanded
    const uint8_t *accepts, *expanded;          // by state; state 0 is the one that nothing follows
    const int32_t *starts, *marks;
    const int16_t* members;                     // by node; a member is its own source
    Item* items;                                // room for `room`
    int32_t *head, *sources;                    // by node: its last item, -1; SWEPT: the source
    uint16_t* states;                           // SWEPT: by node, 0 if it has none
    int16_t *counts, *exits, *classes;          // SWEPT: by node, characters begun; those of exits, else -1; by token, 0: none
    int32_t *columns, *sizes;                   // LISTED: 6 of `room`: tokens, classes, sources; exits: nodes, sources, counts. SWEPT: of each class
    int64_t* keys;                              // by class: the state, or 4096 times that and the count
    int64_t nodes, num_levels, num_tokens, num_states, room, num_starts;
    int64_t phase, at, size, repeated, dropped; // repeated: a node has several items; dropped: one was left out
    int64_t num_unknown, num_found, num_classes, num_exits, most;  // unknown: states to expand, in `columns`
    double many;
    int32_t ascending;                          // the starts, each is there once
    int32_t state, loop;                        // loop: the state between two characters, -1: nobody counts
};

enum { BEGIN, LISTED, SWEPT };                  // phases
enum { DONE, EXPAND, NO_ROOM, TOO_MANY };       // what a walk returns
constexpr int32_t UNKNOWN = -2;

void clear(Walk& w) {
    for (int64_t i = 0; i < w.size; i++) w.head[w.items[i].node] = -1;
    w.size = w.at = w.repeated = w.dropped = 0;
}

// One more position, but where one with the same node, state and count, and of the same marks[source], is there. False: no room.
inline bool add(Walk& w, int32_t node, int32_t state, int32_t source, int32_t count) {
    for (int32_t at = w.head[node]; at >= 0; at = w.items[at].next) {
        const Item& other = w.items[at];
        w.repeated = 1;
        if (other.state != state || other.count != count || (w.marks && w.marks[other.source] != w.marks[source])) continue;
        w.dropped = 1;
        return true;
    }
    if (w.size == w.room) return false;
    w.items[w.size] = {node, state, source, count, w.head[node]};
    w.head[node] = w.size++;
    return true;
}

inline bool add_kids(Walk& w, int32_t node, int32_t state, int32_t source, int32_t count) {
    const int32_t* row = w.delta + 256 * (int64_t)state;
    count += state == w.loop;
    for (int32_t kid = w.child0[node]; kid < w.child0[node] + w.kids[node]; kid++) {
        const int32_t to = row[w.byte[kid]];
        if (to >= 0 && !add(w, kid, to, source, count)) return false;
    }
    return true;
}

// The children of where it begins; from the bytes' side, if few nodes have them: is the parent one of ours?
bool begin(Walk& w) {
    clear(w);
    const int32_t *row = w.delta + 256 * (int64_t)w.state, *end = w.starts + w.num_starts;
    int64_t with_byte = 0;
    for (int byte = 0; byte < 256; byte++)
        if (row[byte] >= 0) with_byte += w.byte_starts[byte + 1] - w.byte_starts[byte];
    if (!w.members && (!w.ascending || with_byte > w.num_starts)) {
        for (int64_t i = 0; i < w.num_starts; i++)
            if (!add_kids(w, w.starts[i], w.state, i, 0)) return false;
        return true;
    }
    for (int byte = 0; byte < 256; byte++) {
        const int32_t* start = w.starts;
        for (int32_t i = w.byte_starts[byte]; row[byte] >= 0 && i < w.byte_starts[byte + 1]; i++) {
            const int32_t kid = w.by_byte[i], above = w.parent[kid];
            if (!kid) continue;                     // the root is nobody's child
            if (!w.members) start = std::lower_bound(start, end, above);
            if (w.members ? w.members[above] < 0 : start == end || *start != above) continue;
            if (!add(w, kid, row[byte], w.members ? above : start - w.starts, w.state == w.loop)) return false;
        }
    }
    return true;
}

// What part of all nodes will be reached: of several starts, what lies below them; of one, by a sample, if all states on the way are expanded.
double guess(Walk& w) {
    constexpr int sample = 256, deepest = 64;
    int64_t n = 0;
    w.num_unknown = 0;
    if (w.num_starts > 1 || w.members) {
        for (int64_t i = 0; i < w.size; i++) n += w.end[w.items[i].node] - w.first[w.items[i].node];
        return (double)n / w.num_tokens;
    }
    for (int i = 0; i < sample; i++) {
        uint8_t text[deepest];
        int32_t node = i * w.nodes / sample, depth = 0, state = w.state;
        for (; node && node != *w.starts && depth < deepest; node = w.parent[node]) text[depth++] = w.byte[node];
        if (node != *w.starts) continue;
        while (depth && state >= 0 && w.expanded[state]) state = w.delta[256 * (int64_t)state + text[--depth]];
        if (state >= 0 && depth) w.columns[w.num_unknown++] = state;
        n += state >= 0;
    }
    return (double)n / sample;
}

// What is below the items, one by one. Below one start no node can be reached twice, and nobody looks.
int follow(Walk& w) {
    const bool once = w.num_starts == 1;
    for (; w.at < w.size; w.at++) {
        const Item item = w.items[w.at];
        if (!w.inner[item.node]) continue;
        if (!w.expanded[item.state]) {
            w.columns[0] = item.state, w.num_unknown = 1;
            return EXPAND;
        }
        if (!once) {
            if (!add_kids(w, item.node, item.state, item.source, item.count)) return NO_ROOM;
            continue;
        }
        if (w.size + 256 > w.room) return NO_ROOM;
        const int32_t *row = w.delta + 256 * (int64_t)item.state, first = w.child0[item.node], count = item.count + (item.state == w.loop);
        for (int32_t kid = first; kid < first + w.kids[item.node]; kid++) {
            const int32_t to = row[w.byte[kid]];
            w.items[w.size] = {kid, to, 0, count, -1};
            w.size += to >= 0;                      // no branch: half of them would be guessed wrong
        }
    }
    return DONE;
}

void begin_sweep(Walk& w) {
    std::fill_n(w.states, w.nodes + 1, 0);
    if (w.loop >= 0) std::fill_n(w.counts, w.nodes + 1, 0);
    w.at = 1, w.num_exits = 0, w.most = w.exits[0] = -1;
    for (int64_t i = 0; i < w.size; i++) {
        const Item& item = w.items[i];
        w.states[item.node] = item.state, w.sources[item.node] = item.source;
        if (w.loop >= 0) w.counts[item.node] = item.count;
    }
}

// A level's nodes, by their parents' states: no branch, which would often be guessed wrong. Returns whether a state is not expanded.
template <bool several, bool counted>
bool sweep_level(Walk& w, int32_t begin, int32_t end) {
    const int32_t *parent = w.parent, *delta = w.delta;
    const uint8_t *byte = w.byte, *inner = w.inner, *accepts = w.accepts;
    uint16_t* states = w.states;
    int16_t *counts = w.counts, *exits = w.exits;
    int32_t unknown = 0, num_exits = 0, most = -1;
    for (int32_t i = begin; i < end; i++) {
        const int32_t above = states[parent[i]], to = delta[256 * above + byte[i]], from = above ? parent[i] : i;
        const int32_t state = to >= 0 ? to : states[i], count = counted ? (counts[from] + (above == w.loop)) * (state > 0) : 0;
        const int32_t ends = accepts[state] & inner[i], exit = (count + 1) * ends - 1;
        unknown |= to == UNKNOWN;
        states[i] = state, exits[i] = exit;
        if (several) w.sources[i] = w.sources[from];
        if (counted) counts[i] = count;
        num_exits += ends, most = std::max(most, exit);
    }
    if (!unknown) w.num_exits += num_exits, w.most = std::max<int64_t>(w.most, most);
    return unknown;
}

// All nodes, level by level. An item keeps its state, unless it lies below another: that is TOO_MANY.
int sweep(Walk& w) {
    const bool several = w.num_starts > 1, counted = w.loop >= 0;
    const auto level = several ? counted ? sweep_level<true, true> : sweep_level<true, false>
                               : counted ? sweep_level<false, true> : sweep_level<false, false>;
    for (; w.at < w.num_levels; w.at++) {
        const int32_t begin = w.levels[w.at], end = w.levels[w.at + 1];
        if (!level(w, begin, end)) continue;
        w.num_unknown = 0;
        for (int32_t i = begin, last = 0; i < end; i++) {
            const int32_t q = w.states[w.parent[i]];
            if (q != last && !w.expanded[q]) w.columns[w.num_unknown++] = last = q;
        }
        return EXPAND;
    }
    for (int64_t i = 0; i < w.size; i++)
        if (w.states[w.parent[w.items[i].node]]) return TOO_MANY;
    return DONE;
}

inline uint64_t hash_of(int64_t key) { return key; }

// Numbers for keys, in the order in which they are met: keys[number].
template <class Key>
struct Numbers {
    Key* keys;
    int64_t size = 0;
    std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // by linear probing

    explicit Numbers(Key* keys) : keys(keys) {}

    int64_t slot_of(const Key& key) const {
        const int64_t most = table.size() - 1;
        int64_t at = hash_of(key) * 0x9E3779B97F4A7C15u >> 32 & most;
        while (table[at] >= 0 && !(keys[table[at]] == key)) at = (at + 1) & most;
        return at;
    }

    int64_t operator()(const Key& key) {
        const int64_t at = slot_of(key), found = table[at];
        if (found >= 0) return found;
        table[at] = size, keys[size++] = key;
        if (2 * size > (int64_t)table.size()) {
            table.assign(2 * table.size(), -1);
            for (int64_t i = 0; i < size; i++) table[slot_of(keys[i])] = i;
        }
        return size - 1;
    }
};

int list(Walk& w) {
    int32_t *tokens = w.columns, *classes = tokens + w.room, *sources = classes + w.room;
    int32_t *nodes = sources + w.room, *origins = nodes + w.room, *counts = origins + w.room;
    Numbers<int64_t> number(w.keys);
    int64_t n = 0, ends = 0;
    for (int64_t i = 0; i < w.size; i++) {
        const Item& item = w.items[i];
        if (w.accepts[item.state] && w.inner[item.node])
            nodes[ends] = item.node, origins[ends] = item.source, counts[ends++] = item.count;
        const int32_t first = w.first[item.node], own = w.own[item.node];
        if (!own) continue;
        if (n + own > w.room) return NO_ROOM;
        const int64_t which = number(w.loop < 0 ? item.state : 4096 * (int64_t)item.state + item.count);
        for (int32_t at = first; at < first + own; at++) tokens[n] = w.order[at], classes[n] = which, sources[n++] = item.source;
    }
    w.num_found = n, w.num_classes = number.size, w.num_exits = ends;
    return DONE;
}

// Numbers for the keys that are not 0 in `used`, from 1 on, in its place
int64_t number_used(std::vector<int32_t>& used) {
    int64_t n = 0;
    for (int32_t& key : used) key = key ? ++n : 0;
    return n;
}

// How many there are of each class
void count_sizes(const int16_t* classes, int64_t num_tokens, int64_t num_classes, int32_t* out) {
    std::vector<int32_t> sizes(4 * num_classes);                // four of each, or a token would wait for the one before
    for (int64_t t = 0; t < num_tokens; t++) sizes[4 * classes[t] + t % 4]++;
    for (int64_t i = 0; i < num_classes; i++) out[i] = sizes[4 * i] + sizes[4 * i + 1] + sizes[4 * i + 2] + sizes[4 * i + 3];
}

// By token, from a sweep: the class, by state and count; and the classes' sizes.
int spread(Walk& w) {
    const int32_t* node_of = w.node_of;
    int32_t* key = w.columns;                                   // by token: the state; then, if there are counts, that and the count
    std::vector<int32_t> of_state(w.num_states), of_key;
    for (int64_t t = 0; t < w.num_tokens; t++) of_state[key[t] = w.states[node_of[t]]] = 1;
    of_state[0] = 0;
    int64_t n = number_used(of_state), width = 1;
    if (w.loop >= 0) {
        int16_t high = 0;
        for (int64_t i = 0; i < w.nodes; i++) high = std::max(high, w.counts[i]);
        width += high;
        if (n * width > 1 << 24) return TOO_MANY;
        of_key.assign((n + 1) * width, 0);
        for (int64_t t = 0; t < w.num_tokens; t++) of_key[key[t] = of_state[key[t]] * width + w.counts[node_of[t]]] = 1;
        of_key[0] = 0;
        n = number_used(of_key);
    }
    if (n >= 1 << 15) return TOO_MANY;
    for (int64_t s = 1; s < w.num_states; s++) {
        if (w.loop < 0 && of_state[s]) w.keys[of_state[s] - 1] = s;
        for (int64_t count = 0, at = of_state[s] * width; w.loop >= 0 && at && count < width; count++, at++)
            if (of_key[at]) w.keys[of_key[at] - 1] = 4096 * s + count;
    }
    const std::vector<int32_t>& number = w.loop < 0 ? of_state : of_key;
    for (int64_t t = 0; t < w.num_tokens; t++) w.classes[t] = number[key[t]];
    count_sizes(w.classes, w.num_tokens, n + 1, w.sizes);
    w.num_classes = n, w.num_found = w.num_tokens - w.sizes[0];
    return DONE;
}

// Goes on with a walk, as far as it can.
int walk(Walk& w) {
    if (w.phase == BEGIN) {
        if (!begin(w)) return NO_ROOM;
        const double share = w.repeated ? 0 : guess(w);
        if (share > w.many && w.num_unknown) return EXPAND;
        w.phase = share > w.many ? SWEPT : LISTED;
        if (w.phase == SWEPT) begin_sweep(w);
    }
    if (w.phase == SWEPT) {
        const int how = sweep(w);
        if (how != TOO_MANY) return how == DONE ? spread(w) : how;
        w.phase = LISTED, w.at = 0;
    }
    const int how = follow(w);
    return how == DONE ? list(w) : how;
}

// Two maps as one: its classes are the pairs of theirs that occur, by (a, b), the first that of 0 and 0. Returns how many there are, -1: too many.
int64_t join(const int16_t* a, const int16_t* b, int64_t size, int64_t classes_a, int64_t classes_b, int16_t* out, int32_t* sizes, int64_t* keys) {
    if (classes_a * classes_b > 1 << 24) return -1;
    std::vector<int32_t> of_key(classes_a * classes_b);
    of_key[0] = 1;
    for (int64_t t = 0; t < size; t++) of_key[a[t] * classes_b + b[t]] = 1;
    const int64_t n = number_used(of_key);
    if (n > 1 << 15) return -1;
    for (size_t key = 0; key < of_key.size(); key++)
        if (of_key[key]) keys[of_key[key] - 1] = key;
    for (int64_t t = 0; t < size; t++) out[t] = of_key[a[t] * classes_b + b[t]] - 1;
    count_sizes(out, size, n, sizes);
    return n;
}

}  // namespace
