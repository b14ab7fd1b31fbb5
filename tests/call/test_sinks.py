"""Sinks are told of each record of each label, and training never hears of them."""

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers.messages import message_of
from helpers.own_process import run_program

import oomkit
from oomkit import sinks
from oomkit.testing import force_slices, inject_oom

X = torch.ones(4, 8)


@pytest.fixture(autouse=True)
def _detached():
    yield
    for sink in sinks.attached():
        sinks.detach(sink)


def make(label, **options):
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label=label, **options)
    def step(x):
        weight.grad = None
        (weight * x).mean().backward()

    return step


def test_each_record_of_each_label():
    told = []
    sinks.attach(told.append)
    one, two = make("one"), make("two")
    one(X)
    with inject_oom(nth=2, phase="backward"):
        two(X)
    with oomkit.guard(label="three"):
        pass
    for part in oomkit.chunks(X, label="four"):
        with oomkit.guard(label="part"):
            part.sum()
    assert [(r.label, r.step, r.ooms) for r in told] == [
        ("one", 1, 0),
        ("two", 1, 1),
        ("three", 1, 0),
        ("part", 1, 0),
        ("four", 1, 0),
    ]
    assert told[0] == one.records[0] and told[1] == two.records[0]


def test_detached_sinks_hear_no_more():
    told = []
    sink = sinks.attach(told.append)
    assert sinks.attach(sink) is sink and sinks.attached() == (sink,)
    step = make("step")
    step(X)
    sinks.detach(sink)
    sinks.detach(sink)
    step(X)
    assert [record.step for record in told] == [1] and sinks.attached() == ()


def test_sinks_of_one_step():
    own, all_ = [], []
    step, other = make("step", sinks=[own.append]), make("other")
    step(X)
    sinks.attach(all_.append)
    step(X)
    other(X)
    assert [(r.label, r.step) for r in own] == [("step", 1), ("step", 2)]
    assert [(r.label, r.step) for r in all_] == [("step", 2), ("other", 1)]


@pytest.mark.parametrize("given", [3, [3], "text"])
def test_what_is_no_sink(given):
    with pytest.raises(TypeError, match=r"auto_batch\(sinks=...\) expected a list or a tuple of"):
        make("step", sinks=given)
    with pytest.raises(TypeError, match=r"attach\(\) expected a callable, got 'int'"):
        sinks.attach(3)


@pytest.mark.parametrize("split", [False, True])
def test_one_that_fails_warns_once_and_touches_nothing(split):
    def broken(record):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    told = []
    sinks.attach(broken)
    sinks.attach(told.append)
    step = make("step")
    with pytest.warns(oomkit.OomkitWarning) as caught:
        for _ in range(3):
            with force_slices([2, 2] if split else [4]):
                step(X)
    assert [message_of(w.message) for w in caught] == [
        "oomkit: the sink test_one_that_fails_warns_once_and_touches_nothing.<locals>.broken "
        "failed and is switched off: RuntimeError: CUDA out of memory. Tried to allocate "
        "2.00 GiB"
    ]
    assert [record.ooms for record in told] == [0, 0, 0]


def test_an_error_of_the_step_stays_its_own():
    def broken(record):
        raise ValueError("sink")

    told = []
    sinks.attach(told.append)

    @oomkit.auto_batch(label="step", sinks=[broken])
    def step(x):
        raise KeyError("step")

    with pytest.warns(oomkit.OomkitWarning), pytest.raises(KeyError) as caught:
        step(X)
    assert caught.value.__context__ is None
    assert [record.outcome for record in told] == ["error"]


def test_an_interrupt_in_a_sink_is_not_lost():
    def interrupted(record):
        raise KeyboardInterrupt

    step = make("step", sinks=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        step(X)
        for _ in range(1000):
            pass


def test_a_returned_loss_is_told_again_where_its_backward_failed():
    told = []
    sinks.attach(told.append)
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label="returned")
    def loss_of(x):
        return (weight * x).mean()

    loss_of(X).backward()
    loss = loss_of(X)
    with inject_oom(nth=1, phase="backward"):
        loss.backward()
    assert [(r.step, r.ooms) for r in told] == [(1, 0), (2, 0), (2, 1)]


def test_the_log_as_a_sink(caplog):
    sinks.attach(sinks.Logging())
    with caplog.at_level(logging.INFO, logger="oomkit.steps"):
        make("step")(X)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "oomkit.steps"]
    assert line.startswith("step step=1 micro_batch=4 accumulation=1 peak=")


def test_they_come_with_the_package(tmp_path):
    code = f"""
import oomkit, torch
oomkit.sinks.attach(oomkit.sinks.JSONL({str(tmp_path / "steps.jsonl")!r}))
oomkit.auto_batch(lambda x: x, label="step")(torch.ones(2))
"""
    root = Path(oomkit.__file__).parents[1]
    done = run_program(code, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "steps.jsonl").read_text())["label"] == "step"
