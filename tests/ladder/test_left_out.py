"""Modules whose forward is no function of its inputs are run plainly, and once."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import message_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint

import oomkit
from ladder.twice import (
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    Model,
    both,
    model_of,
    plain,
    worn,
)
from oomkit._ladder.recompute import Handle, LeftOut, advise, recompute_begin

DRAWN = np.random.default_rng(3)
DRAWN_BY_TORCH = torch.Generator().manual_seed(3)
NOTED: list[float] = []
COUNTED = {"calls": 0}
OPTION = 'ladder=("update", "state", "activations")'


class Norm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(super().forward(x))


class Moving(Block):
    """A buffer follows what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x) - self.mean


class MovingUnseen(Moving):
    def forward(self, x: torch.Tensor) -> Any:
        self.mean.data = self.mean.data.lerp(x.detach().mean((0, 1)), 0.1)
        return Block.forward(self, x) - self.mean


class MovingInPlaceUnseen(Moving):
    def forward(self, x: torch.Tensor) -> Any:
        self.mean.data.lerp_(x.detach().mean((0, 1)), 0.1)
        return Block.forward(self, x) - self.mean


class Replaced(Moving):
    def forward(self, x: torch.Tensor) -> Any:
        self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)
        return Block.forward(self, x) - self.mean


