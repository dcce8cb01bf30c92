// The CPU's kernels: those of kernels.py, the "cpp" backend of attention.py, and the draw of sampling.py.
//
// An eager torch operation costs microseconds before it does anything, and torch's attention wants contiguous keys, so a paged
// cache must first be gathered. Here each step between two products of a layer is one call, a product of few tokens reads the
// weights once (`linear`), a row of logits becomes a token in some six passes (`draw`), and attention reads the pool through the
// slot table:
//
//     for every (item of the plan, kv head), shared out over the threads:      M query rows = tokens x heads of the group
//       for every block of 64 columns:
//         K, V rows of the block's slots --pack--> K^T [D, 64], V [64, D]       in scratch, once for all M rows
//         S = Q K^T -> mask, online softmax -> P;   acc = acc * correction + P V
//       acc / sum -> out, or (acc, log-sum-exp) -> partials, merged per token at the end
//
// Both products are one micro kernel, rows x registers of accumulators. It multiplies in float, or, with bfloat16 tensors on a
// CPU that has them, by bf16 dot instructions on pairs (AVX512_BF16), or on AMX tiles where there are rows enough. The pairs of
// `pack` are what both of these want. Sums are float everywhere; P is rounded to bf16 only where it is multiplied as bf16.
//
// Top to bottom: registers (loads, stores, 2^x), the products, attention, what lies between products, linear, sampling, and the
// plain C functions on raw pointers that Python calls through ctypes (native.py), which releases the GIL. They check nothing.
//
// Vectors are GCC's (clang has them too), so the same source serves AVX-512, AVX2, NEON and SSE2. Threads are OpenMP's, resolved
// to the runtime that torch has loaded, so both share one pool; scratch belongs to a thread, so callers may be several. Columns
// that no token of an item sees are never read: they may hold anything.
//
// After: Goto and van de Geijn 2008 (micro kernels on packed panels), Dao 2022 (online softmax in blocks).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, NV = 4;  // floats in a register; registers in a row of the micro tile
#elif defined(__AVX2__)
constexpr int VL = 8, NV = 2;
#else
constexpr int VL = 4, NV = 4;
#endif
constexpr int MR = 6;   // rows of the micro tile: MR * NV accumulators, NV operands and a broadcast fill the register file
constexpr int CB = 64;  // columns of a block
constexpr float LOG2E = 1.44269504088896f, NOTHING = -INFINITY;

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef uint16_t hvec __attribute__((vector_size(VL * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };  // _Float16 is not in every compiler's C++

#if defined(__AVX512BF16__)
template <class T> constexpr bool PAIRED = std::is_same<T, bf16>::value;  // multiplied as pairs of bf16
#else
template <class T> constexpr bool PAIRED = false;
#endif

// ---- registers ------------------------------------------------------------------------------------------------------------

inline vec splat(float x) { return x - vec{}; }
inline vec shuffle(vec a, vec b, ivec at) {  // at: a constant; VL and above are of b
#if defined(__clang__)
    vec r;
    for (int i = 0; i < VL; i++) r[i] = at[i] < VL ? a[at[i]] : b[at[i] - VL];
    return r;
#else
    return __builtin_shuffle(a, b, at);
#endif
}

inline vec load(const float* p) { vec v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

inline vec load(const bf16* p) {
    hvec h; memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}
inline void store(bf16* p, vec v) {  // to nearest even; NaN stays NaN
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &narrow, sizeof narrow);
#else
    uvec u = (uvec)v;
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec nan = (uvec)(v != v);
    hvec h = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), hvec);
    memcpy(p, &h, sizeof h);
#endif
}
inline vec load(const f16* p) {
    hvec h; memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)h);
#else
    const uvec u = __builtin_convertvector(h, uvec), size = (u & 0x7fff) << 13;
    const vec finite = (vec)size * 0x1p112f;  // the exponent's bias; right for subnormal numbers too
    const uvec special = (uvec)(size >= 0x0f800000);
    return (vec)((u & 0x8000) << 16 | (special & (size | 0x7f800000)) | (~special & (uvec)finite));
