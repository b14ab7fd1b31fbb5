"""Lightning's Tuner.scale_batch_size before the run, then fit with the size that it found
and as many accumulated batches as make the whole one. Its mode "power", the default:
what it finds divides a batch that is a power of two."""

import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner

from ..workloads import Work

NAME = "Lightning"


class Module(LightningModule):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.batch_size, self.outputs = work, 2, []
        self.inner, self.made = work.build() if work.training else (work.build_model(), None)

    def training_step(self, part, index):
        return self.work.loss(self.inner, part)

    def predict_step(self, part, index):
        return self.work.predict(self.inner, part[0])

    def configure_optimizers(self):
        return self.made

    def train_dataloader(self):
        return self.work.loader(self.batch_size)

    def predict_dataloader(self):
        return self.work.loader(self.batch_size)


def trainer(folder: str, **options) -> Trainer:
    return Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


def train(work: Work) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        module = Module(work)
        size = Tuner(trainer(folder)).scale_batch_size(module)
        size = module.batch_size = min(size, work.rows)
        work.restarted()
        trainer(folder, accumulate_grad_batches=-(-work.rows // size)).fit(module)


def evaluate(work: Work) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        module = Module(work)
        Tuner(trainer(folder)).scale_batch_size(module, method="predict")
        module.batch_size = min(module.batch_size, work.rows)
        work.restarted()
        parts = trainer(folder).predict(module)
        for step, out in enumerate(torch.cat(parts).split(work.rows)):
            work.result(step, out)


healthy = None
