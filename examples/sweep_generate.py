"""A sweep over graph tasks whose evaluation generates for 40,000 samples in one call.

Each point of the sweep makes a graph, trains a small model on paths through it and then
evaluates it: all contexts are stacked into one tensor and handed to `model.generate`. The
softmax over the vocabulary alone would take gigabytes, so the program dies in its first
evaluation; `--plain` shows that. One line differs here:

    predicted = oomkit.map(model.generate, contexts)

The largest point does not fit at all, its embedding is over the budget: it ends in an error
of its own, and the sweep goes on. Afterwards each point is evaluated with fixed batch sizes,
to compare: what would somebody have got who had guessed the best one?

    python examples/sweep_generate.py             # a minute on a laptop, budget 24 MiB
    python examples/sweep_generate.py --plain     # the program without oomkit
    python examples/sweep_generate.py --device cuda   # full size, budget 15.5 GiB
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import oomkit

LENGTH = 8  # nodes of a path that are given
NEW = 2  # nodes that are generated
LABELS = 10  # tokens for each node of the graph


# --- the program ---


class PathModel(nn.Module):
    """Reads a path and says the next node: an embedding and a projection as large."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.projection = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.reader(self.embedding(tokens))
        return self.projection(states[:, -1])

    @torch.no_grad()
    def generate(self, contexts: torch.Tensor, new_tokens: int = NEW) -> torch.Tensor:
        tokens = contexts
        for _ in range(new_tokens):
            likely = self(tokens).softmax(dim=1)
            tokens = torch.cat([tokens, likely.argmax(dim=1, keepdim=True)], dim=1)
        return tokens


