"""What each micro-batch changes alike moves once: counts of steps, averages of the weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import oomkit
from oomkit.testing import inject_oom

SEED = 11
steps = 0


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(
            nn.Linear(6, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 3, dtype=torch.float64)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.n = self.seen = self.hits = 0
        self.total = self.last = 0.0
        self.slots = Slots()
        self.history: list[int] = []
        self.losses: list[float] = []

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), y)

    def update(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def count(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        return self.update(x, y)

    def count_in_slots(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.slots.n += 1
        return self.update(x, y)

    def count_in_a_global(self, x: torch.Tensor, y: torch.Tensor) -> float:
        global steps
        steps += 1
        return self.update(x, y)

    # decisions by a count

    def decay(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.n
        return self.update(x, y)

    def accumulate(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        loss = self.loss(x, y) / 2
        loss.backward()
        if self.n % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def warm_up(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        self.optimizer.zero_grad()
        loss = min(1.0, self.n / 3) * self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def returned(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.loss(x, y) * (1 + self.n % 2)

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        with torch.no_grad():
            return self.loss(x, y).item()

    # what depends on the rows

    def totals(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        loss = self.update(x, y)
        self.total += loss
        self.seen += len(x)
        self.losses.append(loss)
        return loss

    def any_of_a_class(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.hits += int((y == 2).any())
        return self.update(x, y)

    def state(self) -> list[Any]:
        counts = [self.n, self.slots.n, steps, self.history]
        return [*counts, *(p.tolist() for p in self.model.parameters())]


def _batches(rows: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(SEED)
    return [
        (torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,)))
        for _ in range(count)
    ]


def _run(
    step: Callable[..., Any], failing: dict[int, dict[str, Any]], rows: int = 12, count: int = 4
) -> list[str]:
    """Calls on several batches; what is warned of."""
    global steps
    steps = 0
    said: list[str] = []
    for at, batch in enumerate(_batches(rows, count)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if at in failing:
                with inject_oom(**failing[at]) as armed:
                    step(*batch)
                assert armed.fired
            else:
                step(*batch)
        said += [str(w.message) for w in caught if "is_last" in str(w.message)]
    return said


FAILING: dict[str, dict[int, dict[str, Any]]] = {
    "forward": {1: {"nth": 1, "phase": "forward"}},
    "backward, twice": {1: {"nth": 2, "phase": "backward"}, 3: {"nth": 1, "phase": "forward"}},
    "quarters": {2: {"nth": 1, "times": 2, "phase": "forward"}},
    "the first": {0: {"nth": 1, "phase": "forward"}},
}

STEPS = (
    "count", "count_in_slots", "count_in_a_global", "decay", "accumulate", "warm_up", "returned",
    "evaluate",
)  # fmt: skip


def _close(a: list[Any], b: list[Any]) -> bool:
    flat = [torch.tensor(x, dtype=torch.float64) for x in (*a, *b)]
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-10, atol=1e-12)
        for x, y in zip(flat[: len(a)], flat[len(a) :], strict=True)
    )


@pytest.mark.sample(32)
@pytest.mark.parametrize("rows", [12, 11])
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("name", STEPS)
def test_a_count_counts_batches_and_decides_alike(name: str, failing: str, rows: int) -> None:
    def run(trainer: Trainer, function: Callable[..., Any], at: dict[int, Any]) -> list[str]:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss = function(x, y)
            if name == "returned":
                trainer.optimizer.zero_grad()
                loss.backward()
                trainer.optimizer.step()

        return _run(step, at, rows)

    at = FAILING[failing]
    if name in ("returned", "evaluate"):  # which have no backward
        at = {call: how | {"phase": "forward"} for call, how in at.items()}
    whole, split = Trainer(), Trainer()
    run(whole, getattr(whole, name), {})
    expected = whole.state()
    said = run(split, oomkit.auto_batch(getattr(split, name)), at)
    assert said == []
    assert _close(split.state(), expected)


# --- averages of the weights ---


class InPlace:
    """In a dictionary, with a decay that its count decides."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.shadow[name].mul_(decay).add_(parameter, alpha=1 - decay)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.shadow.values()]


