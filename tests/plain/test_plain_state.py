"""What a failed attempt did to counters, lists, tensors of the user's is undone."""

from __future__ import annotations

import copy
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:oomkit. the batch of")

SEED = 5
total = 0
stats: dict[str, Any] = {"n": 0}


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(SEED))


def _fail(step: Callable[..., Any], *args: Any, phase: str = "backward", nth: int = 3) -> None:
    """One call that runs out of memory once."""
    with inject_oom(nth=nth, phase=phase) as armed:  # type: ignore[arg-type]
        step(*args)
    assert armed.fired == 1


class Box:
    pass


# What a step does to `o`, and what it has done after one call on 8 rows, split or not.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], None]]] = {}


def change(make: Callable[[], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[[Any, torch.Tensor], None]) -> Callable[..., None]:
        CHANGES[function.__name__] = (make, function)
        return function

    return add


def box(**values: Any) -> Callable[[], Any]:
    def make() -> Any:
        made = Box()
        made.__dict__.update(copy.deepcopy(values))
        return made

    return make


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@change(box(n=0))
def rows_counted(o: Any, x: torch.Tensor) -> None:
    o.n += len(x)


@change(Slots)
def rows_in_a_slot(o: Any, x: torch.Tensor) -> None:
    o.n += len(x)


@change(box())
def attribute_made(o: Any, x: torch.Tensor) -> None:
    o.n = getattr(o, "n", 0) + len(x)


@change(box())
def attribute_by_name(o: Any, x: torch.Tensor) -> None:
    setattr(o, "n", getattr(o, "n", 0) + len(x))  # noqa: B010


@change(box(inner=box(n=0)()))
def attribute_of_an_attribute(o: Any, x: torch.Tensor) -> None:
    o.inner.n += len(x)


@change(dict)
def dict_filled(o: Any, x: torch.Tensor) -> None:
    o["n"] = o.get("n", 0) + len(x)


@change(lambda: {"n": 0})
def dict_item_of_a_constant(o: Any, x: torch.Tensor) -> None:
    if o["n"] == 0 and len(x) == 8:
        o["n"] = 7


@change(OrderedDict)
def ordered_dict_filled(o: Any, x: torch.Tensor) -> None:
    o["n"] = o.get("n", 0) + len(x)


@change(lambda: defaultdict(list))
def lists_in_a_dict(o: Any, x: torch.Tensor) -> None:
    o["n"].extend([1] * len(x))


@change(lambda: {"n": [1]})
def list_in_a_dict(o: Any, x: torch.Tensor) -> None:
    o["n"].extend([1] * len(x))


@change(lambda: {"a": box(n=0)(), "b": box(n=0)()})
def objects_in_a_dict(o: Any, x: torch.Tensor) -> None:
    for meter in o.values():
        meter.n += len(x)


@change(Counter)
def counter_updated(o: Any, x: torch.Tensor) -> None:
    o.update(n=len(x))


@change(list)
def list_extended(o: Any, x: torch.Tensor) -> None:
    o.extend([0] * len(x))


@change(lambda: [3, 1, 2] * 1000)
def long_list_extended(o: Any, x: torch.Tensor) -> None:
    o.extend([0] * len(x))


@change(lambda: [0, 7])
def list_item_stored(o: Any, x: torch.Tensor) -> None:
    o[0] += len(x)


@change(lambda: deque([1], maxlen=30))
def deque_extended(o: Any, x: torch.Tensor) -> None:
    o.extend([0] * len(x))


@change(set)
def set_filled(o: Any, x: torch.Tensor) -> None:
    o.update((len(o), i) for i in range(len(x)))


@change(lambda: [torch.zeros(2)])
def tensor_in_place(o: Any, x: torch.Tensor) -> None:
    o[0].add_(len(x))


@change(lambda: [torch.zeros(2)])
def tensor_data(o: Any, x: torch.Tensor) -> None:
    o[0].data.add_(len(x))


@change(box(t=torch.zeros(2)))
def tensor_replaced(o: Any, x: torch.Tensor) -> None:
    o.t = o.t + len(x)


@change(box(t=torch.zeros(2)))
def tensor_of_a_local(o: Any, x: torch.Tensor) -> None:
    (t,) = (o.t,)
    t.detach().add_(len(x))


@change(lambda: nn.Sequential(nn.Linear(2, 2)))
def attribute_of_a_module(o: Any, x: torch.Tensor) -> None:
    o[0].seen = getattr(o[0], "seen", 0) + len(x)


@change(lambda: [np.zeros(3)])
def array_in_place(o: Any, x: torch.Tensor) -> None:
    o[0][1] += len(x)


def _plain(o: Any) -> Any:
    """Comparable."""
    if isinstance(o, (Box, nn.Module)):
        own = {k: v for k, v in vars(o).items() if not k.startswith("_") and k != "training"}
        return {k: _plain(v) for k, v in own.items()}
    if isinstance(o, Slots):
        return o.n
    if isinstance(o, (list, deque)):
        return [_plain(v) for v in o]
    if isinstance(o, dict):
        return {k: _plain(v) for k, v in o.items()}
    return o.tolist() if isinstance(o, (torch.Tensor, np.ndarray)) else o


@pytest.mark.sample(46)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("where", ["closure", "helper", "argument", "method"])
def test_a_failed_attempt_counts_nothing(name: str, where: str) -> None:
    make, function = CHANGES[name]
    thing, expected = make(), make()
    first = thing[0] if isinstance(thing, list) and thing else None
    model, optimizer = _model()

    def run(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    class Trainer:
        def __init__(self) -> None:
            self.state = thing

        def plain(self, x: torch.Tensor) -> None:
            function(self.state, x)
            run(x)

    def by_closure(x: torch.Tensor) -> None:
        function(thing, x)
        run(x)

    def helper(x: torch.Tensor, o: Any) -> None:
        function(o, x)

    def by_helper(x: torch.Tensor) -> None:
        helper(x, thing)
        run(x)

    def by_argument(x: torch.Tensor, o: Any) -> None:
        function(o, x)
        run(x)

    if where == "argument" and isinstance(thing, (list, dict, deque, set)):
        pytest.skip("containers among the arguments may be the batch")
    if where == "argument":
        decorated = oomkit.auto_batch(by_argument, static=("o",))
        step = functools.partial(decorated, o=thing)
    else:
        step = oomkit.auto_batch(
            {"closure": by_closure, "helper": by_helper, "method": Trainer().plain}[where]
        )
    _fail(step, _x())
    for rows in (4, 4):
        function(expected, _x(rows))
    assert _plain(thing) == _plain(expected)
    assert first is None or thing[0] is first or name == "list_item_stored"


@pytest.mark.parametrize("how", ["each", "foreach", "method"])
def test_tensors_that_a_function_gives_out_go_back_after_a_proof(how: str) -> None:
    """An average that the step moves in its last micro-batch, and in what is compared."""

    class Average:
        def __init__(self, params: list[torch.Tensor]) -> None:
            self.means = [p.detach().clone() for p in params]

        def of_all(self) -> list[torch.Tensor]:
            return self.means

    def run(decorated: bool) -> list[torch.Tensor]:
        model, optimizer = _model()
        average = Average(list(model.parameters()))
        gives = average.of_all if how == "method" else lambda: means  # noqa: E731
        means = average.means

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if not decorated or oomkit.current().is_last:  # type: ignore[union-attr]
                with torch.no_grad():
                    move(gives, list(model.parameters()))

        trains = oomkit.auto_batch(step) if decorated else step
        for index in range(3):
            if decorated and index == 1:
                _fail(trains, _x())
            else:
                trains(_x())
        return average.means

    def each(gives: Callable[[], list[torch.Tensor]], params: list[torch.Tensor]) -> None:
        for mean, p in zip(gives(), params, strict=True):
            mean.lerp_(p, 0.1)

    def together(gives: Callable[[], list[torch.Tensor]], params: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(list(gives()), params, 0.1)

    move = together if how == "foreach" else each
    for ours, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4)
