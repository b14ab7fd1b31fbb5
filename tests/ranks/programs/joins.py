"""Steps inside join(), of which ranks have different numbers."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import equal, prepare, raised
from .ddp import Heads


class Uneven:
    """Steps under join(), of which this rank has more or fewer than others."""

    def __init__(self, rank: Rank, kind: str) -> None:
        self.kind, self.rank, self.index = kind, rank, 0
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8) if "norm" in kind else nn.Identity()
        net = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 2))
        self.model = DistributedDataParallel(
            Heads() if kind == "unused" else net,
            bucket_cap_mb=0.0002,
            find_unused_parameters=kind == "unused",
            gradient_as_bucket_view=kind == "views",
        )
        if kind == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.model.parameters(), torch.optim.SGD, lr=0.1
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        returns = "returned" in kind
        self.step = self._through_its_loss(self.loss) if returns else self.whole_step
        verify = None if kind == "proof" else False
        decorated = oomkit.auto_batch(self.loss if returns else self.step, verify=verify)
        self.given = decorated
        self.decorated = self._through_its_loss(decorated) if returns else decorated

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), y)

    def _through_its_loss(self, loss: Any) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss(x, y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return step

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * self.rank.rank + index)
        width = 6 if self.kind == "unused" else 4
        y = torch.randn(4, 3 if self.kind == "unused" else 2, generator=generator)
        return torch.randn(4, width, generator=generator), y

    def whole_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        even = self.index % 2 == 0
        if "flag" in self.kind:
            self.model.require_backward_grad_sync = not even
        if "idle" in self.kind and even:
            return
        alone = even and "no_sync" in self.kind
        if "within" in self.kind:
            with self.model.no_sync():
                F.mse_loss(self.model(x), y).backward()
        with self.model.no_sync() if alone else contextlib.nullcontext():
            out = self.model(x, self.rank.rank % 2) if self.kind == "unused" else self.model(x)
            F.mse_loss(out, y).backward()
        if self.model.require_backward_grad_sync and not alone:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def joined(self, **options: Any) -> Any:
        others = [self.optimizer] if self.kind == "zero" else []
        return Join([self.model, *others], **options)

    def run(self, step: Any, counts: list[int], fault: Any, **options: Any) -> list[list[float]]:
        """Two epochs; `fault(index)` is around a step of the first one."""
        for epoch in range(2):
            with self.joined(**options):
                for index in range(counts[self.rank.rank]):
                    self.index = index
                    data = self.batch(index)
                    around = fault(index) if epoch == 0 else contextlib.nullcontext()
                    waits = self.kind == "accumulation" and index % 2 == 0
                    plain = "mixed" in self.kind and index % 3 == 1
                    with around, self.model.no_sync() if waits else contextlib.nullcontext():
                        (self.step if plain else step)(*data)
        found = [p.detach() for p in self.model.parameters()] + list(self.model.buffers())
        return [t.flatten().tolist() for t in found]


def joined(rank: Rank) -> list[Any]:
    """How far parameters are from those that torch alone gives with ranks that leave, and how many
    steps were retried on this one, by what fails: phase and place, by rank and step."""
    given = rank.arguments
    prepare(rank)
    found = []
    expected: dict[str, list[list[float]]] = {}
    for counts, fails in given["cases"]:
        options = {"divide_by_initial_world_size": given["divide"]}
        if str(counts) not in expected:
            alone = Uneven(rank, given["kind"])
            nowhere: Any = lambda index: contextlib.nullcontext()  # noqa: E731
            expected[str(counts)] = alone.run(alone.step, counts, nowhere, **options)

        def fault(index: int, fails: Any = fails) -> Any:
            phase, nth = fails.get(f"{rank.rank} {index}", ("", 0))
            return inject_oom(nth=nth, phase=phase) if phase else contextlib.nullcontext()

        ours = Uneven(rank, given["kind"])
        last = ours.run(ours.decorated, counts, fault, **options)
        far = max(
            abs(a - b)
            for one, other in zip(last, expected[str(counts)], strict=True)
            for a, b in zip(one, other, strict=True)
        )
        found.append([far, sum(record.ooms for record in ours.given.records)])
    return found


def left(rank: Rank) -> list[str]:
    """What ranks are told inside join(): of an error of one that has not left, of inputs that are
    not to be uneven, and of a second reduction in a call."""
    prepare(rank)
    found = []

    def epoch(kind: str) -> None:
        one = Uneven(rank, "norm" if kind == "after" else "plain")

        @oomkit.auto_batch(verify=False, model=one.model)
        def step(x: torch.Tensor, y: torch.Tensor, index: int) -> None:
            one.step(x, y)
            if kind == "twice":
                one.step(x, y)
            if kind == "after":
                one.model(x)
            if kind == "error" and index == 2:
                raise ValueError("a label that there is not")

        @oomkit.auto_batch(verify=False, model=one.model)
        def early(x: torch.Tensor, y: torch.Tensor, index: int) -> None:
            if index == 2:
                raise ValueError("a label that there is not")
            one.step(x, y)

        with one.model.join(throw_on_early_termination=kind == "uneven"):
            for index in range(1 + 2 * rank.rank):
                unsynced = one.model.no_sync() if "no_sync" in kind else contextlib.nullcontext()
                with unsynced:
                    (early if "early" in kind else step)(*one.batch(index), index)

    for kind in ("early", "early, no_sync", "uneven", "twice", "after"):
        found.append(raised(lambda kind=kind: epoch(kind)))
        dist.barrier()
    return found


def left_at_once(rank: Rank) -> list[Any]:
    """A rank that has no batch at all, before there was any call of all: as torch alone. What is
    said of it."""
    prepare(rank)
    kind = rank.arguments["kind"]
    alone, ours = Uneven(rank, kind), Uneven(rank, kind)
    nowhere: Any = lambda index: contextlib.nullcontext()  # noqa: E731
    counts = rank.arguments["counts"]
    if rank.arguments.get("have_met"):  # over another model
        before = Uneven(rank, "plain")
        before.run(before.decorated, [1] * len(counts), nowhere)
    given = {"divide_by_initial_world_size": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        last = ours.run(ours.decorated, counts, nowhere, **given)
    said = " ".join(str(w.message) for w in caught if "not retried" in str(w.message))
    return [equal(last, alone.run(alone.step, counts, nowhere, **given)), said]


def not_agreed_on(rank: Rank) -> bool:
    """Calls inside join() that are refused, and make no forward, between plain ones."""
    prepare(rank)
    found = []
    for refused in (False, True):
        one = Uneven(rank, "plain")
        weighed = oomkit.auto_batch(one.step, model=one.model, weight=len, global_weight=True)
        if refused:
            one.run(one.decorated, [1, 1], lambda index: contextlib.nullcontext())
        else:
            one.run(one.step, [1, 1], lambda index: contextlib.nullcontext())
        with one.model.join(divide_by_initial_world_size=False):
            for index in range(2 + 2 * rank.rank):
                one.step(*one.batch(index))
                if refused:
                    said = raised(lambda: weighed(*one.batch(0)))  # noqa: B023
                    assert "leave global_weight=True out there" in said
        found.append([p.detach().flatten().tolist() for p in one.model.parameters()])
    return equal(*found)


def left_outside(rank: Rank) -> str:
    """An error on the last rank, between two steps or after the update of one, which ends its
    program: what a rank is told that has left."""
    prepare(rank)
    one, fails = Uneven(rank, "plain"), rank.arguments["fails"]

    @oomkit.auto_batch(verify=False, model=one.model)
    def step(x: torch.Tensor, y: torch.Tensor, index: int) -> None:
        one.step(x, y)
        if fails == "after" and index == 2:
            raise ValueError("a label that there is not")

    try:
        with one.model.join():
            for index in range(1 if rank.rank == 0 else 4):
                if fails == "between" and index == 2:
                    raise ValueError("a label that there is not")
                step(*one.batch(index), index)
    except RuntimeError as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing"
