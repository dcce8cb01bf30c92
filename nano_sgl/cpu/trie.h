// A state followed down the tree of a vocabulary: automaton.py's walks.
//
// Nodes are numbered level by level, so a parent comes before its children. A walk from one position, or from some of which none is below another,
// goes in preorder, where what is below a node is one range. Most of a vocabulary is below nodes under which a state only comes back to itself: in
// [a-z ]+ all that follows "the" is letters and blanks. So each node has a summary of the bytes below it, and where a state loops on all of these,
// the range is taken as a whole: of 100,000 nodes some 1,000 are looked at.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Item { int32_t node, state, source, count, next; };  // a position that was reached; next: of the same node, -1

// A node, by its number in preorder. next: the first behind those below it; first: its first token, in their order; inside: so many bytes of a
// character that it ends in the middle of; below: the groups of the characters below it, that one included.
struct Spot { uint64_t below; int32_t node, next, first; uint16_t depth; uint8_t byte, inside; };
static_assert(sizeof(Spot) == 24, "native.py makes room for them");

// One walk; native.py's struct. It begins at the positions `starts`, or at those of the set `members`, in `state`. It is called again and again, each
// time with some more states expanded. If none of them is below another it goes DOWN in preorder, else over all that is reached, LISTED. The result,
// tokens, and exits, where a state accepts and tokens go on, are columns of a list; or, SPREAD, if that are more than the part `many` of all tokens,
// arrays by token and by node.
struct Walk {
    const int32_t *parent, *child0, *kids, *first, *end, *own, *order, *node_of, *by_byte, *byte_starts;    // the tree, of vocab.py
    const uint8_t *byte, *inner;                // inner: has children
    Spot* spots;                                // the tree in preorder, one more at its end
    int32_t *pre, *above;                       // by node: its number in preorder; by `by_byte`: the parent's
    uint16_t *begun, *letters, *letters_of;     // characters begun: in preorder; by the order of tokens; by token, 0: it is no text
    int32_t* tally;                             // how many tokens have so many, MAX_LETTERS of them
    uint64_t* whole;                            // a set, as bits in preorder: the inner nodes that end with a character
    int32_t *partial, *mute;                    // the tokens that do not, (place in the order of tokens, node); those that are no text
    const int32_t* delta;                       // the automaton: state -> byte -> state, -1: none, UNKNOWN where the state is not expanded
    const uint8_t *accepts, *expanded, *goes_on;        // by state; state 0 is the one that nothing follows
    const int32_t *starts, *marks;
    const uint64_t* members;                    // a set, as `whole`; a member is its own source
    Item* items;                                // room for `room`
    int32_t *head, *sources;                    // by node: its last item, -1; SPREAD: the source
    uint64_t* loops;                            // by state: the groups on which it loops, and those on which it does not; 0 if nobody has asked
    int32_t *met, *path;                        // states of which somebody has; by depth, state and count
    uint64_t* exits;                            // SPREAD: a set, as `whole`;
    int32_t* ranks;                             // how many of it are before each of its words, if somebody counts and they are not `even`:
    int16_t *counts, *classes;                  // characters begun there, one after the other; by token, 0: none
    int32_t *columns, *sizes;                   // a list: 6 of `room`: tokens, classes, sources; exits: nodes, sources, counts. SPREAD: of each class
    int64_t* keys;                              // by class: the state, or 4096 times that and the count
    int64_t nodes, num_tokens, num_text, num_partial, num_mute, room, num_starts;   // num_text: tokens that are text
    int64_t phase, at, step, size, num_records, num_met, repeated, dropped; // repeated: a node has several items; dropped: one was left out
    int64_t num_unknown, num_found, num_classes, num_exits, most;  // unknown: states to expand, in `columns`; most: no exit's count is higher
    int64_t even, more;                         // even: the exits' counts are `begun` and so many more
    double many;
    int32_t ascending;                          // the starts, each is there once
    int32_t state, loop;                        // loop: the state between two characters, -1: nobody counts
};

