"""What a program is, and the world that one run of it lives in."""

from __future__ import annotations

import logging
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

logger = logging.getLogger("oomkit")

SEED = int(os.environ.get("OOMKIT_TEST_SEED", "20240607"))

# An odd number of rows: two micro-batches of it have different weights.
ROWS = 7

OUTCOMES = ("equal", "said", "refused")
COMPARISONS = {
    "whole": "the whole batch",
    # What draws random numbers, or normalises over what it sees, depends on the slices.
    "slices": "the same slices",
}


@dataclass(frozen=True)
class Program:
    name: str
    family: str
    shows: str
    run: Callable[[World], None]
    decorated: str
    """As the user writes the decorator."""
    outcome: str
    """After an OOM: "equal", "said" or "refused"."""
    says: str | None
    """A regular expression: the warning, the log line, or the error of a refusal."""
    compare: str
    """What a recovered run equals: the whole batch, or an undisturbed run of its slices."""
    tolerance: float
    caller_backward: bool
    """The caller runs the backward: faults strike there, too."""
    accumulates: bool
    """Gradients are there when a step begins: a recovered run may round them otherwise."""
    or_equal: bool
    """Refused at some places, equal at the others."""
    by_proof: bool
    """What the proof shows is put right: an undisturbed run of forced slices has none."""
    found: dict[str, Any]
    """Options that say what the proof finds: the undisturbed run of slices is told them."""


PROGRAMS: dict[str, Program] = {}


