// What may come next in a grammar: stacks, sets of readings, the values and states that they become. readings.py is the twin and says what they are.
//
// All of these are lists of numbers that are met again and again, so each kind is interned: a list has one number, and equal lists have the same.
// What belongs to frames alone, and not to who stacks them, is told once for all grammars of a vocabulary (Frames); what is missing stops whoever
// asks for it, with nothing half done, and he is called again.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace {

constexpr int32_t BOTTOM = -1, IN_REGISTER = -1, FOREVER = INT32_MAX;   // the frame below which nothing is; in place of a count
constexpr int64_t NO_BOUND = INT64_MAX;
enum { LINE_MORE = 1, LINE_KEEP = 2, LINE_ADD = 4 };            // of a line, as tables.py has them

// Why somebody stopped. A frame, in `missing`, is to be told first; or a bound of the grammar was met.
enum { ASKS_FRAME = -1, LATE = -2, MANY_FRAMES = -3, MANY_READINGS = -4, MANY_STATES = -5, MANY_PLACES = -6, FAILED = -7 };
struct Stop { int why; };

struct Config {
    int32_t q, stack, loop, count;
    bool operator<(const Config& o) const {
        return q != o.q ? q < o.q : stack != o.stack ? stack < o.stack : loop != o.loop ? loop < o.loop : count < o.count;
    }
    bool operator==(const Config& o) const { return q == o.q && stack == o.stack && loop == o.loop && count == o.count; }
};

struct Held { int32_t frame, below; };          // a frame, and the stack below it
inline bool operator<(const Held& a, const Held& b) { return a.frame != b.frame ? a.frame < b.frame : a.below < b.below; }
inline bool operator==(const Held& a, const Held& b) { return a.frame == b.frame && a.below == b.below; }

struct Line { int32_t low, high, set; };        // of a value: while low <= count <= high, it leads to this set

// Of a counted repeat: the state between two items, and how many there may be. Without an upper bound (FOREVER) it is counted up to the lower one.
struct Loop {
    int32_t between, low, high;

    int32_t counts() const { return high == FOREVER ? low : high; }
};

// Frame -> what its text begins with: firsts[first .. last], each a state, its loop, and the frames pushes[begin .. end] that lie below, the lowest
// first; first is -1 if nobody has asked. As a repeat it is `low` to `high` times `item`.
struct First { int32_t q, loop, begin, end; };
struct Frame { int64_t low, high; int32_t item, first, last; bool nullable; };

struct Frames {
    std::vector<int32_t> index;                 // by node, -1
    std::vector<Frame> frames{{-1, NO_BOUND, BOTTOM, 0, 0, false}};     // that below all others
    std::vector<First> firsts;
    std::vector<int32_t> pushes;
    std::vector<Loop> loops;

    Frame& operator[](int32_t frame) { return frames.at(frame == BOTTOM ? 0 : index.at(frame)); }      // throws, of one that nobody has told
    const Loop& loop(int32_t i) const { return loops.at(i); }

    void tell(int32_t frame, int32_t item, int64_t low, int64_t high, bool nullable) {
        if ((size_t)frame >= index.size()) index.resize(std::max<size_t>(2 * index.size(), frame + 64), -1);
        if (index[frame] >= 0) return;
        index[frame] = frames.size();
        frames.push_back({low, high < 0 ? NO_BOUND : high, item, -1, -1, nullable});
    }

    // flat: for each first its state, its loop, how many frames it pushes, and these.
    void tell_firsts(int32_t frame, const int32_t* flat, int64_t n) {
        Frame& one = (*this)[frame];
        if (one.first >= 0) return;
        one.first = firsts.size();
        for (const int32_t* end = flat + n; flat < end; flat += 3 + flat[2]) {
            firsts.push_back({flat[0], flat[1], (int32_t)pushes.size(), (int32_t)pushes.size() + flat[2]});
            pushes.insert(pushes.end(), flat + 3, flat + 3 + flat[2]);
        }
        one.last = firsts.size();
    }
};

// Lists of T, numbered in the order in which they are met.
template <class T>
struct Lists {
    std::vector<T> items;
    std::vector<int64_t> begins{0};
    std::vector<uint32_t> hashes;
    std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // by linear probing

    int64_t size() const { return hashes.size(); }
    int64_t length(int64_t i) const { return begins[i + 1] - begins[i]; }
    const T* at(int64_t i) const { return items.data() + begins[i]; }   // until the next one is added

