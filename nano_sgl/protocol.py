"""Protocol: what a user may ask for, and what the processes say to each other.

A request crosses three borders: JSON from a client, a msgpack frame between the HTTP process and the engine process, and a Python
constructor in `LLM`. All three build the same structs, and all three are checked by the same method at the same place:

    JSON body ----from_dict----+
                               +--> SamplingParams --verify(vocab, context)--> Request ==msgpack==> engine
    SamplingParams(top_k=40) --+                                               Chunk   <==msgpack==

    spelled      max_new_tokens, min_new_tokens, sampling_seed are SGLang's names for max_tokens, min_tokens, seed. Both may be
                 given if they agree.
    checked      Types and ranges are checked in `verify`, not in the constructor, because a vocabulary size is needed and because
                 a constructor does not check types. A range check is written "low <= x <= high or refuse", so that NaN, which
                 fails every comparison, is refused. A bool is not a number.
    refused      What this build cannot honour is refused by name. Nothing is dropped: an unknown field is an error, with the
                 nearest known name. Every RequestError names the field, says what it got and what it expected.
    grammars     At most one of regex, ebnf, choice, json_schema, json_object and structural_tag constrains the output, from the beginning
                 or behind what the model thinks first (reasoning_end). Only its type and its size are checked here; a schema becomes its
                 JSON text, whatever it was given as. Compiling it can take seconds, so the engine does that beside its steps; a grammar
                 it refuses ends the request with a Chunk: finish_reason "error", status 400, `param` the field.
    seeds        Any Python int is a seed: it is folded to 64 bits, so -1 and 2**64 - 1 are the same seed. Sample i of n draws
                 from `derive_seed(seed, i)`, and sample 0 from the seed itself: n=1 and the first of n=4 are the same text.

Invariant: after `verify` returns, nothing downstream needs to look at a type or a range again, and every value fits the wire
(msgpack has no integer beyond 64 bits and no lone surrogate). Parameters are frozen; a changed copy is made by
`msgspec.structs.replace(params, n=1)`.
Cost: microseconds, except stop_regex, whose patterns are compiled once and cached, and a grammar: 5 ms a MiB.
Where it stops: a prompt's length against the KV pool is the scheduler's knowledge; a pattern that is legal but slow to match must
be bounded by a timeout where it is matched.
The names and ranges follow SGLang 0.5 (`SamplingParams`), vLLM (`choice`, `json_object`) and the OpenAI API reference (penalties,
logit_bias, 20 logprobs).
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from typing import Any, NamedTuple

import msgspec
import regex
from msgspec import UNSET, UnsetType

MAX_SAMPLES = 128            # n
MAX_STOPS = 32               # stop strings, and stop patterns
MAX_STOP_IDS = 4096
MAX_STOP_CHARS = 4096        # of one stop string: text that could begin it is held back and compared at every step
MAX_PATTERN_BYTES = 256      # of one stop pattern, in UTF-8
MAX_PATTERN_SIZE = 2**14     # bytes of all stop patterns together with counted repeats written out, which is how `regex` compiles
MAX_LOGPROBS = 20            # top entries a token
MAX_GRAMMAR_CHARS = 2**20    # of a grammar's text; of a choice, of all its strings
MAX_TAG_CHARS = 256          # of a tag that closes what a model thinks
MAX_CHOICES = 100_000        # strings of a choice
INT_MAX = 2**31 - 1          # lengths and token ids are int32 on the device
SEED_MASK = 2**64 - 1
GREEDY_TEMPERATURE = 1e-6    # below it, dividing the logits by the temperature says nothing that argmax does not

ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
GRAMMAR_FIELDS = ("regex", "ebnf", "choice", "json_schema", "json_object", "structural_tag")
JSON_TEXTS = {"json_schema": "a JSON schema: an object, true, false, or the text of one", "structural_tag": "an object, or the text of one"}
JSON_WHITESPACES = ("fixed", "compact", "flexible")     # how JSON may be laid out: schema.py
# Options, and the kinds of grammars that have them.
JSON_OPTIONS = {"json_whitespace": ("json_schema", "json_object", "structural_tag"), "json_strict": ("json_schema", "structural_tag"),
                "json_any_order": ("json_schema", "structural_tag")}
FLAGS = ("no_stop_trim", "ignore_eos", "skip_special_tokens", "json_object", "json_strict", "json_any_order")
ELSEWHERE = {                                       # what other servers, or other routes, have for a field of ours
    **{alias: f"it is called {name!r}" for alias, name in ALIASES.items()},
    "guided_regex": "it is called 'regex'", "guided_choice": "it is called 'choice'", "guided_grammar": "it is called 'ebnf'",
    "grammar": "it is called 'ebnf'", "guided_json": "it is called 'json_schema'",
    "guided_whitespace_pattern": "'json_whitespace' is one of fixed, compact and flexible",
    "structured_outputs": "its entries are fields: 'regex', 'choice', 'json_object', 'json_schema' for its json, and 'ebnf' for its grammar",
    "response_format": "'json_object': true asks for a JSON object, 'json_schema' for one like a schema, and 'structural_tag' is a field, too",
    "thinking_token_budget": "it is called 'thinking_budget'",
}


class Range(NamedTuple):
    """The numbers a field may hold; `open_low` leaves out the lower bound itself."""

    low: float
    high: float
    integer: bool = False
    open_low: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Is `value` a number (no bool, no NaN, no infinity) inside the range?"""
        if value is None:
            return self.optional
        if type(value) is not int and (self.integer or not isinstance(value, float)):
            return False
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        low, high = (self.low, self.high) if self.integer else (f"{self.low:g}", f"{self.high:.10g}")
        return f"{'null or ' if self.optional else ''}{kind} in {'(' if self.open_low else '['}{low}, {high}]"


