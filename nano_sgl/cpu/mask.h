// Grammars' tables: which logits to mask, and the states after tokens. masks.py is the twin.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t MASK_BLOCK = 1 << 14;             // tokens, at least, of a part of a row
constexpr int64_t REMEMBERED = 128, A_FEW = 16;      // rows; a list has at most this part of the vocabulary: more are faster mixed than written

// Pools as in masks.py. `others` are the tokens of each map's classes but the largest, by class, each class in order; shapes[map]: where in
// `firsts` the map's offsets into `others` begin (one more than classes), the number of classes, the largest.
struct Grammars {
    const int16_t* maps;
    const int32_t *vec, *over_token, *over_value, *lines, *states, *shapes, *firsts, *others;
    const int64_t* ends;
    int64_t map_stride, last_state, size, num_ends, id;
};

struct Entry { int32_t map, vec, over, end, accept_from; };  // of a state; map -1: it has no row

inline Entry entry_of(const Grammars& g, int64_t state) {  // the last one is empty
    return ((const Entry*)g.states)[std::min(state & 0xffffffff, g.last_state)];
}

// Of a value's lines (min, max, next state, op) the one that holds; null if none does
inline const int32_t* line_of(const Grammars& g, int64_t value, int32_t count) {
    for (const int32_t* line = g.lines + 4 * value;; line += 4) {
        if (line[0] <= count && count <= line[1]) return line;
        if (!(line[3] & 1)) return nullptr;
    }
}

inline int64_t advance(const Grammars& g, int64_t state, int64_t token) {
    const Entry e = entry_of(g, state);
    if (e.map < 0 || token < 0 || token >= g.size) return -1;
    const int32_t *end = g.over_token + e.end, *at = std::lower_bound(g.over_token + e.over, end, (int32_t)token);
    const int32_t value = at < end && *at == token ? g.over_value[at - g.over_token] : g.vec[e.vec + g.maps[e.map * g.map_stride + token]];
    const int64_t count = state >> 32;
    const int32_t* line = line_of(g, value, count);
    return line ? line[2] | ((line[3] & 2 ? count : 0) + (line[3] >> 2)) << 32 : -1;
}

// How much of a row is written, at least: all of it, or what is in class 0, which never may come
inline int64_t written(const Grammars& g, int64_t state, int64_t size) {
    const Entry e = entry_of(g, state);
    if (e.map < 0) return 0;
    const int32_t *shape = g.shapes + 3 * e.map, *first = g.firsts + shape[0];
    return line_of(g, g.vec[e.vec + shape[2]], state >> 32) ? first[1] - first[0] : size;
}

// Whether one of a value's lines holds, and the counts around this one for which that is so: [low, high] becomes no wider
inline bool holds(const Grammars& g, int64_t value, int32_t count, int32_t& low, int32_t& high) {
    for (const int32_t* line = g.lines + 4 * value;; line += 4) {
        const bool inside = line[0] <= count && count <= line[1];
        if (inside || (count > line[1] && line[0] <= line[1])) low = std::max(low, inside ? line[0] : line[1] + 1);
        if (inside || (count < line[0] && line[0] <= line[1])) high = std::min(high, inside ? line[1] : line[0] - 1);
        if (inside || !(line[3] & 1)) return inside;
    }
}

// What may come next after a state, and after its like with low to high characters: `most` tokens but few, or few. Those few are listed, in
// order; or, if they are many, their bits are set, which stand until this thread finds others.
struct Next {
    int64_t tables = 0, row = -1;
    int32_t low = 0, high = -1;
    bool most = false;
    std::vector<int32_t> few;
    const uint64_t* bits = nullptr;
};