enum { BEGIN, DOWN, LISTED, SPREAD };           // phases
enum { DONE, EXPAND, NO_ROOM, TOO_MANY };       // what a walk returns
constexpr int32_t UNKNOWN = -2, MAX_LETTERS = 4096;

inline bool has(const uint64_t* set, int32_t i) { return set[i >> 6] >> (i & 63) & 1; }

// Which of the set it is. ranks: how many are before each word.
inline int32_t rank_of(const uint64_t* set, const int32_t* ranks, int32_t i) {
    return ranks[i >> 6] + __builtin_popcountll(set[i >> 6] & (((uint64_t)1 << (i & 63)) - 1));
}

// ---- what texts are made of

// A group is a bit. Of ASCII: what classes of characters seldom tell apart. Of other characters: a block of them, by their first two bytes. At last
// what is no UTF-8.
constexpr uint16_t BLOCKS[] = {0xC280, 0xC380, 0xC480, 0xCAB0, 0xCE80, 0xD080, 0xD280, 0xD880, 0xE080, 0xE180, 0xE280, 0xE380, 0xE480, 0xE4B8, 0xE9BE,
                               0xEA80, 0xEAB0, 0xED9E, 0xEE80, 0xF080, 0xF490};    // Latin, Greek, Cyrillic, ...: Han and Hangul have their own
constexpr int FIRST_BLOCK = 42;
constexpr uint64_t ALL = ~(uint64_t)0, ASCII = ((uint64_t)1 << FIRST_BLOCK) - 1, NO_TEXT = (uint64_t)1 << 63;

uint64_t group_of(int byte) {
    if (byte >= '0' && byte <= '9') return 1;
    if (byte >= 'a' && byte <= 'z') return byte <= 'f' ? 2 : 4;
    if (byte >= 'A' && byte <= 'Z') return byte <= 'F' ? 8 : 16;
    if (byte == '\t' || byte == '\n' || byte == '\r') return byte == '\t' ? 32 : byte == '\n' ? 64 : 128;
    if (byte < ' ' || byte == 127) return 256;
    return (uint64_t)512 << (byte - ' ' - 10 * (byte > '9') - 26 * (byte > 'Z') - 26 * (byte > 'z'));
}

bool is_text(int lead, int second) {
    const int low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    return lead >= 0xC2 && lead <= 0xF4 && second >= low && second <= high;
}

uint64_t group_of(int lead, int second) {
    return (uint64_t)1 << (FIRST_BLOCK - 1 + (std::upper_bound(std::begin(BLOCKS), std::end(BLOCKS), lead << 8 | second) - BLOCKS));
}

