"""When ranks learn of an error of another one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce

import oomkit

from ..launch import Rank
from .common import prepare


def _now() -> float:
    """By the clock that all processes of a machine have."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def told(rank: Rank) -> list[list[Any]]:
    """An error of one rank at a place of its step, again and again, with steps between that are
    healthy: what this rank was told, and when; of the rank that failed, when it did."""
    model, optimizer, x, y = prepare(rank)
    if rank.arguments["sharded"]:
        model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place, who, group = "", 0, dist.new_group()
    gathers = rank.arguments.get("gathers", False)
    failed: list[float] = []

    def fails(where: str) -> bool:
        if where == place and rank.rank == who:
            failed.append(_now())
        return where == place and rank.rank == who

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        if fails("entry"):
            raise ValueError("a label that there is not")
        loss = F.mse_loss(model(x), y)
        if fails("loss"):
            raise ValueError("a label that there is not")
        if place == "own":  # the others come to it, and wait
            mean: Any = "a loss" if fails("own") else loss.detach().clone()
            dist.all_reduce(mean, group=group)
        if gathers:  # with a collective in its backward as well
            loss = loss + 0.1 * all_reduce(loss, group=group)
        if fails("between"):
            raise ValueError("a label that there is not")
        loss.backward()
        optimizer.step()

    found: list[list[Any]] = []
    for case, victim in rank.arguments["cases"]:
        place = ""
        step(x, y)
        place, who = case, victim
        try:
            step(x, y)
        except Exception as error:
            found.append([f"{type(error).__name__}: {error}", failed.pop() if failed else _now()])
        else:
            found.append(["nothing", _now()])
        group = dist.new_group()  # what a rank did not come to stays open in the one before
    return found
