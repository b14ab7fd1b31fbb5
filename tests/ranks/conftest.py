"""Workers of one run of pytest have results of ranks in common."""

from __future__ import annotations

import os

import pytest

from . import launch


@pytest.fixture(scope="session", autouse=True)
def _results_in_common(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    launch.common = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
