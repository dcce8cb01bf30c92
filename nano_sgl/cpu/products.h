// Small products: the micro kernel, rows x registers of accumulators, and the same on AMX tiles.
#pragma once

#include "vectors.h"

namespace {

constexpr int MR = 6;   // rows of the micro tile: MR * NV accumulators, NV operands and a broadcast fill the register file

struct Ahead { const char* from; int bytes; };  // what to fetch meanwhile, so many bytes for each of a's entries; from: or null

// c[i][0 .. N * VL) (+)= sum over d of a[i][d] * b[d][..], for R rows. Strides in floats. With PAIRS a and b hold pairs of bf16.
template <int R, int N, bool ADD, bool PAIRS>
void micro(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int depth, Ahead ahead) {
    vec acc[R][N] = {};
    for (int d = 0; d < depth; d++) {
        if (ahead.from) fetch(ahead.from + d * R * ahead.bytes);
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
        for (int j = 0; j < N; j++) {  // added last: sums of sums are the more exact
            float* to = c + i * c_stride + j * VL;
            store(to, ADD ? load(to) + acc[i][j] : acc[i][j]);
        }
}

template <int R, bool ADD, bool PAIRS>
void row_panel(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int width, int depth, Ahead ahead) {
    int j = 0;
    for (; j + NV * VL <= width; j += NV * VL) micro<R, NV, ADD, PAIRS>(a, a_stride, b + j, b_stride, c + j, c_stride, depth, ahead);
    for (; j < width; j += VL) micro<R, 1, ADD, PAIRS>(a, a_stride, b + j, b_stride, c + j, c_stride, depth, ahead);
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
             int depth, Ahead ahead = {}) {
#if defined(__AMX_BF16__)
    if constexpr (PAIRS)
        if (amx && rows > MR) return tile_product<ADD>(a, a_stride, b, b_stride, c, c_stride, rows, width, depth);
#endif
    int parts = (rows + MR - 1) / MR, some;  // of sizes alike: a product of few rows loads as much and multiplies less
    for (int i = 0; i < rows; i += some) {
        some = (rows - i + parts - 1) / parts, parts--;
        auto run = row_panel<MR, ADD, PAIRS>;
        switch (some) {
            case 1: run = row_panel<1, ADD, PAIRS>; break;
            case 2: run = row_panel<2, ADD, PAIRS>; break;
            case 3: run = row_panel<3, ADD, PAIRS>; break;
            case 4: run = row_panel<4, ADD, PAIRS>; break;
            case 5: run = row_panel<5, ADD, PAIRS>; break;
        }
        run(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, width, depth,
            {ahead.from ? ahead.from + i * depth * ahead.bytes : nullptr, ahead.bytes});
    }
}

}  // namespace
