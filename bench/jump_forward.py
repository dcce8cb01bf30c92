"""Jump-forward: what forced text costs when it is sampled, guessed or appended, and what appending does to the answers.

    python bench/jump_forward.py [--only modes,nothing,counts,choices,answers] [--model demo] [--batches 1,4,16] [--layouts fixed,compact,flexible]

The modes (engines of one process, in turn, on the same prompts): `off` samples forced text token by token, `draft` guesses it, `retokenize`
appends it and tokenises the whole output anew.

modes    profile: four fields of a character, whose answer `{"name": "Hermione Granger", "age": 17, "house": "Gryffindor", "occupation":
         "student"}` is 33 tokens, 12 of which the model has to produce: the published example; character: all ten fields of the SGLang paper's;
         everyday: the schemas of bench/schemas.py, another one for each request; calls: those of them that are function calls. With a batch of b,
         b requests run at any time, until 2 b (at least four) are answered. `tokens`, `forced`: of an answer, sampled or appended, and those of
         them that were forced text. `steps`: how many of off's one step is. `decode`: speed beside off with the prompts cached, median of the
         repeats (lowest, highest). `ceiling`: the same if each step cost t(its tokens) and nothing else did, where t is measured by the engine as
         for speculation. `end to end`: with nothing cached. `equal`: texts that are those of off; in bfloat16 the shape of a step decides between
         tokens that are as good as tied (--dtype float32: all, but for retokenize)
nothing  the same for grammars that force nothing or hardly anything: what the mode costs where it cannot help. `--repeats` is tripled
counts   no model: JSON texts as the tokenizer writes them, and in how many steps each mode would. schemas.py, its calls, and the cases of
         NANO_SGL_CASES where that is set (json.jsonl). `forced`: share of the tokens that lie inside of forced text. `at 1`, `at 16`: the ceiling at
         these batches. Flexible: the texts are indented by two
choices  in float32: how far `retokenize` moves what the model says next. At each place where forced text ends, of answers that off has sampled: the
         distribution of the next byte, over all ways to write the forced text with tokens (those of a weight below 1e-4 are left out), beside the
         one behind the ids that retokenize makes of the same text; both exact from the model's probabilities. TV: half the sum of differences
answers  in float32: the same by frequencies of whole answers, `--samples` for each mode: chi-square beside off with other seeds; and how many
         answers are off's of the same seed
"""

import argparse
import collections
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from grammar import load_cases, written
from schemas import SCHEMAS, among, number, record, some, text

from nano_sgl import attention, grammar
from nano_sgl.constraint import make_vocab
from nano_sgl.engine import Engine, EngineConfig
from nano_sgl.jump import build_chain, retokenized, spell
from nano_sgl.model import ForwardBatch
from nano_sgl.protocol import Request, SamplingParams

MODES = ("off", "draft", "retokenize")
PROMPTS, LEAST = 16, 1e-4                           # of choices: answers, and the weight of a way to write a text
LAYOUTS = ("fixed", "compact", "flexible")
PARTS = ("modes", "nothing", "counts", "choices", "answers")
CALLS = ("get_weather", "one of three tools", "several calls", "book_flight")
NAMES = ["Hermione Granger", "Ron Weasley", "Luna Lovegood", "Neville Longbottom", "Draco Malfoy", "Cho Chang", "Ginny Weasley",
         "Cedric Diggory", "Severus Snape", "Sirius Black", "Remus Lupin", "Nymphadora Tonks", "Minerva McGonagall", "Rubeus Hagrid",
         "Dolores Umbridge", "Fleur Delacour"]
HOUSES, JOBS = ("Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"), ("student", "teacher", "auror")
EXAMPLE = {"name": "Albus Dumbledore", "age": 115, "house": "Gryffindor", "occupation": "teacher", "blood status": "Half-blood",
           "wand": {"wood": "elder", "core": "thestral hair", "length": 15}, "alive": "Deceased", "patronus": "phoenix", "bogart": "a grave"}
SHORT = text(maxLength=16)
PROFILE = record({"name": SHORT, "age": number(0, 999, "integer"), "house": among(*HOUSES), "occupation": among(*JOBS)})
CHARACTER = record({"name": SHORT, "house": among(*HOUSES), "blood status": among("Pure-blood", "Half-blood", "Muggle-born"),
                    "occupation": among("student", "teacher", "auror", "ministry of magic", "death eater", "order of the phoenix"),
                    "wand": record({"wood": SHORT, "core": SHORT, "length": number(0, 99)}), "alive": among("Alive", "Deceased"),
                    "patronus": SHORT, "bogart": SHORT})
