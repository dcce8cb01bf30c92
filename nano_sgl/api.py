"""API: what clients send becomes requests, and what the engine answers becomes what clients expect.

Three dialects, one engine: OpenAI's chat and completions, and SGLang's native /generate, with /score beside it. Each is read into the same `Call` and
spoken by its own `Answer`, so the engine knows nothing of JSON and a fourth dialect is one reader and one answer more.

      body (bytes) --read_json, sort_fields--> ChatBody + sampling --Reader.chat--> Call: [Request, ...] + ChatAnswer
                                                                                             engine: Chunk, Chunk, ...
      SSE events, or one JSON body  <--------------- ChatAnswer.add(chunks) -----------------------/

  Reader   bodies -> Calls for one model: tokenises, renders chats, fills in defaults, checks everything that needs no engine.
  Call     prompts x n samples, each a Request. They are submitted together.
  Choice   what has arrived of one sample. A plain answer is made of Choices, a stream of the chunks that were added to them: one
           state, so both say the same.

Every field of a body is treated by one rule: it is obeyed, or refused by name with status 400, or listed in NO_EFFECT with the
reason why it changes nothing here. A null is a field not given. Types and ranges are `protocol`'s; what is read here are only the
routes' own names. OpenAI's response_format is one: {"type": "json_object"} is json_object: true, its json_schema is json_schema with
json_strict, and as structural_tag it is that itself; regex, ebnf and choice stand beside it, as in SGLang and vLLM. Whether a grammar
compiles, the engine says, before it says anything else.

In a chat, the text is sorted into fields of a message: what the model thinks (reasoning.py), and the tools it calls (tools.py). Both
change what its output is held to, too: a grammar begins behind the thoughts, and a call that must come is a grammar.

Work is bounded before it is done: lists are counted before anything is built for their entries, a text with more characters
than the longest token times the context is refused before it is tokenised, and grammars are counted once for each of their samples.

Invariant: `usage` counts a prompt once however many samples it has; text, ids, logprobs of a choice are cut by the engine, never
here.

Cost: one tokenisation a prompt; about 20 us of JSON a chunk. Events of /generate hold all there is so far, so they are made once
for all that has arrived, and each token's JSON once. Stops holding: text in, text out.
Source: OpenAI's API reference (chat, completions, legacy logprobs), SGLang 0.5's /generate.
"""

from __future__ import annotations

import codecs
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from .bodies import read_json
from .chat import CHATML, PLAIN_ROLES, ChatTemplate, Codec, Message, byte_tokenizer, read_messages
from .protocol import (ALIASES, GRAMMAR_FIELDS, Chunk, Logprob, Ready, Request, RequestError, SamplingParams, check_range, convert, refusal,
                       show)
from .reasoning import CLOSED, OPENED, STYLES, Counter, Style, begins
from .scoring import read_scores, read_texts, score_requests
from .tools import FORMATS as CALL_FORMATS
from .tools import Reply, Tool, Toolbox, ToolChoice, add_up, detect

log = logging.getLogger("nano_sgl")

MAX_PROMPTS = 1024          # in one call
MAX_CHOICES = 4096          # prompts times n in one call
MAX_PROMPT_TOKENS = 1 << 22  # in one call, a prompt counted for each of its samples: each goes to the engine with a copy
MAX_CALL_GRAMMARS = 1 << 22  # characters of grammars in one call, counted the same way; a string of a choice counts for one more
MAX_SCORED_CHARS = 8 << 20  # in one call, the prefix counted for each choice: each is tokenised with it
LOWEST_LOGPROB = -9999.0    # JSON has no infinity

# Fields that OpenAI defines and that change nothing about an answer here.
NO_EFFECT = {
    "user": "names the end user, for abuse reports",
    "safety_identifier": "the same, hashed",
    "metadata": "labels for a dashboard",
    "store": "keeps the answer on OpenAI's side",
    "service_tier": "a price class",
    "prompt_cache_key": "a hint where the prefix may be cached; the radix tree finds it anyway",
    "prompt_cache_retention": "how long to keep it; the eviction policy decides",
    "prediction": "a guess at the answer, which could only make it faster",
}
# Fields that are known and not supported, with the values that mean "not used": those pass, any other value is refused by name.
NOT_USED: dict[str, list] = {
    "tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "audio": [], "web_search_options": [],
    "reasoning_effort": ["none"], "best_of": [1], "suffix": [""], "chat_template": [], "spaces_between_special_tokens": [True],
    "return_hidden_states": [False],
}
# Sampling fields that each route spells in its own way; all others a body may hold as they are.
LOGPROB_FIELDS = {"logprobs", "prompt_logprobs", "logprob_start_len"}
# Types of response_format, and what each has beside.
FORMATS = {"text": [], "json_object": ["schema"], "json_schema": ["json_schema"],
           "structural_tag": ["format", "triggers", "structures", "at_least_one", "stop_after_first"]}
NO_JSON = {"json_object": False, "json_strict": False, "json_any_order": False}
PROMPT_TAIL = 64            # tokens at the end of a prompt, in which a tag of reasoning is looked for
# What a response_format's json_schema has, and what that must be.
SCHEMA_PARTS = {"name": (str, "text"), "description": (str, "text"), "schema": ((dict, bool, str), "a JSON schema"),
                "strict": (bool, "true or false")}


