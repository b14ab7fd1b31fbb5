"""A step that becomes another one after its split was proven: a loss that is switched on later.

The graph of each split call is compared with those of proven ones. What it does not show is
found by losses in calls 2, 4, 8, ...
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit._proof import values
from oomkit._proof.graphs.terms import Part, Terms, learn_terms, note_terms
from proof.test_proof_one_row_fits import Normed

ROWS, LATER, CALLS = 64, 5, 7
TAMED = 1.42  # between losses of halves
Term = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def _decorrelated(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = out - out.mean(0)
    return _plain(out, y) + 0.1 * (z.T @ z / len(z)).square().sum()


def _hard(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, reduction="none").topk(len(y) // 4).values.mean()


def _pairs(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _plain(out, y) + 0.1 * (out @ out.T).square().mean()


def _tanh_of_mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _plain(out, y) + 0.5 * torch.tanh(out.mean())


def _normed(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _plain(Normed.apply(out), y)


def _smoothed(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.9 * _plain(out, y) - 0.1 * F.log_softmax(out, 1).mean()


def _squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _plain(out, y) + 0.01 * out.square().mean()


COUPLED = [_decorrelated, _hard, _pairs, _tanh_of_mean, _normed]


class Program:
    def __init__(self, later: Term, returned: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.later, self.returned = later, returned
        self.number = 0
        self.runs: Seen[int] = Seen()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        return (_plain if self.number < LATER else self.later)(self.model(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, calls: int = CALLS, **options: Any) -> list[int]:
        """How often the step ran in each call."""
        g = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS, 8, generator=g, dtype=torch.float64)
        y = torch.randint(0, 4, (ROWS,), generator=g)
        step = self.loss if self.returned else self.step
        if options:
            step = oomkit.auto_batch(step, model=self.model, optimizer=self.optimizer, **options)
        made = []
        for self.number in range(calls):
            self.runs.clear()
            if self.returned:
                self.optimizer.zero_grad()
                step(x, y).backward()
                self.optimizer.step()
            else:
                step(x, y)
            made.append(len(self.runs))
        return made

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.sample(10)
@pytest.mark.parametrize("steps", [2, ROWS])  # at last one row at a time
@pytest.mark.parametrize("returned", [False, True], ids=["whole step", "returned loss"])
@pytest.mark.parametrize("later", COUPLED)
def test_rows_that_are_coupled_later_are_refused_before_the_update(
    later: Term, returned: bool, steps: int
) -> None:
    before = Program(later, returned)
    before.train(LATER)
    program = Program(later, returned)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(accumulation_steps=steps)
    assert program.number == LATER  # in the first call that couples them
    torch.testing.assert_close(program.values(), before.values(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("later", [_plain, _smoothed, _squared])
def test_another_loss_that_does_not_is_proven_and_trains(later: Term) -> None:
    want, program = Program(later), Program(later)
    want.train()
    made = program.train(accumulation_steps=2)
    torch.testing.assert_close(program.values(), want.values(), rtol=1e-12, atol=1e-14)
    # Nothing but the call in which operations are new is proven again, and that once.
    assert (made[LATER] > 2) == (later is not _plain)
    assert made[LATER + 1 :] == [2] * (CALLS - LATER - 1)


@pytest.mark.parametrize("kept", [False, True], ids=["refused", "restore_batch"])
def test_a_batch_that_is_changed_in_place_does_not_run_twice(kept: bool) -> None:
    """Another loss begins the call again, after the first micro-batch has halved its rows."""

    def run(options: dict[str, Any]) -> Program:
        program = Program(_squared)
        halved = program.loss
        program.loss = lambda x, y: halved(x.div_(2.0), y)  # type: ignore[method-assign]
        program.train(**options)
        return program

    options: dict[str, Any] = {"accumulation_steps": 2, "restore_batch": kept}
    if kept:
        torch.testing.assert_close(run(options).values(), run({}).values(), rtol=1e-12, atol=1e-14)
        return
    with pytest.raises(oomkit.SplitError, match="it changed x in place"):
        run(options)


def test_an_error_of_the_step_does_not_settle_what_was_new() -> None:
    """A term whose value is 0: losses never show it."""

    def hidden(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        term = _decorrelated(out, y) - _plain(out, y)
        return _plain(out, y) + term - term.detach()

    program = Program(hidden)
    step = program.step
    number = 0

    def fails_once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = step(x, y)
        if number == LATER:
            raise KeyError("once")
        return result

    protected = oomkit.auto_batch(
        fails_once, model=program.model, optimizer=program.optimizer, accumulation_steps=2
    )
    x = torch.randn(ROWS, 8, dtype=torch.float64)
    y = torch.randint(0, 4, (ROWS,))
    for number in range(LATER):
        program.number = number
        protected(x, y)
    number = program.number = LATER
    with pytest.raises((KeyError, oomkit.SplitError)):
        protected(x, y)
    number = LATER + 1
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        protected(x, y)


Number = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


def _alpha(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    by = out.detach().std().item() if late else 1.0
    return torch.add(_plain(out, y), F.log_softmax(out, 1).square().mean(), alpha=by)


def _factor(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return _plain(out, y) * (out.detach().std().item() if late else 1.0)


def _kept(losses: torch.Tensor, late: bool) -> torch.Tensor:
    return losses.detach() > (1.3 if late else -1.0)


def _hard_by_hand(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def _hard_mean(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    return losses[kept].mean() if bool(kept.any()) else losses[kept].sum() * 1.0


def _hard_squares(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    kept = _kept(F.cross_entropy(out, y, reduction="none"), late)
    return F.mse_loss(out[kept], F.one_hot(y, 4).double()[kept])


def _over_kept(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    return (losses * kept).sum() / kept.sum()


def _hard_stacked(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    both = [_over_kept(out, y, late), 0.1 * out.square().mean()]
    return torch.stack(both).sum()


def _hard_stacked_mean(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return torch.stack([0.1 * out.square().mean(), _over_kept(out, y, late)]).mean(0)


def _hard_each(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    return (losses * kept / kept.sum()).sum()


def _hard_each_of_mean(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    return (len(y) / kept.sum() * (losses * kept).view(-1, 1)).mean()


def _hard_once_more(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return _over_kept(out, y, late).mean()  # as for the losses of several devices


def _hard_shaped(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return _over_kept(out, y, late).reshape(1)[0]


def _hard_in_a_row(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    both = [_over_kept(out, y, late), 0.1 * out.square().mean()]
    return torch.cat([each.unsqueeze(0) for each in both]).sum()


def _hard_finite(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return torch.nan_to_num(_over_kept(out, y, late))


def _matched(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    found = sum(1 for each in out.tolist() if late and each[0] > -0.5)
    return F.cross_entropy(out, y, reduction="sum") / max(1, found)


def _tamed(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    loss = _plain(out, y)
    return loss * (0.1 if late and loss.item() > TAMED else 1.0)


def _numbered(later: Number) -> Program:
    """The same operations in each call, with other numbers."""
    program = Program(_plain)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        program.runs.append(len(x))
        return later(program.model(x), y, program.number >= LATER)

    program.loss = loss  # type: ignore[method-assign]
    return program


@pytest.mark.sample(22)
@pytest.mark.parametrize("steps", [2, 5, ROWS // 2])  # no count is more than 1 of one row
@pytest.mark.parametrize(
    "later",
    [_alpha, _factor, _hard_by_hand, _hard_mean, _hard_squares, _hard_stacked, _hard_stacked_mean]
    + [_hard_each, _hard_each_of_mean]
    + [_hard_once_more, _hard_shaped, _hard_in_a_row, _hard_finite, _matched, _tamed],
)
def test_a_number_out_of_the_batch_that_changes_is_refused_before_the_update(
    later: Number, steps: int
) -> None:
    """A loss is divided by what the step counts, or multiplied by what a value of it decides."""
    program = _numbered(later)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(accumulation_steps=steps)
    assert program.number == LATER
    plain = _numbered(later)
    plain.train(LATER)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)


def _is_refused(program: Program, plain: Program, steps: int) -> None:
    """In the call that does something else, with the parameters of those before it."""
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(accumulation_steps=steps)
    assert program.number == LATER
    plain.train(LATER)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)


def _number(losses: torch.Tensor, kept: torch.Tensor) -> None:
    (losses * kept).sum().backward(gradient=1 / kept.sum().double())


def _numbers(losses: torch.Tensor, kept: torch.Tensor) -> None:
    losses.backward(gradient=kept / kept.sum().double())


def _several(losses: torch.Tensor, kept: torch.Tensor) -> None:
    number = 1 / kept.sum().double()
    torch.autograd.backward(
        [losses.mean(), (losses * kept).sum()], [torch.ones_like(number), number]
    )


def _by_a_hook(losses: torch.Tensor, kept: torch.Tensor) -> None:
    loss = (losses * kept).sum()
    number = kept.sum().double()
    loss.register_hook(lambda gradient: gradient / number)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def _rows(losses: torch.Tensor, kept: torch.Tensor) -> None:
    losses.backward(gradient=losses.detach() * kept / len(kept))


def _kept_rows(losses: torch.Tensor, kept: torch.Tensor) -> None:
    losses.backward(gradient=kept.double() / len(kept))


def _given(backward: Callable[[torch.Tensor, torch.Tensor], None]) -> Program:
    """A program that gives its backward a gradient."""
    program = Program(_plain)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        program.runs.append(len(x))
        program.optimizer.zero_grad()
        losses = F.cross_entropy(program.model(x), y, reduction="none")
        backward(losses, _kept(losses, program.number >= LATER))
        program.optimizer.step()

    program.step = step  # type: ignore[method-assign,assignment]
    return program


@pytest.mark.parametrize("steps", [2, ROWS // 4])  # no count is more than 1 of one row
@pytest.mark.parametrize("backward", [_number, _numbers, _several, _by_a_hook])
def test_a_gradient_given_to_a_backward_that_changes_is_refused_before_the_update(
    backward: Callable[[torch.Tensor, torch.Tensor], None], steps: int
) -> None:
    _is_refused(_given(backward), _given(backward), steps)


@pytest.mark.parametrize("steps", [2, ROWS // 2])
@pytest.mark.parametrize("backward", [_rows, _kept_rows])
def test_one_of_each_row_is_split(
    backward: Callable[[torch.Tensor, torch.Tensor], None], steps: int
) -> None:
    program, plain = _given(backward), _given(backward)
    made = program.train(accumulation_steps=steps)
    plain.train()
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)
    assert made[LATER + 2 :] == [steps] * (CALLS - LATER - 2)


def _multiplied(params: list[nn.Parameter], by: float) -> None:
    for param in params:
        param.grad.mul_(by)  # type: ignore[union-attr]


def _replaced(params: list[nn.Parameter], by: float) -> None:
    for param in params:
        param.grad = by * param.grad  # type: ignore[operator]


def _clipped(params: list[nn.Parameter], by: float) -> None:
    nn.utils.clip_grad_norm_(params, 10.0 if by == 1.0 else by / 20)


def _clipped_to_one_number(params: list[nn.Parameter], by: float) -> None:
    nn.utils.clip_grad_norm_(params, 10.0 if by == 1.0 else 0.05)


class _Table(nn.Module):
    """Its gradient is sparse, of which only torch knows the values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(x[:, 0].mul(4).long().clamp(-8, 7) + 8))
        return found


