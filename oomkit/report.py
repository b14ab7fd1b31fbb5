"""Reports over step records: text and markdown for people, JSON for programs, a table for
notebooks.

Bytes and seconds in JSON; GiB, MiB and ms in text.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import _C
from ._ranks import records as ranks

__all__ = ["Report", "format_bytes", "format_seconds", "record_dict", "report", "reset_report"]

Row = Mapping[str, Any]
Table = list[tuple[str, ...]]

_UNLABELLED = "(no label)"
_MOST_LABELS, _MOST_EVENTS, _LAST = 12, 10, 5  # of one screen


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


# --- from whatever was given to sites -------------------------------------------------


@dataclass(frozen=True)
class Site:
    """All that is known of one label."""

    label: str
    summary: Mapping[str, Any]  # the fields of a StepSummary, but for the label
    rows: Sequence[Row]  # records that are kept, oldest first


def record_dict(record: Any) -> dict[str, Any]:
    """record_dict(record) -> dict

    The fields of a StepRecord (or StepSummary) by name; of a record of one of several
    processes its rank, too.
    """
    fields = {name: getattr(record, name) for name in type(record).__match_args__}
    if "rank" in fields and fields["rank"] is None:  # ranks that have not met in a step
        fields["rank"] = ranks.own_rank()
    return fields


def _is_change(before: Row | None, row: Row) -> bool:
    """Was it cut in another way than the call before, which had as many rows?"""
    return (
        before is not None
        and before["batch_size"] == row["batch_size"]
        and any(
            before.get(name) != row.get(name)
            for name in ("micro_batch_size", "accumulation_steps", "rung")
        )
    )


def is_event(before: Row | None, row: Row) -> bool:
    """Did it run out of memory, not finish, or change its plan?"""
    finished = row.get("outcome", "finished") == "finished"
    return row["ooms"] > 0 or not finished or _is_change(before, row)


def _quantile(values: Sequence[Any], share: float) -> Any:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of records alone, where nobody has counted the others."""
    peaks = [row["peak_allocated"] for row in rows if row["peak_allocated"] is not None]
    reserved = [row.get("peak_reserved") for row in rows]
    times = [row["time"] for row in rows if row["time"] is not None]
    before: list[Row | None] = [None, *rows[:-1]]
    return {
        "steps": len(rows),
        "ooms": sum(row["ooms"] for row in rows),
        "retries": sum(row.get("attempts", 1 + row["ooms"]) - 1 for row in rows),
        "plan_changes": sum(_is_change(b, row) for b, row in zip(before, rows, strict=False)),
        "unfinished": sum(row.get("outcome", "finished") != "finished" for row in rows),
        "time": sum(times),
        "time_lost": sum(row["time_lost"] or 0.0 for row in rows),
        "time_p50": _quantile(times, 0.5),
        "time_p95": _quantile(times, 0.95),
        "time_max": max(times, default=None),
        "peak_p50": _quantile(peaks, 0.5),
        "peak_p95": _quantile(peaks, 0.95),
        "peak_allocated": max(peaks, default=None),
        "peak_reserved": max((r for r in reserved if r is not None), default=None),
    }


def _site(label: object, summary: Any, records: Iterable[Any]) -> Site:
    figures = record_dict(summary)
    del figures["label"]
    return Site(str(label or _UNLABELLED), figures, [record_dict(record) for record in records])


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
            f"{_C.see('options')}"
        )
    return [record_dict(record) for record in records]


