"""Prints the README's table of pairs out of what the tests of this directory really ran:  python tests/compose/table.py

It runs them itself (a minute or two), in one process, and reads what they wrote down; with the path of such a file it only prints it. The
block goes into README.md between <!-- pairs --> and <!-- /pairs -->; test_table.py compares the two.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]

from features import FEATURES, cell_name, same_flag  # noqa: E402

MARKS = {"equal": "=", "refused": "x", "same flag": "-", None: "?"}
LEGEND = """`=` ran together and gave the answers of the plain engine (no cache, no overlap, a batch of one, whole prompts): tokens, texts, finish
reasons, logprobs; `x` refused at start; `-` two values of one flag. All pairs run with the radix cache; on the diagonal a feature alone, without it
(but for what is about the cache). The last column says how often a feature was seen at work in its pairs."""
SUMMARY = """{cells} runs: {said} (a fork: the texts part at two tokens whose perturbed logits in the plain engine differ by less than 1e-3, in
bfloat16 0.1). {mutants} wrong engines were found out by the same comparison; among them, for every pair, one with a shared slot zeroed and one with a
row that was not pointed to the slots it had adopted."""


def run_tests(path: Path) -> int:
    env = os.environ | {"NANO_SGL_PAIRS": str(path), "OMP_NUM_THREADS": "1"}
    files = [str(HERE / name) for name in ("test_pairs.py", "test_mutations.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *files]
    return subprocess.run(command, env=env, cwd=HERE.parent.parent, stdout=sys.stderr).returncode


def table(found: dict) -> str:
    """The block of the README. found: what conftest.py wrote."""
    cells = found["cells"]

    def mark(a, b):
        cell = (a,) if a is b else (b, a)
        return MARKS["same flag" if same_flag(a, b) else cells.get(cell_name(cell), {}).get("mark")]

    def happened(feature):
        return sum(c["happened"].get(feature.name, 0) for name, c in cells.items() if "-" in name)
    codes = [f.code for f in FEATURES]
    lines = ["| | " + " | ".join(codes) + " | at work |", "|---|" + ":-:|" * len(codes) + "---|"]
    for i, f in enumerate(FEATURES):
        row = [mark(f, other) for other in FEATURES[:i + 1]] + [""] * (len(codes) - i - 1)
        lines.append(f"| {f.name} `{f.code}` | " + " | ".join(row) + f" | {happened(f):,} {f.counted} |")
    said = [f"{forks} forks in {tokens:,} tokens in {dtype}" for dtype, (tokens, forks) in found["totals"].items()]
    return "\n".join([*lines, "", LEGEND, "", SUMMARY.format(cells=len(cells), said=", ".join(said), mutants=found["mutants"])])


def main() -> int:
    if len(sys.argv) > 1:
        print(table(json.loads(Path(sys.argv[1]).read_text())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        code = run_tests(path)
        print(table(json.loads(path.read_text())))
    return code


if __name__ == "__main__":
    sys.exit(main())
