"""Saved tensors on the host give the same gradients, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ladder.programs import PROGRAMS, SEED, allocated, build, kept_of, offload, run, same


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_the_same(name: str) -> None:
    """Buffers, versions and random numbers are, too; and then nothing is left."""
    first = run(*build(name))
    model, batch = build(name)
    there = offload(kept_of(model, batch))
    assert same(run(model, batch, there), first)
    assert there.moved_bytes > 8192
    assert there.held_bytes == 0


@pytest.mark.parametrize("room", [0, 300_000, 2_000_000])
def test_with_little_room_on_the_host(room: int) -> None:
    first = run(*build("gpt"))
    model, batch = build("gpt")
    there = offload(kept_of(model, batch), room)
    with there:
        loss = model(batch)
        assert there.held_bytes <= room
    assert there.moved_bytes >= room // 2
    del loss
    assert there.held_bytes == 0
    assert same(run(model, batch, there), first)


def test_the_backward_inside() -> None:
    first = run(*build("double_backward"))
    model, batch = build("double_backward")
    there = offload([])
    with there:
        again = run(model, batch)
    assert same(again, first)
    assert there.held_bytes == 0


@pytest.mark.parametrize("name", ["gpt", "in_place"])
def test_nothing_is_kept(name: str) -> None:
    """Parameters may go, too: what was asked to stay is a matter of bytes only."""
    first = run(*build(name))
    model, batch = build(name)
    there = offload([])
    assert same(run(model, batch, there), first)
    kept = offload(kept_of(model, batch))
    run(model, batch, kept)
    assert there.moved_bytes >= kept.moved_bytes + 16 * 1024


def test_after_the_offload_is_gone() -> None:
    first = run(*build("gpt"))
    model, batch = build("gpt")
    torch.manual_seed(SEED)
    before = allocated()
    with offload(kept_of(model, batch)):
        loss = model(batch)
    loss.backward()
    assert torch.equal(loss.detach(), first[0])
    grads = [p.grad for p in model.parameters()]
    assert same(grads, first[1 : 1 + len(grads)])
    del loss, grads
    model.zero_grad()
    assert allocated() == before
