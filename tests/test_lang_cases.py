"""What people have met in such languages, on the demo model: scores by hand, boundaries, empty forks, lost errors, lost pieces. (F209 to F219.)"""

import re
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import nano_sgl.lang as sgl
from nano_sgl import LLM


@pytest.fixture(scope="module")
def llm(demo_path):
    with LLM(str(demo_path), dtype="float32", max_total_tokens=4096) as made:
        yield made
        deadline = time.monotonic() + 20
        while made.engine.has_work:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        made.engine.check()


@pytest.fixture(scope="module")
def by_hand(demo_path, llm):
    """The log-probabilities of a text's tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32)

    def logprobs(text):
        ids = torch.tensor([llm.tokenizer.encode(text)])
        with torch.no_grad():
            found = torch.log_softmax(model(ids).logits[0], -1)
        return [found[i - 1, ids[0, i]].item() for i in range(1, ids.shape[1])]
    return logprobs


def run(llm, *exprs, **options):
    def program(s):
        for expr in exprs:
            s += expr
    return sgl.function(program).run(backend=llm, **{"temperature": 0} | options)


def test_scores_are_what_they_are_said_to_be(llm):
    """F209: sums and means of choices of one and two tokens; what is reported is the arg-max of it."""
    state = run(llm, "Question: Is the sky blue?\nAnswer:", sgl.select("a", [" YES", " NO"]))
    meta = state.get_meta_info("a")
    assert [len(tokens) for tokens in meta["input_token_logprobs"]] == [2, 1]
    assert meta["sum_logprobs"] == pytest.approx([-5.907, -6.404], abs=0.02)
    assert meta["normalized_prompt_logprobs"] == pytest.approx([-2.954, -6.404], abs=0.02)
    assert state["a"] == " YES" and state.text().endswith("Answer: YES")


def test_a_choice_is_encoded_behind_its_prompt(llm, by_hand):
    """F211: a blank belongs to the prompt or to the choice, and the text is the same."""
    for prefix, choice in (("Answer:", " Hello"), ("Answer: ", "Hello")):
        meta = run(llm, prefix, sgl.select("a", [choice, choice + " there"])).get_meta_info("a")
        whole, longer = by_hand("Answer: Hello"), by_hand("Answer: Hello there")
        assert meta["sum_logprobs"] == pytest.approx([whole[-1], sum(longer[-2:])], abs=0.02)
        ids = [token for _, token, _ in meta["input_token_logprobs"][0]]
        assert llm.tokenizer.encode("Answer: Hello")[-len(ids):] == ids


@pytest.mark.parametrize("method", list(sgl.CHOICES_METHODS))
def test_every_method_reports_what_it_takes(llm, method):
    state = run(llm, "The capital of France is", sgl.select("a", [" Paris", " Rome", " Paris itself"], choices_method=method))
    values = state.get_meta_info("a")["normalized_prompt_logprobs"]
    assert state["a"] == [" Paris", " Rome", " Paris itself"][values.index(max(values))] and "Paris" in state["a"]


@pytest.mark.parametrize("before", [None, ""])
def test_a_fork_of_nothing(llm, before):
    """F213."""
    def program(s):
        if before is not None:
            s += before
        forks = s.fork(3)
        forks += lambda i: f"{i}, {i + 1}," + sgl.gen("v", max_tokens=4)
        forks.join()
    state = sgl.function(program).run(backend=llm, temperature=0)
    assert len(state["v"]) == 3 and all(state["v"])
    with pytest.raises(sgl.ProgramError, match="no tokens"):
        sgl.function(lambda s: s.__iadd__(sgl.gen("v", max_tokens=4)) and None).run(backend=llm)
    with pytest.raises(ValueError, match="at least 1"):
        sgl.function(lambda s: s.fork(0) and None).run(backend=llm)
    assert run(llm, "1, 2, 3, 4, 5,", sgl.gen("v", max_tokens=3))["v"].startswith(" 6")


def test_an_error_in_a_branch_is_told_in_time(llm):
    """F215: bad regexes and prompts that are too long, in one branch of three."""
    before = set(threading.enumerate())
    for bad in (sgl.gen("v", regex="("), "too long " * 9000 + sgl.gen("v")):
        def program(s):
            s += "Go. "
            forks = s.fork(3)
            forks += [sgl.gen("v", max_tokens=8), bad, sgl.gen("v", max_tokens=8)]
            forks.join()
        begin = time.monotonic()
        with pytest.raises(sgl.ProgramError, match=r"branch 1, .*test_lang_cases.py:\d+: .*(regex|tokens)") as caught:
            sgl.function(program).run(backend=llm)
        assert time.monotonic() - begin < 20 and caught.value.branch == "1"
    assert {t for t in set(threading.enumerate()) - before if t.name.startswith("program")} == set()
    assert run(llm, "1, 2, 3, 4, 5,", sgl.gen("v", max_tokens=3))["v"].startswith(" 6")


@pytest.mark.parametrize("before, regex", [("Age: ", "[0-9]{2}"), ("Age:", " [0-9]{2}")])
def test_a_blank_before_a_regex(llm, before, regex):
    """F217."""
    state = run(llm, before, sgl.gen("age", regex=regex, max_tokens=8))
    assert re.fullmatch(regex, state["age"]) and re.fullmatch("Age: [0-9]{2}", state.text())


def test_all_pieces_come_and_the_first_comes_early(llm):
    """F219: of the whole text, and of one variable."""
    def program(s):
        s += "1, 2, 3,"
        s += sgl.gen("a", max_tokens=24) + "\nEnd: " + sgl.gen("b", max_tokens=8)
    function = sgl.function(program)
    state = function.run(backend=llm, temperature=0, stream=True)
    pieces, running = [], []
    for piece in state.text_iter():
        pieces.append(piece)
        running.append(state._pending["a"] > 0)
    assert "".join(pieces) == state.text() and len(pieces) > 5
    assert any(running[1:]), "a piece of the first gen came only after its end"
    state = function.run(backend=llm, temperature=0, stream=True)
    assert "".join(state.text_iter("b")) == state["b"]
