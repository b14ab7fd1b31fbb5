"""Reports of what several ranks did."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare


def reported(rank: Rank) -> list[Any]:
    """One report of all ranks, or of those of a group: the last rank is out of memory once."""
    model, optimizer, x, y = prepare(rank)

    @oomkit.auto_batch(verify=False, label="train")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    step(x, y)
    with inject_oom(nth=2) if rank.rank == rank.world - 1 else contextlib.nullcontext():
        step(x, y)
    group: Any = True
    if "group" in rank.arguments:
        group = dist.new_group(rank.arguments["group"])
        if rank.rank not in rank.arguments["group"]:
            return []
    told = oomkit.report(step, group=group)
    every = json.loads(oomkit.report(step, "json", group=group))
    return [told, every["sites"][0]["records"][0]["rank"], len(every.get("ranks", []))]


def named(rank: Rank) -> list[Any]:
    """The rank in the record of a guard before the ranks have met, in that of a step, and what its
    sink is told, in that of a guard later, and in a report after the group."""
    guard = oomkit.guard(label="beside")

    def beside() -> int | None:
        with guard:
            pass
        return guard.records[-1].rank

    found: list[Any] = [beside()]
    model, optimizer, x, y = prepare(rank)
    told: list[oomkit.StepRecord] = []

    @oomkit.auto_batch(verify=False, label="train", sinks=[told.append])
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    step(x, y)
    found += [told[0].rank, step.records[0].rank, beside()]
    dist.barrier()
    dist.destroy_process_group()
    return [*found, step.records[0].rank, json.loads(oomkit.report(step, "json"))]
