"""From an error on a device to its replay: what is waited for, freed, taken back and refused."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen, world
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import oomkit
from device import (
    CUDA,
    EFAILED,
    EOOM,
    MIB,
    MPS,
    ROWS,
    XPU,
    Body,
    Device,
    accelerator_error,
    out_of_memory,
    run,
)
from oomkit import _C
from oomkit.testing import force_slices, inject_oom

# --- what is given back, and in which order ---


def test_one_flush_and_nothing_else_where_nothing_is_alive(cuda: Device) -> None:
    collected: Seen[int] = Seen()
    cuda.look_up("gc_collect", lambda: collected.append(1))
    body = Body(out_of_memory())
    step = run(body)
    assert body.sizes == [8, 4, 4]
    assert cuda.empty_calls == 1 and cuda.events == [] and not collected
    assert step.records[0].ooms == 1 and step.records[0].accumulation_steps == 2


def test_side_streams_are_waited_for_before_the_flush_and_nothing_is_collected(
    cuda: Device,
) -> None:
    """record_stream: bytes count until the side stream's kernels are done."""
    collected: Seen[int] = Seen()
    cuda.look_up("gc_collect", lambda: collected.append(1))
    sizes: Seen[Any] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            world.set(cuda, pending=MIB)
            raise out_of_memory()
        assert cuda.pending == 0
        return x * 2

    run(body)
    assert cuda.events == [("wait", 0)] and cuda.empty_calls == 1 and not collected


def test_what_the_flush_leaves_is_collected_and_flushed_again(cuda: Device) -> None:
    sizes: Seen[Any] = Seen()

    class Node:
        pass

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            node = Node()
            node.me, node.held = node, torch.empty(MIB, dtype=torch.uint8)
            raise out_of_memory()
        return x * 2

    gc.collect()
    gc.disable()
    try:
        before = oomkit.memory("cpu").allocated
        run(body)
        assert oomkit.memory("cpu").allocated <= before + 4096
    finally:
        gc.enable()
    assert cuda.events == [("wait", 0)] and cuda.empty_calls == 2


def test_workspaces_of_products_go_at_the_second_failure(cuda: Device) -> None:
    body = Body(out_of_memory(), out_of_memory())
    run(body)
    assert body.sizes[:3] == [8, 4, 1]
    assert cuda.events == [("workspaces", 1)] and cuda.empty_calls == 2


def test_workspaces_stay_while_a_captured_graph_is_alive(cuda: Device) -> None:
    class Graph:
        pass

    cuda.look_up("cuda_graph", Graph)
    graph = Graph()
    run(Body(out_of_memory(), out_of_memory()))
    assert cuda.events == []
    del graph
    run(Body(out_of_memory(), out_of_memory()))
    assert [event for event, _ in cuda.events] == ["workspaces"]


def test_a_graph_may_be_among_objects_that_are_frozen(cuda: Device) -> None:
    class Graph:
        pass

    cuda.look_up("cuda_graph", Graph)
    graph = Graph()
    gc.freeze()
    try:
        run(Body(out_of_memory(), out_of_memory()))
    finally:
        gc.unfreeze()
    assert cuda.events == []
    del graph


def test_a_flush_that_runs_out_of_memory_is_no_failure(cuda: Device) -> None:
    cuda.empty_status = EOOM
    run(Body(out_of_memory()))


def test_a_flush_that_fails_otherwise_is_said(cuda: Device) -> None:
    cuda.look_up("accelerator_empty_cache", None)  # torch has no words for it
    cuda.empty_status = EFAILED
    step = oomkit.auto_batch(Body(out_of_memory()))
    with torch.no_grad(), pytest.raises(RuntimeError, match="emptying the cache"):
        step(ROWS)


def test_a_guard_flushes_at_its_end_and_at_the_next_begin(cuda: Device) -> None:
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert cuda.empty_calls == 1
    with oomkit.guard():
        assert cuda.empty_calls == 2


