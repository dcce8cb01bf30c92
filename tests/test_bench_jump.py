"""bench/jump_forward.py: counts, distributions against sums by hand, and one small run from end to end."""

import json
import sys
from pathlib import Path

import engines
import numpy as np
import pytest
import torch

from nano_sgl import grammar as grammars
from nano_sgl.vocab import Vocab

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import jump_forward  # noqa: E402

WORDS = [b'{"', b'": ', b'": "', b'", "', b'"}', b"name", b"colour", b"red", b"green", b"A"]


def test_the_published_profile(demo_path):
    """33 tokens, of which the model has to produce 12."""
    from nano_sgl import weights
    vocab = Vocab.from_tokenizer(weights.load_tokenizer(demo_path))
    profile = dict(zip(jump_forward.PROFILE["properties"], ("Hermione Granger", 17, "Gryffindor", "student")))
    found = {}
    for layout in jump_forward.LAYOUTS:
        machine = grammars.compile("json_schema", json.dumps(jump_forward.PROFILE), vocab, whitespace=layout)
        found[layout] = jump_forward.Count()
        assert jump_forward.count(machine, jump_forward.written(profile, layout).encode(), found[layout])
        assert not jump_forward.count(machine, b'{"name": 7}', found[layout]) and found[layout].texts == 1
    fixed = found["fixed"]
    assert fixed.tokens == 33 and fixed.appended == 12 and len(fixed.sizes) == 12
    assert found["flexible"].inside < found["compact"].inside < fixed.inside
    assert len(found["flexible"].sizes) > len(fixed.sizes)


def test_counts_by_hand():
    vocab = Vocab([bytes([b]) for b in range(256)] + WORDS + [None], [256 + len(WORDS)])
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "colour": {"enum": ["red", "green"]}}, "required": ["name", "colour"],
              "additionalProperties": False}
    machine, into = grammars.compile("json_schema", json.dumps(schema), vocab), jump_forward.Count()
    assert jump_forward.count(machine, b'{"name": "A", "colour": "red"}', into)     # {" name ": " A ", " colour ": " red "} end
    assert (into.texts, into.tokens, into.inside) == (1, 9, 6)
    assert into.sizes == [4, 1, 3, 2], '{" name ": " A | ", " | colour ": " red | "} and the end'
    assert into.appended == 5, '{" and on; A; ", " and on; red and on; the end'


def test_what_is_said_next_is_what_the_engine_says(path):
    """`Reader` beside the logprobs of the engine, and `next_byte` beside a sum over all tokens and pairs of tokens."""
    engine = engines.make(path, dtype="float32")
    vocab = jump_forward.vocab_of(engine)
    reader, texts = jump_forward.Reader(engine), [[5, 6, 7], [5, 6, 9, 4], [5, 6, 7, 8], [5, 3, 3]]
    for some in (texts, texts[1:], texts[:1], texts[::-1]):
        found = torch.log_softmax(reader.logits(some), 1)
        for ids, row in zip(some, found):
            params = engines.params(max_tokens=1, temperature=0, logprobs=20, ignore_eos=True)
            answer = engines.run(engines.make(path, dtype="float32"), [engines.request("a", ids, params)])["a"]
            for token, logprob in answer.logprobs[0].top:
                assert float(row[token]) == pytest.approx(logprob, abs=1e-4)
    machine = grammars.compile("regex", "ab(c|d)", vocab)
    made, head = jump_forward.next_byte(reader, machine, [5, 6, 7], machine.start, b"ab"), [5, 6, 7]
    weights: dict[bytes, float] = {b"": 1.0}
    ids_of, state_of, total = {b"": head}, {b"": machine.start}, np.zeros(257)
    while weights:      # in a vocabulary of bytes there is one way to each text
        text, weight = weights.popitem()
        mask = np.unpackbits(machine.mask(state_of[text]).view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(mask).tolist() if vocab.tokens[token]]
        shares = torch.softmax(reader.logits([ids_of[text]])[0][allowed], 0).tolist()
        for token, share in zip(allowed, shares):
            longer = text + vocab.tokens[token]
            if len(longer) > 2:
                total[longer[2]] += weight * share
            else:
                weights[longer], ids_of[longer], state_of[longer] = weight * share, [*ids_of[text], token], machine.step(state_of[text], token)
    assert made == pytest.approx(total, abs=1e-4) and made.sum() == pytest.approx(1)


def test_chi_square():
    same, other = ["a"] * 500 + ["b"] * 500, ["a"] * 700 + ["b"] * 300
    assert jump_forward.chi_square(same, same) == (0, 1, 1)
    value, freedom, p = jump_forward.chi_square(same, other)
    assert freedom == 1 and value == pytest.approx(200**2 / 1200 + 200**2 / 800) and p < 1e-10
    value, freedom, p = jump_forward.chi_square(["a"] * 20 + list("xyz"), ["a"] * 20 + list("uvw"))
    assert (value, freedom, p) == (0, 1, 1), "what is rare is one kind"


def test_from_end_to_end(path, capsys, monkeypatch):
    monkeypatch.setattr(jump_forward, "SCHEMAS", jump_forward.SCHEMAS[:2] + [one for one in jump_forward.SCHEMAS if one[0] in jump_forward.CALLS[:1]])
    monkeypatch.setattr(jump_forward, "PROMPTS", 1)
    monkeypatch.delenv("NANO_SGL_CASES", raising=False)
    flags = {"--model": path, "--dtype": "float32", "--workloads": "profile,calls", "--batches": 2, "--layouts": "fixed", "--repeats": 1,
             "--tokens": 8, "--samples": 4}
    jump_forward.main([str(word) for flag in flags.items() for word in flag])
    printed = capsys.readouterr().out.split("\n\n")[1:]
    tables = [[row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")] for table in printed]
    modes, nothing, counts, choices, answers = tables
    assert [len(table) - 1 for table in tables] == [2 * 2, 3, 3, 2, 3]
    for row in modes[1:] + nothing[1:]:
        if row[3] == "draft":
            answered, asked = row[-1].split(" of ")
            assert answered == asked, "in float32 the texts are those of off"
    assert answers[2][1] == "draft" and answers[2][-1] == "4" and choices[1][0] == "profile" and counts[1][0] == "profile"


@pytest.mark.parametrize("flags", [["--only", "poems"], ["--modes", "guess"], ["--repeats", "0"], ["--batches", "0"], ["--layouts", "round"]])
def test_flags_that_make_no_sense(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        jump_forward.main(flags)
    assert stopped.value.code == 2
