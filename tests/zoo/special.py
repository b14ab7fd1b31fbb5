"""Checkpoints, custom Functions, autocast, complex numbers, linalg, fft, double backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .dense import Batch, classify, conv_bn, images, mlp, rows, to
from .model import ROWS, add

HALF = {"gradients=off": "half precision: 1e-12 means nothing there"}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.body, h, use_reentrant=self.reentrant)
        return self.head(h)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(beta * x)
        ctx.save_for_backward(x, gate, beta)
        return x * gate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate, beta = ctx.saved_tensors
        slope = gate * (1 - gate)
        return g * (gate + beta * x * slope), (g * x * x * slope).sum()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.beta = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Swish.apply(self.first(x), self.beta))


def under_bf16(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return classify(model, batch)


def under_fp16(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return classify(model, batch)


class Complex(nn.Module):
    """Complex parameters, complex gradients, a real loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        twofold = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.first = nn.Linear(6, 8, dtype=twofold)
        self.phase = nn.Parameter(torch.randn(8, dtype=dtype))
        self.head = nn.Linear(8, 3, dtype=twofold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.to(self.first.weight.dtype))
        h = h * torch.polar(torch.ones_like(self.phase), self.phase)
        return torch.view_as_real(self.head(h * h.abs().sigmoid()))[..., 0]


class Algebra(nn.Module):
    """Solve, QR, eigenvalues and a determinant of a matrix for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 9)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.inner(x).view(-1, 3, 3)
        square = a @ a.mT + torch.eye(3, dtype=x.dtype)
        root = torch.linalg.cholesky(square)
        solved = torch.linalg.solve(square, x[:, :3, None]).flatten(1)
        q, r = torch.linalg.qr(a + 2 * torch.eye(3, dtype=x.dtype))
        values = torch.linalg.eigvalsh(square)
        logdet = torch.linalg.slogdet(root)[1][:, None]
        return self.head(torch.cat([solved, (q @ r)[:, 0], values, logdet], dim=1))


class Fourier(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8, dtype=dtype)
        self.filter = nn.Parameter(torch.randn(5, 2, dtype=dtype))
        self.head = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.inner(x)) * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(spectrum, n=8))


class Sorted(nn.Module):
    """Sort, top-k, cumulative sums, gather and scatter, along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        ordered, order = h.sort(dim=1)
        top, where = h.topk(3, dim=1)
        back = torch.zeros_like(h).scatter_add(1, where, top)
        return self.head(ordered.cumsum(1) + h.gather(1, order.flip(1)) + back)


def penalised(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The gradient of the input is part of the loss: a backward through a backward."""
    x = batch["x"].detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    return F.cross_entropy(out, batch["y"]) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()


def contrast(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Every row against every other one of the batch."""
    a = F.normalize(model(batch["x"]), dim=1)
    b = F.normalize(model(batch["x"] * 0.5), dim=1)
    return F.cross_entropy(a @ b.T, torch.arange(len(a)))


def wide(dtype: torch.dtype) -> Batch:
    """[features, rows]: the samples are in dimension 1."""
    return {"x": torch.randn(6, ROWS, dtype=dtype), "y": torch.randint(0, 3, (1, ROWS))}


def classify_wide(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"].T), batch["y"][0])


add("checkpoint, reentrant", to(Checkpointed, True), rows, classify, moves=True)
add("checkpoint, not reentrant", to(Checkpointed, False), rows, classify, moves=True)
add("custom Function", to(Custom), rows, classify)
add("bf16 autocast", conv_bn, images, under_bf16, moves=True, without=HALF)
add(
    "fp16 autocast",
    mlp,
    rows,
    under_fp16,
    without={
        **HALF,
        "step": "fp16 without a scaler underflows",
        "backward": "fp16 without a scaler underflows",
        "returned": "fp16 without a scaler underflows",
    },
)
COMPLEX = "GradScaler takes no complex gradients"
add(
    "complex numbers",
    Complex,
    rows,
    classify,
    without={"scaled": COMPLEX, "scaled-returned": COMPLEX},
)
add("linalg", to(Algebra), rows, classify)
add("fft", Fourier, rows, classify)
add("sort", to(Sorted), rows, classify)
add("gradient penalty", mlp, rows, penalised)
add(
    "coupled samples",
    mlp,
    rows,
    contrast,
    coupled=True,
    without={
        "gradients=off": "what is set aside is the whole batch's, where samples are coupled not "
        "the sum of its slices"
    },
)
add("samples in dimension 1", mlp, wide, classify_wide, options={"dim": 1})
