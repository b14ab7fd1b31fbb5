"""Devices that are not CUDA take the same ways: steps, guards, searches and trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.seen import Seen, world

import oomkit
from device import CUDA, MIB, MPS, PRIVATE, ROWS, XPU, Body, Device, out_of_memory, run
from oomkit import _C

NAMES = {CUDA: "cuda", XPU: "xpu", MPS: "mps", PRIVATE: "privateuseone"}


class Module:
    """torch.<name> of a type of device: what the engine asks of it."""

    def __init__(self, fake: Device) -> None:
        self.fake, self.captures = fake, 0

    def current_device(self) -> int:
        return self.fake.index

    def is_initialized(self) -> bool:
        return bool(self.fake.initialized)

    def is_current_stream_capturing(self) -> bool:
        self.captures += 1
        return bool(self.fake.capturing)


def installed(fake: Device, type_: int, index: int = 0) -> Module:
    fake.install(type_, index)
    module = Module(fake)
    if type_ in (XPU, MPS):
        real = getattr(torch, NAMES[type_])
        names = ("current_device", "is_current_stream_capturing", "is_initialized")
        for name in names if type_ == XPU else ():
            fake.monkeypatch.setattr(real, name, getattr(module, name))
    else:
        fake.monkeypatch.setattr(torch, NAMES[type_], module, raising=False)
    generator = torch.Generator()
    fake.monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generator)
    if type_ != CUDA:
        fake.monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _none_here)
    return module


def _none_here() -> None:
    raise RuntimeError("Tried to instantiate dummy base class _cuda_isCurrentStreamCapturing")


OTHERS = pytest.mark.parametrize(("type_", "index"), [(XPU, 1), (PRIVATE, 2), (MPS, 0)])


@OTHERS
def test_a_step_asks_its_own_device_for_a_capture(fake: Device, type_: int, index: int) -> None:
    """In a build for another device that question of torch.cuda raises."""
    module = installed(fake, type_, index)
    body = Body(out_of_memory("XPU out of memory. Tried to allocate 2.00 GiB."))
    step = run(body)
    assert body.sizes == [8, 4, 4] and step.records[0].peak_allocated is not None
    assert (module.captures > 0) is (type_ != MPS), "torch.mps captures nothing"


def test_a_build_for_xpu_without_its_graphs_captures_nothing(fake: Device) -> None:
    module = installed(fake, XPU)
    fake.monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", _none_here)
    body = Body(out_of_memory())
    run(body)
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert body.sizes == [8, 4, 4] and fake.empty_calls == 2 and module.captures == 0


def test_an_xpu_graph_is_not_recovered_into(fake: Device) -> None:
    installed(fake, XPU)
    fake.capturing = True
    body = Body(out_of_memory())
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="graph is being captured"):
        oomkit.auto_batch(body)(ROWS)
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert body.sizes == [8] and fake.empty_calls == 0
    fake.capturing = False
    run(Body())
    assert fake.empty_calls == 1


@OTHERS
def test_a_guard_measures_and_flushes_the_device_in_use(
    fake: Device, type_: int, index: int
) -> None:
    installed(fake, type_, index)
    _C.device_budget_set(type_, index, 1 << 40)
    with oomkit.guard(on_oom="skip") as guard:
        torch.empty(8 * MIB, dtype=torch.uint8)
        raise out_of_memory()
    (record,) = guard.records
    assert record.peak_allocated - record.baseline >= 8 * MIB
    assert fake.empty_calls == 1 and record.budget == 1 << 40


@OTHERS
def test_a_report_names_the_device(fake: Device, type_: int, index: int) -> None:
    installed(fake, type_, index)
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard():
        raise out_of_memory()
    assert caught.value.report.device == f"{NAMES[type_]}:{index}"
    step = oomkit.auto_batch(Body(*[out_of_memory()] * 9))
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory) as gave_up:
        step(ROWS)
    assert gave_up.value.report.device == f"{NAMES[type_]}:{index}"


@OTHERS
def test_a_search_flushes_the_device_in_use(fake: Device, type_: int, index: int) -> None:
    installed(fake, type_, index)

    def train(batch_size: int) -> int:
        if batch_size > 15:
            raise out_of_memory()
        return batch_size

    found: Callable[[], Any] = oomkit.find_executable_batch_size(train, starting_batch_size=16)
    assert found() == 14 and fake.empty_calls == 1


@OTHERS
def test_a_trial_is_told_of_the_device_in_use(fake: Device, type_: int, index: int) -> None:
    installed(fake, type_, index)

    def objective() -> None:
        torch.empty(8 * MIB, dtype=torch.uint8)
        raise out_of_memory()

    told = _C._trial(objective, (), {}, (), None, False)
    assert told[-1] == (type_, index) and told[11] - told[10] >= 8 * MIB


def test_a_device_that_is_not_in_use_is_not_the_default(fake: Device) -> None:
    installed(fake, XPU)
    fake.initialized = 0
    with oomkit.guard() as guard:
        torch.empty(8 * MIB, dtype=torch.uint8)
    assert fake.stats_calls == 0 and guard.records[0].peak_allocated is not None


def test_cuda_beside_a_backend_that_is_torchs_accelerator(fake: Device) -> None:
    """Its wait and its figures are its own then, not those of the one that torch means."""
    fake.install()
    patch = fake.monkeypatch.setattr
    patch(torch._C, "_accelerator_getAccelerator", lambda: torch.device("privateuseone"))
    patch(torch.cuda, "synchronize", lambda index: fake.note("cuda's wait"))
    patch(torch.cuda, "mem_get_info", lambda index: (7 * MIB, 9 * MIB))
    found = oomkit.memory("cuda:0")
    assert (found.free, found.total) == (7 * MIB, 9 * MIB)
    sizes: Seen[int] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            world.set(fake, pending=MIB)
            raise out_of_memory()
        return x * 2

    run(body)
    assert sizes == [8, 4, 4] and fake.events == [("cuda's wait", 0)]
