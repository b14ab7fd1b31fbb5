"""What a step stores once, after its update: runs of a proof store nothing, in whatever form."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Store = Callable[[Any], None]
FORMS: dict[str, Store] = {}


def form(store: Store) -> Store:
    FORMS[store.__name__] = store
    return store


class Timer:
    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Timer:
        self.count += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.count += 1


class Attributes(dict[str, Any]):
    """Whose items are its attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Mean:
    def __init__(self) -> None:
        self.kept = 0.0

    def __iadd__(self, value: float) -> Mean:
        self.kept = 0.5 * self.kept + value
        return self

    def __setitem__(self, name: str, value: float) -> None:
        self.kept += value


class Slotted:
    __slots__ = ("count",)
    total = 0

    def __init__(self) -> None:
        self.count = 0


class World:
    """What is stored to, in forms that programs have."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.values = [torch.zeros(3), torch.zeros(2)]
        self.nested = [[torch.zeros(2)], [torch.zeros(3), torch.zeros(1)]]
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.array = np.zeros(4)
        self.timer, self.notes, self.mean = Timer(), Attributes(n=0), Mean()
        self.hidden = 0
        self.log: list[int] = []
        self.window: deque[int] = deque(maxlen=2)
        self.slotted = Slotted()
        self.counter, self.counted = _counter()
        Slotted.total = 0
        defaults.clear()
        self.callbacks = [Callback(), Callback()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer.state[self.model.weight]["average"] = torch.zeros(3)
        self.model.weight.average = torch.zeros(3)  # type: ignore[assignment]

    def tell(self, value: int) -> None:
        [callback.on_step(value) for callback in self.callbacks]

    def state(self) -> list[Any]:
        tensors = [*self.values, *(t for some in self.nested for t in some), *self.average.values()]
        tensors += [self.optimizer.state[self.model.weight]["average"], self.model.weight.average]
        own = [
            self.timer.count,
            *(c.count for c in self.callbacks),
            self.notes["n"],
            self.mean.kept,
            self.hidden,
            *(self.log, list(self.window), defaults, self.counted()),
            *(self.slotted.count, Slotted.total, vars(self).get("ready")),
        ]
        return [t.tolist() for t in tensors] + [self.array.tolist(), own]

    @property
    def seen(self) -> int:
        return self.hidden

    @seen.setter
    def seen(self, value: int) -> None:
        self.hidden = value

    @property
    def first(self) -> torch.Tensor:
        return self.values[0]

    @torch.no_grad()
    def moves(self, value: float) -> None:
        self.values[0].add_(value)

    @staticmethod
    def of_one(a: torch.Tensor, b: float) -> None:
        a.mul_(0.5)
        a += b


defaults: list[int] = []


def _note(value: int, into: list[int] = defaults) -> None:
    into.append(value)


def _counter() -> tuple[Callable[[], None], Callable[[], int]]:
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    return count, lambda: n


@torch.no_grad()
def _averages(average: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, p in model.named_parameters():
        average[name].mul_(0.9).add_(p, alpha=0.1)


def _counted(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        return function(*args, **kwargs)

    return call


@_counted
def _adds(values: list[torch.Tensor]) -> None:
    for value in values:
        value += 1


@contextlib.contextmanager
def _timed(values: list[torch.Tensor]) -> Iterator[None]:
    yield
    values[0].add_(1)


@form
def decorated_by_no_grad(w: Any) -> None:
    _averages(w.average, w.model)


@form
def decorated_by_inference_mode(w: Any) -> None:
    w.moves(1.0)


@form
def decorated_by_a_wrapper(w: Any) -> None:
    _adds(w.values)


@form
def a_context_of_a_function(w: Any) -> None:
    with _timed(w.values):
        pass


@form
def two_lists_at_once(w: Any) -> None:
    for a, b in zip(w.values, [1.0, 2.0], strict=True):
        a *= 0.5
        a += b


@form
def counted_two_lists_at_once(w: Any) -> None:
    for _, (a, b) in enumerate(zip(w.values, [1.0, 2.0], strict=True)):
        a.add_(b)


@form
def lists_in_lists(w: Any) -> None:
    for some, more in zip(w.nested, w.nested, strict=True):
        for a, _ in zip(some, more, strict=True):
            a.add_(1)


@form
def a_helper_for_each(w: Any) -> None:
    for a, b in zip(w.values, [1.0, 2.0], strict=True):
        w.of_one(a, b)


@form
def taken_apart(w: Any) -> None:
    a, b = w.values
    a.add_(1)
    b.add_(2)


@form
def a_context(w: Any) -> None:
    with w.timer:
        pass


@form
def attributes_that_are_items(w: Any) -> None:
    w.notes.n += 1


@form
def operators_of_its_own(w: Any) -> None:
    w.mean += 1.0
    w.mean["x"] = 2.0


class Callback:
    def __init__(self) -> None:
        self.count = 0

    def on_step(self, value: int) -> bool:
        self.count += value
        return False


@form
def callbacks_in_comprehensions(w: Any) -> None:
    any(callback.on_step(1) for callback in w.callbacks)
    w.tell(2)


@form
def a_method_by_its_name(w: Any) -> None:
    for callback in w.callbacks:
        getattr(callback, "on_step")(1)  # noqa: B009


@form
def a_property(w: Any) -> None:
    w.seen += 1


@form
def results_put_somewhere(w: Any) -> None:
    torch.add(w.values[0], 1, out=w.values[0])
    np.add.at(w.array, [0, 1], 1.0)
    np.multiply(w.array, 2.0, out=w.array)


@form
def one_of_two(w: Any) -> None:
    mean = w.values[0] if w.hidden == 0 else w.values[1]
    mean.mul_(0.5).add_(1)


@form
def what_a_property_returns(w: Any) -> None:
    w.first.mul_(0.5).add_(1)


@form
def by_vars(w: Any) -> None:
    vars(w)["values"][0][1:] += 1


@form
def a_method_named_by_a_variable(w: Any) -> None:
    for name in ("add_", "mul_"):
        getattr(w.values[0], name)(3)


@form
def an_attribute_of_a_parameter(w: Any) -> None:
    for p in w.model.parameters():
        if hasattr(p, "average"):
            p.average.lerp_(torch.ones(3), 0.5)


@form
def an_entry_of_the_optimizer(w: Any) -> None:
    for state in w.optimizer.state.values():
        torch._foreach_add_([state["average"]], 1.0)


@form
def another_storage(w: Any) -> None:
    for mean in w.values:
        mean.data = mean.data * 0.5 + 1


@form
def a_flag_by_vars(w: Any) -> None:
    if vars(w).get("ready") is None:
        w.first.fill_(3)
    w.first.mul_(0.5)
    vars(w)["ready"] = True


@form
def bound_methods(w: Any) -> None:
    note, more = w.log.append, w.window.append
    for each in (note, more):
        each(1)


@form
def a_default(w: Any) -> None:
    for each in (_note,):
        each(2)


@form
def partials(w: Any) -> None:
    for each in (functools.partial(_note, into=w.log), functools.partial(_note, 3)):
        each(*() if each.args else (4,))


@form
def an_array_by_a_third_argument(w: Any) -> None:
    np.add(w.array, 1, w.array)


@form
def a_slot_and_a_class(w: Any) -> None:
    for name in ("slotted",):
        vars(w)[name].count += 1
        type(vars(w)[name]).total += 1


@form
def a_variable_of_an_inner_function(w: Any) -> None:
    {"": w.counter}[""]()


def train(store: Store, fault: inject_oom | None, at: int = 1) -> list[Any]:
    """The state after three calls, of which one suffers the fault; None: undecorated."""
    w = World()

    def step(x: torch.Tensor) -> None:
        w.optimizer.zero_grad()
        w.model(x).square().mean().backward()
        w.optimizer.step()
        current = oomkit.current()
        if current is None or current.is_last:
            store(w)

    trains = step if fault is None else oomkit.auto_batch(step)
    for call in range(3):
        x = torch.randn(8, 4)
        with fault if fault is not None and call == at else contextlib.nullcontext():
            trains(x)
    if fault is not None:
        assert [r.accumulation_steps > 1 for r in trains.records] == [c >= at for c in range(3)]
        assert fault.fired == 1 + (fault._then is not None)
    return w.state()


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", FORMS)
def test_a_store_after_the_update_is_made_once_in_each_call(name: str) -> None:
    without = train(FORMS[name], None)
    for at in 1, 0:
        assert train(FORMS[name], inject_oom(nth=3, phase="backward"), at) == without


@pytest.mark.parametrize("second", range(2, 60, 5))
def test_so_it_is_where_a_run_of_the_proof_fails(second: int) -> None:
    store = what_a_property_returns
    fault = inject_oom(nth=3, phase="backward", then=inject_oom(nth=second, phase="backward"))
    assert train(store, fault) == train(store, None)


class Shared:
    """With a lock: a thread may set its flag."""

    def __init__(self) -> None:
        self.lock, self.ready, self.seen = threading.Lock(), False, 0


class Both:
    def __init__(self) -> None:
        self.shared, self.own = Shared(), Slotted()


def test_what_threads_share_is_not_put_back_by_a_run_of_a_proof() -> None:
    w, both = World(), Both()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        w.optimizer.zero_grad()
        w.model(x).square().mean().backward()
        w.optimizer.step()
        if oomkit.current().is_last:  # type: ignore[union-attr]
            vars(vars(both)["shared"])["ready"] = True
            vars(vars(both)["shared"])["seen"] += 1
            vars(both)["own"].count += 1

    step(torch.randn(8, 4))
    assert both.own.count == 1
    assert both.shared.ready and both.shared.seen > 1
