"""Losses returned to a caller: what cannot be run again is said, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen

import oomkit
from deferred.test_returned import B, Net, close, grads, loss_of, plain, same, world
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are


def _refused(model: Net, backward: Callable[[], None], match: str, nth: int = 4) -> None:
    before = grads(model)
    state = torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    with inject_oom(nth=nth, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match=match) as caught:
            backward()
    assert caught.value.__cause__ is None and not caught.value.committed
    assert same(grads(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_other_paths() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))

    def penalty() -> torch.Tensor:
        return sum((p**2).sum() for p in model.parameters()) * 0.1  # type: ignore[return-value]

    total = step(x, y) + penalty()
    _refused(model, total.backward, "return the whole loss from the step", nth=14)
    want, _, _ = world()
    (loss_of(want)(x, y) + sum((p**2).sum() for p in want.parameters()) * 0.1).backward()
    model.zero_grad()
    (step(x, y) + penalty()).backward()  # split now: exact, whatever else is added
    assert step.records[-1].accumulation_steps == 2
    assert close(grads(model), grads(want))


@pytest.mark.parametrize("flags", [{"retain_graph": True}, {"create_graph": True}])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_that_are_to_be_kept(flags: dict[str, bool]) -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    _refused(model, lambda: loss.backward(**flags), "retain_graph or create_graph")


def test_create_graph_through_a_split_loss() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model), accumulation_steps=2)(x, y)
    with pytest.raises(oomkit.SplitError, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert close(grads(model), plain())


def test_inputs_of_backward() -> None:
    model, x, y = world()
    weight = next(model.parameters())
    loss = oomkit.auto_batch(loss_of(model), accumulation_steps=2)(x, y)
    with pytest.raises(oomkit.SplitError, match="inputs="):
        loss.backward(inputs=[weight])
    model, x, y = world()
    weight = next(model.parameters())
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    with inject_oom(nth=4, phase="backward") as fault:
        loss.backward(inputs=[weight])
    assert fault.fired
    got = grads(model)
    want = plain()
    assert got[1:] == [None] * len(got[1:])
    assert close(got[:1], want[:1])


def test_autograd_grad_through_a_split_loss() -> None:
    model, x, y = world()
    params = [*model.parameters()]
    loss = oomkit.auto_batch(loss_of(model), accumulation_steps=2)(x, y)
    for allow_unused in (False, True):
        with pytest.raises(oomkit.SplitError, match=r"autograd\.grad\(\)"):
            torch.autograd.grad(loss * 2, params, allow_unused=allow_unused)
    other = model(x).sum()  # another graph is nobody's business
    assert len(torch.autograd.grad(other, params)) == len(params)


def test_autograd_grad_through_a_whole_loss() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    got = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    assert close([*got], plain())
    assert all(p.grad is None for p in model.parameters())
    with inject_oom(nth=4, phase="backward"):
        loss.backward()
    assert close(grads(model), plain())


def test_the_engine_itself() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model), accumulation_steps=2)(x, y)
    with pytest.raises(oomkit.SplitError, match="the engine itself"):
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), True, True
        )
    assert all(p.grad is None for p in model.parameters())


def test_train_and_eval_switched() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    model.eval()
    _refused(model, loss.backward, r"train\(\) and eval\(\)")


def test_parameters_changed() -> None:
    model, x, y = world()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> torch.Tensor:
        return model.body[4](x.new_ones(len(x), 12)).mean() + model.body[0](x).mean()

    loss = step(x)
    with torch.no_grad():
        model.body[0].weight.add_(1)
    _refused(model, loss.backward, "parameters were changed", nth=2)


def test_batch_changed() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(lambda x: model.body[0](x * 1).mean())(x)
    x.add_(1)
    before = grads(model)
    with inject_oom(nth=3, phase="backward"):
        with pytest.raises(oomkit.SplitError, match="changed"):
            loss.backward()
    assert same(grads(model), before)


def test_the_object_is_gone() -> None:
    model, x, y = world()

    class Once:
        @oomkit.auto_batch
        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

    loss = Once().step(x, y)
    _refused(model, loss.backward, "keep it until backward")


@pytest.mark.refusals
def test_no_batch() -> None:
    model, x, y = world()
    loss = oomkit.auto_batch(lambda: F.cross_entropy(model(x), y))()
    with inject_oom(nth=4, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="found no batch"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("present", [False, True])
def test_nothing_fits(present: bool) -> None:
    model, x, y = world(dropout=0.5, norm=False)
    step = oomkit.auto_batch(ladder=())(loss_of(model))
    loss = step(x, y)
    if present:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    before = grads(model)
    state = torch.get_rng_state()
    with inject_oom(nth=4, times=None, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="micro-batch of 1 of 8 rows"):
            loss.backward()
    assert same(grads(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert step.records[-1].ooms == 3 and step.records[-1].outcome == "gave up"


def test_other_errors_pass_untouched() -> None:
    model, x, y = world()

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    loss = oomkit.auto_batch(lambda x, y: F.cross_entropy(Bad.apply(model(x)), y))(x, y)
    with pytest.raises(ValueError, match="mine"):
        loss.backward()


def test_an_oom_of_somebody_elses_graph_passes() -> None:
    model, x, y = world()
    other = Net().double()
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    alone = other(x).sum()
    with inject_oom(nth=3, phase="backward"):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            alone.backward()
    assert not isinstance(caught.value, oomkit.OomkitError)
    loss.backward()
    assert close(grads(model), plain())


def test_a_loss_of_a_loss() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(loss_of(model))
    first = step(x, y)
    second = oomkit.auto_batch(lambda x: (model(x) * first).mean())(x)
    _refused(model, second.backward, "make one decorated step of both", nth=12)


def test_an_odd_loss() -> None:
    model, x, y = world()
    step = oomkit.auto_batch(lambda x: model(x).t(), accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match="one row per sample"):
        step(x)


def test_one_micro_batch_returns_no_loss() -> None:
    model, x, y = world()
    calls = []

    def compute(x: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return model(x).mean() if len(calls) == 1 else None

    before = torch.get_rng_state()
    with pytest.raises(oomkit.SplitError, match="different kinds of results"):
        oomkit.auto_batch(compute, accumulation_steps=2)(x)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_freed_says_so() -> None:
    """After a replay the graph is as empty as after any backward, for everybody."""
    model, x, y = world()

    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return F.cross_entropy(logits, y), logits

    step = oomkit.auto_batch(compute)
    loss, logits = step(x, y)
    with inject_oom(nth=4, phase="backward"):
        loss.backward()
    assert close(grads(model), plain())
    assert logits.shape == (B, 3) and logits.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        logits.sum().backward()


def test_nothing_of_the_failed_graph_is_alive() -> None:
    model, x, y = world()
    held: Seen[int] = Seen()
    wide = torch.nn.Linear(6, 4096).double()

    def compute(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x) < B:
            held.append(oomkit.memory("cpu").allocated)
        hidden = torch.tanh(wide(x)).exp().sin()
        return hidden.mean(), hidden[:, :1]

    with oomkit.limit_memory("1GiB", device="cpu"):
        before = oomkit.memory("cpu").allocated
        loss, kept = oomkit.auto_batch(compute)(x)
        with inject_oom(nth=5, phase="backward"):
            loss.backward()
    whole = 8 * B * 4096
    assert held[0] - before < 1.1 * whole + 8 * 7 * 4096  # `kept` is a view of one tensor


def test_a_parameter_that_was_not_found() -> None:
    x = torch.randn(B, 6)
    layers = [[torch.nn.Linear(6, 6)], torch.nn.Linear(6, 1)]

    def compute(x: torch.Tensor, get: Any = layers.__getitem__) -> torch.Tensor:
        return get(1)(torch.tanh(get(0)[0](x))).mean()  # type: ignore[no-any-return]

    loss = oomkit.auto_batch(compute)(x)
    with inject_oom(nth=6, phase="backward"):
        with pytest.raises(oomkit.OomkitError, match="did not find|was not found"):
            loss.backward()


def test_an_argument_with_a_graph() -> None:
    model, x, y = world()
    encoder = torch.nn.Linear(6, 6).double()
    step = oomkit.auto_batch(lambda h, y: F.cross_entropy(model(h), y))
    loss = step(encoder(x), y)
    _refused(model, loss.backward, "graph of its own")
    assert all(p.grad is None for p in encoder.parameters())


@pytest.mark.parametrize("own_backward", [False, True])
def test_an_argument_with_a_graph_in_a_split_call(own_backward: bool) -> None:
    """torch's error says that the graph is gone; the note says whose it is."""
    model, x, y = world()
    encoder = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double()

    @oomkit.auto_batch
    def step(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(h), y)
        if own_backward:
            loss.backward()
        return loss

    hidden = encoder(x)
    with inject_oom(phase="forward"), pytest.raises(RuntimeError, match="second time") as error:
        loss = step(hidden, y)
        loss.backward()
    assert any("h was computed with gradients" in note for note in error.value.__notes__)
    assert all(p.grad is None for p in [*encoder.parameters(), *model.parameters()])


def test_streams_and_buffers_after_a_refusal() -> None:
    """They are as before the backward, not as before the call."""
    model, x, y = world(dropout=0.5, norm=True)
    loss = oomkit.auto_batch(loss_of(model))(x, y)
    torch.rand(3)
    model(x)
    model.eval()
    _refused(model, loss.backward, r"train\(\) and eval\(\)")


def test_an_interrupt_while_the_graph_is_freed() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    def interrupt(node: Any) -> None:
        raise KeyboardInterrupt

    model, x, y = world()
    loss = oomkit.auto_batch(lambda x, y: F.cross_entropy(Odd.apply(model(x)), y))(x, y)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
    type(node)._raw_saved_odd = property(interrupt)  # type: ignore[union-attr]
    with inject_oom(nth=6, phase="backward") as fault, pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert fault.fired
