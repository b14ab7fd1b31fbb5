"""Evaluation on several ranks, which need no agreement for it."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import oomkit
from oomkit._ranks import world as worlds
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import raised


def evaluated(rank: Rank) -> list[Any]:
    """What needs no gradients needs no agreement, however many batches a rank has."""
    rank.join()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(8, 4)

    @oomkit.auto_batch
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    @oomkit.auto_batch
    def with_metric(x: torch.Tensor) -> torch.Tensor:
        out = net(x)
        dist.all_reduce(out.mean())
        return out

    def fails() -> None:
        with inject_oom(nth=3):
            with_metric(x)

    with torch.no_grad():
        for _ in range(2 + rank.rank):
            evaluate(x)
        with inject_oom(nth=3) if rank.rank == 1 else contextlib.nullcontext():
            right = torch.allclose(evaluate(x), net(x))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for part in oomkit.chunks(x):
                with oomkit.guard():
                    dist.all_reduce(net(part).mean())
        warned = " ".join(str(w.message) for w in caught)
        said = raised(fails) if rank.rank == 1 else ""
    return [right, evaluate.records[-1].accumulation_steps, warned, said]


def _fault(rank: Rank) -> Any:
    return inject_oom(nth=3) if rank.rank == 1 else contextlib.nullcontext()


def mapped(rank: Rank) -> dict[str, Any]:
    """Streams of another length on each rank, one of which runs out of memory: results beside
    those of a plain loop, in how many parts, and the mean over all ranks after the loop."""
    rank.join()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    every = [[torch.randn(8, 4) for _ in range(2 + other)] for other in range(rank.world)]
    batches = every[rank.rank]
    found: dict[str, Any] = {}
    with torch.no_grad():
        expected = torch.cat([net(x) for x in batches])
        sizes: list[int] = []

        def score(x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return net(x)

        with _fault(rank):
            mapped = oomkit.map(score, iter(batches))
        found["map"] = [torch.allclose(mapped, expected), max(sizes), sizes[-1]]
        outputs = []
        with _fault(rank):
            for x in batches:
                for part in oomkit.chunks(x):
                    with oomkit.guard():
                        outputs.append(net(part))
        found["chunks"] = [torch.allclose(torch.cat(outputs), expected), len(outputs)]
        total = torch.tensor([float(mapped.sum()), mapped.numel()])
        dist.all_reduce(total)
        of_all = torch.cat([net(x) for batches in every for x in batches]).mean()
        found["mean"] = abs(float(total[0] / total[1]) - float(of_all)) < 1e-6

        def with_metric(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = net(x)
            dist.all_reduce(out.mean())
            return out

        worlds._warned.clear()  # said once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            oomkit.map(with_metric, every[0][0])
    found["said"] = " ".join(str(w.message) for w in caught)
    return found
