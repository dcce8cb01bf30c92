"""Events: which blocks of KV the cache holds, told to whoever routes requests to engines.

A router that knows what each engine has cached sends a request where most of its prompt is. It cannot look into the engines' trees, so each
engine tells it what changes there, in SGLang's words. A *block* is one page of tokens:

    Tree --stored(node), removed(node), cleared()--> KVEvents --flush, once a step--> Ring --+--> since(seq), iteration     in this process
                                                                                             +--> Publisher: ZeroMQ         elsewhere

  hash     A block is named by an int64: the first 8 bytes of SHA-256(digest of the block before it + its tokens as int32). The chain begins
           with the digest of the namespace (of nothing, for the empty one). So a hash stands for all tokens up to its block, in one namespace,
           and it does not matter into which nodes the tree has cut them.
  batch    the events of one step, in their order, as one message with a sequence number: [seconds since 1970, [event, ...]] in msgpack. An
           event is an array that begins with its name: BlockStored, BlockRemoved or AllBlocksCleared. Parents are stored before their
           children and removed after them.
  ring     the last batches, encoded, `RING_BYTES` of them at most. Who asks for older ones learns how many batches are lost.
  publish  frames (topic, sequence number as 8 bytes big-endian, batch) at a PUB socket. Who sees a gap in the numbers sends the first number it
           lacks to the replay socket (a ROUTER), and gets (number, batch) for each that the ring still has, then (-1, nothing). A number that
           goes back means a new engine: forget all that the old one had.

Digests are kept by page of the pool, for a token's slot stays the same while nodes are split: a split needs no event.

Invariants. What was stored and not removed since is exactly what hangs in the tree with KV, and a page has a digest here as long as it is in
the tree. Only the engine's thread writes; `since` may be called from any.

Cost. Where it is off: one `is not None` a node and a step. Else some 15 us a stored node, 6 a removed one, and the hashes: about 1 us a block
(`python -m nano_sgl.events` measures it), so 1.1 s a million fresh tokens at page 1 and 0.05 s at page 16: with events, take larger pages. Some
200 bytes a page of the pool.

Where it stops holding. A block is announced when the step that computes it is launched, and removed if that fails. There is no snapshot: who
has lost batches forgets all it knew, and learns of a block that is still there only when it is removed.

Source: the events and the replay are vLLM's and SGLang's (2025), the chain of block hashes vLLM's (2024).
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from .radix import TOKEN_BYTES, Node, Tree

log = logging.getLogger("nano_sgl")

RING_BYTES = 64 << 20
UNSENT_BATCHES = 10_000  # a subscriber that is further behind misses some, and sees that by their numbers
LAST_NUMBER = 2**62  # there will never be as many
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


# ------------------------------------------------------------------------------------------------------------------------- events

class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """KV of consecutive blocks is there now. `token_ids` are those of all blocks, `block_size` each; the parent is the block before the
    first, None at the beginning of a sequence. `cache_salt` is the whole namespace, None for the empty one; `lora_id` is never set."""
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    cache_salt: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """KV of these blocks is no longer there."""
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """No block is there any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """One message: when (seconds since 1970), and what happened, in its order."""
    ts: float
    events: list[Event]


class Batch(NamedTuple):
    """A batch as a reader gets it. `lost`: so many batches between what was asked for and this one have left the ring."""
    seq: int
    ts: float
    events: list[Event]
    lost: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EventBatch).decode


# --------------------------------------------------------------------------------------------------------------------------- ring

