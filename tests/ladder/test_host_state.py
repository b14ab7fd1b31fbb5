"""Optimizer state in host memory: the same updates, the same checkpoints, and back again."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from helpers.sample import sampled
from helpers.seeds import seed_all

import oomkit
from oomkit.testing import inject_oom

WIDTH, LAYERS, ROWS = 128, 4, 8
PARAMS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4  # bytes
BATCH = ROWS * WIDTH * 4


class Program:
    """A deep linear model, the batch made anew in each step."""

    def __init__(self, name: str, **options: Any) -> None:
        seed_all(3)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers)
        given: dict[str, Any] = {"lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}
        self.optimizer = getattr(torch.optim, name)(self.model.parameters(), **given)
        self.generator = torch.Generator().manual_seed(5)
        model, optimizer = self.model, self.optimizer

        @oomkit.auto_batch(label="program", **options)
        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        self.step = step

    def batch(self) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=self.generator)

    def run(self, steps: int) -> list[float]:
        return [self.step(self.batch()) for _ in range(steps)]

    def picture(self) -> list[Any]:
        """In numpy's memory, which no budget counts."""
        values = [p.detach().numpy().copy() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            values += [v.numpy().copy() for v in state.values() if isinstance(v, torch.Tensor)]
        return values


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(numpy.array_equal, a, b))


def allocated() -> int:
    return oomkit.memory("cpu").allocated or 0


@contextmanager
def room(parameters: float) -> Iterator[None]:
    """So many times the model's parameters, and the batch and its activations."""
    gc.collect()
    with oomkit.limit_memory(allocated() + int(parameters * PARAMS) + 8 * BATCH, device="cpu"):
        yield


# What AdamW's state alone takes is twice the parameters; its temporaries twice a layer.
ROOMS = {"AdamW": 2.8, "SGD": 2.2, "RMSprop": 2.5}


@pytest.mark.parametrize("name", ROOMS)
def test_each_update_is_bitwise_that_of_a_run_with_room(name: str) -> None:
    plain = Program(name, ladder=())
    losses = plain.run(5)
    expected = plain.picture()
    del plain
    with room(ROOMS[name]):
        program = Program(name)
        assert program.run(5) == losses
        assert [r.rung for r in program.step.records] == [2] * 5
        assert same(program.picture(), expected)


@pytest.mark.parametrize("name", ROOMS)
def test_without_the_rung_it_is_out_of_memory_and_nothing_has_moved(name: str) -> None:
    with room(ROOMS[name]):
        program = Program(name, ladder=("update",))
        before = program.picture()
        with pytest.raises(oomkit.OutOfMemory) as caught:
            program.run(1)
        assert not caught.value.committed
        assert same(program.picture(), before)
        assert not program.optimizer.state or all(not s for s in program.optimizer.state.values())


def test_where_there_is_room_nothing_is_climbed() -> None:
    with room(6.0):
        program = Program("AdamW")
        program.run(3)
        assert [r.rung for r in program.step.records] == [0, 0, 0]


def test_checkpoints_show_the_same_and_can_be_loaded() -> None:
    plain = Program("AdamW", ladder=())
    plain.run(2)
    expected = plain.optimizer.state_dict()
    with room(2.8 + 6.0):  # the plain one stays
        with oomkit.limit_memory(allocated() + int(2.8 * PARAMS) + 8 * BATCH, device="cpu"):
            program = Program("AdamW")
            program.run(2)
            assert program.step.records[-1].rung == 2
            given = program.optimizer.state_dict()
        assert given["param_groups"] == expected["param_groups"]
        assert given["state"].keys() == expected["state"].keys()
        for a, b in zip(given["state"].values(), expected["state"].values(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) for k in a)
        saved = pickle.loads(pickle.dumps(given))
        program.optimizer.load_state_dict(copy.deepcopy(saved))
        other = Program("AdamW")
        other.model.load_state_dict(plain.model.state_dict())
        other.optimizer.load_state_dict(saved)
        for one in (other, plain, program):
            one.generator.manual_seed(9)
        assert other.run(2) == plain.run(2) == program.run(2)


def test_it_goes_back_when_there_is_room_again() -> None:
    with room(2.8):
        program = Program("AdamW")
        program.run(2)
    counted = allocated()
    with room(4.0):
        program.run(12)
    assert program.step.records[-1].rung == 0
    assert allocated() - counted >= 2 * PARAMS - LAYERS * WIDTH * 16


def test_a_step_outside_every_call_is_the_plain_one() -> None:
    def finish(program: Program) -> list[Any]:
        program.optimizer.zero_grad()
        program.model(torch.ones(2, WIDTH)).sum().backward()
        program.optimizer.step()
        return program.picture()

    plain = Program("AdamW", ladder=())
    plain.run(2)
    expected = finish(plain)
    del plain
    with room(2.8):
        program = Program("AdamW")
        program.run(2)
    assert same(finish(program), expected)


