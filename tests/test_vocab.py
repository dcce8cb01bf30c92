"""Vocabularies: tokens as bytes, against the tokenizers' own decoders, and the tree against brute force."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nano_sgl import weights
from nano_sgl.schema import GrammarError
from nano_sgl.vocab import Vocab, byte_level_table


@pytest.fixture(scope="module")
def demo(demo_path):
    return weights.load_tokenizer(demo_path)


def fast(backend, eos=None):
    return SimpleNamespace(backend_tokenizer=backend, eos_token_id=eos)


def byte_fallback(decoder):
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "é", "▁a", "▁▁", "語", "b▁c", "<0x4>", "<0x41>x"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "Ġthe", "ÃĤ", "語"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return backend


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": lambda: byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_joined_are_what_the_decoder_makes_of_them(kind):
    backend, draw = TOKENIZERS[kind](), random.Random(0)
    vocab = Vocab.from_tokenizer(fast(backend))
    texts = [i for i, token in enumerate(vocab.tokens) if token]
    for _ in range(300):
        ids = [draw.choice(texts) for _ in range(draw.randint(1, 8))]
        if kind != "byte-level":                    # of a run with a bad byte, Fuse makes a replacement character each, where Python may make fewer
            try:
                vocab.decode(ids).decode()
            except UnicodeDecodeError:
                continue
        assert vocab.decode(ids).decode(errors="replace") == backend.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_no_text_and_other_added_tokens_are():
    backend = byte_level()
    vocab = Vocab.from_tokenizer(fast(backend, backend.token_to_id("<|end|>")))
    end, tool = backend.token_to_id("<|end|>"), backend.token_to_id("<tool call>")
    assert vocab.tokens[end] is None and vocab.end_ids == (end,)
    assert vocab.tokens[tool] == b"<tool call>"


@pytest.mark.parametrize("size", [0, 1, 40, 256, 258, 259, 300])
def test_a_size_says_exactly_how_many_ids_there_are(size):
    backend = byte_level()
    end = backend.token_to_id("<|end|>")
    known, vocab = Vocab.from_tokenizer(fast(backend)), Vocab.from_tokenizer(fast(backend), [end], size=size)
    assert vocab.size == len(vocab.tokens) == size
    assert vocab.tokens == (known.tokens + [None] * size)[:size]
    assert vocab.end_ids == ((end,) if end < size else ())
    assert sorted(vocab.order.tolist()) == [i for i, token in enumerate(vocab.tokens) if token]


def test_a_prefix_that_a_decoder_drops_counts_as_a_blank():
    spell = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    vocab = Vocab.from_tokenizer(fast(byte_fallback(spell)))
    assert b" a" in vocab.tokens and b"\xe2" in vocab.tokens and b"<0x4>" in vocab.tokens


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), None], ids=str)
def test_a_decoder_that_spells_by_neighbours_is_refused_by_name(decoder):
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(GrammarError, match="decoder"):
        Vocab.from_tokenizer(fast(backend))


def test_the_demo_vocabulary(demo):
    vocab = Vocab.from_tokenizer(demo)
    assert vocab.size == 49_152 and sum(token is None for token in vocab.tokens) == 17
    assert len({token for token in vocab.tokens if token and len(token) == 1}) == 256 - 21
    for text in ("Hello, \"wörld\"!\n\n\tdef f(x):   return x", "日本語 🙂 ½", "0123 4567"):
        ids = demo.encode(text, add_special_tokens=False)
        assert vocab.decode(ids) == text.encode()


def test_the_byte_table_is_the_libraries():
    assert set(byte_level_table()) == set(pre_tokenizers.ByteLevel.alphabet()) and sorted(byte_level_table().values()) == list(range(256))


@given(st.lists(st.one_of(st.none(), st.binary(max_size=4), st.text("ab", max_size=4).map(str.encode)), max_size=40), st.integers(0, 45))
def test_the_tree_holds_every_token_once(tokens, end):
    vocab = Vocab(tokens, [end])
    texts = [i for i, token in enumerate(tokens) if token and i != end]
    assert sorted(vocab.order.tolist()) == texts
    assert [vocab.tokens[i] for i in vocab.order] == sorted(tokens[i] for i in texts)
    seen, work = 0, [(0, b"")]
    while work:
        node, text = work.pop()
        seen += 1
        below = vocab.order[vocab.first[node] : vocab.end[node]].tolist()
        own = vocab.order[vocab.first[node] : vocab.first[node] + vocab.own[node]].tolist()
        assert sorted(below) == [i for i in texts if tokens[i].startswith(text)]
        assert sorted(own) == [i for i in texts if tokens[i] == text]
        kids = np.arange(vocab.child0[node], vocab.child0[node] + vocab.kids[node])
        assert vocab.byte[kids].tolist() == sorted({tokens[i][len(text)] for i in texts if tokens[i].startswith(text) and len(tokens[i]) > len(text)})
        work += [(kid, text + bytes([vocab.byte[kid]])) for kid in kids.tolist()]
    assert seen == len(vocab.byte)
