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


def gathered(sites: Sequence[tuple[str, Row, Sequence[Row]]], group: Any) -> dict[int, Any] | None:
    """(label, summary, records) of every rank of the group, by its number in the default one, on
    the first of them; else None."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "report(group=...) needs torch.distributed.init_process_group() first"
            f"{_C.see('distributed')}"
        )
    group = dist.group.WORLD if group is True else group
    members = dist.get_process_group_ranks(group)
    mine = [(label, dict(summary), [dict(row) for row in rows]) for label, summary, rows in sites]
    found: list[Any] | None = [None] * len(members) if dist.get_rank() == members[0] else None
    dist.gather_object(mine, found, dst=members[0], group=group)
    return None if found is None else dict(zip(members, found, strict=True))


def _most(values: Mapping[int, Any]) -> tuple[Any, str]:
    """The largest, and the ranks that have it."""
    known = [v for v in values.values() if v is not None]
    largest = max(known, default=None)
    ranks = [str(rank) for rank, v in values.items() if v is not None and v == largest]
    return largest, "-" if not known else "all" if len(ranks) == len(values) else ", ".join(ranks)


def _spread(values: Mapping[int, Any]) -> str:
    """What ranks have, once where they agree."""
    some = sorted({v for v in values.values() if v is not None})
    return "-" if not some else str(some[0]) if len(some) == 1 else f"{some[0]} to {some[-1]}"


def _causes(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{rank}: {n}" for rank, n in counts.items() if n) or "-"


def _by_rank(name: str, of: Mapping[int, Row]) -> dict[int, Any]:
    return {rank: row.get(name) for rank, row in of.items()}


def tables(
    ranks: Mapping[int, Any], size: Any, seconds: Any
) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(title, table), with `size` and `seconds` to format."""
    by_label: dict[str, dict[int, tuple[Row, Sequence[Row]]]] = {}
    for rank, sites in ranks.items():
        for label, summary, rows in sites:
            by_label.setdefault(label, {})[rank] = summary, rows
    overview: list[tuple[str, ...]] = [HEAD]
    events: list[tuple[float, tuple[str, ...]]] = []
    for label, of in by_label.items():
        total = {rank: of[rank][0] if rank in of else {} for rank in ranks}
        ooms = {rank: int(n or 0) for rank, n in _by_rank("ooms", total).items()}
        peak, peak_of = _most(_by_rank("peak_allocated", total))
        time, time_of = _most(_by_rank("time_max", total))
        overview.append(
            (
                label,
                _spread(_by_rank("steps", total)),
                str(sum(ooms.values())),
                _causes(ooms),
                _spread(_by_rank("retries", total)),
                size(peak),
                peak_of,
                seconds(time),
                time_of,
                seconds(max((t.get("time_lost") or 0.0 for t in total.values()), default=None)),
            )
        )
        events += _events(label, of, list(ranks), size, seconds)
    found: list[tuple[str, list[tuple[str, ...]]]] = [(f"{len(ranks)} ranks", overview)]
    if events:
        last = [cells for _, cells in sorted(events, key=lambda event: event[0])[-_EVENTS:]]
        found.append(("steps that met an error, on any rank", [EVENT_HEAD, *last]))
    return found


def _events(
    label: str,
    of: Mapping[int, tuple[Row, Sequence[Row]]],
    ranks: Sequence[int],
    size: Any,
    seconds: Any,
) -> list[tuple[float, tuple[str, ...]]]:
    steps: dict[int, dict[int, Row]] = {}
    for rank, (_, records) in of.items():
        for row in records:
            steps.setdefault(row["step"], {})[rank] = row
    found: list[tuple[float, tuple[str, ...]]] = []
    for step, rows_of in steps.items():
        rows = {rank: rows_of.get(rank, {}) for rank in ranks}
        if all((row.get("attempts") or 1) == 1 for row in rows.values()):
            continue
        peak, peak_of = _most(_by_rank("peak_allocated", rows))
        cells = (
            label,
            str(step),
            _causes({rank: row.get("ooms") or 0 for rank, row in rows.items()}),
            _spread(_by_rank("accumulation_steps", rows)),
            size(peak),
            peak_of,
            seconds(max((row.get("time") or 0.0 for row in rows.values()), default=None)),
            _spread(_by_rank("outcome", rows)),
        )
        found.append((max(row.get("started") or 0.0 for row in rows.values()), cells))
    return found
