"""What is true of each rung, shown with the demo's GPT: said once, remembered, left again, nothing
held; each allocation fails once and for good, and what comes out is a plain run of the same slices,
bit for bit. And every optimizer with its state on the host."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sample import WHOLE, sampled
from helpers.seeds import seed_all
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import oomkit
from ladder.optimizers import CONFIGS, Config, same
from ladder.optimizers import Program as Five
from ladder.programs import allocated
from oomkit.testing import force_slices, inject_oom

pytestmark = pytest.mark.filterwarnings("ignore")

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "gpt.py"
ROWS = 4
PHASES = ("forward", "backward", "optimizer", "recovery")


@cache
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo_gpt", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_gpt"] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module


@cache
def scale(name: str) -> Any:
    """Short rows where the update is what does not fit."""
    return demo().Scale(3, 32, heads=2, context=8 if name == "update" else 32, batch=ROWS)


@cache
def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found: list[Any] = list(demo().batches(scale(name), 3, 1, torch.device("cpu")))
    return found


class Program:
    """The demo's step, with the ladder of a rung unless another is given."""

    def __init__(self, name: str, **options: Any) -> None:
        seed_all(1)
        options = {**LADDERS[name], **options}
        self.model = demo().GPT(scale(name))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        model, optimizer = self.model, self.optimizer

        @oomkit.auto_batch(label="demo", **options)
        def step(batch: Any) -> float:
            tokens, targets = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        self.step = step

    def picture(self) -> list[Any]:
        """In numpy's memory, which no budget counts."""
        found = [p.detach().numpy().copy() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [v.numpy().copy() for v in state.values() if isinstance(v, torch.Tensor)]
        return found

    @property
    def slices(self) -> tuple[int, ...]:
        count = self.step.records[-1].accumulation_steps
        return tuple(ROWS // count + (i < ROWS % count) for i in range(count))


def equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all((x == y).all() for x, y in zip(a, b, strict=True))


@contextmanager
def room(size: int) -> Iterator[None]:
    gc.collect()
    with oomkit.limit_memory(allocated() + size, device="cpu"):
        yield


class Heap(ctypes.Structure):
    """What mallinfo2() says."""

    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]


def host_bytes() -> int:
    """In use in the host's heap, whoever has them: what is moved there is not counted otherwise."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2()")
    libc.mallinfo2.restype = Heap
    heap = libc.mallinfo2()
    return int(heap.field_4 + heap.field_7)  # mapped and in use


LADDERS: dict[str, dict[str, Any]] = {
    "split": {"ladder": ()},
    "update": {"ladder": ("update",)},
    "state": {"ladder": ("update", "state")},
    "activations": {"ladder": ("update", "activations")},
    "recompute": {"ladder": ("update", "recompute")},
    "gradients": {"ladder": ("update", "state", "gradients")},
}
RUNGS = dict(zip(LADDERS, range(6), strict=True))
CLIMBED = list(LADDERS)[1:]


@cache
def rooms(name: str) -> int:
    """Bytes beside the program that two steps on this rung need, and a little."""
    low, high = 0, 1 << 24
    while high - low > 8192:
        middle = (low + high) // 2
        program = Program(name, verify=False)
        try:
            with room(middle):
                program.step(batches(name)[0])
                program.step(batches(name)[1])
            high = middle
        except (torch.OutOfMemoryError, oomkit.PartialUpdate):  # the latter without a ladder
            low = middle
        del program
    return high + 8192


@cache
def plain(name: str, *plans: tuple[int, ...]) -> list[Any]:
    """What a run of these slices, a call each, ends with."""
    program = Program(name, ladder=(), verify=False)
    for batch, slices in zip(batches(name), plans, strict=False):
        with force_slices(list(slices)):
            program.step(batch)
    return program.picture()


def faulted(name: str, phase: str, nth: int, times: int | None) -> tuple[Program, Any, Any]:
    """The third of three steps has the fault: what the program was before, the fault."""
    program = Program(name, verify=False)
    plans, ended = [], None
    with room(rooms(name)):
        for batch in batches(name)[:2]:
            program.step(batch)
            plans.append(program.slices)
        with inject_oom(nth=nth, times=times, phase=phase) as fault:
            try:
                program.step(batches(name)[2])
            except oomkit.OutOfMemory as error:
                ended = error.with_traceback(None)
    if ended is None:
        plans.append(program.slices)
    else:
        assert times is None or phase == "recovery", (name, phase, nth, str(ended))
        assert not ended.committed, (name, phase, nth)
    assert equal(program.picture(), plain(name, *plans)), (name, phase, nth, plans)
    return program, fault, ended


@pytest.mark.parametrize("name", sampled([*LADDERS], 3, "stands"))
def test_the_demos_gpt_stands_on_the_rung(name: str) -> None:
    program, _, _ = faulted(name, "forward", 10**9, 1)
    assert [r.rung for r in program.step.records][1:] == [RUNGS[name]] * 2


def test_none_is_climbed_where_micro_batches_alone_fit() -> None:
    """In the smallest room of those that know no ladder, and all are allowed."""
    program = Program("split", ladder="auto")
    with room(rooms("split")):
        for batch in batches("split") * 2:
            program.step(batch)
    assert {r.rung for r in program.step.records} == {0}
    assert len(program.slices) > 1


COSTS = {
    "update": "updates run in parts, which needs host copies and more calls of step()",
    "state": "the optimizer's state is kept in host memory and moved in each update",
    "activations": "what autograd saves is kept in host memory and moved in each backward",
    "recompute": "modules run their forward twice",
    "gradients": "gradients accumulate in host memory, where each is moved in each backward",
}


@pytest.mark.parametrize("name", CLIMBED)
def test_it_is_said_once_with_what_it_costs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    size = rooms(name)
    caplog.clear()
    program = Program(name)
    with room(size):
        for batch in batches(name) * 3:
            program.step(batch)
    assert program.step.records[-1].rung == RUNGS[name]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    said = f"demo needs more than smaller micro-batches: rung={name}, {COSTS[name]}"
    assert sum(line.startswith(said) for line in lines) == 1
    if name in ("activations", "recompute", "gradients"):
        assert any(f"rung={name} reason=climbed" in line for line in lines)
    told = str(oomkit.report(program.step))
    assert f"(rung {RUNGS[name]})" in told


@pytest.mark.parametrize("name", CLIMBED)
def test_it_is_remembered(name: str) -> None:
    """A run that goes on from a checkpoint begins where the one before has ended."""
    program = Program(name)
    gc.collect()
    total = allocated() + rooms(name)
    with oomkit.limit_memory(total, device="cpu"):
        for batch in batches(name):
            program.step(batch)
    known = program.step.state_dict()
    if name not in ("activations", "recompute"):  # there it is the forward that climbs
        climbed = min(RUNGS[name], RUNGS["state"])
        assert [entry["update_rung"] for entry in known["signatures"]] == [climbed]
    kept = pickle.dumps((known, program.optimizer.state_dict()))
    slices = program.slices
    del program
    program = Program(name)
    known, state = pickle.loads(kept)
    program.step.load_state_dict(known)
    if name in ("activations", "recompute"):  # on the others it has no room
        for values in state["state"].values():  # what pickle makes is not counted
            values.update({key: value.clone() for key, value in values.items()})
        program.optimizer.load_state_dict(state)
    del state
    gc.collect()
    with oomkit.limit_memory(total, device="cpu"):
        program.step(batches(name)[0])
    record = program.step.records[-1]
    assert (record.attempts, record.ooms, record.rung) == (1, 0, RUNGS[name])
    assert program.slices == slices


@pytest.mark.parametrize("name", CLIMBED)
def test_it_is_left_when_there_is_room_again(name: str) -> None:
    program = Program(name)
    with room(rooms(name)):
        for batch in batches(name):
            program.step(batch)
    assert program.step.records[-1].rung == RUNGS[name]
    with room(1 << 26):
        for batch in batches(name) * 4:
            program.step(batch)
    assert program.step.records[-1].rung == 0
    assert len(program.slices) == 1


@pytest.mark.parametrize("name", sampled(CLIMBED, 2, "calls"))
def test_a_thousand_calls_hold_nothing_more(name: str) -> None:
    program = Program(name)
    with room(rooms(name)):
        for batch in batches(name) * 4:
            program.step(batch)
        gc.collect()
        counted, objects = allocated(), len(gc.get_objects())
        host = host_bytes()
        for i in range(1000 if WHOLE else 30):
            program.step(batches(name)[i % 3])
        gc.collect()
        assert program.step.records[-1].rung == RUNGS[name]
        assert allocated() == counted
        assert abs(len(gc.get_objects()) - objects) < 50
        assert host_bytes() <= host + (1 << 20)


FAULTS = list(itertools.product(CLIMBED, PHASES, (1, None)))


@pytest.mark.parametrize(
    ("name", "phase", "times"),
    sampled(FAULTS, 10, "faults", kind=lambda case: case[0]),
    ids=lambda of: {1: "once", None: "for good"}.get(of, of),
)
def test_the_demos_gpt(name: str, phase: str, times: int | None) -> None:
    seen = faulted(name, phase, 10**9, 1)[1].seen
    ended = 0
    for nth in sampled(range(1, seen + 1), 2):
        _, fault, error = faulted(name, phase, nth, times)
        assert fault.fired > 0, nth
        ended += error is not None
    # oomkit's own memory: where it lacks, less is moved.
    assert ended > 0 or times == 1 or phase == "recovery" or not seen


# --- every optimizer, its state on the host ---

WIDE = 160  # so that a parameter's state is not so small that it stays
BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(11 + i)) for i in range(3)]


def hosted(config: Config) -> tuple[Five, Any, int]:
    """Two calls, in the second of which parts were halved until state had to go; the faults."""
    program = Five(config, width=WIDE)
    step = oomkit.auto_batch(
        optimizer=program.optimizer, batch="x", optimizer_safety="parts"
    )(lambda x: program.step(x))  # fmt: skip
    step(BATCHES[0])
    with inject_oom(nth=1, times=4, phase="optimizer") as fault:
        step(BATCHES[1])
    return program, step, fault.fired


@cache
def pictures(config: str) -> list[Any]:
    program = Five(next(c for c in CONFIGS if str(c) == config), width=WIDE)
    return [(program.step(x), program.picture())[1] for x in BATCHES]


def has_state(config: Config) -> bool:
    """Adafactor's is some rows and columns: it stays."""
    # Not kept: modules are imported with more threads than tests run with, and round otherwise.
    values = [v for s in pictures.__wrapped__(str(config))[1]["state"] for v in s.values()]
    return any(torch.is_tensor(v) and v.nbytes >= 4096 for v in values)


STATEFUL = [c for c in CONFIGS if has_state(c)]


HOSTED = list(itertools.product(STATEFUL, ["optimizer", "recovery"]))


@pytest.mark.parametrize(
    ("config", "phase"),
    sampled(HOSTED, len(STATEFUL), "hosted", kind=lambda case: str(case[0])),
    ids=str,
)
def test_state_on_the_host(config: Config, phase: str) -> None:
    expected = pictures(str(config))
    _, step, fired = hosted(config)
    if fired == 0:
        return  # its update allocates nothing: it cannot run out of memory
    with inject_oom(nth=10**9, phase=phase) as fault:
        step(BATCHES[2])
    assert step.records[-1].rung == 2
    cases: list[tuple[int, int | None]] = [
        (nth, times) for nth in range(1, fault.seen + 1) for times in (1, None)
    ]
    for nth, times in sampled(cases, 4):
        program, step, _ = hosted(config)
        with inject_oom(nth=nth, times=times, phase=phase) as fault:
            try:
                step(BATCHES[2])
                picture = expected[2]
            except oomkit.OutOfMemory as error:
                # oomkit's own memory: the call is not run, and can be made again
                assert times is None or phase == "recovery", (nth, error)
                assert not error.committed, nth
                picture = expected[1]
        assert fault.fired > 0, nth
        now = program.picture()
        for what in ("params", "state", "groups"):
            assert same(now[what], picture[what]), (nth, times, what)
