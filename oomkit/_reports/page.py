"""A report as one HTML page: no network, light and dark, readable without a mouse.

`python -m oomkit report FILE... --html OUT`. Of two files the page also compares the runs.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report import (
    RECORD_HEAD,
    Row,
    Site,
    Table,
    format_bytes,
    format_seconds,
    is_event,
    phase_table,
    record_cells,
    sites_of,
    summary_table,
)

Runs = Sequence[tuple[str, Sequence[Row]]]  # name, rows

WIDTH, HEIGHT = 920, 250
LEFT, RIGHT, TOP, BOTTOM = 84, 12, 14, 30
_MOST_POINTS = 460  # more do not fit: of neighbours the highest is shown
_MOST_LINES = 200  # of a table
_PHASES = ("forward", "backward", "optimizer")  # recovery allocates next to nothing
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")

escape = html.escape


# --- charts ---------------------------------------------------------------------------


class Line:
    """One line of a chart: a value, or None, for each step."""

    def __init__(self, name: str, style: str, values: Sequence[float | None]) -> None:
        self.name, self.style, self.values = name, style, values

    def thinned(self, width: int) -> list[float | None]:
        kept: list[float | None] = []
        for start in range(0, len(self.values), width):
            part = [v for v in self.values[start : start + width] if v is not None]
            kept.append(max(part) if part else None)
        return kept


def _ticks(top: float, unit: float) -> list[float]:
    """Four or five round values from 0, of 1, 2 or 5 times a power of 10 of the unit."""
    raw = max(top, 1e-12) / unit / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw) * unit
    return [i * step for i in range(int(top / step) + 1)]


def _unit(top: float) -> float:
    return next((float(u) for u in (1 << 30, 1 << 20, 1 << 10) if top >= u), 1.0)


def _grid(
    ticks: Iterable[float], y: Callable[[float], float], text: Callable[[float | None], str]
) -> list[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" '
        f'y2="{y(tick):.1f}"/><text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" '
        f'text-anchor="end">{escape(_tick_text(tick, text))}</text>'
        for tick in ticks
    ]


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    path, pen = [], "M"
    for x, y in zip(xs, ys, strict=False):
        if y is None:
            pen = "M"
            continue
        # One that stands alone is seen, too.
        path.append(f"{pen}{x:.1f} {y:.1f}{'h.1' * (pen == 'M')}")
        pen = "L"
    return "".join(path)


def chart(
    title: str,
    steps: Sequence[Any],
    lines: Sequence[Line],
    text: Callable[[float | None], str],
    marks: Iterable[tuple[int, str]] = (),
    binary: bool = True,
) -> str:
    """An SVG with its legend; `marks` are (index, what happened) under the lines."""
    width = max(1, math.ceil(len(steps) / _MOST_POINTS))
    thin = [(line, line.thinned(width)) for line in lines]
    known = [v for _, values in thin for v in values if v is not None]
    if not known:
        return ""
    top = 1.08 * max(known) or 1.0
    count = math.ceil(len(steps) / width)

    def x(at: float) -> float:
        return LEFT + (at + 0.5) * (WIDTH - LEFT - RIGHT) / count

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)

    parts = _grid(_ticks(top, _unit(top) if binary else 1.0), y, text)
    every = max(1, math.ceil(count / 10))
    parts += [
        f'<text x="{x(at):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{steps[at * width]}</text>'
        for at in range(0, count, every)
    ]
    happened = dict.fromkeys((i // width for i, _ in marks), "")
    for i, what in marks:
        happened[i // width] = what
    parts += [
        f'<path class="mark" d="M{x(at):.1f} {HEIGHT - BOTTOM - 9}l5 9h-10z">'
        f"<title>step {steps[at * width]}: {escape(what)}</title></path>"
        for at, what in happened.items()
    ]
    for line, values in thin:
        path = _path([x(at) for at in range(count)], [None if v is None else y(v) for v in values])
        parts.append(f'<path class="line {line.style}" d="{path}"/>')
    points = [
        [
            round(x(at), 1),
            f"step {steps[at * width]}: "
            + ", ".join(f"{line.name} {text(values[at])}" for line, values in thin)
            + (f". {happened[at]}" if at in happened else ""),
        ]
        for at in range(count)
    ]
    legend = "".join(
        f'<li><span class="key {line.style}"></span>{escape(line.name)}</li>' for line in lines
    )
    if happened:
        legend += '<li><span class="key mark"></span>event</li>'
    summary = f"{title}, {len(steps)} steps, highest {text(max(known))}"
    return _figure(title, summary, points, "".join(parts), legend)


def _figure(title: str, summary: str, points: list[Any], drawn: str, legend: str) -> str:
    return (
        f'<figure class="chart" tabindex="0" role="group" aria-label="{escape(summary)}. '
        f'Arrow keys read it step by step." data-points="{escape(json.dumps(points))}">'
        f"<figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}">'
        f'{drawn}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        f'<ul class="legend">{legend}</ul><output aria-live="polite"></output></figure>'
    )


def _tick_text(value: float, text: Callable[[float | None], str]) -> str:
    return "0" if value == 0 else text(value).replace(".00 ", " ")


def _bytes(value: float | None) -> str:
    return format_bytes(None if value is None else int(value))


def _what(row: Row) -> str:
    """What happened in a step, in a few words."""
    outcome = row.get("outcome", "finished")
    said = [f"{row['ooms']} OOM{'s' * (row['ooms'] != 1)}"] if row["ooms"] else []
    rows, parts = row["micro_batch_size"], row["accumulation_steps"]
    if rows is not None and row["batch_size"] is not None:
        said.append(f"{row['batch_size']} rows in {parts} × {rows}")
    said.append(f"reason {row.get('reason')}" if outcome == "finished" else outcome)
    return ", ".join(said)


def _events(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    before: list[Row | None] = [None, *rows[:-1]]
    return [
        (i, row) for i, (b, row) in enumerate(zip(before, rows, strict=True)) if is_event(b, row)
    ]


def peaks(site: Site) -> str:
    """The peak of every step, of each phase where that was measured."""
    rows = site.rows
    names = [n for n in _PHASES if any(n in (row.get("phases") or {}) for row in rows)]
    lines = [
        Line(
            name,
            name,
            [(row.get("phases") or {}).get(name, {}).get("peak_allocated") for row in rows],
        )
        for name in names
    ] or [Line("peak", "peak", [row["peak_allocated"] for row in rows])]
    if any(row["budget"] is not None for row in rows):
        lines.append(Line("limit", "limit", [row["budget"] for row in rows]))
    title = "Peak allocated by phase" if names else "Peak allocated"
    marks = [(i, _what(row)) for i, row in _events(rows)]
    return chart(title, [row["step"] for row in rows], lines, _bytes, marks)


def times(site: Site) -> str:
    rows = site.rows
    lines = [
        Line("time", "peak", [row["time"] for row in rows]),
        Line("time lost", "limit", [row["time_lost"] for row in rows]),
    ]
    return chart("Time", [row["step"] for row in rows], lines, format_seconds, binary=False)


# --- tables ---------------------------------------------------------------------------


def table(caption: str, lines: Table, names: int = 1) -> str:
    """`names` columns are read from the left."""
    head, *rest = lines

    def cells(line: Sequence[str], first: str) -> str:
        out = []
        for i, cell in enumerate(line):
            tag = first if i < names else "td"
            scope = ' scope="row"' if tag == "th" else ""
            out.append(f"<{tag}{scope}>{escape(cell)}</{tag}>")
        return "<tr>" + "".join(out) + "</tr>"

    columns = "".join(
        f'<th scope="col"{" class=name" if i < names else ""}>{escape(cell)}</th>'
        for i, cell in enumerate(head)
    )
    body = "".join(cells(line, "th") for line in rest)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _steps(caption: str, rows: Sequence[Row]) -> str:
    shown = rows[-_MOST_LINES:]
    if len(shown) < len(rows):
        caption += f": the last {len(shown)} of {len(rows)}"
    return table(caption, [RECORD_HEAD, *map(record_cells, shown)])


def section(number: int, site: Site) -> str:
    events = [row for _, row in _events(site.rows)]
    parts = [f'<section id="s{number}"><h2>{escape(site.label)}</h2>', peaks(site)]
    phases = phase_table([site])
    if phases:
        parts.append(table("Phases", [line[1:] for line in phases]))
    parts.append(times(site))
    parts.append(_steps("Events", events) if events else "<p>No events.</p>")
    parts.append(
        f"<details><summary>All steps</summary>{_steps('Steps', site.rows)}</details></section>"
    )
    return "".join(parts)


# --- two runs -------------------------------------------------------------------------

_COMPARED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("steps", "steps", str),
    ("OOMs", "ooms", str),
    ("retries", "retries", str),
    ("plan changes", "plan_changes", str),
    ("peak p50", "peak_p50", format_bytes),
    ("peak max", "peak_allocated", format_bytes),
    ("time p50", "time_p50", format_seconds),
    ("time p95", "time_p95", format_seconds),
    ("time lost", "time_lost", format_seconds),
)


def _difference(one: Any, other: Any) -> str:
    if one is None or other is None:
        return "-"
    if one == other:
        return "same"
    if isinstance(one, int) and max(one, other) < 1000:  # a count
        return f"{other - one:+d}"
    return f"{100 * (other / one - 1):+.1f} %" if one else "-"


def comparison(names: Sequence[str], runs: Sequence[Mapping[str, Site]]) -> str:
    """The labels that both runs have, figure by figure, and their peaks in one chart."""
    parts = ['<section id="comparison"><h2>Comparison</h2>']
    shared = [label for label in runs[0] if label in runs[1]]
    if not shared:
        parts.append("<p>The two runs have no label in common.</p>")
    for label in shared:
        one, other = (run[label] for run in runs)
        lines: Table = [("figure", *names, "difference")]
        for name, key, text in _COMPARED:
            values = one.summary[key], other.summary[key]
            lines.append((name, *map(text, values), _difference(*values)))
        longest = max(one.rows, other.rows, key=len)
        of = [
            Line(
                name,
                style,
                [row["peak_allocated"] for row in site.rows]
                + [None] * (len(longest) - len(site.rows)),
            )
            for name, style, site in zip(names, ("first", "second"), (one, other), strict=True)
        ]
        steps = [row["step"] for row in longest]
        parts.append(f"<h3>{escape(label)}</h3>")
        parts.append(chart(f"Peak allocated: {label}", steps, of, _bytes))
        parts.append(table(f"{label}: {names[0]} and {names[1]}", lines))
    return "".join(parts) + "</section>"


# --- the page -------------------------------------------------------------------------


def page(runs: Runs) -> str:
    """The whole page, of (name, rows) for each file."""
    several = len(runs) > 1
    by_run = [{site.label: site for site in sites_of(list(rows))} for _, rows in runs]
    sites = [
        Site(f"{name}: {site.label}" if several else site.label, site.summary, site.rows)
        for (name, _), found in zip(runs, by_run, strict=True)
        for site in found.values()
    ]
    names = [name for name, _ in runs]
    links = [(f"s{i}", site.label) for i, site in enumerate(sites)]
    body = [table("Summary", summary_table(sites))] if sites else ["<p>No records.</p>"]
    if len(runs) == 2 and sites:
        links.insert(0, ("comparison", "Comparison"))
        body.append(comparison(names, by_run))
    body += [section(i, site) for i, site in enumerate(sites)]
    menu = "".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in links)
    title = "oomkit: " + ", ".join(names)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>Memory of a run</h1><p>{escape(', '.join(names))}</p>"
        f'<nav aria-label="Contents"><ul>{menu}</ul></nav></header>'
        f'<main id="main" tabindex="-1">{"".join(body)}</main><script>{_SCRIPT}</script>'
        "</body></html>\n"
    )
