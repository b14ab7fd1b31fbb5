"""A training program with something of everything that a recovery puts back, in every form
that a step can have, and the judgement of what a disturbed step left behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import oomkit
from helpers.seeds import seed_all
from oomkit import _C
from oomkit.testing import force_slices

SEED = 20240607
BATCH = 8
FORMS = ("inside", "flag", "returned", "rows", "eager", "deferred", "evaluation")

Disturbance = AbstractContextManager[Any]


class Counter:
    """A participant of the user's own, put back by Python code."""

    def __init__(self) -> None:
        self.value = 0.0
        self.seen: list[float] = []

    def add(self, amount: float) -> None:
        self.value += amount
        self.seen.append(amount)

    def save(self) -> dict[str, Any]:
        return {"value": self.value, "seen": list(self.seen)}

    def restore(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.seen = list(state["seen"])


def _equal(rows: int, count: int) -> tuple[int, ...]:
    size, rest = divmod(rows, count)
    return (size + 1,) * rest + (size,) * (count - rest)


class World:
    """One program. Everything is seeded: two of the same form are equal, bit for bit."""

    def __init__(
        self,
        form: str,
        *,
        gradients: bool = False,
        warm: bool = False,
        hook: bool = True,
        nested: bool = False,
        hooked: bool = False,
    ) -> None:
        """`nested`: the batch is one argument, in containers of several kinds. `hooked`: the step
        registers a hook, and removes it."""
        seed_all(SEED)
        self.form, self.nested, self.hooked = form, nested, hooked
        self.net = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)
        )
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sched = LambdaLR(self.opt, lambda epoch: 1.0 / (1 + epoch))
        self.counter = Counter()
        self.batches: list[tuple[Any, ...]] = [
            (torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))) for _ in range(2)
        ]
        if nested:
            self.batches = [(_nested(*batch),) for batch in self.batches]
        self.retries: list[int] = []
        self.begins: list[Any] = []
        self.hook = hook
        self.step = self._decorate(gradients)
        if warm:
            self.run(1)
        for p in self.net.parameters():
            p.grad = torch.full_like(p, 0.25) if gradients else None

    def _forward(self, x: torch.Tensor, y: torch.Tensor, how: str = "mean") -> torch.Tensor:
        self.counter.add(float(len(x)))
        if not self.hooked:
            return F.cross_entropy(self.net(x), y, reduction=how)
        handle = self.net[2].register_forward_hook(lambda module, args, out: out * 2)
        loss = F.cross_entropy(self.net(x), y, reduction=how)
        handle.remove()
        return loss

    def _decorate(self, gradients: bool) -> Any:
        whole = self.form == "inside"

        def inside(x: torch.Tensor, y: torch.Tensor) -> float:
            if not gradients:
                self.opt.zero_grad()
            loss = self._forward(x, y)
            loss.backward()
            self.opt.step()
            self.sched.step()
            return loss.item()

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self._forward(x, y)

        def rows_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self._forward(x, y, "none")

        def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.counter.add(float(len(x)))
            with torch.no_grad():
                return self.net(x).softmax(1)

        def unpacked(batch: dict[str, Any]) -> Any:
            return plain(batch["inputs"][0], batch["more"].labels["y"])

        rows = self.form in ("rows", "deferred")
        plain = (
            inside
            if whole
            else evaluate
            if self.form == "evaluation"
            else (rows_of if rows else loss_of)
        )
        return oomkit.auto_batch(
            model=self.net,
            optimizer=self.opt,
            participants=(self.counter,),
            backward=True if self.form == "flag" else None,
            accumulation_steps=2 if self.form in ("eager", "deferred") else 1,
            min_micro_batch=2,  # of one row batch_norm makes nothing
            gradient_safety="copy" if gradients else "auto",
            on_retry=self._on_retry,
            label=self.form,
        )(unpacked if self.nested else plain)

    def _on_retry(self, record: Any) -> None:
        self.retries.append(record.accumulation_steps)
        if self.hook:
            torch.empty(3)  # an allocation in the user's hook

    @property
    def second(self) -> bool:
        """Does the caller run backward?"""
        return self.form in ("returned", "rows", "eager", "deferred")

    def parts(self) -> tuple[str, ...]:
        return ("call", "back") if self.second else ("call",)

    def run(self, batch: int = 0, disturb: Disturbance | None = None, part: str = "call") -> Any:
        """The call and its caller's backward; `disturb` is around one of them."""
        quiet_part = nullcontext()
        self.begins = [self.state()]
        with disturb if disturb is not None and part == "call" else quiet_part:
            result = self.step(*self.batches[batch])
        if self.second:
            self.begins.append(self.state())
            loss = result.mean() if result.ndim else result
            with disturb if disturb is not None and part == "back" else quiet_part:
                loss.backward()
        return result.detach().numpy().copy() if isinstance(result, torch.Tensor) else result

    def plan(self) -> tuple[int, ...]:
        """The slices that the last call ended with."""
        if self.form == "evaluation":  # keeps what is done: the parts need not be equal
            done = self.counter.seen[len(self.begins[-1]["counter"]["seen"]) :]
            return tuple(int(rows) for rows in done)
        record = self.step.records[-1]
        count, first = record.accumulation_steps, record.micro_batch_size
        if count == 1 or first == -(-BATCH // count):
            return _equal(BATCH, count)
        return (first, *_equal(BATCH - first, count - 1))  # a larger one saves one

    def state(self) -> dict[str, Any]:
        """Everything that a call can change, as values outside of any tensor allocator."""
        return {
            "parameters": [_value(p) for p in self.net.parameters()],
            "gradients": [_value(p.grad) for p in self.net.parameters()],
            "buffers": [_value(b) for b in self.net.buffers()],
            "optimizer": [
                {k: _value(v) for k, v in self.opt.state[p].items()}
                for p in self.net.parameters()
                if p in self.opt.state
            ],
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.opt.param_groups
            ],
            "scheduler": (self.sched.last_epoch, self.sched.get_last_lr()),
            "counter": self.counter.save(),
            "random": _value(torch.get_rng_state()),
            "modes": [m.training for m in self.net.modules()]
            + [p.requires_grad for p in self.net.parameters()],
            "dictionaries": [sorted(vars(o).keys() - {"_opt_called"}) for o in self.objects()],
            "hooks": [
                sum(len(v) for k, v in vars(o).items() if "hook" in k and isinstance(v, dict))
                for o in self.objects()
            ],
            "surroundings": (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                sorted(nn.modules.module._global_forward_pre_hooks),
            ),
        }

    def objects(self) -> list[Any]:
        return [self.opt, self.sched, *self.net.modules()]


