// The readings of a text, followed down the tree of a vocabulary from piece to piece: rows.py's walk.
#pragma once

#include "sets.h"
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

constexpr int32_t SOLE = -2, SAME = -1;
constexpr int64_t WORK = 10'000'000;            // comparisons and looks at nodes, of a row: some 50 ms

struct Leaf {
    int32_t place, state, begun, x;
    bool operator==(const Leaf& o) const { return place == o.place && state == o.state && begun == o.begun && x == o.x; }
};

inline uint64_t hash_of(const Leaf& leaf) {
    return ((uint64_t)leaf.place << 32 | (uint32_t)leaf.state) * 0xC2B2AE3D27D4EB4Fu + ((uint64_t)leaf.begun << 32 | (uint32_t)leaf.x);
}

// What is known of a leaf that holds always: its value, -1, and the first line of that in the tables, -1.
struct Known { Leaf leaf; int32_t value, line; };

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

// A piece in which many tokens are, from the root: what the automaton's template says, which the row has as its map. `classes`: of each class but the
// first a state, and characters begun. which: the number of the map. It may be the template of a state beside the one that is asked for, else SOLE.
struct Piece {
    const int16_t* map;
    const int32_t* classes;
    Exits exits;
    int64_t num_classes, which, beside;
};

enum { UNASKED = -1, SPARSE = -2, SURELY_SPARSE = -3 };      // in place of a piece: few tokens begin in a state, as it seems, or as was looked at

struct RowFrames : Frames {
    std::vector<int32_t> piece_of;              // 2 * state + whether it is counted -> piece, or as above
    std::vector<Piece> pieces;

    int32_t& of(int32_t state, bool counted) {
        const size_t at = 2 * (size_t)state + counted;
        if (at >= piece_of.size()) piece_of.resize(2 * at + 64, UNASKED);
        return piece_of[at];
    }
};

// Where a row begins: see `add_reading`. is_long: surely few.
struct Seed { int32_t state, place, x, beside; bool is_long; };

struct RowSets : Sets {
    using Sets::Sets;
    RowFrames& told() { return static_cast<RowFrames&>(frames); }

    std::vector<Seed> seeds;                    // of the row that `read_row` is at; with it one wide piece, piece_number, -1
    Seed wide;
    int32_t piece_number;
    std::vector<Leaf> class_leaves;             // of that
    std::vector<int32_t> class_values, class_lines;
    std::vector<Known> leaves;
    std::vector<int32_t> table = std::vector<int32_t>(256, -1);         // by linear probing

    int64_t slot(const Leaf& leaf) const {
        int64_t at = hash_of(leaf) * 0x9E3779B97F4A7C15u >> 32 & (table.size() - 1);
        while (table[at] >= 0 && !(leaves[table[at]].leaf == leaf)) at = (at + 1) & (table.size() - 1);
        return at;
    }

    // Until the next one is asked for.
    Known& known(const Leaf& leaf) {
        const int64_t at = slot(leaf);
        if (table[at] >= 0) return leaves[table[at]];
        table[at] = leaves.size();
        leaves.push_back({leaf, -1, -1}), count_small();
        if (2 * leaves.size() > table.size()) {
            table.assign(4 * table.size(), -1);
            for (size_t i = 0; i < leaves.size(); i++) table[slot(leaves[i].leaf)] = i;
        }
        return leaves.back();
    }
};

// rows.py's struct
struct RowWalk {
    const Walk* walk;                           // the tree, and the automaton
    RowSets* sets;                              // of the grammar
    const int16_t* map;                         // the class of each token, before what is found here; null: 0
    Reading* readings;                          // room for `room`
    int32_t* head;                              // by node: its last reading, -1
    uint8_t* differs;                           // by node: whether the template does not hold there
    int32_t* different;                         // these nodes
    int32_t* left;                              // what is left to templates, (node, state, place, x, counted) each, LEFT at most: see `leave`
    int32_t *tokens, *groups;                   // the result: tokens ascending, and the group of each,
    int64_t* pairs;                             // a group is (a group before it, or ~class, or ~(class + INSTEAD)) << 32 | leaf,
    int32_t* leaves;                            // a leaf is (place, state, begun, x)
    const int32_t* vec;                         // of each class, whether it leads anywhere; null: none does
    const Leaf* class_leaves;                   // of each class but the first the leaf that it is, null: the values are known;
    int32_t* class_values;                      // its value, -1
    int32_t* values;                            // of each token: the first line in the tables
    // work: what was done so far. full: there was no room for a reading, or no time. leaves_out: whether there is such a thing as `left`
    // below: tokens behind a node from which on it is left to templates
    int64_t room, below, at, size, work, full, num_different, num_left, leaves_out, num_tokens, num_pairs, num_leaves, unknown;
    int64_t low, high;                          // of the repeat that the row's own count belongs to
    // of `read_row`: how many seeds have begun, -1; of readings from one of them; of all. With ASK_PIECE, whether `unknown` is counted. The map.
    int64_t seed, narrow, most, counted, which, num_lines;
    int64_t set;                                // of `go_along`
    uint64_t far[4];                            // bytes with which much begins
};

