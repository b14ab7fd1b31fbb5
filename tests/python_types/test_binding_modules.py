"""The forward of a model, decorated in its class, on the object, or as the model itself."""

from __future__ import annotations

import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.own_process import run_program
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

X = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) / 16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3).double()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


class Decorated(Plain):
    @oomkit.auto_batch
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Forward."""
        return super().forward(x, scale)


def _in_class() -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    model = Decorated()
    return model, model, Decorated.forward


def _on_object() -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    model = Plain()
    model.forward = oomkit.auto_batch(model.forward)  # type: ignore[method-assign]
    return model, model, model.forward


def _as_model() -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    model = Plain()
    step = oomkit.auto_batch(model)
    return model, step, step


WAYS = [_in_class, _on_object, _as_model]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gradients_are_the_whole_batchs(way: Any, phase: str) -> None:
    model, call, step = way()
    model.layer(X).pow(2).mean().backward()
    expected = model.layer.weight.grad.clone()
    for times in range(2):
        model.zero_grad()
        with inject_oom(nth=1, phase=phase) as armed:
            loss = call(X).pow(2).mean()
            loss.backward()
        assert armed.fired == 1
        assert torch.allclose(model.layer.weight.grad, expected, rtol=0, atol=1e-12), times
    assert step.records[-1].ooms == 1


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_model_see_what_stands_outside_of_the_step(way: Any) -> None:
    """They belong to the model's call: inside the step where the model itself is decorated."""
    model, call, _ = way()
    sizes: list[int] = []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    with torch.no_grad(), inject_oom(nth=1) as armed:
        assert torch.equal(call(X), model.layer(X))
    assert armed.fired == 1
    assert sizes == ([4, 4] if way is _as_model else [8])


def test_a_model_stays_what_it_is() -> None:
    for way in (_in_class, _on_object):
        model, _, _ = way()
        assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
        assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
        assert "forward" not in model.state_dict()


def test_a_decorated_model_reads_and_sets_what_is_the_models() -> None:
    model, step, _ = _as_model()
    assert not isinstance(step, nn.Module)
    assert step.label == "Plain"
    assert list(step.parameters()) == list(model.parameters())
    step.eval()
    assert not step.training and not model.training
    step.training = True
    assert model.training
    model.eval()
    assert not step.training
    step.extra = 3
    assert model.extra == 3
    del step.extra
    assert not hasattr(model, "extra")
    step.load_state_dict(model.state_dict())
    assert "_parameters" not in vars(step)


def test_the_bound_forward_is_like_a_method() -> None:
    model, other = Decorated(), Decorated()
    bound = model.forward
    assert bound.__self__ is model and bound.__func__ is Decorated.forward
    assert bound == model.forward and hash(bound) == hash(model.forward)
    assert bound != other.forward and bound != Plain.forward
    assert bound.__name__ == "forward" and bound.__doc__ == "Forward."
    assert bound.__module__ == __name__ and bound.label == "Decorated.forward"
    assert bound.__wrapped__ == Decorated.forward.__wrapped__.__get__(model)
    assert bound.__code__ is Decorated.forward.__wrapped__.__code__
    assert "bound oomkit.auto_batch step Decorated.forward of Decorated" in repr(bound)
    assert weakref.WeakMethod(bound)() == bound
    assert torch.equal(bound(X), model(X))
    assert torch.equal(bound(X, scale=2.0), bound(x=X, scale=2.0))
    assert torch.equal(bound(*[X, 2.0]), model.layer(X) * 2)
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument"):
        bound(X, **{f"name{i}": i for i in range(9)})
    with pytest.raises(TypeError, match=r"BoundStep\(\) expected a step, got int"):
        type(bound)(3, model)


