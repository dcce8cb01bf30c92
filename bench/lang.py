"""Programs of examples/lang through the language, and as the independent calls that they would be without it, side by side.

    python bench/lang.py [--programs react,few_shot] [--model demo] [--rounds 1] [--no-hints] [--no-parallel] [--choose echo]
        [--pool 32768] [--tiny] [--json FILE]

    language       a server of ours through RuntimeEndpoint: forks and batches declare what they share, choices are scored
    calls, cache   the same program as calls of /v1/completions, each of which sends the whole text again, on the same server
    calls          the same on a server without a cache (--disable-radix-cache)
    no hints       language with config.hints off: the cache has to find by itself what is shared     (with --no-hints)
    no parallel    language with config.parallel off: a fork's branches one after the other           (with --no-parallel)

So `calls, cache` against `calls` is what the cache buys, and `language` against `calls, cache` is what the declaration still buys when the cache is
there. Calls of branches and of different programs are made from threads, as a careful user would. OpenAI's API scores given texts only as `echo`,
which computes the whole prompt for each choice. By default the calls choose by a regular expression instead: that is less work than the
language's scores are, and may choose otherwise. With --choose echo they do as much and choose the same. In bfloat16 other texts may differ, too:
`same` says how many are the language's.

Both servers run from the beginning. A measurement begins with an empty cache. The arms take turns within a program and a round: first one program
alone (its latency), then several at once (their rate). Figures are medians over rounds, ratios are made pair by pair; above 1 is better throughout.
`tokens computed` is what the engine has put through the model. Grammars are compiled before. --pool is the KV memory of each server, in tokens: in a
small one what was not declared is evicted before it is used. The last table is API speculative execution: programs of short gens on /v1/completions,
with a call for each gen, and with calls that write beyond their gen.
"""

import argparse
import json
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lang"))

import few_shot  # noqa: E402
import hierarchical_summary  # noqa: E402
import json_decode  # noqa: E402
import llm_judge  # noqa: E402
import multi_turn_chat  # noqa: E402
import pipeline  # noqa: E402
import react  # noqa: E402
import self_consistency  # noqa: E402
import skeleton_of_thought  # noqa: E402
import tree_of_thought  # noqa: E402

import nano_sgl.lang as sgl  # noqa: E402
from nano_sgl.choices import Token  # noqa: E402

WORKLOADS = {  # program -> what all runs have, what one has, what several have
    multi_turn_chat: ({"turns": 3, "tokens": 16}, {"chats": 1}, {"chats": 4}),
    tree_of_thought: ({"width": 3, "depth": 2, "beam": 1, "tokens": 16}, {"problems": 1}, {"problems": 2}),
    skeleton_of_thought: ({"points": 4, "tokens": 24}, {"questions": 1}, {"questions": 3}),
    llm_judge: ({"sides": 3, "tokens": 16}, {"essays": 1}, {"essays": 2}),
    react: ({"steps": 2, "tokens": 16}, {"agents": 1}, {"agents": 3}),
    few_shot: ({"shots": 5}, {"questions": 1}, {"questions": 8}),
    json_decode: ({}, {"characters": 1}, {"characters": 2}),
    pipeline: ({"tokens": 16}, {"questions": 1}, {"questions": 4}),
    self_consistency: ({"samples": 5, "tokens": 16}, {"problems": 1}, {"problems": 3}),
    hierarchical_summary: ({"tokens": 16}, {"parts": 2}, {"parts": 4}),
}
TINY = {"turns": 2, "tokens": 4, "width": 2, "depth": 1, "beam": 1, "points": 2, "sides": 2, "steps": 1, "shots": 2, "samples": 2, "chats": 2,
        "problems": 2, "questions": 2, "essays": 2, "agents": 2, "characters": 1, "parts": 2}        # none is larger
RATIOS = [("the cache", "calls, cache", "calls"), ("the declaration", "language", "calls, cache"), ("both", "language", "calls"),
          ("hints", "language", "no hints"), ("parallelism", "language", "no parallel")]
SPEC_TOKENS = 64
PEOPLE = ["a lighthouse keeper", "a painter of signs", "a doctor on a ship", "a collector of maps", "a maker of violins", "a gardener at a school"]
CARDS = """About: a piano tuner
Name: Ilse Brandt
Town: Lindau
Age: 61
Habit: hums the note that she is looking for

About: a night porter
Name: Tomas Hale
Town: Porto
Age: 34
Habit: knows every guest by the sound of the steps

"""


# ---------------------------------------------------------------------------------------------------------------------------- the arms

