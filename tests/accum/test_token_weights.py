"""Weights that rows do not give: tokens, classes, several losses, num_items_in_batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

TOLERANCE = 1e-12
ROWS = 7
SLICES = {2: [4, 3], 3: [3, 2, 2], 5: [2, 2, 1, 1, 1]}


@pytest.fixture(autouse=True)
def _said_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        warnings.filterwarnings("ignore", message=".* runs once per micro-batch")
        yield


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.token(x)))


def _tagger() -> Tagger:
    torch.manual_seed(SEED)
    return Tagger().double()


def _tokens(empty: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Ragged: row i has 8 - i labels. Rows in `empty` have none."""
    torch.manual_seed(SEED + 1)
    batch = {
        "input_ids": torch.randint(0, 11, (ROWS, 8)),
        "labels": torch.randint(0, 11, (ROWS, 8)),
    }
    for row in range(ROWS):
        batch["labels"][row, 8 - row :] = -100
    for row in empty:
        batch["labels"][row] = -100
    return batch


def _token_loss(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **options)


def _shifted_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(whole: list[torch.Tensor], split: list[torch.Tensor]) -> bool:
    return len(whole) == len(split) > 0 and all(
        torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(whole, split, strict=True)
    )


def _compare(make: Callable[[nn.Module], Callable[..., Any]], *batch: Any, k: int) -> Any:
    """Gradients and the returned loss, whole and in k slices. Returns the split result."""
    outcome = []
    for slices in ([ROWS], SLICES[k]):
        model = _tagger()
        step = make(model)
        with force_slices(slices):
            result = step(*batch)
        outcome.append((result, _gradients(model)))
    (whole_loss, whole), (split_loss, split) = outcome
    assert _same(whole, split)
    assert torch.allclose(
        torch.as_tensor(whole_loss).double(), torch.as_tensor(split_loss).double(),
        rtol=TOLERANCE, atol=TOLERANCE,
    )  # fmt: skip
    return split_loss


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("empty", [(), (0, 1), (5, 6)], ids=["", "first-empty", "last-empty"])
@pytest.mark.parametrize("style", ["step", "backward"])
def test_token_mean(k: int, empty: tuple[int, ...], style: str) -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return _token_loss(model, batch)

        def step(batch: dict[str, torch.Tensor]) -> float:
            value = loss(batch)
            value.backward()
            return value.item()

        def weight(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return (batch["labels"] != -100).sum()

        if style == "backward":
            return oomkit.auto_batch(loss, weight=weight, backward=True)
        return oomkit.auto_batch(step, weight=weight)

    _compare(make, _tokens(empty), k=k)


@pytest.mark.parametrize("style", ["step", "backward"])
def test_a_mean_over_no_token_adds_nothing(style: str) -> None:
    """Written by hand its gradients are NaN, and NaN times a share of 0 would be NaN."""

    def make(model: nn.Module) -> Callable[..., Any]:
        def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            labels = batch["labels"].flatten()
            logits = model(batch["input_ids"]).flatten(0, 1)
            each = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
            labelled = (labels != -100).to(each.dtype)
            return (each * labelled).sum() / labelled.sum()

        def step(batch: dict[str, torch.Tensor]) -> float:
            value = loss(batch)
            value.backward()
            return value.item()

        return oomkit.auto_batch(
            loss if style == "backward" else step,
            backward=style == "backward",
            weight=lambda batch: (batch["labels"] != -100).sum(),
        )

    _compare(make, _tokens(tuple(range(SLICES[2][0]))), k=2)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_shifted_token_mean(k: int) -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        @oomkit.auto_batch(weight=lambda batch: (batch["labels"][:, 1:] != -100).sum())
        def step(batch: dict[str, torch.Tensor]) -> float:
            loss = _shifted_loss(model, batch)
            loss.backward()
            return loss.item()

        return step

    _compare(make, _tokens(), k=k)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_class_weighted_mean(k: int) -> None:
    """Its denominator is the sum of the class weights of the targets."""
    classes = torch.linspace(0.1, 2.0, 11, dtype=torch.float64)

    def make(model: nn.Module) -> Callable[..., Any]:
        @oomkit.auto_batch(weight=lambda batch: classes[batch["labels"]].sum())
        def step(batch: dict[str, torch.Tensor]) -> float:
            loss = _token_loss(model, batch, weight=classes)
            loss.backward()
            return loss.item()

        return step

    batch = _tokens()
    batch["labels"] = batch["labels"].clamp(min=0)
    _compare(make, batch, k=k)


# --- num_items_in_batch ---


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("how", ["positional", "keyword", "by-kwargs"])
def test_num_items_means_a_sum(k: int, kind: str, how: str) -> None:
    batch = _tokens()
    items: Any = (batch["labels"] != -100).sum()
    items = int(items) if kind == "int" else items
    seen: list[Any] = []

    def make(model: nn.Module) -> Callable[..., Any]:
        def compute(batch: dict[str, torch.Tensor], items: Any) -> float:
            seen.append(items)
            loss = _token_loss(model, batch, reduction="sum") / items
            loss.backward()
            return loss.item()

        @oomkit.auto_batch
        def step(batch: dict[str, torch.Tensor], num_items_in_batch: Any = None) -> float:
            return compute(batch, num_items_in_batch)

        @oomkit.auto_batch
        def by_kwargs(batch: dict[str, torch.Tensor], **kwargs: Any) -> float:
            return compute(batch, kwargs["num_items_in_batch"])

        if how == "positional":
            return lambda batch: step(batch, items)
        if how == "keyword":
            return lambda batch: step(batch, num_items_in_batch=items)
        return lambda batch: by_kwargs(batch, num_items_in_batch=items)

    _compare(make, batch, k=k)
    assert all(item is items for item in seen)


def test_num_items_of_a_method_with_backward_true() -> None:
    """As Trainer.compute_loss: the parameter comes after the model and the inputs."""
    batch = _tokens()
    items = int((batch["labels"] != -100).sum())

    class Trainer:
        @oomkit.auto_batch(backward=True)
        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, torch.Tensor],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> torch.Tensor:
            return _token_loss(model, inputs, reduction="sum") / num_items_in_batch

    def make(model: nn.Module) -> Callable[..., Any]:
        return lambda batch: Trainer().compute_loss(model, batch, False, items)

    _compare(make, batch, k=3)


