"""Steps over fully_shard() whose groups have more parameters than one told step has bits, or are
gathered already."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare, raised
from .ddp import whole

PARAMETERS = 90
USED: dict[str, list[int]] = {
    "all": list(range(PARAMETERS)),
    "most": [i for i in range(PARAMETERS) if i % 7 != 3],
    "last": list(range(80, PARAMETERS)),
    "first": list(range(30)),
    "by_rank": list(range(PARAMETERS)),
}
"""Parameters that a step uses: all of them, or some whose mask fits into a told step or not; or
those that have gradients where each rank uses others, and torch adds zeros for the rest."""


class Many(nn.Module):
    """One group, of which some parameters have no gradient."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4) for _ in range(PARAMETERS)])
        self.used = USED[used]
        if used == "by_rank":
            self.used = self.used[15 * dist.get_rank() :][:40]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.used:
            x = x + 0.1 * torch.tanh(x * self.weights[i])
        return x


def _sharded(used: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = fully_shard(Many(used))
    model.set_reduce_scatter_unused_params(used == "by_rank")
    return model, torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def _train(model: Any, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def _far(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            worst = worst if a is b else float("inf")
        else:
            worst = max(worst, float((a - b).abs().max()))
    return worst


def many(rank: Rank) -> list[Any]:
    """One rank fails in its forward or backward, at the first, a middle and a late allocation.
    Largest difference of gradients, how many there are, and how many faults were met."""
    prepare(rank)
    model, x = _sharded(rank.arguments["used"])
    _train(model, x)
    expected = _gradients(model)
    far, fired = 0.0, 0
    for fails in (0, 1):
        for phase in ("forward", "backward"):
            for nth in (1, 9, 27):
                step = oomkit.auto_batch(lambda x: _train(model, x), verify=False, model=model)
                fault = inject_oom(nth=nth, phase=phase)
                with fault if rank.rank == fails else contextlib.nullcontext():
                    step(x)
                far = max(far, _far(_gradients(model), expected))
                fired += fault.fired
    return [far, sum(g is not None for g in expected), fired]


class Shifted(nn.Module):
    """Its root has a parameter of its own, which torch leaves gathered after a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.inner = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.inner(x + self.shift))
        return out


def _shifted(**given: Any) -> Any:
    made = Shifted()
    fully_shard(made.inner)
    return fully_shard(made, **given)


GATHERED = (
    "evaluated",
    "unsharded",
    "unsharded_within",
    "unsharded_within_async",
    "frozen_teacher",
    "teacher",
)
GATHERED_FAULTS = [
    (fails, *fault)
    for fails in ("nothing", "0", "1", "all")
    for fault in (("forward", 1, 1), ("forward", 9, 0), ("backward", 3, 2))
]
"""Whose allocation of which phase fails, and in which step."""
"""What has gathered parameters when a call begins or ends, or a micro-batch does."""


class _Gathering:
    """Two models, and a step that leaves parameters of one of them gathered, or meets them so."""

    def __init__(self, kind: str, index: int) -> None:
        torch.manual_seed(index)
        self.kind = kind
        self.student, self.teacher = _shifted(), _shifted()
        if kind == "frozen_teacher":
            self.teacher.requires_grad_(False)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for model in (self.student, self.teacher)
        ]

    def before(self, x: torch.Tensor) -> None:
        if self.kind == "evaluated":
            with torch.no_grad():
                self.student(x)
        elif self.kind == "unsharded":
            self.student.unshard()

    def step(self, x: torch.Tensor) -> None:
        self.optimizers[0].zero_grad()
        if "within" in self.kind:
            self.student.unshard(async_op=self.kind.endswith("async"))
        loss = self.student(x).square().mean()
        if self.kind.endswith("teacher"):
            with torch.no_grad():
                target = self.teacher(x)
            loss = loss + (self.student(x) - target).square().mean()
        loss.backward()
        self.optimizers[0].step()

    def after(self, x: torch.Tensor) -> None:
        """A step without oomkit, which meets parameters as the call has left them."""
        if self.kind == "teacher":
            self.optimizers[1].zero_grad()
            self.teacher(x).square().mean().backward()
            self.optimizers[1].step()

    def values(self) -> torch.Tensor:
        models = (self.student, self.teacher)
        params = [whole(p) for model in models for p in model.parameters()]
        return torch.cat([p.flatten() for p in params])


def gathered(rank: Rank) -> list[Any]:
    """Steps whose models are gathered where sharded ones are usual, and one of whose ranks is out
    of memory. Largest difference of parameters, how many faults were met, and where it was last."""
    prepare(rank)
    kind, far, fired = rank.arguments["kind"], 0.0, 0
    rows = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(rank.rank))

    def run(fault: inject_oom | None, at: int, decorated: bool) -> torch.Tensor:
        made = _Gathering(kind, 7)
        step = (
            oomkit.auto_batch(made.step, verify=rank.arguments.get("verify", False))
            if decorated
            else made.step
        )
        for index, x in enumerate(rows):
            made.before(x)
            fails = fault if fault is not None and index == at else None
            with fails or contextlib.nullcontext():
                step(x)
            made.after(x)
        return made.values()

    expected = run(None, 0, False)
    for fails, phase, nth, at in rank.arguments.get("faults", GATHERED_FAULTS):
        meant = fails in (str(rank.rank), "all")
        fault = inject_oom(nth=nth, phase=phase) if meant else None
        print(kind, fails, phase, nth, flush=True)
        far = max(far, float((run(fault, at, True) - expected).abs().max()))
        fired += 0 if fault is None else fault.fired
    return [far, fired]


def full_tensors(rank: Rank) -> str:
    """What ranks get where one of them is split, whose step puts a parameter together."""
    prepare(rank)
    model, x = _sharded("first")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        model.weights[0].full_tensor()

    step(x)
    fails = inject_oom(nth=3, phase="forward") if rank.rank == 1 else contextlib.nullcontext()
    try:
        with fails:
            step(x)
    except oomkit.RankError as said:
        return str(said)
    return "nothing"


def averaged(rank: Rank) -> dict[str, Any]:
    """Sharded parameters that a step changes by its own means while it is split on rank 1: what is
    raised, or how far values are from those of the step without oomkit."""
    prepare(rank)
    rows = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(rank.rank))

    def run(kind: str, decorated: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model, average = _shifted(), _shifted()
        average.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                if kind == "average":
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(p, 0.1)
                elif kind == "foreach":
                    torch._foreach_mul_(list(model.parameters()), 0.9)
                elif kind == "local":
                    for p in model.parameters():
                        p.to_local().mul_(0.9)
                elif not decorated or oomkit.current().is_last:  # type: ignore[union-attr]
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(p, 0.1)

        trains = oomkit.auto_batch(step, verify=verify) if decorated else step
        for index, x in enumerate(rows):
            fails = decorated and index == 1 and rank.rank == 1
            with inject_oom(nth=3) if fails else contextlib.nullcontext():
                trains(x)
        params = [whole(p) for m in (model, average) for p in m.parameters()]
        return torch.cat([p.flatten() for p in params])

    found: dict[str, Any] = {}
    for verify in (None, False):
        for kind in ("average", "foreach", "local"):
            found[f"{kind} {verify}"] = raised(lambda kind=kind: run(kind, True))  # type: ignore[misc]
        far = run("guarded", True) - run("guarded", False)
        found[f"guarded {verify}"] = float(far.abs().max())
    return found
