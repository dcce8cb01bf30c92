// The CPU's kernels: those of kernels.py, the "cpp" backend of attention.py, the draw of sampling.py, and model.py's loop over layers.
//
// An eager torch operation costs microseconds before it does anything, and torch's attention wants contiguous keys, so a paged cache must first be
// gathered. Here each step between two products of a layer is one call, a product reads the weights once, a row of logits becomes a token in some
// six passes, attention reads the pool through the slot table, and a step of few tokens is a single call for all layers.
//
//     cpu/vectors.h    registers: loads and stores of every type, 2^x, logarithm, transposition; the team of threads
//     cpu/products.h   small products: micro kernel, AMX tiles
//     cpu/attention.h  attention over a work list
//     cpu/linear.h     products with weights, int8 among them
//     cpu/layers.h     what lies between the products, and the loop over layers
//     cpu/draw.h       from logits to tokens
//     cpu/lookup.h     what followed the last tokens of a text before
//     cpu/mask.h       what a grammar lets come next
//     cpu/trie.h       the states of an automaton, followed down the tree of a vocabulary
//     cpu/sets.h       what may come next in a grammar, beyond a state's piece
//     cpu/row.h        and the readings of a grammar, for the few tokens that leave a state's piece
//     here             plain C functions on raw pointers, called from Python through ctypes (native.py), which releases the lock. They check nothing.
//
// Products multiply in float, or, with bfloat16 tensors on a CPU that has them, by bf16 dot instructions on pairs (AVX512_BF16), or on AMX tiles
// where there are rows enough. Sums are float everywhere. Threads are OpenMP's, resolved to the runtime that torch has loaded, so both share one
// pool; scratch belongs to a thread, so callers may be several.
//
// After: Goto and van de Geijn 2008 (micro kernels on packed panels), Dao 2022 (online softmax in blocks).

#include "cpu/draw.h"
#include "cpu/layers.h"
#include "cpu/lookup.h"
#include "cpu/mask.h"
#include "cpu/row.h"

// dtype 0 is float32, 1 bfloat16, 2 float16
#define BY_TYPE(dtype, ...) \
    if (dtype == 0) { using T = float; __VA_ARGS__; } \
    else if (dtype == 1) { using T = bf16; __VA_ARGS__; } \
    else { using T = f16; __VA_ARGS__; }

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

void nano_layers(const Step* step, const Attention* a, int dtype) { BY_TYPE(dtype, run_layers<T>(*step, *a)) }

void nano_attention(const Attention* a, int dtype) {
    BY_TYPE(dtype, together(a->threads, true, [&](Team& team) {
        const TileScope scope(PAIRED<T>);
        run_attention<T>(*a, team);
    }))
}

void nano_linear(const void* x, const Weight* w, void* out, int64_t tokens, int64_t x_stride, int float_out, int threads, int dtype) {
    static thread_local std::vector<float> packed;  // the caller's, used by all
    BY_TYPE(dtype, {
        float* scratch = grown(packed, x_room<T>(tokens, w->size));
        together(threads, tokens * w->outputs * w->size > ALONE, [&](Team& team) {
            const TileScope scope(way<T>(*w, tokens) >= Way::TILES);
            if (float_out) linear((const T*)x, x_stride, *w, (float*)out, tokens, false, scratch, team);
            else linear((const T*)x, x_stride, *w, (T*)out, tokens, false, scratch, team);
        });
    })
}

void nano_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* new_residual, int64_t rows, int64_t heads,
                   int64_t size, int64_t x_stride, int64_t x_head_stride, int64_t weight_stride, float eps, int threads, int dtype) {
    BY_TYPE(dtype, together(threads, rows * size > ALONE, [&](Team&) {
        rms_norm((const T*)x, (const T*)residual, (const T*)weight, (T*)out, (T*)new_residual, rows, heads, size, x_stride, x_head_stride,
                 weight_stride, eps);
    }))
}

void nano_rope(void* x, const void* cs, int64_t tokens, int64_t heads, int64_t half, int64_t x_stride, int64_t x_head_stride, int threads,
               int dtype) {
    BY_TYPE(dtype, together(threads, tokens * heads * half > ALONE, [&](Team&) {
        rope((T*)x, (const T*)cs, tokens, heads, half, x_stride, x_head_stride);
    }))
}

void nano_store_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots, int64_t tokens, int64_t heads,
                   int64_t k_stride, int64_t k_head_stride, int64_t v_stride, int64_t v_head_stride, int64_t slot_stride, int64_t head_bytes,
                   int threads) {  // strides in bytes
    together(threads, tokens * heads * head_bytes > 2 * ALONE, [&](Team&) {
        store_kv(k, v, k_cache, v_cache, slots, tokens, heads, k_stride, k_head_stride, v_stride, v_head_stride, slot_stride, head_bytes);
    });
}

void nano_silu_mul(const void* gate_up, void* out, int64_t tokens, int64_t size, int64_t stride, int threads, int dtype) {
    BY_TYPE(dtype, together(threads, tokens * size > ALONE, [&](Team&) { silu_mul((const T*)gate_up, (T*)out, tokens, size, stride); }))
}

