"""Sequences of several lengths: the batch in dimension 1, packed sequences, masks, texts, bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from ..world import ROWS, World, program

VOCAB = 40
TAGS = 5
LENGTH = 6

Hidden = tuple[torch.Tensor, torch.Tensor]


class WordModel(nn.Module):
    """The model of PyTorch's word_language_model: words in columns, the state beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2)
        self.decoder = nn.Linear(8, VOCAB)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        out, hidden = self.lstm(self.embedding(words), hidden)
        return self.decoder(out), hidden

    def start(self, rows: int) -> Hidden:
        zeros = next(self.parameters()).new_zeros(2, rows, 8)
        return zeros, zeros.clone()


def batchify(text: torch.Tensor, rows: int) -> torch.Tensor:
    """Columns of running text: each goes on where the batch before it ended."""
    length = len(text) // rows
    return text[: length * rows].view(rows, length).t().contiguous()


def _words(world: World, decorate: Callable[..., Any], flat: bool) -> None:
    model = WordModel().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    world.keep(model, optimizer)

    @decorate
    def train_step(
        data: torch.Tensor, targets: torch.Tensor, hidden: Hidden
    ) -> tuple[float, Hidden]:
        hidden = (hidden[0].detach(), hidden[1].detach())
        model.zero_grad()
        out, hidden = model(data, hidden)
        loss = F.cross_entropy(out.flatten(0, 1), targets.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item(), hidden

    source = batchify(torch.randint(0, VOCAB, (100,)), ROWS)
    hidden = model.start(ROWS)
    for start in range(0, 3 * 4, 4):
        data, targets = source[start : start + 4], source[start + 1 : start + 5]
        loss, hidden = train_step(data, targets.reshape(-1) if flat else targets, hidden)
        assert hidden[0].shape == (2, ROWS, 8)
        world.note(loss)
    world.note(hidden[0].sum())
    world.note(hidden[1].sum())


@program("equal", decorated="@oomkit.auto_batch(dim=1)")
def words_in_columns(world: World) -> None:
    """word_language_model: columns of text, an LSTM state carried from call to call; dim=1."""
    _words(world, world.auto_batch(dim=1), flat=False)


@program("refused", decorated="@oomkit.auto_batch(dim=1)", says="targets")
def words_in_columns_flat(world: World) -> None:
    """The same with the targets flattened by the loader, as get_batch does: [T*B] has no dim 1."""
    _words(world, world.auto_batch(dim=1), flat=True)


@program("refused", says="data|targets|hidden")
def words_in_columns_unnamed(world: World) -> None:
    """The same without dim=: rows of time, and a state that has columns, do not go together."""
    _words(world, world.auto_batch, flat=True)


def _reviews(world: World, decorate: Callable[..., Any]) -> None:
    """Words in columns, a label for each column."""
    model = nn.ModuleDict(
        {"words": nn.Embedding(VOCAB, 8), "gru": nn.GRU(8, 8), "head": nn.Linear(8, 3)}
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @decorate
    def train_step(words: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        _, last = model["gru"](model["words"](words))
        loss = F.cross_entropy(model["head"](last[0]), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        words = torch.randint(0, VOCAB, (LENGTH, ROWS))
        world.note(train_step(words, torch.randint(0, 3, (ROWS,))))


@program("refused", decorated="@oomkit.auto_batch(dim=1)", says="labels")
def reviews_in_columns(world: World) -> None:
    """Classification of columns of words: the labels have no dimension 1."""
    _reviews(world, world.auto_batch(dim=1))


@program("equal", decorated='@oomkit.auto_batch(dim={"words": 1, "labels": 0})')
def reviews_in_columns_named(world: World) -> None:
    """The same with a dimension for each argument."""
    _reviews(world, world.auto_batch(dim={"words": 1, "labels": 0}))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, TAGS)

    def forward(self, words: PackedSequence) -> torch.Tensor:
        embedded = words._replace(data=self.embedding(words.data))
        out, _ = self.lstm(embedded)
        return self.head(out.data)


def _sentences(in_order: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lengths = torch.randint(1, LENGTH + 1, (ROWS,)).tolist()
    if in_order:
        lengths.sort(reverse=True)
    words = [torch.randint(1, VOCAB, (n,)) for n in lengths]
    return words, [torch.randint(0, TAGS, (n,)) for n in lengths]


def _tagger(world: World) -> tuple[Tagger, torch.optim.Optimizer]:
    model = Tagger().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)
    return model, optimizer


def number_of_words(batch: Any) -> int:
    return int(batch["lengths"].sum())


@program("equal", decorated="@oomkit.auto_batch(weight=number_of_words)")
def tagger_packs(world: World) -> None:
    """Tagging: words and tags are packed in the step; the loss is a mean over words."""
    model, optimizer = _tagger(world)

    @world.auto_batch(weight=number_of_words)
    def train_step(batch: dict[str, torch.Tensor]) -> float:
        words, tags = (
            pack_padded_sequence(
                batch[key], batch["lengths"], batch_first=True, enforce_sorted=False
            )
            for key in ("words", "tags")
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words), tags.data)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        words, tags = _sentences()
        batch = {
            "words": pad_sequence(words, batch_first=True),
            "tags": pad_sequence(tags, batch_first=True),
            "lengths": torch.tensor([len(w) for w in words]),
        }
        world.note(train_step(batch))


@program(
    "equal",
    decorated="@oomkit.auto_batch(verify=True)",
    found={"weight": lambda batch: (batch["words"] != 0).sum()},
)
def tagger_packs_unweighted(world: World) -> None:
    """The same with a list of lengths in order and without weight=: the proof counts the words
    that are not padding."""
    model, optimizer = _tagger(world)

    @world.auto_batch(verify=True)
    def train_step(batch: dict[str, Any]) -> float:
        words = pack_padded_sequence(batch["words"], batch["lengths"], batch_first=True)
        tags = pack_padded_sequence(batch["tags"], batch["lengths"], batch_first=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words), tags.data)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        words, tags = _sentences(in_order=True)
        batch = {
            "words": pad_sequence(words, batch_first=True),
            "tags": pad_sequence(tags, batch_first=True),
            "lengths": [len(w) for w in words],
        }
        world.note(train_step(batch))


def words_packed(batch: tuple[PackedSequence, PackedSequence]) -> int:
    return len(batch[0].data)


def _tag_packed(world: World, in_order: bool) -> None:
    model, optimizer = _tagger(world)

    @world.auto_batch(weight=words_packed)
    def train_step(words: PackedSequence, tags: PackedSequence) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words), tags.data)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        words, tags = _sentences(in_order)
        packed = (pack_sequence(part, enforce_sorted=in_order) for part in (words, tags))
        world.note(train_step(*packed))


