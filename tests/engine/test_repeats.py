"""The whole batch runs again (of one row, say, which no micro-batch is smaller than): not where it
would not do the same, because something that a failed attempt has changed stays changed."""

from __future__ import annotations

import functools
import itertools
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn
from torch.optim.swa_utils import AveragedModel

import oomkit
from oomkit.testing import inject_oom

SEED, WIDTH, CALLS = 23, 6, 3
TWICE = "does not do the same when it runs again"


class Program:
    """A loss with a factor that each call takes from somewhere."""

    def __init__(self, kind: str, depth: int = 1) -> None:
        torch.manual_seed(SEED)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(depth)]
        self.model = nn.Sequential(*(layer for block in layers for layer in block)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.runs = Seen[int]()
        self.factor: Callable[[], float] = getattr(self, kind)
        self.n, self.left, self.right = 0, 1.0, 2.0
        self.stack = [float(i + 1) for i in range(20)]
        self.order = OrderedDict((i, i + 1.0) for i in range(9))
        if kind == "takes_from_a_queue":  # objects with a lock are left as they are
            self.queue: queue.Queue[float] = queue.Queue()
            for i in range(20):
                self.queue.put(i + 1.0)
        self.rates: Iterator[float] = iter(list(self.stack))
        self.rate = {"rate": functools.partial(next, itertools.count(1))}

    # what goes back

    def count(self) -> float:
        self.n += 1
        return self.n

    def swap(self) -> float:
        self.left, self.right = self.right, self.left
        return self.left

    def pop(self) -> float:
        return self.stack.pop()

    # what does not

    def moves_to_end(self) -> float:
        self.order.move_to_end(next(iter(self.order)))
        return next(iter(self.order.values()))

    def takes_from_a_queue(self) -> float:
        return self.queue.get()

    def hidden_count(self) -> float:
        return self.rate["rate"]()

    def own_dictionary(self) -> float:
        values = vars(self)
        values["n"] += 1
        return self.n

    def state_of_the_optimizer(self) -> float:
        state = self.optimizer.state[self.model[0].weight]
        state["calls"] = state.get("calls", 0) + 1
        return float(state["calls"])

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        return self.model(x).square().mean() * self.factor()

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


class Iterating(Program):
    """Its code names the iterator."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        return self.model(x).square().mean() * next(self.rates)


def _batches(count: int = CALLS, rows: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(rows, WIDTH, generator=generator).double() for _ in range(count)]


BACK = ("count", "swap", "pop")
STAYS = (
    "moves_to_end", "takes_from_a_queue", "hidden_count", "own_dictionary",
    "state_of_the_optimizer",
)  # fmt: skip
PLACES = [("forward", 1), ("forward", 2), ("backward", 1), ("backward", 3)]


@pytest.mark.parametrize(("phase", "nth"), PLACES)
@pytest.mark.parametrize("failing", range(CALLS))
@pytest.mark.parametrize("kind", BACK)
def test_what_goes_back_is_trained(kind: str, failing: int, phase: str, nth: int) -> None:
    plain, program, batches = Program(kind), Program(kind), _batches()
    torch.manual_seed(SEED)
    losses = [plain.step(x) for x in batches]
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    for i, x in enumerate(batches):
        if i == failing:
            with inject_oom(nth=nth, phase=phase):
                assert step(x) == losses[i]
        else:
            assert step(x) == losses[i]
    torch.testing.assert_close(program.weights(), plain.weights(), rtol=0, atol=0)


class Scheduled(Program):
    """A scheduler and an average of the weights move at the end of the step."""

    def __init__(self) -> None:
        super().__init__("count")
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.average = AveragedModel(self.model)

    def step(self, x: torch.Tensor) -> float:
        loss = super().step(x)
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss

    def weights(self) -> list[torch.Tensor]:
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"])
        averages = [p.detach().clone() for p in self.average.parameters()]
        return [rate, *averages, *super().weights()]


@pytest.mark.parametrize(("phase", "nth"), PLACES)
@pytest.mark.parametrize("failing", range(CALLS))
def test_what_moves_at_its_end_moves_once(failing: int, phase: str, nth: int) -> None:
    plain, program, batches = Scheduled(), Scheduled(), _batches()
    torch.manual_seed(SEED)
    losses = [plain.step(x) for x in batches]
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    for i, x in enumerate(batches):
        with inject_oom(nth=nth, phase=phase) if i == failing else nullcontext():
            assert step(x) == losses[i]
    torch.testing.assert_close(program.weights(), plain.weights(), rtol=0, atol=0)
    assert program.scheduler.last_epoch == CALLS and program.average.n_averaged == CALLS


@pytest.mark.sample(60)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("phase", "nth"), PLACES)
@pytest.mark.parametrize("failing", range(CALLS))
@pytest.mark.parametrize("kind", STAYS)
def test_what_does_not_is_an_error(
    kind: str, failing: int, phase: str, nth: int, times: int
) -> None:
    """`times`: the run that is to show it may fail, too, and is made again on another rung."""
    program, batches = Program(kind), _batches()
    step = oomkit.auto_batch(program.step)
    for x in batches[:failing]:
        step(x)
    before = program.weights()
    with inject_oom(nth=nth, phase=phase, times=times), pytest.raises(oomkit.OutOfMemory) as caught:
        step(batches[failing])
    text = str(caught.value)
    # In the first calls nothing is kept that could give room: no rung is left.
    assert TWICE in text or (times == 2 and "the smallest allowed" in text)
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


def test_it_is_shown_once_for_a_step() -> None:
    program, batches = Program("count"), _batches()
    step = oomkit.auto_batch(program.step)
    runs = []
    for x in batches:
        before = len(program.runs)
        with inject_oom(nth=1, phase="backward"):
            step(x)
        runs.append(len(program.runs) - before)
    assert runs[0] > runs[1] == runs[2] == 2


def test_without_verification_it_is_not() -> None:
    program, (x,) = Program("hidden_count"), _batches(1)
    with inject_oom(nth=1, phase="backward"):
        oomkit.auto_batch(program.step, verify=False)(x)
    assert len(program.runs) == 2


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("phase", "nth"), PLACES)
def test_an_iterator_that_the_code_names_is_an_error(phase: str, nth: int, verify: bool) -> None:
    program, batches = Iterating("count"), _batches()
    step = oomkit.auto_batch(program.step, verify=verify)
    step(batches[0])
    before, runs = program.weights(), len(program.runs)
    with inject_oom(nth=nth, phase=phase), pytest.raises(oomkit.OutOfMemory) as caught:
        step(batches[1])
    assert "iterator self.rates" in str(caught.value)
    assert len(program.runs) == runs + 1
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


def test_so_it_is_in_an_evaluation() -> None:
    program, (x,) = Iterating("count"), _batches(1)

    @oomkit.auto_batch
    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return program.loss(x)

    with inject_oom(nth=3), pytest.raises(oomkit.OutOfMemory, match="iterator"):
        evaluate(x)


def test_what_the_runs_change_is_put_back() -> None:
    """A count that nothing of the step depends on, and that no roll-back of an attempt finds."""

    class Counts:
        hidden = 0

    program, (x,), counts = Program("count"), _batches(1), Counts()
    counts.hidden = 0

    def note(values: dict[str, Counts]) -> None:
        vars(values["of"])["hidden"] += 1

    places = {"of": counts}

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> float:
        note(places)
        return program.step(x)

    with inject_oom(nth=1, phase="backward"):
        step(x)
    assert len(program.runs) > 2
    assert counts.hidden == 2  # of the attempt that has failed, and of the one that has not


@pytest.mark.parametrize("kind", STAYS)
def test_the_loss_of_a_call_that_runs_again_for_its_backward_is_compared(kind: str) -> None:
    program, batches = Program(kind), _batches()
    loss = oomkit.auto_batch(program.loss)
    loss(batches[0]).backward()
    program.optimizer.step()
    program.optimizer.zero_grad()
    value = loss(batches[1])
    before = program.weights()
    with inject_oom(nth=1, phase="backward"), pytest.raises(oomkit.OutOfMemory) as caught:
        value.backward()
    assert "not those of that call" in str(caught.value) or TWICE in str(caught.value)
    assert all(p.grad is None for p in program.model.parameters())
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("kind", STAYS)
def test_a_loss_that_is_returned_is_compared_as_it_is(kind: str, nth: int) -> None:
    program, (x,) = Program(kind), _batches(1)
    with inject_oom(nth=nth), pytest.raises(oomkit.OutOfMemory, match=TWICE):
        oomkit.auto_batch(program.loss)(x)


@pytest.mark.parametrize(("value", "same"), [(int, False), (torch.tensor, False), (float, True)])
def test_returned_values_are_compared_but_for_floats(value: Any, same: bool) -> None:
    """Which may be times."""
    program, (x,), numbers = Program("count"), _batches(1), itertools.count(1)
    hidden = {"next": numbers.__next__}

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> tuple[float, Any]:
        return program.step(x), value(hidden["next"]())

    with inject_oom(nth=1, phase="backward"):
        if same:
            step(x)
        else:
            with pytest.raises(oomkit.OutOfMemory, match=TWICE):
                step(x)


@pytest.mark.parametrize("kind", BACK)
def test_it_runs_again_where_it_is_the_same(kind: str) -> None:
    plain, program, batches = Program(kind), Program(kind), _batches()
    loss = oomkit.auto_batch(program.loss)
    for i, x in enumerate(batches):
        for each, called in ((plain, plain.loss), (program, loss)):
            torch.manual_seed(SEED + i)
            each.optimizer.zero_grad()
            value = called(x)
            if each is program and i == 1:
                with inject_oom(nth=1, phase="backward"):
                    value.backward()
            else:
                value.backward()
            each.optimizer.step()
    torch.testing.assert_close(program.weights(), plain.weights(), rtol=0, atol=0)


@pytest.mark.parametrize(("phase", "nth"), [*PLACES, ("optimizer", 1)])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_gradient_that_nobody_looks_at_is_that_of_one_run(
    rows: int, phase: str, nth: int
) -> None:
    """Of a layer that no name leads to, and that the step does not clear. Or it is an error, and
    the gradient is as before."""

    def made() -> tuple[Program, nn.Module, Callable[[torch.Tensor], float]]:
        program, layer = Program("count"), nn.Linear(WIDTH, WIDTH).double()
        hidden = {"a": {"b": {"c": deque([layer])}}}
        return program, layer, lambda x: program.step(hidden["a"]["b"]["c"][0](x))

    plain, program = made(), made()
    step = oomkit.auto_batch(program[2])
    for p, q in zip(program[1].parameters(), plain[1].parameters(), strict=True):
        p.data.copy_(q.data)
    first, second = _batches(2, rows)
    torch.manual_seed(SEED)
    plain[2](first), plain[2](second)
    torch.manual_seed(SEED)
    step(first)
    before = [p.grad.clone() for p in program[1].parameters() if p.grad is not None]
    try:
        with inject_oom(nth=nth, phase=phase):
            step(second)
    except oomkit.OomkitError:
        wanted = before
    else:
        wanted = [p.grad for p in plain[1].parameters() if p.grad is not None]
    for p, grad in zip(program[1].parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-14)
