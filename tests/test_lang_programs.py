"""The programs of examples/lang: what they are made of, that hints and threads change no text, and that no token is computed twice.

A `Ledger` writes down which columns of which request every step of an engine computes. All prompts and outputs together are one trie, so what has to
be prefilled can be counted without asking the scheduler. Of the requests, in the order in which they start, each costs

    the nodes of its prompt that nobody has computed before, as a prompt or as an output,
    or one token where there is no such node: without it there are no logits,
    and, if it scores, all that it scores: logits are not cached.
"""

import ast
import collections
import contextlib
import json
import random
import re
import runpy
import sys
import time
from pathlib import Path

import engines
import pytest
from test_lang import LIMIT_S

import nano_sgl.lang as sgl
from nano_sgl import LLM

EXAMPLES = Path(__file__).parent.parent / "examples" / "lang"
sys.path.insert(0, str(EXAMPLES))

import few_shot  # noqa: E402
import hierarchical_summary  # noqa: E402
import json_decode  # noqa: E402
import llm_judge  # noqa: E402
import multi_turn_chat  # noqa: E402
import pipeline  # noqa: E402
import react  # noqa: E402
import self_consistency  # noqa: E402
import skeleton_of_thought  # noqa: E402
import tree_of_thought  # noqa: E402

SMALL = {  # program -> sizes at which a tiny model takes a second
    multi_turn_chat: {"chats": 2, "turns": 3, "tokens": 8},
    tree_of_thought: {"problems": 2, "width": 3, "depth": 2, "beam": 2, "tokens": 6},
    skeleton_of_thought: {"questions": 2, "points": 3, "tokens": 8},
    llm_judge: {"essays": 2, "sides": 3, "tokens": 6},
    react: {"agents": 3, "steps": 2, "tokens": 6},
    few_shot: {"shots": 3, "questions": 6},
    json_decode: {"characters": 2},
    pipeline: {"questions": 3, "passages": 2, "tokens": 6},
    self_consistency: {"problems": 2, "samples": 4, "tokens": 6, "warmth": 0.0},
    hierarchical_summary: {"parts": 3, "tokens": 8},
}
BY_NAME = pytest.mark.parametrize("program", SMALL, ids=lambda program: program.__name__)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Long enough for a character a token, and of so many tokens that none is certain."""
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"), max_position_embeddings=16384)


@contextlib.contextmanager
def configured(**values):
    """sgl.config with other values."""
    before = {name: getattr(sgl.config, name) for name in values}
    for name, value in values.items():
        setattr(sgl.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sgl.config, name, value)


def settled(llm):
    """Audit an engine that has nothing to do: nothing is locked or held."""
    scheduler, deadline = llm.engine.scheduler, time.monotonic() + LIMIT_S
    while scheduler.reqs or len(scheduler.holds) or scheduler.tree.protected or not llm._loop.inbox.empty():
        assert time.monotonic() < deadline, f"left: {list(scheduler.reqs)}, {len(scheduler.holds)} holds, {scheduler.tree.protected} tokens locked"
        time.sleep(0.005)
    llm.engine.check()
    assert scheduler.slots.available + scheduler.tree.evictable == scheduler.slots.capacity


class Ledger:
    """What an engine computes, step by step, while a `with` lasts. Engines are plain: no overlap, no guesses."""

    def __init__(self, llm):
        self.scheduler, self.rows = llm.engine.scheduler, []

    def __enter__(self):
        self.before, plan = self.scheduler.counters.computed_tokens, self.scheduler.next_batch

        def next_batch(*args):
            batch = plan(*args)
            if batch is not None:
                self.rows += zip(batch.reqs, batch.starts.tolist(), batch.q_lens.tolist())
            return batch
        self.scheduler.next_batch = next_batch
        return self

    def __exit__(self, *_):
        del self.scheduler.next_batch
        self.computed = self.scheduler.counters.computed_tokens - self.before

    @property
    def decoded(self):
        """Tokens that were computed behind prompts; or again, since a grammar was not there yet."""
        done, found = collections.Counter(), 0
        for req, start, n in self.rows:
            found += start + n - max(start, min(req.prompt_len, start + n)) if start >= done[req] else n
            done[req] = start + n
        return found

    @property
    def prefilled(self):
        return self.computed - self.decoded

    @property
    def distinct(self):
        """What has to be prefilled."""
        trie, paths, there, cost = {}, {}, set(), 0

        def path(ids):
            node = 0
            for token in ids:
                node = trie.setdefault((node, token), len(trie) + 1)
                yield node
        for req, start, n in self.rows:
            if req not in paths:
                paths[req] = list(path(req.ids().tolist()))
                scored = req.prompt_len if req.params.prompt_logprobs is None else max(req.params.logprob_start_len - 1, 0)
                cost += max(sum(at >= scored or node not in there for at, node in enumerate(paths[req][:req.prompt_len])), 1)
                there.update(paths[req][:req.prompt_len])
            there.update(paths[req][start:start + n])
        return cost


def engine(path, **flags):
    return LLM(str(path), dtype="float32", **({"max_total_tokens": 32768, "jump_forward": "off", "disable_overlap_schedule": True} | flags))


# ------------------------------------------------------------------------------------------------------------------- what they are made of

def check_multi_turn_chat(states, chats, turns, tokens):
    for state, questions in zip(states, multi_turn_chat.CHATS[:chats], strict=True):
        messages = state.messages()
        assert [m["role"] for m in messages] == ["system"] + ["user", "assistant"] * turns
        assert [m["content"] for m in messages[1::2]] == questions[:turns] and [m["content"] for m in messages[2::2]] == [
            state[f"answer_{i}"] for i in range(turns)]


def check_tree_of_thought(states, problems, width, depth, beam, tokens):
    for state, problem in zip(states, tree_of_thought.PROBLEMS[:problems], strict=True):
        branches = collections.Counter(node.expr.kind for node in state.graph.nodes)
        inner = 1 + beam * (depth - 1)          # states that were forked
        assert branches["fork"] == inner and branches["fork_item"] == branches["select"] == inner * width and state["leaves"] == beam * width
        best = state.ret_value
        assert best.branch.count(".") == depth - 1 and problem in best.messages()[1]["content"] and best["verdict_0"] in tree_of_thought.VERDICTS
        assert [m["role"] for m in best.messages()] == ["system", "user"] + ["user", "assistant"] * (2 * depth + 1)
        assert len(state["steps"]) == depth and best.text().endswith(state["answer"] + "<|end|>")


def check_skeleton_of_thought(states, questions, points, tokens):
    for state, question in zip(states, skeleton_of_thought.QUESTIONS[:questions], strict=True):
        assert state.messages()[1] == {"role": "user", "content": question} and len(state["details"]) == points
        assert re.fullmatch("".join(rf"{i + 1}\.[^\n]*\n" for i in range(points)), state.messages()[2]["content"])
        assert state["answer"].startswith("1. ") and all(f"\n{i + 1}. {state['details'][i]}" in state["answer"] for i in range(1, points))


def check_llm_judge(states, essays, sides, tokens):
    for state, essay in zip(states, llm_judge.ESSAYS[:essays], strict=True):
        assert [m["role"] for m in state.messages()] == ["system", "user", "user", "assistant"] and essay in state.messages()[1]["content"]
        assert len(state["judgement"]) == len(state["grade"]) == sides and {*state["grade"], state["verdict"]} <= set(llm_judge.GRADES)
        assert all(judgement in state.messages()[2]["content"] for judgement in state["judgement"])


def check_react(states, agents, steps, tokens):
    for state, (question, script) in zip(states, react.AGENTS[:agents], strict=True):
        text = state.text().removeprefix(react.EXAMPLE)
        assert text.startswith(f"Question: {question}\nThought 1:") and text.endswith(f"Finish [{state['answer']}]\n")
        assert all(f"[{word}]\nObservation {i}: {react.PAGES[word]}\n" in text for i, word in enumerate(script[:steps], 1))
        assert all(state[f"action_{i}"] in (" Open", " Search") for i in range(1, steps + 1))


def check_few_shot(states, shots, questions):
    for state, (question, options, _) in zip(states, few_shot.QUESTIONS[:questions], strict=True):
        assert state.text().endswith(few_shot.asked(question, options) + state["answer"]) and state["answer"] in few_shot.LETTERS
        assert len(state.get_meta_info("answer")["normalized_prompt_logprobs"]) == 4 and state.text().count("Answer:") == shots + 1


def check_json_decode(states, characters):
    assert len(states) == 3 * characters
    for i, state in enumerate(states):
        assert json_decode.CHARACTERS[i % characters] in state.messages()[1]["content"] and state.messages()[2]["content"] == state["profile"]
        if i < characters and state.get_meta_info("profile")["finish_reason"]["type"] == "length":
            continue            # a model without sense may fill a string with escapes
        profile = json.loads(state["profile"])
        assert list(profile) == list(json_decode.FIELDS) and 1 <= profile["age"] <= 99 and profile["role"] in json_decode.ROLES
        assert i < characters or re.fullmatch(json_decode.REGEX, state["profile"])
        assert i < 2 * characters or (state["name"], int(state["age"]), state["role"]) == (profile["name"], profile["age"], profile["role"])


def check_pipeline(states, questions, passages, tokens):
    for state, question in zip(states, pipeline.QUESTIONS[:questions], strict=True):
        assert len(state["passages"]) == passages and set(state["passages"]) <= set(pipeline.CORPUS)
        listed = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(state["passages"], 1))
        assert state.text().endswith(f"passages: {listed}\nquestion: {question}\nanswer:{state['output']}")


def check_self_consistency(states, problems, samples, tokens, warmth):
    for state, problem in zip(states, self_consistency.PROBLEMS[:problems], strict=True):
        assert len(state["thought"]) == len(state["answer"]) == samples and all(re.fullmatch("[0-9]{1,3}", answer) for answer in state["answer"])
        assert state["votes"] == state["answer"].count(state["voted"]) == max(map(state["answer"].count, state["answer"]))
        assert state.messages()[-1] == {"role": "user", "content": problem}


def check_hierarchical_summary(states, parts, tokens):
    assert len(states) == {3: 3 + 2 + 1, 4: 4 + 2 + 1}[parts]
    assert [state.messages()[1]["content"].removeprefix("The text: ") for state in states[:parts]] == hierarchical_summary.STORY[:parts]
    first, second = (state["summary"].strip() for state in states[:2])
    assert states[parts].messages()[1]["content"] == f"The text: {first} {second}"


# ------------------------------------------------------------------------------------------------------------------------ on a tiny model

@pytest.fixture(scope="module")
def ran(tiny_model):
    """ran(program, hints, parallel): the states of a run on a fresh engine, and what it computed; each is run once."""
    known = {}

    def run(program, hints=True, parallel=True):
        if (program, hints, parallel) not in known:
            with engine(tiny_model) as llm, configured(hints=hints, parallel=parallel), Ledger(llm) as ledger:
                states = program.run(llm, **SMALL[program])
                settled(llm)
            known[program, hints, parallel] = states, ledger
        return known[program, hints, parallel]
    return run


@BY_NAME
def test_what_a_program_makes(ran, program):
    states, _ = ran(program)
    assert all(state.error() is None for state in states)
    globals()[f"check_{program.__name__}"](states, **SMALL[program])


@BY_NAME
def test_hints_and_threads_change_no_text(ran, program):
    texts = [[state.text() for state in ran(program, hints, parallel)[0]] for hints in (True, False) for parallel in (True, False)]
    assert texts[0] == texts[1] == texts[2] == texts[3]


@BY_NAME
def test_what_branches_and_batches_share_is_computed_once(ran, program):
    for hints in (True, False):
        for parallel in (True, False):
            _, ledger = ran(program, hints, parallel)
            assert ledger.prefilled == ledger.distinct, (hints, parallel)
    declared, found = ran(program)[1], ran(program, hints=False)[1]
    holds = {req for req, *_ in declared.rows if req.request.children}
    assert 0 <= declared.prefilled - found.prefilled <= len(holds), "a hold costs a token where all of it is there, and nothing otherwise"


# ------------------------------------------------------------------------------------------------------- what a declaration is worth

LONG = "".join(f"Rule {i}: what was said {i * 7 % 100} pages ago still holds. " for i in range(40))


@sgl.function
def ruled(s, number):
    s += sgl.system(LONG)
    s += sgl.user(f"{number} is the number of this question. Which rule is for it?") + sgl.assistant(sgl.gen("rule", max_tokens=5))


@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 256}, {"page_size": 16}, {"disable_overlap_schedule": False}], ids=str)
def test_a_batch_prefills_what_it_has_in_common_once(tiny_model, flags):
    batch = [{"number": number} for number in range(20)]
    for hints in (True, False):
        with engine(tiny_model, **flags) as llm, configured(hints=hints), Ledger(llm) as ledger:
            states = ruled.run_batch(batch, backend=llm, temperature=0)
            settled(llm)
        assert [re.search(r"user\|>(\d+) is", state.text())[1] for state in states] == [str(number) for number in range(20)]
        if "page_size" not in flags:
            assert ledger.prefilled == ledger.distinct
        else:           # whole pages are shared; of the one in which two part, what is the same is copied
            assert ledger.distinct <= ledger.prefilled <= ledger.distinct + 20 * 16
        assert len(LONG) < ledger.prefilled < len(LONG) + 20 * 120


class Traffic:
    """Other people's requests, always of other text: `asked` tokens each time."""

    def __init__(self, llm, asked):
        self.llm, self.asked, self.random = llm, asked, random.Random(0)

    def __call__(self, times=2):
        for _ in range(times):
            self.llm.generate([self.random.randrange(256) for _ in range(self.asked)], {"max_tokens": 1})


