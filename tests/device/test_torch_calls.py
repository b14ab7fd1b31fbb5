"""Without the bridge: figures, flush and waiting by torch's device-generic calls.

ROCm is "cuda" to torch. Tensors that say they are on an XPU or on MPS are tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.seen import Seen

import oomkit
from device import CUDA, MIB, MPS, XPU, Device, out_of_memory
from oomkit import _C


def on(name: str, count: int) -> torch.Tensor:
    """Rows of a tensor whose device is `name`."""

    class Placed(torch.Tensor):
        device = property(lambda self: torch.device(name))  # type: ignore[assignment]

    with torch.no_grad():
        return torch.zeros(count, 1).as_subclass(Placed)


class Accelerator:
    """What torch._C says of the one accelerator of its build."""

    def __init__(self, fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake, self.patch = fake, monkeypatch.setattr
        self.calls: Seen[str] = Seen()
        self.stats: Any = {
            "allocated_bytes": {"all": {"current": 5 * MIB, "peak": 7 * MIB}},
            "reserved_bytes": {"all": {"current": 5 * MIB + 512, "peak": 9 * MIB}},
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
        self.initialized: Any = True
        self.error: BaseException | None = None

    def note(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def of(self, name: str) -> Accelerator:
        core = torch._C
        self.patch(core, "_accelerator_getAccelerator", lambda: torch.device(name))
        self.patch(core, "_accelerator_isAllocatorInitialized", self._initialized)
        self.patch(core, "_accelerator_getMemoryInfo", lambda index: (30 * MIB, 50 * MIB))
        self.patch(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
        self.patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.patch(torch.xpu, "is_current_stream_capturing", lambda: False)
        self.patch(torch.xpu, "get_per_process_memory_fraction", lambda index: 1.0)
        self.patch(core, "_accelerator_synchronizeDevice", lambda index: self.note("wait"))
        self.fake.look_up("accelerator_get_stats", self._stats)
        self.fake.look_up("accelerator_reset_peak", lambda index: self.note("reset"))
        self.fake.look_up("accelerator_empty_cache", lambda: self.note("empty"))
        return self

    def settings(self, last: str | None, snapshot: Any) -> None:
        """Those last given to torch (None: it has no such call), and its snapshot."""
        name = "_accelerator_getAllocatorSettings"
        if last is None:
            self.fake.monkeypatch.delattr(torch._C, name, raising=False)
        else:
            self.patch(torch._C, name, lambda: last, raising=False)
        self.patch(torch.cuda.memory, "_snapshot", snapshot)

    def _initialized(self) -> bool:
        if isinstance(self.initialized, Exception):
            raise self.initialized
        return bool(self.initialized)

    def _stats(self, index: int) -> Any:
        if isinstance(self.stats, BaseException):
            raise self.stats
        return self.stats


@pytest.fixture
def accelerator(
    backend: Any, fake: Device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Accelerator]:
    backend.without_bridge(_C, True)
    yield Accelerator(fake, monkeypatch)
    backend.without_bridge(_C, False)


def _raise(error: BaseException) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def failing_step(sizes: list[int]) -> Any:
    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        sizes.append(len(x))
        if len(sizes) == 1:
            raise out_of_memory("XPU out of memory. Tried to allocate 2.00 GiB.")

    return step


def test_figures_reset_and_flush_of_an_xpu(accelerator: Accelerator) -> None:
    accelerator.of("xpu")
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    step(on("xpu:0", 8))
    assert sizes == [8, 4, 4]
    record = step.records[0]
    assert (record.baseline, record.peak_allocated) == (5 * MIB, 7 * MIB)
    assert record.peak_reserved == 9 * MIB
    assert accelerator.calls.count("empty") == 1 and "reset" in accelerator.calls
    assert oomkit.memory("xpu:0").free == 30 * MIB


def test_another_type_than_the_accelerators_has_no_figures(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    step(on("xpu:0", 8))
    assert sizes == [8, 4, 4] and step.records[0].peak_allocated is None
    assert accelerator.calls == []


@pytest.mark.parametrize(
    "stats", [RuntimeError("does not yet support"), {}, {"allocated_bytes": 3}, "none", None]
)
def test_statistics_that_are_missing_are_unknown(accelerator: Accelerator, stats: Any) -> None:
    accelerator.of("cuda").stats = stats
    found = oomkit.memory("cuda:0")
    assert found.allocated is None and found.peak_allocated is None
    sizes: Seen[int] = Seen()
    failing_step(sizes)(on("cuda:0", 8))
    assert sizes == [8, 4, 4]


@pytest.mark.parametrize(("error", "known"), [(MemoryError(), True), (RuntimeError(), False)])
def test_only_what_the_allocator_says_is_believed_for_good(
    accelerator: Accelerator, error: Exception, known: bool
) -> None:
    stats = accelerator.of("cuda").stats
    accelerator.stats = error
    for _ in range(4):
        assert oomkit.memory("cuda:0").allocated is None
    accelerator.stats = stats
    assert (oomkit.memory("cuda:0").allocated is not None) is known


@pytest.mark.parametrize("answer", [False, RuntimeError("INTERNAL ASSERT FAILED")])
def test_nothing_is_asked_before_it_is_in_use(accelerator: Accelerator, answer: Any) -> None:
    accelerator.of("cuda").initialized = answer
    failing_step(Seen())(on("cuda:0", 8))
    assert accelerator.calls == [] and oomkit.memory("cuda:0").total is None


def test_a_forked_child_leaves_the_parents_device_alone(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its allocator has figures still, but every call to the device would fail."""
    accelerator.of("cuda")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    step(on("cuda:0", 8))
    assert sizes == [8, 4, 4] and step.records[0].peak_allocated is None
    assert accelerator.calls == []


