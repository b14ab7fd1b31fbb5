"""Steps with their own control flow or update: most of them cannot be split."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .updates import Net, rows
from .world import World, program


@program("refused", says="non-empty TensorList.*oomkit: raised in micro-batch|between two backward")
def sharpness_aware(world: World) -> None:
    """SAM-like: climb, a second forward and backward, return, step."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            slopes = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            norm = torch.stack([s.norm() for s in slopes]).norm()
            climbed = [0.05 * s / (norm + 1e-12) for s in slopes]
            for p, c in zip(model.parameters(), climbed, strict=True):
                p.add_(c)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, c in zip(model.parameters(), climbed, strict=True):
                p.sub_(c)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("refused", says="run different code|current")
def skip_on_nan(world: World) -> None:
    """The update is skipped when the loss is not finite: decided per micro-batch."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not math.isfinite(loss.item()):
            return 0.0
        loss.backward()
        optimizer.step()
        return loss.item()

    for broken in (False, True):
        x, y = rows()
        if broken:
            x[1, 0] = math.nan
        world.note(train_step(x, y))


@program("equal", accumulates=True, by_proof=True)
def counter_decides(world: World) -> None:
    """A counter in the step decides when to update: it counts batches."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer, self.calls = model, optimizer, 0

        @world.auto_batch
        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            loss = F.cross_entropy(self.model(x), y) / 2
            loss.backward()
            self.calls += 1
            if self.calls % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.item()

    trainer = Trainer()
    for _ in range(4):
        world.note(trainer.train_step(*rows()))


@program("refused", says="closure")
def lbfgs(world: World) -> None:
    """L-BFGS: the optimizer calls the model as often as it likes."""
    model = Net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    world.keep(model, lambda: optimizer.state_dict()["state"].get(0, {}).get("n_iter", 0))

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    for _ in range(2):
        world.note(train_step(*rows()))


@program("equal", decorated="@oomkit.auto_batch, on the closure's forward and backward")
def lbfgs_closure(world: World) -> None:
    """L-BFGS as the error suggests: the closure's body is decorated."""
    model = Net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    world.keep(model)

    @world.auto_batch
    def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return evaluate(x, y)

    for _ in range(2):
        x, y = rows()
        world.note(optimizer.step(closure))


@program("equal")
def plateau_inside(world: World) -> None:
    """ReduceLROnPlateau stepped in the step, with the loss of the whole batch."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    world.keep(model, optimizer, lambda: scheduler.best)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("refused", says="hook|steps an optimizer")
def update_in_backward(world: World) -> None:
    """One optimizer per parameter, stepped by hooks as soon as its gradient is there."""
    model = Net().double()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    world.keep(model, *optimizers.values())

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("refused", says="NoneType")
def norm_by_hand(world: World) -> None:
    """The norm of the gradients, computed by hand: of micro-batches only the last one has them."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
        optimizer.step()
        return loss.item(), norm

    for _ in range(3):
        for value in train_step(*rows()):
            world.note(value)
