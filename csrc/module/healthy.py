"""What a build with OOMKIT_TRAINED=1 is optimised for: steps and loops in which nothing fails.

setup.py runs this with extensions that count their branches. What is not run here is compiled as
in any other build.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

import oomkit

ROUNDS = 300


@dataclass
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor


def inputs(batch: object) -> torch.Tensor:
    """The inputs of any of the batches below."""
    if isinstance(batch, Batch):
        return batch.inputs
    if isinstance(batch, dict | UserDict):
        return batch["inputs"]
    return batch[0] if isinstance(batch, tuple) else batch


def batches() -> Iterator[object]:
    x, y = torch.randn(16, 32), torch.randn(16)
    yield x
    yield x, y
    yield {"inputs": x, "targets": [y, y], "names": "rows"}
    yield UserDict(inputs=x, targets=y)
    yield Batch(x, y)


def models() -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    yield nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 1))
    yield nn.Sequential(*(nn.Linear(32, 32, bias=n % 2 == 0) for n in range(150)))


def training(
    model: nn.Module, kind: str, autocast: bool = False
) -> Callable[[object], torch.Tensor]:
    """A step as most programs have it, with everything inside."""
    if kind == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=kind == "fused")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10 * ROUNDS)
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    def step(batch: object) -> torch.Tensor:
        optimizer.zero_grad()
        with precision:
            loss = model(inputs(batch)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step


def returning(model: nn.Module) -> Callable[[object], torch.Tensor]:
    """The loss is returned, and the caller runs backward."""

    def step(batch: object) -> torch.Tensor:
        return model(inputs(batch)).square().mean()

    whole = oomkit.auto_batch(step)
    return lambda batch: whole(batch).backward()


def evaluation(model: nn.Module) -> Callable[[object], torch.Tensor]:
    def score(batch: object) -> torch.Tensor:
        with oomkit.guard():
            return model(inputs(batch)).detach()

    return score


def main() -> None:
    torch.set_num_threads(1)
    for batch in batches():
        calls = [oomkit.auto_batch(inputs), oomkit.auto_batch(inputs, rng="none")]
        for model in models():
            calls += [
                oomkit.auto_batch(training(model, "AdamW")),
                oomkit.auto_batch(training(model, "fused"), rng="none"),
                oomkit.auto_batch(training(model, "SGD", autocast=True)),
                returning(model),
                evaluation(model),
            ]
        for _ in range(ROUNDS // 5):
            for call in calls:
                call(batch)


if __name__ == "__main__":
    main()
