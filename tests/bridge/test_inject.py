"""oomkit.testing.inject_oom: which allocation fails, and which do not count."""

import os
import threading
import warnings

import pytest
import torch
from helpers.messages import message_of

import oomkit
from oomkit.testing import inject_oom


def one():
    """Exactly one allocation of 256 bytes."""
    return torch.empty(64)


def outcomes(count):
    """For each of `count` allocations whether it failed."""
    failed = []
    for _ in range(count):
        try:
            one()
            failed.append(False)
        except torch.OutOfMemoryError:
            failed.append(True)
    return failed


def training_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 8)

    def step():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_exactly_the_named_allocations_fail(nth, times):
    with inject_oom(nth=nth, times=times) as fault:
        failed = outcomes(8)
    assert failed == [nth <= i < nth + times for i in range(1, 9)]
    assert (fault.seen, fault.fired) == (8, min(times, 9 - nth))


def test_times_none_fails_from_there_on():
    with inject_oom(nth=3, times=None) as fault:
        assert outcomes(6) == [False, False, True, True, True, True]
        assert (fault.seen, fault.fired) == (6, 4)
    assert outcomes(3) == [False] * 3
    assert (fault.seen, fault.fired) == (6, 4)


def test_the_error_is_torchs_own_and_says_that_it_was_injected():
    with inject_oom(nth=2):
        one()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            one()
    assert caught.type is torch.OutOfMemoryError
    assert caught.value.args == (
        "CPU out of memory. Tried to allocate 256 bytes. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 256 bytes. This failure was injected by "
        "oomkit.testing.inject_oom (matching allocation 2).",
    )


def test_smaller_requests_neither_fail_nor_count():
    with inject_oom(min_bytes=1024, times=None) as fault:
        one()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256)
    assert (fault.seen, fault.fired) == (1, 1)


def test_tensors_without_bytes_neither_fail_nor_count():
    with inject_oom(times=None) as fault:
        torch.empty(0)
        torch.empty(3, 0, 2)
    assert (fault.seen, fault.fired) == (0, 0)


def test_every_allocation_of_a_step_can_be_failed_and_the_count_repeats():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with inject_oom(nth=10**9) as count:
            training_step()()
        assert count.fired == 0
        for nth in range(1, count.seen + 1):
            with inject_oom(nth=nth) as fault:
                with pytest.raises(torch.OutOfMemoryError):
                    training_step()()
            assert (fault.seen >= nth, fault.fired) == (True, 1)
        with inject_oom(nth=count.seen + 1) as fault:
            training_step()()
        assert (fault.seen, fault.fired) == (count.seen, 0)
    finally:
        torch.set_num_threads(threads)


def test_the_optimizer_phase_is_inside_step_alone():
    step = training_step()
    with inject_oom(nth=1, times=None, phase="optimizer") as fault:
        one()
        assert fault.seen == 0
        with pytest.raises(torch.OutOfMemoryError):
            step()
        assert fault.fired == 1


def test_the_phase_goes_back_after_a_step_of_the_optimizer():
    step = training_step()
    with inject_oom(nth=10**9, phase="optimizer") as fault:
        step()
        inside = fault.seen
        one()
    assert inside > 0
    assert fault.seen == inside


def test_a_step_that_failed_leaves_its_phase_at_the_end_of_the_block():
    with inject_oom(phase="optimizer"):
        with pytest.raises(torch.OutOfMemoryError):
            training_step()()
    with inject_oom(phase="optimizer", times=None) as fault:
        one()
    assert fault.seen == 0


def test_hooks_are_gone_after_the_block():
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_pre_hooks)
    with inject_oom(nth=10**9):
        assert len(optimizer._global_optimizer_pre_hooks) == len(before) + 1
    assert dict(optimizer._global_optimizer_pre_hooks) == before


def test_faults_do_not_nest_and_the_outer_one_stays_armed():
    with inject_oom(nth=2) as outer:
        with pytest.raises(RuntimeError) as caught:
            with inject_oom():
                pass
        assert (
            message_of(caught.value)
            == "inject_oom() is already active: fault schedules do not nest"
        )
        assert outcomes(2) == [False, True]
    assert outer.fired == 1


def test_one_object_can_be_used_again():
    fault = inject_oom(nth=2)
    for _ in range(2):
        with fault:
            assert outcomes(3) == [False, True, False]
        assert (fault.seen, fault.fired) == (3, 1)