class Clamped(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.wide.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class ClampedUnseen(Block):
    def forward(self, x: torch.Tensor) -> Any:
        self.wide.weight.data.clamp_(-0.2, 0.2)
        self.wide.weight.data.mul_(0.99)
        return super().forward(x)


class Counting(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x) / self.calls


class Keeping(Block):
    """What it saw last, as for a picture of the attention."""

    last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.wide.last = x.detach()
        return super().forward(x)


class Listing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.means.append(x.mean().item())
        return super().forward(x) * len(self.means)


class Tally:
    def __init__(self) -> None:
        self.rows: dict[str, Any] = {"seen": 0}


class Nested(Block):
    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def forward(self, x: torch.Tensor) -> Any:
        self.tally.rows["seen"] += len(x)
        return super().forward(x) / self.tally.rows["seen"]


class Array(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = np.ones(3)

    def forward(self, x: torch.Tensor) -> Any:
        self.scale *= 1.1
        return super().forward(x) / float(self.scale[0])


class Python(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * random.random()


class Numpy(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * float(np.random.rand())


class Generator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * torch.rand(1, generator=self.generator)


class GlobalGenerator(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * torch.rand(1, generator=DRAWN_BY_TORCH)


class GlobalNumpy(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * float(DRAWN.random())


class Noting(Block):
    def forward(self, x: torch.Tensor) -> Any:
        NOTED.append(x.mean().item())
        return super().forward(x) / len(NOTED)


class GlobalCounter(Block):
    def forward(self, x: torch.Tensor) -> Any:
        COUNTED["calls"] += 1
        return super().forward(x) / COUNTED["calls"]


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.add_(1.0))


class InPlaceUnseen(Block):
    def forward(self, x: torch.Tensor) -> Any:
        x.data.mul_(2.0)
        return super().forward(x)


class Same(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x


class Toggled(Block):
    def forward(self, x: torch.Tensor) -> Any:
        self.before.weight.requires_grad_(not self.before.weight.requires_grad)
        return super().forward(x)


def reset() -> None:
    NOTED.clear()
    COUNTED["calls"] = 0
    DRAWN.bit_generator.state = np.random.default_rng(3).bit_generator.state
    DRAWN_BY_TORCH.manual_seed(3)


def from_the_start(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "begun"):
        model.begun = True  # type: ignore[assignment]
        reset()
    return plain(model, x)


KINDS = [
    (Norm, None),
    (Moving, "changes Moving.mean"),
    (MovingUnseen, "changes MovingUnseen.mean"),
    (MovingInPlaceUnseen, "changes mean"),
    (Replaced, "changes Replaced.mean"),
    (Clamped, "changes Linear.weight"),
    (ClampedUnseen, "changes wide.weight"),
    (Counting, "changes Counting.calls"),
    (Keeping, "changes Linear.last"),
    (Listing, "changes Listing.means"),
    (Nested, "changes Nested.tally.rows.seen"),
    (Array, "changes Array.scale"),
    (Python, "draws from random or numpy.random"),
    (Numpy, "draws from random or numpy.random"),
    (Generator, "changes Generator.generator, a random generator"),
    (GlobalGenerator, "draws from a random generator of its own"),
    (GlobalNumpy, "draws from a random generator of its own"),
    (Noting, "changes NOTED"),
    (GlobalCounter, "changes COUNTED['calls']"),
    (InPlace, "changes an argument in place"),
    (InPlaceUnseen, "changes its argument 0"),
    (Same, "returns nothing but what it was given"),
    (Toggled, "changes LayerNorm.weight"),
]


@pytest.mark.parametrize(("kind", "reason"), KINDS, ids=[k.__name__ for k, _ in KINDS])
def test_what_changes_more_than_its_result(
    again: Counter[str], kind: type[Block], reason: str | None
) -> None:
    ran = both(model_of(kind), from_the_start)
    assert not again
    if reason is None:
        assert ran.handle is None and recompute_begin([ran.model], LeftOut()) is None
        return
    assert len(ran.left_out) == 4 and ran.handle.count == 0
    assert [said.lower() for said in ran.left_out.reasons()] == [
        f"a {kind.__name__} {reason}".lower()
    ]


def test_a_norm_that_is_frozen_is_no_reason(again: Counter[str]) -> None:
    def freeze(model: Any) -> None:
        for block in model.blocks:
            block.norm.eval()

    both(model_of(Norm), but=freeze)
    assert again["Norm"] == 12


class Table(Block):
    """Positions up to the longest that was asked for, as rotary embeddings have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] > len(self.table):
            self.table = torch.linspace(0, 1, x.shape[1] * WIDTH).view(-1, WIDTH).cos()
        return super().forward(x + self.table[: x.shape[1]])


def test_a_table_that_grows_now_and_then_is_no_reason(again: Counter[str]) -> None:
    calls: list[int] = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        longest = x if len(calls) % 6 < 4 else torch.cat([x] * (len(calls) % 6), 1)
        loss: torch.Tensor = model(x) + model(x[:, :3]) + model(longest)
        loss.backward()
        return loss

    ran = both(model_of(Table), step, calls=6)
    assert again["Table"] == 4 * (3 * 6 - 3)  # it has grown three times
    assert len(ran.left_out) == 0


def test_a_table_replaced_before_the_backward(again: Counter[str]) -> None:
    """The first forward of a call found another one."""

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        for block in model.blocks:
            block.table = torch.ones_like(block.table)
        (loss + model(x)).backward()
        return loss

    def fill(model: Any) -> None:
        for block in model.blocks:
            block.table = torch.randn(LENGTH, WIDTH)

    both(model_of(Table), step, but=fill)
    assert again["Table"] == 24


class Later(Block):
    """Well for some time, then it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.late = [0], False

    def forward(self, x: torch.Tensor) -> Any:
        if self.late:
            self.steps[0] += 1
        return super().forward(x) * (1 + self.steps[0])


def test_what_begins_to_change_something_later_is_kept_from_then_on(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = plain(model, x)
        for block in model.blocks[:2]:
            block.late = True
        return loss

    ran = both(model_of(Later), step, calls=4)
    assert again["Later"] == 4 + 2 * 3
    assert len(ran.left_out) == 2
    assert ran.left_out.reasons() == ["a Later changes Later.steps[0]"]


class Draws(Block):
    """From ``random``, once it is told to."""

    late = False

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (random.random() if self.late else 1.0)


def test_what_begins_to_draw_later_is_kept(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = plain(model, x)
        for block in model.blocks:
            block.late = True
        return loss

    both(model_of(Draws), step)
    assert again["Draws"] == 4


# --- hooks, compilers, several processes ---


@pytest.mark.parametrize("how", ["pre", "forward", "backward"])
def test_hooks_inside_a_block_run_once(again: Counter[str], how: str) -> None:
    calls: list[str] = []
    model = model_of()
    inner = model.blocks[1].wide
    if how == "pre":
        inner.register_forward_pre_hook(lambda *_: calls.append(how))
    elif how == "forward":
        inner.register_forward_hook(lambda *_: calls.append(how))
    else:
        inner.register_full_backward_hook(lambda *_: calls.append(how))
    both(model, calls=1)
    assert again["Block"] == 3 and calls == [how] * 2


def test_hooks_that_come_later_are_seen(again: Counter[str]) -> None:
    calls: list[int] = []
    model = model_of()
    handle = recompute_begin([model], LeftOut())
    for _ in range(2):
        with worn(handle):
            plain(model, torch.randn(ROWS, LENGTH, WIDTH))
        if not calls:
            model.blocks[0].wide.register_forward_hook(lambda *_: calls.append(1))
    assert again["Block"] == 7 and calls == [1]


def test_hooks_on_all_modules(again: Counter[str]) -> None:
    calls: list[type] = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(type(m)))
    try:
        both(model_of(), calls=1)
    finally:
        hook.remove()
    assert not again and calls.count(Block) == 8


def test_hooks_of_oomkits_own_are_no_reason(again: Counter[str]) -> None:
    from oomkit._code.module_buffers import Buffers

    model = Model([Moving(), *(Block() for _ in range(3))])
    buffers = Buffers(list(model.modules()))
    with worn(recompute_begin([model], LeftOut())):
        plain(model, torch.randn(ROWS, LENGTH, WIDTH))
    assert again["Block"] == 3
    assert buffers.end() == (None, ["the buffer 'mean' of a Moving (changed in a forward)"])


class Whole(nn.DataParallel):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_others_run_is_left_out() -> None:
    def count(module: nn.Module) -> int:
        handle = recompute_begin([module], LeftOut())
        return 0 if handle is None else handle.count

    assert count(nn.Sequential(model_of())) == 4
    assert count(nn.Sequential(torch.compile(model_of()))) == 0
    in_place = model_of()
    in_place.compile()
    assert count(in_place) == 0
    function = model_of()
    function.forward = torch.compile(function.forward)
    assert count(function) == 0
    inside = model_of()
    inside.blocks[2].wide = torch.compile(inside.blocks[2].wide)
    assert count(inside) == 3
    assert count(Whole(model_of())) == 0
    traced = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(1, WIDTH))
    assert count(nn.ModuleList([traced, traced, traced])) == 0
    moved = model_of()
    moved.blocks[0].wide._hf_hook = object()
    assert count(moved) == 3


@pytest.mark.parametrize("cached", [False, True])
def test_parametrized_weights(again: Counter[str], cached: bool) -> None:
    def norms(model: Any) -> None:
        for block in model.blocks:
            parametrizations.weight_norm(block.wide)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not cached:
            return plain(model, x)
        with parametrize.cached():
            return plain(model, x)

    both(model_of(), step, but=norms)
    assert again["Block"] == (0 if cached else 12)


def test_spectral_norm_moves_its_vectors(again: Counter[str]) -> None:
    def norms(model: Any) -> None:
        for block in model.blocks:
            parametrizations.spectral_norm(block.wide)

    ran = both(model_of(), but=norms)
    assert not again
    (said,) = ran.left_out.reasons()
    assert said.startswith("a Block changes _SpectralNorm._")


# --- arguments and results ---


class Given(Block):
    def forward(self, x: torch.Tensor, more: Any = None) -> Any:
        if isinstance(more, list):
            more.append(x.detach().mean())
        elif isinstance(more, dict):
            more["last"] = x.detach().mean()
        elif more is not None:
            more.put(x.detach().mean())
        return super().forward(x)


class Cache:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> None:
        self.values.append(value)


@pytest.mark.parametrize("kind", [list, dict, Cache])
def test_arguments_that_are_filled(again: Counter[str], kind: type) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        more = kind()
        x = model.embed(x)
        for block in model.blocks:
            x = block(x, more)
        loss: torch.Tensor = x.square().mean()
        loss.backward()
        kept = {list: lambda: more, dict: lambda: list(more.values()), Cache: lambda: more.values}
        return torch.stack([loss.detach(), *kept[kind]()])

    ran = both(model_of(Given), step)
    assert not again
    said = "is given a Cache" if kind is Cache else "changes a container that it is given"
    assert ran.left_out.reasons() == [f"a Given {said}"]
    assert len(ran.left_out) == (0 if kind is Cache else 4)


def test_an_object_in_one_call_is_no_reason_in_the_next(again: Counter[str]) -> None:
    calls: list[int] = []

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        x = model.embed(x)
        for block in model.blocks:
            x = block(x, Cache() if len(calls) % 3 == 2 else None)
        loss: torch.Tensor = x.square().mean()
        loss.backward()
        return loss

    both(model_of(Given), step)
    assert again["Given"] == 8


class Answer:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Answering(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(super().forward(x))


def test_a_result_of_a_class_of_its_own(again: Counter[str]) -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x).values
        loss: torch.Tensor = x.square().mean()
        loss.backward()
        return loss

    ran = both(model_of(Answering), step)
    assert not again
    assert ran.left_out.reasons() == ["a Answering returns a Answer"]


def test_a_mask_that_is_passed_through_is_no_reason(again: Counter[str]) -> None:
    class Passing(Block):
        def forward(self, given: Any) -> Any:
            x, mask = given
            return super().forward(x) * mask, mask

    model = nn.Sequential(*(Passing() for _ in range(3)))

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model((x, torch.ones(LENGTH, 1)))[0].square().mean()
        loss.backward()
        return loss

    both(model, step)
    assert again["Passing"] == 9


# --- what cannot be kept apart: errors that say so ---


def test_a_saved_tensor_of_a_kept_forward_changed_in_place_is_torchs_error() -> None:
    class Exp(Counting):
        def forward(self, x: torch.Tensor) -> Any:
            self.kept = super().forward(x).exp()
            return self.kept

    model = model_of(Exp)
    handle = recompute_begin([model], LeftOut())
    for rung in (None, handle):
        with worn(rung), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y = model.blocks[0](torch.randn(ROWS, LENGTH, WIDTH))
            y.add_(1.0)
            y.sum().backward()


def failing(model: nn.Module, between: Any, kind: type[BaseException]) -> BaseException:
    with worn(recompute_begin([model], LeftOut())):
        loss = model(torch.randn(ROWS, LENGTH, WIDTH))
        between(model)
        with pytest.raises(kind) as caught:
            loss.backward()
    return caught.value


def test_a_parameter_that_moved_before_the_backward() -> None:
    def update(model: Any) -> None:
        with torch.no_grad():
            model.blocks[1].narrow.bias.add_(1.0)  # nothing that torch saves

    error = failing(model_of(), update, oomkit._C.OomkitError)
    assert message_of(error) == (
        "Linear.bias has changed between the forward of a Block, which keeps its inputs only, and "
        "its backward, which computes it again; oomkit.auto_batch("
        f"{OPTION}) turns recomputation off"
    )


def test_a_parameter_that_needs_a_gradient_by_then() -> None:
    model = model_of()
    model.blocks[2].wide.requires_grad_(False)
    error = failing(model, lambda m: m.requires_grad_(True), oomkit._C.OomkitError)
    assert str(error).startswith(("Linear.weight has changed", "Linear.bias has"))


class Elsewhere(Block):
    """A function of something that nobody can see."""

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x[:, : len(hidden.get())].sin().sum(1, keepdim=True) + x


class Hidden:
    __slots__ = ("value",)

    def get(self) -> str:
        return self.value


hidden = Hidden()


def test_advice_when_torch_sees_a_difference() -> None:
    hidden.value = "abc"
    error = failing(model_of(Elsewhere), lambda _: setattr(hidden, "value", "ab"), CheckpointError)
    said = advise(error)
    assert said == (
        "oomkit keeps only the inputs of a Elsewhere and computes its forward again in the "
        f"backward; and it differs. oomkit.auto_batch({OPTION}) turns recomputation off."
    )


class First(nn.Module):
    """Saves nothing of its input by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 1.0)


def test_advice_when_an_input_was_changed_in_place() -> None:
    class Added(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x += block(x)
            return self.head(x).square().mean()

    model = Added([First() for _ in range(3)])
    error = failing(model, lambda _: None, RuntimeError)
    said = advise(error)
    assert said is not None and "of a First and" in said and OPTION in said
    assert "an input of it was changed in place after its forward" in said
    plain(model, torch.randn(ROWS, LENGTH, WIDTH))  # torch alone can do that


def test_no_advice_for_other_errors() -> None:
    assert advise(torch.OutOfMemoryError("no memory")) is None
    assert advise(ValueError("x")) is None
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="inplace") as caught:
        y.sum().backward()
    assert advise(caught.value) is None


def test_out_of_memory_in_a_recomputed_forward_is_that() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor) -> Any:
            if torch._C._current_graph_task_id() != -1:
                raise torch.OutOfMemoryError("no memory for it")
            return super().forward(x)

    error = failing(model_of(Failing), lambda _: None, torch.OutOfMemoryError)
    assert advise(error) is None and oomkit.is_oom_error(error)


def test_advice_for_a_checkpoint_of_the_users_names_no_module() -> None:
    sizes = iter([3, 4])

    def function(x: torch.Tensor) -> torch.Tensor:
        return x[: next(sizes)].sin().exp()

    y = checkpoint(function, torch.ones(5, requires_grad=True), use_reentrant=False)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    said = advise(caught.value)
    assert said is not None and "of a module and" in said


# --- memory ---


def peak(model: nn.Module, x: torch.Tensor, handle: Handle | None) -> int:
    """Of forward and backward, beside what was there."""
    model.zero_grad()
    plain(model, x)  # gradients are there
    base = oomkit.memory("cpu").allocated or 0
    with oomkit.guard() as guard, worn(handle):
        plain(model, x)
    return (guard.records[-1].peak_allocated or 0) - base


def test_the_peak_of_six_blocks() -> None:
    model = Model([Block(32) for _ in range(6)], 32)
    x = torch.randn(32, 64, 32)
    with oomkit.limit_memory("1GiB", device="cpu"):
        left_out = LeftOut()
        handle = recompute_begin([model], left_out)
        whole, first, later = peak(model, x, None), peak(model, x, handle), peak(model, x, handle)
    print(f"plain {whole}, first {first} ({first / whole:.3f}), later {later / whole:.3f}")
    assert first < 0.4 * whole and later < 0.4 * whole and len(left_out) == 0


def test_a_call_under_a_budget_that_a_plain_one_exceeds() -> None:
    model = Model([Block(32) for _ in range(6)], 32)
    x = torch.randn(32, 64, 32)
    with oomkit.limit_memory("1GiB", device="cpu"):
        whole = peak(model, x, None)
    handle = recompute_begin([model], LeftOut())
    budget = (oomkit.memory("cpu").allocated or 0) + whole // 2
    with oomkit.limit_memory(budget, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            plain(model, x)
        gc.collect()
        with worn(handle):
            plain(model, x)


def test_nothing_is_kept_alive_between_calls() -> None:
    model = model_of()
    left_out = LeftOut()
    handle = recompute_begin([model], left_out)
    with worn(handle):
        loss = plain(model, torch.randn(ROWS, LENGTH, WIDTH))
    gone = [weakref.ref(module) for module in model.modules()]
    del model, loss
    assert all(ref() is None for ref in gone)
    with worn(handle):
        pass
    assert handle.count == 0 and len(left_out) == 0


def test_a_graph_that_goes_takes_everything_with_it() -> None:
    model = model_of(Counting, 3)
    model.blocks.extend([Block(), Block(), Block()])
    with worn(recompute_begin([model], LeftOut())):
        loss = model(torch.randn(ROWS, LENGTH, WIDTH))
    gone = weakref.ref(model.blocks[4])
    gc.disable()
    try:
        del model, loss
        assert gone() is None
    finally:
        gc.enable()


def test_a_thousand_calls_leave_nothing() -> None:
    model = Model([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], 4)
    x = torch.randn(2, 3, 4)
    handle = recompute_begin([model], LeftOut())

    def calls(count: int) -> int:
        for _ in range(count):
            with worn(handle):
                plain(model, x)
        gc.collect()
        return len(gc.get_objects())

    calls(10)
    before = calls(10)
    assert abs(calls(1000) - before) < 50
