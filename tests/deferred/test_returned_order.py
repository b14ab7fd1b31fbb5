"""A returned loss that does not stand first: `(logits, loss)`, the order of nanoGPT and minGPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oomkit
from deferred.test_returned import B, Net, close, grads, plain, same, world
from oomkit import _C
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

# What is returned of logits and loss, and where the loss is.
ORDERS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "logits, loss": (lambda out, loss: (out, loss), 1),
    "list": (lambda out, loss: [out, loss], 1),
    "detached first": (lambda out, loss: (loss.detach(), loss), 1),
    "none between": (lambda out, loss: (out, None, loss), 2),
    "a score of each row": (lambda out, loss: (out[:, 0], loss), 1),
    "loss, logits": (lambda out, loss: (loss, out), 0),
    "loss, its part": (lambda out, loss: (loss, loss * 0.5), 0),
}


def _returning(order: str, model: Net) -> Callable[..., Any]:
    make, _ = ORDERS[order]

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        return make(out, F.cross_entropy(out, y))

    return compute


@pytest.mark.parametrize("order", ORDERS)
def test_every_fault_of_the_callers_backward_and_the_calls_after(order: str) -> None:
    at = ORDERS[order][1]
    for nth in range(1, 20):
        model, x, y = world()
        step = oomkit.auto_batch(_returning(order, model), model=model)
        loss = step(x, y)[at]
        with inject_oom(nth=nth, phase="backward") as fault:
            (loss / 4).backward()
        assert close(grads(model), plain(lambda v: v / 4)), nth
        if not fault.fired:
            break
        assert step.records[-1].ooms == 1
        for _ in range(2):  # split from the start
            model.zero_grad()
            with force_slices([B // 2, B // 2]):
                result = step(x, y)
            (result[at] / 4).backward()
            assert close(grads(model), plain(lambda v: v / 4)), nth
    assert nth > 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [2, 3])
def test_a_split_call(order: str, k: int) -> None:
    model, x, y = world()
    compute, at = _returning(order, model), ORDERS[order][1]
    whole = compute(x, y)
    step = oomkit.auto_batch(compute, model=model, accumulation_steps=k)
    result = step(x, y)
    assert abs(result[at].item() - whole[at].item()) <= 1e-12
    for i, (ours, theirs) in enumerate(zip(result, whole, strict=True)):
        if isinstance(theirs, torch.Tensor) and theirs.ndim > 0:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
            if i != at and theirs.requires_grad:
                with pytest.raises(oomkit.SplitError, match=rf"result\[{i}\]"):
                    ours.sum().backward()
    result[at].backward()
    assert close(grads(model), plain())


def test_backward_inside_finds_it_too() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(_returning("logits, loss", model), backward=True, model=model)
    for _ in range(2):
        model.zero_grad()
        step(x, y)
        assert same(grads(model), plain())


def test_micro_batches_that_differ_in_its_place_are_refused() -> None:
    model, x, y = world()
    begins = x[0].clone()

    def moved(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        first = bool((x[0] == begins).all())
        return (loss.detach(), loss) if first else (loss, loss.detach())

    step = oomkit.auto_batch(moved, model=model, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="different kinds of results"):
        step(x, y)


def _scalar(value: float, requires: bool = True) -> torch.Tensor:
    return torch.tensor(value, requires_grad=requires)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((torch.ones(2, 3, requires_grad=True), _scalar(1.0)), 1.0),
        ((torch.ones(2), 3, _scalar(1.0)), 1.0),
        (("text", _scalar(1.0)), 1.0),
        ((_scalar(1.0), _scalar(2.0)), 1.0),
        ((torch.ones(1, requires_grad=True), _scalar(2.0)), 1.0),  # a loss of shape [1]
        ((_scalar(1.0, False), _scalar(2.0, False)), 1.0),  # of an evaluation
        ((_scalar(1.0, False), _scalar(2.0), _scalar(3.0)), 1.0),  # two: it is not known
        ((_scalar(1.0, False), *[0] * 20, _scalar(2.0)), 1.0),  # rows rather than places
    ],
)
def test_the_loss_of_a_tuple(result: tuple[Any, ...], expected: float) -> None:
    assert _C._loss_probe(result).item() == expected
    assert _C._loss_probe([*result]).item() == expected