@sgl.function
def with_tools(s, wait):
    """Branches that wait for something before they ask."""
    s += LONG[:600]
    forks = s.fork(3)
    for i, f in enumerate(forks):
        wait()
        f += f"{i} is this branch." + sgl.gen("v", max_tokens=4)
        f.sync()
    forks.join()


@sgl.function
def one_by_one(s, wait, number):
    s += LONG[:600]
    wait()
    s += f"{number} is this program." + sgl.gen("v", max_tokens=4)


@pytest.mark.parametrize("run", [lambda llm, wait: with_tools.run(wait=wait, backend=llm, temperature=0),
                                 lambda llm, wait: one_by_one.run_batch([(wait, i) for i in range(3)], backend=llm, temperature=0, num_threads=1)],
                         ids=["a fork", "a batch"])
def test_in_a_pool_too_small_what_was_declared_stays_and_what_was_not_is_computed_again(tiny_model, run):
    again = {}
    for hints in (True, False):
        with engine(tiny_model, max_total_tokens=1400) as llm, configured(hints=hints), Ledger(llm) as ledger:
            run(llm, Traffic(llm, 700))
            settled(llm)
            assert llm.engine.scheduler.counters.retractions == 0 and llm.engine.scheduler.counters.evicted_tokens > 700
        again[hints] = ledger.prefilled - ledger.distinct
    assert again[False] == 2 * 600 and again[True] == 2, "of a text that is held the last token is not, since it may become another one"


