"""cleanup: what interactive sessions keep of an error goes, and nothing else does."""

import gc
import sys
import types
import weakref

import pytest
import torch

import oomkit

MIB = 2**20
LAST = ("last_type", "last_value", "last_traceback", "last_exc")


class Tracked:
    """Stands for what frames hold."""


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch):
    for name in LAST:
        monkeypatch.delattr(sys, name, raising=False)
    oomkit.limit_memory(None, device="cpu")


def cell(held, size=1):
    local = Tracked()
    held.append(weakref.ref(local))
    weight = torch.ones(size * MIB, dtype=torch.uint8)
    raise torch.OutOfMemoryError(f"CPU out of memory. Tried to allocate {weight.numel()} bytes")


def failed(held, run=cell):
    try:
        run(held)
    except torch.OutOfMemoryError as error:
        return error


class Printer:
    """IPython's AutoFormattedTB and SyntaxTB, as far as they keep something."""

    def __init__(self):
        self.tb = self.pdb = self.last_syntax_error = None


class Debugger:
    def __init__(self, frame):
        self.curframe = frame

    def reset(self):
        self.curframe = None


class Shell:
    def __init__(self):
        self.InteractiveTB, self.SyntaxTB = Printer(), Printer()
        self.last_execution_result = types.SimpleNamespace(
            result=None, error_in_exec=None, error_before_exec=None
        )
        out = {}
        self.user_ns = {"Out": out, "_oh": out, "_": "", "__": "", "___": ""}

    def run(self, held):
        """A cell that fails, and what IPython then keeps of it."""
        error = failed(held)
        self.last_execution_result.error_in_exec = error
        self.InteractiveTB.tb = error.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error


@pytest.fixture
def shell(monkeypatch):
    shell = Shell()
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    return shell


@pytest.fixture
def no_gc(monkeypatch):
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    yield
    gc.enable()


def test_a_notebook(shell, no_gc):
    held = []
    shell.run(held)
    assert held[0]() is not None
    assert oomkit.cleanup() == MIB
    assert held[0]() is None
    assert not any(hasattr(sys, name) for name in LAST)
    assert shell.last_execution_result.error_in_exec is None
    assert shell.InteractiveTB.tb is None
    assert oomkit.cleanup() == 0


@pytest.mark.parametrize("where", LAST[1:])
def test_the_plain_interpreter(where, no_gc):
    held = []
    error = failed(held)
    setattr(sys, where, error.__traceback__ if where == "last_traceback" else error)
    del error
    assert oomkit.cleanup() == MIB
    assert held[0]() is None


def test_without_anything_kept(no_gc):
    assert oomkit.cleanup() == 0


def test_causes_and_contexts_are_let_go_too(shell, no_gc):
    def outer(held):
        try:
            cell(held, 2)
        except torch.OutOfMemoryError as error:
            cell(held, raised := 1) if error else raised

    held = []
    sys.last_value = failed(held, outer)
    assert oomkit.cleanup() == 3 * MIB
    assert [ref() for ref in held] == [None, None]


def test_errors_among_the_outputs(shell, no_gc):
    held = []
    errors = [failed(held) for _ in range(3)]
    kept = torch.ones(MIB, dtype=torch.uint8)
    shell.user_ns.update(_=errors[0], _4=errors[1], mine=kept)
    shell.user_ns["Out"].update({4: errors[1], 5: errors[2], 6: kept})
    del errors
    assert oomkit.cleanup() == 3 * MIB
    assert [ref() for ref in held] == [None] * 3
    assert shell.user_ns["Out"] == {6: kept} and shell.user_ns["_"] == ""
    assert shell.user_ns["mine"] is kept


def test_an_error_that_a_variable_holds_is_no_output(shell, no_gc):
    shell.user_ns["error"] = failed([])
    assert oomkit.cleanup() == 0
    assert isinstance(shell.user_ns["error"], torch.OutOfMemoryError)
    shell.user_ns.clear()


def test_a_debugger_lets_go(shell, no_gc):
    held = []
    error = failed(held)
    shell.InteractiveTB.pdb = Debugger(error.__traceback__.tb_frame)
    sys.last_value = error
    del error
    oomkit.cleanup()
    assert shell.InteractiveTB.pdb.curframe is None
    assert held[0]() is None


def test_the_error_in_hand_stays_as_it_is(shell):
    held = []
    try:
        cell(held)
    except torch.OutOfMemoryError as error:
        sys.last_value = error
        assert oomkit.cleanup() == 0
        assert held[0]() is error.__traceback__.tb_next.tb_frame.f_locals["local"]
    assert not hasattr(sys, "last_value")


def test_shells_that_fail_are_no_reason_to_fail(monkeypatch, no_gc):
    class Odd:
        @property
        def last_execution_result(self):
            raise ValueError

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Odd))
    held = []
    sys.last_value = failed(held)
    assert oomkit.cleanup() == MIB

    def get_ipython():
        raise ValueError

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=get_ipython))
    sys.last_value = failed(held)
    assert oomkit.cleanup() == MIB


def test_what_a_failed_backward_left_is_freed(no_gc):
    gru = torch.nn.GRU(16, 16)
    loss = gru(torch.ones(6, 8, 16))[0].sum()
    with (
        oomkit.testing.inject_oom(nth=6, phase="backward") as fault,
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss.backward()
    assert fault.fired == 1
    del loss
    assert oomkit.cleanup() > 10_000  # of the steps that were queued
    assert oomkit.cleanup() == 0