class Ring:
    """The last messages, numbered from 0: as many as fit into `capacity` bytes, and at least one. For any thread."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.first = 0                   # number of the oldest message that is left
        self.closed = False
        self._messages: collections.deque[bytes] = collections.deque()
        self._size = 0
        self._news = threading.Condition()

    def append(self, message: bytes) -> int:
        """Add a message; returns its number."""
        with self._news:
            self._messages.append(message)
            self._size += len(message)
            while self._size > self.capacity and len(self._messages) > 1:
                self._size -= len(self._messages.popleft())
                self.first += 1
            self._news.notify_all()
            return self.first + len(self._messages) - 1

    def since(self, seq: int, timeout: float | None = 0.0) -> list[tuple[int, bytes]]:
        """What is left of the messages `seq` and later, with their numbers. Where there is none yet, it is waited for `timeout` seconds
        (None: until `close`)."""
        with self._news:
            self._news.wait_for(lambda: self.closed or self.first + len(self._messages) > seq, timeout)
            start = max(seq, self.first)
            return list(enumerate(itertools.islice(self._messages, start - self.first, None), start))

    def close(self) -> None:
        """Nobody shall wait any more."""
        with self._news:
            self.closed = True
            self._news.notify_all()


# ---------------------------------------------------------------------------------------------------------------------- publisher

class Publisher:
    """Sends a ring's messages to ZeroMQ subscribers, and what they missed to those that ask. ValueError where an address cannot be had."""

    def __init__(self, ring: Ring, endpoint: str, replay_endpoint: str | None = None, topic: str = ""):
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(UNSENT_BATCHES)
        try:
            self.endpoint, self.replay_endpoint = _bind(self._pub, endpoint), None
            if replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.set_hwm(0)
                self.replay_endpoint = _bind(replay, replay_endpoint)
                threading.Thread(target=_replay, args=(ring, replay), name="nano_sgl replay", daemon=True).start()
        except ValueError:
            self._context.destroy(linger=0)
            raise
        log.info("KV events are published at %s%s", self.endpoint, f", replayed at {self.replay_endpoint}" if self.replay_endpoint else "")

    def send(self, seq: int, message: bytes) -> None:
        """Hand a message to the sockets' own thread. Never waits for a subscriber."""
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), message))

    def close(self) -> None:
        """Give the addresses back; what has not been sent is dropped."""
        self._pub.close(linger=0)
        self._context.term()  # `_replay` ends, and closes its socket


def _bind(sock: zmq.Socket, endpoint: str) -> str:
    """Listen at an address; the address in full, where a port of 0 or * was given."""
    try:
        sock.linger = 0
        sock.bind(endpoint)
        return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    except zmq.ZMQError as error:
        raise ValueError(f"KV events cannot be published at {endpoint!r}: {error.strerror}") from None


def _replay(ring: Ring, sock: zmq.Socket) -> None:
    """Answer subscribers until the context ends. A request is [who, b"", number]; a subscriber's REQ or DEALER socket adds the rest."""
    with sock, contextlib.suppress(zmq.ContextTerminated):
        while True:
            *route, start = sock.recv_multipart()
            if len(start) != 8:
                log.warning("a replay of KV events was asked for with %d bytes, expected a sequence number of 8", len(start))
                continue
            for seq, message in ring.since(min(int.from_bytes(start, "big"), LAST_NUMBER)):
                sock.send_multipart((*route, seq.to_bytes(8, "big"), message))
            sock.send_multipart((*route, END_OF_REPLAY, b""))


# ------------------------------------------------------------------------------------------------------------------ the tree's ear

