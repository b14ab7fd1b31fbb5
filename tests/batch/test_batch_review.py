"""Batches that were once split in silence as something that they are not."""

from __future__ import annotations

import array
import collections
import functools
import types
import typing
import warnings

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

TOLERANCE = 1e-12


class Captioned(typing.NamedTuple):
    x: torch.Tensor
    captions: tuple[str, ...]


class Rows(list):
    """A list of one's own."""


def gradient(function, batch, slices=None, **options):
    """Of the weights of one small model, whole or split."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)

    def step(*args, **kwargs):
        function(model, *args, **kwargs).backward()

    if slices is None:
        step(*batch)
    else:
        with warnings.catch_warnings(), force_slices(slices):
            warnings.simplefilter("ignore", oomkit.OomkitWarning)
            oomkit.auto_batch(step, **options)(*batch)
    return model.weight.grad


def assert_same(function, batch, slices, **options):
    whole = gradient(function, batch)
    assert (whole - gradient(function, batch, slices, **options)).abs().max() <= TOLERANCE


def rows(count, *shape):
    torch.manual_seed(1)
    return torch.randn(count, *shape, dtype=torch.float64)


def detect(model, images, targets):
    losses = [
        model(target["boxes"] if isinstance(target, dict) else target).sum() * image.mean()
        for image, target in zip(images, targets, strict=False)
    ]
    return sum(losses) * image_size(images) / len(losses)


def image_size(images):
    return images[0].numel()


@pytest.mark.parametrize("boxes", [(2, 0, 3), (3, 3, 3), (5, 5, 5), (3, 1, 2)])
@pytest.mark.parametrize("how", ["two arguments", "a tuple", "zipped", "a dict"])
def test_as_many_images_as_channels_are_samples(how, boxes):
    images = [rows(3, 4, 5) for _ in boxes]
    targets = [{"boxes": rows(count, 3)} for count in boxes]
    function, batch = {
        "two arguments": (detect, (images, targets)),
        "a tuple": (lambda m, b: detect(m, *b), ((images, targets),)),
        "zipped": (lambda m, b: detect(m, *b), ((tuple(images), tuple(targets)),)),
        "a dict": (lambda m, b: detect(m, b["i"], b["t"]), ({"i": images, "t": targets},)),
    }[how]
    assert_same(function, batch, (2, 1))


@pytest.mark.parametrize("stacked", [False, True])
def test_as_many_boxes_as_images_may_be_columns_and_are_refused(stacked):
    images = rows(3, 3, 4, 5) if stacked else [rows(3, 4, 5) for _ in range(3)]
    targets = [rows(3, 3) for _ in range(3)]
    with pytest.raises(
        oomkit.SplitError, match=r"targets is a 'list' of 3 similar tensors next to"
    ):
        step = oomkit.auto_batch(lambda images, targets: None, accumulation_steps=2)
        step(images, targets)
    assert_same(
        lambda m, images, targets: detect(m, images, targets),
        (images, [{"boxes": each} for each in targets]),
        (2, 1),
    )


def test_two_columns_of_two_rows_stay_columns():
    x, y = rows(2, 3), rows(2, 3)
    assert_same(lambda m, b: (m(b[0]) - m(2 * b[1])).square().mean(), ([x, y],), (1, 1))
    ids = torch.arange(4).reshape(2, 2)
    seen = []
    step = oomkit.auto_batch(lambda x, b: seen.append([each.shape for each in b]))
    with force_slices((1, 1)):
        step(x, [ids, ids + 1])
    assert seen == [[(1, 2), (1, 2)]] * 2


def test_one_tensor_at_two_places_is_split_in_the_dimension_of_each():
    table = rows(4, 4)
    seen = []
    step = oomkit.auto_batch(
        lambda x, a, b: seen.append((a.shape, b["a"].shape)),
        dim={"x": 0, "a": 0, "b": 1},
    )
    with force_slices((3, 1)):
        step(rows(4, 3), table, {"a": table})
    assert seen == [((3, 4), (4, 3)), ((1, 4), (4, 1))]


def captioned(model, x, captions):
    pairs = zip(x, captions, strict=False)
    return torch.stack([model(each) * len(caption) for each, caption in pairs]).mean()


@pytest.mark.parametrize("kind", ["tuple", "dict", "named tuple", "beside"])
def test_captions_in_a_tuple_go_with_their_rows(kind):
    x, captions = rows(4, 3), ("a", "bb", "ccc", "ddddd")
    function, batch = {
        "tuple": (lambda m, b: captioned(m, *b), ((x, captions),)),
        "dict": (lambda m, b: captioned(m, b["x"], b["t"]), ({"x": x, "t": captions},)),
        "named tuple": (lambda m, b: captioned(m, *b), (Captioned(x, captions),)),
        "beside": (
            lambda m, x, b: captioned(m, x * b["y"], b["t"]),
            (x, {"y": rows(4, 1), "t": list(captions)}),
        ),
    }[kind]
    assert_same(function, batch, (1, 3))


def test_a_long_tuple_of_numbers_goes_with_its_rows():
    def scaled(model, batch):
        pairs = zip(batch["x"], batch["lengths"], strict=False)
        return torch.stack([model(each) * length for each, length in pairs]).mean()

    assert_same(scaled, ({"x": rows(5, 3), "lengths": (1, 2, 3, 4, 9)},), (1, 4))


@pytest.mark.parametrize("kind", ["labels", "arrays"])
def test_as_many_arrays_and_labels_as_rows_are_refused(kind):
    each = torch.arange(4) if kind == "labels" else rows(4, 4).numpy()
    step = oomkit.auto_batch(lambda batch: None, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match=r"batch\['t'\] is a 'list' of 4 similar tensors"):
        step({"x": rows(4, 3), "t": [each, each + 1, each + 2, each + 3]})


ODD = {
    "deque": collections.deque,
    "subclass of list": Rows,
    "subclass of tuple": type("Pair", (tuple,), {}),
    "UserList": collections.UserList,
    "array": lambda values: array.array("d", values),
    "values of a dict": lambda values: dict(enumerate(values)).values(),
    "range": lambda values: range(len(values)),
    "list in a dict": lambda values: {"values": list(values)},
}


@pytest.mark.parametrize("kind", ODD)
def test_sequences_that_are_not_opened_are_refused(kind):
    step = oomkit.auto_batch(lambda x, other: None, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="as long as the batch"):
        step(rows(4, 3), ODD[kind]([1.0, 2.0, 3.0, 5.0]))
    step(rows(4, 3), ODD[kind]([1.0, 2.0, 3.0]))
    oomkit.auto_batch(lambda x, other: None, accumulation_steps=2, static="other")(
        rows(4, 3), ODD[kind]([1.0, 2.0, 3.0, 5.0])
    )
    if kind != "list in a dict":
        with pytest.raises(oomkit.SplitError, match="as long as the batch"):
            oomkit.auto_batch(lambda batch: None, accumulation_steps=2)(
                {"x": rows(4, 3), "other": ODD[kind]([1.0, 2.0, 3.0, 5.0])}
            )


def test_a_size_as_long_as_the_batch_is_not_refused():
    step = oomkit.auto_batch(lambda x, other: None, accumulation_steps=2)
    step(rows(2, 3), torch.Size([2, 3]))
    step(rows(2, 3), {"size": (224, 224)})


@pytest.mark.parametrize(
    "kind",
    [
        lambda y: collections.deque([y]),
        lambda y: {y},
        lambda y: types.MappingProxyType({"y": y}),
        lambda y: collections.ChainMap({"y": y}),
        lambda y: collections.UserList([y]),
    ],
    ids=["deque", "set", "proxy", "ChainMap", "UserList"],
)
def test_tensors_in_containers_that_are_not_opened_are_refused(kind):
    step = oomkit.auto_batch(lambda x, other: None, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="which holds tensors as long as the batch"):
        step(rows(4, 3), kind(rows(4, 1)))
    step(rows(4, 3), kind(rows(5, 1)))


def a_default():
    def step(x, y=rows(2, 1)):  # noqa: B008
        return (x * y).mean()

    return step


def a_closure():
    y = rows(2, 1)
    return lambda x: (x * y).mean()


TARGETS = rows(2, 1)


@pytest.mark.parametrize(
    "make",
    [
        a_default,
        a_closure,
        lambda: functools.partial(lambda x, y: (x * y).mean(), y=rows(2, 1)),
        lambda: lambda x: (x * TARGETS).mean(),
    ],
    ids=["default", "closure", "partial", "global"],
)
def test_what_has_the_rows_and_is_no_argument_is_said(make):
    step = oomkit.auto_batch(make(), accumulation_steps=2)
    with torch.no_grad(), pytest.warns(oomkit.OomkitWarning, match=r"as many rows: \w+ \[2, 1\]"):
        step(rows(2, 3))


def test_a_default_that_is_given_is_not_said():
    step = oomkit.auto_batch(a_default(), accumulation_steps=2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        step(rows(2, 3), rows(2, 1))
        step(rows(2, 3), y=rows(2, 1))
