"""Masking logits by grammar states, beside XGrammar's kernel for the CPU.

A batch of rows of random logits (fp32, as the model's head leaves them), each row in the state of some grammar:

    string       in a free string of up to 400 characters: nearly every token may come next
    structure    after `{"name"`: a handful may
    letters      among up to 60 of [a-z]: a quarter of 49,152 tokens, an eighth of 129,280
    mixed        of all three

mask      what `DeviceTables.mask` takes from states to masked logits, and its ratio to `apply_token_bitmask_inplace` of a bitmask that says the
          same and is already there. Wall time of one process and all its threads, median of `--times` calls that take turns; fresh logits before each
advance   the states after one token a row (C++), and the same by torch's operations
refresh   with nothing new, and with all that these grammars made

`--peers` is a python that has xgrammar (pip install xgrammar); everything is measured there. `--tokenizer` as in bench/grammar.py.

    python bench/mask.py --peers peers/bin/python
"""

import argparse
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACES = {  # a grammar and a text that leads to the state
    "string": (r'\{"name": "[^"\\\n]{0,400}", "age": (0|[1-9]\d*)\}', b'{"name": "Some na'),
    "structure": (r'\{"name": "[^"\\\n]{0,400}", "age": (0|[1-9]\d*)\}', b'{"name"'),
    "letters": (r"[a-z]{1,60}!", b"some"),
}


def take_turns(times: int, calls: dict, before) -> dict[str, float]:
    """The median of so many calls of each, in microseconds. `before()` comes before each and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times + 3):
        for name, call in calls.items():
            before()
            began = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values[3:]) for name, values in found.items()}


def measure(vocab, rows: int, times: int, threads: int | None) -> None:
    """Prints the table."""
    import numpy as np
    import torch

    from nano_sgl import grammar, masks
    try:
        import xgrammar
    except ImportError:
        xgrammar = None
    if threads:
        torch.set_num_threads(threads)
    states, bits = {}, {}
    for name, (pattern, text) in PLACES.items():
        machine = grammar.compile("regex", pattern, vocab)
        states[name] = machine.step_bytes(machine.start, text)
        bits[name] = machine.mask(states[name])
    device, twin = (masks.DeviceTables(vocab.shared.tables, "cpu", backend) for backend in (None, "torch"))
    fresh = torch.randn(rows, vocab.size)
    logits, names = fresh.clone(), list(PLACES)
    print(f"{vocab.size} tokens, {rows} rows, {torch.get_num_threads()} threads; microseconds, median of {times}")
    print(f"{'mask':10s} {'allowed':>8s} {'ours':>8s} {'xgrammar':>9s} {'ratio':>6s}")
    for kind in (*names, "mixed"):
        which = names if kind == "mixed" else [kind]
        batch = torch.tensor([states[which[i % len(which)]] for i in range(rows)])
        bitmask = torch.from_numpy(np.stack([bits[which[i % len(which)]] for i in range(rows)]))
        allowed = np.unpackbits(bitmask.numpy().view(np.uint8)).sum() / rows
        calls = {"ours": lambda: device.mask(logits, None, batch)}
        if xgrammar:
            calls["xgrammar"] = lambda: xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=vocab.size)
            results = []
            for call in calls.values():
                logits.copy_(fresh)
                call()
                results.append(logits.clone())
            assert torch.equal(*results), "they do not mask the same"
        here = take_turns(times, calls, lambda: logits.copy_(fresh))
        peer = here.get("xgrammar", float("nan"))
        print(f"{kind:10s} {allowed:8.0f} {here['ours']:8.1f} {peer:9.1f} {peer / here['ours']:6.2f}")
    batch, tokens = torch.tensor([states[names[i % len(names)]] for i in range(rows)]), torch.randint(vocab.size, (rows,))
    here = take_turns(times, {"C++": lambda: device.advance(batch, tokens), "torch": lambda: twin.advance(batch, tokens),
                              "refresh": device.refresh}, lambda: None)
    anew = take_turns(5, {"all": lambda: masks.DeviceTables(vocab.shared.tables, "cpu")}, lambda: None)
    print(f"advance: C++ {here['C++']:.1f}, torch {here['torch']:.1f}; refresh: nothing new {here['refresh']:.2f}, "
          f"{len(vocab.shared.tables.maps)} maps and {len(vocab.shared.tables.built)} rows {anew['all']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--peers", help="a python that has torch and xgrammar")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--threads", type=int, help="of both (XGrammar takes one)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    from nano_sgl.vocab import Vocab
    if args.inside:
        return measure(Vocab(*pickle.load(sys.stdin.buffer)), args.rows, args.times, args.threads)
    from grammar import load_tokenizer
    tokenizer, ends = load_tokenizer(args.tokenizer)
    vocab = Vocab.from_tokenizer(tokenizer, ends)
    if not args.peers:
        return measure(vocab, args.rows, args.times, args.threads)
    with tempfile.TemporaryFile() as pipe:
        pickle.dump((vocab.tokens, vocab.end_ids), pipe)
        pipe.seek(0)
        subprocess.run([args.peers, __file__, "--inside", "--rows", str(args.rows), "--times", str(args.times),
                        *(["--threads", str(args.threads)] if args.threads else [])], stdin=pipe, check=True)


if __name__ == "__main__":
    main()
