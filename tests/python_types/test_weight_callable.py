"""weight= takes one argument: a callable that cannot be called with one is refused at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oomkit
from oomkit.testing import force_slices


def of_two(x: torch.Tensor, y: torch.Tensor) -> int:
    return len(x)


class Weight:
    def __call__(self) -> float:
        return 1.0


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "two": (of_two, r"got of_two\(x, y\): missing a required argument: 'y'"),
    "none": (lambda: 1, r"got <lambda>\(\): too many positional arguments"),
    "named": (lambda batch, *, k: k, "missing a required.* argument: 'k'"),
    "object": (Weight(), r"got Weight\(\): too many"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_callable_of_other_arguments_is_refused_at_the_decoration(kind: str) -> None:
    weight, text = WRONG[kind]
    with pytest.raises(TypeError, match=text) as caught:
        oomkit.auto_batch(lambda x, y: None, weight=weight)
    assert str(caught.value).startswith(
        "auto_batch(weight=...) expected a callable that takes one argument, the micro-batch (a "
        "tuple where several arguments are split), got "
    )


@pytest.mark.parametrize(
    "weight",
    [
        len,
        lambda batch: len(batch[0]),
        lambda *batch: len(batch[0][0]),
        lambda batch, scale=1: scale * len(batch[0]),
        functools.partial(lambda k, batch: k * len(batch[0]), 1),
    ],
)
def test_callables_of_one_argument_are_taken(weight: Callable[..., Any]) -> None:
    w = torch.ones(1, requires_grad=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        ((w * x - y) ** 2).mean().backward()

    with force_slices([2, 2]):
        oomkit.auto_batch(step, weight=weight)(torch.ones(4), torch.zeros(4))
    assert w.grad is not None and torch.isfinite(w.grad).all()