    int32_t operator()(const T* list, int64_t n) {
        static_assert(sizeof(T) % 4 == 0, "hashed by words");
        uint64_t hash = n;
        for (const int32_t *word = (const int32_t*)list, *end = word + n * (sizeof(T) / 4); word < end; word++)
            hash = (hash ^ (uint32_t)*word) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
        const int64_t most = table.size() - 1;
        int64_t at = hash & most;
        for (; table[at] >= 0; at = (at + 1) & most) {
            const int32_t found = table[at];
            if (hashes[found] == (uint32_t)hash && length(found) == n && std::equal(list, list + n, this->at(found))) return found;
        }
        if (2 * (size() + 1) > (int64_t)table.size()) {
            std::vector<int32_t> larger(4 * table.size(), -1);
            const auto free = [&](uint32_t hash) {
                int64_t at = hash & (larger.size() - 1);
                while (larger[at] >= 0) at = (at + 1) & (larger.size() - 1);
                return at;
            };
            for (int64_t i = 0; i < size(); i++) larger[free(hashes[i])] = i;
            at = free(hash);
            table.swap(larger);
        }
        // Memory first: where there is none, nothing has changed
        if (hashes.size() == hashes.capacity()) hashes.reserve(2 * size() + 16);
        if (begins.size() == begins.capacity()) begins.reserve(2 * size() + 16);
        items.insert(items.end(), list, list + n);
        begins.push_back(items.size());
        hashes.push_back(hash);
        table[at] = size() - 1;
        return size() - 1;
    }
};

// What native.py sees of a grammar's sets: see Sets.
struct SetsHead {
    const void* found;                          // what was asked for last
    const int32_t *new_states, *new_lines;      // what the tables do not have yet: from what count on a state accepts; lines, 4 numbers each
    int64_t num_new_states, num_new_lines, next_state, next_line, places, missing, keep, add;
    int64_t written;                            // whether the tables have what was new
    double deadline;                            // by the clock of time.monotonic
    int64_t max_frames, max_readings, max_states, max_places, compared;
};

// What comes behind a piece are firsts[after .. end], (state, place) each, the states expanded; after is -1 if that is not known yet. A place that
// counts has a state `between` two characters (else it is -1), where it may end after `least` to `most` more. own: its count is that of the row.
struct Ending { int32_t after, end, between, least, most, own; };

struct Where { int32_t stack, loop, count; };   // a place
inline bool operator==(const Where& a, const Where& b) { return a.stack == b.stack && a.loop == b.loop && a.count == b.count; }
inline bool operator==(const Line& a, const Line& b) { return a.low == b.low && a.high == b.high && a.set == b.set; }

// One grammar's.
struct Sets : SetsHead {
    Frames& frames;
    Lists<Held> held;                           // of frames, in order, as they were asked for and as they are needed
    std::vector<int32_t> stack_of, stacks;      // by list, -1: nobody has looked what of it is needed; stack -> list
    std::vector<int32_t> follow;                // stack -> the set of what may come when all above it has ended, -1
    Lists<Config> sets;                         // the first item says in `q` whether the text may end
    Lists<Line> values;
    std::vector<int32_t> entries;               // value -> its first line in the tables, -1
    Lists<Config> keys;                         // of states: the first item says in `q` from what count on it accepts
    std::vector<int32_t> states;                // list -> state
    std::unordered_map<int32_t, int32_t> key_of_state;
    std::unordered_map<uint64_t, int32_t> joined, covered;
    Lists<Where> where;                         // places
    std::vector<Ending> endings;
    std::vector<int32_t> firsts;
    std::vector<int32_t> fresh_states, fresh_lines;
    int64_t ticks = 0, small = 0;

    Sets(Frames& frames, const int64_t* bounds) : SetsHead(), frames(frames) {
        deadline = 1e300;
        max_frames = bounds[0], max_readings = bounds[1], max_states = bounds[2], max_places = bounds[3], compared = bounds[4];
        values(nullptr, 0), entries.push_back(0);
    }

    // Before work: so many steps of it.
    void tick(int64_t steps = 1) {
        const int64_t before = ticks >> 8;
        ticks += steps;
        if (ticks >> 8 == before) return;
        if (std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() > deadline) throw Stop{LATE};
    }

