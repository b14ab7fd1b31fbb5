"""Losses returned to a caller: buffers too large to be kept as bytes, or not contiguous."""

from __future__ import annotations

import pytest
import torch
from zoo import SEED

import oomkit
from deferred.test_returned import B, close, grads, loss_of
from oomkit.testing import inject_oom

BUFFERS = {
    "larger than 64 KiB": lambda: torch.ones(20_000, dtype=torch.float64),
    "transposed": lambda: torch.ones(3, 6, dtype=torch.float64).T,
}


class Masked(torch.nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3, dtype=torch.float64)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.mask.flatten()[:3]
        return out


def world(kind: str) -> tuple[Masked, torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    model = Masked(BUFFERS[kind]())
    return model, torch.randn(B, 6, dtype=torch.float64), torch.randint(0, 3, (B,))


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_buffer_that_stays_as_it_is(kind: str, calls_before: int) -> None:
    """It is copied in the first call, and the copy dropped at its end: nothing to put back."""
    want, x, y = world(kind)
    loss_of(want)(x, y).backward()
    for nth in (2, 4):
        model, x, y = world(kind)
        step = oomkit.auto_batch(loss_of(model))
        for _ in range(calls_before):
            step(x, y).backward()
        model.zero_grad()
        loss = step(x, y)
        with inject_oom(nth=nth, phase="backward") as fault:
            loss.backward()
        assert fault.fired == 1 and step.records[-1].ooms == 1
        assert close(grads(model), grads(want))
        assert torch.equal(model.mask, want.mask)
