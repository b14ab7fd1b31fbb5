"""Calls of torch and of the collector that raise where nobody expects it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from nomemory.fault import MISSING

import oomkit
from device import EFAILED, MIB, ROWS, XPU, Body, Device, out_of_memory, run


def raising(error: BaseException) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def test_a_share_that_raises(cuda: Device) -> None:
    """A step goes without it, also where its own error is on its way; who asks is told."""

    def share(index: int) -> float:
        raise ValueError("broken")

    cuda.monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share)
    with oomkit.guard() as guard:
        pass
    with pytest.raises(torch.OutOfMemoryError), guard:
        raise out_of_memory()
    assert [record.budget for record in guard.records] == [None, None]
    with pytest.raises(ValueError, match="broken"):
        oomkit.memory("cuda:0")


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_collector_that_fails_ends_the_step_with_its_error(
    cuda: Device, error: BaseException
) -> None:
    kept: Seen[torch.Tensor] = Seen()

    def collect() -> None:
        raise error

    def body(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(MIB, dtype=torch.uint8))
        raise out_of_memory()

    cuda.look_up("gc_collect", collect)
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and len(kept) == 1 and cuda.empty_calls == 1


# --- between a failure and its retry ---


def keeping(cuda: Device, kept: list[torch.Tensor]) -> Any:
    """A step that fails once with bytes alive that the collector frees."""

    def body(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(MIB, dtype=torch.uint8))
            raise out_of_memory()
        return x * 2

    return body


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt(), out_of_memory(), None])
def test_a_second_flush_that_fails_is_like_the_first(
    cuda: Device, error: BaseException | None
) -> None:
    """After the collector has freed something: one of memory is no failure."""
    kept: Seen[torch.Tensor] = Seen()
    flushed: Seen[int] = Seen()

    def collect() -> None:
        kept[0] = torch.empty(0)
        cuda.empty_status = EFAILED

    def flush() -> None:
        flushed.append(1)
        if error is not None:
            raise error

    cuda.look_up("gc_collect", collect)
    cuda.look_up("accelerator_empty_cache", flush)
    step = oomkit.auto_batch(keeping(cuda, kept))
    with torch.no_grad():
        if error is None or isinstance(error, torch.OutOfMemoryError):
            assert torch.equal(step(ROWS), ROWS * 2)
        else:
            with pytest.raises(type(error)) as caught:
                step(ROWS)
            assert caught.value is error
    assert cuda.empty_calls == 2 and flushed == [1]


def test_a_collector_that_frees_nothing_is_not_followed_by_a_flush(cuda: Device) -> None:
    cuda.look_up("gc_collect", lambda: None)
    run(keeping(cuda, Seen()))
    assert cuda.empty_calls == 1


@pytest.mark.parametrize("field", ["gc_get_freeze_count", "gc_get_objects"])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_look_for_graphs_that_raises_ends_the_step(
    cuda: Device, field: str, error: BaseException
) -> None:
    body = Body(out_of_memory(), out_of_memory())
    cuda.look_up(field, raising(error))
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and cuda.events == [] and body.sizes == [8, 4]


def workspaces(cuda: Device) -> int:
    """How often they were cleared in a step that failed twice."""
    run(Body(out_of_memory(), out_of_memory()))
    return [event for event, _ in cuda.events].count("workspaces")


@pytest.mark.parametrize("graph", [None, "no type"])
def test_without_graphs_none_is_looked_for(cuda: Device, graph: Any) -> None:
    cuda.look_up("cuda_graph", graph)
    cuda.look_up("gc_get_objects", raising(AssertionError("looked")))
    assert workspaces(cuda) == 1


def test_a_collector_that_lists_nothing_has_no_graph(cuda: Device) -> None:
    cuda.look_up("gc_get_objects", tuple)
    assert workspaces(cuda) == 1


def test_a_torch_that_cannot_clear_workspaces_goes_without(cuda: Device) -> None:
    cuda.monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    assert workspaces(cuda) == 0


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_workspaces_that_cannot_be_cleared_end_the_step(cuda: Device, error: BaseException) -> None:
    cuda.raising["workspaces"] = error
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(Body(out_of_memory(), out_of_memory()))(ROWS)
    assert caught.value is error and cuda.empty_calls == 1


def test_a_device_without_a_way_to_wait_is_flushed(cuda: Device) -> None:
    """Beside a backend that is torch's accelerator, of a module that has no such call."""
    other = torch.device("privateuseone")
    cuda.monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: other)
    cuda.monkeypatch.delattr(torch.cuda, "synchronize")
    body = keeping(cuda, Seen())
    run(body)
    assert cuda.events == [] and cuda.empty_calls >= 1


def test_torch_c_that_goes_before_workspaces_are_cleared(cuda: Device) -> None:
    with pytest.MonkeyPatch.context() as gone:

        def objects() -> list[object]:
            gone.setitem(sys.modules, "torch._C", None)
            return []

        cuda.look_up("gc_get_objects", objects)
        body = Body(out_of_memory(), out_of_memory())
        with torch.no_grad(), pytest.raises(ImportError):
            oomkit.auto_batch(body)(ROWS)
    assert cuda.events == [] and body.sizes == [8, 4]


# --- captures ---


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_question_for_a_capture_that_raises_is_the_steps_error(
    cuda: Device, error: BaseException
) -> None:
    """The step has not run: whether it may be taken back is not known."""
    cuda.monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raising(error))
    body = Body()
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == []


def test_one_that_is_no_truth_neither(cuda: Device) -> None:
    class Unclear:
        def __bool__(self) -> bool:
            raise ValueError("unclear")

    cuda.capturing = Unclear()
    body = Body()
    with torch.no_grad(), pytest.raises(ValueError, match="unclear"):
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == []


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_one_of_another_device_passes_what_is_no_missing_function(
    fake: Device, error: BaseException
) -> None:
    fake.install(XPU)
    fake.monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", raising(error))
    body = Body()
    with torch.no_grad(), pytest.raises(type(error)) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == []


def test_one_before_a_flush_that_was_put_off_keeps_the_flush(cuda: Device) -> None:
    cuda.capturing = True
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert cuda.empty_calls == 0
    cuda.capturing = False
    with cuda.monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "is_current_stream_capturing", raising(KeyError("broken")))
        with pytest.raises(KeyError, match="broken"), oomkit.guard():
            pass
    assert cuda.empty_calls == 0
    with oomkit.guard():
        pass
    assert cuda.empty_calls == 1


def test_an_error_inside_a_capture_that_hides_one_of_memory(cuda: Device) -> None:
    cuda.capturing = True
    body = Body(RuntimeError("GET was unable to find an engine to execute this computation"))
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="graph is being captured"):
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == [8]


def test_another_error_inside_a_capture_passes(cuda: Device) -> None:
    cuda.capturing = True
    error = ValueError("broken")
    with torch.no_grad(), pytest.raises(ValueError, match="broken") as caught:
        oomkit.auto_batch(Body(error))(ROWS)
    assert caught.value is error


@pytest.mark.parametrize("memory", [True, False])
def test_a_backward_of_ours_inside_a_capture_that_fails(cuda: Device, memory: bool) -> None:
    cuda.capturing = True
    error = out_of_memory() if memory else ValueError("broken")

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.ones(1, requires_grad=True)).sum()

    expected = oomkit.OutOfMemory if memory else ValueError
    with pytest.raises(expected) as caught:
        oomkit.auto_batch(step, backward=raising(error))(ROWS)
    assert memory or caught.value is error
    assert cuda.empty_calls == 0


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "not skipped")
def test_a_captured_call_that_there_is_no_memory_to_report_of(cuda: Device) -> None:
    """One allocation after the other fails, from the step's own error on."""
    from nomemory.fault import remove_mem_hooks, set_nomemory

    cuda.capturing = True
    seen: Seen[type] = Seen()
    for nth in range(3000):
        error = out_of_memory()

        def body(x: torch.Tensor, error: Exception = error, nth: int = nth) -> None:
            set_nomemory(nth, nth + 1)
            raise error

        step = oomkit.auto_batch(body)
        with torch.no_grad():
            try:
                step(ROWS)
            except Exception as raised:
                remove_mem_hooks()
                seen.append(type(raised))
            else:
                remove_mem_hooks()
                pytest.fail("the error is lost")
        if nth > 100 and all(one is oomkit.OutOfMemory for one in seen[-100:]):
            break
    assert seen[-1] is oomkit.OutOfMemory and MemoryError in seen
    assert set(seen) == {oomkit.OutOfMemory, MemoryError}
    assert cuda.empty_calls == 0
