"""state_dict() and load_state_dict() of a step: its sizes in a user's checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit import sizes
from sizes import sizes_world as world

TIGHT = 4_200_000


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    torch.manual_seed(0)
    step = world.training()
    calls = world.run(step, TIGHT)
    state = step.state_dict()
    assert calls[-1][0] == state["signatures"][0]["accumulation_steps"] > 1
    return state


def test_it_goes_through_a_checkpoint(known: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"step": known}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert loaded == known == json.loads(json.dumps(known))
    step = world.training()
    step.load_state_dict(loaded)
    assert step.state_dict() == known
    best = known["signatures"][0]["accumulation_steps"]
    calls = world.run(step, TIGHT)
    assert calls == [(best, 0, "remembered")] * 6


def test_it_begins_there_whatever_was_asked_for(known: dict[str, Any]) -> None:
    step = world.training(accumulation_steps=world.ROWS)
    step.load_state_dict(known)
    best = known["signatures"][0]["accumulation_steps"]
    assert world.run(step, TIGHT, 2) == [(best, 0, "remembered")] * 2


def test_loading_replaces_what_was_known(known: dict[str, Any]) -> None:
    step = world.training()
    world.run(step, 3_600_000)
    assert step.records[-1].accumulation_steps > known["signatures"][0]["accumulation_steps"]
    step.load_state_dict(known)
    assert step.state_dict() == known
    assert world.run(step, TIGHT, 1)[0][1] == 0
    step.load_state_dict({**known, "signatures": []})
    assert step.state_dict()["signatures"] == []
    assert world.run(step, TIGHT, 1)[0][1] >= 1  # it knows nothing


def test_nothing_known() -> None:
    step = world.training()
    empty = step.state_dict()
    assert (empty["version"], empty["device"], empty["signatures"]) == (1, "cpu", [])
    step(*world.batch())
    assert step.state_dict()["signatures"] == []
    step.load_state_dict(empty)
    step(*world.batch())
    assert step.records[-1].reason == "whole"


@pytest.mark.parametrize("name", ["torch", "device", "parameters"])
def test_from_elsewhere_it_is_a_hint(known: dict[str, Any], name: str) -> None:
    """Sizes hold as a neighbour's do; what failed there says nothing."""
    state = copy.deepcopy(known)
    state[name] = [1, 2] if name == "parameters" else "another"
    step = world.training()
    step.load_state_dict(state)
    assert step.state_dict() == state
    calls = world.run(step, TIGHT)
    assert calls[0][1] == 0
    signature = step.state_dict()["signatures"][0]
    assert step.state_dict()["torch"] == torch.__version__
    assert signature["successes"] == 6


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no dict": ([], TypeError, "expected the dict that state_dict() gave, got list"),
    "empty": ({}, ValueError, "got one without 'version'"),
    "newer": ({"version": 2}, ValueError, "expected version 1, got 2: it was saved by another"),
    "huge version": ({"version": 10**30}, ValueError, "expected version 1, got 1000"),
    "true": ({"version": True}, ValueError, "expected version 1, got True"),
    "more": ({"more": 1}, ValueError, "got one with 6 entries instead of 5"),
    "torch": ({"torch": None}, ValueError, "expected names of torch and device, got None"),
    "parameters": ({"parameters": [1]}, ValueError, "two numbers in 'parameters', got [1]"),
    "signatures": ({"signatures": {}}, ValueError, "at most 32 'signatures', got dict"),
    "many": ({"signatures": [1] * 33}, ValueError, "at most 32 'signatures', got more"),
    "a signature": ({"signatures": [1]}, ValueError, "expected a dict for each shape, got int"),
}
NUMBERS: dict[str, tuple[Any, str]] = {
    "batch": (-1, "'batch' expected a whole number in range, got -1"),
    "accumulation_steps": (1.0, "'accumulation_steps' expected a whole number"),
    "margin": (float("nan"), "'margin' expected a float from 0 to 0.25, got nan"),
    "first_ok_room": ("1", "'first_ok_room' expected bytes or None, got '1'"),
    "first_rows_1": (0, "the numbers of signature ffffffffffffffff do not go together"),
    "family": ("xyz", "'family' expected 16 hexadecimal digits, got 'xyz'"),
    "row_bytes": (1e300, "'row_bytes' expected a float from 0 to 1e15, got 1e+300"),
    "odd": (1, "'odd' is no number that oomkit knows"),
}


def refused(step: Any, state: Any, kind: type[Exception], text: str) -> None:
    before = step.state_dict()
    with pytest.raises(kind) as caught:
        step.load_state_dict(state)
    assert text in str(caught.value)
    assert step.state_dict() == before


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_dict_changes_nothing(known: dict[str, Any], case: str) -> None:
    given, kind, text = WRONG[case]
    step = world.training()
    step.load_state_dict(known)
    refused(step, {**known, **given} if isinstance(given, dict) and given else given, kind, text)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_bad_number_changes_nothing(known: dict[str, Any], name: str) -> None:
    value, text = NUMBERS[name]
    state = copy.deepcopy(known)
    state["signatures"].append({**state["signatures"][0], "signature": "f" * 16, name: value})
    step = world.training()
    step.load_state_dict(known)
    refused(step, state, ValueError, text)
    twice = {**known, "signatures": known["signatures"] * 2}
    name = known["signatures"][0]["signature"]
    refused(step, twice, ValueError, f"signature {name} is there twice")


def test_the_callables_own_state_stays_its_own(known: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    step = oomkit.auto_batch(model)
    assert step.state_dict().keys() == model.state_dict().keys()
    step.load_state_dict(nn.Linear(2, 2).state_dict())

    class Trainer:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def state_dict(self) -> str:
            return "the trainer's"

    assert oomkit.auto_batch(Trainer()).state_dict() == "the trainer's"
    assert sizes.state_dict(step)["signatures"] == []
    sizes.load_state_dict(step, known)
    assert sizes.state_dict(step) == known
    for wrong in (model, 3):
        with pytest.raises(TypeError, match="expected a step that auto_batch has decorated"):
            sizes.state_dict(wrong)


def test_of_a_method_it_is_the_objects_that_was_called_last(known: dict[str, Any]) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.inner = world.training().__wrapped__

        @oomkit.auto_batch(reduction="mean")
        def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.inner(x, y)

    first, second = Trainer(), Trainer()
    first.step.load_state_dict(known)
    first.step(*world.batch())
    assert first.step.state_dict()["signatures"] != []
    second.step(*world.batch())
    assert second.step.state_dict()["signatures"] == []
    first.step(*world.batch())
    assert sizes.state_dict(first.step)["signatures"] != []


def test_model_forward_carries_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @oomkit.auto_batch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Model()
    assert model.forward.state_dict()["version"] == 1
    assert sizes.state_dict(model.forward) == model.forward.state_dict()
    assert "layer.weight" in model.state_dict()
