"""A backward that fails for good takes back what it did itself, and nothing of another thread's."""

from __future__ import annotations

import threading

import pytest

import oomkit
from deferred.test_returned import close, grads, loss_of, plain, world
from oomkit.testing import inject_oom


def test_a_failure_leaves_the_gradients_of_another_threads_backward() -> None:
    """Theirs begins and ends while this one runs; then this one finds no memory at all."""
    expected = plain()
    model, x, y = world()
    other, _, _ = world()
    mine = oomkit.auto_batch(loss_of(model))(x, y)
    theirs = oomkit.auto_batch(loss_of(other))(x, y)
    thread = threading.Thread(target=theirs.backward)
    armed: list[inject_oom] = []

    def theirs_first(_: object) -> None:
        thread.start()
        thread.join()
        assert close(grads(other), expected)
        armed.append(inject_oom(times=None, phase="backward"))
        armed[0].__enter__()

    mine.register_hook(theirs_first)
    try:
        with pytest.raises(oomkit.OutOfMemory):
            mine.backward()
    finally:
        for fault in armed:
            fault.__exit__(None, None, None)
        oomkit._C.phase_set(0)  # it was armed inside a backward
    assert all(p.grad is None for p in model.parameters())
    assert close(grads(other), expected)
