"""SGLang's, mini-sglang's and vLLM's prefix caches as radix.py measures them.

SGLang's and mini-sglang's are imported from a folder without the rest of their packages. Only the modules of the cache are read; all else
that they name is an empty stand-in (`StandIns`), so their metrics, events, sessions and allocators cost nothing, and none of their
dependencies but torch and msgspec is needed. vLLM is imported whole, from a virtual environment.

A cache has the methods of `radix.Ours`: native, prep, match, lock, gather, insert, relock, unlock, evict.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import sys
import types
from array import array
from pathlib import Path

import numpy as np


class Nothing(type):
    """Makes classes that can stand for anything: every attribute is one, every call returns None."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Blank

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Blank(metaclass=Nothing):
    """A stand-in for what is not imported."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return None

    def __getattr__(self, name):
        return getattr(Blank, name)()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of the package `top` in `folder` only the modules `real` and those below them; for all others there are empty modules, with
    the names in `given`."""

    def __init__(self, top: str, folder: Path, real: tuple[str, ...], given: dict[str, object]):
        self.top, self.folder, self.real, self.given = top, folder, real, given

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] != self.top or any(f"{name}.".startswith(f"{real}.") for real in self.real):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Blank, name)
        module.__dict__.update(self.given)
        return module

    def exec_module(self, module):
        module.__path__ = [str(self.folder.joinpath(*module.__name__.split(".")))]


def stand_in(top: str, folder: str, real: tuple[str, ...], **given: object) -> None:
    """Makes the modules `real` of a package importable from a folder; what they import else has the attributes `given`, and blanks. ValueError
    where they are not there."""
    first = Path(folder, *real[0].split(".")).with_suffix(".py")
    if not first.is_file():
        raise ValueError(f"{first} is missing: give the folder that holds the package {top!r}")
    sys.meta_path.insert(0, StandIns(top, Path(folder), real, given))


class SGLang:
    """A cache of SGLang's as `replay` wants it. A handle is what its unlock asks for; a lock moves on without another match."""

    FOLDER = "sglang.srt.mem_cache."
    REAL = tuple(f"sglang.srt.{name}" for name in (
        "mem_cache.radix_cache", "mem_cache.unified_radix_cache", "mem_cache.unified_cache", "mem_cache.rust_tree_core", "rust_extensions",
        "mem_cache.base_prefix_cache", "mem_cache.cache_init_params", "mem_cache.events", "mem_cache.utils", "mem_cache.evict_policy",
        "mem_cache.hicache_storage", "environ"))

    def __init__(self, page_size: int, slots: np.ndarray, pool: int, core: str | None):
        torch, load = importlib.import_module("torch"), lambda name: importlib.import_module(self.FOLDER + name)
        torch.set_num_threads(1)
        self.api, self.key_of = load("base_prefix_cache"), load("radix_cache").RadixKey
        allocator = types.SimpleNamespace(device="cpu", free_segment=lambda slots, start_pos: None)
        params = functools.partial(load("cache_init_params").CacheInitParams, False, None, allocator, page_size)
        self.slots, self.page, self.core = torch.from_numpy(slots).long(), page_size, core
        if core is None:
            self.cache = load("radix_cache").RadixCache(params())
        else:
            full = load("unified_cache.component_type").ComponentType.FULL
            self.cache = load("unified_radix_cache").UnifiedRadixCache(params(tree_components=(full,), tree_core_backend=core))
            found = type(self.cache.tree_core).__name__
            assert found.startswith("Rust") is (core == "rust"), f"SGLang chose {found} although {core!r} was asked for"

    def native(self, ids):
        return array("q", ids.astype(np.int64).tobytes())

    def prep(self, ids):
        return self.key_of(ids)

    def match(self, key):
        found = self.cache.match_prefix(self.api.MatchPrefixParams(key=self.key_of(key.token_ids, limit=len(key) - 1)))
        return found.last_device_node, found.device_prefix_len

    def lock(self, node):
        receipt = self.cache.inc_lock_ref(node)
        return (node, receipt.to_dec_params()) if self.core else (node,)

    def gather(self, handle):
        return self.cache.path_device_indices(handle[0])

    def insert(self, key, handle):
        done = self.cache.insert(self.api.InsertParams(key=key, value=self.slots[: len(key)]))
        return done.last_device_node, len(key) // self.page * self.page - done.prefix_len

    def relock(self, handle, node):
        new = self.lock(node)
        self.unlock(handle)
        return new

    def unlock(self, handle):
        self.cache.dec_lock_ref(*handle)

    def evict(self, tokens):
        return self.cache.evict(self.api.EvictParams(num_tokens=tokens)).num_tokens_evicted


def compare(a, b) -> int:
    """Tokens that two tensors of ids have in common at their beginning: instead of mini-sglang's compiled one."""
    count = min(len(a), len(b))
    differ = a.numpy()[:count] != b.numpy()[:count]
    return int(differ.argmax()) if differ.any() else count