class Calls(sgl.OpenAI):
    """A server as whoever has only OpenAI's completions uses it. Messages are written as the model's template has them, as the language does."""

    def __init__(self, server: sgl.RuntimeEndpoint, choose: str = "echo"):
        super().__init__(server.model_info["served_model_name"], False, server.base_url + "/v1")
        self.roles, self.choose = server.chat_roles(), choose

    def chat_roles(self) -> dict[str, Any]:
        """What stands around messages."""
        return self.roles

    def score(self, prefix: str, choices: list[str], *, unconditional: bool = False, parent: str = "") -> list[sgl.Score]:
        """Choosing by a regular expression gives what was written 0, and the others -1."""
        if self.choose == "echo":
            return super().score(prefix, choices, unconditional=unconditional)
        pattern = "|".join(map(re.escape, choices))
        written = self.generate([prefix], [{"regex": f"({pattern})", "max_tokens": max(map(len, choices)) + 1, "temperature": 0}])[0].text
        if written not in choices:
            raise RuntimeError(f"{written!r} is none of {choices}")
        return [sgl.Score(choice, [Token(i, -float(choice != written))]) for i, choice in enumerate(choices)]


@dataclass
class Arm:
    """A way to run programs. server: who is asked for its counters."""

    name: str
    backend: sgl.Backend
    server: sgl.RuntimeEndpoint
    config: dict[str, Any]


@contextmanager
def configured(values: dict[str, Any]) -> Iterator[None]:
    """sgl.config with other values."""
    before = {name: getattr(sgl.config, name) for name in values}
    vars(sgl.config).update(values)
    try:
        yield
    finally:
        vars(sgl.config).update(before)


@dataclass
class Result:
    """A measurement. computed: tokens that went through the model."""

    seconds: float
    programs: int
    requests: int
    computed: int
    texts: list[str]


def measure(arm: Arm, run: Callable, sizes: dict[str, Any]) -> Result:
    """Run a program on an empty cache."""
    arm.server.flush_cache()
    before = arm.server.get_server_info()["stats"]
    with configured(arm.config):
        start = time.perf_counter()
        states = run(arm.backend, **sizes)
        seconds = time.perf_counter() - start
    after = arm.server.get_server_info()["stats"]
    return Result(seconds, len(states), *(after[name] - before[name] for name in ("finished", "computed_tokens")), [state.text() for state in states])


# ------------------------------------------------------------------------------------------------------------------------- the figures

