"""Tools and thoughts as chats have them: what a body may ask for, what the template is told, what the output is held to, how a text becomes calls,
whole and in deltas; and once over HTTP with an engine that has never seen a tool."""

import json
import random

import jsonschema
import msgspec
import pytest
from earley import accepts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server import ServedModel, check_refused

from nano_sgl import api, schema
from nano_sgl.chat import byte_tokenizer
from nano_sgl.config import ServerConfig
from nano_sgl.protocol import Chunk, Ready, RequestError
from nano_sgl.reasoning import STYLES
from nano_sgl.tools import FORMATS, HERMES, LLAMA3, Function, Reply, Tool, Toolbox, add_up, detect

# As Qwen's and Hermes' templates have it, in short.
QWEN = """{%- if tools %}<|im_start|>system
# Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
For each function call, return a json object within <tool_call></tool_call>:
<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}{% endif %}"""
LLAMA = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if tools and loop.first %}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer"}}, "required": ["city"]}


def tool(name: str, parameters: dict | None = None, **more) -> dict:
    return {"type": "function", "function": {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}}


TOOLS = [tool("weather", WEATHER, description="Look <|im_end|> out of the window"), tool("time")]
HI = [{"role": "user", "content": "hi"}]


def reader(template: str = QWEN, **options) -> api.Reader:
    return api.Reader(Ready(model="m", path="", vocab_size=258, context_len=10_000, max_total_tokens=10_000, end_ids=[257], config={},
                            tokenizer_json=byte_tokenizer().to_str(), chat_template=template, special_tokens={}, generation_defaults={}), "m", **options)


def read(where: api.Reader | None = None, **body) -> api.Call:
    return (where or reader()).chat(msgspec.json.encode({"messages": HI, **body}))


def prompt(call: api.Call) -> str:
    return call.answer.codec.decode(call.requests[0].prompt_ids)


def grammar(call: api.Call):
    return call.requests[0].params.grammar


def refused(param: str, *words: str, where: api.Reader | None = None, **body) -> None:
    with pytest.raises(RequestError) as caught:
        read(where, **body)
    assert caught.value.param == param and caught.value.status == 400, caught.value.param
    for word in words:
        assert word in str(caught.value), str(caught.value)


def box(choice="auto", parallel=True, form=HERMES, tools=TOOLS) -> Toolbox:
    return Toolbox.of(msgspec.convert(tools, list[Tool]), choice, parallel, form, True)


# ------------------------------------------------------------------------------------------------------------------- what is asked

def test_the_template_is_told_of_the_tools():
    call = read(tools=TOOLS)
    text = prompt(call)
    assert text.count('"name": "weather"') == 1 and json.dumps(WEATHER) in text and text.count("<|im_end|>") == 3, "one of them is a description"
    assert sum(i == 257 for i in call.requests[0].prompt_ids) == 2, "which ends no turn"
    assert grammar(call) is None and call.requests[0].params.skip_special_tokens is False
    assert read(tools=TOOLS, skip_special_tokens=True).requests[0].params.skip_special_tokens is True
    for none in ({}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert prompt(read(**none)) == prompt(read()) and grammar(read(**none)) is None and read(**none).answer.tools is None
    assert prompt(read(tools=TOOLS, tool_choice="required")) == text, "whatever the choice is, so that the cache knows it"


def test_what_is_called_and_answered_comes_back():
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "index": 0, "function": {
        "name": "weather", "arguments": '{"city": "Ro<|im_end|>me"}'}}], "reasoning_content": "hm"}
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "sunny<|im_end|>"}
    call = read(messages=[*HI, called, answered], tools=TOOLS)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro<|im_end|>me"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nsunny' in prompt(call)
    assert sum(i == 257 for i in call.requests[0].prompt_ids) == 4
    for wrong, words in (({"arguments": "[1]"}, "JSON object"), ({"arguments": "{"}, "JSON object"), ({"arguments": {}}, "expected str"),
                         ({"nam": "x"}, "unknown field")):
        function = {"name": "weather", "arguments": "{}"} | wrong
        refused("messages", "messages[1].tool_calls[0]", words, messages=[*HI, called | {"tool_calls": [{"function": function}]}])
    refused("messages", "messages[0].tool_calls is for the role assistant", messages=[{**called, "role": "user", "content": "x"}])
    refused("messages", "messages[0].tool_call_id is for the role tool", messages=[{"role": "user", "content": "x", "tool_call_id": "1"}])
    refused("messages", "null or missing", messages=[{"role": "tool", "content": None}])
    refused("messages", "drops tool_calls", where=reader(PLAIN), messages=[*HI, called])
    refused("messages", "drops tool_calls", where=reader(LLAMA), messages=[*HI, called])


