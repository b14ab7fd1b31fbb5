"""A part of the zoo on a device: its models, real errors at five places of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from zoo.catalogue import MODELS
from zoo.model import ROWS

import oomkit
from gpu import DEVICE, DRY, block, farthest, random_state, room, same_bits, state_of, to_device
from oomkit.testing import force_slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]

CHOSEN = (
    *("mlp", "conv + BatchNorm", "depthwise conv", "GRU", "MultiheadAttention"),
    *("Transformer", "scaled-dot-product attention", "dense embedding", "weight tying"),
    *("checkpoint", "custom Function", "in-place", "frozen"),
)
"""Those whose names begin so, with a deterministic backward on CUDA but for the next ones. Not the
LSTM: it has dropout between layers, which cuDNN draws from a generator that torch does not show."""

ROUNDED = {"conv + BatchNorm": 1e-4}
"""Its adaptive pooling has none: without deterministic algorithms, within this share of the largest
value of each tensor."""

PLACES = ("entry", "forward", "loss", "backward", "end of backward")


def chosen(*starts: str) -> list[str]:
    return [
        name
        for name, model in MODELS.items()
        if any(name.lower().startswith(start.lower()) for start in starts) and not model.compiled
    ]


class Ballast:
    """8 units for each row at one place of a step, so that the error comes there."""

    def __init__(self, place: str) -> None:
        self.place, self.rows = place, 0

    def at(self, place: str) -> None:
        if place == self.place and self.rows:
            block(8 * self.rows)

    def hooked(self, loss: torch.Tensor, model: torch.nn.Module) -> None:
        if self.place == "backward":
            loss.register_hook(lambda gradient: self.at("backward"))


def rows_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, dict) else batch
    return max((rows_of(v) for v in values if isinstance(v, (torch.Tensor, dict, list))), default=0)


def trained(name: str, place: str | None, around: Callable[[], Any]) -> tuple[Any, Any, int]:
    """Outcome, slices of each of two steps, and errors."""
    zoo = MODELS[name]
    torch.manual_seed(11)
    model = zoo.make(torch.float32).to(DEVICE)
    batches = [to_device(zoo.batch(torch.float32)) for _ in range(2)]
    optimizer = zoo.optimizer(model.parameters())
    ballast = Ballast(place or "")
    sizes: list[int] = []
    plans: list[list[int]] = []

    def step(batch: Any) -> torch.Tensor:
        ballast.rows = rows_of(batch)
        sizes.append(ballast.rows)
        optimizer.zero_grad()
        ballast.at("entry")
        loss = zoo.loss(model, batch)
        ballast.at("forward")
        ballast.hooked(loss, model)
        ballast.at("loss")
        loss.backward()
        ballast.at("end of backward")
        optimizer.step()
        return loss.detach()

    decorated = oomkit.auto_batch(step, model=model, optimizer=optimizer, **zoo.options)
    losses = []
    for batch in batches:
        with around():
            losses.append(float(decorated(batch)))
        plans.append(sizes[-decorated.records[-1].accumulation_steps :])
    outcome = {**state_of(model), "losses": torch.tensor(losses), "random": random_state()}
    return outcome, plans, sum(record.ooms for record in decorated.records)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", chosen(*CHOSEN))
def test_recovered_equals_planned(name: str, place: str) -> None:
    rounded = 0.0 if DRY else ROUNDED.get(name, 0.0)
    torch.use_deterministic_algorithms(not rounded)
    got, plans, ooms = trained(name, place, lambda: room(8 * ROWS - 24))
    assert ooms >= 1, "no error was provoked"
    expected, _, _ = trained(name, None, lambda: force_slices(plans.pop(0)))
    if rounded:
        assert farthest(expected, got) < rounded
        assert torch.equal(expected["random"], got["random"])
    else:
        assert same_bits(expected, got) == []


def test_each_name_is_of_a_model() -> None:
    assert [start for start in CHOSEN if not chosen(start)] == []
    assert [name for name in ROUNDED if name not in chosen(*CHOSEN)] == []
