"""oomkit without its bridge: the engine works through torch's own calls."""

from __future__ import annotations

import textwrap

from helpers.own_process import run_program

PRELUDE = """
import collections, sys, warnings
sys.modules["oomkit._bridge"] = None
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import oomkit
assert any("bridge to torch is missing" in str(w.message) for w in said), said
warnings.simplefilter("ignore", oomkit.OomkitWarning)
import torch
import torch.nn.functional as F

def run(fail_in, prior, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    if prior:
        F.cross_entropy(model(x), y).backward()
    calls = collections.UserList()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()
        @staticmethod
        def backward(ctx, g):
            if fail_in == "backward" and len(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return g

    @oomkit.auto_batch(**options)
    def step(x, y):
        calls.append(len(x))
        if not prior:
            optimizer.zero_grad()
        hidden = Fails.apply(model[:2](x))
        if fail_in == "forward" and len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        loss = F.cross_entropy(model[2:](hidden), y)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()] if oomkit.current().is_last else None
        optimizer.step()
        return loss.item()

    loss = step(x, y)
    state = [p.detach().clone() for p in model.parameters()]
    state += [b.clone() for b in model.buffers()] + [torch.get_rng_state(), torch.tensor(loss)]
    return state, step.records[-1], calls
"""


def _run(body: str) -> None:
    # Runs of the step are counted.
    code = PRELUDE + "\noomkit._C._prove(False)\n" + textwrap.dedent(body)
    done = run_program(code)
    assert done.returncode == 0, done.stderr


def test_recovered_equals_planned_bit_for_bit() -> None:
    _run(
        """
        for prior in (False, True):
            expected, _, _ = run(None, prior, accumulation_steps=2)
            for place in ("forward", "backward"):
                got, record, calls = run(place, prior)
                assert calls == [8, 4, 4], calls
                assert record.ooms == 1 and record.accumulation_steps == 2
                assert record.requested_bytes == 2 * 2**30
                assert record.peak_allocated is None
                assert all(torch.equal(a, b) for a, b in zip(expected, got)), (prior, place)
        """
    )


def test_what_needs_the_bridge_says_so() -> None:
    _run(
        """
        for act in (lambda: oomkit.limit_memory("1GiB", device="cpu"),
                    lambda: oomkit.testing.inject_oom().__enter__()):
            try:
                act()
            except RuntimeError as error:
                assert "pip install --no-build-isolation" in str(error), error
            else:
                raise AssertionError("no error")
        assert oomkit.memory("cpu").peak_allocated is None
        """
    )


