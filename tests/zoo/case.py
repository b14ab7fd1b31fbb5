"""The dimensions of a fault beside its place, and one run of a model under them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from helpers.seeds import seed_all
from prove.pairwise import pairwise
from torch.nn.utils import clip_grad_norm_

import oomkit
from oomkit.testing import force_slices, inject_oom

from .base import SEED
from .model import ROWS, Model

CALLS = 2
NEVER = 2**60

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "form": (),  # those of the model
    # "again": in each replay until the micro-batch is a quarter; "always": no size helps.
    "times": ("once", "again", "always"),
    "threads": (1, 2),
    # Gradients at entry: none; some, with copies of them; some in fp64, without copies.
    "gradients": ("absent", "copy", "off"),
    "k": (1, 3),
    "call": (0, 1),
}


def equal(rows: int, k: int) -> list[int]:
    return [rows // k + (i < rows % k) for i in range(k)]


@dataclass(frozen=True)
class Case:
    form: str = "step"
    times: str = "once"
    threads: int = 1
    gradients: str = "absent"
    k: int = 1
    call: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.gradients == "off" else torch.float32

    @property
    def scaled(self) -> bool:
        return self.form.startswith("scaled")

    @property
    def returned(self) -> bool:
        """The caller runs backward."""
        return self.form.endswith("returned")

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in asdict(self).items())


def cases_of(model: Model) -> list[Case]:
    """The plain case in the first form, one where gradients are set aside, the pairwise ones."""
    given = [Case(form=model.forms[0])]
    if "gradients=off" not in model.without:
        given.append(replace(given[0], gradients="off"))
    dimensions = {
        key: [v for v in values if f"{key}={v}" not in model.without]
        for key, values in {**DIMENSIONS, "form": tuple(model.forms)}.items()
    }
    seed = SEED + zlib.crc32(model.name.encode())
    return [Case(**c) for c in pairwise(dimensions, seed, given=[asdict(c) for c in given])]


@dataclass(frozen=True)
class Place:
    """The n-th allocation of a phase in the struck call."""

    phase: str
    nth: int


@dataclass
class Run:
    states: list[dict[str, Any]] = field(default_factory=list)
    """Before the first call and after each, as bytes."""
    error: BaseException | None = None
    text: str = ""
    seen: int = 0
    fired: int = 0
    ooms: int = 0
    slices: dict[int, list[int]] = field(default_factory=dict)
    """Of the calls that were split."""
    middle: dict[str, Any] | None = None
    """Between the struck call, which returned its loss, and the caller's backward."""
    whole: bool = True
    """Nothing had failed until then."""
    foreign: list[str] = field(default_factory=list)


def snapshot(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, loss: Any
) -> dict[str, Any]:
    state: dict[str, Any] = {"loss": _bytes(loss), "rng": _bytes(torch.get_rng_state())}
    for name, p in model.named_parameters():
        state[f"parameter {name}"] = _bytes(p)
        state[f"gradient {name}"] = _bytes(p.grad)
    for name, b in model.named_buffers():
        state[f"buffer {name}"] = _bytes(b)
    for i, entries in enumerate(optimizer.state.values()):
        for key, value in entries.items():
            state[f"optimizer {i}.{key}"] = _bytes(value)
    if scaler is not None:
        state["scaler"] = repr(scaler.state_dict())
    return state


