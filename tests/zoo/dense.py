"""Linear layers, convolutions, normalisations, and parameters used in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from .model import ROWS, add

Batch = dict[str, torch.Tensor]


def rows(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(ROWS, 6, dtype=dtype), "y": torch.randint(0, 3, (ROWS,))}


def images(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(ROWS, 2, 6, 6, dtype=dtype), "y": torch.randint(0, 3, (ROWS,))}


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mlp(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def conv_bn(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


def conv_transposed(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.GELU(), nn.ConvTranspose2d(3, 2, 3, stride=2),
        nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(50, 3),
    ).to(dtype)  # fmt: skip


def conv_depthwise(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.SiLU(), nn.Conv2d(4, 4, 3, groups=4),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    ).to(dtype)  # fmt: skip


class Reused(nn.Module):
    """One layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(self.layer(x).tanh()).tanh()).tanh() @ self.twice())

    def twice(self) -> torch.Tensor:
        return self.layer.weight.T


def frozen(dtype: torch.dtype) -> nn.Module:
    """A frozen body whose BatchNorm is in evaluation mode, and a head that learns."""
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    model[3].bias.requires_grad_(False)
    body.eval()
    return model


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.drop(x) @ self.a.T @ self.b.T * 0.5


def lora(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(LoRA(nn.Linear(6, 8)), nn.Tanh(), LoRA(nn.Linear(8, 3))).to(dtype)


class InPlace(nn.Module):
    """Operations in place on what a layer has made, and on a slice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu_()
        h = h.mul(2).add_(1)
        h[:, :2] += h[:, 2:4].detach()
        h[h > 3] = 0.5
        return self.second(F.leaky_relu_(h)).sub_(0.25)


def classify_in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The step itself normalises its batch in place."""
    batch["x"].sub_(0.5).div_(2.0)
    return classify(model, batch)


class Normed(nn.Module):
    """Parametrised weights; spectral norm moves two buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(6, 8))
        self.normal = parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normal(self.spectral(x).tanh()).tanh())


def orthogonal(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="householder"),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).to(dtype)


Target = dict[str, torch.Tensor]
Detection = tuple[torch.Tensor, list[Target]]


def detection_batch(dtype: torch.dtype) -> Detection:
    """Images, and a list of what is in each: one, two or three boxes."""
    targets = []
    for i in range(ROWS):
        n = 1 + i % 3
        targets.append(
            {"boxes": torch.rand(n, 4, dtype=dtype), "labels": torch.randint(0, 3, (n,))}
        )
    return torch.randn(ROWS, 2, 6, 6, dtype=dtype), targets


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.boxes = nn.Linear(16, 3 * 4)
        self.labels = nn.Linear(16, 3 * 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.boxes(h).view(-1, 3, 4), self.labels(h).view(-1, 3, 3)


def detection_loss(model: nn.Module, batch: Detection) -> torch.Tensor:
    """The mean over images of each image's own mean over its boxes."""
    images, targets = batch
    boxes, labels = model(images)
    each = []
    for i, target in enumerate(targets):
        n = len(target["labels"])
        each.append(
            F.smooth_l1_loss(boxes[i, :n], target["boxes"])
            + F.cross_entropy(labels[i, :n], target["labels"])
        )
    return torch.stack(each).mean()


def to(module: type[nn.Module], *args: Any) -> Any:
    return lambda dtype: module(*args).to(dtype)


add("mlp", mlp, rows, classify)
add("conv + BatchNorm", conv_bn, images, classify, moves=True)
add("transposed conv", conv_transposed, images, classify)
add("depthwise conv", conv_depthwise, images, classify)
add("parameter used twice", to(Reused), rows, classify)
add("frozen parameters", frozen, rows, classify)
add("LoRA adapters", lora, rows, classify, moves=True)
add("in-place ops", to(InPlace), rows, classify)
add("in-place on the batch", mlp, rows, classify_in_place, options={"restore_batch": True})
add("spectral and weight norm", to(Normed), rows, classify, moves=True, coupled=True)
add("orthogonal parametrization", orthogonal, rows, classify)
add("detection targets", to(Detector), detection_batch, detection_loss)
