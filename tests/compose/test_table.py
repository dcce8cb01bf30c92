"""The README shows the table of pairs as it is: the same features in the same order, every pair of them, proved by the same counts."""

import re
from pathlib import Path

import table
from features import CELLS, FEATURES, cell_name

README = Path(__file__).parent.parent.parent / "README.md"


def test_the_readme_shows_every_pair():
    block = re.search(r"<!-- pairs -->\n(.*?)<!-- /pairs -->", README.read_text(), re.DOTALL)
    assert block, "README.md has no table of pairs: put what tests/compose/table.py prints between <!-- pairs --> and <!-- /pairs -->"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1].splitlines() if line.startswith("|")]
    head, _, *rows = lines
    assert head[1:-1] == [f.code for f in FEATURES]
    assert [row[0] for row in rows] == [f"{f.name} `{f.code}`" for f in FEATURES]
    assert [row[-1].split(" ", 1)[1] for row in rows] == [f.counted for f in FEATURES]
    assert all(int(row[-1].split()[0].replace(",", "")) > 0 for row in rows), "a feature that was never seen at work"
    marks = [row[1:-1][:i + 1] for i, row in enumerate(rows)]
    assert sum(mark in "=x" for row in marks for mark in row) == len(CELLS) and not any("?" in row for row in marks)


def test_the_table_is_made_of_what_ran():
    """A cell without a result is a question mark, one that was refused a cross."""
    cells = {cell_name(cell): dict(mark="equal", happened={f.name: 2 for f in cell}) for cell in CELLS}
    cells.pop("rc-ch")
    cells["rc-ov"]["mark"] = "refused"
    lines = table.table(dict(cells=cells, totals={"float32": (1000, 0)}, mutants=7)).splitlines()
    assert lines[5].startswith("| chunked prefill `ch` | ? | = | = | = |") and lines[6].startswith("| overlap `ov` | x | = |")
    assert lines[4].startswith("| page 16 `p16` | = | - | = |") and "1,000 tokens" in lines[-3] and "7 wrong engines" in lines[-2]