// rows[i] of logits [N, V] draws with parameters values[request[i]] and key words keys[i]
void nano_draw(const float* logits, int64_t vocab, int64_t n, const int64_t* rows, const int64_t* request, const float* values, const int32_t* keys,
               const int32_t* words, float gap_slack, float mass_slack, int64_t* tokens, float* best, int threads) {
    together(threads, n > 1, [&](Team&) {
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < n; i++)
            draw(logits + rows[i] * vocab, vocab, ((const Draw*)values)[request[i]], keys + 2 * i, words, gap_slack, mass_slack, tokens[i], best[i]);
    });
}

// Rows of text [n, stride], of which known[i] tokens are there; out: [n, count + 1] each, sizes and quality [n]. Returns how many rows have guesses.
int64_t nano_look_up(const int32_t* text, int64_t stride, int64_t n, const int64_t* known, int64_t count, int64_t longest, int64_t shortest,
                     int64_t width, float decay, int64_t* tokens, int64_t* parents, float* scores, int64_t* sizes, int64_t* quality) {
    int64_t found = 0;
    for (int64_t i = 0, at = 0; i < n; i++, at += count + 1) {
        sizes[i] = look_up(text + i * stride, known[i], count, longest, shortest, width, decay, tokens + at, parents + at, scores + at, quality + i);
        found += sizes[i] > 1;
    }
    return found;
}

void nano_has_row(const Grammars* g, const int64_t* states, bool* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = entry_of(*g, states[i]).map >= 0;
}

void nano_advance(const Grammars* g, const int64_t* states, const int64_t* tokens, int64_t* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = advance(*g, states[i], tokens[i]);
}

// Trees of m nodes: out [n, m], the states at the nodes
void nano_walk(const Grammars* g, const int64_t* roots, const int64_t* tokens, const int64_t* parents, int64_t* out, int64_t n, int64_t m) {
    for (int64_t at = 0; n-- > 0; at += m) {
        out[at] = *roots++;
        for (int64_t i = at + 1; i < at + m; i++) out[i] = advance(*g, out[at + parents[i]], tokens[i]);
    }
}

void nano_trie_prepare(Walk* w) { prepare(*w); }

int nano_trie_walk(Walk* w) { return walk(*w); }

// What may be read from the root on, in a state; or where that differs from what may be beside it
void nano_row_begin(RowWalk* w, int state, int place, int x, int beside) { go_down(*w, 0, state, place, 0, x, beside); }

// What comes behind a place that ends at some nodes; EXPAND_STATE, or why it stopped: then nothing was done
int64_t nano_row_exits(RowWalk* w, int place, int x, const uint64_t* members, const int32_t* ranks, const int16_t* begun, const int32_t* nodes,
                       const int32_t* counts, int64_t n, int64_t more) {
    return guarded(*w->sets, [&] {
        if (w->sets->endings[place].after < 0 && (w->unknown = w->sets->end(place, w->walk->expanded)) != FOREVER) return (int)EXPAND_STATE;
        end_at(*w, place, {members, ranks, begun, nodes, counts, n, more}, x);
        return (int)FOLLOWED;
    });
}

// As far as it goes; last: then what was found, and its values, unless something was left out
int64_t nano_row_follow(RowWalk* w, int last) {
    return guarded(*w->sets, [&] {
        int how = follow_readings(*w);
        if (how == FOLLOWED && last) how = gather(*w);
        return how != FOLLOWED || !last ? how : w->num_left ? (int)LEFT_OUT : settle(*w);
    });
}

int64_t nano_row_read(RowWalk* w, int state) { return guarded(*w->sets, [&] { return read_row(*w, state); }); }
int64_t nano_row_along(RowWalk* w, uint8_t* text, int is_given, int64_t size, int64_t budget) {
    return guarded(*w->sets, [&] { return go_along(*w, text, is_given, size, budget); });
}
int64_t nano_row_settle(RowWalk* w) { return guarded(*w->sets, [&] { return settle(*w); }); }

// The lines, or the values, of leaves
int64_t nano_row_lines(RowWalk* w, const Leaf* leaves, int64_t n, int32_t* out) {
    return guarded(*w->sets, [&] { for (int64_t i = 0; i < n; i++) out[i] = line_of(*w, leaves[i]); return 0; });
}
int64_t nano_row_values(RowWalk* w, const Leaf* leaves, int64_t n, int32_t* out) {
    return guarded(*w->sets, [&] { for (int64_t i = 0; i < n; i++) out[i] = value_of(*w, leaves[i]); return 0; });
}

void nano_row_forget(RowWalk* w) { forget(*w); }

