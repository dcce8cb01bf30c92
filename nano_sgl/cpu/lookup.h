// Prompt lookup: where the last tokens of a text occurred before, and the tree of how it went on there. spec.py's Ngram is the twin.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

struct Place { int64_t match, end; };  // how many of the last tokens occur there, and the column of the last

// The `width` best places of a text of `known` tokens: the longest match first, then the latest
void find_places(const int32_t* text, int64_t known, int64_t longest, int64_t width, std::vector<Place>& places) {
    const int64_t last = known - 1;
    places.clear();
    for (int64_t p = last - 1; p >= 0; p--) {
        if (text[p] != text[last]) continue;
        int64_t match = 1;
        while (match < longest && match <= p && text[p - match] == text[last - match]) match++;
        if ((int64_t)places.size() == width && places.back().match >= match) continue;
        auto at = std::find_if(places.begin(), places.end(), [&](const Place& other) { return other.match < match; });
        places.insert(at, {match, p});
        if ((int64_t)places.size() > width) places.pop_back();
    }
}

// Row arrays of count + 1 nodes, the root first. Returns how many nodes there are.
int64_t look_up(const int32_t* text, int64_t known, int64_t count, int64_t longest, int64_t shortest, int64_t width, float decay, int64_t* tokens,
                int64_t* parents, float* scores, int64_t* quality) {
    static thread_local std::vector<Place> places;
    struct Guess { float score; int32_t token; int64_t parent; };
    static thread_local std::vector<Guess> guesses;
    static thread_local std::vector<int64_t> order, number, above, here;
    find_places(text, known, longest, width, places);
    while (!places.empty() && places.back().match < shortest) places.pop_back();
    std::fill(tokens, tokens + count + 1, 0), std::fill(parents, parents + count + 1, 0), std::fill(scores, scores + count + 1, 1.f);
    tokens[0] = text[known - 1];
    *quality = places.empty() ? 0 : places[0].match;
    if (places.empty()) return 1;
    const int64_t n = places.size();
    float total = 0, fade = 1;
    std::vector<float> votes(n);
    for (int64_t c = 0; c < n; c++) total += votes[c] = std::exp2((float)(places[c].match - places[0].match));
    guesses.clear();
    above.assign(n, -1);  // of each place the guess that its chain has come to; places that went on alike share it
    for (int64_t k = 0; k < count; k++) {
        const int64_t first = guesses.size();
        fade *= decay;
        here.assign(n, -1);
        for (int64_t c = 0; c < n; c++) {
            const int64_t end = places[c].end, at = std::min(end + 1 + k % (known - 1 - end), known - 1);
            int64_t g = first;
            while (g < (int64_t)guesses.size() && (guesses[g].token != text[at] || guesses[g].parent != above[c])) g++;
            if (g == (int64_t)guesses.size()) guesses.push_back({0, text[at], above[c]});
            guesses[g].score += votes[c] / total * fade;
            here[c] = g;
        }
        above.swap(here);
    }
    order.resize(guesses.size()), number.assign(guesses.size(), 0);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [](int64_t a, int64_t b) { return guesses[a].score > guesses[b].score; });
    const int64_t size = std::min<int64_t>(count, order.size());
    for (int64_t i = 0; i < size; i++) number[order[i]] = i + 1;
    for (int64_t i = 0; i < size; i++) {  // a parent scores at least as much as its child, and was made before it
        const Guess& guess = guesses[order[i]];
        tokens[i + 1] = guess.token, scores[i + 1] = guess.score, parents[i + 1] = guess.parent < 0 ? 0 : number[guess.parent];
    }
    return size + 1;
}

}
