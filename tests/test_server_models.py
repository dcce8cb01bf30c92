"""The server with models that are wrong, and with a tiny one that makes NaNs of some prompts."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_gguf import bpe_metadata, write

import nano_sgl
from nano_sgl.config import EngineConfig

HERE = Path(__file__).parent
POISON = 77         # a token whose embedding is not a number


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny.add_tokenizer(tiny.checkpoint(tmp_path_factory.mktemp("models") / "good"))


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def unknown_architecture(path: Path) -> None:
    tiny.edit(path, architectures=["MambaForCausalLM"])


def cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_inside_the_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:50])


def with_more_behind_it(path: Path) -> None:
    with open(path / "model.safetensors", "ab") as file:
        file.write(bytes(7))


def a_header_longer_than_the_file(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + data[8:])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")


def without_a_config(path: Path) -> None:
    (path / "config.json").unlink()


def a_config_of_nonsense(path: Path) -> None:
    (path / "config.json").write_text("{nonsense")


def without_a_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def unchanged(path: Path) -> None:
    pass


WRONG = [
    (without_weights, {}, "has no safetensors files"), (unknown_architecture, {}, "MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"),
    (cut_short, {}, "is cut short: tensor .* should end at byte"), (cut_inside_the_header, {}, "not a whole safetensors file"),
    (with_more_behind_it, {}, "7 bytes behind its last tensor"), (a_header_longer_than_the_file, {}, "not a whole safetensors file"),
    (without_a_tensor, {}, "model.norm.weight"), (without_a_config, {}, "has no config.json"), (a_config_of_nonsense, {}, "cannot be read as JSON"),
    (without_a_tokenizer, {}, "has no tokenizer"), (unchanged, {"context_length": 513}, "context_length is 513, but the model was made for 512"),
]


@pytest.mark.parametrize("spoil, flags, words", WRONG)
def test_a_model_that_is_wrong_is_one_sentence(spoil, flags, words, good, tmp_path):
    path = shutil.copytree(good, tmp_path / "m")
    spoil(path)
    with pytest.raises(Exception, match=words) as caught:
        nano_sgl.Engine(EngineConfig(model=str(path), max_total_tokens=1024, **flags))
    assert type(caught.value).__module__.startswith("nano_sgl") or isinstance(caught.value, ValueError), "expected: shown without a traceback"
    assert "\n" not in str(caught.value)


def serve(path: Path, *flags: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "nano_sgl.server", "--model", str(path), "--port", "0", "--max-total-tokens", "2048", *flags],
                            stderr=subprocess.PIPE, text=True, cwd=HERE.parent, **options)


def test_a_server_whose_model_is_wrong_says_so_and_ends(good, tmp_path):
    path = shutil.copytree(good, tmp_path / "m")
    without_weights(path)
    with serve(path) as process:
        log = process.stderr.read()
        assert process.wait(60) == 1
    assert re.search(r"cannot start: \S+ has no safetensors files; safetensors are needed", log), log
    assert "Traceback" not in log and "restart" not in log, log


def test_nans_of_one_request_end_that_request_alone(good, tmp_path):
    """NaN logits: an error for who asked, streamed or plain; the others' texts are what they were, also in the same batch."""
    path = shutil.copytree(good, tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.isnan(load_file(path / "model.safetensors")["model.embed_tokens.weight"]).any()
    with serve(path, "--dtype", "float32") as process:
        log = ""
        while "curl" not in log:
            line = process.stderr.readline()
            assert line, log
            log += line
        try:
            with httpx.Client(base_url=re.search(r"http://\S+?:\d+", log)[0], timeout=60) as client:
                check_nans(client)
        finally:
            process.terminate()
            log += process.stderr.read()
            assert process.wait(30) == 0
    assert "Traceback" not in log, log


def check_nans(client: httpx.Client) -> None:
    def ask(ids: list[int], **more) -> httpx.Response:
        return client.post("/v1/completions", json={"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more})
    before = ask([1, 2, 3]).json()["choices"][0]["text"]
    for stream in (False, True):
        answer = ask([1, POISON, 3], stream=stream)
        error = answer.json()["error"] if not stream else json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
        assert "not finite numbers" in error["message"] and error["code"] == 500
    answer = ask([[1, 2, 3], [4, 5], [POISON]])
    assert answer.status_code == 500, "a call is answered whole"
    assert ask([1, 2, 3]).json()["choices"][0]["text"] == before
    assert client.get("/health_generate").status_code == 200
    stats = client.get("/get_server_info").json()["stats"]
    assert stats["running"] == stats["waiting"] == 0 and stats["kv_free"] + stats["kv_cached"] == stats["kv_capacity"]


def test_two_servers_that_need_the_same_model_at_once_convert_it_once(tmp_path):
    """The model is a GGUF file, which one of them converts; both serve it."""
    vocabulary = bpe_metadata("gpt-2")
    write(tmp_path / "m.gguf", tiny.checkpoint(tmp_path / "hf", vocab_size=len(vocabulary["ggml.tokens"])), tokenizer=vocabulary)
    env = {**os.environ, "NANO_SGL_CACHE": str(tmp_path / "cache")}
    both = [serve(tmp_path / "m.gguf", env=env) for _ in range(2)]
    try:
        for process in both:
            log = ""
            while "curl" not in log:
                line = process.stderr.readline()
                assert line, log
                log += line
    finally:
        for process in both:
            process.terminate()
            process.stderr.close()
            process.wait(30)
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 1, "one directory, and no lock or half-made one"
