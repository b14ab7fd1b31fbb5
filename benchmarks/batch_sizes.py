"""What searches for a batch size make of a training, beside oomkit with the same memory.

    PYTHONPATH=. .venv-trainers/bin/python benchmarks/batch_sizes.py            # transformers
    PYTHONPATH=. .venv-trainers-lightning/bin/python benchmarks/batch_sizes.py  # Lightning

One epoch of a small model of words over 256 texts, in batches of 16; every 67th text is long, so
that memory runs out in some steps and not in others. A training with memory for everything is
what the others are compared with. The output of both is in `results/batch-sizes.txt`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import oomkit

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TEXTS, ROWS, WORDS, KIB = 256, 16, 64, 2**10


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [96 if at % 67 == 5 else 8 + at % 5 for at in range(TEXTS)]
    return [{"ids": torch.randint(1, WORDS, (n,), generator=generator)} for n in lengths]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {"ids": ids, "labels": torch.where(ids == 0, -100, ids)}


class Model(torch.nn.Module):
    """Tells each word from itself and the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, 16)
        self.wide, self.last = torch.nn.Linear(32, 64), torch.nn.Linear(64, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        words = self.words(ids)
        both = torch.cat([words, words.roll(1, 1)], -1)
        logits = self.last(self.wide(both).relu())
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Made(NamedTuple):
    """A training that has ended."""

    model: torch.nn.Module
    rows: int  # of its batches
    updates: int
    lost: int  # updates that the finished training does not count
    seen: int  # texts of all updates


@contextmanager
def told(end: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """An error says where a training has ended, and with what batches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        update, rows = end()
        error.add_note(f"in update {update} with batches of {rows}")
        raise


def line(name: str, made: Made, reference: Made) -> str:
    begun, every = Model(), padded(texts())
    moved = gap = 0.0
    for first, one, two in zip(
        begun.parameters(), reference.model.parameters(), made.model.parameters(), strict=True
    ):
        moved = max(moved, float((one - first).abs().max()))
        gap = max(gap, float((one - two).abs().max()))
    with torch.no_grad():
        loss, its = (float(each.model.eval()(**every)["loss"]) for each in (made, reference))
    return (
        f"{name:22} {made.rows:5} {made.updates:8} {made.lost:6} {made.seen:6} "
        f"{loss:8.4f} {loss - its:+9.4f} {gap / moved:11.1e}"
    )


def report(title: str, runs: dict[str, Callable[[], Made]]) -> None:
    """The first run has memory for everything; the others have a third of what that takes."""
    (first, make), *others = runs.items()
    make()
    with oomkit.guard() as measured:
        reference = make()
    (record,) = measured.records
    need = (record.peak_allocated or 0) - (record.baseline or 0)
    print(f"{title}: {need / KIB:.0f} KiB; a budget of {need / 3 / KIB:.0f} KiB for the others")
    print(f"{'':22} {'batch':>5} {'updates':>8} {'lost':>6} {'texts':>6} {'loss':>8} ", end="")
    print(f"{'differs':>9} {'parameters':>11}")
    print(line(first, reference, reference))
    for name, make in others:
        base = oomkit.memory("cpu").allocated or 0
        try:
            with oomkit.limit_memory(base + need // 3, device="cpu"):
                made = make()
        except torch.OutOfMemoryError as error:
            print(f"{name:22} dies {error.__notes__[-1]}")
            continue
        print(line(name, made, reference))


def of_transformers() -> None:
    import transformers

    import oomkit.transformers

    class Tries(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.updates: list[tuple[int, int]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.updates.append((state.global_step, state.train_batch_size))

    def train(protect: bool, **more: Any) -> Made:
        tries = Tries()
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            num_train_epochs=1,
            learning_rate=0.5,
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            **more,
        )
        made = transformers.Trainer(
            Model(), arguments, padded, train_dataset=texts(), callbacks=[tries]
        )
        made.remove_callback(transformers.PrinterCallback)
        if protect:
            oomkit.transformers.protect(made)
        with told(lambda: (made.state.global_step + 1, ROWS)):
            made.train()
        state = made.state
        seen = sum(rows for _, rows in tries.updates)
        return Made(
            made.model,
            state.train_batch_size,
            state.global_step,
            len(tries.updates) - state.global_step,
            seen,
        )

    transformers.logging.set_verbosity_error()
    report(
        f"transformers {transformers.__version__}",
        {
            "all the memory": lambda: train(False),
            "plain": lambda: train(False),
            "auto_find_batch_size": lambda: train(False, auto_find_batch_size=True),
            "oomkit": lambda: train(True),
        },
    )


def of_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import BatchSizeFinder

    from oomkit.lightning import AutoBatch

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.net, self.batch_size = Model(), rows
            self.seen: list[int] = []

        def train_dataloader(self) -> Any:
            order = torch.Generator().manual_seed(2)
            return torch.utils.data.DataLoader(
                texts(), self.batch_size, shuffle=True, generator=order, collate_fn=padded
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def train(rows: int, *callbacks: Any) -> Made:
        module = Module(rows)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            callbacks=list(callbacks),
            default_root_dir=tempfile.mkdtemp(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with told(lambda: (trainer.global_step + 1, module.batch_size)):
            trainer.fit(module)
        updates = trainer.global_step
        lost = len(module.seen) - updates
        return Made(module.net, module.batch_size, updates, lost, sum(module.seen))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report(
        f"Lightning {lightning.__version__}",
        {
            "all the memory": lambda: train(ROWS),
            "plain": lambda: train(ROWS),
            "BatchSizeFinder": lambda: train(2, BatchSizeFinder(max_trials=8)),
            "oomkit": lambda: train(ROWS, AutoBatch()),
        },
    )


def main() -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    of_transformers() if importlib.util.find_spec("trl") else of_lightning()
    return 0


if __name__ == "__main__":
    sys.exit(main())
