"""What random programs are made of: models, what becomes of features, losses.

A piece is a function; whether it couples the rows of a batch is written nowhere, for only a
comparison with the whole batch decides that (`random_programs.py`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDE, HIDDEN, CLASSES, LENGTH, TOKENS = 4, 6, 3, 5, 7
Columns = dict[str, Any]


@dataclass
class Parts:
    """One run of a program: its modules, and what it remembers between calls."""

    body: nn.Module
    head: nn.Module
    memory: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)

    def parameters(self) -> list[nn.Parameter]:
        return [p for m in (self.body, self.head) for p in m.parameters() if p.requires_grad]


# ---- models: x to features of (rows, HIDDEN); of tokens (rows, LENGTH, HIDDEN)


class _Reentrant(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return checkpoint(lambda h: self.second(h).tanh(), h, use_reentrant=self.reentrant)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDE, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return h + self.attention(h, h, h, need_weights=False)[0]


def _frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(HIDDEN).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign,assignment]
    return nn.Sequential(nn.Linear(WIDE, HIDDEN), norm, nn.Tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.Tanh()),
    "layer norm": lambda: nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()),
    "group norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDE)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Flatten(), nn.Linear(4 * (WIDE - 2), HIDDEN),
    ),
    "batch norm in eval()": _frozen_norm,
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDE, HIDDEN)), nn.Tanh()
    ),
    "checkpoint": lambda: _Reentrant(False),
    "reentrant checkpoint": lambda: _Reentrant(True),
    "recurrent": _Recurrent,
    "tokens": _Attention,
}  # fmt: skip


# ---- what becomes of features


def _pairs(h: Tensor, parts: Parts) -> Tensor:
    a, b = h.chunk(2)
    n = min(len(a), len(b))
    return torch.cat([a[:n] - b[:n], h[n:]])


def _centre(h: Tensor, parts: Parts) -> Tensor:
    centre = getattr(parts.memory, "centre", torch.zeros((), dtype=h.dtype))
    parts.memory.centre = 0.9 * centre + 0.1 * h.detach().mean()
    return h - centre


def _queue(h: Tensor, parts: Parts) -> Tensor:
    past = getattr(parts.memory, "queue", None)
    made = h if past is None else h + past.mean(0, keepdim=True)
    flat = h.detach().reshape(-1, h.shape[-1])
    parts.memory.queue = (flat if past is None else torch.cat([past, flat]))[-12:].clone()
    return made


FEATURES: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "as they are": lambda h, parts: h,
    "normalised rows": lambda h, parts: F.normalize(h, dim=-1),
    "scaled": lambda h, parts: h * torch.linspace(0.5, 1.5, HIDDEN, dtype=h.dtype),
    "clamped": lambda h, parts: h.clamp(-0.5, 0.5),
    "less the batch's mean": lambda h, parts: h - h.mean(0),
    "over the batch's deviation": lambda h, parts: h / (h.std(0, correction=0) + 0.1),
    "with the batch's mean": lambda h, parts: h + h.mean(0).detach(),
    "softmax over the batch": lambda h, parts: h.softmax(0),
    "sorted": lambda h, parts: h.sort(0).values,
    "cumulative": lambda h, parts: h.cumsum(0) / 4,
    "rolled": lambda h, parts: h + h.roll(1, 0),
    "flipped": lambda h, parts: h - 0.5 * h.flip(0),
    "beside the first row": lambda h, parts: h - h[:1],
    "attention over rows": lambda h, parts: (
        (h.flatten(1) @ h.flatten(1).T).softmax(1) @ h.flatten(1)
    ).view_as(h),
    "pairs": _pairs,
    "mixed up": lambda h, parts: 0.7 * h + 0.3 * h[torch.arange(len(h) - 1, -1, -1)],
    "less a moving centre": _centre,
    "with a queue of past ones": _queue,
}


# ---- losses of rows


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


ROW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda o, y: F.cross_entropy(o, y, reduction="none"),
    "smoothed": lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
    "squares": lambda o, y: (o - _one_hot(y)).square().mean(1),
    "logistic": lambda o, y: F.binary_cross_entropy_with_logits(
        o, _one_hot(y), reduction="none"
    ).sum(1),
    "focal": lambda o, y: (
        (1 - o.softmax(1).gather(1, y[:, None])[:, 0]) ** 2
        * F.cross_entropy(o, y, reduction="none")
    ),
    "margin": lambda o, y: F.multi_margin_loss(o, y, reduction="none"),
}

CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)


def _weighted(v: Tensor, weight: Tensor) -> Tensor:
    return (v * weight).sum() / weight.sum()


def _normalised(a: Tensor) -> Tensor:
    return (a - a.mean()) / (a.std(correction=0) + 1e-6)


def _harder(v: Tensor) -> Tensor:
    chosen = v.detach() >= v.detach().mean()
    return v[chosen].mean()


# Of a loss per row, and the batch.
REDUCTIONS: dict[str, Callable[[Tensor, Columns], Tensor]] = {
    "mean": lambda v, b: v.mean(),
    "sum over rows": lambda v, b: v.sum() / len(v),
    "three means": lambda v, b: 3 * v.mean(),
    "weights of rows": lambda v, b: (v * b["weight"]).mean(),
    "advantages": lambda v, b: (v * b["advantage"]).mean(),
    "sum": lambda v, b: v.sum(),
    "sum over a number": lambda v, b: v.sum() / 16,
    "sum over items": lambda v, b: v.sum() / b["num_items_in_batch"],
    "class weights": lambda v, b: _weighted(v, CLASS_WEIGHTS[b["y"]]),
    "normalised weights": lambda v, b: _weighted(v, b["weight"]),
    "mask": lambda v, b: _weighted(v, b["mask"].double()),
    "chosen rows": lambda v, b: v[b["mask"]].mean(),
    "normalised advantages": lambda v, b: (v * _normalised(b["advantage"])).mean(),
    "hardest half": lambda v, b: v.topk((len(v) + 1) // 2).values.mean(),
    "harder than the mean": lambda v, b: _harder(v),
    "largest": lambda v, b: v.max(),
    "median": lambda v, b: v.median(),
    "root": lambda v, b: v.mean().sqrt(),
    "logarithm": lambda v, b: v.mean().log1p(),
    "square": lambda v, b: v.mean().square(),
    "bounded": lambda v, b: v.mean().clamp(max=0.9),
    "log of a sum": lambda v, b: v.logsumexp(0),
    "easy first": lambda v, b: ((-v.detach()).softmax(0) * v).sum(),
    "relative": lambda v, b: (v / v.detach().mean()).mean(),
    "mean and deviation": lambda v, b: v.mean() + 0.3 * v.std(correction=0),
    "first half": lambda v, b: v[: max(1, len(v) // 2)].mean(),
    "every other": lambda v, b: v[::2].mean(),
    "by rank": lambda v, b: (
        v.sort().values * torch.linspace(0.1, 1, len(v), dtype=v.dtype)
    ).mean(),
    "cumulative": lambda v, b: v.cumsum(0).mean(),
    "neighbours": lambda v, b: (v - v.roll(1)).square().mean(),
}


def _negatives(out: Tensor, h: Tensor) -> Tensor:
    z = F.normalize(h, dim=1)
    return F.cross_entropy(z @ z.T * 3 + out.mean() * 0, torch.arange(len(z)))


def _spread(out: Tensor, h: Tensor) -> Tensor:
    apart = (h[:, None] - h[None]).square().sum(-1)
    return (-apart).exp().mean() + out.square().mean()


def _diverse(out: Tensor, h: Tensor) -> Tensor:
    mean = out.softmax(1).mean(0)
    return (mean * mean.log()).sum()


def _dice(out: Tensor, h: Tensor) -> Tensor:
    guess = out.sigmoid()
    return 1 - 2 * (guess * guess.detach()).sum() / (guess.sum() + 1)


def _preferred(out: Tensor, h: Tensor) -> Tensor:
    half = max(1, len(out) // 2)
    return -F.logsigmoid(out[:half, 0] - out[-half:, 0]).mean()


# Of outputs and features, without labels.
OF_FEATURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "small outputs": lambda out, h: out.square().mean(),
    "entropy of rows": lambda out, h: -(out.softmax(1) * out.log_softmax(1)).sum(1).mean(),
    "in-batch negatives": _negatives,
    "spread": _spread,
    "entropy of the mean": _diverse,
    "overlap": _dice,
    "preferences": _preferred,
    "variance": lambda out, h: F.relu(1 - h.std(0, correction=0)).mean() + out.square().mean(),
    "covariance": lambda out, h: (h.T @ h / len(h)).square().mean() + out.square().mean(),
}


def _flat(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **more)


def _of_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, reduction="none")


def _shifted(out: Tensor, b: Columns) -> Tensor:
    return _flat(out[:, :-1], b["y"][:, 1:])


# Of logits for tokens and their labels, of which those of -100 do not count.
TOKEN_LOSSES: dict[str, Callable[[Tensor, Columns], Tensor]] = {
    "all tokens": lambda o, b: _of_tokens(o, b["y"].clamp(min=0)).mean(),
    "rows, then tokens": lambda o, b: (_of_tokens(o, b["y"]).sum(1) / (b["y"] >= 0).sum(1)).mean(),
    "tokens": lambda o, b: _flat(o, b["y"]),
    "shifted tokens": _shifted,
    "tokens by a mask": lambda o, b: _weighted(_of_tokens(o, b["y"]), (b["y"] >= 0).double()),
    "tokens less padding": lambda o, b: _flat(o, b["y"].clamp(min=0), ignore_index=0),
    "token weights": lambda o, b: _flat(o, b["y"], weight=CLASS_WEIGHTS),
    "sum over items": lambda o, b: _flat(o, b["y"], reduction="sum") / b["num_items_in_batch"],
    "sum of tokens": lambda o, b: _flat(o, b["y"], reduction="sum"),
}


# ---- beside the loss


def _orthogonal(parts: Parts, h: Tensor) -> Tensor:
    found = [p for p in parts.parameters() if p.dim() == 2]
    return sum(((p @ p.T) - torch.eye(len(p))).square().mean() for p in found) * 0.1  # type: ignore[return-value]


PENALTIES: dict[str, Callable[[Parts, Tensor], Tensor] | None] = {
    "none": None,
    "of weights": lambda parts, h: 0.05 * sum(p.square().sum() for p in parts.parameters()),  # type: ignore[return-value]
    "orthogonal weights": _orthogonal,
    "of activations": lambda parts, h: 0.1 * h.abs().mean(),
    "of the batch's variance": lambda parts, h: 0.1 * h.var(0, correction=0).mean(),
    "sum of activations": lambda parts, h: 0.1 * h.square().sum(),
}
