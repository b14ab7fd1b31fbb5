"""Trials of a protected trainer, by transformers and by oomkit.optuna: what was proven of one
trainer, or of one trial's model, is not believed of another."""

from __future__ import annotations

import gc
from typing import Any

import optuna
import pytest
import torch
import transformers as hf
from hf_models import bert, labelled, trainer
from hf_runs import plain, run
from runs import SINGLE, Arm, differences, timeless

import oomkit.optuna
from oomkit.transformers import protect, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
optuna.logging.set_verbosity(optuna.logging.WARNING)

FAULT = {"nth": 30}
RATES = [0.02, 0.2, 0.1]


def _classifier(normal: bool = False) -> torch.nn.Module:
    model = bert("SequenceClassification")
    if normal:  # couples the rows in the backward alone: losses of parts are the whole one's
        model.classifier.weight.register_hook(lambda g: g / g.norm())
    return model


def _made(normal: bool = False, **more: Any) -> Any:
    return trainer(lambda: _classifier(normal), labelled("class"), eval_strategy="no", **more)


def _halved(made: Any) -> Any:
    return protect(made, accumulation_steps=2)


@pytest.mark.refusals
def test_the_proof_of_a_trainer_that_is_gone_is_not_of_the_next() -> None:
    """Under a limit sizes of steps that are gone are used again, and their proofs."""
    budget = (oomkit.memory("cpu").allocated or 0) + 2**30
    with oomkit.limit_memory(budget, device="cpu"):
        reference, _, _ = run(_made, plain)
        first, arm, made = run(_made, number=1, fault=FAULT)
        assert not differences(reference, first, SINGLE)
        assert {record.accumulation_steps for record in records(made)} == {2}
        del arm, made
        gc.collect()
        second, _, _ = run(lambda: _made(True), number=1, fault=FAULT)
    assert isinstance(second.error, oomkit.SplitError), second.error
    assert second.rest["global_step"] == 0


def test_the_proof_of_a_model_is_not_of_the_next_one() -> None:
    """`model_init` makes one for each training."""
    kinds = iter([False, False, True])
    made = trainer(
        None,
        labelled("class"),
        eval_strategy="no",
        model_init=lambda: _classifier(next(kinds)),
    )
    made.remove_callback(hf.PrinterCallback)
    _halved(made).train()
    assert [record.accumulation_steps for record in records(made)] == [2] * 4
    with pytest.raises(oomkit.SplitError):
        made.train()
    assert made.state.global_step == 0  # later on, losses alone would show it
    assert len(records(made)) >= 4  # those of the first training are kept


def test_losses_of_a_model_are_not_those_of_the_next_one() -> None:
    """Split losses of the first are finite; of those of the next, nothing can be proven."""

    class Lost(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = _classifier(), factor

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
            found = self.inner(input_ids, attention_mask, labels=labels)
            return {"loss": found.loss * self.factor, "logits": found.logits}

    factors = iter([1.0, 1.0, float("nan")])
    made = trainer(
        None, labelled("class"), eval_strategy="no", model_init=lambda: Lost(next(factors))
    )
    made.remove_callback(hf.PrinterCallback)
    _halved(made).train()
    assert [record.accumulation_steps for record in records(made)] == [2] * 4
    with pytest.raises(oomkit.SplitError, match="its loss was nan in 3 split calls in a row"):
        made.train()


def test_the_proof_of_a_model_is_not_of_one_that_is_protected_after_it() -> None:
    made = _halved(_made())
    made.remove_callback(hf.PrinterCallback)
    made.train()
    torch.manual_seed(0)
    made.model = made.model_wrapped = _classifier(normal=True)
    made.optimizer = made.lr_scheduler = None
    _halved(made)
    with pytest.raises(oomkit.SplitError):
        made.train()
    assert made.state.global_step == 0


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
