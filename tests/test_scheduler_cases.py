"""The cases of tests/cases/scheduler.jsonl, one test each: in the driver where memory and order are meant, in an engine where tokens are, in a
server where clients are. What they have in common is a request that nobody must be able to lose."""

import concurrent.futures
import sys
import time
from pathlib import Path

import httpx
import pytest

import engines
from driver import Driver
from engines import make, params, prompt, request, run
from nano_sgl.protocol import RequestError
from nano_sgl.scheduler import OLDEST_AFTER
from test_server_demo import expand

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import soak  # noqa: E402

CONTEXT = 4096


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


class Client:
    """A server process of a tiny model, and how the cases ask it."""

    def __init__(self, path, folder, *flags: str):
        self.server = soak.Server(str(path), folder, ["--served-model-name", "demo", *flags])
        self.http = httpx.Client(base_url=self.server.url, timeout=60)

    def case(self, case: dict, **changes) -> httpx.Response:
        return self.http.request(case["request"]["method"], case["request"]["path"], json={**expand(case["request"]["body"]), **changes})

    def stats(self) -> dict:
        return self.http.get("/get_server_info").json()["stats"]

    def idle(self, seconds: float) -> bool:
        """Nothing runs or waits within so many seconds, and every slot is free or cached."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            s = self.stats()
            if s["running"] == s["waiting"] == 0 and s["kv_free"] + s["kv_cached"] == s["kv_capacity"]:
                return True
            time.sleep(0.02)
        return False

    def alive(self) -> None:
        """What every case asks for afterwards."""
        assert self.http.get("/health").status_code == 200
        answer = self.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.fixture(scope="module")
def client(path, tmp_path_factory):
    made = Client(path, tmp_path_factory.mktemp("server"), "--max-total-tokens", "16384")
    yield made
    made.server.stop()
    assert "Traceback" not in made.server.log


# ------------------------------------------------------------------------------------------------------------------- at the door

def test_F019_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody(client, api_case):
    """F019"""
    start = time.monotonic()
    refused = client.case(api_case("F019"))
    assert refused.status_code == 400 and time.monotonic() - start < 5
    message = refused.json()["error"]["message"]
    assert str(len("word " * 9000)) in message and str(CONTEXT) in message, "a byte is a token here"
    client.alive()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("n, max_tokens", [(2000, 500), (2032, 16), (2100, 4)])
def test_F021_door_and_scheduler_count_alike(path, api_case, page, n, max_tokens):
    """F021"""
    engine = make(path, max_total_tokens=2048, page_size=page)
    long, short = request("long", prompt(n, 1), params(max_tokens=max_tokens)), request("short", prompt(5, 2), params(max_tokens=4))
    if n > 2048:
        with pytest.raises(RequestError, match="2100 tokens") as refused:
            engine.add(long)
        assert refused.value.status == 400 and run(engine, [short])["short"].reason == "length"
        return
    answers = run(engine, [long, short])
    assert [answers[rid].reason for rid in ("long", "short")] == ["length"] * 2
    assert len(answers["long"].ids) == min(max_tokens, 2048 - n) and len(answers["short"].ids) == 4


def test_F037_each_request_of_a_full_queue_gets_an_answer(path, tmp_path, api_case):
    """F037"""
    made = Client(path, tmp_path, "--max-running-requests", "1", "--max-queued-requests", "4")

    def ask(n: int) -> tuple[int, str]:
        body = {"prompt": f"Story number {n}.", "max_tokens": 60, "ignore_eos": True, "stream": n % 2 == 0}
        with made.http.stream("POST", "/v1/completions", json=body) as response:
            return response.status_code, response.read().decode()

    try:
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            answers = pool.map(ask, range(20))
            health = {made.http.get("/health").status_code for _ in range(10)}
            answers = list(answers)
        taken = [n for n, (status, _) in enumerate(answers) if status == 200]
        assert health == {200} and 5 <= len(taken) < 20
        for n, (status, text) in enumerate(answers):
            if status == 200:
                assert text.endswith("data: [DONE]\n\n") if n % 2 == 0 else '"finish_reason":"length"' in text
            else:
                assert status == 503 and '"error"' in text and "queue is full" in text
        assert made.idle(5)
        made.alive()
    finally:
        made.server.stop()


# ------------------------------------------------------------------------------------------------------------------- who leaves

def test_F023_twenty_clients_that_leave_give_their_slots_back(client, api_case):
    """F023"""
    def read_three_chunks_and_leave(_) -> None:
        with client.http.stream("POST", "/v1/completions", json=expand(api_case("F023")["request"]["body"])) as response:
            lines = (line for line in response.iter_lines() if line)
            assert all(next(lines).startswith("data: {") for _ in range(3))
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(read_three_chunks_and_leave, range(20)))
    assert client.idle(2)
    client.alive()


def test_F025_a_plain_request_ends_with_its_client(client, api_case):
    """F025: ten steps' worth are ten tokens of the one request that runs."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(client.server.url + "/v1/completions", json=expand(api_case("F025")["request"]["body"]), timeout=0.3)
    made = client.stats()["output_tokens"]
    assert client.idle(2) and client.stats()["output_tokens"] - made <= 10
    client.alive()


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("overlap", [False, True])
def test_F027_an_abort_around_the_last_chunk_leaves_a_notice_and_nothing_else(path, api_case, overlap, after):
    """F027: three chunks; the abort comes before the first, between them, with the last one in flight, and after its token."""
    engine = make(path, chunked_prefill_size=128, disable_overlap_schedule=not overlap)
    engine.add(request("gone", prompt(300, 3), params(max_tokens=5)))
    before = [chunk for _ in range(after) for chunk in engine.step()]
    assert engine.abort("gone") and not engine.abort("gone")
    chunks = []
    while engine.has_work:
        chunks += engine.step()
        engine.check()
    assert [(c.finish_reason, c.output_ids) for c in chunks] == [("abort", [])]
    assert chunks[0].text == "" or before, "at most the bytes of an earlier token, which were no whole character"
    assert all(not c.finish_reason for c in before) and len(before) <= max(after - 2, 0)
    pool = engine.scheduler
    assert pool.slots.available + pool.tree.evictable == pool.slots.capacity
    engine.shutdown()


