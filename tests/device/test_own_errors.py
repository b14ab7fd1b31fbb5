"""Errors out of our own wait and flush, and what is left with the runtime: whose they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers.seen import Seen, world

import oomkit
from device import EFAILED, MIB, ROWS, Body, Device, accelerator_error, out_of_memory, run

STICKY = [46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721]


def driver_oom() -> Exception:
    return accelerator_error("CUDA error: out of memory", 2)


def pending_body(cuda: Device, sizes: list[int]) -> Any:
    """Fails with bytes of a side stream alive, so that the device is waited for."""

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            world.set(cuda, pending=MIB)
            raise out_of_memory()
        return x * 2

    return body


# --- the wait ---


@pytest.mark.parametrize("error", [driver_oom(), out_of_memory()])
def test_a_wait_that_runs_out_of_memory_is_no_failure(cuda: Device, error: Exception) -> None:
    cuda.raising["wait"] = error
    sizes: Seen[int] = Seen()
    run(pending_body(cuda, sizes))
    assert sizes == [8, 4, 4] and cuda.events == [("wait", 0)] and cuda.empty_calls == 1


@pytest.mark.parametrize("code", STICKY)
def test_a_wait_that_finds_the_context_lost_ends_it_with_that_error(
    cuda: Device, code: int
) -> None:
    error = accelerator_error("CUDA error: out of memory, or whatever it says", code)
    cuda.raising["wait"] = error
    sizes: Seen[int] = Seen()
    step = oomkit.auto_batch(pending_body(cuda, sizes), label="lost")
    with torch.no_grad(), pytest.raises(torch.AcceleratorError) as caught:
        step(ROWS)
    assert caught.value is error and caught.value.error_code == code
    assert sizes == [8] and cuda.empty_calls == 0
    (note,) = error.__notes__
    assert "the memory of lost was being freed" in note and "CUDA out of memory. Tried" in note


def test_a_wait_out_of_memory_in_a_context_that_is_lost_passes(
    cuda: Device, last_error: Any
) -> None:
    """It says that it is memory, and the runtime has it again after it was taken."""
    error = driver_oom()

    def wait(index: int) -> None:
        last_error.last_error, last_error.comes_back = 2, 719
        raise error

    cuda.monkeypatch.setattr(torch._C, "_accelerator_synchronizeDevice", wait)
    sizes: Seen[int] = Seen()
    with torch.no_grad(), pytest.raises(torch.AcceleratorError) as caught:
        oomkit.auto_batch(pending_body(cuda, sizes))(ROWS)
    assert caught.value is error and sizes == [8]


# --- the flush ---


def flush_raises(cuda: Device, error: BaseException | None) -> list[int]:
    """Torch's own flush, which is asked when the bridge's has failed."""
    calls: Seen[int] = Seen()

    def flush() -> None:
        calls.append(1)
        if error is not None:
            raise error

    cuda.look_up("accelerator_empty_cache", flush)
    cuda.empty_status = EFAILED
    return calls


@pytest.mark.parametrize("error", [driver_oom(), None])
def test_a_flush_that_the_driver_had_no_memory_for_is_no_failure(
    cuda: Device, error: Exception | None
) -> None:
    calls = flush_raises(cuda, error)
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4] and calls == [1] and cuda.empty_calls == 1


@pytest.mark.parametrize("code", [700, 9])
def test_a_flush_that_fails_otherwise_raises_what_torch_raises(cuda: Device, code: int) -> None:
    error = accelerator_error("CUDA error: something else", code)
    flush_raises(cuda, error)
    body = Body(out_of_memory())
    with torch.no_grad(), pytest.raises(torch.AcceleratorError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and caught.value.error_code == code and body.sizes == [8]
    assert "CUDA out of memory. Tried" in error.__notes__[0]


def test_an_interrupt_of_the_flush_is_an_interrupt(cuda: Device) -> None:
    flush_raises(cuda, KeyboardInterrupt())
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        oomkit.auto_batch(Body(out_of_memory()))(ROWS)


# --- the runtime's last error ---


def test_an_error_that_is_none_of_memory_stays_with_the_runtime(
    cuda: Device, last_error: Any
) -> None:
    """A launch that failed: what it was to write is not there, and torch says so next."""
    last_error.last_error = 9
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4] and last_error.last_error == 9


def test_the_last_error_of_another_thread_is_its_own(cuda: Device, last_error: Any) -> None:
    left: Seen[int] = Seen()
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        last_error.last_error = 2
        begun.set()
        ended.wait(60)
        left.append(last_error.last_error)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(60)
    try:
        body = Body(out_of_memory())
        run(body)
    finally:
        ended.set()
        thread.join()
    assert body.sizes == [8, 4, 4] and left == [2]


@pytest.mark.parametrize("code", STICKY)
def test_a_sticky_last_error_ends_it(cuda: Device, last_error: Any, code: int) -> None:
    last_error.last_error = last_error.comes_back = code
    error = out_of_memory()
    body = Body(error)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == [8] and cuda.empty_calls == 0


@pytest.mark.parametrize("code", [2, 719])
def test_a_search_waits_for_nothing_of_a_lost_context(
    cuda: Device, last_error: Any, code: int
) -> None:
    last_error.last_error, last_error.comes_back = code, 719
    sizes: Seen[int] = Seen()

    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        oomkit.find_executable_batch_size(train, starting_batch_size=16)()
    assert sizes == [16] and cuda.empty_calls == 0
