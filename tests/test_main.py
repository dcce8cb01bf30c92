"""The chat in the terminal: with the demo model behind a pseudo-terminal as a person would use it; in pipes, and in process, with a tiny model."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import engines
from nano_sgl import LLM, SamplingParams
from nano_sgl.__main__ import COMMANDS, Chat, run

ROOT = Path(__file__).parent.parent
PROMPT = r"> $"


# ------------------------------------------------------------------------------------------------------------------- at a terminal

class Terminal:
    """A program behind a pseudo-terminal. `log` is the output that arrived, with the time of each piece."""

    def __init__(self, *flags: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell started the tests in the background; exec keeps that
            os.chdir(ROOT)
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [sys.executable, "-m", "nano_sgl", *flags])
        self.log: list[tuple[float, str]] = []

    def read(self, until: str, seconds: float = 60) -> str:
        """Output from now to the first match of a pattern."""
        self.log, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.log.append((time.monotonic(), os.read(self.fd, 65536).decode(errors="replace")))
                except OSError:  # the program has ended
                    self.log.append((time.monotonic(), "(end)"))
                if re.search(until, self.text):
                    return self.text
                if self.text.endswith("(end)"):
                    break
        raise AssertionError(f"no {until!r} in {self.text!r}")

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.log).replace("\r", "")

    def type(self, text: str) -> None:
        for start in range(0, len(text), 512):
            os.write(self.fd, text[start:start + 512].encode())
            if len(text) > 512:
                time.sleep(0.02)
                while select.select([self.fd], [], [], 0)[0]:
                    os.read(self.fd, 65536)  # the echo of a long line must not fill the terminal

    def say(self, line: str, until: str = PROMPT) -> str:
        self.type(line + "\r")
        return self.read(until)

    def wait(self, seconds: float = 20) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it does not end")


def test_a_conversation_at_a_terminal(demo_path):
    t = Terminal("--max-total-tokens", "8192", "--dtype", "float32")  # in bfloat16 the first words are as good as a tie
    assert "ready after" in t.read(PROMPT, 120)

    assert "temperature=0  max_tokens=40" in t.say("/params temperature=0 max_tokens=40")
    first = t.say("What is the capital of France?")
    assert "The capital of France is Paris." in first and re.search(r"prompt 37 tokens, 0 of them cached\]", first)
    assert len(t.log) >= 6 and t.log[-1][0] - t.log[1][0] > 0.02, "the words come one by one"
    second = t.say("And of Italy?")
    assert "Rome" in second
    prompt, cached = map(int, re.search(r"prompt (\d+) tokens, (\d+) of them cached", second).groups())
    assert cached >= 37 + 7 and prompt > cached

    tree = t.say("/tree")
    assert "`-- The capital of France is Paris." in tree and "Italy" in tree and "\\n<|im_start|>user\\n" in tree

    t.say("/params ignore_eos=true max_tokens=null")
    t.type("Tell me a long story.\r")
    t.read(r"\w+ \w+ \w+ \w+ .*\n?.* \w+ \w+ ")
    t.type("\x03")
    stopped = t.read(PROMPT, 5)
    assert re.search(r"\[stopped after \d+ tokens, .*prompt \d+ tokens, \d+ of them cached\]", stopped)
    t.say("/params ignore_eos= max_tokens=4")
    after = t.say("Go on.")
    prompt, cached = map(int, re.search(r"prompt (\d+) tokens, (\d+) of them cached", after).groups())
    assert cached > 60 and "cut off by max_tokens" in after, "what was said before Ctrl-C is part of the conversation"

    t.type("word " * 2000 + "\r")
    time.sleep(0.6)
    t.type("\x03\x03")  # impatience changes nothing
    assert "taken back" in t.read(PROMPT, 20)
    again = t.say("Go on.")
    assert int(re.search(r"prompt (\d+) tokens", again)[1]) < 500

    for half in ("half a line", "another half"):  # something to clear: the second Ctrl-C is not one that leaves
        t.type(half)
        t.read(half)     # the terminal throws away with a Ctrl-C what was not read before it
        time.sleep(0.3)
        t.type("\x03")
        try:
            t.read(r"leaves\)\n.*> $", 20)
        except AssertionError:  # Python's readline sleeps over one that comes while it is about to wait for the next key: a second wakes it
            t.type("\x03")
            t.read(r"leaves\)\n.*> $")
    assert "max_tokens=4" in t.say("/params max_tokens=4"), "the half line is gone"
    t.say("/reset")
    t.type("\x1b[200~two lines\nthat are pasted\x1b[201~")
    t.read("pasted")
    t.say("")
    assert "two lines\\nthat are pasted" in t.say("/tree")
    t.type("\x04")
    assert "Traceback" not in t.read(r"\(end\)")
    assert t.wait() == 0


# ------------------------------------------------------------------------------------------------------------------------ in a pipe

@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


def piped(path, text: bytes) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nano_sgl", "--model", str(path)], input=text, capture_output=True, cwd=ROOT, timeout=120)


def test_a_pipe_gets_the_answers_alone(tiny_path):
    done = piped(tiny_path, "/params temperature=0 max_tokens=9 ignore_eos=true\r\nhi\n\nand \U0001f600\n".encode())
    answers, said = done.stdout.decode(), done.stderr.decode()
    with LLM(str(tiny_path)) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        messages = [{"role": "user", "content": "hi"}]
        messages += [{"role": "assistant", "content": llm.chat(messages, params).text}, {"role": "user", "content": "and \U0001f600"}]
        expected = [messages[1]["content"], llm.chat(messages, params).text]
    assert answers == "".join(text if text.endswith("\n") else text + "\n" for text in expected)
    assert done.returncode == 0 and said.count("cached]") == 2 and "> " not in said and "Traceback" not in said


def test_what_a_pipe_cannot_have_gets_a_sentence_and_an_exit_code(tiny_path):
    done = piped(tiny_path, b"/params max_tokens=2\n\xff\xfe hi\n/what\n" + b"word " * 200 + b"\nhi\n")
    said = done.stderr.decode()
    assert done.returncode == 1 and "there is no /what; /help" in said and "Traceback" not in said
    assert re.search(r"the prompt has \d+ tokens, but the context length is 512.*; /reset begins a new conversation", said)
    assert said.count("cached]") == 2, "the chat went on after the refusal"


def test_a_reader_that_leaves_ends_the_chat_without_a_traceback(tiny_path):
    command = f"yes | {sys.executable} -m nano_sgl --model {tiny_path} | head -c 1 >/dev/null; echo codes ${{PIPESTATUS[@]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "codes 141 141 0" in done.stdout and "Traceback" not in done.stderr and "Exception" not in done.stderr, done


def test_a_model_or_flag_that_is_wrong_gets_a_sentence(tmp_path, capsys):
    assert run(["--model", str(tmp_path)]) == 1
    assert "cannot start: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["--page-size", "65"])
    assert "page-size" in capsys.readouterr().err


def test_two_ctrl_c_in_a_row_leave_and_one_does_not(llm, monkeypatch, capsys):
    """What `main` makes of the second is exit code 130."""
    keys = iter([KeyboardInterrupt, "/params", KeyboardInterrupt, KeyboardInterrupt])

    def read(prompt):
        if (key := next(keys)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return key
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(KeyboardInterrupt):
        Chat(llm, interactive=True).loop()
    assert capsys.readouterr().err.count("leaves") == 2 and next(keys, None) is None


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from nano_sgl.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and "--page-size" in done.stdout and "--port" not in done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------------------- in process

@pytest.fixture(scope="module")
def llm(tiny_path):
    with LLM(str(tiny_path)) as made:
        yield made


@pytest.fixture
def chat(llm, capsys):
    made = Chat(llm, interactive=False)
    made.command("/params temperature=0 max_tokens=5 ignore_eos=true")
    capsys.readouterr()
    return made


def test_params_are_shown_set_taken_back_and_refused(chat, capsys):
    def told(line):
        assert chat.command(line)
        return capsys.readouterr().err.strip()
    assert told("/params") == "temperature=0  max_tokens=5  ignore_eos=true"
    assert told('/params stop=["a b","\\n"] max_new_tokens=7 sampling_seed=1') == (
        'temperature=0  max_tokens=7  ignore_eos=true  stop=["a b", "\\n"]  seed=1')
    assert told("/params stop=the end seed= ignore_eos=") == 'temperature=0  max_tokens=7  stop="the end"'
    assert not chat.failed
    before = dict(chat.given)
    for line, words in (("temperature=hot", "temperature: expected float"), ("temperature=-1", "temperature must be"), ("x=1", "unknown field 'x'"),
                        ("temperature", "expected name=value"), ("n=2", "one answer"), ("logprobs=1", "one answer"), ("structural_tag=[1]", "an object"),
                        ("json_strict=true", "no json_schema"),
                        ("seed=1 min_tokens=9", "at most max_tokens")):
        assert words in told(f"/params {line}") and chat.given == before and chat.failed, line
    assert told("/params max_tokens= temperature=") == 'temperature=1.0  max_tokens=128  stop="the end"'


def test_help_names_every_command(chat, capsys):
    assert chat.command("/help") and not chat.command("/quit")
    text = capsys.readouterr().err
    assert all(f"/{name} " in text for name in [*COMMANDS, "quit"])


def test_reset_forgets_the_conversation_and_not_the_cache(chat, capsys):
    chat.turn("hi")
    chat.turn("more")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    chat.command("/reset")
    capsys.readouterr()
    chat.turn("hi")
    assert len(chat.messages) == 2 and not re.search(r" 0 of them cached", capsys.readouterr().err)
    chat.command("/tree")
    assert "`-- " in capsys.readouterr().err


def test_the_account_has_an_accept_length_where_there_are_guesses(chat, tiny_path, capsys):
    chat.turn("hi")
    assert "accept length" not in capsys.readouterr().err
    with LLM(str(tiny_path), max_total_tokens=1024, speculative_algorithm="ngram") as llm:
        guessing = Chat(llm, interactive=False)
        guessing.command(f"/params temperature=0 max_tokens=40 ignore_eos=true logit_bias={{\"{llm.tokenizer.encode(' the')[0]}\":100}}")
        guessing.turn("the the the the the the")
    said = capsys.readouterr().err
    assert float(re.search(r"the first after [\d.]+ s, accept length (\d\.\d\d), cut off", said)[1]) > 1.5, said


def test_a_full_context_says_so_and_reset_is_the_way_out(chat, llm, capsys):
    chat.command("/params max_tokens=null")
    chat.turn("hi")
    said = capsys.readouterr().err
    assert "the context is full: /reset" in said and f"[{512 - len(llm.chat_ids([{'role': 'user', 'content': 'hi'}]))} tokens" in said
    messages = list(chat.messages)
    chat.turn("more")
    said = capsys.readouterr().err
    assert "/reset begins a new conversation" in said and "Traceback" not in said and chat.messages == messages
    chat.command("/reset")
    chat.command("/params max_tokens=3")
    chat.turn("hi")
    assert len(chat.messages) == 2


def test_a_turn_that_fails_in_the_engine_leaves_no_trace(chat, llm, monkeypatch, capsys):
    chat.turn("hi")
    messages = list(chat.messages)
    logits = llm.engine.model.logits
    monkeypatch.setattr(llm.engine.model, "logits", lambda hidden: torch.full_like(logits(hidden), float("nan")))
    chat.turn("more")
    assert "not finite" in capsys.readouterr().err and chat.messages == messages and chat.failed
    monkeypatch.undo()
    chat.turn("more")
    assert len(chat.messages) == 4
