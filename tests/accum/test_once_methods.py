"""Which methods a step calls: those of its own object, not of what the object holds."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices


class Loop:
    """Has a train() of its own, which is the loop around the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epoch = 0
        self.steps = 0

    def train(self, x: torch.Tensor) -> None:
        for _ in range(2):
            self.epoch += 1
            self.step(x)

    def count(self) -> None:
        self.steps += 1

    @oomkit.auto_batch(verify=False)
    def step(self, x: torch.Tensor) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()

    @oomkit.auto_batch(verify=False)
    def counting(self, x: torch.Tensor) -> None:
        self.step.__wrapped__(self, x)  # type: ignore[attr-defined]
        later = [self.count for _ in range(1)]
        later[0]()


def said(call: Any, x: torch.Tensor) -> str:
    with warnings.catch_warnings(record=True) as caught, force_slices([2, 2]):
        warnings.simplefilter("always")
        call(x)
    return "\n".join(str(each.message) for each in caught)


def test_a_method_of_what_the_object_holds_is_not_its_own() -> None:
    """self.model.train() was read as self.train(): lines of the loop outside were named."""
    assert said(Loop().train, torch.randn(4, 3)) == ""


def test_methods_of_the_object_are_looked_into_still() -> None:
    text = said(Loop().counting, torch.randn(4, 3))
    assert "self.steps" in text and "epoch" not in text