def make_samples(graph_d: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Paths along a graph in which each node has one successor, in token numbers."""
    generator = torch.Generator().manual_seed(graph_d)
    start = torch.randint(graph_d, (count, 1), generator=generator)
    steps = torch.arange(LENGTH + NEW) * 7
    return list((((start + steps) % graph_d) * LABELS).to(device))


def train(model: PathModel, samples: list[torch.Tensor], steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        paths = torch.stack(samples[32 * step : 32 * (step + 1)])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(paths[:, :LENGTH]), paths[:, LENGTH])
        loss.backward()
        optimizer.step()


def evaluate_samples(model: PathModel, samples: list[torch.Tensor], plain: bool) -> float:
    """The share of paths that are continued rightly."""
    paths = torch.stack(samples)
    contexts = paths[:, :LENGTH]
    if plain:
        predicted = model.generate(contexts)
    else:
        predicted = oomkit.map(model.generate, contexts)
    return float((predicted[:, LENGTH:] == paths[:, LENGTH:]).all(dim=1).float().mean())


# --- the sweep ---


@dataclass
class Scale:
    device: torch.device
    graph_ds: list[int]
    samples: int
    budget: str | int
    sizes: list[int]  # fixed batch sizes to compare with
    compared: int  # samples that they are timed with
    training: int = 4  # steps


@dataclass
class Point:
    graph_d: int
    error: str = ""
    accuracy: float = 0.0
    same: float = 0.0  # share of tokens that a fixed size generates as well
    parts: str = ""
    ooms: int = 0
    first: float = 0.0  # samples per second, while the size is being found
    steady: float = 0.0
    fixed: dict[int, float | None] = field(default_factory=dict)  # None: out of memory

    @property
    def best(self) -> tuple[int, float]:
        rates = [(rate, size) for size, rate in self.fixed.items() if rate is not None]
        rate, size = max(rates)
        return size, rate


def clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()  # others may use the machine
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def rate(device: torch.device, count: int, run: Callable[[], object]) -> float:
    begin = clock(device)
    run()
    return count / max(clock(device) - begin, 1e-9)


def in_fixed_parts(model: PathModel, contexts: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([model.generate(part) for part in contexts.split(size)])


def compare(point: Point, model: PathModel, samples: list[torch.Tensor], scale: Scale) -> None:
    """Fixed sizes and oomkit in turn over the same samples; the best time of each counts."""
    contexts = torch.stack(samples[: scale.compared])[:, :LENGTH]

    def predict(contexts: torch.Tensor) -> torch.Tensor:
        return oomkit.map(model.generate, contexts)  # sizes are remembered for this line

    def timed(run: Callable[[], object]) -> float:
        return rate(scale.device, len(contexts), run)

    for _ in range(2):
        predict(contexts)  # finds its size for so many
    for _ in range(9):
        for size in scale.sizes:
            try:
                once = timed(lambda size=size: in_fixed_parts(model, contexts, size))  # type: ignore[misc]
            except torch.OutOfMemoryError:
                point.fixed[size] = None
                continue
            point.fixed[size] = max(once, point.fixed.get(size) or 0.0)
        point.steady = max(point.steady, timed(lambda: predict(contexts)))
    tokens = in_fixed_parts(model, contexts, point.best[0])
    point.same = float((tokens == predict(contexts)).float().mean())


def run_point(graph_d: int, scale: Scale, plain: bool) -> Point:
    point = Point(graph_d)
    try:
        with torch.device(scale.device):
            torch.manual_seed(0)
            model = PathModel(LABELS * graph_d)
        samples = make_samples(graph_d, scale.samples, scale.device)
        train(model, samples, scale.training)
        if plain:
            point.accuracy = evaluate_samples(model, samples, plain)
            return point
        point.first = rate(
            scale.device,
            len(samples),
            lambda: setattr(point, "accuracy", evaluate_samples(model, samples, plain)),
        )
        compare(point, model, samples, scale)
    except torch.OutOfMemoryError as error:
        if plain:
            raise
        point.error = str(error).splitlines()[0]
    return point


# --- what is printed ---


class Noted(logging.Handler):
    """What oomkit logs when it makes parts smaller."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sizes: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.msg.startswith("%s step="):
            self.sizes.append(int(record.args[3]))  # type: ignore[call-overload]


def table_of(points: list[Point], scale: Scale) -> Table:
    table = Table(title=f"{scale.samples:,} samples, budget {scale.budget}")
    for name in ("vocabulary", "parts", "OOMs", "same tokens", "samples/s: first", "later",
                 "best fixed size", "samples/s", "later / best"):  # fmt: skip
        table.add_column(name, justify="right")
    for point in points:
        vocabulary = f"{LABELS * point.graph_d:,}"
        if point.error:
            table.add_row(vocabulary, "-", "-", "does not fit", *["-"] * 5)
            continue
        size, best = point.best
        table.add_row(
            vocabulary, point.parts, str(point.ooms), f"{point.same:.1%}",
            f"{point.first:,.0f}", f"{point.steady:,.0f}", f"{size:,}", f"{best:,.0f}",
            f"{point.steady / best:.0%}",
        )  # fmt: skip
    return table


def sweep(scale: Scale, console: Console, plain: bool) -> list[Point]:
    noted = Noted()
    logging.getLogger("oomkit").addHandler(noted)
    points = []
    with oomkit.limit_memory(scale.budget, device=scale.device):
        for graph_d in scale.graph_ds:
            noted.sizes.clear()
            point = run_point(graph_d, scale, plain)
            point.ooms = len(noted.sizes)
            point.parts = f"<= {noted.sizes[-1]:,}" if noted.sizes else "whole"
            points.append(point)
            what = point.error or f"{scale.samples:,} paths evaluated"
            console.print(f"graph_d={graph_d:,}: {what}", highlight=False, soft_wrap=True)
    logging.getLogger("oomkit").removeHandler(noted)
    return points


def scale_of(options: argparse.Namespace) -> Scale:
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        return Scale(device, [1_000, 100_000, 1_000_000, 10_000_000], 40_000, "15.5GiB",
                     [16, 64, 256, 1024], 4_000)  # fmt: skip
    return Scale(device, [250, 1_000, 100_000], 40_000, "24MiB", [64, 256, 1024, 4096], 5_000)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--plain", action="store_true", help="without oomkit: dies")
    parser.add_argument("--samples", type=int, help="how many are evaluated")
    options = parser.parse_args(arguments)
    scale = scale_of(options)
    if options.samples:
        scale.samples = options.samples
        scale.compared = min(scale.compared, options.samples)
    console = Console(width=None if sys.stdout.isatty() else 120)
    points = sweep(scale, console, options.plain)
    if options.plain:
        return 0
    console.print(table_of(points, scale))
    done = [point for point in points if not point.error]
    worst = min(point.steady / point.best[1] for point in done)
    console.print(
        f"{len(done)} of {len(points)} points evaluated, the others each ended in one error. "
        f"Against the best fixed size: {worst:.0%} at least.",
        highlight=False,
    )
    return 0 if worst >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