RANGES = {
    "max_tokens": Range(0, INT_MAX, integer=True, optional=True),
    "min_tokens": Range(0, INT_MAX, integer=True),
    "temperature": Range(0, 1e6),          # beyond this every distribution is uniform in float32
    "top_p": Range(0, 1),                  # 0 is the narrowest: the most likely token
    "top_k": Range(-1, INT_MAX, integer=True),
    "min_p": Range(0, 1),
    "n": Range(1, MAX_SAMPLES, integer=True),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, open_low=True),
    "thinking_budget": Range(0, INT_MAX, integer=True, optional=True),
    "logprobs": Range(0, MAX_LOGPROBS, integer=True, optional=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, integer=True, optional=True),
    "logprob_start_len": Range(0, INT_MAX, integer=True),
    "priority": Range(-INT_MAX, INT_MAX, integer=True),
    "index": Range(0, MAX_SAMPLES - 1, integer=True),
    "children": Range(0, INT_MAX, integer=True),
}
BIAS_RANGE = Range(-100, 100)              # OpenAI's: at +-100 a token is practically forced or banned


class RequestError(ValueError):
    """A request that cannot be served: what was given, what was expected. `param` names the field, `status` the HTTP code."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


class Grammar(NamedTuple):
    """A grammar that a request asks for. kind: the name of the field; text: what it holds, a list for "choice", None for "json_object"; options: see
    schema.py."""

    kind: str
    text: str | list[str] | None
    options: dict[str, Any]


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True,
                     repr_omit_defaults=True):
    """How to turn logits into text. Every field is honoured, or refused by `verify`.

    With a grammar (regex, ebnf, choice, json_schema, json_object or structural_tag) each token continues a text that the grammar knows. The
    output ends when an end token is sampled, which it can be once the text is complete, under ignore_eos too: where nothing may follow,
    nothing else is left. Where min_tokens still forbids the end by then, the output ends there without an end token. Stop strings, ids and
    patterns, and max_tokens, may cut the text short of it. logit_bias and penalties come before the grammar's mask: they move what is allowed, and
    allow nothing more.
    """

    max_tokens: int | None | UnsetType = UNSET    # 128 when not given; None: as many as the context allows
    temperature: float = 1.0              # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = -1                       # -1 or 0: all
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False            # keep the matched stop in the text
    ignore_eos: bool = False              # no token ends the text; stop strings and patterns still do
    min_tokens: int | UnsetType = UNSET   # 0 when not given; until then end ids and stop ids cannot be sampled
    frequency_penalty: float = 0.0        # times the count in the output
    presence_penalty: float = 0.0         # for being in the output
    repetition_penalty: float = 1.0       # factor for being in the prompt or the output
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None           # None: none; 0: of the sampled token; k: and the top k
    prompt_logprobs: int | None = None    # the same for prompt tokens
    logprob_start_len: int = 0            # prompt_logprobs from this prompt position on
    skip_special_tokens: bool = True
    regex: str | None = None              # the whole output matches it; "" is none
    ebnf: str | None = None               # the output is what the grammar's rule `root` stands for; "" is none
    choice: list[str] | None = None       # the output is one of these
    json_object: bool = False             # the output is a JSON object
    json_schema: Any = None               # the output is a JSON value it allows: a dict, true or false, its text, or a pydantic model; "" is none
    json_whitespace: str | None = None    # how JSON is laid out: "fixed" (", " and ": "), "compact", "flexible"; None: as the server has it
    json_strict: bool | UnsetType = UNSET     # objects have the properties that the schema declares and no others, unless it says so itself;
                                          # when not given: for a pydantic model, which drops others, and for nothing else
    json_any_order: bool = False          # declared properties may come in any order
    structural_tag: Any = None            # the output is text with tags in it, and these hold JSON, ...: a dict, or its text; "" is none
    reasoning_end: str | None = None      # the closing tag of what the model thinks first, such as "</think>": the grammar begins behind it
    thinking_budget: int | None = None    # tokens that the model may think, before the closing tag is written for it
    max_new_tokens: int | None | UnsetType = UNSET    # aliases: read once, folded into the field they stand for
    min_new_tokens: int | UnsetType = UNSET
    sampling_seed: int | None | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Fold aliases and seeds. Runs after every construction: by call, from JSON, from msgpack, by replace."""
        write = msgspec.structs.force_setattr       # the struct is frozen from here on
        write(self, "seed", _fold(self.seed))
        write(self, "sampling_seed", _fold(self.sampling_seed))
        schema, is_model = _schema_text(self.json_schema)
        write(self, "json_schema", schema)
        write(self, "structural_tag", _schema_text(self.structural_tag)[0])
        if self.json_strict is UNSET:
            write(self, "json_strict", is_model)
        for alias, name in ALIASES.items():
            given, old = getattr(self, alias), getattr(self, name)
            if given is not UNSET:
                if old not in (UNSET, given) and not (name == "seed" and old is None):
                    raise RequestError(f"{name} and {alias} are two names for one thing; got {show(old)} and {show(given)}, "
                                       "give one of them", name)
                write(self, name, given)
                write(self, alias, UNSET)
        for name, default in (("max_tokens", 128), ("min_tokens", 0)):
            if getattr(self, name) is UNSET:
                write(self, name, default)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SamplingParams:
        """Parameters out of parsed JSON. Raises RequestError that names the field; ranges are left to `verify`."""
        return convert(fields, cls)

    def verify(self, vocab_size: int, context_len: int) -> None:
        """Raise RequestError unless every field has its type, lies in its range and is supported by this build."""
        for name in self.__struct_fields__:
            if name in RANGES:
                check_range(name, getattr(self, name))
        if self.seed is not None and type(self.seed) is not int:
            raise refusal("seed", self.seed, "null or an integer")
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                raise refusal(name, getattr(self, name), "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.min_tokens > context_len:
            raise refusal("min_tokens", self.min_tokens, f"at most the context length, which is {context_len}")
        if self.logprob_start_len > context_len:
            raise refusal("logprob_start_len", self.logprob_start_len, f"at most the context length, which is {context_len}")
        _verify_strings("stop", self.stop)
        _verify_strings("stop_regex", self.stop_regex)
        if sum(map(_pattern_size, _as_list(self.stop_regex))) > MAX_PATTERN_SIZE:
            raise refusal("stop_regex", self.stop_regex,
                          f"patterns that with their counted repeats written out have at most {MAX_PATTERN_SIZE} bytes")
        self.stop_patterns()
        _verify_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if len(self.stop_token_ids or ()) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids must have at most {MAX_STOP_IDS} entries; got {len(self.stop_token_ids)}", "stop_token_ids")
        _verify_bias(self.logit_bias, vocab_size)
        self._verify_grammar()

    def _verify_grammar(self) -> None:
        """At most one grammar, of a type and a size that can be compiled."""
        for name in ("regex", "ebnf", "json_schema", "structural_tag"):
            if (text := getattr(self, name)) is not None:
                if name in JSON_TEXTS and not isinstance(text, str):
                    raise refusal(name, text, JSON_TEXTS[name])
                if isinstance(text, str) and len(text) > MAX_GRAMMAR_CHARS:
                    raise refusal(name, text, f"a text of at most {MAX_GRAMMAR_CHARS} characters")
                _verify_text(name, text)
        if (choice := self.choice) is not None:
            if not isinstance(choice, (list, tuple)) or not choice or set(map(type, choice)) != {str}:
                raise refusal("choice", choice, "a list of one or more strings")
            if len(choice) > MAX_CHOICES or sum(map(len, choice)) > MAX_GRAMMAR_CHARS:
                raise RequestError(f"choice must have at most {MAX_CHOICES} strings with {MAX_GRAMMAR_CHARS} characters together; "
                                   f"got {len(choice)} with {sum(map(len, choice))}", "choice")
            _verify_text("choice", "".join(choice))
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) not in (None, "", False)]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} are both given, and an output has one grammar: leave one of them out", given[1])
        if self.json_whitespace not in (None, *JSON_WHITESPACES):
            raise refusal("json_whitespace", self.json_whitespace, f"null or one of {_or(tuple(map(repr, JSON_WHITESPACES)))}")
        for option, kinds in JSON_OPTIONS.items():
            if getattr(self, option) not in (None, False) and not set(kinds) & set(given):
                raise RequestError(f"{option} is given, but no {' or '.join(kinds)} that it could be for: give one, or leave it out", option)
        if self.reasoning_end is not None:
            _verify_text("reasoning_end", self.reasoning_end)
            if not 0 < len(self.reasoning_end) <= MAX_TAG_CHARS:
                raise refusal("reasoning_end", self.reasoning_end, f"null or a string of 1 to {MAX_TAG_CHARS} characters")
        elif self.thinking_budget is not None:
            raise RequestError("thinking_budget is given, but no reasoning_end: give the tag that closes what the model thinks", "thinking_budget")

    @property
    def grammar(self) -> Grammar | None:
        """What constrains the output. Where that is only that the model thinks first, the kind is "reasoning"."""
        thinking = {} if self.reasoning_end is None else {"reasoning_end": self.reasoning_end}
        for kind in GRAMMAR_FIELDS:
            if text := getattr(self, kind):
                text = None if kind == "json_object" else list(text) if kind == "choice" else text
                return Grammar(kind, text, thinking | {option.removeprefix("json_"): value for option, kinds in JSON_OPTIONS.items()
                                                       if kind in kinds and (value := getattr(self, option)) not in (None, False)})
        return Grammar("reasoning", None, thinking) if thinking else None

    @property
    def constrained(self) -> bool:
        """Is there a `grammar`? Costs a tenth of it."""
        return bool(self.regex or self.ebnf or self.choice or self.json_schema or self.json_object or self.structural_tag
                    or self.reasoning_end is not None)

    @property
    def greedy(self) -> bool:
        """Is the most likely token always taken?"""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0

    def stop_strings(self) -> list[str]:
        """The stop strings, as a list however they were given."""
        return _as_list(self.stop)

    def stop_patterns(self) -> list[regex.Pattern]:
        """The compiled stop patterns (package `regex`: partial matches, timeouts). Raises RequestError if one cannot compile."""
        return [_compile(text) for text in _as_list(self.stop_regex)]