# -------------------------------------------------------------------------------------------------------------------- nothing is left held

def _copy(s, i):
    with s.copy() as aside:
        aside += f"{i} aside" + sgl.gen("v")
    s += f"{i} then" + sgl.gen("w")


def _fork_of_forks(s, i):
    for f in s.fork(2):
        f += f"{i}"
        f.fork(2).__iadd__(lambda k: f"{k}" + sgl.gen("v"))


def _fork_that_is_half_used(s, i):
    s.fork(3)[i % 3].__iadd__(sgl.gen("v", n=2) + sgl.select("w", [" a", " b"]))


def _nothing(s, i):
    if i % 2:
        s += f"{i}" + sgl.gen("v")


def _raises(s, i):
    s.fork(2).__iadd__(f"{i}" + sgl.gen("v"))
    1 // (i - 1)


def _is_refused(s, i):
    s.fork(2).__iadd__(f"{i}" + sgl.gen("v", regex="(" if i == 1 else "ab"))


@pytest.mark.parametrize("rest", [_copy, _fork_of_forks, _fork_that_is_half_used, _nothing, _raises, _is_refused], ids=lambda rest: rest.__name__)
def test_whatever_a_batch_does_with_what_it_declared_nothing_is_held_afterwards(tiny_model, rest):
    @sgl.function
    def program(s, i):
        s += LONG[:300]
        rest(s, i)
    for threads in ("auto", 1):
        with engine(tiny_model) as llm, Ledger(llm) as ledger:
            states = program.run_batch([(i,) for i in range(4)], backend=llm, temperature=0, max_new_tokens=3, num_threads=threads)
            settled(llm)
        assert [state.error() is None for state in states] == [True, rest not in (_raises, _is_refused), True, True]
        if rest is not _raises:         # whose requests may be aborted half way
            assert ledger.prefilled == ledger.distinct


