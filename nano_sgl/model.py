"""Model: a decoder written out by hand, from a Hugging Face config and safetensors to logits.

One step runs over T tokens that belong to any number of requests; only attention knows which token belongs to whom. Everything
else is arithmetic on rows:

      ids -> embed -> x ------------------ residual -----------------(+)--------------- residual --------------(+)-> ...
                      |                                               ^ |                                       ^
                      norm - qkv -[norm]- rope - store KV - attend - o  norm - gate_up - silu(gate) * up - down +

Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 are this picture with a few switches: biases, q/k norm, the shape of a
head, RoPE scaling, a sliding window, a head tied to the embedding. `ModelConfig.from_dict` turns a `config.json` into those
switches. Fields that would change the arithmetic and that we do not have are refused by name: a model must never run as
something else than it is.

Names: H query heads share G key/value heads, H / G each; D is the head dimension (not always hidden / H); E the hidden size; I
the width of the feed-forward part. q, k, v are one matrix [(H + 2G) D, E], gate and up another [2I, E]: one multiplication
each, and the checkpoint's tensors are read straight into their rows.

With `quantization="int8"` these matrices, o, down and the head are `QuantizedWeight`s. A row's scale depends on that row alone, so the
rows of a fused matrix are quantised as their tensors come. A head tied to the embedding is one matrix of 8 bits for both; an
embedding of its own, of which a step reads a few rows, keeps its dtype, as do norms and biases.

The invariant: logits equal those of `transformers` up to rounding, for every family and switch, however the sequence is cut
into steps; quantised, they are those of the weights that the 8 bits stand for.
The cost of a token is 2 flops a weight, plus attention; below some tens of tokens a step the time is that of reading the
weights once. The loop over layers does no work on the host but calling kernels, so a device can run ahead of it; on a CPU, where a
call costs as much as the work of a few tokens, kernels.cpp has the loop too. The head runs on the rows that need logits.

To add an architecture, write a class and register it under the name that stands in `architectures`:

      @register_architecture("PhonyForCausalLM")
      class Phony(Model):
          defaults = Model.defaults | {"mlp_bias": True}      # what its config class has where config.json is silent
          def mlp(self, layer, h): ...      # override what differs: switches, read_rope, attention, mlp, layer_parameters

then build a tiny random checkpoint of it with `transformers` and compare logits; tests/tiny.py has the tools. Fields that your
class handles and others lack come out of `refused`. Where a tensor has another name, or there is one more, override
`layer_parameters`.

Stops holding: one device; dense layers; RoPE scalings that depend on the length of the text (dynamic, longrope) are refused.
Sources: Touvron et al. 2023 (Llama), Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN), Meta 2024 (llama3 scaling); semantics as
in `transformers`.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from . import kernels, native
from .kernels import QuantizedWeight, Weight
from .memory import KVPool
from .weights import DTYPE_NAMES, Checkpoint, ModelError, load_config

MAX_HEAD_DIM = 256  # of the attention kernels

# Fields that change the arithmetic of some model, with the value that does not; null and false never do.
REFUSED = {
    "quantization_config": None, "partial_rotary_factor": 1, "rotary_pct": 1, "rope_interleaved": False, "no_rope_layers": None,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None, "clip_qkv": None,
    "embedding_multiplier": 1, "residual_multiplier": 1, "attention_multiplier": None, "logits_scaling": 1, "logit_scale": 1,
    "scale_emb": 1, "scale_depth": None, "dim_model_base": None, "num_experts": 0, "num_local_experts": 0, "n_routed_experts": 0,
    "use_parallel_residual": False, "use_qk_norm": False, "qk_layernorm": False, "cross_attention_layers": None,
    "use_mrope": False, "alibi": False, "is_encoder_decoder": False, "lm_head_bias": False,
}


@dataclass(frozen=True)
class Rope:
    """How positions turn into rotations. `divisors`: one per frequency, applied as they are."""
    kind: str = "default"            # "default", "linear", "llama3", "yarn"
    theta: float = 10000.0
    factor: float = 1.0
    original_len: int = 0            # tokens the model was trained on before its context was stretched
    low_freq_factor: float = 1.0     # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0          # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0    # multiplies cos and sin
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """What the layers need to know. Made by `from_dict`; derived values are properties, nothing is written back."""
    architecture: str
    vocab_size: int
    hidden_size: int                 # E
    intermediate_size: int           # I
    num_layers: int                  # L
    num_heads: int                   # H
    num_kv_heads: int                # G
    head_dim: int                    # D
    context_len: int                 # max_position_embeddings
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    windows: tuple[int, ...] = ()    # of each layer: a token sees that many last ones; 0: all
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False               # the head is the embedding
    dtype: str | None = None         # what the config says the checkpoint is stored as

    @staticmethod
    def from_dict(hf: dict) -> ModelConfig:
        """Read a `config.json`. Raises ModelError with the architecture or field that is unknown, missing or not supported."""
        name = architecture_name(hf)
        return ARCHITECTURES[name].read_config(name, hf)


@dataclass
class ForwardBatch:
    """One step's tokens, as tensors on the device. T tokens of all requests, row after row."""
    input_ids: torch.Tensor                    # [T] int64
    positions: torch.Tensor                    # [T] int64
    slots: torch.Tensor                        # [T] int64: where each token's KV goes
    attention: tuple                           # (backend of attention.ATTENTION, what its prepare() returned)


