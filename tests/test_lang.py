"""The language on a backend that is scripted: what is asked of it, in which order, and what becomes of its answers and errors."""

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import nano_sgl.lang as sgl
from nano_sgl import ir
from nano_sgl.choices import CHOICES_METHODS, Score, Token
from nano_sgl.interpreter import PLAIN_ROLES, Thoughts

LIMIT_S = 20


class Scripted:
    """Answers a prompt by `answer(prompt, params)`: a text, a list of texts for n > 1, or an exception."""

    def __init__(self, answer=lambda prompt, params: "x", roles=None):
        self.answer, self.roles, self.lock = answer, roles, threading.Lock()
        self.asked, self.holds, self.released, self.parents, self.scored = [], {}, [], [], []

    def generate(self, prompts, params, *, parent=""):
        assert len(prompts) == len(params) == 1
        with self.lock:
            self.asked.append((prompts[0], params[0]))
            self.parents.append(parent)
        found = self.answer(prompts[0], params[0])
        found = found if isinstance(found, list) else [found] * params[0].get("n", 1)
        return [SimpleNamespace(text=text, finish_reason="stop", output_ids=[1] * len(text), prompt_ids=[1, 2], cached_tokens=0) for text in found]

    def stream(self, prompt, params, *, parent=""):
        with self.lock:
            self.asked.append((prompt, params))
        text = self.answer(prompt, params)
        pieces = text if isinstance(text, list) else list(text)
        for i, piece in enumerate(pieces):
            yield SimpleNamespace(text=piece, finish_reason="stop" if i == len(pieces) - 1 else None, output_ids=[i], prompt_ids=[1], cached_tokens=0)

    def score(self, prefix, choices, *, unconditional=False, parent=""):
        self.scored.append((prefix, tuple(choices), unconditional))
        return [Score(c, [Token(ord(x), -float(ord(x) % 7)) for x in c], [Token(ord(x), -1.0) for x in c] if unconditional else None) for c in choices]

    def hold(self, prefix, children, parent=""):
        with self.lock:
            self.holds[f"h{len(self.holds)}"] = (prefix, children)
            return f"h{len(self.holds) - 1}"

    def release(self, hold):
        self.released.append(hold)

    def chat_roles(self):
        return self.roles or PLAIN_ROLES


def run(program, backend=None, **options):
    return sgl.function(program).run(backend=backend or Scripted(), **options)


@pytest.fixture(autouse=True)
def no_threads_left():
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + LIMIT_S
    while left := {t for t in set(threading.enumerate()) - before if not t.name.startswith("asyncio") and type(t).__name__ != "TMonitor"}:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------------------------ text

def test_text_variables_and_messages():
    def program(s, q):
        s += sgl.system("Be short.")
        s += sgl.user(q)
        s += sgl.assistant("It is " + sgl.gen("a", max_tokens=5) + ".")
        return s["a"]
    backend = Scripted(lambda prompt, params: "red")
    state = run(program, backend, q="Colour?", temperature=0.5)
    assert state.ret_value == state["a"] == "red" and "a" in state and "b" not in state
    assert state.text() == "SYSTEM:Be short.\nUSER:Colour?\nASSISTANT:It is red.\n"
    assert state.messages() == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Colour?"},
                                {"role": "assistant", "content": "It is red."}]
    assert backend.asked == [("SYSTEM:Be short.\nUSER:Colour?\nASSISTANT:It is ", {"max_tokens": 5, "temperature": 0.5})]
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "stop", "matched": None} and meta["completion_tokens"] == 3 and meta["prompt_tokens"] == 2
    with pytest.raises(KeyError, match="'b'.*'a'"):
        state["b"]


def test_with_blocks_and_begin_end_are_the_same_as_messages():
    def blocks(s):
        with s.system():
            s += "A"
        with s.user():
            s += "B"
        with s.assistant():
            s += sgl.gen("x")

    def marks(s):
        s += sgl.system_begin() + "A" + sgl.system_end() + sgl.user_begin() + "B" + sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("x") + sgl.assistant_end()

    def methods(s):
        s += s.system("A") + s.user("B") + s.assistant(sgl.gen("x"))
    texts = {(state := run(p)).text() + repr(state.messages()) for p in (blocks, marks, methods)}
    assert len(texts) == 1


def test_a_template_with_a_default_system_message_and_one_without_system():
    roles = {"system": ("<s>", "</s>"), "user": ("<u>", "</u>"), "assistant": ("<a>", "</a>\n"), "default_system": "<s>default</s>"}

    def program(s, system):
        if system:
            s += sgl.system(system)
        s += sgl.user("q") + sgl.assistant(sgl.gen("x")) + sgl.user("r")
    backend = Scripted(roles=roles)
    assert run(program, backend, system="").text() == "<s>default</s><u>q</u><a>x</a>\n<u>r</u>"
    assert run(program, backend, system="me").text() == "<s>me</s><u>q</u><a>x</a>\n<u>r</u>"
    assert backend.asked[0][1]["stop"] == ["</a>"]
    with pytest.raises(sgl.ProgramError, match="no place for a system message.*user, assistant"):
        run(program, Scripted(roles={k: v for k, v in roles.items() if k != "system"}), system="me")


def test_nested_roles_and_wrong_ends_are_refused():
    for bad, what in ((lambda s: s.__iadd__(sgl.user("a" + sgl.assistant("b"))), "of the assistant begins inside of one of the user"),
                      (lambda s: s.__iadd__(sgl.user_end()), "of the user ends, but none is open")):
        with pytest.raises(sgl.ProgramError, match=what):
            run(lambda s: bad(s) and None)


def test_what_cannot_be_written_is_refused_with_a_hint():
    for bad in (5, None, ["a"], b"x"):
        with pytest.raises(TypeError, match="text and expressions"):
            run(lambda s: s.__iadd__(bad) and None)


