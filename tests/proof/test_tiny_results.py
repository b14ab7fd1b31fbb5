"""A number that is small in the first calls is no loss that cancels: its parts are compared."""

from __future__ import annotations

import pytest
import torch

import oomkit
from oomkit.testing import inject_oom


@pytest.mark.filterwarnings("ignore")
def test_a_tiny_sum_beside_the_loss_is_not_taken_for_rounding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(batch="x")
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return {"loss": x.abs().sum() * 1e-8}

    x = torch.randn(8, 4)
    with inject_oom(nth=3, phase="backward"), pytest.raises(oomkit.SplitError, match="'loss'"):
        step(x)
