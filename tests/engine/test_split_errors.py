"""An error that a step raises only because it is split: another size, or SplitError."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from helpers.worlds import same
from torch import nn

import oomkit
from oomkit.testing import force_slices

pytestmark = [  # runs of steps are counted
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

LIMIT = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Run:
    """A model under a device that has room for `most` rows at a time."""

    def __init__(self, most: int, *, norm: bool = False, seed: int = 3) -> None:
        torch.manual_seed(seed)
        first: nn.Module = nn.BatchNorm1d(3) if norm else nn.Tanh()
        self.model = nn.Sequential(nn.Linear(4, 3), first, nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.most, self.sizes = most, Seen([0])
        self.check: Callable[[torch.Tensor], None] = lambda x: None

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError(LIMIT)
        self.check(x)
        return self.model(x).square().mean()

    def train(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def step(self, **options: Any) -> Any:
        def step(x: torch.Tensor) -> float:
            return self.train(x)

        return oomkit.auto_batch(step, participants=(self.model, self.optimizer), **options)

    def state(self) -> list[Any]:
        return [
            {name: value.clone() for name, value in self.model.state_dict().items()},
            [None if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            self.optimizer.state_dict()["state"],
        ]

    def last(self) -> list[int]:
        """Rows of the micro-batches since the sizes were cleared."""
        sizes, self.sizes = self.sizes, []
        return sizes


def even(x: torch.Tensor) -> None:
    assert len(x) % 2 == 0, "mixup needs an even batch"


def many(x: torch.Tensor) -> None:
    if len(x) < 8:
        raise IndexError("index 58 is out of bounds for dimension 0 with size 8")


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(
    ("batch", "most", "slices"), [(8, 2, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (9, 3, [3, 3, 3])]
)
def test_batch_norm_gets_two_rows_at_least(batch: int, most: int, slices: list[int]) -> None:
    run, twin = Run(most, norm=True), Run(batch, norm=True)
    step = run.step()
    loss = step(rows(batch))
    with force_slices(slices):
        assert loss == twin.step()(rows(batch))
    assert run.last()[-len(slices) :] == slices
    assert same(run.state(), twin.state())
    assert step.records[-1].reason == "error"


def test_what_worked_is_a_bound_of_later_plans() -> None:
    run = Run(3, norm=True)
    step = run.step()
    step(rows(8))
    run.last()
    for batch, slices in ((8, [2, 2, 2, 2]), (7, [3, 2, 2]), (9, [3, 3, 3])):
        step(rows(batch))
        assert run.last() == slices
    assert step.records[-1].ooms == 0


def test_an_even_number_is_tried() -> None:
    run, twin = Run(4), Run(12)
    run.check = even
    step = run.step()
    loss = step(rows(12))
    assert run.last()[-6:] == [2] * 6
    with force_slices([2] * 6):
        assert loss == twin.step()(rows(12))
    assert same(run.state(), twin.state())
    step(rows(10))
    assert all(size % 2 == 0 for size in run.last())


def test_bounds_that_were_given_hold_with_those_that_were_learned() -> None:
    run = Run(9)
    run.check = even
    run.step(multiple_of=3)(rows(24))
    assert run.last()[-4:] == [6, 6, 6, 6]


@pytest.mark.parametrize("earlier", [False, True])
def test_what_no_size_helps_is_a_split_error(earlier: bool) -> None:
    run = Run(8 if earlier else 4)
    run.check = many
    step = run.step()
    if earlier:
        step(rows(8))
        run.optimizer.zero_grad()
        run.most = 4
    before, stream = run.state(), torch.get_rng_state()
    with pytest.raises(oomkit.SplitError) as caught:
        step(rows(8))
    text = str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError)
    assert "IndexError: index 58 is out of bounds" in text and "of 4 rows" in text
    assert "min_micro_batch=" in text and "multiple_of=" in text and "static=" in text
    assert same(run.state(), before) and torch.equal(torch.get_rng_state(), stream)


@pytest.mark.refusals
def test_tries_are_few_and_say_what_was_tried() -> None:
    run = Run(12)
    run.check = lambda x: many(x[:1])
    with pytest.raises(oomkit.SplitError, match="of 1, 2, 4 rows|of 1, 2 rows"):
        step = run.step()
        run.most = 2
        step(rows(8))
    assert len(run.last()) <= 6


def test_an_error_of_the_whole_call_passes_untouched() -> None:
    run = Run(8)
    run.check = many
    with pytest.raises(IndexError) as caught:
        run.step()(rows(6))
    assert not hasattr(caught.value, "__notes__")
    assert run.last() == [0, 6]


class Stop(Exception):
    """What a program ends its training with."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Stop, StopIteration, OSError])
def test_what_says_nothing_about_sizes_passes(kind: type[BaseException]) -> None:
    run = Run(2)

    def raises(x: torch.Tensor) -> None:
        raise kind("now")

    run.check = raises
    with pytest.raises(kind):
        run.step()(rows(8))
    assert len([size for size in run.last() if size <= 2]) == 2  # the 0 is one


def test_errors_of_oomkit_pass() -> None:
    run = Run(4)

    def raises(x: torch.Tensor) -> None:
        raise oomkit.SplitError("mine")

    run.check = raises
    with pytest.raises(oomkit.SplitError, match="^mine\n?"):
        run.step()(rows(8))


def test_slices_that_were_asked_for_are_not_changed() -> None:
    run = Run(8, norm=True)
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        run.step(accumulation_steps=8)(rows(8))
    assert "min_micro_batch= and multiple_of=" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="more than 1 value"), force_slices([7, 1]):
        run.step()(rows(8))


