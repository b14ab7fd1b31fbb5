"""Evaluation on several ranks, which need no agreement for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from helpers.seen import Seen
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit._ranks import parts
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
        sizes: Seen[int] = Seen()

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

        parts._warned.clear()  # said once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            oomkit.map(with_metric, every[0][0])
    found["said"] = " ".join(str(w.message) for w in caught)
    return found


def _net(*also: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *also, nn.Linear(8, 2))


def _failing(rank: Rank, nth: int) -> Any:
    return inject_oom(nth=nth) if rank.rank == 1 else contextlib.nullcontext()


def _same(tensors: Iterable[torch.Tensor]) -> bool:
    """On all ranks?"""
    mine = torch.cat([t.detach().flatten().float() for t in tensors])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def broadcast(rank: Rank) -> list[Any]:
    """A model whose buffers differ by rank, and are broadcast by the first forward without
    gradients, in parts that fail on one rank at each place: are results those of the buffers of
    rank 0, with nothing said, and does training go on?"""
    rank.join(20.0)
    model = DistributedDataParallel(_net(nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank.rank)
    x = torch.randn(8, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def mapped() -> Any:
        return oomkit.map(model, x)

    def looped() -> Any:
        out = []
        for part in oomkit.chunks(x, participants=model):
            with oomkit.guard():
                out.append(model(part))
        return torch.cat(out)

    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for evaluate in (mapped, looped):
            for nth in range(1, 7):
                model.train()
                step()
                model.eval()
                with torch.no_grad():
                    with _failing(rank, nth):
                        out = evaluate()
                    right = torch.allclose(out, model.module(x), atol=1e-6)
                found.append([right, _same(model.buffers()), _same(model.parameters())])
    return [found, [str(w.message) for w in caught if "oomkit" in str(w.message)]]


def _loop(rank: Rank) -> Callable[[], None]:
    """A loop in whose parts a model makes collectives."""
    kind = rank.arguments["kind"]
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model: Any
    if kind == "sharded":
        model = _net()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(_net(*[nn.BatchNorm1d(8)] * (kind == "buffers")))

    def loop() -> None:
        for part in oomkit.chunks(x):
            with oomkit.guard(), torch.set_grad_enabled(kind != "sharded"):
                out = model(part)
                if kind == "backward":
                    out.square().mean().backward()

    return loop


def collective_in_parts(rank: Rank) -> list[Any]:
    """What is said of it while it works, and once memory lacks on one rank."""
    rank.join(20.0)
    loop = _loop(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
        loop()
    said = [str(w.message) for w in caught if "oomkit" in str(w.message)]
    error = "nothing"
    try:
        with _failing(rank, rank.arguments["nth"]):
            loop()
    except Exception as failed:
        error = " ".join([type(failed).__name__, str(failed), *getattr(failed, "__notes__", ())])
    return [said, error]


def forwards_without_collectives(rank: Rank) -> list[Any]:
    """With gradients that nothing reduces: parts are repeated as those of a plain model."""
    rank.join(20.0)
    model = DistributedDataParallel(_net())
    x = torch.randn(8, 4)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nth in range(1, 4):
            out = []
            with _failing(rank, nth):
                for part in oomkit.chunks(x):
                    with oomkit.guard():
                        out.append(model(part))
            right = torch.allclose(torch.cat(out), model.module(x), atol=1e-6)
            found.append(right and (len(out) > 1) == (rank.rank == 1))
        dist.barrier()
    return [found, [str(w.message) for w in caught if "oomkit" in str(w.message)]]
