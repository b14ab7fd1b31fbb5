"""oomkit.chunks with oomkit.guard: the rows that failed come again in smaller parts."""

import gc
import logging
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

ROWS = 10


@pytest.fixture
def x():
    return torch.arange(4.0 * ROWS).reshape(ROWS, 4)


def evaluate(batch, label, **options):
    for part in oomkit.chunks(batch, label=label, **options):
        with oomkit.guard():
            part.clone()


def parts_of(batch, label, nth=1, times=1, **options):
    outputs = []
    with inject_oom(nth=nth, times=times) as fault:
        for part in oomkit.chunks(batch, label=label, **options):
            with oomkit.guard():
                outputs.append(part.clone())
    assert fault.fired == times
    return outputs


def test_a_batch_that_fits_is_handed_out_as_it_is(x, request):
    seen = []
    for part in oomkit.chunks(x, label=request.node.name):
        with oomkit.guard():
            seen = [part]
    assert seen[0] is x


def test_rows_come_again_in_halves_in_order(x, request):
    outputs = parts_of(x, request.node.name)
    assert [len(part) for part in outputs] == [5, 5]
    assert torch.equal(torch.cat(outputs), x)


@pytest.mark.parametrize("nth", range(1, 6))
def test_finished_parts_stay_whatever_part_fails(x, nth, request):
    with inject_oom(nth=nth) as fault:
        outputs = []
        for part in oomkit.chunks(x, label=request.node.name, micro_batch=2):
            with oomkit.guard():
                outputs.append(part.clone())
    assert fault.fired == 1
    assert [len(part) for part in outputs[: nth - 1]] == [2] * (nth - 1)
    assert torch.equal(torch.cat(outputs), x)


def test_the_size_is_remembered_for_the_next_loop(x, request):
    parts_of(x, request.node.name, times=2)
    sizes = [len(part) for part in parts_of(x, request.node.name, nth=1, times=None or 1)]
    assert max(sizes) < 5