class Request(msgspec.Struct, kw_only=True, tag=True):
    """One sample of one prompt (server -> engine): a call with n samples becomes n of these."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    index: int = 0                        # which of the n samples of one prompt (the seed is derived from it)
    namespace: str = ""                   # cache_salt / extra_key: prefixes never match across namespaces
    priority: int = 0
    routing_key: str | None = None
    stream: bool = True                   # False: one chunk, when all is done
    children: int = 0                     # it is a hold (holds.py): its prefix stays until so many requests have started that name it
    parent: str = ""                      # the rid of the hold that waits for this one

    def verify(self, vocab_size: int, context_len: int) -> None:
        """Check the parameters, the prompt's ids and its length against the context. Raises RequestError."""
        if not self.prompt_ids:
            raise RequestError("the prompt has no tokens: give at least one", "prompt")
        _verify_ids("prompt", self.prompt_ids, vocab_size)
        room = context_len - (self.params.max_tokens != 0)      # a prompt that only fills the cache may fill the context
        if len(self.prompt_ids) > room:
            raise RequestError(f"the prompt has {len(self.prompt_ids)} tokens, but the context length is {context_len}: "
                               f"shorten it to at most {room}", "prompt")
        self.params.verify(vocab_size, context_len)
        if self.params.logprob_start_len > len(self.prompt_ids):
            raise refusal("logprob_start_len", self.params.logprob_start_len,
                          f"at most the prompt's length, which is {len(self.prompt_ids)}")
        check_range("priority", self.priority)
        check_range("index", self.index)
        check_range("children", self.children)
        if self.children and self.params.max_tokens != 0:
            raise RequestError(f"children must be 0 where the request makes tokens: a hold only fills the cache; got children {self.children} and "
                               f"max_tokens {self.params.max_tokens}, give max_tokens 0", "children")
        _verify_text("rid", self.rid)
        _verify_text("parent", self.parent)
        _verify_text("namespace", self.namespace)
        if self.routing_key is not None:
            _verify_text("routing_key", self.routing_key)