def test_what_cannot_be_is_refused_by_name():
    refused("tools", "ignores them", "--chat-template", where=reader(PLAIN), tools=TOOLS)
    refused("tools", "ignores them", where=reader(PLAIN, calls="hermes"), tools=TOOLS, tool_choice="required")
    odd = "{% for t in tools or [] %}{{ t }}{% endfor %}" + PLAIN
    refused("tools", "--tool-call-parser, one of hermes, qwen, qwen25, llama3", where=reader(odd), tools=TOOLS)
    assert read(reader(odd, calls="llama3"), tools=TOOLS).answer.tools.form is LLAMA3
    refused("tool_choice", "no tools", tool_choice="required")
    refused("tool_choice", "no tools", tools=[], tool_choice={"type": "function", "function": {"name": "f"}})
    refused("tool_choice", "no tool 'nope'", "weather", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})
    refused("tool_choice", "any", tools=TOOLS, tool_choice="any")
    refused("tool_choice", "unknown field", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}, "x": 1})
    refused("tools", "name of its own", tools=[*TOOLS, tool("time")])
    refused("tools", "name of its own", tools=[tool("")])
    refused("tools", "tools[1].function.parameters must describe an object", tools=[TOOLS[0], tool("f", {"type": "array"})])
    for wrong in ("x", {}, [1], [{"type": "function"}], [{"type": "retrieval", "function": {"name": "f"}}], [tool("f", [])], [tool("f") | {"x": 1}],
                  [tool("f", x=1)], [tool("f", strict="yes")]):
        refused("tools", tools=wrong)
    for other in ({"regex": "a"}, {"response_format": {"type": "json_object"}}):
        refused("tool_choice", "tool_choice asks for a call", tools=TOOLS, tool_choice="required", **other)
    strict = [tool("f", strict=True)]
    for fields, param in (({"choice": []}, "choice"), ({"regex": "a", "choice": ["a"]}, "choice"), ({"structural_tag": [1]}, "structural_tag"),
                          ({"json_strict": True}, "json_strict"), ({"thinking_budget": -1}, "thinking_budget"), ({"regex": "x" * 2**21}, "regex")):
        refused(param, tools=strict, **fields)
    refused("structural_tag", "does not go together", tools=TOOLS, structural_tag={"format": {"type": "any_text"}})
    refused("parallel_tool_calls", "expected bool", tools=TOOLS, parallel_tool_calls="no")
    with pytest.raises(ValueError, match="tool_call_parser is 'x', expected one of hermes"):
        ServerConfig(tool_call_parser="x")
    with pytest.raises(ValueError, match="reasoning_parser is 'x', expected one of think, deepseek-r1"):
        ServerConfig(reasoning_parser="x")


def test_the_format_is_that_of_the_template():
    assert detect(QWEN) is HERMES and detect(LLAMA) is LLAMA3 and detect(PLAIN) is None and detect(QWEN + LLAMA) is None
    assert detect('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}') is HERMES
    for other in ("<tool_call>\n<function=example>", "<tool_call>{function-name}\n<arg_key>", '[TOOL_CALLS] [{"name": "f"}]'):
        assert detect(other) is None
    two = {"default": PLAIN, "tool_use": QWEN}
    both = api.Reader(Ready(model="m", path="", vocab_size=258, context_len=10_000, max_total_tokens=10_000, end_ids=[257], config={},
                            tokenizer_json=byte_tokenizer().to_str(), chat_template=two, special_tokens={}, generation_defaults={}), "m")
    assert prompt(read(both)) == prompt(read(reader(PLAIN))) and prompt(read(both, tools=TOOLS)) == prompt(read(tools=TOOLS))


# ------------------------------------------------------------------------------------------------------------ what the output is held to

def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME, NOW, WRONG, ODD = call("weather", '{"city": "Rome"}'), call("time", "{}"), call("time", '{"x": 1}'), call("weather", '{"city": "Rome", "x": 1}')


def held(tag: dict | None, *texts: str) -> list[bool]:
    made = schema.rules("structural_tag", tag)
    return [accepts(made, text.encode()) for text in texts]


