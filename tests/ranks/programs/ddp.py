"""Steps over DistributedDataParallel, failed at chosen places on chosen ranks.

A step with faults is compared, to the last bit, with an undisturbed one of the same slices over
another copy of the model, and that one's gradients with those of one process that has the rows of
all ranks. So is the step after it, which shows what a fault leaves behind. Each undisturbed step
is run once for all faults that end in the same slices, and models are put back, not made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import oomkit
from oomkit._ranks import world as worlds
from oomkit.testing import force_slices, inject_oom

from ..launch import Rank

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
    """A tensor with the parts that other ranks have."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def _own(tensor: Any) -> torch.Tensor:
    """This rank's part of it."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found.detach()


class Again(nn.Module):
    """Layers that are used twice, one of them in checkpoints, and some that are not: static_graph.
    Which head is used depends on the rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.saved, self.twice = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.heads = nn.ModuleList([nn.Linear(9, 3) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = torch.tanh(self.twice(checkpoint(self.saved, h, use_reentrant=True)))
        out: torch.Tensor = self.heads[head](h)
        return out


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
    "static",
    "static_views",
    "static_accumulation",
    "static_fp16",
    "static_proof",
)
EXACT = frozenset(OPTIONS) - {"norm", "dropout", "fp16", "powersgd", "two_passes", "static_fp16"}
"""What one process would compute to rounding, whatever the slices are."""
USED_IN_PART = {"unused", *(option for option in OPTIONS if option.startswith("static"))}
"""Not all ranks use all parameters."""


class World:
    """The program under test: models, an optimizer, a step, and data by rank and step."""

    exact = EXACT
    anew: frozenset[str] = frozenset({"powersgd", "proof", "static_proof"})
    """Options whose state cannot be put back."""

    def __init__(self, option: str, rank: Rank) -> None:
        self.option, self.rank = option, rank
        self.before_hook: list[int] = []
        """Allocations that had been counted when a hook with a state began."""
        self.compresses = False
        torch.manual_seed(11)
        self.nets = self._nets()
        one = option in ("one_bucket", "powersgd")  # PowerSGD wants an order that gloo has not
        given: dict[str, Any] = {"bucket_cap_mb": 1 if one else 0.0003}
        given["find_unused_parameters"] = option == "unused"
        given["static_graph"] = option.startswith("static")
        given["gradient_as_bucket_view"] = option in ("views", "kept", "static_views")
        self.models = [DistributedDataParallel(net, **given) for net in self.nets]
        if option.endswith("fp16"):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.models[0].register_comm_hook(None, default_hooks.fp16_compress_hook)
        if option == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

            state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.models[0].register_comm_hook(state, self._compressing(power.powerSGD_hook))
        params = [p for model in self.models for p in model.parameters()]
        if option == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: Any = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)
        else:
            self.optimizer = torch.optim.SGD(params, lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=option == "scaler")
        self.seen: list[torch.Tensor | None] = []

    def _compressing(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """That hook, which tells when it begins, and whether it compresses."""

        def compress(state: Any, bucket: Any) -> Any:
            self.before_hook.append(oomkit._C.fault_stats()[0])
            self.compresses = state.iter >= state.start_powerSGD_iter
            return hook(state, bucket)

        compress.__annotations__.clear()  # texts, which torch does not take for types
        return compress

    def _nets(self) -> list[nn.Module]:
        if self.option == "unused":
            return [Heads()]
        if self.option.startswith("static"):
            return [Again()]
        nets: list[nn.Module] = [Net(self.option == "norm", self.option == "dropout")]
        return [*nets, Net()] if self.option in ("two_models", "two_passes") else nets

    def batch(self, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ROWS - rank if self.option == "uneven" else ROWS
        if index == STEPS - 1 and self.option == "uneven":
            rows = 3  # the last, short one
        generator = torch.Generator().manual_seed(100 * rank + index)
        return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)

    def head(self, rank: int, index: int) -> int:
        by_step = index if self.option == "unused" else 0
        return (rank + by_step) % 2 if self.option in USED_IN_PART else 0

    def step(self) -> Callable[..., Any]:
        plain = {"two_passes": self._two_passes, "apart": self._without_update}
        return plain.get(self.option, self._step)

    def _step(self, x: torch.Tensor, y: torch.Tensor, head: int, index: int) -> torch.Tensor:
        kept = self.option in ("kept", "gradients")
        if not (self.option.endswith("accumulation") and index % 2 == 1):
            self.optimizer.zero_grad(set_to_none=not kept)
        loss = sum(F.mse_loss(model(x, head), y) for model in self.models)
        self.scaler.scale(loss).backward()
        if self.option.endswith("accumulation") and index % 2 == 0:
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

    def accumulates(self, goes_on: bool, stack: contextlib.ExitStack) -> None:
        """The gradients of this step stay on each rank until that of the next."""
        if goes_on:
            stack.enter_context(self.models[0].no_sync())

    def begin(self, at: int = 0) -> None:
        """Decorates the step, and comes to that one."""
        self.decorated = oomkit.auto_batch(
            self.step(), verify=None if self.option.endswith("proof") else False, reduction="mean"
        )
        torch.manual_seed(1000 + self.rank.rank)
        for index in range(at):
            self.call(index, contextlib.nullcontext())

    def call(self, index: int, around: Any) -> oomkit.StepRecord:
        """One step, in what is given; what can be seen after it is in `seen`."""
        x, y = self.batch(self.rank.rank, index)
        with contextlib.ExitStack() as stack:
            if self.option.endswith("accumulation"):
                self.accumulates(index % 2 == 0, stack)
            with around:
                self.decorated(x, y, self.head(self.rank.rank, index), index)
        params = [p for net in self.nets for p in net.parameters()]
        self.gradients = [p.grad for p in params]
        self.seen = [None if p.grad is None else _own(p.grad).clone() for p in params]
        self.seen += self.kept()
        if self.option == "apart":
            self.optimizer.step()
        self.seen += [_own(tensor).clone() for tensor in self._tensors()]
        return self.decorated.records[-1]

    def kept(self) -> list[torch.Tensor | None]:
        """Gradients that are not in ``.grad``."""
        return []

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and what the optimizer has of them."""
        found = [tensor for net in self.nets for tensor in net.state_dict().values()]
        states = getattr(self.optimizer, "optim", self.optimizer).state.values()
        return found + [t for state in states for t in state.values() if torch.is_tensor(t)]

    def keep(self) -> None:
        """What comes back with `restore()`."""
        params = [p for net in self.nets for p in net.parameters()]
        self._kept = (
            [_own(tensor).clone() for tensor in self._tensors()],
            [None if p.grad is None else p.grad.detach().clone() for p in params],
            self.scaler.state_dict(),
            torch.get_rng_state(),
            self.decorated.state_dict(),
            [getattr(model, "require_forward_param_sync", None) for model in self.models],
        )

    def restore(self) -> None:
        tensors, gradients, scaler, random, sizes, syncs = self._kept
        with torch.no_grad():
            for tensor, kept in zip(self._tensors(), tensors, strict=True):
                _own(tensor).copy_(kept)
            params = [p for net in self.nets for p in net.parameters()]
            for p, gradient in zip(params, gradients, strict=True):
                if gradient is None or p.grad is None:
                    p.grad = None if gradient is None else gradient.clone()
                else:
                    _own(p.grad).copy_(_own(gradient))
        if scaler:
            self.scaler.load_state_dict(scaler)
        torch.set_rng_state(random)
        self.decorated.load_state_dict(sizes)
        for model, sync in zip(self.models, syncs, strict=True):
            if sync is not None:
                model.require_forward_param_sync = sync

    def expected(self) -> list[list[torch.Tensor | None]]:
        """Gradients of the union of all ranks' rows, as one process computes them."""
        torch.manual_seed(11)
        nets = self._nets()
        params = [p for net in nets for p in net.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.05)
        found: list[list[torch.Tensor | None]] = []
        for index in range(STEPS):
            if not (self.option.endswith("accumulation") and index % 2 == 1):
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
            if self.option.endswith("accumulation") and index % 2 == 0:
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


def _differ(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference of two lists of tensors; infinite where one has none."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and not torch.equal(a, b):
            difference = float((a.double() - b.double()).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


Slices = tuple[tuple[int, ...], ...]
"""Rows of each micro-batch, on each rank."""


def _all_know(record: oomkit.StepRecord, faults: int, rank: Rank) -> tuple[Slices, int]:
    """Slices and faults of all ranks, which then run together what they have not run yet."""
    told = torch.zeros(rank.world, 3, dtype=torch.int64)
    rows, count = record.batch_size or 0, record.accumulation_steps
    told[rank.rank] = torch.tensor([rows, count, faults])
    dist.all_reduce(told)
    slices = tuple(tuple(r // n + (i < r % n) for i in range(n)) for r, n, _ in told.tolist())
    return slices, int(told[:, 2].sum())


class Place:
    """One step of an option, begun from the same state with each fault."""

    def __init__(self, kind: type[World], option: str, rank: Rank, at: int) -> None:
        self.kind, self.option, self.rank, self.at = kind, option, rank, at
        # What a first step does cannot be undone, nor a hook's state or a proof forgotten.
        self._anew = at == 0 or option in kind.anew
        self._worlds: dict[str, World] = {}
        self._undisturbed: dict[tuple[Slices, ...], tuple[list[Any], float]] = {}
        self._expected = self.world("undisturbed").expected() if option in kind.exact else []

    def world(self, of: str) -> World:
        """As it is before the step."""
        world = None if self._anew else self._worlds.get(of)
        if world is not None:
            world.restore()
        else:
            world = self._worlds[of] = self.kind(self.option, self.rank)
            world.begin(self.at)
            if not self._anew:
                world.keep()
        if self.at > 0 and not self._anew:  # no call before it has failed
            worlds.meet().at_ease.add(world.decorated)
        return world

    def allocations(self) -> dict[str, int]:
        """Of that step, by phase; the same on all ranks, or the most. Those in a hook with a state
        are left out: what it has done cannot be taken back, so that an error ends the program."""
        found = {}
        for phase in ("forward", "backward"):
            counted = inject_oom(nth=10**6, phase=phase)
            world = self.world("undisturbed")
            world.before_hook.clear()
            world.call(self.at, counted)
            found[phase] = world.before_hook[0] if world.before_hook else counted.seen
        most = torch.tensor(list(found.values()))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return dict(zip(found, most.tolist(), strict=True))

    def fail(self, fault: inject_oom | None, goes_on: bool) -> tuple[int, bool, list[Any]]:
        """Faults of all ranks, whether all is right here, and what is not."""
        world = self.world("failed")
        record = world.call(self.at, fault or contextlib.nullcontext())
        right = self.option != "powersgd" or world.compresses == (self.at == 2)
        slices, fired = _all_know(record, fault.fired if fault else 0, self.rank)
        chain, seen = (slices,), [world.seen]
        if goes_on and self.at + 1 < STEPS:
            after = world.call(self.at + 1, contextlib.nullcontext())
            chain += (_all_know(after, 0, self.rank)[0],)
            seen.append(world.seen)
        told: list[Any] = [record.ooms, record.attempts, chain]
        # Of more than two numbers the sum depends on where in its bucket a gradient lies.
        rounding = 0.0 if self.rank.world == 2 else 1e-3 if "fp16" in self.option else 1e-12
        for i, ours in enumerate(seen):
            theirs, error = self.undisturbed(chain[: i + 1])
            bits = _differ(ours, theirs)
            right = right and bits <= rounding and error <= 1e-9
            told += [bits, error]
        return fired, right, told

    def undisturbed(self, chain: tuple[Slices, ...]) -> tuple[list[Any], float]:
        """What is seen after such steps, and how far it is from one process."""
        if chain not in self._undisturbed:
            world = self.world("undisturbed")
            for i, slices in enumerate(chain):
                mine = list(slices[self.rank.rank])
                world.call(
                    self.at + i,
                    force_slices(mine) if len(mine) > 1 else contextlib.nullcontext(),
                )
            error = 0.0
            expected = self._expected[self.at + len(chain) - 1] if self._expected else []
            if expected:
                error = _differ(
                    [None if g is None else whole(g) for g in world.gradients], expected
                )
            self._undisturbed[chain] = world.seen, error
        return self._undisturbed[chain]


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
    rank.votes_by()
    rank.join()
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = {}
    for option in given["options"]:
        begin = time.monotonic()
        found[option] = {**_swept(kind, option, rank), "seconds": time.monotonic() - begin}
        if "into" in given:
            with open(f"{given['into']}-{rank.rank}", "a", encoding="utf-8") as file:
                file.write(json.dumps({"option": option, **found[option]}) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return found


def _swept(kind: type[World], option: str, rank: Rank) -> dict[str, Any]:
    given = rank.arguments
    found: dict[str, Any] = {"cases": 0, "fired": 0, "failures": []}
    for at in given["at"]:
        place = Place(kind, option, rank, at)
        for phase, count in place.allocations().items():
            for nth in range(1 + given.get("offset", 0), count + 1, given.get("stride", 1)):
                for number, how in enumerate(given["kinds"]):
                    fault = _faults(how, phase, nth, rank).get(rank.rank)
                    fired, right, told = place.fail(fault, goes_on=(nth + number) % 3 == 0)
                    found["cases"] += fired > 0
                    found["fired"] += fired
                    if not right:
                        found["failures"].append([at, phase, nth, how, told])
    return found


def sweep(rank: Rank) -> dict[str, Any]:
    return sweep_of(World, rank)
