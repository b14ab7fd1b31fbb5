"""A use of each public name, for test_leak_names.py: what is called again and again.

A new name needs one line: add it to the `@covers(...)` of the use that uses it, or write a use
of its own, a function without arguments that leaves nothing.
"""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import json
import logging
import pickle
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oomkit
from helpers.collector import hide_nothing
from oomkit import _C, sinks
from oomkit.testing import force_slices, inject_oom

Use = Callable[[], object]
USES: dict[str, Use] = {}
"""By the name of the function."""
COVERED: dict[str, str] = {}
"""public name -> the use of it."""

NEEDS_MORE = {
    "lightning.AutoBatch": "needs Lightning: tests/trainers",
    "transformers.protect": "needs a trainer: tests/trainers",
    "transformers.records": "needs a trainer: tests/trainers",
    "transformers.unprotect": "needs a trainer: tests/trainers",
    "sinks.TensorBoard": "needs tensorboard; it holds what JSONL holds, a path and a writer",
    "sinks.WandB": "needs wandb and hands each record on to it",
    "sinks.MLflow": "needs mlflow and hands each record on to it",
    "sinks.Rich": "needs rich and hands each record on to it",
    "sinks.Prometheus": "needs prometheus_client, whose registry keeps gauges by design",
}
"""Names without a use, each with the reason."""


def covers(*names: str) -> Callable[[Use], Use]:
    def note(use: Use) -> Use:
        USES[use.__name__] = use
        COVERED.update(dict.fromkeys(names, use.__name__))
        return use

    return note


def _attributes(name: str, thing: Any) -> list[str]:
    """A public class has its public attributes beside itself."""
    if not inspect.isclass(thing):
        return [name]
    # Those of a named tuple, of an exception and of a dataclass are values that it owns.
    own = [k for k, v in vars(thing).items() if not k.startswith("_") and callable(v)]
    return [name, *(f"{name}.{attribute}" for attribute in own)]


def _is_own(module: Any, name: str, thing: Any) -> bool:
    return not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__


def public_names() -> set[str]:
    names: set[str] = set()
    for name in oomkit.__all__:
        names.update(_attributes(name, getattr(oomkit, name)))
    for module in pkgutil.iter_modules(oomkit.__path__):
        if module.name.startswith("_"):
            continue
        imported = importlib.import_module(f"oomkit.{module.name}")
        own = [k for k, v in vars(imported).items() if _is_own(imported, k, v)]
        for name in getattr(imported, "__all__", own):
            try:
                found = getattr(imported, name)
            except ImportError:  # its framework is in an environment of its own
                names.add(f"{module.name}.{name}")
                continue
            if getattr(oomkit, name, None) is not found:
                names.update(_attributes(f"{module.name}.{name}", found))
    return names


def lacking() -> list[str]:
    return sorted(public_names() - COVERED.keys() - NEEDS_MORE.keys())


# --- the uses ---

MODEL = nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=1e-3)
X = torch.randn(4, 4)


def _plain(x: torch.Tensor) -> float:
    OPTIMIZER.zero_grad()
    loss = MODEL(x).pow(2).mean()
    loss.backward()
    OPTIMIZER.step()
    return loss.item()


def _loss(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x).pow(2).mean()


@covers("auto_batch", "StepRecord", "testing", "testing.inject_oom")
def a_recovered_step() -> None:
    step = oomkit.auto_batch(_plain, verify=False)
    with inject_oom(nth=4) as fault:
        step(X)
    assert (fault.fired, step.records[-1].ooms) == (1, 1)
    assert all(getattr(step.records[-1], name) != () for name in step.records[-1].__match_args__)


@covers("testing.force_slices")
def a_split_step() -> None:
    step = oomkit.auto_batch(_loss, on_retry=print, label="a", participants=(OPTIMIZER,))
    with force_slices([2, 2]):
        step(X).backward()
    MODEL.zero_grad()


