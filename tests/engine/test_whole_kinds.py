"""Steps that no micro-batches can reproduce, and batches that cannot be found or cut: they run
whole once more, on the ladder where they must, and are what they would have been."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.seen import Seen
from torch import nn

import oomkit
from oomkit.testing import inject_oom

SEED, ROWS, WIDTH, CALLS = 29, 6, 5, 3


@dataclasses.dataclass
class Graph:
    """Nodes of several graphs, their edges, and a target for each graph."""

    nodes: torch.Tensor
    edges: torch.Tensor
    of: torch.Tensor
    y: torch.Tensor


def _net(width: int = WIDTH, out: int = WIDTH, depth: int = 1) -> nn.Sequential:
    layers = [(nn.Linear(width, width), nn.Dropout(0.2), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(m for each in layers for m in each), nn.Linear(width, out)).double()


class Program:
    """Two networks, which most kinds use one of."""

    def __init__(self, width: int = WIDTH, depth: int = 1) -> None:
        torch.manual_seed(SEED)
        self.model, self.other = _net(width, depth=depth), _net(width, 1, depth)
        self.first = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.second = torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.9)
        self.runs = Seen[int]()
        self.batch: Any = None

    def _train(self, loss: torch.Tensor) -> float:
        self.first.zero_grad()
        loss.backward()
        self.first.step()
        return loss.item()

    # what micro-batches cannot reproduce

    def gan(self, x: torch.Tensor) -> float:
        self.runs.append(len(x))
        fake = self.model(x)
        self.second.zero_grad()
        real = F.softplus(-self.other(x)).mean() + F.softplus(self.other(fake.detach())).mean()
        real.backward()
        self.second.step()
        return self._train(F.softplus(-self.other(fake)).mean()) + real.item()

    def sharpness_aware(self, x: torch.Tensor) -> float:
        """SAM: climb, a second backward there, and back."""
        self.runs.append(len(x))
        params = list(self.model.parameters())
        self.model(x).square().mean().backward()
        with torch.no_grad():
            steps = [p.grad.sign() * 0.05 for p in params if p.grad is not None]
            for p, step in zip(params, steps, strict=True):
                p.add_(step)
        self.first.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, step in zip(params, steps, strict=True):
                p.sub_(step)
        self.first.step()
        return loss.item()

    def adversarial(self, x: torch.Tensor) -> float:
        """FGSM: a backward for the gradient of the batch, cleared, and another one."""
        self.runs.append(len(x))
        inputs = x.clone().requires_grad_()
        self.first.zero_grad()
        self.model(inputs).square().mean().backward()
        assert inputs.grad is not None
        moved = (inputs + 0.1 * inputs.grad.sign()).detach()
        return self._train(self.model(moved).square().mean())

    def looks_behind_its_update(self, x: torch.Tensor) -> float:
        self.runs.append(len(x))
        self._train(self.model(x).square().mean())
        with torch.no_grad():
            return self.model(x).square().mean().item()

    def norm_by_hand(self, x: torch.Tensor) -> float:
        """Between micro-batches `.grad` is None."""
        self.runs.append(len(x))
        self.first.zero_grad()
        self.model(x).square().mean().backward()
        norms = [p.grad.norm().item() for p in self.model.parameters()]  # type: ignore[union-attr]
        self.first.step()
        return sum(norms)

    def update_by_hand(self, x: torch.Tensor) -> float:
        self.runs.append(len(x))
        self.model.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
        return loss.item()

    # what cannot be found, or not be cut

    def graph(self, data: Graph) -> float:
        self.runs.append(1)
        h = self.model(data.nodes)
        h = h.index_add(0, data.edges[1], h[data.edges[0]])
        pooled = h.new_zeros(len(data.y), WIDTH).index_add(0, data.of, h)
        return self._train(F.cross_entropy(pooled, data.y))

    def on_self(self) -> float:
        self.runs.append(1)
        return self._train(self.model(self.batch).square().mean())

    def sizes_disagree(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.runs.append(len(x))
        return self._train(F.mse_loss(self.model(x).flatten(), y))

    def state(self) -> list[torch.Tensor]:
        states = [*self.first.state.values(), *self.second.state.values()]
        return [
            *(p.detach().clone() for net in (self.model, self.other) for p in net.parameters()),
            *(v.clone() for s in states for v in s.values() if isinstance(v, torch.Tensor)),
        ]


def _rows(generator: torch.Generator, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator).double()


def _graph(generator: torch.Generator) -> Graph:
    return Graph(
        _rows(generator, 11),
        torch.randint(0, 11, (2, 17), generator=generator),
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]),
        torch.tensor([0, 3, 1]),
    )


def _calls(kind: str, program: Program, called: Callable[..., float]) -> Iterator[Any]:
    """Three calls, each of them to be made."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(CALLS):
        if kind == "graph":
            data = _graph(generator)
            yield lambda data=data: called(data)
        elif kind == "on_self":
            program.batch = _rows(generator)
            yield called
        else:
            x = _rows(generator)
            rest = [x.flatten() * 2] if kind == "sizes_disagree" else []
            yield lambda x=x, rest=rest: called(x, *rest)


