"""A batch that moved is not replayed; what capture notes of it."""

from __future__ import annotations

import pytest
import torch

import oomkit
from batch.test_split import probe, refusal


def test_an_error_of_split_passes():
    with pytest.raises(ZeroDivisionError):
        probe([torch.rand(4)], split=lambda v, s, n: 1 // 0, start=0, length=2)


# --- has the batch moved ---


@pytest.mark.parametrize("rows", [-1, 2])
def test_a_batch_changed_in_place_is_refused(rows):
    batch = {"x": torch.rand(4, 2)}
    assert refusal([batch], length=rows, names=("batch",), between=lambda: batch["x"].div_(2)) == (
        "auto_batch cannot repeat the step, because it changed batch['x'] in place; make a new "
        "tensor instead (x = x.div(255), not x.div_(255)) or pass restore_batch=True"
    )


def test_what_is_passed_whole_must_not_move_either():
    total = torch.zeros(3)
    message = refusal([torch.rand(4), total], between=lambda: total.add_(1))
    assert message.startswith("auto_batch cannot repeat the step, because it changed b in place")


def test_restore_batch_puts_the_values_back():
    x = torch.rand(4, 2)
    y = torch.rand(4, requires_grad=True)
    x_was, y_was = x.clone(), y.detach().clone()

    def step():
        x.div_(255)
        with torch.no_grad():
            y.zero_()

    got = probe([x, {"y": y}], restore_batch=True, between=step)

    assert got["args"][0] is x and torch.equal(x, x_was)
    assert torch.equal(y, y_was) and y.requires_grad and y.is_leaf


def test_restore_batch_leaves_what_did_not_move():
    x = torch.rand(4)
    version = x._version
    probe([x], restore_batch=True)
    assert x._version == version


# --- marks of a call ---


def test_the_signature_leaves_out_the_rows():
    def mark(*shape, dtype=torch.float32):
        return probe([torch.ones(*shape, dtype=dtype)])["signature"]

    assert mark(8, 3) == mark(5, 3)
    assert len({mark(8, 3), mark(8, 4), mark(8, 3, 1), mark(8, 3, dtype=torch.int8)}) == 4


def test_the_device_is_that_of_the_first_tensor():
    assert probe([torch.rand(4)])["device"] == (0, -1)
    assert probe([1])["device"] == (0, -1)
    assert probe([torch.ones(4, device="meta")])["device"][0] == 14


def test_nothing_is_kept():
    import gc
    import sys

    x, batch = torch.rand(8, 3), {"k": [torch.rand(8)]}
    for _ in range(2):
        probe([x, batch], {"z": x}, start=0, length=2, earlier=[((x,), {"z": x})])
    gc.collect()
    before = (sys.getrefcount(x), sys.getrefcount(batch), sys.getrefcount(batch["k"][0]))
    for _ in range(100):
        probe([x, batch], {"z": x}, start=0, length=2, restore_batch=True)
        with pytest.raises(oomkit.SplitError):
            probe([x, {"p": x, "q": torch.rand(3)}])
    gc.collect()
    assert before == (sys.getrefcount(x), sys.getrefcount(batch), sys.getrefcount(batch["k"][0]))
