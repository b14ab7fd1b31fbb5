"""What cannot be split exactly is refused, rolled back, and the line is named."""

from __future__ import annotations

import warnings
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn
from zoo import MLP, SEED

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


def _world() -> tuple[MLP, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(SEED)
    model = MLP()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(8, 6),
        torch.randint(0, 3, (8,)),
    )


def _untouched(model: MLP, before: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a, b) and a.grad is None
        for a, b in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.refusals
def test_step_every_second_call() -> None:
    model, optimizer, x, y = _world()
    before = [p.detach().clone() for p in model.parameters()]
    counter = [0]

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        counter[0] += 1
        if counter[0] % 2 == 1:
            optimizer.step()

    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="run different code") as caught:
            step(x, y)
    assert __file__ in str(caught.value)
    assert "oomkit.current()" in str(caught.value)
    assert _untouched(model, before)
    assert "step" not in vars(optimizer)


def test_skip_on_nan() -> None:
    model, optimizer, x, y = _world()
    before = [p.detach().clone() for p in model.parameters()]
    x[6] = float("nan")

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()

    with pytest.raises(oomkit.SplitError, match="run different code"):
        step(x, y)
    assert _untouched(model, before)


def test_current_lets_the_function_decide() -> None:
    model, optimizer, x, y = _world()
    seen: list[Any] = []

    @oomkit.auto_batch(accumulation_steps=4)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        here = oomkit.current()
        seen.append((here.index, here.count, here.is_last, here.weight))
        if here.is_last:
            optimizer.step()

    step(x, y)
    assert seen == [
        (0, 4, False, 0.25),
        (1, 4, False, 0.25),
        (2, 4, False, 0.25),
        (3, 4, True, 0.25),
    ]
    assert tuple(oomkit.current()) == (0, 1, True, 1.0)


def test_batch_changed_in_place_is_not_replayed() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.div_(255)
        F.cross_entropy(model(x), y).backward()

    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="changed x in place") as caught:
            step(x, y)
    assert "restore_batch=True" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


def test_restore_batch_replays_the_original_rows() -> None:
    model, optimizer, x, y = _world()
    seen: Seen[torch.Tensor] = Seen()
    original = x.clone()

    @oomkit.auto_batch(restore_batch=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.div_(255)
        seen.append(x.clone())
        F.cross_entropy(model(x), y).backward()

    with inject_oom(nth=1, phase="backward"):
        step(x, y)
    assert torch.equal(torch.cat(list(seen[1:])), original / 255)


def test_popped_entries_come_back_for_the_replay() -> None:
    model, optimizer, x, y = _world()
    seen: Seen[list[str]] = Seen()

    @oomkit.auto_batch
    def step(batch: dict[str, torch.Tensor]) -> None:
        seen.append(sorted(batch))
        labels = batch.pop("y")
        F.cross_entropy(model(batch["x"]), labels).backward()

    with inject_oom(nth=1, phase="backward") as armed:
        step({"x": x, "y": y})
    assert armed.fired == 1
    assert seen == [["x", "y"]] * 3


def test_parameter_changed_by_hand_in_a_micro_batch() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model.layers[0].bias.add_(1.0)

    with pytest.raises(oomkit.SplitError, match="layers.0.bias"):
        step(x, y)


def test_one_number_of_a_large_parameter_changed_by_hand() -> None:
    """Its version tells: of the values only 64 are compared."""
    table, (_, _, x, y) = torch.nn.Parameter(torch.zeros(6400, 3)), _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(x[:, :3] + table[: len(x)], y).backward()
        with torch.no_grad():
            table[10, 1] = 1.0

    with pytest.raises(oomkit.SplitError, match="was changed in micro-batch 1 of 2"):
        step(x, y)


def test_the_same_number_of_calls_in_another_order() -> None:
    model, optimizer, x, y = _world()
    other = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    turns: list[int] = []

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        turns.append(len(x))
        for one in (optimizer, other) if len(turns) == 1 else (other, optimizer):
            one.step()

    with pytest.raises(oomkit.SplitError, match="run different code"):
        step(x, y)
    assert _untouched(model, before)


def test_gradient_set_by_hand_in_a_micro_batch() -> None:
    model, optimizer, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    with pytest.raises(oomkit.SplitError, match="was set in micro-batch .* by hand"):
        step(x, y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "hidden"])
