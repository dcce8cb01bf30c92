"""What the work of each kernel takes on a GPU at best, on paper: bytes over bandwidth or FLOPs over rate, whichever is longer.

    python bench/kernels_aot.py --roofline [--markdown]

For a model of Llama-3-8B's shape in bfloat16. Bytes are what a kernel must move if each operand crosses memory once (what is read again within a
launch is taken to come from the L2 cache); FLOPs are counted two to a multiplication and sum. Attention's work lists are made by `attention.plan`
as the Triton backend would for the card's multiprocessors, so its splits and the partials that they cost are counted, not guessed.

Rates are the data sheets': nobody reaches them. 90 % of the bandwidth is what a large copy gets, and 60-75 % of the products' rate a good GEMM.
bench/gpu.py measures both where it runs, and takes these functions with what it has found.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nano_sgl import attention  # noqa: E402


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float    # bytes a second
    flops: float        # a second, dense bf16
    memory: float       # bytes
    processors: int


CARDS = (Card("A100 40 GB", 1.555e12, 312e12, 40e9, 108), Card("A100 80 GB", 2.0e12, 312e12, 80e9, 108), Card("H100 SXM", 3.35e12, 989e12, 80e9, 132),
         Card("H200", 4.8e12, 989e12, 141e9, 132))


@dataclass(frozen=True)
class Shape:
    """A Llama: letters as in the README, by their names."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    mlp: int = 14336
    vocab: int = 128256
    itemsize: int = 2

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of a layer's matrices."""
        return {"qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden), "o": (self.hidden, self.heads * self.dim),
                "gate_up": (2 * self.mlp, self.hidden), "down": (self.hidden, self.mlp)}

    @property
    def layer_weights(self) -> int:
        return sum(a * b for a, b in self.products.values())

    @property
    def weight_bytes(self) -> int:
        """What a step reads: all matrices and the head, of the embedding a few rows."""
        return (self.layers * self.layer_weights + self.vocab * self.hidden) * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.dim * self.itemsize


LLAMA3_8B = Shape()


@dataclass(frozen=True)
class Work:
    bytes: float
    flops: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Work:
        return Work(self.bytes * times, self.flops * times)

    def seconds(self, bandwidth: float, flops: float) -> float:
        return max(self.bytes / bandwidth, self.flops / flops)


# ---- attention: of its work list


