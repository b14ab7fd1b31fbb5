"""Runs of one contender, each in a process of its own.

A contender has a process that imports its package and forks another for each run: no
run finds what an earlier one has left, no contender pays for another's objects in its
garbage collections, and nothing is imported twice. Runs that train have one of their own:
the first optimizer makes torch import its compiler, a second each time and many objects.
"""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import repeat
from multiprocessing.connection import Connection
from typing import Any

import torch

import oomkit

from .watch import Course, Enough, Errors, Watch, allocated
from .workloads import Work, tiny

FORK = multiprocessing.get_context("fork")
OOMS = 100


def run(
    adapter: Any,
    work: Work,
    reference: Any,
    budget: int,
    changes: dict[str, Any],
    beside: tuple[int, int] | None = None,
    brief: bool = False,
) -> Course:
    work = copy.copy(work)
    for name, value in changes.items():
        setattr(work, name, value)
    Errors.install()
    with oomkit.limit_memory(budget, device="cpu"):
        watch = Watch(work, reference, beside, brief)
        try:
            (adapter.train if work.training else adapter.evaluate)(work)
        except Enough:
            pass
        except Exception as error:  # whatever a contender dies of is a finding
            watch.course.died = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return watch.finish()


def peak(adapter: Any, work: Work) -> tuple[int, int]:
    """Bytes of the model and of its whole steps, the longest batch included."""
    work = copy.copy(work)
    work.order = [longest(work), longest(work)]
    found = []
    with oomkit.limit_memory(2**50, device="cpu"):
        start = allocated()
        work.built = lambda *_: found.append(allocated())
        (adapter.train if work.training else adapter.evaluate)(work)
        highest = oomkit.memory("cpu").peak_allocated
    assert highest is not None
    return found[0] - start, highest - start


def longest(work: Work) -> int:
    """The batch that needs most memory."""
    widths = [x.shape[1] for x, _, _ in work.batches()]
    return max(range(len(widths)), key=widths.__getitem__)


def leak(adapter: Any, ooms: int) -> tuple[int, int]:
    """Bytes still alive after runs that met one out-of-memory error each, and how many of
    them died of it."""
    work = tiny()
    with oomkit.testing.inject_oom(nth=10**9, min_bytes=100_000) as counted:
        adapter.train(work)
    gc.collect()
    before, fired, died = allocated(), 0, 0
    for turn in range(ooms):
        nth = 1 + turn * 7 % counted.seen  # of forward and backward, whoever calls them
        with oomkit.testing.inject_oom(nth=nth, min_bytes=100_000) as injected:
            try:
                adapter.train(work)
            except torch.OutOfMemoryError:
                died += 1
        fired += injected.fired
    if fired < ooms:
        raise AssertionError(f"only {fired} of {ooms} errors were made")
    gc.collect()
    return allocated() - before, died


def block(call: Callable[[Any], Any], batch: Any, count: int) -> float:
    start = time.process_time_ns()
    for _ in repeat(None, count):
        call(batch)
    return (time.process_time_ns() - start) / count


def healthy(adapter: Any, turns: int) -> float | None:
    """Nanoseconds that a call which has all the memory costs over the bare function."""
    if adapter.healthy is None:
        return None

    def function(batch: Any) -> Any:
        return batch

    batch, call = torch.zeros(8, 4), adapter.healthy(function)
    count = max(3, min(2000, int(2e6 / (block(call, batch, 3) + 1))))
    pairs = [
        (block(call, batch, count), block(function, batch, count)) for _ in range(max(3, turns))
    ]
    return statistics.median(mine - bare for mine, bare in pairs)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns in a process that is forked for it."""
    ours, theirs = FORK.Pipe()

    def child() -> None:
        try:
            theirs.send(function(*args))
        except BaseException:
            theirs.send(RuntimeError(traceback.format_exc()))

    process = FORK.Process(target=child)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return RuntimeError(f"the process ended with {process.exitcode}")
    finally:
        process.join()


JOBS: dict[str, Callable[..., Any]] = {"run": run, "peak": peak, "leak": leak, "healthy": healthy}


def serve(
    name: str, training: bool, works: list[Work], references: list[Any], pipe: Connection
) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        adapter = importlib.import_module(f"{__package__}.adapters.{name}")
    except ImportError as error:
        pipe.send(error)
        return
    pipe.send(adapter.NAME)
    if training:
        tiny().build()
    parent = os.getppid()
    while True:
        while not pipe.poll(5):  # brothers hold its other end, too: no end of file comes
            if os.getppid() != parent:
                return
        job, index, args = pipe.recv()
        if job == "run":
            args = (works[index], references[index], *args)
        elif job == "peak":
            args = (works[index],)
        pipe.send(in_child(JOBS[job], adapter, *args))


class Contender:
    """A contender's two processes, asked from here."""

    def __init__(self, module: str, works: list[Work], references: list[Any]) -> None:
        self.module, self.works = module, works
        self.pipes: dict[bool, Connection] = {}
        self.processes = []
        for training in (False, True):
            self.pipes[training], theirs = FORK.Pipe()
            # No daemon: it has children of its own. close() ends it.
            process = FORK.Process(target=serve, args=(module, training, works, references, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
        self.name = [pipe.recv() for pipe in self.pipes.values()][0]

    def pipe(self, job: str, index: int) -> Connection:
        training = self.works[index].training if job in ("run", "peak") else job == "leak"
        return self.pipes[training]

    def begin(self, job: str, index: int, *args: Any) -> None:
        self.pipe(job, index).send((job, index, args))

    def end(self, job: str, index: int) -> Any:
        found = self.pipe(job, index).recv()
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, job: str, index: int = 0, *args: Any) -> Any:
        self.begin(job, index, *args)
        return self.end(job, index)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
