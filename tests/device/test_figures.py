"""Figures of a device: peaks that nest, statistics that are missing, what the planner is told."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from helpers.seen import Seen, world

import oomkit
from device import (
    CUDA,
    EFAILED,
    EOOM,
    EUNSUPPORTED,
    MIB,
    PRIVATE,
    XPU,
    Body,
    Device,
    out_of_memory,
    run,
)
from oomkit import _C

GIB = 1 << 30


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, 1)


def big(x: torch.Tensor) -> int:
    """A MiB for each row, for as long as the call runs."""
    block = torch.empty(len(x) * MIB, dtype=torch.uint8)
    return block.numel()


# --- figures ---


def test_figures_are_those_of_the_device(fake: Device) -> None:
    fake.install(live=False)
    fake.backend.set("now.allocated", 5 * MIB)
    fake.backend.set("now.reserved", 8 * MIB)
    fake.backend.set("now.peak_allocated", 6 * MIB)
    fake.backend.set("now.peak_reserved", 9 * MIB)
    found = oomkit.memory("cuda:0")
    assert found == oomkit.MemoryInfo(5 * MIB, 8 * MIB, 6 * MIB, 9 * MIB, 60 * MIB, 100 * MIB, None)


def test_a_step_resets_the_peak_once_and_the_runs_maximum_survives(cuda: Device) -> None:
    step = oomkit.auto_batch(big)
    with torch.no_grad():
        step(rows(64))
        step(rows(2))
    assert cuda.reset_calls == 2
    first, second = step.records
    assert first.peak_allocated - first.baseline >= 64 * MIB
    assert 2 * MIB <= second.peak_allocated - second.baseline < 3 * MIB
    assert first.peak_reserved >= first.peak_allocated
    assert oomkit.max_memory_allocated("cuda:0") >= first.peak_allocated


def test_reset_peaks_false_leaves_the_users_counters_alone(cuda: Device) -> None:
    step = oomkit.auto_batch(big, reset_peaks=False)
    with torch.no_grad():
        step(rows(3))
    assert cuda.reset_calls == 0
    assert step.records[0].peak_allocated is not None


def test_an_inner_window_takes_nothing_from_the_outer_one(cuda: Device) -> None:
    with oomkit.guard() as outer:
        torch.empty(8 * MIB, dtype=torch.uint8)
        with oomkit.guard() as inner:
            torch.empty(2 * MIB, dtype=torch.uint8)
    one, other = outer.records[0], inner.records[0]
    assert other.peak_allocated - other.baseline < 3 * MIB
    assert one.peak_allocated - one.baseline >= 8 * MIB


def test_two_devices_are_two(cuda: Device) -> None:
    cuda.wide_index = 1
    narrow, wide = oomkit.auto_batch(big), oomkit.auto_batch(big)
    _C.device_budget_set(CUDA, 1, 3 * GIB)
    with torch.no_grad():
        narrow(rows(1))
        wide(rows(1).double())
    assert narrow.records[0].budget is None
    assert wide.records[0].budget == 3 * GIB


@pytest.mark.parametrize("status", [EFAILED, EUNSUPPORTED])
def test_without_statistics_a_step_runs_and_recovers(cuda: Device, status: int) -> None:
    """cudaMallocAsync has not all of them, a backend out of torch's tree may have none (a pluggable
    allocator is another matter, see test_pluggable.py)."""
    cuda.stats_status = status
    sizes: Seen[Any] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            raise out_of_memory()
        return x

    step = oomkit.auto_batch(body)
    with torch.no_grad():
        step(rows(8))
        step(rows(8))
    assert sizes == [8, 4, 4, 4, 4]
    record = step.records[0]
    assert record.peak_allocated is None and record.baseline is None
    found = oomkit.memory("cuda:0")
    assert found.allocated is None and found.total == 100 * MIB


def test_a_peak_that_cannot_be_reset_is_the_runs(cuda: Device) -> None:
    cuda.reset_status = EFAILED
    step = oomkit.auto_batch(big)
    with torch.no_grad():
        step(rows(1))
    assert step.records[0].peak_allocated >= step.records[0].baseline


def test_nothing_is_asked_of_a_device_that_is_not_in_use(cuda: Device) -> None:
    cuda.initialized = 0
    step = oomkit.auto_batch(big)
    with torch.no_grad():
        step(rows(1))
    with oomkit.guard():
        pass
    assert step.records[0].peak_allocated is None
    assert oomkit.memory("cuda:0") == oomkit.MemoryInfo(*[None] * 7)
    assert oomkit.budget("cuda:0") == oomkit.Budget(*[None] * 9)
    assert cuda.reset_calls == cuda.empty_calls == 0 and cuda.events == []


def test_no_capture_is_asked_for_of_a_device_that_is_not_in_use(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask would initialise it."""

    def refuse() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    cuda.initialized = 0
    with torch.no_grad():
        oomkit.auto_batch(big)(rows(1))


