"""Whether two states are equal: bit for bit, or up to rounding."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .programs import World

TOLERANCE = 1e-10
SMALL = 1e-3
"""A tensor without a larger element is measured by this: sums of what cancels are near 0."""


def state_of(world: World) -> dict[str, Any]:
    """All that a step may change, copied."""
    optimizer, scheduler = world.optimizer, world.scheduler
    state = {
        "parameters": [p.detach() for p in world.model.parameters()],
        "gradients": [p.grad for p in world.model.parameters()],
        "buffers": list(world.model.buffers()),
        "flags": [p.requires_grad for p in world.model.parameters()]
        + [m.training for m in world.model.modules()],
        "optimizer": optimizer.state_dict() if optimizer else None,
        "scheduler": scheduler.state_dict() if scheduler else None,
        "random": torch.get_rng_state(),
        "attributes": [sorted(vars(o)) for o in (*world.model.modules(), optimizer) if o],
    }
    return copy.deepcopy(state)


def difference(
    got: Any, want: Any, exact: bool, where: str = "", tolerance: float = TOLERANCE
) -> str | None:
    """The first place at which they differ, in words, or None."""
    if type(got) is not type(want):
        return f"{where}: {type(got).__name__} instead of {type(want).__name__}"
    if isinstance(want, torch.Tensor):
        return _tensors(got, want, exact, where, tolerance)
    if isinstance(want, float) and got != want:  # infinities are equal to themselves
        mine, theirs = (torch.tensor(n, dtype=torch.float64) for n in (got, want))
        return _tensors(mine, theirs, exact, where, tolerance)
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"{where}: keys {list(got)} instead of {list(want)}"
        pairs = [(k, got[k], want[k]) for k in want]
    elif isinstance(want, list | tuple):
        if len(got) != len(want):
            return f"{where}: {len(got)} elements instead of {len(want)}"
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(got, want, strict=True))]
    else:
        return None if got == want else f"{where}: {got!r} instead of {want!r}"
    for key, a, b in pairs:
        found = difference(a, b, exact, f"{where}[{key!r}]", tolerance)
        if found is not None:
            return found
    return None


def _tensors(
    got: torch.Tensor, want: torch.Tensor, exact: bool, where: str, tolerance: float
) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{where}: {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
    if exact or not want.is_floating_point():
        return None if torch.equal(got, want) else f"{where}: not equal: {got} for {want}"
    if want.numel() == 0:
        return None
    apart = (got.detach() - want.detach()).abs().max().item()
    scale = max(want.detach().abs().max().item(), SMALL)
    # Not `>`: a NaN is a difference.
    return None if apart <= tolerance * scale else f"{where}: {apart / scale:.1e} apart"
