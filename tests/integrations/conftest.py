"""What the tests of other people's frameworks share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

import oomkit

MIB = 2**20


def pytest_report_header() -> str:
    return f"optuna {optuna.__version__}"


@pytest.fixture(autouse=True, scope="session")
def _fast_collections() -> None:
    """What the frameworks made at import is nothing to look at in each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Records of failed trials hold the error, and pytest holds the records."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(autouse=True)
def _others_warnings() -> Iterator[None]:
    """Of Optuna's own; ours stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # GPSampler's way with the penalty of a study in which nothing has finished yet.
        warnings.filterwarnings("ignore", "Clip non-finite values")
        yield


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Each kind of storage that a study may be kept in."""
    if request.param == "memory":
        return optuna.storages.InMemoryStorage()
    if request.param == "sqlite":
        return optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    return optuna.storages.JournalStorage(backend)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """limit(mebibytes) above what is in use."""
    opened = []

    def limit_to(mebibytes: float) -> None:
        used = oomkit.memory("cpu").allocated or 0
        opened.append(oomkit.limit_memory(used + int(mebibytes * MIB), device="cpu"))

    yield limit_to
    for one in reversed(opened):
        one.__exit__(None, None, None)