def sites_of(steps: Any) -> list[Site]:
    """What is to be reported: records by label in order of appearance, each step and guard
    for itself."""
    if steps is None:
        found = [_site(*entry) for entry in _C.histories()]
        return sorted((site for site in found if site.rows), key=lambda site: site.label)
    if isinstance(steps, (_C.StepRecord, Mapping, str)) or hasattr(steps, "records"):
        items: Iterable[Any] = [steps]
    else:
        items = steps if isinstance(steps, Iterable) else [steps]
    sites: list[Site] = []
    loose: dict[str, list[Row]] = {}
    for item in items:
        summary = getattr(item, "summary", None)
        if isinstance(summary, _C.StepSummary):
            sites.append(_site(summary.label, summary, item.records))
            continue
        for row in _rows_of(item):
            loose.setdefault(str(row["label"] or _UNLABELLED), []).append(row)
    sites += [Site(label, summarise(rows), rows) for label, rows in loose.items()]
    return [site for site in sites if site.rows]


# --- tables ---------------------------------------------------------------------------

RECORD_HEAD = (
    "step",
    "batch",
    "micro-batch",
    "accumulation steps",
    "peak allocated",
    "budget",
    "OOMs",
    "time",
    "time lost",
    "reason",
)
_SUMMARY_HEAD = (
    "label",
    "steps",
    "OOMs",
    "retries",
    "plan changes",
    "peak p50",
    "p95",
    "max",
    "time p50",
    "p95",
    "max",
    "time lost",
)


def record_cells(row: Row) -> tuple[str, ...]:
    outcome = row.get("outcome", "finished")
    rung = f" (rung {row['rung']})" if row.get("rung") else ""
    return (
        _number(row["step"]),
        _number(row["batch_size"]),
        _number(row["micro_batch_size"]),
        _number(row["accumulation_steps"]),
        format_bytes(row["peak_allocated"]),
        format_bytes(row["budget"]),
        _number(row["ooms"]),
        format_seconds(row["time"]),
        format_seconds(row["time_lost"]),
        (_number(row.get("reason")) if outcome == "finished" else outcome) + rung,
    )


def _summary_cells(site: Site) -> tuple[str, ...]:
    total = site.summary
    counts = (total[name] for name in ("steps", "ooms", "retries", "plan_changes"))
    peaks = (total[name] for name in ("peak_p50", "peak_p95", "peak_allocated"))
    times = (total[name] for name in ("time_p50", "time_p95", "time_max", "time_lost"))
    return (
        site.label,
        *map(str, counts),
        *map(format_bytes, peaks),
        *map(format_seconds, times),
    )


_PHASE_HEAD = (
    "label",
    "phase",
    "baseline p50",
    "peak p50",
    "max",
    "reserved max",
    "headroom min",
    "OOMs",
    "retries",
    "time p50",
    "of all time",
    "time lost",
    "went on by",
)


def _changes(entries: Sequence[Row]) -> str:
    """What plans changed to after failures in a phase: "3 oom, 1 climbed (rung 2)"."""
    counts = Counter(
        f"{change['reason']}" + (f" (rung {change['rung']})" if change["rung"] else "")
        for entry in entries
        for change in entry.get("changes", ())
    )
    return ", ".join(f"{count} {text}" for text, count in counts.items()) or "-"


def phase_rows(site: Site) -> list[dict[str, Any]]:
    """Figures of each phase over the records that have them."""
    rows = [row for row in site.rows if row.get("phases")]
    whole = sum(row["time"] or 0.0 for row in rows)
    names = dict.fromkeys(name for row in rows for name in row["phases"])
    found = []
    for name in names:
        mine = [(row, row["phases"][name]) for row in rows if name in row["phases"]]

        def of(key: str, entries: list[tuple[Row, Row]] = mine) -> list[Any]:
            return [entry[key] for _, entry in entries if entry[key] is not None]

        left = [
            row["budget"] - entry["peak_allocated"]
            for row, entry in mine
            if row["budget"] is not None and entry["peak_allocated"] is not None
        ]
        found.append(
            {
                "phase": name,
                "baseline_p50": _quantile(of("baseline"), 0.5),
                "peak_p50": _quantile(of("peak_allocated"), 0.5),
                "peak_allocated": max(of("peak_allocated"), default=None),
                "peak_reserved": max(of("peak_reserved"), default=None),
                "headroom": min(left, default=None),
                "ooms": sum(of("ooms")),
                "retries": sum(entry.get("retries", 0) for _, entry in mine),
                "changes": _changes([entry for _, entry in mine]),
                "time_lost": sum(entry.get("time_lost", 0.0) for _, entry in mine),
                "time_p50": _quantile(of("time"), 0.5),
                "share": sum(of("time")) / whole if whole else None,
            }
        )
    return found


