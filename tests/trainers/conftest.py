"""Real trainers: `make test-trainers` has their libraries, in two environments."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_NEEDS = {"test_hf": "trl", "test_trl": "trl", "test_lightning": "lightning"}
_NEEDS["test_ignite"] = "ignite"
_MISSING = {
    beginning: name for beginning, name in _NEEDS.items() if importlib.util.find_spec(name) is None
}

if "test_ignite" not in _MISSING:
    with warnings.catch_warnings():  # of torch.jit, at its import
        warnings.simplefilter("ignore")
        importlib.import_module("ignite.metrics")


def pytest_report_header() -> str:
    missing = ", ".join(sorted(set(_MISSING.values())))
    return f"trainers that are not in this environment: {missing}" if missing else ""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of trainers that this environment does not have."""
    return True if any(collection_path.name.startswith(each) for each in _MISSING) else None


@pytest.fixture(autouse=True, scope="session")
def _fast_collections() -> None:
    """What the frameworks made at import is nothing to look at in each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
