"""The model against `transformers`: every family and switch, whole sequences and pieces; and what it refuses to compute."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from nano_sgl import attention, model, native, weights
from nano_sgl.memory import KVPool

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn attention_factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
                              "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 50000.0,
                    "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
}
CHECKPOINTS = {  # name -> (family, config)
    "llama": ("llama", {}),
    "llama, one head a group": ("llama", {"num_key_value_heads": 4}),
    "llama, group of 3": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama, group of 4": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim 32": ("llama", {"hidden_size": 64, "head_dim": 32}),
    "llama, head_dim 6": ("llama", {"head_dim": 6, "num_key_value_heads": 1}),
    "llama, other numbers": ("llama", {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    **{f"llama, {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPE.items()},
    "mistral": ("mistral", {}),
    "mistral, head_dim 20, group of 4": ("mistral", {"head_dim": 20, "num_key_value_heads": 1}),
    "mistral, a window never reached": ("mistral", {"sliding_window": 512}),
    "mistral, window": ("mistral", {"sliding_window": 37}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, group of 1": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2, group of 7": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 84}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": ROPE["yarn"]}),
    "qwen2, window in one layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2, window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 20}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases, head_dim 32, group of 1": ("qwen3", {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 4}),
    "qwen3, tied, group of 3": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "head_dim": 16}),
    "qwen3, linear": ("qwen3", {"rope_parameters": ROPE["linear"]}),
}


class Runner:
    """Sequences through a model and a KV pool, step by step, as an engine would."""

    def __init__(self, net: model.Model, rows: int = 1, columns: int = 400, backend: str = "torch"):
        c = net.config
        self.net, self.kv = net, KVPool(rows * columns, 1, c.num_layers, c.num_kv_heads, c.head_dim, net.dtype, "cpu")
        slots = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1)) + 1  # KV lies anywhere
        self.table = slots.to(torch.int32).view(rows, columns)
        self.lens = [0] * rows
        self.backend = attention.ATTENTION[backend](c.num_heads, c.num_kv_heads, c.head_dim)

    @torch.no_grad()
    def step(self, *pieces: tuple[int, list[int]], shared=()) -> torch.Tensor:
        """Extend rows by ids; logits of every new token [T, V]."""
        rows, q_lens = [row for row, _ in pieces], [len(ids) for _, ids in pieces]
        cols = torch.cat([torch.arange(self.lens[row], self.lens[row] + len(ids)) for row, ids in pieces])
        of_token = torch.repeat_interleave(torch.tensor(rows), torch.tensor(q_lens))
        bounds = [self.lens[row] + len(ids) for row, ids in pieces]
        plan = attention.plan(rows, q_lens, bounds, shared, **self.backend.plan_options)
        batch = model.ForwardBatch(input_ids=torch.tensor([i for _, ids in pieces for i in ids]), positions=cols,
                                   slots=self.table[of_token, cols].long(),
                                   attention=(self.backend, self.backend.prepare(plan, self.table, cols)))
        for row, bound in zip(rows, bounds):
            self.lens[row] = bound
        return self.net.logits(self.net.forward(batch, self.kv))


def whole(path, ids, dtype="float32"):
    return Runner(model.load(path, dtype, progress=False)).step((0, ids))


def close(ours, theirs, bound=1e-4):
    worst = (ours - theirs).abs().max().item()
    assert worst < bound, f"logits differ by {worst}"


# ---- equal to transformers


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers_in_one_go_and_in_pieces(name, tmp_path):
    family, config = CHECKPOINTS[name]
    for seed in range(2):
        path = tiny.checkpoint(tmp_path / str(seed), family, seed=seed, **config)
        ids, net = tiny.ids(150, seed), model.load(path, progress=False)
        theirs = tiny.logits(path, ids)
        close(Runner(net).step((0, ids)), theirs)
        pieces, runner, at = [], Runner(net), 0
        for count in (1, 40, 63, 30) + (1,) * 16:  # chunks, then decode
            pieces.append(runner.step((0, ids[at:at + count])))
            at += count
        close(torch.cat(pieces), theirs)
        assert theirs.std() > 0.5, "the checkpoint is too tame to show a mistake"


def test_rows_of_one_step_do_not_see_each_other(tmp_path):
    path = tiny.checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
    runner, texts = Runner(model.load(path, progress=False), rows=3), [tiny.ids(count, count) for count in (50, 31, 44)]
    runner.step((0, texts[0][:49]), (2, texts[2][:20]))
    out = runner.step((0, texts[0][49:]), (1, texts[1]), (2, texts[2][20:]))
    close(out, torch.cat([tiny.logits(path, texts[0])[49:], tiny.logits(path, texts[1]), tiny.logits(path, texts[2])[20:]]))


def test_a_prefix_shared_by_rows_is_read_from_either_row(tmp_path):
    path = tiny.checkpoint(tmp_path)
    runner, prefix = Runner(model.load(path, progress=False), rows=3), tiny.ids(60)
    runner.table[1:, :60] = runner.table[0, :60]
    runner.step((0, prefix))
    runner.lens = [60] * 3
    tails = [tiny.ids(5, seed) for seed in (1, 2, 3)]
    out = runner.step(*enumerate(tails), shared=[(0, 3, 0, 60)])
    close(out, torch.cat([tiny.logits(path, prefix + tail)[60:] for tail in tails]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_half_precision_checkpoints(family, dtype, tmp_path):
    path = tiny.checkpoint(tmp_path, family, dtype=getattr(torch, dtype))
    ids = tiny.ids(60)
    net = model.load(path, progress=False)
    assert net.dtype == getattr(torch, dtype) and net.embedding.dtype == net.dtype
    close(whole(path, ids), tiny.logits(path, ids))                             # read as float32: exact
    rough = Runner(net).step((0, ids))
    assert rough.dtype == torch.float32
    close(rough, tiny.logits(path, ids), 0.5 if dtype == "bfloat16" else 0.1)   # computed in half: near


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama, group of 3", "llama, all biases", "llama, head_dim 6", "mistral, window", "qwen3, biases, head_dim 32, group of 1"])
def test_one_call_for_all_layers_does_what_the_loop_does(kernel_set, name, dtype, quantization, tmp_path, monkeypatch):
    """Also for widths that AMX tiles take, and rows that share columns."""
    family, config = CHECKPOINTS[name]
    config = config | ({"hidden_size": 64, "intermediate_size": 112} if "group of 3" not in name else {"intermediate_size": 96})
    net, ids = model.load(tiny.checkpoint(tmp_path, family, **config), dtype, quantization=quantization, progress=False), tiny.ids(130)
    calls, runs = [], []
    for once in (False, True):
        monkeypatch.setattr(native, "few", lambda *args: native.ANY * once)
        monkeypatch.setattr(net, "_all_layers", lambda *args: calls.append(once) or model.Model._all_layers(net, *args))
        runner = Runner(net, rows=2, backend=kernel_set)
        out = [runner.step((0, ids[at:at + count])) for at, count in ((0, 70), (70, 1), (71, 3), (74, 20), (94, 33))]
        runner.table[1, :90] = runner.table[0, :90]  # a fork
        runner.lens[1] = 90
        out.append(runner.step((0, ids[127:]), (1, ids[:2]), shared=[(0, 2, 0, 90)]))
        runs.append((torch.cat(out), runner.kv))
    assert calls == [True] * (6 if kernel_set == "cpp" else 0)
    bound = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.8}[dtype]
    close(runs[1][0], runs[0][0], bound)
    assert (runs[1][0] - runs[0][0]).abs().mean() < bound / 8
    for one, other in zip(runs[0][1].k + runs[0][1].v, runs[1][1].k + runs[1][1].v):
        close(one.float(), other.float(), bound)


def test_sharded_equals_single(tmp_path):
    single = tiny.checkpoint(tmp_path / "single")
    sharded = tiny.checkpoint(tmp_path / "sharded", max_shard_size="40KB")
    assert len(weights.weight_files(sharded)) > 3
    assert torch.equal(whole(single, tiny.ids(20)), whole(sharded, tiny.ids(20)))


def test_config_in_the_old_spelling(tmp_path):
    """Before transformers 5: rope_theta and rope_scaling, `type`, torch_dtype."""
    path = tiny.checkpoint(tmp_path, dtype=torch.bfloat16, rope_parameters=ROPE["llama3"])
    new = whole(path, tiny.ids(200))
    scaling = {key: value for key, value in ROPE["llama3"].items() if key not in ("rope_theta", "rope_type")} | {"type": "llama3"}
    tiny.edit(path, rope_parameters=None, dtype=None, rope_theta=500000.0, rope_scaling=scaling, torch_dtype="bfloat16")
    assert model.load(path, progress=False).dtype == torch.bfloat16
    assert torch.equal(whole(path, tiny.ids(200)), new)


def test_windows_of_a_config_that_does_not_list_its_layers(tmp_path):
    """Older ones have use_sliding_window and max_window_layers alone."""
    config = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3}
    path = tiny.checkpoint(tmp_path, "qwen2", **config)
    theirs = tiny.logits(path, tiny.ids(60))
    assert model.load(tiny.edit(path, layer_types=None), progress=False).config.windows == (0, 20, 20)
    close(whole(path, tiny.ids(60)), theirs)


def test_what_config_leaves_out_is_what_its_class_has(tmp_path):
    """Old configs state only what differs from their class's defaults."""
    import transformers

    for family, (config, _) in list(tiny.FAMILIES.items())[:4]:
        full = getattr(transformers, config)().to_dict()
        needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type"}
        full |= {"architectures": [tiny.FAMILIES[family][1]], "max_position_embeddings": full["max_position_embeddings"]}
        bare = {key: value for key, value in full.items() if key in needed}
        full.pop("dtype", None)
        assert model.ModelConfig.from_dict(bare) == model.ModelConfig.from_dict(full), family