SPLIT = (
    "gan",
    "sharpness_aware",
    "adversarial",
    "looks_behind_its_update",
    "norm_by_hand",
    "update_by_hand",
)
UNCUT = ("graph", "on_self", "sizes_disagree")
PLACES = [("forward", 1), ("forward", 3), ("backward", 1), ("backward", 4)]


def _trained(kind: str, failing: int = -1, **fault: Any) -> tuple[list[Any], Program, list[Any]]:
    program = Program()
    method = getattr(program, kind)
    called = method if failing < 0 else oomkit.auto_batch(method)
    torch.manual_seed(SEED)
    losses = []
    for i, call in enumerate(_calls(kind, program, called)):
        with inject_oom(**fault) if i == failing else nullcontext():
            losses.append(call())
    return losses, program, [] if failing < 0 else list(called.records)


@pytest.mark.sample(100)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("phase", "nth"), PLACES)
@pytest.mark.parametrize("failing", range(CALLS))
@pytest.mark.parametrize("kind", [*SPLIT, *UNCUT])
def test_it_is_the_undisturbed_training(
    kind: str, failing: int, phase: str, nth: int, times: int
) -> None:
    losses, plain, _ = _trained(kind)
    made, program, records = _trained(kind, failing, nth=nth, phase=phase, times=times)
    assert made == losses
    torch.testing.assert_close(program.state(), plain.state(), rtol=0, atol=0)
    assert all(record.accumulation_steps == 1 for record in records)


@pytest.mark.parametrize("kind", ["gan", "graph"])
def test_a_step_that_does_not_repeat_is_refused(kind: str) -> None:
    program, counts = Program(), itertools.count(1)
    method, hidden = getattr(program, kind), {"next": counts.__next__}

    def step(batch: Any) -> float:
        with torch.no_grad():
            next(iter(program.model.parameters())).data.mul_(1.0)
        scale = hidden["next"]()
        if isinstance(batch, Graph):
            return method(dataclasses.replace(batch, nodes=batch.nodes * scale))
        return method(batch * scale)

    decorated = oomkit.auto_batch(step)
    generator = torch.Generator().manual_seed(SEED)
    batch = _graph(generator) if kind == "graph" else _rows(generator)
    before = program.state()
    with inject_oom(nth=1, phase="backward"), pytest.raises(oomkit.OomkitError) as caught:
        decorated(batch)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "whole batch was not run instead: it does not do the same when" in notes
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def test_an_error_of_the_step_itself_passes() -> None:
    """Where the whole batch raises it, too."""
    program, (x,) = Program(), [_rows(torch.Generator().manual_seed(SEED))]

    class Diverged(AttributeError):
        pass

    @oomkit.auto_batch
    def step(x: torch.Tensor) -> None:
        program.first.zero_grad()
        program.model(x).square().mean().backward()
        raise Diverged("the loss is not finite")

    before = program.state()
    with inject_oom(nth=1, phase="backward"), pytest.raises(Diverged) as caught:
        step(x)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "raised in micro-batch 1 of 2" in notes and "whole batch" not in notes
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def _popped(batch: dict[str, Any]) -> None:
    batch.pop("weight", None)


def _cleared(batch: dict[str, Any]) -> None:
    batch["x"] = batch["x"].abs()


def _nested(batch: dict[str, Any]) -> None:
    batch["more"].clear()