class Logprob(msgspec.Struct, array_like=True):
    """The model's log-probability of a token, and of the most likely ones at its place, best first."""

    token_id: int
    logprob: float | None                 # None for the first prompt token
    top: list[tuple[int, float]] = []


class Score(msgspec.Struct, kw_only=True):
    """How likely the model finds a text behind a prefix (scoring.py)."""

    text: str
    tokens: list[Logprob]                 # those of the text, as they are behind the prefix
    unconditional: list[Logprob] | None   # the same tokens without it, where that was asked
    cached_tokens: int
    prompt_tokens: int                    # prefix and text


class Chunk(msgspec.Struct, kw_only=True, tag=True):
    """What one step added to one request (engine -> server). The last one has finish_reason."""

    rid: str
    text: str = ""
    output_ids: list[int] = []
    finish_reason: str | None = None      # "stop", "length", "abort", "error"
    stop_reason: str | int | None = None  # the stop string or id that matched
    cached_tokens: int = 0
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None   # on the first chunk
    error: str | None = None              # why, where finish_reason is "error", or "abort" because of a time-out
    status: int = 500                     # the HTTP code that says what kind of error it is
    param: str | None = None              # the field of the request that is to blame for it
    speculation: dict[str, Any] | None = None      # on the last chunk, where tokens were guessed: spec.Record.summary


