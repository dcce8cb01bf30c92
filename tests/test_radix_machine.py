"""Random lives of a radix tree against a model that keeps one record for every page of every prefix, and knows no nodes."""

import os.path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nano_sgl import radix, waiting
from nano_sgl.radix import Match, Node, Tree, key_bytes
from nano_sgl.waiting import Waiter

VALUES = {  # the leaf with the smallest value goes first
    "lru": lambda r: r.used, "mru": lambda r: -r.used, "fifo": lambda r: r.born, "filo": lambda r: -r.born,
    "lfu": lambda r: (r.hits, r.used), "slru": lambda r: (r.hits >= 2, r.used), "priority": lambda r: (r.priority, r.used),
}
NAMESPACES = st.sampled_from(["", "", "", "a", "b"])
PAGES = st.lists(st.integers(0, 2), max_size=7)
PRIORITIES = st.integers(-1, 2)


class Page:
    """The last page of a prefix."""

    def __init__(self, slots, step, clock):
        self.slots, self.step = slots, step
        self.hits = self.locks = 0
        self.born = self.used = clock
        self.priority = -(10**9)


class RadixMachine(RuleBasedStateMachine):
    """Every rule does the same to the tree and to the model and compares what comes back; then the tree is audited."""

    @initialize(page_size=st.sampled_from([1, 2, 16]), policy=st.sampled_from(sorted(VALUES)))
    def begin(self, page_size, policy):
        self.page_size, self.policy = page_size, policy
        self.tree = Tree(page_size, policy, weighs=True)
        self.before = waiting.WAIT_FOR_LEADER
        waiting.WAIT_FOR_LEADER = radix.WAIT_FOR_LEADER = 2 * page_size  # keys are short here
        self.waiting: list[tuple[Waiter, str, bytes]] = []
        self.leading: list[tuple[Waiter, str, bytes]] = []
        self.pages: dict[tuple[str, bytes], Page] = {}  # (namespace, all the tokens of a prefix) -> its last page
        self.handles: list[tuple[Node, str, bytes]] = []
        self.clock, self.step, self.next_page = 0, 0, 1

    # -- the model --

    def key(self, symbols, tail_len=0):
        """A page a symbol; pages differ in their last token only. Then the beginning of one more page."""
        tokens = [token for symbol in symbols for token in [7] * (self.page_size - 1) + [symbol]]
        return key_bytes(tokens + [7] * (tail_len % self.page_size))

    def prefixes(self, key, start=b""):
        """Every prefix of start + key that ends with a page of key."""
        whole, page = start + key, 4 * self.page_size
        return [whole[:end] for end in range(len(start) + page, len(whole) + 1, page)]

    def matched(self, namespace, key):
        """The longest prefix of key that the model has, in bytes."""
        known = [prefix for prefix in self.prefixes(key) if (namespace, prefix) in self.pages]
        return known[-1] if known else b""

    def take(self, key):
        """Fresh slots for a key, in whole pages."""
        count = len(key) // 4
        first, self.next_page = self.next_page * self.page_size, self.next_page + -(-count // self.page_size)
        return np.arange(first, first + count, dtype=np.int32)

    def model_insert(self, namespace, start, key, slots, step, prompt_len, priority):
        """Does to the records what an insert below `start` does; returns the tokens that were present."""
        self.clock += 1
        added, old, page = self.prefixes(key, start), self.prefixes(start), self.page_size
        fresh = [prefix for prefix in added if (namespace, prefix) not in self.pages]
        for i, prefix in enumerate(added):
            if prefix in fresh:
                self.pages[namespace, prefix] = Page(slots[i * page : (i + 1) * page], step, self.clock)
            self.pages[namespace, prefix].hits += 1
        for prefix in old + added:
            record = self.pages[namespace, prefix]
            record.used = record.used if record.locks else self.clock
            outputs_only = prompt_len is not None and (prompt_len * 4 - len(start)) // (4 * page) <= 0
            is_prompt = prompt_len is None or len(prefix) <= prompt_len * 4
            worth = priority + (is_prompt and not outputs_only)
            record.priority = max(record.priority, worth if added else record.priority)
        return (len(added) - len(fresh)) * page

    def victims(self, tokens):
        """The slots that must go, in order: brute force over the unlocked leaves."""
        record, children = {}, {}
        for node in self.tree.walk():
            record[node] = self.pages[node.namespace, self.text(node)]
            children[node] = node.kids
        gone = []
        while sum(map(len, gone)) < tokens:
            leaves = [node for node, count in children.items() if not count and not record[node].locks]
            if not leaves:
                break
            node = min(leaves, key=lambda node: VALUES[self.policy](record[node]))
            gone.append(node.slots.tolist())
            del children[node]
            if node.parent in children:
                children[node.parent] -= 1
        return [slot for slots in gone for slot in slots]

    def forget(self, slots):
        gone = set(slots)
        self.pages = {prefix: record for prefix, record in self.pages.items() if record.slots[0] not in gone}

    @staticmethod
    def text(node):
        return b"".join(up.key for up in node.path())

    # -- the rules --

    @rule(namespace=NAMESPACES, symbols=PAGES, tail_len=st.integers(0, 15), priority=PRIORITIES, data=st.data())
    def insert_from_the_root(self, namespace, symbols, tail_len, priority, data):
        key = self.key(symbols, tail_len)
        prompt_len = data.draw(st.none() | st.integers(0, len(key) // 4))
        self.step += 1
        slots = self.take(key)
        node, present = self.tree.insert(key, slots, namespace=namespace, step=self.step, prompt_len=prompt_len,
                                         priority=priority)
        assert present == self.model_insert(namespace, b"", key, slots, self.step, prompt_len, priority)
        assert self.text(node) == key[: len(key) - len(key) % (4 * self.page_size)]

    @rule(namespace=NAMESPACES, symbols=PAGES, tail_len=st.integers(0, 15), limit=st.none() | st.integers(0, 40))
    def match(self, namespace, symbols, tail_len, limit):
        key = self.key(symbols, tail_len)
        match = self.tree.match(key, namespace, limit)
        assert match.length * 4 == len(self.matched(namespace, key[: None if limit is None else 4 * limit]))

    @rule(namespace=NAMESPACES, symbols=PAGES, priority=PRIORITIES, cut=st.integers(0, 2))
    def lock(self, namespace, symbols, priority, cut):
        key = self.key(symbols)
        match = self.tree.match(key, namespace)
        match = Match(match.node, max(match.length - cut * self.page_size, 0))
        handle = self.tree.lock(match, priority=priority)
        prefix = self.matched(namespace, key)[: match.length * 4]
        assert self.text(handle) == prefix
        self.model_lock(namespace, prefix, priority)
        self.handles.append((handle, namespace, prefix))

    def model_lock(self, namespace, prefix, priority):
        for record in (self.pages[namespace, up] for up in self.prefixes(prefix)):
            record.locks += 1
            record.hits += 1
            record.priority = max(record.priority, priority + 1)

    def unlock_at(self, i):
        handle, namespace, prefix = self.handles.pop(i)
        self.tree.unlock(handle)
        self.clock += 1
        for record in (self.pages[namespace, up] for up in self.prefixes(prefix)):
            record.locks -= 1
            record.used = record.used if record.locks else self.clock

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data):
        self.unlock_at(data.draw(st.integers(0, len(self.handles) - 1)))

    @precondition(lambda self: self.handles)
    @rule(symbols=PAGES, tail_len=st.integers(0, 15), priority=PRIORITIES, data=st.data())
    def insert_below_a_handle(self, symbols, tail_len, priority, data):
        i = data.draw(st.integers(0, len(self.handles) - 1))
        handle, namespace, prefix = self.handles[i]
        key = self.key(symbols, tail_len)
        match = self.tree.extend(handle, prefix + key, handle.end)
        assert match.length * 4 == max(len(self.matched(namespace, prefix + key)), len(prefix))
        assert self.tree.extend(handle, key).length == match.length
        prompt_len = data.draw(st.none() | st.integers(0, len(prefix + key) // 4))
        self.step += 1
        slots = self.take(key)
        node, present = self.tree.insert(key, slots, below=handle, step=self.step, prompt_len=prompt_len, priority=priority)
        assert present == self.model_insert(namespace, prefix, key, slots, self.step, prompt_len, priority)
        assert self.tree.move_lock(handle, node) is node
        whole = self.text(node)
        for up in self.prefixes(whole)[len(self.prefixes(prefix)) :]:
            self.pages[namespace, up].locks += 1
        self.handles[i] = (node, namespace, whole)

    @rule(tokens=st.integers(0, 60))
    def evict(self, tokens):
        expected = self.victims(tokens)
        gone = self.tree.evict(tokens).tolist()
        assert gone == expected
        self.forget(gone)

    @precondition(lambda self: self.step)
    @rule(back=st.integers(0, 5))
    def remove_step(self, back):
        step = max(self.step - back, 1)
        first = [key for key, record in self.pages.items() if record.step == step]
        doomed = {(namespace, text) for namespace, text in self.pages
                  if any(namespace == other and text.startswith(prefix) for other, prefix in first)}
        if any(self.pages[key].locks for key in doomed):
            try:
                self.tree.remove_step(step)
                raise AssertionError("a locked node was taken back")
            except RuntimeError:
                return
        gone = self.tree.remove_step(step).tolist()
        assert sorted(gone) == sorted(slot for key in doomed for slot in self.pages[key].slots.tolist())
        self.forget(gone)

    @rule()
    def reset(self):
        if any(record.locks for record in self.pages.values()):
            return
        assert sorted(self.tree.reset()) == sorted(slot for record in self.pages.values() for slot in record.slots.tolist())
        self.pages = {}
        self.handles = [handle for handle in self.handles if handle[0].is_root]

    # -- those that wait --

    @rule(namespace=NAMESPACES, symbols=PAGES, tail_len=st.integers(0, 15), early=st.booleans())
    def wait(self, namespace, symbols, tail_len, early):
        key = self.key(symbols, tail_len)
        self.arrivals = getattr(self, "arrivals", 0) + 1
        waiter = self.tree.wait(key, namespace, -self.arrivals if early else self.arrivals, key)  # early: one that waited before
        whole = key[: len(key) - len(key) % (4 * self.page_size)]
        assert self.text(waiter.node) == whole
        self.waiting.append((waiter, namespace, whole))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        self.tree.leave(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))[0])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def lead(self, data):
        one = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.tree.lead(one[0])
        self.leading.append(one)

    @precondition(lambda self: self.leading)
    @rule(data=st.data(), pages=st.integers(0, 4), priority=PRIORITIES)
    def compute(self, data, pages, priority):
        """A leader's next pages get their KV; others may have been faster with some."""
        leader, namespace, whole = data.draw(st.sampled_from(self.leading))
        key = whole[: len(self.matched(namespace, whole)) + 4 * self.page_size * pages]
        self.step += 1
        slots = self.take(key)
        _, present = self.tree.insert(key, slots, namespace=namespace, step=self.step, priority=priority)
        assert present == self.model_insert(namespace, b"", key, slots, self.step, None, priority)
        self.tree.advance(leader)

    @precondition(lambda self: self.leading)
    @rule(data=st.data(), priority=PRIORITIES)
    def compute_all(self, data, priority):
        """A launch computes all that a leader lacks, whose handle moves along."""
        one = leader, namespace, whole = data.draw(st.sampled_from(self.leading))
        prefix = self.matched(namespace, whole)
        handle = self.tree.lock(self.tree.parking(leader.node), priority=priority)
        self.model_lock(namespace, prefix, priority)
        rest = whole[len(prefix):]
        self.step += 1
        slots = self.take(rest)
        if not rest:
            with pytest.raises(ValueError, match="0 slots below"):
                self.tree.compute(leader, handle, slots, step=self.step)
        else:
            assert self.tree.compute(leader, handle, slots, step=self.step, priority=priority) is leader.node
            assert self.model_insert(namespace, prefix, rest, slots, self.step, None, priority) == 0
            for up in self.prefixes(whole)[len(self.prefixes(prefix)):]:
                self.pages[namespace, up].locks += 1
            self.leading.remove(one)
        assert self.text(leader.node) == whole
        self.handles.append((leader.node, namespace, whole))

    @precondition(lambda self: self.leading)
    @rule(data=st.data())
    def stop_leading(self, data):
        self.tree.stop_leading(self.leading.pop(data.draw(st.integers(0, len(self.leading) - 1)))[0])

    @rule(weighed=st.booleans())
    def pick(self, weighed):
        """The pick has the longest match of all that need not wait for a leader; who must is worked out from the keys."""
        for leader, _, _ in self.leading:
            self.tree.advance(leader)
        match = {waiter: len(self.matched(namespace, whole)) for waiter, namespace, whole in self.waiting}
        free = []
        for waiter, namespace, whole in self.waiting:
            ahead = [len(os.path.commonprefix([whole, theirs])) for _, other, theirs in self.leading if other == namespace]
            ahead = max((n - n % (4 * self.page_size) for n in ahead), default=0)
            waits = ahead - match[waiter] >= 4 * waiting.WAIT_FOR_LEADER
            assert self.tree.is_blocked(waiter) is waits
            assert self.tree.parking(waiter.node).end * 4 == match[waiter]
            free += [waiter] * (not waits)
        best = max(free, key=lambda w: (match[w], -w.arrival), default=None)
        assert self.tree.longest() is best
        picked = self.tree.heaviest() if weighed else best
        assert (picked is None) is (best is None)
        if picked is not None:
            node = self.tree.parking(picked.node)
            assert picked is min((w for w in free if self.tree.parking(w.node) is node), key=lambda w: w.arrival)
            assert not weighed or not any(node in self.tree.parking(w.node).path()[:-1] for w in free), "not depth first"
            self.waiting = [one for one in self.waiting if one[0] is not picked]
            self.tree.leave(picked)

    # -- what always holds --

    @invariant()
    def tree_and_model_agree(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        pages = {}
        for node in self.tree.walk():
            above = self.text(node.parent)
            for prefix, slots in zip(self.prefixes(node.key, above), node.slots.reshape(-1, self.page_size)):
                pages[node.namespace, prefix] = slots.tolist()
                record = self.pages[node.namespace, prefix]
                seen = (node.hits, node.locks, node.priority, node.step)
                assert seen == (record.hits, record.locks, record.priority, record.step), (node, prefix)
        assert pages == {prefix: record.slots.tolist() for prefix, record in self.pages.items()}
        locked = [record.locks > 0 for record in self.pages.values()]
        assert self.tree.protected == sum(locked) * self.page_size
        assert self.tree.total == len(locked) * self.page_size
        for handle, namespace, prefix in self.handles:
            assert self.text(handle) == prefix and handle.namespace == namespace
            expected = [self.pages[namespace, up].slots for up in self.prefixes(prefix)]
            assert self.tree.slots(handle).tolist() == [slot for slots in expected for slot in slots.tolist()]

    def teardown(self):
        if not hasattr(self, "tree"):
            return
        while self.handles:
            self.unlock_at(0)
        for waiter, _, _ in self.waiting:
            self.tree.leave(waiter)
        for leader, _, _ in self.leading:
            self.tree.stop_leading(leader)
        waiting.WAIT_FOR_LEADER = radix.WAIT_FOR_LEADER = self.before
        everything = self.victims(10**9)
        assert self.tree.evict(10**9).tolist() == everything
        assert (self.tree.total, self.tree.roots) == (0, {})
        self.tree.check()


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
