"""Finding the batch, checking it, and building the arguments of a micro-batch."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit import _C

ADVICE = "; name what is to be split with batch=... or pass it whole with static=..."


def probe(args=(), kwargs=None, names=None, start=0, length=-1, **options):
    names = names or ("a", "b", "c", "d")[: len(args)]
    return _C._batch_probe(tuple(args), kwargs or {}, names, options, start, length)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        probe(*args, **kwargs)
    return message_of(caught.value)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Field(torch.Tensor):
    """A tensor subclass."""


# --- which argument, how many rows ---


def test_a_tensor_is_narrowed_to_a_view_of_its_rows():
    x = torch.arange(24.0).reshape(8, 3)

    got = probe([x], start=2, length=3)

    assert got["rows"] == 8 and got["split"] == ["a"]
    assert torch.equal(got["args"][0], x[2:5])
    assert got["args"][0].data_ptr() == x[2:].data_ptr()
    assert got["argument"] is got["args"][0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16])
def test_any_dtype_and_one_dimension(dtype):
    x = torch.arange(6).to(dtype)
    assert torch.equal(probe([x], start=1, length=4)["args"][0], x[1:5])


def test_a_tensor_subclass_is_split_as_its_own_type():
    x = torch.ones(6, 2).as_subclass(Field)
    assert type(probe([x], start=0, length=2)["args"][0]) is Field


def test_a_tensor_that_requires_grad_keeps_its_graph():
    x = torch.ones(4, 2, requires_grad=True)
    probe([x], start=1, length=2)["args"][0].sum().backward()
    assert x.grad.sum(1).tolist() == [0.0, 2.0, 2.0, 0.0]


def test_containers_are_rebuilt_as_their_own_type():
    x, y, note = torch.rand(8, 3), torch.arange(8), object()
    batch = {"pair": Pair(x, y), "deep": [(x, {"k": y}), None, "name", 3, note]}

    got = probe([batch], start=4, length=2)["args"][0]

    assert type(got["pair"]) is Pair and torch.equal(got["pair"].y, y[4:6])
    assert type(got["deep"]) is list and type(got["deep"][0]) is tuple
    assert torch.equal(got["deep"][0][1]["k"], y[4:6])
    assert got["deep"][1:] == [None, "name", 3, note]
    assert got is not batch and batch["pair"].x is x


def test_paths_of_what_is_split():
    x = torch.rand(8)
    batch = {"pair": Pair(x, x), 7: [x, torch.tensor(1.0)]}
    assert probe([batch])["split"] == ["a['pair'][0]", "a['pair'][1]", "a[7][0]"]


def test_the_whole_batch_gets_new_containers_and_the_very_tensors():
    x, y = torch.rand(8, 3), torch.rand(8)
    batch = {"x": x, "in": [y]}

    got = probe([batch], between=lambda: (batch.pop("x"), batch["in"].clear()))["args"][0]

    assert got["x"] is x and got["in"][0] is y
    assert list(got) == ["x", "in"]


def test_a_mutated_container_does_not_reach_a_micro_batch():
    batch = {"x": torch.rand(8, 3), "y": torch.rand(8)}
    got = probe([batch], start=0, length=4, between=batch.clear)["args"][0]
    assert got["x"].shape == (4, 3) and got["y"].shape == (4,)


def test_other_arguments_with_the_rows_in_front_join():
    x, y, z = torch.rand(8, 3), torch.rand(8), torch.rand(8, 1)
    got = probe([x, {"y": y}], {"z": z}, start=0, length=2)
    assert got["split"] == ["a", "b['y']", "z"]
    assert got["kwargs"]["z"].shape == (2, 1)
    assert isinstance(got["argument"], tuple) and len(got["argument"]) == 3


def test_what_has_no_rows_is_passed_whole():
    x, scale, ids = torch.rand(8, 3), torch.tensor(2.0), torch.arange(3)[None]
    weights = torch.rand(5)
    rest = (scale, ids, weights, "text", 3, None, 2.5, [1, 2], {"k": 1})
    got = probe([x, *rest], start=0, length=4)
    assert got["split"] == ["a"]
    assert all(have is given for have, given in zip(got["args"][1:], rest, strict=True))


def test_a_batch_of_one_row():
    x = torch.rand(1, 3)
    got = probe([x, torch.rand(5)])
    assert got["rows"] == 1 and got["args"][0] is x


def test_zero_dimensional_tensors_modules_and_parameters_are_no_batch():
    model, x = torch.nn.Linear(3, 3), torch.rand(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    got = probe([torch.tensor(3.0), model, model.weight, optimizer, x], names=tuple("abcde"))
    assert got["rows"] == 8 and got["split"] == ["e"]
    assert probe([model, list(model.parameters())])["rows"] == -1


def test_no_batch_passes_everything_as_it_is():
    args = ([1, 2], "x", torch.tensor(1.0))
    got = probe(args)
    assert got["rows"] == -1 and got["split"] == []
    assert all(have is given for have, given in zip(got["args"], args, strict=True))


def test_the_skipped_self_is_left_alone():
    holder, x = {"x": torch.rand(5)}, torch.rand(8)
    got = probe([holder, x], names=("self", "x"), skip=1, start=0, length=4)
    assert got["rows"] == 8 and got["args"][0] is holder and got["split"] == ["x"]


def test_arguments_beyond_the_names():
    x = torch.rand(4)
    assert probe([1, x, x], names=("n",))["split"] == ["*args", "*args"]
    assert probe([1, x], names=("n", "*rest", "flag"))["split"] == ["*args"]


def test_dimension_one():
    x, y = torch.rand(5, 8), torch.rand(3, 8, 2)
    got = probe([x, y], dim=1, start=6, length=2)
    assert got["rows"] == 8
    assert torch.equal(got["args"][0], x[:, 6:]) and torch.equal(got["args"][1], y[:, 6:])


def test_the_last_dimension():
    x = torch.rand(5, 8)
    assert torch.equal(probe([x], dim=-1, start=1, length=2)["args"][0], x[:, 1:3])


def test_many_nested_tensors():
    batch = [[torch.full((4, 2), 10.0 * i + j) for j in range(10)] for i in range(20)]
    got = probe([{"in": batch}], start=3, length=1)["args"][0]["in"]
    assert [[t[0, 0].item() for t in row] for row in got] == [
        [10.0 * i + j for j in range(10)] for i in range(20)
    ]


def test_a_list_that_holds_itself_ends():
    loop: list = [torch.rand(4)]
    loop.append(loop)
    assert "is a 'list' too long or too deep to be opened; give split=..." in refusal([loop])


# --- names ---


def test_batch_names_the_arguments():
    x, y = torch.rand(8, 3), torch.rand(5)
    got = probe([x, y], batch=("b",), start=0, length=2)
    assert got["rows"] == 5 and got["split"] == ["b"] and got["args"][0] is x


def test_batch_names_two_arguments():
    x, y = torch.rand(8, 3), torch.rand(8)
    assert probe([x, y], batch=("a", "b"))["split"] == ["a", "b"]
    assert refusal([x, torch.rand(5)], batch=("a", "b")) == (
        "auto_batch cannot split argument 'b': tensors disagree in dimension 0: "
        "a has shape [8, 3], b has shape [5]" + ADVICE
    )


def test_static_is_passed_whole():
    x, weights = torch.rand(8, 3), {"w": torch.rand(8)}
    got = probe([x, weights], static=("b",), start=0, length=2)
    assert got["split"] == ["a"] and got["args"][1] is weights
    assert probe([x, torch.rand(5)], static=("a",))["rows"] == 5


@pytest.mark.parametrize("option", ["batch", "static"])
def test_unknown_names_are_refused(option):
    assert refusal([torch.rand(4), 1], names=("x", "flag"), **{option: ("y",)}) == (
        f"auto_batch got {option}='y', expected a parameter of the function: x, flag"
    )


def test_names_of_keyword_arguments_are_known():
    x = torch.rand(4)
    assert probe([], {"x": x}, names=("*args",), batch=("x",))["rows"] == 4
    assert probe([x], names=("x", "**kwargs"), static=("mask",))["rows"] == 4


def test_a_named_argument_that_was_not_passed_is_no_batch():
    assert probe([torch.rand(4)], names=("x", "y"), batch=("y",))["rows"] == -1


def test_a_named_argument_without_tensors():
    assert refusal([torch.rand(4), 3], batch=("b",)) == (
        "auto_batch cannot split argument 'b': b is a 'int' without a tensor that has rows; "
        "name another argument with batch=..."
    )


# --- disagreement ---


def test_tensors_of_the_batch_disagree():
    assert refusal([{"x": torch.rand(8, 3), "y": torch.rand(5)}], names=("batch",)) == (
        "auto_batch cannot split argument 'batch': tensors disagree in dimension 0: "
        "batch['x'] has shape [8, 3], batch['y'] has shape [5]" + ADVICE
    )


def test_columns_of_a_list_disagree():
    assert refusal([[torch.rand(8, 3), torch.rand(5)]], names=("batch",)) == (
        "auto_batch cannot split argument 'batch': tensors disagree in dimension 0: "
        "batch[0] has shape [8, 3], batch[1] has shape [5]" + ADVICE
    )


def test_another_argument_is_mixed():
    args = [torch.rand(8, 3), {"mask": torch.rand(8), "weights": torch.rand(5)}]
    assert refusal(args, names=("x", "aux")) == (
        "auto_batch cannot split argument 'aux': tensors disagree in dimension 0: "
        "aux['mask'] has shape [8], aux['weights'] has shape [5]" + ADVICE
    )
    assert probe(args, names=("x", "aux"), static=("aux",))["split"] == ["x"]


def test_a_tensor_of_the_batch_without_the_dimension():
    assert refusal([(torch.rand(5, 8), torch.rand(40))], names=("batch",), dim=1) == (
        "auto_batch cannot split argument 'batch': tensors disagree in dimension 1: "
        "batch[1] has shape [40]" + ADVICE
    )


def test_an_empty_batch():
    assert refusal([torch.rand(0, 3)]) == (
        "auto_batch cannot split argument 'a': a is a 'Tensor' of shape [0, 3], "
        "which has no rows; pass a batch that is not empty"
    )


class Closed:
    """An object that moves between devices as batches do."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def to(self, device):
        return self


