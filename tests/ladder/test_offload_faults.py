"""Memory that lacks while tensors go to the host and come back."""

from __future__ import annotations

import pytest
import torch
from helpers.sample import sampled

from ladder.programs import build, kept_of, offload, run, same
from oomkit.testing import inject_oom


def copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.clone() for value in values]


@pytest.mark.parametrize("name", ["in_place", "gpt", "conv", "custom"])
def test_each_allocation_of_a_step_fails_once(name: str) -> None:
    """Those of a backward are mostly ours: what comes back is counted and may lack."""
    model, batch = build(name)
    first = copies(run(model, batch))
    with inject_oom(nth=2**40) as count:
        run(model, batch)
        plain = count.seen
    with inject_oom(nth=2**40) as count:
        run(model, batch, offload(kept_of(model, batch)))
        total = count.seen
    assert total > plain
    for nth in sampled(range(1, total + 1), 12):
        model, batch = build(name)
        there = offload(kept_of(model, batch))
        entry = copies([*model.buffers()])
        with inject_oom(nth=nth) as fault, pytest.raises(torch.OutOfMemoryError):
            run(model, batch, there)
        assert fault.fired == 1
        for buffer, value in zip(model.buffers(), entry, strict=True):
            buffer.copy_(value)
        again = run(model, batch, there)
        assert same(again, first), nth
        assert there.held_bytes == there.copies == 0, nth


@pytest.mark.parametrize("times", [1, None])
def test_the_host_has_no_memory(times: int | None) -> None:
    """Then the tensor stays on the device."""
    model, batch = build("gpt")
    first = copies(run(model, batch))
    full = offload(kept_of(model, batch))
    run(model, batch, full)
    fewer = 0
    for nth in sampled(range(1, 90), 12):
        there = offload(kept_of(model, batch))
        with inject_oom(nth=nth, times=times, phase="recovery") as fault:
            again = run(model, batch, there)
        assert same(again, first), nth
        fewer += there.moved_bytes < full.moved_bytes
        assert there.moved_bytes == full.moved_bytes or fault.fired > 0
        assert there.held_bytes == there.copies == 0
    assert fewer > 0


def test_a_backward_that_failed_is_run_again() -> None:
    """The graph is still there: what did not come back does so now."""
    model, batch = build("in_place")
    weight = next(model.parameters())
    there = offload(kept_of(model, batch))
    with there:
        loss = model(batch)
    (plain,) = torch.autograd.grad(loss, weight, retain_graph=True)
    held = there.held_bytes
    with inject_oom(nth=2**40) as count:
        torch.autograd.grad(loss, weight, retain_graph=True)
        total = count.seen
    for nth in range(1, total + 1):
        with inject_oom(nth=nth), pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(loss, weight, retain_graph=True)
        (again,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert torch.equal(again, plain), nth
        assert there.held_bytes == held
    del loss
    assert there.held_bytes == 0


def test_the_copy_that_comes_back_is_counted_and_may_lack() -> None:
    x = torch.randn(4096, requires_grad=True)
    with offload([]):
        y = (x * 1).sin()
    with inject_oom(min_bytes=x.nbytes), pytest.raises(torch.OutOfMemoryError):
        y.grad_fn._saved_self  # type: ignore[union-attr]  # noqa: B018
    assert torch.equal(y.grad_fn._saved_self, x.detach())  # type: ignore[union-attr]
