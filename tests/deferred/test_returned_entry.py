"""Losses returned to a caller who has gradients already: the replay does not touch them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from zoo import SEED

import oomkit
from deferred.test_returned import B, grads, loss_of, same
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted


def world(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model.to(dtype), torch.randn(B, 6, dtype=dtype), torch.randint(0, 3, (B,))


@pytest.mark.parametrize("slices", [[4, 4], [1] * 8])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_bit_for_bit_as_a_call_that_was_split_before_its_backward(
    slices: list[int], scale: float
) -> None:
    """One sum of the batch is added to them, not one micro-batch after the other."""
    want, x, y = world()
    with force_slices(slices):
        loss = oomkit.auto_batch(loss_of(want))(x, y)
    (loss * scale).backward()
    for nth in range(2, 9):
        model, x, y = world()
        mine = [p.grad for p in model.parameters()]
        step = oomkit.auto_batch(loss_of(model), gradient_safety="copy")
        loss = step(x, y) * scale
        with inject_oom(nth=nth, times=1 if len(slices) == 2 else 2, phase="backward"):
            loss.backward()
        assert step.records[-1].accumulation_steps == len(slices)
        assert same(grads(model), grads(want)), nth
        assert all(p.grad is g for p, g in zip(model.parameters(), mine, strict=True))


def test_a_replay_that_fails_for_good_leaves_them_as_they_were() -> None:
    """Without copies: nothing had reached them when the first backward failed."""
    model, x, y = world()
    before = grads(model)
    loss = oomkit.auto_batch(loss_of(model), gradient_safety="off")(x, y)
    calls = itertools.count(1)  # a list would go back, too

    def odd(grad: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            raise ValueError("not today")
        return grad

    model[0].weight.register_hook(odd)
    with pytest.warns(oomkit.OomkitWarning, match="hook"):
        with inject_oom(nth=2, phase="backward"):
            with pytest.raises(ValueError, match="not today"):
                loss.backward()
    assert next(calls) == 3  # the first micro-batch was complete
    assert same(grads(model), before)


@pytest.mark.parametrize("sparse_at_entry", [True, False])
def test_sparse_gradients(sparse_at_entry: bool) -> None:
    """The sum of a sparse and a dense gradient is dense, whichever was there before."""

    def made() -> tuple[torch.nn.Embedding, torch.Tensor]:
        torch.manual_seed(SEED)
        table = torch.nn.Embedding(5, 3, sparse=not sparse_at_entry, dtype=torch.float64)
        entry = torch.randn(5, 3, dtype=torch.float64)
        table.weight.grad = entry.to_sparse(1) if sparse_at_entry else entry
        return table, torch.randint(0, 5, (B,))

    want, x = made()
    want(x).square().mean().backward()
    table, x = made()
    loss = oomkit.auto_batch(lambda x: table(x).square().mean(), gradient_safety="copy")(x)
    with inject_oom(nth=3, phase="backward") as fault:
        loss.backward()
    assert fault.fired == 1
    a, b = want.weight.grad, table.weight.grad
    assert a is not None and b is not None and a.layout == b.layout == torch.strided
    assert (a - b).abs().max() <= 1e-12


def test_rows_with_weights_of_their_own() -> None:
    """A loss with a row per sample runs again whole or in slices: the same sum."""
    want, x, y = world(torch.float64)
    weights = torch.linspace(0.1, 1, B, dtype=torch.float64)
    (F.cross_entropy(want(x), y, reduction="none") * weights).sum().backward()
    model, x, y = world(torch.float64)

    def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    for k in (1, 2):
        again, _, _ = world(torch.float64)
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.clone()
        losses = oomkit.auto_batch(rows, accumulation_steps=k)(x, y)
        with inject_oom(nth=4, phase="backward"):
            (losses * weights).sum().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert (p.grad - q.grad).abs().max() <= 1e-12
