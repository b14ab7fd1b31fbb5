"""Places of plain state: where they are looked for, what is kept and what is said."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import inject_oom
from plain import by_name

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore:oomkit. the batch of"),
]  # runs are counted

SEED = 5
total = 0
stats: dict[str, Any] = {"n": 0}


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(SEED))


def _fail(step: Callable[..., Any], *args: Any, phase: str = "backward", nth: int = 3) -> None:
    """One call that runs out of memory once."""
    with inject_oom(nth=nth, phase=phase) as armed:  # type: ignore[arg-type]
        step(*args)
    assert armed.fired == 1


class Box:
    pass


class Klass:
    count = 0
    history: list[int] = []  # noqa: RUF012


def _raised(model: nn.Module, x: torch.Tensor) -> None:
    model(x).pow(2).mean().backward()


def test_globals_class_attributes_and_variables_of_enclosing_functions() -> None:
    global total
    total, Klass.count, Klass.history, stats["n"] = 0, 0, [], 0
    model, _ = _model()
    seen = 0
    later: int

    def step(x: torch.Tensor) -> None:
        global total
        nonlocal seen, later
        total += len(x)
        seen += len(x)
        later = seen
        Klass.count += len(x)
        Klass.history.append(len(x))
        stats["n"] += len(x)
        _raised(model, x)

    _fail(oomkit.auto_batch(step), _x())
    assert (total, seen, later, Klass.count, Klass.history) == (8, 8, 8, 8, [4, 4])
    assert stats == {"n": 8}


@pytest.mark.parametrize("before", [True, False])
def test_a_counter_of_calls_under_is_last_counts_calls(before: bool) -> None:
    model, optimizer = _model()
    calls = 0

    @oomkit.auto_batch(optimizer_safety="copy")
    def step(x: torch.Tensor) -> None:
        nonlocal calls
        optimizer.zero_grad()
        if before and oomkit.current().is_last:
            calls += 1
        _raised(model, x)
        optimizer.step()
        if not before and oomkit.current().is_last:
            calls += 1

    step(_x())
    _fail(step, _x(), nth=4)
    step(_x())
    _fail(step, _x(), nth=1, phase="optimizer")
    step(_x())
    assert calls == 5


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_moving_average_kept_as_tensors_moves_once(large: bool, in_place: bool) -> None:
    """After the update, where `optimizer_safety="copy"` repeats everything."""
    torch.manual_seed(SEED)
    model = nn.Linear(4, 20_000 if large else 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: value.clone() for name, value in shadow.items()}

    def plain(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        _raised(model, batch)
        optimizer.step()
        if oomkit.current().is_last:
            for name, p in model.named_parameters():
                if in_place:
                    shadow[name].mul_(0.5).add_(p.detach(), alpha=0.5)
                else:
                    shadow[name] = 0.5 * shadow[name] + 0.5 * p.detach()
            torch.empty(3)

    def follow() -> None:
        for name, p in model.named_parameters():
            expected[name] = 0.5 * expected[name] + 0.5 * p.detach()

    x = _x()
    plain(x)
    follow()
    count = 0
    while True:  # after each allocation of the update and of the average in turn
        count += 1
        step = oomkit.auto_batch(plain, optimizer_safety="copy")
        with inject_oom(nth=count) as armed:
            step(x)
        follow()
        for name, value in expected.items():
            assert torch.allclose(shadow[name], value, rtol=1e-4, atol=1e-6), (count, name)
        if armed.fired == 0:
            break
    assert count > 20


class Centre(nn.Module):
    """DINO's: a tensor that is no buffer, in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.centre = torch.zeros(4)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) - self.centre
        if self.training and oomkit.current().is_last:
            self.centre = self.centre * 0.9 + out.detach().mean(0) * 0.1
            self.rows += 1
        return out


@pytest.mark.parametrize("returned", [False, True])
def test_a_tensor_of_a_part_of_the_model_is_that_of_an_undisturbed_run(returned: bool) -> None:
    def run(fail: bool) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(4, 4), Centre())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            if not returned:
                loss.backward()
            return loss

        decorated = oomkit.auto_batch(step, accumulation_steps=1 if fail or returned else 2)

        def call() -> None:
            loss = decorated(_x())
            if returned:
                loss.backward()

        if fail:
            _fail(call)
        else:
            call()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return model[1].centre, model[1].rows, grads

    one, other = run(False), run(True)
    assert one[1] == other[1] == 1
    assert torch.allclose(one[0], other[0])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[2], other[2], strict=True))


