// Attention over a work list (attention.py says what the items are), out of a paged pool, through the slot table.
//
//     for every (item of the plan, kv head), shared out over the threads:      M query rows = tokens x heads of the group
//       for every block of 128 columns:
//         K, V rows of the block's slots --pack--> K^T [D, 128], V [128, D]     in scratch, once for all M rows
//         for every 48 rows:  S = Q K^T -> mask, online softmax -> P;   acc = acc * correction + P V
//       acc / sum -> out, or (acc, log-sum-exp) -> partials, merged per token at the end
//
// A row's scores are raised to powers over a reference that need not be their maximum: it moves only when a score has passed it by SLACK, so most
// blocks correct nothing and reduce no register. With bfloat16, P is rounded where it is multiplied; sums are float. Columns that no token of an
// item sees are never read: they may hold anything.
#pragma once

#include "products.h"

namespace {

constexpr int CB = 128, GROUP = 48;  // columns of a block; rows that go through both of its products before the next: a multiple of 16 and MR
constexpr float SLACK = 8;           // by so much (in base 2) a score may pass the reference of its row before that is moved

struct Attention {  // one layer; native.py has the same list of fields. Strides in elements
    const void *q, *k_cache, *v_cache;   // [T, H, D], [S, G, D] twice, strided alike; D even
    void* out;                           // [T, H, D], contiguous
    float *part, *part_lse;              // [P, H, D], [P, H]
    const int32_t *items, *segment, *seg_first, *shifts, *table;
    const int64_t *cols, *base, *bits;   // [T]; base and bits null without a draft tree
    const float* sinks;                  // [H] or null
    int64_t q_stride, q_head_stride, slot_stride, table_stride, num_items, tokens;
    int32_t heads, kv_heads, dim, window, merges, threads;
    float scale, softcap;
};

// Where a token is in its text, and its window ends: a node of a draft tree lies as many columns behind the base as it has ancestors, or further on.
inline int64_t position(const Attention& a, int64_t token) {
    const int64_t col = a.cols[token];
    return !a.base || a.base[token] > col ? col : a.base[token] + __builtin_popcountll(a.bits[token]) - 1;
}

// Which nodes of its tree a token sees, as bits: all of its path, or the last ones, which are the highest.
inline uint64_t path(const Attention& a, int64_t token) {
    if (!a.bits) return 0;
    uint64_t bits = a.bits[token];
    if (a.window)
        for (int n = __builtin_popcountll(bits); n > a.window; n--) bits &= bits - 1;
    return bits;
}

struct Scratch {  // of one thread; grows, and is kept
    std::vector<float> q, kt, v, s, p, acc;
    std::vector<float> top, total;  // per row: its reference (in base 2), and in a register's parts the sum of 2^(score - reference)
};

// K of VL columns from `d` on (in floats, or in pairs), transposed into kt. FULL: all columns and entries are there.
template <class T, bool FULL> inline void pack_k(const T* rows, const int32_t* slots, int64_t stride, int n, int left, float* kt) {
    vec r[VL];
    for (int i = 0; i < VL; i++) {
        if (!FULL && i >= n) { r[i] = vec{}; continue; }
        const T* row = rows + slots[i] * stride;
        if constexpr (PAIRED<T>) r[i] = FULL ? load((const float*)row) : load((const float*)row, left);
        else r[i] = FULL ? load(row) : load(row, left);
    }
    transpose<VL / 2>(r);
    for (int i = 0; i < VL; i++)
        if (FULL || i < left) store(kt + i * CB, r[i]);
}

inline hvec half_row(const bf16* p, int n) {  // n may be anything
    hvec h{};
    if (n >= VL) memcpy(&h, p, sizeof h); else if (n > 0) memcpy(&h, p, n * 2);
    return h;
}

// Fetches n slots' entries of one head, or of all: a slot's heads lie side by side, and memory gives neighbours in half the time. A slot's first
// entry is read: CPUs drop the prefetch of an address whose page they do not know, and pools are larger than what they know.
template <class T> void fetch_rows(const Attention& a, const void* cache, const int32_t* slots, int n, int head, bool all) {
    const int64_t first = all ? 0 : head * a.dim, last = all ? a.kv_heads * a.dim : first + a.dim;
    for (int c = 0; c < n; c++) {
        const T* row = (const T*)cache + slots[c] * a.slot_stride;
        (void)*(const volatile char*)(row + first);
        for (int64_t d = first + 64 / sizeof(T); d < last; d += 64 / sizeof(T)) fetch(row + d);
    }
}

// One block of K and V, out of their slots into scratch: kt [depth, CB], and v [CB, width] (pairs: [CB / 2, width]). Fetches `more` slots behind it
// meanwhile: they may lie anywhere, no CPU guesses where.
template <class T>
void pack(const Attention& a, const int32_t* slots, int n, int more, int head, bool all, float* kt, float* v, int64_t width) {
    const T *k_rows = (const T*)a.k_cache + (int64_t)head * a.dim, *v_rows = (const T*)a.v_cache + (int64_t)head * a.dim;
    const int depth = PAIRED<T> ? a.dim / 2 : a.dim, step = PAIRED<T> ? 2 * VL : VL;
    auto next = [&](const void* cache, int c, int count) { fetch_rows<T>(a, cache, slots + n + c, std::clamp(more - c, 0, count), head, all); };
    for (int c = 0; c < up(n, 32); next(a.k_cache, c, VL), c += VL)
        for (int d = 0; d < depth; d += VL) {
            const bool full = c + VL <= n && d + VL <= depth;
            auto one = full ? pack_k<T, true> : pack_k<T, false>;
            one(k_rows + d / VL * step, slots + c, a.slot_stride, n - c, depth - d, kt + d * CB + c);
        }
    if constexpr (PAIRED<T>) {
        for (int c = 0; c < up(n, 32); next(a.v_cache, c, 2), c += 2) {
            const bf16 *low = v_rows + (c < n ? slots[c] : 0) * a.slot_stride, *high = v_rows + (c + 1 < n ? slots[c + 1] : 0) * a.slot_stride;
            for (int d = 0; d < width; d += VL) {
                const hvec x = half_row(low + d, c < n ? a.dim - d : 0), y = half_row(high + d, c + 1 < n ? a.dim - d : 0);
                store(v + c / 2 * width + d, (vec)(__builtin_convertvector(x, uvec) | __builtin_convertvector(y, uvec) << 16));
            }
        }
    } else {
        for (int c = 0; c < n; next(a.v_cache, c, 1), c++)
            for (int d = 0; d < width; d += VL)
                store(v + c * width + d, d < a.dim ? load(v_rows + slots[c] * a.slot_stride + d, a.dim - d) : vec{});
    }
}

// Scores s [columns] of one row -> p (floats, or bf16 as pairs), for columns lo <= c < hi; corrects the row's sums where its reference moves.
template <class T>
void softmax(const Attention& a, float* s, void* p, float* acc, int64_t width, int columns, float& top, float* total, int64_t lo, int64_t hi,
             uint64_t bits, int64_t tree) {
    if (a.softcap)
        for (int c = 0; c < columns; c++) s[c] = a.softcap * LOG2E * std::tanh(s[c] * a.scale / a.softcap);
    const float scale = a.softcap ? 1.f : a.scale * LOG2E;
    for (int c = 0; c < std::min<int64_t>(lo, columns); c++) s[c] = NOTHING;
    for (int c = std::max<int64_t>(hi, 0); c < columns; c++) s[c] = NOTHING;
    for (int64_t c = std::max<int64_t>({tree, lo, 0}); c < std::min<int64_t>(hi, columns); c++)
        if (c - tree > 63 || !(bits >> (c - tree) & 1)) s[c] = NOTHING;
    vec most = splat(NOTHING), sums = load(total);
    for (int c = 0; c < columns; c += VL) most = larger(load(s + c), most);
    if (any(most * scale > splat(top + SLACK))) {
        const float now = largest(most) * scale, fix = top == NOTHING ? 0.f : exp2s(top - now);
        for (int d = 0; d < width; d += VL) store(acc + d, load(acc + d) * fix);
        sums *= fix;
        top = now;
    }
    const vec shift = splat(top == NOTHING ? 0.f : top);
    for (int c = 0; c < columns; c += VL) {
        const vec e = exp2v(load(s + c) * scale - shift);
        sums += e;
        if constexpr (PAIRED<T>) store((bf16*)p + c, e); else store((float*)p + c, e);
    }
    store(total, sums);
}

// One item, one KV head. `all`: whether the other heads come next in this thread
template <class T> void attend(const Attention& a, const int32_t* item, int head, bool all, Scratch& scratch) {
    const int q_start = item[0], q_len = item[1], group = a.heads / a.kv_heads, rows = q_len * group;
    const int64_t depth = up(a.dim, 32) / (PAIRED<T> ? 2 : 1), width = up(a.dim, std::max(VL, 16));
    const int64_t p_stride = PAIRED<T> ? CB / 2 : CB, room = up(rows, 16) + 16;  // a product from any row on may run over
    float *q = grown(scratch.q, room * depth), *kt = grown(scratch.kt, depth * CB), *v = grown(scratch.v, CB * width);
    float *s = grown(scratch.s, GROUP * CB), *p = grown(scratch.p, GROUP * p_stride);
    float *acc = grown(scratch.acc, room * width);
    float *top = grown(scratch.top, rows), *total = grown(scratch.total, rows * VL);
    memset(q, 0, room * depth * 4), memset(kt, 0, depth * CB * 4), memset(acc, 0, room * width * 4);
    int64_t first = INT64_MAX, last = -1;
    for (int t = 0; t < q_len; t++) {
        first = std::min(first, position(a, q_start + t)), last = std::max(last, a.cols[q_start + t]);
        for (int h = 0; h < group; h++) {
            const T* from = (const T*)a.q + (q_start + t) * a.q_stride + (int64_t)(head * group + h) * a.q_head_stride;
            float* to = q + (int64_t)(t * group + h) * depth;
            if constexpr (PAIRED<T>) memcpy(to, from, a.dim * 2);
            else for (int d = 0; d < a.dim; d += VL) store(to + d, load(from + d, a.dim - d), a.dim - d);
        }
    }
    std::fill(top, top + rows, NOTHING), std::fill(total, total + rows * VL, 0.f);

    const int64_t end = std::min<int64_t>(item[4], last + 1);
    const int64_t start = a.window ? std::max<int64_t>(item[3], first - a.window + 1) : item[3];
    const int32_t* slots = a.table + item[2] * a.table_stride;
    for (const void* cache : {a.k_cache, a.v_cache}) fetch_rows<T>(a, cache, slots + start, std::clamp<int64_t>(end - start, 0, CB), head, all);
    for (int64_t c0 = start; c0 < end; c0 += CB) {
        const int n = std::min<int64_t>(CB, end - c0);
        auto lo = [&](int t) { return a.window ? position(a, q_start + t) - a.window + 1 - c0 : 0; };
        auto hi = [&](int t) { return std::min<int64_t>(n, a.cols[q_start + t] + 1 - c0); };
        int t0 = 0, t1 = q_len;  // the tokens between which some see a column of this block
        while (t0 < t1 && (hi(t0) <= 0 || lo(t0) >= n)) t0++;
        while (t0 < t1 && (hi(t1 - 1) <= 0 || lo(t1 - 1) >= n)) t1--;
        if (t0 == t1) continue;
        const int columns = up(n, 32);
        pack<T>(a, slots + c0, n, (int)std::min<int64_t>(CB, end - c0 - n), head, all, kt, v, width);
        for (int r0 = t0 * group, r1 = t1 * group; r0 < r1; r0 += GROUP) {
            const int some = std::min(GROUP, r1 - r0);
            product<false, PAIRED<T>>(q + r0 * depth, depth, kt, CB, s, CB, some, columns, depth);
            for (int i = 0; i < some; i++) {
                const int r = r0 + i, t = r / group;
                softmax<T>(a, s + i * CB, p + i * p_stride, acc + r * width, width, columns, top[r], total + r * VL, lo(t), hi(t),
                           path(a, q_start + t), a.base ? a.base[q_start + t] - c0 : CB);
            }
            if (PAIRED<T>) memset(p + some * p_stride, 0, (up(some, 16) - some) * p_stride * 4);  // what tiles multiply beyond
            product<true, PAIRED<T>>(p, p_stride, v, width, acc + r0 * width, width, some, width, PAIRED<T> ? columns / 2 : n);
        }
    }

    for (int r = 0; r < rows; r++) {
        const int t = r / group, h = head * group + r % group;
        float sum = ::sum(load(total + r * VL));
        if (item[5] < 0) {
            if (a.sinks) sum += exp2s(a.sinks[h] * LOG2E - top[r]);  // infinite where the token saw nothing: 0 comes out
            T* to = (T*)a.out + ((int64_t)(q_start + t) * a.heads + h) * a.dim;
            for (int d = 0; d < a.dim; d += VL) store(to + d, sum ? load(acc + r * width + d) / sum : vec{}, a.dim - d);
        } else {
            const int64_t at = (int64_t)(item[5] + t) * a.heads + h;
            for (int d = 0; d < a.dim; d += VL) store(a.part + at * a.dim + d, sum ? load(acc + r * width + d) / sum : vec{}, a.dim - d);
            a.part_lse[at] = sum ? top[r] + std::log2(sum) : NOTHING;
        }
    }
}

template <class T> void merge(const Attention& a, int64_t token, int head) {
    const int32_t *shift = a.shifts + a.seg_first[a.segment[token]], *end = a.shifts + a.seg_first[a.segment[token] + 1];
    if (shift == end) return;
    float top = a.sinks ? a.sinks[head] * LOG2E : NOTHING;
    for (auto s = shift; s < end; s++) top = std::max(top, a.part_lse[(token + *s) * a.heads + head]);
    float total = a.sinks ? exp2s(a.sinks[head] * LOG2E - top) : 0.f;
    for (auto s = shift; s < end; s++) total += top == NOTHING ? 0.f : exp2s(a.part_lse[(token + *s) * a.heads + head] - top);
    T* to = (T*)a.out + (token * a.heads + head) * a.dim;
    for (int d = 0; d < a.dim; d += VL) {
        vec x{};
        for (auto s = shift; s < end; s++) {
            const int64_t at = (token + *s) * a.heads + head;
            const float weight = top == NOTHING ? 0.f : exp2s(a.part_lse[at] - top) / total;
            if (weight != 0) x += load(a.part + at * a.dim + d, a.dim - d) * weight;
        }
        store(to + d, x, a.dim - d);
    }
}

// Every thread of a team, between two meetings; its tiles are set up
template <class T> void run_attention(const Attention& a, Team& team) {
    static thread_local Scratch scratch;
    const int64_t chunk = a.num_items < 4 * a.threads ? 1 : a.kv_heads;
#pragma omp for schedule(dynamic, chunk) nowait
    for (int64_t i = 0; i < a.num_items * a.kv_heads; i++)
        attend<T>(a, a.items + i / a.kv_heads * 6, i % a.kv_heads, chunk > 1 && i % chunk == 0, scratch);
    if (!a.merges) return;
    team.meet();
#pragma omp for nowait
    for (int64_t i = 0; i < a.tokens * a.heads; i++) merge<T>(a, i / a.heads, i % a.heads);
}

}  // namespace
