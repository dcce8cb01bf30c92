"""KV events: what a reader makes of them is what the tree holds; the ring, the wire, the publisher, the engine."""

import hashlib
import random
import threading
import time

import engines
import msgspec
import numpy as np
import pytest
import zmq
from nano_sgl.config import EngineConfig
from nano_sgl.engine import Engine
from nano_sgl.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, KVEvents
from nano_sgl.protocol import Request, SamplingParams
from nano_sgl.radix import Tree


def chain(ids, page_size: int, namespace: str = "") -> list[int]:
    """The block hashes of a sequence, as the essay says they are made."""
    digest, found = hashlib.sha256(namespace.encode()).digest() if namespace else b"", []
    for at in range(0, len(ids) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + np.array(ids[at:at + page_size], "<i4").tobytes()).digest()
        found.append(int.from_bytes(digest[:8], "big", signed=True))
    return found


class Router:
    """What somebody knows who sees events only: block hash -> (the one before, tokens, salt)."""

    def __init__(self, events: KVEvents):
        self.events, self.next, self.blocks = events, 0, {}

    def read(self) -> dict:
        self.events.flush()
        for batch in self.events.since(self.next):
            assert batch.seq == self.next and not batch.lost
            self.next += 1
            for event in batch.events:
                self.take(event)
        return self.blocks

    def take(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.blocks[name]
            assert not {before for before, _, _ in self.blocks.values()} & set(event.block_hashes), "a block went before those that follow it"
        else:
            before, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) == size * len(event.block_hashes)
            for n, name in enumerate(event.block_hashes):
                assert name not in self.blocks and (before is None or before in self.blocks), "stored twice, or before its parent"
                self.blocks[name] = (before, tuple(event.token_ids[n * size:(n + 1) * size]), event.cache_salt)
                before = name


