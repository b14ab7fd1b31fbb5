"""Images: classification, segmentation, augmentation, attacks, teachers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import oomkit

from ..world import ROWS, World, program

CLASSES = 5
CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0]).double()

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _images(steps: int, rows: int = ROWS, side: int = 6, channels: int = 3) -> Pairs:
    return [
        (torch.rand(rows, channels, side, side).double(), torch.randint(0, CLASSES, (rows,)))
        for _ in range(steps)
    ]


def _small_cnn(norm: bool) -> nn.Sequential:
    def block(inside: int, outside: int) -> list[nn.Module]:
        normalised = nn.BatchNorm2d(outside) if norm else nn.GroupNorm(2, outside)
        return [nn.Conv2d(inside, outside, 3, padding=1, bias=False), normalised, nn.ReLU()]

    return nn.Sequential(
        *block(3, 4),
        nn.MaxPool2d(2),
        *block(4, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    ).double()


@program("said", says="BatchNorm2d is in training mode", compare="slices")
def cnn_batchnorm(world: World) -> None:
    """Image classification: convolutions, BatchNorm, SGD with Nesterov momentum."""
    model = _small_cnn(norm=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item(), int((logits.argmax(1) == labels).sum())

    for images, labels in _images(3):
        loss, correct = train_step(images, labels)
        world.note(loss)
        world.note(correct)


@program("equal")
def cnn_groupnorm(world: World) -> None:
    """The same without batch statistics: GroupNorm; correct predictions counted."""
    model = _small_cnn(norm=False)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item(), int((logits.argmax(1) == labels).sum())

    for images, labels in _images(3):
        loss, correct = train_step(images, labels)
        world.note(loss)
        world.note(correct)


@program("equal")
def mlp_scheduler(world: World) -> None:
    """MLP classification: clipping, warm-up and cosine schedule stepped in the step."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(108, 32), nn.GELU(), nn.Linear(32, CLASSES)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[2],
    )
    world.keep(model, optimizer, scheduler)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    for images, labels in _images(4):
        told = train_step(images, labels)
        world.note(told["loss"])
        world.note(told["grad_norm"])


def _linear_classifier() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    model.double()
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


@program("equal", decorated='@oomkit.auto_batch(verify=False, rng="all")', compare="slices")
def mixup_inside(world: World) -> None:
    """Mixup inside the step: numpy's beta, and a permutation of the rows that a micro-batch has,
    which is no split that a proof would let pass."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    @world.auto_batch(verify=False, rng="all")
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        share = float(np.random.beta(0.4, 0.4))
        other = torch.randperm(len(images))
        mixed = share * images + (1 - share) * images[other]
        logits = model(mixed)
        loss = share * F.cross_entropy(logits, labels)
        loss = loss + (1 - share) * F.cross_entropy(logits, labels[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


@program("equal")
def mixup_outside(world: World) -> None:
    """Mixup before the step: the pairs come from the loader, the share is a number."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(
        images: torch.Tensor, first: torch.Tensor, second: torch.Tensor, share: float
    ) -> float:
        logits = model(images)
        loss = share * F.cross_entropy(logits, first)
        loss = loss + (1 - share) * F.cross_entropy(logits, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        share = float(np.random.beta(0.4, 0.4))
        other = torch.randperm(len(images))
        mixed = share * images + (1 - share) * images[other]
        world.note(train_step(mixed, labels, labels[other], share))


@program("equal")
def distillation(world: World) -> None:
    """Distillation: a frozen teacher under no_grad, soft and hard targets."""
    teacher, _ = _linear_classifier()
    teacher.eval().requires_grad_(False)
    student, optimizer = _linear_classifier()
    world.keep(teacher, student, optimizer)
    temperature = 3.0

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.no_grad():
            wanted = F.softmax(teacher(images) / temperature, dim=-1)
        logits = student(images)
        soft = F.kl_div(F.log_softmax(logits / temperature, dim=-1), wanted, reduction="batchmean")
        loss = 0.7 * temperature**2 * soft + 0.3 * F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


def _segmenter() -> tuple[nn.Module, torch.optim.Optimizer, Pairs]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, CLASSES, 2, stride=2),
    ).double()
    data = []
    for images, _ in _images(3):
        masks = torch.randint(0, CLASSES, (len(images), 6, 6))
        share = torch.linspace(0.1, 0.9, len(images))[:, None, None]
        masks[torch.rand(masks.shape) < share] = 255  # no two rows have as many labels
        data.append((images, masks))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data


def labelled_pixels(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["mask"] != 255).sum())


@program("equal", decorated="@oomkit.auto_batch(weight=labelled_pixels)")
def segmentation(world: World) -> None:
    """Segmentation: the mean over labelled pixels, 255 ignored; weight= counts them."""
    model, optimizer, data = _segmenter()
    world.keep(model, optimizer)

    @world.auto_batch(weight=labelled_pixels)
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["image"]), batch["mask"], ignore_index=255)
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, masks in data:
        world.note(train_step({"image": images, "mask": masks}))


