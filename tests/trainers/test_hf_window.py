"""Gradients of earlier calls of an update are made again, without copies, and bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any

import pytest
import torch
import transformers as hf
from helpers.seen import Seen
from hf_models import bert, labelled, lm, tokens, trainer
from hf_runs import counts_of, in_the_same_slices, plain, run, sweep
from runs import Outcome, differences
from test_trl_sweep import dpo, online, reward, sft

import oomkit
from oomkit.transformers import protect, records

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

AGAIN = "the gradients of earlier calls of this update were made again"
FOUR = {"gradient_accumulation_steps": 4, "eval_strategy": "no", "num_train_epochs": 2}


class Fails(torch.autograd.Function):
    """Nothing, but that its backward may run out of memory."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wanted: Any) -> torch.Tensor:
        ctx.wanted = wanted
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.wanted():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return gradient, None


def failing(made: Any, number: int, wanted: Any) -> Any:
    """The trainer; backwards of one of its calls run out of memory between two parameters.

    Args:
        made: trains a GPT2.
        number: of the call.
        wanted: called with the rows of a micro-batch of it: whether its backward fails.
    """
    of_call: set[bytes] = set()
    calls, rows = itertools.count(1), [0]
    inner = made.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            of_call.update(row.numpy().tobytes() for row in inputs["input_ids"])
        try:
            return inner(model, inputs, *args, **kwargs)
        finally:
            of_call.clear()

    def look(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"]
        ours = all(row.numpy().tobytes() in of_call for row in ids)
        rows[0] = len(ids) if ours else 0

    def pass_on(_: Any, args: Any, output: torch.Tensor) -> Any:
        count = rows[0]
        return Fails.apply(output, lambda: count > 0 and wanted(count))

    made.model.register_forward_pre_hook(look, with_kwargs=True)
    made.model.transformer.drop.register_forward_hook(pass_on)
    made.training_step = training_step
    return made


def dropping(**more: Any) -> Any:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return trainer(lambda: lm(**rates), tokens(32), **{**FOUR, **more})


def _errors(number: int) -> Any:
    left = Seen([1] * number)  # a plain list would go back with each run of a proof
    return lambda rows: bool(left and left.pop())


WANTED = {
    "once": lambda: _errors(1),
    "twice": lambda: _errors(2),
    "down to one row": lambda: lambda rows: rows > 1,
}


@pytest.mark.parametrize("place", ["training_step", "compute_loss"])
@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("number", [2, 3, 4, 7])
def test_an_error_in_the_backward_of_a_later_call(name: str, number: int, place: str) -> None:
    def protected(made: Any, **options: Any) -> Any:
        return protect(made, at=place, **options)

    outcome, _, made = run(
        dropping, lambda made: failing(protected(made), number, WANTED[name]()), place
    )
    assert outcome.error is None
    counts = counts_of(made, place)
    assert len(counts) == 16 and counts[number - 1][1] == (4 if "row" in name else 2)
    assert all(count == 1 for _, count in counts[: number - 1])
    assert any(AGAIN in line for line in outcome.said), outcome.said
    assert not any("bit for bit" in line for line in outcome.said), outcome.said
    expected, _ = in_the_same_slices(
        lambda: failing(dropping(), 0, None), place, counts, True, protected
    )
    if place == "compute_loss":  # it was returned before the backward failed
        for line in (*expected.log, *outcome.log):
            line.pop("loss", line.pop("train_loss", None))
    assert not differences(expected, outcome, 0.0)


def test_auto_batch_alone_restores_them_up_to_rounding() -> None:
    """And says so, which `protect` need not: see the test before."""

    def alone(made: Any) -> Any:
        made.training_step = oomkit.auto_batch(made.training_step, batch="inputs")
        return made

    rounded = []
    for put in alone, protect:
        wanted = WANTED["once"]()
        outcome, _, _ = run(dropping, lambda it: failing(put(it), 4, wanted))  # noqa: B023
        assert outcome.error is None
        rounded.append(any("up to rounding, not bit for bit" in line for line in outcome.said))
    assert rounded == [True, False]


def once(
    make: Any, number: int, wanted: Any = None, **options: Any
) -> tuple[Outcome, Outcome, Any, Any]:
    """A run with an error in the backward of a call, one without in its slices, their trainers."""
    wanted = wanted or WANTED["once"]()

    def protected(made: Any, **more: Any) -> Any:
        return protect(made, **{**options, **more})

    outcome, _, made = run(make, lambda made: failing(protected(made), number, wanted))
    assert outcome.error is None, outcome.error
    counts = counts_of(made, "training_step")
    assert [count for _, count in counts[:number]] == [1] * (number - 1) + [2]
    expected, other = in_the_same_slices(
        lambda: failing(make(), 0, None), "training_step", counts, True, protected
    )
    return outcome, expected, made, other


def again(make: Any, number: int, wanted: Any = None, **options: Any) -> tuple[Any, Any]:
    """The same; the calls before it are made again, and all is as it would be without the error.

    Returns both trainers.
    """
    outcome, expected, made, other = once(make, number, wanted, **options)
    assert any(AGAIN in line for line in outcome.said), outcome.said
    assert not any("bit for bit" in line for line in outcome.said), outcome.said
    assert not differences(expected, outcome, 0.0)
    assert len(records(made)) == len(records(other))
    return made, other


class Moving(torch.nn.Module):
    """Keeps figures of what it has seen: some of them tell what it gives, some have no versions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16, affine=False)
        self.register_buffer("mean", torch.zeros(16))
        self.calls, self.seen = 0, []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result = value * (1 + self.mean)
        if self.training:
            with torch.no_grad():
                self.norm(value.flatten(0, 1))
                self.mean.lerp_(value.mean((0, 1)), 0.5)
            self.calls += 1
            self.seen.append(len(value))
        return result


def moving() -> Any:
    made = dropping()
    made.model.transformer.drop = Moving()
    return made


def test_buffers_that_training_moves_go_back_to_the_first_call() -> None:
    _, _, *makers = once(moving, 3, verify=False, gradient_safety="copy")
    makers += again(moving, 3, verify=False)
    copied, _, made, other = (each.model.transformer.drop for each in makers)
    assert made.calls == copied.calls and made.seen == copied.seen
    for one, two in zip(made.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


def test_a_reentrant_checkpoint() -> None:
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    again(lambda: dropping(gradient_checkpointing=True, **reentrant), 3)


def test_a_scaled_loss() -> None:
    def make() -> Any:
        made = dropping()
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return made

    again(make, 4)


class Twice(hf.Trainer):
    """Runs two backwards in a step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        first = super().training_step(model, inputs, num_items_in_batch)
        return first + super().training_step(model, inputs, num_items_in_batch)


def test_the_second_backward_of_a_step() -> None:
    def make() -> Any:
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
        return trainer(lambda: lm(**rates), tokens(32), Twice, **FOUR)

    number = itertools.count().__next__  # which no roll-back finds
    again(make, 3, lambda rows: number() == 1, at="training_step")


# Where it is not certain that the same gradients would be made, the core does what it does.


class Between(hf.TrainerCallback):
    """Does something between two calls of an update."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.what(given["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.what is zeros:
            zeros(given["model"])


def scaled(model: torch.nn.Module) -> None:
    for each in model.parameters():
        each.grad.mul_(0.5)


def others(model: torch.nn.Module) -> None:
    for each in model.parameters():
        each.grad = each.grad * 0.5


def moved(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.99)


def zeros(model: torch.nn.Module) -> None:
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad


def unseen(model: torch.nn.Module) -> None:
    """No version tells."""
    for each in model.parameters():
        each.grad.data.mul_(0.5)


def _compare_kept(make: Any) -> None:
    """No earlier call is made again, and nothing is lost."""
    reference, _, _ = run(make, plain)
    wanted = WANTED["once"]()
    outcome, _, _ = run(make, lambda made: failing(protect(made), 7, wanted))
    assert outcome.error is None
    assert not any(AGAIN in line for line in outcome.said), outcome.said
    assert not differences(reference, outcome, 1e-4)


@pytest.mark.parametrize("what", [scaled, others, moved, zeros, unseen])
def test_what_others_do_between_the_calls_is_not_lost(what: Any) -> None:
    def make() -> Any:
        return trainer(lm, tokens(32), callbacks=[Between(what)], **FOUR)

    _compare_kept(make)


def by_an_attribute(made: Any) -> None:
    callback: Any = hf.TrainerCallback()
    callback.on_substep_end = lambda *_, **given: unseen(given["model"])
    made.add_callback(callback)


def by_an_accelerator(made: Any) -> None:
    @contextlib.contextmanager
    def no_sync(model: torch.nn.Module) -> Any:
        yield
        scaled(model)

    made.accelerator.no_sync = no_sync


@pytest.mark.parametrize("how", [by_an_attribute, by_an_accelerator])
def test_what_is_done_in_another_place_is_not_lost(how: Any) -> None:
    def make() -> Any:
        made = trainer(lm, tokens(32), **FOUR)
        how(made)
        return made

    _compare_kept(make)


class Reversed(torch.nn.Module):
    """Gradients of the layers below, times a factor of which the loss shows nothing; it grows with
    each batch of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = -(1 + min(self.rows // 4, 5)) / 10  # a failed attempt counts, too
        self.rows += len(x)
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient * factor)
        return x


def test_a_count_of_rows_goes_back_to_the_first_call() -> None:
    def make() -> Any:
        made = trainer(lm, tokens(32), **FOUR)
        inside = made.model.transformer
        inside.drop = torch.nn.Sequential(inside.drop, Reversed())
        return made

    reference, _, _ = run(make, plain)
    wanted = WANTED["once"]()
    outcome, _, _ = run(make, lambda made: failing(protect(made, verify=False), 7, wanted))
    assert outcome.error is None
    assert any(AGAIN in line for line in outcome.said), outcome.said
    assert not differences(reference, outcome, 1e-4)


class Part:
    """A participant, which could not be put back to an earlier call."""

    def __init__(self) -> None:
        self.saved = 0

    def state_dict(self) -> dict[str, int]:
        self.saved += 1
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


@pytest.mark.parametrize(
    "options", [{"participants": Part()}, {"gradient_safety": "copy"}, {"rng": "none"}]
)
def test_options_with_which_calls_are_not_made_again(options: dict[str, Any]) -> None:
    def make() -> Any:
        return trainer(lm, tokens(32), **FOUR)

    reference, _, _ = run(make, plain)
    wanted = WANTED["once"]()
    outcome, _, _ = run(make, lambda made: failing(protect(made, **options), 7, wanted))
    assert outcome.error is None
    assert not any(AGAIN in line for line in outcome.said), outcome.said
    assert not differences(reference, outcome, 1e-4)


def test_a_call_that_is_another_one_the_second_time_is_an_error() -> None:
    made, count = dropping(), itertools.count(1)

    def other(_: Any, args: Any, outputs: Any) -> None:
        outputs["loss"] = outputs["loss"] * (1 + next(count))

    made.model.register_forward_hook(other)
    failing(protect(made, verify=False), 3, WANTED["once"]())
    with pytest.raises(oomkit.OutOfMemory, match="another loss than before") as caught:
        made.train()
    assert "are cleared" in str(caught.value)
    assert all(each.grad is None for each in made.model.parameters())


def test_an_interrupt_where_calls_are_made_again_passes() -> None:
    made, calls = dropping(), itertools.count(1)

    def look(*_: Any) -> None:
        if next(calls) == 5:  # three calls, and the second of those that are made again
            raise KeyboardInterrupt

    failing(protect(made), 3, WANTED["once"]())
    made.model.register_forward_pre_hook(look)
    stream = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt) as caught:
        made.train()
    assert any("are cleared" in note for note in caught.value.__notes__)
    assert all(each.grad is None for each in made.model.parameters())
    assert not torch.equal(stream, torch.get_rng_state())
    assert made.training_step is not None


def test_nothing_of_an_update_is_kept(no_gc: None) -> None:
    made = protect(dropping())
    inner, seen = made.training_step, []

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(weakref.ref(inputs["input_ids"]))
        return inner(model, inputs, *args, **kwargs)

    made.training_step = training_step
    made.train()
    assert len(seen) == 16 and not any(each() is not None for each in seen)


def test_an_update_that_is_left_keeps_nothing(no_gc: None) -> None:
    class Stop(hf.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = True
            return control

    made = protect(trainer(lm, tokens(32), callbacks=[Stop()], **FOUR))
    inner, seen = made.training_step, []

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(weakref.ref(inputs["input_ids"]))
        return inner(model, inputs, *args, **kwargs)

    made.training_step = training_step
    made.train()
    assert len(seen) == 1 and seen[0]() is None


def test_no_gradient_is_copied() -> None:
    """Of a call whose shape has been proven, the most that is there beside it is what it needs."""
    made = protect(dropping())
    wanted = WANTED["once"]()
    failing(made, 7, wanted)
    inner, grads, held = made.training_step, [], []

    def training_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        grads.append(
            [weakref.ref(each.grad) for each in model.parameters() if each.grad is not None]
        )
        result = inner(model, *args, **kwargs)
        held.append(sum(each() is not None for each in grads[-1]))
        return result

    made.training_step = training_step
    made.train()
    assert held[5] == len(grads[5]) > 0  # in place
    assert held[6] == 0 and len(grads[6]) > 0  # others


TRL = {
    "sft": lambda: sft(gradient_accumulation_steps=4),
    "dpo": lambda: dpo(gradient_accumulation_steps=4),
    "reward": lambda: reward(gradient_accumulation_steps=4),
    "grpo": lambda: online(gradient_accumulation_steps=4),
    "rloo": lambda: online("RLOO", gradient_accumulation_steps=4),
}


@pytest.mark.parametrize("name", TRL)
def test_backwards_of_trl(name: str) -> None:
    seen = sweep(TRL[name], "training_step", 3, phase="backward")
    assert seen["again"], seen


def test_backwards_of_classes_with_dropout() -> None:
    def make() -> Any:
        return trainer(lambda: bert("SequenceClassification", 0.2), labelled("class"), **FOUR)

    seen = sweep(make, "training_step", 3, exact=False, times=(1, 2), phase="backward")
    assert seen["again"] and seen["smaller"], seen


def test_an_error_of_the_users_own_leaves_the_gradients_as_they_were() -> None:
    made, calls = dropping(), itertools.count(1)
    protect(made, accumulation_steps=2)
    inner, begun = made.training_step, []

    def training_step(*args: Any, **kwargs: Any) -> Any:
        begun.append([None if p.grad is None else p.grad.clone() for p in made.model.parameters()])
        return inner(*args, **kwargs)

    def look(*_: Any) -> None:
        is_second = (current := oomkit.current()) is not None and current.index == 1
        if len(begun) == 3 and is_second and next(calls) == 1:
            raise ValueError("mine")

    made.training_step = training_step
    made.model.register_forward_pre_hook(look)
    with pytest.raises(ValueError, match="mine"):
        made.train()
    for before, each in zip(begun[-1], made.model.parameters(), strict=True):
        assert before is not None and torch.equal(before, each.grad)
