"""Steps that draw random numbers: parts get those that their rows have in the whole."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.sample import sampled, with_rest
from torch import distributions, nn
from torch.utils.checkpoint import checkpoint

import oomkit
from oomkit.testing import inject_oom

Loss = Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]


def _autoencoder(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mean, log_variance = model(x).chunk(2, dim=1)
    code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    return (code.square() + log_variance.exp() - log_variance).sum(1).mean()


def _diffusion(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = (torch.randint(0, 10, (len(x),)) / 10)[:, None]
    noise = torch.randn_like(x)
    return (model(x * share + noise * (1 - share)) - noise[:, :4]).square().mean()


def _policy(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    choices = distributions.Categorical(logits=model(x))
    taken = choices.sample()
    return -(choices.log_prob(taken) * (taken - 1.5)).mean()


def _beta(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, two = (F.softplus(model(x)) + 0.1).chunk(2, dim=1)
    return distributions.Beta(one, two).rsample().mean()


def _dropout(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(F.dropout(x, 0.3, training=True)), y)


def _native_dropout(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.native_dropout(model(x), 0.3, True)[0], y)


def _second_dimension(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x)[None] + torch.randn(3, len(x), 4)).square().mean()


def _several(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x.repeat_interleave(3, 0)) + torch.randn(3 * len(x), 4)).square().mean()


def _several_at_the_end(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x.repeat(3, 1)) + torch.randn(3 * len(x), 4)
    return out.view(3, len(x), 4).square().mean()


def _of_weights(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = model.weight + 0.3 * torch.randn_like(model.weight)
    return F.cross_entropy(F.linear(x, weight, model.bias), y)


def _of_some_rows(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    noise = torch.zeros(len(x), 4)
    noise[y > 0] = torch.randn(int((y > 0).sum()), 4)
    return (model(x) + noise).square().mean()


def _in_double(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) + torch.randn(len(x), 4, dtype=torch.float64)).square().mean()


def _of_all_integers(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = torch.empty(len(x), 4).random_() / 2**24
    return (model(x) * share * torch.empty(len(x), 4).random_(2)).square().mean()


def _no_numbers(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of a module without memory, and of dropout that drops nothing or all."""
    with torch.device("meta"):
        nn.Linear(3, 3)
    out = (
        torch.native_dropout(model(x), 0.5, False)[0] + torch.native_dropout(x[:, :4], 1.0, True)[1]
    )
    return (out + torch.randn_like(out)).square().mean()


