"""Deterministic algorithms, so that a recovered step and the undisturbed one compare bitwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gpu import DRY, UNIT, allocated, settle

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _a_quiet_device() -> Iterator[None]:
    assert DRY or torch.cuda.is_available(), "no CUDA device, and OOMKIT_REQUIRE_CUDA=1"
    torch.use_deterministic_algorithms(True)
    settle()
    before = allocated()
    yield
    torch.use_deterministic_algorithms(False)
    settle()
    left = allocated() - before
    assert left < 8 * UNIT, f"{left} bytes are left"  # libraries take some, once
