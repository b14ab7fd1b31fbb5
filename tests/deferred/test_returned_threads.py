"""Losses returned to a caller, whose backwards run in several threads at the same time."""

from __future__ import annotations

import _thread
import threading
from typing import Any

import pytest
import torch

import oomkit
from deferred.test_returned import close, grads, loss_of, plain, world
from oomkit.testing import inject_oom


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, here: Any, go: Any) -> torch.Tensor:
        ctx.events = here, go
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        here, go = ctx.events
        here.set()
        assert go.wait(30)
        return g, None, None


@pytest.mark.parametrize("first_ends_first", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_a_backward_while_another_threads_is_running(k: int, first_ends_first: bool) -> None:
    """That one knows of all losses that wait, but it reaches its own only."""
    other, x, y = world()
    model, _, _ = world()
    here, go = threading.Event(), threading.Event()
    mine = oomkit.auto_batch(loss_of(model), accumulation_steps=k)(x, y)
    theirs = _Waits.apply(oomkit.auto_batch(loss_of(other))(x, y), here, go)
    thread = threading.Thread(target=theirs.backward)
    if first_ends_first:
        mine.register_hook(lambda g: (go.set(), thread.join())[0])  # type: ignore[func-returns-value]
    thread.start()
    assert here.wait(30)
    with inject_oom(nth=4, phase="backward") as fault:
        mine.backward()
    assert close(grads(model), plain())
    assert fault.fired or k == 2
    go.set()
    thread.join()
    assert close(grads(other), plain())
    assert oomkit._C.phase_set(0) == 0  # a phase is a thread's own


def test_a_thread_that_threading_does_not_know() -> None:
    """It is a user's like any other, even while another thread's backward is protected."""
    other, x, y = world()
    model, _, _ = world()
    here, go = threading.Event(), threading.Event()
    theirs = _Waits.apply(oomkit.auto_batch(loss_of(other))(x, y), here, go)
    waiting = threading.Thread(target=theirs.backward)
    waiting.start()
    assert here.wait(30)
    mine = oomkit.auto_batch(loss_of(model))(x, y)
    ended = _thread.allocate_lock()
    ended.acquire()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with inject_oom(nth=4, phase="backward"):
                mine.backward()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    _thread.start_new_thread(run, ())
    assert ended.acquire(timeout=30)
    go.set()
    waiting.join()
    assert not errors
    assert close(grads(model), plain()) and close(grads(other), plain())
