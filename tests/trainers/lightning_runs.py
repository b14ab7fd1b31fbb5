"""Runs of Lightning's Trainer, and sweeps of errors over one call of a module's step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torchmetrics
from runs import (
    MODES,
    ROUNDING,
    SINGLE,
    Arm,
    Forks,
    Outcome,
    differences,
    listening,
    parameters,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import oomkit
from oomkit.lightning import AutoBatch

ROWS, FEATURES, CLASSES = 8, 6, 3


def loader(batches: int = 4, seed: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * batches
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


class Classifier(lightning.LightningModule):
    """Logs its loss in both ways; subclasses do more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        values = {"val_loss": F.cross_entropy(logits, y), "val_top": logits.max()}
        self.log("val_loss", values["val_loss"])
        self.log("val_top", values["val_top"], reduce_fx="max")
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Logger(lightning.pytorch.loggers.logger.Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append({"step": step, **metrics})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def trainer(callbacks: list[Any], **options: Any) -> Any:
    given = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": Logger(),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(**{**given, **options}, callbacks=callbacks)


def _state(module: Any) -> dict[str, Any]:
    """What a call that ends in an error leaves as it was."""
    named = dict(module.named_parameters())
    metrics = {n: m for n, m in module.named_modules() if isinstance(m, torchmetrics.Metric)}
    return {
        "parameters": {name: p.detach().clone() for name, p in named.items()},
        "gradients": {n: p.grad.clone() for n, p in named.items() if p.grad is not None},
        "stream": torch.get_rng_state(),
        "metrics": {n: m.metric_state for n, m in metrics.items()},
        "updates": {n: m._update_count for n, m in metrics.items()},
    }


class Arming(lightning.Callback):
    """Puts an arm before a step, after AutoBatch has been there."""

    def __init__(self, method: str, *given: Any) -> None:
        self.method, self.given = method, given
        self.arm: Arm | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        step = getattr(pl_module, self.method)
        self.arm = Arm(step, *self.given, look=lambda: _state(pl_module))
        self.arm.__wrapped__ = getattr(step, "__wrapped__", step)
        object.__setattr__(pl_module, self.method, self.arm)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if vars(pl_module).get(self.method) is self.arm:
            del vars(pl_module)[self.method]


def fit(trainer: Any, module: Any) -> Any:
    return trainer.fit(module, loader(), loader(2, seed=5))


def run(
    make: Callable[[], Any],
    protect: bool = True,
    method: str = "training_step",
    number: int = 0,
    fault: dict[str, Any] | Forks | None = None,
    work: Callable[[Any, Any], Any] = fit,
    callback: dict[str, Any] | None = None,
    slices: dict[int, tuple[int, ...]] | None = None,
    **options: Any,
) -> tuple[Outcome, Arm, Any]:
    """One run, its arm and its callback."""
    module = make()
    begun = parameters(module)
    arming, ours = Arming(method, number, fault, slices), AutoBatch(**(callback or {}))
    used = trainer([ours, arming] if protect else [arming], **options)
    error: BaseException | None = None
    result = None
    with listening() as said:
        try:
            result = work(used, module)
        except (oomkit.OomkitError, RuntimeError) as raised:
            error = raised.with_traceback(None)
    assert arming.arm is not None
    outcome = Outcome(
        parameters(module),
        begun,
        {
            "optimizer": [each.state_dict()["state"] for each in used.optimizers],
            "schedules": [each.scheduler.state_dict() for each in used.lr_scheduler_configs],
            "global_step": used.global_step,
            "metrics": {k: v.detach().clone() for k, v in used.callback_metrics.items()},
            "result": result,
        },
        used.logger.lines,
        said,
        error,
    )
    return outcome, arming.arm, ours


def sweep(make: Callable[[], Any], method: str, number: int, **options: Any) -> Counter[str]:
    """An error at each of some allocations of one call: the run must be what it is without.

    It is that of the plain run up to what the order of sums explains, and bit for bit that of
    a run without an error in the same slices, unless oomkit says that it is not. Where memory
    does not come back, it ends in `OutOfMemory`, and the call has changed nothing.
    """
    limit, phase = options.pop("limit", SINGLE), options.pop("phase", None)
    exact = options.pop("exact", True)  # else beside a run in the same slices alone
    # Lightning divides the loss by itself, between two protected calls: 4 or 8 bytes.
    forks = Forks(options.pop("times", MODES), {"min_bytes": 16, "phase": phase})

    step = "training_step" if method == "optimizer_step" else method

    def work() -> tuple[Any, ...]:
        outcome, arm, ours = run(make, True, method, number, forks, **options)
        return outcome, arm.counts, _counts(ours, step)

    reference, _, _ = run(make, False, method, number, **options)
    healthy, _, _ = forks.run(work)
    assert reference.error is None, reference.error
    assert not differences(reference, healthy, 0.0)
    seen: Counter[str] = Counter()
    same: dict[Any, Outcome] = {}
    for fault, answer in forks.answers:
        where = f"an error at allocation {fault['nth']} of {forks.seen}, times={fault['times']}"
        assert isinstance(answer, tuple), f"{where}: {answer}"
        outcome, arm, counts = answer
        assert arm.fired, f"{where}: it did not come"
        if fault["times"] is None:
            seen[forks.ended(where, outcome, arm)] += 1
            continue
        found = differences(reference, outcome, limit) if exact else []
        assert not found, f"{where}: {found}; {outcome.said}"
        split = any(count > 1 for _, count in counts)
        if split and counts not in same:
            same[counts] = _in_the_same_slices(make, step, counts, **options)
        rounded = any("not bit for bit" in line for line in outcome.said)
        expected = same[counts] if split else reference
        found = differences(expected, outcome, ROUNDING if rounded else 0.0)
        assert not found, f"{where}, beside the same slices: {found}; {outcome.said}"
        seen["split" if split else "repeated"] += 1
    return seen


def _counts(ours: Any, step: str) -> tuple[tuple[int, int], ...]:
    """Rows and micro-batches of each call of a step."""
    return tuple(
        (record.batch_size or ROWS, record.accumulation_steps)
        for record in ours.records
        if (record.label or "").endswith(f".{step}")
    )


def _in_the_same_slices(
    make: Callable[[], Any],
    step: str,
    counts: tuple[tuple[int, int], ...],
    callback: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """A run without an error whose calls are split as those of another one were.

    Args:
        make: makes a module.
        step: whose calls these are; the others stay whole.
        counts: of the other run.
        callback: options of AutoBatch.
        options: of the run.
    """
    learns = step == "training_step"  # the first split call is proven, so an option splits it
    first = next(count for _, count in counts if count > 1) if learns else 1
    forced = {}
    for call, (rows, count) in enumerate(counts, 1):
        if count != first:
            ends = [rows * at // count for at in range(count + 1)]
            forced[call] = tuple(b - a for a, b in itertools.pairwise(ends))
    given = {**(callback or {}), "steps": (step,), "accumulation_steps": first}
    outcome, _, _ = run(make, True, step, slices=forced, callback=given, **options)
    return outcome
