"""The language's IR: a program is a graph of nodes before anything runs.

A program writes expressions to a state, `s += user(question + gen("answer"))`, and every one of them becomes nodes:

    text   argument   gen   select   fork   fork_item   variable   role   scope   lazy_commit   join   separate_reasoning   image   video

What runs a program (interpreter.py) and what only looks at it (the tracer, here) are two kinds of `Writer`: they take the same nodes from the
same program. `trace` gives every argument a symbol instead of a value, and the graph that comes out prints as text, as a picture and as Mermaid:

    %0 role_begin user                          tips
    %1 text "Two tips on "                      |- role_begin user
    %2 argument topic                           |- text "Two tips on "
    ...                                         |- fork 2
    %7 fork 2 <- %6                             |  |- 0: text "1. ", gen tip
    %8 fork_item 0 <- %7                        |  `- 1: text "2. ", gen tip
    %9 text "1. " <- %8                         `- join

Names. A *symbol* stands for a value that tracing has not: an argument, or what the model will have written (`variable`). It can be written, and
added to text; whoever wants to see it (f-strings, `if`, `len`) gets a TracingError, for the program's course depends on it. A *leaf* is a node that
is not made of others. A *branch* is the path of forks down to a state: "" the program's own, "1" its second child, "1.0" that one's first; "2:1" is
the second child of a state's third fork.

`constant_prefix` traces a program for a whole batch of arguments: those that are the same in all of it are values, the others symbols. What is
written before the first symbol, or the first thing that a model has to say, is what all of them begin with, and needs to be prefilled once.

Cost: some microseconds a node. Where it stops: tracing runs the program's Python, side effects too; loops and branches on what the model writes
cannot be traced, but every run records its graph (`state.graph`). Source: Zheng et al. 2024, section 2 and appendix D (compiler mode).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROLES = ("system", "user", "assistant")
FAMILY = {f"nano_sgl.{name}" for name in ("lang", "ir", "interpreter")}    # frames of these are nobody's line
SHOWN = 60              # characters of a text that a printed node shows


class TracingError(TypeError):
    """A program looked at a value that does not exist while it is traced."""


def origin() -> str:
    """FILE:LINE of the program that called into the language."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") in FAMILY or frame.f_code.co_filename == contextlib.__file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# ----------------------------------------------------------------------------------------------------------------------------- nodes

class Expr:
    """What a program can write. `+` with text or another one gives a Sequence."""

    kind = ""
    constant = False     # is its text known without a model and without arguments?

    def __add__(self, other: str | Expr) -> Expr:
        return Series([self, as_expr(other)])

    def __radd__(self, other: str | Expr) -> Expr:
        return Series([as_expr(other), self])

    def leaves(self) -> Iterator[Expr]:
        """The nodes it is made of, in the order in which they run."""
        yield self

    def names(self) -> tuple[str, ...]:
        """The variables it sets."""
        return ()

    def __repr__(self) -> str:
        return self.kind


