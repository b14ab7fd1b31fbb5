"""zero_grad() between two backwards: what it clears reaches no update, split or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomkit
from oomkit.testing import inject_oom

SEED, ROWS = 5, 12


def _world() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batch(seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (ROWS,), generator=g)


def _perturbed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Adversarial rows by the fast gradient sign method, as the tutorial has it."""
    x = x.detach().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return (x + 0.1 * x.grad.sign()).detach()


def _fgsm(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    adversarial = _perturbed(model, x, y)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(adversarial), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _by_the_module(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    adversarial = _perturbed(model, x, y)
    model.zero_grad()
    loss = F.cross_entropy(model(adversarial), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _iterated(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Projected gradient descent: some steps, each cleared; two backwards after the last."""
    optimizer.zero_grad()
    adversarial = x
    for _ in range(3):
        adversarial = _perturbed(model, adversarial, y)
        optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    loss = F.cross_entropy(model(adversarial), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _cleared_twice(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    adversarial = _perturbed(model, x, y)
    model.zero_grad()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(adversarial), y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.detach()


STEPS = [_fgsm, _by_the_module, _iterated, _cleared_twice]
Step = Callable[..., Any]


def _run(body: Step, calls: int = 3, fail: int | None = None, **options: Any) -> list[Any]:
    model, optimizer = _world()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return body(model, optimizer, x, y)

    decorated: Any = oomkit.auto_batch(step, **options) if options or fail is not None else step
    results = []
    for i in range(calls):
        x, y = _batch(i)
        if fail is not None and i == 1:
            with inject_oom(nth=fail):
                results.append(decorated(x, y))
        else:
            results.append(decorated(x, y))
    state = [v for s in optimizer.state.values() for v in s.values()]
    return [t.detach().clone() for t in [*results, *model.parameters(), *state]]


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("body", STEPS)
def test_split_from_the_start(body: Step, steps: int) -> None:
    torch.testing.assert_close(_run(body, accumulation_steps=steps), _run(body), rtol=1e-9, atol=0)


@pytest.mark.parametrize("at", range(1, 60, 3))
@pytest.mark.parametrize("body", STEPS)
def test_wherever_memory_runs_out(body: Step, at: int) -> None:
    got = _run(body, fail=at, optimizer_safety="copy")
    torch.testing.assert_close(got, _run(body), rtol=1e-9, atol=1e-12)


def test_the_gradients_that_are_left() -> None:
    """Without an update: as many as the undecorated program leaves."""
    found = []
    for steps in (None, 3):
        model, optimizer = _world()

        def body(
            x: torch.Tensor, y: torch.Tensor, m: nn.Module = model, o: Any = optimizer
        ) -> None:
            adversarial = _perturbed(m, x, y)
            o.zero_grad()
            F.cross_entropy(m(adversarial), y).backward()

        step = body if steps is None else oomkit.auto_batch(body, accumulation_steps=steps)
        step(*_batch())
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)


# --- what stays refused ---


def _other(body: Step, match: str, **options: Any) -> None:
    model, optimizer = _world()
    before = [p.detach().clone() for p in model.parameters()]

    @oomkit.auto_batch(accumulation_steps=2, **options)
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return body(model, optimizer, x, y)

    with pytest.raises(oomkit.SplitError, match=match):
        step(*_batch())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def _sharpness(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """The climb needs the gradient of the whole batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    climbs = [0.1 * p.grad if p.grad is not None else None for p in model.parameters()]
    with torch.no_grad():
        for p, climb in zip(model.parameters(), climbs, strict=True):
            if climb is not None:
                p += climb
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, climb in zip(model.parameters(), climbs, strict=True):
            if climb is not None:
                p -= climb
    optimizer.step()


def _of_a_part(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """The first layer keeps what both backwards give."""
    optimizer.zero_grad()
    adversarial = _perturbed(model, x, y)
    model[2].zero_grad()
    F.cross_entropy(model(adversarial), y).backward()
    optimizer.step()


def _to_zero(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    adversarial = _perturbed(model, x, y)
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(adversarial), y).backward()
    optimizer.step()


def test_gradients_that_were_used_before_they_were_cleared() -> None:
    _other(_sharpness, "cannot split")


@pytest.mark.parametrize("body", [_of_a_part, _to_zero])
def test_what_is_not_cleared_at_all(body: Step) -> None:
    _other(body, r"between two backward\(\) calls")


def test_without_a_proof() -> None:
    _other(_fgsm, r"zero_grad\(\) is called at .* between two backward", verify=False)
