"""Where a returned loss stands in the result, and whether one element is a loss or a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import oomkit
from deferred.test_returned import B, close, grads, loss_of, plain, world
from oomkit.testing import force_slices, inject_oom


class _Pair(NamedTuple):
    total: torch.Tensor
    loss: torch.Tensor


# What the step returns of its loss, and where else it is found.
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "after": (lambda v: {"loss": v, "total": v}, lambda r: r["total"]),
    "before": (lambda v: {"total": v, "n": 1, "loss": v}, lambda r: r["total"]),
    "deeper": (lambda v: {"loss": v, "log": {"parts": [v]}}, lambda r: r["log"]["parts"][0]),
    "tuple": (lambda v: (v, v), lambda r: r[1]),
    "field": (lambda v: _Pair(v, v), lambda r: r.total),
}


def _loss(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["loss"]  # type: ignore[no-any-return]
    return result.loss if isinstance(result, _Pair) else result[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [1, 2])
def test_backward_on_the_other_name(form: str, k: int) -> None:
    make, other = FORMS[form]
    model, x, y = world()
    compute = loss_of(model)
    step = oomkit.auto_batch(lambda x, y: make(compute(x, y)), model=model, accumulation_steps=k)
    result = step(x, y)
    assert other(result) is _loss(result)
    with inject_oom(nth=5, phase="backward"):
        (other(result) / 2).backward()
    assert close(grads(model), plain(lambda v: v / 2))


def test_a_loss_per_row_under_two_names() -> None:
    model, x, y = world()

    def compute(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        each = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        return {"loss": each, "each": each}

    result = oomkit.auto_batch(compute, accumulation_steps=2)(x, y)
    assert result["each"] is result["loss"]
    result["each"].mean().backward()
    assert close(grads(model), plain())


def test_one_that_is_only_equal_stays_refused() -> None:
    model, x, y = world()
    compute = loss_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = compute(x, y)
        return {"loss": loss, "twice": loss * 2}

    result = oomkit.auto_batch(step, model=model, accumulation_steps=2)(x, y)
    with pytest.raises(oomkit.SplitError, match=r"result\['twice'\]"):
        result["twice"].backward()
    assert all(p.grad is None for p in model.parameters())


SHAPES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "one element": ("mean", lambda v: v.reshape(1)),
    "one by one": ("mean", lambda v: v.reshape(1, 1)),
    "a row per sample": ("none", lambda v: v),
    "a column": ("none", lambda v: v[:, None]),
}


@pytest.mark.parametrize("rows", [2, 3, B])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_first_call_in_single_rows(shape: str, rows: int) -> None:
    """One row of one element tells nothing: the first micro-batch gets another one."""
    reduction, form = SHAPES[shape]

    def run(decorate: Any) -> tuple[Any, torch.Tensor]:
        model, x, y = world(dropout=0.0)
        step = decorate(
            lambda x, y: form(torch.nn.functional.cross_entropy(model(x), y, reduction=reduction))
        )
        for _ in range(2):
            model.zero_grad()
            loss = step(x[:rows], y[:rows])
            (loss * 3).sum().backward()
        return grads(model), loss

    want, whole = run(lambda f: f)
    got, loss = run(lambda f: oomkit.auto_batch(f, accumulation_steps=rows))
    assert loss.shape == whole.shape
    assert close(got, want) and close([loss], [whole])


def test_single_rows_are_all_that_fits() -> None:
    """Then nothing can tell: refused, and nothing has changed."""
    model, x, y = world(dropout=0.5, norm=False)
    compute = loss_of(model)
    step = oomkit.auto_batch(lambda x, y: compute(x, y).reshape(1), model=model)
    state = torch.get_rng_state()

    def forward(module: Any, args: tuple[torch.Tensor]) -> None:
        if len(args[0]) > 1:
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1 byte")

    with model.register_forward_pre_hook(forward):
        with pytest.raises(oomkit.SplitError, match=r"min_micro_batch=2"):
            step(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with force_slices([1] * B), pytest.raises(oomkit.SplitError, match=r"shape .*\[1\]"):
        step(x, y)
    step(x, y).backward()
    with force_slices([1] * B):  # known now
        assert step(x, y).shape == (1,)
