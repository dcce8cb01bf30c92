"""API speculative execution: several gens of a program answered by one call that is longer than any of them.

A program on somebody else's API pays for every call: the prompt is billed, and waited for, again. But a model that sees a pattern goes on with it:

    s += "Name:" + gen("name", stop="\\n") + "\\nJob:" + gen("job", stop="\\n")

      first call, without its stop:   " Ada\\nJob: mathematician\\nBorn: 18..."
      name, up to its stop            " Ada"
      left over                           "\\nJob: mathematician\\nBorn: 18..."
      the program writes                  "\\nJob:"            which is what was left over: skipped
      job, up to its stop                      " mathematician"   no call

`Leftover` does this for completions. What the program writes is looked for at the beginning of what is left, and a gen takes from the rest up to its
stop string; where the text does not fit, where no stop is in it, or where other parameters are asked for, the rest is dropped and the next call is
made. So nothing that is kept differs from what the model wrote behind exactly this prompt. A chat API writes whole turns, so there `match_turn` holds
a whole assistant message, its texts and gens, against one answer.

Invariant: a value never holds its stop string, and prompt plus values is a text that the model wrote. Cost: tokens that are made and not used; calls
that were saved are counted on the backend. Stops holding: sampled gens of one call share its noise; they are one sample of the whole text, which is
no loss, but seeds per gen mean nothing. Source: Zheng et al. 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import ir

LENGTHS = ("max_tokens", "min_tokens", "stop", "seed")      # what two gens of one call may differ in


@dataclass
class Taken:
    """A gen's text, as an output."""

    text: str
    finish_reason: str
    meta_info: dict[str, Any]


def first_stop(text: str, stops: str | Sequence[str] | None) -> tuple[int, str] | None:
    """Where the first of some strings begins in a text, and which it is."""
    found = [(text.index(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops or ()) if stop in text]
    return min(found, default=None)


class Leftover:
    """What a completion wrote beyond the gen it was made for. prompt: what it stands behind."""

    def __init__(self, prompt: str = "", text: str = "", params: dict[str, Any] | None = None, meta: dict[str, Any] | None = None):
        self.prompt, self.text, self.params, self.meta = prompt, text, params, meta

    def copy(self) -> Leftover:
        """The same, for a branch of its own."""
        return Leftover(self.prompt, self.text, self.params, self.meta)

    def take(self, prompt: str, params: dict[str, Any], ask: Callable[[dict], Any], length: int, saved: Callable[[int], None]) -> Taken:
        """The output of a gen behind a prompt: out of what is left, which is told to `saved`, or of one more call of up to `length` tokens."""
        same = {name: value for name, value in params.items() if name not in LENGTHS}
        if self.params == same and prompt.startswith(self.prompt) and (self.prompt + self.text).startswith(prompt):
            rest = (self.prompt + self.text)[len(prompt):]
            if (cut := first_stop(rest, params.get("stop"))) is not None:
                saved(1)
                return self._cut(prompt, rest, cut, same, self.meta)
        output = ask({**{name: value for name, value in params.items() if name != "stop"}, "max_tokens": length})
        meta = getattr(output, "meta_info", None) or {}
        if (cut := first_stop(output.text, params.get("stop"))) is not None:
            return self._cut(prompt, output.text, cut, same, meta)
        self.params = None
        if output.finish_reason == "length":        # it wants to be longer, or is to be shorter: as if nothing had been
            output = ask(params)
            meta = getattr(output, "meta_info", None) or {}
        return Taken(output.text, output.finish_reason, meta)

    def _cut(self, prompt: str, text: str, cut: tuple[int, str], params: dict[str, Any], meta: dict[str, Any] | None) -> Taken:
        at, stop = cut
        self.prompt, self.text, self.params, self.meta = prompt + text[:at], text[at:], params, meta
        return Taken(text[:at], "stop", {**(meta or {}), "finish_reason": {"type": "stop", "matched": stop}})


def match_turn(nodes: Sequence[ir.Expr], answer: str) -> list[tuple[ir.Expr, str]] | None:
    """An assistant's turn, texts and gens, held against one answer: what each node stands for, or None where the answer has not its texts. A gen
    ends at its own stop string, at the text behind it, or, if it is the last node, at the answer's end."""
    found, at = [], len(answer) - len(answer.lstrip())
    if nodes and isinstance(nodes[0], ir.Text):
        nodes = [ir.Text(nodes[0].value.lstrip()), *nodes[1:]]
    for i, node in enumerate(nodes):
        if isinstance(node, ir.Text):
            if not answer.startswith(node.value, at):
                return None
            found.append((node, node.value))
            at += len(node.value)
            continue
        following = nodes[i + 1].value if i + 1 < len(nodes) and isinstance(nodes[i + 1], ir.Text) else None
        stops = node.params.get("stop") or []
        cut = first_stop(answer[at:], [*([stops] if isinstance(stops, str) else stops), *([following] if following else [])])
        if cut is None and i + 1 < len(nodes):
            return None
        end = len(answer) if cut is None else at + cut[0]
        found.append((node, answer[at:end]))
        at = end
    return found


def _demo() -> None:
    """One call for three gens."""
    class Scripted:
        calls = 0

        def ask(self, params: dict) -> Taken:
            self.calls += 1
            return Taken(" Ada\nJob: mathematician\nBorn: 1815\nDied: 1852\n", "length", {})

    backend, left, text, saved = Scripted(), Leftover(), "", []
    for field in ("Name:", "\nJob:", "\nBorn:"):
        text += field
        text += left.take(text, {"stop": "\n", "temperature": 0}, backend.ask, 64, saved.append).text
    print(f"{text}\n({backend.calls} call, {sum(saved)} saved)")


if __name__ == "__main__":
    _demo()
