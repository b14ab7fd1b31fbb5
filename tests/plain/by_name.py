"""What a step of some tests calls out of a module and a table, as registries of losses do."""

from __future__ import annotations

from typing import Any

import torch


def plain(h: torch.Tensor, owner: Any) -> torch.Tensor:
    return h


def remember(h: torch.Tensor, owner: Any) -> torch.Tensor:
    past = getattr(owner, "past", None)
    owner.past = h.detach().mean(0)
    return h if past is None else h + past


def attack(model: Any, x: torch.Tensor) -> None:
    weight = model[0].weight
    weight.data.add_(0.3)
    model(x).sum()
    weight.data.sub_(0.3)


FEATURES = {"plain": plain, "remember": remember}
BACKWARDS = {"plain": lambda model, x: None, "attack": attack}
