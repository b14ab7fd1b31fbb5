"""The benchmarks run, and what they count is right where that can be told without peers."""

import copy
import importlib
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.own_process import run_script

from oomkit.testing import inject_oom

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(BENCHMARKS))
    names = ["tables", "watch", "workloads"]
    adapters = ["fixed", "plain", "with_oomkit"]
    try:
        found = {name: importlib.import_module(f"peers.{name}") for name in names}
        found |= {name: importlib.import_module(f"peers.adapters.{name}") for name in adapters}
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(**found)


def followed(peers, adapter, fault=None, **changes):
    work = peers.workloads.tiny()
    work.steps = 2
    work.__post_init__()
    for name, value in changes.items():
        setattr(work, name, value)
    watch = peers.watch.Watch(work, peers.watch.reference(work))
    with fault or nullcontext():
        adapter.train(work)
    return watch.finish()


@pytest.mark.whole
def test_latency_runs(tmp_path):
    output = tmp_path / "latency.txt"
    arguments = ("--quick", "--output", str(output))
    done = run_script(BENCHMARKS / "latency.py", *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^(?:flat|layers) +\d+ +\d+  (?:forward|backward) +(?:first|again)",
        output.read_text(),
        re.M,
    )
    assert len(rows) == 20


@pytest.mark.whole
def test_ladder_runs(tmp_path):
    """Without packages that need an environment of their own."""
    pytest.importorskip("matplotlib")
    output = tmp_path / "ladder"
    arguments = ("--quick", "--workloads", "0", "--only", "composer_policy")
    done = run_script(
        BENCHMARKS / "ladder.py", *arguments, "--output", str(output), OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    text = output.with_suffix(".txt").read_text()
    row = re.search(
        r"^GPT, 6 blocks, AdamW +[\d.]+ +([\d.]+) +100.0 +([\d.]+) +([\d.]+)$", text, re.M
    )
    assert row is not None, text
    floor, policy, ours = map(float, row.groups())
    assert floor < ours < policy < 100
    assert "AdamW within 35 %: met" in text and "died" not in text
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_ladder_sees_another_training(peers):
    """Parameters at the end are compared with the plain program's."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        tests = sys.modules.pop("ladder", None)  # a folder of tests has the name, too
        ladder = importlib.import_module("ladder")
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("ladder", None)
        if tests is not None:
            sys.modules["ladder"] = tests
    work = peers.workloads.tiny()
    work.steps = 2
    work.__post_init__()

    def trained(adapter, **changes):
        one, models = copy.copy(work), []
        one.built = lambda model, _: models.append(model)
        for name, value in changes.items():
            setattr(one, name, value)
        adapter.train(one)
        values = [p.detach().flatten() for p in models[0].net.parameters()]
        return ladder.Run(values=torch.cat(values).numpy())

    whole = trained(peers.plain)
    assert ladder.apart(work, trained(peers.fixed, plan=(200, 0)), whole) < ladder.SAME
    assert ladder.apart(work, trained(peers.plain, steps=1), whole) > ladder.SAME


def test_a_whole_step_loses_nothing_and_has_no_error(peers):
    course = followed(peers, peers.plain)
    assert (course.lost, course.twice, course.gradient_error) == (0, 0, 0.0)
    assert [step.forwards for step in course.steps] == [1, 1]


def test_micro_batches_are_counted(peers):
    course = followed(peers, peers.fixed, plan=(200, 0))
    assert (course.lost, course.twice) == (0, 0)
    assert 0.0 < course.gradient_error < 1e-5
    assert [(step.forwards, step.rows) for step in course.steps] == [(3, 512), (3, 512)]
    assert peers.tables.steady(course) == (3, 0.0)


def test_the_errors_in_all_are_those_of_the_table(peers):
    """Medians, though the last repetition had more."""
    runs = [SimpleNamespace(ooms=count) for count in (1, 1, 4)]
    found = [SimpleNamespace(courses={"one": runs})] * 2
    assert [peers.tables.errors(one, "one") for one in found] == [1.0, 1.0]
    lines = peers.tables.totals(found, {"one": ([1.0], None)}, 3)
    assert lines[-1].split()[:2] == ["one", "2"]


def test_what_is_lost_or_counted_twice_is_seen(peers):
    work = peers.workloads.tiny()
    watch = peers.watch.Watch(work, peers.watch.reference(work))
    model, optimizer = work.build()
    x, y, ids = next(work.batches())
    ids = ids.clone()
    ids[0] = 1  # sample 0 never comes, sample 1 twice
    work.loss(model, (x, y, ids)).backward()
    optimizer.step()
    course = watch.finish()
    assert (course.lost, course.twice) == (1, 1)


def test_oomkit_adapter_is_followed(peers):
    fault = inject_oom(nth=3, min_bytes=100_000)  # the first two: parts of the batch
    course = followed(peers, peers.with_oomkit, fault)
    assert fault.fired == 1
    assert (course.lost, course.twice) == (0, 0)
    assert course.gradient_error < 1e-5
    assert torch.isfinite(torch.tensor(course.steps[-1].time))