def phase_table(sites: Sequence[Site]) -> Table:
    """A line for each label and phase; empty where no phase was measured."""
    lines = [
        (
            site.label,
            row["phase"],
            *(format_bytes(row[name]) for name in ("baseline_p50", "peak_p50", "peak_allocated")),
            *(format_bytes(row[name]) for name in ("peak_reserved", "headroom")),
            *(str(row[name]) for name in ("ooms", "retries")),
            format_seconds(row["time_p50"]),
            "-" if row["share"] is None else f"{100 * row['share']:.0f} %",
            format_seconds(row["time_lost"]),
            row["changes"],
        )
        for site in sites
        for row in phase_rows(site)
    ]
    return [_PHASE_HEAD, *lines] if lines else []


def summary_table(sites: Sequence[Site]) -> Table:
    """A line for each label."""
    return [_SUMMARY_HEAD, *map(_summary_cells, sites)]


def _summary_line(site: Site) -> str:
    total = site.summary
    return (
        f"{site.label}: {_plural(total['steps'], 'step')}, {_plural(total['ooms'], 'OOM')}, "
        f"highest peak {format_bytes(total['peak_allocated'])}, "
        f"time lost {format_seconds(total['time_lost'])}"
    )


def _labelled(pairs: Sequence[tuple[Site, Row]], several: bool) -> Table:
    head = ("label", *RECORD_HEAD) if several else RECORD_HEAD
    return [head, *((site.label,) * several + record_cells(row) for site, row in pairs)]


def _by_time(pairs: Iterable[tuple[Site, Row]]) -> list[tuple[Site, Row]]:
    return sorted(pairs, key=lambda pair: pair[1].get("started") or 0.0)


def _screen(sites: Sequence[Site]) -> list[tuple[str, Table]]:
    """(title, table): a line for each label, the last events, the last steps."""
    several = len(sites) > 1
    busiest = sorted(sites, key=lambda site: (-site.summary["ooms"], -site.summary["steps"]))
    shown = [site for site in sites if site in busiest[:_MOST_LABELS]]
    tables = [("", summary_table(shown))]
    if len(shown) < len(sites):
        tables[0][1].append((f"and {len(sites) - len(shown)} more",))
    events, last = [], []
    for site in sites:
        before: list[Row | None] = [None, *site.rows[:-1]]
        pairs = zip(before, site.rows, strict=False)
        events += [(site, row) for b, row in pairs if is_event(b, row)]
        last += [(site, row) for row in site.rows[-_LAST:]]
    phases = phase_table(shown)
    if phases:
        tables.append(("phases", phases))
    if events:
        title = "events" if len(events) <= _MOST_EVENTS else f"the last {_MOST_EVENTS} events"
        tables.append((title, _labelled(_by_time(events)[-_MOST_EVENTS:], several)))
    last = _by_time(last)[-_LAST:]
    title = "the last step" if len(last) == 1 else f"the last {len(last)} steps"
    tables.append((title, _labelled(last, several)))
    return tables


def _all(sites: Sequence[Site]) -> list[tuple[str, Table]]:
    return [(_summary_line(site), [RECORD_HEAD, *map(record_cells, site.rows)]) for site in sites]


# --- the formats ----------------------------------------------------------------------


