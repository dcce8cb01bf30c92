"""JSON schema: a table of texts for every keyword, what is refused and how, layouts, what multiplies, other people's cases where they are at hand,
and texts drawn from the rules against the values' own check."""

import importlib.util
import itertools
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from earley import accepts, opened

from nano_sgl.grammar import compile_rules
from nano_sgl.json_document import Part
from nano_sgl.json_schema import Compiler, json_schema_rules
from nano_sgl.rules import But, Byte, Cat, GrammarError, Or, Ref, Repeat, time_limit, repeat
from nano_sgl.vocab import Vocab

CASES = Path(os.environ.get("NANO_SGL_CASES", "nowhere")) / "json.jsonl"
BYTES = Vocab([bytes([b]) for b in range(256)])
OBJECT = {"type": "object", "additionalProperties": False}

TABLE = [  # schema, accepted, refused
    (True, ["1", "null", '{"a": [true, {}]}', '"\\u00e9"'], ["", "01", "nul", '{"a" : 1}', "[1,2]"]),
    ({}, ["[]", "-0.5e+3"], ["[1 ]"]),
    ({"type": "null"}, ["null"], ["0", "false"]),
    ({"type": "boolean"}, ["true", "false"], ["null", "1", '"true"']),
    ({"type": "integer"}, ["0", "-12", "98765432109876543210"], ["1.5", "01", "-", "1e3", "+1"]),
    ({"type": "number"}, ["0", "-1.50", "2e-9", "1E+5"], [".5", "1.", "00", "NaN"]),
    ({"type": ["string", "null", "integer"]}, ['"a"', "null", "12"], ["1.5", "true", "[]"]),
    ({"type": "number", "not": {"type": "integer"}}, ["1.5", "-0.25", "10.010"], ["1", "1.0", "-3.00"]),
    ({"enum": [6, "foo", [], True, {"foo": 12}, None]}, ["6", '"foo"', "[]", "true", '{"foo": 12}', "null"], ["7", '"fo"', '{"foo": 13}', "false"]),
    ({"enum": [1, 2, "a"], "type": "integer", "minimum": 2}, ["2"], ["1", '"a"']),
    ({"enum": [1, 2], "const": 2}, ["2"], ["1"]),
    ({"const": 'é"\\'}, ['"é\\"\\\\"'], ['"e"']),
    ({"const": [1, {"b": 1, "a": 2}]}, ['[1, {"b": 1, "a": 2}]'], ["[1]", '[1, {"b": 1}]']),
    # strings
    ({"minLength": 2, "maxLength": 3, "type": "string"}, ['"ab"', '"é😀\\n"', '"\\ud83d\\ude00\\u00e9"'], ['"a"', '"abcd"', '"\\ud83d\\ude00"']),
    ({"type": "string"}, ['""', '"\\/\\b\\f"', '"\\uD83D\\uDE00"'], ['"\n"', '"\\x41"', '"\\ud800"', '"a', '"\\ud83dx"']),
    ({"maxLength": 1}, ['"a"', "12", "[1, 2]"], ['"ab"']),
    ({"type": "string", "pattern": "^a.c$"}, ['"abc"', '"a\\u0062c"', '"a\\"c"', '"\\u0061\\u00e9c"'], ['"abcd"', '"xabc"', '"a\\nc"']),
    ({"type": "string", "pattern": "b"}, ['"b"', '"abc"', '"\\n\\u0062"'], ['"ac"', '""']),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"', '"a"'], ['"abcd"', '""', '"aB"']),
    ({"type": "string", "pattern": "^(ab)+$", "minLength": 3, "maxLength": 5}, ['"abab"'], ['"ab"', '"ababab"', '"aba"']),
    ({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"pattern": "c"}]}, ['"acb"', '"axxcyb"'], ['"ab"', '"cb"', '"ac"']),
    ({"type": "string", "not": {"pattern": "^x"}}, ['"y"', '""', '"yx"'], ['"x"', '"xy"', '"\\u0078"', "1"]),
    ({"type": "string", "not": {"enum": ["a", "bc"]}}, ['"b"', '"abc"', '""'], ['"a"', '"bc"', '"\\u0061"']),
    # formats
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"1999-13-01"', '"1999-1-1"', '"1900-02-29"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"08:00:00.5+01:30"', '"23:59:60Z"'], ['"24:00:00Z"', '"12:00:00"', '"12:00:60Z"']),
    ({"type": "string", "format": "date-time"}, ['"1963-06-19t08:30:06.283185z"', '"1998-12-31T15:59:60.123-08:00"'],
     ['"1998-12-31T23:59:61Z"', '"1963-06-19"', '"1990-12-31T10:00:00+10:60"']),
    ({"type": "string", "format": "uuid"}, ['"2EB8AA08-aa98-11ea-b4aa-73b441d16380"'], ['"2eb8aa08aa9811eab4aa73b441d16380"', '"g"']),
    ({"type": "string", "format": "ipv4"}, ['"255.0.10.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
    ({"type": "string", "format": "ipv6"}, ['"::1"', '"::"', '"1:2:3:4:5:6:7:8"', '"2001:db8::1"', '"::ffff:1.2.3.4"', '"1::"', '"1:2:3:4:5:6:7::"'],
     ['":::"', '"1:2:3:4:5:6:7"', '"1::2::3"', '"12345::"', '"1:2:3:4:5:6:7:8:9"', '"::1.2.3.256"']),
    ({"type": "string", "format": "hostname"}, ['"example.com"', '"a-b.c"'], ['"-a.b"', '"a_b"', '"a..b"', '""']),
    ({"type": "string", "format": "email"}, ['"joe.bloggs@example.com"', '"te~st@example.com"'], ['"2962"', '".a@b.c"', '"a@"', '"a..b@c.d"']),
    ({"type": "string", "format": "uri"}, ['"http://a.b/c?d=e#f"', '"urn:x:y"', '"mailto:a@b.c"', '"ldap://[2001:db8::7]/c"'],
     ['"/abc"', '"http:// shouldfail.com"', '"bar,baz:foo"']),
    ({"type": "string", "format": "uri-reference"}, ['"/abc"', '"abc"', '"http://a.b/"', '"#frag"', '""'], ['"\\\\a"', '"a b"']),
    ({"type": "string", "format": "duration"}, ['"P4DT12H30M5S"', '"P1Y"', '"PT36H"', '"P2W"'],
     ['"P"', '"PT"', '"P1YT"', '"P1D2H"', '"4DT"', '"P2S"']),
    ({"type": "string", "format": "json-pointer"}, ['""', '"/a/b~1c~0"'], ['"a"', '"/a~"', '"/~2"']),
    ({"type": "string", "format": "relative-json-pointer"}, ['"1"', '"0/a"', '"2#"'], ['"/a"', '"01"', '"-1"']),
    ({"type": "string", "format": "iri"}, ['"http://ƒøø.ßår/?∂éœ=πîx#πîüx"', '"http://a.b/"'], ['"/abc"', '"http://a b/"']),
    ({"type": "string", "format": "uri-template"}, ['"http://a/{term:1}/{term}"', '"d/{?x,y*}"'], ['"http://a/{term:1}/{term"']),
    ({"type": "string", "format": "regex"},
     ['"([abc])+\\\\s+$"', '"a{2,3}?|[^x-z]*"', '"(?:\\\\d{1,10})"', '""'], ['"^(abc]"', '"a**"', '"[z-a]"', '"("']),
    ({"type": "string", "format": "no such format"}, ['"x"'], ["1"]),
    ({"type": "string", "format": "date", "pattern": "^2", "not": {"const": "2000-01-01"}}, ['"2000-01-02"'], ['"2000-01-01"', '"1999-01-01"']),
    # numbers
    ({"type": "integer", "minimum": 3, "maximum": 120}, ["3", "99", "100", "120"], ["2", "121", "-3", "03", "3.5"]),
    ({"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5.5}, ["-4", "0", "5"], ["-5", "6", "-0"]),
    ({"type": "integer", "minimum": -2}, ["-2", "0", "7", "1234"], ["-3", "-20"]),
    ({"type": "integer", "maximum": -10}, ["-10", "-99", "-12345"], ["-9", "0", "10"]),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, ["0.5", "1", "1.999", "2.2500", "2"], ["0.49", "2.26", "3", "2.2500001", "0"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "12", "0.10", "1e-05", "2.5E+3"], ["0", "0.0", "-1", "0.000", "-1e-05", "0e5"]),
    ({"type": "number", "minimum": -0.02, "maximum": 150},
     ["1e-7", "-2e-2", "-1.99e-02", "1.5e2", "9e1"], ["-2.01e-2", "-1e-1", "1.51e2", "1e3", "-1e0"]),
    ({"type": "number", "exclusiveMaximum": 1, "minimum": -1.5}, ["-1.5", "-0.3", "0", "0.99"], ["1", "1.0", "-1.51", "-2"]),
    ({"exclusiveMinimum": 1.1}, ["1.2", '"x"', "[]"], ["1.1", "0.6", "1.10"]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, ["4"], ["3"]),
    ({"type": "integer", "multipleOf": 3}, ["0", "-9", "123"], ["1", "124"]),
    ({"type": "integer", "multipleOf": 4, "minimum": 10, "maximum": 21}, ["12", "16", "20"], ["8", "24", "14"]),
    ({"type": "number", "multipleOf": 0.05}, ["0.05", "1", "-3.250", "2.0"], ["0.01", "1.255"]),
    ({"type": "integer", "not": {"enum": [0, 7]}}, ["1", "70", "-7"], ["0", "7"]),
    ({"type": "number", "not": {"const": 2}, "minimum": 1}, ["1", "2.5", "20"], ["2", "2.0"]),
    # objects
    ({**OBJECT, "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": True}, "required": ["b"]},
     ['{"b": null}', '{"a": 1, "b": null}', '{"b": null, "c": []}', '{"a": 1, "b": null, "c": 2}'],
     ["{}", '{"a": 1}', '{"a": 1, }', '{, "b": null}', '{"b": null, "b": null}', '{"b": null, "d": 1}', '{"a": "x", "b": null}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, ["{}", '{"a": 1, "x": []}', '{"x": 1}', '{"ab": 1}', '{"": 1}'],
     ['{"a": "x"}', '{"x": 1, "a": "x"}', '{"a": 1, "a": "x"}', '{"\\u0061": "x"}']),
    ({"properties": {"foo": {"type": "null"}}, "required": ["bar"]}, ['{"bar": 1}', '{"foo": null, "bar": 1}', "3"], ["{}", '{"foo": null}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"a": 1, "b": 2}'], ['{"a": "x"}']),
    ({**OBJECT, "properties": {"a": False, "b": True}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    ({**OBJECT, "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}}}, ['{"n_a": 1, "s_b": "x"}', "{}"],
     ['{"n_a": "x"}', '{"x": 1}', '{"s_b": 1}']),
    ({"type": "object", "patternProperties": {"a": {"type": "integer"}, "aa": {"maximum": 20}}, "properties": {"xa": {"minimum": 3}}},
     ['{"a": 21}', '{"aa": 18}', '{"xa": 3}', '{"b": "x"}'], ['{"a": "bar"}', '{"aaa": 31}', '{"xa": 2}', '{"xa": "x"}']),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, ['{"a": {}, "aa": 1}', "{}"], ['{"aaA": {}}', '{"": 1}']),
    ({"type": "object", "propertyNames": {"enum": ["foo", "bar"]}}, ['{"foo": 1, "bar": 1}', "{}"], ['{"baz": 1}']),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"abc": {}, "b": {}}}, ['{"b": 1, "xx": 1}'], ['{"abc": 1}', '{"xxx": 1}']),
    ({**OBJECT, "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, ['{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'], ["{}", '{"b": 1}']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 1}']),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ({**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({**OBJECT, "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, ["{}", '{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
     ['{"b": 1}', '{"a": 1, "b": null}'], ['{"a": 1, "b": 1}']),
    ({"properties": {"x": {"$ref": "#"}}, "unevaluatedProperties": False}, ["{}", '{"x": {"x": {}}}'], ['{"y": 1}', '{"x": {"y": 1}}']),
    ({"type": "object", "minProperties": 2, "properties": {"a": {}}},
     ['{"a": 1, "x": 2}', '{"x": 1, "y": 2, "z": 3}'], ["{}", '{"a": 1}', '{"x": 1}']),
    ({**OBJECT, "patternProperties": {f"^x{i}_": {"const": i} for i in range(12)}, "properties": {"x1_a": {"type": "integer"}, "b": True}},
     ['{"x1_a": 1, "b": 2, "x11_": 11}', '{"x3_": 3, "x0_": 0}'], ['{"x1_a": 2}', '{"x3_": 4}', '{"c": 1}', '{"x12_": 12}']),
    ({"type": "object", "propertyNames": {"anyOf": [{"const": "id"}, {"pattern": "^x-"}]}}, ['{"id": 1, "x-1": 2}', "{}"], ['{"y": 1}', '{"x": 1}']),
    ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"$ref": "#/$defs/b"}], "properties": {"c": {}}, "unevaluatedProperties": False,
      "type": "object", "$defs": {"b": {"properties": {"b": {}}}}}, ['{"c": 1}', '{"a": null, "b": 1, "c": 1}'], ['{"d": 1}', '{"a": 1}']),
    ({"type": "object", "unevaluatedProperties": {"type": "null"}, "if": {"properties": {"k": {"const": 1}}, "required": ["k"]},
      "then": {"properties": {"v": {"const": 1}}}, "else": {"properties": {"w": {"const": 1}}}},
     ['{"k": 1, "v": 1}', '{"k": null, "w": 1}', '{"v": null}'], ['{"k": 1, "w": 1}', '{"v": 1}', '{"k": 2}']),
    ({"type": "object", "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}],
      "unevaluatedProperties": False}, ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ["{}", '{"a": 1, "b": 2}', '{"a": 1, "c": 1}']),
    # arrays
    ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1]", "[1, 2]"], ['["a"]', "[1, ]", "[1,2]"]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, ["[1]", "[[], {}]"], ["[]", "[1, 2, 3]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"prefixItems": [{"type": "string"}, {"type": "null"}], "items": {"type": "integer"}, "type": "array"},
     ["[]", '["x"]', '["x", null, 2, 3]'], ["[1]", '["x", 2]', '["x", null, "y"]']),
    ({"type": "array", "prefixItems": [True, {"type": "null"}], "items": False, "minItems": 1}, ["[1]", "[1, null]"], ["[]", "[1, null, 2]"]),
    ({"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}}, ["[null, 1]"], ["[1]", "[null, null]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}, ["[null]", "[]"], ["[null, 1]"]),
    ({"type": "array", "contains": {"const": 5}}, ["[5]", "[1, 5, 2]", "[5, 5]"], ["[]", "[1, 2]"]),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 2}, ["[null, 1, null]"], ["[null]", "[1, null]"]),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 3, "minItems": 2}, ["[1, 2]", "[0, 0, 1]"], ["[1]", "[2, 3]", "[1, 2, 3, 4]"]),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 1, "maxContains": 2, "prefixItems": [{"type": "integer"}]},
     ["[1, null]", "[1, null, 2, null]"], ["[1]", "[null]", "[1, null, null, null]"]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0, "maxContains": 1}, ["[]", "[2, 1, 3]"], ["[1, 1]"]),
    ({"type": "array", "items": {"enum": [1, 2, None]}, "uniqueItems": True, "contains": {"type": "null"}}, ["[1, null]", "[null]"], ["[]", "[1]"]),
    ({"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [True, 3]}], "items": False, "uniqueItems": True},
     ["[]", "[true, 3]", "[false, true]"], ["[true, true]", "[3, true]"]),
    ({"type": "array", "allOf": [{"prefixItems": [True]}], "unevaluatedItems": {"type": "null"}}, ["[1, null]", "[]"], ["[1, 2]"]),
    ({"type": "array", "contains": {"type": "string"}, "unevaluatedItems": {"const": 1}}, ['["a", 1]', '[1, "b"]'], ["[1]", '["a", 2]']),
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1}, ['["a"]', '["b", 1, "a"]'],
     ["[]", '["a", "a"]', "[1, 1]"]),
    ({"type": "array", "uniqueItems": False}, ["[1, 1]"], []),
    # combinations
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5}]}, ['"ab"', "5"], ['"abc"', "4", "null"]),
    ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]}, ['"ab"', '"abcd"'], ['"abc"', "1"]),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 3}, "b": {"const": 1}}}]},
     ['{"a": 3}', '{"a": 1, "b": 1}'], ["{}", '{"a": 4}', '{"a": 1, "b": 2}']),
    ({"allOf": [{**OBJECT, "properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"}, ["{}", '{"a": 1}'],
     ['{"b": 1}', '{"a": 1, "b": 1}']),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", "2.5", '"a"'], ["3", "1.5"]),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": name}, name: {"type": "integer"}}, "required": ["k"]} for name in ("a", "b")]},
     ['{"k": "a", "a": 1}', '{"k": "b", "b": 1}'], ['{"k": "c"}', '{"k": "a", "a": "x"}', "{}"]),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}', '{"b": 1}'], ["{}", '{"a": 1, "b": 1}']),
    ({"not": {"type": ["integer", "object"]}}, ['"a"', "1.5", "null", "[]"], ["1", "{}"]),
    ({"not": {"enum": [True, None, "a"]}}, ["false", '"b"', "0"], ["true", "null", '"a"']),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ["{}", '{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
    ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, ["2", "-1.5"], ['"a"', "3", "true"]),
    ({"if": {"exclusiveMaximum": 0}, "else": {"multipleOf": 2}}, ["-1", "4", '"a"'], ["3"]),
    ({"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "v": {}}, "required": ["k"], "if": {"properties": {"k": {"const": "a"}}},
      "then": {"required": ["v"]}}, ['{"k": "a", "v": 1}', '{"k": "b"}'], ['{"k": "a"}', "{}"]),
    ({"type": "object", "not": {"additionalProperties": {"type": "integer"}, "properties": {"a": {"type": "null"}}}},
     ['{"a": 1}', '{"x": "s"}', '{"a": null, "x": 1, "y": []}'], ["{}", '{"a": null, "x": 1}', '{"a": null}']),
    ({"type": "object", "not": {"patternProperties": {"^x": {"const": 1}}}},
     ['{"x1": 2}', '{"a": 1, "x1": 1, "x2": 2}'], ["{}", '{"x1": 1, "a": 2}']),
    ({"type": "object", "not": {"propertyNames": {"maxLength": 1}}}, ['{"ab": 1}', '{"a": 1, "bc": 2}'], ["{}", '{"a": 1}']),
    ({"type": "array", "not": {"prefixItems": [{"const": 1}], "items": {"const": 2}}}, ["[2]", "[1, 3]", "[1, 2, 3]"], ["[]", "[1]", "[1, 2, 2]"]),
    ({"not": {"const": {"a": [1]}}, "type": "object"}, ["{}", '{"a": [2]}', '{"a": [1, 1]}', '{"a": [1], "b": 1}'], ['{"a": [1]}']),
    ({"type": "integer", "not": {"multipleOf": 3}}, ["1", "-4", "100"], ["0", "3", "-9"]),
    ({"oneOf": [{**OBJECT, "properties": {"a": {}, "b": {}}}, {**OBJECT, "properties": {"b": {}, "c": {}}}]},
     ['{"a": 1}', '{"c": 1}', '{"a": 1, "b": 2}'], ["{}", '{"b": 1}', '{"a": 1, "c": 1}']),
    ({"not": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, ["3", "1.5"], ["1", "2.5", '"a"']),
    ({"type": "integer", "not": {"if": {"minimum": 3}, "then": {"maximum": 5}, "else": {"const": 1}}}, ["6", "0", "2"], ["3", "5", "1"]),
    # references
    ({"$ref": "#/$defs/a%22b", "$defs": {'a"b': {"type": "integer"}}}, ["1"], ['"a"']),
    ({"$ref": "#/definitions/x~1y", "definitions": {"x/y": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "http://x/root.json", "$defs": {"i": {"type": "null"}}, "$ref": "root.json#/$defs/i"}, ["null"], ["1"]),
    ({"$id": "http://x/root.json", "$ref": "sub/one.json", "$defs": {
        "i": {"$id": "sub/one.json", "$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, "n": {"type": "integer"}}}, ["null"], ["1"]),
    ({"$dynamicAnchor": "n", "type": "object", "properties": {"next": {"$dynamicRef": "#n"}}, "additionalProperties": False},
     ["{}", '{"next": {"next": {}}}'], ['{"next": 1}']),
    ({"$ref": "#/$defs/i", "minimum": 3, "$defs": {"i": {"type": "integer"}}}, ["3"], ["2", '"a"']),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/i", "minimum": 3, "definitions": {"i": {"type": "integer"}}},
     ["2"], ['"']),
    ({**OBJECT, "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
     ['{"next": null}', '{"v": 1, "next": {"v": 2, "next": null}}'], ["{}", '{"next": {}}']),
    ({"title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c", "readOnly": True, "deprecated": True, "x-own": 3,
      "type": "null"},
     ["null"], ["1"]),
]

REFUSED = [  # schema, keyword, JSON pointer
    ({"type": "array", "uniqueItems": True}, "uniqueItems", ""),
    ({"properties": {"a/b": {"$id": "http://x/y", "$dynamicRef": "#x"}}}, "$dynamicRef", "/properties/a~1b"),
    ({"oneOf": [{"$ref": "#", "if": {"type": "null"}, "else": {"minimum": 1}}], "type": "integer"}, "$ref", ""),
    ({"$ref": "#"}, "$ref", ""), ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, "$ref", ""), ({"not": {"$ref": "#"}}, "$ref", ""),
    ({"items": {"allOf": [{"$ref": "#/$defs/a"}]}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref", "/items/allOf/0"),
    ({"items": {"$ref": "http://elsewhere/x.json"}}, "$ref", "/items"),
    ({"$ref": "#/$defs/none"}, "$ref", ""), ({"$ref": "#none"}, "$ref", ""),
    ({"type": "int"}, "type", ""), ({"required": True}, "required", ""), ({"minLength": -1}, "minLength", ""), ({"pattern": 3}, "pattern", ""),
    ({"anyOf": []}, "anyOf", ""), ({"properties": {"a": 3}}, "properties", ""), ({"multipleOf": 0}, "multipleOf", ""),
    ({"type": "string", "pattern": "(a)\\1"}, "pattern", ""), ({"type": "string", "format": "idn-email"}, "format", ""),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 30_000}, "contains", ""),
    ({"type": "string", "format": "regex", "maxLength": 5}, "format", ""), ({"propertyNames": {"format": "regex"}}, "format", "/propertyNames"),
    ({"type": "string", "not": {"format": "regex"}}, "not", "/not"),
    ({"type": "array", "items": {"enum": list(range(20))}, "uniqueItems": True}, "uniqueItems", ""),
    ({"oneOf": [{"type": "array", "uniqueItems": True}, {"type": "array"}]}, "oneOf", ""),
    ({"not": {"uniqueItems": True}}, "not", "/not"),
    ({"anyOf": [{"properties": {f"a{i}": {}}} for i in range(8)], "unevaluatedProperties": False}, "unevaluatedProperties", ""),
    ({"type": "object", "properties": {f"a{i}": {} for i in range(300)}, "minProperties": 200}, "minProperties", ""),
    ({"type": "integer", "multipleOf": 86413}, "multipleOf", ""), ({"type": "number", "maximum": 1e300}, "maximum", ""),
    ({"type": "string", "pattern": "^(a|b)*a(a|b){12}$", "minLength": 20}, "pattern", ""),
    (False, "schema", ""), ({"enum": []}, "schema", ""), ({"type": "integer", "minimum": 3, "maximum": 2}, "schema", ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "schema", ""), ({"type": "integer", "enum": ["a"]}, "schema", ""),
    ({"type": "array", "items": False, "minItems": 1}, "schema", ""), ({**OBJECT, "required": ["a"]}, "schema", ""),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "schema", ""),
    ("{", "schema", ""), ("[]", "schema", ""), (3, "schema", ""), ({"minimum": float("nan")}, "schema", ""),
]


def run(grammar, text):
    """Does the automaton accept the text?"""
    state = grammar.step_bytes(grammar.start, text.encode())
    return state is not None and grammar.is_accepting(state)


@pytest.mark.parametrize("schema, good, bad", TABLE, ids=[json.dumps(schema)[:60] for schema, _, _ in TABLE])
def test_what_a_schema_accepts(schema, good, bad):
    rules = json_schema_rules(schema)
    grammar = compile_rules(rules, BYTES)
    for text in good:
        assert run(grammar, text), text
    for text in bad:
        assert not run(grammar, text), text
    short = min(good, key=len)
    assert accepts(rules, short.encode())
    if bad and "pattern" not in json.dumps(schema) and "format" not in json.dumps(schema):
        assert not accepts(rules, min(bad, key=len).encode())


def draw(rules, expr, rng, left):
    """A text of an expression, or None if that takes too long."""
    left[0] -= 1
    if left[0] < 0:
        return None
    if isinstance(expr, Byte):
        return bytes([rng.choice([b for b in range(256) if expr.mask >> b & 1])])
    if isinstance(expr, Ref):
        return draw(rules, rules[expr.name], rng, left)
    if isinstance(expr, But):
        return draw(rules, opened(expr), rng, left)
    if isinstance(expr, Or):
        return draw(rules, rng.choice(expr.parts), rng, left) if expr.parts else None
    if isinstance(expr, Repeat):
        turns = [expr.item] * rng.randint(expr.low, expr.low + 1 if expr.high is None else min(expr.high, expr.low + 2))
    parts = [draw(rules, part, rng, left) for part in (expr.parts if isinstance(expr, Cat) else turns)]
    return None if None in parts else b"".join(parts)


@pytest.mark.parametrize("layout", ["fixed", "compact", "flexible"])
def test_what_the_rules_write_is_valid(layout):
    rng, drawn = random.Random(layout), 0
    for schema, _, _ in TABLE:
        rules = json_schema_rules(schema, whitespace=layout)
        checker = Compiler(schema, layout, False)
        for _ in range(10):
            text = draw(rules.rules, Ref("root"), rng, [300])
            found = [] if text is None else [json.loads(text, object_pairs_hook=lambda pairs: Twice if twice(pairs) else dict(pairs))]
            for value in found:
                if not twice([("", value)]):
                    drawn += 1
                    assert checker.holds(value, Part(schema, "")), (schema, text)
    assert drawn > 300


class Twice:
    """In place of an object in which a key comes twice."""


def twice(pairs):
    def held(item):
        return item is Twice or isinstance(item, list) and any(map(held, item))

    return len({key for key, _ in pairs}) < len(pairs) or any(held(item) for _, item in pairs)


@pytest.mark.parametrize("schema, keyword, path", REFUSED, ids=[str(schema)[:60] for schema, _, _ in REFUSED])
def test_what_is_refused_says_so(schema, keyword, path):
    with pytest.raises(GrammarError) as error:
        json_schema_rules(schema)
    assert (error.value.construct, error.value.path) == (keyword, path)
    assert keyword in str(error.value)


def test_the_table_agrees_with_the_reference_where_it_is_installed():
    if importlib.util.find_spec("jsonschema"):
        import jsonschema
        checker = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid"])
        for schema, good, bad in TABLE:
            kind = jsonschema.Draft7Validator if isinstance(schema, dict) and ("$schema" in schema or "additionalItems" in schema
                                                                              or "dependencies" in schema) else jsonschema.Draft202012Validator
            if isinstance(schema, dict) and (schema.get("exclusiveMinimum") is True or schema.get("format") == "no such format"):
                continue
            for text in good:
                assert kind(schema, format_checker=checker).is_valid(json.loads(text)), (schema, text)


def test_layouts():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": [1, {"x": 2}]}}, "b": {"const": {}}}}
    texts = {"fixed": '{"a": [[1, {"x": 2}], [1, {"x": 2}]], "b": {}}', "compact": '{"a":[[1,{"x":2}],[1,{"x":2}]],"b":{}}',
             "flexible": '{\n  "a" : [ [1,{ "x":\t2}],[1, {"x": 2 } ]\n],"b": {} }'}
    for layout in texts:
        grammar = compile_rules(json_schema_rules(schema, whitespace=layout), BYTES)
        for other, text in texts.items():
            assert run(grammar, text) == (layout in (other, "flexible"))
    assert not run(compile_rules(json_schema_rules(schema, whitespace="flexible"), BYTES), "{" + 17 * " " + "}")
    with pytest.raises(GrammarError, match="whitespace"):
        json_schema_rules(schema, whitespace="none")


def test_keys_in_any_order():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": {"x": 1, "y": 2}}, "c": {}}, "required": ["a"]}
    texts = ['{"c": 0, "a": 1}', '{"z": 0, "b": {"y": 2, "x": 1}, "y": 1, "a": 1}', '{"a": 1, "c": 2, "b": {"x": 1, "y": 2}}']
    ordered, free = (compile_rules(json_schema_rules(schema, any_order=any_order), BYTES) for any_order in (False, True))
    assert [run(ordered, text) for text in texts] == [False] * 3 and all(run(free, text) for text in texts)
    assert not any(run(free, text) for text in ('{"c": 1}', '{"a": 1, "a": 1}', '{"b": 1, "a": 1}', '{"c": 0, "a": 1, "c": 0}', "{}"))
    two = compile_rules(json_schema_rules(schema | {"minProperties": 2, "maxProperties": 2}, any_order=True), BYTES)
    assert run(two, '{"z": 1, "a": 1}') and run(two, '{"c": 1, "a": 1}') and not run(two, '{"a": 1}') and not run(two, '{"c": 1, "a": 1, "z": 0}')
    many = {"type": "object", "properties": {f"k{i}": {} for i in range(12)}}
    with pytest.raises(GrammarError, match="any_order at /items: 12 keys .* declared order"):
        json_schema_rules({"items": many}, any_order=True)
    assert json_schema_rules({"items": many})


def test_strict_holds_wherever_an_object_is_described():
    closed = {"type": "object", "properties": {"a": {}}}
    schema = {"type": "object", "properties": {"r": {"$ref": "#/$defs/r"}, "l": {"type": "array", "items": closed},
                                               "u": {"anyOf": [closed, {"type": "null"}]}, "free": {},
                                               "o": {"allOf": [closed, {"properties": {"b": {}}}]}},
              "$defs": {"r": closed}}
    grammar = compile_rules(json_schema_rules(schema, strict=True), BYTES)
    for text in ('{"r": {"a": 1}}', '{"l": [{"a": 1}, {}]}', '{"u": {"a": 1}}', '{"o": {"a": 1, "b": 1}}', '{"free": {"any": {"x": 1}}}'):
        assert run(grammar, text)
        assert not run(grammar, text.replace('"a"', '"x"')) or '"a"' not in text


def test_strict_closes_objects_that_say_nothing():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}, "c": {"type": "object", "additionalProperties": {}}}}
    for strict in (False, True):
        grammar = compile_rules(json_schema_rules(json.dumps(schema), strict=strict), BYTES)
        assert run(grammar, '{"a": {"b": 1}, "c": {"x": 1}}')
        assert run(grammar, '{"x": 1}') != strict and run(grammar, '{"a": {"x": 1}}') != strict


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "null"}}, "required": ["a"]}
    return schema


