"""How a step is updated: precision, checkpoints, several losses, unusual optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomkit

from .world import ROWS, World, program

FEATURES = 6


class Net(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, FEATURES, dtype=dtype), torch.randint(0, 3, (ROWS,))


@program("equal", tolerance=2e-2)
def autocast_bfloat16(world: World) -> None:
    """Mixed precision: torch.autocast on the CPU in bfloat16, parameters in float32."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows(torch.float32)))


@program("equal")
def grad_scaler(world: World) -> None:
    """GradScaler: scale, unscale_, clip, step, update; a scale that grows."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    world.keep(model, optimizer, scaler.get_scale, scaler._get_growth_tracker)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    for _ in range(4):
        world.note(train_step(*rows()))


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the function of the loss")
def grad_scaler_outside(world: World) -> None:
    """GradScaler in the caller: the function returns the loss, the caller scales it."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    world.keep(model, optimizer, scaler.get_scale)

    @world.auto_batch
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return F.cross_entropy(logits, y), logits.argmax(1)

    for _ in range(4):
        optimizer.zero_grad()
        loss, found = forward(*rows())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        world.note(loss.item())
        world.note(found.sum())


def _train_checkpointed(world: World, reentrant: bool) -> None:
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()  # what reentrant checkpoints need
        hidden = checkpoint(model.body, x, use_reentrant=reentrant)
        loss = F.cross_entropy(model.head(torch.tanh(hidden)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("equal")
def checkpoint_plain(world: World) -> None:
    """Activation checkpointing, use_reentrant=False."""
    _train_checkpointed(world, reentrant=False)


@program("equal")
def checkpoint_reentrant(world: World) -> None:
    """Activation checkpointing, use_reentrant=True: a backward inside the backward."""
    _train_checkpointed(world, reentrant=True)


@program("equal")
def averaged_model(world: World) -> None:
    """EMA: AveragedModel.update_parameters in the step, once."""
    model = Net().double()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, average, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


def _train_with_ema(world: World, ask: Callable[[], bool]) -> None:
    model = Net().double()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.keep(model, optimizer, shadow)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if ask():
            with torch.no_grad():
                for name, p in model.named_parameters():
                    shadow[name].lerp_(p, 0.1)
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("equal", decorated="@oomkit.auto_batch, the EMA under `current().is_last`")
def ema_by_hand(world: World) -> None:
    """EMA in a dictionary: `if oomkit.current().is_last` before its update."""
    _train_with_ema(world, lambda: oomkit.current().is_last)


@program("equal")
def two_losses(world: World) -> None:
    """Multi-task: two heads, two losses, two backwards, one update; parameter groups."""
    model, other = Net().double(), nn.Linear(16, 1).double()
    optimizer = torch.optim.Adam(
        [{"params": model.parameters()}, {"params": other.parameters(), "lr": 1e-3}], lr=1e-2
    )
    world.keep(model, other, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor, value: torch.Tensor) -> dict[str, float]:
        optimizer.zero_grad()
        shared = torch.tanh(model.body(x))
        kind = F.cross_entropy(model.head(shared), y)
        distance = F.smooth_l1_loss(other(shared).squeeze(-1), value)
        kind.backward(retain_graph=True)
        (0.5 * distance).backward()
        optimizer.step()
        return {"kind": kind.item(), "distance": distance.item()}

    for _ in range(3):
        x, y = rows()
        told = train_step(x, y, torch.randn(ROWS).double())
        world.note(told["kind"])
        world.note(told["distance"])


@program("equal")
def gradient_penalty(world: World) -> None:
    """A gradient penalty at the input: autograd.grad with create_graph, then backward."""
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + 0.1 * slope.pow(2).sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@program("equal")
def low_rank_adapters(world: World) -> None:
    """LoRA-like fine-tuning: the base is frozen, thin adapters and a new head are trained."""
    model = Net()
    model.body[0] = Adapter(model.body[0])
    model.body[2] = Adapter(model.body[2])
    model.double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()
        return loss.item()

    for _ in range(3):
        x, y = rows()
        world.note(train_step({"x": x, "y": y}))


@program("equal")
def maml(world: World) -> None:
    """Meta-learning: a batch of tasks, an inner step by autograd.grad with create_graph."""
    model = Net(outputs=1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)
    names = [name for name, _ in model.named_parameters()]

    @world.auto_batch
    def meta_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=x.dtype)
        half = x.shape[1] // 2
        for task in range(len(x)):
            values = list(model.parameters())
            known = F.mse_loss(model(x[task, :half]).squeeze(-1), y[task, :half])
            slopes = torch.autograd.grad(known, values, create_graph=True)
            moved = {n: p - 0.1 * g for n, p, g in zip(names, values, slopes, strict=True)}
            out = torch.func.functional_call(model, moved, (x[task, half:],))
            total = total + F.mse_loss(out.squeeze(-1), y[task, half:])
        loss = total / len(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(meta_step(torch.randn(5, 6, FEATURES).double(), torch.randn(5, 6).double()))


@program("equal")
def clip_by_value(world: World) -> None:
    """Gradients clipped by value between backward and update."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        return loss.item()

    for _ in range(3):
        world.note(train_step(*rows()))


@program("equal")
def loss_that_halves(world: World) -> None:
    """Regression on targets whose scale falls: the loss of each batch is half the last one's."""
    model = nn.Linear(FEATURES, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for scale in (2.0, 2.0**0.5, 1.0):
        signs = torch.tensor([1.0, -1.0]).double().repeat(4)
        world.note(train_step(torch.randn(8, FEATURES).double(), scale * signs))


@program("equal")
def counts_that_coincide(world: World) -> None:
    """The rows of a class are counted; in some batches each micro-batch has one of them."""
    model = Net(outputs=2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item(), int((y == 1).sum())

    for positive in ([0, 1, 2], [3], [1, 6], [0, 4]):
        y = torch.zeros(8, dtype=torch.long)
        y[positive] = 1
        loss, count = train_step(torch.randn(8, FEATURES).double(), y)
        world.note(loss)
        world.note(count)
