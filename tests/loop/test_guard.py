"""oomkit.guard, as a context manager and as a decorator."""

import functools
import gc
import logging
import pickle
import sys
import threading
import weakref

import pytest
import torch
from helpers.messages import message_of
from helpers.seen import Seen

import oomkit

pytestmark = pytest.mark.no_proof  # runs of the step are counted, or its warnings are

MIB = 2**20
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."


def oom():
    return torch.OutOfMemoryError(TEXT)


def mebibytes(count):
    return torch.empty(count * MIB, dtype=torch.uint8)


def peak(record):
    return (record.peak_allocated - record.baseline) // MIB


class Tracked:
    pass


def fails(thing, error=None):
    raise oom() if error is None else error


# --- what passes, what is skipped ---


def test_nothing_happens_to_healthy_code(caplog):
    guard = oomkit.guard(label="healthy")
    with guard as entered:
        pass
    assert entered is guard
    (record,) = guard.records
    assert (record.label, record.step, record.ooms) == ("healthy", 1, 0)
    assert (record.outcome, record.reason) == ("finished", "whole")
    assert record.batch_size is None
    assert record.time >= 0 and record.time_lost == 0
    assert caplog.records == []


@pytest.mark.parametrize("form", ["context", "decorator"])
@pytest.mark.parametrize("on_oom", ["raise", "skip"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("shapes"),
        KeyboardInterrupt(),
        SystemExit(3),
        oomkit.PartialUpdate(TEXT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_oom_passes_untouched(form, on_oom, error, caplog):
    guard = oomkit.guard(on_oom)
    thing = Tracked()
    run = guard(fails) if form == "decorator" else fails
    context = guard if form == "context" else oomkit.guard()
    try:
        with context:
            run(thing, error)
    except BaseException as caught:
        assert caught is error
        assert caught.__context__ is None and caught.__cause__ is None
        assert not hasattr(caught, "__notes__") and not hasattr(caught, "report")
        names, node = [], caught.__traceback__
        while node is not None:
            names.append(node.tb_frame.f_code.co_name)
            last, node = node, node.tb_next
        assert names == ["test_what_is_not_oom_passes_untouched", "fails"]
        assert last.tb_frame.f_locals == {"thing": thing, "error": error}
    else:
        pytest.fail("the error was swallowed")
    holder = run if form == "decorator" else guard
    assert [(r.outcome, r.ooms) for r in holder.records] == [("error", 0)]
    assert caplog.records == []
    error.__traceback__ = None


def test_raise_lets_the_exception_go_on_with_frames_cleared():
    gc.disable()
    try:
        thing = Tracked()
        reference = weakref.ref(thing)
        error = oom()
        with pytest.raises(torch.OutOfMemoryError) as caught, oomkit.guard(label="eval"):
            fails(Tracked(), error)
        assert caught.value is error
        assert caught.traceback[-1].name == "fails"
        assert caught.traceback[-1].frame.raw.f_locals == {}
        del thing
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["context", "decorator"])
def test_the_exception_gets_a_report_and_a_note(form):
    @oomkit.guard(label="eval")
    def decorated():
        fails(None)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        if form == "decorator":
            decorated()
        with oomkit.guard(label="eval"):
            fails(None)
    report = caught.value.report
    assert type(report) is oomkit.OOMReport
    assert (report.label, report.device, report.requested_bytes) == ("eval", "cpu", 2**31)
    (attempt,) = report.attempts
    assert attempt["message"] == TEXT
    assert attempt["location"].endswith(" in fails")
    assert attempt["phase"] is None and attempt["micro_batch_size"] is None
    assert list(report.holders) == ["before the guard", "inside the guard"]
    assert len(report.advice) == 3
    lines = report.text.splitlines()
    assert lines[0].startswith("eval ran out of memory on cpu: requested 2.00 GiB, allocated ")
    assert lines[1] == "what was tried:"
    assert "requested 2.00 GiB" in lines[2] and attempt["location"] in lines[2]
    assert lines[3] == "who held the memory:"
    assert lines[6:] == ["what to do:", *(f"  {n}. {s}" for n, s in enumerate(report.advice, 1))]
    (note,) = caught.value.__notes__
    assert note.startswith(
        "oomkit: memory ran out in guard(label='eval'): requested 2.00 GiB, peak allocated "
    )
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_guard_alone_names_what_would_run_its_block_again():
    def note_of(run):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run()
        return caught.value.__notes__[0]

    def block(**options):
        with oomkit.guard(**options):
            fails(None)

    def loop():
        for _ in oomkit.chunks(torch.ones(1, 4), label="loop"):
            with oomkit.guard(on_oom="raise"):
                fails(None)

    assert "`for part in oomkit.chunks(batch):`" in note_of(block)
    for other in (lambda: block(on_oom="raise"), oomkit.guard()(lambda: fails(None)), loop):
        assert "chunks" not in note_of(other)


def test_an_exception_that_takes_no_attributes_passes_all_the_same(caplog):
    class Fixed(torch.OutOfMemoryError):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    error = Fixed(TEXT)
    with pytest.raises(Fixed) as caught, oomkit.guard():
        fails(None, error)
    assert caught.value is error
    assert not hasattr(error, "report")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("on_oom", "outcome"), [("raise", "raised"), ("skip", "skipped")])
def test_one_line_is_logged(on_oom, outcome, caplog):
    guard = oomkit.guard(on_oom, "eval")
    try:
        with guard:
            fails(None)
    except torch.OutOfMemoryError:
        pass
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("oomkit", logging.WARNING)
    assert line.getMessage().startswith("guard=eval requested=2.00 GiB peak_allocated=")
    assert line.getMessage().endswith(f" outcome={outcome}")


def test_skip_ends_the_exception():
    guard = oomkit.guard(on_oom="skip")
    with guard:
        fails(None)
        pytest.fail("not reached")
    assert sys.exception() is None
    (record,) = guard.records
    assert (record.ooms, record.requested_bytes, record.outcome) == (1, 2**31, "gave up")
    assert record.time_lost == record.time


def test_a_report_that_is_there_stays():
    outer, inner = oomkit.guard(label="outer"), oomkit.guard(label="inner")
    with pytest.raises(torch.OutOfMemoryError) as caught, outer, inner:
        fails(None)
    assert caught.value.report.label == "inner"
    assert ["inner" in note for note in caught.value.__notes__] == [True, False]
    assert "outer" in caught.value.__notes__[1]


def test_an_oom_of_the_allocator_is_recorded():
    guard = oomkit.guard("skip")
    with guard:
        pass
    limit = oomkit.memory("cpu").allocated + 3 * MIB
    with oomkit.limit_memory(limit, device="cpu"), guard:
        held = mebibytes(2)
        held = mebibytes(8)  # noqa: F841
    record = guard.records[-1]
    assert (record.requested_bytes, record.budget) == (8 * MIB, limit)
    assert peak(record) == 2


def test_a_failing_logger_does_not_replace_the_exception(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
    monkeypatch.setattr(logging.getLogger("oomkit"), "warning", lambda *args: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError), oomkit.guard():
        fails(None)
    assert seen == [ZeroDivisionError]


# --- after a failed backward ---


def attention_step(model, batch):
    output, _ = model(batch, batch, batch)
    output.sum().backward()


def test_nothing_of_a_failed_backward_stays_queued():
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    batch = torch.randn(4, 8, 16)
    step = oomkit.guard("skip")(functools.partial(attention_step, model))
    step(batch)
    model.zero_grad()
    step.__wrapped__(batch)
    model.zero_grad()
    gc.collect()  # what other tests have left
    baseline = oomkit.memory("cpu").allocated
    nth = 0
    while True:
        nth += 1
        with oomkit.testing.inject_oom(nth=nth) as fault:
            step(batch)
        model.zero_grad()
        if not fault.fired:
            break
        assert oomkit.memory("cpu").allocated == baseline, f"fault {nth}"
    assert nth > 20


# --- peaks ---


def test_nested_guards_measure_what_is_theirs():
    outer, first, second = oomkit.guard(), oomkit.guard(), oomkit.guard()
    with outer:
        held = mebibytes(2)
        with first:
            mebibytes(5)
        with second:
            mebibytes(1)
        del held
        mebibytes(4)
    assert [peak(guard.records[0]) for guard in (outer, first, second)] == [7, 5, 1]


def test_one_guard_may_be_entered_again_inside_itself():
    guard = oomkit.guard()
    with guard:
        held = mebibytes(3)  # noqa: F841
        with guard:
            mebibytes(2)
        with guard:
            pass
    assert [(record.step, peak(record)) for record in guard.records] == [(2, 2), (3, 0), (1, 5)]


def test_a_guard_inside_a_guarded_function_keeps_both_peaks():
    inner = oomkit.guard()

    @oomkit.guard()
    def outer(depth):
        held = mebibytes(1)  # noqa: F841
        if depth:
            outer(depth - 1)
        else:
            with inner:
                mebibytes(4)

    outer(2)
    assert peak(inner.records[0]) == 4
    assert [peak(record) for record in outer.records] == [5, 6, 7]


def test_a_guard_inside_auto_batch_keeps_both_peaks():
    guard = oomkit.guard()
    model = torch.nn.Linear(4, 4)

    @oomkit.auto_batch
    def step(batch):
        held = mebibytes(2)  # noqa: F841
        with guard:
            mebibytes(3)
        mebibytes(4)
        model(batch).sum().backward()

    step(torch.ones(8, 4))
    assert peak(guard.records[0]) == 3
    assert peak(step.records[0]) == 6


def test_a_guard_inside_auto_batch_leaves_the_retry_to_it():
    guard = oomkit.guard(label="inner")
    model = torch.nn.Linear(4, 4)
    sizes: Seen[int] = Seen()

    @oomkit.auto_batch
    def step(batch):
        sizes.append(len(batch))
        with guard:
            if len(batch) > 4:
                raise oom()
            model(batch).sum().backward()

    step(torch.ones(8, 4))
    assert sizes == [8, 4, 4]
    assert [record.ooms for record in guard.records] == [1, 0, 0]


def test_threads_may_share_a_guard_and_leave_it_in_any_order():
    guard = oomkit.guard()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with guard:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with guard:
        thread.start()
        assert entered.wait(60)
        mine = mebibytes(2)
    assert [record.step for record in guard.records] == [1]
    del mine
    leave.set()
    thread.join()
    assert [record.step for record in guard.records] == [1, 2]


def test_the_latest_1024_records_are_kept():
    guard = oomkit.guard()
    for _ in range(1030):
        with guard:
            pass
    assert [record.step for record in guard.records] == list(range(7, 1031))


# --- misuse ---

ON_OOM = "guard() expected on_oom to be 'raise' or 'skip', got "


@pytest.mark.parametrize(
    ("args", "kwargs", "type_", "message"),
    [
        (("ignore",), {}, ValueError, ON_OOM + "'ignore'"),
        (
            (fails,),
            {},
            TypeError,
            ON_OOM + "an object of type 'function' (as a decorator it is written @oomkit.guard())",
        ),
        (
            (),
            {"on_oom": None},
            TypeError,
            ON_OOM + "an object of type 'NoneType' (as a decorator it is written @oomkit.guard())",
        ),
        (
            (),
            {"label": 3},
            TypeError,
            "guard() expected label to be a str or None, got 'int'",
        ),
        (
            (),
            {"reset_peaks": "yes"},
            TypeError,
            "guard() expected reset_peaks to be a bool, got 'str'",
        ),
        ((), {"retries": 3}, TypeError, "guard() got an unknown option 'retries'"),
    ],
)
def test_bad_options(args, kwargs, type_, message):
    with pytest.raises(type_) as caught:
        oomkit.guard(*args, **kwargs)
    assert type(caught.value) is type_
    assert message_of(caught.value) == message


def test_too_many_positional_options():
    with pytest.raises(TypeError, match="guard"):
        oomkit.guard("raise", "label", True)


def test_leaving_what_was_not_entered():
    guard = oomkit.guard()
    with pytest.raises(RuntimeError) as caught:
        guard.__exit__(None, None, None)
    assert message_of(caught.value) == "guard() is left, but was not entered"
    with pytest.raises(TypeError):
        guard.__exit__()


def test_entering_too_often():
    guard = oomkit.guard()
    for _ in range(8):
        guard.__enter__()
    with pytest.raises(RuntimeError) as caught:
        guard.__enter__()
    assert message_of(caught.value) == (
        "guard() is entered 8 times already: make a guard for each level"
    )
    for _ in range(8):
        guard.__exit__(None, None, None)
    assert len(guard.records) == 8


def test_a_guard_that_is_never_left_takes_no_window_with_it():
    for _ in range(200):  # there are 64 windows
        oomkit.guard().__enter__()
    guard = oomkit.guard()
    with guard:
        mebibytes(1)
    assert peak(guard.records[0]) == 1


def test_representation():
    assert repr(oomkit.guard("skip", "eval")) == "<oomkit.guard on_oom='skip' label='eval'>"
    assert repr(oomkit.guard()) == "<oomkit.guard on_oom='raise' label=None>"
    assert oomkit.guard("skip", "eval").on_oom == "skip"
