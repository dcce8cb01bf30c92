"""The language's interpreter: a program runs ahead of its model, and waits only for what it reads.

    program's thread        s += text    s += gen("a")    s += text    s += gen("b")    print(s["a"])        ... s["b"]
                                |            |               |            |                 | waits for a        |
    the state's queue       [text]  ->   [gen a] -> [text] -> [gen b]     |                 v                    v
    the state's thread                   ======= a ==========|======= b ==|=====

Every state (a program's, and each child of a fork) has a queue of nodes that run one after the other. What needs no model runs where it is
written. The first node that does starts a thread, which lives until the queue is empty. So branches generate at the same time, and the
engine makes them one batch; writing never waits; a read waits for one variable (`s["a"]`) or for all that was written (`s.text()`).

Sharing is declared, not found: a fork tells the backend that so many children will begin with the text so far (`hold`: prefilled once, kept until
they are in), and so does a batch of programs for what they have in common. Whoever begins with a held prefix names it with its first request.

Errors. A node that fails ends its state: its queue is dropped, its unborn children fail with it, and whoever waits for it, reads it, writes
to it or joins it gets a ProgramError with the line that wrote the node and the branch it was in. `run` raises one that nobody has been told of.

Names. A *backend* is any object with the methods of `Backend`; `nano_sgl.LLM` is one, endpoints.py has others. `live` is the text of a generation
that is still going on, for those who stream. `pending` counts, by variable, the nodes in the queue that will set it.

Invariants: nodes of a state run in the order in which they were written, one at a time; `text()` is the concatenation of what they appended;
all that a state's iterators yielded is a prefix of it at any time. When a run has ended no thread of it is left, and no hold.

Cost: a thread's start (some 0.1 ms) per burst of generations. Stops holding: thousands of branches at once are thousands of sleeping threads.
Source: the primitives and their semantics are SGLang's (Zheng et al. 2024); holds, errors with places and forks that do not wait are ours.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import ir
from .api_speculation import Leftover, match_turn
from .choices import Score
from .ir import Expr, Graph, Trace, Writer

log = logging.getLogger("nano_sgl")
NUMBERS = itertools.count()

PLAIN_ROLES = {"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n"), "default_system": ""}
DTYPES = {  # what a gen of this type may write, and what ends it
    "int": (r"[+\-]?[0-9]+[ \n]?", (" ", "\n")), "float": (r"[+\-]?[0-9]*\.?[0-9]+[ \n]?", (" ", "\n")),
    "str": r'"[^"\\\n]*"', "bool": "(True|False)"}
TYPE_NAMES = {int: "int", float: "float", str: "str", bool: "bool"}
THINKING = {"kimi": ("◁think▷", "◁/think▷")}        # of other models
THINK = ("<think>", "</think>")
ALWAYS_THINKS = ("deepseek-r1", "qwen3-thinking")   # the prompt has opened the tag
SHARED = {"temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed"}   # of a turn
TRIES = 3                                           # answers to one turn that may fail to have its texts


class Backend(Protocol):
    """What a program runs on. Objects that come back have `text`, `finish_reason`, and what there is of `output_ids`, `prompt_ids`, `cached_tokens`,
    `logprobs`, `prompt_logprobs`, `stop_reason`, `error`, `meta_info`. Only `generate` has to be there; the others are asked for when a program
    needs them. Params are SamplingParams by name."""

    def generate(self, prompts: list[str], params: list[dict[str, Any]], *, parent: str = "") -> list[Any]:
        """Complete texts; the samples of one are neighbours. Where `is_chat_model` is set, a prompt is a list of messages."""

    def stream(self, prompt: str, params: dict[str, Any], *, parent: str = "") -> Iterator[Any]:
        """One text, piece by piece."""

    def score(self, prefix: str, choices: list[str], *, unconditional: bool = False, parent: str = "") -> list[Score]:
        """Log-probabilities of texts behind another one; see choices.py."""

    def hold(self, prefix: str, children: int) -> str:
        """Prefill a text and keep it until so many requests have named it as their parent. Does not wait."""

    def release(self, hold: str) -> None:
        """Nobody else will."""

    def abort(self, rid: str) -> None:
        """End a request. Where this method is there, `generate` and `stream` are given a `rid` to name it by."""

    def chat_roles(self) -> dict[str, Any]:
        """What stands before and after each role's words, as PLAIN_ROLES; a role that the model has not is absent."""