@dataclass
class Layer:
    """One layer's parameters, fused where one multiplication can do for several. Biases and norms that a model lacks are None."""
    input_norm: torch.Tensor                   # [E]
    qkv: Weight                                # [(H + 2G) D, E]
    qkv_bias: torch.Tensor | None              # [(H + 2G) D]
    q_norm: torch.Tensor | None                # [D]
    k_norm: torch.Tensor | None                # [D]
    o: Weight                                  # [E, H D]
    o_bias: torch.Tensor | None                # [E]
    mlp_norm: torch.Tensor                     # [E]
    gate_up: Weight                            # [2 I, E]
    gate_up_bias: torch.Tensor | None          # [2 I]
    down: Weight                               # [E, I]
    down_bias: torch.Tensor | None             # [E]
    window: int = 0
    qk_norm: torch.Tensor | None = None        # [H + G, D]: q_norm H times, k_norm G times; made after loading
    next_norm: torch.Tensor | None = None      # [E]: the next layer's input norm, after the last layer the model's


NATIVE_PARTS = operator.attrgetter("qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias", "qk_norm", "mlp_norm",
                                   "next_norm")
ARCHITECTURES: dict[str, type[Model]] = {}


def register_architecture(*names: str) -> Callable[[type[Model]], type[Model]]:
    """Decorator: models whose config lists one of `names` under `architectures` are built by this class."""

    def put(cls: type[Model]) -> type[Model]:
        ARCHITECTURES.update(dict.fromkeys(names, cls))
        return cls

    return put


