"""Two networks, their optimizers and data, with everything that a refusal must not change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from zoo import SEED

from helpers.seeds import seed_all

IGNORE = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


class World:
    """Two networks with a buffer each, their optimizers (with state), data, a generator."""

    def __init__(self) -> None:
        seed_all(SEED)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.x, self.y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        self.train()

    def train(self) -> None:
        """An ordinary update, so that there are gradients, moments and statistics."""
        (
            F.cross_entropy(self.net(self.x), self.y) + self.critic(self.net(self.x)).mean()
        ).backward()
        self.opt.step()
        self.critic_opt.step()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def objects(self) -> list[Any]:
        return [self.net, self.critic, self.opt, self.critic_opt, *self.net, *self.critic]

    def state(self) -> list[Any]:
        modules = (self.net, self.critic)
        return copy.deepcopy(
            [
                [m.state_dict() for m in modules],
                [[p.grad for p in m.parameters()] for m in modules],
                [o.state_dict() for o in (self.opt, self.critic_opt)],
                torch.get_rng_state(),
            ]
        ) + [
            [sorted(vars(o)) for o in self.objects()],
            dict(torch_module._global_forward_pre_hooks),
        ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
