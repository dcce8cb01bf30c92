"""Bodies: what a client sends is a JSON object, or a sentence says where it is not.

Each call begins here, before anything is known of its route:

      b'{"top_p": NaN, ...}' --read_json--> dict without its nulls         "top_p: expected a finite number, got NaN"
      ?format=text&width=40  --read_query-> TreeQuery, or another struct

The fast parser says that a body is wrong, and at which byte; what a person needs is the name of the field. So where it refuses, Python's own
parser, which takes more, reads the body once more, and what JSON lacks is looked for in what that found: NaN and infinities, integers of
thousands of digits, halves of surrogate pairs. `sampling_params` is a name that its fields go without, as errors name a field.

  null       a field that is null is a field that is not given. Only the outermost object is treated so; what is inside is its field's affair.
  numbers    behind a URL's question mark all is text; what looks like an integer becomes one, and the struct says whether it wanted one.

Invariant: what `read_json` returns holds finite numbers and valid text alone, so that it fits every wire behind it.
Cost: some 2 us a KiB; the second reading only for bodies that are refused. Stops holding: duplicate names, of which the last counts, as in
nearly every parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from .protocol import RequestError, convert, show

MAX_INT_DIGITS = 400        # of an integer in a body; Python itself takes 4,300


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request: requests to end, and holds to release, by the id that the client or the answer gave them."""
    rid: str | None = None
    abort_all: bool = False


class TreeQuery(msgspec.Struct, kw_only=True):
    """GET /tree?format=...: what to show of the cache. max_nodes: the most used ones. width: characters of each one's text."""
    format: Literal["json", "text"] = "json"
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    width: Annotated[int, msgspec.Meta(ge=4, le=1_000)] = 60


def read_query(given: Mapping[str, str], kind: type) -> Any:
    """The parameters behind a URL's question mark as a `kind`. RequestError says which is wrong."""
    return convert({name: int(value) if re.fullmatch(r"-?\d{1,18}", value) else value for name, value in given.items()}, kind)


def read_json(raw: bytes) -> dict:
    """The object a body holds, without its nulls (a null is a field not given). RequestError says what is wrong."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestError("the body is not usable JSON: it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _not_json(raw, error) from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {show(value)}")
    return {name: given for name, given in value.items() if given is not None}


class _NoJson(str):
    """What stands in a body in the place of a value, as the sender will recognise it."""


def _not_json(raw: bytes, error: msgspec.DecodeError) -> RequestError:
    """Why a body is not JSON. Python's own parser is laxer (NaN, lone surrogates): what it takes, it can name."""
    def number(text: str) -> float | _NoJson:
        return float(text) if abs(float(text)) < float("inf") else _NoJson(text[:20])

    def integer(text: str) -> int | _NoJson:
        return int(text) if len(text) <= MAX_INT_DIGITS else _NoJson(f"an integer of {len(text)} digits")

    try:
        stack = [("", "", json.loads(raw, parse_float=number, parse_int=integer, parse_constant=_NoJson))]
    except (ValueError, RecursionError):
        stack = []
    while stack:
        path, name, value = stack.pop()
        if isinstance(value, _NoJson):
            return RequestError(f"{path}: expected a finite number, got {value}", name)
        if isinstance(value, str) and _has_lone_surrogate(value):
            return RequestError(f"{path}: a text holds half of a surrogate pair, which is no character", name)
        if isinstance(value, dict):
            stack += [(f"{path}.{show(key)[1:-1]}".lstrip("."), name if name not in ("", "sampling_params") else key, inner)
                      for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{n}]", name, inner) for n, inner in enumerate(value)]
    return RequestError(f"the body is not valid JSON: {error}")


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
        return False
    except UnicodeEncodeError:
        return True


def _demo() -> None:
    """Bodies that are not JSON, and what is said of them."""
    for raw in (b'{"n": 2, "seed": null}', b'{"sampling_params": {"top_p": NaN}}', b'{"seed": 1e999}', b'["hi"]', b'{"prompt": "\\ud800"}',
                b'{"n": 1,}'):
        try:
            print(f"{raw.decode():38} {read_json(raw)}")
        except RequestError as error:
            print(f"{raw.decode():38} {error.param}: {error}")


if __name__ == "__main__":
    _demo()
