"""Weights in 8 bits: how they are made, products with them, models of them, and what they cost the demo model."""

import math
from pydoc_data.topics import topics

import engines
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import CHECKPOINTS, Runner, close, rewrite
from triton_interpreter import DEVICE, FLOATS
from triton_interpreter import kernels as interpreted

from nano_sgl import kernels, model, weights
from nano_sgl.config import EngineConfig, parse
from nano_sgl.kernels import QuantizedWeight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def empty(outputs: int, size: int) -> QuantizedWeight:
    return QuantizedWeight(torch.empty(outputs, size, dtype=torch.int8), torch.empty(outputs))


def quantized(matrix: torch.Tensor) -> QuantizedWeight:
    return empty(*matrix.shape).copy_(matrix)


# ---- how they are made


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1, max_size=5),
       st.sampled_from(DTYPES))
def test_a_weight_is_within_half_a_scale(rows, dtype):
    matrix = torch.tensor(rows).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    made = quantized(matrix)
    errors = (made.values.double() * made.scales.double()[:, None] - matrix.double()).abs()
    assert (errors <= made.scales.double()[:, None] * 0.5 * (1 + 1e-4)).all() and (made.scales > 0).all()
    large = matrix.double().abs().amax(1) > 1e-30
    assert (made.values.int().abs().amax(1)[large] == 127).all() and made.values.min() >= -127


def test_rows_are_independent_and_zeros_stay(monkeypatch):
    torch.manual_seed(0)
    matrix = torch.randn(20, 6) * torch.logspace(-6, 6, 20)[:, None]
    matrix[7] = 0
    whole, fused = quantized(matrix), empty(20, 6)
    assert not whole.values[7].any() and whole.scales[7] == 1
    monkeypatch.setattr(kernels, "QUANTIZE_AT_ONCE", 13)  # two rows
    for part, rows in zip(fused.split([3, 12, 5]), matrix.split([3, 12, 5])):
        part.copy_(rows)
    assert torch.equal(fused.values, whole.values) and torch.equal(fused.scales, whole.scales)
    assert [part.shape for part in fused.split(8)] == [(8, 6), (8, 6), (4, 6)] and fused.nbytes == 20 * (6 + 4)


# ---- products


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_whole_numbers_times_the_scales(kernel_set, dtype):
    torch.manual_seed(0)
    shapes = [(1, 960, 576), (2, 33, 64), (3, 1, 40), (4, 100, 96), (7, 64, 33), (16, 50, 700), (17, 96, 64), (65, 70, 130), (300, 9, 31), (0, 4, 32)]
    for tokens, outputs, size in shapes:
        x, bias = torch.randn(tokens, size + 8).to(dtype)[:, :size], torch.randn(outputs).to(dtype)
        weight = quantized(torch.randn(outputs, size) * torch.rand(outputs, 1))
        for b in (None, bias):
            want, most = (f(x.double()) @ f(weight.values.double() * weight.scales[:, None]).T for f in (torch.clone, torch.abs))
            want, most = (want, most) if b is None else (want + b.double(), most + b.double().abs())
            there = interpreted.QuantizedWeight(weight.values.to(DEVICE), weight.scales.to(DEVICE))
            products = [kernels.linear(x, weight, b)]
            if dtype in FLOATS:
                products.append(interpreted.linear(x.to(DEVICE), there, None if b is None else b.to(DEVICE), backend="triton"))
            for got in products:
                assert got.dtype == dtype and got.shape == want.shape
                assert ((got.cpu().double() - want).abs() <= 3 * torch.finfo(dtype).eps * most).all()


def test_sums_of_whole_numbers_do_not_overflow_float16(kernel_set):
    weight = quantized(torch.full((33, 576), 0.01))
    for tokens in (1, 40):
        x = torch.full((tokens, 576), 100.0, dtype=torch.float16)  # 576 * 100 * 127 is 7 million
        there = interpreted.QuantizedWeight(weight.values.to(DEVICE), weight.scales.to(DEVICE))
        for got in (kernels.linear(x, weight), interpreted.linear(x.to(DEVICE), there, backend="triton").cpu()):
            torch.testing.assert_close(got, torch.full((tokens, 33), 576.0, dtype=torch.float16), rtol=2e-3, atol=0)


def test_an_embedding_in_8_bits_is_looked_up():
    torch.manual_seed(0)
    weight, ids = quantized(torch.randn(50, 24)), torch.tensor([3, 49, 3, 0])
    for dtype in DTYPES:
        got = kernels.embedding(ids, weight, dtype)
        assert got.dtype == dtype and torch.equal(got, (weight.values[ids].float() * weight.scales[ids, None]).to(dtype))
    assert kernels.embedding(ids[:0], weight, torch.float32).shape == (0, 24)


# ---- models


def twin(path, net: model.Model) -> model.Model:
    """A model of floats whose weights are what `net` has in 8 bits."""
    made = model.load(path, "float32", progress=False)
    places = made.parameters()
    for name, weight in net.parameters().items():
        if isinstance(weight, QuantizedWeight):
            places[name].copy_(kernels.dequantize(weight, torch.float32))
    return made


