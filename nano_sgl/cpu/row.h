// The readings of a text, followed down the tree of a vocabulary from piece to piece: rows.py's walk.
#pragma once

#include "trie.h"

namespace {

// A position that was reached in a state of the automaton, and what lies below the piece: a place. begun: characters that the token has begun there,
// if the place counts; x: those that it began in the repeat that the row's own count belongs to, -1: what follows holds always. beside: the state
// there of the piece whose template the row has, if this is only about where they differ; else SOLE.
struct Reading {
    int32_t node, state, place, begun, x, beside, next;     // next: of the same node, -1

    bool equals(const Reading& other) const {
        return state == other.state && place == other.place && begun == other.begun && x == other.x && beside == other.beside;
    }
};

constexpr int32_t SOLE = -2;
constexpr int64_t WORK = 10'000'000;            // comparisons and looks at nodes, of a row: some 50 ms

// What comes behind a piece are firsts[after .. end], (state, place) each, the states expanded; after is -1 if that is not known yet. A place that
// counts has a state `between` two characters (else it is -1), where it may end after `least` to `most` more. own: its count is that of the row.
struct Ending { int32_t after, end, between, least, most, own; };

// A leaf that holds always, and the first line of its value in the tables. place: -1 where there is none.
struct Known { int32_t place, state, begun, line; };

// rows.py's struct
struct RowWalk {
    const Walk* walk;                           // the tree, and the automaton
    const Ending* places;
    const int32_t* firsts;
    const int16_t* map;                         // the class of each token, before what is found here; null: 0
    Reading* readings;                          // room for `room`
    int32_t* head;                              // by node: its last reading, -1
    uint8_t* differs;                           // by node: whether the template does not hold there
    int32_t* different;                         // these nodes
    int32_t* left;                              // what is left to templates, (node, state, place, x) each, LEFT at most: see `leave`
    int32_t *tokens, *groups;                   // the result: tokens ascending, and the group of each,
    int64_t* pairs;                             // a group is (a group before it, or ~class, or ~(class + INSTEAD)) << 32 | leaf,
    int32_t* leaves;                            // a leaf is (place, state, begun, x)
    const int32_t* vec;                         // of each class, whether it leads anywhere; null: none does
    Known* known;                               // of the grammar's leaves, `known_size` of them, a power of two
    int32_t *values, *lines;                    // of each token; of each leaf: the first line in the tables, -1
    int32_t *fresh, *asked;                     // (place, state) of leaves, and numbers of leaves: see `settle`
    // work: what was done so far. full: there was no room for a reading, or no time. leaves_out: whether there is such a thing as `left`
    int64_t room, at, size, work, full, num_different, num_left, leaves_out, num_tokens, num_pairs, num_leaves, unknown;
    int64_t known_size, num_known, first_line, num_fresh, num_asked, num_joined;
};

enum { FOLLOWED, EXPAND_STATE, END_PLACE, TOO_LONG, LEFT_OUT, ASK_LINES, MORE_KNOWN };  // what `follow_readings` returns, and `settle`

void forget(RowWalk& w) {
    for (int64_t i = 0; i < w.size; i++) w.head[w.readings[i].node] = -1;
    for (int64_t i = 0; i < w.num_different; i++) w.differs[w.different[i]] = 0;
    w.size = w.at = w.work = w.full = w.num_different = w.num_left = 0;
}

void add_reading(RowWalk& w, const Reading& one) {
    for (int32_t at = w.head[one.node]; at >= 0; at = w.readings[at].next, w.work++)
        if (w.readings[at].equals(one)) return;
    w.full |= w.size == w.room || w.work > WORK;
    if (w.full) return;
    w.readings[w.size] = one;
    w.readings[w.size].next = w.head[one.node];
    w.head[one.node] = w.size++;
}

// The children of a node, by what is alive there. The states have to be expanded. What is alive beside it has to be so here: rows only add to maps.
void go_down(RowWalk& w, int32_t node, int32_t state, int32_t place, int32_t begun, int32_t x, int32_t beside) {
    const Walk& t = *w.walk;
    const Ending& p = w.places[place];
    const int32_t *row = t.delta + 256 * (int64_t)state, *other = t.delta + 256 * (int64_t)std::max(beside, 0);
    if (state == p.between && begun++ >= p.most) return;
    for (int32_t kid = t.child0[node], end = kid + t.kids[node]; kid < end; kid++) {
        const int32_t to = row[t.byte[kid]];
        if (beside == SOLE) {
            if (to >= 0) add_reading(w, {kid, to, place, begun, x, SOLE, -1});
        } else if (const int32_t there = other[t.byte[kid]]; to != there) {
            if (to < 0) {
                w.full = 1;
                return;
            }
            if (there >= 0 && !w.differs[kid]) w.differs[kid] = 1, w.different[w.num_different++] = kid;
            add_reading(w, {kid, to, place, begun, x, there < 0 ? SOLE : there, -1});
        }
    }
}

// Where a piece ends: `members`, a set as in Walk, with characters begun in each, by its rank, or (no ranks) `begun` by nodes in preorder and so many
// `more`; or `nodes`, n of them, ascending, with `counts`.
struct Exits {
    const uint64_t* members;
    const int32_t* ranks;
    const int16_t* begun;
    const int32_t *nodes, *counts;
    int64_t n, more;

