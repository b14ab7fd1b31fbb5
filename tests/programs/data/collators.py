"""Hugging Face's tokenizers and collators: BatchEncoding, padding, masking, seq2seq labels."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import functools
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)
from transformers.tokenization_utils_base import BatchEncoding

from ..world import ROWS, World, program

WORDS = "a the cat dog bird sees hears old red big small and not".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = len(SPECIAL) + len(WORDS)
LONGEST = 8


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A whole tokenizer of a dozen words: nothing is downloaded."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _texts(rows: int = ROWS) -> list[str]:
    lengths = torch.randint(1, LONGEST - 1, (rows,)).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,))) for n in lengths]


def _small(model: type[nn.Module], labels: int = 3) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=labels,
    )
    return model(config).double().train()


def _train(
    world: World,
    model: nn.Module,
    batches: list[Any],
    decorate: Callable[..., Any],
    compute: Callable[[Any], torch.Tensor] | None = None,
) -> None:
    """As the scripts in transformers/examples do it without Trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @decorate
    def train_step(batch: Any) -> torch.Tensor:
        loss = model(**batch).loss if compute is None else compute(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in batches:
        world.note(train_step(batch))


@program("equal")
def encoded_in_loader(world: World) -> None:
    """BERT classification on the tokenizer's BatchEncoding, with the labels in it."""
    batches = []
    for _ in range(3):
        batch = tokenizer()(_texts(), padding=True, return_tensors="pt")
        batch["labels"] = torch.randint(0, 3, (ROWS,))
        assert type(batch) is BatchEncoding
        batches.append(batch)
    _train(world, _small(BertForSequenceClassification), batches, world.auto_batch)


@program("equal")
def encoded_with_attributes(world: World) -> None:
    """The step reads attributes and the device of the BatchEncoding, and pops the labels."""
    model = _small(BertForSequenceClassification)

    def compute(batch: BatchEncoding) -> torch.Tensor:
        batch = batch.to("cpu")
        labels = batch.pop("labels")
        out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        assert batch.input_ids.shape[0] == len(labels)
        return nn.functional.cross_entropy(out.logits, labels)

    batches = []
    for _ in range(3):
        batch = tokenizer()(_texts(), padding="max_length", max_length=LONGEST, return_tensors="pt")
        batch["labels"] = torch.randint(0, 3, (ROWS,))
        batches.append(batch)
    _train(world, model, batches, world.auto_batch, compute)


@program("equal")
def encoded_in_step(world: World) -> None:
    """Texts and labels are the batch; the tokenizer runs in the step, padding to the longest."""
    model = _small(BertForSequenceClassification)

    def compute(batch: dict[str, Any]) -> torch.Tensor:
        encoded = tokenizer()(batch["text"], padding=True)
        ids, mask = (torch.tensor(encoded[key]) for key in ("input_ids", "attention_mask"))
        return model(input_ids=ids, attention_mask=mask, labels=batch["label"]).loss

    batches = [{"text": _texts(), "label": torch.randint(0, 3, (ROWS,))} for _ in range(3)]
    _train(world, model, batches, world.auto_batch, compute)


@program("equal")
def collator_with_padding(world: World) -> None:
    """DataCollatorWithPadding over features of several lengths."""
    collate = DataCollatorWithPadding(tokenizer())
    batches = []
    for _ in range(3):
        features = [{**tokenizer()(text), "label": len(text) % 3} for text in _texts()]
        batches.append(collate(features))
    _train(world, _small(BertForSequenceClassification), batches, world.auto_batch)


@program("equal")
def collator_default_pairs(world: World) -> None:
    """Pairs of sentences of one length, regression, default_data_collator: a plain dictionary."""
    batches = []
    for _ in range(3):
        pairs = tokenizer()(_texts(), _texts(), padding="max_length", max_length=2 * LONGEST)
        features = [
            {**{key: pairs[key][i] for key in pairs}, "label": float(i) / ROWS} for i in range(ROWS)
        ]
        batch = default_data_collator(features)
        batch["labels"] = batch["labels"].double()
        batches.append(batch)
    _train(world, _small(BertForSequenceClassification, labels=1), batches, world.auto_batch)


@program("equal")
def question_answering(world: World) -> None:
    """Extractive questions: start and end positions, two cross-entropies over the rows."""
    batches = []
    for _ in range(3):
        batch = tokenizer()(_texts(), _texts(), padding=True, return_tensors="pt")
        length = batch["input_ids"].shape[1]
        batch["start_positions"] = torch.randint(0, length, (ROWS,))
        batch["end_positions"] = torch.randint(0, length, (ROWS,))
        batches.append(batch)
    _train(world, _small(BertForQuestionAnswering, labels=2), batches, world.auto_batch)


def labelled_tokens(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def _masked() -> list[Any]:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=True, mlm_probability=0.4)
    made = []
    while len(made) < 3:
        batch = collate([tokenizer()(text) for text in _texts()])
        counted = (batch["labels"] != -100).sum(1)
        if counted[:4].sum() > 1 and counted[4:].sum() > 1 and counted[:4].sum() != 4:
            made.append(batch)
    return made


_WEIGHTED = "@oomkit.auto_batch(weight=labelled_tokens)"


@program("equal", decorated=_WEIGHTED)
def collator_masked(world: World) -> None:
    """Masked language modelling: a few tokens of each row have a label; weight= counts them."""
    _train(world, _small(BertForMaskedLM), _masked(), world.auto_batch(weight=labelled_tokens))


@program("equal", found={"weight": labelled_tokens})
def collator_masked_unweighted(world: World) -> None:
    """The same without weight=: the proof finds the labels that are not -100."""
    _train(world, _small(BertForMaskedLM), _masked(), world.auto_batch)


@program("equal", decorated=_WEIGHTED, tolerance=1e-5)
def collator_causal(world: World) -> None:
    """The same collator with mlm=False and GPT-2, which shifts the labels: weight= by hand."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=2
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).double().train()
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    batches = [collate([tokenizer()(text) for text in _texts()]) for _ in range(3)]

    def labelled_tokens(batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    _train(world, model, batches, world.auto_batch(weight=labelled_tokens))


@program("equal", decorated=_WEIGHTED)
def collator_tags(world: World) -> None:
    """Token classification: DataCollatorForTokenClassification pads the tags with -100."""
    collate = DataCollatorForTokenClassification(tokenizer())
    batches = []
    for _ in range(3):
        features = []
        for text in _texts():
            encoded = tokenizer()(text)
            tags = torch.randint(0, 3, (len(encoded["input_ids"]),)).tolist()
            features.append({**encoded, "labels": tags})
        batches.append(collate(features))
    model = _small(BertForTokenClassification)
    _train(world, model, batches, world.auto_batch(weight=labelled_tokens))


def _t5(dropout: float = 0.0) -> nn.Module:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=3,
    )
    return T5ForConditionalGeneration(config).double().train()


def _translated(model: nn.Module) -> list[Any]:
    collate = DataCollatorForSeq2Seq(tokenizer(), model=model)
    batches = []
    for _ in range(3):
        features = [
            {**tokenizer()(text), "labels": tokenizer()(other)["input_ids"]}
            for text, other in zip(_texts(), _texts(), strict=True)
        ]
        batches.append(collate(features))
    assert "decoder_input_ids" in batches[0]
    return batches


@program("equal", decorated=_WEIGHTED)
def collator_seq2seq(world: World) -> None:
    """T5 and DataCollatorForSeq2Seq: sources and targets of their own lengths, decoder inputs."""
    model = _t5()
    _train(world, model, _translated(model), world.auto_batch(weight=labelled_tokens))


@program("equal", decorated="@oomkit.auto_batch(weight=labelled_tokens)", compare="slices")
def collator_seq2seq_dropout(world: World) -> None:
    """The same with T5's dropout: another plan draws other masks."""
    model = _t5(dropout=0.1)
    _train(world, model, _translated(model), world.auto_batch(weight=labelled_tokens))


@program("equal")
def items_counted_by_trainer(world: World) -> None:
    """As in Trainer since 4.46: num_items_in_batch beside the collator's batch; a sum over it."""
    model = _t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.keep(model, optimizer)

    @world.auto_batch
    def training_step(
        inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> float:
        labels = inputs["labels"]
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = loss / num_items_in_batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for batch in _translated(model):
        world.note(training_step(batch, num_items_in_batch=(batch["labels"] != -100).sum()))


@program("equal")
def sentence_columns(world: World) -> None:
    """sentence-transformers: a list of columns, each a BatchEncoding; a cosine per pair."""
    model = _small(BertModel)

    def compute(batch: dict[str, Any]) -> torch.Tensor:
        pooled = []
        for column in batch["columns"]:
            mask = column["attention_mask"][..., None]
            states = model(**column).last_hidden_state
            pooled.append((states * mask).sum(1) / mask.sum(1))
        return (torch.cosine_similarity(*pooled) - batch["score"]).pow(2).mean()

    batches = []
    for _ in range(3):
        columns = [tokenizer()(_texts(), padding=True, return_tensors="pt") for _ in range(2)]
        batches.append({"columns": columns, "score": torch.rand(ROWS).double()})
    _train(world, model, batches, world.auto_batch, compute)


def _negatives(model: nn.Module, columns: Any) -> torch.Tensor:
    first, second = (
        nn.functional.normalize(model(**column).last_hidden_state[:, 0], dim=-1)
        for column in columns
    )
    scores = 20.0 * first @ second.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def _columns() -> list[Any]:
    return [tokenizer()(_texts(), padding=True, return_tensors="pt") for _ in range(2)]


@program("refused", decorated="@oomkit.auto_batch(verify=True)", says="cannot split .* exactly")
def sentence_negatives(world: World) -> None:
    """The same with in-batch negatives: every other sentence of the batch is a wrong answer."""
    model = _small(BertModel)
    batches = [dict(zip(("anchor", "positive"), _columns(), strict=True)) for _ in range(3)]

    def compute(batch: dict[str, Any]) -> torch.Tensor:
        return _negatives(model, (batch["anchor"], batch["positive"]))

    _train(world, model, batches, world.auto_batch(verify=True), compute)


@program("refused", says="may be 2 samples, or columns of 7 rows")
def sentence_list(world: World) -> None:
    """The two columns in a list and nothing else: they could be two samples."""
    model = _small(BertModel)
    batches = [_columns() for _ in range(3)]
    _train(world, model, batches, world.auto_batch, lambda batch: _negatives(model, batch))
