"""Bytes are counted from the first test on."""

from __future__ import annotations

import pytest

import oomkit

pytest.importorskip("oomkit._bridge")


@pytest.fixture(autouse=True)
def _bytes_are_counted() -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass
