"""Eviction: what goes first under every policy, what `cost` learns, what a victim costs, the seam, and what `check` sees."""

import random

import numpy as np
import pytest

from lines import lines_run
from nano_sgl import eviction as module
from nano_sgl.eviction import EVICTION, MAX_LEVEL, MEMORY, SLRU_THRESHOLD, Heap, Kind, Order, Ring, eviction
from nano_sgl.radix import Tree

POLICIES = ["lru", "mru", "fifo", "filo", "lfu", "slru", "priority", "cost"]


class Pool:
    """A tree and slots for it, each given out once."""

    def __init__(self, policy: str, page_size: int = 1):
        self.tree, self.page_size, self.next = Tree(page_size, policy), page_size, page_size

    def put(self, tokens, **options):
        """Inserts from the root with fresh slots, audits, returns (node, present)."""
        slots = np.arange(self.next, self.next + len(tokens), dtype=np.int32)
        self.next += -(-len(tokens) // self.page_size) * self.page_size
        inserted = self.tree.insert(tokens, slots, **options)
        self.tree.check()
        return inserted

    def serve(self, prompt, output):
        """A request as the scheduler serves it; returns how much of the prompt was there."""
        handle = self.tree.lock(self.tree.match(prompt, limit=len(prompt) - 1))
        hit_len = handle.end
        handle = self.tree.move_lock(handle, self.put(prompt[handle.end :], below=handle).node)
        self.put(output, below=handle)
        self.tree.unlock(handle)
        self.tree.check()
        return hit_len


def path_of(node):
    return np.concatenate([up.tokens for up in node.path()]).tolist()


def test_the_policies_are_these():
    assert list(EVICTION) == POLICIES


# -- what goes first --


def test_output_goes_before_the_prompt_it_hangs_below():
    for policy in POLICIES:
        pool = Pool(policy, page_size=2)
        node, _ = pool.put(range(11), prompt_len=7)  # the prompt's last token shares a page with the output
        assert (node.start, node.end, node.parent.end) == (6, 10, 6)
        assert pool.tree.evict(1).tolist() == list(range(8, 12))
        assert pool.tree.match(range(11)).length == 6


def test_under_priority_outputs_go_before_prompts():
    pool = Pool("priority")
    pool.put([1, 2, 3, 4], prompt_len=2)
    pool.put([5, 6, 7, 8], prompt_len=2)
    pool.put([9, 10], prompt_len=2, priority=1)
    gone = [pool.tree.evict(1).tolist() for _ in range(5)]
    assert gone == [[3, 4], [7, 8], [1, 2], [5, 6], [9, 10]]


def test_what_several_used_outlives_a_flood():
    def flood(policy):
        pool = Pool(policy)
        for _ in range(SLRU_THRESHOLD):
            pool.put(range(8))
        for i in range(100, 140):
            if pool.tree.total > 24:
                pool.tree.evict(8)
            pool.put([i] * 8)
        return pool.tree.match(range(8)).length

    assert flood("slru") == flood("lfu") == flood("cost") == 8 and flood("lru") == 0


VALUES = {  # what goes first is what is smallest, from records kept by the test
    "lru": lambda r: r["used"], "mru": lambda r: -r["used"], "fifo": lambda r: r["hung"], "filo": lambda r: -r["born"],
    "lfu": lambda r: (r["hits"], r["used"]), "slru": lambda r: (r["hits"] >= SLRU_THRESHOLD, r["used"]),
    "priority": lambda r: (r["priority"], r["used"]),
}


@pytest.mark.parametrize("policy", VALUES)
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_evicts_in_the_order_of_a_sorted_brute_force(policy, seed):
    rng, pool = random.Random(seed), Pool(policy)
    records: dict[tuple, dict] = {}  # of every prefix that was inserted, by its tokens; hung: when the last was hung at or below it
    texts = [[]]
    for clock in range(1, 120):
        base = rng.choice(texts)[:30]
        key = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        texts.append(key)
        prompt_len, priority = rng.randrange(len(key) + 1), rng.randrange(3)
        fresh = any(tuple(key[:n]) not in records for n in range(1, len(key) + 1))
        pool.put(key, prompt_len=prompt_len, priority=priority)
        for n in range(1, len(key) + 1):
            record = records.setdefault(tuple(key[:n]), {"hits": 0, "born": clock, "hung": clock, "priority": -1})
            record["hits"] += 1
            record["used"] = clock
            record["hung"] = clock if fresh else record["hung"]
            record["priority"] = max(record["priority"], priority + 1 if prompt_len and n <= prompt_len else priority)
    while pool.tree.total:
        leaves = {node: records[tuple(path_of(node))] for node in pool.tree.walk() if not node.kids}
        expected = min(leaves, key=lambda node: VALUES[policy](leaves[node])).slots.tolist()
        assert pool.tree.evict(1).tolist() == expected
        pool.tree.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_order_survives_whatever_the_tree_does(policy):
    rng, pool = random.Random(policy), Pool(policy)
    tree, handles, waiters = pool.tree, [], []
    for arrival in range(400):
        key = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        action = rng.randrange(7)
        if action <= 1:
            pool.put(key, prompt_len=rng.randrange(len(key) + 1))
        elif action == 2:
            handles.append(tree.lock(tree.match(key)))
        elif action == 3 and handles:
            tree.unlock(handles.pop(rng.randrange(len(handles))))
        elif action == 4:
            waiters.append(tree.wait(key, "", arrival, None))
        elif action == 5 and waiters:
            tree.leave(waiters.pop(rng.randrange(len(waiters))))
        else:
            locked = tree.protected
            assert len(tree.evict(rng.randrange(1, 9))) <= tree.total + 12 and tree.protected == locked
        tree.check()
    for handle in handles:
        tree.unlock(handle)
    tree.evict(tree.total)
    assert tree.total == 0
    tree.check()


# -- what `cost` knows --


def chats(pool, count, turns, system=range(20)):
    """So many chats, one after the other, of so many turns of 2 + 3 tokens; the last pool's worth stays."""
    for chat in range(count):
        history = [*system]
        for turn in range(turns):
            prompt = [*history, 100 + chat, turn]
            if pool.tree.total > 120:
                pool.tree.evict(pool.tree.total - 120)
            pool.serve(prompt, [7, 8, 9])
            history = [*prompt, 7, 8, 9]


def test_cost_finds_out_after_how_many_turns_nobody_comes_back():
    def left(policy):
        pool = Pool(policy)
        chats(pool, count=12, turns=3)
        chats(pool, count=1, turns=1)                         # it waits for its second turn
        for chat in range(200, 210):                          # while others are at their third, and done
            history = [*range(20), chat, 0, 7, 8, 9, chat, 1, 7, 8, 9]
            pool.serve([*range(20), chat, 0], [7, 8, 9])
            pool.serve([*history[:25], chat, 1], [7, 8, 9])
            pool.serve([*history, chat, 2], [7, 8, 9])
            pool.tree.evict(pool.tree.total - 60)
        return pool.tree.match([*range(20), 100, 0, 7, 8, 9]).length

    assert left("cost") == 25 and left("lru") == 20


def test_cost_keeps_what_is_waited_for_until_nothing_else_is_left():
    pool = Pool("cost")
    for first in range(5):
        pool.put([first] * 4)
    waiter = pool.tree.wait([0, 0, 0, 0, 9], "", 1, None)  # wants what was used longest ago
    pool.tree.evict(16)
    pool.tree.check()
    assert pool.tree.total == 4 and pool.tree.match([0] * 4).length == 4
    pool.put([5] * 4)
    pool.tree.leave(waiter)
    pool.tree.evict(1)                                     # it is like any other again
    assert pool.tree.match([0] * 4).length == 0 and pool.tree.match([5] * 4).length == 4
    pool.tree.wait([5] * 4, "", 2, None)
    assert pool.tree.evict(1).size == 4 and pool.tree.total == 0
    pool.tree.check()


def test_cost_holds_a_deep_token_dearer_than_a_shallow_one():
    pool = Pool("cost")
    order = pool.tree.order
    shallow, _ = pool.put([1] * 10)
    deep, _ = pool.put([2] * 60_000)
    deep.used = shallow.used = order.now
    assert order.kind[deep] is order.kind[shallow] and 2 < order.saving(deep) / order.saving(shallow) < 2.5


def test_a_request_that_locks_what_it_has_inserted_is_no_second_use():
    pool = Pool("cost")
    pool.serve([1, 2, 3], [4])
    pool.serve([5, 6, 7], [8])
    kinds = pool.tree.order.kinds
    assert sum(kind.used + kind.lost for kind in kinds.values()) == 0
    assert sum(kind.leaves for kind in kinds.values()) == 2
    assert pool.serve([1, 2, 3, 4, 9], [10]) == 4
    assert sum(kind.used for kind in kinds.values()) == 1


def test_levels_and_memory_are_bounded():
    pool, node = Pool("cost"), None
    for depth in range(3 * MAX_LEVEL):
        node, _ = pool.put([depth], below=node)
    assert node.ticket == 3 * MAX_LEVEL and max(level for level, _, _ in pool.tree.order.kinds) == MAX_LEVEL
    kind = Kind()
    for _ in range(3 * MEMORY):
        kind.count(used=True)
        assert kind.used + kind.lost <= MEMORY and kind.chance == 1
    for _ in range(10 * MEMORY):
        kind.count(used=False)
    assert kind.chance < 0.001


# -- what it costs, in lines of eviction.py that are run --


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_costs_the_same_in_any_tree_and_so_does_hanging_a_leaf_below_a_locked_path(policy):
    def costs(leaves, depth):
        tree, handle = Tree(policy=policy), None
        for i in range(leaves):
            tree.insert([i % 50, 1000 + i, 7], [3 * i, 3 * i + 1, 3 * i + 2])
        for i in range(depth):
            node, _ = tree.insert([i], [3 * leaves + i], below=handle)
            handle = tree.move_lock(handle or tree.root(), node)
        tree.evict(1)  # throws out the void entries of the path, once
        spent = [lines_run(module, lambda: tree.evict(1)), lines_run(module, lambda: tree.insert([1, 2], [0, 1], below=handle))]
        tree.unlock(handle)
        return [*spent, lines_run(module, lambda: tree.evict(1)), lines_run(module, lambda: tree.evict(1))]  # and the bare parent after its child

    small, large = costs(200, 5), costs(5000, 500)
    allowed = 3 if policy != "cost" else 3 * 2 * MAX_LEVEL * 10  # of each kind the head is looked at
    assert max(abs(a - b) for a, b in zip(small, large)) <= allowed, (small, large)


def test_void_entries_do_not_fill_the_heap():
    tree = Tree(policy="lfu")
    node, _ = tree.insert(range(4), range(4))
    for _ in range(1000):
        tree.unlock(tree.lock(node))
    assert len(tree.order.heap) < 100
    tree.check()


def test_evict_takes_whole_leaves_until_it_has_enough():
    for policy in POLICIES:
        pool = Pool(policy)
        for i in range(4):
            pool.put([i] * 5)
        assert len(pool.tree.evict(0)) == len(pool.tree.evict(-3)) == 0
        assert len(pool.tree.evict(6)) == 10 and len(pool.tree.evict(1)) == 5
        assert len(pool.tree.evict(100)) == 5 and len(pool.tree.evict(100)) == 0


# -- the seam --


@pytest.fixture
def toys():
    """Two toy policies, taken out again afterwards."""

    @eviction("toy-shallow")
    def shallow(leaf):
        return leaf.end

    @eviction("toy-any-order")
    class Unordered(Order):
        def __init__(self):
            self.leaves = set()

        def touch(self, chain):
            if not chain[0].kids:
                self.leaves.add(chain[0])

        def add(self, leaf):
            self.leaves.discard(leaf.parent)

        def lock(self, chain):
            self.leaves.discard(chain[0])

        def bare(self, node):
            self.leaves.add(node)

        def remove(self, leaf):
            self.leaves.discard(leaf)

        def victims(self):
            while self.leaves:
                yield next(iter(self.leaves))

    yield
    del EVICTION["toy-shallow"], EVICTION["toy-any-order"]


def test_a_policy_is_a_function_of_a_leaf(toys):
    pool = Pool("toy-shallow")
    for key in ([1] * 5, [2] * 3, [1] * 5 + [3] * 4, [4] * 6):
        pool.put(key)
    assert isinstance(pool.tree.order, Heap)
    assert [len(pool.tree.evict(1)) for _ in range(4)] == [3, 6, 4, 5]


def test_a_policy_can_be_an_order_of_its_own(toys):
    pool, rng = Pool("toy-any-order"), random.Random(0)
    for _ in range(100):
        pool.put([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
    tree = pool.tree
    handle = tree.lock(tree.match([0, 1, 2]))
    total = tree.total
    assert len(tree.evict(10_000)) == total - handle.end
    tree.check()
    with pytest.raises(ValueError, match="eviction policy 'toy' is unknown, expected one of .*toy-shallow"):
        Tree(policy="toy")


def test_an_order_must_say_who_goes():
    with pytest.raises(NotImplementedError):
        Order().victims()


# -- what check sees --


def _lost(order, node):
    order.unlink(node)


def _gained(order, node):
    ring = order.ring if hasattr(order, "ring") else order.wanted
    stray = Ring()
    order.link(stray, before=ring)


def _forgotten(order, node):
    if hasattr(order, "kind"):
        order.kind[node].leaves += 1
    else:
        node.used += 1
        node.parent.used -= 1


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("corrupt", [_lost, _gained, _forgotten])
def test_check_sees_a_damaged_ring(policy, corrupt):
    pool = Pool(policy)
    node, _ = pool.put(range(4), prompt_len=2)
    corrupt(pool.tree.order, node)
    with pytest.raises(AssertionError, match="[a-z]"):
        pool.tree.check()


def test_check_sees_a_damaged_heap():
    pool = Pool("lfu")
    node, _ = pool.put(range(4))
    node.used -= 1
    with pytest.raises(AssertionError, match="its value went from"):
        pool.tree.check()
    node.used += 1
    node.ticket = 0
    with pytest.raises(AssertionError, match="not the unlocked leaves"):
        pool.tree.check()
