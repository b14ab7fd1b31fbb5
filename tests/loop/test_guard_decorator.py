"""@oomkit.guard() on functions and methods, and what guards leave behind."""

import asyncio
import copy
import functools
import gc
import inspect
import logging
import pickle
import sys
import weakref

import pytest
import torch
from helpers.messages import message_of

import oomkit


def oom():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class Tracked:
    """Stands for what frames hold."""


def fails(thing):
    raise oom()


def plain(a, b=2, *, c=3):
    """Adds."""
    return a, b, c


guarded_plain = oomkit.guard()(plain)


@oomkit.guard(label="module level")
def module_level():
    """Pickled by name."""


class Model:
    @oomkit.guard("skip")
    def forward(self, x, *, fail=False):
        """Forward."""
        if fail:
            raise oom()
        return self, x

    @classmethod
    @oomkit.guard()
    def make(cls, x):
        return cls, x

    @staticmethod
    @oomkit.guard()
    def static(x):
        return x


def test_arguments_and_result_pass_through():
    assert guarded_plain(1) == (1, 2, 3)
    assert guarded_plain(*[1, 4], **{"c": 5}) == (1, 4, 5)
    result = object()
    assert oomkit.guard()(lambda: result)() is result
    with pytest.raises(TypeError, match=r"plain\(\) got an unexpected keyword argument 'd'"):
        guarded_plain(1, d=1)


def test_it_looks_like_the_function():
    assert guarded_plain.__wrapped__ is plain
    assert guarded_plain.__name__ == "plain"
    assert guarded_plain.__qualname__ == "plain"
    assert guarded_plain.__module__ == __name__
    assert guarded_plain.__doc__ == "Adds."
    assert guarded_plain.__code__ is plain.__code__
    assert guarded_plain.__kwdefaults__ == {"c": 3}
    assert inspect.signature(guarded_plain) == inspect.signature(plain)
    assert inspect.signature(Model().forward) == inspect.signature(lambda x, *, fail=False: 0)
    assert repr(guarded_plain) == f"<oomkit.guard of {plain!r}>"
    assert weakref.ref(guarded_plain)() is guarded_plain


def test_it_takes_attributes():
    step = oomkit.guard()(lambda: None)
    step.colour = "red"
    assert step.__dict__["colour"] == "red"
    with pytest.raises(AttributeError):
        step.missing  # noqa: B018


def test_it_binds_as_a_function_does():
    model = Model()
    assert model.forward(3) == (model, 3)
    assert model.forward(3, fail=True) is None
    assert Model.forward(model, 4) == (model, 4)
    assert Model.make(5) == (Model, 5)
    assert Model().make(5) == (Model, 5)
    assert Model.static(6) == 6
    assert inspect.ismethod(model.forward)
    assert [record.ooms for record in Model.forward.records[:3]] == [0, 1, 0]


def test_it_can_be_pickled_and_copied_by_name():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level


def test_its_label_is_the_guards_or_the_functions():
    assert module_level.label == "module level"
    assert Model.forward.label == "Model.forward"
    assert oomkit.guard()(functools.partial(plain, 1)).label == "functools.partial"


def test_each_function_has_records_of_its_own():
    guard = oomkit.guard()
    one, two = guard(lambda: 1), guard(lambda: 2)
    one()
    one()
    two()
    assert (len(one.records), len(two.records), len(guard.records)) == (2, 1, 0)


def test_a_cycle_through_the_function_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.step = oomkit.guard()(lambda itself=holder: itself)
    reference = weakref.ref(holder.step)
    del holder
    gc.collect()
    assert reference() is None


async def coroutine():
    pass


async def asynchronous_generator():
    yield 1


def generator():
    yield 1


class AsyncCallable:
    async def __call__(self):
        pass


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "an async function"),
        (asynchronous_generator, "an async function"),
        (functools.partial(coroutine), "an async function"),
        (AsyncCallable(), "an async function"),
        (generator, "a generator function"),
    ],
)
def test_a_body_that_runs_later_is_refused(function, kind):
    with pytest.raises(TypeError) as caught:
        oomkit.guard()(function)
    assert message_of(caught.value) == (
        f"guard() cannot decorate {kind}: its body runs after the call has returned; use "
        "`with oomkit.guard():` inside it"
    )


def test_inside_an_async_function_it_works():
    async def evaluate():
        with oomkit.guard("skip") as guard:
            await asyncio.sleep(0)
            raise oom()
        return guard.records[0].ooms

    assert asyncio.run(evaluate()) == 1


def test_only_callables_are_decorated():
    with pytest.raises(TypeError) as caught:
        oomkit.guard()(3)
    assert message_of(caught.value) == "guard() expected a callable, got 'int'"


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((plain, 1), {}), ((plain,), {"x": 1})])
def test_a_decorator_takes_one_callable(args, kwargs):
    with pytest.raises(TypeError) as caught:
        oomkit.guard()(*args, **kwargs)
    assert (
        message_of(caught.value) == "guard() as a decorator expected one callable and nothing else"
    )


def test_half_made_objects_cannot_be_had():
    guarded = type(guarded_plain)
    for make in (lambda: guarded(), lambda: guarded.__new__(guarded)):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(TypeError):
        type("Mine", (oomkit.guard,), {})
    with pytest.raises(TypeError):
        oomkit.guard.colour = "red"


# --- leaks ---


def skipped_in_a_block():
    with oomkit.guard("skip"):
        fails(Tracked())


@oomkit.guard("skip")
def skipped_by_decorator():
    fails(Tracked())


def healthy():
    with oomkit.guard(label="x"):
        guarded_plain(1)
    oomkit.guard()(plain)


@pytest.mark.parametrize("body", [skipped_in_a_block, skipped_by_decorator, healthy])
def test_nothing_leaks(body, monkeypatch):
    monkeypatch.setattr(logging.getLogger("oomkit"), "disabled", True)

    def figures():
        gc.collect()
        types = (oomkit.guard, type(guarded_plain), oomkit.StepRecord, oomkit.OOMReport)
        return len(gc.get_objects()), *map(sys.getrefcount, types)

    for _ in range(1100):
        body()
    before = figures()
    for _ in range(1000):
        body()
    after = figures()
    assert max(b - a for a, b in zip(before, after, strict=True)) < 20


def test_records_are_whole_or_not_there_when_memory_runs_out():
    testcapi = pytest.importorskip("_testcapi")
    guard = oomkit.guard(label="x" * 40)
    for _ in range(3):
        with guard:
            pass
    expected = guard.records
    outcomes = set()
    for nth in range(1, 80):
        testcapi.set_nomemory(nth, nth + 1)
        try:
            records = guard.records
        except MemoryError:
            records = None
        finally:
            testcapi.remove_mem_hooks()
        assert records in (None, expected)
        outcomes.add(records is None)
    assert outcomes == {True, False}
