"""Random ragged batches for the attention tests: a prefix tree, rows that extend it, their slots in a pool, and draft trees."""

from dataclasses import dataclass

import numpy as np
import torch

from nano_sgl.attention import NO_TREE


def random_tree(rng: np.random.Generator, rows: int, longest: int = 40) -> list[tuple[int, int, int, int]]:
    """Shared runs of a random prefix tree over `rows` batch rows: nested at any level, some nodes in chains."""
    runs = []

    def grow(first: int, last: int, at: int) -> None:
        if last - first < 2 or rng.random() < 0.2:
            return
        length = int(rng.integers(0, longest))
        cut = length // 2 if rng.random() < 0.3 else 0
        runs.extend((first, last, at + start, at + end) for start, end in ((0, cut), (cut, length)) if start < end)
        middle = sorted({first, last, *rng.integers(first, last + 1, 2).tolist()})
        for a, b in zip(middle, middle[1:]):
            if (a, b) != (first, last):
                grow(a, b, at + length)

    grow(0, rows, 0)
    return runs


def shared_len(shared: list[tuple[int, int, int, int]], row: int) -> int:
    """How many columns of batch row `row` are shared with another."""
    return max((end for first, last, _, end in shared if first <= row < last), default=0)


@dataclass
class Ragged:
    rows: list[int]
    q_lens: list[int]
    bounds: list[int]  # upper bounds, above the true lengths where the device is to know better
    shared: list[tuple[int, int, int, int]]
    table: torch.Tensor  # [R, C] int32; where a row has no column: slot 0
    cols: torch.Tensor  # [T] int64
    base: torch.Tensor | None
    bits: torch.Tensor | None
    num_slots: int

    @property
    def token_rows(self) -> np.ndarray:
        """[T] the table row of each token."""
        return np.repeat(self.rows, self.q_lens)

    def tensors(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0):
        """Random (q, k_cache, v_cache): q a strided view as of a fused projection, the padding slot full of NaN."""
        make = torch.Generator().manual_seed(seed)
        q = torch.randn(len(self.cols), heads + 3, dim, generator=make).to(dtype)[:, :heads]
        k_cache, v_cache = torch.randn(2, self.num_slots, kv_heads, dim, generator=make).to(dtype)
        k_cache[0] = v_cache[0] = float("nan")
        return q, k_cache, v_cache


def ragged(
    rng: np.random.Generator,
    rows: int,
    q_max: int = 40,
    kv_max: int = 300,
    page: int = 1,
    trees: bool = False,
    slack: int = 30,
    longest_shared: int = 40,
) -> Ragged:
    """A batch of `rows` rows: up to q_max tokens each (often few, sometimes none) on up to kv_max private columns."""
    shared = random_tree(rng, rows, longest_shared)
    q_lens = [int(rng.integers(0, 4) if rng.random() < 0.4 else rng.integers(0, q_max + 1)) for _ in range(rows)]
    lengths = [shared_len(shared, b) + int(rng.integers(0, kv_max + 1)) for b in range(rows)]
    ends = [length + n for length, n in zip(lengths, q_lens)]
    order = rng.permutation(rows + 3)[:rows].tolist()
    table = np.zeros((rows + 3, max(ends) + slack + 1), np.int32)
    pages = iter((rng.permutation(sum(-(-end // page) for end in ends)) + 1) * page)
    for row, end in zip(order, ends):
        for column in range(0, end, page):
            width = min(page, end - column)
            first = next(pages)
            table[row, column : column + width] = np.arange(first, first + width)
    for first, last, start, end in shared:
        table[np.array(order[first:last])[:, None], np.arange(start, end)] = table[order[first], start:end]
    cols = np.concatenate([np.arange(length, end) for length, end in zip(lengths, ends)])
    base = bits = None
    if trees:
        base, bits = np.full(len(cols), NO_TREE, np.int64), np.zeros(len(cols), np.int64)
        at = 0
        for length, n in zip(lengths, q_lens):
            if n <= 64 and rng.random() < 0.6:
                ancestors = []
                for node in range(n):
                    parent = int(rng.integers(-1, node))
                    ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << node)
                base[at : at + n] = length
                bits[at : at + n] = np.array(ancestors, np.uint64).astype(np.int64)
            at += n
    bounds = [end + int(rng.integers(0, slack + 1)) for end in ends]
    tensor = lambda x: None if x is None else torch.from_numpy(x)  # noqa: E731
    return Ragged(
        order,
        q_lens,
        bounds,
        shared,
        tensor(table),
        tensor(cols),
        tensor(base),
        tensor(bits),
        (sum(-(-e // page) for e in ends) + 1) * page,
    )


def attend(
    module, name: str, batch: Ragged, q, k_cache, v_cache, device: str = "cpu", options: dict | None = None, **flags
) -> torch.Tensor:
    """A batch through backend `name` of nano_sgl.attention or of its interpreted copy: plan, prepare, run. [T, H, D] on CPU."""
    heads, kv_heads, dim = q.shape[1], k_cache.shape[1], q.shape[2]
    backend = module.ATTENTION[name](heads, kv_heads, dim)
    plan = module.plan(batch.rows, batch.q_lens, batch.bounds, batch.shared, **(options or backend.plan_options))
    on = [None if x is None else x.to(device) for x in (batch.table, batch.cols, batch.base, batch.bits)]
    ctx = backend.prepare(plan, *on)
    sinks = flags.pop("sinks", None)
    return backend.run(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        ctx,
        dim**-0.5,
        sinks=None if sinks is None else sinks.to(device),
        **flags,
    ).cpu()


def split_everything(group: int) -> dict:
    """Plan options under which even small batches are shared, cut into query blocks, and split."""
    return dict(group=group, tiles=(16, 64), programs=5, min_split=32, item_cost=0, partial_cost=0)
