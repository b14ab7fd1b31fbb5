"""Metrics of torchmetrics that a step updates: those that count its calls, not its rows."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .. import _C
from .._code.spots import is_metric

__all__ = ["Metrics"]

# What rounding in single precision explains, relative: of what is added, and of what was there.
_CLOSE, _ROUNDED = 1e-3, 1e-6
_LARGEST = 1 << 20  # values of a state; one with more is not looked at
_States = dict[str, torch.Tensor]


def _states(metric: torch.nn.Module) -> _States:
    """What it has counted, by name; of a list how many values are in it."""
    found: _States = {}
    for name in metric._defaults:  # type: ignore[union-attr]
        state: Any = getattr(metric, name, None)
        if isinstance(state, list):
            state = torch.tensor(sum(v.numel() for v in state if isinstance(v, torch.Tensor)))
        if isinstance(state, torch.Tensor) and state.numel() <= _LARGEST:
            found[name] = state.detach().to("cpu", torch.float64, copy=True)
    return found


def _are_apart(one: torch.Tensor, two: torch.Tensor, before: float) -> bool:
    """Not where one of them is no number, as what is added to an infinite minimum."""
    largest = max(float(each.abs().amax()) for each in (one, two)) if one.numel() else 0.0
    gap = float((one - two).abs().amax()) if one.numel() else 0.0
    return gap > _CLOSE * largest + _ROUNDED * before


class Metrics:
    """Those of a step's modules, in the whole of a proof and in its parts.

    Args:
        roots: modules, and others that take part.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._roots = roots
        self._now = ""
        self._before: dict[int, _States] = {}
        self._largest: dict[tuple[int, str], float] = {}
        self._added: dict[str, dict[int, _States]] = {}

    def _all(self) -> dict[int, _States]:
        return {id(m): _states(m) for m in _C.modules_of(self._roots) if is_metric(m)}

    def begin(self, run: str) -> None:
        """A run begins."""
        self._now = run if run in ("whole", "parts") else ""
        self._before = self._all() if self._now else {}
        for key, states in self._before.items():
            for name, state in states.items():
                self._largest[key, name] = float(state.abs().amax()) if state.numel() else 0.0

    def end(self) -> None:
        """It has ended."""
        if self._before:
            self._added[self._now] = {
                key: {
                    name: state - before[name]
                    for name, state in states.items()
                    if name in before and state.shape == before[name].shape
                }
                for key, states in self._all().items()
                if (before := self._before.get(key)) is not None
            }

    def tell(self, told: dict[Any, float]) -> None:
        """A split is proven: warns once of each metric in which whole and parts leave other states.

        Args:
            told: what was said at the site.
        """
        one, two = (self._added.get(run, {}) for run in ("whole", "parts"))
        apart = {
            key
            for key, states in one.items()
            for name, state in states.items()
            if (other := two.get(key, {}).get(name)) is not None
            and _are_apart(state, other, self._largest.get((key, name), 0.0))
        }
        names: dict[int, str] = {}
        for root in self._roots if apart else ():
            for name, module in root.named_modules() if isinstance(root, torch.nn.Module) else ():
                if id(module) in apart and (name or id(module) not in names):
                    of = f"{name} of {type(root).__name__}" if name else "the metric"
                    names[id(module)] = f"{of} ({type(module).__name__})"
        for name in names.values():
            if ("metric", name) in told:
                continue
            told["metric", name] = 1.0
            warnings.warn(
                f"oomkit: {name} counts calls of its update(), not rows: of a split batch it gives "
                "another number. Tell it the number of rows (MeanMetric: weight=len(batch))"
                f"{_C.see('side-effects')}",
                _C.OomkitWarning,
                stacklevel=2,
            )