    void count_places(int64_t more) {
        places += more;
        if (places > max_places) throw Stop{MANY_PLACES};
        tick();
    }

    // What takes a tenth of a place: entries of tables.
    void count_small() {
        if (++small % 10 == 0) count_places(1);
    }

    // ---- stacks

    int64_t size_of(int32_t stack) const { return held.length(stacks[stack]); }
    const Held* frames_of(int32_t stack) const { return held.at(stacks[stack]); }
    void add_frames(int32_t stack, std::vector<Held>& to) const { to.insert(to.end(), frames_of(stack), frames_of(stack) + size_of(stack)); }

    int32_t push(int32_t frame, int32_t stack) {
        const Held one{frame, stack};
        return of(&one, 1);
    }

    int32_t of(std::vector<Held>& some) {
        tick(some.size());
        std::sort(some.begin(), some.end());
        return of(some.data(), std::unique(some.begin(), some.end()) - some.begin());
    }

    // The stack that allows what any of the frames does: in order, each once.
    int32_t of(const Held* some, int64_t n) {
        int32_t list = held(some, n), whole = list;
        if (list == (int32_t)stack_of.size()) stack_of.push_back(-1);
        if (stack_of[list] >= 0) return stack_of[list];
        if (n > 1) {
            std::vector<Held> kept = needed(some, n);
            if ((int64_t)kept.size() > max_frames) throw Stop{MANY_FRAMES};
            if ((int64_t)kept.size() < n) list = held(kept.data(), n = kept.size());
            if (list == (int32_t)stack_of.size()) stack_of.push_back(-1);
        }
        if (stack_of[list] < 0) {
            follow.resize(stacks.size() + 1, -1);
            stacks.push_back(list);
            stack_of[list] = stacks.size() - 1;
            stack_of[whole] = stack_of[list];
            count_places(n + 1);
        }
        return stack_of[whole] = stack_of[list];
    }

    // Without those that others cover.
    std::vector<Held> needed(const Held* some, int64_t n) {
        struct Bounded { int32_t item; int64_t low, high; Held one; };
        std::vector<Bounded> all(n);
        for (int64_t i = 0; i < n; i++) {
            const Frame& frame = frames[some[i].frame];
            all[i] = {frame.item, frame.low, frame.high, some[i]};
        }
        std::sort(all.begin(), all.end(), [](const Bounded& a, const Bounded& b) {
            return a.item != b.item ? a.item < b.item : a.high != b.high ? a.high > b.high : a.low != b.low ? a.low < b.low : a.one < b.one;
        });
        std::vector<Held> kept;
        for (int64_t i = 0, end; i < n; i = end) {
            for (end = i + 1; end < n && all[end].item == all[i].item;) end++;
            const size_t first = kept.size();
            for (int64_t k = i; k < end; k++) {
                const auto is_covered = [&](const Held& other) { return frame_covers(other, all[k].one, 4); };
                if (end - i > compared || std::none_of(kept.begin() + first, kept.end(), is_covered)) kept.push_back(all[k].one);
            }
        }
        std::sort(kept.begin(), kept.end());
        return kept;
    }

    // Whether a stack allows all that another does; never wrongly true.
    bool covers(int32_t one, int32_t other, int depth = 4) {
        if (one == other) return true;
        const int64_t ours = size_of(one), theirs = size_of(other);
        if (!depth || ours * theirs > compared) return false;
        const uint64_t key = ((uint64_t)one << 29 | other) << 3 | depth;
        if (const auto known = covered.find(key); known != covered.end()) return known->second;
        tick();
        bool all = true;
        for (int64_t k = 0; k < theirs && all; k++) {
            bool any = false;
            for (int64_t i = 0; i < ours && !any; i++) any = frame_covers(frames_of(one)[i], frames_of(other)[k], depth);
            all = any;
        }
        covered[key] = all, count_small();
        return all;
    }

    bool frame_covers(const Held& one, const Held& other, int depth) {
        if (one.frame != other.frame) {
            const Frame &a = frames[one.frame], &b = frames[other.frame];
            if (a.item != b.item || a.low > b.low || a.high < b.high) return false;
        }
        return covers(one.below, other.below, depth - 1);
    }

    // ---- sets of configurations

    bool may_end(int32_t set) const { return sets.at(set)->q; }
    void add_configs(int32_t set, std::vector<Config>& to) const { to.insert(to.end(), sets.at(set) + 1, sets.at(set) + sets.length(set)); }

