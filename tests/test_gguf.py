"""GGUF files, written with gguf's own writer from tiny checkpoints, against `transformers` on the values they really hold."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import textwrap
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import tiny
import torch
import transformers
from test_model import ROPE, close, whole
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nano_sgl import model, weights
from nano_sgl.weights import ModelError

Q = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows of whole K-quant blocks
NAMES = {ours: theirs for theirs, ours in weights.GGUF_NAMES.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANO_SGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- writing a file as llama.cpp's converter does


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permute: row i and row i + D/2 of each head become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def separate(rows: np.ndarray, heads: int) -> np.ndarray:
    """The other way round, as `transformers` undoes it."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(2, 1).reshape(rows.shape)


def gguf_name(name: str) -> str:
    *front, kind = name.split(".")
    if front[:2] == ["model", "layers"]:
        return f"blk.{front[2]}.{NAMES['.'.join(front[3:])]}.{kind}"
    return f"{NAMES['.'.join(front)]}.{kind}"


def random_blocks(kind: Q, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Valid blocks of a K-quant, which the gguf package cannot make out of numbers: random bits under small scales."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, block_bytes), np.uint8)
    scale = lambda size: rng.uniform(0.5, 1.5, (len(blocks), 1)).astype(np.float16) * np.float16(size)
    if kind == Q.Q6_K:
        blocks[:, -2:] = scale(5e-5).view(np.uint8)
    else:
        size = 2.5e-4 if kind == Q.Q4_K else 1.2e-4
        blocks[:, 0:2], blocks[:, 2:4] = scale(size).view(np.uint8), scale(size * (7 if kind == Q.Q4_K else 15)).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(file: Path, path: Path, kind: Q = Q.F32, *, arch: str | None = None, metadata: dict | None = None,
          tokenizer: dict | None = None, drop=(), tensors: dict | None = None) -> dict[str, torch.Tensor]:
    """Write the checkpoint at `path` as GGUF. Returns what the file then holds, with `transformers`' names and order of rows."""
    hf = transformers.AutoConfig.from_pretrained(path)
    net, rng, held = tiny.reference(path), np.random.default_rng(0), {}
    arch = arch or hf.model_type
    heads = {"q_proj": hf.num_attention_heads, "k_proj": hf.num_key_value_heads} if arch == "llama" else {}
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    writer = gguf.GGUFWriter(file, arch)
    stated = {"block_count": hf.num_hidden_layers, "context_length": hf.max_position_embeddings,
              "embedding_length": hf.hidden_size, "feed_forward_length": hf.intermediate_size,
              "attention.head_count": hf.num_attention_heads, "attention.head_count_kv": hf.num_key_value_heads,
              "attention.key_length": head_dim, "attention.value_length": head_dim,
              "attention.layer_norm_rms_epsilon": hf.rms_norm_eps, "rope.freq_base": hf.rope_parameters["rope_theta"],
              "rope.dimension_count": head_dim, "vocab_size": hf.vocab_size}
    for key, value in (stated | (metadata or {})).items():
        key = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{arch}.{key}"
        if value is not None:
            add(writer, key, value)
    for key, value in (tokenizer or {}).items():
        add(writer, f"tokenizer.{key}", value)
    for name, parameter in net.state_dict().items():
        if name in drop or (name == "lm_head.weight" and hf.tie_word_embeddings):
            continue
        count, values = heads.get(name.split(".")[-2]), parameter.float().numpy()
        stored = interleave(values, count) if count else values
        if values.ndim == 1:
            kind_here, data = Q.F32, stored
        elif kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
            kind_here, data = kind, random_blocks(kind, values.shape, rng)
        else:
            kind_here, data = kind, gguf.quantize(stored, kind)
        back = gguf.dequantize(data, kind_here) if values.ndim > 1 else data
        held[name] = torch.from_numpy((separate(back, count) if count else back).copy())
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind_here)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def add(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](key, value)


