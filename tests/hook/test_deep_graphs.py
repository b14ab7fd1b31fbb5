"""Graphs of tens of thousands of operations in a row: an error, never a crash of the process.

Torch frees such a graph without recursion as long as nobody has looked through it. Each program
runs in a process of its own, because what is tested for ends it. How deep is too deep goes with
the stack: but for one test, `make test` works in a thread with an eighth of the usual stack and
with graphs of an eighth of the depth, and `make prove` with the whole.
"""

from __future__ import annotations

import textwrap

import pytest
from helpers.own_process import run_program
from helpers.sample import WHOLE

STACK = 8 << 20
SHARE = 1 if WHOLE else 8
DEEP, DEEP_ENOUGH, WIDE = 50_000 // SHARE, 12_000 // SHARE, 20_000 // SHARE
PRELUDE = """
import copy, warnings
from collections import UserList
import torch
import oomkit
from oomkit.testing import force_slices

torch.set_num_threads(1)
torch.manual_seed(3)
warnings.simplefilter("ignore")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(8, 4)
armed = UserList()  # where the next failure is


def fail(where):
    if where in armed:
        armed.remove(where)
        raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 MiB.")


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, g):
        fail("backward")
        return g


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * 1.0

    @staticmethod
    def backward(ctx, g):
        return g


def chain(h, n, custom=0):
    for i in range(n):
        h = Times.apply(h) if custom and i % custom == 0 else h + 0.0
    return h


def loss_of(x, n, custom=0):
    h = chain(Passes.apply(model(x)), n, custom)
    fail("forward")
    return h.square().mean()


def state():
    return copy.deepcopy(
        [model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict()]
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def refused(run, kind, *words):
    optimizer.zero_grad()  # as the step does, before anything is marked
    before = state()
    try:
        run(x)
    except kind as error:
        said = str(error) + " ".join(getattr(error, "__notes__", ()))
        assert all(word in said for word in words), said
    else:
        raise AssertionError("not refused")
    assert same(before, state()), "the state is another one"
"""

IN_STEP = """
@oomkit.auto_batch({options})
def step(x):
    optimizer.zero_grad()
    loss = loss_of(x, {n}, {custom})
    loss.backward()
    optimizer.step()
    return loss.detach()


run = step
"""
RETURNED = """
@oomkit.auto_batch({options})
def step(x):
    return loss_of(x, {n}, {custom})


def run(x):
    loss = step(x)
    loss.backward()
    optimizer.step()
"""


IN_THREAD = """
import sys, threading, traceback

def in_thread():
    try:
        exec(compile({code!r}, "<program>", "exec"), vars(sys.modules["__main__"]))
    except BaseException:
        traceback.print_exc()
        failed.append(1)

failed = []
thread = threading.Thread(target=in_thread)
threading.stack_size({stack})
thread.start()
threading.stack_size(0)
thread.join()
sys.exit(len(failed))
"""


def _run(*parts: str, share: int = SHARE) -> None:
    code = PRELUDE + "".join(textwrap.dedent(part) for part in parts)
    if share > 1:
        code = IN_THREAD.format(code=code, stack=STACK // share)
    done = run_program(code)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-2000:]}"


def _form(form: str, n: int, custom: int = 0, options: str = "") -> str:
    return (IN_STEP if form == "whole" else RETURNED).format(n=n, custom=custom, options=options)


@pytest.mark.parametrize("options", ["", 'verify=True, gradient_safety="off"'])
@pytest.mark.parametrize("form", ["whole", "returned"])
def test_refused_by_name(form: str, options: str) -> None:
    _run(
        _form(form, DEEP, custom=7 * (not options), options=options),
        """
        run(x)  # healthy: no limit
        armed.append("forward")
        refused(run, oomkit.SplitError, "more than", "operations follow one another")
        run(x)
        armed.append("backward")
        refused(run, oomkit.OutOfMemory, "not retried", "operations follow one another")
        run(x)
        """,
    )


@pytest.mark.parametrize("form", ["whole", "returned"])
def test_asked_for_micro_batches(form: str) -> None:
    """In the first thread, whose stack is the usual one."""
    _run(
        _form(form, DEEP * SHARE),
        """
        with force_slices([3, 3, 2]):
            refused(run, oomkit.SplitError, "operations follow one another")
        """,
        share=1,
    )


def test_a_step_that_catches_the_refusal_is_told_so() -> None:
    _run(
        f"""
        @oomkit.auto_batch
        def step(x):
            try:
                loss_of(x, {DEEP}).backward()
            except oomkit.SplitError:
                pass

        with force_slices([4, 4]):
            refused(step, oomkit.SplitError, "Do not catch oomkit's errors in the step")
        """
    )


@pytest.mark.parametrize("form", ["whole", "returned"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_is_not_too_deep_is_recovered(form: str, where: str) -> None:
    """As deep as 1,000 steps of a recurrent network by hand, and freed afterwards."""
    _run(
        _form(form, DEEP_ENOUGH),
        f"""
        start = state()
        with force_slices([4, 4]):
            run(x)
        expected = state()
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[2])
        for p in model.parameters():
            p.grad = None
        armed.append("{where}")
        run(x)
        assert step.records[-1].ooms == 1
        assert same(expected, state())
        """,
    )


def test_a_deep_graph_above_the_returned_loss() -> None:
    _run(
        _form("returned", 1),
        f"""
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t.clone()

            @staticmethod
            def backward(ctx, g):
                fail("above")
                return g

        def run(x):
            Fails.apply(chain(step(x), {DEEP})).backward()

        run(x)
        armed.append("above")
        refused(run, torch.OutOfMemoryError, "not retried")
        """,
    )


def test_grad_of_another_graph_while_a_loss_waits() -> None:
    _run(
        _form("returned", 1),
        f"""
        kept = step(x)
        leaf = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(chain(leaf * 2, {DEEP}).sum(), leaf)
        assert gradient.tolist() == [2.0, 2.0]
        kept.backward()
        """,
    )


def test_a_wide_graph_is_not_a_deep_one() -> None:
    _run(
        f"""
        @oomkit.auto_batch
        def step(x):
            optimizer.zero_grad()
            h = model(x)
            loss = torch.stack([(h * i).mean() for i in range({WIDE})]).sum() / {WIDE}
            fail("forward")
            loss.backward()
            optimizer.step()

        armed.append("forward")
        step(x)
        assert step.records[-1].accumulation_steps == 2
        """
    )


def test_a_small_stack_takes_less() -> None:
    """A thread with a stack of its own size frees the graph there."""
    _run(
        _form("whole", 4_000),
        """
        import threading

        def work():
            armed.append("forward")
            refused(run, oomkit.SplitError, "more than 512 operations")
            done.append(1)

        done = []
        threading.stack_size(256 << 10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert done
        """,
    )
