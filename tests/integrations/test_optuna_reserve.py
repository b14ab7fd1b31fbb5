"""oomkit.reserve around objectives and inside them: what a trial is told as, what stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from searches import MIB, STATE, allocated, sizes, study, take

import oomkit
from oomkit.optuna import prune_on_oom, tell


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMKIT_RESERVE_DIR", str(tmp_path))
    return tmp_path / "cpu"


def reserve(mebibytes: float, **options: object) -> oomkit.Reservation:
    """So much above what is in use, out of 1 GiB more."""
    used = allocated()
    return oomkit.reserve(
        used + int(mebibytes * MIB), device="cpu", budget=used + 1024 * MIB, **options
    )


def places(queue: Path) -> list[str]:
    return [name for name in os.listdir(queue) if name != "queue.lock"]


def test_around_a_protected_objective(queue, no_gc):
    reservation = reserve(20)
    objective = reservation(prune_on_oom(sizes(10, 50, 10)))
    alive = []
    one = study()
    one.optimize(objective, n_trials=3, callbacks=[lambda *_: alive.append(allocated())])
    assert [t.state for t in one.trials] == [STATE.COMPLETE, STATE.PRUNED, STATE.COMPLETE]
    assert one.trials[1].user_attrs["oom_kind"] == "capacity"
    assert {t.user_attrs["memory_budget_bytes"] for t in one.trials} == {reservation.bytes}
    assert len(set(alive)) == 1 and places(queue) == []
    frozen = tell(one, one.ask(), objective := reserve(20)(prune_on_oom(lambda trial: 1.0)))
    assert frozen.value == 1.0 and objective.__name__ == "<lambda>"


@pytest.mark.parametrize("kind", ["reserve", "limit_memory"])
def test_a_limit_of_the_objectives_own_is_the_trials_capacity(kind, queue):
    """The limit is gone when the error arrives; the trial is still too large for it."""
    if kind == "reserve":
        limited = reserve(20)
    else:
        limited = oomkit.limit_memory(allocated() + 20 * MIB, device="cpu")
        oomkit.limit_memory(None, device="cpu")
    size = limited.bytes if kind == "reserve" else limited.budget
    run = sizes(50)

    @prune_on_oom
    def objective(trial):
        with reserve(20) if kind == "reserve" else oomkit.limit_memory(size, device="cpu"):
            return run(trial)

    one = study()
    one.optimize(objective, n_trials=1)
    (trial,) = one.trials
    assert trial.state == STATE.PRUNED and trial.user_attrs["oom_kind"] == "capacity"
    assert trial.user_attrs["memory_budget_bytes"] == pytest.approx(size, abs=MIB)
    assert trial.user_attrs["memory_constraint"] > 0


def test_a_step_that_gives_up_under_a_limit_of_the_objectives_own():
    @prune_on_oom
    def objective(trial):
        with reserve(20):
            step = oomkit.auto_batch(lambda x: (x, take(30))[0])
            return float(step(take(0.001)).sum())

    one = study()
    one.optimize(objective, n_trials=1)
    assert one.trials[0].user_attrs["oom_kind"] == "capacity"


def test_a_step_that_gives_up_is_judged_by_what_it_had_then(limit):
    """Rolled back it has nothing, and the last request alone would have fitted."""
    limit(20)

    @prune_on_oom
    def objective(trial):
        step = oomkit.auto_batch(lambda x: (x, [take(4) for _ in range(6)])[0])
        return float(step(torch.ones(2)).sum())

    one = study()
    one.optimize(objective, n_trials=1)
    (trial,) = one.trials
    assert trial.state == STATE.PRUNED and trial.user_attrs["oom_kind"] == "capacity"
    assert trial.user_attrs["memory_needed_bytes"] >= trial.user_attrs["memory_budget_bytes"]


def test_more_than_the_device_has_is_a_trial_out_of_memory(queue):
    @prune_on_oom
    def objective(trial):
        with reserve(20 if trial.number else 2000):
            return 1.0

    one = study()
    one.optimize(objective, n_trials=2)
    assert [t.state for t in one.trials] == [STATE.PRUNED, STATE.COMPLETE]
    assert one.trials[0].user_attrs["oom_kind"] == "capacity"
    assert "can never be admitted" in one.trials[0].user_attrs["oom_message"]


def test_a_time_out_is_no_out_of_memory(queue):
    other = oomkit._limits.admission.Ticket(oomkit._limits.admission.folder("cpu"))
    assert other.ask(allocated() + 1020 * MIB)
    objective = reserve(20, timeout=0)(prune_on_oom(lambda trial: 1.0))
    one = study()
    with pytest.raises(TimeoutError, match="was not admitted within 0 s"):
        one.optimize(objective, n_trials=1)
    one.optimize(objective, n_trials=1, catch=(TimeoutError,))
    other.leave()
    one.optimize(objective, n_trials=1)
    assert [t.state for t in one.trials] == [STATE.FAIL, STATE.FAIL, STATE.COMPLETE]
    assert all("oom" not in t.user_attrs for t in one.trials)
