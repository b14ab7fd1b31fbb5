"""auto_batch(phases=True): memory, time and failures of each phase of a call."""

import json

import pytest
import torch
from torch import nn

import oomkit
from oomkit import _C, sinks, testing
from oomkit.report import phase_rows, sites_of

KIB = 1024
LARGE = 1 << 40


@pytest.fixture(autouse=True)
def counted():
    with oomkit.limit_memory(LARGE, device="cpu"):
        yield
    oomkit.reset_report()


def trained(**options):
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    @oomkit.auto_batch(rng="none", **options)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_without_the_option_there_are_none():
    step = trained()
    step(torch.ones(64, 64))
    assert step.records[0].phases is None


def test_each_phase_has_its_figures():
    step = trained(phases=True)
    for _ in range(2):
        step(torch.ones(64, 64))
    record = step.records[1]
    phases = record.phases
    assert list(phases) == ["forward", "backward", "optimizer"]
    # The output, then its square: what backward finds, with the loss; it adds the gradient.
    baseline = record.baseline - 16 * KIB  # zero_grad() drops a gradient
    assert phases["forward"]["baseline"] == record.baseline
    assert phases["forward"]["peak_allocated"] - baseline == pytest.approx(32 * KIB, abs=64)
    assert phases["backward"]["baseline"] - baseline == pytest.approx(16 * KIB, abs=64)
    assert phases["backward"]["peak_allocated"] == record.peak_allocated
    assert phases["optimizer"]["peak_allocated"] < record.peak_allocated
    assert all(entry["peak_reserved"] is None for entry in phases.values())  # of a CPU
    assert sum(entry["time"] for entry in phases.values()) <= record.time
    assert all(entry["time"] > 0 and entry["ooms"] == 0 for entry in phases.values())


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_failure_counts_in_its_phase(phase):
    step = trained(phases=True)
    batch = torch.ones(64, 64)
    with testing.inject_oom(phase=phase):
        step(batch)
    (record,) = step.records
    assert record.ooms == 1
    assert {name: entry["ooms"] for name, entry in record.phases.items() if entry["ooms"]} == {
        phase: 1
    }


def test_recovery_is_a_phase_of_its_own():
    step = trained(phases=True, verify=False)
    batch = torch.ones(64, 64)
    with testing.inject_oom(phase="forward"):
        step(batch)
    recovery = step.records[0].phases["recovery"]
    assert 0 < recovery["time"] <= step.records[0].time


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_time_lost_retries_and_changes_of_plan_belong_to_the_phase_that_failed(phase):
    step = trained(phases=True, verify=False, label="s")
    batch = torch.ones(64, 64)
    step(batch)
    with testing.inject_oom(phase=phase, times=2):
        step(batch)
    healthy, record = step.records
    assert all(e["time_lost"] == 0 and not e["changes"] for e in healthy.phases.values())
    phases = record.phases
    assert {name: entry["retries"] for name, entry in phases.items()} == {
        name: 2 * (name == phase) for name in ("forward", "backward", "optimizer", "recovery")
    }
    changes = phases[phase]["changes"]
    update = phase == "optimizer"  # the second time it is made in parts
    assert [c["rung"] for c in changes] == [0, update]
    assert changes[-1]["accumulation_steps"] == record.accumulation_steps
    assert changes[-1]["rung"] == record.rung
    lost = sum(entry["time_lost"] for entry in phases.values())
    assert 0 < lost <= record.time_lost
    assert 0 < phases["forward"]["time_lost"] < phases["forward"]["time"]
    assert (phases["optimizer"]["time_lost"] > 0) == (phase == "optimizer")
    assert phases["recovery"]["time_lost"] == pytest.approx(phases["recovery"]["time"], abs=1e-4)
    text = oomkit.report(step)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["s", phase])
    assert line.endswith("1 flushed, 1 flushed (rung 1)" if update else "2 oom")


def test_a_guard_that_ran_out_of_memory_has_lost_its_phases():
    guard = oomkit.guard()
    _C.set_phases_wanted(True)
    try:
        with pytest.raises(torch.OutOfMemoryError), testing.inject_oom(), guard:
            torch.ones(4)
    finally:
        _C.set_phases_wanted(False)
    entry = guard.records[0].phases["forward"]
    assert entry["ooms"] == 1 and entry["time_lost"] == entry["time"] > 0