class Replaced(InPlace):
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            average = 0.1 * parameter.data + 0.9 * self.shadow[name]
            self.shadow[name] = average.clone()


class InAList(InPlace):
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.averages = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
                average.sub_(0.1 * (average - parameter))

    def tensors(self) -> list[torch.Tensor]:
        return self.averages


class AModule(InPlace):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, copy.deepcopy(model).eval()

    def update(self) -> None:
        with torch.no_grad():
            for average, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(p, 0.1)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.average.parameters()]


class Averaging(Trainer):
    def __init__(self, kind: type[InPlace]) -> None:
        super().__init__()
        self.ema = kind(self.model)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = self.update(x, y)
        self.ema.update()
        return loss

    def teach(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """A loss with the average in it, which moves before the forward."""
        self.ema.update()
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        if isinstance(self.ema, AModule):
            with torch.no_grad():
                taught = self.ema.average(x)
            loss = loss + (self.model(x) - taught).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", ["step", "teach"])
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("kind", [InPlace, Replaced, InAList, AModule])
def test_an_average_of_the_weights_moves_once(kind: type[InPlace], failing: str, name: str) -> None:
    whole, split = Averaging(kind), Averaging(kind)
    _run(getattr(whole, name), {})
    said = _run(oomkit.auto_batch(getattr(split, name)), FAILING[failing])
    if not (kind is InAList and failing == "the first"):  # its first move changes nothing
        assert said and all("moves once" in text for text in said)
    for made, wanted in zip(split.ema.tensors(), whole.ema.tensors(), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)
    assert _close(split.state(), whole.state())


class ByLoss(Averaging):
    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = self.update(x, y)
        with torch.no_grad():
            for average in self.ema.tensors():
                average.add_(loss)
        return loss


@pytest.mark.refusals
def test_a_parameter_that_rows_move_is_refused_as_before() -> None:
    trainer = ByLoss(AModule)
    step = oomkit.auto_batch(trainer.step)
    batch = _batches(12, 1)[0]
    step(*batch)
    before = [t.clone() for t in trainer.ema.tensors()]
    with inject_oom(nth=1, phase="forward"), pytest.raises(oomkit.SplitError, match="is_last"):
        step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.ema.tensors(), strict=True))


def test_an_update_by_hand_is_the_last_micro_batchs() -> None:
    """Gradients are there in the last one alone; no warning says that others differ."""

    class ByHand(Trainer):
        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            loss = self.loss(x, y)
            loss.backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
            return loss.item()

    whole, split = ByHand(), ByHand()
    del whole.optimizer, split.optimizer
    _run(whole.step, {}, count=6)
    assert _run(oomkit.auto_batch(split.step), FAILING["forward"], count=6) == []
    assert _close(split.state(), whole.state())


def test_a_tensor_that_rows_move_is_named() -> None:
    (text,) = _run(oomkit.auto_batch(ByLoss(InPlace).step), FAILING["forward"])
    assert "shadow" in text


# --- what is left to the user ---


