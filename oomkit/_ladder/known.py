"""Optimizers of other packages whose ``step()`` treats its parameters one by one.

They are known by module and name: none of these packages is imported. Whether calling
``step()`` once per part is the whole update depends on options, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

# The first version that was read and tested. In earlier ones of timm some classes choose an
# operation by the first parameter of a list, or write to gradients, which no part puts back.
_SINCE = {"timm": (1, 0, 31), "bitsandbytes": (0, 50, 2)}


def _always(optimizer: Any) -> bool:
    return True


def _are_together(group: dict[str, Any]) -> bool:
    """Are the parameters of a group updated by operations on lists of them?"""
    foreach = group.get("foreach")
    if foreach is None:
        return any(p.device.type != "cpu" for p in group["params"])
    return bool(foreach)


def _alone(optimizer: Any) -> bool:
    """One that chooses its operations by what it finds in the whole list."""
    return not any(map(_are_together, optimizer.param_groups))


def _alike(optimizer: Any) -> bool:
    """One that gives torch lists as they are: where types differ torch takes another way."""
    for group in filter(_are_together, optimizer.param_groups):
        if len({(p.dtype, p.device) for p in group["params"]}) > 1:
            return False
        if group.get("clipping_threshold") is not None:  # norms of a list
            return False
    return True


def _without_overrides(optimizer: Any) -> bool:
    """Options by a parameter's place in its group, which is another one in a part.

    Paged state is not moved to the host: CUDA does that. Norms are added up in no order.
    """
    manager, args = getattr(optimizer, "mng", None), getattr(optimizer, "args", None)
    if manager is None or args is None or getattr(optimizer, "is_paged", True):
        return False
    if manager.index2config or manager.module_weight_config_triple:
        return False
    return args.max_unorm == 0 and all(
        p.is_contiguous() for group in optimizer.param_groups for p in group["params"]
    )


# Left out of timm: Lamb and Adan count calls of step() in their groups; Kron draws from one
# stream of random numbers; Adahessian differentiates all gradients together; Lookahead is a
# wrapper. Left out of bitsandbytes: LAMB and LARS (norms), what is paged, and AdEMAMix32bit,
# whose state is too small for its update.
KNOWN: dict[str, dict[str, Callable[[Any], bool]]] = {
    "transformers.optimization": {"Adafactor": _always},
    "timm.optim": {
        "Adafactor": _always,
        "AdafactorBigVision": _always,
        "AdamP": _always,
        "MADGRAD": _always,
        "Mars": _always,
        "NAdamLegacy": _always,
        "NvNovoGrad": _always,
        "RAdamLegacy": _always,
        "SGDP": _always,
        "AdamWLegacy": _alike,
        "Adopt": _alike,
        "Lion": _alike,
        "Muon": _alike,
        "NAdamW": _alike,
        "RMSpropTF": _alike,
        "SGDW": _alike,
        "AdaBelief": _alone,
        "LaProp": _alone,
        "Lars": _alone,
    },
    "bitsandbytes.optim": {
        name + bits: _without_overrides
        for name in ("Adagrad", "Adam", "AdamW", "AdEMAMix", "Lion", "RMSprop", "SGD")
        for bits in ("", "8bit", "32bit")
        if name + bits != "AdEMAMix32bit"
    },
}


def _is_recent(package: str) -> bool:
    """Is it a version of which something is known? Of an unreadable one nothing is."""
    since = _SINCE.get(package)
    if since is None:
        return True
    version = str(getattr(sys.modules.get(package), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) >= since


def is_known(optimizer: object) -> bool:
    """Say whether an optimizer is of one of these classes, with options that allow parts.

    Args:
        optimizer: an instance; one of a subclass from elsewhere is not known.
    """
    cls = type(optimizer)
    for prefix, classes in KNOWN.items():
        if cls.__module__ == prefix or cls.__module__.startswith(prefix + "."):
            allows = classes.get(cls.__name__)
            module = sys.modules.get(cls.__module__)
            if allows is None or getattr(module, cls.__name__, None) is not cls:
                return False
            return _is_recent(prefix.partition(".")[0]) and allows(optimizer)
    return False