int length_of(int lead) { return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

// The tree in preorder, once for a vocabulary.
void prepare(Walk& w) {
    constexpr uint32_t NONE = ~0u;
    std::vector<int32_t> size(w.nodes, 1);
    std::vector<uint32_t> text(w.nodes);        // the bytes of the character that a node ends in the middle of; 0: in none, NONE: no UTF-8
    std::vector<uint64_t> last(w.nodes), below(w.nodes);        // groups: of the character in which a node ends, if it is known
    std::vector<uint16_t> begun(w.nodes);
    for (int32_t i = 1; i < w.nodes; i++) {
        const int32_t up = w.parent[i], byte = w.byte[i];
        const uint32_t before = text[up], lead = before < 1 << 8 ? before : before < 1 << 16 ? before >> 8 : before >> 16;
        begun[i] = begun[up] + !before;
        if (before == NONE) {
            text[i] = NONE;
        } else if (!before) {
            text[i] = byte < 0x80 ? 0 : byte >= 0xC2 && byte <= 0xF4 ? byte : NONE;
            if (byte < 0x80) last[i] = group_of(byte);
            for (int second = 0x80; text[i] && w.own[i] && second < 0xC0; second++) // it may be any of the blocks
                if (is_text(byte, second)) last[i] |= group_of(byte, second);
        } else {
            const bool is_second = before < 1 << 8, right = is_second ? is_text(lead, byte) : byte >= 0x80 && byte < 0xC0;
            const int length = is_second ? 2 : before < 1 << 16 ? 3 : 4;
            text[i] = !right ? NONE : length == length_of(lead) ? 0 : before << 8 | byte;
            if (is_second && right) last[i] = group_of(lead, byte);
        }
        if (text[i] == NONE) last[i] = NO_TEXT;
    }
    for (int32_t i = w.nodes - 1; i; i--) size[w.parent[i]] += size[i], below[w.parent[i]] |= last[i] | below[i];
    w.pre[0] = w.num_partial = 0;
    for (int32_t i = 0; i < w.nodes; i++)
        for (int32_t kid = w.child0[i], at = w.pre[i] + 1; kid < w.child0[i] + w.kids[i]; at += size[kid++]) w.pre[kid] = at;
    for (int32_t i = 0; i < w.nodes; i++) {
        const int32_t at = w.pre[i];
        const bool is_inner = w.kids[i];
        const uint8_t inside = !text[i] || text[i] == NONE ? 0 : text[i] < 1 << 8 ? 1 : text[i] < 1 << 16 ? 2 : 3;
        if (inside == 3) last[i] = last[w.parent[i]];           // it is known since the second byte
        w.spots[at] = {text[i] ? below[i] | last[i] : below[i], i, at + size[i], w.first[i], 0, w.byte[i], inside};
        w.begun[at] = begun[i];
        w.whole[at >> 6] |= (uint64_t)(is_inner && !text[i]) << (at & 63);
        for (int32_t k = w.first[i]; k < w.first[i] + w.own[i]; k++) w.letters[k] = begun[i];
    }
    w.spots[w.nodes] = {0, 0, (int32_t)w.nodes, (int32_t)w.num_text, 0, 0, 0};
    for (int32_t at = 1; at < w.nodes; at++) {
        const int32_t i = w.spots[at].node;
        w.spots[at].depth = w.spots[w.pre[w.parent[i]]].depth + 1;
        for (int32_t k = w.first[i]; text[i] && text[i] != NONE && k < w.first[i] + w.own[i]; k++)
            w.partial[2 * w.num_partial] = k, w.partial[2 * w.num_partial++ + 1] = i;
    }
    for (int32_t t = w.num_mute = 0; t < w.num_tokens; t++)
        if (w.node_of[t] == w.nodes) w.mute[w.num_mute++] = t;
    for (int32_t k = 0; k < w.num_text; k++) w.letters_of[w.order[k]] = w.letters[k], w.tally[w.letters[k]]++;
    for (int32_t k = 0; k < w.nodes; k++) w.above[k] = w.pre[w.parent[w.by_byte[k]]];
}

enum { NO, YES, OPEN };                         // OPEN: that is up to states that are not expanded

inline bool occurs(const Walk& w, int byte) { return w.byte_starts[byte] < w.byte_starts[byte + 1]; }

// Whether all texts of `left` bytes, such as end a character, lead to a state, and none may end on the way. known: by `left`, one from where they do.
int leads_back(const Walk& w, int32_t from, int32_t to, int left, int32_t* known) {
    if (!left || from < 0) return from == to ? YES : NO;
    if (from == known[left]) return YES;
    if (!w.expanded[from]) return OPEN;
    if (w.accepts[from]) return NO;
    for (int byte = 0x80; byte < 0xC0; byte++)
        if (const int how = occurs(w, byte) ? leads_back(w, w.delta[256 * (int64_t)from + byte], to, left - 1, known) : YES; how != YES) return how;
    known[left] = from;
    return YES;
}

// Whether a state comes back to itself after each character of a block, and may not end in one.
int loops_on_block(const Walk& w, int32_t state, int block) {
    int32_t known[4] = {-1, -1, -1, -1};
    for (int both = BLOCKS[block]; both < BLOCKS[block + 1]; both++) {
        const int lead = both >> 8, second = both & 255;
        if (!is_text(lead, second) || !occurs(w, lead) || !occurs(w, second)) continue;
        const int32_t to = w.delta[256 * (int64_t)state + lead];
        if (to < 0 || w.accepts[to]) return NO;
        if (!w.expanded[to]) return OPEN;
        const int how = leads_back(w, w.delta[256 * (int64_t)to + second], state, length_of(lead) - 2, known);
        if (how != YES) return how;
    }
    return YES;
}

// Whether a state comes back to itself after each character of some groups, as far as that is known.
inline bool loops_on(Walk& w, int32_t state, uint64_t groups) {
    uint64_t &yes = w.loops[2 * state], &no = w.loops[2 * state + 1];
    if (!no) {
        w.met[w.num_met++] = state, no = NO_TEXT;
        for (int byte = 0; byte < 128; byte++)
            if (w.delta[256 * (int64_t)state + byte] != state && occurs(w, byte)) no |= group_of(byte);
        yes = ASCII & ~no;
    }
    for (uint64_t left = groups & ~yes; left; left &= left - 1) {
        if (groups & no) return false;
        const int group = __builtin_ctzll(left), how = loops_on_block(w, state, group - FIRST_BLOCK);
        if (how != OPEN) (how == YES ? yes : no) |= left & -left;
        if (how != YES) return false;
    }
    return true;
}

// ---- where walks begin

void clear(Walk& w) {
    for (int64_t i = 0; i < w.size; i++) w.head[w.items[i].node] = -1;
    for (int64_t i = 0; i < w.num_met; i++) w.loops[2 * w.met[i]] = w.loops[2 * w.met[i] + 1] = 0;
    w.size = w.at = w.step = w.num_records = w.num_met = w.repeated = w.dropped = 0;
}

// One more position, but where one with the same node, state and count, and of the same marks[source], is there. False: no room.
inline bool add(Walk& w, int32_t node, int32_t state, int32_t source, int32_t count) {
    for (int32_t at = w.head[node]; at >= 0; at = w.items[at].next) {
        const Item& other = w.items[at];
        w.repeated = 1;
        if (other.state != state || other.count != count || (w.marks && w.marks[other.source] != w.marks[source])) continue;
        w.dropped = 1;
        return true;
    }
    if (w.size == w.room) return false;
    w.items[w.size] = {node, state, source, count, w.head[node]};
    w.head[node] = w.size++;
    return true;
}

inline bool add_kids(Walk& w, int32_t node, int32_t state, int32_t source, int32_t count) {
    const int32_t* row = w.delta + 256 * (int64_t)state;
    count += state == w.loop;
    for (int32_t kid = w.child0[node]; kid < w.child0[node] + w.kids[node]; kid++) {
        const int32_t to = row[w.byte[kid]];
        if (to >= 0 && !add(w, kid, to, source, count)) return false;
    }
    return true;
}

// The children of where it begins; from the bytes' side, if few nodes have them: is the parent one of ours?
bool begin(Walk& w) {
    clear(w);
    const int32_t *row = w.delta + 256 * (int64_t)w.state, *end = w.starts + w.num_starts;
    int64_t with_byte = 0;
    for (int byte = 0; byte < 256; byte++)
        if (row[byte] >= 0) with_byte += w.byte_starts[byte + 1] - w.byte_starts[byte];
    if (!w.members && (!w.ascending || with_byte > w.num_starts)) {
        for (int64_t i = 0; i < w.num_starts; i++)
            if (!add_kids(w, w.starts[i], w.state, i, 0)) return false;
        return true;
    }
    for (int byte = 0; byte < 256; byte++) {
        const int32_t* start = w.starts;
        for (int32_t i = w.byte_starts[byte]; row[byte] >= 0 && i < w.byte_starts[byte + 1]; i++) {
            const int32_t kid = w.by_byte[i], above = w.parent[kid];
            if (!kid) continue;                     // the root is nobody's child
            if (!w.members) start = std::lower_bound(start, end, above);
            if (w.members ? !has(w.members, w.above[i]) : start == end || *start != above) continue;
            if (!add(w, kid, row[byte], w.members ? above : start - w.starts, w.state == w.loop)) return false;
        }
    }
    return true;
}

// The items in preorder, behind the items; whether none of them is below another.
bool in_preorder(Walk& w) {
    Item* sorted = w.items + w.size;
    const auto before = [&](const Item& a, const Item& b) { return w.pre[a.node] < w.pre[b.node]; };
    std::copy(w.items, sorted, sorted);
    if (!std::is_sorted(sorted, sorted + w.size, before)) std::sort(sorted, sorted + w.size, before);
    for (int64_t i = 1; i < w.size; i++)
        if (w.spots[w.pre[sorted[i - 1].node]].next > w.pre[sorted[i].node]) return false;
    return true;
}

// ---- walks

// Nodes node .. next, in preorder, with tokens first .. end in their order: one node, or a range in which the state comes back to itself. ends: the
// state accepts, and something is below.
struct Record {
    int32_t node, next, first, end, state, source, count, ends;

    bool is_range() const { return next > node + 1; }
};

Record* records_of(const Walk& w) { return (Record*)(w.items + 2 * w.size); }

// What is below the items, in preorder: records, behind the items.
int go_down(Walk& w) {
    const Item* items = w.items + w.size;
    Record* records = records_of(w);
    for (; w.step < w.size; w.step++, w.at = 0) {
        const Item& item = items[w.step];
        const int32_t top = w.pre[item.node], end = w.spots[top].next, start = w.spots[top].depth - 1;
        w.path[2 * start] = w.state, w.path[2 * start + 1] = 0;
        for (int32_t i = w.at ? w.at : top; i < end;) {
            const Spot& spot = w.spots[i];
            int32_t next = i + 1, *here = w.path + 2 * spot.depth;
            int32_t state = w.delta[256 * (int64_t)here[-2] + spot.byte], count = here[-1] + (here[-2] == w.loop);
            if (state < 0) {
                i = spot.next;
                continue;
            }
            const bool is_inner = spot.next > next;
            if (is_inner && !w.expanded[state]) {
                w.at = i, w.columns[0] = state, w.num_unknown = 1;
                return EXPAND;
            }
            here[0] = state, here[1] = count;
            if (const int32_t before = here[-2 * spot.inside]; is_inner && spot.depth - spot.inside >= start && loops_on(w, before, spot.below))
                next = spot.next, state = before;
            const int32_t first = spot.first, stop = w.spots[next].first, ends = is_inner && w.accepts[state];
            if (stop > first || ends) records[w.num_records++] = {i, next, first, stop, state, item.source, count, ends};
            i = next;
        }
    }
    return DONE;
}

// What is below the items, one by one.
int follow(Walk& w) {
    for (; w.at < w.size; w.at++) {
        const Item item = w.items[w.at];
        if (!w.inner[item.node]) continue;
        if (!w.expanded[item.state]) {
            w.columns[0] = item.state, w.num_unknown = 1;
            return EXPAND;
        }
        if (!add_kids(w, item.node, item.state, item.source, item.count)) return NO_ROOM;
    }
    return DONE;
}

inline uint64_t hash_of(int64_t key) { return key; }

// Numbers for keys, in the order in which they are met: keys[number].
template <class Key>
struct Numbers {
    Key* keys;
    int64_t size = 0;
    std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // by linear probing

    explicit Numbers(Key* keys) : keys(keys) {}

    int64_t slot_of(const Key& key) const {
        const int64_t most = table.size() - 1;
        int64_t at = hash_of(key) * 0x9E3779B97F4A7C15u >> 32 & most;
        while (table[at] >= 0 && !(keys[table[at]] == key)) at = (at + 1) & most;
        return at;
    }

    int64_t operator()(const Key& key) {
        const int64_t at = slot_of(key), found = table[at];
        if (found >= 0) return found;
        table[at] = size, keys[size++] = key;
        if (2 * size > (int64_t)table.size()) {
            table.assign(2 * table.size(), -1);
            for (int64_t i = 0; i < size; i++) table[slot_of(keys[i])] = i;
        }
        return size - 1;
    }
};

int64_t key_of(const Walk& w, int32_t state, int32_t count) { return w.loop < 0 ? state : 4096 * (int64_t)state + count; }

// What was reached one by one.
int list(Walk& w) {
    int32_t *tokens = w.columns, *classes = tokens + w.room, *sources = classes + w.room;
    int32_t *nodes = sources + w.room, *origins = nodes + w.room, *counts = origins + w.room;
    Numbers<int64_t> number(w.keys);
    int64_t n = 0, ends = 0;
    for (int64_t i = 0; i < w.size; i++) {
        const Item& item = w.items[i];
        if (w.accepts[item.state] && w.inner[item.node])
            nodes[ends] = item.node, origins[ends] = item.source, counts[ends++] = item.count;
        const int32_t first = w.first[item.node], own = w.own[item.node];
        if (!own) continue;
        if (n + own > w.room) return NO_ROOM;
        const int64_t which = number(key_of(w, item.state, item.count));
        for (int32_t at = first; at < first + own; at++) tokens[n] = w.order[at], classes[n] = which, sources[n++] = item.source;
    }
    w.num_found = n, w.num_classes = number.size, w.num_exits = ends;
    return DONE;
}

// By a number of characters, the class of the tokens that have begun so many in the state that counts.
struct ByCount {
    const Walk& w;
    Numbers<int64_t>& number;
    std::vector<int32_t> known;

    int32_t operator()(int32_t count) {
        if (count >= (int32_t)known.size()) known.resize(2 * count + 64, -1);
        if (known[count] < 0) known[count] = number(key_of(w, w.loop, count));
        return known[count];
    }
};

constexpr int32_t COUNTED = -1;

// The tokens of the records, in their order: put(record, first, end, class). COUNTED: the class of each is up to its `letters`.
template <class Put>
void put_classes(const Walk& w, Numbers<int64_t>& number, Put put) {
    const Record *record = records_of(w), *last = record + w.num_records;
    for (int64_t partial = 0; record < last; record++) {
        const Record& r = *record;
        const bool is_range = r.is_range(), counts = is_range && r.state == w.loop;
        int32_t first = r.first, end = r.end;
        if (first == end) continue;
        while (is_range && partial < w.num_partial && w.partial[2 * partial] < first) partial++;
        const int32_t which = counts ? COUNTED : number(key_of(w, r.state, r.count));
        for (; is_range && partial < w.num_partial && w.partial[2 * partial] < end; partial++) {    // it ends in a character, begun in the state
            const int32_t at = w.partial[2 * partial], node = w.partial[2 * partial + 1];
            uint8_t text[3];
            int32_t n = 0, state = r.state;
            for (int32_t up = node; n < 3 && (!n || text[n - 1] < 0xC0); up = w.parent[up]) text[n++] = w.byte[up];
            while (n) state = w.delta[256 * (int64_t)state + text[--n]];
            if (first < at) put(r, first, at, which);
            put(r, at, at + 1, number(key_of(w, state, counts ? r.count + w.letters[at] - w.begun[r.node] : r.count)));
            first = at + 1;
        }
        if (first < end) put(r, first, end, which);
    }
}

// The records as a list.
int list_records(Walk& w) {
    int32_t *tokens = w.columns, *classes = tokens + w.room, *sources = classes + w.room;
    int32_t *nodes = sources + w.room, *origins = nodes + w.room, *counts = origins + w.room;
    Numbers<int64_t> number(w.keys);
    ByCount by_count{w, number, {}};
    const Record* records = records_of(w);
    int64_t n = 0, ends = 0;
    put_classes(w, number, [&](const Record& r, int32_t at, int32_t end, int32_t which) {
        for (; at < end; at++) {
            tokens[n] = w.order[at], sources[n] = r.source;
            classes[n++] = which == COUNTED ? by_count(r.count + w.letters[at] - w.begun[r.node]) : which;
        }
    });
    for (const Record* r = records; r < records + w.num_records; r++) {
        for (int32_t i = r->node; r->ends && i < r->next; i++) {
            if (r->is_range() && !has(w.whole, i)) continue;
            nodes[ends] = w.spots[i].node, origins[ends] = r->source;
            counts[ends++] = r->count + (r->state == w.loop ? w.begun[i] - w.begun[r->node] : 0);
        }
    }
    w.num_found = n, w.num_classes = number.size, w.num_exits = ends;
    return DONE;
}

// The class of each token, from the records. What holds for most is written everywhere, and then what others have: that is a class; or, where
// characters are counted, the class of the token's letters and `more`.
int spread_tokens(Walk& w) {
    struct Run { int32_t first, end, which, more; };
    Run* runs = (Run*)w.columns;
    Numbers<int64_t> number(w.keys);
    ByCount by_count{w, number, {}};
    std::vector<int32_t> sizes(64);
    int64_t n = 0, counted = 0;
    int32_t more = 0;
    put_classes(w, number, [&](const Record& r, int32_t at, int32_t end, int32_t which) {
        runs[n++] = {at, end, which, which == COUNTED ? r.count - w.begun[r.node] : 0};
        if (number.size > (int64_t)sizes.size()) sizes.resize(2 * number.size);
        if (which == COUNTED && !counted) more = runs[n - 1].more;
        if (which == COUNTED) counted += runs[n - 1].more == more ? end - at : 0;
        else sizes[which] += end - at;
    });
    const auto size_of = [&](int32_t which) -> int32_t& {
        if (which >= (int32_t)sizes.size()) sizes.resize(2 * which);
        return sizes[which];
    };
    const int32_t best = std::max_element(sizes.begin(), sizes.end()) - sizes.begin(), held = std::max<int64_t>(sizes[best], counted);
    const bool most = 2 * held > w.num_tokens;                  // is there such a thing?
    const int32_t usual = sizes[best] >= counted ? best : COUNTED;
    const auto is_usual = [&](const Run& run) { return most && run.which == usual && run.more == (usual == COUNTED ? more : 0); };
    const auto unusual = [&](auto put) {                        // put(first, end, run or null): of all that is not as most are
        int32_t done = 0;
        for (const Run* run = runs; run < runs + n; done = run++->end) {
            if (most && done < run->first) put(done, run->first, (const Run*)nullptr);
            if (!is_usual(*run)) put(run->first, run->end, run);
        }
        if (most && done < w.num_text) put(done, (int32_t)w.num_text, (const Run*)nullptr);
    };
    if (!most) {
        std::memset(w.classes, 0, 2 * w.num_tokens);
    } else if (usual == COUNTED) {
        std::vector<int32_t> left(w.tally, w.tally + MAX_LETTERS);
        std::vector<int16_t> class_of(MAX_LETTERS);
        unusual([&](int32_t at, int32_t end, const Run*) {
            for (; at < end; at++) left[w.letters[at]]--;
        });
        for (int32_t letters = 1; letters < MAX_LETTERS; letters++) {
            if (!left[letters]) continue;
            const int32_t which = by_count(letters + more);
            size_of(which) += left[letters], class_of[letters] = which + 1;
        }
        for (int64_t t = 0; t < w.num_tokens; t++) w.classes[t] = class_of[w.letters_of[t]];
    } else {
        std::fill_n(w.classes, w.num_tokens, best + 1);
        for (int64_t i = 0; i < w.num_mute; i++) w.classes[w.mute[i]] = 0;
    }
    unusual([&](int32_t at, int32_t end, const Run* run) {
        const int16_t which = run ? run->which + 1 : 0;
        if (!run || run->which != COUNTED) {
            for (; at < end; at++) w.classes[w.order[at]] = which;
        } else {
            for (; at < end; at++) {
                const int32_t here = by_count(w.letters[at] + run->more);
                w.classes[w.order[at]] = here + 1, size_of(here)++;
            }
        }
    });
    if (number.size + 1 >= 1 << 15) return TOO_MANY;
    w.num_classes = number.size, w.num_found = 0;
    for (int64_t i = 0; i < w.num_classes; i++) w.num_found += w.sizes[i + 1] = sizes[i];
    w.sizes[0] = w.num_tokens - w.num_found;
    return DONE;
}

// The records by token and by node.
int spread(Walk& w) {
    const Record *records = records_of(w), *last = records + w.num_records;
    const int64_t words = w.nodes / 64 + 1;
    if (spread_tokens(w) == TOO_MANY) return TOO_MANY;
    std::memset(w.exits, 0, 8 * words);
    w.num_exits = w.most = 0, w.even = 1;
    for (const Record* r = records; w.num_starts > 1 && r < last; r++)
        for (int32_t i = r->node; i < r->next; i++) w.sources[w.spots[i].node] = r->source;
    for (const Record *r = records, *first = nullptr; w.loop >= 0 && r < last; r++) {
        if (!r->ends) continue;
        if (!first) first = r, w.more = r->count - w.begun[r->node];
        w.even &= r->count - w.begun[r->node] == w.more && (r->state == w.loop || !r->is_range());
    }
    for (const Record* r = records; r < last; r++) {
        const int32_t from = r->node, to = r->next - 1;         // both are in it
        for (int32_t k = from >> 6; r->ends && k <= to >> 6; k++) {
            uint64_t here = r->is_range() ? w.whole[k] : ALL;
            if (k == from >> 6) here &= ALL << (from & 63);
            if (k == to >> 6) here &= ALL >> (63 - (to & 63));
            w.exits[k] |= here;
            w.num_exits += __builtin_popcountll(here);
            for (int64_t i = w.num_exits - __builtin_popcountll(here); w.loop >= 0 && !w.even && here; here &= here - 1)
                w.counts[i++] = r->count + (r->state == w.loop ? w.begun[64 * k + __builtin_ctzll(here)] - w.begun[from] : 0);
        }
    }
    if (w.loop < 0) return DONE;
    if (w.even) {
        for (int32_t letters = 0; letters < MAX_LETTERS; letters++)
            if (w.tally[letters]) w.most = letters + w.more;
    } else {
        for (int64_t k = 0, before = 0; k < words; k++) w.ranks[k] = before, before += __builtin_popcountll(w.exits[k]);
        for (int64_t i = 0; i < w.num_exits; i++) w.most = std::max<int64_t>(w.most, w.counts[i]);
    }
    return DONE;
}

// Goes on with a walk, as far as it can.
int walk(Walk& w) {
    if (w.phase == BEGIN) {
        if (!begin(w)) return NO_ROOM;
        if (!w.repeated && 2 * w.size + 2 * w.nodes > w.room) return NO_ROOM;       // for records
        w.phase = !w.repeated && in_preorder(w) ? DOWN : LISTED;
    }
    if (w.phase == LISTED) {
        const int how = follow(w);
        return how == DONE ? list(w) : how;
    }
    if (go_down(w) == EXPAND) return EXPAND;
    int64_t found = 0;
    for (const Record *r = records_of(w), *last = r + w.num_records; r < last; r++) found += r->end - r->first;
    if (found > w.many * w.num_tokens) w.phase = SPREAD;
    return w.phase == SPREAD ? spread(w) : list_records(w);
}

// Two maps as one: its classes are the pairs of theirs that occur, the first that of 0 and 0. Returns how many there are, -1: too many.
int64_t join(const int16_t* a, const int16_t* b, int64_t size, int64_t classes_a, int64_t classes_b, int16_t* out, int32_t* sizes, int64_t* keys) {
    if (classes_a * classes_b > 1 << 24) return -1;
    std::vector<int32_t> of_key(classes_a * classes_b, -1);
    std::vector<int32_t> found(4);                              // four sizes of each, or a token would wait for the one before
    int64_t n = 1;
    of_key[0] = keys[0] = 0;
    for (int64_t t = 0; t < size; t++) {
        const int64_t key = a[t] * classes_b + b[t];
        int32_t which = of_key[key];
        if (which < 0) {
            if (n == 1 << 15) return -1;
            which = of_key[key] = n, keys[n++] = key, found.resize(4 * n);
        }
        out[t] = which, found[4 * which + t % 4]++;
    }
    for (int64_t i = 0; i < n; i++) sizes[i] = found[4 * i] + found[4 * i + 1] + found[4 * i + 2] + found[4 * i + 3];
    return n;
}

}  // namespace
