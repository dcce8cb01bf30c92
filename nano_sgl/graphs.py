"""Graphs: a step launched as one thing, where launching its kernels one by one takes longer than running them.

A decode step of an 8B model is some 300 kernels of a few microseconds each, and a host needs longer to launch them than a GPU to run them. A CUDA
graph is such a list, recorded once and launched in one call. What was recorded is replayed to the letter: the same kernels, grids, addresses and
numbers. So a step can be replayed only where all that differs between it and the recorded one are *values on the device*:

      frame      what the host fixes about a step: lengths of its arrays, which groups sample how, whose tables. Padded, so that many steps share it
      buffer     the host's numbers of a step, one int64 array that is copied to where the graph reads it

      buffer ---copy---> [ place ids | forward | sample, mask, verify ] --- event --- [ guess ]        two stages, so that each can be timed
                            reads and writes the device rows, pools and tables that live as long as the engine

Padding are tokens of row 0, which belongs to nobody: each is a row of one token that stores its KV in slot 0 and is sampled for nobody. Attention
reads the number of its work items from the device (attention.py), so a frame does not say how many there are, only for how many there is room.

  lazily     A frame is recorded when it comes for the second time. The first time it runs as any step does, which also compiles its kernels.
  bounded    MAX_GRAPHS of them, of up to MAX_TOKENS tokens each; the one that was not used for longest goes. They share one pool of memory.
  failing    A frame that cannot be recorded (a drafter that looks at the device, no memory left) runs as before, and is not tried again.

Invariant: with and without graphs a step does the same to the same numbers. On a CPU there is nothing to win, and a FakeGraph stands in for tests:
it runs the recorded frame again over the new buffer, so what leaks past the frame into a step shows. Cost: padding computes at most half a step
more; a replay is a copy and a launch. Source: CUDA graphs in vLLM and SGLang (2023-2024), which record decode steps by batch size.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

log = logging.getLogger("nano_sgl")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)   # what tokens, samples and rows of a step are padded to
MAX_TOKENS = SIZES[-1]
MAX_GRAPHS = 64
MAX_SEEN = 4096             # frames that are remembered without a graph
FREE_BYTES = 1 << 30        # of the GPU that stay free: below, nothing more is recorded

Stage = Callable[[torch.Tensor, Any], Any]      # (buffer, what the stage before left) -> what it leaves


def bucket(count: int) -> int:
    """The least of SIZES that is not less."""
    return next(size for size in SIZES if size >= count)


class CudaGraph:
    """Stages, recorded one by one over a buffer of their own."""
    pool: Any = None

    def __init__(self, stages: Sequence[Stage], buffer: torch.Tensor):
        """Records, runs nothing. RuntimeError where a stage waits for the device, or memory is short."""
        if torch.cuda.mem_get_info()[0] < FREE_BYTES:
            raise RuntimeError(f"less than {FREE_BYTES >> 20} MiB are free")
        CudaGraph.pool = CudaGraph.pool or torch.cuda.graph_pool_handle()
        self.buffer, self.graphs, self.left = buffer.clone(), [], None
        for stage in stages:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=CudaGraph.pool, capture_error_mode="thread_local"):   # other threads go on using the GPU
                self.left = stage(self.buffer, self.left)
            self.graphs.append(graph)

    def replay(self, buffer: torch.Tensor, between: Callable[[], None]) -> Any:
        """What the stages leave, in tensors that the next replay overwrites. `between` is called before each stage but the first, and at the end."""
        self.buffer.copy_(buffer, non_blocking=True)
        for graph in self.graphs:
            graph.replay()
            between()
        return self.left


class FakeGraph:
    """For a machine without a GPU: the recorded stages, run again."""

    def __init__(self, stages: Sequence[Stage], buffer: torch.Tensor):
        self.stages, self.buffer = list(stages), buffer.clone()

    def replay(self, buffer: torch.Tensor, between: Callable[[], None]) -> Any:
        """As CudaGraph.replay."""
        self.buffer.copy_(buffer)
        return run(self.stages, self.buffer, between)


def run(stages: Sequence[Stage], buffer: torch.Tensor, between: Callable[[], None]) -> Any:
    """Stages without a graph: as CudaGraph.replay."""
    left = None
    for stage in stages:
        left = stage(buffer, left)
        between()
    return left


class Graphs:
    """The graphs of an engine, by frame."""

    def __init__(self, make: type, most: int = MAX_GRAPHS):
        """make: CudaGraph or FakeGraph."""
        self.make, self.most = make, most
        self.made: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self.seen: collections.OrderedDict[Hashable, bool] = collections.OrderedDict()  # frames without one: whether recording has failed
        self.replays = self.steps = 0

    def run(self, key: Hashable, stages: Sequence[Stage], buffer: torch.Tensor, between: Callable[[], None]) -> Any:
        """Run stages that are the same wherever `key` is: what the last of them leaves, to be used up before the next `run`."""
        self.steps += 1
        graph = self.made.get(key)
        if graph is None and self.seen.get(key) is False:
            graph = self._record(key, stages, buffer)
        if graph is None:
            self.seen.setdefault(key, False)
            if len(self.seen) > MAX_SEEN:
                self.seen.popitem(last=False)
            return run(stages, buffer.clone(), between)     # where a graph would have it: kernels are compiled for how it is aligned
        self.made.move_to_end(key)
        self.replays += 1
        return graph.replay(buffer, between)

    def _record(self, key: Hashable, stages: Sequence[Stage], buffer: torch.Tensor) -> Any:
        try:
            self.made[key] = self.make(stages, buffer)
        except Exception:
            self.seen[key] = True
            log.warning("a step could not be recorded as a graph, and runs without", exc_info=True)
            return None
        del self.seen[key]
        if len(self.made) > self.most:
            self.made.popitem(last=False)
        return self.made[key]


def _demo() -> None:
    """Steps of a toy engine: what is recorded, and what is replayed."""
    total = torch.zeros(1, dtype=torch.int64)

    def stage(buffer: torch.Tensor, _: None) -> torch.Tensor:
        return total.add_(buffer.sum())
    graphs = Graphs(FakeGraph, most=2)
    for numbers in ([1, 2], [3], [4, 5], [6, 7], [1], [2], [1, 1, 1], [1, 1, 1], [8, 9]):
        size = bucket(len(numbers))
        buffer = torch.tensor(numbers + [0] * (size - len(numbers)))
        before = graphs.replays, len(graphs.made)
        found = int(graphs.run(size, [stage], buffer, lambda: None))
        how = "recorded" if len(graphs.made) > before[1] else "replayed" if graphs.replays > before[0] else "run"
        print(f"{str(numbers):10} padded to {size}: {how:9} total {found}")
    print(f"{graphs.replays} of {graphs.steps} steps were graphs")


if __name__ == "__main__":
    _demo()
