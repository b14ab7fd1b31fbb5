"""Hooks on gradients: said once, refused when asked, and never stepped from twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _parameter(model: Any) -> None:
    model[0].weight.register_hook(lambda g: g * 0.5)


def _module(model: Any) -> None:
    model[2].register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))


def _module_pre(model: Any) -> None:
    model[2].register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))


HOOKS: dict[str, tuple[Callable[[Any], None], str]] = {
    "parameter": (_parameter, "0.weight"),
    "module": (_module, "Linear"),
    "module, before": (_module_pre, "Linear"),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_said_once_and_linear_ones_are_exact(name: str) -> None:
    add, match = HOOKS[name]
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, optimizer = _model()
    add(model)
    _step(model, optimizer).__wrapped__(x)
    expected = [p.detach().clone() for p in model.parameters()]
    model, optimizer = _model()
    add(model)
    step = _step(model, optimizer, accumulation_steps=3)
    with pytest.warns(oomkit.OomkitWarning, match=f"gradient hook of .*{match}"):
        step(x)
    for a, b in zip(expected, model.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)


@pytest.mark.parametrize("oom", [False, True], ids=["asked", "oom"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_refused_when_asked(name: str, oom: bool) -> None:
    add, match = HOOKS[name]
    x = torch.randn(9, 4, dtype=torch.float64)
    model, optimizer = _model()
    add(model)
    before = [p.detach().clone() for p in model.parameters()]
    step = _step(model, optimizer, hooks="error", accumulation_steps=1 if oom else 3)
    with pytest.raises(oomkit.SplitError, match=f'{match}.*hooks="error"'):
        if oom:
            with inject_oom(nth=2, phase="backward"):
                step(x)
        else:
            step(x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_removed_hook_is_none() -> None:
    model, optimizer = _model()
    model[0].weight.register_hook(lambda g: g).remove()
    model[2].register_full_backward_hook(lambda m, i, o: None).remove()
    _step(model, optimizer, hooks="error", accumulation_steps=3)(
        torch.randn(9, 4, dtype=torch.float64)
    )


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="expected one of warn, error, got 'no'"):
        oomkit.auto_batch(lambda x: x, hooks="no")  # type: ignore[call-overload]


def test_the_old_name_of_the_option_warns() -> None:
    with pytest.warns(FutureWarning, match='write hooks="warn"'):
        oomkit.auto_batch(lambda x: x, hooks="say")


def _in_the_backward(model: nn.Module, known: bool) -> list[torch.optim.Optimizer]:
    """An optimizer per parameter that steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values()) if known else []


@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_in_the_backward_is_not_split(known: bool) -> None:
    model, _ = _model()
    optimizers = _in_the_backward(model, known)
    before = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=2, optimizer=optimizers)
    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()

    with pytest.raises(oomkit.SplitError, match=r"0.weight.*post-accumulate-grad hook"):
        step(torch.randn(8, 4, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_evaluation_of_a_model_with_such_hooks_is_split() -> None:
    model, _ = _model()
    _in_the_backward(model, False)

    @oomkit.auto_batch(accumulation_steps=2, hooks="error")
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    x = torch.randn(8, 4, dtype=torch.float64)
    assert torch.equal(evaluate(x), model(x).detach())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_an_optimizer_in_the_backward_is_not_retried(known: bool, phase: str) -> None:
    x = torch.randn(8, 4, dtype=torch.float64)

    def build() -> tuple[nn.Module, Any]:
        model, _ = _model()
        optimizers = _in_the_backward(model, known)

        @oomkit.auto_batch(optimizer=optimizers)
        def step(x: torch.Tensor) -> None:
            model(x).pow(2).mean().backward()

        return model, step

    model, step = build()
    with inject_oom(nth=2**60, phase=phase) as counted:
        step(x)
    final = [p.detach().clone() for p in model.parameters()]
    outcomes = set()
    for n in range(1, counted.seen + 1):
        model, step = build()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            with inject_oom(nth=n, phase=phase) as armed:
                step(x)
        except oomkit.PartialUpdate as error:
            outcomes.add("partial")
            assert "cannot be undone" in str(error)
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert not all(same), n
        except oomkit.SplitError as error:  # before any backward: met by the replay
            outcomes.add("split refused")
            assert phase == "forward" and "post-accumulate-grad hook" in str(error)
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same), n
        except oomkit.OutOfMemory as error:
            outcomes.add("refused")
            assert not error.committed and "post-accumulate-grad hook" in str(error), n
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same), n
        else:  # an optimizer that made its state, and had moved nothing
            outcomes.add("done")
            assert all(torch.equal(a, b) for a, b in zip(final, model.parameters(), strict=True)), n
        assert armed.fired == 1
    if phase == "backward":
        assert {"partial", "refused"} <= outcomes


def _returned(model: nn.Module) -> Any:
    return oomkit.auto_batch(lambda x: model(x).pow(2).mean(), backward=True)


def test_a_hook_that_updates_by_hand_is_a_partial_update() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    partial = refused = 0

    def hook(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for n in range(1, 100):
        model, _ = _model()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        before = [p.detach().clone() for p in model.parameters()]
        step = _returned(model)
        with inject_oom(nth=n, phase="backward") as armed:
            try:
                step(x)
            except oomkit.PartialUpdate as error:
                assert "a post-accumulate-grad hook had changed a parameter" in str(error)
                partial += 1
            except oomkit.OutOfMemory:
                refused += 1
        if not armed.fired:
            break
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) == (partial == 0), n
    assert partial and refused
