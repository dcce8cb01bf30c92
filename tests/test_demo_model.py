"""The cases that need the real model: cache, sampling and batch effects of the demo model in float32, through `LLM`."""

import json
import random
import re
import threading

import pytest

import engines
from earley import Recogniser
from nano_sgl import LLM, SamplingParams, schema
from nano_sgl.engine import Engine, EngineConfig

COUNT = "1, 2, 3, 4, 5,"
NUMBERS = " 6, 7, 8, 9,"


@pytest.fixture(scope="module")
def llm(demo_path):
    with LLM("demo", dtype="float32", max_total_tokens=8192) as made:
        yield made
        made.engine.check()


def greedy(n, **kw):
    return SamplingParams(**({"temperature": 0, "max_tokens": n} | kw))


def ids(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(n)]


def test_temperature_zero_is_greedy_beside_sampled_requests(llm):
    """F065"""
    prompts = [COUNT] * 2 + ["Once", "The", "A"]
    each = [greedy(12)] * 2 + [SamplingParams(max_tokens=12, temperature=1)] * 3
    for _ in range(3):
        assert [o.text for o in llm.generate(prompts, each)][:2] == [NUMBERS] * 2


def test_top_p_zero_is_the_narrowest(llm):
    """F069"""
    texts = {llm.generate(COUNT, SamplingParams(max_tokens=12, temperature=1, top_p=0, seed=seed)).text for seed in range(5)}
    assert texts == {NUMBERS}


def test_penalties_count_the_output_only(llm):
    """F073"""
    prompt = "Paris Paris Paris Paris"
    plain, penal = llm.generate([prompt] * 2, [greedy(8), greedy(8, presence_penalty=2, frequency_penalty=2)])
    most = lambda output: max(output.output_ids.count(i) for i in output.output_ids)
    assert penal.output_ids[0] == plain.output_ids[0] and most(penal) <= most(plain)


def test_a_seeded_text_is_the_same_whoever_shares_the_batch(llm):
    """F075"""
    seeded = SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
    texts = set()
    for others in (0, 1, 2, 5):
        outputs = llm.generate(["The capital of France is"] + ["Once upon a time"] * others,
                               [seeded] + [SamplingParams(max_tokens=16, seed=None if i % 2 else i) for i in range(others)])
        texts.add(outputs[0].text)
    assert len(texts) == 1


def test_logprobs_are_the_models(llm):
    """F077"""
    for kw in (dict(temperature=0), dict(temperature=0.5, seed=1), dict(temperature=2, seed=1), dict(top_p=0.1, seed=1)):
        top = llm.generate(COUNT, SamplingParams(max_tokens=1, logprobs=3, **kw)).logprobs[0].top
        assert [llm.tokenizer.decode([i]) for i, _ in top[:2]] == [" ", " and"] and abs(top[0][1] + 0.115) < 0.01
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)


def test_prompt_logprobs_hold_on_a_cached_prefix(llm):
    """F011"""
    text = "The quick brown fox jumps over the lazy dog. "
    ask = lambda prompt: llm.generate(prompt, greedy(1, prompt_logprobs=1, logprobs=1)).prompt_logprobs
    whole, half = [ask(text * 6) for _ in range(2)], [ask(text * 3) for _ in range(2)]
    for answer in (*whole, *(h[:-1] for h in half)):  # the half's last token is a blank that the whole has merged with what follows
        assert answer[0].logprob is None
        assert all(abs(x.logprob - y.logprob) < 1e-3 for x, y in zip(answer[1:], whole[0][1:]))


def test_the_next_turn_hits_prompt_and_answer(llm):
    """F007"""
    first, more = ids(100, 1), ids(50, 2)
    answer = llm.generate(first, greedy(50, ignore_eos=True))
    turn = [*first, *answer.output_ids, *more]
    second = llm.generate(turn, greedy(8, ignore_eos=True))
    cold = llm.generate(turn, greedy(8, ignore_eos=True), cache_salt="cold")
    assert (second.cached_tokens, cold.cached_tokens) == (149, 0) and second.text == cold.text


def test_salts_share_nothing(llm):
    """F009"""
    prompt = ids(200, 3)
    outputs = [llm.generate(prompt, greedy(2), cache_salt=salt) for salt in ("a", "b", None, "a")]
    assert [o.cached_tokens for o in outputs] == [0, 0, 0, 199] and len({o.text for o in outputs}) == 1


