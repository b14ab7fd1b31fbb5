"""Losses and statistics that look at more than one row, or are means over something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .judge import Batch, Step, World
from .known import (
    CLASSES,
    HIDDEN,
    IGNORED,
    WIDE,
    classify,
    drawn,
    floats,
    labels,
    net,
    one,
    padded,
    pair,
    program,
    sgd,
    step_of,
    whole,
)


@program()
def pairs_chunked(n: int) -> World:
    """Chosen and rejected answers are the halves of the batch (DPO, reward models)."""
    model = net(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        chosen, rejected = model(x).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    return whole(loss_of, model, one(n), raises=True)


@program()
def pairs_by_half(n: int) -> World:
    """The same by an index: a single row has no pair, and the mean of nothing is NaN."""
    model = net(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        scores, half = model(x), len(x) // 2
        return -F.logsigmoid(scores[:half] - scores[half : 2 * half]).mean()

    return whole(loss_of, model, one(n))


@program()
def contrastive_halves(n: int) -> World:
    """Two views in one forward: the second half are the augmented rows of the first."""
    model = net(4)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(model(x), dim=1).chunk(2)
        return F.cross_entropy(a @ b.T * 4, torch.arange(len(a)))

    return whole(loss_of, model, one(n), raises=True)


@program()
def cross_entropy_class_weights(n: int) -> World:
    """nn.CrossEntropyLoss(weight=...): a mean over the weights of the labels."""
    model = net()
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    return whole(classify(model, weight=weights), model, pair(n))


@program(rows=7)
def cross_entropy_class_weights_module(n: int) -> World:
    """The same as a module, reduction="mean" said, an odd batch."""
    model = net()
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 0.1, 2.0]).double(), reduction="mean")
    return whole(lambda x, y: criterion(model(x), y), model, pair(n))


def _tokens() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(9, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 9)
    ).double()


@program()
def causal_lm(n: int) -> World:
    """Labels are shifted inside the model, padding is -100: a mean over tokens."""
    model = _tokens()

    def loss_of(ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = model(ids)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, wanted[:, 1:].flatten(), ignore_index=IGNORED)

    def batch(call: int) -> Batch:
        wanted = padded(call, n, 6, below=9)
        return wanted.clamp(min=0), wanted

    return whole(loss_of, model, batch)


@program()
def causal_lm_mask(n: int) -> World:
    """The same with an attention mask in the place of -100: sum(loss * mask) / sum(mask)."""
    model = _tokens()

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"])[:, :-1].transpose(1, 2)
        each = F.cross_entropy(logits, batch["input_ids"][:, 1:], reduction="none")
        mask = batch["attention_mask"][:, 1:]
        return (each * mask).sum() / mask.sum()

    def batch(call: int) -> Batch:
        wanted = padded(call, n, 6, below=9)
        return ({"input_ids": wanted.clamp(min=0), "attention_mask": (wanted >= 0).double()},)

    return whole(loss_of, model, batch)


@program()
def masked_lm(n: int) -> World:
    """Labels at few places only, -100 elsewhere."""
    model = _tokens()

    def batch(call: int) -> Batch:
        ids = labels(call, n, 6, below=9)
        chosen = torch.rand(n, 6, generator=drawn(call, 7)) < 0.3
        chosen[:, 0] = True
        return ids, torch.where(chosen, ids, IGNORED)

    return whole(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), model, batch)


@program(rows=6)
def segmentation_255(n: int) -> World:
    """A mean over the pixels that are labelled; 255 is ignored."""
    model = nn.Conv2d(2, CLASSES, 3, padding=1).double()

    def batch(call: int) -> Batch:
        wanted = padded(call, n, 16, pad=255).view(n, 4, 4)
        return floats(call, n, 2, 4, 4), wanted

    return whole(classify(model, ignore_index=255), model, batch)


@program()
def num_items_ignored(n: int) -> World:
    """num_items_in_batch is passed, and the model takes a plain mean all the same."""
    model = net()
    optimizer = sgd(model)
    train = step_of(classify(model), optimizer)

    def step(x: torch.Tensor, y: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
        return train(x, y)

    return World(step, [model, optimizer], lambda call: (*pair(n)(call), n))


@program()
def num_items_ignored_returned(n: int) -> World:
    """The same as a model whose forward returns the loss; the tensor is 0-d."""
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def drive(step: Step, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = step(*batch[:2], num_items_in_batch=torch.tensor(n))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return World(step, [model, optimizer], pair(n), drive)


@program()
def num_items_in_the_batch(n: int) -> World:
    """num_items_in_batch is a key of the batch: a sum over tokens, divided by that."""
    model = _tokens()

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        logits = model(batch["x"]).flatten(0, 1)
        total = F.cross_entropy(logits, batch["y"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]

    def batch(call: int) -> Batch:
        wanted = padded(call, n, 6, below=9)
        items = (wanted != IGNORED).sum()
        return ({"x": wanted.clamp(min=0), "y": wanted, "num_items_in_batch": items},)

    return whole(loss_of, model, batch)


@program()
def advantages_normalised(n: int) -> World:
    """PPO: advantages are normalised over the rows that the step sees."""
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        chosen = model(x).log_softmax(1).gather(1, y[:, None]).squeeze(1)
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        return -(chosen * advantage).mean()

    return whole(loss_of, model, lambda call: (*pair(n)(call), floats(call, n, more=3)))


@program()
def hard_examples(n: int) -> World:
    """The half of the batch with the largest losses."""
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.topk(max(1, len(each) // 2)).values.mean()

    return whole(loss_of, model, pair(n))


@program()
def hardest_triplets(n: int) -> World:
    """For each row the farthest of its class and the nearest of another in the batch."""
    model = net(4)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = model(x)
        apart = (z[:, None] - z[None]).square().sum(-1)
        same = y[:, None] == y[None]
        farthest = (apart * same).max(1).values
        nearest = (apart + same * 100.0).min(1).values
        return F.relu(farthest - nearest + 0.5).mean()

    return whole(loss_of, model, pair(n))


@program()
def in_batch_negatives(n: int) -> World:
    """Every other row is a negative; of a single row the loss and its gradient are 0."""
    model = net(4)

    def loss_of(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scores = model(x) @ model(other).T
        return F.cross_entropy(scores, torch.arange(len(x)))

    return whole(
        loss_of, model, lambda call: (floats(call, n, WIDE), floats(call, n, WIDE, more=9))
    )


@program()
def dice(n: int) -> World:
    """Overlap over all pixels of the batch."""
    model = nn.Conv2d(2, 1, 3, padding=1).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        guess = model(x).sigmoid()
        return 1 - 2 * (guess * y).sum() / (guess.sum() + y.sum())

    return whole(
        loss_of,
        model,
        lambda call: (floats(call, n, 2, 3, 3), labels(call, n, 1, 3, 3, below=2).double()),
    )


@program()
def sum_with_penalty(n: int) -> World:
    """reduction="sum", and a penalty on the weights that counts once."""
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y, reduction="sum") + 0.01 * penalty

    return whole(loss_of, model, pair(n), options={"reduction": "sum"})


@program()
def sum_forgotten(n: int) -> World:
    """A sum over the rows, and nothing is said of it."""
    model = net()
    return whole(classify(model, reduction="sum"), model, pair(n))


@program()
def cumulative(n: int) -> World:
    """Sums along the batch."""
    model = net(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).cumsum(0).square().mean()

    return whole(loss_of, model, one(n))


@program()
def sorted_rows(n: int) -> World:
    """Weights by rank in the batch, as in losses of ranks and quantiles."""
    model = net(1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        ranked = model(x).squeeze(1).sort().values
        return (ranked * torch.linspace(-1, 1, len(x), dtype=torch.float64)).mean()

    return whole(loss_of, model, one(n))


@program()
def root_of_the_mean(n: int) -> World:
    """RMSE: the root of a mean is no mean of roots."""
    model = net(1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x).squeeze(1), y).sqrt()

    return whole(loss_of, model, lambda call: (floats(call, n, WIDE), floats(call, n, more=4)))


@program()
def perplexity_returned(n: int) -> World:
    """The gradient is a mean's; what is returned is exp() of it."""
    model = net()
    optimizer = sgd(model)
    train = step_of(classify(model), optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        return float(train(x, y).exp())

    return World(step, [model, optimizer], pair(n))


@program(exact=True)
def batchnorm(n: int) -> World:
    """BatchNorm: as the same slices by hand, statistics that move with each of them."""
    model = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh()).double()
    head = nn.Sequential(model, nn.Linear(HIDDEN, CLASSES).double())
    return whole(classify(head), head, pair(n), hand=True, raises=True)
