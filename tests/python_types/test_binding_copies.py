"""Copies and pickles: by name as a function, or with the object that a step is bound to."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

X = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)


@oomkit.auto_batch(accumulation_steps=2)
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


triple = oomkit.auto_batch(_triple, label="another name", accumulation_steps=2)
guarded = oomkit.guard("skip")(_triple)


class Net(nn.Module):
    @oomkit.auto_batch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()

    @oomkit.auto_batch
    @classmethod
    def make(cls) -> Net:
        return cls()


class Plain(nn.Module):
    """Its forward is decorated on an object: see wrapped()."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def wrapped(how: str) -> nn.Module:
    model = Plain()
    if how == "guard":
        model.forward = oomkit.guard()(model.forward)  # type: ignore[method-assign]
    else:
        model.forward = oomkit.auto_batch(  # type: ignore[method-assign]
            model.forward, label="mine", accumulation_steps=2
        )
    return model


def test_a_step_is_one() -> None:
    for step in (double, Net.forward, oomkit.auto_batch(lambda x: x), guarded):
        assert copy.copy(step) is step
        assert copy.deepcopy(step) is step
        assert copy.deepcopy({"step": step})["step"] is step


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_by_reference_where_the_name_leads_to_it(protocol: int) -> None:
    for step in (double, Net.forward):
        assert pickle.loads(pickle.dumps(step, protocol)) is step
    assert pickle.loads(pickle.dumps(Net.make, protocol)) == Net.make
    net = pickle.loads(pickle.dumps(Net(), protocol))
    assert pickle.loads(pickle.dumps(net.forward, protocol))(X).shape == (4, 1)


def test_by_its_parts_where_it_has_another_name() -> None:
    for step in (triple, oomkit.auto_batch(functools.partial(_triple), label="another name")):
        again = pickle.loads(pickle.dumps(step))
        assert again is not step and again.label == "another name"
        assert torch.equal(again(X), X * 3)
    assert len(pickle.loads(pickle.dumps(triple)).records) == 0
    again = pickle.loads(pickle.dumps(triple))
    again(X)
    assert again.records[-1].accumulation_steps == 2  # its options came along


def test_a_local_function_says_what_pickle_says_of_it() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(oomkit.auto_batch(local))


class CloudPickler(pickle.Pickler):
    """What cloudpickle does with a function that it does not send by its name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and obj.__module__ == "__main__":
            return _rebuilt, (obj.__name__,)
        return NotImplemented


def _rebuilt(name: str) -> Any:
    return _triple if name == "in_main" else None


def test_what_main_defines_goes_by_value_to_cloudpickle(monkeypatch: Any) -> None:
    source = "import io\ndef dumps(pickler, obj):\n    file = io.BytesIO()\n"
    source += "    pickler(file).dump(obj)\n    return file.getvalue()\n"
    cloud: dict[str, Any] = {}
    exec(compile(source, "site-packages/cloudpickle/cloudpickle.py", "exec"), cloud)

    def in_main(x: torch.Tensor) -> torch.Tensor:
        return x

    in_main.__module__, in_main.__qualname__ = "__main__", "in_main"
    step = oomkit.auto_batch(in_main, accumulation_steps=2)
    monkeypatch.setattr(sys.modules["__main__"], "in_main", step, raising=False)
    assert pickle.loads(pickle.dumps(step)) is step
    again = pickle.loads(cloud["dumps"](CloudPickler, step))
    assert torch.equal(again(X), X * 3)
    assert again.records[-1].accumulation_steps == 2


@pytest.mark.parametrize("how", ["auto_batch", "guard"])
@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "AveragedModel"])
def test_a_bound_step_goes_with_its_object(how: str, kind: str) -> None:
    """An average or a target network must not compute with the original's parameters."""
    model = wrapped(how)
    if kind == "deepcopy":
        other = copy.deepcopy(model)
    elif kind == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        other = torch.optim.swa_utils.AveragedModel(model).module
    expected = other.layer(X)  # type: ignore[operator]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(other(X), expected)
    assert not torch.equal(model(X), expected)
    other(X).sum().backward()
    assert model.layer.weight.grad is None  # type: ignore[union-attr]
    assert other.layer.weight.grad is not None  # type: ignore[union-attr]
    if how == "auto_batch":
        assert other.forward is not model.forward
        assert other.forward.label == "mine"  # type: ignore[attr-defined]
        assert other.forward.__wrapped__.__self__ is other  # type: ignore[attr-defined]
        assert other.forward.records[-1].accumulation_steps == 2  # type: ignore[attr-defined]


def test_a_deepcopy_that_begins_at_the_step() -> None:
    model = wrapped("auto_batch")
    step = copy.deepcopy(model.forward)
    other = step.__wrapped__.__self__  # type: ignore[attr-defined]
    assert other is not model and other.forward is step


def test_named_participants_go_with_a_copy() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 1).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.step = oomkit.auto_batch(self.run, model=self.model, optimizer=self.optimizer)

        def run(self, x: torch.Tensor) -> None:
            self.optimizer.zero_grad()
            self.model(x).pow(2).mean().backward()
            self.optimizer.step()

    first = Trainer()
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    second.step(X)
    with inject_oom(nth=1, phase="backward") as armed:
        third.step(X)
    assert armed.fired == 1
    assert torch.allclose(second.model.weight, third.model.weight, rtol=0, atol=1e-12)
    assert not torch.equal(first.model.weight, second.model.weight)
    assert first.model.weight.grad is None


def test_a_bound_method_of_a_class_decorated_forward() -> None:
    net = Net()
    other = copy.deepcopy({"net": net, "forward": net.forward})
    assert other["forward"].__self__ is other["net"]
    assert other["forward"] == other["net"].forward != net.forward


def _worker(step: Any, send: Any) -> None:
    with inject_oom(nth=1):
        result = step(X)
    send.send((result.tolist(), step.records[-1].accumulation_steps))


def test_a_spawned_worker_gets_the_step() -> None:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(double, send))
    worker.start()
    send.close()
    result, steps = receive.recv()
    worker.join()
    assert (result, steps) == ((X * 2).tolist(), 4)
