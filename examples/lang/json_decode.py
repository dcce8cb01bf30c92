"""A character's profile as JSON, in three ways: by a schema, by a regular expression, and field by field, where the program writes what is certain.

    python examples/lang/json_decode.py [--url URL | --model demo]
"""

import json

import common

import nano_sgl.lang as sgl

CHARACTERS = ["a lighthouse keeper who collects storms", "a clockmaker who is always late", "a knight who is afraid of horses",
              "a baker who solves crimes"]
ROLES = ["hero", "villain", "helper"]
FIELDS = {"name": {"type": "string", "minLength": 1, "maxLength": 20}, "age": {"type": "integer", "minimum": 1, "maximum": 99},
          "role": {"enum": ROLES}, "motto": {"type": "string", "maxLength": 40}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name", "age", "role", "motto"], "additionalProperties": False}
REGEX = r'\{"name": "[A-Z][a-z]{1,15}", "age": [1-9][0-9]?, "role": "(hero|villain|helper)", "motto": "[A-Za-z ,]{1,40}"\}'


def ask(character):
    return sgl.system("You invent characters for novels and write their profiles as JSON.") + sgl.user("Write the profile of " + character + ".")


@sgl.function
def by_schema(s, character):
    s += ask(character) + sgl.assistant(sgl.gen("profile", max_tokens=160, json_schema=SCHEMA))


@sgl.function
def by_regex(s, character):
    s += ask(character) + sgl.assistant(sgl.gen("profile", max_tokens=160, regex=REGEX))


@sgl.function
def by_fields(s, character):
    s += ask(character)
    with s.assistant(), s.var_scope("profile"):
        s += '{"name": "' + sgl.gen("name", max_tokens=24, regex="[A-Z][a-z]{1,15}")
        s += '", "age": ' + sgl.gen("age", max_tokens=4, regex="[1-9][0-9]?")
        s += ', "role": "' + sgl.select("role", ROLES)
        s += '", "motto": "' + sgl.gen("motto", max_tokens=48, regex="[A-Za-z ,]{1,40}") + '"}'


def run(backend, characters=2):
    batch = [{"character": character} for character in CHARACTERS[:characters]]
    return [state for program in (by_schema, by_regex, by_fields) for state in program.run_batch(batch, backend=backend, temperature=0)]


def show(states):
    for i, state in enumerate(states):
        print(f"{('schema', 'regex', 'fields')[i * 3 // len(states)]:7}", json.loads(state["profile"]))


if __name__ == "__main__":
    common.main(__doc__, run, show)