MOOD = record({"mood": among("calm", "glad", "sad"), "alone": {"type": "boolean"}, "friends": some(among("Ann", "Bob"), maxItems=2)})
NOTHING = {"any text": dict(regex=r"(.|\n)*"), "words": dict(regex=r"([\w'-]{1,20}[ ,.;:!?\n]{1,2}){0,400}"),
           "a long string": dict(json_schema={"type": "string", "minLength": 10_000})}


def profiles(count: int, layout: str = "fixed", fields: Sequence[str] = ("name", "age", "house", "occupation")) -> list[str]:
    """Prompts that give a character's facts and ask for a profile; one profile is given as an example."""
    rng, made = random.Random(0), []
    example = written({name: EXAMPLE[name] for name in fields}, layout)
    for number in range(count):
        name, job, age = NAMES[number % len(NAMES)], rng.choice(JOBS), rng.randint(11, 79)
        made.append(f"Profiles of a novel's characters, in JSON.\n\nAlbus Dumbledore, 115 years old, teacher, of house Gryffindor:\n{example}\n\n"
                    f"{name}, {age} years old, {job}, of house {rng.choice(HOUSES)}:\n")
    return made


def moods(count: int, layout: str = "fixed") -> list[str]:
    """Prompts that ask for a `MOOD`."""
    example = written({"mood": "calm", "alone": False, "friends": ["Ann", "Bob"]}, layout)
    return [f"Carol is at a table with Ann and Bob.\n{example}\n\n{name} has won a prize.\n" for name in (NAMES * count)[:count]]


def questions(names: Sequence[str], count: int) -> list[str]:
    """A prompt for each schema in turn."""
    return [f"Request {number}: please answer with a {names[number % len(names)]}, as JSON.\n" for number in range(count)]


def workload(name: str, layout: str, count: int, tokens: int, temperature: float) -> list[tuple[str, SamplingParams]]:
    """(prompt, parameters) of each request."""
    if name in NOTHING:
        asked = [(prompt, NOTHING[name]) for prompt in profiles(count)]
    elif name in ("profile", "character"):
        schema = PROFILE if name == "profile" else CHARACTER
        prompts = profiles(count, layout, list(schema["properties"]))
        asked = [(prompt, dict(json_schema=schema, json_whitespace=layout)) for prompt in prompts]
    else:
        schemas = [(title, schema) for title, schema, _ in SCHEMAS if name == "everyday" or title in CALLS]
        prompts = questions([title for title, _ in schemas], count)
        asked = [(prompt, dict(json_schema=schema, json_whitespace=layout)) for prompt, (_, schema) in zip(prompts, itertools.cycle(schemas))]
    least = tokens if name in NOTHING else 0
    return [(prompt, SamplingParams(max_tokens=tokens, min_tokens=least, temperature=temperature, seed=seed, **given))
            for seed, (prompt, given) in enumerate(asked)]


# ------------------------------------------------------------------------------------------------------------------------ modes

@dataclass
class Runs:
    """What an engine has done on a workload: seconds of each turn, all else of the last."""
    decode_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)      # tokens of each decoding step
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    forced: int = 0


