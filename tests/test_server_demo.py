"""The server with the demo model: the cases of tests/cases/server.jsonl that need a real tokenizer, and the two processes as users start them.

One server process for the module, in float32, so that greedy texts are those of `transformers`.
"""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from nano_sgl.chat import ChatTemplate, Codec

HERE = Path(__file__).parent
COUNTING = "1, 2, 3, 4, 5,"


class Demo:
    """A server process with the demo model, and a client for it."""

    def __init__(self, *flags: str):
        with tempfile.NamedTemporaryFile("w", prefix="nano_sgl-test-", suffix=".log", delete=False) as log:
            self.log_file = Path(log.name)
            self.process = subprocess.Popen([sys.executable, "-m", "nano_sgl.server", "--model", "demo", "--dtype", "float32", "--port", "0",
                                             "--max-total-tokens", "16384", *flags], stderr=log, cwd=HERE.parent)
        end = time.monotonic() + 300
        while "curl" not in self.log and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert "curl" in self.log, self.log
        self.client = httpx.Client(base_url=re.search(r"http://\S+?:\d+", self.log)[0], timeout=300)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def case(self, case: dict, **changes) -> httpx.Response:
        """Send a case's request."""
        body = expand(case["request"]["body"])
        return self.client.request(case["request"]["method"], case["request"]["path"], json={**body, **changes})

    def events(self, path: str, **body) -> list:
        response = self.post(path, **{**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def texts(self, path: str, **body) -> list[str]:
        """The non-empty deltas of a stream with one choice."""
        choices = [c for e in self.events(path, **body) for c in e["choices"]]
        return [text for c in choices if (text := c.get("text") or c.get("delta", {}).get("content"))]

    def open(self, path: str, **body) -> socket.socket:
        """Send a request on a connection of its own."""
        host, port = str(self.client.base_url).removeprefix("http://").rstrip("/").split(":")
        sock, raw = socket.create_connection((host, int(port)), timeout=60), json.dumps(body).encode()
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
                     "Connection: close\r\n\r\n".encode() + raw)
        return sock

    def stats(self) -> dict:
        return self.client.get("/get_server_info").json()["stats"]

    def idle(self) -> bool:
        """Nothing runs or waits, and every slot is free or cached."""
        s = self.stats()
        return s["running"] == s["waiting"] == 0 and s["kv_free"] + s["kv_cached"] == s["kv_capacity"]

    def alive(self) -> None:
        """What every case of bad input asks for afterwards."""
        assert self.client.get("/health").status_code == 200
        answer = self.post("/v1/completions", prompt="hi", max_tokens=4, temperature=0, ignore_eos=True)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4

    def close(self) -> str:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0
        log = self.log
        self.log_file.unlink()
        return log


def expand(value):
    """A case's body with its placeholders filled in."""
    if isinstance(value, dict) and "$repeat" in value:
        text, times = value["$repeat"]
        return text * times
    if isinstance(value, dict) and "$concat" in value:
        return "".join(map(expand, value["$concat"]))
    if isinstance(value, dict):
        return {key: expand(v) for key, v in value.items()}
    if isinstance(value, list):
        return [expand(v) for v in value]
    return "demo" if value == "$MODEL" else value


@pytest.fixture(scope="module")
def demo():
    server = Demo()
    try:
        yield server
    finally:
        log = server.close()
    assert re.search(r"running \d+, queued \d+ \| \d+ tok/s out", log) and "Traceback" not in log, log


@pytest.fixture(scope="module")
def tokenizer(demo_path):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(demo_path)


def refused(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


def prompt_of(choice: dict) -> int:
    return choice["usage"]["prompt_tokens"]


# ------------------------------------------------------------------------------------------------------------------- tokenising

def test_F153_a_chat_prompt_has_no_second_bos(demo, api_case):
    """F153: 31 tokens for 'hi' (test_chat has tokenizers whose post-processor writes a BOS)."""
    assert prompt_of(demo.case(api_case("F153")).json()) == 31


def test_F155_control_tokens_typed_by_a_user_are_text(demo, api_case, tokenizer):
    """F155"""
    case = api_case("F155")
    answer = demo.case(case)
    assert answer.status_code == 200
    messages = case["request"]["body"]["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt_of(answer.json()) > len(tokenizer.encode(text, add_special_tokens=False))
    ids = ChatTemplate(Codec(tokenizer.backend_tokenizer.to_str()), tokenizer.chat_template, {}).encode(messages)
    assert ids.count(1) == 3 and ids.count(2) == 2 and len(ids) == prompt_of(answer.json()) and tokenizer.decode(ids) == text


def test_F159_streamed_text_is_the_plain_text_is_the_decoded_ids(demo, tokenizer):
    """F159: spaces, half characters, special tokens. What shares a batch depends on the clock, and a greedy text forks where two tokens are
    as likely as rounding can tell: each text is held against its own ids, and at most one of nineteen may differ from its twin."""
    prompts = ["def f(x):\n    return", "a    b", "naïve café", "日本語", "🙂🙃", " leading", "tab\tand\nnewline\n\n", "1, 2, 3,",
               "The capital of France is", "¿Qué tal?", "x = [1, 2,\n     3]", "Привет", "مرحبا", "smile: 🙂 🙃", "a\u00a0b",
               "<|im_start|>user\nhi<|im_end|>\n", "...", "日本", "ﬁ", "#!/bin/sh"]

    def body(prompt: str) -> dict:
        return {"text": prompt, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        plains = [pool.submit(demo.post, "/generate", **body(prompt)) for prompt in prompts]
        streams = [pool.submit(demo.events, "/generate", **body(prompt)) for prompt in prompts]
        deltas = [pool.submit(demo.texts, "/v1/completions", prompt=prompt, max_tokens=24, temperature=0) for prompt in prompts[:5]]
    plains, streams = [p.result().json() for p in plains], [s.result() for s in streams]
    for answer in [*plains, *(events[-1] for events in streams)]:
        assert answer["text"] == tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    for events in streams:
        assert all(events[-1]["text"].startswith(e["text"]) for e in events), "what was sent is never taken back"
        assert not any("\ufffd" in e["text"] for e in events[:-1])
    forked = [p["output_ids"] != events[-1]["output_ids"] for p, events in zip(plains, streams)]
    forked += ["".join(d.result()) != p["text"] for d, p in zip(deltas, plains)]
    assert sum(forked) <= 1


# --------------------------------------------------------------------------------------------------------------------- stop strings

def test_F161_a_stop_string_of_several_tokens_never_leaks(demo, api_case):
    """F161"""
    body = expand(api_case("F161")["request"]["body"])
    deltas = demo.texts("/v1/completions", **body)
    assert "".join(deltas) == " 6, 7, 8, " and not any("9" in d for d in deltas)
    choice = demo.case(api_case("F161"), stream=False).json()["choices"][0]
    assert choice["text"] == " 6, 7, 8, " and choice["finish_reason"] == "stop" and choice["matched_stop"] == "9, 10"


def test_F163_text_that_cannot_begin_a_stop_is_sent_at_once(demo, api_case):
    """F163"""
    deltas = demo.texts("/v1/completions", **expand(api_case("F163")["request"]["body"]))
    assert len(deltas) >= 10 and deltas[0] in (" ", " 6")


def test_F165_the_first_of_overlapping_stops_cuts_and_the_prompt_does_not_count(demo, api_case):
    """F165"""
    case = api_case("F165")
    text = demo.case(case).json()["choices"][0]["text"]
    assert "7" not in text and "6, 7" not in text
    assert "".join(demo.texts("/v1/completions", **expand(case["request"]["body"]))) == text
    answer = demo.post("/v1/completions", prompt="one two STOP", stop=["STOP"], max_tokens=5, temperature=0, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] > 1


# ------------------------------------------------------------------------------------------------------------------ lengths and lists

def test_F169_usage_of_a_stream(demo, api_case):
    """F169"""
    events = demo.events("/v1/chat/completions", **expand(api_case("F169")["request"]["body"]))
    usage = events[-1]["usage"]
    assert events[-1]["choices"] == [] and usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert not any(e.get("usage") for e in events[:-1])


def test_F171_choices_of_a_stream(demo, api_case):
    """F171"""
    body = expand(api_case("F171")["request"]["body"])
    choices = [c for e in demo.events("/v1/chat/completions", **body) for c in e["choices"]]
    texts = {}
    for index in range(3):
        mine = [c for c in choices if c["index"] == index]
        assert ["role" in c["delta"] for c in mine] == [True] + [False] * (len(mine) - 1)
        assert [bool(c["finish_reason"]) for c in mine] == [False] * (len(mine) - 1) + [True]
        texts[index] = "".join(c["delta"].get("content", "") for c in mine)
    plain = demo.post("/v1/chat/completions", **{**body, "stream": False}).json()["choices"]
    assert {c["index"]: c["message"]["content"] for c in plain} == texts, "the same seed gives the same texts"


def test_F175_limits_of_the_answers_length(demo, api_case):
    """F175"""
    case = api_case("F175")
    assert demo.case(case).json()["usage"]["completion_tokens"] <= 5
    refused = demo.case(case, max_tokens=50)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_completion_tokens"
    assert demo.post("/v1/completions", prompt="hi", ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_F179_echo_with_no_tokens_scores_a_prompt(demo, api_case):
    """F179"""
    case = api_case("F179")
    body = demo.case(case).json()
    [choice] = body["choices"]
    assert choice["text"] == case["request"]["body"]["prompt"] and body["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(logprobs) == body["usage"]["prompt_tokens"] and logprobs[0] is None and all(x <= 0 for x in logprobs[1:])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert demo.case(case, echo=False, logprobs=None).json()["choices"][0]["text"] == ""
    demo.alive()


def test_F199_prompt_lists_keep_their_order(demo, api_case):
    """F199"""
    case = api_case("F199")
    body = demo.case(case).json()
    prompts = case["request"]["body"]["prompt"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert all(c["text"].startswith(prompts[n // 2]) for n, c in enumerate(body["choices"]))
    assert body["usage"]["completion_tokens"] == 16
    choices = [c for e in demo.events("/v1/completions", **expand(case["request"]["body"])) for c in e["choices"]]
    assert {n: "".join(c["text"] for c in choices if c["index"] == n) for n in range(4)} == {c["index"]: c["text"] for c in body["choices"]}


# ------------------------------------------------------------------------------------------------------------------------- bad input

def test_F177_too_many_answers(demo, api_case):
    """F177"""
    refused(demo.case(api_case("F177")))
    refused(demo.post("/v1/completions", prompt=["hi"] * 100000))
    demo.alive()


def test_F181_logit_bias_outside_the_vocabulary(demo, api_case):
    """F181"""
    assert refused(demo.case(api_case("F181")))["param"] == "logit_bias"
    assert refused(demo.case(api_case("F181"), logit_bias={"49152": 1}))["param"] == "logit_bias"
    assert demo.case(api_case("F181"), logit_bias={"49151": 1}).status_code == 200
    demo.alive()


def test_F183_token_ids_outside_the_vocabulary(demo, api_case):
    """F183"""
    for prompt in ([-1], [49152], [1, 2.5], ["a", 1], [[1], [99999999]]):
        refused(demo.case(api_case("F183"), prompt=prompt))
    assert prompt_of(demo.case(api_case("F183"), prompt=[33, 28]).json()) == 2
    demo.alive()


def test_F185_a_prompt_that_encodes_to_nothing(demo, api_case):
    """F185"""
    assert "no tokens" in refused(demo.case(api_case("F185")))["message"]
    refused(demo.case(api_case("F185"), prompt=["hi", "\u0004"]))
    refused(demo.case(api_case("F185"), prompt=""))
    demo.alive()


def test_F187_unusual_message_lists(demo, api_case):
    """F187"""
    for messages in ([], None, "hi", [5], [{"content": "x"}]):
        refused(demo.case(api_case("F187"), messages=messages))
    for role in ("assistant", "system"):
        assert demo.case(api_case("F187"), messages=[{"role": role, "content": "x"}]).status_code == 200
    demo.alive()


def test_F189_parts_of_a_message_are_joined(demo, api_case):
    """F189: without a separator."""
    case = api_case("F189")
    parts, plain = demo.case(case).json(), demo.case(case, messages=[{"role": "user", "content": "What is the capital of France?"}]).json()
    assert parts["choices"][0]["message"] == plain["choices"][0]["message"] and prompt_of(parts) == prompt_of(plain)
    for role in ("system", "assistant"):
        assert demo.case(case, messages=[{"role": role, "content": [{"type": "text", "text": "x"}]}]).status_code == 200


def test_F201_a_prompt_of_five_million_characters(demo, api_case):
    """F201"""
    start = time.monotonic()
    assert "characters" in refused(demo.case(api_case("F201")))["message"]
    assert time.monotonic() - start < 5
    demo.alive()


def test_a_prompt_longer_than_the_context_is_refused_before_a_stream_begins(demo):
    for stream in (False, True):
        assert "tokens" in refused(demo.post("/v1/completions", prompt=[33] * 8192, max_tokens=2, stream=stream))["message"]
        assert refused(demo.post("/v1/completions", prompt="word " * 9000, max_tokens=2, stream=stream))["param"] == "prompt"
    demo.alive()


def test_F205_templates_come_from_the_server_only(demo, api_case):
    """F205"""
    start = time.monotonic()
    assert refused(demo.case(api_case("F205")))["param"] == "chat_template"
    assert time.monotonic() - start < 5
    demo.alive()


def test_F207_each_accepted_seed_is_reproducible(demo, api_case):
    """F207"""
    for seed in (-1, 2**63, 2**64, 2**200):
        texts = [demo.case(api_case("F207"), seed=seed).json()["choices"][0]["text"] for _ in range(2)]
        assert texts[0] == texts[1]
    for seed in (1.5, "1", True):
        assert refused(demo.case(api_case("F207"), seed=seed))["param"] == "seed"
    demo.alive()


# -------------------------------------------------------------------------------------------------------------------------- logprobs

def test_F195_logprobs_alone(demo, api_case):
    """F195"""
    body = demo.case(api_case("F195")).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(e["logprob"] <= 0 and e["top_logprobs"] == [] and bytes(e["bytes"]).decode() == e["token"] for e in content)
    assert demo.case(api_case("F195"), logprobs=None).json()["choices"][0]["logprobs"] is None
    assert "".join(e["token"] for e in content).startswith(body["choices"][0]["message"]["content"])


def test_logprobs_are_the_models_whatever_the_sampling(demo):
    """F077, as three routes show it."""
    for changes in ({}, {"temperature": 0.5, "seed": 1, "top_p": 0.1}, {"temperature": 2, "top_p": 0.1, "seed": 1}):
        logprobs = demo.post("/v1/completions", **{"prompt": COUNTING, "max_tokens": 1, "temperature": 0, "logprobs": 3, **changes}).json()[
            "choices"][0]["logprobs"]
        top = logprobs["top_logprobs"][0]
        assert top[" "] == pytest.approx(-0.115, abs=0.01) and list(top)[:2] == [" ", " and"] and len(top) >= 3
    native = demo.post("/generate", text=COUNTING, sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True,
                       top_logprobs_num=3, return_text_in_logprobs=True).json()["meta_info"]
    assert native["output_token_logprobs"][0][0] == pytest.approx(-0.115, abs=0.01) and native["output_token_logprobs"][0][2] == " "
    assert [t[2] for t in native["output_top_logprobs"][0]][:2] == [" ", " and"]


def test_native_prompt_logprobs_begin_where_asked(demo):
    whole = demo.post("/generate", text=COUNTING, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0).json()["meta_info"]
    part = demo.post("/generate", text=COUNTING, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=4).json()["meta_info"]
    assert len(whole["input_token_logprobs"]) == whole["prompt_tokens"] and whole["input_token_logprobs"][0][0] is None
    assert [e[1] for e in part["input_token_logprobs"]] == [e[1] for e in whole["input_token_logprobs"][4:]]
    assert [e[0] for e in part["input_token_logprobs"]] == pytest.approx([e[0] for e in whole["input_token_logprobs"][4:]], abs=1e-3)


# ------------------------------------------------------------------------------------------------------- requests in every state

PROBE = {"prompt": "The three primary colours are", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def small():
    """Room for 400 tokens, eight requests at a time, prompts in pieces of 32: every state of a request can be met. And what it answers to
    PROBE while it is new."""
    server = Demo("--max-total-tokens", "400", "--max-running-requests", "8", "--chunked-prefill-size", "32")
    try:
        yield server, server.post("/v1/completions", **PROBE).json()["choices"]
    finally:
        log = server.close()
    assert "Traceback" not in log, log


def bring(server: Demo, state: str, stream: bool) -> list[socket.socket]:
    """Open connections until some request of theirs is in the state."""
    def ask(words: int, max_tokens: int, start: int) -> socket.socket:
        return server.open("/v1/completions", prompt=[*range(start, start + words)], max_tokens=max_tokens, stream=stream, ignore_eos=True,
                           cache_salt=f"never the same {time.monotonic()}")
    before = server.stats()

    def grown(name: str) -> int:
        return server.stats()[name] - before[name]
    if state == "queued":
        socks = [ask(5, 50, 1000 * n) for n in range(1, 9)]
        assert wait_until(lambda: server.stats()["running"] == 8, 60)
        socks.append(ask(5, 5, 9000))
        assert wait_until(lambda: server.stats()["waiting"] == 1, 60)
    elif state == "between chunks":
        socks = [ask(350, 5, 6000)]
        assert wait_until(lambda: 32 <= grown("computed_tokens"), 60) and grown("output_tokens") == 0
    elif state == "running":
        socks = [ask(5, 300, 7000)]
        assert wait_until(lambda: grown("output_tokens") > 3, 60)
    else:
        socks = [ask(5, 55, 8000 + 1000 * n) for n in range(8)]  # expected to use 70 % of their 55, and so let in; all are used
        assert wait_until(lambda: grown("retractions") > 0, 120)
    return socks


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "between chunks", "running", "retracted"])
def test_an_abort_in_any_state_gives_everything_back(small, state, stream):
    """By disconnect, and by /abort_request; the next requests are answered as if nothing had been."""
    server, expected = small
    for sock in bring(server, state, stream):
        sock.close()
    assert wait_until(server.idle, 30), server.stats()
    socks = bring(server, state, stream)
    assert server.post("/abort_request", abort_all=True).json() == {"aborted": len(socks)}
    for sock in socks:
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b'"finish_reason":"abort"') == 1, answer
        sock.close()
    assert wait_until(server.idle, 30), server.stats()
    assert server.post("/v1/completions", **PROBE).json()["choices"] == expected
    assert server.client.get("/health_generate").status_code == 200


def test_one_of_several_is_aborted_by_its_id_and_the_others_are_not(small):
    server, expected = small
    socks = {rid: server.open("/generate", text="One, two,", rid=rid, sampling_params={"max_new_tokens": 40, "ignore_eos": True})
             for rid in ("a", "b", "c")}
    assert wait_until(lambda: server.stats()["running"] == 3, 20)
    assert server.post("/abort_request", rid="b").json() == {"aborted": 1}
    reasons = {}
    for rid, sock in socks.items():
        answer = json.loads(b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2])
        reasons[rid] = answer["meta_info"]["finish_reason"]["type"]
        sock.close()
    assert reasons == {"a": "length", "b": "abort", "c": "length"} and wait_until(server.idle, 5)


def test_an_engine_that_is_killed_comes_back_and_answers_the_same(small):
    """Every request in it gets an error; the HTTP side goes on, and says 503 in between."""
    server, expected = small
    socks = [server.open("/v1/completions", **{**PROBE, "max_tokens": 150, "stream": stream, "ignore_eos": True}) for stream in (True, False)]
    assert wait_until(lambda: server.stats()["running"] == 2, 20)
    [child] = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat")
               if parent_of(stat) == server.process.pid and b"--engine-child" in (stat.parent / "cmdline").read_bytes()]
    os.kill(child, signal.SIGKILL)
    streamed, plain = (b"".join(iter(lambda: sock.recv(1 << 16), b"")) for sock in socks)
    assert b'"error"' in streamed and b"signal 9" in streamed and b"[DONE]" not in streamed
    assert plain.startswith(b"HTTP/1.1 503") and b"retry-after" in plain
    refused(server.post("/v1/completions", **PROBE), 503)
    assert wait_until(lambda: server.client.get("/health").status_code == 200, 120), server.log
    assert server.post("/v1/completions", **PROBE).json()["choices"] == expected
    for sock in socks:
        sock.close()


def parent_of(stat: Path) -> int | None:
    """The parent of the process that a /proc/N/stat speaks of; None where it has ended."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_time_outs_and_a_full_queue():
    """What waits too long is refused with 503, what runs too long ends with an error and not as an answer, what finds the queue full is refused
    at once; all of it leaves nothing."""
    server = Demo("--max-running-requests", "1", "--max-queued-requests", "2", "--waiting-timeout", "1.5", "--running-timeout", "3",
                  "--chunked-prefill-size", "512")
    try:
        long = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}
        socks = [server.open("/v1/completions", **long, stream=True)]
        assert wait_until(lambda: server.stats()["running"] == 1, 20)
        socks += [server.open("/v1/completions", **long, stream=stream) for stream in (True, False)]
        assert wait_until(lambda: server.stats()["waiting"] == 2, 20)
        for stream in (True, False):
            full = server.post("/v1/completions", **long, stream=stream)
            assert "--max-queued-requests" in refused(full, 503)["message"] and full.headers["retry-after"] == "1"
        assert server.client.get("/health_generate").status_code == 200
        ran, *waited = (b"".join(iter(lambda: sock.recv(1 << 16), b"")) for sock in socks)
        for answer in waited:
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer and b"waiting_timeout" in answer, answer
        assert ran.startswith(b"HTTP/1.1 200") and b'"error"' in ran[-600:] and b"running_timeout" in ran[-600:] and b"[DONE]" not in ran
        assert b'"finish_reason":"' not in ran, "what was cut short does not look finished"
        assert "running_timeout" in refused(server.post("/v1/completions", **long), 504)["message"]
        assert wait_until(server.idle, 5)
        server.alive()
        info = server.client.get("/get_server_info").json()
        assert info["chunked_prefill_size"] == 512 and info["max_running_requests"] == 1 and info["context_length"] == 8192
        assert info["device"] == "cpu" and info["threads"] >= 1 and info["attention_backend"] and info["max_queued_requests"] == 2
    finally:
        assert "Traceback" not in server.close()


def test_a_pattern_that_takes_too_long_is_its_senders_fault(demo):
    """Every word it adds doubles what `regex` tries: the request ends with 400, and the stream with an event that names the field."""
    body = {"prompt": "x", "max_tokens": 300, "temperature": 0, "logit_bias": {"1357": 100}, "ignore_eos": True,
            "stop_regex": r"(?:(?: environment)+)+(?: environment)+\d"}
    error = refused(demo.post("/v1/completions", **body))
    assert error["param"] == "stop_regex" and "took too long" in error["message"]
    assert '"stop_regex"' in demo.post("/v1/completions", **body, stream=True).text.rpartition("data: ")[2]
    demo.alive()


# ------------------------------------------------------------------------------------------------------------- the engine behind it

def test_F023_clients_that_leave_give_their_slots_back(demo, api_case):
    """F023"""
    body = expand(api_case("F023")["request"]["body"])

    def read_three_chunks_and_leave(_) -> None:
        with httpx.stream("POST", str(demo.client.base_url).rstrip("/") + "/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            for _ in range(3):
                next(lines)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(read_three_chunks_and_leave, range(20)))
    assert wait_until(demo.idle, 30)
    demo.alive()


def test_F025_a_plain_request_notices_that_its_client_left(demo, api_case):
    """F025"""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(str(demo.client.base_url).rstrip("/") + "/v1/completions", json=expand(api_case("F025")["request"]["body"]), timeout=0.5)
    assert wait_until(demo.idle, 30)
    made = demo.stats()["output_tokens"]
    time.sleep(0.3)
    assert demo.stats()["output_tokens"] == made
    demo.alive()


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_second_turn_finds_the_first_in_the_cache(demo):
    messages = [{"role": "user", "content": "Name a fruit that is yellow."}]
    first = demo.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()
    messages += [first["choices"][0]["message"] | {"refusal": None}, {"role": "user", "content": "And a red one?"}]
    messages[1].pop("refusal")
    second = demo.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 4
    other = demo.post("/v1/chat/completions", messages=messages, max_tokens=1, temperature=0, cache_salt="other").json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_flush_cache_forgets_every_prefix(demo):
    assert wait_until(demo.idle, 30)
    demo.post("/v1/completions", prompt=COUNTING, max_tokens=1)
    assert demo.client.post("/flush_cache").status_code == 200
    usage = demo.post("/v1/completions", prompt=COUNTING, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_info_speaks_of_the_model(demo):
    info = demo.client.get("/get_model_info").json()
    assert info["model_path"] == "demo" and info["context_length"] == 8192 and info["vocab_size"] == 49152 and info["max_total_tokens"] == 16384
    assert 2 in info["eos_token_ids"] and info["has_chat_template"]
    config = demo.client.get("/get_server_info").json()
    assert config["dtype"] == "float32" and config["page_size"] == 1


# ------------------------------------------------------------------------------------------------------- what languages need

def test_a_fork_over_http(demo):
    """A hold, its children, what /metrics says of it, and its end by /abort_request."""
    def gauges() -> tuple[int, int]:
        text = demo.client.get("/metrics").text
        return tuple(int(float(re.search(rf"^nano_sgl:{name} (\S+)$", text, re.M)[1])) for name in ("num_holds", "num_held_tokens"))

    def ask(text: str, **body) -> dict:
        return demo.post("/generate", text=text, **body).json()["meta_info"]

    prefix = "A fork in the road: one of the ways was wide, and the other was not. So"
    held = ask(prefix, rid="road", children=2, sampling_params={"max_new_tokens": 0})["prompt_tokens"]
    assert gauges() == (1, held)
    first = ask(prefix + " they", parent="road", sampling_params={"max_new_tokens": 2, "temperature": 0})
    assert first["cached_tokens"] == held and first["prompt_tokens"] > held and gauges() == (1, held)
    answer = demo.post("/score", text=prefix, choices=[" we went", " he stayed"], parent="road").json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * (held - 1) and gauges() == (0, 0)
    ask(prefix, rid="road", children=2, sampling_params={"max_new_tokens": 0})
    assert gauges() == (1, held) and demo.post("/abort_request", rid="road").json() == {"aborted": 1} and gauges() == (0, 0)
    ask(prefix, rid="road", children=2, sampling_params={"max_new_tokens": 0})
    assert demo.client.post("/flush_cache").status_code == 200 and gauges() == (0, 0), "a hold is for speed; it is in nobody's way"


def test_scores_of_a_choice(demo):
    """/score: " YES" and " NO" behind a question; the sums are those of `transformers` in float32."""
    answer = demo.post("/score", text="Question: Is the sky blue?\nAnswer:", choices=[" YES", " NO"], unconditional=True).json()
    assert [len(s["token_ids"]) for s in answer["scores"]] == [2, 1] and [s["text"] for s in answer["scores"]] == [" YES", " NO"]
    assert [round(sum(s["logprobs"]), 1) for s in answer["scores"]] == [-5.9, -6.4]
    assert [s["unconditional_logprobs"][0] for s in answer["scores"]] == [None, None]


def test_what_sglangs_own_frontend_posts_is_understood(demo, tokenizer):
    """The bodies of its RuntimeEndpoint: prefix caching, generate and its stream, and select with both kinds of logprobs."""
    info = demo.client.get("/get_model_info").json()
    assert info["model_path"] == "demo" and info["chat_roles"]["source"] == "template"
    text = "Question: Is the sky blue?\nAnswer:"
    prompt_len = demo.post("/generate", text=text, sampling_params={"max_new_tokens": 0}).json()["meta_info"]["prompt_tokens"]
    assert prompt_len == len(tokenizer.encode(text))
    sampling = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 4, "min_new_tokens": 0, "n": 1, "stop": [],
                "stop_token_ids": [], "stop_regex": [], "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
                "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None}
    body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
            "return_text_in_logprobs": True}
    answer = demo.post("/generate", **body).json()
    assert len(answer["meta_info"]["input_token_logprobs"]) == prompt_len and len(answer["meta_info"]["output_top_logprobs"][0]) == 2
    assert demo.events("/generate", **body)[-1]["text"] == answer["text"]
    for unset in (dict(return_logprob=None, logprob_start_len=None, top_logprobs_num=None, return_text_in_logprobs=None), dict(image_data=None)):
        assert demo.post("/generate", **{**body, **unset}).json()["text"] == answer["text"]
    choices = [" YES", " NO"]
    several = demo.post("/generate", text=[text + choice for choice in choices], sampling_params={"max_new_tokens": 0, "temperature": 0},
                        return_logprob=True, return_text_in_logprobs=True, logprob_start_len=max(prompt_len - 2, 0)).json()
    found = [one["meta_info"]["input_token_logprobs"] for one in several]
    assert all(one["meta_info"]["output_token_logprobs"] == [] for one in several)
    assert [entry[2] for entry in found[0]] == ["Answer", ":", " Y", "ES"][-len(found[0]):] and found[1][-1][2] == " NO"
    assert round(found[1][-1][0], 1) == -6.4
    alone = demo.post("/generate", input_ids=[[entry[1] for entry in one] for one in found], sampling_params={"max_new_tokens": 0},
                      return_logprob=True).json()
    for one, given in zip(alone, found):
        assert [entry[1] for entry in one["meta_info"]["input_token_logprobs"]] == [entry[1] for entry in given]
        assert one["meta_info"]["input_token_logprobs"][0][0] is None, "logprobs of a request that makes no tokens are its prompt's"
    assert "image_data" in refused(demo.post("/generate", **body, image_data="x"))["message"]


# ------------------------------------------------------------------------------------------------------- refused until they are built

@pytest.mark.parametrize("case, field", [("F167", "tools"), ("F197", "tools")])
def test_F167_F197_tools_are_refused_by_name_and_never_ignored(demo, api_case, case, field):
    """F167, F197: streamed or plain."""
    for stream in (True, False):
        assert refused(demo.case(api_case(case), stream=stream))["param"] in (field, "tool_choice")
    demo.alive()


# -------------------------------------------------------------------------------------------------------------------- command line

def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nano_sgl.server", "--port", "0", *flags], capture_output=True, text=True,
                          cwd=HERE.parent, timeout=120, env={**os.environ, "COLUMNS": "200"})


def test_help_names_every_flag_with_a_text():
    from nano_sgl.config import EngineConfig, ServerConfig
    text = run("--help").stdout
    for config in (EngineConfig, ServerConfig):
        for name, field in config.__dataclass_fields__.items():
            assert f"--{name.replace('_', '-')}" in text and field.metadata["help"].split()[0] in text


