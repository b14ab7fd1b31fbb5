"""Every kind of batch: split, computed with, and joined again."""

from __future__ import annotations

import collections
import types
import warnings

import numpy as np
import pytest
import torch
from helpers import batches
from helpers.batches import SPLIT, read, same
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import force_slices, inject_oom

TOLERANCE = 1e-12


def probe(args, names=("a", "b", "c"), start=0, length=-1, **options):
    return _C._batch_probe(tuple(args), {}, names[: len(args)], options, start, length)


def gradients(step, batch, model, slices=None):
    for parameter in model.parameters():
        parameter.grad = None
    if slices is None:
        result = step(batch)
    else:
        with force_slices(slices):
            result = step(batch)
    return result, [parameter.grad.clone() for parameter in model.parameters()]


def make(result_of):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    seen = []

    def step(batch):
        seen.append(batch)
        x, y = (batches.dense(value) for value in read(batch))
        loss = (model(x) - y).square().mean()
        loss.backward()
        return result_of(batch, loss)

    return model, step, seen


@pytest.mark.parametrize("kind", SPLIT)
def test_a_split_step_is_the_whole_step(kind):
    batch = SPLIT[kind](*batches.numbers())
    model, function, seen = make(lambda batch, loss: loss.detach())
    step = oomkit.auto_batch(function, reduction="mean")

    loss, whole = gradients(step, batch, model)
    split_loss, split = gradients(step, batch, model, (3, 2, 2))

    assert len(seen) == 4 and all(type(part) is type(batch) for part in seen)
    assert abs(loss - split_loss) <= TOLERANCE
    for one, other in zip(whole, split, strict=True):
        assert (one - other).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", SPLIT)
def test_the_parts_are_joined_to_a_batch_of_the_same_kind(kind):
    batch = SPLIT[kind](*batches.numbers())
    step = oomkit.auto_batch(lambda batch: batch)

    with warnings.catch_warnings(), force_slices((3, 2, 2)):
        warnings.simplefilter("ignore", oomkit.OomkitWarning)
        joined = step(batch)

    assert joined is not batch and same(joined, batch)


@pytest.mark.parametrize("kind", [kind for kind in SPLIT if kind != "sparse COO tensor"])
def test_what_is_split_is_a_view(kind):
    batch = SPLIT[kind](*batches.numbers())

    part = probe([batch], start=2, length=3)["args"][0]

    for whole, cut in zip(read(batch), read(part), strict=True):
        assert len(cut) == 3 and cut.shape[1:] == whole.shape[1:]
        if isinstance(cut, np.ndarray):
            assert np.shares_memory(cut, whole) and cut.base is not None
        else:
            assert cut.data_ptr() == whole[2:].data_ptr()
            assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", SPLIT)
def test_recovery_from_an_error_gives_the_whole_steps_gradients(kind):
    batch = SPLIT[kind](*batches.numbers())
    model, function, seen = make(lambda batch, loss: loss.detach())
    step = oomkit.auto_batch(function, reduction="mean")
    _, whole = gradients(step, batch, model)

    with inject_oom(nth=2, times=1) as fault:
        _, split = gradients(step, batch, model)

    assert fault.fired == 1 and step.records[-1].accumulation_steps == 2
    for one, other in zip(whole, split, strict=True):
        assert (one - other).abs().max() <= TOLERANCE


# --- how objects are made anew ---


def test_a_new_object_has_all_attributes_and_its_init_does_not_run():
    x, y = batches.numbers()
    batch = batches.Checked(x, y)

    part = probe([batch], start=1, length=2)["args"][0]

    assert part.width == 3 and torch.equal(part.twice, batch.twice[1:3])
    assert vars(part).keys() == vars(batch).keys()


def test_attributes_beside_the_entries_of_a_mapping():
    x, y = batches.numbers()
    part = probe([batches.Loud(x=x, y=y)], start=0, length=2)["args"][0]
    assert part["x"].shape == part.extra.shape == (2, 3)
    assert torch.equal(part[0], x[:2])  # its own __getitem__


