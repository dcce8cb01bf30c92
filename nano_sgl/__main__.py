"""A chat in the terminal: the engine with the smallest possible user in front of it.

    python -m nano_sgl [--model demo] [any engine flag]

      > What is the capital of France?
      The capital of France is Paris.
      [8 tokens, 24.1 tok/s, the first after 0.4 s | prompt 37 tokens, 0 of them cached]
      > And of Italy?
      ...
      [9 tokens, 23.8 tok/s, the first after 0.1 s | prompt 60 tokens, 44 of them cached]

The whole conversation is sent again at every turn: there is no session. What makes this cheap is the radix tree, which still holds the
KV of all that was said before; the last number shows it, and /tree draws it.

  turn      the user's message joins the conversation, the answer is streamed, and joins it too. A turn that fails leaves no trace.
  Ctrl-C    during an answer: stops it, and what was said so far stays said. Stopped before its first word, the question is taken back.
            At the prompt: clears the line; twice in a row: leaves. While the model loads, and in a pipe: ends the program.
  command   a line that begins with a slash. COMMANDS maps its name to a method of `Chat`, whose docstring is what /help prints.
  pipe      every line of stdin is a turn; answers go to stdout, everything else to stderr. The exit code is 1 where a turn failed.

Invariant: stdout carries what the model said and nothing else. After a turn the engine is idle, so that the tree may be looked at from
this thread.

Cost: the conversation is rendered and encoded again at every turn, a millisecond for a thousand tokens. Where it stops holding: an answer
goes back as text, and a text may be cut into other tokens than the ones that were sampled; from there on it is computed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import nano_sgl  # torch comes with the first use of nano_sgl.LLM: flags are read, and --help is answered, without it

from .config import EngineConfig, parse
from .protocol import ALIASES, RequestError, SamplingParams
from .radix import draw

NOT_HERE = ("n", "logprobs", "prompt_logprobs", "logprob_start_len")  # sampling parameters whose results a chat could not show
DEFAULTS = {"max_tokens": None, "temperature": 0.7}  # up to the context; where the model's makers recommend nothing, a little cooler than 1
SIGPIPE_CODE = 128 + 13
SETTLE_S = 5.0         # a long prompt's chunk that has begun is finished first


def note(text: str) -> None:
    """A line of ours, for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C raises KeyboardInterrupt in here, further ones do nothing: impatience must not end the chat."""
    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation with an LLM. `interactive`: a person types, and Ctrl-C is theirs. `failed`: a turn or command was refused."""

    def __init__(self, llm: Any, interactive: bool):
        self.llm, self.interactive, self.failed = llm, interactive, False
        self.messages: list[dict] = []
        self.given: dict[str, Any] = {**DEFAULTS, **llm.engine.generation_defaults}

    def loop(self) -> None:
        """Turns and commands until the end of input, /quit, or two Ctrl-C in a row, the second with nothing typed."""
        interrupted = False
        while True:
            try:
                line = self._read().removesuffix("\r")
                interrupted = False
                if line.startswith("/"):
                    if not self.command(line):
                        return
                elif line.strip():
                    self.turn(line)
            except EOFError:
                return note("") if self.interactive else None
            except KeyboardInterrupt:
                editor = sys.modules.get("readline")
                if not self.interactive or interrupted and not (editor and editor.get_line_buffer()):
                    raise
                interrupted = True
                note("\n(Ctrl-C again, Ctrl-D or /quit leaves)")

    def _read(self) -> str:
        """The next line. The prompt is for people, and goes to stderr where stdout is not theirs."""
        if self.interactive and not sys.stdout.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        return input("> " if self.interactive and sys.stdout.isatty() else "")

    def refuse(self, reason: str) -> None:
        """Say why something was not done."""
        self.failed = True
        note(reason)

    # -- a turn ----------------------------------------------------------------------------------------------------------------------

    def turn(self, said: str) -> None:
        """One question and its answer. Whatever ends it early, both stay in the conversation, or neither."""
        asked = [*self.messages, {"role": "user", "content": said}]
        answer, last, ids, start, first, stopped = "", None, 0, time.monotonic(), None, False
        try:
            with interruptible() if self.interactive else contextlib.nullcontext():
                pieces = self.llm.stream(asked, SamplingParams.from_dict(self.given))
                try:
                    for last in pieces:
                        first = first or time.monotonic()
                        answer, ids = answer + last.text, ids + len(last.output_ids)
                        print(last.text, end="", flush=True)
                except KeyboardInterrupt:
                    stopped = True
                finally:
                    pieces.close()
                    self._settle()
        except RequestError as error:
            return self.refuse(f"{error}; /reset begins a new conversation" if self.messages else str(error))
        if answer and not answer.endswith("\n"):
            print(flush=True)
        if stopped and not self.interactive:
            raise KeyboardInterrupt
        if last is not None and last.finish_reason == "error":
            return self.refuse(last.error)
        if stopped and not answer:
            return note("[stopped before the first word; the question is taken back]")
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        note(self._account(last, ids, start, first, stopped))

    def _settle(self) -> None:
        """Wait for the engine to clear away an answer that was stopped, or the step in flight when one ended."""
        end = time.monotonic() + SETTLE_S
        while self.llm.engine.has_work and time.monotonic() < end:
            time.sleep(0.005)

    def _account(self, last: Any, ids: int, start: float, first: float, stopped: bool) -> str:
        """The line under an answer. The rate is that of the tokens after the first: the first one waits for the prompt. The accept length is how many
        of these a step made, where they were guessed at (docs/speculation.md)."""
        seconds = time.monotonic() - first
        rate = f"{(ids - 1) / seconds:.1f} tok/s, " if ids > 1 and seconds > 0 else ""
        full = "" if last.finish_reason != "length" else ", cut off by max_tokens" if ids == self.given.get("max_tokens", 128) \
            else ", the context is full: /reset begins a new conversation"
        length = f", accept length {last.speculation['spec_accept_length']:.2f}" if last.speculation else ""
        return (f"[{'stopped after ' if stopped else ''}{ids} token{'s' * (ids != 1)}, {rate}the first after {first - start:.1f} s{length}{full} | "
                f"prompt {len(last.prompt_ids)} tokens, {last.cached_tokens} of them cached]")

    # -- commands --------------------------------------------------------------------------------------------------------------------

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash. False where it ends the chat."""
        name, _, rest = line[1:].strip().partition(" ")
        if name == "quit":
            return False
        if name in COMMANDS:
            COMMANDS[name](self, rest.strip())
        else:
            self.refuse(f"there is no /{name}; /help lists the commands (a line that begins with a blank is never one)")
        return True

    def help(self, rest: str) -> None:
        """this list"""
        for name, verb in COMMANDS.items():
            note(f"  /{name:8} {verb.__doc__}")
        note("  /quit     leave, as Ctrl-D does; Ctrl-C stops an answer, or clears the line")

    def reset(self, rest: str) -> None:
        """begin a new conversation; the tree keeps the KV of the old one until the memory is needed"""
        self.messages = []
        note("a new conversation")

    def tree(self, rest: str) -> None:
        """draw the radix tree: a line for each run of tokens whose KV is in memory"""
        show = lambda ids: repr(self.llm.tokenizer.decode(ids))[1:-1]
        note(draw(self.llm.engine.scheduler.tree, show, width=max(shutil.get_terminal_size().columns - 40, 20)))

    def params(self, rest: str) -> None:
        """show the sampling parameters, or set some: /params temperature=0 max_tokens=50 stop=["\\n"]; `seed=` is back to default"""
        head, *pairs = re.split(r"(?:^|\s+)(\w+)=", rest)
        if head:
            return self.refuse(f"expected name=value, got {head!r}; for example /params temperature=0 max_tokens=50")
        given = dict(self.given)
        for name, value in zip(pairs[::2], pairs[1::2]):
            if (name := ALIASES.get(name, name)) in NOT_HERE:
                return self.refuse(f"{name} is not for a chat, which shows one answer as text; LLM.generate takes it")
            given.pop(name, None)
            if value.strip():
                given[name] = _value(value.strip())
        try:
            params = SamplingParams.from_dict(given)
            params.verify(self.llm.engine.vocab_size, self.llm.engine.context_len)
        except RequestError as error:
            return self.refuse(str(error))
        self.given = given
        shown = {"temperature": params.temperature, "max_tokens": params.max_tokens, **given}
        note("  ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in shown.items()))


COMMANDS: dict[str, Callable[[Chat, str], None]] = {"help": Chat.help, "params": Chat.params, "reset": Chat.reset, "tree": Chat.tree}


def _value(text: str) -> Any:
    """What a person means by a value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(argv: list[str] | None) -> int:
    """Load the model and chat. Returns the exit code."""
    [config] = parse(sys.argv[1:] if argv is None else argv, EngineConfig, prog="python -m nano_sgl", description="A chat in the terminal.")
    interactive = sys.stdin.isatty()
    note(f"loading {config.model}")
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            llm = stack.enter_context(nano_sgl.LLM(**asdict(config)))
            llm.chat_ids([{"role": "user", "content": "hi"}])  # a model that cannot chat says so now
        except Exception as error:
            if not isinstance(error, (ValueError, OSError)) and not type(error).__module__.startswith("nano_sgl"):
                raise
            note(f"cannot start: {error}")
            return 1
        note(f"ready after {time.monotonic() - start:.1f} s, context {llm.engine.context_len} tokens{'; /help lists the commands' * interactive}")
        chat = Chat(llm, interactive)
        if interactive and sys.stdout.isatty():  # elsewhere the import may write control sequences
            with contextlib.suppress(ImportError):
                import readline
                readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted together are one message
        chat.loop()
    return int(chat.failed and not interactive)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # neither a strange byte nor a strange terminal ends a conversation
    try:
        return run(argv)
    except KeyboardInterrupt:
        note("")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read the answers has left; Python would flush once more at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return SIGPIPE_CODE


if __name__ == "__main__":
    sys.exit(main())