class Made(Trainer):
    """Made at random, and kept; weights that are moved at random."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: torch.Tensor | None = None
        self.cache: dict[int, torch.Tensor] = {}
        self.noisy = False

    def once(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if self.codes is None:
            self.codes = torch.randn(6, 6, dtype=torch.float64)
        return self.update(x @ self.codes, y)

    def cached(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if 6 not in self.cache:
            self.cache[6] = torch.randn(6, 6, dtype=torch.float64)
        return self.update(x @ self.cache[6], y)

    def by_count(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if self.n == 0:
            self.codes = torch.randn(6, 6, dtype=torch.float64)
        self.n += 1
        assert self.codes is not None
        return self.update(x @ self.codes, y)

    def again(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        if self.n == 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(torch.randn_like(parameter))
        return self.update(x, y)


@pytest.mark.parametrize("name", ["once", "cached", "by_count"])
def test_what_is_made_once_is_not_made_again(name: str) -> None:
    def run(failing: dict[int, Any]) -> list[Any]:
        trainer = Made()
        step = getattr(trainer, name)
        torch.manual_seed(SEED)
        _run(oomkit.auto_batch(step) if failing else step, failing)
        return [p.tolist() for p in trainer.model.parameters()]

    assert _close(run(FAILING["the first"]), run({}))


def test_tensors_that_are_drawn_are_named_as_before() -> None:
    class Masked(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(6, dtype=torch.float64)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.n += 1
            if self.n % 2 == 0:
                self.mask = torch.rand(6, dtype=torch.float64)
            return self.update(x * self.mask.round() * 0 + x, y)

    (text,) = _run(oomkit.auto_batch(Masked().step), FAILING["forward"])
    assert "self.mask" in text and "runs once per micro-batch" in text and "self.n" not in text


@pytest.mark.refusals
def test_weights_that_are_moved_at_random_are_refused() -> None:
    trainer = Made()
    step, batch = oomkit.auto_batch(trainer.again), _batches(12, 1)[0]
    with inject_oom(nth=1, phase="forward"), pytest.raises(oomkit.SplitError, match="is_last"):
        step(*batch)


class Rare(Trainer):
    """What depends on the rows, and did not when the split was verified."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = torch.zeros((), dtype=torch.long)
        self.stats = {"n": 0, "bad": 0.0}
        self.target = copy.deepcopy(self.model)
        self.ids = {"n": 0, "seen": set[int]()}

    def tensor(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.bad += (x > 90).sum()
        return self.update(x, y)

    def in_a_dict(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.stats["n"] += 1
        self.stats["bad"] += float((x > 90).sum())
        return self.update(x, y)

    def opaque(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.ids["n"] += 1  # type: ignore[operator]
        self.ids["seen"] |= {*x[:, 0].tolist()}  # type: ignore[operator]
        return self.update(x, y)

    def copy_if(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if bool((x[:, 0] < 90).any()):
            self.target.load_state_dict(self.model.state_dict())
        return self.update(x, y)


def _rare(name: str, odd: int) -> tuple[Rare, list[str]]:
    """Eight calls, of which the sixth has such rows."""
    trainer = Rare()
    step = oomkit.auto_batch(getattr(trainer, name))
    batches = _batches(12, 8)
    batches[5][0][odd:, 0] = 99.0
    said: list[str] = []
    for at, batch in enumerate(batches):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if at == 1:
                with inject_oom(nth=1, phase="forward"):
                    step(*batch)
            else:
                step(*batch)
        said += [str(w.message) for w in caught if "is_last" in str(w.message)]
    return trainer, said


@pytest.mark.parametrize("name", ["tensor", "in_a_dict", "opaque", "copy_if"])
def test_what_depends_on_the_rows_later_is_not_silent(name: str) -> None:
    trainer, said = _rare(name, 6)
    assert said
    if name == "tensor":
        assert trainer.bad == 6
    if name == "opaque":
        assert len(trainer.ids["seen"]) == 7 * 12 + 7  # type: ignore[arg-type]


def test_what_depends_on_the_rows_is_named_and_a_count_beside_it_is_not() -> None:
    trainer = Trainer()
    (text,) = _run(oomkit.auto_batch(trainer.totals), FAILING["forward"])
    assert all(name in text for name in ("self.total", "self.seen", "self.losses"))
    assert "self.n" not in text
    assert (trainer.n, trainer.seen) == (4, 48)


def test_a_number_that_is_not_alike_any_more_is_named_then() -> None:
    trainer = Trainer()
    step = oomkit.auto_batch(trainer.any_of_a_class)
    x, _ = _batches(8, 1)[0]
    alike, other = torch.full((8,), 2), torch.tensor([2] * 4 + [0] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with inject_oom(nth=1, phase="forward"):
            step(x, alike)
        assert not [w for w in caught if "hits" in str(w.message)]
        for _ in range(4):
            step(x, alike)
        assert trainer.hits == 5
        step(x, other)  # in a call in which no proof is due
        step(x, other)
    (said,) = [str(w.message) for w in caught if "self.hits" in str(w.message)]
    assert "different amounts" in said


def test_what_the_first_part_alone_moves_goes_on() -> None:
    """As the whole does: a number that a condition on the rows decides."""
    trainer = Trainer()
    step = oomkit.auto_batch(trainer.any_of_a_class)
    x, _ = _batches(8, 1)[0]
    first = torch.tensor([2] + [0] * 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with inject_oom(nth=1, phase="forward"):
            step(x, first)
    assert trainer.hits == 1
    assert [w for w in caught if "self.hits" in str(w.message)]


def test_a_step_that_asks_which_micro_batch_it_is_decides_itself() -> None:
    class Own(Trainer):
        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            here = oomkit.current()
            if here.index == 0:
                self.last = 2.0 + self.n
            self.optimizer.zero_grad()
            loss = self.last * self.loss(x, y)  # with a factor that the first one has set
            loss.backward()
            self.optimizer.step()
            if here.is_last:
                self.n += 1
            return loss.item()

    whole, split = Own(), Own()
    _run(whole.step, {})
    _run(oomkit.auto_batch(split.step), FAILING["backward, twice"])
    assert _close(split.state(), whole.state())
    assert split.last == whole.last


def test_a_count_stays_one_in_a_call_that_asks() -> None:
    class Own(Trainer):
        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.n += 1
            loss = self.update(x, y)
            if self.n % 2 == 0 and oomkit.current().is_last:
                self.history.append(self.n)
            return loss

    trainer = Own()
    _run(oomkit.auto_batch(trainer.step), FAILING["the first"])
    assert (trainer.n, trainer.history) == (4, [2, 4])


class Later(Trainer):
    """What a count decides happens for the first time in a call that is split already, and in
    which no proof is due."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.epoch = 1.0, 0
        self.extra = self.codes = None  # type: torch.Tensor | None

    def count_epochs(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        if self.n % 6 == 0:
            self.epoch += 1
        return self.update(x, y)

    def anneal(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        if self.n % 6 == 0:
            self.factor *= 0.5
        self.optimizer.zero_grad()
        loss = self.factor * self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def reset(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        if self.n == 6:
            self.extra = torch.zeros(3)
        return self.update(x, y)

    def draw(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.n += 1
        if self.n == 6:
            self.codes = torch.randn(6, 6, dtype=torch.float64)
        return self.update(x if self.codes is None else x @ self.codes, y)


@pytest.mark.parametrize("name", ["reset", "draw"])
@pytest.mark.parametrize("failing", FAILING)
def test_a_count_stays_one_in_a_call_that_makes_something(failing: str, name: str) -> None:
    whole, split = Later(), Later()
    torch.manual_seed(SEED)
    _run(getattr(whole, name), {}, count=7)
    torch.manual_seed(SEED)
    _run(oomkit.auto_batch(getattr(split, name)), FAILING[failing], count=7)
    assert split.n == whole.n
    assert _close(split.state(), whole.state())


@pytest.mark.refusals
def test_what_a_count_decides_in_a_call_that_makes_something_is_verified() -> None:
    class Weighed(Later):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(x * self.n, y)

        def reset(self, x: torch.Tensor, y: torch.Tensor) -> float:
            self.n += 1
            self.extra = {6: torch.zeros(3)}.get(self.n)  # no code path is new
            return self.update(x, y)

    trainer = Weighed()
    with pytest.raises(oomkit.SplitError, match="reset exactly: the gradient"):
        _run(oomkit.auto_batch(trainer.reset), FAILING["forward"], count=7)
    assert trainer.n == 5  # the five calls before it


@pytest.mark.parametrize("name", ["count_epochs", "anneal"])
@pytest.mark.parametrize("failing", FAILING)
def test_what_is_changed_for_the_first_time_is_seen_by_a_proof(failing: str, name: str) -> None:
    whole, split = Later(), Later()
    _run(getattr(whole, name), {}, count=7)
    _run(oomkit.auto_batch(getattr(split, name)), FAILING[failing], count=7)
    assert (split.factor, split.epoch) == (whole.factor, whole.epoch)
    assert _close(split.state(), whole.state())


def test_without_a_proof_numbers_go_on() -> None:
    trainer = Trainer()
    (text,) = _run(oomkit.auto_batch(trainer.count, verify=False), FAILING["forward"])
    assert "self.n" in text
    assert trainer.n == 1 + 3 * 2
