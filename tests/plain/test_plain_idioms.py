"""Ways in which programs come to what they change: none of it may stay of a failed attempt."""

from __future__ import annotations

import functools
import operator
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import oomkit
from oomkit._code.plain_state import places
from oomkit._code.uses import uses_of
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted

CALLS = 4
total = 0


class Meter:
    """What most of the idioms change."""

    def __init__(self) -> None:
        self.n, self.seen = 0, []

    def add(self, value: Any) -> Any:
        self.n += 1
        self.seen.append(self.n)
        return value

    def state(self) -> tuple[int, list[int]]:
        return self.n, list(self.seen)


class Box:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Idiom:
    def __init__(
        self,
        make: Callable[[], Any],
        change: Callable[[Any], Any],
        state: Callable[[Any], Any],
    ) -> None:
        self.make, self.change, self.state = make, change, state


IDIOMS: dict[str, Idiom] = {}


def idiom(
    make: Callable[[], Any], state: Callable[[Any], Any]
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        IDIOMS[change.__name__] = Idiom(make, change, state)
        return change

    return add


def _n(o: Any) -> Any:
    return o.n


def _noting() -> Any:
    seen: list[int] = []
    return Box(note=seen.append, seen=seen)


@idiom(_noting, lambda o: list(o.seen))
def a_bound_method_of_a_list(o: Any) -> None:
    o.note(1)


def _meters(o: Any) -> Any:
    return [meter.state() for meter in o.all]


def several() -> Any:
    first, second = Meter(), Meter()
    return Box(first=first, second=second, all=[first, second], by_name={"a": first, "b": second})


# --- classes ---


def counted() -> Any:
    class Counted:
        n = 0
        history: list[int] = []  # noqa: RUF012

    return Counted()


def _of_class(o: Any) -> Any:
    return type(o).n, list(type(o).history)


@idiom(counted, _of_class)
def attribute_of_type(o: Any) -> None:
    type(o).n += 1


@idiom(counted, _of_class)
def attribute_of_the_class(o: Any) -> None:
    o.__class__.n += 1
    o.__class__.history.append(1)


@idiom(counted, _of_class)
def attribute_of_a_named_class(o: Any) -> None:
    kind = type(o)
    kind.n = kind.n + 1
    setattr(type(o), "history", [*kind.history, 1])  # noqa: B010


# --- dictionaries with attributes ---


class AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Munch(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class SelfDict(dict[str, Any]):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class BothDict(dict[str, Any]):
    """EasyDict's: an item is an attribute, too."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)


def attributes(kind: Any) -> Callable[[], Any]:
    return lambda: Box(stats=kind(losses=[], inner=kind(n=0), meter=Meter()))


def _attributes(o: Any) -> Any:
    stats = o.stats
    return len(stats.losses), stats.inner.n, stats["inner"]["n"], stats.meter.state()


def change_attributes(o: Any) -> None:
    o.stats.losses.append(1)
    o.stats.inner.n += 1
    o.stats.meter.add(1)


for _kind in (AttrDict, Munch, SelfDict, BothDict):
    IDIOMS[_kind.__name__] = Idiom(attributes(_kind), change_attributes, _attributes)


class Meters(dict[str, Meter]):
    rounds = 0

    def everything(self) -> None:
        self.rounds += 1
        for meter in self.values():
            meter.add(1)


@idiom(lambda: Meters(a=Meter()), lambda o: (o.rounds, o["a"].state()))
def method_of_a_dict(o: Any) -> None:
    o.everything()


# --- what functions return ---


class Single(Meter):
    _one: Any = None

    @classmethod
    def get(cls) -> Any:
        if cls._one is None:
            cls._one = cls()
        return cls._one

    @staticmethod
    def fetch() -> Any:
        return Single.get()


def single() -> Any:
    Single._one = None
    return None


def the_single(_: Any) -> Any:
    return Single.get().state()


@idiom(single, the_single)
def singleton(o: Any) -> None:
    Single.get().add(1)


@idiom(single, the_single)
def singleton_of_a_static_method(o: Any) -> None:
    Single.fetch().n += 1


class Owner:
    def __init__(self) -> None:
        self._meters = {"a": Meter(), "b": Meter()}

    def meter(self, name: str) -> Meter:
        return self._meters[name]

    @property
    def main(self) -> Meter:
        return self._meters["a"]


def _owned(o: Any) -> Any:
    return [meter.state() for meter in o._meters.values()]


def passed_on(meter: Any) -> Any:
    return meter.inner if hasattr(meter, "inner") else meter


@idiom(Owner, _owned)
def what_a_method_returns(o: Any) -> None:
    o.meter("b").add(1)


@idiom(Owner, _owned)
def what_a_property_returns(o: Any) -> None:
    o.main.add(1)


@idiom(several, _meters)
def what_a_function_passes_on(o: Any) -> None:
    passed_on(o.first).n += 1


@functools.cache
def kept() -> Any:
    return Meter()


def kept_anew() -> Any:
    kept.cache_clear()
    return kept()  # one that a failed attempt makes stays


@idiom(kept_anew, lambda o: o.state())
def what_a_cached_function_returns(o: Any) -> None:
    kept().add(1)


@functools.cache
def kept_list() -> Any:
    return []


def kept_list_anew() -> Any:
    kept_list.cache_clear()
    return kept_list()


@idiom(kept_list_anew, list)
def list_that_a_cached_function_returns(o: Any) -> None:
    kept_list().append(1)


def remembers(value: int, memory: list[int] = []) -> list[int]:  # noqa: B006
    memory.append(value)
    return memory


def forget() -> Any:
    remembers(0).clear()
    return remembers(0)


@idiom(forget, list)
def list_that_is_a_default(o: Any) -> None:
    remembers(1)


@idiom(several, _meters)
def default_of_an_attribute(o: Any) -> None:
    getattr(o, "unknown", o.first).add(1)


# --- methods that are given to functions ---


@idiom(several, _meters)
def mapped(o: Any) -> None:
    list(map(o.first.add, [1]))


@idiom(several, _meters)
def key_of_an_order(o: Any) -> None:
    sorted([2, 1], key=o.second.add)


@idiom(several, _meters)
def mapped_over_a_tree(o: Any) -> None:
    tree_map(o.second.add, {"a": 1})


def caller(function: Callable[[int], Any]) -> None:
    function(1)


@idiom(several, _meters)
def given_to_a_function(o: Any) -> None:
    caller(o.first.add)


@idiom(several, _meters)
def part_of_an_argument(o: Any) -> None:
    caller(functools.partial(o.first.add))


@idiom(lambda: Box(seen=[]), lambda o: list(o.seen))
def append_mapped(o: Any) -> None:
    list(map(o.seen.append, [1]))


def counts(value: Any) -> Any:
    global total
    total += 1
    return value


def reset() -> Any:
    global total
    total = 0


@idiom(reset, lambda _: total)
def function_mapped(o: Any) -> None:
    list(map(counts, [1]))


# --- attributes and variables by name ---


@idiom(lambda: Box(n=0), lambda o: dict(vars(o)))
def updated_dictionary(o: Any) -> None:
    o.__dict__.update(n=o.n + 1, new=1)


@idiom(lambda: Box(n=0, inner=Meter()), lambda o: (o.n, o.new, o.inner.state()))
def item_of_the_dictionary(o: Any) -> None:
    o.__dict__["n"] += 1
    o.__dict__["inner"].add(1)
    o.__dict__["new"] = o.n


@idiom(lambda: Box(n=0, m=0), lambda o: dict(vars(o)))
def items_of_the_dictionary(o: Any) -> None:
    for name in ("n", "m"):
        o.__dict__[name] += 1


@idiom(reset, lambda _: total)
def item_of_globals(o: Any) -> None:
    globals()["total"] += 1


# --- one of several ---


@idiom(several, _meters)
def smallest(o: Any) -> None:
    meter = min(o.all, key=lambda m: m.n)
    meter.add(1)
    max(o.by_name.values(), key=_n).add(1)


@idiom(several, _meters)
def chosen_and_next(o: Any) -> None:
    random.choice(o.all[:1]).add(1)
    next(iter(o.all)).add(1)


@idiom(several, _meters)
def matched(o: Any) -> None:
    match o.by_name:
        case {"a": meter}:
            meter.add(1)


@idiom(several, _meters)
def either_of_two(o: Any) -> None:
    (o.first if o.second.n < 0 else o.second).add(1)
    meter = o.first if o.second.n >= 0 else o.second
    meter.add(1)


@idiom(several, _meters)
def bound_in_branches(o: Any) -> None:
    if o.second.n >= 0:
        meter = o.first
    else:
        meter = o.second
    meter.add(1)


@idiom(several, _meters)
def looped_over(o: Any) -> None:
    for meter in (o.first, o.second):
        meter.add(1)


@idiom(several, _meters)
def sliced(o: Any) -> None:
    for meter in o.all[1:]:
        meter.add(1)


@idiom(lambda: Box(buffer=torch.zeros(3)), lambda o: o.buffer.tolist())
def memory_of_a_tensor(o: Any) -> None:
    o.buffer.numpy()[0] += 1


# --- what a function is given, under its name again ---


def _prepared(o: Any) -> Any:
    o.n += 1
    return o


@idiom(Meter, Meter.state)
def prepared(o: Any) -> None:
    o = _prepared(o)


@idiom(Meter, Meter.state)
def used_before_its_name_is_another(o: Any) -> None:
    o.add(1)
    o = Meter()


@idiom(Meter, Meter.state)
def made_where_it_is_missing(o: Any = None) -> None:
    if o is None:
        o = Meter()
    o.add(1)


@idiom(Meter, Meter.state)
def made_somehow_where_it_is_missing(o: Any = None) -> None:
    if o is None:
        o = eval("Meter()")
    o.add(1)


@idiom(Meter, Meter.state)
def another_in_one_branch(o: Any) -> None:
    if o.n > 100:
        o = Meter()
    elif o.n >= 0:
        o.n += 1
    o.seen.append(o.n)


@idiom(Meter, Meter.state)
def another_in_a_loop(o: Any) -> None:
    for _ in range(3):
        o.add(1)
        o = Meter() if o.n > 100 else o


# --- what others change for the step ---


class Losses(NamedTuple):
    seen: list[int]
    counts: dict[str, int]


@idiom(lambda: Losses([], {"n": 0}), lambda o: (list(o.seen), dict(o.counts)))
def fields_of_a_named_tuple(o: Any) -> None:
    o.seen.append(1)
    o.counts["n"] += 1


class Doubling(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Doubling.runs += 1
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad


def _from_none() -> Box:
    Doubling.runs = 0
    return Box(x=torch.ones(2))


@idiom(_from_none, lambda o: Doubling.runs)
def a_class_whose_apply_counts(o: Any) -> None:
    Doubling.apply(o.x)


def _shuffling() -> Box:
    return Box(x=np.arange(8), rng=np.random.default_rng(0))


@idiom(_shuffling, lambda o: o.x.tolist())
def shuffled_by_a_generator(o: Any) -> None:
    o.rng.shuffle(o.x)


@idiom(_shuffling, lambda o: o.x.tolist())
def copied_to(o: Any) -> None:
    np.copyto(o.x, o.x + 1)


@idiom(_shuffling, lambda o: o.x.tolist())
def put_at(o: Any) -> None:
    np.put(o.x, [0], o.x[0] + 1)


@idiom(lambda: Box(n=0, counts={"n": 0}), lambda o: o.counts["n"])
def set_by_an_operator(o: Any) -> None:
    operator.setitem(o.counts, "n", o.counts["n"] + 1)


@idiom(Meter, Meter.state)
def set_by_the_class_of_all(o: Any) -> None:
    object.__setattr__(o, "n", o.n + 1)


def _count_in(amount: int, into: Any, times: int = 1) -> None:
    into.n += amount * times


def _partial() -> Box:
    meter = Meter()
    return Box(meter=meter, add=functools.partial(_count_in, into=meter))


@idiom(_partial, lambda o: o.meter.state())
def a_partial_with_a_keyword(o: Any) -> None:
    o.add(2)


def _partial_of_two() -> Box:
    meter = Meter()
    return Box(meter=meter, add=functools.partial(_count_in, 2, meter))


@idiom(_partial_of_two, lambda o: o.meter.state())
def a_partial_with_two_arguments(o: Any) -> None:
    o.add(times=3)


class Wrapper:
    def __init__(self) -> None:
        self.inner = Meter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@idiom(Wrapper, lambda o: o.inner.state())
def through_what_answers_for_it(o: Any) -> None:
    o.add(1)


# --- running them ---


class Trainer:
    def __init__(self, idiom: Idiom) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.thing, self.change = idiom.make(), idiom.change

    def step(self, x: torch.Tensor) -> None:
        if oomkit.current().is_last:  # type: ignore[union-attr]
            self.change(self.thing)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(CALLS):
        yield torch.randn(8, 4, generator=generator)


def _run(step: Any, call: int | None, phase: Any) -> None:
    for index, x in enumerate(_batches()):
        if index == call:
            with inject_oom(nth=2, phase=phase) as armed:
                step(x)
            assert armed.fired == 1
        else:
            step(x)


def _compare(ours: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@functools.cache
def _undisturbed(name: str) -> tuple[Any, nn.Module]:
    trainer = Trainer(IDIOMS[name])
    _run(oomkit.auto_batch(trainer.step), None, None)
    return IDIOMS[name].state(trainer.thing), trainer.model


@pytest.mark.sample(86)
@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", IDIOMS)
def test_a_failed_attempt_leaves_nothing(name: str, phase: str, call: int) -> None:
    expected, model = _undisturbed(name)
    ours = Trainer(IDIOMS[name])
    _run(oomkit.auto_batch(ours.step), call, phase)
    assert IDIOMS[name].state(ours.thing) == expected
    _compare(ours.model, model)


@pytest.mark.parametrize(
    ("kind", "phase", "nth"),
    [
        ("parameter", "forward", 4),
        ("parameter", "backward", 13),
        ("accumulated", "forward", 4),  # behind its backward an error says that it has run
        ("module", "forward", 4),
        ("module", "backward", 13),
    ],
)
def test_hooks_of_a_backward_count_nothing_in_a_failed_attempt(
    kind: str, phase: Any, nth: int
) -> None:
    def run(decorate: Callable[[Any], Any], fails: bool) -> Any:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = Meter()
        if kind == "parameter":
            model[2].weight.register_hook(lambda grad: meter.add(None))
        elif kind == "accumulated":
            model[2].weight.register_post_accumulate_grad_hook(lambda p: meter.add(None))
        else:
            model[2].register_full_backward_hook(lambda *given: meter.add(None))

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        protected = decorate(step)
        for index, x in enumerate(_batches()):
            if index == 1 and fails:
                with inject_oom(nth=nth, phase=phase) as armed:
                    protected(x[:1])  # one row: the whole batch runs again
                assert armed.fired == 1
            else:
                protected(x[:1])
        return meter.state()

    assert run(oomkit.auto_batch, True) == run(lambda step: step, False)


def test_what_is_only_read_has_no_place() -> None:
    """A healthy call pays for each place."""
    owner, settings = Owner(), AttrDict(rate=0.1, inner=AttrDict(n=1), names=["a"])
    model = nn.Linear(4, 2)

    def read(*values: Any) -> Any:
        return values

    def step(x: torch.Tensor) -> None:
        read(settings.rate, settings.inner.n, settings.get("rate"), settings.names)
        read(owner.meter("a").n, owner.main.seen, type(owner).__name__, owner.__dict__["_meters"])
        for name in settings.names if x.ndim else settings.inner:
            read(min(owner._meters), name)
        out = model(x) if settings.rate else model(x * 2)
        read(map(read, settings.names), sorted(settings.names, key=len))
        out.mean().backward()

    assert places(step, (torch.zeros(2, 4),), {}, False, []) in (None, ((), ()))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if oomkit.current().is_last and torch.is_grad_enabled():  # type: ignore[union-attr]
            self.calls += 1
        return self.layer(x).tanh()  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """What is recomputed in the backward counts, too: as often as without an error."""

    def __init__(self, given: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.part, self.out, self.given = Part(), nn.Linear(8, 2), given
        self.calls, self.seen = 0, list[int]()

    def block(self, x: torch.Tensor) -> torch.Tensor:
        if oomkit.current().is_last and torch.is_grad_enabled():  # type: ignore[union-attr]
            self.calls += 1
            self.seen.append(len(self.seen))
        return self.part.layer(x).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.given == "method":
            h = checkpoint(self.block, x, use_reentrant=False)
        else:
            h = checkpoint(self.part, x, use_reentrant=False)
        return self.out(h)  # type: ignore[no-any-return]

    def state(self) -> tuple[int, int, list[int]]:
        return self.part.calls, self.calls, self.seen


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(("phase", "nth"), [("forward", 4), ("backward", 2), ("backward", 6)])
@pytest.mark.parametrize("given", ["method", "module"])
def test_a_checkpointed_method_counts_nothing_in_a_failed_attempt(
    given: str, phase: Any, nth: int, call: int
) -> None:
    def run(fails: bool) -> Checkpointed:
        model = Checkpointed(given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.zeros(len(x), 2)).backward()
            optimizer.step()

        for index, x in enumerate(_batches()):
            if fails and index == call:
                with inject_oom(nth=nth, phase=phase) as armed:
                    step(x)
                assert armed.fired == 1
            else:
                step(x)
        return model

    plain, ours = run(False), run(True)
    assert ours.state() == plain.state()
    _compare(ours, plain)


class Worker:
    """What another thread counts while the step runs is its own."""

    def __init__(self) -> None:
        self.n = 0
        self.lock = threading.Lock()

    def work(self, _: Any) -> None:
        self.n += 1


@pytest.mark.parametrize("how", ["thread", "executor", "map", "locked"])
def test_what_other_threads_count_is_left_alone(how: str) -> None:
    meter, worker = Meter(), Worker()
    trainer = Trainer(Idiom(lambda: None, lambda _: None, lambda _: None))
    pool = ThreadPoolExecutor(1)

    def step(x: torch.Tensor) -> None:
        if how == "thread":
            thread = threading.Thread(target=meter.add, args=(1,))
            thread.start()
            thread.join()
        elif how == "executor":
            pool.submit(meter.add, 1).result()
        elif how == "map":
            list(pool.map(meter.add, [1]))
        else:
            caller(worker.work)
        trainer.step(x)

    decorated = oomkit.auto_batch(step)
    with pool, inject_oom(nth=2, phase="backward"):
        decorated(next(_batches()))
    assert (worker.n if how == "locked" else meter.n) == 3


def test_a_path_through_what_is_written_many_times_is_read_quickly() -> None:
    """Names that are bound again and again, in branches, with themselves as arguments."""
    lines = ["def f(x, y):"]
    for i in range(40):
        lines += [
            f"    x = x.a(x, y) if y else x.b{i}[x, y]",
            "    x, y = g(x, y), x.get(y)",
            "    x = [x, y, x][0]",
        ]
    space: dict[str, Any] = {}
    exec("\n".join([*lines, "    return x"]), space)
    before = time.perf_counter()
    uses_of(space["f"].__code__)
    assert time.perf_counter() - before < 5