@torch.no_grad()
def logits_of(path: Path, held: dict[str, torch.Tensor], ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """`transformers` with these weights, rounded to the dtype of the converted checkpoint."""
    net = tiny.reference(path)
    net.load_state_dict({name: tensor.to(dtype).float() for name, tensor in held.items()}, strict=False)
    net.tie_weights()
    return net(torch.tensor([ids])).logits[0]


# ---- weights


KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_block_type_of_a_llama(kind, tmp_path):
    path = tiny.checkpoint(tmp_path / "hf", **WIDE)
    held = write(tmp_path / "m.gguf", path, kind)
    made = weights.resolve(tmp_path / "m.gguf")
    dtype = {Q.F32: torch.float32, Q.F16: torch.float16}.get(kind, torch.bfloat16)
    assert weights.Checkpoint(made).dtype() == dtype and weights.load_config(made)["dtype"] == str(dtype).removeprefix("torch.")
    theirs = logits_of(path, held, tiny.ids(40), dtype)
    close(whole(made, tiny.ids(40)), theirs)
    assert theirs.std() > 0.3


FAMILIES = {
    "llama, group of 3": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, head_dim 32": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    family, config = FAMILIES[name]
    path = tiny.checkpoint(tmp_path / "hf", family, **config)
    write(tmp_path / "m.gguf", path)
    made = weights.resolve(tmp_path / "m.gguf")
    close(whole(made, tiny.ids(40)), tiny.logits(path, tiny.ids(40)))
    close(tiny.logits(made, tiny.ids(40)), tiny.logits(path, tiny.ids(40)))  # transformers loads what we made
    assert weights.load_config(made)["tie_word_embeddings"] == bool(config.get("tie_word_embeddings"))


def test_transformers_reads_the_same_weights_out_of_the_file(tmp_path):
    """Its own GGUF reader as a second opinion: names, order of rows, config."""
    path = tiny.checkpoint(tmp_path / "hf", "llama", num_key_value_heads=1, vocab_size=600)
    write(tmp_path / "m.gguf", path, tokenizer=bpe_metadata("llama-bpe"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    checkpoint = weights.Checkpoint(weights.resolve(tmp_path / "m.gguf"))
    state = theirs.state_dict()
    assert set(checkpoint) == set(state)
    for name in checkpoint:
        assert torch.equal(checkpoint.view(name), state[name]), name


def test_a_mixture_of_types_and_bounded_pieces(tmp_path, monkeypatch):
    """K-quant files mix types; and a tensor larger than one piece is written whole."""
    path = tiny.checkpoint(tmp_path / "hf", "llama", **WIDE)
    held = write(tmp_path / "m.gguf", path, Q.Q8_0)
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 1000)
    close(whole(weights.resolve(tmp_path / "m.gguf"), tiny.ids(30)), logits_of(path, held, tiny.ids(30), torch.bfloat16))


# ---- RoPE


def llama3_divisors(rope: dict, dim: int) -> list[float]:
    """As llama.cpp's converter computes rope_freqs.weight."""
    out, factor = [], rope["factor"]
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim):
        wavelength = 2 * math.pi / float(frequency)
        smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"])
        out.append(1.0 if wavelength < high else factor if wavelength > low else 1 / ((1 - smooth) / factor + smooth))
    return out


@pytest.mark.parametrize("name, metadata, tensors", [
    ("linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    ("yarn", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}, {}),
    ("llama3", {}, {"rope_freqs.weight": llama3_divisors(ROPE["llama3"], 12)}),
])
def test_rope_scaling(name, metadata, tensors, tmp_path):
    path, ids = tiny.checkpoint(tmp_path / "hf", rope_parameters=ROPE[name]), tiny.ids(300)
    write(tmp_path / "m.gguf", path, metadata=metadata, tensors=tensors)
    made = weights.resolve(tmp_path / "m.gguf")
    close(whole(made, ids), tiny.logits(path, ids))
    close(tiny.logits(made, ids), tiny.logits(path, ids))


def test_a_window_makes_it_a_mistral(tmp_path):
    path = tiny.checkpoint(tmp_path / "hf", "mistral", sliding_window=30)
    write(tmp_path / "m.gguf", path, arch="llama", metadata={"attention.sliding_window": 30})
    close(whole(weights.resolve(tmp_path / "m.gguf"), tiny.ids(90)), tiny.logits(path, tiny.ids(90)))


# ---- the cache


def test_converted_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    file, calls = tmp_path / "m.gguf", []
    write(file, tiny.checkpoint(tmp_path / "hf"))
    convert = weights.convert_gguf
    monkeypatch.setattr(weights, "convert_gguf", lambda *args: (calls.append(1), convert(*args)))
    first = weights.resolve(file)
    monkeypatch.chdir(tmp_path)
    assert weights.resolve("m.gguf") == weights.resolve("./m.gguf") == first and len(calls) == 1
    os.utime(file, ns=(1, 1))
    assert weights.resolve(file) != first and len(calls) == 2


def test_a_full_disk_leaves_nothing(tmp_path, cache):
    """A limit on the size of files stands in for the disk."""
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf", **WIDE))
    code = """
        import resource, signal, sys
        from nano_sgl import weights
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            weights.resolve(sys.argv[1])
        except weights.ModelError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m.gguf")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert "m.gguf could not be prepared in" in result.stdout and "File too large" in result.stdout, result.stderr
    assert list((cache / "gguf").iterdir()) == []


# ---- refusals


@pytest.mark.parametrize("how, words", [
    ({"arch": "gemma2"}, "architecture 'gemma2'"),
    ({"metadata": {"expert_count": 8}}, "llama.expert_count = 8"),
    ({"metadata": {"attn_logit_softcapping": 50.0}}, "llama.attn_logit_softcapping"),
    ({"metadata": {"rope.dimension_count": 6}}, "llama.rope.dimension_count = 6 with heads of 12"),
    ({"metadata": {"attention.value_length": 6}}, "llama.attention.value_length = 6 with heads of 12"),
    ({"metadata": {"rope.scaling.type": "longrope"}}, "rope.scaling.type 'longrope'"),
    ({"metadata": {"rope.scaling.type": "linear"}}, "lacks llama.rope.scaling.factor"),
    ({"metadata": {"rope.scaling.attn_factor": 1.5}}, "llama.rope.scaling.attn_factor"),
    ({"metadata": {"block_count": None}}, "lacks llama.block_count"),
    ({"metadata": {"split.count": 3}}, "one of 3 parts"),
    ({"tensors": {"blk.0.ffn_gate_inp.weight": [1.0]}}, "blk.0.ffn_gate_inp.weight"),
    ({"tokenizer": {"ggml.model": "bert"}}, "tokenizer model 'bert'"),
    ({"tokenizer": {"ggml.model": "gpt2", "ggml.pre": "strange", "ggml.tokens": ["a"]}}, "tokenizer.ggml.pre 'strange'"),
])
def test_what_is_refused_by_name(how, words, tmp_path, cache):
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf"), **how)
    with pytest.raises(ModelError, match=words):
        weights.resolve(tmp_path / "m.gguf")
    assert list((cache / "gguf").iterdir()) == []


def test_a_tensor_that_is_absent_is_named(tmp_path):
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf"), drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj.weight"):
        model.load(weights.resolve(tmp_path / "m.gguf"), progress=False)


def test_a_type_that_the_gguf_package_cannot_read(tmp_path):
    file = tmp_path / "m.gguf"
    write(file, tiny.checkpoint(tmp_path / "hf"), tensors={"blk.0.attn_q.bias": [0.0] * 32})
    data = file.read_bytes()
    at = data.index(b"blk.0.attn_q.bias") + len(b"blk.0.attn_q.bias") + 4 + 8
    for number, words in ((9, "type Q8_1, which the gguf package cannot dequantise"), (777, "unknown GGUF type 777")):
        file.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4:] + bytes(64))
        with pytest.raises(ModelError, match=words):
            weights.resolve(file)


def test_files_cut_short_anywhere(tmp_path):
    file = tmp_path / "m.gguf"
    write(file, tiny.checkpoint(tmp_path / "hf"), tokenizer=bpe_metadata("gpt-2"))
    data = file.read_bytes()
    for length in [0, 3, 4, 7, 8, 20, 24, 30, 100, 1000, 5000, len(data) // 2, len(data) - 4]:
        file.write_bytes(data[:length])
        with pytest.raises(ModelError, match="is not a GGUF file" if length < 4 else "cut short"):
            weights.GGUF(file)


def test_damaged_files_end_in_one_sentence(tmp_path):
    """Bits flipped anywhere in the header: the file still reads, or a ModelError says what is wrong; nothing else, and soon."""
    file, rng = tmp_path / "m.gguf", random.Random(0)
    write(file, tiny.checkpoint(tmp_path / "hf"), metadata={"general.alignment": 32})
    data, refused = file.read_bytes(), 0
    end = data.index(b"blk.1.attn_v.weight") + 100
    for _ in range(600):
        broken = bytearray(data)
        for at in rng.sample(range(4, end), 3):
            broken[at] ^= 1 << rng.randrange(8)
        file.write_bytes(broken)
        try:
            weights.gguf_config(weights.GGUF(file))
        except ModelError as error:
            refused += 1
            assert "m.gguf" in str(error) or "llama" in str(error), error
    assert refused > 200


def test_a_value_for_each_layer_is_refused(tmp_path):
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf"), metadata={"attention.head_count_kv": [2, 1]})
    with pytest.raises(ModelError, match="llama.attention.head_count_kv of .* is not one number"):
        weights.resolve(tmp_path / "m.gguf")


def test_other_versions_and_byte_orders(tmp_path):
    file = tmp_path / "m.gguf"
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        file.write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ModelError, match="GGUF version"):
            weights.GGUF(file)


# ---- tokenizers


TEXTS = ["", " ", "  ", "Hello world", " Hello  world ", "the year 2024, and 3.14159", "I'll can't WE'RE", "1234567890",
         "...!?--", "tab\tand\nnewlines\r\n\r\n  x",
         "\u00fcber stra\u00dfe \u00c5ngstr\u00f6m e\u0301", "x = {'a': [1, 2]}  # no",
         "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f468\u200d\U0001f469", "\u0663\u0664 \u2167 \u00bd", "a\u00a0b\u3000c",
         "\ufb01ne \u212b", "<|end|>", "the<|end|>and <|user|> in<|end|>", "<|en d|>"]


def bpe_metadata(pre: str, **more) -> dict:
    """tokenizer.* metadata of a byte-level vocabulary trained on a little text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["the hen and the year 2024 and 1234567 in   the end\n\n  we'll can't\r\n", "Hello world 99 123", tiny.__doc__] * 3
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get) + tiny.SPECIAL + ["<tool>"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    types = [1] * len(state["vocab"]) + [3] * len(tiny.SPECIAL) + [4]
    ends = {name: tokens.index(token) for name, token in (("bos", "<|begin|>"), ("eos", "<|end|>"), ("padding", "<|pad|>"))}
    return {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": types, "ggml.merges": merges,
            "chat_template": tiny.CHAT_TEMPLATE, **{f"ggml.{name}_token_id": i for name, i in ends.items()}} | more


def converted_tokenizer(tmp_path, metadata: dict):
    (tmp_path / "hf").mkdir(exist_ok=True)
    path = tiny.checkpoint(tmp_path / "hf", vocab_size=max(320, len(metadata["ggml.tokens"])))
    write(tmp_path / "m.gguf", path, tokenizer=metadata)
    return weights.load_tokenizer(weights.resolve(tmp_path / "m.gguf"))


def random_texts(count: int = 200) -> list[str]:
    rng = random.Random(0)
    pieces = ["the", " and", "  ", "\n", "\r\n", "7", "42", "'s", "'LL", "\u00e9", "e\u0301", "\u4e2d", "\U0001f600", "<|end|>",
              "_", "--", "\t", ".", "A", "zZ", "\u0664"]
    return ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 14))) for _ in range(count)]


