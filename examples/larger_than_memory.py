"""A model whose parameters, gradients and optimizer state do not fit, trained all the same.

The plain program dies in its first step, whatever the size of its batch: with one row at a time
AdamW's state alone is more than the budget leaves. With `oomkit.auto_batch` it trains. What is
done beyond smaller micro-batches is the ladder, and `record.rung` tells how far up a step was:

    0 split         smaller micro-batches, and nothing else
    1 update        the optimizer's update in parts
    2 state         optimizer state in host memory
    3 activations   what autograd saves for the backward in host memory
    4 recompute     the forward of repeated modules twice

The budget becomes smaller on the way, as if others took a share of the device, so that higher
rungs come into use; at last the host is spared what autograd saves. On the CPU "the host" is
memory outside the budget.

    python examples/larger_than_memory.py                  # under a minute of one core
    python examples/larger_than_memory.py --device cuda    # 0.7 billion parameters, 9 GiB

On the CPU the same training without a limit comes last, for comparison. Exit status 1 when the
plain program does not die, when losses differ, or when the loss does not go down.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import oomkit

MIB = 2**20
LOSS_BOUND = 1e-3  # relative, of every step
RUNGS = ("split", "update", "state", "activations", "recompute", "gradients")
COLOURS = ("#3b6ea5", "#4c9f70", "#d9a441", "#d1642a", "#8e3b8e", "#5a5a5a")

console = Console(highlight=False)


@dataclass(frozen=True)
class Part:
    """Steps under one budget."""

    steps: int
    budget: str
    ladder: str | tuple[str, ...] = "auto"


SPARED = ("update", "state", "recompute")


@dataclass(frozen=True)
class Scale:
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    parts: tuple[Part, ...]


SCALES = {
    "cpu": Scale(
        *(6, 192, 6, 128, 128, 8),
        (Part(12, "40MiB"), Part(12, "30MiB"), Part(12, "24MiB"), Part(12, "26MiB", SPARED)),
    ),
    "cuda": Scale(
        *(12, 2048, 16, 1024, 32768, 8),
        (Part(8, "9GiB"), Part(8, "7.25GiB"), Part(8, "6.75GiB"), Part(8, "7.25GiB", SPARED)),
    ),
    "tiny": Scale(
        *(4, 64, 4, 32, 64, 8),
        (Part(4, "3MiB"), Part(4, "2MiB"), Part(4, "1.85MiB"), Part(4, "2.6MiB", SPARED)),
    ),
}


class Block(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        width = scale.width
        self.heads = scale.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.shrink(F.gelu(self.expand(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.token = nn.Embedding(scale.vocabulary, scale.width)
        self.position = nn.Embedding(scale.context, scale.width)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(scale.layers))
        self.norm = nn.LayerNorm(scale.width)
        self.head = nn.Linear(scale.width, scale.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens_of(scale: Scale, step: int, device: str) -> torch.Tensor:
    """The batch of a step: rows that count in steps of 1 to 3. That can be learnt."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(scale.vocabulary, (scale.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (scale.batch, 1), generator=generator)
    return ((start + stride * torch.arange(scale.context + 1)) % scale.vocabulary).to(device)


Step = Callable[[torch.Tensor], torch.Tensor]


def program(scale: Scale, device: str) -> Step:
    """The training as it was written: its step, which knows nothing of memory."""
    torch.manual_seed(0)
    model = GPT(scale).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- the three runs -------------------------------------------------------------------


def one_row_at_a_time(scale: Scale, device: str) -> str:
    """How the plain program ends under the largest budget, with micro-batches of one row."""
    try:
        with oomkit.limit_memory(scale.parts[0].budget, device=device):
            step = program(scale, device)
            for row in tokens_of(scale, 0, device).split(1):
                step(row)
    except torch.OutOfMemoryError as error:
        return str(error).split(". ")[0]
    return ""


def protected(scale: Scale, device: str) -> list[dict[str, Any]]:
    """What each step was like."""
    notes: list[dict[str, Any]] = []
    plain = None
    for part in scale.parts:
        console.print(f"budget {part.budget}, ladder={part.ladder!r}", markup=False)
        with oomkit.limit_memory(part.budget, device=device):
            plain = plain or program(scale, device)
            step = oomkit.auto_batch(plain, ladder=part.ladder, label="larger")  # the only change
            for _ in range(part.steps):
                begun = time.perf_counter()
                loss = float(step(tokens_of(scale, len(notes), device)))
                record = step.records[-1]
                notes.append(
                    {
                        "step": len(notes) + 1,
                        "budget": oomkit.budget(device).limit,
                        "rung": record.rung,
                        "peak": record.peak_allocated or 0,
                        "micro_batch": record.micro_batch_size,
                        "ooms": record.ooms,
                        "seconds": time.perf_counter() - begun,
                        "loss": loss,
                    }
                )
    return notes