# ----------------------------------------------------------------------------------------------------------- bodies: JSON -> Call

class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage and no choices. continuous_usage_stats: the usage so far in every chunk."""
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, kw_only=True):
    """What the routes have in common, beside the sampling fields. A missing model is the one that is served."""
    model: str | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    cache_salt: str = ""
    extra_key: str = ""
    priority: int = 0
    routing_key: str | None = None


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""
    messages: list[Message]
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True    # false: thoughts come in one piece, when they end
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool = True


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions. prompt: a text, the ids of one, or a list of either."""
    prompt: str | list[str | int | list[int]]
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    echo: bool = False
    logprobs: int | None = None


class GenerateBody(Body, kw_only=True):
    """POST /generate, SGLang's own route. Lists hold one entry a prompt. children: each prompt is a hold (holds.py), and its rid the name; of a
    text the last token is left out, which with what follows may be another one. parent: the rid of the hold that waits for this call."""
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1    # -1: logprobs of the output only
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    children: int = 0
    parent: str = ""


class HoldBody(Body, kw_only=True):
    """POST /hold: start to prefill a text, and keep it for so many calls that name the answer's `hold` as their parent. See GenerateBody."""
    text: str | None = None
    input_ids: list[int] | None = None
    children: Annotated[int, msgspec.Meta(ge=1)]
    parent: str = ""


class ScoreBody(Body, kw_only=True):
    """POST /score: how likely each of the choices is behind the text (scoring.py). unconditional: and without it. parent: as on /generate."""
    text: str
    choices: list[str]
    unconditional: bool = False
    parent: str = ""


def sort_fields(given: dict, kind: type[Body]) -> tuple[Body, dict]:
    """The route's own fields as a `kind`, and the sampling fields. RequestError names a field that is not known, or not
    supported.

    What nobody knows goes where most names live, to be refused there with the nearest name.
    """
    own_names, known_elsewhere = kind.__struct_fields__, LOGPROB_FIELDS | set(ALIASES)
    own, sampling = {}, {}
    for name, value in given.items():
        if name in own_names:
            own[name] = value
        elif kind is GenerateBody and name in SamplingParams.__struct_fields__ and name not in LOGPROB_FIELDS:
            raise RequestError(f"{name} belongs into sampling_params on this route, got {show(value)}", name)
        elif _is_used(name, value):
            (own if kind in (GenerateBody, ScoreBody) or name in known_elsewhere else sampling)[name] = value
    for required in ("messages", "prompt"):
        if required in own_names and required not in own:
            raise RequestError(f"{required} is missing", required)
    return convert(own, kind), sampling


def _is_used(name: str, value: Any) -> bool:
    """False for a field that changes nothing; RequestError for one that would, and is not supported."""
    if name in NO_EFFECT or value is None or value in NOT_USED.get(name, ()):
        return False
    if name in NOT_USED:
        raise RequestError(f"{name} is not supported by this server; leave it out (got {show(value)})", name)
    return True


def format_fields(wanted: dict[str, Any] | None, sampling: dict) -> dict[str, Any]:
    """The sampling fields that a response_format stands for, beside those that were given. RequestError where there are none."""
    name = "response_format"
    if wanted is None:
        return {}
    kind = wanted.get("type")
    if kind not in list(FORMATS):
        raise RequestError(f"{name}: its type must be one of {', '.join(map(repr, FORMATS))}; got {show(kind)}", name)
    for extra in wanted.keys() - {"type", *FORMATS[kind]}:
        raise RequestError(f"{name} of type {kind!r} has {', '.join(['type', *FORMATS[kind]])} and nothing else; got {show(extra)}: "
                           f"{show(wanted[extra])}", name)
    if kind == "text":
        return {}
    if (schema := wanted.get("schema")) is not None:        # as llama.cpp and others take it
        fields = schema_fields({"schema": schema})
    elif kind == "structural_tag":
        fields = {"structural_tag": {part: value for part, value in wanted.items() if value is not None}}
    else:
        fields = schema_fields(wanted.get("json_schema")) if kind == "json_schema" else {"json_object": True}
    for other in GRAMMAR_FIELDS:
        if sampling.get(other) not in (None, "", False) and not (sampling[other] is True and fields.get(other) is True):
            raise RequestError(f"{name} and {other} are both given, and an output has one grammar: leave one of them out", name)
    if "json_strict" in fields and sampling.get("json_strict") is not None:
        raise RequestError(f"{name}: strict and the field json_strict are two names for one thing: give one of them", name)
    return fields


