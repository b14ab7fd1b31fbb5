"""The user's own participants: rolled back in every phase, and counted as the batch is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.effects_said import model as _model
from helpers.effects_said import said as _said
from helpers.sample import sampled
from torch import nn

import oomkit
from oomkit.testing import inject_oom


class CountingMetric:
    """As torchmetrics: adds up what each micro-batch gives."""

    def __init__(self) -> None:
        self.right, self.rows = 0, 0

    def update(self, right: int, rows: int) -> None:
        self.right += right
        self.rows += rows

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Ema:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for n, p in model.named_parameters():
            self.shadow[n] = 0.5 * self.shadow[n] + 0.5 * p.detach()

    def save(self) -> Any:
        return copy.deepcopy(vars(self))

    def restore(self, saved: Any) -> None:
        vars(self).update(copy.deepcopy(saved))


def _participants(k: int, guarded: bool = True) -> tuple[Any, CountingMetric, Ema, nn.Module]:
    model, optimizer = _model()
    metric, ema = CountingMetric(), Ema(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if not guarded or oomkit.current().is_last:
            ema.update(model)
        out = model(x)
        metric.update(int((out.argmax(1) == y).sum()), len(x))
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = oomkit.auto_batch(step, participants=[metric, ema], accumulation_steps=k)
    return call, metric, ema, model


def _state(metric: CountingMetric, ema: Ema) -> tuple[Any, ...]:
    return (vars(metric).copy(), ema.updates, {n: t.clone() for n, t in ema.shadow.items()})


def _same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:2] == b[:2] and all(torch.allclose(a[2][n], b[2][n], atol=1e-6) for n in a[2])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_participants_are_rolled_back_in_every_phase(k: int, phase: str) -> None:
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    call, metric, ema, _ = _participants(1)
    call(x, y)
    expected = _state(metric, ema)

    call = _participants(k)[0]
    with inject_oom(nth=2**60, phase=phase) as counted:
        call(x, y)
    for n in sampled(range(1, counted.seen + 1), 24):
        call, metric, ema, _ = _participants(k)
        before, wanted = _state(metric, ema), expected
        with inject_oom(nth=n, phase=phase) as armed:
            try:
                call(x, y)
            except oomkit.OutOfMemory as error:
                wanted = expected if error.committed else before
        assert armed.fired == 1
        assert _same_state(wanted, _state(metric, ema)), n

    call, metric, ema, model = _participants(k)
    before, params = _state(metric, ema), [p.detach().clone() for p in model.parameters()]
    with inject_oom(nth=1, times=None, phase="forward"), pytest.raises(oomkit.OutOfMemory):
        call(x, y)
    assert _same_state(before, _state(metric, ema))
    assert all(torch.equal(a, b) for a, b in zip(params, model.parameters(), strict=True))


def test_a_metric_ends_with_the_whole_batch_and_an_ema_moves_once() -> None:
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    call, metric, guarded, _ = _participants(2)
    assert _said(call, x, y) == ""
    assert metric.rows == 8 and guarded.updates == 1

    call, metric, ema, _ = _participants(2, guarded=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(x, y)
    (once,) = [str(w.message) for w in caught if "ema" in str(w.message)]
    assert "ema.shadow moves once" in once
    assert metric.rows == 8 and ema.updates == 1
    assert all(torch.equal(ema.shadow[name], value) for name, value in guarded.shadow.items())


def test_a_participant_that_no_name_leads_to_is_told() -> None:
    metric = CountingMetric()
    hidden = [metric.update]

    @oomkit.auto_batch(participants=[metric], accumulation_steps=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        hidden[0](1, len(x))
        return x * 2

    assert "participants[0].rows (0 -> 4)" in _said(step, torch.randn(8, 4))
