"""Faults inside a recovery: a part of recovery_points.py's enumerations, and what they found."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from helpers.recovery_world import FORMS, Judge, quiet
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit._code.module_buffers import Buffers
from oomkit.testing import inject_oom
from undo.recovery_points import SUITES, Own, Point, chain, prove, run

SEED = int(os.environ.get("OOMKIT_FUZZ_SEED", "1"))
# How many points there are between two that are done here, for some 6 seconds in all.
STRIDES = {
    "out of memory once": 3419,
    "out of memory from there on": 3419,
    "oomkit's own memory": 1815,
    "oomkit's own memory from there on": 1815,
    "again in a later attempt": 4479,
    "again, in oomkit's own memory": 4479,
    "again, and from there on": 4479,
    "an interrupt at a line": 72023,
    "an exception at a line": 72023,
    "an interrupt at a function": 5007,
    "an exception at a function": 5007,
    "out of memory at a function": 5007,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", SUITES)
def test_no_fault_leaves_a_wrong_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = SEED + list(SUITES).index(name)
    forms = [FORMS[at % len(FORMS)], FORMS[(3 * at + 1) % len(FORMS)]]  # two of them each
    monkeypatch.setattr("undo.recovery_points.FORMS", sorted(set(forms)))
    first = 1 + (7 * SEED) % min(STRIDES[name], 5)  # the shortest has five points
    count, failures = prove(name, STRIDES[name], first)
    assert failures == []
    assert count > 0, "nothing was done"


def test_the_judge_sees_what_is_wrong() -> None:
    """Each kind of thing that may be left behind is looked at."""
    judge = Judge("flag")
    for number, spoil in enumerate(
        (
            lambda w: w.net[0].weight.data.add_(1),
            lambda w: setattr(w.net[0].weight, "grad", None),
            lambda w: w.net[1].running_mean.add_(1),
            lambda w: torch.rand(1),
            lambda w: w.counter.add(1.0),
            lambda w: w.net.eval(),
            lambda w: vars(w.opt).update(left=None),
            lambda w: w.net[0].register_forward_hook(lambda *a: None),
            lambda w: torch.set_grad_enabled(False),
        )
    ):
        world = judge.world()
        with quiet():
            result = world.run()
        assert judge.judge(world, "call", result, None, Own) == []
        spoil(world)
        try:
            assert judge.judge(world, "call", result, None, Own) != [], number
        finally:
            torch.set_grad_enabled(True)


# --- what was found ---


def disturbed(judge: Judge, disturb: Any, own: type[BaseException] = Own) -> BaseException | None:
    """The error of a run, after whose end all was well."""
    world = judge.world()
    error = result = None
    with quiet():
        try:
            result = world.run(0, disturb)
        except BaseException as caught:
            error = caught
    assert judge.judge(world, "call", result, error, own) == []
    return error


def test_refused_copies_are_an_error_of_ours_before_anything_ran() -> None:
    fault = inject_oom(phase="recovery", times=None)
    error, wrong = run(Judge("returned", gradients=True), "back", fault)
    assert wrong == []
    with pytest.raises(oomkit.OutOfMemory, match="its backward.. was being prepared") as caught:
        raise error or Own
    assert "the state is as before the step" in str(caught.value)


def test_what_a_failed_backward_left_is_taken_back_where_it_cannot_be_drained() -> None:
    """The few bytes of the draining backward were refused, and nothing was rolled back."""
    judge = Judge("flag")
    with inject_oom(nth=2**60) as count:
        judge.world().run()
    late = count.seen - 2  # gradients of some leaves are there
    assert disturbed(judge, chain({"nth": late}, {"phase": "recovery"})) is None


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_a_copy_that_was_refused_is_made_by_the_next_attempt() -> None:
    """A half-filled list of copies was taken for a whole one from then on."""
    model = nn.Linear(3, 2)
    model.weight.grad = torch.ones(2, 3)
    model.bias.grad = torch.ones(2)

    @oomkit.auto_batch(model=model, gradient_safety="copy")
    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        if step.records[-1:] and len(x) < 4 and oomkit.current().is_last:
            raise Own

    step(torch.zeros(4, 3))
    before = [p.grad.clone() for p in model.parameters()]
    for nth in (1, 2):
        with inject_oom(nth=nth, phase="recovery") as fault, pytest.raises(Own) as caught:
            step(torch.zeros(4, 3))
        assert fault.fired == 1
        assert not any("undone" in note for note in caught.value.__notes__)
        assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))


class Participant:
    """Whose restore() fails some times."""

    def __init__(self, error: BaseException, times: int) -> None:
        self.error, self.times, self.value = error, times, 0

    def save(self) -> int:
        return self.value

    def restore(self, value: int) -> None:
        if self.times > 0:
            self.times -= 1
            raise self.error
        self.value = value


def with_participant(participant: Participant) -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    failed: Seen[Any] = Seen()

    @oomkit.auto_batch(model=model, participants=(participant,))
    def step(x: torch.Tensor) -> None:
        participant.value += 1
        model(x).sum().backward()
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. ")

    return step, model, torch.randn(4, 3)


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Own("mine")])
def test_an_exception_while_rolling_back_passes_when_all_is_back(error: BaseException) -> None:
    participant = Participant(error, 1)
    step, model, x = with_participant(participant)
    with pytest.raises(type(error)) as caught:
        step(x)
    assert caught.value is error
    assert all(p.grad is None for p in model.parameters())
    assert model[1].num_batches_tracked == 0
    assert participant.value == 0
    step(x)
    assert participant.value == 1


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_out_of_memory_while_rolling_back_is_recovered_from() -> None:
    participant = Participant(torch.OutOfMemoryError("CUDA error: out of memory"), 2)
    step, model, x = with_participant(participant)
    step(x)
    assert (participant.value, step.records[-1].accumulation_steps) == (1, 2)
    assert all(p.grad is not None for p in model.parameters())


def test_a_roll_back_that_fails_each_time_is_said() -> None:
    participant = Participant(Own("mine"), 9)
    step, _, x = with_participant(participant)
    with pytest.raises(Own) as caught:
        step(x)
    assert "may contain a part of this batch" in caught.value.__notes__[0]
    participant = Participant(torch.OutOfMemoryError("CUDA error: out of memory"), 9)
    step, _, x = with_participant(participant)
    with pytest.raises(oomkit.PartialUpdate, match="each time it was undone"):
        step(x)


def test_out_of_memory_in_the_users_hook_is_one_clear_error() -> None:
    def hook(record: Any) -> None:
        torch.empty(1 << 20)
        raise AssertionError("not reached")

    model = nn.Linear(3, 2)

    @oomkit.auto_batch(model=model, on_retry=hook)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x = torch.zeros(4, 3)
    with inject_oom(times=None), pytest.raises(oomkit.OutOfMemory, match="hook"):
        step(x)
    assert model.weight.grad is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_hooks_are_put_into_modules_leaves_none() -> None:
    """One that comes inside of register_forward_hook() has no handle to remove."""
    modules = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    before = [
        {k: dict(v) for k, v in vars(m).items() if isinstance(v, dict) and "hook" in k}
        for m in modules
    ]
    for nth in range(1, 1000):
        point = Point(inject_oom(), nth, KeyboardInterrupt)

        def trace(frame: Any, event: str, _: Any, point: Point = point) -> Any:
            if event == "line" and not point.happened and frame.f_code.co_name != "remove":
                point.arrive(frame.f_code.co_name)
            return trace  # noqa: B023

        found = None
        sys.settrace(trace)
        try:
            found = Buffers(modules)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if found is not None:  # to its end, or it came in a callback that lets nothing pass
            found.remove()
        if not point.happened:
            break
        after = [{k: vars(m)[k] for k in was} for m, was in zip(modules, before, strict=True)]
        assert after == before, nth
    assert nth > 30


def test_a_later_part_of_an_evaluation_takes_the_earlier_ones_back_with_it() -> None:
    """batch_norm in training mode had moved in the parts that were kept."""
    torch.manual_seed(SEED)
    model = nn.BatchNorm1d(3)
    calls: Seen[Any] = Seen()

    @oomkit.auto_batch(model=model, accumulation_steps=2, min_micro_batch=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        with torch.no_grad():
            y = model(x)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return y

    with quiet(), pytest.raises(oomkit.OutOfMemory):
        step(torch.randn(4, 3))
    assert model.num_batches_tracked == 0
    assert torch.equal(model.running_mean, torch.zeros(3))


def test_an_interrupt_in_an_update_says_that_it_may_be_half_done() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(model=model, optimizer=optimizer)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        step(torch.ones(4, 3))
    assert "do not repeat the batch" in caught.value.__notes__[0]