def schema_fields(given: Any) -> dict[str, Any]:
    """The sampling fields for the json_schema of a response_format: OpenAI's name, description, schema and strict."""
    name = "response_format"
    if not isinstance(given, dict) or given.get("schema") in (None, ""):
        raise RequestError(f"{name} of type 'json_schema' needs {{'json_schema': {{'name': ..., 'schema': {{...}}}}}}; got {show(given)}", name)
    for key, value in given.items():
        if key not in SCHEMA_PARTS:
            raise RequestError(f"{name}: json_schema has {', '.join(SCHEMA_PARTS)} and nothing else; got {show(key)}: {show(value)}", name)
        if value is not None and not isinstance(value, SCHEMA_PARTS[key][0]):
            raise RequestError(f"{name}: json_schema.{key} must be {SCHEMA_PARTS[key][1]}; got {show(value)}", name)
    return {"json_schema": given["schema"]} | ({} if given.get("strict") is None else {"json_strict": given["strict"]})


def thoughtful(params: SamplingParams, style: Style | None, thinks: str) -> SamplingParams:
    """Parameters of a model that thinks first: a grammar begins behind its thoughts, and these may have a budget."""
    if style is None or params.reasoning_end is not None or params.grammar is None and params.thinking_budget is None:
        return params
    if thinks == CLOSED:
        return msgspec.structs.replace(params, thinking_budget=None)
    return msgspec.structs.replace(params, reasoning_end=style.end)


def message_size(message: Message) -> int:
    """Characters of a message, in all that a template may write of it."""
    parts = [message.content] if isinstance(message.content, str) else [part.get("text") for part in message.content or ()]
    parts += [message.name, message.tool_call_id, message.reasoning_content]
    parts += [part for call in message.tool_calls or () for part in (call.id, call.function.name, call.function.arguments)]
    return sum(len(part) for part in parts if part)


def grammar_size(params: SamplingParams) -> int:
    """Characters of a grammar, and one for each string of a choice."""
    text = given.text if (given := params.grammar) else None
    return sum(map(len, text)) + len(text) if isinstance(text, list) else len(text or "")


@dataclass(frozen=True)
class Prompt:
    """A prompt, tokenised."""
    ids: list[int]
    text: str | None = None  # None: it was given as ids


@dataclass
class Call:
    """One HTTP call, read."""
    requests: list[Request]
    answer: "Answer"
    stream: bool


