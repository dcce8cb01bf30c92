"""scoring.py: choices behind a prefix, from one position on. The rule alone; then against `transformers`, on a tiny random model."""

import asyncio
import itertools

import pytest
import torch

import engines
import tiny
from nano_sgl import LLM
from nano_sgl.protocol import Chunk, Logprob, RequestError
from nano_sgl.scoring import MAX_SCORED, read_scores, read_texts, score_requests

WORDS = ["ab", "abc", "cd", "a", "b", "c", "d", " a", " ab", " "]


def encode(text: str, front=()) -> list[int]:
    """The longest word first, so that tokens reach over the place where two texts were put together."""
    ids = list(front)
    while text:
        word = max((w for w in WORDS if text.startswith(w)), key=len)
        ids.append(10 + WORDS.index(word))
        text = text[len(word):]
    return ids


# ----------------------------------------------------------------------------------------------------------------- the rule

@pytest.mark.parametrize("front", [(), (1,), (1, 2)])
def test_choices_begin_where_all_texts_are_still_alike(front):
    for prefix, a, b in itertools.product(["", "a", "ab", "cab", "ab ", "cd a"], ["c", "bc", " a", "cd", "b"], ["d", "b", "ab", " "]):
        coded = lambda text: encode(text, front)
        texts = read_texts(coded, prefix, [a, b], True)
        assert texts.ids == [coded(prefix + a), coded(prefix + b)]
        alike = [len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(coded(prefix), ids))]) for ids in texts.ids]
        assert texts.base == min(*alike, *(len(ids) - 1 for ids in texts.ids))
        assert all(len(ids) > texts.base for ids in texts.ids) and len(front) <= texts.base
        assert texts.front == len(front) and texts.alone == [[*front, *ids[texts.base:]] for ids in texts.ids]


def test_tokens_that_one_choice_merges_with_are_scored_in_all():
    texts = read_texts(encode, "cdab", ["c", "d"], False)
    assert [ids[texts.base:] for ids in texts.ids] == [encode("abc"), encode("ab") + encode("d")]
    texts = read_texts(encode, "cd a", ["b", " d"], False)
    assert [ids[texts.base:] for ids in texts.ids] == [encode(" ab"), encode(" a") + encode(" ") + encode("d")] and texts.alone == []


def test_a_blank_on_either_side_is_the_same():
    one, other = read_texts(encode, "d", [" ab", " a"], False), read_texts(encode, "d ", ["ab", "a"], False)
    assert one == other and one.base == 1


def test_what_cannot_be_scored_is_refused():
    for prefix, choices, message in (("a", [], "one or more texts"), ("a", "b", "one or more texts"), ("a", ["b", 3], "one or more texts"),
                                     ("a", ["b", ""], "'' adds no token"), (3, ["b"], "the prefix is a text, got 3"),
                                     ("a", ["b"] * (MAX_SCORED + 1), "at most 1024 entries; got 1025")):
        with pytest.raises(RequestError, match=message):
            read_texts(encode, prefix, choices, False)
    with pytest.raises(RequestError, match="' ' adds no token to the prefix"):
        read_texts(lambda text: encode(text.rstrip()), "a", ["b", " "], False)
    with pytest.raises(RequestError, match="surrogates"):
        read_texts(lambda text: list(text.encode()), "a", ["\ud800"], False)


def test_one_call_with_one_child_and_an_error_where_a_request_failed():
    asked = score_requests(read_texts(encode, "a", ["d", "cd"], True), "r", "hold", namespace="salt")
    assert [(r.rid, r.parent, r.namespace, r.params.logprob_start_len) for r in asked] == [
        ("r-0", "hold", "salt", 1), ("r-1", "", "salt", 1), ("r-2", "", "salt", 0), ("r-3", "", "salt", 0)]
    chunks = {r.rid: Chunk(rid=r.rid, finish_reason="length", prompt_logprobs=[Logprob(1, -1.0)]) for r in asked}
    assert [score.text for score in read_scores(["d", "cd"], asked, chunks)] == ["d", "cd"]
    chunks["r-2"] = Chunk(rid="r-2", finish_reason="abort", error="it ran too long", status=504)
    with pytest.raises(RequestError, match="it ran too long") as error:
        read_scores(["d", "cd"], asked, chunks)
    assert error.value.status == 504


# ----------------------------------------------------------------------------------------------------------------- against transformers

@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), max_total_tokens=4096) as made:
        yield made
        made.engine.check()


@pytest.fixture(scope="module")
def logprobs(path):
    """logprobs(ids): of each token but the first, behind those before it."""
    model = tiny.reference(path)

    @torch.no_grad()
    def of(ids: list[int]) -> list[float]:
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        return [float(rows[n, i]) for n, i in enumerate(ids[1:])]
    return of


