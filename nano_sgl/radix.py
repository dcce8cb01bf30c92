"""Radix: the one tree that remembers which token prefixes have their KV in memory.

Requests that begin alike need the keys and values of the common beginning once. A hash map of blocks can find them; a tree also
knows what lies *below* a prefix: who shares it, where two requests part, what may be evicted. An edge carries a span of tokens:

    root --"You are a helpful assistant."--+--"Hello!"--"Hi!"--"Tell me a joke."      chat 1
                                           +--"What is 2 + 2?"--"4"                   chat 2

Names. A *key* is a token sequence, held as the bytes of its int32 ids, so that comparing spans is one memcmp. A *node* owns one
span: its key and its *slots*, one KV slot a token. Spans are whole *pages*; a node's children are a dict over the bytes of their
first page. A *match* says how far a key is cached; it may end inside a node, and matching changes nothing. To *lock* a match
makes a *handle* of it: the node is split where the match ends, and nothing from there up to the root is evicted until `unlock`.
*Namespaces* are separate roots and share nothing. `step` is the launch that computes a node's KV: if it fails, the node goes.

A *ghost* is a node without slots: tokens that somebody wants and nobody has computed. Waiting requests hang in the tree as ghosts
(waiting.py), so that the order in which they should start follows from the tree's own changes.

Invariants. `node.locks == node.holds + sum(child.locks)`: a locked node is not recent but ineligible, and so is all above it.
What is unlocked is a union of whole subtrees, so there is an unlocked leaf while `evictable > 0`. No slot is in two nodes.
Below a ghost are ghosts, and each is wanted. `check` proves all of it by counting again.

Eviction (eviction.py) takes whole leaves, then the parents that became leaves. An evicted node that is wanted becomes a ghost.

Cost. match, insert, wait: a dict look-up and a memcmp a node, one vector compare where the key parts from the tree. lock, unlock:
the nodes of the path. evict: O(1) a victim, O(log n) with a heap. Only `check`, `walk`, `remove_step` and `reset` visit every node.

Where it stops holding: nothing is merged again, so inserting an output token by token makes a node a token: insert runs. Not
thread-safe. No tensors: slot numbers go in, and the ones that nobody needs any more come out. Tiers (host, disk) will be other
values of where a node's span lives; components (window KV, recurrent state) will be further slots of a node with a rule of their
own for what counts as a match. Requests park by full attention then, and the rule is applied to the one that is picked, alone;
a component's lock is a receipt by token position, for a split moves nodes, never positions.

After SGLang's RadixAttention (Zheng et al. 2024, section 3); the radix tree is Morrison's (1968).
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .eviction import EVICTION, Heap, Order
from .waiting import WAIT_FOR_LEADER, Waiter, Waiting

MAX_PAGE_SIZE = 64
TOKEN_BYTES = 4  # an int32 id
NO_SLOTS = np.empty(0, np.int32)

Key = bytes | np.ndarray | Sequence[int]


class Node:
    """One span of tokens and the slots of its KV. The tree alone writes it, everybody may read it.

    `key` bytes of int32, `slots` int32 [end - start]; `start`, `end` depth in tokens before and after the span; `locks` handles
    at or below this node, `holds` handles exactly here; `hits` requests that used it; `step` the launch that computes it, 0 if it
    is there. In the tree's clock: `born` and last `used`. `before`, `after`, `ticket` belong to the eviction order. A node that
    has left the tree has no `parent`. `kids` children with slots.

    Of those that wait: `slots` is None of a ghost; `waiters` at or below; `first` the earliest of those parked here, of a ghost at
    or below, None where it is blocked; `line` a heap (arrival, tick, waiter, ghost below) to know it by; `leaders` requests that
    will compute this ghost; `blocked`: they will compute so much of it that whoever wants it waits. `heavy` a heap (-waiters, tick,
    child with slots), kept where the tree `weighs`. Entries that no longer hold are thrown out when they come up.
    """

    __slots__ = ("parent", "children", "key", "slots", "start", "end", "namespace", "locks", "holds", "hits", "priority", "step",
                 "born", "used", "before", "after", "ticket", "kids", "waiters", "first", "line", "leaders", "blocked", "heavy")

    def __init__(self, parent: Node | None, key: bytes, namespace: str):
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.key, self.namespace = key, namespace
        self.slots, self.start = (None, parent.end) if parent is not None else (NO_SLOTS, 0)
        self.end = self.start + len(key) // TOKEN_BYTES
        self.locks = self.holds = self.hits = self.step = self.born = self.used = self.ticket = self.kids = self.waiters = self.leaders = 0
        self.priority = sys.maxsize  # a root's: nothing raises it
        self.before = self.after = self.first = None
        self.line: Sequence[tuple[int, int, Waiter, Node | None]] = ()  # a list once it is needed, as below
        self.heavy: Sequence[tuple[int, int, Node]] = ()
        self.blocked = False

    def __repr__(self) -> str:
        kind = "Ghost" if self.is_ghost else "Node"
        return f"{kind}([{self.start}, {self.end}), locks={self.locks}, hits={self.hits}, waiters={self.waiters}, children={len(self.children)})"

    @property
    def is_root(self) -> bool:
        return not self.key

    @property
    def is_ghost(self) -> bool:
        return self.slots is None

    @property
    def tokens(self) -> np.ndarray:
        """The span's token ids, int32 [end - start], read-only."""
        return np.frombuffer(self.key, np.int32)

    def path(self) -> list[Node]:
        """The nodes from the topmost down to this one, without the root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Match(NamedTuple):
    """How much of a key is cached: `length` tokens, in whole pages. The last of them lies in `node`, at its end or before."""

    node: Node
    length: int


class Inserted(NamedTuple):
    """`node` ends with the key's last whole page; the first `present` tokens of the key had been in the tree before."""

    node: Node
    present: int