// A text stays in a state, or comes back to it: each thread remembers what it found last, REMEMBERED rows.
const Next& next_of(const Grammars& g, int64_t state) {
    static thread_local std::vector<Next> found(REMEMBERED);
    static thread_local std::vector<uint64_t> scratch;
    static thread_local const Next* last = nullptr;  // whose bits those are
    const int64_t row = std::min(state & 0xffffffff, g.last_state);
    const int32_t count = state >> 32;
    Next& next = found[row % REMEMBERED];
    if (next.tables == g.id && next.row == row && next.low <= count && count <= next.high && (!next.bits || last == &next)) return next;
    last = &next;
    const Entry e = entry_of(g, state);
    const int32_t *shape = g.shapes + 3 * e.map, *first = g.firsts + shape[0], *vec = g.vec + e.vec;
    const int64_t words = up(g.size, 64) / 64;
    uint64_t* const bits = grown(scratch, words);
    std::fill_n(bits, words, 0);
    next.tables = g.id, next.row = row, next.low = 0, next.high = INT32_MAX;
    next.most = holds(g, vec[shape[2]], count, next.low, next.high);
    for (int64_t c = 0; c < shape[1]; c++)
        if (first[c] < first[c + 1] && holds(g, vec[c], count, next.low, next.high) != next.most)
            for (const int32_t *token = g.others + first[c], *end = g.others + first[c + 1]; token < end; token++)
                bits[*token / 64] |= 1ull << *token % 64;
    const auto allow = [&](int64_t token) {
        const uint64_t bit = 1ull << token % 64;
        bits[token / 64] = next.most ? bits[token / 64] & ~bit : bits[token / 64] | bit;
    };
    for (int64_t i = e.over; i < e.end; i++)
        if (holds(g, g.over_value[i], count, next.low, next.high)) allow(g.over_token[i]);
    for (int64_t i = 0; i < g.num_ends && e.accept_from <= count; i++) allow(g.ends[i]);
    if (e.accept_from <= count) next.low = std::max(next.low, e.accept_from);
    else next.high = std::min(next.high, e.accept_from - 1);
    int64_t size = 0;
    for (int64_t w = 0; w < words; w++) size += __builtin_popcountll(bits[w]);
    next.bits = size * A_FEW > g.size ? bits : nullptr;
    next.few.clear();
    for (int64_t w = 0; w < words && !next.bits; w++)
        for (uint64_t left = bits[w]; left; left &= left - 1) next.few.push_back(64 * w + __builtin_ctzll(left));
    return next;
}

// What may not come next becomes -infinity, of tokens begin to end of a row; begin is a multiple of 64. A few are written one by one; a few that are
// kept are set aside while the row is filled; else each register is mixed by its bits.
void mask(const Grammars& g, int64_t state, float* row, int64_t begin, int64_t end) {
    if (entry_of(g, state).map < 0) return;
    const Next& next = next_of(g, state);
    if (next.bits) {
        uvec lane;
        for (int i = 0; i < VL; i++) lane[i] = 1u << i;
        const uint64_t flip = next.most ? 0 : ~0ull;
        for (int64_t i = begin; i < end; i += VL) {
            const uvec forbidden = (uvec)(((uint32_t)((next.bits[i / 64] ^ flip) >> i % 64) & lane) != 0);
            const int n = std::min<int64_t>(VL, end - i);
            store(row + i, (vec)(((uvec)load(row + i, n) & ~forbidden) | ((uvec)splat(NOTHING) & forbidden)), n);
        }
        return;
    }
    const int32_t *from = std::lower_bound(next.few.data(), next.few.data() + next.few.size(), (int32_t)begin);
    const int64_t n = std::lower_bound(from, next.few.data() + next.few.size(), (int32_t)end) - from;
    if (next.most) {
        for (int64_t i = 0; i < n; i++) row[from[i]] = NOTHING;
        return;
    }
    static thread_local std::vector<float> scratch;
    float* const kept = grown(scratch, n);
    for (int64_t i = 0; i < n; i++) kept[i] = row[from[i]];
    for (int64_t i = begin; i < end; i += VL) store(row + i, splat(NOTHING), std::min<int64_t>(VL, end - i));
    for (int64_t i = 0; i < n; i++) row[from[i]] = kept[i];
}

}  // namespace
