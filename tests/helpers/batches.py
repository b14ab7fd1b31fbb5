"""Kinds of batches, for the tests of splitting and of the table in docs/reference/batches.md."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

ROWS = 7


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    x: Any
    y: Any
    note: str = "plain"


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


@dataclass
class Checked:
    """Its __post_init__ would refuse a part, and computes what is no field."""

    x: Any
    y: Any
    width: float = field(init=False)

    def __post_init__(self) -> None:
        if len(self.x) != ROWS:
            raise ValueError("built anew")
        self.width = float(self.x.shape[1])
        self.twice = self.x * 2


class Mixin:
    pass


class Derived(Mixin, Plain):
    pass


class Config(dict):  # type: ignore[type-arg]
    """Attributes are entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Loud(collections.OrderedDict):  # type: ignore[type-arg]
    """Indexing does something of its own, and there is an attribute beside the entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = self["x"] + 1

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


class Closed:
    """An object that is moved between devices as batches are."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Closed:
        return self


class Graph(Closed):
    """As PyG's Data: what is inside lies in a store of its own."""

    def __init__(self, x: Any, y: Any) -> None:
        self._store = types.SimpleNamespace(_mapping={"x": x, "y": y})


class Unlike:
    """An object with tensors and nothing that says it is a batch."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(ROWS, 3, generator=generator, dtype=torch.float64)
    return x, torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)


def packed(x: torch.Tensor, sort: bool) -> Any:
    lengths = [(3 * i) % 4 + 1 for i in range(len(x))]
    rows = [x[i].repeat(n, 1) + torch.arange(n)[:, None] for i, n in enumerate(lengths)]
    if sort:
        rows.sort(key=len, reverse=True)
    return pack_sequence(rows, enforce_sorted=sort)


def encoding(x: Any, y: Any) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


def model_output(x: Any, y: Any) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=None, logits=x, hidden_states=(y,))


def read(batch: Any) -> tuple[Any, Any]:
    """x and y of a batch of any kind that can be read."""
    if hasattr(batch, "logits"):
        return batch.logits, batch.hidden_states[0]
    if isinstance(batch, dict | collections.UserDict):
        return batch["x"], batch["y"]
    if hasattr(batch, "x"):
        return batch.x, batch.y
    x, y = batch
    return x, y


# Kinds that are split, as the first column of docs/reference/batches.md has them.
SPLIT: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "dict, nested": lambda x, y: {"x": x, "y": y, "in": [{"y": (y, None, "text", 0.5)}]},
    "OrderedDict": lambda x, y: collections.OrderedDict(y=y, x=x),
    "defaultdict": lambda x, y: collections.defaultdict(list, x=x, y=y),
    "dict with attributes": lambda x, y: Config(x=x, y=y),
    "subclass of dict": lambda x, y: Loud(x=x, y=y),
    "UserDict": lambda x, y: collections.UserDict(x=x, y=y),
    "BatchEncoding": encoding,
    "ModelOutput": model_output,
    "tuple": lambda x, y: (x, y),
    "NamedTuple": Pair,
    "list": lambda x, y: [x, y],
    "data class": Plain,
    "data class, frozen": Frozen,
    "data class with slots": Slotted,
    "data class with __post_init__": Checked,
    "data class, derived": Derived,
    "SimpleNamespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "numpy arrays": lambda x, y: {"x": x.numpy(), "y": y.numpy()},
    "expanded tensor": lambda x, y: (x[:1].expand(len(x), -1), y),
    "transposed tensor": lambda x, y: (x.t().contiguous().t(), y),
    "sparse COO tensor": lambda x, y: (x.to_sparse(), y),
}


def dense(value: Any) -> torch.Tensor:
    value = torch.as_tensor(value)
    return value if value.layout is torch.strided else value.to_dense()


def same(a: Any, b: Any) -> bool:
    """Equal values in containers of equal types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(dense(a), dense(b)) and a.layout == b.layout
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict) and list(a) != list(b):
        return False
    if isinstance(a, dict):
        return all(same(dict.__getitem__(a, k), dict.__getitem__(b, k)) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Slotted):
        return same((a.x, a.y), (b.x, b.y))
    if hasattr(a, "__dict__"):
        return same(dict(vars(a)), dict(vars(b)))
    return bool(a == b)
