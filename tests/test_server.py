"""The server with an engine that has no model (fake_engine.py): formats, errors, streams, disconnects, processes.

One server for the module; tests that kill something start their own.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gzip
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from nano_sgl import api, process, server
from nano_sgl.chat import CHATML, byte_tokenizer
from nano_sgl.config import EngineConfig, ServerConfig
from nano_sgl.protocol import Chunk, Logprob, Ready, Rejected, Reply, Request, RequestError, SamplingParams

HERE = Path(__file__).parent
CHAT = [{"role": "user", "content": "hi"}]


def children(parent: int) -> list[int]:
    """Process ids of a process's children, out of /proc: `ps` is not everywhere, and cuts what it prints at 80 columns."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass                                                     # it ended while we looked
    return found


class Served:
    """A server process, and a client for it."""
    program = [str(HERE / "fake_engine.py"), "serve"]

    def __init__(self, *flags: str, **env: str):
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", **env}
        self.process = subprocess.Popen([sys.executable, *self.program, "--port", "0", *flags], stderr=subprocess.PIPE, text=True, env=env)
        self.log = ""
        while "curl" not in self.log:
            line = self.process.stderr.readline()
            assert line, f"the server ended: {self.log}"
            self.log += line
        self.url = re.search(r"http://\S+?:\d+", self.log)[0]
        self.client = httpx.Client(base_url=self.url, timeout=30)

    @property
    def child(self) -> int:
        """Process id of the engine process."""
        return next(pid for pid in children(self.process.pid) if b"child" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))

    @property
    def directory(self) -> Path:
        args = Path(f"/proc/{self.child}/cmdline").read_text().split("\0")
        return Path(args[-2])

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal; the exit code. The rest of the log is read."""
        self.process.send_signal(number)
        self.log += self.process.stderr.read()
        return self.process.wait(20)

    def stats(self) -> dict:
        return self.client.get("/get_server_info").json()["stats"]

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body) -> list:
        """The events of a stream; [DONE] must be the last line, and is left out."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    def alive(self) -> None:
        """What every case of bad input asks for afterwards."""
        assert self.client.get("/health").status_code == 200
        answer = self.post("/v1/completions", prompt="hi", max_tokens=4, temperature=0)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(20)
        self.process.stderr.close()


def parse_events(text: str) -> list:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]", text
    return [json.loads(line[6:]) for line in lines[:-1]]


def wait_until(condition, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def served():
    with Served() as running:
        yield running


def check_refused(response: httpx.Response, status: int = 400, param: str | None = None, names: str = "") -> dict:
    """An error in OpenAI's shape; returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert {"message", "type", "param", "code"} == set(error)
    assert param is None or error["param"] == param, error
    assert names in error["message"], error
    return error


# ------------------------------------------------------------------------------------------------------------------- plain answers

def test_chat_answer_has_openais_shape(served):
    body = served.post("/v1/chat/completions", model="fake", messages=CHAT, max_tokens=5).json()
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "abcde"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len("user\nhi\nassistant\n") + 3 and usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5 and "cached_tokens" in usage["prompt_tokens_details"]


def test_completion_defaults_to_16_tokens_and_chat_to_the_context(served):
    assert served.post("/v1/completions", prompt="hi").json()["usage"]["completion_tokens"] == 16
    usage = served.post("/v1/chat/completions", messages=CHAT).json()["usage"]
    assert usage["total_tokens"] == 512
    for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        assert served.post("/v1/chat/completions", messages=CHAT, **fields).json()["usage"]["completion_tokens"] == 3
    check_refused(served.post("/v1/chat/completions", messages=CHAT, max_tokens=50, max_completion_tokens=3), param="max_completion_tokens")


def test_recommended_sampling_values_are_the_default_of_openai_routes_only(served):
    served.post("/v1/completions", prompt="hi")
    got = served.stats()["last_params"]
    assert got["temperature"] == 0.5 and got["top_k"] == 20 and type(got["top_k"]) is int
    assert served.client.get("/model_info").json()["default_sampling_params"] == {"temperature": 0.5, "top_k": 20}
    assert "obeyed only in part: min_p must be a number in [0, 1]; got 7.0" in served.log
    served.post("/v1/completions", prompt="hi", temperature=0.25)
    assert served.stats()["last_params"]["temperature"] == 0.25
    served.post("/generate", text="hi", sampling_params={"max_new_tokens": 1})
    assert served.stats()["last_params"]["temperature"] == 1.0


def test_cached_tokens_are_always_in_the_usage(served):
    for expected in (0, 10):
        usage = served.post("/v1/completions", prompt="seen twice!", max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected


def test_stop_string_ends_and_is_named(served):
    choice = served.post("/v1/completions", prompt="hi", stop=["def"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", "def")
    native = served.post("/generate", text="hi", sampling_params={"stop": "def"}).json()
    assert native["text"] == "abc" and native["meta_info"]["finish_reason"] == {"type": "stop", "matched": "def"}


def test_prompt_lists_times_n_keep_their_order(served):
    body = served.post("/v1/completions", prompt=["one ", "two "], n=2, max_tokens=3, echo=True).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["one abc", "one bcd", "two abc", "two bcd"]
    assert body["usage"]["prompt_tokens"] == 8 and body["usage"]["completion_tokens"] == 12
    assert [c["text"] for c in served.post("/v1/completions", prompt=[[71, 72], [71]], max_tokens=2).json()["choices"]] == ["ab", "ab"]


def test_completion_logprobs_with_echo_cover_the_prompt(served):
    logprobs = served.post("/v1/completions", prompt="hey", max_tokens=2, echo=True, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "e", "y", "a", "b"] and logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -1, -1, -0.5, -0.5] and logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"a": -0.5, "B": -1.5}
    plain = served.post("/v1/completions", prompt="hey", max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
    assert plain["tokens"] == ["a", "b"] and plain["top_logprobs"] == [None, None]
    scored = served.post("/v1/completions", prompt="hey", max_tokens=0, echo=True, logprobs=0).json()
    assert scored["choices"][0]["text"] == "hey" and scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -1, -1]


def test_text_offsets_point_into_the_text_when_a_character_has_several_tokens(served):
    choice = served.post("/v1/completions", prompt="é🙂!", max_tokens=1, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "é🙂!a"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert choice["logprobs"]["tokens"][:3] == ["\\xc3", "\\xa9", "\\xf0"] and choice["logprobs"]["tokens"][-2:] == ["!", "a"]


def test_chat_logprobs(served):
    body = served.post("/v1/chat/completions", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == ["a", "b", "c"] and content[0]["bytes"] == [97] and content[0]["logprob"] == -0.5
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["a", "B"]
    alone = served.post("/v1/chat/completions", messages=CHAT, max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(alone) == 3 and alone[0]["top_logprobs"] == []


def test_generate_speaks_sglangs_format(served):
    body = served.post("/generate", text="hi", rid="mine", sampling_params={"max_new_tokens": 3}, return_logprob=True, logprob_start_len=0,
                       top_logprobs_num=1, return_text_in_logprobs=True).json()
    assert body["text"] == "abc" and len(body["output_ids"]) == 3
    meta = body["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 3) and meta["e2e_latency"] > 0 and "cached_tokens" in meta
    assert [e[2] for e in meta["input_token_logprobs"]] == ["h", "i"] and meta["input_token_logprobs"][0][0] is None
    assert [e[0] for e in meta["output_token_logprobs"]] == [-0.5] * 3 and meta["output_top_logprobs"][0][0][0] == -0.5
    bare = served.post("/generate", text="hi", sampling_params={"max_new_tokens": 3}, return_logprob=True).json()["meta_info"]
    assert bare["output_token_logprobs"][0][2] is None and bare["input_token_logprobs"] == []


def test_generate_takes_lists_with_one_value_for_all_or_one_each(served):
    body = served.post("/generate", text=["hi", "ho"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}], rid=["x", "y"],
                       return_logprob=[True, False]).json()
    assert [b["text"] for b in body] == ["a", "ab"] and [b["meta_info"]["id"] for b in body] == ["x", "y"]
    assert ["output_token_logprobs" in b["meta_info"] for b in body] == [True, False]
    assert len(served.post("/generate", input_ids=[71, 72], sampling_params={"n": 2, "max_new_tokens": 1}).json()) == 2
    assert served.post("/generate", input_ids=[71, 72], sampling_params={"max_new_tokens": 1}).json()["meta_info"]["prompt_tokens"] == 2
    check_refused(served.post("/generate", text=["a", "b"], rid=["x"]), param="rid")
    check_refused(served.post("/generate", text="a", input_ids=[1]))
    check_refused(served.post("/generate"))
    check_refused(served.post("/generate", text="a", sampling_params={"max_tokns": 1}), param="max_tokns")
    check_refused(served.post("/generate", text="a", sampling_params={"logprobs": 1}), names="return_logprob")
    check_refused(served.post("/generate", text="a", sampling_params={"temperature": -1}), param="temperature")
    for fields in ({"top_logprobs_num": 2}, {"top_logprobs_num": -1, "return_logprob": True}, {"logprob_start_len": -2},
                   {"text": ["a", "b"], "top_logprobs_num": [2, 0], "return_logprob": [False, True]}):
        check_refused(served.post("/generate", **{"text": "a", **fields}), param=next(n for n in fields if n not in ("text",)))
    assert served.post("/generate", text=["a", "b"], top_logprobs_num=2, return_logprob=[False, True]).status_code == 200


def test_scheduling_fields_reach_the_engine(served):
    served.post("/v1/completions", prompt="hi", priority=7, routing_key="k", cache_salt="s", extra_key="x")
    got = served.stats()["last_params"]
    assert got["priority"] == 7 and got["routing_key"] == "k" and got["namespace"] == "s\0x"
    check_refused(served.post("/v1/completions", prompt="hi", cache_salt="a\0b"), param="cache_salt")


# ----------------------------------------------------------------------------------------------------------------------- streams

def test_F169_usage_comes_in_a_chunk_of_its_own_before_done(served, api_case):
    """F169"""
    events = served.events("/v1/chat/completions", messages=CHAT, max_tokens=6, stream_options={"include_usage": True})
    usage = events[-1]["usage"]
    assert events[-1]["choices"] == [] and usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert all(e["usage"] is None for e in events[:-1])
    assert all("usage" not in e for e in served.events("/v1/chat/completions", messages=CHAT, max_tokens=6))
    continuous = served.events("/v1/completions", prompt="hi", max_tokens=3,
                               stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [e["usage"]["completion_tokens"] for e in continuous] == [1, 2, 3, 3]


def test_F171_each_of_n_choices_has_its_role_its_end_and_its_index(served):
    """F171"""
    events = served.events("/v1/chat/completions", messages=CHAT, max_tokens=12, n=3)
    choices = [c for e in events for c in e["choices"]]
    assert {c["index"] for c in choices} == {0, 1, 2}
    for index in range(3):
        mine = [c for c in choices if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and all("role" not in c["delta"] for c in mine[1:])
        assert [c["finish_reason"] for c in mine].count("length") == 1 and mine[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in mine) == "abcdefghijklmn"[index:index + 12]


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 9, "stop": ["gh"], "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 4, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 7, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}),
])
def test_streamed_and_plain_answers_say_the_same(served, path, body):
    check_stream(served.events(path, stream_options={"include_usage": True}, **body), served.post(path, **body).json())


def check_stream(events: list, plain: dict) -> None:
    """The events of an OpenAI stream say what the plain answer says."""
    choices = [c for e in events for c in e["choices"]]
    for choice in plain["choices"]:
        mine = [c for c in choices if c["index"] == choice["index"]]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in mine) == text
        assert mine[-1]["finish_reason"] == choice["finish_reason"] and mine[-1]["matched_stop"] == choice["matched_stop"]
        for key in choice["logprobs"] or ():
            if key != "refusal":
                check_alike([x for c in mine if c["logprobs"] for x in c["logprobs"][key]], choice["logprobs"][key])
    for key in ("prompt_tokens", "completion_tokens"):
        assert events[-1]["usage"][key] == plain["usage"][key]


def check_alike(got, expected) -> None:
    """Two pieces of JSON are equal but for what rounding makes of logprobs, and for names and times of an answer."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        got, expected = ([part[key] for key in sorted(part) if key not in ("id", "created", "e2e_latency")] for part in (got, expected))
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            check_alike(one, other)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, abs=1e-4)
    else:
        assert got == expected