PATTERNS = {  # as in the tokenizer.json of Llama 3, Mistral Nemo, Qwen2 and GPT-2
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                 r"|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
              r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
             r"|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def bpe_encode(metadata: dict, pattern: str, text: str, whole_pieces: bool) -> list[int]:
    """Byte-level BPE written down: special tokens apart, pieces by the pattern, in each the best merge until there is none."""
    index = {token: i for i, token in enumerate(metadata["ggml.tokens"])}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["ggml.merges"])}
    spelling, out = bytes_to_unicode(), []
    for part in regex.split(r"(<\|(?:begin|end|pad|system|user|assistant)\|>|<tool>)", text):
        if part in (*tiny.SPECIAL, "<tool>"):
            out.append(index[part])
            continue
        for piece in regex.findall(pattern, part):
            piece = "".join(spelling[byte] for byte in piece.encode())
            parts = [piece] if whole_pieces and piece in index else list(piece)
            while pairs := [(rank[pair], at) for at, pair in enumerate(zip(parts, parts[1:])) if pair in rank]:
                at = min(pairs)[1]
                parts[at:at + 2] = ["".join(parts[at:at + 2])]
            out += [index[p] for p in parts]
    return out


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_equals_its_definition(pre, tmp_path):
    metadata = bpe_metadata(pre)
    tokenizer = converted_tokenizer(tmp_path, metadata)
    for text in TEXTS + random_texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        text = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ids == bpe_encode(metadata, PATTERNS[pre], text, pre in ("llama-bpe", "tekken")), text
        assert tokenizer.decode(ids) == text


