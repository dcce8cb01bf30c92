"""The radix tree beside the simple ways to do the same, on one seeded trace in one run: cost a request, and ratios.

The trace is chat: sessions that share a few system prompts and come back with their whole history, `--flight` requests at a time,
a pool smaller than what was ever cached. Every variant is the same tree with one part replaced, so all of them hit and evict
exactly the same, which is checked; what differs is the cost of that part:

    heapify    evict builds a heap of all unlocked leaves at every call    (SGLang's RadixCache)
    walk       evict finds its leaves by visiting the whole tree           (mini-sglang)
    loop       a key is compared with a span token by token, in a Python loop
    list       ours, but keys are given as lists of ids, converted at every call instead of once a request

Times are CPU time of this thread, so other processes disturb them little. `ours` runs twice, to show by how much, and the
ratios are to the faster of the two.

    python bench/radix.py --sessions 300 --turns 6 --page-size 1 --policy lru
"""

import argparse
import functools
import heapq
import random
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nano_sgl.radix import EVICTION, TOKEN_BYTES, Tree, key_bytes  # noqa: E402

OPERATIONS = ("match", "lock", "insert", "evict", "unlock")


def chat_trace(seed: int, sessions: int, turns: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, prompt and output) of every request in order of arrival; lengths are log-normal like those of real chats."""
    rng = random.Random(seed)

    def text(count):
        return np.array([rng.randrange(1000, 128_000) for _ in range(count)], np.int32)

    def length(median, sigma):
        return int(min(1024, max(4, rng.lognormvariate(np.log(median), sigma))))

    systems, events = [text(128) for _ in range(4)], []
    for session in range(sessions):
        at, history = rng.random(), rng.choice(systems)
        for turn in range(turns):
            prompt = np.concatenate([history, text(length(60, 1.1))])
            history = np.concatenate([prompt, text(length(200, 0.9))])
            events.append((at, session, turn, prompt, history))
            at += rng.expovariate(turns / 0.5)
    events.sort(key=lambda event: event[:3])
    return [event[3:] for event in events]


class HeapifyTree(Tree):
    """Evicts as SGLang's RadixCache does: a set of the unlocked leaves, and a heap of all of them at each call."""

    def __init__(self, *args):
        self.leaves = set()
        super().__init__(*args)

    def lock(self, at, **options):
        handle = super().lock(at, **options)
        self.leaves.difference_update(handle.path())
        return handle

    def move_lock(self, old, new):
        self.leaves.discard(new)
        return super().move_lock(old, new)

    def unlock(self, node):
        super().unlock(node)
        if node.key and not node.locks and not node.children:
            self.leaves.add(node)

    def insert(self, key, slots, **options):
        inserted = super().insert(key, slots, **options)
        node = inserted.node
        self.leaves.discard(node.parent)
        if node.key and not node.locks and not node.children:
            self.leaves.add(node)
        return inserted

    def unlocked_leaves(self):
        return self.leaves

    def evict(self, tokens):
        heap = [(node.used, id(node), node) for node in self.unlocked_leaves()]
        heapq.heapify(heap)
        parts, freed = [], 0
        while freed < tokens and heap:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            parts.append(node.slots)
            freed += len(node.slots)
            self.leaves.discard(node)
            self._remove(node)
            if parent.key and not parent.children and not parent.locks:
                self.leaves.add(parent)
                heapq.heappush(heap, (parent.used, id(parent), parent))
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


class WalkTree(HeapifyTree):
    """Evicts as mini-sglang does: the leaves are found by visiting every node."""

    def unlocked_leaves(self):
        return [node for node in self.walk() if not node.locks and not node.children]


@functools.lru_cache(1 << 14)
def tokens_of(key: bytes) -> list[int]:
    return np.frombuffer(key, np.int32).tolist()


def warm_key(ids: np.ndarray) -> bytes:
    """The key, its tokens converted before the clock starts."""
    key = key_bytes(ids)
    tokens_of(key)
    return key


class LoopTree(Tree):
    """Compares a span with a loop over its tokens."""

    def _descend(self, node, key, at, end):
        tokens = tokens_of(key)
        while at < end:
            child = node.children.get(key[at : at + self._page])
            if child is None:
                break
            node, same, first = child, 0, at // TOKEN_BYTES
            for token in tokens_of(child.key):
                if first + same == end // TOKEN_BYTES or token != tokens[first + same]:
                    break
                same += 1
            at += (same - same % self.page_size) * TOKEN_BYTES
            if at // TOKEN_BYTES - first < child.end - child.start:
                break
        return node, at


