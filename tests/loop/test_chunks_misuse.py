"""Loops over oomkit.chunks that are not as they should be: each has one defined outcome."""

import asyncio
import contextlib
import itertools
import threading

import pytest
import torch

import oomkit
from oomkit.testing import force_slices, inject_oom

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def oom():
    return torch.OutOfMemoryError(TEXT)


@pytest.fixture
def x():
    return torch.arange(10.0)


def once(part, failures):
    """The part's rows; runs out of memory as often as `failures` has entries."""
    if failures:
        failures.pop()
        raise oom()
    return part.tolist()


def note_of(caught):
    return "\n".join(getattr(caught.value, "__notes__", []))


def test_without_a_guard_the_error_passes_and_it_is_said_once(x, request):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            once(part, [1])
    assert caught.type is torch.OutOfMemoryError
    with pytest.warns(oomkit.OomkitWarning, match="has no `with oomkit.guard"):
        assert len(list(oomkit.chunks(x, label=request.node.name, micro_batch=5))) == 2
    list(oomkit.chunks(x, label=request.node.name, micro_batch=5))


def test_break_ends_the_loop_and_later_guards_are_plain(x, request):
    parts = oomkit.chunks(x, label=request.node.name)
    for _ in parts:
        with oomkit.guard():
            pass
        break
    with pytest.raises(torch.OutOfMemoryError):
        for _ in range(1):
            with oomkit.guard():
                raise oom()
    assert parts.records[-1:] == () or parts.records[-1].outcome != "finished"


def test_another_exception_passes_and_leaves_nothing(x, request):
    with pytest.raises(KeyError) as caught:
        for _ in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                raise KeyError("x")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(torch.OutOfMemoryError), oomkit.guard():
        raise oom()


def test_an_interrupt_passes(x, request):
    with pytest.raises(KeyboardInterrupt):
        for _ in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                raise KeyboardInterrupt


def test_code_behind_the_block_would_run_for_failed_rows(x, request):
    outputs, failures, out = [], [1], None
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                out = once(part, failures)
            outputs.append(out)
    assert "follows the guarded block" in note_of(caught) and outputs == []


def test_two_guarded_blocks_in_a_body(x, request):
    first, second, failures = [], [], [1]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                first.append(part)
            with oomkit.guard():
                second.append(once(part, failures))
    assert "another guarded block" in note_of(caught)


def test_guards_inside_one_another_hand_out_once(x, request):
    outputs, failures = [], [1]
    for part in oomkit.chunks(x, label=request.node.name):
        with oomkit.guard():
            with oomkit.guard():
                outputs += once(part, failures)
    assert outputs == x.tolist()


def test_other_blocks_around_the_guard(x, request):
    outputs, failures = [], [1]
    for part in oomkit.chunks(x, label=request.node.name):
        if len(part):
            with torch.no_grad(), contextlib.nullcontext(), oomkit.guard() as guard:
                outputs += once(part, failures)
    assert outputs == x.tolist() and guard.records


@pytest.mark.parametrize("on_oom", ["raise", "skip"])
def test_on_oom_given_to_a_guard_holds(x, on_oom, request):
    outputs, failures = [], [1]
    guard = oomkit.guard(on_oom)

    def run():
        for part in oomkit.chunks(x, label=request.node.name, micro_batch=5):
            with guard:
                outputs.extend(once(part, failures))

    if on_oom == "raise":
        with pytest.raises(torch.OutOfMemoryError):
            run()
        assert outputs == []
    else:
        with pytest.warns(oomkit.OomkitWarning, match="no `with oomkit.guard"):
            run()
        assert outputs == x.tolist()[5:]


def test_a_guard_in_another_function_is_a_plain_one(x, request):
    def body(part):
        with oomkit.guard():
            once(part, [1])

    with pytest.raises(torch.OutOfMemoryError):
        for part in oomkit.chunks(x, label=request.node.name):
            body(part)


def test_a_guarded_function_is_a_plain_one(x, request):
    with pytest.raises(torch.OutOfMemoryError):
        for part in oomkit.chunks(x, label=request.node.name):
            oomkit.guard()(once)(part, [1])


def test_a_guard_of_an_exit_stack_is_a_plain_one(x, request):
    with pytest.raises(torch.OutOfMemoryError):
        for part in oomkit.chunks(x, label=request.node.name):
            with contextlib.ExitStack() as stack:
                stack.enter_context(oomkit.guard())
                once(part, [1])


def test_a_guard_in_another_thread_is_a_plain_one(x, request):
    caught = []

    def run(part):
        try:
            for _ in range(1):
                with oomkit.guard():
                    once(part, [1])
        except torch.OutOfMemoryError as error:
            caught.append(type(error))

    for part in oomkit.chunks(x, label=request.node.name):
        with oomkit.guard():
            thread = threading.Thread(target=run, args=(part,))
            thread.start()
            thread.join()
    assert caught == [torch.OutOfMemoryError]


