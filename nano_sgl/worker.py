"""Worker: who runs the steps of an engine, in order, while the host prepares the next.

A GPU has a stream: work that is launched runs behind what was launched before, and the thread that launches goes on. A CPU has none, so here a
thread stands in for it; the plain loop needs neither, and runs a step where it asks for one. All three are one line of jobs to the engine:

    host      submit(n) -> future      submit(n + 1) -> future      future of n: its results, or what it failed with
    worker         [----- n -----][------ n + 1 ------]

A *job* is a step with all that the host has planned for it. It is called once, in its turn, by one thread at a time.

Invariant. What stands behind a job that failed was built on it and is not run. Cost: two hand-overs between threads a step, some 20 us.
Where it stops: both threads of a CPU want the interpreter's lock, so Python's share of a step does not overlap (`bench/overlap.py`).
Source: the forward thread of SGLang's first overlap scheduler (2024).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SHUTDOWN_S = 60.0           # a job that is still running then is left behind


class Done:
    """A Future of what has happened: a tenth of the price of one that may be waited for."""

    value: Any = None
    error: BaseException | None = None

    def set_result(self, value: Any) -> None:
        """It went well."""
        self.value = value

    def set_exception(self, error: BaseException | None) -> None:
        """It did not."""
        self.error = error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong."""
        return self.error

    def result(self, timeout: float | None = None) -> Any:
        """What came of it."""
        if self.error is not None:
            raise self.error
        return self.value


class Worker:
    """Runs jobs in the order in which they are given: on a thread of its own, or (for a GPU, whose stream is such a thread, and for the plain
    loop) where `submit` is called.

    A job that raises stops the line: what stands behind it was built on it, is not run, and ends with the same exception, until `restart`.
    """

    def __init__(self, threaded: bool):
        self._failed: BaseException | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="nano_sgl worker", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future | Done:
        """Its result or exception to come. After `close`: the exception at once."""
        future = Done() if self._thread is None or self._closed else Future()
        if isinstance(future, Done):
            self._run(job, future)
        else:
            self._jobs.put((job, future))
        return future

    def restart(self) -> None:
        """Take jobs again after one that raised. Only when all that were submitted have ended."""
        if not self._closed:
            self._failed = None

    def close(self) -> None:
        """What has not begun is not run, what has begun is waited for."""
        self._failed, self._closed = RuntimeError("the engine was shut down"), True
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(SHUTDOWN_S)

    def _run(self, job: Callable[[], Any], future: Future | Done) -> None:
        if self._failed is None:
            try:
                return future.set_result(job())
            except BaseException as error:
                self._failed = error
        future.set_exception(self._failed)

    def _loop(self) -> None:
        while (asked := self._jobs.get()) is not None:
            self._run(*asked)
            del asked  # or it would keep the engine alive while the thread sleeps


def _demo() -> None:
    """Jobs run in order beside the caller; one that fails stops the line until it is restarted."""
    worker = Worker(threaded=True)
    futures = [worker.submit(lambda i=i: 6 // (2 - i)) for i in range(4)]
    for i, future in enumerate(futures):
        print(f"job {i}: {future.exception() or future.result()}")
    worker.restart()
    print("after a restart:", worker.submit(lambda: "runs").result())
    worker.close()


if __name__ == "__main__":
    _demo()