def test_the_callers_backward_is_in_the_record_of_the_call():
    weight = torch.ones(1024, requires_grad=True)
    loss = oomkit.auto_batch(lambda x: (x * weight).square().mean(), phases=True)
    returned = loss(torch.ones(4, 1024))
    assert list(loss.records[0].phases) == ["forward"]
    returned.backward()
    phases = loss.records[0].phases
    assert list(phases) == ["forward", "backward"]
    assert phases["backward"]["peak_allocated"] >= phases["forward"]["peak_allocated"]


def test_a_guard_inside_a_step_has_phases_of_its_own():
    guard = oomkit.guard(label="inner")
    weight = torch.ones(64, 64, requires_grad=True)

    @oomkit.auto_batch(phases=True)
    def step(x):
        with guard:
            (x * weight).sum().backward()

    _C.set_phases_wanted(True)
    try:
        for _ in range(2):
            step(torch.ones(64, 64))
    finally:
        _C.set_phases_wanted(False)
    for mine, its in zip(step.records, guard.records, strict=True):
        assert list(mine.phases) == list(its.phases) == ["forward", "backward"]
        for name, entry in its.phases.items():
            assert mine.phases[name]["peak_allocated"] == entry["peak_allocated"]
    assert guard.records[0].phases["backward"]["ooms"] == 0


def test_a_step_that_raises_has_phases_and_leaves_none_open():
    @oomkit.auto_batch(phases=True)
    def step(x):
        raise KeyError("of the user's")

    with pytest.raises(KeyError):
        step(torch.ones(2))
    assert list(step.records[0].phases) == ["forward"]
    peak = step.records[0].phases["forward"]["peak_allocated"]
    trained(phases=True)(torch.ones(64, 64))
    assert step.records[0].phases["forward"]["peak_allocated"] == peak


def test_phases_stay_when_a_step_is_gone_and_go_with_a_reset():
    step = trained(phases=True, label="gone")
    step(torch.ones(64, 64))
    kept = step.records[0].phases
    del step
    (site,) = sites_of(None)
    assert site.rows[0]["phases"] == kept
    oomkit.reset_report()
    assert sites_of(None) == []


def test_the_report_has_a_line_for_each_phase():
    step = trained(phases=True, label="train")
    for _ in range(3):
        step(torch.ones(64, 64))
    text = oomkit.report(step)
    assert "\nphases\nlabel" in text
    lines = [line.split()[:2] for line in text.splitlines() if line.startswith("train ")]
    assert [["train", name] for name in ("forward", "backward", "optimizer")] == lines[1:4]
    (site,) = sites_of(step)
    rows = {row["phase"]: row for row in phase_rows(site)}
    highest = step.summary.peak_allocated
    assert rows["backward"]["peak_allocated"] == highest
    assert rows["backward"]["headroom"] == LARGE - highest
    whole = sum(record.time for record in step.records)
    for name, row in rows.items():
        spent = sum(record.phases[name]["time"] for record in step.records)
        assert row["share"] == pytest.approx(spent / whole)
    assert sum(row["share"] for row in rows.values()) <= 1
    assert "phases" not in oomkit.report(trained())


def test_sinks_are_told(tmp_path):
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, name, value, global_step):
            self.scalars[name] = value

    writer = Writer()
    path = tmp_path / "steps.jsonl"
    with sinks.JSONL(path) as lines:
        step = trained(phases=True, label="s", sinks=[sinks.TensorBoard(writer), lines])
        step(torch.ones(64, 64))
    record = step.records[0]
    assert json.loads(path.read_text())["phases"] == record.phases
    for phase, entry in record.phases.items():
        assert writer.scalars[f"oomkit/s/{phase}_peak_allocated"] == entry["peak_allocated"]
        assert writer.scalars[f"oomkit/s/{phase}_time"] == entry["time"]
    assert writer.scalars["oomkit/s/headroom"] == LARGE - record.peak_allocated