def test_an_object_without_a_splitter_is_refused_by_name():
    assert refusal([Closed(x=torch.rand(8)), torch.rand(5)], names=("batch", "scale")) == (
        "auto_batch cannot split argument 'batch': batch is a 'Closed', which holds tensors; "
        "tell how with oomkit.register_splitter(type, split=...) or split=..., or pass it whole "
        "with static=..."
    )


def test_a_closed_argument_beside_the_batch():
    x = torch.rand(8)
    other = Closed(m=torch.rand(8))
    assert refusal([x, other]) == (
        "auto_batch cannot split argument 'b': b is a 'Closed', which holds tensors as long as "
        "the batch; tell how to split it with oomkit.register_splitter(type, split=...), or pass "
        "it whole with static=..."
    )
    assert probe([x, Closed(m=torch.rand(5))])["split"] == ["a"]
    assert probe([x, other], static=("b",))["split"] == ["a"]


# --- samples in a list ---


def targets(*counts):
    return [{"boxes": torch.rand(n, 4), "labels": torch.arange(n)} for n in counts]


def test_detection_targets_are_split_as_a_list():
    x, found = torch.rand(3, 1, 8, 8), targets(2, 5, 1)
    got = probe([x, found], start=1, length=2)
    assert got["split"] == ["a", "b"]
    assert len(got["args"][1]) == 2
    assert got["args"][1][0]["boxes"] is found[1]["boxes"]


