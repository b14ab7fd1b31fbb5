"""Steps in which one rank's update runs out of memory, and what becomes of the others'."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks.ways import AGAIN, TIGHT
from oomkit._ranks.world import World
from oomkit.testing import inject_oom

from ..launch import Rank

ENOUGH = 1 << 30


class Own(torch.optim.Optimizer):
    """Somebody's, who says that it may go in parts: it is repeated as a whole."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class Stubborn:
    """A participant that does not go back."""

    def save(self) -> int:
        return 1

    def restore(self, saved: int) -> None:
        raise ValueError("it does not go back")


class Program:
    """Models, optimizers and a step, of which `given` says what is in it."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.errs = ""
        torch.manual_seed(3)
        self.models = [self._model() for _ in range(given.get("models", 1))]
        self.optimizers = [self._optimizer(model) for model in self.models]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="scaler" in given)

    def _model(self) -> nn.Module:
        width = self.given.get("width", 8)
        net: Any = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        if not self.given.get("sharded"):
            return DistributedDataParallel(net)
        fully_shard(net[0])
        return fully_shard(net)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = self.given.get("optimizer", "Adam")
        if kind == "ZeRO":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            inner = getattr(torch.optim, self.given.get("inner", "SGD"))
            options = {"foreach": False, "lr": 0.1, **self.given.get("options", {})}
            return ZeroRedundancyOptimizer(model.parameters(), inner, **options)
        if kind == "Own":
            oomkit.optim.register_optimizer(Own)
            return Own(model.parameters(), lr=0.1)
        options = {"foreach": False, "lr": 0.1, "weight_decay": self.given.get("decay", 0.0)}
        found: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        return found

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.given.get("in_turn"):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self._update(x, y, [model], [optimizer])
        else:
            self._update(x, y, self.models, self.optimizers)
        self._after()
        self._err("after")

    def _update(self, x: torch.Tensor, y: torch.Tensor, models: Any, optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            self.scaler.scale(F.mse_loss(model(x), y)).backward()
        for optimizer in optimizers:
            self.scaler.step(optimizer)
            self._err("between")
        self.scaler.update()

    def _err(self, where: str) -> None:
        if self.errs == where and dist.get_rank() == 1:
            raise ValueError("a label that there is not")

    def _after(self) -> None:
        for what in self.given.get("after", ()):
            if what == "scheduler":
                self.scheduler.step()
            elif what == "collective":
                dist.all_reduce(torch.zeros(1))
            elif what == "forward":
                self.models[0](torch.zeros(2, 4)).sum().backward()

    def state(self) -> list[torch.Tensor]:
        """All that an update moves, of this rank."""
        found = [p for model in self.models for p in model.parameters()]
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "optim", optimizer)  # ZeRO's, of this rank's part
            for values in inner.state.values():
                found += [value for value in values.values() if torch.is_tensor(value)]
        found = [getattr(t, "to_local", lambda t=t: t)().detach().clone() for t in found]
        rates = [group["lr"] for one in self.optimizers for group in one.param_groups]
        return [*found, torch.tensor([*rates, self.scaler.get_scale()])]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Up to rounding, for a rank may have come to it in micro-batches."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch.allclose(a, b, 0.0, 1e-12) for a, b in pairs)


class Votes:
    """Votes of this rank while it runs, and what came of them."""

    def __enter__(self) -> Votes:
        self.words: list[int] = []
        self.count = 0
        self._plain = plain = World.vote

        def counted(world: World, *args: Any, **more: Any) -> int:
            self.count += 1
            self.words.append(plain(world, *args, **more))
            return self.words[-1]

        World.vote = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        World.vote = self._plain  # type: ignore[method-assign]

    def tight(self) -> int:
        return max((word // TIGHT for word in self.words if word < AGAIN), default=0)


@contextlib.contextmanager
def _trouble(given: dict[str, Any]) -> Iterator[None]:
    """So many bytes are left on this rank, and its updates fail."""
    if "left" in given:
        gc.collect()
        oomkit._C.cpu_set_limit(oomkit._C.cpu_stats()["allocated"] + given["left"])
    fails: Any = contextlib.nullcontext()
    if given.get("times", 0) != 0:
        fails = inject_oom(phase="optimizer", nth=given.get("nth", 1), times=given["times"])
    try:
        with fails:
            yield
    finally:
        oomkit._C.cpu_set_limit(ENOUGH)


def one(rank: Rank, given: dict[str, Any]) -> dict[str, Any]:
    """The second step of a program, with trouble on rank 1: what it raises and leaves, and how
    often this rank has voted in it."""
    torch.manual_seed(rank.rank + 1)
    x, y = torch.randn(2, given.get("rows", 8), 4), torch.randn(2, given.get("rows", 8), 2)
    bare, program = Program(given), Program(given)
    for turn in range(2):
        bare.step(x[turn], y[turn])
    options = {"verify": False, "ladder": given.get("ladder", ()), "label": "a step"}
    for name in ("optimizer_safety", "participants"):
        if name in given:
            options[name] = given[name]
    if given.get("stubborn") and rank.rank == 0:
        options["participants"] = [Stubborn()]
    body: Any = program.step
    if given.get("hidden"):  # where no search looks
        box = itertools.repeat(program.step)
        body = lambda x, y: next(box)(x, y)  # noqa: E731
        options["model"] = program.models[0]
    step = oomkit.auto_batch(body, **options)
    step(x[0], y[0])
    before, error = program.state(), ""
    with Votes() as votes, _trouble(given if rank.rank == 1 else {}):
        try:
            program.errs = given.get("errs", "")
            step(x[1], y[1])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    after = program.state()
    return {
        "error": error,
        "tight": votes.tight(),
        "before": _same(after, before),
        "after": _same(after, bare.state()),
        "votes": votes.count,
    }


def _told(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def one_joined(rank: Rank, given: dict[str, Any]) -> dict[str, Any]:
    """Steps inside join(), which the first rank leaves after one, where the last rank's update has
    trouble in the second: what is raised and left."""
    torch.manual_seed(rank.rank + 1)
    x, y = torch.randn(2, 8, 4), torch.randn(2, 8, 2)
    count = 1 if rank.rank == 0 and not given.get("all_there") else 2
    bare, program = Program(given), Program(given)
    options = {"verify": False, "ladder": (), "label": "a step"}
    options |= {"optimizer_safety": given["optimizer_safety"]}
    step = oomkit.auto_batch(program.step, **options)
    votes, before = Votes(), program.state()

    def epoch(one: Program, step: Any) -> None:
        nonlocal before
        with Join([*one.models, *(one.optimizers if given.get("optimizer") == "ZeRO" else [])]):
            for turn in range(count):
                if turn == 1:
                    before = one.state()
                hurt = one is program and turn == 1 and rank.rank == rank.world - 1
                with votes, _trouble(given if hurt else {}):
                    step(x[turn], y[turn])
            if count == 1:
                before = one.state()

    epoch(bare, bare.step)
    votes = Votes()
    error = _told(lambda: epoch(program, step))
    after = program.state()
    moved = len(program.models[0].state_dict()) if rank.rank == 0 else len(after)
    return {
        "error": error,
        "tight": votes.tight() if count == 2 else 0,
        "before": _same(after, before),
        "after": _same(after[:moved], bare.state()[:moved]),
    }


@contextlib.contextmanager
def _breaks(at: int) -> Iterator[None]:
    """The broadcast with this number that an optimizer makes has no memory."""
    plain, made = dist.broadcast, itertools.count(1)

    def broadcast(*args: Any, **more: Any) -> Any:
        if next(made) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(*args, **more)

    dist.broadcast = broadcast
    try:
        yield
    finally:
        dist.broadcast = plain


def one_zero(rank: Rank, given: dict[str, Any]) -> dict[str, Any]:
    """A step with ZeroRedundancyOptimizer, whose update fails on the ranks that are `hurt`, in
    the first call or in the second one."""
    given = {"optimizer": "ZeRO", **given}
    torch.manual_seed(rank.rank + 1)
    last = 0 if given.get("first") else 1
    x, y = torch.randn(2, 8, 4), torch.randn(2, 8, 2)
    bare, program = Program(given), Program(given)
    for turn in range(last + 1):
        bare.step(x[turn], y[turn])
    options = {name: given[name] for name in ("optimizer_safety",) if name in given}
    step = oomkit.auto_batch(program.step, verify=False, ladder=(), label="a step", **options)
    for turn in range(last):
        step(x[turn], y[turn])
    hurt, trouble = rank.rank in given.get("hurt", ()), contextlib.ExitStack()
    before, error, begun = program.state(), "", time.monotonic()
    with Votes() as votes, trouble:
        trouble.enter_context(_trouble(given if hurt else {}))
        if hurt and "breaks" in given:
            trouble.enter_context(_breaks(given["breaks"]))
        error = _told(lambda: step(x[last], y[last]))
    seconds = time.monotonic() - begun
    after = program.state()
    return {
        "error": error,
        "tight": votes.tight(),
        "before": _same(after, before),
        "after": _same(after, bare.state()),
        "votes": votes.count,
        "seconds": seconds,
    }


def ends_within(rank: Rank) -> list[str]:
    """An error on rank 1 in the second of three steps, which its program catches: within the
    update, or between two. What this rank is told."""
    rank.join(20.0)
    torch.set_default_dtype(torch.float64)
    program = Program(rank.arguments)
    for optimizer in program.optimizers:
        optimizer.register_step_post_hook(lambda *_: program._err("within"))
    step = oomkit.auto_batch(program.step, verify=False, ladder=())
    torch.manual_seed(rank.rank + 1)
    found = []
    for turn in range(3):
        program.errs = rank.arguments["where"] if turn == 1 else ""
        found.append(_told(lambda: step(torch.randn(8, 4), torch.randn(8, 2))))
    return found


def closures(rank: Rank) -> list[list[Any]]:
    """Updates whose closure computes the gradients, of which one has no memory at a place of rank
    1's, with healthy ones between: what is raised, and whether parameters have moved."""
    rank.votes_by()
    rank.join(20.0)
    torch.set_default_dtype(torch.float64)
    oomkit._C.cpu_set_limit(ENOUGH)
    program = Program(rank.arguments)
    (model,), (optimizer,) = program.models, program.optimizers
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        of_all = F.mse_loss(model(x), y)
        of_all.backward()
        return of_all

    step = oomkit.auto_batch(lambda x: optimizer.step(loss), verify=False, model=model)
    found = []
    for phase, nth in rank.arguments["places"]:
        step(x)
        before = program.state()
        fails: Any = contextlib.nullcontext()
        if rank.rank == 1:
            fails = inject_oom(phase=phase, nth=nth)
        with fails as faults:
            error = _told(lambda: step(x))
        fired = rank.rank == 0 or faults.fired > 0
        found.append([error, _same(program.state(), before), fired])
    return found


KINDS = {"one": one, "joined": one_joined, "zero": one_zero}


def cases(rank: Rank) -> dict[str, Any]:
    """All in one process group, one after the other."""
    rank.votes_by()
    rank.join(20.0)
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    oomkit._C.cpu_set_limit(ENOUGH)
    found = {}
    for name, given in rank.arguments["cases"].items():
        print(name, flush=True)
        found[name] = KINDS[rank.arguments.get("kind", "one")](rank, given)
    return found
