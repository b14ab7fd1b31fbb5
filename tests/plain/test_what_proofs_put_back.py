"""What runs of a proof put back is what was there, and odd objects make no step fail."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit._proof.put_back.plain_values import PlainValues
from oomkit.testing import inject_oom

Store = Callable[[Any], None]
State = Callable[[Any], Any]


def train(make: Callable[[], Any], store: Store, fault: inject_oom | None, at: int = 1) -> Any:
    """What is there after three calls, of which one suffers the fault; None: undecorated."""
    torch.manual_seed(0)
    there = make()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        current = oomkit.current()
        if current is None or current.is_last:
            store(there)

    trains = step if fault is None else oomkit.auto_batch(step)
    for call in range(3):
        x = torch.randn(8, 4)
        with fault if fault is not None and call == at else contextlib.nullcontext():
            trains(x)
    if fault is not None:
        assert trains.records[-1].accumulation_steps > 1
    return there


def assert_no_trace(make: Callable[[], Any], store: Store, state: State) -> None:
    without = state(train(make, store, None))
    for at in 1, 0:
        assert state(train(make, store, inject_oom(nth=3, phase="backward"), at)) == without


class Count:
    def __init__(self) -> None:
        self.n = 0


def counts(there: Any) -> None:
    vars(vars(there)["own"])["n"] += 1


def space(**attributes: Any) -> Callable[[], Any]:
    """Attributes that are made anew by each call."""
    return lambda: types.SimpleNamespace(**{name: make() for name, make in attributes.items()})


# --- order ---


def rotate(there: Any) -> None:
    items = vars(there)["items"]
    first = next(iter(items))
    items[first] = items.pop(first)


def rotate_to_end(there: Any) -> None:
    items = vars(there)["items"]
    items.move_to_end(next(iter(items)))


def rotate_a_list(there: Any) -> None:
    items = vars(there)["items"]
    items.insert(0, items.pop())


@pytest.mark.parametrize(
    "kind, store",
    [
        (dict, rotate),
        (collections.OrderedDict, rotate),
        (collections.OrderedDict, rotate_to_end),
        (lambda pairs: list(dict(pairs)), rotate_a_list),
    ],
)
def test_items_stay_in_their_order(kind: Any, store: Store) -> None:
    def state(there: Any) -> list[Any]:
        items = there.items
        return list(items.items() if isinstance(items, dict) else items)

    assert_no_trace(space(items=lambda: kind([("a", 1), ("b", 2), ("c", 3)])), store, state)


# --- objects that answer in ways of their own ---


class Fails:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("==")

    __hash__ = None  # type: ignore[assignment]


class Unbound:
    """A proxy outside of what it stands for."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class Endless(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("iter")

    def __len__(self) -> int:
        raise RuntimeError("len")


class Table(dict[str, int]):
    def __len__(self) -> int:
        raise RuntimeError("len")


class Uncopied(np.ndarray):
    def copy(self, *args: Any) -> Any:
        raise RuntimeError("copy")


