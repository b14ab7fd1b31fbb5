"""Sparse gradients: torch adds to them in several steps, and one that fails leaves them half made.

Allocations of a backward are failed in turn (`make prove`: every one), in a process of its own for
each kind of program: reading such a gradient ends the process, and that has to be a failed test.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from helpers.own_process import run_program

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import sys, warnings
import torch
import torch.nn.functional as F
{bridge}
warnings.simplefilter("ignore")
sys.path.append({tests})
from helpers.collector import hide_modules
from helpers.sample import WHOLE, places
import oomkit
from oomkit.testing import force_slices, inject_oom

hide_modules()
torch.set_num_threads(1)
sweeps = []
CALLS, FAILS_IN = 4, 3  # the last call fails
ROWS = 24


class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(50, 8, mode="mean", sparse=True)

    def forward(self, x):
        return self.bag(x)


class Mean(torch.nn.Module):
    def __init__(self, *tables):
        super().__init__()
        self.tables = torch.nn.ModuleList(tables)

    def forward(self, x):
        return torch.cat([t(x).mean(1) for t in self.tables], 1)


def table(rows=50, width=8):
    return torch.nn.Embedding(rows, width, sparse=True)


def tied():
    # One gradient that is sparse first, then dense: the table is the output layer, too.
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table(8)

        def forward(self, x):
            return F.linear(self.table(x % 8).mean(1), self.table.weight)

    return Tied()


def build(kind):
    torch.manual_seed(5)
    return {
        "embedding": lambda: Mean(table()),
        "several": lambda: torch.nn.Sequential(Mean(table(), table(60)), torch.nn.Linear(16, 8)),
        "twice": lambda: (lambda one: Mean(one, one))(table()),
        "bag": Bags,
        "tied": tied,
        "tiny": lambda: Mean(table(3, 2)),
    }[kind]()


def batches():
    g = torch.Generator().manual_seed(6)
    return [
        (torch.randint(0, 50, (ROWS, 6), generator=g), torch.randint(0, 2, (ROWS,), generator=g))
        for _ in range(CALLS)
    ]


class Program:
    def __init__(self, kind, form, clear, optimizer="sgd", options={}):
        self.model, self.kind, self.clear = build(kind), kind, clear
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=0.1)
        model, kind_ = self.model, kind

        def loss(x, y):
            h = model(x % 3 if kind_ == "tiny" else x)
            return h.sum(1).mean() if kind_ == "tiny" else F.cross_entropy(h, y)

        if form == "whole":
            def run(x, y):
                loss(x, y).backward()
        else:
            run = loss
        self.form = form
        self.step = oomkit.auto_batch(run, model=model, **options)

    def begin(self, number):
        if self.clear == "zero" or (self.clear == "accumulate" and number % 2 == 0):
            self.optimizer.zero_grad(set_to_none=False)

    def call(self, number, batch):
        made = self.step(*batch)
        if self.form == "returned":
            made.backward()

    def update(self, number):
        if self.clear != "accumulate" or number % 2 == 1:
            self.optimizer.step()

    def state(self):
        made = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            made.append(torch.zeros(()) if p.grad is None else p.grad.to_dense().clone())
        return made


def undisturbed(make, lengths):
    program = make()
    for number, batch in enumerate(batches()):
        program.begin(number)
        if number == FAILS_IN and lengths is not None:
            with force_slices(lengths):
                program.call(number, batch)
        else:
            program.call(number, batch)
        if number == FAILS_IN:
            program.before_update = program.state()
        program.update(number)
    return program.before_update + program.state()


def lengths_of(program):
    count = program.step.records[-1].accumulation_steps
    return [ROWS // count] * count if count > 1 else None


def close(a, b):
    return all(torch.allclose(x, y, rtol=0, atol=1e-6) for x, y in zip(a, b, strict=True))


def sweep(make, refusals=0, slices=None, phase="backward", **more):
    # The recovered calls, those that were refused, and all.
    recovered = refused = 0
    expected = {}
    sweeps.append(1)
    for nth in places(6, f"sweep {len(sweeps)}"):
        assert nth < 400, "never came to the end"
        program = make()
        for number, batch in enumerate(batches()[:FAILS_IN]):
            program.begin(number)
            program.call(number, batch)
            program.update(number)
        program.begin(FAILS_IN)
        before = program.state()
        batch = batches()[FAILS_IN]
        try:
            with inject_oom(nth=nth, phase=phase, **more) as fault:
                if slices is None:
                    program.call(FAILS_IN, batch)
                else:
                    with force_slices(slices):
                        program.call(FAILS_IN, batch)
        except oomkit.OomkitError as error:
            refused += 1
            assert fault.fired
            assert close(before, program.state()), (nth, error)
            continue
        if not fault.fired:
            break
        recovered += 1
        key = tuple(lengths_of(program) or ())
        if key not in expected:
            expected[key] = undisturbed(make, list(key) or None)
        got = program.state()
        program.update(FAILS_IN)
        assert close(expected[key], got + program.state()), (nth, key)
    print(recovered, refused, nth - 1)
    assert recovered + refused > 0
    assert not WHOLE or recovered >= (nth - 1) // 3, (recovered, refused)
    assert refused <= refusals, (recovered, refused)
"""


def _run(code: str, bridge: bool = True) -> None:
    prelude = PRELUDE.replace("{bridge}", "" if bridge else 'sys.modules["oomkit._bridge"] = None')
    prelude = prelude.replace("{tests}", repr(str(ROOT / "tests")))
    done = run_program(
        prelude + textwrap.dedent(code), cwd=ROOT, OMP_NUM_THREADS="1", MALLOC_PERTURB_="170"
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr[-2500:]}"
    print(done.stdout)