def plan(shape: Shape, q_lens, kv_lens, shared=(), processors: int = 132) -> attention.Plan:
    """The work list that the Triton backend makes on a card with so many multiprocessors; kv_lens [B] include the new tokens."""
    group = shape.heads // shape.kv_heads
    options = dict(group=group, tiles=attention.tiles_for(shape.dim, group), programs=-(-2 * processors // shape.kv_heads), min_split=256)
    return attention.plan(range(len(q_lens)), q_lens, kv_lens, shared, **options)


def attend(shape: Shape, work: attention.Plan, distinct: int | None = None) -> Work:
    """A layer's launch over a work list. distinct: columns of KV that cross memory; by default each item's, which is true of decode, where an item
    is the only one to read its columns."""
    items = work.items.astype(np.int64)
    columns = items[:, 4] - items[:, 3]
    pairs = int((columns * items[:, 1] - np.where(items[:, 1] > 1, _unseen(items), 0)).sum())
    read = int(columns.sum()) if distinct is None else distinct
    tokens = work.tokens * shape.heads * shape.dim * shape.itemsize
    partials = work.partials * shape.heads * (shape.dim + 1) * 4
    return Work(read * (shape.kv_bytes + 4) + 2 * tokens + partials, 4 * pairs * shape.heads * shape.dim)


def _unseen(items: np.ndarray) -> np.ndarray:
    """Of the pairs of an item those above the diagonal, if its last token's own column is its last: a triangle of its tokens."""
    causal = items[:, 4] - items[:, 3] >= items[:, 1]
    return np.where(causal, items[:, 1] * (items[:, 1] - 1) // 2, 0)


def merge(shape: Shape, work: attention.Plan) -> Work:
    """Of a layer's partials; nothing where there are none."""
    if not work.partials:
        return Work(0)
    return Work(work.partials * shape.heads * (shape.dim + 1) * 4 + work.tokens * shape.heads * shape.dim * shape.itemsize)


# ---- what stands around it, for T tokens


def elementwise(shape: Shape, tokens: int) -> dict[str, Work]:
    """A layer's kernels between products."""
    s, size = shape, shape.itemsize
    heads = s.heads + s.kv_heads
    return {"add_rms_norm": Work(tokens * s.hidden * size * 4 + s.hidden * size), "rope": Work(tokens * s.dim * size * 2 * (heads + 1)),
            "store_kv": Work(tokens * (2 * s.kv_bytes + 8)), "silu_mul": Work(tokens * s.mlp * size * 3)}


def product(tokens: int, outputs: int, inputs: int, itemsize: int = 2) -> Work:
    return Work((outputs * inputs + tokens * (outputs + inputs)) * itemsize, 2 * tokens * outputs * inputs)


def sampling(shape: Shape, rows: int) -> dict[str, Work]:
    """Passes over fp32 logits as sampling.py says it makes them; a mask reads an int16 a token and writes -inf, at most everywhere."""
    logits = rows * shape.vocab * 4
    return {"mask": Work(rows * shape.vocab * 2 + logits), "greedy": Work(logits), "sampled": Work(20 * logits), "sampled, top-p": Work(110 * logits)}


def step(shape: Shape, q_lens, kv_lens, processors: int = 132, rows: int | None = None, distinct: int | None = None) -> dict[str, Work]:
    """A whole step, greedy: its work by kind. rows: how many sample, all by default."""
    tokens, rows, work = int(np.sum(q_lens)), len(q_lens) if rows is None else rows, plan(shape, q_lens, kv_lens, processors=processors)
    between = elementwise(shape, tokens)
    layer = between["rope"] + between["store_kv"] + between["silu_mul"] + between["add_rms_norm"] * 2
    parts = {name: product(tokens, *sizes, shape.itemsize) * shape.layers for name, sizes in shape.products.items()}
    parts["head"] = product(rows, shape.vocab, shape.hidden, shape.itemsize)
    return parts | {"attention": attend(shape, work, distinct) * shape.layers, "merge": merge(shape, work) * shape.layers,
                    "between": layer * shape.layers, "sampling": sampling(shape, rows)["greedy"]}


def floor(shape: Shape, rows: int, columns: int) -> Work:
    """The least of a decode step: all weights and all KV read once, and the products done."""
    kv = rows * columns * shape.kv_bytes * shape.layers
    pairs = rows * columns * shape.layers * shape.heads * shape.dim
    return Work(shape.weight_bytes + kv, 2 * rows * shape.weight_bytes / shape.itemsize + 4 * pairs)


def prefill_flops(shape: Shape, tokens: int, rows: int = 1) -> float:
    """Of rows prompts of so many tokens, each from nothing; the head for the last token of each."""
    weights = 2 * tokens * rows * shape.layers * shape.layer_weights + 2 * rows * shape.vocab * shape.hidden
    return weights + 2 * rows * tokens * (tokens + 1) * shape.layers * shape.heads * shape.dim


def launches(shape: Shape, merges: bool) -> int:
    """Kernels of a greedy decode step's model: a layer's four products, two norms, rope, store, attention, silu, maybe the merge; and the ends."""
    return shape.layers * (10 + merges) + 4


# ---- forks: rows that share prefixes


def forks(tails: int = 256, prefix: int = 8192, rows: int = 64, nested: int = 0) -> tuple[list[int], list[int], list[tuple[int, int, int, int]]]:
    """(q_lens, kv_lens, shared) of rows that decode behind one prefix. nested: half of it is everybody's, a quarter each half's of the rows, an
    eighth each quarter's, and so on for so many levels more."""
    shared, start, ways = [], 0, 1
    for level in range(nested + 1):
        end = prefix if level == nested else start + (prefix - start) // 2
        shared += [(i * rows // ways, (i + 1) * rows // ways, start, end) for i in range(ways)]
        start, ways = end, ways * 2
    return [1] * rows, [prefix + tails] * rows, shared


def sharing(shape: Shape, case, processors: int = 132) -> tuple[Work, Work, Work]:
    """Attention and merge of a layer over such rows: grouped, apart, and grouped if what several tiles of queries read came from memory once."""
    q_lens, kv_lens, shared = case
    grouped, apart = (plan(shape, q_lens, kv_lens, runs, processors) for runs in (shared, ()))
    distinct = sum(kv_lens) - sum((last - first - 1) * (end - start) for first, last, start, end in shared)
    merged = merge(shape, grouped)
    return attend(shape, grouped) + merged, attend(shape, apart) + merge(shape, apart), attend(shape, grouped, distinct) + merged


FORKS = {"one prefix of 8k, 64 rows": forks(), "nested forks (3 levels)": forks(nested=2), "nested forks (6 levels)": forks(nested=5)}


# ---- the tables


def _number(x: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x:.3g}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 999.5e-6 else f"{seconds * 1e6:,.0f}"


def _kernels(s: Shape) -> list[list]:
    rows = [["kernel (one layer)", "work", "bytes", "FLOPs", *(f"{card.name}, us" for card in CARDS)]]
    def add(name: str, what: str, work: Work) -> None:
        rows.append([name, what, _number(work.bytes), _number(work.flops) if work.flops else "-",
                     *(_us(work.seconds(card.bandwidth, card.flops)) for card in CARDS)])
    for batch in (1, 16, 64, 256):
        for columns in (1024, 8192, 32768):
            work = plan(s, [1] * batch, [columns] * batch)
            add("attend, decode", f"{batch} x {columns} columns", attend(s, work))
            if work.partials:
                add("merge", f"{work.partials} partials of {batch} tokens", merge(s, work))
    for tokens in (2048, 8192, 32768):
        add("attend, prefill", f"{tokens} tokens", attend(s, plan(s, [tokens], [tokens]), distinct=tokens))
    add("attend, verify", "64 x 17 tokens at 4096 columns", attend(s, plan(s, [17] * 64, [4096] * 64), distinct=64 * 4096))
    for tokens in (1, 256, 8192):
        for name, work in elementwise(s, tokens).items():
            add(name, f"{tokens} token{'s' * (tokens > 1)}", work)
    for rows_ in (1, 256):
        for name, work in sampling(s, rows_).items():
            add(name if name == "mask" else f"sampling, {name}", f"{rows_} row{'s' * (rows_ > 1)}", work)
    return rows


def _decode(s: Shape) -> list[list]:
    rows = [["batch", "columns", "GB read", *(f"{card.name}, ms" for card in CARDS), "tokens/s, H100", "tokens/s, H200", "all kernels' bytes"]]
    for batch in (1, 16, 64, 256):
        for columns in (1024, 4096, 32768):
            least, whole = floor(s, batch, columns), sum(step(s, [1] * batch, [columns] * batch).values(), Work(0))
            times = [least.seconds(card.bandwidth, card.flops) if least.bytes < 0.95 * card.memory else None for card in CARDS]
            if any(times):
                rows.append([batch, columns, f"{least.bytes / 1e9:.1f}", *("-" if t is None else f"{t * 1e3:.2f}" for t in times),
                             *("-" if t is None else f"{batch / t:,.0f}" for t in times[-2:]), f"{whole.bytes / least.bytes:.3f}x"])
    return rows


def _prefill(s: Shape) -> list[list]:
    rows = [["prompt", "TFLOP", *(f"{card.name}, ms" for card in CARDS), "tokens/s, H100 and H200"]]
    for tokens in (1024, 8192, 32768):
        flops = prefill_flops(s, tokens)
        rows.append([tokens, f"{flops / 1e12:.1f}", *(f"{flops / card.flops * 1e3:,.1f}" for card in CARDS),
                     f"{tokens * CARDS[-1].flops / flops:,.0f}"])
    return rows


def _shared(s: Shape) -> list[list]:
    rows = [["rows", "GB apart", "GB grouped", "ratio", "GB if each column crosses memory once", "ratio"]]
    for name, case in FORKS.items():
        grouped, apart, once = sharing(s, case)
        rows.append([name, f"{apart.bytes / 1e9:.3f}", f"{grouped.bytes / 1e9:.3f}", f"{apart.bytes / grouped.bytes:.1f}x",
                     f"{once.bytes / 1e9:.3f}", f"{apart.bytes / once.bytes:.1f}x"])
    return rows


def report(markdown: bool = False, shape: Shape = LLAMA3_8B) -> str:
    """All tables, as text."""
    from kernels_aot import table
    s = shape
    head = (f"PREDICTED, not measured: bytes / bandwidth or FLOPs / rate, whichever is longer. {s.layers} layers of {s.hidden}, "
            f"{s.heads}/{s.kv_heads} heads of {s.dim}, MLP {s.mlp}, vocabulary {s.vocab}, bf16.\n"
            + "; ".join(f"{card.name} {card.bandwidth / 1e12:.3g} TB/s, {card.flops / 1e12:.0f} TFLOP/s" for card in CARDS))
    parts = [head, "Kernels", table(_kernels(s), markdown), "A decode step's floor: weights and KV read once", table(_decode(s), markdown),
             f"(a step without a graph launches {launches(s, True)} kernels of the model, and some for sampling)",
             "Prefill's floor: its products and its attention", table(_prefill(s), markdown),
             "Attention of a layer over rows that share a prefix, 256 columns of their own each", table(_shared(s), markdown)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report("--markdown" in sys.argv))