def union(tag, **more):
    """A branch of a discriminated union."""
    return {**OBJECT, "properties": {**more, "type": {"const": tag}, "a": {"type": "string"}}, "required": [*more, "type"]}


@pytest.mark.parametrize("schema, fits", [
    ({"enum": [f"value-{i * 7919 % 100003}-{i}" for i in range(10_000)], "type": "string", "maxLength": 30}, True),
    ({"enum": list(range(10_000)), "minimum": 5}, True), (nested(300), True), (nested(100_000), False),
    ({"type": "object", "properties": {f"property_{i}": {"type": "string", "description": "d" * 40} for i in range(500)}}, True),
    ({"type": "object", "properties": {f"property_{i}": {"type": "string", "description": "d" * 40} for i in range(10_000)}}, False),
    ({**OBJECT, "properties": {f"property_{i}": {"type": "string"} for i in range(10_000)}, "required": [f"property_{i}" for i in range(10_000)]},
     True),
    ({**OBJECT, "properties": {f"property_{i}": {"type": "string"} for i in range(4000)}}, True),
    ({**OBJECT, "properties": {f"property_{i}": {"type": "string"} for i in range(10_000)}}, False),
    ({"patternProperties": {f"a{i}": {} for i in range(12)}, "type": "object", "additionalProperties": False}, False),
    ({"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "integer"}},
      "$ref": "#/$defs/d0"}, True),
    ({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)], "type": "object"}, False),
    ({"oneOf": [union(f"t{i}") for i in range(1000)]}, True), ({"oneOf": [union(f"t{i}", version={"const": 1}) for i in range(500)]}, True),
    ({"oneOf": [{"const": i} for i in range(2000)]}, True), ({"oneOf": [{"type": "object", "required": [f"k{i}"]} for i in range(1000)]}, False),
    ({"enum": [f"a{i}" for i in range(10_000)], "not": {"enum": [f"b{i}" for i in range(10_000)]}}, True),
    ({"type": "array", "uniqueItems": True, "items": {"enum": list(range(5000))}}, False),
    ({"enum": ["x" * 2**20]}, False), ({"type": "string", "minLength": 2, "maxLength": 10**9}, True),
], ids=["enum", "integers", "deep", "deeper", "wide", "wider", "required",
        "optional", "more optional", "patterns", "doubling", "alternatives", "union", "versions", "constants", "rivals", "enum and not", "distinct", "long", "count"])