def test_targets_that_look_like_columns_are_samples_beside_images():
    got = probe([torch.rand(2, 3, 8, 8), targets(2, 2)], start=1, length=1)
    assert [t["boxes"].shape[0] for t in got["args"][1]] == [2]
    got = probe([torch.rand(3, 3, 8, 8), targets(1, 1, 1)], start=1, length=2)
    assert len(got["args"][1]) == 2


@pytest.mark.parametrize("sequence", [list, tuple])
def test_images_and_targets_in_lists(sequence):
    images = sequence(torch.rand(3, 8 + i, 8) for i in range(4))
    got = probe([images, sequence(targets(2, 5, 1, 3))], start=1, length=2)
    assert got["rows"] == 4
    assert type(got["args"][0]) is sequence and len(got["args"][0]) == 2
    assert got["args"][0][0] is images[1] and len(got["args"][1]) == 2


def test_targets_inside_the_batch():
    batch = {"images": torch.rand(2, 3, 8, 8), "targets": targets(2, 2), "names": ["p", "q"]}
    got = probe([batch], start=1, length=1)["args"][0]
    assert got["names"] == ["q"] and got["targets"][0]["boxes"] is batch["targets"][1]["boxes"]


def test_a_ragged_list_alone_is_samples():
    batch = [torch.rand(n, 4) for n in (2, 5, 3)]
    got = probe([batch], start=0, length=2)
    assert got["rows"] == 3 and got["args"][0] == batch[:2]


