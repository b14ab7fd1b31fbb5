"""Objectives inside other decorators, and protected twice."""

from __future__ import annotations

import functools
import logging

import optuna
import pytest
import torch
from searches import STATE, allocated, sizes, study, take

from oomkit.optuna import prune_on_oom, tell


def timed(objective):
    @functools.wraps(objective)
    def around(trial):
        return objective(trial)

    return around


class Searched:
    @prune_on_oom
    def __call__(self, trial):
        return sizes(50)(trial)


@pytest.mark.parametrize(
    "objective",
    [
        timed(sizes(50)),
        timed(prune_on_oom(sizes(50))),
        functools.partial(prune_on_oom(sizes(50))),
        Searched(),
    ],
)
def test_tell_of_a_decorated_objective(objective, limit):
    limit(10)
    one = study()
    frozen = tell(one, one.ask(), objective)
    assert frozen.state == STATE.PRUNED and frozen.user_attrs["oom"] is True
    assert frozen.user_attrs["memory_constraint"] > 0


@pytest.mark.parametrize(
    "objective", [prune_on_oom(sizes(1)), timed(prune_on_oom(sizes(1))), Searched()]
)
def test_protection_twice_is_refused(objective):
    with pytest.raises(TypeError, match="protected already"):
        prune_on_oom(objective, on_oom="auto")
    one = study()
    with pytest.raises(TypeError, match="protected already"):
        tell(one, one.ask(), objective, on_oom="auto")


def test_a_configuration_that_fails_hides_no_oom(limit, caplog):
    limit(10)
    one = study()
    wrapped = prune_on_oom(sizes(50), config=lambda trial: {"rows": trial.params["rows"]})
    with caplog.at_level(logging.WARNING, "oomkit"):
        one.optimize(wrapped, n_trials=1)
    (trial,) = one.trials
    assert trial.state == STATE.PRUNED and trial.user_attrs["oom"] is True
    assert trial.user_attrs["oom_config"] == trial.params
    assert "config= failed: KeyError('rows')" in caplog.text


@pytest.mark.parametrize("on_oom", ["prune", "penalize", "raise"])
def test_a_handler_by_hand_inside_is_out_of_memory_too(on_oom, limit, no_gc):
    """Else the sampler would learn that what the user pruned for memory fits."""
    limit(10)
    before = []

    @prune_on_oom(on_oom=on_oom, penalty=1.0)
    def by_hand(trial):
        before.append(allocated())
        held = take(4)
        try:
            return float(take(50).numel() + held.numel())
        except torch.OutOfMemoryError as error:
            raise optuna.TrialPruned("by hand") from error

    one = study()
    one.optimize(by_hand, n_trials=2)
    trial = one.trials[0]
    assert trial.state == (STATE.COMPLETE if on_oom == "penalize" else STATE.PRUNED)
    assert trial.user_attrs["oom"] is True and trial.user_attrs["oom_kind"] == "capacity"
    assert trial.user_attrs["memory_constraint"] > 0
    assert "Tried to allocate" in trial.user_attrs["oom_message"]
    assert before[1] == before[0]
