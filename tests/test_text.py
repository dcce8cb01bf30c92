"""text.py: pieces join to the decoded text for every kind of tokenizer, stops cut it, and nothing costs more the longer the text is."""

import random
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nano_sgl import weights
from nano_sgl.protocol import SamplingParams
from nano_sgl.text import TOTAL_SEARCH_SECONDS, StopString, TextStream

TEXTS = ["def f(x):\n    return", "a    b", "naïve café", "日本語 テスト", "🙂🙃 👩‍👩‍👧‍👦 ok", "é" * 30, "\n\n \t x", "1, 2, 3", "ﷺ ༀ𝔘", "a\u0301b\u0308",
         "  two blanks first", "ends with blanks   ", "x � y �� z", "ものの一つ、二つ、三つ。のを" * 5]
REAL = ("It was the best of times, it was the worst of times; naïve cafés, 日本語のテキスト, смешанный текст 🙂 and    blanks.\n\n"
        "def f(x):\n    return [i ** 2 for i in x if i > 10]\n") * 3


@pytest.fixture(scope="module")
def tokenizer(demo_path):
    return weights.load_tokenizer(demo_path)


def stream(tokenizer, text, max_new=100_000, **kw):
    """Pieces as they would be streamed, the reason, and the stream, for the tokens of `text` (or for ids)."""
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    s = TextStream(tokenizer, SamplingParams(**kw), [2], max_new)
    pieces, reason = [], None
    for token in ids:
        reason = s.push(token)
        pieces.append(s.take(final=reason is not None))
        if reason:
            break
    else:
        pieces.append(s.take(final=True))
    assert "".join(pieces) == s.text
    return pieces, reason, s


def per_token(s, ids) -> float:
    """Seconds a token that pushing and taking `ids` costs."""
    began = time.process_time()
    for token in ids:
        assert s.push(token) is None
        s.take()
    return (time.process_time() - began) / len(ids)


# ---- tokenizers of every kind, ids 0 to 2 special

def wrap(backend):
    """What a text stream needs of a transformers tokenizer, and the whole-text decoding it is compared with."""
    return SimpleNamespace(backend_tokenizer=backend, vocab_size=backend.get_vocab_size(), encode=lambda text: backend.encode(text).ids,
                           decode=lambda ids, skip_special_tokens=True: backend.decode(list(ids), skip_special_tokens=skip_special_tokens))


SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator([REAL, *TEXTS], trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return backend


def byte_level_across():
    """Tokens that begin and end inside characters, so that no border between two of them is one of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    three = [byte for byte in "あいう".encode()]
    names = [backend_char(byte) for byte in three]
    across = ["".join(names[1:3] + names[:1]), "".join(names[2:3] + names[:2])]
    vocab = {t: i for i, t in enumerate(SPECIAL + alphabet + across)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def backend_char(byte: int) -> str:
    """The character that stands for a byte in a byte-level vocabulary (the printable ones stand for themselves)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))


def fallback(decoder, scheme="first"):
    words = ["▁", "▁▁", "▁▁▁▁", "▁the", "▁of", "▁a", "n", "e", "é", "日", "ï", "v", "▁n", "a", "1", ",", "▁x", "\ufffd", "s", "▁worst", "t", "f", "c"]
    vocab = {t: i for i, t in enumerate(SPECIAL + [f"<0x{b:02X}>" for b in range(256)] + words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    return backend


def llama2():
    return fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))


def mistral():
    return fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]))


def gemma():
    return fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "never")


def wordpiece():
    words = ["the", "##s", "##ing", "cat", "##x", ".", ",", "n't", "do", "'", "##'", "?"]
    backend = Tokenizer(models.WordPiece(vocab={t: i for i, t in enumerate(SPECIAL + words)}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(SPECIAL)
    return backend


def suffixed():
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + ["a</w>", "b", "c</w>", "d"])}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS = [byte_level, byte_level_across, llama2, mistral, gemma, wordpiece, suffixed]
MADE = {make.__name__: wrap(make()) for make in KINDS}


def random_ids(rng, kind, count):
    """Ids of one of several moods: all of them, few of them many times, mostly special, mostly the last."""
    size = MADE[kind].vocab_size
    some = [rng.randrange(size) for _ in range(rng.choice([1, 2, 3, 8]))]
    pick = rng.choice([lambda: rng.randrange(size), lambda: rng.choice(some), lambda: rng.choice([rng.randrange(3), rng.randrange(size)]),
                       lambda: rng.randrange(max(0, size - 25), size)])
    return [pick() for _ in range(count)]


