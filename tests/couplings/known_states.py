"""What a step remembers, and batches that it does not get as tensors of rows."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .judge import Batch, World
from .known import CLASSES, HIDDEN, WIDE, classify, floats, net, one, pair, program, sgd, whole


@program()
def moving_centre(n: int) -> World:
    """DINO: the centre of the teacher's outputs is a plain attribute that follows them."""
    student, teacher = net(), net()
    teacher.requires_grad_(False)
    loss = types.SimpleNamespace(centre=torch.zeros(CLASSES, dtype=torch.float64))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        told = teacher(x)
        wanted = ((told - loss.centre) / 0.1).softmax(1)
        loss.centre = loss.centre * 0.9 + told.mean(0) * 0.1
        return -(wanted * student(x).log_softmax(1)).sum(1).mean()

    return whole(loss_of, student, one(n), remembered=lambda: loss.centre)


@program()
def centre_before_its_use(n: int) -> World:
    """The same, and the centre of this batch is in its own loss."""
    student = net()
    kept = {"centre": torch.zeros(CLASSES, dtype=torch.float64)}

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = student(x)
        kept["centre"] = kept["centre"] * 0.9 + out.detach().mean(0) * 0.1
        return F.cross_entropy(out - kept["centre"] * torch.arange(3.0), y)

    return whole(loss_of, student, pair(n), remembered=lambda: kept["centre"])


@program()
def running_scale(n: int) -> World:
    """A running mean of the loss divides it, a float of the object."""
    model = net()

    class Task:
        mean = 1.0

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
            return loss / self.mean

    task = Task()
    return whole(task.loss, model, pair(n), remembered=lambda: task.mean)


class Polyak(torch.optim.Optimizer):
    """The step's length is the loss over the square of the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"share": 0.1})

    @torch.no_grad()
    def step(self, loss: Any = None) -> None:  # type: ignore[override]
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        square = sum(float(p.grad.square().sum()) for p in found)
        length = self.param_groups[0]["share"] * float(loss) / square if square else 0.0
        for p in found:
            p.sub_(p.grad, alpha=length)


def _polyak(n: int, number: bool) -> World:
    model = net()
    optimizer = Polyak(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss.item() if number else loss)
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


@program()
def polyak(n: int) -> World:
    """opt.step(loss): the update depends on the loss that it is given."""
    return _polyak(n, False)


@program()
def polyak_number(n: int) -> World:
    """The same with loss.item()."""
    return _polyak(n, True)


@program()
def rate_of_the_loss(n: int) -> World:
    """The learning rate is set from the loss, before the update."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + loss.item())
        optimizer.step()
        return loss.detach()

    return World(step, [model, optimizer], pair(n))


def _beside(n: int, where: str) -> World:
    """A tensor with an element for each row that is no argument of the step."""
    model = net(1)
    optimizer = sgd(model)
    table: dict[str, torch.Tensor] = {}
    holder = types.SimpleNamespace()

    class Trainer:
        wanted: torch.Tensor

        def step(self, x: torch.Tensor) -> torch.Tensor:
            wanted = {"self": self, "object": holder}.get(where)
            y = table["wanted"] if wanted is None else wanted.wanted
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

    trainer = Trainer()

    def drive(step: Any, batch: Batch) -> Any:
        trainer.wanted = holder.wanted = table["wanted"] = batch[1]
        return step(batch[0])

    return World(
        trainer.step,
        [model, optimizer],
        lambda call: (floats(call, n, WIDE), floats(call, n, 1, more=6)),
        drive,
        raises=True,
    )


@program(rows=2)
def rows_on_self(n: int) -> World:
    """Labels on `self`: a slice of one row broadcasts against all of them."""
    return _beside(n, "self")


@program(rows=2)
def rows_on_an_object(n: int) -> World:
    """Labels on another object."""
    return _beside(n, "object")


@program(rows=2)
def rows_in_a_dict(n: int) -> World:
    """Labels in a dict that the step closes over."""
    return _beside(n, "dict")


@program()
def rows_on_self_eight(n: int) -> World:
    """Labels on `self`, eight of them: what does not broadcast is an error of the program."""
    return _beside(n, "self")


class Moco(nn.Module):
    """A queue of past features as a buffer: negatives of this batch, then its own go in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.encoder = net(4)
        self.register_buffer("queue", F.normalize(floats(0, size, 4, more=77), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q, k = (F.normalize(self.encoder(part), dim=1) for part in (x, other))
        k = k.detach()
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1)
        with torch.no_grad():
            at, size = int(self.place), len(self.queue)
            self.queue[(at + torch.arange(len(k))) % size] = k
            self.place[0] = (at + len(k)) % size
        return F.cross_entropy(scores * 5, torch.zeros(len(x), dtype=torch.long))


@program()
def memory_queue(n: int) -> World:
    """MoCo: features of the batch go into the queue in its forward."""
    model = Moco(16)
    return whole(model, model, lambda call: (floats(call, n, WIDE), floats(call, n, WIDE, more=9)))


@program()
def memory_bank_of_lists(n: int) -> World:
    """The same as a Python list of features, the last sixteen of them."""
    model = net(4)
    bank: list[torch.Tensor] = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        z = F.normalize(model(x), dim=1)
        far = torch.stack(bank) if bank else torch.zeros(1, 4, dtype=torch.float64)
        bank.extend(z.detach())
        del bank[:-16]
        return (z @ far.T).exp().mean()

    return whole(loss_of, model, one(n), remembered=lambda: list(bank))


@program()
def list_of_pairs(n: int) -> World:
    """The batch is a list of (x, y), stacked inside."""
    model = net()
    loss = classify(model)

    def loss_of(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return loss(torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]))

    return whole(loss_of, model, lambda call: (list(zip(*pair(n)(call), strict=True)),))


@program()
def list_of_positives(n: int) -> World:
    """A list of (anchor, positive): the others' positives are the negatives."""
    model = net(4)

    def loss_of(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        a, b = (model(torch.stack(side)) for side in zip(*batch, strict=True))
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    def batch(call: int) -> Batch:
        sides = floats(call, n, WIDE), floats(call, n, WIDE, more=9)
        return (list(zip(*sides, strict=True)),)

    return whole(loss_of, model, batch)


@program()
def two_columns(n: int) -> World:
    """[anchors, positives], as sentence-transformers has them: a list of two, not two rows."""
    model = net(HIDDEN)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        a, b = map(model, batch)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return whole(
        loss_of, model, lambda call: ([floats(call, n, WIDE), floats(call, n, WIDE, more=9)],)
    )
