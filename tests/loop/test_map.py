"""oomkit.map: a function over a batch or a stream in parts that fit."""

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from helpers.own_process import run_program
from helpers.seen import Seen
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oomkit
from oomkit.testing import force_slices, inject_oom


@pytest.fixture
def x():
    return torch.arange(40.0).reshape(10, 4)


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


@dataclass
class Output:
    logits: torch.Tensor
    names: list


def test_results_are_joined_in_order_without_gradients(x):
    model = nn.Linear(4, 3)
    whole = model(x).detach()
    with inject_oom(nth=1) as fault:
        result = oomkit.map(model, x)
    assert fault.fired == 1 and not result.requires_grad
    assert torch.allclose(result, whole, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "as_is"])
def test_modes(x, mode):
    seen = []

    def fn(part):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return part * 2

    oomkit.map(fn, x, mode=mode)
    assert seen == [(mode == "as_is", mode == "inference")]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("slices", [[10], [3, 3, 4], [1] * 10])
def test_containers_keep_their_type(x, slices):
    def fn(part):
        rows = part[:, 0]
        names = [str(int(i)) for i in rows]
        return OrderedDict(
            pair=Pair(rows, names), out=Output(rows * 2, names), mean=rows.mean(), n=len(rows)
        )

    with force_slices(slices):
        result = oomkit.map(fn, x, label=f"containers {len(slices)}")
    assert type(result) is OrderedDict and type(result["pair"]) is Pair
    assert torch.equal(result["pair"].left, x[:, 0])
    assert result["out"].names == result["pair"].right == [str(4 * i) for i in range(10)]
    assert torch.equal(result["out"].logits, x[:, 0] * 2)
    assert result["n"] == 10 and torch.allclose(result["mean"], x[:, 0].mean())


def test_callables_of_every_kind(x):
    class Scorer:
        def score(self, part, scale=1.0):
            return part.sum(1) * scale

    whole = x.sum(1)
    scorer = Scorer()
    with force_slices([5, 5]):
        assert torch.equal(oomkit.map(scorer.score, x), whole)
        assert torch.equal(oomkit.map(scorer.score, x, scale=2.0), whole * 2)
        assert torch.equal(oomkit.map(scorer.score, x, 2.0), whole * 2)
        assert torch.equal(oomkit.map(functools.partial(scorer.score, scale=2.0), x), whole * 2)
        assert torch.equal(oomkit.map(lambda part: part.sum(1), x), whole)
        assert torch.equal(oomkit.map(torch.neg, x), -x)


def test_several_arguments_are_split_together(x):
    def fn(a, b, table):
        assert len(a) == len(b) == 5 and len(table) == 3
        return a + b

    with force_slices([5, 5]):
        assert torch.equal(oomkit.map(fn, x, x, table=torch.zeros(3)), x * 2)
        assert torch.equal(oomkit.map(fn, a=x, b=x, table=torch.zeros(3)), x * 2)
        assert torch.equal(oomkit.map(fn, (x, x), torch.zeros(3), unpack=True), x * 2)
        batch = {"a": x, "b": x}
        assert torch.equal(oomkit.map(fn, batch, unpack=True, table=torch.zeros(3)), x * 2)


def test_lists_of_anything():
    with force_slices([2, 4]):
        assert oomkit.map(lambda part: [s.upper() for s in part], list("abcdef")) == list("ABCDEF")


def test_outputs_of_a_part_leave_the_device_before_the_next(x):
    result = oomkit.map(lambda part: {"y": part.to("meta")}, x, to="meta")
    assert result["y"].device.type == "meta"
    moved = []

    class Watched(torch.Tensor):
        def to(self, *args, **kwargs):
            moved.append(args)
            return super().to(*args, **kwargs)

    with force_slices([5, 5]):
        oomkit.map(lambda part: part.as_subclass(Watched), x, to="cpu")
    assert len(moved) == 2


# --- outputs that differ in other sizes ---


