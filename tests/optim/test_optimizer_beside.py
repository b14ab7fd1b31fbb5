"""optimizer_safety="copy": what an optimizer keeps beside tensors in its `state` goes back, too;
what cannot be copied is named, and the update is not repeated."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


class _Kept(torch.optim.Optimizer):
    """SGD with momentum that is kept somewhere else in each class."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def direction(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for i, p in enumerate(self.params):
            p.sub_(self.direction(i, p.grad) * 0.1)


def _kept(name: str, make: Callable[..., None], direction: Callable[..., Any]) -> type[_Kept]:
    return type(name, (_Kept,), {"make": make, "direction": direction})


def _zeros(self: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(p) for p in self.params]


def _in_list(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    return self.kept[i].mul_(0.9).add_(grad)


def _in_nested(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    held = self.kept["a"]["b"]
    held[i] = held[i] * 0.9 + grad
    return held[i]


def _in_queue(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    self.kept[i].append(grad.clone())
    return sum(self.kept[i])


def _in_array(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    self.kept[i] *= 0.9
    self.kept[i] += float(grad.sum())
    return grad * float(self.kept[i])


def _in_state_list(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    history = self.state[self.params[i]].setdefault("history", [])
    history.append(grad.clone())
    return sum(history)


def _in_group(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    self.param_groups[0]["history"].append(float(grad.sum()))
    return grad * sum(self.param_groups[0]["history"])


def _in_object(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    self.kept.count += 1
    self.kept.buffers[i].add_(grad)
    return self.kept.buffers[i] / self.kept.count


def _noise(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    return grad + float(np.random.rand()) + random.random()


def _own_noise(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    noise = self.kept[0].random() + self.kept[1].rand() + self.kept[2].random()
    return grad + float(noise) + torch.rand(grad.shape, generator=self.kept[3])


def _counted(self: Any, i: int, grad: torch.Tensor) -> torch.Tensor:
    return grad * next(self.kept)


class _Inner:
    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.count = buffers, 0


def _attribute(value: Callable[[Any], Any]) -> Callable[[Any], None]:
    def make(self: Any) -> None:
        self.kept = value(self)

    return make


def _history(self: Any) -> None:
    self.param_groups[0]["history"] = []


KINDS: dict[str, type[_Kept]] = {
    "list": _kept("ListSGD", _attribute(_zeros), _in_list),
    "tuple": _kept("TupleSGD", _attribute(lambda s: tuple(_zeros(s))), _in_list),
    "nested": _kept("NestedSGD", _attribute(lambda s: {"a": {"b": _zeros(s)}}), _in_nested),
    "default": _kept("DefaultSGD", _attribute(lambda s: defaultdict(deque)), _in_queue),
    "ordered": _kept(
        "OrderedSGD",
        _attribute(lambda s: OrderedDict((i, deque(maxlen=3)) for i in range(9))),
        _in_queue,
    ),
    "array": _kept("ArraySGD", _attribute(lambda s: np.zeros(len(s.params))), _in_array),
    "state": _kept("StateSGD", lambda s: None, _in_state_list),
    "group": _kept("GroupSGD", _history, _in_group),
    "object": _kept("ObjectSGD", _attribute(lambda s: _Inner(_zeros(s))), _in_object),
    "namespace": _kept(
        "NamespaceSGD",
        _attribute(lambda s: SimpleNamespace(buffers=_zeros(s), count=0)),
        _in_object,
    ),
    "noise": _kept("NoiseSGD", lambda s: None, _noise),
    "own noise": _kept(
        "OwnNoiseSGD",
        _attribute(
            lambda s: [
                np.random.default_rng(1),
                np.random.RandomState(2),
                random.Random(3),
                torch.Generator().manual_seed(4),
            ]
        ),
        _own_noise,
    ),
}


def _train(kind: type[_Kept], nth: int | None, calls: int = 3) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    model = nn.Linear(6, 3)
    optimizer = kind(model.parameters())
    x = torch.randn(8, 6)

    @oomkit.auto_batch(optimizer_safety="copy", verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    fired = 0
    for call in range(calls):
        if call == calls - 2 and nth is not None:
            with inject_oom(nth=nth, phase="optimizer") as fault:
                step(x)
            fired = fault.fired
        else:
            step(x)
    return [p.detach().clone() for p in model.parameters()], fired


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_update_is_repeated_from_what_it_began_with(name: str) -> None:
    want, _ = _train(KINDS[name], None)
    seen = 0
    for nth in range(1, 60):
        got, fired = _train(KINDS[name], nth)
        if not fired:
            break
        seen += 1
        for a, b in zip(want, got, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-5), nth
    assert seen > 1


def test_what_cannot_be_copied_is_named_and_the_update_not_repeated() -> None:
    model = nn.Linear(6, 3)
    counted = _kept("CountSGD", _attribute(lambda s: itertools.count(1)), _counted)
    optimizer = counted(model.parameters())

    @oomkit.auto_batch(optimizer_safety="copy", verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    x = torch.randn(8, 6)
    step(x)
    before = [p.detach().clone() for p in model.parameters()]
    with inject_oom(nth=3, phase="optimizer"), pytest.raises(oomkit.PartialUpdate) as caught:
        step(x)
    assert "CountSGD.step() ran out of memory" in str(caught.value)
    assert "cannot copy its kept (count)" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(x)


def test_an_update_is_not_repeated_for_a_later_error_either() -> None:
    model = nn.Linear(6, 3)
    counted = _kept("CountSGD", _attribute(lambda s: iter(range(1, 99))), _counted)
    optimizer = counted(model.parameters())
    fail = [True]

    @oomkit.auto_batch(optimizer_safety="copy", verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if fail.pop() if fail else False:
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 MiB")

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.PartialUpdate, match=r"its kept \(range_iterator\)"):
        step(torch.randn(8, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