def test_a_flush_that_runs_out_of_memory_is_no_failure(accelerator: Accelerator) -> None:
    accelerator.of("xpu")
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    accelerator.error = out_of_memory()
    step(on("xpu:0", 8))
    assert sizes == [8, 4, 4]


def test_a_flush_that_fails_otherwise_passes(accelerator: Accelerator) -> None:
    accelerator.of("xpu")
    step = failing_step(Seen())
    accelerator.patch(torch._C, "_accelerator_synchronizeDevice", lambda index: None)
    accelerator.fake.look_up("accelerator_empty_cache", _raise(KeyError("lost")))
    with pytest.raises(KeyError, match="lost"):
        step(on("xpu:0", 8))


def test_an_mps_allocator_of_its_own_kind(accelerator: Accelerator) -> None:
    """Up to some release of torch MPS is not among the allocators that can be asked."""
    accelerator.of("mps").initialized = RuntimeError("Allocator for mps is not a DeviceAllocator.")
    patch, mps = accelerator.patch, torch.mps
    patch(mps, "current_allocated_memory", lambda: 3 * MIB)
    patch(mps, "driver_allocated_memory", lambda: 3 * MIB + 512)
    patch(mps, "empty_cache", lambda: accelerator.note("mps"))
    patch(mps, "_get_default_mps_generator", torch.Generator)
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    step(on("mps:0", 8))
    assert sizes == [8, 4, 4] and accelerator.calls == ["mps"]
    assert step.records[0].baseline == 3 * MIB and step.records[0].peak_allocated is None
    assert oomkit.memory("mps:0").reserved == 3 * MIB + 512


def snapshot_of(settings: Any) -> Any:
    return lambda: {"segments": [], "allocator_settings": settings}


NO_SNAPSHOT = _raise(RuntimeError("snapshot is not meaningful with cudaMallocAsync"))


