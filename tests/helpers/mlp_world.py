"""A small model, its optimizer and a batch; parameters, kept and compared."""

from __future__ import annotations

import torch
from torch import nn
from zoo import MLP, SEED

from helpers.seeds import seed_all


def world(lr: float = 0.1) -> tuple[MLP, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    seed_all(SEED)
    model = MLP()
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return model, torch.optim.SGD(model.parameters(), lr=lr), x, y


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
