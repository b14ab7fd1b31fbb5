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


_CHANGED = ("gradients cannot be restored", "contain a part of this batch")


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


@pytest.mark.parametrize("safety", ["auto", "off"])
@pytest.mark.parametrize("losses", [_one, _split_and_one_that_runs_again])
def test_memory_runs_out_in_what_oomkit_allocates_itself(losses: Any, safety: str) -> None:
    """Whichever it is: gradients are as they were, or the error says that they are not."""
    for nth in range(1, 200):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3)).double()

        @oomkit.auto_batch(model=model, gradient_safety=safety)
        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).square().mean()

        loss = losses(step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        error: oomkit.OutOfMemory | None = None
        fault = inject_oom(nth=nth, phase="recovery")
        try:
            with inject_oom(nth=11, phase="backward", then=fault) if losses is _one else fault:
                loss.backward()
        except oomkit.OutOfMemory as caught:
            error = caught
        if error is None:
            if not fault.fired:
                break
            continue
        same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
        text = "".join([str(error), *getattr(error, "__notes__", [])])
        assert same or any(s in text for s in _CHANGED), f"allocation {nth}: {text}"
    assert nth > 1
