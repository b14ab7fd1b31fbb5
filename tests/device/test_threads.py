"""Windows of several threads on one device end in any order: each sees its own peak, and none is
left in the list when the call whose frame it lies in has gone."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.seen import Seen

import oomkit
from device import MIB, ROWS, Body, Device, out_of_memory, run


class Worker:
    """A thread that does what it is told, one thing after the other."""

    def __init__(self) -> None:
        self.todo: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.done: queue.Queue[BaseException | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        while (what := self.todo.get()) is not None:
            try:
                what()
            except BaseException as error:
                self.done.put(error)
            else:
                self.done.put(None)

    def do(self, what: Callable[[], Any]) -> None:
        self.todo.put(what)
        error = self.done.get(timeout=60)
        if error is not None:
            raise error

    def end(self) -> None:
        self.todo.put(None)
        self.thread.join()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_windows_end_in_any_order(cuda: Device, order: tuple[int, ...]) -> None:
    """Opened in turn, with 8, 4 and 2 MiB allocated and freed after each."""
    workers = [Worker() for _ in range(3)]
    guards = [oomkit.guard() for _ in workers]
    try:
        for worker, guard, size in zip(workers, guards, (8, 4, 2), strict=True):
            worker.do(guard.__enter__)
            worker.do(lambda size=size: torch.empty(size * MIB, dtype=torch.uint8))
        for i in order:
            workers[i].do(lambda i=i: guards[i].__exit__(None, None, None))
    finally:
        for worker in workers:
            worker.end()
    for guard, size in zip(guards, (8, 4, 2), strict=True):
        (record,) = guard.records
        assert size * MIB <= record.peak_allocated - record.baseline < (size + 1) * MIB
    # Nothing is left of them: the next windows are written to where theirs were.
    for _ in range(3):
        step = run(Body())
        assert step.records[0].peak_allocated - step.records[0].baseline < MIB


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_two_threads_overlap(cuda: Device, fails: bool) -> None:
    """Their windows lie on the stacks of two threads: the first to begin is the first to end."""
    begun, go_on = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    peaks: list[int] = [0, 0]

    def train(i: int) -> None:
        tries: Seen[int] = Seen()

        def body(x: torch.Tensor) -> torch.Tensor:
            block = torch.empty((8 - 6 * i) * MIB, dtype=torch.uint8)
            begun[i].set()
            go_on[i].wait(60)
            tries.append(len(x))
            if fails and len(tries) == 1:
                raise out_of_memory()
            return x * 2 + block[:0].sum()

        with torch.no_grad():
            step = oomkit.auto_batch(body)
            assert torch.equal(step(ROWS), ROWS * 2)
        peaks[i] = step.records[0].peak_allocated - step.records[0].baseline

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for i, thread in enumerate(threads):
        thread.start()
        assert begun[i].wait(60)
    for i, thread in enumerate(threads):
        go_on[i].set()
        thread.join(60)
        assert not thread.is_alive()
    assert peaks[0] >= 8 * MIB and peaks[1] >= 2 * MIB
    assert run(Body()).records[0].peak_allocated is not None
