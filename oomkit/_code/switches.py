"""Switches of torch's that are the process's: a step may set one and set it back at its end.

An attempt that fails in between must not leave it so. Each has a function that reads it and one
that writes it; the engine calls them where the code of a step sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Switch = tuple[Callable[[], Any], Callable[[Any], Any]]

_cuda = torch.backends.cuda


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(was: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*was)


_deterministic = (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
_SETTERS: list[tuple[Any, Switch]] = [
    (torch.set_default_dtype, (torch.get_default_dtype, torch.set_default_dtype)),
    (torch.use_deterministic_algorithms, _deterministic),
    (torch.set_deterministic_debug_mode, _deterministic),
    (torch.set_num_threads, (torch.get_num_threads, torch.set_num_threads)),
    (
        torch.set_float32_matmul_precision,
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ),
    (torch.autograd.set_detect_anomaly, (_anomaly, _set_anomaly)),
    (_cuda.enable_flash_sdp, (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp)),
    (
        _cuda.enable_mem_efficient_sdp,
        (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    ),
    (_cuda.enable_math_sdp, (_cuda.math_sdp_enabled, _cuda.enable_math_sdp)),
    (_cuda.enable_cudnn_sdp, (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp)),
]
_BY_SETTER = {id(setter): (setter.__name__, switch) for setter, switch in _SETTERS}
_BY_NAME: dict[tuple[int, str], Switch] = {}


def set_by(function: Any) -> tuple[str, Switch] | None:
    """The switch that a function of torch's sets, with a name for it."""
    return _BY_SETTER.get(id(function))


def attribute_of(owner: Any, name: str) -> Switch | None:
    """A switch that is an attribute, as `torch.backends.cudnn.benchmark` is."""
    if not str(type(owner).__module__).startswith("torch.backends."):
        return None
    where = (id(owner), name)
    if where not in _BY_NAME:
        _BY_NAME[where] = (partial(getattr, owner, name), partial(setattr, owner, name))
    return _BY_NAME[where]
