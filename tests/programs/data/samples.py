"""Other batches: several tasks, views, types with a split=, no batch at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..world import ROWS, World, program
from .batches import CLASSES, FEATURES, Net


def _rows(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, FEATURES).double(), torch.randint(0, CLASSES, (rows,))


def _net(world: World, classes: int = CLASSES) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(classes).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world.keep(model, optimizer)
    return model, optimizer


# --- views ---


def _contrast(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """NT-Xent: every other row of both views is a negative."""
    both = F.normalize(torch.cat([first, second]), dim=-1)
    scores = (both @ both.T / 0.5).fill_diagonal_(-1e9)
    rows = len(first)
    other = torch.cat([torch.arange(rows, 2 * rows), torch.arange(rows)])
    return F.cross_entropy(scores, other)


@program("refused", decorated="@oomkit.auto_batch(verify=True)", says="cannot split .* exactly")
def two_views(world: World) -> None:
    """SimCLR: two views of each row in a tuple, and labels that are not used."""
    model, optimizer = _net(world)

    @world.auto_batch(verify=True)
    def train_step(batch: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        (first, second), _ = batch
        optimizer.zero_grad()
        loss = _contrast(model(first), model(second))
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, y = _rows()
        world.note(train_step(((x, x + 0.1 * torch.randn_like(x)), y)))


@program(
    "refused",
    decorated="@oomkit.auto_batch, on the function of the loss",
    says="cannot split .* exactly",
    caller_backward=True,
)
def two_views_returned(world: World) -> None:
    """The same as a loss that is returned."""
    # The loss that was returned before memory ran out is the whole batch's: it is not compared.
    model, optimizer = _net(world)

    @world.auto_batch
    def compute_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return _contrast(model(first), model(second))

    for _ in range(3):
        x, _ = _rows()
        loss = compute_loss(x, x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("equal")
def two_views_alone(world: World) -> None:
    """SimSiam: each row is compared with its own other view only; a list of two views."""
    model, optimizer = _net(world)
    predictor = nn.Linear(CLASSES, CLASSES).double()
    optimizer.add_param_group({"params": list(predictor.parameters())})
    world.keep(predictor)

    @world.auto_batch
    def train_step(views: list[torch.Tensor]) -> float:
        first, second = (model(view) for view in views)
        optimizer.zero_grad()
        loss = -F.cosine_similarity(predictor(first), second.detach()).mean() / 2
        loss = loss - F.cosine_similarity(predictor(second), first.detach()).mean() / 2
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, _ = _rows()
        world.note(train_step([x, x + 0.1 * torch.randn_like(x)]))


# --- tasks ---


def _heads(world: World) -> tuple[nn.Module, nn.ModuleDict, torch.optim.Optimizer]:
    body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()).double()
    heads = nn.ModuleDict({"kind": nn.Linear(8, CLASSES), "size": nn.Linear(8, 1)}).double()
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-2)
    world.keep(body, heads, optimizer)
    return body, heads, optimizer


@program("equal")
def several_tasks(world: World) -> None:
    """One input, a dictionary of targets for two heads, a loss for each, chosen by name."""
    body, heads, optimizer = _heads(world)

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> dict[str, Any]:
        features = body(batch["x"])
        targets = batch["targets"]
        losses = {
            "kind": F.cross_entropy(heads["kind"](features), targets["kind"]),
            "size": F.mse_loss(heads["size"](features)[:, 0], targets["size"]),
        }
        loss = losses["kind"] + 0.5 * losses["size"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "parts": {k: v.item() for k, v in losses.items()}}

    for _ in range(3):
        x, y = _rows()
        told = train_step({"x": x, "targets": {"kind": y, "size": x.sum(1)}})
        world.note(told["loss"])
        world.note(told["parts"]["size"])


def _train_joint(world: World, rows: dict[str, int]) -> None:
    body, heads, optimizer = _heads(world)

    @world.auto_batch
    def train_step(batches: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> float:
        optimizer.zero_grad()
        x, y = batches["kind"]
        loss = F.cross_entropy(heads["kind"](body(x)), y)
        x, y = batches["size"]
        loss = loss + F.mse_loss(heads["size"](body(x))[:, 0], y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, y = _rows(rows["kind"])
        other, _ = _rows(rows["size"])
        world.note(train_step({"kind": (x, y), "size": (other, other.sum(1))}))


@program("equal")
def joint_loaders(world: World) -> None:
    """A batch from each of two loaders, of one size: Lightning's CombinedLoader."""
    _train_joint(world, {"kind": ROWS, "size": ROWS})


@program("refused", says=r"batches\['kind'\].*\[7, 6\].*batches\['size'\].*\[5, 6\]")
def joint_loaders_of_two_sizes(world: World) -> None:
    """The same of two sizes: which of them are the rows?"""
    _train_joint(world, {"kind": ROWS, "size": 5})


