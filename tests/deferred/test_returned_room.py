"""Room for what the caller makes of a returned loss before its backward()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oomkit

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


def _world() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, torch.randn(512, 8, dtype=torch.float64)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Everything that is made is kept for the backward: at the end most is allocated."""
    loss: torch.Tensor = model(x).exp().mean()
    return loss


@pytest.mark.parametrize("spare", range(0, 72, 8))
def test_a_loss_can_be_divided_where_nothing_else_fits(spare: int) -> None:
    model, x = _world()
    with oomkit.limit_memory("1GiB", device="cpu"):
        before = oomkit.memory("cpu").allocated
        loss = _loss(model, x)
        held = oomkit.memory("cpu").allocated - before
        (loss / 4).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    del loss

    model, x = _world()
    step = oomkit.auto_batch(lambda x: _loss(model, x), model=model)
    limit = oomkit.memory("cpu").allocated + held + spare
    with oomkit.limit_memory(limit, device="cpu"):
        (step(x) / 4).backward()
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g)