// Where there is no memory: nullptr, FAILED
void* nano_frames_new() { return new (std::nothrow) RowFrames; }
void nano_frames_free(RowFrames* frames) { delete frames; }
int64_t nano_frames_loop(Frames* frames, int between, int low, int high) {
    return attempt([&] { frames->loops.push_back({between, low, high}); return 0; });
}
int64_t nano_frames_tell(Frames* frames, int frame, int item, int64_t low, int64_t high, int nullable) {
    return attempt([&] { frames->tell(frame, item, low, high, nullable); return 0; });
}
int64_t nano_frames_firsts(Frames* frames, int frame, const int32_t* flat, int64_t n) {
    return attempt([&] { frames->tell_firsts(frame, flat, n); return 0; });
}

// piece: null, or what is known; then `kind` says it
int64_t nano_frames_piece(RowFrames* frames, int state, int counted, int kind, const Piece* piece) {
    return attempt([&] {
        if (piece) kind = frames->pieces.size(), frames->pieces.push_back(*piece);
        frames->of(state, counted) = kind;
        return 0;
    });
}
void nano_frames_forget(RowFrames* frames) { frames->piece_of.clear(), frames->pieces.clear(); }

void* nano_sets_new(Frames* frames, const int64_t* bounds) {
    RowSets* made = nullptr;
    attempt([&] { made = new RowSets(*frames, bounds); return 0; });
    return static_cast<SetsHead*>(made);
}
void nano_sets_free(SetsHead* sets) { delete static_cast<RowSets*>(sets); }

int64_t nano_sets_stack(RowSets* sets, const Held* frames, int64_t n) {
    return guarded(*sets, [&] {
        std::vector<Held> some(frames, frames + n);
        return sets->of(some);
    });
}
int64_t nano_sets_covers(RowSets* sets, int one, int other) { return guarded(*sets, [&] { return sets->covers(one, other); }); }
int64_t nano_sets_closure(RowSets* sets, int stack) { return guarded(*sets, [&] { return sets->closure(stack); }); }
int64_t nano_sets_set(RowSets* sets, int ends, const Config* configs, int64_t n) {
    return guarded(*sets, [&] {
        std::vector<Config> some(configs, configs + n);
        return sets->set(ends, some);
    });
}
int64_t nano_sets_value(RowSets* sets, const Line* lines, int64_t n) { return guarded(*sets, [&] { return sets->value(lines, n); }); }
int64_t nano_sets_join(RowSets* sets, const int32_t* a, const int32_t* b, int64_t n, int32_t* out) {
    return guarded(*sets, [&] { for (int64_t i = 0; i < n; i++) out[i] = sets->join(a[i], b[i]); return 0; });
}
int64_t nano_sets_lines(RowSets* sets, const int32_t* values, int64_t n, int32_t* out) {
    return guarded(*sets, [&] { for (int64_t i = 0; i < n; i++) out[i] = sets->entry(values[i]); return 0; });
}
int64_t nano_sets_state(RowSets* sets, int set) { return guarded(*sets, [&] { return sets->state(set); }); }
int64_t nano_sets_place(RowSets* sets, int stack, int loop, int count) { return guarded(*sets, [&] { return sets->place({stack, loop, count}); }); }

// The frames of a stack, a set, and the configurations of a state, all as numbers: how many there are, in `found`; -1: of a state that is not its own
int64_t nano_sets_of_stack(RowSets* sets, int stack) { return sets->found = sets->frames_of(stack), 2 * sets->size_of(stack); }
int64_t nano_sets_of_set(RowSets* sets, int set) { return sets->found = sets->sets.at(set), 4 * sets->sets.length(set); }
int64_t nano_sets_of_state(RowSets* sets, int state) {
    const auto key = sets->key_of_state.find(state);
    if (key == sets->key_of_state.end()) return -1;
    return sets->found = sets->keys.at(key->second), 4 * sets->keys.length(key->second);
}

int64_t nano_join_maps(const int16_t* a, const int16_t* b, int64_t size, int64_t classes_a, int64_t classes_b, int16_t* out, int32_t* sizes,
                       int64_t* keys) {
    return join(a, b, size, classes_a, classes_b, out, sizes, keys);
}

// Row rows[i] of logits, `stride` floats apart and as many to mask, by states[i]; rows null: row i. Few rows go in blocks, so that all threads work.
void nano_mask(const Grammars* g, float* logits, int64_t stride, const int64_t* rows, const int64_t* states, int64_t n, int threads) {
    const int64_t blocks = std::clamp<int64_t>(2 * threads / std::max<int64_t>(n, 1), 1, up(stride, MASK_BLOCK) / MASK_BLOCK);
    const int64_t size = up(up(stride, blocks) / blocks, 64);
    const auto part = [&](int64_t i) {
        const int64_t row = i / blocks, begin = i % blocks * size;
        mask(*g, states[row], logits + (rows ? rows[row] : row) * stride, begin, std::min(begin + size, stride));
    };
    int64_t work = 0;
    for (int64_t i = 0; i < n; i++) work += written(*g, states[i], stride);
    if (threads == 1 || n * blocks == 1 || work < ALONE) {  // even a team of one costs as much as some rows
        for (int64_t i = 0; i < n * blocks; i++) part(i);
        return;
    }
    together(threads, true, [&](Team&) {
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < n * blocks; i++) part(i);
    });
}

}
