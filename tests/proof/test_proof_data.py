"""What the rows of one batch happen to be must not prove a split: labels of one class, parts that
agree by chance, results of 0, updates that leave no gradient behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import oomkit
from oomkit.testing import inject_oom

SEED = 31
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _world() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _x(rows: int, seed: int = SEED) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=g, dtype=torch.float64)


def _step(loss: Loss, after: Callable[..., Any] = lambda loss, out, y, norm: None) -> Any:
    """A training step, and the parameters of its model."""
    model, optimizer = _world()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.no_grad():
            out = model(x)
        value = loss(model, x, y)
        value.backward()
        norm = clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        return after(value.detach(), out, y, norm)

    return step, model


def _refused(step: Any, *batch: Any, steps: int = 2) -> None:
    decorated = oomkit.auto_batch(step, accumulation_steps=steps)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        decorated(*batch)


# --- where the proof looks ---


def _flipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its gradient couples rows of different labels alone, as long as no margin is reached."""
    first, _, head = model
    h = first(x).tanh()
    return F.multi_margin_loss(head(h - 0.5 * h.flip(0)), y, margin=9.0)


def test_rows_of_one_class_do_not_prove_it_where_the_batch_has_others() -> None:
    step, _ = _step(_flipped)
    _refused(step, _x(7), torch.tensor([1, 1, 1, 1, 1, 0, 2]))


def test_a_batch_of_one_class_is_proven_again_with_the_first_one_that_has_several() -> None:
    """As in data that are sorted by their labels."""
    step, model = _step(_flipped)
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    decorated(_x(8), torch.ones(8, dtype=torch.int64))
    for i in range(3):
        decorated(_x(8, i), torch.ones(8, dtype=torch.int64))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        decorated(_x(8, 9), torch.tensor([1, 2, 0, 1, 0, 2, 0, 1]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_parts_that_agree_by_chance_are_not_the_only_ones() -> None:
    """The hardest half of six rows is that of the first four and that of the last two."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.topk((len(each) + 1) // 2).values.mean()

    step, model = _step(loss)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        hard = F.cross_entropy(model(_x(64)), y.repeat(11)[:64], reduction="none").argsort()
    x, y = _x(64)[hard], y.repeat(11)[:64][hard]  # from easy to hard
    order = [63, 0, 62, 1, 61, 2]
    _refused(step, x[order], y[order])


def test_a_mask_is_not_forgiven_for_the_sake_of_single_rows() -> None:
    """Cut in the middle, both micro-batches weigh what their rows do."""
    model, optimizer = _world()

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(x).square().sum(1) * mask).sum() / mask.sum()
        value.backward()
        optimizer.step()
        return value.detach()

    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 1], dtype=torch.float64)
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    got = decorated(_x(9), mask)
    want = (_world()[0](_x(9)).square().sum(1) * mask).sum() / mask.sum()
    torch.testing.assert_close(got, want.detach())


def test_labels_that_are_negative_and_labels_that_are_padding() -> None:
    """`labels[labels == -100] = pad`, and a loss that ignores `pad`."""
    torch.manual_seed(SEED)
    model = nn.Embedding(7, 7).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(y: torch.Tensor) -> torch.Tensor:
        kept = y.clamp(min=0)
        return F.cross_entropy(model(kept).flatten(0, 1), kept.flatten(), ignore_index=0)

    def step(y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(y)
        value.backward()
        optimizer.step()
        return value.detach()

    rows = [[3, 1, 0, -100], [2, -100, -100, -100], [0, 0, 4, 5], [6, 1, 2, 3], [1, 0, -100, 2]]
    y = torch.tensor(rows)
    want = loss(y).detach()
    torch.testing.assert_close(oomkit.auto_batch(step, accumulation_steps=2)(y), want)


# --- what it compares ---


@pytest.mark.parametrize("through_data", [False, True])
def test_an_update_by_hand_whose_gradients_are_gone_at_the_end(through_data: bool) -> None:
    """`v / v.mean()` has the loss 1, whatever the rows; only the parameters tell."""
    model, _ = _world()
    start = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        each = F.cross_entropy(model(x), y, reduction="none")
        (each / each.detach().mean()).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    (p.data if through_data else p).sub_(p.grad, alpha=0.05)
                    p.grad.zero_()

    _refused(step, _x(6), torch.tensor([0, 1, 2, 0, 1, 2]), steps=6)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


def test_rows_beside_the_batch_that_single_rows_are_broadcast_to() -> None:
    """No two micro-batches can run at once; the call's own cut shows it."""
    beside = SimpleNamespace(rows=torch.linspace(0.5, 2.0, 5, dtype=torch.float64))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x) * beside.rows[:, None], y.expand(max(5, len(y))))

    step, _ = _step(loss)
    _refused(step, _x(5), torch.zeros(5, dtype=torch.int64), steps=5)


