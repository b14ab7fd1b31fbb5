"""A pluggable allocator: torch.cuda is in use, and the allocator that c10 knows never is.

`torch.cuda.memory.change_current_allocator` leaves c10's registry alone: what stands there stays
the native one, which nobody initialises. There are no statistics and no peaks; everything else is
as ever.
"""

# ruff: noqa: F811 - fixtures that are used by name

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.seen import Seen

import oomkit
from device import CUDA, MIB, ROWS, Body, Device, accelerator_error, out_of_memory, run
from device.test_recovery_unbridged import Placed, Unbridged


@pytest.fixture(params=["bridge", "without it"])
def pluggable(request: Any, fake: Device, backend: Any, monkeypatch: Any) -> Any:
    made = fake if request.param == "bridge" else Unbridged(backend, monkeypatch)
    made.install()
    made.initialized, made.cuda_in_use = 0, True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.note("flush"))
    rows = ROWS if request.param == "bridge" else ROWS.as_subclass(Placed)
    for module in ("device", __name__):
        monkeypatch.setattr(f"{module}.ROWS", rows)
    yield made
    if made is not fake:
        made.remove()


def test_it_has_no_statistics_and_the_driver_is_asked(pluggable: Device) -> None:
    found = oomkit.memory("cuda:0")
    assert (found.free, found.total) == (60 * MIB, 100 * MIB)
    assert found.allocated is found.reserved is found.peak_allocated is None
    step = run(Body())
    assert step.records[0].peak_allocated is None


def test_a_failure_waits_and_flushes_by_torchs_own_call(pluggable: Device) -> None:
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4]
    assert [event for event, _ in pluggable.events] == ["wait", "flush"]


def test_a_flush_that_fails_passes(pluggable: Device) -> None:
    error = accelerator_error("CUDA error: something else", 9)
    pluggable.raising["flush"] = error
    with torch.no_grad(), pytest.raises(torch.AcceleratorError) as caught:
        oomkit.auto_batch(Body(out_of_memory()))(ROWS)
    assert caught.value is error


def test_a_flush_without_memory_is_no_failure(pluggable: Device) -> None:
    pluggable.raising["flush"] = out_of_memory()
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4]


def test_a_step_inside_a_capture_is_the_bare_one(pluggable: Device) -> None:
    pluggable.capturing = True
    step = oomkit.auto_batch(Body())
    with torch.no_grad():
        step(ROWS)
    assert len(step.records) == 0
    body = Body(out_of_memory())
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="graph is being captured"):
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == [8] and pluggable.events == []


def test_a_lost_context_ends_it(pluggable: Device, last_error: Any) -> None:
    last_error.last_error = 700
    error = out_of_memory()
    body = Body(error)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == [8] and pluggable.events == []


def test_a_guard_means_the_device(pluggable: Device) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard() as guard:
        raise out_of_memory()
    assert caught.value.report.device == "cuda:0" and guard.records[0].baseline is None
    assert [event for event, _ in pluggable.events] == ["flush"]


def test_where_torch_says_no_nothing_is_asked(pluggable: Device) -> None:
    """Not in use yet, or in a forked child."""
    pluggable.cuda_in_use = False
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4] and pluggable.events == [] == pluggable.asked_of
    assert oomkit.memory("cuda:0").total is None
    with oomkit.guard():
        pass


def test_the_backends_that_are_no_cuda_are_not_asked_that_way(fake: Device) -> None:
    fake.install(type=CUDA)
    fake.initialized = 0
    fake.monkeypatch.setattr(torch.cuda, "default_generators", ())
    fake.monkeypatch.setattr(torch.cuda, "is_initialized", fake._refuse_init)
    with oomkit.guard():  # no generator: CUDA has never been in use
        pass


class Roomy:
    """A step on a device that has memory for `most` rows, and says nothing of it."""

    def __init__(self, most: int) -> None:
        self.most, self.sizes = most, [0]
        self.failures: Seen[int] = Seen()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            self.failures.append(len(x))
            raise out_of_memory()
        self.sizes.append(len(x))
        return x * 2


def test_the_micro_batch_grows_back_by_halves_of_what_is_not_known(pluggable: Device) -> None:
    body = Roomy(22)
    step = oomkit.auto_batch(body)
    rows = torch.arange(64.0).reshape(64, 1)
    rows = rows if type(ROWS) is torch.Tensor else rows.as_subclass(Placed)
    found: Seen[Any] = Seen()
    with torch.no_grad():
        for _ in range(60):
            body.sizes.clear()
            assert torch.equal(step(rows), rows * 2)
            found.append(max(body.sizes))
    assert found[0] == 8 and len(body.failures) == 2  # 64 and 32 rows
    assert found[:8] == [8] * 8 and found[8] == 16 and found[-1] == 22
    body.most = 21  # what has worked works no more
    with torch.no_grad():
        for _ in range(60):
            body.sizes.clear()
            step(rows)
    assert len(body.failures) == 3 and max(body.sizes) == 16
