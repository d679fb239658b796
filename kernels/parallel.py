"""Compiles tiles of kernels in processes of their own: several at a time, and none takes us down with it.

Compilers crash, and compile some candidates for minutes. Each process takes one task after the other through a pipe;
one that dies or takes too long is replaced, and its task has an error for a result.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from torchflash.kernels import compiling
from torchflash.kernels.configs import Tile

PATIENCE = 600.0  # seconds for a task


class Task(NamedTuple):
    """Compile a kernel with a tile for a GPU; without a tile, with that of the built-in table."""

    case: compiling.Case
    kernel: str
    tile: Tile | None
    capability: int


class Done(NamedTuple):
    """The tile that was compiled and what each launch takes, or an error of one line."""

    tile: Tile | None
    resources: tuple[compiling.Resources, ...] = ()
    error: str | None = None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(tasks: Sequence[Task], jobs: int | None = None) -> Iterator[tuple[int, Done]]:
    """(index of the task, its result), as they come. Never raises for a task; no process outlives the iterator."""
    waiting = deque(enumerate(tasks))
    workers = [_Worker() for _ in range(min(jobs or cores(), len(tasks)))]
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in workers:
            _give(worker, waiting, busy)
        while busy:
            ready = wait(list(busy), timeout=1.0)
            late = [c for c, worker in busy.items() if c not in ready and time.monotonic() > worker.deadline]
            for connection in [*ready, *late]:
                assert isinstance(connection, Connection)
                worker = busy.pop(connection)
                index, task = worker.at
                done = worker.result() if connection in ready else f"took more than {PATIENCE:.0f} seconds to compile"
                if isinstance(done, str):
                    worker.stop()
                    done = Done(task.tile, error=done)
                yield index, done
                if waiting and worker.stopped:
                    worker = _Worker()
                    workers.append(worker)
                if waiting:
                    _give(worker, waiting, busy)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # forks would share the state of CUDA
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.deadline, self.stopped = 0.0, False
        self.at: Any = None  # (index, task)

    def result(self) -> Done | str:
        """What it has to say, or why it cannot."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return "the compiler crashed"

    def stop(self) -> None:
        if not self.stopped:
            self.process.kill()
            self.process.join()
            self.connection.close()
        self.stopped = True


def _give(worker: _Worker, waiting: deque[tuple[int, Task]], busy: dict[Connection, _Worker]) -> None:
    worker.at = waiting.popleft()
    worker.deadline = time.monotonic() + PATIENCE
    try:
        worker.connection.send(worker.at[1])
    except OSError:  # it is dead: reading will tell
        pass
    busy[worker.connection] = worker


def _work(connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; ours is stopped by its parent
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # compilers print their whole input when they fail
        os.dup2(nowhere, stream.fileno())
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(compile_one(task))


def compile_one(task: Task) -> Done:
    """What a worker does with a task."""
    try:
        problem = task.case.problem()
        tile = task.tile or compiling.built_in(problem, task.kernel, task.capability)
        found = compiling.compile_tile(problem, task.kernel, tile, task.capability)
    except Exception as e:
        return Done(task.tile, error=one_line(e))
    return Done(tile, tuple(replace(r, source="", asm=None) for r in found))


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
