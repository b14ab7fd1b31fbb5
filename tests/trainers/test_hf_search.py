"""`hyperparameter_search` of a protected trainer, by transformers and by oomkit.optuna."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import transformers as hf
from hf_models import bert, labelled, trainer
from runs import Arm, timeless

import oomkit.optuna
from oomkit.transformers import protect, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
optuna.logging.set_verbosity(optuna.logging.WARNING)

RATES = [0.02, 0.2, 0.1]


class Lines(hf.TrainerCallback):
    """What all trials have logged: a trainer's own log begins anew with each."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def _space(trial: Any) -> dict[str, Any]:
    batch = trial.suggest_categorical("per_device_train_batch_size", [4, 8])
    rate = trial.suggest_categorical("learning_rate", RATES)
    return {"learning_rate": rate, "per_device_train_batch_size": batch}


def _sampler() -> Any:
    rows = {"learning_rate": RATES, "per_device_train_batch_size": [4, 8]}
    return optuna.samplers.GridSampler(rows, seed=1)


def _transformers(made: Any, trials: int) -> Any:
    return made.hyperparameter_search(_space, n_trials=trials, backend="optuna", sampler=_sampler())


def _oomkits(made: Any, trials: int) -> Any:
    return oomkit.optuna.hyperparameter_search(
        made, _space, n_trials=trials, sampler=_sampler(), oom={"mlflow": False}
    )


def _searched(search: Any, fault: int | None, **options: Any) -> tuple[Any, Any, Any, Lines]:
    lines = Lines()
    made = trainer(
        None,
        labelled("class"),
        model_init=lambda: bert("SequenceClassification"),
        callbacks=[lines],
        max_grad_norm=0.0,
    )
    made.remove_callback(hf.PrinterCallback)
    arm = None
    if fault is not None:
        protect(made, **options)
        # The second call of the first trial fails, and the fourth trial's first one.
        arm = made.training_step = Arm(made.training_step, fault, {"nth": 30}, None)
    best = search(made, 4)
    if arm is not None:
        made.training_step = arm.step
    return best, made, arm, lines


@pytest.mark.parametrize("search", [_transformers, _oomkits])
@pytest.mark.parametrize("fault", [2, 9])
def test_trials_are_what_they_are_without_an_error(search: Any, fault: int) -> None:
    plain, _, _, expected = _searched(search, None)
    best, made, arm, lines = _searched(search, fault)
    assert arm.fired
    assert best.run_id == plain.run_id and best.hyperparameters == plain.hyperparameters
    assert best.objective == pytest.approx(plain.objective, rel=1e-4)
    assert len(lines.lines) == len(expected.lines)
    for one, two in zip(timeless(expected.lines), timeless(lines.lines), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    training = [r for r in records(made) if r.label == "Trainer.training_step"]
    assert len(training) == sum("grad_norm" in line for line in lines.lines)
    assert max(r.accumulation_steps for r in training) > 1
    assert sum(r.ooms for r in training) == 1


def test_figures_are_logged_in_each_trial() -> None:
    _, made, _, lines = _searched(_transformers, 2, log=True)
    found = [line["oomkit/ooms"] for line in lines.lines if "grad_norm" in line]
    training = [r.ooms for r in records(made) if r.label == "Trainer.training_step"]
    assert found == training


def test_a_trial_that_runs_out_of_memory_for_good_ends_no_search() -> None:
    """`oomkit.optuna` knows the protected step's error: it was not for the trial's own size."""

    def failing(made: Any, trials: int) -> Any:
        step, calls = made.training_step, []

        def fails(*args: Any) -> Any:
            calls.append(1)
            # Memory is gone in the first trial, and when it is run again.
            with oomkit.testing.inject_oom(nth=20 if len(calls) <= 2 else 2**40, times=None):
                return step(*args)

        made.training_step = fails
        studies = []
        try:
            oomkit.optuna.hyperparameter_search(
                made,
                _space,
                n_trials=trials,
                sampler=_sampler(),
                callbacks=[lambda study, trial: studies.append(trial.state)],
                oom={"mlflow": False},
            )
        finally:
            made.training_step = step
        return studies

    states, made, _, _ = _searched(lambda made, trials: failing(protect(made), trials), None)
    state = optuna.trial.TrialState
    assert states == [state.FAIL, *[state.COMPLETE] * 3]
    assert len(records(made)) > 1
