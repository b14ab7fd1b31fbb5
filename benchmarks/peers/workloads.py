"""Five small programs: what is trained or evaluated, on which batches.

A part is a tuple (x, y, ids) of some rows of a whole batch. `ids` number the samples of
the run: the model has one number for each (`seen`), and the loss adds a term whose
gradient there is exactly the weight with which a sample entered. A sample that is lost
has no weight in any update, one that is counted twice has twice its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Part = tuple[Tensor, Tensor, Tensor]
PAD = -100
FIRST = 10  # batches that the way to the steady state is counted over


class Counted(nn.Module):
    """A model with one number per sample of the run."""

    def __init__(self, net: nn.Module, samples: int) -> None:
        super().__init__()
        self.net = net
        self.seen = nn.Parameter(torch.zeros(samples))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Rows(Dataset):
    """All samples of a run, handed out as parts (a whole part at a time, without a loop)."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.rows * self.work.steps

    def __getitems__(self, ids: Sequence[int]) -> Part:
        self.work.pause()
        return self.work.part(torch.tensor(ids))


def same(part: Part) -> Part:
    return part


@dataclass
class Work:
    """One workload. `built` is told of each model and optimizer that a program makes,
    `result` of each output of an evaluation; `pause` is called before data is handed out,
    `finished` with oomkit's step at the end."""

    name: str
    rows: int  # of a whole batch
    share: float  # of the whole batch's activations that the budget has room for
    net: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Tensor, Tensor]]  # (rows, steps) -> all x, all y
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    training: bool = True
    coupled: bool = False  # samples of a micro-batch act on each other (BatchNorm)
    steps: int = 20
    block: int = 1  # steps that are timed at once, beside as many of the oracle's
    built: Callable[[nn.Module, torch.optim.Optimizer | None], None] = lambda *_: None
    restarted: Callable[[], None] = lambda: None  # what was done so far was a search
    result: Callable[[int, Tensor], None] = lambda *_: None
    pause: Callable[[], None] = lambda: None
    finished: Callable[[Any], None] = lambda *_: None  # told of the step, where there is one
    order: Sequence[int] | None = None  # of the batches; None: all
    plan: tuple[int, int] = (1, 0)  # of the fixed contender: micro-batch, larger first one
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.x, self.y = self.data(self.rows, self.steps)

    def new_model(self) -> Counted:
        torch.manual_seed(2)
        return Counted(self.net(), len(self.x)).train(self.training)

    def build(self) -> tuple[Counted, torch.optim.Optimizer]:
        model = self.new_model()
        optimizer = self.make_optimizer(model.parameters())
        self.built(model, optimizer)
        return model, optimizer

    def build_model(self) -> Counted:
        model = self.new_model()
        self.built(model, None)
        return model

    def part(self, ids: Tensor) -> Part:
        """Rows of the data; padding that none of them needs is cut off."""
        x, y = self.x[ids], self.y[ids]
        if y.dim() == 2:
            length = int((y != PAD).sum(1).max())
            x, y = x[:, :length], y[:, :length]
        return x, y, ids

    def batch(self, step: int) -> Part:
        return self.part(torch.arange(step * self.rows, (step + 1) * self.rows))

    def batches(self) -> Iterator[Part]:
        """Programs drop each batch when they are done with it: two at a time are more than some
        models' gradients leave room for, and what a loop holds is nobody's to save."""
        for step in range(self.steps) if self.order is None else self.order:
            self.pause()
            yield self.batch(step)
        self.pause()

    def loader(self, rows: int) -> DataLoader:
        return DataLoader(Rows(self), batch_size=rows, collate_fn=same)

    def weight(self, part: Any) -> int:
        """What the mean of a loss is taken over: rows, or tokens that are not padding."""
        y = part[1]
        return int((y != PAD).sum()) if y.dim() == 2 else y.shape[0]

    def loss(self, model: Counted, part: Part) -> Tensor:
        x, y, ids = part
        out = model(x)
        if y.dim() == 2:
            weights = (y != PAD).sum(1)
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=PAD)
            return loss + (model.seen[ids] * weights).sum() / weights.sum()
        return F.cross_entropy(out, y) + model.seen[ids].mean()

    def predict(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)


def cut(part: Part, start: int, rows: int) -> Part:
    x, y, ids = part
    return x[start : start + rows], y[start : start + rows], ids[start : start + rows]


def accumulate(work: Work, model: Counted, batch: Part, size: int, first: int = 0) -> None:
    """Backward over a whole batch in parts, each with its exact share: what the programs
    of those contenders have in common that leave this to their user."""
    total, start = work.weight(batch), 0
    while start < len(batch[2]):
        part = cut(batch, start, first if first and start == 0 else size)
        (work.loss(model, part) * (work.weight(part) / total)).backward()
        start += len(part[2])


# --- models ---


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.middle = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.middle(x))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1]))))


def conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# --- data ---


def sentences(length: int, words: int, shortest: int) -> Callable[[int, int], Any]:
    """Rows of words; with `shortest` < `length` each batch has a longest row of its own."""

    def make(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(words, (rows * steps, length))
        y = torch.randint(words, (rows * steps, length))
        if shortest < length:
            longest = torch.randint(length // 2 // 8, length // 8 + 1, (steps, 1)) * 8
            longest[0], longest[3] = length * 3 // 4, length
            share = torch.rand(rows * steps, 1).view(steps, rows)
            lengths = (shortest + share * (longest - shortest)).long()
            lengths[:, 0] = longest[:, 0]
            y[torch.arange(length) >= lengths.view(-1, 1)] = PAD
        return x, y

    return make


def images(channels: int, side: int, classes: int) -> Callable[[int, int], Any]:
    def make(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        # One batch's images again and again: only their number matters.
        x = torch.randn(rows, channels, side, side).repeat(steps, 1, 1, 1)
        return x, torch.randint(classes, (rows * steps,))

    return make


def vectors(width: int, classes: int) -> Callable[[int, int], Any]:
    def make(rows: int, steps: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, width).repeat(steps, 1), torch.randint(classes, (rows * steps,))

    return make


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def workloads(pairs: int) -> list[Work]:
    """Each long enough for so many pairs of blocks after the first steps."""
    steps = FIRST + pairs
    return [
        Work(
            "small GPT", 48, 0.4, lambda: GPT(128, 4, 2, 64, 256), sentences(64, 256, 64), adamw,
            steps=steps,
        ),
        Work(
            "conv net, BatchNorm", 64, 0.23, conv_net, images(3, 32, 10), sgd, coupled=True,
            steps=FIRST + 2 * pairs, block=2,  # of 30 ms
        ),
        Work(
            "variable-length LM", 32, 0.5, lambda: GPT(96, 4, 2, 128, 256),
            sentences(128, 256, 12), adamw, steps=steps,
        ),
        Work(
            "big MLP", 1024, 0.75, lambda: mlp(256, 1024, 1024, 16), vectors(256, 16), sgd,
            steps=steps,
        ),
        Work(
            "batched evaluation", 2000, 0.3, lambda: mlp(256, 1024, 1024, 64), vectors(256, 64),
            sgd, training=False, steps=steps,
        ),
    ]  # fmt: skip


def tiny() -> Work:
    """For what is counted over a hundred errors: one step, activations larger than weights."""
    return Work("tiny", 512, 1.0, lambda: mlp(32, 64, 64, 64, 8), vectors(32, 8), sgd, steps=1)
