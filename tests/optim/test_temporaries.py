"""What an update is said to allocate is what it allocates: state, and temporaries on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.bridge_table import api, ctypes
from ladder.optimizers import CONFIGS, Config, make

import oomkit

pytest.importorskip("oomkit._bridge")

# What it depends on beside the options: a shape, a type, or that an option stands alone.
UNEQUAL = [
    [(256, 512)],
    [(256, 512), (16, 16)],
    [(256, 256), (256, 512)],
    [(256, 512), (256, 256)],
    [(16, 16), (256, 512), (32, 512), (256, 384)],
]
OTHERS = [
    (Config("RMSprop", {"weight_decay": 0.1, "foreach": True}), (64, 256), torch.float32),
    (Config("Adafactor", {"foreach": False}), (16384,), torch.float32),
    (Config("Adafactor", {"foreach": True}), (16384,), torch.bfloat16),
]
CASES = [*((c, (64, 256), torch.float32) for c in CONFIGS), *OTHERS]


def _peak(work: Any) -> tuple[int, int]:
    """Bytes above what was there before, at most and at the end."""
    window = ctypes.c_int()
    before = oomkit.memory("cpu").allocated or 0
    assert api.cpu_peak_push(window) == 0
    work()
    peak = api.cpu_peak_pop(window)
    return int(peak) - before, (oomkit.memory("cpu").allocated or 0) - before


@pytest.mark.parametrize(("config", "shape", "dtype"), CASES, ids=str)
def test_it_allocates_no_more_than_is_said_and_not_much_less(
    config: Config, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass  # allocations are counted from here on
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(2)]
    optimizer = make(config, params)
    largest = params[0].numel() * params[0].element_size()
    most = 0
    for call in range(8):  # RAdam's sixth needs more than its first
        for p in params:
            p.grad = torch.randn_like(p)
        _, state, fixed, together = oomkit.optim.update_needs(optimizer)
        peak, kept = _peak(optimizer.step)
        assert kept <= state + 4096, call
        assert state <= kept + 4096, call
        most = max(most, peak - kept)
        assert peak - kept <= max(fixed, together) + 8192, call
    assert max(fixed, together) <= most + 1.6 * largest


@pytest.mark.parametrize("shapes", UNEQUAL, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_of_parameters_of_several_sizes_too(config: Config, shapes: list[tuple[int, ...]]) -> None:
    with oomkit.limit_memory("1GB", device="cpu"):
        pass
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(config, params)
    largest = 256 * 512 * 4
    most = 0
    for call in range(8):
        for p in params:
            p.grad = torch.randn_like(p)
        said = max(oomkit.optim.update_needs(optimizer)[2:])
        peak, kept = _peak(optimizer.step)
        most = max(most, peak - kept)
        assert peak - kept <= said + 8192, call
    if config.name in ("Adam", "AdamW", "NAdam", "SGD") and not config.options.get("maximize"):
        # A large one beside small ones is not taken for two.
        second = sorted(p.nbytes for p in params)[-2:][0] if len(params) > 1 else 0
        assert said <= most + second + 0.05 * largest
