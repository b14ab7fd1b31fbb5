"""One training run of the demo, in a process of its own.

`main` is the program; what is special to the demo (figures that the three runs are
compared by) is kept in `Notes`, outside the training step.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from samples import Samples
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import oomkit

SEED = 1234
EVERYTHING = 1 << 50  # a limit that is never reached: it only makes the CPU count

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Settings:
    """What the parent process asks of a run."""

    kind: str  # "reference", "plain" or "oomkit"
    folder: Path
    steps: int
    scale: str
    budget: int | None


@dataclass
class Notes:
    """What a run leaves for the comparison: host memory only, outside any budget."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradients: np.ndarray | None = None

    def keep_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before each update; keeps the gradients of the first step.

        A step may get here twice when its update ran out of memory: the later counts.
        """
        if not self.losses:
            self.gradients = flat(
                p.grad for group in optimizer.param_groups for p in group["params"]
            )


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate(
        [t.detach().cpu().numpy().reshape(-1).copy() for t in tensors if t is not None]
    )


def bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class BarHandler(logging.Handler):
    """Writes log lines above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(
            f"    {record.getMessage()}", soft_wrap=True, markup=False, highlight=False
        )


def make_step(
    model: gpt.GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> Callable[[Batch], torch.Tensor]:
    """The training step, as anybody would write it."""

    def step(batch: Batch) -> torch.Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step


def main(settings: Settings) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = gpt.SCALES[settings.scale]
    if settings.budget is not None:
        oomkit.limit_memory(settings.budget, device=device.type)
    elif device.type == "cpu":
        oomkit.limit_memory(EVERYTHING, device="cpu")

    torch.manual_seed(SEED)
    model = gpt.GPT(scale).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    step = make_step(model, optimizer, scheduler)
    if settings.kind == "oomkit":
        step = oomkit.auto_batch(step)  # the added line: @oomkit.auto_batch

    notes = Notes()
    optimizer.register_step_pre_hook(notes.keep_gradients)
    console = Console()
    logging.getLogger("oomkit").addHandler(BarHandler(console))
    logging.getLogger("oomkit").propagate = False
    columns = (
        TextColumn("    training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    samples = Samples(model, device, settings.folder / f"{settings.kind}-memory.json")
    with Progress(*columns, console=console) as progress, samples:
        bar = progress.add_task("", total=settings.steps, loss="")
        samples.step()
        for batch in gpt.batches(scale, settings.steps, SEED, device):
            start = time.perf_counter()
            loss = step(batch)
            notes.losses.append(loss.item())
            samples.step()
            notes.seconds.append(time.perf_counter() - start)
            progress.update(bar, advance=1, loss=f"loss {notes.losses[-1]:.4f}")
    save(settings, notes, model, optimizer, step, device)


def save(
    settings: Settings,
    notes: Notes,
    model: gpt.GPT,
    optimizer: torch.optim.Optimizer,
    step: Any,
    device: torch.device,
) -> None:
    """Writes what the parent process compares."""
    state = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    records = getattr(step, "records", ())
    figures = {
        "device": str(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "static_bytes": bytes_of(model.parameters()) + bytes_of(state),
        "peak_bytes": oomkit.memory(device.type).peak_allocated,
        "losses": notes.losses,
        "seconds": notes.seconds,
        "records": [as_dict(record) for record in records],
    }
    if notes.gradients is None:
        raise RuntimeError("the optimizer was never stepped")
    stem = settings.folder / settings.kind
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    np.savez(
        stem.with_suffix(".npz"),
        gradients=notes.gradients,
        parameters=flat(model.parameters()),
    )


def as_dict(record: Any) -> dict[str, Any]:
    names = (
        "step",
        "batch_size",
        "micro_batch_size",
        "accumulation_steps",
        "attempts",
        "ooms",
        "peak_allocated",
        "budget",
        "time",
        "time_lost",
        "reason",
        "outcome",
    )
    return {name: getattr(record, name) for name in names}