class Output(msgspec.Struct, kw_only=True):
    """What LLM.generate returns; LLM.stream yields it piece by piece (text, output_ids, logprobs: what is new)."""

    text: str
    output_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str | None
    cached_tokens: int
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    index: int = 0
    stop_reason: str | int | None = None
    error: str | None = None              # why, where finish_reason is "error"
    speculation: dict[str, Any] | None = None      # where tokens were guessed: how many, how many rightly (SGLang's names)


# ---- the parts -----------------------------------------------------------------------------------------------------------------

def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of n, 64 bits: the seed itself for index 0, unrelated ones after (SplitMix64, Steele 2014)."""
    seed &= SEED_MASK
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)


def convert(fields: dict[str, Any], kind: type) -> Any:
    """A struct of type `kind` out of parsed JSON. Raises RequestError on an unknown field (names the nearest) or a wrong type."""
    if not isinstance(fields, dict):
        raise RequestError(f"expected an object, got {show(fields)}")
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
            hint = f"; here {ELSEWHERE[name]}" if name in ELSEWHERE else f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {show(name)}, got {show(fields[name])}{hint}", str(name))
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        text, _, path = str(error).partition(" - at ")      # "Expected `int`, got `str` - at `$.n`" or "... - at `key` in `$.x`"
        steps = re.findall(r"\.(\w+)|\[(\d+)\]", path.rpartition("$")[2])
        value = functools.reduce(_inside, steps, fields)
        where = "".join(f".{name}" if name else f"[{n}]" for name, n in steps).removeprefix(".")
        what = text.replace("`", "").replace("Expected", "expected").replace(" | ", " or ").replace("Object contains", "it has the")
        what = what.replace("Object missing required", "it lacks the")
        raise RequestError(f"{where or 'the body'}: {what} ({show(value)})", steps[0][0] if steps else None) from None


def _inside(value: Any, step: tuple[str, str]) -> Any:
    """One step of a path into parsed JSON: a name, or an index. What does not lead on stays where it is."""
    try:
        return value[step[0]] if step[0] else value[int(step[1])]
    except (KeyError, IndexError, TypeError):
        return value


def check_range(name: str, value: object, like: str | None = None) -> None:
    """Raise RequestError unless the number `value` lies in RANGES[name], or that of the field it is `like`."""
    within = RANGES[like or name]
    if not within.holds(value):
        raise refusal(name, value, str(within))


def refusal(name: str, value: object, expected: str) -> RequestError:
    """The error for a field with a value that is not what was expected."""
    aliases = [alias for alias, target in ALIASES.items() if target == name]
    also = f" (or {aliases[0]})" if aliases else ""
    return RequestError(f"{name}{also} must be {expected}; got {show(value)}", name)


def show(value: object, limit: int = 80) -> str:
    """A short printable form of a user's value, ASCII only so that it can go on any wire."""
    if isinstance(value, (str, list, tuple, dict)) and len(value) > limit:
        return f"{type(value).__name__} of length {len(value)}"
    if type(value) is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"       # int -> str is quadratic, and an error beyond 4300 digits
    try:
        text = ascii(value)
    except RecursionError:
        return f"{type(value).__name__}, nested too deeply"
    return text if len(text) <= limit else text[:limit] + "..."


