"""tune_max.py, once what it needs is there."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import optuna
import torch
import transformers
from rich.console import Console

import oomkit
from oomkit.memory import _parse_budget
from oomkit.report import format_bytes

from .alive import Alive
from .search import (
    Options,
    bury,
    finished,
    make_objective,
    open_study,
    protect,
    search,
    set_up_mlflow,
)
from .show import Bar, configuration, line, outcome, picture, table
from .training import Scale, scale_of


def options_of(given: argparse.Namespace, scale: Scale) -> Options:
    if given.budget:
        budget = _parse_budget(given.budget)
    elif scale.device.type == "cuda":
        budget = torch.cuda.get_device_properties(scale.device).total_memory
    else:
        budget = _parse_budget("300MiB")
    return Options(
        n_trials=given.n_trials,
        budget=budget,
        shared=_parse_budget(given.device_memory) if given.device_memory else None,
        study=given.study,
        several=given.multi_objective,
        checkpointing=given.grad_checkpointing,
        track=not given.no_mlflow,
        output=given.output,
        seed=given.seed,
    )


def run(given: argparse.Namespace) -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # errors pass, and tell themselves
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the frameworks
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    scale = scale_of(given.device, given.rows)
    if scale.device.type == "cpu":
        torch.set_num_threads(given.threads)
    options = options_of(given, scale)
    if options.shared is not None and options.shared < options.budget:
        return refuse(
            f"--budget is {format_bytes(options.budget)}, more than the "
            f"{format_bytes(options.shared)} of --device-memory: no trial could ever begin"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    if options.track:
        set_up_mlflow(options.output)
    console = Console(
        highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        alive = None
        if options.study is not None:
            alive = Alive(options.study.with_name(options.study.name + ".lock"))
            stack.callback(alive.close)
        with alive.alone() if alive else contextlib.nullcontext():
            study = open_study(options)
            if given.plain and any(t.state.name != "WAITING" for t in study.get_trials(False)):
                return refuse(
                    f"{options.study} has trials already: --plain needs a study of its own, or "
                    "none, as it neither goes on nor tells others which trials it runs"
                )
            if len(study.directions) != (2 if options.several else 1):
                return refuse(
                    f"{options.study} has {len(study.directions)} objective(s): run it "
                    f"{'without' if options.several else 'with'} --multi-objective"
                )
            dead = bury(study, alive, options.track) if alive and not given.plain else []
        if given.plain:
            return run_plain(study, options, scale, console)
        return run_protected(study, options, scale, console, alive, dead)


def refuse(text: str) -> int:
    print(f"tune_max.py: {text}", file=sys.stderr)
    return 2


def run_plain(study: optuna.Study, options: Options, scale: Scale, console: Console) -> int:
    """The program as it was. The first trial that is too large ends it."""

    def ended(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        console.print(line(trial))
        bar.done(finished(study))

    with (
        Bar(console, options.n_trials) as bar,
        oomkit.limit_memory(options.budget, device=scale.device),
    ):
        objective = make_objective(options, scale, True, bar.begun)
        try:
            study.optimize(objective, options.n_trials, callbacks=[ended])
        except torch.OutOfMemoryError as error:
            trial = study.get_trials(deepcopy=False)[-1]
            bar.__exit__()
            console.print(f"trial {trial.number:3}: {configuration(trial.params)}: {error}")
            console.print(table(study, options.budget, ", without oomkit"))
            console.print(
                f"The study died in trial {trial.number}, with {finished(study)} of "
                f"{options.n_trials} trials finished."
            )
            raise
    console.print(table(study, options.budget, ", without oomkit"))
    return 0


def run_protected(
    study: optuna.Study,
    options: Options,
    scale: Scale,
    console: Console,
    alive: Alive | None,
    dead: list[optuna.trial.FrozenTrial],
) -> int:
    for trial in dead:
        what = configuration(trial.params) if len(trial.params) >= 4 else "nothing chosen yet"
        console.print(
            f"trial {trial.number:3}: {what}: died with its process; it is told as failed "
            "and does not count"
        )
    if alive is not None:
        before = finished(study)
        if before:
            console.print(
                f"study {options.study}: trials finished: {before}, "
                f"to go: {max(0, options.n_trials - before)}"
            )

    def ended(trial: optuna.trial.FrozenTrial) -> None:
        console.print(line(trial))
        bar.done(finished(study))

    with Bar(console, options.n_trials) as bar:
        bar.done(finished(study))
        objective = make_objective(options, scale, False, bar.begun)
        try:
            search(study, protect(objective, options, scale), alive, options, ended)
        except KeyboardInterrupt:
            console.print("stopped; the same line goes on" if alive else "stopped")
    console.print(table(study, options.budget))
    file = options.output / "tune_max.png"
    picture(study, options.budget, file)
    console.print(f"picture: {file}")
    return 0 if any(outcome(trial).startswith("fits") for trial in study.trials) else 1
