"""Forced text as guesses: chains of states, and an engine that drafts them writes what it would write without."""

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
import torch

import engines
from engines import make, overlapped, params, prompt, request, run, same
from nano_sgl import LLM, SamplingParams
from nano_sgl import runner
from nano_sgl import grammar as grammars
from nano_sgl import spec, weights
from nano_sgl.constraint import Constraint, sort_places
from nano_sgl.grammar import INDEX, REGISTER
from nano_sgl.jump import MAX_CHAIN, MAX_FEW, build_chain, canonical, longest, retokenized, spell
from nano_sgl.masks import DeviceTables
from nano_sgl.model import Model, load
from nano_sgl.vocab import Vocab

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "colour": {"enum": ["red", "green"]},
                                           "tags": {"type": "array", "items": {"const": "tag"}, "minItems": 2, "maxItems": 2}},
          "required": ["name", "colour", "tags"], "additionalProperties": False}
WORDS = [b'{"', b'": ', b'": "', b'", "', b'"}', b"name", b"colour", b"red", b"green", b"tag", b"tags", b'["', b'"]', b' "', b' "(', b'":']


@pytest.fixture(scope="module")
def demo_vocab(demo_path):
    return Vocab.from_tokenizer(weights.load_tokenizer(demo_path))


def vocab():
    return Vocab([bytes([b]) for b in range(256)] + WORDS + [None], end_ids=[256 + len(WORDS)])


def test_the_longest_token_at_each_place():
    v = vocab()
    assert v.decode(longest(v, b'{"name": "x')) == b'{"name": "x'
    assert [v.tokens[i] for i in longest(v, b'{"name": "x')] == [b'{"', b"name", b'": "', b"x"]
    assert longest(v, b"") == []
    assert longest(Vocab([b"a", b"ab", None]), b"abab-a") == [1, 1], "as far as there are tokens"


@pytest.mark.parametrize("text", ['{"name": "', 'colour": "', ", ", "é, ", "me\": \"", '}', "\n  ", "x"])
def test_text_is_spelled_as_the_tokenizer_spells_it(demo_vocab, text):
    ids = spell(demo_vocab, text.encode())
    assert demo_vocab.decode(ids) == text.encode() and ids == demo_vocab.encode(text)
    assert demo_vocab.decode(spell(demo_vocab, text.encode() + b"\xc3")).startswith(text.encode()), "half a character has bytes, if no text"


def test_a_tokenizer_that_puts_a_blank_in_front():
    """As Llama 2's: a text alone comes out with a blank in front, and is spelled behind other text."""
    words = ["▁", "▁name", "name", "\n", ":", '"', "a"]
    v = Vocab([word.replace("▁", " ").encode() for word in words])

    def encode(text):
        ids, text = [], "▁" + text.replace(" ", "▁")
        while text:
            best = max((w for w in words if text.startswith(w)), key=len)
            ids.append(words.index(best))
            text = text[len(best):]
        return ids
    v.encode = encode
    assert [words[i] for i in encode("name:")] == ["▁name", ":"]
    assert [words[i] for i in spell(v, b"name:")] == ["name", ":"]


def test_what_straddles_the_end_is_held_back():
    v = vocab()
    write = lambda text: longest(v, text)  # noqa: E731
    mask = lambda some: sum(1 << b for b in some)  # noqa: E731
    words = lambda ids: [v.tokens[i] for i in ids]  # noqa: E731
    assert words(canonical(b'name": "', mask(b"abcdefghi T1("), write)) == [b"name", b'": "']
    assert words(canonical(b'name"', mask(b": \n\t"), write)) == [b"name"], "a blank or a colon: the colon would take the quote"
    assert words(canonical(b'name"', mask(b":"), write)) == [b"name"]
    assert words(canonical(b'green"}', 0, write)) == [b"green", b'"}'], "nothing follows"