def test_scopes_copies_and_variables_of_ones_own():
    def program(s):
        s += "a"
        with s.var_scope("part"):
            s += "b" + sgl.gen("g") + "c"
        with s.copy() as t:
            t += "only here" + sgl.gen("there")
        s["mine"] = 3
        s += "d"
    state = run(program)
    assert state.text() == "abxcd" and state["part"] == "bxc" and state["there"] == ["x"] and state["mine"] == 3


def test_run_defaults_gens_override_and_n_gives_lists():
    backend = Scripted(lambda prompt, params: ["one", "two"] if params.get("n") == 2 else "x")

    def program(s):
        s += sgl.gen("a", n=2, top_p=0.5, stop=["!"]) + sgl.gen("b", temperature=0)
    state = run(program, backend, max_new_tokens=7, stop="?", temperature=0.3, top_k=4, return_logprob=True)
    assert state["a"] == ["one", "two"] and state.text() == "onex" and len(state.get_meta_info("a")) == 2
    assert backend.asked[0][1] == {"max_tokens": 7, "n": 2, "top_p": 0.5, "stop": ["!"], "temperature": 0.3, "top_k": 4, "logprobs": 0}
    assert backend.asked[1][1] == {"max_tokens": 7, "stop": ["?"], "temperature": 0, "top_k": 4, "logprobs": 0}
    assert backend.asked[1][0] == "one"
    with pytest.raises(TypeError, match="no parameter tempratur"):
        run(program, backend, tempratur=1)


def test_dtypes():
    backend = Scripted(lambda prompt, params: "1")

    def program(s):
        s += sgl.gen_int("i", max_tokens=3) + sgl.gen("f", dtype=float) + sgl.gen_string("t") + sgl.gen("b", dtype="bool")
    run(program, backend)
    patterns = [params["regex"] for _, params in backend.asked]
    assert len(set(patterns)) == 4 and patterns[3] == "(True|False)" and backend.asked[0][1]["stop"] == [" ", "\n"]
    with pytest.raises(sgl.ProgramError, match="dtype is one of"):
        run(lambda s: s.__iadd__(sgl.gen("x", dtype="date")) and None)


def test_a_runs_seed_gives_every_gen_other_noise_the_same_every_time():
    def program(s):
        s += sgl.gen("a") + sgl.gen("b") + sgl.gen("c", seed=5)
        forks = s.fork(2)
        forks += sgl.gen("d")
        forks.join()
    seeds = []
    for seed in (1, 1, 2):
        backend = Scripted()
        run(program, backend, seed=seed)
        seeds.append(sorted(params["seed"] for _, params in backend.asked))
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 5 and 5 in seeds[0]


# ----------------------------------------------------------------------------------------------------------------- what runs when

def test_writing_never_waits_and_a_read_waits_for_its_variable_only():
    gates = {name: threading.Event() for name in "ab"}
    order = []

    def answer(prompt, params):
        name = "ab"[prompt.count("x")]
        assert gates[name].wait(LIMIT_S)
        return "x"

    def program(s):
        s += "t" + sgl.gen("a") + sgl.gen("b") + "end"
        order.append("written")
        gates["a"].set()
        assert s["a"] == "x"
        order.append("a")
        assert not gates["b"].is_set()
        gates["b"].set()
        order.append(s["b"])
    state = run(program, Scripted(answer))
    assert order == ["written", "a", "x"] and state.text() == "txxend"


def test_branches_generate_at_the_same_time_and_a_fork_does_not_wait():
    barrier, first = threading.Barrier(5, timeout=LIMIT_S), threading.Event()

    def answer(prompt, params):
        if prompt == "p":
            assert first.wait(LIMIT_S)
            return "0"
        barrier.wait()
        return prompt[-1]

    def program(s):
        s += "p" + sgl.gen("head")
        forks = s.fork(5)
        forks += lambda i: f"/{i}" + sgl.gen("v")
        first.set()                      # only now can the parent go on
        forks.join()
        assert forks[2]["head"] == "0"
    state = run(program, Scripted(answer))
    assert state["v"] == list("01234") and state["head"] == "0" and state.text() == "p0"


def test_without_threads_the_same_in_order():
    def program(s):
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen("v")
        forks.join("concate_and_append")
    backend = Scripted(lambda prompt, params: f"<{prompt}>")
    state = sgl.function(program).run(backend=backend, use_thread=False)
    assert state.text() == "0<0>1<1>2<2>" and [prompt for prompt, _ in backend.asked] == ["0", "1", "2"]


def test_joins_gather_variables_and_concatenate():
    def program(s, mode):
        s += "p"
        s["known"] = 1
        forks = s.fork(2)
        forks += ["a" + sgl.gen("v"), "b" + sgl.gen("v") + sgl.gen("only")]
        forks.join(mode)
    state = run(program, mode="gather_variable")
    assert state["v"] == ["x", "x"] and state["only"] == ["x"] and state["known"] == 1 and state.text() == "p"
    state = run(program, mode="concate_and_append")
    assert state.text() == "paxbxx" and "v" not in state

    def talk(s):
        s += sgl.user("a")
        forks = s.fork(2)
        forks += lambda i: sgl.assistant(f"{i}")
        forks.join("concate_and_append")
    assert [m["content"] for m in run(talk).messages()] == ["a", "0", "1"]
    with pytest.raises(ValueError, match="join knows"):
        run(program, mode="other")


