"""A step by Accelerate, which accumulates and clips, beside one that is not decorated."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank


def accelerated(rank: Rank) -> list[list[float]]:
    """How far parameters are from those of the plain program, and the retries of this rank, by
    phase and place of what rank 1 has no memory for in each of the last four of six calls."""
    rank.join(20.0)
    torch.set_default_dtype(torch.float64)
    at: dict[str, Any] = {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}  # the group is there
    at |= {"RANK": rank.rank, "LOCAL_RANK": rank.rank}
    at |= {"WORLD_SIZE": rank.world, "LOCAL_WORLD_SIZE": rank.world}
    os.environ.update({name: str(value) for name, value in at.items()})
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def run(decorate: Any, phase: str, nth: int) -> tuple[torch.Tensor, int]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        given = net, torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(*given)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        trains = decorate(step)
        generator = torch.Generator().manual_seed(rank.rank)
        for index in range(6):
            x, y = (torch.randn(8, size, generator=generator) for size in (4, 2))
            fails: Any = contextlib.nullcontext()
            if decorate is not plain and rank.rank == 1 and index >= 2:
                fails = inject_oom(phase=phase, nth=nth)
            with fails:
                trains(x, y)
        ooms = sum(record.ooms for record in getattr(trains, "records", ()))
        return torch.cat([p.detach().flatten() for p in net.parameters()]), ooms

    def plain(step: Any) -> Any:
        return step

    expected, _ = run(plain, "", 0)
    found = []
    for phase, nth in rank.arguments["places"]:
        ours, ooms = run(oomkit.auto_batch, phase, nth)
        found.append([float((ours - expected).abs().max()), ooms])
    return found
