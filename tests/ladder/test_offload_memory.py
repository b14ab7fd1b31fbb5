"""What saved tensors on the host cost the device, and that nothing of them stays."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from helpers.seeds import seed_all
from torch import nn

from ladder.programs import (
    GPT,
    SEED,
    allocated,
    build,
    kept_of,
    offload,
    peak_of,
    run,
    same,
)


def gpt(blocks: int) -> tuple[nn.Module, torch.Tensor]:
    print("seed", SEED)
    seed_all(SEED)
    return GPT(blocks), torch.randint(256, (16, 32))


def peaks(blocks: int) -> tuple[int, int]:
    """Above the parameters, the gradients included: as it is, and with the offload."""
    model, batch = gpt(blocks)
    plain = peak_of(lambda: run(model, batch))
    model.zero_grad()
    there = offload(kept_of(model, batch))
    return plain, peak_of(lambda: run(model, batch, there))


def test_the_peak_of_a_deep_model() -> None:
    plain, moved = peaks(4)
    assert moved * 5 <= plain
    # What comes with each block is its gradients alone.
    more_plain, more_moved = peaks(12)
    assert more_moved * 9 <= more_plain
    one_block = sum(p.nbytes for p in gpt(1)[0].blocks.parameters())  # type: ignore[union-attr, operator]
    assert more_moved - moved <= 8 * one_block + 64


def test_a_budget_that_the_plain_step_does_not_fit() -> None:
    import oomkit

    model, batch = gpt(12)
    first = run(model, batch)
    first = [value.clone() for value in first]
    plain, moved = peaks(12)
    with oomkit.limit_memory(allocated() + (plain + moved) // 2, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            run(model, batch)
        assert same(run(model, batch, offload(kept_of(model, batch))), first)


# --- one copy each way ---


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin()  # saves x


def test_a_tensor_saved_twice_is_copied_once() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([])
    with there:
        y = x * 1.5
        a, b = y.sin(), y.exp().sin()
    assert there.copies == 2 and there.held_bytes == there.moved_bytes == 2 * y.nbytes
    del y
    before = allocated()
    first, second = a.grad_fn._saved_self, a.grad_fn._saved_self  # type: ignore[union-attr]
    assert first.data_ptr() == second.data_ptr() and allocated() - before == first.nbytes
    place = first.untyped_storage()._cdata
    del first, second
    assert allocated() == before
    assert a.grad_fn._saved_self is not None and place  # type: ignore[union-attr]
    (a.sum() + b.sum()).backward()
    assert there.copies == there.held_bytes == 0


def test_views_of_one_storage_share_it() -> None:
    x = torch.randn(64, 192, requires_grad=True)
    there = offload([x])
    with there:
        parts = (x * 2).chunk(3, dim=-1)
        found = [sines(part) for part in parts]
    assert there.copies == 1 and there.held_bytes == x.nbytes
    del parts
    before = allocated()
    back = [one.grad_fn._saved_self for one in found]  # type: ignore[union-attr]
    assert len({one.untyped_storage().data_ptr() for one in back}) == 1
    assert allocated() - before == x.nbytes
    assert [one.storage_offset() for one in back] == [0, 64, 128]
    assert {one.stride() for one in back} == {(192, 1)}


def test_a_small_part_of_a_storage_goes_alone() -> None:
    x = torch.randn(100, 1024, requires_grad=True)
    there = offload([x])
    with there:
        y = x * 2
        part = y[3:13]
        value = sines(part)
    assert part.nbytes <= there.held_bytes <= part.nbytes + 512
    back = value.grad_fn._saved_self  # type: ignore[union-attr]
    assert torch.equal(back, part) and back.stride() == part.stride()
    assert back.data_ptr() % 512 == part.data_ptr() % 512 or back.data_ptr() % 64 == 0


def test_what_stays() -> None:
    """Parameters and views of them, the batch, what is small."""
    model, batch = nn.Linear(64, 64), torch.randn(64, 64)
    there = offload(kept_of(model, batch))
    with there:
        small = (batch[:4] @ model.weight[:3].t()).exp().sin()
        views = (batch.t() * model.weight.view(-1).view(64, 64)).sum()
    assert there.moved_bytes == 0
    del small, views


def test_kept_storages_are_not_held() -> None:
    before = allocated()
    batch = torch.randn(4096)
    there = offload([batch])
    del batch
    assert allocated() == before
    assert there.copies == 0


# --- the same address, other values ---


def test_memory_that_is_free_again() -> None:
    """Each tensor may lie where the one before it did."""
    x = torch.randn(4096, requires_grad=True)
    there = offload([x])
    with there:
        found = [(x + i).sin().sum() for i in range(20)]
    assert there.copies == 20
    for i, value in enumerate(found):
        (grad,) = torch.autograd.grad(value, x)
        assert torch.equal(grad, (x.detach() + i).cos())


def test_a_write_between_two_saves() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([x])
    with there, torch.no_grad():
        y = x * 1
    with there:
        a = y * x
        values = y.clone()
        y.detach()[:] = 7.0  # the version is another one
        b = y * x
    assert there.copies == 2
    assert torch.equal(torch.autograd.grad(b.sum(), x)[0], torch.full_like(values, 7))
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version 1"):
        torch.autograd.grad(a.sum(), x)


def test_a_storage_that_was_swapped() -> None:
    """By .data the same tensor, at the same version, gets another storage over the same memory."""
    x = torch.randn(4096, requires_grad=True)
    memory, y = torch.empty(4096).numpy(), torch.zeros(4096)
    there = offload([x])
    found = []
    with there:
        for i in range(20):
            y.data = torch.empty(0)  # the address of the storage's object is free for the next
            memory.fill(i)
            y.data = torch.from_numpy(memory)
            found.append((y * x).sum())
    assert y._version == 0 and there.copies == 20
    for i, value in enumerate(found):
        assert torch.equal(torch.autograd.grad(value, x)[0], torch.full((4096,), float(i)))


def test_a_storage_with_other_memory() -> None:
    x = torch.randn(4096, requires_grad=True)
    y = torch.ones(4096)
    storage = y.untyped_storage()
    there = offload([x])
    with there:
        a = y * x
        place = y.data_ptr()
        between = []  # takes what is freed
        while y.data_ptr() == place and len(between) < 1000:
            storage.resize_(0)
            between.append(torch.empty(4096))
            storage.resize_(y.nbytes)
        y.data.fill_(3.0)
        b = y * x
    assert y.data_ptr() != place and y._version == 0
    assert torch.equal(torch.autograd.grad(a.sum(), x)[0], torch.ones(4096))
    assert torch.equal(torch.autograd.grad(b.sum(), x)[0], torch.full((4096,), 3.0))


class Writes(torch.autograd.Function):
    """Writes to what it has saved, which is its own business where hooks are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        Writes.held = x
        x.detach().zero_()
        return grad * 2


