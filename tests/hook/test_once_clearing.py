"""zero_grad() in a split step: what a call without gradients may leave out, and what not."""

from __future__ import annotations

import functools
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.mlp_world import same as _same
from helpers.mlp_world import values as _values
from helpers.own_process import run_program
from zoo import MLP

import oomkit
from oomkit._engine import patches as _patches

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted

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
    clear = clear or (lambda: optimizer.zero_grad())  # looked up in the step

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


def test_gradients_of_before_are_cleared_once_and_not_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, x = _pair()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    heard = Heard(monkeypatch)
    _step(optimizer, model)(x)
    assert heard.count == 1
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


class Traced:
    """A patch that forwards what it does not have, as tracers do."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def test_odd_patches_are_not_taken_for_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.Optimizer.zero_grad

    def endless() -> None: ...

    endless.__wrapped__ = endless  # type: ignore[attr-defined]
    for patch in (Traced(plain), types.SimpleNamespace(__globals__=None), endless, None):
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", patch)
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


@pytest.mark.parametrize("kind", ["parameter", "groups", "group", "params", "grad"])
def test_what_answers_for_itself_is_asked_by_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer, x = _pair()
    if kind == "parameter":
        optimizer.add_param_group({"params": [Loud(torch.ones(2))]})
    elif kind == "groups":
        optimizer.param_groups = type("Groups", (list,), {})(optimizer.param_groups)
    elif kind == "group":
        optimizer.param_groups[0] = type("Group", (dict,), {})(optimizer.param_groups[0])
    elif kind == "params":
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = type("Params", (list,), {})(params)
    else:
        plain = torch.Tensor.grad
        own = property(lambda p: plain.__get__(p), lambda p, value: plain.__set__(p, value))
        monkeypatch.setattr(torch.nn.Parameter, "grad", own, raising=False)
    heard = Heard(monkeypatch)
    _step(optimizer, model)(x)
    assert heard.count == K


@pytest.mark.parametrize(("count", "at"), [(64, 63), (65, 64), (130, 0), (130, 129)])
def test_the_gradient_of_one_among_many_is_seen(count: int, at: int) -> None:
    model, optimizer, x = _pair()
    many = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
    optimizer.add_param_group({"params": many})
    seen: list[bool] = []

    def clear() -> None:
        many[at].grad = torch.ones(1)
        optimizer.zero_grad()
        seen.append(many[at].grad is None)

    _step(optimizer, model, clear)(x)
    assert seen == [True] * K


def test_a_compiled_function_of_the_step_may_clear() -> None:
    """Elsewhere: what is compiled here would change rules for tests that come later."""
    code = """
        import torch, oomkit
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(backend="eager")
        def loss_of(x):
            optimizer.zero_grad()
            return model(x).pow(2).mean()

        @oomkit.auto_batch(accumulation_steps=4)
        def step(x):
            loss_of(x).backward()
            optimizer.step()

        step(torch.randn(8, 6))
    """
    done = run_program(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


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
