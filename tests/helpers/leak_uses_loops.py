"""Uses of names for loops, remembered sizes and searches, as those in leak_uses.py."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import oomkit
from helpers.leak_uses import MODEL, NEEDS_MORE, X, covers
from oomkit import optuna, sizes
from oomkit._engine import store as _store
from oomkit._limits import admission as _admission
from oomkit.testing import inject_oom

NEEDS_OPTUNA = {
    "optuna.hyperparameter_search",
    "optuna.objective",
    "optuna.prune_on_oom",
    "optuna.tell",
}
NEEDS_MORE |= {
    name: "needs Optuna, which .venv has not: used in tests/integrations/test_optuna_leaks.py"
    for name in NEEDS_OPTUNA
}


def _use_chunks() -> None:
    with inject_oom() as fault:
        for part in oomkit.chunks(X, label="leak"):
            with oomkit.guard():
                part.clone()
    assert fault.fired == 1


@covers("chunks", "chunks.close")
def a_loop_over_chunks() -> None:
    _use_chunks()
    parts = oomkit.chunks(X, label="left", micro_batch=2)
    for part in parts:
        with oomkit.guard():
            part.clone()
        break
    parts.close()


@covers("map")
def a_map() -> None:
    with inject_oom() as fault:
        oomkit.map(MODEL, X)
    assert fault.fired == 1
    assert len(oomkit.map(MODEL, iter([X, X]), label="leak stream")) == 2 * len(X)


@covers("BatchSizeSearch", "find_executable_batch_size")
def a_size_that_is_searched() -> None:
    @oomkit.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    assert train() <= 2


@contextmanager
def _folder(variable: str = "OOMKIT_CACHE_DIR") -> Iterator[None]:
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            _store._pending.clear()  # what would be written at exit
            _store._cache = None
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


def _evaluate(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return MODEL(x)


@covers("sizes", "sizes.Size", "sizes.Sizes", "sizes.clear", "sizes.list", "sizes.path")
def remembered_sizes() -> None:
    with _folder(), oomkit.limit_memory("1GB", device="cpu"):  # nothing is noted without one
        step = oomkit.auto_batch(_evaluate, remember=True)
        with inject_oom():
            step(X)
        _store.flush()
        assert sizes.path().exists()
        found = sizes.list()
        assert repr(found) and found[0].micro_batch == 2
        oomkit.auto_batch(_evaluate, remember=True)(X)
        assert sizes.clear() >= 1


@covers("sizes.state_dict", "sizes.load_state_dict")
def sizes_in_a_checkpoint() -> None:
    step = oomkit.auto_batch(_evaluate)
    with inject_oom():
        step(X)
    state = copy.deepcopy(sizes.state_dict(step))
    sizes.load_state_dict(oomkit.auto_batch(_evaluate), state)


@covers("Reservation", "reserve")
def a_reservation() -> None:
    with _folder("OOMKIT_RESERVE_DIR"):
        reserve = partial(oomkit.reserve, device="cpu", budget="1TB")
        with reserve("1GB") as outer, reserve("1MB"):
            assert repr(outer).endswith("held>")
        assert reserve("1GB")(_evaluate)(X).shape[0] == len(X)
        queue = _admission.folder("cpu")
        place = _admission.Ticket(queue)
        place.ask(10**12)
        try:
            reserve("1GB", timeout=0).__enter__()
        except TimeoutError:
            place.leave()
        assert os.listdir(queue) == ["queue.lock"] and not _admission._open


class _Trial:
    """What these functions ask of a trial of Optuna's."""

    number = 0
    state = SimpleNamespace(is_finished=lambda: True)

    def __init__(self, size: int) -> None:
        self.params = {"batch_size": size}
        self.user_attrs: dict[str, Any] = {
            "peak_memory_bytes": 1000 + 10 * size,
            "memory_config": {"batch_size": size},
        }

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int:
        return high

    def set_user_attr(self, name: str, value: object) -> None:
        self.user_attrs[name] = value


@covers("optuna.BatchPlan", "optuna.Training", "optuna.constraints", "optuna.suggest_batch")
def a_suggested_batch() -> None:
    assert optuna.suggest_batch(_Trial(8), max_micro=4).accumulation == 128
    optuna.Training(_evaluate, [X], lambda: 0.0)
    assert optuna.constraints(_Trial(8)) == (0.0,)


@covers(
    "optuna.MemoryModel",
    *(
        f"optuna.MemoryModel.{name}"
        for name in ("check", "error", "fit", "predict", "report", "threshold")
    ),
)
def a_model_of_memory() -> None:
    model = optuna.MemoryModel().fit([_Trial(n) for n in (1, 2, 4, 8, 16)])
    assert model.predict({"batch_size": 32})
    assert model.check(_Trial(64), budget=100, prune=False)
    model.error(), model.threshold({"batch_size": 4}), model.report()
