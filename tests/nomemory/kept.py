"""Bodies of what outlives a call: sizes in a file and in a checkpoint, trials of a search."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .body import Plain
from .fault import Outcome

Make = Callable[[Any, Any], Callable[[], Any]]


def _evaluation(oomkit: Any, torch: Any, **options: Any) -> tuple[Any, Any]:
    """A step that learns its sizes without a gradient, and a batch for it."""
    model = torch.nn.Linear(3, 2)

    def evaluate(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    return oomkit.auto_batch(evaluate, **options), torch.ones(4, 3)


class Remembering(Plain):
    """The file of oomkit.sizes: found, written, listed, cleared. Each child begins without."""

    def __init__(self, prepared: Callable[[Make], Callable[[], Callable[[], Any]]]) -> None:
        super().__init__("remembered sizes", prepared(self._make))
        self.folder = Path()

    def _make(self, oomkit: Any, torch: Any) -> Callable[[], Any]:
        from oomkit import sizes
        from oomkit._engine import store as _store
        from oomkit.testing import inject_oom

        # Notes are taken only where there is a limit, and a `with` of one is another body's.
        oomkit.limit_memory("1GB", device="cpu")
        self.folder = Path(tempfile.mkdtemp(prefix="oomkit-nomemory-"))
        os.environ["OOMKIT_CACHE_DIR"] = str(self.folder)

        def use() -> Any:
            sizes.clear()
            before = len(os.listdir("/proc/self/fd"))
            step, x = _evaluation(oomkit, torch, remember=True, label="kept")
            with inject_oom():
                step(x)
            _store.flush()
            # What lacks memory in torch as well is split once more.
            found = [(size.batch, (size.micro_batch or 9) <= 2) for size in sizes.list()]
            lines = len(repr(sizes.list()).splitlines())
            told = found, lines, sizes.clear()
            return told, len(sizes.list()), len(os.listdir("/proc/self/fd")) - before

        return use

    def judge(self, outcome: Outcome) -> list[str]:
        """A note that there was no memory for is missing, which is no failure of the step."""
        result, again = outcome.values
        if outcome.error == "" and result[0] == ([], 1, 0):
            outcome.values = ((self.first[0], *result[1:]), again)
        return super().judge(outcome)

    def armed(self) -> AbstractContextManager[Any]:
        return self._armed()

    @contextmanager
    def _armed(self) -> Iterator[None]:
        for left in self.folder.iterdir():
            left.unlink()
        yield

    def finish(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # prepare() may not have come to it


def checkpoint(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """Sizes of a step, put into another one."""
    from oomkit.testing import inject_oom

    step, x = _evaluation(oomkit, torch)
    with inject_oom():
        step(x)
    other, _ = _evaluation(oomkit, torch)

    def use() -> Any:
        state = oomkit.sizes.state_dict(step)
        oomkit.sizes.load_state_dict(other, state)
        step.load_state_dict(other.state_dict())
        return state, oomkit.sizes.state_dict(step), other.state_dict()

    return use


def trials(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """What of a search is C: calls whose error is told as plain values. Where there is no memory
    for the error that is expected, MemoryError takes its place, and is dropped."""
    from oomkit import _C
    from oomkit.testing import inject_oom

    class Pruned(Exception):
        pass

    starved = {("NoneType", kind) for kind in ("certain", "masked", "never")}

    def train(size: int, *, fail: type[BaseException] | None = None) -> int:
        if fail is not None:
            raise fail("no more")
        with inject_oom():
            return len(torch.empty(size))

    def attempt(judge: Any, keep: bool, **more: Any) -> tuple[str, str]:
        value, kind, *_ = _C._trial(train, (5,), more, Pruned, judge, keep)
        return type(value).__name__, kind

    def passing() -> bool:
        try:
            return attempt(None, False, fail=KeyError) in starved
        except KeyError:
            return True

    def use() -> Any:
        dropped = attempt(None, False)
        kept = attempt(lambda error: True, True)
        cleared = attempt(None, False, fail=Pruned)
        return (
            dropped if dropped not in starved else "dropped",
            kept[0] in ("OutOfMemoryError", "MemoryError"),
            cleared in {("Pruned", "cleared")} | starved,
            passing(),
            _C._trial(len, ("abc",), {}, Pruned, None, False)[0],
        )

    return use


class _Trial:
    """What these functions ask of a trial of Optuna's."""

    number = 0
    state = SimpleNamespace(is_finished=lambda: True)

    def __init__(self, size: int) -> None:
        self.params = {"batch_size": size}
        self.user_attrs: dict[str, Any] = {
            "peak_memory_bytes": 1000 + 10 * size,
            "memory_config": {"batch_size": size},
        }

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int:
        return high

    def set_user_attr(self, name: str, value: object) -> None:
        self.user_attrs[name] = value


def searching(oomkit: Any, torch: Any) -> Callable[[], Any]:
    """What of oomkit.optuna needs no Optuna."""
    from oomkit import optuna

    def use() -> Any:
        plan = optuna.suggest_batch(_Trial(8), max_micro=4)
        model = optuna.MemoryModel().fit([_Trial(n) for n in (1, 2, 4, 8, 16)])
        optuna.Training(len, [1], float)
        return (
            (plan.micro, plan.accumulation),
            optuna.constraints(_Trial(8)),
            model.predict({"batch_size": 32}),
            model.check(_Trial(64), budget=100, prune=False),
            model.error(),
            model.threshold({"batch_size": 4}),
            len(model.report()),
        )

    return use


class Reserving(Plain):
    """oomkit.reserve: admitted, one inside, a decorated function, given back. The queue is a
    folder of the stage's own, where each child begins without a place."""

    def __init__(self, prepared: Callable[[Make], Callable[[], Callable[[], Any]]]) -> None:
        super().__init__("reserving", prepared(self._make))
        self.folder = Path()

    def _make(self, oomkit: Any, torch: Any) -> Callable[[], Any]:
        self.folder = Path(tempfile.mkdtemp(prefix="oomkit-nomemory-"))
        os.environ["OOMKIT_RESERVE_DIR"] = str(self.folder)
        options = {"device": "cpu", "budget": 10 << 20}

        def places() -> list[str]:
            return [name for name in os.listdir(self.folder / "cpu") if name != "queue.lock"]

        def use() -> Any:
            before = len(os.listdir("/proc/self/fd"))
            with oomkit.reserve(8 << 20, **options) as one:
                with oomkit.reserve(1 << 20, **options) as inner:
                    held = repr(inner), len(places())
            twice = oomkit.reserve(9 << 20, **options)(len)("ab")
            one = repr(one)
            return held, one, twice, len(places()), len(os.listdir("/proc/self/fd")) - before

        return use

    def armed(self) -> AbstractContextManager[Any]:
        return self._armed()

    @contextmanager
    def _armed(self) -> Iterator[None]:
        shutil.rmtree(self.folder / "cpu", ignore_errors=True)  # places of children before
        yield

    def finish(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
