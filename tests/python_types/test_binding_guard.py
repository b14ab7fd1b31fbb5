"""@oomkit.guard() binds, copies and refuses like @oomkit.auto_batch."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from helpers.messages import message_of

import oomkit


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class Call:
    def __call__(self, x: int, fail: bool = False) -> int:
        return out_of_memory() if fail else x  # type: ignore[return-value]


def _part(x: int, y: int = 0, fail: bool = False) -> int:
    return out_of_memory() if fail else x  # type: ignore[return-value]


class Model:
    @oomkit.guard("skip")
    @classmethod
    def above(cls, x: int, fail: bool = False) -> Any:
        return out_of_memory() if fail else (cls, x)

    @oomkit.guard("skip")
    @staticmethod
    def static(x: int, fail: bool = False) -> Any:
        return out_of_memory() if fail else x

    def run(self, x: int, fail: bool = False, *, y: int) -> Any:
        return out_of_memory() if fail else (self, x, y)

    partial = oomkit.guard("skip")(functools.partialmethod(run, y=3))
    of_object = oomkit.guard("skip")(Call())
    of_partial = oomkit.guard("skip")(functools.partial(_part, y=2))

    def __init__(self) -> None:
        self.bound = oomkit.guard("skip", label="mine")(self.method)

    def method(self, x: int, fail: bool = False) -> Any:
        return out_of_memory() if fail else (self, x)


@pytest.mark.parametrize("name", ["above", "static", "partial", "of_object", "of_partial", "bound"])
def test_methods_of_every_kind(name: str) -> None:
    model = Model()
    expected: dict[str, Any] = {
        "above": (Model, 1),
        "partial": (model, 1, 3),
        "bound": (model, 1),
    }
    assert getattr(model, name)(1) == expected.get(name, 1)
    assert getattr(model, name)(1, fail=True) is None
    if name not in ("partial", "bound"):
        assert getattr(Model, name)(1) == expected.get(name, 1)


def test_the_interpreters_own_way_to_call() -> None:
    model = Model()
    assert model.of_object(1) == model.of_partial(1) == model.static(1) == 1
    assert model.above(1) == (Model, 1)


def test_a_bound_guard_goes_with_a_copy() -> None:
    model = Model()
    other = copy.deepcopy(model)
    assert other.bound(1) == (other, 1)
    assert other.bound.label == "mine" and other.bound(1, fail=True) is None
    again = pickle.loads(pickle.dumps(model))
    assert again.bound(1) == (again, 1)
    assert again.bound.label == "mine" and again.bound(1, fail=True) is None
    assert copy.copy(model.bound) is model.bound


def test_a_class_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        oomkit.guard()(Model)
    assert message_of(caught.value) == (
        f"guard() cannot decorate the class {Model!r}: decorate a method of it, or make the "
        "object inside `with oomkit.guard():`"
    )
