// From logits to tokens: the filters and the perturbed maximum of sampling.py, a row at a time, in the cache.
#pragma once

#include "vectors.h"

namespace {

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
