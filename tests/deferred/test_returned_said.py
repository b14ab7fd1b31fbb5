"""What a backward over several losses cannot take back is said with its error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

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
