"""What is noted of an optimizer when its step() begins: whole or not at all, put back in order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from nomemory import fork
from nomemory.fault import MISSING, Fault, Outcome, suffer

import oomkit
from oomkit._code import objects
from oomkit.testing import inject_oom

pytestmark = [
    pytest.mark.no_proof,
    pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
]  # runs are counted


def tower():
    """(its parameters, a step that takes what to run instead of the update)."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(40))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    around = [lambda update: update()]

    @oomkit.auto_batch(verify=False)
    def step(x):
        optimizer.zero_grad()
        for layer in layers:
            x = torch.tanh(layer(x)) + x
        x.square().mean().backward()
        around[-1](optimizer.step)

    def call(how=lambda update: update()):
        around.append(how)
        step(x)
        return torch.cat([p.detach().flatten() for p in layers.parameters()])

    return call


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_mark_that_there_was_no_memory_for_takes_no_state_away():
    def work(nth):
        call = tower()
        call()
        call()
        if nth is None:
            return call()
        failed: Seen[Any] = Seen()

        def once(update):
            if failed:
                return update()
            failed.append(nth)
            _, error = suffer(update, Fault(nth), Outcome())
            if error is not None:
                raise error
            return None

        return call(once)

    want = fork.apart(lambda: work(None).tolist(), fork.CALM)
    assert not want.died
    for nth in range(1, 15):  # the copies of groups and of state, and the room for them
        found = fork.apart(lambda nth=nth: work(nth).tolist(), fork.CALM)
        assert not found.died, f"allocation {nth}: {found.died}"
        assert torch.allclose(
            torch.tensor(found.value), torch.tensor(want.value), rtol=0, atol=1e-6
        ), f"allocation {nth}"


class Historic(torch.optim.lr_scheduler.LRScheduler):
    """Counts in a list, in place."""

    def __init__(self, optimizer):
        self.history: Seen[Any] = Seen()
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * 0.9 ** len(self.history) for lr in self.base_lrs]

    def step(self, epoch=None):
        self.history.append(self.last_epoch)
        super().step()


@pytest.mark.parametrize("nth", [None, 1, 2])
def test_a_scheduler_that_counts_in_place_goes_back_to_its_copy(nth):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Historic(optimizer)
    calls: Seen[Any] = Seen()

    @oomkit.auto_batch(optimizer_safety="copy", verify=False)
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        calls.append(len(x))
        if len(calls) == nth:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(3):
        step(torch.ones(8, 4))
    assert scheduler.history == [-1, 0, 1, 2] and scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)


class Tidy(torch.amp.GradScaler):
    """Lends the optimizer an attribute and takes it away again, whatever happened."""

    def step(self, optimizer, *args, **kwargs):
        optimizer.lent = 1
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer.lent