    int32_t count(int32_t i) const { return !begun ? 0 : ranks ? begun[rank_of(members, ranks, i)] : begun[i] + more; }
};

// What comes behind that, where the count is one that the place may end with. From the bytes' side: most nodes have no child with one of those that
// may come.
void end_at(RowWalk& w, int32_t place, const Exits& at, int32_t x) {
    const Walk& t = *w.walk;
    const Ending p = w.places[place];
    for (int32_t i = p.after; i < p.end && !w.full; i++) {
        const int32_t state = w.firsts[2 * i], behind = w.firsts[2 * i + 1], *row = t.delta + 256 * (int64_t)state;
        const bool first = state == w.places[behind].between;
        for (int byte = 0; byte < 256; byte++) {
            const int32_t *start = at.nodes, *last = at.nodes + at.n;
            for (int32_t k = t.byte_starts[byte]; row[byte] >= 0 && k < t.byte_starts[byte + 1]; k++, w.work++) {
                if (at.members && !has(at.members, t.above[k])) continue;
                const int32_t kid = t.by_byte[k], above = t.parent[kid];
                if (!at.members) start = std::lower_bound(start, last, above);
                if (!kid || (!at.members && (start == last || *start != above))) continue;
                const int32_t count = at.members ? at.count(t.above[k]) : at.counts ? at.counts[start - at.nodes] : 0;
                if ((p.between >= 0 && (count < p.least || count > p.most)) || w.differs[above]) continue;
                add_reading(w, {kid, row[byte], behind, first, p.own ? count : x, SOLE, -1});
            }
        }
    }
}

constexpr int32_t BELOW = 2048, BROAD = 16, LEFT = 64;      // tokens below a node, bytes that a state moves on

// Whether what may be read from a node on is so much that it should come from a template. Then it is noted, and not followed.
bool leave(RowWalk& w, int32_t node, int32_t state, int32_t place, int32_t x) {
    const Walk& t = *w.walk;
    if (!w.leaves_out || t.end[node] - t.first[node] <= BELOW) return false;
    const int32_t* row = t.delta + 256 * (int64_t)state;
    int alive = 0;
    for (int byte = 0; byte < 256; byte++) alive += row[byte] >= 0;
    if (alive < BROAD) return false;
    const int32_t one[4] = {node, state, place, x};
    for (int64_t i = 0; i < w.num_left; i++)
        if (std::equal(one, one + 4, w.left + 4 * i)) return true;
    if (w.num_left == LEFT) return false;
    std::copy(one, one + 4, w.left + 4 * w.num_left++);
    return true;
}

// As far as it can: FOLLOWED at the end, or what it needs first, in `unknown`.
int follow_readings(RowWalk& w) {
    const Walk& t = *w.walk;
    for (; w.at < w.size && !w.full; w.at++) {
        const Reading one = w.readings[w.at];
        if (!t.inner[one.node]) continue;
        const Ending& p = w.places[one.place];
        const bool ends = p.between < 0 ? t.accepts[one.state] : one.state == p.between && one.begun >= p.least && one.begun <= p.most;
        w.unknown = one.state;
        if (!t.expanded[one.state]) return EXPAND_STATE;
        w.unknown = one.beside;
        if (one.beside >= 0 && !t.expanded[one.beside]) return EXPAND_STATE;
        w.unknown = one.place;
        if (ends && p.after < 0) return END_PLACE;
        for (int32_t i = p.after, x = p.own ? one.begun : one.x; ends && i < p.end; i++) {
            const int32_t state = w.firsts[2 * i], behind = w.firsts[2 * i + 1];
            if (!leave(w, one.node, state, behind, x)) go_down(w, one.node, state, behind, 0, x, SOLE);
        }
        go_down(w, one.node, one.state, one.place, one.begun, one.x, one.beside);
    }
    return w.full ? TOO_LONG : FOLLOWED;
}

struct Leaf {
    int32_t place, state, begun, x;
    bool operator==(const Leaf& o) const { return place == o.place && state == o.state && begun == o.begun && x == o.x; }
};

uint64_t hash_of(const Leaf& leaf) {
    return ((uint64_t)leaf.place << 32 | (uint32_t)leaf.state) * 0xC2B2AE3D27D4EB4Fu + ((uint64_t)leaf.begun << 32 | (uint32_t)leaf.x);
}

constexpr int64_t INSTEAD = 1 << 20;                    // beside a class: what is found counts instead of what the class says

// Which tokens end in which readings. Tokens with the same class and the same leaves are a group: the last of the pairs that lead there.
int gather(RowWalk& w) {
    const Walk& t = *w.walk;
    Numbers<Leaf> leaf_of((Leaf*)w.leaves);
    Numbers<int64_t> pair_of(w.pairs);
    std::vector<uint64_t> found;                        // token << 32 | leaf
    found.reserve(w.size);
    for (int64_t i = 0; i < w.size; i++) {
        const Reading& one = w.readings[i];
        const int32_t first = t.first[one.node], own = t.own[one.node];
        if (!own) continue;
        const uint64_t leaf = leaf_of({one.place, one.state, one.begun, one.x});
        for (int32_t at = first; at < first + own; at++) found.push_back((uint64_t)t.order[at] << 32 | leaf);
    }
    if ((int64_t)found.size() > w.room) return TOO_LONG;        // several tokens with the same bytes
    if (found.size() < 4096) {
        std::sort(found.begin(), found.end());
    } else {                                            // by token alone: of one token, in whichever order
        std::vector<int32_t> place(t.num_tokens + 1);
        for (const uint64_t one : found) place[(one >> 32) + 1]++;
        for (int64_t i = 0; i < t.num_tokens; i++) place[i + 1] += place[i];
        std::vector<uint64_t> sorted(found.size());
        for (const uint64_t one : found) sorted[place[one >> 32]++] = one;
        found.swap(sorted);
    }
    w.num_tokens = 0;
    for (size_t i = 0; i < found.size();) {
        const int32_t token = found[i] >> 32;
        int64_t group = ~((w.map ? w.map[token] : 0) + w.differs[t.node_of[token]] * INSTEAD);
        for (; i < found.size() && (int32_t)(found[i] >> 32) == token; i++) group = pair_of((uint64_t)group << 32 | (uint32_t)found[i]);
        w.tokens[w.num_tokens] = token, w.groups[w.num_tokens++] = group;
    }
    w.num_leaves = leaf_of.size, w.num_pairs = pair_of.size;
    return FOLLOWED;
}

// Where a leaf is among those that are known, or would be.
Known* known_of(RowWalk& w, const Leaf& leaf) {
    const int64_t most = w.known_size - 1;
    int64_t at = hash_of({leaf.place, leaf.state, leaf.begun, -1}) * 0x9E3779B97F4A7C15u >> 32 & most;
    for (; w.known[at].place >= 0; at = (at + 1) & most)
        if (w.known[at].place == leaf.place && w.known[at].state == leaf.state && w.known[at].begun == leaf.begun) break;
    return w.known + at;
}

// Whether a group is one leaf and nothing else: its value is the leaf's. All others are joined by Python.
bool is_alone(const RowWalk& w, int64_t pair) {
    const int64_t before = pair >> 32;
    return before < 0 && (~before >= INSTEAD || !w.vec || !w.vec[~before]);
}

// The value of each token: a line, or ~group.
int write_values(RowWalk& w) {
    for (int64_t i = 0; i < w.num_asked; i++) {
        const Leaf leaf = ((const Leaf*)w.leaves)[w.asked[i]];
        if (leaf.x >= 0) continue;
        Known* at = known_of(w, leaf);
        w.num_known += at->place < 0;
        *at = {leaf.place, leaf.state, leaf.begun, w.lines[w.asked[i]]};
    }
    int64_t kept = 0;
    w.num_joined = 0;
    for (int64_t i = 0; i < w.num_tokens; i++) {
        const int64_t pair = w.pairs[w.groups[i]];
        int32_t value = is_alone(w, pair) ? w.lines[(int32_t)pair] : ~w.groups[i];
        if (!value && (!w.vec || !w.vec[~(pair >> 32) % INSTEAD])) continue;      // it leads nowhere, as if it were not here
        if (!value) value = ~w.groups[i];
        w.num_joined += value < 0;
        w.tokens[kept] = w.tokens[i], w.values[kept++] = value;
    }
    w.num_tokens = kept;
    return FOLLOWED;
}

// The lines of all leaves that are values by themselves. New ones that are plain, readings that go on in a piece without a count, get the next lines
// of the tables, from `first_line` on, and are `fresh`: whoever called appends them. Others are `asked` for: ASK_LINES, then `write_values`.
int settle(RowWalk& w) {
    if (2 * (w.num_known + w.num_leaves) > w.known_size) return MORE_KNOWN;
    std::fill(w.lines, w.lines + w.num_leaves, -1);
    w.num_fresh = w.num_asked = 0;
    for (int64_t i = 0; i < w.num_tokens; i++) {
        const int64_t pair = w.pairs[w.groups[i]];
        const int32_t number = (int32_t)pair;
        if (!is_alone(w, pair) || w.lines[number] >= 0) continue;
        const Leaf leaf = ((const Leaf*)w.leaves)[number];
        Known* at = leaf.x < 0 ? known_of(w, leaf) : nullptr;
        if (at && at->place >= 0) {
            w.lines[number] = at->line;
        } else if (at && w.places[leaf.place].between < 0 && !w.walk->accepts[leaf.state]) {
            w.lines[number] = w.first_line + w.num_fresh;
            *at = {leaf.place, leaf.state, leaf.begun, w.lines[number]};
            w.fresh[2 * w.num_fresh] = leaf.place, w.fresh[2 * w.num_fresh++ + 1] = leaf.state, w.num_known++;
        } else {
            w.lines[number] = 0, w.asked[w.num_asked++] = number;
        }
    }
    return w.num_asked ? ASK_LINES : write_values(w);
}

// What is known, with more room.
void move_known(RowWalk& w, const Known* before, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        if (before[i].place >= 0) *known_of(w, {before[i].place, before[i].state, before[i].begun, -1}) = before[i];
}

}  // namespace
