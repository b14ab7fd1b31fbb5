"""Steps in which a rank has no memory for what it owes to a collective of all."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import oomkit
from oomkit._ranks.agreement import Agreement
from oomkit._ranks.reducer import Reducer
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import equal, gradients, prepare, raised

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def zeros(rank: Rank) -> list[Any]:
    """Rank 1 fails inside a reduction that overlaps, and then so often for the zeros: what each
    call said, and whether the ranks have the same parameters, where there is still a group."""
    model, optimizer, x, y = prepare(rank)
    plain: Any = Reducer.parts
    left = [0]

    def parts(self: Reducer) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise torch.OutOfMemoryError(OOM)
        return plain(self)

    Reducer.parts = parts  # type: ignore[method-assign]

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    said = []
    for turn in range(3):
        fails = turn == 2 and rank.rank == 1
        left[0] = rank.arguments["times"] if fails else 0
        with inject_oom(nth=6, phase="backward") if fails else contextlib.nullcontext():
            said.append(raised(lambda: step(x, y)))
    if said[-1] != "nothing":
        return [said, False]
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.zeros_like(own) for _ in range(rank.world)]
    dist.all_gather(every, own)
    return [said, bool(torch.equal(*every))]


def entry(rank: Rank) -> list[str]:
    """Rank 1 has no memory for what a call begins with, before its collectives or after
    them, and is still there when the others end."""
    model, optimizer, x, y = prepare(rank)
    plain: Any = Agreement._entry
    fails_in, calls = rank.arguments["call"], [0]

    def begin(self: Agreement) -> None:
        calls[0] += 1
        fails = rank.rank == 1 and 0 <= calls[0] - fails_in < rank.arguments["times"]
        if fails and not rank.arguments["after"]:
            raise torch.OutOfMemoryError(OOM)
        plain(self)
        if fails:
            raise torch.OutOfMemoryError(OOM)

    Agreement._entry = begin  # type: ignore[method-assign]

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    said = [raised(lambda: step(x, y)) for _ in range(3)]
    _outlives(rank)
    return said


def _outlives(rank: Rank) -> None:
    """The others end while rank 1 is still there, whose end would end their collectives."""
    store = dist.FileStore(f"{rank.store}-over", rank.world)
    if rank.rank == 1:
        store.wait(["over"], datetime.timedelta(seconds=20))
    else:
        store.set("over", "1")


def cut_off(rank: Rank) -> list[Any]:
    """All ranks fail at the end of a backward in which a reduction overlaps: collectives of a
    healthy call and of that one, and whether the ranks have the same gradients as without it."""
    model, optimizer, x, y = prepare(rank)
    group = model.process_group

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()

    made, found = [], []
    seen = 10**6
    for fails in (False, False, False, True):
        before = group._get_sequence_number_for_group()
        with inject_oom(nth=seen if fails else 10**6, phase="backward") as faults:
            step(x, y)
        seen = faults.seen
        made.append(group._get_sequence_number_for_group() - before)
        found.append(gradients(model))
    assert step.records[-1].ooms == 1
    return [made[2:], equal(found[3], found[2])]


def overtaken(rank: Rank) -> list[bool]:
    """Whether a large collective has come when a small one after it has, by gloo's barrier."""
    rank.join()
    group = dist.distributed_c10d._get_default_group()
    large = group.allreduce([torch.ones(20_000_000)])
    group.allreduce([torch.ones(1)]).wait()
    group._get_backend(torch.device("cpu")).barrier().wait()
    return [large.is_completed()]
