"""A module of Lightning under a memory budget, with a callback and nothing else.

    python examples/lightning_autobatch.py            # under a minute on a CPU
    python examples/lightning_autobatch.py --plain    # the same without oomkit: it dies

Needs lightning (`pip install -r requirements/trainers-lightning.txt`).
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import Any

import lightning
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import oomkit
import oomkit.lightning

ROWS, FEATURES, WIDTH, CLASSES = 1024, 32, 128, 4


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.head(self.net(x))
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * ROWS, FEATURES, generator=generator)
    y = x[:, :CLASSES].argmax(dim=1)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def fit(callbacks: list[Any], module: Classifier) -> None:
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(module, data())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without oomkit")
    parser.add_argument("--budget", default="2MiB", help="beside what is in use at the start")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    guard = oomkit.lightning.AutoBatch()
    with oomkit.limit_memory(options.budget, device="cpu"):
        module = Classifier()
        print(f"budget {options.budget}, batches of {ROWS}", flush=True)
        try:
            fit([] if options.plain else [guard], module)
        except torch.OutOfMemoryError as error:
            print(f"died in step {len(module.seen) + 1}: {str(error).partition(' Default')[0]}")
            return 0 if options.plain else 1
    if options.plain:
        print("the budget is enough for the plain program")
        return 1
    accuracy = float(module.trainer.callback_metrics["accuracy"])
    print("losses " + " ".join(f"{loss:.4f}" for loss in module.seen))
    sizes = sorted({record.micro_batch_size or 0 for record in guard.records})
    print(f"micro-batches of {' and '.join(map(str, sizes))} rows in place of {ROWS}")

    whole = Classifier()
    fit([], whole)
    gap = max(abs(a - b) for a, b in zip(module.seen, whole.seen, strict=True))
    same = accuracy == float(whole.trainer.callback_metrics["accuracy"])
    print(f"the same without a budget: losses differ by {gap:.1e} at most, accuracy: {same}")
    return 0 if gap < 1e-3 and same else 1


if __name__ == "__main__":
    sys.exit(main())
