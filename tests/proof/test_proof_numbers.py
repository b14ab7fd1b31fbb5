"""Numbers among the results where the loss is no mean over rows: by rows, as the loss is, or no
mean at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

SEED, ROWS, LENGTH = 4, 12, 5
Returned = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _step(returned: Returned) -> tuple[Any, nn.Module]:
    """A mean over tokens that are not padding; what it returns is made of loss, scores, mask."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return returned(loss.detach(), out.detach().square().sum(2), y != -100)

    return step, model


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (ROWS, LENGTH), generator=g)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
    y[torch.arange(LENGTH) >= lengths] = -100
    return torch.randn(ROWS, LENGTH, 3, generator=g, dtype=torch.float64), y


def _rows(loss: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.mean()


def _tokens(loss: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (scores * mask).sum() / mask.sum()


MEANS: dict[str, Returned] = {
    "rows alone": _rows,
    "rows as a number": lambda *a: _rows(*a).item(),
    "tokens alone": _tokens,
    "rows before the loss": lambda *a: (_rows(*a), a[0]),
    "rows as the loss": lambda *a: {"loss": _rows(*a), "tokens": _tokens(*a)},
    "both": lambda *a: {"loss": a[0], "rows": _rows(*a), "tokens": _tokens(*a).item()},
    "twice the loss": lambda *a: [a[0], 2 * a[0], _rows(*a)],
    "in a namespace": lambda *a: SimpleNamespace(loss=a[0], rows=_rows(*a), tokens=_tokens(*a)),
    "of numpy": lambda *a: {"loss": a[0], "t": numpy.float64(_tokens(*a)), "r": _rows(*a).numpy()},
}
NO_MEANS: dict[str, Returned] = {
    "in a namespace": lambda *a: SimpleNamespace(loss=a[0], largest=a[1].max().item()),
    "a sum in a namespace": lambda *a: SimpleNamespace(loss=a[0], total=a[1].sum()),
    "of numpy": lambda *a: {"loss": a[0], "largest": numpy.float64(a[1].max())},
    "a sum of numpy": lambda *a: {"loss": a[0], "total": numpy.float32(a[1].sum())},
}


def _plain(result: Any) -> Any:
    result = vars(result) if isinstance(result, SimpleNamespace) else result
    values = result.values() if isinstance(result, dict) else result
    return (
        [float(v) for v in values]
        if isinstance(values, (tuple, list)) or values is not result
        else [float(result)]
    )


@pytest.mark.sample(14)
@pytest.mark.parametrize("steps", [2, 3, ROWS])
@pytest.mark.parametrize("name", MEANS)
def test_means(name: str, steps: int) -> None:
    plain, model = _step(MEANS[name])
    step, mine = _step(MEANS[name])
    split = oomkit.auto_batch(step, accumulation_steps=steps)
    for seed in range(5):
        want, got = plain(*_batch(seed)), split(*_batch(seed))
        assert _plain(got) == pytest.approx(_plain(want), rel=1e-9)
    torch.testing.assert_close(list(mine.parameters()), list(model.parameters()), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_refused(name: str) -> None:
    step, _ = _step(NO_MEANS[name])
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        oomkit.auto_batch(step, accumulation_steps=2)(*_batch(0))


def test_where_two_structures_do_not_agree_it_is_refused() -> None:
    step, model = _step(lambda *a: a)

    @oomkit.auto_batch(accumulation_steps=2)
    def either(batch: dict[str, torch.Tensor]) -> Any:
        loss, scores, mask = step(batch["x"], batch["y"])
        of = _tokens if "tokens" in batch else _rows
        return {"loss": loss, "score": of(loss, scores, mask)}

    x, y = _batch(0)
    either({"x": x, "y": y})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.SplitError, match="a mean over rows in some calls"):
        either({"x": x, "y": y, "tokens": torch.ones(ROWS)})
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def _numbered(first: int, of: Callable[[int], Any], rows: int = ROWS) -> list[Any]:
    """What calls return that have a number; that of `first` runs out of memory."""
    number = 0
    step, _ = _step(lambda *a: of(number))
    decorated = oomkit.auto_batch(step, weight=lambda batch: (batch[1] != -100).sum())
    made = []
    for number in range(8):  # noqa: B007
        x, y = _batch(number)
        with inject_oom(nth=3, phase="backward") if number == first else nullcontext():
            made.append(decorated(x[:rows], y[:rows]))
    return made


@pytest.mark.parametrize("first", [1, 3, 6])
@pytest.mark.parametrize("make", [int, torch.tensor])
def test_the_number_of_a_step_is_no_count(make: Callable[[int], Any], first: int) -> None:
    assert _numbered(first, lambda i: (0.5, make(i))) == [(0.5, make(i)) for i in range(8)]


@pytest.mark.filterwarnings("default::oomkit.OomkitWarning")
def test_a_number_that_was_0_is_added_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Until the verification that the fourth call is due shows what it is."""
    assert _numbered(0, lambda i: (0.5, max(i - 1, 0)))[2:4] == [(0.5, 2), (0.5, 2)]
    assert sum("is added, although all micro-batches" in m for m in caplog.messages) == 1


@pytest.mark.parametrize("make", [int, torch.tensor])
def test_what_was_one_number_in_the_proof_is_not_added_later(make: Callable[[int], Any]) -> None:
    """A maximum: the same in all parts of the proof, and not in those of a later call."""
    torch.manual_seed(SEED)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, levels: torch.Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return make(int(levels.max()))

    levels = torch.full((ROWS,), 5.0)
    for _ in range(2):
        assert step(torch.randn(ROWS, 3, dtype=torch.float64), levels) == make(5)
    levels[: ROWS // 2] = 3
    with pytest.raises(oomkit.SplitError, match="differs: .*3.* and .*5"):
        step(torch.randn(ROWS, 3, dtype=torch.float64), levels)


def test_counts_stay_counts() -> None:
    step, _ = _step(lambda loss, scores, mask: int(mask.sum()))
    decorated = oomkit.auto_batch(step)
    for call in range(4):
        x, y = _batch(call)
        with inject_oom(nth=3, phase="backward") if call == 0 else nullcontext():
            assert decorated(x, y) == int((y != -100).sum())


@pytest.mark.parametrize("rows", [7, 9, 11])
def test_an_accuracy_in_single_precision_of_a_program_in_double(rows: int) -> None:
    """``.float().mean()`` of a part is rounded otherwise than that of the whole."""
    torch.manual_seed(rows)
    model = nn.Linear(3, 2).double()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        model.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward()
        return {"accuracy": (out.argmax(1) == y).float().mean().item()}

    for _ in range(6):
        x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randint(2, (rows,))
        with torch.no_grad():
            right = (model(x).argmax(1) == y).double().mean().item()
        with inject_oom(nth=2, phase="backward"):
            assert step(x, y)["accuracy"] == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("kind", ["largest", "total", "another mean"])
@pytest.mark.refusals
def test_a_number_that_comes_later_is_averaged_with_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a proof has seen it: the split is verified in the calls 0, 1 and 3."""
    torch.manual_seed(SEED)
    model, number = nn.Linear(3, 2).double(), 0
    reduce = {"largest": torch.max, "total": torch.sum, "another mean": torch.mean}[kind]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> dict[str, float]:
        model.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        found = {"loss": loss.item(), "rate": 0.1, "mean": out.mean().item()}
        return found if number < 2 else {**found, "later": reduce(out.exp()).item()}

    for number in range(5):  # noqa: B007
        refused = number == 3 and kind != "another mean"
        with inject_oom(nth=2, phase="backward") if number == 0 else nullcontext():
            with pytest.raises(oomkit.SplitError, match="'later'") if refused else nullcontext():
                step(torch.randn(ROWS, 3, dtype=torch.float64))
    told = [m for m in caplog.messages if "which no proof has shown" in m]
    assert len(told) == 1 and "result['later'] averaged" in told[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_text_is_refused_before_the_update(rows: int) -> None:
    step, model = _step(lambda loss, scores, mask: f"loss {loss.item():.6f}")
    before = [p.detach().clone() for p in model.parameters()]
    decorated = oomkit.auto_batch(step, accumulation_steps=ROWS // rows)
    with pytest.raises(oomkit.SplitError, match="join="):
        decorated(*_batch(0))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("reduced", ["sum", "mean"])
def test_a_part_of_the_loss_in_single_precision_of_a_program_in_double(reduced: str) -> None:
    """``sum(dtype=torch.float32)``, as in the label smoothing of transformers, casts inside."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 500, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @oomkit.auto_batch(accumulation_steps=3)
    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        logs = -model(x).log_softmax(-1)
        rough = getattr(logs, reduced)(-1, dtype=torch.float32)
        loss = logs[:, 0].mean() + rough.sum() / len(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step(torch.randn(384, 32, dtype=torch.float64))


BESIDE_A_SUM: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "mean": lambda loss, right, rows: loss.item() / rows,
    "mean as a tensor": lambda loss, right, rows: loss / rows,
    "mean of numpy": lambda loss, right, rows: numpy.float64(loss.item() / rows),
    "mean by its name": lambda loss, right, rows: {"loss": loss.item() / rows},
    "mean and accuracy": lambda loss, right, rows: (loss / rows, right.mean().item()),
    "accuracy": lambda loss, right, rows: right.mean().item(),
    "rate": lambda loss, right, rows: 0.1,
    "the sum": lambda loss, right, rows: loss.item(),
    "the sum as a tensor": lambda loss, right, rows: loss,
}


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}], ids=["", "told"])
@pytest.mark.parametrize("name", BESIDE_A_SUM)
def test_what_stands_for_a_loss_that_is_added_may_be_a_mean(
    name: str, options: dict[str, Any]
) -> None:
    found = []
    for fails in (False, True):
        torch.manual_seed(SEED)
        model = nn.Linear(3, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @oomkit.auto_batch(**options)
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()  # noqa: B023
            scores = model(x)  # noqa: B023
            loss = F.cross_entropy(scores, y, reduction="sum")
            loss.backward()
            optimizer.step()  # noqa: B023
            right = (scores.argmax(1) == y).double()
            return BESIDE_A_SUM[name](loss.detach(), right, len(x))

        g = torch.Generator().manual_seed(SEED)
        results = []
        for i in range(4):
            x = torch.randn(ROWS, 3, generator=g, dtype=torch.float64)
            y = torch.randint(0, 4, (ROWS,), generator=g)
            with inject_oom(nth=3, phase="backward") if fails and i == 1 else nullcontext():
                results.append(step(x, y))
        assert step.records[-1].accumulation_steps == 1 + fails
        found.append(results)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [13, 8])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("made", [float, torch.Tensor.detach])
def test_a_mean_that_was_0_where_it_was_proven_is_not_added(
    made: Callable[[torch.Tensor], Any], seed: int, rows: int
) -> None:
    """In the place of a loss that is added, which was not 0."""
    found = []
    for fails in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(3, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @oomkit.auto_batch
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()  # noqa: B023
            F.cross_entropy(model(x), y, reduction="sum").backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            return made(((x[:, 1] > 0.3) & (x[:, 0] > x[:, 1])).double().mean())

        g = torch.Generator().manual_seed(seed)
        results = []
        for call in range(3):
            x = torch.randn(rows, 3, generator=g, dtype=torch.float64)
            if call == 1:  # the first rows, which a proof has, have none
                x[: rows // 2, 1] = 0.0
            y = torch.randint(0, 4, (rows,), generator=g)
            with inject_oom(times=2, phase="backward") if fails and call == 1 else nullcontext():
                results.append(float(step(x, y)))
        found.append(results)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.refusals
def test_a_number_that_was_0_when_proven_is_settled_by_the_next_proof(
    beside: bool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Averaged with a warning until then, also in the place of a loss that is added.

    What is beside the loss is no sum: that proof refuses it.
    """
    torch.manual_seed(SEED)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        right = (x[:, 0] > 0).double()
        figure = float(right.sum() if kind == "sum" else right.mean())
        return {"loss": 0.0, "figure": figure} if beside else figure

    figures = []
    for call, positive in enumerate(((), (), (-1, -2), (0, 1), (-1, -2))):  # proven at 0, 1 and 3
        x = -torch.rand(ROWS, 3, dtype=torch.float64)
        x[list(positive)] *= -1
        with inject_oom(nth=1, phase="backward") if call == 0 else nullcontext():
            if beside and kind == "sum" and call == 3:
                with pytest.raises(oomkit.SplitError, match=r"'figure'\] of the joined parts"):
                    step(x)
                break
            result = step(x)
        figures.append(result["figure"] if beside else result)
    told = [m for m in caplog.messages if "which no proof has shown: it was 0" in m]
    assert len(told) == 1 and "averaged" in told[0]
    mean = 2 / ROWS
    assert figures[3:] == [mean if kind == "mean" else 2.0] * (len(figures) - 3)
    assert figures[:3] == [0.0, 0.0, mean if kind == "mean" else 1.0]