def test_attributes_that_are_entries_stay_so():
    x, y = batches.numbers()
    part = probe([batches.Config(x=x, y=y)], start=0, length=2)["args"][0]
    assert part.x is part["x"] and part.__dict__ is part
    output = probe([batches.model_output(x, y)], start=0, length=2)["args"][0]
    assert output.logits is output["logits"] and output.loss is None and "loss" not in output
    assert output[0] is output.logits


def test_the_factory_of_a_defaultdict_and_the_order_of_an_ordered_one():
    x, y = batches.numbers()
    part = probe([collections.defaultdict(list, x=x)], start=0, length=2)["args"][0]
    assert part["new"] == []
    ordered = collections.OrderedDict(x=x, y=y)
    ordered.move_to_end("x")
    assert list(probe([ordered], start=0, length=2)["args"][0]) == ["y", "x"]


def test_an_encoding_keeps_what_else_it_has():
    batch = batches.encoding(*batches.numbers())
    part = probe([batch], start=0, length=2)["args"][0]
    assert type(part) is type(batch) and vars(part).keys() == vars(batch).keys()
    assert part.x.shape == (2, 3) and part.to("cpu")["y"].shape == (2, 1)


def test_slots_that_were_never_set_stay_so():
    class Half:
        __slots__ = ("x", "y")
        __dataclass_fields__: dict = {}

    half = Half()
    half.x = torch.rand(4)
    part = probe([half], start=0, length=2)["args"][0]
    assert part.x.shape == (2,) and not hasattr(part, "y")


def test_paths_are_written_as_the_caller_would():
    x, y = batches.numbers()
    inner = {"p": batches.Plain(x, y), "u": collections.UserDict(k=[x])}
    assert probe([inner])["split"] == ["a['p'].x", "a['p'].y", "a['u']['k'][0]"]


def test_attributes_keep_their_order_beside_entries_that_are_some():
    class Mapping(dict):  # type: ignore[type-arg]
        pass

    x, y = batches.numbers()
    batch = Mapping(y=y)
    batch.__dict__ |= {"first": 1, "y": y, "x": x}
    part = probe([batch], start=0, length=2)["args"][0]
    assert list(vars(part)) == ["first", "y", "x"] and part.__dict__["y"] is part["y"]


def test_an_attribute_of_a_user_dict_that_is_an_entry_stays_one():
    x, y = batches.numbers()
    batch = collections.UserDict(x=x, y=y)
    batch.__dict__ = {"shown": 1, "x": x, "data": batch.data}
    got = probe([batch], start=0, length=2)
    part = got["args"][0]
    assert got["split"] == ["a['x']", "a['y']"] and list(vars(part)) == ["shown", "x", "data"]
    assert part["x"].shape == (2, 3) and part.x is part["x"]


def test_an_object_without_data_is_the_very_object():
    options = batches.Plain(3, 0.5)
    trainer = batches.Plain(torch.rand(4), nn.Linear(2, 2))
    got = probe([options, trainer, torch.rand(8)], start=0, length=2)
    assert got["rows"] == 8 and got["args"][0] is options and got["args"][1] is trainer


def test_what_the_step_does_to_an_object_does_not_reach_a_micro_batch():
    x, y = batches.numbers()
    batch = types.SimpleNamespace(x=x, y=y)

    def between():
        batch.x = x / 255
        del batch.y
        batch.cache = 1

    part = probe([batch], start=0, length=2, between=between)["args"][0]
    assert vars(part).keys() == {"x", "y"} and torch.equal(part.x, x[:2])


# --- numpy ---


@pytest.mark.parametrize("dtype", ["int64", "float16", "bool", "complex128", "<U3", "O", "M8[D]"])
def test_arrays_of_any_dtype(dtype):
    array = np.arange(6).astype(dtype)
    got = probe([{"x": array, "y": torch.rand(6)}], start=1, length=3)["args"][0]
    assert (got["x"] == array[1:4]).all() and got["x"].base is not None


