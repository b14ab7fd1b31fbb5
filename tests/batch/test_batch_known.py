"""What earlier calls showed about the arguments."""

from __future__ import annotations

import pytest
import torch
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import force_slices


def probe(args, names=("a", "b", "c"), **options):
    return _C._batch_probe(tuple(args), {}, names[: len(args)], options, 0, -1)


def refusal(args, names=("a", "b", "c"), **options) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        probe(args, names, **options)
    return message_of(caught.value)


def calls(*sizes):
    """Calls with tensors of these sizes, each size an int or a shape."""
    return [(tuple(torch.rand(size) for size in each), {}) for each in sizes]


def test_class_weights_as_many_as_rows_are_known_by_a_call_with_other_rows():
    now = [torch.rand(4, 2), torch.rand(4)]
    names = ("x", "class_weights")
    assert "may be a weight per sample or one per class" in refusal(now, names)
    assert probe(now, names, earlier=calls(((8, 2), 4)))["split"] == ["x"]
    assert probe(now, names, earlier=calls(((8, 2), 8), ((6, 2), 6)))["split"] == list(names)
    same = calls(((4, 2), 4), ((4, 2), 4))
    assert "may be a weight" in refusal(now, names, earlier=same)


def test_weights_of_classes_do_not_change_a_step_silently():
    torch.manual_seed(0)
    model = nn.Linear(3, 4, dtype=torch.float64)
    weights = torch.rand(4, dtype=torch.float64)

    def function(x, y, class_weights):
        loss = nn.functional.cross_entropy(model(x), y, weight=class_weights, reduction="none")
        loss.mean().backward()
        return len(class_weights)

    step = oomkit.auto_batch(function, reduction="mean", join=lambda results, rows: results)
    x, y = torch.rand(8, 3, dtype=torch.float64), torch.arange(8) % 4
    step(x, y, weights)
    function(x[:4], y[:4], weights)
    model.zero_grad()
    function(x[:4], y[:4], weights)
    whole = model.weight.grad.clone()
    model.zero_grad()

    with force_slices((2, 2)):
        lengths = step(x[:4], y[:4], weights)

    assert lengths == [4, 4] and (whole - model.weight.grad).abs().max() <= 1e-12


def test_what_changes_by_itself_is_refused_even_when_it_fits_by_chance():
    earlier = calls((8, (20, 4)), (8, (17, 4)))
    message = "b has shape [8, 4] next to a batch of 8 rows, but its size was another one in"
    assert message in refusal([torch.rand(8), torch.rand(8, 4)], earlier=earlier)
    message = "b has shape [9, 4] next to a batch of 8 rows, and its size has changed while the"
    assert message in refusal([torch.rand(8, 2), torch.rand(9, 4)], earlier=earlier)


def test_what_follows_another_dimension_of_the_batch_is_whole():
    earlier = calls(((8, 5), 5), ((8, 7), 7))
    assert probe([torch.rand(8, 6), torch.rand(6)], earlier=earlier)["split"] == ["a"]
    assert probe([torch.rand(8, 8), torch.rand(8)], earlier=earlier)["split"] == ["a"]


def test_a_table_that_stays_is_no_doubt():
    table = (9, 3, 3)
    now = [torch.rand(4), torch.rand(table)]
    assert "either may be the batch" in refusal(now)
    assert probe(now, earlier=calls((8, table), (6, table)))["split"] == ["a"]


def test_flattened_rows_that_stay_are_a_table():
    now = [torch.rand(4, 5), torch.rand(20)]
    assert "looks like its rows flattened" in refusal(now)
    assert "flattened" in refusal(now, earlier=calls(((8, 5), 40), ((6, 5), 30)))
    assert probe(now, earlier=calls(((8, 5), 20), ((6, 5), 20)))["split"] == ["a"]


def test_the_rows_are_those_of_the_argument_that_batch_names():
    earlier = calls(((3,), (8, 2), 4), ((3,), (6, 2), 4))
    now = [torch.rand(3), torch.rand(4, 2), torch.rand(4)]
    assert probe(now, earlier=earlier, batch=("b",))["split"] == ["b"]
    assert probe(now, earlier=earlier, static=("a",))["split"] == ["b"]


def test_the_record_has_the_rows_of_the_argument_that_batch_names():
    for options in ({"batch": "x"}, {"static": "mean"}):
        step = oomkit.auto_batch(lambda mean, x: None, **options)
        step(torch.rand(3), torch.rand(8, 3))
        assert step.records[-1].batch_size == 8


SAMPLES = {
    "tensors of several sizes": [[torch.rand(n, 3) for n in (2, 5, 4)]],
    "dictionaries": [[{"x": torch.rand(3), "y": torch.rand(2)} for _ in range(5)]],
    "images and targets": [
        [torch.rand(3, 8, 8) for _ in range(4)], [{"boxes": torch.rand(2, 4)} for _ in range(4)],
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_whole_call_has_as_many_rows_as_samples_in_its_list(kind: str) -> None:
    step = oomkit.auto_batch(lambda *batch: None)
    step(*SAMPLES[kind])
    assert step.records[-1].batch_size == len(SAMPLES[kind][0])
    with force_slices([1] * len(SAMPLES[kind][0])):
        step(*SAMPLES[kind])
    assert step.records[-1].batch_size == len(SAMPLES[kind][0])


def test_a_whole_call_has_the_rows_of_the_columns_in_its_list() -> None:
    step = oomkit.auto_batch(lambda *batch: None)
    for batch in ([torch.rand(8, 3), torch.rand(8)], [torch.rand(8, 3), torch.rand(8), 0.5]):
        step(batch)
        assert step.records[-1].batch_size == 8
        step(batch, [torch.rand(8), torch.rand(8, 1)])
        assert step.records[-1].batch_size == 8


def test_what_belongs_to_a_single_row() -> None:
    """By its size, unless that has stayed while the rows changed: weight= gets it as well."""
    now = [torch.rand(1, 3), torch.rand(1)]
    assert probe(now)["split"] == ["a", "b"]
    assert probe(now, earlier=calls(((8, 3), 8), ((6, 3), 6)))["split"] == ["a", "b"]
    assert probe(now, earlier=calls(((8, 3), 1), ((6, 3), 1)))["split"] == ["a"]


def test_a_single_row_beside_weights_is_not_taken_for_them():
    got = probe([torch.rand(1, 3), torch.rand(5)])
    assert got["rows"] == 1 and got["split"] == ["a"]