def walk_all(grammar, limit=200):
    """States that texts reach."""
    seen, work = {grammar.start & INDEX}, [grammar.start]
    while work and len(seen) < limit:
        for to, _ in grammar.edges(work.pop(0))[:6]:
            if to & INDEX not in seen:
                seen.add(to & INDEX)
                work.append(to)
    return sorted(seen)


@pytest.mark.parametrize("kind, text", [("json_schema", json.dumps(PERSON)), ("regex", r"(ab|cd)-name: (red|green)\.{3}"), ("json_object", None),
                                        ("choice", ["name: red", "name: green"]), ("regex", "(a{3}bcd)+"), ("regex", "é{2}ü|é{2}ö")])
@pytest.mark.parametrize("whitespace", ["fixed", "compact", "flexible"])
def test_a_chain_is_forced_text_whose_states_have_rows(kind, text, whitespace):
    grammar = grammars.compile(kind, text, vocab(), whitespace=whitespace)
    for state in walk_all(grammar):
        found = build_chain(grammar, state)
        chain = grammar.tables.chain_of.get(state, [])
        assert found in ([], chain) and build_chain(grammar, state) == [], "once"
        assert len(chain) <= MAX_CHAIN
        forced, _ = grammar.forced(state)
        assert forced.startswith(grammar.vocab.decode(chain))
        if any(config[3] == REGISTER for config in grammar.readings.configs(state)):
            assert not chain
            continue
        at = state
        for token in chain:
            assert grammar.tables.rows[at & INDEX] is not None
            at = grammar.step(at, token)
        assert grammar.tables.rows[at & INDEX] is not None
        path = list(itertools.accumulate(chain, grammar.step, initial=state))
        for at, allowed in zip(path, grammar.tables.few.get(state, [None] * len(path)), strict=True):
            mask = np.flatnonzero(np.unpackbits(grammar.mask(at).view(np.uint8), bitorder="little"))
            assert len(mask) > MAX_FEW if allowed is None else allowed.tolist() == mask.tolist()


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_the_device_has_the_chains(backend):
    grammar = grammars.compile("json_schema", json.dumps(PERSON), vocab())
    device = DeviceTables(grammar.tables, "cpu", backend)
    states = walk_all(grammar)
    some = torch.tensor([*states, -1, 2**31, grammar.start])
    assert not device.chains(some, 4)[1].any()
    for half in (states[::2], states[1::2]):
        for state in half:
            build_chain(grammar, state)
        assert device.refresh() > 0 and device.refresh() == 0
        for most in (1, 3, MAX_CHAIN):
            tokens, lens = device.chains(some, most)
            assert tokens.shape == (len(some), most)
            for state, row, count in zip(some.tolist(), tokens.tolist(), lens.tolist()):
                assert row[:count] == grammar.tables.chain_of.get(state, [])[:most] and count <= most
                if count and device.has_row(torch.tensor([state])).all():
                    after = device.walk(torch.tensor([state]), torch.tensor([[0, *row[:count]]]), torch.arange(-1, count).clamp(min=0)[None])
                    assert device.has_row(after[0]).all(), "who sees a chain can walk it"


def test_guesses_are_grafted_onto_a_chain():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, width, most = 3, int(rng.integers(1, 6)), int(rng.integers(1, 5))
        sizes, lens = torch.tensor(rng.integers(1, width + 1, rows)), torch.tensor(rng.integers(0, most + 1, rows))
        tree = spec.DraftTree(torch.tensor(rng.integers(0, 99, (rows, width))), torch.tensor([[int(rng.integers(0, max(i, 1))) for i in range(width)]
                                                                                            for _ in range(rows)]), sizes)
        roots, chain = tree.tokens[:, 0].clone(), torch.tensor(rng.integers(100, 199, (rows, most)))
        made, scores = spec.graft(roots, chain, lens, tree, torch.full(tree.tokens.shape, 0.5))
        for b in range(rows):
            paths = lambda some, row: [path(some, row, node) for node in range(1, int(some.sizes[row]))]  # noqa: E731
            head = chain[b, :lens[b]].tolist()
            expected = [head[:i + 1] for i in range(len(head))] + [head + one for one in paths(tree, b)]
            assert paths(made, b) == expected and int(made.tokens[b, 0]) == int(roots[b])
            assert scores[b, :int(lens[b]) + 1].eq(1).all()


