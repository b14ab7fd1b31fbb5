"""Lists as long as the micro-batch: of rows, or of losses and layers."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

import oomkit
from oomkit.testing import force_slices


def decorated(function, **options):
    step = oomkit.auto_batch(function, label="step", **options)

    def call(rows, slices=None):
        x = torch.linspace(-1, 1, rows * 3, dtype=torch.float64).reshape(rows, 3)
        if slices is None:
            return step(x)
        with force_slices(slices):
            return step(x)

    return call


def warnings_of(caplog):
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if "averaged over the rows" not in text]


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == pytest.approx(y)
        for x, y in zip(a, b, strict=True)
    )


KINDS = {
    "losses": lambda x: [x.mean().item(), x.square().mean().item()],
    "layers": lambda x: [x, 2 * x],
    "names": lambda x: ["cat", "dog"],
    "rows": lambda x: (10 * x[:, 0]).tolist(),
}


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"v": v}, lambda v: (0.5, {"v": v})])
@pytest.mark.parametrize("kind", KINDS)
def test_what_whole_calls_returned_decides(kind, wrap, caplog):
    call = decorated(lambda x: wrap(KINDS[kind](x)))
    whole, got = call(4), call(4, (2, 2))
    if isinstance(whole, tuple):
        whole, got = whole[1], got[1]
    if isinstance(whole, dict):
        whole, got = whole["v"], got["v"]
    assert equal(got, whole)
    assert warnings_of(caplog) == []


def test_losses_of_which_nothing_is_known_are_said_once(caplog):
    call = decorated(lambda x: {"v": KINDS["losses"](x)})
    for _ in range(2):
        assert len(call(4, (2, 2))["v"]) == 4
    (text,) = warnings_of(caplog)
    assert text == (
        "results of the micro-batches of step: result['v'] has as many elements as a "
        "micro-batch has rows and was joined as one element per row: if it is another list, "
        "return a tuple"
    )


def test_layers_of_which_nothing_is_known_are_joined_by_layer(caplog):
    call = decorated(KINDS["layers"])
    got = call(4, (2, 2))
    assert equal(got, call(4))
    (text,) = warnings_of(caplog)
    assert "joined tensor by tensor" in text


@pytest.mark.parametrize("rows, slices", [(7, (3, 2, 2)), (3, (2, 1))])
def test_unequal_micro_batches_leave_no_doubt(rows, slices, caplog):
    call = decorated(KINDS["rows"])
    assert equal(call(rows, slices), call(rows))
    assert len(decorated(KINDS["losses"])(rows, slices)) == 2
    assert warnings_of(caplog) == []


def test_a_loss_and_its_outputs_are_no_rows(caplog):
    got = decorated(lambda x: [x.mean(), x])(4, (2, 2))
    assert got[0].ndim == 0 and got[1].shape == (4, 3)
    assert warnings_of(caplog) == []


def test_texts_and_targets_for_each_row_are_put_together(caplog):
    texts = decorated(lambda x: [str(v) for v in x[:, 0].tolist()])
    assert texts(4, (2, 2)) == texts(4)
    boxes = decorated(lambda x: [{"boxes": row.reshape(1, 3)} for row in x])
    assert len(boxes(4, (2, 2))) == 4
    assert warnings_of(caplog) == []


def test_gradients_that_are_put_away_are_not_taken_for_rows():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    bias = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(x):
        (x @ weight + bias).mean().backward()
        return [weight.grad, bias.grad]

    for whole in (0, 1):
        call = decorated(step)
        for _ in range(whole):
            call(4)
        with pytest.raises(oomkit.SplitError, match=r"\[0\] is a 'NoneType' and then a 'Tensor'"):
            call(4, (2, 2))


def test_names_that_all_micro_batches_share_are_said(caplog):
    assert decorated(KINDS["names"])(4, (2, 2)) == ["cat", "dog"] * 2
    assert len(warnings_of(caplog)) == 1


# --- micro-batches of one row ---


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x[:, 0].squeeze(),
        lambda x: {"p": x[:, 0].squeeze().tolist()},
        lambda x: (1.0, {"p": x[:, 0].numpy().squeeze()}),
    ],
    ids=["tensor", "list", "array"],
)
def test_rows_that_squeeze_has_taken_are_refused(result):
    call = decorated(result)
    call(4)
    with pytest.raises(oomkit.SplitError, match=r"squeeze\(\) takes out, or give min_micro_batch"):
        call(4, (1, 1, 1, 1))


def test_losses_of_rows_that_squeeze_has_taken_are_refused_too():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    call = decorated(lambda x: (x * weight)[:, :1].squeeze())
    call(4)
    with pytest.raises(oomkit.SplitError, match=r"squeeze\(\) takes out"):
        call(4, (1, 1, 1, 1))


@pytest.mark.parametrize("pad", [None, 0.0])
def test_rows_of_unequal_length_are_not_doubted(pad, caplog):
    """map made lists of rows, and then said that a tuple might help: nothing would join it."""
    x = torch.arange(1.0, 7.0).reshape(6, 1)
    name = "lists" if pad is None else "padded"
    found = {"lists": pytest.warns(oomkit.OomkitWarning, match="pass pad=VALUE")}
    with found.get(name, contextlib.nullcontext()), force_slices([3, 3]):
        got = oomkit.map(lambda b: torch.ones(len(b), int(b.max())), x, pad=pad, label=name)
    assert [int(row.sum()) for row in got] == [3, 3, 3, 6, 6, 6]
    assert warnings_of(caplog) == []


def test_ragged_rows_are_not_doubted(caplog):
    ragged = decorated(lambda x: [torch.ones(int(row[0]) + 1) for row in x])
    assert [len(row) for row in ragged(4, (2, 2))] == [len(row) for row in ragged(4)]
    assert warnings_of(caplog) == []


def test_what_is_proposed_for_other_lengths_works():
    x = torch.arange(1.0, 7.0).reshape(6, 1)
    with force_slices([3, 3]), pytest.raises(oomkit.SplitError) as caught:
        oomkit.map(lambda b: b[b > 1], x)
    assert "join=lambda results, rows: results keeps a list of the parts" in str(caught.value)
    with force_slices([3, 3]):
        parts = oomkit.map(lambda b: b[b > 1], x, join=lambda results, rows: results)
    assert torch.equal(torch.cat(parts), x[1:, 0])
