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
                *((name, _I) for name in ("map_stride", "last_state", "size", "num_ends"))]


class Walk(ctypes.Structure):
    """A walk of a vocabulary's tree, for automaton.py; see cpu/trie.h."""

    _fields_ = [*((name, _P) for name in ("parent", "child0", "kids", "first", "end", "own", "order", "node_of", "by_byte", "byte_starts", "byte",
                                          "inner", "spots", "pre", "above", "begun", "letters", "letters_of", "tally", "whole", "partial", "mute",
                                          "delta", "accepts", "expanded", "starts", "marks", "members", "items", "head", "sources", "loops", "met",
                                          "path", "exits", "ranks", "counts", "classes", "columns", "sizes", "keys")),
                *((name, _I) for name in ("nodes", "num_tokens", "num_text", "num_partial", "num_mute", "room", "num_starts", "phase", "at", "step",
                                          "size", "num_records", "num_met", "repeated", "dropped", "num_unknown", "num_found", "num_classes",
                                          "num_exits", "most", "even", "more")),
                ("many", ctypes.c_double), *((name, _C) for name in ("ascending", "state", "loop"))]


class RowWalk(ctypes.Structure):
    """Readings that are followed from piece to piece, for rows.py; see cpu/row.h."""

    _fields_ = [*((name, _P) for name in ("walk", "places", "firsts", "map", "readings", "head", "differs", "different", "left", "tokens",
                                          "groups", "pairs", "leaves", "vec", "known", "values", "lines", "fresh", "asked")),
                *((name, _I) for name in ("room", "at", "size", "work", "full", "num_different", "num_left", "leaves_out", "num_tokens", "num_pairs",
                                          "num_leaves", "unknown", "known_size", "num_known", "first_line", "num_fresh", "num_asked", "num_joined"))]


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
    "nano_row_exits": [ctypes.POINTER(RowWalk), _C, _C, *[_P] * 5, _I, _I],
    "nano_row_follow": [ctypes.POINTER(RowWalk), _C],
    **dict.fromkeys(("nano_row_settle", "nano_row_values", "nano_row_forget"), [ctypes.POINTER(RowWalk)]),
    "nano_row_known": [ctypes.POINTER(RowWalk), _P, _I],
    "nano_mask": [ctypes.POINTER(Grammars), _P, _I, _P, _P, _I, _C],
    "nano_silu_mul": [_P] * 2 + [_I] * 3 + [_C, _C],
}


