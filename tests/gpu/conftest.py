"""Deterministic algorithms, so that a recovered step and the undisturbed one compare bitwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpu import DEVICE, DRY, UNIT, held, settle

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session", autouse=True)
def _libraries_have_what_they_keep() -> None:
    """Workspaces are taken out of a segment that is free at the first use. One of a gigabyte is
    then never given back, and leaves more room than a test has asked for."""
    if DRY:
        return
    body = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.LSTM(32, 32, batch_first=True))
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True).to(DEVICE)
    body.to(DEVICE)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            layer(body(torch.randn(4, 8, 32, device=DEVICE))[0]).float().sum().backward()


@pytest.fixture(autouse=True)
def _a_quiet_device() -> Iterator[None]:
    assert DRY or torch.cuda.is_available(), "no CUDA device, and OOMKIT_REQUIRE_CUDA=1"
    torch.use_deterministic_algorithms(True)
    settle()
    before = held()
    yield
    torch.use_deterministic_algorithms(False)
    settle()
    left = held() - before
    assert left < 8 * UNIT, f"{left} bytes are left"  # libraries take some, once
