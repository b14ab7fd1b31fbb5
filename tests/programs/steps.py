"""The module of somebody's training script: its steps are found by their names in any process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import oomkit

Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@oomkit.auto_batch
def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


class Trainer:
    """Pickled whole: model, optimizer, and the class by its name."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    @oomkit.auto_batch
    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()
