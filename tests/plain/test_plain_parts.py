"""Plain state of evaluations that keep finished parts, of verifications, of returned losses."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted

ROWS = 16


class Count:
    def __init__(self) -> None:
        self.n, self.sizes, self.rows = 0, [], torch.zeros(1)

    def add(self, x: torch.Tensor) -> None:
        self.n += len(x)
        self.sizes.append(len(x))
        self.rows += len(x)

    def all(self) -> tuple[int, int, float]:
        return self.n, sum(self.sizes), self.rows.item()


def _evaluation(count: Count, seen: Seen[int], **options: Any) -> Any:
    @oomkit.auto_batch(**options)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        count.add(x)
        return (x * 2 + 1).mul(3)

    return evaluate


def test_finished_parts_stay_with_what_they_counted() -> None:
    """At each allocation in turn, the one that puts the results together included."""
    x, kept = torch.randn(ROWS, 1), 0
    for nth in itertools.count(1):
        count, seen = Count(), Seen[int]()
        evaluate = _evaluation(count, seen, accumulation_steps=2)
        with torch.no_grad(), inject_oom(nth=nth) as armed:
            out = evaluate(x)
        if armed.fired == 0:
            break
        assert torch.equal(out, (x * 2 + 1) * 3)
        assert count.all() == (ROWS, ROWS, ROWS), (nth, seen)
        kept += seen.count(8) > 1
    assert kept > 0


@pytest.mark.parametrize("times", [None, 1])
def test_an_evaluation_that_gives_up_takes_kept_parts_back(times: int | None) -> None:
    x = torch.randn(ROWS, 1)
    for nth in itertools.count(1):
        count = Count()
        evaluate = _evaluation(count, Seen(), accumulation_steps=2, min_micro_batch=8)
        with torch.no_grad(), inject_oom(nth=nth, times=times) as armed:
            try:
                evaluate(x)
            except oomkit.OutOfMemory:
                assert count.all() == (0, 0, 0), nth
            else:
                assert count.all() == (ROWS, ROWS, ROWS), nth
        if armed.fired == 0:
            break
    assert nth > 3


def test_an_error_in_a_later_part_takes_all_back() -> None:
    count = Count()

    @oomkit.auto_batch(accumulation_steps=4)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        count.add(x)
        if count.n > 8:
            raise ValueError("mine")
        return x + 1

    with torch.no_grad(), pytest.raises(ValueError, match="mine"):
        evaluate(torch.randn(ROWS, 1))
    assert count.all() == (0, 0, 0)


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_returned_loss_that_is_run_again_counts_once(rowwise: bool) -> None:
    """And what the caller does between the call and its backward() stays."""
    model, count = nn.Linear(4, 3), Count()

    @oomkit.auto_batch
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count.add(x)
        return F.cross_entropy(model(x), y, reduction="none" if rowwise else "mean")

    x, y = torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))
    loss = compute(x, y)
    count.n += 100
    with inject_oom(nth=1, phase="backward") as armed:
        loss.mean().backward()
    assert armed.fired == 1
    assert count.all() == (ROWS + 100, ROWS, ROWS)


def test_an_object_that_keeps_its_loss_is_freed_with_it() -> None:
    """The marks of a call that waits for its backward() hold nothing that leads to its loss."""

    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 3)
            self.n, self.losses, self.last = 0, [], {"loss": None}

        @oomkit.auto_batch
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            self.n += len(x)
            loss = self.model(x).sum()
            self.losses.append(loss)
            self.last["loss"] = loss
            return loss

    trainer = Trainer()
    for _ in range(2):
        trainer.compute(torch.randn(8, 4))
    gone = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert gone() is None


def test_nothing_is_held_after_a_call() -> None:
    class Box:
        pass

    box = Box()
    box.state = torch.zeros(3)  # type: ignore[attr-defined]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        box.state = box.state + len(x)  # type: ignore[attr-defined]
        return x * 2

    with torch.no_grad():
        step(torch.zeros(4, 1))
    refs = [weakref.ref(box), weakref.ref(box.state)]  # type: ignore[attr-defined]
    step.__wrapped__.__closure__[0].cell_contents = None
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
