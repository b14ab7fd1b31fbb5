"""A step whose split is refused: the whole batch runs once more, on the ladder where it must."""

from __future__ import annotations

import copy
import gc
import itertools
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from torch.optim.swa_utils import AveragedModel

import oomkit
from oomkit.testing import force_slices, inject_oom

SEED, ROWS, WIDTH = 17, 8, 6


class Contrast:
    """Every other row of the batch is a negative: it cannot be split."""

    def __init__(self, kind: str = "sgd", depth: int = 1, width: int = WIDTH) -> None:
        torch.manual_seed(SEED)
        layers = [(nn.Linear(width, width), nn.Dropout(0.1), nn.Tanh()) for _ in range(depth)]
        self.model = nn.Sequential(*(layer for block in layers for layer in block)).double()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
            if kind == "sgd"
            else torch.optim.AdamW(self.model.parameters(), 0.01)
        )
        self.couples, self.runs, self.n = True, Seen[int](), 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        z = F.normalize(self.model(x), dim=1)
        if not self.couples:
            return (z - 0.5).square().mean()
        return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(x)))

    def step(self, x: torch.Tensor) -> float:
        self.n += 1
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self) -> list[Any]:
        values = self.optimizer.state.values()
        return [
            *(p.detach().clone() for p in self.model.parameters()),
            *(v.clone() for state in values for v in state.values() if isinstance(v, torch.Tensor)),
        ]


def _batches(count: int, rows: int = ROWS, width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(rows, width, generator=generator).double() for _ in range(count)]


def _plain(program: Any, batches: list[torch.Tensor]) -> list[Any]:
    torch.manual_seed(SEED)
    losses = [program.step(x) for x in batches]
    return [*losses, *program.state()]


def _allocated() -> int:
    gc.collect()
    return oomkit.memory("cpu").allocated or 0


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_whole_batch_runs_bit_for_bit(kind: str, phase: Any, times: int, at: int) -> None:
    batches = _batches(4)
    expected = _plain(Contrast(kind), batches)
    program = Contrast(kind)
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    losses = []
    for i, x in enumerate(batches):
        if i != at:
            losses.append(step(x))
            continue
        with inject_oom(nth=3, times=times, phase=phase) as armed:
            losses.append(step(x))
        assert armed.fired == times
    assert _same([*losses, *program.state()], expected)
    record = step.records[at]
    assert (record.micro_batch_size, record.accumulation_steps) == (ROWS, 1)
    assert record.reason in ("refused", "climbed")
    assert program.n == 4


def test_it_is_logged_once_why(caplog: pytest.LogCaptureFixture) -> None:
    program = Contrast()
    step = oomkit.auto_batch(program.step)
    for x in _batches(3):
        with inject_oom(nth=1):
            step(x)
    (text,) = [r.getMessage() for r in caplog.records if "whole batches" in r.getMessage()]
    assert "cannot split" in text and "couples the samples" in text


def test_later_calls_run_once() -> None:
    """They are not split first, nor verified."""
    program = Contrast()
    step = oomkit.auto_batch(program.step)
    first, *later = _batches(4)
    with inject_oom(nth=1):
        step(first)
    del program.runs[:]
    for x in later:
        step(x)
    assert program.runs == [ROWS] * 3
    assert not any(record.attempts > 1 for record in list(step.records)[1:])


def test_a_later_failure_runs_the_whole_batch_again() -> None:
    batches = _batches(3)
    expected = _plain(Contrast(), batches)
    program = Contrast()
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    losses = []
    for x in batches:
        with inject_oom(nth=2, phase="backward"):
            losses.append(step(x))
    assert _same([*losses, *program.state()], expected)
    assert program.runs[-2:] == [ROWS, ROWS]


