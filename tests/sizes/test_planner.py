"""The planner on real training under a real budget: sizes found, grown, carried over."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit import testing
from oomkit._code.module_buffers import is_compiling

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

MIB = 2**20


@pytest.fixture(autouse=True)
def no_budget_left() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    oomkit.limit_memory("1TiB", device="cpu")  # what the CPU has is counted from here on
    oomkit.limit_memory(None)
    yield
    oomkit.limit_memory(None)
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Tokens(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x))).flatten(0, 1)


def tokens(rows: int, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(64, (rows, length))
    return x, x.flatten().view(rows, length)


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 8),
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "tokens": (Tokens, tokens),
    "wide": (wide, lambda rows: (torch.randn(rows, 64), torch.randint(8, (rows,)))),
    "convolutions": (
        convolutions,
        lambda rows: (torch.randn(rows, 3, 16, 16), torch.randint(8, (rows,))),
    ),
}


def training(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    @oomkit.auto_batch(reduction="mean", **options)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def peak_of(model: nn.Module, batch: Any, **options: Any) -> int:
    """The highest allocation of one step, momentum being there already."""
    gc.collect()
    step = training(copy.deepcopy(model), **options)
    step(*batch)
    step(*batch)
    peak = step.records[-1].peak_allocated
    assert peak is not None
    return int(peak)


def smallest_k(model: nn.Module, batch: Any, budget: int) -> int:
    """By trying: the fewest equal micro-batches that train without an OOM."""
    rows = len(batch[0])
    for k in range(1, rows + 1):
        gc.collect()
        step = training(copy.deepcopy(model))
        step(*(part[:1] for part in batch))
        oomkit.limit_memory(budget)
        try:
            with testing.force_slices([rows // k + (i < rows % k) for i in range(k)]):
                step(*batch)
                step(*batch)
        except oomkit.OutOfMemory:
            continue
        finally:
            oomkit.limit_memory(None)
        if all(record.ooms == 0 for record in step.records):
            return k
    raise AssertionError("not even one row fits")


def run(model: nn.Module, batch: Any, budget: int, calls: int = 6) -> Any:
    gc.collect()
    step = training(model)
    step(*(part[:1] for part in batch))  # momentum
    oomkit.limit_memory(budget)
    for _ in range(calls):
        step(*batch)
    return step


@pytest.mark.parametrize("share", [0.6, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_size_is_found(kind: str, share: float) -> None:
    torch.manual_seed(0)
    make, data = KINDS[kind]
    rows = 600 if kind == "wide" else 36
    model, batch = make(), data(rows)
    whole, one = peak_of(model, batch), peak_of(model, batch, accumulation_steps=rows)
    budget = int(one + share * (whole - one))
    best = smallest_k(model, batch, budget)
    step = run(model, batch, budget)
    records = step.records[1:]
    assert best > 1
    assert records[-1].accumulation_steps <= best  # a larger first slice may save one
    assert sum(record.ooms for record in records) <= 5
    assert [record.ooms for record in records[3:]] == [0, 0, 0]


def test_further_ooms_before_any_success_quadruple() -> None:
    model, batch = Tokens(), tokens(64)
    step = training(model)
    with testing.inject_oom(nth=3, times=3, phase="forward"):
        step(*batch)
    sizes = [64, 32, 8, 2]
    assert step.records[-1].accumulation_steps == 32
    assert step.records[-1].micro_batch_size == sizes[-1]


def test_it_grows_with_the_budget_and_shrinks_without_an_oom() -> None:
    torch.manual_seed(0)
    model, batch = Tokens(), tokens(48)
    whole, one = peak_of(model, batch), peak_of(model, batch, accumulation_steps=48)
    small, large = int(one + 0.2 * (whole - one)), int(one + 0.7 * (whole - one))
    step = run(model, batch, small)
    few = step.records[-1].micro_batch_size
    oomkit.limit_memory(large)
    for _ in range(3):
        step(*batch)
    many = step.records[-1].micro_batch_size
    assert many > few
    grown = [record.reason for record in step.records if record.micro_batch_size == many]
    assert grown[0] == "grown"
    oomkit.limit_memory(small)
    step(*batch)
    assert step.records[-1].ooms == 0
    assert step.records[-1].micro_batch_size <= few + 1
    oomkit.limit_memory(large)
    step(*batch)
    assert step.records[-1].ooms == 0 and step.records[-1].micro_batch_size == many


def test_a_change_of_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Tokens(), tokens(48)
    whole, one = peak_of(model, batch), peak_of(model, batch, accumulation_steps=48)
    step = run(model, batch, int(one + 0.2 * (whole - one)))
    number, before = len(step.records), step.records[-1]
    oomkit.limit_memory(None)
    oomkit.limit_memory(2 * whole)
    with caplog.at_level(logging.INFO, logger="oomkit"):
        step(*batch)
    after = step.records[-1]
    assert (after.accumulation_steps, after.reason) == (1, "grown") or after.ooms == 0
    assert after.accumulation_steps < before.accumulation_steps and number == len(step.records) - 1


def test_a_new_length_begins_with_what_is_known_of_another() -> None:
    torch.manual_seed(0)
    model = Tokens()
    whole = peak_of(model, tokens(32, 64))
    one = peak_of(model, tokens(32, 64), accumulation_steps=32)
    step = run(model, tokens(32, 64), int(one + 0.3 * (whole - one)))
    for length in (48, 40, 32, 56, 24):
        step(*tokens(32, length))
        assert step.records[-1].ooms == 0, length
        assert step.records[-1].reason in {"predicted", "remembered", "whole"}
    small = step.records[-1].accumulation_steps
    step(*tokens(32, 64))
    assert step.records[-1].ooms == 0
    assert step.records[-1].accumulation_steps >= small


def test_training_and_evaluation_are_told_apart() -> None:
    torch.manual_seed(0)
    model, batch = Tokens(), tokens(48)

    @oomkit.auto_batch(reduction="mean")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y.flatten())
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    step(*batch)
    peak = step.records[-1].peak_allocated
    model.zero_grad()
    with torch.no_grad():
        step(*batch)
    assert step.records[-1].peak_allocated < peak
    oomkit.limit_memory(int(peak * 0.8))
    step(*batch)
    assert step.records[-1].ooms > 0
    with torch.no_grad():
        step(*batch)
    assert step.records[-1].accumulation_steps == 1 and step.records[-1].ooms == 0


@pytest.fixture
def compiler() -> Iterator[None]:
    """No later test is to run in a process in which something is compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert not is_compiling()


