"""Programs that save much for their backward, each from a seed; and one run of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from helpers.bridge_table import api, ctypes
from helpers.seeds import seed_all
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomkit
from oomkit import _C

SEED = 20261123
EVERYTHING = 2**40


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.heads = nn.Dropout(0.1), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        weights = self.dropout((q @ k.transpose(-1, -2) / 8).softmax(dim=-1))
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class GPT(nn.Module):
    """Blocks with an embedding that is the head, too."""

    def __init__(self, blocks: int = 4, width: int = 64, words: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(32, width) / 50)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())


class Table:
    """The program of the issue's table: parameters, gradients and AdamW's state are 64 MiB."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        seed_all(SEED)
        self.model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            if optimizer == "AdamW"
            else torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        )
        self.generator = torch.Generator().manual_seed(SEED)
        model, update = self.model, self.optimizer

        @oomkit.auto_batch(label="table", **options)
        def step(x: torch.Tensor) -> float:
            update.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            update.step()
            return loss.item()

        self.step = step

    def run(self, steps: int) -> list[float]:
        return [self.step(torch.randn(256, 1024, generator=self.generator)) for _ in range(steps)]

    def picture(self) -> list[Any]:
        """In numpy's memory, which no budget counts."""
        return [p.detach().numpy().copy() for p in self.model.parameters()]


class Embedded(nn.Module):
    """One large table and little else: of AdamW's update the table's temporaries are the most."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16384, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Hardswish(inplace=True),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.contiguous(memory_format=torch.channels_last)).square().mean()


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].square().mean()


class Weighted(nn.Module):
    """One matrix, and what `body` does with it and the batch."""

    def __init__(self, body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(64, 64) / 8), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, self.weight)


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).relu_()
    z = (y @ weight.t()).mul_(2).sigmoid_() + 1
    z[:, ::2] += y[:, 1::2].tanh()
    return (z @ weight).tanh_().square().sum()


def views(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).exp()
    wide = y[:4].unsqueeze(0).expand(16, 4, 64) * y[4:8].sin().t().reshape(4, 64)
    strided = y.t()[::3].as_strided((20, 30), (1, 64), 5).cos()
    return (wide.sin() * wide).sum() + strided.square().sum() + (y[-1] * y[3]).sum()


def complex_numbers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.fft.fft(x @ weight) * torch.view_as_complex((x @ weight).view(-1, 32, 2)).repeat(1, 2)
    z = y.conj() @ weight.to(y.dtype) * y
    return z.abs().sum() + (z.imag * z.real).sum()


def double_backward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).tanh().square().sum()
    (grad,) = torch.autograd.grad(y, weight, create_graph=True)
    return grad.exp().sum() + y


def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The graph of one part is gone through twice."""
    y = (x @ weight).sigmoid().exp()
    y.sum().backward(retain_graph=True)
    return y.square().sum()


def checkpointed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return F.dropout((y @ weight).exp(), 0.3).sin()

    y = checkpoint(inner, x @ weight, use_reentrant=False)
    return checkpoint(inner, y, use_reentrant=True).square().sum()


def saved_on_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).exp()
    with torch.autograd.graph.save_on_cpu():
        y = (y.sin() @ weight).exp()
    return y.square().sum()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        assert torch.equal(x * x, y)
        return grad * 3 * y


def custom(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (Cubed.apply(x @ weight) @ weight).square().sum()


def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.gelu(x @ weight) @ weight
    return y.float().exp().sum()


def other_layouts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sparse = (x.abs() > 1).to(x.dtype).to_sparse()
    y = torch.sparse.mm(sparse, weight).exp()
    picked = y.masked_select(x[:, :64] > 0)
    return picked.square().sum() + y.double()[:, None, :].max(dim=0).values.sum()


def transformed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch.func forbids hooks while it works."""
    inner = torch.func.grad(lambda w: (x @ w).sin().square().sum())(weight)
    rows = torch.func.vmap(lambda row: row.exp() * 2)(inner)
    return (rows.sin() @ weight).exp().sum()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "gpt": (GPT, lambda: torch.randint(256, (16, 32))),
    "conv": (Conv, lambda: torch.randn(8, 3, 16, 16)),
    "lstm": (LSTM, lambda: torch.randn(16, 20, 16)),
    **{
        body.__name__: (lambda body=body: Weighted(body), lambda: torch.randn(48, 64))
        for body in (
            *(in_place, views, complex_numbers, double_backward, twice, checkpointed),
            *(saved_on_cpu, custom, mixed, other_layouts, transformed),
        )
    },
}


def offload(kept: Iterable[torch.Tensor] = (), host_bytes: int = EVERYTHING) -> Any:
    return _C._offload(0, -1, list(kept), host_bytes)


def kept_of(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), batch]


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    print("seed", SEED)
    seed_all(SEED)
    model, batch = PROGRAMS[name]
    return model(), batch()


def run(
    model: nn.Module, batch: torch.Tensor, around: AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """Loss, gradients, buffers, versions and the next random number of one step."""
    seed_all(SEED)
    model.zero_grad()
    with around or nullcontext():
        loss = model(batch)
    loss.backward()
    versions = [tensor._version for tensor in (*model.parameters(), batch)]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()),
            torch.tensor(versions), torch.rand(2)]  # fmt: skip


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def peak_of(work: Callable[[], Any]) -> int:
    """The most that was allocated on the CPU while it ran, above what was there before."""
    window = ctypes.c_int()
    before = allocated()
    assert api.cpu_peak_push(window) == 0
    try:
        work()
    finally:
        peak = api.cpu_peak_pop(window)
    return int(peak) - before


def allocated() -> int:
    now = oomkit.memory("cpu").allocated
    assert now is not None
    return now
