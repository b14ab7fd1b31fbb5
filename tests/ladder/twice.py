"""A step without recomputation and the same with it: models, and what is compared."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from helpers.seeds import seed_all
from torch import nn
from zoo import SEED

from oomkit._ladder.recompute import Handle, LeftOut, recompute_begin

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]
ROWS, LENGTH, WIDTH = 3, 5, 16


class Block(nn.Module):
    """A transformer's layer, with dropout."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.before(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.after(x)))))


class Model(nn.Module):
    """An embedding, blocks one after the other, a head."""

    def __init__(self, blocks: list[Any], width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def model_of(kind: Callable[[], nn.Module] = Block, count: int = 4) -> Model:
    return Model([kind() for _ in range(count)])


def states(model: nn.Module) -> list[tuple[str, Any]]:
    """What a step may move, as copies."""
    found: list[tuple[str, Any]] = [(n, b.detach().clone()) for n, b in model.named_buffers()]
    for name, p in model.named_parameters():
        grad = None if p.grad is None else p.grad.detach().clone()
        found += [(name, p.detach().clone()), (f"{name}.grad", grad)]
    found += [("torch", torch.get_rng_state()), ("random", random.getstate())]
    return [*found, ("numpy", pickle.dumps(np.random.get_state()))]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    return loss


@contextmanager
def worn(handle: Handle | None) -> Iterator[None]:
    if handle is None:
        yield
        return
    handle.enter()
    try:
        yield
    finally:
        handle.leave()


class Ran:
    """What a training run has left, and how many forwards it computed again."""

    def __init__(self, model: nn.Module, step: Step, rung: LeftOut | None, calls: int) -> None:
        seed_all(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        self.model, self.left_out = model, rung
        self.handle = None if rung is None else recompute_begin([model], rung)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
        self.seen: list[tuple[str, Any]] = []
        for call in range(calls):
            x = torch.randn(ROWS, LENGTH, WIDTH)
            optimizer.zero_grad()
            with worn(self.handle):
                loss = step(model, x)
            self.seen += [(f"loss {call}", loss.detach().clone()), *states(model)]
            optimizer.step()


def differences(a: Ran, b: Ran) -> list[str]:
    assert [name for name, _ in a.seen] == [name for name, _ in b.seen]
    return [
        name
        for (name, was), (_, now) in zip(a.seen, b.seen, strict=True)
        if not (torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now)
    ]


def both(model: nn.Module, step: Step = plain, calls: int = 3, but: Any = None) -> Ran:
    """Train a copy plainly and the model with recomputation: bit by bit the same.

    Args:
        but: called with each model before it is trained.
    """
    print(f"seed {SEED}")
    other = copy.deepcopy(model)
    for each in (other, model):
        if but is not None:
            seed_all(SEED)
            but(each)
    expected = Ran(other, step, None, calls)
    found = Ran(model, step, LeftOut(), calls)
    odd = differences(expected, found)
    if odd:
        raise AssertionError(f"not the same: {len(odd)}, first {odd[:5]}")
    finite = [v for _, v in expected.seen if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert all(v.isfinite().all() for v in finite)
    return found