    int32_t closure(int32_t stack) {
        if (follow[stack] >= 0) return follow[stack];
        std::vector<Held> below;                // frames that may come next, and what lies below each
        bool ends = false;
        const Held top = *frames_of(stack);
        if (size_of(stack) == 1 && top.frame != BOTTOM && !frames[top.frame].nullable) {
            below.push_back(top);
        } else {
            ends = open(stack, below);
        }
        std::vector<Config> configs;
        for (const Held& one : below) {
            const Frame frame = frames[one.frame];
            if (frame.first < 0) {
                missing = one.frame;
                throw Stop{ASKS_FRAME};
            }
            for (int32_t i = frame.first; i < frame.last; i++) {
                int32_t base = one.below;
                for (int32_t k = frames.firsts[i].begin; k < frames.firsts[i].end; k++) base = push(frames.pushes[k], base);
                configs.push_back({frames.firsts[i].q, base, frames.firsts[i].loop, 0});
            }
        }
        return follow[stack] = set(ends, configs);
    }

    // All frames that may come next, one stack below each, or they would multiply; whether the end may.
    bool open(int32_t stack, std::vector<Held>& below) {
        std::vector<Held> work, seen, under;
        bool ends = false;
        add_frames(stack, work);
        seen = work;                            // ascending
        while (!work.empty()) {
            const Held one = work.back();
            work.pop_back();
            if (one.frame == BOTTOM) {
                ends = true;
                continue;
            }
            if (frames[one.frame].nullable) {
                for (int64_t i = 0; i < size_of(one.below); i++) {
                    const Held next = frames_of(one.below)[i];
                    const auto at = std::lower_bound(seen.begin(), seen.end(), next);
                    if (at != seen.end() && *at == next) continue;
                    seen.insert(at, next), work.push_back(next);
                }
            }
            tick();
        }
        for (size_t i = 0, end; i < seen.size(); i = end) {
            for (end = i + 1; end < seen.size() && seen[end].frame == seen[i].frame;) end++;
            if (seen[i].frame == BOTTOM) continue;
            under.clear();
            for (size_t k = i; k < end; k++) add_frames(seen[k].below, under);
            below.push_back({seen[i].frame, end == i + 1 ? seen[i].below : of(under)});
        }
        return ends;
    }

    int32_t set(bool ends, std::vector<Config>& configs) {
        bool plain = true;
        tick(configs.size());
        for (Config& one : configs) {
            plain &= !one.loop;
            if (one.loop && frames.loop(one.loop).high == FOREVER) one.count = std::min(one.count, frames.loop(one.loop).low);
        }
        std::sort(configs.begin(), configs.end(), [](const Config& a, const Config& b) {
            return a.q != b.q ? a.q < b.q : a.loop != b.loop ? a.loop < b.loop : a.count != b.count ? a.count < b.count : a.stack < b.stack;
        });
        const auto are_at_one_place = [](const Config& a, const Config& b) { return a.q == b.q && a.loop == b.loop && a.count == b.count; };
        size_t n = 0;
        std::vector<Held> all;
        for (size_t i = 0, end; i < configs.size(); i = end) {
            Config one = configs[i];
            bool several = false;
            for (end = i + 1; end < configs.size() && are_at_one_place(configs[end], one); end++) several |= configs[end].stack != one.stack;
            if (several) {
                all.clear();
                for (size_t k = i; k < end; k++)
                    if (k == i || configs[k].stack != configs[k - 1].stack) add_frames(configs[k].stack, all);
                one.stack = of(all);
            }
            configs[n++] = one;
        }
        configs.resize(n);
        if (n > 1 && !plain) leave_out(configs);
        std::sort(configs.begin(), configs.end());
        return intern_set(ends, configs.data(), configs.size());
    }

    // The places in a repeat that have come further than others, which may go on in the same ways and longer.
    void leave_out(std::vector<Config>& configs) {
        std::vector<int32_t> enough;            // stacks of those that need no more turns
        size_t n = 0;
        for (size_t i = 0; i < configs.size(); i++) {
            const Config one = configs[i];
            if (i && (configs[n - 1].q != one.q || configs[n - 1].loop != one.loop)) enough.clear();
            if (one.loop && one.count >= 0) {
                if (std::any_of(enough.begin(), enough.end(), [&](int32_t other) { return covers(other, one.stack); })) continue;
                if (one.count >= frames.loop(one.loop).low && (int64_t)enough.size() < compared) enough.push_back(one.stack);
            }
            configs[n++] = one;
        }
        configs.resize(n);
    }

