"""Dropping an exception: nothing that it reached stays, what is not ours is left alone.

A decorated function that is skipped drops what it raised.
"""

import builtins
import gc
import sys
import weakref

import pytest
import torch

import oomkit

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."


def oom():
    return torch.OutOfMemoryError(CUDA_TEXT)


class CompilerFailed(Exception):
    """Looks like an error of torch's compiler."""

    __module__ = "torch._dynamo.exc"

    def __init__(self, text="backend='inductor' raised", inner=None):
        super().__init__(text)
        if inner is not None:
            self.inner_exception = inner


def caused(error, cause):
    error.__cause__ = cause
    return error


class Tracked:
    """Stands for what frames hold."""


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def shape_plain(thing):
    raise oom()


def shape_local(thing):
    try:
        raise oom()
    except torch.OutOfMemoryError as error:
        kept = error  # noqa: F841
        raise


def shape_cause(thing):
    try:
        shape_local(thing)
    except torch.OutOfMemoryError as error:
        first = error
        raise oom() from first


def shape_context(thing):
    try:
        shape_local(Tracked())
    except torch.OutOfMemoryError as error:
        first = error  # noqa: F841
        raise oom()  # noqa: B904


def shape_inner(thing):
    try:
        shape_local(thing)
    except torch.OutOfMemoryError as error:
        wrapper = CompilerFailed(inner=error)
    raise wrapper


def shape_attribute(thing):
    error = oom()
    error.myself = error
    error.thing = thing
    raise error


def shape_group(thing):
    errors = []
    for function in (shape_plain, shape_local, shape_cause):
        try:
            function(thing)
        except torch.OutOfMemoryError as error:
            errors.append(error)
    group = ExceptionGroup("several", errors)
    errors[0].group = group
    raise group


def shape_taken_away(thing):
    raise oom() from oom().with_traceback(None)


def shape_ring(thing):
    one, two = oom(), oom()
    try:
        raise two
    except torch.OutOfMemoryError:
        pass
    one.__cause__, two.__cause__ = two, one
    raise one


def shape_snapshot(thing):
    frame = sys._getframe()  # noqa: F841
    names = locals()  # noqa: F841
    raise oom()


def shape_deep(thing, depth=60):
    local = Tracked()  # noqa: F841
    try:
        if depth:
            shape_deep(thing, depth - 1)
        raise oom()
    except torch.OutOfMemoryError as error:
        first = error  # noqa: F841
        raise oom()  # noqa: B904


def shape_generator(thing):
    def numbers():
        held = thing  # noqa: F841
        yield 1
        raise oom()

    return list(numbers())


SHAPES = {
    name.removeprefix("shape_"): value
    for name, value in list(globals().items())
    if name.startswith("shape_")
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_outlives_a_dropped_exception(shape, no_gc):
    references = []

    @oomkit.guard("skip")
    def step():
        thing, tensor = Tracked(), torch.empty(8)
        references.extend([weakref.ref(thing), weakref.ref(tensor)])
        shape(thing)

    assert step() is None
    assert [reference() for reference in references] == [None, None]


def test_a_kept_exception_is_stripped(no_gc):
    saved = []

    @oomkit.guard("skip")
    def step():
        try:
            shape_cause(Tracked())
        except torch.OutOfMemoryError as error:
            saved.append(error)
            raise

    step()
    (error,) = saved
    assert error.__traceback__ is None
    assert error.__cause__ is None
    assert error.__context__ is None
    assert error.args == (CUDA_TEXT,)


def fails_with(thing):
    raise ValueError("the caller's own")


def frames_below(error):
    """What an exception's traceback holds, the frame that handles it left out."""
    found, node = [], error.__traceback__.tb_next
    while node is not None:
        found.append((node, node.tb_frame, dict(node.tb_frame.f_locals)))
        node = node.tb_next
    return found


def raise_new(handled):
    raise oom()


def raise_from(handled):
    raise oom() from handled


def raise_wrapped(handled):
    raise CompilerFailed(CUDA_TEXT, inner=caused(oom(), handled))


def raise_with_its_traceback(handled):
    raise oom().with_traceback(handled.__traceback__)


def raise_grouped(handled):
    error = oom()
    error.seen = [handled]
    error.other = handled
    raise ExceptionGroup("several", [error, caused(oom(), handled)])


@pytest.mark.parametrize("on_oom", ["skip", "raise"])
@pytest.mark.parametrize(
    "raiser", [raise_new, raise_from, raise_wrapped, raise_with_its_traceback, raise_grouped]
)
def test_what_the_caller_is_handling_keeps_everything(raiser, on_oom):
    step = oomkit.guard(on_oom)(raiser)
    thing = Tracked()
    try:
        fails_with(thing)
    except ValueError as error:
        error.__cause__ = KeyError("older")
        error.inner_exception = IndexError("inner")
        links = error.__cause__, error.inner_exception
        before = frames_below(error)
        try:
            step(error)
        except (torch.OutOfMemoryError, CompilerFailed, ExceptionGroup):
            assert on_oom == "raise"
        assert before == frames_below(error)
        assert before[0][2] == {"thing": thing}
        assert (error.__cause__, error.inner_exception) == links


def test_the_exception_being_handled_may_be_the_one_that_comes_out():
    @oomkit.guard("skip")
    def step():
        raise  # noqa: PLE0704

    try:
        shape_plain(thing := Tracked())
    except torch.OutOfMemoryError as error:
        assert step() is None
        assert error.__traceback__ is not None
        assert error.__traceback__.tb_next.tb_frame.f_locals == {"thing": thing}


def test_a_generator_that_paused_goes_on():
    saved = []

    def numbers():
        value = "kept"
        try:
            raise oom()
        except torch.OutOfMemoryError as error:
            saved.append(error)
        yield 1
        yield value

    running = numbers()
    next(running)

    @oomkit.guard("skip")
    def step():
        raise saved[0]

    assert step() is None
    assert list(running) == ["kept"]


def test_a_finaliser_may_raise_and_may_run_out_of_memory_itself(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unraisable.append(args.exc_type))

    class Rude:
        def __del__(self):
            raise oom()

    @oomkit.guard("skip")
    def step():
        held = Rude()  # noqa: F841
        raise oom()

    assert step() is None
    assert unraisable == [torch.OutOfMemoryError]


def test_memory_running_out_while_dropping_changes_nothing(monkeypatch):
    testcapi = pytest.importorskip("_testcapi")
    monkeypatch.setattr(sys, "unraisablehook", lambda args: None)
    monkeypatch.setattr(builtins, "print", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "stderr", None)  # logging reports its own failures there
    error = oom()
    references = []

    @oomkit.guard("skip")
    def step(thing):
        references.append(weakref.ref(thing))
        raise error

    # Never all from there: CPython 3.11 itself then goes round in circles when it is to
    # enter a `finally` of Python code, logging's for example.
    for width in (1, 40):
        for nth in range(1, 120):
            references.clear()
            thing = Tracked()
            outcome = "skipped"
            testcapi.set_nomemory(nth, nth + width)
            try:
                step(thing)
            except MemoryError:
                outcome = "no memory"
            finally:
                testcapi.remove_mem_hooks()
            assert outcome in ("skipped", "no memory")
            assert error.__traceback__ is None or outcome == "no memory"
            error.__traceback__ = error.__context__ = None
    thing = Tracked()
    assert step(thing) is None
