"""Tiny random checkpoints, made by `transformers`, and what it computes with them: the oracle of the model's tests.

    path = tiny.checkpoint(tmp_path, "qwen2", num_key_value_heads=1)     a directory as from save_pretrained
    tiny.logits(path, ids)                                               [T, V] float32, eager attention
    tiny.add_tokenizer(path)                                             and a small byte-level tokenizer with a chat template

Weights are drawn wide enough that attention is far from uniform, norms differ from one and biases from zero: a checkpoint on
which a mistake shows. (A model fresh from its constructor has none of that.)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

VOCAB = 320
SHAPE = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
FAMILIES = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "mistral": ("MistralConfig", "MistralForCausalLM"),
            "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
            "gemma": ("GemmaConfig", "GemmaForCausalLM"), "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
            "granite": ("GraniteConfig", "GraniteForCausalLM"), "phi": ("PhiConfig", "PhiForCausalLM")}
CHAT_TEMPLATE = ("{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]  # ids 256.. of the tokenizer


def checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, bias: float = 0.5,
               max_shard_size: str | None = None, **config) -> Path:
    """Save a random checkpoint of `family` into `folder`; `config` overrides SHAPE. Biases are drawn N(0, bias)."""
    config_name, model_name = FAMILIES[family]
    defaults = {"sliding_window": None} if family == "mistral" else {"head_dim": 12} if family == "qwen3" else {}
    made = getattr(transformers, config_name)(**(SHAPE | defaults | config))
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, bias)
            elif parameter.ndim == 1:
                parameter.normal_(1, 0.2)
            else:
                parameter.normal_(0, 1.2 * parameter.shape[1] ** -0.5 if "embed" not in name else 0.3)
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    return Path(folder)


def edit(path: Path, file: str = "config.json", **values) -> Path:
    """Change keys of a JSON file of a checkpoint; None removes one."""
    stated = json.loads((path / file).read_text()) if (path / file).exists() else {}
    stated = {key: value for key, value in (stated | values).items() if value is not None}
    (path / file).write_text(json.dumps(stated))
    return path


def reference(path: Path, dtype: torch.dtype = torch.float32):
    """The checkpoint as `transformers` runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def logits(path: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 of one sequence."""
    return reference(path)(torch.tensor([ids])).logits[0].float()


def ids(count: int, seed: int = 0) -> list[int]:
    """Random token ids below those of the special tokens."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def add_tokenizer(path: Path) -> Path:
    """A byte-level tokenizer beside the weights: 256 bytes, six special tokens, a few merges; VOCAB covers it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n"), ("an", "d"), ("\u0120", "and"), ("i", "n"), ("o", "n")]
    for number, (left, right) in enumerate(merges):
        vocabulary[left + right] = 256 + len(SPECIAL) + number
    vocabulary |= {token: 256 + number for number, token in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    edit(path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", bos_token=SPECIAL[0], eos_token=SPECIAL[1],
         pad_token=SPECIAL[2], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False)
    return path