def test_qwen2_and_gpt2_equal_the_classes_of_transformers(tmp_path):
    for pre, kind in (("qwen2", transformers.Qwen2Tokenizer), ("gpt-2", transformers.GPT2Tokenizer)):
        metadata = bpe_metadata(pre)
        vocabulary = {token: i for i, token in enumerate(metadata["ggml.tokens"])}
        theirs = kind(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in metadata["ggml.merges"]])
        ours = converted_tokenizer(tmp_path, metadata)
        for text in [text for text in TEXTS + random_texts() if "<" not in text]:
            assert ours.encode(text) == theirs.encode(text), text


def test_llama3_takes_a_piece_that_is_a_token_whole(tmp_path):
    """ignore_merges: a token that no merge leads to is still found."""
    metadata = bpe_metadata("llama-bpe")
    metadata["ggml.tokens"].append("\u0120zqzq")
    metadata["ggml.token_type"].append(1)
    assert converted_tokenizer(tmp_path, metadata).tokenize("a zqzq")[-1] == "\u0120zqzq"


def test_smollm_cuts_digits_apart_as_its_own_tokenizer_does(tmp_path):
    from tokenizers import decoders, pre_tokenizers

    ours = converted_tokenizer(tmp_path, bpe_metadata("smollm"))
    original = type(ours.backend_tokenizer).from_str(ours.backend_tokenizer.to_str())  # as in SmolLM2's tokenizer.json
    original.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    original.decoder = decoders.ByteLevel()
    for text in TEXTS + random_texts():
        assert ours.encode(text) == original.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert [t for t in ours.tokenize("in 2024") if t[-1].isdigit()] == ["2", "0", "2", "4"]


