"""What a step sets at its begin and takes back at its end: hooks, layers, switches of torch's. An
attempt that fails in between leaves none of it to the next one."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

Change = Callable[["World"], Callable[[], Any]]
CHANGES: dict[str, Change] = {}


def change(made: Change) -> Change:
    CHANGES[made.__name__] = made
    return made


class World:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.spare: nn.Module = nn.Hardtanh()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.batches = [
            (torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64))
            for _ in range(3)
        ]

    def run(self, step: Callable[..., Any], fails: int, phase: Any = "forward") -> list[float]:
        losses = []
        for i, (x, y) in enumerate(self.batches):
            if i == fails:
                with inject_oom(nth=3, phase=phase):
                    losses.append(step(x, y))
            else:
                losses.append(step(x, y))
        return losses

    def left(self) -> Any:
        modules = list(self.net.modules())
        tables = [
            (name, list(table.values()))
            for owner in (*modules, *self.net.parameters(), self.opt)
            for name in TABLES
            if (table := getattr(owner, name, None))
        ]
        return tables, str(self.net), str(self.spare), [get() for get in SWITCHES]


TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
SWITCHES: list[Callable[[], Any]] = [
    torch.get_default_dtype,
    torch.get_deterministic_debug_mode,
    torch.get_num_threads,
    torch.get_float32_matmul_precision,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    lambda: torch.backends.cudnn.benchmark,
    lambda: torch.backends.mkldnn.enabled,
    lambda: len(torch.nn.modules.module._global_forward_hooks),
]


def _double(module: Any, args: Any, output: Any) -> Any:
    return output * 2


@change
def forward_hook(w: World) -> Callable[[], Any]:
    return w.net[1].register_forward_hook(_double).remove


@change
def forward_hook_with_kwargs(w: World) -> Callable[[], Any]:
    return (
        w.net[1]
        .register_forward_hook(lambda m, args, kwargs, out: out * 2, with_kwargs=True, prepend=True)
        .remove
    )


@change
def pre_hook(w: World) -> Callable[[], Any]:
    return w.net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,)).remove


@change
def backward_hook(w: World) -> Callable[[], Any]:
    return w.net[2].register_full_backward_hook(lambda m, inner, outer: (2 * inner[0],)).remove


@change
def hooks_of_all_layers(w: World) -> Callable[[], Any]:
    hooks = [layer.register_forward_hook(_double) for layer in w.net]
    return lambda: [hook.remove() for hook in hooks]


@change
def global_hook(w: World) -> Callable[[], Any]:
    return torch.nn.modules.module.register_module_forward_hook(_double).remove


@change
def state_dict_hook(w: World) -> Callable[[], Any]:
    return w.net.register_state_dict_post_hook(lambda *_: None).remove


@change
def step_hook(w: World) -> Callable[[], Any]:
    def halve(opt: Any, args: Any, kwargs: Any) -> None:
        for p in w.net.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    return w.opt.register_step_pre_hook(halve).remove


@change
def layer_added(w: World) -> Callable[[], Any]:
    w.net.append(nn.Softplus())

    def end() -> None:
        del w.net[-1]

    return end


@change
def layer_exchanged(w: World) -> Callable[[], Any]:
    old = w.net[1]
    w.net[1] = nn.ReLU()

    def end() -> None:
        w.net[1] = old

    return end


@change
def layers_swapped(w: World) -> Callable[[], Any]:
    w.net[1], w.spare = w.spare, w.net[1]

    def end() -> None:
        w.net[1], w.spare = w.spare, w.net[1]

    return end


@change
def default_dtype(w: World) -> Callable[[], Any]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(old)


@change
def deterministic(w: World) -> Callable[[], Any]:
    old = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not old, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(old)


@change
def threads(w: World) -> Callable[[], Any]:
    old = torch.get_num_threads()
    torch.set_num_threads(old + 1)
    return lambda: torch.set_num_threads(old)


@change
def precision(w: World) -> Callable[[], Any]:
    old = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    return lambda: torch.set_float32_matmul_precision(old)


@change
def anomaly(w: World) -> Callable[[], Any]:
    old = torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    return lambda: torch.autograd.set_detect_anomaly(old)


@change
def flash_attention(w: World) -> Callable[[], Any]:
    old = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not old)
    return lambda: torch.backends.cuda.enable_flash_sdp(old)


@change
def backends(w: World) -> Callable[[], Any]:
    old = torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled
    torch.backends.cudnn.benchmark = not old[0]
    torch.backends.mkldnn.enabled = not old[1]

    def end() -> None:
        torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled = old

    return end


def _step(w: World, begin: Change) -> Callable[..., float]:
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        end = begin(w)
        w.opt.zero_grad()
        loss = F.mse_loss(w.net(x), y)
        loss.backward()
        w.opt.step()
        end()
        return loss.item()

    return step


@pytest.mark.sample(36)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("begin", CHANGES.values(), ids=CHANGES)
def test_it_is_as_at_entry_when_the_step_begins_again(
    begin: Change, fails: int, phase: Any
) -> None:
    want, got = World(), World()
    before = [get() for get in SWITCHES]
    losses = want.run(_step(want, begin), -1)
    split = got.run(oomkit.auto_batch(_step(got, begin)), fails, phase)
    assert split == pytest.approx(losses, rel=1e-12)
    for p, q in zip(want.net.parameters(), got.net.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-14)
    assert got.left() == want.left()
    assert [get() for get in SWITCHES] == before


def _removing(nth: int) -> tuple[list[list[str]], bool]:
    """Which hooks ran in each run of the step; is the one that it removes gone, and no other?"""
    w = World()
    order: Seen[str] = Seen()
    first, second = (
        w.net[0].register_forward_hook(lambda *_, name=name: order.append(name))
        for name in ("first", "second")
    )

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> float:
        w.opt.zero_grad()
        order.append("begin")
        loss = w.net(x).pow(2).mean()
        first.remove()
        loss = loss + w.net(x).mean()
        loss.backward()
        w.opt.step()
        return loss.item()

    with inject_oom(nth=nth, phase="forward"):
        step(w.batches[0][0])
    runs = [run.split() for run in " ".join(order).split("begin ")[1:]]
    return runs, [*w.net[0]._forward_hooks] == [second.id]


def test_one_that_the_step_removes_first_is_back_in_its_place() -> None:
    behind = 0
    for nth in range(4, 12):
        runs, is_gone = _removing(nth)
        assert len(runs) > 1 and all(run[:2] == ["first", "second"] for run in runs[:2])
        assert is_gone
        behind += runs[0] == ["first", "second", "second"]
    assert behind  # some failed behind the removal


def test_a_handle_that_is_replaced_is_the_old_one_again() -> None:
    w = World()
    w.handle = w.net[1].register_forward_hook(_double)  # type: ignore[attr-defined]

    def again(w: Any) -> Callable[[], Any]:
        w.handle.remove()
        w.handle = w.net[1].register_forward_hook(_double)
        return lambda: None

    want = World()
    want.net[1].register_forward_hook(_double)
    losses = want.run(_step(want, lambda _: lambda: None), -1)
    assert w.run(oomkit.auto_batch(_step(w, again)), 1) == pytest.approx(losses, rel=1e-12)
    assert len(w.net[1]._forward_hooks) == 1


@functools.lru_cache(maxsize=8)
def _cached(layer: nn.Module) -> Any:
    return layer.register_forward_hook(_double)


KEPT: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _kept(layer: nn.Module) -> None:
    if layer not in KEPT:
        KEPT[layer] = layer.register_forward_hook(_double)


def _forgotten(layer: nn.Module) -> None:
    if layer not in SEEN:
        SEEN.add(layer)
        layer.register_forward_hook(_double)


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("once", [_cached, _kept])
def test_one_whose_handle_is_kept_out_of_sight_stays(once: Callable[..., Any], fails: int) -> None:
    """The step registers once, and the retry does not again."""
    want, got = World(), World()
    want.net[1].register_forward_hook(_double)
    losses = want.run(_step(want, lambda _: lambda: None), -1)

    def begin(w: World) -> Callable[[], Any]:
        once(w.net[1])
        return lambda: None

    assert got.run(oomkit.auto_batch(_step(got, begin)), fails) == pytest.approx(losses, rel=1e-12)
    assert len(got.net[1]._forward_hooks) == 1


def test_one_that_only_a_frame_of_the_failed_attempt_keeps_goes() -> None:
    """A debugger, a logger: what holds the frame holds its handle."""
    w, frames = World(), Seen[Any]()

    def begin(w: World) -> Callable[[], Any]:
        handle = w.net[1].register_forward_hook(_double)
        frames.append(handle)
        return handle.remove

    want = World()
    losses = want.run(_step(want, forward_hook), -1)
    for fails in (0, 1):
        w = World()
        assert w.run(oomkit.auto_batch(_step(w, begin)), fails) == pytest.approx(losses, rel=1e-12)
        assert not w.net[1]._forward_hooks


def _register(layer: nn.Module) -> Any:
    return layer.register_forward_hook(_double)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fails", [0, 1])
def test_two_of_one_helper_are_told_apart(fails: int, phase: Any) -> None:
    """One is registered once and kept out of sight, the other in each step."""

    def begin(w: World) -> Callable[[], Any]:
        if w.net[1] not in KEPT:
            KEPT[w.net[1]] = _register(w.net[1])
        handle = _register(w.net[1])
        return handle.remove

    want, got = World(), World()
    losses = want.run(_step(want, begin), -1)
    split = got.run(oomkit.auto_batch(_step(got, begin)), fails, phase)
    assert split == pytest.approx(losses, rel=1e-12)
    assert len(got.net[1]._forward_hooks) == 1


def test_one_that_nobody_keeps_must_be_registered_again() -> None:
    w = World()
    before = [p.detach().clone() for p in w.net.parameters()]

    def begin(w: World) -> Callable[[], Any]:
        _forgotten(w.net[1])
        return lambda: None

    with pytest.raises(oomkit.SplitError, match=r"test_set_and_put_back.py:\d+ registered"):
        w.run(oomkit.auto_batch(_step(w, begin)), 0)
    for p, value in zip(w.net.parameters(), before, strict=True):
        assert torch.equal(p, value)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_one_that_is_removed_before_the_update(phase: Any) -> None:
    want, got = World(), World()

    def step_of(w: World) -> Callable[..., float]:
        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            handle = w.net[1].register_forward_hook(_double)
            w.opt.zero_grad()
            loss = F.mse_loss(w.net(x), y)
            loss.backward()
            handle.remove()
            w.opt.step()
            return loss.item()

        return step

    losses = want.run(step_of(want), -1)
    assert got.run(oomkit.auto_batch(step_of(got)), 0, phase) == pytest.approx(losses, rel=1e-12)
    assert not got.net[1]._forward_hooks


def test_what_a_library_registers_when_a_module_first_runs_stays() -> None:
    """It notes elsewhere that it has: a second one would run beside it."""
    w = World()
    source = """
