"""Where step records go: plain callables that take a StepRecord, attached once.

>>> from oomkit import sinks
>>> sinks.attach(sinks.JSONL("steps.jsonl"))
>>> for batch in loader:
...     step(batch)

Every record of every decorated step goes to every sink that is attached, and to those of
`auto_batch(sinks=[...])` of its own step. A sink that raises is named in one warning, and
called on; training never hears of it. Nothing but the library that a sink is for is needed,
and it is imported when the sink is made.

A call whose loss is returned is recorded when it returns, and once more, with the same number,
where its `backward()` ran out of memory afterwards.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from . import _C
from .report import format_bytes, format_seconds, record_dict

__all__ = [
    "JSONL",
    "Logging",
    "MLflow",
    "Prometheus",
    "Rich",
    "TensorBoard",
    "WandB",
    "attach",
    "attached",
    "detach",
    "tqdm_postfix",
]

Sink = Callable[[Any], object]

_FIGURES = (
    "micro_batch_size",
    "accumulation_steps",
    "ooms",
    "peak_allocated",
    "peak_reserved",
    "budget",
    "time",
    "time_lost",
)

# --- who is told ------------------------------------------------------------------------

_attached: tuple[Sink, ...] = ()
_failed: set[int] = set()


def _name(sink: Sink) -> str:
    return getattr(sink, "__qualname__", None) or type(sink).__qualname__


def _tell(record: Any, own: Sequence[Sink] | None) -> None:
    """Hands a record to all sinks; called by the engine at the end of each call."""
    for sink in (*_attached, *(own or ())):
        try:
            sink(record)
        except Exception as error:
            if id(sink) not in _failed:
                _failed.add(id(sink))
                warnings.warn(
                    f"oomkit: the sink {_name(sink)} failed and is switched off: "
                    f"{type(error).__name__}: {error}"
                    f"{_C.see('sink-failed')}",
                    _C.OomkitWarning,
                    stacklevel=2,
                )


def attach(sink: Sink) -> Sink:
    """attach(sink) -> sink

    Call `sink(record)` at the end of each call of every decorated step, from now on.

    Parameters
    ----------
    sink : callable
        One of this module's, or any callable that takes a StepRecord. One that is attached
        already stays attached once.
    """
    global _attached
    if not callable(sink):
        raise TypeError(
            f"attach() expected a callable, got {type(sink).__name__!r}{_C.see('options')}"
        )
    if not any(other is sink for other in _attached):
        _attached = (*_attached, sink)
    _C.set_sinks_attached(bool(_attached))
    return sink


def detach(sink: Sink) -> None:
    """detach(sink) -> None

    The reverse; nothing where it is not attached.
    """
    global _attached
    _attached = tuple(other for other in _attached if other is not sink)
    _failed.discard(id(sink))
    _C.set_sinks_attached(bool(_attached))


def attached() -> tuple[Sink, ...]:
    """attached() -> tuple

    The sinks that are attached, in the order in which they are called.
    """
    return _attached


# --- names and figures ------------------------------------------------------------------


def _figures(record: Any) -> dict[str, float]:
    """The figures that are known, by name."""
    known = {name: getattr(record, name) for name in _FIGURES}
    if record.budget is not None and record.peak_allocated is not None:
        known["headroom"] = record.budget - record.peak_allocated
    for phase, figures in (record.phases or {}).items():
        for name in ("peak_allocated", "time", "time_lost"):
            known[f"{phase}_{name}"] = figures[name]
    return {name: value for name, value in known.items() if value is not None}


def _named(prefix: str, record: Any) -> dict[str, float]:
    """The figures under names that every tracker accepts: prefix/label/figure."""
    label = re.sub(r"[^\w.\- ]", "_", record.label or "step", flags=re.ASCII)
    return {f"{prefix}/{label}/{name}": value for name, value in _figures(record).items()}


class JSONL:
    """JSONL(path)

    One JSON object per record and line, appended; `python -m oomkit report` reads it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        # Kept open: a line per step should cost no more than a write.
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, record: Any) -> None:
        self._stream.write(json.dumps(record_dict(record)) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> JSONL:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Logging:
    """Logging(logger=None, level=logging.INFO)

    One line of a logger for each record, by default of "oomkit.steps".
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self.logger = logging.getLogger("oomkit.steps") if logger is None else logger
        self.level = level

    def __call__(self, record: Any) -> None:
        self.logger.log(
            self.level,
            "%s step=%d micro_batch=%s accumulation=%d peak=%s ooms=%d time=%s reason=%s",
            record.label or "step",
            record.step,
            "-" if record.micro_batch_size is None else record.micro_batch_size,
            record.accumulation_steps,
            format_bytes(record.peak_allocated),
            record.ooms,
            format_seconds(record.time),
            record.reason,
        )


class TensorBoard:
    """TensorBoard(writer, prefix='oomkit')

    Scalars of a `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, writer: Any, prefix: str = "oomkit") -> None:
        self.writer = writer
        self.prefix = prefix

    def __call__(self, record: Any) -> None:
        for name, value in _named(self.prefix, record).items():
            self.writer.add_scalar(name, value, global_step=record.step)


class WandB:
    """WandB(run, prefix='oomkit')

    Figures of a Weights & Biases run. They join what the program logs next, so that the
    run's own step counter is left alone.
    """

    def __init__(self, run: Any, prefix: str = "oomkit") -> None:
        self.run = run
        self.prefix = prefix

    def __call__(self, record: Any) -> None:
        self.run.log(_named(self.prefix, record), commit=False)


class MLflow:
    """MLflow(client, prefix='oomkit')

    Metrics of MLflow: the module itself, or anything that has its `log_metrics`.
    """

    def __init__(self, client: Any, prefix: str = "oomkit") -> None:
        self.client = client
        self.prefix = prefix

    def __call__(self, record: Any) -> None:
        self.client.log_metrics(_named(self.prefix, record), step=record.step)


class Prometheus:
    """Prometheus(registry=None)

    Counters and gauges of prometheus_client, in its default registry or in the one given.
    """

    def __init__(self, registry: Any = None) -> None:
        client: Any = importlib.import_module("prometheus_client")
        options: dict[str, Any] = {"labelnames": ("label",)}
        if registry is not None:
            options["registry"] = registry
        self._steps = client.Counter("oomkit_steps", "Calls that ended.", **options)
        self._ooms = client.Counter("oomkit_ooms", "Attempts that ran out of memory.", **options)
        self._lost = client.Counter(
            "oomkit_time_lost_seconds", "Failed attempts and recovery.", **options
        )
        self._gauges = {
            "micro_batch_size": client.Gauge("oomkit_micro_batch_rows", "Rows.", **options),
            "accumulation_steps": client.Gauge(
                "oomkit_accumulation_steps", "Micro-batches per batch.", **options
            ),
            "peak_allocated": client.Gauge(
                "oomkit_peak_allocated_bytes", "Peak of the last call.", **options
            ),
            "budget": client.Gauge("oomkit_budget_bytes", "Limit in force.", **options),
        }
        self._last: dict[str, Any] = {}  # by label: one record may be told twice

    def __call__(self, record: Any) -> None:
        label = record.label or "step"
        last = self._last.get(label)
        if last is None or (last.step, last.started) != (record.step, record.started):
            self._steps.labels(label).inc()
            ooms, lost = 0, 0.0
        else:
            ooms, lost = last.ooms, last.time_lost or 0.0
        self._last[label] = record
        self._ooms.labels(label).inc(record.ooms - ooms)
        self._lost.labels(label).inc(max(0.0, (record.time_lost or 0.0) - lost))
        for name, gauge in self._gauges.items():
            value = getattr(record, name)
            if value is not None:
                gauge.labels(label).set(value)


def _status(record: Any, ooms: int) -> dict[str, Any]:
    micro_batch = record.micro_batch_size
    return {
        "micro_batch": "-" if micro_batch is None else micro_batch,
        "peak": format_bytes(record.peak_allocated),
        "OOMs": ooms,
    }


def tqdm_postfix(bar: Any) -> Sink:
    """tqdm_postfix(bar) -> callable

    Micro-batch size, peak and OOMs so far at the end of a tqdm progress bar.
    """
    ooms = 0

    def tqdm_sink(record: Any) -> None:
        nonlocal ooms
        ooms += record.ooms
        bar.set_postfix(_status(record, ooms), refresh=False)

    return tqdm_sink


class Rich:
    """Rich(progress, task)

    The same as fields of a task of `rich.progress.Progress`: show them with
    `TextColumn("{task.fields[oomkit]}")`.
    """

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress = progress
        self.task = task
        self._ooms = 0
        progress.update(task, oomkit="")

    def __call__(self, record: Any) -> None:
        self._ooms += record.ooms
        status = _status(record, self._ooms)
        text = ", ".join(f"{name} {value}" for name, value in status.items())
        self.progress.update(self.task, oomkit=text)
