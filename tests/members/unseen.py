"""Modules that no name of a step leads to, and steps in which they run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

import oomkit

Run = Callable[[torch.Tensor], torch.Tensor]


class Row:
    """What it holds is called by no name that any code shows."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = deque(modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reduce(lambda out, module: module(out), self.modules, x)


def step_with(
    run: Run, layer: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Callable[[torch.Tensor], None]:
    """A step that trains `layer` with what `run` makes of its batch."""
    optimizer = optimizer or torch.optim.SGD(layer.parameters(), lr=0.1)

    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(run(x)).square().mean().backward()
        optimizer.step()

    return step