def path(tree, row, node):
    tokens = []
    while node:
        tokens.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens[::-1]


def test_a_chain_is_guessed_as_far_as_it_is_followed():
    grammar = grammars.compile("json_schema", json.dumps(PERSON), vocab())
    build_chain(grammar, grammar.start)
    one, chain = Constraint(grammar, grammar.start), grammar.tables.chain_of[grammar.start]
    assert len(chain) == one.forced(False, 16) == one.forced(False, 1) > 2
    one.watch([*chain[:2], 0])
    assert one.forced(False, 16) == 2 and one.forced(False, 1) == len(chain), "a step of one row has time"
    for _ in range(9):
        one.watch([0])
    assert one.forced(False, 16) == one.forced(False, 1) == 0
    one.watch([])
    for _ in range(9):
        one.watch(chain[:1])
    assert one.forced(False, 16) == 2, "what was not guessed is learned all the same"
    for _ in range(9):
        one.watch([*chain, 0])
    other = Constraint(grammar, grammar.start)
    assert one.forced(False, 16) == other.forced(False, 16) == len(chain), "by all requests"


def test_forced_text_counts_from_the_first_step_on():
    made, record = spec.Speculation(None, spec.DraftOptions(), 8, 99, "cpu", None), spec.Record()
    one = lambda *numbers: spec.Judged(*([torch.tensor([0])] * 2), *(torch.tensor([number]) for number in numbers))  # noqa: E731
    for first in (True, False):
        made.learn([(0, record, [1, 2, 3], 3, first)], one(5, 5, 5), None, 0.0, 0.0)
    assert record.forced == made.total.forced == 4 and record.steps == 0, "where a chain was not followed, what else was guessed had no chance"
    made.learn([(0, record, [1, 2, 3], 3, False)], one(5, 5, 2), None, 0.0, 0.0)
    assert (record.forced, record.steps, record.proposed, record.accepted) == (6, 1, 3, 0)


def test_places_are_sorted_by_the_logits_they_need():
    some = lambda *tokens: np.array(tokens)  # noqa: E731
    found, settled = sort_places([[some(3, 9), None, some(9)], (), [some(1, 7)]], [4, 1, 1])
    assert [part.tolist() for part in found] == [[1, 3, 4], [0, 5], [1, 3, 7, 9]] and settled == {2: 9}
    found, settled = sort_places([(), [None, None]], [1, 2])
    assert [part.tolist() for part in found] == [[0, 1, 2], [], []] and all(part.dtype == np.int64 for part in found) and not settled


@pytest.mark.parametrize("dtype, quantization", [("float32", None), ("bfloat16", None), ("float32", "int8")])
def test_logits_of_a_few_tokens_are_those_among_all(path, dtype, quantization):
    model = load(path, dtype, quantization=quantization, progress=False)
    hidden = torch.randn(7, model.config.hidden_size).to(model.dtype)
    places, tokens = [torch.tensor(ids) for ids in ([0, 3, 4], [1, 2, 5, 6])], torch.tensor([2, 5, 77, model.config.vocab_size - 1])
    every, some = model.logits(hidden), model.some_logits(hidden, *places, tokens)
    near = dict(rtol=0, atol=1e-5 if dtype == "float32" else 0.02)
    torch.testing.assert_close(some[places[0]], every[places[0]], **near)
    torch.testing.assert_close(some[places[1]][:, tokens], every[places[1]][:, tokens], **near)
    assert (some[places[1]] > -torch.inf).sum() == 16
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(model.some_logits(hidden, torch.arange(7), none, none), every)
    torch.testing.assert_close(model.some_logits(hidden, none, torch.arange(7), tokens)[:, tokens], every[:, tokens], **near)


