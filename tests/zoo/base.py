"""Small models and steps that the suites share. Everything is seeded and in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from helpers.seeds import seed_all
from torch import nn
from torch.nn.utils import clip_grad_norm_

SEED = 20240607
BATCH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    """Convolution, batch normalisation and dropout: buffers that move, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 5 * 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The demo's model at the size of the sweep: 2 layers, width 32, T 16."""

    def __init__(self, vocab: int = 64, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def _mlp_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(BATCH, 6, dtype=dtype), "y": torch.randint(0, 3, (BATCH,))}


def _conv_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(BATCH, 2, 5, 5, dtype=dtype), "y": torch.randint(0, 3, (BATCH,))}


def _gpt_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (BATCH, 17))
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


KINDS: dict[str, tuple[type[nn.Module], Callable[[torch.dtype], dict[str, torch.Tensor]]]] = {
    "mlp": (MLP, _mlp_batch),
    "conv": (ConvNet, _conv_batch),
    "gpt": (GPT, _gpt_batch),
}


@dataclass
class World:
    """One freshly made model with its optimizer and batches."""

    kind: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[dict[str, torch.Tensor]]
    losses: list[float] = field(default_factory=list)
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.model(batch["x"])
        return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())

    def state(self) -> dict[str, Any]:
        """Everything that must be equal bit for bit."""
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "buffers": [b.detach().clone() for b in self.model.buffers()],
            "gradients": self.gradients,
            "losses": self.losses,
            "rng": torch.get_rng_state(),
        }


def make_world(
    kind: str, *, dtype: torch.dtype = torch.float32, optimizer: str = "adamw", steps: int = 3
) -> World:
    seed_all(SEED)
    model_type, batch_of = KINDS[kind]
    model = model_type().to(dtype)
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elif optimizer == "foreach":
        made = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    elif optimizer == "foreach sgd":
        made = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    elif optimizer == "fused":
        made = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        made = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return World(kind, model, made, [batch_of(dtype) for _ in range(steps)])


def note_gradients(world: World) -> None:
    """A copy of the gradients as the optimizer sees them; outside budget and faults."""
    world.gradients.append(
        [None if p.grad is None else p.grad.numpy().copy() for p in world.model.parameters()]  # type: ignore[misc]
    )


def whole_step(world: World) -> Callable[[dict[str, torch.Tensor]], float]:
    """zero_grad, forward, backward, clip, step: as people write it."""
    model, optimizer = world.model, world.optimizer

    def step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = world.loss(batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def loss_step(world: World) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """For backward=True: only the loss."""
    model = world.model

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())

    return step


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    import numpy as np

    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def difference(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ, for the message of a failed test."""
    if isinstance(a, dict):
        return [line for k in a for line in difference(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in difference(x, y, f"{path}[{i}]")
        ]
    return [] if same(a, b) else [path]
