"""What the order of a queue is worth: three interleaved conversations against a KV budget that cannot hold all three prefixes.

    python bench/lpm.py [--step 32] [--highest 5600] [--png docs/lpm.png]

The simulation was published with its totals alone: 14,688 prefill tokens first come first served, 5,472 by longest prefix match, a factor of 2.68.
Those two are the sum of all prompt lengths (everything misses) and the number of distinct tokens (everything is computed once), which four simple
shapes give: a turn has a fixed prefix and fresh tokens of its own, or grows by the turns before it. All requests wait from the start, in the order
A1 B1 C1 A2 B2 C2 ...; one runs at a time and asks for no output; pages of one token, lru.

Each shape is run through the real scheduler under each order, at every budget from its longest prompt up to --highest: the table holds the tokens
computed at one budget, and between which budgets fcfs and lpm give the published totals; the figure all of them.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator

from nano_sgl.memory import Rows, SlotAllocator
from nano_sgl.protocol import Request, SamplingParams
from nano_sgl.radix import Tree
from nano_sgl.scheduler import Scheduler

PUBLISHED = {"fcfs": 14_688, "lpm": 5_472}
ORDERS = ("fcfs", "lpm", "dfs-weight")
CHATS = 3
SHAPES = {  # name -> (turns, tokens of the prefix, tokens of a turn, whether a turn holds the turns before it, budget of the table)
    "fixed 1,024 + 200, 4 turns": (4, 1024, 200, False, 2048),
    "fixed 1,536 + 96, 3 turns": (3, 1536, 96, False, 3072),
    "growing 1,440 + 192, 3 turns": (3, 1440, 192, True, 3072),
    "growing 624 + 400, 4 turns": (4, 624, 400, True, 1840),
}


def prompts(shape: str) -> Iterator[tuple[str, list[int]]]:
    """(name, ids) of every request of a shape, in the order of arrival."""
    turns, prefix, own, growing, _ = SHAPES[shape]
    for turn, chat in itertools.product(range(turns), range(CHATS)):
        fresh = [CHATS + 100 * chat + turn] * own
        before = [CHATS + 100 * chat + t for t in range(turn) for _ in range(own)]  # the first turn of a growing chat is its prefix
        yield f"{'ABC'[chat]}{turn + 1}", [chat] * prefix + (before if growing else fresh)


def simulate(shape: str, order: str, budget: int) -> tuple[int, list[str]]:
    """(tokens prefilled, names of the requests as they ran) with a KV pool of `budget` tokens."""
    scheduler = Scheduler(tree=Tree(1), slots=SlotAllocator(budget, 1), rows=Rows(1, budget, "cpu"), token_budget=budget, max_running=1,
                          context_len=budget, schedule_policy=order)
    for name, ids in prompts(shape):
        scheduler.add(Request(rid=name, prompt_ids=ids, params=SamplingParams(max_tokens=0)))
    ran = []
    while (batch := scheduler.next_batch()) is not None:
        ran += [req.rid for req in batch.started]
        scheduler.commit(batch, [[] for _ in batch.reqs], batch.complete.tolist())
    return scheduler.counters.computed_tokens, ran


def sweep(shape: str, order: str, step: int, highest: int) -> list[tuple[int, int]]:
    """(budget, tokens prefilled) from the longest prompt up."""
    longest = max(len(ids) for _, ids in prompts(shape))
    return [(budget, simulate(shape, order, budget)[0]) for budget in range(longest, max(highest, longest) + 1, step)]


def table(found: dict[tuple[str, str], list[tuple[int, int]]]) -> str:
    """A line a shape, of the sweeps of all shapes and orders."""
    lines = [f"| shape | budget | {' | '.join(ORDERS)} | fcfs / lpm | published totals at budgets |", "|---|" + "---:|" * (len(ORDERS) + 2) + "---|"]
    for shape, (*_, budget) in SHAPES.items():
        tokens = {order: simulate(shape, order, budget)[0] for order in ORDERS}
        columns = {order: dict(found[shape, order]) for order in PUBLISHED}
        same = [b for b in columns["fcfs"] if all(columns[order][b] == total for order, total in PUBLISHED.items())]
        lines.append(f"| {shape} | {budget:,} | {' | '.join(f'{tokens[order]:,}' for order in ORDERS)} | {tokens['fcfs'] / tokens['lpm']:.2f} | "
                     f"{f'{same[0]:,} to {same[-1]:,}' if same else 'none'} |")
    return "\n".join(lines)


def pyplot():
    """matplotlib's, for files; where it is missing, an exit that says what to do."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("the figure needs matplotlib: pip install matplotlib, or pass --png '' for the table alone")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def draw(found: dict[tuple[str, str], list[tuple[int, int]]], png: str) -> None:
    """A panel a shape, a line an order: prefilled tokens against the KV budget."""
    figure = pyplot().figure(figsize=(13, 3.4), layout="constrained")
    for number, shape in enumerate(SHAPES, 1):
        axis = figure.add_subplot(1, len(SHAPES), number)
        for order, style in zip(ORDERS, ("-", "-", "--")):
            axis.step(*zip(*found[shape, order]), style, where="post", label=order)
        for total in PUBLISHED.values():
            axis.axhline(total, color="grey", linewidth=0.6, linestyle=":")
        axis.set_title(shape, fontsize=9)
        axis.set_xlabel("KV budget, tokens")
        axis.set_ylim(0, 16_000)
        if number == 1:
            axis.set_ylabel("tokens prefilled")
            axis.legend()
    figure.savefig(png, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=32, help="tokens between budgets (32)")
    parser.add_argument("--highest", type=int, default=5600, help="the last budget, tokens (5600)")
    parser.add_argument("--png", default="docs/lpm.png", help="the figure's file; '' for none (docs/lpm.png)")
    args = parser.parse_args(argv)
    if args.step < 1:
        parser.error(f"--step is {args.step}, expected at least 1")
    found = {(shape, order): sweep(shape, order, args.step, args.highest) for shape in SHAPES for order in ORDERS}
    print(table(found))
    shape = next(iter(SHAPES))
    for order in ORDERS:
        print(f"{order:11}{' '.join(simulate(shape, order, SHAPES[shape][-1])[1])}")
    if args.png:
        draw(found, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