def test_who_wants_logprobs_needs_all_logits(path, reference, monkeypatch):
    asked, settled, real, sort = [], [], Model.logits, runner.sort_places
    monkeypatch.setattr(Model, "logits", lambda self, hidden, tokens=None: asked.append((len(hidden), tokens)) or real(self, hidden, tokens))
    monkeypatch.setattr(runner, "sort_places", lambda *args: settled.append(sort(*args)) or settled[-1])
    for fields in (dict(), dict(temperature=0), dict(logprobs=1), dict(min_tokens=20), dict(frequency_penalty=1.0)):
        engine = make(path)
        made = [request(f"{i}", prompt(5, i), params(**{"max_tokens": 30, "seed": i, "json_schema": PERSON, **fields})) for i in range(3)]
        for _ in range(2):
            asked.clear(), settled.clear()
            answers = run(engine, made)
        alone, sole = sum(count for count, tokens in asked if tokens is not None), sum(len(one) for _, one in settled)
        assert alone + sole == 0 if fields.keys() & {"logprobs", "min_tokens"} else alone + sole > 20 and sole > 5, (fields, alone, sole)
        engine.shutdown()
        for one in made:
            same(answers[one.rid], reference(one))


@pytest.mark.parametrize("flags", [dict(), dict(page_size=4), dict(chunked_prefill_size=8), dict(page_size=4, chunked_prefill_size=16)], ids=str)
@pytest.mark.parametrize("device, depth", [("inline", 0), ("late", 2)])
def test_what_is_forced_first_is_guessed_by_the_step_that_reads_the_prompt(path, reference, flags, device, depth):
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    form = dict(regex="name: (red|green)", ignore_eos=False)
    grammar = engine.constraints.compiler.submit("regex", form["regex"]).result()
    while grammar.start not in grammar.tables.chain_of:
        run(engine, [request("w", prompt(3, 9), params(**form, max_tokens=9))])
    first, plan = {}, engine._plan

    def see(batch):
        for req, samples, guesses in zip(batch.reqs, batch.samples, batch.draft_lens.tolist()):
            if samples:
                first.setdefault(req.rid, guesses)
        return plan(batch)
    engine._plan = see
    asked = [request(f"{i}", prompt(n, i), params(**form, max_tokens=most)) for i, (n, most) in enumerate([(6, 30), (6, 1), (6, 3), (1, 30), (5, 0)])]
    answers = run(engine, asked)
    for one in asked:
        same(answers[one.rid], reference(one))
    assert 2 <= first["0"] <= 6 if "chunked_prefill_size" in flags else first == {"0": 6, "1": 0, "2": 2, "3": 6}
    engine.shutdown()


GRAMMARS = [dict(json_schema=PERSON), dict(json_schema=PERSON, json_whitespace="flexible"), dict(regex="name: (red|green), (tag ){3}end"),
            dict(choice=["the red one and the green one", "the red one or the green one"]), dict(), dict(json_schema=PERSON, json_whitespace="compact")]
MIXES = [dict(), dict(temperature=1, seed=5), dict(temperature=1.5, seed=6, top_p=0.9, logprobs=2), dict(temperature=1, seed=7, frequency_penalty=1.0),
         dict(temperature=0.8, seed=8, logprobs=0), dict(temperature=1, seed=9, stop=["gre", "tag"]), dict(min_tokens=7), dict(stop_token_ids=[101, 34])]


def requests_of(seed, count=16):
    rng, made = random.Random(seed), []
    for i in range(count):
        asked = dict(max_tokens=rng.choice([9, 30, 70]), ignore_eos=False) | MIXES[i % len(MIXES)] | rng.choice(GRAMMARS)
        made.append(request(f"j{i}", prompt(6, rng.randrange(4)) + list(b'name: {"name": "'), params(**asked)))
    return made


