"""Programs whose rows do not couple: they must come out exact, and not be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomkit

from .judge import Batch, World
from .known import (
    CLASSES,
    HIDDEN,
    WIDE,
    classify,
    drawn,
    floats,
    labels,
    net,
    pair,
    program,
    sgd,
    step_of,
    whole,
)


@program(exact=True)
def classifier(n: int) -> World:
    """A mean of cross entropies, SGD."""
    model = net()
    return whole(classify(model), model, pair(n))


@program(exact=True, rows=7)
def classifier_of_seven(n: int) -> World:
    """The same with an odd batch."""
    model = net()
    return whole(classify(model), model, pair(n))


@program(exact=True, rows=3)
def classifier_of_three(n: int) -> World:
    """A batch of three: slices of two rows and one."""
    model = net()
    return whole(classify(model), model, pair(n))


@program(exact=True, rows=2)
def classifier_of_two(n: int) -> World:
    """A batch of two: every slice is a row."""
    model = net()
    return whole(classify(model), model, pair(n))


@program(exact=True)
def clipped(n: int) -> World:
    """clip_grad_norm_() and AdamW with weight decay; the norm is returned."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "norm": norm}

    return World(step, [model, optimizer], pair(n))


@program(exact=True)
def two_losses(n: int) -> World:
    """Two losses with two backwards through one graph."""
    body, one, two = net(HIDDEN), nn.Linear(HIDDEN, CLASSES).double(), nn.Linear(HIDDEN, 1).double()
    optimizer = sgd(body, one, two)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        h = body(x)
        first, second = F.cross_entropy(one(h), y), two(h).square().mean()
        first.backward(retain_graph=True)
        (0.3 * second).backward()
        optimizer.step()
        return first.item(), second.item()

    return World(step, [body, one, two, optimizer], pair(n))


@program(exact=True)
def local_losses(n: int) -> World:
    """Local learning: each layer has a loss of its own and a graph of its own."""
    body, one, two = (
        net(HIDDEN),
        nn.Linear(HIDDEN, CLASSES).double(),
        nn.Linear(HIDDEN, CLASSES).double(),
    )
    optimizer = sgd(body, one, two)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        h = body(x)
        F.cross_entropy(one(h), y).backward()
        F.cross_entropy(two(h.detach()), y).backward()
        optimizer.step()

    return World(step, [body, one, two, optimizer], pair(n))


@program(exact=True)
def scaled(n: int) -> World:
    """A GradScaler, with unscaling and clipping."""
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return World(step, [model, optimizer, scaler], pair(n))


@program(exact=True)
def scaled_by_hand(n: int) -> World:
    """A loss times 1,024, gradients divided by it."""
    model = net()

    def unscale() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(1024.0)

    return whole(lambda x, y: F.cross_entropy(model(x), y) * 1024.0, model, pair(n), unscale)


@program(exact=True)
def dropout(n: int) -> World:
    """Dropout: as the same slices by hand."""
    model = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, 3)).double()
    return whole(classify(model), model, pair(n), hand=True)


@program(exact=True)
def checkpointed(n: int) -> World:
    """Gradient checkpointing, with dropout in what is run again."""
    body = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.Dropout(0.2), nn.Tanh()).double()
    head = nn.Linear(HIDDEN, CLASSES).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(checkpoint(body, x, use_reentrant=False)), y)

    return whole(loss_of, nn.Sequential(body, head), pair(n), hand=True)


@program(exact=True)
def checkpointed_reentrant(n: int) -> World:
    """The reentrant kind: a backward inside the backward."""
    body, head = net(HIDDEN), nn.Linear(HIDDEN, CLASSES).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = checkpoint(body, x.requires_grad_(), use_reentrant=True)
        return F.cross_entropy(head(h), y)

    return whole(loss_of, nn.Sequential(body, head), pair(n))


@program(exact=True)
def sum_declared(n: int) -> World:
    """A sum over the rows, reduction="sum"."""
    model = net()
    options = {"reduction": "sum"}
    return whole(classify(model, reduction="sum"), model, pair(n), options=options)


@program(exact=True)
def decay_in_the_loss(n: int) -> World:
    """A mean and a penalty on the weights: the shares of both add up to one."""
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) + 0.01 * sum(
            p.square().sum() for p in model.parameters()
        )

    return whole(loss_of, model, pair(n))