class Reader:
    """Bodies -> Calls, for one model. Pure host work, safe in any thread."""

    def __init__(self, ready: Ready, model: str, template: str | None = None, reasoning: str | None = None, calls: str | None = None):
        """model: the name clients use. template: a chat template instead of the model's; ValueError where it is none. reasoning: one of
        reasoning.STYLES; None: what the model thinks is not told apart. calls: one of tools.FORMATS; None: what the template shows."""
        self.ready, self.model, self.created = ready, model, int(time.time())
        self.codec = Codec(ready.tokenizer_json)
        self.defaults = self._usable(ready.generation_defaults)
        self.template: ChatTemplate | None = None
        self.why_no_chat = "this model has no chat template"
        if template is not None:
            self.template = ChatTemplate(self.codec, template, ready.special_tokens)
        elif ready.chat_template:
            try:
                self.template = ChatTemplate(self.codec, ready.chat_template, ready.special_tokens)
            except ValueError as error:
                self.why_no_chat = str(error)
        self.style: Style | None = STYLES[reasoning] if reasoning else None
        self.roles = self.template.roles() if self.template else PLAIN_ROLES
        self.call_format = CALL_FORMATS[calls] if calls else detect(self.template.tool_source) if self.template else None

    def _usable(self, recommended: dict) -> dict:
        """The model's recommended sampling values without those that no request could hold: a client sent none of them."""
        usable, wrong = {}, []
        for name, value in recommended.items():
            try:
                SamplingParams.from_dict({name: value}).verify(self.ready.vocab_size, self.ready.context_len)
                usable[name] = value
            except RequestError as error:
                wrong.append(error.message)
        if wrong:
            log.warning("the model's generation_config.json is obeyed only in part: %s", "; ".join(wrong))
        return usable

    def chat(self, raw: bytes) -> Call:
        """The call that a body of /v1/chat/completions makes. This and the next three raise RequestError where there is none."""
        body, sampling = sort_fields(read_json(raw), ChatBody)
        self._check(body)
        if self.template is None:
            raise RequestError(f"{self.why_no_chat}: use /v1/completions, or start the server with --chat-template FILE",
                               "messages")
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        check_range("top_logprobs", body.top_logprobs, like="logprobs")
        check_range("max_completion_tokens", body.max_completion_tokens, like="max_tokens")
        messages = read_messages(body.messages)
        tools = Toolbox.of(body.tools, body.tool_choice, body.parallel_tool_calls, self.call_format, self.template.takes_tools)
        size = sum(map(message_size, body.messages)) + len(json.dumps(body.chat_template_kwargs or "", ensure_ascii=False))
        self.codec.check_length(size + (tools.chars if tools else 0), self.ready.context_len)
        if len(messages) > self.ready.context_len:
            raise RequestError(f"{len(messages)} messages cannot fit into a context of {self.ready.context_len} tokens",
                               "messages")
        ids = self.template.encode(messages, continue_final=body.continue_final_message, tools=tools and tools.for_template(),
                                   add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs)
        longest = sampling.setdefault("max_tokens", body.max_completion_tokens)
        if body.max_completion_tokens not in (None, longest):
            raise RequestError(f"max_tokens and max_completion_tokens are two names for one thing; got {show(longest)} and "
                               f"{body.max_completion_tokens}, give one of them", "max_completion_tokens")
        if tools is not None:
            sampling.setdefault("skip_special_tokens", False)   # some models' calls begin with one
        thinks = self._thinks(body, ids, messages)
        params = self._params(body, sampling, lambda given: thoughtful(self._with_calls(given, tools), self.style, thinks),
                              logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        opened = thinks == OPENED or params.reasoning_end is not None       # where a grammar waits for the closing tag, all before it is thought
        style = None if thinks == CLOSED or not body.separate_reasoning else self.style
        counter = self.style and (lambda: Counter(self.style, opened, thinks == CLOSED))
        return self._call(body, [Prompt(ids)], [params], ChatAnswer, "chatcmpl-", tools=tools, counter=counter,
                          reply=lambda: Reply(style, opened, tools, not body.stream_reasoning))

    def _with_calls(self, params: SamplingParams, tools: Toolbox | None) -> SamplingParams:
        """Parameters under which the output calls tools, as these demand it."""
        if tools is None:
            return params
        msgspec.structs.replace(params, thinking_budget=None).verify(self.ready.vocab_size, self.ready.context_len)   # before a grammar is replaced
        tag = tools.constraint(None if params.grammar is None or params.grammar.kind == "reasoning" else params.grammar)
        if tag is None:
            return params
        return msgspec.structs.replace(params, **dict.fromkeys(GRAMMAR_FIELDS) | NO_JSON | {"structural_tag": tag})

    def _thinks(self, body: ChatBody, ids: list[int], messages: list[dict]) -> str:
        """Where the answer to a prompt begins: see reasoning.py. CLOSED without a style."""
        if self.style is None:
            return CLOSED
        enabled = (body.chat_template_kwargs or {}).get("enable_thinking") is not False
        said = messages[-1]["content"] if body.continue_final_message else ""
        return begins(self.style, self.codec.decode(ids[-PROMPT_TAIL:]), said, enabled)

    def completion(self, raw: bytes) -> Call:
        """The call that a body of /v1/completions makes."""
        body, sampling = sort_fields(read_json(raw), CompletionBody)
        self._check(body)
        sampling.setdefault("max_tokens", 16)
        params = self._params(body, sampling, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
        prompts = self._prompts(body.prompt, "prompt")
        return self._call(body, prompts, [params] * len(prompts), CompletionAnswer, "cmpl-")

    def generate(self, raw: bytes) -> Call:
        """The call that a body of /generate makes."""
        return self._generate(sort_fields(read_json(raw), GenerateBody)[0])

    def hold(self, raw: bytes) -> Call:
        """The call that a body of /hold makes."""
        body, _ = sort_fields(read_json(raw), HoldBody)
        if body.stream or isinstance(body.rid, list):
            raise RequestError("a hold is named at once: stream must be false, and rid a string", "stream" if body.stream else "rid")
        given = {name: getattr(body, name) for name in HoldBody.__struct_fields__}
        return self._generate(GenerateBody(**given | {"rid": body.rid or uuid.uuid4().hex, "sampling_params": {"max_new_tokens": 0}}))

    def _generate(self, body: GenerateBody) -> Call:
        self._check(body)
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("give either text or input_ids", "text")
        name = "text" if body.text is not None else "input_ids"
        prompts = self._prompts(body.text if body.text is not None else body.input_ids, name)
        if body.children:
            prompts = [Prompt(prompt.ids[:-1], prompt.text) if prompt.text is not None and len(prompt.ids) > 1 else prompt for prompt in prompts]
        given, logprob, start, top = (_for_each(getattr(body, name), len(prompts), name) for name in (
            "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"))
        for wanted in top:
            check_range("top_logprobs_num", wanted, like="logprobs")
        one_each = isinstance(body.top_logprobs_num, list)  # one value for all prompts is for those that want logprobs
        if any(t and not wanted for t, wanted in zip(top, logprob if one_each else [any(logprob)])):
            raise RequestError("top_logprobs_num needs return_logprob: true", "top_logprobs_num")
        if min(start) < -1:
            raise refusal("logprob_start_len", min(start), "-1 (logprobs of the output only) or a position in the prompt")
        made: dict[tuple, SamplingParams] = {}  # what is one for all prompts is checked once
        params = []
        for wanted in zip(given, logprob, start, top):
            key = (id(wanted[0]), *wanted[1:])
            params.append(made[key] if key in made else made.setdefault(key, self._native_params(*wanted)))
        single = params[0].n == 1 and (isinstance(body.text, str) or body.text is None and isinstance(body.input_ids[0], int))
        return self._call(body, prompts, params, GenerateAnswer, "", single=single)

    def score(self, raw: bytes) -> Call:
        """The call that a body of /score makes."""
        body, _ = sort_fields(read_json(raw), ScoreBody)
        self._check(body)
        if body.stream or isinstance(body.rid, list):
            raise RequestError("scores are one answer, which comes whole: stream must be false, and rid a string", "stream" if body.stream else "rid")
        longest = max(map(len, body.choices), default=0)
        self.codec.check_length(len(body.text) + longest, self.ready.context_len)
        if (total := len(body.text) * len(body.choices) + sum(map(len, body.choices))) > MAX_SCORED_CHARS:
            raise RequestError(f"{len(body.choices)} choices behind a text of {len(body.text)} characters make {total} characters, the text counted "
                               f"for each; at most {MAX_SCORED_CHARS} go into one call", "choices")
        rid = body.rid or uuid.uuid4().hex
        asked = score_requests(read_texts(self.codec.encode, body.text, body.choices, body.unconditional), rid, body.parent,
                               namespace=self._namespace(body), priority=body.priority, routing_key=body.routing_key)
        for request in asked:
            request.verify(self.ready.vocab_size, self.ready.context_len)
        choices = [Choice(n, request, Prompt(request.prompt_ids), self.codec) for n, request in enumerate(asked)]
        return Call(asked, ScoreAnswer(rid, self.model, body, choices, self.codec), False)

    def _native_params(self, given: dict, logprob: bool, start: int, top: int) -> SamplingParams:
        kept = {name: value for name, value in given.items() if _is_used(name, value)}
        if misplaced := LOGPROB_FIELDS & set(kept):
            raise RequestError(f"sampling_params: {misplaced.pop()} is spelled return_logprob, top_logprobs_num and "
                               "logprob_start_len on this route, beside sampling_params", "sampling_params")
        if logprob:
            kept["logprobs"] = top
            if start < 0 and 0 in (kept.get("max_new_tokens"), kept.get("max_tokens")):
                start = 0  # there is no output that they could be of
            if start >= 0:
                kept.update(prompt_logprobs=top, logprob_start_len=start)
        params = SamplingParams.from_dict(kept)
        params.verify(self.ready.vocab_size, self.ready.context_len)
        return params

    def check_model(self, name: str | None) -> None:
        """RequestError, status 404, unless the name is that of the served model; None is."""
        if name not in (None, self.model):
            raise RequestError(f"the model {show(name)} is not served here; this server has {self.model!r}", "model", 404)

    def model_card(self) -> dict:
        """The served model, as OpenAI lists models."""
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "nano_sgl",
                "max_model_len": self.ready.context_len}

    def _check(self, body: Body) -> None:
        self.check_model(body.model)
        if getattr(body, "stream_options", None) is not None and not body.stream:
            raise RequestError("stream_options is for stream: true", "stream_options")

    def _params(self, body: ChatBody | CompletionBody, sampling: dict, change: Callable[[SamplingParams], SamplingParams] = lambda given: given,
                **logprobs: int | None) -> SamplingParams:
        """The parameters of an OpenAI route: the model's recommended values where the client gives none. change: what else they depend on."""
        params = change(SamplingParams.from_dict({**self.defaults, **sampling, **format_fields(body.response_format, sampling), **logprobs}))
        params.verify(self.ready.vocab_size, self.ready.context_len)
        return params

    def _prompts(self, given: str | list, name: str) -> list[Prompt]:
        """One text, one list of ids, or a list of either."""
        if given == []:
            raise RequestError(f"{name} is an empty list", name)
        items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if len(items) > MAX_PROMPTS:
            raise RequestError(f"{name} holds {len(items)} prompts; at most {MAX_PROMPTS} go into one call", name)
        prompts = []
        for n, item in enumerate(items):
            if isinstance(item, str):
                self.codec.check_length(len(item), self.ready.context_len)
                prompts.append(Prompt(self.codec.encode(item), item))
            elif isinstance(item, list) and all(type(i) is int for i in item):
                prompts.append(Prompt(item))
            else:
                raise RequestError(f"{name}[{n}]: expected text or a list of token ids, got {show(item)}", name)
        return prompts

    def _call(self, body: Body, prompts: list[Prompt], params: list[SamplingParams], answer: type["Answer"], prefix: str,
              **options) -> Call:
        if sum(p.n for p in params) > MAX_CHOICES:
            raise RequestError(f"{len(prompts)} prompts with n = {params[0].n} are too many answers; at most {MAX_CHOICES} go "
                               "into one call", "n")
        if (total := sum(len(prompt.ids) * p.n for prompt, p in zip(prompts, params))) > MAX_PROMPT_TOKENS:
            raise RequestError(f"{sum(len(p.ids) for p in prompts)} prompt tokens with n = {max(p.n for p in params)} make "
                               f"{total} tokens, a prompt counted for each of its samples; at most {MAX_PROMPT_TOKENS} go into "
                               "one call", "n")
        sizes = {key: grammar_size(p) for key, p in {id(p): p for p in params}.items()}  # most often one for all prompts
        if (total := sum(sizes[id(p)] * p.n for p in params)) > MAX_CALL_GRAMMARS:
            kind = next(p.grammar[0] for p in params if p.grammar)
            raise RequestError(f"{kind}: the grammars of this call make {total} characters, counted for each of its {sum(p.n for p in params)} "
                               f"samples; at most {MAX_CALL_GRAMMARS} go into one call", kind)
        namespace, children, parent = self._namespace(body), getattr(body, "children", 0), getattr(body, "parent", "")
        base = body.rid if isinstance(body.rid, str) else prefix + uuid.uuid4().hex
        rids = body.rid if isinstance(body.rid, list) else _numbered(base, len(prompts))
        choices = []
        for prompt, p, rid in zip(prompts, params, _for_each(rids, len(prompts), "rid")):
            one, rids = msgspec.structs.replace(p, n=1), _numbered(rid, p.n)
            for index in range(p.n):
                request = Request(rid=rids[index], prompt_ids=prompt.ids, params=one, index=index, stream=body.stream, namespace=namespace,
                                  priority=body.priority, routing_key=body.routing_key, children=0 if index else children,
                                  parent="" if choices else parent)
                if index == 0:
                    request.verify(self.ready.vocab_size, self.ready.context_len)
                choices.append(Choice(len(choices), request, prompt, self.codec))
        if len({c.request.rid for c in choices}) < len(choices):
            raise RequestError("rid: two requests of one call have the same id", "rid")
        return Call([c.request for c in choices], answer(base, self.model, body, choices, self.codec, **options), body.stream)


    @staticmethod
    def _namespace(body: Body) -> str:
        for name in ("cache_salt", "extra_key"):
            if "\0" in getattr(body, name):
                raise RequestError(f"{name} must not hold a NUL character", name)
        return body.cache_salt + ("\0" + body.extra_key if body.extra_key else "")


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{n}" for n in range(count)]


def _for_each(value: Any, count: int, name: str) -> list:
    """A field of a call with several prompts: one value for all, or a list of one each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", name)
    return value


# -------------------------------------------------------------------------------------------------------- answers: chunks -> JSON

class Choice:
    """One sample of one prompt: what has arrived of it."""

    def __init__(self, index: int, request: Request, prompt: Prompt, codec: Codec):
        self.index, self.request, self.prompt, self.codec = index, request, prompt, codec
        self.text = ""
        self.output_ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens = 0
        self.speculation: dict | None = None
        self.started = self.called = False  # called: it has called a tool
        self.shown: dict[str, list[msgspec.Raw]] = {}  # the logprobs of a GenerateAnswer, as JSON
        self._offset, self._utf8 = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs or ()
        self.prompt_logprobs += chunk.prompt_logprobs or ()
        self.finish_reason, self.stop_reason, self.cached_tokens = chunk.finish_reason, chunk.stop_reason, chunk.cached_tokens
        self.speculation = chunk.speculation

    def offset_of_next(self, token_id: int) -> int:
        """Characters before a token, in the text of the tokens that were asked about so far."""
        offset = self._offset
        self._offset += len(self._utf8.decode(self.codec.token_bytes(token_id)))
        return offset

    @property
    def reason(self) -> str | None:
        """Why it has ended, as OpenAI's API says it."""
        cut = isinstance(self.stop_reason, str)     # at a stop string, maybe in the middle of a call
        return "tool_calls" if self.called and self.finish_reason == "stop" and not cut else self.finish_reason

    @property
    def echo(self) -> str:
        return self.prompt.text if self.prompt.text is not None else self.codec.decode(self.prompt.ids)


class Answer:
    """What a call has got so far, and how its API says it. `choices` lie prompt by prompt, sample by sample."""

    done_after_errors = False       # whether [DONE] comes behind an error in a stream

    def __init__(self, id: str, model: str, body: Body, choices: list[Choice], codec: Codec):
        self.id, self.model, self.body, self.codec = id, model, body, codec
        self.choices = choices
        self.by_rid = {c.request.rid: c for c in choices}
        self.created, self.start = int(time.time()), time.monotonic()
        self.prompt_tokens = sum(len(c.prompt.ids) for c in choices if c.request.index == 0)
        self.completion_tokens = self.cached_tokens = 0
        options = getattr(body, "stream_options", None) or StreamOptions()
        self.include_usage, self.continuous_usage = options.include_usage, options.continuous_usage_stats

    def add(self, chunks: list[Chunk]) -> list:
        """Take what has arrived; returns the events it makes in a stream."""
        events = []
        for chunk in chunks:
            choice = self.take(chunk)
            if self.body.stream:
                events += self.events(choice, chunk)
            choice.started = True
        return events

    def take(self, chunk: Chunk) -> Choice:
        """Add a chunk to its choice and to the counts of the call."""
        choice = self.by_rid[chunk.rid]
        self.completion_tokens += len(chunk.output_ids)
        if choice.request.index == 0:
            self.cached_tokens += chunk.cached_tokens - choice.cached_tokens
        choice.add(chunk)
        return choice

    def usage(self) -> dict:
        """Tokens of the call: each prompt counts once, however many samples it has."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def events(self, choice: Choice, chunk: Chunk) -> list:
        raise NotImplementedError

    def blame(self, error: RequestError) -> RequestError:
        """What ended the call, in the words of its API."""
        return error

    def last_events(self) -> list:
        """What follows the last chunk of a stream, before [DONE]."""
        return [self._head([], usage=self.usage())] if self.include_usage else []

    def body_json(self) -> Any:
        return self._head([self.choice_json(c) for c in self.choices], usage=self.usage())

    def choice_json(self, choice: Choice) -> dict:
        raise NotImplementedError

    def _head(self, choices: list[dict], usage: dict | None) -> dict:
        head = {"id": self.id, "object": self.chunk_object if self.body.stream else self.object, "created": self.created,
                "model": self.model, "choices": choices}
        if usage is not None or self.include_usage:
            head["usage"] = usage
        return head

    def _event(self, choice: Choice, content: dict, logprobs: dict | None, finished: bool) -> dict:
        """One chunk of an OpenAI stream."""
        return self._head([{"index": choice.index, **content, "logprobs": logprobs,
                            "finish_reason": choice.reason if finished else None,
                            **({"matched_stop": choice.stop_reason} if finished else {})}],
                          usage=self.usage() if self.continuous_usage else None)


class ChatAnswer(Answer):
    """OpenAI's chat: a message, or deltas of one; the role comes first, the end in a chunk of its own."""
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args, tools: Toolbox | None, reply: Callable[[], Reply], counter: Callable[[], Counter] | None):
        """reply: makes what sorts the text of a choice into the fields of its message. counter: makes what counts its thoughts, if any."""
        super().__init__(*args)
        self.tools, self.reply = tools, reply
        self.replies = [reply() for _ in self.choices] if self.body.stream else []
        self.counters, self.reasoning_tokens = [counter() for _ in self.choices] if counter else [], 0

    def take(self, chunk: Chunk) -> Choice:
        """Add a chunk to its choice, and count its thoughts."""
        choice = super().take(chunk)
        counter = self.counters[choice.index] if self.counters else None
        if counter and not counter.ended:
            self.reasoning_tokens -= counter.tokens
            for token_id in chunk.output_ids:
                counter.add(self.codec.token_bytes(token_id))
            self.reasoning_tokens += counter.tokens
        return choice

    def usage(self) -> dict:
        """Also the tokens of thoughts, as OpenAI and as SGLang name them, where the server tells thoughts apart."""
        count = {"reasoning_tokens": self.reasoning_tokens}
        return super().usage() | ({"completion_tokens_details": count, **count} if self.counters else {})

    def events(self, choice: Choice, chunk: Chunk) -> list:
        deltas = self.replies[choice.index].feed(chunk.text, ended=chunk.finish_reason is not None)
        choice.called |= any("tool_calls" in delta for delta in deltas)
        logprobs = self._logprobs(chunk.logprobs) if chunk.logprobs is not None else None
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        events = [] if choice.started else [self._event(choice, {"delta": {"role": "assistant", "content": ""}}, None, finished=False)]
        for n, delta in enumerate(deltas):
            events.append(self._event(choice, {"delta": delta}, None if n else logprobs, finished=False))
        if chunk.finish_reason:
            events.append(self._event(choice, {"delta": {}}, None, finished=True))
        return events

    def choice_json(self, choice: Choice) -> dict:
        message = add_up(self.reply().feed(choice.text, ended=True))
        choice.called = "tool_calls" in message
        return {"index": choice.index, "message": {"role": "assistant", "refusal": None, **message},
                "logprobs": self._logprobs(choice.logprobs) if self.body.logprobs else None,
                "finish_reason": choice.reason, "matched_stop": choice.stop_reason}

    def blame(self, error: RequestError) -> RequestError:
        return self.tools.blame(error) if self.tools else error

    def _logprobs(self, entries: list[Logprob]) -> dict:
        def show_token(token_id: int, logprob: float) -> dict:
            return {"token": self.codec.token_text(token_id), "logprob": max(logprob, LOWEST_LOGPROB),
                    "bytes": list(self.codec.token_bytes(token_id))}
        return {"content": [{**show_token(e.token_id, e.logprob), "top_logprobs": [show_token(*top) for top in e.top]}
                            for e in entries], "refusal": None}


