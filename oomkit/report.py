"""Reports over step records: text and markdown for people, JSON for programs.

Bytes and seconds in JSON; GiB, MiB and ms in text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import _C

__all__ = ["format_bytes", "format_seconds", "record_dict", "report"]

Row = Mapping[str, Any]

_COLUMNS = (
    "step",
    "batch",
    "micro-batch",
    "accumulation steps",
    "peak allocated",
    "budget",
    "OOMs",
    "time",
)
_UNLABELLED = "(no label)"


class _Writable(Protocol):
    def write(self, text: str, /) -> object: ...


# --- figures for people ---------------------------------------------------------------


def format_bytes(count: int | None) -> str:
    """format_bytes(count) -> str

    A number of bytes for people: "2.00 GiB", "512 bytes", "-" for None.
    """
    if count is None:
        return "-"
    if abs(count) < 1024:
        return f"{count} byte" if count == 1 else f"{count} bytes"
    size = count / 1024
    for unit in ("KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_seconds(seconds: float | None) -> str:
    """format_seconds(seconds) -> str

    A time for people: "1.25 s", "12.50 ms", "3.10 us", "-" for None.
    """
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def _number(value: object) -> str:
    return "-" if value is None else str(value)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- from whatever was given to rows --------------------------------------------------


def record_dict(record: Any) -> dict[str, Any]:
    """record_dict(record) -> dict

    The fields of a StepRecord by name.
    """
    return {name: getattr(record, name) for name in type(record).__match_args__}


def _rows_of(item: Any) -> list[Row]:
    """Rows of a StepRecord, of something with records, or of a row itself."""
    if isinstance(item, _C.StepRecord):
        return [record_dict(item)]
    if isinstance(item, Mapping):
        return [item]
    records = getattr(item, "records", None)
    if records is None:
        raise TypeError(
            f"report() expected decorated steps, guards or StepRecords, got {type(item).__name__!r}"
        )
    return [record_dict(record) for record in records]


def _group(steps: Any) -> dict[str, list[Row]]:
    """Rows by label, in the order in which labels appear."""
    if steps is None:
        # They come out of a set: without an order of their own.
        items: Iterable[Any] = sorted(_C.live_steps(), key=lambda step: str(step.label))
    elif isinstance(steps, (_C.StepRecord, Mapping)) or hasattr(steps, "records"):
        items = [steps]
    elif isinstance(steps, Iterable) and not isinstance(steps, str):
        items = steps
    else:
        items = [steps]
    groups: dict[str, list[Row]] = {}
    for item in items:
        for row in _rows_of(item):
            groups.setdefault(str(row["label"] or _UNLABELLED), []).append(row)
    return groups


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    peaks = [row["peak_allocated"] for row in rows if row["peak_allocated"] is not None]
    return {
        "steps": len(rows),
        "ooms": sum(row["ooms"] for row in rows),
        "peak_allocated": max(peaks, default=None),
        "time": sum(row["time"] or 0.0 for row in rows),
        "time_lost": sum(row["time_lost"] or 0.0 for row in rows),
    }


# --- the three formats ----------------------------------------------------------------


def _cells(row: Row) -> tuple[str, ...]:
    return (
        _number(row["step"]),
        _number(row["batch_size"]),
        _number(row["micro_batch_size"]),
        _number(row["accumulation_steps"]),
        format_bytes(row["peak_allocated"]),
        format_bytes(row["budget"]),
        _number(row["ooms"]),
        format_seconds(row["time"]),
    )


def _summary_line(label: str, rows: Sequence[Row]) -> str:
    total = _summary(rows)
    return (
        f"{label}: {_plural(total['steps'], 'step')}, {_plural(total['ooms'], 'OOM')}, "
        f"highest peak {format_bytes(total['peak_allocated'])}, "
        f"time lost {format_seconds(total['time_lost'])}"
    )


def _text(groups: Mapping[str, Sequence[Row]]) -> str:
    parts = []
    for label, rows in groups.items():
        table = [_COLUMNS, *(_cells(row) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        parts.append("\n".join([*lines, _summary_line(label, rows)]))
    return "\n\n".join(parts) or "no records"


def _markdown(groups: Mapping[str, Sequence[Row]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    parts = []
    for label, rows in groups.items():
        lines = [line(_COLUMNS), line(["---:"] * len(_COLUMNS))]
        lines += [line(_cells(row)) for row in rows]
        parts.append("\n".join([f"### `{label}`", "", *lines, "", _summary_line(label, rows)]))
    return "\n\n".join(parts) or "no records"


def _json(groups: Mapping[str, Sequence[Row]]) -> str:
    sites = [
        {"label": label, "summary": _summary(rows), "records": [dict(row) for row in rows]}
        for label, rows in groups.items()
    ]
    return json.dumps({"sites": sites}, indent=1)


_FORMATS = {"text": _text, "markdown": _markdown, "json": _json}


def report(
    steps: Any = None,
    format: str = "text",
    file: str | os.PathLike[str] | _Writable | None = None,
) -> str:
    """report(steps=None, format='text', file=None) -> str

    What the decorated steps did: a table per label, and a summary of each.

    Parameters
    ----------
    steps : decorated step, guard, StepRecord, or an iterable of them, optional
        By default every decorated step that is alive.
    format : {'text', 'markdown', 'json'}
        JSON has bytes and seconds as numbers.
    file : path or writable, optional
        Write the report there too.

    Returns
    -------
    str
        The report, without a newline at the end.
    """
    if not isinstance(format, str) or format not in _FORMATS:
        raise ValueError(
            f"report() expected format to be 'text', 'markdown' or 'json', got {format!r}"
        )
    text = _FORMATS[format](_group(steps))
    if isinstance(file, (str, os.PathLike)):
        Path(file).write_text(text + "\n", encoding="utf-8")
    elif file is not None:
        file.write(text + "\n")
    return text
