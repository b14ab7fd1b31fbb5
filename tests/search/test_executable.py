"""find_executable_batch_size beside accelerate's: the same calls, the same outcome."""

import functools
import gc
import inspect
import logging
import weakref

import accelerate.utils
import pytest
import torch
from helpers.messages import message_of

import oomkit

KIB = 1024
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
BOTH = pytest.mark.parametrize("library", [accelerate.utils, oomkit], ids=["accelerate", "oomkit"])


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """accelerate collects garbage at each call, which takes a second and changes nothing here."""
    monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda **_: None)


def fails_above(limit, sizes, error=None):
    def train(batch_size, first=None, second=None):
        sizes.append(batch_size)
        if batch_size > limit:
            raise error or RuntimeError("CUDA out of memory.")
        return batch_size, first, second

    return train


# --- the same as accelerate's ---


@BOTH
@pytest.mark.parametrize(
    "decorate",
    [
        lambda find, fn: find(fn),
        lambda find, fn: find(function=fn),
        lambda find, fn: find()(fn),
        lambda find, fn: find(starting_batch_size=128)(fn),
        lambda find, fn: find(fn, 128),
        lambda find, fn: find(fn, starting_batch_size=128, reduce_batch_size_fn=None),
    ],
)
def test_forms_and_sizes(library, decorate):
    sizes = []
    train = decorate(library.find_executable_batch_size, fails_above(80, sizes))
    assert train("a", second="b") == (73, "a", "b")
    assert sizes == [128, 115, 103, 92, 82, 73]


@BOTH
def test_the_size_found_is_kept(library):
    sizes = []
    train = library.find_executable_batch_size(fails_above(100, sizes), 128)
    train()
    train()
    assert sizes == [128, 115, 103, 92, 92]
    other = library.find_executable_batch_size(fails_above(100, sizes), 128)
    other()
    assert sizes[5] == 128  # each decorated function has a size of its own


@BOTH
def test_sizes_chosen_by_the_caller(library):
    sizes = []
    steps = iter([64, 16, 4])
    train = library.find_executable_batch_size(
        starting_batch_size=100, reduce_batch_size_fn=lambda: next(steps)
    )(fails_above(16, sizes))
    assert train()[0] == 16
    assert train()[0] == 16
    assert sizes == [100, 64, 16, 16]


@BOTH
def test_zero(library):
    sizes = []
    train = library.find_executable_batch_size(fails_above(0, sizes), starting_batch_size=4)
    with pytest.raises(RuntimeError) as caught:
        train()
    assert message_of(caught.value) == "No executable batch size found, reached zero."
    assert type(caught.value) is RuntimeError
    assert sizes == [4, 3, 2, 1]
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero."):
        library.find_executable_batch_size(fails_above(9, sizes), starting_batch_size=0)()
    assert sizes == [4, 3, 2, 1]


@BOTH
def test_a_batch_size_that_is_passed_too(library):
    def train(batch_size, model, optimizer):
        raise AssertionError("must not run")

    decorated = library.find_executable_batch_size(train, starting_batch_size=8)
    with pytest.raises(TypeError) as caught:
        decorated(8, "model", "optimizer")
    assert message_of(caught.value) == (
        "Batch size was passed into `train` as the first argument when called."
        "Remove this as the decorator already does so: `train(model=model, optimizer=optimizer)`"
    )


@BOTH
def test_a_method(library):
    class Trainer:
        def __init__(self):
            self.train = library.find_executable_batch_size(self.inner, starting_batch_size=10)

        def inner(self, batch_size, more):
            if batch_size > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")
            return self, batch_size, more

    trainer = Trainer()
    assert trainer.train("more") == (trainer, 8, "more")


@BOTH
@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory."),
        RuntimeError("shapes do not match"),
        RuntimeError("CUDA out of memory.", 3),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_pass_with_their_traceback(library, error):
    sizes = []
    train = library.find_executable_batch_size(fails_above(0, sizes, error), 64)
    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert caught.traceback[-1].name == "train"
    assert error.__context__ is None
    assert sizes == [64]


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory.",
        "XPU out of memory.",
        "MPS backend out of memory",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed with 3",
    ],
)
def test_errors_that_accelerate_knows(library, text):
    train = library.find_executable_batch_size(fails_above(60, [], RuntimeError(text)), 64)
    assert train()[0] == 57


