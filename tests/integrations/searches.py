"""Small studies under a memory budget."""

from __future__ import annotations

from typing import Any

import optuna
import torch

import oomkit

MIB = 2**20
OPTUNA = int(optuna.__version__.split(".")[0])
STATE = optuna.trial.TrialState


def take(mebibytes: float) -> torch.Tensor:
    return torch.zeros(int(mebibytes * MIB), dtype=torch.uint8)


def allocated() -> int:
    return oomkit.memory("cpu").allocated or 0


def study(storage: Any = None, **options: Any) -> optuna.Study:
    options.setdefault("sampler", optuna.samplers.RandomSampler(seed=0))
    return optuna.create_study(storage=storage, **options)


def sizes(*mebibytes: float) -> Any:
    """An objective whose trials need so much, in turn."""

    def objective(trial: Any) -> float:
        trial.suggest_float("lr", 0, 1)
        held = [take(mebibytes[trial.number] / 2) for _ in range(2)]
        return float(trial.number + 0 * len(held))

    return objective
