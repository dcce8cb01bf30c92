"""bench/serve.py and bench/workloads.py: shapes, the ideal cache, what the client reads, and one small run from end to end. bench/grammar.py and
bench/constrained.py: schemas, forced bytes, requests, and small runs."""

import asyncio
import contextlib
import itertools
import json
import pickle
import random
import sys
from pathlib import Path

import engines
import jsonschema
import pytest

from nano_sgl.grammar import compile as compile_grammar
from nano_sgl.vocab import Vocab

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import constrained  # noqa: E402
import cpu  # noqa: E402
import grammar  # noqa: E402
import schemas  # noqa: E402
import serve  # noqa: E402
import workloads  # noqa: E402

SIZES = {"a": (192, 144, 6144), "b": (288, 0, 576), "c": (465, 450, 9300), "d": (120, 20, 6080), "e": (96, 0, 6144), "f": (100, 0, 3200),
         "g": (96, 0, 12288), "s": (4, 0, 512), "p": (5, 0, 5)}


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_shapes(name):
    requests, others, few = (workloads.build(name, seed, scale) for seed, scale in ((1, 1.0), (2, 1.0), (1, 0.01)))
    assert (len(requests), sum(bool(r.needs) for r in requests), sum(r.max_tokens for r in requests)) == SIZES[name]
    assert requests == workloads.build(name, 1) and {r.id for r in few} <= {r.id for r in requests}
    assert [(r.id, r.needs, len(r.prompt.split())) for r in requests] == [(r.id, r.needs, len(r.prompt.split())) for r in others]
    assert not {r.prompt for r in requests} & {r.prompt for r in others}, "another seed is other text"
    known = set()
    for request in requests:  # what a prompt needs stands before it
        assert known.issuperset(request.needs) and not workloads.PLACEHOLDER.search(request.filled(dict.fromkeys(known, "x")))
        known.add(request.id)


def test_ideal_work_counts_what_no_earlier_request_began_with():
    rng = random.Random(0)
    for _ in range(50):
        sequences = [([rng.randrange(2) for _ in range(rng.randint(1, 9))], [rng.randrange(2) for _ in range(rng.randint(0, 5))])
                     for _ in range(12)]
        known, lengths = set(), []
        for prompt, answer in sequences:
            lengths += [n for n in range(1, len(prompt) + 1) if n == len(prompt) or tuple(prompt[:n]) not in known]
            kept = prompt + answer[:-1]
            known |= {tuple(kept[:n]) for n in range(1, len(kept) + 1)}
        assert workloads.ideal_work(sequences) == (len(lengths), sum(lengths))


def test_percentiles_and_rates():
    assert [serve.percentile([5, 1, 4, 2, 3], share) for share in (0, 0.5, 0.99)] == [1, 3, 5] and serve.percentile([], 0.5) is None
    answers = [serve.Answer("", "x", 10, 5, 4, ttft=0.1 * n, tpot=0.02) for n in range(1, 4)] + [serve.Answer("", error="no")]
    found = serve.summary(answers, 2.0)
    assert (found["req_s"], found["out_tok_s"], found["total_tok_s"], found["prompt_tok_s"], found["errors"]) == (1.5, 7.5, 22.5, 15, 1)
    assert found["cached"] == pytest.approx(0.4) and found["ttft_p50"] == pytest.approx(200) and found["decode_tok_s"] == pytest.approx(50)
    assert serve.summary([serve.Answer("", error="no")], 1.0)["tpot_p50"] is None


EVENTS = [{"choices": [{"text": ""}]}, {"choices": [{"text": "a\u00e9"}]}, {"choices": [{"text": " b"}]},
          {"choices": [{"text": "", "finish_reason": "length"}]},
          {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}]


