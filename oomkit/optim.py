"""What an optimizer's update allocates, and which optimizers may update in parts."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from ._ladder.known import is_known

# State tensors of a parameter's size that the first step() makes, read from the
# `_init_group` of each class in torch.optim; options that add or remove one are asked below.
_STATE_COPIES: dict[str, int] = {
    "Adadelta": 2,
    "Adafactor": 0,  # rows and columns
    "Adagrad": 0,  # made in the constructor
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "ASGD": 1,
    "Muon": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}

# Highest allocation during step() above state and gradients, measured with torch 2.13
# (tests/optim measures it again). Where parameters are updated one after the other: in sizes of
# one that is alone, and of one that comes after one of its size, whose last temporaries live
# until a variable is assigned again. For foreach=True: in sizes of all of them.
_TEMPORARIES: dict[str, tuple[float, float, float]] = {
    "Adadelta": (2.0, 3.0, 2.0),
    "Adafactor": (2.1, 3.1, 1.0),  # of a vector; one less of a matrix
    "Adagrad": (1.0, 2.0, 2.0),
    "Adam": (2.0, 3.0, 1.0),
    "AdamW": (2.0, 3.0, 1.0),
    "Adamax": (1.0, 2.0, 1.0),
    "ASGD": (1.0, 1.0, 1.0),  # once it averages, at t0
    "Muon": (3.1, 3.1, 3.1),
    "NAdam": (2.0, 3.0, 1.0),
    "RAdam": (5.0, 6.0, 1.0),
    "RMSprop": (1.0, 2.0, 2.0),
    "Rprop": (3.0, 4.0, 1.0),
    "SGD": (0.0, 0.0, 0.0),
}
_FOREACH_LARGEST = {"Rprop": 1.3}  # and of the largest one: its masks

# What one update takes says nothing about the next: more from some step on.
_UNSTEADY = {"ASGD", "RAdam"}

_UNKNOWN = 2**64 - 1

_registered: dict[type, bool] = {}


def register_optimizer(cls: type, /, *, independent: bool = True) -> None:
    """Declare whether the ``step()`` of an optimizer class treats its parameters one by one.

    Where memory is tight, oomkit makes the update of such an optimizer in parts: it calls
    ``step()`` several times, each time with some of the parameters in ``param_groups`` and
    with the others left out, and the result must be that of one call. torch's own classes
    that do so are known, and many of transformers, timm and bitsandbytes ("The ladder" in
    docs/explanation/design.md); a class that computes anything over all parameters (a norm of all
    gradients, a line search), that counts its calls on itself, or whose ``step()`` writes to
    gradients, is not independent.

    Args:
        cls: the class itself; its subclasses are not included.
        independent: ``False`` takes it back, also for a class that oomkit knows.

    Raises:
        TypeError: ``cls`` is not a class with a ``step`` method.
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        raise TypeError(
            f"register_optimizer() expected an optimizer class, got {cls!r}{_C.see('options')}"
        )
    if not isinstance(independent, bool):
        raise TypeError(
            f"independent expected True or False, got {independent!r}{_C.see('options')}"
        )
    _registered[cls] = independent


def is_independent(optimizer: object) -> bool:
    """Say whether an optimizer's update may be made in parts.

    Args:
        optimizer: an instance. ``differentiable=True`` in any of its groups and a parameter that
            is in them twice make it ``False``.
    """
    cls = type(optimizer)
    if cls not in _registered:
        known = cls.__module__.startswith("torch.optim") and cls.__name__ in _TEMPORARIES
        if not (known and _is_torchs(optimizer)) and not is_known(optimizer):
            return False
    elif not _registered[cls]:
        return False
    groups = getattr(optimizer, "param_groups", [])
    if any(group.get("differentiable") for group in groups):
        return False
    params = [id(p) for group in groups for p in group.get("params", ())]
    return len(set(params)) == len(params)


def _state_copies(name: str, group: dict[str, Any]) -> int:
    copies = _STATE_COPIES.get(name, 0)
    if name in ("Adam", "AdamW") and group.get("amsgrad"):
        copies += 1
    if name == "SGD" and group.get("momentum"):
        copies += 1
    if name == "RMSprop":
        copies += bool(group.get("momentum")) + bool(group.get("centered"))
    return copies


def _is_torchs(optimizer: object) -> bool:
    cls = type(optimizer)
    return getattr(torch.optim, cls.__name__, None) is cls


def _missing_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Any) -> int:
    """Bytes of state that ``step()`` makes for one parameter."""
    return 0 if p.grad is None else _first_state(optimizer, group, p)


