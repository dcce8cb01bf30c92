"""LLM: the engine as a Python object; sync and async, lists and single prompts, streams, abort, shutdown."""

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import engines
import tiny
from nano_sgl import LLM, SamplingParams, spec
from nano_sgl.protocol import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), max_total_tokens=2048) as made:
        yield made
        idle(made)


def idle(llm):
    """Wait until nothing runs, then audit."""
    deadline = time.monotonic() + 20
    while llm.engine.has_work or not llm._loop.inbox.empty():
        assert time.monotonic() < deadline, "work is left over"
        time.sleep(0.01)
    llm.engine.check()


def test_one_prompt_gives_one_output_and_a_list_a_list(llm):
    one = llm.generate("the cat", GREEDY)
    assert len(one.output_ids) == 12 and one.finish_reason == "length" and one.prompt_ids == llm.tokenizer.encode("the cat")
    assert llm.tokenizer.decode(one.output_ids, skip_special_tokens=True) == one.text
    texts = [o.text for o in llm.generate(["the cat", "on"], GREEDY)]
    assert texts == [one.text, llm.generate("on", GREEDY).text]
    assert [o.text for o in llm.generate(["the cat"], GREEDY)] == [one.text]


def test_ids_as_prompts(llm):
    ids = llm.tokenizer.encode("the cat")
    assert llm.generate(ids, GREEDY).output_ids == llm.generate([ids, ids], GREEDY)[1].output_ids == llm.generate("the cat", GREEDY).output_ids


def test_params_for_each_as_dicts_and_defaults(llm):
    outputs = llm.generate(["a", "b"], [dict(max_tokens=3, temperature=0, ignore_eos=True), SamplingParams(max_new_tokens=5, ignore_eos=True)])
    assert [len(o.output_ids) for o in outputs] == [3, 5]
    assert 1 <= len(llm.generate("a").output_ids) <= 128


def test_n_samples_are_neighbours(llm):
    outputs = llm.generate(["a", "b"], SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True))
    assert [o.index for o in outputs] == [0, 1, 0, 1] and outputs[0].text != outputs[1].text
    assert [o.index for o in llm.generate("a", SamplingParams(n=3, max_tokens=1))] == [0, 1, 2]


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)
    assert llm.tokenizer.decode(output.prompt_ids) == "<|user|>hi<|end|><|assistant|>"
    assert [o.text for o in llm.chat([messages, messages], GREEDY)] == [output.text] * 2
    assert "".join(o.text for o in llm.stream(messages, GREEDY)) == output.text


def test_a_stream_has_the_same_text_in_pieces(llm):
    whole = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1))
    pieces = list(llm.stream("the cat", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)))
    assert "".join(p.text for p in pieces) == whole.text and sum((p.output_ids for p in pieces), []) == whole.output_ids
    assert [p.token_id for piece in pieces for p in piece.logprobs] == whole.output_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_closed_stream_aborts(llm):
    pieces = llm.stream("a", SamplingParams(max_tokens=400, ignore_eos=True))
    next(pieces)
    pieces.close()
    idle(llm)


def test_async_twins(llm):
    async def main():
        one, many, answer = await asyncio.gather(llm.agenerate("the cat", GREEDY), llm.agenerate(["the cat", "on"], GREEDY),
                                                 llm.achat([{"role": "user", "content": "hi"}], GREEDY))
        text = "".join([o.text async for o in llm.astream("the cat", GREEDY)])
        assert one.text == many[0].text == text and answer.finish_reason == "length"
    asyncio.run(main())


