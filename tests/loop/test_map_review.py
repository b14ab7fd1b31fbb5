"""oomkit.map: lists of rows, rows returned several times, what verify= must put back."""

import functools
import warnings

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


@pytest.fixture
def x():
    return torch.arange(8.0).reshape(8, 1)


def wide(part):
    return torch.ones(len(part), 3, int(part.max()) + 1)


@pytest.mark.parametrize("pad", [None, "list"])
def test_rows_in_lists_are_made_once_where_joining_fails(x, pad, request):
    def fn(part):
        return {"ragged": wide(part), "even": torch.ones(len(part), 100), "mean": part.mean()}

    label = request.node.name
    for nth in range(1, 14):
        with warnings.catch_warnings(), inject_oom(nth=nth):
            warnings.simplefilter("ignore", oomkit.OomkitWarning)
            result = oomkit.map(fn, x, pad=pad, micro_batch=4, label=f"{label}{nth}")
        assert len(result["ragged"]) == 8
        assert all(row.dim() == 2 for row in result["ragged"])


def test_lists_of_rows_of_a_stream(x):
    result = oomkit.map(wide, iter([x, x]), pad="list")
    assert [row.shape for row in result] == [(3, 8)] * 16


def test_an_item_that_was_split_beside_one_that_was_not(x):
    def fn(part):
        if len(part) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return wide(part)

    with pytest.warns(oomkit.OomkitWarning, match="lists of one tensor per row"):
        result = oomkit.map(fn, iter([x[:3], x, x[:5]]))
    assert len(result) == 16 and all(row.dim() == 2 for row in result)
    # Three rows are what has worked: 3, 3 and 2 of the item that fails whole.
    assert [row.shape[1] for row in result[:11]] == [3] * 6 + [6] * 3 + [8] * 2


def test_sequences_of_a_split_call_after_a_whole_one(x):
    def fn(part, num_return_sequences):
        return part.repeat_interleave(num_return_sequences, 0)

    for fails in (1000, 1):  # at one line, where the whole call is remembered
        with inject_oom(nth=fails):
            result = oomkit.map(fn, x, num_return_sequences=2)
        assert torch.equal(result, x.repeat_interleave(2, 0))


def test_a_tensor_that_is_used_again_is_refused_over_a_stream(x):
    buffer = torch.empty(8, 1)

    def fn(part):
        return buffer[: len(part)].copy_(part)

    with pytest.raises(oomkit.SplitError, match="used again"):
        oomkit.map(fn, iter([x, x + 100]))
    results = [r.clone() for r in oomkit.map(fn, iter([x, x + 100]), lazy=True)]
    assert torch.equal(torch.cat(results), torch.cat([x, x + 100]))


@pytest.mark.parametrize("size", [8, 4])
def test_a_column_for_each_sequence_stays_one(x, size):
    def fn(part, num_return_sequences):
        return part.repeat_interleave(num_return_sequences, 0), part.expand(-1, 2)

    rows, columns = oomkit.map(fn, x, num_return_sequences=2, micro_batch=size)
    assert torch.equal(rows, x.repeat_interleave(2, 0))
    assert torch.equal(columns, x.expand(-1, 2))


def test_a_partial_says_how_many_sequences_it_returns(x):
    def fn(part, num_return_sequences):
        return part.repeat_interleave(num_return_sequences, 0)

    twice = functools.partial(fn, num_return_sequences=2)
    assert torch.equal(oomkit.map(twice, x, micro_batch=4), x.repeat_interleave(2, 0))


def test_a_probe_leaves_buffers_and_streams_as_they_were(x):
    norm, plain = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    plain(x)
    with pytest.warns(oomkit.OomkitWarning, match="depends on the other rows"):
        oomkit.map(norm, x, verify=True)
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, plain.running_mean)
    generator = torch.Generator().manual_seed(1)
    with pytest.warns(oomkit.OomkitWarning, match="random numbers"):
        drawn = oomkit.map(lambda part: torch.rand(len(part), generator=generator), x, verify=True)
    again = torch.Generator().manual_seed(1)
    assert torch.equal(drawn, torch.rand(8, generator=again))


def test_functions_that_have_not_run_when_they_return_are_refused(x):
    async def waits(part):
        return part

    def yields(part):
        yield part

    for fn in (waits, yields):
        with pytest.raises(TypeError, match="coroutine or a generator"):
            oomkit.map(fn, x)


@pytest.mark.parametrize("form", [lambda x: x.sum().item(), lambda x: {"loss": x.sum()}])
def test_a_number_for_the_batch_is_said_to_be_averaged(form, caplog):
    x = torch.arange(8.0)
    with inject_oom(nth=1):
        oomkit.map(form, x)
    assert "averaged over the rows: correct for a mean over rows" in caplog.text
