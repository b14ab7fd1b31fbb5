"""What libraries ask a function: names, signature, source, code, identity of bound methods."""

from __future__ import annotations

import asyncio
import functools
import inspect
import typing
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit._trainers.module_log import ModuleLog

X = torch.ones(4, 2)


def plain(x: torch.Tensor, scale: float = 2.0, *, times: int = 3) -> torch.Tensor:
    """Scale a batch."""
    return x * scale * times


plain.colour = "red"  # type: ignore[attr-defined]
DECORATORS = [oomkit.auto_batch, oomkit.guard()]


@pytest.fixture(params=DECORATORS, ids=["auto_batch", "guard"])
def decorate(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(
    "name",
    [
        "__name__",
        "__qualname__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__defaults__",
        "__kwdefaults__",
        "__code__",
        "__globals__",
        "__closure__",
        "colour",
    ],
)
def test_attributes_are_the_functions(decorate: Any, name: str) -> None:
    assert getattr(decorate(plain), name) is getattr(plain, name)


def test_inspect_sees_the_function(decorate: Any) -> None:
    step = decorate(plain)
    assert step.__wrapped__ is plain
    assert inspect.unwrap(step) is plain
    assert inspect.signature(step) == inspect.signature(plain)
    assert inspect.getfullargspec(step) == inspect.getfullargspec(plain)
    assert inspect.getsource(step) == inspect.getsource(plain)
    assert inspect.getdoc(step) == "Scale a batch."
    assert inspect.isroutine(step) and callable(step)
    assert not inspect.iscoroutinefunction(step) and not asyncio.iscoroutinefunction(step)
    assert typing.get_type_hints(step) == typing.get_type_hints(plain)
    assert functools.wraps(step)(lambda: None).__name__ == "plain"
    assert step.colour == "red"
    assert not hasattr(step, "missing")


class Thing:
    @oomkit.auto_batch
    def stepped(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * scale

    @oomkit.guard()
    def guarded(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * scale

    def plain(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * scale


@pytest.mark.parametrize("name", ["stepped", "guarded"])
def test_bound_methods_are_methods(name: str) -> None:
    thing, other = Thing(), Thing()
    bound = getattr(thing, name)
    assert inspect.ismethod(bound)
    assert bound.__self__ is thing and bound.__func__ is vars(Thing)[name]
    assert bound == getattr(thing, name) and hash(bound) == hash(getattr(thing, name))
    assert bound != getattr(other, name)
    assert inspect.signature(bound) == inspect.signature(thing.plain)
    assert inspect.signature(getattr(Thing, name)) == inspect.signature(Thing.plain)
    assert bound.__name__ == name and bound.__doc__ == "Scale."
    assert bound.__code__ is bound.__wrapped__.__code__
    assert weakref.WeakMethod(bound)() == bound
    assert vars(Thing)[name].__get__(None, Thing) is vars(Thing)[name]


def test_names_of_what_a_step_stands_for_do_not_lead_past_it() -> None:
    """accelerate rebuilds ``model.forward`` from ``__func__`` where there is one."""
    model = nn.Linear(2, 1)
    for step in (oomkit.auto_batch(model.forward), oomkit.guard()(model.forward)):
        assert not hasattr(step, "__func__") and not hasattr(step, "__self__")
        assert step.__code__ is nn.Linear.forward.__code__
        assert step.__name__ == "forward"


def test_setting_what_a_function_computes_with() -> None:
    def function(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    step = oomkit.auto_batch(function)
    step.__defaults__ = (5.0,)
    assert function.__defaults__ == (5.0,)
    assert torch.equal(step(X), X * 5)
    step.__name__ = "mine"
    assert (step.__name__, function.__name__) == ("mine", "function")
    with pytest.raises(AttributeError):
        step.label = "other"


# What Lightning 2.6 does with training_step and validation_step, in its own words.


class LightningModule(nn.Module):
    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def validation_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def test_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def log(self, name: str, value: Any) -> None:
        value.detach()  # the trainer's: nothing that the step leads to


LightningModule.__module__ = LightningModule.log.__module__ = "lightning.pytorch.core.module"


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    @oomkit.auto_batch
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.shared(batch)

    @oomkit.guard()
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def shared(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss


def is_overridden(method_name: str, instance: object, parent: type) -> bool:
    instance_attr = getattr(instance, method_name)
    if hasattr(instance_attr, "__wrapped__"):
        instance_attr = instance_attr.__wrapped__
    return bool(instance_attr.__code__ != getattr(parent, method_name).__code__)


def is_param_in_hook_signature(hook_fx: Any, param: str, explicit: bool, min_args: int) -> bool:
    if hasattr(hook_fx, "__wrapped__"):
        hook_fx = hook_fx.__wrapped__
    parameters = inspect.getfullargspec(hook_fx)
    args = parameters.args[1:]
    return (
        param in args
        or (not explicit and (parameters.varargs is not None))
        or len(args) >= min_args
    )


def test_lightnings_questions_get_the_functions_answers() -> None:
    lit = Lit()
    assert is_overridden("training_step", lit, LightningModule)
    assert is_overridden("validation_step", lit, LightningModule)
    assert not is_overridden("test_step", lit, LightningModule)
    for step in (lit.training_step, lit.validation_step):
        assert step.__code__ != LightningModule.training_step.__code__  # type: ignore[attr-defined]
        assert is_param_in_hook_signature(step, "batch_idx", False, 2)
        assert not is_param_in_hook_signature(step, "dataloader_iter", True, 9)
        assert list(inspect.signature(step).parameters) == ["batch", "batch_idx"]


def test_what_a_lightning_module_logs_while_split_is_said() -> None:
    """Its own collection weighs each micro-batch as a batch, or keeps the last one only."""
    lit = Lit()
    lit.training_step(X, 0).backward()
    whole = lit.layer.weight.grad.clone()  # type: ignore[union-attr]
    lit.zero_grad()
    step = oomkit.auto_batch(Lit.training_step.__wrapped__.__get__(lit), accumulation_steps=2)
    with pytest.warns(oomkit.OomkitWarning, match=r"runs once per micro-batch: .*self\.log\(\)"):
        step(X, 1).backward()
    assert torch.allclose(lit.layer.weight.grad, whole)  # type: ignore[arg-type]


def test_what_the_callback_logs_once_is_not_said() -> None:
    """oomkit.lightning.AutoBatch puts its own `log` into the module, which collects."""
    lit = Lit()
    log = ModuleLog(lit)
    lit.log = log  # type: ignore[method-assign]
    step = oomkit.auto_batch(Lit.training_step.__wrapped__.__get__(lit), accumulation_steps=2)
    log.steps.add(Lit.training_step.__wrapped__.__code__)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step(X, 1).backward()
    assert not [w for w in found if "self.log()" in str(w.message)]


COUNTS: list[int] = []


@oomkit.auto_batch
def _counts(x: torch.Tensor) -> torch.Tensor:
    COUNTS.append(len(x))
    return x


def test_what_a_decorated_function_inside_the_step_changes_is_said() -> None:
    step = oomkit.auto_batch(lambda x: _counts(x) + 1, accumulation_steps=2)
    with pytest.warns(oomkit.OomkitWarning, match=r"COUNTS"):
        step(X)
