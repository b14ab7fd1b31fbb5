"""A proof whose gradients are 0 or not finite shows nothing: the next split call is proven."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.seen import Seen
from torch.nn import functional as F

import oomkit
from oomkit._proof.diagnose import advice
from oomkit.testing import inject_oom

ROWS = 8


class World:
    """A step whose loss says nothing in its first calls."""

    def __init__(self, silent: int, factor: float, loss: Callable[..., torch.Tensor]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.silent, self.factor, self.loss = silent, factor, loss

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, y = batch
        loss = self.loss(self.model(x), y)
        loss = loss * (self.factor if self.silent > 0 else 1.0)  # the same graph
        loss.backward()
        return float(loss.detach())


def _sum(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def _of_tokens(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (ROWS,), generator=generator)
    y[[0, 3, 5]] = -100
    return torch.randn(ROWS, 4, generator=generator), y


@pytest.mark.parametrize("loss", [_sum, _of_tokens])
@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("silent", [1, 2, 3, 5])
def test_weights_are_found_in_the_first_call_that_tells_them(
    silent: int, factor: float, loss: Callable[..., torch.Tensor]
) -> None:
    plain, world = (World(silent, factor, loss) for _ in range(2))
    step = oomkit.auto_batch(world.step)
    with inject_oom(nth=5):
        step(_batch())
    for _ in range(max(7 - silent, silent + 2)):
        world.silent -= 1
        plain.silent = world.silent
        for each in (world, plain):
            each.model.zero_grad()
        assert step(_batch()) == pytest.approx(plain.step(_batch()), nan_ok=True)
        assert step.records[-1].accumulation_steps == 2
        for one, two in zip(plain.model.parameters(), world.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, equal_nan=True)


def _spoilt(value: float) -> tuple[World, World]:
    made = [World(0, 1.0, _of_tokens) for _ in range(2)]
    for each in made:
        with torch.no_grad():
            each.model.weight[1] = value
    return made[0], made[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_the_runs_own(value: float) -> None:
    """As after an update with such gradients: the step ends as it does without oomkit."""
    plain, world = _spoilt(value)
    step = oomkit.auto_batch(world.step, accumulation_steps=2)
    for _ in range(3):
        assert step(_batch()) == pytest.approx(plain.step(_batch()), nan_ok=True)
    assert {record.accumulation_steps for record in step.records} == {2}


def test_writing_to_parameters_that_are_not_finite_is_found() -> None:
    """Values that a part alone writes differ, whatever the others are."""
    _, world = _spoilt(float("nan"))

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = world.step(batch)
        world.model.weight.data[0] += len(batch[0])
        return loss

    with pytest.raises(oomkit.SplitError, match="writes to weight of Linear|was changed"):
        oomkit.auto_batch(step, accumulation_steps=2)(_batch())


@pytest.mark.parametrize("silent", [2, 5])  # after five no comparison of losses is due
@pytest.mark.refusals
def test_a_loss_that_couples_is_refused_in_the_first_call_that_tells_it(silent: int) -> None:
    def coupled(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))

    world, batch = World(silent, 0.0, coupled), (_batch()[0], torch.zeros(ROWS, dtype=torch.long))

    @oomkit.auto_batch(model=world.model)
    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:  # a result is proven of its own
        world.step(batch)

    with inject_oom(nth=5):
        step(batch)
    for world.silent in range(silent - 1, 0, -1):
        step(batch)
    world.silent = 0
    with pytest.raises(oomkit.SplitError, match="differs by"):
        step(batch)


def test_what_was_proven_of_gradients_that_tell_is_not_proven_again() -> None:
    world = World(0, 1.0, _of_tokens)
    runs: Seen[int] = Seen()
    plain = world.loss
    world.loss = lambda *given: (runs.append(1), plain(*given))[1]
    step = oomkit.auto_batch(world.step)
    with inject_oom(nth=5):
        step(_batch())
    for _ in range(3):
        step(_batch())
    del runs[:]
    world.silent, world.factor = 1, 0.0  # what was shown holds
    step(_batch())
    assert len(runs) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.refusals
def test_a_part_without_a_label_is_refused_where_the_whole_loss_is_zero() -> None:
    """The mean over nothing is nan."""
    world = World(2, 0.0, _of_tokens)
    step = oomkit.auto_batch(world.step)
    x, _ = _batch()
    y = torch.tensor([-100] * 4 + [0, 1, 2, 0])
    with inject_oom(nth=5), pytest.raises(oomkit.SplitError, match="is nan instead of 0"):
        step((x, y))


@pytest.mark.parametrize("masked", [2, 4, 6])  # of the first micro-batch, and beyond
@pytest.mark.parametrize("couples", [False, True])
def test_rows_without_a_gradient_are_not_the_ones_that_prove(masked: int, couples: bool) -> None:
    """Of the first micro-batch all are masked: other rows are compared before the update."""
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    on = (torch.arange(ROWS) >= masked).double()[:, None]

    def made(protect: bool) -> torch.nn.Linear:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, on: torch.Tensor) -> None:
            optimizer.zero_grad()
            out = model(x) * on
            loss = out.square().mean()
            if couples:
                centred = out - out.mean(0)
                loss = loss + (centred.T @ centred / len(out)).square().sum()
            loss.backward()
            optimizer.step()

        (oomkit.auto_batch(step, accumulation_steps=4) if protect else step)(x, on)
        return model

    if couples:
        with pytest.raises(oomkit.SplitError, match="cannot split"):
            made(True)
        return
    for one, two in zip(made(False).parameters(), made(True).parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_weights_are_no_advice_where_those_in_use_fit_as_well() -> None:
    """Parts as heavy as each other fit all of them: what differs is something else."""
    rules = [("rows", "mean over rows"), ("labels", "mean over x that are not 0")]
    assert "couples the samples" in advice(rules, False, False, False)
    assert "pass join= to auto_batch" in advice(rules, False, False, False, True)
    assert "a mean over x that are not 0: pass weight=" in advice(rules[1:], False, False, False)
    assert 'pass reduction="mean"' in advice(rules, True, False, False)
