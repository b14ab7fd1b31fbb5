"""Torch's own calls where they are missing, raise, or answer what nobody expects: figures are
unknown then, and steps run and recover.
"""

# ruff: noqa: F811 - fixtures that are used by name

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.seen import Seen

import oomkit
from device import CUDA, MIB, MPS, PRIVATE, XPU, Body, Device, out_of_memory, run
from device.test_torch_calls import (  # noqa: F401 - accelerator is a fixture
    Accelerator,
    _raise,
    accelerator,
    failing_step,
    on,
)
from oomkit import _C

UNKNOWN = (None,) * 7
NO_TYPE = 99


def recovers(name: str) -> Any:
    sizes: Seen[int] = Seen()
    step = failing_step(sizes)
    step(on(name, 8))
    assert sizes == [8, 4, 4]
    return step.records[0]


# --- statistics ---


@pytest.mark.parametrize(
    "all_of",
    [
        3,
        {"all": 3},
        {"all": {}},
        {"all": {"current": "x", "peak": -1}},
        {"all": {"current": 2**70}},
    ],
)
def test_a_statistic_that_is_no_number_of_bytes_is_unknown(
    accelerator: Accelerator, all_of: Any
) -> None:
    accelerator.of("cuda").stats["allocated_bytes"] = all_of
    found = oomkit.memory("cuda:0")
    assert found.allocated is None and found.peak_allocated is None
    assert found.reserved == 5 * MIB + 512 and found.total == 50 * MIB
    assert recovers("cuda:0").peak_reserved == 9 * MIB


