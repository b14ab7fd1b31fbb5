"""Steps with the user's own hooks on parameters and on the nodes that add to their gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oomkit
from oomkit.testing import inject_oom

from ..launch import Rank
from .common import equal, gradients, prepare, raised

WHERE = ("tensor", "node")


def _hook(p: torch.Tensor, where: str, name: str, ran: list[str]) -> Any:
    """One that adds 1 to the gradient, where that is reduced: not after the reducer's own."""

    def adds(gradient: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        return gradient + 1.0

    def adds_before(gradients: Any) -> Any:  # None: nothing is added to the gradient
        return gradients if gradients[0] is None else (adds(gradients[0]),)

    def adds_in_place(*_: Any) -> None:
        ran.append(name)
        p.grad.add_(1.0)  # type: ignore[union-attr]

    if where == "tensor":
        return p.register_hook(adds)
    if where == "accumulated":
        return p.register_post_accumulate_grad_hook(adds_in_place)
    node: Any = torch.autograd.graph.get_gradient_edge(p).node
    return node.register_prehook(adds_before)


def _model(static: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return DistributedDataParallel(layers, bucket_cap_mb=0.0002, static_graph=static)


def _calls(where: str, static: bool, models: int, step: Callable[..., Any]) -> list[Any]:
    """Gradients and hooks that ran, in each of three whole calls; the last one without hooks.

    Hooks after the accumulation come with the second call: before the first one they are a reason
    not to agree on a step.
    """
    used = [_model(static) for _ in range(models)]
    ran: list[str] = []
    handles = []
    found = []
    for call in range(4):
        if call == (where == "accumulated"):
            handles = [
                _hook(p, where, f"{index} {name}", ran)
                for index, model in enumerate(used)
                for name, p in model.named_parameters()
            ]
        if call == 3:
            for handle in handles:
                handle.remove()
        for model in used:
            model.zero_grad()
        step(used)
        found.append([[gradients(model) for model in used], [*ran]])
        ran.clear()
    return found


def whole(rank: Rank) -> dict[str, list[Any]]:
    """Whole calls, as with torch alone: are gradients the same, and hooks, and in which order?"""
    _, _, x, y = prepare(rank)
    found = {}
    for where in rank.arguments["where"]:
        for static, models in ((False, 1), (False, 2), (True, 1)):

            def step(used: list[nn.Module]) -> None:
                torch.stack([F.mse_loss(model(x), y) for model in used]).sum().backward()

            expected = _calls(where, static, models, step)
            wrapped = oomkit.auto_batch(verify=False)(step)
            ours = _calls(where, static, models, wrapped)
            found[f"{where}, {static}, {models}"] = [
                all(
                    equal(a, b)
                    for (now, _), (then, _) in zip(ours, expected, strict=True)
                    for a, b in zip(now, then, strict=True)
                ),
                [ran for _, ran in ours],
                [ran for _, ran in expected],
            ]
    return found


def split(rank: Rank) -> list[Any]:
    """A hook that scales each gradient is exact in micro-batches, too; one that adds to it is not,
    and what the call then says is what it says with one process."""
    _, _, x, y = prepare(rank)
    found = []
    for scale, more in ((2.0, 0.0), (1.0, 1.0)):
        expected = _model(False)
        model = _model(False)
        for of in (expected, model):
            for p in of.parameters():
                p.register_hook(lambda g, a=scale, b=more: a * g + b)
        F.mse_loss(expected(x), y).backward()

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor, of: nn.Module = model) -> None:
            F.mse_loss(of(x), y).backward()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fails = inject_oom(nth=1, phase="backward")
            with fails if rank.rank == 1 else contextlib.nullcontext():
                said = raised(lambda f=step: f(x, y))
        told = [str(w.message) for w in caught if "hook" in str(w.message)]
        found.append([said, equal(gradients(model), gradients(expected)), told])
    return found
