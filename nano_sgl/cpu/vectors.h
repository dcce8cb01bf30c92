// Vectors: registers of floats by GCC's extension (clang has it too), so the same source serves AVX-512, AVX2, NEON and SSE2; what the
// other files are written in. And the team of threads that goes through a step together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
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
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32; else 16
#else
constexpr bool MANY_REGISTERS = false;
#endif
constexpr float LOG2E = 1.44269504088896f, NOTHING = -INFINITY;

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef uint16_t hvec __attribute__((vector_size(VL * 2)));

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
template <class T> T* grown(std::vector<T>& x, size_t n) {  // room for n, kept from call to call, at the start of a cache line
    if (x.size() < n + 64 / sizeof(T)) x.resize(n + 64 / sizeof(T));
    return (T*)up((int64_t)x.data(), 64);
}

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };  // _Float16 is not in every compiler's C++
typedef int8_t i8;
typedef i8 bvec __attribute__((vector_size(VL)));

#if defined(__AVX512BF16__)
template <class T> constexpr bool PAIRED = std::is_same<T, bf16>::value;  // multiplied as pairs of bf16
#else
template <class T> constexpr bool PAIRED = false;
#endif

inline vec splat(float x) { return x - vec{}; }
// a b + c, with one rounding where the machine has that: left to itself GCC takes two instructions in some loops and one in others
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
inline vec shuffle(vec a, vec b, ivec at) {  // at: a constant; VL and above are of b
#if defined(__clang__)
    vec r;
    for (int i = 0; i < VL; i++) r[i] = at[i] < VL ? a[at[i]] : b[at[i] - VL];
    return r;
#else
    return __builtin_shuffle(a, b, at);
#endif
}

// Into the second cache, the first has work. In the order of the addresses: from four rows at once memory gives no more than half.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

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

inline vec load(const i8* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    bvec b; memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
#endif
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

// Element i of the first becomes the sum of r[i]: N registers, a power of two up to VL. A third of the work of N single sums.
template <int N, int H = VL / 2> inline vec totals(vec* r) {
    ivec low{}, high{};
    for (int i = 0; i < VL; i++) low[i] = i & H ? VL + i - H : i, high[i] = i & H ? VL + i : i + H;
    if constexpr (H >= N)
        for (int i = 0; i < N; i++) r[i] += turned<H>(r[i]);
    else
        for (int i = 0; i < H; i++) r[i] = shuffle(r[i], r[i + H], low) + shuffle(r[i], r[i + H], high);
    if constexpr (H > 1) return totals<N, H / 2>(r); else return r[0];
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

inline bool any(ivec x) {
    uint64_t parts[sizeof x / 8], all = 0;
    memcpy(parts, &x, sizeof x);
    for (uint64_t part : parts) all |= part;
    return all;
}

// ---- the team ---------------------------------------------------------------------------------------------------------------

extern "C" int omp_get_num_threads();

// The threads of a parallel region. A kernel shares its rows out with `omp for nowait`, which is a plain loop outside of a region; where one
// needs what another has made, all meet. Waits are short, so they spin; whoever waits for a thread that has lost its core lets go of its own.
class Team {
    std::atomic<int> arrived{0}, round{0};

public:
    void meet() {
        const int size = omp_get_num_threads(), now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
#if defined(__x86_64__)
            if (spins < 4096) { _mm_pause(); continue; }
#endif
            std::this_thread::yield();
        }
    }
};

template <class Body> void together(int threads, bool worth, Body body) {
    Team team;
#pragma omp parallel num_threads(threads) if (threads > 1 && worth)
    body(team);
}

}  // namespace
