"""What samplers learn of memory: constraints, penalties, other people's memory."""

from __future__ import annotations

import logging
import math
import threading

import optuna
import pytest
import torch
from searches import MIB, OPTUNA, STATE, sizes, study, take

import oomkit
from oomkit._hpo import run as _hpo_run
from oomkit._hpo import study as _hpo_study
from oomkit.memory import _host_bytes
from oomkit.optuna import constraints, prune_on_oom

S = optuna.samplers
KEY = "oomkit.memory"


def sampler(name, **options):
    if OPTUNA < 5 and name != "CmaEsSampler" and name != "RandomSampler":
        options["constraints_func"] = constraints
    if name == "NSGAIISampler":
        options["population_size"] = 4
    if name == "GPSampler":
        options["n_startup_trials"] = 3
        options["deterministic_objective"] = True
    return getattr(S, name)(seed=1, **options)


def stored(trial):
    """The constraints of a finished trial, in either version."""
    if OPTUNA >= 5:
        return list(trial.constraints.values())
    return list(trial.system_attrs["constraints"])


def needs(trial):
    """Memory of a trial that grows with two parameters; the best does not fit."""
    rows = trial.suggest_int("rows", 1, 16)
    width = trial.suggest_int("width", 1, 4)
    held = [take(rows * width / 2) for _ in range(1)]
    return rows + width + 0.0 * len(held)


# --- the constraint ---


@pytest.mark.parametrize(
    ("name", "on_oom", "state"),
    [
        ("TPESampler", "auto", STATE.PRUNED),
        ("TPESampler", "penalize", STATE.COMPLETE),
        ("NSGAIISampler", "auto", STATE.COMPLETE),
        ("GPSampler", "auto", STATE.COMPLETE),
        ("CmaEsSampler", "auto", STATE.COMPLETE),
        ("RandomSampler", "auto", STATE.PRUNED),
    ],
)
def test_every_trial_gets_a_graded_signed_constraint(name, on_oom, state, limit):
    check_constraints(None, name, on_oom, state, limit)


def test_constraints_in_every_storage(storage, limit):
    check_constraints(storage, "TPESampler", "prune", STATE.PRUNED, limit)


def check_constraints(storage, name, on_oom, state, limit):
    limit(10)
    one = study(storage, sampler=sampler(name), direction="maximize")
    one.optimize(prune_on_oom(needs, on_oom=on_oom), n_trials=12)
    trials = one.get_trials()
    assert len(trials) == 12
    failed = [t for t in trials if t.user_attrs.get("oom")]
    assert failed and len(failed) < 12
    assert {t.state for t in failed} == {state}
    for trial in trials:
        value = trial.user_attrs["memory_constraint"]
        need = trial.params["rows"] * trial.params["width"] / 2
        assert (value > 0) == (need > 10) == bool(trial.user_attrs.get("oom"))
        assert value == pytest.approx(
            max(need / 10 - 1, 0.01) if need > 10 else need / 10 - 1, abs=0.02
        )
        if name not in ("CmaEsSampler", "RandomSampler") or (
            OPTUNA >= 5 and name == "RandomSampler"
        ):
            assert stored(trial) == [value]
    assert one.best_value <= max(
        t.value for t in trials if t.state == STATE.COMPLETE and not t.user_attrs.get("oom")
    )


def test_several_objectives(limit):
    """Optuna 4's TPE fails once pruned trials are the most: "auto" penalises there."""
    limit(4)

    def objective(trial):
        value = needs(trial)
        return value, -value

    for name in ("TPESampler", "NSGAIISampler"):
        one = study(sampler=sampler(name), directions=["maximize", "minimize"])
        one.optimize(prune_on_oom(objective, on_oom="auto"), n_trials=16)
        failed = [t for t in one.trials if t.user_attrs.get("oom")]
        assert len(failed) > 3
        penalised = name == "NSGAIISampler" or OPTUNA < 5
        assert {t.state for t in failed} == {STATE.COMPLETE if penalised else STATE.PRUNED}
        assert all(len(t.values) == 2 for t in failed if penalised)


def test_a_trial_pruned_by_the_user_has_the_constraint(limit):
    limit(10)

    def objective(trial):
        needs(trial)
        raise optuna.TrialPruned

    one = study(sampler=sampler("TPESampler"))
    one.optimize(prune_on_oom(objective), n_trials=4)
    assert all(len(stored(t)) == 1 for t in one.trials)


def test_the_constraint_is_relative_to_a_given_budget(limit):
    limit(40)
    one = study()
    one.optimize(prune_on_oom(sizes(20), budget="10MiB"), n_trials=1)
    assert one.trials[0].user_attrs["memory_constraint"] == pytest.approx(1.0, abs=0.05)


def test_without_a_limit_the_host_is_the_budget():
    one = study()
    one.optimize(prune_on_oom(sizes(1)), n_trials=1)
    assert one.trials[0].user_attrs["memory_budget_bytes"] == _host_bytes()
    assert one.trials[0].user_attrs["memory_constraint"] < -0.9