def test_an_error_after_the_update_passes() -> None:
    run = Run(4)

    def step(x: torch.Tensor) -> None:
        run.train(x)
        if len(run.model[0].weight) and len(x) < 8 and oomkit.current().is_last:
            raise ValueError("after the update")

    with pytest.raises(ValueError, match="after the update") as caught:
        oomkit.auto_batch(step, participants=(run.model, run.optimizer))(rows(8))
    assert any("it stands" in note for note in caught.value.__notes__)


def test_where_memory_allows_no_such_size_both_are_said() -> None:
    run = Run(1, norm=True)
    before = run.state()
    with pytest.raises(oomkit.OutOfMemory) as caught:
        run.step()(rows(4))
    assert "Expected more than 1 value per channel" in str(caught.value)
    assert "with a micro-batch of 2 of 4 rows" in str(caught.value)
    assert same(run.state(), before)


def test_a_size_that_ran_out_of_memory_is_not_tried_again() -> None:
    run = Run(1, norm=True)
    with pytest.raises(oomkit.OutOfMemory, match="Expected more than 1 value"):
        run.step()(rows(2))
    assert run.last() == [0, 2, 1]


def test_nothing_of_the_failed_attempt_is_alive() -> None:
    run = Run(2)
    seen: Seen[weakref.ref[torch.Tensor]] = Seen()

    def check(x: torch.Tensor) -> None:
        assert all(ref() is None for ref in seen)
        part = x.clone()
        seen.append(weakref.ref(part))
        if len(x) == 1:
            raise ValueError("one row")

    run.check = check
    run.step()(rows(8))
    assert run.last()[-4:] == [2, 2, 2, 2]


def test_the_backward_of_a_returned_loss() -> None:
    run, twin = Run(2, norm=True), Run(8, norm=True)
    small = Run(2)

    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if len(gradient) > small.most:
                raise torch.OutOfMemoryError(LIMIT)
            return gradient

    def train(own: Run, step: Any) -> None:
        own.optimizer.zero_grad()
        step(rows(8)).backward()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return Costly.apply(run.model(x)).square().mean()

    train(run, oomkit.auto_batch(loss, participants=run.model))
    with force_slices([2, 2, 2, 2]):
        train(twin, oomkit.auto_batch(lambda x: twin.model(x).square().mean()))
    for p, q in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_an_evaluation() -> None:
    run = Run(2)

    def check(x: torch.Tensor) -> None:
        if len(x) == 1:
            raise RuntimeError("one row")

    run.check = check

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        run.loss(x)
        return x * 2

    with torch.no_grad():
        assert torch.equal(evaluate(rows(8)), rows(8) * 2)
    assert run.last()[-4:] == [2, 2, 2, 2]


def test_the_first_rows_of_an_evaluation_are_run_again() -> None:
    run = Run(3)
    rest: Seen[int] = Seen()

    def check(x: torch.Tensor) -> None:
        rest.append(len(x))
        if len(x) == 1:
            raise RuntimeError("one row")

    run.check = check

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        run.loss(x)
        return x * 2

    with torch.no_grad():
        assert torch.equal(evaluate(rows(3)), rows(3) * 2)
        evaluate(rows(6))
        run.most = 2
        assert torch.equal(evaluate(rows(6)), rows(6) * 2)
    assert run.last()[-3:] == [2, 2, 2]


@pytest.mark.refusals
def test_after_an_error_in_the_first_split_a_call_begins_whole() -> None:
    """Memory may be there again; a size that has worked is not doubted."""
    run, seen = Run(4), Seen()
    is_read = True

    def clamp(x: torch.Tensor) -> float:
        run.optimizer.zero_grad()
        seen.append(len(x))
        loss = run.loss(x)
        loss.backward()
        if is_read:
            run.model[0].weight.grad.data.clamp_(-1, 1)
        run.optimizer.step()
        return loss.item()

    step = oomkit.auto_batch(clamp, participants=(run.model, run.optimizer))
    before = run.state()
    with pytest.raises(AttributeError):
        step(rows(8))
    assert same(run.state(), before)
    run.most = 8
    step(rows(8))
    assert seen[-1] == 8
    run.most, is_read = 4, False
    step(rows(8))
    assert seen[-2:] == [4, 4] and step.records[-1].ooms == 1
    run.most, is_read = 8, True
    for _ in range(2):
        with pytest.raises(AttributeError):
            step(rows(8))
        assert seen[-1] == 4


def test_arguments_that_could_not_be_split_are_passed_whole_where_they_fit() -> None:
    """Boxes of all images in one tensor, as many as there are."""
    run, seen = Run(8), Seen()

    @oomkit.auto_batch
    def step(x: torch.Tensor, boxes: torch.Tensor, count: torch.Tensor) -> None:
        run.optimizer.zero_grad()
        seen.append(len(x))
        if len(x) > run.most:
            raise torch.OutOfMemoryError(LIMIT)
        out = run.model(x).repeat_interleave(count, 0)
        (out[:, 0] - boxes).square().mean().backward()
        run.optimizer.step()

    for call, most in enumerate((8, 8, 4, 8, 8, 4, 8)):
        run.most, before = most, run.state()[0]
        count = 1 + (torch.arange(8) + call) % 3
        refused = pytest.raises(oomkit.SplitError) if most < 8 else nullcontext()
        with refused:
            step(rows(8), torch.randn(int(count.sum())), count)
        assert seen[-1] == 8 and same(run.state()[0], before) == (most < 8)
