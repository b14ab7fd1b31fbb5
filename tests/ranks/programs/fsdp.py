"""Steps over fully_shard(), failed at chosen places on chosen ranks: see ddp.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ..launch import Rank
from .ddp import ROWS, STEPS, World, sweep_of

OPTIONS = (
    "plain",
    "hsdp",
    "bf16",
    "offload",
    "resharded",
    "together",
    "uneven",
    "gradients",
    "clip",
    "scaler",
    "norm",
    "dropout",
    "two_models",
    "frozen",
    "checkpoint",
    "accumulation",
    "accumulation_bf16",
    "parts",
    "parts_proof",
    "proof",
    "many",
    "many_unused",
)
OF_FOUR = ("partly",)
"""Options that need four ranks."""


class Blocks(nn.Module):
    def __init__(self, option: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 9), nn.Linear(9, 10), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(9) if option == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.3) if option == "dropout" else nn.Identity()
        self.frozen: Any = None
        self.saves = option == "checkpoint"
        # One group, whose mask is too long for a told step where some are not used.
        count = 90 if option.startswith("many") else 0
        self.many = nn.ParameterList([torch.randn(3) for _ in range(count)])
        self.used = [i for i in range(len(self.many)) if option == "many" or i % 7 != 3]

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        h = torch.tanh(
            checkpoint(self.middle, h, use_reentrant=False) if self.saves else self.middle(h)
        )
        out: torch.Tensor = self.last(h)
        if self.used:
            weights = torch.arange(1, len(self.used) + 1, dtype=out.dtype) / 1000
            out = out + weights @ torch.stack([self.many[i] for i in self.used])
        return out


class Sharded(World):
    exact = frozenset(OPTIONS) - {"norm", "dropout", "bf16", "accumulation_bf16"} | set(OF_FOUR)
    anew = frozenset({"proof", "parts_proof", "accumulation", "accumulation_bf16"})

    def __init__(self, option: str, rank: Rank) -> None:
        self.given, self.rank = option, rank
        self.before_hook = []
        self.option = option.removesuffix("_bf16")
        torch.manual_seed(11)
        self.nets = self._nets()
        given = self._given()
        for net in self.nets:
            for part in (net.first, net.middle, net.last):
                fully_shard(part, **given)
            fully_shard(net, **given)
        self.models: Any = self.nets
        self.reference: Any = None
        if option == "frozen":
            self.reference = self.nets.pop()
            self.reference.requires_grad_(False)
        params = [p for net in self.nets for p in net.parameters()]
        self.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=option == "scaler")
        self.seen: list[torch.Tensor | None] = []

    def _given(self) -> dict[str, Any]:
        world = self.rank.world
        given: dict[str, Any] = {}
        if self.option == "hsdp":
            given["mesh"] = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("r", "s"))
        elif self.given.endswith("bf16"):
            given["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        elif self.option == "offload":
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        how = {"resharded": True, "together": False, "partly": 2}.get(self.option)
        return given if how is None else {**given, "reshard_after_forward": how}

    def _nets(self) -> list[Any]:
        several = self.option in ("two_models", "frozen")
        return [Blocks(self.option) for _ in range(1 + several)]

    def _step(self, x: torch.Tensor, y: torch.Tensor, head: int, index: int) -> torch.Tensor:
        if not (self.option == "accumulation" and index % 2 == 1):
            self.optimizer.zero_grad(set_to_none=self.option != "gradients")
        if self.option.startswith("parts"):
            return self._in_parts(x, y)
        if self.reference is not None:
            with torch.no_grad():
                y = y + self.reference(x).to(y.dtype)
        loss = sum(F.mse_loss(net(x).to(y.dtype), y) for net in self.nets)
        self.scaler.scale(loss).backward()
        if self.option == "accumulation" and index % 2 == 0:
            assert isinstance(loss, torch.Tensor)
            return loss.detach()
        if self.option == "clip":
            norm: Any = nn.utils.clip_grad_norm_(self.nets[0].parameters(), 0.3)
            assert norm.full_tensor() >= 0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert isinstance(loss, torch.Tensor)
        return loss.detach()

    def _in_parts(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Two backwards in one step, of which the first is not reduced."""
        net, losses = self.nets[0], []
        for part, reduces in ((0.25, False), (0.75, True)):
            net.set_requires_gradient_sync(reduces)
            losses.append(part * F.mse_loss(net(x), y))
            losses[-1].backward()
        total = (losses[0] + losses[1]).detach()  # what lacks after the update is an error
        self.optimizer.step()
        return total

    def accumulates(self, goes_on: bool, stack: contextlib.ExitStack) -> None:
        self.nets[0].set_requires_gradient_sync(not goes_on)

    def kept(self) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for net in self.nets:
            for state in net._get_fsdp_state()._state_ctx.all_states:
                for group in state._fsdp_param_groups:
                    for p in group.fsdp_params:
                        own = getattr(p, "_unsharded_param", None)
                        grad = own.grad if own is not None else None
                        for one in (p.unsharded_accumulated_grad, grad):
                            found.append(None if one is None else one.clone())
        return found

    def expected(self) -> list[list[torch.Tensor | None]]:
        """Gradients of the union of all ranks' rows, as one process computes them."""
        torch.manual_seed(11)
        nets = self._nets()
        reference = nets.pop() if self.option == "frozen" else None
        params = [p for net in nets for p in net.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.5)
        found: list[list[torch.Tensor | None]] = []
        for index in range(STEPS):
            if not (self.option == "accumulation" and index % 2 == 1):
                optimizer.zero_grad()
            for rank in range(self.rank.world):
                x, y = self.batch(rank, index)
                if reference is not None:
                    y = y + reference(x).detach()
                loss = sum(F.mse_loss(net(x), y) for net in nets)
                assert isinstance(loss, torch.Tensor)
                (loss / self.rank.world).backward()
            if self.option == "accumulation" and index % 2 == 0:
                found.append([])  # each rank has its own
                continue
            if self.option == "clip":
                nn.utils.clip_grad_norm_(params, 0.3)
            found.append([None if p.grad is None else p.grad.clone() for p in params])
            optimizer.step()
        return found


def sweep(rank: Rank) -> dict[str, Any]:
    return sweep_of(Sharded, rank)


assert ROWS >= 4
