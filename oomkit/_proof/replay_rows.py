"""Rows of a replay beside those that the call had returned."""

from __future__ import annotations

import torch

from .diagnose import replay_differs, tolerance


class ReplayRows:
    """Of one replay: each micro-batch is added, in order, then all of them are judged."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole.detach().double()
        self._limit = 0.0
        self._made = 0.0
        self._apart = 0.0
        self._fits = True

    def add(self, part: torch.Tensor, start: int, dim: int) -> None:
        """The result of the micro-batch that begins at row `start`."""
        self._limit = max(self._limit, tolerance(part))
        made = part.detach().double()
        whole = self._whole.narrow(dim, start, made.shape[dim]) if self._fits else made
        self._fits = self._fits and whole.shape == made.shape
        if self._fits and made.numel():
            self._made += float(made.sum())
            apart = (made - whole).abs()[torch.isfinite(whole)]
            self._apart = max(self._apart, float(apart.max()) if apart.numel() else 0.0)

    def judge(self, noise: bool) -> str | None:
        """What to say where they differ by more than rounding, or None.

        Random numbers and batch statistics make other rows: then their sum is looked at.
        """
        finite = self._whole[torch.isfinite(self._whole)].abs()
        if not self._fits or not finite.numel():
            return None
        if noise:
            return replay_differs(
                float(self._whole.sum()), self._made, float(finite.sum()), self._limit, True
            )
        largest = float(finite.max())
        if not self._apart > self._limit * max(largest, 1e-3):
            return None
        return (
            "ran again in micro-batches for its backward(), and one of their rows differs by "
            f"{self._apart:.2g} from what the call had returned (the largest value is "
            f"{largest:.6g}), so their gradients are not those of that call. Either something "
            "that the step reads has changed since (a global, an attribute), or the step "
            "couples the samples of a batch"
        )
