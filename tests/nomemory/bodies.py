"""Every body: all but `imports` need torch imported, and oomkit."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

from .body import Body, Plain
from .kept import Remembering, Reserving, checkpoint, searching, trials
from .recovery import Recovery


class Imports(Body):
    """`import oomkit` where torch is imported already."""

    name = "import oomkit"
    loaded = False
    total = 50_000
    rarer = 10  # without any memory, importlib is where CPython hangs nearly each time

    def prepare(self) -> None:
        import torch._dynamo  # torch.optim imports it at the first update

        torch.set_num_threads(1)  # other threads do not come along into a child

    def call(self) -> Any:
        return importlib.import_module("oomkit")

    def after(self, outcome: Any, box: list[Any]) -> None:
        box.clear()
        # The second import is a whole one, and what it gives works.
        import torch

        import oomkit

        @oomkit.auto_batch
        def step(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        from oomkit.testing import inject_oom

        ones = torch.ones(4)
        with inject_oom():
            result = step(ones)
        if result.tolist() != [2.0] * 4 or oomkit.memory("cpu").allocated is None:
            outcome.wrong.append(f"the step returns {result}")
        if names := sorted(set(oomkit.__all__) - vars(oomkit).keys()):
            outcome.wrong.append(f"lacks {names}")


def _oomkit(make: Callable[[Any, Any], Callable[[], Any]]) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        import torch

        import oomkit

        warnings.simplefilter("ignore")
        return make(oomkit, torch)

    return prepare


def _decorating(oomkit: Any, torch: Any) -> Callable[[], Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Batch:
        pass

    def function(self: Any, x: Any) -> Any:
        return x

    def decorate() -> Any:
        step = oomkit.auto_batch(
            function,
            batch=("x",),
            static=["x['a']"],
            dim={"x": 1},
            model=[model],
            optimizer=optimizer,
            participants=(optimizer, model),
            weight=len,
            on_retry=len,
            backward=True,
            label="a label",
        )
        plain = oomkit.auto_batch(accumulation_steps=2)(function)
        other = oomkit.auto_batch(model)
        static = oomkit.auto_batch(staticmethod(function))
        bound = step.__get__(optimizer)
        copies = copy.copy(plain), copy.deepcopy(other)
        oomkit.register_splitter(Batch, split=function, size=len)
        return [repr(type(x)) for x in (step, plain, other, static, bound, *copies)], step.label

    return decorate


def _errors(oomkit: Any, torch: Any) -> Callable[[], Any]:
    kinds = (oomkit.OutOfMemory, oomkit.PartialUpdate, oomkit.SplitError, oomkit.OomkitError)

    def construct() -> Any:
        made = [kind("text") for kind in kinds]
        again = pickle.loads(pickle.dumps(made))
        return [str(e) for e in again], made[0].committed, made[0].report

    return construct


def _classifying(oomkit: Any, torch: Any) -> Callable[[], Any]:
    class Wrapper(Exception):
        __module__ = "torch._dynamo.exc"

    inner = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    outer = Wrapper("x")
    outer.inner_exception = inner  # type: ignore[attr-defined]
    errors = (
        inner,
        outer,
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        ExceptionGroup("g", [inner, ValueError()]),
        ValueError("no"),
    )
    return lambda: [(oomkit.classify(e), oomkit.is_oom_error(e)) for e in errors]


def _guarding(oomkit: Any, torch: Any) -> Callable[[], Any]:
    from oomkit.testing import inject_oom

    def function(x: Any) -> float:
        return float((x + 1).sum())

    ones = torch.ones(3)

    def use() -> Any:
        guard = oomkit.guard(on_oom="skip", label="g")
        with guard, inject_oom():
            torch.empty(5)
        guarded = oomkit.guard(label="f")(function)
        value = guarded(ones)
        record = guard.records[-1]
        return record.ooms, record.outcome, record.label, value, repr(type(guarded))

    return use


def _figures(oomkit: Any, torch: Any) -> Callable[[], Any]:
    def use() -> Any:
        # `with` itself allocates between the call and the entry: that limit is not taken back.
        oomkit.limit_memory(None, device="cpu")
        with oomkit.limit_memory("1GB", device="cpu") as limit:
            info = oomkit.memory("cpu")
        oomkit.cleanup()
        oomkit.max_memory_allocated("cpu")
        return limit.budget, info.budget, oomkit.memory("cpu").budget, oomkit.current().count

    return use


def _reporting(oomkit: Any, torch: Any) -> Callable[[], Any]:
    with oomkit.guard(label="g") as guard:
        torch.empty(3)
    step = oomkit.auto_batch(lambda x: x.sum(), label="s")
    step(torch.ones(3))

    def use() -> Any:
        text = [oomkit.report([guard, step], format=kind) for kind in ("text", "json")]
        return len(text), [type(r).__name__ for r in step.records], step.records[0].batch_size

    return use


def _whole(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """The healthy call of a new step: finds its participants, and takes them apart.

    Memory that lacks in torch may split it: samples are apart, and rounding is left out.
    """

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.seen.add_(1)
            return x

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), Counting())
    x = {"x": [torch.randn(4, 3), 1], "y": (torch.ones(4), "text")}

    def use() -> Any:
        model[0].weight.grad = None  # zero_grad() leaves Python for torch._dynamo and back
        step = oomkit.auto_batch(
            lambda batch: model(batch["x"][0]).pow(2).sum().backward(), reduction="sum"
        )
        step(x)
        rows = model[0].weight.grad.tolist()
        return [[round(v, 3) for v in row] for row in rows], step.records[-1].batch_size

    return use


def _contrasting(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """A step whose split is refused, and whose whole batch runs again."""
    from oomkit.testing import inject_oom

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    x = torch.arange(24.0).reshape(8, 3) / 24

    class Trainer:
        def __init__(self) -> None:
            self.n, self.model = 0, copy.deepcopy(model)

        def step(self, x: Any) -> None:
            self.n += 1
            self.model.zero_grad()
            z = self.model(x)
            (z @ z.t()).pow(2).mean().backward()

    def use() -> Any:
        trainer = Trainer()
        try:
            with inject_oom(nth=2, phase="backward"):
                oomkit.auto_batch(trainer.step)(x)
        except oomkit.SplitError as refusal:  # it stands where there is no memory to see more
            if trainer.n != 0 or any(p.grad is not None for p in trainer.model.parameters()):
                raise AssertionError("the state is not that of the entry") from refusal
            raise MemoryError from refusal
        return [trainer.n, *(p.grad.tolist() for p in trainer.model.parameters())]

    return use


def _uncut(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """Two networks in turn on a batch that is not among the arguments, which runs again whole."""
    from oomkit.testing import inject_oom

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)

    class Trainer:
        def __init__(self) -> None:
            self.n, self.one, self.two = 0, copy.deepcopy(model), copy.deepcopy(model)
            self.batch = torch.arange(24.0).reshape(8, 3) / 24

        def step(self) -> None:
            self.n += 1
            self.one.zero_grad()
            self.one(self.batch).pow(2).mean().backward()
            self.two.zero_grad()
            self.two(self.batch * self.n).pow(2).mean().backward()

    def use() -> Any:
        trainer = Trainer()
        with inject_oom(nth=2, phase="backward"):
            oomkit.auto_batch(trainer.step)()
        nets = (trainer.one, trainer.two)
        return [trainer.n, *(p.grad.tolist() for net in nets for p in net.parameters())]

    return use


def _averaging(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """A split step with a count, and averages of the weights in tensors and in a module."""
    from oomkit.testing import inject_oom

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    x, y = torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 2)

    class Trainer:
        def __init__(self) -> None:
            self.n = 0
            self.model, self.average = copy.deepcopy(model), copy.deepcopy(model)
            self.shadow = {"w": torch.zeros(2, 3)}

        def step(self, x: Any, y: Any) -> None:
            self.n += 1
            self.model.zero_grad()
            (self.model(x) - y).pow(2).mean().backward()
            with torch.no_grad():
                for a, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    a.mul_(0.5).add_(p, alpha=self.n)
                self.shadow["w"] = 0.5 * self.shadow["w"] + self.model.weight

    def use() -> Any:
        trainer = Trainer()
        step = oomkit.auto_batch(trainer.step)
        with inject_oom(nth=2, phase="backward"):
            step(x, y)
        made = [trainer.average.weight, trainer.shadow["w"], trainer.model.weight.grad]
        return trainer.n, [[[round(v, 3) for v in row] for row in t.tolist()] for t in made]

    return use


def _clearing(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """A split step that clears the gradients of an earlier call, in place, in each micro-batch."""
    from oomkit.testing import inject_oom

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
            p.grad = torch.full_like(p, 9.0)
    x, y = torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 2)

    def use() -> Any:
        trained = copy.deepcopy(model)

        @oomkit.auto_batch
        def step(x: Any, y: Any) -> None:
            trained.zero_grad(set_to_none=False)
            (trained(x) - y).pow(2).mean().backward()

        with inject_oom(nth=2, phase="backward"):
            step(x, y)
        rows = trained.weight.grad.tolist()
        return type(trained.weight.grad).__name__, [[round(v, 3) for v in row] for row in rows]

    return use


def _looping(oomkit: Any, torch: Any) -> Callable[[], Any]:
    from oomkit.testing import inject_oom

    x = torch.arange(8.0).reshape(4, 2)

    @oomkit.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    def use() -> Any:
        parts = []
        with inject_oom():
            for part in oomkit.chunks(x, label="loop", micro_batch=4):
                with oomkit.guard():
                    parts.append((part + 1).tolist())
        joined = [row for part in parts for row in part]
        with inject_oom():
            doubled = oomkit.map(lambda rows: rows * 2, x)
        return joined, doubled.tolist(), train() <= 2

    return use


PLAIN = {
    "decorating": _decorating,
    "errors": _errors,
    "classifying": _classifying,
    "guarding": _guarding,
    "figures": _figures,
    "reporting": _reporting,
    "a healthy call": _whole,
    "averaging": _averaging,
    "contrasting": _contrasting,
    "clearing": _clearing,
    "uncut": _uncut,
    "loops": _looping,
    "sizes in a checkpoint": checkpoint,
    "trials": trials,
    "searching": searching,
}

RARER = {
    "guarding": 3,
    "a healthy call": 3,
    "averaging": 3,
    "contrasting": 3,
    "clearing": 3,
    "uncut": 3,
    "loops": 2,
    "trials": 3,
}
"""Of those that import something: each time that CPython hangs there costs FAULTY.cpu."""

BODIES: list[Body] = [
    Imports(),
    *(Plain(name, _oomkit(make), RARER.get(name, 1)) for name, make in PLAIN.items()),
    Remembering(_oomkit),
    Reserving(_oomkit),
    Recovery("inside"),
    Recovery("inside", warm=True),
    Recovery("inside", phase="forward", warm=True, gradients=True),
    Recovery("inside", phase="optimizer", warm=True),
    Recovery("inside", warm=True, nested=True),
    Recovery("inside", phase="forward", warm=True, hooked=True),
    Recovery("returned", "back", warm=True),
    Recovery("rows", "back", warm=True),
    Recovery("eager", "back", warm=True),
    Recovery("eager", "call", "forward", warm=True),
    Recovery("deferred", "back", warm=True),
    Recovery("evaluation", phase="forward", warm=True),
]