def test_without_the_call_there_are_no_statistics(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    accelerator.fake.look_up("accelerator_get_stats", None)
    found = oomkit.memory("cuda:0")
    assert found.allocated is None and found.total == 50 * MIB
    assert recovers("cuda:0").baseline is None


def test_without_the_call_nothing_is_reset(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    accelerator.fake.look_up("accelerator_reset_peak", None)
    record = recovers("cuda:0")
    assert record.peak_allocated == 7 * MIB and "reset" not in accelerator.calls


def test_a_type_that_torch_has_no_name_for(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    assert _C.memory_figures(NO_TYPE, 0) == UNKNOWN
    assert not _C.device_expandable(NO_TYPE, 0)


@pytest.mark.parametrize("device", [None, SimpleNamespace(type=3), SimpleNamespace(), KeyError()])
def test_an_accelerator_that_cannot_be_told(accelerator: Accelerator, device: Any) -> None:
    accelerator.of("cuda")
    answer = _raise(device) if isinstance(device, Exception) else lambda: device
    accelerator.patch(torch._C, "_accelerator_getAccelerator", answer)
    assert _C.memory_figures(CUDA, 0) == UNKNOWN
    recovers("cuda:0")
    assert accelerator.calls == []


def test_without_torch_c_nothing_is_known(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    with pytest.MonkeyPatch.context() as gone:
        gone.setitem(sys.modules, "torch._C", None)
        assert _C.memory_figures(CUDA, 0) == UNKNOWN
        assert not _C.device_expandable(CUDA, 0)
    assert _C.memory_figures(CUDA, 0) != UNKNOWN


def test_without_torch_c_a_ready_device_is_asked_by_its_module(cuda: Device) -> None:
    cuda.monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 * MIB, 9 * MIB))
    with pytest.MonkeyPatch.context() as gone:
        gone.setitem(sys.modules, "torch._C", None)
        assert _C.memory_figures(CUDA, 0)[4:6] == (7 * MIB, 9 * MIB)


def test_torch_c_that_goes_while_it_is_asked_has_no_settings(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    accelerator.settings("a:1", lambda: {"allocator_settings": {"expandable_segments": True}})
    assert _C.device_expandable(CUDA, 0)
    accelerator.settings("a:1", lambda: {"allocator_settings": {"expandable_segments": False}})
    with pytest.MonkeyPatch.context() as gone:

        def ready() -> bool:
            gone.setitem(sys.modules, "torch._C", None)
            return True

        accelerator.patch(torch._C, "_accelerator_isAllocatorInitialized", ready)
        assert not _C.device_expandable(CUDA, 0), "others than before: it is looked again"


def test_a_type_that_the_bridge_does_not_know_is_asked_of_torch(cuda: Device) -> None:
    """MPS, up to some release of torch: its own calls, where it is the accelerator."""
    patch = cuda.monkeypatch.setattr
    patch(torch.mps, "current_allocated_memory", lambda: 3 * MIB)
    patch(torch.mps, "driver_allocated_memory", lambda: 4 * MIB)
    assert _C.device_held(MPS, 0) == (None, None)
    patch(torch._C, "_accelerator_getAccelerator", lambda: torch.device("mps"))
    patch(torch._C, "_accelerator_isAllocatorInitialized", _raise(RuntimeError("none of ours")))
    assert _C.device_held(MPS, 0) == (3 * MIB, 4 * MIB)


# --- MPS of its own kind ---


@pytest.fixture
def mps(accelerator: Accelerator) -> Accelerator:
    accelerator.of("mps").initialized = RuntimeError("Allocator for mps is not a DeviceAllocator.")
    patch = accelerator.patch
    patch(torch.mps, "current_allocated_memory", lambda: 3 * MIB)
    patch(torch.mps, "driver_allocated_memory", lambda: 4 * MIB)
    patch(torch.mps, "empty_cache", lambda: accelerator.note("mps"))
    patch(torch.mps, "_get_default_mps_generator", torch.Generator)
    return accelerator


@pytest.mark.parametrize("answer", [lambda: "x", lambda: -1, _raise(RuntimeError("broken"))])
def test_figures_of_mps_that_cannot_be_had(mps: Accelerator, answer: Any) -> None:
    with mps.fake.monkeypatch.context() as broken:
        broken.setattr(torch.mps, "driver_allocated_memory", answer)
        found = _C.device_held(MPS, 0)
        assert found == (3 * MIB, None)
        broken.setattr(torch.mps, "current_allocated_memory", answer)
        assert _C.device_held(MPS, 0) == (None, None)
    assert _C.device_held(MPS, 0) == (3 * MIB, 4 * MIB)


def test_a_torch_without_mps_has_no_figures_of_it(mps: Accelerator) -> None:
    mps.fake.monkeypatch.delattr(torch, "mps")
    assert _C.memory_figures(MPS, 0) == UNKNOWN
    recovers("mps:0")
    assert mps.calls == []


def test_mps_beside_another_accelerator_is_not_asked(mps: Accelerator) -> None:
    mps.of("xpu")
    assert _C.memory_figures(MPS, 0) == UNKNOWN
    recovers("mps:0")
    assert mps.calls == []


def test_a_generator_of_mps_that_cannot_be_had(mps: Accelerator) -> None:
    """What is drawn could not be put back: that is no hint."""
    mps.patch(torch.mps, "_get_default_mps_generator", _raise(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        failing_step(Seen())(on("mps:0", 8))


# --- modules of backends ---


def test_a_backend_with_nothing_but_a_name(accelerator: Accelerator) -> None:
    accelerator.of("privateuseone")
    accelerator.patch(torch, "privateuseone", SimpleNamespace(), raising=False)
    found = oomkit.memory("privateuseone:0")
    assert (found.allocated, found.free) == (5 * MIB, 30 * MIB)
    recovers("privateuseone:0")
    assert accelerator.calls.count("empty") == 1
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard():
        raise out_of_memory()
    assert caught.value.report.device == "privateuseone:0"
    assert not _C.device_expandable(PRIVATE, 0)
    accelerator.patch(torch.privateuseone, "memory", SimpleNamespace(), raising=False)
    accelerator.settings("another:1", None)
    assert not _C.device_expandable(PRIVATE, 0)


def test_a_backend_without_a_module(accelerator: Accelerator) -> None:
    accelerator.of("privateuseone")
    assert not hasattr(torch, "privateuseone")
    assert oomkit.memory("privateuseone:0").allocated == 5 * MIB
    assert recovers("privateuseone:0").baseline == 5 * MIB
    assert not _C.device_expandable(PRIVATE, 0)


@pytest.mark.parametrize("name", [3, RuntimeError("broken"), "\udc80"])
def test_a_backend_whose_name_is_no_text(fake: Device, name: Any) -> None:
    fake.install(PRIVATE, 2)
    call = _raise(name) if isinstance(name, Exception) else lambda: name
    fake.monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", call)
    fake.monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard():
        raise out_of_memory()
    assert caught.value.report.device == "accelerator:0"
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4]


@pytest.mark.parametrize("answer", [lambda: "1", lambda: 2**80, _raise(RuntimeError("broken"))])
def test_a_current_device_that_cannot_be_told(fake: Device, answer: Any) -> None:
    """A guard goes on, with the device's first or with none, and so does a failure beside it."""
    fake.install(index=-1)
    fake.monkeypatch.setattr(torch.cuda, "current_device", answer)
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4] and fake.empty_calls == 2


def test_without_a_current_device_it_is_the_first(fake: Device) -> None:
    fake.install(index=-1)
    fake.monkeypatch.delattr(torch.cuda, "current_device")
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard():
        raise out_of_memory()
    assert caught.value.report.device == "cuda:0"


@pytest.mark.parametrize("generators", [None, [1], "gone"])
def test_cuda_that_has_no_tuple_of_generators_is_not_in_use(fake: Device, generators: Any) -> None:
    fake.install().initialized = 0
    fake.cuda_in_use = True
    if generators == "gone":
        fake.monkeypatch.delattr(torch.cuda, "default_generators")
    else:
        fake.monkeypatch.setattr(torch.cuda, "default_generators", generators)
    assert oomkit.memory("cuda:0").total is None and fake.asked_of == []
    fake.monkeypatch.setattr(torch.cuda, "default_generators", fake.generators, raising=False)
    assert oomkit.memory("cuda:0").total == 100 * MIB


# --- which accelerator is in use ---


def guarded() -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard():
        raise out_of_memory()
    return str(caught.value.report.device)


def test_an_accelerator_of_a_type_that_we_do_not_know(accelerator: Accelerator) -> None:
    accelerator.of("mtia")
    assert guarded() == "cpu" and accelerator.calls == []
    accelerator.patch(torch.cuda, "default_generators", (torch.Generator(),))
    accelerator.patch(torch.cuda, "is_initialized", lambda: True)
    assert guarded() == "cpu" and accelerator.calls == []


def test_a_guard_in_a_forked_child_means_the_cpu(accelerator: Accelerator) -> None:
    accelerator.of("xpu")
    accelerator.patch(torch.xpu, "current_device", lambda: 0)
    assert guarded() == "xpu:0"
    del accelerator.calls[:]
    accelerator.patch(torch.xpu, "_is_in_bad_fork", lambda: True)
    assert guarded() == "cpu" and accelerator.calls == []


# --- free, total and the share ---


@pytest.mark.parametrize("answer", [(1,), "no pair", (1, "x"), 3])
def test_a_driver_that_answers_no_pair_is_said(cuda: Device, answer: Any) -> None:
    cuda.info = answer
    with pytest.raises((TypeError, ValueError, SystemError)):
        oomkit.memory("cuda:0")
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4], "a step goes without it"


def test_a_driver_that_raises_is_said(cuda: Device) -> None:
    error = _raise(ValueError("broken"))
    cuda.monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", error)
    with pytest.raises(ValueError, match="broken"):
        oomkit.memory("cuda:0")
    cuda.fraction[0] = 0.5
    step = run(Body(out_of_memory()))
    assert step.records[0].budget is None, "a share of what is not known"


def test_a_share_of_a_total_that_cannot_be_had_is_unknown(cuda: Device) -> None:
    error = _raise(RuntimeError("not here"))
    cuda.monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", error)
    cuda.monkeypatch.setattr(torch.cuda, "mem_get_info", error)
    cuda.fraction[0] = 0.5
    found = oomkit.memory("cuda:0")
    assert found.total is None and found.budget is None and found.allocated is not None
    assert run(Body()).records[0].budget is None


@pytest.mark.parametrize("share", ["half", None])
def test_a_share_that_is_no_number_is_said(cuda: Device, share: Any) -> None:
    cuda.fraction[0] = share
    with pytest.raises(TypeError):
        oomkit.memory("cuda:0")
    assert run(Body()).records[0].budget is None


def test_what_is_left_of_a_budget(cuda: Device) -> None:
    """Unknown beside figures that are, and nothing where more is in use."""

    def free() -> int | None:
        with oomkit.guard() as guard:
            pass
        found: int | None = guard.records[0].device_free
        return found

    kept = torch.empty(4 * MIB, dtype=torch.uint8)
    _C.device_budget_set(CUDA, 0, 2 * MIB)
    assert free() == 0 and len(kept) == 4 * MIB
    _C.device_budget_set(CUDA, 0, 1 << 40)
    assert 0 < (free() or 0) <= (1 << 40) - 4 * MIB
    cuda.stats_status = -4
    assert free() is None


# --- settings ---


@pytest.mark.parametrize("last", [3, RuntimeError("broken")])
def test_settings_that_are_no_text_are_those_of_a_torch_without(
    accelerator: Accelerator, last: Any
) -> None:
    accelerator.of("cuda")
    taken: Seen[int] = Seen()

    def snapshot() -> Any:
        taken.append(1)
        return {"allocator_settings": {"expandable_segments": True}}

    accelerator.settings("a:1", snapshot)
    call = _raise(last) if isinstance(last, Exception) else lambda: last
    accelerator.patch(torch._C, "_accelerator_getAllocatorSettings", call)
    assert _C.device_expandable(CUDA, 0) and _C.device_expandable(CUDA, 0)
    assert len(taken) == 1


def test_a_type_that_is_not_asked_has_no_settings(accelerator: Accelerator) -> None:
    accelerator.of("cuda")
    assert not _C.device_expandable(XPU, 0)


def test_a_fork_that_cannot_be_told_is_none(accelerator: Accelerator) -> None:
    """As where a module has no such question: what it raises is not in flight while others are
    asked, and an interrupt comes again."""
    accelerator.of("cuda")
    accelerator.patch(torch.cuda, "_is_in_bad_fork", _raise(RuntimeError("broken")))
    assert oomkit.memory("cuda:0").allocated == 5 * MIB
    accelerator.patch(torch.cuda, "_is_in_bad_fork", _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        oomkit.memory("cuda:0")
        for _ in range(1000):
            pass
