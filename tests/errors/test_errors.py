"""Exception types, is_oom_error and classify."""

import pickle
import sys

import pytest
import torch
from helpers.messages import message_of

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
    assert message_of(caught.value) == f"{name}() expected an exception, got '{got}'"
