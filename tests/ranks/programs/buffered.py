"""Two forwards in one step of a model whose buffers are broadcast before each of them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import prepare, raised


class _Scaled(nn.Module):
    """With a buffer that stays, and one that counts forwards where it is told to."""

    def __init__(self, norm: bool, counts: bool) -> None:
        super().__init__()
        extra = [nn.BatchNorm1d(8)] if norm else []
        self.layers = nn.Sequential(nn.Linear(4, 8), *extra, nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.register_buffer("forwards", torch.zeros(2))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.forwards += 1
        return self.layers(x) * self.scale


def _trained(
    rank: Rank, kind: str, x: torch.Tensor, y: torch.Tensor, fails: int | None = None
) -> list[Any]:
    """What each of four calls said, and the state after it; `fails`: the call, or -1: torch's."""
    torch.manual_seed(0)
    counts = kind == "counts" or (kind == "counts on one rank" and rank.rank == 1)
    model = DistributedDataParallel(_Scaled("norm" in kind, counts))
    if kind == "frozen norm":
        model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.set_grad_enabled(kind != "without gradients first"):
            first = model(x * 2)
        F.mse_loss(model(x) + first, y).backward()
        optimizer.step()
        now = oomkit.current()
        if kind == "moved by the step" and (now is None or now.is_last):
            model.module.scale.mul_(0.9)

    def evaluate() -> None:
        """The next forward then sends nothing, but the one after it."""
        with torch.no_grad():
            model(x)

    if kind == "evaluated first":
        evaluate()
    run = step if fails == -1 else oomkit.auto_batch(verify=False)(step)
    found = []
    for call in range(4):
        now = call == fails and rank.rank == 1
        with inject_oom(nth=3, phase="forward") if now else contextlib.nullcontext():
            said = raised(lambda: run(x, y))
        if kind == "evaluated":
            evaluate()
        state = [t.flatten().tolist() for t in model.state_dict().values()]
        found.append([said, state])
    return found


def twice(rank: Rank) -> dict[str, Any]:
    """Each kind with torch alone, in whole calls, and with one that this rank or another splits."""
    _, _, x, y = prepare(rank)
    found = {}
    for kind in rank.arguments["kinds"]:
        alone = _trained(rank, kind, x, y, -1)
        found[kind] = []
        for fails in (None, 2):
            ours = _trained(rank, kind, x, y, fails)
            far = [
                max(
                    abs(a - b)
                    for s, t in zip(now, then, strict=True)
                    for a, b in zip(s, t, strict=True)
                )
                for (_, now), (_, then) in zip(ours, alone, strict=True)
            ]
            found[kind].append([[said for said, _ in ours], far])
    return found


def llama(rank: Rank) -> list[Any]:
    """A model of transformers, whose rotary embedding has constant buffers: a loss over two
    forwards, as of preferences; gradients as with torch alone, whole and split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    prepare(rank)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(config))
    torch.manual_seed(rank.rank)
    chosen, rejected = torch.randint(20, (4, 6)), torch.randint(20, (4, 6))

    def step(chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        better = model(input_ids=chosen, labels=chosen).loss
        worse = model(input_ids=rejected, labels=rejected).loss
        (better - 0.1 * worse).backward()

    step(chosen, rejected)
    expected = [p.grad.clone() for p in model.parameters()]
    decorated = oomkit.auto_batch(step)
    found: list[Any] = []
    for call in range(3):
        model.zero_grad()
        now = call == 1 and rank.rank == 1
        with inject_oom(nth=2, phase="backward") if now else contextlib.nullcontext():
            said = raised(lambda: decorated(chosen, rejected))
        pairs = zip(model.parameters(), expected, strict=True)
        found.append([said, max(float((p.grad - e).abs().max()) for p, e in pairs)])
    return found
