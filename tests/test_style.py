"""The house rules that a machine can hold: who imports whom, essays, docstrings, seams, and which modules need no torch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nano_sgl"
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py"))
LEVELS = {  # imports point down: a module may import those of lower levels that are named for it
    "protocol": set(), "eviction": set(), "waiting": set(), "radix": {"eviction", "waiting"}, "weights": set(), "native": set(), "kernels": {"native"},
    "tuned": {"kernels"}, "attention": {"native", "kernels", "tuned"}, "text": {"protocol"}, "memory": {"kernels"}, "sampling": {"native", "kernels", "protocol"}, "chat": {"protocol"},
    "model": {"kernels", "native", "memory", "weights"}, "policies": set(), "layout": set(),
    "holds": {"radix"}, "req": {"holds", "protocol", "radix", "waiting"},
    "steady": {"memory", "protocol", "req"}, "scheduler": {"steady", "holds", "req", "radix", "waiting", "policies", "layout", "memory", "protocol"}, "spec": {"native", "radix", "sampling"},
    "config": {"protocol", "radix", "eviction", "policies", "reasoning", "tools"}, "events": {"radix"},
    "constraint": {"compiler", "grammar", "masks", "native", "protocol", "rules", "sampling", "spec", "tables", "vocab"},
    "worker": set(), "graphs": set(), "runner": {"attention", "constraint", "graphs", "jump", "masks", "memory", "model", "protocol", "results", "sampling", "spec"}, "results": {"constraint", "memory", "protocol", "req", "sampling", "spec"}, "engine": {"graphs", "runner", "results", "rules", "config", "constraint", "events", "grammar", "jump", "masks", "worker", "protocol", "radix", "eviction", "weights", "kernels", "attention", "memory", "sampling", "model", "policies", "req", "scheduler", "spec", "text"},
    "rules": set(), "regex": {"rules"}, "json_text": {"rules", "regex"}, "json_document": {"rules", "json_text"},
    "json_schema": {"rules", "schema", "json_text", "json_document", "json_members"}, "json_members": {"rules", "schema", "json_text"}, "schema": {"rules", "regex", "free_text"}, "free_text": {"rules"}, "structural_tag": {"rules", "schema", "json_schema", "free_text"}, "vocab": {"rules"}, "nodes": {"rules"}, "normal_form": {"nodes", "rules"},
    "automaton": {"nodes", "normal_form", "rules", "vocab"}, "tables": {"automaton", "rules", "vocab"}, "readings": {"automaton", "nodes", "rules", "tables", "vocab"}, "waves": {"automaton", "nodes", "readings", "rules", "tables", "vocab"}, "rows": {"automaton", "tables", "vocab", "waves"}, "figures": {"rules", "vocab"}, "grammar": {"automaton", "figures", "readings", "rows", "waves", "tables", "json_schema", "nodes", "normal_form", "rules", "schema", "structural_tag", "vocab"}, "masks": {"native", "kernels"},
    "jump": {"grammar", "rules", "vocab"}, "compiler": {"grammar", "jump", "rules", "vocab"},
    "scoring": {"protocol"}, "llm": {"engine", "config", "protocol", "chat", "radix", "scoring"},
    "reasoning": set(), "tools": {"protocol", "reasoning"}, "bodies": {"protocol"}, "api": {"bodies", "protocol", "chat", "reasoning", "scoring", "tools"}, "process": {"protocol"}, "server": set(MODULES) - {"__init__", "__main__", "server"},
    "ir": set(), "choices": set(), "api_speculation": {"ir"}, "interpreter": {"ir", "choices", "api_speculation"}, "endpoints": {"ir", "choices"},
    "lang": {"ir", "choices", "api_speculation", "interpreter", "endpoints"},
    "__init__": set(), "__main__": {"config", "protocol", "radix"},
}
TORCH_FREE = ["ir", "choices", "api_speculation", "interpreter", "endpoints", "lang",
              "protocol", "eviction", "waiting", "policies", "layout", "radix", "holds", "req", "events", "text", "chat", "scoring", "bodies", "config", "api", "process", "server", "compiler", "json_text", "json_document", "json_members", "json_schema", "free_text", "structural_tag", "reasoning", "tools",
              "__main__"]
MAX_LINE, MAX_FILE, MAX_FUNCTION = 150, 850, 80


@functools.cache
def tree(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def own_imports(module):
    """Modules of the package that a module imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nano_sgl":
            found.add(node.module.removeprefix("nano_sgl").strip(".") or "__init__")
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("nano_sgl.")}
    return {name.split(".")[0] for name in found}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_and_stand_at_the_top(module):
    assert module in LEVELS, "a new module needs its line in the table"
    assert own_imports(module) <= LEVELS[module]
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level]
            assert not inner, f"{module}.{node.name} imports our own module inside a function: a cycle in hiding"
        assert not (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"), "imports for type checkers only hide cycles"


def test_the_table_has_no_cycle():
    done = set()
    while rest := {m for m in LEVELS if m not in done}:
        ready = {m for m in rest if LEVELS[m] <= done | {m}}
        assert ready, f"a cycle among {rest}"
        done |= ready


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_a_module_opens_with_an_essay_and_ends_with_a_demo(module):
    source = (PACKAGE / f"{module}.py").read_text()
    essay = ast.get_docstring(tree(module)) or ""
    assert len(essay.splitlines()) >= 12, "an essay says the problem, the picture, the invariant, the cost"
    assert '__name__ == "__main__"' in source


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings_and_nothing_is_too_long(module):
    source = (PACKAGE / f"{module}.py").read_text()
    assert len(source.splitlines()) <= MAX_FILE, "a file this long is two mechanisms"
    assert not [n for n, line in enumerate(source.splitlines(), 1) if len(line) > MAX_LINE]
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno <= MAX_FUNCTION, f"{node.name} does not fit a screen"
    for node in tree(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name} says nothing of itself"


def test_torch_free_modules_import_with_torch_blocked():
    """In one process: each of them fails here by name."""
    code = f"""
import importlib, sys
sys.modules["torch"] = sys.modules["transformers"] = None
for module in {TORCH_FREE}:
    try:
        importlib.import_module("nano_sgl." + module)
    except ImportError as error:
        sys.exit(module + ": " + str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_costs_no_torch():
    code = "import sys, nano_sgl; assert 'torch' not in sys.modules; from nano_sgl import SamplingParams; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_every_name_the_package_promises_exists():
    import nano_sgl
    assert all(getattr(nano_sgl, name) for name in nano_sgl.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        nano_sgl.nothing


def test_no_test_is_skipped_and_no_mark_of_unfinished_work_is_left():
    marks = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "pytest." + "skip", "mark." + "skip", "x" + "fail", "import" + "orskip", "pragma: " + "no cover"]
    for file in [*PACKAGE.glob("*"), *Path(__file__).parent.glob("*.py"), *PACKAGE.parent.glob("bench/*.py")]:
        if file.is_file():
            text = file.read_text()
            assert not [m for m in marks if m in text], file
