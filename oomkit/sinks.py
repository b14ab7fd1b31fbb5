"""Where step records can go: plain callables that take a StepRecord.

>>> from oomkit import sinks
>>> sink = sinks.JSONL("steps.jsonl")
>>> for batch in loader:
...     step(batch)
...     sink(step.records[-1])

A sink also fits `auto_batch(on_retry=...)`, to hear of retries only. Nothing but the
library that a sink is for is needed, and it is imported when the sink is made.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .report import format_bytes, record_dict

__all__ = ["JSONL", "MLflow", "Prometheus", "TensorBoard", "WandB", "tqdm_postfix"]

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


def _figures(record: Any) -> dict[str, float]:
    """The figures that are known, by name."""
    known = {name: getattr(record, name) for name in _FIGURES}
    return {name: value for name, value in known.items() if value is not None}


def _named(prefix: str, record: Any) -> dict[str, float]:
    """The figures under names that every tracker accepts: prefix/label/figure."""
    label = re.sub(r"[^\w.\- ]", "_", record.label or "step")
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

    def __call__(self, record: Any) -> None:
        label = record.label or "step"
        self._steps.labels(label).inc()
        self._ooms.labels(label).inc(record.ooms)
        self._lost.labels(label).inc(record.time_lost or 0.0)
        for name, gauge in self._gauges.items():
            value = getattr(record, name)
            if value is not None:
                gauge.labels(label).set(value)


def tqdm_postfix(bar: Any) -> Callable[[Any], None]:
    """tqdm_postfix(bar) -> callable

    Micro-batch size, peak and OOMs so far at the end of a tqdm progress bar.
    """
    ooms = 0

    def sink(record: Any) -> None:
        nonlocal ooms
        ooms += record.ooms
        micro_batch = record.micro_batch_size
        bar.set_postfix(
            {
                "micro_batch": "-" if micro_batch is None else micro_batch,
                "peak": format_bytes(record.peak_allocated),
                "OOMs": ooms,
            },
            refresh=False,
        )

    return sink