@dataclass
class Answer:
    """What a request has got."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    forced: int = 0


def answer(engine: Engine, asked: Sequence[tuple[str, SamplingParams]]) -> tuple[float, list[int], list[Answer]]:
    """(seconds, tokens of each step, answers)."""
    answers = {str(i): Answer() for i in range(len(asked))}
    for (prompt, params), rid in zip(asked, answers):
        engine.add(Request(rid=rid, prompt_ids=engine.tokenizer.encode(prompt), params=params))
    sizes, counters, start = [], engine.scheduler.counters, time.perf_counter()
    while engine.has_work:
        before = counters.computed_tokens
        for chunk in engine.step():
            assert not chunk.error, chunk.error
            one = answers[chunk.rid]
            one.ids, one.text = one.ids + chunk.output_ids, one.text + chunk.text
            one.forced += (chunk.speculation or {}).get("forced_tokens", 0)
        if counters.computed_tokens > before:
            sizes.append(counters.computed_tokens - before)
    return time.perf_counter() - start, sizes, list(answers.values())


def play(engine: Engine, asked: Sequence[tuple[str, SamplingParams]], batch: int, runs: Runs, whole: bool) -> None:
    """All requests once with nothing in the cache, and once with their prompts in it; adds to `runs`."""
    most, engine.scheduler.max_running = engine.scheduler.max_running, batch
    engine.flush_cache()
    if whole:
        runs.whole_s.append(answer(engine, asked)[0])
        engine.flush_cache()
    answer(engine, [(prompt, SamplingParams(max_tokens=1)) for prompt, _ in asked])
    seconds, runs.sizes, answers = answer(engine, asked)
    runs.decode_s.append(seconds)
    runs.texts, runs.tokens, runs.forced = [one.text for one in answers], sum(len(one.ids) for one in answers), sum(one.forced for one in answers)
    engine.scheduler.max_running = most


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How much faster ours are, turn by turn: median (lowest, highest)."""
    found = sorted(b / a for a, b in zip(ours, theirs))
    return f"{statistics.median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})" if found else ""


def compare(engines: dict[str, Engine], name: str, layout: str, batch: int, args: argparse.Namespace, whole: bool = True) -> None:
    """Prints a row for each mode but off."""
    asked = workload(name, layout, max(4, 2 * batch), args.tokens, args.temperature)
    found = {mode: Runs() for mode in engines}
    for turn in range(args.repeats * (1 if whole else 3) + 1):
        modes = list(engines)
        for mode in modes[turn % len(modes):] + modes[:turn % len(modes)]:      # nobody is always first
            play(engines[mode], asked, batch, found[mode], whole)
            if turn == 0:                                                       # grammars are compiled, rows built, chains found
                found[mode].decode_s.clear()
                found[mode].whole_s.clear()
    off = found["off"]
    for mode, runs in found.items():
        if mode == "off":
            continue
        equal = sum(a == b for a, b in zip(off.texts, runs.texts))
        ceiling = args.cost(np.array(off.sizes)).sum() / args.cost(np.array(runs.sizes)).sum()
        print(f"| {name} | {layout} | {batch} | {mode} | {runs.tokens / len(asked):.1f} | {runs.forced / len(asked):.1f} "
              f"| {len(off.sizes) / len(runs.sizes):.2f} | {ratio(runs.decode_s, off.decode_s)} | {ceiling:.2f} | {ratio(runs.whole_s, off.whole_s)} "
              f"| {equal} of {len(asked)} |", flush=True)


# ----------------------------------------------------------------------------------------------------------------------- counts

@dataclass
class Count:
    """Of texts: their tokens, those inside of forced text, and the tokens of each step that draft takes, the end included; steps of retokenize."""
    texts: int = 0
    tokens: int = 0
    inside: int = 0
    sizes: list[int] = field(default_factory=list)
    appended: int = 0


def chain(machine: grammar.Grammar, state: int) -> list[int]:
    """What is forced behind a state, as tokens."""
    return build_chain(machine, state) or machine.tables.chain_of.get(state & grammar.INDEX, [])


def count(machine: grammar.Grammar, wanted: bytes, into: Count) -> bool:
    """Add a text to the counts. False, and nothing is, where the grammar does not take it."""
    vocab, ids = machine.vocab, spell(machine.vocab, wanted)
    state, at, inside, end = machine.start, 0, np.zeros(len(wanted) + 1, bool), machine.start
    for token in ids:
        if end is not None:
            end = machine.step(end, token)
    if end is None or not machine.is_accepting(end) or vocab.decode(ids) != wanted:
        return False
    while at < len(wanted):
        forced, behind = machine.forced(state)
        inside[at:at + len(forced)] = True
        state, at = (behind, at + len(forced)) if forced else (machine.step_bytes(state, wanted[at:at + 1]), at + 1)
    ends = np.cumsum([len(vocab.tokens[token]) for token in ids])
    into.texts, into.tokens = into.texts + 1, into.tokens + len(ids)
    into.inside += sum(bool(inside[b - len(vocab.tokens[token]):b].all()) for token, b in zip(ids, ends))
    state, at = machine.start, 0
    while at <= len(ids):
        guesses = chain(machine, state)
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guesses, ids[at:])))
        for token in ids[at:at + right + 1]:
            state = machine.step(state, token)
        at += right + 1
        into.sizes.append(1 + len(guesses))
    state, at, into.appended = machine.start, 0, into.appended + 1      # the end is sampled, too
    while at < len(wanted):                                         # the model's token, then what is forced behind
        token = vocab.tokens[spell(vocab, wanted[at:])[0]]
        forced, state = machine.forced(machine.step_bytes(state, token))
        at, into.appended = at + len(token) + len(forced), into.appended + 1
    return True