PROMPTS = [("Is the sky blue? ", ["yes", "no", "the", "then and now"]), ("on th", ["e", "en", "is"]), ("one", [" and", " an", "s"]), ("", ["the", "in on"]),
           ("x" * 300, ["y", "the cat and the dog"]), ("\u00e9", ["\u00e8", "t"])]


def test_scores_are_the_models(llm, logprobs):
    for prefix, choices in PROMPTS:
        scores = llm.score(prefix, choices, unconditional=True)
        assert [s.text for s in scores] == choices
        assert scores == llm.score(prefix, choices, unconditional=True) or scores[0].cached_tokens < len(llm.tokenizer.encode(prefix))
        before, ids = llm.tokenizer.encode(prefix), [llm.tokenizer.encode(prefix + choice) for choice in choices]
        base = len(ids[0]) - len(scores[0].tokens)
        assert base <= len(before) and len({tuple(one[:base]) for one in ids}) == 1
        for score, whole in zip(scores, ids):
            assert [t.token_id for t in score.tokens] == whole[base:] == [t.token_id for t in score.unconditional]
            assert score.prompt_tokens == len(whole)
            expected = ([None] + logprobs(whole))[base:]
            for token, value in zip(score.tokens, expected):
                assert (token.logprob is None) == (value is None) and (value is None or abs(token.logprob - value) < 1e-4)
            assert score.unconditional[0].logprob is None, "this tokenizer begins a text with nothing"
            for token, value in zip(score.unconditional[1:], logprobs(whole[base:])):
                assert abs(token.logprob - value) < 1e-4


def test_the_sum_is_that_of_the_text_whatever_was_cut_where(llm, logprobs):
    """log p(choice | prefix) of two choices: the difference does not depend on where the common part is counted from."""
    for prefix, choices in PROMPTS[:3]:
        sums = [sum(t.logprob for t in s.tokens) for s in llm.score(prefix, choices)]
        whole = [sum(logprobs(llm.tokenizer.encode(prefix + choice))) for choice in choices]
        assert all(abs((a - sums[0]) - (b - whole[0])) < 1e-3 for a, b in zip(sums, whole))


def test_a_prefix_is_computed_once_for_all_choices(llm):
    counters, prefix = llm.engine.scheduler.counters, "".join(chr(97 + n * n % 26) for n in range(200))
    ids = llm.tokenizer.encode(prefix)
    llm.engine.flush_cache()
    before = counters.computed_tokens
    choices = ["QQ", "RRR", "SSSS"]
    scores = llm.score(prefix, choices)
    own = [len(s.tokens) for s in scores]
    base = scores[0].prompt_tokens - own[0]
    assert counters.computed_tokens - before == base + sum(own) + len(own) - 1, "the last token before is computed for each: its logits are not kept"
    before = counters.computed_tokens
    again = llm.score(prefix, choices)
    assert counters.computed_tokens - before == sum(own) + len(own) and [s.cached_tokens for s in again] == [base - 1] * 3 and len(ids) >= base
    assert [[round(t.logprob, 3) for t in s.tokens] for s in again] == [[round(t.logprob, 3) for t in s.tokens] for s in scores]


def test_scores_come_to_event_loops_too(llm):
    async def both():
        return await asyncio.gather(*(llm.ascore(prefix, choices) for prefix, choices in PROMPTS))
    for (prefix, choices), scores in zip(PROMPTS, asyncio.run(both())):
        expected = llm.score(prefix, choices)
        assert [[t.token_id for t in s.tokens] for s in scores] == [[t.token_id for t in s.tokens] for s in expected]
    with pytest.raises(RequestError, match="'' adds no token"):
        asyncio.run(llm.ascore("a", ["b", ""]))
    with pytest.raises(RequestError, match="the context length is 512"):
        llm.score("x" * 600, ["y"])


def test_behind_the_tokenizers_own_bos(tmp_path):
    """Where the tokenizer begins a text with BOS, it stands in front of the choices alone, too."""
    from tokenizers import Tokenizer, processors
    path = engines.tiny_path(tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 256)])
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(str(path), max_total_tokens=1024) as llm:
        assert llm.tokenizer.encode("a")[0] == 256
        [score] = llm.score("the ", ["cat"], unconditional=True)
        alone = llm.tokenizer.encode("the cat")[-len(score.tokens):]
        rows = torch.log_softmax(tiny.logits(path, [256, *alone]), -1)
        assert [t.token_id for t in score.unconditional] == alone
        for n, token in enumerate(score.unconditional):
            assert abs(token.logprob - float(rows[n, token.token_id])) < 1e-4
        [score] = llm.score("", ["cat"])
        assert all(token.logprob is not None for token in score.tokens)
