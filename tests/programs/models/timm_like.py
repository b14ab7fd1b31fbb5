"""timm's training loop: small ViTs and ConvNeXts, drop path, EMA, timm's scalers and schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oomkit

from ..world import ROWS, World, program

CLASSES = 4
SIDE = 8


def drop_path(x: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """Stochastic depth: some rows skip the block."""
    if share == 0.0 or not training:
        return x
    kept = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - share)
    return x * kept / (1 - share)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.out(x.transpose(1, 2).reshape(rows, length, width))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.mlp = _mlp(width)
        self.scales = nn.Parameter(torch.full((2, width), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scales[0] * self.attention(self.first(x))
        x = x + drop_path(y, self.share, self.training)
        y = self.scales[1] * self.mlp(self.second(x))
        return x + drop_path(y, self.share, self.training)


class ViT(nn.Module):
    def __init__(self, share: float = 0.0, width: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, width))
        self.blocks = nn.Sequential(*(Block(width, share) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = _mlp(width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = (self.scale * self.mlp(y)).permute(0, 3, 1, 2)
        return x + drop_path(y, self.share, self.training)


def _convnext(share: float = 0.0, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 2, stride=2),
        ConvNeXtBlock(width, share),
        ConvNeXtBlock(width, share),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(width),
        nn.Linear(width, CLASSES),
    ).double()


class NativeScaler:
    """timm.utils.NativeScaler: scale, backward, unscale_, clip, step, update, in one call."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        parameters: Any = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()


class CosineSchedule:
    """timm.scheduler: sets the rates itself, by the number of updates; no torch scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step_update(self, num_updates: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * group.get("lr_scale", 1.0) / (1 + num_updates)


class ModelEma(nn.Module):
    """timm.utils.ModelEmaV2."""

    def __init__(self, model: nn.Module, decay: float = 0.8) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        now = model.state_dict().values()
        for kept, value in zip(self.module.state_dict().values(), now, strict=True):
            kept.copy_(self.decay * kept + (1 - self.decay) * value)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, rates that fall with depth: param_groups_layer_decay."""
    named = list(model.named_parameters())
    return [
        {
            "params": [p],
            "weight_decay": 0.05 if p.ndim > 1 else 0.0,
            "lr_scale": 0.9 ** (len(named) - i),
        }
        for i, (_, p) in enumerate(named)
    ]


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(ROWS, 3, SIDE, SIDE).double(), torch.randint(0, CLASSES, (ROWS,))


@program("equal", compare="slices")
def timm_vit_drop_path(world: World) -> None:
    """ViT with drop path and layer scale, rates by depth, NativeScaler, label smoothing."""
    model = ViT(share=0.3).double().train()
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    loss_scaler = NativeScaler()
    schedule = CosineSchedule(optimizer)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(images)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        return loss.detach()

    for updates in range(3):
        world.note(train_one(*_images()))
        schedule.step_update(num_updates=updates + 1)


@program("equal")
def timm_vit(world: World) -> None:
    """The same without drop path: timm's schedule sets the learning rates in the step."""
    model = ViT().double().train()
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    loss_scaler = NativeScaler()
    schedule = CosineSchedule(optimizer)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one(images: torch.Tensor, target: torch.Tensor, num_updates: int) -> torch.Tensor:
        loss = F.cross_entropy(model(images), target, label_smoothing=0.1)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        schedule.step_update(num_updates)
        return loss.detach()

    for updates in range(3):
        world.note(train_one(*_images(), updates + 1))


def _ema(world: World, update: Callable[[ModelEma, nn.Module], None], outside: bool) -> None:
    model = _convnext()
    ema = ModelEma(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    world.keep(model, ema, optimizer)

    @world.auto_batch
    def train_one(images: torch.Tensor, target: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        if not outside:
            update(ema, model)
        return loss.item()

    for _ in range(3):
        world.note(train_one(*_images()))
        if outside:
            update(ema, model)


@program("equal")
def timm_convnext_ema_outside(world: World) -> None:
    """ConvNeXt; the loop updates the average after the step."""
    _ema(world, ModelEma.update, outside=True)


@program("equal", decorated="@oomkit.auto_batch, the average under `current().is_last`")
def timm_convnext_ema_last(world: World) -> None:
    """The same in the step: `if oomkit.current().is_last: model_ema.update(model)`."""

    def update(ema: ModelEma, model: nn.Module) -> None:
        if oomkit.current().is_last:
            ema.update(model)

    _ema(world, update, outside=False)


@program("said", says="moves once", by_proof=True)
def timm_convnext_ema_always(world: World) -> None:
    """The same without is_last: each micro-batch would update the average, which moves once."""
    _ema(world, ModelEma.update, outside=False)


@program("equal", compare="slices")
def timm_convnext_drop_path(world: World) -> None:
    """ConvNeXt with drop path, in channels_last; arguments as train_one_epoch has them."""
    model = _convnext(share=0.3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, eps=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch
    def forward_backward(
        model: nn.Module,
        images: torch.Tensor,
        target: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        loss_fn: nn.Module,
        clip_grad: float = 1.0,
    ) -> torch.Tensor:
        loss = loss_fn(model(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        images, target = _images()
        images = images.contiguous(memory_format=torch.channels_last)
        world.note(forward_backward(model, images, target, optimizer, nn.CrossEntropyLoss()))