def test_a_cancelled_task_aborts(llm):
    async def main():
        task = asyncio.create_task(llm.agenerate(["a"] * 3, SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    asyncio.run(main())
    idle(llm)


def test_calls_from_many_threads_share_the_engine(llm):
    expected, got = llm.generate("the cat", GREEDY).text, []
    threads = [threading.Thread(target=lambda: got.append(llm.generate("the cat", GREEDY).text)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [expected] * 8


def test_outputs_say_what_became_of_guesses_and_are_the_same_as_without(path, llm):
    prompt = "the cat and the cat and the cat and the"
    few_words = {token: 50 for token in llm.tokenizer.encode(" the and\u00e9")}  # so that guesses are right now and then
    params = SamplingParams(temperature=0.3, seed=1, n=2, max_tokens=60, ignore_eos=True, logit_bias=few_words, logprobs=1)
    expected = llm.generate(prompt, params)
    with LLM(str(path), max_total_tokens=2048, speculative_algorithm="ngram+radix") as guessing:
        async def twins():
            return await guessing.agenerate(prompt, params), [piece async for piece in guessing.astream(prompt, params)]
        several, pieces = asyncio.run(twins())
        chats = [one.chat([{"role": "user", "content": prompt}], params) for one in (llm, guessing)]
        streams = [list(guessing.stream(prompt, params)), pieces]
        lists = [guessing.generate(prompt, params), several]
        idle(guessing)
    for outputs, same in ((lists[0], expected), (lists[1], expected), chats[::-1]):
        assert [(o.text, o.output_ids, o.finish_reason, o.index) for o in outputs] == [(o.text, o.output_ids, o.finish_reason, o.index) for o in same]
        for one, other in zip(outputs, same):
            engines.close(one.logprobs, other.logprobs)
            assert other.speculation is None and one.speculation["spec_accept_length"] > 1
            assert one.speculation["spec_verify_ct"] + one.speculation["spec_num_correct_drafts"] >= 59 > one.speculation["spec_verify_ct"]
    for pieces in streams:
        assert max(len(p.output_ids) for p in pieces) > 1
        for whole in expected:
            mine = [p for p in pieces if p.index == whole.index]
            assert "".join(p.text for p in mine) == whole.text and sum((p.output_ids for p in mine), []) == whole.output_ids
            engines.close(sum((p.logprobs for p in mine), []), whole.logprobs)
            assert mine[-1].speculation["spec_verify_ct"] < 59 and all(p.speculation is None and p.finish_reason is None for p in mine[:-1])


def test_the_drafter_of_the_docs_guesses_rightly_alone_and_joined(path, llm):
    code = re.search(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "speculation.md").read_text(), re.DOTALL)[1]
    names = {"np": np, "drafter": spec.drafter}
    exec(code, names)
    try:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        expected = llm.generate("the cat", params).output_ids
        names["Phrases"].known.append(expected[5:30])
        for algorithm in ("phrases", "ngram+phrases"):
            with LLM(str(path), max_total_tokens=512, speculative_algorithm=algorithm) as guessing:
                output = guessing.generate("the cat", params)
            assert output.output_ids == expected and output.speculation["spec_num_correct_drafts"] >= 10
    finally:
        del spec.DRAFTERS["phrases"]


def test_a_drafter_nobody_knows_is_refused_by_name(path):
    with pytest.raises(ValueError, match="speculative_algorithm is 'ngram.eagle', expected one of ngram, radix"):
        LLM(str(path), max_total_tokens=512, speculative_algorithm="ngram+eagle")


def test_cache_salt_keeps_prefixes_apart(llm):
    ids = list(range(60, 160))
    cached = [llm.generate(ids, GREEDY, cache_salt=salt).cached_tokens for salt in ("x", "y", None, "x")]
    assert cached == [0, 0, 0, 99]


@pytest.mark.parametrize("call, text", [
    (lambda llm: llm.generate("a", SamplingParams(temperature=-1)), "temperature"), (lambda llm: llm.generate(""), "no tokens"),
    (lambda llm: llm.generate(["a", "b"], [GREEDY]), "2 prompts"), (lambda llm: llm.generate("a", dict(tmperature=1)), "tmperature"),
    (lambda llm: llm.generate([[1], [99999]]), "prompt"), (lambda llm: llm.generate("a " * 600), "tokens"),
    (lambda llm: llm.generate("a", SamplingParams(regex="(a)\\1")), "regex"), (lambda llm: list(llm.stream("a", dict(n=0))), "n "),
    (lambda llm: llm.generate([[1.7]]), "token ids"), (lambda llm: llm.generate(None), "token ids"), (lambda llm: llm.generate(b"abc"), "text"),
    (lambda llm: llm.generate("\ud800"), "Unicode"), (lambda llm: llm.generate([{"role": "user"}]), "token ids"), (lambda llm: llm.chat("hi"), "messages"),
    (lambda llm: list(llm.stream(["a", "b"])), "token ids"), (lambda llm: llm.chat([{"role": "robot", "content": "x"}]), "robot"), (lambda llm: llm.chat([]), "empty")])
def test_bad_calls_are_refused_in_a_sentence(llm, call, text):
    with pytest.raises(RequestError, match=text):
        call(llm)
    idle(llm)


def test_an_empty_list_is_an_empty_list(llm):
    assert llm.generate([]) == []


def test_unknown_flags_are_named():
    with pytest.raises(TypeError, match="max_seq_len"):
        LLM("demo", max_seq_len=5)


def test_an_llm_that_is_dropped_ends_its_threads(path):
    def ours():
        gc.collect()
        return {t for t in threading.enumerate() if t.name.startswith("nano_sgl")}
    before = ours()
    for off in (True, False):
        llm = LLM(str(path), max_total_tokens=512, disable_overlap_schedule=off)
        pieces = llm.stream("a", GREEDY)
        next(pieces)
        made = ours() - before
        assert len(made) == 2 - off
        del llm
        assert ours() - before == made, "an open stream keeps the engine"
        assert len(list(pieces)) == 11
        del pieces
        assert ours() == before


@pytest.mark.parametrize("end, code", [("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_program_that_ends_in_the_middle_of_a_stream_ends_quietly(path, end, code):
    script = f"""import sys; from nano_sgl import LLM
llm = LLM({str(path)!r}, max_total_tokens=512)
pieces = llm.stream("a", dict(max_tokens=400, ignore_eos=True))
next(pieces)
{end}"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "step failed" not in done.stderr and done.stderr.count("Traceback") == (code == 1), done.stderr


def test_after_shutdown_calls_say_so(path):
    llm = LLM(str(path), max_total_tokens=512)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="ended"):
        llm.generate("a")


def test_a_closed_event_loop_leaves_the_engine_alive(llm):
    async def main():
        asyncio.create_task(llm.agenerate("a", SamplingParams(max_tokens=300, ignore_eos=True)))
        await asyncio.sleep(0.05)
    for _ in range(3):
        asyncio.run(main())
        assert llm.generate("the cat", GREEDY).finish_reason == "length"
    idle(llm)


def test_shutdown_ends_calls_that_run_and_calls_that_queue(path):
    llm = LLM(str(path), max_total_tokens=512, max_running_requests=1)
    ended = []

    def call():
        try:
            llm.generate("a", SamplingParams(max_tokens=400, ignore_eos=True))
        except RuntimeError as error:
            ended.append(str(error))
    threads = [threading.Thread(target=call) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    llm.shutdown()
    for t in threads:
        t.join(10)
    assert len(ended) == 3 and not any(t.is_alive() for t in threads)


def test_prompts_may_be_arrays(llm):
    assert llm.generate(np.array([5, 6, 7]), GREEDY).output_ids == llm.generate([5, 6, 7], GREEDY).output_ids


def test_the_engines_death_reaches_who_waits(path):
    llm = LLM(str(path), max_total_tokens=512)
    llm.engine.scheduler.next_batch = lambda guesses: 1 / 0
    with pytest.raises(RuntimeError, match="ended"):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="ended"):
        llm.generate("a")


def test_the_cache_is_emptied_and_counts_are_read_between_steps(path):
    with LLM(str(path), max_total_tokens=256) as llm:
        llm.generate([5, 6, 7, 8], GREEDY)
        info = llm.get_server_info()
        assert info["max_total_tokens"] == 256 and info["stats"]["finished"] == 1 and info["stats"]["kv_cached"] > 0
        assert llm.flush_cache() and llm.get_server_info()["stats"]["kv_cached"] == 0
        stream = llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        assert not llm.flush_cache()
        stream.close()
    with pytest.raises(RuntimeError, match="ended"):
        llm.flush_cache()


# ------------------------------------------------------------------------------------------------------------------- holds, roles

def until(what, seconds=20):
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.01)


def test_a_hold_stays_until_its_children_have_come(llm):
    def stats():
        return llm.engine.stats()["holds"], llm.engine.stats()["held_tokens"]

    prefix = "when does a cat sit on a mat and why? "
    kept = len(llm.tokenizer.encode(prefix)) - 1
    hold = llm.hold(prefix, 4)
    until(lambda: stats() == (1, kept))
    idle(llm)
    one = llm.generate([prefix + "a", prefix + "b"], SamplingParams(n=2, max_tokens=3, ignore_eos=True), parent=hold)
    assert len(one) == 4 and one[0].cached_tokens == kept and stats() == (1, kept), "a call is one child, however many requests it makes"
    assert [o.finish_reason for o in llm.stream(prefix + "c", GREEDY, parent=hold)][-1] == "length" and stats()[0] == 1
    asyncio.run(llm.agenerate(prefix + "d", GREEDY, parent=hold))
    assert llm.score(prefix, ["yes", "no"], parent=hold)[0].cached_tokens >= kept - 1 and stats() == (0, 0)
    assert llm.generate(prefix, GREEDY, parent=hold).text == llm.generate(prefix, GREEDY).text
    idle(llm)


def test_ids_are_held_whole_and_what_is_released_is_not_held(llm):
    ids = llm.tokenizer.encode("a mat and a cat and a mat and a cat")
    holds = [llm.hold(ids, 1), llm.hold(ids[:5], 1, cache_salt="s", priority=3), llm.hold("z", 2)]
    until(lambda: llm.engine.stats()["held_tokens"] == len(ids) + 5 + 1)
    for n, hold in enumerate(holds):
        llm.release(hold)
        until(lambda: llm.engine.stats()["holds"] == 2 - n)
    llm.release(holds[0])
    llm.release("nobody's")
    hold = llm.hold("the cat " * 50, 3)
    llm.release(hold)
    idle(llm)
    assert llm.engine.stats()["holds"] == 0 and llm.generate("the cat", GREEDY, parent=hold).finish_reason == "length"


def test_holds_that_cannot_be_are_refused(llm):
    for prefix, children, message in (("a", 0, "children must be 1 or more"), ("a", -1, "children must be an integer"), ("a", "2", "children must be"),
                                      ("", 1, "no tokens"), (None, 1, "a prompt is text"), ("x" * 600, 1, "at most 512")):
        with pytest.raises(RequestError, match=message):
            llm.hold(prefix, children)
    with pytest.raises(RequestError, match="parent must be a string"):
        llm.generate("a", GREEDY, parent=5)


def test_an_llm_that_ends_takes_its_holds_along(path):
    with LLM(str(path), max_total_tokens=1024) as llm:
        llm.hold("the cat and the hat", 5)
        until(lambda: llm.engine.stats()["held_tokens"] > 0)
    with pytest.raises(RuntimeError, match="has ended"):
        llm.hold("the cat", 1)


def test_chat_roles_and_the_plain_form(llm, tmp_path):
    assert llm.chat_roles() == {"system": ("<|system|>", "<|end|>"), "user": ("<|user|>", "<|end|>"), "assistant": ("<|assistant|>", "<|end|>"),
                                "default_system": "", "source": "template"}
    bare = engines.tiny_path(tmp_path)
    tiny.edit(bare, "tokenizer_config.json", chat_template=None)
    with LLM(str(bare), max_total_tokens=256) as other:
        assert other.chat_roles()["source"] == "plain" and other.chat_roles()["user"] == ("USER:", "\n")