#endif
}
inline void store(f16* p, vec v) {  // to nearest even
#if defined(__AVX512F__)
    const hvec h = (hvec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__) && defined(__F16C__)
    const hvec h = (hvec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else  // (Maratyszcza's FP16) adding a power of two in which the last place is that of the half rounds; too large becomes infinite first
    const uvec u = (uvec)v, twice = u << 1, top = twice & 0xff000000;
    const vec size = (vec)(u & 0x7fffffff) * 0x1p112f * 0x1p-110f + (vec)(((top > 0x71000000 ? top : uvec{} + 0x71000000) >> 1) + 0x07800000);
    const uvec bits = (uvec)size, finite = (bits >> 13 & 0x7c00) + (bits & 0x0fff);
    const hvec h = __builtin_convertvector((u >> 31 << 15) | (twice > 0xff000000 ? uvec{} + 0x7e00 : finite), hvec);
#endif
    memcpy(p, &h, sizeof h);
}

template <class T> inline vec load(const T* p, int n) {  // the first n; zeros behind them
    if (n >= VL) return load(p);
    T part[VL] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T> inline void store(T* p, vec v, int n) {
    if (n >= VL) return store(p, v);
    T part[VL];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}
template <class T> inline vec rounded(vec v) { T part[VL]; store(part, v); return load(part); }
template <> inline vec rounded<float>(vec v) { return v; }

template <int H = VL / 2> inline vec turned(vec v) {  // by H places
    ivec at{};
    for (int i = 0; i < VL; i++) at[i] = (i + H) % VL;
    return shuffle(v, v, at);
}
inline vec larger(vec a, vec b) { return a > b ? a : b; }  // b where one is NaN
template <int H = VL / 2> inline float sum(vec v) { v += turned<H>(v); if constexpr (H > 1) return sum<H / 2>(v); else return v[0]; }
template <int H = VL / 2> inline float largest(vec v) {
    v = larger(turned<H>(v), v);
    if constexpr (H > 1) return largest<H / 2>(v); else return v[0];
}

inline vec exp2v(vec x) {  // 2^x to 2e-7, from 0 to infinity; NaN stays
#if defined(__AVX512F__)
    const vec whole = (vec)_mm512_roundscale_ps((__m512)x, 8), f = (vec)_mm512_maskz_sub_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)whole, 4),
                                                                                            (__m512)x, (__m512)whole);
#else
    const vec y = x < -127.f ? splat(-127.f) : x > 129.f ? splat(129.f) : x;
    const vec whole = (y + 12582912.f) - 12582912.f, f = y - whole;  // to the nearest whole number
#endif
    vec p = splat(1.32670e-3f);  // fitted on [-1/2, 1/2]
    p = p * f + 9.67546e-3f;
    p = p * f + 5.550743e-2f;
    p = p * f + 2.4022122e-1f;
    p = p * f + 6.9314695e-1f;
    p = p * f + 1.f;
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const ivec power = __builtin_convertvector(whole == whole ? whole : vec{}, ivec) + 127;
    return p * (vec)((power < 255 ? power : 255) << 23);  // 255: infinity
#endif
}
inline float exp2s(float x) { return exp2v(splat(x))[0]; }

// Transposes VL registers of VL floats: halves change places, then quarters of halves, and so on.
template <int H> inline void transpose(vec* r) {
    ivec low{}, high{};
    for (int i = 0; i < VL; i++) low[i] = i & H ? VL + i - H : i, high[i] = i & H ? VL + i : i + H;
    for (int i = 0; i < VL; i++)
        if (!(i & H)) {
            const vec a = r[i], b = r[i + H];
            r[i] = shuffle(a, b, low), r[i + H] = shuffle(a, b, high);
        }
    if constexpr (H > 1) transpose<H / 2>(r);
}

// ---- the products -----------------------------------------------------------------------------------------------------------

// c[i][0 .. N * VL) (+)= sum over d of a[i][d] * b[d][..], for R rows. Strides in floats. With PAIRS a and b hold pairs of bf16.
template <int R, int N, bool ADD, bool PAIRS>
void micro(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int depth) {
    vec acc[R][N];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) acc[i][j] = ADD ? load(c + i * c_stride + j * VL) : vec{};
    for (int d = 0; d < depth; d++) {
        vec right[N];
        for (int j = 0; j < N; j++) right[j] = load(b + d * b_stride + j * VL);
        for (int i = 0; i < R; i++) {
#if defined(__AVX512BF16__)
            if constexpr (PAIRS) {
                int pair; memcpy(&pair, a + i * a_stride + d, 4);
                for (int j = 0; j < N; j++)
                    acc[i][j] = (vec)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)right[j]);
                continue;
            }
#endif
            vec left = splat(a[i * a_stride + d]);
            for (int j = 0; j < N; j++) acc[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) store(c + i * c_stride + j * VL, acc[i][j]);
}

template <int R, bool ADD, bool PAIRS>
void row_panel(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int width, int depth) {
    int j = 0;
    for (; j + NV * VL <= width; j += NV * VL) micro<R, NV, ADD, PAIRS>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
    for (; j < width; j += VL) micro<R, 1, ADD, PAIRS>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
}

#if defined(__AMX_BF16__)
bool amx = false;  // whether the system lets this process use the tiles

// GCC's intrinsics do not say that tiles are read from memory. What stands before must be written there, and may not be left out.
inline void settle(const void* p = nullptr) { asm volatile("" : : "r"(p) : "memory"); }

struct TileScope {  // eight tiles of 16 rows of 64 bytes; afterwards what others (oneDNN) had set up in this thread
    struct alignas(64) Config { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } before, mine = {};
    const bool on;
    explicit TileScope(bool wanted) : on(amx && wanted) {
        if (!on) return;
        _tile_storeconfig(&before);
        mine.palette = 1;
        for (int i = 0; i < 8; i++) mine.bytes[i] = 64, mine.rows[i] = 16;
        settle(&mine);
        _tile_loadconfig(&mine);
    }
    ~TileScope() {
        if (!on) return;
        settle(&before);
        if (before.palette) _tile_loadconfig(&before); else _tile_release();
    }
};

