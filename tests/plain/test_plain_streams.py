"""Random generators that are objects of the program: rolled back like the global ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.seen import Seen

import oomkit
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _deep(stream: Any, levels: int) -> Any:
    for _ in range(levels):
        stream = Holder(stream)
    return stream


def _reach(holder: Any) -> Any:
    while isinstance(holder, Holder):
        holder = vars(holder).get("inner")
    return holder


MAKE: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "default_rng": (lambda: np.random.default_rng(3), lambda g: float(g.random())),
    "mersenne": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda g: float(g.random()),
    ),
    "RandomState": (lambda: np.random.RandomState(3), lambda g: float(g.rand())),
    "Random": (lambda: random.Random(3), lambda g: float(g.random())),
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand((), generator=g).item(),
    ),
}


@pytest.mark.parametrize("levels", [0, 1, 5])
@pytest.mark.parametrize("name", MAKE)
def test_a_generator_at_any_depth_is_rolled_back(name: str, levels: int) -> None:
    make, draw = MAKE[name]
    holder = _deep(make(), levels)
    drawn: Seen[float] = Seen()

    @oomkit.auto_batch(rng="all")
    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append(draw(_reach(holder)))
        return x + 1

    x = torch.zeros(4, 1)
    with torch.no_grad(), inject_oom(nth=2 if name == "torch" else 1) as armed:
        step(x)
    assert armed.fired == 1
    assert len(drawn) == 3 and drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("rng", ["torch", "none"])
def test_one_that_the_code_calls_goes_with_torchs(rng: Any) -> None:
    holder = Holder(np.random.default_rng(3))
    drawn: Seen[float] = Seen()

    @oomkit.auto_batch(rng=rng)
    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append(float(holder.inner.random()))
        return x + 1

    x = torch.zeros(4, 1)
    with torch.no_grad(), inject_oom(nth=1):
        step(x)
    assert (drawn[0] == drawn[1]) == (rng == "torch")


def test_parts_of_an_evaluation_that_draw_are_not_kept() -> None:
    x = torch.zeros(16, 1)

    def run(nth: int, k: int) -> tuple[torch.Tensor, int]:
        generator = random.Random(3)

        @oomkit.auto_batch(accumulation_steps=k, rng="all")
        def evaluate(x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([[generator.random()] for _ in range(len(x))])

        with torch.no_grad(), inject_oom(nth=nth) as armed:
            out = evaluate(x)
        return out, armed.seen

    expected, _ = run(2**60, 4)
    _, allocations = run(2**60, 2)
    got, _ = run(allocations // 2 + 1, 2)
    assert torch.equal(expected, got)