def test_a_generation_config_with_a_list_of_end_ids(demo_path, tmp_path):
    """F051: both ids end the text; the end token counts as a completion token."""
    import json
    import shutil
    folder = tmp_path / "model"
    folder.mkdir()
    for file in demo_path.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
        elif file.is_file():
            (folder / file.name).symlink_to(file)
    config = json.loads((folder / "generation_config.json").read_text()) if (folder / "generation_config.json").exists() else {}
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 28]}))
    with LLM(str(folder), dtype="float32", max_total_tokens=512) as llm:
        output = llm.generate(COUNT, greedy(20))
    assert (output.text, output.finish_reason, len(output.output_ids)) == (" 6", "stop", 3)


@pytest.mark.parametrize("prompts, tokens", [(8, 16), pytest.param(30, 64, marks=pytest.mark.long)])
def test_greedy_answers_do_not_change_with_the_batch(llm, prompts, tokens):
    """F063"""
    words = "river stone music engine paper cloud market garden window teacher".split()
    texts = [f"{a} {words[(i * 3 + 1) % 10]} and the" for i, a in enumerate(words * 3)][:prompts]
    params = greedy(tokens, ignore_eos=True)
    alone = [llm.generate(t, params, cache_salt=f"alone {i}").text for i, t in enumerate(texts)]
    together = [o.text for first in range(0, prompts, 8) for o in llm.generate(texts[first:first + 8], params)]
    assert together == alone


def test_equal_requests_in_a_small_pool(demo_path):
    """F001, F017: duplicates, then others; the pool forces retraction. An audit follows every step."""
    engine = Engine(EngineConfig(dtype="float32", max_total_tokens=260))
    engine.scheduler.ratio = 0.1
    prompt = ids(40, 5)
    requests = [engines.request(f"a{i}", prompt, greedy(24, ignore_eos=True)) for i in range(2)]
    others = [engines.request(f"b{i}", ids(40, 10 + i), greedy(24, ignore_eos=True)) for i in range(6)]
    late = list(others)
    answers = engines.run(engine, requests, lambda n: [engine.add(late.pop(0)) for _ in range(len(late) if n == 2 else 0)])
    assert answers["a0"].ids == answers["a1"].ids
    plain = Engine(EngineConfig(dtype="float32", max_total_tokens=260, disable_radix_cache=True, max_running_requests=1))
    for r in [requests[0], *others[:2]]:
        assert engines.run(plain, [r])[r.rid].ids == answers[r.rid].ids


def test_many_threads_one_model(llm):
    got = []
    threads = [threading.Thread(target=lambda: got.append(llm.generate(COUNT, greedy(12)).text)) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [NUMBERS] * 6


@pytest.mark.parametrize("drafter", [pytest.param("ngram", marks=pytest.mark.long), pytest.param("radix", marks=pytest.mark.long), "ngram+radix"])
def test_seeded_texts_are_the_same_with_guesses(llm, drafter):
    """Greedy and at any temperature, top-k, top-p, min-p and penalty; asked twice, so that there are answers to guess from."""
    kinds = [dict(temperature=0), dict(temperature=0.7, seed=1), dict(temperature=1, top_k=20, seed=2), dict(temperature=1, top_p=0.9, seed=3),
             dict(temperature=1.2, min_p=0.1, seed=4), dict(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.2, seed=5),
             dict(temperature=0.6, repetition_penalty=1.2, logit_bias={260: 2.0}, seed=6)]
    text = "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps.\n"
    prompts = [COUNT, text * 3 + text[:20], "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"]
    asked = [(prompt, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **kind)) for prompt in prompts for kind in kinds]
    with LLM("demo", dtype="float32", max_total_tokens=8192, speculative_algorithm=drafter, speculative_draft_length="fixed") as guessing:
        plain = llm.generate(*map(list, zip(*asked)))
        for turn in range(2):
            for a, b in zip(plain, guessing.generate(*map(list, zip(*asked)))):
                assert a.output_ids == b.output_ids and a.finish_reason == b.finish_reason
                engines.close(b.logprobs, a.logprobs)
        assert guessing.engine.speculation.total.accepted > 40


@pytest.mark.parametrize("given", [
    dict(regex=r'\{"name": "[^"\\\n]{1,30}", "age": (0|[1-9]\d{0,2})\}'), dict(regex=r"(yes|no), because (\w{1,12} ){2,8}\w+\."),
    dict(ebnf='root ::= sum\nsum ::= product ([+-] product){0,3}\nproduct ::= value ("*" value)?\nvalue ::= [0-9]{1,3} | "(" sum ")"'),
    dict(choice=["Paris", "Parison", "the capital", "é"]), dict(json_object=True)], ids=lambda given: next(iter(given)))
