// Products with weights: out [tokens, N] = x [tokens, size] w^T * scales + bias, w [N, size] as the checkpoint has it, or int8 with a scale a row.
//
// The outputs are cut into blocks of two times 16, and a thread does a block for all tokens (TOKENS at a time), so that every weight is read once.
// With few tokens that reading is what a product costs: rows are fetched ahead. Ways to multiply:
//     vectors   FEW tokens at a time: dot products of rows. Where bf16 is not multiplied in pairs, x becomes floats first, and w where it is used:
//               its pairs are taken apart by one operation each, which leaves the even ones and the odd ones, and x lies in that order
//     panels    more of them, in floats: x is turned, once, into panels of WIDE tokens; each weight becomes a float, once, and multiplies whole
//               registers. DEPTH inputs at a time: so much of a panel stays in the first cache while the block's rows go by, they in the second
//     whole     int8 and at most FEW tokens: x becomes whole numbers of 16 bits, and so the sums (AVX512_VNNI)
//     tiles     AMX multiplies rows by pairs, so its right operand must be turned; whatever is smaller is: for at most TILED tokens x, once, with
//               w the left operand as it lies in memory and sums that come out by output; for more (many tiles), the block of w
// int8 becomes a float in registers, or with tiles, and where vectors multiply pairs of more than FEW tokens, T first, a block at a time.
#pragma once

#include "products.h"

