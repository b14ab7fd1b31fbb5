"""Recurrent networks, attention, embeddings, and sequences of several lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .base import Block
from .dense import classify, to
from .model import ROWS, add

Batch = dict[str, torch.Tensor]
LENGTH, WIDTH, VOCABULARY = 3, 8, 16


def vectors(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(ROWS, LENGTH, 4, dtype=dtype), "y": torch.randint(0, 3, (ROWS,))}


def tokens(dtype: torch.dtype) -> Batch:
    drawn = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
    return {"x": drawn[:, :-1].contiguous(), "y": drawn[:, 1:].contiguous()}


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.body = kind(4, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def lstm(dtype: torch.dtype) -> nn.Module:
    return Recurrent(nn.LSTM, num_layers=2, dropout=0.2).to(dtype)


def gru(dtype: torch.dtype) -> nn.Module:
    return Recurrent(nn.GRU, bidirectional=True).to(dtype)


class Attention(nn.Module):
    """MultiheadAttention whose weights take part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        y, weights = self.attention(h, h, h)
        return self.head((h + y).mean(1)) + weights.mean(dim=(1, 2))[:, None]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.inner(x))[:, 0])


class Decoder(nn.Module):
    """Scaled-dot-product attention, causal; a dense embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.block = Block(WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.token(x) + self.position))


class Bag(nn.Module):
    """Embeddings with sparse gradients, and a table beside them with a dense one."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse, padding_idx=0)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=sparse, mode="sum")
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1) + self.bag(x))


def words(dtype: torch.dtype) -> Batch:
    return {
        "x": torch.randint(0, VOCABULARY, (ROWS, LENGTH)),
        "y": torch.randint(0, 3, (ROWS,)),
    }


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def lengths() -> torch.Tensor:
    return torch.tensor([1 + i % LENGTH for i in range(ROWS)])


def padded(dtype: torch.dtype) -> Batch:
    return {**vectors(dtype), "n": lengths()}


class Packed(nn.Module):
    """Packs its sequences itself, which sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(4, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return self.head(self.body(packed)[1][-1])


def classify_packed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["n"]), batch["y"])


class PackedAlready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(4, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: PackedSequence) -> torch.Tensor:
        return self.head(self.body(x)[1][-1])


def packed(dtype: torch.dtype) -> dict[str, Any]:
    batch = vectors(dtype)
    x = pack_padded_sequence(batch["x"], lengths(), batch_first=True, enforce_sorted=False)
    return {"x": x, "y": batch["y"]}


def masked(dtype: torch.dtype) -> Batch:
    """Labels of -100 behind the end of each sequence."""
    batch = tokens(dtype)
    ends = torch.arange(LENGTH)[None] >= lengths()[:, None]
    return {"x": batch["x"], "y": batch["y"].masked_fill(ends, -100)}


def labelled(batch: Batch) -> float:
    return float((batch["y"] != -100).sum())


def masked_attention(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Rows are trimmed to the longest of the micro-batch; each row's own mean counts."""
    longest = int(batch["n"].max())
    x, n = batch["x"][:, :longest], batch["n"]
    here = torch.arange(longest)[None] < n[:, None]
    h = model.body(model.inner(x), src_key_padding_mask=~here)
    mean = (h * here[..., None]).sum(1) / n[:, None]
    return F.cross_entropy(model.head(mean), batch["y"])


add("LSTM", lstm, vectors, classify, moves=True)
add("GRU", gru, vectors, classify)
add("MultiheadAttention", to(Attention), vectors, classify, moves=True)
add("Transformer encoder", to(Encoder), vectors, classify, moves=True)
add("scaled-dot-product attention", to(Decoder, False), tokens, next_token)
add("weight tying", to(Decoder, True), tokens, next_token)
add("dense embedding", to(Bag, False), words, classify)
add("sparse embedding", to(Bag, True), words, classify, optimizer=plain_sgd, clip=False)
add("variable length", to(Encoder), padded, masked_attention, moves=True)
add(
    "variable length, token mean",
    to(Decoder, False),
    masked,
    next_token,
    options={"weight": labelled},
)
add("packed sequences", to(Packed), padded, classify_packed)
add("packed batch", to(PackedAlready), packed, classify)
