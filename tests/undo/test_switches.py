"""train(), eval() and requires_grad inside a step: every attempt and every micro-batch
begins as the call began, and what the last one leaves stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

Step = Callable[[torch.Tensor, torch.Tensor], Any]


class Net(nn.Module):
    """A forward that is another one in eval mode, without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x).tanh())
        return 3 * out if self.training else out


class World:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = Net().double()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.x = torch.randn(6, 5, dtype=torch.float64)
        self.y = torch.randn(6, 3, dtype=torch.float64)

    def state(self) -> list[Any]:
        flags = [p.requires_grad for p in self.net.parameters()]
        modes = [m.training for m in self.net.modules()]
        values = [v.detach().clone() for v in self.net.parameters()]
        return [flags, modes, *values]


def _same(a: list[Any], b: list[Any]) -> bool:
    close = all(torch.allclose(x, y, rtol=1e-12, atol=0) for x, y in zip(a[2:], b[2:], strict=True))
    return a[:2] == b[:2] and close


def _validates(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.opt.zero_grad()
        F.mse_loss(w.net(x), y).backward()
        w.net.eval()
        with torch.no_grad():
            w.net(x)
        w.net.train()
        w.opt.step()

    return step


def _freezes(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.opt.zero_grad()
        F.mse_loss(w.net(x), y).backward()
        for p in w.net.inner.parameters():
            p.requires_grad = False
        w.net(x).pow(2).mean().backward()
        w.net.inner.requires_grad_(True)
        w.opt.step()

    return step


def _ends_in_eval(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.opt.zero_grad()
        F.mse_loss(w.net(x), y).backward()
        w.opt.step()
        w.net.eval()

    return step


def _ends_frozen(w: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        w.opt.zero_grad()
        F.mse_loss(w.net(x), y).backward()
        w.opt.step()
        w.net.inner.requires_grad_(False)

    return step


MAKERS = [_validates, _freezes, _ends_in_eval, _ends_frozen]


@pytest.mark.parametrize("make", MAKERS)
def test_a_replay_begins_as_the_call_began(make: Callable[[World], Step]) -> None:
    plain = World()
    make(plain)(plain.x, plain.y)
    for nth in range(1, 80):
        w = World()
        with inject_oom(nth=nth) as fault:
            oomkit.auto_batch(make(w))(w.x, w.y)
        assert _same(w.state(), plain.state()), nth
        if not fault.fired:
            return
    raise AssertionError("the step has more allocations than were tried")


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("make", MAKERS)
def test_a_micro_batch_begins_as_the_call_began(make: Callable[[World], Step], k: int) -> None:
    plain, w = World(), World()
    make(plain)(plain.x, plain.y)
    oomkit.auto_batch(make(w), accumulation_steps=k)(w.x, w.y)
    assert _same(w.state(), plain.state())


@pytest.mark.parametrize("switch", ["eval", "freeze", "none"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_replay_of_a_returned_loss_begins_as_the_call_began(switch: str, phase: str) -> None:
    def run(w: World, decorate: Callable[[Step], Step], nth: int) -> list[Any]:
        @decorate
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = F.mse_loss(w.net(x), y)
            if switch == "eval":
                w.net.eval()
            elif switch == "freeze":
                w.net.outer.requires_grad_(False)
                first = first + w.net(x).pow(2).mean()
                w.net.outer.requires_grad_(True)
            return first

        with inject_oom(nth=nth, phase=phase) as fault:
            loss_of(w.x, w.y).backward()
        assert fault.fired == (nth == 2)
        return [*w.state(), *(p.grad for p in w.net.parameters())]

    plain = run(World(), lambda f: f, 1000)
    assert _same(run(World(), oomkit.auto_batch, 2), plain)


def test_a_parameter_frozen_between_the_call_and_its_backward_is_refused() -> None:
    w = World()

    @oomkit.auto_batch
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(w.net(x), y)

    loss = loss_of(w.x, w.y)
    w.net.inner.requires_grad_(False)
    with inject_oom(nth=1, phase="backward"):
        with pytest.raises(oomkit.OutOfMemory, match="parameters were frozen or unfrozen"):
            loss.backward()
    assert [p.requires_grad for p in w.net.parameters()] == [False, False, True, True]
    assert all(p.grad is None for p in w.net.parameters())


@pytest.mark.parametrize("rows", [False, True])
def test_it_is_refused_where_the_call_was_split(rows: bool) -> None:
    w = World()

    @oomkit.auto_batch(accumulation_steps=2)
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(w.net(x), y, reduction="none").mean(1)
        w.net.inner.requires_grad_(False)
        return loss if rows else loss.mean()

    loss = loss_of(w.x, w.y).mean()
    w.net.inner.requires_grad_(True)
    with pytest.raises(oomkit.OutOfMemory, match="parameters were frozen or unfrozen"):
        loss.backward()
    assert all(p.grad is None and p.requires_grad for p in w.net.parameters())


def test_a_refusal_leaves_the_mode_as_it_was() -> None:
    w = World()

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(w.net(x), y).backward()
        w.opt.step()
        w.net.eval()
        w.net(x)

    before = w.state()
    with pytest.raises(oomkit.SplitError, match="is called at"):
        step(w.x, w.y)
    assert _same(w.state(), before) and w.net.training


def test_a_switch_keeps_no_module_alive() -> None:
    import gc
    import weakref

    w = World()
    loss = oomkit.auto_batch(lambda x, y: F.mse_loss(w.net.eval()(x), y))(w.x, w.y)
    gone = weakref.ref(w.net)
    del loss, w.net, w.opt
    gc.collect()
    assert gone() is None


@pytest.mark.no_proof  # runs are counted
@pytest.mark.parametrize("lost", ["grad", "autocast"])
@pytest.mark.parametrize("retried", [True, False])
def test_modes_that_a_failed_attempt_did_not_leave_come_back(lost: str, retried: bool) -> None:
    """torch's no_grad() and autocast() are Python: without memory they are not left."""
    seen: Seen[tuple[bool, bool]] = Seen()

    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    @oomkit.auto_batch(min_micro_batch=1 if retried else 4, ladder=())
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes())
        if len(seen) == 1:
            if lost == "grad":
                torch._C._set_grad_enabled(False)
            else:
                torch.set_autocast_enabled("cpu", True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x + 1

    try:
        if retried:
            assert evaluate(torch.zeros(4, 1)).tolist() == [[1.0]] * 4
        else:
            with pytest.raises(oomkit.OutOfMemory):
                evaluate(torch.zeros(4, 1))
        assert [*seen, modes()] == [(True, False)] * (len(seen) + 1)
        assert len(seen) == (3 if retried else 1)
    finally:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)


def test_an_update_that_is_half_done_leaves_gradients_recorded() -> None:
    """torch's Optimizer.step() switches them off, and cannot switch them on without memory."""
    parameters = [torch.ones(2, requires_grad=True) for _ in range(2)]

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                parameters[0].sub_(0.1)
            torch._C._set_grad_enabled(False)
            raise MemoryError

    optimizer = Half(parameters, lr=0.1)

    @oomkit.auto_batch(optimizer=optimizer)
    def step(x: torch.Tensor) -> None:
        sum((p * x).sum() for p in parameters).backward()
        optimizer.step()

    try:
        with pytest.raises(oomkit.PartialUpdate):
            step(torch.ones(4, 2))
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


class Once:
    """Switches something in one call, and notes that it has."""

    def __init__(self, what: str, where: str) -> None:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.model = nn.Sequential(
            first, nn.Dropout(0.0), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3)
        )
        self.model.double()
        self.what, self.where, self.done, self.index = what, where, False, 0
        if what == "requires_grad":
            first.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def switch(self, where: str) -> None:
        if where != self.where or self.index < 2 or self.done:
            return
        self.done = True
        if self.what == "requires_grad":
            self.model[0].requires_grad_(True)
        else:
            self.model[2].train(self.what == "train")
            self.model[1].eval()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.switch("before")
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.switch("between")
        self.optimizer.step()
        self.switch("behind")

    def state(self) -> list[Any]:
        modes = [module.training for module in self.model.modules()]
        needs = [p.requires_grad for p in self.model.parameters()]
        return [self.done, *modes, *needs, *map(torch.clone, self.model.state_dict().values())]


def _once(what: str, where: str, fails: int) -> tuple[Once, int]:
    """The program after its calls, and which of them was refused."""
    once, generator = Once(what, where), torch.Generator().manual_seed(1)

    @oomkit.auto_batch
    def step(once: Once, x: torch.Tensor, y: torch.Tensor) -> None:
        once.step(x, y)

    for call in range(5):
        once.index = call
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        before = once.state()
        try:
            with inject_oom(nth=1, phase="forward") if call == fails else nullcontext():
                step(once, x, y)
        except oomkit.SplitError as error:
            assert "does so once" in str(error)
            assert all(map(_equal, before, once.state()))
            return once, call
    return once, -1


def _equal(one: Any, two: Any) -> bool:
    return torch.allclose(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("where", ["before", "between", "behind"])
@pytest.mark.parametrize("what", ["eval", "requires_grad"])
def test_what_is_switched_once_stays_or_is_refused(what: str, where: str, fails: int) -> None:
    """Each micro-batch begins as the call began, but for the flag that says that it is done."""
    expected, _ = _once(what, where, -1)
    found, refused = _once(what, where, fails)
    assert refused == (2 if where == "before" else -1)
    assert refused == 2 or all(map(_equal, expected.state(), found.state()))


def test_what_the_last_micro_batch_alone_switches_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0)).double()

    @oomkit.auto_batch(accumulation_steps=4)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        if oomkit.current().is_last:
            model.eval()

    step(torch.randn(8, 4, dtype=torch.float64))
    assert not model.training


@pytest.mark.parametrize("grads", [False, True])
def test_an_evaluation_that_is_switched_once_is_refused(grads: bool) -> None:
    once = Once("eval", "before")
    once.index = 2

    @oomkit.auto_batch(accumulation_steps=2)
    def outputs(once: Once, x: torch.Tensor) -> torch.Tensor:
        once.switch("before")
        out: torch.Tensor = once.model(x)
        return out.square().mean() if grads else out

    with torch.set_grad_enabled(grads), pytest.raises(oomkit.SplitError, match="does so once"):
        outputs(once, torch.randn(8, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["freeze", "train"])
def test_what_the_last_micro_batch_switches_back_stays(kind: str) -> None:
    """Each is computed with the switch, which the first one leaves."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 1)).double().eval()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        if kind == "freeze":
            model[0].requires_grad_(False)
        else:
            model.train()
        model(x).square().mean().backward()
        current = oomkit.current()
        if current is None or current.is_last:
            model.requires_grad_(True)
            model.eval()

    for fails in (True, False):
        x = torch.randn(8, 4, dtype=torch.float64)
        with inject_oom(nth=1, phase="forward") if fails else nullcontext():
            step(x)
        assert step.records[-1].accumulation_steps == 2
        assert not any(module.training for module in model.modules())
        assert all(p.requires_grad for p in model.parameters())
