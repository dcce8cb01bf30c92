"""The C++ kernels: found, compiled, loaded. One shared library per source, compiler and CPU, built at first use.

    kernels.cpp, cpu/*.h --compiler, for this CPU--> <cache>/kernels/<hash>.so --ctypes--> library().nano_layers, .nano_attention, ...

Names: a *build* is (source, compiler's version, flags, this CPU's features), and its hash is the file's name, so a changed source
or another machine that shares the cache never meets a stale file. `march` is the instruction set to compile for: "native", or a
name the compiler knows.

Invariant: a file appears under its final name only when it is whole (written aside, then renamed), and one that was damaged since is
built anew; so any number of processes may build at once, and the source tree may be read-only. Where there is no compiler, or it
fails, `library` says why once and returns None; callers then use their torch twins, which compute the same.

Cost: one compilation of a few seconds per machine, when an engine is made and not at its first request; a call costs 2-4
microseconds, most of it fetching pointers. It releases the interpreter lock while it runs. The library is linked without an OpenMP
runtime: its symbols are found in the one that torch has loaded, so both use one set of threads. Two sets would compete for the
cores at every step. Where that runtime speaks another dialect (LLVM's), the library brings its own.

After: the way numba and Triton cache what they compile; ctypes instead of a torch extension, which takes ten times as long to
build and needs headers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

log = logging.getLogger("nano_sgl")
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ANY = 1 << 30       # tokens
choice = "native"  # what `use` chose: an instruction set, or "off"

_P, _I, _C, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Attention(ctypes.Structure):
    """The arguments of nano_attention; the order is that of kernels.cpp's struct."""

    _fields_ = [*((name, _P) for name in ("q", "k_cache", "v_cache", "out", "part", "part_lse", "items", "segment", "seg_first", "shifts",
                                          "table", "cols", "base", "bits", "sinks")),
                *((name, _I) for name in ("q_stride", "q_head_stride", "slot_stride", "table_stride", "num_items", "tokens")),
                *((name, _C) for name in ("heads", "kv_heads", "dim", "window", "merges", "threads")), ("scale", _F), ("softcap", _F)]


class Weight(ctypes.Structure):
    """A matrix [outputs, size] to multiply with; scales: null, or the values are int8. As kernels.cpp's struct, like those below."""

    _fields_ = [("values", _P), ("scales", _P), ("bias", _P), ("outputs", _I), ("size", _I)]


