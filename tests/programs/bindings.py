"""Ways to write a step: methods of all kinds, partials, objects, loops, copies, other processes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .data.batches import CLASSES, FEATURES, Net
from .world import ROWS, World, program


def _rows(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, FEATURES).double(), torch.randint(0, CLASSES, (rows,))


def _net(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.keep(model, optimizer)
    return model, optimizer


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@program("equal", decorated="@oomkit.auto_batch, under @staticmethod")
def static_method(world: World) -> None:
    """A static method, called on the class and on an object."""

    class Trainer:
        @staticmethod
        @world.auto_batch
        def train_step(
            model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
        ) -> float:
            return _update(model, optimizer, x, y)

    model, optimizer = _net(world)
    world.note(Trainer.train_step(model, optimizer, *_rows()))
    world.note(Trainer().train_step(model, optimizer, *_rows()))
    world.note(Trainer().train_step(model, optimizer, *_rows()))


@program("equal", decorated="@oomkit.auto_batch, above @staticmethod")
def static_method_above(world: World) -> None:
    """The same with the decorators in the other order."""

    class Trainer:
        @world.auto_batch
        @staticmethod
        def train_step(
            model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
        ) -> float:
            return _update(model, optimizer, x, y)

    model, optimizer = _net(world)
    world.note(Trainer.train_step(model, optimizer, *_rows()))
    world.note(Trainer().train_step(model, optimizer, *_rows()))


@program("equal", decorated="@oomkit.auto_batch, under @classmethod")
def class_method(world: World) -> None:
    """A class method; model and optimizer are attributes of the class."""
    made = _net(world)

    class Trainer:
        model, optimizer = made
        steps: ClassVar[int] = 0

        @classmethod
        @world.auto_batch
        def train_step(cls, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(cls.model, cls.optimizer, x, y)

    for _ in range(3):
        world.note(Trainer.train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, above @classmethod")
def class_method_above(world: World) -> None:
    """The same with the decorators in the other order, called on an object of a subclass."""
    made = _net(world)

    class Trainer:
        model, optimizer = made

        @world.auto_batch
        @classmethod
        def train_step(cls, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(cls.model, cls.optimizer, x, y)

    class Special(Trainer):
        pass

    for _ in range(3):
        world.note(Special().train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on a functools.partial")
def partial(world: World) -> None:
    """A partial that holds model and optimizer, one of them by name."""
    model, optimizer = _net(world)

    def train(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, optimizer: torch.optim.Optimizer
    ) -> float:
        return _update(model, optimizer, x, y)

    train_step = world.auto_batch(functools.partial(train, model, optimizer=optimizer))
    for _ in range(3):
        world.note(train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, a functools.partial of it")
def partial_of_step(world: World) -> None:
    """The reverse: the decorated function in a partial."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
        return _update(model, optimizer, *batch)

    train_step = functools.partial(train, model, optimizer)
    for _ in range(3):
        world.note(train_step(_rows()))