class ProgramError(RuntimeError):
    """A node of a program failed: `where` it was written (FILE:LINE), in which `branch` ("" is the program itself), and its `state`. `__cause__` is
    what went wrong."""

    def __init__(self, message: str, where: str, branch: str, state: ProgramState):
        super().__init__(message)
        self.where, self.branch, self.state = where, branch, state
        self.told = False       # has it been raised to somebody?


class Hold:
    """A prefix that the backend keeps for so many states. Each of them spends it with its first request, or gives it up."""

    def __init__(self, backend: Backend, prefix: str, children: int, parent: str = ""):
        self.backend, self.name = backend, backend.hold(prefix, children, **({"parent": parent} if parent else {}))
        self._left, self._lacking, self._lock = children, 0, threading.Lock()

    def spend(self, used: bool) -> None:
        """One state less: its request, which named the hold, is answered (`used`); or has failed, and maybe never came; or will never be."""
        with self._lock:
            self._left -= 1
            self._lacking += not used
            over = self._left == 0 and self._lacking
        if over:
            try:
                self.backend.release(self.name)
            except Exception as error:      # it ends by itself, in time
                log.warning("a prefix that is held could not be released: %s", error)


@dataclass
class Run:
    """What all states of one run share. params: the defaults of its gens."""

    backend: Backend
    params: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    use_thread: bool = True
    spec_tokens: int | None = None
    hints: bool = True              # whether forks are declared
    states: list[ProgramState] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)    # that run, where the backend can end them
    _roles: dict[str, Any] | None = None

    @property
    def is_chat(self) -> bool:
        return getattr(self.backend, "is_chat_model", False)

    @property
    def roles(self) -> dict[str, Any]:
        if self._roles is None:
            self._roles = self.backend.chat_roles() if hasattr(self.backend, "chat_roles") else PLAIN_ROLES
        return self._roles

    def role(self, name: str) -> tuple[str, str]:
        if name not in self.roles:
            known = ", ".join(role for role in ir.ROLES if role in self.roles)
            raise ValueError(f"this model's chat template has no place for a {name} message; it has {known}")
        return self.roles[name]

    def hold(self, prefix: str, children: int, parent: str = "") -> Hold | None:
        """Declare what children will share, where the backend takes it."""
        return Hold(self.backend, prefix, children, parent) if self.can_hold(prefix, children) else None

    def can_hold(self, prefix: str, children: int) -> bool:
        return bool(self.hints and children > 1 and prefix and hasattr(self.backend, "hold") and not self.is_chat)

    def saved(self, calls: int) -> None:
        """So many gens needed no call of their own."""
        if hasattr(self.backend, "count_saved"):
            self.backend.count_saved(calls)

    def cancel(self, error: BaseException) -> None:
        """End what runs, leave out what has not begun; who reads or writes gets the error."""
        dropped = [state for state in self.states if state._drop() or state._busy]
        self._abort()
        for state in dropped:
            if state._error is None:
                state._fail(error, None, ir.origin())

    def _abort(self) -> None:
        for rid in list(self.requests):
            try:
                self.backend.abort(rid)
            except Exception as error:      # it ends by itself
                log.warning("a request could not be aborted: %s", error)

    def finish(self, stopped: BaseException | None = None) -> None:
        """Wait for all states; raise what nobody has been told of. stopped: what has ended the program, so that what has not begun is left out."""
        dropped = [state for state in self.states if state._drop()] if stopped is not None else []
        if stopped is not None:
            self._abort()
        for state in self.states:       # forks made meanwhile are waited for, too
            state._settle()
        for state in dropped:
            if state._error is None:
                state._fail(stopped, None, raised_at(stopped))
            state._error.told = True    # by what is raised
        for state in self.states:
            state._give_up_hold()
        for state in self.states:
            if state._error is not None and not state._error.told:
                state._raise()