def _nested(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    names = [f"row {i}" for i in range(len(y))]
    return {"inputs": (x, "text"), "more": SimpleNamespace(labels={"y": y}, names=names)}


def _value(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    plain = tensor.detach().numpy()
    return (str(plain.dtype), plain.shape, plain.tobytes())


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for k in a for line in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{path}[{i}]")]
    same = a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)
    return [] if same else [path]


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's too, of hooks that raise
        yield


class Judge:
    """What may become of a disturbed run of a form, and the undisturbed ones to compare with."""

    def __init__(self, form: str, **options: Any) -> None:
        self.form = form
        self.options = options
        self._undisturbed: dict[Any, Any] = {}
        # What the call itself does where nothing disturbs it, as a number of slices.
        self.slices = 2 if form in ("eager", "deferred") else 1

    def world(self) -> World:
        torch.set_grad_enabled(True)  # torch's own context managers lose it to an interrupt
        with quiet():
            return World(self.form, **self.options)

    def undisturbed(self, *plans: tuple[int, ...]) -> Any:
        """Result and state after calls of these slices; () is a call that failed."""
        if plans not in self._undisturbed:
            world = self.world()
            results = []
            for number, plan in enumerate(plans):
                with quiet(), force_slices(plan):
                    results.append(world.run(number))
            self._undisturbed[plans] = (results, world.state())
        return self._undisturbed[plans]

    def accumulated(self, plan: tuple[int, ...]) -> Any:
        """A call over the whole batch whose backward was run again: by hand, in plain torch."""
        if ("by hand", plan) not in self._undisturbed:
            results, called = self.undisturbed((BATCH // self.slices,) * self.slices)
            world = self.world()
            x, y = world.batches[0]
            entry = [p.grad for p in world.net.parameters()]
            world.net.zero_grad()
            for rows, labels in zip(x.split(plan), y.split(plan), strict=True):
                each = self.form in ("rows", "deferred")
                how = "none" if each else "mean"
                loss = F.cross_entropy(world.net(rows), labels, reduction=how)
                share = 1 / BATCH if each else len(rows) / BATCH
                loss.backward(torch.full_like(loss, share))
            for p, before in zip(world.net.parameters(), entry, strict=True):
                if before is not None and p.grad is not None:
                    p.grad += before  # once, as from a call that was split before
            state = world.state() | {"counter": called["counter"]}
            self._undisturbed["by hand", plan] = (results, state)
        return self._undisturbed["by hand", plan]

    def judge(
        self, world: World, part: str, result: Any, error: BaseException | None, own: type
    ) -> list[str]:
        """What is wrong with the outcome: nothing, if all is well."""
        wrong = []
        if _C.phase_set(0) != 0:
            wrong.append("the phase is left behind")
        if oomkit.current().count != 1:
            wrong.append("current() is left behind")
        now = world.state()
        before = world.begins[-1]
        for name in ("modes", "dictionaries", "hooks", "surroundings"):
            wrong += differences(before[name], now[name], f"{name} left behind")
        if error is None:
            if part == "back" and len(world.plan()) != self.slices:
                results, state = self.accumulated(world.plan())
            else:
                results, state = self.undisturbed(world.plan())
            wrong += differences(results[-1], result, f"result of {world.plan()}")
            wrong += differences(state, now, f"state after {world.plan()}")
            return wrong
        if isinstance(error, oomkit.PartialUpdate):
            return wrong
        committed = getattr(error, "committed", None)
        if committed:
            return wrong + self._updated(now)
        if isinstance(error, oomkit.OutOfMemory | own):
            if not isinstance(error, oomkit.OutOfMemory) and _says_finished(error):
                return wrong
            if isinstance(error, own) and own not in (KeyboardInterrupt,):
                if world.step.records[-1].ooms == 0:
                    return wrong  # it took the failure's place: as without the decorator
            wrong += differences(before, now, "not as before")
            return wrong + (self._next(world) if len(world.begins) == 1 else [])
        return [*wrong, f"{type(error).__name__} is no answer: {error}"]

    def _updated(self, now: Any) -> list[str]:
        """The update stands: it is one of the batch, by some slices."""
        found = []
        for count in (1, 2, 4, 8):
            _, state = self.undisturbed((BATCH // count,) * count)
            found = [
                line
                for name in ("parameters", "optimizer")
                for line in differences(state[name], now[name], f"update {name}")
            ]
            if not found:
                return []
        return found

    def _next(self, world: World, *before: tuple[int, ...]) -> list[str]:
        """The call after it works, and is exact."""
        try:
            with quiet():
                result = world.run(len(before))
        except BaseException as error:
            return [f"the next call fails: {type(error).__name__}: {error}"]
        results, state = self.undisturbed(*before, world.plan())
        wrong = differences(results[-1], result, f"next result of {world.plan()}")
        return wrong + differences(state, world.state(), f"next state of {world.plan()}")


def _says_finished(error: BaseException) -> bool:
    """Does it say that the update, or all of the step, stands?"""
    return any("do not repeat" in note for note in getattr(error, "__notes__", ()))
