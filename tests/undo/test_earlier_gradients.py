"""Steps that find gradients of an earlier call, which they clear ahead of their backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.one_fault import Place, results, same, values
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:oomkit")

Step = Callable[[torch.Tensor], float]


def _norm(model: nn.Module) -> float:
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


def _scale(model: nn.Module) -> float:
    return 1.0 + _norm(model)


def _caught(model: nn.Module) -> float:
    try:
        return _scale(model)
    except oomkit.SplitError:
        return 1.0


class Program:
    """Models with what their gradients do ahead of the backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.calls = 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    def train(self, loss: torch.Tensor) -> float:
        loss.backward()
        self.optimizer.step()
        return loss.item()

    # --- what reads them ---

    def norm_before(self, x: torch.Tensor) -> float:
        scale = 1.0 + _norm(self.model)
        self.optimizer.zero_grad()
        return self.train(self.loss(x) * scale)

    def caught(self, x: torch.Tensor) -> float:
        scale = _caught(self.model)
        self.optimizer.zero_grad()
        return self.train(self.loss(x) * scale)

    def numbers_before(self, x: torch.Tensor) -> float:
        grads = [p.grad.numpy() for p in self.model.parameters() if p.grad is not None]
        scale = 1.0 + sum(float((g * g).sum()) for g in grads)
        self.optimizer.zero_grad()
        return self.train(self.loss(x) * scale)

    def norm_before_zeros(self, x: torch.Tensor) -> float:
        scale = 1.0 + _norm(self.model)
        self.optimizer.zero_grad(set_to_none=False)
        return self.train(self.loss(x) * scale)

    def decays(self, x: torch.Tensor) -> float:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        return self.train(self.loss(x))

    def decays_anew(self, x: torch.Tensor) -> float:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5
        return self.train(self.loss(x))

    def updates_first(self, x: torch.Tensor) -> float:
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        return loss.item()

    def accumulates(self, x: torch.Tensor) -> float:
        loss = self.loss(x) * (1.0 + _norm(self.model))
        loss.backward()
        self.calls += 1
        if self.calls % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def sums(self, x: torch.Tensor) -> float:
        loss = self.loss(x) * _scale(self.model)
        loss.backward()
        return loss.item()

    # --- what does not ---

    def none(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        return self.train(self.loss(x))

    def none_late(self, x: torch.Tensor) -> float:
        loss = self.loss(x)
        self.optimizer.zero_grad()
        return self.train(loss)

    def zeros(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=False)
        return self.train(self.loss(x))

    def zeros_by_hand(self, x: torch.Tensor) -> float:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        return self.train(self.loss(x))

    def none_by_hand(self, x: torch.Tensor) -> float:
        for p in self.model.parameters():
            p.grad = None
        return self.train(self.loss(x))

    def clips(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    def none_behind(self, x: torch.Tensor) -> float:
        loss = self.train(self.loss(x))
        self.optimizer.zero_grad()
        return loss

    def asks(self, x: torch.Tensor) -> float:
        known = [p.grad is not None and p.grad.shape == p.shape for p in self.model.parameters()]
        self.optimizer.zero_grad()
        return self.train(self.loss(x) * (2.0 if all(known) else 1.0))

    def copies(self, x: torch.Tensor) -> float:
        teacher = copy.deepcopy(self.model).requires_grad_(False)
        teacher.zero_grad()
        self.optimizer.zero_grad()
        return self.train((self.model(x) - teacher(x) - 1.0).square().mean())

    def compiled(self, x: torch.Tensor) -> float:
        loss = self.inside(x).square().mean()
        self.optimizer.zero_grad()
        return self.train(loss)

    @property
    def inside(self) -> Any:
        if not hasattr(self, "_inside"):
            self._inside = torch.compile(self.model, backend="eager")
        return self._inside


READ = ("norm_before", "caught", "numbers_before", "norm_before_zeros", "decays",
        "decays_anew", "updates_first", "accumulates", "sums")  # fmt: skip
CLEAR = ("none", "none_late", "zeros", "zeros_by_hand", "none_by_hand", "clips", "none_behind",
         "asks", "copies", "compiled")  # fmt: skip
PLACES = [("forward", 1), ("forward", 3), ("backward", 1), ("backward", 3), ("optimizer", 1)]


def _run(
    name: str, rows: int, place: Place | None, bad: int = 1, verify: bool | None = None
) -> Any:
    program = Program()
    step: Step = getattr(program, name)
    called: Any = step if place is None else oomkit.auto_batch(step, verify=verify)
    made = results(called, rows, place, bad)
    return made, values(program.model)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", READ)
@pytest.mark.refusals
def test_a_step_that_reads_them_is_exact_or_refused(name: str, rows: int, place: Place) -> None:
    try:
        found = _run(name, rows, place)
    except (oomkit.SplitError, oomkit.OutOfMemory, oomkit.PartialUpdate):
        return
    same(found, _run(name, rows, None))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["norm_before", "caught", "numbers_before"])
def test_the_refusal_names_the_gradient(name: str, rows: int) -> None:
    with pytest.raises(oomkit.OomkitError, match="gradient of an earlier call"):
        _run(name, rows, ("backward", 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", CLEAR)
def test_a_step_that_clears_them_is_exact(name: str, rows: int, place: Place) -> None:
    same(_run(name, rows, place), _run(name, rows, None))


@pytest.mark.parametrize("name", READ)
@pytest.mark.refusals
def test_each_micro_batch_of_a_later_call_is_exact_or_refused(name: str) -> None:
    try:  # the first call has no gradients: nothing shows there
        found = _run(name, 4, ("forward", 1), bad=0)
    except (oomkit.SplitError, oomkit.OutOfMemory, oomkit.PartialUpdate):
        return
    same(found, _run(name, 4, None))


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("verify", [None, False])
def test_where_nothing_has_cleared_them_the_whole_batch_reads_them(
    verify: bool | None, bad: int
) -> None:
    same(_run("sums", 4, ("forward", 1), bad, verify), _run("sums", 4, None))


@pytest.mark.parametrize("name", CLEAR)
def test_later_calls_that_are_split_are_exact(name: str) -> None:
    same(_run(name, 4, ("forward", 1), bad=0), _run(name, 4, None))


@pytest.mark.parametrize("rows", [1, 4])
def test_nothing_stays_in_grad(rows: int) -> None:
    program = Program()
    step = oomkit.auto_batch(program.norm_before)
    x = torch.randn(rows, 6).double()
    step(x)
    with inject_oom(phase="backward", nth=1), pytest.raises(oomkit.OomkitError):
        step(x)
    assert all(p.grad is None for p in program.model.parameters())


def _returned(rows: int, place: Place | None, bad: int, scale: Callable[[Any], float]) -> Any:
    program = Program()

    def step(x: torch.Tensor) -> torch.Tensor:
        return program.loss(x) * scale(program.model)

    call = step if place is None else oomkit.auto_batch(step)

    def iteration(x: torch.Tensor) -> float:
        loss = call(x)
        program.optimizer.zero_grad()
        return program.train(loss)

    return results(iteration, rows, place, bad), values(program.model)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("place", [("forward", 3), ("backward", 3)])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("scale", [_scale, _caught])
@pytest.mark.refusals
def test_a_returned_loss_made_of_them_is_exact_or_refused(
    rows: int, place: Place, bad: int, scale: Callable[[Any], float]
) -> None:
    try:
        found = _returned(rows, place, bad, scale)
    except (oomkit.SplitError, oomkit.OutOfMemory):
        return
    same(found, _returned(rows, None, bad, scale))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("place", [("forward", 3), ("backward", 3)])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_returned_loss_made_without_them_is_exact(rows: int, place: Place, bad: int) -> None:
    same(_returned(rows, place, bad, lambda _: 2.0), _returned(rows, None, bad, lambda _: 2.0))
