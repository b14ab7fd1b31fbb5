"""Buffers that require grad: a codebook, or the zero that a module adds its losses to."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.sample import sampled, with_rest
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


class Zero(nn.Module):
    """As vector-quantize-pytorch has it: nothing steps the buffer, or clears its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.zero.requires_grad_()
        hidden = self.inner(x).tanh()
        return (self.outer(hidden) - x).square().mean() + self.zero + hidden.square().mean()


class Codebook(nn.Module):
    """A codebook that requires grad from the beginning, and follows its inputs besides."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4).requires_grad_())
        self.follows = follows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        loss = (hidden - (hidden @ self.codes.T).softmax(-1) @ self.codes).square().mean()
        if self.follows and self.training:
            self.codes.data = self.codes.data.lerp(hidden.detach()[:3], 0.1)
        return loss


def training(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return oomkit.auto_batch(step, **options)


def everything(model: nn.Module) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach() for t in tensors] + [t.grad for t in tensors if t.grad is not None]


def make(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return Zero() if kind == "zero" else Codebook(follows=kind == "follows")


PARTS = list(itertools.product(["zero", "codebook"], [0, 1, 2], ["forward", "backward"]))


@pytest.mark.parametrize(
    ("kind", "earlier", "phase"), with_rest(sampled(PARTS, 6, "parts", kind=lambda c: c[:1]), PARTS)
)
def test_it_takes_part(kind: str, earlier: int, phase: str) -> None:
    model = make(kind)
    whole, slices = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(8, 4)
    step, twin, plain = training(model), training(slices), training(whole)
    for _ in range(earlier):
        step(x), twin(x), plain(x)
    count = 1
    while True:  # each allocation of the last call in turn
        ours, theirs, bare = (copy.deepcopy(m) for m in (model, slices, whole))
        for m, source in ((ours, model), (theirs, slices), (bare, whole)):
            for buffer, old in zip(m.buffers(), source.buffers(), strict=True):
                buffer.grad = None if old.grad is None else old.grad.clone()
        step, twin, plain = training(ours), training(theirs), training(bare)
        with inject_oom(nth=count, phase=phase) as fault:
            step(x)
        if fault.fired == 0:
            break
        with force_slices([4, 4]):
            twin(x)
        plain(x)
        for a, b, c in zip(everything(ours), everything(theirs), everything(bare), strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)
        count += 3
    assert count > 3


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_that_moves_by_itself_is_a_buffer_all_the_same(phase: str) -> None:
    model = make("follows")
    twin = copy.deepcopy(model)
    x = torch.randn(8, 4)
    # Rows of the second micro-batch meet what the first one has moved.
    step, other = training(model, verify=False), training(twin, verify=False)
    with inject_oom(nth=2, phase=phase):
        step(x)
    assert step.records[0].ooms == 1
    with force_slices([4, 4]):
        other(x)
    for a, b in zip(everything(model), everything(twin), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_goes_on_and_on() -> None:
    model, x = make("zero"), torch.randn(8, 4)
    whole = copy.deepcopy(model)
    step, plain = training(model), training(whole)
    for nth in (0, 3, 0, 0, 2):
        if nth:
            with inject_oom(nth=nth, phase="backward"):
                step(x)
        else:
            step(x)
        plain(x)
    assert model.zero.grad.item() == pytest.approx(5.0)
    for a, b in zip(everything(model), everything(whole), strict=True):
        torch.testing.assert_close(a, b)
