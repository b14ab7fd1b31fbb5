"""zero_grad() in a split step: what a call without gradients may leave out, and what not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_once import _same, _values
from zoo import MLP

import oomkit
from oomkit import _patches

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

K = 4


class Heard:
    """How many profiler marks of zero_grad() were made: one for each call that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        plain = torch.autograd.profiler.record_function

        def record_function(name: str, *args: Any) -> Any:
            self.count += "zero_grad" in name
            return plain(name, *args)

        monkeypatch.setattr(torch.autograd.profiler, "record_function", record_function)


def _step(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    clear: Callable[[], None] | None = None,
) -> Any:
    clear = clear or optimizer.zero_grad

    @oomkit.auto_batch(accumulation_steps=K)
    def step(x: torch.Tensor) -> torch.Tensor:
        clear()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def _pair(
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> tuple[MLP, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(3)
    model = MLP()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return model, optimizer, torch.randn(8, 6)


def _as_plain(model: torch.nn.Module, calls: int) -> bool:
    """Whether a model is as after so many plain steps of the whole batch."""
    plain, optimizer, x = _pair()
    for _ in range(calls):
        optimizer.zero_grad()
        plain(x).pow(2).mean().backward()
        optimizer.step()
    pairs = zip(_values(model), _values(plain), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_it_runs_once_where_there_is_nothing_to_clear(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, bool]
) -> None:
    model, optimizer, x = _pair()
    step = _step(optimizer, model, lambda: optimizer.zero_grad(**arguments))
    heard = Heard(monkeypatch)
    for call in range(3):
        step(x)
        assert heard.count == call + 1
    assert _as_plain(model, calls=3)


def test_gradients_of_before_are_cleared_once_and_not_added() -> None:
    model, optimizer, x = _pair()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    _step(optimizer, model)(x)
    assert _as_plain(model, calls=1)


@pytest.mark.parametrize("how", ["class", "instance", "attribute"])
def test_somebodys_own_runs_every_time(how: str) -> None:
    """A subclass, a patch of the instance or of torch's class counts each of its calls."""
    seen: list[int] = []

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append(1)
            super().zero_grad(set_to_none)

    model, optimizer, x = _pair(Counting if how == "class" else torch.optim.SGD)
    plain = torch.optim.Optimizer.zero_grad

    @functools.wraps(plain)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        seen.append(1)
        plain(self, set_to_none)

    step = _step(optimizer, model, lambda: optimizer.zero_grad())
    step(x)  # torch's own is looked for before the first split of a process
    del seen[:]
    if how == "instance":
        optimizer.zero_grad = functools.partial(zero_grad, optimizer)  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        if how == "attribute":
            patch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
        step(x)
    assert len(seen) == K


def test_a_patch_of_before_is_not_taken_for_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.Optimizer.zero_grad
    assert _patches.find_zero_grad() is plain

    @functools.wraps(plain)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        plain(self, set_to_none)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
    assert _patches.find_zero_grad() is None
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", functools.partial(zero_grad))
    assert _patches.find_zero_grad() is None


class Loud(torch.nn.Parameter):
    """A parameter of somebody's own, whose gradient is looked at through its class."""


def test_a_gradient_that_is_there_is_cleared_in_every_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter that the step fills by hand has a gradient in each micro-batch."""
    model, optimizer, x = _pair()
    apart = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [apart], "lr": 0.0})
    seen: list[bool] = []

    def clear() -> None:
        apart.grad = torch.ones(2)
        optimizer.zero_grad()
        seen.append(apart.grad is None)

    heard = Heard(monkeypatch)
    _step(optimizer, model, clear)(x)
    assert seen == [True] * K
    assert heard.count == K


@pytest.mark.parametrize("kind", ["parameter", "groups"])
def test_what_answers_for_itself_is_asked_by_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer, x = _pair()
    if kind == "parameter":
        optimizer.add_param_group({"params": [Loud(torch.ones(2))]})
    else:
        optimizer.param_groups = type("Groups", (list,), {})(optimizer.param_groups)
    heard = Heard(monkeypatch)
    _step(optimizer, model)(x)
    assert heard.count == K


def test_a_wrong_argument_is_torchs_error_in_whichever_micro_batch() -> None:
    model, optimizer, x = _pair()
    calls: list[int] = []

    def clear() -> None:
        calls.append(1)
        if len(calls) == 2:
            optimizer.zero_grad(none=True)  # type: ignore[call-arg]
        optimizer.zero_grad()

    before = _values(model)
    with pytest.raises(TypeError, match="none"):
        _step(optimizer, model, clear)(x)
    assert _same(before, _values(model))


def test_clearing_between_two_backwards_is_still_refused() -> None:
    model, optimizer, x = _pair()

    @oomkit.auto_batch(accumulation_steps=K)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.zero_grad()
        model(x).abs().mean().backward()
        optimizer.step()

    with pytest.raises(oomkit.SplitError, match="zero_grad"):
        step(x)