class Metric(nn.Module):
    """torchmetrics', by what it is known by."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "values": []}
        for name, value in self._defaults.items():
            setattr(self, name, copy.deepcopy(value))
        self._update_count = 0

    def __getattr__(self, name: str) -> Any:
        if name == "update":
            return functools.partial(Metric._update, self)
        return super().__getattr__(name)

    def _update(self, x: torch.Tensor) -> None:
        exec("self.total += len(x); self.values.append(x); self._update_count += 1")


@pytest.mark.parametrize("kind", ["attribute", "list", "dict", "module"])
def test_states_of_a_metric_count_rows_once(kind: str) -> None:
    model, _ = _model()
    metric = Metric()
    group: Any = {
        "attribute": metric,
        "list": [metric],
        "dict": {"a": metric},
        "module": nn.ModuleDict({"a": metric}),
    }[kind]

    def step(x: torch.Tensor) -> None:
        if kind == "attribute":
            group.update(x)
        elif kind == "list":
            for one in group:
                one.update(x)
        else:
            group["a"].update(x)
        _raised(model, x)

    state = metric.total
    _fail(oomkit.auto_batch(step), _x())
    assert metric.total is state and metric.total.item() == 8
    assert [len(v) for v in metric.values] == [4, 4] and metric._update_count == 2


def test_what_the_step_does_not_store_to_is_left_alone() -> None:
    """A step without side effects has no table, and reading makes none."""
    model, optimizer = _model()
    config = {"clip": 1.0, "names": ["a"]}
    weights = torch.ones(2)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = (model(x).pow(2) * weights).mean() * config["clip"]
        for name in config["names"]:
            loss = loss * len(name)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.param_groups[0]["lr"] *= 0.5
        model.train()
        optimizer.step()

    from oomkit._code.plain_state import places

    assert places(step, (_x(),), {}, False, []) in (None, ((), ()))


def test_what_is_replaced_is_not_kept_alive() -> None:
    """The outputs of the call before, with their graph, and a large tensor."""
    model, _ = _model()
    holder = Box()
    died: list[bool] = []
    note = died.append  # a method that is no name's: outside of what is undone

    def step(x: torch.Tensor) -> None:
        old = [weakref.ref(getattr(holder, n)) for n in ("out", "large") if hasattr(holder, n)]
        holder.out = model(x)
        holder.large = torch.zeros(100_000)
        for ref in old:
            note(ref() is None)
        holder.out.sum().backward()

    decorated = oomkit.auto_batch(step)
    decorated(_x())
    decorated(_x())
    assert died == [True, True]
    shape = holder.out.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fail(decorated, _x())
    assert holder.out.shape == (4, *shape[1:])


def test_what_is_too_large_is_said_once_and_copied_from_then_on() -> None:
    model, _ = _model()
    large = torch.zeros(50_000)
    holder = {"t": large}

    def step(x: torch.Tensor) -> None:
        holder["t"].add_(len(x))
        _raised(model, x)

    decorated = oomkit.auto_batch(step)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", oomkit.OomkitWarning)
        _fail(decorated, _x())
    told = any("its change of holder could not be undone" in str(w.message) for w in said)
    # Once a step of the process has met an error, steps made later copy from the first call on.
    assert large[0] == (16 if told else 8)
    large.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", oomkit.OomkitWarning)
        with oomkit.testing.force_slices([8]):
            _fail(decorated, _x())
    assert large.unique().tolist() == [8]


def test_a_long_dictionary_that_grew_is_said() -> None:
    model, _ = _model()
    cache = {i: i for i in range(2000)}

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        cache[len(cache)] = len(x)
        _raised(model, x)

    with pytest.warns(oomkit.OomkitWarning, match="its change of cache could not be undone"):
        _fail(step, _x())
    assert len(cache) == 2003


def test_places_are_what_they_are_at_each_call() -> None:
    """A place may have become anything else since it was looked for."""
    model, _ = _model()
    box = Box()
    box.values = [torch.zeros(1), [0]]

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if isinstance(box.values, list):
            for value in box.values:
                value += [1] if isinstance(value, list) else 1
            box.values[1].append(2)
        _raised(model, x)

    step(_x())
    for value in (3, None, {"a": 1}, (1, [2]), torch.zeros(2), np.zeros(2), "text", Box()):
        box.values = value
        _fail(step, _x())
        assert box.values is value
        with oomkit.testing.force_slices([8]):
            step(_x())
    box.values = [torch.zeros(1), [0]]
    with oomkit.testing.force_slices([8]):
        _fail(step, _x())
    count = step.records[-1].accumulation_steps
    assert (box.values[0].item(), box.values[1]) == (count, [0] + [1, 2] * count)


def test_a_call_that_fails_for_good_leaves_nothing() -> None:
    model, _ = _model()
    box = Box()
    box.n, box.seen = 0, []

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        box.n += len(x)
        box.seen.append(len(x))
        _raised(model, x)

    step(_x())
    with inject_oom(nth=1, times=None, phase="backward"), pytest.raises(oomkit.OutOfMemory):
        step(_x())
    assert (box.n, box.seen) == (8, [8])
    with pytest.raises(TypeError):
        step(_x(), 3)
    assert (box.n, box.seen) == (8, [8])


def test_what_a_step_builds_when_it_first_runs_stays() -> None:
    box = Box()
    box.model = None

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if box.model is None:
            box.model = nn.Linear(4, 2)
        _raised(box.model, x)

    _fail(step, _x(), nth=2)
    assert box.model.weight.grad is not None


def test_a_large_model_does_not_crowd_out_what_the_step_calls_besides() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.linear(x)
            return out

    model = nn.Sequential(*(Layer() for _ in range(400)))
    box = Box()
    box.n = 0

    def count(x: torch.Tensor) -> None:
        box.n += len(x)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        _raised(model, x * 0)
        count(x)

    with inject_oom(nth=20, phase="backward"):
        step(_x())
    assert box.n == 8


def test_functions_out_of_a_table_of_another_module() -> None:
    model, _ = _model()
    box = Box()
    box.kind = "remember"

    @oomkit.auto_batch(min_micro_batch=8, ladder=())
    def step(x: torch.Tensor) -> None:
        by_name.FEATURES[box.kind](model(x), box).pow(2).mean().backward()

    with inject_oom(nth=3, phase="backward"), pytest.raises(oomkit.OutOfMemory):
        step(_x())
    assert not hasattr(box, "past")


class Temperature:
    def __init__(self) -> None:
        self.value = 1.0

    def cool(self) -> None:
        self.value *= 0.5


class Lazy:
    """Makes what it stores to in its first call."""

    temperature: Temperature | None = None

    def __init__(self) -> None:
        self.model, _ = _model()
        self.history: dict[str, list[int]] = defaultdict(list)

    def step(self, x: torch.Tensor) -> None:
        if self.temperature is None:
            self.temperature = Temperature()
        self.temperature.cool()
        self.history["rows"].append(len(x))
        _raised(self.model, x)


def test_what_the_first_call_makes_goes_back_at_the_first_failure() -> None:
    lazy = Lazy()
    step = oomkit.auto_batch(lazy.step)
    step(_x(1))
    step(_x(1))
    _fail(step, _x(1))
    assert lazy.temperature is not None and lazy.temperature.value == 0.125
    assert lazy.history == {"rows": [1, 1, 1]}


class Activity:
    """What hooks collect in the forward, and the step takes."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.mean = torch.zeros(())

    def before(self, module: nn.Module, given: Any) -> None:
        self.mean += 1

    def __call__(self, module: nn.Module, given: Any, out: torch.Tensor) -> None:
        self.values.append(out.square().mean())

    def take(self) -> torch.Tensor:
        total = sum(self.values, start=torch.zeros(()))
        self.values = []
        return total