@pytest.mark.parametrize("type_", [XPU, PRIVATE])
def test_other_accelerators_go_the_same_way(fake: Device, type_: int) -> None:
    fake.install(type_)
    sizes: Seen[Any] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            raise out_of_memory("XPU out of memory. Tried to allocate 2.00 GiB.")
        return x

    step = oomkit.auto_batch(body)
    with torch.no_grad():
        step(rows(8))
    assert sizes == [8, 4, 4] and fake.empty_calls == 1
    assert step.records[0].peak_allocated is not None


# --- what the planner is told ---


def _grown(cuda: Device, budget_mib: float, batch: int = 60) -> int:
    """Micro-batches that a step which begins with one row at a time settles on."""
    step = oomkit.auto_batch(big, accumulation_steps=batch)
    with torch.no_grad():
        step(rows(1))  # the baseline of a call
        base = step.records[-1].baseline
        _C.device_budget_set(CUDA, 0, base + int(budget_mib * MIB))
        for _ in range(6):
            step(rows(batch))
    return step.records[-1].accumulation_steps


def test_segments_that_grow_leave_less_of_the_budget_free(cuda: Device) -> None:
    """30 rows of 60 need 95.5 % of it."""
    base = oomkit.memory("cpu").allocated / MIB
    budget = (30.1 + 0.045 * base) / 0.955
    cuda.info = (GIB, 2 * GIB)
    assert _grown(cuda, budget) > 2
    cuda.expandable = 1
    assert _grown(cuda, budget) == 2


def test_settings_in_effect_are_asked_of_a_device_in_use(cuda: Device) -> None:
    assert not _C.device_expandable(CUDA, 0)
    cuda.expandable = 1
    assert _C.device_expandable(CUDA, 0)
    assert not _C.device_expandable(XPU, 0) and not _C.device_expandable(0, -1)
    cuda.expandable = EUNSUPPORTED
    assert not _C.device_expandable(CUDA, 0)


def _train_under(cuda: Device, step: Any, calls: int) -> int:
    with torch.no_grad():
        for _ in range(calls):
            step(rows(64))
    return step.records[-1].accumulation_steps


def test_another_process_that_leaves_gives_its_room_back(cuda: Device) -> None:
    fits = [20]

    def body(x: torch.Tensor) -> int:
        if len(x) > fits[0]:
            raise out_of_memory()
        return big(x)

    step = oomkit.auto_batch(body)
    cuda.info = (20 * MIB, 100 * MIB)  # beside another process
    assert _train_under(cuda, step, 4) == 4
    fits[0], cuda.info = 90, (90 * MIB, 100 * MIB)
    assert _train_under(cuda, step, 40) == 1
    assert step.records[-1].ooms == 0


def test_a_limit_is_no_more_than_what_the_device_has(cuda: Device) -> None:
    """The limit is larger than what another process has left."""

    def body(x: torch.Tensor) -> int:
        if len(x) > 20:
            raise out_of_memory()
        return big(x)

    _C.device_budget_set(CUDA, 0, 1 << 40)
    step = oomkit.auto_batch(body)
    cuda.info = (20 * MIB, 100 * MIB)
    assert _train_under(cuda, step, 8) == 4
    assert [record.ooms for record in step.records[1:]] == [0] * 7  # 22 rows are not tried


