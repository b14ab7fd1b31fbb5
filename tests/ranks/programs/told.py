"""When ranks learn of an error of another one, and where they wait for it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import force_slices, inject_oom

from ..launch import Rank
from .common import prepare, raised


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


class _Compressed:
    """Steps over a model whose gradients PowerSGD compresses, from the third one on, in three
    collectives. One fails before the hook (0), where it makes one of them, or after the last."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
        self.model = DistributedDataParallel(net, bucket_cap_mb=1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.place, self.made, self.nth = -1, 0, 0
        power: Any = powerSGD_hook
        state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

        def hook(state: Any, bucket: Any) -> Any:
            self.fails(0)
            nth, self.nth = self.nth, 0
            with inject_oom(nth=nth, phase="recovery") if nth else contextlib.nullcontext():
                reduced = power.powerSGD_hook(state, bucket)
            return reduced.then(self._ends)

        hook.__annotations__.clear()  # texts, which torch does not take for types
        self.model.register_comm_hook(state, hook)
        self.decorated = oomkit.auto_batch(self.step, verify=False, model=self.model)

    def fails(self, place: int) -> None:
        if place == self.place:
            self.place = -1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _ends(self, reduced: Any) -> Any:
        self.fails(self.made + 1)
        return reduced.value()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def run(
        self, x: torch.Tensor, y: torch.Tensor, at: int, place: int, nth: int, slices: list[int]
    ) -> list[Any]:
        """That step: what it said, in how many seconds, whether it has left the parameters as they
        were, and what they are."""
        for _ in range(at):
            self.decorated(x, y)
        before, begin = self.parameters(), _now()
        self.place, self.made, self.nth = place, 0, nth
        with force_slices(slices) if slices else contextlib.nullcontext():
            said = raised(lambda: self.decorated(x, y))
        after = self.parameters()
        return [said, _now() - begin, bool(torch.equal(before, after)), after.sum().item()]


def in_hook(rank: Rank) -> list[list[Any]]:
    """The last rank is out of memory in a hook with a state, again and again in one group. A case:
    the step, the place, the allocation if it is at one of the hook's, and slices."""
    prepare(rank)
    x, y = torch.randn(8, 16), torch.randn(8, 2)
    found: list[list[Any]] = []
    of = [_Compressed()]
    of[0].run(x, y, 1, -1, 0, [])  # from here on oomkit watches collectives
    plain: Any = dist.all_reduce
    every = dist.distributed_c10d._get_default_group()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        of[-1].made += 1
        of[-1].fails(of[-1].made)
        if rank.arguments.get("by_method"):  # as a hook of somebody else's may
            return every.allreduce([tensor])
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    for at, *case in rank.arguments["cases"]:
        of.append(_Compressed())
        mine = rank.rank == rank.world - 1
        found.append(of[-1].run(x, y, at, *(case if mine else [-1, 0, []])))
    return found


def stays(rank: Rank) -> str:
    """A step with a collective of its own, in which a rank runs out of memory. Its process stays
    until the others have come to their error: no closed connection tells them."""
    model, optimizer, x, y = prepare(rank)
    at, group = rank.arguments["at"], dist.distributed_c10d._get_default_group()

    def reduce(told: torch.Tensor) -> None:
        if rank.arguments.get("by_method"):
            group.allreduce([told]).wait()
        else:
            dist.all_reduce(told)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for place in ("begin", "before", "after"):
            if place == "before":
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
            elif place == "after":
                optimizer.step()
            if place == at:
                reduce(torch.ones(1))

    def fails() -> None:
        with inject_oom(phase="forward") if rank.rank == 1 else contextlib.nullcontext():
            step(x, y)

    step(x, y)
    said = raised(fails)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"has its error {rank.rank}", "")
    store.wait([f"has its error {other}" for other in range(rank.world)])
    return said


def goes_on(rank: Rank) -> list[Any]:
    """An error of one rank after its update, which the program catches; the bare step beside."""
    model, optimizer, x, y = prepare(rank)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x: torch.Tensor, y: torch.Tensor, bad: bool) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if bad:
            raise ValueError("a loss that nobody likes")

    ends = []
    for call in (step, oomkit.auto_batch(step)):
        model.load_state_dict(start)
        said = [
            raised(lambda call=call, bad=bad: call(x, y, bad))  # type: ignore[misc]
            for bad in (False, rank.rank == 1, False, False, False)
        ]
        ends.append([said, [value.tolist() for value in model.state_dict().values()]])
    return ends