def test_forks_of_forks_of_nothing_and_of_wrong_sizes():
    def program(s):
        outer = s.fork(2)
        for i, f in enumerate(outer):
            inner = f.fork(2)
            inner += lambda k: f"{i}{k}" + sgl.gen("v")
            inner.join()
            f += "=" + "".join(f["v"])
        outer.join()
    backend = Scripted(lambda prompt, params: prompt)
    state = run(program, backend)
    assert state["v"] == [["00", "01"], ["10", "11"]] and not backend.holds
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="at least 1"):
            run(lambda s: s.fork(size) and None)
    with pytest.raises(ValueError, match="2 was given 1"):
        run(lambda s: s.fork(2).__iadd__(["a"]) and None)
    with pytest.raises(ValueError, match="position_ids_offset"):
        run(lambda s: s.fork(2, [1, 2]) and None)


def test_forks_declare_what_they_share_and_give_back_what_they_do_not_use():
    def program(s, lazy):
        s += "shared "
        forks = s.fork(3)
        for i, f in enumerate(forks):
            if i not in lazy:
                f += f"{i}" + sgl.gen("v") + sgl.gen("w")
        forks.join()
    backend = Scripted()
    run(program, backend, lazy=())
    assert backend.holds == {"h0": ("shared ", 3)} and not backend.released
    assert sorted(backend.parents) == ["", "", "", "h0", "h0", "h0"]
    run(program, backend, lazy=(1,))
    assert backend.released == ["h1"]
    sgl.config.hints = False
    try:
        run(program, backend, lazy=())
    finally:
        sgl.config.hints = True
    assert len(backend.holds) == 2


@pytest.mark.parametrize("how", ["generate", "stream", "select"])
def test_a_hold_is_given_up_where_the_request_that_was_to_come_has_failed(how):
    backend = Scripted()
    answer = {name: getattr(backend, name) for name in ("generate", "stream", "score")}

    def refusing(name):
        def method(prefix, *args, **named):
            if "bad" in str(prefix):
                raise ValueError("refused")
            return answer[name](prefix, *args, **named)
        return method

    def program(s):
        s += "shared "
        forks = s.fork(2)
        forks += lambda i: ("bad" if i else "good") + (sgl.gen("v") if how != "select" else sgl.select("v", ["a", "b"]))
        forks.join()
    for name in answer:
        setattr(backend, name, refusing(name))
    with pytest.raises(sgl.ProgramError, match="branch 1.*refused"):
        list(run(program, backend, stream=how == "stream").text_iter())
    assert backend.released == ["h0"]


def test_a_copy_leaves_what_a_batch_has_declared_to_its_source():
    @sgl.function
    def program(s, i):
        s += "the same in all of them, and long enough that it is worth a request of its own; "
        with s.copy() as aside:
            aside += f"{i}" + sgl.gen("v")
        s += f"{i}" + sgl.gen("w")
    backend = Scripted()
    program.run_batch([(0,), (1,)], backend=backend)
    assert sorted(backend.parents) == ["", "", "h0", "h0"] and len(backend.holds) == 1 and not backend.released


# ------------------------------------------------------------------------------------------------------------------------------ errors

def failing(prompt, params):
    if "(" in params.get("regex", ""):
        raise ValueError(f"regex {params['regex']!r}: a group is not closed")
    return "x"


def test_an_error_in_a_branch_reaches_join_with_branch_and_line():
    lines = []

    def program(s):
        s += "p"
        forks = s.fork(3)
        for i, f in enumerate(forks):
            f += sgl.gen("v", regex="(" if i == 1 else "a")
        lines.append(sys._getframe().f_lineno - 1)
        forks.join()
    begin = time.monotonic()
    with pytest.raises(sgl.ProgramError) as caught:
        run(program, Scripted(failing))
    assert time.monotonic() - begin < LIMIT_S
    error = caught.value
    assert error.branch == "1" and error.where == f"{__file__}:{lines[0]}" and "branch 1" in str(error) and "regex '('" in str(error)
    assert isinstance(error.__cause__, ValueError) and error.state["v"] is None if "v" in error.state else True
    assert run(program_that_works := lambda s: s.__iadd__(sgl.gen("v")) and None).text() == "x", program_that_works


def test_a_caught_error_is_the_programs_own_affair_and_an_unseen_one_is_raised():
    def catches(s):
        forks = s.fork(2)
        forks += [sgl.gen("v", regex="("), sgl.gen("v")]
        try:
            forks.join()
        except sgl.ProgramError as error:
            return error.branch, forks[1]["v"]
    assert run(catches, Scripted(failing)).ret_value == ("0", "x")

    def ignores(s):
        forks = s.fork(2)
        forks += [sgl.gen("v", regex="("), sgl.gen("v")]
    with pytest.raises(sgl.ProgramError, match="branch 0"):
        run(ignores, Scripted(failing))


@pytest.mark.parametrize("read", ["s['later']", "s.text()", "s.sync()", "s.messages()", "s.get_meta_info('later')", "s.fork(2).join()", "s.set_var('a', 1)"])
def test_who_reads_a_state_that_failed_is_told(read):
    def program(s):
        s += sgl.gen("v", regex="(") + sgl.gen("later")
        exec(read)
    with pytest.raises(sgl.ProgramError, match="not closed"):
        run(program, Scripted(failing))


def test_unborn_children_fail_with_their_parent():
    def program(s):
        s += sgl.gen("v", regex="(")
        forks = s.fork(2)
        forks += "more" + sgl.gen("w")
        return forks[1]["w"]
    with pytest.raises(sgl.ProgramError, match="not closed"):
        run(program, Scripted(failing))


def test_what_the_program_raises_comes_as_it_is_and_a_backends_error_output_is_one():
    with pytest.raises(ZeroDivisionError):
        run(lambda s: s.__iadd__(sgl.gen("v")) and 1 / 0)
    backend = Scripted()
    backend.generate = lambda *a, **k: [SimpleNamespace(text="", finish_reason="error", error="out of order")]
    with pytest.raises(sgl.ProgramError, match="out of order"):
        run(lambda s: s.__iadd__(sgl.gen("v")) and None, backend)


