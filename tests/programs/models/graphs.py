"""Graphs: several in one object, lists of them, with and without a splitter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oomkit

from ..world import ROWS, World, program


class Data:
    """Some graphs in one, in the manner of PyTorch Geometric: nodes, edges, `batch` and `ptr`."""

    def __init__(self, **fields: torch.Tensor) -> None:
        self.__dict__.update(fields)

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @classmethod
    def from_list(cls, graphs: list[Data]) -> Data:
        sizes = torch.tensor([0, *(len(g.x) for g in graphs)])
        ptr = sizes.cumsum(0)
        return cls(
            x=torch.cat([g.x for g in graphs]),
            edge_index=torch.cat(
                [g.edge_index + p for g, p in zip(graphs, ptr[:-1], strict=True)], dim=1
            ),
            y=torch.cat([g.y for g in graphs]),
            batch=torch.arange(len(graphs)).repeat_interleave(sizes[1:]),
            ptr=ptr,
        )

    def rows(self, start: int, length: int) -> Data:
        """The graphs start ... start + length, as one."""
        first, last = self.ptr[start], self.ptr[start + length]
        edges = self.edge_index
        inside = (edges[0] >= first) & (edges[0] < last)
        return type(self)(
            x=self.x[first:last],
            edge_index=edges[:, inside] - first,
            y=self.y[start : start + length],
            batch=self.batch[first:last] - start,
            ptr=self.ptr[start : start + length + 1] - first,
        )


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, data: Data) -> torch.Tensor:
        source, target = data.edge_index
        summed = torch.zeros_like(data.x).index_add(0, target, data.x[source])
        hidden = torch.relu(self.own(data.x) + self.near(summed))
        pooled = hidden.new_zeros(len(data), 8).index_add(0, data.batch, hidden)
        return self.head(pooled / data.batch.bincount(minlength=len(data))[:, None])


def _graph() -> Data:
    nodes = int(torch.randint(2, 6, ()))
    return Data(
        x=torch.randn(nodes, 4).double(),
        edge_index=torch.randint(0, nodes, (2, 2 * nodes)),
        y=torch.randint(0, 3, (1,)),
    )


def _train_graphs(
    world: World, decorate: Callable[..., Any], read: Callable[[Any], Data], listed: bool
) -> None:
    model = GraphNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @decorate
    def train_step(batch: Any) -> float:
        data = read(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        graphs = [_graph() for _ in range(ROWS)]
        world.note(train_step(graphs if listed else Data.from_list(graphs)))


@program("refused", says="Data")
def graphs(world: World) -> None:
    """Graphs in one object: the error names its type."""
    _train_graphs(world, world.auto_batch, lambda data: data, listed=False)


def rows_of_graphs(data: Data, start: int, length: int) -> Data:
    return data.rows(start, length)


@program("equal", decorated='@oomkit.auto_batch(batch="batch", split=rows_of_graphs)')
def graphs_with_split(world: World) -> None:
    """The same with a split= that cuts it by `ptr`; its len() is the number of graphs."""
    decorate = world.auto_batch(batch="batch", split=rows_of_graphs)
    _train_graphs(world, decorate, lambda data: data, listed=False)


@program("refused", says="batch")
def graphs_in_list(world: World) -> None:
    """A list of graphs, which the step merges into one: nothing in it has rows."""
    _train_graphs(world, world.auto_batch(batch="batch"), Data.from_list, listed=True)


def some_of(graphs: list[Data], start: int, length: int) -> list[Data]:
    return graphs[start : start + length]


@program("equal", decorated='@oomkit.auto_batch(batch="batch", split=some_of)')
def graphs_in_list_split(world: World) -> None:
    """The same with split=: a slice of the list."""
    decorate = world.auto_batch(batch="batch", split=some_of)
    _train_graphs(world, decorate, Data.from_list, listed=True)


@program("equal", decorated="@oomkit.auto_batch, and oomkit.register_splitter(Data, ...)")
def graphs_with_splitter(world: World) -> None:
    """Graphs in one object beside a dictionary, by a registered splitter."""

    class Graphs(Data):
        pass

    if world.decorate:
        oomkit.register_splitter(Graphs, split=rows_of_graphs, size=len)

    model = GraphNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> float:
        data = batch["graphs"]
        optimizer.zero_grad()
        losses = F.cross_entropy(model(data), data.y, reduction="none")
        loss = (losses * batch["importance"]).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        graphs = Graphs.from_list([_graph() for _ in range(ROWS)])
        world.note(train_step({"graphs": graphs, "importance": torch.rand(ROWS).double()}))


@program("refused", says="disagree|edge_index|edges")
def graph_fields(world: World) -> None:
    """The fields of graphs in a dictionary: nodes, edges and graphs have different sizes."""

    def train(data: Data) -> Data:
        return data

    model = GraphNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(fields: dict[str, torch.Tensor]) -> float:
        data = train(Data(**fields))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(vars(Data.from_list([_graph() for _ in range(ROWS)]))))


@program("refused", says="edge_index|nodes|not that of the batch")
def full_graph(world: World) -> None:
    """Node classification on one graph: x and edges as arguments; nodes are not samples."""
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, edge_index: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        source, target = edge_index
        out = model(x)
        out = torch.zeros_like(out).index_add(0, target, out[source])
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x = torch.randn(9, 4).double()
        edges = torch.randint(0, 9, (2, 20))
        edges[:, :2] = torch.tensor([[0, 8], [8, 0]])
        world.note(train_step(x, edges, torch.randint(0, 3, (9,))))
