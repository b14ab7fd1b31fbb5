"""The error that ends a step has the figures of the failed attempt, and advice by them."""

import gc
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.own_process import run_program
from torch import nn

import oomkit

KIB, MIB = 2**10, 2**20


def ends(step, *args):
    with pytest.raises(oomkit.OutOfMemory) as caught:
        step(*args)
    return caught.value


@pytest.fixture
def limit():
    def more(size):
        """So much more than is allocated, when what other tests have left is gone."""
        gc.collect()
        return oomkit.limit_memory(oomkit.memory("cpu").allocated + size, device="cpu")

    oomkit.limit_memory(2**40, device="cpu")  # from here on tensors are counted
    yield more
    oomkit.limit_memory(None, device="cpu")


def linear(width, layers, **options):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())

    @oomkit.auto_batch(label="step", **options)
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("ladder", ["auto", ("update", "state")])
def test_gradients_that_do_not_fit(limit, caplog, ladder):
    _, step = linear(512, 3, ladder=ladder)  # 3 MiB, and as much for gradients
    x = torch.ones(64, 512)
    limit(2 * MIB + 512 * KIB)
    budget = oomkit.memory("cpu").budget
    error = ends(step, x)
    *_, last = error.report.attempts
    # Sizes between would fail in the same place; the second is of the proof, the last two
    # are of the ladder: activations in host memory, then gradients.
    sizes = [64, 32, 1, 1, 1] if ladder == "auto" else [64, 32]
    assert [a["micro_batch_size"] for a in error.report.attempts] == sizes
    rungs = [None, None, None, "activations", "gradients"][: len(sizes)]
    assert [a["rung"] for a in error.report.attempts] == rungs
    for rung in rungs:
        assert rung is None or f"64, rung {rung}: requested 1.00 MiB" in str(error)
    for attempt in error.report.attempts:
        # The last one had each gradient at some time, but not all of them at its end.
        assert attempt["phase"] == "backward"
        assert attempt["requested_bytes"] == MIB
        assert attempt["budget_bytes"] == budget
        assert attempt["allocated_bytes"] + attempt["free_bytes"] == budget
        assert attempt["requested_bytes"] > attempt["free_bytes"]
        assert re.search(r"test_figures\.py:\d+ in linear\.<locals>\.step$", attempt["location"])
        assert "torch/autograd" in attempt["inner_location"]
    holders = error.report.holders
    assert sum(holders.values()) == pytest.approx(last["allocated_bytes"], abs=64 * KIB)
    assert holders["gradients"] in (MIB, 2 * MIB) and holders["parameters"] == 3 * MIB
    assert holders["the batch"] == 64 * 512 * 4
    assert holders["activations and temporaries"] > 0
    if ladder != "auto":
        assert "smaller ones do not help: the 1.00 MiB wanted in its backward" in str(error)
    assert error.report.text in str(error)


class Scaled(torch.autograd.Function):
    """A function of the user's, whose backward allocates in Python."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        torch.empty(64 * MIB)
        return grad * 2


def in_engine(x, weight):
    return Scaled.apply(x * weight).square().mean().backward()


def in_grad(x, weight):
    return torch.autograd.grad(Scaled.apply(x * weight).square().mean(), weight)


@pytest.mark.parametrize("backward", [in_engine, in_grad])
@pytest.mark.parametrize("verify", [True, False])
def test_python_code_of_a_backward_is_in_the_backward(limit, backward, verify):
    weight = nn.Parameter(torch.ones(64))

    @oomkit.auto_batch(label="step", verify=verify, ladder=())
    def step(x):
        weight.grad = None
        backward(x, weight)

    limit(8 * MIB)
    error = ends(step, torch.ones(16, 64))
    assert {a["phase"] for a in error.report.attempts} == {"backward"}


def test_a_smaller_micro_batch_is_tried_where_it_may_help(limit):
    """The gradient's request is the same in several attempts, until there is room for it."""
    model = nn.Linear(256, 256, bias=False)  # 256 KiB

    @oomkit.auto_batch(label="step", verify=False)
    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()

    x = torch.ones(512, 256)  # 512 KiB, and twice as much for results and their gradient
    limit(640 * KIB + 64 * KIB)
    step(x)
    assert step.records[0].ooms >= 2
    assert torch.isfinite(model.weight.grad).all()


