"""What every split call asks of labels and modules, the short way and the long one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from oomkit import _C
from oomkit._proof.weights import candidates

INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]
VALUES = [-100, -1, 0, 1, 2, 156, 255]


class Labels(torch.Tensor):
    """Tensors of somebody's own class are asked for each value."""


def kinds(tensor: torch.Tensor, modules: list[nn.Module]) -> list[tuple[Any, ...]]:
    return [each.key for each in candidates([(3, "labels", tensor, True)], modules, {})]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1), (0,), (0, 2), (2, 2, 1)])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_range_of_labels_says_what_each_value_does(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    criterion = nn.CrossEntropyLoss(ignore_index=2)
    wide = nn.CrossEntropyLoss(ignore_index=65_636)  # -> 100 where there are 16 bits
    met: set[str] = set()
    for one in VALUES:
        for other in VALUES:
            numbers = torch.tensor([one, other, 1, one])[: torch.Size(shape).numel()]
            tensor = numbers.to(dtype).reshape(shape)
            found = kinds(tensor, [criterion, wide])
            assert found == kinds(tensor.as_subclass(Labels), [criterion, wide])
            met.update(key[0] for key in found)
    assert ("labels" in met) == ("values" in met) == (0 not in shape) or len(shape) == 3


class Odd(nn.Module):
    """Has no such attribute until it is asked for."""

    @property
    def ignore_index(self) -> int:
        raise AttributeError


def test_modules_are_listed_as_modules_lists_them() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2), shared))
    root = nn.ModuleDict({"one": inner, "two": nn.ModuleList([shared, inner])})
    root.register_module("nothing", None)
    assert _C.modules_of([root]) == list(root.modules())
    assert _C.modules_of([inner, 5, root, inner]) == [*inner.modules(), root, root["two"]]
    with pytest.raises(TypeError):
        _C.modules_of(None)  # type: ignore[arg-type]


def test_hints_are_what_modules_have_themselves() -> None:
    norm, loss = nn.BatchNorm1d(2), nn.CrossEntropyLoss(weight=torch.ones(3), ignore_index=7)
    named = nn.Linear(2, 2)
    named.register_buffer("ignore_index", torch.tensor(1))  # looked for in no buffer
    ignored, buffers = _C.label_hints([norm, loss, named, Odd(), nn.NLLLoss()], _NormBase)
    assert ignored == [7, -100]
    assert [id(each) for each in buffers] == [
        id(each) for each in (loss.weight, named.ignore_index, None)
    ]
    with pytest.raises(AttributeError):
        _C.label_hints([norm, 3], _NormBase)
