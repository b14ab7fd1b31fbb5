"""Loops over oomkit.chunks: callbacks that turn on the loop, bodies that count rows twice."""

import collections

import pytest
import torch

import oomkit
from oomkit.testing import inject_oom


class Metric:
    """A participant that does something when its state is taken or put back."""

    def __init__(self, taken=None, put_back=None):
        self.taken, self.put_back = taken, put_back

    def state_dict(self):
        if self.taken is not None:
            self.taken()
        return {}

    def load_state_dict(self, state):
        if self.put_back is not None:
            self.put_back()


@pytest.fixture
def x():
    return torch.arange(10.0)


def run(parts):
    for part in parts:
        with oomkit.guard():
            part + 1


@pytest.mark.parametrize("call", ["close", "__next__"])
@pytest.mark.parametrize("where", ["split", "on_retry", "taken", "put_back"])
def test_the_loop_is_neither_closed_nor_asked_while_it_works(x, where, call, request):
    def turn(*ignored):
        getattr(parts, call)()

    def split(batch, start, length):
        turn()
        return batch[start : start + length]

    options = {
        "split": {"split": split, "batch": "batch", "micro_batch": 5},
        "on_retry": {"on_retry": turn},
        "taken": {"participants": Metric(taken=turn)},
        "put_back": {"participants": Metric(put_back=turn)},
    }
    parts = oomkit.chunks(x, label=request.node.name, **options[where])
    with pytest.raises(ValueError, match="prepares or restores"), inject_oom(nth=1):
        run(parts)
    parts.close()
    assert next(parts, None) is None


@pytest.mark.parametrize("batch", [None, 5, object()])
def test_what_is_no_batch_is_refused_as_such(batch, request):
    with pytest.raises(oomkit.SplitError, match="found no batch to split"):
        run(oomkit.chunks(batch, label=request.node.name))


@pytest.mark.parametrize(
    ("rows", "options"),
    [(10, {"micro_batch": 4, "multiple_of": 3}), (11, {"micro_batch": 5, "multiple_of": 4})],
)
def test_no_part_is_larger_than_micro_batch(rows, options, request):
    label = request.node.name
    lengths = []
    for part in oomkit.chunks(torch.arange(rows), label=label, **options):
        with oomkit.guard():
            lengths.append(len(part))
    assert sum(lengths) == rows
    assert max(lengths) <= options["micro_batch"]
    assert all(length % options["multiple_of"] == 0 for length in lengths[:-1])


@pytest.mark.parametrize("option", ["multiple_of", "min_micro_batch"])
def test_a_micro_batch_below_the_smallest_part_is_refused(x, option, request):
    with pytest.raises(ValueError, match="micro_batch"):
        oomkit.chunks(x, label=request.node.name, micro_batch=3, **{option: 4})


class Fails:
    """Runs out of memory at one of its calls; gives back what it gets."""

    def __init__(self, at):
        self.at, self.calls = at, 0

    def __call__(self, value=None):
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return value


BODIES = {
    "a sum": "total = total + len(part); fails()",
    "two sums": "total, count = total + len(part), count + 1; fails()",
    "a list in a dict": "outputs['a'].append(part); fails()",
    "a list by a name": "outputs[key].append(part); fails()",
    "a bound method": "add(part); fails()",
    "half of a generator": "rows.extend(fails(row) for row in part)",
    "half of a generator, added": "rows += (fails(row) for row in part)",
    "an iterator": "label = next(labels); fails()",
    "a tensor": "tensor.add_(part.sum()); fails()",
    "a counter": "counter.update(part.tolist()); fails()",
}

BODY = """
def run():
    total = count = 0
    key, outputs, rows, labels = "a", {{"a": []}}, [], iter(range(9))
    add, tensor, counter = rows.append, torch.zeros(()), collections.Counter()
    for part in oomkit.chunks(x, label=name):
        with oomkit.guard():
            {}
"""


def run_body(body, x, name, fails):
    names = {"oomkit": oomkit, "torch": torch, "collections": collections}
    names |= {"x": x, "name": name, "fails": fails}
    exec(compile(BODY.format(body), name, "exec"), names)
    names["run"]()


@pytest.mark.parametrize("body", BODIES)
def test_what_would_count_twice_passes(x, body, request):
    fails = Fails(3 if "half" in body else 1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_body(BODIES[body], x, request.node.name, fails)
    assert "before memory ran out" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "body",
    [
        "seen = 0; seen = seen + len(part); fails(); total = total + seen",
        "part = part.to(torch.float64); part = part + 1; fails()",
        "values = fails(part); rows.extend(values); total = total + 1",
        "tensor.copy_(part.sum()); fails()",
        "mine = iter(part); first = next(mine); fails()",
        "n = len(part); out = [row for row in part]; out.append(n); fails()",
    ],
)
def test_what_counts_once_is_handed_out_again(x, body, request):
    fails = Fails(1)
    run_body(body, x, request.node.name, fails)
    assert fails.calls > 1


def test_join_is_no_option_of_a_loop(x):
    with pytest.raises(TypeError, match="unknown option 'join'"):
        oomkit.chunks(x, join=lambda *results: results)