// As micro, for 16 rows and N blocks of 16 columns: a [16, 32 * depth] bf16, b [16 * depth, ..] pairs.
template <int N, bool ADD>
inline void tile_micro(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int depth) {
#define EACH(DO) { DO(0) if constexpr (N > 1) DO(1) if constexpr (N > 2) DO(2) if constexpr (N > 3) DO(3) }
#define BEGIN(j) { if constexpr (ADD) _tile_loadd(j, c + j * 16, c_stride * 4); else _tile_zero(j); }
#define MULTIPLY(j) { _tile_loadd(5, b + d * 16 * b_stride + j * 16, b_stride * 4); _tile_dpbf16ps(j, 4, 5); }
#define END(j) _tile_stored(j, c + j * 16, c_stride * 4);
    EACH(BEGIN)
    for (int d = 0; d < depth; d++) {
        _tile_loadd(4, a + d * 16, a_stride * 4);
        EACH(MULTIPLY)
    }
    EACH(END)
#undef EACH
#undef BEGIN
#undef MULTIPLY
#undef END
}

template <bool ADD>
void tile_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows, int width,
                  int depth) {
    settle();
    for (int i = 0; i < rows; i += 16) {
        int j = 0;
        for (; j + 64 <= width; j += 64)
            tile_micro<4, ADD>(a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride, depth / 16);
        for (; j < width; j += 16)
            tile_micro<1, ADD>(a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride, depth / 16);
    }
}
#else
struct TileScope { explicit TileScope(bool) {} };
#endif

// c [rows, width] (+)= a [rows, depth] b [depth, width]. Room for rows up to the next multiple of 16; width a multiple of VL.
template <bool ADD, bool PAIRS>
void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows, int width,
             int depth) {
#if defined(__AMX_BF16__)
    if constexpr (PAIRS)
        if (amx && rows > MR) return tile_product<ADD>(a, a_stride, b, b_stride, c, c_stride, rows, width, depth);
#endif
    for (int i = 0; i < rows; i += MR) {
        auto run = row_panel<MR, ADD, PAIRS>;
        switch (rows - i) {
            case 1: run = row_panel<1, ADD, PAIRS>; break;
            case 2: run = row_panel<2, ADD, PAIRS>; break;
            case 3: run = row_panel<3, ADD, PAIRS>; break;
            case 4: run = row_panel<4, ADD, PAIRS>; break;
            case 5: run = row_panel<5, ADD, PAIRS>; break;
        }
        run(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, width, depth);
    }
}

// ---- attention --------------------------------------------------------------------------------------------------------------

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

struct Scratch {  // of one thread; grows, and is kept
    std::vector<float> q, kt, v, s, p, acc;
    std::vector<float> top, total;  // per row: largest score so far (in base 2), and the sum of 2^(score - top)
    template <class T> static T* room(std::vector<T>& x, size_t n) { if (x.size() < n) x.resize(n); return x.data(); }
};

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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

// One block of K and V, out of their slots into scratch: kt [depth, CB], and v [CB, width] (pairs: [CB / 2, width]).
template <class T>
void pack(const Attention& a, const int32_t* slots, int n, int head, float* kt, float* v, int64_t width) {
    const T *k_rows = (const T*)a.k_cache + (int64_t)head * a.dim, *v_rows = (const T*)a.v_cache + (int64_t)head * a.dim;
    const int depth = PAIRED<T> ? a.dim / 2 : a.dim, step = PAIRED<T> ? 2 * VL : VL;
    for (int c = 0; c < CB; c += VL)
        for (int d = 0; d < depth; d += VL) {
            const bool full = c + VL <= n && d + VL <= depth;
            auto one = full ? pack_k<T, true> : pack_k<T, false>;
            one(k_rows + d / VL * step, slots + c, a.slot_stride, n - c, depth - d, kt + d * CB + c);
        }
    if constexpr (PAIRED<T>) {
        for (int c = 0; c < up(n, 32); c += 2) {
            const bf16 *low = v_rows + (c < n ? slots[c] : 0) * a.slot_stride, *high = v_rows + (c + 1 < n ? slots[c + 1] : 0) * a.slot_stride;
            for (int d = 0; d < width; d += VL) {
                const hvec x = half_row(low + d, c < n ? a.dim - d : 0), y = half_row(high + d, c + 1 < n ? a.dim - d : 0);
                store(v + c / 2 * width + d, (vec)(__builtin_convertvector(x, uvec) | __builtin_convertvector(y, uvec) << 16));
            }
        }
    } else {
        for (int c = 0; c < n; c++)
            for (int d = 0; d < width; d += VL)
                store(v + c * width + d, d < a.dim ? load(v_rows + slots[c] * a.slot_stride + d, a.dim - d) : vec{});
    }
}

