"""`global_weight=`: a mean over the items of all ranks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens that count are others on each rank."""
    generator = torch.Generator().manual_seed(rank + 1)
    rows = 6 + 2 * rank
    x = torch.randn(rows, 5, 4, generator=generator)
    labels = torch.randint(3, (rows, 5), generator=generator)
    labels[torch.rand(rows, 5, generator=generator) < 0.3 + 0.2 * rank] = -100
    return x, labels


def _loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


def _tokens(batch: Any) -> Any:
    return (batch[1] != -100).sum()


def _model(kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(_net(), bucket_cap_mb=0.0002)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(_net())


def _begin(rank: Rank) -> None:
    rank.votes_by()
    rank.join(20.0)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)


def weighed(rank: Rank) -> dict[str, Any]:
    """Largest differences from one process that has all rows, and how often a rank was split."""
    _begin(rank)
    one = _net()
    every = [_batch(other) for other in range(rank.world)]
    union = [torch.cat(part) for part in zip(*every, strict=True)]
    _loss(one, *union).backward()
    expected = [p.grad for p in one.parameters()]
    found = {}
    for kind in rank.arguments["kinds"]:
        for how in ("whole", "from the start", "forward", "backward"):
            model = _model(kind)
            start = 1 + rank.rank if how == "from the start" else 1

            def step(x: torch.Tensor, labels: torch.Tensor, model: Any = model) -> torch.Tensor:
                model.zero_grad()
                loss = _loss(model, x, labels)
                loss.backward()
                return loss.detach()

            decorated = oomkit.auto_batch(
                step, weight=_tokens, global_weight=True, accumulation_steps=start
            )
            fails = rank.rank == 1 and how in ("forward", "backward")
            decorated(*every[rank.rank])
            with inject_oom(nth=2, phase=how) if fails else contextlib.nullcontext():
                loss = decorated(*every[rank.rank])
            far = abs(float(loss - _loss(one, *every[rank.rank]).detach()))
            for p, theirs in zip(model.parameters(), expected, strict=True):
                ours = p.grad.full_tensor() if kind == "fsdp" else p.grad
                far = max(far, float((ours - theirs).abs().max()))
            found[f"{kind}, {how}"] = [far, decorated.records[-1].accumulation_steps]
    return found


def one_row(rank: Rank) -> float:
    """The largest difference where this rank's last batch has a single row."""
    _begin(rank)
    one, model = _net(), _model("ddp")
    every = [[part[:1] for part in _batch(other)] for other in range(rank.world)]
    _loss(one, *[torch.cat(part) for part in zip(*every, strict=True)]).backward()

    @oomkit.auto_batch(weight=_tokens, global_weight=True)
    def step(x: torch.Tensor, labels: torch.Tensor) -> None:
        model.zero_grad()
        _loss(model, x, labels).backward()

    step(*_batch(rank.rank))
    step(*every[rank.rank])
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)


def _raised(step: Any, *batch: Any) -> str:
    try:
        step(*batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: Rank) -> dict[str, str]:
    """What cannot be weighed is an error on all ranks, before anything has run."""
    _begin(rank)
    x, labels = _batch(rank.rank)
    alone, model = _net(), _model("ddp")

    def step(x: torch.Tensor, labels: torch.Tensor) -> None:
        _loss(model, x, labels).backward()

    def plain(x: torch.Tensor, labels: torch.Tensor) -> None:
        _loss(alone, x, labels).backward()

    def returned(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _loss(model, x, labels)

    def bad(batch: Any) -> Any:
        return _tokens(batch) if rank.rank == 0 else 1 // 0

    def given(function: Any, weight: Any = _tokens) -> Any:
        return oomkit.auto_batch(function, weight=weight, global_weight=True)

    nothing = labels.fill_(-100) if rank.rank == 1 else labels
    found = {
        "no model of several ranks": _raised(given(plain), x, labels),
        "returned": _raised(given(returned), x, _batch(rank.rank)[1]),
        "nothing counts": _raised(given(step), x, nothing),
        "raises": _raised(given(step, bad), x, _batch(rank.rank)[1]),
    }
    found["moved"] = str(
        any(p.grad is not None for p in [*alone.parameters(), *model.parameters()])
    )
    return found