def test_another_threads_allocations_count():
    with inject_oom(nth=2, times=1) as fault:
        one()
        failed = []
        thread = threading.Thread(target=lambda: failed.extend(outcomes(1)))
        thread.start()
        thread.join()
    assert failed == [True]
    assert fault.fired == 1


def test_phases_belong_to_threads():
    """One inside its backward is no other's backward, but that of a thread without a phase."""
    inside, done = threading.Event(), threading.Event()
    leaf = torch.ones((), requires_grad=True)
    product = leaf * 2
    helper = []

    def wait(g):
        helper.extend(outcomes_in_a_new_thread())
        inside.set()
        assert done.wait(30)

    def outcomes_in_a_new_thread():
        failed = []
        thread = threading.Thread(target=lambda: failed.extend(outcomes(1)))
        thread.start()
        thread.join()
        return failed

    leaf.register_hook(wait)
    one_more = torch.ones((), requires_grad=True) * 2
    seed = torch.ones(())
    one_more.backward(seed)  # this thread has had a phase
    thread = threading.Thread(target=lambda: product.backward(seed))
    with inject_oom(nth=1, times=None, min_bytes=256, phase="backward") as fault:
        thread.start()
        assert inside.wait(30)
        assert outcomes(2) == [False, False]
        done.set()
        thread.join()
    assert helper == [True] and fault.fired == 1
    with inject_oom(nth=1, times=None, phase="forward"):
        assert outcomes(1) == [True]


def test_a_child_made_by_fork_starts_disarmed():
    with inject_oom(times=None):
        with warnings.catch_warnings():
            # Python warns about threads it cannot see the use of; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                one()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert outcomes(1) == [True]


COUNT = "inject_oom() expected {} to be an int of at least 1"
PHASE = (
    "inject_oom() expected phase to be 'forward', 'backward', 'optimizer', 'recovery' or None, got "
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nth": 0}, ValueError, COUNT.format("nth") + ", got 0"),
        ({"nth": -1}, ValueError, COUNT.format("nth") + ", got -1"),
        ({"nth": "1"}, TypeError, COUNT.format("nth") + ", got 'str'"),
        ({"nth": True}, TypeError, COUNT.format("nth") + ", got 'bool'"),
        ({"times": 0}, ValueError, COUNT.format("times") + " or None, got 0"),
        ({"times": 1.0}, TypeError, COUNT.format("times") + " or None, got 'float'"),
        ({"min_bytes": 0}, ValueError, COUNT.format("min_bytes") + ", got 0"),
        ({"min_bytes": None}, TypeError, COUNT.format("min_bytes") + ", got 'NoneType'"),
        ({"phase": "sideways"}, ValueError, PHASE + "'sideways'"),
        ({"phase": 1}, ValueError, PHASE + "1"),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, error, message):
    with pytest.raises(error) as caught:
        inject_oom(**options)
    assert message_of(caught.value) == message


# --- one after the other, and what oomkit allocates for itself ---


def test_another_schedule_begins_when_the_first_has_fired_for_the_last_time():
    with inject_oom(nth=2, times=2, then=inject_oom(nth=3)) as fault:
        assert outcomes(8) == [False, True, True, False, False, True, False, False]
    assert fault.fired == 3


def test_at_most_four_in_a_row_and_only_the_last_for_good():
    fault = inject_oom(times=None)
    for _ in range(3):
        fault = inject_oom(then=fault)
    with fault:
        assert outcomes(6) == [True] * 6
    for wrong in (inject_oom(then=fault), inject_oom(times=None, then=inject_oom())):
        with pytest.raises(ValueError, match="at most 4 schedules in a row"):
            with wrong:
                pass


def test_what_follows_has_to_be_one_of_them():
    with pytest.raises(TypeError) as caught:
        inject_oom(then=3)
    assert (
        message_of(caught.value) == "inject_oom() expected then to be another inject_oom, got 'int'"
    )


def test_what_oomkit_allocates_for_itself_counts_only_by_name():
    model = torch.nn.Linear(3, 2)
    model.weight.grad = torch.zeros(2, 3)
    options = {"model": model, "gradient_safety": "copy"}
    step = oomkit.auto_batch(lambda x: model(x).mean().backward(), **options)
    x = torch.zeros(4, 3)
    step(x)
    seen = []
    for phase in (None, "recovery"):
        with inject_oom(nth=10**9, phase=phase) as fault:
            step(x)
        seen.append(fault.seen)
    assert seen[0] > seen[1] == 2  # the copies of two gradients
    with inject_oom(phase="recovery") as fault:
        step(x)
    assert fault.fired == 1
    assert step.records[-1].ooms == 1