class Tree(Waiting):
    """The prefixes whose KV is in memory, and those that are wanted. `total` counts the tokens, hence slots, that the tree owns,
    `evictable` those that no lock keeps. `events`: told of KV that comes and goes (events.py). `weighs`: whether `heaviest` will be asked."""

    def __init__(self, page_size: int = 1, policy: str = "lru", events: object | None = None, weighs: bool = False):
        if type(page_size) is not int or not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {page_size!r}, expected an integer from 1 to {MAX_PAGE_SIZE}")
        if policy not in EVICTION:
            raise ValueError(f"eviction policy {policy!r} is unknown, expected one of {', '.join(sorted(EVICTION))}")
        self.page_size, self.policy, self.events, self.weighs = page_size, policy, events, weighs
        self._page = page_size * TOKEN_BYTES
        self.roots: dict[str, Node] = {}  # only those in use: a salt that was used once leaves nothing behind
        self.total = self.evictable = self.clock = 0
        rule = EVICTION[self.policy]
        self.order: Order = rule() if isinstance(rule, type) else Heap(rule)
        super().__init__(Node(None, b"", ""))

    @property
    def protected(self) -> int:
        """Tokens that a lock keeps."""
        return self.total - self.evictable

    def root(self, namespace: str = "") -> Node:
        """The handle of the empty prefix: always valid, and needs no lock."""
        root = self.roots.get(namespace)
        return root if root is not None else Node(None, b"", namespace)

    # -- looking up --

    def match(self, key: Key, namespace: str = "", limit: int | None = None) -> Match:
        """The longest cached prefix of `key`, of its first `limit` tokens at most. Changes nothing, recency included.

        The answer is good until something is evicted or taken back: `lock` it to keep it. A key that is matched again and again
        is best given as `key_bytes(ids)`, converted once.
        """
        root = self.roots.get(namespace)
        if root is None:
            return Match(self.root(namespace), 0)
        key = key_bytes(key)
        node, at = self._descend(root, key, 0, self._whole_pages(len(key), limit))
        return Match(node, at // TOKEN_BYTES)

    def extend(self, node: Node, key: Key, offset: int = 0, limit: int | None = None) -> Match:
        """Goes on below `node` with key[offset:], `limit` tokens of it at most. The match's `length` counts from the root."""
        self._refuse_gone(node)
        if node.is_root:
            node = self.root(node.namespace)
        key, first, origin = key_bytes(key), offset * TOKEN_BYTES, node.end - offset
        node, at = self._descend(node, key, first, first + self._whole_pages(len(key) - first, limit))
        return Match(node, origin + at // TOKEN_BYTES)

    def _whole_pages(self, size: int, limit: int | None = None) -> int:
        """Bytes of the whole pages among `size` bytes, or among their first `limit` tokens."""
        if limit is not None:
            size = max(min(size, limit * TOKEN_BYTES), 0)
        return size - size % self._page

    def _descend(self, node: Node, key: bytes, at: int, end: int) -> tuple[Node, int]:
        """Follows key[at:end] (byte offsets, whole pages) down from `node`: the deepest node reached and where the match ends."""
        page = self._page
        while at < end:
            child = node.children.get(key[at : at + page])
            if child is None or child.slots is None:
                break
            node, span = child, child.key
            stop = at + len(span)
            if stop > end or not key.startswith(span, at):
                return node, at + self._common(span, key, at, end)
            at = stop
        return node, at

    def _common(self, span: bytes, key: bytes, at: int, end: int) -> int:
        """Bytes, in whole pages, that `span` and key[at:end] have in common: the first page, but not all of the span."""
        count = min(len(span), end - at) // TOKEN_BYTES
        differ = np.frombuffer(span, np.int32, count) != np.frombuffer(key, np.int32, count, at)
        same = int(differ.argmax()) or count  # the first token is equal, so 0 means that none differs
        return (same - same % self.page_size) * TOKEN_BYTES

    def slots(self, node: Node, start: int = 0) -> np.ndarray:
        """The slots of the tokens [start, node.end) on the path to `node`: a fresh int32 array."""
        self._refuse_gone(node)
        parts = []
        while node.end > start:
            parts.append(node.slots)
            node = node.parent
        return join(parts[::-1])[start - node.end :]

    # -- locking --

    def lock(self, at: Match | Node, *, counted_len: int = 0, priority: int = 0) -> Node:
        """Protects the path to a match or node from eviction; returns the handle to `unlock`. Splits the node the match ends in.

        `counted_len`: so many tokens from the root on were used by the same request before; their nodes get no second hit.
        `priority` is the request's: what it uses as a prompt becomes worth what a prompt of that priority is.
        """
        node = at if isinstance(at, Node) else at.node
        self._refuse_gone(node)
        if node is not at:
            node = self._end_at(node, at.length)
        if node.parent is None:
            return node
        node.holds += 1
        if node.priority <= priority:
            self._raise(node, priority + 1)
        chain, handle, up = [], node, node.parent
        while up is not None:
            if not node.locks:
                chain.append(node)
            node.locks += 1
            if node.start >= counted_len:
                node.hits += 1
            node, up = up, up.parent
        if chain:  # the lower end of the path: above a locked node all are locked
            self.evictable -= handle.end - chain[-1].start
            self.order.lock(chain)
        return handle

    def unlock(self, node: Node) -> None:
        """Gives one `lock` back. What nobody else holds becomes evictable, as the most recently used."""
        if not node.holds:
            if node.is_root:
                return
            raise ValueError(f"{node} is not locked: every handle is unlocked exactly once")
        node.holds -= 1
        self.clock += 1
        chain, clock, handle, up = [], self.clock, node, node.parent
        while up is not None:
            node.locks -= 1
            if not node.locks:
                node.used = clock
                chain.append(node)
            node, up = up, up.parent
        if chain:
            self.evictable += handle.end - chain[-1].start
            self.order.touch(chain)

    def move_lock(self, old: Node, new: Node) -> Node:
        """Moves a handle from `old` down to `new`, at or below it; returns `new`. Costs the nodes between and counts no hit."""
        self._refuse_gone(new)
        if not old.holds and not old.is_root:
            raise ValueError(f"{old} is not locked: only a handle can be moved")
        between, node = [], new
        while node is not old and node.parent is not None:
            between.append(node)
            node = node.parent
        if node is not old and not (old.is_root and old.namespace == node.namespace):
            raise ValueError(f"{new} is not below {old}: lock the one and unlock the other")
        chain = []
        for node in between:
            if not node.locks:
                chain.append(node)
            node.locks += 1
        if between:
            old.holds -= old.holds > 0  # a root has none
            new.holds += 1
        if chain:
            self.evictable -= new.end - chain[-1].start
            self.order.lock(chain)
        return new

    def _end_at(self, node: Node, depth: int) -> Node:
        """The node on the path to `node` that ends at `depth` tokens, made by a split if there is none."""
        while node.start >= depth and node.parent is not None:  # split since it was matched, or the match was cut short
            node = node.parent
        return node if node.end <= depth else self._split(node, depth - node.start)

    def _refuse_gone(self, node: Node) -> None:
        if node.parent is None and node.key:
            raise ValueError(f"{node} has left the tree: match again, and lock a match before anything is evicted or taken back")

    def _raise(self, node: Node, priority: int) -> None:
        """A path is worth as much as its end; above a node that is worth enough, all are."""
        while node.priority < priority:
            node.priority = priority
            node = node.parent

    # -- growing --

    def insert(self, key: Key, slots: np.ndarray | Sequence[int], *, below: Node | None = None, namespace: str = "",
               step: int = 0, prompt_len: int | None = None, priority: int = 0, counted_len: int = 0) -> Inserted:
        """Hangs `key` with the `slots` of its KV, one a token, below a node or below the namespace's root. Locks nothing.

        Whole pages are taken. slots[present : node.end - below.end] now belong to the tree; the slots of the `present` tokens are
        duplicates, and they and the tail that fills no page stay the caller's. An int32 array is handed over, not copied: it must
        not change any more. `step` is the launch that computes the KV. Tokens
        from depth `prompt_len` on (None: none) are output. A node ends where they begin, so that the output, hanging below, goes
        before the prompt, and under the policy `priority` before other prompts too. `counted_len` is as in `lock`.
        """
        key, slots = key_bytes(key), np.asarray(slots, np.int32)
        size = len(key)
        if len(slots) * TOKEN_BYTES != size:
            raise ValueError(f"{len(slots)} slots for {size // TOKEN_BYTES} tokens were given, expected one slot a token")
        if below is not None and namespace and namespace != below.namespace:
            raise ValueError(f"a node of namespace {below.namespace!r} was given with namespace {namespace!r}")
        node, end = below if below is not None else self.root(namespace), size - size % self._page
        self._refuse_gone(node)
        if not end:
            return Inserted(node, 0)
        if self.page_size > 1 and slots[0] % self.page_size:
            raise ValueError(f"slot {slots[0]} begins no page of {self.page_size}: a page's slots are aligned and consecutive")
        if node.parent is None:
            node = self.roots.setdefault(node.namespace, node)
        within = prompt_len is None or (prompt_len - node.end) * TOKEN_BYTES >= end
        cut = end if within else self._whole_pages(end, prompt_len - node.end)
        if node.priority < priority + (cut > 0):
            self._raise(node, priority + (cut > 0))
        at = present = 0
        while at < end:
            stop, worth = (cut, priority + 1) if at < cut else (end, priority)
            node = self._child(node, key, at, stop)
            if node.slots is None:
                first, at = at // TOKEN_BYTES, at + len(node.key)
                self._fill(node, slots[first : at // TOKEN_BYTES], step, worth)
            else:
                at += len(node.key)
                present += node.end - node.start
                node.hits += node.start >= counted_len
                node.priority = max(node.priority, worth)
        self._touch(node)
        return tuple.__new__(Inserted, (node, present))  # Inserted(node, present), in half the time

    def _child(self, node: Node, key: bytes, at: int, end: int) -> Node:
        """The child of `node` that goes on with key[at:end] (byte offsets): as much of one as agrees, split off if need be, or a new ghost."""
        page = key[at : at + self._page]
        child = node.children.get(page)
        if child is None:
            node.children[page] = child = Node(node, key[at:end], node.namespace)
        elif at + len(child.key) > end or child.key is not key and not key.startswith(child.key, at):
            child = self._split(child, self._common(child.key, key, at, end) // TOKEN_BYTES)
        return child

    def compute(self, leader: Waiter, handle: Node, slots: np.ndarray, *, step: int, priority: int = 0) -> Node:
        """A launch computes all that its leader still lacks: `insert` of a prompt, `move_lock` and `stop_leading` in one, at a part of the cost.

        Its ghosts get the `slots`, int32 [leader.node.end - handle.end], which are handed over. The handle, which ends where they begin, moves to
        `leader.node`; returns that.
        """
        node, ghosts, worth = leader.node, [], priority + 1
        while node.slots is None:
            ghosts.append(node)
            node = node.parent
        if node is not handle or not (handle.holds or handle.is_root) or not ghosts or len(slots) != leader.node.end - handle.end:
            raise ValueError(f"{len(slots)} slots below {handle} were given for {leader.node}, expected the locked end of what is cached of it, "
                             "and a slot for each token of the rest")
        if handle.priority < worth:
            self._raise(handle, worth)
        for ghost in reversed(ghosts):
            self._fill(ghost, slots if len(ghosts) == 1 else slots[ghost.start - handle.end:ghost.end - handle.end], step, worth, locks=1)
        handle.holds -= handle.holds > 0  # a root has none
        leader.node.holds += 1
        self.clock += 1
        self.stop_leading(leader)
        return leader.node

    def _fill(self, ghost: Node, slots: np.ndarray, step: int, priority: int, locks: int = 0) -> None:
        """A ghost gets its KV: it is a leaf, and who wants it is parked here."""
        parent, size = ghost.parent, len(slots)
        ghost.slots, ghost.priority, ghost.step = slots, priority, step
        ghost.hits, ghost.born, ghost.blocked = 1, self.clock, False
        parent.kids += 1
        self.total += size
        ghost.locks = locks
        if not locks:
            self.evictable += size
        self.order.add(ghost)
        if self.events is not None:
            self.events.stored(ghost)
        if ghost.waiters:
            self._weigh(ghost)
            self._park_anew(ghost)
            self._refresh(parent)

    def _split(self, node: Node, size: int) -> Node:
        """Cuts a node after `size` tokens. Returns the upper part, which is new; the node becomes the lower, so handles and waiters stay."""
        cut, parent = size * TOKEN_BYTES, node.parent
        upper = Node(parent, node.key[:cut], node.namespace)
        upper.locks, upper.hits, upper.priority, upper.step = node.locks, node.hits, node.priority, node.step
        upper.born, upper.used, upper.waiters, upper.leaders = node.born, node.used, node.waiters, node.leaders
        parent.children[upper.key[: self._page]] = upper
        node.parent, node.start, node.key = upper, upper.end, node.key[cut:]
        upper.children[node.key[: self._page]] = node
        if node.slots is None:
            upper.blocked = node.blocked and upper.end - self.parking(upper).end >= WAIT_FOR_LEADER
            if node.first is not None:
                self._join(upper, node.first, node)
                self._refresh(upper)
        else:
            upper.slots, node.slots, upper.kids = node.slots[:size].copy(), node.slots[size:].copy(), 1
            self.order.split(upper, node)
            if node.waiters:
                self._weigh(node)
                self._weigh(upper)
        return upper

    def _touch(self, node: Node) -> None:
        """Makes the unlocked end of a path the most recently used."""
        self.clock = clock = self.clock + 1
        chain = []
        while not node.locks and node.parent is not None:
            node.used = clock
            chain.append(node)
            node = node.parent
        if chain:
            self.order.touch(chain)

    # -- shrinking --

    def evict(self, tokens: int) -> np.ndarray:
        """Takes out unlocked leaves in the policy's order until `tokens` slots are free or none is left; the slots, int32."""
        parts, rest = [], self.total - tokens
        if tokens > 0:
            for node in self.order.victims():
                parts.append(node.slots)
                self._remove(node)
                if self.total <= rest:
                    break
        return parts[0] if len(parts) == 1 else join(parts)

    def drop(self, node: Node) -> np.ndarray:
        """Takes out a path from its end upwards, as far as nobody locks it and nothing else hangs on it; returns the slots."""
        self._refuse_gone(node)
        parts = []
        while not (node.is_root or node.locks or node.kids):
            parts.append(node.slots)
            leaf, node = node, node.parent
            self._remove(leaf)
        return join(parts)

    def remove_step(self, step: int) -> np.ndarray:
        """Takes back the nodes of a launch that failed and all that hangs below them, whoever put it there; their slots, int32.

        Raises, and changes nothing, if one of them is locked: the requests of the launch and their followers unlock first.
        """
        if step <= 0:
            raise ValueError(f"step is {step}, expected the number of a launch, 1 or more")
        doomed: dict[Node, None] = {}
        for node in self.walk():  # parents come first
            if node.step == step or node.parent in doomed:
                if node.locks:
                    raise RuntimeError(f"step {step} cannot be taken back: {node} is locked")
                doomed[node] = None
        slots = join([node.slots for node in doomed])
        for node in reversed(doomed):
            self._remove(node)
        return slots

    def reset(self) -> np.ndarray:
        """Empties the tree; all its slots, int32. Raises, and changes nothing, while a request holds a lock."""
        if self.protected:
            raise RuntimeError(f"{self.protected} tokens are locked by requests that run: reset the cache when they are done")
        nodes = list(self.walk())
        slots = join([node.slots for node in nodes])
        for node in reversed(nodes):
            self._remove(node)
        if self.events is not None:
            self.events.cleared()
        return slots

    def _remove(self, leaf: Node) -> None:
        """An unlocked leaf loses its KV: it leaves the tree, or stays as a ghost while somebody waits for it."""
        parent, size = leaf.parent, leaf.end - leaf.start
        self.order.remove(leaf)
        self.total -= size
        self.evictable -= size
        parent.kids -= 1
        if self.events is not None:
            self.events.removed(leaf)
        leaf.slots = None
        if leaf.waiters or leaf.leaders:
            leaf.blocked = leaf.leaders > 0 and leaf.end - parent.end >= WAIT_FOR_LEADER
            self._park_anew(leaf)
        else:
            del parent.children[leaf.key[: self._page]]
            leaf.parent = None
        if parent.parent is not None:
            if not parent.kids and not parent.locks:
                self.order.bare(parent)
        elif not parent.children:
            self._prune(parent)

    # -- those that wait --

    def wait(self, key: Key, namespace: str, arrival: int, request: object) -> Waiter:
        """Hangs a request's whole pages in the tree: what is cached of them is found now and followed from now on. Arrivals differ."""
        key = key_bytes(key)
        node, at, end = self.roots.get(namespace), 0, self._whole_pages(len(key))
        if node is None:
            node = self.roots[namespace] = self.root(namespace)
        while at < end:
            node = self._child(node, key, at, end)
            at += len(node.key)
        waiter = Waiter(node, arrival, request)
        self._count(node, 1, 0)
        self._arrive(node, waiter)
        return waiter

    # -- looking at it --

    def walk(self, ghosts: bool = False) -> Iterator[Node]:
        """All nodes with slots, or with the ghosts too, depth first, parents before children."""
        for root in self.roots.values():
            stack = list(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                if ghosts or node.slots is not None:
                    stack.extend(reversed(node.children.values()))
                    yield node

    def check(self) -> None:
        """Audits every counter and link of tree and eviction order; raises AssertionError that names the node at fault."""
        nodes, everything = list(self.walk()), list(self.walk(ghosts=True))
        for namespace, root in self.roots.items():
            empty = root.parent is None and (root.key, root.start, root.end, root.locks, root.holds) == (b"", 0, 0, 0, 0)
            used = root.children or root.waiters or root.leaders
            assert empty and used and root.namespace == namespace, f"the root of {namespace!r} is not one: {root}"
        for node in everything:
            self._check_place(node, node.parent)
        for node in nodes:
            self._check_node(node, node.parent)
        slots, counts = np.unique(join([node.slots for node in nodes]), return_counts=True)
        for slot in slots[counts > 1]:
            raise AssertionError(f"slot {slot} is in {[node for node in nodes if slot in node.slots]}")
        evictable = sum(node.end - node.start for node in nodes if not node.locks)
        protected = sum(node.end - node.start for node in nodes if node.locks)
        assert evictable == self.evictable, f"evictable is {self.evictable}, the nodes say {evictable}"
        assert protected == self.protected, f"protected is {self.protected}, the nodes say {protected}"
        self.order.check(nodes)
        self._check_waiting([*self.roots.values(), *everything])

    def _check_place(self, node: Node, parent: Node) -> None:
        size = node.end - node.start
        assert parent.children.get(node.key[: self._page]) is node, f"{node} is not where its parent looks for it"
        assert parent.namespace == node.namespace, f"{node} is in {node.namespace!r}, its parent in {parent.namespace!r}"
        assert node.start == parent.end and size > 0, f"{node} does not begin where {parent} ends"
        assert len(node.key) == size * TOKEN_BYTES and size % self.page_size == 0, f"{node} has a key of {len(node.key)} bytes"
        if node.slots is None:
            assert node.waiters or node.leaders, f"nobody wants {node}"
            assert not node.locks and not node.kids, f"{node} has no KV, but {node.locks} locks and {node.kids} children that have"

    def _check_node(self, node: Node, parent: Node) -> None:
        size = node.end - node.start
        assert node.slots.dtype == np.int32 and node.slots.shape == (size,), f"{node} has slots of shape {node.slots.shape}"
        pages = node.slots.reshape(-1, self.page_size)
        whole = (pages[:, :1] % self.page_size == 0).all() and (pages - pages[:, :1] == np.arange(self.page_size)).all()
        assert whole, f"the slots of {node} are not whole pages"
        kids = [child for child in node.children.values() if child.slots is not None]
        assert node.kids == len(kids), f"{node}: {node.kids} children with KV are counted"
        assert node.locks == node.holds + sum(child.locks for child in kids), f"{node}: locks do not add up"
        assert node.holds >= 0 and node.hits >= 1, f"{node}: {node.holds} handles, {node.hits} hits"
        assert node.priority <= parent.priority, f"{node}: priority {node.priority} is above its parent's {parent.priority}"
        assert node.born <= self.clock and node.used <= self.clock, f"{node}: born or used in the future"


def draw(tree: Tree, decode: Callable[[list[int]], str] | None = None, width: int = 60) -> str:
    """A tree as text, a node a line, spans cut to `width` characters; `decode` turns token ids into words."""
    lines = []
    for namespace, root in tree.roots.items():
        lines.append(f"root {namespace!r}" if namespace else "root")
        stack = [(child, "") for child in reversed(root.children.values())]
        while stack:
            node, indent = stack.pop()
            last = next(reversed(node.parent.children.values())) is node
            text = decode(node.tokens.tolist()) if decode else " ".join(map(str, node.tokens.tolist()))
            text = text if len(text) <= width else text[: width - 3] + "..."
            facts = [f"{node.end - node.start} tok"] + ["not computed"] * node.is_ghost + [f"{node.waiters} waiting"] * (node.waiters > 0)
            facts += [f"{node.locks} locks"] * (node.locks > 0) + [f"{node.hits} hits"] * (node.hits > 1)
            lines.append(f"{indent}{'`-- ' if last else '|-- '}{text}  ({', '.join(facts)})")
            stack += [(child, indent + ("    " if last else "|   ")) for child in reversed(node.children.values())]
    return "\n".join(lines or ["(empty)"])


def view(tree: Tree, decode: Callable[[list[int]], str], max_nodes: int, width: int) -> dict:
    """A tree as plain data: its `max_nodes` most used nodes (hits, and requests that wait), depth first, with at most `width` characters of each
    one's text. `parent` is an index into `nodes`; `left_out` counts children that are not shown. Costs their siblings a heap entry."""
    ticks, shown, heap = itertools.count(), set(), []

    def offer(nodes: Iterable[Node]) -> None:
        for node in nodes:
            heapq.heappush(heap, (-node.hits - node.waiters, next(ticks), node))

    for root in tree.roots.values():
        offer(root.children.values())
    while heap and len(shown) < max_nodes:
        node = heapq.heappop(heap)[2]
        shown.add(node)
        offer(node.children.values())
    nodes, stack = [], [(node, None) for root in tree.roots.values() for node in root.children.values() if node in shown][::-1]
    while stack:
        node, parent = stack.pop()
        below = [child for child in node.children.values() if child in shown]
        stack += [(child, len(nodes)) for child in reversed(below)]
        text = decode(node.tokens[:width].tolist())
        text = text[:width - 3] + "..." if len(text) > width or node.end - node.start > width else text
        nodes.append({"parent": parent, "namespace": node.namespace, "start": node.start, "tokens": node.end - node.start, "text": text,
                      "where": "ghost" if node.is_ghost else "device", "locks": node.locks, "hits": node.hits, "waiters": node.waiters,
                      "left_out": len(node.children) - len(below)})
    left_out = sum(len(root.children) for root in tree.roots.values()) - sum(node["parent"] is None for node in nodes)
    return {"page_size": tree.page_size, "cached_tokens": tree.total, "locked_tokens": tree.protected,
            "shown_tokens": sum(node["tokens"] for node in nodes if node["where"] == "device"), "left_out": left_out, "nodes": nodes}


def draw_view(view: dict) -> str:
    """What `view` says as a drawing, a line a node."""
    def family(node: dict) -> int | str:
        return node["namespace"] if node["parent"] is None else node["parent"]

    nodes, indents, namespace = view["nodes"], [], None
    last = {family(node): n for n, node in enumerate(nodes)}
    left_out = f"; {view['left_out']} beginnings are left out, a larger max_nodes shows more" if view["left_out"] else ""
    lines = [f"{view['cached_tokens']} tokens cached, {view['locked_tokens']} of them locked, {view['shown_tokens']} shown{left_out}"]
    for n, node in enumerate(nodes):
        if node["parent"] is None and node["namespace"] != namespace:
            namespace = node["namespace"]
            lines.append(f"root {namespace!r}" if namespace else "root")
        facts = [f"{node['tokens']} tok"] + ["not computed"] * (node["where"] == "ghost")
        facts += [f"{node['waiters']} waiting"] * (node["waiters"] > 0) + [f"{node['locks']} locks"] * (node["locks"] > 0)
        facts += [f"{node['hits']} hits"] * (node["hits"] > 1) + [f"{node['left_out']} below left out"] * (node["left_out"] > 0)
        indent, is_last = "" if node["parent"] is None else indents[node["parent"]], last[family(node)] == n
        indents.append(indent + ("    " if is_last else "|   "))
        lines.append(f"{indent}{'`-- ' if is_last else '|-- '}{repr(node['text'])[1:-1]}  ({', '.join(facts)})")
    return "\n".join(lines) + "\n"


def join(parts: list[np.ndarray]) -> np.ndarray:
    """Slots of several nodes in a fresh int32 array."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def common_len(a: bytes, b: bytes) -> int:
    """Tokens with which two keys begin alike."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    return int(differ.argmax()) if differ.any() else n


def key_bytes(key: Key) -> bytes:
    """Token ids as the bytes of int32, which the tree compares. Bytes pass as they are; a list costs some 30 ns a token."""
    if isinstance(key, bytes):
        if len(key) % TOKEN_BYTES:
            raise ValueError(f"a key of {len(key)} bytes was given, expected int32 ids, {TOKEN_BYTES} bytes each")
        return key
    ids = np.asarray(key) if len(key) else np.empty(0, np.int32)
    if ids.dtype != np.int32:
        given, ids = ids, ids.astype(np.int32)
        if given.dtype.kind not in "iu" or (given != ids).any():
            raise ValueError(f"a key of dtype {given.dtype} was given, expected token ids that fit int32")
    if ids.ndim != 1:
        raise ValueError(f"a key of shape {ids.shape} was given, expected one dimension")
    return ids.tobytes()


# -- demo: nine points in the life of a tree, after Figure 3 of the SGLang paper --

POOL_SLOTS = 53
SYSTEM = "You are a helpful assistant."
HELLO = "User: Hello! Assistant: Hi!"
STORY = "User: Tell me a story. Assistant: Once there was a tree whose leaves were tokens and every fork found its own branch."
WHAT = "User: What is SGLang? Assistant: An engine."
WHY = "User: Why a tree? Assistant: Because programs fork and a tree keeps what they have in common."
AT_FIRST = "User: What did I say at first? Assistant: You said hello and I said hi, then a story about a tree I forgot."
SHOTS = "Q: 1+1 A: 2 Q: 2+3 A: 5"
FIGURE_3 = [
    ("the tree is empty", []),
    ("chat 1 begins", [f"{SYSTEM} {HELLO}"]),
    ("chat 1, second turn: the first is a hit", [f"{SYSTEM} {HELLO} {STORY}"]),
    ("chat 2 begins: a split, so that both share the beginning", [f"{SYSTEM} {WHAT}"]),
    ("chat 2, second turn: memory is short, the story goes", [f"{SYSTEM} {WHAT} {WHY}"]),
    ("a few-shot question shares nothing with the chats", [f"{SHOTS} Q: 3+5 A: 8"]),
    ("a batch of such questions shares the examples", [f"{SHOTS} Q: {it}" for it in ("4+4 A: 8", "6*2 A: 12", "7-4 A: 3")]),
    ("chat 1 comes back: chat 2 is least recently used and goes", [f"{SYSTEM} {HELLO} {AT_FIRST}"]),
    ("more answers to 7-4 (self-consistency): the other questions go",
     [f"{SHOTS} Q: 7-4 A: {it}" for it in ("it is 3", "maybe 4", "7-4=3 so 3")]),
]


def replay_figure_3() -> Iterator[tuple[str, int, int, list[str], str]]:
    """Serves the requests one after the other, a word a token; after each of the nine points yields its title, the tokens asked,
    the tokens of them that were hits, the spans that were evicted, and the tree as text."""
    words: list[str] = []
    tree, free = Tree(), np.arange(POOL_SLOTS, dtype=np.int32)

    def encode(text: str) -> np.ndarray:
        words.extend(word for word in dict.fromkeys(text.split()) if word not in words)
        return np.array([words.index(word) for word in text.split()], np.int32)

    def decode(ids: list[int]) -> str:
        return " ".join(words[i] for i in ids)

    for title, requests in FIGURE_3:
        asked_len, hit_len, evicted = 0, 0, []
        for ids in map(encode, requests):
            handle = tree.lock(tree.match(ids))
            fresh_len = len(ids) - handle.end
            if fresh_len > len(free):
                spans = {node: decode(node.tokens.tolist()) for node in tree.walk()}
                free = np.concatenate([free, tree.evict(fresh_len - len(free))])
                evicted += [span for node, span in spans.items() if node.parent is None]
            tree.insert(ids[handle.end :], free[:fresh_len], below=handle)
            tree.unlock(handle)
            asked_len, hit_len, free = asked_len + len(ids), hit_len + handle.end, free[fresh_len:]
        yield title, asked_len, hit_len, evicted, draw(tree, decode)


if __name__ == "__main__":
    print(f"{POOL_SLOTS} slots, a word a token, LRU. As in the paper's figure, a request and its answer go in as one piece.")
    for number, (title, asked_len, hit_len, evicted, picture) in enumerate(replay_figure_3(), start=1):
        print(f"\n({number}) {title}" + f": {hit_len} of {asked_len} tokens hit" * (asked_len > 0))
        for span in evicted:
            print(f"    evicted: {span}")
        print(picture)
