"""A byte-level GPT and the text it learns from: an ordinary training program's parts.

Nothing in this file knows about oomkit.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Scale:
    """Sizes of the model and of one batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SCALES = {
    "demo": Scale(layers=4, width=128, heads=4, context=128, batch=32),
    "tiny": Scale(layers=2, width=32, heads=2, context=32, batch=32),
}
VOCABULARY = 256  # one token per byte


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual path. No dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(
            q.view(shape).transpose(1, 2),
            k.view(shape).transpose(1, 2),
            v.view(shape).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.mix(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.shrink(F.gelu(self.expand(self.norm_2(x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, scale.width)
        self.position = nn.Embedding(scale.context, scale.width)
        self.blocks = nn.ModuleList(Block(scale.width, scale.heads) for _ in range(scale.layers))
        self.norm = nn.LayerNorm(scale.width)
        self.head = nn.Linear(scale.width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library() -> np.ndarray:
    """The sources of Python's standard library, one after the other, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return np.frombuffer(b"\n".join(parts), dtype=np.uint8)


def batches(
    scale: Scale, steps: int, seed: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (tokens, next tokens), the same ones for the same seed."""
    text = standard_library()
    generator = np.random.default_rng(seed)
    window = np.arange(scale.context + 1)
    for _ in range(steps):
        starts = generator.integers(0, len(text) - len(window), size=scale.batch)
        rows = torch.from_numpy(text[starts[:, None] + window].astype(np.int64))
        rows = rows.to(device)
        yield rows[:, :-1], rows[:, 1:]
