"""The interpreter's own memory: a part of the faults of tests/nomemory, and what they found.

All of them: `make prove`. One body: `python -m nomemory.sweep [--stride N] NAME` in tests/.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from nomemory.fault import MISSING, Fault, Outcome, suffer
from nomemory.fork import apart
from nomemory.listed import listed
from nomemory.sweep import OURS
from recovery_world import World, differences
from torch import nn

import oomkit
from oomkit import _C, _side_effects
from oomkit._buffers import Buffers
from oomkit.testing import inject_oom

TESTS = Path(__file__).resolve().parent
SEED = int(os.environ.get("OOMKIT_FUZZ_SEED", "1"))
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "not skipped")

# How many allocations there are between two that fail here, for some 15 seconds in all.
STRIDES = {
    "import oomkit": 50003,
    "inside, call, backward": 18003,
    "decorating": 483,
    "errors": 33,
    "classifying": 15,
    "guarding": 331,
    "figures": 87,
    "reporting": 891,
    "a healthy call": 331,
    "sizes in a checkpoint": 71,
    "trials": 331,
    "searching": 331,
    "reserving": 331,
}
STRIDE = 1501


def test_no_fault_is_a_crash_or_changes_a_result() -> None:
    """In a process that has torch and nothing else, as `make prove` runs them."""
    done = subprocess.run(
        [sys.executable, "-m", "nomemory.sweep", "--json", "--first", str(1 + SEED % 40),
         "--stride", str(STRIDE), "--strides", json.dumps(STRIDES)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        cwd=TESTS,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for body in found for line in body["failures"]] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(found) > 15
    assert all(body["cases"] > 0 for body in found), "nothing was done"
    kinds = {kind for body in found for kind in body["kinds"]}
    assert {"MemoryError", "success"} <= kinds


def test_a_fault_comes_when_it_is_to_come() -> None:
    """Once, or from there on."""
    for once, expected in ((True, [False, True]), (False, [False, False])):

        def work(once: bool = once) -> list[bool]:
            got = [True, True]

            def call() -> None:
                try:
                    bytearray(1000)
                except MemoryError:
                    got[0] = False
                try:
                    bytearray(1000)
                except MemoryError:
                    got[1] = False

            suffer(call, Fault(0, once), Outcome())
            return got

        assert apart(work).value == expected


def test_what_is_listed_is_nothing_of_ours() -> None:
    hang = 'SIGPROF: File "/x/site-packages/torch/optim/optimizer.py", line 514 in wrapper'
    assert listed(hang) == "CPython hangs"
    assert not listed('SIGPROF: File "/x/oomkit/_buffers.py", line 25 in _sample; File "/x/y.py"')
    assert not listed("SIGSEGV: Fatal Python error: Segmentation fault")
    said = "SIGSEGV: Fatal Python error: Segmentation fault; in"
    ours, theirs = "<unknown function> of _C.cpython-311.so", "f(int) of libtorch_python.so"
    where = 'File "/x/torch/_tensor.py", line 623 in backward'
    assert listed(f"{said} {theirs} <- {theirs} <- CPython <- {ours}; {where}") == "torch crashes"
    assert not listed(f"{said} {ours} <- {theirs} <- CPython; {where}")
    assert not listed(f"{said} {theirs} <- {ours} <- CPython; {where}")
    assert not listed(f"{said} CPython <- {ours} <- {theirs}; {where}")
    assert not listed("SystemError: <oomkit._C.Step object> returned NULL without setting")
    assert "SystemError" not in OURS


# --- what was found ---


def test_hooks_are_taken_out_without_memory() -> None:
    """Each of `for`, `a, b = pair` and list.pop() had left them in the modules."""

    def work() -> tuple[str, int]:
        modules = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(9)))
        buffers = Buffers(list(modules))
        outcome = Outcome()
        suffer(buffers.remove, Fault(0, once=False), outcome)
        tables = [t for m in modules for t in vars(m).values() if isinstance(t, dict)]
        left = [t for t in tables for v in t.values() if type(v).__name__ == "_Edge" or v is True]
        return outcome.error, len(left)

    assert apart(work).value == ("", 0)
    modules = [nn.BatchNorm1d(2)]
    Buffers(modules)
    assert len(modules[0]._forward_hooks) == 1
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reduction": "wrong"}, "ValueError"),  # an option that got lost would be none
        ({"participants": (nn.Linear(2, 2),)}, ""),
    ],
)
def test_options_are_read_without_memory(options: dict[str, Any], expected: str) -> None:
    """PyDict_GetItemString() and PyObject_HasAttr() take a lack of memory for a no."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x

    def work(nth: int) -> str:
        # No frame of Python's between: listed.py says what CPython makes of one.
        call = functools.partial(oomkit.auto_batch, step, **options)
        suffer(call, Fault(nth), outcome := Outcome())
        return outcome.error

    answers = [apart(lambda nth=nth: work(nth)) for nth in range(40)]
    assert [answer.died for answer in answers if answer.died] == []
    assert {answer.value for answer in answers} == {expected, "MemoryError"}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_look_at_a_step_that_fails_leaves_no_hook(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the step reads was looked for when the hooks were there already."""

    def fail(*_: object) -> None:
        raise error

    model = nn.BatchNorm1d(2)
    participants = [weakref.ref(model)], [], [], 4
    call = (lambda x: model(x), (torch.ones(4, 2),), {}, participants)
    watch = _side_effects.watch(*call)
    assert watch is not None and len(model._forward_hooks) == 1
    watch.abandon()
    monkeypatch.setattr(_side_effects, "companions", fail)
    with contextlib.suppress(KeyboardInterrupt):
        assert _side_effects.watch(*call) is None
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("end", [False, True])
def test_a_fault_whose_block_fails_is_not_in_force(end: bool, once: bool) -> None:
    """inject_oom() read its figures before it disarmed, and armed before its hooks were there."""

    def work(nth: int) -> bool:
        fault = inject_oom(nth=1000)
        if end:
            fault.__enter__()
        call = (lambda: fault.__exit__(None, None, None)) if end else fault.__enter__
        suffer(call, Fault(nth, once), outcome := Outcome())
        if end or outcome.error:
            assert not _C.fault_stats()[2]
        return bool(outcome.error)

    answers = [apart(lambda nth=nth: work(nth)) for nth in range(30)]
    assert [answer.died for answer in answers if answer.died] == []
    assert 0 < sum(answer.value for answer in answers)


def test_a_participant_whose_methods_are_not_found_for_memory_is_no_other() -> None:
    """PyObject_HasAttr(): the one with save() was asked for a state_dict()."""

    class Counter:
        value = looked = 0

        def __init__(self, nth: int) -> None:
            self.nth = nth

        @property
        def save(self) -> Any:
            self.looked += 1
            if self.looked == self.nth:
                raise MemoryError
            return lambda: self.value

        def restore(self, value: int) -> None:
            self.value = value

    errors = set()
    for nth in range(2, 9):  # the first look is at the decoration
        counter = Counter(nth)

        def step(x: torch.Tensor, counter: Counter = counter) -> torch.Tensor:
            counter.value += len(x)
            return x + 1

        protected, x = oomkit.auto_batch(step, participants=(counter,)), torch.zeros(4, 1)
        try:
            with inject_oom():
                protected(x)
            assert counter.value == 4
        except (MemoryError, oomkit.OutOfMemory) as error:
            errors.add(type(error).__name__)
    assert errors


@pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")
def test_surroundings_that_cannot_be_left_take_the_replay_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were not left then, and buffers stayed where the replay had brought them."""
    world = World("deferred")
    result = world.step(*world.batches[0])
    before = world.state()
    close, calls = contextlib.ExitStack.close, []

    def fails_once(stack: contextlib.ExitStack) -> None:
        calls.append(stack)
        if len(calls) == 1:
            raise MemoryError
        close(stack)

    with monkeypatch.context() as patched:
        patched.setattr(contextlib.ExitStack, "close", fails_once)
        with pytest.raises(oomkit.OutOfMemory):
            result.mean().backward()
    assert len(calls) == 2
    assert differences(before, world.state()) == []
    world.run(1)
