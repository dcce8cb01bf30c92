"""Building kernels.cpp: once, whole, by many at a time, and doing without."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import engines
import pytest
import torch
from kernel_sets import SETS

from nano_sgl import kernels, native

ROOT = Path(__file__).parent.parent
LOAD = ("import logging, os, pathlib; logging.basicConfig(); from nano_sgl import native; "
        "native.SOURCE = pathlib.Path(os.environ['SOURCE']); print(native.library() is not None)")
HAS_COMPILER = len(SETS) > 1
SLOWLY = """#!/bin/sh
case "$*" in *-c*) echo >> "$0.runs"; for _ in 1 2 3 4 5 6 7 8 9 10; do [ $(wc -l < "$0.runs") = 2 ] && break; sleep 1; done;; esac
exec c++ "$@"
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """As many functions as kernels.cpp has, and nothing in them: what is proved here is the building, and kernels.cpp takes half a minute."""
    file = tmp_path_factory.mktemp("source") / "kernels.cpp"
    file.write_text("".join(f'extern "C" long {name}() {{ return 0; }}\n' for name in native.FUNCTIONS))
    return file


@pytest.fixture
def start(source):
    def start(cache: Path, code: str = LOAD, **env: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=os.environ | {"NANO_SGL_CACHE": str(cache), "PYTHONPATH": str(ROOT), "SOURCE": str(source)} | env)
    return start


def test_processes_that_build_at_once_and_one_that_finds_it_built(start, tmp_path):
    slowly = tmp_path / "compiler"  # each waits for the other: so they do build at once
    slowly.write_text(SLOWLY)
    slowly.chmod(0o755)
    given = {"CXX": str(slowly)} if HAS_COMPILER else {}
    both = [start(tmp_path, **given) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [str(HAS_COMPILER)] * 2
    made = list((tmp_path / "kernels").iterdir())
    assert len(made) == HAS_COMPILER  # and nothing half-made beside it
    if HAS_COMPILER:
        before = made[0].stat().st_mtime_ns
        out, _ = start(tmp_path, **given).communicate(timeout=120)
        assert out.strip() == "True" and made[0].stat().st_mtime_ns == before
        assert (tmp_path / "compiler.runs").read_text().count("\n") == 2


NONE = [(dict(CXX="no-such-compiler"), "No such file or directory: 'no-such-compiler'"), (dict(CXX="false"), "not used"),
        (dict(CXX="g++ '"), "CXX is \"g++ '\""), (dict(PATH="/nowhere"), "no C++ compiler was found")]
IN_TURN = LOAD.rpartition(";")[0] + """
import sys, torch
from nano_sgl import kernels
for env in {}:
    os.environ.update(env)
    native._library.cache_clear()
    print(native.library() is not None, native.library() is not None, kernels.silu_mul(torch.ones(1, 4)).shape)
    print("next", file=sys.stderr)
"""


def test_without_a_compiler_one_line_says_so(start, tmp_path):
    envs = [dict(CXX="", PATH=os.environ["PATH"]) | env for env, _ in NONE]
    out, err = start(tmp_path, IN_TURN.format(envs)).communicate(timeout=120)
    assert out.splitlines() == ["False False torch.Size([1, 2])"] * len(NONE), err
    for (_, words), said in zip(NONE, err.split("next\n"), strict=False):
        assert said.count("the C++ kernels are not used") == 1 and words in said


def test_a_cache_that_cannot_be_written_is_done_without(start, tmp_path):  # and a compiler may be several words
    (tmp_path / "kernels").write_text("a file where the folder should be")
    (tmp_path / "temporary").mkdir()
    out, err = start(tmp_path, TMPDIR=str(tmp_path / "temporary"), CXX="env c++" if HAS_COMPILER else "").communicate(timeout=120)
    assert out.strip() == str(HAS_COMPILER), err
    assert not list((tmp_path / "temporary").iterdir())  # nor does the process leave anything behind


def test_a_damaged_library_is_built_anew(start, tmp_path):
    start(tmp_path / "whole").communicate(timeout=120)
    made = list((tmp_path / "whole" / "kernels").iterdir())
    damages = (lambda data: data[:len(data) // 2], lambda data: b"", lambda data: data[:-40] + b"?" + data[-39:])
    caches = [tmp_path / str(n) / "kernels" for n in range(len(damages))]
    for cache, damage in zip(caches, damages):
        cache.mkdir(parents=True)
        for file in made:
            (cache / file.name).write_bytes(damage(file.read_bytes()))
    out, err = start(tmp_path, IN_TURN.format([dict(NANO_SGL_CACHE=str(cache.parent)) for cache in caches])).communicate(timeout=120)
    assert out.splitlines() == [f"{HAS_COMPILER} {HAS_COMPILER} torch.Size([1, 2])"] * len(damages), err
    for cache in caches:
        assert [file.read_bytes() for file in cache.iterdir()] == [file.read_bytes() for file in made] and not err.count("not used") * HAS_COMPILER


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return engines.tiny_path(tmp_path_factory.mktemp("tiny"))


def test_the_library_is_there_when_an_engine_is_made_and_not_first_at_a_request(tiny, monkeypatch):
    asked, library = [], native.library
    monkeypatch.setattr(native, "library", lambda: asked.append(True) or library())
    engines.make(tiny, attention_backend="torch")
    assert asked


@pytest.fixture(scope="module")
def texts(tiny) -> dict[str, engines.Answer]:
    """What a plain engine writes to the requests with torch's operations."""
    before = native.choice
    native.use("off")
    try:
        reference = engines.Reference(tiny)
        return {request.rid: reference(request) for request in engines.workload(3)}
    finally:
        native.use(before)


def test_every_kernel_set_writes_the_same_texts(kernel_set, tiny, texts):
    """Greedy and sampled, with filters, penalties and logprobs; rows in company, prompts in chunks."""
    answers = engines.run(engines.make(tiny, chunked_prefill_size=48), engines.workload(3))
    for rid, answer in answers.items():
        engines.same(answer, texts[rid])


def test_threads_of_one_process_do_not_disturb_each_other(kernel_set):
    """Each of four has its own scratch, also while OpenMP's threads work for all of them."""
    torch.manual_seed(0)
    weight = torch.randn(2000, 256).bfloat16()
    inputs = torch.randn(4, 20, 256).bfloat16()
    work = lambda x: kernels.silu_mul(kernels.linear(kernels.rms_norm(x, weight[0], 1e-5), weight))
    torch.set_num_threads(2)
    try:
        wanted, failed = [work(x) for x in inputs], []

        def loop(x, want):
            torch.set_num_threads(2)
            failed.extend(n for n in range(50) if not torch.equal(work(x), want))

        threads = [threading.Thread(target=loop, args=pair) for pair in zip(inputs, wanted)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert not failed


def test_what_the_library_does_not_take_goes_to_torch():
    x = torch.randn(3, 8, dtype=torch.float64)
    assert kernels.route(x) == "torch" and kernels.silu_mul(x).dtype == torch.float64
    turned = torch.randn(8, 3).T  # its rows are not contiguous
    assert kernels.route(turned) == "torch"
    torch.testing.assert_close(kernels.silu_mul(turned), kernels.silu_mul(turned.contiguous()))
    for refused in (x, turned) if HAS_COMPILER else ():
        with pytest.raises(ValueError, match="backend='cpp' takes no torch.float"):
            kernels.silu_mul(refused, backend="cpp")
