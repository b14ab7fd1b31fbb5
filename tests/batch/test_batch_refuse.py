"""What cannot be split, and what can be read in two ways: said before anything runs."""

from __future__ import annotations

import types
import warnings
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
from helpers import batches
from helpers.batches import Closed, Graph, Unlike
from helpers.messages import message_of
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit import _C
from oomkit.testing import inject_oom

x, y = batches.numbers()
with warnings.catch_warnings():  # that CSR is new
    warnings.simplefilter("ignore")
    CSR = x.to_sparse_csr()


def probe(args, names=("a", "b", "c"), **options):
    return _C._batch_probe(tuple(args), {}, names[: len(args)], options, 0, -1)


def refusal(args, names=("a", "b", "c"), **options) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        probe(args, names, **options)
    return message_of(caught.value)


SAMPLES = [{"x": row, "y": target} for row, target in zip(x, y, strict=True)]
REFUSED = {
    "object with to()": ([Closed(x, y)], "a is a 'Closed', which holds tensors; tell how with"),
    "graph batch": ([Graph(x, y)], "a is a 'Graph', which holds tensors; tell how with oomkit.r"),
    "object inside": ([{"g": Closed(x, y), "x": x}], r"a\['g'\] is a 'Closed', which holds tenso"),
    "jagged": (
        [(torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), y)],
        r"a\[0\] is a 'NestedTensor' of shape \[2, j\d+, 3\], which is nested; give split=",
    ),
    "CSR": (
        [(CSR, y)],
        r"a\[0\] is a 'Tensor' of shape \[7, 3\], whose layout has no slices; make it dense or",
    ),
    "samples": (
        [SAMPLES],
        "a is a 'list' of 7 similar items, which may be 7 samples, or columns of 3 r",
    ),
    "tuples": ([list(zip(x, y, strict=True))], "may be 7 samples, or columns of 3 rows; for sam"),
    "mean first": (
        [torch.rand(3), x],
        r"'a': a has shape \[3\], b has shape \[7, 3\], and either may be the batch; name it",
    ),
    "object first": (
        [Unlike(x, y), torch.rand(5)],
        r"'a': it is a 'Unlike' that holds tensors, b has shape \[5\], and either may be the b",
    ),
    "weights": (
        [x, torch.rand(7)],
        r"'class_weights': class_weights has shape \[7\] next to a batch of 7 rows, which may be",
    ),
    "weights inside": (
        [{"x": x, "class_weights": torch.rand(7)}],
        r"a\['class_weights'\] has shape \[7\], as many as rows, and its name says one per cla",
    ),
    "flattened": (
        [torch.zeros(4, 5), torch.zeros(20)],
        r"b has shape \[20\] next to a batch of 4 rows, which looks like its rows flattened",
    ),
    "disagree": ([{"x": x, "y": torch.rand(5)}], r"a\['x'\] has shape \[7, 3\], a\['y'\] has sha"),
    "tuple": ([list(torch.rand(7, 3, 4, 5)), (1,) * 7], "which may be 7 samples, or columns of"),
    "tuple beside": ([x, (1,) * 7], "b is a 'tuple' as long as the batch, without tensors; na"),
    "list": ([x, list("abcdefg")], "b is a 'list' as long as the batch, without tensors; name"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_message_names_the_argument_and_what_to_do(kind):
    args, message = REFUSED[kind]
    names = ("x", "class_weights") if kind == "weights" else ("a", "b", "c")
    with pytest.raises(oomkit.SplitError, match=message):
        probe(args, names)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("injected", [True, False])
@pytest.mark.refusals
def test_nothing_has_changed_when_it_is_raised(kind, injected):
    args, _ = REFUSED[kind]
    model = nn.BatchNorm1d(2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [value.clone() for value in model.state_dict().values()]
    calls: Seen[Any] = Seen()

    def body():
        calls.append(1)
        model(torch.rand(4, 2)).sum().backward()

    namespace: dict = {"body": body}
    names = ["x", "class_weights"] if kind == "weights" else ["a", "b", "c"][: len(args)]
    exec(f"def function({', '.join(names)}): body()", namespace)
    step = oomkit.auto_batch(  # without a proof, which may decide
        namespace["function"],
        model=model,
        accumulation_steps=1 if injected else 2,
        verify=False,
    )

    state = torch.get_rng_state()
    if injected:
        with inject_oom(nth=8, times=1) as fault, pytest.raises(oomkit.SplitError):
            step(*args)
        assert fault.fired == 1 and len(calls) == 1
    else:
        with pytest.raises(oomkit.SplitError):
            step(*args)
        assert calls == []

    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


# --- what resolves it ---


def test_split_and_static_and_batch_resolve_it():
    assert probe([torch.rand(3), x], static=("a",))["split"] == ["b"]
    assert probe([torch.rand(3), x], batch=("b",))["split"] == ["b"]
    assert probe([torch.rand(3), x], batch=("a",))["split"] == ["a"]
    assert probe([x, torch.rand(7)], ("x", "weights"), static=("weights",))["split"] == ["x"]
    both = probe([x, torch.rand(7)], ("x", "weights"), batch=("x", "weights"))
    assert both["split"] == ["x", "weights"]
    assert probe([torch.zeros(4, 5), torch.zeros(20)], static=("b",))["split"] == ["a"]
    got = _C._batch_probe(
        (SAMPLES,), {}, ("a",), {"split": lambda value, start, n: value[start : start + n]}, 2, 3
    )
    assert got["args"][0] == SAMPLES[2:5]
    batch = {"x": x, "class_weights": torch.rand(7)}
    assert probe([batch], static=("a['class_weights']",))["split"] == ["a['x']"]
    columns = {"one": {"x": x}, "two": {"x": x}}
    assert probe([columns])["rows"] == 7


def test_a_path_in_static_names_what_is_inside_the_batch():
    batch = {"x": x, "weights": torch.rand(5), "in": batches.Plain(torch.rand(7), None)}
    message = refusal([batch], ("batch",))
    assert "batch['weights'] has shape [5]" in message
    got = probe([batch], ("batch",), static=("batch['weights']", "batch['in'].x"))
    assert got["split"] == ["batch['x']"]
    assert got["args"][0]["weights"] is batch["weights"]
    with pytest.raises(oomkit.SplitError, match="static=\"other\\['x'\\]\", expected a param"):
        probe([batch], ("batch",), static=("other['x']",))


def test_a_path_in_static_keeps_a_whole_subtree_and_its_types_out():
    batch = {"x": x, "in": [torch.rand(2), {"k": Closed(x, y)}, list("abcdefg")]}
    got = probe([batch], ("batch",), static=("batch['in']",))
    assert got["split"] == ["batch['x']"] and got["args"][0]["in"][2] == list("abcdefg")


# --- what is not refused ---


def test_what_is_no_doubt():
    table, bias = torch.rand(9, 2, 2), torch.rand(7, 4)
    assert probe([{"x": x, "y": y}, table])["split"] == ["a['x']", "a['y']"]
    assert probe([x, y, table])["split"] == ["a", "b"]
    assert probe([torch.zeros(7, 4), torch.rand(4, 4, 4)])["split"] == ["a"]  # of its own size
    assert probe([x, bias], ("x", "weights"))["split"] == ["x", "weights"]  # two dimensions
    assert probe([x, torch.rand(7)], ("x", "sample_weight"))["split"] == ["x", "sample_weight"]
    assert probe([x, torch.rand(10)])["split"] == ["a"]
    assert probe([[x, x.clone(), x.clone()]])["rows"] == 7  # a triplet
    assert probe([[torch.zeros(7, 4, dtype=torch.int64)] * 5])["rows"] == 7  # ids, mask, labels
    assert probe([[torch.rand(7, 3, 9, 9), torch.rand(7, 3, 5, 5)]])["rows"] == 7  # crops
    inputs_and_targets = [{"image": x}, {"label": y}]
    assert probe([inputs_and_targets])["rows"] == 7


def test_a_trainer_is_no_batch():
    trainer = Unlike(torch.rand(4), nn.Linear(2, 2))
    trainer_with_to = Closed(torch.rand(4), nn.Linear(2, 2))
    got = probe([trainer, trainer_with_to, x])
    assert got["split"] == ["c"] and got["args"][0] is trainer


def test_an_average_is_no_batch():
    class Average(Closed):
        def state_dict(self):
            return {}

    average = Average(torch.rand(4), [torch.rand(7, 3)])
    assert probe([average, x])["split"] == ["b"]


def test_objects_in_a_list_as_long_as_the_batch_are_samples():
    found = [Closed(row, row) for row in x]
    got = probe([{"x": x, "found": found}])
    assert got["split"] == ["a['x']", "a['found']"]


# --- no batch ---


class Columns(MutableMapping):
    """As a TensorDict: a mapping of its own that is as long as it has rows."""

    def __init__(self, rows, **columns):
        self.rows, self.columns = rows, columns

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        cut = {name: column[key] for name, column in self.columns.items()}
        return Columns(len(range(self.rows)[key]), **cut)

    def __setitem__(self, key, value):
        self.columns[key] = value

    def __delitem__(self, key):
        del self.columns[key]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return self.rows


class Table:
    """Iterates over its rows."""

    def __getitem__(self, at):
        return [x, y][at]

    def __iter__(self):
        return iter([x, y])


NEAR = {
    "mapping": (
        lambda: Columns(4, x=x[:4]),
        "'Columns', a mapping whose rows oomkit does not know: tell how it is split with "
        r"oomkit.register_splitter\(type, split",
    ),
    "table": (
        Table,
        "'Table': take the batch out of it before the call; if it is the batch, tell how it is "
        r"split with oomkit.register_splitter\(type, split",
    ),
    "generator": (lambda: (i for i in ()), "'generator': take the batch out of it before the cal"),
    "iterator": (lambda: iter([x]), "'list_iterator': take the batch out of it before the call"),
    "DataLoader": (
        lambda: torch.utils.data.DataLoader(SAMPLES),
        "'DataLoader': take the batch out of it before the call",
    ),
    "object": (
        lambda: Unlike(x, y),
        "'Unlike' that holds tensors: tell how it is split with oomkit.register_splitter",
    ),
}


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.refusals
def test_no_batch_names_what_comes_nearest(kind):
    make, message = NEAR[kind]
    ran = []
    step = oomkit.auto_batch(lambda source: ran.append(1), accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match=message):
        step(make())
    assert ran == []

    step = oomkit.auto_batch(lambda source: torch.rand(3))
    assert step(make()).shape == (3,)  # fine until memory runs out
    with inject_oom(times=1), pytest.raises(oomkit.OutOfMemory, match=message):
        step(make())


def test_the_splitter_that_is_proposed_works():
    class Known(Columns):
        pass

    oomkit.register_splitter(Known, split=lambda b, at, n: b[at : at + n], size=len)
    step = oomkit.auto_batch(lambda batch: batch["x"] * 2, accumulation_steps=2)
    assert torch.equal(step(Known(4, x=x[:4])), x[:4] * 2)


@pytest.mark.refusals
def test_no_batch_at_all_is_fine_until_memory_runs_out():
    step = oomkit.auto_batch(lambda: torch.rand(3))
    assert step().shape == (3,)
    with inject_oom(times=1), pytest.raises(oomkit.OutOfMemory, match="found no batch to split"):
        step()


def test_a_namespace_and_an_encoding_are_not_refused():
    batch = types.SimpleNamespace(x=x, y=y)
    assert probe([batch])["split"] == ["a.x", "a.y"]