@program(exact=True)
def moving_average(n: int) -> World:
    """An EMA of the weights, in the last micro-batch."""
    model = net()
    optimizer = sgd(model)
    average = copy.deepcopy(model).requires_grad_(False)
    train = step_of(classify(model), optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        if oomkit.current().is_last:
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
        return loss

    return World(step, [model, average, optimizer], pair(n))


def _scheduled(n: int, make: Callable[[Any], Any], *, metric: bool = False) -> World:
    model = net()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    train = step_of(classify(model), optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        scheduler.step(*([loss] if metric else []))
        return loss

    return World(step, [model, optimizer, scheduler], pair(n))


@program(exact=True)
def scheduler(n: int) -> World:
    """StepLR in the step."""
    return _scheduled(n, partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))


@program(exact=True)
def plateau(n: int) -> World:
    """ReduceLROnPlateau.step(loss): the mean over the batch."""
    make = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    return _scheduled(n, make, metric=True)


@program(exact=True)
def autocast(n: int) -> World:
    """bfloat16 autocast of a float32 model; equal within what bfloat16 can tell."""
    model = net().float()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x.float())
        return F.cross_entropy(out.float(), y)

    return whole(loss_of, model, pair(n), tolerance=5e-2)


@program(exact=True)
def norms_of_rows(n: int) -> World:
    """GroupNorm, InstanceNorm and LayerNorm look at one row at a time."""
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm1d(4),
        nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, CLASSES),
    ).double()  # fmt: skip
    return whole(classify(model), model, lambda call: (floats(call, n, 2, 6), labels(call, n)))


@program(exact=True)
def sparse_embedding(n: int) -> World:
    """Sparse gradients of an embedding."""
    embed, head = nn.Embedding(9, 4, sparse=True).double(), nn.Linear(4, CLASSES).double()
    model = nn.Sequential(embed, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(embed(x).mean(1)), y)

    return World(
        step_of(loss_of, optimizer),
        [model, optimizer],
        lambda call: (labels(call, n, 4, below=9), labels(call, n, more=1)),
    )


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDE, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


@program(exact=True)
def lstm(n: int) -> World:
    """An LSTM over sequences of one length."""
    model = Lstm().double()
    return whole(classify(model), model, lambda call: (floats(call, n, 4, WIDE), labels(call, n)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        return self.head(h.masked_fill(padding[..., None], 0.0).sum(1))


@program(exact=True)
def attention_with_padding(n: int) -> World:
    """MultiheadAttention with dropout and a padding mask: as the same slices by hand."""
    model = Attention().double()

    def loss_of(x: torch.Tensor, padding: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x, padding), y)

    def batch(call: int) -> Batch:
        ends = torch.randint(1, 5, (n, 1), generator=drawn(call, 3))
        return labels(call, n, 4, below=9), torch.arange(4) >= ends, labels(call, n, more=1)

    return whole(loss_of, model, batch, hand=True)


@program(exact=True)
def dict_batch(n: int) -> World:
    """A dict with tensors, names and a number; outputs come back in order."""
    model = net()
    optimizer = sgd(model)

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = F.cross_entropy(out, batch["y"])
        loss.backward()
        optimizer.step()
        hits = (out.argmax(1) == batch["y"]).double().mean()
        return {"loss": loss.detach(), "hits": hits, "guess": out.argmax(1), "name": "train"}

    def batch(call: int) -> Batch:
        x, y = pair(n)(call)
        return ({"x": x, "y": y, "names": [f"row {i}" for i in range(n)], "epoch": 1},)

    return World(step, [model, optimizer], batch)


@program(exact=True)
def weights_of_rows(n: int) -> World:
    """A weight for each row, the mean over rows."""
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(model(x), y, reduction="none") * weight).mean()

    return whole(loss_of, model, lambda call: (*pair(n)(call), floats(call, n, more=2).abs()))


@program(exact=True)
def equal_labels_ignored(n: int) -> World:
    """Each row has as many labels of -100: a mean over tokens is one over rows."""
    model = nn.Sequential(nn.Embedding(9, HIDDEN), nn.Linear(HIDDEN, 9)).double()

    def batch(call: int) -> Batch:
        ids = labels(call, n, 5, below=9)
        return ids, torch.cat([torch.full((n, 2), -100), ids[:, 2:]], 1)

    return whole(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), model, batch)


@program(exact=True)
def hooks_that_are_linear(n: int) -> World:
    """A hook that halves a gradient: linear, so exact."""
    model = net()
    model[0].weight.register_hook(lambda g: g * 0.5)
    return whole(classify(model), model, pair(n))
