"""oomkit.register_splitter."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import force_slices, inject_oom


def probe(args, start=0, length=-1, **options):
    return _C._batch_probe(tuple(args), {}, ("a", "b", "c")[: len(args)], options, start, length)


class Boxes:
    """Boxes of all images in one tensor, with the image that each belongs to."""

    def __init__(self, boxes, image, images):
        self.boxes, self.image, self.images = boxes, image, images

    def __len__(self):
        return self.images


def cut(value, start, length):
    wanted = (value.image >= start) & (value.image < start + length)
    return type(value)(value.boxes[wanted], value.image[wanted] - start, length)


def put_together(results, rows):
    begins = [sum(rows[:i]) for i in range(len(rows))]
    return type(results[0])(
        torch.cat([each.boxes for each in results]),
        torch.cat([each.image + begin for each, begin in zip(results, begins, strict=True)]),
        sum(rows),
    )


class Derived(Boxes):
    pass


oomkit.register_splitter(Boxes, split=cut, join=put_together)


def boxes(kind=Boxes):
    image = torch.tensor([0, 0, 1, 3, 3, 3, 4])
    return kind(torch.arange(28.0, dtype=torch.float64).reshape(7, 4), image, 5)


@pytest.mark.parametrize("kind", [Boxes, Derived])
def test_a_registered_type_is_split_beside_a_tensor(kind):
    images, found = torch.rand(5, 2), boxes(kind)
    got = probe([images, found], start=1, length=3)
    assert got["rows"] == 5 and got["split"] == ["a", "b"]
    part = got["args"][1]
    assert type(part) is kind and part.image.tolist() == [0, 2, 2, 2] and len(part) == 3


def test_it_can_be_the_batch_itself_or_lie_in_it():
    assert probe([boxes()])["rows"] == 5
    got = probe([{"x": torch.rand(5, 2), "boxes": boxes(), "names": list("abcde")}], 4, 1)
    assert got["args"][0]["names"] == ["e"] and len(got["args"][0]["boxes"].boxes) == 1


@pytest.mark.parametrize("injected", [True, False])
def test_a_step_with_it_is_exact(injected):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)

    def function(found):
        rows = torch.zeros(len(found), 4, dtype=torch.float64)
        rows = rows.index_add(0, found.image, found.boxes)
        loss = model(rows).square().mean()
        loss.backward()
        return loss.detach(), found

    step = oomkit.auto_batch(function, reduction="mean")
    whole_loss, _ = function(boxes())
    whole = [p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None

    if injected:
        with inject_oom(nth=4, times=1) as fault:
            loss, found = step(boxes())
        assert fault.fired == 1
    else:
        with force_slices((2, 2, 1)):
            loss, found = step(boxes())

    assert abs(loss - whole_loss) <= 1e-9  # of 1e2
    for one, other in zip(whole, model.parameters(), strict=True):
        assert (one - other.grad).abs().max() <= 1e-12 * one.abs().max()
    assert len(found) == 5 and torch.equal(found.boxes, boxes().boxes)
    assert torch.equal(found.image, boxes().image)


def test_the_splitter_gets_what_was_captured():
    found = boxes()

    def between():
        found.boxes = found.boxes / 255
        found.image = None

    part = probe([found], start=0, length=1, between=between)["args"][0]
    assert torch.equal(part.boxes, boxes().boxes[:2])


def test_tensors_inside_are_marked():
    found = boxes()
    with pytest.raises(oomkit.SplitError, match="it changed a.boxes in place"):
        probe([found], between=lambda: found.boxes.mul_(2))


def test_the_nearest_type_decides_and_may_be_registered_late():
    class Near(Boxes):
        pass

    assert len(probe([boxes(Near)], start=0, length=2)["args"][0].boxes) == 3
    oomkit.register_splitter(Near, split=lambda value, start, length: value, size=lambda value: 5)
    assert len(probe([boxes(Near)], start=0, length=5)["args"][0].boxes) == 7


def test_a_type_without_instance_dictionary_is_handed_over_as_it_is():
    class Rows(list):
        pass

    oomkit.register_splitter(Rows, split=lambda value, start, n: Rows(value[start : start + n]))
    rows = Rows([torch.rand(2), torch.rand(3), torch.rand(4)])
    got = probe([rows], start=1, length=2)
    assert got["rows"] == 3 and type(got["args"][0]) is Rows and got["args"][0] == rows[1:]


def test_a_tensor_subclass_with_a_splitter_of_its_own():
    class Backwards(torch.Tensor):
        pass

    oomkit.register_splitter(
        Backwards, split=lambda value, start, length: value.flip(0)[start : start + length]
    )
    x = torch.arange(4.0).as_subclass(Backwards)
    assert probe([x], start=0, length=1)["args"][0].tolist() == [3.0]


# --- what goes wrong ---


class Broken(Boxes):
    pass


def test_a_wrong_number_of_rows_is_refused():
    oomkit.register_splitter(Broken, split=lambda value, start, length: value)
    with pytest.raises(oomkit.SplitError) as caught:
        probe([boxes(Broken)], start=1, length=2)
    assert message_of(caught.value) == (
        "register_splitter(Broken, split=...) returned 5 rows for split(value, 1, 2): expected 2"
    )


@pytest.mark.parametrize("which", ["split", "size", "join"])
def test_errors_of_the_users_functions_pass_with_a_note(which):
    def fail(*args):
        raise KeyError("of the user")

    functions = {"split": cut, "size": len, "join": put_together, which: fail}
    oomkit.register_splitter(Broken, **functions)
    step = oomkit.auto_batch(lambda found: found)
    with force_slices((3, 2)), pytest.raises(KeyError, match="of the user") as caught:
        step(boxes(Broken))
    note = f"oomkit: raised by {which}= of register_splitter() for a 'Broken'"
    assert note in map(message_of, caught.value.__notes__)


def test_a_size_that_is_no_number_of_rows():
    oomkit.register_splitter(Broken, split=cut, size=lambda value: -1)
    with pytest.raises(ValueError, match="expected 0 rows or more, got -1"):
        probe([boxes(Broken)])


def test_no_size_and_no_len():
    class Nothing:
        pass

    oomkit.register_splitter(Nothing, split=cut)
    with pytest.raises(oomkit.SplitError) as caught:
        probe([Nothing()])
    assert message_of(caught.value) == (
        "auto_batch cannot split argument 'a': a is a 'Nothing' without a len(); "
        "give size=... to register_splitter()"
    )


def test_it_must_agree_with_the_batch():
    with pytest.raises(oomkit.SplitError, match="b is a 'Boxes' of 5 rows next to a batch of 4"):
        probe([torch.rand(4), boxes()])
    assert probe([torch.rand(4), boxes()], static=("b",))["split"] == ["a"]
    with pytest.raises(oomkit.SplitError, match="disagree|of 5 rows"):
        probe([{"x": torch.rand(4), "boxes": boxes()}])


@pytest.mark.parametrize(
    "type_, functions, error, message",
    [
        (3, {"split": cut}, TypeError, r"register_splitter\(\) expected a type, got int"),
        (Boxes, {}, TypeError, r"register_splitter\(\) needs split=: a callable that takes"),
        (Boxes, {"split": 3}, TypeError, r"split=...\) expected a callable, got int"),
        (Boxes, {"split": cut, "size": 3}, TypeError, r"size=...\) expected a callable, got int"),
        (Boxes, {"split": cut, "join": 3}, TypeError, r"join=...\) expected a callable, got int"),
        (dict, {"split": cut}, ValueError, "cannot change how 'dict' is split"),
        (torch.Tensor, {"split": cut}, ValueError, "cannot change how 'Tensor' is split"),
    ],
)
def test_what_cannot_be_registered(type_, functions, error, message):
    with pytest.raises(error, match=message):
        oomkit.register_splitter(type_, **functions)


def test_the_options_of_the_decorator_come_first():
    step_split = probe(
        [boxes()], split=lambda value, start, n: value.boxes[start : start + n], start=0, length=2
    )
    assert step_split["args"][0].shape == (2, 4) and step_split["rows"] == 5


def test_graph_batches_are_refused_by_the_name_of_their_type():
    with pytest.raises(oomkit.SplitError, match="batch is a 'Graph', which holds tensors; tell"):
        _C._batch_probe((batches.Graph(*batches.numbers()),), {}, ("batch",), {}, 0, -1)