class Strict(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no function knows it")


def _overwritten() -> torch.Tensor:
    """A view that raises an error where it is asked for its graph."""
    base = torch.zeros(2, 3, requires_grad=True) * 1
    view = base.unbind(0)[0]
    with torch.no_grad():
        base.add_(1)
    return view


kept = Endless([1])
ODD: dict[str, Callable[[], Any]] = {
    "a mock of a list": lambda: mock.MagicMock(spec=list),
    "a mock of a dict": lambda: mock.MagicMock(spec=dict),
    "a mock of a tensor": lambda: mock.MagicMock(spec=torch.Tensor),
    "a mock of a module": lambda: mock.MagicMock(spec=nn.Module),
    "a proxy of a list": lambda: weakref.proxy(kept),
    "a proxy of what is gone": lambda: weakref.proxy(Count()),
    "an unbound proxy": Unbound,
    "fails": Fails,
    "a list without a length": lambda: Endless([1]),
    "a dict without a length": lambda: Table(a=1),
    "an array that is not copied": lambda: np.zeros(3).view(Uncopied),
    "broadcast arrays": lambda: np.broadcast_arrays(np.zeros(3), np.zeros((2, 3)))[0],
    "a view whose base has been written to": _overwritten,
    "a tensor of its own": lambda: torch.zeros(2).as_subclass(Strict),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_are_left_alone(name: str) -> None:
    assert_no_trace(space(own=Count, odd=ODD[name]), counts, lambda there: there.own.n)


class Asked(list[int]):
    asked = 0

    def __len__(self) -> int:
        type(self).asked += 1
        return 0


class Key:
    asked = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        Key.asked += 1
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value == other.value


def test_no_code_of_the_program_runs_to_note_or_to_put_back() -> None:
    make = space(
        own=Count, items=lambda: Asked([1, 2]), keys=lambda: {Key(1): 0}, set=lambda: {Key(1)}
    )

    def asked(there: Any) -> list[int]:
        found = [Asked.asked, Key.asked]
        Asked.asked = Key.asked = 0
        return found

    train(make, counts, None)
    asked(None)
    assert_no_trace(make, counts, asked)


def test_a_key_whose_hash_changes_stays_one() -> None:
    key = Key(1)

    def store(there: Any) -> None:
        next(iter(vars(there)["keys"])).value += 1

    assert_no_trace(space(keys=lambda: {key: 0}), store, lambda there: list(there.keys.values()))


# --- other forms in which a step leads to something ---


class Static:
    notes: list[int] = []
    total = 0

    def notes_one(self) -> None:
        (STATIC.append,)[0](1)

    @staticmethod
    def adds() -> None:
        (STATIC.append,)[0](2)


class Single:
    """Of which there is one instance, which its class has."""

    one: Single
    n = 0

    def __new__(cls) -> Single:
        return cls.one


Single.one = object.__new__(Single)


class Slot:
    __slots__ = ("n",)


class Slots(Slot):
    __slots__ = ("n",)  # a place beside the inherited one

    def __init__(self) -> None:
        self.n = 0


class Other:
    pass


STATIC: list[int] = []
module = types.ModuleType("program_of_a_test")
exec(  # the module of a program, which its step names
    compile(
        "n = 0\nlog = []\ndef count():\n    globals()['n'] += 1\n    (log.append,)[0](1)\n",
        "program.py",
        "exec",
    ),
    vars(module),
)
vars(module)["__file__"] = "program.py"


def afresh() -> Any:
    STATIC.clear()
    Static.notes.clear()
    Single.one.n = 0
    vars(module).update(n=0)
    vars(module)["log"].clear()
    log: list[int] = []
    held = [0]
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: vars(box).update(n=box.n + 1))
    box, alone = Count(), Count()
    return types.SimpleNamespace(
        **{"bound": log.append, "put": {}.__setitem__, "static": Static(), "layer": layer},
        **{"ref": weakref.ref(alone), "alone": [[[alone]]], "set": {Count()}, "held": held},
        **{"frozen": frozenset({Count()}), "chain": collections.ChainMap({"n": 0})},
        **{"state": Count(), "box": lambda: box.n, "kinds": [Count()]},
        random=random.Random(0),
        slots=Slots(),
        generator=np.random.default_rng(0),
        masked=np.ma.array([1.0, 2.0], mask=[False, True]),
    )


def set_chain(there: Any) -> None:
    chain = vars(there)["chain"]
    chain["n"] += 1


def swaps_class(there: Any) -> None:
    one = vars(there)["kinds"][0]
    setattr(one, "__class__", Other if type(one) is Count else Count)  # noqa: B010


def masks(there: Any) -> None:
    array = vars(there)["masked"]
    array += 1
    array.mask[0] = not array.mask[0]


FORMS: dict[str, tuple[Store, State]] = {
    "a bound method": (lambda w: vars(w)["bound"](1), lambda w: w.bound.__self__),
    "a bound setter": (
        lambda w: vars(w)["put"](len(w.put.__self__), 1),
        lambda w: w.put.__self__,
    ),
    "a method's globals": (lambda w: vars(w)["static"].notes_one(), lambda w: STATIC),
    "a static method's": (lambda w: vars(w)["static"].adds(), lambda w: STATIC),
    "a class": (lambda w: vars(Static)["notes"].append(1), lambda w: Static.notes),
    "a function of a module": (
        lambda w: module.count(),
        lambda w: (vars(module)["n"], vars(module)["log"]),
    ),
    "a variable of a module": (
        lambda w: vars(module).update(n=vars(module)["n"] + 1),
        lambda w: vars(module)["n"],
    ),
    "a weak reference": (
        lambda w: vars(w.ref()).update(n=w.ref().n + 1),
        lambda w: w.ref().n,
    ),
    "a set": (lambda w: [vars(c).update(n=c.n + 1) for c in w.set], lambda w: [c.n for c in w.set]),
    "a frozen set": (
        lambda w: [vars(c).update(n=c.n + 1) for c in w.frozen],
        lambda w: [c.n for c in w.frozen],
    ),
    "a chain": (set_chain, lambda w: w.chain["n"]),
    "a hook": (lambda w: w.layer(torch.zeros(1, 2)), lambda w: w.box()),
    "an object's class": (swaps_class, lambda w: type(w.kinds[0])),
    "a class's instance": (lambda w: vars(Single()).update(n=Single().n + 1), lambda w: Single().n),
    "a slot of two classes": (
        lambda w: setattr(vars(w)["slots"], "n", w.slots.n + 1),
        lambda w: w.slots.n,
    ),
    "a random generator": (lambda w: vars(w)["random"].random(), lambda w: w.random.getstate()),
    "a generator of numpy": (
        lambda w: vars(w)["generator"].random(),
        lambda w: w.generator.bit_generator.state,
    ),
    "a masked array": (masks, lambda w: (w.masked.data.tolist(), w.masked.mask.tolist())),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_the_step_leads_to_is_put_back(name: str) -> None:
    store, state = FORMS[name]
    assert_no_trace(afresh, store, lambda there: repr(state(there)))


def test_the_value_of_a_loss_that_is_kept_is_put_back() -> None:
    """Its graph must not live for that; a step that reads its last loss needs no graph."""

    def store(there: Any) -> None:
        last, seen = vars(there)["last"], there.seen
        seen.append(last.item())
        vars(there)["last"] = (there.weight * (last.item() + len(seen))).sum()

    def weight() -> torch.Tensor:
        return torch.ones(2, requires_grad=True)

    make = space(seen=list, weight=weight, last=lambda: weight().sum())
    assert_no_trace(make, store, lambda there: (there.seen, there.last.item()))


# --- other threads, and cost ---


def _fill(of: Any, ended: threading.Event) -> None:
    i = 0
    while not ended.is_set():
        i += 1
        if isinstance(of, dict):
            of[1000 + i % 50] = 1
            of.pop(1000 + i * 7 % 50, None)
        else:
            of.append(i)


@pytest.mark.parametrize(
    "shared",
    [dict.fromkeys(range(900)), collections.deque(range(900), 1000)],
    ids=["dict", "deque"],
)
def test_another_thread_may_fill_a_container_meanwhile(shared: Any) -> None:
    ended, interval = threading.Event(), sys.getswitchinterval()
    values = PlainValues((lambda: shared, (), {}))
    thread = threading.Thread(target=_fill, args=(shared, ended))
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(100):
            values.note()
            values.put_back()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_what_the_modules_hold_goes_back_whatever_leads_to_them() -> None:
    module = torch.nn.Module()
    module.count = count = Count()
    values = PlainValues((lambda: None, (), {}), [module])
    values.note()
    before = dict(vars(count))
    for name in before:
        setattr(count, name, "of a run")
    values.put_back()
    assert vars(count) == before


@dataclasses.dataclass
class Sample:
    array: np.ndarray
    label: int


@pytest.mark.parametrize("of", ["numbers", "arrays", "objects"])
def test_a_large_program_is_noted_in_a_moment(of: str) -> None:
    make: Callable[[], Any] = {
        "numbers": lambda: list(range(1000)),
        "arrays": lambda: Sample(np.zeros(1 << 17), 0),
        "objects": Count,
    }[of]
    data = {i: [make() for _ in range(64)] for i in range(10 if of == "arrays" else 64)}
    values = PlainValues((lambda: data, (), {}))
    values.note()  # it looks for them once
    values.put_back()
    took = []
    for _ in range(3):
        begin = time.process_time()
        values.note()
        values.put_back()
        took.append(time.process_time() - begin)
    assert min(took) < 0.25  # 0.6 s and more where each item is looked at


KEEPS: dict[str, tuple[Callable[[int], Any], Store]] = {
    "deque": (lambda n: collections.deque(range(n), maxlen=n), lambda kept: kept.append(0.5)),
    "sorted list": (lambda n: [*map(float, range(n))], lambda kept: bisect.insort(kept, 0.5)),
    "list that slides": (
        lambda n: [*range(n)],
        lambda kept: kept.__setitem__(slice(None), [*kept[1:], 0.5]),
    ),
    "dict": (lambda n: dict.fromkeys(range(n)), lambda kept: kept.setdefault(-len(kept))),
    "counter": (lambda n: collections.Counter(range(n)), lambda kept: kept.update([3])),
    "set": (lambda n: {*range(n)}, lambda kept: kept.add(-len(kept))),
}


@pytest.mark.sample(9)
@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("items", [100, 3000, 40_000])
@pytest.mark.parametrize("name", KEEPS)
def test_what_is_kept_once_per_batch_in_long_containers(name: str, items: int) -> None:
    make, keep = KEEPS[name]
    assert_no_trace(lambda: make(items), keep, lambda kept: kept)


class Skips(nn.Module):
    """A layer that one number of Python's stream turns off, for all rows."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draw() < 0.5:
            return x
        out: torch.Tensor = x + self.inner(x).tanh()
        return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.uniform(0, 1), lambda: np.random.rand()]
)
def test_a_stream_whose_functions_a_forward_calls_is_found(
    draw: Callable[[], float], seed: int
) -> None:
    def run(rng: Any) -> list[float]:
        torch.manual_seed(3)
        random.seed(seed)
        np.random.seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), Skips(draw), nn.Linear(4, 1)).double()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        @oomkit.auto_batch(rng=rng)
        def step(x: torch.Tensor) -> float:
            opt.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            opt.step()
            return loss.item()

        x = torch.randn(8, 3, dtype=torch.float64)
        with inject_oom(nth=3, phase="forward"):
            first = step(x)
        return [first, random.random(), np.random.rand()]

    assert run("torch") == run("all")