def test_what_has_not_begun_is_left_out_when_the_program_raises():
    begun, gate = threading.Event(), threading.Event()

    def answer(prompt, params):
        begun.set()
        assert gate.wait(LIMIT_S)
        return "x"

    def program(s):
        s += "p" + sgl.gen("a") + sgl.gen("b")
        forks = s.fork(2)
        forks += sgl.gen("c")
        assert begun.wait(LIMIT_S)
        threading.Timer(0.1, gate.set).start()
        raise KeyError("mine")
    backend = Scripted(answer)
    with pytest.raises(KeyError, match="mine"):
        run(program, backend)
    assert [prompt for prompt, _ in backend.asked] == ["p"]


class Abortable(Scripted):
    """Answers nothing until it is told to stop."""

    def __init__(self):
        super().__init__()
        self.running, self.begun = {}, threading.Semaphore(0)

    def generate(self, prompts, params, *, parent="", rid=""):
        self.asked.append((prompts[0], params[0]))
        self.running[rid] = stop = threading.Event()
        self.begun.release()
        assert stop.wait(LIMIT_S)
        return [SimpleNamespace(text="", finish_reason="abort")]

    def stream(self, prompt, params, **names):
        yield from self.generate([prompt], [params], **names)

    def abort(self, rid):
        self.running.pop(rid).set()


def test_what_runs_is_aborted_where_the_program_raises_is_cancelled_dropped_or_left():
    def raises(s, backend):
        forks = s.fork(2)
        forks += "p" + sgl.gen("v") + sgl.gen("w")
        for _ in range(2):
            assert backend.begun.acquire(timeout=LIMIT_S)
        raise KeyError("mine")

    def waits(s, backend):
        s += "p" + sgl.gen("v") + sgl.gen("w")
        return s["v"]
    begin = time.monotonic()
    backend = Abortable()
    with pytest.raises(KeyError, match="mine"):
        sgl.function(raises).run(backend, backend=backend)
    assert not backend.running and len(backend.asked) == 2
    for end in ("cancel", "drop"):
        backend = Abortable()
        state = sgl.function(waits).run(backend, backend=backend, stream=True)
        assert backend.begun.acquire(timeout=LIMIT_S)
        if end == "cancel":
            state.cancel()
            with pytest.raises(sgl.ProgramError, match="cancelled"):
                state.text()
        del state
        while backend.running:
            assert time.monotonic() - begin < LIMIT_S
            time.sleep(0.01)
        assert len(backend.asked) == 1
    backend = Abortable()
    found = sgl.function(lambda s, i: s.__iadd__("p" + (sgl.gen("v") if i else "")) and None).run_batch(
        [(0,), (1,), (2,)], backend=backend, generator_style=True)
    next(found)
    for _ in range(2):
        assert backend.begun.acquire(timeout=LIMIT_S)
    found.close()
    assert not backend.running and time.monotonic() - begin < LIMIT_S


def test_no_backend_and_no_such_method():
    with pytest.raises(ValueError, match="there is no backend"):
        sgl.function(lambda s: None).run()
    with pytest.raises(TypeError, match="generate"):
        sgl.function(lambda s: None).run(backend=object())
    backend = SimpleNamespace(generate=None)
    for wrong, what in (("text", "got 'text'"), (None, "got None"), ([("text", {})], "text and finish_reason")):
        bad = SimpleNamespace(generate=lambda *a, wrong=wrong, **k: wrong)
        with pytest.raises(sgl.ProgramError, match=what):
            run(lambda s: s.__iadd__(sgl.gen("v")) and None, bad)
    with pytest.raises(sgl.ProgramError, match="log-probabilities"):
        run(lambda s: s.__iadd__(sgl.select("v", ["a", "b"])) and None, backend)
    with pytest.raises(sgl.ProgramError, match="reads text only"):
        run(lambda s: s.__iadd__(sgl.user(sgl.image("cat.png"))) and None)
    with pytest.raises(sgl.ProgramError, match="reads text only"):
        run(lambda s: s.__iadd__(sgl.user(sgl.video("cat.mp4", 4))) and None)


def test_a_fork_that_failed_is_told_once():
    """Whoever catches a join's error has been told of all branches, and of what kept them from being born."""
    def program(s, bad):
        s += "p"
        forks = s.fork(3)
        forks += [sgl.gen("v", regex="("), sgl.gen("v", regex="("), sgl.gen("v")]
        try:
            forks.join()
        except sgl.ProgramError:
            return "fallback"
    assert run(program, Scripted(failing), bad=0).ret_value == "fallback"
    backend = Scripted()
    backend.hold = failing_hold
    assert run(program, backend, bad=0).ret_value == "fallback"


def failing_hold(*_, **__):
    raise ValueError("no room")


def test_a_release_that_fails_ends_nothing(caplog):
    def program(s, lazy):
        s += "p"
        forks = s.fork(2)
        if not lazy:
            forks += sgl.gen("v")
        forks.join()
        s += "end"
    backend = Scripted()
    backend.release = failing_hold
    assert run(program, backend, lazy=True).text() == "pend" and "could not be released" in caplog.text
    assert "".join(sgl.function(program).run(backend=backend, stream=True, lazy=True).text_iter()) == "pend"
    assert [s.text() for s in shots.run_batch([("e", "1?"), ("e", "2?")], backend=backend)]


def test_a_hold_is_released_behind_the_last_request():
    backend, order = Scripted(lambda *a: order.append("asked") or "x"), []
    backend.release = lambda hold: order.append("released")

    def program(s):
        s += "p"
        forks = s.fork(2)
        forks[1].sync()
        with pytest.raises(sgl.ProgramError):
            forks[0].__iadd__(sgl.gen("v", dtype="nothing")) and forks[0].sync()
        s += ""
        forks[1].__iadd__(sgl.gen("v"))
        forks[1].sync()
    run(program, backend)
    assert order == ["asked", "released"]


