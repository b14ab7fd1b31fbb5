"""Modules with state: buffers that a forward writes, other than BatchNorm's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ..world import ROWS, World, program

WIDTH = 6


@program("refused", says="cannot split .* exactly")
def spectral_norm_critic(world: World) -> None:
    """Spectral normalisation: each forward is one more power iteration."""
    model = nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, 16)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(16, 1))
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(real: torch.Tensor, fake: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.relu(1 - model(real)).mean() + F.relu(1 + model(fake)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(torch.rand(ROWS, WIDTH).double(), torch.rand(ROWS, WIDTH).double()))


class Queue(nn.Module):
    """Keys of earlier batches are the negatives of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.register_buffer("keys", F.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder(query), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder(key), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.keys.clone().t()], dim=1) / 0.2
        rows = (self.pointer + torch.arange(len(k))) % len(self.keys)
        self.keys[rows] = k
        self.pointer.copy_((self.pointer + len(k)) % len(self.keys))
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


@program("refused", says="cannot split .* exactly")
def momentum_queue(world: World) -> None:
    """A queue of keys: the second micro-batch sees the first one's among its negatives."""
    model = Queue().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(query: torch.Tensor, key: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(query, key)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x = torch.randn(ROWS, WIDTH).double()
        world.note(train_step(x + 0.1 * torch.randn(ROWS, WIDTH), x))


class Codebook(nn.Module):
    """Vector quantisation; the codes follow their rows by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("rows", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 5).to(z.dtype)
                self.rows.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.rows[:, None])
        return z + (found - z).detach(), F.mse_loss(z, found)


@program(
    "said",
    decorated='@oomkit.auto_batch(verify="warn")',
    says="codes|rows|buffer|micro-batch",
    compare="slices",
)
def vector_quantised(world: World) -> None:
    """VQ autoencoder: the forward updates the code book, once per micro-batch, allowed by
    verify="warn"."""
    encoder, decoder = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
    model = nn.ModuleDict({"in": encoder, "book": Codebook(), "out": decoder}).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch(verify="warn")
    def train_step(x: torch.Tensor) -> tuple[float, float]:
        z, commitment = model["book"](model["in"](x))
        restored = F.mse_loss(model["out"](z), x)
        loss = restored + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return restored.item(), commitment.item()

    for _ in range(3):
        for value in train_step(torch.randn(ROWS, WIDTH).double()):
            world.note(value)