    int32_t intern_set(bool ends, const Config* configs, int64_t n) {
        Config few[9];
        std::vector<Config> many;
        Config* key = few;
        if (n > 8) many.resize(n + 1), key = many.data();
        key[0] = {ends, 0, 0, 0};
        std::copy(configs, configs + n, key + 1);
        if (n > max_readings) throw Stop{MANY_READINGS};
        const int64_t before = sets.size();
        const int32_t found = sets(key, n + 1);
        if (found == before) count_places(n + 1);
        return found;
    }

    int32_t both(int32_t a, int32_t b) {
        if (a == b) return a;
        std::vector<Config> configs;
        add_configs(a, configs), add_configs(b, configs);
        return set(may_end(a) || may_end(b), configs);
    }

    // ---- values

    bool always(int32_t value) const { return values.length(value) == 1 && values.at(value)->low == 0 && values.at(value)->high == FOREVER; }

    int32_t join(int32_t a, int32_t b) {
        if (a == b || !a || !b) return a ? a : b;
        const uint64_t key = (uint64_t)std::min(a, b) << 32 | (uint32_t)std::max(a, b);
        if (const auto known = joined.find(key); known != joined.end()) return known->second;
        std::vector<Line> all(values.at(a), values.at(a) + values.length(a)), lines;
        all.insert(all.end(), values.at(b), values.at(b) + values.length(b));
        std::vector<int64_t> cuts;
        for (const Line& line : all) cuts.push_back(line.low), cuts.push_back((int64_t)line.high + 1);
        std::sort(cuts.begin(), cuts.end());
        cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
        for (size_t i = 0; i + 1 < cuts.size(); i++) {
            int32_t low = cuts[i], high = cuts[i + 1] - 1, set = -1;
            for (const Line& line : all)
                if (line.low <= low && high <= line.high) set = set < 0 ? line.set : both(set, line.set);
            if (set < 0) continue;
            if (!lines.empty() && lines.back().high == low - 1 && lines.back().set == set) low = lines.back().low, lines.pop_back();
            lines.push_back({low, high, set});
        }
        count_small();
        return joined[key] = value(lines.data(), lines.size());
    }

    // Of many. Those that always hold at once: what they come to two by two would be kept, too.
    int32_t join_all(std::vector<int32_t>& some) {
        std::sort(some.begin(), some.end());
        some.erase(std::unique(some.begin(), some.end()), some.end());
        if (!some.empty() && !some[0]) some.erase(some.begin());
        if (some.size() > 2 && std::all_of(some.begin(), some.end(), [&](int32_t one) { return always(one); })) {
            std::vector<Config> configs;
            bool ends = false;
            for (const int32_t one : some) ends |= may_end(values.at(one)->set), add_configs(values.at(one)->set, configs);
            const Line line{0, FOREVER, set(ends, configs)};
            return value(&line, 1);
        }
        for (; some.size() > 1; some.resize((some.size() + 1) / 2))
            for (size_t i = 0; i < some.size(); i += 2) some[i / 2] = i + 1 < some.size() ? join(some[i], some[i + 1]) : some[i];
        return some.empty() ? 0 : some[0];
    }

    int32_t value(const Line* lines, int64_t n) {
        const int32_t found = values(lines, n);
        if (found == (int32_t)entries.size()) entries.push_back(-1), count_small();
        return found;
    }

    // The value's first line in the tables. Makes the states that it leads to.
    int32_t entry(int32_t value) {
        if (entries[value] >= 0) return entries[value];
        const std::vector<Line> lines(values.at(value), values.at(value) + values.length(value));
        std::vector<int32_t> made;
        for (size_t i = 0; i < lines.size(); i++) {
            const int32_t to = state(lines[i].set), op = add * LINE_ADD | keep * LINE_KEEP | (i + 1 < lines.size()) * LINE_MORE;
            made.insert(made.end(), {lines[i].low, lines[i].high, to, op});
        }
        fresh_lines.insert(fresh_lines.end(), made.begin(), made.end());
        entries[value] = next_line, next_line += lines.size();
        return entries[value];
    }