@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama, all biases", "mistral, window", "qwen2, tied, group of 1", "qwen3, biases, head_dim 32, group of 1"])
def test_logits_are_those_of_the_weights_that_the_bytes_stand_for(kernel_set, name, tmp_path):
    family, config = CHECKPOINTS[name]
    path, ids = tiny.checkpoint(tmp_path, family, **config), tiny.ids(90)
    net = model.load(path, quantization="int8", progress=False)
    products = [net.head, *(getattr(layer, place) for layer in net.layers for place in ("qkv", "o", "gate_up", "down"))]
    assert all(isinstance(weight, QuantizedWeight) for weight in products) and (net.embedding is net.head) == net.config.tied
    with torch.no_grad():
        want, runner = Runner(twin(path, net)).step((0, ids)), Runner(net)
        close(Runner(net).step((0, ids)), want)
        pieces = [runner.step((0, ids[at:at + count])) for at, count in ((0, 50), (50, 1), (51, 3), (54, 35), (89, 1))]
        close(torch.cat(pieces), want)
    off = (want - tiny.logits(path, ids)).abs()
    assert 1e-3 < off.max() and off.mean() < 0.1, "near the checkpoint's own, and not the same"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_half_precision(kernel_set, dtype, tmp_path):
    path, ids = tiny.checkpoint(tmp_path, "qwen2", dtype=getattr(torch, dtype)), tiny.ids(60)
    net = model.load(path, quantization="int8", progress=False)
    assert net.dtype == net.embedding.dtype == getattr(torch, dtype) and net.head.scales.dtype == torch.float32
    close(Runner(net).step((0, ids)), Runner(twin(path, net)).step((0, ids)), 0.5 if dtype == "bfloat16" else 0.1)


def test_heads_that_are_stored_otherwise_than_the_config_says(tmp_path):
    path = tiny.checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    plain = Runner(model.load(path, quantization="int8", progress=False)).step((0, tiny.ids(20)))
    rewrite(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(Runner(model.load(path, quantization="int8", progress=False)).step((0, tiny.ids(20))), plain)
    path = tiny.edit(tiny.checkpoint(tmp_path / "untied", tie_word_embeddings=False), tie_word_embeddings=True)
    net = model.load(path, quantization="int8", progress=False)
    assert isinstance(net.embedding, torch.Tensor) and isinstance(net.head, QuantizedWeight) and not net.config.tied
    close(Runner(net).step((0, tiny.ids(20))), Runner(twin(path, net)).step((0, tiny.ids(20))))


# ---- refusals, and the flag


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_named(value, tmp_path):
    path, name = tiny.checkpoint(tmp_path), "model.layers.1.mlp.up_proj.weight"
    rewrite(path, lambda t: t[name][3, 5:6].fill_(value))
    with pytest.raises(weights.ModelError, match=f"tensor {name} .*: NaN or infinity cannot be quantised to int8"):
        model.load(path, quantization="int8", progress=False)
    model.load(path, progress=False)


def test_checkpoints_that_do_not_fit_are_refused_as_ever(tmp_path):
    load = lambda path: model.load(path, quantization="int8", progress=False)
    name = "model.layers.0.self_attn.v_proj.weight"
    for number, (change, words) in enumerate([
        (lambda t: t.pop(name), f"lacks {name}"), (lambda t: t.update({name: torch.ones(24, 47)}), rf"{name} has shape \[24, 47\]"),
        (lambda t: t.update({"x.weight": torch.ones(2, 2)}), "no place for: x.weight"),
        (lambda t: t.update({name: torch.ones(24, 48, dtype=torch.int8)}), "quantised checkpoints are not supported"),
    ]):
        with pytest.raises(weights.ModelError, match=words):
            load(rewrite(tiny.checkpoint(tmp_path / str(number)), change))
    with pytest.raises(weights.ModelError, match="quantization_config"):
        load(tiny.edit(tiny.checkpoint(tmp_path / "gptq"), quantization_config={"quant_method": "gptq"}))


def test_the_flag(tmp_path, capsys):
    assert parse(["--quantization", "int8"], EngineConfig)[0].quantization == "int8" and EngineConfig().quantization is None
    with pytest.raises(SystemExit):
        parse(["--quantization", "int4"], EngineConfig)
    assert "--quantization: invalid choice: 'int4'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="quantization is 'awq', expected int8"):
        EngineConfig(quantization="awq")
    with pytest.raises(weights.ModelError, match="quantization 'int4' is not supported"):
        model.load(tmp_path, quantization="int4")
    engine = engines.make(engines.tiny_path(tmp_path), quantization="int8")
    assert engine.in_force()["quantization"] == "int8" and isinstance(engine.model.head, QuantizedWeight)


# ---- the demo model


@torch.no_grad()
def perplexity(net: model.Model, texts: list[list[int]]) -> float:
    total = 0.0
    for ids in texts:
        logprobs = Runner(net, columns=len(ids)).step((0, ids)).log_softmax(-1)
        total -= logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).double().sum().item()
    return math.exp(total / sum(len(ids) - 1 for ids in texts))


def test_perplexity_of_the_demo_model_is_within_a_hundredth(demo_path):
    tokenizer = weights.load_tokenizer(demo_path)
    texts = [tokenizer.encode(text[:2500])[:500] for text in sorted(topics.values(), key=len)[-2:]]
    plain, quantised = (model.load(demo_path, "bfloat16", quantization=q, progress=False) for q in (None, "int8"))
    ratio = perplexity(quantised, texts) / perplexity(plain, texts)
    print(f"perplexity in int8 over bfloat16: {ratio:.4f}, {sum(map(len, texts))} tokens")
    assert abs(ratio - 1) < 0.01
    size = lambda net: sum(weight.nbytes for weight in net.parameters().values())
    assert size(quantised) < 0.51 * size(plain)