def _first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Any) -> int:
    """The same, once it has a gradient."""
    if optimizer.state.get(p):
        return 0
    if type(optimizer).__name__ == "Adafactor":
        rows = p.numel() // p.shape[-1] if p.dim() > 1 else p.numel()
        columns = p.numel() // p.shape[-2] if p.dim() > 1 else 0
        return int((rows + columns) * p.element_size())
    copies = _state_copies(type(optimizer).__name__, group)
    return int(copies * p.numel() * p.element_size())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the next ``step()`` of this optimizer allocates, at least.

    Parameters without a gradient get no state and are left out, as are those that have
    theirs already. Optimizers that are not torch's own count as 0: nothing is known about
    them.
    """
    if not _is_torchs(optimizer):
        return 0
    return sum(
        _missing_state(optimizer, group, p)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def first_state_bytes(optimizer: Any) -> int:
    """Bytes of state that ``step()`` will have made once every parameter had a gradient.

    Args:
        optimizer: one of torch's own classes; others count as 0.
    """
    if not _is_torchs(optimizer):
        return 0
    return sum(
        _first_state(optimizer, group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


def _factors(name: str, group: dict[str, Any]) -> tuple[float, float, float]:
    """Temporaries in sizes of one parameter alone, of one after another, of all at once."""
    alone, after, foreach = _TEMPORARIES[name]
    decay = bool(group.get("weight_decay")) and name not in ("AdamW", "Adafactor", "Muon")
    if name == "SGD" and group.get("momentum") and group.get("nesterov"):
        alone, after, foreach = alone + 1.0, after + 1.0, 1.0
    if name == "RMSprop" and (group.get("momentum") or group.get("centered") or decay):
        foreach = 2.0
    if decay:
        alone, after = alone + 1.0, after + 1.0
        foreach = max(foreach, 1.0) + (1.0 if name in ("NAdam", "Adadelta") else 0.0)
    if group.get("maximize"):
        alone, after, foreach = alone + 1.0, after + 2.0, foreach + 1.0
    return after if group.get("capturable") else alone, after, foreach


def _temporaries(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes for one parameter after the other, and bytes for all that are updated together."""
    fixed = together = 0
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        sizes = [p.numel() * p.element_size() for p in group["params"] if p.grad is not None]
        if not sizes or group.get("fused"):
            continue
        alone, after, foreach = _factors(name, group)
        is_foreach = group.get("foreach")
        if is_foreach is None:
            is_foreach = all(p.device.type != "cpu" for p in group["params"])
        largest = sorted(sizes)[-2:]
        if is_foreach:
            beside = _FOREACH_LARGEST.get(name, 0.0) * largest[-1]
            together = max(together, int(foreach * sum(sizes) + beside))
        else:
            # No variable takes more than `alone` times its own parameter's size, or more than
            # that of one before it; all of them no more than `after` times where both are equal.
            second = largest[0] if len(largest) > 1 else 0
            fixed = max(fixed, int(alone * largest[-1] + (after - alone) * second))
    return fixed, together


def _steady_key(optimizer: torch.optim.Optimizer) -> int:
    """The same number for updates that take the same; 0 where that is not known."""
    seen: list[Any] = []
    for group in optimizer.param_groups:
        options = [v for k, v in group.items() if k != "params"]
        seen.append([bool(v) for v in options if v is None or isinstance(v, (bool, int, float))])
        for p in group["params"]:
            if p.grad is not None and p.grad.layout is not torch.strided:
                return 0  # as many temporaries as there are entries
            seen.append(p.grad is not None and (p.numel(), p.grad.element_size()))
    return hash(repr(seen)) & 0xFFFFFFFFFFFFFF | 1


def temporary_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that ``step()`` allocates on the way and frees again, at most, as an estimate.

    Args:
        optimizer: one of torch's own classes; others count as 0.
    """
    return max(_temporaries(optimizer)) if _is_torchs(optimizer) else 0


def update_needs(optimizer: Any) -> tuple[int, int, int, int]:
    """What the next ``step()`` needs, in bytes, before anything has moved.

    Returns:
        Whether it may go in parts (2: and a part may be repeated where it failed, because
        ``step()`` writes to parameters and state alone); the state that it makes;
        temporaries of one parameter after the other (2**64 - 1: not known), and of all
        parameters together.
    """
    parts = int(is_independent(optimizer))
    torchs = _is_torchs(optimizer) and type(optimizer).__name__ in _TEMPORARIES
    # Known ones are tested for it, also where somebody has declared them. A fused update under
    # a GradScaler divides the gradients where they lie.
    scaled = getattr(optimizer, "grad_scale", None) is not None
    parts += bool(parts and not scaled and (torchs or type(optimizer) not in _registered))
    if not torchs:
        return parts, 0, _UNKNOWN, 0
    return parts, state_bytes(optimizer), *_temporaries(optimizer)


def _update_figures(optimizer: Any) -> tuple[int, int, int, int, int]:
    """The same, and a key: what one update was seen to take holds for others of its key.

    0: it holds for none, and is only a lower bound.
    """
    needs = update_needs(optimizer)
    if needs[2] == _UNKNOWN or type(optimizer).__name__ in _UNSTEADY:
        return *needs, 0
    return *needs, _steady_key(optimizer)
