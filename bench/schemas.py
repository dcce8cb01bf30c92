"""Everyday JSON schemas, each with values that it allows: what people ask for in tool calls, extraction, classification and configuration.

`SCHEMAS` is a list of (name, schema, values). A third of the objects are open: other keys may come, too. They are written for this repository.
"""

from __future__ import annotations

Schema = dict

TEXT, INT, NUM, FLAG, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))
DATE, TIME, EMAIL, UUID, URI = ({"type": "string", "format": name} for name in ("date", "date-time", "email", "uuid", "uri"))


def record(required: dict, optional: dict | None = None, is_open: bool = False) -> Schema:
    """An object."""
    found = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return found if is_open else found | {"additionalProperties": False}


def some(items: Schema, **bounds) -> Schema:
    """An array."""
    return {"type": "array", "items": items, **bounds}


def text(**bounds) -> Schema:
    return {"type": "string", **bounds}


def number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def among(*values) -> Schema:
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def call(name: str, arguments: Schema) -> Schema:
    """A tool call."""
    return record({"name": {"const": name}, "arguments": arguments})


POINT = record({"lat": number(-90, 90), "lon": number(-180, 180)})
MONEY = record({"amount": NUM, "currency": among("EUR", "USD", "GBP", "JPY")})
ADDRESS = record({"street": TEXT, "city": TEXT, "zip": text(pattern=r"^[0-9]{5}$")}, {"country": text(minLength=2, maxLength=2)})
COMMENT = record({"author": TEXT, "text": TEXT, "replies": some({"$ref": "#/$defs/comment"})})
NODE = record({"kind": among("div", "button", "header", "section", "field"), "label": TEXT, "children": some({"$ref": "#"})})