namespace {

constexpr int HALF = 16, OUTPUTS = 32, FEW = 4, TILED = 32, TOKENS = 512;  // a block's outputs; tokens of a step with vectors, with tiles; of a pass
constexpr int WIDE = NV * VL, DEPTH = 384;  // a panel's tokens; inputs at a time
constexpr int MOST_BF16 = 24;               // bf16 tokens that are faster with vectors than with panels
constexpr int RUN = 6, STRETCH = 1024;      // tokens at a time with vectors, if not in pairs; and inputs: so many times so many floats fit the first cache

struct Weight {  // native.py has the same list of fields
    const void* values;   // [outputs, size]
    const float* scales;  // [outputs], values are int8; or null
    const void* bias;     // [outputs] or null
    int64_t outputs, size;
};

// Half of the 2 VL bf16 at p, as floats: those at even places, or at odd ones. One operation; in their order they would take two
template <int ODD> inline vec every_other(const bf16* p) {
    uvec pairs; memcpy(&pairs, p, sizeof pairs);
    return (vec)(ODD ? pairs & 0xffff0000 : pairs << 16);
}

// Adds to sums [M][OUTPUTS] of M tokens, for `some` rows of w, `depth` of `size` inputs. Fetches as many inputs of as many rows from `next` on,
// unless null. With bf16 for w and floats for x, of these each 2 VL in the order of every_other, and zeros behind the last
template <class T, class W, int M>
void linear_block(const T* x, const W* w, float* sums, int some, int64_t depth, int64_t x_stride, int64_t size, const W* next) {
    constexpr int ROWS = MANY_REGISTERS || M < 3 ? 4 : 2;
    for (int n = 0; n < some; n += ROWS) {
        const W* row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = w + std::min(n + r, some - 1) * size;
        vec acc[ROWS][M] = {};
        int64_t d = 0;
        if constexpr (std::is_same<T, float>::value && std::is_same<W, bf16>::value) {
            const auto multiply = [&](const W* const* from, int64_t at) {  // 2 VL of each row
                const auto half = [&](auto odd) {
                    vec left[ROWS];
                    for (int r = 0; r < ROWS; r++) left[r] = every_other<odd>(from[r] + at);
                    for (int m = 0; m < M; m++) {
                        const vec right = load(x + m * x_stride + d + odd * VL);
                        for (int r = 0; r < ROWS; r++) acc[r][m] = fused(left[r], right, acc[r][m]);
                    }
                };
                half(std::integral_constant<int, 0>()), half(std::integral_constant<int, 1>());
            };
            for (; d + 2 * VL <= depth; d += 2 * VL) {
                for (int r = 0; next && r < ROWS; r++) fetch(next + n * depth + ROWS * d + r * 2 * VL);
                multiply(row, d);
            }
            if (d < depth) {
                W last[ROWS][2 * VL] = {};
                const W* from[ROWS];
                for (int r = 0; r < ROWS; r++) memcpy(last[r], row[r] + d, (depth - d) * sizeof(W)), from[r] = last[r];
                multiply(from, 0);
            }
            d = depth;
        }
#if defined(__AVX512BF16__)
        if constexpr (PAIRED<T> && PAIRED<W>)
            for (; d + 2 * VL <= depth; d += 2 * VL) {
                __m512bh right[M];
                for (int m = 0; m < M; m++) memcpy(&right[m], x + m * x_stride + d, 64);
                for (int r = 0; r < ROWS; r++) {
                    __m512bh left; memcpy(&left, row[r] + d, 64);
                    if (next) fetch(next + n * depth + ROWS * d + r * 2 * VL);
                    for (int m = 0; m < M; m++) acc[r][m] = (vec)_mm512_dpbf16_ps((__m512)acc[r][m], left, right[m]);
                }
            }
#endif
        const auto multiply = [&](int count) {  // VL of each row, or the last few
            vec left[ROWS];
            for (int r = 0; r < ROWS; r++) left[r] = load(row[r] + d, count);
            for (int m = 0; m < M; m++) {
                const vec right = load(x + m * x_stride + d, count);
                for (int r = 0; r < ROWS; r++) acc[r][m] = fused(left[r], right, acc[r][m]);
            }
        };
        for (; d + VL <= depth; d += VL) {
            for (int r = 0; next && r < ROWS; r++) fetch(next + n * depth + ROWS * d + r * VL);
            multiply(VL);
        }
        if (d < depth) multiply(depth - d);
        constexpr int COLUMNS = M == 3 ? 4 : M > 4 ? 8 : M, N = ROWS * COLUMNS;  // powers of two
        if constexpr (N <= VL) {
            vec by_token[N] = {};                        // [M][ROWS]
            for (int m = 0; m < M; m++)
                for (int r = 0; r < ROWS; r++) by_token[m * ROWS + r] = acc[r][m];
            float all[VL];
            store(all, totals<N>(by_token));
            for (int m = 0; m < M; m++)
                for (int r = 0; r < ROWS; r++) sums[m * OUTPUTS + n + r] += all[m * ROWS + r];
        } else {
            for (int r = 0; r < ROWS; r++)
                if constexpr (COLUMNS <= VL) {
                    vec by_token[COLUMNS] = {};
                    for (int m = 0; m < M; m++) by_token[m] = acc[r][m];
                    const vec all = totals<COLUMNS>(by_token);
                    for (int m = 0; m < M; m++) sums[m * OUTPUTS + n + r] += all[m];
                } else
                    for (int m = 0; m < M; m++) sums[m * OUTPUTS + n + r] += sum(acc[r][m]);
        }
    }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
constexpr bool WHOLE = true;  // few tokens times int8 are sums of whole numbers
#else
constexpr bool WHOLE = false;
#endif

// x [size] as whole numbers of 16 bits times `scale`: the high bytes plus 128, and the low ones. Half a step is 2^-16 of the largest entry: an entry
// a thousand times smaller than that is known to some percent, as its weight is.
template <class T> void to_whole(const T* x, int64_t size, uint8_t* high, uint8_t* low, float& scale) {
    vec most{};
    for (int64_t d = 0; d < size; d += VL) {
        const vec v = load(x + d), a = v < 0 ? -v : v;
        most = a > most || a != a ? a : most;
    }
    scale = any(!(most < INFINITY)) ? NAN : largest(most) / 32512;
    const float to = scale > 1e-37f ? 1 / scale : 0;  // less is nothing
    for (int64_t d = 0; d < size; d += VL) {
        const ivec value = __builtin_convertvector(load(x + d) * to + 32768.5f, ivec);
        const bvec top = __builtin_convertvector(value >> 8, bvec), rest = __builtin_convertvector(value, bvec);
        memcpy(high + d, &top, VL), memcpy(low + d, &rest, VL);
    }
}

// As linear_block for M tokens out of to_whole: [M][2][size] bytes. A sum of products is 256 (sum of w high - 128 sum of w) + sum of w low.
template <int M> void linear_whole(const uint8_t* x, const float* x_scales, const i8* w, float* sums, int some, int64_t size, const i8* next) {
#if defined(__AVX512VNNI__)
    constexpr int ROWS = M > 2 ? 2 : 4;
    const __m512i ones = _mm512_set1_epi8(1);
    for (int n = 0; n < some; n += ROWS) {
        const i8* row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = w + std::min(n + r, some - 1) * size;
        __m512i high[ROWS][M] = {}, low[ROWS][M] = {}, plain[ROWS] = {};
        for (int64_t d = 0; d < size; d += 64) {
            __m512i left[ROWS];
            for (int r = 0; r < ROWS; r++) {
                left[r] = _mm512_loadu_si512(row[r] + d);
                if (next) fetch(next + n * size + ROWS * d + r * 64);
                plain[r] = _mm512_dpbusd_epi32(plain[r], ones, left[r]);
            }
            for (int m = 0; m < M; m++) {
                const __m512i h = _mm512_loadu_si512(x + 2 * m * size + d), l = _mm512_loadu_si512(x + (2 * m + 1) * size + d);
                for (int r = 0; r < ROWS; r++) {
                    high[r][m] = _mm512_dpbusd_epi32(high[r][m], h, left[r]);
                    low[r][m] = _mm512_dpbusd_epi32(low[r][m], l, left[r]);
                }
            }
        }
        for (int r = 0; r < ROWS && n + r < some; r++)
            for (int m = 0; m < M; m++) {
                const vec top = __builtin_convertvector((ivec)high[r][m] - ((ivec)plain[r] << 7), vec);
                sums[m * OUTPUTS + n + r] = sum(top * 256.f + __builtin_convertvector((ivec)low[r][m], vec)) * x_scales[m];
            }
    }
#endif
}

// Sums by output [OUTPUTS][tokens] -> by token [tokens][OUTPUTS]; tokens: a multiple of VL
inline void turn_sums(const float* by_output, int tokens, float* sums) {
    for (int n = 0; n < OUTPUTS; n += VL)
        for (int t = 0; t < tokens; t += VL) {
            vec r[VL];
            for (int i = 0; i < VL; i++) r[i] = load(by_output + (n + i) * tokens + t);
            transpose<VL / 2>(r);
            for (int i = 0; i < VL; i++) store(sums + (t + i) * OUTPUTS + n, r[i]);
        }
}

#if defined(__AMX_BF16__)
// Rows in pairs: [size / 2][16] for each 16 of them, zeros behind the last. Steps `first` to `last` of it, each 16 rows and 32 entries
inline void turn_rows(const bf16* x, int64_t rows, int64_t size, int64_t stride, float* pairs, int64_t first, int64_t last) {
    const int64_t steps = size / (2 * VL);
    for (int64_t i = first; i < last; i++) {
        const int64_t t = i / steps * 16, d = i % steps * 2 * VL;
        vec r[VL];
        for (int j = 0; j < VL; j++) r[j] = t + j < rows ? load((const float*)(x + (t + j) * stride + d)) : vec{};
        transpose<VL / 2>(r);
        for (int j = 0; j < VL; j++) store(pairs + t / 16 * size * 8 + (d / 2 + j) * 16, r[j]);
    }
}

// sums [32][16 * TILES] = 16 rows of `one` and 16 of `other`, times TILES panels of 16 turned rows. Fetches what stands `ahead` of both, unless 0
template <int TILES>
void tiles(const bf16* one, const bf16* other, int64_t stride, const float* right, float* sums, int64_t size, int64_t ahead) {
    constexpr int64_t out = 64 * TILES;
    constexpr bool two = TILES == 2;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (two) { _tile_zero(2); _tile_zero(3); }
    for (int64_t d = 0; d < size; d += 32) {
        _tile_loadd(4, one + d, stride * 2);
        _tile_loadd(5, other + d, stride * 2);
        if (ahead)
            for (int r = 0; r < HALF; r++) __builtin_prefetch(one + ahead + r * stride + d), __builtin_prefetch(other + ahead + r * stride + d);
        _tile_loadd(6, right + d * 8, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (two) {
            _tile_loadd(7, right + (size + d) * 8, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, out);
    _tile_stored(1, sums + 16 * 16 * TILES, out);
    if constexpr (two) { _tile_stored(2, sums + 16, out); _tile_stored(3, sums + 16 * 32 + 16, out); }
}

// As linear_block for 16 or 32 tokens in pairs
template <int TILES> void linear_tiles(const bf16* const* rows, const float* pairs, float* sums, int64_t size, int64_t ahead) {
    alignas(64) float by_output[OUTPUTS * 16 * TILES];
    tiles<TILES>(rows[0], rows[1], size, pairs, by_output, size, ahead);
    settle();
    turn_sums(by_output, 16 * TILES, sums);
}
#endif

enum class Way { VECTORS, PANELS, WHOLE, TILES, MANY_TILES };

template <class T> Way way(const Weight& w, int64_t tokens) {
    if (WHOLE && PAIRED<T> && w.scales && tokens <= FEW && w.size % 64 == 0) return Way::WHOLE;
#if defined(__AMX_BF16__)
    if (PAIRED<T> && amx && tokens > 1 && w.size % 32 == 0) return tokens > TILED ? Way::MANY_TILES : Way::TILES;
#endif
    const int most = std::is_same<T, bf16>::value && !w.scales ? MOST_BF16 : 2 * RUN;  // measured
    return PAIRED<T> || tokens <= most ? Way::VECTORS : Way::PANELS;
}

struct Bytes {  // x as `to_whole` leaves it
    uint8_t* values;  // [tokens][2][size]
    float* scales;    // [tokens]
    Bytes(float* scratch, int64_t size) : values((uint8_t*)scratch), scales(scratch + 2 * FEW * size / 4) {}
};
// Floats of scratch in which any way finds room for x in its form
template <class T> int64_t x_room(int64_t tokens, int64_t size) {
    return PAIRED<T> ? TILED * size / 2 + FEW : tokens > FEW ? up(std::min<int64_t>(tokens, TOKENS), VL) * size : 0;
}

// x in the form in which `how` wants it
template <class T> void prepare(Way how, const T* x, int64_t x_stride, int64_t tokens, int64_t size, float* scratch) {
    if (how == Way::WHOLE) {
        const Bytes to(scratch, size);
#pragma omp for nowait
        for (int64_t t = 0; t < tokens; t++) to_whole(x + t * x_stride, size, to.values + 2 * t * size, to.values + (2 * t + 1) * size, to.scales[t]);
    }
#if defined(__AMX_BF16__)
    if constexpr (PAIRED<T>) {
        if (how == Way::TILES)
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < up(tokens, 16) / 16 * size / 32; i++) turn_rows(x, tokens, size, x_stride, scratch, i, i + 1);
        if (how == Way::MANY_TILES) {  // as it lies, but for the last tokens: they get room behind them
            const int64_t rest = tokens % TILED;
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < rest; t++) memcpy((T*)scratch + t * size, x + (tokens - rest + t) * x_stride, size * 2);
        }
    }
#endif
}

template <class T> constexpr int AT_ONCE = PAIRED<T> ? FEW : RUN;  // tokens, with vectors

template <class T, class W>  // linear_block for 1 to AT_ONCE tokens
void linear_few(const T* x, int64_t x_stride, const W* w, int some, int64_t size, int64_t tokens, float* sums, const W* next) {
    const int64_t part = PAIRED<T> ? size : STRETCH;  // pairs are half as large, and few rows are that long
    for (int64_t t = 0; t < tokens; t++) std::fill_n(sums + t * OUTPUTS, HALF, 0.f);
    constexpr decltype(&linear_block<T, W, 1>) BY_COUNT[] = {linear_block<T, W, 1>, linear_block<T, W, 2>, linear_block<T, W, 3>,
                                                             linear_block<T, W, 4>, linear_block<T, W, 5>, linear_block<T, W, 6>};
    for (int64_t d = 0; d < size; d += part)
        BY_COUNT[tokens - 1](x + d, w + d, sums, some, std::min(part, size - d), x_stride, size, next ? next + d * some : nullptr);
}
inline void whole_few(const Bytes& x, const i8* w, int some, int64_t size, int64_t tokens, float* sums, const i8* next) {
    constexpr decltype(&linear_whole<1>) BY_COUNT[] = {linear_whole<1>, linear_whole<2>, linear_whole<3>, linear_whole<4>};
    BY_COUNT[tokens - 1](x.values, x.scales, w, sums, some, size, next);
}

// x as floats [tokens, size up to 2 VL], each 2 VL in the order of every_other if `split`: not every row of w converts it, and each
// thread makes its own.
template <class T> const float* to_floats(const T* x, int64_t x_stride, int64_t tokens, int64_t size, bool split, float* to) {
    const int64_t room = up(size, 2 * VL);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < room; d += 2 * VL) {
            T part[2 * VL] = {};
            memcpy(part, x + t * x_stride + d, std::min<int64_t>(2 * VL, size - d) * sizeof(T));
            float* const out = to + t * room + d;
            if constexpr (std::is_same<T, bf16>::value)
                if (split) {
                    store(out, every_other<0>(part)), store(out + VL, every_other<1>(part));
                    continue;
                }
            store(out, load(part)), store(out + VL, load(part + VL));
        }
    return to;
}

struct Block { int64_t at[2]; int some[2]; };  // two runs of up to HALF outputs: neighbours, or where `gated` a gate's and what it multiplies

template <class T> vec gate(vec gate, vec up) { return rounded<T>(gate / (1.f + exp2v(gate * -LOG2E))) * up; }

// The sums of a block -> out, with scale and bias
template <class T, class O> void finish(const float* sums, const Weight& w, const Block& b, bool gated, int64_t tokens, O* out) {
    const int64_t width = gated ? w.outputs / 2 : w.outputs;
    for (int64_t t = 0; t < tokens; t++, sums += OUTPUTS, out += width) {
        auto value = [&](int half, int i) {
            const int64_t n = b.at[half] + i, left = b.some[half] - i;
            vec y = load(sums + half * HALF + i);
            if (w.scales) y *= load(w.scales + n, left);
            if (w.bias) y += load((const T*)w.bias + n, left);
            return y;
        };
        for (int half = 0; half < (gated ? 1 : 2); half++)
            for (int i = 0; i < b.some[half]; i += VL)
                store(out + b.at[half] + i, gated ? gate<T>(rounded<T>(value(0, i)), rounded<T>(value(1, i))) : value(half, i), b.some[half] - i);
    }
}

inline Block block_of(const Weight& w, bool gated, int64_t i) {
    const int64_t range = gated ? w.outputs / 2 : w.outputs, n = i * (gated ? HALF : OUTPUTS), left = range - n;
    return {{n, gated ? range + n : n + HALF}, {(int)std::min<int64_t>(left, HALF), (int)std::clamp<int64_t>(gated ? left : left - HALF, 0, HALF)}};
}

// x in panels: [size][WIDE] for each WIDE tokens, the last as wide as it must be: a multiple of VL
template <class T> void turn_panels(const T* x, int64_t x_stride, int64_t tokens, int64_t size, float* panels) {
    const int64_t steps = up(size, VL) / VL;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < up(tokens, VL) / VL * steps; i++) {
        const int64_t t = i / steps * VL, d = i % steps * VL, begin = t / WIDE * WIDE, width = std::min<int64_t>(WIDE, up(tokens - begin, VL));
        vec r[VL];
        for (int j = 0; j < VL; j++) r[j] = t + j < tokens ? load(x + (t + j) * x_stride + d, size - d) : vec{};
        transpose<VL / 2>(r);
        for (int j = 0; j < std::min<int64_t>(VL, size - d); j++) store(panels + begin * size + (d + j) * width + t - begin, r[j]);
    }
}

// As `linear`, by panels, for values of type W
template <class T, class W, class O>
void linear_panels(const T* x, int64_t x_stride, const Weight& w, O* out, int64_t tokens, bool gated, float* panels, Team& team) {
    static thread_local std::vector<float> floats, kept;
    const int64_t size = w.size, range = gated ? w.outputs / 2 : w.outputs, step = gated ? HALF : OUTPUTS;
    const int64_t parts = up(size, DEPTH) / DEPTH, part = up(up(size, parts) / parts, VL);
    float *rows = grown(floats, OUTPUTS * DEPTH), *by_output = grown(kept, OUTPUTS * up(std::min<int64_t>(tokens, TOKENS), VL));
    alignas(64) float sums[WIDE * OUTPUTS];
    for (int64_t first = 0; first < tokens; first += TOKENS) {
        const int64_t count = std::min<int64_t>(TOKENS, tokens - first);
        if (first) team.meet();  // until all are done with the last panels
        turn_panels(x + first * x_stride, x_stride, count, size, panels);
        team.meet();
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < up(range, step) / step; i++) {
            const Block b = block_of(w, gated, i);
            for (int64_t d = 0; d < size; d += part)
                for (int64_t t = 0; t < count; t += WIDE) {
                    const int width = std::min<int64_t>(WIDE, up(count - t, VL)), depth = std::min(part, size - d);
                    for (int half = 0; half < 2; half++) {
                        const W *from = (const W*)w.values + b.at[half] * size + d, *next = from - d + step * size + d * HALF;
                        float *left = rows + half * HALF * DEPTH, *to = by_output + t * OUTPUTS + half * HALF * width;
                        for (int r = 0; t == 0 && r < b.some[half]; r++)
                            for (int k = 0; k < depth; k += VL) store(left + r * DEPTH + k, load(from + r * size + k, depth - k));
                        (d ? product<true, false> : product<false, false>)(left, DEPTH, panels + t * size + d * width, width, to, width, b.some[half],
                                                                           width, depth, {t ? nullptr : (const char*)next, sizeof(W)});
                    }
                    if (d + part < size) continue;
                    turn_sums(by_output + t * OUTPUTS, width, sums);
                    finish<T>(sums, w, b, gated, std::min<int64_t>(width, count - t), out + (first + t) * range);
                }
        }
    }
}