def test_asking_by_hand_is_not_a_loop(x, request):
    parts = oomkit.chunks(x, label=request.node.name)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        while True:
            part = next(parts)
            with oomkit.guard():
                once(part, [1])
    assert "not a for loop" in note_of(caught)


def test_a_part_asked_for_inside_the_block(x, request):
    parts = oomkit.chunks(x, label=request.node.name, micro_batch=5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for _ in parts:
            with oomkit.guard():
                once(next(parts), [1])
    assert "asked for another part" in note_of(caught)


def test_nested_loops_each_hand_out_their_own(x, request):
    outputs, failures = [], [1, 1]
    for a in oomkit.chunks(x[:2], label=request.node.name + "a"):
        for b in oomkit.chunks(x, label=request.node.name + "b", micro_batch=5):
            with oomkit.guard():
                outputs += [(len(a), v) for v in once(b, failures)]
    assert [v for _, v in outputs] == x.tolist()


def test_a_guard_around_an_inner_loop_hands_out_the_outer_part(x, request):
    outputs, failures = [], [1]
    for a in oomkit.chunks(x, label=request.node.name + "a"):
        with oomkit.guard():
            mine = []
            for b in oomkit.chunks(a, label=request.node.name + "b"):
                with contextlib.nullcontext():
                    mine += once(b, failures)
            outputs += mine
    assert outputs == x.tolist()


def test_an_inner_loop_at_its_end_is_not_the_outer_guards(x, request):
    with pytest.raises(oomkit.OutOfMemory, match="testing inner"):
        for a in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                for b in oomkit.chunks(a, label="testing inner"):
                    with oomkit.guard():
                        once(b, [1])


def test_interleaved_iterators(x, request):
    first, second, failures = [], [], [1, 1]
    one = oomkit.chunks(x, label=request.node.name + "1", micro_batch=5)
    two = oomkit.chunks(x * 2, label=request.node.name + "2", micro_batch=5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for a, b in zip(one, two, strict=True):
            with oomkit.guard():
                first += once(a, failures)
                second += b.tolist()
    assert first == second == []
    assert "give both batches to one chunks()" in note_of(caught)


def test_an_iterator_that_runs_along(x, request):
    got, failures = [], [1]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for name, part in zip("abc", oomkit.chunks(x, label=request.node.name), strict=False):
            with oomkit.guard():
                got += [(name, v) for v in once(part, failures)]
    assert "zip()" in note_of(caught) and got == []


def test_a_loop_through_a_generator(x, request):
    def shown(parts):
        yield from parts

    outputs, failures = [], [1]
    for part in shown(oomkit.chunks(x, label=request.node.name)):
        with oomkit.guard():
            outputs += once(part, failures)
    assert outputs == x.tolist()
    for number, part in enumerate(oomkit.chunks(x, label=request.node.name + "2")):
        with oomkit.guard():
            outputs.append((number, len(once(part, [1] if number == 0 else []))))
            break


def _one_ahead(parts):
    it = iter(parts)
    ahead = next(it, None)
    while ahead is not None:
        this, ahead = ahead, next(it, None)
        yield this


def _halves(parts):
    for part in parts:
        yield from part.split((len(part) + 1) // 2)


def _both_signs(parts):
    for part in parts:
        yield part
        yield -part


def _numbered(parts):
    count = 0
    for part in parts:
        count += len(part)
        yield part


def _named(parts):
    names = iter("abcdefgh")
    for part in parts:
        next(names)
        yield part


def _plain(parts):
    for part in parts:
        shown = part
        yield shown


@pytest.mark.parametrize(
    ("through", "told"),
    [
        pytest.param(
            _one_ahead,
            "_one_ahead(): it is not `for part in parts",
            marks=pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning"),
        ),
        (_halves, "_halves(): it is not `for part in parts"),
        (_both_signs, "_both_signs(): it is not `for part in parts"),
        (_numbered, "`count` may have changed"),
        (_named, "`next(names)`"),
        (lambda parts: itertools.islice(parts, 3), "islice()"),
        (lambda parts: itertools.islice(_plain(parts), 3), "islice()"),
        (lambda parts: itertools.takewhile(lambda part: True, parts), "takewhile()"),
        (lambda parts: filter(lambda part: True, parts), "filter()"),
        (lambda parts: map(lambda part: part, parts), "map()"),
        (lambda parts: (p for p, _ in itertools.zip_longest(parts, "ab")), "zip_longest()"),
    ],
)
def test_an_iterator_that_has_gone_on(through, told, x, request):
    """Rows would be lost, come twice, or come with another name."""
    got, failures = [], [1]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in through(oomkit.chunks(x, label=request.node.name, micro_batch=5)):
            with oomkit.guard():
                got += once(part, failures)
    assert told in note_of(caught) and got == []


@pytest.mark.parametrize(
    "through",
    [
        _plain,
        itertools.chain,
        lambda parts: _plain(_plain(parts)),
        lambda parts: (p for p in parts),
    ],
)
def test_an_iterator_that_only_hands_on(through, x, request):
    outputs, failures = [], [1]
    for part in through(oomkit.chunks(x, label=request.node.name, micro_batch=5)):
        with oomkit.guard():
            outputs += once(part, failures)
    assert outputs == x.tolist()


def test_a_generator_with_a_loop_that_is_closed(x, request):
    def results():
        failures = [1]
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                yield once(part, failures)

    assert sum(results(), []) == x.tolist()
    early = results()
    next(early)
    early.close()
    with pytest.raises(torch.OutOfMemoryError), oomkit.guard():
        raise oom()


def test_coroutines_on_one_thread(x, request):
    async def run(name):
        outputs, failures = [], [1]
        for part in oomkit.chunks(x, label=request.node.name + name):
            with oomkit.guard():
                await asyncio.sleep(0)
                outputs.extend(once(part, failures))
        return outputs

    async def both():
        return await asyncio.gather(run("1"), run("2"))

    assert asyncio.run(both()) == [x.tolist(), x.tolist()]


def test_a_list_that_changes_meanwhile(request):
    batch = [f"row {i}" for i in range(6)]
    outputs, failures = [], [1]

    def change():
        batch.insert(0, "new")

    for part in oomkit.chunks(batch, label=request.node.name, micro_batch=3):
        with oomkit.guard():
            change()
            taken = list(part)
            once(torch.zeros(1), failures)
            outputs += taken
    assert outputs == [f"row {i}" for i in range(6)]


def test_tensors_changed_in_place_are_not_handed_out_again(x, request):
    with pytest.raises(oomkit.SplitError, match="in place"):
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                part.mul_(2)
                raise oom()
    outputs, failures = [], [1]
    for part in oomkit.chunks(x.clone(), label=request.node.name + "2", restore_batch=True):
        with oomkit.guard():
            part.mul_(2)
            outputs += once(part, failures)
    assert outputs == (2 * (x * 1)).tolist()


def test_rows_of_finished_parts_may_be_changed_in_place(x, request):
    outputs = []
    with force_slices([5, 5]):
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                if part[0] >= 5 and len(part) == 5:
                    raise oom()
                part.mul_(0)
                outputs.append(len(part))
    assert outputs == [5, 3, 2] and x.sum() == 0


def test_a_backward_in_a_failed_part_is_refused(x, request):
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                (weight * part).sum().backward()
                raise oom()
    assert "a backward() has run in this part" in note_of(caught)


def test_results_added_before_the_failure_are_seen(x, request):
    first, second = [], []
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                first.append(part.clone())
                second.append(once(part, [1]))
    assert "`first.append()` in line" in note_of(caught)


def test_counts_added_before_the_failure_are_seen(x, request):
    count = 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for part in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                count += len(part)
                once(part, [1])
    assert "`count` may have changed" in note_of(caught)


def test_a_list_made_in_the_block_is_its_own(x, request):
    outputs, failures = [], [1]
    for part in oomkit.chunks(x, label=request.node.name):
        with oomkit.guard():
            mine = []
            mine.append(part)
            values = once(part, failures)
            outputs += values
    assert outputs == x.tolist()


def test_a_second_loop_over_what_is_used_up_is_an_error(x, request):
    parts = oomkit.chunks(x, label=request.node.name)
    for _ in parts:
        with oomkit.guard():
            pass
    assert next(parts, None) is None
    with pytest.raises(RuntimeError, match="iterated already"):
        list(parts)


def test_close_lets_go(x, request):
    parts = oomkit.chunks(x, label=request.node.name, micro_batch=2)
    next(parts)
    parts.close()
    parts.close()
    assert next(parts, None) is None


def test_errors_that_no_smaller_part_helps_pass(x, request):
    with pytest.raises(oomkit.OutOfMemory, match="inner"):
        for _ in oomkit.chunks(x, label=request.node.name):
            with oomkit.guard():
                raise oomkit.OutOfMemory("inner")


def test_a_participant_that_cannot_go_back_is_said(x, request):
    class Broken:
        def save(self):
            return 1

        def restore(self, saved):
            raise ValueError("cannot")

    broken = Broken()
    with pytest.raises(ValueError, match="cannot"):
        for _ in oomkit.chunks(x, label=request.node.name, participants=broken):
            with oomkit.guard():
                raise oom()


def test_decorated_steps_in_the_body_stay_their_own(x, request):
    @oomkit.auto_batch(label=request.node.name)
    def double(values):
        return values * 2

    outputs = []
    with inject_oom(nth=1) as fault:
        for part in oomkit.chunks(x, label=request.node.name + "c"):
            with oomkit.guard():
                outputs.append(double(part))
    assert fault.fired == 1 and [len(part) for part in outputs] == [10]
    assert double.records[-1].ooms == 1
