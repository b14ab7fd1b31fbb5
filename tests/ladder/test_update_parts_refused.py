"""Updates that are never cut, because a part of them could not be taken back."""

from __future__ import annotations

import pytest
import torch
from helpers.sample import sampled

import oomkit
from ladder.test_update_parts import BATCHES, protected
from oomkit.testing import inject_oom


class Program:
    def __init__(self, sparse: bool = False) -> None:
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(40, 8, sparse=sparse)
        self.params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
        self.optimizer = torch.optim.Adagrad([*self.params, self.table.weight], lr=0.1)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        rows = self.table((x[:, 0].abs() * 10).long() % 40)
        sum((((x + rows) @ p).square().mean() for p in self.params), torch.zeros(())).backward()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in (*self.params, self.table.weight)]


def test_a_parameter_twice_in_a_group() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.Adam([p, p])
    assert not oomkit.optim.is_independent(optimizer)


def test_a_fused_update_that_unscales_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], fused=True)
    assert oomkit.optim.is_independent(optimizer)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    assert not oomkit.optim.is_independent(optimizer)


@pytest.mark.filterwarnings("ignore")
def test_a_sparse_gradient_never_ends_in_half_an_update() -> None:
    plain = Program(sparse=True)
    before = plain.values()
    plain.step(BATCHES[0])
    after = plain.values()
    for nth in sampled(range(1, 40), 12):
        program = Program(sparse=True)
        step = protected(program, optimizer_safety="parts")  # type: ignore[arg-type]
        with inject_oom(nth=nth, times=None, phase="optimizer"):
            try:
                step(BATCHES[0])
            except oomkit.OutOfMemory:
                expected = before
            else:
                expected = after
        assert all(map(torch.equal, program.values(), expected)), nth
