"""transformers' hyperparameter_search, whose objective nobody can wrap."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import torch
import transformers
from searches import STATE, allocated

from oomkit.optuna import hyperparameter_search

# accelerate's and transformers' own, of settings that have no effect on the CPU.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"x": torch.full((8,), i / 16), "labels": torch.tensor([i / 16])}


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x, labels=None):
        out = self.last(self.first(x).relu())
        return {"loss": (out - labels).square().mean(), "logits": out}


@pytest.fixture
def trainer(tmp_path: Path) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=16,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        eval_strategy="epoch",
    )

    def model_init(trial):
        return Net(4096 if trial is not None and trial.params["large"] else 8)

    return transformers.Trainer(
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        model_init=model_init,
    )


def space(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}


def queued(*large):
    """A study whose trials are large or small in turn."""

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for one in large:
        study.enqueue_trial({"large": one})
    return study


def space_large(trial):
    trial.suggest_categorical("large", [False, True])
    return space(trial)


@pytest.fixture(autouse=True)
def _suggest_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """model_init is called before hp_space: let the parameter be there."""
    real = transformers.Trainer.call_model_init

    def call(self, trial=None):
        if trial is not None:
            trial.suggest_categorical("large", [False, True])
        return real(self, trial)

    monkeypatch.setattr(transformers.Trainer, "call_model_init", call)


def test_a_trial_out_of_memory_ends_no_search(trainer, limit, no_gc):
    limit(0.6)
    study = queued(False, True, True, False)
    alive = []

    def note(study, trial):
        alive.append(allocated())

    best = hyperparameter_search(
        trainer, space_large, n_trials=4, study=study, callbacks=[note], oom={"mlflow": False}
    )
    states = [t.state for t in study.trials]
    assert states == [STATE.COMPLETE, STATE.PRUNED, STATE.PRUNED, STATE.COMPLETE]
    assert study.trials[1].user_attrs["oom_config"]["large"] is True
    assert best.run_id in ("0", "3") and best.objective == study.best_value
    assert trainer.hp_search_backend is None
    assert alive[1] <= alive[0] and alive[2] <= alive[0]


def test_options_of_the_wrapper(trainer, limit):
    limit(0.6)
    study = queued(True, False)
    best = hyperparameter_search(
        trainer,
        space_large,
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=2,
        study=study,
        oom={"on_oom": "penalize", "penalty": 1e9},
    )
    assert best.run_id == "1" and best.objective < 1e9
    assert study.trials[0].value == 1e9


def test_a_new_study(trainer):
    best = hyperparameter_search(
        trainer, space, n_trials=1, direction="minimize", study_name="new", timeout=60
    )
    assert best.run_id == "0" and best.objective < 1e9


def test_what_is_needed_is_said(trainer):
    with pytest.raises(TypeError, match="got study= and sampler"):
        hyperparameter_search(trainer, study=queued(), sampler=None)
    with pytest.raises(ValueError, match="backend='optuna' only"):
        hyperparameter_search(trainer, backend="ray")
    trainer.model_init = None
    with pytest.raises(RuntimeError, match="needs a Trainer with model_init="):
        hyperparameter_search(trainer)
