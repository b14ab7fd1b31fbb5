"""What a run was does not go with its records, nor with its functions."""

import gc

import pytest
import torch

import oomkit
from oomkit.report import record_dict, summarise


def make_step(label, **options):
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label=label, **options)
    def step(x):
        weight.grad = None
        (weight * x).mean().backward()

    return step


@pytest.fixture(autouse=True)
def _forgotten():
    oomkit.reset_report()
    yield
    oomkit.reset_report()


def line_of(label):
    (line,) = [line for line in oomkit.report().splitlines() if line.startswith(f"{label}  ")][:1]
    return line.removeprefix(label).split()[:4]


def run(step, calls, failing=()):
    x = torch.ones(4, 8)
    for number in range(1, calls + 1):
        if number in failing:
            with oomkit.testing.inject_oom(nth=2, phase="backward"):
                step(x)
        else:
            step(x)


def test_a_run_longer_than_the_ring():
    step = make_step("long")
    run(step, 3005, {2, 1000})
    assert line_of("long")[:3] == ["3005", "2", "2"]
    total = step.summary
    assert (total.steps, total.ooms, total.retries, total.unfinished) == (3005, 2, 2, 0)
    failed = [record.step for record in step.records if record.ooms]
    assert failed == [2, 1000]
    assert [record.step for record in step.records[-1024:]] == list(range(1982, 3006))
    assert len(step.records) < 1100
    assert "   2      4 " in oomkit.report()  # among the events


@pytest.mark.parametrize("returned", [False, True])
def test_a_step_that_gives_up_made_no_attempt_after_the_last(returned):
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label="given up")
    def step(x):
        loss = (weight * x).mean()
        if not returned:
            loss.backward()
        return loss if returned else None

    x = torch.ones(4, 8)
    with (
        oomkit.testing.inject_oom(phase="backward", times=None) as fault,
        pytest.raises(oomkit.OutOfMemory) as caught,
    ):
        loss = step(x)
        if returned:
            loss.backward()
    failed = len(caught.value.report.attempts)
    assert fault.fired >= failed > 1
    total = step.summary
    assert (total.steps, total.ooms, total.retries) == (1, failed, failed - 1)


def test_the_sketch_agrees_with_the_records():
    step = make_step("sketched")
    run(step, 300, {7})
    exact, total = summarise([record_dict(r) for r in step.records]), record_dict(step.summary)
    for name, value in exact.items():
        if value is None:
            assert total[name] is None, name
        else:
            assert total[name] == pytest.approx(value, rel=0.02), name


def test_functions_that_are_gone_stay_in_the_report():
    step = make_step("gone")
    run(step, 3, {2})
    del step
    gc.collect()
    assert line_of("gone")[:3] == ["3", "1", "1"]
    for _ in range(5):  # trials of a search
        run(make_step("gone"), 300)
        gc.collect()
    assert line_of("gone")[:3] == ["1503", "1", "1"]
    step = make_step("gone")
    run(step, 2)
    assert line_of("gone")[:3] == ["1505", "1", "1"]
    (_, summary, records) = next(entry for entry in oomkit._C.histories() if entry[0] == "gone")
    assert summary.steps == 1505
    assert [record.step for record in records if record.ooms] == [2]


def test_reset():
    step = make_step("kept")
    run(make_step("gone"), 2)
    run(step, 3)
    gc.collect()
    oomkit.reset_report()
    assert oomkit.report() == "no records"
    assert (step.records, step.summary.steps) == ((), 0)
    run(step, 1)
    assert line_of("kept")[0] == "1"
    assert step.records[0].step == 4


def test_a_backward_after_the_reset_adds_to_no_other_record():
    weight = torch.nn.Parameter(torch.ones(8))

    @oomkit.auto_batch(label="returned")
    def loss_of(x):
        return (weight * x).mean()

    loss = loss_of(torch.ones(4, 8))
    oomkit.reset_report()
    with oomkit.testing.inject_oom(nth=1, phase="backward"):
        loss.backward()
    assert loss_of.records == ()
    loss_of(torch.ones(4, 8)).backward()
    assert loss_of.summary.ooms == 0


def test_guards_count_on():
    guard = oomkit.guard(label="evaluation")
    for _ in range(1100):
        with guard:
            pass
    assert guard.summary.steps == 1100
    assert len(guard.records) == 1024
    assert oomkit.guard().summary.steps == 0


def test_one_screen():
    steps = [make_step(f"step {number}") for number in range(40)]
    for step in steps:
        run(step, 20, {3, 5})
    shown = oomkit.report()
    assert len(shown.splitlines()) < 50
    assert "and 28 more" in shown
    assert len(oomkit.report(all=True).splitlines()) > 800


def test_a_notebook_gets_a_table():
    run(make_step("<lambda>"), 1)
    shown = oomkit.report()
    table = shown._repr_html_()
    assert isinstance(shown, str) and repr(shown) == shown
    assert table.count("<table>") == 2 and "<td>&lt;lambda&gt;</td>" in table
    assert oomkit.report([])._repr_html_() == "<div>no records</div>"
