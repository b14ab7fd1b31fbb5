"""A bound on the loss of the whole batch couples its rows, also where a proof does not meet it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.sample import sampled, with_rest
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit._proof.graphs.reach import reached

SEED, ROWS = 3, 8
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _per_row(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - y).square()


def _mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _per_row(model, x, y).mean()


def _norm(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum().sqrt()


def _hidden(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[1](model[0](x)) - torch.tensor([2.0, 3.0, 4.0])  # never above 0


def _ranks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each row's score is to be larger than the mean of others by a margin, as in RaHinge."""
    good, bad = (model(rows).squeeze(1) for rows in (x, -x))
    return F.relu(99 - (good - bad.mean())).mean() + F.relu(99 + (bad - good.mean())).mean()


def _many_terms(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    for _ in range(72):
        for p in model.parameters():
            value = value + 1e-5 * p.square().sum()
    return value


def _one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = [(model(row).squeeze() - label).abs() for row, label in zip(x, y, strict=True)]
    return sum(losses[1:], losses[0]) / len(losses)


COUPLED: dict[str, Loss] = {
    "clamped": lambda m, x, y: _mean(m, x, y).clamp(max=1e3),
    "clamped from below": lambda m, x, y: _mean(m, x, y).clamp_min(1e-6),
    "flooded": lambda m, x, y: (_mean(m, x, y) - 1e-3).abs() + 1e-3,  # Ishida et al., 2020
    "largest": lambda m, x, y: torch.maximum(_mean(m, x, y), m(x).mean() - 9.0),
    "relu of the mean": lambda m, x, y: F.relu(_mean(m, x, y) - 1e-6),
    "a bounded penalty": lambda m, x, y: _mean(m, x, y) + (m(x).mean() + 5.0).clamp(max=99.0),
    "relu that is not met": lambda m, x, y: _mean(m, x, y) + F.relu(_mean(m, x, y) - 1e3),
    "fmax": lambda m, x, y: torch.fmax(_mean(m, x, y), m(x).mean() - 9.0),
    "where": lambda m, x, y: torch.where((q := _mean(m, x, y)) > 1e3, q - 1e3, q),
    "largest of a stack": lambda m, x, y: torch.stack([_mean(m, x, y), m(x).mean() - 9]).max(),
    "softshrink": lambda m, x, y: F.softshrink(_mean(m, x, y) + 9.0, 1.0),
    "one row of means": lambda m, x, y: (m(x).mean(0, keepdim=True) + 9.0).clamp(min=0).sum(),
    "each of two tasks": lambda m, x, y: (
        _mean(m, x, y) + (m[1](m[0](x)).pow(2).mean(0) - 9.0).clamp(min=0).sum()
    ),
    "beside those of rows": lambda m, x, y: (
        _one_by_one(m, x, y) + (_mean(m, x, y) - 1e3).clamp(min=0)
    ),
    "p-norm": lambda m, x, y: _hidden(m, x).mean(0).norm(p=1),
    "largest of means": lambda m, x, y: torch.linalg.vector_norm(
        _hidden(m, x).mean(0), float("inf")
    ),
    "norm of one number": lambda m, x, y: (_mean(m, x, y) + 9.0).norm(),
    "distance": lambda m, x, y: torch.dist(_hidden(m, x).mean(0), torch.zeros(3), 1),
    "distance of pairs": lambda m, x, y: F.pairwise_distance(
        _hidden(m, x).mean(0, keepdim=True), torch.zeros(1, 3), p=1
    ).sum(),
    "distance of each pair": lambda m, x, y: torch.cdist(
        _hidden(m, x).mean(0, keepdim=True), torch.zeros(1, 3).double(), p=1
    ).sum(),
    "margin": lambda m, x, y: F.multi_margin_loss(
        _hidden(m, x).mean(0, keepdim=True), torch.tensor([2]), margin=9.0
    ),
    "margin of labels": lambda m, x, y: F.multilabel_margin_loss(
        9 * _hidden(m, x).mean(0), torch.tensor([2, -1, -1])
    ),
    "pooled": lambda m, x, y: F.max_pool1d(_hidden(m, x).mean(0).view(1, 1, 3), 3).sum(),
    "pooled to one": lambda m, x, y: F.adaptive_max_pool1d(
        _hidden(m, x).mean(0).view(1, 1, 3), 1
    ).sum(),
    "largest and smallest": lambda m, x, y: sum(torch.aminmax(_hidden(m, x).mean(0), dim=0)),
    "largest of a group": lambda m, x, y: (
        torch.full((2,), -99.0)
        .double()
        .scatter_reduce(0, torch.tensor([0, 1, 0]), _hidden(m, x).mean(0), "amax")
        .sum()
    ),
    "largest along a dimension": lambda m, x, y: _hidden(m, x).mean(0).max(0).values,
    "first of an order": lambda m, x, y: _hidden(m, x).mean(0).topk(1).values.sum(),
    "filled": lambda m, x, y: (q := _mean(m, x, y)).masked_fill(q > 1e3, 0.0),
    "rows against a mean": lambda m, x, y: _ranks(m, x),
    "behind many terms": lambda m, x, y: _many_terms(m, (_mean(m, x, y) - 1e-3).abs()),
    "difference of means": lambda m, x, y: F.smooth_l1_loss(m(x).mean() + 9.0, y.mean()),
}
APART: dict[str, Loss] = {
    "of rows": lambda m, x, y: _per_row(m, x, y).clamp(max=1e3).mean(),
    "row by row": _one_by_one,
    "of weights": lambda m, x, y: _mean(m, x, y) + 0.1 * F.relu(_norm(m) - 0.5),
    "of a temperature": lambda m, x, y: _mean(m, x, y) * m[0].bias[0].exp().clamp(max=100.0),
    "of a mask": lambda m, x, y: (
        torch.where(torch.ones(1, 3).tril() > 0, m[0](x), 0.0).square().mean() + _mean(m, x, y)
    ),
    "of hidden units, row by row": lambda m, x, y: (
        sum(F.relu(m[0](row)).sum() for row in x) / len(x) + _mean(m, x, y)
    ),
    "of complex values": lambda m, x, y: (
        torch.complex(m(x), m[0](x)[:, :1]).abs().mean() + _mean(m, x, y)
    ),
    "of a count": lambda m, x, y: (
        _per_row(m, x, y).sum() / torch.tensor(float(len(x))).clamp(min=1.0)
    ),
    "a smooth norm": lambda m, x, y: _mean(m, x, y) + _norm(m) + m(x).norm(dim=1).mean(),
    "norms of rows": lambda m, x, y: (
        _hidden(m, x).norm(p=1, dim=1).mean()
        + torch.linalg.vector_norm(m[0](x), float("inf"), dim=1).mean()
        + m(x).norm(dim=1).mean()
    ),
    "norms of weights": lambda m, x, y: (
        _mean(m, x, y) + sum(p.norm(p=1) for p in m.parameters()) + m[2].weight.norm(float("inf"))
    ),
    "distances of rows": lambda m, x, y: (
        F.pairwise_distance(m[0](x), m[0](-x), p=1).mean()
        + F.triplet_margin_loss(m[0](x), m[0](-x), m[0](2 * x), p=1)
        + torch.cdist(m[0](x), m[0].weight.T, p=1).min(1).values.mean()
    ),
    "margins of rows": lambda m, x, y: F.multi_margin_loss(m[0](x), (y > 0).long()),
    "pooled in each row": lambda m, x, y: F.max_pool1d(m[0](x)[:, None], 3).mean(),
    "largest of each row's group": lambda m, x, y: (
        torch.zeros(len(x), dtype=x.dtype)
        .scatter_reduce(0, torch.arange(3 * len(x)) // 3, m[0](x).flatten(), "amax")
        .mean()
    ),
    "norms, row by row": lambda m, x, y: (
        sum((m[0](row) - m[2].weight).norm(p=1) for row in x) / len(x)
    ),
    "less the largest": lambda m, x, y: (
        -(m[0](x) - m[0](x).max()).log_softmax(1)[:, 0].mean() + m(x).abs().mean()
    ),
    "a mean beside rows": lambda m, x, y: F.relu(m[0](x)).mean() + _mean(m, x, y) + m(x).mean(),
    "of no rows": lambda m, x, y: _mean(m, x, y) + F.relu(F.relu(m[0](x))[y > 9].sum(1)).sum(),
    "of chosen rows": lambda m, x, y: (
        sum(F.relu(m[0](x)[x[:, i] > at]).sum() for i in range(4) for at in (-0.5, 0.5, 1.0))
        / len(x)
    ),
    "of rows of several lengths": lambda m, x, y: (
        F.relu(torch.nested.as_nested_tensor([*m[0](x)], layout=torch.jagged))
        .to_padded_tensor(0.0)
        .mean()
    ),
    "of rows of several lengths, strided": lambda m, x, y: (
        torch.nested.as_nested_tensor([*m[0](x)]).relu().to_padded_tensor(0.0).mean()
    ),
    "a row of a table": lambda m, x, y: F.relu(
        m[0](x) + F.embedding(torch.zeros(len(x), 1).long(), m[0].weight.T)[0]
    ).mean(),
}


def _world(loss: Loss, returned: bool) -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        return value.detach()

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(model, x, y)

    return model, compute if returned else step


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(ROWS, 4, generator=g, dtype=torch.float64)
    return x, torch.randn(ROWS, generator=g, dtype=torch.float64)


def _run(loss: Loss, returned: bool, steps: int | None) -> list[torch.Tensor]:
    model, function = _world(loss, returned)
    step = function if steps is None else oomkit.auto_batch(function, accumulation_steps=steps)
    for _ in range(3):
        value = step(*_batch())
        if returned:
            value.backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [t.detach().clone() for t in [*model.parameters(), *grads] if t is not None]


def _some(names: Iterable[str]) -> list[Any]:
    """Each of them once in two micro-batches or one row at a time, inside or returned."""
    cases = list(itertools.product(names, [2, ROWS], [False, True]))
    return with_rest(sampled(cases, len(cases) // 3, kind=lambda case: case[0]), cases)


@pytest.mark.parametrize(("name", "steps", "returned"), _some(COUPLED))
def test_of_the_whole_batch(name: str, steps: int, returned: bool) -> None:
    with pytest.raises(
        oomkit.SplitError, match=r"\(\) clips a number that is computed from all rows"
    ):
        _run(COUPLED[name], returned, steps)


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "steps", "returned"), _some(APART))
def test_of_anything_else(name: str, steps: int, returned: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return APART[name](model, x, y) + _mean(model, x, y)

    torch.testing.assert_close(
        _run(loss, returned, steps), _run(loss, returned, None), rtol=1e-9, atol=1e-12
    )


def test_a_vector_of_losses_has_bounds_too() -> None:
    """``losses.backward(weights)``, as of several tasks."""
    model, _ = _world(_mean, False)

    @oomkit.auto_batch(model=model, accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        losses = torch.stack([_mean(model, x, y), model(x).square().mean()]) + 9.0
        losses.abs().backward(torch.ones(2, dtype=x.dtype))

    with pytest.raises(oomkit.SplitError, match=r"abs\(\) clips a number"):
        step(*_batch())


@pytest.mark.parametrize("reduced", [False, True])
def test_a_vector_of_the_rows_losses_has_none(reduced: bool) -> None:
    model, _ = _world(_mean, False)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        losses = F.relu(model[0](x)).sort(1).values[:, :2].mean(1) + _per_row(model, x, y).clamp(-9)
        weights = torch.full((len(x),), 1 / len(x), dtype=x.dtype)
        losses.backward(weights) if not reduced else losses.mean().backward()

    found = []
    for each in step, oomkit.auto_batch(model=model, accumulation_steps=2)(step):
        each(*_batch())
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sort": lambda v: v.sort(0).values,
    "sort along -2": lambda v: v[:, None].sort(-2).values.squeeze(1),
    "msort": torch.msort,
    "topk": lambda v: v.topk(len(v), 0).values,
    "cummax": lambda v: v.cummax(0).values,
    "index": lambda v: v[v.detach().argsort(0)],
    "index_select": lambda v: v.index_select(0, v.detach().argsort(0)),
    "gather": lambda v: v.gather(0, v.detach().argsort(0)),
    "take": lambda v: v.take(v.detach().argsort(0)),
    "gather rows": lambda v: v[:, None].gather(0, v[:, None].detach().argsort(0)).squeeze(1),
    "gather along -2": lambda v: v[:, None].gather(-2, v[:, None].detach().argsort(0)).squeeze(1),
    "index_select along -2": lambda v: (
        v[:, None].index_select(-2, v.detach().argsort(0)).squeeze(1)
    ),
}


def _against_its_copy(
    order: Callable[[torch.Tensor], torch.Tensor], late: int, fits: int | None = None
) -> tuple[Any, Any]:
    """Values of rows in order, less those of the model as it was: all 0 until it moves."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    reference = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    @oomkit.auto_batch(model=net, optimizer=optimizer, accumulation_steps=2 if fits is None else 1)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if fits is not None and len(x) > fits and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.zero_grad()
        chosen, rejected = ((net(z) - reference(z)).squeeze(1) for z in (x, y))
        (-F.logsigmoid(order(chosen) - order(rejected)).mean()).backward()
        optimizer.step()

    generator = torch.Generator().manual_seed(1)
    for call in range(late + 2):
        optimizer.param_groups[0]["lr"] = 0.5 * (call >= late)  # a warmup that begins at 0
        if call == late + 1:
            break
        step(*torch.randn(2, 16, 8, generator=generator))
    return step, lambda: step(*torch.randn(2, 16, 8, generator=generator))


@pytest.mark.parametrize("late", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_over_rows_is_not_shown_by_rows_with_equal_values(order: str, late: int) -> None:
    """It is shown anew in each call, not in calls 2, 4 and 8 alone."""
    step, moved = _against_its_copy(ORDERS[order], late)
    with pytest.raises(oomkit.SplitError, match="differs by"):
        moved()


FITS = list(itertools.product(["index", "gather", "sort"], [2, 3, 4]))


@pytest.mark.parametrize(("order", "fits"), with_rest(sampled(FITS, 4, "fits"), FITS))
def test_an_order_over_rows_is_not_shown_by_a_part_of_one_row(order: str, fits: int) -> None:
    for late in (4, 5):  # the losses of calls 4 and 8 are compared anyway
        _, moved = _against_its_copy(ORDERS[order], late, fits=fits)
        with pytest.raises(oomkit.SplitError):
            moved()


@pytest.mark.parametrize("dim", [1, -1])
def test_what_is_picked_in_each_row_is_split(dim: int) -> None:
    """Log-probabilities of the labels, as most losses of language models pick them."""
    torch.manual_seed(0)
    net = nn.Linear(8, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        net.zero_grad()
        (-net(x).log_softmax(dim).gather(dim, y[:, None]).squeeze(dim).mean()).backward()

    found, batch = [], (torch.randn(16, 8), torch.randint(0, 4, (16,)))
    for each in step, oomkit.auto_batch(model=net, accumulation_steps=2)(step):
        each(*batch)
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_an_order_within_rows_is_shown_once() -> None:
    net = nn.Linear(8, 4)
    runs: Seen[int] = Seen()

    @oomkit.auto_batch(model=net, accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        net.zero_grad()
        runs.append(len(x))
        net(x).sort(1).values[:, :2].square().mean().backward()

    for _ in range(3):  # the second compares losses
        runs.clear()
        step(torch.randn(16, 8))
    assert runs == [8, 8]


def test_an_index_by_the_numbers_of_the_rows_is_shown_once() -> None:
    """Codes that are learnt for each sample of a data set: an order of all rows would begin anew in
    each part."""
    net, codes = nn.Linear(8, 4), nn.Parameter(torch.randn(16, 8))
    runs: Seen[int] = Seen()

    @oomkit.auto_batch(model=net, participants=[codes], accumulation_steps=2)
    def step(x: torch.Tensor, ids: torch.Tensor) -> None:
        net.zero_grad()
        codes.grad = None
        runs.append(len(x))
        net(x + codes[ids]).square().mean().backward()

    for _ in range(3):  # the second compares losses
        runs.clear()
        step(torch.randn(16, 8), torch.arange(16))
    assert runs == [8, 8]


@pytest.mark.parametrize("alike", [True, False])
def test_an_index_of_rows_is_shown_until_it_moves_one(alike: bool) -> None:
    """Packed sequences are put in the order of their lengths, and back."""
    net = nn.GRU(4, 4, batch_first=True)
    runs: Seen[int] = Seen()

    @oomkit.auto_batch(model=net, accumulation_steps=2)
    def step(x: torch.Tensor, lengths: torch.Tensor) -> None:
        net.zero_grad()
        runs.append(len(x))
        packed = nn.utils.rnn.pack_padded_sequence(
            x * net.weight_ih_l0.mean(), lengths, batch_first=True, enforce_sorted=False
        )
        net(packed)[1].squeeze(0).square().mean().backward()

    lengths = torch.full((16,), 6) if alike else torch.arange(16) % 6 + 1
    for _ in range(3):
        runs.clear()
        step(torch.randn(16, 6, 4), lengths)
    assert (runs == [8, 8]) != alike


@pytest.mark.parametrize(
    "loss",
    [
        lambda v: v.median(),
        lambda v: v.cummax(0).values.mean(),
        lambda v: v.flatten().mode().values,
    ],
    ids=["median", "cummax", "mode"],
)
def test_an_order_in_a_returned_loss_whose_graph_is_gone_is_refused(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    net = nn.Linear(6, 4)
    step = oomkit.auto_batch(lambda x: loss(net(x)), model=net, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError):
        step(torch.randn(8, 6))


class _Two(torch.autograd.Function):
    """Some rows' numbers beside one that has no rows: the functions of torch.compile, of reentrant
    checkpoints and of wrappers have many results, each of something else."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, other: torch.Tensor) -> Any:
        return out.clone(), other.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients


class _Scaled(nn.Module):
    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.zeros(()))
        self.of_all = of_all

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.up(x))
        other = h.square().mean() if self.of_all else self.scale
        return _Two.apply(self.down(h)[:, 0], other)  # type: ignore[no-untyped-call]


def _bounded_step(of_all: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
    torch.manual_seed(SEED)
    model = _Scaled(of_all)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        out, other = model(x)
        if of_all:
            loss = F.mse_loss(out, y) + other.clamp(min=0.3)
        else:
            loss = F.smooth_l1_loss(out / other.exp(), y) + other
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("of_all", [False, True])
def test_a_bound_behind_a_function_of_several_results(of_all: bool) -> None:
    """That of one result is none of the others'; nor are the rows of others its own."""
    step = _bounded_step(of_all)
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS)
    if not of_all:
        step(x, y)
        return
    with pytest.raises(oomkit.SplitError, match=r"clamp\(\) clips a number"):
        step(0.1 * x, y)


def test_results_that_are_passed_on_stay_what_they_are() -> None:
    """As DistributedDataParallel does it with find_unused_parameters=True."""

    def sketch(kind: str, rows: int) -> Any:
        return (
            ("Add", ((),), ((1, 0), (2, 0)), None),
            ("SmoothL1Loss", ((),), ((3, 0),), "smooth_l1_loss"),
            ("Mul", ((),), ((3, 1),), None),
            (kind, ((rows,), ()), ((4, 0), (5, 0)), None),
            ("Select", ((rows,),), ((6, 0),), None),
            ("Mean", ((),), ((6, 0),), None),
            ("Addmm", ((rows, 1),), (), None),
        )

    for kind in ("_DDPSink", "RegisterPostBackwardFunction"):
        assert reached(*(sketch(kind, rows) for rows in (8, 5, 3))) == (None, {1})
    clamped = [
        (*sketch("_DDPSink", rows)[:2], ("Clamp", ((),), ((3, 1),), "clamp")) for rows in (8, 5)
    ]
    rest = [sketch("_DDPSink", rows)[3:] for rows in (8, 5)]
    assert reached(*(a + b for a, b in zip(clamped, rest, strict=True))) == ("clamp", set())
