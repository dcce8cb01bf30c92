"""What a grammar costs a model's answers: throughput with and without, on one engine, in turn.

    python bench/constrained.py [--model demo] [--dtype bfloat16] [--batch 16] [--tokens 128] [--repeats 5] [--jump-forward off]

One engine answers `--batch` prompts at a time, `--tokens` tokens each, sampled; the prompts are cached, so that what is timed is decoding. Rows:

anything     the regex (.|\\n)*, which allows whatever the free answer says: the texts are the same (it is checked), and so is the work but for the
             grammar
letters      a regex of words and punctuation, counted
schema       a JSON schema whose long free strings no text gets to the end of: as many tokens as the free answers
records      a JSON schema of short strings, numbers and choices, a list that is longer than the tokens reach: mostly structure
new records  the same with other names in each turn, so that it is compiled and its rows are built in that time
json         any JSON object, until the tokens are used up or it is complete: a batch that shrinks makes fewer tokens a second
one grammar  a new regex that all requests of a batch share, so that it is compiled and its rows are built once
own grammars the same regex in as many spellings as there are requests, each compiled for itself: what a cache of compiled grammars saves

`speed`: tokens a second, divided by those of the free answers in the same turn; median of the repeats (lowest, highest). `steps`: of the engine, in
the last turn; fewer where forced text was drafted. `misses`: steps that a request lost because a row was not there. `bytes`: sent to the device per
constrained token, tables and all; a mask of bits would be the vocabulary's size / 8 for each. The last line is own grammars beside one grammar.
"""

import argparse
import random
import statistics
import time

from nano_sgl import LLM, SamplingParams

WORDS = "river stone cloud paper engine garden winter copper signal bridge lantern orchard".split()
FIELDS = ("name", "house", "blood", "occupation", "wand", "alive")
EQUAL = ("free", "anything", "letters", "schema", "records", "new records")     # of which no text ends before its tokens are used up


def prompts(count: int) -> list[str]:
    """Beginnings of a text, no two alike."""
    rng = random.Random(0)
    return [f"A story about a {' and a '.join(rng.sample(WORDS, 3))}, number {i}:" for i in range(count)]


def record(turn: int, spelling: int = 0) -> str:
    """A regex for a small record in JSON, another one for each turn; `spelling` changes how it is written, not what it matches."""
    parts = [f'"{name}_{turn}": ("[\\w ]{{1,24}}"|\\d{{1,3}}|true|false)' for name in FIELDS]
    return "(?:)" * spelling + r"\{" + ", ".join(parts) + r"\}"


def records(turn: int) -> dict:
    """A schema for a list of records, another one for each turn."""
    kinds = [{"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0, "maximum": 999}, {"enum": ["high", "low", None]},
             {"type": "boolean"}, {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}, {"type": "string", "format": "date"}]
    properties = {f"{name}_{turn}": kind for name, kind in zip(FIELDS, kinds)}
    item = {"type": "object", "properties": properties, "required": list(properties)[:4], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 32}


def asked(name: str, turn: int, batch: int) -> list[dict]:
    """The grammar of each request of a batch."""
    match name:
        case "free":
            return [{}] * batch
        case "anything":
            return [dict(regex=r"(.|\n)*")] * batch
        case "letters":
            return [dict(regex=r"([\w'-]{1,20}[ ,.;:!?\n]{1,2}){0,400}")] * batch
        case "schema":
            text = {"type": "string", "minLength": 10_000}
            return [dict(json_schema={"type": "object", "properties": {"title": {"type": "string", "maxLength": 80}, "text": text},
                                      "required": ["title", "text"]})] * batch
        case "records":
            return [dict(json_schema=records(0))] * batch
        case "new records":
            return [dict(json_schema=records(turn + 1))] * batch
        case "json":
            return [dict(json_object=True)] * batch
        case "one grammar":
            return [dict(regex=record(2 * turn))] * batch
        case "own grammars":
            return [dict(regex=record(2 * turn + 1, spelling)) for spelling in range(batch)]
    raise ValueError(name)


def play(llm: LLM, name: str, turn: int, batch: int, tokens: int) -> tuple[float, list[list[int]], dict]:
    """(seconds, the answers' ids, what the grammars' counts grew by) of one batch."""
    texts = prompts(batch)
    llm.generate(texts, SamplingParams(max_tokens=1), progress=False)
    before = llm.engine.stats()
    least = tokens if name in EQUAL else 0
    params = [SamplingParams(max_tokens=tokens, min_tokens=least, temperature=0.8, seed=i, **given)
              for i, given in enumerate(asked(name, turn, batch))]
    start = time.perf_counter()
    answers = llm.generate(texts, params, progress=False)
    seconds = time.perf_counter() - start
    now = llm.engine.stats()
    assert not any(answer.error for answer in answers), next(answer.error for answer in answers if answer.error)
    assert name not in EQUAL or all(len(answer.output_ids) == tokens for answer in answers), f"{name}: a text ended early"
    counts = {key: value - before.get(key, 0) for key, value in now.items() if key.startswith("grammar_") or key == "steps"}
    return seconds, [answer.output_ids for answer in answers], counts


def main(argv: list[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jump-forward", default="draft", help="of the engine: what becomes of text that a grammar forces")
    parser.add_argument("--grammars", help="some of the rows, by their names; all by default")
    args = parser.parse_args(argv)
    if min(args.batch, args.tokens, args.repeats) < 1:
        parser.error("--batch, --tokens and --repeats are at least 1")
    names = [*EQUAL, "json", "one grammar", "own grammars"]
    if args.grammars:
        if unknown := set(args.grammars.split(",")) - set(names):
            parser.error(f"--grammars: there are {', '.join(names[1:])}; got {', '.join(sorted(unknown))}")
        names = [name for name in names if name == "free" or name in args.grammars.split(",")]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, dict] = {}
    same: list[bool] = []
    with LLM(args.model, dtype=args.dtype, jump_forward=args.jump_forward) as llm:
        vocab = llm.engine.vocab_size
        for turn in range(args.repeats + 1):  # the first warms up
            order = names[turn % len(names):] + names[:turn % len(names)]  # nobody is always first
            found = {name: play(llm, name, turn, args.batch, args.tokens) for name in order}
            same += [a == b for a, b in zip(found["free"][1], found["anything"][1])] if "anything" in found else []
            for name, (seconds, answers, counts) in found.items():
                if turn:
                    speeds[name].append(sum(map(len, answers)) / seconds)
                    last[name] = counts
    print(f"batch {args.batch}, {args.tokens} tokens, {args.repeats} repeats, {args.model} in {args.dtype}, forced text: {args.jump_forward}; "
          f"a mask of bits is {-(-vocab // 32) * 4} bytes\n")
    print(f"| grammar | speed | steps | misses | bytes |\n|---|---|---|---|---|\n| free | 1 | {last['free']['steps']} | | |")
    for name in names[1:]:
        ratios = [a / b for a, b in zip(speeds[name], speeds["free"])]
        counts = last[name]
        print(f"| {name} | {statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) "
              f"| {counts['steps']} | {counts['grammar_misses']} | {counts['grammar_bytes'] / max(counts['grammar_tokens'], 1):.0f} |")
    if same:
        print(f"\nanything: {sum(same)} of {len(same)} texts are the free ones (a byte that is no character of UTF-8 parts them)")
    if {"one grammar", "own grammars"} <= set(names):
        ratios = [a / b for a, b in zip(speeds["one grammar"], speeds["own grammars"])]
        print(f"one grammar beside own grammars: {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")


if __name__ == "__main__":
    main()