class KVEvents:
    """What a tree calls when KV comes and goes, and where others read it. `medium` says in which memory the KV is: GPU or CPU.

    `endpoint`: the address of a `Publisher`, none by default. Iterating yields each `Batch` from the oldest one left, and waits for the next,
    until `close`.
    """

    def __init__(self, page_size: int, medium: str = "GPU", *, endpoint: str | None = None, replay_endpoint: str | None = None,
                 topic: str = "", ring_bytes: int = RING_BYTES):
        self.page_size, self.medium = page_size, medium
        self.ring = Ring(ring_bytes)
        self.publisher = Publisher(self.ring, endpoint, replay_endpoint, topic) if endpoint is not None else None
        self._digests: dict[int, bytes] = {}  # by page of the pool: those in the tree
        self._pending: list[Event] = []

    # -- the tree calls --

    def stored(self, node: Node) -> None:
        """A node has slots for its KV, and so has its parent."""
        known, digest, parent = self._digests, _root_digest(node.namespace), None
        if node.start:
            digest = known[int(node.parent.slots[-1]) // self.page_size]
            [parent] = _names([digest])
        digests, key, size = [], node.key, self.page_size * TOKEN_BYTES
        for page, at in zip(self._pages(node), range(0, len(key), size)):
            digest = known[page] = hashlib.sha256(digest + key[at : at + size]).digest()
            digests.append(digest)
        tokens = np.frombuffer(key, np.int32).tolist()
        self._pending.append(BlockStored(_names(digests), parent, tokens, self.page_size, None, self.medium, node.namespace or None))

    def removed(self, node: Node) -> None:
        """A node is about to lose its slots; its children have lost theirs."""
        self._pending.append(BlockRemoved(_names([self._digests.pop(page) for page in self._pages(node)]), self.medium))

    def cleared(self) -> None:
        """The tree is empty: what else this step has to say is of no interest any more."""
        self._digests.clear()
        self._pending = [AllBlocksCleared()]

    def _pages(self, node: Node) -> list[int]:
        return (node.slots[:: self.page_size] // self.page_size).tolist()

    # -- the engine calls --

    def flush(self) -> None:
        """What has happened since the last time becomes a batch, if it is anything."""
        if self._pending:
            message = encode(EventBatch(time.time(), self._pending))
            self._pending = []
            seq = self.ring.append(message)
            if self.publisher is not None:
                self.publisher.send(seq, message)

    def close(self) -> None:
        """No more events: iterators end, addresses are given back. What the ring has can still be read."""
        self.ring.close()
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    # -- readers call --

    def since(self, seq: int = 0, timeout: float | None = 0.0) -> list[Batch]:
        """The batches from number `seq` on that are left, the first with how many are not. As `Ring.since` otherwise."""
        batches = []
        for number, message in self.ring.since(seq, timeout):
            said = decode(message)
            batches.append(Batch(number, said.ts, said.events, 0 if batches else number - seq))
        return batches

    def __iter__(self) -> Iterator[Batch]:
        seq = 0
        while batches := self.since(seq, timeout=None):
            yield from batches
            seq = batches[-1].seq + 1


def _root_digest(namespace: str) -> bytes:
    """What the chain of a namespace begins with."""
    return hashlib.sha256(namespace.encode()).digest() if namespace else b""


def _names(digests: list[bytes]) -> list[int]:
    """The block hashes: of each digest the first 8 bytes."""
    return np.frombuffer(b"".join(digests), ">i8")[::4].tolist()


def _demo() -> None:
    """Two chats in a tree of six blocks, an eviction; then what the hashes cost."""
    events = KVEvents(page_size=2, medium="CPU")
    tree = Tree(2, events=events)
    for ids, slots in (([1, 2, 3, 4, 5, 6], range(2, 8)), ([1, 2, 3, 4, 7, 8], range(8, 14))):
        tree.insert(ids, list(slots))
        events.flush()
    tree.evict(2)
    events.flush()
    for batch in events.since():
        for event in batch.events:
            print(f"{batch.seq}: {event}")
    ids = np.arange(1 << 14, dtype=np.int32)
    for page_size in (1, 16):
        seconds = []
        for _ in range(20):
            events = KVEvents(page_size)
            tree = Tree(page_size, events=events)
            start = time.perf_counter()
            tree.insert(ids, ids)
            events.flush()
            seconds.append(time.perf_counter() - start)
        a_token = min(seconds) / len(ids)
        print(f"page {page_size}: {a_token * page_size * 1e6:.2f} us a block, {a_token * 1e9:.0f} ms a million tokens")


if __name__ == "__main__":
    _demo()