def _text_table(table: Table) -> str:
    columns = len(table[0])
    widths = [max(len(line[i]) for line in table if len(line) == columns) for i in range(columns)]

    def line(cells: tuple[str, ...]) -> str:
        names = ("label", "phase")  # are read from the left, figures from the right
        out = [
            cell.ljust(width) if table[0][i] in names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
        ]
        return "  ".join(out).rstrip()

    lines = [line(cells) for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _text(tables: Sequence[tuple[str, Table]]) -> str:
    parts = [f"{title}\n" * bool(title) + _text_table(table) for title, table in tables]
    return "\n\n".join(parts)


def _markdown(tables: Sequence[tuple[str, Table]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    parts = []
    for title, (head, *rest) in tables:
        rule = line(["---:"] * len(head))
        lines = [line(head), rule, *(line(cells) for cells in rest)]
        parts.append("\n".join([f"### {title}", ""] * bool(title) + lines))
    return "\n\n".join(parts)


def _html_table(title: str, table: Table) -> str:
    head, *rest = table
    cells = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in rest
    )
    caption = f"<caption>{html.escape(title)}</caption>" * bool(title)
    return f"<table>{caption}<thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _json(sites: Sequence[Site], found: Mapping[int, Any] | None) -> str:
    entries = [
        {
            "label": site.label,
            "summary": dict(site.summary),
            "records": [dict(row) for row in site.rows],
        }
        for site in sites
    ]
    told: dict[str, Any] = {"sites": entries}
    if found is not None:
        told["ranks"] = [
            [{"label": label, "summary": total, "records": rows} for label, total, rows in each]
            for each in found.values()
        ]
    return json.dumps(told, indent=1)


class Report(str):
    """The text of a report, which a notebook shows as a table."""

    __slots__ = ("_tables",)
    _tables: Sequence[tuple[str, Table]]

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts = [_html_table(title, table) for title, table in self._tables]
        return "<div>" + ("".join(parts) or html.escape(self)) + "</div>"


def report(
    steps: Any = None,
    format: str = "text",
    file: str | os.PathLike[str] | _Writable | None = None,
    *,
    all: bool = False,
    group: Any = None,
) -> Report:
    """report(steps=None, format='text', file=None, *, all=False, group=None) -> Report

    What the decorated steps did, on one screen: a line for each label over its whole run, the
    last events (errors, changes of plan), the last five steps. A notebook shows it as a table.

    Parameters
    ----------
    steps : decorated step, guard, StepRecord, or an iterable of them, optional
        By default every decorated step of this process, those that are gone included.
    format : {'text', 'markdown', 'json'}
        JSON has bytes and seconds as numbers, and every record that is kept.
    file : path or writable, optional
        Write the report there too.
    all : bool
        A table for each label with every record that is kept: the last 1024, and older ones
        with events.
    group : process group or True, optional
        If all ranks call this, the first one's report has the records of all, with the
        rank that needed most and those that caused retries; the others' have their own. True is
        the default group.

    Returns
    -------
    Report
        A str: the report, without a newline at the end.
    """
    if not isinstance(format, str) or format not in ("text", "markdown", "json"):
        raise ValueError(
            f"report() expected format to be 'text', 'markdown' or 'json', got {format!r}"
            f"{_C.see('options')}"
        )
    sites = sites_of(steps)
    tables = _all(sites) if all else _screen(sites) if sites else []
    found = None
    if group is not None:
        found = ranks.gathered([(site.label, site.summary, site.rows) for site in sites], group)
    if found is not None:
        tables = [*ranks.tables(found, format_bytes, format_seconds), *tables]
    if format == "json":
        text = Report(_json(sites, found))
    elif not tables:
        text = Report("no records")
    else:
        text = Report((_text if format == "text" else _markdown)(tables))
    text._tables = tables
    if isinstance(file, (str, os.PathLike)):
        Path(file).write_text(text + "\n", encoding="utf-8")
    elif file is not None:
        file.write(text + "\n")
    return text


def reset_report() -> None:
    """reset_report() -> None

    Forget the records and summaries of all decorated steps, of those that are gone, too.
    Sizes that were found stay.
    """
    _C.forget_records()
