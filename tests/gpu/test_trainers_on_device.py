"""Trainers on a device: the loss of each step under a limit is that of the run without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import oomkit
from gpu import DRY, block, room

pytestmark = [
    pytest.mark.gpu,
    # Of the libraries themselves, and of the first error of each step.
    pytest.mark.filterwarnings("ignore"),
]

ROWS, WIDTH, WORDS, STEPS = 16, 32, 64, 4


class Ballast(nn.Module):
    """Takes eight units for each row, for a moment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block(8 * len(x))
        return x


def _room(limited: bool) -> Any:
    return room(100 if limited else 400)


def _hugging_face(limited: bool, precision: str, folder: Path) -> tuple[list[float], int]:
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    import oomkit.transformers

    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config)
    model.transformer.drop = Ballast()
    drawn = torch.randint(0, WORDS, (STEPS * ROWS, 16))
    rows = [{"input_ids": row, "labels": row} for row in drawn]
    options = hf.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=DRY, disable_tqdm=True,
        max_grad_norm=1.0, **{precision: True} if precision else {},
    )  # fmt: skip
    trainer = oomkit.transformers.protect(hf.Trainer(model, options, train_dataset=rows))
    with _room(limited):
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert DRY or next(model.parameters()).is_cuda
    records = oomkit.transformers.records(trainer)
    return [line["loss"] for line in lines], sum(record.ooms for record in records)


def _lightning(limited: bool, precision: str, folder: Path) -> tuple[list[float], int]:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from oomkit.lightning import AutoBatch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Ballast(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x).float(), y)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    losses: list[float] = []
    torch.manual_seed(0)
    module = Module()
    data = TensorDataset(torch.randn(STEPS * ROWS, WIDTH), torch.randint(0, 4, (STEPS * ROWS,)))
    protection = AutoBatch()
    names = {"": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    trainer = lightning.Trainer(
        accelerator="cpu" if DRY else "gpu", devices=1, max_epochs=1, callbacks=[protection],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision=names[precision], default_root_dir=folder,
    )  # fmt: skip
    with _room(limited):
        trainer.fit(module, DataLoader(data, batch_size=ROWS))
    return losses, sum(record.ooms for record in protection.records)


def _accelerate(limited: bool, precision: str, folder: Path) -> tuple[list[float], int]:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests
    torch.manual_seed(0)
    runs = accelerate.Accelerator(mixed_precision=precision or "no", cpu=DRY)
    model = nn.Sequential(Ballast(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(STEPS * ROWS, WIDTH), torch.randint(0, 4, (STEPS * ROWS,)))
    model, optimizer, loader = runs.prepare(model, optimizer, DataLoader(data, batch_size=ROWS))

    @oomkit.auto_batch(model=model, optimizer=optimizer)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        runs.backward(loss)
        runs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    with _room(limited):
        losses = [float(step(x, y)) for x, y in loader]
    return losses, sum(record.ooms for record in step.records)


Train = Callable[[bool, str, Path], tuple[list[float], int]]
TRAINERS: dict[str, Train] = {
    "transformers": _hugging_face,
    "lightning": _lightning,
    "accelerate": _accelerate,
}


@pytest.mark.parametrize("precision", ["", "bf16", "fp16"], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_under_a_limit(trainer: str, precision: str, tmp_path: Path) -> None:
    if DRY and precision == "fp16":
        pytest.skip("fp16 of the CPU is not what trainers support")
    torch.use_deterministic_algorithms(False)  # sizes of slices may take other kernels anyway
    expected, none = TRAINERS[trainer](False, precision, tmp_path)
    got, errors = TRAINERS[trainer](True, precision, tmp_path)
    assert none == 0 and errors >= 1, "no error was provoked"
    tolerance = 1e-4 if not precision else 2e-2
    assert len(expected) == STEPS
    assert got == pytest.approx(expected, rel=tolerance)