def test_what_was_there_before_the_limit_is_said():
    code = """
    import torch, oomkit
    model = torch.nn.Linear(512, 512, bias=False)
    oomkit.limit_memory("1MiB", device="cpu")
    @oomkit.auto_batch
    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()
    try:
        step(torch.ones(16, 512))
    except oomkit.OutOfMemory as error:
        print(error.report.attempts[-1]["outside_bytes"], error.report.holders["parameters"])
        print(error)
    import warnings
    before = oomkit.memory("cpu").budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            oomkit.limit_memory("3MiB", device="cpu")
        except oomkit.OomkitWarning:
            print("left", before, oomkit.memory("cpu").budget)
    oomkit.memory.__globals__["_said_outside"].clear()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            oomkit.limit_memory("2MiB", device="cpu")
        print([str(w.message) for w in found])
    """
    done = run_program(textwrap.dedent(code), cwd=Path(oomkit.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{MIB} 0"
    assert (
        "  not counted: 1.00 MiB of parameters, gradients and state that were there before the "
        "limit was first set" in lines
    )
    _, before, after = lines[-3].split()
    assert before == after  # where the warning is an error no limit is set
    assert lines[-2:] == [
        '["limit_memory(): 1.00 MiB of parameters of step were made before oomkit counted the '
        "CPU's tensors and are outside the limit: set a limit before the model is made "
        '(help: python -m oomkit explain limit-memory)"]',
        "[]",
    ]


def test_a_list_of_losses_is_found(limit):
    weight = nn.Parameter(torch.ones(64))

    @oomkit.auto_batch(label="step")
    def loss_of(x):
        return (x * weight).square().sum()

    kept = []

    def train():
        x = torch.ones(64, 64)
        for _ in range(200):
            loss = loss_of(x.clone())
            loss.backward(retain_graph=True)
            kept.append(loss)

    limit(MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    (advice, *_) = caught.value.report.advice
    assert advice.startswith("find what keeps memory from step to step: each of the last ")
    lines, first = inspect.getsourcelines(test_a_list_of_losses_is_found)
    line = first + next(i for i, text in enumerate(lines) if "kept.append(loss)" in text)
    place = rf"\(filled at .*test_figures\.py:{line}\), keeps graphs"
    assert re.search(rf"kept, a list of \d+ tensors with graphs {place}", advice)


def test_optimizer_state_that_does_not_fit(limit):
    _, step = linear(512, 4, ladder=())  # 4 MiB, more than other tests leave; AdamW keeps 8 MiB
    limit(8 * MIB)
    error = ends(step, torch.ones(4, 512))
    starts = "the state of AdamW (8.00 MiB) does not fit"
    assert any(text.startswith(starts) for text in error.report.advice), error
    (record,) = step.records
    assert (record.ooms, record.attempts, step.summary.retries) == (1, 1, 0)


def test_a_sample_that_is_larger_than_the_budget(limit):
    """No rung of the ladder makes room for one tensor of it."""
    weight = nn.Parameter(torch.ones(1))

    @oomkit.auto_batch(label="step")
    def step(x):
        (weight * x.expand(-1, 4 * MIB)).square().mean().backward()

    limit(8 * MIB)
    error = ends(step, torch.ones(4, 1))
    assert [a["micro_batch_size"] for a in error.report.attempts] == [4, 2, 1]
    (text,) = error.report.advice
    assert text.startswith("the activations of one sample need at least 16.00 MiB")


def test_a_gradient_more_that_does_not_fit(limit):
    _, step = linear(512, 3, ladder=("update", "state"), verify=False)
    x = torch.ones(1024, 512)  # 2 MiB for each layer's result
    limit(3 * MIB + 700 * KIB)
    error = ends(step, x)
    assert "smaller ones do not help" in str(error)
    (text,) = error.report.advice
    assert "the rung 'gradients' of ladder=\"auto\" does" in text


def test_shards_count_as_what_is_here():
    code = """
    import torch, oomkit
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    oomkit.limit_memory("64MiB", device="cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.ones(512, 512)
    weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    from oomkit._reports.advice import figures_of, many_ranks
    facts = {"attempts": (), "last": {"phase": None}, "holders": {"parameters": 2**18},
             "device": "cpu", "records": (),
             "parameters": [weight], "optimizers": [], "row_bytes": 0.0, "ladder": 30,
             "function": None}
    figures = figures_of(facts)
    print(figures.all_gradients, figures.whole_parameters)
    print(many_ranks(figures))
    """
    done = run_program(textwrap.dedent(code), cwd=Path(oomkit.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first == f"{2**18} {MIB}"
    assert second.startswith("parameters are sharded, 256.00 KiB of 1.00 MiB here")