def test_without_num_items_the_loss_is_a_mean() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        @oomkit.auto_batch
        def step(batch: dict[str, torch.Tensor], num_items_in_batch: Any = None) -> float:
            loss = _token_loss(model, batch)
            loss.backward()
            return loss.item()

        return lambda batch: step(batch, None)

    batch = _tokens()
    batch["labels"] = batch["labels"].clamp(min=0)
    _compare(make, batch, k=3)


def test_an_explicit_reduction_wins_over_num_items() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        @oomkit.auto_batch(reduction="mean")
        def step(batch: dict[str, torch.Tensor], num_items_in_batch: int) -> float:
            loss = _token_loss(model, batch)
            loss.backward()
            return loss.item()

        return lambda batch: step(batch, 56)

    batch = _tokens()
    batch["labels"] = batch["labels"].clamp(min=0)
    _compare(make, batch, k=3)


def test_num_items_sums_the_loss_alone() -> None:
    model = _tagger()

    @oomkit.auto_batch
    def step(batch: dict[str, torch.Tensor], num_items_in_batch: int) -> dict[str, float]:
        loss = _token_loss(model, batch, reduction="sum") / num_items_in_batch
        loss.backward()
        return {"loss": loss.item(), "mean": batch["input_ids"].double().mean().item()}

    whole = step(_tokens(), 28)
    with force_slices([4, 3]):
        assert step(_tokens(), 28) == pytest.approx(whole, rel=TOLERANCE)


# --- several losses ---