def test_branches_of_every_fork_have_their_own_names_and_noise():
    def program(s):
        for _ in range(3):
            with s.copy() as t:
                t += sgl.gen("v")
        forks = s.fork(2)
        forks += sgl.gen("w")
        forks.join()
    backend = Scripted()
    state = run(program, backend, seed=1)
    assert len({params["seed"] for _, params in backend.asked}) == 5
    assert [node.branch for node in state.graph.nodes if node.expr.kind == "gen"] == ["0", "1:0", "2:0", "3:0", "3:1"]


def test_where_no_thread_can_be_started_it_runs_where_it_is_written(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    def program(s):
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen("v")
        forks.join()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run(program)["v"] == ["x"] * 3


def test_ctrl_c_while_run_waits_leaves_out_what_has_not_begun():
    gate = threading.Event()

    def answer(prompt, params):
        gate.wait(LIMIT_S)
        return "x"

    def program(s):
        for _ in range(5):
            s += sgl.gen("v")
    backend, settle = Scripted(answer), sgl.ProgramState._settle

    def interrupted(self):
        sgl.ProgramState._settle = settle
        threading.Timer(0.05, gate.set).start()
        raise KeyboardInterrupt
    sgl.ProgramState._settle = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(program, backend)
    assert len(backend.asked) == 1


# --------------------------------------------------------------------------------------------------------------------------- streams

def test_text_iter_yields_as_it_comes_and_all_of_it():
    gate = threading.Event()

    def answer(prompt, params):
        if "2" in prompt:
            assert gate.wait(LIMIT_S)
        return "hello" if "2" not in prompt else "world"

    def program(s):
        s += "1 " + sgl.gen("a")
        s += " 2 " + sgl.gen("b") + "!"
    function = sgl.function(program)
    state = function.run(backend=Scripted(answer), stream=True)
    pieces = []
    for piece in state.text_iter():
        pieces.append(piece)
        if "".join(pieces) == "1 hello 2 ":
            gate.set()                         # the second gen has not begun: what came, came in time
    assert "".join(pieces) == state.text() == "1 hello 2 world!" and len(pieces) >= 2
    state = function.run(backend=Scripted(answer), stream=True)
    assert "".join(state.text_iter("b")) == "world" == state["b"]
    assert [p for p in function.run(backend=Scripted(answer)).text_iter("a")] == ["hello"]


def test_a_streaming_program_may_read_itself_and_ask_others_to():
    import concurrent.futures

    def program(s):
        s += "a" + sgl.gen("v")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return "".join(s.text_iter()), pool.submit(s.text).result(LIMIT_S), s.messages()
    state = sgl.function(program).run(backend=Scripted(), stream=True)
    assert state.text() == "ax" and state.ret_value == ("ax", "ax", [])


def test_text_async_iter_with_meta_data():
    async def collect(state, **how):
        return [found async for found in state.text_async_iter(**how)]
    function = sgl.function(lambda s: s.__iadd__("p" + sgl.gen("a")) and None)
    state = function.run(backend=Scripted(lambda *a: "abc"), stream=True)
    assert "".join(asyncio.run(collect(state))) == "pabc"
    pairs = asyncio.run(collect(state, var_name="a", return_meta_data=True))
    assert "".join(piece for piece, _ in pairs) == "abc" and pairs[-1][1]["completion_tokens"] == 3


def test_a_streaming_run_tells_its_errors_to_who_reads():
    def program(s):
        s += "p"
        s += sgl.gen("v", regex="(")
    state = sgl.function(program).run(backend=Scripted(failing), stream=True)
    with pytest.raises(sgl.ProgramError, match="not closed"):
        list(state.text_iter())
    gate = threading.Event()

    def late(s):
        s += "begun "
        assert gate.wait(LIMIT_S)
        s += sgl.gen("v")
    state = sgl.function(late).run(backend=Scripted(), stream=True)
    threading.Timer(0.05, gate.set).start()
    assert state.text() == "begun x" and state.error() is None     # who reads all waits for the program's end
    state = sgl.function(lambda s: 1 / 0).run(backend=Scripted(), stream=True)
    with pytest.raises(sgl.ProgramError, match="division"):
        list(state.text_iter())
    state = sgl.function(lambda s: s["nothing"]).run(backend=Scripted(), stream=True)
    assert isinstance(state.error(), sgl.ProgramError) or state["x"] is None


def test_a_variable_that_a_streaming_program_has_not_come_to_is_waited_for():
    gate = threading.Event()

    def program(s):
        assert gate.wait(LIMIT_S)
        s += sgl.gen("late")
    state = sgl.function(program).run(backend=Scripted(), stream=True)
    threading.Timer(0.05, gate.set).start()
    assert state["late"] == "x"
    with pytest.raises(KeyError, match="never"):
        state["never"]


# ------------------------------------------------------------------------------------------------------------------------ reasoning

@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_separated_from_the_text(stream):
    answer = "<think>hm\nso</think>\n\nParis"
    function = sgl.function(lambda s: s.__iadd__("Q" + sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3") + "!") and None)
    state = function.run(backend=Scripted(lambda *a: answer), stream=stream)
    pieces = list(state.text_iter())
    assert state.text() == "".join(pieces) == "QParis!" and state["a"] == "Paris" and state["a_reasoning_content"] == "hm\nso"


@pytest.mark.parametrize("model, prompt, text, thoughts, answer", [
    ("qwen3", "", "no thoughts", "", "no thoughts"), ("deepseek-r1", "", "all thoughts", "all thoughts", ""),
    ("deepseek-r1", "", "a</think>b", "a", "b"), ("qwen3", "...<think>\n", "a</think>\nb", "a", "b"),
    ("kimi", "", "◁think▷a◁/think▷b", "a", "b"), ("qwen3", "", "say </think> b", "", "say </think> b")])
def test_how_thoughts_are_told_from_answers(model, prompt, text, thoughts, answer):
    reader = Thoughts(model, prompt)
    assert reader.split(text) == (thoughts, answer)
    assert Thoughts("qwen3", "").split(" <", final=True) == ("", " <")
    shown = [reader.split(text[:n])[1] for n in range(len(text) + 1)]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:]))