class Layer(ctypes.Structure):
    """What a decoder layer multiplies with, and its part of the pool."""

    _fields_ = [*((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
                *((name, _P) for name in ("qk_norm", "mlp_norm", "next_norm", "k_cache", "v_cache")), ("window", _I)]


class Step(ctypes.Structure):
    """The arguments of nano_layers, beside those of attention."""

    _fields_ = [*((name, _P) for name in ("layers", "first_norm", "turn", "x", "out", "slots")),
                *((name, _I) for name in ("num_layers", "hidden", "intermediate")), ("eps", _F)]


class Grammars(ctypes.Structure):
    """Where the tables of masks.py are."""

    _fields_ = [*((name, _P) for name in ("maps", "vec", "over_token", "over_value", "lines", "states", "shapes", "firsts", "others", "ends")),
                *((name, _I) for name in ("map_stride", "last_state", "size", "num_ends", "id"))]


class Walk(ctypes.Structure):
    """A walk of a vocabulary's tree, for automaton.py; see cpu/trie.h."""

    _fields_ = [*((name, _P) for name in ("parent", "child0", "kids", "first", "end", "own", "order", "node_of", "by_byte", "byte_starts", "byte",
                                          "inner", "spots", "pre", "above", "begun", "letters", "letters_of", "tally", "whole", "partial", "mute",
                                          "delta", "accepts", "expanded", "goes_on", "starts", "marks", "members", "items", "head", "sources",
                                          "loops", "met", "path", "exits", "ranks", "counts", "classes", "columns", "sizes", "keys")),
                *((name, _I) for name in ("nodes", "num_tokens", "num_text", "num_partial", "num_mute", "room", "num_starts", "phase", "at", "step",
                                          "size", "num_records", "num_met", "repeated", "dropped", "num_unknown", "num_found", "num_classes",
                                          "num_exits", "most", "even", "more")),
                ("many", ctypes.c_double), *((name, _C) for name in ("ascending", "state", "loop"))]


class RowWalk(ctypes.Structure):
    """Readings that are followed from piece to piece, for rows.py; see cpu/row.h."""

    _fields_ = [*((name, _P) for name in ("walk", "sets", "map", "readings", "head", "differs", "different", "left", "tokens", "groups", "pairs",
                                          "leaves", "vec", "class_leaves", "class_values", "values")),
                *((name, _I) for name in ("room", "below", "at", "size", "work", "full", "num_different", "num_left", "leaves_out", "num_tokens",
                                          "num_pairs", "num_leaves", "unknown", "low", "high", "seed", "narrow", "most", "counted", "which",
                                          "num_lines", "set")),
                ("far", ctypes.c_uint64 * 4)]


class Piece(ctypes.Structure):
    """What begins in a state from the root, if that is much; see cpu/row.h."""

    _fields_ = [*((name, _P) for name in ("map", "classes", "members", "ranks", "begun", "nodes", "counts")),
                *((name, _I) for name in ("num_exits", "more", "num_classes", "which", "beside"))]


class SetsHead(ctypes.Structure):
    """What is seen of a grammar's sets, for readings.py; see cpu/sets.h."""

    _fields_ = [*((name, _P) for name in ("found", "new_states", "new_lines")),
                *((name, _I) for name in ("num_new_states", "num_new_lines", "next_state", "next_line", "places", "missing", "keep", "add",
                                          "written")),
                ("deadline", ctypes.c_double), *((name, _I) for name in ("max_frames", "max_readings", "max_states", "max_places", "compared"))]


FUNCTIONS = {
    "nano_setup": [],
    "nano_layers": [ctypes.POINTER(Step), ctypes.POINTER(Attention), _C],
    "nano_attention": [ctypes.POINTER(Attention), _C],
    "nano_rms_norm": [_P] * 5 + [_I] * 6 + [_F, _C, _C],
    "nano_rope": [_P] * 2 + [_I] * 5 + [_C, _C],
    "nano_store_kv": [_P] * 5 + [_I] * 8 + [_C],
    "nano_linear": [_P, ctypes.POINTER(Weight), _P, _I, _I, _C, _C, _C],
    "nano_draw": [_P] + [_I] * 2 + [_P] * 5 + [_F, _F, _P, _P, _C],
    "nano_look_up": [_P, _I, _I, _P] + [_I] * 4 + [_F] + [_P] * 5,
    "nano_has_row": [ctypes.POINTER(Grammars)] + [_P] * 2 + [_I],
    "nano_advance": [ctypes.POINTER(Grammars)] + [_P] * 3 + [_I],
    "nano_walk": [ctypes.POINTER(Grammars)] + [_P] * 4 + [_I] * 2,
    "nano_trie_prepare": [ctypes.POINTER(Walk)],
    "nano_trie_walk": [ctypes.POINTER(Walk)],
    "nano_join_maps": [_P] * 2 + [_I] * 3 + [_P] * 3,
    "nano_row_begin": [ctypes.POINTER(RowWalk)] + [_C] * 4,
    "nano_row_along": [ctypes.POINTER(RowWalk), _P, _C, _I, _I],
    "nano_row_exits": [ctypes.POINTER(RowWalk), _C, _C, *[_P] * 5, _I, _I],
    **dict.fromkeys(("nano_row_follow", "nano_row_read"), [ctypes.POINTER(RowWalk), _C]),
    **dict.fromkeys(("nano_row_settle", "nano_row_forget"), [ctypes.POINTER(RowWalk)]),
    **dict.fromkeys(("nano_row_lines", "nano_row_values"), [ctypes.POINTER(RowWalk), _P, _I, _P]),
    "nano_frames_new": [],
    "nano_frames_loop": [_P] + [_C] * 3,
    "nano_frames_tell": [_P, _C, _C, _I, _I, _C],
    "nano_frames_firsts": [_P, _C, _P, _I],
    "nano_frames_piece": [_P, _C, _C, _C, ctypes.POINTER(Piece)],
    "nano_sets_new": [_P] * 2,
    **dict.fromkeys(("nano_frames_free", "nano_frames_forget", "nano_sets_free"), [_P]),
    **dict.fromkeys(("nano_sets_stack", "nano_sets_value"), [_P, _P, _I]),
    "nano_sets_covers": [_P, _C, _C],
    "nano_sets_set": [_P, _C, _P, _I],
    "nano_sets_join": [_P, _P, _P, _I, _P],
    "nano_sets_lines": [_P, _P, _I, _P],
    "nano_sets_place": [_P, _C, _C, _C],
    **dict.fromkeys(("nano_sets_closure", "nano_sets_state", "nano_sets_of_stack", "nano_sets_of_set", "nano_sets_of_state"), [_P, _C]),
    "nano_mask": [ctypes.POINTER(Grammars), _P, _I, _P, _P, _I, _C],
    "nano_silu_mul": [_P] * 2 + [_I] * 3 + [_C, _C],
}


# What returns a number, or an address
COUNTING = {"nano_look_up", "nano_trie_walk", "nano_join_maps", "nano_row_exits", "nano_row_follow", "nano_row_read", "nano_row_settle",
            "nano_row_lines", "nano_row_values", "nano_row_along",
            *(name for name in FUNCTIONS if name.startswith(("nano_sets_", "nano_frames_")) and not name.endswith(("_new", "_free", "_forget")))}
ADDRESSES = ("nano_frames_new", "nano_sets_new")


class BuildError(RuntimeError):
    """Why there is no library here."""


def use(march: str) -> None:
    """Which library this process uses from now on: "native", an instruction set ("x86-64-v3"), or "off" for the torch twins."""
    global choice
    choice = march


def library() -> ctypes.CDLL | None:
    """The library chosen by `use`, with argument types set and `.features`; None where there is none."""
    return None if choice == "off" else _library(choice)


@functools.cache
def _library(march: str) -> ctypes.CDLL | None:
    try:
        return build(march)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        log.warning("the C++ kernels are not used, torch's slower operations stand in for them: %s", error)
        return None


def build(march: str = "native") -> ctypes.CDLL:
    """Compile kernels.cpp unless the cache has it, and load it. BuildError, OSError or SubprocessError where that fails."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, ("g++", "c++", "clang++"))][:1]
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}: {error}") from None
    if not compiler:
        raise BuildError("no C++ compiler was found (g++, c++ or clang++; on Debian and Ubuntu: apt install g++)")
    for runtime in ((), ("-fopenmp",)):  # OpenMP: torch's, else one of our own
        file = _built(compiler, march, runtime)
        try:
            return _load(file)
        except OSError as unresolved:
            error = unresolved
    raise BuildError(f"what {compiler[0]} made cannot be loaded: {error}")


def _built(compiler: list[str], march: str, runtime: tuple[str, ...]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=True).stdout
    flags = [*FLAGS, f"-march={march}"]
    key = [*(file.read_text("utf-8") for file in (SOURCE, *sorted(SOURCE.parent.glob("cpu/*.h")))), *compiler, version, _cpu(), *flags, *runtime]
    file = _cache() / f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:24]}.so"
    if not _is_whole(file):
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            part, made = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
            for command in ([*flags, "-fopenmp", "-c", str(SOURCE), "-o", str(part)], ["-shared", *runtime, str(part), "-o", str(made)]):
                done = subprocess.run([*compiler, *command], capture_output=True, text=True, errors="replace", timeout=300)
                if done.returncode:
                    said = done.stderr.strip().splitlines() or ["it says nothing"]
                    raise BuildError(f"{compiler[0]} failed: {next((line for line in said if 'error' in line), said[0])}")
            with open(made, "r+b") as whole:
                whole.write(hashlib.sha256(whole.read()).digest())
            os.replace(made, file)
    return file


def _is_whole(file: Path) -> bool:
    """Whether a library is there and as it was written: its last bytes are the hash of all others. (A disk may fill up, or lose its power.)"""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _load(file: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    for name, types in FUNCTIONS.items():
        getattr(loaded, name).argtypes = types
        getattr(loaded, name).restype = _I if name in COUNTING else _P if name in ADDRESSES else None
    loaded.nano_setup.restype = ctypes.c_int
    can = loaded.nano_setup()
    loaded.features = tuple(name for bit, name in enumerate(("bf16 dot products", "AMX")) if can >> bit & 1)
    return loaded


def _cpu() -> str:
    """What tells apart machines for which "native" means something else."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))))
    except OSError:
        return platform.processor() + platform.machine()


def _cache() -> Path:
    """A directory for built libraries: the user's, or one of this process where that cannot be written."""
    try:
        folder = Path(os.environ.get("NANO_SGL_CACHE") or Path.home() / ".cache" / "nano_sgl") / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="nano_sgl-kernels-", ignore_cleanup_errors=True)  # until the process ends


class TrieWalker:
    """automaton.py's and rows.py's walks of a vocabulary, by C++. One walk at a time: whoever begins one holds `lock` until it has the result."""

    BEGIN, SPREAD, EXPAND, NO_ROOM, TOO_MANY = 0, 3, 1, 2, 3        # as in cpu/trie.h
    EXPAND_STATE, TOO_LONG, LEFT_OUT, ASK_PIECE = 1, 2, 3, 4        # as in cpu/row.h
    READINGS, NARROW = 1 << 18, 1 << 12         # readings of a row, and from the root
    BELOW = 2048                                # tokens behind a node, from which on what begins there comes from a template
    NO_CLASSES = np.zeros(1, np.int32)
    SPARE = 48                                  # maps for which there is memory from the beginning

    def __init__(self, vocab, loaded: ctypes.CDLL):
        """vocab: a vocab.Vocab."""
        nodes, size = len(vocab.byte), vocab.size
        self.lock, self._library, self._walk, self._held = threading.Lock(), loaded, Walk(), {}
        for name in ("parent", "child0", "kids", "first", "end", "own", "order", "node_of", "by_byte", "byte"):
            self._give(name, getattr(vocab, name))
        self._give("byte_starts", np.array(vocab.byte_starts, np.int32))
        self._give("inner", (vocab.kids > 0).astype(np.uint8))
        text, words = len(vocab.order), nodes // 64 + 1
        self._sources, self._head, pre = np.empty(nodes, np.int32), np.full(nodes, -1, np.int32), np.empty(nodes, np.int32)
        self._counts, self._exits, self._ranks = np.empty(nodes, np.int16), np.empty(words, np.uint64), np.empty(words, np.int32)
        self._spare = [np.full(size, 0, np.int16) for _ in range(self.SPARE)]
        self._classes, self._sizes, self._starts = self._map(), np.empty(1 << 15, np.int32), np.empty(0, np.int32)
        for name in ("sources", "head", "counts", "exits", "ranks", "classes", "sizes"):
            self._give(name, getattr(self, f"_{name}"))
        begun = np.empty(nodes, np.int16)
        for name, array in (("pre", pre), ("above", np.empty(nodes, np.int32)), ("spots", np.empty((nodes + 1, 3), np.uint64)),
                            ("begun", begun), ("letters", np.empty(text, np.uint16)), ("whole", np.zeros(words, np.uint64)),
                            ("letters_of", np.zeros(size, np.uint16)), ("tally", np.zeros(4096, np.int32)),
                            ("partial", np.empty((text, 2), np.int32)), ("mute", np.empty(size, np.int32)), ("met", np.empty(1 << 16, np.int32)),
                            ("loops", np.zeros((1 << 16, 2), np.uint64)), ("path", np.empty((4096, 2), np.int32))):
            self._give(name, array)
        self._walk.nodes, self._walk.num_tokens, self._walk.num_text = nodes, size, text
        self._library.nano_trie_prepare(self._walk)
        self.preorder = np.argsort(pre).astype(np.int32)
        self._make_room(4 * max(nodes, size) + 4096)
        self._row, room = RowWalk(walk=ctypes.addressof(self._walk)), max(self.READINGS, 1 << 15)     # a map may have as many classes
        self._found = dict(readings=np.empty((room, 7), np.int32), head=np.full(nodes, -1, np.int32), differs=np.zeros(nodes, np.uint8),
                           different=np.empty(nodes, np.int32), left=np.empty((64, 5), np.int32), leaves=np.empty((room, 4), np.int32),
                           pairs=np.empty(room, np.int64), class_values=np.empty(room, np.int32),
                           **{name: np.empty(room, np.int32) for name in ("tokens", "groups", "values")})
        for name, array in self._found.items():
            setattr(self._row, name, array.ctypes.data)
        self._row.far[:] = [vocab.far >> 64 * i & (1 << 64) - 1 for i in range(4)]

    def _map(self) -> np.ndarray:
        """Memory for a map. The first so many have been written to: to touch fresh memory may take longer than to make what is in it."""
        return self._spare.pop() if self._spare else np.empty(self._walk.num_tokens, np.int16)

    def _give(self, name: str, array: np.ndarray | None) -> None:
        self._held[name] = array
        setattr(self._walk, name, None if array is None else array.ctypes.data)

    def _make_room(self, room: int) -> None:
        self._columns, self._keys = np.empty((6, room), np.int32), np.empty(room, np.int64)     # used again and again
        self._columns[0], items = 0, np.empty((room, 5), np.int32)
        items[: room // 8] = 0                      # as `_map`: what is used most is touched
        starts = np.empty(room, np.int32)           # a copy: the address of an array takes longer to find
        starts[: self._walk.num_starts] = self._starts[: self._walk.num_starts]
        self._starts = starts
        for name, array in (("items", items), ("columns", self._columns), ("keys", self._keys), ("starts", self._starts)):
            self._give(name, array)
        self._head[:], self._walk.room, self._walk.size, self._walk.phase = -1, room, 0, self.BEGIN

    def begin(self, state: int, loop: int, starts: np.ndarray, ascending: bool, marks: np.ndarray | None, many: float) -> None:
        """A walk of `state` from the nodes `starts` int32, `ascending` and each once, or not. loop: the state between two characters that are
        counted, -1: none are. marks int32 [starts]: what comes to the same state from sources of different marks is kept apart. many: the part of
        all nodes from which the result has an entry for each token, and is no list of them."""
        self._walk.num_starts = 0
        if len(starts) > self._walk.room:
            self._make_room(2 * len(starts))
        self._starts[: len(starts)] = starts
        self._walk.ascending = ascending
        self._begin(state, loop, None, len(starts), marks, many)

    def begin_inside(self, state: int, loop: int, members: np.ndarray, num_members: int, many: float) -> None:
        """The same from the nodes of a set, bits in preorder; the sources are nodes."""
        self._begin(state, loop, members, num_members, None, many)

    def _begin(self, state: int, loop: int, members: np.ndarray | None, num_starts: int, marks: np.ndarray | None, many: float) -> None:
        walk = self._walk
        for name, array in (("members", members), ("marks", marks)):
            if array is not None or self._held.get(name) is not None:
                self._give(name, array)
        walk.state, walk.loop, walk.num_starts, walk.many, walk.phase = state, loop, num_starts, many, self.BEGIN

    def go(self, delta: np.ndarray, flags: np.ndarray) -> list[int]:
        """Go on as far as possible. delta int32 [states + 1, 256], -2 in rows of states that are not expanded, state 0 leads nowhere; flags bool
        [3, states + 1]: accepts, expanded, goes on. Returns states that have to be expanded first, none at the end. OverflowError: the result has
        more than 32,767 classes."""
        walk = self._walk
        self._see(delta, flags)
        while (how := self._library.nano_trie_walk(walk)) == self.NO_ROOM:
            self._make_room(4 * walk.room)
        if how == self.TOO_MANY:
            raise OverflowError
        return self._columns[0, : walk.num_unknown].tolist() if how == self.EXPAND else []

    def _see(self, delta: np.ndarray, flags: np.ndarray) -> None:
        if self._held.get("delta") is not delta or self._held.get("flags") is not flags:
            self._give("delta", delta)
            self._held["flags"] = flags
            self._walk.accepts, self._walk.expanded, self._walk.goes_on = (flags.ctypes.data + i * flags.shape[1] for i in range(3))

    @property
    def is_spread(self) -> bool:
        """Whether the result is `spread` and not `listed`."""
        return self._walk.phase == self.SPREAD

    def listed(self) -> tuple:
        """(tokens, the class of each, the source of each: int32 [3, tokens]; of each class its state, or 4096 times that and the count; nodes,
        sources, counts int32 [3, exits]; whether a node was reached more than once; whether something was left out)."""
        walk, n, ends = self._walk, self._walk.num_found, self._walk.num_exits
        return (self._columns[:3, :n].copy(), self._keys[: walk.num_classes].tolist(), self._columns[3:, :ends].copy(), bool(walk.repeated),
                bool(walk.dropped))

    def spread(self) -> tuple:
        """(classes int16 [V], 0: none; their sizes int64; of each class from 1 on its state, or 4096 times that and the count; exits, bits in
        preorder; None, or how they count: (how many are before each word of these, int32; the count of each, int16; 0), or (None; int16 by nodes
        in preorder; what the count is more than that); how many there are; no count is higher; the source of each node int32, or None)."""
        walk, classes = self._walk, self._classes
        self._classes = self._map()
        self._give("classes", self._classes)
        counts = None
        if walk.loop >= 0:
            counts = (None, self._held["begun"], walk.more) if walk.even else (self._ranks.copy(), self._counts[: walk.num_exits].copy(), 0)
        return (classes, self._sizes[: walk.num_classes + 1].astype(np.int64), self._keys[: walk.num_classes].tolist(), self._exits.copy(), counts,
                walk.num_exits, walk.most, self._sources.copy() if walk.num_starts > 1 else None)

    def frames(self) -> Frames:
        """What grammars of one automaton will say of their frames."""
        return Frames(self)

    def values(self, leaves: np.ndarray, readings, low: int, high: int) -> np.ndarray:
        """The value of each leaf (place, state, begun, x), int32 [:, 4]. low, high: of the repeat that the row's own count belongs to."""
        found = np.empty(len(leaves), np.int32)
        with self.lock:
            self._see(readings.automaton.delta, readings.automaton._flags)
            self._row.sets, self._row.low, self._row.high = readings.native.address, low, high
            self._go(readings, self._library.nano_row_values, leaves.ctypes.data, len(leaves), found.ctypes.data)
        return found

    def read(self, seeds: list[tuple], exits: list[tuple[int, object, int]], base: np.ndarray | None, classes: np.ndarray | None,
             builder) -> tuple[np.ndarray | None, np.ndarray, np.ndarray] | int | None:
        """Which tokens lead where. seeds (state, place, x, whether it may be long, beside, ...): from the root on, all (SOLE), or only what differs
        from the state `beside`, whose template `base` has. exits (place, automaton.NodeSet, x): from where pieces end. base int16 [V]: a class of
        each token; classes int32: of each its value [:], or of each but the first the leaf that it is [:, 4]: (place, state, begun, x). builder:
        a rows.RowBuilder, of whose grammar the `readings` are.

        (int32: of classes that are leaves, the first line of each in the tables, else None; tokens, ascending; the line of each). Of more than a
        row should have: the index of the seed that leads to them, or None; -1: what was left out is new. What is made, the tables do not have yet."""
        with self.lock:
            row, readings = self._row, builder.readings
            row.sets, row.leaves_out, row.low, row.high = readings.native.address, builder.leaves_out, builder.low, builder.high
            row.below = self.BELOW
            row.map = row.vec = row.class_leaves = row.class_values = None
            self._see(readings.automaton.delta, readings.automaton._flags)
            try:
                if base is not None:
                    row.map = base.ctypes.data
                    vec = classes if classes.ndim == 1 else self._class_lines(classes, readings)
                    row.vec = vec.ctypes.data
                return self._read(seeds, exits, readings, None if base is None else vec, builder)
            finally:
                self._library.nano_row_forget(row)

    def read_row(self, state: int, readings, ask) -> tuple[int, np.ndarray, np.ndarray, np.ndarray] | None:
        """(map, the line of each of its classes, tokens, ascending, the line of each) of a state of the grammar; None: more than one of its pieces is
        wide, or it leads to much. ask(state of the automaton, whether it is counted): tells `Frames.tell_piece`."""
        while True:
            with self.lock:
                row, found, library, automaton = self._row, self._found, self._library, readings.automaton
                row.sets, row.leaves_out, row.seed, row.narrow, row.most = readings.native.address, True, -1, self.NARROW, self.READINGS
                row.map = row.vec = row.class_leaves = row.class_values = None
                row.which, row.num_lines, row.below = 0, 0, self.BELOW
                self._see(automaton.delta, automaton._flags)
                try:
                    how, asked = self._go(readings, library.nano_row_read, state), (row.unknown, bool(row.counted))
                    if not how:
                        vec, n = _at(row.vec, row.num_lines).copy() if row.num_lines else self.NO_CLASSES, row.num_tokens
                        return row.which, vec, found["tokens"][:n].copy(), found["values"][:n].copy()
                finally:
                    library.nano_row_forget(row)
            if how != self.ASK_PIECE:
                return None
            ask(*asked)             # without the lock: it may have to walk

    def along(self, which: int, text: bytes | None, size: int, budget: int, readings) -> tuple[bytes, int]:
        """From a set on, along `text`: (what of it could be read, the set behind, -1 if something could not). Without a text, along the bytes that
        must follow, so many at most; budget: of readings on the way."""
        with self.lock:
            row, held, automaton = self._row, ctypes.create_string_buffer(size) if text is None else text, readings.automaton
            row.sets, row.set = readings.native.address, which
            self._see(automaton.delta, automaton._flags)
            try:
                self._go(readings, self._library.nano_row_along, held, text is not None, size, budget)
                return held[: row.at], row.set
            finally:
                self._library.nano_row_forget(row)

    def _class_lines(self, leaves: np.ndarray, readings) -> np.ndarray:
        row, lines, values = self._row, np.empty(len(leaves) + 1, np.int32), self._found["class_values"]
        values[1 : len(lines)], lines[0], values[0] = -1, 0, 0
        row.class_leaves, row.class_values = leaves.ctypes.data, values.ctypes.data
        self._go(readings, self._library.nano_row_lines, row.class_leaves, len(leaves), lines.ctypes.data + 4)
        return lines

    def _read(self, seeds: list, exits: list, readings, vec: np.ndarray | None, builder) -> tuple | int | None:
        row, automaton, library, last, how = self._row, readings.automaton, self._library, len(seeds) - 1 if not exits else -1, 0
        if vec is not None and row.class_values is None:
            row.class_values = row.vec
        for i, (state, place, x, is_long, beside, *_) in enumerate(seeds):
            automaton.expand(state)
            self._see(automaton.delta, automaton._flags)
            row.room = self.READINGS if is_long else min(row.size + self.NARROW, self.READINGS)
            library.nano_row_begin(row, state, place, x, beside)
            how = self._go(readings, library.nano_row_follow, i == last)
            if how == self.TOO_LONG:
                return None if is_long else i
        row.room = self.READINGS
        for place, ends, x in exits:
            ranks, begun, more = ends.counts or (None, None, 0)
            nodes, counts = (ends.nodes, ends.count) if ends.members is None else (None, None)
            self._go(readings, library.nano_row_exits, place, x, *map(_address, (ends.members, ranks, begun, nodes, counts)), ends.size, more)
        if last < 0:
            how = self._go(readings, library.nano_row_follow, True)
            if how == self.TOO_LONG:
                return None
        found = self._found
        if how == self.LEFT_OUT:
            if builder.leave(found["left"][: row.num_left].tolist()):
                return -1
            self._go(readings, library.nano_row_settle)
        n = row.num_tokens
        return None if row.class_leaves is None else vec, found["tokens"][:n].copy(), found["values"][:n].copy()

    def _go(self, readings, function, *args) -> int:
        """Until it needs no state that is not expanded, and nothing of the grammar."""
        row, automaton = self._row, readings.automaton
        while True:
            how = function(row, *args)
            if how == self.EXPAND_STATE:
                automaton.expand(row.unknown)
            elif how < 0:
                readings.help(how)
            else:
                return how
            self._see(automaton.delta, automaton._flags)

    def join(self, a: np.ndarray, b: np.ndarray, classes_a: int, classes_b: int) -> tuple[np.ndarray, np.ndarray, list[int]] | None:
        """Two maps int16 [V] as one: (the class of each token, the classes' sizes, a * classes_b + b of each; the first is 0). None: too many."""
        out = self._map() if len(a) == self._walk.num_tokens else np.empty_like(a)
        sizes, keys = np.empty(1 << 15, np.int32), np.empty(min(classes_a * classes_b, 1 << 15), np.int64)
        found = self._library.nano_join_maps(*map(_address, (a, b)), len(a), classes_a, classes_b, *map(_address, (out, sizes, keys)))
        return None if found < 0 else (out, sizes[:found].astype(np.int64), keys[:found].tolist())


class Frames:
    """What the grammars of an automaton have said of frames and loops; see cpu/sets.h. `told`: of which frames what they are."""

    def __init__(self, walker: TrieWalker):
        self.walker, self.library, self.told, self.num_loops, self._held = walker, walker._library, set(), 0, {}
        self._call_of = {name: getattr(self.library, f"nano_frames_{name}") for name in ("tell", "loop", "firsts", "piece")}
        self.address = self.library.nano_frames_new()
        if not self.address:
            raise MemoryError("no memory for what grammars begin with")

    def __del__(self) -> None:
        self.library.nano_frames_free(self.address)

    def add(self, frame: int, item: int, low: int, high: int, nullable: bool) -> None:
        """A frame, as a repeat. high: -1 if it has no bound."""
        self._call("tell", frame, item, low, high, nullable)
        self.told.add(frame)

    def add_loop(self, between: int, low: int, high: int) -> None:
        """The next loop."""
        self._call("loop", between, low, high)
        self.num_loops += 1

    def add_firsts(self, frame: int, flat: bytes, size: int) -> None:
        """What a frame may begin with: int32 [size], a state, a loop, how many frames lie below, these; and so on."""
        self._call("firsts", frame, flat, size)

    def sets(self, bounds: tuple[int, ...]) -> Sets:
        """Those of a new grammar."""
        return Sets(self, bounds)

    SPARSE, SURELY_SPARSE = -2, -3                    # as in cpu/row.h

    def tell_piece(self, state: int, counted: bool, kind: int) -> None:
        """Few tokens begin in a state of the automaton, from the root: SPARSE, as it seems, or SURELY_SPARSE."""
        self._call("piece", state, counted, kind, None)

    def tell_wide_piece(self, state: int, counted: bool, template, map_: np.ndarray, which: int, beside: int) -> None:
        """Many do. template: what becomes of them, an automaton.Template; map_ int16 [V], `which` in the tables: its classes by token. beside: it is
        that of another state, of which this one's differs little, and the state; else -1."""
        classes, exits = np.array(template.classes, np.int32).reshape(-1, 2), template.exits
        piece = Piece(map=map_.ctypes.data, classes=classes.ctypes.data, num_classes=len(classes), which=which, beside=beside)
        held = [map_, classes]
        if exits is not None:
            ranks, begun, piece.more = exits.counts or (None, None, 0)
            nodes, counts = (exits.nodes, exits.count) if exits.members is None else (None, None)
            piece.num_exits = exits.size
            for name, array in (("members", exits.members), ("ranks", ranks), ("begun", begun), ("nodes", nodes), ("counts", counts)):
                setattr(piece, name, _address(array))
                held.append(array)
        self._held[state, counted] = held
        self._call("piece", state, counted, 0, piece)

    def forget_pieces(self) -> None:
        """Of all states; when templates are thrown out."""
        self.library.nano_frames_forget(self.address)
        self._held.clear()

    def _call(self, name: str, *args) -> None:
        if self._call_of[name](self.address, *args):
            raise MemoryError("no memory for what grammars begin with")


class Sets:
    """One grammar's sets. bounds: as the last of SetsHead."""

    ASKS_FRAME, LATE, MANY_FRAMES, MANY_READINGS, MANY_STATES, MANY_PLACES, FAILED = range(-1, -8, -1)      # as in cpu/sets.h

    def __init__(self, frames: Frames, bounds: tuple[int, ...]):
        self.frames, self._library, self.address = frames, frames.library, None
        self.address = self._library.nano_sets_new(frames.address, (_I * len(bounds))(*bounds))
        if not self.address:
            raise MemoryError("no memory for a grammar")
        self.head = SetsHead.from_address(self.address)

    def __del__(self) -> None:
        self._library.nano_sets_free(self.address)

    def call(self, name: str, *args) -> int:
        """nano_sets_<name>: what it finds, or why it has stopped; then it may be called again."""
        return getattr(self._library, f"nano_sets_{name}")(self.address, *args)

    def numbers(self, kind: str, index: int) -> list[int]:
        """Of a `stack`, a `set` or a `state`: what cpu/sets.h has in its place."""
        size = getattr(self._library, f"nano_sets_of_{kind}")(self.address, index)
        return _at(self.head.found, size).tolist()

    def written(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(from which count on new states accept, new lines int32 [:, 4]) since the last time; None if there are none. As of `_at`."""
        head = self.head
        if head.written:
            return None, None
        states, lines = head.num_new_states, head.num_new_lines
        head.written = 1
        return _at(head.new_states, states) if states else None, _at(head.new_lines, 4 * lines).reshape(-1, 4) if lines else None


def _at(address: int, size: int) -> np.ndarray:
    """int32 [size] that lies there, and does so until C++ is called again."""
    return np.frombuffer(_Numbers.from_address(address), np.int32, size)


_Numbers = _C * (1 << 28)       # of one type, for all sizes: making a type takes longer than all the rest


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def few(dtype: torch.dtype, quantised: bool, size: int) -> int:
    """Tokens up to which nano_linear (and so nano_layers) is as fast as torch's product of `size` inputs, or faster; int8: as making floats first."""
    features = getattr(library(), "features", ())
    if platform.machine() not in ("x86_64", "AMD64") or dtype != torch.bfloat16 and "bf16 dot products" in features:
        return 32 if quantised else 4
    # On tiles torch's blocks keep wide rows in the cache; without tiles it is never faster
    return 512 if "AMX" in features and size >= 2048 and not quantised else ANY


def takes(x: torch.Tensor) -> bool:
    """Whether the library computes on x: each row (the last axis) must be contiguous."""
    return x.device.type == "cpu" and x.dtype in DTYPES and x.stride(-1) == 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for march in ("native", "x86-64-v4", "x86-64-v3"):
        print(f"{march}: {getattr(_library(march), 'features', 'no library')}")
