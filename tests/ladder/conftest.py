"""Bytes are counted from the first test on; how often forwards are computed again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

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


@pytest.fixture(autouse=True)
def _as_if_nothing_was_compiled() -> Iterator[None]:
    """oomkit looks at a process that has compiled something less closely."""
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        torch._dynamo.reset()
        frames.cached_backends.clear()
        sys.modules["torch._dynamo.utils"].counters.clear()
