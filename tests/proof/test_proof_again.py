"""Proofs that are made again, interrupted, or of rows that few would think of."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.seen import Seen
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import oomkit
from oomkit.testing import inject_oom
from proof.test_proof_data import _flipped, _world, _x

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")

ONES = torch.ones(8, dtype=torch.int64)
MIXED = torch.tensor([1, 2, 0, 1, 0, 2, 0, 1])


def _limited(loss: Callable[..., torch.Tensor], most: SimpleNamespace) -> tuple[Any, nn.Module]:
    """A step that fits `most.rows` rows."""
    model, optimizer = _world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > most.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        return value.detach()

    return step, model


@pytest.mark.parametrize("rows", [8, 6, 4, 3])
def test_a_proof_that_ran_out_of_memory_is_still_due(rows: int) -> None:
    most = SimpleNamespace(rows=8)
    step, model = _limited(_flipped, most)
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    for i in range(3):
        decorated(_x(16, i), ONES.repeat(2))
    before = [p.detach().clone() for p in model.parameters()]
    most.rows = rows
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        decorated(_x(16, 9), MIXED.repeat(2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_was_refused_once_is_refused_again() -> None:
    """A caller that leaves such batches out must not get them split the next time."""
    step, _ = _limited(_flipped, SimpleNamespace(rows=8))
    decorated = oomkit.auto_batch(step, accumulation_steps=2)
    decorated(_x(8), ONES)
    for _ in range(3):
        with pytest.raises(oomkit.SplitError, match="cannot split"):
            decorated(_x(8, 9), MIXED)


def test_rows_in_the_middle_have_no_neighbours() -> None:
    """Labels differ there alone, and a single row is read as something else."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = model(x).squeeze()
        return F.cross_entropy(out[None] * 0.5 if out.ndim == 1 else out, y)

    decorated = oomkit.auto_batch(loss, model=model)
    with pytest.raises(oomkit.SplitError, match="cannot split"):
        decorated(_x(8), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, torch.Tensor.numpy])
@pytest.mark.parametrize("labels", [[0] * 6 + [1] * 2, [0, 0, 0, 0, 0, 1, 0, 1]])
def test_samples_with_their_labels_beside_them_are_not_samples_alone(
    kind: Any, labels: list[int]
) -> None:
    """Half of the images would meet the first labels, and five rows need not show it."""
    torch.manual_seed(0)
    model = nn.Linear(48, 2)
    images = [torch.rand(3, 4, 4) for _ in labels]
    y = kind(torch.tensor(labels)) if kind is torch.Tensor.numpy else kind(labels)

    def step(images: list[torch.Tensor], y: Any) -> None:
        losses = [
            F.cross_entropy(model(image.reshape(1, -1)), torch.as_tensor([int(label)]))
            for image, label in zip(images, y, strict=False)
        ]
        torch.stack(losses).mean().backward()

    with pytest.raises(oomkit.SplitError, match="may be 8 samples"):
        oomkit.auto_batch(step, accumulation_steps=2)(images, y)


def test_a_norm_of_no_gradients_is_still_a_norm() -> None:
    """The margin is reached by all rows of the batch that the split is proven with."""

    def world() -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.relu(1 - y * model(x)[:, 0]).mean()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            return loss.detach(), norm

        return step, model

    plain, model = world()
    decorated = oomkit.auto_batch(world()[0], accumulation_steps=2)
    far = 1e5 * _x(8)
    with torch.no_grad():
        right, wrong = model(far)[:, 0].sign(), -model(_x(8))[:, 0].sign()
    for batch in ((far, right), (_x(8), wrong), (_x(8), wrong)):
        torch.testing.assert_close(decorated(*batch), plain(*batch))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
)
def test_parameters_of_any_dtype_may_be_written(dtype: torch.dtype) -> None:
    model, optimizer = _world()
    counts = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    model.register_parameter("counts", counts)

    @oomkit.auto_batch(accumulation_steps=2)
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model[2](model[0](x)).square().mean().backward()
        optimizer.step()
        if oomkit.current().is_last:
            counts.copy_(torch.ones(3))

    step(_x(6))
    assert counts.float().eq(1).all() if dtype is torch.float8_e4m3fn else counts.bool().all()


def test_results_of_the_calls_own_parts_are_joined_in_the_proof() -> None:
    """No other parts run: what cannot be joined is refused before the update."""
    model, optimizer = _world()

    def step(x: torch.Tensor) -> Any:
        if len(x) not in (1, 5):
            raise ValueError("one row, or all")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return f"first: {float(x[0, 0]):.3f}"

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(oomkit.SplitError, match="cannot join"):
        oomkit.auto_batch(step, accumulation_steps=5)(_x(5))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_results_of_two_rows_and_of_one_are_joined_in_the_proof() -> None:
    """As those of the call are: what cannot be joined runs whole, nothing is updated before."""
    model, optimizer = _world()

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> Any:
        made = namedtuple("made", "rows first")  # another class in each call
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return made(len(x), float(x[0, 0]))

    x = _x(3)
    step(_x(8))
    with inject_oom(nth=1, phase="forward"):
        assert tuple(step(x)) == (3, float(x[0, 0]))


def test_an_update_of_few_rows_by_hand() -> None:
    """Through `.data`, and the gradient is gone: 64 values of 60,000 need not show it."""
    torch.manual_seed(1)
    table = nn.Embedding(20_000, 3).double()

    def step(rows: torch.Tensor, y: torch.Tensor) -> None:
        each = F.cross_entropy(table(rows), y, reduction="none")
        (each / each.detach().mean()).mean().backward()
        if table.weight.grad is not None:
            table.weight.data[rows] -= 0.5 * table.weight.grad[rows]
            table.weight.grad = None

    rows = torch.tensor([17, 4711, 9001, 12345, 19999, 3])
    before = table.weight.detach().clone()
    with pytest.raises(oomkit.SplitError, match="writes to weight of Embedding"):
        oomkit.auto_batch(step, accumulation_steps=2)(rows, MIXED[:6])
    assert torch.equal(table.weight, before)


def test_labels_that_never_differ_where_it_can_look_are_asked_for_a_few_times() -> None:
    runs: Seen[int] = Seen()
    model, optimizer = _world()
    flags = torch.zeros(48, dtype=torch.bool)
    flags[41] = True

    @oomkit.auto_batch(accumulation_steps=8)
    def step(x: torch.Tensor, flags: torch.Tensor, more: torch.Tensor) -> None:
        runs.append(len(x))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    made = []
    for _ in range(9):
        runs.clear()
        step(_x(48), flags, flags.flip(0))
        made.append(len(runs))
    assert made[4:] == [8, 20, 8, 8, 8], made