@program("equal", decorated="@oomkit.auto_batch, on an object with __call__")
def callable_object(world: World) -> None:
    """An object with __call__ that holds model and optimizer; the object is decorated."""
    made = _net(world)

    class Step:
        def __init__(self) -> None:
            self.model, self.optimizer = made

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(self.model, self.optimizer, x, y)

    train_step = world.auto_batch(Step())
    for _ in range(3):
        world.note(train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on the method __call__")
def call_method(world: World) -> None:
    """The same with the method decorated; two objects share the class, each has its own model."""

    class Step:
        def __init__(self) -> None:
            self.model, self.optimizer = _net(world)

        @world.auto_batch
        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(self.model, self.optimizer, x, y)

    first, second = Step(), Step()
    for step in (first, second, first, second):
        world.note(step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on a bound method")
def bound_method(world: World) -> None:
    """A method of an object of another library: `step = auto_batch(trainer.step)`."""
    made = _net(world)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = made

        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(self.model, self.optimizer, x, y)

    trainer = Trainer()
    train_step = world.auto_batch(trainer.train_step)
    for _ in range(3):
        world.note(train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on a method of a data class")
def data_class_method(world: World) -> None:
    """A trainer that is a data class; its method is called by keyword."""
    made = _net(world)

    @dataclass
    class Trainer:
        model: nn.Module
        optimizer: torch.optim.Optimizer
        losses: list[float] = field(default_factory=list)

        @world.auto_batch
        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(self.model, self.optimizer, x, y)

    trainer = Trainer(*made)
    for _ in range(3):
        x, y = _rows()
        trainer.losses.append(trainer.train_step(y=y, x=x))
    for loss in trainer.losses:
        world.note(loss)


@program("equal", decorated="@oomkit.auto_batch, on a method that a subclass calls by super()")
def inherited_method(world: World) -> None:
    """A base class has the decorated step, a subclass changes the loss and calls super()."""
    made = _net(world)

    class Base:
        def __init__(self) -> None:
            self.model, self.optimizer = made

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x), y)

        @world.auto_batch
        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

    class Smooth(Base):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x), y, label_smoothing=0.2)

        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return super().train_step(x, y) / 2

    trainer = Smooth()
    for _ in range(3):
        world.note(trainer.train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on nn.Module.forward", caller_backward=True)
def module_forward(world: World) -> None:
    """A module whose forward is decorated and returns the loss, as Hugging Face models do."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().double()

        @world.auto_batch
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.net(x)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    model = WithLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)
    for _ in range(3):
        x, y = _rows()
        out = model(x, labels=y)
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        world.note(out["loss"].item())
        world.note(out["logits"][2].sum().item())


@program("equal", decorated="@oomkit.auto_batch, in a loop over folds")
def step_in_loop(world: World) -> None:
    """Cross-validation: the step is defined anew for each fold, with its model in the closure."""
    for _ in range(2):
        model, optimizer = _net(world)

        @world.auto_batch
        def train_step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> float:
            return _update(model, optimizer, x, y)

        for _ in range(2):
            world.note(train_step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, in a function that is called per fold")
def step_in_factory(world: World) -> None:
    """The step is made by a function; both folds train in turn, and the first ends earlier."""

    def make() -> Callable[[torch.Tensor, torch.Tensor], float]:
        model, optimizer = _net(world)

        @world.auto_batch
        def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(model, optimizer, x, y)

        return train_step

    first, second = make(), make()
    for step in (first, second, second, first, second):
        world.note(step(*_rows()))


@program("equal", decorated="@oomkit.auto_batch, on a method of an object that is copied")
def copied_trainer(world: World) -> None:
    """A trainer is copied after a step, and both go on: copy.deepcopy of all that it holds."""

    class Trainer:
        def __init__(self) -> None:
            self.model = Net().double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

        @world.auto_batch
        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return _update(self.model, self.optimizer, x, y)

    first = Trainer()
    world.keep(first.model, first.optimizer)
    world.note(first.train_step(*_rows()))
    second = copy.deepcopy(first)
    world.keep(second.model, second.optimizer)
    assert second.optimizer.param_groups[0]["params"][0] is next(second.model.parameters())
    for trainer in (second, first, second):
        world.note(trainer.train_step(*_rows()))


def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as every project has one."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


@program("equal", decorated="@oomkit.auto_batch, above another decorator")
def above_a_decorator(world: World) -> None:
    """Another decorator with functools.wraps is below: the step is known by *args only."""
    model, optimizer = _net(world)

    @world.auto_batch
    @timed
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        return _update(model, optimizer, x, y)

    for _ in range(3):
        x, y = _rows()
        world.note(train_step(x, y=y))


@program("equal", decorated='@oomkit.auto_batch(batch="inputs", static="table"), above another')
def above_a_decorator_named(world: World) -> None:
    """The same with arguments named that only the innermost function has."""
    model, optimizer = _net(world)

    @world.auto_batch(batch=("inputs", "labels"), static="table")
    @timed
    def train_step(table: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        return _update(model, optimizer, table[inputs], labels)

    for _ in range(3):
        table, _ = _rows()
        _, labels = _rows()
        world.note(train_step(table, torch.randint(0, ROWS, (ROWS,)), labels))


@program("equal", decorated="@oomkit.auto_batch, on a lambda")
def lambda_step(world: World) -> None:
    """A lambda that calls a function of the module."""
    model, optimizer = _net(world)
    train_step = world.auto_batch(lambda batch: _update(model, optimizer, *batch))
    for _ in range(3):
        world.note(train_step(_rows()))


@program("equal", decorated="@oomkit.auto_batch, on a step that calls a decorated step")
def step_in_step(world: World) -> None:
    """An epoch's function calls another decorated function: the outermost one protects both."""
    model, optimizer = _net(world)

    @world.bare
    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = compute_loss(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*_rows()))