def vocab_of(engine: Engine):
    """Its tokens as bytes."""
    return make_vocab(engine.tokenizer, engine.end_ids, engine.vocab_size, engine.device == "cpu")


def count_all(engine: Engine, layouts: Sequence[str], cost) -> None:
    """Prints a row for each set of texts and layout."""
    vocab, folder = vocab_of(engine), os.environ.get("NANO_SGL_CASES")
    profile = dict(zip(("name", "age", "house", "occupation"), (NAMES[0], 17, HOUSES[0], JOBS[0])))
    own = lambda names: [(json.dumps(schema), values) for title, schema, values in SCHEMAS if names is None or title in names]  # noqa: E731
    sets = {"profile": [(json.dumps(PROFILE), [profile])], "calls": own(CALLS), "everyday": own(None)}
    for case in load_cases(folder, ["json"]) if folder else ():
        source = case["id"].split("/")[-1].split("---")[0]
        kind = "cases: calls" if source.startswith(("BFCL", "Glaive", "MCP")) else "cases: others"
        sets.setdefault(kind, []).append((case["grammar"], [json.loads(text) for text in case["accept"]]))
    for (name, cases), layout in itertools.product(sets.items(), layouts):
        total, left_out = Count(), 0
        for schema, values in cases:
            try:
                machine = grammar.compile("json_schema", schema, vocab, whitespace=layout)
                left_out += sum(not count(machine, written(value, layout).encode(), total) for value in values)
            except grammar.GrammarError:
                left_out += len(values)
        ceilings = [(total.tokens + total.texts) * cost([b])[0] / cost(np.array(total.sizes) * b).sum() for b in (1, 16)]
        each = (total.tokens + total.texts) / max(len(total.sizes), 1)
        print(f"| {name} | {layout} | {total.texts} | {left_out} | {total.tokens} | {total.inside / max(total.tokens, 1):.1%} | {len(total.sizes)} "
              f"| {each:.2f} | {total.appended} | {ceilings[0]:.2f} | {ceilings[1]:.2f} |", flush=True)


# --------------------------------------------------------------------------------------------------------------- distributions

