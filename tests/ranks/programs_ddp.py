"""Steps over DistributedDataParallel, failed at chosen places on chosen ranks.

Each case is run three times: as one process would with all ranks' rows (gradients alone), with the
faults, and undisturbed with the same slices, which must agree to the last bit.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks import world as worlds
from oomkit.testing import force_slices, inject_oom

from .launch import Rank

STEPS = 3
ROWS = 8


class Heads(nn.Module):
    """Which of its heads is used depends on the rank and the step: find_unused_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10)
        self.heads = nn.ModuleList([nn.Linear(10, 3) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](torch.tanh(self.body(x)))
        return out


def whole(tensor: Any) -> torch.Tensor:
    """A copy of a tensor, with the parts that other ranks have."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    copy: torch.Tensor = full.detach().clone()
    return copy


class Net(nn.Module):
    def __init__(self, norm: bool = False, dropout: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3) if dropout else nn.Identity()
        self.last = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return out


OPTIONS = (
    "plain",
    "unused",
    "views",
    "norm",
    "dropout",
    "uneven",
    "gradients",
    "kept",
    "accumulation",
    "fp16",
    "powersgd",
    "scaler",
    "zero",
    "clip",
    "two_models",
    "two_passes",
    "apart",
    "one_bucket",
    "proof",
)
EXACT = frozenset(OPTIONS) - {"norm", "dropout", "fp16", "powersgd", "two_passes"}
"""What one process would compute to rounding, whatever the slices are."""


class World:
    """The program under test: models, an optimizer, a step, and data by rank and step."""

    exact = EXACT

    def __init__(self, option: str, rank: Rank) -> None:
        self.option, self.rank = option, rank
        torch.manual_seed(11)
        self.nets = self._nets()
        one = option in ("one_bucket", "powersgd")  # PowerSGD wants an order that gloo has not
        given: dict[str, Any] = {"bucket_cap_mb": 1 if one else 0.0003}
        given["find_unused_parameters"] = option == "unused"
        given["gradient_as_bucket_view"] = option in ("views", "kept")
        self.models = [DistributedDataParallel(net, **given) for net in self.nets]
        if option == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.models[0].register_comm_hook(None, default_hooks.fp16_compress_hook)
        if option == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

            state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.models[0].register_comm_hook(state, power.powerSGD_hook)
        params = [p for model in self.models for p in model.parameters()]
        if option == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: Any = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)
        else:
            self.optimizer = torch.optim.SGD(params, lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=option == "scaler")
        self.seen: list[list[torch.Tensor | None]] = []

    def _nets(self) -> list[nn.Module]:
        if self.option == "unused":
            return [Heads()]
        nets: list[nn.Module] = [Net(self.option == "norm", self.option == "dropout")]
        return [*nets, Net()] if self.option in ("two_models", "two_passes") else nets

    def batch(self, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ROWS - rank if self.option == "uneven" else ROWS
        if index == STEPS - 1 and self.option == "uneven":
            rows = 3  # the last, short one
        generator = torch.Generator().manual_seed(100 * rank + index)
        return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)

    def head(self, rank: int, index: int) -> int:
        return (rank + index) % 2 if self.option == "unused" else 0

    def look(self) -> None:
        params = [p for net in self.nets for p in net.parameters()]
        self.seen.append([None if p.grad is None else whole(p.grad) for p in params])

    def step(self) -> Callable[..., Any]:
        plain = {"two_passes": self._two_passes, "apart": self._without_update}
        return plain.get(self.option, self._step)

    def _step(self, x: torch.Tensor, y: torch.Tensor, head: int, index: int) -> torch.Tensor:
        kept = self.option in ("kept", "gradients")
        if not (self.option == "accumulation" and index % 2 == 1):
            self.optimizer.zero_grad(set_to_none=not kept)
        loss = sum(F.mse_loss(model(x, head), y) for model in self.models)
        self.scaler.scale(loss).backward()
        if self.option == "accumulation" and index % 2 == 0:
            return loss.detach()
        if self.option == "clip":
            nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _two_passes(self, x: torch.Tensor, y: torch.Tensor, head: int, index: int) -> None:
        """One backward after the other, and one update."""
        self.optimizer.zero_grad()
        for model in self.models:
            F.mse_loss(model(x, head), y).backward()
        self.optimizer.step()

    def _without_update(self, x: torch.Tensor, y: torch.Tensor, head: int, index: int) -> Any:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.models[0](x, head), y)
        loss.backward()
        return loss.detach()

    def run(self, around: Callable[[int], Any]) -> list[oomkit.StepRecord]:
        """All steps, each in what `around` gives for it."""
        step = oomkit.auto_batch(
            self.step(), verify=None if self.option == "proof" else False, reduction="mean"
        )
        torch.manual_seed(1000 + self.rank.rank)
        records = []
        for index in range(STEPS):
            x, y = self.batch(self.rank.rank, index)
            waits = self.option == "accumulation" and index % 2 == 0
            with contextlib.ExitStack() as stack:
                if waits:
                    stack.enter_context(self.models[0].no_sync())
                with around(index) or contextlib.nullcontext():
                    step(x, y, self.head(self.rank.rank, index), index)
            self.look()
            if self.option == "apart":
                self.optimizer.step()
            records.append(step.records[-1])
        self.seen.append([whole(t) for net in self.nets for t in net.state_dict().values()])
        return records

    def expected(self) -> list[list[torch.Tensor | None]]:
        """Gradients of the union of all ranks' rows, as one process computes them."""
        torch.manual_seed(11)
        nets = self._nets()
        params = [p for net in nets for p in net.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.05)
        found: list[list[torch.Tensor | None]] = []
        for index in range(STEPS):
            if not (self.option == "accumulation" and index % 2 == 1):
                optimizer.zero_grad(set_to_none=self.option not in ("kept", "gradients"))
            local = [None if p.grad is None else p.grad.clone() for p in params]
            for rank in range(self.rank.world):
                x, y = self.batch(rank, index)
                loss = sum(F.mse_loss(net(x, self.head(rank, index)), y) for net in nets)
                (
                    loss
                    * (self.scaler.get_scale() if self.option == "scaler" else 1.0)
                    / self.rank.world
                ).backward()
            del local
            if self.option == "accumulation" and index % 2 == 0:
                found.append([])  # each rank has its own
                continue
            if self.option == "scaler":
                for p in params:
                    p.grad /= self.scaler.get_scale()
            if self.option == "clip":
                nn.utils.clip_grad_norm_(params, 0.3)
            found.append([None if p.grad is None else p.grad.clone() for p in params])
            optimizer.step()
        return found


def _places(kind: type[World], option: str, rank: Rank, at: int) -> dict[str, int]:
    """Allocations of that step, by phase; the same on all ranks, or the most."""
    found = {}
    for phase in ("forward", "backward"):
        counted = inject_oom(nth=10**6, phase=phase)
        kind(option, rank).run(lambda index, c=counted: c if index == at else None)
        found[phase] = counted.seen
    most = torch.tensor(list(found.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist(), strict=True))


def _differ(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference of two lists of tensors; infinite where one has none."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None:
            worst = max(worst, float((a.double() - b.double()).abs().max()))
    return worst


def _one_case(
    kind: type[World], option: str, rank: Rank, at: int, faults: dict[int, inject_oom]
) -> dict[str, Any]:
    """One faulted run, compared."""
    world = kind(option, rank)
    fault = faults.get(rank.rank)
    records = world.run(lambda index: fault if index == at else None)
    slices = []
    for record in records:
        rows, count = record.batch_size or 0, record.accumulation_steps
        slices.append([rows // count + (i < rows % count) for i in range(count)])
    again = kind(option, rank)
    again.run(lambda index: force_slices(slices[index]) if len(slices[index]) > 1 else None)
    bits = max(_differ(a, b) for a, b in zip(world.seen, again.seen, strict=True))
    error = 0.0
    if option in world.exact:
        for ours, theirs in zip(world.seen[:STEPS], world.expected(), strict=True):
            error = max(error, _differ(ours, theirs) if theirs else 0.0)
    return {
        "fired": fault.fired if fault else 0,
        "bits": bits,
        "error": error,
        "ooms": records[at].ooms,
        "attempts": records[at].attempts,
        "slices": slices[at],
    }


def _faults(kind: str, phase: str, nth: int, rank: Rank) -> dict[int, inject_oom]:
    """Which ranks fail, and how."""
    one = inject_oom(nth=nth, phase=phase)
    if kind == "again":  # once more, in the attempt after it
        one = inject_oom(nth=nth, phase=phase, then=inject_oom(nth=3))
    if kind == "pair":  # one after the other
        other = inject_oom(nth=max(1, nth // 2), phase="forward")
        return {0: one, rank.world - 1: other}
    ranks = {"first": [0], "all": range(rank.world)}.get(kind, [rank.world - 1])
    return dict.fromkeys(ranks, one)


def sweep_of(kind: type[World], rank: Rank) -> dict[str, Any]:
    """All places that are asked for of some options: `stride`, `offset` and `kinds`."""
    given = rank.arguments
    if given.get("gloo"):
        worlds._SHARED = "/nowhere"
    rank.join()
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = {option: _swept(kind, option, rank) for option in given["options"]}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _swept(kind: type[World], option: str, rank: Rank) -> dict[str, Any]:
    given = rank.arguments
    # Of more than two numbers the sum depends on where in its bucket a gradient lies.
    rounding = 0.0 if rank.world == 2 else 1e-12
    cases, fired, failures = 0, 0, []
    # PowerSGD has state from the third step on, which cannot be taken back.
    for at in [at for at in given["at"] if at < 2 or option != "powersgd"]:
        places = _places(kind, option, rank, at)
        for phase, count in places.items():
            for nth in range(1 + given.get("offset", 0), count + 1, given.get("stride", 1)):
                for how in given["kinds"]:
                    faults = _faults(how, phase, nth, rank)
                    found = _one_case(kind, option, rank, at, faults)
                    faulted = torch.tensor(found["fired"])
                    dist.all_reduce(faulted)
                    cases += bool(faulted)
                    fired += int(faulted)
                    if found["bits"] > rounding or found["error"] > 1e-9:
                        failures.append([at, phase, nth, how, found])
    return {"cases": cases, "fired": fired, "failures": failures}


def sweep(rank: Rank) -> dict[str, Any]:
    return sweep_of(World, rank)
