"""What modules keep in places that only their own code shows, where no name of the step leads to
them: as participants, by their optimizer, because they have run, or in a library."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import oomkit
from oomkit.testing import inject_oom

from .unseen import Row, step_with

SEED = 17
ROWS = 8
STEPS = 4

pytestmark = pytest.mark.filterwarnings("ignore::oomkit.OomkitWarning")


class Place:
    """Where a module notes that its buffers are ready."""

    def __init__(self) -> None:
        self.ready = False
        self.calls = 0


NAMES: set[int] = set()
ROWS_SEEN: deque[int] = deque()
PLACE = Place()


class Ready(nn.Module):
    """Its buffer gets its value once, of which it takes a note somewhere."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))
        self.layer = nn.Linear(4, 4) if trains else nn.Identity()
        self.notes: set[int] = set()
        self.row: deque[int] = deque()
        self.place = Place()

    def make_ready(self) -> None:
        with torch.no_grad():
            self.scale.fill_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return self.layer(x) * self.scale

    def look(self) -> None:
        raise NotImplementedError


class InGlobalSet(Ready):
    def look(self) -> None:
        if id(self) not in NAMES:
            NAMES.add(id(self))
            self.make_ready()


class InGlobalRow(Ready):
    def look(self) -> None:
        if not ROWS_SEEN:
            ROWS_SEEN.append(1)
            self.make_ready()


class InGlobalObject(Ready):
    def look(self) -> None:
        if not PLACE.ready:
            PLACE.ready = True
            self.make_ready()


class InOwnSet(Ready):
    def look(self) -> None:
        if not self.notes:
            self.notes.add(1)
            self.make_ready()


class InOwnRow(Ready):
    def look(self) -> None:
        if not self.row:
            self.row.append(1)
            self.make_ready()


class InOwnObject(Ready):
    def look(self) -> None:
        if not self.place.ready:
            self.place.ready = True
            self.make_ready()


KINDS = [InGlobalSet, InGlobalRow, InGlobalObject, InOwnSet, InOwnRow, InOwnObject]


@pytest.fixture(autouse=True)
def nothing_noted() -> Any:
    forget()
    yield
    forget()


def forget() -> None:
    NAMES.clear()
    ROWS_SEEN.clear()
    PLACE.__init__()  # type: ignore[misc]


def train(kind: type[Ready], how: str, at: int | None) -> list[torch.Tensor]:
    """Weights and buffers after some steps, of which one fails; in each one all is made ready."""
    torch.manual_seed(SEED)
    module, layer = kind(trains=how == "optimizer"), nn.Linear(4, 4)
    parameters = [*layer.parameters(), *module.parameters()]
    options: dict[str, Any] = {"participants": [module]} if how == "participants" else {}
    step = step_with(Row(module), layer, torch.optim.SGD(parameters, lr=0.1), **options)
    for number in range(STEPS):
        forget()
        module.notes.clear()
        module.row.clear()
        module.place.ready = False
        module.scale.zero_()
        with inject_oom(nth=1, phase="backward") if number == at else contextlib.nullcontext():
            step(torch.randn(ROWS, 4))
    return [module.scale, *parameters]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["participants", "optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_back_with_the_buffers(kind: type[Ready], how: str, at: int) -> None:
    torch.testing.assert_close(train(kind, how, at), train(kind, how, None))


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_second_call_on_also_of_what_has_run(kind: type[Ready]) -> None:
    torch.testing.assert_close(train(kind, "hidden", 2), train(kind, "hidden", None))


def refused(what: str) -> Any:
    return pytest.raises(oomkit.SplitError, match=rf"buffer \w+ of a \w+ was {what}")


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_first_call_its_retry_is_refused(kind: type[Ready]) -> None:
    """The buffer goes back, and what decides whether it is set does not."""
    torch.manual_seed(SEED)
    module, layer = kind(trains=False), nn.Linear(4, 4)
    step, before = step_with(Row(module), layer), layer.weight.clone()
    with inject_oom(nth=1, phase="backward"), refused("updated .* but not in its retry"):
        step(torch.randn(ROWS, 4))
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("returned", [False, True], ids=["inside", "returned"])
def test_a_retry_without_an_update_is_refused_too(returned: bool) -> None:
    module, layer = InOwnSet(trains=False), nn.Linear(4, 4)
    row = Row(module)

    @oomkit.auto_batch
    def loss_of(x: torch.Tensor) -> Any:
        loss = layer(row(x)).square().mean()
        return loss if returned else loss.backward()

    with inject_oom(nth=1, phase="backward"), refused("updated"):
        loss = loss_of(torch.randn(ROWS, 4))
        loss.backward()
    assert layer.weight.grad is None


class Once(Ready):
    """Python itself notes that its method has run."""

    def look(self) -> None:
        self.first()

    @lru_cache  # noqa: B019
    def first(self) -> None:
        self.make_ready()


def test_nor_what_a_named_module_cannot_take_back() -> None:
    module, layer = Once(trains=False), nn.Linear(4, 4)
    step = step_with(module, layer)
    with inject_oom(nth=1, phase="backward"), refused("updated"):
        step(torch.randn(ROWS, 4))


class Counts(nn.Module):
    """Its buffers tell of how many rows it was run, where `counts` says so."""

    def __init__(self, counts: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts(x):
            self.rows += len(x)
        return x


def test_a_buffer_that_moves_again_is_not_refused() -> None:
    counts = Counts(lambda x: len(x) > 1)
    step = step_with(Row(counts), nn.Linear(4, 4))
    with inject_oom(nth=1, times=2, phase="backward"):
        step(torch.randn(ROWS, 4))
    assert counts.rows == ROWS


def test_a_count_that_only_the_whole_batch_takes_is_refused() -> None:
    step = step_with(Row(Counts(lambda x: len(x) == ROWS)), nn.Linear(4, 4))
    with inject_oom(nth=1, phase="backward"), refused("updated"):
        step(torch.randn(ROWS, 4))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("hidden", [True, False])
def test_a_scheduler_that_is_stepped_before_the_forward_is_no_update(hidden: bool) -> None:
    counts = Counts(lambda x: oomkit.current().is_last)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = Row(counts) if hidden else counts

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        scheduler.step()
        optimizer.zero_grad()
        layer(run(x)).square().mean().backward()
        optimizer.step()

    with inject_oom(nth=1, phase="backward"):
        step(torch.randn(ROWS, 4))
    assert counts.rows == ROWS // 2


def test_what_moves_behind_the_update_may_fail_there() -> None:
    counts, layer = Counts(lambda x: True), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @oomkit.auto_batch(optimizer_safety="copy")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            counts(x)
            if oomkit.current().is_last:
                layer(x)

    with inject_oom(nth=2, phase="forward") as injected:
        step(torch.randn(ROWS, 4))
    assert injected.fired
    assert counts.rows == ROWS


@pytest.mark.parametrize("hidden", [True, False])
def test_verify_warn_goes_on_with_a_warning(hidden: bool) -> None:
    counts = Counts(lambda x: len(x) == ROWS)
    run = Row(counts) if hidden else counts
    step = step_with(run, nn.Linear(4, 4), verify="warn")
    with (
        inject_oom(nth=1, phase="backward"),
        pytest.warns(oomkit.OomkitWarning, match="buffer rows of a Counts was updated") as told,
    ):
        step(torch.randn(ROWS, 4))
    assert counts.rows == 0
    assert sum("rows of a Counts" in str(warning.message) for warning in told) == 1


class Renewed(nn.Module):
    """What has run is replaced by a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Counts(lambda x: True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.state(x)
        self.state = Counts(lambda x: True)
        return x


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_module_that_is_gone_is_not_asked_for(hidden: bool, calls: int) -> None:
    renewed = Renewed()
    step = step_with(Row(renewed) if hidden else renewed, nn.Linear(4, 4))
    for _ in range(calls):
        step(torch.randn(ROWS, 4))
    with inject_oom(nth=1, phase="backward"):
        step(torch.randn(ROWS, 4))


class Owner:
    """It cannot go back at the first try."""

    def __init__(self) -> None:
        self.value, self.fails = 0, True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        self.value = state["value"]


def test_what_was_put_back_at_the_first_try_has_not_moved() -> None:
    owner, rests = Owner(), Counts(lambda x: False)
    rests.register_buffer("large", torch.ones(40000))  # not copied as bytes
    step = step_with(rests, nn.Linear(4, 4), participants=[owner])
    with inject_oom(nth=1, phase="backward"):
        step(torch.randn(ROWS, 4))
    assert not owner.fails


class Mask(nn.Module):
    """It has a table for as many rows as its largest batch."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.register_buffer("mask", None if empty else torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) < len(x):
            self.mask = torch.ones(len(x), 1)
        return x * self.mask[: len(x)]


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_table_that_grows_with_its_batch_is_not_refused(hidden: bool, empty: bool) -> None:
    mask = Mask(empty)
    step = step_with(Row(mask) if hidden else mask, nn.Linear(4, 4))
    with inject_oom(nth=1, phase="backward"):
        step(torch.randn(ROWS, 4))
    assert len(mask.mask) in (4, ROWS)


class ActNorm(nn.Module):
    """What it makes of its first batch it makes in a hook, which it then takes out."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        if empty:
            self.register_buffer("scale", None)
        self.hook = self.register_forward_pre_hook(ActNorm.first)

    @staticmethod
    def first(module: ActNorm, args: tuple[torch.Tensor]) -> None:
        module.register_buffer("scale", 1 / (1 + args[0].abs().amax(0)))
        module.hook.remove()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._buffers.get("scale")
        return x if scale is None else x * scale


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_what_the_whole_batch_has_made_stays_where_it_is_made_once(
    hidden: bool, empty: bool, times: int
) -> None:
    columns = 40000  # it is not copied as bytes
    weights = []
    for fails in (False, True):
        torch.manual_seed(SEED)
        norm, layer = ActNorm(empty), nn.Linear(columns, 1)
        step = step_with(Row(norm) if hidden else norm, layer)
        with (
            inject_oom(nth=1, times=times, phase="backward") if fails else contextlib.nullcontext()
        ):
            step(torch.randn(ROWS, columns) / 100)
        weights.append([layer.weight, norm.scale])
    torch.testing.assert_close(*weights)


class Registers(nn.Module):
    """It has buffers without a value, and makes one more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("empty", None)
        self.register_buffer("stays", None)
        self.names = ["empty", "new"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def count(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in (self.calls, self.empty, self.new):
                buffer += len(x)
        return x


class Shown(Registers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.empty is None:
            self.empty = torch.zeros(3)
        if "new" not in self._buffers:
            self.register_buffer("new", torch.zeros(3))
        return self.count(x)


class NotShown(Registers):
    """Its code does not show the names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.empty is None:
            setattr(self, self.names[0], torch.zeros(3))
        if "new" not in self._buffers:
            self.register_buffer(self.names[1], torch.zeros(3))
        return self.count(x)


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("how", ["named", "participants", "hidden"])
@pytest.mark.parametrize("kind", [Shown, NotShown])
def test_a_count_that_a_failed_attempt_has_begun_is_not_gone_on_with(
    kind: type[Registers], how: str, calls: int
) -> None:
    module = kind()
    options: dict[str, Any] = {"participants": [module]} if how == "participants" else {}
    step = step_with(module if how == "named" else Row(module), nn.Linear(4, 4), **options)
    for _ in range(calls):
        step(torch.randn(ROWS, 4))
        del module.new
        module.empty = None
    read = kind is Shown and (how != "hidden" or calls > 0)
    with (
        inject_oom(nth=1, phase="backward"),
        contextlib.nullcontext() if read else refused("created .* but not in its retry"),
    ):
        step(torch.randn(ROWS, 4))
    if read:
        assert module.calls == ROWS * (calls + 1)
        assert module.new.eq(ROWS).all()
        assert module.empty.eq(ROWS).all()


SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Weakly(nn.Module):
    """The code shows the buffer that it makes, and notes that where nothing can be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self not in SEEN:
            SEEN.add(self)
            self.scale = torch.full((4,), 0.5)
        return x if self.scale is None else x * self.scale


def test_one_that_is_not_made_again_is_refused() -> None:
    step = step_with(Weakly(), nn.Linear(4, 4))
    with inject_oom(nth=1, phase="backward"), refused("created"):
        step(torch.randn(ROWS, 4))


def test_what_is_made_before_the_backward_of_a_returned_loss_stays() -> None:
    module, layer = Shown(), nn.Linear(4, 4)

    @oomkit.auto_batch
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().mean() + 0 * module.calls

    loss = loss_of(torch.randn(ROWS, 4))
    module.register_buffer("new", torch.ones(3))
    module.empty = torch.ones(3)
    with inject_oom(nth=1, phase="backward"):
        loss.backward()
    assert module.new.eq(1).all()
    assert module.empty.eq(1).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("warm", [0, 2])
def test_tables_of_positions_of_transformers_go_back_with_their_length(
    kind: str, warm: int
) -> None:
    """They are made anew for a batch that is longer than all before, of which the module notes the
    length in an attribute."""
    scaling = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "longrope": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 16,
        },
    }[kind]
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_scaling=scaling,
    )
    weights = []
    for fails in (False, True):
        torch.manual_seed(SEED)
        model = transformers.LlamaForCausalLM(config).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @oomkit.auto_batch
        def step(ids: torch.Tensor) -> None:
            optimizer.zero_grad()  # noqa: B023
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # noqa: B023
            optimizer.step()  # noqa: B023

        for _ in range(warm):
            step(torch.randint(0, 32, (ROWS, 8)))
        ids = torch.randint(0, 32, (ROWS, 40))
        with inject_oom(nth=1, phase="backward") if fails else contextlib.nullcontext():
            step(ids)
        weights.append([*model.parameters(), *model.buffers()])
    torch.testing.assert_close(*weights)