def test_what_hooks_of_the_parts_of_a_model_store_goes_back() -> None:
    model, _ = _model()
    activity, seen = Activity(), [0]

    def count(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        seen[0] += 1

    part = model[1]  # type: ignore[index]
    part.register_forward_hook(activity)
    part.register_forward_pre_hook(activity.before)
    part.register_forward_hook(count)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        (model(x).pow(2).mean() + activity.take()).backward()

    step(_x(1))
    _fail(step, _x(1))
    _fail(step, _x(1), phase="forward", nth=4)
    assert (seen[0], activity.mean.item(), activity.values) == (3, 3.0, [])


def _scale(by: float, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(by)


def _shift(first: Box, by: float, **options: Any) -> None:
    first.shifted = by


A, B, BOX, REST = torch.ones(2), torch.ones(2), Box(), (torch.ones(2),)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda x: torch._foreach_add_([A, B], 1.0), {"A", "B"}),
        (lambda x: torch._foreach_add_((A, B), 1.0), {"A", "B"}),
        (lambda x: torch._foreach_add_(*([A, B], 1.0)), {"A", "B"}),
        (lambda x: torch._foreach_add_([A, *REST], 1.0), {"A", "REST"}),
        (lambda x: torch.aminmax(x, out=(A, B)), {"A", "B"}),
        (lambda x: _scale(*(2.0, A, B)), set()),  # of those behind a star no name is known
        (lambda x: _shift(*(BOX, 1.0)), {"BOX.shifted"}),
        (lambda x: _shift(BOX, 1.0, **{"more": x}), {"BOX.shifted"}),
        (lambda x: _shift(BOX, *x), {"BOX.shifted"}),
    ],
)
def test_what_a_call_is_given_in_a_tuple_or_list(
    step: Callable[..., Any], expected: set[str]
) -> None:
    from oomkit._code.plain_state import places

    found = places(step, (_x(),), {}, False, [])
    assert {name for *_, what, name in (found or ((),))[0] if what} == expected


class Hook:
    """What a step calls without a name of its own."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.update(x)

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return x


@pytest.mark.parametrize("called", ["object", "method", "function"])
@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, deque])
def test_objects_in_a_container_that_is_looped_over(kind: type, called: str) -> None:
    hook = Hook()
    run = {"object": hook, "method": hook, "function": lambda x: hook.update(x)}[called]
    hooks = kind([run])
    model, optimizer = _model()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for each in hooks:
            x = each.update(x) if called == "method" else each(x)
        model(x).pow(2).mean().backward()
        optimizer.step()

    _fail(step, _x())
    assert hook.rows == 8