def test_native_stream_is_cumulative(served):
    events = served.events("/generate", text="SLOW", sampling_params={"max_new_tokens": 3})
    assert [e["text"] for e in events] == ["a", "ab", "abc"] and "index" not in events[0]
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True, True, False]
    many = served.events("/generate", text=["hi", "ho"], sampling_params={"max_new_tokens": 3})
    assert {e["index"] for e in many} == {0, 1}


def test_a_stream_that_fails_says_so_and_hurts_nobody_else(served):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.events, "/v1/completions", prompt="other SLOW", max_tokens=40)
        text = served.post("/v1/completions", prompt="FAIL", max_tokens=9, stream=True).text
        pieces = [json.loads(line[6:]) for line in text.split("\n\n") if line]
        assert "".join(p["choices"][0]["text"] for p in pieces[:-1]) == "abc"
        assert pieces[-1]["error"]["message"] == "the fake engine failed on this request" and "[DONE]" not in text
        assert len(other.result()) == 40
    check_refused(served.post("/v1/completions", prompt="REJECT"), param="prompt", names="no room")


def test_a_step_that_raises_costs_its_requests_only(served):
    response = served.post("/v1/completions", prompt="RAISE", max_tokens=9, stream=True)
    assert "a bug in step" in response.text and "[DONE]" not in response.text
    check_refused(served.post("/v1/completions", prompt="BROKEN"), status=500)
    assert "surrogates not allowed" in served.post("/v1/completions", prompt="UNFIT", max_tokens=9, stream=True).text
    served.alive()


# ------------------------------------------------------------------------------------------------ aborts, queue, time-outs, health

@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["MUTE", "SLOW", "WAIT"])
def test_abort_request_ends_a_request_by_the_id_it_was_given(served, stream, prompt):
    """Running without a token yet, in the middle of its answer, and waiting; /generate and OpenAI's routes."""
    for path, body in (("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 400}}),
                       ("/v1/completions", {"prompt": prompt, "max_tokens": 400}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400})):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            other = pool.submit(served.post, "/v1/completions", prompt="SLOW", max_tokens=30, rid="other")
            assert wait_until(lambda: served.stats()["running"] == 1)
            answer = pool.submit(served.post, path, **body, stream=stream, rid="mine")
            assert wait_until(lambda: served.stats()["running"] + served.stats()["waiting"] == 2)
            assert served.post("/abort_request", rid="mine").json() == {"aborted": 1}
            assert answer.result().status_code == 200
            events = parse_events(answer.result().text) if stream else [answer.result().json()]
            if path == "/generate":
                assert events[-1]["meta_info"]["id"] == "mine" and events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            else:
                assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["abort"]
            assert other.result().json()["choices"][0]["finish_reason"] == "length"
        assert served.stats()["running"] == 0
    served.alive()


def test_abort_request_takes_all_samples_of_an_id_and_no_other(served):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = pool.submit(served.post, "/generate", text=["SLOW", "SLOW"], rid="a", sampling_params={"max_new_tokens": 300, "n": 2})
        other = pool.submit(served.post, "/generate", text="SLOW", rid="ab", sampling_params={"max_new_tokens": 60})
        assert wait_until(lambda: served.stats()["running"] == 5)
        assert served.post("/abort_request", rid="a-1-0").json() == {"aborted": 1}
        assert served.post("/abort_request", rid="a").json()["aborted"] in (3, 4)
        assert [b["meta_info"]["finish_reason"]["type"] for b in both.result().json()] == ["abort"] * 4
        assert other.result().json()["meta_info"]["finish_reason"]["type"] == "length"
        assert served.post("/abort_request", rid="a").json() == served.post("/abort_request", abort_all=True).json() == {"aborted": 0}


def test_abort_all(served):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(served.post, "/v1/completions", prompt=p, max_tokens=400) for p in ("SLOW", "MUTE", "WAIT")]
        assert wait_until(lambda: served.stats()["running"] + served.stats()["waiting"] == 3)
        assert served.post("/abort_request", abort_all=True).json() == {"aborted": 3}
        assert {a.result().json()["choices"][0]["finish_reason"] for a in answers} == {"abort"}
    for body in ({}, {"rid": "x", "abort_all": True}, {"rid": 5}, {"abort_all": "yes"}, {"rids": ["x"]}):
        check_refused(served.post("/abort_request", **body))


def test_a_hold_is_named_by_its_clients_id_long_after_it_has_ended(served):
    def asked(**body):
        answer = served.post("/generate", **body)
        assert answer.status_code == 200, answer.text
        return answer.json(), served.stats()["last_hold"]

    zero = {"max_new_tokens": 0}
    answer, hold = asked(text="the prefix", rid="mine", children=2, sampling_params=zero)
    assert answer["meta_info"]["prompt_tokens"] == len("the prefix") - 1, "the last token of a text may be another one in the children"
    assert hold["children"] == 2 and hold["parent"] == "" and answer["meta_info"]["id"] == "mine"
    answer, child = asked(text="the prefix and more", parent="mine", sampling_params={"max_new_tokens": 3})
    assert answer["text"] == "abc" and (child["parent"], child["children"]) == (hold["rid"], 0) and hold["rid"] != "mine"
    assert asked(text="x", parent=hold["rid"], sampling_params=zero)[1]["parent"] == "", "nobody can name what is another's"
    answer, own = asked(input_ids=[5, 6, 7], rid="mine", children=1, sampling_params=zero)
    assert answer["meta_info"]["prompt_tokens"] == 3 and served.stats()["released"][-1:] == [hold["rid"]], "the name means the new one"
    assert served.post("/abort_request", rid="mine").json() == {"aborted": 1} and served.post("/abort_request", rid="mine").json() == {"aborted": 0}
    assert wait_until(lambda: served.stats()["released"][-1:] == [own["rid"]])
    assert asked(text="x", parent="mine", sampling_params=zero)[1]["parent"] == ""
    asked(text=["ab", "cd"], rid="two", children=1, sampling_params=zero)
    assert served.post("/abort_request", rid="two-1").json() == {"aborted": 1} and served.post("/abort_request", abort_all=True).json() == {"aborted": 1}