@pytest.mark.parametrize("kind", MADE)
def test_random_ids_of_every_kind_join_to_the_decoded_text(kind):
    rng, made = random.Random(kind), MADE[kind]
    for _ in range(400):
        ids = random_ids(rng, kind, rng.randrange(1, 33))
        for skip in (True, False):
            pieces, reason, s = stream(made, ids, ignore_eos=True, skip_special_tokens=skip)
            assert reason is None and s.text == made.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", MADE)
def test_long_random_ids_of_every_kind_join_too(kind):
    """Beyond 32 byte tokens in a run one late bad byte may spoil what is out; runs shorter than that never differ."""
    rng, made, equal = random.Random(kind), MADE[kind], 0
    for _ in range(60):
        ids, run = [], 0
        for token in random_ids(rng, kind, 600):
            is_byte = kind in ("llama2", "mistral", "gemma") and 3 <= token < 259
            run = run + 1 if is_byte else run if token < 3 else 0
            if run <= 32:
                ids.append(token)
        s = stream(made, ids, ignore_eos=True)[2]
        assert s.text == made.decode(ids)


@pytest.mark.parametrize("kind", ["llama2", "mistral", "gemma", "byte_level"])
@pytest.mark.parametrize("text", [*TEXTS, REAL])
def test_real_text_of_every_kind_joins_without_replacements(kind, text):
    made = MADE[kind]
    ids = made.encode(text)
    pieces, _, s = stream(made, ids)
    assert s.text == made.decode(ids) and s.text.strip() == text.strip()
    assert "\ufffd" in text or not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("kind", ["llama2", "mistral", "gemma"])
def test_long_runs_of_byte_tokens(kind):
    """Whole characters come out before the run ends, a broken run is replacements to its end, what follows keeps its blank."""
    made = MADE[kind]
    tokens = [made.backend_tokenizer.token_to_id(f"<0x{b:02X}>") for b in ("🙂" * 100).encode()]
    word = made.backend_tokenizer.token_to_id("▁the")
    for ids in (tokens, [word, *tokens], [*tokens, word, word], [word] + tokens[1:], [tokens[1]] * 500 + [word], tokens[:2] * 300 + [word],
                *([*tokens[:n], word, *tokens] for n in (32, 36, 40, 64))):
        pieces, _, s = stream(made, ids)
        assert s.text == made.decode(ids)
        assert max(map(len, pieces)) <= 40
    broken = [*tokens, tokens[0], word]             # what was out stays; the rest are replacements
    s = stream(made, broken)[2]
    assert s.text.startswith("🙂" * 95) and s.text.endswith(" the") and len(s.text) < 115


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(MADE)), st.lists(st.integers(0, 300), max_size=32), st.integers(0, 2))
def test_any_ids_join(kind, ids, times):
    made = MADE[kind]
    ids = [i for i in ids if i < made.vocab_size] * times
    if len(ids) <= 32:
        assert stream(made, ids, ignore_eos=True)[2].text == made.decode(ids)


def test_ids_beyond_the_vocabulary_have_no_text():
    made = MADE["llama2"]
    ids = [*made.encode("the é"), 50_000, *made.encode("the")]
    assert stream(made, ids)[2].text == made.decode(ids)


# ---- the demo's tokenizer

@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_decoded_text(tokenizer, text):
    pieces, _, s = stream(tokenizer, text)
    assert s.text == tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert "\ufffd" in text or not any("\ufffd" in p for p in pieces)


def test_random_ids_join_to_the_decoded_text(tokenizer):
    rng = random.Random(0)
    for _ in range(150):
        ids = [rng.choice([rng.randrange(3, 49152), rng.randrange(3, 400)]) for _ in range(40)]
        pieces, reason, s = stream(tokenizer, ids)
        assert reason is None and s.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_never_shown(tokenizer):
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    pieces, _, _ = stream(tokenizer, ids * 3)
    assert [p for p in pieces if p] == ["🙂"] * 3
    pieces, _, _ = stream(tokenizer, ids[:-1])
    assert pieces[:-1] == [""] * (len(ids) - 1) and set(pieces[-1]) == {"\ufffd"}