def as_expr(value: Any) -> Expr:
    """Text or an expression, as an expression. TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    hint = "; did you mean str(...)?" if isinstance(value, (int, float)) else "; a Python list is written with ' '.join(...)" if isinstance(
        value, (list, tuple)) else "; a state's text is its .text()" if isinstance(value, Writer) else ""
    raise TypeError(f"a program is made of text and expressions, got {value!r:.100} ({type(value).__name__}){hint}")


class Series(Expr):
    """Expressions one after the other."""

    kind = "series"

    def __init__(self, parts: Sequence[Expr]):
        self.parts = [leaf for part in parts for leaf in part.leaves()]

    def leaves(self) -> Iterator[Expr]:
        yield from self.parts

    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names())

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


class Text(Expr):
    """Text that is known."""

    kind, constant = "text", True

    def __init__(self, value: str):
        self.value = value

    def __repr__(self) -> str:
        return f"text {self.value if len(self.value) <= SHOWN else self.value[:SHOWN - 3] + '...'!r}"


class Gen(Expr):
    """What the model writes here. params: those of SamplingParams that were given; dtype is among them."""

    kind = "gen"

    def __init__(self, name: str | None, params: dict[str, Any]):
        self.name, self.params = name, params

    def names(self) -> tuple[str, ...]:
        return () if self.name is None else (self.name,)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r:.60}" for name, value in self.params.items())
        return f"gen {self.name or ''}({given})" if given else f"gen {self.name or ''}".rstrip()


class Select(Expr):
    """The likeliest of some choices. method: see choices.py."""

    kind = "select"

    def __init__(self, name: str | None, choices: list[str], temperature: float, method: Any):
        self.name, self.choices, self.temperature, self.method = name, choices, temperature, method

    def names(self) -> tuple[str, ...]:
        return () if self.name is None else (self.name,)

    def __repr__(self) -> str:
        return f"select {self.name or ''} of {len(self.choices)}: {', '.join(map(repr, self.choices)):.{SHOWN}}"


class RoleBegin(Expr):
    """A message of a conversation begins."""

    kind, constant = "role_begin", True

    def __init__(self, role: str):
        self.role = role

    def __repr__(self) -> str:
        return f"{self.kind} {self.role}"


class RoleEnd(RoleBegin):
    """And ends."""

    kind = "role_end"


class ScopeBegin(Expr):
    """What is written from here to the scope's end is a variable, too."""

    kind, constant = "scope_begin", True

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"{self.kind} {self.name}"


class ScopeEnd(ScopeBegin):
    """The end of a variable's text."""

    kind = "scope_end"

    def names(self) -> tuple[str, ...]:
        return (self.name,)


class SeparateReasoning(Expr):
    """What the model thinks in an expression goes to variables of its own, and out of the text."""

    kind = "separate_reasoning"

    def __init__(self, inner: Expr, model_type: str):
        self.inner, self.model_type = inner, model_type

    def names(self) -> tuple[str, ...]:
        return tuple(found for name in self.inner.names() for found in (name, f"{name}_reasoning_content"))

    def __repr__(self) -> str:
        return f"separate_reasoning {self.model_type}: {self.inner!r}"


class Image(Expr):
    """A picture. source: a path, bytes, or a URL."""

    kind = "image"

    def __init__(self, source: Any):
        self.source = source

    def __repr__(self) -> str:
        return f"{self.kind} {self.source if isinstance(self.source, str) else type(self.source).__name__}"


class Video(Image):
    """Some frames of a film."""

    kind = "video"

    def __init__(self, source: Any, num_frames: int):
        self.source, self.num_frames = source, num_frames


class CommitLazy(Expr):
    """The text so far will be needed by others: prefill it, and keep it."""

    kind = "lazy_commit"

    def __init__(self, children: int):
        self.children = children

    def __repr__(self) -> str:
        return f"{self.kind} for {self.children}"


class Fork(Expr):
    """From here on there are several states. `children` are given by whoever runs it."""

    kind = "fork"

    def __init__(self, size: int, children: Sequence = ()):
        self.size, self.children = size, children

    def __repr__(self) -> str:
        return f"fork {self.size}"


class ForkItem(Expr):
    """The beginning of a fork's child."""

    kind = "fork_item"

    def __init__(self, index: int):
        self.index = index

    def __repr__(self) -> str:
        return f"fork_item {self.index}"


class Join(Expr):
    """The end of a fork. mode: gather_variable, or concate_and_append."""

    kind = "join"

    def __init__(self, mode: str, children: Sequence = (), new: Sequence[str] = ()):
        self.mode, self.children, self.new = mode, children, new

    def names(self) -> tuple[str, ...]:
        return tuple(self.new)

    def __repr__(self) -> str:
        return f"join ({self.mode})"