def test_samples_under_a_grammar_parse(llm, given):
    """At temperature 1, as Python's own `re`, `json` and an Earley recogniser read them; where the length ends a text, more could follow."""
    outputs = llm.generate("Answer: ", SamplingParams(temperature=1, seed=3, n=4, max_tokens=80, **given))
    kind, text, _ = SamplingParams(**given).grammar
    for output in outputs:
        assert output.finish_reason in ("stop", "length") and output.error is None
        reader = Recogniser(schema.rules(kind, text))
        assert all(map(reader.feed, output.text.encode(errors="replace"))) or "\ufffd" in output.text
        if output.finish_reason == "stop":
            assert reader.accepted() and (kind != "regex" or re.fullmatch(text, output.text))
            assert kind != "json_object" or isinstance(json.loads(output.text), dict)
    assert sum(output.finish_reason == "stop" for output in outputs) >= (1 if kind in ("json_object", "ebnf") else 3)


def test_scores_are_those_of_transformers(llm, demo_path):
    """Each token's log-softmax by hand. A prefix whose last token is cut, or merges with one of the choices, is as good as any."""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def logprobs(text):
        given = llm.tokenizer.encode(text)
        rows = torch.log_softmax(model(torch.tensor([given])).logits[0].float(), -1)
        return [float(rows[n, i]) for n, i in enumerate(given[1:])]

    sky = "Question: Is the sky blue?\nAnswer:"
    yes, no = llm.score(sky, [" YES", " NO"], unconditional=True)
    assert [len(s.tokens) for s in (yes, no)] == [2, 1] == [len(s.unconditional) for s in (yes, no)]
    assert abs(sum(t.logprob for t in yes.tokens) + 5.907) < 0.02 and abs(sum(t.logprob for t in no.tokens) + 6.404) < 0.02
    assert yes.unconditional[0].logprob is None and abs(yes.unconditional[1].logprob - logprobs(" YES")[0]) < 1e-3
    [one], [other] = llm.score("Answer:", [" Hello"]), llm.score("Answer: ", ["Hello"])
    assert one.tokens == other.tokens and len(one.tokens) == 1
    for prefix, choices in ((sky, [" YES", " NO", " Maybe, or not"]), (sky + " ", ["YES", "NO"]), ("The capital of Fr", ["ance", "iesland", "om"]),
                            ("Once upon a time " * 20, ["there was", "a"])):
        for score in llm.score(prefix, choices):
            expected = logprobs(prefix + score.text)[-len(score.tokens):]
            assert all(abs(t.logprob - value) < 1e-3 for t, value in zip(score.tokens, expected)), score.text


def test_a_conversation_written_in_pieces_is_the_templates(llm):
    roles = llm.chat_roles()
    assert roles["source"] == "template" and roles["default_system"].startswith("<|im_start|>system\n")
    said = [("user", "What is 2 + 2?"), ("assistant", "4"), ("user", "And 3 + 3?")]
    text = "".join(content.join(roles[role]) for role, content in said) + roles["assistant"][0]
    for system, start in ((None, roles["default_system"]), ("Be brief.", "Be brief.".join(roles["system"]))):
        messages = [{"role": role, "content": content} for role, content in [*([("system", system)] if system else []), *said]]
        assert llm.tokenizer.encode(start + text) == llm.chat_ids(messages)


def test_a_fork_computes_its_prefix_once_in_a_pool_that_is_short(demo_path):
    """Between the prefix and its children others come, who need the memory: without the hold it is evicted, with it it is not."""
    counted, prefix = {}, ids(120, 40)
    for held in (False, True):
        with LLM("demo", dtype="float32", max_total_tokens=288) as llm:
            hold = llm.hold(prefix, 1) if held else ""
            if not held:
                llm.generate(prefix, greedy(0))
            for n in range(3):
                llm.generate(ids(140, 41 + n), greedy(2))
            before = llm.engine.scheduler.counters.computed_tokens
            outputs = llm.generate([[*prefix, 1000 + n] for n in range(3)], greedy(3, ignore_eos=True), parent=hold)
            counted[held] = llm.engine.scheduler.counters.computed_tokens - before, [o.text for o in outputs]
    assert counted[True][1] == counted[False][1] and (counted[True][0], counted[False][0]) == (9, 129)
