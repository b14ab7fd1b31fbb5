"""Trials that run out of memory, and the best value found, by sampler and by what handles them.

Run in the environment of `make test-integrations`:

    .venv-optuna5/bin/python benchmarks/hpo.py

Counts, not times: a busy machine changes nothing. `--seeds 3` is a quick look.

*law*: a memory law that grows with layers, batch and length, allocated for real at a thousandth
of its size under a budget; the best configurations lie at the border. *model*: a small network
that is trained, with a memory budget that wide ones at large batches do not fit.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import torch

import oomkit
from oomkit.optuna import Training, constraints, objective, prune_on_oom

RESULT = Path(__file__).parent / "results" / "hpo.txt"
MIB = 2**20
SAMPLERS = ("TPE", "NSGA-II", "GP", "CMA-ES", "random")
TRIALS = {"law": 30, "model": 20}
ARMS = {
    "law": ("plain", "by hand", "oomkit"),
    "model": ("plain", "by hand", "oomkit", "oomkit, batch split"),
}


def sampler(name: str, seed: int, arm: str) -> Any:
    samplers = optuna.samplers
    four = optuna.__version__.startswith("4.") and arm.startswith("oomkit")
    more = {"constraints_func": constraints} if four else {}
    if name == "TPE":
        return samplers.TPESampler(seed=seed, **more)
    if name == "NSGA-II":
        return samplers.NSGAIISampler(seed=seed, population_size=8, **more)
    if name == "GP":
        found = samplers.GPSampler(seed=seed, deterministic_objective=True, **more)
        # A coarser search of the acquisition function: the whole one takes an hour.
        found._n_preliminary_samples, found._n_local_search = 256, 2
        return found
    if name == "CMA-ES":
        return samplers.CmaEsSampler(seed=seed, n_startup_trials=8)
    return samplers.RandomSampler(seed=seed)


# --- the memory law -------------------------------------------------------------------

LAW_BUDGET = 24 * MIB  # for 24 GB


def law(layers: int, batch: int, length: int) -> int:
    """Bytes, at a thousandth: weights, gradients and two moments; activations."""
    weights = layers * 0.0126 * 16
    activations = layers * batch * length * (34 * 1024 + 5 * 16 * length) / 1e9
    return int((0.4 + weights + activations) * MIB)


def law_objective(trial: optuna.Trial) -> float:
    layers = trial.suggest_int("layers", 4, 48)
    batch = trial.suggest_int("batch_size", 8, 64)
    length = trial.suggest_int("max_length", 128, 512, step=32)
    rate = trial.suggest_float("lr", 1e-6, 1e-2, log=True)
    need = law(layers, batch, length)
    held = [torch.empty(need // 4, dtype=torch.uint8) for _ in range(4)]
    del held
    return (
        3 / math.log2(layers + 2)
        + 60 / (length + 100)
        + 0.15 * abs(math.log2(batch / 32))
        + 0.1 * (math.log10(rate) + 4) ** 2
    )


# --- the small model ------------------------------------------------------------------

MODEL_BUDGET = 3 * MIB
ROWS, STEPS = 256, 16


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, STEPS, 16, generator=generator)
    return x, x[..., :2].prod(-1, keepdim=True) + x[..., 2:3].sin()


def build(trial: optuna.Trial, batch_size: int) -> Training:
    width = trial.suggest_int("width", 32, 1024, log=True)
    rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    torch.manual_seed(0)
    x, y = data()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), rate)

    def step(part: torch.Tensor, target: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(part), target).backward()
        optimizer.step()

    def evaluate() -> float:
        with torch.no_grad():
            parts = [model(rows) for rows in x.split(4)]
        return float(torch.nn.functional.mse_loss(torch.cat(parts), y))

    def batches() -> Any:
        return zip(x.split(batch_size), y.split(batch_size), strict=True)

    return Training(step, batches, evaluate, epochs=2, options={"reduction": "mean"})


def model_objective(trial: optuna.Trial) -> float:
    training = build(trial, trial.suggest_int("effective_batch_size", 8, ROWS, log=True))
    for _ in range(training.epochs):
        for batch in training.batches():  # type: ignore[operator]
            training.step(*batch)
    return float(training.evaluate())


# --- what handles the error -----------------------------------------------------------


def by_hand(inner: Callable[[optuna.Trial], float]) -> Callable[[optuna.Trial], float]:
    """The handler of the case: clean up and prune inside `except`."""

    def handled(trial: optuna.Trial) -> float:
        try:
            return inner(trial)
        except torch.OutOfMemoryError as error:
            gc.collect()
            trial.set_user_attr("oom", True)
            raise optuna.TrialPruned(f"OOM: {error}") from None

    return handled


def handled(part: str, arm: str) -> Callable[[optuna.Trial], float]:
    inner = law_objective if part == "law" else model_objective
    if arm == "plain":
        return inner
    if arm == "by hand":
        return by_hand(inner)
    if arm == "oomkit":
        return prune_on_oom(inner, on_oom="auto")  # type: ignore[no-any-return]
    return objective(build, batch=(8, ROWS), report=False)  # type: ignore[no-any-return]


Found = tuple[float, float, float]


def search(part: str, name: str, arm: str, seed: int) -> Found:
    """Share of OOM trials, the same in the second half, best value (inf: none found)."""
    study = optuna.create_study(sampler=sampler(name, seed, arm))
    failed: list[bool] = []

    def note(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        failed.append(
            bool(trial.user_attrs.get("oom")) or trial.state == optuna.trial.TrialState.FAIL
        )

    used = oomkit.memory("cpu").allocated or 0
    budget = LAW_BUDGET if part == "law" else MODEL_BUDGET
    with oomkit.limit_memory(used + budget, device="cpu"):
        study.optimize(
            handled(part, arm),
            n_trials=TRIALS[part],
            catch=(torch.OutOfMemoryError,) if arm == "plain" else (),
            callbacks=[note],
        )
    values = [
        trial.value
        for trial in study.trials
        if trial.state == optuna.trial.TrialState.COMPLETE
        and not trial.user_attrs.get("oom")
        and trial.value is not None
    ]
    half = failed[len(failed) // 2 :]
    return sum(failed) / len(failed), sum(half) / len(half), min(values, default=math.inf)


def cell(job: tuple[str, str, str, range]) -> tuple[str, str, str, list[Found]]:
    part, name, arm, seeds = job
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    logging.getLogger("oomkit").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    gc.freeze()  # what the imports made: collections have less to look at
    return part, name, arm, [search(part, name, arm, seed) for seed in seeds]


def table(found: dict[tuple[str, str, str], list[Found]]) -> list[str]:
    lines = []
    for part in TRIALS:
        lines += ["", f"{part}: {TRIALS[part]} trials", ""]
        lines.append(
            f"{'sampler':8} {'handled':20} {'seeds':>5} {'OOM':>6} {'2nd half':>9} "
            f"{'best, median':>13} {'worst seed':>11}"
        )
        for name in SAMPLERS:
            for arm in ARMS[part]:
                rows = found.get((part, name, arm))
                if rows:
                    share, later, best = zip(*rows, strict=True)
                    lines.append(
                        f"{name:8} {arm:20} {len(rows):5} {statistics.mean(share):6.0%} "
                        f"{statistics.mean(later):9.0%} "
                        f"{statistics.median(best):13.4f} {max(best):11.4f}"
                    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    blocks = [range(i, min(i + 5, options.seeds)) for i in range(0, options.seeds, 5)]
    jobs = [
        (part, name, arm, seeds)
        for seeds in blocks
        for name in sorted(options.samplers, key=lambda name: name == "GP")  # it takes long
        for part in TRIALS
        for arm in ARMS[part]
    ]
    context = multiprocessing.get_context("spawn")
    found: dict[tuple[str, str, str], list[Found]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for part, name, arm, rows in pool.map(cell, jobs):
            found.setdefault((part, name, arm), []).extend(rows)
            text = report(found)
            options.output.write_text(text, encoding="utf-8")
    print(text)


def report(found: dict[tuple[str, str, str], list[Found]]) -> str:
    lines = [
        "Trials that ran out of memory, and the best value (less is better). optuna "
        f"{optuna.__version__}, torch {torch.__version__}, oomkit {oomkit.__version__}.",
        "plain: study.optimize(catch=OutOfMemoryError); by hand: gc.collect() and TrialPruned "
        "inside `except`;",
        'oomkit: prune_on_oom(on_oom="auto"); batch split: oomkit.optuna.objective, which '
        "searches the effective batch.",
        *table(found),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
