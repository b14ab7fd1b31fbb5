"""A tensor that a step keeps with its graph from call to call: put back, it has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:oomkit")


class Sums:
    """The losses of two calls are added up, and their sum has one backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.total: Any = 0.0
        self.last: Any = None
        self.calls = 0

    def step(self, x: torch.Tensor) -> float:
        loss = self.model(x).square().mean()
        self.total = self.total + loss
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.zero_grad()
            self.total.backward()
            self.optimizer.step()
            self.total = 0.0
        return loss.item()

    def only_kept(self, x: torch.Tensor) -> float:
        self.last = self.model(x).square().mean()
        self.optimizer.zero_grad()
        self.last.backward()
        self.optimizer.step()
        return float(self.last.detach())

    def detached(self, x: torch.Tensor) -> float:
        before = 0.0 if self.last is None else self.last.detach()
        self.last = torch.tanh(self.model(x)) + before
        self.optimizer.zero_grad()
        self.last.square().mean().backward()
        self.optimizer.step()
        return float(self.last.detach().mean())


def _batches(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, 6, generator=torch.Generator().manual_seed(i)).double() for i in
            range(4)]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("verify", [True, False])
def test_a_backward_into_it_is_an_error(rows: int, verify: bool) -> None:
    program, batches = Sums(), _batches(rows)
    step = oomkit.auto_batch(program.step, verify=verify)
    step(batches[0])
    before = program.model.weight.detach().clone()
    with pytest.raises((oomkit.SplitError, oomkit.OutOfMemory)) as caught:
        with inject_oom(nth=1, phase="backward"):
            step(batches[1])
    assert "had kept from an earlier call with its graph" in str(caught.value) + str(
        getattr(caught.value, "__notes__", "")
    )
    assert torch.equal(before, program.model.weight)


@pytest.mark.parametrize("inputs", [False, True])
def test_so_is_one_of_the_callers(inputs: bool) -> None:
    program, batches = Sums(), _batches(1)
    step = oomkit.auto_batch(program.step, ladder=())
    step(batches[0])
    with pytest.raises(oomkit.OutOfMemory):
        with inject_oom(nth=1, phase="backward", times=None):
            step(batches[1])
    assert program.calls == 1
    with pytest.raises(oomkit.SplitError, match="kept from an earlier call with its graph"):
        program.total.backward(inputs=[*program.model.parameters()] if inputs else None)


@pytest.mark.parametrize("name", ["only_kept", "detached"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_is_wrong_where_no_gradient_is_wanted(name: str, phase: str) -> None:
    plain, program = Sums(), Sums()
    step = oomkit.auto_batch(getattr(program, name), min_micro_batch=2)
    for i, x in enumerate(_batches(1)):
        expected = getattr(plain, name)(x)
        if i == 2:
            with inject_oom(nth=1, phase=phase):
                assert step(x) == expected
        else:
            assert step(x) == expected
    assert torch.equal(plain.model.weight, program.model.weight)


@pytest.mark.parametrize("rows", [1, 8])
def test_so_it_is_in_a_list(rows: int) -> None:
    """Leaves that the runs before a retry find would have put it back without a word."""
    program, batches, kept = Sums(), _batches(rows), list[torch.Tensor]()

    def step(x: torch.Tensor) -> None:
        out = program.model(x)
        loss = out.square().mean() + sum(k.mean() for k in kept)
        kept.clear()
        kept.append(out[:, 0])
        program.optimizer.zero_grad()
        loss.backward(retain_graph=True)

    decorated = oomkit.auto_batch(step)
    decorated(batches[0])
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises((oomkit.SplitError, oomkit.OutOfMemory)):
            decorated(batches[1])