// Scores s [CB] of one row -> p (floats, or bf16 as pairs), for columns lo <= c < hi; corrects the row's sums.
template <class T>
void softmax(const Attention& a, float* s, void* p, float* acc, int64_t width, float& top, float& total, int64_t lo, int64_t hi,
             uint64_t bits, int64_t tree) {
    if (a.softcap)
        for (int c = 0; c < CB; c++) s[c] = a.softcap * LOG2E * std::tanh(s[c] * a.scale / a.softcap);
    const float scale = a.softcap ? 1.f : a.scale * LOG2E;
    for (int c = 0; c < std::min<int64_t>(lo, CB); c++) s[c] = NOTHING;
    for (int c = std::max<int64_t>(hi, 0); c < CB; c++) s[c] = NOTHING;
    for (int64_t c = std::max<int64_t>({tree, lo, 0}); c < std::min<int64_t>(hi, CB); c++)
        if (c - tree > 63 || !(bits >> (c - tree) & 1)) s[c] = NOTHING;
    vec most = splat(NOTHING);
    for (int c = 0; c < CB; c += VL) most = larger(load(s + c), most);
    const float now = std::max(top, largest(most) * scale);
    const vec shift = splat(now == NOTHING ? 0.f : now);
    vec sums = vec{};
    for (int c = 0; c < CB; c += VL) {
        const vec e = exp2v(load(s + c) * scale - shift);
        sums += e;
        if constexpr (PAIRED<T>) store((bf16*)p + c, e); else store((float*)p + c, e);
    }
    if (now != top) {
        const float fix = top == NOTHING ? 0.f : exp2s(top - now);
        for (int d = 0; d < width; d += VL) store(acc + d, load(acc + d) * fix);
        total *= fix;
        top = now;
    }
    total += sum(sums);
}

template <class T> void attend(const Attention& a, const int32_t* item, int head, Scratch& scratch) {
    const int q_start = item[0], q_len = item[1], group = a.heads / a.kv_heads, rows = q_len * group;
    const int64_t depth = up(a.dim, 32) / (PAIRED<T> ? 2 : 1), width = up(a.dim, std::max(VL, 16));
    const int64_t p_stride = PAIRED<T> ? CB / 2 : CB, room = up(rows, 16) + 16;  // a product from any row on may run over
    float *q = scratch.room(scratch.q, room * depth), *kt = scratch.room(scratch.kt, depth * CB), *v = scratch.room(scratch.v, CB * width);
    float *s = scratch.room(scratch.s, room * CB), *p = scratch.room(scratch.p, room * p_stride);
    float *acc = scratch.room(scratch.acc, room * width);
    float *top = scratch.room(scratch.top, rows), *total = scratch.room(scratch.total, rows);
    memset(q, 0, room * depth * 4), memset(kt, 0, depth * CB * 4), memset(acc, 0, room * width * 4);
    memset(p, 0, room * p_stride * 4);
    int64_t first = INT64_MAX, last = -1;
    for (int t = 0; t < q_len; t++) {
        first = std::min(first, a.cols[q_start + t]), last = std::max(last, a.cols[q_start + t]);
        for (int h = 0; h < group; h++) {
            const T* from = (const T*)a.q + (q_start + t) * a.q_stride + (int64_t)(head * group + h) * a.q_head_stride;
            float* to = q + (int64_t)(t * group + h) * depth;
            if constexpr (PAIRED<T>) memcpy(to, from, a.dim * 2);
            else for (int d = 0; d < a.dim; d += VL) store(to + d, load(from + d, a.dim - d), a.dim - d);
        }
    }
    std::fill(top, top + rows, NOTHING), std::fill(total, total + rows, 0.f);

    const int64_t end = std::min<int64_t>(item[4], last + 1);
    const int64_t start = a.window ? std::max<int64_t>(item[3], first - a.window + 1) : item[3];
    for (int64_t c0 = start; c0 < end; c0 += CB) {
        const int n = std::min<int64_t>(CB, end - c0);
        auto lo = [&](int t) { return a.window ? a.cols[q_start + t] - a.window + 1 - c0 : 0; };
        auto hi = [&](int t) { return std::min<int64_t>(n, a.cols[q_start + t] + 1 - c0); };
        int t0 = 0, t1 = q_len;  // the tokens between which some see a column of this block
        while (t0 < t1 && (hi(t0) <= 0 || lo(t0) >= n)) t0++;
        while (t0 < t1 && (hi(t1 - 1) <= 0 || lo(t1 - 1) >= n)) t1--;
        if (t0 == t1) continue;
        const int r0 = t0 * group, r1 = t1 * group;
        pack<T>(a, a.table + item[2] * a.table_stride + c0, n, head, kt, v, width);
        product<false, PAIRED<T>>(q + r0 * depth, depth, kt, CB, s + r0 * CB, CB, r1 - r0, CB, depth);
        for (int r = r0; r < r1; r++) {
            const int t = r / group;
            softmax<T>(a, s + r * CB, p + r * p_stride, acc + r * width, width, top[r], total[r], lo(t), hi(t),
                       a.bits ? a.bits[q_start + t] : 0, a.base ? a.base[q_start + t] - c0 : CB);
        }
        if (PAIRED<T>) memset(p + r1 * p_stride, 0, std::min<int64_t>(room - r1, 16) * p_stride * 4);  // what tiles multiply beyond r1
        product<true, PAIRED<T>>(p + r0 * p_stride, p_stride, v, width, acc + r0 * width, width, r1 - r0, width,
                                 PAIRED<T> ? up(n, 32) / 2 : n);
    }

    for (int r = 0; r < rows; r++) {
        const int t = r / group, h = head * group + r % group;
        if (item[5] < 0) {
            float sum = total[r];
            if (a.sinks) sum += exp2s(a.sinks[h] * LOG2E - top[r]);  // infinite where the token saw nothing: 0 comes out
            T* to = (T*)a.out + ((int64_t)(q_start + t) * a.heads + h) * a.dim;
            for (int d = 0; d < a.dim; d += VL) store(to + d, sum ? load(acc + r * width + d) / sum : vec{}, a.dim - d);
        } else {
            const int64_t at = (int64_t)(item[5] + t) * a.heads + h;
            for (int d = 0; d < a.dim; d += VL) store(a.part + at * a.dim + d, total[r] ? load(acc + r * width + d) / total[r] : vec{}, a.dim - d);
            a.part_lse[at] = total[r] ? top[r] + std::log2(total[r]) : NOTHING;
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

template <class T> void run_attention(const Attention& a) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        static thread_local Scratch scratch;
        {
            const TileScope tiles(PAIRED<T>);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < a.num_items * a.kv_heads; i++) attend<T>(a, a.items + i / a.kv_heads * 6, i % a.kv_heads, scratch);
        }
        if (a.merges)
#pragma omp for
            for (int64_t i = 0; i < a.tokens * a.heads; i++) merge<T>(a, i / a.heads, i % a.heads);
    }
}

