"""What an optimizer's step() is given in a split step: a closure that computes nothing is as none;
a loss is that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


class Polyak(torch.optim.Optimizer):
    """Its step is as long as the loss is high."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen: Seen[Any] = Seen()

    @torch.no_grad()
    def step(self, loss: Any = 1.0, extra: Any = None, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self.seen.append((loss, extra))
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * float(loss) * p.grad)


Give = Callable[[Polyak, torch.Tensor, torch.Tensor], Any]


def _run(
    give: Give, slices: list[int] | None, reduction: str = "mean"
) -> tuple[list[torch.Tensor], Polyak]:
    torch.manual_seed(4)
    model = nn.Linear(6, 3).double()
    optimizer = Polyak(model.parameters())
    x = torch.randn(8, 6, dtype=torch.float64)

    @oomkit.auto_batch(verify=False, reduction=reduction)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = model(x).pow(2).mean(1)
        loss = rows.sum() if reduction == "sum" else rows.mean()
        loss.backward()
        give(optimizer, loss, x)

    if slices is None:
        step(x)
    else:
        with oomkit.testing.force_slices(slices):
            step(x)
    return [p.detach().clone() for p in model.parameters()], optimizer


LOSSES: dict[str, Give] = {
    "tensor": lambda o, loss, x: o.step(loss),
    "detached": lambda o, loss, x: o.step(loss.detach()),
    "number": lambda o, loss, x: o.step(loss.item()),
    "by name": lambda o, loss, x: o.step(loss=loss),
    "beside others": lambda o, loss, x: o.step(loss, "cosine"),
    "beside a number": lambda o, loss, x: o.step(loss, extra=17),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str, reduction: str) -> None:
    want, _ = _run(LOSSES[name], None, reduction)
    got, optimizer = _run(LOSSES[name], [3, 3, 2], reduction)
    assert len(optimizer.seen) == 1
    for a, b in zip(want, got, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


REFUSED: dict[str, tuple[Give, str]] = {
    "rows": (lambda o, loss, x: o.step(1.0, x), "of type Tensor"),
    "list": (lambda o, loss, x: o.step(1.0, [loss]), "of type list"),
    "row count": (lambda o, loss, x: o.step(1.0, len(x)), "number of rows of the micro-batch"),
    "two figures": (
        lambda o, loss, x: o.step(loss, loss.item() + 1),
        "a different argument in each",
    ),
    "closure of a loss": (lambda o, loss, x: o.step(closure=lambda: loss), "returns the loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_one_micro_batch_is_refused_before_the_update(name: str) -> None:
    give, match = REFUSED[name]
    optimizers: Seen[Polyak] = Seen()

    def kept(optimizer: Polyak, loss: torch.Tensor, x: torch.Tensor) -> None:
        optimizers[:] = [optimizer]
        give(optimizer, loss, x)

    with pytest.raises(oomkit.SplitError, match=match):
        _run(kept, [4, 4])
    torch.manual_seed(4)
    fresh = nn.Linear(6, 3).double()
    params = optimizers[0].param_groups[0]["params"]
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), params, strict=True))


def _optimizers(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(params, lr=0.1), torch.optim.SGD(params, lr=0.1, momentum=0.9)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_that_does_nothing_is_as_none(which: int, by_name: bool) -> None:
    """Lightning hands one to every step() of manual optimization."""

    def train(nth: int | None) -> tuple[list[torch.Tensor], list[int], int]:
        torch.manual_seed(4)
        model = nn.Linear(6, 3)
        optimizer = _optimizers(list(model.parameters()))[which]
        called: Seen[int] = Seen()

        def nothing() -> None:
            called.append(1)

        @oomkit.auto_batch(verify=False)
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step(closure=nothing) if by_name else optimizer.step(nothing)

        x = torch.randn(8, 6)
        step(x)
        called.clear()
        fired = 0
        if nth is None:
            step(x)
        else:
            with inject_oom(nth=nth, phase="backward") as fault:
                step(x)
            fired = fault.fired
        return [p.detach().clone() for p in model.parameters()], called, fired

    want, _, _ = train(None)
    seen = 0
    for nth in range(1, 9):
        got, called, fired = train(nth)
        if not fired:
            break
        seen += 1
        assert len(called) == 1
        for a, b in zip(want, got, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6)
    assert seen > 1


def _second_pass(form: str, model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """As SAM does it: a first backward outside, another in the closure."""

    def closure() -> None:
        if form == "backward":
            model(x).pow(2).mean().backward()
        else:
            with torch.no_grad():
                model(x)

    return closure


@pytest.mark.parametrize("form", ["backward", "forward"])
def test_a_closure_that_runs_the_model_is_refused_before_the_update(form: str) -> None:
    torch.manual_seed(4)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step(_second_pass(form, model, x))

    x = torch.randn(8, 6)
    before = [p.detach().clone() for p in model.parameters()]
    with oomkit.testing.force_slices([4, 4]), pytest.raises(oomkit.SplitError):
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_that_ran_a_backward_is_not_retried() -> None:
    torch.manual_seed(4)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()

        def closure() -> None:
            model(x).pow(2).mean().backward()
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 MiB")

        optimizer.step(closure)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.OutOfMemory, match="with a closure"):
        step(torch.randn(8, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
