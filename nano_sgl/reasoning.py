"""Reasoning: what a model thinks, kept apart from what it answers.

Some models think aloud before they answer, and mark where that ends; some begin with a tag of their own, for others the prompt ends in it:

    prompt ...<|im_start|>assistant\\n<think>\\n    output  Two and two make four.</think>\\n\\nIt is 4.
                                     `-- opened             |---- reasoning_content |         |- content

Text comes piece by piece, and a tag may be cut anywhere, so what could become one is held back until it does or cannot any more.

Names. A *style* is how a family of models does it; a server has one, by SGLang's name for it (`--reasoning-parser`). Thinking is *opened* if the
output begins inside of it: the prompt ends in the opening tag, or models of this style do so anyway. It is *closed* if the model does not think:
the prompt ends in the closing tag, as templates write it that were told `enable_thinking: false`, or it is so told. Otherwise it is up to the
model, which then begins with the tag itself.

Invariants. No character is lost but those of the tags, and the blanks in front of an opening one; however the text is cut into pieces, the parts
are the same. Only the first thoughts are thoughts: tags in the answer are part of it.

Cost: a search in each piece. Where it stops: a tag that is a special token must not be left out of the text (`skip_special_tokens`), and no grammar
can see it. What SGLang does beside this, ending Qwen's thoughts where a tool is called, is not done: a grammar would not know of it.
Source: SGLang's reasoning parsers; DeepSeek-R1 (2025) and Qwen3 (2025) for the tags.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple


class Style(NamedTuple):
    """How models think. always: the output begins with thoughts, whether or not the prompt says so."""
    begin: str
    end: str
    always: bool = False


STYLES = {
    "think": Style("<think>", "</think>"),
    "deepseek-r1": Style("<think>", "</think>", always=True),
    "deepseek-v3": Style("<think>", "</think>"),
    "glm45": Style("<think>", "</think>"),
    "kimi": Style("◁think▷", "◁/think▷"),
    "qwen3": Style("<think>", "</think>"),
    "qwen3-thinking": Style("<think>", "</think>", always=True),
}
REASONING, CONTENT = "reasoning_content", "content"     # fields of a message
OPENED, CLOSED, UNKNOWN = "opened", "closed", "unknown"


def begins(style: Style, prompt: str, said: str = "", enabled: bool = True) -> str:
    """Where an output begins: in thoughts (OPENED), behind them (CLOSED), or where the model likes (UNKNOWN). prompt: its end; said: what of the
    answer the prompt already holds."""
    if not enabled:
        return CLOSED
    if style.begin in said or style.end in said:
        return OPENED if said.rfind(style.begin) > said.rfind(style.end) else CLOSED
    if prompt.rstrip().endswith(style.begin):
        return OPENED
    if prompt.rstrip().endswith(style.end):
        return CLOSED
    return OPENED if style.always else UNKNOWN


def overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark, but not all of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


class Splitter:
    """Sorts a text that comes in pieces into thoughts and answer. One for each output."""

    def __init__(self, style: Style, opened: bool):
        self.style, self.opened = style, opened
        self.held, self.field = "", None       # what is not sorted yet; None: not even an opening tag was ruled out
        self.before: list[str] = []            # blanks before what may be an opening tag
        self.thought = False                   # has it?
        self.blanks = False                    # those behind the closing tag are part of nothing

    def feed(self, text: str, ended: bool = False) -> list[tuple[str, str]]:
        """(field, text) of what is certain. ended: nothing follows."""
        self.held += text
        found: list[tuple[str, str]] = []
        if self.field is None:
            begun = self.held.lstrip()
            self.before.append(self.held[:len(self.held) - len(begun)])
            self.held = begun
            if begun.startswith(self.style.begin):
                self.field, self.held = REASONING, begun[len(self.style.begin):]
            elif ended or not self.style.begin.startswith(begun):
                self.field, self.held = REASONING if self.opened else CONTENT, "".join([*self.before, begun])
        if self.field == REASONING:
            self.thought = True
            thoughts, tag, rest = self.held.partition(self.style.end)
            keep = 0 if tag or ended else overlap(thoughts, self.style.end)
            found.append((REASONING, thoughts[:len(thoughts) - keep]))
            self.held = rest if tag else thoughts[len(thoughts) - keep:]
            self.field, self.blanks = (CONTENT, True) if tag else (REASONING, False)
        if self.field == CONTENT:
            self.held = self.held.lstrip(" \t\r\n") if self.blanks else self.held
            self.blanks = self.blanks and not self.held
            found.append((CONTENT, self.held))
            self.held = ""
        return [(field, part) for field, part in found if part]


class Counter:
    """Counts the tokens of an output that are thoughts, with their tags. One for each output."""

    def __init__(self, style: Style, opened: bool, closed: bool = False):
        """opened, closed: whether the output begins in thoughts, or behind them."""
        self.splitter, self.decoder = Splitter(style, opened), codecs.getincrementaldecoder("utf-8")("replace")
        self.splitter.field = CONTENT if closed else None
        self.sure = self.waiting = 0           # tokens of thoughts; of what may become thoughts

    def add(self, token: bytes) -> None:
        """Take the bytes of a token."""
        if self.ended:
            return
        self.waiting += 1
        self.splitter.feed(self.decoder.decode(token))
        if self.splitter.thought:
            self.sure, self.waiting = self.sure + self.waiting, 0

    @property
    def ended(self) -> bool:
        """Is what follows the answer?"""
        return self.splitter.field == CONTENT

    @property
    def tokens(self) -> int:
        """So far."""
        return self.sure + (self.waiting if self.splitter.opened and self.splitter.field is None else 0)


if __name__ == "__main__":
    for shown_prompt in ("assistant\n<think>\n", "assistant\n", "assistant\n<think>\n\n</think>\n\n"):
        where = begins(STYLES["qwen3"], shown_prompt)
        print(f"{shown_prompt!r}: {where}")
        if where != CLOSED:
            splitter = Splitter(STYLES["qwen3"], where == OPENED)
            for piece in ("<thi", "nk>Two and two <", "3.</thi", "nk>It is 4.", "</think>"):
                print(f"    {piece!r:18} {splitter.feed(piece)}")