enum { FOLLOWED, EXPAND_STATE, TOO_LONG, LEFT_OUT, ASK_PIECE };     // what `follow_readings` returns, and `read_row`

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
    const Ending& p = w.sets->endings[place];
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

// What comes behind the place that ends there, where the count is one that the place may end with. From the bytes' side: most nodes have no child with one of those that
// may come.
void end_at(RowWalk& w, int32_t place, const Exits& at, int32_t x) {
    const Walk& t = *w.walk;
    const Ending p = w.sets->endings[place];
    for (int32_t i = p.after; i < p.end && !w.full; i++) {
        const int32_t state = w.sets->firsts[2 * i], behind = w.sets->firsts[2 * i + 1], *row = t.delta + 256 * (int64_t)state;
        const bool first = state == w.sets->endings[behind].between;
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

constexpr int32_t BROAD = 16, LEFT = 64;        // bytes that a state moves on

// On how many bytes a state moves on.
int alive(const Walk& t, int32_t state) {
    const int32_t* row = t.delta + 256 * (int64_t)state;
    int number = 0;
    for (int byte = 0; byte < 256; byte++) number += row[byte] >= 0;
    return number;
}

// Whether what may be read from a node on is so much that it should come from a template. Then it is noted, and not followed.
bool leave(RowWalk& w, int32_t node, int32_t state, int32_t place, int32_t x) {
    const Walk& t = *w.walk;
    if (!w.leaves_out || t.end[node] - t.first[node] <= w.below) return false;
    if (alive(t, state) < BROAD) return false;
    const int32_t one[5] = {node, state, place, x, w.sets->endings[place].between >= 0};
    for (int64_t i = 0; i < w.num_left; i++)
        if (std::equal(one, one + 5, w.left + 5 * i)) return true;
    if (w.num_left == LEFT) return false;
    std::copy(one, one + 5, w.left + 5 * w.num_left++);
    return true;
}

// As far as it can: FOLLOWED at the end, or what it needs first, in `unknown`.
int follow_readings(RowWalk& w) {
    const Walk& t = *w.walk;
    for (; w.at < w.size && !w.full; w.at++) {
        const Reading one = w.readings[w.at];
        if (!t.inner[one.node]) continue;
        Ending p = w.sets->endings[one.place];
        const bool ends = p.between < 0 ? t.accepts[one.state] : one.state == p.between && one.begun >= p.least && one.begun <= p.most;
        w.unknown = one.state;
        if (!t.expanded[one.state]) return EXPAND_STATE;
        w.unknown = one.beside;
        if (one.beside >= 0 && !t.expanded[one.beside]) return EXPAND_STATE;
        if (ends && p.after < 0) {
            w.unknown = w.sets->end(one.place, t.expanded);
            if (w.unknown != FOREVER) return EXPAND_STATE;
            p = w.sets->endings[one.place];
        }
        for (int32_t i = p.after, x = p.own ? one.begun : one.x; ends && i < p.end; i++) {
            const int32_t state = w.sets->firsts[2 * i], behind = w.sets->firsts[2 * i + 1];
            if (!leave(w, one.node, state, behind, x)) go_down(w, one.node, state, behind, 0, x, SOLE);
        }
        go_down(w, one.node, one.state, one.place, one.begun, one.x, one.beside);
    }
    return w.full ? TOO_LONG : FOLLOWED;
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

// The value of a leaf.
int32_t value_of(RowWalk& w, const Leaf& leaf) {
    RowSets& sets = *w.sets;
    Known* known = leaf.x < 0 ? &sets.known(leaf) : nullptr;
    if (known && known->value >= 0) return known->value;
    const Where at = *sets.where.at(leaf.place);
    const Loop loop = sets.frames.loop(at.loop);
    int32_t low = 0, high = FOREVER, found = 0;
    if (leaf.x >= 0) low = std::max<int64_t>(w.low - leaf.x, 0), high = w.high == FOREVER ? FOREVER : w.high - leaf.x;
    if (at.loop && at.count == IN_REGISTER) {
        const bool is_open = loop.high == FOREVER;
        const int32_t enough = is_open ? std::max(loop.low - leaf.begun, 0) : FOREVER;         // from which count on it no longer matters
        Line lines[2];
        int n = 0;
        const auto add = [&](int32_t from, int32_t to, int32_t count) {
            std::vector<Config> configs{{leaf.state, at.stack, at.loop, count}};
            lines[n++] = {from, to, sets.set(false, configs)};
        };
        if (leaf.begun <= loop.high && enough) add(0, std::min(loop.high - leaf.begun, enough - 1), IN_REGISTER - leaf.begun);
        if (is_open) add(enough, FOREVER, loop.low);
        found = n ? sets.value(lines, n) : 0;
    } else if (low <= high && !(at.loop && (int64_t)at.count + leaf.begun > loop.high)) {
        std::vector<Config> configs;
        bool ends = false;
        if (at.loop) {
            configs.push_back({leaf.state, at.stack, at.loop, at.count + leaf.begun});
        } else {
            if (w.walk->goes_on[leaf.state]) configs.push_back({leaf.state, at.stack, 0, 0});
            if (w.walk->accepts[leaf.state]) {
                const int32_t after = sets.closure(at.stack);
                ends = sets.may_end(after), sets.add_configs(after, configs);
            }
        }
        const Line line{low, high, sets.set(ends, configs)};
        found = sets.value(&line, 1);
    }
    if (known) known->value = found;
    return found;
}

// The first line of its value in the tables. Most are plain, readings that go on in a piece without a count, and need no set.
int32_t line_of(RowWalk& w, const Leaf& leaf) {
    RowSets& sets = *w.sets;
    Known* known = leaf.x < 0 ? &sets.known(leaf) : nullptr;
    if (known && known->line >= 0) return known->line;
    const bool plain = known && sets.endings[leaf.place].between < 0 && !w.walk->accepts[leaf.state];
    const int32_t line = plain ? sets.line_of(leaf.state, sets.where.at(leaf.place)->stack) : sets.entry(value_of(w, leaf));
    if (known) known->line = line;
    return line;
}

int32_t class_value(RowWalk& w, int32_t cls) {
    if (!w.class_values) return 0;
    if (w.class_values[cls] < 0) w.class_values[cls] = value_of(w, w.class_leaves[cls - 1]);
    return w.class_values[cls];
}

// What a group's tokens lead to, a line; SAME: what their class does.
int32_t value_of_group(RowWalk& w, int64_t pair, std::vector<int32_t>& parts) {
    const Leaf* leaves = (const Leaf*)w.leaves;
    const int64_t before = pair >> 32;
    const bool has_class = before < 0 && w.vec && w.vec[~before % INSTEAD];
    if (before < 0 && (~before >= INSTEAD || !has_class)) {     // one leaf and nothing else
        const int32_t line = line_of(w, leaves[(int32_t)pair]);
        return line || has_class ? line : SAME;
    }
    parts.clear();
    int64_t at = pair;
    for (; parts.push_back(value_of(w, leaves[(int32_t)at])), at >> 32 >= 0;) at = w.pairs[at >> 32];
    at = ~(at >> 32);
    const int32_t base = class_value(w, at % INSTEAD);
    if (at < INSTEAD) parts.push_back(base);
    const int32_t value = w.sets->join_all(parts);
    return value == base ? SAME : w.sets->entry(value);
}

// The value of each token, without those that are as their class says. It may be stopped, and called again.
int settle(RowWalk& w) {
    std::vector<int32_t> lines(w.num_pairs, UNKNOWN), parts;
    for (int64_t i = 0; i < w.num_tokens; i++) {
        int32_t& line = lines[w.groups[i]];
        if (line == UNKNOWN) line = value_of_group(w, w.pairs[w.groups[i]], parts);
        w.values[i] = line;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < w.num_tokens; i++)
        if (w.values[i] != SAME) w.tokens[kept] = w.tokens[i], w.values[kept++] = w.values[i];
    w.num_tokens = kept;
    return FOLLOWED;
}

// Whether few tokens begin in a state, as it seems: it moves on few bytes, and so do those that it leads to by what much begins with. EXPAND_STATE: that
// is not known yet; TOO_LONG: no.
int is_sparse(RowWalk& w, int32_t state) {
    const Walk& t = *w.walk;
    w.unknown = state;
    if (!t.expanded[state]) return EXPAND_STATE;
    if (alive(t, state) >= BROAD) return TOO_LONG;
    for (int byte = 0; byte < 256; byte++) {
        const int32_t to = t.delta[256 * (int64_t)state + byte];
        if (to < 0 || !has(w.far, byte)) continue;
        w.unknown = to;
        if (!t.expanded[to]) return EXPAND_STATE;
        if (alive(t, to) >= BROAD) return TOO_LONG;
    }
    return FOLLOWED;
}

// Where the row of a state begins: in its readings, and behind the repeats that may end there. What is a wide piece is no seed; there may be one.
int find_seeds(RowWalk& w, int32_t state) {
    RowSets& sets = *w.sets;
    const int32_t list = sets.key_of_state.at(state);
    const std::vector<Config> configs(sets.keys.at(list) + 1, sets.keys.at(list) + sets.keys.length(list));
    sets.seeds.clear();
    w.low = w.high = 0;
    const auto add = [&](const Config& one, int32_t x) { sets.seeds.push_back({one.q, sets.place({one.stack, one.loop, one.count}), x, SOLE, false}); };
    for (const Config& one : configs) {
        add(one, -1);
        if (one.loop && one.count == IN_REGISTER) w.low = sets.frames.loop(one.loop).low, w.high = sets.frames.loop(one.loop).high;
    }
    for (const Config& one : configs) {
        if (!one.loop || one.q != sets.frames.loop(one.loop).between || !(one.count == IN_REGISTER || sets.is_between(one))) continue;
        const int32_t set = sets.closure(one.stack);
        const std::vector<Config> after(sets.sets.at(set) + 1, sets.sets.at(set) + sets.sets.length(set));
        for (const Config& next : after) add(next, one.count == IN_REGISTER ? 0 : -1);
    }
    sets.piece_number = -1;
    size_t n = 0;
    for (Seed seed : sets.seeds) {
        const bool counted = sets.where.at(seed.place)->loop;
        int32_t& piece = sets.told().of(seed.state, counted);
        if (piece == UNASKED) {
            const int how = is_sparse(w, seed.state);
            if (how == EXPAND_STATE) return how;
            if (how == FOLLOWED) piece = SPARSE;
        }
        if (piece == UNASKED) {
            w.unknown = seed.state, w.counted = counted;
            return ASK_PIECE;
        }
        if (piece < 0) {
            seed.is_long = piece == SURELY_SPARSE;
            sets.seeds[n++] = seed;
        } else if (sets.piece_number >= 0) {
            return TOO_LONG;
        } else {
            sets.wide = seed, sets.piece_number = piece;
        }
    }
    sets.seeds.resize(n);
    return FOLLOWED;
}

// What the row has of its wide piece: the map, the lines of its classes, and a seed more if it is that of a state beside it.
void take_piece(RowWalk& w) {
    RowSets& sets = *w.sets;
    const Piece& piece = sets.told().pieces[sets.piece_number];
    w.map = piece.map, w.which = piece.which, w.num_lines = piece.num_classes + 1;
    sets.class_leaves.clear(), sets.class_values.assign(w.num_lines, -1), sets.class_lines.assign(w.num_lines, 0);
    for (int64_t i = 0; i < piece.num_classes; i++)
        sets.class_leaves.push_back({sets.wide.place, piece.classes[2 * i], piece.classes[2 * i + 1], sets.wide.x});
    sets.class_values[0] = 0;
    w.vec = sets.class_lines.data(), w.class_leaves = sets.class_leaves.data(), w.class_values = sets.class_values.data();
    for (int64_t i = 1; i < w.num_lines; i++) sets.class_lines[i] = line_of(w, sets.class_leaves[i - 1]);
    if (piece.beside >= 0) sets.seeds.push_back({sets.wide.state, sets.wide.place, sets.wide.x, (int32_t)piece.beside, false});
}

// What comes behind its wide piece.
int go_on_behind(RowWalk& w) {
    RowSets& sets = *w.sets;
    const Exits& exits = sets.told().pieces[sets.piece_number].exits;
    if (!exits.n) return FOLLOWED;
    if (sets.endings[sets.wide.place].after < 0 && (w.unknown = sets.end(sets.wide.place, w.walk->expanded)) != FOREVER) return EXPAND_STATE;
    end_at(w, sets.wide.place, exits, sets.wide.x);
    return FOLLOWED;
}

// The whole row of a state with up to one wide piece, as most have; others are left to Python: TOO_LONG, LEFT_OUT. It may be stopped, and goes on.
int read_row(RowWalk& w, int32_t state) {
    RowSets& sets = *w.sets;
    if (w.seed < 0) {
        if (const int how = find_seeds(w, state); how != FOLLOWED) return how;
        if (sets.piece_number >= 0) take_piece(w);
        w.seed = 0;
    }
    for (const int64_t n = sets.seeds.size();; w.seed++) {
        if (w.seed)
            if (const int how = follow_readings(w); how != FOLLOWED) return how;
        if (w.seed > n) break;
        w.room = w.most;
        if (w.seed == n) {
            if (const int how = sets.piece_number >= 0 ? go_on_behind(w) : FOLLOWED; how != FOLLOWED) return how;
            continue;
        }
        const Seed seed = sets.seeds[w.seed];
        for (const int32_t one : {seed.state, seed.beside}) {
            w.unknown = one;
            if (one >= 0 && !w.walk->expanded[one]) return EXPAND_STATE;
        }
        if (!seed.is_long) w.room = std::min(w.size + w.narrow, w.most);
        go_down(w, 0, seed.state, seed.place, 0, seed.x, seed.beside);
    }
    if (w.num_left) return LEFT_OUT;
    if (gather(w) != FOLLOWED) return TOO_LONG;
    return settle(w);
}

// ---- byte by byte

// The readings that may go on, those behind a repeat that may end here included. Their states are expanded, or EXPAND_STATE.
int find_waiting(RowWalk& w, int32_t set, std::vector<Config>& waiting) {
    RowSets& sets = *w.sets;
    waiting.clear();
    sets.add_configs(set, waiting);
    for (size_t i = 0, n = waiting.size(); i < n; i++)
        if (waiting[i].loop && sets.is_between(waiting[i])) sets.add_configs(sets.closure(waiting[i].stack), waiting);
    const auto is_full = [&](const Config& c) {
        return c.loop && c.q == sets.frames.loop(c.loop).between && c.count >= sets.frames.loop(c.loop).high;
    };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_full), waiting.end());
    for (const Config& one : waiting) {
        w.unknown = one.q;
        if (!w.walk->expanded[one.q]) return EXPAND_STATE;
    }
    return FOLLOWED;
}

// Whether the text may end in a set.
bool ends(RowSets& sets, int32_t set) {
    bool any = sets.may_end(set);
    for (int64_t i = 1; i < sets.sets.length(set) && !any; i++) {
        const Config one = sets.sets.at(set)[i];
        any = one.loop && sets.is_between(one) && sets.may_end(sets.closure(one.stack));
    }
    return any;
}

// The set after a byte, -1.
int32_t advance_set(RowWalk& w, const std::vector<Config>& waiting, int byte) {
    RowSets& sets = *w.sets;
    std::vector<Config> configs;
    bool may_end = false;
    for (const Config& one : waiting) {
        const int32_t to = w.walk->delta[256 * (int64_t)one.q + byte];
        if (to < 0) continue;
        if (one.loop) {
            configs.push_back({to, one.stack, one.loop, one.count + (one.q == sets.frames.loop(one.loop).between)});
            continue;
        }
        if (w.walk->goes_on[to]) configs.push_back({to, one.stack, 0, 0});
        if (!w.walk->accepts[to]) continue;
        const int32_t after = sets.closure(one.stack);
        may_end |= sets.may_end(after), sets.add_configs(after, configs);
    }
    return configs.empty() && !may_end ? -1 : sets.set(may_end, configs);
}

// From a set on, along `text`; or, without one, along the bytes that must follow, up to a choice or a possible end, which are written to it. `size`:
// so many at most; `budget`: of readings on the way. `set`, -1 at a byte that may not come, and `at` say how far it is. It may be stopped, and goes on.
int go_along(RowWalk& w, uint8_t* text, bool is_given, int64_t size, int64_t budget) {
    std::vector<Config> waiting;
    for (; w.at < size && w.set >= 0; w.at++) {
        if (!is_given && (w.work >= budget || ends(*w.sets, w.set))) return FOLLOWED;
        if (const int how = find_waiting(w, w.set, waiting); how != FOLLOWED) return how;
        if (!is_given) {
            uint64_t alive[4] = {};
            int number = 0;
            for (const Config& one : waiting)
                for (int byte = 0; byte < 256; byte++)
                    if (w.walk->delta[256 * (int64_t)one.q + byte] >= 0 && !has(alive, byte)) {
                        alive[byte >> 6] |= (uint64_t)1 << (byte & 63), number++;
                        text[w.at] = byte;
                    }
            if (number != 1) return FOLLOWED;
        }
        const int32_t to = advance_set(w, waiting, text[w.at]);
        for (int64_t i = 1; i < w.sets->sets.length(w.set); i++) w.work += 1 + w.sets->size_of(w.sets->sets.at(w.set)[i].stack);
        w.set = to;
    }
    return FOLLOWED;
}

}  // namespace