class ProgramState(Writer):
    """A program's state while it runs: text, variables, messages."""

    def __init__(self, run: Run, branch: str = "", trace: Trace | None = None, hold: Hold | None = None, started: bool = True):
        self.run, self.branch, self.ret_value = run, branch, None
        self._trace = trace if trace is not None else Graph().root
        self._hold = hold
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[Expr, str]] = collections.deque()
        self._busy = not started            # somebody runs the queue, or will
        self._started = started
        self._text, self._live = "", ""
        self._live_name: str | None = None
        self._fork_at = self._said = 0      # characters and messages that it began with
        self._vars: dict[str, Any] = {}
        self._meta: dict[str, Any] = {}
        self._pending: collections.Counter[str] = collections.Counter()
        self._messages: list[dict[str, Any]] = []
        self._role: str | None = None
        self._parts: list[Any] = []         # of the open message: text and pictures
        self._turn: list[tuple[Expr, str]] | None = None    # an assistant's turn that is asked for as a whole
        self._leftover = Leftover()
        self._scopes: dict[str, int] = {}
        self._gens = 0
        self._error: ProgramError | None = None
        run.states.append(self)

    # ------------------------------------------------------------------------------------------------------------- writing

    def _write(self, expr: Expr, where: str) -> None:
        self._trace._write(expr, where)
        self._append([(leaf, where) for leaf in expr.leaves()])

    def _append(self, nodes: list[tuple[Expr, str]]) -> None:
        with self._changed:
            if self._error is not None:
                self._raise()
            self._queue.extend(nodes)
            for leaf, _ in nodes:
                self._pending.update(leaf.names())
            if self._busy:
                return
            self._busy = True
        self._drain(here=True)

    def _drain(self, here: bool) -> None:
        """Run what is in the queue. here: in the thread of whoever writes, up to the first node that takes its time."""
        while True:
            with self._changed:
                if not self._queue:
                    self._busy = False
                    self._changed.notify_all()
                    return
                node, where = self._queue[0]
                if here and self.run.use_thread and self._takes_time(node):
                    try:
                        threading.Thread(target=self._drain, args=(False,), name=f"program {self.branch}".rstrip(), daemon=True).start()
                        return
                    except RuntimeError:    # there are too many: it runs here
                        here = False
                self._queue.popleft()
            try:
                done = self._execute(node, where)
            except BaseException as error:
                self._fail(error, node, where)
                if not isinstance(error, Exception):
                    raise
                return
            with self._changed:
                self._pending.subtract(node.names() if done else ())
                self._changed.notify_all()

    def _takes_time(self, node: Expr) -> bool:
        """Does running a node wait for somebody? A fork may have to say what it shares, and a turn's end to ask for the turn."""
        if isinstance(node, ir.Fork):
            return node.size > 1 and self.run.hints and hasattr(self.run.backend, "hold")
        return self._turn is not None if isinstance(node, ir.RoleEnd) else not isinstance(node, (ir.Text, ir.RoleBegin, ir.ScopeBegin, ir.Join))

    def _fail(self, error: BaseException, node: Expr | None, where: str) -> None:
        if self._error is not None:         # it was cancelled meanwhile
            return
        if not isinstance(error, ProgramError):
            place = f"branch {self.branch}, " if self.branch else ""
            what = repr(node) if node is not None else type(error).__name__
            kind = "" if isinstance(error, (ValueError, RuntimeError)) or node is None else f"{type(error).__name__}: "
            made = ProgramError(f"{place}{where}: {what}: {kind}{error}", where, self.branch, self)
            made.__cause__ = error
            error = made
        with self._changed:
            left = [node for node, _ in self._queue] + [node]
            self._error, self._busy, self._live = error, False, ""
            self._queue.clear()
            self._pending.clear()
            self._changed.notify_all()
        for unborn in (child for node in left if isinstance(node, ir.Fork) for child in node.children if not child._started):
            unborn._started = True
            unborn._fail(error, node, where)

    def _drop(self) -> bool:
        """Leave out what has not begun to run; whether there was anything."""
        with self._changed:
            left = bool(self._queue) or not self._started
            self._queue.clear()
            self._busy = self._busy and self._started
            self._started = True
            self._changed.notify_all()
        return left and self._error is None

    def _raise(self) -> None:
        self._error.told = True
        raise self._error

    # --------------------------------------------------------------------------------------------------------- forks and joins

    def _fork(self, size: int, where: str) -> list[ProgramState]:
        traces = self._trace._fork(size, where)
        children = [ProgramState(self.run, trace.branch, trace, started=False) for trace in traces]
        self._append([(ir.Fork(size, children), where)])
        return children

    def _branch_off(self, node: ir.Fork) -> None:
        hold = None
        if self.run.can_hold(self._text, node.size):        # a copy declares nothing, so what was declared for its source stays there
            with self._named() as named:
                hold = self.run.hold(self._text, node.size, **named)
        for child in node.children:
            child._text, child._fork_at, child._role, child._gens = self._text, len(self._text), self._role, self._gens
            child._said = len(self._messages)
            child._messages, child._parts, child._scopes = list(self._messages), list(self._parts), dict(self._scopes)
            child._vars, child._meta = dict(self._vars), dict(self._meta)
            child._hold, child._leftover = hold or child._hold, self._leftover.copy()
            child._turn = None if self._turn is None else list(self._turn)
            with child._changed:
                child._started = True
                child._changed.notify_all()
            child._drain(here=True)

    def _join(self, children: list[ProgramState], mode: str, where: str) -> None:
        for child in children:
            child._settle()
        for child in children:
            child._give_up_hold()
        errors = [child._error for child in children if child._error is not None]
        for error in errors:            # whoever is told of the first knows that the fork has failed
            error.told = True
        if errors:
            raise errors[0]
        self._trace._join([child._trace for child in children], mode, where)
        new = [name for child in children for name in child._vars] if mode == "gather_variable" else []
        self._append([(ir.Join(mode, children, new), where)])

    def _gather(self, node: ir.Join) -> None:
        if node.mode == "concate_and_append":
            for child in node.children:
                self._add_text(child._text[child._fork_at:])
                self._messages += child._messages[child._said:]
            return
        own = set(self._vars)
        for child in node.children:
            for name in [name for name in child._vars if name not in own]:
                self._vars.setdefault(name, []).append(child._vars[name])
                self._meta.setdefault(name, []).append(child._meta.get(name))

    def _give_up_hold(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.spend(used=False)

    # ------------------------------------------------------------------------------------------------------------ running nodes

    def _execute(self, node: Expr, where: str) -> bool:
        """Run a node. False: it is kept for the end of its turn."""
        match node:
            case ir.RoleEnd():
                self._end_role(node.role)
            case ir.RoleBegin():
                self._begin_role(node.role)
            case _ if self._turn is not None:
                self._turn.append((node, where))
                return False
            case ir.Text():
                self._add_text(node.value)
            case ir.Gen():
                self._generate(node)
            case ir.Select():
                self._select(node)
            case ir.ScopeEnd():
                self._set(node.name, self._text[self._scopes.pop(node.name):])
            case ir.ScopeBegin():
                self._scopes[node.name] = len(self._text)
            case ir.Fork():
                self._branch_off(node)
            case ir.Join():
                self._gather(node)
            case ir.SeparateReasoning():
                for leaf in node.inner.leaves():
                    if isinstance(leaf, ir.Gen):
                        self._generate(leaf, Thoughts(node.model_type, self._text))
                    else:
                        self._execute(leaf, where)
            case ir.Image():
                self._add_picture(node)
            case _:
                raise TypeError(f"{node!r} cannot be run")
        return True

    def _add_text(self, text: str) -> None:
        with self._changed:
            self._text += text
            if text:
                self._parts.append(text)
            self._changed.notify_all()

    def _set(self, name: str | None, value: Any, meta: Any = None) -> None:
        with self._changed:
            if name is not None:
                self._vars[name] = value
                self._meta[name] = meta

    def _begin_role(self, role: str) -> None:
        if self._role is not None:
            raise ValueError(f"a message of the {role} begins inside of one of the {self._role}")
        begin = "" if self.run.is_chat else self.run.role(role)[0]
        if not self._messages and role != "system" and not self.run.is_chat:
            begin = self.run.roles.get("default_system", "") + begin
        self._role = role
        self._add_text(begin)
        self._parts = []
        if role == "assistant" and self.run.is_chat and self.run.spec_tokens:
            self._turn = []

    def _end_role(self, role: str) -> None:
        if self._role != role:
            raise ValueError(f"a message of the {role} ends, but {f'one of the {self._role}' if self._role else 'none'} is open")
        if self._turn is not None:
            self._ask_for_turn()
        content = "".join(self._parts) if all(isinstance(part, str) for part in self._parts) else [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in self._parts]
        self._messages.append({"role": role, "content": content})
        self._role = None
        self._add_text("" if self.run.is_chat else self.run.role(role)[1])
        self._parts = []

    def _add_picture(self, node: ir.Image) -> None:
        to_part = getattr(self.run.backend, "picture", None)
        if to_part is None:
            raise ValueError(f"{node.kind}: this backend's model reads text only")
        self._parts.extend(to_part(node))

    def _params(self, node: ir.Gen) -> dict[str, Any]:
        """A gen's parameters over the run's, in SamplingParams' names."""
        params = {**self.run.params, **node.params}
        stops = params.pop("stop", None) or ()
        stops = [stops] if isinstance(stops, str) else list(stops)
        dtype = params.pop("dtype", None)
        if dtype is not None:
            found = DTYPES.get(TYPE_NAMES.get(dtype, dtype))
            if found is None:
                raise ValueError(f"dtype is one of int, float, str and bool, got {dtype!r}")
            params["regex"], more = found if isinstance(found, tuple) else (found, ())
            stops += more
        if self._role == "assistant" and not self.run.is_chat and (end := self.run.role("assistant")[1].strip()):
            stops.append(end)
        if stops:
            params["stop"] = list(dict.fromkeys(stops))
        if params.pop("return_logprob", None):
            params["logprobs"] = params.pop("top_logprobs_num", None) or 0
            if (start := params.pop("logprob_start_len", None)) is not None and start >= 0:
                params |= {"prompt_logprobs": params["logprobs"], "logprob_start_len": start}
        elif lost := sorted(params.keys() & {"top_logprobs_num", "logprob_start_len", "return_text_in_logprobs"}):
            raise ValueError(f"{lost[0]} says something of log-probabilities, but return_logprob is not set")
        if params.get("seed") is not None and "seed" not in node.params:     # a run's seed: other noise for every gen, the same every time
            text = f"{params['seed']}/{self.branch}/{self._gens}"
            params["seed"] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        self._gens += 1
        return {name: value for name, value in params.items() if value is not None}

    def _generate(self, node: ir.Gen, thoughts: Thoughts | None = None) -> None:
        params = self._params(node)
        with_text, single = params.pop("return_text_in_logprobs", False), params.get("n", 1) == 1
        if self.run.is_chat and (self._role != "assistant" or self._parts):
            raise ValueError("a chat API begins its answers itself: gen stands right behind the beginning of an assistant message, with nothing "
                             "before it. (function(num_api_spec_tokens=...) asks for a turn of texts and gens as a whole.)")
        sized = {"max_tokens", "min_tokens"} & set(node.params)     # tokens of a longer text cannot be counted
        if self.run.spec_tokens and not self.run.is_chat and single and not sized:
            outputs = [self._leftover.take(self._text, params, lambda longer: self._ask(longer)[0], self.run.spec_tokens, self.run.saved)]
        elif self.run.stream and single and hasattr(self.run.backend, "stream"):
            outputs = [self._ask_streaming(node.name, params, thoughts)]
        else:
            outputs = self._ask(params)
        texts, meta = [output.text for output in outputs], [meta_info(output, self.run.backend, with_text) for output in outputs]
        with self._changed:
            self._live, self._live_name = "", None
            if thoughts is not None:
                thought, texts = zip(*(thoughts.split(text, final=True) for text in texts))
                if node.name is not None:
                    self._set(f"{node.name}_reasoning_content", thought[0] if single else list(thought))
            self._set(node.name, texts[0] if single else list(texts), meta[0] if single else meta)
            self._add_text(texts[0])

    @property
    def _prompt(self) -> Any:
        return list(self._messages) if self.run.is_chat else self._text

    def _ask(self, params: dict[str, Any]) -> list[Any]:
        with self._named(abortable=True) as named:
            outputs = self.run.backend.generate([self._prompt], [params], **named)
        if not isinstance(outputs, (list, tuple)) or not outputs:
            raise TypeError(f"a backend's generate returns a list of outputs (lang.Backend), got {outputs!r:.100}")
        for output in outputs:
            _check_output(output)
        return outputs

    @contextlib.contextmanager
    def _named(self, abortable: bool = False) -> Iterator[dict[str, str]]:
        """The names in a request: of the hold that waits for a state's first one, and its own, where the backend can end it by that."""
        hold, self._hold, used = self._hold, None, False
        names = {} if hold is None else {"parent": hold.name}
        if abortable and hasattr(self.run.backend, "abort"):
            names["rid"] = f"lang{next(NUMBERS)}{secrets.token_hex(6)}"
            self.run.requests.add(names["rid"])
        try:
            yield names
            used = True
        finally:
            self.run.requests.discard(names.get("rid"))
            if hold is not None:
                hold.spend(used)

    def _ask_streaming(self, name: str | None, params: dict[str, Any], thoughts: Thoughts | None) -> Any:
        pieces, text = [], ""
        self._live_name = name
        with self._named(abortable=True) as named:
            for piece in self.run.backend.stream(self._prompt, params, **named):
                _check_output(piece)
                pieces.append(piece)
                text += piece.text
                with self._changed:
                    self._live = text if thoughts is None else thoughts.split(text)[1]
                    self._changed.notify_all()
        return Whole(pieces, text)

    def _select(self, node: ir.Select) -> None:
        if not hasattr(self.run.backend, "score") or self.run.is_chat:
            raise ValueError("select needs the log-probabilities of texts, which a chat API has not")
        with self._named() as named:
            scores = self.run.backend.score(self._text, node.choices, unconditional=node.method.requires_unconditional_logprobs, **named)
        decision = node.method(node.choices, scores)
        self._set(node.name, decision.decision, decision.meta_info)
        self._add_text(decision.decision)

    def _ask_for_turn(self) -> None:
        """An assistant's turn, all of it at once: its texts are looked for in the answer, and what stands between them are its gens."""
        turn, self._turn = self._turn, None
        gens = [node for node, _ in turn if isinstance(node, ir.Gen)]
        if any(not isinstance(node, (ir.Text, ir.Gen)) for node, _ in turn):
            raise ValueError("a turn that is asked for as a whole holds texts and gens only")
        if not gens:
            return self._add_text("".join(node.value for node, _ in turn))
        asked = [{name: value for name, value in gen.params.items() if name != "stop"} for gen in gens]
        if (single := sorted(set(asked[0]) - SHARED)) or any(other != asked[0] for other in asked):
            raise ValueError("the gens of a turn that is asked for as a whole differ in nothing but their stops"
                             + (f", and none can have {single[0]}" if single else ""))
        params = self._params(ir.Gen(None, {**asked[0], "max_tokens": self.run.spec_tokens}))
        params.pop("stop", None)
        for _ in range(TRIES):
            output = self._ask(params)[0]
            found = match_turn([node for node, _ in turn], output.text)
            if found is not None:
                self.run.saved(len(gens) - 1)
                meta = meta_info(output, self.run.backend)
                for node, value in found:
                    if isinstance(node, ir.Gen):
                        self._set(node.name, value, meta)
                        self._pending.subtract(node.names())
                    self._add_text(value)
                return
        texts = ", ".join(repr(node.value) for node, _ in turn if isinstance(node, ir.Text))
        raise ValueError(f"{TRIES} answers to this turn did not have its texts, {texts}, and an end for each gen; the last was {output.text!r:.200}")

    # --------------------------------------------------------------------------------------------------------------- reading

    def _wait(self, ready: Callable[[], bool]) -> None:
        """With the lock held: until something is there, or the state has failed, which is raised."""
        self._changed.wait_for(lambda: self._error is not None or ready())

    def _settle(self) -> None:
        """Wait for all that was written, or an error; the caller of a streaming run, for all that the program will write."""
        with self._changed:
            self._wait(lambda: not self._busy and (self._ended or not self._outside))

    def sync(self) -> None:
        """Wait for all that was written. ProgramError if it failed."""
        self._settle()
        if self._error is not None:
            self._raise()

    def get_var(self, name: str) -> Any:
        """A variable's value, as soon as it is there. KeyError where nothing sets it."""
        with self._changed:
            in_turn = lambda: self._turn is not None and any(name in node.names() for node, _ in self._turn)     # noqa: E731
            self._wait(lambda: self._started and self._pending[name] <= 0 and (name in self._vars or self._ended or not self._outside) or in_turn())
            if in_turn() and not self._outside:
                raise ValueError(f"{name!r} is part of a turn that is asked for as a whole: it can be read behind the assistant message")
            if name in self._vars and (self._error is None or self._pending[name] <= 0):
                return self._vars[name]
            if self._error is not None:
                self._raise()
            raise KeyError(f"no variable {name!r} is set here; there are {', '.join(map(repr, self._vars)) or 'none'}")

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable oneself."""
        self.sync()
        self._trace.set_var(name, value)
        self._set(name, value)

    __setitem__ = set_var

    def __contains__(self, name: str) -> bool:
        with self._changed:
            self._wait(lambda: self._started)
            return name in self._vars or self._pending[name] > 0

    def get_meta_info(self, name: str) -> Any:
        """What the backend says of a variable's generation: finish_reason, token counts, logprobs that were asked for; a list for a list."""
        self.get_var(name)
        return self._meta[name]

    def text(self) -> str:
        """All text, once it is there."""
        self.sync()
        return self._text

    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        self.sync()
        return list(self._messages)

    def error(self) -> Exception | None:
        """What has failed, or None. Waits for all that was written."""
        self._settle()
        if self._error is not None:
            self._error.told = True
        return self._error

    @property
    def graph(self) -> Graph:
        """What was written so far."""
        return self._trace.graph

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or one variable's, piece by piece as it comes; all of it in one piece where the run does not stream."""
        return (piece for piece, _ in self._pieces(var_name))

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for an event loop; return_meta_data: with what `get_meta_info` gives, {} until it is there."""
        pieces, end = self._pieces(var_name), object()
        while (found := await asyncio.to_thread(next, pieces, end)) is not end:
            yield found if return_meta_data else found[0]

    def _pieces(self, name: str | None) -> Iterator[tuple[str, dict]]:
        sent = 0
        while True:
            with self._changed:
                self._wait(lambda: len(self._so_far(name)) > sent or self._is_over(name))
                over, piece = self._is_over(name), self._so_far(name)[sent:]
                if self._error is not None and not piece:
                    self._raise()
                meta = self._meta.get(name) or {}
            sent += len(piece)
            if piece:
                yield piece, meta
            if over and self._error is None:
                if name is not None:
                    self.get_var(name)
                return

    def _so_far(self, name: str | None) -> str:
        if name is None:
            return self._text + self._live
        if self._live_name == name and self._live:
            return self._live
        value = self._vars.get(name) if self._pending[name] <= 0 else None
        return value if isinstance(value, str) else value[0] if value and isinstance(value, list) and isinstance(value[0], str) else ""

    def _is_over(self, name: str | None) -> bool:
        if name is None or name not in self._vars and self._pending[name] <= 0:
            return not self._busy and (self._ended or not self._outside)
        return self._started and self._pending[name] <= 0

    def _end(self, ended: bool, error: BaseException | None = None) -> None:
        """Whether the program has stopped writing; and what stopped it."""
        with self._changed:
            self._ended = ended
            self._changed.notify_all()
        if error is not None and self._error is None:
            self._fail(error, None, raised_at(error))

    _ended = True       # a streaming run says when
    _outside = False    # is this how the caller of a streaming run sees the state?

    def _seen_from_outside(self) -> ProgramState:
        """The same state for the caller of a streaming run: who reads there waits for what the program may still come to."""
        view = object.__new__(Outside)
        view.__dict__ = self.__dict__
        weakref.finalize(view, self.run.cancel, RuntimeError("the run was dropped")).atexit = False
        return view

    def cancel(self) -> None:
        """End the run: requests are aborted, what has not begun is left out, and who reads, or writes, gets an error."""
        self.run.cancel(RuntimeError("the run was cancelled"))


class Outside(ProgramState):
    """A state as the caller of a streaming run has it."""

    _outside = True


# ---------------------------------------------------------------------------------------------------------------------- outputs

class Thoughts:
    """What a model thinks before it answers. model_type: a reasoning parser's name; prompt: what it goes on with."""

    def __init__(self, model_type: str, prompt: str):
        self.opening, self.closing = THINKING.get(model_type, THINK)
        self.opened = model_type in ALWAYS_THINKS or prompt.rstrip().endswith(self.opening)

    def split(self, text: str, final: bool = False) -> tuple[str, str]:
        """Thoughts and answer of a text that, unless it is `final`, may still grow: the answer only grows with it."""
        begun = text.lstrip()
        if not self.opened and not begun.startswith(self.opening):
            return "", "" if self.opening.startswith(begun) and not final else text
        thoughts, _, answer = begun.removeprefix(self.opening).partition(self.closing)
        return thoughts.strip(), answer.lstrip()


class Whole:
    """The pieces of a stream as one output."""

    def __init__(self, pieces: Sequence[Any], text: str):
        last = pieces[-1]
        self.text, self.finish_reason, self.error = text, last.finish_reason, getattr(last, "error", None)
        self.prompt_ids, self.stop_reason = getattr(last, "prompt_ids", ()), getattr(last, "stop_reason", None)
        self.cached_tokens, self.meta_info = max(getattr(p, "cached_tokens", 0) for p in pieces), getattr(last, "meta_info", None)
        for name in ("output_ids", "logprobs", "prompt_logprobs"):
            setattr(self, name, list(itertools.chain.from_iterable(getattr(p, name, None) or () for p in pieces)))


def raised_at(error: BaseException) -> str:
    """FILE:LINE of the program's function that raised an error, or let it through; it stands below the function that has caught it."""
    at = error.__traceback__.tb_next or error.__traceback__
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"


def _check_output(output: Any) -> None:
    if not hasattr(output, "text") or not hasattr(output, "finish_reason"):
        raise TypeError(f"an output has text and finish_reason (lang.Backend), got {output!r:.100}")
    if output.finish_reason in ("error", "abort"):
        raise RuntimeError(getattr(output, "error", None) or "the backend ended the request")


def meta_info(output: Any, backend: Any = None, with_text: bool = False) -> dict[str, Any]:
    """What a backend says of an output, in the names of /generate."""
    if (made := getattr(output, "meta_info", None)) is not None:
        return made
    ids, decode = getattr(output, "output_ids", None) or [], getattr(backend, "tokenizer", None)
    kinds = {"stop": {"type": "stop", "matched": getattr(output, "stop_reason", None)}, "length": {"type": "length", "length": len(ids)}}
    found = {"finish_reason": kinds.get(output.finish_reason, {"type": output.finish_reason}), "completion_tokens": len(ids),
             "prompt_tokens": len(getattr(output, "prompt_ids", ())), "cached_tokens": getattr(output, "cached_tokens", 0)}

    def entry(token_id: int, logprob: float | None) -> tuple:
        return logprob, token_id, decode.decode([token_id]) if with_text and decode is not None else None

    for key, entries in (("output", getattr(output, "logprobs", None)), ("input", getattr(output, "prompt_logprobs", None))):
        if entries:
            found[f"{key}_token_logprobs"] = [entry(e.token_id, e.logprob) for e in entries]
            found[f"{key}_top_logprobs"] = [[entry(*top) for top in e.top] for e in entries]
    return found


class Echo:
    """A backend without a model: a gen is answered with its number, a select with the first choice. For demos, and to see what is asked."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.holds: list[tuple[str, int]] = []

    def generate(self, prompts: list[str], params: list[dict], *, parent: str = "") -> list[Any]:
        """<k> for the k-th prompt there was."""
        self.prompts += prompts
        return [Said(f"<{len(self.prompts)}>") for _ in range(params[0].get("n", 1))]

    def hold(self, prefix: str, children: int, parent: str = "") -> str:
        """Noted."""
        self.holds.append((prefix, children))
        return f"hold {len(self.holds)}"

    def release(self, hold: str) -> None:
        """Nothing was kept."""


@dataclass
class Said:
    """An output without a model."""

    text: str
    finish_reason: str = "stop"


def _demo() -> None:
    """Two branches run while their parent waits at a join; what the backend was told is printed."""
    backend = Echo()
    run = Run(backend)
    state = ProgramState(run)
    state += "Two tips. "
    forks = state.fork(2)
    forks += lambda i: f"Tip {i}: " + ir.Gen("tip", {"max_tokens": 8}) + "; " + ir.Gen("why", {})
    forks.join()
    state += "So: " + ir.Gen("end", {})
    print(json.dumps({"text": state.text(), "tip": state["tip"], "holds": backend.holds, "prompts": backend.prompts}, indent=1))
    run.finish()
    print(state.graph.draw())


if __name__ == "__main__":
    _demo()
