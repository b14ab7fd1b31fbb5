"""What real programs do beside plain training: compile, graphs, streams, loaders, two models."""

from __future__ import annotations

from collections import UserList
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oomkit
from gpu import DEVICE, DRY, MIB, block, farthest, on_a_device, room, same_bits, state_of
from oomkit.testing import force_slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]

ROWS = 16


def small() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    return layers.to(DEVICE)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    return torch.randn(ROWS, 32, device=DEVICE), torch.randint(0, 4, (ROWS,), device=DEVICE)


def plan(record: Any) -> list[int]:
    k = record.accumulation_steps
    return [ROWS // k + (i < ROWS % k) for i in range(k)]


# Inductor's own, as it is imported (torch.jit.script_method) and of the device (TF32 is available);
# CUDA graphs of "reduce-overhead" say where they are not used.
compiling = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Compiled:
    def __init__(self, mode: str) -> None:
        self.model = small()
        compiled = torch.compile(self.model, mode=mode)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x, self.y = batch()

        @oomkit.auto_batch(model=self.model, optimizer=optimizer)
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            held = block(8 * len(x))
            F.cross_entropy(compiled(x), y).backward()
            held.zero_()
            optimizer.step()

        self.step = step
        compiled(self.x), compiled(self.x[: ROWS // 2])  # compile before memory is short
        torch.manual_seed(9)

    def train(self, around: Any) -> None:
        with around():
            self.step(self.x, self.y)


@compiling
@on_a_device
def test_a_compiled_model() -> None:
    """Within 1e-4: sizes of slices may be compiled into different kernels."""
    ran = Compiled("default")
    ran.train(lambda: room(100))
    (record,) = ran.step.records
    assert record.ooms >= 1
    planned = Compiled("default")
    planned.train(lambda: force_slices(plan(record)))
    assert farthest(state_of(planned.model), state_of(ran.model)) < 1e-4


@compiling
@on_a_device
def test_a_model_compiled_with_graphs_is_not_split() -> None:
    """Torch itself adds up other gradients where micro-batches share a graph's memory."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    ran = Compiled("reduce-overhead")
    before = state_of(ran.model)
    try:
        with pytest.raises(oomkit.OutOfMemory, match="max-autotune-no-cudagraphs"):
            ran.train(lambda: room(100))
        assert same_bits(before, state_of(ran.model)) == []
    finally:
        reset_cudagraph_trees()


@on_a_device
def test_capture_of_a_graph_is_refused_and_leaves_the_program_whole() -> None:
    model = small()
    x, _ = batch()
    static = x.clone()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model.eval()
        step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = step(static)  # healthy: the bare program
    graph.replay()
    assert torch.allclose(out, model(static), atol=1e-5)

    @oomkit.auto_batch
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    other = torch.cuda.CUDAGraph()
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="graph is being captured"):
        with torch.cuda.graph(other):
            static.mul_(1)  # of an empty graph torch warns, in the place of the error
            fails(static)
    torch.cuda.synchronize()
    step(static)  # the device works


@on_a_device
def test_side_streams() -> None:
    """Bytes that a side stream was given count until it is done: the replay finds none."""
    side = torch.cuda.Stream()
    sizes: UserList[int] = UserList()  # lists are put back with the attempt
    found: UserList[int] = UserList()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        found.append(torch.cuda.memory_allocated())
        given = block(8 * len(x))
        with torch.cuda.stream(side):
            given.zero_()
            given.record_stream(side)
            torch.cuda._sleep(10_000_000)
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2

    x = torch.zeros(ROWS, 1, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(step(x), x * 2)
    assert sizes[:2] == [16, 8] and sizes[-2:] == [8, 8]  # between them the proof
    assert found[1] <= found[0] + MIB


# Python 3.12 says so of each fork of a process with threads, which the loader's workers are.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_pins_and_prefetches() -> None:
    """The batch in flight belongs to nobody's attempt: every row is trained on once."""
    seen: list[float] = []
    data = TensorDataset(torch.arange(64.0)[:, None])
    loader = DataLoader(data, ROWS, pin_memory=not DRY, num_workers=0 if DRY else 2)
    model = nn.Linear(1, 1, bias=False, device=DEVICE)

    @oomkit.auto_batch(model=model, reduction="sum")
    def step(x: torch.Tensor) -> None:
        held = block(8 * len(x))
        model(x).sum().backward()
        held.zero_()

    for (rows,) in loader:
        moved = rows.to(DEVICE, non_blocking=True)
        model.weight.grad = None
        with room(100):
            step(moved)
        assert model.weight.grad is not None
        seen.append(float(model.weight.grad))
    assert seen == [float(sum(range(start, start + ROWS))) for start in range(0, 64, ROWS)]
    assert sum(record.ooms for record in step.records) >= 1


def test_two_models_on_one_device() -> None:
    """Each has its own sizes, and neither's memory is taken for the other's."""

    def make(units: int) -> tuple[Any, Any]:
        model = small().eval()  # dropout would draw from the one generator of both
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            held = block(units * len(x))
            F.cross_entropy(model(x), y).backward()
            held.zero_()
            optimizer.step()

        return oomkit.auto_batch(step, model=model, optimizer=optimizer), model

    (large, _), (light, two) = make(8), make(2)
    x, y = batch()
    torch.manual_seed(1)
    for _ in range(3):
        with room(100):
            large(x, y)
            light(x, y)
    assert large.records[-1].accumulation_steps >= 2
    assert light.records[-1].accumulation_steps == 1
    assert sum(record.ooms for record in light.records) == 0
    alone, third = make(2)
    for _ in range(3):
        alone(x, y)
    assert same_bits(state_of(two), state_of(third)) == []
