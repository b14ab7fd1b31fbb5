"""Replicas of shards: between the two parts of a reduction."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare, raised


def between(rank: Rank) -> dict[str, Any]:
    """Allocations, of any phase, from the end of a reduce-scatter to the begin of its all-reduce;
    and a last rank that fails there all the same, after its part of the first."""
    prepare(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    given: dict[str, Any] = {"mesh": mesh}
    for layer in (model[0], model[2]):
        fully_shard(layer, **given)
    fully_shard(model, **given)
    seen: list[list[int]] = []
    fails = False

    class Scatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            done = super().__call__(*args, **kwargs)
            seen.append([oomkit._C.fault_stats()[0]])
            if fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return done

    for part in (model[0], model[2], model):
        part.set_custom_reduce_scatter(Scatter())
    plain = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if seen and len(seen[-1]) == 1:
            seen[-1].append(oomkit._C.fault_stats()[0])
        return plain(*args, **kwargs)

    dist.all_reduce = all_reduce

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    x = torch.randn(8, 4)
    step(x)
    seen.clear()
    with inject_oom(nth=10**6) as counted:
        step(x)
    found: dict[str, Any] = {"between": [end - begin for begin, end in seen]}
    found["counted"] = counted.seen
    fails = rank.rank == rank.world - 1
    found["said"] = raised(lambda: step(x))
    return found


def of_whole_shards(rank: Rank) -> list[Any]:
    """Replicas that share nothing: one rank in each group of shards, and no reduce-scatter."""
    prepare(rank)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    torch.manual_seed(rank.rank + 1)
    x = torch.randn(8, 4)
    step(x)
    expected = [p.grad.full_tensor().clone() for p in model.parameters()]
    decorated = oomkit.auto_batch(step)
    found: list[Any] = []
    for phase, nth in (("forward", 1), ("forward", 3), ("backward", 1), ("backward", 3)):
        armed = inject_oom(phase=phase, nth=nth)
        with armed if rank.rank == 1 else contextlib.nullcontext():
            found.append(raised(lambda: decorated(x)))
        made = [p.grad.full_tensor() for p in model.parameters()]
        found.append(all(torch.allclose(a, b) for a, b in zip(made, expected, strict=True)))
    return [found, sum(record.ooms for record in decorated.records)]