# --------------------------------------------------------------------------------------------------------------------------- select

def test_select_asks_once_and_takes_the_best():
    backend = Scripted()

    def program(s):
        s += "Q:" + sgl.select("v", [" b", " a"]) + sgl.gen("w", choices=["x", "y"], choices_method=sgl.greedy_token_selection)
        s += sgl.select("u", ["x", "y"], choices_method="unconditional_likelihood_normalized")
    state = run(program, backend)
    assert backend.scored == [("Q:", (" b", " a"), False), (f"Q:{state['v']}", ("x", "y"), False), (f"Q:{state['v']}{state['w']}", ("x", "y"), True)]
    assert state["v"] == max([" b", " a"], key=lambda c: sum(-float(ord(x) % 7) for x in c) / len(c))
    assert {"normalized_prompt_logprobs", "input_token_logprobs"} <= set(state.get_meta_info("v"))


def scores(**given):
    return [Score(text, [Token(t, p) for t, p in tokens]) for text, tokens in given.items()]


def test_each_method_takes_the_arg_max_of_what_it_reports():
    made = scores(a=[(1, -1.0), (2, -3.0)], b=[(3, -1.5)], c=[(1, -1.0), (4, -0.1)])
    for score in made:
        score.unconditional = [Token(t.token_id, t.logprob - 0.5) for t in score.tokens]
    for method in CHOICES_METHODS.values():
        found = method([s.text for s in made], made)
        values = found.meta_info["normalized_prompt_logprobs"]
        assert found.decision == "abc"[values.index(max(values))]
    assert sgl.token_length_normalized(list("abc"), made).decision == "c"
    assert sgl.greedy_token_selection(list("abc"), made).decision == "c"


def test_a_choice_that_begins_another():
    sure = scores(New=[(1, -1.0)], NewYork=[(1, -1.0), (2, -0.01)])
    unsure = scores(New=[(1, -1.0)], NewYork=[(1, -1.0), (2, -5.0)])
    for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
        assert method(["New", "NewYork"], sure).decision == "NewYork"
        assert method(["New", "NewYork"], unsure).decision == "New"


def test_a_first_token_without_a_logprob_counts_nothing():
    for method in CHOICES_METHODS.values():
        assert method(["a", "b"], scores(a=[(1, None), (2, -1.0)], b=[(3, None), (4, -2.0)])).decision == "a"


def test_select_refuses():
    for choices in ([], None, "ab", [""], ["a", 1]):
        with pytest.raises(ValueError, match="choices"):
            sgl.select("v", choices)
    with pytest.raises(ValueError, match="twice"):
        sgl.select("v", ["a", "a"])
    with pytest.raises(ValueError, match="temperature"):
        sgl.select("v", ["a", "b"], temperature=1.0)
    with pytest.raises(ValueError, match="choices_method"):
        sgl.select("v", ["a", "b"], choices_method="best")
    with pytest.raises(ValueError, match="regex"):
        sgl.gen("v", choices=["a", "b"], regex="a")


def test_a_method_of_ones_own():
    @sgl.choices_method("shortest")
    def shortest(choices, scores):
        return [-len(c) for c in choices], {}
    try:
        assert run(lambda s: s.__iadd__(sgl.select("v", ["abc", "d"], choices_method="shortest")) and None)["v"] == "d"
    finally:
        del CHOICES_METHODS["shortest"]


# ---------------------------------------------------------------------------------------------------------------------------- batches

@sgl.function
def shots(s, examples, question):
    s += sgl.system("Answer with one word, as in the examples that follow, and with nothing else at all.")
    s += "Examples: " + examples + "\nQ: " + question + "\nA:" + sgl.gen("a", max_tokens=4)


def test_a_batch_in_order_with_what_it_shares_declared_once():
    backend = Scripted(lambda prompt, params: prompt.split("Q: ")[1][0])
    batch = [{"examples": "x=1, y=2", "question": f"{i}?"} for i in range(20)]
    states = shots.run_batch(batch, backend=backend, temperature=0, num_threads=4)
    assert [s["a"] for s in states] == [str(i)[0] for i in range(20)]
    (held, children), = backend.holds.values()
    assert held.endswith("Examples: x=1, y=2\nQ: ") and children == 20 and backend.parents == ["h0"] * 20 and not backend.released
    batch[3]["examples"] = "other"
    shots.run_batch(batch, backend=backend)
    assert backend.holds["h1"][0].endswith("Examples: ")
    assert [s["a"] for s in shots.run_batch([("e", "7?"), ("e", "8?")], backend=backend, progress_bar=True)] == ["7", "8"]
    assert shots.run_batch([], backend=backend) == []


def test_a_batch_as_a_generator_and_left_early():
    backend = Scripted()
    found = shots.run_batch([("e", f"{i}?") for i in range(50)], backend=backend, generator_style=True, num_threads=1)
    assert [next(found)["a"], next(found)["a"]] == ["x", "x"]
    found.close()
    assert len(backend.asked) < 50 and backend.released == ["h0"]