@pytest.mark.parametrize("form", ["whole", "returned"])
def test_every_allocation_of_the_backward(form: str) -> None:
    _run(
        f"""
        for clear in ("zero", "accumulate"):
            for safety in ("auto", "copy", "off"):
                options = {{"gradient_safety": safety, "verify": safety == "auto"}}
                sweep(lambda: Program("embedding", "{form}", clear, options=options))
        """
    )


@pytest.mark.parametrize("kind", ["several", "twice", "bag", "tied"])
def test_kinds_of_models(kind: str) -> None:
    _run(
        f"""
        for form in ("whole", "returned"):
            for clear in ("zero", "accumulate"):
                sweep(lambda: Program("{kind}", form, clear))
        """
    )


@pytest.mark.parametrize("form", ["whole", "returned"])
def test_sparse_adam_and_micro_batches(form: str) -> None:
    _run(
        f"""
        for clear in ("zero", "accumulate"):
            sweep(lambda: Program("embedding", "{form}", clear, "adam"))
            for options in ({{}}, {{"gradient_safety": "off"}}):
                make = lambda: Program("embedding", "{form}", clear, options=options)
                sweep(make, slices=[12, 12])
                sweep(make, phase="recovery", slices=[8, 8, 8], refusals=99)
            sweep(lambda: Program("embedding", "{form}", clear), times=2)
        """
    )


def test_without_the_bridge() -> None:
    """No fault can be injected there: what torch leaves of an empty gradient is made by hand."""
    _run(
        """
        def run(options, fail):
            program = Program("embedding", "whole", "never", options=options)
            (parameter,) = program.model.parameters()
            x, y = batches()[0]
            program.call(0, (x, y))
            values = torch.zeros(6, 8)  # of no consequence: they are lost
            parameter.grad = torch.sparse_coo_tensor(torch.arange(6)[None], values, (50, 8))
            armed = iter([fail])  # a list would be rolled back with the attempt

            def fails(gradient):
                if next(armed, False):
                    parameter.grad._values().untyped_storage().resize_(0)
                    raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 1 MiB")

            parameter.register_hook(fails)
            if fail:
                program.call(1, (x, y))
                assert program.step.records[-1].ooms == 1
            else:
                with force_slices([12, 12]):
                    program.call(1, (x, y))
            return program.state()

        for options in ({}, {"gradient_safety": "copy"}, {"gradient_safety": "off"}):
            assert close(run(options, False), run(options, True)), options
        """,
        bridge=False,
    )


def test_a_sum_that_no_version_tells_of() -> None:
    """Torch coalesces a gradient of many entries after it has added to it: that may fail alone."""
    _run(
        """
        def run(options, nth):
            torch.manual_seed(7)
            table = torch.nn.Embedding(3, 1, sparse=True)
            x = torch.randint(0, 3, (40,))

            @oomkit.auto_batch(model=table, reduction="sum", **options)
            def step(x):
                table(x).sum().backward()

            table(x).sum().backward()
            once = table.weight.grad.to_dense()
            try:
                with inject_oom(nth=nth, phase="backward") as fault:
                    step(x)
            except oomkit.OutOfMemory as error:
                assert "cannot be restored: parameter 'weight'" in str(error), error
                return "refused"
            assert torch.equal(table.weight.grad.to_dense(), 2 * once), nth
            return "recovered" if fault.fired else "whole"

        for options in ({}, {"gradient_safety": "copy"}, {"gradient_safety": "off"}):
            ends = []
            while not ends or ends[-1] != "whole":
                ends.append(run(options, len(ends) + 1))
            assert len(ends) > 5, ends
            if options == {"gradient_safety": "copy"}:
                assert set(ends) == {"recovered", "whole"}, ends
            print(*ends)
        """
    )


def test_a_plain_budget() -> None:
    """Memory that really runs out, at each of many sizes of what is left."""
    _run(
        """
        import contextlib

        def run(left, form):
            torch.manual_seed(8)
            e = torch.nn.Embedding(2000, 64, sparse=True)
            optimizer = torch.optim.SGD(e.parameters(), lr=0.1)

            def loss(x, y):
                return F.cross_entropy(e(x).mean(1), y)

            def whole(x, y):
                loss(x, y).backward()

            step = oomkit.auto_batch(whole if form == "whole" else loss, model=e)
            data = [(torch.randint(0, 2000, (128, 6)), torch.randint(0, 64, (128,)))
                    for _ in range(5)]
            for number, (x, y) in enumerate(data):
                optimizer.zero_grad(set_to_none=False)
                limit = contextlib.nullcontext()
                if number == 3 and left is not None:
                    allocated = oomkit.memory("cpu").allocated
                    limit = oomkit.limit_memory(allocated + left, device="cpu")
                try:
                    with limit:
                        made = step(x, y)
                        if form == "returned":
                            made.backward()
                    del made
                except oomkit.OutOfMemory:  # the gradients of single rows add up, too
                    assert e.weight.grad.to_dense().abs().sum() == 0
                    return None
                optimizer.step()
            return e.weight.detach().clone()

        refused = 0
        for form in ("whole", "returned"):
            expected = run(None, form)
            for left in range(300_000, 700_000, 40_000):
                got = run(left, form)
                refused += got is None
                assert got is None or torch.allclose(got, expected, rtol=0, atol=1e-6), (form, left)
        assert 5 < refused < 20, refused
        """
    )
