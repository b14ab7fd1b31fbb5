"""What is added to an error of the step's own that a micro-batch's size may have caused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit.testing import force_slices

WHOLE = (
    "oomkit: passed whole to every micro-batch, because its size is not that of the batch: {}; "
    "see batch= and dim= of auto_batch"
)
BESIDE = (
    "oomkit: split with the batch, because its size is the same: {}; what is not one element "
    "per sample is passed whole with static="
)


def _notes(step: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    decorated = oomkit.auto_batch(step, **options)
    with force_slices([3, 1]), pytest.raises(ValueError, match="sizes") as caught:
        decorated(*args)
    return [message_of(note) for note in caught.value.__notes__[1:]]


def raise_on(*args: Any) -> None:
    raise ValueError("sizes")


def test_a_tensor_of_another_size_is_named() -> None:
    def step(x: Any, target: Any) -> None:
        raise_on()

    assert _notes(step, torch.rand(4, 2), torch.rand(9)) == [WHOLE.format("target of shape [9]")]


def test_a_tensor_without_the_dimension_is_named() -> None:
    def step(words: Any, scale: Any, targets: Any) -> None:
        raise_on()

    args = (torch.rand(5, 4), torch.tensor(1.0), torch.rand(21))
    assert _notes(step, *args, dim=1) == [WHOLE.format("targets of shape [21]")]


def test_an_argument_that_happens_to_be_as_long_is_named() -> None:
    def step(x: Any, table: Any, other: Any) -> None:
        raise_on()

    pair = {"a": torch.rand(4), "b": torch.rand(4, 2)}
    assert _notes(step, torch.rand(4, 2), torch.rand(4), pair) == [
        BESIDE.format("table of shape [4], other['a'] of shape [4], other['b'] of shape [4, 2]")
    ]
    assert _notes(step, torch.rand(4, 2), torch.rand(4), 1, static="table") == [
        WHOLE.format("table of shape [4]")
    ]


def test_what_is_named_in_batch_is_not_said() -> None:
    def step(x: Any, y: Any) -> None:
        raise_on()

    assert _notes(step, torch.rand(4, 2), torch.rand(4), batch=("x", "y")) == []


def test_one_argument_says_nothing() -> None:
    def step(batch: Any) -> None:
        raise_on()

    assert _notes(step, {"x": torch.rand(4, 2), "y": torch.rand(4)}) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_a_shape_is_passed_over() -> None:
    def step(x: Any, rows: Any) -> None:
        raise_on()

    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    assert _notes(step, torch.rand(4, 2), nested) == []