noted = set()
def prepare(layer):
    if id(layer) not in noted:
        noted.add(id(layer))
        layer.register_forward_hook(lambda m, args, out: out * 2)
"""
    library: dict[str, Any] = {"__name__": "transformers.made_up"}
    exec(source, library)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        library["prepare"](w.net[1])
        w.opt.zero_grad()
        loss = F.mse_loss(w.net(x), y)
        loss.backward()
        w.opt.step()
        return loss.item()

    want = World()
    want.net[1].register_forward_hook(_double)
    losses = want.run(_step(want, lambda _: lambda: None), -1)
    assert w.run(step, 0) == pytest.approx(losses, rel=1e-12)
    assert len(w.net[1]._forward_hooks) == 1


def test_hooks_for_the_callers_backward_stay_those_that_it_has() -> None:
    """A loss that is returned is computed again where its backward fails: what the caller holds
    is the handle of the first time."""
    w, handles = World(), []
    gradients: list[float] = []
    outputs: dict[str, torch.Tensor] = {}

    @oomkit.auto_batch
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        handles.append(
            w.net[1].register_forward_hook(lambda m, args, out: outputs.update(last=out.detach()))
        )
        return F.mse_loss(w.net(x), y)

    for fails in (False, True):
        for x, y in w.batches:
            w.opt.zero_grad()
            loss = loss_of(x, y)
            if fails:
                with inject_oom(nth=2, phase="backward"):
                    loss.backward()
            else:
                loss.backward()
            assert [*w.net[1]._forward_hooks] == [handle.id for handle in handles]
            while handles:
                handles.pop(0).remove()
            assert len(w.net[1]._forward_hooks) == 0
            assert w.net[0].weight.grad is not None
            gradients.append(w.net[0].weight.grad.norm().item())
    assert gradients[3:] == pytest.approx(gradients[:3], rel=1e-12)


class Kept:
    """What a hook keeps: outputs, and with them their graph."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.outputs.append(output)


def test_a_hook_that_leads_to_a_returned_loss_does_not_hold_it() -> None:
    def one() -> weakref.ref[Kept]:
        w, kept = World(), Kept()
        handle = w.net[1].register_forward_hook(kept)

        @oomkit.auto_batch
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(w.net(x), y)
            handle.remove()
            w.net[1].register_forward_hook(lambda *_: None)
            return loss

        kept.outputs.append(loss_of(*w.batches[0]))
        return weakref.ref(kept)

    dead = one()
    gc.collect()
    assert dead() is None