@pytest.mark.refusals
def test_manual_update_is_not_applied_twice(shown: bool) -> None:
    """SGD by hand, OOM half-way through the parameters. Where the code shows it all goes back;
    a micro-batch then finds no gradient, which is withheld. Else the error says what stays."""
    model, _, x, y = _world()
    subtract = getattr(torch.Tensor, "sub" + "_")

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    @oomkit.auto_batch
    def hidden(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                subtract(p, 0.1 * p.grad)

    run = step if shown else hidden
    with inject_oom(nth=2**60, phase="forward") as armed:
        run(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with inject_oom(nth=armed.seen, phase="forward"):
        if shown:
            with pytest.raises(TypeError) as caught:
                run(x, y)
            assert "gradients are set aside" in str(caught.value.__notes__)
            assert all(map(torch.equal, before, model.parameters()))
        else:
            with pytest.raises(oomkit.PartialUpdate, match="outside an optimizer"):
                run(x, y)


def test_closures_are_refused_when_split() -> None:
    model, _, x, y = _world()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    step(x, y)
    with inject_oom(nth=1):
        with pytest.raises(oomkit.OutOfMemory, match="closure"):
            step(x, y)


def test_other_errors_pass_untouched() -> None:
    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine$") as caught:
        step(torch.zeros(4))
    assert caught.traceback[-1].name == "step"
    assert not getattr(caught.value, "__notes__", [])


def test_error_of_a_small_micro_batch_gets_a_note_and_rolls_back() -> None:
    model, _, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=4)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        if oomkit.current().index == 2:
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as caught:
        step(x, y)
    assert "micro-batch 3 of 4 (2 rows)" in caught.value.__notes__[0]
    assert all(p.grad is None for p in model.parameters())


def test_keyboard_interrupt_in_a_split_call_rolls_back() -> None:
    model, _, x, y = _world()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(x, y)
    assert all(p.grad is None for p in model.parameters())


def _hidden() -> tuple[Any, MLP, torch.optim.Optimizer]:
    """A model and an optimizer where no search looks."""
    model, optimizer, *_ = _world()
    registry = {"a": {"b": {"c": MappingProxyType({"model": model, "optimizer": optimizer})}}}
    return registry, model, optimizer


def test_an_optimizer_that_was_not_found_is_refused_while_split() -> None:
    registry, model, _ = _hidden()
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    before = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch(model=model)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        registry["a"]["b"]["c"]["optimizer"].step()

    with inject_oom(nth=1):
        with pytest.raises(oomkit.SplitError, match="steps an optimizer .* not found"):
            step(x, y)
    assert _untouched(model, before)


def test_a_trainer_of_trainers_is_found() -> None:
    model, optimizer, x, y = _world()

    class Inner:
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer

    class Outer:
        def __init__(self) -> None:
            self.inner = Inner()

        @oomkit.auto_batch
        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.inner.optimizer.zero_grad()
            F.cross_entropy(self.inner.model(x), y).backward()
            self.inner.optimizer.step()

    outer = Outer()
    with inject_oom(nth=2, phase="backward") as armed:
        outer.step(x, y)
    assert armed.fired == 1
    assert Outer.step.records[0].accumulation_steps == 2


def _skips(what: str) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if len(x) < 6 and what == "all":
            return
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if len(x) >= 6 or what != "update":
            optimizer.step()

    return model, step


def test_a_step_that_skips_small_batches_is_refused_after_a_backward() -> None:
    model, step = _skips("all")
    before = [p.detach().clone() for p in model.parameters()]
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="not with any of its .*min_micro_batch="):
            step(torch.ones(8, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("what", ["all", "update"])
def test_a_step_that_skips_small_batches_is_said(what: str) -> None:
    x, (_, step) = torch.ones(8, 4), _skips(what)
    step(x)
    with inject_oom(nth=1, phase="forward"):
        with pytest.warns(oomkit.OomkitWarning, match="no micro-batch made the"):
            step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)  # said once
        _, step = _skips(what)
        with inject_oom(nth=1, phase="forward"):
            step(x)  # nothing is known of whole calls


def test_a_step_that_also_evaluates_skips_nothing() -> None:
    model = nn.Linear(4, 3)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    x = torch.ones(8, 4)
    step(x)
    with torch.no_grad(), inject_oom(nth=1, phase="forward"), warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
    assert step.records[-1].accumulation_steps == 2


def test_a_missing_gradient_is_explained() -> None:
    model = nn.Linear(4, 3)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()
        for p in model.parameters():
            p.grad.norm()  # type: ignore[union-attr]

    with pytest.raises(AttributeError) as caught:
        step(torch.ones(8, 4))
    assert any(".grad is None" in note for note in caught.value.__notes__)