# ------------------------------------------------------------------------------------------------------------------- who waits

def overtaken(policy: str) -> tuple[int, int]:
    """Both places are taken when a cold request comes, then a warm one (100 cached tokens) a pass: passes, and starts of later ones, before
    the cold one's start."""
    d = Driver(policy=policy, max_running=2, pool=4000)
    d.add(range(100), max_tokens=1)
    d.run()
    for last in (200, 201):
        d.add([*range(100), last], max_tokens=4)
    d.step()
    cold, later = d.add(range(5000, 5030), max_tokens=4), []
    for passes in range(1, 501):
        later.append(d.add([*range(100), 201 + passes], max_tokens=4))
        d.step()
        if cold.state != "waiting":
            break
    return passes, sum(req.state != "waiting" for req in later)


def test_F029_a_cold_request_starts_under_lpm(api_case):
    """F029: at most OLDEST_AFTER others pass it; with two places and four tokens each that is one start in two passes."""
    assert overtaken("fcfs") in [(passes, starts) for passes in range(1, 7) for starts in (0, 1)], "one more may start beside it"
    passes, starts = overtaken("lpm")
    assert 2 <= starts <= OLDEST_AFTER + 1 and passes <= 2 * OLDEST_AFTER + 6 <= 100


def test_F031_a_place_that_is_free_after_the_last_chunk_is_taken(api_case):
    """F031"""
    d = Driver(budget=128, max_running=3, context=1000)
    long, *shorts = [d.add(ids, max_tokens=200) for ids in (range(400), range(1000, 1010), range(2000, 2010))]
    while long.state == "waiting" or long.computed_len < 400:
        d.step()
    d.step()
    d.step()
    assert [r.state for r in shorts] == ["running"] * 2
    d.run()


# ------------------------------------------------------------------------------------------------------------------- who is retracted

@pytest.mark.parametrize("length", [63, 64, 65, 80, 81])
@pytest.mark.parametrize("overlap", [False, True])
def test_F033_retraction_neither_drops_nor_repeats_a_token(path, api_case, overlap, length):
    """F033"""
    asked = request("r", prompt(48, 4), params(max_tokens=60))
    expected = run(make(path, page_size=16), [asked])["r"]
    engine = make(path, page_size=16, disable_overlap_schedule=not overlap)

    def retract_once(step: int) -> None:
        req = engine.scheduler.reqs.get("r")
        if req is not None and req.known_len >= length and not req.retractions:
            engine.scheduler._retract(req)
    answer = run(engine, [asked], each_step=retract_once)["r"]
    assert engine.scheduler.counters.retractions == 1
    assert answer.ids == expected.ids and len(answer.ids) == 60
    assert "".join(answer.pieces) == answer.text == expected.text
    engine.shutdown()


@pytest.mark.parametrize("pool", [64, 80, 96])
@pytest.mark.parametrize("overlap", [False, True])
def test_F035_two_that_need_the_last_page_in_one_step_both_finish(path, api_case, overlap, pool):
    """F035"""
    engine = make(path, page_size=16, max_total_tokens=pool, max_running_requests=2, disable_overlap_schedule=not overlap)
    engine.scheduler.ratio = 0.1
    requests = [request(n, prompt(16, 5 + n), params(max_tokens=40)) for n in range(2)]
    answers = run(engine, requests)
    alone = engines.plain(path)
    assert [answers[r.rid].ids for r in requests] == [run(alone, [r])[r.rid].ids for r in requests]
    assert engine.scheduler.counters.retractions > 0 or pool == 96
    engine.shutdown()
