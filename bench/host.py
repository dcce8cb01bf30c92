"""Host work a step: all that the engine does beside the device, under a model that costs nothing.

    python bench/host.py [--model demo] [--rows 1,32,256] [--only decode,mixed,speculative,constrained] [--steps 64] [--repeats 8] [--page-size 1]

The model is scripted: there is no forward pass and no sampler, what rows sample was written down before. All else is the real engine's, in the
loop of a GPU (one step in flight while the next is planned): every request streams, the text is that of the real tokenizer. The weights are those
of a model of one tiny layer; `--model` gives the tokenizer and the size of the vocabulary.

decode       so many rows, a token each
mixed        beside them, always a prompt of four chunks, which fill the step's 2,048 tokens: admitted, cut, put into the tree, evicted later
speculative  4 guesses a row, of which 0 to 4 are right in turn; every second path does not begin with the first guess
constrained  rows that write JSON under a schema: states come back with the tokens, forced text is guessed and right

Microseconds of CPU time of the one thread, the mean of `--steps` steps, the best of `--repeats` such runs; what reading the clock costs is taken
off:

schedule  guesses to draft, Scheduler.next_batch                          process  results as numbers, stop conditions, text, chunks to stream
plan      the work list of attention, all of the step's integers packed   text     of it detokenisation: TextStream, in runs apart
launch    handing that over, and what the sampler sorts by rows           commit   Scheduler.commit: lengths, slots, the tree

`yards`: the step's time divided by that of a yardstick, some lines of Python and numpy timed in the same minute, which compares machines, and
hours of a busy one.
"""

import argparse
import collections
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from nano_sgl import Engine, EngineConfig, SamplingParams, sampling, spec, weights
from nano_sgl.constraint import Walked
from nano_sgl.grammar import INDEX
from nano_sgl.memory import Batch
from nano_sgl.protocol import Request
from nano_sgl.results import Results
from nano_sgl.text import TextStream
from nano_sgl.worker import Worker

PROMPT = 128        # tokens; a chunk of `mixed` is what the rows leave of BUDGET
BUDGET, CHUNKS = 2048, 4
GUESSES = 4
PARTS = ("schedule", "plan", "launch", "process", "commit")
# vLLM 0.32 beside 256 running requests of SmolLM2-135M's config, one token each, pages of 16, p50 on two cores of an AMD EPYC
PUBLISHED = {32: (195, 81), 256: (1494, 657)}
PROSE = """The scheduler spends one budget of tokens a step: running requests first, "as they are", then whoever waits. Memory is 4,096 pages; if
none is left, the cheapest request is retracted (its KV stays in the tree) and it queues again. """
ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}, "in_stock": {"type": "boolean"}},
        "required": ["id", "name", "in_stock"], "additionalProperties": False}
SCHEMA = json.dumps({"type": "array", "items": ITEM})


# --------------------------------------------------------------------------------------------------------------------------- the clock

class Clock:
    """CPU time of this thread by parts, each without those inside it."""

    def __init__(self):
        self.ns: collections.Counter[str] = collections.Counter()
        self.inside = ["idle"]
        reads = [time.thread_time_ns() for _ in range(1001)]
        self.cost = float(np.median(np.diff(reads)))
        self.last = time.thread_time_ns()

    def turn(self) -> None:
        """What has passed belongs to the part that ends, or is left, here."""
        now = time.thread_time_ns()
        self.ns[self.inside[-1]] += now - self.last - self.cost
        self.last = now

    @contextlib.contextmanager
    def part(self, name: str):
        """Time inside is the part's."""
        self.turn()
        self.inside.append(name)
        try:
            yield
        finally:
            self.turn()
            self.inside.pop()

    def watch(self, owner: object, method: str, name: str) -> None:
        """Time inside a method of `owner` is the part's."""
        timed, turn, inside = getattr(owner, method), self.turn, self.inside

        def watched(*args, **kwargs):
            turn()
            inside.append(name)
            try:
                return timed(*args, **kwargs)
            finally:
                turn()
                inside.pop()
        setattr(owner, method, watched)


class Spot:
    """What a yardstick looks at."""
    __slots__ = ("count", "name")

    def __init__(self, name: str):
        self.count, self.name = 0, name


def yardstick_us() -> float:
    """Of what engines do all day, without one: for 256 objects a few attributes, a look into a dict and one more in a list; ten small arrays."""
    spots, taken = [Spot(str(i)) for i in range(256)], []
    by_name = {spot.name: spot for spot in spots}
    for _ in range(200):
        start, kept = time.thread_time_ns(), []
        for spot in spots:
            spot.count += 1
            if by_name.get(spot.name) is spot:
                kept.append((spot.count, spot.name))
        for _ in range(10):
            np.arange(256).cumsum()
        taken.append(time.thread_time_ns() - start)
    return min(taken) / 1000


# -------------------------------------------------------------------------------------------------------------------------- the script

