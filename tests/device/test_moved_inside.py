"""A batch on the CPU that the step itself moves, with a model that is not found: the step's figures
are those of the CPU, and what fails is the device.
"""

# ruff: noqa: F811 - fixtures that are used by name

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.seen import Seen, world

import oomkit
from device import MIB, ROWS, Body, Device, out_of_memory, run
from device.test_recovery_unbridged import Unbridged


@pytest.fixture(params=["bridge", "without it"])
def beside(request: Any, fake: Device, backend: Any, monkeypatch: Any) -> Any:
    """In use, and no tensor says that it is on it."""
    gc.collect()  # its figures are those of the process
    if request.param == "bridge":
        fake.install(index=-1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        yield fake
        return
    made = Unbridged(backend, monkeypatch).install()
    yield made
    made.remove()


def drawing(beside: Device, drawn: list[tuple[int, int]]) -> Any:
    def body(x: torch.Tensor) -> torch.Tensor:
        drawn.append((len(x), beside.generators[0].offset))
        world.set(beside.generators[0], offset=beside.generators[0].offset + 4)
        if len(drawn) == 1:
            raise out_of_memory()
        return x * 2

    return body


def test_the_devices_streams_are_put_back_and_its_cache_emptied(beside: Device) -> None:
    drawn: Seen[tuple[int, int]] = Seen()
    step = run(drawing(beside, drawn))
    assert drawn == [(8, 0), (4, 0), (4, 4)]
    assert beside.empty_calls == 1 and step.records[0].ooms == 1


def test_its_side_streams_are_waited_for(beside: Device) -> None:
    sizes: Seen[int] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            world.set(beside, pending=MIB)
            raise out_of_memory()
        return x * 2

    run(body)
    assert sizes == [8, 4, 4] and beside.events == [("wait", 0)]


def test_a_context_that_is_lost_ends_it(beside: Device, last_error: Any) -> None:
    last_error.last_error = 700
    body = Body(error := out_of_memory())
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == [8] and beside.empty_calls == 0


def test_a_device_that_is_not_in_use_is_left_alone(beside: Device) -> None:
    beside.initialized = 0
    drawn: Seen[tuple[int, int]] = Seen()
    run(drawing(beside, drawn))
    assert drawn == [(8, 0), (4, 4), (4, 8)] and beside.empty_calls == 0 and beside.events == []


def test_its_workspaces_go_at_the_second_failure(beside: Device) -> None:
    run(Body(out_of_memory(), out_of_memory()))
    assert [event for event, _ in beside.events].count("workspaces") == 1


def test_a_stream_that_cannot_be_read_is_no_reason_to_fail_on_the_cpu(
    fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread captures, or the device is lost: this step does not use it."""

    class Generator:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"Cannot call {name} during CUDA graph capture")

    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    before = model.weight.detach().clone()
    step(torch.ones(4, 2))
    assert not torch.equal(before, model.weight)