def test_nothing_is_freed_into_a_captured_graph(cuda: Device) -> None:
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    cuda.capturing = True
    with oomkit.guard():
        run(Body())
    assert cuda.empty_calls == 1
    cuda.capturing = False
    run(Body())
    assert cuda.empty_calls == 2


def test_a_guard_inside_a_capture_puts_its_flush_off(cuda: Device) -> None:
    cuda.capturing = True
    with oomkit.guard(on_oom="skip"):
        raise out_of_memory()
    assert cuda.empty_calls == 0
    cuda.capturing = False
    run(Body())
    assert cuda.empty_calls == 1


def test_a_function_inside_a_capture_is_not_called_again(cuda: Device) -> None:
    sizes: Seen[int] = Seen()

    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        raise out_of_memory()

    cuda.capturing = True
    with pytest.raises(torch.OutOfMemoryError):
        oomkit.find_executable_batch_size(train, starting_batch_size=16)()
    assert sizes == [16] and cuda.empty_calls == 0


# --- memory in pieces, and an allocator that retries ---


def test_memory_that_stays_in_pieces_is_named_by_the_error(cuda: Device) -> None:
    """40 MiB are reserved and not allocated, and a request of 8 MiB finds no place in them."""
    request = out_of_memory("CUDA out of memory. Tried to allocate 8.00 MiB.")

    def body(x: torch.Tensor) -> torch.Tensor:
        world.set(cuda, cached=40 * MIB)
        raise request

    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory) as caught:
        oomkit.auto_batch(body)(ROWS)
    (advice, *_) = caught.value.report.advice
    assert "were free but in pieces, and 8.00 MiB were wanted in one" in advice
    assert "expandable_segments:True" in advice


def test_memory_in_pieces_is_flushed_and_the_same_plan_tried_again(cuda: Device) -> None:
    cuda.cached = 1 << 40
    body = Body(out_of_memory())
    step = run(body)
    assert body.sizes == [8, 8] and cuda.cached == 0
    assert step.records[0].ooms == 1 and step.records[0].accumulation_steps == 1


def test_memory_in_pieces_twice_is_a_size_that_does_not_fit(cuda: Device) -> None:
    cuda.cached = 1 << 40
    body = Body(out_of_memory(), out_of_memory())
    run(body)
    assert body.sizes == [8, 8, 4, 4]


def test_a_full_device_is_not_taken_for_one_in_pieces(cuda: Device) -> None:
    held = torch.empty(MIB, dtype=torch.uint8)
    cuda.cached = MIB // 16
    body = Body(out_of_memory())
    run(body)
    assert body.sizes == [8, 4, 4]
    del held


def test_an_allocator_that_retries_twice_in_a_row_counts_as_a_failure(cuda: Device) -> None:
    body = Body(out_of_memory())
    step = run(body)
    del body.sizes[:]
    body.failures.clear()
    cuda.retries_each = 1
    with torch.no_grad():
        for _ in range(2):
            step(ROWS)
        assert body.sizes[-2:] == [4, 4]
        cuda.retries_each = 0
        step(ROWS)
    assert max(body.sizes[-3:]) < 4, body.sizes


# --- errors that are none of memory, or after which nothing works ---