def test_required_and_named_calls():
    assert held(box("required").constraint(None), ROME, NOW, f"{ROME}\n{NOW}\n{NOW}", ODD) == [True] * 4
    assert not any(held(box("required").constraint(None), "", "Hello.", WRONG, f"Well. {ROME}", f"{ROME} There.", call("f", "{}"), call("weather", "{}")))
    assert held(box("required", parallel=False).constraint(None), ROME, f"{ROME}\n{NOW}") == [True, False]
    strict = [tool("weather", WEATHER, strict=True), TOOLS[1]]
    assert held(box("required", tools=strict).constraint(None), ROME, ODD, NOW) == [True, False, True]
    named = msgspec.convert({"type": "function", "function": {"name": "time"}}, api.ToolChoice)
    assert held(box(named).constraint(None), NOW, ROME, f"{NOW}\n{NOW}", WRONG) == [True, False, False, False]
    llama = box("required", form=LLAMA3).constraint(None)
    assert held(llama, '{"name": "time", "parameters": {}}', '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}') == [True, True]
    assert not any(held(llama, '<|python_tag|>{"name": "time", "parameters": {}}', ROME, '{"name": "time", "parameters": {}};'))
    quoted = box("required", tools=[tool('a"b\\é')]).constraint(None)
    assert held(quoted, '<tool_call>\n{"name": "a\\"b\\\\é", "arguments": {}}\n</tool_call>') == [True]


def test_auto_is_held_to_what_is_strict():
    assert box().constraint(None) is None
    strict = [tool("weather", WEATHER, strict=True), TOOLS[1]]
    tag = box(tools=strict).constraint(None)
    assert held(tag, "", "Hello <tool", ROME, f"I look. {ROME} and {WRONG}\nDone.") == [True] * 4, "of the other tool any object is taken"
    assert not any(held(tag, ODD, "<tool_call>", call("f", "{}"), call("time", "[]")))
    assert held(box(parallel=False).constraint(None), "", f"I look.{ODD}", f"{ROME}\n{NOW}", f"{ROME} Done.") == [True, True, False, False]
    llama = box(form=LLAMA3, tools=strict).constraint(None)
    assert held(llama, 'Hm {"name": ', '{"name": "weather", "parameters": {"city": "Rome"}} Hm.', '{"name": "f') == [True, True, False]


@pytest.mark.parametrize("given, good, bad", [
    ({"regex": "a+"}, "aa", "b"), ({"choice": ["x", "yes"]}, "yes", "no"), ({"ebnf": 'root ::= "(" root ")" | "."'}, "((.))", "(."),
    ({"json_object": True}, '{"a": []}', "[]"), ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
        "type": "object", "properties": {"a": {"type": "integer"}}}}}}, '{"a": 1}', '{"b": 1}')])
def test_under_a_grammar_a_call_is_the_other_thing_that_may_come(given, good, bad):
    made = grammar(read(tools=TOOLS, **given))
    assert made.kind == "structural_tag" and made.options == {}
    assert held(json.loads(made.text), good, ROME, f"{ROME}\n{NOW}") == [True] * 3
    assert not any(held(json.loads(made.text), bad, good + ROME, WRONG, ""))


def test_options_and_thoughts_go_on():
    made = read(tools=TOOLS, json_object=True, json_whitespace="compact").requests[0].params
    assert made.grammar.options == {"whitespace": "compact"}
    thinking = reader(reasoning="qwen3")
    made = grammar(read(thinking, tools=TOOLS, tool_choice="required"))
    assert made.options == {"reasoning_end": "</think>"}
    rules = schema.rules(made.kind, made.text, **made.options)
    assert accepts(rules, f"Let me see <tool_call></think>\n\n{ROME}".encode()) and not accepts(rules, ROME.encode())


def test_a_schema_that_is_refused_is_blamed_on_its_tool():
    for choice, parallel in (("required", True), ("auto", False)):
        sent = read(tools=[TOOLS[0], tool("f", {"properties": {"a": {"type": "no"}}}, strict=True)], tool_choice=choice, parallel_tool_calls=parallel)
        kind, text, options = grammar(sent)
        with pytest.raises(schema.GrammarError) as caught:
            schema.rules(kind, text, **options)
        error = sent.answer.blame(RequestError(f"structural_tag: {caught.value}", "structural_tag"))
        assert error.param == "tools" and str(error).startswith("tools: the parameters of 'f': type at /properties/a: ")
    assert sent.answer.blame(other := RequestError("x", "prompt")) is other
    assert read().answer.blame(other) is other


def test_a_grammar_that_is_refused_is_blamed_on_its_field():
    for given, param, why in (({"json_schema": {"type": "no"}}, "json_schema", "type at /"), ({"regex": "a(?=b)"}, "regex", "lookahead"),
                              ({"ebnf": "root ::= x"}, "ebnf", "rule x")):
        sent = read(tools=TOOLS, **given)
        kind, text, options = grammar(sent)
        with pytest.raises(schema.GrammarError) as caught:
            schema.rules(kind, text, **options)
        error = sent.answer.blame(RequestError(f"structural_tag: {caught.value}", "structural_tag"))
        assert error.param == param and str(error).startswith(f"{param}: ") and why in str(error) and "/elements" not in str(error)


