"""Detection: images in lists, targets in lists of dictionaries, losses in dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..world import World, program

CLASSES = 3
CELL = 4
IMAGES = 5

Image = torch.Tensor
Target = dict[str, torch.Tensor]


class Detector(nn.Module):
    """One convolution per level of detail; each cell may hold the centre of one box."""

    def __init__(self, per_image: bool = True) -> None:
        super().__init__()
        self.per_image = per_image
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, CELL, stride=CELL)
        )
        self.scores = nn.Conv2d(8, CLASSES + 1, 1)
        self.boxes = nn.Conv2d(8, 4, 1)

    def forward(self, images: Sequence[Image], targets: Sequence[Target]) -> dict[str, Any]:
        scored, boxed = [], []
        for image, target in zip(images, targets, strict=True):
            features = self.body(image[None])
            scores = self.scores(features)[0].flatten(1).T
            boxes = self.boxes(features)[0].flatten(1).T
            wide = image.shape[-1] // CELL
            centre = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2 // CELL
            cells = (centre[:, 1] * wide + centre[:, 0]).long()
            wanted = torch.full((len(scores),), CLASSES)
            wanted[cells] = target["labels"]
            scored.append(F.cross_entropy(scores, wanted))
            boxed.append(F.smooth_l1_loss(boxes[cells], target["boxes"] / CELL, reduction="none"))
        if self.per_image:
            box = torch.stack([losses.mean() for losses in boxed]).mean()
        else:
            box = torch.cat(boxed).mean()
        return {"loss_classifier": torch.stack(scored).mean(), "loss_box_reg": box}


def _scene(height: int, width: int, boxes: int) -> tuple[Image, Target]:
    cells = torch.randperm(height * width // CELL**2)[:boxes]
    corner = torch.stack([cells % (width // CELL), cells // (width // CELL)], dim=1) * CELL
    box = torch.cat([corner, corner + torch.randint(1, CELL + 1, (boxes, 2))], dim=1)
    target = {
        "boxes": box.double(),
        "labels": torch.randint(0, CLASSES, (boxes,)),
        "image_id": torch.randint(0, 1000, (1,)),
    }
    return torch.rand(3, height, width).double(), target


def _scenes(one_size: bool, boxes: Sequence[int] = (1, 4, 2, 3, 1)) -> tuple[list[Image], Any]:
    """As `collate_fn = lambda batch: tuple(zip(*batch))` gives them."""
    sides = [(8, 12), (12, 8), (8, 8), (12, 12), (8, 16)]
    rows = [
        _scene(8, 12, n) if one_size else _scene(*side, n)
        for side, n in zip(sides, boxes, strict=True)
    ]
    images, targets = zip(*rows, strict=True)
    return list(images), list(targets)


def _detector(per_image: bool = True) -> tuple[Detector, torch.optim.Optimizer]:
    model = Detector(per_image).double().train()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@program("equal")
def detector_image_list(world: World) -> None:
    """Images of several sizes in a list, targets in another; the losses of a dictionary summed."""
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one_batch(images: list[Image], targets: list[Target]) -> dict[str, float]:
        losses = model(images, targets)
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return {name: loss.item() for name, loss in losses.items()}

    for _ in range(3):
        told = train_one_batch(*_scenes(one_size=False))
        world.note(told["loss_classifier"])
        world.note(told["loss_box_reg"])


@program("equal")
def detector_stacked(world: World) -> None:
    """Images stacked, five boxes in some and one in others; a batch with as many boxes each."""
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one_batch(images: Image, targets: list[Target]) -> float:
        optimizer.zero_grad()
        losses = model(images, targets)
        total = losses["loss_classifier"] + 0.5 * losses["loss_box_reg"]
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total.item()

    for boxes in ((1, 4, 2, 3, 1), (IMAGES,) * IMAGES, (2,) * IMAGES):
        images, targets = _scenes(one_size=True, boxes=boxes)
        world.note(train_one_batch(torch.stack(images), targets))


@program("equal")
def detector_one_argument(world: World) -> None:
    """The loader's tuple of tuples as the only argument: `images, targets = batch`."""
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one_batch(batch: tuple[tuple[Image, ...], tuple[Target, ...]]) -> float:
        images, targets = batch
        losses = model(images, targets)
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total.item()

    for _ in range(3):
        images, targets = _scenes(one_size=False)
        world.note(train_one_batch((tuple(images), tuple(targets))))