def test_arrays_in_dimension_one_and_of_subclasses(tmp_path):
    array = np.arange(12.0).reshape(2, 6)
    got = probe([array], dim=1, start=1, length=3)
    assert got["rows"] == 6 and (got["args"][0] == array[:, 1:4]).all()
    mapped = np.memmap(tmp_path / "x", mode="w+", shape=(6, 2))
    assert type(probe([mapped], start=0, length=2)["args"][0]) is np.memmap


def test_arrays_without_rows_are_passed_whole():
    x, one, scalar = torch.rand(4), np.zeros((1, 4)), np.array(3.0)
    got = probe([x, one, scalar], start=0, length=2)
    assert got["args"][1] is one and got["args"][2] is scalar and got["split"] == ["a"]


def test_an_array_that_the_step_changes_is_refused_and_restored():
    array = np.arange(6.0)
    with pytest.raises(oomkit.SplitError, match="it changed a in place"):
        probe([array], between=lambda: array.__itruediv__(255))
    array[:] = np.arange(6)
    got = probe([array], restore_batch=True, between=lambda: array.__itruediv__(255))
    assert (got["args"][0] == np.arange(6)).all()


# --- identity ---


def test_a_tensor_at_two_places_is_one_tensor_in_a_micro_batch():
    x = torch.rand(6, 2)
    shared = {"x": x}
    batch = {"first": shared, "again": shared, "labels": x}
    got = probe([batch, x], start=0, length=2)["args"]
    assert got[0]["first"] is got[0]["again"]
    assert got[0]["first"]["x"] is got[0]["labels"] is got[1]


def test_equal_tensors_stay_two():
    x = torch.rand(6, 2)
    first, second = probe([x, x.view(6, 2)], start=0, length=2)["args"]
    assert first is not second


def test_gradients_of_a_tensor_at_two_places_add_up():
    x = torch.rand(4, 2, requires_grad=True)
    got = probe([{"a": x, "b": x}], start=0, length=2)["args"][0]
    (got["a"] * got["b"]).sum().backward()
    assert torch.allclose(x.grad[:2], 2 * x[:2])


# --- what is passed whole beside the rows ---


def test_whole_beside_the_rows():
    rest = {
        "mask": torch.ones(1, 1, 5, 5),
        "positions": torch.arange(5)[None],
        "scalar": torch.tensor(2.0),
        "text": "text",
        "none": None,
        "number": 3,
    }
    tokens = torch.zeros(4, 5)
    parameter, module = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
    got = probe([{"tokens": tokens, **rest}, parameter, module], start=0, length=2)
    assert got["split"] == ["a['tokens']"]
    assert all(got["args"][0][name] is value for name, value in rest.items())
    assert got["args"][1] is parameter and got["args"][2] is module


def test_masks_with_rows_are_split():
    tokens, mask = torch.zeros(4, 5), torch.ones(4, 1, 5, 5)
    assert probe([tokens, mask], start=0, length=2)["args"][1].shape == (2, 1, 5, 5)


@pytest.mark.parametrize("how", ["keyword", "args", "kwargs"])
def test_every_way_to_pass_a_batch(how):
    x, y = batches.numbers()
    model, total = nn.Linear(3, 1, dtype=torch.float64), []

    def compute(x, y):
        total.append(len(x))
        return (model(x) - y).square().mean()

    functions = {
        "keyword": lambda x, *, y: compute(x, y),
        "args": lambda *args: compute(*args),
        "kwargs": lambda **kwargs: compute(**kwargs),
    }
    step = oomkit.auto_batch(functions[how], reduction="mean", verify=False)
    args = {"keyword": ((x,), {"y": y}), "args": ((x, y), {}), "kwargs": ((), {"x": x, "y": y})}
    whole = step(*args[how][0], **args[how][1]).item()

    with force_slices((4, 3)):
        split = step(*args[how][0], **args[how][1]).item()

    assert total == [7, 4, 3] and abs(whole - split) <= TOLERANCE