class MiniSGLang:
    """mini-sglang's cache as `replay` wants it."""

    REAL = ("minisgl.kvcache.radix_cache", "minisgl.kvcache.base")

    def __init__(self, page_size: int, slots: np.ndarray, pool: int):
        self.torch, module = importlib.import_module("torch"), importlib.import_module(self.REAL[0])
        self.torch.set_num_threads(1)
        module.get_global_ctx = lambda: types.SimpleNamespace(page_size=page_size)
        self.cache, self.slots, self.page = module.RadixPrefixCache(self.torch.device("cpu")), self.torch.from_numpy(slots), page_size

    def native(self, ids):
        return self.torch.from_numpy(ids)

    def prep(self, ids):
        return ids

    def match(self, key):
        handle = self.cache.match_prefix(key[: (len(key) - 1) // self.page * self.page]).cuda_handle
        return handle, handle.cached_len

    def lock(self, handle):
        self.cache.lock_handle(handle)
        return handle

    def gather(self, handle):
        return handle.get_matched_indices()

    def insert(self, key, handle):
        done = self.cache.insert_prefix(key, self.slots[: len(key)])
        return done.handle, done.handle.cached_len - done.cached_len

    def relock(self, handle, node):
        self.cache.lock_handle(node)
        self.cache.lock_handle(handle, unlock=True)
        return node

    def unlock(self, handle):
        self.cache.lock_handle(handle, unlock=True)

    def evict(self, tokens):
        return len(self.cache.evict(tokens))


class VLLM:
    """vLLM's KVCacheManager with one group of full attention, as `replay` wants it. It owns its blocks: `allocate_slots` adopts and locks what
    was found, takes what else is needed from the least recently used, and enters the blocks that are full. So `insert` is that, `lock` nothing,
    and there is no `evict`. What is new is said to be nothing, as the pool is looked after. A handle is (request, what it found, how much)."""

    def __init__(self, page_size: int, slots: np.ndarray, pool: int):
        torch, load = importlib.import_module("torch"), importlib.import_module
        kv, utils, hashing = load("vllm.v1.kv_cache_interface"), load("vllm.v1.core.kv_cache_utils"), load("vllm.utils.hashing")
        utils.init_none_hash(hashing.sha256)  # its default
        self.hashes = utils.get_request_block_hasher(page_size, hashing.sha256)
        spec = kv.FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        config = kv.KVCacheConfig(pool // page_size + 1, [], [kv.KVCacheGroupSpec(["layer"], spec)])  # one block stands for none
        self.manager = load("vllm.v1.core.kv_cache_manager").KVCacheManager(config, 1 << 20, page_size, page_size)
        self.request, self.params = load("vllm.v1.request").Request, load("vllm").SamplingParams(max_tokens=1 << 20)
        self.names = itertools.count()

    def native(self, ids):
        return ids.tolist()

    def prep(self, ids):
        return self.request(str(next(self.names)), ids, self.params, None)

    def match(self, request):
        request.block_hashes.extend(self.hashes(request))
        found, length, _ = self.manager.get_computed_blocks(request)
        return (request, found, length), length

    def lock(self, found):
        return found

    def gather(self, handle):
        return handle[1].get_block_ids()

    def insert(self, whole, handle):
        request, found, length = handle
        if whole is not request:  # it has its output now
            request.append_output_token_ids(whole.all_token_ids[request.num_tokens :])
            request.block_hashes.extend(self.hashes(request))
        if self.manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens - length, length, found) is None:
            raise RuntimeError("the pool is too small for what runs")
        request.num_computed_tokens = request.num_tokens
        return (request, None, 0), 0

    def relock(self, handle, node):
        return node

    def unlock(self, handle):
        self.manager.free(handle[0])


def sglang(folder: str) -> dict[str, object]:
    """Its three caches by name, each made of page size and slots. ValueError where the folder has no sglang."""
    stand_in("sglang", folder, SGLang.REAL, ceil_align=lambda size, unit: -(-size // unit) * unit,
             page_interleave_shard_size=lambda allocator: 1, rank_consensus=lambda call=None, **options: call or (lambda call: call))
    cores = {"sglang-rust": "rust", "sglang-python": "python", "sglang-radix": None}
    return {name: functools.partial(SGLang, core=core) for name, core in cores.items()}


def mini_sglang(folder: str) -> dict[str, object]:
    """Its cache. ValueError where the folder has no minisgl."""
    stand_in("minisgl", folder, MiniSGLang.REAL, align_down=lambda size, unit: size // unit * unit, fast_compare_key=compare)
    return {"mini-sglang": MiniSGLang}


def vllm(venv: str) -> dict[str, object]:
    """Its KVCacheManager. ValueError where the virtual environment has none that this Python can import."""
    folder = Path(venv, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    if not (folder / "vllm").is_dir():
        raise ValueError(f"{folder / 'vllm'} is missing: give a virtual environment of this Python that has vLLM")
    sys.path.append(str(folder))  # last: what is here already stays
    importlib.import_module("vllm.v1.core.kv_cache_manager")
    return {"vllm": VLLM}
