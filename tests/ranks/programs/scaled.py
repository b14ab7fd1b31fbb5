"""Steps under a gradient scaler whose gradients overflow on one rank alone."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare


def overflown(rank: Rank) -> list[Any]:
    """Gradients of the third of four steps are infinite on one rank, and the other one or the
    same is out of memory in it. Difference of parameters, both scales, and faults of this rank."""
    _, _, x, y = prepare(rank)

    def train(infinite: int, fault: inject_oom | None, decorated: bool) -> tuple[list[Any], float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), bucket_cap_mb=0.0002
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        factor = 1.0

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()

        if decorated:
            step = oomkit.auto_batch(step, verify=False)
        for index in range(4):
            factor = 1e308 if index == 2 and rank.rank == infinite else 1.0
            with fault if index == 2 and fault is not None else contextlib.nullcontext():
                step(x, y)
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()

    found = []
    for infinite in (0, 1):
        expected, scale = train(infinite, None, False)
        for fails, (phase, nth) in itertools.product(
            (0, 1), (("forward", 2), ("backward", 3), ("backward", 9))
        ):
            fault = inject_oom(nth=nth, phase=phase) if rank.rank == fails else None
            ours, own = train(infinite, fault, True)
            far = max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))
            found.append([far, own, scale, fault.fired if fault else 0])
    return found