def _bytes(value: Any) -> Any:
    """The dtype, shape and bits of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout == torch.sparse_coo:
        # How the parts of a sum are ordered is no part of its value.
        value = value.detach().coalesce()
        return "sparse", _bytes(value.indices()), _bytes(value.values())
    value = value.detach().contiguous().reshape(-1)
    return str(value.dtype), tuple(value.shape), value.view(torch.uint8).numpy().tobytes()


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    model: Model,
    case: Case,
    place: Place | None = None,
    count: str | None = None,
    slices: dict[int, list[int]] | None = None,
) -> Run:
    """Two calls; the fault strikes in the one of `case`. With `slices`: undisturbed, over them."""
    seed_all(SEED)
    with threads(case.threads), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = _Runner(model, case, place, count, slices or {}).run()
    done.foreign = [
        f"{w.category.__name__}: {w.message}"
        for w in caught
        if not issubclass(w.category, oomkit.OomkitWarning)
        # What fails while it is traced is told at length.
        and not (model.compiled and "Error detected in" in str(w.message))
    ]
    return done


_compiled: dict[str, tuple[Any, dict[str, torch.Tensor], torch.Tensor]] = {}


def compiled_model(spec: Model, dtype: torch.dtype) -> Any:
    """As newly made. One module for all runs, but where compiling is what is struck."""
    if spec.places is not None:
        torch.compiler.reset()
        return torch.compile(spec.make(dtype), backend=spec.compiled, dynamic=True)
    if spec.name not in _compiled:
        model = spec.make(dtype)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        stream = torch.get_rng_state()
        module = torch.compile(model, backend=spec.compiled, dynamic=True)
        batch = spec.batch(dtype)
        for rows in (ROWS, ROWS // 2, 1):
            spec.loss(module, {key: value[:rows] for key, value in batch.items()}).backward()
        _compiled[spec.name] = module, state, stream
    module, state, stream = _compiled[spec.name]
    module._orig_mod.load_state_dict(state)
    module.zero_grad()
    torch.set_rng_state(stream)
    return module


class _Runner:
    def __init__(
        self,
        model: Model,
        case: Case,
        place: Place | None,
        count: str | None,
        slices: dict[int, list[int]],
    ) -> None:
        self.spec, self.case, self.place, self.count = model, case, place, count
        self.slices = slices
        self.model = compiled_model(model, case.dtype) if model.compiled else model.make(case.dtype)
        self.optimizer = model.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if case.scaled else None
        self.batches = [model.batch(case.dtype) for _ in range(CALLS)]
        if case.gradients != "absent":
            for p in self.model.parameters():
                if p.requires_grad:
                    p.grad = torch.randn_like(p)
        self.armed: inject_oom | None = None
        self.done = Run()

    def run(self) -> Run:
        step = self.decorate()
        self.done.states.append(self.state(None))
        for i, batch in enumerate(self.batches):
            try:
                with ExitStack() as stack:
                    if i in self.slices:
                        stack.enter_context(force_slices(self.slices[i]))
                    # One for both halves of a returned loss: a count goes on in the second.
                    stack.enter_context(self.fault(i, "backward"))
                    loss = self.call(step, batch, i)
            except Exception as error:
                notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
                self.done.error, self.done.text = error, f"{error}{notes}"
                loss = None
            else:
                self.update()
            self.note(step, i)
            self.done.states.append(self.state(loss))
            if self.done.error is not None:
                break
        return self.done

    def state(self, loss: Any) -> dict[str, Any]:
        return snapshot(self.model, self.optimizer, self.scaler, loss)

    @contextmanager
    def fault(self, call: int, *phases: str) -> Iterator[None]:
        """Armed in the struck call, for places of these phases."""
        times = {"once": 1, "again": 2, "always": None}[self.case.times]
        phase = self.count if self.place is None else self.place.phase
        if call != self.case.call or phase not in phases:
            yield
            return
        nth = NEVER if self.place is None else self.place.nth
        armed = inject_oom(nth=nth, times=times, phase=phase)
        self.armed = armed
        try:
            with armed:
                yield
        finally:
            self.done.seen, self.done.fired = armed.seen, armed.fired

    def note(self, step: Any, call: int) -> None:
        """The slices of a call that was split, as its record has them."""
        if len(step.records) <= call:
            return
        record = step.records[call]
        rows, k = record.batch_size, record.accumulation_steps
        if k > 1:
            assert rows == ROWS
            self.done.slices[call] = equal(rows, k)
            if max(self.done.slices[call]) != record.micro_batch_size:
                first = record.micro_batch_size  # a larger one saves a micro-batch
                self.done.slices[call] = [first, *equal(rows - first, k - 1)]
        if call == self.case.call:
            self.done.ooms = record.ooms

    def decorate(self) -> Any:
        case = self.case
        options = dict(self.spec.options, accumulation_steps=case.k)
        if case.gradients != "absent":
            options["gradient_safety"] = case.gradients
        if case.form == "backward":
            options["backward"] = True
        return oomkit.auto_batch(self.function(), **options)

    def function(self) -> Callable[[Any], Any]:
        model, optimizer, scaler, loss_of = (
            self.model,
            self.optimizer,
            self.scaler,
            self.spec.loss,
        )
        fresh, clip = self.case.gradients == "absent", self.spec.clip

        def loss_only(batch: Any) -> torch.Tensor:
            return loss_of(model, batch)

        def whole(batch: Any) -> torch.Tensor:
            if fresh:
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if clip:
                clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        def whole_scaled(batch: Any) -> torch.Tensor:
            if fresh:
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return {"step": whole, "scaled": whole_scaled}.get(self.case.form, loss_only)

    def call(self, step: Any, batch: Any, number: int) -> Any:
        """As a user's loop has it. What the caller itself allocates is not ours to protect."""
        if self.case.gradients == "absent" and self.case.form not in ("step", "scaled"):
            self.optimizer.zero_grad()
        with self.fault(number, "forward"):
            loss = step(batch)
        if self.case.returned and number == self.case.call:
            self.done.whole = self.armed is None or self.armed.fired == 0
            self.done.middle = self.state(None)
        if self.case.form == "returned":
            loss.backward()
        elif self.case.form == "scaled-returned":
            self.scaler.scale(loss).backward()
        return loss

    def update(self) -> None:
        """What the caller does where the step does not."""
        if self.case.form in ("step", "scaled"):
            return
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