def test_the_size_grows_back_with_the_budget(request):
    wide = torch.zeros(64, 1024)

    def run():
        sizes = []
        for part in oomkit.chunks(wide, label=request.node.name):
            with oomkit.guard():
                work = part * 2
                sizes.append(len(work))
                del work
        return sizes

    gc.collect()  # a model of another test, from before tensors were counted, is outside the limit
    used = oomkit.memory("cpu").allocated
    oomkit.limit_memory(used + wide.nbytes // 3, device="cpu")
    try:
        assert len(run()) > 2
        assert run() == run()
        again = run()
        assert sum(again) == 64 and len(again) <= 4
        oomkit.limit_memory(used + wide.nbytes * 3, device="cpu")
        assert run() == [64]
    finally:
        oomkit.limit_memory(None, device="cpu")


def test_a_line_remembers_without_a_label(x):
    def run(fault):
        sizes = []
        with inject_oom(nth=1 if fault else 10**6):
            for part in oomkit.chunks(x):
                with oomkit.guard():
                    part.clone()
                    sizes.append(len(part))
        return sizes

    assert run(True) == [5, 5]
    assert run(False) == [5, 5]


def test_buckets_are_remembered_apart(x, request):
    label = request.node.name
    parts_of(x, label, bucket=("long", 512))
    sizes = {}
    for bucket in (("long", 512), ("short", 8)):
        parts = oomkit.chunks(x, label=label, bucket=bucket)
        sizes[bucket[0]] = [len(part) for part in parts_guarded(parts)]
    assert sizes == {"long": [5, 5], "short": [10]}


def parts_guarded(parts):
    taken = []
    for part in parts:
        with oomkit.guard():
            taken.append(part)
    return taken


def test_one_row_that_does_not_fit_ends_in_one_error(x, request):
    with inject_oom(times=None), pytest.raises(oomkit.OutOfMemory) as caught:
        evaluate(x, request.node.name)
    report = caught.value.report
    assert [a["micro_batch_size"] for a in report.attempts][-1] == 1
    assert report.label == request.node.name
    assert "rows 0 to 0 are done" in str(caught.value)
    assert caught.value.committed is False and caught.value.__cause__ is None


def test_what_was_finished_is_told_by_the_error(x, request):
    outputs = []
    with inject_oom(nth=3, times=None), pytest.raises(oomkit.OutOfMemory, match="0 to 4 are"):
        for part in oomkit.chunks(x, label=request.node.name, micro_batch=2, min_micro_batch=2):
            with oomkit.guard():
                outputs.append(part.clone())
    assert torch.equal(torch.cat(outputs), x[:4])


def test_min_micro_batch_and_multiple_of(x, request):
    sizes = [len(p) for p in parts_of(x, request.node.name, multiple_of=3)]
    assert sum(sizes) == ROWS and all(n % 3 == 0 for n in sizes[:-1])
    with inject_oom(times=None), pytest.raises(oomkit.OutOfMemory, match="a part of 5 of 10"):
        evaluate(x, request.node.name + "2", min_micro_batch=5)


# --- kinds of batches ---


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "s"


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass", "numpy", "dim"])
def test_batches_that_auto_batch_splits(x, kind, request):
    batch = {
        "dict": {"a": x, "b": {"c": x + 1}, "scale": 2.0},
        "tuple": (x, x + 1),
        "dataclass": Sample(x),
        "numpy": x.numpy(),
        "dim": x.t().contiguous(),
    }[kind]
    get = {
        "dict": lambda part: part["b"]["c"] - 1,
        "tuple": lambda part: part[1] - 1,
        "dataclass": lambda part: part.x + 0,
        "numpy": lambda part: torch.as_tensor(part) + 0,
        "dim": lambda part: part.t() + 0,
    }[kind]
    outputs = []
    with force_slices([4, 4, 2]):
        options = {"dim": 1} if kind == "dim" else {}
        for part in oomkit.chunks(batch, label=request.node.name, **options):
            with oomkit.guard():
                outputs.append(get(part))
    assert [len(part) for part in outputs] == [4, 4, 2]
    assert torch.equal(torch.cat(outputs), x)


@pytest.mark.parametrize(
    "batch", [list("abcdefghij"), tuple("abcdefghij"), range(10), [{"id": i} for i in range(10)]]
)
def test_rows_of_anything_in_a_list(batch, request):
    outputs = []
    with force_slices([3, 3, 4]):
        for part in oomkit.chunks(batch, label=request.node.name):
            with oomkit.guard():
                outputs += part
    assert outputs == list(batch)


def test_a_long_list_of_tensors(request):
    batch = [torch.full((2,), float(i)) for i in range(5000)]
    outputs = []
    with force_slices([2000, 3000]):
        for part in oomkit.chunks(batch, label=request.node.name):
            with oomkit.guard():
                outputs += part
    assert outputs[4999] is batch[4999] and len(outputs) == 5000


def test_several_batches_are_cut_alike(x, request):
    names = [str(i) for i in range(ROWS)]
    got = []
    with force_slices([4, 6]):
        for part, ys in oomkit.chunks(x, x * 2, label=request.node.name):
            with oomkit.guard():
                assert torch.equal(part * 2, ys)
                got.append(part)
        for part, ys in oomkit.chunks(names, names, label=request.node.name + "2"):
            with oomkit.guard():
                assert part == ys
                got.append(part)
    assert torch.equal(torch.cat(got[:2]), x) and got[2] + got[3] == names


def test_refusals_are_those_of_auto_batch(x):
    class Loader:
        def __iter__(self):
            return iter([x])

    with pytest.raises(oomkit.SplitError, match="found no batch to split"):
        next(oomkit.chunks(Loader()))
    with pytest.raises(oomkit.SplitError):
        next(oomkit.chunks({"a": x, "b": x[:7]}))
    with pytest.raises(oomkit.SplitError, match="9 elements, batch0 has 10"):
        next(oomkit.chunks(list("abcdefghij"), list("abcdefghi")))


@pytest.mark.parametrize("kind", [lambda x: torch.utils.data.DataLoader([x]), iter])
def test_a_stream_of_batches_is_for_map(x, kind):
    with pytest.raises(oomkit.SplitError, match="oomkit.map takes a loader or another iterator"):
        next(oomkit.chunks(kind([x])))


def test_an_empty_list_has_no_parts():
    assert list(oomkit.chunks([])) == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"size": 3}, TypeError, r"chunks\(\) got an unknown option 'size'"),
        ({"micro_batch": 0}, ValueError, r"chunks\(micro_batch=...\) expected 1 row or more"),
        ({"micro_batch": True}, TypeError, "expected an int, got bool"),
        ({"multiple_of": "2"}, TypeError, r"^chunks\(multiple_of=...\) expected an int"),
        ({"rng": "cuda"}, ValueError, r"^chunks\(rng=...\)"),
        ({"participants": [object()]}, TypeError, "state_dict"),
        ({"bucket": []}, TypeError, "unhashable"),
    ],
)
def test_options_are_checked_at_the_call(x, options, error, text):
    with pytest.raises(error, match=text):
        oomkit.chunks(x, **options)
    with pytest.raises(TypeError, match="expected a batch"):
        oomkit.chunks()