SCHEMAS: list[tuple[str, Schema, list]] = [
    ("person", record({"name": TEXT, "age": INT, "email": EMAIL}), [{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org"}]),
    ("person, open", record({"name": TEXT}, {"age": INT, "email": TEXT}, True), [{"name": "Grace Hopper", "age": 85, "rank": "rear admiral"}]),
    ("address", ADDRESS, [{"street": "12 Main Street", "city": "Springfield", "zip": "62701", "country": "US"}]),
    ("product", record({"sku": text(pattern=r"^[A-Z]{3}-[0-9]{4}$"), "title": TEXT, "price": MONEY}, {"tags": some(TEXT), "in_stock": FLAG}),
     [{"sku": "LMP-0042", "title": "Desk lamp", "price": {"amount": 39.9, "currency": "EUR"}, "tags": ["light", "office"], "in_stock": True}]),
    ("order", record({"id": UUID, "placed": TIME, "lines": some(record({"sku": TEXT, "quantity": number(1, 99, "integer"), "price": NUM}))}),
     [{"id": "7d444840-9dc0-11d1-b245-5ffdce74fad2", "placed": "2024-05-04T10:15:00Z",
       "lines": [{"sku": "LMP-0042", "quantity": 2, "price": 39.9}, {"sku": "CHR-0007", "quantity": 1, "price": 120}]}]),
    ("invoice", record({"number": TEXT, "customer": TEXT, "due": DATE, "total": NUM}, {"notes": TEXT, "paid": FLAG}, True),
     [{"number": "2024-117", "customer": "Acme Ltd.", "due": "2024-06-30", "total": 1250.5, "notes": "Thank you for your order.", "paid": False}]),
    ("get_weather", call("get_weather", record({"city": TEXT}, {"unit": among("C", "F"), "days": number(1, 14, "integer")})),
     [{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C", "days": 3}}]),
    ("one of three tools", {"anyOf": [
        call("search", record({"query": TEXT}, {"limit": INT})), call("open_page", record({"url": URI})), call("finish", record({"answer": TEXT}))]},
     [{"name": "search", "arguments": {"query": "height of the Eiffel Tower", "limit": 5}},
      {"name": "finish", "arguments": {"answer": "It is 330 metres tall."}}]),
    ("several calls", some({"oneOf": [call("move", record({"x": NUM, "y": NUM})), call("wait", record({"seconds": NUM}))]}, minItems=1, maxItems=8),
     [[{"name": "move", "arguments": {"x": 1.5, "y": -2}}, {"name": "wait", "arguments": {"seconds": 10}}]]),
    ("book_flight", call("book_flight", record({"from": text(pattern="^[A-Z]{3}$"), "to": text(pattern="^[A-Z]{3}$"), "date": DATE},
                                               {"cabin": among("economy", "business", "first"), "passengers": number(1, 9, "integer")})),
     [{"name": "book_flight", "arguments": {"from": "OSL", "to": "LIS", "date": "2025-03-14", "cabin": "economy", "passengers": 2}}]),
    ("hotels", record({"location": TEXT, "check_in": DATE, "check_out": DATE}, {"guests": INT, "max_price": NUM, "amenities": some(TEXT)}, True),
     [{"location": "Lisbon", "check_in": "2025-03-14", "check_out": "2025-03-18", "guests": 2, "amenities": ["wifi", "breakfast"]}]),
    ("sentiment", record({"sentiment": among("positive", "neutral", "negative"), "confidence": number(0, 1)}),
     [{"sentiment": "positive", "confidence": 0.93}]),
    ("labels", record({"labels": some(among("sports", "politics", "science", "culture", "economy"), minItems=1, maxItems=3), "reason": TEXT}),
     [{"labels": ["science", "culture"], "reason": "The text describes an exhibition about astronomy."}]),
    ("moderation", record({name: number(0, 1) for name in ("hate", "violence", "self_harm", "sexual")} | {"flagged": FLAG}),
     [{"hate": 0.01, "violence": 0.2, "self_harm": 0, "sexual": 0.003, "flagged": False}]),
    ("entities", some(record({"text": TEXT, "type": among("PERSON", "ORG", "PLACE", "DATE"), "start": INT, "end": INT})),
     [[{"text": "Marie Curie", "type": "PERSON", "start": 0, "end": 11}, {"text": "Paris", "type": "PLACE", "start": 25, "end": 30}]]),
    ("triples", record({"triples": some(record({"subject": TEXT, "relation": TEXT, "object": TEXT}))}),
     [{"triples": [{"subject": "Oslo", "relation": "capital of", "object": "Norway"}, {"subject": "Norway", "relation": "near", "object": "Fiji"}]}]),
    ("steps", record({"steps": some(record({"explanation": TEXT, "output": TEXT})), "final_answer": TEXT}),
     [{"steps": [{"explanation": "Subtract 7 from both sides.", "output": "8x = -30"}, {"explanation": "Divide by 8.", "output": "x = -3.75"}],
       "final_answer": "x = -3.75"}]),
    ("quiz", some(record({"question": TEXT, "choices": some(TEXT, minItems=4, maxItems=4), "answer": number(0, 3, "integer")})),
     [[{"question": "Which planet is the largest?", "choices": ["Mars", "Venus", "Jupiter", "Saturn"], "answer": 2}]]),
    ("summary", record({"title": text(maxLength=80), "summary": text(minLength=20, maxLength=400), "keywords": some(TEXT, maxItems=6)}),
     [{"title": "A short history of tea", "summary": "Tea came to Europe with merchants of the seventeenth century and soon was taxed.",
       "keywords": ["tea", "trade", "tax"]}]),
    ("citations", record({"answer": TEXT, "citations": some(record({"source": URI, "quote": TEXT}, {"page": INT}))}),
     [{"answer": "In 1889.", "citations": [{"source": "https://example.org/tower", "quote": "opened in 1889", "page": 3}]}]),
    ("recipe", record({"name": TEXT, "servings": INT, "ingredients": some(record({"item": TEXT, "quantity": TEXT})), "steps": some(TEXT)}, {}, True),
     [{"name": "Pancakes", "servings": 4, "ingredients": [{"item": "flour", "quantity": "200 g"}, {"item": "milk", "quantity": "300 ml"}],
       "steps": ["Mix everything.", "Fry in butter."]}]),
    ("itinerary", record({"days": some(record({"date": DATE, "places": some(TEXT)}, {"notes": TEXT}), minItems=1)}),
     [{"days": [{"date": "2025-05-01", "places": ["Old town", "Harbour"]}, {"date": "2025-05-02", "places": ["Museum"], "notes": "Closed."}]}]),
    ("resume", record({"name": TEXT, "skills": some(TEXT), "jobs": some(record({"firm": TEXT, "from": INT, "to": nullable(INT)}, {"title": TEXT}))}),
     [{"name": "Jane Doe", "skills": ["Python", "SQL"], "jobs": [{"firm": "Acme", "from": 2019, "to": None, "title": "Engineer"}]}]),
    ("email", record({"to": some(EMAIL), "subject": TEXT, "body": TEXT}, {"cc": some(EMAIL), "priority": among("low", "normal", "high")}),
     [{"to": ["jane@example.com"], "subject": "Meeting", "body": "Hello Jane,\nshall we meet on Monday?\n\nBest, Tom", "priority": "normal"}]),
    ("calendar event", record({"title": TEXT, "start": TIME, "end": TIME}, {"place": TEXT, "attendees": some(EMAIL)}, True),
     [{"title": "Review", "start": "2025-01-10T09:00:00+01:00", "end": "2025-01-10T10:00:00+01:00", "attendees": ["a@example.com"]}]),
    ("ticket", record({"title": TEXT, "severity": among(1, 2, 3, 4), "component": nullable(TEXT), "steps": some(TEXT)}, {"assignee": TEXT}, True),
     [{"title": "Crash on start", "severity": 2, "component": None, "steps": ["Open the app", "Wait"], "assignee": "tom"}]),
    ("filter", {"$ref": "#/$defs/filter", "$defs": {"filter": {"anyOf": [
        record({"field": TEXT, "op": among("=", "<", ">", "!="), "value": {"type": ["string", "number"]}}),
        record({"and": some({"$ref": "#/$defs/filter"}, minItems=1)}), record({"or": some({"$ref": "#/$defs/filter"}, minItems=1)})]}}},
     [{"and": [{"field": "age", "op": ">", "value": 30}, {"or": [{"field": "city", "op": "=", "value": "Oslo"}]}]}]),
    ("comments", COMMENT | {"$defs": {"comment": COMMENT}},
     [{"author": "ann", "text": "Nice!", "replies": [{"author": "bob", "text": "Indeed.", "replies": []}]}]),
    ("page", NODE, [{"kind": "section", "label": "Login", "children": [
        {"kind": "field", "label": "User", "children": []}, {"kind": "button", "label": "Sign in", "children": []}]}]),
    ("settings", record({}, {"theme": among("light", "dark", "auto"), "font_size": number(8, 32, "integer"), "spellcheck": FLAG, "language": TEXT,
                             "plugins": some(TEXT)}),
     [{"theme": "dark", "font_size": 14, "plugins": ["git", "python"]}, {}]),
    ("server", record({"host": TEXT, "port": number(1, 65535, "integer")}, {"tls": record({"cert": TEXT, "key": TEXT}), "workers": INT}, True),
     [{"host": "0.0.0.0", "port": 8080, "tls": {"cert": "/etc/tls/cert.pem", "key": "/etc/tls/key.pem"}, "workers": 4, "debug": False}]),
    ("deployment", record({"apiVersion": {"const": "v1"}, "kind": among("Pod", "Service"), "metadata": record(
        {"name": text(pattern="^[a-z0-9-]{1,63}$")}, {"labels": {"type": "object", "additionalProperties": TEXT}})}, is_open=True),
     [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-0", "labels": {"app": "web", "tier": "front"}}}]),
    ("metrics", {"type": "object", "additionalProperties": NUM}, [{"accuracy": 0.91, "loss": 0.33, "epochs": 12}]),
    ("translations", {"type": "object", "patternProperties": {"^[a-z]{2}$": TEXT}, "additionalProperties": False}, [{"de": "Ja", "fr": "Oui"}]),
    ("any object", {"type": "object"}, [{"id": 7, "tags": ["a", "b"], "nested": {"ok": True, "ratio": 0.5}}]),
    ("place", record({
        "type": {"const": "Feature"}, "geometry": record({"type": {"const": "Point"}, "coordinates": some(NUM, minItems=2, maxItems=3)}),
        "properties": {"type": "object"}}),
     [{"type": "Feature", "geometry": {"type": "Point", "coordinates": [10.75, 59.91]}, "properties": {"name": "Oslo"}}]),
    ("route", record({"from": POINT, "to": POINT, "distance_km": number(0, 20000)}),
     [{"from": {"lat": 59.91, "lon": 10.75}, "to": {"lat": 38.72, "lon": -9.14}, "distance_km": 2740.5}]),
    ("colour", {"type": "array", "prefixItems": [number(0, 255, "integer")] * 3, "items": False, "minItems": 3}, [[255, 128, 0]]),
    ("words", some(text(minLength=1, maxLength=20), minItems=1, maxItems=10), [["river", "stone", "cloud"]]),
    ("payment", {"oneOf": [
        record({"method": {"const": "card"}, "number": text(pattern="^[0-9]{16}$"), "expires": text(pattern="^[0-9]{2}/[0-9]{2}$")}),
        record({"method": {"const": "transfer"}, "iban": text(pattern="^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$")})]},
     [{"method": "card", "number": "4111111111111111", "expires": "12/27"}, {"method": "transfer", "iban": "NO9386011117947"}]),
    ("patch", some(record({"op": among("add", "remove", "replace"), "path": text(pattern="^/")}, {"value": True})),
     [[{"op": "replace", "path": "/title", "value": "New"}, {"op": "remove", "path": "/tags/0"}]]),
    ("review", record({"film": TEXT, "stars": number(1, 5, "integer"), "pros": some(TEXT), "cons": some(TEXT)}, {"would_recommend": FLAG}, True),
     [{"film": "Metropolis", "stars": 5, "pros": ["design"], "cons": [], "would_recommend": True}]),
    ("answer", record({"reasoning": TEXT, "answer": among("A", "B", "C", "D")}),
     [{"reasoning": "Ice floats, so it must be less dense than water.", "answer": "C"}]),
]