@pytest.mark.parametrize(
    ("last", "snapshot", "expected"),
    [
        ("max_split_size_mb:64", snapshot_of({"expandable_segments": True}), True),
        ("expandable_segments: True", snapshot_of({"expandable_segments": True}), True),
        (None, snapshot_of({"expandable_segments": True}), True),
        ("expandable_segments:True", snapshot_of({"expandable_segments": False}), False),
        ("expandable_segments:True", snapshot_of({}), False),
        ("expandable_segments:True", snapshot_of(None), False),
        ("expandable_segments:True", lambda: None, False),
        ("expandable_segments:True", NO_SNAPSHOT, False),
    ],
)
def test_settings_in_effect_are_read(
    accelerator: Accelerator, last: str | None, snapshot: Any, expected: bool
) -> None:
    """By the margin: 30 rows of a MiB fit into 31 only where segments grow. What torch was last
    given says nothing of what came before, nor of what the platform makes of it."""
    accelerator.of("cuda")
    accelerator.settings(last, snapshot)
    state = {"peak": 0}

    def stats(index: int) -> Any:
        return {
            "allocated_bytes": {"all": {"current": 0, "peak": state["peak"]}},
            "reserved_bytes": {"all": {"current": 0, "peak": state["peak"]}},
        }

    accelerator.fake.look_up("accelerator_get_stats", stats)
    accelerator.fake.look_up("accelerator_reset_peak", lambda index: state.update(peak=0))

    @oomkit.auto_batch(accumulation_steps=60)
    def step(x: torch.Tensor) -> None:
        state["peak"] = max(state["peak"], len(x) * MIB)

    _C.device_budget_set(CUDA, 0, int(31.4 * MIB))
    accelerator.patch(torch._C, "_accelerator_getMemoryInfo", lambda index: (1 << 30, 1 << 31))
    for _ in range(6):
        step(on("cuda:0", 60))
    assert (step.records[-1].accumulation_steps == 2) is expected


def test_a_snapshot_is_taken_when_the_settings_are_others(accelerator: Accelerator) -> None:
    """It lists all that is allocated."""
    accelerator.of("cuda")
    taken: Seen[int] = Seen()

    def snapshot() -> Any:
        taken.append(1)
        return {"allocator_settings": {"expandable_segments": True}}

    step = failing_step(Seen())
    for settings, expected in (("a:1", 1), ("a:1", 1), ("b:2", 2), (None, 3), (None, 3)):
        accelerator.settings(settings, snapshot)
        for _ in range(3):
            step(on("cuda:0", 8))
        assert len(taken) == expected


def test_figures_of_a_torch_without_the_generic_call(accelerator: Accelerator) -> None:
    """Before torch 2.10 free and total are to be had of the device's own module alone."""
    accelerator.of("cuda")
    accelerator.fake.monkeypatch.delattr(torch._C, "_accelerator_getMemoryInfo")
    accelerator.patch(torch.cuda, "mem_get_info", lambda index: (3 * MIB, 4 * MIB))
    found = oomkit.memory("cuda:0")
    assert (found.free, found.total) == (3 * MIB, 4 * MIB)
    accelerator.patch(torch.cuda, "mem_get_info", _raise(RuntimeError("not here")))
    assert oomkit.memory("cuda:0").free is None
    accelerator.patch(torch.cuda, "mem_get_info", _raise(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        oomkit.memory("cuda:0")


def test_an_interrupt_of_a_figure_comes_again(accelerator: Accelerator) -> None:
    """Figures are hints, but an interrupt is the user's."""
    accelerator.of("cuda").stats = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        oomkit.memory("cuda:0")
        for _ in range(1000):
            pass


def test_a_guard_without_the_bridge_measures_the_accelerator_in_use(
    accelerator: Accelerator,
) -> None:
    accelerator.of("xpu")
    accelerator.patch(torch.xpu, "current_device", lambda: 3)
    accelerator.patch(torch.xpu, "is_initialized", lambda: True)
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard() as guard:
        raise out_of_memory("XPU out of memory. Tried to allocate 2.00 GiB.")
    assert caught.value.report.device == "xpu:3" and guard.records[0].baseline == 5 * MIB
    assert "empty" in accelerator.calls
    accelerator.initialized = False
    del accelerator.calls[:]
    with oomkit.guard():
        pass
    assert accelerator.calls == []


def test_a_healthy_step_of_the_cpu_asks_nothing(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    step = oomkit.auto_batch(lambda x: None)
    step(torch.zeros(8, 1))
    assert accelerator.calls == []
    accelerator.initialized = False
    failing_step(Seen())(torch.zeros(8, 1))
    assert accelerator.calls == []


def test_device_numbers_are_c10s() -> None:
    """Of torch's own list, by what the bridge's facts say elsewhere: cuda, xpu, mps."""
    from oomkit.memory import _DEVICE_NUMBERS

    assert (_DEVICE_NUMBERS["cuda"], _DEVICE_NUMBERS["xpu"]) == (CUDA, XPU)
    assert _DEVICE_NUMBERS["mps"] == MPS
