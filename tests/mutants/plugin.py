"""Loaded by the pytest of a mutant: that it tests the mutant, and which tests failed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

TREE, REPORT = "OOMKIT_MUTANT_TREE", "OOMKIT_MUTANT_REPORT"

_told: dict[str, Any] = {"running": "", "passed": 0, "skipped": [], "failed": [], "errors": []}


def _write() -> None:
    Path(os.environ[REPORT]).write_text(json.dumps(_told))


def pytest_configure(config: pytest.Config) -> None:
    import oomkit

    tree = Path(os.environ[TREE]).resolve()
    for module in (oomkit, oomkit._C):
        file = Path(str(module.__file__)).resolve()
        if tree not in file.parents:
            raise pytest.UsageError(f"{file} is tested, expected a file in {tree}")
    _write()


def pytest_runtest_logstart(nodeid: str) -> None:
    _told["running"] = nodeid
    _write()  # what a crash leaves


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed:
        _told["passed"] += report.when == "call"
    elif report.skipped:
        _told["skipped"].append(report.nodeid)
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(crash.message if crash is not None else report.longrepr)
        kind = "failed" if report.when == "call" else "errors"
        _told[kind].append([report.nodeid, (text.strip().splitlines() or [""])[0][:200]])
    _write()