// Every thread of a team, between two meetings. out [tokens, N], or where `gated` silu(first half of the outputs) * second half, [tokens, N / 2].
// `scratch`: x_room. O: T, or float
template <class T, class O>
void linear(const T* x, int64_t x_stride, const Weight& w, O* out, int64_t tokens, bool gated, float* scratch, Team& team) {
    const Way how = way<T>(w, tokens);
    if (how == Way::PANELS)
        return (w.scales ? linear_panels<T, i8, O> : linear_panels<T, T, O>)(x, x_stride, w, out, tokens, gated, scratch, team);
    if (how != Way::VECTORS) {
        prepare(how, x, x_stride, tokens, w.size, scratch);
        team.meet();
    }
    static thread_local std::vector<T> wide;
    static thread_local std::vector<float> panels, single;
    alignas(64) float sums[TILED * OUTPUTS];
    const int64_t size = w.size, range = gated ? w.outputs / 2 : w.outputs, step = gated ? HALF : OUTPUTS, ahead = step * size;
    const int64_t blocks = up(range, step) / step, passes = up(tokens, TOKENS) / TOKENS;
    const bool widen = w.scales && (how >= Way::TILES || (PAIRED<T> && how == Way::VECTORS && tokens > FEW));
    const int64_t room = up(size, 2 * VL);
    const float* numbers = nullptr;
    if (!PAIRED<T> && !std::is_same<T, float>::value && how == Way::VECTORS)
        numbers = to_floats(x, x_stride, tokens, size, std::is_same<T, bf16>::value && !w.scales, grown(single, tokens * room));
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < blocks * passes; i++) {
        const int64_t first = i / blocks * TOKENS, last = std::min(tokens, first + TOKENS);
        const Block b = block_of(w, gated, i % blocks);
        const i8* small[2] = {(const i8*)w.values + b.at[0] * size, (const i8*)w.values + b.at[1] * size};
        const T* rows[2] = {(const T*)w.values + b.at[0] * size, (const T*)w.values + b.at[1] * size};
        for (int half = 0; half < 2 * widen; half++) {
            T* to = grown(wide, OUTPUTS * size) + half * HALF * size;
            for (int64_t d = 0, end = b.some[half] * size; d < end; d += VL) {
                store(to + d, load(small[half] + d, end - d), end - d);
                fetch(small[half] + ahead + d);
            }
            rows[half] = to;
        }
#if defined(__AMX_BF16__)
        if constexpr (PAIRED<T>)
            if (how >= Way::TILES && b.some[1] == HALF) {
                const bool many = how == Way::MANY_TILES;
                float* right = many ? grown(panels, OUTPUTS * size / 2) : scratch;
                for (int half = 0; half < 2 * many; half++) turn_rows(rows[half], HALF, size, size, right + half * size * 8, 0, size / 32);
                settle();
                for (int64_t t = first; t < last; t += TILED) {
                    const int64_t count = std::min<int64_t>(TILED, last - t), stride = count < TILED ? size : x_stride;
                    const T* from = count < TILED ? (const T*)scratch : x + t * x_stride;
                    if (many) tiles<2>(from, from + HALF * stride, stride, right, sums, size, 0);
                    else (count > 16 ? linear_tiles<2> : linear_tiles<1>)(rows, right, sums, size, widen ? 0 : ahead);
                    settle();
                    finish<T>(sums, w, b, gated, count, out + t * range);
                }
                continue;
            }
#endif
        for (int64_t t = first, count; t < last; t += count) {
            const int64_t runs = up(last - t, AT_ONCE<T>) / AT_ONCE<T>;
            count = up(last - t, runs) / runs;  // sizes alike: each loads the block
            for (int half = 0; half < 2; half++) {
                float* to = sums + half * HALF;
                const bool fetches = t == first && !widen;
                const i8* next = fetches ? small[half] + ahead : nullptr;
                const auto by_vectors = [&](const auto* from, int64_t stride) {
                    if (w.scales && !widen) linear_few(from, stride, small[half], b.some[half], size, count, to, next);
                    else linear_few(from, stride, rows[half], b.some[half], size, count, to, fetches ? rows[half] + ahead : nullptr);
                };
                if (how == Way::WHOLE) whole_few(Bytes(scratch, size), small[half], b.some[half], size, count, to, next);
                else if (numbers) by_vectors(numbers + t * room, room);
                else by_vectors(x + t * x_stride, x_stride);
            }
            finish<T>(sums, w, b, gated, count, out + t * range);
        }
    }
}

}  // namespace
