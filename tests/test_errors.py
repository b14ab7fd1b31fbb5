"""Exception types, is_oom_error, classify, and dropping an exception for good."""

import builtins
import gc
import pickle
import sys
import weakref

import pytest
import torch

import oomkit

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."


def oom(text=CUDA_TEXT):
    return torch.OutOfMemoryError(text)


def accelerator_error(text, code=None):
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


class CompilerFailed(Exception):
    """Looks like an error of torch's compiler."""

    __module__ = "torch._dynamo.exc"

    def __init__(self, text="backend='inductor' raised", inner=None):
        super().__init__(text)
        if inner is not None:
            self.inner_exception = inner


class LoweringFailed(RuntimeError):
    __module__ = "torch._inductor.exc"


class ArrayMemoryError(MemoryError):
    """Without a message of its own among its arguments, as numpy's."""

    def __str__(self):
        return "Unable to allocate 8.00 GiB for an array"


def caused(error, cause):
    error.__cause__ = cause
    return error


def cyclic():
    error = CompilerFailed()
    error.inner_exception = error
    return error


# --- the types ---


def test_the_hierarchy():
    assert oomkit.OomkitError.__bases__ == (Exception,)
    assert oomkit.OutOfMemory.__bases__ == (oomkit.OomkitError, torch.OutOfMemoryError)
    assert oomkit.PartialUpdate.__bases__ == (oomkit.OomkitError, RuntimeError)
    assert oomkit.SplitError.__bases__ == (oomkit.OomkitError, ValueError)
    assert oomkit.OomkitWarning.__bases__ == (UserWarning,)


NAMES = ["OomkitError", "OutOfMemory", "PartialUpdate", "SplitError", "OomkitWarning"]


@pytest.mark.parametrize("name", NAMES)
def test_a_type_knows_where_it_lives_and_what_it_is_for(name):
    type_ = getattr(oomkit, name)
    assert (type_.__module__, type_.__qualname__) == ("oomkit", name)
    assert len(type_.__doc__) > 40


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_can_be_pickled(name):
    error = getattr(oomkit, name)("what happened", 3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == ("what happened", 3)


def test_out_of_memory_has_its_attributes_from_the_start():
    error = oomkit.OutOfMemory("text")
    assert error.report is None
    assert error.committed is False


def test_out_of_memory_keeps_its_attributes_when_pickled():
    error = oomkit.OutOfMemory("text")
    error.committed = True
    error.report = oomkit.OOMReport(range(len(oomkit.OOMReport.__match_args__)))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.committed is True
    assert copy.report == error.report
    assert type(copy.report) is oomkit.OOMReport


@pytest.mark.parametrize("type_", [oomkit.StepRecord, oomkit.OOMReport])
def test_records_cannot_be_made_of_nothing_nor_be_changed(type_):
    with pytest.raises(TypeError):
        type_.__new__(type_)
    record = type_(range(len(type_.__match_args__)))
    name = type_.__match_args__[0]
    with pytest.raises(AttributeError):
        setattr(record, name, 1)
    assert repr(record).startswith(f"oomkit.{type_.__name__}({name}=0, ")


# --- classification ---

CERTAIN = {
    "cuda": lambda: oom(),
    "subclass": lambda: type("Mine", (torch.OutOfMemoryError,), {})(CUDA_TEXT),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)."),
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "accelerator, code": lambda: accelerator_error("CUDA error: whatever", 2),
    "accelerator, text": lambda: accelerator_error("CUDA error: out of memory"),
    "python": lambda: MemoryError(),
    "numpy": lambda: ArrayMemoryError((1, 2), "float64"),
    "inner": lambda: CompilerFailed(inner=oom()),
    "inner, deeper": lambda: CompilerFailed(inner=caused(LoweringFailed("x"), oom())),
    "cause": lambda: caused(CompilerFailed(), oom()),
    "wrapper, text only": lambda: CompilerFailed(f"OutOfMemoryError: {CUDA_TEXT}"),
    "group": lambda: ExceptionGroup("several", [oom(), MemoryError()]),
    "group in group": lambda: ExceptionGroup("x", [ExceptionGroup("y", [oom()])]),
    "text outside of UTF-8": lambda: oom("CUDA out of memory. \udc80"),
}

