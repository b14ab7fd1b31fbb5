"""A step binds like what it decorates: methods of every kind, callables, any argument."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit.testing import inject_oom

X = torch.arange(12.0).reshape(6, 2)


def _out_of_memory_once(call: Callable[[], Any]) -> Any:
    with inject_oom(nth=1) as armed:
        result = call()
    assert armed.fired == 1
    return result


class Above:
    """The decorator stands above the others."""

    factor = 3.0

    @oomkit.auto_batch
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @oomkit.auto_batch(label="class method")
    @classmethod
    def class_method(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @oomkit.auto_batch
    @staticmethod
    def static_method(x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    @oomkit.auto_batch
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def times(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return x * factor

    partial_method = oomkit.auto_batch(functools.partialmethod(times, factor=3.0))


class Below:
    """The decorator stands below them."""

    factor = 3.0

    @classmethod
    @oomkit.auto_batch(label="class method")
    def class_method(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @staticmethod
    @oomkit.auto_batch
    def static_method(x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    @oomkit.auto_batch
    def times(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return x * factor

    partial_method = functools.partialmethod(times, factor=3.0)


class Heir(Above):
    factor = 5.0

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return super().method(x) + 1


class DecoratedHeir(Above):
    @oomkit.auto_batch
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return super().method(x) + 1


KINDS: dict[str, Callable[[], Any]] = {
    "method": lambda: Above().method,
    "method of the class": lambda: functools.partial(Above.method, Above()),
    "class method above": lambda: Above.class_method,
    "class method above, of an object": lambda: Above().class_method,
    "class method below": lambda: Below.class_method,
    "class method below, of an object": lambda: Below().class_method,
    "static method above": lambda: Above.static_method,
    "static method above, of an object": lambda: Above().static_method,
    "static method below": lambda: Below.static_method,
    "static method below, of an object": lambda: Below().static_method,
    "partialmethod above": lambda: Above().partial_method,
    "partialmethod below": lambda: Below().partial_method,
    "__call__": Above,
    "partial of a step": lambda: functools.partial(Below.times, Below(), factor=3.0),
    "step of a partial": lambda: oomkit.auto_batch(
        functools.partial(Above.times, None, factor=3.0)
    ),
    "step of a bound method": lambda: oomkit.auto_batch(Above().times, static="factor"),
    "step of a callable object": lambda: oomkit.auto_batch(Callable3()),
    "step of a builtin": lambda: oomkit.auto_batch(torch.mul),
}


class Callable3:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_binds_and_is_split(kind: str) -> None:
    step = KINDS[kind]()
    if kind == "step of a bound method":
        step = functools.partial(step, factor=3.0)
    if kind == "step of a builtin":
        step = functools.partial(step, other=torch.tensor(3.0))
    assert torch.equal(step(X), X * 3)
    assert torch.equal(_out_of_memory_once(lambda: step(X)), X * 3)
    assert torch.equal(step(X), X * 3)


def test_a_class_method_gets_the_class_it_is_called_on() -> None:
    assert torch.equal(Heir.class_method(X), X * 5)
    assert torch.equal(_out_of_memory_once(lambda: Heir().class_method(X)), X * 5)
    assert Above.class_method.label == "class method"
    assert isinstance(vars(Above)["class_method"], classmethod)
    assert isinstance(vars(Above)["static_method"], staticmethod)


@pytest.mark.parametrize("kind", [Heir, DecoratedHeir])
def test_super_calls_the_decorated_method(kind: type[Above]) -> None:
    expected = X * kind.factor + 1
    assert torch.equal(kind().method(X), expected)
    assert torch.equal(_out_of_memory_once(lambda: kind().method(X)), expected)


def test_a_callable_that_does_not_bind_is_none_in_a_class_either() -> None:
    class Holder:
        of_object = oomkit.auto_batch(Callable3())
        of_partial = oomkit.auto_batch(functools.partial(torch.mul, 3.0))
        of_builtin = oomkit.auto_batch(torch.neg)
        of_bound = oomkit.auto_batch(Callable3().__call__)

    holder = Holder()
    for step, expected in (
        (holder.of_object, X * 3),
        (holder.of_partial, X * 3),
        (holder.of_builtin, -X),
        (holder.of_bound, X * 3),
    ):
        assert torch.equal(step(X), expected)
        assert torch.equal(_out_of_memory_once(lambda step=step: step(X)), expected)
    assert torch.equal(holder.of_object(X), X * 3)  # the interpreter's own way to call


def test_a_callable_is_told_its_name_in_a_class() -> None:
    class Named:
        name = ""

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = f"{owner.__name__}.{name}"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    named = Named()
    holder = type("Holder", (), {"step": oomkit.auto_batch(named), "f": oomkit.auto_batch(len)})
    assert named.name == "Holder.step"
    assert holder.step.label == "Named"  # type: ignore[attr-defined]


def test_data_classes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        factor: float = 3.0

        @oomkit.auto_batch
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    @dataclasses.dataclass(slots=True)
    class Slots:
        factor: float = 3.0

        @oomkit.auto_batch
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    for thing in (Frozen(), Slots()):  # the second takes no weak references
        assert torch.equal(thing.step(X), X * 3)
        assert torch.equal(_out_of_memory_once(lambda thing=thing: thing.step(X)), X * 3)
    assert [f.name for f in dataclasses.fields(Frozen)] == ["factor"]


@pytest.mark.parametrize("above", [True, False])
def test_abstract_methods_stay_abstract(above: bool) -> None:
    if above:
        step = oomkit.auto_batch(abc.abstractmethod(lambda self, x: x))
        make = oomkit.auto_batch(classmethod(abc.abstractmethod(lambda cls, x: x)))
    else:
        step = abc.abstractmethod(oomkit.auto_batch(lambda self, x: x))
        make = classmethod(abc.abstractmethod(oomkit.auto_batch(lambda cls, x: x)))
    Base = abc.ABCMeta("Base", (), {"step": step, "make": make})
    assert Base.__abstractmethods__ == {"step", "make"}
    with pytest.raises(TypeError, match="abstract"):
        Base()


def _positional_only(x: torch.Tensor, /, scale: float = 3.0) -> torch.Tensor:
    return x * scale


def _keyword_only(*, scale: float = 3.0, x: torch.Tensor) -> torch.Tensor:
    return x * scale


def _second(scale: float, x: torch.Tensor) -> torch.Tensor:
    return x * scale


def _starred(scale: float, *x: torch.Tensor) -> torch.Tensor:
    return x[0] * scale


def _double_starred(scale: float, **x: torch.Tensor) -> torch.Tensor:
    return x["x"] * scale


def _everything(a: float, /, b: float, *c: torch.Tensor, d: float = 1.0, **e: Any) -> torch.Tensor:
    return c[0] * a * b * d * e["f"]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "name"),
    [
        (_positional_only, (X,), {}, "x"),
        (_keyword_only, (), {"x": X}, "x"),
        (_second, (3.0, X), {}, "x"),
        (_second, (), {"x": X, "scale": 3.0}, "x"),
        (_starred, (3.0, X), {}, "args[0]"),
        (_double_starred, (3.0,), {"x": X}, "x"),
        (_everything, (3.0, 1.0, X), {"f": 1.0}, "args[0]"),
    ],
)
def test_the_batch_may_be_any_argument(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:
    step = oomkit.auto_batch(function)
    assert torch.equal(step(*args, **kwargs), X * 3)
    assert torch.equal(_out_of_memory_once(lambda: step(*args, **kwargs)), X * 3)
    if "[" not in name:
        named = oomkit.auto_batch(function, batch=name, accumulation_steps=3)
        assert torch.equal(named(*args, **kwargs), X * 3)
    with pytest.raises(TypeError) as plain:
        function()
    with pytest.raises(TypeError) as decorated:
        step()
    assert str(decorated.value) == str(plain.value)


class Parts(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Parts(), "first, second"),
        (lambda: Parts().forward, "first, second"),
        (lambda: functools.partial(_second, 3.0), "x"),
        (Callable3, "x"),
    ],
)
def test_parameter_names_are_those_of_the_callable(make: Any, names: str) -> None:
    with pytest.raises(TypeError, match=f"expected a parameter of the function: {names} .help"):
        oomkit.auto_batch(make(), batch="nothing")


def test_what_is_no_parameter_beside_star_args_is_said_by_the_call() -> None:
    step = oomkit.auto_batch(
        functools.partial(_starred, 3.0), batch="nothing", accumulation_steps=2
    )
    with pytest.raises(oomkit.SplitError, match=r"a parameter of the function: \*args \(help"):
        step(X, X)


@pytest.mark.refusals
def test_a_batch_that_is_bound_already_is_no_argument() -> None:
    step = oomkit.auto_batch(functools.partial(_second, x=X), label="closed")
    assert torch.equal(step(3.0), X * 3)
    with inject_oom(nth=1), pytest.raises(oomkit.OutOfMemory, match="no batch to split"):
        step(3.0)


def test_a_recursive_step_is_protected_as_one() -> None:
    @oomkit.auto_batch
    def step(x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return x if depth == 0 else step(x + 1, depth - 1)

    assert torch.equal(_out_of_memory_once(lambda: step(X)), X + 3)
    assert len(step.records) == 1


class Agent(nn.Module):
    """A step that is a method of what it trains, and that another decorated one calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    @oomkit.auto_batch
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).pow(2).mean()

    @oomkit.auto_batch
    def train_step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_method_that_calls_another_decorated_one(phase: str) -> None:
    x = X.double()
    torch.manual_seed(1)
    whole = Agent()
    torch.manual_seed(1)
    split = Agent()
    expected = whole.train_step(x)
    with inject_oom(nth=1, phase=phase) as armed:
        got = split.train_step(x)
    assert armed.fired == 1
    assert got == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(whole.net.weight, split.net.weight, rtol=0, atol=1e-12)