@program("equal")
def tasks_in_turn(world: World) -> None:
    """A task per call, by its name; the batches of the tasks have different sizes."""
    body, heads, optimizer = _heads(world)
    criterion = {"kind": F.cross_entropy, "size": lambda out, y: F.mse_loss(out[:, 0], y)}

    @world.auto_batch
    def train_step(task: str, x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = criterion[task](heads[task](body(x)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for rows in (ROWS, 5):
        x, y = _rows(rows)
        world.note(train_step("kind", x, y))
        x, _ = _rows(rows - 1)
        world.note(train_step("size", x, x.sum(1)))


@program("equal")
def last_batch_smaller(world: World) -> None:
    """A loader without drop_last; a table as an argument, as long as the last batch."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor, prior: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) + prior, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    prior = torch.tensor([0.1, 0.2, 0.3, 0.4]).double().log()
    for rows in (ROWS, 6, CLASSES):
        world.note(train_step(*_rows(rows), prior))


# --- types of one's own, and none ---


class Bag:
    """Rows of a table, in a type of the project's own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def some(self, rows: slice) -> Bag:
        return Bag(self.x[rows], self.y[rows])


def _train_bags(world: World, decorate: Callable[..., Any], returned: bool) -> None:
    model, optimizer = _net(world)

    @decorate
    def train_step(bag: Bag) -> Any:
        optimizer.zero_grad()
        logits = model(bag.x)
        loss = F.cross_entropy(logits, bag.y)
        loss.backward()
        optimizer.step()
        return Bag(logits.detach(), bag.y) if returned else loss.item()

    for _ in range(3):
        told = train_step(Bag(*_rows()))
        world.note(told.x[4].sum() if returned else told)


@program("refused", says="Bag")
def own_type(world: World) -> None:
    """A custom type: the error names it."""
    _train_bags(world, world.auto_batch, returned=False)


def cut(bag: Bag, start: int, length: int) -> Bag:
    return bag.some(slice(start, start + length))


def glue(bags: list[Bag], rows: list[int]) -> Bag:
    assert [len(bag) for bag in bags] == rows
    return Bag(torch.cat([bag.x for bag in bags]), torch.cat([bag.y for bag in bags]))


@program("equal", decorated='@oomkit.auto_batch(batch="bag", split=cut, join=glue)')
def own_type_split_and_joined(world: World) -> None:
    """The same with split= and join=: one comes in, one goes out."""
    decorate = world.auto_batch(batch="bag", split=cut, join=glue)
    _train_bags(world, decorate, returned=True)


@program("refused", says="found no batch|no batch")
def batch_from_iterator(world: World) -> None:
    """The step fetches its batch from an iterator: there is nothing to split."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    batches = iter([_rows() for _ in range(3)])
    for _ in range(3):
        world.note(train_step(batches))


@program("refused", says="found no batch|no batch")
def batch_on_self(world: World) -> None:
    """The batch is an attribute of the trainer: there is nothing to split."""
    model, optimizer = _net(world)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer
            self.batch: Any = None

        @world.auto_batch
        def train_step(self) -> float:
            x, y = self.batch
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

    trainer = Trainer()
    for _ in range(3):
        trainer.batch = _rows()
        world.note(trainer.train_step())


@program("refused", says="1 row|cannot be split|smallest|one sample")
def single_row(world: World) -> None:
    """A batch of one row, which cannot be made smaller."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*_rows(1)))


@program("refused", says="nested")
def nested_tensor(world: World) -> None:
    """A nested tensor of rows of several lengths: the error names it."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(rows: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        x = torch.nested.to_padded_tensor(rows, 0.0).sum(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        lengths = torch.randint(1, 4, (ROWS,)).tolist()
        rows = [torch.randn(n, FEATURES).double() for n in lengths]
        world.note(train_step(torch.nested.nested_tensor(rows), _rows()[1]))


@program("equal", decorated='@oomkit.auto_batch(static=("table", "class_weights"))')
def table_and_weights_static(world: World) -> None:
    """As many classes and entries as rows: a table and class weights are passed whole."""
    model, optimizer = _net(world, ROWS)

    @world.auto_batch(static=("table", "class_weights"), reduction="mean")
    def train_step(
        rows: torch.Tensor, y: torch.Tensor, table: torch.Tensor, class_weights: torch.Tensor
    ) -> float:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(table[rows]), y, weight=class_weights, reduction="none")
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    table = torch.randn(ROWS, FEATURES).double()
    weights = torch.rand(ROWS).double() + 0.5
    for _ in range(3):
        rows, y = torch.randint(0, ROWS, (ROWS,)), torch.randint(0, ROWS, (ROWS,))
        world.note(train_step(rows, y, table, weights))