def test_only_the_first_request_of_a_call_is_a_child(served):
    served.post("/generate", text="p", rid="family", children=3, sampling_params={"max_new_tokens": 0})
    name = served.stats()["last_hold"]["rid"]
    served.post("/generate", text=["a"], parent="family", sampling_params={"max_new_tokens": 1})
    assert served.stats()["last_hold"]["parent"] == name
    served.post("/generate", text=["a", "b"], parent="family", sampling_params={"max_new_tokens": 1, "n": 2})
    assert served.stats()["last_hold"]["parent"] == ""
    served.post("/score", text="a", choices=["b"], parent="family")
    assert served.stats()["last_hold"]["parent"] == name
    served.post("/abort_request", rid="family")


@pytest.mark.parametrize("body, param, names", [
    (dict(children=-1, sampling_params={"max_new_tokens": 0}), "children", "got -1"),
    (dict(children=2), "children", "give max_tokens 0"), (dict(children=2, sampling_params={"max_new_tokens": 5}), "children", "max_tokens 5"),
    (dict(children="2"), "children", "expected int"), (dict(parent=7), "parent", "expected str"), (dict(child=1), "child", "did you mean 'children'")])
def test_holds_that_cannot_be_are_refused(served, body, param, names):
    check_refused(served.post("/generate", text="hi", **body), param=param, names=names)


def test_scores(served):
    """The fake engine finds each token but a prompt's first at -1."""
    answer = served.post("/score", text="the sky is ", choices=["blue", "red"], unconditional=True).json()
    assert answer == {"scores": [
        {"text": "blue", "token_ids": [65, 75, 84, 68], "logprobs": [-1.0] * 4, "unconditional_logprobs": [None, -1.0, -1.0, -1.0]},
        {"text": "red", "token_ids": [81, 68, 67], "logprobs": [-1.0] * 3, "unconditional_logprobs": [None, -1.0, -1.0]}],
        "usage": {"prompt_tokens": 15 + 14 + 4 + 3, "completion_tokens": 0, "total_tokens": 36, "prompt_tokens_details": {"cached_tokens": 0}}}
    answer = served.post("/score", text="a", choices=["b"], model="fake", rid="r", cache_salt="s", extra_key="k", priority=2, routing_key="q", user="me").json()
    assert [score["unconditional_logprobs"] for score in answer["scores"]] == [None]
    got = served.stats()["last_params"]
    assert (got["priority"], got["routing_key"], got["namespace"], got["max_tokens"]) == (2, "q", "s\0k", 0)
    served.alive()


@pytest.mark.parametrize("body, param, names", [
    (dict(text="a", choices=[]), "choices", "one or more"), (dict(text="a", choices=["b", ""]), "choices", "'' adds no token"),
    (dict(text="a", choices="b"), "choices", "expected array"), (dict(text="a", choices=["b"] * 1025), "choices", "at most 1024"),
    (dict(text="a" * 300, choices=["b" * 300]), "prompt", "at most"), (dict(text="a", choices=["b"], stream=True), "stream", "must be false"),
    (dict(text="a", choices=["b"], rid=["x"]), "rid", "a string"), (dict(text=["a"], choices=["b"]), "text", "expected str"),
    (dict(text="a", choices=["b"], temperature=0), "temperature", "unknown field"), (dict(text="a", choices=["b"], choises=1), "choises", "'choices'?"),
    (dict(choices=["b"]), None, "text"), (dict(text="a", choices=["b"], cache_salt="\0"), "cache_salt", "NUL"),
    (dict(text="a", choices=["REJECT"]), "prompt", "no room"), (dict(text="x" * 500, choices=["y" * 12] * 1000 + ["z" * 13]), "prompt", "at most")])
def test_scores_that_cannot_be_are_refused(served, body, param, names):
    check_refused(served.post("/score", **body), param=param, names=names)


def test_the_work_of_a_call_of_scores_is_bounded():
    reader = make_reader()
    with pytest.raises(RequestError, match="at most 8388608 go into one call"):
        reader.score(json.dumps({"text": "x" * 90_000, "choices": [str(n) for n in range(100)]}).encode())


def test_a_score_of_another_model_and_a_request_that_fails(served):
    check_refused(served.post("/score", text="a", choices=["b"], model="gpt"), status=404, param="model")
    check_refused(served.post("/score", text="a", choices=["BROKEN"]), status=500)


def test_a_request_that_was_too_late_is_an_error_and_its_text_no_answer(served):
    check_refused(served.post("/v1/completions", prompt="LATE", max_tokens=9), status=504, names="longer than it may")
    check_refused(served.post("/generate", text="LATE", sampling_params={"max_new_tokens": 9}), status=504)
    text = served.post("/v1/completions", prompt="LATE", max_tokens=9, stream=True).text
    pieces = [json.loads(line[6:]) for line in text.split("\n\n") if line]
    assert "".join(p["choices"][0]["text"] for p in pieces[:-1]) == "abc" and all(p["choices"][0]["finish_reason"] is None for p in pieces[:-1])
    assert pieces[-1]["error"]["code"] == 504 and "[DONE]" not in text


def test_a_full_queue_is_answered_503_and_takes_calls_again_later():
    with Served("--max-queued-requests", "2") as own, concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(own.post, "/v1/completions", prompt="SLOW", max_tokens=400, rid="runs")
        assert wait_until(lambda: own.stats()["running"] == 1)
        waiting = [pool.submit(own.post, "/v1/completions", prompt="WAIT", max_tokens=1) for _ in range(2)]
        assert wait_until(lambda: own.stats()["waiting"] == 2)
        for stream in (False, True):
            refused = own.post("/v1/completions", prompt="hi", stream=stream)
            check_refused(refused, status=503, names="--max-queued-requests")
            assert refused.headers["retry-after"] == "1"
        check_refused(own.post("/v1/completions", prompt="hi", n=3), status=503)
        assert own.client.get("/health_generate").status_code == 200
        own.post("/abort_request", rid="runs")
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
        own.post("/abort_request", abort_all=True)
        assert {w.result().status_code for w in waiting} == {200}
        assert own.post("/v1/completions", prompt="hi", n=5, max_tokens=1).status_code == 200, "an empty queue takes any call"
        own.alive()


def test_of_a_burst_only_what_must_wait_is_refused():
    with Served("--max-queued-requests", "1") as own, concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: own.post("/v1/completions", prompt="hi SLOW", max_tokens=5), range(20)))
        assert {a.status_code for a in answers} == {200}
        blocked = pool.submit(own.post, "/v1/completions", prompt="SLOW", max_tokens=60)
        assert wait_until(lambda: own.stats()["running"] == 1)
        answers = list(pool.map(lambda n: own.post("/v1/completions", prompt="WAIT", max_tokens=1, stream=n % 2 == 0), range(12)))
        assert [a.status_code for a in answers].count(200) == 1 and {a.status_code for a in answers} == {200, 503}
        assert blocked.result().status_code == 200


def test_health_generate_makes_a_token_that_counts_nowhere(served):
    before = served.stats()
    assert served.client.get("/health_generate").json() == {"status": "ok"}
    after = served.stats()
    assert after == {**before, **{name: after[name] for name in ("last_params", "last_hold")}}
    assert served.stats()["last_params"]["max_tokens"] == 1 and served.stats()["last_params"]["namespace"].startswith("\0\0")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        running = pool.submit(served.post, "/v1/completions", prompt="SLOW", max_tokens=60)
        assert wait_until(lambda: served.stats()["running"] == 1)
        assert {r.status_code for r in pool.map(lambda _: served.client.get("/health_generate"), range(4))} == {200}
        assert running.result().status_code == 200 and served.stats()["finished"] == before["finished"] + 1


def test_health_generate_is_red_while_no_token_comes():
    with Served(FAKE_HEALTH_TIMEOUT="0.5") as own, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(own.post, "/v1/completions", prompt="MUTE")
        assert wait_until(lambda: own.stats()["running"] == 1)
        refused = own.client.get("/health_generate")
        check_refused(refused, status=503, names="makes no tokens")
        assert refused.headers["retry-after"] == "1" and own.client.get("/health").status_code == 200
        own.post("/abort_request", abort_all=True)
        assert stuck.result().status_code == 200 and own.client.get("/health_generate").status_code == 200
        assert own.stats()["finished"] == 1


def test_a_probe_outlives_the_requests_it_waited_for(served):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(served.post, "/v1/completions", prompt="MUTE")
        assert wait_until(lambda: served.stats()["running"] == 1)
        probes = [pool.submit(served.client.get, "/health_generate") for _ in range(2)]
        time.sleep(0.2)
        served.post("/abort_request", abort_all=True)
        assert stuck.result().status_code == 200 and {p.result().status_code for p in probes} == {200}


# --------------------------------------------------------------------------------------------------------------------- bad input

def test_F173_a_bad_request_for_a_stream_is_answered_400(served, api_case):
    """F173: the status comes before the stream, also where only the engine knows."""
    response = served.client.post("/v1/chat/completions", json={**api_case("F173")["request"]["body"], "model": "fake"})
    check_refused(response, param="max_tokens")
    check_refused(served.post("/v1/completions", prompt="REJECT", stream=True), param="prompt")
    check_refused(served.post("/v1/completions", prompt=["hi", "REJECT"], stream=True), param="prompt")
    assert wait_until(lambda: served.stats()["running"] == 0), "of a call that is refused nothing may stay"


