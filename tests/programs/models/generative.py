"""Models that generate: autoencoders, adversaries, diffusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..world import ROWS, World, program

PIXELS = 12
LATENT = 4


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 16), nn.ReLU())
        self.mean = nn.Linear(16, LATENT)
        self.log_var = nn.Linear(16, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, PIXELS))

    def forward(
        self, x: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        return self.decoder(mean + noise * torch.exp(log_var / 2)), mean, log_var


def _sum_loss(
    logits: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, log_var: torch.Tensor
) -> torch.Tensor:
    likelihood = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return likelihood + divergence


def _train_vae(world: World, decorate: Callable[..., Any]) -> None:
    model = VAE().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @decorate
    def train_step(x: torch.Tensor, noise: torch.Tensor) -> float:
        optimizer.zero_grad()
        logits, mean, log_var = model(x, noise)
        loss = _sum_loss(logits, x, mean, log_var)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x = torch.rand(ROWS, PIXELS).double()
        world.note(train_step(x, torch.randn(ROWS, LATENT).double()))


@program("equal", decorated='@oomkit.auto_batch(reduction="sum")')
def vae_sum(world: World) -> None:
    """VAE: the loss is a sum over samples, with reduction="sum"."""
    _train_vae(world, world.auto_batch(reduction="sum"))


@program("equal", compare="slices", found={"reduction": "sum"})
def vae_forgotten(world: World) -> None:
    """VAE without reduction="sum": the proof finds the sum."""
    _train_vae(world, world.auto_batch)


@program(
    "equal",
    decorated="@oomkit.auto_batch(verify=True)",
    compare="slices",
    found={"reduction": "sum"},
)
def vae_verified(world: World) -> None:
    """The same with verify=True."""
    _train_vae(world, world.auto_batch(verify=True))


@program("equal", compare="slices", decorated='@oomkit.auto_batch(reduction="sum")')
def vae_sampled(world: World) -> None:
    """VAE as it is mostly written: the noise is drawn in the step."""
    model = VAE().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch(reduction="sum")
    def train_step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        noise = torch.randn(len(x), LATENT, dtype=x.dtype)
        logits, mean, log_var = model(x, noise)
        loss = _sum_loss(logits, x, mean, log_var)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(torch.rand(ROWS, PIXELS).double()))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, PIXELS))
        nn.init.xavier_uniform_(self.weight)
        self.hidden = nn.Parameter(torch.zeros(6))
        self.visible = nn.Parameter(torch.zeros(PIXELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(F.linear(x, self.weight, self.hidden))
        return F.linear(code, self.weight.t(), self.visible)


@program("equal")
def tied_autoencoder(world: World) -> None:
    """Autoencoder whose decoder is the encoder's transpose; RMSprop, exponential decay."""
    model = TiedAutoencoder().double()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    world.keep(model, optimizer, scheduler)

    @world.auto_batch
    def train_step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        restored = model(x)
        loss = F.mse_loss(restored, x) + 1e-3 * restored.abs().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach(), restored.detach()

    for _ in range(3):
        loss, restored = train_step(torch.rand(ROWS, PIXELS).double())
        assert restored.shape == (ROWS, PIXELS)
        world.note(loss)
        world.note(restored[5, 3])