def test_a_sampler_that_reads_completed_trials_only_is_said_once(limit):
    limit(10)
    one = study(sampler=sampler("GPSampler"))
    with pytest.warns(oomkit.OomkitWarning, match="on_oom=.auto") as caught:
        one.optimize(prune_on_oom(needs), n_trials=4)
    assert len([w for w in caught if w.category is oomkit.OomkitWarning]) == 1


def test_a_sampler_inside_another_is_seen(limit):
    limit(1)
    inner = S.PartialFixedSampler({"lr": 0.5}, sampler("GPSampler"))
    one = study(sampler=inner)
    one.optimize(prune_on_oom(sizes(9), on_oom="auto"), n_trials=1)
    assert one.trials[0].state == STATE.COMPLETE


# --- resumed studies ---


def test_a_resumed_study_without_constraints_goes_on_without(storage, limit):
    """With one on some trials only, GPSampler raises and the study is lost."""
    limit(10)
    one = study(storage, study_name="old")
    one.optimize(lambda trial: trial.suggest_int("rows", 1, 16) * 1.0, n_trials=4)
    name = "GPSampler"
    resumed = optuna.load_study(study_name="old", storage=storage)
    resumed.sampler = S.GPSampler(n_startup_trials=2, seed=0)

    def objective(trial):
        rows = trial.suggest_int("rows", 1, 16)
        take(rows)
        return float(rows)

    wrapped = prune_on_oom(objective, on_oom="auto")
    if OPTUNA >= 5:
        with pytest.warns(oomkit.OomkitWarning, match="on every trial or on none"):
            resumed.optimize(wrapped, n_trials=4)
        assert all(not t.constraints for t in resumed.trials)
    else:
        resumed.optimize(wrapped, n_trials=4)
        resumed.sampler = sampler(name)
        with pytest.raises(ValueError, match="begin a new study"):
            resumed.optimize(wrapped, n_trials=1)
    assert len([t for t in resumed.trials if t.state == STATE.COMPLETE]) == 8


def test_a_resumed_study_with_constraints_keeps_them(storage, limit):
    limit(10)
    wrapped = prune_on_oom(needs, on_oom="auto")
    study(storage, study_name="old", sampler=sampler("GPSampler")).optimize(wrapped, n_trials=4)
    again = optuna.load_study(study_name="old", storage=storage, sampler=sampler("GPSampler"))
    again.optimize(prune_on_oom(needs, on_oom="auto"), n_trials=3)
    assert all(len(stored(t)) == 1 for t in again.trials)


# --- penalties ---


def test_the_penalty_is_the_worst_value_so_far(limit):
    limit(10)
    values = iter([3.0, 7.0, 5.0])

    def objective(trial):
        trial.suggest_float("lr", 0, 1)
        if trial.number in (0, 3):
            take(50)
        return next(values)

    for direction, worst in (("minimize", 7.0), ("maximize", 3.0)):
        values = iter([3.0, 7.0, 5.0])
        one = study(direction=direction)
        one.optimize(prune_on_oom(objective, on_oom="penalize"), n_trials=5)
        assert abs(one.trials[0].value) == math.inf  # nothing was known yet
        assert one.trials[3].value == worst


def test_a_penalty_of_ones_own(limit):
    limit(10)
    for penalty in (9.0, lambda study: 9.0):
        one = study()
        one.optimize(prune_on_oom(sizes(50), on_oom="penalize", penalty=penalty), n_trials=1)
        assert one.trials[0].value == 9.0


def test_cma_es_learns_from_the_value_how_far_it_was(limit):
    limit(10)
    one = study(sampler=S.CmaEsSampler(seed=0))
    wrapped = prune_on_oom(sizes(1, 2, 12, 40), on_oom="auto")
    one.optimize(wrapped, n_trials=4)
    near, far = one.trials[2].value, one.trials[3].value
    assert 1.0 < near < far


# --- other people's memory ---


def injected(trial):
    """An error although there is room."""
    trial.suggest_float("lr", 0, 1)
    take(1)
    return 1.0


def test_what_is_not_the_trials_size_is_run_again_and_said(limit, caplog):
    limit(40)
    one = study()
    with (
        caplog.at_level(logging.WARNING, "oomkit"),
        oomkit.testing.inject_oom(nth=1, min_bytes=MIB),
    ):
        one.optimize(prune_on_oom(injected), n_trials=1)
    (trial,) = one.trials
    assert trial.state == STATE.COMPLETE and trial.value == 1.0
    assert "oom" not in trial.user_attrs and "retry=1/1" in caplog.text


def test_what_stays_so_fails_and_teaches_nothing(limit, caplog):
    limit(40)
    one = study()
    with (
        caplog.at_level(logging.WARNING, "oomkit"),
        oomkit.testing.inject_oom(nth=1, min_bytes=MIB, times=None),
    ):
        one.optimize(prune_on_oom(injected, on_oom="penalize"), n_trials=2)
    assert [t.state for t in one.trials] == [STATE.FAIL] * 2
    assert one.trials[0].user_attrs["oom_kind"] == "contention"
    assert one.trials[0].user_attrs["memory_constraint"] <= 0
    assert "teaches the sampler nothing" in caplog.text