def test_F177_counts_are_checked_before_anything_is_built(served, api_case):
    """F177"""
    start = time.monotonic()
    check_refused(served.client.post("/v1/completions", json={**api_case("F177")["request"]["body"], "model": "fake"}), param="n")
    assert time.monotonic() - start < 2
    check_refused(served.post("/v1/completions", prompt="hi", best_of=1000000), param="best_of")
    start = time.monotonic()
    check_refused(served.post("/v1/completions", prompt=["hi"] * 100000), param="prompt", names="1024")
    assert time.monotonic() - start < 5
    check_refused(served.post("/v1/completions", prompt=["hi"] * 1000, n=100, max_tokens=1), param="n", names="4096")
    served.alive()


def test_F183_token_ids_outside_the_vocabulary_are_refused(served):
    """F183"""
    vocab = served.client.get("/get_model_info").json()["vocab_size"]
    for prompt in ([-1], [vocab], [1, 2.5], ["a", 1], [[1], [99999999]], [1, [2]], [True], [[]], [], [None], {}, 5, [[1, "a"]]):
        check_refused(served.post("/v1/completions", prompt=prompt, max_tokens=2), param="prompt")
    assert served.post("/v1/completions", prompt=[33, 28], max_tokens=2).json()["usage"]["prompt_tokens"] == 2
    served.alive()


def test_F187_unusual_message_lists(served):
    """F187"""
    for messages in ([], "hi", [5], [{"content": "x"}], [{"role": "user"}], [{"role": "wizard", "content": "x"}],
                     [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}],
                     [{"role": "user", "content": "x", "tool": []}], [{"role": ["user"], "content": "x"}], {}, 1):
        check_refused(served.post("/v1/chat/completions", messages=messages), param="messages")
    check_refused(served.post("/v1/chat/completions", messages=None), param="messages")
    check_refused(served.post("/v1/chat/completions"), param="messages")
    for role in ("assistant", "system", "developer"):
        assert served.post("/v1/chat/completions", messages=[{"role": role, "content": "x"}], max_tokens=1).status_code == 200
    served.alive()


def test_content_parts_are_joined_and_images_refused_by_name(served):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    joined = served.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1).json()["usage"]
    assert joined["prompt_tokens"] == len("user\nWhat is this?\nassistant\n") + 3
    image = {"type": "image_url", "image_url": {"url": "http://example.com/cat.png"}}
    check_refused(served.post("/v1/chat/completions", messages=[{"role": "user", "content": [image]}]), param="messages", names="image_url")


def test_F191_errors_have_the_outer_object_and_name_the_field(served, api_case):
    """F191"""
    check_refused(served.client.post("/v1/chat/completions", json={**api_case("F191")["request"]["body"], "model": "fake"}), param="temperature")
    check_refused(served.client.get("/v1/nothing"), status=404)
    refused = served.client.get("/v1/chat/completions")
    check_refused(refused, status=405)
    assert refused.headers["allow"] == "POST"


def test_F193_models_are_listed_and_others_refused(served, api_case):
    """F193: a missing model is the one that is served."""
    response = served.client.post("/v1/chat/completions", json=api_case("F193")["request"]["body"])
    check_refused(response, status=404, param="model", names="'fake'")
    assert [m["id"] for m in served.client.get("/v1/models").json()["data"]] == ["fake"]
    assert served.client.get("/v1/models/fake").json()["id"] == "fake"
    check_refused(served.client.get("/v1/models/org/other"), status=404, param="model")


def test_F207_seeds(served, api_case):
    """F207"""
    for seed in (1.5, "1", True, [1]):
        check_refused(served.post("/v1/completions", prompt="hi", seed=seed), param="seed")
    for seed in (18446744073709551616, -1, 2**63, 2**200, 0):
        assert served.post("/v1/completions", prompt="hi", max_tokens=3, seed=seed).status_code == 200
    served.alive()


def test_F201_a_hopeless_prompt_is_refused_before_it_is_tokenised_and_nobody_waits(served):
    """F201"""
    words = "word " * 1_000_000
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stream = pool.submit(time_gaps, served.url)
        big = pool.submit(served.post, "/v1/chat/completions", messages=[{"role": "user", "content": words}], max_tokens=2)
        for _ in range(10):
            start = time.monotonic()
            assert served.client.get("/health").status_code == 200 and time.monotonic() - start < 1
        check_refused(big.result(), param="prompt", names="characters")
        assert max(stream.result()) < 2
    served.alive()


def time_gaps(url: str) -> list[float]:
    """Seconds between the events of a slow stream."""
    times = []
    with httpx.stream("POST", url + "/v1/completions", json={"prompt": "SLOW", "max_tokens": 60, "stream": True}, timeout=30) as response:
        for line in response.iter_lines():
            times.append(time.monotonic())
    return [b - a for a, b in zip(times, times[1:])]


def test_unknown_and_unsupported_fields_are_refused_by_name(served):
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": CHAT})):
        for name in ("nonsense", "prompt_logprobs", "max_new_tokens", "tools", "response_format", "suffix", "chat_template", "guided_json"):
            check_refused(served.post(path, **body, **{name: "x"}), param=name, names=name)
        check_refused(served.post(path, **body, temprature=1), names="temperature")
        check_refused(served.post(path, **body, stream_options={"include_usage": True}), param="stream_options")
        check_refused(served.post(path, **body, stream=True, stream_options={"nonsense": 1}), param="stream_options")
        neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "suffix": None, "logit_bias": None}
        assert served.post(path, **body, max_tokens=1, **neutral, **dict.fromkeys(api.NO_EFFECT, "x")).status_code == 200
    check_refused(served.post("/v1/chat/completions", messages=CHAT, echo=True), param="echo")
    check_refused(served.post("/v1/chat/completions", messages=CHAT, top_logprobs=2), param="top_logprobs")
    check_refused(served.post("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=21), param="top_logprobs")
    check_refused(served.post("/v1/chat/completions", messages=CHAT, max_completion_tokens=-1), param="max_completion_tokens")
    check_refused(served.post("/v1/chat/completions", messages=CHAT, chat_template_kwargs={"messages": []}), param="chat_template_kwargs")
    check_refused(served.post("/generate", text="hi", image_data="x"), param="image_data")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_by_name(served, name, value):
    for path, raw in (("/v1/completions", f'{{"prompt":"hi","max_tokens":4,"{name}":{value}}}'),
                      ("/generate", f'{{"text":"hi","sampling_params":{{"{name}":{value}}}}}')):
        response = served.client.post(path, content=raw, headers={"content-type": "application/json"})
        check_refused(response, names=name)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "hi"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
                                 b'{"prompt": "hi"} x', b'{"prompt": ' + b"[" * 100_000, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
                                 b'{"seed": ' + b"9" * 100_000 + b"}", b"\x00\x01", b"{'prompt': 'hi'}"])
