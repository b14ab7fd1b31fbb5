"""The search: what is suggested, what becomes of a trial, and a study that survives its process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import optuna

import oomkit
from oomkit.optuna import MemoryModel, constraints, prune_on_oom, tell

from .alive import Alive
from .training import MODELS, Scale, Trained, train

STATES = optuna.trial.TrialState
FINISHED = (STATES.COMPLETE, STATES.PRUNED)


@dataclass(frozen=True)
class Options:
    n_trials: int
    budget: int  # bytes that a trial may use
    shared: int | None  # bytes of the device for all trials that run at a time
    study: Path | None
    several: bool  # objectives: the loss and the number of parameters
    checkpointing: bool
    track: bool  # in MLflow
    output: Path
    seed: int


# --- the study ------------------------------------------------------------------------


def open_study(options: Options) -> optuna.Study:
    """Call it alone: two that make the tables of a new file are in each other's way."""
    storage = None if options.study is None else f"sqlite:///{options.study}"
    study = optuna.create_study(
        study_name="tune_max",
        storage=storage,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        directions=["minimize"] * (2 if options.several else 1),
        load_if_exists=True,
    )
    seed_sampler(study, options.seed)
    return study


def seed_sampler(study: optuna.Study, seed: int) -> None:
    """With the seed alone each run and each process would suggest what the first has suggested.

    Called alone, just before the first trial is asked for: nobody else has as many trials then.
    """
    seed += len(study.get_trials(deepcopy=False))
    four = optuna.__version__.startswith("4.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's own, of what is experimental or going
        study.sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=8,
            # Optuna 5 gets the constraint from prune_on_oom itself.
            **({"constraints_func": constraints} if four else {}),
        )


def finished(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=FINISHED))


def at_work(study: optuna.Study, alive: Alive | None) -> int:
    """Trials that living processes run."""
    if alive is None:
        return 0
    running = study.get_trials(deepcopy=False, states=(STATES.RUNNING,))
    return sum(alive.is_held(trial.number) for trial in running)


def bury(study: optuna.Study, alive: Alive, track: bool) -> list[optuna.trial.FrozenTrial]:
    """Tells the trials of processes that were killed as failed: no sampler learns from them.

    Call it alone. Their runs in MLflow are ended, too.
    """
    dead = []
    for trial in study.get_trials(deepcopy=False, states=(STATES.RUNNING,)):
        if alive.is_held(trial.number):
            continue  # another process is at it
        # Optuna last: who is killed in between leaves a trial that is found again.
        run = trial.user_attrs.get("mlflow_run")
        if track and run is not None:
            with contextlib.suppress(mlflow.MlflowException):  # of another --output: not here
                mlflow.MlflowClient().set_terminated(run, "KILLED")
        study.tell(trial.number, state=STATES.FAIL)
        dead.append(trial)
    return dead


# --- a trial --------------------------------------------------------------------------


def suggest(trial: optuna.Trial, options: Options) -> dict[str, Any]:
    """One space for all models: it needs no smaller one for those that are heavy."""
    config = {
        "model": trial.suggest_categorical("model", list(MODELS)),
        "max_length": trial.suggest_int("tok.max_length", 128, 512, step=32),
        "batch_size": trial.suggest_categorical("train.batch_size", [8, 12, 16, 24, 32, 48, 64]),
        "grad_accum": trial.suggest_categorical("train.grad_accum", [1, 2, 3, 4, 6, 8]),
    }
    if options.checkpointing:
        chosen = trial.suggest_categorical("grad_checkpointing", [False, True])
        config["grad_checkpointing"] = chosen
    config["effective_batch_size"] = config["batch_size"] * config["grad_accum"]
    return config


@contextlib.contextmanager
def run_of(trial: optuna.Trial, config: dict[str, Any], options: Options) -> Iterator[None]:
    """The trial's run in MLflow; prune_on_oom adds the peaks, and `oom_error`."""
    if not options.track:
        yield
        return
    with mlflow.start_run(run_name=f"trial {trial.number}") as run:
        trial.set_user_attr("mlflow_run", run.info.run_id)
        mlflow.log_params(config)
        yield


