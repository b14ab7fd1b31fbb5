"""The records of all ranks side by side: who needed most, and who caused each retry."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _C

Row = Mapping[str, Any]

_EVENTS = 10

HEAD = (
    "label",
    "steps",
    "OOMs",
    "by rank",
    "retries",
    "highest peak",
    "of rank",
    "longest step",
    "of rank",
    "time lost",
)
EVENT_HEAD = (
    "label",
    "step",
    "OOMs of rank",
    "accumulation steps",
    "highest peak",
    "of rank",
    "time",
    "outcome",
)


def own_rank() -> int | None:
    """This process's rank in the default group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    rank: int = distributed.get_rank()
    return rank


def gathered(sites: Sequence[tuple[str, Row, Sequence[Row]]], group: Any) -> list[Any] | None:
    """(label, summary, records) of every rank, on the first rank of the group; else None."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "report(group=...) needs torch.distributed.init_process_group() first"
            f"{_C.see('distributed')}"
        )
    group = dist.group.WORLD if group is True else group
    first = dist.get_process_group_ranks(group)[0]
    mine = [(label, dict(summary), [dict(row) for row in rows]) for label, summary, rows in sites]
    found: list[Any] | None = (
        [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    )
    dist.gather_object(mine, found, dst=first, group=group)
    return found


def _most(values: Sequence[Any]) -> tuple[Any, str]:
    """The largest, and the ranks that have it."""
    known = [v for v in values if v is not None]
    largest = max(known, default=None)
    ranks = [str(rank) for rank, v in enumerate(values) if v is not None and v == largest]
    return largest, "-" if not known else "all" if len(ranks) == len(values) else ", ".join(ranks)


def _spread(values: Sequence[Any]) -> str:
    """What ranks have, once where they agree."""
    some = sorted({v for v in values if v is not None})
    return "-" if not some else str(some[0]) if len(some) == 1 else f"{some[0]} to {some[-1]}"


def _causes(counts: Sequence[int]) -> str:
    return ", ".join(f"{rank}: {n}" for rank, n in enumerate(counts) if n) or "-"


def tables(
    ranks: Sequence[Any], size: Any, seconds: Any
) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(title, table), with `size` and `seconds` to format."""
    by_label: dict[str, dict[int, tuple[Row, Sequence[Row]]]] = {}
    for rank, sites in enumerate(ranks):
        for label, summary, rows in sites:
            by_label.setdefault(label, {})[rank] = summary, rows
    overview: list[tuple[str, ...]] = [HEAD]
    events: list[tuple[float, tuple[str, ...]]] = []
    for label, of in by_label.items():
        total = [of[rank][0] if rank in of else {} for rank in range(len(ranks))]
        ooms = [int(t.get("ooms") or 0) for t in total]
        peak, peak_of = _most([t.get("peak_allocated") for t in total])
        time, time_of = _most([t.get("time_max") for t in total])
        overview.append(
            (
                label,
                _spread([t.get("steps") for t in total]),
                str(sum(ooms)),
                _causes(ooms),
                _spread([t.get("retries") for t in total]),
                size(peak),
                peak_of,
                seconds(time),
                time_of,
                seconds(max((t.get("time_lost") or 0.0 for t in total), default=None)),
            )
        )
        events += _events(label, of, len(ranks), size, seconds)
    found: list[tuple[str, list[tuple[str, ...]]]] = [(f"{len(ranks)} ranks", overview)]
    if events:
        last = [cells for _, cells in sorted(events, key=lambda event: event[0])[-_EVENTS:]]
        found.append(("steps that met an error, on any rank", [EVENT_HEAD, *last]))
    return found


def _events(
    label: str, of: Mapping[int, tuple[Row, Sequence[Row]]], count: int, size: Any, seconds: Any
) -> list[tuple[float, tuple[str, ...]]]:
    steps: dict[int, dict[int, Row]] = {}
    for rank, (_, rows) in of.items():
        for row in rows:
            steps.setdefault(row["step"], {})[rank] = row
    found: list[tuple[float, tuple[str, ...]]] = []
    for step, rows_of in steps.items():
        rows = [rows_of.get(rank, {}) for rank in range(count)]
        if all((row.get("attempts") or 1) == 1 for row in rows):
            continue
        peak, peak_of = _most([row.get("peak_allocated") for row in rows])
        cells = (
            label,
            str(step),
            _causes([row.get("ooms") or 0 for row in rows]),
            _spread([row.get("accumulation_steps") for row in rows]),
            size(peak),
            peak_of,
            seconds(max((row.get("time") or 0.0 for row in rows), default=None)),
            _spread([row.get("outcome") for row in rows]),
        )
        found.append((max(row.get("started") or 0.0 for row in rows), cells))
    return found
