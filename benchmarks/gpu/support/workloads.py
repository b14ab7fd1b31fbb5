"""What is trained: a GPT of the size of GPT-2 124M, and a network like ResNet-50. Random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Setup


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.mix(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, before: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(True), nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        same = stride == 1 and before == outer
        self.way = nn.Identity() if same else nn.Conv2d(before, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.way(x))


def convolutions(stages: tuple[int, ...], width: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    before = width
    for stage, count in enumerate(stages):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            inner = width << stage
            layers.append(Bottleneck(inner, 4 * inner, stride, before))
            before = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


@dataclass(frozen=True)
class Workload:
    name: str
    rows: int
    build: Callable[[], nn.Module]
    batch: Callable[[int, str], tuple[Tensor, Tensor]]

    def start(self, setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device(setup.device):  # the host takes long to draw so many numbers
            model = self.build()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not setup.dry)

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float().flatten(0, -2), y.flatten())


def workloads(dry: bool) -> dict[str, Workload]:
    layers, width, heads, length, words = (1, 16, 2, 16, 64) if dry else (12, 768, 12, 1024, 50257)
    size, stages, channels = (32, (1, 1), 4) if dry else (224, (3, 4, 6, 3), 64)

    def tokens(rows: int, device: str) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, words, (rows, length + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:].contiguous()

    def images(rows: int, device: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, size, size, device=device)
        return x, torch.randint(0, 1000, (rows,), device=device)

    gpt = Workload(
        "gpt2-124m", 16 if dry else 96, lambda: GPT(layers, width, heads, length, words), tokens
    )
    net = Workload(
        "resnet50-like", 16 if dry else 512, lambda: convolutions(stages, channels), images
    )
    return {work.name: work for work in (gpt, net)}