def test_bodies_that_are_not_json_objects_are_refused(served, raw):
    check_refused(served.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"}))


def test_content_type_must_be_json(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        check_refused(served.client.post("/v1/completions", content=b'{"prompt": "hi"}', headers={"content-type": kind}), names="application/json")
    good = served.client.post("/v1/completions", content=b'{"prompt": "hi"}', headers={"content-type": "Application/JSON; charset=utf-8"})
    assert good.status_code == 200


def test_a_compressed_body_is_refused(served):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check_refused(served.client.post("/v1/completions", content=gzip.compress(b'{"prompt": "hi"}'), headers=headers), names="gzip")


def test_a_body_over_8_mib_is_refused_before_it_has_arrived(served):
    check_refused(served.client.post("/v1/completions", json={"prompt": "x" * (9 << 20)}), status=413)
    with connect(served) as sock:
        sock.sendall(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
    just_fits = served.client.post("/v1/completions", json={"prompt": "x" * ((8 << 20) - 100)})
    check_refused(just_fits, param="prompt")
    served.alive()


def test_a_chunked_body_of_a_gigabyte_is_never_held(served):
    """It is refused after 8 MiB; a client that goes on sending all the same is cut off, or what it sends is dropped."""
    def memory() -> int:
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{served.process.pid}/status").read_text())[1]) >> 10
    before, sent = memory(), 0
    with connect(served) as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sock.settimeout(5)
        with contextlib.suppress(OSError):
            while sent < 1024:
                sock.sendall(piece)
                sent += 1
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
    assert memory() - before < 100, f"{memory() - before} MiB for {sent} MiB"
    served.alive()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_chat_template_from_the_request_is_refused(served, api_case):
    """F205: by name, in either place."""
    body = {**api_case("F205")["request"]["body"], "model": "fake"}
    check_refused(served.client.post("/v1/chat/completions", json=body), param="chat_template")
    del body["chat_template"]
    check_refused(served.client.post("/v1/chat/completions", json=body), param="chat_template_kwargs", names="chat_template")


def test_two_requests_cannot_share_an_id(served):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.post, "/generate", text="SLOW", rid="same", sampling_params={"max_new_tokens": 50})
        assert wait_until(lambda: served.stats()["running"] == 1)
        check_refused(served.post("/generate", text="hi", rid="same"), param="rid")
        assert first.result().status_code == 200
    assert served.post("/generate", text="hi", rid="same").status_code == 200
    check_refused(served.post("/generate", text=["a", "b"], rid=["x", "x"]), param="rid")


# -------------------------------------------------------------------------------------------------------------------- disconnects

@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(served, stream):
    """F023, F025: streamed or plain, before or after the first token."""
    for prompt in ("MUTE", "SLOW"):
        before = served.stats()["aborted"]
        with socket.create_connection(served.url.removeprefix("http://").split(":")) as sock:
            body = json.dumps({"prompt": prompt, "max_tokens": 400, "n": 3, "stream": stream}).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert wait_until(lambda: served.stats()["running"] == 3)
            if stream and prompt == "SLOW":
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert wait_until(lambda: served.stats()["running"] == 0)
        assert served.stats()["aborted"] - before == 3


def test_a_finished_request_is_not_aborted(served):
    before = served.stats()["aborted"]
    served.post("/v1/completions", prompt="hi")
    served.events("/v1/completions", prompt="hi", max_tokens=3)
    assert served.stats()["aborted"] == before


def test_twenty_clients_leave_in_the_middle_of_their_streams(served):
    """F023"""
    for _ in range(20):
        with httpx.stream("POST", served.url + "/v1/completions", json={"prompt": "SLOW", "max_tokens": 400, "stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(3):
                next(lines)
    assert wait_until(lambda: served.stats()["running"] == 0)
    served.alive()


def test_a_body_that_breaks_off_leaves_nothing(served):
    with socket.create_connection(served.url.removeprefix("http://").split(":")) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"prompt": ')
    served.alive()


# ------------------------------------------------------------------------------------------------------------- info and processes

def test_info_routes(served):
    info = served.client.get("/get_model_info").json()
    assert info == served.client.get("/model_info").json()
    pair = ["<|im_start|>{}\n", "<|im_end|>\n"]
    assert info["chat_roles"] == {role: [part.format(role) for part in pair] for role in ("system", "user", "assistant")} | {
        "default_system": "", "source": "template"}
    assert info["model_path"] == "fake" and info["is_generation"] is True and info["context_length"] == 512
    for path in ("/get_server_info", "/server_info"):
        body = served.client.get(path).json()
        assert body["stats"]["running"] == 0 and body["model"] == "fake" and body["log_level"] == "info"
        assert body["port"] == int(served.url.rpartition(":")[2]) and body["served_model_name"] == "fake", "what is in force, not what was given"


def test_flush_cache_refuses_while_requests_run(served):
    for method in (served.client.get, served.client.post):
        assert method("/flush_cache").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, "/v1/completions", prompt="SLOW", max_tokens=150)
        assert wait_until(lambda: served.stats()["running"] == 1)
        check_refused(served.client.post("/flush_cache"))
        running.result()


def test_log_says_how_to_ask_and_has_a_line_while_serving():
    with Served("--served-model-name", "org/name") as own:
        command = re.search(r"curl .*", own.log)[0]
        assert '"model": "org/name"' in command
        argv = shlex.split(command)                                  # sent with httpx: a machine without curl passes the tests too
        out = own.client.post(argv[1], content=argv[argv.index("-d") + 1], headers=[argv[argv.index("-H") + 1].split(": ")])
        assert out.json()["choices"][0]["message"]["content"].startswith("abc")
        own.post("/v1/completions", model="org/name", prompt="SLOW", max_tokens=80)
        own.process.send_signal(signal.SIGTERM)
        own.log += own.process.stderr.read()
        assert own.process.wait(20) == 0
    line = r"running 1, queued 0 \| \d+ tok/s out, \d+ tok/s computed \| prefix hits \d+% \| KV 5% in use, 5% cached"
    assert re.search(line, own.log), own.log


def check_gone(own: Served, child: int, directory: Path) -> None:
    assert own.process.wait(20) == 0
    assert not directory.exists() and not Path(f"/proc/{child}").exists()


def test_a_signal_ends_everything_and_leaves_nothing_behind():
    with Served() as own:
        child, directory = own.child, own.directory
        assert directory.stat().st_mode & 0o777 == 0o700
        own.process.send_signal(signal.SIGINT)
        check_gone(own, child, directory)


def test_a_signal_while_the_model_loads_leaves_nothing_behind():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "TMPDIR": directory}
        with subprocess.Popen([sys.executable, str(HERE / "fake_engine.py"), "serve", "--port", "0"], stderr=subprocess.PIPE, text=True,
                              env=env) as process:
            assert "listening" in process.stderr.readline()
            assert wait_until(lambda: os.listdir(directory), 10)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()
        assert not os.listdir(directory)


def test_a_signal_lets_open_calls_finish_and_says_how_many():
    with Served() as own, concurrent.futures.ThreadPoolExecutor(1) as pool:
        child, directory = own.child, own.directory
        answer = pool.submit(own.post, "/v1/completions", prompt="SLOW", max_tokens=60, n=2)
        assert wait_until(lambda: own.stats()["running"] == 2)
        own.process.send_signal(signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == 120
        check_gone(own, child, directory)
        assert "shutting down; requests still running: 2; they get 20 s to finish" in own.log + own.process.stderr.read()


def test_calls_that_do_not_finish_in_time_get_an_error():
    with Served("--drain-timeout", "6") as own, concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(own.post, "/v1/completions", prompt="MUTE", stream=False)
        streamed = pool.submit(own.post, "/v1/completions", prompt="SLOW", max_tokens=400, stream=True)
        assert wait_until(lambda: own.stats()["running"] == 2)
        start = time.monotonic()
        assert own.end(signal.SIGTERM) == 0 and 5 < time.monotonic() - start < 10
        check_refused(plain.result(), status=503, names="shut down")
        assert all(said in own.log for said in ("they get 6 s to finish", "they get 1 s to finish", "ending; requests that were still running: 2"))
        assert "shut down" in streamed.result().text and "[DONE]" not in streamed.result().text


def test_a_second_signal_does_not_wait():
    with Served() as own, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own.post, "/v1/completions", prompt="MUTE")
        assert wait_until(lambda: own.stats()["running"] == 1)
        own.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        own.process.send_signal(signal.SIGINT)
        check_refused(answer.result(), status=503)
        assert own.process.wait(4) == 0


def test_the_child_goes_with_a_parent_that_is_killed():
    with Served() as own:
        child, directory = own.child, own.directory
        own.process.kill()
        assert wait_until(lambda: not Path(f"/proc/{child}").exists(), 5) and not directory.exists()


def test_the_last_word_of_a_dead_child_does_not_make_the_server_ready():
    """It was sent before the child died and is read after: calls that were let in now would have no engine."""
    async def state(returncode: int | None) -> str:
        engine = process.EngineProcess(["none"])
        ready = Ready(model="m", path="p", vocab_size=1, context_len=1, max_total_tokens=1, end_ids=[], tokenizer_json="", chat_template=None,
                      special_tokens={}, generation_defaults={}, config={})
        frames = [process.encode([ready])]

        async def recv() -> bytes:
            return frames.pop() if frames else await asyncio.Event().wait()
        engine._process, engine._events = types.SimpleNamespace(returncode=returncode), types.SimpleNamespace(recv=recv)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine._listen(), 0.05)
        assert engine.settled.is_set() == (engine.state == "ready")
        return engine.state
    assert (asyncio.run(state(None)), asyncio.run(state(3))) == ("ready", "starting")


def test_a_child_that_dies_gives_every_call_an_error_and_another_takes_its_place():
    with Served(FAKE_RESTART_DELAY="1") as own, concurrent.futures.ThreadPoolExecutor(2) as pool:
        child, directory = own.child, own.directory
        streamed = pool.submit(own.post, "/v1/completions", prompt="SLOW one", max_tokens=400, stream=True)
        plain = pool.submit(own.post, "/v1/completions", prompt="SLOW two", max_tokens=400)
        assert wait_until(lambda: own.stats()["running"] == 2)
        crashed = own.post("/v1/completions", prompt="CRASH")
        check_refused(crashed, status=503, names="has died (exit code 3)")
        check_refused(plain.result(), status=503)
        last = json.loads(streamed.result().text.rstrip().rpartition("data: ")[2])
        assert "has died" in last["error"]["message"] and "[DONE]" not in streamed.result().text
        for path in ("/health", "/health_generate", "/v1/models", "/get_server_info"):
            refused = own.client.get(path)
            check_refused(refused, status=503, names="is being started again")
            assert int(refused.headers["retry-after"]) >= 1
        for stream in (False, True):
            refused = own.post("/v1/completions", prompt="hi", stream=stream)
            check_refused(refused, status=503)
            assert "retry-after" in refused.headers
        check_refused(own.post("/abort_request", abort_all=True), status=503)
        assert own.client.get("/v1/nothing").status_code == 404
        assert wait_until(lambda: own.client.get("/health").status_code == 200, 20)
        own.alive()
        assert own.events("/v1/completions", prompt="hi", max_tokens=3) and own.child != child and not directory.exists()
        directory = own.directory
        assert own.end() == 0 and not directory.exists()
        assert "has died (exit code 3)" in own.log and "the engine is ready again" in own.log and "Traceback" not in own.log


def test_an_engine_that_dies_again_and_again_ends_the_server():
    with Served() as own:
        for _ in range(process.MAX_RESTARTS):
            check_refused(own.post("/v1/completions", prompt="CRASH"), status=503)
            assert wait_until(lambda: own.client.get("/health").status_code == 200, 20)
        check_refused(own.post("/v1/completions", prompt="CRASH"), status=503, names="gives up")
        own.log += own.process.stderr.read()
        assert own.process.wait(20) == 3 and f"has died {process.MAX_RESTARTS + 1} times" in own.log


def test_a_child_that_is_killed_is_replaced_and_nobody_hears_of_it_later():
    with Served() as own:
        os.kill(own.child, signal.SIGKILL)
        assert wait_until(lambda: "signal 9" in own.client.get("/health").text)
        assert wait_until(lambda: own.client.get("/health").status_code == 200, 20)
        own.alive()


def test_a_signal_while_the_engine_is_down_ends_with_a_code_that_says_so():
    with Served(FAKE_RESTART_DELAY="60") as own:
        own.post("/v1/completions", prompt="CRASH")
        assert own.end() == 3


def test_an_engine_whose_books_are_wrong_does_not_go_on():
    with Served() as own:
        assert "error" in own.post("/v1/completions", prompt="RAISE BAD").text
        assert wait_until(lambda: own.client.get("/health").status_code == 503)


def test_a_port_in_use_is_refused_with_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, "-m", "nano_sgl.server", "--port", str(port)], capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}: another server is running there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags, words", [
    (["--port", "high"], "--port"), (["--port", "99999"], "in [0, 65535]"), (["--no-such-flag", "1"], "--no-such-flag"), (["--por", "1"], "--por"),
    (["--page-size", "0"], "--page-size"), (["--page-size", "x"], "integer in [1, 64]"), (["--schedule-policy", "nonsense"], "'fcfs'"),
    (["--chunked-prefill-size", "-1"], "--chunked-prefill-size"), (["--device", "gpu"], "cuda:N"), (["--dtype", "int4"], "bfloat16"),
    (["--page-size", "16", "--chunked-prefill-size", "8"], "smaller than a page"), (["--mem-fraction-static", "nan"], "--mem-fraction-static"),
    (["--speculative-algorithm", "nextn"], "'ngram+radix'"), (["--speculative-eagle-topk", "2"], "give speculative_algorithm as well"),
    (["--max-queued-requests", "0"], "--max-queued-requests"), (["--chat-template", "none"], "--chat-template none: No such file"),
    (["--chat-template", "t.jinja"], "--chat-template t.jinja: the chat template is not valid Jinja"),
    (["--chat-template", "bytes"], "--chat-template bytes:")])
