"""Ignite's engines and accelerate's loop need no adapter: `auto_batch` on a function will do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ignite.engine import (
    Engine,
    Events,
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_training_step,
)
from ignite.metrics import Accuracy, Loss
from runs import MODES, Arm, at_most, listening, peak_of, places
from torch import nn
from torch.nn import functional as F

import oomkit

ROWS = 8


class World:
    """A model, its optimizer and batches; what a run of them leaves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4 * ROWS, 6, generator=generator)
        y = torch.randint(0, 3, (4 * ROWS,), generator=generator)
        self.batches = list(zip(x.split(ROWS), y.split(ROWS), strict=True))
        self.seen: list[float] = []
        self.said: list[str] = []
        self.error: oomkit.OutOfMemory | None = None


Work = Callable[[World, Callable[..., Any]], None]


def _run(
    work: Work,
    protect: bool,
    number: int = 0,
    nth: int = 2**40,
    times: int | None = 1,
    slices: dict[int, tuple[int, ...]] | None = None,
    **more: Any,
) -> tuple[World, Arm]:
    world, found = World(), {}

    def look() -> dict[str, Any]:
        tensors = {**world.model.state_dict(), "stream": torch.get_rng_state()}
        return {name: value.clone() for name, value in tensors.items()}

    def wrap(step: Callable[..., Any], **options: Any) -> Any:
        step = oomkit.auto_batch(step, **options, **more) if protect else step
        found["arm"] = Arm(step, number, {"nth": nth, "times": times}, slices, look)
        return found["arm"]

    with listening() as world.said:
        try:
            work(world, wrap)
        except oomkit.OutOfMemory as error:
            world.error = error.with_traceback(None)
    return world, found["arm"]


def _engine(world: World, wrap: Any) -> None:
    step = supervised_training_step(world.model, world.optimizer, F.cross_entropy)
    engine = Engine(wrap(step, optimizer_safety="parts"))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: world.seen.append(e.state.output)
    )
    engine.run(world.batches, max_epochs=1)


def _created(world: World, wrap: Any, window: int = 1) -> None:
    """The engine is Ignite's own, and its function is put into place."""
    engine = create_supervised_trainer(
        world.model, world.optimizer, F.cross_entropy, gradient_accumulation_steps=window
    )
    options = {"gradient_safety": "copy"} if window > 1 else {}
    step = wrap(engine._process_function, optimizer_safety="parts", **options)
    engine._process_function = step
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: world.seen.append(e.state.output)
    )
    engine.run(world.batches, max_epochs=1)


def _created_with_accumulation(world: World, wrap: Any) -> None:
    _created(world, wrap, window=2)


def _accumulating(world: World, wrap: Any) -> None:
    def step(engine: Engine, batch: Any) -> float:
        x, y = batch
        loss = F.cross_entropy(world.model(x), y) / 2
        loss.backward()
        return loss.item()

    engine = Engine(wrap(step))

    @engine.on(Events.ITERATION_COMPLETED(every=2))
    def update() -> None:
        world.optimizer.step()
        world.optimizer.zero_grad()

    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: world.seen.append(e.state.output)
    )
    engine.run(world.batches, max_epochs=1)


def _evaluating(world: World, wrap: Any) -> None:
    metrics = {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)}
    plain = create_supervised_evaluator(world.model)._process_function
    engine = Engine(wrap(plain))
    for name, metric in metrics.items():
        metric.attach(engine, name)
    engine.run(world.batches)
    world.seen += [float(value) for value in engine.state.metrics.values()]


def _accelerated(world: World, wrap: Any) -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(world.model, world.optimizer)

    def step(batch: Any) -> float:
        with accelerator.accumulate(model):
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

    safe = wrap(step, gradient_safety="copy", optimizer_safety="copy")
    for batch in world.batches:
        world.seen.append(safe(batch))


def _counts(arm: Arm) -> tuple[int, ...]:
    """Micro-batches of each call."""
    return tuple(record.accumulation_steps for record in arm.step.records)  # type: ignore[attr-defined]


def _in_the_same_slices(work: Work, counts: tuple[int, ...]) -> World:
    """A run without an error whose calls are split as those of another one were."""
    # The first split call is proven: that one is split by an option.
    first = 1 if work is _evaluating else next(count for count in counts if count > 1)
    forced = {}
    for call, count in enumerate(counts, 1):
        if count != first:
            ends = [ROWS * at // count for at in range(count + 1)]
            forced[call] = tuple(b - a for a, b in itertools.pairwise(ends))
    world, _ = _run(work, True, slices=forced, accumulation_steps=first)
    return world


def _is_left(world: World) -> list[torch.Tensor]:
    states = [world.optimizer.state[p] for p in world.model.parameters()]
    return [*world.model.parameters(), *(each["momentum_buffer"] for each in states if each)]


WORKS = [
    _engine,
    _created,
    _created_with_accumulation,
    _accumulating,
    _evaluating,
    _accelerated,
]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("times", MODES)
def test_an_error_leaves_the_run_as_it_is_without(
    work: Work, number: int, times: int | None
) -> None:
    reference, _ = _run(work, False, number)
    healthy, arm = _run(work, True, number)
    assert healthy.seen == reference.seen and arm.seen > 0
    same: dict[Any, World] = {}
    for nth in places(arm.seen):
        world, failed = _run(work, True, number, nth, times)
        assert failed.fired, nth
        assert (world.error is not None) == (times is None), nth
        if times is None:
            assert not failed.changed, (nth, failed.changed)
            continue
        assert world.seen == pytest.approx(reference.seen, abs=1e-5), nth
        left = _is_left(world)
        for one, two in zip(_is_left(reference), left, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
        counts = _counts(failed)
        if counts not in same:
            split = max(counts) > 1
            same[counts] = _in_the_same_slices(work, counts) if split else reference
        assert world.seen == same[counts].seen, (nth, counts)
        rounded = any("not bit for bit" in line for line in world.said)
        for one, two in zip(_is_left(same[counts]), left, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6 if rounded else 0)


class Wide(World):
    """Its activations are far larger than what is learnt. In double: how a sum over 1,024 rows is
    rounded depends on the machine's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.model.double()
        self.batches = [
            (torch.cat([x.double()] * 128), torch.cat([y] * 128)) for x, y in self.batches
        ]


def _finished(world: Wide, work: Work, protect: bool) -> Any:
    """The step of a whole run."""
    steps: list[Any] = []

    def wrap(step: Callable[..., Any], **options: Any) -> Any:
        steps.append(oomkit.auto_batch(step, **options) if protect else step)
        return steps[-1]

    work(world, wrap)
    return steps[-1]


@pytest.mark.parametrize("work", WORKS)
def test_a_run_with_a_third_of_the_memory(work: Work) -> None:
    """The plain program dies; the protected one ends, and what it has learnt is the same."""
    first, reference, dying, mine = (Wide() for _ in range(4))
    _finished(first, work, False)
    _, third = peak_of(lambda: _finished(reference, work, False), 3)
    with at_most(third), pytest.raises(torch.OutOfMemoryError) as died:
        _finished(dying, work, False)
    assert not isinstance(died.value, oomkit.OutOfMemory)
    del died
    with at_most(third):
        step = _finished(mine, work, True)
    assert max(record.accumulation_steps for record in step.records) > 1
    assert mine.seen == pytest.approx(reference.seen, abs=1e-12)
    for one, two in zip(_is_left(reference), _is_left(mine), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
