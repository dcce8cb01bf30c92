"""Config: every flag of the engine and of the server, in one place that costs no torch.

A flag is a field of a frozen dataclass. Three things are made of it, so that they cannot differ:

      port: int = flag(30000, "port to listen on", within=Range(0, 65535, integer=True))
           |
           +--> a keyword of LLM(...), or of the dataclass       __post_init__ refuses a wrong value: "port is -1, expected ..."
           +--> a flag of the command line                       --port, refused while it is parsed: "argument --port: expected ..."
           +--> a line of --help                                 the text, and the default

  EngineConfig   what the engine does: keywords of `LLM`, dashes for underscores on the command line
  ServerConfig   what the HTTP side does
  parse          the command line of the server -> one of each

Why here and not beside the engine: the server's parent process imports no torch, and a flag that is wrong must be refused before
anything heavy is loaded, by a sentence that names the flag.

Invariant: a config that exists holds values of the right type, within their ranges. What only the machine or the model can tell
(is there a GPU, does the pool fit) is the engine's to refuse. A default of None means that the engine chooses; what it chose is in
`stats` and in /get_server_info.

Cost: microseconds. Stops holding: the names of attention backends are written down here once more for the command
line, because their module needs torch; a test compares. `LLM` takes whatever is registered.
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from .eviction import EVICTION
from .policies import POLICIES
from .protocol import Range
from .radix import MAX_PAGE_SIZE
from .reasoning import STYLES
from .tools import FORMATS

ATTENTION_BACKENDS = ("torch", "cpp", "triton")  # attention.ATTENTION
SPECULATION = ("ngram", "radix", "ngram+radix")  # of spec.DRAFTERS; LLM takes whatever is registered, and joins it by +
DEVICE = r"auto|cpu|cuda(:\d+)?"
TOKENS = Range(1, 2**31, integer=True, optional=True)
ROOM = TOKENS._replace(low=2)  # for a prompt of one token and what it samples
SECONDS = Range(0, 10**9, open_low=True, optional=True)


def flag(default, text: str, choices: Sequence[str] | None = None, within: Range | None = None):
    """A field of a config: its default, its line in `--help`, the values it may take. `choices` bind the command line only: the
    engine looks into its registries."""
    return field(default=default, metadata={"help": text, "choices": choices, "within": within})


@dataclass(frozen=True)
class EngineConfig:
    """Every flag of the engine: keywords of `LLM`, command-line flags of the server (dashes for underscores)."""
    model: str = flag("demo", "demo, a local directory, a Hugging Face id or a .gguf file")
    dtype: str = flag("auto", "auto is the checkpoint's", ("auto", "float32", "bfloat16", "float16"))
    quantization: str | None = flag(None, "int8 keeps matrices in 8 bits, made as they are loaded; none by default", ("int8",))
    load_format: str = flag("auto", "dummy draws random weights and needs no more than config.json and a tokenizer: to measure speed, not to read",
                            ("auto", "dummy"))
    device: str = flag("auto", "auto is cuda where there is one, else cpu")
    context_length: int | None = flag(None, "tokens of prompt and output together; the model's by default", within=ROOM)
    max_running_requests: int | None = flag(None, "rows of a batch; 64 on CPU, 256 on GPU by default", within=TOKENS._replace(high=2**16))
    max_total_tokens: int | None = flag(None, "KV slots; by default what memory allows (CPU: at most 65536)", within=ROOM)
    mem_fraction_static: float = flag(0.88, "share of GPU memory for weights and KV", within=Range(0, 1, open_low=True))
    chunked_prefill_size: int | None = flag(None, "tokens a step; 2048 on CPU, 8192 on GPU by default; less makes streams smoother",
                                            within=TOKENS)
    page_size: int = flag(1, "KV slots a page, 1 to 64", within=Range(1, MAX_PAGE_SIZE, integer=True))
    schedule_policy: str | None = flag(None, "order of the waiting requests; lpm by default, without a cache fcfs", tuple(POLICIES))
    priority_scheduling_preemption_threshold: int = flag(10, "under the policy priority, a request that waits takes the place of one that runs "
                                                         "where its priority is higher by more than this", within=Range(0, 2**31, integer=True))
    radix_eviction_policy: str = flag("lru", "which cached prefix goes first", tuple(EVICTION))
    disable_radix_cache: bool = flag(False, "keep no KV of finished requests and share none")
    attention_backend: str | None = flag(None, "by default triton on GPU, on CPU cpp where a compiler is found, else torch", ATTENTION_BACKENDS)
    random_seed: int | None = flag(None, "base of the seeds of requests that name none; random by default",
                                   within=Range(0, 2**63 - 1, integer=True, optional=True))
    threads: int | None = flag(None, "CPU threads; as many as cores by default", within=TOKENS._replace(high=2**10))
    disable_overlap_schedule: bool | None = flag(None, "plan a step when the last one has been processed, not while it runs; by default so on a CPU")
    disable_cuda_graph: bool = flag(False, "launch each kernel of small steps by itself; on a GPU they are recorded, and launched as one")
    waiting_timeout: float | None = flag(None, "seconds after which a request that has not been started is refused; never by default",
                                         within=SECONDS)
    running_timeout: float | None = flag(None, "seconds after its start in which a request must end, or is ended; none by default",
                                         within=SECONDS)
    speculative_algorithm: str | None = flag(None, "who guesses how a text goes on, so that a step makes several tokens; nobody by default",
                                             SPECULATION)
    speculative_num_draft_tokens: int = flag(8, "guesses a request drafts in a step at most", within=Range(1, 63, integer=True))
    speculative_eagle_topk: int | None = flag(None, "guesses at one place at most; 1 drafts chains; by default 4, for rejection 1",
                                              within=Range(1, 16, integer=True, optional=True))
    speculative_draft_length: str = flag("adaptive", "adaptive drafts as many guesses as pay off on this machine, down to none; fixed all there are",
                                         ("adaptive", "fixed"))
    speculative_acceptance: str = flag("target", "target samples at each guess, and keeps the text that there would be without guesses; rejection "
                                                 "keeps its distribution", ("target", "rejection"))
    speculative_ngram_max_match_window_size: int = flag(8, "last tokens that ngram looks for at most", within=Range(1, 64, integer=True))
    speculative_ngram_min_match_window_size: int = flag(2, "last tokens that it must find again", within=Range(1, 64, integer=True))
    constrained_json_whitespace: str = flag("fixed", 'blanks between the tokens of JSON: fixed is ", " and ": ", compact none, flexible up to 16',
                                            ("fixed", "compact", "flexible"))
    grammar_cache_size: int = flag(128, "compiled grammars that are kept for requests to come; 0 keeps none", within=Range(0, 10**6, integer=True))
    grammar_compile_timeout: float = flag(30.0, "seconds after which a request whose grammar is not ready is refused",
                                          within=Range(0, 10**6, open_low=True))
    jump_forward: str = flag("draft", "text that a grammar forces: draft guesses it, so that a step makes all of it; retokenize appends it and makes "
                                      "other texts; off samples it token by token", ("draft", "retokenize", "off"))
    kv_events: bool = flag(False, "record which blocks of KV are stored and removed, for readers in this process")
    kv_events_endpoint: str | None = flag(None, "ZeroMQ address to publish them at, such as tcp://127.0.0.1:5557; none by default")
    kv_events_replay_endpoint: str | None = flag(None, "address where subscribers get what they missed, as far as it is kept; none by default")
    kv_events_topic: str = flag("", "topic of what is published; empty by default")

    def __post_init__(self):
        check(self)
        for name in ("dtype", "quantization", "load_format", "speculative_draft_length", "speculative_acceptance", "constrained_json_whitespace",
                     "jump_forward"):
            value, choices = getattr(self, name), type(self).__dataclass_fields__[name].metadata["choices"]
            if value is not None and value not in choices:
                raise ValueError(f"{name} is {value!r}, expected {'one of ' * (len(choices) > 1)}{', '.join(choices)}")
        if not re.fullmatch(DEVICE, self.device):
            raise ValueError(f"device is {self.device!r}, expected auto, cpu, cuda or cuda:N")
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ValueError(f"a chunked_prefill_size of {self.chunked_prefill_size} tokens is smaller than a page of {self.page_size}")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            if (value := getattr(self, name)) is not None and not re.match(r"(tcp|ipc)://.", value):
                raise ValueError(f"{name} is {value!r}, expected an address such as tcp://127.0.0.1:5557 or ipc:///path/to/a/socket")
        if self.kv_events_endpoint is None and (self.kv_events_replay_endpoint or self.kv_events_topic):
            raise ValueError("kv_events_replay_endpoint and kv_events_topic are for events that are published: give kv_events_endpoint as well")
        if self.disable_radix_cache and self.schedule_policy in POLICIES and POLICIES[self.schedule_policy].needs_tree:
            raise ValueError(f"schedule_policy {self.schedule_policy!r} orders by the radix cache, which is disabled; use fcfs")
        if self.disable_radix_cache and self.radix_eviction_policy != "lru":
            raise ValueError(f"radix_eviction_policy is {self.radix_eviction_policy!r}, but the radix cache is disabled: leave one of them out")
        if self.priority_scheduling_preemption_threshold != 10 and self.schedule_policy != "priority":
            raise ValueError("priority_scheduling_preemption_threshold is for schedule_policy priority: give that as well")
        self._check_speculation()
        if self.disable_radix_cache and (self.kv_events or self.kv_events_endpoint):
            raise ValueError("kv_events tell what the radix cache holds, which is disabled: leave one of them out")

    def _check_speculation(self):
        names = (self.speculative_algorithm or "").split("+")
        given = [f.name for f in fields(self) if f.name.startswith("speculative_") and getattr(self, f.name) != f.default]
        if self.speculative_algorithm is None and given:
            raise ValueError(f"{given[0]} is for speculation: give speculative_algorithm as well")
        if "ngram" not in names and (of_ngram := [name for name in given if "ngram" in name and name != "speculative_algorithm"]):
            raise ValueError(f"{of_ngram[0]} is for ngram, but speculative_algorithm is {self.speculative_algorithm!r}: leave it out")
        if self.speculative_ngram_min_match_window_size > self.speculative_ngram_max_match_window_size:
            raise ValueError(f"speculative_ngram_min_match_window_size is {self.speculative_ngram_min_match_window_size}, "
                             f"more than speculative_ngram_max_match_window_size, which is {self.speculative_ngram_max_match_window_size}")
        if "radix" in names and self.disable_radix_cache:
            raise ValueError("speculative_algorithm radix takes its guesses from the radix cache, which is disabled: leave one of them out")
        if self.speculative_acceptance == "rejection" and "radix" in names:
            raise ValueError("speculative_acceptance rejection is wrong for guesses of radix: a request that is asked again with its seed would be "
                             "judged with the noise that has made them; take target")
        if self.speculative_acceptance == "rejection" and ((self.speculative_eagle_topk or 1) > 1 or len(names) > 1):
            raise ValueError("speculative_acceptance rejection is for one chain of guesses, not for a tree: leave speculative_eagle_topk and + out, "
                             "or take target")


@dataclass(frozen=True)
class ServerConfig:
    """Flags of the HTTP side."""
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = flag(30000, "port to listen on; 0 takes a free one", within=Range(0, 65535, integer=True))
    served_model_name: str | None = flag(None, "the name clients use; what --model says by default")
    chat_template: str | None = flag(None, "a file with the chat template to use, not the model's")
    reasoning_parser: str | None = flag(None, "how the model thinks before it answers, so that chats tell it apart; by default they do not",
                                        tuple(STYLES))
    tool_call_parser: str | None = flag(None, "how the model writes calls of tools; by default as its chat template shows", tuple(FORMATS))
    max_queued_requests: int | None = flag(None, "requests that may wait; more are answered 503 at once; no limit by default",
                                           within=TOKENS)
    drain_timeout: float = flag(20.0, "seconds that open calls get to finish in after SIGTERM or Ctrl-C", within=Range(0, 10**6))
    log_level: str = flag("info", "what to print", ("debug", "info", "warning", "error"))

    def __post_init__(self):
        check(self)
        for name, known in (("reasoning_parser", STYLES), ("tool_call_parser", FORMATS)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")


def check(config) -> None:
    """ValueError unless every field has its type and lies within its range."""
    hints = typing.get_type_hints(type(config))
    for f in fields(config):
        value, within = getattr(config, f.name), f.metadata["within"]
        if not (within.holds(value) if within else isinstance(value, hints[f.name])):
            raise ValueError(f"{f.name} is {value!r}, expected {within or kind_of(hints[f.name]).__name__}")


def kind_of(hint) -> type:
    """int of `int | None`."""
    return next((k for k in typing.get_args(hint) if k is not types.NoneType), hint)


# ------------------------------------------------------------------------------------------------------------------- command line

class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one sentence, and takes no abbreviations."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of a config."""
    hints = typing.get_type_hints(config)
    group = parser.add_argument_group(config.__name__)
    for f in fields(config):
        name, text, choices = "--" + f.name.replace("_", "-"), f.metadata["help"].replace("%", "%%"), f.metadata["choices"]
        kind = kind_of(hints[f.name])
        if kind is bool:
            group.add_argument(name, action="store_true", default=f.default, help=text)
        else:
            text += "" if f.default is None else f" ({f.default})"
            group.add_argument(name, type=_reader(kind, f.metadata["within"]), choices=choices, default=f.default, help=text,
                               metavar=None if choices else kind.__name__.upper())


