"""In half precision single gradients tell weights to some per cent; all of them together, more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sample import sampled
from torch import nn

import oomkit
from oomkit.testing import inject_oom

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS, TOKENS, WORDS = 16, 64, 50


def _ignoring(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def _of_some(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, some: torch.Tensor
) -> torch.Tensor:
    out = model(x).flatten(0, 1).float()
    each = F.cross_entropy(out, y.clamp(min=0).flatten(), reduction="none")
    return (each * some.flatten()).sum() / some.sum()


def _masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _of_some(model, x, y, y != -100)


def _by_words(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A count that no weight of oomkit's own finding is."""
    return _of_some(model, x, y, (x % 7 != 3) & (y != -100))


def _of_all(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


class Splits:
    """A step of a model in half precision, or under autocast, and what one split of it gives."""

    def __init__(self, loss: Loss, seed: int, kind: str) -> None:
        print("seed", seed)
        torch.manual_seed(seed)
        dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
        layers = nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WORDS)
        self.model = nn.Sequential(*layers).to(dtype)
        self.x = torch.randint(WORDS, (ROWS, TOKENS))
        self.y = torch.randint(WORDS, (ROWS, TOKENS))
        self.y[torch.rand(ROWS, TOKENS) < 0.1 * torch.rand(ROWS, 1)] = -100
        self.autocast = kind == "autocast"
        self.loss = loss

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        self.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            value = self.loss(self.model, x, y)
        value.backward()
        return [p.grad.double() for p in self.model.parameters() if p.grad is not None]

    def split(self) -> list[torch.Tensor]:
        @oomkit.auto_batch(model=self.model)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            self.gradients(x, y)

        with inject_oom(nth=2, phase="backward"):
            step(self.x, self.y)
        assert step.records[-1].accumulation_steps > 1
        return [p.grad.double() for p in self.model.parameters() if p.grad is not None]

    def weighs(self) -> float:
        """How far off the first half's weight is, of those of the whole: a projection."""
        made, whole = self.split(), self.gradients(self.x, self.y)
        half = ROWS // 2
        one, two = (self.gradients(self.x[s], self.y[s]) for s in (slice(half), slice(half, ROWS)))
        between = [a - b for a, b in zip(one, two, strict=True)]
        left = sum(((a - b) * c).sum() for a, b, c in zip(whole, made, between, strict=True))
        return float(left / sum(c.square().sum() for c in between))


KINDS = ("bfloat16", "float16", "autocast")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [_ignoring, _masked, _of_all])
def test_weights_are_found_that_differ_by_less_than_rounding(loss: Loss, kind: str) -> None:
    for seed in sampled(range(4), 2):
        assert abs(Splits(loss, seed, kind).weighs()) < 3e-3


def _hinge(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.relu(1 - model(x)).mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [_of_all, _hinge])
def test_a_loss_that_is_returned_as_a_number_is_as_coarse(loss: Loss, kind: str) -> None:
    for seed in sampled(range(4), 2):
        one = Splits(loss, seed, kind)

        def run(x: torch.Tensor, y: torch.Tensor, one: Splits = one) -> dict[str, float]:
            with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
                value = one.loss(one.model, x, y)
            value.backward()
            return {"loss": value.item(), "more": 1.0 + float(value.detach())}

        step = oomkit.auto_batch(run, model=one.model)
        with inject_oom(nth=2, phase="backward"):
            step(one.x, one.y)
        assert step.records[-1].accumulation_steps > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.refusals
def test_weights_that_are_not_found_are_no_proof(kind: str) -> None:
    for seed in sampled(range(4), 2):
        with pytest.raises(oomkit.SplitError, match=r"the first part weighs 0\.\d+ of the whole"):
            Splits(_by_words, seed, kind).split()


def _scaled(one: Splits) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A step that unscales its gradients, and clips them to little."""
    optimizer, scaler = torch.optim.SGD(one.model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
            value = one.loss(one.model, x, y)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()

    return step


def _clipped(one: Splits) -> Callable[[torch.Tensor, torch.Tensor], None]:
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        one.gradients(x, y)
        nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
        optimizer.step()

    return step


def _twice(one: Splits) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Of two backwards the second one counts less of its words."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        one.gradients(x, y)
        with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
            value = 0.01 * _of_all(one.model, x, y)
        value.backward()

    return step


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("make", [_clipped, _scaled, _twice])
@pytest.mark.refusals
def test_gradients_are_projected_as_backwards_leave_them(make: Any, kind: str) -> None:
    """However small the step makes them then."""
    for seed in sampled(range(4), 2):
        wrong = Splits(_by_words, seed, kind)
        step = oomkit.auto_batch(make(wrong), model=wrong.model)
        with (
            inject_oom(nth=2, phase="backward"),
            pytest.raises(oomkit.SplitError, match=r"the first part weighs 0\.\d+ of the whole"),
        ):
            step(wrong.x, wrong.y)
        right = Splits(_of_all, seed, kind)
        step = oomkit.auto_batch(make(right), model=right.model)
        with inject_oom(nth=2, phase="backward"):
            step(right.x, right.y)
        assert step.records[-1].accumulation_steps > 1


@pytest.mark.parametrize("kind", ["float16", "autocast"])
def test_tokens_that_are_alike_are_rounded_alike(kind: str) -> None:
    """Rows that are mostly padding: all of the whole is off by one factor."""
    for seed in range(8):
        one = Splits(_ignoring, seed, kind)
        rows = 9 + seed
        padding = torch.arange(TOKENS) >= torch.linspace(TOKENS, 4, rows).long()[:, None]
        one.x, one.y = one.x[:rows].masked_fill(padding, 0), one.y[:rows].masked_fill(padding, 0)
        one.split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [False, True])
def test_rows_that_are_alike_are_rounded_alike(total: bool, kind: str) -> None:
    """What their gradients differ by is rounding, too."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)[:, :2].square()
        return out.sum() * 1e-3 if total else out.mean()

    for seed in sampled(range(4), 2):
        one = Splits(loss, seed, kind)
        one.x, one.y = one.x[:1].expand(6, TOKENS).clone(), one.y[:1].expand(6, TOKENS).clone()
        one.split()