def _schema_text(given: Any) -> tuple[Any, bool]:
    """(the JSON text of a schema or structural tag, keys in their order; whether it was a pydantic model, or one of its TypeAdapters). What is none
    of all that stays as it is."""
    is_model = True
    if isinstance(given, type) and callable(getattr(given, "model_json_schema", None)):
        given = given.model_json_schema()
    elif not isinstance(given, (type, dict)) and callable(getattr(given, "json_schema", None)):
        given = given.json_schema()
    else:
        is_model = False
    if isinstance(given, (dict, bool)):
        try:
            given = json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    return given, is_model


def _fold(seed: object) -> object:
    """Any int as 64 bits; anything else is left for verify to refuse."""
    return seed & SEED_MASK if type(seed) is int else seed


def _or(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _verify_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise refusal(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refusal(name, value, "text without lone surrogates") from None


def _verify_strings(name: str, value: object) -> None:
    """`stop` and `stop_regex`: none, one or a list of at most MAX_STOPS strings that are not empty."""
    if value is not None and not isinstance(value, (str, list, tuple)):
        raise refusal(name, value, "a string or a list of strings")
    strings = _as_list(value)
    if len(strings) > MAX_STOPS:
        raise RequestError(f"{name} must have at most {MAX_STOPS} entries; got {len(strings)}", name)
    for text in strings:
        _verify_text(name, text)
        if not text:
            raise refusal(name, value, "non-empty strings: an empty one would stop every text before its first token")
        if name == "stop" and len(text) > MAX_STOP_CHARS:
            raise refusal(name, text, f"strings of at most {MAX_STOP_CHARS} characters")
        if name == "stop_regex" and len(text.encode()) > MAX_PATTERN_BYTES:
            raise refusal(name, text, f"patterns of at most {MAX_PATTERN_BYTES} bytes")


def _pattern_size(text: str) -> int:
    """An upper bound of the pattern's length in bytes with every {count} written out: (a{999}){999} is a small bomb.

    Counts nest only through groups (or through another quantifier), so those multiply, and of all others the largest counts.
    """
    nested, largest = 1, 1
    for before, count in re.findall(r"(\S?)\s*\{\s*([0-9]+)", text):
        if before in ")}*+?" or "#" in text:        # a comment could stand between a group and its count
            nested *= max(1, int(count))
        else:
            largest = max(largest, int(count))
    return len(text.encode()) * nested * largest


@functools.lru_cache(maxsize=256)
def _compile(text: str) -> regex.Pattern:
    """A stop pattern that passed the size limit. Raises RequestError if it does not compile or matches the empty text."""
    if re.search(r"(?<!\\)(?:\\\\)*\(\?(R|[0-9]|&|P>)", text):
        raise RequestError(f"stop_regex {show(text)} is recursive, which is not supported: it could match forever", "stop_regex")
    try:
        pattern = regex.compile(text, cache_pattern=False)
        empty = pattern.match("", timeout=0.1)
    except Exception as error:      # not regex.error alone: some patterns raise other things, and all are the sender's fault
        raise RequestError(f"stop_regex {show(text)} does not compile: {error}", "stop_regex") from None
    if empty:
        raise RequestError(f"stop_regex {show(text)} matches the empty text and would stop before the first token", "stop_regex")
    return pattern


def _verify_ids(name: str, ids: object, vocab_size: int) -> None:
    """A list of token ids, each an integer (no bool) of the vocabulary."""
    if ids is None:
        return
    if not isinstance(ids, (list, tuple)):
        raise refusal(name, ids, "a list of token ids")
    if not ids or {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise refusal(name, token_id, f"token ids, integers in [0, {vocab_size - 1}]")


def _verify_bias(bias: object, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise refusal("logit_bias", bias, "a map from token id to number")
    _verify_ids("logit_bias", list(bias), vocab_size)
    for token_id, value in bias.items():
        if not BIAS_RANGE.holds(value):
            raise refusal("logit_bias", {token_id: value}, f"a map from token id to {BIAS_RANGE}")


# ---- wire messages -------------------------------------------------------------------------------------------------------------

class Abort(msgspec.Struct, tag=True):
    """HTTP process -> engine process: nobody waits for these requests any more."""

    rids: list[str]


class Control(msgspec.Struct, tag=True):
    """HTTP process -> engine process: one of the engine's own verbs ("stats", "flush_cache", "probe", "tree_view 500 60"); answered by a Reply of the
    same id."""

    id: int
    verb: str


class Ready(msgspec.Struct, kw_only=True, tag=True):
    """Engine process -> HTTP process, once, before anything else: what the HTTP process must know about the model."""

    model: str                            # as the user named it
    path: str                             # the directory it was loaded from
    vocab_size: int
    context_len: int
    max_total_tokens: int                 # KV slots
    end_ids: list[int]
    tokenizer_json: str                   # the fast tokenizer, whole
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]        # bos_token, eos_token, ...: names that a chat template may use
    generation_defaults: dict[str, int | float]   # sampling values the model's makers recommend
    config: dict[str, Any]                # the engine's flags, with the values in force


class Rejected(msgspec.Struct, kw_only=True, tag=True):
    """Engine process -> HTTP process: a request that was not taken (the fields of a RequestError). No Chunk of it follows."""

    rid: str
    message: str
    param: str | None = None
    status: int = 400


class Reply(msgspec.Struct, tag=True):
    """Engine process -> HTTP process: the answer to a Control."""

    id: int
    value: Any


# A frame on the wire is a list. The requests in one frame are one call: all of them are taken, or none.
Command = Request | Abort | Control
Event = Chunk | Rejected | Reply | Ready


if __name__ == "__main__":
    wire = msgspec.msgpack.encode(Request(rid="r0", prompt_ids=[1, 2, 3], params=SamplingParams(max_new_tokens=16, seed=-1)))
    print(f"{len(wire)} bytes on the wire: {msgspec.msgpack.decode(wire, type=Request)}")
    print("seeds of n=3:", [hex(derive_seed(42, index)) for index in range(3)])
    for fields in ({"temperature": float("nan")}, {"top_k": True}, {"n": 1_000_000}, {"max_token": 5}, {"stop_regex": "("},
                   {"max_tokens": 5, "max_new_tokens": 6}, {"logit_bias": {"49152": 1}}, {"regex": "yes|no", "choice": ["yes"]},
                   {"json_schema": {}}, {"guided_regex": "yes|no"}):
        try:
            SamplingParams.from_dict(fields).verify(vocab_size=49152, context_len=8192)
        except RequestError as error:
            print(f"{error.param}: {error}")