def test_the_demos_tokenizer(demo_path_outside):
    tokenizer = weights.load_tokenizer(demo_path_outside)
    assert len(tokenizer) == 49152 and len(tokenizer.all_special_ids) == 17 and tokenizer.eos_token_id == 2
    for text in TEXTS + random_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>user\n<repo_name>") == [1, 4093, 198, 3]
    assert tokenizer.decode([1, 4093, 198, 3], skip_special_tokens=True) == "user\n"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def demo_path_outside(demo_path):
    """The session's demo model, although this file's tests have a cache of their own."""
    return demo_path


def test_special_tokens_chat_template_and_ends(tmp_path):
    tokenizer = converted_tokenizer(tmp_path, bpe_metadata("gpt-2", **{"ggml.eot_token_id": 5}))
    made = weights.resolve(tmp_path / "m.gguf")
    end, tool = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.convert_tokens_to_ids("<tool>")
    assert weights.end_ids(made, tokenizer) == sorted([5, end])
    ids = tokenizer.encode("a<|end|>b<tool>c")
    assert (ids[1], ids[3]) == (end, tool) and tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>c"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|user|>hi<|end|>"


def test_bos_where_the_file_or_the_family_says_so(tmp_path):
    begin = lambda metadata: converted_tokenizer(tmp_path, metadata).tokenize("the", add_special_tokens=True)[0] == "<|begin|>"
    assert not begin(bpe_metadata("gpt-2"))
    assert begin(bpe_metadata("gpt-2", **{"ggml.add_bos_token": True}))
    assert begin(bpe_metadata("llama-bpe"))
    assert not begin(bpe_metadata("llama-bpe", **{"ggml.add_bos_token": False}))


