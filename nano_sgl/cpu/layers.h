// A step through a model's layers: what lies between the products, and the loop of model.py's `Model.forward` in one call.
//
//     x -> norm -> qkv -> [norm] -> rope, store K V -> attention -> o -> + x, norm -> gate_up -> silu(gate) * up -> down -> + x, norm -> ...
//
// The arithmetic and its roundings are those of the single operations; what the one call saves is a wake of the threads and some microseconds of
// Python at each of them: with few tokens most of a layer's time that is not spent on reading its weights.
#pragma once

#include "attention.h"
#include "linear.h"

namespace {

constexpr int64_t ALONE = 1 << 14;  // elements that are not worth waking other threads for

template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* new_residual, int64_t rows, int64_t heads, int64_t size,
              int64_t x_stride, int64_t x_head_stride, int64_t weight_stride, float eps) {
#pragma omp for nowait
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

template <class T> void rope(T* x, const T* cs, int64_t tokens, int64_t heads, int64_t half, int64_t x_stride, int64_t x_head_stride) {
    const T *cosines = cs, *sines = cs + tokens * 2 * half + half;  // the second half of the second factor: + sin
#pragma omp for nowait
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

// Strides in bytes
inline void store_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots, int64_t tokens, int64_t heads,
                     int64_t k_stride, int64_t k_head_stride, int64_t v_stride, int64_t v_head_stride, int64_t slot_stride, int64_t head_bytes) {
#pragma omp for nowait
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            memcpy(k_cache + slots[t] * slot_stride + h * head_bytes, k + t * k_stride + h * k_head_stride, head_bytes);
            memcpy(v_cache + slots[t] * slot_stride + h * head_bytes, v + t * v_stride + h * v_head_stride, head_bytes);
        }
}

template <class T> void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int64_t stride) {
    const int64_t parts = up(size, 512) / 512;
#pragma omp for nowait
    for (int64_t i = 0; i < tokens * parts; i++) {
        const int64_t t = i / parts, end = std::min(size, (i % parts + 1) * 512);
        for (int64_t d = i % parts * 512; d < end; d += VL) {
            const int n = end - d;
            store(out + t * size + d, gate<T>(load(gate_up + t * stride + d, n), load(gate_up + t * stride + size + d, n)), n);
        }
    }
}

struct Layer {  // as model.py's; native.py has the same list of fields
    Weight qkv, o, gate_up, down;
    const void *qk_norm, *mlp_norm, *next_norm;  // qk_norm: [H + G, D] or null
    void *k_cache, *v_cache;
    int64_t window;
};

struct Step {
    const Layer* layers;
    const void *first_norm, *turn;  // [E]; rope's factors [2, T, 1, D]
    void *x, *out;                  // [T, E]: the embedded tokens, which become the residual; the hidden states after the last norm
    const int64_t* slots;           // [T]
    int64_t num_layers, hidden, intermediate;
    float eps;
};

template <class T> void run_layers(const Step& s, const Attention& given) {
    const int64_t tokens = given.tokens, dim = given.dim, heads = given.heads, both = heads + given.kv_heads, all = both + given.kv_heads;
    const int64_t bytes = sizeof(T), widest = std::max({s.hidden, s.intermediate, heads * dim});
    static thread_local std::vector<T> scratch;  // the caller's, used by all
    static thread_local std::vector<float> packed;
    T* free = grown(scratch, tokens * ((all + both + heads) * dim + s.intermediate + s.hidden) + 5 * 64);
    auto take = [&](int64_t width) { T* part = free; free += up(tokens * width, 64); return part; };
    T *qkv = take(all * dim), *normed = take(both * dim), *attended = take(heads * dim);
    T *active = take(s.intermediate), *y = take(s.hidden);
    T *x = (T*)s.x, *h = (T*)s.out;
    float* other = grown(packed, x_room<T>(tokens, widest));
    auto product = [&](const T* from, const Weight& w, T* to, Team& team, bool gated = false) {
        linear(from, w.size, w, to, tokens, gated, other, team);
        team.meet();
    };
    auto add_norm = [&](const void* weight, Team& team) {
        rms_norm<T>(y, x, (const T*)weight, h, x, tokens, 1, s.hidden, s.hidden, 0, 0, s.eps);
        team.meet();
    };
    together(given.threads, true, [&](Team& team) {
        const TileScope scope(PAIRED<T>);
        rms_norm<T>(x, nullptr, (const T*)s.first_norm, h, nullptr, tokens, 1, s.hidden, s.hidden, 0, 0, s.eps);
        team.meet();
        for (const Layer* layer = s.layers; layer < s.layers + s.num_layers; layer++) {
            product(h, layer->qkv, qkv, team);
            T* qk = qkv;
            int64_t stride = all * dim;
            if (layer->qk_norm) {
                qk = normed, stride = both * dim;
                rms_norm<T>(qkv, nullptr, (const T*)layer->qk_norm, qk, nullptr, tokens * both, both, dim, all * dim, dim, dim, s.eps);
                team.meet();
            }
            rope<T>(qk, (const T*)s.turn, tokens, both, dim / 2, stride, dim);
            team.meet();
            store_kv((const char*)(qk + heads * dim), (const char*)(qkv + both * dim), (char*)layer->k_cache, (char*)layer->v_cache, s.slots, tokens,
                     given.kv_heads, stride * bytes, dim * bytes, all * dim * bytes, dim * bytes, given.slot_stride * bytes, dim * bytes);
            team.meet();
            Attention a = given;
            a.q = qk, a.k_cache = layer->k_cache, a.v_cache = layer->v_cache, a.out = attended;
            a.q_stride = stride, a.q_head_stride = dim, a.window = layer->window;
            run_attention<T>(a, team);
            team.meet();
            product(attended, layer->o, y, team);
            add_norm(layer->mlp_norm, team);
            product(h, layer->gate_up, active, team, true);
            product(active, layer->down, y, team);
            add_norm(layer->next_norm, team);
        }
    });
}

}  // namespace
