"""The same promises on a real device: out-of-memory by a fraction of its memory.

Deterministic algorithms, so that a recovered step and the undisturbed one over the same
slices can be compared bit for bit.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import difference, same

import oomkit
from oomkit.testing import force_slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(256, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 4096), nn.ReLU()
        )
        self.norm = nn.BatchNorm1d(4096)
        self.head = nn.Linear(4096, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))


def _train(rows: int, slices: list[int] | None, limit: int | None) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = Wide().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(rows, 256, device="cuda")
    y = torch.randint(0, 10, (rows,), device="cuda")

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in range(3):
        if slices is not None:
            with force_slices(slices):
                losses.append(step(x, y))
        elif limit is not None:
            with oomkit.limit_memory(limit, device="cuda"):
                losses.append(step(x, y))
        else:
            losses.append(step(x, y))
    state = {
        "parameters": [p.detach().cpu() for p in model.parameters()],
        "buffers": [b.cpu() for b in model.buffers()],
        "losses": losses,
        "rng": torch.cuda.get_rng_state(),
    }
    return state, step.records


def test_a_real_oom_is_recovered_bit_for_bit() -> None:
    rows = 16384
    _, records = _train(rows, None, None)
    whole = records[-1].peak_allocated
    static = records[-1].baseline
    assert whole > static + 512 * MIB
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    got, records = _train(rows, None, static + (whole - static) * 6 // 10 + reserved)
    assert sum(r.ooms for r in records) >= 1
    first = records[0]
    expected, _ = _train(rows, [rows // first.accumulation_steps] * first.accumulation_steps, None)
    assert same(expected, got), difference(expected, got)


def test_figures_of_a_healthy_step() -> None:
    _, records = _train(256, None, None)
    for record in records:
        assert record.ooms == 0
        assert record.peak_allocated >= record.baseline > 0
        assert record.peak_reserved >= record.peak_allocated


def test_a_hundred_real_ooms_leave_nothing() -> None:
    model = nn.Linear(1024, 1024).cuda()

    def plain(x: torch.Tensor) -> None:
        model.zero_grad()
        big = torch.empty(len(x) * 64 * MIB, dtype=torch.uint8, device="cuda")
        model(x).sum().backward()
        del big

    x = torch.randn(8, 1024, device="cuda")
    oomkit.auto_batch(plain)(x[:1])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    limit = torch.cuda.memory_reserved() + 300 * MIB
    for _ in range(100):
        step = oomkit.auto_batch(plain)
        with oomkit.limit_memory(limit, device="cuda"):
            step(x)
        assert step.records[0].ooms >= 1
    assert torch.cuda.memory_allocated() == before
