"""Values that are equal in all micro-batches, and tensors in one memory: kept where that is what
the whole batch gives, else refused."""

from __future__ import annotations

import collections
import datetime
import pathlib

import numpy as np
import pytest
import torch

import oomkit
from oomkit.testing import force_slices


def split(function, slices=(2, 2), whole=0, **options):
    step = oomkit.auto_batch(function, label="step", **options)
    rows = sum(slices)
    x = torch.linspace(-1, 1, rows * 3, dtype=torch.float64).reshape(rows, 3)
    for _ in range(whole):
        step(x)
    with force_slices(slices):
        return step(x)


class Count:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n


COUNTS = {
    "object": lambda x: Count(len(x)),
    "deque": lambda x: collections.deque([0] * len(x)),
    "range": lambda x: range(len(x)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_equal_objects_that_could_count_are_refused(kind):
    with pytest.raises(oomkit.SplitError, match=r"result is a '.*', which has no rule; return"):
        split(COUNTS[kind])


@pytest.mark.parametrize(
    "value",
    [
        "text",
        {"a", "b"},
        pathlib.Path("/x"),
        datetime.date(2020, 1, 1),
        np.datetime64("2020-01-01"),
        1j,
        torch.device("cpu"),
        torch.float32,
        Count,
    ],
)
def test_equal_plain_values_are_kept(value):
    assert split(lambda x: value) == value


def test_a_shape_is_the_whole_batchs():
    assert split(lambda x: x.shape) == torch.Size([4, 3])
    assert split(lambda x: {"s": x.shape}, (3, 2, 2))["s"] == (7, 3)
    assert type(split(lambda x: x.shape)) is torch.Size
    with pytest.raises(oomkit.SplitError, match="result differs"):
        split(lambda x: torch.Size([x.numel(), 1]), (3, 2))


def test_numbers_in_a_tuple_are_known_from_whole_calls():
    assert split(lambda x: (0.5, tuple(x.shape)), whole=1) == (0.5, (4, 3))
    assert split(lambda x: (0.5, {"classes": 10, "n": len(x)}), whole=1)[1] == {
        "classes": 10,
        "n": 4,
    }


def test_flattened_rows_are_not_kept_because_they_are_equal():
    with pytest.raises(oomkit.SplitError, match="flattened together"):
        split(lambda x: torch.ones(x.numel()), whole=1)
    assert split(lambda x: torch.ones(5), whole=1).shape == (5,)


# --- one memory ---

TABLE = torch.arange(10.0)
AGAIN = np.zeros((4, 3))


def again(x):
    np.copyto(AGAIN[: len(x)], x.numpy())
    return torch.from_numpy(AGAIN[: len(x)])


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("result", [lambda x: TABLE[: len(x)], again], ids=["table", "array"])
@pytest.mark.filterwarnings("ignore:.*as many rows")
def test_what_shares_its_memory_is_not_put_together(result, whole):
    with pytest.raises(oomkit.SplitError, match="in memory that several micro-batches share"):
        split(result, whole=whole)


def test_state_under_a_new_name_is_known_from_whole_calls():
    def result(x):
        return {"a": {"w": TABLE[:2].detach()}}

    with pytest.raises(oomkit.SplitError, match="in memory that several micro-batches share"):
        split(result)
    assert split(result, whole=1)["a"]["w"].tolist() == [0, 1]


def test_a_row_that_is_expanded_is_rows():
    assert torch.equal(split(lambda x: TABLE[:3].expand(len(x), 3)), TABLE[:3].expand(4, 3))


def test_state_that_is_returned_is_kept():
    state = torch.ones(2, 3)
    assert split(lambda x: {"s": state})["s"] is state
