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


def random_draft(rng: np.random.Generator, nodes: int) -> list[int]:
    """Ancestor bits of a random draft tree's nodes, of which the highest is a node's own: chains and branches, and behind them padding:
    leaves on the first node, or tokens that stand in its column."""
    real, bits = int(rng.integers(nodes // 2, nodes)) + 1, []
    bend, leaves = rng.random(), rng.random() < 0.5
    for node in range(nodes):
        parent = 0 if node >= real else int(rng.integers(0, node)) if node and rng.random() < bend else node - 1
        bits.append(1 if node >= real and not leaves else (bits[parent] if node else 0) | 1 << node)
    return bits


def tree_columns(bits: list[int]) -> list[int]:
    """Which of its tree's columns each token stands in."""
    return [word.bit_length() - 1 for word in bits]


def int64(bits: list[int]) -> np.ndarray:
    """Words of 64 bits as numpy has them."""
    return np.array(bits, np.uint64).astype(np.int64)


def shared_len(shared: list[tuple[int, int, int, int]], row: int) -> int:
    """How many columns of batch row `row` are shared with another."""
    return max((end for first, last, _, end in shared if first <= row < last), default=0)


@dataclass
class Ragged:
    rows: list[int]
    q_lens: list[int]
    bounds: list[int]  # upper bounds, above the true lengths where the device is to know better
    shared: list[tuple[int, int, int, int]]
    table: torch.Tensor  # [R, C] int32; where a row has no column: slot 0, or any slot that was once used
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
    """A batch of `rows` rows: up to q_max tokens each (often few, sometimes none) on up to kv_max private columns.

    trees: most rows verify a draft tree, some of 64 nodes, and bounds are far above the lengths: by `slack`, and 100.
    """
    shared = random_tree(rng, rows, longest_shared)
    q_lens = [int(rng.integers(0, 4) if rng.random() < 0.4 else rng.integers(0, q_max + 1)) for _ in range(rows)]
    if trees:
        slack += 100
        q_lens = [64 if rng.random() < 0.1 else n for n in q_lens]
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
        if trees and end and rng.random() < 0.5:
            table[row, end:] = rng.integers(page, (sum(-(-e // page) for e in ends) + 1) * page, table.shape[1] - end)
    for first, last, start, end in shared:
        table[np.array(order[first:last])[:, None], np.arange(start, end)] = table[order[first], start:end]
    cols = np.concatenate([np.arange(length, end) for length, end in zip(lengths, ends)])
    base = bits = None
    if trees:
        base, bits = np.full(len(cols), NO_TREE, np.int64), np.zeros(len(cols), np.int64)
        at = 0
        for length, n in zip(lengths, q_lens):
            if 0 < n <= 64 and rng.random() < 0.6:
                draft = random_draft(rng, n)
                base[at : at + n], bits[at : at + n] = length, int64(draft)
                cols[at : at + n] = length + np.array(tree_columns(draft))
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


# By hand: a token at column 5 of row 0, and a tree of seven nodes behind column 5 of row 1, which lie like this:
#
#     column  0 - 5    6   7   8  9  10  11  12
#     node             A - B - C                       position of C, D and E: 8, of F: 9, of the last: 7
#                      |   |-- -- D
#                      |   '-- -- -- E - F
#                      '-- -- -- -- -- -- -- padding
TREE = [0b1, 0b11, 0b111, 0b1011, 0b10011, 0b110011, 0b1000001]
SEEN = {  # by window: the columns that the token of row 0 sees, then those of A .. F and the padding
    0: [[*range(6)], [*range(7)], [*range(8)], [*range(9)], [*range(8), 9], [*range(8), 10], [*range(8), 10, 11], [*range(7), 12]],
    5: [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [4, 5, 6, 7, 8], [4, 5, 6, 7, 9], [4, 5, 6, 7, 10], [5, 6, 7, 10, 11], [3, 4, 5, 6, 12]],
    3: [[3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8], [6, 7, 9], [6, 7, 10], [7, 10, 11], [5, 6, 12]],
    2: [[4, 5], [5, 6], [6, 7], [7, 8], [7, 9], [7, 10], [10, 11], [6, 12]],
    1: [[5], [6], [7], [8], [9], [10], [11], [12]],
}


def seen_columns(module, name: str, window: int, options: dict | None, device: str = "cpu") -> list[list[int]]:
    """Which columns the tokens of that batch see, read off a cache in which every value names its column."""
    table = torch.arange(1, 401, dtype=torch.int32).view(2, 200)
    k_cache, v_cache = torch.zeros(2, 401, 1, 16)
    for column in range(16):
        v_cache[table[:, column].long(), 0, column] = 1
    base, bits = torch.tensor([NO_TREE] + [6] * 7), torch.tensor([0] + TREE)
    cols = torch.tensor([5, *range(6, 13)])
    batch = Ragged([0, 1], [1, 7], [106, 143], [], table, cols, base, bits, 401)
    if options is not None:
        options = module.ATTENTION[name](1, 1, 16).plan_options | options
    out = attend(module, name, batch, torch.zeros(8, 1, 16), k_cache, v_cache, device, options, window=window)
    return [row.nonzero()[:, 0].tolist() for row in out[:, 0]]
