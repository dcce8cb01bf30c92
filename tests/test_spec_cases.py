"""Speculation as users meet it: the cases of tests/cases/spec.jsonl that have a request, sent to a server that guesses and to one that does not.

Both have the demo model in float32, and get one request at a time, so that their greedy texts are the same to the last token. Everything is asked
twice: the second time the whole answer is in the cache, and guessed. The other cases: test_spec, test_speculation.
"""

import json

import jsonschema
import pytest
from test_server_demo import Demo, expand

CHAT = "/v1/chat/completions"
THINGS = ("city river mountain animal colour fruit planet metal language writer painter game tool drink flower tree bird fish country lake island street "
          "bridge song film season month dish cheese spice").split()


@pytest.fixture(scope="module")
def servers():
    """(without guesses, with them)"""
    both = Demo(), Demo("--speculative-algorithm", "ngram+radix", "--speculative-draft-length", "fixed")
    try:
        yield both
    finally:
        logs = [server.close() for server in both]
    assert not any("Traceback" in log for log in logs), logs


def alike(servers, case: dict, **changes) -> dict:
    """The choice that both servers answer with, twice, and guesses of which some were right."""
    plain, guessing = servers
    expected = plain.case(case, **changes).json()
    before = guessing.stats()
    for _ in range(2):
        got = guessing.case(case, **changes).json()
        assert [without_logprobs(c) for c in got["choices"]] == [without_logprobs(c) for c in expected["choices"]]
        assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    now = guessing.stats()
    assert now["spec_num_correct_drafts"] > before.get("spec_num_correct_drafts", 0)
    return {**got["choices"][0], "expected": expected["choices"][0]}


def without_logprobs(choice: dict) -> dict:
    return {key: value for key, value in choice.items() if key != "logprobs"}


def test_F141_a_stop_string_inside_a_block_ends_the_text(servers, api_case):
    """F141"""
    choice = alike(servers, api_case("F141"))
    assert choice["finish_reason"] == "stop" and "7," not in choice["text"]
    assert alike(servers, api_case("F141"), no_stop_trim=True)["text"] == choice["text"] + "7,"


def test_F143_nothing_stands_behind_an_end_that_was_guessed(servers, api_case):
    """F143"""
    choice = alike(servers, api_case("F143"))
    assert choice["finish_reason"] == "stop" and "Paris" in choice["message"]["content"] and "<|im_end|>" not in choice["message"]["content"]


def test_F145_logprobs_are_those_of_their_tokens(servers, api_case):
    """F145"""
    choice = alike(servers, api_case("F145"))
    got, expected = choice["logprobs"], choice["expected"]["logprobs"]
    assert got["tokens"] == expected["tokens"] and got["text_offset"] == expected["text_offset"] and min(got["token_logprobs"]) < 0
    assert got["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
    for top, other in zip(got["top_logprobs"], expected["top_logprobs"]):
        assert top == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("things", [THINGS[:3], pytest.param(THINGS[3:], marks=pytest.mark.long)], ids=["few", "all"])
def test_F147_guesses_are_masked_each_in_its_own_state(servers, api_case, things):
    """F147"""
    case, seen = api_case("F147"), set()
    schema = expand(case["request"]["body"])["response_format"]["json_schema"]["schema"]
    for thing in things:
        choice = alike(servers, case, messages=[{"role": "user", "content": f"Give me a {thing} and a number."}])
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["finish_reason"] == "stop"
        seen.add(choice["message"]["content"])
    assert len(seen) > 1