// ---- between the products ---------------------------------------------------------------------------------------------------

constexpr int64_t ALONE = 1 << 14;  // elements that are not worth waking other threads for

template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* new_residual, int64_t rows, int64_t heads, int64_t size,
              int64_t x_stride, int64_t x_head_stride, int64_t weight_stride, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > ALONE)
    for (int64_t i = 0; i < rows; i++) {
        const T *from = x + i / heads * x_stride + i % heads * x_head_stride, *w = weight + i % heads * weight_stride;
        T *to = out + i * size, *both = residual ? new_residual + i * size : nullptr;
        vec squares{};
        for (int64_t d = 0; d < size; d += VL) {
            vec v = load(from + d, size - d);
            if (residual) store(both + d, v = rounded<T>(v + load(residual + i * size + d, size - d)), size - d);
            squares += v * v;
        }
        const float scale = 1.f / std::sqrt(sum(squares) / size + eps);
        if (residual) from = both;
        for (int64_t d = 0; d < size; d += VL)
            store(to + d, rounded<T>(load(from + d, size - d) * scale) * load(w + d, size - d), size - d);
    }
}

template <class T>
void rope(T* x, const T* cs, int64_t tokens, int64_t heads, int64_t half, int64_t x_stride, int64_t x_head_stride, int threads) {
    const T *cosines = cs, *sines = cs + tokens * 2 * half + half;  // the second half of the second factor: + sin
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * heads * half > ALONE)
    for (int64_t i = 0; i < tokens * heads; i++) {
        const int64_t t = i / heads;
        T *low = x + t * x_stride + i % heads * x_head_stride, *high = low + half;
        for (int64_t d = 0; d < half; d += VL) {
            const int n = half - d;
            const vec c = load(cosines + t * 2 * half + d, n), s = load(sines + t * 2 * half + d, n), a = load(low + d, n), b = load(high + d, n);
            store(low + d, a * c - b * s, n), store(high + d, b * c + a * s, n);
        }
    }
}

template <class T> void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * size > ALONE)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < size; d += VL) {
            const int n = size - d;
            const vec gate = load(gate_up + t * stride + d, n), up = load(gate_up + t * stride + size + d, n);
            store(out + t * size + d, rounded<T>(gate / (1.f + exp2v(gate * -LOG2E))) * up, n);
        }
}

// out [tokens, N] = x [tokens, size] w^T + bias, for so few tokens that reading w is what it costs: every row once, fetched ahead
constexpr int OUTPUTS = 32, FEW = 4, MOST = 32;  // outputs of a block; tokens of a block with vectors, and at most

