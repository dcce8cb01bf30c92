"""The radix tree: what a match finds, what a lock protects, what goes first, what it costs, and what is refused."""

import random

import numpy as np
import pytest

from lines import lines_run
from nano_sgl import radix
from nano_sgl.eviction import EVICTION
from nano_sgl.radix import Match, Tree, draw, key_bytes, replay_figure_3

POLICIES = sorted(EVICTION)


def ids(*tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


class Pool:
    """Slots in whole pages, each given out once."""

    def __init__(self, page_size: int = 1):
        self.page_size, self.next = page_size, page_size

    def take(self, count: int) -> np.ndarray:
        first, self.next = self.next, self.next + -(-count // self.page_size) * self.page_size
        return np.arange(first, first + count, dtype=np.int32)


def put(tree: Tree, pool: Pool, tokens, **options):
    """Inserts from the root with fresh slots, audits, and returns (node, present)."""
    inserted = tree.insert(tokens, pool.take(len(tokens)), **options)
    tree.check()
    return inserted


# -- cases met by others --


def test_the_matched_node_itself_is_locked(api_case):
    assert "lock walk" in api_case("F003")["fault"]
    tree = Tree()
    tree.insert(range(1, 9), np.arange(100, 108))
    handle = tree.lock(tree.match(range(1, 9)))
    assert [node.locks for node in handle.path()] == [1]
    assert tree.evict(100).size == 0
    tree.unlock(handle)
    assert [node.locks for node in handle.path()] == [0]
    assert sorted(tree.evict(100)) == list(range(100, 108))
    tree.check()


def test_keys_shorter_than_a_page_and_tails_that_fill_none(api_case):
    assert "page size > 1" in api_case("F005")["fault"]
    tree, slots = Tree(page_size=16), np.arange(16, 56)
    assert tree.match(range(9)).length == 0
    node, present = tree.insert(range(40), slots)
    assert (node.end, present) == (32, 0)
    assert tree.match(range(40)).length == 32
    assert sorted(tree.evict(1000)) == list(range(16, 48))  # the tail of 8 never was the tree's
    assert (tree.total, tree.roots) == (0, {})
    tree.check()


# -- matching and growing --


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 33, 64])
def test_match_finds_the_longest_prefix_in_whole_pages(page_size):
    tree, pool, rng = Tree(page_size), Pool(page_size), random.Random(page_size)
    known = []
    for _ in range(60):
        base = rng.choice(known)[: rng.randrange(400)] if known and rng.random() < 0.8 else []
        known.append(base + [rng.randrange(3) for _ in range(rng.randrange(300))])
        put(tree, pool, known[-1])
    for _ in range(200):
        asked = rng.choice(known)[: rng.randrange(500)] + [rng.randrange(3) for _ in range(rng.randrange(60))]
        limit = rng.choice([None, rng.randrange(500)])
        shared = [sum(1 for _ in _same(asked[:limit], other[: len(other) // page_size * page_size])) for other in known]
        assert tree.match(asked, limit=limit).length == max(shared) // page_size * page_size


def _same(a, b):
    for x, y in zip(a, b):
        if x != y:
            return
        yield x


def test_match_does_not_change_the_tree():
    tree, pool = Tree(), Pool()
    put(tree, pool, range(10))
    before = draw(tree), tree.clock
    match = tree.match(range(7))
    assert match.length == 7 and match.node.end == 10
    assert (draw(tree), tree.clock) == before


def test_insert_says_what_was_present_and_leaves_duplicates_to_the_caller():
    tree, pool = Tree(page_size=4), Pool(4)
    put(tree, pool, range(12))
    mine = pool.take(16)
    node, present = tree.insert([*range(8), 50, 51, 52, 53, 54, 55, 56, 57], mine)
    assert (node.start, node.end, present) == (8, 16, 8)
    assert node.slots.tolist() == mine[8:].tolist()
    assert tree.slots(node).tolist() == [*range(4, 12), *mine[8:]]
    for start in range(17):
        assert tree.slots(node, start).tolist() == tree.slots(node).tolist()[start:]
    assert tree.slots(tree.root()).size == 0


def test_slots_are_handed_over_and_what_is_told_of_them_is_a_copy():
    tree, mine = Tree(), np.arange(1, 9, dtype=np.int32)
    node, _ = tree.insert(range(8), mine)
    assert np.shares_memory(node.slots, mine)
    for start in (0, 3):
        tree.slots(node, start)[:] = 0
    assert tree.slots(node).tolist() == list(range(1, 9))
    upper = tree.lock(tree.match(range(3)))  # a node does not keep alive what is not its own
    assert not any(np.shares_memory(part.slots, mine) for part in (upper, node))


def test_extend_goes_on_below_a_handle():
    tree, pool = Tree(page_size=2), Pool(2)
    put(tree, pool, range(20))
    key = key_bytes(range(15))
    handle = tree.lock(tree.match(key, limit=6))
    assert handle.end == 6
    assert tree.extend(handle, key, handle.end).length == 14
    assert tree.extend(handle, range(6, 11)).length == 10
    assert tree.extend(handle, key, handle.end, limit=3).length == 8
    assert tree.extend(handle, [99, 99]) == (handle, 6)
    assert tree.extend(tree.root(), key).length == 14


def test_a_failing_compare_stops_at_a_page_although_the_tokens_go_on():
    tree, pool = Tree(page_size=4), Pool(4)
    put(tree, pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12]).length == 4
    node, present = put(tree, pool, [1, 2, 3, 4, 5, 6, 7, 0])
    assert (present, node.start, len(node.parent.children)) == (4, 4, 2)


def test_namespaces_share_nothing_and_leave_nothing_behind():
    tree, pool = Tree(), Pool()
    for namespace in ("", "a", "b"):
        assert tree.match(range(5), namespace).length == 0
        assert put(tree, pool, range(5), namespace=namespace).present == 0
    assert tree.match(range(5), "a").length == 5 and tree.match(range(5), "c").length == 0
    root = tree.root("a")
    assert tree.evict(1).tolist() == [1, 2, 3, 4, 5]
    assert [tree.match(range(5), namespace).length for namespace in ("", "a", "b")] == [0, 5, 5]
    tree.evict(15)
    assert tree.roots == {}
    put(tree, pool, range(5), namespace="a")
    assert tree.extend(root, range(9)).length == 5  # an old root handle stands for the namespace, not for an object
    assert put(tree, pool, range(6), below=root).present == 5
    with pytest.raises(ValueError, match="namespace 'a' was given with namespace 'b'"):
        tree.insert(range(5), range(5), below=root, namespace="b")


@pytest.mark.parametrize("key", [[5, 6, 7], (5, 6, 7), ids(5, 6, 7), ids(5, 0, 6, 0, 7, 0)[::2], np.array([5, 6, 7], np.int64),
                                 np.array([5, 6, 7], np.uint32), ids(5, 6, 7).tobytes()])
def test_keys_come_in_any_form(key):
    assert key_bytes(key) == ids(5, 6, 7).tobytes()
    tree = Tree()
    tree.insert(key, [1, 2, 3])
    assert tree.match(key).length == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_split_keeps_everything_right(policy):
    tree, pool = Tree(policy=policy), Pool()
    node, _ = put(tree, pool, range(10), step=7, priority=5)
    handle = tree.lock(tree.match(range(10)))
    assert handle is node
    tree.lock(tree.match(range(4)))
    upper = node.parent
    tree.check()
    assert (upper.start, upper.end, node.start, node.end) == (0, 4, 4, 10)
    assert (upper.locks, upper.holds, node.locks, node.holds) == (2, 1, 1, 1)
    assert (upper.hits, node.hits) == (3, 2)
    assert (upper.priority, node.priority, upper.step, node.step) == (6, 6, 7, 7)
    assert (upper.slots.tolist(), node.slots.tolist()) == ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10])
    assert tree.slots(handle).tolist() == list(range(1, 11))
    tree.unlock(upper)
    tree.unlock(handle)
    tree.check()
    assert tree.evict(1).tolist() == [5, 6, 7, 8, 9, 10]
    assert tree.evict(1).tolist() == [1, 2, 3, 4]


# -- locking --


def test_a_lock_protects_the_whole_path_and_nothing_else():
    tree, pool = Tree(), Pool()
    put(tree, pool, [1, 2, 3, 4])
    put(tree, pool, [1, 2, 5, 6])
    put(tree, pool, [1, 2, 5, 6, 7])
    handle = tree.lock(tree.match([1, 2, 5, 6]))
    assert (tree.protected, tree.evictable, tree.total) == (4, 3, 7)
    assert sorted(tree.evict(100)) == [3, 4, 13]
    tree.check()
    assert tree.match([1, 2, 5, 6, 7]).length == 4
    tree.unlock(handle)
    assert (tree.protected, tree.evictable) == (0, 4)
    assert len(tree.evict(100)) == 4


def test_chunks_of_a_prompt_cannot_evict_its_own_beginning():
    tree, pool, handle = Tree(), Pool(), None
    handle = tree.lock(tree.match(range(600)))
    for start in range(0, 600, 128):
        end = min(start + 128, 600)
        assert tree.evict(10_000).size == 0
        node, _ = tree.insert(range(start, end), pool.take(end - start), below=handle, prompt_len=600)
        handle = tree.move_lock(handle, node)
        tree.check()
        assert tree.protected == end
    assert [node.hits for node in handle.path()] == [1] * 5
    tree.unlock(handle)
    assert len(tree.evict(10_000)) == 600


def test_move_lock_goes_down_only():
    tree, pool = Tree(), Pool()
    a, _ = put(tree, pool, [1, 2])
    b, _ = put(tree, pool, [1, 2, 3, 4])
    c, _ = put(tree, pool, [1, 2, 5])
    handle, other = tree.lock(a), tree.lock(b)
    assert tree.move_lock(handle, b) is b and (a.locks, a.holds, b.locks, b.holds, tree.protected) == (2, 0, 2, 2, 4)
    tree.check()
    tree.unlock(other)
    assert tree.move_lock(b, b) is b
    tree.check()
    for old, new, message in ((b, c, "not below"), (b, a, "not below"), (c, c, "not locked")):
        with pytest.raises(ValueError, match=message):
            tree.move_lock(old, new)
    tree.check()
    with pytest.raises(ValueError, match="not below"):
        tree.move_lock(tree.root("other"), b)
    tree.unlock(b)
    assert tree.protected == 0


def test_the_empty_match_locks_the_root_and_costs_nothing():
    tree, pool = Tree(), Pool()
    handle = tree.lock(tree.match([1, 2, 3]))
    assert handle.is_root and tree.protected == 0
    node, _ = put(tree, pool, [1, 2, 3], below=handle)
    assert tree.move_lock(handle, node) is node
    tree.check()
    tree.unlock(node)
    tree.unlock(tree.root())
    assert tree.lock(Match(node, 0)) is tree.root()
    tree.check()


def test_a_match_stays_good_when_its_node_is_split_and_is_refused_when_it_is_gone():
    tree, pool = Tree(), Pool()
    put(tree, pool, range(10))
    late, cut = tree.match(range(10)), tree.match(range(3))
    tree.unlock(tree.lock(tree.match(range(6))))
    assert [tree.lock(match).end for match in (late, cut, late._replace(length=5))] == [10, 3, 5]
    tree.check()
    for node in list(tree.walk()):
        while node.holds:
            tree.unlock(node)
    match = tree.match(range(10))
    tree.evict(1)
    for use in (lambda: tree.lock(match), lambda: tree.extend(match.node, [1]), lambda: tree.slots(match.node),
                lambda: tree.insert([1], [99], below=match.node), lambda: tree.move_lock(tree.root(), match.node)):
        with pytest.raises(ValueError, match="has left the tree: match again"):
            use()
    tree.check()


def test_a_request_counts_one_hit_a_node():
    tree, pool = Tree(), Pool()
    first, _ = put(tree, pool, range(8))
    handle = tree.lock(tree.match(range(8)))  # another request
    node, _ = put(tree, pool, range(8, 12), below=handle)
    handle = tree.move_lock(handle, node)
    node, _ = put(tree, pool, range(12, 14), below=handle)
    handle = tree.move_lock(handle, node)
    assert [node.hits for node in handle.path()] == [2, 1, 1]
    tree.unlock(handle)
    handle = tree.lock(tree.match(range(14)), counted_len=14)  # retracted and admitted again
    assert [node.hits for node in handle.path()] == [2, 1, 1]
    put(tree, pool, range(16), counted_len=14)  # inserts everything again
    assert [node.hits for node in handle.path()] == [2, 1, 1]
    put(tree, pool, [*range(10), 77])  # a third request, from the root
    assert [node.hits for node in tree.match(range(16)).node.path()] == [3, 2, 1, 1, 1]


# -- failing launches --


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_step_takes_its_nodes_back_with_all_below(policy):
    tree, pool = Tree(policy=policy), Pool()
    put(tree, pool, [1, 2], step=1)
    handle = tree.lock(tree.match([1, 2]))
    mine, _ = put(tree, pool, [3, 4, 5], below=handle, step=2)
    handle = tree.move_lock(handle, mine)
    put(tree, pool, [1, 2, 3, 9], step=3)  # splits the node of step 2; both parts are its
    put(tree, pool, [8], step=2)
    with pytest.raises(RuntimeError, match="step 2 cannot be taken back: .* is locked"):
        tree.remove_step(2)
    tree.check()
    tree.unlock(handle)
    assert tree.remove_step(2).tolist() == [3, 4, 5, 9, 10]
    tree.check()
    assert tree.match([1, 2, 3, 4, 5]).length == 2 and tree.match([8]).length == 0
    assert tree.remove_step(2).size == 0 and tree.total == 2
    with pytest.raises(ValueError, match="step is 0"):
        tree.remove_step(0)


@pytest.mark.parametrize("policy, first", [("lru", [1, 2]), ("mru", [4]), ("slru", [1, 2]), ("filo", [4])])
def test_a_node_that_a_failed_step_laid_bare_goes_when_it_was_used(policy, first):
    tree, pool = Tree(policy=policy), Pool()
    put(tree, pool, [1, 2])
    put(tree, pool, [1, 2, 3][2:], below=tree.match([1, 2]).node, step=2)
    put(tree, pool, [4])
    tree.remove_step(2)
    tree.check()
    assert tree.match(first).length == len(first)
    tree.evict(1)
    assert tree.match(first).length == 0 and tree.total == 3 - len(first)


def test_reset_gives_everything_back_once_nothing_is_locked():
    tree, pool = Tree(policy="slru"), Pool()
    for namespace in ("", "x"):
        put(tree, pool, range(6), namespace=namespace)
    match, root = tree.match(range(6)), tree.root()
    handle = tree.lock(match)
    with pytest.raises(RuntimeError, match="6 tokens are locked"):
        tree.reset()
    tree.unlock(handle)
    assert sorted(tree.reset()) == list(range(1, 13)) and tree.total == 0 and draw(tree) == "(empty)"
    tree.check()
    with pytest.raises(ValueError, match="has left the tree"):
        tree.lock(match)
    assert put(tree, pool, range(6), below=root).present == 0


# -- eviction --


def test_a_prompt_that_ends_inside_a_node_splits_it():
    tree, pool = Tree(policy="priority"), Pool()
    put(tree, pool, range(10), prompt_len=2)
    node, present = put(tree, pool, range(10), prompt_len=6, priority=3)
    assert (node.end, present) == (10, 10)
    assert [(node.start, node.end, node.priority) for node in node.path()] == [(0, 2, 4), (2, 6, 4), (6, 10, 3)]


def test_a_lock_raises_what_it_uses_as_prompt():
    tree, pool = Tree(policy="priority"), Pool()
    put(tree, pool, [1, 2, 3, 4], prompt_len=2)
    put(tree, pool, [5, 6], priority=1)
    tree.unlock(tree.lock(tree.match([1, 2, 3]), priority=2))
    assert [tree.evict(1).tolist() for _ in range(3)] == [[4], [5, 6], [3]]


# -- the seam --


# -- what it costs, in lines of radix.py that are run --


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cost_of_an_operation_does_not_grow_with_the_tree(policy):
    def costs(leaves):
        tree = Tree(policy=policy)
        for i in range(leaves):
            tree.insert([i % 50, 1000 + i, 7], [3 * i, 3 * i + 1, 3 * i + 2])
        key, handle = key_bytes([7, 1007, 7]), []
        return [lines_run(radix, action) for action in (
            lambda: tree.match(key), lambda: handle.append(tree.lock(tree.match(key))), lambda: tree.unlock(handle[0]),
            lambda: tree.insert([7, 1007, 7, 9], [0] * 4), lambda: tree.evict(1), lambda: tree.evict(5))]

    small, large = costs(200), costs(5000)
    assert max(abs(a - b) for a, b in zip(small, large)) <= 3, (small, large)


def test_the_cost_of_a_compare_does_not_grow_with_the_key():
    def costs(length):
        tree, key = Tree(page_size=4), np.arange(length, dtype=np.int32)
        tree.insert(key, key)
        other = key.copy()
        other[-2] = -1
        actions = (lambda: tree.match(key), lambda: tree.match(other), lambda: tree.insert(other, key))
        return [lines_run(radix, action) for action in actions]

    assert costs(16) == costs(40_000)


# -- refusals --


@pytest.mark.parametrize("page_size", [0, -1, 65, 1.0, True, "16", None])
def test_page_sizes_that_are_refused(page_size):
    with pytest.raises(ValueError, match="page_size is .*, expected an integer from 1 to 64"):
        Tree(page_size=page_size)


def test_slots_that_are_refused():
    tree = Tree(page_size=4)
    with pytest.raises(ValueError, match="3 slots for 4 tokens"):
        tree.insert(range(4), [4, 5, 6])
    with pytest.raises(ValueError, match="slot 5 begins no page of 4"):
        tree.insert(range(4), [5, 6, 7, 8])
    assert tree.total == 0 and tree.roots == {}
    tree.insert(range(4), [4, 5, 7, 6])
    with pytest.raises(AssertionError, match="not whole pages"):
        tree.check()


def test_unlocking_what_is_not_locked_is_refused():
    tree, pool = Tree(), Pool()
    put(tree, pool, range(4))
    inner, leaf = tree.lock(tree.match(range(2))), tree.lock(tree.match(range(4)))
    tree.unlock(inner)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(inner)  # it is still protected by the leaf's lock, which is not its own
    assert (tree.protected, inner.locks) == (4, 1)
    tree.unlock(leaf)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(leaf)
    tree.check()


@pytest.mark.parametrize("key", [[2**31], [-(2**31) - 1], [1.5], ["a"], np.zeros((2, 2), np.int32), b"abc", np.array([2**40])])
def test_keys_that_are_refused(key):
    with pytest.raises((ValueError, OverflowError)):
        Tree().match(key)
        key_bytes(key)


# -- looking at it --


def test_a_tree_is_drawn():
    tree, pool = Tree(), Pool()
    for key in ([1, 2, 3], [1, 2, 4, 5], [6]):
        put(tree, pool, key)
    put(tree, pool, range(9), namespace="salt")
    tree.lock(tree.match([1, 2, 4]))
    assert draw(tree, width=12).splitlines() == [
        "root", "|-- 1 2  (2 tok, 1 locks, 3 hits)", "|   |-- 3  (1 tok)", "|   `-- 4  (1 tok, 1 locks, 2 hits)",
        "|       `-- 5  (1 tok)", "`-- 6  (1 tok)", "root 'salt'", "`-- 0 1 2 3 4...  (9 tok)"]
    assert "-- ab  (2 tok" in draw(tree, lambda ids: "".join(chr(96 + i) for i in ids))


def test_figure_3_of_the_paper():
    moments = list(replay_figure_3())
    assert [hit_len for _, _, hit_len, _, _ in moments] == [0, 0, 9, 6, 12, 0, 27, 9, 33]
    evicted = [[span[:16] for span in spans] for _, _, _, spans, _ in moments]
    assert evicted == [[], [], [], [], ["User: Tell me a "], [], [], ["What is SGLang? ", "User: Why a tree"],
                       ["3+5 A: 8", "4+4 A: 8", "6*2 A: 12"]]
    assert moments[8][4].count("7-4 A:") == 1 and "maybe 4" in moments[8][4]


def _corrupt_lock(tree):
    tree.match(range(4)).node.locks += 1


def _corrupt_key(tree):
    tree.match(range(4)).node.key = key_bytes(range(5, 9))


def _corrupt_slots(tree):
    tree.match(range(4)).node.slots[0] = 2


def _corrupt_count(tree):
    tree.evictable -= 1


def _corrupt_order(tree):
    tree.order.touch([tree.match(range(4)).node.parent, tree.match(range(4)).node])


def _corrupt_lost(tree):
    tree.order.unlink(tree.match(range(4)).node)


def _corrupt_start(tree):
    tree.match(range(4)).node.start += 1


def _corrupt_priority(tree):
    tree.match(range(4)).node.priority = 99


@pytest.mark.parametrize("corrupt", [_corrupt_lock, _corrupt_key, _corrupt_slots, _corrupt_count, _corrupt_order, _corrupt_lost,
                                     _corrupt_start, _corrupt_priority])
def test_check_sees_what_is_wrong(corrupt):
    tree, pool = Tree(), Pool()
    put(tree, pool, range(4), prompt_len=2)
    corrupt(tree)
    with pytest.raises(AssertionError, match="[a-z]"):
        tree.check()
