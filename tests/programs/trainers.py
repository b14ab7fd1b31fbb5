"""As in Lightning: a module with a training_step, and a trainer that calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import oomkit

from .world import ROWS, World, program

FEATURES = 6
CLASSES = 3

Batch = tuple[torch.Tensor, torch.Tensor]


class LightningModule(nn.Module):
    """As much of Lightning's as a step needs; what a program must give raises."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        raise NotImplementedError

    def optimizers(self) -> Any:
        made = [LightningOptimizer(o) for o in self.trainer.optimizers]
        return made[0] if len(made) == 1 else made

    def lr_schedulers(self) -> Any:
        return self.trainer.schedulers[0]

    def manual_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def log(self, name: str, value: Any) -> None:
        self.trainer.logged[name] = float(value)


class LightningOptimizer:
    """Stands before an optimizer and passes on what it is asked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step(closure)


def is_overridden(name: str, module: LightningModule) -> bool:
    """lightning.pytorch.utilities.model_helpers.is_overridden."""
    found, parent = getattr(module, name), getattr(LightningModule, name)
    return bool(found.__code__ is not parent.__code__)


class Trainer:
    def __init__(self, world: World, accumulate: int = 1, clip: float | None = None) -> None:
        self.world = world
        self.accumulate = accumulate
        self.clip = clip
        self.logged: dict[str, float] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []

    def fit(
        self, module: LightningModule, batches: Iterable[Any], validation: Iterable[Any] = ()
    ) -> None:
        module.trainer = self
        if not is_overridden("training_step", module):
            raise RuntimeError("no training_step() defined")
        made = module.configure_optimizers()
        optimizers, self.schedulers = made if isinstance(made, tuple) else (made, [])
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.world.keep(module, *self.optimizers, *self.schedulers)
        takes = inspect.signature(module.training_step).parameters
        own = vars(module).get("training_step")
        step = type(module).training_step if own is None else own
        for index, batch in enumerate(batches):
            arguments = {"batch_idx": index} if "batch_idx" in takes else {}

            def call(batch: Any = batch, arguments: Any = arguments) -> Any:
                with self.world.conditions(step):
                    return module.training_step(batch, **arguments)

            if module.automatic_optimization:
                self._automatic(module, call, index)
            else:
                call()
        module.eval()
        with torch.no_grad():
            for index, batch in enumerate(validation):
                with self.world.conditions(type(module).validation_step):
                    self.world.note(module.validation_step(batch, index))

    def _automatic(self, module: LightningModule, call: Callable[[], Any], index: int) -> None:
        optimizer = self.optimizers[0]
        last = (index + 1) % self.accumulate == 0

        def closure() -> torch.Tensor:
            told = call()
            loss = told["loss"] if isinstance(told, dict) else told
            if index % self.accumulate == 0:
                optimizer.zero_grad()
            (loss / self.accumulate).backward()
            if last and self.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), self.clip)
            self.world.note(loss.detach())
            return loss

        if not last:
            closure()
            return
        optimizer.step(closure)
        for scheduler in self.schedulers:
            scheduler.step()


def _loader(batches: int = 3) -> list[Batch]:
    return [
        (torch.randn(ROWS, FEATURES).double(), torch.randint(0, CLASSES, (ROWS,)))
        for _ in range(batches)
    ]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.GELU(), nn.Linear(12, CLASSES)).double()


_STEP = "@oomkit.auto_batch, on the method training_step"


@program("equal", caller_backward=True, decorated=_STEP)
def lightning_automatic(world: World) -> None:
    """optimizer.step(closure): training_step and backward in the closure; clipping, schedule."""

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        @world.bare
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    Trainer(world, clip=0.5).fit(Classifier(), _loader())


@program("equal", caller_backward=True, decorated=_STEP, accumulates=True)
def lightning_accumulates(world: World) -> None:
    """accumulate_grad_batches=2; a dictionary with the loss; no batch_idx."""

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        @world.bare
        def training_step(self, batch: Batch) -> dict[str, torch.Tensor]:
            x, y = batch
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    Trainer(world, accumulate=2).fit(Classifier(), _loader(4))


@program("said", says=r"self\.log\(\)", caller_backward=True, decorated=_STEP)
def lightning_logs(world: World) -> None:
    """self.log in the step: the trainer keeps what the last micro-batch logged."""

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        @world.bare
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    Trainer(world).fit(Classifier(), _loader())


class Manual(LightningModule):
    """Manual optimization: the optimizer, the scheduler and the log are the trainer's."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def update(self, batch: Batch) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()
        self.lr_schedulers().step()
        if oomkit.current().is_last:
            self.log("train_loss", loss.detach())


