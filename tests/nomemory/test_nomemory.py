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
from collections import Counter
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.own_process import run_program
from helpers.recovery_world import World, differences
from helpers.sample import sampled, stride
from torch import nn

import oomkit
from nomemory import witness
from nomemory.fault import MISSING, Fault, Outcome, suffer
from nomemory.fork import apart
from nomemory.listed import listed
from nomemory.lost import LOSES, is_proven, loses
from nomemory.sweep import OURS
from oomkit import _C
from oomkit._code import side_effects as _side_effects
from oomkit._code.module_buffers import Buffers
from oomkit.testing import inject_oom

TESTS = Path(__file__).resolve().parents[1]
SEED = int(os.environ.get("OOMKIT_FUZZ_SEED", "1"))
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "not skipped")

# How many allocations there are between two that fail here, for some 12 seconds in all.
STRIDES = {
    "import oomkit": 220333,
    "inside, call, backward": 77773,
    "decorating": 2085,
    "errors": 141,
    "classifying": 65,
    "guarding": 1429,
    "figures": 377,
    "reporting": 3847,
    "a healthy call": 1429,
    "sizes in a checkpoint": 305,
    "trials": 1429,
    "searching": 1429,
    "reserving": 1429,
}
STRIDE = 60013


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


def test_who_was_refused_memory_is_known_of_a_child_that_died() -> None:
    """A crash tells where it came to, and only the refusal tells whose it is."""

    def compiles() -> None:
        suffer(lambda: eval("[1, 2]"), Fault(6), Outcome())
        os.abort()

    def calls_ours() -> None:
        suffer(functools.partial(oomkit.auto_batch, len), Fault(0, once=False), Outcome())
        os.abort()

    witness.open_room()
    try:
        assert witness.places() == []
        assert apart(compiles).died.startswith("SIGABRT")
        (place,) = witness.places()
        assert listed("SIGSEGV: Fatal Python error", [place]) == "CPython's compiler"
        assert apart(calls_ours).died.startswith("SIGABRT")
        assert any("of _C." in at for at in witness.places())
        assert not listed("SIGSEGV: Fatal Python error", witness.places())
    finally:
        witness.room = None


HANG = 'SIGPROF: File "/x/site-packages/torch/optim/optimizer.py", line 514 in wrapper'
HANDLER = "PyLong_FromLong < _PyEval_EvalFrameDefault"
SAID = "SIGSEGV: Fatal Python error: Segmentation fault; in"
NODE = "PyDict_New < ? of libtorch_python.so < ? of _C.cpython-311.so < _PyEval_EvalFrameDefault"
OURS_FIRST = "PyDict_New < ? of _C.cpython-311.so < ? of libtorch_python.so < _PyEval_EvalFrame"
HOOKS = "PyList_New < PyDict_Values < ? of libtorch_python.so < ? of libtorch_cpu.so < f"
FRAMES = "f(int) of libtorch_python.so <- CPython <- <unknown function> of _C.cpython-311.so"


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        (HANG, HANDLER, "CPython hangs"),
        (HANG, "PyDict_New < _PyEval_EvalFrameDefault", ""),
        (
            'SIGPROF: File "/x/oomkit/_code/module_buffers.py", line 25 in _sample; File "/x/y"',
            HANDLER,
            "",
        ),
        ("SIGSEGV: Fatal Python error: Segmentation fault", HANDLER, ""),
        (f"{SAID} {FRAMES}", NODE, "torch's casts"),
        (f"{SAID} {FRAMES}", HANDLER, ""),
        (f"{SAID} CPython <- {FRAMES}", NODE, "torch's casts"),
        ("SIGABRT: Fatal Python error: Segmentation fault", HOOKS, "torch's hooks"),
        ("SIGABRT: Fatal Python error: Segmentation fault", OURS_FIRST, ""),
        (f"{SAID} <unknown function> of _C.cpython-311.so <- {FRAMES}", NODE, ""),
        (f"{SAID} {FRAMES}", OURS_FIRST, ""),
        ("SystemError: <method 'f' of 'torch._C.TensorBase' objects> returned", NODE, "torch's"),
        ("SystemError: <method 'f' of 'torch._C.TensorBase' objects> returned", OURS_FIRST, ""),
        ("SystemError: <oomkit._C.Step object> returned NULL without setting", NODE, ""),
        ("SystemError: <built-in function copy_context> returned a result with", OURS_FIRST, ""),
    ],
)
def test_what_is_listed_is_nothing_of_ours(text: str, place: str, word: str) -> None:
    found = listed(text, [place])
    assert found.startswith(word) if word else found == ""
    assert listed(text, []) == ""
    assert "SystemError" not in OURS


