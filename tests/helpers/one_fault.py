"""A step that is called a few times, one of them out of memory at a place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from oomkit.testing import inject_oom

Place = tuple[str, int]  # phase, and which allocation of it
CALLS = 4


def results(
    step: Callable[[torch.Tensor], float], rows: int, place: Place | None, bad: int = 1
) -> list[float]:
    """What the calls return.

    Args:
        step: of (rows, 6) numbers in double precision.
        rows: of each batch.
        place: where memory runs out once; None: nowhere.
        bad: in which call.
    """
    made = []
    for i in range(CALLS):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(i)).double()
        failing = place is not None and i == bad
        with inject_oom(phase=place[0], nth=place[1]) if failing else nullcontext():
            made.append(step(x))
    return made


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: Any, other: Any) -> None:
    """Results and parameters are equal up to rounding in double precision."""
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-10)