def test_a_character_is_shown_with_its_last_token(tokenizer):
    """Nothing is held that is complete: in byte-level text every token but those inside a character shows something."""
    pieces, _, _ = stream(tokenizer, REAL.replace("日本語のテキスト", "").replace("🙂", ""))
    assert all(pieces[:-1])


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_bytes_that_never_become_characters_cost_the_same_for_ever(kind):
    made = MADE[kind]
    names = {"byte_level": [backend_char(b) for b in (0x80, 0xE3, 0xF0)], "llama2": ["<0x80>", "<0xE3>", "<0xF0>"]}[kind]
    for token in map(made.backend_tokenizer.token_to_id, names):
        ids = [token] * 4000
        s = stream(made, ids)[2]
        assert s.text == made.decode(ids) == "\ufffd" * 4000
        s = TextStream(made, SamplingParams(), [], 10**9)
        first, last = per_token(s, ids), per_token(s, ids)
        assert last < 3 * first + 5e-6 and last < 200e-6


def test_characters_across_every_border_cost_the_same_for_ever():
    made = MADE["byte_level_across"]
    ids = [made.vocab_size - 2, made.vocab_size - 1] * 3000
    assert stream(made, ids)[2].text == made.decode(ids)
    s = TextStream(made, SamplingParams(), [], 10**9)
    per_token(s, ids)
    assert len(s._window) <= 64


