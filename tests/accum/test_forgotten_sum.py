"""The first split loss beside the last whole one: a forgotten reduction="sum" is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from zoo import MLP, SEED

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

ROWS = 8
SUM = r'(looks like a sum|If the loss is a sum) over samples.*reduction="sum"'
MEAN = r'looks like a mean.*reduction="mean"'


@pytest.fixture(autouse=True)
def _said_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        warnings.filterwarnings("ignore", message=".* runs once per micro-batch")
        yield


def _batch(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(SEED + rows)
    return torch.randn(rows, 6, dtype=dtype), torch.randint(0, 3, (rows,))


def _make(
    loss_reduction: str, style: str = "step", dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[..., Any]:
    torch.manual_seed(SEED)
    model = MLP().to(dtype)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction=loss_reduction)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        loss(x, y).backward()

    options = {"verify": False, **options}
    if style == "backward":
        return oomkit.auto_batch(loss, backward=True, **options)
    return oomkit.auto_batch(step, **options)


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("slices", [[4, 4], [3, 3, 2], [1] * 8], ids=str)
def test_a_sum_is_said(style: str, dtype: torch.dtype, slices: list[int]) -> None:
    step = _make("sum", style, dtype)
    step(*_batch(dtype=dtype))
    step(*_batch(dtype=dtype))
    with force_slices(slices):
        with pytest.warns(oomkit.OomkitWarning, match=SUM):
            step(*_batch(dtype=dtype))
        step(*_batch(dtype=dtype))  # once


def test_a_sum_over_batches_of_other_sizes() -> None:
    step = _make("sum")
    step(*_batch(16))
    step(*_batch(16))
    with force_slices([4, 4]), pytest.warns(oomkit.OomkitWarning, match=SUM):
        step(*_batch(8))


def test_the_whole_attempt_that_failed_is_enough() -> None:
    """No earlier call: the loss was there when the backward ran out of memory."""
    step = _make("sum")
    with inject_oom(nth=1, phase="backward") as armed:
        with pytest.warns(oomkit.OomkitWarning, match=SUM):
            step(*_batch())
    assert armed.fired == 1


@pytest.mark.parametrize("slices", [[4, 4], [3, 3, 2], [1] * 8], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_declared_is_not_said(reduction: str, slices: list[int]) -> None:
    step = _make(reduction, reduction=reduction)
    step(*_batch())
    with force_slices(slices):
        step(*_batch())


def test_a_mean_declared_as_a_sum_is_said() -> None:
    step = _make("mean", reduction="sum")
    step(*_batch())
    step(*_batch())
    with force_slices([4, 4]), pytest.warns(oomkit.OomkitWarning, match=MEAN):
        step(*_batch())


def test_a_mean_in_spite_of_num_items_is_said() -> None:
    torch.manual_seed(SEED)
    model = MLP()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor, num_items_in_batch: int) -> None:
        F.cross_entropy(model(x), y).backward()

    step(*_batch(), ROWS)
    step(*_batch(), ROWS)
    with force_slices([4, 4]):
        with pytest.warns(oomkit.OomkitWarning) as said:
            step(*_batch(), ROWS)
    assert any("num_items_in_batch was passed" in str(w.message) for w in said)


def test_said_before_the_update() -> None:
    torch.manual_seed(SEED)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()

    step(*_batch())
    step(*_batch())
    before = [p.clone() for p in model.parameters()]
    with force_slices([4, 4]), pytest.raises(oomkit.OomkitWarning, match="sum"):
        step(*_batch())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_losses_that_vary_are_not_compared() -> None:
    """A mean loss that has just halved is no sum over two micro-batches."""
    weight = torch.nn.Parameter(torch.ones(()))
    values = iter([8.0, 4.0, 2.0, 2.0])

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        (weight * next(values) * x.mean()).backward()

    step(torch.ones(4))
    step(torch.ones(4))
    with force_slices([2, 2]):
        step(torch.ones(4))
    assert weight.grad is not None


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: torch.autograd.backward([loss, loss * 2]),
        lambda loss: (loss * torch.ones(3)).backward(torch.ones(3)),
        lambda loss: (loss * float("nan")).backward(),
        lambda loss: (loss * 0.0).backward(),
    ],
    ids=["two-roots", "vector", "nan", "zero"],
)
def test_what_is_no_loss_is_not_compared(backward: Callable[[torch.Tensor], None]) -> None:
    torch.manual_seed(SEED)
    model = MLP()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        backward(F.cross_entropy(model(x), y, reduction="sum"))

    step(*_batch())
    with force_slices([4, 4]):
        step(*_batch())


# --- a loss that couples the samples, beside that of the whole attempt that failed ---


def _contrastive(dropout: float = 0.0, **options: Any) -> Callable[..., Any]:
    torch.manual_seed(SEED)
    model = torch.nn.Linear(6, 6).double()

    @oomkit.auto_batch(label="step", **options)
    def step(x: torch.Tensor) -> None:
        z = F.normalize(F.dropout(model(x), dropout) if dropout else model(x), dim=1)
        F.cross_entropy(z @ z.T, torch.arange(len(x))).backward()

    return step


def _rows(rows: int = ROWS) -> torch.Tensor:
    torch.manual_seed(SEED)
    return torch.randn(rows, 6, dtype=torch.float64)


@pytest.mark.parametrize("rows", [ROWS, 64])
def test_a_contrastive_loss_that_failed_in_its_backward_is_said_once(rows: int) -> None:
    step = _contrastive()
    with pytest.warns(oomkit.OomkitWarning, match="step is split.*couples the samples"):
        with inject_oom(nth=1, phase="backward"):
            step(_rows(rows))
    step(_rows(rows))


def test_with_random_numbers_nothing_is_concluded() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with inject_oom(nth=1, phase="backward"):
            _contrastive(0.1)(_rows(64))  # 0.7 of 4
    assert not [w for w in said if "couples the samples" in str(w.message)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mean", "signed"])
def test_means_are_not_suspected(kind: str, dtype: torch.dtype, dropout: float) -> None:
    """A mean of signed terms is near 0: its parts give the scale."""
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(dropout)).to(dtype)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        out = model(x)
        loss = out.square().mean() if kind == "mean" else (out - out.detach().mean() * 0).mean()
        loss.backward()

    with inject_oom(nth=1, phase="backward"):
        step(_rows(64).to(dtype))
    assert step.records[-1].ooms == 1