class Symbol(Expr):
    """Stands for a value that does not exist while a program is traced."""

    def __init__(self, name: str, source: Any = None):
        self.name, self.source = name, source

    def _seen(self, *_: Any) -> Any:
        raise TracingError(f"{origin()}: the program's course depends on {self.kind} {self.name!r}, which has no value while it is traced; "
                           "what may be done with it is to write it: s += it, or text + it. (A run records its graph: state.graph.)")

    __format__ = __str__ = __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = __getitem__ = __contains__ = _seen
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _seen
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        return self._seen() if not name.startswith("__") else object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"{self.kind} {self.name}"


class Argument(Symbol):
    """An argument of a traced program."""

    kind = "argument"


class Variable(Symbol):
    """What the model will have written under a name. source: the node that sets it."""

    kind = "variable"


# --------------------------------------------------------------------------------------------------------------------------- writers

class Writer:
    """What a program writes to, whoever looks: a run, or the tracer. They say what becomes of nodes (`_write`), what a variable is (`get_var`),
    and how to fork and join."""

    def _write(self, expr: Expr, where: str) -> None:
        raise NotImplementedError

    def _fork(self, size: int, where: str) -> list[Writer]:
        raise NotImplementedError

    def _join(self, children: list, mode: str, where: str) -> None:
        raise NotImplementedError

    def get_var(self, name: str) -> Any:
        raise NotImplementedError

    def __iadd__(self, expr: str | Expr) -> Writer:
        self._write(as_expr(expr), origin())
        return self

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def fork(self, size: int = 1, position_ids_offset: None = None) -> Group:
        """Go on in several ways from here: `size` states that begin with all that was written, and share what it costs."""
        if position_ids_offset is not None:
            raise ValueError("position_ids_offset cannot be given: the positions of a branch go on where its parent ends")
        if type(size) is not int or size < 1:
            raise ValueError(f"fork takes how many states to make, at least 1; got {size!r}")
        return Group(self, self._fork(size, origin()))

    @contextlib.contextmanager
    def copy(self, position_ids_offset: None = None) -> Iterator[Writer]:
        """A state of one's own to write on from here; its new variables come back at the end."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    def _message(self, role: str, expr: str | Expr | None) -> Any:
        return self._scoped(RoleBegin(role), RoleEnd(role)) if expr is None else message(role, expr)

    def system(self, expr: str | Expr | None = None) -> Any:
        """`s += s.system("...")`, or `with s.system(): s += "..."`."""
        return self._message("system", expr)

    def user(self, expr: str | Expr | None = None) -> Any:
        """`s += s.user("...")`, or `with s.user(): s += "..."`."""
        return self._message("user", expr)

    def assistant(self, expr: str | Expr | None = None) -> Any:
        """`s += s.assistant(gen("x"))`, or `with s.assistant(): s += gen("x")`."""
        return self._message("assistant", expr)

    def var_scope(self, name: str) -> contextlib.AbstractContextManager:
        """What is written inside is the variable `name`."""
        return self._scoped(ScopeBegin(name), ScopeEnd(name))

    @contextlib.contextmanager
    def _scoped(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._write(begin, origin())
        yield                                  # an error inside ends the program: nothing is to be closed then
        self._write(end, origin())


class Group:
    """The states of a fork: a sequence; `+=` writes to all of them (text or an expression; a list of one each; a function of the index)."""

    def __init__(self, source: Writer, states: list[Writer]):
        self.source, self.states = source, states

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> Writer:
        return self.states[index]

    def __iter__(self) -> Iterator[Writer]:
        return iter(self.states)

    def __iadd__(self, other: Any) -> Group:
        if isinstance(other, (list, tuple)) and len(other) != len(self.states):
            raise ValueError(f"a fork of {len(self.states)} was given {len(other)} expressions: one each, or one for all")
        for i, state in enumerate(self.states):
            state += other(i) if callable(other) and not isinstance(other, Expr) else other[i] if isinstance(other, (list, tuple)) else other
        return self

    def __setitem__(self, index: int, state: Writer) -> None:
        if state is not self.states[index]:             # forks[i] += ... assigns what it was
            raise TypeError("a fork's states cannot be exchanged")

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all of them. gather_variable: variables that they have and the source had not become lists there; concate_and_append: what
        they wrote is written to the source, in order. An error in one of them is raised here."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join knows gather_variable and concate_and_append, got {mode!r}")
        self.source._join(self.states, mode, origin())


def message(role: str, expr: str | Expr) -> Expr:
    """One message of a conversation, as one expression."""
    return Series([RoleBegin(role), as_expr(expr), RoleEnd(role)])


# ----------------------------------------------------------------------------------------------------------------------------- tracer

class Node:
    """A leaf at its place in a graph. after: the numbers of the nodes that come right before, more than one where branches join."""

    def __init__(self, number: int, expr: Expr, branch: str, after: tuple[int, ...], where: str):
        self.number, self.expr, self.branch, self.after, self.where = number, expr, branch, after, where
        self.children: list[Trace] = []       # a fork's

    def __repr__(self) -> str:
        behind = f" <- {', '.join(f'%{n}' for n in self.after)}" if self.after else ""
        source = f" of %{self.expr.source}" if isinstance(self.expr, Variable) and self.expr.source is not None else ""
        return f"%{self.number} {'[' + self.branch + '] ' if self.branch else ''}{self.expr!r}{source}{behind}"


class Graph:
    """What a program wrote, or would write: `nodes` in order. `str` lists them, `draw` and `mermaid` show them."""

    def __init__(self, name: str = "program", writer: type[Trace] | None = None):
        self.name = name
        self.nodes: list[Node] = []
        self.root = (writer or Trace)(self, "", ())

    def __str__(self) -> str:
        return "\n".join(map(repr, self.nodes))

    def __len__(self) -> int:
        return len(self.nodes)

    def draw(self) -> str:
        """The graph as a tree of text: a line a node, a fork's branches below it."""
        lines = [self.name]

        def show(nodes: list[Node], indent: str) -> None:
            for i, node in enumerate(nodes):
                last = i == len(nodes) - 1
                lines.append(f"{indent}{'`- ' if last else '|- '}{node.expr!r}")
                for k, child in enumerate(node.children):
                    inner, final = indent + ("   " if last else "|  "), k == len(node.children) - 1
                    lines.append(f"{inner}{'`- ' if final else '|- '}{k}")
                    show(child.nodes[1:], inner + ("   " if final else "|  "))
        show(self.root.nodes, "")
        return "\n".join(lines)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, which many viewers of Markdown draw."""
        lines = ["flowchart TD"]
        for node in self.nodes:
            label = repr(node.expr).replace('"', "'").replace("\\n", " ").replace("`", "'")
            lines.append(f'  n{node.number}["{label}"]')
            lines += [f"  n{before} --> n{node.number}" for before in node.after]
            if isinstance(node.expr, Variable) and node.expr.source is not None:
                lines.append(f"  n{node.expr.source} -.-> n{node.number}")
        return "\n".join(lines)


class Trace(Writer):
    """A state of which only the nodes are kept. after: what its first node comes behind."""

    def __init__(self, graph: Graph, branch: str, after: tuple[int, ...]):
        self.graph, self.branch, self.nodes = graph, branch, []
        self._after, self._set, self._forks = after, {}, 0

    def _add(self, expr: Expr, where: str) -> Node:
        node = Node(len(self.graph.nodes), expr, self.branch, self._after, where)
        self.graph.nodes.append(node)
        self.nodes.append(node)
        self._after = (node.number,)
        self._set |= dict.fromkeys(expr.names(), node.number)
        return node

    def _write(self, expr: Expr, where: str) -> None:
        for leaf in expr.leaves():
            self._add(leaf, where)

    def _fork(self, size: int, where: str) -> list[Trace]:
        if size > 1 and self.nodes:
            self._add(CommitLazy(size), where)
        node = self._add(Fork(size), where)
        fork, self._forks = self._forks, self._forks + 1
        for index in range(size):
            name = f"{fork}:{index}" if fork else str(index)
            child = Trace(self.graph, f"{self.branch}.{name}" if self.branch else name, self._after)
            child._set = dict(self._set)
            child._add(ForkItem(index), where)
            node.children.append(child)
        return node.children

    def _join(self, children: list[Trace], mode: str, where: str) -> None:
        self._after += tuple(number for child in children for number in child._after)
        node = self._add(Join(mode), where)
        self._set |= {name: node.number for child in children for name in child._set if name not in self._set}

    def __contains__(self, name: str) -> bool:
        return name in self._set

    def get_var(self, name: str) -> Variable:
        """A symbol for a variable."""
        if name not in self._set:
            raise KeyError(f"{origin()}: variable {name!r} is read before anything sets it")
        return Variable(name, self._set[name])

    def set_var(self, name: str, value: Any) -> None:
        """A variable of which no node says what it is."""
        self._set[name] = None

    __setitem__ = set_var

    def _no_value(self, *_: Any) -> Any:
        raise TracingError(f"{origin()}: a traced program has no text yet, nor messages, nor metadata")

    text = messages = get_meta_info = text_iter = text_async_iter = error = _no_value

    def sync(self) -> None:
        """Nothing runs."""


def parameters(function: Callable) -> list[inspect.Parameter]:
    """A program's parameters behind the state. ValueError unless the first is called s."""
    found = list(inspect.signature(function).parameters.values())
    if not found or found[0].name != "s":
        raise ValueError(f"the first parameter of a program is its state and must be called s: {getattr(function, '__name__', function)}"
                         f"({', '.join(p.name for p in found)})")
    return found[1:]


