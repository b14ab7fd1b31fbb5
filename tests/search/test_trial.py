"""What a trial of a search stands on: a call whose out-of-memory error never reaches Python."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from helpers.own_process import run_program

import oomkit
import oomkit.optuna
from oomkit._hpo import values as _hpo_values

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
VALUE, CLASS, TYPE, MESSAGE, LOCATION, REPORT, REQUESTED, ALLOCATED = range(8)


class Tracked:
    pass


def call(func, *args, cleared=ValueError, judge=None, keep=False, **kwargs):
    return oomkit._C._trial(func, args, kwargs, cleared, judge, keep)


made = []


def fails_with_a_thing(error):
    thing = Tracked()
    made.append(weakref.ref(thing))
    raise error


def fails(thing, error=None):
    here = thing  # noqa: F841
    raise torch.OutOfMemoryError(TEXT) if error is None else error


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_value_and_its_figures():
    found = call(lambda a, b: torch.zeros(a + b, dtype=torch.uint8).sum().item(), 2**20, b=0)
    assert found[VALUE] == 0 and found[CLASS] is None
    baseline, peak = found[10:12]
    assert peak - baseline >= 2**20 and found[14] == (0, -1)


@pytest.mark.parametrize("keep", [False, True])
def test_out_of_memory_is_told_as_plain_values(keep, no_gc):
    error = torch.OutOfMemoryError(TEXT)
    found = call(fails_with_a_thing, error, keep=keep)
    assert made.pop()() is None
    assert found[CLASS] == "certain" and found[TYPE] == "OutOfMemoryError"
    assert found[REQUESTED] == 2 * 2**30 and found[LOCATION].endswith("in fails_with_a_thing")
    assert found[VALUE] is (error if keep else None)
    assert (error.__traceback__ is not None) == keep


def test_what_was_allocated_is_read_from_the_message():
    """Temporaries of the frames are gone when it could be measured."""
    text = (
        "CUDA out of memory. Tried to allocate 360.00 MiB. GPU 0 has a total capacity of "
        "23.56 GiB of which 88.00 MiB is free. Of the allocated memory 22.50 GiB is allocated "
        "by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    found = call(fails, None, torch.OutOfMemoryError(text))
    assert found[ALLOCATED] == 23040 * 2**20


def test_the_error_of_the_caller_is_not_touched(no_gc):
    outer = ValueError("outer")
    try:
        raise outer
    except ValueError:
        call(fails, Tracked())
        assert sys.exc_info()[1] is outer and outer.__traceback__ is not None


def test_frames_of_named_errors_are_cleared_and_the_error_handed_out(no_gc):
    error = ValueError("pruned")
    found = call(fails_with_a_thing, error)
    assert found[CLASS] == "cleared" and found[VALUE] is error and made.pop()() is None


def test_other_errors_pass_untouched():
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        call(fails, 3, error)
    assert caught.value is error and caught.traceback[-1].frame.f_locals["here"] == 3


def test_a_judge_lets_pass(no_gc):
    seen = []
    with pytest.raises(torch.OutOfMemoryError):
        call(fails, 3, judge=lambda error: seen.append(type(error)) or False)
    assert seen == [torch.OutOfMemoryError]
    assert call(fails, 3, judge=lambda error: True)[CLASS] == "certain"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_judge_that_fails_loses_nothing():
    assert call(fails, 3, judge=lambda error: 1 / 0)[CLASS] == "certain"


def test_a_half_made_update_and_a_report():
    assert call(fails, 3, oomkit.PartialUpdate("Adam"))[TYPE].endswith("PartialUpdate")

    @oomkit.auto_batch
    def step(x):
        raise torch.OutOfMemoryError(TEXT)

    found = call(step, torch.zeros(1))
    assert found[CLASS] == "never" and isinstance(found[REPORT], oomkit.OOMReport)


def test_wrong_arguments():
    with pytest.raises(TypeError):
        oomkit._C._trial(fails, [], {}, ValueError, None, False)
    with pytest.raises(TypeError):
        oomkit._C._trial(fails)


def test_nothing_leaks():
    counts = []
    for _ in range(3):
        for _ in range(50):
            call(fails, Tracked())
            call(fails, Tracked(), keep=True)
            call(fails, Tracked(), ValueError())
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 20


# --- without Optuna ---


def test_oomkit_does_not_import_optuna():
    code = (
        "import sys, oomkit, oomkit.optuna\n"
        "assert not {'optuna', 'mlflow', 'transformers'} & set(sys.modules)"
    )
    done = run_program(code, cwd=Path(oomkit.__file__).parents[1])
    assert done.returncode == 0, done.stderr


def test_a_missing_optuna_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    wrapped = oomkit.optuna.prune_on_oom(lambda trial: 1.0)
    with pytest.raises(ImportError, match="pip install optuna"):
        wrapped(3)


# --- plain values ---


class Odd:
    def __str__(self):
        return "odd"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (numpy.arange(3), [0, 1, 2]),
        (torch.tensor(2), 2),
        (torch.zeros(100), "Tensor of shape (100,)"),
        (torch.zeros(2, device="meta"), "Tensor of shape (2,)"),
        (torch.bfloat16, "torch.bfloat16"),
        (float("nan"), "nan"),
        (Path("a/b"), "a/b"),
        ({1: {2: (3,)}}, {"1": {"2": [3]}}),
        (Odd(), "odd"),
        (True, True),
        (None, None),
    ],
    ids=str,
)
def test_plain_values(value, expected):
    found = _hpo_values.plain(value)
    assert found == expected and type(found) is type(expected)


def test_a_structure_without_an_end():
    endless: list = []
    endless.append(endless)
    assert isinstance(str(_hpo_values.plain(endless)), str)