def held(tree: Tree) -> dict:
    """The same, out of the tree."""
    blocks, page = {}, tree.page_size
    for node in tree.walk():
        ids = np.concatenate([above.tokens for above in node.path()]).tolist()
        names = [None, *chain(ids, page, node.namespace)]
        for at in range(node.start // page, node.end // page):
            blocks[names[at + 1]] = (names[at], tuple(ids[at * page:(at + 1) * page]), node.namespace or None)
    return blocks


class Pool:
    """Slots for a tree's inserts, whole pages of them, in no order."""

    def __init__(self, pages: int, page_size: int, rng: random.Random):
        self.page, self.free = page_size, list(range(1, pages))
        rng.shuffle(self.free)

    def take(self, tokens: int) -> np.ndarray:
        pages = [self.free.pop() for _ in range(tokens // self.page)]
        return (np.repeat(pages, self.page) * self.page + np.tile(np.arange(self.page), len(pages))).astype(np.int32)

    def give(self, slots: np.ndarray) -> None:
        self.free += (slots[::self.page] // self.page).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


# ---------------------------------------------------------------------------------------------------------------- what is said

@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_knows_what_the_tree_holds_whatever_is_done_to_it(page_size, seed):
    rng = random.Random(seed)
    events = KVEvents(page_size)
    tree, router, pool, handles, waiters = Tree(page_size, events=events), Router(events), Pool(400, page_size, rng), [], []
    for step in range(1, 400):
        ids, namespace, what = [rng.randrange(2) for _ in range(page_size * rng.randrange(1, 9))], rng.choice(["", "a"]), rng.random()
        if what < 0.45:
            slots = pool.take(len(ids))
            inserted = tree.insert(ids, slots, namespace=namespace, step=step, prompt_len=rng.choice([None, len(ids) // 2]))
            pool.give(slots[:inserted.present])
            if inserted.present < len(ids) and rng.random() < 0.2:
                pool.give(tree.remove_step(step) if not any(handle.step == step for handle in handles) else np.empty(0, np.int32))
        elif what < 0.6:
            handles.append(tree.lock(tree.match(ids, namespace)))
        elif what < 0.7 and handles:
            tree.unlock(handles.pop(rng.randrange(len(handles))))
        elif what < 0.85:
            pool.give(tree.evict(page_size * rng.randrange(1, 20)))
        elif what < 0.9:
            waiters.append(tree.wait(np.array(ids, np.int32).tobytes(), namespace, step, None))
        elif what < 0.93 and waiters:
            tree.leave(waiters.pop())
        elif what < 0.94 and not tree.protected:
            pool.give(tree.reset())
        if len(pool.free) < 100:
            pool.give(tree.evict(page_size * 100))
        if rng.random() < 0.3:
            assert router.read() == held(tree)
    assert router.read() == held(tree)
    tree.check()


def test_a_hash_names_a_prefix_and_not_a_node():
    ids = list(range(12))
    whole, pieces = KVEvents(2), KVEvents(2)
    Tree(2, events=whole).insert(ids, np.arange(12))
    tree = Tree(2, events=pieces)
    tree.insert(ids[:4], np.arange(4))
    tree.insert([0, 1, 99, 99], np.arange(4, 8))  # splits the first
    inserted = tree.insert(ids, np.concatenate([np.arange(4), np.arange(8, 16)]))
    assert inserted.present == 4
    for events in (whole, pieces):
        events.flush()
    [batch] = whole.since()
    assert [event.block_hashes for event in batch.events] == [chain(ids, 2)] and batch.events[0].parent_block_hash is None
    [batch] = pieces.since()
    assert [event.block_hashes for event in batch.events] == [chain(ids[:4], 2), chain([0, 1, 99, 99], 2)[1:], chain(ids, 2)[2:]]
    assert [event.parent_block_hash for event in batch.events] == [None, chain(ids, 2)[0], chain(ids, 2)[1]]
    tree.evict(100)
    pieces.flush()
    removed = [name for event in pieces.since(1)[0].events for name in event.block_hashes]
    assert sorted(removed) == sorted({*chain(ids, 2), *chain([0, 1, 99, 99], 2)})


def test_namespaces_share_no_hash_and_their_name_is_the_salt():
    events = KVEvents(1, "CPU")
    tree = Tree(1, events=events)
    for n, namespace in enumerate(("", "salt", "salt\0key")):
        tree.insert([1, 2], [2 * n, 2 * n + 1], namespace=namespace)
    events.flush()
    [batch] = events.since()
    assert len({name for event in batch.events for name in event.block_hashes}) == 6
    assert [(event.cache_salt, event.medium) for event in batch.events] == [(None, "CPU"), ("salt", "CPU"), ("salt\0key", "CPU")]


def test_the_known_hash_of_a_known_block():
    """SHA-256 of the bytes 01 00 00 00 02 00 00 00, as any other implementation computes it."""
    assert chain([1, 2], 2) == [int.from_bytes(hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()[:8], "big", signed=True)]


# -------------------------------------------------------------------------------------------------------------------- the ring

def say(events: KVEvents, count: int) -> None:
    for _ in range(count):
        events.cleared()
        events.flush()


def test_a_step_without_events_is_no_batch_and_a_batch_is_a_step():
    events = KVEvents(1)
    events.flush()
    assert events.since() == []
    tree = Tree(1, events=events)
    tree.insert([1], [1])
    tree.insert([2], [2])
    events.flush()
    [batch] = events.since()
    assert batch.seq == 0 and len(batch.events) == 2 and abs(batch.ts - time.time()) < 60


def test_who_comes_late_learns_how_much_is_lost():
    events = KVEvents(1, ring_bytes=100)
    say(events, 50)
    kept = events.since()
    assert 1 <= len(kept) < 10 and kept[0].lost == kept[0].seq == 50 - len(kept) and [b.lost for b in kept[1:]] == [0] * (len(kept) - 1)
    assert [b.seq for b in kept] == list(range(50 - len(kept), 50))
    assert events.since(49) == [Batch(49, kept[-1].ts, [AllBlocksCleared()], 0)] and events.since(50) == []
    events = KVEvents(1, ring_bytes=1)  # less than a batch: the last one is kept all the same
    say(events, 3)
    assert [(b.seq, b.lost) for b in events.since(1)] == [(2, 1)]


def test_an_iterator_waits_for_news_and_ends_with_the_events():
    events, seen = KVEvents(1), []
    reader = threading.Thread(target=lambda: seen.extend(batch.seq for batch in events), daemon=True)
    say(events, 2)
    reader.start()
    say(events, 3)
    start = time.monotonic()
    assert events.since(5, timeout=0.05) == [] and time.monotonic() - start >= 0.04
    events.close()
    reader.join(5)
    assert not reader.is_alive() and seen == [0, 1, 2, 3, 4] and len(events.since()) == 5


# --------------------------------------------------------------------------------------------------------------- the publisher

@pytest.fixture
def published():
    events = KVEvents(2, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv", ring_bytes=200)
    context = zmq.Context()
    yield events, context
    context.destroy(linger=0)
    events.close()


def subscribe(events: KVEvents, context: zmq.Context, topic: bytes) -> zmq.Socket:
    sub = context.socket(zmq.SUB)
    sub.connect(events.publisher.endpoint)
    sub.subscribe(topic)
    while not sub.poll(10):  # until it has joined
        say(events, 1)
    while sub.poll(50):
        sub.recv_multipart()
    return sub


def replay(events: KVEvents, context: zmq.Context, request: bytes) -> list[tuple[int, bytes]]:
    with context.socket(zmq.DEALER) as asker:
        asker.connect(events.publisher.replay_endpoint)
        asker.send_multipart((b"", request))
        answers = []
        while not answers or answers[-1][0] >= 0:
            assert asker.poll(5000), "no answer"
            empty, seq, message = asker.recv_multipart()
            assert empty == b""
            answers.append((int.from_bytes(seq, "big", signed=True), message))
    return answers


def test_a_subscriber_gets_topic_number_and_batch_in_the_agreed_form(published):
    events, context = published
    sub = subscribe(events, context, b"kv")
    seq = events.since()[-1].seq
    tree = Tree(2, events=events)
    tree.insert([1, 2, 3, 4], [2, 3, 4, 5])
    events.flush()
    assert sub.poll(5000)
    topic, number, message = sub.recv_multipart()
    assert topic == b"kv" and int.from_bytes(number, "big") == seq + 1
    ts, said = msgspec.msgpack.decode(message)  # no type: what any reader of msgpack sees
    assert said == [["BlockStored", chain([1, 2, 3, 4], 2), None, [1, 2, 3, 4], 2, None, "GPU", None]] and ts > 1.6e9
    tree.evict(4)
    tree.insert([5, 6], [2, 3])
    events.flush()
    said = msgspec.msgpack.decode(sub.recv_multipart()[2])[1]
    assert said == [["BlockRemoved", chain([1, 2, 3, 4], 2), "GPU"], ["BlockStored", chain([5, 6], 2), None, [5, 6], 2, None, "GPU", None]]
    tree.reset()
    events.flush()
    assert msgspec.msgpack.decode(sub.recv_multipart()[2])[1] == [["AllBlocksCleared"]]


def test_what_was_missed_is_replayed_as_far_as_it_is_kept(published):
    events, context = published
    say(events, 3)
    messages = dict(events.ring.since(0))
    assert replay(events, context, (1).to_bytes(8, "big")) == [(1, messages[1]), (2, messages[2]), (-1, b"")]
    assert replay(events, context, (7).to_bytes(8, "big")) == [(-1, b"")]
    say(events, 50)
    first = events.since()[0].seq
    assert replay(events, context, (0).to_bytes(8, "big"))[0][0] == first > 0
    with context.socket(zmq.DEALER) as rude:
        rude.connect(events.publisher.replay_endpoint)
        rude.send_multipart((b"", b"all"))
        assert replay(events, context, (52).to_bytes(8, "big"))[0][0] == 52 and not rude.poll(20)


def test_an_address_that_cannot_be_had_is_named_and_a_closed_one_is_free_again(published):
    events, _ = published
    address = events.publisher.endpoint
    with pytest.raises(ValueError, match=f"KV events cannot be published at '{address}': Address already in use"):
        KVEvents(1, endpoint=address)
    with pytest.raises(ValueError, match="Address already in use"):
        KVEvents(1, endpoint="tcp://127.0.0.1:*", replay_endpoint=address)
    events.close()
    KVEvents(1, endpoint=address).close()


# ------------------------------------------------------------------------------------------------------------------ the engine

def run(engine: Engine, prompts: list[list[int]], max_tokens: int = 6) -> None:
    for n, ids in enumerate(prompts):
        engine.add(Request(rid=str(n), prompt_ids=ids, params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("flags", [dict(), dict(page_size=16, max_total_tokens=128), dict(disable_overlap_schedule=False, max_total_tokens=100)],
                         ids=str)
def test_what_an_engine_says_is_what_its_tree_holds(path, flags):
    engine = engines.make(path, kv_events=True, **flags)
    router, rng = Router(engine.events), random.Random(5)
    for _ in range(4):
        stem = [rng.randrange(256) for _ in range(20)]
        run(engine, [stem + [rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(5)])
        blocks = dict(router.read())
        assert blocks == held(engine.scheduler.tree) and blocks
    assert {event.medium for batch in engine.events.since() for event in batch.events if isinstance(event, BlockStored)} == {"CPU"}
    before = engine.events.since()[-1].seq
    assert engine.flush_cache() and not router.read()
    assert [batch.events for batch in engine.events.since(before + 1)] == [[AllBlocksCleared()]]
    engine.shutdown()
    assert engine.events.ring.closed


def test_without_the_flag_there_are_none(path):
    engine = engines.make(path)
    assert engine.events is None and engine.scheduler.tree.events is None


def test_an_engine_gives_its_address_back(path):
    engine = engines.make(path, kv_events_endpoint="tcp://127.0.0.1:*")
    address = engine.events.publisher.endpoint
    with pytest.raises(ValueError, match="in use"):
        engines.make(path, kv_events_endpoint=address)
    engine.shutdown()
    engines.make(path, kv_events_endpoint=address).shutdown()


@pytest.mark.parametrize("flags, words", [
    (dict(kv_events_endpoint="127.0.0.1:5557"), "kv_events_endpoint is '127.0.0.1:5557', expected an address such as tcp://"),
    (dict(kv_events_replay_endpoint="tcp://127.0.0.1:5558"), "give kv_events_endpoint as well"),
    (dict(kv_events_topic="kv"), "give kv_events_endpoint"),
    (dict(kv_events=True, disable_radix_cache=True), "the radix cache holds, which is disabled"), (dict(kv_events=1), "kv_events is 1")])
def test_flags_that_make_no_sense_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**flags)


# ---------------------------------------------------------------------------------------------------------- a look at the tree

def test_the_view_shows_the_most_used_nodes_with_what_waits_and_what_is_left_out(path):
    engine = engines.make(path)
    run(engine, [[*range(97, 107), 33 + n] for n in range(4)], max_tokens=1)
    view = engine.tree_view()
    assert view["cached_tokens"] == view["shown_tokens"] == engine.scheduler.tree.total == 14 and view["page_size"] == 1 and not view["left_out"]
    stem, *leaves = view["nodes"]
    assert stem == {"parent": None, "namespace": "", "start": 0, "tokens": 10, "text": engine.tokenizer.decode(list(range(97, 107))),
                    "where": "device", "locks": 0, "hits": 4, "waiters": 0, "left_out": 0}
    assert [(leaf["parent"], leaf["start"], leaf["tokens"], leaf["where"]) for leaf in leaves] == [(0, 10, 1, "device")] * 4
    cut = engine.tree_view(max_nodes=2, width=5)
    assert [(node["hits"], node["left_out"]) for node in cut["nodes"]] == [(4, 3), (1, 0)] and cut["nodes"][0]["text"].endswith("...")
    assert len(cut["nodes"][0]["text"]) <= 8 and cut["shown_tokens"] == 11
    for namespace in ("", "other"):
        engine.add(Request(rid=f"in {namespace}", prompt_ids=[*range(97, 107), 7, 8, 9], params=SamplingParams(max_tokens=1), namespace=namespace))
    view = engine.tree_view()
    ghosts = [(node["namespace"], node["start"], node["tokens"], node["waiters"]) for node in view["nodes"] if node["where"] == "ghost"]
    assert ghosts == [("", 10, 3, 1), ("other", 0, 13, 1)] and view["nodes"][0]["waiters"] == 1 and view["shown_tokens"] == 14
