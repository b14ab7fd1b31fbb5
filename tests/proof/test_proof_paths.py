"""What a step does later than its proof, or in later rows, and no new operation shows.

A factor that was 0, another dimension, hooks, a branch that only the last rows take: each is
proven before its update, and refused where rows are coupled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sample import sampled, with_rest
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit._proof.graphs.flows import Flows

ROWS, LATER, CALLS = 64, 4, 7  # losses are compared in calls 2 and 4
_G = torch.Generator().manual_seed(1)
X = torch.randn(ROWS, 8, generator=_G, dtype=torch.float64)
Y = torch.randint(0, 4, (ROWS,), generator=_G)


def coupled(out: torch.Tensor) -> torch.Tensor:
    z = out - out.mean(0)
    return (z.T @ z / len(z)).square().sum()


def single(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


HOOKS = {coupled: lambda g: g / g.norm(), single: lambda g: g * 2.0}
Term = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[["Program", torch.Tensor, torch.Tensor, Term], torch.Tensor]


class Program:
    def __init__(self, loss: Loss, term: Term, returned: bool = False) -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16).double(), nn.Linear(16, 4).double()
        self.model = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.of, self.term, self.returned = loss, term, returned
        self.call = 0
        self.runs: Seen[int] = Seen()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        return self.of(self, x, y, self.term)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, calls: int = CALLS, **options: Any) -> list[int]:
        """How often the step ran in each call."""
        step = self.loss if self.returned else self.step
        if options:
            step = oomkit.auto_batch(step, model=self.model, optimizer=self.optimizer, **options)
        made = []
        for self.call in range(calls):
            self.runs.clear()
            if self.of is hooked_parameter and self.call == LATER:
                self.first.weight.register_hook(HOOKS[self.term])
            if self.returned:
                self.optimizer.zero_grad()
                step(X, Y).backward()
                self.optimizer.step()
            else:
                step(X, Y)
            made.append(len(self.runs))
        return made

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def on(self) -> bool:
        return self.call >= LATER


def factor(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    return F.cross_entropy(out, y) + float(p.on) * term(out)


def factor_tensor(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    return F.cross_entropy(out, y) + torch.tensor(float(p.on)) * term(out)


def added(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    return F.cross_entropy(out, y).add(term(out), alpha=float(p.on))


def mixed(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    return torch.lerp(F.cross_entropy(out, y), term(out), 0.5 * p.on)


def in_the_last_rows(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """An operation that is there for the last row alone."""
    out = p.model(x)
    loss = F.cross_entropy(out, y)
    return loss + term(out) if p.on and bool((x == X[-1]).all(1).any()) else loss


def factor_of_rows(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """A factor that is 0 but for the last row."""
    out = p.model(x)
    here = bool((x == X[-1]).all(1).any())
    return F.cross_entropy(out, y) + float(p.on and here) * term(out)


def along(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """The same operations along another dimension; ``term`` says along which."""
    out = p.model(x)
    dim = 1 if not p.on else 0 if term is coupled else -1
    return F.cross_entropy(out, y) + (out - out.mean(dim, keepdim=True)).square().mean()


def hooked_parameter(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """Its hook is registered between two calls."""
    return F.cross_entropy(p.model(x), y)


def hooked_hidden(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    hidden = p.first(x)
    if p.on:
        hidden.register_hook(HOOKS[term])
    return F.cross_entropy(p.last(hidden.tanh()), y)


def turned(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """Attention among the rows; within each of them before, or the other way round."""
    out = p.model(x)
    among = (1, 0, 2) if term is coupled else (0, 2, 1)
    q = out.reshape(len(x), 2, 2).permute(*among if p.on else (0, 1, 2))
    return F.cross_entropy(out, y) + ((q @ q.mT).softmax(-1) @ q).square().mean()


def swapped(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    h = out.reshape(len(x), 2, 2)
    along = (2, 1) if not p.on else (0, 1) if term is coupled else (-1, -2)
    return F.cross_entropy(out, y) + h.transpose(*along).cumsum(1).square().mean()


def rolled(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    out = p.model(x)
    dim = 1 if not p.on else 0 if term is coupled else -1
    return F.cross_entropy(out, y) + (out * out.roll(1, dim)).mean()


def normed(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """Statistics of the batch, where constants were before."""
    hidden = p.first(x)
    means, variances = hidden.new_zeros(16), hidden.new_ones(16)
    if p.on and term is single:
        hidden = F.hardtanh(hidden)
    hidden = torch.stack([hidden, hidden.square()], 2)
    hidden = F.batch_norm(hidden, means, variances, training=p.on and term is coupled)
    return F.cross_entropy(p.last(hidden.sum(2).tanh()), y)


def layered(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
    """A norm of each row, and later of all."""
    out = p.model(x)
    return F.cross_entropy(F.layer_norm(out, out.shape if p.on else out.shape[1:]), y)


EVERYWHERE = [factor, factor_tensor, added, mixed, along, hooked_parameter, hooked_hidden]
EVERYWHERE += [turned, swapped, rolled, normed]
OF_ROWS = [in_the_last_rows, factor_of_rows, layered]


COUPLED = list(itertools.product([*EVERYWHERE, *OF_ROWS], [False, True], [2, ROWS]))
SOME = sampled(COUPLED, len(COUPLED) // 3, "coupled", kind=lambda case: case[0])


@pytest.mark.filterwarnings("ignore:.*gradient hook of")
@pytest.mark.parametrize(
    ("loss", "returned", "steps"),
    with_rest(SOME, COUPLED),
    ids=lambda of: ("returned loss" if of else "whole step") if isinstance(of, bool) else None,
)
def test_coupled_rows_are_refused_before_the_update(loss: Loss, returned: bool, steps: int) -> None:
    before = Program(loss, coupled, returned)
    before.train(LATER)
    program = Program(loss, coupled, returned)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(accumulation_steps=steps)
    assert program.call == LATER  # in the first call that couples them
    torch.testing.assert_close(program.values(), before.values(), rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*gradient hook of")
@pytest.mark.parametrize("returned", [False, True], ids=["whole step", "returned loss"])
@pytest.mark.parametrize("loss", EVERYWHERE)
def test_what_couples_no_rows_is_proven_once_and_trains(loss: Loss, returned: bool) -> None:
    want, program = Program(loss, single, returned), Program(loss, single, returned)
    want.train()
    made = program.train(accumulation_steps=2)
    torch.testing.assert_close(program.values(), want.values(), rtol=1e-12, atol=1e-14)
    assert made[LATER] > 2
    assert made[LATER + 1 :] == [2] * (CALLS - LATER - 1)


def test_a_term_of_the_last_rows_that_couples_none_trains() -> None:
    def masked(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
        out = p.model(x)
        mask = (x[:, 0] > X[:40, 0].max()).double()
        loss = F.cross_entropy(out, y)
        return loss + (mask * out.square().mean(1)).mean() if bool(mask.any()) else loss

    assert X[40:, 0].max() > X[:40, 0].max() or pytest.fail("no such rows: another seed")
    want, program = Program(masked, single), Program(masked, single)
    want.train()
    made = program.train(accumulation_steps=8)
    torch.testing.assert_close(program.values(), want.values(), rtol=1e-12, atol=1e-14)
    assert made[0] > 8  # the rows that have the term are proven, too
    assert made[2] == made[4] == 8


def test_hooks_that_come_and_go_in_each_call_are_proven_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="oomkit")

    def hooked(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
        hidden = p.first(x)
        hidden.register_hook(lambda g: g * 1.0)
        return F.cross_entropy(p.last(hidden.tanh()), y)

    program = Program(hooked, single)
    step = oomkit.auto_batch(
        program.step, model=program.model, optimizer=program.optimizer, accumulation_steps=2
    )
    proofs = []
    for _ in range(6):
        caplog.clear()
        handle = program.model.register_forward_hook(lambda *_: None)
        step(X, Y)
        handle.remove()
        proofs.append(sum("proved the split" in r.getMessage() for r in caplog.records))
    assert proofs == [1, 1, 0, 0, 0, 0]  # one more hook between two calls than within one


@pytest.mark.parametrize("terms", [1, 70])  # of at most 64 numbers are read
@pytest.mark.parametrize("term", [coupled, single])
def test_a_factor_of_the_second_of_two_backwards_that_look_alike(term: Term, terms: int) -> None:
    def twice(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
        out = p.model(x)
        sum(1.0 * F.cross_entropy(out, y) for _ in range(terms)).backward()
        out = p.model(x - x.mean(0) if term is coupled else x * 2.0)
        return sum(float(p.on) * F.cross_entropy(out, y) for _ in range(terms))

    want, program = Program(twice, term), Program(twice, term)
    if term is coupled:
        with pytest.raises(oomkit.SplitError, match="cannot split"):
            program.train(accumulation_steps=2)
        assert program.call == LATER
        return
    want.train()
    made = program.train(accumulation_steps=2)
    torch.testing.assert_close(program.values(), want.values(), rtol=1e-12, atol=1e-14)
    assert made[LATER] > 2
    assert made[LATER + 1 :] == [2] * (CALLS - LATER - 1)


def test_a_loss_that_becomes_a_sum_is_weighed_as_one() -> None:
    def summed(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
        return F.cross_entropy(p.model(x), y, reduction="sum" if p.on else "mean")

    want, program = Program(summed, single), Program(summed, single)
    want.train()
    made = program.train(accumulation_steps=2)
    torch.testing.assert_close(program.values(), want.values(), rtol=1e-12, atol=1e-14)
    assert made[LATER + 1 :] == [2] * (CALLS - LATER - 1)


def test_a_factor_among_thousands_that_are_0_is_not_forgotten() -> None:
    def many(p: Program, x: torch.Tensor, y: torch.Tensor, term: Term) -> torch.Tensor:
        out = p.model(x)
        mean = out.mean()
        terms = [float(p.on) * term(out), *(0.0 * (1.0 * mean) for _ in range(4200))]
        return F.cross_entropy(out, y) + torch.stack(terms).sum()

    program = Program(many, coupled)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(accumulation_steps=2)
    assert program.call == LATER


def test_what_was_learnt_in_part_is_proven_again() -> None:
    """Without memory, places of a proof that nothing but 0 has come to were not noted."""
    program = Program(factor, coupled)
    step = oomkit.auto_batch(
        program.step, model=program.model, optimizer=program.optimizer, accumulation_steps=2
    )

    def fails(flows: Flows) -> Any:
        patch.undo()
        raise MemoryError

    patch = pytest.MonkeyPatch()
    patch.setattr(Flows, "take", fails)
    for program.call in range(LATER):
        step(X, Y)
    program.call = LATER
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        step(X, Y)
