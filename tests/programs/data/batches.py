"""Kinds of batches: data classes, named tuples, mappings, arrays, keywords, class weights."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..world import ROWS, World, program

FEATURES = 6
CLASSES = 4


class Net(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh())
        self.head = nn.Linear(12, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _net(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)
    return model, optimizer


def _rows(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, FEATURES).double(), torch.randint(0, CLASSES, (rows,))


def _train(
    world: World, make: Callable[[torch.Tensor, torch.Tensor], Any], read: Callable[[Any], Any]
) -> None:
    """Three steps on batches that `make` makes and `read` takes apart."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(batch: Any) -> float:
        x, y = read(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(make(*_rows())))


@dataclass
class Examples:
    x: torch.Tensor
    y: torch.Tensor
    split: str = "train"
    weight: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Frozen:
    """Checks what it is given, and computes a field that its __init__ does not take."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError("as many labels as rows")
        object.__setattr__(self, "rows", len(self.x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


@program("equal")
def data_class(world: World) -> None:
    """A data class with a length, a string and a field that is None."""
    _train(world, Examples, lambda batch: (batch.x, batch.y))


@program("equal")
def data_class_frozen(world: World) -> None:
    """A frozen data class whose __post_init__ checks its fields; the rows are not read."""
    _train(world, Frozen, lambda batch: (batch.x, batch.y))


@program("equal")
def data_class_slots(world: World) -> None:
    """A frozen data class with slots and keyword-only fields, inside a dictionary."""
    _train(
        world,
        lambda x, y: {"train": Slots(x=x, y=y)},
        lambda batch: (batch["train"].x, batch["train"].y),
    )


@program("equal", found={"reduction": "sum"})
def data_class_counts(world: World) -> None:
    """A frozen data class that remembers its number of rows, and a step that divides by it: a sum,
    as the proof finds."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(batch: Frozen) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum") / batch.rows
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(Frozen(*_rows())))


@program("equal")
def named_tuple(world: World) -> None:
    """A named tuple with a name beside its tensors."""
    _train(world, Pair, lambda batch: (batch.x, batch.y))


@program("equal")
def named_tuple_nested(world: World) -> None:
    """The loader's default collation of nested samples: tuples in dictionaries in a list."""
    _train(
        world,
        lambda x, y: [{"views": (x, x.flip(1)), "meta": {"id": torch.arange(len(x))}}, [y]],
        lambda batch: (batch[0]["views"][0] + batch[0]["views"][1], batch[1][0]),
    )


class Attributes(dict[str, Any]):
    """A dictionary with its keys as attributes, as many projects have one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@program("equal")
def user_dict(world: World) -> None:
    """A UserDict."""
    _train(world, lambda x, y: UserDict(x=x, y=y), lambda batch: (batch["x"], batch["y"]))


@program("equal")
def ordered_and_default_dict(world: World) -> None:
    """An OrderedDict that holds a defaultdict."""

    def make(x: torch.Tensor, y: torch.Tensor) -> Any:
        labels: defaultdict[str, Any] = defaultdict(list)
        labels["y"] = y
        return OrderedDict(x=x, labels=labels)

    def read(batch: Any) -> Any:
        assert type(batch) is OrderedDict and batch["labels"]["none"] == []
        return batch["x"], batch["labels"]["y"]

    _train(world, make, read)


@program("equal")
def attribute_dict(world: World) -> None:
    """A custom dictionary, whose keys are also attributes."""
    _train(world, lambda x, y: Attributes(x=x, y=y), lambda batch: (batch.x, batch.y))


@program("equal")
def numpy_rows(world: World) -> None:
    """Rows of numpy arrays, as they come out of a memory map: from_numpy in the step."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
        inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "predicted": logits.argmax(1).numpy()}

    for _ in range(3):
        x, y = _rows()
        told = train_step(x.numpy(), y.numpy())
        assert told["predicted"].shape == (ROWS,)
        world.note(told["loss"])
        world.note(told["predicted"].sum())


@program("equal")
def numpy_indices(world: World) -> None:
    """The batch is an array of indices into a data set that the step knows."""
    model, optimizer = _net(world)
    data, labels = _rows(40)

    @world.auto_batch
    def train_step(indices: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        return loss.item()

    order = np.random.permutation(40)
    for start in range(0, 21, ROWS):
        world.note(train_step(order[start : start + ROWS]))


@program("equal")
def numpy_beside_tensors(world: World) -> None:
    """A dictionary of tensors and arrays: sample weights as float64, ids as int64."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> float:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        optimizer.zero_grad()
        loss = (losses * torch.as_tensor(batch["importance"])).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, y = _rows()
        importance = np.random.rand(ROWS)
        world.note(train_step({"x": x, "y": y, "importance": importance, "id": np.arange(ROWS)}))


@program("equal", decorated="@oomkit.auto_batch, arguments by name only")
def keywords_only(world: World) -> None:
    """Every argument is passed by name, in another order each time; a flag and a default."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(
        *, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, train: bool = True
    ) -> float:
        model.train(train)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        return loss.item()

    for step in range(3):
        x, y = _rows()
        if step % 2:
            world.note(train_step(labels=y, inputs=x))
        else:
            world.note(train_step(smoothing=0.1, inputs=x, labels=y))


@program("equal", decorated="@oomkit.auto_batch, called as `train_step(**batch)`")
def keywords_of_any_name(world: World) -> None:
    """`def train_step(**batch)`: the names are the dictionary's."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(**batch: torch.Tensor) -> float:
        labels = batch.pop("labels")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**batch), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, y = _rows()
        world.note(train_step(x=x, labels=y))


def _train_weighted(world: World, labels: int, weigh: Callable[..., torch.Tensor]) -> None:
    """As many classes as rows; the weights of the classes are an argument."""
    model = Net(ROWS).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = weigh(model(x), y, weights)
        loss.backward()
        optimizer.step()
        return loss.item()

    weights = torch.linspace(1.0, 9.0, ROWS).double()
    for _ in range(3):
        world.note(train_step(_rows()[0], torch.randint(0, labels, (ROWS,)), weights))


@program("refused", says="weights")
def class_weights_of_batch_size(world: World) -> None:
    """Class weights as an argument, as many classes as rows: the error names them."""
    _train_weighted(
        world, ROWS, lambda out, y, weights: F.cross_entropy(out, y, weight=weights).sum()
    )


@program("refused", says="weights", or_equal=True)
def class_weights_gathered(world: World) -> None:
    """The same by hand, `losses * weights[y]`, where slicing them would raise no error."""

    def weigh(out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(out, y, reduction="none") * weights[y]).mean()

    _train_weighted(world, 3, weigh)


@program("refused", says="weights", or_equal=True)
def class_weights_known(world: World) -> None:
    """The same, known from earlier calls: their size stayed while that of the batch changed."""
    model, optimizer = _net(world)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (F.cross_entropy(model(x), y, reduction="none") * weights[y]).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    weights = torch.tensor([1.0, 9.0, 2.0, 5.0]).double()
    for rows in (ROWS, 6, CLASSES):
        world.note(train_step(*_rows(rows), weights))