class Scripted(Engine):
    """An engine on a device that needs no time. Row by row, `script` [n] int64 is what is sampled, from its beginning on; `states`, `chains` [n]: of
    a grammar, before each of these tokens: where it stands, and how many tokens are forced from there on."""

    def __init__(self, config: EngineConfig, clock: Clock):
        super().__init__(config)
        self.worker.close()
        self.worker, self.clock = Worker(threaded=False), clock     # a step is launched where it is submitted, as into the stream of a GPU
        self.at = np.zeros(self.rows.length.shape[0], np.int64)     # [R] tokens that a row has sampled
        self.script, self.states, self.chains = np.zeros(1, np.int64), None, None
        self.runner.run = self._launch
        for owner, method, name in ((self, "_draft_lens", "schedule"), (self.scheduler, "next_batch", "schedule"), (self, "_plan", "plan"),
                                    (self.runner, "run", "launch"), (self, "_process", "process"), (self.scheduler, "commit", "commit")):
            clock.watch(owner, method, name)

    def _launch(self, batch: Batch, plan) -> Results:
        """What a step takes from the host is handed over; the rest is the script's."""
        plan.packed.sent() if batch.again else plan.packed.send()
        for req in batch.started:
            self.sampler.set_row(req.row, req.params, req.seed, req.prompt, req.output_ids)
        with self.clock.part("model"):
            return self._act(batch)

    def _act(self, batch: Batch) -> Results:
        for req in batch.started:
            self.at[req.row] = len(req.output_ids)
        results, picked = Results(None, [], marks=[0.0]), batch.samples.nonzero()[0]
        if not len(picked):
            return results
        rows, drafts = batch.rows[picked], batch.draft_lens[picked].astype(np.int64)
        at, most = self.at[rows], int(drafts.max())
        right = np.minimum(drafts, (at + rows) % (GUESSES + 1) if self.chains is None else self.chains[at])
        nodes = np.arange(most + 1)
        order = np.tile(nodes, (len(rows), 1))
        if self.speculation is not None and self.speculation.branching:  # the first guess was wrong, and the others follow one another
            moved = (right > 0) & (right < drafts) & (rows % 2 == 0)
            order[moved] = np.where((nodes > 0) & (nodes <= right[moved, None]), nodes + 1, np.where(nodes == right[moved, None] + 1, 1, nodes))
        tokens = self.script[(at[:, None] + order.argsort(1)) % len(self.script)][nodes <= drafts[:, None]]     # [M]
        self.at[rows] = at + right + 1
        results.sampled = sampling.Sampled(torch.from_numpy(tokens), torch.zeros(len(tokens), dtype=torch.bool), None, None, None)
        if most:
            counts, drafted = torch.from_numpy(right), torch.from_numpy(drafts)
            results.judged = spec.Judged(torch.from_numpy(order), counts, drafted, drafted, counts * (self.chains is not None))
        if self.speculation is not None and self.speculation.drafters:
            found = torch.full((len(rows),), GUESSES)
            results.next = spec.Next(found, torch.from_numpy(self.script[(at + right + 1) % len(self.script)]), found * 2, found * 0)
        if results.judged is not None or results.next is not None:
            results.marks += [0.001, 0.001]
        if self.states is not None:
            results.walked = Walked(torch.from_numpy(self.states[at + right + 1]), torch.zeros(len(rows), dtype=torch.bool))
        return results

    def write(self, text: str) -> None:
        """The script is this text."""
        self.script = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)

    def constrain(self, params: SamplingParams, count: int) -> None:
        """The script is a JSON text of at least so many tokens that the grammar allows; its rows and chains are built."""
        grammar, compiler = self.constraints.compile(Request(rid="", prompt_ids=[1], params=params)).result(), self.constraints.compiler
        names, items = itertools.cycle(PROSE.split()), []
        while 8 * len(items) < count:
            items.append({"id": 7 * len(items), "name": next(names).strip('".,;():'), "in_stock": len(items) % 2 == 0})
        self.write(json.dumps(items)[:-1])
        states = list(itertools.accumulate(self.script.tolist(), grammar.step, initial=grammar.start))
        assert None not in states and len(self.script) > count, "the text is too short, or the grammar does not allow it"
        for state in dict.fromkeys(states):
            grammar.row(state)
            compiler.jump(grammar, state)
        while (stats := compiler.stats())["grammar_rows_ahead"] or stats["grammar_rows_queued"] or stats["grammar_runs"]:
            compiler.wait(0.1)
        self.states = np.array(states)
        self.chains = np.array([len(grammar.tables.chain_of.get(state & INDEX, ())) for state in states])


def tiny_model(folder: Path, path: Path) -> Path:
    """A model of one tiny layer, with the vocabulary of the one at `path`."""
    vocab = weights.load_config(path)["vocab_size"]
    config = transformers.LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                                      num_key_value_heads=1, max_position_embeddings=1 << 15)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in path.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


# ----------------------------------------------------------------------------------------------------------------------------- runs

FLAGS = {"decode": {}, "mixed": {}, "constrained": {},
         "speculative": dict(speculative_algorithm="ngram", speculative_num_draft_tokens=GUESSES, speculative_draft_length="fixed")}


