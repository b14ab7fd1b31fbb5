"""All programs, those that wait for a part of oomkit, and docs/evidence/programs.md."""

from __future__ import annotations

import re
from pathlib import Path

from . import bindings, callers, coupled, deciders, trainers, updates, workers
from .data import batches, collators, lengths, samples
from .harness import Report
from .models import (
    detection,
    generative,
    graphs,
    hugging_face,
    memories,
    sequence,
    timm_like,
    vision,
)
from .world import COMPARISONS, PROGRAMS, Program

TABLE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "programs.md"

FAMILIES = (
    vision,
    timm_like,
    detection,
    generative,
    sequence,
    lengths,
    coupled,
    memories,
    updates,
    deciders,
    callers,
    hugging_face,
    collators,
    trainers,
    batches,
    samples,
    graphs,
    bindings,
    workers,
)


# Programs that do not come out as stated, and why. A test fails when one of them does come
# out: then its line here has to go.
PENDING: dict[str, str] = {}

_HEAD = Path(__file__).with_name("head.md").read_text(encoding="utf-8")


def expected(program: Program) -> str:
    """The cell of the table that a test compares."""
    equals = f"equal to {COMPARISONS[program.compare]}"
    if program.outcome == "said":
        return f"warned; {equals}"
    if program.outcome == "refused":
        return f"refused, or {equals}" if program.or_equal else "refused"
    return equals


def line(program: Program, report: Report | None) -> str:
    """One line; without a report the program waits for something."""
    if report is None:
        found = ["not yet", PENDING[program.name], ""]
    else:
        number = sum(report.places.values())
        kinds = ", ".join(f"{n} {kind}" for kind, n in report.places.most_common())
        split = "replayed" in report.places
        found = [report.healthy, f"{number}: {kinds}", f"{report.worst:.1e}" if split else ""]
    healthy, places, worst = found
    code, where = re.fullmatch(r"([@\w.]+(?:\(.*\))?)(, .*)?", program.decorated).groups("")
    cells = [
        f"`{program.name}`",
        program.shows,
        f"`{code}`{where}",
        healthy,
        expected(program),
        places,
        worst,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(reports: dict[str, Report]) -> str:
    """The whole page."""
    parts = [_HEAD]
    columns = (
        "program | what it shows | decorated as | without OOM | with OOM | places | difference"
    )
    for family in FAMILIES:
        heading, _, of = (family.__doc__ or "").strip().rstrip(".").partition(": ")
        name = family.__name__.rpartition(".")[2]
        lines = [line(p, reports.get(p.name)) for p in PROGRAMS.values() if p.family == name]
        parts.append(
            f"## {heading}{': ' + of if of else ''}\n\n| {columns} |\n"
            f"|{'---|' * 7}\n" + "\n".join(lines) + "\n"
        )
    return "\n".join(parts)


def listed(text: str) -> dict[str, str]:
    """Programs and expected outcomes, as a page has them."""
    cells = (re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines())
    return {c[0].strip("`"): c[4] for c in cells if len(c) >= 5 and c[0].startswith("`")}
