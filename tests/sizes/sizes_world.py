"""A small training whose sizes are remembered; also a program: its own runs, one by one.

python tests/sizes/sizes_world.py BUDGET [FACTOR]: six steps; prints [[k, OOMs, reason], ...].
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import oomkit

ROWS = 600


def training(factor: int = 1, **options: Any) -> Any:
    """A step over a model of its own; with `factor` its activations are so much larger."""
    gc.collect()
    with oomkit.limit_memory(2**40, device="cpu"):  # from now on tensors are counted
        before = oomkit.memory("cpu").allocated or 0
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hooks: list[Callable[..., Any]] = [lambda module, args, out: out + 0.0] * (factor - 1)
    for hook in hooks:
        model[1].register_forward_hook(hook)

    @oomkit.auto_batch(reduction="mean", **options)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).tanh(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.before = before
    return step


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 64, generator=generator), torch.arange(ROWS) % 8


def run(step: Any, budget: int, calls: int = 6) -> list[tuple[int, int, str]]:
    """(micro-batches, OOMs, reason) of some calls, with `budget` bytes for model and batch."""
    gc.collect()
    x, y = batch()
    with oomkit.limit_memory(step.before + budget, device="cpu"):
        for _ in range(calls):
            step(x, y)
    return [(r.accumulation_steps, r.ooms, r.reason) for r in step.records[-calls:]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = training(*map(int, sys.argv[2:]))
    print(json.dumps(run(step, int(sys.argv[1]))))