def test_head_runs_on_the_rows_asked(tmp_path):
    path = tiny.checkpoint(tmp_path)
    net = model.load(path, progress=False)
    assert net.logits(torch.zeros(3, 48)).shape == (3, tiny.VOCAB)


# ---- heads tied to the embedding, both ways round


def rewrite(path, change):
    """Apply `change` to a single-file checkpoint's dictionary of tensors."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_tied_and_both_stored_equal(tmp_path):
    path = tiny.checkpoint(tmp_path, tie_word_embeddings=True)
    plain = whole(path, tiny.ids(20))
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(whole(path, tiny.ids(20)), plain)
    net = model.load(path, progress=False)
    assert net.head is net.embedding


def test_tied_and_only_the_head_stored(tmp_path):
    path = tiny.checkpoint(tmp_path, tie_word_embeddings=True)
    plain = whole(path, tiny.ids(20))
    rewrite(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(whole(path, tiny.ids(20)), plain)


def test_tied_by_config_but_another_head_stored(tmp_path):
    path = tiny.edit(tiny.checkpoint(tmp_path, tie_word_embeddings=False), tie_word_embeddings=True)
    close(whole(path, tiny.ids(20)), tiny.logits(path, tiny.ids(20)))
    assert not model.load(path, progress=False).config.tied


def test_untied_but_no_head_stored(tmp_path):
    path = tiny.edit(tiny.checkpoint(tmp_path, tie_word_embeddings=True), tie_word_embeddings=False)
    with pytest.raises(weights.ModelError, match="lm_head.weight.*not tied"):
        model.load(path, progress=False)


# ---- the API cases of the model


def last_logits_close(path, bound=1e-3):
    ids = tiny.ids(20)
    close(whole(path, ids)[-1], tiny.logits(path, ids)[-1], bound)


def greedy(net, ids, count):
    runner = Runner(net, columns=len(ids) + count)
    out, ids = [], list(ids)
    for _ in range(count):
        out.append(int(runner.step((0, ids))[-1].argmax()))
        ids = out[-1:]
    return out


@pytest.fixture(scope="module")
def smollm2(demo_path):
    """Tokenizer, `transformers`' model and ours, float32."""
    return weights.load_tokenizer(demo_path), tiny.reference(demo_path), model.load(demo_path, "float32", progress=False)