# --------------------------------------------------------------------------------------------------------------------- on the demo model

def test_every_program_is_here_and_short_enough_to_read():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {program.__name__ for program in SMALL} | {"common"}
    for program in SMALL:
        source = Path(program.__file__).read_text()
        assert len(source.splitlines()) <= 70 and all(len(line) <= 150 for line in source.splitlines())
        assert f"python examples/lang/{program.__name__}.py" in ast.get_docstring(ast.parse(source))


@pytest.fixture(scope="module")
def demo(demo_path):
    with engine("demo", max_total_tokens=16384, jump_forward="draft") as llm:
        yield llm
        settled(llm)


SHOWS = {  # program -> what it is to print, and its sizes on the demo model; where texts of a random model show the same, none
    multi_turn_chat: (r"user: Name a fruit(.|\n)*\[[2-9]\d of \d\d prompt tokens were there already\]", {"chats": 1, "turns": 2, "tokens": 8}),
    tree_of_thought: (r"A farmer has 17 (.|\n)*\n  The answer is(.|\n)*\(branch [0-2]\.[0-2] of the tree\)", None),
    skeleton_of_thought: (r"How do I learn(.|\n)*\n2\.(.|\n)*\n\n1\. ", None),
    llm_judge: (r"grades: \w+, \w+, \w+; altogether \w+", None),
    react: (r"Action 1: (Open|Search) \[Heron\]\nObservation 1: The heron(.|\n)*Finish \[", None),
    few_shot: (r"What is seven times eight\? +[ABCD]\. (.|\n)*[0-3] of 3 are right", {"shots": 2, "questions": 3}),
    json_decode: (r"schema +{'name'.*\nregex +{'name'.*\nfields +{'name'.*", {"characters": 1}),
    pipeline: (r"found:  Peat is made", {"questions": 1, "passages": 1, "tokens": 8}),
    self_consistency: (r"(\d+, ){3}\d+: [1-4] of 4 say \d+", None),
    hierarchical_summary: (r"Mara kept the ferry.*\n  -> ", None),
}


