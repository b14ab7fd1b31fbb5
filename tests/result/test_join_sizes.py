"""Sizes that happen to be a micro-batch's rows: what earlier whole calls showed decides."""

from __future__ import annotations

import logging

import pytest
import torch

import oomkit
from oomkit.testing import force_slices


def decorated(function, **options):
    step = oomkit.auto_batch(function, label="step", **options)

    def call(rows, slices=None):
        x = torch.linspace(-1, 1, rows * 2, dtype=torch.float64).reshape(rows, 2)
        if slices is None:
            return step(x)
        with force_slices(slices):
            return step(x)

    return call


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("wrap", [lambda t: {"hits": t}, lambda t: (0.5, t), lambda t: t])
def test_a_size_of_its_own_is_not_put_together(wrap):
    """Per class, of as many classes as the micro-batch has rows."""
    call = decorated(lambda x: wrap(torch.ones(4) * len(x)))
    call(8)
    with pytest.raises(oomkit.SplitError, match=r"has shapes \[4\] and \[4\] .* differing"):
        call(9, (4, 5))
    call = decorated(lambda x: wrap(torch.ones(4)))
    whole = call(8)
    got = call(8, (4, 4))
    pick = [v for v in (got, whole)]
    if not isinstance(got, torch.Tensor):
        pick = [list(v.values())[0] if isinstance(v, dict) else v[1] for v in pick]
    assert torch.equal(*pick)


def test_rows_are_put_together_after_whole_calls():
    call = decorated(lambda x: {"rows": x * 2})
    whole = call(8)["rows"]
    assert torch.equal(call(8, (4, 4))["rows"], whole)
    assert call(2, (1, 1))["rows"].shape == (2, 2)


def test_a_comparison_of_the_rows_is_refused_once_it_is_known():
    call = decorated(lambda x: {"similar": x @ x.T})
    call(8)
    with pytest.raises(oomkit.SplitError, match="compares the rows of a batch with each other"):
        call(8, (4, 4))


def test_a_comparison_of_the_rows_in_unequal_parts_is_refused():
    with pytest.raises(oomkit.SplitError, match=r"has shapes \[5, 5\] and \[3, 3\]"):
        decorated(lambda x: {"similar": x @ x.T})(8, (5, 3))


def test_a_square_of_which_nothing_is_known_is_said_once(caplog):
    call = decorated(lambda x: {"maybe": x.repeat(1, 2)})
    for _ in range(2):
        assert call(8, (4, 4))["maybe"].shape == (8, 4)
    (text,) = warnings_of(caplog)
    assert text.startswith(
        "results of the micro-batches of step: result['maybe'] has the rows of a "
        "micro-batch in both dimensions"
    )


def test_a_fixed_length_that_is_known_is_not_said(caplog):
    call = decorated(lambda x: {"logits": x.repeat(1, 2)})
    call(8)
    assert call(8, (4, 4))["logits"].shape == (8, 4)
    assert decorated(lambda x: {"y": x.repeat(1, 2)})(9, (4, 5))["y"].shape == (9, 4)
    assert warnings_of(caplog) == []


def test_nothing_is_believed_where_the_rows_were_not_known():
    """The first tensor argument is passed whole: whole calls took its size for the rows."""
    step = oomkit.auto_batch(lambda table, x: {"y": x * 1, "n": len(x)}, static=("table",))
    table, x = torch.ones(50), torch.rand(8, 2)
    step(table, x[:4])
    with force_slices((4, 4)):
        got = step(table, x)
    assert torch.equal(got["y"], x) and got["n"] == 8
