"""The whole batch runs again (of one row, say, which no micro-batch is smaller than): not where it
would not do the same, because something that a failed attempt has changed stays changed."""

from __future__ import annotations

import functools
import io
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


class Counted:
    def __init__(self) -> None:
        self.n = 0


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
            self.takes = {"get": self.queue.get}
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
        return self.takes["get"]()

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


def test_it_is_shown_in_each_call_that_fails() -> None:
    """Another call may take another branch."""
    program, batches = Program("count"), _batches()
    step = oomkit.auto_batch(program.step)
    runs = []
    for x in batches:
        before = len(program.runs)
        with inject_oom(nth=1, phase="backward"):
            step(x)
        runs.append(len(program.runs) - before)
    assert runs == [4] * len(batches)


def test_a_branch_that_no_call_has_taken_so_far_is_shown() -> None:
    program, batches = Program("count"), _batches(2)
    places = {"of": Counted()}

    def step(x: torch.Tensor, mode: str) -> float:
        if mode == "count":
            vars(places["of"])["n"] += 1
            x = x * vars(places["of"])["n"]
        return program.step(x)

    decorated = oomkit.auto_batch(step)
    with inject_oom(nth=1, phase="backward"):
        decorated(batches[0], "plain")
    before = program.weights()
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="does not do the same"):
            decorated(batches[1], "count")
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


def test_leaves_that_the_runs_find_are_known_to_the_next() -> None:
    """Tensors that require grad begin the runs again: that is no answer."""
    for hidden in (False, True):
        program, (x,), places = Program("count"), _batches(1), {"of": Counted()}

        def step(
            x: torch.Tensor, hidden: bool = hidden, places: Any = places, of: Any = program
        ) -> float:
            vars(places["of"])["n"] += hidden
            x = (x * (1 + vars(places["of"])["n"])).clone().requires_grad_()
            return of.step(x)

        before = program.weights()
        with inject_oom(nth=1, phase="backward"):
            if hidden:
                with pytest.raises(oomkit.OutOfMemory, match="does not do the same"):
                    oomkit.auto_batch(step)(x)
                torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)
            else:
                oomkit.auto_batch(step)(x)


def test_an_error_of_the_step_behind_its_held_update_is_no_answer() -> None:
    program, (x,) = Program("count"), _batches(1)

    def step(x: torch.Tensor) -> float:
        before = program.weights()
        loss = program.step(x)
        if torch.equal(before[0], program.weights()[0]):
            raise ArithmeticError("nothing has moved")
        return loss

    before = program.weights()
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(
            oomkit.OutOfMemory, match="nothing has moved, in a run whose updates are held"
        ):
            oomkit.auto_batch(step)(x)
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


def test_weights_that_are_written_without_a_backward_are_compared() -> None:
    weight, places = torch.zeros(3, dtype=torch.float64), {"of": Counted()}
    model = nn.Linear(3, 1, dtype=torch.float64)

    @oomkit.auto_batch
    @torch.no_grad()
    def step(x: torch.Tensor) -> None:
        vars(places["of"])["n"] += 1
        model.weight.add_(model(x).mean() * x.mean(0) * vars(places["of"])["n"])

    x = torch.ones(1, 3, dtype=torch.float64)
    step(x)
    weight = model.weight.detach().clone()
    with inject_oom(nth=2), pytest.raises(oomkit.OutOfMemory, match="does not do the same"):
        step(x)
    assert torch.equal(weight, model.weight)


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue, io.BytesIO])
def test_what_is_taken_from_a_queue_or_a_file_is_gone(kind: Any) -> None:
    program, (x,), of = Program("count"), _batches(1), kind()

    def step(x: torch.Tensor, of: Any) -> float:
        given = of.read(1) if isinstance(of, io.BytesIO) else of.get()
        return program.step(x * len(given))

    if kind is io.BytesIO:
        of = io.BytesIO(b"a")
    else:
        of.put(b"a")
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match=r"its code takes from of\.(get|read)"):
            oomkit.auto_batch(step)(x, of)


def test_all_rows_of_the_batch_run() -> None:
    """A state of as many rows, as a recurrent network keeps it, goes with no others."""
    torch.manual_seed(0)
    weight = torch.randn(3, 6, dtype=torch.float64)
    finals = []
    for failing in (0, 3):
        model = nn.Linear(6, 3, dtype=torch.float64)
        model.load_state_dict({"weight": weight, "bias": torch.zeros(3, dtype=torch.float64)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = [torch.zeros(8, 3, dtype=torch.float64)]

        def step(
            x: torch.Tensor, model: Any = model, optimizer: Any = optimizer, state: Any = state
        ) -> None:
            hidden = torch.tanh(model(torch.cat([x, state[0]], 1)))
            optimizer.zero_grad()
            (hidden.square().mean() + hidden.std()).backward()
            optimizer.step()
            state[0] = hidden.detach()

        decorated = oomkit.auto_batch(step)
        x = torch.linspace(0, 1, 24, dtype=torch.float64).reshape(8, 3)
        decorated(x)
        if failing:
            with inject_oom(nth=1, phase="backward", times=failing):
                decorated(x)
        else:
            decorated(x)
        finals.append(model.weight.detach().clone())
    assert torch.equal(*finals)


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
    assert "its code takes from self.rates" in str(caught.value)
    assert len(program.runs) == runs + 1
    torch.testing.assert_close(program.weights(), before, rtol=0, atol=0)


def test_so_it_is_in_an_evaluation() -> None:
    program, (x,) = Iterating("count"), _batches(1)

    @oomkit.auto_batch
    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return program.loss(x)

    with inject_oom(nth=3), pytest.raises(oomkit.OutOfMemory, match="its code takes from"):
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