BARE = '{"name": "weather", "parameters": {"city": "Rome"}}'


def test_bare_calls_are_held_where_they_are_read():
    """Llama's calls: what the grammar takes and the parser calls is valid; what is none is content, in the middle of a text."""
    form = box(form=LLAMA3, tools=[tool("weather", WEATHER, strict=True), TOOLS[1]])
    made, wrong = schema.rules("structural_tag", form.constraint(None)), BARE.replace("city", "town")
    for text, content, calls in ((f"Let me see. {BARE}", f"Let me see. {BARE}", 0), ('see {"name": "Bob"}', 'see {"name": "Bob"}', 0), (f" ;\n{BARE}", None, 1),
                                 (f"{BARE}; {BARE}{BARE} Hm {BARE}", f" Hm {BARE}", 3), (f"Hm<|python_tag|>{BARE}", "Hm", 1),
                                 (f'{wrong.replace(": ", ":")}', wrong.replace(": ", ":"), 0), ('{"a": 1}', '{"a": 1}', 0)):
        found = sorted_out(text, Reply(tools=form))
        assert accepts(made, text.encode()) and found["content"] == content and len(found["calls"]) == calls, text
    for text in (wrong, f" {wrong}", f"{BARE};{wrong}", f"Hm <|python_tag|>{wrong}", f"Hm <|python_tag|>{BARE}\n{wrong}", '{"name": "Bob"}'):
        assert not accepts(made, text.encode()), text
    pieces, rng, taken = ["Hm", " ", ";", "{", '{"name"', BARE, wrong, wrong.replace(": ", ":"), "<|python_tag|>", '{"type": "function", "name": "time"}'], \
        random.Random(1), 0
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 5)))
        if accepts(made, text.encode()):
            taken += 1
            for name, arguments in sorted_out(text, Reply(tools=form))["calls"]:
                assert name == "weather" and json.loads(arguments) == {"city": "Rome"}, text
    assert taken > 50


# ---------------------------------------------------------------------------------------------------------------- what is answered