@program("equal", decorated="@oomkit.auto_batch(weight=words_packed)")
def tagger_packed(world: World) -> None:
    """Tagging: the loader packs, in no order; PackedSequences are the arguments."""
    _tag_packed(world, in_order=False)


@program("equal", decorated="@oomkit.auto_batch(weight=words_packed)")
def tagger_packed_in_order(world: World) -> None:
    """The same in order of length, so that the sequences have no indices."""
    _tag_packed(world, in_order=True)


@program("equal")
def last_states_packed(world: World) -> None:
    """A PackedSequence and labels in a dictionary; a GRU's states are put back in order."""
    model = nn.ModuleDict({"gru": nn.GRU(4, 8, batch_first=True), "head": nn.Linear(8, 3)})
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        out, last = model["gru"](batch["frames"])
        padded, _ = pad_packed_sequence(out, batch_first=True)
        logits = model["head"](last[0] + padded[:, 0])
        loss = F.cross_entropy(logits, batch["label"])
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "logits": logits.detach()}

    for _ in range(3):
        frames = [torch.randn(len(w), 4).double() for w in _sentences()[0]]
        labels = torch.randint(0, 3, (ROWS,))
        told = train_step({"frames": pack_sequence(frames, enforce_sorted=False), "label": labels})
        assert told["logits"].shape == (ROWS, 3)
        world.note(told["loss"])
        world.note(told["logits"][4].sum())