def test_one_row_that_fits_needs_no_room_beside_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    x = _x(1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(x).exp().mean()
        return value

    with oomkit.limit_memory("1GiB", device="cpu"):
        before = oomkit.memory("cpu").allocated
        value = loss(x)
        held = oomkit.memory("cpu").allocated - before
        del value
    step = oomkit.auto_batch(loss, model=model)
    with oomkit.limit_memory(oomkit.memory("cpu").allocated + held + 16, device="cpu"):
        assert step(x).requires_grad


@pytest.mark.parametrize("through_data", [False, True])
def test_a_hidden_update_by_hand_is_put_back_after_losses_were_compared(through_data: bool) -> None:
    """Without a graph the step finds the caller's gradients, and makes its update of them."""

    class Program:
        def __init__(self) -> None:
            torch.manual_seed(7)
            self.model = nn.Linear(4, 2).double()

        def renewed(self) -> None:
            with torch.no_grad():
                for p in self.model.parameters():
                    if p.grad is not None:
                        p.grad.add_(p.detach(), alpha=0.1)
                        (p.data if through_data else p).sub_(p.grad, alpha=0.05)
                        p.grad.zero_()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            getattr(self, "".join(["re", "newed"]))()  # no code shows which method that is
            return loss.detach()

    x = torch.randn(8, 4, dtype=torch.float64)
    mine, twin = Program(), Program()
    step = oomkit.auto_batch(mine.step, model=mine.model, accumulation_steps=2)
    for _ in range(4):
        torch.testing.assert_close(step(x), twin.step(x), rtol=1e-9, atol=0)
    got, want = list(mine.model.parameters()), list(twin.model.parameters())
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


class Memory(nn.Module):
    """Attends to the rows of the call before, unless it is told to forget them."""

    def __init__(self, in_list: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(3, 6), nn.Linear(3, 12), nn.Linear(6, 3)
        self.in_list, self.memory = in_list, None
        self.memories: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.memories or [None])[0] if self.in_list else self.memory
        both = x if before is None else torch.cat([before, x], 1)
        if self.in_list:
            self.memories = [x.detach()]
        else:
            self.memory = x.detach()
        k, v = self.kv(both).chunk(2, -1)
        return self.out(F.scaled_dot_product_attention(self.q(x), k, v))

    def forget(self) -> None:
        self.memory, self.memories = None, []


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("verify", [None, True])
@pytest.mark.parametrize("fails_at", [0, 3])
@pytest.mark.refusals
def test_rows_that_see_those_of_another_micro_batch_are_refused(
    fails_at: int, verify: bool | None, in_list: bool
) -> None:
    """A proof of a call that forgot them says nothing of one that does not, whose parts raise."""
    torch.manual_seed(1)
    model = Memory(in_list).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if verify is None else {"verify": verify}

    @oomkit.auto_batch(**options)
    def step(x: torch.Tensor, y: torch.Tensor, starts: bool) -> None:
        if starts:
            model.forget()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for i in range(fails_at + 1):
        x, y = torch.randn(2, 8, 4, 3, dtype=torch.float64)
        with inject_oom(nth=9, phase="forward") if i == fails_at else nullcontext():
            step(x, y, True)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = torch.randn(2, 8, 4, 3, dtype=torch.float64)
    with pytest.raises(oomkit.SplitError):
        step(x, y, False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_model_on_the_meta_device_is_no_reason_to_fail() -> None:
    """Of an ensemble: its values are elsewhere, and only its forward is used."""
    torch.manual_seed(1)
    models = [nn.Linear(3, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = nn.Linear(3, 2).to("meta")
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        out = torch.func.vmap(
            lambda p, b, rows: torch.func.functional_call(base, (p, b), (rows,)), (0, 0, None)
        )(parameters, buffers, x)
        out.square().mean().backward()
        optimizer.step()

    for fails in (False, True):
        before = parameters["weight"].detach().clone()
        with inject_oom(nth=1, phase="backward") if fails else nullcontext():
            step(torch.randn(8, 3))
        assert step.records[-1].accumulation_steps == 1 + fails
        assert not torch.equal(before, parameters["weight"])


@pytest.mark.parametrize("kind", ["penalty", "retained"])
def test_a_step_that_needs_its_graph_goes_on_in_micro_batches_of_one_row(kind: str) -> None:
    """It was proven, and cannot be verified where gradients are off."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> None:
            x = x.detach().requires_grad_()
            out = model(x)  # noqa: B023
            if kind == "penalty":
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
            else:
                out.retain_grad()
                loss = out.square().mean()
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023

        for call in range(4):
            x = torch.randn(8, 3, dtype=torch.float64)
            times = (1, 7)[call] if fails and call < 2 else 0
            with inject_oom(times=times, phase="backward") if times else nullcontext():
                step(x)
        assert step.records[1].accumulation_steps == (8 if fails else 1)
        found.append([*model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


FACTORS = {
    "k * reg": lambda ce, reg, k: ce + k * reg,
    "reg * k": lambda ce, reg, k: ce + reg * k,
    "lerp": lambda ce, reg, k: torch.lerp(ce, reg, k),
    "dot": lambda ce, reg, k: torch.stack([ce, reg]) @ torch.stack([torch.ones_like(ce), k]),
}


def _balanced(form: str, first: int, scalar: bool) -> Any:
    """Two losses, the second of which is made as large as the first from that call on: the value
    of their sum is the sum of the micro-batches' all the same."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @oomkit.auto_batch
    def step(x: torch.Tensor, y: torch.Tensor, call: int) -> None:
        out = model(x)
        ce, reg = F.cross_entropy(out, y), out.square().mean()
        begun = 0.1 if scalar else torch.tensor(0.1, dtype=ce.dtype)
        k = begun if call < first else (ce / reg).detach()
        optimizer.zero_grad()
        FACTORS[form](ce, reg, k).backward()
        optimizer.step()

    return step, model


def _refused_at(step: Any, model: nn.Module, calls: int) -> int:
    for call in range(calls):
        before = [p.detach().clone() for p in model.parameters()]
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
        try:
            with inject_oom(nth=1, phase="forward") if call == 0 else nullcontext():
                step(x, y, call)
        except oomkit.SplitError:
            assert all(map(torch.equal, before, model.parameters()))
            return call
    return calls


@pytest.mark.parametrize("first", [2, 5])
@pytest.mark.parametrize("form", ["k * reg", "reg * k", "lerp"])
@pytest.mark.refusals
def test_a_factor_that_is_computed_from_a_call_on_is_refused_there(form: str, first: int) -> None:
    assert _refused_at(*_balanced(form, first, scalar=True), 8) == first


@pytest.mark.parametrize("first", [2, 3, 5])
@pytest.mark.refusals
def test_a_factor_of_elements_is_refused_where_it_is_verified(first: int) -> None:
    """By its gradients, for its value is that of its parts."""
    assert first <= _refused_at(*_balanced("dot", first, scalar=False), 12) <= 2 * first
