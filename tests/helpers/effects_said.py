"""A model with its optimizer, and what a call says of the side effects of its step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import oomkit

SAID = "this code runs once per micro-batch"


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def said(step: Callable[..., Any], *args: Any) -> str:
    """The warning of a call, or an empty string."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    texts = [str(w.message) for w in caught if issubclass(w.category, oomkit.OomkitWarning)]
    assert len(texts) <= 1, texts
    assert all(SAID in text for text in texts)
    return texts[0] if texts else ""