def _adversaries() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    maker = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, PIXELS), nn.Sigmoid())
    judge = nn.Sequential(nn.Linear(PIXELS, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    maker.double()
    judge.double()
    adam = torch.optim.Adam
    return (
        maker,
        judge,
        adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    )


@program("refused", says="two decorated steps|different places|after a step")
def gan_one_step(world: World) -> None:
    """GAN as the tutorials write it: discriminator and generator stepped in one step."""
    maker, judge, maker_optimizer, judge_optimizer = _adversaries()
    world.keep(maker, judge, maker_optimizer, judge_optimizer)
    criterion = nn.BCEWithLogitsLoss()

    @world.auto_batch
    def train_step(real: torch.Tensor, noise: torch.Tensor) -> tuple[float, float]:
        yes = torch.ones(len(real), 1, dtype=real.dtype)
        no = torch.zeros(len(real), 1, dtype=real.dtype)
        judge.zero_grad()
        on_real = criterion(judge(real), yes)
        on_real.backward()
        fake = maker(noise)
        on_fake = criterion(judge(fake.detach()), no)
        on_fake.backward()
        judge_optimizer.step()

        maker.zero_grad()
        fooled = criterion(judge(fake), yes)
        fooled.backward()
        maker_optimizer.step()
        return (on_real + on_fake).item(), fooled.item()

    for _ in range(3):
        noise = torch.randn(ROWS, LATENT).double()
        for loss in train_step(torch.rand(ROWS, PIXELS).double(), noise):
            world.note(loss)


@program("equal", accumulates=True, decorated="@oomkit.auto_batch, on each of the two steps")
def gan_two_steps(world: World) -> None:
    """The same GAN in two decorated steps, one for each network."""
    maker, judge, maker_optimizer, judge_optimizer = _adversaries()
    world.keep(maker, judge, maker_optimizer, judge_optimizer)
    criterion = nn.BCEWithLogitsLoss()

    @world.auto_batch
    def judge_step(real: torch.Tensor, noise: torch.Tensor) -> float:
        judge_optimizer.zero_grad()
        with torch.no_grad():
            fake = maker(noise)
        on_real = judge(real)
        on_fake = judge(fake)
        loss = criterion(on_real, torch.ones_like(on_real))
        loss = loss + criterion(on_fake, torch.zeros_like(on_fake))
        loss.backward()
        judge_optimizer.step()
        return loss.item()

    @world.auto_batch
    def maker_step(noise: torch.Tensor) -> float:
        maker_optimizer.zero_grad()
        verdict = judge(maker(noise))
        loss = criterion(verdict, torch.ones_like(verdict))
        loss.backward()
        maker_optimizer.step()
        return loss.item()

    for _ in range(3):
        noise = torch.randn(ROWS, LATENT).double()
        world.note(judge_step(torch.rand(ROWS, PIXELS).double(), noise))
        world.note(maker_step(noise))


@program("equal")
def wgan_gp_critic(world: World) -> None:
    """WGAN-GP: the critic's step with its gradient penalty, a double backward."""
    maker, critic, _, optimizer = _adversaries()
    world.keep(maker, critic, optimizer)

    @world.auto_batch
    def critic_step(real: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor) -> float:
        optimizer.zero_grad()
        fake = maker(noise).detach()
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        score = critic(between)
        (slope,) = torch.autograd.grad(
            score, between, torch.ones_like(score), create_graph=True, retain_graph=True
        )
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10.0 * penalty
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        real = torch.rand(ROWS, PIXELS).double()
        noise, mix = torch.randn(ROWS, LATENT).double(), torch.rand(ROWS, 1).double()
        world.note(critic_step(real, noise, mix))


class Denoiser(nn.Module):
    """A small network that is told the time by sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(PIXELS + 4, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, PIXELS)
        )
        self.register_buffer("rates", torch.tensor([1.0, 0.1]))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angle = t[:, None] * self.rates
        told = torch.cat([angle.sin(), angle.cos()], dim=1).to(x.dtype)
        return self.layers(torch.cat([x, told], dim=1))


@program("equal", compare="slices")
def diffusion(world: World) -> None:
    """Diffusion: time steps and noise are drawn in the step, dropout in the network."""
    model = Denoiser().double()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    world.keep(model, average, optimizer)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20).double(), dim=0)

    @world.auto_batch
    def train_step(clean: torch.Tensor) -> float:
        t = torch.randint(0, len(kept), (len(clean),))
        noise = torch.randn_like(clean)
        share = kept[t][:, None]
        noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        return loss.item()

    for _ in range(3):
        world.note(train_step(torch.rand(ROWS, PIXELS).double()))