COUNTING = ("nano_look_up", "nano_trie_walk", "nano_join_maps", "nano_row_follow", "nano_row_settle", "nano_row_values")     # what returns a number


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
        getattr(loaded, name).restype = _I if name in COUNTING else None
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
    FOLLOWED, END_PLACE, TOO_LONG, LEFT_OUT, ASK_LINES, MORE_KNOWN = 0, 2, 3, 4, 5, 6      # as in cpu/row.h
    READINGS, NARROW = 1 << 18, 1 << 12         # readings of a row, and from the root
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
                           different=np.empty(nodes, np.int32), left=np.empty((64, 4), np.int32), leaves=np.empty((room, 4), np.int32),
                           pairs=np.empty(room, np.int64), fresh=np.empty((room, 2), np.int32),
                           **{name: np.empty(room, np.int32) for name in ("tokens", "groups", "values", "lines", "asked")})
        for name, array in self._found.items():
            setattr(self._row, name, array.ctypes.data)

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
        [2, states + 1]: accepts, expanded. Returns states that have to be expanded first, none at the end. OverflowError: the result has more than
        32,767 classes."""
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
            self._walk.accepts, self._walk.expanded = flags.ctypes.data, flags.ctypes.data + flags.shape[1]

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

    def read(self, seeds: list[tuple[int, int, int, bool, int]], exits: list[tuple[int, object, int]], base: np.ndarray | None,
             vec: np.ndarray | list[tuple] | None, builder) -> tuple[np.ndarray | None, np.ndarray, np.ndarray, list[int], list] | int | None:
        """Which tokens end in which readings, and the values of these. seeds (state, place, x, whether it may be long, beside): from the root on, all
        (SOLE), or only what differs from the state `beside`, whose template `base` has. exits (place, automaton.NodeSet, x): from where pieces end.
        base int16 [V]: a class of each token, told apart too; vec: of each class whether it has a value, int32, or of each but the first the leaf
        that it is. builder: a rows.RowBuilder, which is asked for what is not known.

        (vec, of leaves their lines; tokens int32, ascending; the value of each, or ~group; of each group, if there is one, a group before it, or
        ~class, << 32 | a leaf; of each leaf place, state, begun, x). ~(class + INSTEAD): nothing of the class holds. Of more than a row should have:
        the index of the seed that leads to them, or None; -1: what was left out is new."""
        with self.lock:
            places, row = builder.places, self._row
            row.leaves_out, row.num_known = builder.leaves_out, places.num_known
            try:
                if isinstance(vec, list):
                    vec = self._lines_of(vec, builder, places)
                self._look(builder.automaton, places)
                row.first_line = builder.tables.lines.size
                return self._read(seeds, exits, base, vec, builder, places)
            except BaseException:
                row.num_known = places.forget()     # it may name lines that were never written
                raise
            finally:
                places.num_known = row.num_known
                self._library.nano_row_forget(row)

    def _read(self, seeds, exits, base, vec, builder, places) -> tuple | int | None:
        row, automaton, last = self._row, builder.automaton, len(seeds) - 1 if not exits else -1
        row.map, row.vec = (None, None) if base is None else (base.ctypes.data, vec.ctypes.data)
        how = self.FOLLOWED
        for i, (state, place, x, is_long, beside) in enumerate(seeds):
            automaton.expand(state)
            self._look(automaton, places)
            row.room = self.READINGS if is_long else min(row.size + self.NARROW, self.READINGS)
            self._library.nano_row_begin(row, state, place, x, beside)
            how = self._follow(automaton, places, i == last)
            if how == self.TOO_LONG:
                return None if is_long else i
        row.room = self.READINGS
        for place, ends, x in exits:
            places.end(place)
            self._look(automaton, places)
            ranks, begun, more = ends.counts or (None, None, 0)
            nodes, counts = (ends.nodes, ends.count) if ends.members is None else (None, None)
            self._library.nano_row_exits(row, place, x, *map(_address, (ends.members, ranks, begun, nodes, counts)), ends.size, more)
        if last < 0:
            how = self._follow(automaton, places, True)
            if how == self.TOO_LONG:
                return None
        found = self._found
        if how == self.LEFT_OUT:
            if builder.leave(found["left"][: row.num_left].tolist()):
                return -1
            how = self._library.nano_row_settle(row)
        self._settle(how, builder, places)
        n, joined = row.num_tokens, row.num_joined
        return (vec, found["tokens"][:n].copy(), found["values"][:n].copy(), found["pairs"][: row.num_pairs].tolist() if joined else [],
                found["leaves"][: row.num_leaves].tolist() if joined else [])

    def _follow(self, automaton, places, last: bool) -> int:
        row = self._row
        while how := self._library.nano_row_follow(row, last):
            if how > self.END_PLACE:
                return how
            automaton.expand(row.unknown) if how == self.EXPAND else places.end(row.unknown)
            self._look(automaton, places)
        return how

    def _settle(self, how: int, builder, places) -> None:
        """What the values lead to, that are new."""
        row, found = self._row, self._found
        while how == self.MORE_KNOWN:
            self._held["before"] = before = places.known
            places.known = np.full((2 * len(before), 4), -1, np.int32)
            self._look(builder.automaton, places)
            self._library.nano_row_known(row, before.ctypes.data, len(before))
            how = self._library.nano_row_settle(row)
        if row.num_fresh:
            builder.take(found["fresh"][: row.num_fresh].tolist())
        if how == self.ASK_LINES:
            asked = found["asked"][: row.num_asked]
            found["lines"][asked] = builder.lines(found["leaves"][asked].tolist())
            self._library.nano_row_values(row)

    def _lines_of(self, leaves: list[tuple], builder, places) -> np.ndarray:
        """0, and the lines of leaves: as if each were a token's."""
        row, found, n = self._row, self._found, len(leaves)
        self._look(builder.automaton, places)
        found["leaves"][:n], found["pairs"][:n], found["groups"][:n] = leaves, np.arange(-1 << 32, n - (1 << 32)), np.arange(n)
        row.num_leaves, row.num_tokens, row.num_pairs, row.vec, row.first_line = n, n, n, None, builder.tables.lines.size
        self._settle(self._library.nano_row_settle(row), builder, places)
        return np.concatenate([[0], found["lines"][:n]], dtype=np.int32)

    def _look(self, automaton, places) -> None:
        self._see(automaton.delta, automaton._flags)
        if self._held.get("places") is not places.table or self._held.get("firsts") is not places.firsts:
            self._held["places"], self._held["firsts"] = places.table, places.firsts
            self._row.places, self._row.firsts = places.table.ctypes.data, places.firsts.ctypes.data
        if self._held.get("known") is not places.known:
            self._held["known"] = places.known
            self._row.known, self._row.known_size = places.known.ctypes.data, len(places.known)

    def join(self, a: np.ndarray, b: np.ndarray, classes_a: int, classes_b: int) -> tuple[np.ndarray, np.ndarray, list[int]] | None:
        """Two maps int16 [V] as one: (the class of each token, the classes' sizes, a * classes_b + b of each; the first is 0). None: too many."""
        out = self._map() if len(a) == self._walk.num_tokens else np.empty_like(a)
        sizes, keys = np.empty(1 << 15, np.int32), np.empty(min(classes_a * classes_b, 1 << 15), np.int64)
        found = self._library.nano_join_maps(*map(_address, (a, b)), len(a), classes_a, classes_b, *map(_address, (out, sizes, keys)))
        return None if found < 0 else (out, sizes[:found].astype(np.int64), keys[:found].tolist())


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def few(dtype: torch.dtype, quantised: bool, size: int) -> int:
    """Tokens up to which nano_linear (and so nano_layers) is as fast as torch's product of `size` inputs, or faster; int8: as making floats first."""
    if dtype != torch.bfloat16 or platform.machine() not in ("x86_64", "AMD64"):
        return 32 if quantised else 4
    # On tiles torch's blocks keep wide rows in the cache; without tiles it is never faster
    return 512 if "AMX" in library().features and size >= 2048 and not quantised else ANY


def takes(x: torch.Tensor) -> bool:
    """Whether the library computes on x: each row (the last axis) must be contiguous."""
    return x.device.type == "cpu" and x.dtype in DTYPES and x.stride(-1) == 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for march in ("native", "x86-64-v4", "x86-64-v3"):
        print(f"{march}: {getattr(_library(march), 'features', 'no library')}")
