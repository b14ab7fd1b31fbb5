"""A loop over slices inside a step: in a micro-batch the last ones may be empty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import same
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted

Slices = Callable[[torch.Tensor], range]


class Loop:
    """Accumulates over slices of 4 rows by itself."""

    def __init__(self, slices: Slices) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.slices = slices
        self.scale = 1.0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for i in self.slices(x):
            loss = F.cross_entropy(self.model(x[i : i + 4]) * self.scale, y[i : i + 4]) / 4
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def state(self) -> list[Any]:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()["state"]])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 4), torch.randint(3, (16,))


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("slices", [[8, 8], [12, 4], [10, 6]])
def test_empty_slices_are_refused_before_the_update(slices: list[int], earlier: int) -> None:
    loop = Loop(lambda x: range(0, 16, 4))
    step, batch = oomkit.auto_batch(loop.step), data()
    for _ in range(earlier):
        step(*batch)
    before = loop.state()
    with (
        force_slices(slices),
        pytest.raises(oomkit.SplitError, match="loss of micro-batch .* is nan") as caught,
    ):
        step(*batch)
    assert "micro-batch 1 of 2" in str(caught.value)
    assert same(loop.state(), before)


@pytest.mark.refusals
def test_after_an_error_too() -> None:
    loop = Loop(lambda x: range(0, 16, 4))
    before, batch = loop.state(), data()
    with inject_oom(nth=2), pytest.raises(oomkit.SplitError, match="mean over no elements"):
        oomkit.auto_batch(loop.step)(*batch)
    assert same(loop.state(), before)


def test_a_first_backward_over_nothing() -> None:
    loop = Loop(lambda x: range(12, -1, -4))
    with (
        force_slices([8, 8]),
        pytest.raises(oomkit.SplitError, match="loss of micro-batch .* is nan"),
    ):
        oomkit.auto_batch(loop.step)(*data())


def test_later_calls_of_a_site_are_looked_at() -> None:
    loop = Loop(lambda x: range(0, 8, 4))
    step, (x, y) = oomkit.auto_batch(loop.step), data()
    with force_slices([8, 8]):
        step(x, y)
    with (
        force_slices([12, 4]),
        pytest.raises(oomkit.SplitError, match="loss of micro-batch .* is nan"),
    ):
        step(x, y)


def test_a_loss_that_is_really_nan_passes() -> None:
    loop = Loop(lambda x: range(0, len(x), 4))
    loop.scale = float("nan")
    with force_slices([8, 8]):
        oomkit.auto_batch(loop.step)(*data())
    assert all(p.isnan().all() for p in loop.model.parameters())


def test_a_share_of_nothing_passes() -> None:
    model = nn.Linear(4, 3)
    x, y = data()
    y[8:] = -100

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    with force_slices([8, 8]):
        oomkit.auto_batch(step, weight=lambda part: (part[1] >= 0).sum(), batch=("x", "y"))(x, y)
    found = model.weight.grad
    step(x, y)
    torch.testing.assert_close(found, model.weight.grad)


def _per_positive(out: torch.Tensor, y: torch.Tensor, least: float) -> torch.Tensor:
    """Of detectors: over all rows, divided by how many are positive."""
    loss = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    return (loss if least else loss * y).sum() / y.sum().clamp(min=least or 1e-9)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("least", [1.0, 0.5, 0.0])
def test_a_micro_batch_that_counts_nothing(least: float, parts: int) -> None:
    """Its weight is 0, and so is its loss; with max(1, n) it is not, and belongs to the whole, of
    which its weight is 1 / n. Of other bounds that is not known."""
    oomkit._C._prove(True)

    def train(decorated: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(5, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            _per_positive(model(x), y, least).backward()
            optimizer.step()

        trains = oomkit.auto_batch(accumulation_steps=parts)(step) if decorated else step
        for call in range(6):
            x, y = torch.randn(24, 5).double(), (torch.rand(24, 4) < 0.3).double()
            y[::2, 0] = 1
            if call == 4:
                y[: 24 // parts] = 0
            before = [p.detach().clone() for p in model.parameters()]
            try:
                trains(x, y)
            except oomkit.SplitError as error:
                assert call == 4 and ("has nothing of" in str(error) or "differs by" in str(error))
                assert all(map(torch.equal, before, model.parameters()))
                raise
        return list(model.parameters())

    want = train(False)
    if least == 0.5:
        with pytest.raises(oomkit.SplitError):
            train(True)
        return
    for one, two in zip(want, train(True), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def _positives(counts: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for count in counts:
        y = torch.zeros(12)
        y[torch.randperm(12)[:count]] = 1
        found.append((torch.randn(12, 6).double(), y))
    return found


DENOMINATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda y: y.sum().clamp(min=1),
    "a number": lambda y: max(1, int(y.sum())),
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("steps", [2, 3, 12])
@pytest.mark.parametrize("of", DENOMINATORS)
@pytest.mark.parametrize(
    "counts",
    [
        (6, 1, 2, 0, 3, 1),  # a sum fits the second call, too
        (1, 1, 3, 3, 0, 5),  # ... and the first two
        (0, 0, 0, 3, 0, 5),
        (6, 6, 0, 1, 0, 6),
        (2, 0, 12, 1, 7, 0),
    ],
)
def test_a_sum_over_all_rows_by_how_many_are_positive(
    counts: tuple[int, ...], of: str, steps: int
) -> None:
    """Losses of detectors (RetinaNet): `max(1, n)` of a micro-batch is 1 where it has none. In
    micro-batches of one row no two of them tell it from a sum."""
    oomkit._C._prove(True)
    torch.manual_seed(5)
    batches = _positives(counts)

    def train(decorate: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            optimizer.zero_grad()
            out, count = model(x).squeeze(1), DENOMINATORS[of](y)
            classes = F.binary_cross_entropy_with_logits(out, y.double(), reduction="sum") / count
            boxes = (out[y > 0] - x[y > 0, 0]).abs().sum() / count
            (classes + boxes).backward()
            optimizer.step()
            return {"classes": classes.detach(), "boxes": boxes.detach()}

        trains = decorate(step)
        found = [value for batch in batches for value in trains(*batch).values()]
        return [*found, *model.parameters()]

    want = train(lambda step: step)
    for one, two in zip(want, train(oomkit.auto_batch(accumulation_steps=steps)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_a_vector_has_no_value(steps: int) -> None:
    """A gradient that was computed outside, of embeddings: in micro-batches of one row, too."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    x, slope = torch.randn(8, 4), torch.randn(8, 3)
    model(x).backward(slope)
    want = [p.grad for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=steps, reduction="sum")
    def step(x: torch.Tensor, slope: torch.Tensor) -> None:
        model.zero_grad()
        model(x).backward(slope)

    step(x, slope)
    for param, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(param.grad, gradient)