@pytest.mark.parametrize(("momentum", "asked"), [(0.0, 0), (0.9, 1)])
def test_the_driver_is_asked_before_a_first_state_only(
    cuda: Device, monkeypatch: pytest.MonkeyPatch, momentum: float, asked: int
) -> None:
    calls: Seen[int] = Seen()

    def info(index: int) -> tuple[int, int]:
        calls.append(index)
        return cuda.info

    monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", info)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    @oomkit.auto_batch(model=model, optimizer=optimizer)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(4):
        step(torch.zeros(8, 4))
    assert len(calls) == asked


def test_a_share_that_the_program_asked_for_is_a_limit(cuda: Device) -> None:
    cuda.fraction[0] = 0.25
    found = oomkit.budget("cuda:0")
    assert oomkit.memory("cuda:0").budget == found.limit == 25 * MIB
    _C.device_budget_set(CUDA, 0, 10 * MIB)
    assert oomkit.budget("cuda:0").limit == 10 * MIB


# --- a device that the program does not use ---


def test_the_driver_is_not_asked_of_a_device_without_a_context(cuda: Device) -> None:
    """Its answer would make one, some hundred MiB that nobody has asked for."""
    cuda.contexts = {0}
    found = oomkit.memory("cuda:1")
    assert (found.free, found.total, found.budget) == (None, None, None)
    assert oomkit.budget("cuda:1").usable is None
    cuda.index = 1
    with oomkit.guard():
        pass
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert cuda.asked_of == []
    cuda.contexts, cuda.fraction[1] = {0, 1}, 0.5
    with oomkit.guard() as guard:
        pass
    assert set(cuda.asked_of) == {1} and guard.records[0].budget == 50 * MIB


def test_cleanup_asks_no_driver(cuda: Device) -> None:
    patch = cuda.monkeypatch.setattr
    patch(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    patch(torch.accelerator, "device_count", lambda: 8)
    patch(torch.cuda, "empty_cache", lambda: setattr(cuda, "cached", 0))
    cuda.cached = 7 * MIB
    gc.collect()  # tensors of other tests would be freed too
    assert oomkit.cleanup() == 8 * 7 * MIB  # the fake has the same for each
    assert cuda.asked_of == []


def test_a_device_without_a_context_is_not_waited_for(cuda: Device) -> None:
    cuda.contexts, cuda.initialized = set(), 1

    def body(x: torch.Tensor) -> torch.Tensor:
        if not cuda.empty_calls:
            world.set(cuda, pending=MIB)
            raise out_of_memory()
        return x * 2

    run(body)
    assert cuda.events == [] and cuda.empty_calls == 1


# --- one truth about the limit ---


def test_a_share_of_the_program_is_the_limit_of_records_too(cuda: Device) -> None:
    cuda.fraction[0] = 0.5
    step = oomkit.auto_batch(Body(out_of_memory()))
    with torch.no_grad():
        step(rows(8))
    with oomkit.guard() as guard:
        pass
    assert step.records[0].budget == guard.records[0].budget == 50 * MIB
    assert oomkit.memory("cuda:0").budget == oomkit.budget("cuda:0").limit == 50 * MIB
    assert _C.device_budget(CUDA, 0) is None  # what limit_memory puts back is its own


def test_a_share_that_comes_later_is_seen_at_a_failure(cuda: Device) -> None:
    with oomkit.guard() as guard:
        pass
    assert guard.records[0].budget is None
    cuda.fraction[0] = 0.25
    with pytest.raises(torch.OutOfMemoryError) as caught, guard:
        raise out_of_memory()
    assert caught.value.report.budget == guard.records[1].budget == 25 * MIB
    body = Body(*[out_of_memory()] * 9)
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory) as gave_up:
        oomkit.auto_batch(body)(rows(8))
    assert gave_up.value.report.budget == 25 * MIB


def test_a_share_is_what_is_planned_with(cuda: Device) -> None:
    """Memory in pieces is judged by it: a tenth of 1 GiB is more than what is cached."""
    cuda.info = (1 << 40, 1 << 40)
    cuda.cached = 200 * MIB
    body = Body(out_of_memory())
    run(body)
    assert body.sizes[1] == 8  # flushed, and tried again as it was
    cuda.fraction[0] = 4 * GIB / (1 << 40)
    cuda.cached = 200 * MIB
    oomkit.memory("cuda:0")
    body = Body(out_of_memory())
    run(body)
    assert body.sizes[1] == 4


