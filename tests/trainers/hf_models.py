"""Tiny trainers of transformers: models from configurations, data from lists."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf

WORDS, LENGTH = 64, 12

_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def tokens(rows: int = 16, ragged: bool = True, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of tokens, padded; the labels of padding are -100."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(rows):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        length = int(torch.randint(4, LENGTH, (1,), generator=generator)) if ragged else LENGTH
        mask = (torch.arange(LENGTH) < length).long()
        labels = ids.clone()
        labels[length:] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def labelled(kind: str, rows: int = 16) -> list[dict[str, Any]]:
    """Rows of tokens with labels of the kind "class", "float", "tags" or "masked"."""
    generator = torch.Generator().manual_seed(2)
    found = tokens(rows)
    for row in found:
        if kind == "class":
            row["labels"] = torch.randint(0, 3, (), generator=generator)
        elif kind == "float":
            row["labels"] = torch.rand((), generator=generator)
        elif kind == "tags":
            tags = torch.randint(0, 3, (LENGTH,), generator=generator)
            row["labels"] = torch.where(row["labels"] == -100, row["labels"], tags)
        else:
            hidden = torch.rand(LENGTH, generator=generator) < 0.4
            row["labels"] = torch.where(hidden, row["labels"], -100)
    return found


def lm(**more: Any) -> torch.nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**size, **off, "use_cache": False, **more}))


def bert(head: str, dropout: float = 0.0, **more: Any) -> torch.nn.Module:
    rates = dict.fromkeys(_OFF, dropout)
    config = hf.BertConfig(**{**_BERT, **rates, "num_labels": 3, **more})
    model: torch.nn.Module = getattr(hf, f"BertFor{head}")(config)
    return model


def t5() -> torch.nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def segmenter() -> torch.nn.Module:
    config = hf.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        patch_sizes=[3],
        strides=[2],
        num_attention_heads=[1],
        mlp_ratios=[1],
        decoder_hidden_size=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        semantic_loss_ignore_index=255,
    )
    return _without_statistics(hf.SegformerForSemanticSegmentation(config))


def vit_segmenter() -> torch.nn.Module:
    """A ViT with the head of DPT; the loss of its auxiliary head is a second mean of labels."""
    config = hf.DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[4, 4, 4, 4],
        fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 1],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        semantic_classifier_dropout=0.0,
        num_labels=3,
    )
    model = _without_statistics(hf.DPTForSemanticSegmentation(config))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # that of the auxiliary head has no option
    return model


def _without_statistics(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
    return model


def images(rows: int = 16, size: int = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for at in range(rows):
        labels = torch.randint(0, 3, (size, size), generator=generator)
        labels[: at % 5] = 255
        pixels = torch.rand(3, size, size, generator=generator)
        found.append({"pixel_values": pixels, "labels": labels})
    return found


def arguments(kind: type = hf.TrainingArguments, **more: Any) -> Any:
    folder = more.pop("output_dir", None) or tempfile.mkdtemp(prefix="oomkit-trainers-")
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "learning_rate": 0.05,
        "optim": "sgd",
        "seed": 3,
    }
    return kind(**{**given, **more})


def trainer(
    model: Any, data: list[dict[str, Any]], kind: Any = hf.Trainer, folder: Any = None, **more: Any
) -> Any:
    """A trainer of this model; what is no option of the trainer is one of its arguments.

    Args:
        model: made after the seed was set, so a function.
        data: rows; the first half is evaluated.
        kind: class.
        folder: for checkpoints.
        more: options.
    """
    own = ("compute_loss_func", "compute_metrics", "callbacks", "data_collator", "model_init")
    options = {name: more.pop(name) for name in own if name in more}
    options_kind = more.pop("arguments_kind", hf.TrainingArguments)
    torch.manual_seed(0)
    if "model_init" not in options:
        options["model"] = model()
    return kind(
        args=arguments(options_kind, output_dir=folder, **more),
        train_dataset=data,
        eval_dataset=data[:8],
        **options,
    )


def tokenizer() -> Any:
    """One word, one token: made here, nothing is downloaded."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))]
    made = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(one_label: bool = False, saved: Path | None = None) -> torch.nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.2,  # so that rows differ in what is logged of them
    )
    if one_label:
        config.num_labels = 1
        return hf.LlamaForSequenceClassification(config)
    model = hf.LlamaForCausalLM(config)
    if saved is not None:  # TRL loads a reference from where the model came from
        model.save_pretrained(saved)
        model = hf.LlamaForCausalLM.from_pretrained(saved)
    return model
