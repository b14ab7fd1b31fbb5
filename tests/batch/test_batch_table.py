"""The table in docs/reference/batches.md, line by line."""

from __future__ import annotations

import re
import types
import warnings
from collections import OrderedDict, UserDict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import batches
from torch import nn

import oomkit
from batch.test_batch_refuse import Columns
from oomkit import _C

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

x, y = batches.numbers()
B = batches.ROWS
with warnings.catch_warnings():  # that CSR is new
    warnings.simplefilter("ignore")
    CSR = x.to_sparse_csr()


class Field(torch.Tensor):
    """A subclass."""


class Own(batches.Unlike):
    pass


oomkit.register_splitter(
    Own, split=lambda v, s, n: Own(v.x[s : s + n], v.y[s : s + n]), size=lambda v: len(v.x)
)
samples = [{"x": row, "y": target} for row, target in zip(x, y, strict=True)]
images = [torch.rand(3, 4 + i, 5) for i in range(B)]
ragged = [torch.rand(2 + i, 4) for i in range(B)]
targets = [{"boxes": torch.rand(n, 4)} for n in range(1, B + 1)]
wandering = [((x, torch.rand(n, 4)), {}) for n in (12, 15)]
known = [((torch.rand(5, 3), torch.rand(B)), {})]

# Line of the table -> calls: positional arguments and options of the probe.
LINES = {
    "tensor, of any strides": [[x], [x.t().contiguous().t()], [x.as_subclass(Field)]],
    "dict, list, tuple": [[{"x": [x, (y, {"z": y})]}]],
    "named tuple": [[batches.Pair(x, y)]],
    "subclass of dict": [[OrderedDict(x=x, y=y)], [batches.model_output(x, y)]],
    "UserDict": [[UserDict(x=x)], [batches.encoding(x, y)]],
    "data class": [[kind(x, y)] for kind in (batches.Plain, batches.Frozen, batches.Slotted)],
    "SimpleNamespace": [[types.SimpleNamespace(x=x)]],
    "array of numpy": [[x.numpy()], [np.arange(B).astype("<U2")]],
    "sparse COO": [[x.to_sparse()]],
    "PackedSequence": [[batches.packed(x, True)], [batches.packed(x, False)]],
    "type with a splitter": [[Own(x, y)]],
    "list of samples": [[ragged], [x, samples], [images, targets]],
    "list without tensors, in the batch": [[{"x": x, "names": list("abcdefg")}]],
    "list without tensors, as long": [[x, list("abcdefg")]],
    "hidden state": [[torch.zeros(B, 4), torch.zeros(2, B, 3)]],
    "labels `[rows]` under": [[torch.zeros(4, B, 2), torch.zeros(B), {"dim": 1}]],
    "flattened targets": [
        [torch.zeros(B, 4), torch.zeros(4 * B)],
        [torch.zeros(4, B), torch.zeros(4 * B), {"dim": 1}],
    ],
    "boxes of all images": [[x, torch.rand(14, 4), {"earlier": wandering}]],
    "class weights, as many": [[x, torch.rand(B)]],
    "class weights, of another": [
        [x, torch.rand(10)],
        [x, torch.rand(B), {"earlier": known}],
    ],
    "position ids": [[x, torch.zeros(1, 3)], [x, torch.zeros(1, 1, 4, 4)], [x, torch.tensor(1.0)]],
    "number, string": [[x, v] for v in (3, 0.5, "s", None, nn.Linear(1, 1), nn.Parameter(x))],
    "un-collated": [
        [samples],
        [list(zip(x, y, strict=True))],
        [list(x)],
        [images],
        [images, samples],
    ],
    "tensor before a batch": [[torch.rand(3), torch.rand(B, 3, 4, 4)]],
    "object with tensors and": [[batches.Closed(x, y)], [batches.Graph(x, y)]],
    "object with tensors before": [[batches.Unlike(x, y), torch.rand(5)]],
    "nested tensor": [
        [torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)],
        [CSR],
    ],
    "generator, iterator": [
        [(i for i in ())],
        [iter([x])],
        [torch.utils.data.DataLoader(samples)],
    ],
    "a mapping of a type of its own": [[Columns(B, x=x, y=y)]],
}


def table():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "batches.md").read_text()
    lines = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", text, re.MULTILINE)
    return {line[0]: line[1] for line in lines if line[0] != "argument"}


def storage(value):
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.nbytes
    memory = value.untyped_storage()
    return memory.data_ptr(), memory.nbytes()


def leaves(value):
    """Tensors and arrays anywhere in the value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    if isinstance(value, dict | UserDict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    if isinstance(value, str) or not hasattr(value, "x"):
        return []
    return leaves([value.x, value.y if hasattr(value, "y") else None])


def shares(part, whole):
    if isinstance(part, np.ndarray):
        return np.shares_memory(part, whole)
    if part.layout is not torch.strided:
        return False
    return storage(part)[0] == storage(whole)[0]


def outcome(args):
    options = dict(args.pop()) if isinstance(args[-1], dict) and set(args[-1]) & OPTIONS else {}
    names = ("x", "class_weights") if len(args) == 2 else ("batch",)
    try:
        got = _C._batch_probe(tuple(args), {}, names, options, 2, 3)
    except oomkit.SplitError:
        return "refused"
    if got["rows"] < 0:
        return "no batch"
    assert got["rows"] == B
    whole, part = args[-1], got["args"][-1]
    if part is whole:
        return "whole"
    if isinstance(whole, dict):
        if isinstance(whole.get("names"), list):
            assert part["names"] == whole["names"][2:5]
            return "samples"
    if isinstance(whole, list) and len(part) == 3:
        assert all(
            one is other or all(map(torch.equal, leaves(one), leaves(other)))
            for one, other in zip(part, whole[2:5], strict=True)
        )
        return "samples"
    assert type(part) is type(whole)
    pairs = list(zip(leaves(part), leaves(whole), strict=True))
    assert pairs
    return "views" if all(shares(*pair) for pair in pairs) else "copies"


OPTIONS = {"dim", "earlier"}


def test_every_line_is_tried():
    lines = table()
    assert len(lines) == len(LINES) > 25
    for line in lines:
        assert sum(line.startswith(start) for start in LINES) == 1, line


@pytest.mark.parametrize("start", LINES)
def test_the_line_is_true(start):
    (said,) = (what for line, what in table().items() if line.startswith(start))
    for args in LINES[start]:
        want = "views" if said == "as it does" else said
        assert outcome(list(args)) == want