def test_one_failing_program_of_a_batch_keeps_its_error():
    def program(s, i):
        s += sgl.gen("v", regex="(" if i == 1 else "a")
        return 1 // (i - 2)
    states = sgl.function(program).run_batch([(0,), (1,), (2,), (3,)], backend=Scripted(failing))
    assert states[0]["v"] == states[3]["v"] == "x" and isinstance(states[1].error(), sgl.ProgramError)
    with pytest.raises(sgl.ProgramError, match="not closed"):
        states[1]["v"]
    assert isinstance(states[2].error().__cause__, ZeroDivisionError)
    assert re.search(r"test_lang\.py:\d+: ZeroDivisionError: ", str(states[2].error()))


def test_batches_refuse():
    for bad, error in (([5], "item 0"), ([{"wrong": 1}], "no parameter wrong"), ([("a",)], "lacks its argument question"), ([("a", "b", "c")], "takes 2")):
        with pytest.raises(TypeError, match=error):
            shots.run_batch(bad, backend=Scripted())
    with pytest.raises(TypeError, match="list of arguments"):
        shots.run_batch(5, backend=Scripted())
    with pytest.raises(TypeError, match="two names"):
        shots.run_batch([("a", "b")], backend=Scripted(), max_tokens=1, max_new_tokens=2)
    with pytest.raises(ValueError, match="num_threads"):
        shots.run_batch([("a", "b")] * 2, backend=Scripted(), num_threads=0)


# ---------------------------------------------------------------------------------------------------------- programs and their graphs

def test_bind_call_cache_and_wrong_signatures():
    backend = Scripted()
    bound = shots.bind(examples="e")
    assert bound.run("q?", backend=backend)["a"] == "x" and bound.run(question="q?", backend=backend)["a"] == "x"
    assert bound.cache(backend=backend).endswith("Examples: e\nQ: ") and backend.asked[-1][1] == {"max_tokens": 0}

    @sgl.function
    def outer(s, question):
        s += "outer "
        shots(s, "e", question)
        return s["a"]
    assert outer.run("z?", backend=backend).ret_value == "x"
    sgl.set_default_backend(backend)
    try:
        assert outer("z?").text().startswith("outer SYSTEM")
    finally:
        sgl.set_default_backend(None)
    with pytest.raises(ValueError, match="must be called s"):
        sgl.function(lambda state: None)
    sized = sgl.function(lambda s, n: s.__iadd__("x" * n) and None)     # an option's name: by its place, or in a batch
    assert sized.run(3, backend=backend).text() == "xxx" and sized.run_batch([{"n": 2}], backend=backend)[0].text() == "xx"
    with pytest.raises(TypeError, match="parameter n, which is an option"):
        sized.run(n=3, backend=backend)
    async def waits(s):
        pass

    def yields(s):
        yield
    for bad in (waits, yields):
        with pytest.raises(TypeError, match="plain function"):
            sgl.function(bad)
    for bad in (0, "x", True):
        with pytest.raises(ValueError, match="num_api_spec_tokens"):
            sgl.function(lambda s: None, num_api_spec_tokens=bad)
    for bad in ("", 5):
        with pytest.raises(ValueError, match="variable's name"):
            sgl.gen(bad)
    with pytest.raises(TypeError, match="takes 1 arguments"):
        sgl.function(lambda s, a, *, b=2: None).run(1, 2, backend=backend)
    with pytest.raises(ValueError, match=r"\*names"):
        sgl.function(lambda s, *names: None)
    more = sgl.function(lambda s, q, **more: s.__iadd__(q + more["r"]) and None)
    assert more.run("a", r="b", backend=backend).text() == "ab"
    with pytest.raises(TypeError, match="twice"):
        bound.run("q?", question="q?", backend=backend)


def test_a_traced_program_is_a_graph():
    @sgl.function
    def program(s, topic):
        s += sgl.user("About " + topic) + sgl.gen("v")
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("w", max_tokens=3)
        forks.join()
        with s.var_scope("end"):
            s += "So " + s["v"] + sgl.select("w", ["a", "b"])
        s += sgl.separate_reasoning(sgl.gen("r"), "qwen3")
    graph = program.trace()
    assert [node.expr.kind for node in graph.nodes] == [
        "role_begin", "text", "argument", "role_end", "gen", "lazy_commit", "fork", "fork_item", "fork_item", "text", "gen", "text", "gen", "join", "scope_begin",
        "text", "variable", "select", "scope_end", "separate_reasoning"]
    join = graph.nodes[13]
    assert set(join.after) == {6, 10, 12} and graph.nodes[10].branch == "0" and graph.nodes[7].after == graph.nodes[8].after == (6,)
    assert graph.nodes[16].expr.source == 4
    assert "`- separate_reasoning" in graph.draw() and graph.mermaid().count("-->") == sum(len(n.after) for n in graph.nodes)
    assert str(graph).count("\n") == len(graph) - 1
    ran = program.run(topic="x", backend=Scripted())          # a run records the same, with values for symbols
    assert [node.expr.kind for node in ran.graph.nodes] == [
        "role_begin", "text", "role_end", "gen", "lazy_commit", "fork", "fork_item", "fork_item", "text", "gen", "text", "gen", "join", "scope_begin",
        "text", "select", "scope_end", "separate_reasoning"]


@pytest.mark.parametrize("use", ["f'{x}'", "'a' if x else 'b'", "len(x)", "x[0]", "x == 'a'", "x.upper()", "int(x)", "list(x)", "'a' in x"])
def test_a_symbol_cannot_be_looked_at(use):
    def program(s, x):
        eval(use)
    with pytest.raises(sgl.TracingError, match="argument 'x'.*test_lang.py|test_lang.py.*argument 'x'|<string>.*argument 'x'"):
        sgl.function(program).trace()

    def reads(s):
        s += sgl.gen("x")
        x = s["x"]
        eval(use)
    with pytest.raises(sgl.TracingError, match="variable 'x'"):
        sgl.function(reads).trace()
    with pytest.raises(sgl.TracingError):
        sgl.function(lambda s: s.text()).trace()


