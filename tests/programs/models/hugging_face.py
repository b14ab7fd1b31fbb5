"""Hugging Face models with random weights, accelerate, and trainers that call the user's loss."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.tokenization_utils_base import BatchEncoding

from ..world import World, program

VOCAB = 50
LENGTH = 7


def _gpt2(dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config).double()


def _bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config).double()


def _tokens(rows: int = 8) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, LENGTH))


def _sentences(rows: int = 8) -> dict[str, torch.Tensor]:
    lengths = torch.randint(3, LENGTH + 1, (rows, 1))
    return {
        "input_ids": _tokens(rows),
        "attention_mask": (torch.arange(LENGTH)[None, :] < lengths).long(),
        "labels": torch.randint(0, 3, (rows,)),
    }


@program("equal", tolerance=1e-5)
def gpt2_causal(world: World) -> None:
    """GPT-2: labels are the inputs, linear warm-up; the library takes the loss in float32."""
    model = _gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    world.keep(model, optimizer, scheduler)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        outputs = model(**batch)
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return outputs.loss.item()

    for _ in range(3):
        tokens = _tokens()
        world.note(train_step({"input_ids": tokens, "labels": tokens}))


@program("equal", compare="slices")
def gpt2_dropout(world: World) -> None:
    """GPT-2 with its dropout: another plan draws other masks."""
    model = _gpt2(dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(2):
        tokens = _tokens()
        world.note(train_step({"input_ids": tokens, "labels": tokens}))


def _train_bert(world: World, make: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    model = _bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        return outputs

    for _ in range(3):
        outputs = train_step(make(_sentences()))
        assert type(outputs).__name__ == "SequenceClassifierOutput"
        assert outputs.logits.shape == (8, 3)
        world.note(outputs.loss)
        world.note(outputs.logits[6].sum())


@program("equal")
def bert_model_output(world: World) -> None:
    """BERT classification: a dictionary comes in, the ModelOutput goes out."""
    _train_bert(world, dict)


@program("equal")
def bert_batch_encoding(world: World) -> None:
    """The same with the tokenizer's BatchEncoding for a batch."""
    _train_bert(world, BatchEncoding)


def target_tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


@program("equal", decorated="@oomkit.auto_batch(weight=target_tokens)")
def t5_padded_labels(world: World) -> None:
    """T5: encoder and decoder, labels padded with -100; weight= counts the others."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).double().train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch(weight=target_tokens)
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        batch = _sentences()
        batch["labels"] = _tokens()[:, :5].clone()
        lengths = torch.randint(1, 6, (8, 1))
        batch["labels"][torch.arange(5)[None, :] >= lengths] = -100
        world.note(train_step(batch))


@program("equal")
def vit_images(world: World) -> None:
    """ViT: image classification with gradient checkpointing, SGD with momentum."""
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config).double().train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(pixel_values: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        optimizer.zero_grad()
        outputs = model(pixel_values=pixel_values, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        return outputs.loss.item(), int((outputs.logits.argmax(-1) == labels).sum())

    for _ in range(3):
        pixels, labels = torch.randn(8, 3, 8, 8).double(), torch.randint(0, 4, (8,))
        loss, correct = train_step(pixels, labels)
        world.note(loss)
        world.note(correct)


def _prepared(model: nn.Module) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the method compute_loss")
def trainer_compute_loss(world: World) -> None:
    """A Trainer's compute_loss(model, inputs, return_outputs) and accelerator.backward(loss)."""
    accelerator, model, optimizer = _prepared(_bert().train())
    world.keep(model, optimizer.optimizer)

    class Trainer:
        def __init__(self) -> None:
            self.accelerator = accelerator

        @world.auto_batch
        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False
        ) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

        def training_step(self, inputs: dict[str, Any]) -> torch.Tensor:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = Trainer()
    for _ in range(3):
        world.note(trainer.training_step(_sentences()))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program("equal", decorated="@oomkit.auto_batch, on the whole step", tolerance=1e-5)
def accelerate_step(world: World) -> None:
    """accelerate: accelerator.backward, clip and the prepared optimizer inside the step."""
    accelerator, model, optimizer = _prepared(_gpt2().train())
    world.keep(model, optimizer.optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for _ in range(3):
        tokens = _tokens()
        world.note(train_step({"input_ids": tokens, "labels": tokens}))


@program("equal")
def accelerate_accumulate(world: World) -> None:
    """accelerate: `with accelerator.accumulate(model)` in the step, which counts its calls."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 2).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world.keep(model, optimizer.optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor) -> float:
        with accelerator.accumulate(model):
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    for _ in range(4):
        world.note(train_step(torch.randn(8, 4).double()))


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the method training_step")
def lightning_like(world: World) -> None:
    """A module whose training_step returns the loss; a small trainer does the rest."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
            self.logged: dict[str, torch.Tensor] = {}

        @world.auto_batch
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            x, y = batch
            logits = self.net(x)
            loss = nn.functional.cross_entropy(logits, y)
            return {"loss": loss, "correct": (logits.argmax(1) == y).sum()}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    def fit(module: Module, batches: list[Any]) -> None:
        optimizer = module.configure_optimizers()
        world.keep(module, optimizer)
        for index, batch in enumerate(batches):
            told = module.training_step(batch, index)
            optimizer.zero_grad()
            told["loss"].backward()
            optimizer.step()
            world.note(told["loss"].item())
            world.note(told["correct"])

    rows = [(torch.randn(8, 6).double(), torch.randint(0, 3, (8,))) for _ in range(3)]
    fit(Module(), rows)