def test_thousands_of_tokens_cost_no_more_each_than_the_first(tokenizer):
    ids = tokenizer.encode(REAL)
    for kw in ({}, {"stop": ["###", "\n\n\n", "never this"]}, {"stop_regex": r"never \d+ this"}):
        s = TextStream(tokenizer, SamplingParams(**kw), [], 10**9)
        first = min(per_token(s, ids * 5) for _ in range(2))
        for _ in range(20):
            s._searched_s = 0.0                     # which ends at a second, on whatever machine
            per_token(s, ids * 20)
        assert min(per_token(s, ids * 5) for _ in range(3)) < 2 * first + 10e-6
        assert len(s._recent) < 20_000 and len(s._window) < 64
    took = s.count
    assert s.text == tokenizer.decode(ids * (took // len(ids)))


def test_text_that_nobody_takes_comes_whole_in_the_end(tokenizer):
    ids = tokenizer.encode(REAL) * 60
    s = TextStream(tokenizer, SamplingParams(stop="never this"), [], 10**9)
    assert {s.push(token) for token in ids} == {None}
    assert s.take(final=True) == s.text == REAL * 60 and s.take(final=True) == ""


# ---- stop strings

def test_a_stop_string_is_found_over_tokens_and_never_shown(tokenizer):
    pieces, reason, s = stream(tokenizer, " 6, 7, 8, 9, 10, 11", stop=["9, 10"])
    assert ("".join(pieces), reason, s.stop_reason) == (" 6, 7, 8, ", "stop", "9, 10")
    assert not any("9" in p for p in pieces)
    pieces, reason, _ = stream(tokenizer, " 6, 7, 8, 9, 10, 11", stop="9, 10", no_stop_trim=True)
    assert "".join(pieces) == " 6, 7, 8, 9, 10"


def test_what_cannot_begin_a_stop_is_not_held(tokenizer):
    pieces, _, _ = stream(tokenizer, " 6, 7, 8, 9,", stop=["###"])
    assert sum(map(bool, pieces)) >= 10 and pieces[0] == " "
    pieces, _, _ = stream(tokenizer, " a# b## c### d", stop=["###"])
    assert "".join(pieces) == " a# b## c"


def test_overlapping_stops_and_a_stop_that_never_completes(tokenizer):
    for stops in (["7", "6, 7"], ["6, 7", "7"]):
        pieces, reason, _ = stream(tokenizer, " 6, 7, 8", stop=stops)
        assert "7" not in "".join(pieces) and reason == "stop"
    pieces, reason, _ = stream(tokenizer, " 6, 7, 8, 9", stop=["9, 10"])
    assert "".join(pieces) == " 6, 7, 8, 9" and reason is None


def test_of_stops_completing_together_the_one_that_starts_first_wins(tokenizer):
    ids = tokenizer.encode(" information")
    assert len(ids) == 1
    for kw, text, why in (({"stop": ["format", "info"]}, " ", "info"), ({"stop": ["tion"], "stop_regex": "f.r"}, " in", "for"),
                          ({"stop": ["nf"], "stop_regex": "f.r"}, " i", "nf"), ({"stop": ["info", "inf"]}, " ", "inf"),
                          ({"stop_regex": ["mat", "orm"]}, " inf", "orm")):
        for order in (1, -1):
            kw = {name: value[::order] if isinstance(value, list) else value for name, value in kw.items()}
            _, reason, s = stream(tokenizer, ids, **kw)
            assert (reason, s.text, s.stop_reason) == ("stop", text, why)
            assert stream(tokenizer, ids, no_stop_trim=True, **kw)[2].text == text + why


@settings(max_examples=300, deadline=None)
@given(st.text("ab", min_size=1, max_size=8), st.lists(st.text("ab", max_size=6), max_size=12))
def test_the_automaton_finds_and_holds_what_a_plain_search_does(word, pieces):
    stop, text = StopString(word), ""
    for piece in pieces:
        before, text = len(text), text + piece
        end = stop.read(text, before)
        first = text.find(word)
        assert end == (None if first < 0 else first + len(word))
        if end is not None:
            return
        assert stop.state == max(n for n in range(len(word)) if text.endswith(word[:n]))


def test_long_repetitive_stops_cost_nothing_to_make_and_little_to_follow(tokenizer):
    """32 stops of 4,096 characters that match almost to their end, over and over."""
    stops = ["a" * (4095 - i) + chr(ord("b") + i % 20) + "a" * i for i in range(32)]
    a = tokenizer.encode("a")
    began = time.process_time()
    s = TextStream(tokenizer, SamplingParams(stop=stops), [], 10**9)
    assert time.process_time() - began < 0.05
    assert per_token(s, a * 9000) < 300e-6
    assert s._held == 9000 - 4095, "all that can begin a stop is held, and no more"
    assert s.push(tokenizer.encode("b")[0]) == "stop" and s.text == "a" * (9000 - 4095)
    two = ["ab" * 2047 + "ac", "ba" * 2047 + "bd"]
    ids = tokenizer.encode("ab" * 5000)
    assert per_token(TextStream(tokenizer, SamplingParams(stop=two), [], 10**9), ids) < 300e-6


def test_a_long_stop_that_breaks_off_comes_out_at_once(tokenizer):
    s = TextStream(tokenizer, SamplingParams(stop="a" * 4000), [], 10**9)
    a, z = tokenizer.encode("a")[0], tokenizer.encode("z")[0]
    for _ in range(3999):
        assert s.push(a) is None and s.take() == ""
    assert s.push(z) is None and s.take() == "a" * 3999 + "z"


def test_a_stop_string_beats_the_end_id_and_the_length_of_the_same_token():
    made = MADE["llama2"]
    ids = made.encode("the 🙂")
    assert stream(made, [*ids, 2], stop="🙂")[1:][0] == "stop"
    for last, kw in (([2], {}), ([], {"max_new": len(ids)})):       # held bytes complete the stop when the text ends
        pieces, reason, s = stream(made, [*ids, *last], stop="🙂", **kw)
        assert (reason, s.stop_reason, s.text) == ("stop", "🙂", "the ")
    _, reason, s = stream(made, [*ids, 2], stop="</s>", no_stop_trim=True, skip_special_tokens=False)
    assert (reason, s.stop_reason, s.text) == ("stop", "</s>", "the 🙂</s>")


def test_held_text_comes_out_at_the_end(tokenizer):
    ids = tokenizer.encode(" 6, 7, 8, 9,")
    assert stream(tokenizer, [*ids, 2], stop="9, 10")[2].text == " 6, 7, 8, 9,"
    assert "".join(stream(tokenizer, ids, stop="9, 10", max_new=len(ids))[0]) == " 6, 7, 8, 9,"
    half = tokenizer.encode("🙂")[:-1]
    assert stream(tokenizer, [*ids, *half, 2], stop="9, 10")[2].text == " 6, 7, 8, 9,\ufffd"


# ---- stop patterns

def test_stop_regex(tokenizer):
    pieces, reason, s = stream(tokenizer, "the year 1984 was", stop_regex=r"\d{4}")
    assert ("".join(pieces), reason, s.stop_reason) == ("the year ", "stop", "1984")
    assert not any(c.isdigit() for c in "".join(pieces))
    pieces, _, _ = stream(tokenizer, "the year 198 was", stop_regex=r"\d{4}")
    assert "".join(pieces) == "the year 198 was" and " was" in pieces[-2]
    assert stream(tokenizer, "a 1 b 2", stop_regex=r"(?<=b )\d")[2].text == "a 1 b "


def test_a_stop_regex_without_end_is_cut_off(tokenizer):
    with pytest.raises(TimeoutError):
        stream(tokenizer, "a" * 4000 + "b", stop_regex=r"(a|a|aa)*\1*c")


def test_a_stop_regex_that_is_slow_at_every_token_has_a_budget(tokenizer):
    """The text grows as long as one search stays below its limit; all searches together end at theirs."""
    s = TextStream(tokenizer, SamplingParams(stop_regex=r"(?s)x(.*?.*?q)+!"), [], 10**9)
    x, a = tokenizer.encode("x")[0], tokenizer.encode("a")[0]
    s.push(x)
    began = time.process_time()
    with pytest.raises(TimeoutError):
        for _ in range(100_000):
            s.push(a)
    assert time.process_time() - began < 3 * TOTAL_SEARCH_SECONDS + 1
    assert re.fullmatch("xa+", s.take(final=True))


# ---- min_tokens, end ids, length

def test_min_tokens_come_before_any_stop(tokenizer):
    ids = tokenizer.encode(" 6, 7, 8, 6, 7, 9")
    pieces, reason, s = stream(tokenizer, ids, stop=["6"], min_tokens=8)
    assert (reason, s.text, s.stop_reason) == ("stop", " 6, 7, 8, ", "6") and s.count >= 8
    assert all(pieces[:7]), "text streams although nothing is searched yet"
    pieces, reason, s = stream(tokenizer, ids, stop_regex="6", min_tokens=8)
    assert (reason, s.text) == ("stop", " 6, 7, 8, ")


def test_no_stop_begins_before_min_tokens(tokenizer):
    ids = [tokenizer.encode(c)[0] for c in "abcabc"]
    for kw in ({"stop": "bca"}, {"stop_regex": "bca"}):
        assert stream(tokenizer, ids, **kw)[2].text == "a"
        pieces, reason, s = stream(tokenizer, ids, min_tokens=3, **kw)     # "ab" is never searched
        assert (reason, s.text) == (None, "abcabc") and pieces[:4] == ["a", "b", "c", "a"]
        assert stream(tokenizer, ids, min_tokens=2, **kw)[2].text == "a"
    made = MADE["llama2"]                                                  # nor in bytes that waited while it passed
    ids = [*made.encode("the 🙂🙂"), 2]
    assert stream(made, ids, min_tokens=len(ids) - 3, stop="🙂")[2].text == "the 🙂"
    assert stream(made, ids, min_tokens=len(ids) - 3, stop_regex="🙂+")[2].text == "the 🙂"


def test_end_ids_end_the_text_and_special_tokens_are_left_out(tokenizer):
    ids = tokenizer.encode("hi there")
    assert stream(tokenizer, [*ids, 2, 5])[:2] == ([*[tokenizer.decode([i]) for i in ids], ""], "stop")
    pieces, reason, _ = stream(tokenizer, [*ids, 2, *ids], ignore_eos=True)
    assert "".join(pieces) == "hi therehi there" and reason is None
    pieces, _, _ = stream(tokenizer, [1, *ids], skip_special_tokens=False)
    assert "".join(pieces) == "<|im_start|>hi there"
    _, reason, s = stream(tokenizer, ids, stop_token_ids=[ids[1]])
    assert (reason, s.stop_reason, s.text) == ("stop", ids[1], "hi")
    assert stream(tokenizer, ids, stop_token_ids=[ids[1]], no_stop_trim=True)[2].text == "hi there"


def test_length_is_the_last_reason(tokenizer):
    s = TextStream(tokenizer, SamplingParams(), [2], 2)
    assert (s.push(216), s.push(2)) == (None, "stop")
    s = TextStream(tokenizer, SamplingParams(), [2], 2)
    assert (s.push(216), s.push(38)) == (None, "length")
