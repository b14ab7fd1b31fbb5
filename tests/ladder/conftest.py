"""Bytes are counted from the first test on; how often forwards are computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import oomkit
from oomkit._ladder import recompute

pytest.importorskip("oomkit._bridge")


@pytest.fixture(autouse=True)
def _bytes_are_counted() -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Recomputed forwards, by the class of the module."""
    counted: Counter[str] = Counter()
    plain = recompute._Run.again

    def counting(self: Any, *given: Any) -> Any:
        counted[type(self.child).__name__] += 1
        return plain(self, *given)

    monkeypatch.setattr(recompute._Run, "again", counting)
    return counted