def test_what_multiplies_is_bounded(schema, fits):
    begin = time.thread_time()
    if fits:
        json_schema_rules(schema)
    else:
        with pytest.raises(GrammarError):
            json_schema_rules(schema)
    assert time.thread_time() - begin < 4


@pytest.mark.parametrize("schema", [
    {"oneOf": [{"not": {"const": i}} for i in range(300)]}, {"enum": list(range(3000)), "oneOf": [{"const": i} for i in range(3000)]},
    {"type": "string", "allOf": [{"not": {"const": f"x{i}"}} for i in range(5000)]}, {"not": {"oneOf": [{"const": i} for i in range(1000)]}},
    {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(5000)]},
    {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(2000)}, "properties": {f"p{i}": {} for i in range(500)}}])
def test_what_takes_long_asks_for_the_time(schema):
    """All loops that may be long come by `tick`: a deadline that is over ends them."""
    asked = time.thread_time()
    with pytest.raises(GrammarError, match="takes too long"), time_limit(time.monotonic()):
        json_schema_rules(schema)
    assert time.thread_time() - asked < 2


def test_branches_that_may_both_hold_are_all_looked_at():
    rng = random.Random(5)
    values = [1, 1.0, True, "1", None, "x"]
    for _ in range(300):
        branches = []
        for _ in range(rng.randint(2, 6)):
            keys = rng.sample("abc", rng.randint(0, 3))
            listed = {key: {"enum": rng.sample(values, rng.randint(1, 2))} if rng.random() < 0.8 else {} for key in keys}
            branches.append(rng.choice([{"enum": rng.sample(values, 2)}, {"type": rng.choice(["string", "null", ["object", "null"]])}, True, False]) if
                            rng.random() < 0.4 else {"type": "object", "properties": listed, "required": rng.sample(keys, rng.randint(0, len(keys)))})
        made = Compiler({}, "fixed", False)
        parts = [Part(branch, f"/{i}") for i, branch in enumerate(branches)]
        found = made.rivals(parts, "")
        both = [pair for pair in itertools.combinations(range(len(parts)), 2) if not made.impossible(made.flat([parts[i] for i in pair]), 3)]
        assert set(both) <= set(found) and found == sorted(found), branches


