"""Masks that were the same in every row when the split was proven, and later are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.sample import WHOLE, places
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.testing import inject_oom

SEED = 22
ROWS, TIME, WIDTH = 12, 5, 6

Masks = Callable[[int], torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((model(x).squeeze(-1) - y).square() * mask).sum() / mask.sum()


def _plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(-1) - y).square().mean()


def _train(
    decorate: Callable[[Any], Any],
    masks: Masks,
    calls: int,
    loss: Loss = _masked,
    dtype: torch.dtype = torch.float64,
    last: Any = None,
) -> list[torch.Tensor]:
    """Some calls of a step: parameters after each, and losses. `last` is around the last one."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(SEED)

    def step(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x, y, mask)
        value.backward()
        optimizer.step()
        return value.detach()

    decorated = decorate(step)
    seen = []
    for call in range(calls):
        x = torch.randn(ROWS, TIME, WIDTH, generator=g).to(dtype)
        y = torch.randn(ROWS, TIME, generator=g).to(dtype)
        mask = masks(call)
        with last if last is not None and call == calls - 1 else nullcontext():
            seen.append(decorated(x, y, mask))
        seen += [p.detach().clone() for p in model.parameters()]
    return seen


def _late(dtype: torch.dtype, first: int) -> Masks:
    """All ones before call `first`."""

    def masks(call: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(SEED + call)
        mask = (torch.rand(ROWS, TIME, generator=g) > 0.5).to(dtype)
        mask[:, 0] = 1
        return mask if call >= first else torch.ones_like(mask)

    return masks


@pytest.mark.sample(12)
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("parts", [2, 3, 6, 12])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_that_begins_to_differ(dtype: torch.dtype, parts: int, first: int) -> None:
    masks = _late(dtype, first)
    want = _train(lambda step: step, masks, first + 2)
    got = _train(oomkit.auto_batch(accumulation_steps=parts), masks, first + 2)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def _after(columns: int) -> Loss:
    def loss(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        counted = mask[:, columns:]
        each = (model(x).squeeze(-1) - y).square()[:, columns:]
        return (each * counted).sum() / counted.sum()

    return loss


@pytest.mark.sample(9)
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_of_what_comes_after_some_columns(
    dtype: torch.dtype, columns: int, first: int
) -> None:
    """Tokens that come next, and prompts of one length."""
    masks, loss = _late(dtype, first), _after(columns)
    want = _train(lambda step: step, masks, first + 2, loss)
    got = _train(oomkit.auto_batch(accumulation_steps=3), masks, first + 2, loss)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_mean_over_lengths(first: int) -> None:
    """The mask is made in the step."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(TIME) < n[:, None]
        return ((model(x).squeeze(-1) - y).square() * mask).sum() / n.sum()

    def lengths(call: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(SEED + call)
        n = torch.randint(1, TIME + 1, (ROWS,), generator=g)
        return n if call >= first else torch.full_like(n, TIME)

    want = _train(lambda step: step, lengths, first + 2, loss)
    got = _train(oomkit.auto_batch(accumulation_steps=3), lengths, first + 2, loss)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_rows_of_which_a_half_has_nothing_that_counts(parts: int) -> None:
    """A mean over nothing is nan, so that the proof cuts its rows elsewhere."""

    def masks(call: int) -> torch.Tensor:
        mask = torch.zeros(ROWS, TIME)
        mask[:: ROWS // parts] = mask[1 : ROWS - 1 : ROWS // parts, 2:] = 1
        return mask

    want = _train(lambda step: step, masks, 3)
    got = _train(oomkit.auto_batch(accumulation_steps=parts), masks, 3)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_micro_batches_of_which_each_has_as_much_that_counts(masked: bool) -> None:
    """Such weights make no difference to them. They do where rows are dealt in another way, which
    was taken for rows that are coupled."""

    def train(decorate: Callable[[Any], Any], error: Any) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Linear(WIDTH, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> None:
            optimizer.zero_grad()
            if masked:
                each = F.cross_entropy(model(x), y, reduction="none")
                loss = (each * mask).sum() / mask.sum()
            else:
                loss = F.cross_entropy(model(x), y.where(mask, -1), ignore_index=-1)
            loss.backward()
            optimizer.step()

        decorated = decorate(step)
        for every in (2, 3, 4):
            x, y = torch.randn(ROWS, WIDTH).double(), torch.randint(0, 3, (ROWS,))
            with error if every == 2 else nullcontext():
                decorated(x, y, torch.arange(ROWS) % every > 0)
        return [p.detach().clone() for p in model.parameters()]

    plain = train(lambda step: step, nullcontext())
    split = train(oomkit.auto_batch, inject_oom(nth=2, phase="backward"))
    for one, two in zip(plain, split, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)


def test_a_result_that_cannot_be_joined_is_named_and_not_the_gradients() -> None:
    """They fit, weighted by what counts."""
    torch.manual_seed(SEED)
    model = nn.Linear(WIDTH, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, mask: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (model(x).square().squeeze(-1) * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach().exp())

    with pytest.raises(oomkit.SplitError, match="exactly: result of the joined parts is"):
        step(torch.randn(ROWS, WIDTH).double(), torch.arange(ROWS) % 7 > 1)


def test_rows_that_are_equal_inside_each_micro_batch() -> None:
    """No cut of a micro-batch tells then: two of them do."""

    def masks(call: int) -> torch.Tensor:
        mask = torch.ones(ROWS, TIME)
        if call:
            mask[: ROWS // 2, 2:] = 0
        return mask

    want = _train(lambda step: step, masks, 3)
    got = _train(oomkit.auto_batch(accumulation_steps=2), masks, 3)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_a_difference_that_rounding_hides_decides_nothing() -> None:
    """In half precision a hundredth is rounding: a mean over rows passes, and is not believed."""

    def masks(call: int) -> torch.Tensor:
        mask = torch.ones(ROWS, TIME, dtype=torch.bfloat16)
        if call:
            mask[: ROWS // 2, 1:] = 0
        mask[0, 1] = 0
        return mask

    want = _train(lambda step: step, masks, 2, dtype=torch.bfloat16)
    got = _train(oomkit.auto_batch(accumulation_steps=2), masks, 2, dtype=torch.bfloat16)
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(want, got, strict=True)]
    assert max(apart) < 0.02


def test_masks_of_a_mean_over_rows_are_asked_about_once() -> None:
    """What was told from the weights in use is not proven again."""
    runs: Seen[int] = Seen()

    def loss(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        runs.append(len(x))
        return _plain(model, x, y, mask)

    counts = []
    masks = _late(torch.float64, 1)

    def note(call: int) -> torch.Tensor:
        counts.append(len(runs))
        return masks(call)

    want = _train(lambda step: step, masks, 6, _plain)
    runs.clear()
    got = _train(oomkit.auto_batch(accumulation_steps=3), note, 6, loss)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    made = [b - a for a, b in zip(counts, counts[1:], strict=False)]
    assert made[1] > 3  # proven again, with masks that differ
    assert made[2:] == [12, 3, 12]  # looked at ever more seldom, by losses


def test_labels_that_begin_to_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        value = model(x).squeeze(-1)
        return F.cross_entropy(torch.stack([value, -value], -1).flatten(0, 1), z.flatten())

    def labels(call: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(SEED + call)
        z = torch.randint(0, 2, (ROWS, TIME), generator=g)
        if call >= 2:
            z[: ROWS // 2, 2:] = -100
        return z

    want = _train(lambda step: step, labels, 4, loss)
    with caplog.at_level(logging.INFO, logger="oomkit"):
        got = _train(oomkit.auto_batch(accumulation_steps=3), labels, 4, loss)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert "not -100" in caplog.text


@pytest.mark.parametrize("parts", [3, 6, 12])
def test_no_memory_while_it_is_proven_again(parts: int) -> None:
    """One error, anywhere in a call that is proven again: one row may not fit then, and
    nothing else."""
    masks = _late(torch.float64, 1)
    want = _train(lambda step: step, masks, 2)
    equal = 0
    for nth in places(16 * parts):
        fault = inject_oom(nth=nth)
        try:
            got = _train(oomkit.auto_batch(accumulation_steps=parts), masks, 2, last=fault)
        except oomkit.OutOfMemory as error:
            assert "the smallest allowed" in str(error) or "the update stands" in str(error)
            continue
        for one, two in zip(want, got, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
        equal += fault.fired
        if not fault.fired:
            break
    assert equal > (5 if WHOLE else 1)


def test_weights_that_were_found_are_looked_at_again() -> None:
    """In calls 2, 4, 8, larger wholes by losses alone; where they differ, as in the first one."""
    runs: Seen[tuple[int, bool]] = Seen()
    calls: Seen[int] = Seen()

    def loss(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        runs.append((len(calls), torch.is_grad_enabled()))
        kind = _masked if len(calls) < 8 else _plain
        return kind(model, x, y, mask)

    late = _late(torch.float64, 0)

    def masks(call: int) -> torch.Tensor:
        calls.append(call)
        return late(call)

    want = _train(lambda step: step, masks, 9, loss)
    runs.clear()
    calls.clear()
    got = _train(oomkit.auto_batch(accumulation_steps=3), masks, 9, loss)
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    made = {call: [grad for at, grad in runs if at == call] for call in range(1, 10)}
    assert len(made[1]) > 3 and len(made[8]) > 6  # proven, and proven again
    assert [made[call].count(False) for call in range(2, 9)] == [6, 0, 6, 0, 0, 0, 6]
    assert [made[call].count(True) for call in range(2, 8)] == [6, 3, 6, 3, 3, 3]


def _each(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, reduction="none")


def _mean(each: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return (each * counted).sum() / counted.sum()


# Of a model, a batch and its labels; and what rows that do not count have.
LATER: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "a label that cross_entropy() ignores": (
        lambda model, x, y: F.cross_entropy(model(x), y, ignore_index=1),
        1,
    ),
    "a label that the step ignores": (
        lambda model, x, y: _mean(_each(model(x), y.clamp(max=3)), y < 9),
        9,
    ),
    "rows of zeros": (
        lambda model, x, y: _mean(_each(model(x), y), (x != 0).any(-1)),
        0.0,
    ),
    "rows of one value": (
        lambda model, x, y: _mean(_each(model(x), y), (x != -1).any(-1)),
        -1.0,
    ),
    "rows of nan": (
        lambda model, x, y: F.cross_entropy(model(x[~x[:, 0].isnan()]), y[~x[:, 0].isnan()]),
        float("nan"),
    ),
}


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("kind", LATER)
def test_what_does_not_count_in_later_calls(kind: str, steps: int) -> None:
    """Rows that fill up a batch, and labels that none of the batches before had."""
    loss, value = LATER[kind]

    def train(decorate: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Linear(WIDTH, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @decorate
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            made = loss(model, x, y)
            made.backward()
            optimizer.step()
            return made.detach()

        seen = []
        for call in range(4):
            x, y = torch.randn(16, WIDTH).double(), torch.randint(2, 4, (16,))
            if call == 2:
                (x if isinstance(value, float) else y)[13:] = value
            seen += [step(x, y), model.weight.detach().clone()]
        return seen

    torch.testing.assert_close(
        train(oomkit.auto_batch(accumulation_steps=steps)), train(lambda step: step)
    )


@pytest.mark.parametrize("left", [False, True])
def test_tokens_that_pad_later_calls(left: bool) -> None:
    """By a token that is neither the least nor the largest, and none of an earlier batch's."""

    def train(decorate: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = nn.Embedding(12, 12).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @decorate
        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            made = _mean(
                _each(model(tokens).flatten(0, 1), tokens.flatten()), tokens.flatten() != 5
            )
            made.backward()
            optimizer.step()
            return made.detach()

        seen = []
        for call in range(4):
            tokens = torch.randint(0, 12, (16, 8))
            tokens[tokens == 5] = 6
            if call == 2:
                tokens[10:, slice(0, 5) if left else slice(3, 8)] = 5
            seen += [step(tokens), model.weight.detach().clone()]
        return seen

    torch.testing.assert_close(
        train(oomkit.auto_batch(accumulation_steps=2)), train(lambda step: step)
    )


def test_numbers_of_rows_that_grow_are_no_labels_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a leaf with other values in every call: the split is proven again a few times."""
    model = nn.Linear(WIDTH, 1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, number: torch.Tensor) -> None:
        model(x).square().mean().backward()

    proofs = []
    with caplog.at_level(logging.INFO, logger="oomkit"):
        for call in range(40):
            step(torch.randn(8, WIDTH), torch.arange(8) + 8 * call)
            proofs.append(caplog.text.count("proved the split"))
    print(proofs)
    assert 2 < proofs[20] < 12
    assert proofs[39] - proofs[20] <= 1  # as calls 2, 4, 8, ... are looked at