template <class T, int M>
void linear_block(const T* x, const T* w, float* sums, int outputs, int64_t size, int64_t x_stride) {
    constexpr int ROWS = 4;
    for (int n = 0; n < outputs; n += ROWS) {
        const T* row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = w + std::min(n + r, outputs - 1) * size;
        vec acc[ROWS][M] = {};
        int64_t d = 0;
#if defined(__AVX512BF16__)
        if constexpr (PAIRED<T>)
            for (; d + 2 * VL <= size; d += 2 * VL) {
                __m512bh right[M];
                for (int m = 0; m < M; m++) memcpy(&right[m], x + m * x_stride + d, 64);
                for (int r = 0; r < ROWS; r++) {
                    __m512bh left; memcpy(&left, row[r] + d, 64);
                    __builtin_prefetch(row[r] + d + ROWS * size);
                    for (int m = 0; m < M; m++) acc[r][m] = (vec)_mm512_dpbf16_ps((__m512)acc[r][m], left, right[m]);
                }
            }
#endif
        for (; d < size; d += VL) {
            vec right[M];
            for (int m = 0; m < M; m++) right[m] = load(x + m * x_stride + d, size - d);
            for (int r = 0; r < ROWS; r++) {
                const vec left = load(row[r] + d, size - d);
                for (int m = 0; m < M; m++) acc[r][m] += left * right[m];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int m = 0; m < M; m++) sums[m * OUTPUTS + n + r] = sum(acc[r][m]);
    }
}

#if defined(__AMX_BF16__)
// As linear_block on tiles: sums [MOST, OUTPUTS]; x in pairs, [size / 2, 16] for each 16 tokens.
template <int TOKEN_TILES> void linear_tiles(const float* pairs, const bf16* w, float* sums, int64_t size) {
    alignas(64) float by_output[OUTPUTS][16 * TOKEN_TILES];
    constexpr int64_t stride = 64 * TOKEN_TILES;
    constexpr bool two = TOKEN_TILES == 2;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (two) { _tile_zero(2); _tile_zero(3); }
    for (int64_t d = 0; d < size; d += 32) {
        _tile_loadd(4, w + d, size * 2);
        _tile_loadd(5, w + 16 * size + d, size * 2);
        for (int r = 0; r < OUTPUTS; r++) __builtin_prefetch(w + (OUTPUTS + r) * size + d);
        _tile_loadd(6, pairs + d * 8, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (two) {
            _tile_loadd(7, pairs + (size + d) * 8, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, by_output[0], stride);
    _tile_stored(1, by_output[16], stride);
    if constexpr (two) { _tile_stored(2, by_output[0] + 16, stride); _tile_stored(3, by_output[16] + 16, stride); }
    for (int n = 0; n < OUTPUTS; n += VL)
        for (int t = 0; t < 16 * TOKEN_TILES; t += VL) {
            vec r[VL];
            for (int i = 0; i < VL; i++) r[i] = load(by_output[n + i] + t);
            transpose<VL / 2>(r);
            for (int i = 0; i < VL; i++) store(sums + (t + i) * OUTPUTS + n, r[i]);
        }
}

void pack_tokens(const bf16* x, int64_t tokens, int64_t size, int64_t x_stride, float* pairs) {
    for (int64_t t = 0; t < up(tokens, 16); t += VL)
        for (int64_t d = 0; d < size; d += 2 * VL) {
            vec r[VL];
            for (int i = 0; i < VL; i++) r[i] = t + i < tokens ? load((const float*)(x + (t + i) * x_stride + d)) : vec{};
            transpose<VL / 2>(r);
            for (int i = 0; i < VL; i++) store(pairs + t / 16 * size * 8 + (d / 2 + i) * 16 + t % 16, r[i]);
        }
}
#endif

template <class T>
void linear(const T* x, const T* w, const T* bias, T* out, int64_t tokens, int64_t outputs, int64_t size, int64_t x_stride, int threads) {
    static thread_local std::vector<float> packed;  // the caller's, read by all
    bool on_tiles = false;
    [[maybe_unused]] const float* pairs = nullptr;
#if defined(__AMX_BF16__)
    on_tiles = PAIRED<T> && amx && tokens > 1 && size % 32 == 0;
    if (on_tiles) {
        pairs = Scratch::room(packed, up(tokens, 16) * size / 2);
        if constexpr (PAIRED<T>) pack_tokens(x, tokens, size, x_stride, packed.data());
    }
#endif
#pragma omp parallel num_threads(threads) if (threads > 1 && outputs * size > ALONE)
    {
        const TileScope tiles(on_tiles);
        float sums[MOST * OUTPUTS];
#pragma omp for schedule(static)
        for (int64_t n = 0; n < outputs; n += OUTPUTS) {
            const int some = std::min<int64_t>(OUTPUTS, outputs - n);
            const T* rows = w + n * size;
            if (on_tiles && some == OUTPUTS) {
#if defined(__AMX_BF16__)
                if constexpr (PAIRED<T>) (tokens > 16 ? linear_tiles<2> : linear_tiles<1>)(pairs, rows, sums, size);
#endif
            } else {
                constexpr decltype(&linear_block<T, 1>) BY_COUNT[] = {linear_block<T, 1>, linear_block<T, 2>, linear_block<T, 3>, linear_block<T, 4>};
                for (int64_t t = 0; t < tokens; t += FEW)
                    BY_COUNT[std::min<int64_t>(tokens - t, FEW) - 1](x + t * x_stride, rows, sums + t * OUTPUTS, some, size, x_stride);
            }
            for (int64_t t = 0; t < tokens; t++)
                for (int i = 0; i < some; i += VL) {
                    const vec y = load(sums + t * OUTPUTS + i);
                    store(out + t * outputs + n + i, bias ? y + load(bias + n + i, some - i) : y, some - i);
                }
        }
    }
}

// ---- sampling ---------------------------------------------------------------------------------------------------------------

inline vec logv(vec x) {  // natural logarithm of positive normal numbers, to 1e-7 of its value (Cephes' polynomial)
    ivec bits = (ivec)x;
    ivec exponent = ((bits - 0x3f3504f3) >> 23);  // so that the rest lies in [sqrt(1/2), sqrt(2))
    const vec f = (vec)(bits - (exponent << 23)) - 1.f, e = __builtin_convertvector(exponent, vec), z = f * f;
    vec p = splat(7.0376836292e-2f);
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                    -2.4999993993e-1f, 3.3333331174e-1f})
        p = p * f + c;
    return f + (p * f * z - 0.5f * z + e * -2.12194440e-4f) + e * 0.693359375f;
}

// log(E) of sampling.py's noise, for the tokens of `words` and a row's two key words
inline vec log_exponential(ivec words, const int32_t* key) {
    uvec x = (uvec)words * (uint32_t)key[0] + (uint32_t)key[1];
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (uvec)((ivec)x ^ (ivec)x >> 15);
    vec v = __builtin_convertvector((ivec)x, vec);
    v = v > 2147483520.f ? splat(2147483520.f) : v;
    v = v * -0x1p-31f - 0x1p-32f;                      // in (-1, 0)
    const vec w = 1.f + v;
    const vec one_plus = w == 1.f ? v : logv(w) * v / (w - 1.f);  // log1p (Kahan): exact where w was rounded
    return logv(-one_plus);
}

inline bool any(ivec x) {
    uint64_t parts[sizeof x / 8], all = 0;
    memcpy(parts, &x, sizeof x);
    for (uint64_t part : parts) all |= part;
    return all;
}

// The least gap g <= limit (how far a token lies below `top`) such that the tokens of gap <= g weigh at least `target`: each 2^-gap in
// units of log 2 e, or one. NaN where all do not. Floats >= 0 are ordered as their bits are: g is found digit by digit, in histograms.
float least_gap(const float* z, int64_t vocab, float top, float limit, double target, bool count) {
    static thread_local std::vector<float> gaps, weights;
    static thread_local std::vector<double> mass;
    for (float near : {4.f, 12.f, INFINITY}) {  // most often the answer is near, and few tokens are
        gaps.clear(), weights.clear();
        double all = 0;
        const float most = std::min(near, limit);
        for (int64_t i = 0; i < vocab; i += VL) {
            const vec g = top - load(z + i);
            if (!any(g <= most)) continue;
            const vec w = count ? splat(1.f) : exp2v(g * -LOG2E);
            for (int j = 0; j < std::min<int64_t>(VL, vocab - i); j++)
                if (g[j] <= most) gaps.push_back(g[j]), weights.push_back(w[j]), all += w[j];
        }
        if (all >= target || most == limit) break;
    }
    uint32_t answer = 0;
    size_t n = gaps.size();
    for (int shift : {20, 10, 0}) {
        mass.assign(2048, 0);
        const uint32_t digits = shift == 20 ? 2047 : 1023;
        auto digit_of = [&](size_t i) { uint32_t u; memcpy(&u, &gaps[i], 4); return u >> shift & digits; };
        for (size_t i = 0; i < n; i++) mass[digit_of(i)] += weights[i];
        uint32_t digit = 0;
        for (; digit < digits && target > mass[digit]; digit++) target -= mass[digit];
        answer |= digit << shift;
        size_t kept = 0;
        for (size_t i = 0; i < n; i++)
            if (digit_of(i) == digit) gaps[kept] = gaps[i], weights[kept++] = weights[i];
        n = kept;
    }
    float g; memcpy(&g, &answer, 4);
    return g;
}

struct Draw { float inv_temperature, top_k, top_p, min_p_gap, penalties[3]; };  // a row of SamplingState.values

// The token that a row draws, and its perturbed logit; as SamplingState._perturbed and first_max
void draw(const float* logits, int64_t vocab, const Draw& d, const int32_t* key, const int32_t* words, float gap_slack, float mass_slack,
          int64_t& token, float& best) {
    static thread_local std::vector<float> z;
    z.resize(up(vocab, VL));
    vec most = splat(NOTHING), nan{};
    for (int64_t i = 0; i < vocab; i += VL) {
        vec x = load(logits + i, vocab - i) * d.inv_temperature;
        if (vocab - i < VL) for (int64_t j = vocab - i; j < VL; j++) x[j] = NOTHING;
        nan += x != x ? splat(1.f) : vec{};
        most = larger(x, most);
        store(z.data() + i, x);
    }
    const float top = largest(most);
    token = 0, best = sum(nan) ? NAN : top;
    if (!(std::fabs(best) < INFINITY)) return;
    float limit = INFINITY;
    if (d.top_k < vocab) limit = std::min(limit, least_gap(z.data(), vocab, top, INFINITY, d.top_k, true));
    if (d.top_p < 1) {
        double mass = 0;
        for (int64_t first = 0; first < vocab; first += 1024) {  // floats add up to few, doubles to the whole
            vec part{};
            for (int64_t i = first; i < std::min(vocab, first + 1024); i += VL) {
                const vec g = top - load(z.data() + i);
                part += g <= limit ? exp2v(g * -LOG2E) : vec{};
            }
            mass += sum(part);
        }
        const double target = mass * (d.top_p - mass_slack * (1 - d.top_p));
        limit = std::min(limit, least_gap(z.data(), vocab, top, limit, target, false));
    }
    limit = std::min(limit, d.min_p_gap + gap_slack);
    most = splat(NOTHING);
    ivec where{}, at{};
    for (int i = 0; i < VL; i++) at[i] = i;
    for (int64_t i = 0; i < vocab; i += VL, at += VL) {
        const vec x = load(z.data() + i);
        if (!any(top - x <= limit)) continue;
        ivec word{};
        memcpy(&word, words + i, std::min<int64_t>(VL, vocab - i) * 4);
        const vec noisy = top - x <= limit ? x - log_exponential(word, key) : splat(NOTHING);
        where = noisy > most ? at : where;
        most = larger(noisy, most);
    }
    best = largest(most), token = INT64_MAX;
    for (int i = 0; i < VL; i++)
        if (most[i] == best) token = std::min<int64_t>(token, where[i]);
}

}  // namespace

// ---- what Python calls: dtype 0 is float32, 1 bfloat16, 2 float16 -----------------------------------------------------------

#define BY_TYPE(dtype, CALL) if (dtype == 0) { using T = float; CALL; } else if (dtype == 1) { using T = bf16; CALL; } else { using T = f16; CALL; }

extern "C" {

// What the file was compiled for: bit 0 dot products of bf16, bit 1 AMX tiles that the system allows. Call it first.
int nano_setup() {
    int can = PAIRED<bf16>;
#if defined(__AMX_BF16__)
    amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    can |= amx << 1;
#endif
    return can;
}

void nano_attention(const Attention* a, int dtype) { BY_TYPE(dtype, run_attention<T>(*a)) }

void nano_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* new_residual, int64_t rows, int64_t heads,
                   int64_t size, int64_t x_stride, int64_t x_head_stride, int64_t weight_stride, float eps, int threads, int dtype) {
    BY_TYPE(dtype, rms_norm((const T*)x, (const T*)residual, (const T*)weight, (T*)out, (T*)new_residual, rows, heads, size, x_stride,
                            x_head_stride, weight_stride, eps, threads))
}

void nano_rope(void* x, const void* cs, int64_t tokens, int64_t heads, int64_t half, int64_t x_stride, int64_t x_head_stride, int threads,
               int dtype) {
    BY_TYPE(dtype, rope((T*)x, (const T*)cs, tokens, heads, half, x_stride, x_head_stride, threads))
}

void nano_store_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots, int64_t tokens, int64_t heads,
                   int64_t k_stride, int64_t k_head_stride, int64_t v_stride, int64_t v_head_stride, int64_t slot_stride, int64_t head_bytes,
                   int threads) {  // strides in bytes
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * heads * head_bytes > 2 * ALONE)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            memcpy(k_cache + slots[t] * slot_stride + h * head_bytes, k + t * k_stride + h * k_head_stride, head_bytes);
            memcpy(v_cache + slots[t] * slot_stride + h * head_bytes, v + t * v_stride + h * v_head_stride, head_bytes);
        }
}

void nano_linear(const void* x, const void* w, const void* bias, void* out, int64_t tokens, int64_t outputs, int64_t size, int64_t x_stride,
                 int threads, int dtype) {  // tokens: at most MOST
    BY_TYPE(dtype, linear((const T*)x, (const T*)w, (const T*)bias, (T*)out, tokens, outputs, size, x_stride, threads))
}

// rows[i] of logits [N, V] draws with parameters values[request[i]] and key words keys[i]
void nano_draw(const float* logits, int64_t vocab, int64_t n, const int64_t* rows, const int64_t* request, const float* values, const int32_t* keys,
               const int32_t* words, float gap_slack, float mass_slack, int64_t* tokens, float* best, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n > 1)
    for (int64_t i = 0; i < n; i++)
        draw(logits + rows[i] * vocab, vocab, ((const Draw*)values)[request[i]], keys + 2 * i, words, gap_slack, mass_slack, tokens[i], best[i]);
}

void nano_silu_mul(const void* gate_up, void* out, int64_t tokens, int64_t size, int64_t stride, int threads, int dtype) {
    BY_TYPE(dtype, silu_mul((const T*)gate_up, (T*)out, tokens, size, stride, threads))
}

}