def features(config: Any) -> list[float]:
    """What the peak is a sum of: states of the parameters, activations, attention's pairs."""
    family, layers, heads, width, vocabulary = MODELS[config["model"]]
    rows, length = config["batch_size"], config["max_length"]
    return [
        1.0,
        vocabulary * width + 12 * layers * width * width,
        rows * length * layers * width,
        rows * length**2 * layers * heads * (family == "deberta"),  # others keep none
    ]


def make_objective(
    options: Options,
    scale: Scale,
    plain: bool,
    begun: Callable[[optuna.Trial, dict[str, Any]], None],
) -> Callable[[optuna.Trial], Any]:
    """The objective as it was, but for the prediction: it handles no out-of-memory."""
    memory = MemoryModel(features=features, model="grad_checkpointing")

    def objective(trial: optuna.Trial) -> Any:
        config = suggest(trial, options)
        begun(trial, config)
        if not plain:
            # Is it hopeless, one row at a time? Anything else is split until it fits.
            memory.check(trial, {**config, "batch_size": 1}, budget=options.budget)
        told = Trained()

        def report(epoch: int, loss: float) -> None:
            if options.track:
                mlflow.log_metric("loss", loss, step=epoch)
            if not options.several:
                trial.report(loss, epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned(f"pruned after epoch {epoch}")

        with run_of(trial, config, options):
            try:
                loss = train(config, scale, report, plain, told)
            finally:
                note(trial, told, config)
        return (loss, told.parameters) if options.several else loss

    return objective


def note(trial: optuna.Trial, told: Trained, config: dict[str, Any]) -> None:
    trial.set_user_attr("parameters", told.parameters)
    trial.set_user_attr("oom_retries", told.ooms)
    micro = told.micro_batch or config["batch_size"]
    trial.set_user_attr("micro_batch_size", micro)


def protect(
    objective: Callable[[optuna.Trial], Any], options: Options, scale: Scale
) -> Callable[[optuna.Trial], Any]:
    """The objective with its memory reserved, and with out-of-memory as an outcome."""

    def names(trial: optuna.Trial) -> dict[str, Any]:
        given = {key.rpartition(".")[2]: value for key, value in trial.params.items()}
        return {**given, "effective_batch_size": given["batch_size"] * given["grad_accum"]}

    protected = prune_on_oom(objective, on_oom="auto", budget=options.budget, config=names)
    # Outside: what a failed trial held is free before another process may have it.
    return oomkit.reserve(options.budget, device=scale.device, budget=options.shared)(protected)


# --- the search -----------------------------------------------------------------------


def search(
    study: optuna.Study,
    objective: Callable[[optuna.Trial], Any],
    alive: Alive | None,
    options: Options,
    ended: Callable[[optuna.trial.FrozenTrial], None],
) -> None:
    """Runs trials until the study has so many, those of other processes and runs included."""
    failed = 0  # others' memory, not the trials' size
    first = True
    while True:
        if failed >= max(3, options.n_trials):
            raise RuntimeError(
                f"{failed} trials failed for lack of memory that others use: say with "
                "--device-memory how much there is for all trials at a time"
            )
        with contextlib.nullcontext() if alive is None else alive.alone():
            if finished(study) + at_work(study, alive) >= options.n_trials:
                return  # those of other processes are theirs to end
            if first:
                seed_sampler(study, options.seed)
                first = False
            trial = study.ask()
            if alive is not None:
                alive.hold(trial.number)
        try:
            frozen = tell(study, trial, objective)
            failed += frozen.state == STATES.FAIL
            ended(frozen)
        finally:
            if alive is not None:
                alive.drop(trial.number)


def set_up_mlflow(output: Path) -> None:
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # of the tables that it makes
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # whole: MLflow keeps what it has opened by this text, whatever folder it was in then
    mlflow.set_tracking_uri(f"sqlite:///{(output / 'mlflow.db').resolve()}")
    with open(output / "mlflow.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that make the tables are in each other's way
        if mlflow.get_experiment_by_name("tune_max") is None:
            artifacts = (output / "mlflow").resolve().as_uri()
            mlflow.create_experiment("tune_max", artifact_location=artifacts)
        mlflow.set_experiment("tune_max")