@pytest.mark.parametrize("device, depth", [("inline", 0), ("thread", 1), ("late", 2)])
@pytest.mark.parametrize("flags", [dict(), dict(page_size=4, chunked_prefill_size=16), dict(max_total_tokens=300, max_running_requests=6),
                                   dict(speculative_algorithm="ngram"), dict(speculative_algorithm="radix", speculative_eagle_topk=1),
                                   dict(speculative_algorithm="ngram+radix", page_size=4),
                                   dict(speculative_algorithm="ngram", speculative_eagle_topk=1, max_total_tokens=400)], ids=str)
def test_texts_are_those_without(path, reference, flags, device, depth):
    if "speculative_algorithm" in flags:
        flags = flags | dict(speculative_draft_length="fixed")
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    if "max_running_requests" in flags:
        engine.scheduler.ratio = 0.1
    for turn in range(2):
        requests = requests_of(turn)
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))
    assert engine.stats()["forced_tokens"] > 50 and not reference.engine.stats().get("forced_tokens")
    assert not flags.get("speculative_algorithm") or engine.speculation.total.accepted > 10
    engine.shutdown()


# ---- retokenize

def test_an_output_and_what_is_forced_are_tokenised_as_one(demo_vocab):

    grammar = grammars.compile("json_schema", json.dumps(PERSON), demo_vocab)
    for text in ('{"', '{"na', '{"name": "Ann", ', '{"name": "Ann", "colour": "g'):
        ids = [token for byte in text for token in demo_vocab.encode(byte)]
        made, state = retokenized(grammar, grammar.step_bytes(grammar.start, text.encode()), ids)
        whole = demo_vocab.decode(made)
        assert whole.startswith(text.encode()) and len(whole) > len(text) and made == demo_vocab.encode(whole.decode())
        assert state == grammar.step_bytes(grammar.start, whole) and grammar.forced(state)[0] == b""
    assert retokenized(grammar, grammar.step_bytes(grammar.start, b'{"name": "An'), [5]) is None


@pytest.mark.parametrize("device, depth", [("inline", 0), ("thread", 1), ("late", 2)])
@pytest.mark.parametrize("flags", [dict(), dict(page_size=4, chunked_prefill_size=16), dict(max_total_tokens=300, max_running_requests=6),
                                   dict(disable_radix_cache=True), dict(speculative_algorithm="ngram+radix", speculative_draft_length="fixed")], ids=str)
def test_retokenize_forces_the_text_and_keeps_the_books(path, flags, device, depth):
    """What may be written is the same, which of it is not. Without forced text nothing differs."""
    engine = make(path, jump_forward="retokenize", **flags) if device == "inline" else \
        overlapped(path, device, depth, jump_forward="retokenize", **flags)
    if "max_running_requests" in flags:
        engine.scheduler.ratio = 0.1
    compiler, steps = engine.constraints.compiler, engine.scheduler.step
    requests = requests_of(0) + [request("logprobs", prompt(9, 9), params(json_schema=PERSON, max_tokens=60, logprobs=1, ignore_eos=False))]
    answers = run(engine, requests)
    for r in requests:
        answer = answers[r.rid]
        assert answer.reason in ("stop", "length") and len(answer.ids) <= r.params.max_tokens
        if r.params.logprobs is not None:
            assert [one.token_id for one in answer.logprobs] == answer.ids and all(one.logprob < 0 for one in answer.logprobs)
        if r.params.grammar is None:
            continue
        grammar = compiler.submit(r.params.grammar.kind, r.params.grammar.text, **r.params.grammar.options).result()
        vocab = grammar.vocab
        ids = [token for token in answer.ids if token not in vocab.end_ids]
        state = grammar.step_bytes(grammar.start, vocab.decode(ids))
        assert state is not None and "".join(answer.pieces) == answer.text
        if not (r.params.stop or r.params.stop_token_ids):
            assert (answer.reason == "stop") <= grammar.is_accepting(state)
            assert answer.text == vocab.decode(ids).decode(errors="replace")
    again = run(engine, [request(r.rid, r.prompt_ids, r.params) for r in requests])
    assert all(again[rid].ids == answers[rid].ids for rid in answers), "the same each time"
    engine.shutdown()


