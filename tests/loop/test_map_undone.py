"""What the function of a map, or the body of a loop, changes in a part that fails: as before it."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom

X = torch.arange(48.0, dtype=torch.float64).reshape(8, 6)


class Scaled(nn.Module):
    """Changes an attribute of its own while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3).double()
        self.scale, self.calls = 2.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old, self.scale = self.scale, self.scale * 3
        out: torch.Tensor = self.inner(x) * self.scale
        self.scale = old
        self.calls += 1
        return out


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_the_mode_of_a_model(net: nn.Sequential, nth: int) -> None:
    def predict(x: torch.Tensor) -> torch.Tensor:
        was = net.training
        net.eval()
        out: torch.Tensor = net(x)
        net.train(was)
        return out

    with inject_oom(nth=nth):
        got = oomkit.map(predict, X)
    assert all(module.training for module in net.modules())
    torch.testing.assert_close(got, net.eval()(X))


def test_attributes_and_counters() -> None:
    torch.manual_seed(3)
    net, seen = Scaled(), []
    want = net(X)

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        out: torch.Tensor = net(x)
        return out

    for calls in (1, 2):
        seen.clear()
        with inject_oom(nth=2):
            torch.testing.assert_close(oomkit.map(fn, X), want)
        assert net.scale == 2.0 and sum(seen) == 8 and len(seen) >= 2
        assert net.calls >= 1 + 2 * calls


def test_hooks_and_what_they_have_stored(net: nn.Sequential) -> None:
    stored: dict[int, list[torch.Tensor]] = defaultdict(list)
    for number, layer in enumerate(net):
        layer.register_forward_hook(lambda m, a, out, n=number: stored[n].append(out.detach()))

    def fn(x: torch.Tensor) -> torch.Tensor:
        handle = net[0].register_forward_hook(lambda m, args, out: out * 2)
        out: torch.Tensor = net(x)
        handle.remove()
        return out

    net.eval()
    for nth in (2, 3):
        stored.clear()
        with inject_oom(nth=nth):
            got = oomkit.map(fn, X)
        assert len(net[0]._forward_hooks) == 1
        assert [len(torch.cat(rows)) for rows in stored.values()] == [8, 8, 8]
        torch.testing.assert_close(torch.cat(stored[2]), got)


def test_a_random_generator_that_is_called() -> None:
    stream = np.random.default_rng(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(stream.random(len(x)))
        return x + noise[:, None]

    with force_slices([4, 4]):
        want = oomkit.map(fn, X)
    stream = np.random.default_rng(3)
    with inject_oom(nth=1):
        got = oomkit.map(fn, X)
    torch.testing.assert_close(got, want)


def test_the_average_of_weights_in_place_of_them(net: nn.Sequential) -> None:
    """Parameters that the function writes to and puts back."""
    average = [p.detach() + 1 for p in net.parameters()]
    before = [p.detach().clone() for p in net.parameters()]

    def fn(x: torch.Tensor) -> torch.Tensor:
        own = [p.detach().clone() for p in net.parameters()]
        for p, value in zip(net.parameters(), average, strict=True):
            p.data.copy_(value)
        out: torch.Tensor = net(x)
        for p, value in zip(net.parameters(), own, strict=True):
            p.data.copy_(value)
        return out

    net.eval()
    with torch.no_grad():
        want = fn(X)
    for nth in (2, 6, 7):
        with inject_oom(nth=nth):
            torch.testing.assert_close(oomkit.map(fn, X), want)
    for p, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, value)


@pytest.mark.parametrize("is_around", [False, True])
def test_grad_mode_in_the_body_of_a_loop(net: nn.Sequential, is_around: bool) -> None:
    with torch.set_grad_enabled(is_around), inject_oom(nth=1):
        for part in oomkit.chunks(X):
            with oomkit.guard():
                was = torch.is_grad_enabled()
                torch.set_grad_enabled(not was)
                net(part)
                torch.set_grad_enabled(was)
        assert torch.is_grad_enabled() == is_around
    assert torch.is_grad_enabled()


def test_modes_and_hooks_in_the_body_of_a_loop(net: nn.Sequential) -> None:
    """A part that is finished keeps what it has set; one that fails goes back to its own begin."""

    def doubled(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2

    outputs = []
    with torch.no_grad(), inject_oom(nth=1):
        for part in oomkit.chunks(X):
            with oomkit.guard():
                was = net.training
                net.eval()
                handle = net[0].register_forward_hook(doubled)
                out = net(part)
                handle.remove()
                net.train(was)
                outputs.append(out)
    assert len(outputs) == 2 and net.training and not net[0]._forward_hooks
    net.eval()
    net[0].register_forward_hook(doubled)
    torch.testing.assert_close(torch.cat(outputs), net(X))


class Meter:
    def __init__(self) -> None:
        self.rows = 0


def _counting(meter: Meter) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        meter.rows += len(x)
        return x * 2

    return fn


def test_what_the_function_leads_to_is_let_go() -> None:
    """The place of the map lives on."""
    meters = [Meter() for _ in range(3)]
    dead = [weakref.ref(meter) for meter in meters]
    while meters:
        oomkit.map(_counting(meters.pop()), X)
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


def test_two_streams_in_turn_at_one_place() -> None:
    meters = [Meter(), Meter()]
    streams = [
        oomkit.map(_counting(meter), iter([X.clone() for _ in range(3)]), lazy=True)
        for meter in meters
    ]
    for _ in range(3):
        for stream in streams:
            with inject_oom(nth=1):
                next(stream)
    assert [meter.rows for meter in meters] == [24, 24]