class CompletionAnswer(Answer):
    """OpenAI's legacy completions: plain text, the prompt in front of it on request, logprobs in parallel lists."""
    object = chunk_object = "text_completion"

    def events(self, choice: Choice, chunk: Chunk) -> list:
        first = not choice.started
        text = (choice.echo if self.body.echo and first else "") + chunk.text
        entries = [*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())]
        logprobs = self._logprobs(choice, entries) if entries else None
        if not (text or logprobs or chunk.finish_reason):
            return []
        return [self._event(choice, {"text": text}, logprobs, finished=chunk.finish_reason is not None)]

    def choice_json(self, choice: Choice) -> dict:
        logprobs = None if self.body.logprobs is None else self._logprobs(choice, choice.prompt_logprobs + choice.logprobs)
        return {"index": choice.index, "text": (choice.echo if self.body.echo else "") + choice.text, "logprobs": logprobs,
                "finish_reason": choice.finish_reason, "matched_stop": choice.stop_reason}

    def _logprobs(self, choice: Choice, entries: list[Logprob]) -> dict:
        tops = []
        for e in entries:
            top: dict[str, float] = {}
            for token_id, logprob in [*e.top, (e.token_id, e.logprob)]:  # the sampled token is always among them
                if logprob is not None:
                    top.setdefault(self.codec.token_text(token_id), max(logprob, LOWEST_LOGPROB))
            tops.append(top if self.body.logprobs and e.logprob is not None else None)
        return {"tokens": [self.codec.token_text(e.token_id) for e in entries],
                "token_logprobs": [None if e.logprob is None else max(e.logprob, LOWEST_LOGPROB) for e in entries],
                "top_logprobs": tops, "text_offset": [choice.offset_of_next(e.token_id) for e in entries]}