def test_models_of_one_class_inside_each_other() -> None:
    """A teacher, a student: the outermost call answers for both, each knows its own size."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Decorated(), Decorated()

        @oomkit.auto_batch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) - self.two(x)

    pair = Pair()
    before = len(Decorated.forward.records)
    expected = pair(X)
    with inject_oom(nth=2) as armed:
        got = pair(X)
    assert armed.fired == 1
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    assert len(Decorated.forward.records) == before


def test_functional_call() -> None:
    model = Decorated()
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
    expected = model.layer(X) * 2
    with torch.no_grad(), inject_oom(nth=1) as armed:
        got = torch.func.functional_call(model, parameters, (X,))
    assert armed.fired == 1
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: torch.func.vmap(f)(X),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](X)[0],
}


@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_inside_a_transform_nothing_is_split(transform: str) -> None:
    """vmap hides the batch: what is in front is a feature, and softmax couples those."""
    run = TRANSFORMS[transform]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    step = oomkit.auto_batch(function, label="transformed")
    expected = run(function)
    torch.testing.assert_close(run(step), expected, rtol=0, atol=0)
    with inject_oom(nth=1) as armed, pytest.raises(oomkit.OutOfMemory, match=r"of torch\.func"):
        run(step)
    assert armed.fired == 1
    with torch.no_grad(), inject_oom(nth=1) as armed:
        step(X)  # outside it is split, and remembered
    assert armed.fired == 1
    torch.testing.assert_close(run(step), expected, rtol=0, atol=0)
    asked = oomkit.auto_batch(function, accumulation_steps=2)
    with pytest.raises(oomkit.SplitError, match=r"inside a transform of torch\.func"):
        run(asked)


def test_a_transform_inside_the_step_is_split() -> None:
    step = oomkit.auto_batch(lambda x: torch.func.vmap(lambda row: row.softmax(-1))(x))
    with inject_oom(nth=1) as armed:
        assert torch.equal(step(X), X.softmax(-1))
    assert armed.fired == 1


COMPILED = """
import warnings
warnings.simplefilter("error", category=UserWarning)  # graph breaks in code of ours, too
import torch
from torch import nn
import oomkit
from oomkit.testing import inject_oom

torch.set_num_threads(1)
X = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) / 16

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3).double()
    @oomkit.auto_batch(verify=False)
    def forward(self, x):
        return self.layer(x)

def check(model, call, step, phase):
    model.zero_grad()
    model.layer(X).pow(2).mean().backward()
    expected = model.layer.weight.grad.clone()
    for nth in (None, 1, None):
        model.zero_grad()
        with inject_oom(nth=nth or 10**9, phase=phase) as armed:
            call(X).backward()
        assert armed.fired == (nth is not None)
        assert torch.allclose(model.layer.weight.grad, expected, rtol=0, atol=1e-12)
    assert step.records[-1].accumulation_steps > 1, step.records[-1]

def rows(call):
    return lambda x: call(x).pow(2).mean()

net = Net()  # a first protected call below torch.compile registers our hooks
check(net, rows(torch.compile(net, backend="eager", fullgraph=True)), Net.forward, "forward")
net = Net()
net.compile(backend="eager")
check(net, rows(net), Net.forward, "backward")
inner = nn.Module()
inner.layer = nn.Linear(2, 3).double()
compiled = torch.compile(inner.layer, backend="eager")
step = oomkit.auto_batch(lambda x: compiled(x).pow(2).mean(), verify=False)
check(inner, step, step, "backward")
step = oomkit.auto_batch(lambda x: inner.layer(x).pow(2).mean(), verify=False)
check(inner, torch.compile(step, backend="eager"), step, "forward")
torch._dynamo.reset()
try:
    torch.compile(step, backend="eager", fullgraph=True)(X)
except torch._dynamo.exc.Unsupported as error:
    assert "of class `Step`" in str(error)
else:
    raise AssertionError("fullgraph=True took a step in")
exported = torch.export.export(Net(), (X,)).module()
assert exported(X).shape == (8, 3)
print("done")
"""


def test_compiled_inside_and_outside() -> None:
    """In a process of its own: what is compiled stays compiled, and dynamo is slow to import."""
    result = run_program(textwrap.dedent(COMPILED))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "done\n"