class Bench:
    """A run: its arms and its results, by program, how many at once ("one", "several"), arm: a list with a result a round."""

    def __init__(self, args: argparse.Namespace, cached: sgl.RuntimeEndpoint, uncached: sgl.RuntimeEndpoint):
        self.args, self.results = args, {}
        calls = [Arm("calls, cache", Calls(cached, args.choose), cached, {}), Arm("calls", Calls(uncached, args.choose), uncached, {})]
        extra = [Arm(name, cached, cached, config) for name, config, wanted in (
            ("no hints", {"hints": False}, args.no_hints), ("no parallel", {"parallel": False}, args.no_parallel)) if wanted]
        self.arms, self.calls = [Arm("language", cached, cached, {}), *calls, *extra], calls

    def sizes(self, program: Any, many: str, tiny: bool = False) -> dict[str, Any]:
        """What a program is run with."""
        common, one, several = WORKLOADS[program]
        sizes = common | (one if many == "one" else several)
        return {name: min(value, TINY[name]) for name, value in sizes.items()} if tiny or self.args.tiny else sizes

    def run(self) -> None:
        """All rounds of all programs."""
        for program in self.args.programs:
            for arm in self.calls:          # grammars, connections
                program.run(arm.backend, **self.sizes(program, "one", tiny=True))
            for _ in range(self.args.rounds):
                for many in ("one", "several"):
                    for arm in self.arms:
                        result = measure(arm, program.run, self.sizes(program, many))
                        self.results.setdefault((program.__name__, many, arm.name), []).append(result)
            print(f"{program.__name__} is done", file=sys.stderr, flush=True)

    def table(self, many: str, show: Callable[[Result], float], form: str, better: int) -> str:
        """A row a program: a figure for each arm, and the ratios. better: 1 where more is, -1 where less."""
        names = [arm.name for arm in self.arms]
        pairs = [(title, ours, other) for title, ours, other in RATIOS if {ours, other} <= set(names)]
        titles = [*names, *(title for title, *_ in pairs), "same"]
        lines = [f"| program | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for program in self.args.programs:
            rounds = {name: self.results[program.__name__, many, name] for name in names}
            cells = [format(statistics.median(map(show, rounds[name])), form) for name in names]
            for _, ours, other in pairs:
                found = [(show(mine) / show(its)) ** better for mine, its in zip(rounds[ours], rounds[other])]
                cells.append(f"{statistics.median(found):.2f}" + (f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else ""))
            same = [text == its for mine, its in zip(rounds["language"], rounds["calls, cache"]) for text, its in zip(mine.texts, its.texts)]
            lines.append(f"| {program.__name__} | {' | '.join(cells)} | {sum(same)}/{len(same)} |")
        return "\n".join(lines)

    def tables(self) -> Iterator[tuple[str, str]]:
        """(heading, table) of all that was measured."""
        yield "latency of one program, s", self.table("one", lambda r: r.seconds, ".2f", -1)
        yield "several at once, programs a second", self.table("several", lambda r: r.programs / r.seconds, ".3f", 1)
        yield "several at once, tokens computed", self.table("several", lambda r: r.computed, ",.0f", -1)
        yield "several at once, requests", self.table("several", lambda r: r.requests, ",.0f", -1)


# ------------------------------------------------------------------------------------------------------------------- API speculative execution

def card(s, person):
    """Four gens behind two examples of what is wanted."""
    s += CARDS + "About: " + person
    for field in ("Name", "Town", "Age", "Habit"):
        s += f"\n{field}:" + sgl.gen(field, stop="\n")


def speculation(server: sgl.RuntimeEndpoint, people: int, tokens: int) -> str:
    """Calls, tokens and seconds of cards one after the other, by how many tokens a call writes at least."""
    lines = ["| | calls | saved | prompt tokens | of them cached | tokens written | s | whole cards |", "|---|" + "---:|" * 7]
    for name, length in (("a call a gen", None), (f"calls of {SPEC_TOKENS} tokens", SPEC_TOKENS)):
        server.flush_cache()
        backend, start = Calls(server), time.perf_counter()
        states = [sgl.function(card, num_api_spec_tokens=length).run(person, backend=backend, temperature=0, max_new_tokens=tokens)
                  for person in PEOPLE[:people]]
        seconds, usage = time.perf_counter() - start, backend.usage
        whole = sum(all(state[field].strip() for field in ("Name", "Town", "Age", "Habit")) for state in states)
        lines.append(f"| {name} | {usage['calls']} | {usage['saved_calls']} | {usage['prompt_tokens']:,} | {usage['cached_tokens']:,} | "
                     f"{usage['completion_tokens']} | {seconds:.2f} | {whole}/{people} |")
        backend.close()
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------------ the arguments

def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; `programs` becomes modules."""
    by_name = {program.__name__: program for program in WORKLOADS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(by_name), help="by name, with commas (all)")
    parser.add_argument("--model", default="demo", help="demo, a directory, a hub id, a GGUF file (demo)")
    parser.add_argument("--dtype", default="auto", help="of the servers (as stored)")
    parser.add_argument("--rounds", type=int, default=1, help="how often every arm has its turn (1)")
    parser.add_argument("--no-hints", action="store_true", help="a row of the paper's ablation: no frontend hint")
    parser.add_argument("--no-parallel", action="store_true", help="another one: no frontend parallelism")
    parser.add_argument("--choose", default="regex", choices=("regex", "echo"), help="what the calls do for a select (regex)")
    parser.add_argument("--pool", type=int, default=32768, help="tokens that each server has KV memory for (32768)")
    parser.add_argument("--tiny", action="store_true", help="few branches, few tokens: a test, not a measurement")
    parser.add_argument("--json", help="file for every single measurement")
    args = parser.parse_args(argv)
    if unknown := set(args.programs.split(",")) - set(by_name):
        parser.error(f"--programs: there is no {min(unknown)!r}; there are {', '.join(by_name)}")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, expected at least 1")
    args.programs = [by_name[name] for name in dict.fromkeys(args.programs.split(","))]
    return args


@contextmanager
def servers(args: argparse.Namespace) -> Iterator[list[sgl.Runtime]]:
    """One with a cache, one without, started at the same time."""
    made, errors = {}, []

    def start(cache: bool) -> None:
        try:
            made[cache] = sgl.Runtime(args.model, dtype=args.dtype, max_total_tokens=args.pool, log_level="warning",
                                      disable_radix_cache=not cache)
        except Exception as error:
            errors.append(error)
    threads = [threading.Thread(target=start, args=(cache,)) for cache in (True, False)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        yield [made[True], made[False]]
    finally:
        for server in made.values():
            server.shutdown()


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    with servers(args) as (cached, uncached):
        bench = Bench(args, cached, uncached)
        bench.run()
        for heading, table in bench.tables():
            print(f"\n{heading}\n\n{table}")
        print(f"\nAPI speculative execution, cards of four gens\n\n{speculation(cached, 2 if args.tiny else len(PEOPLE), 8 if args.tiny else 24)}")
        for arm in bench.calls:
            arm.backend.close()
    if args.json:
        found = [{"program": program, "at_once": many, "arm": arm, "round": number, **{k: v for k, v in vars(result).items() if k != "texts"}}
                 for (program, many, arm), results in bench.results.items() for number, result in enumerate(results, 1)]
        Path(args.json).write_text("".join(json.dumps(each) + "\n" for each in found))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no server outlives its benchmark
    sys.exit(main())