def _reader(kind: type, within: Range | None) -> Callable[[str], object]:
    """What argparse makes a value of a text with."""
    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = text
        if within and not within.holds(value) or not isinstance(value, kind):
            raise argparse.ArgumentTypeError(f"expected {within or kind.__name__}, got {text!r}")
        return value
    return read


def pick(config: type, args: argparse.Namespace):
    """The config that `add_flags` made flags of, out of what was parsed."""
    return config(**{f.name: getattr(args, f.name) for f in fields(config)})


def parse(argv: Sequence[str], *configs: type, **options) -> list:
    """A command line -> one config of each kind given. SystemExit, after one sentence, where it is wrong. options: of argparse."""
    parser = Parser(**options)
    for config in configs:
        add_flags(parser, config)
    args = parser.parse_args(argv)
    try:
        return [pick(config, args) for config in configs]
    except ValueError as error:
        parser.error(str(error))


def _demo() -> None:
    engine, server = parse(["--page-size", "16", "--port", "0"], EngineConfig, ServerConfig)
    print(f"{engine}\n{server}")
    for wrong in (["--page-size", "0"], ["--schedule-policy", "best"], ["--chunked-prefill-size", "8", "--page-size", "16"], ["--por", "1"]):
        try:
            parse(wrong, EngineConfig, ServerConfig, prog=" ".join(wrong))
        except SystemExit as error:
            print(f"  (exit code {error.code})")


if __name__ == "__main__":
    _demo()
