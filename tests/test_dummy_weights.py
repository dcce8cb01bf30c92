"""`load_format="dummy"`: a model out of config.json alone, to measure what a step takes."""

import engines
import pytest
import tiny
import torch
from test_quantized import Runner

from nano_sgl import model, weights
from nano_sgl.config import EngineConfig, parse
from nano_sgl.kernels import QuantizedWeight


def bare(folder, family="llama", **config):
    """A directory without weights."""
    path = tiny.add_tokenizer(tiny.checkpoint(folder, family, **config))
    (path / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize("family, config", [("llama", {}), ("llama", dict(tie_word_embeddings=True)), ("llama", dict(attention_bias=True, mlp_bias=True)),
                                            ("qwen3", {})])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_are_drawn_the_same_each_time_and_logits_are_numbers(family, config, quantization, tmp_path):
    path = bare(tmp_path, family, **config)
    first, second = (model.load(path, quantization=quantization, load_format="dummy") for _ in range(2))
    logits = Runner(first).step((0, tiny.ids(40)))
    assert torch.equal(logits, Runner(second).step((0, tiny.ids(40)))) and logits.isfinite().all() and 0.1 < logits.std() < 10
    for name, tensor in first.parameters().items():
        values = model.kernels.dequantize(tensor, torch.float32) if isinstance(tensor, QuantizedWeight) else tensor
        if values.dim() == 2:
            assert values.std() * values.shape[1] ** 0.5 == pytest.approx(1, rel=0.1), name
        else:
            assert values.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name


def test_the_dtype_is_the_configs_or_float32(tmp_path):
    path = bare(tmp_path, dtype=torch.bfloat16)
    assert model.load(path, load_format="dummy").dtype == torch.bfloat16 and model.load(path, "float16", load_format="dummy").dtype == torch.float16
    tiny.edit(path, dtype=None, torch_dtype=None)
    assert model.load(path, load_format="dummy").dtype == torch.float32


def test_an_engine_runs_on_them_and_without_the_flag_says_what_is_missing(tmp_path):
    path = bare(tmp_path)
    engine = engines.make(path, load_format="dummy")
    answers = engines.run(engine, [engines.request(i, tiny.ids(9, seed=i), engines.params(max_tokens=5)) for i in range(3)])
    assert all(len(answer.ids) == 5 and answer.reason == "length" for answer in answers.values()) and engine.in_force()["load_format"] == "dummy"
    with pytest.raises(weights.ModelError, match="has no safetensors files"):
        engines.make(path)


def test_from_the_hub_no_weights_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub
    path, asked = bare(tmp_path), {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **how: asked.update(how) or str(path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda self, repo, timeout: None)
    assert weights.resolve("someone/some-model", needs_weights=False) == path
    assert "config.json" in asked["allow_patterns"] and not [p for p in asked["allow_patterns"] if "safetensors" in p]


def test_the_flag(capsys):
    assert parse(["--load-format", "dummy"], EngineConfig)[0].load_format == "dummy" and EngineConfig().load_format == "auto"
    with pytest.raises(SystemExit):
        parse(["--load-format", "pt"], EngineConfig)
    assert "--load-format: invalid choice: 'pt'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="load_format is 'pt', expected one of auto, dummy"):
        EngineConfig(load_format="pt")
    with pytest.raises(weights.ModelError, match="load_format 'pt' is not supported"):
        model.load(".", load_format="pt")
