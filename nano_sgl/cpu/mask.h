// Grammars' tables: which logits to mask, and the states after tokens. masks.py is the twin.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t MASK_BLOCK = 1 << 14;  // tokens, at least, of a part of a row

// Pools as in masks.py. `others` are the tokens of each map's classes but the largest, by class, each class in order; shapes[map]: where in
// `firsts` the map's offsets into `others` begin (one more than classes), the number of classes, the largest.
struct Grammars {
    const int16_t* maps;
    const int32_t *vec, *over_token, *over_value, *lines, *states, *shapes, *firsts, *others;
    const int64_t* ends;
    int64_t map_stride, last_state, size, num_ends;
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

// What may not come next becomes -infinity, of tokens begin to end of a row. If the largest class may come, the others that may not are written
// one by one; else everything is. What may come all the same is read before and put back.
void mask(const Grammars& g, int64_t state, float* row, int64_t begin, int64_t end) {
    struct Part { const int32_t* tokens; int64_t n; };
    static thread_local struct { std::vector<Part> parts; std::vector<int32_t> tokens; std::vector<float> values; } scratch;
    const Entry e = entry_of(g, state);
    if (e.map < 0) return;
    const int32_t count = state >> 32, *shape = g.shapes + 3 * e.map, *first = g.firsts + shape[0], *vec = g.vec + e.vec;
    const bool most = line_of(g, vec[shape[2]], count);
    Part* const parts = grown(scratch.parts, shape[1] + 1);  // those to write if `most`, else those to keep
    int32_t* const single = grown(scratch.tokens, e.end - e.over + g.num_ends);
    int64_t num_parts = 0, num_single = 0, size = 0;
    for (int64_t c = 0; c < shape[1]; c++) {
        const int32_t *from = g.others + first[c], *to = g.others + first[c + 1];
        if (from == to || bool(line_of(g, vec[c], count)) == most) continue;
        if (begin > 0) from = std::lower_bound(from, to, (int32_t)begin);
        if (end < g.size) to = std::lower_bound(from, to, (int32_t)end);
        parts[num_parts++] = {from, to - from}, size += to - from;
    }
    for (int64_t i = e.over; i < e.end; i++) {
        const int32_t token = g.over_token[i];
        if (begin <= token && token < end && line_of(g, g.over_value[i], count)) single[num_single++] = token;
    }
    for (int64_t i = 0; i < g.num_ends && e.accept_from <= count; i++)
        if (begin <= g.ends[i] && g.ends[i] < end) single[num_single++] = g.ends[i];
    float* const values = grown(scratch.values, num_single + (most ? 0 : size));
    const auto each = [&](auto visit) {  // what is kept
        float* value = values;
        for (int64_t i = 0; i < num_single; i++) visit(row[single[i]], *value++);
        for (int64_t p = 0; p < num_parts && !most; p++)
            for (int64_t i = 0; i < parts[p].n; i++) visit(row[parts[p].tokens[i]], *value++);
    };
    each([](float logit, float& value) { value = logit; });
    for (int64_t p = 0; p < num_parts && most; p++)
        for (int64_t i = 0; i < parts[p].n; i++) row[parts[p].tokens[i]] = NOTHING;
    for (int64_t i = begin; i < end && !most; i += VL) store(row + i, splat(NOTHING), std::min<int64_t>(VL, end - i));
    each([](float& logit, float value) { logit = value; });
}

}  // namespace