@pytest.mark.parametrize("change", [{"ggml.merges": ["nothing here"]}, {"ggml.model": "llama"}, {"ggml.bos_token_id": "one"}])
def test_a_vocabulary_that_does_not_fit_together(change, tmp_path):
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf"), tokenizer=bpe_metadata("gpt-2") | change)
    with pytest.raises(ModelError, match="the tokenizer inside .*m.gguf is damaged"):
        weights.resolve(tmp_path / "m.gguf")


def test_recommended_sampling_values(tmp_path):
    stated = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf"), metadata=stated)
    assert weights.generation_defaults(weights.resolve(tmp_path / "m.gguf")) == {"temperature": 0.7, "top_k": 20}


# ---- SentencePiece


def spm_metadata(**more) -> dict:
    words = "_the _th _t he th _an an _and in _in er __ ____ on ll ell ello _H _Hello wor ld or world _world 20 24"
    words = words.replace("_", "\u2581").split(" ")
    letters = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyzHWE0123456789.,'\u2581\u00fc\n"))
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words + letters + ["<|user|>", "<tool>"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)) + [3, 4]
    order = random.Random(4).sample(range(len(words)), len(words))  # scores need not follow the order in the file
    scores = [0.0] * 259 + [-float(1 + place) for place in order] + [-1000.0 - i for i in range(len(letters))] + [0.0, 0.0]
    return {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": scores, "ggml.token_type": types, "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0} | more


def spm_encode(metadata: dict, text: str, prefix: bool = True) -> list[int]:
    """SentencePiece's BPE written down: join the neighbours whose union scores best, leftmost first, until none is a token."""
    tokens, scores, types = (metadata[f"ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    index = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    pieces = list((("\u2581" if prefix else "") + text.replace(" ", "\u2581")) if text else "")
    while True:
        unions = [(-scores[index[a + b]], at) for at, (a, b) in enumerate(zip(pieces, pieces[1:])) if a + b in index]
        if not unions:
            return [i for p in pieces for i in ([index[p]] if p in index else [3 + byte for byte in p.encode()])]
        at = min(unions)[1]
        pieces[at:at + 2] = ["".join(pieces[at:at + 2])]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_its_definition(prefix, tmp_path):
    metadata = spm_metadata(**({} if prefix else {"ggml.add_space_prefix": False}))
    tokenizer = converted_tokenizer(tmp_path, metadata)
    plain = [text for text in TEXTS + random_texts() if "<|" not in text]
    for text in plain:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == spm_encode(metadata, text, prefix), text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_specials(tmp_path):
    metadata = spm_metadata()
    tokenizer = converted_tokenizer(tmp_path, metadata)
    assert tokenizer.encode("the")[0] == 1 and tokenizer.encode("the", add_special_tokens=False)[0] != 1
    user, tool = (metadata["ggml.tokens"].index(token) for token in ("<|user|>", "<tool>"))
    assert tokenizer.encode("<|user|>", add_special_tokens=False)[-1] == user
    assert tool in tokenizer.encode("the<tool>and", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("the<|user|>"), skip_special_tokens=True) == "the"
    assert converted_tokenizer(tmp_path, spm_metadata(**{"ggml.add_bos_token": False})).encode("the")[0] != 1
