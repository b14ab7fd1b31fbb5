"""An interrupt that comes while oomkit asks something of the user's that may fail arrives again."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import oomkit
from oomkit.testing import force_slices, inject_oom


class Interrupted(torch.optim.SGD):
    """Whoever reads its state while `armed` is interrupted."""

    armed = False

    @property
    def state(self) -> Any:
        if self.armed:
            raise KeyboardInterrupt
        return self.__dict__["_state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["_state"] = value


def test_while_the_holders_of_memory_are_summed_up(interrupts: list[int]) -> None:
    net = nn.Linear(3, 2)
    opt = Interrupted(net.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()

    x = torch.ones(1, 3)
    step(x)
    opt.armed = True
    with inject_oom(nth=1, times=None), pytest.raises(oomkit.OutOfMemory) as caught:
        step(x)
    assert caught.value.report is not None
    assert interrupts == [signal.SIGINT]


class Value:
    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt

    __hash__ = None  # type: ignore[assignment]


def test_while_values_of_groups_are_compared(interrupts: list[int]) -> None:
    """The comparison counts as a difference, and the split is refused for it."""
    net = nn.Linear(3, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.param_groups[0]["mine"] = Value()
        opt.step()

    opt.param_groups[0]["mine"] = Value()
    with force_slices([2, 2]), pytest.raises(oomkit.SplitError, match="mine"):
        step(torch.ones(4, 3))
    assert interrupts


class Kind(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


def test_while_the_kind_of_an_optimizer_is_asked(interrupts: list[int]) -> None:
    class Optimizer(torch.optim.SGD, metaclass=Kind):
        pass

    net = nn.Linear(3, 2)
    opt = Optimizer(net.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        net(x).mean().backward()
        opt.step()

    try:  # now, or once the step has run
        step(torch.ones(4, 3))
    except KeyboardInterrupt:
        interrupts.append(1)
    assert interrupts


class Silent(RuntimeError):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_while_the_text_of_an_error_is_read(interrupts: list[int]) -> None:
    assert not oomkit.is_oom_error(Silent())
    assert interrupts == [signal.SIGINT]


def test_an_exit_that_a_signal_asks_for_is_not_lost_either() -> None:
    """Its handler runs in the text of an error."""

    class Talkative(torch.OutOfMemoryError):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGTERM)
            return "out of memory"

    def leave(*_: object) -> None:
        raise SystemExit("terminated")

    model, calls = nn.Linear(4, 2), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch(verify=False)
    def step(x: torch.Tensor) -> None:
        calls.append(len(x))
        opt.zero_grad()
        model(x).sum().backward()
        if len(calls) == 1:
            raise Talkative
        opt.step()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="terminated"):
            step(torch.ones(4, 4))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert all(p.grad is None for p in model.parameters())


def test_an_exit_of_another_thread_does_not_end_the_main_one() -> None:
    class Leaving(RuntimeError):
        def __str__(self) -> str:
            sys.exit(7)

    seen: list[object] = []

    def work() -> None:
        seen.append(oomkit.is_oom_error(Leaving()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for _ in range(1000):
        pass
    assert seen == [False]


@pytest.mark.parametrize("event", ["call", "line"])
def test_while_what_watches_a_micro_batch_is_taken_out(event: str) -> None:
    """The interrupt was told as an exception that nobody can catch, and training went on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[int] = []

    @oomkit.auto_batch(accumulation_steps=2, verify=False)
    def step(x: torch.Tensor) -> None:
        calls.append(len(x))
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        opt.step()

    def trace(frame: Any, kind: str, argument: Any) -> Any:
        if frame.f_code.co_name != "abandon" or interrupted:
            return None
        if kind == event:
            interrupted.append(frame.f_lineno)
            raise KeyboardInterrupt
        return trace

    interrupted: list[int] = []
    before = {name: value.clone() for name, value in net.state_dict().items()}
    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(torch.randn(8, 3))
    finally:
        sys.settrace(tracing)
    assert interrupted
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
