"""What is taken for rounding: not a number that is small in the first calls, for it is no loss that
cancels, and not what TF32 or autocast would hide, for a proof is made in full precision, too."""

from __future__ import annotations

import contextlib
from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import oomkit
from oomkit.testing import inject_oom


@pytest.mark.filterwarnings("ignore")
@pytest.mark.refusals
def test_a_tiny_sum_beside_the_loss_is_not_taken_for_rounding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(batch="x")
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return {"loss": x.abs().sum() * 1e-8}

    x = torch.randn(8, 4)
    with inject_oom(nth=3, phase="backward"), pytest.raises(oomkit.SplitError, match="'loss'"):
        step(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tensor", "number", "dict", "tuple"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_evaluated_loss_of_another_reduction_is_refused(form: str, reduction: str) -> None:
    """Its parts would be added where they are to be averaged, or the other way round."""

    @oomkit.auto_batch(accumulation_steps=2, reduction=reduction)
    def step(x: torch.Tensor) -> object:
        loss = x.square().mean() if reduction == "sum" else x.square().sum()
        return {
            "tensor": loss,
            "number": loss.item(),
            "dict": {"loss": loss},
            "tuple": (loss, x),
        }[form]

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), pytest.raises(oomkit.SplitError, match="of the joined parts"):
        step(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["tensor", "number", "dict", "tuple"])
def test_an_evaluated_sum_is_added(form: str) -> None:
    @oomkit.auto_batch(accumulation_steps=3, reduction="sum")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        made = {"tensor": loss, "number": loss.item(), "dict": {"loss": loss}, "tuple": (loss, x)}
        return made[form]  # type: ignore[return-value]

    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found: object = step(x)
        found = found["loss"] if isinstance(found, dict) else found
        found = found[0] if isinstance(found, tuple) else found
        assert abs(float(found) - float(x.square().sum())) < 1e-4  # type: ignore[arg-type]


def _precisions() -> dict[str, Any]:
    def of(get: Callable[[], Any]) -> Any:
        try:
            return get()
        except RuntimeError:  # a program may have used both ways of torch
            return "mixed"

    return {
        "products": of(torch.get_float32_matmul_precision),
        "cudnn": of(lambda: torch.backends.cudnn.allow_tf32),
        **{
            kind: torch._C._get_fp32_precision_getter("cuda", kind)
            for kind in ("all", "matmul", "conv", "rnn")
        },
    }


SETTINGS: dict[str, Callable[[], None]] = {
    "as they are": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "no TF32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "matmul by name": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "conv by name": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.fixture
def _precisions_go_back() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch._C._set_fp32_precision_setter("cuda", "matmul", "none")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [False, True], ids=["equal", "coupled"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_proof_runs_in_full_precision(
    setting: str, fails: bool, _precisions_go_back: None
) -> None:
    SETTINGS[setting]()
    before = _precisions()
    model = torch.nn.Linear(4, 1)
    seen: UserList[tuple[Any, ...]] = UserList()  # a list would be put back

    def step(x: torch.Tensor) -> None:
        by_name = (
            torch._C._get_fp32_precision_getter("cuda", k) for k in ("matmul", "conv", "rnn")
        )
        seen.append(tuple(by_name))
        made = model(x)
        (made.mean() ** 2 if fails else (made**2).mean()).backward()

    decorated = oomkit.auto_batch(step, model=model, accumulation_steps=2)
    if fails:
        with pytest.raises(oomkit.SplitError):
            decorated(torch.randn(8, 4))
    else:
        decorated(torch.randn(8, 4))
        assert seen.pop() == tuple(before[kind] for kind in ("matmul", "conv", "rnn"))  # for good
    assert "tf32" not in seen[0]
    assert _precisions() == before


def _cast_step(
    coupled: float, inside: bool, error: Exception | None = None
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """256 rows, of which an entropy of the batch's mean is off by a hundredth in parts. `error`: in
    single precision."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            made = model(x)
            if error is not None and made.dtype != torch.bfloat16:
                raise error
            mean = made.softmax(-1).mean(0)
            loss = torch.nn.functional.cross_entropy(made, y) + coupled * (mean * mean.log()).sum()
        loss.backward()

    decorated = oomkit.auto_batch(step, model=model, accumulation_steps=4)
    return decorated, torch.randn(256, 32), torch.randint(0, 10, (256,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", [True, False], ids=["in the step", "around it"])
def test_what_autocast_would_hide_is_refused(inside: bool) -> None:
    of_torch = torch.set_autocast_enabled
    for coupled in (0.0, 1.0):
        step, x, y = _cast_step(coupled, inside)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            if coupled:
                with pytest.raises(oomkit.SplitError, match="differs by 0.0"):
                    step(x, y)
            else:
                step(x, y)
            assert torch.is_autocast_enabled("cpu") is not inside
        assert torch.set_autocast_enabled is of_torch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("FlashAttention only supports fp16 and bf16"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["cannot", "does not fit"],
)
def test_a_step_that_needs_autocast_is_proven_with_it(error: Exception) -> None:
    step, x, y = _cast_step(0.0, True, error)
    step(x, y)
    assert step.records[-1].accumulation_steps == 4
    assert step.records[-1].ooms == 0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cast", [torch.float64, torch.complex64, torch.bfloat16])
def test_a_cast_that_keeps_single_precision_hides_nothing(cast: torch.dtype) -> None:
    """One to fewer bits does, which the documentation says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = model(x).to(cast)
        logp = torch.log_softmax((logits.real if cast.is_complex else logits).float(), 1)
        p = logp.exp().mean(0)
        (torch.nn.functional.nll_loss(logp, y) + 0.1 * (p * p.log()).sum()).backward()
        optimizer.step()

    batch = torch.randn(64, 16), torch.randint(0, 10, (64,))
    if cast == torch.bfloat16:
        step(*batch)
        return
    with pytest.raises(oomkit.SplitError, match="differs by"):
        step(*batch)


@pytest.mark.filterwarnings("ignore")
def test_single_precision_inside_a_step_in_double_is_rounding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(accumulation_steps=3)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = torch.tanh(model[0](x).float()).double()
        torch.nn.functional.cross_entropy(model[1](hidden), y).backward()
        optimizer.step()

    for _ in range(3):
        step(torch.randn(64, 16).double(), torch.randint(0, 10, (64,)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made",
    [
        lambda loss: loss.detach().double(),
        lambda loss: np.float64(loss.item()),
        lambda loss: np.mean([loss.item(), 2 * loss.item()]),
        lambda loss: torch.tensor(loss.item() * 0.3, dtype=torch.float64),
        lambda loss: {"loss": loss.item(), "mean": np.array([loss.item()] * 3).mean()},
    ],
)
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.refusals
def test_a_wide_number_of_a_narrow_loss_is_as_exact_as_the_loss(
    made: Callable[[torch.Tensor], object], is_wrong: bool
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> object:
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        losses.mean().backward()
        optimizer.step()
        return made(losses.max() if is_wrong else losses.mean())

    x, y = torch.randn(16, 6), torch.randint(0, 5, (16,))
    refused = pytest.raises(oomkit.SplitError, match="of the joined parts")
    for _ in range(1 if is_wrong else 3):
        with inject_oom(nth=3, phase="backward"), refused if is_wrong else contextlib.nullcontext():
            step(x, y)