class Reader:
    """What a model says behind texts, with an engine that has nothing else to do, and an empty cache: KV goes to slots that nobody has, in the order
    of the text. `known`: the ids whose KV is in slots 1, 2, ..."""

    def __init__(self, engine: Engine):
        self.engine, self.known = engine, []

    def _forward(self, suffixes: Sequence[Sequence[int]], before: int) -> torch.Tensor:
        """[n, E] of the last token of each; `before` tokens stand before them."""
        counts, rows, table = [len(ids) for ids in suffixes], list(range(1, len(suffixes) + 1)), self.engine.rows.table
        ends = np.cumsum(counts)
        slots, cols = before + 1 + torch.arange(int(ends[-1])), before + torch.cat([torch.arange(n) for n in counts])
        for row, n, end in zip(rows, counts, ends):
            table[row, :before], table[row, before:before + n] = torch.arange(1, before + 1), slots[end - n:end]
        work = attention.plan(rows, counts, [before + n for n in counts], **self.engine.attention.plan_options)
        context = self.engine.attention.prepare(work, table, cols)
        step = ForwardBatch(torch.tensor([token for ids in suffixes for token in ids]), cols, slots, (self.engine.attention, context))
        return self.engine.model.forward(step, self.engine.kv)[torch.from_numpy(ends - 1)]

    @torch.inference_mode()
    def logits(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """[n, V] behind each of some ids, which begin alike."""
        shared = os.path.commonprefix([ids[:-1] for ids in texts])
        same = len(os.path.commonprefix([shared, self.known]))
        if len(shared) > same:
            self._forward([shared[same:]], same)
        self.known, rest = shared, [ids[len(shared):] for ids in texts]
        return torch.cat([self.engine.model.logits(self._forward(rest[at:at + 32], len(shared))) for at in range(0, len(rest), 32)])


def next_byte(reader: Reader, machine: grammar.Grammar, ids: list[int], state: int, forced: bytes) -> np.ndarray:
    """[257] probabilities of the byte behind forced text (256: the end), where the model samples that text token by token in any way there is."""
    vocab, found, front = machine.vocab, np.zeros(257), [(ids, state, forced, 1.0)]
    while front:
        later = []
        for (ids, state, rest, weight), z in zip(front, reader.logits([one[0] for one in front])):
            allowed = np.flatnonzero(np.unpackbits(machine.mask(state).view(np.uint8), bitorder="little"))
            for token, share in zip(allowed.tolist(), (weight * torch.softmax(z[allowed], 0)).tolist()):
                word = vocab.tokens[token]
                if word is None:
                    found[256] += share
                elif len(word) > len(rest):
                    found[word[len(rest)]] += share
                elif share > LEAST:
                    later.append(([*ids, token], machine.step(state, token), rest[len(word):], share))
        front = later
    return found / found.sum()


def choices(engine: Engine, name: str, schema: dict, layout: str, prompts: Sequence[str]) -> None:
    """Prints how far the next byte's distribution moves at the choices of answers that are sampled without jump-forward."""
    machine = grammar.compile("json_schema", json.dumps(schema), vocab_of(engine), whitespace=layout)
    asked = [(prompt, SamplingParams(max_tokens=96, temperature=1.0, seed=seed, json_schema=schema, json_whitespace=layout))
             for seed, prompt in enumerate(prompts)]
    engine.flush_cache()
    answers = [one.ids for one in answer(engine, asked)[2]]
    engine.flush_cache()
    reader, moved, differ = Reader(engine), [], 0
    for prompt, ids in zip(prompts, answers):
        head, state, done = engine.tokenizer.encode(prompt), machine.start, 0     # `done`: bytes whose choice has been looked at
        for i, token in enumerate(ids):
            forced, behind = machine.forced(state)
            length = len(machine.vocab.decode(ids[:i]))
            made = retokenized(machine, state, ids[:i]) if length >= done and forced else None
            if made is not None and not machine.is_accepting(behind):
                done = length + len(forced)
                differ += made[0][:i] != ids[:i]
                ours = next_byte(reader, machine, [*head, *ids[:i]], state, forced)
                theirs = next_byte(reader, machine, [*head, *made[0]], made[1], b"")
                moved.append(float(np.abs(ours - theirs).sum() / 2))
            state = machine.step(state, token) if machine.vocab.tokens[token] is not None else state
    worst = sorted(moved)
    print(f"| {name} | {layout} | {len(answers)} | {len(moved)} | {differ} | {statistics.mean(moved):.4f} | {statistics.median(moved):.4f} "
          f"| {worst[int(0.9 * (len(worst) - 1))]:.4f} | {worst[-1]:.4f} |", flush=True)


def chi_square(ours: Sequence, theirs: Sequence) -> tuple[float, int, float]:
    """Of two samples of equal size: (chi-square, degrees of freedom, p). What is rarer than ten in both together is one kind."""
    both = collections.Counter(ours) + collections.Counter(theirs)
    kind = lambda one: one if both[one] >= 10 else None  # noqa: E731
    a, b = (collections.Counter(map(kind, some)) for some in (ours, theirs))
    found, freedom = sum((a[one] - b[one])**2 / (a[one] + b[one]) for one in a | b), max(len(a | b) - 1, 1)
    return found, freedom, float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(found / 2)))


def frequencies(engines: dict[str, Engine], samples: int, layouts: Sequence[str]) -> None:
    """Prints a row for each layout and mode: answers beside those of `off` with other seeds."""
    for layout in layouts:
        (prompt,) = moods(1, layout)
        ask = lambda seed: SamplingParams(max_tokens=64, temperature=1.0, seed=seed, json_schema=MOOD, json_whitespace=layout)  # noqa: E731, B023
        draw = lambda engine, first: [one.text for one in answer(engine, [(prompt, ask(first + i)) for i in range(samples)])[2]]  # noqa: E731, B023
        drawn, others = {mode: draw(engine, 0) for mode, engine in engines.items()}, draw(engines["off"], samples)
        for mode, found in drawn.items():
            value, freedom, p = chi_square(found, others)
            equal = sum(a == b for a, b in zip(found, drawn["off"]))
            print(f"| {layout} | {mode} | {samples} | {len(set(found))} | {value:.1f} | {freedom} | {p:.2g} | {equal} |", flush=True)