@pytest.mark.parametrize("safety", ["predict", "copy", "parts"])
@pytest.mark.parametrize("times", [1, 2])
def test_what_stands_around_a_failed_step_finds_what_it_has_set(times, safety):
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(4, 2), Tidy("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False, optimizer_safety=safety)
    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with inject_oom(nth=1, times=times, phase="optimizer") as injected:
        step(torch.ones(4, 4))
    assert injected.fired == times and not hasattr(optimizer, "lent")
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_is_tried_again_counts_once(times):
    """At once (the first time) or with the whole call (the second)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    optimizer.n = 0

    def count(optimizer, *_):
        optimizer.n += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / optimizer.n

    optimizer.register_step_pre_hook(count)

    @oomkit.auto_batch(verify=False)
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with inject_oom(phase="optimizer", nth=1, times=times) as injected:
        step(torch.ones(4, 4))
    step(torch.ones(4, 4))
    assert injected.fired == times
    assert optimizer.n == 2 and optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_half_of_the_copies_are_not_taken_for_all():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls: Seen[int] = Seen()
    caught: Seen[BaseException] = Seen()

    @oomkit.auto_batch(verify=False, optimizer_safety="copy")
    def step(x):
        calls.append(len(x))
        optimizer.zero_grad()
        model(x).sum().backward()
        if len(calls) != 2:
            optimizer.step()
            return
        with inject_oom(phase="recovery", nth=2):
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                caught.append(error)
        optimizer.step()
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(2):
        step(torch.ones(4, 4))
    assert len(caught) == 1 and calls == [4, 4, 2, 2]


def test_groups_that_are_no_list_are_no_reason_to_fail():
    class Tuple(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.param_groups = tuple(self.param_groups)

    model = torch.nn.Linear(4, 2)
    optimizer = Tuple(model.parameters())
    before = model.weight.detach().clone()

    @oomkit.auto_batch(verify=False)
    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(torch.ones(4, 4))
    assert not torch.equal(before, model.weight)


def test_a_callable_that_answers_in_its_own_words_is_a_step_like_any_other():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Step:
        def __init__(self):
            self.known = {"a": 1}

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return object.__getattribute__(self, "known")[name]  # KeyError

        def __call__(self, x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            return len(x)

    assert oomkit.auto_batch(Step(), label="step")(torch.ones(4, 4)) == 4


def test_keys_that_are_no_names_are_not_compared():
    class Key:
        def __hash__(self):
            return hash("a")

        def __eq__(self, other):
            raise ZeroDivisionError

    class Holder:
        pass

    holder = Holder()
    vars(holder)[Key()] = 1
    holder.b = 0
    assert objects.own_attributes(holder, frozenset({"a"})) == [("b", 0)]


def parameters(count):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_steps_that_a_mark_brings_about_have_marks_of_their_own():
    """The room for marks is 2 at first: the nested ones take it."""
    own = parameters(3)
    nested = [torch.optim.SGD([p], 0.1) for p in own[:2]]
    armed: Seen[Any] = Seen()

    class Curious(torch.optim.SGD):
        @property
        def param_groups(self):
            if armed:
                armed.clear()
                for optimizer in nested:
                    optimizer.step()
            return self.__dict__["groups"]

        @param_groups.setter
        def param_groups(self, value):
            self.__dict__["groups"] = value

    last = Curious(own[2:], 0.1)

    @oomkit.auto_batch
    def step(x):
        for optimizer in (*nested, last):
            optimizer.zero_grad()
        (sum(p.sum() for p in own) * x.sum()).backward()
        armed.append(1)
        last.step()

    for _ in range(3):
        step(torch.ones(4, 2))
    assert all(torch.allclose(p, torch.full((2,), 1 - 3 * 0.8)) for p in own)


def test_finalisers_of_what_goes_may_step_others():
    own = parameters(3)
    others = [torch.optim.SGD([p], 0.1) for p in own[1:]]
    calls: Seen[Any] = Seen()

    class Last:
        def __del__(self):
            for optimizer in others:
                optimizer.step()

    class Leaving(torch.optim.SGD):
        def step(self):
            calls.append(1)
            if len(calls) == 1:
                self.thing = Last()
                raise torch.OutOfMemoryError("out of memory")
            return super().step()

    Leaving.__module__ = "torch.optim.leaving"  # its versions tell whether anything moved
    optimizer = Leaving(own[:1], 0.1)

    @oomkit.auto_batch(verify=False)
    def step(x):
        for one in (optimizer, *others):
            one.zero_grad()
        (sum(p.sum() for p in own) * x.sum()).backward()
        optimizer.step()

    for _ in range(3):
        step(torch.ones(4, 2))
    assert torch.allclose(own[0], torch.full((2,), 1 - 3 * 0.8)) and not hasattr(optimizer, "thing")


def test_a_step_that_works_after_it_has_failed_keeps_what_it_has_set():
    inside, outside = parameters(2)
    fails = [1, 1]

    class Inner(torch.optim.SGD):
        count = 0

        def step(self):
            self.count = self.count + 1
            if fails:
                fails.pop()
                raise torch.OutOfMemoryError("out of memory")
            return super().step()

    Inner.__module__ = "torch.optim.inner"  # its versions tell whether anything moved
    inner = Inner([inside], 0.1)

    class Outer(torch.optim.SGD):
        def step(self):
            try:
                inner.step()
            except torch.OutOfMemoryError:
                pass
            inner.step()
            raise ValueError("mine")

    outer = Outer([outside], 0.1)

    @oomkit.auto_batch(verify=False)
    def step(x):
        inner.zero_grad()
        outer.zero_grad()
        ((inside + outside).sum() * x.sum()).backward()
        outer.step()

    with pytest.raises(ValueError, match="mine"):
        step(torch.ones(4, 2))
    assert not fails and inner.count >= 1 and not torch.equal(inside, torch.ones(2))
