"""Hooks before an optimizer's step() that change gradients: a step() that ran out of memory must
not run them twice on the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import oomkit
from oomkit.testing import inject_oom

SEED, CALLS = 31, 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
}


class Program:
    def __init__(self, kind: str, everywhere: bool) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        register = (
            register_optimizer_step_pre_hook
            if everywhere
            else self.optimizer.register_step_pre_hook
        )
        self.handle = register(self.halve)

    def halve(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer:
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_they_change_each_gradient_once(kind: str, everywhere: bool, rows: int, nth: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    batches = [torch.randn(rows, 5, generator=generator).double() for _ in range(CALLS)]
    plain = Program(kind, everywhere)
    for x in batches:
        plain.step(x)
    plain.handle.remove()
    program = Program(kind, everywhere)
    step = oomkit.auto_batch(program.step)
    try:
        for i, x in enumerate(batches):
            with inject_oom(nth=nth if i == 1 else 2**60, phase="optimizer"):
                step(x)
    finally:
        program.handle.remove()
    for p, q in zip(program.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
