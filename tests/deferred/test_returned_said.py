"""What a backward over several losses cannot take back is said with its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted


@pytest.mark.parametrize("safety", ["auto", "copy"])
def test_gradients_of_a_loss_beside_one_that_gave_up(safety: str) -> None:
    """The whole one's gradients have arrived, and no copy of what was there was taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(9, 5, dtype=torch.float64)

    @oomkit.auto_batch(model=model, gradient_safety=safety, ladder=())
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for row in (0, 1):
        step(x[row : row + 1]).square().mean().backward()
    losses = [step(x[2:4]).square().mean()]
    with inject_oom(times=2):
        losses.append(step(x[4:7]).square().mean())
    assert step.records[-1].accumulation_steps == 3  # run again at its backward
    root = torch.stack(losses).sum()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with (
        inject_oom(times=2, phase="forward"),
        pytest.raises(oomkit.OutOfMemory, match="the smallest allowed") as caught,
    ):
        root.backward()
    same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert same == (safety == "copy")
    assert ("not everything is as before: gradients cannot be restored" in notes) != same


_CHANGED = (
    "gradients cannot be restored",
    "contain a part of this batch",
    "gradients could not be put back",
)


def _one(step: Any) -> torch.Tensor:
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(2):
        step(x).backward()
    return step(x)


def _split_and_one_that_runs_again(step: Any) -> torch.Tensor:
    x = torch.randn(4, 5, dtype=torch.float64)
    loss = step(x[:1]) * 2.0
    with inject_oom(then=inject_oom()):
        loss.backward()
    assert step.records[-1].reason == "climbed"
    with force_slices([2, 2]):
        split = step(x)
    return split * 0.5 + step(x[:1])


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize("safety", ["auto", "copy", "off"])
@pytest.mark.parametrize("losses", [_one, _split_and_one_that_runs_again])
def test_memory_runs_out_in_what_oomkit_allocates_itself(
    losses: Any, safety: str, times: int | None
) -> None:
    """Whichever it is: gradients are as they were, or the error says that they are not."""
    for nth in range(1, 200):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3)).double()

        @oomkit.auto_batch(model=model, gradient_safety=safety)
        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).square().mean()

        loss = losses(step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        error: Exception | None = None
        fault = inject_oom(nth=nth, times=times, phase="recovery")
        try:
            with inject_oom(nth=11, phase="backward", then=fault) if losses is _one else fault:
                loss.backward()
        except (torch.OutOfMemoryError, oomkit.PartialUpdate) as caught:
            error = caught
        if error is None:
            if not fault.fired:
                break
            continue
        # what was computed again and taken off is gone up to rounding (the log says so)
        same = all(
            torch.allclose(a, p.grad, rtol=1e-12, atol=1e-14)
            for a, p in zip(before, model.parameters(), strict=True)
        )
        text = "".join([str(error), *getattr(error, "__notes__", [])])
        assert same or any(s in text for s in _CHANGED), f"allocation {nth}: {text}"
    assert nth > 1


class _Own(nn.Parameter):
    """One of somebody's own, which answers for its gradient."""

    refuse: Any = None

    @property
    def grad(self) -> Any:
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        if _Own.refuse is not None:
            _Own.refuse()
        torch.Tensor.grad.__set__(self, value)


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_gradient_that_cannot_be_set_while_all_go_back(
    kind: type[BaseException], times: int, monkeypatch: pytest.MonkeyPatch, interrupts: list[int]
) -> None:
    """They are as they were, or the error says that they are not; no interrupt is lost."""
    said = 0
    for first in range(1, 60):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3)).double()
        model[2].weight = _Own(model[2].weight.detach().clone())
        x = torch.randn(9, 5, dtype=torch.float64)

        @oomkit.auto_batch(model=model, gradient_safety="copy", ladder=())
        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x)

        losses = [step(x[2:4]).square().mean()]
        with inject_oom(times=2):
            losses.append(step(x[4:7]).square().mean())
        root = torch.stack(losses).sum()
        fault = inject_oom(times=2, phase="forward")
        count = 0

        def refuse(fault: Any = fault, first: int = first) -> None:
            nonlocal count
            count += bool(fault.fired)
            if first <= count < first + times:
                raise kind("somebody's own")

        with monkeypatch.context() as patch, fault:
            patch.setattr(_Own, "refuse", refuse)
            with pytest.raises(BaseException) as caught:
                root.backward()
        if count < first:
            break
        text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        changed = [s for s in _CHANGED if s in text]
        said += len(changed)
        assert changed or all(p.grad is None for p in model.parameters()), f"{first}: {text}"
        assert isinstance(caught.value, kind) or kind is not KeyboardInterrupt or interrupts
        interrupts.clear()
    assert first > 1
    assert (said > 0) == (times > 1)
