"""What programs of steps have in common."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..launch import Rank


def prepare(rank: Rank) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    rank.votes_by()
    rank.join(30.0)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        bucket_cap_mb=0.0002,
        find_unused_parameters=bool(rank.arguments.get("unused")),
    )
    torch.manual_seed(rank.rank + 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4), torch.randn(8, 2)


def gradients(model: nn.Module) -> list[list[float]]:
    return [[] if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def equal(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    return all(
        len(a) == len(b) and all(abs(i - j) < 1e-12 for i, j in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def raised(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def together(rank: Rank) -> dict[str, Any]:
    """Several of the others' in one process group, one after the other."""
    rank.join(20.0)
    found = {}
    for name, (program, given) in rank.arguments["programs"].items():
        print(name, flush=True)
        module, _, function = program.partition(":")
        one = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        found[name] = one(Rank(rank.rank, rank.world, rank.store, given))
    return found