def _in_place(batch: dict[str, Any]) -> None:
    batch["x"].abs_()


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("change", "name"),
    [(_popped, "batch"), (_cleared, "batch"), (_nested, "batch"), (_in_place, "in place")],
)
def test_what_a_failed_attempt_has_changed_in_such_a_batch_is_named(
    change: Callable[[Any], None], name: str, phase: str, kind: Any
) -> None:
    """Its containers are not made anew: the very arguments are passed again."""
    program = Program()

    @oomkit.auto_batch
    def step(batch: Any) -> float:
        weight = batch["weight"].mean() if "weight" in batch else 1.0
        more = len(batch["more"])
        change(batch)
        return program._train(program.model(batch["x"]).square().mean() * weight + more)

    generator = torch.Generator().manual_seed(SEED)
    x, weight = _rows(generator), _rows(generator, ROWS + 2)
    batch = kind({"x": x, "weight": weight, "more": [1.0, 2.0]})
    before = program.state()
    with inject_oom(nth=6, phase=phase), pytest.raises(oomkit.SplitError) as caught:
        step(batch)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "was not run instead: auto_batch cannot repeat the step, because it changed" in notes
    assert name in notes
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def test_a_batch_in_something_that_nobody_looks_into_is_refused() -> None:
    program = Program()

    @oomkit.auto_batch
    def step(batches: Any) -> float:
        return program._train(program.model(batches[0]).square().mean())

    batches = deque([_rows(torch.Generator().manual_seed(SEED))])
    with inject_oom(nth=1), pytest.raises(oomkit.SplitError, match="deque"):
        step(batches)
    assert len(batches) == 1


def test_so_it_is_in_a_step_that_has_run_whole() -> None:
    """A later call brings the container that nobody looks into, and takes from it."""
    program, generator = Program(), torch.Generator().manual_seed(SEED)

    @oomkit.auto_batch
    def step(batch: Any) -> float:
        x = batch.popleft() if isinstance(batch, deque) else batch["x"]
        return program._train(program.model(x).square().mean())

    first = {"x": _rows(generator), "weight": _rows(generator, ROWS + 2)}
    with inject_oom(nth=1):
        step(first)
    before, rows = program.state(), [_rows(generator) for _ in range(2)]
    with inject_oom(nth=1), pytest.raises(oomkit.OomkitError, match="deque"):
        step(deque(rows))
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def test_an_argument_with_a_graph_of_its_own_is_no_such_batch() -> None:
    """A backward may have gone through it already."""
    program, encoder = Program(), _net()
    x = _rows(torch.Generator().manual_seed(SEED))

    @oomkit.auto_batch
    def step(h: torch.Tensor, y: torch.Tensor) -> float:
        return program._train(F.mse_loss(program.model(h).flatten(), y))

    hidden = encoder(x)
    with inject_oom(nth=1, phase="backward"), pytest.raises(oomkit.OomkitError, match="flattened"):
        step(hidden, x.flatten())
    assert all(p.grad is None for p in encoder.parameters())


@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("option", [{"ladder": ()}, {"accumulation_steps": 2}])
def test_what_was_asked_for_is_refused(kind: str, option: dict[str, Any]) -> None:
    program = Program()
    called = oomkit.auto_batch(getattr(program, kind), **option)
    before = program.state()
    call = next(_calls(kind, program, called))
    with inject_oom(nth=1), pytest.raises(oomkit.OomkitError, match="auto_batch"):
        call()
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)


def test_the_figures_of_a_batch_that_is_not_found() -> None:
    _, _, records = _trained("on_self", 1, nth=1, phase="forward")
    assert [r.batch_size for r in records] == [None] * CALLS
    assert [r.ooms for r in records] == [0, 1, 0]
    assert records[1].reason == "refused"


def _allocated() -> int:
    gc.collect()
    return oomkit.memory("cpu").allocated or 0


def test_one_that_does_not_fit_trains_on_a_rung_and_is_refused_where_none_has_room() -> None:
    """Later calls begin on that rung. Where there is no room the refusal is raised."""
    program, plain = Program(16, 8), Program(16, 8)
    program.batch = plain.batch = torch.randn(256, 16).double()
    saved = 8 * 3 * program.batch.nbytes
    for each in (program, plain):  # the state of AdamW is there
        torch.manual_seed(SEED)
        each.on_self()
    step = oomkit.auto_batch(program.on_self)
    oomkit.limit_memory(_allocated() + saved // 2, device="cpu")
    try:
        torch.manual_seed(SEED)
        losses = [step() for _ in range(3)]
    finally:
        oomkit.limit_memory(None, device="cpu")
    torch.manual_seed(SEED)
    assert losses == [plain.on_self() for _ in range(3)]
    first, *later = step.records
    activations = 3
    assert first.ooms > 0 and first.rung == activations
    assert [(r.ooms, r.rung) for r in later] == [(0, activations)] * 2
    before = program.state()
    oomkit.limit_memory(_allocated() + 64, device="cpu")
    try:
        with pytest.raises(oomkit.OutOfMemory, match="found no batch to split"):
            step()
    finally:
        oomkit.limit_memory(None, device="cpu")
    torch.testing.assert_close(program.state(), before, rtol=0, atol=0)