def _conditional(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn_like(x)
    return model(torch.cond(x.sum() > 1e9, torch.sin, torch.cos, (x,))).square().mean()  # type: ignore[no-any-return]


def _checkpoint(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return (model(x) + torch.randn(len(x), 4)).square().mean()

    value: torch.Tensor = checkpoint(part, x, use_reentrant=False)
    return value


def _of_python_and_numpy(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.flip(1) if random.random() < 0.5 else x
    return F.cross_entropy(model(x * np.random.rand()), y)


def _shuffled(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(x))
    return F.cross_entropy(model(x[order]), y[order])


OWN = torch.Generator()


def _of_an_own_generator(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) + torch.randn(len(x), 4, generator=OWN)).square().mean()


def _one_by_one(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([(model(row) + torch.randn(4)).square().mean() for row in x]).mean()


def _of_numpy(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) + torch.from_numpy(np.random.randn(len(x), 4)).float()).square().mean()


def _of_a_function(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.rrelu(model(x), training=True).square().mean()


def _in_place(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.rrelu(model(x), training=True, inplace=True).square().mean()


OF_NUMPY, OF_PYTHON = np.random.default_rng(0), random.Random(0)


def _of_own_generators(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One for each row, and one for all."""
    noise = torch.from_numpy(OF_NUMPY.standard_normal((len(x), 4))).float()
    return (model(x) + OF_PYTHON.random() * noise).square().mean()


def _loop_of_python(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    shares = torch.tensor([random.gauss(0, 1) for _ in range(len(x))])
    return (model(x) * (1 + shares[:, None] * torch.rand(()))).square().mean()


def _labels_by_python(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many of the stream as it takes, which differs from row to row."""
    taken = torch.tensor([random.randrange(3) for _ in range(len(x))])
    return -(model(x).log_softmax(1).gather(1, taken[:, None])).mean()


def _of_a_drawn_seed(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (1,))))
    return (model(x) * torch.rand((), generator=own)).square().mean()


class _Sub(np.random.Generator):
    pass


OF_SUB = _Sub(np.random.PCG64(0))


def _of_a_subclass(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    noise = torch.from_numpy(OF_SUB.standard_normal((len(x), 4))).float()
    return (model(x) + noise).square().mean()  # type: ignore[no-any-return]


def _until_all_are_taken(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rejection: a part may draw less often than the whole."""
    found = torch.full((len(x),), -1.0)
    while bool((found < 0).any()):
        found = torch.where(found < 0, torch.rand(len(x)) - 0.5, found)
    return (model(x) * found[:, None]).square().mean()


ROWS = [
    _shuffled,
    _of_python_and_numpy,
    _of_an_own_generator,
    _autoencoder,
    _diffusion,
    _policy,
    _beta,
    _dropout,
    _native_dropout,
    _second_dimension,
    _several,
    _several_at_the_end,
    _of_weights,
    _of_some_rows,
    _in_double,
    _of_all_integers,
    _no_numbers,
    _conditional,
    _checkpoint,
    _one_by_one,
    _of_numpy,
    _of_a_function,
    _in_place,
    _of_own_generators,
    _loop_of_python,
    _until_all_are_taken,
    _labels_by_python,
    _of_a_drawn_seed,
    _of_a_subclass,
]


def _by_numpy(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    if not training:
        return x
    noise = np.random.randn(*x.shape) + np.random.randn(*x.shape)
    return x + p * torch.from_numpy(noise).float()


def _mixed(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(x))
    out = model(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])


def _antithetic(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(x) // 2 + 1)
    share = 1 + 0.1 * torch.cat([share, 1 - share])[: len(x), None]
    return model(x * share).square().mean()


def _counts(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x + 1e-9 * torch.randn_like(x))[y > 0], y[y > 0])


def _counts_by_python(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x * (1 + random.random()))[y > 0], y[y > 0])


def _advantages(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    choices = distributions.Categorical(logits=model(x))
    taken = choices.sample()
    reward = (taken == y).float()
    return -(choices.log_prob(taken) * (reward - reward.mean())).mean()


def _standardised(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy((out - out.mean(0)) / (out.std(0) + 1e-3), y)


def _as_wide_as_its_rows(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) + torch.randn(len(x), 4) * model(x).detach().std()).square().mean()


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "proved the split" in r.getMessage()]


def _by_values_of_the_batch(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Their gradients alone would be the same."""
    return (model(x) + torch.normal(0.0, x.std().expand(len(x), 4))).square().mean()


def _by_a_number_of_the_batch(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) + torch.empty(len(x), 4).normal_(0.0, x.std().item())).square().mean()


def _several_choices(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    choices = distributions.Categorical(logits=model(x.repeat_interleave(4, 0)))
    taken = choices.sample()
    reward = (taken == y.repeat_interleave(4)).float()
    return -(choices.log_prob(taken) * (reward - reward.mean())).mean()


def _run(
    loss: Loss,
    seed: int,
    trains: bool = True,
    y: torch.Tensor | None = None,
    gradient: float | None = None,
) -> oomkit.StepRecord:
    """One call that fails once in its backward, or in its forward where nothing trains."""
    print("seed", seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    OWN.manual_seed(seed)
    OF_NUMPY.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    OF_PYTHON.seed(seed)
    model = nn.Linear(6, 4)
    if gradient is not None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(model, x, y)
        if trains:
            value.backward()
        return value.detach()

    x = torch.randn(16, 6)
    y = torch.randint(4, (16,)) if y is None else y
    phase = "backward" if trains else "forward"
    with torch.set_grad_enabled(trains), inject_oom(nth=2, phase=phase):
        step(x, y)
    return step.records[-1]


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("loss", ROWS)
def test_numbers_of_rows_are_those_of_the_whole(
    loss: Loss, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    for seed in sampled(range(8 if loss is _labels_by_python else 3), 1):
        assert _run(loss, seed, trains).accumulation_steps == 2
        assert _lines(caplog) and not any("coarse" in line for line in _lines(caplog))
        caplog.clear()


def _halves(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Between the first and the last rows, as a gradient penalty takes them."""
    half = len(x) // 2
    share = torch.rand(half, 1)
    return model(share * x[:half] + (1 - share) * x[-half:]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [_antithetic, _halves])
@pytest.mark.refusals
def test_numbers_for_half_of_the_rows_are_no_proof(loss: Loss) -> None:
    for seed in range(6):
        with pytest.raises(oomkit.SplitError):
            _run(loss, seed)


def _by_numpy_twice(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """It may choose rows, as far as anybody knows."""
    noise = np.random.randn(len(x), 4) + np.random.rand(len(x), 1)
    return (model(x) + torch.from_numpy(noise).float()).square().mean()


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.refusals
def test_numbers_that_no_part_can_be_given_are_no_proof(trains: bool) -> None:
    match = "no part can be given the random numbers.*for each row in one call"
    for seed in range(6):
        with pytest.raises(oomkit.SplitError, match=match if seed == 0 and trains else None):
            _run(_by_numpy_twice, seed, trains)


def _by_other_streams(name: str) -> Loss:
    """Rows beside others that something else than torch draws."""

    def drawn(n: int) -> Any:
        return {
            "choices": lambda: random.choices(range(n), k=n),
            "one choice": lambda: [random.choice(range(n))] * n,
            "randrange": lambda: [random.randrange(n) for _ in range(n)],
            "random": lambda: [int(random.random() * n) for _ in range(n)],
            "sample": lambda: random.sample(range(n), n),
            "permutation": lambda: np.random.permutation(n),
            "randint": lambda: np.random.randint(0, n, n),
            "choice": lambda: np.random.choice(n, n),
            "rand": lambda: (np.random.rand(n) * n).astype(int),
            "own permutation": lambda: OF_NUMPY.permutation(n),
            "own integers": lambda: OF_NUMPY.integers(0, n, n),
            "own choices": lambda: OF_PYTHON.choices(range(n), k=n),
            "one after the other": lambda: [int(torch.randint(n, ())) for _ in range(n)],
            "up to a seed's size": lambda: torch.randint(2**63 - 1, (n,)) % n,
        }[name]()

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (1 + (out * out[torch.as_tensor(drawn(len(x)))]).sum(1)).square().mean()

    return loss


def _slopes_and_a_choice(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = F.rrelu(model(x), training=True)
    return (1 + (out * out[torch.randint(len(x), (len(x),))]).sum(1)).square().mean()


def _other_rows(name: str) -> Loss:
    """Rows beside others that are drawn, as negatives are."""

    def drawn(out: torch.Tensor) -> torch.Tensor:
        n, even = len(out), torch.ones(len(out))
        return {
            "randint": lambda: torch.randint(n, (n,)),
            "from 1": lambda: torch.randint(1, n, (n,)),
            "up to the last but one": lambda: torch.randint(n - 1, (n,)),
            "one": lambda: torch.randint(n, ()).expand(n),
            "random_": lambda: torch.empty(n, dtype=torch.long).random_(0, n),
            "randint_like": lambda: torch.randint_like(even, n).long(),
            "randperm": lambda: torch.randperm(n),
            "multinomial": lambda: torch.multinomial(even, n, replacement=True),
            "of each row": lambda: torch.multinomial(torch.ones(n, n), 1)[:, 0],
            "of each other row": lambda: torch.multinomial(torch.ones(n, n - 1), 1)[:, 0],
            "another": lambda: torch.cat([torch.randperm(n - 1) + 1, torch.zeros(1).long()]),
            "pairs": lambda: torch.randint(n * (n - 1) // 2, (n,)) % n,
            "of all pairs": lambda: torch.randperm(n * n)[:n] % n,
            "of two views": lambda: torch.randint(2 * n - 2, (n,)) % n,
            "binomial": lambda: torch.binomial((n - 1) * even, 0.9 * even).long(),
            "halves": lambda: torch.cat([torch.randperm(n // 2), torch.randperm(n // 2)]),
        }[name]()

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (1 + (out * out[drawn(out)]).sum(1)).square().mean()

    return loss


def _tokens(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As many of each row as the longest one has, and which of them count."""
    lengths = torch.tensor([1, 3, 4, 6])[y]
    return x[:, : int(lengths.max())], torch.arange(int(lengths.max())) < lengths[:, None]


def _trimmed(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, counts = _tokens(x, y)
    out = (x * model.weight[0, 0] + torch.randn_like(x)).square() * counts
    return (out.sum(1) / counts.sum(1)).mean()


def _trimmed_and_flat(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, counts = _tokens(x, y)
    noise = torch.randn(x.numel()).view_as(x)
    return ((x * model.weight[0, 0] + 0.1 * noise).square() * counts).sum(1).mean()


LONGEST = [2, 1], [3, 1], [1, 2], [1, 3]
"""Numbers of the two rows of a part that may be the longest one."""


@pytest.mark.parametrize("longest", LONGEST)
def test_numbers_of_tokens_that_a_part_does_not_have(
    longest: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="oomkit")
    y = torch.tensor([longest[0], *[0] * 3, longest[1], *[0] * 3] * 2)
    for seed in range(3):
        assert _run(_trimmed, seed, y=y).accumulation_steps == 2
    assert "coarse" not in "".join(_lines(caplog))


@pytest.mark.refusals
def test_numbers_of_tokens_in_one_row_are_no_proof() -> None:
    y = torch.tensor([2, 0, 0, 0, 1, 0, 0, 0] * 2)
    for seed in range(3):
        with pytest.raises(oomkit.SplitError):
            _run(_trimmed_and_flat, seed, y=y)


COUPLED = [
    *map(
        _other_rows,
        (
            "randint",
            "from 1",
            "up to the last but one",
            "one",
            "random_",
            "randint_like",
            "randperm",
            "multinomial",
            "of each row",
            "of each other row",
            "another",
            "pairs",
            "of all pairs",
            "of two views",
            "binomial",
            "halves",
        ),
    ),
    *map(
        _by_other_streams,
        (
            "choices",
            "one choice",
            "randrange",
            "random",
            "sample",
            "permutation",
            "randint",
            "choice",
            "rand",
            "own permutation",
            "own integers",
            "own choices",
            "one after the other",
            "up to a seed's size",
        ),
    ),
    _slopes_and_a_choice,
    _mixed,
    _counts,
    _counts_by_python,
    _advantages,
    _several_choices,
    _standardised,
    _as_wide_as_its_rows,
    _by_values_of_the_batch,
    _by_a_number_of_the_batch,
]


@pytest.mark.sample(40)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("loss", COUPLED)
@pytest.mark.refusals
def test_random_numbers_hide_no_coupled_rows(loss: Loss, trains: bool) -> None:
    for seed in sampled(range(6), 1):
        with pytest.raises(oomkit.SplitError):
            _run(loss, seed, trains)


def test_a_refusal_comes_out_of_the_runs_that_look_for_the_cause_of_an_error() -> None:
    """An index that only given numbers put out of range, then an error that is oomkit's."""
    failed = threading.Event()  # which does not go back with the step

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if failed.is_set() and len(x) < 8:
            raise oomkit.SplitError("not in parts")
        out, even = model(x), torch.ones(len(x))
        chosen = torch.binomial((len(x) - 1) * even, 0.9 * even).long()
        if len(x) == 4 and int(chosen.max()) >= len(x):
            failed.set()
        return (out * out[chosen]).sum(1).mean()

    with pytest.raises(oomkit.SplitError, match="not in parts"):
        _run(loss, 0)
    assert failed.is_set()


@pytest.mark.refusals
def test_the_error_says_what_is_chosen_by_chance() -> None:
    with pytest.raises(oomkit.SplitError, match="torch.randperm for MixUp.*before the step"):
        _run(_mixed, 0)
    with pytest.raises(oomkit.SplitError) as raised:
        _run(_counts, 0)
    assert "draws integers" not in str(raised.value)


def _augmented(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if not model.training:
        return x
    return x * torch.from_numpy(np.random.rand(len(x), 6) > 0.1 * np.random.rand(len(x), 1))


@pytest.mark.refusals
def test_numbers_of_training_alone_are_left_out_exactly(caplog: pytest.LogCaptureFixture) -> None:
    """No part can be given them, but in eval mode there are none."""

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(_augmented(model, x)), y)

    def counts(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(_augmented(model, x))[y > 0], y[y > 0])

    caplog.set_level(logging.INFO, logger="oomkit")
    for seed in range(6):
        assert _run(loss, seed).accumulation_steps == 2
        with pytest.raises(oomkit.SplitError):
            _run(counts, seed)
    assert len(_lines(caplog)) == 6 and all("in eval mode alone" in line for line in _lines(caplog))


@pytest.mark.parametrize("numbers", [F.dropout, _by_numpy], ids=["kept", "not kept"])
@pytest.mark.refusals
def test_terms_of_training_alone_are_compared(numbers: Callable[..., torch.Tensor]) -> None:
    """A proof in eval mode would not see them."""

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(numbers(x, 0.01, model.training))
        value = F.cross_entropy(out, y)
        if model.training:
            value = value + F.cross_entropy(out @ out.T, torch.arange(len(out)))
        return value

    for seed in range(6):
        with pytest.raises(oomkit.SplitError):
            _run(loss, seed)


@torch.library.custom_op("oomkit_tests::dropped", mutates_args=())
def _dropped(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """As a fused attention: what it draws is not seen."""
    return x * torch.from_numpy(np.random.rand(*x.shape) >= dropout_p) if dropout_p else x.clone()


def _backward_of_dropped(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _dropped(grad, 0.5), None


_dropped.register_autograd(_backward_of_dropped)


def test_kernels_drop_nothing_in_a_proof(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(_dropped(model(x), 0.5 + torch.rand(()).item() * 0), y)

    caplog.set_level(logging.INFO, logger="oomkit")
    assert _run(loss, 0).accumulation_steps == 2
    assert not any("coarse" in line for line in _lines(caplog))


@pytest.mark.refusals
def test_a_coarse_bound_is_as_narrow_as_chance() -> None:
    """An order of rows that makes no difference hides none, either."""

    def shuffled(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = torch.from_numpy(np.random.permutation(len(x)))
        return F.cross_entropy(model(x[order]), y[order])

    def counts(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = torch.from_numpy(np.random.permutation(len(x)))
        x, y = x[order], y[order]
        return F.cross_entropy(model(x)[y > 0], y[y > 0])

    y = torch.tensor([1, 2, 1, 3, 2, 0, 1, 0] * 2)  # of 5 and 3 rows 5 and 1 count
    for seed in range(6):
        assert _run(shuffled, seed, y=y).accumulation_steps == 2
        with pytest.raises(oomkit.SplitError):
            _run(counts, seed, y=y)


@pytest.mark.refusals
def test_a_coarse_bound_is_of_what_the_step_adds_to_gradients() -> None:
    for seed in range(6):
        assert _run(_of_numpy, seed, gradient=10.0).accumulation_steps == 2
        with pytest.raises(oomkit.SplitError):
            _run(_several_choices, seed, gradient=10.0)


def test_streams_that_a_step_does_not_use_stay_where_they_are() -> None:
    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist()

    random.seed(3)
    np.random.seed(3)
    before = states()
    model = nn.Linear(6, 4)

    @oomkit.auto_batch(model=model, accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        F.rrelu(model(x), training=True).square().mean().backward()

    step(torch.randn(16, 6))
    assert states() == before


@pytest.mark.parametrize("loss", [_several, _several_at_the_end])
def test_several_numbers_for_each_row_where_one_row_fits(loss: Loss) -> None:
    def step(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss(model, x, y)

    for seed in range(3):
        assert _run(step, seed).accumulation_steps == 16


def test_weights_are_found_with_several_numbers_for_each_row() -> None:
    def added(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _several(model, x, y) * len(x)

    def ignoring(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(3 * len(x), 4)
        return F.cross_entropy(model(x.repeat_interleave(3, 0)) + noise, y.repeat_interleave(3))

    y = torch.tensor([1, 2, -100, 3, 2, 0, -100, -100] * 2)
    for seed in range(3):
        assert _run(added, seed).accumulation_steps == 2
        assert _run(ignoring, seed, y=y).accumulation_steps == 2


FEW = list(
    itertools.product([OF_NUMPY.permutation, np.random.permutation], [1, 2, 4], [False, True])
)


@pytest.mark.parametrize(
    ("choose", "fits", "trains_only"), with_rest(sampled(FEW, 4, "few", kind=lambda c: c[1]), FEW)
)
def test_choices_where_few_rows_fit_are_no_proof(
    choose: Callable[[int], Any], fits: int, trains_only: bool
) -> None:
    """Of two rows they may choose each itself: those of more decide, by losses alone, whether or
    not the step works in eval mode."""

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > fits and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if trains_only and not model.training:
            raise ValueError("a step of training")
        out = model(x)
        return (1 + (out * out[torch.as_tensor(choose(len(x)))]).sum(1)).square().mean()

    for seed in range(6):
        with pytest.raises(oomkit.SplitError):
            _run(loss, seed)


def test_numbers_of_the_system_have_no_state() -> None:
    system = random.SystemRandom()

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * (1 + 0 * system.random())  # type: ignore[no-any-return]

    assert _run(loss, 0).accumulation_steps == 2


def test_a_compiled_function_stays_compiled() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: x.sin(), backend=backend)

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(compiled(x + torch.randn_like(x))).square().mean()  # type: ignore[no-any-return]

    assert _run(loss, 0).accumulation_steps == 2
    ran.clear()
    compiled(torch.ones(16, 6))
    assert len(ran) == 1


def test_the_streams_go_on_as_if_nothing_had_been_proven() -> None:
    """Numbers of a call's own micro-batches are their own, one after the other."""
    seen: list[torch.Tensor] = []

    def loss(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(x), 4)
        seen.append(noise)
        return (model(x) + noise).square().mean()

    _run(loss, 1)
    last = torch.cat(seen[-2:])
    assert not torch.equal(last[:8], last[8:])
    torch.manual_seed(1)
    nn.Linear(6, 4), torch.randn(16, 6), torch.randint(4, (16,))
    torch.testing.assert_close(last[:8], torch.randn(8, 4), rtol=0, atol=0)
    torch.testing.assert_close(last[8:], torch.randn(8, 4), rtol=0, atol=0)
