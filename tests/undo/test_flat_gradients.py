"""Gradients that are views of one flat tensor, which the step itself clears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

ROWS = 8


class Flat:
    """Updates its parameters from the flat tensor, as optimizers with buffers of their own do."""

    def __init__(self, *, attach_each: bool, clear: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=torch.float64)
        self.x = torch.randn(ROWS, 4, dtype=torch.float64)
        self.attach_each, self.clear = attach_each, clear
        self.attach()

    def pieces(self) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [
            piece.view_as(p)
            for piece, p in zip(self.flat.split(sizes), self.parameters, strict=True)
        ]

    def attach(self) -> None:
        for p, piece in zip(self.parameters, self.pieces(), strict=True):
            p.grad = piece

    def step(self, x: torch.Tensor) -> torch.Tensor:
        now: Any = oomkit.current()
        if self.clear == "always" or (self.clear == "first" and (now is None or now.index == 0)):
            self.flat.zero_()
        if self.attach_each:
            self.attach()
        loss = self.model(x).square().mean()
        loss.backward()
        if now is None or now.is_last:
            with torch.no_grad():
                for p, piece in zip(self.parameters, self.pieces(), strict=True):
                    p.sub_(piece, alpha=0.1)
        return loss.detach()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]


@pytest.mark.parametrize("attach_each", [False, True])
@pytest.mark.parametrize("rows", ["halves", "one"])
@pytest.mark.filterwarnings("ignore")
def test_one_that_each_micro_batch_clears_is_refused(rows: str, attach_each: bool) -> None:
    """What earlier micro-batches have added would be gone. The proof does not run."""
    program = Flat(attach_each=attach_each, clear="always")
    before = program.values()
    options = {"multiple_of": 1} if rows == "halves" else {"accumulation_steps": ROWS}
    step = oomkit.auto_batch(program.step, verify=False, **options)
    refused = pytest.raises(oomkit.SplitError, match=r"changed in place before the backward\(\)")
    if rows == "one":
        with refused:
            step(program.x)
    else:
        with inject_oom(nth=3), refused:
            step(program.x)
    assert all(map(torch.equal, program.values(), before))


@pytest.mark.filterwarnings("ignore")
def test_one_that_is_cleared_once_is_exact() -> None:
    """As the message proposes."""
    plain, program = (Flat(attach_each=False, clear="first") for _ in range(2))
    step = oomkit.auto_batch(program.step)
    losses = [plain.step(plain.x) for _ in range(2)]
    with inject_oom(nth=3):
        found = [step(program.x), step(program.x)]
    assert step.records[0].accumulation_steps > 1
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(program.values(), plain.values(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_proof_leaves_them_in_the_flat_tensor(through_data: bool) -> None:
    """Nothing else holds them; a tensor in the place of one would never be cleared."""
    plain, program = (Flat(attach_each=False, clear="always") for _ in range(2))
    if through_data:
        for p in program.parameters:
            p.grad = p.grad.data if p.grad is not None else None
    step = oomkit.auto_batch(program.step, ladder=())
    with inject_oom(nth=3), pytest.raises(oomkit.SplitError, match="cannot split"):
        step(program.x)
    for _ in range(2):
        assert torch.equal(step(program.x), plain.step(plain.x))
    assert all(map(torch.equal, program.values(), plain.values()))
