"""Errors that end a step say one thing about its state, and that is so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
STANDS = "the update of this batch had been applied"


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("slices", [None, [2, 2]])
def test_a_half_done_update_is_not_said_to_stand(slices: list[int] | None) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 64)
    opt = torch.optim.AdamW(net.parameters(), foreach=False)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()

    x = torch.randn(4, 3)
    seen = 0
    for nth in range(2, 12):
        with inject_oom(nth=nth, phase="optimizer"):
            try:
                if slices is None:
                    step(x)
                else:
                    with force_slices(slices):
                        step(x)
            except oomkit.PartialUpdate as error:
                seen += 1
                assert "half done" in str(error) and STANDS not in notes(error)
    assert seen > 0


def failing(net: nn.Module, optimizer: torch.optim.Optimizer, at: int, after: bool) -> None:
    """One L-BFGS step whose `at`-th closure, or what comes after the step, fails once."""
    calls: list[int] = []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            calls.append(len(x))
            if len(calls) == at:
                raise torch.OutOfMemoryError(TEXT)
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        if after:
            raise torch.OutOfMemoryError(TEXT)

    step(torch.randn(4, 3))


def test_one_optimizer_with_a_closure_is_not_said_to_be_two() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    with pytest.raises(oomkit.PartialUpdate) as caught:
        failing(net, torch.optim.LBFGS(net.parameters(), max_iter=8), at=3, after=False)
    assert "inside an optimizer's step() that had changed a parameter" in str(caught.value)
    assert "another" not in str(caught.value) and STANDS not in notes(caught.value)


def test_a_finished_closure_step_stands() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    with pytest.raises(oomkit.OutOfMemory) as caught:
        failing(net, torch.optim.LBFGS(net.parameters(), max_iter=2), at=0, after=True)
    assert caught.value.committed
    assert "its update was applied: the update stands" in str(caught.value)


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_the_step_cleared_are_not_said_to_be_there(clears: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    assert net.weight.grad is not None
    before = net.weight.grad.clone()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if clears:
            opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()

    with inject_oom(nth=3, times=None), pytest.raises(oomkit.OutOfMemory) as caught:
        step(torch.ones(4, 3))
    text = "as before the step, except for gradients that the step itself cleared"
    assert text in str(caught.value)
    assert (net.weight.grad is None) is clears
    if not clears:
        assert torch.equal(net.weight.grad, before)


def test_an_evaluation_has_no_gradients_to_speak_of() -> None:
    step, x = oomkit.auto_batch(lambda x: x * 2), torch.ones(4, 3)
    with inject_oom(nth=1, times=None), pytest.raises(oomkit.OutOfMemory) as caught:
        step(x)
    assert "as before the step" in str(caught.value)
    assert "gradients that" not in str(caught.value)