def test_what_only_other_data_show_is_found_in_the_next_split_call() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = model(x).square().sum(1) + x.square().sum(1)
        mean = each.mean()
        return mean if mean < 4.0 else mean.sqrt()

    step, _ = _step(loss)
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    y = torch.zeros(8, dtype=torch.int64)
    decorated(0.1 * _x(8), y)
    scale = torch.tensor([0.1, 0.1, 20.0, 0.1] * 2, dtype=torch.float64)[:, None]
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        decorated(scale * _x(8), y)


# --- figures in results ---


def _figures(loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor, norm: torch.Tensor) -> Any:
    right = out.argmax(1) == y
    return loss, right.double().mean(), norm, int(right.sum()), float(right.double().mean())


def _labels(hits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which these are right."""
    x = _x(len(hits))
    with torch.no_grad():
        best = _world()[0](x).argmax(1)
    return x, torch.tensor([b if h else (b + 1) % 3 for b, h in zip(best, hits, strict=True)])


@pytest.mark.parametrize("first", [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]])
@pytest.mark.parametrize("second", [[0, 0, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
def test_a_share_that_is_zero_in_all_but_the_last_part_is_no_norm(
    first: list[int], second: list[int]
) -> None:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x)[:, :1] + 1e-3).square().mean()  # what is right stays so

    whole, step = _step(loss, _figures)[0], _step(loss, _figures)[0]
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    for hits in (first, second):
        batch = _labels(hits)
        want, got = whole(*batch), decorated(*batch)
        torch.testing.assert_close(got, want)


def test_a_rate_that_an_update_changes_is_still_the_last_ones() -> None:
    """Of zero, too: at the begin of a warm-up."""
    model, optimizer = _world()
    optimizer.param_groups[0]["lr"] = 0.0
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 4)
    optimizer.param_groups[0]["initial_lr"] = rates.base_lrs[0] = 1.0

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        rates.step()
        return float(optimizer.param_groups[0]["lr"]), rates.last_epoch

    assert [step(_x(4)) for _ in range(3)] == [(0.25, 1), (0.5, 2), (0.75, 3)]


def test_a_share_is_no_norm_where_one_row_fits() -> None:
    """Found without a graph, where the norm of no gradients is 0."""
    step, _ = _step(lambda m, x, y: F.cross_entropy(m(x), y), _figures)
    whole, _ = _step(lambda m, x, y: F.cross_entropy(m(x), y), _figures)
    decorated = oomkit.auto_batch(step, min_micro_batch=1)
    x, y = _labels([0, 1, 0, 1])
    with inject_oom(nth=3, phase="forward", times=2):
        decorated(x, y)
    whole(x, y)
    x, y = x[[0, 0, 0, 1]], y[[0, 0, 0, 1]]
    got, want = decorated(x, y), whole(x, y)
    torch.testing.assert_close(got[1:3], want[1:3])


def test_gradients_of_an_earlier_call_that_are_cleared_after_the_forward() -> None:
    """They are not in what a backward has given."""
    whole, split = _world(), _world()

    def step_of(world: Any) -> Any:
        model, optimizer = world

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y, reduction="sum") / 16
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    plain, decorated = step_of(whole), oomkit.auto_batch(step_of(split))
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    plain(_x(6), y), decorated(_x(6), y)
    want = plain(_x(6, 2), y)
    with inject_oom(nth=3, phase="forward") as fault:
        got = decorated(_x(6, 2), y)
    assert fault.fired
    torch.testing.assert_close(got, want)
    for one, two in zip(whole[0].parameters(), split[0].parameters(), strict=True):
        torch.testing.assert_close(one, two)


class Centred(nn.Module):
    """Takes off what its first forward has made."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how
        if how in ("filled", "table filled"):
            self.register_buffer("mu", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "mu", None) is None:
            if self.how == "registered":
                self.register_buffer("mu", x.mean(0))
            elif self.how == "table":
                self.register_buffer("mu", torch.arange(4.0).cos(), persistent=False)
            elif self.how == "table filled":
                self.mu = torch.arange(4.0).cos()
            else:
                self.mu = x.mean(0)
        return self.layer(x - self.mu)


def _centred(how: str, fits: int | None) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    torch.manual_seed(0)
    model = Centred(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = model(x)
        if fits is not None and len(x) > fits and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out.square().mean().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("fits", [4, 1])
@pytest.mark.parametrize("how", ["registered", "filled", "attribute"])
def test_what_the_first_micro_batch_makes_of_its_rows_is_refused(how: str, fits: int) -> None:
    """The whole batch would have made it of all rows; nothing of it is left."""
    model, step = _centred(how, fits)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        oomkit.auto_batch(step)(torch.randn(8, 4))
    assert getattr(model, "mu", None) is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("how", ["table", "table filled"])
def test_a_table_that_the_first_micro_batch_makes_is_split(how: str) -> None:
    found, batch = [], torch.randn(8, 4)
    for fits in (None, 4):
        model, step = _centred(how, fits)
        each = step if fits is None else oomkit.auto_batch(step)
        for _ in range(2):
            each(batch)
        found.append(model.state_dict())
    torch.testing.assert_close(*found)