@program(
    "equal",
    decorated="@oomkit.auto_batch(verify=True)",
    found={"weight": lambda batch: (batch[1] != 255).sum()},
)
def segmentation_unweighted(world: World) -> None:
    """The same without weight=: the proof finds the labels that are not 255."""
    model, optimizer, data = _segmenter()
    world.keep(model, optimizer)

    @world.auto_batch(verify=True)
    def train_step(images: torch.Tensor, masks: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), masks, ignore_index=255)
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, masks in data:
        world.note(train_step(images, masks))


@program("equal")
def fgsm_grad(world: World) -> None:
    """Adversarial training: FGSM by autograd.grad on the input, then the usual step."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        attacked = images.clone().requires_grad_()
        clean = F.cross_entropy(model(attacked), labels)
        (slope,) = torch.autograd.grad(clean, attacked)
        worse = (images + 0.03 * slope.sign()).clamp(0, 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(worse), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


@program("refused", says=r"zero_grad\(\) is called between|two backward\(\) calls")
def fgsm_backward(world: World) -> None:
    """FGSM as in PyTorch's tutorial: requires_grad_() on the batch, backward, zero_grad, again."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        images.requires_grad_()
        F.cross_entropy(model(images), labels).backward()
        assert images.grad is not None
        worse = (images + 0.03 * images.grad.sign()).detach().clamp(0, 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(worse), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


@program("equal")
def pgd_accumulated(world: World) -> None:
    """Adversarial training in three inner steps; clean and attacked gradients accumulate."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    def attack(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        at = images.clone()
        for _ in range(3):
            at.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(at), labels), at)
            at = (at + 0.02 * slope.sign()).clamp(images - 0.05, images + 0.05).detach()
        return at

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        clean = F.cross_entropy(model(images), labels)
        clean.backward()
        attacked = F.cross_entropy(model(attack(images, labels)), labels)
        attacked.backward()
        optimizer.step()
        return clean.item() + attacked.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


@program("said", says=r"meter|Meter|seen|history", decorated="@oomkit.auto_batch")
def average_meter(world: World) -> None:
    """A running average kept in the step: the counter counts each micro-batch."""
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)

    class AverageMeter:
        def __init__(self) -> None:
            self.sum = 0.0
            self.count = 0

        def update(self, value: float, rows: int) -> None:
            self.sum += value * rows
            self.count += rows

    class Trainer:
        def __init__(self) -> None:
            self.model = model
            self.optimizer = optimizer
            self.meter = AverageMeter()
            self.seen = 0

        @world.auto_batch
        def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.meter.update(loss.item(), len(images))
            self.seen += 1
            return loss.item()

    trainer = Trainer()
    for images, labels in _images(3):
        world.note(trainer.train_step(images, labels))


@program("equal", decorated="@oomkit.auto_batch, the counter under `current().is_last`")
def average_meter_last(world: World) -> None:
    """The same counter, updated only `if oomkit.current().is_last`."""
    model, optimizer = _linear_classifier()
    counter: dict[str, Any] = {"steps": 0}
    world.keep(model, optimizer, lambda: counter["steps"])

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if oomkit.current().is_last:
            counter["steps"] += 1
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step(images, labels))


def _train_with_class_weights(world: World, decorate: Callable[..., Any]) -> None:
    model, optimizer = _linear_classifier()
    world.keep(model, optimizer)
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)

    @decorate
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = criterion(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        return loss.item()

    for images, labels in _images(3):
        world.note(train_step({"image": images, "label": labels}))


def sum_of_weights(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return CLASS_WEIGHTS[batch["label"]].sum()


@program("equal", decorated="@oomkit.auto_batch(weight=sum_of_weights)")
def class_weights(world: World) -> None:
    """Class weights: the loss is a weighted mean; weight= returns the sum of the weights."""
    _train_with_class_weights(world, world.auto_batch(weight=sum_of_weights))


@program("equal", decorated="@oomkit.auto_batch(verify=True)", found={"weight": sum_of_weights})
def class_weights_unweighted(world: World) -> None:
    """The same without weight=: the proof finds it."""
    _train_with_class_weights(world, world.auto_batch(verify=True))


@program("equal", decorated="@oomkit.auto_batch, on the training and on the validation step")
def train_and_validate(world: World) -> None:
    """A training and a validation step, both decorated: BatchNorm frozen in both."""
    model = _small_cnn(norm=True).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    @world.auto_batch
    @torch.no_grad()
    def validate(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(images)
        return {"logits": logits, "right": logits.argmax(1) == labels}

    for images, labels in _images(2):
        world.note(train_step(images, labels))
        told = validate(images, labels)
        world.note(told["logits"].sum())
        world.note(told["right"].sum())
