"""Joining the results of micro-batches."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit import _C

ADVICE = (
    "; return it in another way, or give join=... (join=lambda results, rows: results keeps a "
    "list of the parts)"
)


def join(results, rows=(3, 2, 2), weights=None, **options):
    rows = list(rows)[: len(results)]
    weights = weights or [n / sum(rows) for n in rows]
    return _C._join_probe(list(results), rows, list(weights), options)


def refusal(results, **options) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        join(results, **options)
    return message_of(caught.value)


def pieces(*shape, rows=(3, 2, 2)):
    whole = torch.rand(sum(rows), *shape)
    return whole, list(whole.split(list(rows)))


class Output(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


# --- tensors ---


def test_tensors_with_the_rows_in_front_are_concatenated():
    whole, parts = pieces(4)
    assert torch.equal(join(parts), whole)


def test_dimension_one_is_concatenated():
    whole = torch.rand(4, 7)
    assert torch.equal(join(whole.split([3, 2, 2], 1), dim=1), whole)


def test_equal_tensors_of_another_size_are_kept():
    first = torch.rand(5, 2)
    assert join([first, first.clone(), first.clone()]) is first


def test_tensors_that_differ_are_refused():
    assert refusal([{"s": torch.zeros(5)}, {"s": torch.zeros(5)}, {"s": torch.ones(5)}]) == (
        "auto_batch cannot join the results of 3 micro-batches: result['s'] has shapes [5] and "
        "[5] for 3 and 2 rows, and differing values (if it is the next batch fetched inside the "
        "step: fetch it outside)" + ADVICE
    )
    assert "result has shapes [3, 2] and [4, 2] for 3 and 2 rows" in refusal(
        [torch.ones(3, 2), torch.ones(4, 2)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scalar_tensors_are_weighted_in_their_own_dtype(dtype):
    values = [torch.tensor(v, dtype=dtype) for v in (1.0, 2.0, 4.0)]
    got = join(values)
    expected = values[0] * (3 / 7) + values[1] * (2 / 7) + values[2] * (2 / 7)
    assert got.dtype == dtype and torch.equal(got, expected)


def test_a_loss_loses_its_graph_when_it_is_kept():
    x = torch.rand(3, requires_grad=True)
    middle = x * 2
    alive = weakref.ref(middle)
    results = [{"loss": middle.exp().sum(), "out": [middle]}]

    class Stop(Exception):
        pass

    def check(kept, rows):
        nonlocal results, middle
        results.clear()
        del middle
        gc.collect()
        assert alive() is None
        assert not kept[0]["loss"].requires_grad and not kept[0]["out"][0].requires_grad
        raise Stop

    results.append({"loss": x.sum(), "out": [x]})
    with pytest.raises(Stop):
        _C._join_probe(results, [3, 3], [0.5, 0.5], {"join": check})


def test_keeping_a_result_is_a_view():
    x = torch.rand(3, requires_grad=True) * 2
    seen = []
    join([x, x], rows=(3, 3), join=lambda results, rows: seen.extend(results))
    assert seen[0] is not x and seen[0].data_ptr() == x.data_ptr()


def test_integer_scalar_tensors_are_added():
    assert join([torch.tensor(2), torch.tensor(1), torch.tensor(0)]).item() == 3
    assert join([torch.tensor(4) for _ in range(3)]).item() == 12


def test_a_tensor_that_is_returned_every_time_is_itself():
    """As the whole call returns it: a counter of the step's own, an embedding's scale."""
    counter = torch.tensor(4)
    assert join([counter] * 3) is counter


def test_boolean_scalar_tensors_must_agree():
    assert join([torch.tensor(True), torch.tensor(True)]).item() is True
    message = refusal([torch.tensor(True), torch.tensor(False)])
    assert "result differs: tensor(True) and tensor(False)" in message


# --- numbers ---


def test_floats_are_weighted():
    assert join([1.0, 2.0, 4.0]) == pytest.approx(15 / 7)
    assert join([1, 2.0, 4]) == pytest.approx(15 / 7)


def test_equal_floats_are_kept_without_rounding():
    assert join([0.1, 0.1, 0.1]) == 0.1


def test_nan_stays_nan():
    got = join([float("nan"), 1.0])
    assert got != got
    assert torch.isnan(join([torch.tensor(1.0), torch.tensor(float("nan"))]))


def test_integers_are_added():
    assert join([2, 1, 0]) == 3
    assert join([7, 7, 7]) == 21
    assert join([2**70, 1]) == 2**70 + 1


def test_booleans_must_agree():
    assert join([True, True]) is True
    assert refusal([{"ok": True}, {"ok": False}]) == (
        "auto_batch cannot join the results of 2 micro-batches: result['ok'] differs: "
        "True and False" + ADVICE
    )
    assert "result is a 'bool' and then a 'int'" in refusal([True, 1])


def test_the_weights_of_the_caller_are_used():
    assert join([1.0, 3.0], weights=[0.25, 0.75]) == 2.5


# --- reduction="sum" ---


@pytest.mark.parametrize("wrap", [torch.tensor, float])
def test_a_sum_adds_the_loss_and_averages_the_rest(wrap):
    results = [{"loss": wrap(3.0), "error": wrap(1.0)}, {"loss": wrap(2.0), "error": wrap(0.0)}]
    got = join(results, rows=(3, 1), reduction="sum")
    assert float(got["loss"]) == 5.0 and float(got["error"]) == 0.75


def test_equal_losses_of_a_sum_are_added():
    assert join([2.0, 2.0], rows=(1, 1), reduction="sum") == 4.0


def test_the_loss_of_a_sum_by_place():
    results = [(2.0, 1.0), (3.0, 3.0)]
    assert join(results, rows=(1, 1), reduction="sum") == (5.0, 2.0)
    named = [
        Output(torch.tensor(1.0), torch.tensor(2.0)),
        Output(torch.tensor(3.0), torch.tensor(4.0)),
    ]
    got = join(named, rows=(1, 1), reduction="sum")
    assert got.loss.item() == 6.0 and got.logits.item() == 2.0


def test_a_loss_deeper_down_is_no_loss():
    got = join([{"m": {"loss": 1.0}}, {"m": {"loss": 3.0}}], rows=(1, 1), reduction="sum")
    assert got == {"m": {"loss": 2.0}}


# --- the norm of parked gradients ---


@pytest.mark.parametrize("wrap", [torch.tensor, float])
def test_a_norm_is_taken_from_the_last(wrap):
    results = [{"loss": 0.0, "grad_norm": wrap(0.0), "accuracy": wrap(0.0)} for _ in range(2)]
    results[-1] = {"loss": 1.0, "grad_norm": wrap(3.0), "accuracy": wrap(1.0)}
    got = join(results, rows=(1, 1), parked=True)
    assert float(got["grad_norm"]) == 3.0
    assert got["loss"] == 0.5 and float(got["accuracy"]) == 0.5
    assert float(join(results, rows=(1, 1))["grad_norm"]) == 1.5


def test_a_norm_without_a_name():
    assert join([(1.0, 0.0), (2.0, 3.0)], rows=(1, 1), parked=True) == (1.5, 3.0)
    assert join([(1.0, 1.0), (2.0, 3.0)], rows=(1, 1), parked=True) == (1.5, 2.0)


# --- containers ---


def test_containers_by_element():
    whole, parts = pieces(2)
    results = [{"o": (p, [1.0 * len(p), None]), "n": len(p)} for p in parts]
    got = join(results)
    assert torch.equal(got["o"][0], whole) and got["n"] == 7
    assert got["o"][1] == [pytest.approx(17 / 7), None] and type(got["o"]) is tuple


def test_named_tuples_keep_their_type():
    whole, parts = pieces(2)
    got = join([Output(p, torch.tensor(1.0)) for p in parts])
    assert type(got) is Output and torch.equal(got.logits, whole)


def test_lists_with_an_element_for_each_row_are_put_together():
    assert join([["a", "b", "c"], ["d", "e"], ["f", "g"]]) == list("abcdefg")


def test_a_container_returned_every_time_is_kept_each_time():
    shared, kept = {"x": [1]}, []
    join([shared, shared], rows=(1, 1), join=lambda results, rows: kept.extend(results))
    assert kept[0] == shared and kept[0] is not shared and kept[0]["x"] is not shared["x"]


@pytest.mark.parametrize("results", [[None, None], ["best", "best"], [b"x", b"x"]])
def test_what_is_equal_is_kept(results):
    assert join(results) == results[0]


def test_an_unknown_object_is_kept_when_it_is_the_same():
    thing = object()
    assert join([thing, thing]) is thing


def test_what_differs_is_refused_by_its_place():
    assert refusal([{"state": "a"}, {"state": "b"}]) == (
        "auto_batch cannot join the results of 2 micro-batches: result['state'] differs: "
        "'a' and 'b'" + ADVICE
    )
    assert "result[1]['k'] is a 'int' and then a 'str'" in refusal([(1, {"k": 1}), (1, {"k": "b"})])
    assert "result is a 'NoneType' and then a 'float'" in refusal([None, 1.0])


def test_arrays_that_have_no_single_answer_are_refused():
    numpy = pytest.importorskip("numpy")
    assert "result differs: array" in refusal([numpy.array(["a", "b"]), numpy.array(["a", "c"])])


def test_keys_and_lengths_must_agree():
    assert "result differs: {'a': 1} and {'b': 1}" in refusal([{"a": 1}, {"b": 1}])
    assert "result differs: {'a': 1} and {}" in refusal([{"a": 1}, {}])
    assert refusal([(1, 2), (1,)], rows=(4, 4)) == (
        "auto_batch cannot join the results of 2 micro-batches: result has 2 elements for 4 "
        "rows and 1 for 4" + ADVICE
    )


# --- the rest ---


def test_join_overrides_everything():
    seen = []

    def mine(results, rows):
        seen.append((results, rows))
        return "joined"

    assert join(["a", 1], rows=(4, 3), join=mine) == "joined"
    assert seen == [(["a", 1], [4, 3])]


def test_an_error_of_join_passes():
    with pytest.raises(ZeroDivisionError):
        join([1, 2], join=lambda results, rows: 1 // 0)


def test_a_single_result_is_itself():
    thing = object()
    assert join([thing], rows=(4,)) is thing
    assert join([]) is None


def test_results_after_a_roll_back_are_gone():
    assert join([1.0, 9.0, 9.0], rows=(2, 2, 2), keep=1) == 1.0


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (torch.tensor(1.0), 1.0),
        ((torch.tensor(1.0), 2), 1.0),
        ([torch.tensor(1.0)], 1.0),
        ({"x": torch.tensor(2.0), "loss": torch.tensor(1.0)}, 1.0),
        (Output(torch.tensor(2.0), torch.tensor(1.0)), 1.0),
        (type("Result", (), {"loss": torch.tensor(1.0)})(), 1.0),
        ({"x": torch.tensor(2.0)}, None),
        ((1.0, torch.tensor(2.0)), None),
        ((), None),
        (None, None),
        ("loss", None),
        (2.5, None),
        (object(), None),
    ],
)
def test_the_loss_of_a_result(result, expected):
    got = _C._loss_probe(result)
    assert got is None if expected is None else got.item() == expected