def _two_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A mean over tokens, and one over rows."""
    rows = model(batch["input_ids"]).mean(1).pow(2).sum(1).mean()
    return [_token_loss(model, batch), rows]


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_weight_for_each_backward(k: int, kind: type) -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        def weight(batch: dict[str, torch.Tensor]) -> Any:
            return kind([(batch["labels"] != -100).sum(), len(batch["labels"])])

        @oomkit.auto_batch(weight=weight)
        def step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
            tokens, rows = _two_losses(model, batch)
            tokens.backward(retain_graph=True)
            rows.backward()
            return tokens.item(), rows.item()

        return step

    _compare(make, _tokens(), k=k)


@pytest.mark.parametrize("given", [1, 3])
def test_as_many_weights_as_backwards(given: int) -> None:
    model = _tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]

    @oomkit.auto_batch(weight=lambda batch: (1.0,) * given)
    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        tokens, rows = _two_losses(model, batch)
        tokens.backward(retain_graph=True)
        rows.backward()
        optimizer.step()

    wanted = "got 1, expected at least 2" if given == 1 else "got 3, expected 2"
    with force_slices([4, 3]), pytest.raises(oomkit.SplitError, match=wanted):
        step(_tokens())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([(), ()], "got an empty tuple"),
        ([(1, 2), (1,)], "got 2 and then 1"),
        ([(1.0, -1.0)], "got a negative number"),
        ([float("inf")], "got inf"),
    ],
)
def test_weights_that_are_none(answers: list[Any], wanted: str) -> None:
    given = iter(answers)
    step = oomkit.auto_batch(lambda x: x.sum(), weight=lambda batch: next(given))
    with force_slices([4, 3]), pytest.raises(oomkit.SplitError, match=wanted):
        step(torch.zeros(ROWS))


def test_one_loss_for_several_weights_is_said() -> None:
    model = _tagger()

    @oomkit.auto_batch(weight=lambda batch: ((batch["labels"] != -100).sum(), 1))
    def step(batch: dict[str, torch.Tensor]) -> float:
        tokens, rows = _two_losses(model, batch)
        tokens.backward(retain_graph=True)
        rows.backward()
        return float(tokens.detach() + rows.detach())

    with force_slices([4, 3]):
        with pytest.warns(oomkit.OomkitWarning, match="joined with the first"):
            step(_tokens())
        step(_tokens())  # once


def test_weights_of_an_evaluation() -> None:
    model = _tagger()

    @oomkit.auto_batch(weight=lambda batch: ((batch["labels"] != -100).sum(), len(batch["labels"])))
    def evaluate(batch: dict[str, torch.Tensor]) -> Any:
        with torch.no_grad():
            return tuple(loss.item() for loss in _two_losses(model, batch))

    whole = evaluate(_tokens())
    with force_slices([4, 3]):
        split = evaluate(_tokens())
    assert split == pytest.approx(whole, rel=TOLERANCE)


# --- labels of -100 without weight= ---


def _labelled(**options: Any) -> Callable[..., Any]:
    model = _tagger()

    @oomkit.auto_batch(**options)
    def step(batch: dict[str, torch.Tensor]) -> None:
        _token_loss(model, batch).backward()

    return step


def test_unequal_labels_are_said_once_with_the_line_to_write() -> None:
    step = _labelled()
    wanted = r"weight=lambda batch: \(batch\['labels'\] != -100\)\.sum\(\)"
    with force_slices([4, 3]):
        with pytest.warns(oomkit.OomkitWarning, match=wanted):
            step(_tokens())
        step(_tokens())


def test_the_proposal_follows_the_arguments() -> None:
    model = _tagger()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: dict[str, list[torch.Tensor]]) -> None:
        _token_loss(model, {"input_ids": x, "labels": y["a"][0]}).backward()

    batch = _tokens()
    wanted = r"y\['a'\]\[0\]\. A mean .* weight=lambda batch: \(batch\[1\]\['a'\]\[0\] != -100\)"
    with force_slices([4, 3]), pytest.warns(oomkit.OomkitWarning, match=wanted):
        step(batch["input_ids"], {"a": [batch["labels"]]})


@pytest.mark.parametrize("case", ["none", "even", "sum", "weight", "floats", "outputs"])
def test_nothing_to_say_about_labels(case: str) -> None:
    batch = _tokens()
    options: dict[str, Any] = {}
    if case == "none":
        batch["labels"] = batch["labels"].clamp(min=0)
    elif case == "even":  # each row has as many: n_i/N is right
        batch["labels"] = batch["labels"].clamp(min=0)
        batch["labels"][:, 3:] = -100
    elif case == "sum":
        options["reduction"] = "sum"
    elif case == "weight":
        options["weight"] = lambda batch: (batch["labels"] != -100).sum()
    if case in ("floats", "outputs"):
        values = torch.full((ROWS, 2), -100.0)
        values[0] = 1.0

        @oomkit.auto_batch
        def forward(batch: torch.Tensor) -> torch.Tensor:
            return batch.sum() if case == "floats" else batch[:, 0]

        with force_slices([4, 3]):
            forward(values if case == "floats" else batch["labels"])
        return
    with force_slices([4, 3]):
        _labelled(**options)(batch)


def test_said_before_anything_is_applied() -> None:
    """With warnings as errors the step is taken back."""
    model = _tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]

    @oomkit.auto_batch
    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        _token_loss(model, batch).backward()
        optimizer.step()

    with force_slices([4, 3]), pytest.raises(oomkit.OomkitWarning):
        step(_tokens())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_backward_true_is_the_whole_batch(reduction: str, k: int) -> None:
    torch.manual_seed(SEED)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randint(0, 3, (ROWS,))
    outcome = []
    for slices in ([ROWS], SLICES[k]):
        torch.manual_seed(SEED)
        model = MLP().double()

        @oomkit.auto_batch(backward=True, reduction=reduction)
        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y, reduction=reduction)  # noqa: B023

        with force_slices(slices):
            value = loss(x, y)
        outcome.append((value, _gradients(model)))
    assert _same(outcome[0][1], outcome[1][1])
    assert torch.allclose(outcome[0][0], outcome[1][0], rtol=TOLERANCE, atol=0)


def test_a_sum_has_no_weights() -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        oomkit.auto_batch(lambda x: x, reduction="sum", weight=len)


def test_one_row_that_runs_out_of_memory_is_not_weighed() -> None:
    """Of one row nothing tells that y goes with x: weight= had been given x alone."""
    x, y = torch.randn(1, 5).double(), torch.tensor([[1, -100, 2]])
    models = [nn.Linear(5, 9).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).view(-1, 3), y.flatten())

    @oomkit.auto_batch(weight=lambda batch: (batch[1] != -100).sum())
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(models[0], x, y).backward()

    with inject_oom(nth=1) as fault:
        step(x, y)
    assert fault.fired == 1
    loss_of(models[1], x, y).backward()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
