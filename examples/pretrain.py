"""Pretraining whose micro-batch finds itself: progressive tuning that nobody does by hand.

By hand one begins with the smallest micro-batch, watches the memory, stops, doubles it, starts
again, and ends with a global batch that is not the one that was wanted (3 x 21 x 4 = 252, not
256). Here the program begins with one row at a time (`accumulation_steps` = global batch) and
grows by itself to the largest micro-batch that fits; the global batch is exact at every size.

    python examples/pretrain.py --stop-after 6       # writes a checkpoint
    python examples/pretrain.py --resume             # goes on at the size that was found
    python examples/pretrain.py --device cuda        # 512 million parameters, 256 x 2048 tokens
    torchrun --nproc-per-node 4 examples/pretrain.py --global-batch 256

Under torchrun each rank has its share of the global batch, and a size of micro-batch that it
finds for itself. With --plain the step is the undecorated one under the same budget, which dies.

Each run trains under a memory budget, then once more from the same state without one, and with
plain torch, and compares losses and gradients. Exit status 1 when they disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import oomkit

MIB = 2**20
LOSS_BOUND = 1e-3  # relative, of every step
GRADIENT_BOUNDS = {"cpu": 1e-4, "cuda": 2e-2}  # first gradients, of their norm: fp32, bf16

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
console = Console(highlight=False, quiet=RANK > 0)


@dataclass(frozen=True)
class Scale:
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    global_batch: int  # of all ranks
    reference_rows: int  # micro-batch of the run with plain torch


SCALES = {
    "cpu": Scale(2, 64, 4, 64, 256, 64, 64),
    "cuda": Scale(24, 1280, 20, 2048, 16384, 256, 1),
    "tiny": Scale(1, 32, 2, 16, 64, 32, 32),
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
        self.blocks = nn.Sequential(*(Block(scale) for _ in range(scale.layers)))
        self.norm = nn.LayerNorm(scale.width)
        self.head = nn.Linear(scale.width, scale.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def tokens_of(scale: Scale, step: int, device: str) -> torch.Tensor:
    """The batch of a step, the same in every run: counting in steps of 1 to 8, with noise. Of
    several ranks, the share of this one."""
    generator = torch.Generator().manual_seed(step)
    rows, length = scale.global_batch, scale.context + 1
    start = torch.randint(scale.vocabulary, (rows, 1), generator=generator)
    stride = torch.randint(1, 9, (rows, 1), generator=generator)
    noise = torch.randint(2, (rows, length), generator=generator)
    tokens = (start + stride * torch.arange(length) + noise) % scale.vocabulary
    return tokens[RANK::RANKS].to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor, device: str) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """What one run trains; `step` is its training step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[torch.Tensor], torch.Tensor]


