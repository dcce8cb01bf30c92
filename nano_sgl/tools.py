"""Tools: functions that a model may ask the client to call, and the text in which it asks.

The client describes its functions; the model's chat template writes that into the prompt; the model answers with a text of a form that it was
trained on, and the client wants to see a list:

    {"name": "weather", "parameters": {schema}}  --template-->  prompt
    I will look. <tool_call>                                     content      "I will look."
    {"name": "weather", "arguments": {"city": "Rome"}}    --->   tool_calls   [{"id": "call_...", "type": "function", "function":
    </tool_call>                                                                {"name": "weather", "arguments": '{"city": "Rome"}'}}]

Names. A *format* is how a family of models writes a call: the server knows it by its name (`--tool-call-parser`), or from the template, if that
shows it. A `Toolbox` is what one request may call, and how. `Calls` sorts a text that comes in pieces; a `Reply` sorts thoughts out before that
(reasoning.py), and is what a message is made of, whole or in deltas.

    tool_choice      "none"       the template is not told of tools, and nothing is looked for
                     "auto"       calls are looked for. Held to a form, behind the words that begin a call, where a tool is `strict`, or
                                  parallel_tool_calls is false; what a grammar of the request says is then the other thing that may come
                     "required"   the output is calls and nothing else: a structural tag (structural_tag.py), the arguments after each schema
                     {function}   one call of this one

Invariants. Deltas add up to the message, however the text was cut. What has not the form of a call of a known tool is content, as it was
written; but blanks around calls are dropped. Arguments are the text that the model wrote, without a look inside: under a grammar they are valid,
and a text that was cut may cut them, too, which its finish_reason says.

Cost: a few searches a piece, in HEAD_SPARE characters and a name at most, and a look at each character of arguments. Where it stops: two formats;
other models' calls stay text. Where a grammar holds bare calls, one that is spelled in another way than the grammar spells it is content.
Sources: OpenAI's API reference (chat, function calling); the templates of Hermes 2 Pro, Qwen 2.5 and 3, and Llama 3.1; SGLang's parsers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import regex

from .protocol import Grammar, RequestError, show
from .reasoning import CONTENT, REASONING, Splitter, Style, overlap


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What can be called. parameters: the JSON schema of its arguments, an object; none: it takes none. strict: calls hold it, under "auto", too."""
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool as OpenAI's API has it. type: "function"."""
    type: str
    function: Function


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that must be called. type: "function"."""
    type: str
    function: Named


class Format(NamedTuple):
    """How a call is written: `open {"name": ..., key: ...} close`. trigger: what announces one in the middle of a text; bare: at the beginning of a
    text, and after another call, it may come without; begun: how that starts under a grammar; shown: what a template has that explains it."""
    open: str
    key: str
    close: str
    separator: str
    trigger: str
    bare: bool
    begun: str
    shown: regex.Pattern


HERMES = Format("<tool_call>\n", "arguments", "\n</tool_call>", "\n", "<tool_call>", False, "",
                regex.compile(r"""<tool_call>(\\+n|\s)*\{\\*["'](name|arguments)\\*["']"""))
LLAMA3 = Format("", "parameters", "", "; ", "<|python_tag|>", True, '{"name": "', regex.compile(r'\{\\*"name\\*": function name, \\*"parameters\\*"'))
FORMATS = {"hermes": HERMES, "qwen": HERMES, "qwen25": HERMES, "llama3": LLAMA3}
HEAD = regex.compile(r"""\s*+\{\s*+ (?:"type"\s*+:\s*+"function"\s*+,\s*+)? "name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+,\s*+
                         "(?:arguments|parameters)"\s*+:\s*+(?=\{)""", regex.VERBOSE)
LEADING_BLANKS = " \t\r\n;"      # what may stand before a bare call, in free_text's grammar as well
HEAD_SPARE = TAIL_LIMIT = 256    # characters: of the beginning of a call, beside the name; and of its end
JSON_END = regex.compile(r'["\\{}]')


def detect(template: str) -> Format | None:
    """The format that a chat template shows to the model, if it shows one that is known."""
    found = [one for one in (HERMES, LLAMA3) if one.shown.search(template)]
    return found[0] if len(found) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------- what is asked

class Toolbox:
    """The tools of one request: for its template, its grammar and its answer."""

    def __init__(self, tools: list[Tool], choice: str | ToolChoice, parallel: bool, form: Format):
        self.tools, self.choice, self.parallel, self.form = tools, choice, parallel, form
        self.names = [tool.function.name for tool in tools]
        self.own: str | None = None         # the kind of the request's own grammar, beside which calls are held

    @classmethod
    def of(cls, tools: list[Tool] | None, choice: str | ToolChoice | None, parallel: bool, form: Format | None, takes_tools: bool) -> Toolbox | None:
        """None where nothing can be called. takes_tools: whether the template writes tools into a prompt. RequestError where that is not possible."""
        if choice not in (None, "none", "auto", "required") and getattr(choice, "type", None) != "function":
            raise RequestError('tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; got '
                               f"{show(choice if isinstance(choice, str) else msgspec.to_builtins(choice))}", "tool_choice")
        if not tools and choice not in (None, "none", "auto"):
            raise RequestError(f"tool_choice is {'a function' if isinstance(choice, ToolChoice) else show(choice)}, but there are no tools",
                               "tool_choice")
        if not tools or choice == "none":
            return None
        names = [tool.function.name for tool in tools]
        if "" in names or len(set(names)) < len(names):
            raise RequestError(f"tools: every function needs a name of its own; got {show(names)}", "tools")
        for n, tool in enumerate(tools):
            if tool.type != "function":
                raise RequestError(f"tools[{n}].type must be \"function\"; got {show(tool.type)}", "tools")
            if (tool.function.parameters or {}).get("type", "object") != "object":
                raise RequestError(f"tools[{n}].function.parameters must describe an object, whose properties are the arguments; got type "
                                   f"{show(tool.function.parameters['type'])}", "tools")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise RequestError(f"tool_choice: there is no tool {show(choice.function.name)}; there are {show(names)}", "tool_choice")
        if not takes_tools:
            raise RequestError("tools: the model's chat template ignores them, so that it would never hear of any: leave them out, or start the "
                               "server with a --chat-template that writes tools", "tools")
        if form is None:
            raise RequestError(f"tools: how this model writes its calls is not known: start the server with --tool-call-parser, one of "
                               f"{', '.join(FORMATS)}", "tools")
        return cls(tools, choice or "auto", parallel, form)

    @property
    def chars(self) -> int:
        """How long they are in a prompt, about: their names, descriptions and parameters."""
        return sum(len(one.name) + len(one.description or "") + len(json.dumps(one.parameters, ensure_ascii=False))
                   for one in (tool.function for tool in self.tools))

    def for_template(self) -> list[dict]:
        """The tools as templates expect them."""
        return [msgspec.to_builtins(tool) for tool in self.tools]

    @property
    def held(self) -> bool:
        """Is the output held to the form of calls, even if the request has no grammar?"""
        return self.choice != "auto" or not self.parallel or any(tool.function.strict for tool in self.tools)

    def constraint(self, grammar: Grammar | None) -> dict | None:
        """The structural tag that the output must follow; None: it is not held to its calls. grammar: what else the request asks for. RequestError
        where both cannot be."""
        forced = self.choice != "auto"
        if forced and grammar is not None:
            raise RequestError(f"tool_choice asks for a call and {grammar.kind} for something else: leave one of them out", "tool_choice")
        if grammar is None and not self.held:
            return None
        self.own = grammar and grammar.kind
        tags = [self._tag(tool, forced or grammar is not None) for tool in self.tools
                if not isinstance(self.choice, ToolChoice) or tool.function.name == self.choice.function.name]
        once = not self.parallel or isinstance(self.choice, ToolChoice)
        calls = {"type": "tags_with_separator", "tags": tags, "separator": self.form.separator, "at_least_one": True, "stop_after_first": once}
        if not forced and grammar is None:
            calls = {"type": "triggered_tags", "tags": tags, "triggers": [self.form.trigger], "stop_after_first": once}
            if self.form.bare:
                marked = [tag | {"begin": self.form.trigger + tag["begin"]} for tag in tags]
                calls |= {"tags": tags + marked, "triggers": [self.form.trigger + self.form.begun], "leading": [self.form.begun]}
        elif not forced:
            calls = {"type": "or", "elements": [as_format(grammar), calls]}
        return {"type": "structural_tag", "format": calls}

    def _tag(self, tool: Tool, by_schema: bool) -> dict:
        """A call of a tool. by_schema: hold the arguments to the schema even if the tool is not strict."""
        function = tool.function
        schema = {"type": "object"} if function.parameters is None else {"type": "object"} | function.parameters
        content = {"type": "json_schema", "json_schema": schema, "strict": bool(function.strict) or function.parameters is None}
        if not by_schema and not function.strict:
            content = {"type": "json_schema", "json_schema": {"type": "object"}, "strict": False}
        begin = f'{self.form.open}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{self.form.key}": '
        return {"type": "tag", "begin": begin, "content": content, "end": "}" + self.form.close}

    def blame(self, error: RequestError) -> RequestError:
        """What a refusal of that structural tag means to a client, who has sent tools, and perhaps a grammar."""
        if error.param != "structural_tag":
            return error
        if self.own and (found := regex.search(r"^(?:structural_tag: )?/format/elements/0(?:/\w+)*: (.*)", error.message, regex.DOTALL)):
            return RequestError(f"{self.own}: {found[1]}", self.own, error.status)
        found = regex.search(r"/tags/(\d+)/content/json_schema: (.*)", error.message, regex.DOTALL)
        names = [self.choice.function.name] if isinstance(self.choice, ToolChoice) else self.names
        return RequestError(f"tools: the parameters of {names[int(found[1]) % len(names)]!r}: {found[2]}" if found else f"tools: {error.message}",
                            "tools", error.status)


def as_format(grammar: Grammar) -> dict:
    """A grammar of a request as a format of structural tags."""
    kind, text, options = grammar
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": one} for one in text]}
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": text}
    if kind in ("json_object", "json_schema"):
        own = {name: value for name, value in options.items() if name in ("strict", "any_order")}
        return {"type": "json_schema", "json_schema": {"type": "object"} if text is None else text} | own
    raise RequestError(f"{kind} does not go together with tools: write the calls into it, too, and leave the tools out", kind)


# -------------------------------------------------------------------------------------------------------------------- what is answered

class Calls:
    """Sorts a text that comes in pieces into content and calls. One for each output.

    `step` is what to do with the text that is `held`; it says whether there may be more to do. `raw`: what was taken from the text since the
    beginning of something that may be a call. Only a little is held, so that a look at it costs little, whatever a model writes."""

    def __init__(self, form: Format, names: Iterable[str], exact: bool = False):
        """exact: a grammar holds calls, and takes what is spelled in another way than it spells calls for content."""
        self.form, self.names, self.begun, self.exact = form, set(names), form.begun if exact else "", exact
        self.longest_head = HEAD_SPARE + max(len(json.dumps(name)) for name in self.names)
        self.held = self.raw = ""
        self.blanks: list[str] = []
        self.count, self.fresh, self.ended = 0, form.bare, False
        self.depth, self.quoted = 0, False
        self.found: list[dict] = []
        self.taken: list[str] = []          # pieces of what is to be looked at as a whole
        self.step: Callable[[], bool] = self._text

    def feed(self, text: str, ended: bool = False) -> list[dict]:
        """Deltas of a message, {"content": ...} or {"tool_calls": [...]}, of what is certain. ended: nothing follows."""
        self.held, self.ended, self.found = self.held + text, ended, []
        while self.step():
            pass
        if ended:
            if not self.exact or self.step != self._head:       # or a call was cut before its name
                self._say(self.raw + self.held)
            if any(self.blanks) and not self.count:
                self.found.append({CONTENT: "".join(self.blanks)})
            self.held, self.raw, self.blanks = "", "", []
        return self.found

    def _say(self, text: str) -> None:
        """Content. Blanks at its end wait: before a call, and after one, they are dropped."""
        body = text.rstrip()
        if body:
            self.found.append({CONTENT: "".join([*self.blanks, body])})
            self.blanks = []
        self.blanks.append(text[len(body):])

    def _go(self, step: Callable[[], bool], taken: int, raw: str = "") -> bool:
        self.step, self.held, self.raw = step, self.held[taken:], raw
        return True

    def _text(self) -> bool:
        """Outside of calls."""
        if self.fresh:
            left = self.held.lstrip(LEADING_BLANKS)
            self.taken.append(self.held[:len(self.held) - len(left)])
            self.held = left
            if not left and not self.ended:
                return False                    # only blanks so far
            self.fresh, before, self.taken = False, "".join(self.taken), []
            if left.startswith("{"):
                return self._go(self._head, 0, before)
            self._say(before)
        before, trigger, _ = self.held.partition(self.form.trigger)
        if trigger:
            self._say(before)
            return self._go(self._head, len(before) + len(trigger), trigger)
        keep = 0 if self.ended else overlap(self.held, self.form.trigger)
        self._say(self.held[:len(self.held) - keep])
        self.held = self.held[len(self.held) - keep:]
        return False

    def _head(self) -> bool:
        """From the beginning of a call to its arguments."""
        head = HEAD.match(self.held, 0, self.longest_head, partial=True)
        if head and head.partial and len(self.held) < self.longest_head or len(self.held) < len(self.begun) and self.begun.startswith(self.held):
            return False
        if not self.held.startswith(self.begun) or head and head.partial:
            head = None
        name = read_json(head[1]) if head else None
        if name not in self.names:
            return self._no_call()
        self._begin(name)
        self.depth, self.quoted = 0, False
        return self._go(self._arguments, head.end())

    def _no_call(self) -> bool:
        """What was taken for a call is none, or written in another order."""
        if self.form.close:
            return self._go(self._whole, 0, self.raw)
        self._say(self.raw)
        return self._go(self._text, 0)

    def _begin(self, name: str, arguments: str = "") -> None:
        self.blanks = []
        call = {"index": self.count, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}
        self.found.append({"tool_calls": [call]})
        self.count += 1

    def _arguments(self) -> bool:
        """Up to the bracket that closes them."""
        at, end = 0, None
        while end is None and (mark := JSON_END.search(self.held, at)):
            at = mark.end()
            if mark[0] == "\\":
                if at == len(self.held) and not self.ended:     # what it escapes is not here yet
                    at -= 1
                    break
                at += self.quoted
            elif mark[0] == '"':
                self.quoted = not self.quoted
            elif not self.quoted:
                self.depth += 1 if mark[0] == "{" else -1
                end = at if not self.depth else None
        else:
            at = len(self.held) if end is None else end
        if at:
            self.found.append({"tool_calls": [{"index": self.count - 1, "function": {"arguments": self.held[:at]}}]})
        self._go(self._arguments if end is None else self._tail, at)
        return end is not None

    def _tail(self) -> bool:
        """From the arguments to the end of the call."""
        close, left = self.form.close.strip(), self.held[:TAIL_LIMIT].lstrip()
        if bracket := left.startswith("}"):
            left = left[1:].lstrip() if close else left[1:]
        if (bracket or close) and left.startswith(close):
            self.fresh = self.form.bare
            return self._go(self._text, min(len(self.held), TAIL_LIMIT) - len(left) + len(close))
        if not close.startswith(left) or len(self.held) >= TAIL_LIMIT:
            return self._go(self._text, 0)      # whatever it is, it is shown
        if self.ended:
            self.held = ""
        return False

    def _whole(self) -> bool:
        """A call that was not understood as it came: as a whole, it may be."""
        close = self.form.close.strip()
        before, end, rest = self.held.partition(close)
        if self.exact and self.ended and not end:   # it was cut
            self.taken, self.held, self.raw = [], "", ""
            return False
        keep = 0 if end or self.ended else overlap(before, close)
        self.taken.append(before[:len(before) - keep])
        if not end and not self.ended:
            self.held = before[len(before) - keep:]
            return False
        body, self.taken = "".join(self.taken), []
        call = read_json(body)
        arguments = (call.get("arguments", call.get("parameters"))) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if isinstance(arguments, dict) and isinstance(call.get("name"), str) and call["name"] in self.names:
            self._begin(call["name"], json.dumps(arguments, ensure_ascii=False))
        else:
            self._say(self.raw + body + end)
        return self._go(self._text, len(self.held) - len(rest))


def read_json(text: str) -> Any:
    """The value, or None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Reply:
    """What a model says, as the fields of a message. style and opened: see reasoning.py; None: it does not think, or that is not to be told apart."""

    def __init__(self, style: Style | None = None, opened: bool = False, tools: Toolbox | None = None, at_once: bool = False):
        """at_once: thoughts come in one piece, when they end."""
        self.thoughts: list[str] | None = [] if at_once else None
        self.splitter = Splitter(style, opened) if style else None
        self.calls = Calls(tools.form, tools.names, tools.held) if tools else None

    def feed(self, text: str, ended: bool = False) -> list[dict]:
        """Deltas of the message: what is certain now. ended: nothing follows."""
        parts = self.splitter.feed(text, ended) if self.splitter else [(CONTENT, text)] if text else []
        if self.splitter and self.thoughts is not None:
            self.thoughts += [part for field, part in parts if field == REASONING]
            parts = [(field, part) for field, part in parts if field != REASONING]
            if self.thoughts and (ended or self.splitter.field == CONTENT):
                parts, self.thoughts = [(REASONING, "".join(self.thoughts)), *parts], []
        if self.calls is None:
            return [{field: part} for field, part in parts]
        found: list[dict] = []
        for field, part in parts:
            found += self.calls.feed(part) if field == CONTENT else [{field: part}]
        return found + (self.calls.feed("", ended=True) if ended else [])


def add_up(deltas: Iterable[dict]) -> dict:
    """The message that deltas are of: its content, and what else it has."""
    message: dict[str, Any] = {CONTENT: ""}
    for delta in deltas:
        for field, part in delta.items():
            if field != "tool_calls":
                message[field] = message.get(field, "") + part
                continue
            calls = message.setdefault("tool_calls", [])
            for call in part:
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if not message[CONTENT] and len(message) > 1:
        message[CONTENT] = None
    return message


if __name__ == "__main__":
    box = Toolbox([Tool("function", Function("weather", None, {"properties": {"city": {"type": "string"}}}))], "required", True, HERMES)
    print(json.dumps(box.constraint(None)))
    said, reply = 'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome}"}}\n</tool_call>', Reply(tools=box)
    all_deltas = [delta for at in range(0, len(said), 16) for delta in reply.feed(said[at:at + 16], ended=at + 16 >= len(said))]
    for shown in all_deltas:
        print("   ", json.dumps(shown))
    print(json.dumps(add_up(all_deltas)))
