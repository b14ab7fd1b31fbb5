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
from oomkit.testing import force_slices, inject_oom

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


@pytest.mark.refusals
def test_what_rows_alone_cannot_be_joined_to_is_refused_before_the_update() -> None:
    """A state whose rows lie in another dimension: of one row each it has none to go by."""
    torch.manual_seed(SEED)
    lstm = nn.LSTM(WIDTH, CLASSES, batch_first=True).double()
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
    before = [p.detach().clone() for p in lstm.parameters()]

    @oomkit.auto_batch(dim={"return": 0})
    def step(x: torch.Tensor) -> tuple[float, torch.Tensor]:
        if len(x) > 1 and torch.is_grad_enabled() and fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.zero_grad()
        out, (state, _) = lstm(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.item(), state.detach()

    fails = True
    with pytest.raises(oomkit.SplitError, match=r"result\[1\]") as caught:
        step(_batch()[0])
    assert not getattr(caught.value, "__notes__", [])
    for one, two in zip(before, lstm.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.refusals
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


def _penalty(model: nn.Module, x: torch.Tensor, coupled: bool) -> torch.Tensor:
    """It needs a graph: without one it raises an error."""
    x = x.detach().requires_grad_()
    out = model(x)
    out = out - out.mean(0) if coupled else out
    (slope,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
    return out.square().mean() + (len(x) * slope).square().mean()


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.refusals
def test_what_works_on_micro_batches_alone_is_compared_with_gradients(
    rows: int, coupled: bool
) -> None:
    """Not on any part of one, nor without a graph: two of them need a graph in host memory."""
    model = nn.Linear(WIDTH, CLASSES).double()

    def step(x: torch.Tensor) -> None:
        if len(x) % rows:
            raise ValueError(f"{len(x)} rows")
        _penalty(model, x, coupled).backward()

    x = _batch()[0]
    step(x)
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    with inject_oom(nth=2, phase="backward"):
        if coupled:
            with pytest.raises(oomkit.SplitError, match="the gradient of weight of Linear"):
                oomkit.auto_batch(step)(x)
            return
        oomkit.auto_batch(step)(x)
    for one, two in zip(want, model.parameters(), strict=True):
        torch.testing.assert_close(one, two.grad)


def test_what_cannot_be_compared_at_all_is_refused() -> None:
    """Neither with a graph, of which one row alone fits, nor without."""
    model = nn.Linear(WIDTH, CLASSES).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        _penalty(model, x, False).backward()

    with pytest.raises(
        oomkit.SplitError, match=r"an error under torch.no_grad\(\) with \d rows: \w+"
    ):
        step(_batch()[0])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.refusals
def test_what_no_part_works_on_is_the_error() -> None:
    """It says more than that nothing could be compared."""
    model = nn.Linear(WIDTH, CLASSES).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        for p in model.parameters():
            p.grad.mul_(0.5)

    with inject_oom(nth=2, phase="backward"), pytest.raises(AttributeError) as raised:
        step(_batch()[0])
    assert any(".grad is None there" in note for note in raised.value.__notes__)
    assert all(p.grad is None for p in model.parameters())


def test_a_run_without_a_graph_leaves_nothing_of_it_behind() -> None:
    """Its last line is no zero_grad() between two backwards of what comes next."""
    model = nn.Linear(WIDTH, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        model(x + 1).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with inject_oom(nth=2, phase="backward"):
        step(_batch()[0])
    assert step.records[-1].accumulation_steps == 2


def test_the_larger_of_two_micro_batches_is_the_last() -> None:
    """Two of them are the whole batch: no rows before its first one are looked at."""
    torch.manual_seed(SEED)
    model = nn.Linear(WIDTH, CLASSES).double()

    @oomkit.auto_batch(model=model, multiple_of=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean(1)

    x = torch.randn(3, WIDTH, dtype=torch.float64)
    step(x).mean().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with force_slices([1, 2]):
        loss = step(x).mean()
    with inject_oom(times=None, phase="backward"), pytest.raises(oomkit.OutOfMemory):
        loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