def response(events: list[str]) -> bytes:
    """A stream as servers send it, an event a chunk."""
    chunks = [f"data: {event}\n\n".encode() for event in events] + [b""]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_read_however_it_is_cut(size):
    raw = response([*map(json.dumps, EVENTS), "[DONE]"])
    pieces = [(float(at), raw[at:at + size]) for at in range(0, len(raw), size)]
    answer = serve.Answer("")
    serve.read_answer(answer, 0.0, pieces)
    assert (answer.text, answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == ("a\u00e9 b", 7, 3, 4)
    first, last = (raw.index(part) // size * size for part in (b'"a', b'" b'))
    assert first <= answer.ttft <= first + 40 and 2 * answer.tpot == pytest.approx(last - first, abs=40)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nno!", response(["{", "[DONE]"]), response(['{"error": "no"}']),
                                 response([json.dumps(EVENTS[1]), "[DONE]"]), response(list(map(json.dumps, EVENTS)))[:-40], b"SSH-2.0\r\n\r\n"])
def test_what_is_no_answer_is_an_error(raw):
    async def answer() -> serve.Answer:
        async def reply(reader, writer):
            await reader.readuntil(b"}")
            writer.write(raw)
            with contextlib.closing(writer):
                await writer.drain()
        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            return await serve.ask(server.sockets[0].getsockname()[1], {"prompt": "x"})
    assert asyncio.run(answer()).error


def test_requests_wait_for_what_they_need_and_go_in_order(monkeypatch):
    requests = workloads.build("d", 1, 0.1)
    sent, at_once, most = [], 0, 0

    async def ask(port, body):
        nonlocal at_once, most
        sent.append(body["prompt"])
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        return serve.Answer(body["prompt"], f"<{len(sent)}>")

    monkeypatch.setattr(serve, "ask", ask)
    server = type("Server", (), {"port": 0, "model": "m"})
    answers, _ = asyncio.run(serve.play(server, serve.Engine("x", ""), requests, 4))
    assert [answer.prompt for answer in answers] == [r.filled({q.id: a.text for q, a in zip(requests, answers)}) for r in requests]
    assert most == 4 and len(sent) == len(requests) and sent.index(answers[5].prompt) < 11, "the first verdict does not wait for all opinions"


def test_fields_that_a_peer_wants_otherwise():
    [card, *_], [sample, *_] = workloads.build("g", 1, 0.01), workloads.build("e", 1, 0.01)
    plain = serve.Engine("x", "")
    assert plain.body("m", sample, "p")["seed"] == 0 and plain.body("m", sample, "p")["ignore_eos"] and "ignore_eos" not in plain.body("m", card, "p")
    fields = '{"seed": null, "response_format": null, "json_schema": "{schema}", "k": 1}'
    [peer] = serve.arguments(["--peer", "x", "y", "--fields", "x", fields]).peers
    assert peer.body("m", card, "p").keys() ^ plain.body("m", card, "p").keys() == {"response_format", "json_schema", "k"}
    assert peer.body("m", card, "p")["json_schema"] == card.schema
    assert peer.body("m", sample, "p").keys() ^ plain.body("m", sample, "p").keys() == {"seed", "k"}


@pytest.mark.parametrize("flags", [["--workloads", "a,x"], ["--seeds", "one"], ["--fields", "x", "{}"], ["--peer", "x", "y", "--fields", "x", "[1]"],
                                   ["--peer", "x", "y", "--peer", "x", "z"], ["--peer", "nano_sgl", "y"], ["--rounds", "0"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit):
        serve.arguments(flags)
    assert "error: " in capsys.readouterr().err


def test_from_end_to_end(tmp_path, capsys, monkeypatch):
    """Our server beside itself with large pages, and beside one that does not start."""
    monkeypatch.setattr(cpu, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(cpu, "gemm_rate", lambda dtype: 1e11)
    path, out = engines.tiny_path(tmp_path / "tiny", max_position_embeddings=8192), tmp_path / "results.jsonl"
    peer = f"PYTHONPATH=. {sys.executable} -m nano_sgl.server --model {{model}} --port {{port}} --page-size 64"
    broken = f"{sys.executable} -c 'raise SystemExit(\"no such model\")'"
    code = serve.main(["--model", str(path), "--workloads", "a,e,g,s", "--scale", "0.01", "--seeds", "3", "--out", str(out),
                       "--ours-args=--log-level error", "--peer", "pages", peer, "--peer", "broken", broken])
    printed = capsys.readouterr().out
    rows = {tuple(cells[:2]): cells for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|")}
    assert code == 1 and "broken: did not start; its exit code is 1" in printed and "no such model" in printed
    assert set(rows) >= set(itertools.product("aegs", ["nano_sgl", "pages", "broken"])), printed
    assert all(rows[w, e][8] == "0" and float(rows[w, e][10]) < 1 for w in "aegs" for e in ("nano_sgl", "pages")), printed
    assert rows["a", "broken"][8:] == ["1", "-", "-", "-"], printed
    assert [rows[w, "pages"][11] for w in "aegs"] == ["4/4", "-", "12/12", "1/1"] and "(" in rows["a", "pages"][9], printed
    results = {(r["engine"], r["workload"]): r for r in map(json.loads, out.read_text().splitlines())}
    assert len(results) == 12 and results["nano_sgl", "a"]["output_tokens"] == 4 * 32 and results["nano_sgl", "e"]["output_tokens"] == 8 * 64
    assert results["pages", "a"]["floor_s"] == results["nano_sgl", "a"]["floor_s"] > 0
    assert results["nano_sgl", "a"]["cached"] > results["pages", "a"]["cached"] > 0.5
    ideal = serve.Bench(serve.arguments(["--model", str(path)]))
    answers = [serve.Answer(r.prompt, output_tokens=3) for r in workloads.build("s", 3, 0.01)]
    assert ideal.work(answers, 1)[0] == results["nano_sgl", "s"]["prompt_tokens"] and ideal.work(answers, 1)[2] == 2


def test_schemas_allow_their_values():
    checker = jsonschema.FormatChecker(["date", "email", "uuid"])
    assert len({name for name, _, _ in schemas.SCHEMAS}) == len(schemas.SCHEMAS) >= 40
    for name, schema, values in schemas.SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert values and all(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value) for value in values), name


def test_forced_bytes_of_a_schema_and_tokens_inside_of_them():
    vocab = Vocab([bytes([i]) for i in range(256)] + [None], [256])
    machine = compile_grammar("json_schema", {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                                              "additionalProperties": False}, vocab)
    forced = grammar.forced_of(machine, b'{"a": true}')
    assert forced == [True] * 6 + [False] + [True] * 4 and grammar.forced_of(machine, b'{"b": true}') is None
    total = [0] * 5
    grammar._add(total, [b'{"', b'a": ', b"tr", b"ue}"], forced)
    assert total == [4, 3, 11, 10, 1]


def test_requests_for_schemas_are_drawn_by_seed():
    cases = [{"accept": ["x"] * (i % 3 + 1), "grammar": i} for i in range(50)]
    chosen, order = grammar.requests(cases, range(5, 45), 7)
    assert (chosen, order) == grammar.requests(cases, range(5, 45), 7) != grammar.requests(cases, range(5, 45), 8)
    assert len(chosen) == grammar.SCHEMAS_DRAWN and len(order) == grammar.REQUESTS and all(5 <= case["grammar"] < 45 for case in chosen)
    assert all(text < len(chosen[case]["accept"]) for case, text in order)


def test_grammars_from_end_to_end(tmp_path, capsys, monkeypatch):
    """Ours alone: rows, requests and layouts of a few schemas and of a regex; a case that is refused, and one that is spaced in another way."""
    monkeypatch.setattr(grammar, "SCHEMAS", [*schemas.SCHEMAS[:2], ("none", {"type": "string", "minLength": 2, "maxLength": 1}, ["x"])])
    monkeypatch.setattr(grammar, "OWN", grammar.OWN[:1])
    monkeypatch.setattr(grammar, "REQUESTS", 5)
    elsewhere, asked = grammar.ask, []

    def ask(python, name, about):  # the first in a process of its own
        asked.append(about)
        return elsewhere(python, name, about) if len(asked) == 1 else grammar.answer(name, pickle.loads(pickle.dumps(about)))

    monkeypatch.setattr(grammar, "ask", ask)
    grammar.main(["--tokenizer", str(engines.tiny_path(tmp_path / "tiny")), "--draws", "1", "--cases", ""])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:3] for line in lines if line[:1] == ["ours"]] == [["ours", "json", "2/3"], ["ours", "regex", "1/1"]], printed
    assert [line[1] for line in lines if line[:1] == ["layout"]] == ["fixed", "compact", "flexible"] and "5 requests, 2 of 2 schemas: ours" in printed
    spaced = {"kind": "json", "grammar": "{}", "accept": ["[1, 2]", "[1,2]"], "reject": []}
    assert [grammar.laid_out(spaced, layout)["accept"] for layout in ("fixed", "compact", "flexible")] == [["[1, 2]"], ["[1,2]"], spaced["accept"]]
    with pytest.raises(SystemExit):
        grammar.main(["--kinds", "json,yaml"])


def test_constrained_from_end_to_end(tmp_path, capsys):
    path = engines.tiny_path(tmp_path / "tiny", max_position_embeddings=1024)
    constrained.main(["--model", str(path), "--dtype", "float32", "--batch", "2", "--tokens", "6", "--repeats", "1"])
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert rows == ["grammar", *constrained.EQUAL, "json", "one grammar", "own grammars"], printed
    assert "of 4 texts are the free ones" in printed and "one grammar beside own grammars" in printed
    with pytest.raises(SystemExit):
        constrained.main(["--grammars", "schema,poem"])