@pytest.mark.parametrize("kind, what, text", [("string", "Length", '"ab"'), ("array", "Items", "[1, 2]"),
                                              ("object", "Properties", '{"a": 1, "b": 2}')])
@pytest.mark.parametrize("count", [2**31, 2**31 + 5, 2**32, 2**32 + 1, 2**63 - 1, 2**100, 1e300])
def test_counts_that_nothing_reaches(kind, what, text, count):
    assert run(compile_rules(json_schema_rules({"type": kind, f"max{what}": count}), BYTES), text)
    with pytest.raises(GrammarError, match=f"min{what} at /properties/a: counts go to") as error:
        json_schema_rules({"properties": {"a": {"type": kind, f"min{what}": count}}})
    assert error.value.construct == f"min{what}"
    with pytest.raises(GrammarError, match="counts go to"):
        repeat(Byte(1), 0, int(count))
    most = compile_rules(json_schema_rules({"type": kind, f"min{what}": 2**31 - 1}), BYTES)
    assert not run(most, text)


@pytest.mark.parametrize("schema, accepted, refused", [
    ({"format": "uri", "minLength": 1, "maxLength": 2083},
     ["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b.c", "https://www.example.com/" + "path/%20/" * 10 + "?q=" + "x" * 900, "a:" + "b" * 1900],
     ["", "a", "a:" + "b" * 2082, "https://example.com/" + "p/" * 1100, "//x"]),
    ({"format": "uri", "maxLength": 100}, ["https://example.com/" + "p" * 80, "a:" + "b" * 98], ["https://example.com/" + "p" * 81]),
    ({"format": "uri", "maxLength": 2083, "pattern": "^https?://.+"}, ["http://a", "https://example.com/" + "x/" * 300], ["ftp://a", "http://"]),
    ({"format": "iri", "maxLength": 255}, ["http://ƒøø.ßår/?∂éœ=πîx#πîüx"], ["http://a.b/" + "é" * 250]),
    ({"format": "email", "maxLength": 50}, ["a.b@example.com", "x@" + "y" * 48], ["x@" + "y" * 49, "x@y..z", "@x", "x@-y"]),
    ({"format": "email", "maxLength": 254, "minLength": 6}, ["ab@c.de", "x" * 64 + "@" + "y" * 63], ["a@b.c", "x@" + "y" * 64, "x@y@zzz"]),
    ({"format": "email", "pattern": r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}$", "minLength": 5, "maxLength": 100},
     ["joe.bloggs@example.com"], ["a@b.c", "A@example.com", "a@b", "a" * 89 + "@example.com"]),
    ({"format": "email", "pattern": "o", "minLength": 20}, ["joe.bloggs@example.com"], ["joe@example.com", "jae.blaggs@example.net"]),
    ({"format": "hostname", "maxLength": 63}, ["a-b.c", "a" * 63], ["a" * 64, "a..b", "-a", "a-", "a-.b"]),
    ({"format": "hostname", "maxLength": 100}, ["a-b.c", "a.b." * 15 + "c"], ["a" * 64, ("a" * 49 + ".") * 2 + "b"]),
    ({"format": "date-time", "maxLength": 64}, ["1963-06-19t08:30:06.283185z"], ["1963-06-19t08:30:06." + "0" * 44 + "z"]),
    ({"pattern": "^https?://.+", "maxLength": 2048}, ["https://" + "x" * 2040],
     ["https://" + "x" * 2041, "http://", "x"]),
    ({"pattern": "^a", "minLength": 10, "maxLength": 10**6}, ["a" * 10, "a" + "\n" * 2000], ["a" * 9, "b" * 12]),
    ({"pattern": "b", "minLength": 3, "maxLength": 700}, ["b" * 3, "a" * 699 + "b", "b" + "a" * 699],
     ["bb", "a" * 700 + "b", "b" + "a" * 700]),
    ({"pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 3, "maxLength": 9000}, ["a-b", "ab-" * 100 + "c", "x" * 9000],
     ["ab", "x" * 9001, "ab-" * 3000 + "c"]),
], ids=lambda arg: json.dumps(arg)[:50] if isinstance(arg, dict) else "")
def test_lengths_of_formats_and_patterns(schema, accepted, refused):
    grammar = compile_rules(json_schema_rules({"type": "string", **schema}), BYTES)
    assert [text for text in accepted if not run(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in refused if run(grammar, json.dumps(text, ensure_ascii=False))] == []


def longest(grammar, rng):
    """A text whose string ends only where it must, or nearly."""
    state, text = grammar.start, b""
    while not grammar.is_accepting(state):
        allowed = [b for b in range(256) if grammar.mask(state)[b >> 5] >> (b & 31) & 1]
        inside = [b for b in allowed if b not in b'"\\' and b < 128]
        text += bytes([rng.choice(inside if inside and rng.random() < 0.999 else [b for b in allowed if b == 34] or allowed)])
        state = grammar.step_bytes(state, text[-1:])
    return json.loads(text)


@pytest.mark.parametrize("one", [{"format": "uri"}, {"format": "email"}, {"format": "hostname"}, {"format": "uri-reference"}, {"pattern": "b"},
                                 {"pattern": "^[a-z]+(-[a-z]+)*$"}, {"pattern": "^(ab|c)+$"}], ids=str)
def test_nothing_is_longer_than_its_bound(one):
    rng, whole = random.Random(7), Compiler(one, "fixed", False)
    for high in (9, 64, 66, 700):
        grammar = compile_rules(json_schema_rules({"type": "string", "maxLength": high, "minLength": 4, **one}), BYTES)
        for _ in range(2):
            text = longest(grammar, rng)
            assert 4 <= len(text) <= high and whole.holds(text, Part(one, "")), (high, text)


def test_refusals_name_what_was_sent():
    words = [f"value-{i}" for i in range(10_000)]
    with pytest.raises(GrammarError, match="enum at /properties/a/not: there are too many strings"):
        json_schema_rules({"properties": {"a": {"type": "string", "not": {"enum": words}}}})
    for text in ("[" * 50_000, '{"items":' * 50_000 + "{}" + "}" * 50_000, nested(50_000)):
        with pytest.raises(GrammarError, match="schema at /: is nested too deeply"):
            json_schema_rules(text)
    for text in ('{"enum": [1e999]}', '{"maxLength": 1e999}', '{"minimum": NaN}', '{"const": -Infinity}'):
        with pytest.raises(GrammarError, match="schema at /: .* is no number"):
            json_schema_rules(text)
    keys = {f"key{i}": True for i in range(11)}
    with pytest.raises(GrammarError, match="any_order at /: 11 keys"):
        json_schema_rules({"type": "object", "properties": keys}, any_order=True)


def test_cases_of_others():
    verdicts, names = Counter(), []
    for case in map(json.loads, CASES.read_text().splitlines() if CASES.exists() else ()):
        try:
            grammar = compile_rules(json_schema_rules(case["grammar"], whitespace="flexible" if "layout" in case["tags"] else "fixed"), BYTES)
        except GrammarError as error:
            verdicts[f"refused: {error.construct}"] += 1
            continue
        assert not [text for text in case["reject"] if run(grammar, text)], case["id"]
        missed = [text for text in case["accept"] if not run(grammar, text)]
        verdicts["missed" if missed else "right"] += 1
        names += [case["id"]] * bool(missed)
    print(dict(verdicts), names)
    assert verdicts["right"] >= 0.9 * verdicts.total()