def replay(tree: Tree, trace: list, slots: int, flight: int, convert) -> tuple[dict[str, float], tuple]:
    """Serves the trace as a scheduler would; returns microseconds a request by operation, and what it did (hits, evictions)."""
    spent, hit_len, evicted_len = dict.fromkeys(OPERATIONS, 0), 0, 0
    table, running = np.arange(max(len(whole) for _, whole in trace), dtype=np.int32), []  # any slots will do

    def timed(name, call, *args, **options):
        begin = time.thread_time_ns()
        result = call(*args, **options)
        spent[name] += time.thread_time_ns() - begin
        return result

    def make_room(tokens):
        nonlocal evicted_len
        if tree.total + tokens > slots:
            evicted_len += len(timed("evict", tree.evict, tree.total + tokens - slots))

    def finish():
        handle, whole = running.pop(0)
        rest = convert(whole[handle.end :])
        make_room(len(whole) - handle.end)
        timed("insert", tree.insert, rest, table[: len(whole) - handle.end], below=handle)
        timed("unlock", tree.unlock, handle)

    for prompt, whole in trace:
        if len(running) == flight:
            finish()
        key = convert(prompt)
        handle = timed("lock", tree.lock, timed("match", tree.match, key, limit=len(prompt) - 1))
        hit_len += handle.end
        fresh_len = len(prompt) - handle.end
        make_room(fresh_len)
        rest = convert(prompt[handle.end :])
        node, _ = timed("insert", tree.insert, rest, table[:fresh_len], below=handle)
        running.append((timed("lock", tree.move_lock, handle, node), whole))
    while running:
        finish()
    return {name: ns / 1e3 / len(trace) for name, ns in spent.items()}, (hit_len, evicted_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=300, help="chat sessions")
    parser.add_argument("--turns", type=int, default=6, help="turns a session")
    parser.add_argument("--page-size", type=int, default=1, help="tokens a page")
    parser.add_argument("--pool", type=float, default=0.3, help="pool size, as a share of all distinct tokens")
    parser.add_argument("--flight", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--policy", default="lru", choices=sorted(EVICTION), help="eviction policy; heapify and walk know lru")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    trace = chat_trace(args.seed, args.sessions, args.turns)
    everything = Tree(args.page_size)
    for _, whole in trace:
        everything.insert(whole, np.zeros(len(whole), np.int32))
    slots = int(everything.total * args.pool)
    asked_len = sum(len(prompt) for prompt, _ in trace)
    print(f"{len(trace)} requests, {asked_len} prompt tokens, {everything.total} distinct tokens, a pool of {slots} slots, "
          f"page size {args.page_size}, {args.flight} at a time, seed {args.seed}")
    rows = [("ours", Tree, key_bytes), ("list", Tree, np.ndarray.tolist), ("loop", LoopTree, warm_key)]
    if args.policy == "lru":
        rows += [("heapify", HeapifyTree, key_bytes), ("walk", WalkTree, key_bytes)]
    print(f"\n{'us a request':14}" + "".join(f"{name:>9}" for name in OPERATIONS) + f"{'sum':>9}{'x ours':>9}")
    replay(Tree(args.page_size, args.policy), trace[:200], slots, args.flight, key_bytes)  # warms numpy up
    rows = [(name, *replay(kind(args.page_size, args.policy), trace, slots, args.flight, convert))
            for name, kind, convert in [*rows, rows[0]]]
    ours = min(sum(spent.values()) for name, spent, _ in rows if name == "ours")
    done = rows[0][2]
    for name, spent, result in rows:
        assert result == done, f"{name} hit and evicted {result}, ours {done}"
        total = sum(spent.values())
        print(f"{name:14}" + "".join(f"{spent[op]:9.1f}" for op in OPERATIONS) + f"{total:9.1f}{total / ours:9.1f}")
    print(f"\nhit rate {done[0] / asked_len:.4f}, {done[1]} tokens evicted, the same in every row")


if __name__ == "__main__":
    main()
