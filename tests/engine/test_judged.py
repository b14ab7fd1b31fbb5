"""What becomes of an error by its class: retried, retried twice, or passed on as it came."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from zoo import MLP

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

CERTAIN = "CUDA out of memory. Tried to allocate 2.00 GiB"
MASKED = "CUDA error: invalid configuration argument"
ROWS = 64


def _decorated(model: torch.nn.Module, error: Callable[[], BaseException], times: int) -> tuple:
    """A step that fails after its backward for so many times, and the rows of each attempt."""
    calls: Seen[int] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        calls.append(len(x))
        F.cross_entropy(model(x), y).backward()
        if len(calls) <= times:
            raise error()

    return step, calls


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "DataLoader worker (pid 7) is killed by signal: Killed.",
        "NCCL error: Cuda failure 2 'out of memory'",
        "index out of range",
    ],
)
def test_what_a_retry_cannot_help_passes_as_it_came(text: str) -> None:
    error = RuntimeError(text)
    step, calls = _decorated(MLP(), lambda: error, 1)
    with pytest.raises(RuntimeError) as caught:
        step(*_data())
    assert caught.value is error
    assert calls == [ROWS]


def test_our_own_out_of_memory_from_inside_is_not_tried_again() -> None:
    error = oomkit.OutOfMemory("of a step inside")
    step, calls = _decorated(MLP(), lambda: error, 1)
    with pytest.raises(oomkit.OutOfMemory) as caught:
        step(*_data())
    assert caught.value is error
    assert calls == [ROWS]


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_that_may_hide_one_is_tried_again(times: int) -> None:
    torch.manual_seed(0)
    x, y = _data()
    model, whole = MLP(), MLP()
    whole.load_state_dict(model.state_dict())
    F.cross_entropy(whole(x), y).backward()
    step, calls = _decorated(model, lambda: RuntimeError(MASKED), times)
    step(x, y)
    assert len(set(calls)) == 1 + times
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_and_passes_with_everything_back_when_it_comes_a_third_time() -> None:
    model = MLP()
    before = torch.get_rng_state()
    x, y = torch.full((ROWS, 6), 0.5), torch.zeros(ROWS, dtype=torch.int64)
    step, calls = _decorated(model, lambda: RuntimeError(MASKED), 99)
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        step(x, y)
    assert len(calls) == 3  # not down to one row
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_a_certain_one_is_tried_down_to_one_row() -> None:
    step, calls = _decorated(MLP(), lambda: RuntimeError(CERTAIN), 99)
    with pytest.raises(oomkit.OutOfMemory):
        step(*_data())
    assert calls[-1] == 1 and len(calls) > 3


# --- what is given back before the retry ---


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _alive() -> int:
    return oomkit.memory("cpu").allocated or 0


@pytest.mark.usefixtures("no_collector")
def test_cycles_of_the_failed_attempt_are_gone_before_the_retry() -> None:
    seen: Seen[int] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        seen.append(_alive())
        cycle: list[object] = [x * 2]
        cycle.append(cycle)
        del cycle  # no frame of the attempt holds it
        torch.empty(1000).sum()

    with oomkit.limit_memory(None, device="cpu"), inject_oom(nth=1, min_bytes=4000) as armed:
        step(torch.randn(64, 6))
    assert armed.fired == 1
    assert seen[1] == seen[0]


@pytest.mark.usefixtures("no_collector")
def test_weights_that_autocast_has_kept_are_gone_before_the_retry() -> None:
    """The cache is the caller's: it lives as long as the `with` around the step."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 3))
    seen: Seen[int] = Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        seen.append(_alive())
        model(x).float().pow(2).mean().backward()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with inject_oom(nth=1, phase="backward") as armed:
            step(torch.randn(8, 6))
    assert armed.fired == 1
    assert seen[1] == seen[0]
