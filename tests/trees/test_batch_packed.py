"""PackedSequence: a splitter of oomkit's own."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, unpack_sequence

import oomkit
from oomkit import _C
from oomkit._engine import packed as _packed
from oomkit.testing import force_slices, inject_oom


def probe(args, start=0, length=-1, **options):
    return _C._batch_probe(tuple(args), {}, ("a", "b", "c")[: len(args)], options, start, length)


@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("start", range(batches.ROWS))
def test_a_part_has_the_sequences_in_their_order(sort, start):
    packed = batches.packed(batches.numbers()[0], sort)
    whole = unpack_sequence(packed)

    for length in range(1, batches.ROWS - start + 1):
        part = _packed.split(packed, start, length)
        cut = unpack_sequence(part)
        assert _packed.size(part) == length == len(cut)
        assert all(map(torch.equal, cut, whole[start : start + length]))
        assert (part.sorted_indices is None) is sort


@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_parts_are_joined_to_the_whole(sort):
    packed = batches.packed(batches.numbers()[0], sort)
    parts = [_packed.split(packed, start, 2) for start in (0, 2, 4)]
    parts.append(_packed.split(packed, 6, 1))

    joined = _packed.join(parts, [2, 2, 2, 1])

    assert all(map(torch.equal, unpack_sequence(joined), unpack_sequence(packed)))
    assert torch.equal(joined.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("injected", [True, False])
def test_tagging_with_a_hidden_state_beside_it(batch_first, sort, injected):
    torch.manual_seed(0)
    lengths = torch.tensor([5, 4, 4, 2, 1, 1]) if sort else torch.tensor([2, 5, 1, 4, 1, 4])
    padded = torch.rand(6, 5, 3, dtype=torch.float64)
    padded = padded if batch_first else padded.transpose(0, 1)
    packed = pack_padded_sequence(padded, lengths, batch_first=batch_first, enforce_sorted=sort)
    hidden = (torch.rand(2, 6, 4, dtype=torch.float64), torch.rand(2, 6, 4, dtype=torch.float64))
    model = nn.LSTM(3, 4, num_layers=2, dtype=torch.float64, batch_first=batch_first)

    def function(packed, hidden):
        out, (h, _) = model(packed, hidden)
        per_row = torch.stack([row.square().mean() for row in unpack_sequence(out)])
        loss = (per_row + h.sum((0, 2))).mean()
        loss.backward()
        return loss.detach(), out

    step = oomkit.auto_batch(
        function, dim={"hidden": 1}, reduction="mean", accumulation_steps=1 if injected else 3
    )
    (loss, whole_out) = function(packed, hidden)
    whole = [p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None

    if injected:
        with inject_oom(nth=30, times=1) as fault:
            split_loss, out = step(packed, hidden)
        assert fault.fired == 1
    else:
        split_loss, out = step(packed, hidden)

    assert step.records[-1].accumulation_steps == (2 if injected else 3)
    assert abs(loss - split_loss) <= 1e-12
    for one, other in zip(whole, model.parameters(), strict=True):
        assert (one - other.grad).abs().max() <= 1e-12
    assert type(out) is PackedSequence
    for one, other in zip(unpack_sequence(whole_out), unpack_sequence(out), strict=True):
        assert (one - other).abs().max() <= 1e-12


def test_a_joined_packed_result_refuses_gradients():
    packed = batches.packed(batches.numbers()[0], False)
    model = nn.GRU(3, 2, dtype=torch.float64)

    @oomkit.auto_batch(reduction="mean")
    def step(packed):
        out, _ = model(packed)
        out.data.mean().backward(retain_graph=True)
        return out

    with force_slices((4, 3)):
        out = step(packed)

    assert out.data.requires_grad
    with pytest.raises(oomkit.SplitError, match=r"result\[0\]"):
        out.data.sum().backward()


def test_a_graph_behind_the_batch_is_kept():
    x = batches.numbers()[0].requires_grad_()
    packed = batches.packed(x, False)
    _packed.split(packed, 2, 3).data.sum().backward()
    assert (x.grad.abs().sum(1) > 0).tolist() == [False, False, True, True, True, False, False]


def test_labels_beside_a_packed_sequence_and_inside_a_batch():
    packed = batches.packed(batches.numbers()[0], False)
    labels = torch.arange(batches.ROWS)
    assert probe([packed, labels])["split"] == ["a", "b"]
    got = probe([{"words": packed, "labels": labels}], start=5, length=2)
    assert got["rows"] == batches.ROWS and got["args"][0]["labels"].tolist() == [5, 6]
    assert _packed.size(got["args"][0]["words"]) == 2


def test_the_record_of_a_healthy_call_knows_the_rows():
    step = oomkit.auto_batch(lambda packed: None)
    step(batches.packed(batches.numbers()[0], True))
    assert step.records[-1].batch_size == batches.ROWS


def test_a_packed_sequence_that_the_step_changes_is_named():
    packed = batches.packed(batches.numbers()[0], True)
    with pytest.raises(oomkit.SplitError, match=r"it changed a\[0\] in place"):
        probe([packed], between=lambda: packed.data.mul_(2))