def test_a_wrong_flag_is_refused_at_once_in_one_line(flags, words, tmp_path):
    """Before torch is imported (it cannot be, here), before anything listens, and without the advice to start something again."""
    (tmp_path / "t.jinja").write_text("{% for %}")
    (tmp_path / "bytes").write_bytes(b"\xff")
    code = "import sys; sys.modules['torch'] = None; from nano_sgl import server; sys.exit(server.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=30,
                          env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    assert done.returncode in (1, 2) and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "restart" not in done.stderr and "listening" not in done.stderr


def test_the_http_process_needs_no_torch():
    code = "import sys, nano_sgl.server; assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent)


# --------------------------------------------------------------------------------------------------------------------- small parts

def test_every_flag_of_the_server_has_a_reader():
    source = (HERE.parent / "nano_sgl" / "server.py").read_text()
    for f in dataclasses.fields(ServerConfig):
        assert f.metadata["help"] and f"config.{f.name}" in source, f"{f.name} is read nowhere"  # `config` is the variable's name everywhere


def test_names_that_flags_may_take_are_those_that_are_registered():
    from nano_sgl import attention, eviction, policies, spec
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(EngineConfig)}
    assert set(choices["schedule_policy"]) == set(policies.POLICIES)
    assert set(choices["attention_backend"]) <= set(attention.ATTENTION)  # tests may have registered more
    assert set(choices["radix_eviction_policy"]) == set(eviction.EVICTION)
    assert {name for joined in choices["speculative_algorithm"] for name in joined.split("+")} <= set(spec.DRAFTERS)


@pytest.mark.parametrize("config, flags, words", [
    (EngineConfig, {"page_size": True}, "page_size"), (EngineConfig, {"disable_radix_cache": 1}, "bool"), (EngineConfig, {"model": 5}, "str"),
    (EngineConfig, {"mem_fraction_static": 0.0}, "(0, 1]"), (ServerConfig, {"port": -1}, "65535"), (ServerConfig, {"host": None}, "str")])
def test_a_config_holds_values_of_the_right_type_or_none(config, flags, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        config(**flags)


@pytest.mark.parametrize("flags, words", [
    ({"speculative_num_draft_tokens": 4}, "speculative_num_draft_tokens is for speculation: give speculative_algorithm as well"),
    ({"speculative_acceptance": "rejection"}, "speculative_acceptance is for speculation"),
    ({"speculative_algorithm": "radix", "speculative_ngram_max_match_window_size": 4}, "window_size is for ngram, but speculative_algorithm is 'radix'"),
    ({"speculative_algorithm": "ngram", "speculative_ngram_max_match_window_size": 3, "speculative_ngram_min_match_window_size": 4}, "is 4, more than"),
    ({"speculative_algorithm": "ngram+radix", "disable_radix_cache": True}, "takes its guesses from the radix cache, which is disabled"),
    ({"speculative_algorithm": "ngram", "speculative_acceptance": "rejection", "speculative_eagle_topk": 2}, "one chain of guesses"),
    ({"speculative_algorithm": "ngram+own", "speculative_acceptance": "rejection"}, "one chain of guesses"),
    ({"speculative_algorithm": "radix", "speculative_acceptance": "rejection"}, "wrong for guesses of radix"),
    ({"speculative_algorithm": "ngram", "speculative_acceptance": "maybe"}, "one of target, rejection"),
    ({"speculative_algorithm": "ngram", "speculative_draft_length": "long"}, "one of adaptive, fixed"),
    ({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 64}, "an integer in [1, 63]"),
    ({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 0}, "an integer in [1, 63]"),
    ({"speculative_algorithm": "ngram", "speculative_eagle_topk": 17}, "an integer in [1, 16]"), ({"speculative_algorithm": 1}, "str")])
def test_flags_of_speculation_that_make_no_sense_are_refused(flags, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        EngineConfig(**flags)


@pytest.mark.parametrize("flags", [{"speculative_algorithm": "ngram", "disable_radix_cache": True},
                                   {"speculative_algorithm": "ngram", "speculative_acceptance": "rejection", "speculative_eagle_topk": 1},
                                   {"speculative_algorithm": "ngram+radix", "speculative_ngram_min_match_window_size": 8}], ids=str)
def test_flags_of_speculation_that_go_together(flags):
    EngineConfig(**flags)


def test_tables_do_not_overlap():
    assert not set(api.NO_EFFECT) & set(api.NOT_USED)
    for kind, here in ((api.ChatBody, {"tools", "tool_choice", "parallel_tool_calls"}), (api.CompletionBody, set()), (api.GenerateBody, set())):
        assert set(kind.__struct_fields__) & (set(api.NO_EFFECT) | set(api.NOT_USED)) == here, "what only this route has"


@pytest.mark.parametrize("raw, param, words", [
    (b'{"a": "\\ud800"}', "a", "a: a text holds half of a surrogate pair"), (b'{"a": ["x", {"b": "\\udc00"}]}', "a", "a[1].b: a text"),
    (b'{"sampling_params": {"b": NaN}}', "b", "sampling_params.b: expected a finite number, got NaN"),
    (b'{"logit_bias": {"5": -Infinity}}', "logit_bias", "logit_bias.5: expected a finite number, got -Infinity"),
    (b'{"x": [1, 1e999]}', "x", "x[1]: expected a finite number, got 1e999"),
    (b'{"x": {"y": [' + b"9" * 5000 + b"]}}", "x", "x.y[0]: expected a finite number, got an integer of 5000 digits"),
    (b"{", None, "not valid JSON"), (b'{"a": "\xff"}', None, "Invalid UTF-8")])
def test_a_json_error_names_what_it_can(raw, param, words):
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        api.read_json(raw)
    assert caught.value.param == param


@pytest.mark.parametrize("message, words", [
    ({"role": "user", "content": 5}, "messages[1].content: expected str or array or null, got int (5)"),
    ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0]: it lacks the field function"),
    ({"role": "user", "content": None}, "messages[1].content: null or missing"), ({"role": "user"}, "messages[1].content: null or missing"),
    ({"role": "user", "content": ["x"]}, "messages[1].content[0]: expected object, got str ('x')"),
    ({"content": "x"}, "messages[1]: it lacks the field `role`".replace("`", "")), ("x", "messages[1]: expected object, got str ('x')"),
    ({"role": "user", "content": "x", "tool": []}, "messages[1]: it has the unknown field tool"),
    ({"role": "wizard", "content": "x"}, "messages[1].role: 'wizard'")])
def test_a_message_error_names_its_place(message, words):
    body = {"messages": [{"role": "user", "content": "hi"}, message]}
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        make_reader().chat(msgspec.json.encode(body))
    assert caught.value.param == "messages"


def test_an_assistant_that_said_nothing_is_an_empty_turn():
    def ids(content):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **content}, {"role": "user", "content": "hm?"}]
        return make_reader().chat(msgspec.json.encode({"messages": messages})).requests[0].prompt_ids
    assert ids({"content": None}) == ids({"content": ""}) == ids({}) == ids({"content": []})