def test_few_sizes_so_that_compiled_models_compile_seldom(compiler: None) -> None:
    torch.manual_seed(0)
    sizes: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes.append(1)
        return graph.forward

    model = wide()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    batch = (torch.randn(1500, 64), torch.randint(8, (1500,)))
    whole, one = peak_of(model, batch), peak_of(model, batch, accumulation_steps=100)
    step = training(compiled)
    step(*(part[:1] for part in batch))
    oomkit.limit_memory(int(one + 0.3 * (whole - one)))
    for _ in range(4):
        step(*batch)
    known = len(sizes)
    for _ in range(6):
        step(*batch)
    assert step.records[-1].accumulation_steps > 1
    assert len(sizes) == known  # nothing new once the size is found
    used = {record.micro_batch_size for record in step.records}
    assert known <= 2 * (len(used) + sum(record.ooms for record in step.records))


@pytest.mark.parametrize("slices", [[20, 7, 7], [13, 5, 5, 5, 6]])
def test_a_larger_first_slice_gives_the_same_gradient(slices: list[int]) -> None:
    torch.manual_seed(0)
    model = wide().double()
    x, y = torch.randn(34, 64, dtype=torch.float64), torch.randint(8, (34,))
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    @oomkit.auto_batch(reduction="mean")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    with testing.force_slices(slices):
        step(x, y)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=0, atol=1e-12)


