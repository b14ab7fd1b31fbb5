"""Other processes: steps that are pickled by name and run in a spawned worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import remote, steps
from .world import ROWS, World, program


def _rows(calls: int) -> steps.Rows:
    return [(torch.randn(ROWS, 6).double(), torch.randint(0, 4, (ROWS,))) for _ in range(calls)]


def train(world: World, step: Callable[..., float], model: nn.Module, rows: Any) -> None:
    """In the worker: the step has come by its name, the model with its parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.keep(model, optimizer)
    for x, y in rows:
        with world.conditions(step):
            world.note(world.taken(step)(model, optimizer, x, y))


def train_with(world: World, trainer: steps.Trainer, rows: Any) -> None:
    world.keep(trainer.model, trainer.optimizer)
    step = type(trainer).train_step
    for x, y in rows:
        with world.conditions(step):
            world.note(world.taken(step)(trainer, x, y))


@program("equal", decorated="@oomkit.auto_batch, on a function of a module")
def spawned_function(world: World) -> None:
    """A decorated function is an argument of the worker's, as ProcessPoolExecutor.submit has it."""
    remote.call(world, train, steps.train_step, steps.Net(), _rows(3))


@program("equal", decorated="@oomkit.auto_batch, on a method")
def spawned_trainer(world: World) -> None:
    """A trainer that has done a step here goes on in the worker: its class has the method."""
    trainer = steps.Trainer()
    first, *rest = _rows(3)
    trainer.train_step(*first)
    remote.call(world, train_with, trainer, rest)