def trace(function: Callable, values: dict[str, Any]) -> Graph:
    """The graph of a program. Arguments that `values` does not hold are symbols. TracingError where its course depends on one of them."""
    graph = Graph(getattr(function, "__name__", "program"))
    _call(function, graph.root, values)
    return graph


def _call(function: Callable, state: Writer, values: dict[str, Any]) -> Any:
    given = {}
    for p in parameters(function):
        if p.name in values:
            given[p.name] = values[p.name]
        elif p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            given[p.name] = p.default if p.default is not p.empty else Argument(p.name)
    return function(state, **given)


class _Stop(BaseException):
    """Ends a program, also one that catches exceptions and tries again."""


class _Prefix(Trace):
    """Keeps the constant nodes at the beginning, and stops at the first other one."""

    def _write(self, expr: Expr, where: str) -> None:
        for leaf in expr.leaves():
            if not leaf.constant:
                raise _Stop
            self._add(leaf, where)

    def _fork(self, *_: Any) -> list[Trace]:
        raise _Stop


def constant_prefix(function: Callable, batch: Sequence[dict[str, Any]]) -> list[Expr]:
    """The nodes that a program begins with whatever the batch's arguments are. What it raises in place of a value ends the prefix there."""
    same, first = {}, batch[0]
    for name, value in first.items():
        with contextlib.suppress(Exception):                # values may not compare
            if all(name in other and type(other[name]) is type(value) and bool(other[name] == value) for other in batch):
                same[name] = value
    symbols = {name: Argument(name) for given in batch for name in given if name not in same}
    state = Graph(writer=_Prefix).root
    with contextlib.suppress(Exception, _Stop):
        _call(function, state, symbols | same)
    return [node.expr for node in state.nodes]


def _demo() -> None:
    """The paper's tip_suggestion, traced: as text, as a picture, and what a batch of it has in common."""
    def tip_suggestion(s, topic):
        s += message("system", "You are a helpful assistant.")
        s += message("user", "Two tips for " + topic)
        forks = s.fork(2)
        forks += lambda i: message("assistant", f"{i + 1}. " + Gen("tip", {"max_tokens": 16}))
        forks.join()
        s += "In short: " + s["tip"] + Gen("summary", {})
    graph = trace(tip_suggestion, {})
    print(graph, graph.draw(), sep="\n\n")
    print("\nall begin with", constant_prefix(tip_suggestion, [{"topic": "sleep"}, {"topic": "food"}]))


if __name__ == "__main__":
    _demo()
