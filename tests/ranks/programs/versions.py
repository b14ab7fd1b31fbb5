"""Steps over a torch that was not tried."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank


def newer(rank: Rank) -> dict[str, Any]:
    """Of each wrapper attempts of its second step, in which the last rank fails, and what the
    log says."""
    rank.join()
    torch.__version__ = "2.99.0"
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oomkit").addHandler(handler)
    found: dict[str, Any] = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
        said.clear()
        model: Any = wrap(nn.Linear(4, 2))

        @oomkit.auto_batch(verify=False)
        def step(x: torch.Tensor, y: torch.Tensor, model: Any = model) -> None:
            F.mse_loss(model(x), y).backward()

        x, y = torch.randn(8, 4), torch.randn(8, 2)
        step(x, y)
        fails = rank.rank == rank.world - 1
        with inject_oom(nth=2) if fails else contextlib.nullcontext():
            step(x, y)
        texts = [text for text in said if "was not tried" in text]
        found[name] = [step.records[-1].ooms, texts]
    return found