class GenerateAnswer(Answer):
    """SGLang's own format: every event holds all there is so far."""

    done_after_errors = True

    def __init__(self, *args, single: bool):
        super().__init__(*args)
        self.single = single

    def add(self, chunks: list[Chunk]) -> list:
        """One event for each choice that something arrived for."""
        changed = {choice.index: choice for choice in map(self.take, chunks)}.values()
        if not self.body.stream:
            return []
        return [self.choice_json(c) if self.single else {**self.choice_json(c), "index": c.index} for c in changed]

    def take(self, chunk: Chunk) -> Choice:
        """Add a chunk to its choice, and the JSON of its logprobs to what is there."""
        choice = super().take(chunk)
        if (wanted := choice.request.params.logprobs) is not None:
            for name, entries in (("output", chunk.logprobs or ()), ("input", chunk.prompt_logprobs or ())):
                lists = {"token": [self._token(e.token_id, e.logprob) for e in entries]}
                if wanted:
                    lists["top"] = [None if e.logprob is None else [self._token(*top) for top in e.top] for e in entries]
                for kind, found in lists.items():
                    shown = choice.shown.setdefault(f"{name}_{kind}_logprobs", [])
                    shown += (msgspec.Raw(msgspec.json.encode(entry)) for entry in found)
        return choice

    def last_events(self) -> list:
        return []

    def body_json(self) -> Any:
        found = [self.choice_json(c) for c in self.choices]
        return found[0] if self.single else found

    def choice_json(self, choice: Choice) -> dict:
        reasons = {"stop": {"type": "stop", "matched": choice.stop_reason}, None: None,
                   "length": {"type": "length", "length": len(choice.output_ids)}}
        reason = reasons.get(choice.finish_reason, {"type": choice.finish_reason, "message": "the request was aborted"})
        meta = {"id": choice.request.rid, "finish_reason": reason, "prompt_tokens": len(choice.prompt.ids),
                "completion_tokens": len(choice.output_ids), "cached_tokens": choice.cached_tokens,
                "e2e_latency": time.monotonic() - self.start, **(choice.speculation or {}), **choice.shown}
        return {"text": choice.text, "output_ids": choice.output_ids, "meta_info": meta}

    def _token(self, token_id: int, logprob: float | None) -> tuple:
        return (None if logprob is None else max(logprob, LOWEST_LOGPROB), token_id,
                self.codec.token_text(token_id) if self.body.return_text_in_logprobs else None)