def test_what_an_interpreter_loses_is_forgiven_where_it_was_refused() -> None:
    """Only there, and only where it is proven of this interpreter."""
    places = [place.strip("^$").replace("\\", "") for place, _ in LOSES]
    for place, (_, call) in zip(places, LOSES, strict=True):
        assert loses([place]) == is_proven(call)
    assert not loses(["PyDict_New < _PyEval_EvalFrameDefault", NODE])


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

    first, every = stride(4)
    answers = [apart(lambda nth=nth: work(nth)) for nth in range(first - 1, 120, every)]
    assert [answer.died for answer in answers if answer.died] == []
    assert {answer.value for answer in answers} == {expected, "MemoryError"}


def test_a_frame_without_memory_for_its_object_is_not_the_outermost() -> None:
    """PyFrame_GetBack() gives NULL for both: a call of ours returned with the exception set."""
    x = torch.zeros(4, 2)

    def parts() -> Any:
        yield from oomkit.chunks(x, label="frames", micro_batch=2)

    def first() -> int:
        return len(next(parts()))

    def work(nth: int) -> tuple[str, str]:
        suffer(first, Fault(nth), outcome := Outcome())
        return outcome.error, outcome.text

    first()
    answers = [apart(lambda nth=nth: work(nth)) for nth in range(60)]
    assert [answer.died for answer in answers if answer.died] == []
    assert answers[-1].value[0] == ""  # there are no more
    assert {answer.value[0] for answer in answers} == {"MemoryError", ""}, answers


@pytest.mark.parametrize("error", ["MemoryError", "SystemError", "KeyboardInterrupt"])
def test_an_import_that_lacks_memory_for_the_bridge_fails(error: str) -> None:
    """It had gone on without the bridge, silently and for good: as if built for another torch."""
    done = _imports(f"{error}('once')")
    assert done["first"] == error
    assert done["second"] == "" and done["bridge"] is True and done["warned"] == []


def test_a_bridge_that_does_not_fit_is_said() -> None:
    done = _imports("ValueError('always')", times=9)
    assert done["first"] == done["second"] == "" and done["bridge"] is False
    (warned,) = set(done["warned"])
    assert "the bridge does not see the tensors of torch" in warned and "pip install" in warned


def _imports(error: str, times: int = 1) -> dict[str, Any]:
    """Imports oomkit twice, where torch.nn.Parameter raises so many times."""
    code = f"""
import json, warnings
import torch
left, real = [{times}], torch.nn.Parameter
def parameter(*args):
    if left[0]:
        left[0] -= 1
        raise {error}
    return real(*args)
def attempt():
    try:
        import oomkit
        return ""
    except BaseException as error:
        return type(error).__name__
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.nn.Parameter = parameter
    first = attempt()
    torch.nn.Parameter = real
    second = attempt()
import oomkit
print(json.dumps({{"first": first, "second": second, "bridge": oomkit._fits,
                  "warned": [str(w.message) for w in caught]}}))
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_import_that_fails_while_errors_are_made_can_be_repeated() -> None:
    """The module stays where the package goes, and had taken some of its errors for all."""

    def fresh() -> Any:
        loader = ExtensionFileLoader("oomkit._C", str(_C.__file__))
        spec = spec_from_file_location("oomkit._C", _C.__file__, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module

    glue: dict[str, Any] = {}

    def complete() -> None:
        while True:
            try:
                return fresh()._bind(None, glue)
            except KeyError as missing:
                glue[missing.args[0]] = print

    def work(nth: int) -> tuple[str, list[str]]:
        module = fresh()
        suffer(lambda: module._bind(None, glue), Fault(nth), outcome := Outcome())
        module._bind(None, glue)
        errors = ("OomkitError", "OutOfMemory", "PartialUpdate", "SplitError", "OomkitWarning")
        return outcome.error, [name for name in errors if not hasattr(module, name)]

    complete()
    found = set()
    witness.open_room()
    try:
        for nth in sampled(range(600), 40):
            answer = apart(lambda nth=nth: work(nth))  # noqa: B023
            if answer.died:  # torch.Generator() reads NULL where it has no memory for its object
                assert listed(answer.died, witness.places()) == "torch's casts", answer.died
                continue
            found.add(answer.value[0])
            assert answer.value[1] == [], nth
    finally:
        witness.room = None
    assert found == {"MemoryError", ""}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_look_at_a_step_that_fails_leaves_no_hook(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the step reads was looked for when the hooks were there already."""

    def fail(*_: object) -> None:
        raise error

    model = nn.BatchNorm1d(2)
    participants = [weakref.ref(model)], True, [], [], 4
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