# --- what is refused ---


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x


def test_decorated_twice_without_options_is_the_same_step() -> None:
    step = oomkit.auto_batch(_twice, accumulation_steps=2)
    assert oomkit.auto_batch(step) is step
    above = Above()
    assert oomkit.auto_batch(above.method) == above.method


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: oomkit.auto_batch(oomkit.auto_batch(_twice), reduction="sum"),
            "auto_batch() got options for <oomkit.auto_batch step _twice>, which is decorated "
            "already: give all of them at the first decoration, or decorate its __wrapped__",
        ),
        (
            lambda: oomkit.auto_batch(Above.method.__get__(Above()), reduction="sum"),
            "auto_batch() got options for <oomkit.auto_batch step Above.method>, which is "
            "decorated already: give all of them at the first decoration, or decorate its "
            "__wrapped__",
        ),
        (
            lambda: oomkit.auto_batch(Above),
            f"auto_batch() cannot protect the class {Above!r}: decorate the method of it that "
            "is the step (its forward, its training_step)",
        ),
        (
            lambda: oomkit.auto_batch(property(_twice)),
            "auto_batch() expected a callable, got property",
        ),
    ],
)
def test_refused_with_a_text(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert message_of(caught.value) == text


def test_a_step_behind_other_callables_is_found() -> None:
    """Its options would be ignored without a word, reduction="sum" among them."""

    class Net(nn.Module):
        @oomkit.auto_batch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    step = oomkit.auto_batch(_twice, reduction="sum")
    for given in (functools.partial(step), oomkit.guard()(step), Above(), Net()):
        with pytest.raises(
            TypeError,
            match=r"which (wraps|leads to) <oomkit.auto_batch step \S+>, a decorated .*: dec",
        ):
            oomkit.auto_batch(given)


async def _coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


async def _async_generator(x: torch.Tensor) -> Any:
    yield x


def _generator(x: torch.Tensor) -> Any:
    yield x


@pytest.mark.parametrize("wrap", [classmethod, staticmethod, functools.partial, "method", "call"])
@pytest.mark.parametrize("function", [_coroutine, _async_generator, _generator])
def test_what_runs_later_is_refused_behind_anything(wrap: Any, function: Any) -> None:
    given: Any
    if wrap == "method":
        given = function.__get__(X)
    elif wrap == "call":
        given = type("Later", (), {"__call__": function})()
    else:
        given = wrap(function)
    kind = "generator" if function is _generator else "async"
    with pytest.raises(TypeError, match=rf"auto_batch\(\) cannot protect the {kind} function"):
        oomkit.auto_batch(given)