@pytest.mark.parametrize("form", ["returned", "backward"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_loss_that_is_returned(form: str, phase: Any) -> None:
    def run(program: Contrast, loss_of: Callable[..., Any], fails: bool, outside: bool) -> Any:
        torch.manual_seed(SEED)
        losses = []
        for i, x in enumerate(_batches(3)):
            program.optimizer.zero_grad()
            if fails and i == 1:
                with inject_oom(nth=3, phase=phase) as armed:
                    loss = loss_of(x)
                    if outside:
                        loss.backward()
                assert armed.fired == 1
            else:
                loss = loss_of(x)
                if outside:
                    loss.backward()
            program.optimizer.step()
            losses.append(loss.item())
        return [*losses, *program.state()]

    plain, program = Contrast(), Contrast()
    expected = run(plain, plain.loss, False, True)
    options: dict[str, Any] = {"backward": True} if form == "backward" else {}
    protected = oomkit.auto_batch(program.loss, **options)
    assert _same(run(program, protected, True, form == "returned"), expected)


@pytest.mark.parametrize("share", [0.8, 0.55])
def test_it_trains_where_the_plain_program_dies(share: float) -> None:
    rows, width, depth = 128, 64, 24
    batches = _batches(3, rows, width)
    plain = Contrast("sgd", depth, width)
    torch.manual_seed(SEED)
    measured, base = oomkit.auto_batch(plain.step, ladder=()), _allocated()
    expected = [*[measured(x) for x in batches], *plain.state()]
    peak = max(record.peak_allocated or 0 for record in measured.records) - base
    program = Contrast("sgd", depth, width)
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    oomkit.limit_memory(_allocated() + int(peak * share), device="cpu")
    try:
        losses = [step(x) for x in batches]
    finally:
        oomkit.limit_memory(None, device="cpu")
    assert _same([*losses, *program.state()], expected)
    assert {record.rung for record in step.records} <= {2, 3, 4, 5}
    assert step.records[-1].ooms == 0  # it begins where the last one was


def test_without_rungs_the_refusal_is_raised() -> None:
    program = Contrast()
    step = oomkit.auto_batch(program.step, ladder=())
    before, (x,) = program.state(), _batches(1)
    with inject_oom(nth=1), pytest.raises(oomkit.SplitError, match="cannot split"):
        step(x)
    assert _same(program.state(), before) and program.n == 0


@pytest.mark.parametrize("asked", ["accumulation", "slices"])
def test_a_split_that_was_asked_for_is_refused(asked: str) -> None:
    program = Contrast()
    options: dict[str, Any] = {"accumulation_steps": 2} if asked == "accumulation" else {}
    step = oomkit.auto_batch(program.step, **options)
    (x,) = _batches(1)
    if asked == "accumulation":
        with pytest.raises(oomkit.SplitError):
            step(x)
        return
    with force_slices([4, 4]), warnings.catch_warnings():  # the test compares: no proof
        warnings.simplefilter("ignore")
        step(x)
    assert step.records[-1].accumulation_steps == 2


def test_where_no_rung_has_room_the_refusal_is_raised_and_the_next_call_begins_anew() -> None:
    rows, width, depth = 256, 64, 12
    program = Contrast("sgd", depth, width)
    step = oomkit.auto_batch(program.step)
    first, second = _batches(2, rows, width)
    expected = _plain(Contrast("sgd", depth, width), [second])
    before, random = program.state(), torch.get_rng_state()
    budget = _allocated() + 2 * rows * rows * 8
    oomkit.limit_memory(budget, device="cpu")
    try:
        with pytest.raises(oomkit.SplitError, match="cannot split") as caught:
            step(first)
    finally:
        oomkit.limit_memory(None, device="cpu")
    assert any("the whole batch ran out of memory" in note for note in caught.value.__notes__)
    assert _same(program.state(), before) and torch.equal(torch.get_rng_state(), random)
    torch.manual_seed(SEED)
    assert _same([step(second), *program.state()], expected)


def test_a_refusal_of_one_call_is_none_of_a_later_one_that_fits_split_alone() -> None:
    """Rows that no rung has room for are split again, and verified."""
    rows, width, depth = 512, 32, 4
    x, y, *_ = _batches(2, rows, width)
    program = Contrast("sgd", depth, width)
    step = oomkit.auto_batch(program.step, ladder=("activations",))
    with inject_oom(nth=1):
        step(x)
    program.couples = False
    twin = copy.deepcopy(program)
    twin.model.eval(), program.model.eval()
    largest = rows * width * 8
    oomkit.limit_memory(_allocated() + 3 * largest, device="cpu")
    try:
        step(y)
    finally:
        oomkit.limit_memory(None, device="cpu")
    twin.step(y)
    assert step.records[-1].accumulation_steps > 1
    for p, q in zip(program.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_step_that_does_not_repeat_is_refused() -> None:
    """What it draws where nothing can put it back would be in the result."""

    class Own(Contrast):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return super().loss(x * (0.1 + secrets.randbits(40) / 2**40))

    program = Own()
    step = oomkit.auto_batch(program.step)
    before, (x,) = program.state(), _batches(1)
    with inject_oom(nth=1), pytest.raises(oomkit.SplitError, match="cannot split") as caught:
        step(x)
    assert _same(program.state(), before)
    assert any("was not run instead" in note for note in caught.value.__notes__)


class Taking(Contrast):
    """A temperature from an iterator, which nothing can put back."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        values = [1.0] * 6 + [0.5] * 30
        self.rates: Iterator[float] = (
            (rate for rate in values) if kind == "generator" else itertools.cycle(values)
        )
        self.kind = kind

    def rate(self) -> float:
        return next(self.rates)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "loop":
            for rate in self.rates:
                return super().loss(x * rate)
        return super().loss(x * self.rate())


@pytest.mark.parametrize("kind", ["generator", "cycle", "loop"])
def test_a_step_that_takes_from_an_iterator_is_refused(kind: str) -> None:
    program, (x,) = Taking(kind), _batches(1)
    before = program.state()
    with inject_oom(nth=4), pytest.raises(oomkit.SplitError) as caught:
        oomkit.auto_batch(program.step)(x)
    assert _same(program.state(), before)
    assert any("its code takes from self.rates" in n for n in caught.value.__notes__)


def test_a_step_that_has_made_a_module_is_refused() -> None:
    """Which stays, while what the step has done with it may have gone back."""

    class Late(Contrast):
        head: nn.Module | None = None

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            if self.head is None:
                self.head = nn.Linear(WIDTH, WIDTH).double()
            return super().loss(self.head(x))

    program, (x,) = Late(), _batches(1)
    with inject_oom(nth=8), pytest.raises(oomkit.SplitError, match="cannot split"):
        oomkit.auto_batch(program.step)(x)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 2])
def test_what_is_made_for_the_size_of_the_batch(at: int, times: int) -> None:
    """Labels and a mask, as in CLIP and SimCLR: a micro-batch alone is an error."""

    class Fixed(Contrast):
        def __init__(self) -> None:
            super().__init__()
            self.labels, self.mask = torch.arange(ROWS), torch.eye(ROWS).double()

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            self.runs.append(len(x))
            z = F.normalize(self.model(x), dim=1)
            return F.cross_entropy(z @ z.t() / 0.1 - 9 * self.mask, self.labels)

    batches = _batches(4)
    expected = _plain(Fixed(), batches)
    program = Fixed()
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    losses = []
    for i, x in enumerate(batches):
        if i == at:
            with inject_oom(nth=3, times=times) as armed:
                losses.append(step(x))
            assert armed.fired == times
        else:
            losses.append(step(x))
    assert _same([*losses, *program.state()], expected)
    assert program.runs[-1] == ROWS and program.n == 4


def test_an_error_of_its_own_passes_and_tells_of_the_refusal() -> None:
    class Own(Contrast):
        def step(self, x: torch.Tensor) -> float:
            loss = super().step(x)
            if len(self.runs) > 9 and self.runs[-1] == ROWS:
                raise LookupError("of the program")
            return loss

    program, (x,) = Own(), _batches(1)
    with inject_oom(nth=1), pytest.raises(LookupError) as caught:
        oomkit.auto_batch(program.step)(x)
    assert any("its split was refused" in note for note in caught.value.__notes__)


class Averaged(Contrast):
    """An average of the weights that copies buffers, which each micro-batch would move."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.couples = False
        self.model.add_module("scale", nn.BatchNorm1d(WIDTH).double().eval())
        self.average = copy.deepcopy(self.model)
        self.swa = AveragedModel(self.model, use_buffers=True)
        self.kind = kind
        self.count = torch.zeros(())
        self.average.register_buffer("count", self.count)

    def step(self, x: torch.Tensor) -> float:
        loss = super().step(x)
        if self.kind == "swa":
            self.swa.update_parameters(self.model)
            return loss
        with torch.no_grad():
            self.count += 1
            mine, theirs = self.average.state_dict(), self.model.state_dict()
            for name, value in theirs.items():
                own = mine[name]
                own.copy_(0.9 * own + 0.1 * value if own.is_floating_point() else value)
        return loss

    def state(self) -> list[Any]:
        return [
            *super().state(),
            *(value.clone() for value in self.average.state_dict().values()),
            *(value.clone() for value in self.swa.state_dict().values()),
        ]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", ["by hand", "swa"])
@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_an_average_of_the_weights_with_buffers(kind: str, at: int) -> None:
    batches = _batches(4)
    expected = _plain(Averaged(kind), batches)
    program = Averaged(kind)
    step = oomkit.auto_batch(program.step)
    torch.manual_seed(SEED)
    losses = []
    for i, x in enumerate(batches):
        if i == at:
            with inject_oom(nth=1):
                losses.append(step(x))
        else:
            losses.append(step(x))
    for one, other in zip([*losses, *program.state()], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.sample(3)
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_each_allocation_that_fails_leaves_the_result_or_the_entry(phase: Any, times: int) -> None:
    (x,) = _batches(1)
    expected = _plain(Contrast("adamw"), [x])
    fired, kinds = True, set()
    for nth in range(1, 60):
        program = Contrast("adamw")
        step, before = oomkit.auto_batch(program.step), program.state()
        torch.manual_seed(SEED)
        with inject_oom(nth=nth, times=times, phase=phase) as armed:
            try:
                result: list[Any] = [step(x)]
            except (oomkit.SplitError, oomkit.OutOfMemory) as error:
                assert not getattr(error, "committed", False)
                result = []
        kinds.add("exact" if result else "refused")
        state = [*result, *program.state()]
        assert _same(state, expected if result else before), nth
        fired = armed.fired > 0
        if not fired:
            break
    assert not fired and "exact" in kinds


def test_nothing_is_left_behind() -> None:
    (x,) = _batches(1)
    program = Contrast()
    step = oomkit.auto_batch(program.step)

    def calls(count: int) -> None:
        for _ in range(count):
            with inject_oom(nth=2, phase="backward"):
                step(x)

    calls(5)
    before = _allocated()
    calls(20)
    assert _allocated() == before