def test_another_torch_minor_is_refused_with_one_warning() -> None:
    code = """
import warnings
import torch
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import oomkit
texts = [str(w.message) for w in said if "oomkit" in str(w.message)]
assert len(texts) == 1 and "installed is 2.99" in texts[0], texts
step = oomkit.auto_batch(lambda x: x + 1)
assert step(torch.zeros(2)).tolist() == [1.0, 1.0]
assert step.records[0].peak_allocated is None
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr


def test_a_forgotten_sum_is_said() -> None:
    """Losses are then kept as copies, at calls 1, 2, 4 and so on, as on a device."""
    _run(
        """
        from oomkit.testing import force_slices

        for options in ({"verify": False},):
            model = torch.nn.Linear(6, 3)

            @oomkit.auto_batch(**options)
            def step(x, y):
                F.cross_entropy(model(x), y, reduction="sum").backward()

            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if not options["verify"]:
                    for _ in range(3):
                        step(x, y)
                with force_slices([4, 4]):
                    step(x, y)
            texts = [str(w.message) for w in said]
            assert len(texts) == 1 and "a sum over samples" in texts[0], texts
        """
    )


def test_a_split_is_proven() -> None:
    """Pairs are refused before the update, and the weights of a sum are found."""
    _run(
        """
        oomkit._C._prove(True)
        for total in (False, True):
            model = torch.nn.Linear(6, 3).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            before = model.weight.detach().clone()

            @oomkit.auto_batch(accumulation_steps=2)
            def step(x):
                optimizer.zero_grad()
                out = model(x)
                one, two = out.chunk(2)
                (out.square().sum() if total else (one - two).square().mean()).backward()
                optimizer.step()

            x = torch.randn(8, 6, dtype=torch.float64)
            whole = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
            try:
                step(x)
            except oomkit.SplitError:
                assert not total and torch.equal(before, model.weight)
            else:
                assert total and (before - 0.1 * whole - model.weight).abs().max() < 1e-12
        """
    )


def test_an_error_of_the_update_is_the_one_that_is_raised() -> None:
    _run(
        """
        class Failing(torch.optim.SGD):
            def step(self, closure=None):
                raise ValueError("mine")

        model = torch.nn.Linear(6, 2)
        optimizer = Failing(model.parameters(), lr=0.1)

        @oomkit.auto_batch(accumulation_steps=4, reduction="mean")
        def step(x):
            model(x).pow(2).mean().backward()
            optimizer.step()

        try:
            step(torch.randn(8, 6))
        except ValueError as error:
            assert str(error) == "mine"
        else:
            raise AssertionError
        assert all(p.grad is None for p in model.parameters()), "the step is not taken back"
        """
    )


def test_a_gradient_is_cleared_in_every_micro_batch_where_there_is_one() -> None:
    _run(
        """
        model, apart = torch.nn.Linear(6, 2), torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), apart], lr=0.1)
        seen, marks = [], []
        plain = torch.autograd.profiler.record_function

        def record_function(name, *args):
            marks.append(name)
            return plain(name, *args)

        torch.autograd.profiler.record_function = record_function

        @oomkit.auto_batch(accumulation_steps=4)
        def step(x, by_hand):
            if by_hand:
                apart.grad = torch.ones(2)
            optimizer.zero_grad()
            seen.append(apart.grad is None)
            model(x).pow(2).mean().backward()
            optimizer.step()

        for by_hand, runs in ((True, 4), (False, 1)):
            marks.clear()
            step(torch.randn(8, 6), by_hand)
            assert sum("zero_grad" in name for name in marks) == runs, marks
        assert seen == [True] * 8
        """
    )


def test_gradients_that_are_cleared_between_two_backwards_are_seen() -> None:
    """In the last micro-batch the sum of all is there, and what the step cleared of it is lost."""
    _run(
        """
        from oomkit.testing import force_slices

        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()

        @oomkit.auto_batch(verify=False, reduction="mean")
        def step(x, how):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            if oomkit.current().is_last:
                for param in model.parameters():
                    param.grad = how(param.grad)
            model(x).sin().mean().backward()
            optimizer.step()

        def in_place(grad):
            return grad.zero_()

        for how in (lambda grad: None, torch.zeros_like, in_place):
            model.zero_grad()
            try:
                with force_slices([4, 4]):
                    step(torch.randn(8, 6), how)
            except oomkit.SplitError as error:
                assert "cleared or changed between two backward() calls" in str(error), error
            else:
                raise AssertionError(how)
            assert torch.equal(before, model.weight)
        """
    )


def test_returned_losses() -> None:
    """The caller's backward fails, or its call is split: exact without the bridge as well."""
    code = (
        PRELUDE
        + """
def returned(k, fails):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    calls, first = [], iter([fails])
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()
        @staticmethod
        def backward(ctx, g):
            calls.append(len(g))
            if next(first, False):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return g
    def compute(x, y):
        return F.cross_entropy(Fails.apply(model(x)), y)
    step = oomkit.auto_batch(compute, accumulation_steps=k, verify=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    (step(x, y) / 4).backward()
    got = [p.grad.clone() for p in model.parameters()]
    assert step.records[-1].ooms == fails
    model.zero_grad()
    (F.cross_entropy(model(x), y) / 4).backward()
    assert all((g - 1 - p.grad).abs().max() < 1e-12 for g, p in zip(got, model.parameters())), k
    return calls

assert returned(1, False) == [8]
assert returned(1, True) == [8]  # as one that did not fail
assert returned(2, False) == [4, 4]
assert returned(2, True)[-2:] == [2, 2]
"""
    )
    done = run_program(code)
    assert done.returncode == 0, done.stderr


def test_the_allocators_cache_is_emptied_once_before_the_retry() -> None:
    """No accelerator is needed to see that it is asked for: "meta" is a device without memory."""
    code = """
    import sys
    import torch
    import collections
    emptied = []
    calls = collections.UserList()
    torch._C._accelerator_getAccelerator = lambda: torch.device("meta")
    torch._C._accelerator_isAllocatorInitialized = lambda: True
    torch._C._accelerator_emptyCache = lambda: emptied.append(len(calls))
    sys.modules["oomkit._bridge"] = None
    import warnings
    warnings.simplefilter("ignore")
    import oomkit
    model = torch.nn.Linear(6, 3, device="meta")

    @oomkit.auto_batch(verify=False)
    def step(x):
        calls.append(len(x))
        model(x).sum().backward()
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    step(torch.zeros(8, 6, device="meta"))
    assert calls[:2] == [8, 4] and step.records[0].ooms == 2, calls
    assert emptied == [1, 2], emptied
    """
    done = run_program(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
