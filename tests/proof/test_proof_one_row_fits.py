"""Under a budget of the CPU: gradients are compared also where one row fits and no more, and
anew for each program of the same code."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit import _C

WIDTH, TIMES, ROWS = 1000, 200, 8
ROW = TIMES * WIDTH * 8  # bytes of what one row adds for each result that is kept


class Normed(torch.autograd.Function):
    """Couples rows in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / g.norm()


@pytest.fixture(autouse=True)
def _bytes_are_counted() -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass


def _program(kind: str) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        hidden = model[0](x)
        if kind == "hook":
            hidden.register_hook(lambda g: g / g.norm())
        if kind == "function":
            hidden = Normed.apply(hidden)
        loss = model[2](torch.tanh(hidden)).square().mean()
        loss.backward()
        return loss.detach()

    return model, step, torch.randn(ROWS, TIMES, 16, dtype=torch.float64)


def _tight(rows: float = 1.1) -> Any:
    gc.collect()
    allocated = oomkit.memory("cpu").allocated
    assert allocated is not None
    return oomkit.limit_memory(allocated + int(5 * rows * ROW), device="cpu")


@pytest.mark.parametrize("kind", ["hook", "function"])
@pytest.mark.filterwarnings("ignore")
def test_what_couples_rows_in_the_backward_is_refused(kind: str) -> None:
    model, step, x = _program(kind)
    with _tight(), pytest.raises(oomkit.SplitError, match="gradient"):
        oomkit.auto_batch(step, ladder=())(x)
    assert all(p.grad is None for p in model.parameters())


def test_what_does_not_is_trained() -> None:
    (plain, bare, x), (model, step, _) = _program("plain"), _program("plain")
    loss = bare(x)
    decorated = oomkit.auto_batch(step, ladder=())
    with _tight():
        torch.testing.assert_close(decorated(x), loss, rtol=1e-12, atol=0)
    assert decorated.records[-1].accumulation_steps == ROWS
    gradients = [p.grad for p in plain.parameters()]
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore")
def test_the_same_code_over_another_program_is_proven_for_itself() -> None:
    """What its closure holds is another, and losses are the same. Sizes are taken over."""
    _C._keep_sizes(True)
    model, step, x = _program("plain")
    with _tight(5):
        plain = oomkit.auto_batch(step, ladder=())
        plain(x)
    assert 1 < plain.records[-1].accumulation_steps < ROWS
    del model, step, plain
    model, step, x = _program("function")
    with _tight(5), pytest.raises(oomkit.SplitError, match="gradient"):
        oomkit.auto_batch(step, ladder=())(x)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("carried", "found"),
    [(None, ""), ("always", "not the weighted mean"), ("training", "come in another order")],
)
@pytest.mark.filterwarnings("ignore")
def test_state_that_one_row_leaves_for_the_next_is_found(carried: str | None, found: str) -> None:
    """A running centre of targets, moved after the backward: the second row finds what the first
    has left, as in the call itself. Where it moves with a graph alone no row has others beside it,
    so that they come in another order."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    centre = torch.zeros(2, dtype=torch.float64)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.zero_grad()
        hidden = model(x)
        targets = (hidden.detach() - centre).softmax(1)
        (-(targets * model(x + 0.1).log_softmax(1)).sum(1).mean()).backward()
        optimizer.step()
        if carried == "always" or (carried and torch.is_grad_enabled()):
            centre.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)

    x = torch.randn(8, 3, dtype=torch.float64)
    if not carried:
        step(x)
        return
    with pytest.raises(oomkit.SplitError, match=found):
        step(x)
    assert torch.equal(model.weight, before) and not centre.any()