# --- beyond it ---


def compiled():
    class BackendCompilerFailed(RuntimeError):
        pass

    BackendCompilerFailed.__module__ = "torch._dynamo.exc"
    error = BackendCompilerFailed("backend='inductor' raised:", 1)
    error.inner_exception = torch.OutOfMemoryError(CUDA)
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA, "and more"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        ExceptionGroup("workers", [torch.OutOfMemoryError(CUDA), MemoryError()]),
        oomkit.OutOfMemory("step ran out of memory with a micro-batch of 1 of 8 rows"),
        compiled(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_spellings_that_accelerate_does_not_know(error):
    outcome = []
    for library in (accelerate.utils, oomkit):
        train = library.find_executable_batch_size(fails_above(60, [], error), 64)
        try:
            outcome.append(train()[0])
        except BaseException as caught:
            outcome.append(type(caught))
    assert outcome[1] == 57
    assert outcome[0] is type(error)


@pytest.mark.parametrize(
    "error",
    [
        oomkit.PartialUpdate("ran out of memory. The update is half done"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error"),
        ExceptionGroup("workers", [torch.OutOfMemoryError(CUDA), ValueError()]),
    ],
    ids=["partial", "sticky", "worker", "mixed group"],
)
def test_what_a_smaller_batch_does_not_cure_passes(error):
    sizes = []
    with pytest.raises(type(error)) as caught:
        oomkit.find_executable_batch_size(fails_above(0, sizes, error), 64)()
    assert caught.value is error and sizes == [64]


def test_after_zero_the_smallest_is_tried_again():
    sizes, limit = [], [0]

    def train(batch_size):
        sizes.append(batch_size)
        if batch_size > limit[0]:
            raise torch.OutOfMemoryError(CUDA)
        return batch_size

    decorated = oomkit.find_executable_batch_size(train, 3)
    with pytest.raises(RuntimeError, match="reached zero") as caught:
        decorated()
    (note,) = caught.value.__notes__
    assert "batch_size 3, 2, 1" in note and "<locals>.train)" in note
    limit[0] = 1
    assert decorated() == 1
    assert sizes == [3, 2, 1, 1]


@pytest.mark.parametrize("value", [64, 100])
def test_sizes_that_do_not_fall_are_refused(value):
    decorated = oomkit.find_executable_batch_size(
        fails_above(0, []), 64, reduce_batch_size_fn=lambda: value
    )
    with pytest.raises(ValueError, match=f"to return less than 64, .* got {value}") as caught:
        decorated()
    assert caught.value.__context__ is None


def test_misuse():
    with pytest.raises(TypeError, match="pass starting_batch_size= by name"):
        oomkit.find_executable_batch_size(64)

    async def later(batch_size):
        pass

    def generate(batch_size):
        yield batch_size

    for function in (later, generate, functools.partial(generate)):
        with pytest.raises(TypeError, match="an async or a generator function"):
            oomkit.find_executable_batch_size(function)
    with pytest.raises(TypeError, match="leave one of the two out"):
        oomkit.find_executable_batch_size(print, reduce_batch_size_fn=int, grow_back=True)


def test_each_change_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="oomkit"):
        oomkit.find_executable_batch_size(fails_above(10, []), 12)()
    assert [record.getMessage() for record in caplog.records] == [
        "function=train batch_size=12->10 reason=oom"
    ]


def test_name_and_signature_are_the_callers():
    decorated = oomkit.find_executable_batch_size(fails_above(9, []))
    assert decorated.__name__ == "train"
    assert str(inspect.signature(decorated)) == "(first=None, second=None)"


# --- bounds ---


def test_bounds():
    limit, sizes = [100], []

    def train(batch_size):
        sizes.append(batch_size)
        if batch_size > limit[0]:
            raise torch.OutOfMemoryError(CUDA)

    decorated = oomkit.find_executable_batch_size(train, 128)
    search = decorated.search
    decorated()
    assert (search.largest_that_worked, search.smallest_that_failed) == (92, 103)
    assert search.batch_size == 92
    limit[0] = 90
    decorated()
    assert (search.largest_that_worked, search.smallest_that_failed) == (82, 92)
    limit[0] = 1000
    decorated()
    assert sizes[-1] == 82  # as accelerate: it never grows by itself


def test_growing_back_when_asked_for():
    limit, sizes = [20], []

    def train(batch_size):
        sizes.append(batch_size)
        if batch_size > limit[0]:
            raise torch.OutOfMemoryError(CUDA)
        return batch_size

    decorated = oomkit.find_executable_batch_size(train, 25, grow_back=True)
    assert decorated() == 19 and sizes == [25, 22, 19]
    search = decorated.search
    search.largest_that_worked = search.batch_size = 10
    sizes.clear()
    assert [decorated() for _ in range(5)] == [16, 19, 20, 20, 20]
    assert sizes == [16, 19, 20, 20, 20]  # 20 and 22 are close enough
    assert (search.largest_that_worked, search.smallest_that_failed) == (20, 22)
    limit[0] = 12
    sizes.clear()
    assert decorated() == 12


# --- nothing of a failed attempt stays ---


class Tracked:
    """Stands for what frames hold."""


@pytest.fixture
def no_gc(monkeypatch):
    gc.collect()
    gc.disable()

    def collect(*args):
        raise AssertionError("garbage must not need to be collected")

    monkeypatch.setattr(gc, "collect", collect)
    yield
    gc.enable()


def test_the_failed_attempt_is_gone_before_the_next(no_gc):
    held, alive = [], []

    def train(batch_size, width):
        held.append(weakref.ref(mine := Tracked()))
        alive.append((oomkit.memory("cpu").allocated, [ref() for ref in held[:-1]]))
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(batch_size, width)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return batch_size, mine is not None

    oomkit.memory("cpu")
    decorated = oomkit.find_executable_batch_size(train, 64)
    before = oomkit.memory("cpu").allocated
    with oomkit.limit_memory(before + 400 * KIB, device="cpu"):
        size, _ = decorated(128)
    assert 0 < size < 64
    assert len(alive) > 2
    assert all(refs == [None] * len(refs) for _, refs in alive)
    assert {allocated for allocated, _ in alive} == {before}


@pytest.mark.parametrize("nth", range(1, 14))
def test_wherever_it_fails(no_gc, nth):
    alive = []

    def train(batch_size):
        alive.append(oomkit.memory("cpu").allocated)
        layer = torch.nn.Linear(8, 8)
        x = torch.ones(batch_size, 8)
        layer(layer(x).relu()).sum().backward()
        return batch_size

    decorated = oomkit.find_executable_batch_size(train, 16)
    with oomkit.testing.inject_oom(nth=nth) as fault:
        size = decorated()
    assert size == (14 if fault.fired else 16)
    assert len(alive) == 1 + fault.fired
    assert len(set(alive)) == 1


def test_an_exception_that_is_kept_or_linked_holds_nothing(no_gc):
    kept = []

    def inner(thing):
        raise torch.OutOfMemoryError(CUDA)

    def train(batch_size):
        thing = Tracked()
        kept.append(weakref.ref(thing))
        if batch_size > 30:
            try:
                inner(thing)
            except torch.OutOfMemoryError as error:
                error.where = error  # a cycle
                raise RuntimeError("CUDA out of memory.") from error
        return batch_size

    assert oomkit.find_executable_batch_size(train, 32)() == 28
    assert [ref() for ref in kept[:-1]] == [None]


def test_inside_a_handler_the_callers_exception_is_left_alone():
    def fails():
        local = Tracked()
        raise ValueError(local)

    try:
        fails()
    except ValueError as error:
        assert oomkit.find_executable_batch_size(fails_above(10, []), 12)()[0] == 10
        assert error.__traceback__.tb_next.tb_frame.f_locals["local"] is error.args[0]


def test_cycles_are_collected_where_bytes_are_still_held():
    gc.collect()  # of other tests
    gc.disable()
    try:
        held = []

        def train(batch_size):
            held.append(oomkit.memory("cpu").allocated)
            cycle = [torch.ones(batch_size, KIB)]
            cycle.append(cycle)
            if batch_size > 8:
                raise torch.OutOfMemoryError(CUDA)

        oomkit.find_executable_batch_size(train, 9)()
        assert held[0] == held[1]
    finally:
        gc.enable()


def test_a_healthy_call_collects_nothing(no_gc):
    assert oomkit.find_executable_batch_size(fails_above(10, []), 5)()[0] == 5
