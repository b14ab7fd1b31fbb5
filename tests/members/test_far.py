"""What stands far from the step, as in the callbacks of a trainer, or where no search looks."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import AveragedModel

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

SEED = 3
STEPS = 5
FAILS = 2  # the step whose whole batch does not fit
Get = Callable[[], Any]


class Counted(nn.Module):
    """Its buffer tells how often it ran in training, and by what."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.total += x.sum()
        return x


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slots:
    __slots__ = ("empty", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


class MoreSlots(Slots):
    __slots__ = ("__dict__", "__weakref__", "more")


@dataclass(slots=True)
class Data:
    held: Any


def _objects(kind: Any, value: Any) -> Get:
    """Five of them, one in the other."""
    box = kind(kind(kind(kind(kind(value)))))
    return lambda: box.held.held.held.held.held


def _callback(value: Any) -> Get:
    trainer = Box(Box([Box({"ema": value})]))
    return lambda: trainer.held.held[0].held["ema"]


def _containers(value: Any) -> Get:
    registry = {"a": [{"b": ({"c": value},)}]}
    return lambda: registry["a"][0]["b"][0]["c"]


FAR: dict[str, Callable[[Any], Get]] = {
    "objects": lambda value: _objects(Box, value),
    "slots": lambda value: _objects(Slots, value),
    "inherited slots": lambda value: _objects(MoreSlots, value),
    "dataclasses with slots": lambda value: _objects(Data, value),
    "a callback": _callback,
    "containers": _containers,
}


def _deque(value: Any) -> Get:
    held = deque([value])
    return lambda: held[0]


def _generator(value: Any) -> Get:
    def forever() -> Iterator[Any]:
        while True:
            yield value

    held = forever()
    return lambda: next(held)


def _weak(value: Any) -> Get:
    held = weakref.ref(value)
    return lambda: held()


HIDDEN: dict[str, Callable[[Any], Get]] = {
    "deque": _deque,
    "generator": _generator,
    "weak reference": _weak,
}


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(SEED)
    new = [torch.randn(8, n, generator=made, dtype=torch.float64) for n in (4, 2) * STEPS]
    return list(zip(new[::2], new[1::2], strict=True))


def _train(step: Any, phase: str) -> None:
    for i, (x, y) in enumerate(_data()):
        if i != FAILS:
            step(x, y)
            continue
        with inject_oom(nth=1, phase=phase) as armed:
            step(x, y)
        assert armed.fired == 1


def _model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(4, 4), Counted(), nn.Linear(4, 2)).double()


def _values(*modules: nn.Module) -> list[float]:
    return [v for m in modules for t in m.state_dict().values() for v in t.flatten().tolist()]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("where", FAR)
def test_a_model_far_away_is_like_one_that_the_step_names(where: str, phase: str) -> None:
    """Its buffers go back after the failure, and after the runs of a proof."""

    def train(far: bool) -> list[float]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        get = FAR[where](model) if far else None

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss((model if get is None else get())(x), y).backward()
            optimizer.step()

        if far:  # the name is there no more
            step.__wrapped__.__closure__[
                step.__wrapped__.__code__.co_freevars.index("model")
            ].cell_contents = None
            _train(step, phase)
            assert get is not None
            model = get()
        else:
            _train(step, phase)
        return _values(model)

    with pytest.warns(oomkit.OomkitWarning, match="'total' of a Counted"):
        expected = train(far=False)
    with pytest.warns(oomkit.OomkitWarning, match="'total' of a Counted"):
        assert train(far=True) == expected


@pytest.mark.parametrize("kind", [Slots, MoreSlots, Data])
def test_slots_are_looked_into(kind: Any) -> None:
    model = _model()
    box = kind(kind(model))

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(box.held.held(x), y).backward()

    with pytest.warns(oomkit.OomkitWarning, match="'total' of a Counted"):
        _train(step, "backward")
    alone = _model()
    for x, _ in _data():
        alone(x)
    assert model[1].total.item() == pytest.approx(alone[1].total.item(), rel=1e-12)


NET: Any = None  # what the following read where no search looks


class Reads:
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(NET(x), y)

    @staticmethod
    def static(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(NET(x), y)

    @property
    def net(self) -> nn.Module:
        return NET


reads = Reads()
READ: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a method": lambda x, y: reads.loss(x, y),
    "a static method": lambda x, y: Reads.static(x, y),
    "a property": lambda x, y: F.mse_loss(reads.net(x), y),
    "getattr": lambda x, y: getattr(reads, "lo" + "ss")(x, y),
    "globals": lambda x, y: F.mse_loss(globals()["NE" + "T"](x), y),
}