def make_reader() -> api.Reader:
    return api.Reader(Ready(model="m", path="", vocab_size=258, context_len=100_000, max_total_tokens=100_000, end_ids=[257], config={},
                            tokenizer_json=byte_tokenizer().to_str(), chat_template=CHATML, special_tokens={}, generation_defaults={}), "m")


def test_copies_of_a_long_prompt_are_bounded():
    body = {"prompt": [1] * 50_000, "max_tokens": 1, "n": 80}
    assert len(make_reader().completion(msgspec.json.encode(body)).requests) == 80
    with pytest.raises(RequestError, match="50000 prompt tokens with n = 100 make 5000000 tokens.*at most 4194304"):
        make_reader().completion(msgspec.json.encode({**body, "n": 100}))


def test_a_cumulative_stream_makes_one_event_of_all_that_arrived_and_each_logprob_once(monkeypatch):
    made = []
    token = api.GenerateAnswer._token
    monkeypatch.setattr(api.GenerateAnswer, "_token", lambda *args: made.append(1) or token(*args))
    body = {"input_ids": [[1], [2]], "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    call = make_reader().generate(msgspec.json.encode(body))
    for _ in range(10):
        chunks = [Chunk(rid=r.rid, text="a", output_ids=[64], logprobs=[Logprob(64, -1.0, [(64, -1.0), (65, -2.0)])]) for r in call.requests]
        events = msgspec.json.decode(msgspec.json.encode(call.answer.add(chunks * 5)))
        assert [e["index"] for e in events] == [0, 1]
    assert len(made) == 2 * 50 * 3
    for event in events:
        assert event["text"] == "a" * 50 and event["meta_info"]["output_token_logprobs"] == [[-1.0, 64, None]] * 50
        assert event["meta_info"]["output_top_logprobs"] == [[[-1.0, 64, None], [-2.0, 65, None]]] * 50
    assert call.answer.usage()["completion_tokens"] == 100 and call.answer.usage()["prompt_tokens"] == 2


class DeafEngine(process.EngineProcess):
    """The parent's end without a child: `sent` is what would have gone out."""

    def __init__(self):
        super().__init__([])
        self.state, self.sent = "ready", []

    def _send(self, commands: list) -> None:
        self.sent.append(process.decode_commands(process.encode(commands)))

    async def hear(self, *events) -> None:
        """Let `_listen` take one frame."""
        frames = asyncio.Queue()
        frames.put_nowait(process.encode(events))
        self._events = types.SimpleNamespace(recv=frames.get)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._listen(), 0.05)


def test_an_id_may_be_used_again_at_once_and_gets_nothing_of_the_request_before():
    async def run():
        engine = DeafEngine()
        request = Request(rid="x", prompt_ids=[1], params=SamplingParams())
        first = engine.open([request])
        with pytest.raises(RequestError, match="'x' is in use"):
            engine.open([request])
        first.close()
        second = engine.open([request])
        first.close()  # a second time, which must not set the id free
        with pytest.raises(RequestError, match="'x' is in use"):
            engine.open([request])
        wires = [command.rid for frame in engine.sent for command in frame if isinstance(command, Request)]
        assert len(set(wires)) == len(wires) == 2 and "x" not in wires
        await engine.hear(Chunk(rid=wires[0], text="old"), Chunk(rid=wires[1], text="new", finish_reason="stop"))
        assert [(c.rid, c.text) for c in await second.next()] == [("x", "new")] and not await second.next()
        second.close()
        assert not engine._streams and not engine._rids
    asyncio.run(run())


def test_what_cannot_be_sent_or_is_not_answered_leaves_nothing(monkeypatch):
    async def run():
        engine = DeafEngine()
        with pytest.raises(UnicodeEncodeError):
            engine.open([Request(rid="x", prompt_ids=[1], params=SamplingParams(), namespace="\ud800")])
        assert not engine._streams and not engine._rids
        monkeypatch.setattr(process, "REPLY_TIMEOUT_S", 0.01)
        with pytest.raises(RequestError, match="did not answer"):
            await engine.ask("stats")
        assert not engine._replies
    asyncio.run(run())


def test_a_frame_that_cannot_be_read_ends_the_engine_and_its_calls(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    monkeypatch.setattr(process, "RESTART_DELAY_S", 0.01)

    async def run():
        engine = process.EngineProcess([sys.executable, str(HERE / "fake_engine.py"), "child"])
        await engine.start()
        try:
            await asyncio.wait_for(engine.settled.wait(), 20)
            stream = engine.open([Request(rid="x", prompt_ids=[1], params=SamplingParams())])
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.connect(f"ipc://{engine._directory}/events")
                stranger.send(b"\xc1")
                with pytest.raises(RequestError, match="cannot be read"):
                    while await asyncio.wait_for(stream.next(), 5):
                        pass
            stream.close()
            while engine.state != "ready":
                await asyncio.sleep(0.01)
            stream = engine.open([Request(rid="x", prompt_ids=[1], params=SamplingParams(max_tokens=1), stream=False)])
            assert [c.text for c in await asyncio.wait_for(stream.next(), 5)] == ["a"]
        finally:
            await engine.stop()
    asyncio.run(run())


def test_events_that_do_not_fit_the_wire_become_errors_of_their_requests():
    aborted = []
    child = process.Child(types.SimpleNamespace(abort=aborted.append, stats=dict))
    child.alive = {"a", "b"}
    events = [Chunk(rid="a", text="ok"), Chunk(rid="b", text="\ud800"), Reply(1, 1 << 70), Rejected(rid="c", message="no")]
    good, bad, reply, rejected = process.decode_events(child.pack(events))
    assert good == events[0] and rejected == events[3] and reply == Reply(1, None)
    assert bad.rid == "b" and bad.finish_reason == "error" and "surrogates" in bad.error
    assert aborted == ["b"] and child.alive == {"a"}


def test_an_answer_may_be_sent_back_as_it_came(served):
    came = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": [], "audio": None, "function_call": None}
    assert served.post("/v1/chat/completions", messages=[*CHAT, came, *CHAT], max_tokens=2).status_code == 200


def test_names_of_other_routes_are_explained(served):
    check_refused(served.post("/v1/completions", prompt="hi", max_new_tokens=3), names="here it is called 'max_tokens'")
    response = served.client.get("/" + "x" * 5000)
    assert response.status_code == 404 and len(response.text) < 1000
    assert served.client.head("/health").status_code == 200


# ------------------------------------------------------------------------------------------------------------ what can be seen

class ServedModel(Served):
    """The server itself, with a real model."""
    program = ["-m", "nano_sgl.server"]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    import tiny  # torch and transformers, for these tests alone
    return tiny.add_tokenizer(tiny.checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def real(tiny_path):
    with ServedModel("--model", str(tiny_path), "--max-total-tokens", "1024", "--kv-events-endpoint", "tcp://127.0.0.1:*",
                     "--kv-events-replay-endpoint", "tcp://127.0.0.1:*") as running:
        yield running


def metrics(served: Served) -> dict[str, float]:
    """The samples of /metrics by name; buckets and times of creation are left out."""
    response = served.client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    return {sample.name.removeprefix("nano_sgl:"): sample.value for sample in samples if not sample.labels and not sample.name.endswith("_created")}


def test_metrics_count_what_has_happened(real):
    assert real.client.post("/flush_cache").status_code == 200
    before = metrics(real)
    for _ in range(2):
        real.post("/v1/completions", prompt=list(range(40, 60)), max_tokens=4, ignore_eos=True)
    real.events("/v1/completions", prompt=list(range(70, 90)), max_tokens=4, ignore_eos=True)
    now = metrics(real)
    new = {name: now[name] - before[name] for name in now}
    assert new["prompt_tokens_total"] == 60 and new["cached_tokens_total"] == 19 and new["generation_tokens_total"] == 12
    assert new["num_requests_total"] == 3 and new["num_retracted_requests_total"] == 0 and new["computed_tokens_total"] >= 41 + 3 * 3
    assert new["e2e_request_latency_seconds_count"] == 3 and new["time_to_first_token_seconds_count"] == 1  # of the stream
    assert 0 < new["time_to_first_token_seconds_sum"] < new["e2e_request_latency_seconds_sum"]
    assert now["num_running_reqs"] == now["num_queue_reqs"] == now["num_used_tokens"] == now["token_usage"] == 0
    assert now["max_total_num_tokens"] == real.stats()["kv_capacity"]
    assert now["cache_hit_rate"] == real.stats()["cache_hit_rate"] == now["cached_tokens_total"] / now["prompt_tokens_total"]


def test_metrics_of_requests_that_run_and_wait(served):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(served.post, "/v1/completions", prompt=word, max_tokens=20) for word in ("SLOW", "WAIT SLOW")]
        assert wait_until(lambda: (now := metrics(served))["num_running_reqs"] == 1 == now["num_queue_reqs"])
        assert all(call.result().status_code == 200 for call in calls)
    before = metrics(served)
    assert before["num_used_tokens"] == 50 and before["token_usage"] == 0.05
    served.post("/v1/completions", prompt="FAIL")
    served.post("/v1/completions", prompt="one token", max_tokens=1)
    now = metrics(served)
    counts = [now[name] - before[name] for name in ("e2e_request_latency_seconds_count", "time_to_first_token_seconds_count")]
    assert counts == [1, 1]  # what fails has no latency; of a single token the first is the last


def test_the_tree_can_be_looked_at(real):
    assert real.client.post("/flush_cache").status_code == 200
    assert real.client.get("/tree").json()["nodes"] == []
    for end in ("cat", "dog"):
        real.post("/v1/completions", prompt=f"Once there was a {end}", max_tokens=1, ignore_eos=True)
    real.post("/v1/completions", prompt="Once", max_tokens=1, cache_salt="other")
    view = real.client.get("/tree").json()
    shown = [(node["parent"], node["text"], node["hits"], node["namespace"]) for node in view["nodes"]]
    assert shown == [(None, "Once there was a ", 2, ""), (0, "cat", 1, ""), (0, "dog", 1, ""), (None, "Once", 1, "other")]
    assert view["cached_tokens"] == view["shown_tokens"] == sum(node["tokens"] for node in view["nodes"]) == real.stats()["kv_cached"]
    assert all(node["where"] == "device" and node["locks"] == node["waiters"] == node["left_out"] == 0 for node in view["nodes"])
    drawn = real.client.get("/tree", params={"format": "text"})
    assert drawn.headers["content-type"] == "text/plain; charset=utf-8"
    lines = drawn.text.splitlines()
    assert lines[1] == "root" and re.fullmatch(r"`-- Once there was a   \(\d+ tok, 2 hits\)", lines[2])
    assert lines[3].startswith("    |-- cat  (") and lines[4].startswith("    `-- dog  (") and lines[5] == "root 'other'"
    less = real.client.get("/tree", params={"max_nodes": 1, "width": 8}).json()
    assert [(node["text"], node["left_out"]) for node in less["nodes"]] == [("Once ...", 2)] and less["left_out"] == 1
    assert "2 below left out" in real.client.get("/tree?format=text&max_nodes=1").text


@pytest.mark.parametrize("query, param", [("max_nodes=0", "max_nodes"), ("max_nodes=x", "max_nodes"), ("max_nodes=10001", "max_nodes"),
                                          ("format=xml", "format"), ("width=3", "width"), ("max_node=5", "max_node")])
def test_wrong_questions_about_the_tree_are_refused(real, query, param):
    check_refused(real.client.get(f"/tree?{query}"), param=param)


def test_kv_events_reach_a_subscriber_through_the_server(real):
    [published] = re.findall(r"KV events are published at (\S+), replayed at (\S+)", real.log)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.connect(published[1])
        real.post("/v1/completions", prompt=[200, 201, 202], max_tokens=1)
        asker.send_multipart((b"", (0).to_bytes(8, "big")))
        stored = []
        while (answer := asker.recv_multipart())[2]:
            stored += [event for event in msgspec.msgpack.decode(answer[2])[1] if event[0] == "BlockStored"]
        asker.linger = 0
    assert stored[-1][3] == [200, 201, 202] and len(stored[-1][1]) == 3


# ------------------------------------------------------------------------------------------------------------------- speculation

SPECULATION = {"spec_verify_ct", "spec_accept_length", "spec_accept_rate", "spec_num_correct_drafts", "spec_num_proposed_drafts",
               "spec_accept_rate_by_depth", "spec_draft_time", "spec_verify_time"}
REPEATS = "the cat and the cat and the cat and the"


@pytest.fixture(scope="module")
def guessing(tiny_path):
    """Beside `real`: the same model, with guesses."""
    with ServedModel("--model", str(tiny_path), "--max-total-tokens", "1024", "--speculative-algorithm", "ngram",
                     "--speculative-draft-length", "fixed") as running:
        yield running
        running.end()
    assert re.search(r"cached \| accept len: \d\.\d\d, accept rate: [01]\.\d\d\n", running.log), running.log


@pytest.fixture(scope="module")
def few_words(tiny_path) -> dict:
    """A bias to a few tokens, so that guesses are right now and then; one is half a character."""
    from tokenizers import Tokenizer
    return {str(i): 50 for i in Tokenizer.from_file(str(tiny_path / "tokenizer.json")).encode(" the and\u00e9").ids}


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", {"max_tokens": 60, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"max_tokens": 60, "temperature": 0.3, "seed": 1, "n": 2}),
    ("/v1/chat/completions", {"max_tokens": 60, "temperature": 0, "logprobs": True, "stop": "nd and and and and"}),
    ("/v1/completions", {"max_tokens": 60, "temperature": 0, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"max_tokens": 37, "temperature": 0.3, "seed": 2, "logprobs": 0, "n": 2}),
    ("/v1/completions", {"max_tokens": 60, "temperature": 0, "stop": ["the the the th"], "no_stop_trim": True}),
    ("/v1/completions", {"max_tokens": 60, "temperature": 0.3, "seed": 3, "frequency_penalty": 0.5, "min_p": 0.01, "logprobs": 1})], ids=str)
