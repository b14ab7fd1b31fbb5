"""remember=True: a later run begins where an earlier one ended, and trusts it no further."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.new_store import fresh
from helpers.own_process import run_module

import oomkit
from oomkit import sizes, testing
from oomkit._engine import store as _store
from sizes import sizes_world as world

HERE = Path(__file__).parent
TIGHT, TIGHTER, AMPLE = 4_200_000, 3_500_000, 60_000_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OOMKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OOMKIT_REMEMBER", raising=False)
    fresh()
    yield tmp_path
    fresh()


def next_run() -> None:
    """What is not in the file is forgotten."""
    _store.flush()
    fresh()


def ended_with(budget: int = TIGHT) -> int:
    """An earlier run; the number of micro-batches that it came to."""
    calls = world.run(world.training(remember=True), budget)
    assert sum(ooms for _, ooms, _ in calls) >= 1 and calls[-1][1] == 0
    next_run()
    return calls[-1][0]


def program(folder: Path, budget: int, *arguments: str) -> list[list[Any]]:
    paths = [str(Path(oomkit.__file__).parents[1]), str(HERE.parent)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OOMKIT_CACHE_DIR": str(folder),
        "OOMKIT_REMEMBER": "1",
    }
    done = run_module("sizes.sizes_world", str(budget), *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_new_process_begins_at_the_best_size_without_an_oom(folder: Path) -> None:
    first = program(folder, TIGHT)
    assert sum(ooms for _, ooms, _ in first) >= 1
    best = first[-1][0]
    second = program(folder, TIGHT)
    assert [ooms for _, ooms, _ in second] == [0] * 6
    assert [k for k, _, _ in second] == [best] * 6
    assert second[0][2] == "remembered"


def test_off_by_default(folder: Path) -> None:
    world.run(world.training(), TIGHT)
    world.run(world.training(remember=False), TIGHT)
    assert list(folder.iterdir()) == []


def test_by_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, remembers in {"0": False, "": False, "1": True}.items():
        monkeypatch.setenv("OOMKIT_REMEMBER", value)
        world.run(world.training(remember=False), TIGHT, 2)
        assert not (folder / "sizes.json").exists()
        world.run(world.training(), TIGHT, 2)
        assert (folder / "sizes.json").exists() == remembers
    assert {size.function for size in sizes.list()} == {"sizes.sizes_world.training.<locals>.step"}


def test_the_next_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    best = ended_with()
    with caplog.at_level(logging.INFO, logger="oomkit"):
        calls = world.run(world.training(remember=True), TIGHT, 2)
    assert calls == [(best, 0, "remembered")] * 2
    said = [r.getMessage() for r in caplog.records]
    assert said == ["oomkit: step begins with remembered sizes of 1 shapes"] or any(
        "begins with remembered sizes" in line for line in said
    )


def test_a_smaller_budget_is_planned_for() -> None:
    best = ended_with()
    calls = world.run(world.training(remember=True), TIGHTER)
    fresh()
    anew = world.run(world.training(), TIGHTER)
    assert calls[-1][0] > best and calls[0][1:] == (0, "remembered")
    assert sum(ooms for _, ooms, _ in calls) == 0 < sum(ooms for _, ooms, _ in anew)
    assert calls[-1][0] <= anew[-1][0]


def test_a_larger_budget_is_made_use_of() -> None:
    best = ended_with()
    calls = world.run(world.training(remember=True), AMPLE)
    assert [ooms for _, ooms, _ in calls] == [0] * 6
    assert calls[-1][0] == 1 < best


@pytest.mark.parametrize("what", ["torch", "device"])
def test_another_torch_or_device_begins_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_with()
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    else:
        monkeypatch.setattr(sizes, "_device_name", lambda kind, index: "another")
    calls = world.run(world.training(remember=True), TIGHT)
    assert calls[0][1] >= 1


def test_another_model_begins_anew() -> None:
    ended_with()
    step = world.training(remember=True)
    model = torch.nn.Linear(3, 3)  # as if the layers were wider
    step.__wrapped__.__globals__["extra"] = model
    try:
        other = sizes._recall(step.__wrapped__, (torch.__version__, "cpu", 7, 1), TIGHT)
    finally:
        del step.__wrapped__.__globals__["extra"]
    assert other[1] == []


@pytest.mark.parametrize("factor", [1, 3])
def test_what_is_wrong_costs_an_oom_and_is_put_right(factor: int) -> None:
    """The same function and parameters, but activations that need more, or less, than noted."""
    world.run(world.training(4 - factor, remember=True), TIGHT)
    next_run()
    calls = world.run(world.training(factor, remember=True), TIGHT, 10)
    fresh()
    anew = world.run(world.training(factor), TIGHT, 10)
    assert sum(ooms for _, ooms, _ in calls) <= sum(ooms for _, ooms, _ in anew) + 1
    assert calls[-1][0] <= anew[-1][0] and calls[-1][1] == 0
    next_run()
    assert [ooms for _, ooms, _ in world.run(world.training(factor, remember=True), TIGHT)] == (
        [0] * 6
    )


def test_an_edited_function_begins_anew() -> None:
    def keys(*sources: str) -> list[str]:
        found = []
        for source in sources:
            names: dict[str, Any] = {}
            exec(source, names)
            found.append(sizes._digest(names["step"].__code__))
        return found

    text = "def step(x):\n    return [{} for i in x if i in {{'a', 'b', 'c'}}]\n"
    one, moved, edited = keys(text.format("i + 1"), "\n\n" + text.format("i + 1"), text.format("2"))
    assert one == moved != edited


def test_the_name_of_a_function_is_the_same_in_another_process() -> None:
    code = (
        "from oomkit import sizes\n"
        "def step(x):\n    return [i for i in x if i in {'a', 'b', 'c', 'd'}]\n"
        "print(sizes._digest(step.__code__))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": str(Path(oomkit.__file__).parents[1]),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_every_kind_of_callable_has_a_code() -> None:
    import functools

    class Trainer:
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    trainer = Trainer()
    kinds = [
        trainer.step,
        trainer,
        functools.partial(trainer.step),
        torch.nn.Linear(1, 1),
        lambda x: x,
        functools.wraps(trainer.step)(lambda x: x),
    ]
    assert all(sizes._code_of(kind) is not None for kind in kinds)
    assert sizes._code_of(len) is None
    assert sizes._name_of(functools.partial(trainer)).endswith("Trainer")


def test_healthy_calls_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at the first call; after a plan is found nothing is noted."""
    asked: list[str] = []
    for name in ("recall", "_write"):
        real = getattr(_store, name)
        monkeypatch.setattr(
            _store, name, lambda *a, real=real, name=name: (asked.append(name), real(*a))[1]
        )
    step = world.training(remember=True)
    world.run(step, AMPLE, 5)
    assert asked == ["recall"]
    world.run(step, TIGHT, 4)
    noted = list(asked)
    pending = dict(_store._pending)
    world.run(step, TIGHT, 4)
    assert asked == noted and _store._pending == pending


def test_without_a_budget_nothing_is_noted(folder: Path) -> None:
    step = world.training(remember=True)
    with testing.inject_oom(nth=5):
        step(*world.batch())
    step(*world.batch())
    assert step.records[-1].accumulation_steps == 2
    _store.flush()
    assert not (folder / "sizes.json").exists()


def test_a_file_of_rubbish_costs_a_warning(folder: Path) -> None:
    (folder / "sizes.json").write_text("rubbish")
    step = world.training(remember=True)
    with pytest.warns(oomkit.OomkitWarning, match=r"sizes\.json has invalid entries"):
        world.run(step, TIGHT, 4)
    next_run()
    assert world.run(world.training(remember=True), TIGHT, 2)[0][1] == 0
