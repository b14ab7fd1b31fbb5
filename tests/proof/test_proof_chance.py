"""Losses that are divided by how many rows count: parts in which as many count agree by chance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.sample import sampled
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _each(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, reduction="none")


def _mean(each: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (each * counts).sum() / counts.sum().clamp(min=1)


LOSSES: dict[str, Loss] = {
    "positives": lambda out, x, y: F.cross_entropy(out[y > 0], y[y > 0]),
    "rows of an input": lambda out, x, y: F.cross_entropy(out[x[:, 0] > 0], y[x[:, 0] > 0]),
    "a mask of an input": lambda out, x, y: _mean(out[:, 0], x[:, 0] > 0),
    "over one class": lambda out, x, y: _each(out, y).sum() / (y == 1).sum().clamp(min=1),
    "but one class": lambda out, x, y: _mean(_each(out, y), y != 2),
    "each class": lambda out, x, y: sum(_mean(_each(out, y), y == c) for c in range(4)),  # type: ignore[return-value]
    "hard rows": lambda out, x, y: _mean(_each(out, y), _each(out, y).detach() > 1.4),
}


def _is_wrong(loss: Loss, seed: int, trains: bool) -> bool:
    """Whether a call that is split for the first time gives another loss or gradients."""
    print("seed", seed)
    torch.manual_seed(seed)
    order = random.Random(seed)
    rows, model = order.choice([6, 8, 12, 16]), nn.Linear(6, 4)
    x, y = torch.randn(rows, 6), torch.randint(4, (rows,))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(model(x), x, y)
        if trains:
            value.backward()
        return value.detach()

    def gradients() -> list[torch.Tensor]:
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    wanted = [step(x, y), *gradients()]
    steps = order.choice([None, 2, 4])
    decorated = oomkit.auto_batch(step, model=model, accumulation_steps=steps or 1)
    phase = order.choice(["forward", "backward"]) if trains else "forward"
    try:
        with torch.set_grad_enabled(trains), inject_oom(nth=order.choice([1, 2]), phase=phase):
            made = [decorated(x, y), *gradients()]
    except (oomkit.SplitError, oomkit.OutOfMemory):
        return False
    return not all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, made, strict=True)
    )


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_agrees_by_chance_in_some_rows_is_not_shown_by_them(loss: str, trains: bool) -> None:
    assert not [seed for seed in sampled(range(40), 7) if _is_wrong(LOSSES[loss], seed, trains)]


def test_weights_that_fit_two_micro_batches_have_to_fit_all() -> None:
    """Of each two neighbours one alone counts: a sum, for them."""
    model = nn.Linear(3, 1)
    counts = torch.tensor([1.0, -1.0] * 4)

    @oomkit.auto_batch(model=model, accumulation_steps=8)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        counted = y > 0.5
        (model(x).squeeze(1) * counted).sum().div(counted.sum().clamp(min=1)).backward()

    with pytest.raises(oomkit.SplitError, match="differs by"):
        step(torch.randn(8, 3), counts)


def test_a_mean_over_rows_is_compared_whole_and_split_all_the_same() -> None:
    model = nn.Linear(3, 1)
    seen: Seen[int] = Seen()

    @oomkit.auto_batch(model=model, accumulation_steps=4)
    def step(x: torch.Tensor) -> None:
        seen.append(len(x))
        model(x).square().mean().backward()

    x = torch.randn(8, 3)
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    step(x)
    assert seen.count(8) == 1 and seen[-4:] == [2] * 4
    for parameter, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, each)


def _policy(out: torch.Tensor) -> torch.Tensor:
    choices = torch.distributions.Categorical(logits=out)
    taken = choices.sample()
    return -(choices.log_prob(taken) * (taken.float() - 1.5)).mean()


def _denoised(out: torch.Tensor) -> torch.Tensor:
    return (out - torch.randn_like(out)).square().mean()


@pytest.mark.parametrize("fits", [64, 8])
@pytest.mark.parametrize("loss", [_policy, _denoised])
def test_random_numbers_of_a_step_refuse_no_split(
    loss: Callable[[torch.Tensor], torch.Tensor], fits: int
) -> None:
    """They differ between a whole and its halves."""
    for seed in range(6):
        print("seed", seed)
        torch.manual_seed(seed)
        model = nn.Linear(6, 4)

        @oomkit.auto_batch(model=model, accumulation_steps=64 // fits if fits == 8 else 8)
        def step(x: torch.Tensor) -> None:
            if len(x) > fits and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            loss(model(x)).backward()  # noqa: B023

        step(torch.randn(64, 6))
        assert step.records[-1].accumulation_steps == 8


@pytest.mark.parametrize("without", [4, 8, 16])
def test_wholes_that_do_not_fit_leave_their_halves_to_be_compared(without: int) -> None:
    """Four rows fit with a graph; without one twice, four times as many, or no more."""

    def is_wrong(seed: int) -> bool:
        print("seed", seed)
        torch.manual_seed(seed)
        model, x = nn.Linear(6, 1), torch.randn(64, 6).sign()

        def loss(x: torch.Tensor) -> torch.Tensor:
            return _mean(model(x)[:, 0], x[:, 0] > 0)

        @oomkit.auto_batch(model=model)
        def step(x: torch.Tensor) -> None:
            if len(x) > (4 if torch.is_grad_enabled() else without):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            loss(x).backward()

        loss(x).backward()
        assert model.weight.grad is not None
        wanted = model.weight.grad.clone()
        model.zero_grad()
        try:
            step(x)
        except oomkit.SplitError:
            return False
        return not torch.allclose(model.weight.grad, wanted, rtol=1e-3)

    assert not [seed for seed in range(20) if is_wrong(seed)]


@pytest.mark.parametrize("seed", range(4))
def test_counts_that_agree_by_chance_in_the_first_micro_batch_are_found_in_others(
    seed: int,
) -> None:
    print("seed", seed)
    torch.manual_seed(seed)
    model = nn.Linear(16, 4).double()
    x, y = torch.randn(32, 16).double(), torch.randint(4, (32,))
    counted = torch.rand(32) < 0.6
    counted[:4] = torch.tensor([True, False, True, False])
    y[~counted] = -100

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / (y >= 0).sum()).backward()

    step(x, y)
    wanted = [p.grad for p in model.parameters()]
    oomkit.auto_batch(step, model=model, accumulation_steps=8)(x, y)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
