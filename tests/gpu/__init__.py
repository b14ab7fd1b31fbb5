"""The promises on a real device: out-of-memory by a share of its memory (make gpu).

Sizes are in units of 16 MiB: most errors come at a limit of some 1.6 GiB. OOMKIT_GPU_DRY=1 runs
what can be run on the CPU, in units of 64 KiB, under oomkit's budget there: it shows that the tests
themselves work, and nothing about a device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import oomkit

DRY = os.environ.get("OOMKIT_GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
MIB = 1 << 20
UNIT = 1 << 16 if DRY else 16 * MIB

on_a_device = pytest.mark.skipif(DRY, reason="there is nothing like it on the CPU")


def allocated() -> int:
    return oomkit.memory(DEVICE).allocated or 0


def held() -> int:
    """What the allocator has taken; on the CPU it keeps nothing."""
    found = oomkit.memory(DEVICE)
    return found.reserved if found.reserved is not None else found.allocated or 0


def settle() -> None:
    """Nothing but what is referred to is left."""
    gc.collect()
    oomkit.cleanup()


def block(units: float) -> torch.Tensor:
    return torch.empty(max(1, int(units * UNIT)), dtype=torch.uint8, device=DEVICE)


def _in_what_is_left() -> list[torch.Tensor]:
    """Where a library has taken its workspace out of a segment, the rest cannot be given back, and
    would be more room than a test has asked for."""
    if DRY:
        return []
    blocks = (b for segment in torch.cuda.memory_snapshot() for b in segment["blocks"])
    free = (b["size"] for b in blocks if b["state"] == "inactive")
    return [block(size / UNIT) for size in sorted(free, reverse=True) if size > MIB]


@contextmanager
def room(units: float) -> Iterator[None]:
    """At most this much beyond what is held now."""
    settle()
    filled = _in_what_is_left()
    with oomkit.limit_memory(held() + int(units * UNIT), device=DEVICE):
        yield
    del filled


def to_device(value: Any) -> Any:
    """A batch with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {key: to_device(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item) for item in value)
    return value


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what differs."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value of its tensor."""
    worst = 0.0
    for name, value in one.items():
        if value.is_floating_point():
            scale = value.abs().max().item() or 1.0
            worst = max(worst, (value - other[name]).abs().max().item() / scale)
    return worst


def random_state() -> torch.Tensor:
    return torch.get_rng_state() if DRY else torch.cuda.get_rng_state()
