"""A returned loss that is a view, and one that is changed in place through a view of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import oomkit
from deferred.test_returned import Net, close, grads, loss_of, world
from oomkit.testing import inject_oom

# How the step makes its loss of one, and what the caller does before backward.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no view": lambda v: v,
    "reshaped": lambda v: v.reshape(1),
    "of a view": lambda v: (v * 3).reshape(1, 1)[0].squeeze(),
    "selected": lambda v: torch.stack([v, v * 0])[:1][0],
}


def _divide(loss: torch.Tensor) -> torch.Tensor:
    loss /= 4
    return loss


def _through_a_view(loss: torch.Tensor) -> torch.Tensor:
    loss.view(-1)[0].mul_(3)
    return loss


def _used_before(loss: torch.Tensor) -> torch.Tensor:
    before = loss.exp()
    loss.mul_(2)
    return loss * before


def _hooked(loss: torch.Tensor) -> torch.Tensor:
    loss /= 2
    loss.register_hook(lambda g: g + 1)
    return loss


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda v: v,
    "divided": _divide,
    "through a view": _through_a_view,
    "used before": _used_before,
    "hooked": _hooked,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("k", [1, 2])
def test_every_fault_behind_such_a_loss(view: str, change: str, k: int) -> None:
    def run(model: Net, decorate: Any, nth: int) -> tuple[Any, bool]:
        compute = loss_of(model)
        step = decorate(lambda x, y: VIEWS[view](compute(x, y)))
        loss = CHANGES[change](step(x, y))
        with inject_oom(nth=nth, phase="backward") as fault:
            loss.sum().backward()
        return grads(model), fault.fired > 0

    want_model, x, y = world()
    want, _ = run(want_model, lambda f: f, 10**9)
    nth, fired = 1, True
    while fired:
        model, x, y = world()
        try:
            got, fired = run(model, lambda f: oomkit.auto_batch(f, accumulation_steps=k), nth)
        except torch.OutOfMemoryError:
            # A part of a larger tensor that is changed in place: the whole of it is another.
            assert view == "selected" and change != "none" and k == 1
        else:
            assert close(got, want), nth
        nth += 2


def test_a_base_that_is_returned_beside_its_view() -> None:
    """Whatever reaches the base reaches the loss: they are the same element."""
    for nth in range(1, 16, 2):
        got = []
        for decorated in (False, True):
            model, x, y = world()
            compute = loss_of(model)

            def pair(x: Any, y: Any, compute: Any = compute) -> tuple[Any, Any]:
                base = compute(x, y) * 2
                return base.view(1), base

            step = oomkit.auto_batch(pair, model=model) if decorated else pair
            loss, base = step(x, y)
            with inject_oom(nth=nth if decorated else 10**9, phase="backward"):
                (loss.sum() * base.detach() + base**2).backward()
            got.append(grads(model))
        assert close(*got), nth


def test_a_hook_of_the_step_on_the_base_of_its_loss() -> None:
    model, x, y = world()
    compute = loss_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = compute(x, y) * 1
        base.register_hook(lambda g: g * 2)
        return base.view(1)

    loss = oomkit.auto_batch(step, model=model)(x, y)
    with inject_oom(nth=5, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="registers a hook on the loss"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