def _changing(
    change: Callable[[list[nn.Parameter], float], None],
    always: bool = True,
    gaps: bool = False,
    scaled: bool = False,
    sparse: bool = False,
) -> Program:
    """A program that changes its gradients, by a number that it reads from its loss."""
    program = Program(_plain)
    if sparse:
        program.model = _Table().double()  # type: ignore[assignment]
        program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        program.runs.append(len(x))
        program.optimizer.zero_grad()
        for param in program.model.parameters() if gaps else ():
            param.grad = param.new_zeros(*param.shape, 2)[..., 0]
        loss = _plain(program.model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(program.optimizer)
        params = [p for p in program.model.parameters() if p.grad is not None]
        del params[1 if sparse else len(params) :]
        late = program.number >= LATER
        if always or late:
            change(params, 0.5 * loss.item() if late else 1.0)
        scaler.step(program.optimizer)
        scaler.update()

    program.step = step  # type: ignore[method-assign,assignment]
    return program


@pytest.mark.parametrize("steps", [2, ROWS // 4])
@pytest.mark.parametrize("change", [_multiplied, _replaced, _clipped])
def test_gradients_that_the_step_begins_to_change_by_its_loss_are_refused_before_the_update(
    change: Callable[[list[nn.Parameter], float], None], steps: int
) -> None:
    _is_refused(_changing(change), _changing(change), steps)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # torch's, of such gradients
@pytest.mark.parametrize(
    ("change", "always"),
    [(_multiplied, False), (_multiplied, True), (_clipped, True), (_replaced, False),
     (_replaced, True)],
)  # fmt: skip
def test_so_they_are_where_there_are_gaps_between_their_values(
    change: Callable[[list[nn.Parameter], float], None], always: bool
) -> None:
    """Also where those that replace them have none."""
    _is_refused(*(_changing(change, always, gaps=True) for _ in range(2)), 2)


@pytest.mark.parametrize("change", [_multiplied, _replaced, _clipped])
def test_so_they_are_behind_the_unscaling_of_a_scaler(
    change: Callable[[list[nn.Parameter], float], None],
) -> None:
    _is_refused(*(_changing(change, scaled=True) for _ in range(2)), 2)


@pytest.mark.parametrize("change", [_multiplied, _replaced])
def test_so_they_are_where_only_torch_knows_their_values(
    change: Callable[[list[nn.Parameter], float], None],
) -> None:
    """Sparse ones; those on a device are asked for in the same way."""
    _is_refused(*(_changing(change, sparse=True) for _ in range(2)), 2)


def test_norms_tell_which_gradients_are_the_same() -> None:
    sparse = torch.eye(3).to_sparse()
    half = torch.full((3,), 300.0, dtype=torch.float16)  # its square is no number there
    given = [torch.randn(3, 2), sparse, half, torch.randn(2, dtype=torch.complex64)]
    for at, gradient in enumerate(given):
        other = [g if n != at else 0.5 * g for n, g in enumerate(given)]
        assert values.norms(given) == values.norms(list(given)) != 0
        assert values.norms(other) != values.norms(given), gradient
    nan = torch.full((2,), math.nan)
    assert values.norms([nan]) == values.norms([nan.clone()])
    assert values.norms([torch.ones(2, dtype=torch.int64)]) == 0  # of these torch knows none


@pytest.mark.parametrize("change", [_multiplied, _replaced, _clipped])
def test_so_they_are_where_they_lie_in_another_order(
    change: Callable[[list[nn.Parameter], float], None],
) -> None:
    """As with channels_last."""

    def transposed() -> Program:
        program = _changing(change)
        for part in program.model:
            if isinstance(part, nn.Linear):
                part.weight.data = part.weight.data.t().contiguous().t()
                part.bias = None
        program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
        return program

    program = transposed()
    assert not any(p.is_contiguous() for p in program.model.parameters())
    _is_refused(program, transposed(), 2)


def test_gradients_that_are_clipped_from_some_call_on_are_proven_once() -> None:
    program, plain = _changing(_clipped_to_one_number), _changing(_clipped_to_one_number)
    made = program.train(LATER + 4, accumulation_steps=4)
    plain.train(LATER + 4)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)
    assert made[LATER] > 4
    assert made[LATER + 3] == 4


def _annealed(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    return _plain(out, y) + (0.5 if late else 0.25) * F.log_softmax(out, 1).square().mean()


def _share(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    kept = _kept(losses, late)
    some = losses[kept].mean() if bool(kept.any()) else losses.sum() * 0.0
    return some * kept.double().mean()


def _some_have(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    counts = out.detach()[:, 0] > (0.5 if late else -9.0)
    loss = _plain(out, y)
    return loss + (out.square().sum(1) * counts).sum() / len(y) if bool(counts.any()) else loss


def _by_sample(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    lengths = (1 + y).tolist() if late else [4] * len(y)
    means = [row[:n].square().mean() for row, n in zip(out, lengths, strict=True)]
    return torch.stack(means).mean() + sum(means[:3]) * 0.0


@pytest.mark.parametrize("steps", [4, ROWS // 4])
@pytest.mark.parametrize("later", [_annealed, _share, _some_have, _by_sample])
def test_numbers_that_may_change_are_proven_once(later: Number, steps: int) -> None:
    program, plain = _numbered(later), _numbered(later)
    made = program.train(3 * LATER, accumulation_steps=steps)
    plain.train(3 * LATER)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)
    assert all(count == steps for count in made[LATER + 4 :]), made


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor) -> torch.Tensor:
        ctx.shape = losses.shape
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient / ctx.shape.numel()).expand(ctx.shape)


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return loss * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.by, None


def _own_functions(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    losses: torch.Tensor = F.cross_entropy(out, y, reduction="none")
    mean: torch.Tensor = Mean.apply(losses)
    product: torch.Tensor = Mul.apply(mean, 0.5)
    return product


def _given_once(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, kept.pop):
        return _plain(out, y) * 0.5


def _looped(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    each = [_plain(out[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    return sum(each[1:], each[0]) / len(each)


def _looped_over_lengths(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
    each = [row[: 1 + n].square().mean() for row, n in zip(out, y.tolist(), strict=True)]
    return sum(each[1:], each[0]) / len(each)


@pytest.mark.parametrize("rows", [7, 9])  # the last micro-batches have a row less
@pytest.mark.parametrize("own", [_own_functions, _given_once, _looped, _looped_over_lengths])
def test_losses_whose_numbers_differ_by_rows_alone_are_split(own: Number, rows: int) -> None:
    """Also where a loop over samples adds fewer terms up, and where functions of the program are
    called like torch's, or keep what they give to one backward only."""
    program, plain = _numbered(own), _numbered(own)
    batch = torch.randn(rows, 8, dtype=torch.float64), torch.arange(rows) % 4
    split = oomkit.auto_batch(
        program.step, model=program.model, optimizer=program.optimizer, accumulation_steps=4
    )
    for _ in range(CALLS):
        before = len(program.runs)
        split(*batch)
        plain.step(*batch)
    assert len(program.runs) - before == 4
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_term_that_some_samples_of_a_loop_lack_is_split() -> None:
    """An image without a box adds its class alone: other micro-batches have other terms."""
    y = torch.tensor([3, 0, 2, 1, 2, 0, 3, 3, 1, 1, 3])
    x = torch.randn(len(y), 8, dtype=torch.float64)

    def boxes(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
        total = torch.zeros((), dtype=out.dtype)
        for row, kind in zip(out, y, strict=True):
            loss = F.cross_entropy(row[None], kind[None])
            if kind > 1:
                loss = loss + 0.3 * F.smooth_l1_loss(row, torch.ones_like(row))
            total = total + loss / len(out)
        return total

    program, plain = _numbered(boxes), _numbered(boxes)
    split = oomkit.auto_batch(
        program.step, model=program.model, optimizer=program.optimizer, accumulation_steps=2
    )
    for _ in range(CALLS):
        split(x, y)
        plain.step(x, y)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_count_of_one_in_each_micro_batch_is_refused_before_the_update() -> None:
    """A sum over `max(1, n)` was a plain sum so far, and is one in each micro-batch."""
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 4, dtype=torch.float64)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        found = int((x[:, 0] > 50.0).sum())
        optimizer.zero_grad()
        (torch.tanh(model(x)).square().sum() / max(1, found)).backward()
        optimizer.step()

    for _ in range(LATER):
        step(x)
    x[1, 0] = x[9, 0] = 100.0
    before = model.weight.detach().clone()
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        step(x)
    assert torch.equal(model.weight, before)


CLASSES = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)


def _by_class(losses: torch.Tensor, y: torch.Tensor) -> None:
    losses.backward(gradient=CLASSES[y] / len(y))


def _mean_of_classes(losses: torch.Tensor, y: torch.Tensor) -> None:
    torch.stack([losses[y == c].sum() for c in y.unique()]).mean().backward()


def _by_rows(backward: Callable[[torch.Tensor, torch.Tensor], None]) -> Program:
    program = Program(_plain)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        program.runs.append(len(x))
        program.optimizer.zero_grad()
        backward(F.cross_entropy(program.model(x), y, reduction="none"), y)
        program.optimizer.step()

    program.step = step  # type: ignore[method-assign,assignment]
    return program


def _train_on(program: Program, later: torch.Tensor, **options: Any) -> None:
    """With rows of each class in each micro-batch, then with other labels."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step: Any = program.step
    if options:
        step = oomkit.auto_batch(step, model=program.model, optimizer=program.optimizer, **options)
    for program.number in range(CALLS):
        step(x, torch.arange(ROWS) % 4 if program.number < LATER else later)


def test_rows_may_weigh_what_they_like() -> None:
    program, plain = _by_rows(_by_class), _by_rows(_by_class)
    of_one_class = (torch.arange(ROWS) % 4).sort().values
    _train_on(program, of_one_class, accumulation_steps=4)
    _train_on(plain, of_one_class)
    for one, two in zip(program.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_mean_over_classes_one_of_which_a_micro_batch_lacks() -> None:
    program, lacking = _by_rows(_mean_of_classes), torch.arange(ROWS) % 4
    lacking[-ROWS // 4 :] %= 3
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        _train_on(program, lacking, accumulation_steps=4)
    assert program.number == LATER


def test_micro_batches_whose_rows_all_weigh_nothing_explain_themselves() -> None:
    losses = torch.ones(4, requires_grad=True) * 2
    tried: dict[tuple[Any, ...], float] = {}
    parts = []
    for size in (4, 2, 2):
        parts.append((size, size / 4, Part()))
        note_terms(parts[-1][2], (losses[:size],), (torch.ones(size) / size,))
    learn_terms(tried, parts[0][2], parts[1:])
    terms = Terms()
    for at, given in enumerate((torch.zeros(2), torch.ones(2) / 2)):
        terms.note((losses[:2],), (given,), at, 2, 0.5)
    assert terms.strays(tried) == []
    given = torch.ones(2)
    terms.note((losses[:2],), (given,), 2, 2, 0.5)
    assert terms.strays(tried)


def test_a_complex_loss_has_no_terms() -> None:
    part: Part = {}
    z = torch.ones(2, dtype=torch.complex128, requires_grad=True)
    note_terms(part, [z.sum() * 2j, (z * 2j).abs().sum() / 4], ())
    assert list(part.values()) == [[0.25, 0.25, 4]]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_complex_number_of_a_real_loss_ends_the_walk() -> None:
    part: Part = {}
    z = torch.ones(2, dtype=torch.complex128, requires_grad=True)
    note_terms(part, [(z.sum() / torch.tensor(2 + 0j)).to(torch.float64)], ())
    assert [term[0] for term in part.values()] == [1.0]


def test_numbers_that_no_proof_explains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terms, "strays", lambda self, tried: [1, 0])
    monkeypatch.setattr(Terms, "settle", lambda self, tried: False)
    program = Program(_plain)
    before = program.values()
    with pytest.raises(oomkit.SplitError, match="which no proof of their rows explains"):
        program.train(1, accumulation_steps=2)
    assert all(map(torch.equal, before, program.values()))
    with pytest.warns(oomkit.OomkitWarning, match="could not be verified"):
        program.train(1, accumulation_steps=2, verify="warn")


def test_another_thread_may_take_the_place_of_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with other structures of batches, while numbers beside the loss are looked at."""
    model = nn.Linear(4, 1, bias=False).double()
    asked: Seen[int] = Seen()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, *more: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def others() -> None:
        x = torch.zeros(8, 4, dtype=torch.float64)
        for number in range(1, 10):
            step(x, *[x] * number)

    def strays(self: Terms, tried: Any) -> list[int]:
        asked.append(1)
        if len(asked) > 1:
            return []
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        return [1]

    monkeypatch.setattr(Terms, "strays", strays)
    x = torch.randn(8, 4, dtype=torch.float64)
    step(x)
    (expected,) = torch.autograd.grad(model(x).square().mean(), model.weight)
    assert len(asked) > 10
    torch.testing.assert_close(model.weight.grad, expected)


def test_what_the_graph_does_not_show_is_found_by_losses() -> None:
    """A factor out of the batch, of each element: the operations are the same."""

    def scaled(out: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
        return _plain(out * (out.detach().std().item() if late else 1.0), y)

    program = _numbered(scaled)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        program.train(9, accumulation_steps=2)
    assert program.number == 7  # the eighth call


def test_paths_that_change_from_call_to_call_are_proven_a_few_times() -> None:
    """Blocks that are left out at random: soon each operation has followed each other one."""
    torch.manual_seed(3)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), act) for act in (nn.Tanh(), nn.ReLU(), nn.GELU())
    ).double()
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    left_out = [torch.rand(3, generator=generator) < 0.4 for _ in range(40)]
    runs: Seen[int] = Seen()
    number = 0

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        runs.append(len(x))
        optimizer.zero_grad()
        h = x
        for block, out in zip(blocks, left_out[number], strict=True):
            h = h if out else h + block(h)
        h.square().mean().backward()
        optimizer.step()

    made = []
    x = torch.randn(ROWS, 8, dtype=torch.float64)
    for number in range(40):
        runs.clear()
        if not left_out[number].all():
            step(x)
            made.append(len(runs))
    assert sum(count > 2 for count in made) <= 12, made
    assert made[-8:].count(2) >= 7, made


@pytest.fixture
def _nothing_is_compiled_after() -> Iterator[None]:
    """Of a process that has compiled something more is allowed: see `is_compiling`."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.eval_frame.cached_backends.clear()


@pytest.mark.usefixtures("_nothing_is_compiled_after")
def test_a_function_that_is_compiled_anew() -> None:
    """All compiled functions have one name: each graph is a kind of its own."""
    torch._dynamo.reset()
    coupled = False

    def term(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        if coupled:
            return (out - out.mean(0)).square().square().mean()
        return out.square().square().mean()

    compiled = torch.compile(term, backend="aot_eager")
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()

    @oomkit.auto_batch(accumulation_steps=2, model=model)
    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        compiled(x).backward()

    x = torch.randn(ROWS, 8, dtype=torch.float64)
    for _ in range(LATER):
        step(x)
    coupled = True
    torch._dynamo.reset()
    compiled = torch.compile(term, backend="aot_eager")
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        step(x)