def sorted_out(text: str, reply: Reply, cuts=()) -> dict:
    """The message that a text is, its ids left out."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    deltas = [delta for first, last in zip(edges, edges[1:]) for delta in reply.feed(text[first:last])] + reply.feed("", ended=True)
    assert all("tool_calls" in delta or all(delta.values()) for delta in deltas), "no empty deltas"
    message = add_up(deltas)
    for made in message.get("tool_calls", ()):
        assert made.pop("id").startswith("call_") and made.pop("type") == "function"
    return {"content": message["content"], "calls": [tuple(made["function"].values()) for made in message.get("tool_calls", ())]}


R, T = ("weather", '{"city": "Rome"}'), ("time", "{}")
LINE = '{"name": "time", "arguments": {}}'
TEXTS = [  # format, text, content, calls
    (HERMES, "Hello.", "Hello.", []), (HERMES, "", "", []), (HERMES, " Hello.\n\n", " Hello.\n\n", []), (HERMES, " \n", " \n", []),
    (HERMES, ROME, None, [R]), (HERMES, f"I look.\n{ROME}", "I look.", [R]), (HERMES, f"{ROME}\n{NOW}\n", None, [R, T]),
    (HERMES, f"\n{ROME} So: {NOW} Done. ", " So: Done.", [R, T]),
    (HERMES, f"<tool_call>{LINE}</tool_call>", None, [T]), (HERMES, f"<tool_call> {LINE} ", None, [T]), (HERMES, f"<tool_call>{LINE[:-1]}", None, [T]),
    (HERMES, '<tool_call>{"name":"time","arguments":{}}</tool_call>', None, [T]),
    (HERMES, call("weather", '{"city": "a\\"}\\\\", "b": {"c": [{}, "</tool_call>"]}}'), None,
     [("weather", '{"city": "a\\"}\\\\", "b": {"c": [{}, "</tool_call>"]}}')]),
    (HERMES, call("weather", '{"city": "Ro'), None, [("weather", '{"city": "Ro}\n</tool_call>')]),
    (HERMES, '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>!', "!", [R]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', None, [R]),
    (HERMES, '<tool_call>{"name": "weather", "parameters": {"city": "Rome"}}</tool_call>', None, [R]),
    (HERMES, '<tool_call>{"type": "function", "name": "time", "arguments": {}}</tool_call>', None, [T]),
    (HERMES, call("f", "{}"), call("f", "{}"), []), (HERMES, f"{call('f', '{}')}{NOW}", call("f", "{}"), [T]),
    (HERMES, call("time", "[]"), call("time", "[]"), []), (HERMES, "a <tool_call>b</tool_call> c", "a <tool_call>b</tool_call> c", []),
    (HERMES, "a <tool_call>", "a <tool_call>", []), (HERMES, 'a <tool_call>{"name": "ti', 'a <tool_call>{"name": "ti', []),
    (HERMES, '<tool_call>{"name": "time", "arguments": ', '<tool_call>{"name": "time", "arguments": ', []), (HERMES, "<tool_cal", "<tool_cal", []),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}, "id": 1}</tool_call>', ', "id": 1}</tool_call>', [T]),
    (HERMES, '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>', '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>', []),
    (HERMES, '{"name": "time", "arguments": {}}', '{"name": "time", "arguments": {}}', []),
    (LLAMA3, '{"name": "time", "parameters": {}}', None, [T]), (LLAMA3, '\n<|python_tag|>{"name": "time", "parameters": {}}', None, [T]),
    (LLAMA3, '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}', None, [T, R]),
    (LLAMA3, '{"name": "time", "parameters": {}}{"name": "time", "arguments": {}} Done', " Done", [T, T]),
    (LLAMA3, 'Look: <|python_tag|>{"type": "function", "name": "time", "parameters": {}}\n', "Look:", [T]),
    (LLAMA3, '{"x": 1}', '{"x": 1}', []), (LLAMA3, ' {"x": {"name": "time"}} <', ' {"x": {"name": "time"}} <', []),
    (LLAMA3, 'So {"name": "time", "parameters": {}}', 'So {"name": "time", "parameters": {}}', []), (LLAMA3, ";", ";", []),
    (LLAMA3, '<|python_tag|>search.call(q="a")', '<|python_tag|>search.call(q="a")', []), (LLAMA3, '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', []),
    (LLAMA3, '{"name": "time", "parameters": {}', None, [T]), (LLAMA3, '{"name": "time", "parameters": {"a', None, [("time", '{"a')]),
    (LLAMA3, '{"name": "time", "parameters": {}} ', None, [T]), (LLAMA3, "", "", []),
]


@pytest.mark.parametrize("form, text, content, calls", TEXTS, ids=[str(n) for n in range(len(TEXTS))])
def test_a_text_is_content_and_calls_however_it_is_cut(form, text, content, calls):
    meant = {"content": content, "calls": calls}
    assert sorted_out(text, Reply(tools=box(form=form))) == meant
    for cuts in ([range(len(text))] + [[at] for at in range(len(text))]):
        assert sorted_out(text, Reply(tools=box(form=form)), cuts) == meant, cuts


@pytest.mark.parametrize("form, begun, more", [
    (HERMES, '<tool_call>{"name": "', "aaaa"), (HERMES, "", " \n"), (LLAMA3, "", " ;"), (HERMES, "<tool_call>{", " "), (LLAMA3, "{", " "), (HERMES, "x", "  "),
    (HERMES, '<tool_call>{"arguments": {"a": "', "aaaa"), (HERMES, '<tool_call>{"name": "time", "arguments": {}', " "), (LLAMA3, BARE[:-1], " "),
    (HERMES, "", "<tool_cal"), (LLAMA3, BARE, " ;"), (HERMES, '<tool_call>{"name": "time", "arguments": {"a": "', '\\"')])
def test_little_is_held_whatever_is_written(form, begun, more):
    """What is looked at again with every piece is short."""
    for reply in (Reply(tools=box(form=form)), Reply(STYLES["think"], False, box(form=form))):
        reply.feed(begun)
        for _ in range(2000):
            reply.feed(more)
            assert len(reply.calls.held) < 400 and len(reply.calls.raw) < 400 and (reply.splitter is None or len(reply.splitter.held) < 20)
    long = "<tool_call>{" + 300 * " " + '"name": "time", "arguments": {}}</tool_call>'
    for cuts in ([], range(len(long)), [200, 300], [len(long) - 1]):
        assert sorted_out(long, Reply(tools=box()), cuts) == {"content": None, "calls": [("time", "{}")]}, "as a whole, it is one"


PIECES = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "', 'weather"', 'time"', ', "arguments": ', ', "parameters": ', "{", "}", "[", '"a"', ": ",
          "\\", '"', ";", " ", "\n", "Hm.", "<", "</think>", "<think>", ROME, NOW, WRONG]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10), st.sampled_from([HERMES, LLAMA3]), st.sampled_from([None, STYLES["think"]]), st.booleans(),
       st.lists(st.integers(0, 200)))
def test_any_text_is_sorted_the_same_way_whole_and_cut(pieces, form, style, opened, cuts):
    text = "".join(pieces)
    assert sorted_out(text, Reply(style, opened, box(form=form))) == sorted_out(text, Reply(style, opened, box(form=form)), cuts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text(max_size=3), st.recursive(
    st.none() | st.text(max_size=4) | st.integers(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4), max_size=3)), max_size=3), st.booleans(), st.lists(st.integers(0, 300)))
def test_what_was_written_is_read(calls, llama, cuts):
    """Any arguments, in the way of each format."""
    written = [(name, json.dumps(arguments, ensure_ascii=bool(len(name) % 2))) for name, arguments in calls]
    text = "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in written) if llama else "\n".join(call(*one) for one in written)
    found = sorted_out(text, Reply(tools=box(form=LLAMA3 if llama else HERMES)), cuts)
    assert found == {"content": None if calls else "", "calls": written}


# ------------------------------------------------------------------------------------------------------------------- answers and events

def answers(text: str, reason: str = "stop", where: api.Reader | None = None, pieces: int = 3, **body) -> tuple[dict, list[dict]]:
    """(the choice of a plain answer, the choices of a stream's events), if the engine says this."""
    found = []
    for stream in (False, True):
        sent, rng = read(where, stream=stream, **body), random.Random(len(text))
        cuts = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(pieces)), len(text)]
        rid = sent.requests[0].rid
        events = [event for first, last in zip(cuts, cuts[1:]) for event in sent.answer.add([Chunk(rid=rid, text=text[first:last], output_ids=[1])])]
        events += sent.answer.add([Chunk(rid=rid, output_ids=[257], finish_reason=reason)])
        found.append([event["choices"][0] for event in events] if stream else sent.answer.body_json()["choices"][0])
    return found[0], found[1]