def test_retokenized_logprobs_are_those_of_the_model(path):
    engine, plain = make(path, jump_forward="retokenize"), make(path, disable_radix_cache=True)
    asked = request("a", prompt(9, 2), params(json_schema=PERSON, max_tokens=60, logprobs=2, ignore_eos=False))
    answer = run(engine, [asked])["a"]
    ids = [*asked.prompt_ids, *answer.ids]
    scored = run(plain, [request("s", ids, params(max_tokens=0, prompt_logprobs=2, logprob_start_len=9))])["s"]
    assert np.allclose([one.logprob for one in answer.logprobs], [one.logprob for one in scored.prompt_logprobs], atol=1e-4)
    assert [[i for i, _ in one.top] for one in answer.logprobs] == [[i for i, _ in one.top] for one in scored.prompt_logprobs]
    for one in (engine, plain):
        one.shutdown()


# ---- thinking

@pytest.mark.parametrize("kind, text", [("json_schema", json.dumps(PERSON)), ("reasoning", None), ("regex", "a+"), ("json_object", None)])
def test_a_model_thinks_until_the_tag(kind, text):
    grammar = grammars.compile(kind, text, vocab(), reasoning_end="</t>")
    after = lambda some: grammar.step_bytes(grammar.start, some.encode())  # noqa: E731
    for thought in ("", "x", "<", "</", "</t", "<</t", "so </tt", "{\"name\"", "aé", "</T>", "\n"):
        assert grammar.thinks(after(thought)), thought
    assert not grammar.thinks(grammar.step_bytes(grammar.start, b"a\xc3")), "within a character it cannot be closed"
    for answer in ("</t>", "x</t>", "</t>\n", "<</t> "):
        assert not grammar.thinks(after(answer)), answer
    if kind == "reasoning":
        assert not grammar.thinks(after("x</t>and </t> and <"))
    closing = grammar.closing
    assert closing.forced(closing.start)[0].startswith(b"</t>") and closing.closing is None
    assert closing.step_bytes(closing.start, b"x") is None


@pytest.mark.parametrize("flags", [dict(), dict(disable_overlap_schedule=False), dict(speculative_algorithm="ngram", speculative_draft_length="fixed"),
                                   dict(max_total_tokens=300, max_running_requests=5)], ids=str)