@covers()
def a_returned_loss() -> None:
    step = oomkit.auto_batch(_loss, verify=False)
    loss = step(X)
    with inject_oom():
        loss.backward()
    MODEL.zero_grad()


class _Trainer:
    @oomkit.auto_batch
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @oomkit.auto_batch
    @staticmethod
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1


@covers()
def bound_steps() -> None:
    trainer = _Trainer()
    trainer.step(X)
    trainer.plain(X)
    copy.copy(oomkit.auto_batch(trainer.step.__wrapped__))
    model = nn.Linear(4, 2)
    model.forward = oomkit.auto_batch(model.forward)
    copy.deepcopy(model)(X)


@covers()
def refused_options() -> None:
    for options in ({"batch": 1}, {"rng": "x"}, {"model": 1}, {"nothing": 1}, {"dim": "x"}):
        try:
            oomkit.auto_batch(_loss, **options)
        except (TypeError, ValueError):
            continue
        raise AssertionError(options)


@covers("guard")
def a_guard() -> None:
    with oomkit.guard(on_oom="skip", label="leak") as guard, inject_oom():
        torch.empty(5)
    assert guard.records[-1].ooms == 1
    guarded = oomkit.guard(on_oom="skip")(_loss)
    guarded(X)
    pickle.dumps(oomkit.guard(label="a")(_plain))


@covers("OutOfMemory", "OOMReport", "OomkitError")
def giving_up() -> None:
    step = oomkit.auto_batch(_plain)
    try:
        with inject_oom(times=None):
            step(X)
    except oomkit.OutOfMemory as error:
        report = pickle.loads(pickle.dumps(error)).report
        assert report is None or report.text
        assert error.report is not None and error.report.advice
    else:
        raise AssertionError
    MODEL.zero_grad()


