"""One row that fits alone: what is proven then, with a graph where it fits and without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.testing import inject_oom

SEED = 23
ROWS, TIME, WIDTH, CLASSES = 6, 4, 5, 3

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(ROWS, TIME, WIDTH, generator=g).double()
    y = torch.randint(0, CLASSES, (ROWS, TIME), generator=g)
    for i in range(ROWS):
        y[i, 1 + i % (TIME - 1) :] = -100
    return x, y


def _step(loss: Loss, alone: bool) -> tuple[Callable[..., Any], nn.Module]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if alone and len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        return value.detach()

    return step, model


def _tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def _masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y != -100
    return (model(x).square().sum(-1) * kept).sum() / kept.sum()


@pytest.mark.parametrize("loss", [_tokens, _summed, _masked])
def test_weights_are_found_by_losses_alone(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    whole, want = _step(loss, alone=False)
    step, got = _step(loss, alone=True)
    decorated = oomkit.auto_batch(step)
    for _ in range(3):
        torch.testing.assert_close(decorated(*_batch()), whole(*_batch()))
    for one, two in zip(want.parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert "gradients were not compared" in caplog.text


def test_a_loss_that_no_weights_explain_is_refused() -> None:
    def coupled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (out - out.mean(0)).square().mean() + out.square().mean()

    step, model = _step(coupled, alone=True)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        oomkit.SplitError, match="not the weighted mean of the losses of its parts .2 rows"
    ):
        oomkit.auto_batch(step)(*_batch())
    for one, two in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_backward_of_several_tensors_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    model = nn.Linear(WIDTH, CLASSES).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = model(x)
        torch.autograd.backward([out.square().mean(), out.abs().mean()])

    step(_batch()[0])
    assert "gradients were not compared" in caplog.text
    assert "could not be verified" not in caplog.text


@pytest.mark.parametrize("keep", [False, True])
def test_a_result_that_parts_cannot_make_is_refused_before_the_update(keep: bool) -> None:
    """Statistics of the batch: of one row each they look like that row's own."""
    model = nn.Linear(WIDTH, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = model(x).mean(1)
        out.square().mean().backward()
        optimizer.step()
        return out.detach().mean(0, keepdim=keep)

    with pytest.raises(oomkit.SplitError, match="joined"):
        step(_batch()[0])
    for one, two in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_two_rows_that_do_fit_are_compared_with_their_gradients() -> None:
    """The losses of such a step agree; only its gradients tell."""
    model = nn.Linear(WIDTH, CLASSES).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        out = model(x[:, 0])
        out.register_hook(lambda g: g / g.norm())
        out.square().mean().backward()

    x = _batch()[0][:2]
    with inject_oom(nth=2), pytest.raises(oomkit.SplitError, match="differs by"):
        step(x)