@program("equal")
def masked_mean_per_row(world: World) -> None:
    """Padded rows with a boolean mask; the loss is a mean per row, then one over rows."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch
    def train_step(values: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        errors = (model(values)[..., 0] - targets).pow(2) * mask
        loss = (errors.sum(1) / mask.sum(1)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        rows = [torch.randn(len(w), 4).double() for w in _sentences()[0]]
        values = pad_sequence(rows, batch_first=True)
        mask = torch.arange(values.shape[1])[None] < torch.tensor([len(r) for r in rows])[:, None]
        world.note(train_step(values, mask, torch.randn(mask.shape).double()))


@program(
    "equal",
    decorated="@oomkit.auto_batch(verify=True)",
    found={"weight": lambda batch: batch[1].sum()},
)
def masked_mean_of_all(world: World) -> None:
    """The mean over everything that the mask lets through: the proof finds the mask."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.keep(model, optimizer)

    @world.auto_batch(verify=True)
    def train_step(values: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (model(values)[..., 0] - targets)[mask].pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        mask = torch.arange(LENGTH)[None] < torch.arange(1, ROWS + 1)[:, None]
        values = torch.randn(ROWS, LENGTH, 4).double()
        world.note(train_step(values, mask, torch.randn(mask.shape).double()))


def _ragged(world: World, decorate: Callable[..., Any], masked: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).double()
    head = nn.Linear(8, 3).double()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    world.keep(model, head, optimizer)

    @decorate
    def train_step(sequences: list[torch.Tensor], labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        sizes = torch.tensor([len(s) for s in sequences])[:, None]
        features = model(pad_sequence(sequences, batch_first=True))
        if masked:
            features = features * (torch.arange(features.shape[1]) < sizes)[..., None]
        loss = F.cross_entropy(head(features.sum(1) / sizes), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        lengths = [len(w) for w in _sentences()[0]]
        frames = [torch.ones(n, 4).double() for n in lengths]
        world.note(train_step(frames, torch.randint(0, 3, (ROWS,))))


@program("equal")
def ragged_list(world: World) -> None:
    """A list of sequences of several lengths beside their labels; padded and masked in the step."""
    _ragged(world, world.auto_batch, masked=True)


@program("refused", decorated="@oomkit.auto_batch(verify=True)", says="cannot split .* exactly")
def ragged_list_unmasked(world: World) -> None:
    """The same without a mask: the result for a row depends on the longest row of its batch."""
    _ragged(world, world.auto_batch(verify=True), masked=False)


def _captions() -> tuple[torch.Tensor, list[str]]:
    words = ["red", "green", "a", "cat", "dog", "on", "grass"]
    captions = [
        " ".join(words[i] for i in torch.randint(0, len(words), (n,)).tolist())
        for n in torch.randint(1, LENGTH, (ROWS,)).tolist()
    ]
    return torch.rand(ROWS, 3, 4, 4).double(), captions


def _describe(world: World) -> Callable[[torch.Tensor, list[str]], float]:
    eye = nn.Sequential(nn.Flatten(), nn.Linear(48, 8)).double()
    words = nn.EmbeddingBag(31, 8).double()
    optimizer = torch.optim.SGD([*eye.parameters(), *words.parameters()], lr=0.1)
    world.keep(eye, words, optimizer)

    def tokenize(caption: str) -> torch.Tensor:
        return torch.tensor([sum(map(ord, word)) % 31 for word in caption.split()])

    def train(images: torch.Tensor, captions: list[str]) -> float:
        tokens = [tokenize(caption) for caption in captions]
        offsets = torch.tensor([0, *(len(t) for t in tokens[:-1])]).cumsum(0)
        optimizer.zero_grad()
        loss = (eye(images) - words(torch.cat(tokens), offsets)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


@program("equal")
def captions_in_batch(world: World) -> None:
    """Images and strings of several lengths in one dictionary; tokenised in the step."""
    train = _describe(world)

    @world.auto_batch
    def train_step(batch: dict[str, Any]) -> float:
        return train(batch["image"], batch["caption"])

    for _ in range(3):
        images, captions = _captions()
        world.note(train_step({"image": images, "caption": captions}))


@program("equal", decorated='@oomkit.auto_batch(batch=("images", "captions"))')
def captions_named(world: World) -> None:
    """Images and a list of strings as two arguments, named by batch=."""
    train = _describe(world)

    @world.auto_batch(batch=("images", "captions"))
    def train_step(images: torch.Tensor, captions: list[str]) -> float:
        return train(images, captions)

    for _ in range(3):
        world.note(train_step(*_captions()))


@program("refused", says="captions.* as long as the batch")
def captions_unnamed(world: World) -> None:
    """The same without batch=: a list as long as the batch may be anything."""
    train = _describe(world)

    @world.auto_batch
    def train_step(images: torch.Tensor, captions: list[str]) -> float:
        return train(images, captions)

    for _ in range(3):
        world.note(train_step(*_captions()))


def _bags(world: World, decorate: Callable[..., Any], order: tuple[str, str, str]) -> None:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(VOCAB, 8), "head": nn.Linear(8, 3)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    world.keep(model, optimizer)

    def train(label: torch.Tensor, text: torch.Tensor, offsets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model["head"](model["bag"](text, offsets)), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.item()

    @decorate
    def train_step(first: Any, second: Any, third: Any) -> float:
        return train(**dict(zip(order, (first, second, third), strict=True)))

    for _ in range(3):
        words, _ = _sentences()
        batch = {
            "label": torch.randint(0, 3, (ROWS,)),
            "text": torch.cat(words),
            "offsets": torch.tensor([0, *(len(w) for w in words[:-1])]).cumsum(0),
        }
        world.note(train_step(*(batch[name] for name in order)))


@program("refused", says="offsets|second|third")
def bag_with_offsets(world: World) -> None:
    """The text classification tutorial: labels, one flat text, offsets into it."""
    _bags(world, world.auto_batch, ("label", "text", "offsets"))


@program("refused", says="offsets|second|third")
def bag_with_offsets_text_first(world: World) -> None:
    """The same with the flat text in front: its words would be treated as the rows."""
    _bags(world, world.auto_batch, ("text", "offsets", "label"))