def test_a_copy_that_was_written_to_is_not_given_again() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([x])
    with there:
        y = x * 1
        a, b = Writes.apply(y), sines(y)
        values = y.detach().clone()
        del y
    torch.autograd.grad(a.sum(), x, retain_graph=True)
    assert torch.equal(Writes.held, torch.zeros_like(values))
    assert torch.equal(torch.autograd.grad(b.sum(), x)[0], values.cos())
    del Writes.held


# --- nothing is left ---


def tensors() -> int:
    return sum(type(one) in (torch.Tensor, nn.Parameter) for one in gc.get_objects())


def test_a_graph_that_is_dropped() -> None:
    model, batch = build("gpt")
    there = offload(kept_of(model, batch))
    gc.collect()
    before = allocated()
    gc.disable()
    try:
        with there:
            loss = model(batch)
        assert there.held_bytes > 0
        del loss
        assert there.held_bytes == there.copies == 0
        assert allocated() == before
    finally:
        gc.enable()


def test_an_output_does_not_hold_itself() -> None:
    """What is saved and not moved is held without its graph."""
    x = torch.randn(8, requires_grad=True)
    before = allocated()
    gc.disable()
    try:
        with offload([]):
            y = x.exp()
        del y
        assert allocated() == before
    finally:
        gc.enable()


def test_a_thousand_steps() -> None:
    model, batch = build("in_place")
    there = offload(kept_of(model, batch))
    run(model, batch, there)
    gc.collect()
    before = allocated(), tensors(), there.moved_bytes
    for _ in range(1000):
        run(model, batch, there)
    gc.collect()
    assert (allocated(), tensors()) == before[:2]
    assert there.held_bytes == there.copies == 0
    assert there.moved_bytes == 1001 * before[2]


def test_a_backward_on_another_thread() -> None:
    first = run(*build("gpt"))
    model, batch = build("gpt")
    there = offload(kept_of(model, batch))
    seed_all(SEED)
    with there:
        loss = model(batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    grads = [p.grad for p in model.parameters()]
    assert same(grads, first[1 : 1 + len(grads)])
    assert there.held_bytes == 0
