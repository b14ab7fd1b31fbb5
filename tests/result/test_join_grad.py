"""What required grad and comes out of a split call raises when a gradient reaches it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.messages import message_of
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

ROWS = 6


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch_of():
    return torch.linspace(-1, 1, ROWS * 2, dtype=torch.float64).reshape(ROWS, 2)


def training_step(model, result):
    """A step that runs its backward; `result(loss, out)` is what it returns."""

    @oomkit.auto_batch(label="train")
    def step(x):
        model.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        return result(loss, out)

    return step


def both(result):
    """(whole, split) results, and the model."""
    model = model_of()
    step = training_step(model, result)
    whole = step(batch_of())
    with force_slices((4, 2)):
        return whole, step(batch_of()), model


def refused(place, tensor, what="is not part of the returned loss"):
    with pytest.raises(oomkit.SplitError) as caught:
        tensor.sum().backward()
    assert message_of(caught.value) == (
        f"a gradient reached {place} of train, which {what}: the step ran in 2 micro-batches "
        "and their graphs are gone. Compute inside the step what needs a gradient, and make it "
        "part of the loss (the first of a tuple, or 'loss' of a mapping); where none is needed, "
        f"use {place}.detach()"
    )


def test_an_output_besides_the_loss():
    whole, got, model = both(lambda loss, out: {"loss": loss.item(), "logits": out})
    assert got["logits"].requires_grad and got["logits"].grad_fn is not None
    assert not got["logits"].is_leaf and not got["logits"]._is_view()
    torch.testing.assert_close(got["logits"], whole["logits"], rtol=0, atol=1e-12)
    before = [p.grad.clone() for p in model.parameters()]
    refused("result['logits']", got["logits"] * 2)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_the_loss_that_had_its_backward():
    whole, got, _ = both(lambda loss, out: loss)
    assert got.requires_grad and abs(got.item() - whole.item()) <= 1e-12
    refused("result", got, "has been through its backward() inside the step")
    whole, got, _ = both(lambda loss, out: (loss, out))
    refused("result[0]", got[0], "has been through its backward() inside the step")
    refused("result[1]", got[1])


def test_what_needs_no_gradient_is_plain():
    def result(loss, out):
        return {
            "loss": loss.detach(),
            "wrong": (out > 0).sum(),
            "labels": out.argmax(1),
            "fine": (out > -1e9).all(),
            "out": out.detach(),
            "norm": torch.tensor(1.0),
        }

    whole, got, _ = both(result)
    for key, tensor in got.items():
        assert not tensor.requires_grad and tensor.dtype == whole[key].dtype


def test_use_without_gradient_works():
    _, got, _ = both(lambda loss, out: {"loss": loss, "out": out})
    total = 0.0
    total += got["loss"]  # the pattern that keeps graphs alive
    assert total.item() == got["loss"].item() and "grad_fn" in repr(got["out"])
    assert torch.equal(got["out"].detach() + 1, (got["out"] + 1).detach())
    with torch.no_grad():
        got["out"].add_(1)
    got["out"].mul_(2)
    with pytest.raises(oomkit.SplitError):
        got["out"].sum().backward()


def test_a_gradient_through_a_sum_with_the_model():
    """The path to the refused tensor must not be left out."""
    _, got, model = both(lambda loss, out: out)
    parameters = list(model.parameters())

    def mixed():
        return model(batch_of()).sum() + got.sum()

    with pytest.raises(oomkit.SplitError):
        mixed().backward()
    with pytest.raises(oomkit.SplitError):
        torch.autograd.grad(mixed(), parameters)
    with pytest.raises(oomkit.SplitError):
        torch.autograd.grad(mixed(), parameters[0])
    with pytest.raises(oomkit.SplitError):
        mixed().backward(inputs=parameters[:1])


def test_a_gradient_for_the_batch_itself():
    model = model_of()
    x = batch_of().requires_grad_()

    @oomkit.auto_batch(label="attack")
    def step(x):
        return {"scores": model(x)}

    with force_slices((3, 3)):
        scores = step(x)["scores"]
    assert scores.requires_grad
    with pytest.raises(oomkit.SplitError, match=r"result\['scores'\] of attack"):
        torch.autograd.grad(scores.sum() + x.sum(), x)


def test_in_an_evaluation_with_gradients_on():
    model = model_of()

    @oomkit.auto_batch(label="train")
    def step(x):
        return {"logits": model(x), "pairs": [(row, 1) for row in model(x)]}

    with inject_oom(nth=3):
        got = step(batch_of())
    whole = model(batch_of())
    torch.testing.assert_close(got["logits"], whole, rtol=0, atol=1e-12)
    assert len(got["pairs"]) == ROWS
    with pytest.raises(oomkit.SplitError, match=r"result\['logits'\]"):
        got["logits"].sum().backward()
    with pytest.raises(oomkit.SplitError, match=r"result\['pairs'\]\[1\]\[0\]"):
        got["pairs"][4][0].sum().backward()


def test_with_gradients_off_where_it_is_called():
    """The step turned them on: its own outputs required grad."""
    model = model_of()

    @oomkit.auto_batch(label="train")
    def step(x):
        with torch.enable_grad():
            on = model(x)
        return {"on": on, "off": model(x)}

    with torch.no_grad():
        whole = step(batch_of())
        with force_slices((4, 2)):
            got = step(batch_of())
        assert not torch.is_grad_enabled()
    assert (whole["on"].requires_grad, whole["off"].requires_grad) == (True, False)
    assert (got["on"].requires_grad, got["off"].requires_grad) == (True, False)
    refused("result['on']", got["on"])


def test_in_inference_mode_everything_is_plain():
    model = model_of()
    step = oomkit.auto_batch(lambda x: {"y": model(x)})
    with torch.inference_mode(), force_slices((4, 2)):
        got = step(batch_of())["y"]
    assert not got.requires_grad and torch.equal(got, model(batch_of()))


def test_a_parameter_is_itself():
    _, got, model = both(lambda loss, out: {"loss": loss.item(), "scale": out})
    step = training_step(model, lambda loss, out: {"bias": model[2].bias, "w": model[0].weight})
    with force_slices((4, 2)):
        got = step(batch_of())
    assert got["bias"] is model[2].bias and got["w"] is model[0].weight


def test_a_leaf_made_in_the_step_is_refused_too():
    _, got, _ = both(lambda loss, out: {"leaf": out.detach().clone().requires_grad_()})
    assert got["leaf"].requires_grad and got["leaf"].shape == (ROWS, 1)
    refused("result['leaf']", got["leaf"])


def test_join_gets_values_without_graphs_and_its_answer_is_left_alone():
    model, seen = model_of(), []

    def join(results, rows):
        seen.extend(results)
        return torch.cat([r["out"] for r in results])

    @oomkit.auto_batch(accumulation_steps=2, join=join)
    def step(x):
        out = model(x)
        out.mean().backward()
        return {"out": out}

    got = step(batch_of())
    assert not got.requires_grad and not any(r["out"].requires_grad for r in seen)


def test_graphs_of_micro_batches_are_freed():
    alive = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = torch.nn.Module()
            alive.append(weakref.ref(ctx.token))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    model = model_of()

    @oomkit.auto_batch(accumulation_steps=3)
    def step(x):
        gc.collect()
        assert all(token() is None for token in alive)
        out = Watched.apply(model(x))
        out.mean().backward()
        return {"out": out}

    got = step(batch_of())
    gc.collect()
    assert len(alive) == 3 and all(token() is None for token in alive)
    assert got["out"].requires_grad


def test_no_memory_is_needed_for_it():
    """Joining a kept view makes a tensor that refuses gradients without an allocation."""
    from oomkit._engine.nodes import Refusal

    value = torch.ones(3)
    with inject_oom(times=None) as fault:
        got = Refusal("step", 2, [])(value, "result", False)
    assert fault.seen == 0 and got.requires_grad and got.data_ptr() == value.data_ptr()


def test_it_is_an_error_of_the_next_step_too():
    """A hidden state that is carried on without detach()."""
    model = model_of()

    @oomkit.auto_batch(label="carry")
    def step(x, state):
        out = model(x)
        loss = (out + (0 if state is None else state)).square().mean()
        loss.backward()
        return {"state": out.mean()}

    with force_slices((4, 2)):
        state = step(batch_of(), None)["state"]
    model.zero_grad()
    with pytest.raises(oomkit.SplitError, match=r"result\['state'\] of carry"):
        step(batch_of(), state)


# --- a loss that is returned to a caller who runs backward ---


def returning(result):
    model = model_of()

    @oomkit.auto_batch(label="train")
    def step(x):
        out = model(x)
        return result(out.square().mean(), out)

    return model, step


def test_the_returned_loss_is_no_output_of_these():
    model, step = returning(lambda loss, out: {"loss": loss, "logits": out})
    twin, plain = returning(lambda loss, out: loss)
    plain(batch_of()).backward()

    with force_slices((4, 2)):
        got = step(batch_of())
    refused("result['logits']", got["logits"])
    assert all(p.grad is None for p in model.parameters())
    (got["loss"] / 2).backward()

    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("through", ["backward", "grad"])
def test_a_loss_with_a_part_made_of_another_output(through):
    model, step = returning(lambda loss, out: (loss, out))
    with force_slices((4, 2)):
        loss, out = step(batch_of())
    total = loss + 0.1 * out.mean()
    with pytest.raises(oomkit.SplitError):
        if through == "backward":
            total.backward()
        else:
            torch.autograd.grad(total, list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
