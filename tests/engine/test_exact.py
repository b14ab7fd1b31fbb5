"""The promise: a recovered step equals the undisturbed step over the same slices, bit for bit.

Allocations of forward and backward are failed in turn: once, and again in the replay until the
micro-batch is small enough. `make prove` fails every one of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.sample import sampled, with_rest
from zoo import World, difference, loss_step, make_world, note_gradients, same, whole_step

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

KINDS = ["mlp", "conv", "gpt"]
PLACES = 3  # of each phase


def _run(world: World, form: str, fault: dict[str, Any] | None, **options: Any) -> Any:
    """Three steps; the fault strikes in the first. Returns (state, fault or None)."""
    armed = None
    if form == "whole":
        step = oomkit.auto_batch(whole_step(world), **options)
    else:
        step = oomkit.auto_batch(loss_step(world), backward=True, **options)
    for i, batch in enumerate(world.batches):
        if form == "backward":
            world.optimizer.zero_grad()
        if fault is not None and i == 0:
            with inject_oom(**fault) as armed:
                loss = step(batch)
        else:
            loss = step(batch)
        world.losses.append(loss.item() if isinstance(loss, torch.Tensor) else loss)
        note_gradients(world)
        if form == "backward":
            world.optimizer.step()
    return world.state(), armed, step


def _count(kind: str, form: str, phase: str) -> int:
    world = make_world(kind)
    _, armed, _ = _run(world, form, {"nth": 2**60, "phase": phase})
    return int(armed.seen)


@pytest.mark.parametrize("form", ["whole", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_allocation_failed_once(kind: str, form: str) -> None:
    expected, _, _ = _run(make_world(kind), form, None, accumulation_steps=2)
    swept = 0
    for phase in ("forward", "backward"):
        for n in sampled(range(1, _count(kind, form, phase) + 1), PLACES, phase):
            world = make_world(kind)
            got, armed, step = _run(world, form, {"nth": n, "phase": phase})
            assert armed.fired == 1, (phase, n)
            assert step.records[0].ooms == 1
            assert step.records[0].accumulation_steps == 2
            assert same(expected, got), (phase, n, difference(expected, got))
            swept += 1
    print(f"{kind} {form}: {swept} faults, all replayed bitwise equal")
    assert swept >= 2 * PLACES


UNTIL = list(itertools.product(KINDS, ["whole", "backward"]))


@pytest.mark.parametrize(
    ("kind", "form"), with_rest(sampled(UNTIL, 3, "until", kind=lambda case: case[0]), UNTIL)
)
def test_every_allocation_failed_until_k_is_large_enough(kind: str, form: str) -> None:
    """Each replay fails at its first allocation until k = 8 (2, then four times that), a
    micro-batch of one row; k stays 2 where the second error is in rows that only the proof
    runs, which need not fit."""
    expected = {k: _run(make_world(kind), form, None, accumulation_steps=k)[0] for k in (2, 8)}
    swept = 0
    for phase in ("forward", "backward"):
        for n in sampled(range(1, _count(kind, form, phase) + 1), PLACES, phase):
            world = make_world(kind)
            got, armed, step = _run(world, form, {"nth": n, "times": 2, "phase": phase})
            assert armed.fired == 2, (phase, n)
            want = expected[step.records[0].accumulation_steps]
            assert same(want, got), (phase, n, difference(want, got))
            swept += 1
    print(f"{kind} {form}: {swept} persistent faults, all replayed bitwise equal")
    assert swept > 5


@pytest.mark.parametrize("kind", KINDS)
def test_without_oom_bitwise_the_undecorated_step(kind: str) -> None:
    plain = make_world(kind)
    step = whole_step(plain)
    for batch in plain.batches:
        plain.losses.append(step(batch))
        note_gradients(plain)
    got, _, decorated = _run(make_world(kind), "whole", None)
    assert same(plain.state(), got), difference(plain.state(), got)
    assert [r.ooms for r in decorated.records] == [0, 0, 0]


def test_nothing_smaller_than_one_row_leaves_the_state_as_it_was() -> None:
    world = make_world("conv")
    before = world.state()
    step = oomkit.auto_batch(ladder=())(whole_step(world))
    with inject_oom(nth=3, times=None, phase="forward"):
        with pytest.raises(oomkit.OutOfMemory, match="as before the step") as caught:
            step(world.batches[0])
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.committed is False
    assert [a["micro_batch_size"] for a in caught.value.report.attempts] == [8, 4, 1]
    assert same(before, world.state()), difference(before, world.state())
    assert all(p.grad is None for p in world.model.parameters())
    assert not world.optimizer.state


@pytest.mark.parametrize("kind", ["conv", "gpt"])
def test_faults_with_two_threads(kind: str) -> None:
    """A parallel kernel allocates on both threads; every third allocation is enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected, _, _ = _run(make_world(kind), "whole", None, accumulation_steps=2)
        for phase in ("forward", "backward"):
            for n in sampled(range(1, _count(kind, "whole", phase) + 1, 3), PLACES, phase):
                got, armed, _ = _run(make_world(kind), "whole", {"nth": n, "phase": phase})
                assert armed.fired == 1
                assert same(expected, got), (phase, n, difference(expected, got))
    finally:
        torch.set_num_threads(threads)
