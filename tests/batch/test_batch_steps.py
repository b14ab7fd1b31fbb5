"""Batches of every kind in steps that are recovered: detection, returned losses, objects that the
step changes."""

from __future__ import annotations

import collections
import gc
import weakref
from typing import Any

import pytest
import torch
from helpers import batches
from helpers.batches import SPLIT, dense, read
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

TOLERANCE = 1e-12


def run(function, *args, slices=None, **options):
    """Result and gradients of a step that takes a model and these arguments."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    step = oomkit.auto_batch(lambda *args: function(model, *args), reduction="mean", **options)
    if slices is None:
        result = function(model, *args)
    else:
        with force_slices(slices):
            result = step(*args)
    return result, [p.grad for p in model.parameters()]


def equal(one, other):
    return all((a - b).abs().max() <= TOLERANCE for a, b in zip(one, other, strict=True))


# --- detection ---


class Target(batches.Plain):
    """One image's boxes."""


def scene(kind):
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, 4 + i, 5, generator=generator, dtype=torch.float64) for i in range(4)]
    targets = []
    for count in (2, 5, 1, 3):
        boxes = torch.rand(count, 2, generator=generator, dtype=torch.float64)
        labels = torch.arange(count)
        targets.append(
            {
                "dict": {"x": boxes, "y": labels},
                "object": Target(boxes, labels),
                "opaque": batches.Closed(boxes, labels),
                "numpy": {"x": boxes.numpy(), "y": labels.numpy()},
            }[kind]
        )
    return images, targets


def detect(model, images, targets):
    losses = []
    for image, target in zip(images, targets, strict=True):
        boxes, labels = read(target)
        out = model(image.mean((1, 2)))
        losses.append((out - dense(boxes)).square().mean() + dense(labels).double().mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    return {"loss": loss.detach(), "images": images, "targets": targets}


@pytest.mark.parametrize("kind", ["dict", "object", "numpy"])
@pytest.mark.parametrize("slices", [(2, 2), (1, 3), (1, 1, 1, 1)])
def test_detection_with_lists_of_images_and_targets(kind, slices):
    images, targets = scene(kind)
    result, whole = run(detect, images, targets)
    joined, split = run(detect, images, targets, slices=slices)

    assert equal(whole, split) and abs(result["loss"] - joined["loss"]) <= TOLERANCE
    assert len(joined["images"]) == 4 and all(map(torch.equal, joined["images"], images))
    for one, other in zip(joined["targets"], targets, strict=True):
        assert type(one) is type(other) and torch.equal(dense(read(one)[0]), dense(read(other)[0]))


@pytest.mark.parametrize("collate", [tuple, list])
def test_detection_with_what_zip_makes_of_samples(collate):
    """collate_fn=lambda samples: tuple(zip(*samples))"""
    images, targets = scene("dict")
    labels = [3, 1, 4, 1]
    batch = collate(zip(*zip(images, targets, labels, strict=True), strict=True))

    def function(model, batch):
        result = detect(model, *batch[:2])
        return result["loss"], batch[2]

    (loss, _), whole = run(function, batch)
    (split_loss, joined), split = run(function, batch, slices=(3, 1), join=added)
    assert equal(whole, split) and abs(loss - split_loss) <= TOLERANCE and joined == (3, 1, 4, 1)


def added(results, rows):
    loss = sum(loss * n for (loss, _), n in zip(results, rows, strict=True)) / sum(rows)
    return loss, sum((labels for _, labels in results), ())


def test_detection_with_opaque_targets_inside_the_batch():
    images, targets = scene("opaque")
    stacked = torch.stack([image.mean((1, 2)) for image in images])

    def function(model, batch):
        losses = [
            (model(x) - target.x).square().mean()
            for x, target in zip(batch["x"], batch["targets"], strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()

    _, whole = run(function, {"x": stacked, "targets": targets})
    _, split = run(function, {"x": stacked, "targets": targets}, slices=(3, 1))
    assert equal(whole, split)


# --- losses that the caller runs backward on ---


@pytest.mark.parametrize("kind", SPLIT)
def test_a_returned_loss_that_fails_in_the_callers_backward(kind):
    torch.manual_seed(0)
    batch = SPLIT[kind](*batches.numbers())
    model = nn.Linear(3, 1, dtype=torch.float64)

    @oomkit.auto_batch(reduction="mean")
    def compute_loss(batch):
        x, y = map(dense, read(batch))
        return (model(x) - y).square().mean()

    compute_loss(batch).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = compute_loss(batch)
    with inject_oom(nth=1, times=1, phase="backward") as fault:
        loss.backward()

    assert fault.fired == 1 and equal(whole, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("kind", ["UserDict", "OrderedDict", "data class", "SimpleNamespace"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_that_the_loss_is_put_into_dies(kind, nested):
    """The graph of the loss owns the waiting call, which owns the batch: no circle."""
    model = nn.Linear(3, 1, dtype=torch.float64)

    @oomkit.auto_batch
    def compute_loss(batch):
        inner = batch["inner"] if nested else batch
        x, y = map(dense, read(inner))
        loss = (model(x) - y).square().mean()
        if isinstance(inner, dict | collections.UserDict):
            inner["loss"] = loss
        else:
            inner.loss = loss
        return loss

    batch = SPLIT[kind](*batches.numbers())
    batch = {"inner": batch} if nested else batch
    dead = weakref.ref(compute_loss(batch))
    del batch
    gc.collect()
    assert dead() is None


# --- objects that the step changes ---


def test_attributes_that_the_failed_attempt_set_are_not_seen_by_the_replay():
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    seen: Seen[Any] = Seen()

    @oomkit.auto_batch(reduction="mean")
    def step(batch):
        seen.append(sorted(vars(batch)))
        batch.x = batch.x / 255
        batch.cache = batch.x * 2
        loss = (model(batch.x) - batch.y).square().mean()
        loss.backward()

    x, y = batches.numbers()
    whole = (model(x / 255) - y).square().mean()
    whole = torch.autograd.grad(whole, list(model.parameters()))
    with inject_oom(nth=4, times=1) as fault:
        step(batches.Plain(x, y))

    assert fault.fired == 1 and seen == [["note", "x", "y"]] * 3
    assert equal(whole, [p.grad for p in model.parameters()])


def test_arrays_that_the_failed_attempt_changed_are_said():
    array = batches.numbers()[0].numpy()

    def function(batch):
        batch["x"] /= 255
        return torch.as_tensor(batch["x"]) * 2

    step = oomkit.auto_batch(function)
    with inject_oom(nth=1, times=1) as fault:
        with pytest.raises(
            oomkit.SplitError, match=r"because it changed batch\['x'\] in place; make a"
        ):
            step({"x": array})
    assert fault.fired == 1

    array = batches.numbers()[0].numpy()
    want = array / 255 * 2
    step = oomkit.auto_batch(function, restore_batch=True)
    with inject_oom(nth=1, times=1) as fault:
        assert abs(step({"x": array}).numpy() - want).max() <= TOLERANCE
    assert fault.fired == 1


# --- nothing is left behind ---


def test_no_object_is_left_behind():
    step = oomkit.auto_batch(lambda batch: None)

    def once(kind):
        x, y = batches.numbers()
        batch = SPLIT[kind](x, y)
        step(batch)
        _C._batch_probe((batch,), {}, ("a",), {}, 1, 3)
        return weakref.ref(x), weakref.ref(y)

    dead = [pair for kind in SPLIT for pair in (once(kind), once(kind))]
    gc.collect()
    assert all(ref() is None for pair in dead for ref in pair)
