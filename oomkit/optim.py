"""What an optimizer's first step will allocate: known per class, from its flags."""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("oomkit")

# State tensors of a parameter's size that the first step() makes, read from the
# `_init_group` of each class in torch.optim; options that add or remove one are asked below.
_STATE_COPIES: dict[str, int] = {
    "Adagrad": 0,  # made in the constructor
    "Adadelta": 2,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "ASGD": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}


def _state_copies(name: str, group: dict[str, Any]) -> int:
    copies = _STATE_COPIES.get(name, 0)
    if name in ("Adam", "AdamW") and group.get("amsgrad"):
        copies += 1
    if name == "SGD" and group.get("momentum"):
        copies += 1
    if name == "RMSprop":
        copies += bool(group.get("momentum")) + bool(group.get("centered"))
    return copies


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a first ``step()`` makes any state that is known, parameters unseen."""
    name = type(optimizer).__name__
    return type(optimizer).__module__.startswith("torch.optim") and any(
        _state_copies(name, group) for group in optimizer.param_groups
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the first ``step()`` of this optimizer allocates, at least.

    Parameters without a gradient get no state and are left out. Optimizers that are not
    torch's own count as 0: nothing is known about them.
    """
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    total = 0
    for group in optimizer.param_groups:
        copies = _state_copies(name, group)
        for p in group["params"]:
            if p.grad is not None:
                total += copies * p.numel() * p.element_size()
    return total


def _largest_parameter(optimizer: torch.optim.Optimizer) -> int:
    sizes = (
        p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )
    return max(sizes, default=0)


def _can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("fused") or group.get("foreach") or group.get("differentiable")
        for group in optimizer.param_groups
    )


def predict_update(optimizer: torch.optim.Optimizer, left: int) -> str | None:
    """Say why the first ``step()`` cannot fit into ``left`` bytes, or return ``None``.

    Called before the step, so that what cannot fit fails before anything has moved. Where
    the state fits but the temporaries of an unfused Adam or AdamW do not (one parameter's
    size, at least), ``fused=True`` is set on its groups, which needs none.

    Args:
        optimizer: the optimizer whose ``state`` is still empty.
        left: bytes that can still be allocated on its device.
    """
    needed = state_bytes(optimizer)
    name = type(optimizer).__name__
    if needed > left:
        return (
            f"{name}.step() needs {needed} bytes for its state and {left} are left: "
            "nothing was updated; use an optimizer with less state, or a larger budget"
        )
    temporaries = _largest_parameter(optimizer)
    if needed and needed + temporaries > left and _can_fuse(optimizer):
        for group in optimizer.param_groups:
            group["fused"] = True
        optimizer.defaults["fused"] = True
        _log.warning(
            "oomkit: %s.step() would not fit with its temporaries: fused=True was set", name
        )
    return None