def test_the_constant_prefix_stops_at_the_first_thing_that_is_not():
    def prefix(program, batch):
        return "".join(leaf.value for leaf in ir.constant_prefix(program, batch) if isinstance(leaf, ir.Text))
    batch = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]
    assert prefix(lambda s, a, b: s.__iadd__("x" + a + "y" + b) and None, batch) == "x1y"
    assert prefix(lambda s, a, b: s.__iadd__("x") and s.__iadd__(f"{b}") and None, batch) == "x"
    assert prefix(lambda s, a, b: s.__iadd__("x") and s.fork(2) and None, batch) == "x"
    assert prefix(lambda s, a, b: s.__iadd__("x") and 1 / 0, batch) == "x"

    def stubborn(s, a, b):
        while True:
            try:
                s += "x" + sgl.gen("v")
            except Exception:
                continue
    assert prefix(stubborn, batch) == "x"


# ------------------------------------------------------------------------------------------------------------ API speculative execution

CARD = " Ada\nJob: clerk\nBorn: 1815\nrest"


def test_gens_of_a_completion_are_answered_by_one_call():
    calls = []

    @sgl.function(num_api_spec_tokens=64)
    def card(s, sep):
        s += "Name:" + sgl.gen("name", stop="\n") + sep + "Job:" + sgl.gen("job", stop="\n") + "\nBorn:" + sgl.gen("born", stop="\n")
    backend = Scripted(lambda prompt, params: calls.append(prompt) or CARD if prompt == "Name:" else " other\n")
    saved = []
    backend.count_saved = saved.append
    state = card.run(backend=backend, sep="\n")
    assert (state["name"], state["job"], state["born"]) == (" Ada", " clerk", " 1815") and sum(saved) == 2 and len(backend.asked) == 1
    assert "stop" not in backend.asked[0][1] and backend.asked[0][1]["max_tokens"] == 64
    state = card.run(backend=backend, sep=" - ")              # the model wrote something else: asked again
    assert (state["name"], state["job"]) == (" Ada", " other")


def test_a_turn_of_a_chat_is_one_call_tried_again_where_its_texts_are_missing():
    answers = ["Nom: Ada", "Name: Ada\nJob: clerk", "Name: Ada\nJob: clerk."]

    @sgl.function(num_api_spec_tokens=64)
    def card(s):
        s += sgl.user("Go.")
        s += sgl.assistant("Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop="."))
        return s["job"]
    backend = Scripted(lambda messages, params: answers[min(len(backend.asked) - 1, 2)])
    backend.is_chat_model = True
    state = card.run(backend=backend)
    assert state["name"] == " Ada" and state.ret_value == " clerk" and len(backend.asked) == 2
    assert backend.asked[0][0] == [{"role": "user", "content": "Go."}] and state.messages()[1]["content"] == "Name: Ada\nJob: clerk"
    answers[:] = ["no"] * 3
    with pytest.raises(sgl.ProgramError, match="3 answers to this turn"):
        card.run(backend=backend)


def test_a_turn_is_one_call_for_gens_that_ask_for_the_same():
    def run_turn(*gens, read=None):
        @sgl.function(num_api_spec_tokens=16)
        def program(s):
            s += sgl.user("q") + sgl.assistant("A:" + gens[0] + " B:" + gens[1])
            s += sgl.user("r") + sgl.assistant_begin() + sgl.gen("late")
            if read:
                return s[read]
            s += sgl.assistant_end()
        backend = Scripted(lambda messages, params: "A: a B: b" if len(messages) < 3 else "c")
        backend.is_chat_model = True
        return program.run(backend=backend), backend
    state, backend = run_turn(sgl.gen("a", temperature=0), sgl.gen("b", temperature=0))
    assert (state["a"], state["b"]) == (" a", " b") and backend.asked[0][1] == {"max_tokens": 16, "temperature": 0}
    for bad in (dict(regex="[0-9]+"), dict(n=3), dict(max_tokens=2)):
        with pytest.raises(sgl.ProgramError, match="none can have"):
            run_turn(sgl.gen("a", **bad), sgl.gen("b", **bad))
    with pytest.raises(sgl.ProgramError, match="nothing but their stops"):
        run_turn(sgl.gen("a", temperature=0), sgl.gen("b"))
    with pytest.raises(ValueError, match="behind the assistant message"):
        run_turn(sgl.gen("a"), sgl.gen("b"), read="late")


def test_gens_with_a_length_of_their_own_are_asked_for_alone():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "Name:" + sgl.gen("name", stop="\n", max_tokens=3)
    backend = Scripted(lambda *a: "x")
    program.run(backend=backend)
    assert backend.asked[0][1]["max_tokens"] == 3 and backend.asked[0][1]["stop"] == ["\n"]


def test_a_chat_api_cannot_go_on_with_a_begun_answer():
    backend = Scripted()
    backend.is_chat_model = True
    assert run(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("v"))) and None, backend)["v"] == "x"
    for bad in (sgl.user("q") + sgl.assistant("A:" + sgl.gen("v")), "q" + sgl.gen("v")):
        with pytest.raises(sgl.ProgramError, match="begins its answers itself"):
            run(lambda s: s.__iadd__(bad) and None, backend)
    with pytest.raises(sgl.ProgramError, match="chat API"):
        run(lambda s: s.__iadd__(sgl.select("v", ["a", "b"])) and None, backend)


# -------------------------------------------------------------------------------------------------------------------------- no torch

def test_the_language_costs_no_torch():
    code = """
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        import nano_sgl.lang as sgl
        @sgl.function
        def f(s):
            s += "a" + sgl.gen("b")
        assert f.run(backend=sgl.Echo())["b"] == "<1>"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parent.parent, timeout=60)
