"""Where models and optimizers are found: values that are bound before the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices

Made = tuple[nn.Module, torch.optim.Optimizer]


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def _default(made: Made) -> Callable[..., Any]:
    def step(x: Any, model: Any = made[0], optimizer: Any = made[1]) -> None:
        _update(model, optimizer, x)

    return step


def _keyword_default(made: Made) -> Callable[..., Any]:
    def step(x: Any, *, made: Any = made[0], by: Any = made[1]) -> None:
        _update(made, by, x)

    return step


def _default_of_a_helper(made: Made) -> Callable[..., Any]:
    def helper(x: Any, model: Any = made[0], optimizer: Any = made[1]) -> None:
        _update(model, optimizer, x)

    def step(x: Any) -> None:
        helper(x)

    return step


def _partial(made: Made) -> Callable[..., Any]:
    def step(model: Any, x: Any, optimizer: Any) -> None:
        _update(model, optimizer, x)

    return functools.partial(step, made[0], optimizer=made[1])


@pytest.mark.parametrize("way", [_default, _keyword_default, _default_of_a_helper, _partial])
def test_found_where_they_are_bound_beforehand(way: Callable[..., Any]) -> None:
    after = []
    for split in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = oomkit.auto_batch(way((model, optimizer)), reduction="mean")
        x = torch.randn(6, 4).double()
        if split:
            with force_slices([4, 2]):
                step(x)
        else:
            step(x)
        after.append(model.weight.detach().clone())
    assert torch.allclose(*after, rtol=0, atol=1e-12)


def test_what_a_default_holds_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = nn.Linear(4, 2)
    gone = weakref.ref(model)
    step = oomkit.auto_batch(_default((model, torch.optim.SGD(model.parameters(), lr=0.1))))
    step(torch.randn(4, 4))
    step.__wrapped__.__defaults__ = (None, None)
    del model
    gc.collect()
    assert gone() is None