def fresh(scale: Scale, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = GPT(scale).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return DistributedDataParallel(model) if RANKS > 1 else model, optimizer


def later(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Backwards whose gradients are not yet those of all ranks."""
    return model.no_sync() if RANKS > 1 else contextlib.nullcontext()


def undecorated(scale: Scale, device: str) -> Run:
    model, optimizer = fresh(scale, device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens, device)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(model, optimizer, step)


def with_oomkit(scale: Scale, device: str) -> Run:
    run = undecorated(scale, device)
    run.step = oomkit.auto_batch(
        run.step,
        accumulation_steps=scale.global_batch // RANKS,
        reduction="mean",
        label="pretrain",
    )
    return run


def with_plain_torch(scale: Scale, device: str) -> Run:
    """Accumulation by hand, in micro-batches that are known to fit without a limit."""
    model, optimizer = fresh(scale, device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        parts = tokens.split(scale.reference_rows)
        for index, part in enumerate(parts):
            with later(model) if index + 1 < len(parts) else contextlib.nullcontext():
                loss = loss_of(model, part, device) * (len(part) / len(tokens))
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Run(model, optimizer, step)


# --- checkpoints ----------------------------------------------------------------------


def save(path: Path, run: Run, done: int) -> None:
    state = {
        "model": getattr(run.model, "module", run.model).state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "sizes": run.step.state_dict(),  # the size that was found survives a stop
        "done": done,
    }
    half = path.with_suffix(".part")
    torch.save(state, half)
    half.replace(path)  # a stop while it is written leaves the last one whole


def load(checkpoint: bytes, run: Run, device: str) -> int:
    """Puts a run where the checkpoint was; the number of steps that it had made."""
    state = torch.load(io.BytesIO(checkpoint), map_location=device, weights_only=True)
    getattr(run.model, "module", run.model).load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if hasattr(run.step, "load_state_dict"):  # the one with oomkit
        run.step.load_state_dict(state["sizes"])
    return int(state["done"])


# --- what is compared and shown -------------------------------------------------------


def train(run: Run, scale: Scale, device: str, steps: range) -> tuple[list[float], Any]:
    """(loss of every step, gradients of the first one: outside the budget, as an array)."""
    losses, first = [], None
    for number in steps:
        loss = run.step(tokens_of(scale, number, device))
        if RANKS > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / RANKS)
        if first is None:
            first = np.concatenate([p.grad.flatten().cpu().numpy() for p in run.model.parameters()])
    return losses, first


def table(records: Any, losses: list[float], from_step: int) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss", "micro-\nbatch", "accumu-\nlation", "global\nbatch"):
        result.add_column(name, justify="right")
    for name in ("peak\nMiB", "OOMs", "reason"):
        result.add_column(name, justify="left" if name == "reason" else "right")
    for number, (record, loss) in enumerate(zip(records, losses, strict=True), from_step):
        result.add_row(
            str(number + 1),
            f"{loss:.4f}",
            str(record.micro_batch_size),
            str(record.accumulation_steps),
            str(record.batch_size * RANKS),
            "-" if record.peak_allocated is None else f"{record.peak_allocated / MIB:.1f}",
            str(record.ooms),
            record.reason,
        )
    return result


def agree(ours: tuple[list[float], Any], plain: tuple[list[float], Any], bound: float) -> bool:
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours[0], plain[0], strict=True))
    gradient = float(np.linalg.norm(ours[1] - plain[1]) / np.linalg.norm(plain[1]))
    good = loss <= LOSS_BOUND and gradient <= bound
    console.print(
        f"{'agrees' if good else 'DISAGREES'} with plain torch without a limit: largest loss "
        f"difference {loss:.1e} relative, first gradients {gradient:.1e} of their norm",
        markup=False,
        soft_wrap=True,
    )
    return good


def budget_of(scale: Scale, device: str) -> int | None:
    """On the CPU, where nothing is the limit: what about a quarter of the batch needs."""
    if device != "cpu":
        return None
    run = with_plain_torch(scale, device)
    run.step(tokens_of(scale, 0, device)[:1])  # optimizer state
    probe = oomkit.auto_batch(run.step, label="probe")
    probe(tokens_of(scale, 0, device))
    record = probe.records[-1]
    return int(record.baseline + 0.3 * (record.peak_allocated - record.baseline))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=sorted(SCALES), help="default: by the device")
    parser.add_argument("--steps", type=int, default=12, help="of the whole training")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after N steps of it")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--checkpoint", type=Path, default=Path("pretrain.pt"))
    parser.add_argument("--global-batch", type=int, help="rows of all ranks")
    parser.add_argument("--plain", action="store_true", help="without oomkit: dies")
    parser.add_argument("--budget", help="bytes, or such as 2GiB; default on the CPU: found")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if RANKS == 1:
        return pretrain(options)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    try:
        status = pretrain(options)
        dist.barrier()  # no rank leaves while another one still talks to it
        return status
    finally:
        dist.destroy_process_group()


def pretrain(options: argparse.Namespace) -> int:
    device, scale = options.device, SCALES[options.scale or options.device]
    scale = replace(scale, global_batch=options.global_batch or scale.global_batch)
    if scale.global_batch % RANKS:
        raise SystemExit(
            f"a global batch of {scale.global_batch} cannot be shared by {RANKS} ranks"
        )
    if device == "cuda":
        torch.cuda.set_device(RANK % torch.cuda.device_count())
    with oomkit.limit_memory(2**50, device="cpu"):  # tensors are counted from here on
        budget = options.budget or budget_of(scale, device)
    checkpoint = options.checkpoint.read_bytes() if options.resume else None
    run = (undecorated if options.plain else with_oomkit)(scale, device)
    begin = 0 if checkpoint is None else load(checkpoint, run, device)
    steps = range(begin, min(options.stop_after or options.steps, options.steps))
    if not steps:
        console.print(f"the checkpoint has {begin} steps already: nothing is left to do")
        return 0

    with contextlib.ExitStack() as stack:
        if budget is not None:
            stack.enter_context(oomkit.limit_memory(budget, device=device))
        ours = train(run, scale, device, steps)
    if options.plain:
        console.print("the plain program has not died: the budget is too large to show anything")
        return 1
    records = run.step.records
    console.print(table(records, ours[0], begin))
    if RANK == 0:
        save(options.checkpoint, run, steps.stop)
    del run

    plain = with_plain_torch(scale, device)
    if checkpoint is not None:
        load(checkpoint, plain, device)
    good = agree(ours, train(plain, scale, device, steps), GRADIENT_BOUNDS[device])
    sizes = {record.batch_size * RANKS for record in records}
    console.print(
        f"global batch {sorted(sizes)}, OOMs {sum(r.ooms for r in records)}, micro-batch "
        f"{records[0].micro_batch_size} in the first step and {records[-1].micro_batch_size} "
        f"in the last; checkpoint: {options.checkpoint}",
        markup=False,
        soft_wrap=True,
    )
    return 0 if good and sizes == {scale.global_batch} else 1


if __name__ == "__main__":
    sys.exit(main())
