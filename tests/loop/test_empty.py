"""Batches without rows: a loop without parts, and of map the function's own empty result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit

EMPTY = torch.zeros(0, 3)


class Rows:
    """A batch of a type of its own."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


def rows_of(batch: Rows, start: int, length: int) -> Rows:
    return Rows(batch.rows[start : start + length])


BATCHES = {
    "tensor": EMPTY,
    "dict": {"x": EMPTY, "scale": 2.0},
    "tuple": (EMPTY, torch.zeros(0)),
    "array": np.zeros((0, 3)),
    "list": [],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_loop_has_no_parts(kind: str, request: pytest.FixtureRequest) -> None:
    parts = oomkit.chunks(BATCHES[kind], label=request.node.name)
    assert list(parts) == [] and next(parts, None) is None
    assert list(oomkit.chunks(EMPTY, EMPTY, label=request.node.name + "2")) == []


def test_a_loop_over_a_type_of_ones_own_has_no_parts(request: pytest.FixtureRequest) -> None:
    options = {"split": rows_of, "label": request.node.name}
    assert list(oomkit.chunks([], **options)) == []
    oomkit.register_splitter(Rows, split=rows_of, size=lambda batch: len(batch.rows))
    assert list(oomkit.chunks(Rows([]), label=request.node.name + "2")) == []


def test_rows_come_after_a_loop_without_any(request: pytest.FixtureRequest) -> None:
    for rows in (0, 4, 0):
        seen = 0
        for part in oomkit.chunks(torch.zeros(rows, 3), label=request.node.name):
            with oomkit.guard():
                seen += len(part)
        assert seen == rows


def test_sizes_that_disagree_stay_an_error(request: pytest.FixtureRequest) -> None:
    with pytest.raises(oomkit.SplitError):
        list(oomkit.chunks({"x": EMPTY, "y": torch.zeros(4)}, label=request.node.name))


def test_a_step_that_would_be_split_still_says_so() -> None:
    step = oomkit.auto_batch(lambda x: x * 2)
    assert step(EMPTY).shape == (0, 3)


def test_map_gives_what_the_function_makes_of_no_rows() -> None:
    model = nn.Linear(3, 2)
    result = oomkit.map(model, EMPTY)
    assert result.shape == (0, 2) and result.dtype == torch.float32
    assert not result.requires_grad
    found = oomkit.map(lambda x, y: {"a": x + y, "n": len(x)}, EMPTY, torch.zeros(0, 1))
    assert found["a"].shape == (0, 3) and found["n"] == 0
    assert oomkit.map(lambda x: [row for row in x], []) == []
    assert oomkit.map(lambda x: x, EMPTY, verify=True).shape == (0, 3)
    assert oomkit.map(lambda x: x, EMPTY.double(), to="cpu").dtype == torch.float64


def test_errors_of_the_function_pass() -> None:
    with pytest.raises(IndexError):
        oomkit.map(lambda x: x.argmax(0), EMPTY)


def test_items_of_a_stream_without_rows_add_nothing() -> None:
    calls: list[int] = []

    def score(x: torch.Tensor) -> Any:
        calls.append(len(x))
        return {"mean": float(x.mean()), "x": x}

    items = [EMPTY, torch.ones(2, 3), EMPTY, torch.ones(1, 3)]
    found = oomkit.map(score, iter(items))
    assert found["mean"] == 1.0 and found["x"].shape == (3, 3) and calls == [2, 1]
    lazy = list(oomkit.map(lambda x: x * 2, iter(items), lazy=True))
    assert [len(each) for each in lazy] == [0, 2, 0, 1]
    assert oomkit.map(nn.Linear(3, 2), iter([EMPTY, EMPTY])).shape == (0, 2)
    assert oomkit.map(nn.Linear(3, 2), iter([])) is None