def test_lists_of_columns_are_columns():
    x, y = torch.rand(8, 3), torch.rand(8)
    assert probe([[x, y]])["split"] == ["a[0]", "a[1]"]
    features = [{"ids": torch.ones(2, 5)}, {"ids": torch.ones(2, 9)}]
    assert probe([features, torch.rand(2)])["split"] == ["a[0]['ids']", "a[1]['ids']", "b"]


def test_columns_beside_a_hidden_state():
    hidden = (torch.rand(3, 8, 4), torch.rand(3, 8, 4))
    got = probe([[torch.rand(8, 3), torch.rand(8)], hidden], static=("b",))
    assert got["rows"] == 8 and got["split"] == ["a[0]", "a[1]"]


def test_a_plain_list_as_long_as_the_batch_must_be_named():
    x, names = torch.rand(3, 2), ["p", "q", "r"]
    assert refusal([x, names], names=("x", "names")) == (
        "auto_batch cannot split argument 'names': names is a 'list' as long as the batch, "
        "without tensors; name it in batch=... when it has one element per sample, else in "
        "static=..."
    )
    got = probe([x, names], batch=("a", "b"), start=1, length=2)
    assert got["args"][1] == ["q", "r"]
    assert probe([x, names], static=("b",))["args"][1] is names
    assert probe([x, names[:2]])["args"][1] == ["p", "q"]


def test_a_long_list_of_the_batch():
    batch = {"x": torch.rand(5000), "names": list(range(5000))}
    assert probe([batch], start=4000, length=2)["args"][0]["names"] == [4000, 4001]
    with pytest.raises(oomkit.SplitError, match="changed the length of a list .* 5000 to 4999"):
        probe([batch], start=0, length=2, between=batch["names"].pop)


# --- what earlier calls showed ---


def test_a_size_that_stays_while_the_rows_change_is_passed_whole():
    weights = torch.rand(4)
    earlier = [((torch.rand(8), weights), {}), ((torch.rand(6), weights), {})]
    args = [torch.rand(4), weights]
    assert probe(args)["split"] == ["a", "b"]
    assert probe(args, earlier=[((torch.rand(4), weights), {})])["split"] == ["a", "b"]
    assert probe(args, earlier=earlier[:1])["split"] == ["a"]  # never the batch's once: never
    assert probe(args, earlier=earlier)["split"] == ["a"]


def test_what_was_learned_goes_by_keyword():
    weights = torch.rand(4)
    earlier = [((torch.rand(n),), {"w": weights, "y": torch.rand(n)}) for n in (8, 6)]
    call = ([torch.rand(4)], {"y": torch.rand(4), "w": weights})
    assert probe(*call, earlier=earlier)["split"] == ["a", "y"]


def test_a_plain_list_is_known_by_its_lengths():
    def call(rows, length):
        return (torch.rand(rows), list(range(length)))

    moves = [(call(8, 8), {}), (call(6, 6), {})]
    stays = [(call(8, 3), {}), (call(6, 3), {})]
    assert probe(call(3, 3), earlier=moves)["split"] == ["a", "b"]
    assert probe(call(3, 3), earlier=stays)["split"] == ["a"]


# --- split= ---


def test_split_is_called_for_the_batch_argument():
    batch = collections.OrderedDict(x=torch.arange(6), y=torch.arange(6))
    seen = []

    def cut(value, start, length):
        seen.append((value, start, length))
        return {k: v[start : start + length] for k, v in value.items()}

    got = probe(
        [torch.tensor(1.0), batch, torch.arange(6)], batch=("b",), split=cut, start=1, length=1
    )
    assert got["rows"] == 6 and got["args"][1]["x"].tolist() == [1]
    assert seen == [(batch, 1, 1)] and got["split"] == ["b", "c"]


def test_split_gets_what_was_captured_and_not_what_the_step_left():
    batch = {"x": torch.arange(6)}
    got = probe(
        [batch], split=lambda v, s, n: v["x"][s : s + n], start=1, length=2, between=batch.clear
    )
    assert got["args"][0].tolist() == [1, 2]


def test_split_of_a_type_that_cannot_be_counted():
    class Graph:
        pass

    assert refusal([Graph()], batch=("a",), split=lambda *a: a) == (
        "auto_batch cannot split argument 'a': a is a 'Graph' without a len(); "
        "split=... needs a tensor in it, or a len(), to know its rows"
    )