@pytest.mark.parametrize("code", [46, 700, 709, 710, 715, 716, 717, 718, 719])
def test_a_sticky_error_passes_untouched(cuda: Device, code: int) -> None:
    error = accelerator_error("CUDA error: out of memory, or whatever it says", code)
    body = Body(error)
    with torch.no_grad(), pytest.raises(torch.AcceleratorError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == [8] and cuda.empty_calls == 0


def test_an_error_of_the_runtime_is_cleared_before_the_retry(cuda: Device, last_error: Any) -> None:
    last_error.last_error = 2
    body = Body(accelerator_error("CUDA error: out of memory", 2))
    run(body)
    assert body.sizes == [8, 4, 4]
    assert last_error.last_error == 0 and last_error.asked == 3


def test_a_context_that_is_lost_ends_it(cuda: Device, last_error: Any) -> None:
    last_error.last_error, last_error.comes_back = 719, 1
    error = out_of_memory()
    body = Body(error)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        oomkit.auto_batch(body)(ROWS)
    assert caught.value is error and body.sizes == [8] and cuda.empty_calls == 0
    with pytest.raises(torch.OutOfMemoryError), oomkit.guard(on_oom="skip"):
        raise error


def test_a_context_that_is_lost_ends_searches_too(cuda: Device, last_error: Any) -> None:
    last_error.last_error, last_error.comes_back = 700, 1
    sizes: Seen[int] = Seen()

    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > 4:
            raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        oomkit.find_executable_batch_size(train, starting_batch_size=16)()
    assert sizes == [16] and cuda.empty_calls == 0
    with pytest.raises(torch.OutOfMemoryError):
        _C._trial(train, (16,), {}, (), None, False)


def test_the_runtime_is_not_asked_for_a_device_that_is_not_in_use(
    fake: Device, last_error: Any
) -> None:
    with torch.no_grad():
        oomkit.auto_batch(Body(out_of_memory()))(ROWS)  # the CPU
    fake.install().initialized = 0
    with torch.no_grad():
        oomkit.auto_batch(Body(out_of_memory()))(ROWS)
    assert last_error.asked == 0


# --- capture ---


def test_a_call_inside_a_capture_is_the_bare_one(cuda: Device) -> None:
    """Generators answer no question while a graph is captured."""
    cuda.capturing = True
    for generator in cuda.generators:
        generator.error = RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during capture")
    body = Body()
    run(body)
    assert body.sizes == [8]


class Operators(TorchDispatchMode):
    """Their names, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Seen[str] = Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_training_step_inside_a_capture_copies_nothing(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither gradients that are there, nor buffers; and asks no driver."""

    def refuse(index: int) -> None:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", refuse)

    def operators(decorated: bool) -> list[str]:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

        def body(x: torch.Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()

        step = oomkit.auto_batch(body, model=model, optimizer=optimizer) if decorated else body
        x = torch.zeros(8, 6)
        with Operators() as seen:
            step(x)
        return seen.names

    for generator in cuda.generators:
        generator.error = RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during capture")
    cuda.capturing = True
    assert operators(True) == operators(False)


def test_an_error_inside_a_capture_is_not_retried(cuda: Device) -> None:
    cuda.capturing = True
    body = Body(out_of_memory())
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="graph is being captured"):
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == [8] and cuda.empty_calls == 0


def test_another_error_inside_a_capture_passes(cuda: Device) -> None:
    cuda.capturing = True
    error = ValueError("not of memory")
    with torch.no_grad(), pytest.raises(ValueError, match="not of memory") as caught:
        oomkit.auto_batch(Body(error))(ROWS)
    assert caught.value is error


def test_a_lost_context_inside_a_capture_passes(cuda: Device, last_error: Any) -> None:
    cuda.capturing = True
    last_error.last_error = last_error.comes_back = 719
    error = out_of_memory()
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        oomkit.auto_batch(Body(error))(ROWS)
    assert caught.value is error


def test_a_backward_of_ours_inside_a_capture_is_run(cuda: Device) -> None:
    cuda.capturing = True
    weight = torch.ones(1, requires_grad=True)

    @oomkit.auto_batch(backward=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sum()

    step(ROWS)
    assert weight.grad is not None and weight.grad.item() == ROWS.sum()


def test_an_error_of_a_generator_that_is_not_capturing_passes(cuda: Device) -> None:
    cuda.generators[1].error = ValueError("not this one")
    with torch.no_grad(), pytest.raises(ValueError, match="not this one"):
        oomkit.auto_batch(Body())(ROWS)


# --- random streams of the devices ---


@pytest.mark.parametrize("type_", [CUDA, XPU])
def test_the_devices_streams_are_where_they_were(
    fake: Device, monkeypatch: pytest.MonkeyPatch, type_: int
) -> None:
    fake.install(type_)
    monkeypatch.setattr(torch.xpu, "default_generators", fake.generators)

    def train(fails: bool) -> list[tuple[int, int, int]]:
        fake.generators[0].manual_seed(1)
        fake.generators[1].manual_seed(2)
        drawn: Seen[Any] = Seen()

        def body(x: torch.Tensor) -> torch.Tensor:
            drawn.append((len(x), *(generator.draw() for generator in fake.generators)))
            if fails and len(drawn) == 1:
                raise out_of_memory()
            return x * 2

        step = oomkit.auto_batch(body)
        with torch.no_grad():
            if fails:
                step(ROWS)
            else:
                with force_slices([4, 4]):
                    step(ROWS)
        return drawn[-2:]

    assert train(True) == train(False)


def test_a_generator_without_an_offset_is_kept_by_its_state(
    fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of MPS: seed and state, no offset."""
    fake.install(MPS)
    generator = torch.Generator().manual_seed(3)

    class Mps:
        initial_seed = generator.initial_seed
        get_state = staticmethod(generator.get_state)
        set_state = staticmethod(generator.set_state)

        def get_offset(self) -> int:
            raise NotImplementedError("get_offset is not implemented for MPS")

    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", Mps)
    drawn: Seen[float] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        drawn.append(float(torch.rand(1, generator=generator)))
        if len(drawn) == 1:
            raise out_of_memory("MPS backend out of memory (MPS allocated: 1 GB)")
        return x * 2

    run(body)
    assert drawn[1] == drawn[0] != drawn[2]


# --- the whole way, with real errors ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.25))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).relu())


def _train(fault: int | None) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    fired = 0
    if fault is None:
        with force_slices([4, 4]):
            step(x, y)
    else:
        with inject_oom(nth=fault) as injected:
            step(x, y)
        fired = injected.fired
    return [*(p.detach() for p in model.parameters()), *model.buffers()], fired


def test_every_allocation_of_a_step_on_a_device(cuda: Device) -> None:
    """Copies, marks and roll-backs go the ways that they go for a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oomkit.OomkitWarning)
        expected, _ = _train(None)
        for fault in range(1, 200):
            try:
                got, fired = _train(fault)
            except (oomkit.PartialUpdate, oomkit.OutOfMemory):
                break  # in the update, which is another story
            if not fired:
                break
            same = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
            assert same, fault
    assert fault > 10
    assert cuda.reset_calls > 0 and _C.run_peak(CUDA, 0) is not None


# --- CUDA graphs of torch.compile(mode="reduce-overhead") ---


@pytest.fixture
def graphs() -> Iterator[Any]:
    """Torch's own place for their manager, which has none before a graph runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit, as Inductor is imported
        from torch._inductor.cudagraph_trees import get_container

    container = get_container(0)
    assert container.tree_manager is None
    yield container
    container.tree_manager = None


def test_nothing_is_split_where_they_have_run(cuda: Device, graphs: Any) -> None:
    """They write the gradients of a micro-batch where those of the one before are."""
    graphs.tree_manager = object()
    body = Body(out_of_memory())
    with torch.no_grad(), pytest.raises(oomkit.OutOfMemory, match="max-autotune-no-cudagraphs"):
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == [8]


def test_nor_where_they_begin_in_a_micro_batch(cuda: Device, graphs: Any) -> None:
    sizes: Seen[int] = Seen()

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(sizes) == 1:
            raise out_of_memory()
        world.set(graphs, tree_manager=object())
        return x

    with torch.no_grad(), pytest.raises(oomkit.SplitError, match="reduce-overhead"):
        oomkit.auto_batch(body, verify=False)(ROWS)
    assert sizes == [8, 4]


def test_a_whole_batch_needs_no_split(cuda: Device, graphs: Any) -> None:
    graphs.tree_manager = object()
    body = Body()
    with torch.no_grad():
        oomkit.auto_batch(body)(ROWS)
    assert body.sizes == [8]