def test_guesses_change_no_answer(real, guessing, few_words, path, body):
    prompt = {"messages": [{"role": "user", "content": REPEATS}]} if "chat" in path else {"prompt": REPEATS}
    body = {**prompt, **body, "logit_bias": few_words, "ignore_eos": True}
    expected, got = (server.post(path, **body).json() for server in (real, guessing))
    check_alike([got["choices"], got["usage"]["completion_tokens"]], [expected["choices"], expected["usage"]["completion_tokens"]])
    assert {choice["finish_reason"] for choice in expected["choices"]} == {"stop" if "stop" in body else "length"}
    events = guessing.events(path, stream_options={"include_usage": True, "continuous_usage_stats": True}, **body)
    check_stream(events, expected)
    for key in ("text_offset", "content"):  # a piece's logprobs come with it
        counts = [len(logprobs.get(key, ())) for e in events for c in e["choices"] if (logprobs := c["logprobs"])]
        assert not any(counts) or max(counts[1:]) > 1
    used = [e["usage"]["completion_tokens"] for e in events]
    assert used == sorted(used) and used[-1] == expected["usage"]["completion_tokens"]
    assert max(b - a for a, b in zip(used, used[1:])) > 1, "several tokens came at once"


def test_generate_says_what_became_of_its_guesses(real, guessing, few_words):
    params = {"max_new_tokens": 60, "temperature": 0.3, "sampling_seed": 5, "logit_bias": few_words, "ignore_eos": True, "n": 2}
    body = {"text": REPEATS, "return_logprob": True, "top_logprobs_num": 2, "sampling_params": params}
    expected, got = (server.post("/generate", **body).json() for server in (real, guessing))
    events = guessing.events("/generate", **body)
    last = [next(e for e in reversed(events) if e["index"] == n) for n in (0, 1)]
    assert all(not SPECULATION & e["meta_info"].keys() for e in events if e not in last)
    for one in last:
        del one["index"]
    for answers in (got, last):
        told = [{key: answer["meta_info"].pop(key) for key in SPECULATION} for answer in answers]
        for a, b in zip(answers, expected):
            a["meta_info"]["cached_tokens"] = b["meta_info"]["cached_tokens"]
        check_alike(answers, expected)
        assert told[0] != told[1]
        for t in told:
            assert 0 < t["spec_num_correct_drafts"] < t["spec_num_proposed_drafts"] and 10 < t["spec_verify_ct"] < 59
            assert t["spec_verify_ct"] + t["spec_num_correct_drafts"] >= 59 and t["spec_accept_rate_by_depth"][0] > 0
            assert t["spec_accept_length"] == 1 + t["spec_num_correct_drafts"] / t["spec_verify_ct"] > 1
            assert t["spec_accept_rate"] == t["spec_num_correct_drafts"] / t["spec_num_proposed_drafts"] and t["spec_verify_time"] > 0 < t["spec_draft_time"]


def test_metrics_and_flags_of_speculation(real, guessing, few_words):
    body = {"prompt": REPEATS, "max_tokens": 30, "temperature": 0, "logit_bias": few_words, "ignore_eos": True}
    guessing.post("/v1/completions", **body)
    before = metrics(guessing)
    guessing.post("/v1/completions", **body)
    now, stats = metrics(guessing), guessing.stats()
    steps, proposed, correct, drafting, verifying = (now[f"spec_{name}_total"] - before[f"spec_{name}_total"] for name in (
        "verify_calls", "num_proposed_drafts", "num_correct_drafts", "draft_seconds", "verify_seconds"))
    assert 29 <= steps + correct and 0 < correct < proposed and drafting > 0 < verifying
    assert now["spec_accept_length"] == stats["spec_accept_length"] > 1 and 0 < now["spec_accept_rate"] == stats["spec_accept_rate"] < 1
    family = next(f for f in text_string_to_metric_families(guessing.client.get("/metrics").text) if f.name.endswith("rate_by_depth"))
    assert [(s.labels["depth"], s.value) for s in family.samples] == [(str(n), r) for n, r in enumerate(stats["spec_accept_rate_by_depth"], 1)]
    assert "spec_" not in real.client.get("/metrics").text and not any(name.startswith("spec_") for name in real.stats())
    flags = guessing.client.get("/get_server_info").json()
    assert (flags["speculative_algorithm"], flags["speculative_draft_length"], flags["speculative_num_draft_tokens"]) == ("ngram", "fixed", 8)
