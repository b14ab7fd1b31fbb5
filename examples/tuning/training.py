"""What a trial trains: models of transformers with random weights, on texts that are made up.

Nothing is downloaded. On the CPU layers and widths are a twelfth of the originals', so
that a trial takes seconds; vocabularies are whole. On CUDA the models have their full size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import oomkit

LENGTH = 512  # tokens of a text; a trial reads the first tok.max_length
SIGNS = (5, 6)  # tokens that tell the class of a text
FIRST = 10  # of the tokens that tell nothing

# name: (family, layers, heads, width, vocabulary) of the original
MODELS = {
    "bert-base": ("bert", 12, 12, 768, 30_522),
    "bert-large": ("bert", 24, 16, 1024, 30_522),
    "roberta-base": ("roberta", 12, 12, 768, 50_265),
    "roberta-large": ("roberta", 24, 16, 1024, 50_265),
    "deberta-v3-base": ("deberta", 12, 12, 768, 128_100),
    "deberta-v3-large": ("deberta", 24, 16, 1024, 128_100),
    "xlm-roberta-base": ("xlm-roberta", 12, 12, 768, 250_002),
}


@dataclass(frozen=True)
class Scale:
    """How large things are: `rows` texts are trained on, a quarter as many are evaluated."""

    device: torch.device
    rows: int
    epochs: int = 2
    layers: int = 12  # the original's divided by this
    heads: int = 3
    width: int = 12

    @property
    def test_rows(self) -> int:
        return max(8, self.rows // 4)


def scale_of(device: str, rows: int | None) -> Scale:
    found = torch.device(device)
    if found.type == "cuda":
        return Scale(found, rows or 2048, layers=1, heads=1, width=1)
    return Scale(found, rows or 48)


def make_model(name: str, scale: Scale) -> torch.nn.Module:
    family, layers, heads, width, vocabulary = MODELS[name]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width // scale.width,
        "intermediate_size": 4 * width // scale.width,
        "num_hidden_layers": layers // scale.layers,
        "num_attention_heads": heads // scale.heads,
        "num_labels": len(SIGNS),
        "attention_probs_dropout_prob": 0.0,  # else torch keeps all pairs of tokens on the CPU
    }
    if family == "deberta":
        config: Any = transformers.DebertaV2Config(
            **sizes,
            max_position_embeddings=LENGTH,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=256,
            position_biased_input=False,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
        return transformers.DebertaV2ForSequenceClassification(config).to(scale.device)
    kinds = {
        "bert": (transformers.BertConfig, transformers.BertForSequenceClassification),
        "roberta": (transformers.RobertaConfig, transformers.RobertaForSequenceClassification),
        "xlm-roberta": (
            transformers.XLMRobertaConfig,
            transformers.XLMRobertaForSequenceClassification,
        ),
    }
    make_config, make = kinds[family]
    # RoBERTa counts positions from the padding token on.
    config = make_config(**sizes, max_position_embeddings=LENGTH + 2)
    return make(config).to(scale.device)


def make_texts(vocabulary: int, rows: int, seed: int, scale: Scale) -> dict[str, torch.Tensor]:
    """Noise in which one token of 4 tells the class: the more is read, the clearer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FIRST, vocabulary, (rows, LENGTH), generator=generator)
    labels = torch.randint(len(SIGNS), (rows,), generator=generator)
    tells = torch.rand((rows, LENGTH), generator=generator) < 1 / 4
    tokens = torch.where(tells, torch.tensor(SIGNS)[labels][:, None], tokens)
    return {"input_ids": tokens.to(scale.device), "labels": labels.to(scale.device)}


def batches_of(texts: Mapping[str, Any], size: int, length: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(texts["labels"]), size):
        ids = texts["input_ids"][start : start + size, :length]
        labels = texts["labels"][start : start + size]
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@dataclass
class Trained:
    """What a training has to tell, also when it is cut short."""

    parameters: int = 0
    loss: float = float("nan")
    micro_batch: int | None = None  # rows of the smallest micro-batch; None: never split
    ooms: int = 0  # out-of-memory errors that the training survived


def train(
    config: Mapping[str, Any],
    scale: Scale,
    report: Callable[[int, float], None],
    plain: bool,
    told: Trained,
) -> float:
    """The loss on the texts for evaluation, after the last epoch. `plain`: without oomkit."""
    torch.manual_seed(0)
    model: Any = make_model(config["model"], scale)
    if config.get("grad_checkpointing"):
        model.gradient_checkpointing_enable()
    told.parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    texts = make_texts(model.config.vocab_size, scale.rows, 1, scale)
    test = make_texts(model.config.vocab_size, scale.test_rows, 2, scale)
    size, length = config["batch_size"], config["max_length"]

    def backward(batch: dict[str, Any], accumulate: int) -> None:
        (model(**batch).loss / accumulate).backward()

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return model(**batch).loss

    if not plain:  # the change: a batch that does not fit is run in parts
        backward = oomkit.auto_batch(backward, label="train")
        loss_of = oomkit.auto_batch(loss_of, label="evaluate")

    try:
        for epoch in range(scale.epochs):
            model.train()
            batches = list(batches_of(texts, size, length))
            for number, batch in enumerate(batches):
                begun = number - number % config["grad_accum"]
                backward(batch, min(config["grad_accum"], len(batches) - begun))
                if number + 1 in (begun + config["grad_accum"], len(batches)):
                    optimizer.step()
                    optimizer.zero_grad()
            model.eval()
            losses = [
                float(loss_of(batch)) * len(batch["labels"])
                for batch in batches_of(test, size, length)
            ]
            told.loss = sum(losses) / scale.test_rows
            report(epoch, told.loss)
    finally:
        if not plain:
            note(told, backward.records)
    return told.loss


def note(told: Trained, records: Any) -> None:
    """What the steps had to do to fit."""
    told.ooms = sum(record.ooms for record in records)
    if any(record.accumulation_steps > 1 for record in records):
        told.micro_batch = min(record.micro_batch_size for record in records)