def test_multiple_of_holds_for_every_plan() -> None:
    torch.manual_seed(0)
    model, batch = Tokens(), tokens(48)
    whole, one = peak_of(model, batch), peak_of(model, batch, accumulation_steps=48)
    step = training(model, multiple_of=4)
    step(*(part[:4] for part in batch))
    oomkit.limit_memory(int(one + 0.35 * (whole - one)))
    for _ in range(5):
        step(*batch)
    assert step.records[-1].accumulation_steps > 1
    assert all(record.micro_batch_size % 4 == 0 for record in step.records)


def test_a_gradient_that_is_there_twice_while_it_is_added_to_is_planned_for() -> None:
    """Gradients rival activations, and one parameter has most of them: a later micro-batch
    needs more than the first one's peak and all gradients."""
    torch.manual_seed(0)
    gc.collect()
    rows = 1024
    data = torch.randn(rows, 256), torch.randint(16, (rows,))
    with oomkit.limit_memory(2**40, device="cpu"):  # from now on tensors are counted
        layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(1024, 16))
        base = oomkit.memory("cpu").allocated
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        whole = oomkit.auto_batch(step, reduction="mean")
        whole(*data)
        optimizer.zero_grad()
    peak = whole.records[-1].peak_allocated
    assert base is not None
    assert peak is not None
    tight = oomkit.auto_batch(step, reduction="mean")
    with oomkit.limit_memory(int(base + 0.75 * (peak - base)), device="cpu"):
        for _ in range(3):
            tight(*data)
    assert [record.ooms for record in tight.records] == [2, 0, 0]
    assert tight.records[-1].accumulation_steps == 3


def test_asked_to_begin_with_single_rows_the_whole_batch_is_tried_before_giving_up() -> None:
    """A later row finds the gradients of all and makes one twice; the whole batch does not."""
    torch.manual_seed(0)
    gc.collect()
    data = torch.randn(8, 512), torch.randint(16, (8,))
    with oomkit.limit_memory(2**40, device="cpu"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 16)).double()
        base = oomkit.memory("cpu").allocated

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x.double()), y)
            loss.backward()
            return loss.detach()

        whole = oomkit.auto_batch(step, reduction="mean")
        loss = whole(*data)
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        extra = sum(gradient.nbytes for gradient in expected)  # ours, kept to compare with
    peak = whole.records[-1].peak_allocated
    assert base is not None
    assert peak is not None
    single = oomkit.auto_batch(step, reduction="mean", accumulation_steps=8)
    with oomkit.limit_memory(int(base + 1.1 * (peak - base)) + extra, device="cpu"):
        assert torch.equal(single(*data), loss)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
        single(*data)
    assert [(r.accumulation_steps, r.ooms) for r in single.records] == [(1, 1), (1, 0)]
    tight = oomkit.auto_batch(step, reduction="mean", accumulation_steps=8, ladder=())
    with (
        oomkit.limit_memory(int(base + 0.985 * (peak - base)) + extra, device="cpu"),
        pytest.raises(oomkit.OutOfMemory, match="a micro-batch of 1 of 8 rows, the smallest"),
    ):
        tight(*data)


def test_state_that_arrives_after_the_first_update_costs_no_wait() -> None:
    """In the second call momentum takes room, and a size that worked fails: in the third the
    largest that fits is there, not after a dozen healthy calls."""
    torch.manual_seed(0)
    gc.collect()
    data = torch.randn(600, 64), torch.randint(8, (600,))
    with oomkit.limit_memory(2**40, device="cpu"):
        base = oomkit.memory("cpu").allocated
    assert base is not None
    step = training(wide())
    with oomkit.limit_memory(base + 5_600_000, device="cpu"):
        for _ in range(40):
            step(*data)
    ks = [record.accumulation_steps for record in step.records]
    assert step.records[1].ooms > 0
    assert ks == [2, 4] + [3] * 38
