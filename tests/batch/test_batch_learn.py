"""What earlier calls may teach about the rows: only what they show without a doubt."""

from __future__ import annotations

import pytest
import torch

import oomkit
from oomkit import _C


def probe(args, earlier=(), start=0, length=2, **options):
    names = ("a", "b", "c")[: len(args)]
    options["earlier"] = [(e, {}) for e in earlier]
    return _C._batch_probe(tuple(args), {}, names, options, start, length)


def clouds(*points):
    return [torch.rand(n, 3) for n in points]


def test_labels_beside_a_ragged_list_are_split_whatever_came_before():
    """The first cloud's points are not the rows, though the labels stay while they change."""
    earlier = [(clouds(5, 6, 4), torch.rand(3)), (clouds(7, 2, 9), torch.rand(3))]
    got = probe((clouds(8, 4, 6), torch.rand(3)), earlier)
    assert got["rows"] == 3 and [len(part) for part in got["args"]] == [2, 2]


def test_nor_where_the_clouds_happened_to_have_one_size():
    earlier = [(clouds(5, 5, 5), torch.rand(3)), (clouds(7, 2, 9), torch.rand(3))]
    got = probe((clouds(8, 4, 6), torch.rand(3)), earlier)
    assert [len(part) for part in got["args"]] == [2, 2]


def test_a_table_beside_a_ragged_list_is_known_by_the_length_of_the_list():
    table = torch.rand(3, 8)
    earlier = [(clouds(*range(1, n + 1)), table) for n in (5, 4)]
    got = probe((clouds(8, 4, 6), table), earlier)
    assert got["rows"] == 3 and got["args"][1] is table


def images(rows):
    return [torch.rand(3, 8, 8 + i) for i in range(rows)]


def test_channels_are_not_the_rows_that_labels_wander_beside():
    boxes = [{"boxes": torch.rand(n, 4)} for n in (1, 3, 2, 4, 2)]
    earlier = [(images(n), boxes[:n], torch.rand(n)) for n in (5, 4)]
    got = probe((images(5), boxes, torch.rand(5)), earlier)
    assert got["rows"] == 5 and [len(part) for part in got["args"]] == [2, 2, 2]


@pytest.mark.parametrize("boxes", [(1, 4, 2, 3, 1), (2, 2, 2, 2, 2), (5, 5, 5, 5, 5)])
def test_a_size_of_two_is_not_the_two_of_images_and_targets(boxes):
    targets = tuple({"boxes": torch.rand(n, 4)} for n in boxes)
    (got,) = probe(((tuple(images(5)), targets),))["args"]
    assert type(got) is tuple and [len(part) for part in got] == [2, 2]
    assert got[1][1] is targets[1] or got[1][1]["boxes"] is targets[1]["boxes"]


def test_two_images_and_two_targets():
    targets = [{"boxes": torch.rand(2, 4)}, {"boxes": torch.rand(1, 4)}]
    got = probe(([images(2), targets],), start=1, length=1)
    assert got["rows"] == 2 and [len(part) for part in got["args"][0]] == [1, 1]


def test_samples_that_are_lists_are_split():
    samples = [[torch.rand(4, 2), torch.rand(3, 2), torch.rand(n, 2)] for n in (1, 5, 2, 4)]
    (got,) = probe((samples,))["args"]
    assert len(got) == 2 and got[1][2] is samples[1][2]


def test_samples_that_are_tuples_of_different_things_are_refused():
    samples = [(torch.rand(4, 2 + n), torch.rand(n, 2)) for n in (1, 5, 2, 4)]
    with pytest.raises(oomkit.SplitError, match="may be 4 samples"):
        probe((samples,))


# --- split= on lists ---


def some_of(batch, start, length):
    return batch[start : start + length]


def columns(batch, start, length):
    return [part[start : start + length] for part in batch]


@pytest.mark.parametrize("sample", [lambda image: image, lambda image: (image, {"label": 3})])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_split_of_a_list_of_samples_goes_by_its_length(rows, sample):
    """The first image has 3 channels, which are no rows."""
    batch = [sample(image) for image in images(rows)]
    got = probe((batch,), split=some_of, start=rows - 1, length=1)
    assert got["rows"] == rows and len(got["args"][0]) == 1


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_split_of_a_list_of_columns_goes_by_their_rows(rows):
    batch = [torch.rand(rows, 3), torch.rand(rows)]
    got = probe((batch,), split=columns, length=1)
    assert got["rows"] == rows and [len(part) for part in got["args"][0]] == [1, 1]
    assert probe((batch[:1],), split=columns, length=1)["rows"] == rows


def test_split_that_returns_neither_is_refused():
    with pytest.raises(oomkit.SplitError, match="a list of one sample, or one as long"):
        probe((images(5),), split=lambda batch, start, length: batch[0])
    with pytest.raises(ZeroDivisionError):
        probe((images(5),), split=lambda batch, start, length: 1 / 0)