# --- what goes back with a part ---


class Metric:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, values):
        self.total += values.sum().item()
        (values * 2).sum()  # memory may run out half-way
        self.count += len(values)

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.total, self.count = state["total"], state["count"]


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_metric_updated_half_way_is_taken_back(x, nth, request):
    metric = Metric()
    with inject_oom(nth=nth) as fault:
        for part in oomkit.chunks(x, label=request.node.name, participants=[metric]):
            with oomkit.guard():
                metric.update(part)
    assert fault.fired == 1
    assert metric.state_dict() == {"total": x.sum().item(), "count": ROWS}


def test_random_streams_go_back_with_a_failed_part(x, request):
    def run():
        torch.manual_seed(3)
        outputs = []
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                noise = torch.rand(4)
                outputs.append(part + noise)
        return torch.cat(outputs)

    with force_slices([5, 5]):
        undisturbed = run()
    with inject_oom(nth=2):
        assert torch.equal(run(), undisturbed)


def test_buffers_of_a_declared_module_go_back(x, request):
    norm = nn.BatchNorm1d(4).double()
    other = nn.BatchNorm1d(4).double()
    data = x.double()
    with force_slices([5, 5]):
        for part in oomkit.chunks(data, label=request.node.name):
            with oomkit.guard():
                other(part)
    failing = [True]

    def fail_once():
        if failing:
            failing.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.warns(oomkit.OomkitWarning, match="BatchNorm"):
        for part in oomkit.chunks(data, label=request.node.name + "2", participants=[norm]):
            with oomkit.guard():
                norm(part)
                fail_once()
    assert torch.equal(norm.running_mean, other.running_mean)
    assert norm.num_batches_tracked == 2


# --- told, recorded, freed ---


def test_the_change_is_logged_and_recorded(x, caplog, request):
    label = request.node.name
    caplog.set_level(logging.INFO, logger="oomkit")
    parts_of(x, label)
    (line,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "micro_batch=10->5 accumulation=1->2 reason=oom" in line.getMessage()
    (record,) = oomkit.chunks(x, label=label).records
    assert (record.batch_size, record.micro_batch_size, record.ooms) == (10, 5, 1)
    assert (record.accumulation_steps, record.outcome, record.label) == (2, "finished", label)
    assert label in oomkit.report()


def test_on_retry_hears_of_it(x, request):
    heard = []
    parts_of(x, request.node.name, on_retry=heard.append)
    assert [record.micro_batch_size for record in heard] == [5]


def test_rows_of_the_part_are_known(x, request):
    spans = []
    parts = oomkit.chunks(x, label=request.node.name, micro_batch=4)
    assert parts.start is None and parts.rows is None
    for _ in parts:
        with oomkit.guard():
            spans.append((parts.start, parts.stop, parts.rows))
    assert spans == [(0, 4, 10), (4, 7, 10), (7, 10, 10)]
    assert parts.start is None


def test_nothing_of_a_failed_part_is_alive_when_it_comes_again(x, request):
    class Held:
        pass

    alive = []

    def work(part):
        held = Held()
        alive.append(weakref.ref(held))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        assert alive[0]() is None
        return part.clone()

    gc.disable()
    try:
        outputs, _ = [], None
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                outputs.append(work(part))
    finally:
        gc.enable()
    assert len(outputs) == 2


def test_a_loop_keeps_nothing_alive(x, request):
    batch = x.clone()
    gone = weakref.ref(batch)
    for part in oomkit.chunks(batch, label=request.node.name):
        with oomkit.guard():
            part.clone()
            break
    del batch, part
    assert gone() is None
