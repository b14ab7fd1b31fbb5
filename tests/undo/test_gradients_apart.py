"""Gradients at entry of which no copies are taken stay out of a split call until its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seeds import seed_all
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import MLP

import oomkit
from oomkit.testing import inject_oom

pytestmark = [  # runs of steps are counted
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]


def _model() -> nn.Module:
    """With numbers drawn in its forward: nothing of a whole backward could be set aside."""
    seed_all(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    seed_all(2)
    return torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 3, (9,))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _run(form: str, k: int, fault: dict[str, Any] | None = None) -> tuple[list[Any], Any, Any]:
    model, (x, y) = _model(), _data()
    F.cross_entropy(model(x), y).backward()
    held = [p.grad for p in model.parameters()]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if form != "backward":
            loss.backward()
        return loss if form == "backward" else loss.detach()

    step = oomkit.auto_batch(
        loss_of, backward=form == "backward", accumulation_steps=k, gradient_safety="off"
    )
    with inject_oom(**(fault or {"nth": 2**60})) as armed:
        step(x, y)
    # As autograd accumulates: into the very tensors that were there.
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    return [*_gradients(model), torch.get_rng_state()], step.records[0], armed


@pytest.mark.parametrize("form", ["step", "backward"])
@pytest.mark.parametrize("k", [2, 3])
def test_every_fault_of_a_split_backward_is_recovered(k: int, form: str) -> None:
    """Bit for bit the undisturbed run over the slices of the replay."""
    _, _, counted = _run(form, k, {"nth": 2**60, "phase": "backward"})
    for n in range(1, counted.seen + 1):
        got, record, armed = _run(form, k, {"nth": n, "phase": "backward"})
        assert armed.fired == record.ooms == 1
        expected, planned, _ = _run(form, record.accumulation_steps)
        assert planned.accumulation_steps == record.accumulation_steps > k
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), n


def test_the_sum_is_that_of_the_whole_batch() -> None:
    x, y = _data()
    whole, split = MLP().double(), MLP().double()
    split.load_state_dict(whole.state_dict())
    for model, k in ((whole, 1), (split, 4)):
        (3 * model(x)).sum().backward()

        @oomkit.auto_batch(accumulation_steps=k, gradient_safety="off")
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(model(x), y).backward()  # noqa: B023
            F.cross_entropy(model(-x), y).backward()  # noqa: B023

        step(x, y)
    for a, b in zip(_gradients(whole), _gradients(split), strict=True):
        assert (a - b).abs().max() <= 1e-12 * a.abs().max()


def test_a_parameter_without_a_gradient_and_one_that_is_not_reached() -> None:
    model = nn.ModuleList([nn.Linear(6, 3, bias=False) for _ in range(3)]).double()
    fresh, reached, idle = (m.weight for m in model)
    x, y = _data()
    reached.grad, idle.grad = torch.ones_like(reached), torch.full_like(idle, 5.0)

    @oomkit.auto_batch(accumulation_steps=3, gradient_safety="off")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model[0](x) + model[1](x), y).backward()

    with inject_oom(nth=8, phase="backward") as armed:
        step(x, y)
    assert armed.fired == 1
    assert fresh.grad is not None and reached.grad is not None and idle.grad is not None
    torch.testing.assert_close(reached.grad - 1, fresh.grad, rtol=0, atol=1e-15)
    assert torch.equal(idle.grad, torch.full_like(idle, 5.0))


def test_after_the_last_backward_it_is_refused() -> None:
    """They have been added to in place, and nobody knows what they were."""
    model, (x, y) = _model(), _data()
    F.cross_entropy(model(x), y).backward()
    failing = [True]

    @oomkit.auto_batch(accumulation_steps=2, gradient_safety="off")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        if oomkit.current().is_last and failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(oomkit.OutOfMemory, match='gradient_safety="copy"'):
        step(x, y)


def test_another_error_brings_them_back() -> None:
    model, (x, y) = _model(), _data()
    F.cross_entropy(model(x), y).backward()
    before, held = _gradients(model), [p.grad for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=3, gradient_safety="off")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        if oomkit.current().index == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(x, y)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, _gradients(model), strict=True))


def _shared_and_reentrant(fault: dict[str, Any]) -> tuple[list[torch.Tensor] | None, Any]:
    """A parameter is reached by the backward of a checkpoint, then by the one around it."""
    seed_all(0)
    shared, other = (nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) for _ in range(2))
    shared.grad, other.grad = torch.ones_like(shared), torch.ones_like(other)
    x = torch.randn(8, 5, dtype=torch.float64)

    @oomkit.auto_batch(model=nn.ParameterList([shared, other]), gradient_safety="off")
    def step(x: torch.Tensor) -> None:
        a = torch.tanh(torch.tanh(x @ shared) @ other)
        b = checkpoint(
            lambda a: torch.tanh(a @ shared), a, use_reentrant=True, preserve_rng_state=False
        )
        b.square().mean().backward()

    with inject_oom(**fault) as armed:
        try:
            step(x)
        except oomkit.OutOfMemory:
            return None, armed
    return [shared.grad, other.grad], armed


def test_a_part_that_a_backward_within_brought_is_not_taken_for_the_whole() -> None:
    """What moved once is set aside as the whole batch's, but not where a backward inside
    has brought a part of it already."""
    expected, counted = _shared_and_reentrant({"nth": 2**60, "phase": "backward"})
    assert expected is not None
    refused = 0
    for n in range(1, counted.seen + 1):
        got, _ = _shared_and_reentrant({"nth": n, "phase": "backward"})
        refused += got is None
        for a, b in zip(expected, got or expected, strict=True):
            assert (a - b).abs().max() <= 1e-12 * a.abs().max(), n
    assert 0 < refused < counted.seen
