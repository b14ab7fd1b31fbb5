"""Steps under a gradient scaler whose gradients overflow on one rank alone, by Accelerate, and over
a compiled model."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import equal, gradients, prepare


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


def accelerated(rank: Rank) -> list[list[float]]:
    """A step by Accelerate, which accumulates over calls and clips: how far parameters are
    from those of the plain program, and the retries of this rank, by phase and place of what rank 1
    has no memory for in each of the last four of six calls."""
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


def compiled(rank: Rank) -> list[Any]:
    """A compiled model, one of whose ranks is out of memory in its second step. How far gradients
    are from those of the model as it is, and what was warned of."""
    made, _, x, y = prepare(rank)
    model = DistributedDataParallel(made.module)  # buckets as torch has them
    faster, found = torch.compile(model, backend="eager"), []

    def train(forward: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.mse_loss(forward(x), y).backward()

    train(model, x, y)
    expected = gradients(model)
    step = oomkit.auto_batch(train, static="forward", model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fails in (2, 1, 0):
            with inject_oom(nth=3) if fails == rank.rank else contextlib.nullcontext():
                step(faster, x, y)
            found.append(equal(gradients(model), expected))
    return [found, [str(one.message) for one in caught if "oomkit" in str(one.message)]]