class Run:
    """A scripted engine with so many rows that decode."""

    def __init__(self, path: Path, kind: str, rows: int, steps: int, page: int):
        """steps: that it will make at most."""
        self.kind, self.rows, self.rng, self.names = kind, rows, np.random.default_rng(0), itertools.count()
        count = (steps + 64) * {"speculative": 1 + GUESSES / 2, "constrained": 6}.get(kind, 1)
        self.long, length = CHUNKS * (BUDGET - rows), PROMPT + int(count)
        pool = rows * (length + 2 * page + 2 * GUESSES) + 3 * (self.long + page)
        self.clock = Clock()
        self.engine = Scripted(EngineConfig(
            model=str(path), max_total_tokens=pool, max_running_requests=rows + 2, context_length=max(length, self.long + 1) + 1, page_size=page,
            chunked_prefill_size=BUDGET, disable_overlap_schedule=False, random_seed=0, **FLAGS[kind]), self.clock)
        params = SamplingParams(max_tokens=int(count), ignore_eos=True, json_schema=SCHEMA if kind == "constrained" else None)
        if kind == "constrained":
            self.engine.constrain(params, int(count))
        else:
            self.engine.write(PROSE)
        for _ in range(rows):
            self.ask(PROMPT, params)
        while self.engine.scheduler.waiting or any(req.place for req in self.engine.scheduler.running):
            self.engine.step()
        for _ in range(16):
            self.one()

    def ask(self, length: int, params: SamplingParams) -> None:
        """Queue a prompt that begins like no other."""
        ids = self.rng.integers(0, self.engine.vocab_size, length).tolist()
        self.engine.add(Request(rid=f"r{next(self.names)}", prompt_ids=ids, params=params, stream=True))

    def one(self) -> int:
        """A step; returns how many tokens it made."""
        if self.kind == "mixed" and not self.engine.scheduler.waiting:
            self.ask(self.long, SamplingParams(max_tokens=1, ignore_eos=True))
        with self.clock.part("rest"):
            chunks = self.engine.step()
        return sum(len(chunk.output_ids) for chunk in chunks)

    def measure(self, steps: int) -> dict[str, float]:
        """Microseconds of each part of a step, and tokens."""
        self.clock.turn()
        self.clock.ns.clear()
        tokens = sum(self.one() for _ in range(steps))
        found = {name: ns / steps / 1000 for name, ns in self.clock.ns.items() if name not in ("idle", "model")}
        return {"step": sum(found.values()), "tokens": tokens / steps, **found}

    def text_us(self, steps: int) -> float:
        """Microseconds of detokenisation in a step."""
        kept = {name: getattr(TextStream, name) for name in ("push", "take", "pass_on")}
        for name in kept:
            self.clock.watch(TextStream, name, "text")
        try:
            return self.measure(steps).get("text", 0.0)
        finally:
            for name, method in kept.items():
                setattr(TextStream, name, method)

    def close(self) -> None:
        """No step afterwards."""
        self.engine.shutdown()


def table(path: Path, kind: str, sizes: list[int], steps: int, repeats: int, page: int) -> str:
    """Of one kind of batch, a line for each number of rows."""
    titles = (kind + ": rows", "tokens", "step us", *PARTS, "rest", "text", "us a row", "yards")
    lines = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
    for rows in sizes:
        run = Run(path, kind, rows, (repeats + 2) * steps + 64, page)
        gc.collect()
        gc.freeze()  # as the server does
        yard = yardstick_us()
        best = min((run.measure(steps) for _ in range(repeats)), key=lambda found: found["step"])
        yard = min(yard, yardstick_us())
        text = min(run.text_us(steps) for _ in range(2))
        gc.unfreeze()
        run.close()
        cells = [f"{best['tokens']:.1f}", f"**{best['step']:,.0f}**", *(f"{best.get(part, 0):,.0f}" for part in (*PARTS, "rest")), f"{text:,.0f}",
                 f"{best['step'] / rows:.1f}", f"{best['step'] / yard:.1f}"]
        lines.append(f"| {rows} | {' | '.join(cells)} |")
        if kind == "decode" and rows in PUBLISHED:
            schedule, update = PUBLISHED[rows]
            print(f"vLLM's scheduler with {rows} rows, as published: {schedule:,} us to schedule, {update:,} us to update, without text", flush=True)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", default="1,32,256", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--only", default=",".join(FLAGS), type=lambda text: text.split(","))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args(argv)
    if not set(args.only) <= set(FLAGS) or min(args.steps, args.repeats, *args.rows) < 1 or max(args.rows) > BUDGET // 2:
        parser.error(f"--only takes {', '.join(FLAGS)}; --steps and --repeats at least 1; --rows 1 to {BUDGET // 2}")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(Path(folder), weights.resolve(args.model))
        print(f"the tokenizer of {args.model}, pages of {args.page_size}, Python {sys.version.split()[0]}, torch {torch.__version__}; "
              f"the yardstick is {yardstick_us():.1f} us", flush=True)
        for kind in args.only:
            print(f"\n{table(path, kind, args.rows, args.steps, args.repeats, args.page_size)}", flush=True)


if __name__ == "__main__":
    main()