OTHER = {
    "value": lambda: ValueError(CUDA_TEXT),
    "runtime": lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "says so in passing": lambda: RuntimeError("we might run out of memory one day"),
    "key": lambda: KeyError("CUDA error: out of memory"),
    "interrupt": lambda: KeyboardInterrupt(CUDA_TEXT),
    "exit": lambda: SystemExit(CUDA_TEXT),
    "user's wrapper": lambda: caused(RuntimeError("step failed"), oom()),
    "triton shared memory": lambda: CompilerFailed("out of resource: shared memory"),
    "wrapped other": lambda: CompilerFailed(CUDA_TEXT, inner=ValueError("x")),
    "mixed group": lambda: ExceptionGroup("x", [oom(), ValueError("x")]),
    "mixed base group": lambda: BaseExceptionGroup("x", [oom(), KeyboardInterrupt()]),
    "cycle": cyclic,
    "partial update": lambda: oomkit.PartialUpdate(CUDA_TEXT),
    "split": lambda: oomkit.SplitError(CUDA_TEXT),
    "ours": lambda: oomkit.OomkitError(CUDA_TEXT),
    "index on mps": lambda: accelerator_error("index out of range", 2),
    "no text": lambda: RuntimeError(),
}


@pytest.mark.parametrize("make", CERTAIN.values(), ids=CERTAIN)
def test_out_of_memory_is_certain(make):
    assert oomkit.classify(make()) == "certain"
    assert oomkit.is_oom_error(make()) is True


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_look_alikes_are_not_out_of_memory(make):
    assert oomkit.classify(make()) == "other"
    assert oomkit.is_oom_error(make()) is False


@pytest.mark.parametrize(
    ("error", "expected", "is_oom"),
    [
        (
            RuntimeError("GET was unable to find an engine to execute this computation"),
            "masked",
            True,
        ),
        (oomkit.OutOfMemory("gave up"), "never", True),
        (
            oom("Caught OutOfMemoryError in DataLoader worker process 0.\n" + CUDA_TEXT),
            "never",
            True,
        ),
        (accelerator_error("CUDA error: an illegal memory access", 700), "sticky", False),
        (ExceptionGroup("x", [oom(), oomkit.OutOfMemory("gave up")]), "never", True),
        (
            ExceptionGroup("x", [oom(), accelerator_error("CUDA error: x", 710)]),
            "sticky",
            False,
        ),
    ],
)
def test_what_a_smaller_micro_batch_cannot_help(error, expected, is_oom):
    assert oomkit.classify(error) == expected
    assert oomkit.is_oom_error(error) is is_oom


def test_a_dead_communicator_is_never_retried():
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    error = torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")
    assert oomkit.classify(error) == "never"


def test_a_real_one_is_certain():
    with oomkit.testing.inject_oom(), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(16)
    assert oomkit.classify(caught.value) == "certain"


def test_classification_leaves_the_exception_alone():
    error = CompilerFailed(inner=oom())
    try:
        raise error
    except CompilerFailed:
        traceback = error.__traceback__
        assert oomkit.is_oom_error(error)
        assert error.__traceback__ is traceback
        assert error.__context__ is None
        assert sys.exception() is error


@pytest.mark.parametrize("name", ["is_oom_error", "classify"])
@pytest.mark.parametrize(("value", "got"), [("CUDA out of memory", "str"), (ValueError, "type")])
def test_only_exceptions_are_judged(name, value, got):
    with pytest.raises(TypeError) as caught:
        getattr(oomkit, name)(value)
    assert str(caught.value) == f"{name}() expected an exception, got '{got}'"


# --- dropping: a decorated function that is skipped drops what it raised ---


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


def raise_grouped(handled):
    error = oom()
    error.seen = [handled]
    error.other = handled
    raise ExceptionGroup("several", [error, caused(oom(), handled)])


@pytest.mark.parametrize("on_oom", ["skip", "raise"])
@pytest.mark.parametrize("raiser", [raise_new, raise_from, raise_wrapped, raise_grouped])
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

    for last in (1, 0):  # one allocation fails, or all from there
        for nth in range(1, 120):
            references.clear()
            thing = Tracked()
            outcome = "skipped"
            testcapi.set_nomemory(nth, nth + 1 if last else 0)
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