class ScoreAnswer(Answer):
    """The logprobs of each choice of a ScoreBody. The chunks are the engine's whole answers, one for each request."""

    def __init__(self, *args):
        super().__init__(*args)
        self.chunks: dict[str, Chunk] = {}

    def take(self, chunk: Chunk) -> Choice:
        """Keep a chunk, and count it."""
        self.chunks[chunk.rid] = chunk
        return super().take(chunk)

    def body_json(self) -> Any:
        found = read_scores(self.body.choices, [choice.request for choice in self.choices], self.chunks)

        def numbers(entries: list[Logprob]) -> list[float | None]:
            return [None if e.logprob is None else max(e.logprob, LOWEST_LOGPROB) for e in entries]

        return {"scores": [{"text": score.text, "token_ids": [e.token_id for e in score.tokens], "logprobs": numbers(score.tokens),
                            "unconditional_logprobs": None if score.unconditional is None else numbers(score.unconditional)} for score in found],
                "usage": self.usage()}


def _demo() -> None:
    """One body, the requests it becomes, and what three chunks of the engine become."""
    ready = Ready(model="demo", path="", vocab_size=258, context_len=512, max_total_tokens=512, end_ids=[257], config={},
                  tokenizer_json=byte_tokenizer().to_str(), chat_template=CHATML, special_tokens={},
                  generation_defaults={"temperature": 0.6})
    reader = Reader(ready, "demo")
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "n": 2, "stream": true, "stop": "!"}'
    call = reader.chat(body)
    print(body.decode())
    for request in call.requests:
        print(f"  -> {request.rid[-6:]}: {len(request.prompt_ids)} ids, index {request.index}, {request.params}")
    first, second = (r.rid for r in call.requests)
    for chunk in (Chunk(rid=first, text="Hey", output_ids=[39, 68, 88]), Chunk(rid=second, text="Yo", output_ids=[56, 78]),
                  Chunk(rid=first, output_ids=[0], finish_reason="stop", stop_reason="!")):
        for event in call.answer.add([chunk]):
            print(f"  <- {msgspec.json.encode(event['choices'][0]).decode()}")
    print(f"  usage so far: {call.answer.usage()}")
    for wrong in (b'{"messages": []}', b'{"messages": "hi"}', b'{"temprature": 1, "messages": []}', b'{"top_p": NaN}'):
        try:
            reader.chat(wrong)
        except RequestError as error:
            print(f"{wrong.decode()}\n  <- {error.status}: {error}")


if __name__ == "__main__":
    _demo()
