"""The language: programs whose text is partly a model's, in Python.

    import nano_sgl.lang as sgl

    @sgl.function
    def tips(s, topic):
        s += sgl.user("Two tips about " + topic + ", in a word each.")
        s += sgl.assistant(sgl.gen("words", max_tokens=16, stop="."))
        forks = s.fork(2)                                   # both begin with all of the above, which is computed once
        for i, f in enumerate(forks):
            f += sgl.user(f"Explain tip {i + 1}.")
            f += sgl.assistant(sgl.gen("why", max_tokens=48))
        forks.join()
        s += sgl.user("Is that good advice?") + sgl.assistant(sgl.select("good", [" yes", " no"]))

    sgl.set_default_backend(nano_sgl.LLM("demo"))           # or sgl.RuntimeEndpoint("http://127.0.0.1:30000"), or sgl.OpenAI(...)
    state = tips.run(topic="sleep", temperature=0)
    print(state["words"], state["why"], state["good"], state.text(), state.messages())

What is written is an expression (ir.py); what runs it never blocks the program but where it reads (interpreter.py); what it runs on is a backend: the
engine in this process, or a server (endpoints.py). A program is a function of a state; it is run, run for a batch of arguments, bound to some of
them, traced without a model, or called by another program with its state.

Sharing is declared. `fork(n)` tells the engine that n children will begin with this text, so it is prefilled once and stays until they are in;
`run_batch` traces the program first, and does the same for what all calls of the batch begin with. `Config.hints` is the paper's ablation: without it
the cache has to find both by itself, as it would from independent calls; `Config.parallel` off is "no frontend parallelism": branches one by one.

Names and defaults are SGLang's, whose programs run unchanged; what theirs lacks: seed, repetition_penalty, ebnf, structural_tag, logit_bias, and
errors that say which line of which branch has failed. `run` waits for the program and raises; with stream=True it returns at once.

Invariant: importing this costs no torch. Cost: a thread a program in `run_batch`. Stops holding: control tokens in a text are control tokens, also in
what an argument brings. Source: Zheng et al. 2024.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from . import ir
from .api_speculation import Leftover
from .choices import (CHOICES_METHODS, ChoicesDecision, ChoicesMethod, Score, choices_method, find_method, greedy_token_selection,
                      token_length_normalized, unconditional_likelihood_normalized)
from .endpoints import OpenAI, Runtime, RuntimeEndpoint
from .interpreter import Backend, Echo, Hold, ProgramError, ProgramState, Run
from .ir import Expr, Graph, Group, TracingError

__all__ = ["Backend", "CHOICES_METHODS", "ChoicesDecision", "ChoicesMethod", "Config", "Echo", "Expr", "Function", "Graph", "Group", "Leftover",
           "OpenAI", "ProgramError", "ProgramState", "Runtime", "RuntimeEndpoint", "Score", "TracingError", "assistant", "assistant_begin",
           "assistant_end", "choices_method", "config", "flush_cache", "function", "gen", "gen_int", "gen_string", "get_server_info",
           "global_config", "greedy_token_selection", "image", "select", "separate_reasoning", "set_default_backend", "system", "system_begin",
           "system_end", "token_length_normalized", "unconditional_likelihood_normalized", "user", "user_begin", "user_end", "video"]

PREFIX_CHARS = 64           # a shorter common prefix of a batch is not worth a request
THREADS = 96                # programs of a batch at once, or 16 a core


@dataclass
class Config:
    """What holds for all programs. precache_with_tracing: `run_batch` looks for what its programs have in common; hints: forks and batches declare
    what they share; parallel: branches of a fork run at the same time."""

    default_backend: Backend | None = None
    precache_with_tracing: bool = True
    hints: bool = True
    parallel: bool = True
    verbosity: int = 0      # from 2 on, run prints the text


config = global_config = Config()


def set_default_backend(backend: Backend) -> None:
    """The backend of programs that are run without one."""
    config.default_backend = backend


def _backend(given: Backend | None) -> Backend:
    backend = given or config.default_backend
    if backend is None:
        raise ValueError("there is no backend: set_default_backend(nano_sgl.LLM('demo')), or RuntimeEndpoint(url), or run(..., backend=...)")
    if not hasattr(backend, "generate"):
        raise TypeError(f"a backend has a method generate (see lang.Backend), got {backend!r:.100}")
    return backend


def flush_cache(backend: Backend | None = None) -> bool:
    """Empty the backend's cache."""
    return _backend(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What the backend says of itself."""
    return _backend(backend).get_server_info()


# ---------------------------------------------------------------------------------------------------------------------- expressions

def gen(name: str | None = None, max_tokens: int | None = None, min_tokens: int | None = None, n: int | None = None,
        stop: str | list[str] | None = None, stop_token_ids: list[int] | None = None, stop_regex: str | list[str] | None = None,
        temperature: float | None = None, top_p: float | None = None, top_k: int | None = None, min_p: float | None = None,
        frequency_penalty: float | None = None, presence_penalty: float | None = None, ignore_eos: bool | None = None,
        return_logprob: bool | None = None, logprob_start_len: int | None = None, top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None, dtype: type | str | None = None, choices: list[str] | None = None,
        choices_method: ChoicesMethod | str | None = None, regex: str | None = None, json_schema: Any = None, *,
        repetition_penalty: float | None = None, seed: int | None = None, ebnf: str | None = None, structural_tag: Any = None,
        logit_bias: dict[int, float] | None = None, json_object: bool | None = None, reasoning_end: str | None = None,
        thinking_budget: int | None = None) -> Expr:
    """What the model writes here, as variable `name`. What is not given is as `run` has it. With `choices` it is a `select`. dtype: int, float, str
    or bool, or one of these names."""
    given = {key: value for key, value in locals().items() if value is not None}
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"a variable's name is a text that is not empty, got {name!r}")
    for key in ("name", "choices", "choices_method"):
        given.pop(key, None)
    if choices is not None:
        if wrong := sorted(set(given) - {"temperature", "max_tokens"}):
            raise ValueError(f"gen with choices takes name, choices, choices_method and temperature; {wrong[0]} is for text that the model writes")
        return select(name, choices, temperature or 0.0, choices_method)
    if choices_method is not None:
        raise ValueError("choices_method is given, but no choices")
    return ir.Gen(name, given)


def gen_int(name: str | None = None, **params: Any) -> Expr:
    """An integer, as text."""
    return gen(name, dtype=int, **params)


def gen_string(name: str | None = None, **params: Any) -> Expr:
    """A string in double quotes."""
    return gen(name, dtype=str, **params)


def select(name: str | None = None, choices: list[str] | None = None, temperature: float = 0.0,
           choices_method: ChoicesMethod | str | None = None) -> Expr:
    """The likeliest of some texts, as variable `name`; see choices.py for the methods."""
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"select takes choices, a list of texts that are not empty; got {choices!r:.100}")
    if len(set(choices)) < len(choices):
        raise ValueError(f"select: {next(c for c in choices if choices.count(c) > 1)!r} is there twice")
    if temperature > 1e-5:
        raise ValueError(f"select takes the likeliest choice, so its temperature is 0; got {temperature}. (gen(regex=...) samples among texts.)")
    return ir.Select(name, list(choices), temperature, find_method(choices_method))


def _role(role: str, expr: str | Expr | None) -> Expr:
    return ir.message(role, "" if expr is None else expr)


def system(expr: str | Expr | None = None) -> Expr:
    """A system message."""
    return _role("system", expr)


def user(expr: str | Expr | None = None) -> Expr:
    """A user's message."""
    return _role("user", expr)


def assistant(expr: str | Expr | None = None) -> Expr:
    """The assistant's message; gens stand in it."""
    return _role("assistant", expr)


def system_begin() -> Expr:
    """A system message begins."""
    return ir.RoleBegin("system")


def system_end() -> Expr:
    """And ends."""
    return ir.RoleEnd("system")


def user_begin() -> Expr:
    """A user's message begins."""
    return ir.RoleBegin("user")


def user_end() -> Expr:
    """And ends."""
    return ir.RoleEnd("user")


def assistant_begin() -> Expr:
    """The assistant's message begins."""
    return ir.RoleBegin("assistant")


def assistant_end() -> Expr:
    """And ends."""
    return ir.RoleEnd("assistant")


def image(source: Any) -> Expr:
    """A picture in a user's message: a path, bytes, or a URL. For backends whose model sees."""
    return ir.Image(source)


def video(path: str, num_frames: int) -> Expr:
    """So many frames of a film."""
    return ir.Video(path, num_frames)


def separate_reasoning(expr: Expr, model_type: str = "qwen3") -> Expr:
    """What the model thinks in a gen goes to variable `<name>_reasoning_content`, and out of the text. model_type: as --reasoning-parser has it."""
    return ir.SeparateReasoning(ir.as_expr(expr), model_type)


# ------------------------------------------------------------------------------------------------------------------------- programs

def function(func: Callable | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is the state, `s`. num_api_spec_tokens: gens are answered by calls of so many tokens; see
    api_speculation.py."""
    if func is None:
        return functools.partial(function, num_api_spec_tokens=num_api_spec_tokens)
    return Function(func, num_api_spec_tokens)


class Function:
    """A program. Called with a state it writes to that; otherwise it is run."""

    def __init__(self, func: Callable, num_api_spec_tokens: int | None = None, bound: dict[str, Any] | None = None):
        functools.update_wrapper(self, func)
        self.func, self.num_api_spec_tokens, self.bound = func, num_api_spec_tokens, bound or {}
        self.parameters = ir.parameters(func)
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"{func.__name__}: a program is a plain function, without async and yield: writing never waits")
        if num_api_spec_tokens is not None and (type(num_api_spec_tokens) is not int or num_api_spec_tokens < 1):
            raise ValueError(f"num_api_spec_tokens is how many tokens a call makes, at least 1; got {num_api_spec_tokens!r}")
        if any(p.kind is p.VAR_POSITIONAL for p in self.parameters):
            raise ValueError(f"{func.__name__}: the parameters of a program have names, and what *{self.parameters[-1].name} takes has none")

    def bind(self, **values: Any) -> Function:
        """The program with some of its arguments fixed."""
        self._check(values)
        return Function(self.func, self.num_api_spec_tokens, {**self.bound, **values})

    def _check(self, values: dict[str, Any]) -> None:
        names = {p.name for p in self.parameters}
        if (unknown := sorted(set(values) - names)) and all(p.kind is not p.VAR_KEYWORD for p in self.parameters):
            raise TypeError(f"{self.__name__} has no parameter {unknown[0]}; it has {', '.join(sorted(names)) or 'none'}, and run's options are "
                            f"{', '.join(_RUN_OPTIONS)}")

    def _values(self, args: Sequence[Any], values: dict[str, Any]) -> dict[str, Any]:
        free = [p.name for p in self.parameters if p.name not in self.bound and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(free):
            raise TypeError(f"{self.__name__} takes {len(free)} arguments, {len(args)} were given")
        self._check(values)
        if twice := sorted(set(free[:len(args)]) & set(values)):
            raise TypeError(f"{self.__name__}: {twice[0]} was given twice")
        found = {**self.bound, **dict(zip(free, args)), **values}
        for p in self.parameters:
            if p.name not in found and p.default is p.empty and p.kind is not p.VAR_KEYWORD:
                raise TypeError(f"{self.__name__} lacks its argument {p.name}")
        return found

    def run(self, *args: Any, backend: Backend | None = None, stream: bool = False, use_thread: bool = True, **given: Any) -> ProgramState:
        """Run it; SamplingParams given here (max_new_tokens, temperature, ...) are for gens that do not say otherwise. Waits for all that the program
        has written, unless it streams. ProgramError where a node has failed; what the program itself raises comes as it is."""
        options, values = _split(given)
        if clash := sorted({p.name for p in self.parameters} & {name for name in given if name in _RUN_OPTIONS}):
            raise TypeError(f"{self.__name__} has a parameter {clash[0]}, which is an option of run, too: give it by its place, or in bind")
        run = Run(_backend(backend), options, stream, use_thread and config.parallel, self.num_api_spec_tokens, config.hints)
        values = self._values(args, values)
        state = ProgramState(run, trace=Graph(self.__name__).root)
        if stream:
            state._end(False)
            threading.Thread(target=self._go, args=(state, values), name=self.__name__, daemon=True).start()
            return state._seen_from_outside()
        if (error := self._go(state, values)) is not None:
            raise error
        if config.verbosity >= 2:
            print(state.text())
        return state

    def _go(self, state: ProgramState, values: dict[str, Any]) -> BaseException | None:
        """Run it on a state to its end. Returns what it raised, or what went wrong unseen."""
        error = None
        try:
            state.ret_value = self.func(state, **values)
        except BaseException as raised:
            error = raised
        try:
            try:
                state.run.finish(stopped=error)
            except ProgramError as raised:
                error = error or raised
            except BaseException as raised:     # Ctrl-C while it waited: what has not begun does not
                error = raised
                state.run.finish(stopped=raised)
        finally:
            state._end(True, error)
        if error is not None and not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise error
        return error

    def run_batch(self, batch_kwargs: Sequence[dict | tuple], *, backend: Backend | None = None, num_threads: int | str = "auto",
                  progress_bar: bool = False, generator_style: bool = False, **given: Any) -> list[ProgramState] | Iterator[ProgramState]:
        """Run it for every item (arguments by name, or a tuple of them), many at once; their states, in order. A common beginning is computed once.

        A program that fails keeps its error (`state.error()`, and whoever reads the state gets it); the others go on. generator_style: the states
        one by one, as soon as they are there."""
        options, values = _split(given)
        if not isinstance(batch_kwargs, Iterable) or isinstance(batch_kwargs, (str, dict)):
            raise TypeError(f"run_batch takes a list of arguments, a dict or a tuple each; got {batch_kwargs!r:.100}")
        backend, batch = _backend(backend), list(batch_kwargs)
        if values:
            raise TypeError(f"run_batch does not know {sorted(values)[0]}; its options are {', '.join(_RUN_OPTIONS)}, and arguments are in the batch")
        for i, item in enumerate(batch):
            if not isinstance(item, (dict, tuple, list)):
                raise TypeError(f"item {i} of a batch is a dict of arguments, or a tuple of them; got {item!r:.100}")
        batch = [self._values((), item) if isinstance(item, dict) else self._values(item, {}) for item in batch]
        if num_threads != "auto" and (type(num_threads) is not int or num_threads < 1):
            raise ValueError(f"num_threads is 'auto' or at least 1, got {num_threads!r}")
        states = self._batch(backend, batch, options, num_threads, progress_bar)
        return states if generator_style else list(states)

    def _batch(self, backend: Backend, batch: list[dict], options: dict[str, Any], num_threads: int | str,
               progress_bar: bool) -> Iterator[ProgramState]:
        if not batch:
            return
        most = max(THREADS, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
        hold = self._hold_prefix(backend, batch)
        pool = concurrent.futures.ThreadPoolExecutor(min(most, len(batch)), thread_name_prefix=self.__name__)

        active: dict[int, Run] = {}

        def one(values: dict[str, Any]) -> ProgramState:
            run = Run(backend, dict(options), False, config.parallel, self.num_api_spec_tokens, config.hints)
            state = ProgramState(run, trace=Graph(self.__name__).root, hold=hold)
            active[id(run)] = run
            try:
                self._go(state, values)
            finally:
                del active[id(run)]
            return state
        futures = [pool.submit(one, values) for values in batch]
        try:
            for future in tqdm(futures, desc=self.__name__) if progress_bar else futures:
                yield future.result()
        finally:
            for future in futures:
                if future.cancel() and hold is not None:
                    hold.spend(used=False)
            for run in list(active.values()):           # whoever leaves early waits for nothing
                run.cancel(RuntimeError("the batch was left"))
            pool.shutdown()

    def _hold_prefix(self, backend: Backend, batch: list[dict]) -> Hold | None:
        """Declare what all programs of a batch begin with."""
        if len(batch) < 2 or not config.precache_with_tracing:
            return None
        run = Run(backend, hints=config.hints)
        if len(text := self._prefix(run, batch)) <= PREFIX_CHARS:
            return None
        return run.hold(text, len(batch))

    def _prefix(self, run: Run, batch: list[dict]) -> str:
        state = ProgramState(run)
        state._append([(leaf, "") for leaf in ir.constant_prefix(self.func, batch)])
        return state.text()

    def trace(self, *args: Any, backend: Backend | None = None, **values: Any) -> Graph:
        """Its graph, without a model. Arguments that are not given are symbols. TracingError where its course depends on one."""
        names = [p.name for p in self.parameters if p.name not in self.bound]
        self._check(values)
        return ir.trace(self.func, {**self.bound, **dict(zip(names, args)), **values})

    def cache(self, backend: Backend | None = None) -> str:
        """Prefill what it begins with, whatever its arguments are; returns that text."""
        backend = _backend(backend)
        text = self._prefix(Run(backend), [{name: ir.Argument(name) for name in (p.name for p in self.parameters)} | self.bound])
        if text:
            backend.generate([text], [{"max_tokens": 0}])
        return text

    def __call__(self, *args: Any, **values: Any) -> Any:
        """With a state first: the program writes to it, and what it returns is returned. Otherwise `run`."""
        if args and isinstance(args[0], ir.Writer):
            return self.func(args[0], **self._values(args[1:], values))
        return self.run(*args, **values)


_RUN_OPTIONS = ("max_new_tokens", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
                "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "return_logprob", "logprob_start_len",
                "top_logprobs_num", "return_text_in_logprobs", "seed", "logit_bias", "skip_special_tokens")


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run's options, in SamplingParams' names and without those that are None, and what else was given."""
    options = {name: value for name, value in given.items() if name in _RUN_OPTIONS and value is not None}
    if {"max_new_tokens", "max_tokens"} <= set(options):
        raise TypeError("max_tokens and max_new_tokens are two names for one thing: give one of them")
    if "max_new_tokens" in options:
        options["max_tokens"] = options.pop("max_new_tokens")
    options.setdefault("max_tokens", 128)
    return options, {name: value for name, value in given.items() if name not in _RUN_OPTIONS}


def _demo() -> None:
    """A program as a picture, and on a backend without a model: what it asked, and what it declared."""
    @function
    def tips(s, topic):
        s += user("Two tips about " + topic)
        s += assistant(gen("words", stop="."))
        forks = s.fork(2)
        forks += lambda i: user(f"Explain tip {i + 1}.") + assistant(gen("why"))
        forks.join()
    print(tips.trace().draw())
    backend = Echo()
    state = tips.run(topic="sleep", backend=backend)
    print(f"\n{len(backend.prompts)} requests; held: {[(prefix[-24:], n) for prefix, n in backend.holds]}; why = {state['why']}")


if __name__ == "__main__":
    _demo()