def test_a_budget_ends_the_thoughts(path, reference, flags):
    engine = make(path, **flags)
    requests = [request(f"t{i}", prompt(7, i), params(**(dict(reasoning_end="</t>", thinking_budget=(0, 1, 8, 40)[i % 4], max_tokens=60,
                                                              ignore_eos=False) | MIXES[i % 4] | GRAMMARS[(i // 2) % 6]))) for i in range(12)]
    for turn in range(2):
        answers = run(engine, requests)
        for r in requests:
            same(answers[r.rid], reference(r))
            thoughts, tag, _ = answers[r.rid].text.partition("</t>")
            ids = answers[r.rid].ids
            if tag:
                budget = r.params.thinking_budget
                grammar = engine.constraints.compiler.submit(r.params.grammar.kind, r.params.grammar.text, **r.params.grammar.options).result()
                inside = sum(machine.thinks(state) for machine, state in engines.states_of(grammar, ids[:-1], budget))
                assert inside <= budget + 3, "but for a character that was begun"
            else:
                assert r.params.thinking_budget >= 40 or "</t" in answers[r.rid].text or r.params.stop or len(ids) < 60
    engine.shutdown()


# ---- the demo model

def test_F133_every_mode_holds_the_schema(demo_path, api_case):
    """F133"""
    schema, validator = api_case("F133")["schema"], jsonschema.Draft202012Validator(api_case("F133")["schema"])
    people = ("Ada", "Bob", "Cleo", "Dan", "Eve", "a sailor", "my aunt", "the oldest person", "a baby", "Herr Müller")
    prompts = [f"{start} {who} as JSON: " for start in ("Describe", "Tell me the name and the age of") for who in people]
    asked = [SamplingParams(json_schema=schema, max_tokens=60, temperature=0 if i % 2 else 1, seed=i) for i in range(len(prompts))]
    found, steps = {}, {}
    for mode in ("off", "draft", "retokenize"):
        with LLM(str(demo_path), dtype="float32", max_total_tokens=4096, jump_forward=mode) as llm:
            found[mode] = llm.generate(prompts, asked)
            steps[mode] = llm.engine.scheduler.counters.steps
            llm.engine.check()
            encode, ends = llm.tokenizer.encode, llm.engine.end_ids
    for outputs in found.values():
        for one in outputs:
            assert one.finish_reason == "stop" and validator.is_valid(json.loads(one.text)), one.text
    assert [one.output_ids for one in found["draft"]] == [one.output_ids for one in found["off"]]
    for one in found["retokenize"]:
        ids = [token for token in one.output_ids if token not in ends]
        assert encode(one.text, add_special_tokens=False)[:len(ids) - 2] == ids[:-2]
    assert max(steps["draft"], steps["retokenize"]) < 0.8 * steps["off"]


@pytest.mark.parametrize("device, depth, seed", [("inline", 0, 0), ("thread", 1, 1), ("late", 2, 2), ("thread", 1, 3), ("late", 2, 10), ("late", 2, 13)])
@pytest.mark.parametrize("what", ["retracted", "failed"])
def test_retokenize_whatever_happens_to_the_request(path, device, depth, seed, what):
    """Retracted while a step holds it, or taken back after a step that failed: its output is rewritten where it waits."""
    flags = dict(jump_forward="retokenize")
    engine = make(path, **flags) if device == "inline" else overlapped(path, device, depth, **flags)
    plain, rng, struck, steps = make(path, **flags), random.Random(seed), [], itertools.count()
    forward, wrong = engine.model.forward, rng.sample(range(2, 16), 3)

    def fails(*args):
        if next(steps) in wrong:
            struck.append(1)
            raise RuntimeError("a step that fails")
        return forward(*args)

    def each_step(step):
        running = [req for req in engine.scheduler.running if not req.leaving and engine.streams[req.rid].constraint]
        if what == "retracted" and running and step % 3 == seed % 3:
            struck.append(1)
            engine.scheduler._retract(rng.choice(running))
    if what == "failed":
        engine.model.forward = fails
    requests = requests_of(seed)
    answers, expected = run(engine, requests, each_step), run(plain, [request(r.rid, r.prompt_ids, r.params) for r in requests])
    assert len(struck) > 1
    for r in requests:
        if answers[r.rid].reason != "error":
            same(answers[r.rid], expected[r.rid])
    engine.shutdown()
    plain.shutdown()


def test_what_goes_wrong_with_forced_text_ends_that_request_alone(path, monkeypatch):
    engine = make(path, jump_forward="retokenize")
    real = grammars.Grammar.forced
    calls = []

    def forced(self, state):
        calls.append(state)
        if len(calls) == 3:
            raise grammars.GrammarError("too ambiguous", "grammar")
        return real(self, state)
    monkeypatch.setattr(grammars.Grammar, "forced", forced)
    answers = run(engine, [request(f"{i}", prompt(5, i), params(json_schema=PERSON, max_tokens=20, ignore_eos=False)) for i in range(3)])
    assert sorted(answer.reason == "error" for answer in answers.values()) == [False, False, True]
    engine.shutdown()