def program(
    outcome: str,
    *,
    decorated: str = "@oomkit.auto_batch",
    says: str | None = None,
    compare: str = "whole",
    tolerance: float = 1e-10,
    caller_backward: bool = False,
    accumulates: bool = False,
    or_equal: bool = False,
    by_proof: bool = False,
    found: dict[str, Any] | None = None,
) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Register a program under the name of its function; the docstring says what it shows."""
    assert outcome in OUTCOMES and compare in COMPARISONS
    assert (says is None) == (outcome == "equal")

    def register(run: Callable[[World], None]) -> Callable[[World], None]:
        name = run.__name__
        assert name not in PROGRAMS and run.__doc__
        shows = " ".join(run.__doc__.split()).rstrip(".")
        family = run.__module__.rpartition(".")[2]
        PROGRAMS[name] = Program(
            name,
            family,
            shows,
            run,
            decorated,
            outcome,
            says,
            compare,
            tolerance,
            caller_backward,
            accumulates or caller_backward,
            or_equal,
            by_proof,
            found or {},
        )
        return run

    return register


class Place(NamedTuple):
    """Where memory runs out: the n-th allocation of a phase in one decorated call."""

    call: int
    phase: str
    nth: int


State = dict[str, Any]


@dataclass
class World:
    """One run: what the program made, what it may be disturbed by, and what came out."""

    decorate: bool = False
    place: Place | None = None
    """Fail there, once. With an nth that is never reached, only count."""
    count: str | None = None
    """Count the allocations of this phase in every call."""
    slices: dict[int, list[int]] = field(default_factory=dict)
    """Calls that run over exactly these slices."""
    caller_backward: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Options besides the program's own."""

    seed: int = SEED
    losses: list[float] = field(default_factory=list)
    calls: int = 0
    before: State = field(default_factory=dict)
    """The state before the latest call."""
    after: list[State] = field(default_factory=list)
    """The state after each call."""
    seen: dict[int, int] = field(default_factory=dict)
    fired: int = 0
    _kept: list[Any] = field(default_factory=list)
    _steps: list[Any] = field(default_factory=list)
    remote: State | None = None
    """What stands for `state()` when the run was in another process."""
    records: list[tuple[Any, int]] = field(default_factory=list)
    """For each call the step, and the number of records that it had before."""
    _armed: ExitStack = field(default_factory=ExitStack)

    def keep(self, *things: Any) -> None:
        """What is compared: modules, optimizers, schedulers, tensors, functions of none."""
        self._kept.extend(things)

    def note(self, loss: Any) -> None:
        self.losses.append(float(loss))

    def auto_batch(self, fn: Any = None, /, **options: Any) -> Any:
        """Stands for `oomkit.auto_batch`; in a plain run it is not there at all."""
        if fn is None:
            return lambda fn: self.auto_batch(fn, **options)
        if self.decorate:
            return _Calls(self, oomkit.auto_batch(fn, **options, **self.more))
        return _Calls(self, _with_backward(fn) if options.get("backward") else fn)

    def bare(self, fn: Any = None, /, **options: Any) -> Any:
        """The very object that `oomkit.auto_batch` makes; the program says where a call begins
        by `with world.conditions(step)`, or it is called by a decorated step."""
        if fn is None:
            return lambda fn: self.bare(fn, **options)
        return oomkit.auto_batch(fn, **options, **self.more) if self.decorate else fn

    def state(self) -> State:
        if self.remote is not None:
            return dict(self.remote)
        state: State = {
            "rng": torch.get_rng_state().numpy().copy(),
            "random": pickle.dumps(random.getstate()),
            "numpy": pickle.dumps(np.random.get_state()),
        }
        for i, thing in enumerate(self._kept):
            state.update({f"{i}.{key}": value for key, value in _values(thing)})
        return state

    def taken(self, step: Any) -> Any:
        """A step that is decorated where it is defined: in a plain run, its function."""
        return step if self.decorate else step.__wrapped__

    def told(self) -> list[tuple[int, int]]:
        """Rows and micro-batches of each call, as the steps' records have them."""
        found = []
        for step, position in self.records:
            record = step.records[position] if position < len(step.records) else None
            found.append((record.batch_size or 0, record.accumulation_steps) if record else (0, 1))
        return found

    def accumulation(self) -> dict[int, list[int]]:
        """The slices of the calls that were split."""
        told = enumerate(self.told())
        return {c: [n // k + (i < n % k) for i in range(k)] for c, (n, k) in told if k > 1}

    def disarm(self) -> None:
        self._armed.close()
        self._armed = ExitStack()

    @contextmanager
    def conditions(self, step: Any) -> Iterator[None]:
        """What this call is run under; a fault in the caller's backward stays armed."""
        call, self.calls = self.calls, self.calls + 1
        self.disarm()
        self.before = self.state()
        if self.decorate:
            self.records.append((step, len(step.records)))
        place = Place(call, self.count, 2**60) if self.count else self.place
        with ExitStack() as stack:
            if call in self.slices:
                stack.enter_context(force_slices(self.slices[call]))
            if place is not None and place.call == call:
                stays = self.caller_backward and place.phase == "backward"
                armed = inject_oom(nth=place.nth, phase=place.phase)
                (self._armed if stays else stack).enter_context(_counted(self, call, armed))
            yield
        self.after.append(self.state())


@contextmanager
def _counted(world: World, call: int, armed: inject_oom) -> Iterator[None]:
    try:
        with armed:
            yield
    finally:
        world.seen[call] = armed.seen
        world.fired += armed.fired


def _with_backward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What backward=True stands for where the decorator is taken away."""

    def step(*args: Any, **kwargs: Any) -> Any:
        loss = fn(*args, **kwargs)
        loss.backward()
        return loss.detach()

    return step


class _Calls:
    """The step with a look before and after each call; binds as a function does."""

    def __init__(self, world: World, step: Any) -> None:
        self._world = world
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._step, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self._step.__get__(instance, owner)
        return lambda *args, **kwargs: self._call(bound, args, kwargs)

    def _call(self, step: Any, args: Any, kwargs: Any) -> Any:
        # Of a class or static method the function has the records.
        with self._world.conditions(getattr(self._step, "__func__", self._step)):
            return step(*args, **kwargs)


def _values(thing: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what a thing holds; tensors as arrays of their own."""
    if isinstance(thing, nn.Module):
        for name, p in thing.named_parameters():
            yield name, _array(p)
            yield f"{name}.grad", None if p.grad is None else _array(p.grad)
        for name, b in thing.named_buffers():
            yield name, _array(b)
    elif isinstance(thing, torch.optim.Optimizer):
        for g, group in enumerate(thing.param_groups):
            yield f"lr{g}", float(group["lr"])
            for i, p in enumerate(group["params"]):
                yield f"updated{g}.{i}", _array(p)
                for key, value in thing.state.get(p, {}).items():
                    is_tensor = isinstance(value, torch.Tensor)
                    yield f"state{g}.{i}.{key}", _array(value) if is_tensor else value
    elif isinstance(thing, torch.Tensor):
        yield "tensor", _array(thing)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield str(key), _array(value) if isinstance(value, torch.Tensor) else value
    elif hasattr(thing, "get_last_lr"):
        yield "epoch", thing.last_epoch
        yield "lr", list(thing.get_last_lr())
    else:
        yield "value", thing()


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy().copy()  # numpy's memory: no allocation of torch