Pairs = list[tuple[Image, Target]]


def _train_pairs(world: World, decorate: Callable[..., Any]) -> None:
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @decorate
    def train_one_batch(samples: Pairs) -> float:
        losses = model([image for image, _ in samples], [target for _, target in samples])
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total.item()

    for _ in range(3):
        world.note(train_one_batch(list(zip(*_scenes(one_size=False), strict=True))))


@program("equal")
def detector_pairs(world: World) -> None:
    """A list of (image, target) pairs, not collated, which might also be columns."""
    _train_pairs(world, world.auto_batch)


def some_of(samples: Pairs, start: int, length: int) -> Pairs:
    return samples[start : start + length]


@program("equal", decorated="@oomkit.auto_batch(split=some_of)")
def detector_pairs_split(world: World) -> None:
    """The same with split= as the error proposes."""
    _train_pairs(world, world.auto_batch(split=some_of))


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the function of the loss")
def detector_loss_returned(world: World) -> None:
    """As in Lightning: a dictionary with the loss and its parts; the caller runs backward."""
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @world.auto_batch
    def training_step(images: list[Image], targets: list[Target]) -> dict[str, torch.Tensor]:
        losses = model(images, targets)
        parts = {name: loss.detach() for name, loss in losses.items()}
        return {"loss": sum(losses.values()), **parts}

    for _ in range(3):
        told = training_step(*_scenes(one_size=False))
        optimizer.zero_grad()
        told["loss"].backward()
        optimizer.step()
        world.note(told["loss"].item())
        world.note(told["loss_box_reg"])


def _train_per_box(world: World, decorate: Callable[..., Any]) -> None:
    model, optimizer = _detector(per_image=False)
    model.scores.requires_grad_(False)
    world.keep(model, optimizer)

    @decorate
    def train_one_batch(images: list[Image], targets: list[Target]) -> float:
        loss = model(images, targets)["loss_box_reg"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_one_batch(*_scenes(one_size=False)))


@program("equal", found={"reduction": "sum"})
def detector_sum_forgotten(world: World) -> None:
    """The losses of the images are added up without reduction="sum": the proof finds the sum."""
    model, optimizer = _detector()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_one_batch(images: list[Image], targets: list[Target]) -> float:
        losses = [model([i], [t]) for i, t in zip(images, targets, strict=True)]
        loss = torch.stack([sum(each.values()) for each in losses]).sum() / 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    images, targets = _scenes(one_size=False)
    for _ in range(3):
        world.note(train_one_batch(images, targets))


def number_of_boxes(batch: tuple[list[Image], list[Target]]) -> int:
    _, targets = batch
    return sum(len(target["boxes"]) for target in targets)


@program("equal", decorated="@oomkit.auto_batch(weight=number_of_boxes)")
def detector_per_box(world: World) -> None:
    """The loss is a mean over the boxes of all images; weight= counts the boxes."""
    _train_per_box(world, world.auto_batch(weight=number_of_boxes))


@program(
    "equal",
    decorated="@oomkit.auto_batch(verify=True)",
    found={"weight": number_of_boxes},
)
def detector_per_box_unweighted(world: World) -> None:
    """The same without weight=: the proof counts the boxes in the list."""
    _train_per_box(world, world.auto_batch(verify=True))


@program("equal")
def mask_and_boundary(world: World) -> None:
    """Segmentation with a mask, a boundary and names of files; dice is a mean over images."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    def dice(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        share = logits.sigmoid().flatten(1)
        mask = mask.flatten(1)
        return 1 - 2 * (share * mask).sum(1) / (share.sum(1) + mask.sum(1))

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> dict[str, Any]:
        optimizer.zero_grad()
        logits = model(batch["image"])
        loss = dice(logits[:, 0], batch["mask"]).mean()
        loss = loss + F.binary_cross_entropy_with_logits(logits[:, 1], batch["boundary"])
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "files": batch["file"], "logits": logits.detach()}

    for _ in range(3):
        mask = (torch.rand(IMAGES, 6, 6) < 0.4).double()
        batch = {
            "image": torch.rand(IMAGES, 3, 6, 6).double(),
            "mask": mask,
            "boundary": (mask != mask.roll(1, dims=-1)).double(),
            "file": [f"{i}.png" for i in range(IMAGES)],
        }
        told = train_step(batch)
        assert told["files"] == batch["file"]
        world.note(told["loss"])
        world.note(told["logits"][3].sum())
