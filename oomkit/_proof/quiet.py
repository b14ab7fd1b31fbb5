"""Modules that would make a part of a batch differ from the whole by chance: what draws random
numbers, and norms that keep running statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .values import norm

__all__ = ["Quiet"]

_LOWER = 2.0**-8  # of a GradScaler's scale: a power of two, which rounds nothing
_LOWERED = 3  # times: what overflows still is not of the scale


def _is_random(module: torch.nn.Module) -> bool:
    """Whether a module draws random numbers in training and does nothing else there."""
    name = type(module).__name__.lower()
    return (
        isinstance(module, (torch.nn.modules.dropout._DropoutNd, torch.nn.RReLU))
        or ("drop" in name or "stochasticdepth" in name)
        and next(module.children(), None) is None
    )


def _is_norm(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None
    )


def _is_batch_norm(module: torch.nn.Module) -> bool:
    """One without running statistics: those of the batch are all that it has."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is None


class _Affine:
    """A normalisation by zeros and ones in the place of one by the statistics of a batch."""

    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        mean = input.new_zeros(module.num_features)
        return torch.nn.functional.batch_norm(
            input, mean, torch.ones_like(mean), module.weight, module.bias, False, 0.0, module.eps
        )


class Quiet:
    """Modules that would make a part differ from the whole by chance, for the length of a proof.

    `saved` is put back by the engine, too, which needs no memory for it.
    """

    __slots__ = ("_lowered", "_overflows", "_scaler", "saved")

    def __init__(self) -> None:
        self.saved: list[tuple[Any, ...]] = []
        self._scaler: Any = None
        self._overflows = False
        self._lowered = 0

    def update(self, target: Any, gradients: Iterable[torch.Tensor]) -> None:
        """A call for an optimizer: through a GradScaler, it tells whether its scale fits."""
        if hasattr(target, "_init_scale"):
            self._scaler = target
            self._overflows |= not all(math.isfinite(norm(g)) for g in gradients)

    def lower(self) -> bool:
        """Gradients that overflow fp16 tell nothing of what they are made of: a smaller scale from
        the next `enter` on. Whether there is one to try."""
        again = self._overflows and self._lowered < _LOWERED
        self._lowered += again
        self._overflows = False
        return again

    def _scale(self) -> None:
        own = self._scaler.__dict__
        name = "_init_scale" if own.get("_scale") is None else "_scale"
        self._set(self._scaler, name, own[name] * _LOWER**self._lowered)

    def _set(self, module: Any, name: str, value: Any) -> None:
        own = module.__dict__
        self.saved.append((own, name, *((own[name],) if name in own else ())))
        own[name] = value

    def still(self, module: torch.nn.Module) -> None:
        self._set(module, "training", False)
        # A step that begins with model.train() must not undo it.
        self._set(module, "train", lambda mode=True: module)

    def enter(self, modules: list[torch.nn.Module], everything: bool) -> None:
        if self._lowered:
            self._scale()
        for module in modules:
            if _is_batch_norm(module):
                self._set(module, "forward", _Affine(module))
            if everything or _is_random(module) or _is_norm(module):
                self.still(module)
            elif (
                isinstance(module, (torch.nn.RNNBase, torch.nn.MultiheadAttention))
                and module.dropout
            ):
                self._set(module, "dropout", 0.0)

    def leave(self) -> None:
        while self.saved:
            own, name, *value = self.saved[-1]
            if value:
                own[name] = value[0]
            else:
                own.pop(name, None)
            self.saved.pop()