    // A line that always leads to one reading alone.
    int32_t line_of(int32_t q, int32_t stack) {
        const Config key[2] = {{FOREVER, 0, 0, 0}, {q, stack, 0, 0}};
        const int32_t to = intern_state(key, 2);
        fresh_lines.insert(fresh_lines.end(), {0, FOREVER, to, 0});
        places += 2;
        return next_line++;
    }

    // ---- states

    int32_t intern_state(const Config* key, int64_t n) {
        const int32_t list = keys(key, n);
        if (list >= (int32_t)states.size()) {
            if ((int64_t)states.size() >= (int64_t)max_states) throw Stop{MANY_STATES};    // for good: this key never gets a state
            states.push_back(next_state), key_of_state[next_state++] = list;
            fresh_states.push_back(key[0].q);
        }
        return states[list];
    }

    bool is_between(const Config& c) const { return c.q == frames.loop(c.loop).between && c.count >= frames.loop(c.loop).low; }

    // Of a set; `keep`: whether the count is kept, `add`: what is added to it, or to 0. One repeat uses the number.
    int32_t state(int32_t set) {
        std::vector<Config> key(sets.at(set), sets.at(set) + sets.length(set));
        const bool ends = key[0].q;
        int64_t keeps = 0, adds = 0;
        size_t chosen = 0;
        const auto rank = [&](const Config& c) { return std::make_pair(c.count >= 0, -(int64_t)frames.loop(c.loop).counts()); };
        for (size_t i = 1; i < key.size(); i++)
            if (key[i].loop && (!chosen || rank(key[i]) < rank(key[chosen]))) chosen = i;
        key[0] = {ends ? 0 : FOREVER, 0, 0, 0};
        if (chosen) {
            for (size_t i = 1; i < key.size() && key[0].q; i++)
                if (i != chosen && is_between(key[i]) && may_end(closure(key[i].stack))) key[0].q = 0;
            Config& one = key[chosen];
            if (key[0].q && one.q == frames.loop(one.loop).between && may_end(closure(one.stack))) key[0].q = frames.loop(one.loop).low;
            keeps = one.count < 0, adds = keeps ? -1 - (int64_t)one.count : one.count;
            one.count = IN_REGISTER;
            std::sort(key.begin() + 1, key.end());
        }
        const int32_t found = intern_state(key.data(), key.size());
        keep = keeps, add = adds;               // at last: `closure` may stop
        return found;
    }

    // ---- places

    int32_t place(const Where& one) {
        const int32_t found = where(&one, 1);
        if (found == (int32_t)endings.size()) {
            const Loop& loop = frames.loop(one.loop);
            if (!one.loop) endings.push_back({-1, 0, -1, 0, 0, 0});
            else if (one.count == IN_REGISTER) endings.push_back({-1, 0, loop.between, 0, loop.high, 1});
            else endings.push_back({-1, 0, loop.between, loop.low - one.count, loop.high - one.count, 0});
        }
        return found;
    }

    // Finds out what comes behind it: FOREVER, or a state that has to be expanded first.
    int32_t end(int32_t place, const uint8_t* expanded) {
        const int32_t set = closure(where.at(place)->stack);
        const std::vector<Config> after(sets.at(set) + 1, sets.at(set) + sets.length(set));
        for (const Config& one : after)
            if (!expanded[one.q]) return one.q;
        const int32_t start = firsts.size() / 2;
        for (const Config& one : after) {
            const int32_t behind = this->place({one.stack, one.loop, one.count});
            firsts.push_back(one.q), firsts.push_back(behind);
        }
        endings[place].after = start, endings[place].end = start + after.size();
        return FOREVER;
    }
};

// What it returns, or why it stopped. What nobody expects, memory or an index that is none, is an error there, too, and not the end of the process.
template <class Do>
int64_t attempt(Do what) {
    try {
        return what();
    } catch (const Stop& stop) {
        return stop.why;
    } catch (...) {
        return FAILED;
    }
}

template <class Do>
int64_t guarded(Sets& sets, Do what) {
    if (sets.written) sets.fresh_states.clear(), sets.fresh_lines.clear(), sets.written = 0;
    const int64_t found = attempt(what);
    sets.new_states = sets.fresh_states.data(), sets.num_new_states = sets.fresh_states.size();
    sets.new_lines = sets.fresh_lines.data(), sets.num_new_lines = sets.fresh_lines.size() / 4;
    return found;
}

}  // namespace
