"""Reinforcement learning and metric learning: rows that depend on each other or have weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oomkit

from .world import ROWS, World, program

OBSERVED = 6
ACTIONS = 3


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVED, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.body(seen)
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        return policy, self.critic(hidden).squeeze(-1)


def _normalised(advantage: torch.Tensor) -> torch.Tensor:
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def _train_ppo(world: World, decorate: Callable[..., Any], inside: bool) -> None:
    model = ActorCritic().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    world.keep(model, optimizer)

    @decorate
    def update(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        policy, value = model(batch["seen"])
        advantage = _normalised(batch["advantage"]) if inside else batch["advantage"]
        ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        actor = -torch.min(ratio * advantage, clipped * advantage).mean()
        critic = 0.5 * (value - batch["wanted"]).pow(2).mean()
        loss = actor + 0.5 * critic - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss.item(), "share_clipped": (ratio != clipped).double().mean().item()}

    for _ in range(2):
        seen = torch.randn(16, OBSERVED).double()
        with torch.no_grad():
            policy, value = model(seen)
            action = policy.sample()
        advantage = torch.randn(16).double()
        rollout = {
            "seen": seen,
            "action": action,
            "log_prob": policy.log_prob(action),
            "advantage": advantage if inside else _normalised(advantage),
            "wanted": advantage + value,
        }
        for rows in torch.randperm(16).split(9):
            told = update({name: column[rows] for name, column in rollout.items()})
            world.note(told["loss"])
            world.note(told["share_clipped"])


@program(
    "refused",
    decorated="@oomkit.auto_batch(verify=True, min_micro_batch=2)",
    says="cannot split .* exactly",
)
def ppo_normalised_inside(world: World) -> None:
    """PPO: advantages are normalised in the step, over the rows that it sees."""
    _train_ppo(world, world.auto_batch(verify=True, min_micro_batch=2), inside=True)


@program("equal")
def ppo_normalised_outside(world: World) -> None:
    """PPO: advantages are normalised before the minibatches are cut."""
    _train_ppo(world, world.auto_batch, inside=False)


def _q_networks() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    online = nn.Sequential(nn.Linear(OBSERVED, 16), nn.ReLU(), nn.Linear(16, ACTIONS)).double()
    target = copy.deepcopy(online).requires_grad_(False)
    return online, target, torch.optim.AdamW(online.parameters(), lr=1e-3, amsgrad=True)


def _transitions() -> dict[str, torch.Tensor]:
    return {
        "seen": torch.randn(ROWS, OBSERVED).double(),
        "action": torch.randint(0, ACTIONS, (ROWS,)),
        "reward": torch.randn(ROWS).double(),
        "following": torch.randn(ROWS, OBSERVED).double(),
        "done": torch.rand(ROWS) < 0.2,
        "share": torch.rand(ROWS).double(),
    }


def _td_error(online: nn.Module, target: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    value = online(batch["seen"]).gather(1, batch["action"][:, None]).squeeze(1)
    with torch.no_grad():
        best = target(batch["following"]).max(dim=1).values
        wanted = batch["reward"] + 0.99 * best * ~batch["done"]
    return value - wanted


def _soften(online: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for new, old in zip(online.parameters(), target.parameters(), strict=True):
            old.mul_(0.95).add_(new, alpha=0.05)


@program("equal", decorated="@oomkit.auto_batch, the target network under `current().is_last`")
def dqn_soft_update(world: World) -> None:
    """DQN: Huber loss, a soft update of the target network in the last micro-batch."""
    online, target, optimizer = _q_networks()
    world.keep(online, target, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        error = _td_error(online, target, batch)
        loss = F.smooth_l1_loss(error, torch.zeros_like(error))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        if oomkit.current().is_last:
            _soften(online, target)
        return loss.item()

    for _ in range(3):
        world.note(train_step(_transitions()))


@program("said", says="moves once", by_proof=True)
def dqn_soft_update_always(world: World) -> None:
    """The same without is_last: each micro-batch would move the target network. It moves once."""
    online, target, optimizer = _q_networks()
    world.keep(online, target, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        loss = _td_error(online, target, batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _soften(online, target)
        return loss.item()

    for _ in range(3):
        world.note(train_step(_transitions()))


@program("equal")
def prioritised_replay(world: World) -> None:
    """Importance weights: a loss per sample times its weight, the errors are returned."""
    online, target, optimizer = _q_networks()
    priorities = torch.zeros(ROWS).double()
    world.keep(online, target, optimizer, priorities)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        error = _td_error(online, target, batch)
        per_sample = F.mse_loss(error, torch.zeros_like(error), reduction="none")
        loss = (batch["share"] * per_sample).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), error.detach().abs()

    for _ in range(3):
        loss, errors = train_step(_transitions())
        priorities.copy_(errors)
        _soften(online, target)
        world.note(loss)


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the function of the loss")
def importance_weights(world: World) -> None:
    """A loss per sample is returned; the caller multiplies it by weights and runs backward."""
    model = nn.Linear(OBSERVED, ACTIONS).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def per_sample(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    for _ in range(3):
        x, y = torch.randn(ROWS, OBSERVED).double(), torch.randint(0, ACTIONS, (ROWS,))
        share = torch.rand(ROWS).double()
        optimizer.zero_grad()
        loss = (per_sample(x, y) * share).sum() / share.sum()
        loss.backward()
        optimizer.step()
        world.note(loss.item())


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(12, 8)
        self.text = nn.Embedding(20, 8)
        self.temperature = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        left = F.normalize(self.image(images), dim=-1)
        right = F.normalize(self.text(tokens).mean(1), dim=-1)
        return self.temperature.exp() * left @ right.t()


def _contrast(logits: torch.Tensor) -> torch.Tensor:
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


def _captions() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 12).double(), torch.randint(0, 20, (ROWS, 5))


@program("refused", decorated="@oomkit.auto_batch(backward=True)", says="cannot split .* exactly")
def clip_loss(world: World) -> None:
    """CLIP-like: every other row of the batch is a negative."""
    model = TwoTowers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch(backward=True)
    def contrast(images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return _contrast(model(images, tokens))

    for _ in range(3):
        optimizer.zero_grad()
        world.note(contrast(*_captions()))
        optimizer.step()


@program("refused", decorated="@oomkit.auto_batch(verify=True)", says="cannot split .* exactly")
def clip_step(world: World) -> None:
    """The same as a whole step, with verify=True."""
    model = TwoTowers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch(verify=True)
    def train_step(images: torch.Tensor, tokens: torch.Tensor) -> float:
        loss = _contrast(model(images, tokens))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if oomkit.current().is_last:
            with torch.no_grad():
                model.temperature.clamp_(0, 4.6)
        return loss.item()

    for _ in range(3):
        world.note(train_step(*_captions()))


@program("equal")
def triplets(world: World) -> None:
    """Siamese network: anchor, positive and negative through one encoder, triplet margin."""
    encoder = nn.Sequential(nn.Linear(OBSERVED, 16), nn.PReLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.NAdam(encoder.parameters(), lr=2e-3)
    world.keep(encoder, optimizer)
    criterion = nn.TripletMarginLoss(margin=1.0)

    @world.auto_batch
    def train_step(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        anchor, positive, negative = (encoder(part) for part in batch)
        loss = criterion(anchor, positive, negative)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        anchor = torch.randn(ROWS, OBSERVED).double()
        near = anchor + 0.1 * torch.randn(ROWS, OBSERVED)
        world.note(train_step((anchor, near, torch.randn(ROWS, OBSERVED).double())))
