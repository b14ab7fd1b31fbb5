"""batch= and static= below decorators of others: the names of the function that has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit.testing import force_slices


def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def careless(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def sizes(x: torch.Tensor, weights: torch.Tensor) -> list[int]:
    return [len(x), len(weights)]


def with_model(model: None, x: torch.Tensor, weights: torch.Tensor) -> list[int]:
    return sizes(x, weights)


class Trainer:
    def step(self, x: torch.Tensor, weights: torch.Tensor) -> list[int]:
        return sizes(x, weights)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> list[int]:
        return sizes(x, weights)


def _calls(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with force_slices([3, 1]):
        return step(*args, **kwargs)


def _decorate(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return oomkit.auto_batch(fn, join=lambda results, rows: results, **options)


def _method(**options: Any) -> Callable[..., Any]:
    class Timed(Trainer):
        step = _decorate(timed(Trainer.step), **options)

    return Timed().step


WAYS: dict[str, Callable[..., Callable[..., Any]]] = {
    "function": lambda **options: _decorate(sizes, **options),
    "wraps": lambda **options: _decorate(timed(sizes), **options),
    "wraps twice": lambda **options: _decorate(timed(timed(sizes)), **options),
    "partial": lambda **options: _decorate(functools.partial(with_model, None), **options),
    "partial of wraps": lambda **options: _decorate(
        functools.partial(timed(with_model), None), **options
    ),
    "object": lambda **options: _decorate(Trainer(), **options),
    "bound method": lambda **options: _decorate(Trainer().step, **options),
    "method below a decorator": _method,
}


@pytest.mark.parametrize("way", WAYS)
def test_static_is_passed_whole(way: str) -> None:
    step = WAYS[way](static="weights")
    assert _calls(step, torch.rand(4, 2), torch.rand(4)) == [[3, 4], [1, 4]]
    assert _calls(step, torch.rand(4, 2), weights=torch.rand(4)) == [[3, 4], [1, 4]]


@pytest.mark.parametrize("way", WAYS)
def test_batch_names_what_is_split(way: str) -> None:
    step = WAYS[way](batch="weights")
    assert _calls(step, torch.rand(9, 2), torch.rand(4)) == [[9, 3], [9, 1]]


@pytest.mark.parametrize("option", ["static", "batch"])
def test_a_name_that_no_parameter_has_is_refused_where_it_could_be_any(option: str) -> None:
    step = _decorate(careless(sizes), **{option: "weights"})
    with pytest.raises(oomkit.SplitError) as caught:
        _calls(step, torch.rand(4, 2), torch.rand(4))
    assert message_of(caught.value) == (
        f"auto_batch got {option}='weights', and cannot tell which of the arguments passed by "
        "position that is: the function takes *args; pass it by name, or decorate the function "
        "that has the parameter"
    )


def test_by_name_it_is_clear() -> None:
    step = _decorate(careless(sizes), static="weights")
    called = _calls(step, x=torch.rand(4, 2), weights=torch.rand(4))
    assert called == [[3, 4], [1, 4]]


def test_a_wrapper_with_parameters_of_its_own_is_taken_at_its_word() -> None:
    @functools.wraps(with_model)
    def wrapper(x: torch.Tensor, weights: torch.Tensor) -> list[int]:
        return with_model(None, x, weights)

    step = _decorate(wrapper, static="weights")
    assert _calls(step, torch.rand(4, 2), torch.rand(4)) == [[3, 4], [1, 4]]