def test_F039_tied_smollm2(smollm2):
    tokenizer, hf, net = smollm2
    ids = tokenizer.encode("The capital of France is a city that many people visit every year, for its art and food.")[:20]
    with torch.no_grad():
        close(Runner(net).step((0, ids))[-1], hf(torch.tensor([ids])).logits[0, -1], 1e-3)
    assert tokenizer.decode(greedy(net, tokenizer.encode("1, 2, 3, 4, 5,"), 12)) == " 6, 7, 8, 9,"


def test_F041_head_dim(tmp_path):
    path = tiny.checkpoint(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    last_logits_close(path)
    assert Runner(model.load(path, progress=False)).kv.k[0].shape[1:] == (2, 32)


def test_F043_llama3_rope(tmp_path):
    path, ids = tiny.checkpoint(tmp_path, rope_parameters=ROPE["llama3"]), tiny.ids(300)
    at = [10, 63, 64, 150, 299]
    close(whole(path, ids)[at], tiny.logits(path, ids)[at])


def test_F045_qwen2_bias(tmp_path):
    path = tiny.checkpoint(tmp_path, "qwen2", bias=1.0)
    last_logits_close(path)
    before = whole(path, tiny.ids(20))
    rewrite(path, lambda t: t["model.layers.1.self_attn.k_proj.bias"][5:6].zero_())
    assert not torch.equal(whole(path, tiny.ids(20)), before)


def test_F047_missing_and_extra_tensors(tmp_path):
    path = rewrite(tiny.checkpoint(tmp_path / "a"), lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(weights.ModelError, match="model.layers.1.mlp.up_proj.weight"):
        model.load(path, progress=False)
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}
    path = rewrite(tiny.checkpoint(tmp_path / "b"), lambda t: t.update(extra))
    with pytest.raises(weights.ModelError, match="model.layers.0.self_attn.q_proj.bias"):
        model.load(path, progress=False)


def test_stored_frequencies_are_not_an_extra_tensor(tmp_path):
    path = tiny.checkpoint(tmp_path)
    rewrite(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    model.load(path, progress=False)


def test_wrong_shape(tmp_path):
    path = rewrite(tiny.checkpoint(tmp_path), lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(weights.ModelError, match=r"model.norm.weight has shape \[47\], the config asks for \[48\]"):
        model.load(path, progress=False)


@pytest.mark.parametrize("family, config, words", [
    ("phi", {"partial_rotary_factor": 0.5}, "PhiForCausalLM"),
    ("gemma", {}, "GemmaForCausalLM"),
    ("gemma2", {"attn_logit_softcapping": 50.0}, "Gemma2ForCausalLM"),
    ("granite", {"embedding_multiplier": 12.0}, "GraniteForCausalLM"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
])
def test_F053_unsupported_checkpoints(family, config, words, tmp_path):
    path = tiny.checkpoint(tmp_path, family, **config)
    with pytest.raises(weights.ModelError, match=words):
        model.load(path, progress=False)


# ---- refusals


BASE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize("change, words", [
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    ({"hidden_activation": "gelu"}, "hidden_activation"),
    ({"sliding_window": 128}, "sliding_window"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "alpha": 3}}, "alpha"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "linear"),
    ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}, "between layers"),
    ({"num_attention_heads": 5, "num_key_value_heads": 2}, "key heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"head_dim": 512}, "head_dim"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    ({"architectures": None, "model_type": "mamba"}, "Mamba"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
])
def test_config_fields_that_are_refused_by_name(change, words):
    with pytest.raises(weights.ModelError, match=words):
        model.ModelConfig.from_dict(BASE | change)


@pytest.mark.parametrize("change", [
    {"partial_rotary_factor": 1.0}, {"attn_logit_softcapping": None}, {"residual_multiplier": 1.0}, {"pretraining_tp": 2},
    {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}, {"sliding_window": 4096}, {"hidden_act": "swish"},
    {"architectures": None, "model_type": "llama"}, {"quantization_config": None},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
])
def test_neutral_values_are_not_refused(change):
    plain, changed = model.ModelConfig.from_dict(BASE), model.ModelConfig.from_dict(BASE | change)
    assert plain == changed


def test_dtype_is_refused_by_name(tmp_path):
    with pytest.raises(weights.ModelError, match="int8"):
        model.load(tiny.checkpoint(tmp_path), "int8", progress=False)


# ---- the seam


def test_a_toy_architecture(tmp_path):
    """A forker's model: Llama's parameters, a feed-forward part that does nothing."""

    @model.register_architecture("ToyForCausalLM")
    class Toy(model.Model):
        def mlp(self, layer, h):
            return torch.zeros_like(h)

    try:
        path = tiny.edit(tiny.checkpoint(tmp_path, attention_bias=True), architectures=["ToyForCausalLM"])
        toy = whole(path, tiny.ids(30))
    finally:
        del model.ARCHITECTURES["ToyForCausalLM"]
    rewrite(path, lambda t: [tensor.zero_() for name, tensor in t.items() if "down_proj" in name])
    close(toy, whole(tiny.edit(path, architectures=["LlamaForCausalLM"]), tiny.ids(30)))
    with pytest.raises(weights.ModelError, match="ToyForCausalLM"):
        model.load(tiny.edit(path, architectures=["ToyForCausalLM"]), progress=False)


# ---- SmolLM2


PROMPTS = [
    "The capital of France is", "1, 2, 3, 4, 5,", "def fibonacci(n):\n", "Once upon a time", "The three primary colors are",
    "Dear Sir or Madam,\n", "Q: What is 12 times 11?\nA:", "import numpy as np\n", "In 1969, humans first",
    "<|im_start|>user\nHi!<|im_end|>\n", "Photosynthesis is", "SELECT name FROM users WHERE", "The opposite of hot is",
    "My favourite recipe:\n\n1.", "To be or not to be,",
    "{\"name\": \"Ada\", \"age\":", "Les chats sont", "Water boils at", "The quick brown fox", "List of planets: Mercury, Venus,",
]


def same_greedy_text(smollm2, prompts, count):
    tokenizer, hf, net = smollm2
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        ours = greedy(net, ids, count)
        with torch.no_grad():  # one look at the whole text: if each token is the likeliest behind those before it, this is its greedy text, too
            theirs = hf(torch.tensor([ids + ours[:-1]])).logits[0, len(ids) - 1:].argmax(-1)
        assert ours == theirs.tolist(), prompt


def test_smollm2_continues_as_transformers_does(smollm2):
    same_greedy_text(smollm2, PROMPTS[:4], 32)


@pytest.mark.long
def test_smollm2_64_tokens_on_20_prompts(smollm2):
    same_greedy_text(smollm2, PROMPTS, 64)


def test_smollm2_is_what_the_demo_says(demo_path):
    config = json.loads((demo_path / "config.json").read_text())
    made = model.ModelConfig.from_dict(config)
    assert (made.num_heads // made.num_kv_heads, made.head_dim, made.tied, made.context_len) == (3, 64, True, 8192)
