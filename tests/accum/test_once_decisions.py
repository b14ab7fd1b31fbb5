"""Decisions that a step makes for itself: equal for every micro-batch, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

NAN_ROW = 6  # in the second half of the batch


class World:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(4, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.x = torch.randn(8, 4, dtype=torch.float64)
        self.i = 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).pow(2).mean()

    def state(self) -> list[Any]:
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [*[p.detach().clone() for p in self.model.parameters()], *grads]


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(
        (x is None and y is None)
        or (x is not None and y is not None and bool((x - y).abs().max() <= 1e-12))
        for x, y in zip(a, b, strict=True)
    )


def _counter(w: World, x: torch.Tensor) -> None:
    w.loss(x).backward()
    w.i += 1
    if w.i % 2 == 0:
        w.optimizer.step()
        w.optimizer.zero_grad()


def _counter_before(w: World, x: torch.Tensor) -> None:
    w.i += 1
    if w.i % 2 == 0:
        w.optimizer.zero_grad()
        return
    w.loss(x).backward()
    w.optimizer.step()


def _nan_skip(w: World, x: torch.Tensor) -> None:
    loss = w.loss(x)
    if math.isnan(loss.item()):
        return
    loss.backward()
    w.optimizer.step()


def _nan_skip_in_a_helper(w: World, x: torch.Tensor) -> None:
    loss = w.loss(x)
    for _ in range(1):
        if _bad(loss):
            continue
        loss.backward()
        w.optimizer.step()


def _bad(loss: torch.Tensor) -> bool:
    if not torch.isfinite(loss):
        return True
    return False


def _nan_skip_of_the_update(w: World, x: torch.Tensor) -> None:
    loss = w.loss(x)
    loss.nan_to_num().backward()
    if not loss.isnan():
        w.optimizer.step()


def _norm_below(w: World, x: torch.Tensor) -> None:
    w.loss(x).backward()
    norm = nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    if norm < 1e-6:
        w.optimizer.step()


def _norm_above(w: World, x: torch.Tensor) -> None:
    w.loss(x).backward()
    norm = nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    if norm > 1e-6:
        w.optimizer.step()


def _scale_before(w: World, x: torch.Tensor) -> None:
    w.i += 1
    w.scaler.scale(w.loss(x)).backward()
    if w.scaler.get_scale() > 0 and w.i % 2:
        w.scaler.step(w.optimizer)
        w.scaler.update()


REFUSED: dict[str, tuple[Callable[[World, torch.Tensor], None], bool]] = {
    "counter": (_counter, False),
    "counter first": (_counter_before, False),
    "nan": (_nan_skip, True),
    "nan in a helper": (_nan_skip_in_a_helper, True),
    "nan, update alone": (_nan_skip_of_the_update, True),
    "norm below": (_norm_below, False),
    "norm above": (_norm_above, False),
    "scale and counter": (_scale_before, False),
}


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.refusals
def test_micro_batches_that_decide_differently_are_refused(name: str, oom: bool) -> None:
    act, with_nan = REFUSED[name]
    w = World()
    if with_nan:
        w.x[NAN_ROW] = float("nan")
    step = oomkit.auto_batch(lambda x: act(w, x), accumulation_steps=1 if oom else 2)
    before = w.state()
    with pytest.raises(oomkit.SplitError, match="run different code") as caught:
        if oom:
            # Wherever the whole batch fails: with nan nothing after the forward would run.
            phase = "forward" if with_nan or name == "counter first" else "backward"
            with inject_oom(nth=1, phase=phase):
                if name == "counter first":
                    w.i = 2
                step(w.x)
        else:
            step(w.x)
    assert "oomkit.current()" in str(caught.value)
    assert _same(before, w.state())
    assert not any("applied" in note for note in getattr(caught.value, "__notes__", []))


def _always(w: World, x: torch.Tensor) -> None:
    loss = w.loss(x)
    if math.isnan(loss.item()) or loss.item() > 1e9:
        return
    loss.backward()
    norm = nn.utils.clip_grad_norm_(w.model.parameters(), 1.0)
    if norm < 10:
        w.optimizer.step()


def _scale_compared(w: World, x: torch.Tensor) -> None:
    w.optimizer.zero_grad()
    w.scaler.scale(w.loss(x)).backward()
    before = w.scaler.get_scale()
    w.scaler.step(w.optimizer)
    w.scaler.update()
    if before <= w.scaler.get_scale():
        w.i += 1


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("act", [_always, _scale_compared])
@pytest.mark.parametrize("nan", [False, True])
def test_decisions_that_agree_are_the_whole_batchs(act: Any, nan: bool, oom: bool) -> None:
    plain, split = World(), World()
    if nan:
        for w in (plain, split):
            w.x[:] = float("nan")
    act(plain, plain.x)
    step = oomkit.auto_batch(lambda x: act(split, x), accumulation_steps=1 if oom else 2)
    if oom:
        with inject_oom(nth=1, phase="forward") as armed:
            step(split.x)
        assert armed.fired == 1
    else:
        step(split.x)
    if not (nan and act is _scale_compared):  # NaN gradients are not equal to themselves
        assert _same(plain.state(), split.state())
    assert plain.scaler.get_scale() == split.scaler.get_scale()


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.refusals
def test_a_norm_that_decides_is_refused_where_it_differs(oom: bool) -> None:
    """Parked gradients have a norm of 0: `norm < limit` holds until the last micro-batch."""
    w = World()
    w.x *= 100

    def act(x: torch.Tensor) -> None:
        w.loss(x).backward()
        if nn.utils.clip_grad_norm_(w.model.parameters(), 1.0) < 10:
            w.optimizer.step()

    before = w.state()
    step = oomkit.auto_batch(act, accumulation_steps=1 if oom else 2)
    with pytest.raises(oomkit.SplitError, match="run different code"):
        if oom:
            with inject_oom(nth=1, phase="backward"):
                step(w.x)
        else:
            step(w.x)
    assert _same(before, w.state())


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("error", [FloatingPointError, ValueError])
def test_an_error_of_the_step_passes_with_a_note_and_everything_back(error: Any, oom: bool) -> None:
    w = World()
    w.x[NAN_ROW] = float("nan")

    def act(x: torch.Tensor) -> None:
        w.optimizer.zero_grad()
        loss = w.loss(x)
        loss.backward()
        if not torch.isfinite(loss):
            raise error("loss is nan")
        w.optimizer.step()

    before, rng = w.state(), torch.get_rng_state()
    step = oomkit.auto_batch(act, accumulation_steps=1 if oom else 2)
    with pytest.raises(error, match="loss is nan") as caught:
        if oom:
            with inject_oom(nth=1, phase="forward"):
                step(w.x)
        else:
            step(w.x)
    # A ValueError may be of the split: the whole batch tells.
    where = "raised with the whole batch" if oom and error is ValueError else "micro-batch 2 of 2"
    assert any(where in note for note in caught.value.__notes__)
    assert _same(before, w.state()) and torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.refusals
def test_who_reads_a_parked_gradient_is_told_of_it(guarded: bool, oom: bool) -> None:
    w = World()

    def act(x: torch.Tensor) -> float | None:
        w.optimizer.zero_grad()
        w.loss(x).backward()
        norm = None
        if not guarded or oomkit.current().is_last:
            norm = w.model.weight.grad.norm().item()
        w.optimizer.step()
        return norm

    step = oomkit.auto_batch(
        act, accumulation_steps=1 if oom else 2, join=lambda results, rows: results[-1]
    )
    before = w.state()

    def run() -> float | None:
        if oom:
            with inject_oom(nth=1, phase="backward"):
                return step(w.x)
        return step(w.x)

    if guarded:
        norm = run()
        twin = World()
        twin.loss(twin.x).backward()
        assert norm == pytest.approx(twin.model.weight.grad.norm().item(), rel=1e-12)
        return
    with pytest.raises(AttributeError, match="has no attribute 'norm'") as caught:
        run()
    assert any("grad is None" in note for note in caught.value.__notes__)
    assert _same(before, w.state())


def test_a_scheduler_left_out_for_another_reason_is_refused() -> None:
    w = World()
    scheduler = torch.optim.lr_scheduler.StepLR(w.optimizer, 10)

    def act(x: torch.Tensor) -> None:
        w.scaler.scale(w.loss(x)).backward()
        w.scaler.step(w.optimizer)
        w.scaler.update()
        w.i += 1
        if w.i % 2:
            scheduler.step()

    step = oomkit.auto_batch(act, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="run different code") as caught:
        step(w.x)
    assert any("had been applied" in note for note in caught.value.__notes__)