@BY_NAME
def test_a_program_shows_what_it_has_made(request, capsys, program):
    pattern, sizes = SHOWS[program]
    if sizes is None:
        states, _ = request.getfixturevalue("ran")(program)
    else:
        demo = request.getfixturevalue("demo")
        with Ledger(demo) as ledger:
            states = program.run(demo, **sizes)
        settled(demo)
        assert not states[0].messages() or all(state.text().startswith("<|im_start|>system\n") for state in states)
        if program is not json_decode:      # whose grammar's guesses are computed with prompts
            assert 0 < ledger.prefilled <= ledger.distinct, "what the programs before it have computed is there already"
    program.show(states)
    assert re.search(pattern, capsys.readouterr().out)


def test_seeds_make_samples_different_and_runs_the_same(tiny_model):
    with engine(tiny_model) as llm:
        first, again, other = (self_consistency.run(llm, problems=1, samples=3, tokens=8, seed=seed)[0]["thought"] for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 3


def test_a_program_as_a_command(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["react.py", "--model", str(tiny_model)])
    runpy.run_path(str(EXAMPLES / "react.py"), run_name="__main__")
    assert re.search(r"Observation 2: (.|\n)*\n\[[\d,]+ prompt tokens, of which [\d,]{3,} were there already; \d+ tokens written\]\n",
                     capsys.readouterr().out)
