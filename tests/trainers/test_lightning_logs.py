"""What a Lightning module logs of uneven batches, and training that goes on from a checkpoint."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning_runs import CLASSES, FEATURES, Classifier, fit, loader, run, sweep
from runs import SINGLE, differences
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

UNEVEN = (8, 3, 6, 5)  # rows of the batches


def _uneven(sizes: tuple[int, ...] = UNEVEN) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(sizes), FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (sum(sizes),), generator=generator)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return DataLoader(TensorDataset(x, y), batch_sampler=rows)


def _fit(used: Any, module: Any) -> None:
    used.fit(module, _uneven(), _uneven((7, 4)))


class Sized(Classifier):
    """Says how many rows, or how many of another kind, a value is a mean over."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        both = {"on_step": True, "on_epoch": True}
        self.log("rows", losses.mean(), batch_size=len(x), **both)
        first = y == 0
        if first.any():
            self.log("first", losses[first].mean(), batch_size=int(first.sum()), **both)
        self.log_dict({"squares": losses.square().mean()}, batch_size=len(x), **both)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_rows", F.cross_entropy(self.net(x), y), batch_size=len(x))


class Reduced(Classifier):
    """Logs what is no mean, in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        both = {"on_step": True, "on_epoch": True, "batch_size": len(x)}
        self.log("lowest", scores.min(), reduce_fx="min", **both)
        self.log("highest", scores.max(), reduce_fx=torch.max, **both)
        self.log("right", (scores.argmax(1) == y).sum().float(), reduce_fx="sum", **both)
        self.log("rows", float(len(x)), reduce_fx=torch.sum, **both)
        return F.cross_entropy(scores, y)


class Unsized(Classifier):
    """Lightning counts the rows of the batch by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("again", loss.detach(), on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("kind", [Sized, Reduced, Unsized])
@pytest.mark.parametrize("number", [1, 4])
def test_what_is_logged_of_uneven_batches_survives(kind: Any, number: int) -> None:
    assert sweep(kind, "training_step", number, work=_fit)["split"]


def test_what_is_logged_in_validation_of_uneven_batches_survives() -> None:
    assert sweep(Sized, "validation_step", 1, work=_fit)["split"]


@pytest.mark.parametrize("kind", [Sized, Reduced, Unsized])
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_logged_of_uneven_batches_that_are_all_split(kind: Any, count: int) -> None:
    reference, _, _ = run(kind, protect=False, work=_fit)
    outcome, _, ours = run(kind, callback={"accumulation_steps": count}, work=_fit)
    assert {record.accumulation_steps for record in ours.records} == {count}
    assert not differences(reference, outcome, SINGLE)


class Shown(Classifier):
    """What `log` is not told: the mean of a loss under an extreme, and one over all rows where the
    loss is one over some labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y, ignore_index=0)
        both = {"on_step": True, "on_epoch": True}
        self.log("worst", loss, reduce_fx="max", **both)
        self.log("right", (scores.argmax(1) == y).float().mean(), **both)
        self.log("count", float(len(x)), **both)
        return loss


@pytest.mark.parametrize("count", [2, 3])
def test_a_proof_shows_how_values_become_one(count: int) -> None:
    sizes = {"work": lambda used, module: used.fit(module, _uneven((16, 12, 16)))}
    reference, _, _ = run(Shown, protect=False, **sizes)
    outcome, _, ours = run(Shown, callback={"accumulation_steps": count}, **sizes)
    assert {record.accumulation_steps for record in ours.records} == {count}
    assert not differences(reference, outcome, SINGLE)
    assert outcome.error is None and not [line for line in outcome.said if "logs" in line]


class Told(Classifier):
    """Logs what no values of micro-batches make, and a metric that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()
        self.weighed = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.log("spread", scores.std())
        self.seen.update(loss)
        self.log("seen", self.seen)
        self.weighed.update(loss, weight=len(x))
        self.log("weighed", self.weighed)
        self.accuracy.update(scores, y)
        self.log("accuracy", self.accuracy)
        return loss


def test_what_cannot_be_joined_is_warned_of_once() -> None:
    outcome, _, _ = run(Told, callback={"accumulation_steps": 2}, work=_fit)
    assert outcome.error is None
    (one,) = (line for line in outcome.said if "Told logs" in line)
    assert "Told logs 'spread', of which values of micro-batches" in one
    (two,) = (line for line in outcome.said if "counts calls" in line)
    assert "seen of Told (MeanMetric) counts calls of its update(), not rows" in two
    assert not [line for line in outcome.said if "_update_count" in line]


WRITTEN: queue.SimpleQueue[Any] = queue.SimpleQueue()  # lists go back with an attempt


class Noted(Classifier):
    """Lightning's own `log` of this module notes what it is called with."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        kind = "metric" if value is self.accuracy else type(value).__name__
        WRITTEN.put((self.global_step, name, kind, kwargs.get("batch_size")))
        super().log(name, value, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        values = {"mean": scores.mean(), "largest": scores.max().item()}
        self.log_dict(values, batch_size=len(x), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _written(*given: Any, **options: Any) -> tuple[list[Any], Any]:
    """What a run has logged, and its records."""
    outcome, arm, ours = run(Noted, *given, work=_fit, **options)
    assert outcome.error is None and bool(arm.fired) == ("fault" in options)
    return [WRITTEN.get_nowait() for _ in range(WRITTEN.qsize())], ours.records


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lightning_is_called_once_for_each_name_and_batch(count: int) -> None:
    plain, _ = _written(False)
    mine, records = _written(callback={"accumulation_steps": count})
    assert {record.accumulation_steps for record in records} == {count}
    learnt = [name for _, name, _, _ in plain if not name.startswith("val_")]
    assert learnt == ["accuracy", "mean", "largest", "train_loss"] * len(UNEVEN)
    assert (0, "accuracy", "metric", None) in plain
    assert {rows for _, name, _, rows in mine if name == "mean"} == {*UNEVEN}
    assert mine == plain


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_replay_that_the_backward_begins_logs_nothing(nth: int, times: int) -> None:
    plain, _ = _written(False)
    fault = {"nth": nth, "times": times, "phase": "backward", "min_bytes": 16}
    mine, records = _written(True, "optimizer_step", 2, fault=fault)
    assert max(record.accumulation_steps for record in records) > 1
    assert mine == plain


# --- resumed ---


def _checkpoint(path: Path, fault: dict[str, Any] | None) -> Callable[[Any, Any], None]:
    """Makes a checkpoint, and gives what goes on from it.

    Args:
        path: of the checkpoint.
        fault: of the run that ends there, which has no oomkit without one.
    """

    def first(used: Any, module: Any) -> None:
        fit(used, module)
        used.save_checkpoint(path)

    _, arm, _ = run(Classifier, fault is not None, number=2, fault=fault, work=first)
    assert arm.fired == (fault is not None)

    def resumed(used: Any, module: Any) -> None:
        used.fit(module, loader(), loader(2, seed=5), ckpt_path=path)
        assert used.global_step == 8

    return resumed


@pytest.mark.parametrize("number", [1, 3])
def test_a_training_that_is_resumed_survives(tmp_path: Path, number: int) -> None:
    work = _checkpoint(tmp_path / "plain.ckpt", None)
    assert sweep(Classifier, "training_step", number, work=work, max_epochs=2)["split"]


def test_a_training_that_is_resumed_with_its_sizes_survives(tmp_path: Path) -> None:
    """It is split from its first step on, and has another error."""
    work = _checkpoint(tmp_path / "split.ckpt", {"nth": 4, "min_bytes": 16})
    reference, _, _ = run(Classifier, False, work=work, max_epochs=2)
    for nth in range(1, 14, 3):
        fault = {"nth": nth, "min_bytes": 16}
        outcome, arm, ours = run(Classifier, number=3, fault=fault, work=work, max_epochs=2)
        assert arm.fired and not differences(reference, outcome, SINGLE)
        counts = [r.accumulation_steps for r in ours.records if r.label.endswith("training_step")]
        assert counts[:2] == [2, 2] and counts[2] >= 2