# ------------------------------------------------------------------------------------------------------------------------- main

def make(model: str, dtype: str, modes: Sequence[str]) -> dict[str, Engine]:
    """Engines with one model: where its weights lie in memory makes some 6% of a step, more than what is to be seen."""
    engines = {mode: Engine(EngineConfig(model, dtype=dtype, max_total_tokens=32_768, jump_forward=mode)) for mode in modes}
    for engine in engines.values():
        engine.model = engine.runner.model = engines[modes[0]].model
    return engines


def head(columns: str) -> None:
    """Prints the head of a table: columns, the first of them words."""
    names = columns.split(", ")
    print(f"\n| {' | '.join(names)} |\n|" + "---|" * len(names), flush=True)


def main(argv: list[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of modes and nothing")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--workloads", default="profile,character,everyday,calls", help="of modes")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--modes", default="draft,retokenize", help="beside off")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most (96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of modes and nothing")
    parser.add_argument("--samples", type=int, default=1000, help="of answers")
    parser.add_argument("--cpu-time", action="store_true", help="the process's CPU time in place of the clock, t included: on a machine that is busy "
                                                                "with other things, with OMP_NUM_THREADS=1")
    args = parser.parse_args(argv)
    parts, layouts, modes = args.only.split(","), args.layouts.split(","), ["off", *args.modes.split(",")]
    for flag, given, known in (("--only", parts, PARTS), ("--layouts", layouts, LAYOUTS), ("--modes", modes, MODES),
                               ("--workloads", args.workloads.split(","), ("profile", "character", "everyday", "calls"))):
        if not set(given) <= set(known):
            parser.error(f"{flag} takes some of {', '.join(known)}; got {', '.join(given)}")
    if min(args.repeats, args.tokens, args.samples, *map(int, args.batches.split(","))) < 1:
        parser.error("--repeats, --tokens, --samples and --batches are at least 1")
    if args.cpu_time:
        time.perf_counter = time.process_time       # also the engine's, which measures t
    engines = make(args.model, args.dtype, modes)
    args.cost = engines["off"]._cost_curve()
    shown = ", ".join(f"{int(size)}: {seconds / args.cost.seconds[0]:.2f}" for size, seconds in zip(args.cost.sizes, args.cost.seconds))
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.model}, {args.dtype}, temperature {args.temperature:g}"
          f"{', CPU time' * args.cpu_time}; t(1) {1000 * args.cost.seconds[0]:.1f} ms; t(tokens) / t(1): {shown}")
    columns = "grammar, layout, batch, mode, tokens, forced, steps, decode, ceiling, end to end, equal"
    if "modes" in parts:
        head(columns)
        for name, layout, batch in itertools.product(args.workloads.split(","), layouts, map(int, args.batches.split(","))):
            compare(engines, name, layout, batch, args)
    if "nothing" in parts:
        head(columns)
        for name, batch in itertools.product(NOTHING, map(int, args.batches.split(","))):
            compare({mode: engines[mode] for mode in modes if mode != "retokenize"}, name, "", batch, args, whole=False)
    if "counts" in parts:
        head("texts, layout, texts, left out, tokens, forced, steps of draft, tokens a step, steps of retokenize, at 1, at 16")
        count_all(engines["off"], layouts, args.cost)
    if "choices" in parts or "answers" in parts:
        engines = make(args.model, "float32", modes)
    if "choices" in parts:
        head("grammar, layout, answers, choices, other ids before, mean TV, median, 90%, highest")
        for (name, schema, prompts), layout in itertools.product((("profile", PROFILE, profiles), ("mood", MOOD, moods)), layouts):
            choices(engines["off"], name, schema, layout, prompts(PROMPTS, layout))
    if "answers" in parts:
        head("layout, mode, answers, kinds, chi-square, degrees, p, off's")
        frequencies(engines, args.samples, layouts)


if __name__ == "__main__":
    main()
