"""A plugin of pytest: counts the steps in which `inject_oom` has made an allocation fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import oomkit.testing

counted = [0]
LINE = "faulted steps: "


@pytest.fixture(autouse=True, scope="session")
def _faults_are_counted() -> Iterator[None]:
    plain = oomkit.testing.inject_oom.__exit__

    def leave(self: Any, *error: Any) -> None:
        plain(self, *error)
        counted[0] += self.fired > 0

    oomkit.testing.inject_oom.__exit__ = leave  # type: ignore[method-assign, assignment]
    yield
    oomkit.testing.inject_oom.__exit__ = plain  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{LINE}{counted[0]}")


def read(output: str) -> int:
    found = re.findall(rf"^{LINE}(\d+)$", output, re.MULTILINE)
    return int(found[-1]) if found else 0
