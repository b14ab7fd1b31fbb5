"""Optimizers that keep another one, and step it themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers.one_fault import Place, results, same, values
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:oomkit")


class SharpnessAware(torch.optim.Optimizer):
    """Two backwards for an update: at the weights, and at the worst ones near them (SAM)."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base_optimizer.step()
        self.zero_grad()


class Slow(torch.optim.Optimizer):
    """Every second step goes half of the way back (Lookahead)."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.fast = torch.optim.AdamW(params, lr=0.01)
        self.slow = [p.detach().clone() for p in params]
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.fast.step()
        self.steps += 1
        with torch.no_grad():
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                if self.steps % 2 == 0:
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)


class Two(torch.optim.Optimizer):
    """One for the first tensor, another one for the rest."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.parts = [torch.optim.SGD(params[:1], lr=0.1, momentum=0.9)]
        self.rest = torch.optim.AdamW(params[1:], lr=0.01)

    def step(self, closure: Any = None) -> Any:
        self.parts[0].step()
        self.rest.step()


class Program:
    def __init__(self, kind: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer = kind(self.model.parameters())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    def sharp(self, x: torch.Tensor) -> float:
        loss = self.loss(x)
        loss.backward()
        self.optimizer.ascend()
        self.loss(x).backward()
        self.optimizer.descend()
        return loss.item()

    def plain(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _run(kind: Any, rows: int, place: Place | None, bad: int = 1) -> Any:
    program = Program(kind)
    step: Any = program.sharp if kind is SharpnessAware else program.plain
    made = results(step if place is None else oomkit.auto_batch(step), rows, place, bad)
    return made, values(program.model)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("place", [("forward", 1), ("backward", 2), ("optimizer", 1)])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", [SharpnessAware, Slow, Two])
def test_it_is_found(kind: Any, rows: int, place: Place, bad: int) -> None:
    same(_run(kind, rows, place, bad), _run(kind, rows, None))


def test_another_one_is_found_in_its_place() -> None:
    program, twin = Program(SharpnessAware), Program(SharpnessAware)
    step = oomkit.auto_batch(program.sharp)
    for i, one in enumerate((step, step, step)):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).double()
        twin.sharp(x)
        with inject_oom(phase="backward", nth=2) if i == 2 else contextlib.nullcontext():
            one(x)
        for each in (program, twin):
            groups = each.optimizer.param_groups
            each.optimizer.base_optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
            each.optimizer.param_groups = each.optimizer.base_optimizer.param_groups
    torch.testing.assert_close(
        [*program.model.parameters()], [*twin.model.parameters()], rtol=0, atol=1e-10
    )