@pytest.mark.parametrize("which", ["first", "later"])
@pytest.mark.parametrize("phase", ["optimizer", "backward", "forward"])
@pytest.mark.filterwarnings("ignore")
def test_a_failure_anywhere_is_undone_and_repeated(phase: str, which: str) -> None:
    calls = 0 if which == "first" else 2
    plain = Program("AdamW", ladder=())
    plain.run(calls + 1)
    expected = plain.picture()
    del plain
    with room(2.9):
        program = Program("AdamW")
        program.run(calls)
        x = program.batch()
        with inject_oom(nth=10**9, phase=phase) as fault:
            program.step(x)
        count = fault.seen
        del program
        for nth in sampled(range(1, count + 1), 12, f"{phase} {which}"):
            program = Program("AdamW")
            program.run(calls)
            x = program.batch()
            with inject_oom(nth=nth, phase=phase) as fault:
                program.step(x)
            assert fault.fired == 1
            record = program.step.records[-1]
            if record.accumulation_steps == 1:
                assert same(program.picture(), expected), (nth, record)
            else:
                for a, b in zip(program.picture(), expected, strict=True):
                    numpy.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            del program


def test_a_thousand_calls_hold_nothing_more() -> None:
    with room(2.8):
        program = Program("AdamW")
        program.run(20)
        gc.collect()
        counted, objects = allocated(), len(gc.get_objects())
        program.run(1000 if sampled.__globals__["WHOLE"] else 100)
        gc.collect()
        assert allocated() == counted
        assert abs(len(gc.get_objects()) - objects) < 50
        state = {id(v) for s in program.optimizer.state.values() for v in s.values()}
        hosted = oomkit._ladder.state.hosted_state(program.optimizer, None)
        assert hosted is not None
        assert set(hosted) <= state
        del program, hosted
    gc.collect()
    assert not list(oomkit._ladder.state._all)


def test_in_a_trial_there_is_no_ladder_unless_asked() -> None:
    before = oomkit._C._ladder_scope(0)
    try:
        with room(2.8):
            with pytest.raises(oomkit.OutOfMemory):
                Program("AdamW").run(1)
            Program("AdamW", ladder="auto").run(1)
    finally:
        assert oomkit._C._ladder_scope(before) == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_state_that_a_program_brings_back_is_moved_again(in_place: bool) -> None:
    plain = Program("AdamW", ladder=())
    losses = plain.run(4)
    expected = plain.picture()
    del plain
    with room(2.8):
        program = Program("AdamW", min_micro_batch=ROWS)
        assert program.run(2) == losses[:2]
        x = [program.batch() for _ in range(2)]
    gc.collect()
    budget = allocated() + int(0.8 * PARAMS) + 8 * BATCH  # beside parameters and gradients
    for state in program.optimizer.state.values():
        for key, value in state.items():
            if in_place:
                value.data = value.data.clone()
            else:
                state[key] = value.clone()
    with oomkit.limit_memory(budget, device="cpu"):
        assert [program.step(each) for each in x] == losses[2:]
    assert [r.rung for r in program.step.records] == [2] * 4
    assert same(program.picture(), expected)


class ManyRetriesError(Exception):
    """Raised in place of a call that would never end."""


def few(retries: int) -> Any:
    def on_retry(record: oomkit.Record) -> None:
        if record.ooms > retries:
            raise ManyRetriesError(record)

    return on_retry


def wrapped_by_hand(optimizer: Any) -> None:
    original = optimizer.step
    optimizer.step = lambda *args, **kwargs: original(*args, **kwargs)


def wrapped_above_a_schedule(optimizer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step = torch.no_grad()(optimizer.step)


@pytest.mark.parametrize("safety", ["predict", "copy"])
@pytest.mark.parametrize("wrap", [wrapped_by_hand, wrapped_above_a_schedule])
def test_an_update_that_cannot_go_on_ends(wrap: Any, safety: str) -> None:
    """Each attempt at it brings all state back, so that there would be some to move for ever."""
    with room(16.0):
        program = Program("AdamW", optimizer_safety=safety, on_retry=few(20))
        wrap(program.optimizer)
        program.run(2)
    before, x = program.picture(), program.batch()
    with room(-1.0), pytest.raises(oomkit.OutOfMemory):
        program.step(x)
    assert same(program.picture(), before)


@pytest.mark.parametrize("wrap", [wrapped_by_hand, wrapped_above_a_schedule])
def test_an_update_that_is_not_cut_is_not_left_half_done(wrap: Any) -> None:
    """It is known not to fit before it runs."""
    program = Program("AdamW", on_retry=few(20))
    wrap(program.optimizer)
    before, x = program.picture(), program.batch()
    with room(3.2), pytest.raises(oomkit.OutOfMemory):
        program.step(x)
    assert same(program.picture(), before)
    with room(8.0):
        program.step(x)
    assert program.step.records[-1].rung == 0