def test_our_limit_takes_the_place_of_the_share(cuda: Device) -> None:
    cuda.fraction[0] = 0.5
    with oomkit.guard() as guard:
        pass
    _C.device_budget_set(CUDA, 0, 10 * MIB)
    with guard:
        pass
    _C.device_budget_set(CUDA, 0, None)
    cuda.fraction[0] = 0.75
    with guard:
        pass
    assert [record.budget for record in guard.records] == [50 * MIB, 10 * MIB, 75 * MIB]


def test_a_healthy_step_asks_for_the_share_once(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Seen[int] = Seen()

    def share(index: int) -> float:
        calls.append(index)
        return 1.0

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share)
    step = oomkit.auto_batch(Body())
    with torch.no_grad():
        for _ in range(20):
            step(rows(2))
    assert calls == [0]


# --- allocators without statistics ---


def test_an_allocator_that_throws_is_not_asked_for_ever(cuda: Device) -> None:
    cuda.stats_status = EFAILED
    step = oomkit.auto_batch(Body())
    with torch.no_grad():
        for _ in range(20):
            step(rows(2))
    assert cuda.stats_calls == 3
    assert oomkit.memory("cuda:0").allocated is None and cuda.stats_calls == 3


def test_one_that_throws_now_and_then_is(cuda: Device) -> None:
    """It was out of memory itself, say."""
    for _ in range(3):
        for status in (EFAILED, EFAILED, 0):
            cuda.stats_status = status
            found = oomkit.memory("cuda:0").allocated
            assert (found is None) is (status == EFAILED)
    assert cuda.stats_calls == 9


def test_a_host_without_memory_says_nothing_of_the_allocator(cuda: Device) -> None:
    cuda.stats_status = EOOM
    for _ in range(5):
        assert oomkit.memory("cuda:0").allocated is None
    cuda.stats_status = 0
    assert oomkit.memory("cuda:0").allocated is not None


def test_a_reset_that_throws_is_not_asked_for_ever(cuda: Device) -> None:
    cuda.reset_status = EFAILED
    step = oomkit.auto_batch(Body())
    with torch.no_grad():
        for _ in range(20):
            step(rows(2))
    assert cuda.reset_calls == 3


# --- figures that are there for a part of the time ---


def test_statistics_that_come_inside_a_window(cuda: Device) -> None:
    """An allocator that has none before its first block."""
    cuda.stats_status = EUNSUPPORTED
    with oomkit.guard() as guard:
        torch.empty(8 * MIB, dtype=torch.uint8)
        cuda.stats_status = 0
    record = guard.records[0]
    assert record.baseline is None and record.peak_allocated is not None
    assert cuda.reset_calls == 0


def test_somebody_elses_allocator_of_the_cpu(fake: Device) -> None:
    """It has no figures and no limit; steps run and recover."""
    fake.install(index=-1).initialized = 0
    assert oomkit.memory("cpu").allocated is not None
    fake.cpu_refused = 1
    assert _C.device_held(0, -1) == (None, None)
    assert oomkit.memory("cpu").allocated is oomkit.max_memory_allocated("cpu") is None
    body = Body(out_of_memory())
    record = run(body).records[0]
    assert body.sizes == [8, 4, 4]
    assert record.baseline is record.peak_allocated is record.budget is None


def test_more_windows_of_the_cpu_than_there_is_room_for(fake: Device) -> None:
    """The innermost have no peaks, those around them still have theirs."""
    fake.install(index=-1).initialized = 0
    guards = [oomkit.guard() for _ in range(70)]
    with contextlib.ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard)
        torch.empty(8 * MIB, dtype=torch.uint8)
    peaks = [guard.records[0].peak_allocated for guard in guards]
    known = [peak for peak in peaks if peak is not None]
    assert len(known) >= 60 and peaks[len(known) :] == [None] * (70 - len(known)) != []
    assert all(
        guard.records[0].peak_allocated - guard.records[0].baseline >= 8 * MIB
        for guard in guards[: len(known)]
    )
    with oomkit.guard() as later:
        pass
    assert later.records[0].peak_allocated is not None
