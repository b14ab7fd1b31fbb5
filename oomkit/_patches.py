"""What oomkit changes in torch beside the two functions of ``torch.autograd``.

Each is put in place once per process, by the engine (C): nothing is changed at import.
"""

from __future__ import annotations

import functools

import torch

from . import _C


def watch_train() -> None:
    """Tell the engine of every ``train()`` and ``eval()`` before it sets the flag.

    A step that fails between ``model.eval()`` and ``model.train()`` must begin again as it
    began. Both end in ``Module.train``, of every child.
    """
    plain = torch.nn.Module.train

    @functools.wraps(plain)
    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        _C._switch_begins(self)
        return plain(self, mode)

    torch.nn.Module.train = train  # type: ignore[method-assign, assignment]