@program("refused", says="was not found.*pass optimizer=", decorated=_STEP)
def lightning_manual(world: World) -> None:
    """Manual optimization: the step gets its optimizer from the trainer, out of sight."""

    class Classifier(Manual):
        @world.bare
        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.update(batch)

    Trainer(world).fit(Classifier(), _loader())


@program(
    "equal",
    decorated="@oomkit.auto_batch(optimizer=..., participants=...), on the bound training_step",
)
def lightning_manual_named(world: World) -> None:
    """The same with both named where they are made: configure_optimizers decorates the step."""

    class Classifier(Manual):
        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.update(batch)

        def configure_optimizers(self) -> Any:
            optimizers, schedulers = super().configure_optimizers()
            decorate = world.bare(optimizer=optimizers[0], participants=schedulers)
            self.training_step = decorate(self.training_step)
            return optimizers, schedulers

    Trainer(world).fit(Classifier(), _loader())


@program("refused", says="was not found", decorated=_STEP)
def lightning_manual_two(world: World) -> None:
    """Manual optimization of two networks, each with its own update: a small GAN."""

    class Adversaries(LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Linear(4, FEATURES).double()
            self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1)).double()

        @world.bare
        def training_step(self, batch: Batch, batch_idx: int) -> None:
            x, _ = batch
            first, second = self.optimizers()
            made = self.generator(x[:, :4])
            second.zero_grad()
            self.manual_backward(self.critic(made.detach()).mean() - self.critic(x).mean())
            second.step()
            first.zero_grad()
            self.manual_backward(-self.critic(made).mean())
            first.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.generator.parameters(), lr=0.1),
                torch.optim.SGD(self.critic.parameters(), lr=0.1),
            ], []

    Trainer(world).fit(Adversaries(), _loader())


@program(
    "equal",
    caller_backward=True,
    decorated="@oomkit.auto_batch, on training_step and validation_step",
)
def lightning_validates(world: World) -> None:
    """Both steps of a subclass of another module are decorated; super() computes the loss."""

    class Base(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.net(batch[0])
            return F.cross_entropy(logits, batch[1]), logits

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Classifier(Base):
        @world.bare
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss, _ = super().step(batch)
            return loss

        @world.bare
        def validation_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss, logits = super().step(batch)
            assert logits.shape[1] == CLASSES
            return loss

    Trainer(world).fit(Classifier(), _loader(2), _loader(2))


@program("equal", decorated="@oomkit.auto_batch, on a closure that a library calls")
def skorch_like(world: World) -> None:
    """As in skorch: train_step_single is passed to optimizer.step as a partial."""

    class NeuralNet:
        def __init__(self) -> None:
            self.module = _net()
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

        def infer(self, x: Any) -> torch.Tensor:
            return self.module(**x) if isinstance(x, dict) else self.module(x)

        @world.auto_batch
        def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, torch.Tensor]:
            x, y = batch
            self.module.train()
            out = self.infer(x, **fit_params)
            loss = F.cross_entropy(out, y)
            loss.backward()
            return {"loss": loss, "y_pred": out}

        def train_step(self, batch: Any) -> dict[str, torch.Tensor]:
            told: dict[str, torch.Tensor] = {}

            def step_fn() -> torch.Tensor:
                self.optimizer.zero_grad()
                told.update(self.train_step_single(batch))
                return told["loss"]

            self.optimizer.step(step_fn)
            return told

    net = NeuralNet()
    world.keep(net.module, net.optimizer)
    for x, y in _loader():
        told = net.train_step(({"input": x}, y))
        world.note(told["loss"].item())
        world.note(told["y_pred"][3].sum().item())
