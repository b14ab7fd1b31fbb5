"""Sequences: recurrent networks, language models, packing, padding, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from zoo import GPT

from ..world import ROWS, World, program

VOCAB = 64
LENGTH = 8


class Reader(nn.Module):
    """A packed bidirectional LSTM and a classifier on its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[0], last[1]], dim=1))


@program("equal")
def lstm_packed(world: World) -> None:
    """LSTM classifier: sequences of several lengths are packed in the step."""
    model = Reader().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens, lengths), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    for _ in range(3):
        lengths = torch.randint(2, LENGTH + 1, (ROWS,))
        rows = [torch.randint(1, VOCAB, (int(n),)) for n in lengths]
        tokens = pad_sequence(rows, batch_first=True)
        world.note(train_step(tokens, lengths, torch.randint(0, 3, (ROWS,))))


@program("equal")
def rnn_hidden_carried(world: World) -> None:
    """Truncated backpropagation: the hidden state comes in, is detached, and goes out."""
    embedding, cell, head = nn.Embedding(VOCAB, 8), nn.GRUCell(8, 8), nn.Linear(8, VOCAB)
    model = nn.ModuleDict({"embedding": embedding, "cell": cell, "head": head}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(
        tokens: torch.Tensor, targets: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        hidden = hidden.detach()
        loss = torch.zeros((), dtype=hidden.dtype)
        for t in range(tokens.shape[1]):
            hidden = cell(embedding(tokens[:, t]), hidden)
            loss = loss + F.cross_entropy(head(hidden), targets[:, t])
        loss = loss / tokens.shape[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item(), hidden.detach()

    hidden = torch.zeros(ROWS, 8).double()
    text = torch.randint(0, VOCAB, (ROWS, 3 * 4 + 1))
    for start in range(0, 12, 4):
        tokens, targets = text[:, start : start + 4], text[:, start + 1 : start + 5]
        loss, hidden = train_step(tokens, targets, hidden)
        world.note(loss)
    world.note(hidden.sum())


def _time_first(world: World, decorate: Callable[..., Any], flat: bool) -> None:
    """Words in columns, time in dimension 0: a model with batch_first=False."""
    embedding, lstm, head = nn.Embedding(VOCAB, 8), nn.LSTM(8, 8), nn.Linear(8, VOCAB)
    model = nn.ModuleDict({"embedding": embedding, "lstm": lstm, "head": head}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    world.keep(model, optimizer)

    @decorate
    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        out, _ = lstm(embedding(tokens))
        loss = F.cross_entropy(head(out).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item()

    text = torch.randint(0, VOCAB, (3 * 4 + 1, ROWS))
    for start in range(0, 12, 4):
        targets = text[start + 1 : start + 5]
        targets = targets.reshape(-1) if flat else targets
        world.note(train_step(text[start : start + 4], targets))


@program("refused", says="targets")
def rnn_time_first_flat(world: World) -> None:
    """A word language model, time in dimension 0, targets flattened: the sizes disagree."""
    _time_first(world, world.auto_batch, flat=True)


@program("refused", decorated="@oomkit.auto_batch(verify=True)", says="cannot split .* exactly")
def rnn_time_first_verified(world: World) -> None:
    """Time in dimension 0 without dim=1: the parts do not add up."""
    _time_first(world, world.auto_batch(verify=True), flat=False)


@program("equal", decorated="@oomkit.auto_batch(dim=1)")
def rnn_time_first_named(world: World) -> None:
    """The same with dim=1."""
    _time_first(world, world.auto_batch(dim=1), flat=False)


def _language_model() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(vocab=VOCAB, width=16, length=LENGTH).double()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def _text(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


@program("equal")
def gpt_zero_last(world: World) -> None:
    """Transformer LM: clip, step, zero_grad(set_to_none) at the end; learning rate by hand."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = _token_loss(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (step + 1) / 3
        world.note(train_step(*_text()))


@program("equal", caller_backward=True, decorated="@oomkit.auto_batch, on the function of the loss")
def gpt_own_accumulation(world: World) -> None:
    """Transformer LM: the caller accumulates, `(loss / 4).backward()` over four calls."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @world.auto_batch
    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _token_loss(model, x, y)

    for _ in range(2):
        for _ in range(4):
            loss = compute_loss(*_text(5))
            (loss / 4).backward()
            world.note(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program("equal", accumulates=True, decorated="@oomkit.auto_batch, on the accumulation loop's body")
def gpt_backward_inside(world: World) -> None:
    """The same with the backward inside: each call adds a quarter of the gradient."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @world.auto_batch
    def accumulate(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = _token_loss(model, x, y) / 4
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(4):
            world.note(accumulate(*_text(5)))
        optimizer.step()


@program("refused", says=r"result|join=|next batch|size")
def gpt_prefetch(world: World) -> None:
    """The next batch is fetched in the step and returned: it cannot be joined."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)
    corpus = torch.randint(0, VOCAB, (200,))

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(corpus) - LENGTH, (ROWS,))
        rows = torch.stack([corpus[s : s + LENGTH + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @world.auto_batch
    def train_step(
        x: torch.Tensor, y: torch.Tensor
    ) -> tuple[float, tuple[torch.Tensor, torch.Tensor]]:
        loss = _token_loss(model, x, y)
        following = fetch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), following

    x, y = fetch()
    for _ in range(3):
        loss, (x, y) = train_step(x, y)
        world.note(loss)


def _padded(rows: int = ROWS) -> dict[str, torch.Tensor]:
    x, y = _text(rows)
    lengths = torch.randint(2, LENGTH + 1, (rows,))
    past = torch.arange(LENGTH)[None, :] >= lengths[:, None]
    return {"input_ids": x, "labels": y.masked_fill(past, -100)}


def labelled_tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def _train_padded(world: World, decorate: Callable[..., Any]) -> None:
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @decorate
    def train_step(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss = _token_loss(model, batch["input_ids"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "tokens": int((batch["labels"] != -100).sum())}

    for _ in range(3):
        told = train_step(_padded())
        world.note(told["loss"])
        world.note(told["tokens"])


@program("equal", decorated="@oomkit.auto_batch(weight=labelled_tokens)")
def gpt_padded(world: World) -> None:
    """Transformer LM on padded rows: the mean over tokens that are not -100, with weight=."""
    _train_padded(world, world.auto_batch(weight=labelled_tokens))


@program("equal", found={"weight": labelled_tokens})
def gpt_padded_unweighted(world: World) -> None:
    """The same without weight=: the proof finds the labels that are not -100."""
    _train_padded(world, world.auto_batch)


@program("equal", found={"weight": labelled_tokens})
def gpt_padded_later(world: World) -> None:
    """The first batch happens to be full, the later ones are padded; without weight=."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        loss = _token_loss(model, batch["input_ids"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    x, y = _text()
    lengths = torch.arange(1, ROWS + 1)[:, None]
    padded = y.masked_fill(torch.arange(LENGTH)[None, :] >= lengths, -100)
    for labels in (y, padded, padded):
        world.note(train_step({"input_ids": x, "labels": labels}))


@program("equal")
def gpt_tokens_given(world: World) -> None:
    """A sum over tokens divided by num_items_in_batch, which the caller counted."""
    model, optimizer = _language_model()
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, torch.Tensor], num_items_in_batch: int) -> float:
        logits = model(batch["input_ids"]).flatten(0, 1)
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss = loss / num_items_in_batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        batch = _padded()
        world.note(train_step(batch, labelled_tokens(batch)))


@program("equal")
def position_ids(world: World) -> None:
    """An attention mask per row, one row of position ids for all, which is not split."""
    model, optimizer = _language_model()
    table = nn.Embedding(LENGTH, 16).double()
    optimizer.add_param_group({"params": list(table.parameters())})
    world.keep(model, table, optimizer)

    @world.auto_batch
    def train_step(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
    ) -> float:
        hidden = model.token(input_ids) + table(position_ids)
        hidden = hidden * attention_mask[..., None]
        for block in model.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        x, y = _text()
        mask = (torch.rand(ROWS, LENGTH) < 0.9).double()
        world.note(train_step(x, torch.arange(LENGTH)[None, :], mask, y))
