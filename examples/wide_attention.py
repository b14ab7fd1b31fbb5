"""A transformer with 17 attentions in each layer, and one decorator that makes it fit.

Each layer has 16 small attentions on slices of 4 channels and one on all 64 channels, in half
precision with a GradScaler. On a 15 GiB card a batch of 32 with 512 tokens dies: "Tried to
allocate 32.00 MiB ... 4.19 MiB is free". By hand one takes a batch of 4 and half the tokens, which
is another training. Here batch and tokens stay, and the gradients are those of the whole batch.

    python examples/wide_attention.py                  # on the CPU, small, under a budget
    python examples/wide_attention.py --device cuda    # 24 layers, 32 x 512 tokens, 14 GiB

The program is run as it is, which must fail; then decorated, under the same budget; then in rows
of one without a budget. Exit status 1 when the last two disagree.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomkit

GIB = 2**30
LOSS_BOUNDS = {"cpu": 1e-4, "cuda": 2e-2}  # relative; fp32, fp16
GRADIENT_BOUNDS = {"cpu": 1e-4, "cuda": 5e-2}  # of the norm of all gradients


@dataclass(frozen=True)
class Scale:
    layers: int
    tokens: int
    batch: int
    steps: int
    classes: int = 100
    blocks: int = 16
    channels: int = 64
    heads: int = 8


SCALES = {
    "cpu": Scale(2, 96, 16, 3),
    "cuda": Scale(24, 512, 32, 5),
    "tiny": Scale(1, 64, 16, 2),
}


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, channels = x.shape
        shape = (rows, tokens, 3, self.heads, channels // self.heads)
        q, k, v = self.mix(x).view(shape).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, channels))


class Layer(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        width = scale.channels // scale.blocks
        self.width = width
        self.blocks = nn.ModuleList(Attention(width, 1) for _ in range(scale.blocks))
        self.across = Attention(scale.channels, scale.heads)
        self.before, self.behind = nn.LayerNorm(scale.channels), nn.LayerNorm(scale.channels)

    def forward(self, x: Tensor) -> Tensor:
        slices = self.before(x).split(self.width, dim=-1)
        found = [block(part) for block, part in zip(self.blocks, slices, strict=True)]
        x = x + torch.cat(found, dim=-1)
        return x + self.across(self.behind(x))


class Wide(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, scale.channels)
        self.layers = nn.ModuleList(Layer(scale) for _ in range(scale.layers))
        self.head = nn.Linear(scale.channels, scale.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Program:
    """The training as it was written: nothing in it knows of memory."""

    def __init__(self, scale: Scale, device: str) -> None:
        torch.manual_seed(0)
        self.scale, self.device = scale, device
        self.model = Wide(scale).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
        self.gradients: Tensor | None = None  # of the first update

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.float16, enabled=self.device == "cuda"):
            return F.cross_entropy(self.model(tokens).float(), labels)

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(tokens, labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def step_in_rows(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The same by hand, a row at a time: what the others are compared with."""
        self.optimizer.zero_grad()
        losses = []
        for row, label in zip(tokens.split(1), labels.split(1), strict=True):
            loss = self.loss(row, label)
            self.scaler.scale(loss / len(tokens)).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return torch.stack(losses).mean()

    def train(self, step: Callable[[Tensor, Tensor], Any]) -> list[float]:
        scale, losses = self.scale, []
        for number in range(scale.steps):
            drawn = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 1000, (scale.batch, scale.tokens), generator=drawn)
            labels = torch.randint(0, scale.classes, (scale.batch,), generator=drawn)
            losses.append(float(step(tokens.to(self.device), labels.to(self.device))))
            if number == 0:
                parts = [
                    p.grad.flatten().cpu() for p in self.model.parameters() if p.grad is not None
                ]
                self.gradients = torch.cat(parts)
        return losses


def budget_of(scale: Scale, device: str) -> int:
    """14 GiB of a card; on the CPU two thirds of what the program needs."""
    if device == "cuda":
        return 14 * GIB
    program = Program(scale, device)
    with oomkit.guard(label="measured") as guard:
        program.train(program.step)
    return int((guard.records[-1].peak_allocated or 0) * 2 / 3)


def as_it_is(scale: Scale, device: str, budget: int) -> str:
    """How the program ends under the budget."""
    program = Program(scale, device)
    try:
        with oomkit.limit_memory(budget, device=device):
            program.train(program.step)
    except torch.OutOfMemoryError as error:
        return str(error).split(". ")[0]
    return "it fits: nothing to show"


def decorated(scale: Scale, device: str, budget: int) -> tuple[Program, list[float], Any]:
    program = Program(scale, device)
    step = oomkit.auto_batch(program.step, label="wide")  # the only change
    with oomkit.limit_memory(budget, device=device):
        losses = program.train(step)
    return program, losses, step.records


def agree(
    device: str, ours: tuple[Program, list[float]], theirs: tuple[Program, list[float]]
) -> bool:
    differs = max(abs(a - b) / abs(b) for a, b in zip(ours[1], theirs[1], strict=True))
    one, other = ours[0].gradients, theirs[0].gradients
    assert one is not None and other is not None
    apart = float((one - other).norm() / other.norm())
    print(f"losses differ by {differs:.1e}, first gradients by {apart:.1e} of their norm")
    return differs <= LOSS_BOUNDS[device] and apart <= GRADIENT_BOUNDS[device]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=sorted(SCALES), help="default: by the device")
    options = parser.parse_args(arguments)
    device, scale = options.device, SCALES[options.scale or options.device]
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    oomkit.limit_memory(None, device="cpu")  # tensors are counted from here on
    budget = budget_of(scale, device)
    print(f"batch {scale.batch} x {scale.tokens} tokens, budget {budget / GIB:.3g} GiB")
    print(f"as it is:   {as_it_is(scale, device, budget)}")
    oomkit.cleanup()
    program, losses, records = decorated(scale, device, budget)
    last = records[-1]
    print(
        f"decorated:  {sum(record.ooms for record in records)} OOMs, micro-batch "
        f"{last.micro_batch_size}, accumulation {last.accumulation_steps}, peak "
        f"{(last.peak_allocated or 0) / GIB:.3g} GiB"
    )
    reference = Program(scale, device)
    good = agree(device, (program, losses), (reference, reference.train(reference.step_in_rows)))
    print("agrees with the same training a row at a time" if good else "DISAGREES")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