def load(path: str | os.PathLike, dtype: str | torch.dtype = "auto", device: str = "cpu", *, context_len: int | None = None,
         quantization: str | None = None, load_format: str = "auto", progress: bool = True) -> Model:
    """Build the model of a checkpoint directory and read its weights.

    `dtype`: "auto" (the checkpoint's), "float32", "float16", "bfloat16". `context_len`: how many positions to be ready for, the
    config's by default. `quantization`: "int8" stores the matrices that are multiplied in 8 bits. `load_format`: "dummy" reads
    nothing but `config.json` and draws random weights. Raises ModelError for a config that is not supported and for any tensor that is
    missing, left over, cut short or of another shape.
    """
    if quantization not in (None, "int8"):
        raise ModelError(f"quantization {quantization!r} is not supported (int8 is)")
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format {load_format!r} is not supported (auto and dummy are)")
    hf = load_config(path)
    config = ModelConfig.from_dict(hf)
    checkpoint = None if load_format == "dummy" else Checkpoint(path)
    model = ARCHITECTURES[config.architecture](config, resolve_dtype(dtype, config, checkpoint), device, context_len, quantization)
    if checkpoint is None:
        model.draw_weights()
    else:
        model.read_weights(checkpoint, progress)
    return model


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, checkpoint: Checkpoint | None) -> torch.dtype:
    """The dtype asked for; for "auto" the one the config names, or else the one most weights are stored in; float32 where none are."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return DTYPE_NAMES.get(config.dtype) or (torch.float32 if checkpoint is None else checkpoint.dtype())
    if dtype not in DTYPE_NAMES:
        raise ModelError(f"dtype {dtype!r} is not supported: auto, {', '.join(DTYPE_NAMES)} are")
    return DTYPE_NAMES[dtype]


class Model:
    """The decoder of the picture above: parameters, and the step over them. Subclasses say where an architecture differs."""

    defaults = {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
                "sliding_window": None}
    refused = REFUSED

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu", context_len: int | None = None,
                 quantization: str | None = None):
        """Allocates parameters without values; `read_weights` or a test fills them."""
        self.config, self.dtype, self.device, self.quantization = config, dtype, device, quantization
        self.scale = config.head_dim**-0.5
        self._empty_ends()
        self.norm = self._empty(config.hidden_size)                                      # [E]
        self.layers = [self._empty_layer(window) for window in config.windows]
        for layer, following in zip(self.layers, self.layers[1:]):
            layer.next_norm = following.input_norm
        self.layers[-1].next_norm = self.norm
        self._native_layers: tuple[list, ctypes.Array] | None = None             # for kernels.cpp: what it points into, the pointers
        self.cos_sin = rope_table(config, context_len or config.context_len).to(device)  # [C, D] fp32

    # ---- the step

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, E] after the last norm. Writes the tokens' keys and values into `kv` at `batch.slots`."""
        x = kernels.embedding(batch.input_ids, self.embedding, self.dtype)       # [T, E]
        turn = kernels.rope_gather(self.cos_sin, batch.positions, self.dtype)
        if self._goes_in_one_call(batch):
            return self._all_layers(x, turn, batch, kv)
        h, residual = kernels.rms_norm(x, self.layers[0].input_norm, self.config.rms_norm_eps), x
        for layer, k_cache, v_cache in zip(self.layers, kv.k, kv.v):
            h = self.attention(layer, h, turn, batch, k_cache, v_cache)
            h, residual = kernels.add_rms_norm(h, residual, layer.mlp_norm, self.config.rms_norm_eps)
            h = self.mlp(layer, h)
            h, residual = kernels.add_rms_norm(h, residual, layer.next_norm, self.config.rms_norm_eps)
        return h

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] -> [N, V] float32. tokens: [K] int64, of these alone: [N, K]."""
        return kernels.linear(hidden, self.head if tokens is None else kernels.rows_of(self.head, tokens), dtype=torch.float32)

    def some_logits(self, hidden: torch.Tensor, needs_all: torch.Tensor, others: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, V] float32: of all tokens at the rows `needs_all` [A], of `tokens` [K] at the `others` [B], where all else has -inf. The
        N - A - B that are left hold anything."""
        if len(needs_all) == len(hidden):
            return self.logits(hidden)
        logits = hidden.new_empty(len(hidden), self.config.vocab_size, dtype=torch.float32)
        if len(others):
            logits.index_fill_(0, others, -math.inf)
            logits[others[:, None], tokens] = self.logits(hidden[others], tokens)
        return logits.index_copy_(0, needs_all, self.logits(hidden[needs_all])) if len(needs_all) else logits

    def attention(self, layer: Layer, h: torch.Tensor, turn: torch.Tensor, batch: ForwardBatch, k_cache: torch.Tensor,
                  v_cache: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]. The new keys are stored first, so a token finds its own and its neighbours' in the cache."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = kernels.linear(h, layer.qkv, layer.qkv_bias).view(len(h), heads + 2 * kv_heads, -1)  # [T, H + 2G, D]
        qk, v = qkv[:, :heads + kv_heads], qkv[:, heads + kv_heads:]
        if layer.qk_norm is not None:
            qk = kernels.rms_norm(qk, layer.qk_norm, self.config.rms_norm_eps)
        kernels.rope_(qk, turn)
        kernels.store_kv(qk[:, heads:], v, k_cache, v_cache, batch.slots)
        backend, plan = batch.attention
        out = backend.run(qk[:, :heads], k_cache, v_cache, plan, self.scale, window=layer.window)  # [T, H, D]
        return kernels.linear(out.reshape(len(h), -1), layer.o, layer.o_bias)

    def mlp(self, layer: Layer, h: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return kernels.linear(kernels.silu_mul(kernels.linear(h, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)

    # ---- the same step on a CPU, as one call of kernels.cpp

    def _goes_in_one_call(self, batch: ForwardBatch) -> bool:
        """Whether kernels.cpp has all that the loop would call, and is the faster at it."""
        own = type(self).attention is not Model.attention or type(self).mlp is not Model.mlp
        args = getattr(batch.attention[1], "args", None)
        if own or not isinstance(args, native.Attention):
            return False
        return 0 < args.tokens <= native.few(self.dtype, self.quantization is not None, self.config.hidden_size)

    def _all_layers(self, x: torch.Tensor, turn: torch.Tensor, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """The loop of `forward`; overwrites x, which becomes the residual. A parameter of a layer may be exchanged for another tensor, but not by
        its `.data`."""
        parts = [part for layer in self.layers for part in NATIVE_PARTS(layer)]
        made = self._native_layers
        if made is None or not all(map(operator.is_, [kv, *parts], made[0])):  # the first use, or something was exchanged
            layers = map(self._native_layer, self.layers, kv.k, kv.v)
            self._native_layers = made = [kv, *parts], (native.Layer * len(self.layers))(*layers)
        out, args = torch.empty_like(x), batch.attention[1].args
        step = native.Step(
            layers=ctypes.addressof(made[1]), first_norm=self.layers[0].input_norm.data_ptr(), turn=turn.data_ptr(), x=x.data_ptr(),
            out=out.data_ptr(), slots=batch.slots.data_ptr(), num_layers=len(self.layers), hidden=self.config.hidden_size,
            intermediate=self.config.intermediate_size, eps=self.config.rms_norm_eps)
        args.slot_stride, args.scale, args.softcap, args.sinks = kv.k[0].stride(0), self.scale, 0.0, None
        native.library().nano_layers(step, args, native.DTYPES[self.dtype])
        return out

    @staticmethod
    def _native_layer(layer: Layer, k_cache: torch.Tensor, v_cache: torch.Tensor) -> native.Layer:
        weights = {name: kernels.native_weight(getattr(layer, name), getattr(layer, f"{name}_bias")) for name in ("qkv", "o", "gate_up", "down")}
        qk_norm = None if layer.qk_norm is None else layer.qk_norm.data_ptr()
        return native.Layer(**weights, qk_norm=qk_norm, mlp_norm=layer.mlp_norm.data_ptr(), next_norm=layer.next_norm.data_ptr(),
                            k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(), window=layer.window)

    # ---- parameters

    def parameters(self) -> dict[str, Weight]:
        """Where each tensor of a checkpoint goes: its name -> the parameter, or the rows of a fused one."""
        wanted = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if self.head is not self.embedding:
            wanted["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            wanted |= {f"model.layers.{number}.{name}": tensor for name, tensor in self.layer_parameters(layer).items()}
        return wanted

    def layer_parameters(self, layer: Layer) -> dict[str, Weight]:
        """The same for one layer, names without `model.layers.N.`."""
        dim = self.config.head_dim
        cuts = (self.config.num_heads * dim, self.config.num_kv_heads * dim, self.config.num_kv_heads * dim)
        parts = {"input_layernorm.weight": layer.input_norm, "post_attention_layernorm.weight": layer.mlp_norm,
                 "self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
        for kind, qkv, o, gate_up, down in (("weight", layer.qkv, layer.o, layer.gate_up, layer.down),
                                            ("bias", layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)):
            if qkv is not None:
                parts |= zip((f"self_attn.{name}_proj.{kind}" for name in "qkv"), qkv.split(cuts))
            if gate_up is not None:
                parts |= zip((f"mlp.{name}_proj.{kind}" for name in ("gate", "up")), gate_up.split(self.config.intermediate_size))
            parts |= {f"self_attn.o_proj.{kind}": o, f"mlp.down_proj.{kind}": down}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def read_weights(self, checkpoint: Checkpoint, progress: bool = True) -> None:
        """Fill the parameters. Raises ModelError unless the checkpoint has exactly the model's tensors, in the model's shapes."""
        source = self._settle_head(checkpoint)
        wanted = {source.get(name, name): tensor for name, tensor in self.parameters().items()}
        have = {name for name in checkpoint if not self._is_derived(name)}
        if missing := sorted(wanted.keys() - have):
            hint = "; the config says that the head is not tied to the embedding" if "lm_head.weight" in missing else ""
            raise ModelError(f"{checkpoint.path} lacks {_some(missing)}{hint}")
        if extra := sorted(have - wanted.keys()):
            raise ModelError(f"{checkpoint.path} holds what this {self.config.architecture} has no place for: {_some(extra)}")
        for name, tensor in wanted.items():
            checkpoint.check_shape(name, tensor.shape)
        total = sum(tensor.nbytes for tensor in wanted.values())
        with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress, leave=False) as bar:
            for name in checkpoint:
                if name in wanted:
                    checkpoint.read_into(name, wanted[name])
                    bar.update(wanted[name].nbytes)
        self.finish_weights()

    def draw_weights(self, seed: int = 0) -> None:
        """Fill the parameters with random values, the same for a seed (on one kind of device): norms of one, no biases, and matrices wide enough
        that activations keep their size from layer to layer. To measure speed without a checkpoint; the text means nothing."""
        draw = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.parameters().items():
            if isinstance(tensor, QuantizedWeight):
                tensor.values.random_(-127, 128, generator=draw)
                tensor.scales.fill_((3 / tensor.shape[1]) ** 0.5 / 127)
            elif tensor.dim() == 2:
                width = (3 / tensor.shape[1]) ** 0.5
                tensor.uniform_(-width, width, generator=draw)
            else:
                tensor.fill_(float(name.endswith("norm.weight")))
        self.finish_weights()

    def finish_weights(self) -> None:
        """Derive what the step needs from parameters that have their values."""
        for layer in self.layers:
            if layer.q_norm is not None:
                counts = ((layer.q_norm, self.config.num_heads), (layer.k_norm, self.config.num_kv_heads))
                layer.qk_norm = torch.cat([norm.expand(count, -1) for norm, count in counts])

    def _settle_head(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Tied models may be stored with the embedding, the head or both. Returns which name to read in place of which.

        Two that differ mean that the config is wrong about the tie; like `transformers`, we believe the tensors and untie them.
        """
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if not self.config.tied or head not in checkpoint.tensors:
            return {}
        if embedding not in checkpoint.tensors:
            return {embedding: head}
        if checkpoint.same(embedding, head):
            checkpoint.tensors.pop(head)
        else:
            self.config = replace(self.config, tied=False)
            self._empty_ends()
        return {}

    @staticmethod
    def _is_derived(name: str) -> bool:
        """Old checkpoints also store RoPE frequencies, which follow from the config."""
        return name.endswith("rotary_emb.inv_freq")

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_matrix(self, outputs: int, inputs: int) -> Weight:
        """One that is multiplied, and so may be quantised."""
        if self.quantization is None:
            return self._empty(outputs, inputs)
        return QuantizedWeight(torch.empty(outputs, inputs, dtype=torch.int8, device=self.device),
                               torch.empty(outputs, dtype=torch.float32, device=self.device))

    def _empty_ends(self) -> None:
        """An embedding that is no head as well is only looked up, and keeps the model's dtype."""
        shape = self.config.vocab_size, self.config.hidden_size
        self.head = self._empty_matrix(*shape)                                           # [V, E]
        self.embedding = self.head if self.config.tied else self._empty(*shape)          # [V, E]

    def _empty_layer(self, window: int) -> Layer:
        c, optional = self.config, lambda there, *shape: self._empty(*shape) if there else None
        width, qkv = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        return Layer(
            input_norm=self._empty(c.hidden_size), mlp_norm=self._empty(c.hidden_size), window=window,
            qkv=self._empty_matrix(qkv, c.hidden_size), qkv_bias=optional(c.qkv_bias, qkv),
            q_norm=optional(c.qk_norm, c.head_dim), k_norm=optional(c.qk_norm, c.head_dim),
            o=self._empty_matrix(c.hidden_size, width), o_bias=optional(c.o_bias, c.hidden_size),
            gate_up=self._empty_matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=optional(c.mlp_bias, 2 * c.intermediate_size),
            down=self._empty_matrix(c.hidden_size, c.intermediate_size), down_bias=optional(c.mlp_bias, c.hidden_size))

    # ---- reading a config

    @classmethod
    def read_config(cls, name: str, hf: dict) -> ModelConfig:
        """`config.json` -> ModelConfig for this architecture."""
        hf = cls.defaults | hf
        for key, neutral in cls.refused.items():
            if hf.get(key) not in (None, False, neutral):
                raise ModelError(f"{name} with {key} = {_short(hf[key])} is not supported")
        for key in ("hidden_act", "hidden_activation"):
            if hf.get(key, "silu") not in ("silu", "swish"):
                raise ModelError(f"{name} with {key} = {hf[key]!r} is not supported (silu is)")
        layers, heads, hidden = (_whole(hf, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        kv_heads = heads if hf["num_key_value_heads"] is None else _whole(hf, "num_key_value_heads")
        dim = hidden // heads if hf["head_dim"] is None else _whole(hf, "head_dim")
        if heads % kv_heads or dim % 2 or dim > MAX_HEAD_DIM:
            raise ModelError(f"{name} with {heads} query heads, {kv_heads} key heads and head_dim {dim} is not supported: the "
                             f"first must be a multiple of the second, head_dim even and at most {MAX_HEAD_DIM}")
        return ModelConfig(
            architecture=name, vocab_size=_whole(hf, "vocab_size"), hidden_size=hidden,
            intermediate_size=_whole(hf, "intermediate_size"), num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=dim, context_len=_whole(hf, "max_position_embeddings"),
            rms_norm_eps=float(hf["rms_norm_eps"]), rope=cls.read_rope(name, hf, dim), windows=cls.read_windows(name, hf, layers),
            tied=bool(hf["tie_word_embeddings"]), dtype=hf.get("dtype") or hf.get("torch_dtype"), **cls.switches(hf))

    @classmethod
    def switches(cls, hf: dict) -> dict[str, bool]:
        """Which biases and norms there are."""
        bias = bool(hf["attention_bias"])
        return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(hf["mlp_bias"])}

    @classmethod
    def read_windows(cls, name: str, hf: dict, layers: int) -> tuple[int, ...]:
        """The sliding window of each layer, 0 where it sees everything. A window that the context never exceeds is none."""
        window = hf["sliding_window"] or 0
        if window and window < hf["max_position_embeddings"]:
            raise ModelError(f"{name} with sliding_window = {window} is not supported")
        return (0,) * layers

    @classmethod
    def read_rope(cls, name: str, hf: dict, dim: int) -> Rope:
        return read_rope(name, hf, dim)


@register_architecture("LlamaForCausalLM")
class Llama(Model):
    """Llama 2 and 3, SmolLM2 and the many that took their shape."""


@register_architecture("MistralForCausalLM")
class Mistral(Model):
    """Llama's shape; every layer has the window, if there is one."""

    defaults = Model.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

    @classmethod
    def switches(cls, hf: dict) -> dict[str, bool]:
        return {}

    @classmethod
    def read_windows(cls, name: str, hf: dict, layers: int) -> tuple[int, ...]:
        return (_window(hf),) * layers


@register_architecture("Qwen2ForCausalLM")
class Qwen2(Model):
    """Biases on q, k, v and not on o; the window, if it is switched on, in the layers that say so."""

    defaults = Model.defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
                                 "use_sliding_window": False, "max_window_layers": 28}

    @classmethod
    def switches(cls, hf: dict) -> dict[str, bool]:
        return {"qkv_bias": True}

    @classmethod
    def read_windows(cls, name: str, hf: dict, layers: int) -> tuple[int, ...]:
        first = hf["max_window_layers"]
        kinds = hf.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise ModelError(f"{name} with layer_types = {_short(kinds)} is not supported")
        window = _window(hf) if hf["use_sliding_window"] else 0
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


@register_architecture("Qwen3ForCausalLM")
class Qwen3(Qwen2):
    """A norm on every query and key head; biases only if asked for, then on o as well."""

    defaults = Qwen2.defaults | {"head_dim": 128}

    @classmethod
    def switches(cls, hf: dict) -> dict[str, bool]:
        bias = bool(hf["attention_bias"])
        return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def architecture_name(hf: dict) -> str:
    """The registered name in `architectures`; where the config lists none, the one its model_type implies."""
    names = hf.get("architectures") or [f"{str(hf.get('model_type') or 'unknown').capitalize()}ForCausalLM"]
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise ModelError(f"the architecture {', '.join(map(str, names))} is not supported ({', '.join(ARCHITECTURES)} are)")


def _window(hf: dict) -> int:
    """The window in tokens, or 0 where there is none or the context never exceeds it."""
    window = hf["sliding_window"] or 0
    return window if window < hf["max_position_embeddings"] else 0


def _whole(hf: dict, key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json needs a positive whole number for {key}, it has {_short(value)}")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --------------------------------------------------------------------------------------------------------------------- RoPE

ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


def read_rope(name: str, hf: dict, dim: int) -> Rope:
    """RoPE settings out of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Kinds and keys that are not known are refused; so is longrope, unless both its lists are one: then it does not depend on the
    length of the text, and is how checkpoints converted from GGUF state llama3's scaling.
    """
    stated = _rope_settings(name, hf)
    kind = stated.pop("rope_type", None) or stated.pop("type", "default")
    stated.pop("type", None)
    theta = float(stated.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    if kind not in ROPE_KEYS or (kind == "longrope" and stated.get("short_factor") != stated.get("long_factor")):
        raise ModelError(f"{name} with rope_type {kind!r} is not supported (default, linear, llama3 and yarn are)")
    if unknown := sorted(stated.keys() - ROPE_KEYS[kind] - {"finetuned"}):
        raise ModelError(f"{name} with {', '.join(unknown)} in its RoPE settings ({kind}) is not supported")
    max_len = hf["max_position_embeddings"]
    original = hf.get("original_max_position_embeddings") or stated.get("original_max_position_embeddings") or max_len
    rope = Rope(kind=kind, theta=theta, original_len=original)
    try:
        if kind == "longrope":
            divisors = tuple(float(value) for value in stated["short_factor"])
            return Rope(theta=theta, divisors=divisors, attention_factor=float(stated["attention_factor"]))
        if kind == "linear":
            return replace(rope, factor=float(stated["factor"]))
        if kind == "llama3":
            return replace(rope, **{key: float(stated[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")})
        if kind == "yarn":
            factor = float(stated.get("factor", max_len / original))
            return replace(rope, factor=factor, attention_factor=_yarn_attention_factor(stated, factor),
                           beta_fast=float(stated.get("beta_fast", 0) or 32), beta_slow=float(stated.get("beta_slow", 0) or 1),
                           truncate=bool(stated.get("truncate", True)))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{name} with rope_type {kind!r} has a wrong or missing setting: {error}") from error
    return Rope(theta=theta)


def _rope_settings(name: str, hf: dict) -> dict:
    """The one dictionary of settings that all layers share, without keys that say nothing."""
    stated = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if "full_attention" in stated:  # one entry per kind of layer
        if any(entry != stated["full_attention"] for entry in stated.values() if isinstance(entry, dict)):
            raise ModelError(f"{name} with rope_parameters that differ between layers is not supported")
        stated = stated["full_attention"]
    stated = {key: value for key, value in stated.items() if value is not None}
    if stated.pop("partial_rotary_factor", 1) != 1:
        raise ModelError(f"{name} with partial_rotary_factor in its RoPE settings is not supported")
    return stated


def _yarn_attention_factor(stated: dict, factor: float) -> float:
    """YaRN sharpens attention over long texts: 0.1 ln(factor) + 1, or a ratio of two such (DeepSeek's mscale)."""
    if "attention_factor" in stated:
        return float(stated["attention_factor"])
    grow = lambda weight: 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    if stated.get("mscale") and stated.get("mscale_all_dim"):
        return grow(stated["mscale"]) / grow(stated["mscale_all_dim"])
    return grow(1.0)


def rope_table(config: ModelConfig, context_len: int) -> torch.Tensor:
    """cos and sin of every position's angles, [context_len, D] fp32: cos in the first half of a row, sin in the second."""
    angles = torch.arange(context_len, dtype=torch.float32)[:, None] * rope_frequencies(config.rope, config.head_dim)  # [C, D/2]
    return torch.cat((angles.cos(), angles.sin()), -1) * config.rope.attention_factor


def rope_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Radians per position of each pair of a head's dimensions, [D/2] fp32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.divisors:
        if len(rope.divisors) != dim // 2:
            raise ModelError(f"RoPE has {len(rope.divisors)} factors for {dim // 2} frequencies")
        return frequencies / torch.tensor(rope.divisors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, frequencies, dim)
    return frequencies


def _llama3_frequencies(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow rotations are slowed by `factor`, fast ones stay, those between are blended."""
    turns = rope.original_len * frequencies / (2 * math.pi)  # in the original context
    stay = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * ((1 - stay) / rope.factor + stay)


def _yarn_frequencies(rope: Rope, frequencies: torch.Tensor, dim: int) -> torch.Tensor:
    """The same idea with a ramp over dimensions, from the one that turns beta_fast times to the one that does beta_slow times."""
    where = lambda turns: dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    low, high = where(rope.beta_fast), where(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    slowed = ramp.clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def _demo() -> None:
    config = ModelConfig.from_dict({
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}})
    model = ARCHITECTURES[config.architecture](config, torch.bfloat16)
    print(f"{config.architecture}: {config.num_layers} layers, {config.num_heads} query heads on {config.num_kv_heads} key heads "
          f"of {config.head_dim}, context {config.context_len}\n")
    print(f"  {'what a checkpoint must hold (layer 0 of 2)':50} {'shape':16} goes into")
    for name, tensor in model.parameters().items():
        if ".layers.1." not in name:
            home = "a tensor of its own" if tensor._base is None else f"rows of {list(tensor._base.shape)}"
            print(f"  {name:50} {str(list(tensor.shape)):16} {home}")
    count = sum(tensor.numel() for tensor in model.parameters().values())
    multiplied = count if config.tied else count - model.embedding.numel()  # an embedding is looked up, a head multiplied
    kv_bytes = KVPool.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
    print(f"\n{count:,} weights, {count * model.dtype.itemsize / 1e6:.2f} MB. A token: {2 * multiplied / 1e6:.2f} Mflop, "
          f"{kv_bytes:,} bytes of KV")
    shares = rope_frequencies(config.rope, config.head_dim) / rope_frequencies(Rope(), config.head_dim)
    print("RoPE: the share of its speed that YaRN leaves each pair of dimensions", " ".join(f"{s:.2f}" for s in shares.tolist()))


if __name__ == "__main__":
    _demo()
