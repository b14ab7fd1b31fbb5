"""auto_batch as a callable: binding, introspection, options, and the text of every refusal."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit.testing import inject_oom


@oomkit.auto_batch
def module_level_step(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Scale a batch."""
    return x * scale


def test_looks_like_the_function() -> None:
    assert module_level_step.__name__ == "module_level_step"
    assert module_level_step.__doc__ == "Scale a batch."
    assert module_level_step.__module__ == __name__
    assert str(inspect.signature(module_level_step)) == (
        "(x: 'torch.Tensor', scale: 'float' = 2.0) -> 'torch.Tensor'"
    )
    assert module_level_step.__wrapped__(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert weakref.ref(module_level_step)() is module_level_step
    assert pickle.loads(pickle.dumps(module_level_step)) is module_level_step
    assert copy.deepcopy(module_level_step) is module_level_step
    assert module_level_step.label == "module_level_step"
    assert "module_level_step" in repr(module_level_step)


def test_keywords_and_defaults_pass() -> None:
    assert module_level_step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert module_level_step(x=torch.ones(2), scale=5.0).tolist() == [5.0, 5.0]
    with pytest.raises(TypeError, match="scal"):
        module_level_step(torch.ones(2), scal=1.0)


def test_attributes_can_be_set() -> None:
    step = oomkit.auto_batch(lambda x: x)
    step.note = "mine"
    assert step.note == "mine"


def test_binds_as_a_method() -> None:
    class Thing:
        factor = 3.0

        @oomkit.auto_batch
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

        @oomkit.auto_batch(label="named")
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return x

    thing = Thing()
    assert thing.step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert Thing.step(thing, torch.ones(2)).tolist() == [3.0, 3.0]
    assert thing.step.__self__ is thing
    assert Thing.other.label == "named"
    assert isinstance(copy.deepcopy(thing), Thing)


def test_a_module_and_a_bound_method_can_be_wrapped() -> None:
    model = nn.Linear(3, 2)
    forward = oomkit.auto_batch(model)
    bound = oomkit.auto_batch(model.forward)
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(forward(x), model(x))
        assert torch.equal(bound(x), model(x))


@pytest.mark.parametrize("with_parentheses", [False, True])
def test_with_and_without_parentheses(with_parentheses: bool) -> None:
    decorator = oomkit.auto_batch() if with_parentheses else oomkit.auto_batch

    @decorator
    def step(x: torch.Tensor) -> torch.Tensor:
        return x

    assert step(torch.ones(1)).item() == 1.0


def test_types_cannot_be_made_by_hand() -> None:
    kind = type(module_level_step)
    with pytest.raises(TypeError):
        kind()
    with pytest.raises(TypeError):
        kind.__new__(kind)


async def _async_step(x: torch.Tensor) -> torch.Tensor:
    return x


def _generator_step(x: torch.Tensor) -> Any:
    yield x


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "not callable": (
        lambda: oomkit.auto_batch(3),
        TypeError,
        "auto_batch() expected a callable, got int",
    ),
    "two positional": (
        lambda: oomkit.auto_batch(print, 3),
        TypeError,
        "auto_batch() takes one positional argument, the function; got 2",
    ),
    "unknown option": (
        lambda: oomkit.auto_batch(bach="x"),
        TypeError,
        "auto_batch() got an unknown option 'bach'; did you mean 'batch'?",
    ),
    "async": (
        lambda: oomkit.auto_batch(_async_step),
        TypeError,
        f"auto_batch() cannot protect the async function {_async_step!r}: decorate the "
        "synchronous step that it awaits",
    ),
    "generator": (
        lambda: oomkit.auto_batch(_generator_step),
        TypeError,
        f"auto_batch() cannot protect the generator function {_generator_step!r}: decorate "
        "the step that its loop runs",
    ),
    "accumulation of 0": (
        lambda: oomkit.auto_batch(accumulation_steps=0),
        ValueError,
        "auto_batch(accumulation_steps=...) expected at least 1, got 0",
    ),
    "accumulation of a float": (
        lambda: oomkit.auto_batch(accumulation_steps=2.0),
        TypeError,
        "auto_batch(accumulation_steps=...) expected an int, got float",
    ),
    "multiple_of True": (
        lambda: oomkit.auto_batch(multiple_of=True),
        TypeError,
        "auto_batch(multiple_of=...) expected an int, got bool",
    ),
    "reduction": (
        lambda: oomkit.auto_batch(reduction="median"),
        ValueError,
        "auto_batch(reduction=...) expected one of mean, sum, got 'median'",
    ),
    "rng": (
        lambda: oomkit.auto_batch(rng="numpy"),
        ValueError,
        "auto_batch(rng=...) expected one of none, torch, all, got 'numpy'",
    ),
    "weight": (
        lambda: oomkit.auto_batch(weight=3),
        TypeError,
        "auto_batch(weight=...) expected a callable, got int",
    ),
    "batch": (
        lambda: oomkit.auto_batch(batch=3),
        TypeError,
        "auto_batch(batch=...) expected an argument name or several, got 3",
    ),
    "dim": (
        lambda: oomkit.auto_batch(dim=-1),
        ValueError,
        "auto_batch(dim=...) expected 0 or more, got -1",
    ),
    "restore_batch": (
        lambda: oomkit.auto_batch(restore_batch=1),
        TypeError,
        "auto_batch(restore_batch=...) expected True or False, got int",
    ),
    "participants": (
        lambda: oomkit.auto_batch(participants=[object()]),
        TypeError,
        "auto_batch(participants=...) expected objects with state_dict() and "
        "load_state_dict(), or save() and restore(), got object",
    ),
    "remember": (
        lambda: oomkit.auto_batch(remember=1),
        TypeError,
        "auto_batch(remember=...) expected True, False or None, got int",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_at_the_decoration(case: str) -> None:
    act, kind, text = REFUSED[case]
    with pytest.raises(kind) as caught:
        act()
    assert message_of(caught.value) == text


def _split_error(step: Any, *args: Any) -> str:
    with pytest.raises(oomkit.SplitError) as caught:
        step(*args)
    return message_of(caught.value)


def test_batch_smaller_than_min_micro_batch() -> None:
    step = oomkit.auto_batch(lambda x: x.sum(), accumulation_steps=2, min_micro_batch=8)
    assert _split_error(step, torch.zeros(4)) == (
        "auto_batch cannot split a batch of 4 rows: min_micro_batch is 8"
    )


def test_batch_smaller_than_min_micro_batch_after_an_oom() -> None:
    step = oomkit.auto_batch(lambda x: x + 1, min_micro_batch=8, label="eval", ladder=())
    x = torch.zeros(4)
    with inject_oom(nth=1):
        with pytest.raises(oomkit.OutOfMemory) as caught:
            step(x)
    assert message_of(caught.value).splitlines()[0] == (
        "eval ran out of memory and its batch of 4 rows is smaller than min_micro_batch=8"
    )


def test_tensors_that_disagree() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()

    assert _split_error(
        oomkit.auto_batch(step, accumulation_steps=2),
        {"a": torch.zeros(8, 3), "b": torch.zeros(5)},
        torch.zeros(8),
    ) == (
        "auto_batch cannot split argument 'x': tensors disagree in dimension 0: x['a'] has "
        "shape [8, 3], x['b'] has shape [5]; name what is to be split with batch=... or "
        "pass it whole with static=..."
    )


def test_loss_that_is_not_a_scalar() -> None:
    model = nn.Linear(3, 2)
    step = oomkit.auto_batch(lambda x: model(x), backward=True)
    assert _split_error(step, torch.zeros(4, 3)) == (
        "auto_batch(backward=...) expected a scalar loss, got a tensor of shape "
        "torch.Size([4, 2]); return loss.mean() or loss.sum()"
    )


def test_loss_without_gradient() -> None:
    step = oomkit.auto_batch(lambda x: x.mean(), backward=True)
    assert _split_error(step, torch.zeros(4, 3)) == (
        "auto_batch(backward=...) expected a loss that requires grad, got one without: was "
        "it detached, or computed under no_grad()?"
    )


def test_no_loss_at_all() -> None:
    step = oomkit.auto_batch(lambda x: "text", backward=True)
    assert _split_error(step, torch.zeros(4, 3)) == (
        "auto_batch(backward=...) expected the step to return a loss (a tensor, a tuple with "
        "one, a mapping with 'loss'), got str"
    )


@pytest.mark.refusals
def test_no_batch_is_fine_until_an_oom_comes() -> None:
    model = nn.Linear(3, 2)
    step = oomkit.auto_batch(lambda: model(torch.ones(4, 3)), label="closed")
    with torch.no_grad():
        assert step().shape == (4, 2)
        with inject_oom(nth=1):
            with pytest.raises(oomkit.OutOfMemory) as caught:
                step()
    assert message_of(caught.value).splitlines()[0] == (
        "auto_batch found no batch to split in the arguments of closed: pass it as an "
        "argument of the step (a tensor, or a tuple, list or dict of tensors)"
    )


def test_weight_must_be_a_number() -> None:
    step = oomkit.auto_batch(lambda x: x, accumulation_steps=2, weight=lambda batch: -1.0)
    assert _split_error(step, torch.zeros(4)) == (
        "auto_batch(weight=...) must return a number >= 0 for each micro-batch, got a "
        "negative number"
    )


def test_on_retry_gets_the_record_of_the_failure() -> None:
    seen: list[Any] = []
    step = oomkit.auto_batch(lambda x: x + 1, on_retry=seen.append, label="eval")
    x = torch.zeros(4)
    with inject_oom(nth=1):
        step(x)
    assert [(r.label, r.ooms, r.micro_batch_size, r.accumulation_steps) for r in seen] == [
        ("eval", 1, 2, 2)
    ]


def test_an_error_in_on_retry_passes_and_everything_is_rolled_back() -> None:
    model = nn.Linear(3, 2)

    def fail(record: Any) -> None:
        raise RuntimeError("hook")

    @oomkit.auto_batch(on_retry=fail)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x = torch.zeros(4, 3)
    with inject_oom(nth=2, phase="backward"):
        with pytest.raises(RuntimeError, match="hook"):
            step(x)
    assert all(p.grad is None for p in model.parameters())
    step(x)
    assert all(p.grad is not None for p in model.parameters())


def test_user_participants_are_rolled_back() -> None:
    class Meter:
        def __init__(self) -> None:
            self.total = 0

        def save(self) -> int:
            return self.total

        def restore(self, saved: int) -> None:
            self.total = saved

    meter = Meter()

    @oomkit.auto_batch(participants=[meter])
    def step(x: torch.Tensor) -> torch.Tensor:
        meter.total += len(x)
        return x + 1

    x = torch.zeros(8)
    with inject_oom(nth=1):
        step(x)
    assert meter.total == 8


def test_step_redefined_while_it_runs() -> None:
    def make() -> Any:
        nonlocal_step: list[Any] = []

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal_step.clear()
            return x + 1

        nonlocal_step.append(step)
        return nonlocal_step

    holder = make()
    assert holder[0](torch.zeros(2)).tolist() == [1.0, 1.0]