def ragged(part):
    return part.new_ones(len(part), int(part[0, 0]) // 4 + 1)


def test_ragged_outputs_are_padded_on_the_right(x):
    with force_slices([3, 3, 4]):
        result = oomkit.map(ragged, x, pad=-1)
    assert result.shape == (10, 7)
    assert result[0].tolist() == [1.0] + [-1.0] * 6 and result[9].tolist() == [1.0] * 7


def test_ragged_outputs_come_back_as_rows_and_it_is_said(x):
    with force_slices([3, 3, 4]):
        with pytest.warns(oomkit.OomkitWarning, match="pass pad=VALUE") as caught:
            result = oomkit.map(ragged, x)
        assert caught[0].filename == __file__
        again = oomkit.map(ragged, x, pad="list")
    assert (
        [len(row) for row in result] == [len(row) for row in again] == [1] * 3 + [4] * 3 + [7] * 4
    )
    assert isinstance(oomkit.map(ragged, x, pad="list"), list)


def test_only_what_differs_is_padded(x):
    def fn(part):
        return {"ids": ragged(part), "score": part.sum(1), "mean": part.mean()}

    with force_slices([5, 5]):
        result = oomkit.map(fn, x, pad=0)
    assert result["ids"].shape == (10, 6) and torch.equal(result["score"], x.sum(1))


# --- streams ---


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_streamed_item_is_not_lost(x, nth):
    def items():
        for start in range(0, 10, 4):
            held.append(start)
            yield x[start : start + 4]

    held = []
    with inject_oom(nth=nth) as fault:
        result = oomkit.map(torch.neg, items(), label=f"stream {nth}")
    assert fault.fired == (nth <= 4)
    assert torch.equal(result, -x) and held == [0, 4, 8]


def test_items_are_asked_for_one_by_one(x):
    asked = []

    def items():
        for start in range(0, 10, 5):
            asked.append(start)
            yield x[start : start + 5]

    results = oomkit.map(torch.neg, items(), lazy=True)
    assert asked == []
    assert torch.equal(next(results), -x[:5]) and asked == [0]
    assert torch.is_grad_enabled()
    assert torch.equal(next(results), -x[5:])
    assert next(results, None) is None


def test_a_loader_of_tuples(x):
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    rows = Seen()

    def fn(a, b):
        rows.append(len(a))
        if list(rows) == [4, 4]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return a + b

    assert torch.equal(oomkit.map(fn, loader, unpack=True), x + x[:, :1])
    assert list(rows) == [4, 4, 2, 2, 2]


def test_means_over_a_stream_weigh_rows(x):
    result = oomkit.map(lambda part: part.double().mean(), iter([x[:3], x[3:]]))
    assert abs(result.item() - x.mean().item()) < 1e-12


def test_errors_of_the_stream_pass(x):
    def items():
        yield x
        raise KeyError("disk")

    with pytest.raises(KeyError, match="disk"):
        oomkit.map(torch.neg, items())
    assert oomkit.map(torch.neg, iter([])) is None


def test_ragged_items_of_a_stream(x):
    result = oomkit.map(ragged, iter([x[:3], x[3:6], x[6:]]), pad=0)
    assert result.shape == (10, 7)


# --- the rest ---


def test_random_numbers_do_not_depend_on_the_failure(x):
    def fn(part):
        return part + torch.rand(1)

    def run(context):
        torch.manual_seed(1)
        with context:
            return oomkit.map(fn, x, label="random")

    assert torch.equal(run(force_slices([5, 5])), run(inject_oom(nth=2)))


@pytest.mark.parametrize("slices", [[10], [5, 5], [3, 3, 4]])
def test_a_given_generator_that_is_drawn_from_row_by_row(x, slices):
    def fn(part, generator):
        return torch.stack([row + torch.rand(1, generator=generator) for row in part])

    with force_slices(slices):
        result = oomkit.map(fn, x, generator=torch.Generator().manual_seed(7))
    assert torch.equal(result, fn(x, torch.Generator().manual_seed(7)))


def test_a_given_generator_goes_back_with_a_failed_part(x):
    def fn(part, generator):
        return torch.stack([row + torch.rand(1, generator=generator) for row in part])

    whole = fn(x, torch.Generator().manual_seed(7))
    for nth in (3, 8):
        with inject_oom(nth=nth) as fault:
            result = oomkit.map(fn, x, generator=torch.Generator().manual_seed(7), label=f"g{nth}")
        assert fault.fired == 1 and torch.equal(result, whole)


def test_buffers_of_the_model_are_found(x):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    batch = x.double()
    with pytest.warns(oomkit.OomkitWarning, match="BatchNorm"), inject_oom(nth=4) as fault:
        oomkit.map(model, batch, label="buffers")
    assert fault.fired == 1
    assert model[0].num_batches_tracked.item() == 2


def test_two_models_at_one_line_are_told_apart(x):
    small, large = nn.Linear(4, 2), nn.Linear(4, 2)
    sizes = []
    for model in (large, small, large):
        with inject_oom(nth=1 if model is large and not sizes else 10**6):
            tried = Seen()

            def hook(module, args, tried=tried):
                tried.append(len(args[0]))

            handle = model.register_forward_pre_hook(hook)
            oomkit.map(model, x)
            handle.remove()
        sizes.append(list(tried))
    assert sizes == [[10, 5, 5], [10], [5, 5]]


def test_progress_counts_rows(x, capsys):
    oomkit.map(torch.neg, iter([x, x]), progress=True)
    assert "20row" in capsys.readouterr().err


def test_progress_without_tqdm(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        oomkit.map(torch.neg, x, progress=True)


def test_results_are_not_lost_where_they_are_joined(x):
    for nth in (3, 4):
        with force_slices([5, 5]), inject_oom(nth=nth) as fault:
            result = oomkit.map(torch.neg, x)
        assert torch.equal(result, -x)
        assert fault.fired == (nth == 3)
    with force_slices([5, 5]), inject_oom(nth=3, times=None):
        with pytest.raises(oomkit.OutOfMemory, match='all 10 rows.*pass to="cpu"'):
            oomkit.map(torch.neg, x)


def test_one_row_that_does_not_fit(x):
    with inject_oom(times=None), pytest.raises(oomkit.OutOfMemory, match="part of 1 of 10 rows"):
        oomkit.map(torch.neg, x, label="nothing fits")


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((3, 4), {}, TypeError, "expected a callable, got int"),
        ((torch.neg,), {}, TypeError, "expected a batch"),
        ((torch.neg, 1), {"mode": "eval"}, ValueError, "mode"),
        ((torch.neg, 1), {"pad": "left"}, TypeError, "pad"),
        ((torch.neg, torch.ones(2)), {"lazy": True}, TypeError, "expected an iterator"),
        ((torch.neg, object()), {}, oomkit.SplitError, "no batch"),
        ((torch.neg, torch.ones(2)), {"micro_batch": 0}, ValueError, "micro_batch"),
    ],
)
def test_mistakes(args, kwargs, error, text):
    with pytest.raises(error, match=text):
        oomkit.map(*args, **kwargs)


def test_no_model_is_kept_alive(x):
    def run(how):
        model = nn.Linear(4, 2)
        fn = {"module": model, "method": model.forward, "closure": lambda part: model(part)}[how]
        with inject_oom(nth=1):
            oomkit.map(fn, x, label=f"alive {how}")
        oomkit.map(fn, x, label=f"alive {how}")
        return weakref.ref(model)

    for how in ("module", "method", "closure"):
        gone = run(how)
        gc.collect()
        assert gone() is None, how


def test_without_the_bridge():
    code = """
import sys, warnings
sys.modules["oomkit._bridge"] = None
warnings.simplefilter("ignore")
import torch, oomkit
x = torch.arange(40.0).reshape(10, 4)
failures = iter((True, True))
def fn(part):
    if next(failures, False):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return part * 2
assert torch.equal(oomkit.map(fn, x), x * 2)
failures = iter((True,))
sizes = []
for part in oomkit.chunks(x):
    with oomkit.guard():
        sizes.append(len(fn(part)))
assert sizes == [5, 5], sizes
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr
