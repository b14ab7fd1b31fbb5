"""Gradients that overflow fp16 under a GradScaler, as those of its first steps do by design."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

ROWS, CALLS = 16, 6


class Net(nn.Module):
    """Its gradients are large, and large by another factor in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x) * 3)))) * 3


def run(scale: float, clips: bool, coupled: bool, **options: Any) -> tuple[Any, list[Any], float]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    @oomkit.auto_batch(model=net, optimizer=optimizer, participants=[scaler], **options)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x).float()
        if coupled:
            logits = logits - logits.mean(0)
        loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 16), torch.randint(0, 4, (ROWS,))
    for call in range(CALLS):
        if options:
            with force_slices([ROWS // 2] * 2):
                step(x, y)
        elif call == 0:
            with inject_oom(nth=12):
                step(x, y)
        else:
            step(x, y)
    assert step.records[-1].accumulation_steps == 2
    return step, [p.detach().clone() for p in net.parameters()], scaler.get_scale()


# Nothing overflows; the whole, or only parts, or all do; what is left is more than a proof tries.
SCALES = (2.0**16, 3e5, 1e6, 3e6, 3e7, 1e8, 1e12, 1e30)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_that_is_still_too_large_is_no_coupling(scale: float, clips: bool) -> None:
    """The scaler skips the same updates, and comes to the same scale, as without a proof."""
    _, expected, scaled = run(scale, clips, False, verify=False)
    step, got, found = run(scale, clips, False)
    assert step.records[0].ooms == 1
    assert found == scaled
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("scale", SCALES[:-1])
@pytest.mark.refusals
def test_coupled_rows_are_found_where_gradients_overflow(scale: float) -> None:
    """Before the first update that the scaler lets through."""
    with pytest.raises(oomkit.SplitError, match="differs by"):
        run(scale, True, True)