def test_a_trial_that_has_reported_is_queued_again(limit):
    limit(40)

    def objective(trial):
        value = trial.suggest_float("lr", 0, 1)
        trial.report(1.0, 0)
        take(1)
        return value

    one = study()
    with oomkit.testing.inject_oom(nth=1, min_bytes=MIB):
        one.optimize(prune_on_oom(objective), n_trials=2)
    first, second = one.trials
    assert [first.state, second.state] == [STATE.FAIL, STATE.COMPLETE]
    assert first.params == second.params and second.user_attrs["oom_retry_of"] == 0


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        # requested, allocated, reserved, usable, limit, total; in GB
        ((1, 22, 22, 23, None, 24), "contention"),  # 1 GB is others'
        ((3, 22, 22, 23, None, 24), "capacity"),
        ((1, 10, 20, 23, None, 24), "fragmentation"),
        ((1, 10, 10, 23, None, 24), "contention"),  # was taken when it was asked for
        ((3, 22, 22, 24, None, 24), "capacity"),
        ((3, 22, 22, 24, 23, 24), "capacity"),
        ((None, 22, 22, 24, None, 24), "capacity"),
        ((1, 5, None, None, 4, None), "capacity"),
        ((1, 2, None, None, 4, None), "contention"),
    ],
)
def test_kinds(figures, kind):
    sizes = [None if f is None else int(f * 1e9) for f in figures]
    assert _hpo_run._kind("OutOfMemoryError", *sizes) == kind
    assert _hpo_run._kind("MemoryError", *sizes) == "host"


# --- threads ---


def test_threads_take_turns_and_that_is_said(limit, monkeypatch):
    limit(10)
    inside, most = [], []
    said, say = threading.Event(), _hpo_study.say

    def say_it(message):
        say(message)
        if "take turns" in message:
            said.set()

    # Trials this short may never meet: each stays until another one waited for its turn.
    monkeypatch.setattr(_hpo_study, "say", say_it)

    def objective(trial):
        inside.append(threading.get_ident())
        said.wait(60)
        most.append(len(inside))
        held = take(8 if trial.number % 2 else 1)
        inside.pop()
        return float(held.numel() > 0)

    one = study()
    with pytest.warns(oomkit.OomkitWarning, match="take turns") as warnings:
        one.optimize(prune_on_oom(objective), n_trials=8, n_jobs=3)
    assert len(warnings) == 1 and max(most) == 1
    assert {t.state for t in one.trials} == {STATE.COMPLETE}  # 8 + 8 would not have fitted
    for trial in one.trials:
        peak = 8 if trial.number % 2 else 1
        budget = trial.user_attrs["memory_budget_bytes"]
        assert trial.user_attrs["memory_constraint"] == pytest.approx(
            peak * MIB / budget - 1, abs=0.02
        )


def test_each_study_is_told_that_its_threads_take_turns(monkeypatch):
    for _ in range(3):  # a study of the past may leave its address to the next one
        one, said = study(), threading.Event()
        monkeypatch.setattr(_hpo_study, "say", lambda message, said=said: said.set())

        def trial(one=one):
            with _hpo_study.turn(one, "serialize"):
                pass

        other = threading.Thread(target=trial)
        with _hpo_study.turn(one, "serialize"):
            other.start()
            assert said.wait(20)
        other.join()
        del one, trial, other


def test_threads_can_be_refused():
    one = study()
    first = threading.Thread(target=lambda: one.optimize(hold, n_trials=1))
    begun, go = threading.Event(), threading.Event()

    @prune_on_oom(threads="refuse")
    def hold(trial):
        begun.set()
        go.wait(20)
        return 1.0

    first.start()
    begun.wait(20)
    try:
        with pytest.raises(RuntimeError, match="n_jobs=1, in several processes"):
            one.optimize(prune_on_oom(sizes(1, 1, 1), threads="refuse"), n_trials=1)
        other = study()
        with pytest.raises(RuntimeError, match="n_jobs=1"):  # it could wait for ever
            other.optimize(prune_on_oom(sizes(1, 1, 1)), n_trials=1)
    finally:
        go.set()
        first.join()


def test_a_study_inside_a_trial(limit):
    limit(10)

    @prune_on_oom
    def outer(trial):
        inner = study()
        inner.optimize(prune_on_oom(sizes(1, 50)), n_trials=2)
        return float(sum(t.state == STATE.PRUNED for t in inner.trials))

    one = study()
    one.optimize(outer, n_trials=2)
    assert [t.value for t in one.trials] == [1.0, 1.0]


def test_processes_that_train_together_are_left_alone(monkeypatch, limit):
    limit(10)
    monkeypatch.setattr(_hpo_run, "is_distributed", lambda: True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        study().optimize(prune_on_oom(sizes(50)), n_trials=1)
    assert "neither pruned nor retried" in caught.value.__notes__[-1]
