"""The ladder on a real device: each rung is the run without a limit, and leaves nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from gpu import DEVICE, DRY, UNIT, allocated, on_a_device, room, same_bits, settle, state_of
from oomkit._ladder import state as hosted
from oomkit.testing import force_slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

WIDTH = 128 if DRY else 2048  # a matrix is one unit
LAYERS, ROWS, STEPS = 4, 8, 4


class Block(nn.Module):
    """Little in parameters, much in what is saved: some 20 rows of half a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + self.dropout(nn.functional.gelu(self.norm(x)))
        return x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Program:
    def __init__(self, deep: bool = False, **options: Any) -> None:
        torch.manual_seed(5)
        if deep:
            self.model: nn.Module = Deep().to(DEVICE)
            self.x = torch.randn(1, WIDTH * WIDTH // 128, 64, device=DEVICE)
        else:
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
            self.model = nn.Sequential(*layers).to(DEVICE)
            self.x = torch.randn(ROWS, WIDTH, device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.plans: list[list[int]] = []
        model, optimizer = self.model, self.optimizer

        @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False, **options)
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        self.step = step
        model(self.x[:1]).sum().backward()  # what libraries take is there before the limit
        optimizer.zero_grad()
        torch.manual_seed(6)

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step(self.x)
            record = self.step.records[-1]
            k, rows = record.accumulation_steps, record.batch_size
            self.plans.append([rows // k + (i < rows % k) for i in range(k)])

    def outcome(self) -> dict[str, torch.Tensor]:
        found = state_of(self.model)
        for i, state in enumerate(self.optimizer.state.values()):
            found |= {f"{i}.{key}": value.cpu() for key, value in state.items()}
        return found

    @property
    def rung(self) -> int:
        return max(record.rung for record in self.step.records)


def without_limit(plans: list[list[int]], **options: Any) -> dict[str, torch.Tensor]:
    program = Program(ladder=(), **options)
    for plan in plans:
        with force_slices(plan):
            program.step(program.x)
    return program.outcome()


# Beyond the parameters (4 units): gradients 4, state 8, temporaries 4 or, of one alone, 1.
@pytest.mark.parametrize(("units", "rung"), [(14, 1), (9.5, 2)])
def test_an_update_that_does_not_fit(units: float, rung: int) -> None:
    program = Program()
    with room(units):
        program.run()
    assert program.rung == rung, program.step.records
    expected = without_limit(program.plans)
    assert same_bits(expected, program.outcome()) == []


@pytest.mark.parametrize("ladder", [("activations",), ("recompute",)])
def test_a_row_that_does_not_fit(ladder: tuple[str, ...]) -> None:
    plain = Program(deep=True, ladder=())
    settle()
    before = allocated()
    plain.run(1)
    peak = (plain.step.records[-1].peak_allocated or 0) - before
    del plain
    program = Program(deep=True, ladder=ladder)
    with room(0.7 * peak / UNIT):
        program.run(3)
    assert program.rung == (3 if ladder == ("activations",) else 4)
    assert same_bits(without_limit(program.plans, deep=True), program.outcome()) == []


def test_a_copy_of_the_optimizer_steps_by_itself() -> None:
    program = Program()
    with room(9.5):
        program.run(2)
    state = hosted.hosted_state(program.optimizer, None)
    assert isinstance(state, dict) and state
    saved = program.optimizer.state_dict()
    if not DRY:
        assert all(tensor.device.type == "cpu" for tensor in state.values())
        assert all(tensor.is_pinned() for tensor in state.values())
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    model(program.x).sum().backward()
    optimizer.step()
    other = Program()
    other.optimizer.load_state_dict(saved)
    for values in other.optimizer.state.values():
        assert values["exp_avg"].device.type == DEVICE
    other.run(1)


@on_a_device
def test_nothing_pinned_is_left() -> None:
    def pinned() -> int:
        stats = torch.cuda.host_memory_stats()
        return int(stats.get("allocated_bytes.current", 0))  # not there before the first

    settle()
    before = pinned()
    program = Program()
    with room(9.5):
        program.run(2)
    assert pinned() > before
    del program
    settle()
    assert pinned() == before