@pytest.mark.parametrize("how", READ)
def test_the_model_of_a_known_optimizer_takes_part_whatever_leads_to_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monkeypatch.setattr(sys.modules[__name__], "NET", model)

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()

        with pytest.warns(oomkit.OomkitWarning, match="'total' of a Counted"):
            _train(step, "backward")
        return _values(model)

    assert train(READ[how]) == train(lambda x, y: F.mse_loss(NET(x), y))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: sched.StepLR(o, 2, 0.5),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 20),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=1),
}
METRIC = {"plateau": (1.0,)}  # what its step() is given


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("where", {**HIDDEN, **FAR})
def test_a_hidden_scheduler_is_stepped_once(where: str, name: str, before: bool) -> None:
    def train(decorate: bool) -> tuple[list[float], dict[str, Any]]:
        model = nn.Linear(4, 2, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        get = {**HIDDEN, **FAR}[where](scheduler)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            if before:
                get().step(*METRIC.get(name, ()))
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if not before:
                get().step(*METRIC.get(name, ()))

        if decorate:
            _train(oomkit.auto_batch(step), "forward")
        else:
            for x, y in _data():
                step(x, y)
        return _values(model), scheduler.state_dict()

    (expected, state), (got, got_state) = train(False), train(True)
    assert got_state == state
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("where", HIDDEN)
def test_a_hidden_average_of_the_weights_is_updated_once(where: str, scheduled: bool) -> None:
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = sched.StepLR(optimizer, 1) if scheduled else None
    average = AveragedModel(model)
    get = HIDDEN[where](average)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        get().update_parameters(model)

    _train(step, "forward")
    assert average.n_averaged == STEPS
    assert scheduler is None or scheduler.last_epoch == 0


@pytest.mark.parametrize("replaced", [True, False])
def test_what_is_made_and_hidden_after_the_first_call_is_stepped_once(replaced: bool) -> None:
    """Also before the loss, where the failed attempt has moved it."""
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = deque([sched.StepLR(optimizer, 100)])
    averaged: deque[Any] = deque()
    calls = iter(range(STEPS))

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for scheduler in hidden:
            scheduler.step()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for average in averaged:
            average.update_parameters(model)

    def call(x: torch.Tensor, y: torch.Tensor) -> None:
        if next(calls) == FAILS - 1:
            if replaced:
                hidden.clear()
            hidden.append(sched.ExponentialLR(optimizer, 0.5))
            averaged.append(AveragedModel(model))
        step(x, y)

    _train(call, "forward")
    assert hidden[-1].last_epoch == averaged[0].n_averaged == STEPS - FAILS + 1
    assert replaced or hidden[0].last_epoch == STEPS
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (STEPS - FAILS + 1))


class Unrelated(sched.LRScheduler):
    """Whose __init__ calls none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1


@pytest.mark.parametrize("how", ["copy", "pickle", "no super().__init__"])
def test_hidden_ones_that_no_init_of_torchs_has_made_are_stepped_once(how: str) -> None:
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden: deque[Any] = deque()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if hidden:
            hidden[0].step()
            hidden[1].update_parameters(model)

    x, y = _data()[0]
    step(x, y)
    if how == "copy":
        hidden.extend([copy.copy(sched.ExponentialLR(optimizer, 0.5))])
    elif how == "pickle":
        state = vars(sched.ExponentialLR(optimizer, 0.5))
        hidden.append(sched.ExponentialLR.__new__(sched.ExponentialLR))
        vars(hidden[0]).update(state)
    else:
        hidden.append(Unrelated(optimizer))
    hidden.append(copy.deepcopy(AveragedModel(model)))
    _train(step, "forward")
    assert hidden[0].last_epoch == hidden[1].n_averaged == STEPS


def test_signatures_of_torchs_classes_are_what_they_were() -> None:
    oomkit.auto_batch(lambda x: x)(torch.ones(2))
    for kind in (sched.LRScheduler, sched.StepLR, sched.ReduceLROnPlateau, AveragedModel):
        own = list(inspect.signature(kind.__init__).parameters)[1:]
        assert list(inspect.signature(kind).parameters) == own


def test_a_hidden_scheduler_is_known_to_a_later_search() -> None:
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = sched.StepLR(optimizer, 1)
    get = _deque(scheduler)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        get().step()
        nn.Linear(1, 1)  # after which those who take part are searched for again
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    _train(step, "forward")
    assert scheduler.last_epoch == STEPS
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1**6)


class Odd(nn.Module):
    """Somebody else's, which cannot be asked for its parameters."""

    @property
    def _parameters(self) -> Any:
        raise RuntimeError("not ready")

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        pass


def test_a_parameter_of_no_module_and_odd_modules_of_others_do_no_harm() -> None:
    odd = Odd()
    model = nn.Linear(4, 2, dtype=torch.float64)
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * F.mse_loss(model(x), y)).backward()
        optimizer.step()

    _train(step, "backward")
    got = weight.item()
    owner = nn.Module()
    owner.late, owner.total = weight, Counted()  # now a module has it
    with torch.no_grad():
        model.weight.copy_(torch.ones(2, 4))
    with inject_oom(nth=1, phase="backward") as armed:
        step(*_data()[0])
    assert armed.fired == 1 and weight.item() != got and isinstance(odd, nn.Module)
