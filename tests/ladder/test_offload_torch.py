"""An offload among torch's own machinery: other hooks, modes, transforms, compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sample import with_rest
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.programs import build, kept_of, offload, run, same
from oomkit import _C

top = torch._C._autograd._top_saved_tensors_default_hooks


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except RuntimeError as error:
        return type(error), str(error).partition(":")[0]


# --- a write after the save ---


@pytest.mark.parametrize("size", [8, 4096])
def test_a_write_after_the_save_is_the_same_error(size: int) -> None:
    x = torch.randn(size, requires_grad=True)

    def work() -> Any:
        y = (x * 2).exp()
        y.add_(1)
        return torch.autograd.grad(y.sum(), x)

    plain = outcome(work)
    with offload([]):
        assert outcome(work) == plain
    assert plain[1] == "one of the variables needed for gradient computation has been " \
                       "modified by an inplace operation"  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
def test_a_parameter_that_is_updated_before_the_backward(kept: bool) -> None:
    model, batch = torch.nn.Linear(64, 64), torch.randn(64, 64, requires_grad=True)

    def work() -> Any:
        y = model(batch)
        with torch.no_grad():
            model.weight.add_(1)
        return torch.autograd.grad(y.sum(), batch)

    plain = outcome(work)
    assert plain[0] is RuntimeError
    with offload(kept_of(model, batch) if kept else []):
        assert outcome(work) == plain


# --- other hooks ---


def test_hooks_of_the_user_go_on() -> None:
    packed = []
    x = torch.randn(4096, requires_grad=True)
    there = offload([])
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t), there:
        x.sin()
    assert len(packed) == 1 and there.moved_bytes == 0
    with there, saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        x.sin()
    assert len(packed) == 2 and there.moved_bytes == 0
    assert top(True) is None


def test_one_inside_another() -> None:
    x = torch.randn(4096, requires_grad=True)
    outer, inner = offload([]), offload([])
    with outer, inner:
        y = x.sin()
    assert outer.moved_bytes == x.nbytes and inner.moved_bytes == 0
    assert top(True) is None
    del y


def test_hooks_that_are_left_stay() -> None:
    there = offload([])
    theirs = saved_tensors_hooks(lambda t: t, lambda t: t)
    there.__enter__()
    theirs.__enter__()
    there.__exit__(None, None, None)
    assert top(True) == (theirs.pack_hook, theirs.unpack_hook)
    theirs.__exit__()
    assert top(True) is None


def test_an_error_in_the_step_takes_the_hooks_away() -> None:
    with pytest.raises(KeyError, match="theirs"), offload([]):
        raise KeyError("theirs")
    assert top(True) is None


# --- torch forbids hooks ---


def test_where_hooks_are_forbidden_tensors_stay() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([])
    with there:
        with disable_saved_tensors_hooks("not here"):
            y = x.sin()
            with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(id, id):
                pass
            with disable_saved_tensors_hooks("nor here"):
                z = x.sin()
            y = y + x.sin()
        assert there.moved_bytes == 0
        z = x.sin()
        assert there.moved_bytes == x.nbytes
    del y, z


def test_it_does_not_begin_where_they_are_forbidden() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([])
    with disable_saved_tensors_hooks("not here"), there:
        y = x.sin()
    assert there.moved_bytes == 0 and top(True) is None
    del y


def test_hooks_of_the_user_are_forbidden_as_ever() -> None:
    with offload([]):
        theirs = saved_tensors_hooks(lambda t: t, lambda t: t)
        with theirs, pytest.raises(RuntimeError, match="not here"):
            with disable_saved_tensors_hooks("not here"):
                pass


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.func.grad(lambda w: w.sin().square().sum())(x),
        lambda x: torch.func.jacrev(lambda w: w.sin().sum())(x),
        lambda x: torch.func.vmap(lambda row: row.exp())(x),
        lambda x: torch.func.vmap(torch.func.grad(lambda row: row.exp().sum()))(x),
        lambda x: torch.autograd.functional.hessian(lambda w: w.sin().sum(), x[:4, :4]),
    ],
)
def test_transforms(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(64, 64)
    plain = work(x)
    with offload([]):
        assert torch.equal(work(x), plain)


# --- what a program can see ---


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def without_detach(seen: Seen) -> list[str]:
    """torch itself detaches an output that it saves, and lets modes see that."""
    return [name for name in seen.names if name != "aten.detach.default"]


@pytest.mark.parametrize("name", ["gpt", "in_place", "double_backward"])
def test_modes_see_nothing_of_it(name: str) -> None:
    model, batch = build(name)
    with Seen() as plain:
        first = run(model, batch)
    first = [value.clone() for value in first]
    there = offload(kept_of(model, batch))
    with Seen() as seen:
        again = run(model, batch, there)
    assert same(again, first) and there.moved_bytes > 0
    assert without_detach(seen) == without_detach(plain)


class Mine(torch.Tensor):
    pass


def test_subclasses_stay() -> None:
    x = torch.randn(4096, requires_grad=True)
    there = offload([])
    with there:
        y = x.as_subclass(Mine).sin()
    assert there.moved_bytes == 0
    y.sum().backward()
    assert torch.equal(x.grad.as_subclass(torch.Tensor), x.detach().cos())


@pytest.mark.parametrize("make", [lambda y: y.conj(), lambda y: torch._neg_view(y)])
def test_views_that_are_read_otherwise_stay(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4096, dtype=torch.complex64)
    weight = torch.randn(4096, dtype=torch.complex64, requires_grad=True)
    plain = torch.autograd.grad((make(x) * weight).abs().sum(), weight)[0]
    there = offload([])
    with there:
        y = make(x) * weight
    assert torch.equal(torch.autograd.grad(y.abs().sum(), weight)[0], plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", with_rest(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiled_functions(backend: str) -> None:
    """AOTAutograd saves by a function of its own; a new offload compiles nothing anew."""
    testing = pytest.importorskip("torch._dynamo.testing")
    x = torch.randn(64, 64, requires_grad=True)
    compilations = testing.CompileCounterWithBackend(backend)

    @torch.compile(backend=compilations)
    def work(y: torch.Tensor) -> torch.Tensor:
        return (y * 2).sin().exp() * y.tanh()

    try:
        plain = torch.autograd.grad(work(x).sum(), x)[0]
    except Exception as error:  # noqa: BLE001  (no compiler, in whichever way it says so)
        pytest.skip(f"{backend} does not work here: {error}")
    assert compilations.frame_count == 1
    for _ in range(2):
        there = offload([])
        with there:
            y = work(x)
        assert there.moved_bytes > 0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
    assert compilations.frame_count == 1


# --- misuse ---


def test_misuse() -> None:
    there = offload([])
    with there, pytest.raises(RuntimeError, match="in use already"):
        there.__enter__()
    with pytest.raises(TypeError, match="expected a tensor to keep, got 'int'"):
        offload([torch.ones(1), 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="expected the tensors to keep"):
        _C._offload(0, -1, 3, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="packs one saved tensor"):
        there()
    with pytest.raises(TypeError, match="cannot create"):
        type(there)()