def test_a_message_and_its_deltas_say_the_same():
    for text, reason in ((f"I look.\n{ROME}\n{NOW}", "tool_calls"), ("Hello.", "stop"), ("", "stop"), (call("f", "{}"), "stop")):
        plain, events = answers(text, tools=TOOLS)
        assert events[0]["delta"] == {"role": "assistant", "content": ""} and events[-1]["delta"] == {}
        assert plain["finish_reason"] == events[-1]["finish_reason"] == reason and not any(event["finish_reason"] for event in events[:-1])
        whole = add_up(event["delta"] for event in events[1:])
        for message in (whole, plain["message"]):
            for made in message.get("tool_calls", ()):
                made.pop("id")
        assert plain["message"] == {"role": "assistant", "refusal": None, **whole}
    ids = [made["id"] for made in answers(f"{ROME}\n{ROME}", tools=TOOLS)[0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(made.startswith("call_") and len(made) == 29 for made in ids)


def test_F167_a_call_that_was_cut_is_not_called_complete():
    """F167"""
    for text in (ROME[:-30], ROME[:30], ROME):
        plain, events = answers(text, "length", tools=TOOLS)
        assert plain["finish_reason"] == events[-1]["finish_reason"] == "length"
    assert answers(ROME[:ROME.index("}")], "length", tools=TOOLS)[0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"'
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain, events = answers(ROME, **body)
        assert plain["finish_reason"] == "stop" and plain["message"]["content"] == ROME and "tool_calls" not in plain["message"]


def test_logprobs_come_once_whatever_the_text_becomes():
    sent = read(tools=TOOLS, logprobs=True, stream=True)
    events = []
    for piece in ("Hm <tool", "_call>", '{"name": "time", "arguments": {}}</tool_call>'):
        chunk = Chunk(rid=sent.requests[0].rid, text=piece, output_ids=[64], logprobs=[api.Logprob(64, -1.0)])
        events.append([event["choices"][0] for event in sent.answer.add([chunk])])
    assert [sum(event["logprobs"] is not None for event in one) for one in events] == [1, 1, 1] and events[1][0]["delta"] == {"content": ""}


# ---------------------------------------------------------------------------------------------------------------------------- thoughts

def test_thoughts_are_told_apart():
    said = "Hm.</think>\n\nHello."
    for where, more, text, thoughts, content in (
            (reader(reasoning="deepseek-r1"), {}, said, "Hm.", "Hello."), (reader(reasoning="deepseek-r1"), {}, "<think>" + said, "Hm.", "Hello."),
            (reader(reasoning="qwen3"), {}, said, None, said), (reader(reasoning="qwen3"), {}, "<think>" + said, "Hm.", "Hello."),
            (reader(reasoning="qwen3"), {"chat_template_kwargs": {"enable_thinking": True}}, said, "Hm.", "Hello."),
            (reader(reasoning="qwen3"), {"chat_template_kwargs": {"enable_thinking": True}}, "Hm.", "Hm.", None),
            (reader(reasoning="qwen3"), {"chat_template_kwargs": {"enable_thinking": False}}, said, None, said),
            (reader(reasoning="deepseek-r1"), {"chat_template_kwargs": {"enable_thinking": False}}, said, None, said),
            (reader(reasoning="deepseek-r1"), {"separate_reasoning": False}, said, None, said), (reader(), {}, said, None, said)):
        plain, events = answers(text, where=where, **more)
        whole = add_up(event["delta"] for event in events[1:])
        assert whole.get("reasoning_content") == plain["message"].get("reasoning_content") == thoughts
        assert whole["content"] == plain["message"]["content"] == content
    plain, _ = answers(f"Hm {ROME}</think>{NOW}", where=reader(reasoning="deepseek-r1"), tools=TOOLS)
    assert plain["message"]["reasoning_content"] == f"Hm {ROME}" and [made["function"]["name"] for made in plain["message"]["tool_calls"]] == ["time"]
    with pytest.raises(RequestError, match="separate_reasoning"):
        read(separate_reasoning="no")


def test_thoughts_in_one_piece():
    for text in ("<think>Hm, hm, hm.</think>Hello.", "<think>Hm", f"<think>Hm</think>{ROME}", "Hello.", "<think></think>Hello."):
        plain, events = answers(text, where=reader(reasoning="qwen3"), tools=TOOLS, stream_reasoning=False, pieces=9)
        whole, fields = add_up(event["delta"] for event in events[1:]), [field for event in events[1:] for field in event["delta"]]
        assert whole.get("reasoning_content") == plain["message"].get("reasoning_content") and whole["content"] == plain["message"]["content"]
        assert fields.count("reasoning_content") == ("Hm" in text) and "reasoning_content" not in fields[1:]
    sent = read(reader(reasoning="qwen3"), stream=True, stream_reasoning=False)
    said = [[event["choices"][0]["delta"] for event in sent.answer.add([Chunk(rid=sent.requests[0].rid, text=text, output_ids=[1])])]
            for text in ("", "<think>Hm", ".</thi", "nk>")]
    assert said[1:] == [[], [], [{"reasoning_content": "Hm."}]], "when they end, and not with the answer"
    with pytest.raises(RequestError, match="stream_reasoning"):
        read(stream_reasoning="no")


def test_tokens_of_thoughts_are_counted():
    codec = reader().codec
    for name, more, text, count in (("qwen3", {}, "<think>é</think>ok", 17), ("qwen3", {}, "ok</think>", 0), ("qwen3", {}, " <think>", 8), ("qwen3", {}, "<thin", 0),
                                    ("deepseek-r1", {}, "é</think>ok", 10), ("deepseek-r1", {}, "<think>é</think>ok", 17), ("deepseek-r1", {}, "<th", 3),
                                    ("deepseek-r1", {"separate_reasoning": False}, "é</think>ok", 10),
                                    ("deepseek-r1", {"chat_template_kwargs": {"enable_thinking": False}}, "é</think>ok", 0)):
        for size in (1, 3, 100):
            sent, ids = read(reader(reasoning=name), **more), codec.encode(text, add_special_tokens=False)
            for at in range(0, len(ids), size):
                sent.answer.add([Chunk(rid=sent.requests[0].rid, text="", output_ids=ids[at:at + size])])
            usage = sent.answer.usage()
            assert usage["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == count, (name, text, usage)
    assert "reasoning_tokens" not in read().answer.usage()


def test_every_text_of_a_body_counts_before_it_is_tokenised():
    long = "x" * (reader().codec.longest_token_chars * 10_000 + 1)
    asked = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    for message in ({"content": long}, {"content": [{"type": "text", "text": long}]}, {"content": "", "reasoning_content": long}, {"content": "", "name": long},
                    {"tool_calls": [asked | {"function": {"name": long, "arguments": "{}"}}]}, {"tool_calls": [asked | {"id": long}]},
                    {"tool_calls": [asked | {"function": {"name": "time", "arguments": json.dumps({long: 1})}}]}):
        refused("prompt", "characters, which cannot fit", messages=[*HI, {"role": "assistant", **message}, *HI])
    for one in (tool(long), tool("f", description=long), tool("f", {"type": "object", "properties": {long: {}}})):
        refused("prompt", "characters, which cannot fit", tools=[one])
    refused("prompt", "characters, which cannot fit", chat_template_kwargs={"documents_": long})


def test_grammars_begin_behind_the_thoughts():
    on, off = {"chat_template_kwargs": {"enable_thinking": True}}, {"chat_template_kwargs": {"enable_thinking": False}}
    ends = {"reasoning_end": "</think>"}
    for style, more, options in (("deepseek-r1", {}, ends), ("deepseek-r1", off, {}), ("qwen3", {}, ends), ("qwen3", on, ends), ("qwen3", off, {}),
                                 ("think", on, ends), ("kimi", {}, {"reasoning_end": "◁/think▷"}), (None, on, {})):
        where = reader(reasoning=style)
        for separate in (True, False):
            assert grammar(read(where, regex="a", separate_reasoning=separate, **more)) == ("regex", "a", options)
        assert grammar(read(where, **more)) is None, "nobody waits for a grammar that says nothing"
        if style is not None:
            params = read(where, thinking_budget=5, **more).requests[0].params
            assert (params.grammar, params.thinking_budget) == ((("reasoning", None, options), 5) if options else (None, None))
            assert grammar(read(where, regex="a", reasoning_end="</x>", **more)).options == {"reasoning_end": "</x>"}
    refused("thinking_budget", "no reasoning_end", thinking_budget=5)
    plain, _ = answers("Hm.</think>a", where=reader(reasoning="qwen3"), regex="a")
    assert plain["message"]["reasoning_content"] == "Hm." and plain["message"]["content"] == "a", "what the grammar waits for is a thought"
    going = [*HI, {"role": "assistant", "content": "<think>Hm"}]
    assert grammar(read(reader(reasoning="qwen3"), messages=going, continue_final_message=True, regex="a")).options == ends
    going[1]["content"] += "</think>"
    assert grammar(read(reader(reasoning="qwen3"), messages=going, continue_final_message=True, regex="a")).options == {}


# --------------------------------------------------------------------------------------------------------------------- over HTTP

@pytest.fixture(scope="module")
def served(tmp_path_factory):
    import tiny  # torch and transformers, for these tests alone
    folder = tmp_path_factory.mktemp("tiny")
    path = tiny.add_tokenizer(tiny.checkpoint(folder, "llama", max_position_embeddings=4096))
    (folder / "template.jinja").write_text(QWEN)
    with ServedModel("--model", str(path), "--max-total-tokens", "8192", "--chat-template", str(folder / "template.jinja")) as running:
        yield running


def test_F197_calls_that_must_come_come_and_are_valid(served):
    """F197: of a model with random weights."""
    chat = "/v1/chat/completions"
    body = {"messages": HI, "tools": [tool("get_weather", WEATHER | {"additionalProperties": False}), tool("get_time")], "max_tokens": 300}
    for choice, names in (("required", {"get_weather", "get_time"}), ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"})):
        for seed in range(3):
            asked = body | {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            answer = served.post(chat, **asked)
            assert answer.status_code == 200, answer.text
            [choice_json] = answer.json()["choices"]
            message = choice_json["message"]
            assert choice_json["finish_reason"] in ("tool_calls", "length") and message["content"] in (None, "")
            [made] = message["tool_calls"]
            assert made["function"]["name"] in names
            if choice_json["finish_reason"] == "tool_calls" and made["function"]["name"] == "get_weather":
                jsonschema.validate(json.loads(made["function"]["arguments"]), WEATHER)
            events = served.events(chat, **asked)
            streamed = add_up(event["choices"][0]["delta"] for event in events if event["choices"])
            assert streamed["tool_calls"][0]["function"] == made["function"]
            assert events[-1]["choices"][0]["finish_reason"] == choice_json["finish_reason"]
    for stream in (False, True):
        bad = body | {"tools": [tool("f", {"properties": {"a": {"type": "no"}}})], "tool_choice": "required", "stream": stream}
        error = check_refused(served.post(chat, **bad), param="tools")
        assert "the parameters of 'f'" in error["message"]
    served.alive()


def test_a_call_that_was_cut_before_its_name_is_no_content():
    box = Toolbox([Tool("function", Function("weather", None, {"properties": {"city": {"type": "string"}}}))], "required", True, HERMES)
    for text in ('<tool_call>\n{"na', '<tool_call>\n{"name": "wea', "<tool_call>"):
        for held in (text, "\n" + text):
            reply = Reply(tools=box)
            whole = add_up([*reply.feed(held), *reply.feed("", ended=True)])
            assert not whole["content"].strip() and "tool_calls" not in whole
