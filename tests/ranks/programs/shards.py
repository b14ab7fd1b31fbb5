"""Steps over fully_shard() whose groups have more parameters than one told step has bits."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare

PARAMETERS = 90
USED: dict[str, list[int]] = {
    "all": list(range(PARAMETERS)),
    "most": [i for i in range(PARAMETERS) if i % 7 != 3],
    "last": list(range(80, PARAMETERS)),
    "first": list(range(30)),
}
"""Parameters that a step uses: all of them, or some whose mask fits into a told step or not."""


class Many(nn.Module):
    """One group, of which some parameters have no gradient."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4) for _ in range(PARAMETERS)])
        self.used = USED[used]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.used:
            x = x + 0.1 * torch.tanh(x * self.weights[i])
        return x


def _sharded(used: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = fully_shard(Many(used))
    return model, torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def _train(model: Any, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def _far(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            worst = worst if a is b else float("inf")
        else:
            worst = max(worst, float((a - b).abs().max()))
    return worst


def many(rank: Rank) -> list[Any]:
    """One rank fails in its forward or backward, at the first, a middle and a late allocation.
    Largest difference of gradients, how many there are, and how many faults were met."""
    prepare(rank)
    model, x = _sharded(rank.arguments["used"])
    _train(model, x)
    expected = _gradients(model)
    far, fired = 0.0, 0
    for fails in (0, 1):
        for phase in ("forward", "backward"):
            for nth in (1, 9, 27):
                step = oomkit.auto_batch(lambda x: _train(model, x), verify=False, model=model)
                fault = inject_oom(nth=nth, phase=phase)
                with fault if rank.rank == fails else contextlib.nullcontext():
                    step(x)
                far = max(far, _far(_gradients(model), expected))
                fired += fault.fired
    return [far, sum(g is not None for g in expected), fired]