@covers("PartialUpdate", "RankError", "SplitError", "OomkitWarning")
def errors() -> None:
    kinds = (oomkit.PartialUpdate, oomkit.RankError, oomkit.SplitError, oomkit.OutOfMemory)
    for kind in (*kinds, oomkit.OomkitError):
        error = kind("text")
        pickle.loads(pickle.dumps(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("text", oomkit.OomkitWarning, stacklevel=1)
    try:
        oomkit.auto_batch(_loss, accumulation_steps=2)(torch.zeros(()))
    except oomkit.SplitError:
        pass


@covers("classify", "is_oom_error")
def classifying() -> None:
    inner = RuntimeError("CUDA error: out of memory")
    for error in (inner, MemoryError(), ExceptionGroup("g", [inner]), ValueError("x" * 1000)):
        oomkit.classify(error)
        oomkit.is_oom_error(error)


@covers("current")
def the_current_slice() -> None:
    assert oomkit.current().is_last


@covers("cleanup", "memory.Freed")
def cleaning_up() -> None:
    oomkit.cleanup()


@covers("Budget", "MemoryInfo", "budget", "memory", "max_memory_allocated")
def figures() -> None:
    assert oomkit.budget("cpu").limit is None
    assert oomkit.memory("cpu").budget is None
    oomkit.max_memory_allocated("cpu")


@covers("limit_memory", "memory.MemoryLimit")
def a_limit() -> None:
    with oomkit.limit_memory("1GB", device="cpu") as limit:
        repr(limit)


@covers("report", "report.Report", "report.format_bytes", "report.format_seconds")
@covers("report.record_dict", "reset_report", "StepSummary")
def reporting() -> None:
    with oomkit.guard(label="leak") as guard:
        pass
    for kind in ("text", "markdown", "json"):
        oomkit.report([guard], format=kind, file=io.StringIO())
    oomkit.auto_batch(lambda batch: batch, label="leak")([1])
    assert oomkit.report()._repr_html_() and guard.summary.steps
    oomkit.reset_report()
    module = sys.modules["oomkit.report"]
    json.dumps(module.record_dict(guard.records[-1]))
    module.format_bytes(10**9), module.format_seconds(0.1)


@covers("sinks", "sinks.attach", "sinks.attached", "sinks.detach", "sinks.Logging")
def sinks_of_a_step() -> None:
    told: list[object] = []
    for sink in (told.append, oomkit.sinks.Logging()):
        oomkit.sinks.attach(sink)
    oomkit.auto_batch(lambda batch: batch, label="leak", sinks=[told.append])([1])
    for sink in oomkit.sinks.attached():
        oomkit.sinks.detach(sink)
    assert len(told) == 2


@covers("estimate", "Estimate", "Estimate.largest", "Estimate.peak")
def an_estimate() -> None:
    found = oomkit.estimate(MODEL, X)
    assert found.largest(found.peak(4)) == 4


@covers("check", "Check")
def a_dry_run() -> None:
    assert oomkit.check(_plain, X).ok


class _Batch:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


@covers("register_splitter")
def a_splitter() -> None:
    oomkit.register_splitter(
        _Batch,
        split=lambda b, start, n: _Batch(b.rows[start : start + n]),
        size=lambda b: len(b.rows),
    )
    with force_slices([2, 2]):
        oomkit.auto_batch(lambda batch: MODEL(batch.rows).detach())(_Batch(X))


@covers(
    "optim.first_state_bytes",
    "optim.is_independent",
    "optim.state_bytes",
    "optim.temporary_bytes",
    "optim.update_needs",
    "register_optimizer",
)
def prediction() -> None:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    module = importlib.import_module("oomkit.optim")
    module.update_needs(optimizer)
    module.is_independent(optimizer)
    module.temporary_bytes(optimizer)
    module.state_bytes(optimizer)
    oomkit.register_optimizer(torch.optim.AdamW)


@covers("sinks.JSONL", "sinks.JSONL.close", "sinks.tqdm_postfix")
def a_sink() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with sinks.JSONL(Path(folder) / "records") as sink:
            sink(_RECORD)


with oomkit.guard() as _guard:
    pass
_RECORD = _guard.records[-1]


# --- what they leave ---


def _kinds() -> list[type]:
    own = []
    for thing in gc.get_objects():  # isinstance() would ask deprecated objects for their class
        if issubclass(type(thing), type) and thing.__module__ in ("oomkit", "oomkit._C"):
            own.append(thing)
    return own


KINDS = _kinds()
"""Every type of both modules, also those without a public name."""


def counted() -> dict[str, int]:
    gc.collect()
    # The interpreter's table of attributes found in types holds up to 4,096 names. It is filled
    # slowly: names made anew for each look-up (PyObject_GetAttrString) have entries of their own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.13 has another name for it
        sys._clear_type_cache()
    found = {f"references to {t.__qualname__}": sys.getrefcount(t) for t in KINDS}
    found["references to None"] = sys.getrefcount(None)
    found["references to ()"] = sys.getrefcount(())
    found["references to _C"] = sys.getrefcount(_C)
    found["blocks of the interpreter"] = sys.getallocatedblocks()
    found["objects of the collector"] = len(gc.get_objects())
    found["bytes of tensors"] = oomkit.memory("cpu").allocated or 0
    return found


@contextmanager
def nothing_else_counted() -> Iterator[None]:
    """pytest keeps log records; and what there was before would be walked at each collection."""
    logger = logging.getLogger("oomkit")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    hide_nothing()
    logger.setLevel(level)


def grown(use: Use, times: int) -> dict[str, int]:
    """What there is more of with each of many calls, and of the same number of calls again:
    what is kept once, and lists of free objects, do not grow for ever."""
    for _ in range(20):
        use()
    found: dict[str, int] = {}
    for turn in range(8):
        before = counted()
        for _ in range(times):
            use()
        now = {what: more - before[what] for what, more in counted().items()}
        found = {
            what: min(more, found.get(what, more))
            for what, more in now.items()
            if more >= times // 2 and (turn == 0 or what in found)
        }
        if not found:
            break
    return found
