"""Names of oomkit.optuna that need Optuna: called many times they leave nothing.

tests/helpers/leak_uses_loops.py has the others; every name of NEEDS_OPTUNA has a use here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from helpers.leak_uses import counted, grown, nothing_else_counted
from helpers.leak_uses_loops import NEEDS_OPTUNA
from searches import MIB, STATE, allocated, study, take

import oomkit.optuna
from oomkit.optuna import Training, hyperparameter_search, prune_on_oom, tell
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore")  # of frameworks, said or not by their count

TIMES = 120
WARM = 200  # calls after which lists and caches of Optuna have nearly their size


@pytest.fixture(autouse=True)
def _nothing_else_is_counted() -> Iterator[None]:
    with nothing_else_counted():
        yield


def _failing(trial: Any) -> float:
    """The second trial of a study runs out of memory."""
    take(2 if trial.number == 1 else 0.1)
    return trial.suggest_float("lr", 0, 1)


def _tight() -> Any:
    return oomkit.limit_memory(allocated() + MIB, device="cpu")


def pruned() -> None:
    one = study()
    with _tight():
        one.optimize(prune_on_oom(_failing), n_trials=3)
    states = [trial.state for trial in one.trials]
    assert states == [STATE.COMPLETE, STATE.PRUNED, STATE.COMPLETE]


def told() -> None:
    one = study()
    with _tight():
        states = [tell(one, one.ask(), _failing).state for _ in range(2)]
    assert states == [STATE.COMPLETE, STATE.PRUNED]


def trained() -> None:
    def build(trial: Any, batch_size: int) -> Training:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return Training(step, [torch.ones(batch_size, 3)], lambda: 1.0)

    one = study()
    with inject_oom(nth=30, phase="backward"):
        one.optimize(oomkit.optuna.objective(build, batch=(4, 8)), n_trials=2)
    assert all(trial.state == STATE.COMPLETE for trial in one.trials)


def _plainly(trainer: Any, space: Any, n_trials: int) -> Any:
    return trainer.hyperparameter_search(hp_space=space, n_trials=n_trials, backend="optuna")


def _searching(folder: Path, search: Callable[..., Any]) -> Callable[[], None]:
    import transformers

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.last(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    rows = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(2)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, num_train_epochs=1,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, eval_strategy="epoch",
    )  # fmt: skip

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)}

    def use() -> None:
        trainer = transformers.Trainer(
            args=arguments, train_dataset=rows, eval_dataset=rows, model_init=lambda trial: Net()
        )
        best = search(trainer, space, n_trials=1)
        assert best.run_id == "0"

    return use


USES = {
    "optuna.prune_on_oom": pruned,
    "optuna.tell": told,
    "optuna.objective": trained,
}


def test_each_name_has_a_use() -> None:
    assert USES.keys() | {"optuna.hyperparameter_search"} == NEEDS_OPTUNA


@pytest.mark.parametrize("name", USES)
def test_a_use_leaves_nothing(name: str) -> None:
    for _ in range(WARM):
        USES[name]()
    assert grown(USES[name], TIMES) == {}


def _growth(use: Callable[[], None], times: int) -> dict[str, int]:
    before = counted()
    for _ in range(times):
        use()
    return {what: more - before[what] for what, more in counted().items()}


def test_a_search_of_transformers_leaves_no_more_than_its_own(tmp_path: Path) -> None:
    """transformers 5 itself leaves a reference to None with each trial."""
    ours, theirs = (_searching(tmp_path, search) for search in (hyperparameter_search, _plainly))
    times, excess = 20, []
    for _ in range(30):
        ours()
        theirs()
    for _ in range(3):
        own, grew = _growth(theirs, times), _growth(ours, times)
        excess.append({what: more - own.get(what, 0) for what, more in grew.items()})
    kept = {what: min(turn.get(what, 0) for turn in excess) for what in excess[0]}
    assert {what: more for what, more in kept.items() if more >= times // 2} == {}


def test_a_leak_is_seen() -> None:
    kept: list[optuna.Study] = []

    def use() -> None:
        kept.append(study())
        kept[-1].optimize(prune_on_oom(_failing), n_trials=1)

    assert "objects of the collector" in grown(use, TIMES)
