"""Parameters that the step itself writes to, through `.data` or in place, in an attempt that
fails: they go back, and the replay begins with them; or the error names what stays changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit._code.writes import parameter_writes
from oomkit.testing import inject_oom
from plain import by_name

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

Step = Callable[[torch.Tensor], Any]
World = tuple[list[torch.Tensor], Step]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def _pair() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    online = _net()
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad_(False).add_(0.5)
    return online, target, torch.optim.SGD(online.parameters(), lr=0.1)


def _soft_update(target: nn.Module, source: nn.Module) -> None:
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.data.copy_(0.9 * t.data + 0.1 * s.data)


@torch.no_grad()
def _lerp(target: nn.Module, source: nn.Module) -> None:
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.lerp_(s, 0.1)


def _momentum(update: Callable[[nn.Module, nn.Module], None]) -> World:
    online, target, optimizer = _pair()

    def step(x: torch.Tensor) -> None:
        update(target, online)
        optimizer.zero_grad()
        (online(x) - target(x)).pow(2).mean().backward()
        optimizer.step()

    return [*online.parameters(), *target.parameters()], step


def _byol() -> World:
    return _momentum(_soft_update)


def _moco() -> World:
    return _momentum(_lerp)


def _add_and_subtract() -> World:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        for p in model.parameters():
            p.data.add_(1.0)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        for p in model.parameters():
            p.data.sub_(1.0)
        optimizer.step()

    return list(model.parameters()), step


def _binary_connect() -> World:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        full = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.copy_(p.data.sign())
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        for p, f in zip(model.parameters(), full, strict=True):
            p.data.copy_(f)
        optimizer.step()

    return list(model.parameters()), step


def _fgm() -> World:
    """An attack on the embedding: the weight is moved along its gradient and put back."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backup: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> None:
        for name, p in model.named_parameters():
            backup[name] = p.data.clone()
            p.data = p.data + 0.1 * p.data.sign()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        for name, p in model.named_parameters():
            p.data = backup[name]
        optimizer.step()

    return list(model.parameters()), step


def _mezo() -> World:
    model = _net()

    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            for scale in (1.0, -2.0, 1.0):
                for p in model.parameters():
                    p.data = p.data + scale * 0.01 * torch.ones_like(p)
                model(x).pow(2).mean()
            for p in model.parameters():
                p.data = p.data - 0.1

    return list(model.parameters()), step