def without_a_limit(scale: Scale, device: str) -> tuple[list[float], int]:
    """Losses and the peak of the plain program."""
    with oomkit.limit_memory(2**50, device=device):
        step = program(scale, device)
        steps = range(sum(part.steps for part in scale.parts))
        losses = [float(step(tokens_of(scale, number, device))) for number in steps]
        return losses, oomkit.memory(device).peak_allocated or 0


# --- what is shown --------------------------------------------------------------------


def by_rung(notes: list[dict[str, Any]]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("rung", "steps", "budget\nMiB", "peak\nMiB", "micro-\nbatch", "OOMs", "s/step", "loss")
    for name in names:
        result.add_column(name, justify="left" if name == "rung" else "right")
    for key in dict.fromkeys((note["budget"], note["rung"]) for note in notes):
        some = [note for note in notes if (note["budget"], note["rung"]) == key]
        seconds = sorted(note["seconds"] for note in some)
        result.add_row(
            f"{key[1]} {RUNGS[key[1]]}",
            f"{some[0]['step']}-{some[-1]['step']}",
            f"{key[0] / MIB:.1f}",
            f"{max(note['peak'] for note in some) / MIB:.1f}",
            str(some[-1]["micro_batch"]),
            str(sum(note["ooms"] for note in some)),
            f"{seconds[len(seconds) // 2]:.2f}",
            f"{some[-1]['loss']:.3f}",
        )
    return result


def picture(path: Path, notes: list[dict[str, Any]], needed: int | None) -> None:
    """Peak memory of each step, in the colour of its rung; the loss beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), dpi=120)
    for rung in sorted({note["rung"] for note in notes}):
        some = [note for note in notes if note["rung"] == rung]
        axes.bar(
            [note["step"] for note in some],
            [note["peak"] / MIB for note in some],
            color=COLOURS[rung],
            label=f"{rung} {RUNGS[rung]}",
            zorder=2,
        )
    steps = [note["step"] for note in notes]
    budgets = [note["budget"] / MIB for note in notes]
    axes.step(steps, budgets, where="mid", color="#b00020", label="budget", zorder=3)
    if needed is not None:
        axes.axhline(needed / MIB, color="#777777", linestyle=":", label="without a limit")
    axes.set_xlabel("step")
    axes.set_ylabel("peak allocated, MiB")
    losses = axes.twinx()
    losses.plot(steps, [note["loss"] for note in notes], color="black", linewidth=1)
    losses.set_ylim(0, None)
    losses.set_ylabel("loss (line)")
    axes.legend(fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def verdict(notes: list[dict[str, Any]], losses: list[float] | None) -> bool:
    ours = [note["loss"] for note in notes]
    good = ours[-1] < ours[0]
    console.print(f"loss {ours[0]:.3f} -> {ours[-1]:.3f}{'' if good else ': IT DID NOT GO DOWN'}")
    if losses is None:
        return good
    apart = max(abs(a - b) / b for a, b in zip(ours, losses, strict=True))
    same = apart <= LOSS_BOUND
    console.print(
        f"{'agrees' if same else 'DISAGREES'} with the plain program without a limit: largest "
        f"loss difference {apart:.1e} relative",
        soft_wrap=True,
    )
    return good and same


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=sorted(SCALES), help="default: by the device")
    parser.add_argument("--output", type=Path, default=Path("larger-output"))
    options = parser.parse_args(arguments)
    device, scale = options.device, SCALES[options.scale or options.device]
    options.output.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    if device == "cpu":
        torch.set_num_threads(1)  # small operations; on a busy machine two threads wait for both
    died = one_row_at_a_time(scale, device)
    budget = scale.parts[0].budget
    console.print(f"plain, one row at a time, budget {budget}: {died or 'IT FITS'}", markup=False)
    oomkit.cleanup()
    notes = protected(scale, device)
    losses, needed = without_a_limit(scale, device) if device == "cpu" else (None, None)
    console.print(by_rung(notes))
    (options.output / "steps.json").write_text(json.dumps(notes, indent=1) + "\n")
    picture(options.output / "larger.png", notes, needed)
    good = verdict(notes, losses)
    return 0 if died and good else 1


if __name__ == "__main__":
    sys.exit(main())
