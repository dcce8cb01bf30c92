"""Servers as backends of the language: the same programs give the same texts in process, over our own routes and over OpenAI's; SGLang's frontend runs here."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import engines
import nano_sgl.lang as sgl
from nano_sgl import LLM
from nano_sgl.endpoints import Completion, EndpointError

THEIR_PYTHON = os.environ.get("NANO_SGL_SGLANG_PYTHON", "")     # of a virtual environment with SGLang's wheel, for the last test
PROGRAM = Path(__file__).parent / "sglang_program.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(path):
    with sgl.Runtime(str(path), dtype="float32", max_total_tokens=2048, log_level="warning") as running:
        yield running


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), dtype="float32", max_total_tokens=2048) as made:
        yield made


@sgl.function
def program(s, topic):
    s += sgl.system("Be kind.") + sgl.user("About " + topic)
    s += sgl.assistant("Well, " + sgl.gen("first", max_tokens=6, stop=["zq"]) + "; " + sgl.gen("number", regex="[0-9]{2}", max_tokens=4))
    forks = s.fork(3)
    for i, f in enumerate(forks):
        f += sgl.user(f"Part {i}?") + sgl.assistant(sgl.gen("part", max_tokens=5, n=1 + i % 2))
    forks.join()
    s += " It is " + sgl.select("mean", [" a", " bc", " the dog"])
    s += sgl.select("raised", [" x", " yz"], choices_method="unconditional_likelihood_normalized")
    s += sgl.gen("json", json_schema={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, max_tokens=12)


VARIABLES = ("first", "number", "part", "mean", "raised", "json")


def values(backend, **options):
    state = program.run("cats and dogs", backend=backend, temperature=0, **options)
    return {name: state[name] for name in VARIABLES} | {"text": state.text(), "messages": state.messages()}


def test_the_same_program_in_process_and_over_http(server, llm):
    here = values(llm)
    assert values(server) == values(server, stream=True) == values(llm, stream=True) == values(llm, use_thread=False) == here
    assert len(here["part"]) == 3 and len(here["part"][1]) == 2 and here["messages"][0] == {"role": "system", "content": "Be kind."}
    assert json.loads(here["json"]) is not None
    stats = server.get_server_info()["stats"]
    assert stats["holds"] == 0 and stats["kv_locked"] == 0 and stats["running"] == 0
    assert server.chat_roles() == {role: tuple(t) if isinstance(t, list) else t for role, t in llm.chat_roles().items()}


def test_seeded_programs_too(server, llm):
    def drawn(backend):
        return program.run("cats", backend=backend, temperature=1, seed=3).text()
    assert drawn(server) == drawn(llm) != program.run("cats", backend=llm, temperature=1, seed=4).text()


def test_scores_are_the_same_over_every_route(server, llm):
    openai = sgl.OpenAI("default", False, server.base_url + "/v1")
    openai.model_name = server.model_info["served_model_name"]
    for prefix, choices in (("the cat", [" sat", " is", "s and dogs"]), ("one two ", ["three", "3"])):
        found = [backend.score(prefix, choices) for backend in (llm, server, openai)]
        for scores in zip(*found):
            lists = [[t.logprob for t in score.tokens] for score in scores]
            assert len(set(map(len, lists))) == 1 and all(pytest.approx(lists[0], abs=1e-3) == other for other in lists[1:])
    alone = [backend.score("the cat", [" sat", " on"], unconditional=True) for backend in (llm, server)]
    for here, there in zip(*alone):
        assert [t.logprob for t in here.unconditional] == pytest.approx([t.logprob for t in there.unconditional], abs=1e-3)
    openai.close()


def test_programs_over_openais_routes(server, llm):
    name = server.model_info["served_model_name"]
    texts, chat = sgl.OpenAI(name, False, server.base_url + "/v1"), sgl.OpenAI(name, True, server.base_url + "/v1")

    @sgl.function
    def plain(s):
        s += "the cat " + sgl.gen("a", max_tokens=6) + " and " + sgl.gen("b", max_tokens=3, regex="[0-9]+", n=2)
        s += sgl.select("c", [" x", " yy"])
    here, there = plain.run(backend=llm, temperature=0), plain.run(backend=texts, temperature=0)
    assert there.text() == here.text() and there["b"] == here["b"]
    assert "".join(plain.run(backend=texts, temperature=0, stream=True).text_iter("a")) == here["a"]

    @sgl.function
    def talk(s):
        s += sgl.user("Hello") + sgl.assistant(sgl.gen("a", max_tokens=6)) + sgl.user("And?") + sgl.assistant(sgl.gen("b", max_tokens=6))
    here, there = talk.run(backend=llm, temperature=0), talk.run(backend=chat, temperature=0)
    assert there.messages() == here.messages()
    assert "".join(talk.run(backend=chat, temperature=0, stream=True).text_iter("b")) == here["b"]
    assert texts.usage["calls"] > 0 and chat.usage["completion_tokens"] > 0
    with pytest.raises(sgl.ProgramError, match="images|image"):
        sgl.function(lambda s: s.__iadd__(sgl.user("See: " + sgl.image(b"123")) + sgl.assistant(sgl.gen("a"))) and None).run(backend=chat)
    with pytest.raises(sgl.ProgramError, match="log-probabilities of prompts"):
        sgl.function(lambda s: s.__iadd__("a" + sgl.gen("a", return_logprob=True, logprob_start_len=0)) and None).run(backend=texts)
    texts.close()
    chat.close()


def test_api_speculative_execution_gives_what_one_long_call_gives_in_pieces(server):
    backend = sgl.OpenAI(server.model_info["served_model_name"], False, server.base_url + "/v1")
    whole = backend.generate(["the cat"], [{"max_tokens": 40, "temperature": 0}])[0].text
    marks = [whole[at:at + 2] for at in (6, 14)]
    assert whole.index(marks[0]) < whole.index(marks[1], whole.index(marks[0]) + 2)

    @sgl.function(num_api_spec_tokens=40)
    def pieces(s):
        s += "the cat" + sgl.gen("a", stop=marks[0]) + marks[0] + sgl.gen("b", stop=marks[1])
    backend.usage.clear()
    state = pieces.run(backend=backend, temperature=0)
    assert whole.startswith(state.text()[len("the cat"):]) and state["b"] and backend.usage["calls"] == 1 and backend.usage["saved_calls"] == 1
    assert state["a"] == whole[:whole.index(marks[0])] and state["b"] == whole[len(state["a"]) + 2:].partition(marks[1])[0]
    backend.close()


def test_pictures_and_films_are_parts_of_messages(server, tmp_path):
    """Of messages for a model that sees; ours refuses them by name."""
    (tmp_path / "cat.jpg").write_bytes(b"jpg")
    backend = sgl.OpenAI("sees", True, server.base_url + "/v1")
    asked = []

    def seen(messages, params, **names):
        asked.append(messages[0])
        return [Completion("a cat", "stop")]
    backend.generate = seen

    def look(s):
        s += sgl.user("Look: " + sgl.image(str(tmp_path / "cat.jpg")) + sgl.video("https://a/film.mp4", 8) + sgl.image(b"png") + "?")
        s += sgl.assistant(sgl.gen("what"))
    state = sgl.function(look).run(backend=backend)
    parts = state.messages()[0]["content"]
    assert state["what"] == "a cat" and asked[0][0]["content"] == parts and parts == [
        {"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,anBn"}},
        {"type": "video_url", "video_url": {"url": "https://a/film.mp4", "num_frames": 8}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}, {"type": "text", "text": "?"}]
    for backend in (sgl.OpenAI(server.model_info["served_model_name"], True, server.base_url + "/v1"), server):
        with pytest.raises(sgl.ProgramError, match="image|text only"):
            sgl.function(look).run(backend=backend)


def test_errors_are_the_servers_words(server):
    def run(expr):
        return sgl.function(lambda s: s.__iadd__(expr) and None).run(backend=server)
    with pytest.raises(sgl.ProgramError, match=r"answered 400: .*regex.*\("):
        run("a" + sgl.gen("x", regex="("))
    with pytest.raises(sgl.ProgramError, match="context"):
        run("word " * 9000 + sgl.gen("x"))
    with pytest.raises(sgl.ProgramError, match="400"):
        sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x", regex="(")) and None).run(backend=server, stream=True).text()
    nobody = sgl.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(EndpointError, match="is the server there"):
        nobody.generate(["a"], [{}])
    with pytest.raises(ValueError, match="http://"):
        sgl.RuntimeEndpoint("localhost:30000")
    with pytest.raises(EndpointError, match="404.*no-such-model"):
        sgl.OpenAI("no-such-model", False, server.base_url + "/v1").generate(["a"], [{}])
    assert not [t for t in threading.enumerate() if t.name.startswith("program")]


def test_what_runs_is_aborted_when_a_program_raises(server, llm):
    def program(s):
        s += "the cat" + sgl.gen("v", max_tokens=1500, ignore_eos=True)
        time.sleep(0.5)
        raise KeyError("mine")
    for backend in (llm, server):
        begin = time.monotonic()
        with pytest.raises(KeyError, match="mine"):
            sgl.function(program).run(backend=backend)
        made, took = backend.get_server_info()["stats"], time.monotonic() - begin
        assert made["running"] == 0 and took < 20
        state = sgl.function(program).run(backend=backend, stream=True)
        assert next(state.text_iter("v"))
        del state
        deadline = time.monotonic() + 20
        while backend.get_server_info()["stats"]["running"]:
            assert time.monotonic() < deadline, "a run that was dropped goes on"
            time.sleep(0.05)


def test_a_runtime_that_cannot_start_says_so():
    with pytest.raises(EndpointError, match="(?s)ended with code.*no-such-flag"):
        sgl.Runtime("no/such/model", no_such_flag=1)


@pytest.mark.parametrize("whose", ["ours", *["theirs"][:bool(THEIR_PYTHON)]])
def test_sglangs_own_frontend_runs_the_same_program_here(server, whose):
    python = {"ours": sys.executable, "theirs": THEIR_PYTHON}
    done = subprocess.run([python[whose], str(PROGRAM), whose, server.base_url], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent) if whose == "ours" else ""})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["part"]) == 3 and found["number"].isdigit() and found["reply"] in ("true", "false") and found["streams"]
    assert len(found["logprobs"]) == 3 and len(found["batch"]) == 6
    ours = subprocess.run([sys.executable, str(PROGRAM), "ours", server.base_url], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    same = json.loads(ours.stdout.splitlines()[-1])
    unlike = {name for name in found if found[name] != same[name]}
    assert unlike <= {"reply"} | ({"whole"} if whose == "theirs" else set()), unlike     # chat templates go by the model's name there