def _max_norm() -> World:
    table = nn.Embedding(8, 4, max_norm=0.5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        table(x.long().abs().clamp(max=7)).pow(2).mean().backward()
        optimizer.step()

    return list(table.parameters()), step


class _Adapter(nn.Linear):
    """As peft's LoRA layers merge."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.delta = nn.Parameter(torch.randn(3, 6))

    def merge_adapter(self) -> None:
        self.weight.data += self.delta.data

    def unmerge_adapter(self) -> None:
        self.weight.data -= self.delta.data


def _merged() -> World:
    model = _Adapter()
    optimizer = torch.optim.SGD([model.bias], lr=0.1)

    def step(x: torch.Tensor) -> None:
        model.merge_adapter()
        model(x).pow(2).mean().backward()
        model.unmerge_adapter()
        optimizer.step()
        optimizer.zero_grad()

    return list(model.parameters()), step


class _SAM(torch.optim.Optimizer):
    """Climbs in one method and comes back in another, as sharpness-aware minimisation does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.clone()
                    p.add_(p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old"])
        self.base.step()


def _sharpness_aware() -> World:
    model = _net()
    optimizer = _SAM(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.first_step()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.second_step()

    return list(model.parameters()), step


WORLDS: dict[str, Callable[[], World]] = {
    "byol": _byol,
    "moco": _moco,
    "add and subtract": _add_and_subtract,
    "binary connect": _binary_connect,
    "fgm": _fgm,
    "mezo": _mezo,
    "max_norm": _max_norm,
    "merged": _merged,
    "sharpness aware": _sharpness_aware,
}


def _values(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def _same(a: list[torch.Tensor], b: list[torch.Tensor], atol: float = 0.0) -> bool:
    return all(torch.allclose(x, y, rtol=0, atol=atol) for x, y in zip(a, b, strict=True))


def _every_fault(
    make: Callable[[], World], batch: torch.Tensor, **options: Any
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor], BaseException | None]]:
    """(which, before, after, error) of a first call for each of its allocations that fails."""
    for nth in range(1, 200):
        torch.manual_seed(3)
        params, plain = make()
        step = oomkit.auto_batch(verify=False, **options)(plain)
        before = _values(params)
        error: BaseException | None = None
        with inject_oom(nth=nth) as fault:
            try:
                step(batch)
            except (oomkit.OomkitError, torch.OutOfMemoryError) as caught:
                error = caught
        if fault.fired == 0:
            return
        yield nth, before, params, error
    raise AssertionError("the faults do not end")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", WORLDS)
def test_a_failed_attempt_leaves_parameters_as_they_were_or_the_step_is_done(name: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(8, 6) * 4
    torch.manual_seed(3)
    whole, plain = WORLDS[name]()
    plain(x)
    seen = 0
    for nth, before, after, error in _every_fault(WORLDS[name], x):
        seen += 1
        if error is None or getattr(error, "committed", False):
            assert _same(whole, after, 1e-6), nth
        elif isinstance(error, oomkit.PartialUpdate):
            assert "step()" in str(error), (nth, str(error))
        else:
            assert _same(before, after), (nth, str(error))
            assert not getattr(error, "__notes__", []), nth
    assert seen > 5


@pytest.mark.parametrize("name", ["binary connect", "fgm"])
def test_what_is_put_back_in_the_step_is_split(name: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(8, 6)
    for nth, _, _, error in _every_fault(WORLDS[name], x):
        assert error is None or isinstance(error, oomkit.OutOfMemory), nth
        break


def _after_update() -> World:
    online, target, _ = _pair()
    optimizer = torch.optim.Adam(online.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (online(x) - target(x)).pow(2).mean().backward()
        optimizer.step()
        _soft_update(target, online)
        torch.ones(100).mul(2)

    return [*online.parameters(), *target.parameters()], step


def test_a_target_goes_back_with_the_update() -> None:
    torch.manual_seed(5)
    x = torch.randn(8, 6)
    torch.manual_seed(3)
    whole, plain = _after_update()
    plain(x)
    repeated = 0
    for nth, before, after, error in _every_fault(_after_update, x, optimizer_safety="copy"):
        if error is None:  # in the optimizer's step(): repeated whole
            assert _same(whole, after), nth
            repeated += 1
            continue
        assert isinstance(error, oomkit.SplitError), nth  # the target is the user's to hold back
        assert "was changed" in str(error)
        assert _same(before, after), nth
        assert not getattr(error, "__notes__", []), nth
    assert repeated > 0


def _hidden_update() -> World:
    """The same in code that nobody can read."""
    online, target, optimizer = _pair()
    write = [getattr(torch.Tensor, "add" + "_"), getattr]

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (online(x) - target(x)).pow(2).mean().backward()
        optimizer.step()
        for t in target.parameters():
            write[0](write[1](t, "da" + "ta"), 1.0)
        torch.ones(100).mul(2)

    return [*online.parameters(), *target.parameters()], step


def test_a_target_that_is_written_out_of_sight_goes_back_with_the_update() -> None:
    torch.manual_seed(5)
    x = torch.randn(8, 6)
    for nth, before, after, error in _every_fault(_hidden_update, x, optimizer_safety="copy"):
        assert error is None or _same(before, after), (nth, str(error))


def test_out_of_sight_what_stays_changed_is_named_from_the_second_failure_on() -> None:
    torch.manual_seed(5)
    model = _net()
    write = [getattr(torch.Tensor, "add" + "_"), getattr]
    fail = [False]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()
        if fail[0]:
            for p in model.parameters():
                write[0](write[1](p, "da" + "ta"), 1.0)
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 MiB")

    x = torch.randn(8, 6)
    with inject_oom(nth=2):
        step(x)
    fail[0] = True
    before = _values(list(model.parameters()))
    with pytest.raises(oomkit.OomkitError) as caught:
        step(x)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert _same(before, list(model.parameters())) or (
        "parameter '0.weight' of Sequential (and 3 more)" in text and "stays changed" in text
    )
    assert "as before the step" not in text


def test_where_no_copy_can_be_taken_it_is_not_said_that_nothing_changed() -> None:
    model = nn.ModuleDict({"net": _net(), "far": nn.Linear(2, 2, device="meta")})

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        for p in model.parameters():
            p.data.mul_(0.9)
        model["net"](x).pow(2).mean().backward()

    with inject_oom(nth=8), pytest.raises(oomkit.PartialUpdate) as caught:
        step(torch.randn(8, 6))
    assert "'far.weight' of ModuleDict (and 1 more) may have been changed" in str(caught.value)
    assert "(step(), line " in str(caught.value)


# --- what the code shows ---


_TABLE = dict(by_name.BACKWARDS)
_LIST = list(by_name.BACKWARDS.values())


class _Owner:
    def __init__(self) -> None:
        self.model, self.target = _net(), _net()
        self.data = [1]
        self.total = torch.zeros(())
        self.kind = "attack"

    def of_a_module(self, x: torch.Tensor) -> None:
        by_name.attack(self.model, x)

    def of_a_table(self, x: torch.Tensor) -> None:
        by_name.BACKWARDS[self.kind](self.model, x)

    def of_a_table_of_its_own(self, x: torch.Tensor) -> None:
        _TABLE["attack" if len(x) > 1 else "plain"](self.model, x)

    def of_a_list(self, x: torch.Tensor) -> None:
        for each in _LIST:
            each(self.model, x)

    def _update(self) -> None:
        for t, s in zip(self.target.parameters(), self.model.parameters(), strict=True):
            t.data.mul_(0.9).add_(s.data, alpha=0.1)

    def shown_in_a_method(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()
        self._update()

    def attribute(self, x: torch.Tensor) -> None:
        self.model[0].weight.data[0] = 0.0

    def augmented(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.1 * p

    def foreach(self, x: torch.Tensor) -> None:
        torch._foreach_lerp_(list(self.target.parameters()), list(self.model.parameters()), 0.1)

    def loaded(self, x: torch.Tensor) -> None:
        self.target.load_state_dict(self.model.state_dict())

    def detached(self, x: torch.Tensor) -> None:
        for p in self.model.parameters():
            p.detach().clamp_(-1, 1)

    def ordinary(self, x: torch.Tensor) -> float:
        loss = self.model(x).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.data.clamp_(-1, 1)
                p.grad.mul_(0.5)
        self.total.add_(loss.data)
        x.mul_(2)
        self.data = [*self.data, 1]
        return float(loss.data)


@pytest.mark.parametrize(
    "name",
    [
        "shown_in_a_method",
        "attribute",
        "augmented",
        "foreach",
        "loaded",
        "detached",
        "of_a_module",
        "of_a_table",
        "of_a_table_of_its_own",
        "of_a_list",
    ],
)
def test_the_code_shows_writes(name: str) -> None:
    owner = _Owner()
    found = parameter_writes(getattr(owner, name), (torch.ones(2, 6),), {}, _weak(owner.model))
    assert found is not None
    assert found.hidden == (name not in ("augmented", "foreach", "loaded", "detached"))
    assert ", line " in found.where


def test_an_ordinary_step_shows_none() -> None:
    owner = _Owner()
    assert parameter_writes(owner.ordinary, (torch.ones(2, 6),), {}, _weak(owner.model)) is None


def test_of_a_table_of_functions_those_that_are_not_named_do_not_count() -> None:
    """A registry with an attack in it must not cost each step a copy of its model."""
    owner = _Owner()
    owner.kind = "plain"
    assert parameter_writes(owner.of_a_table, (torch.ones(2, 6),), {}, _weak(owner.model)) is None


def _weak(model: nn.Module) -> list[Any]:
    import weakref

    return [weakref.ref(module) for module in model.modules()]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("verify", [None, False])
def test_shapes_that_a_failed_call_gave_are_told(verify: bool | None, phase: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if verify is None else {"verify": verify}

    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    x = torch.randn(8, 3)
    with (
        inject_oom(nth=4 if phase == "forward" else 1, phase=phase),
        pytest.raises(oomkit.PartialUpdate, match="run the model once on a few rows before"),
    ):
        step(x)
    for fails in (False, True):  # it has them now
        with inject_oom(nth=1, phase="backward") if fails else nullcontext():
            step(x)
