"""How much host memory is to be had, without a dependency."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):  # "max", or not there
        return None


def _free_of_the_machine() -> int | None:
    """Bytes that could be allocated without swapping (``MemAvailable``)."""
    try:
        with _MEMINFO.open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or hidden: the rest is asked
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


_Group = tuple[Path, str, str]
"""A control group's folder, and the names of its files of memory."""


def _with_those_above(top: Path, path: str, limit: str, used: str) -> list[_Group]:
    """A limit of any of them holds: SLURM's, for one, is that of a job, above its tasks' groups."""
    own = Path(path.lstrip("/"))
    if ".." in own.parts:  # of a group outside this process's namespace: none can be seen
        own = Path()
    return [(top / folder, limit, used) for folder in (own, *own.parents)]


def _groups() -> list[_Group]:
    """The control groups of this process."""
    second = (_CGROUP, "memory.max", "memory.current")
    first = (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    found = [second, first]
    try:
        own = _OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in own:
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds == "":
            found += _with_those_above(second[0], path, *second[1:])
        elif "memory" in kinds.split(","):
            found += _with_those_above(first[0], path, *first[1:])
    return found


def _kept_by_torch() -> int:
    """Bytes of pinned memory that nothing uses: torch keeps them for what asks next."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    try:
        torch.cuda.synchronize()  # a block counts as used until its copies have ended
        torch.empty(1, pin_memory=True)  # and torch has seen that, which it does here
    except RuntimeError:
        return 0
    found = torch.cuda.host_memory_stats()
    used = found.get("active_bytes.current")
    return 0 if used is None else int(found["allocated_bytes.current"] - used)


def available() -> int | None:
    """Bytes of host memory that this process may still take, ``None`` where that is not known.

    The least of what the machine has available (``/proc/meminfo``) and what the control groups
    of this process leave (version 2 and 1), and the pinned memory that torch keeps. That serves
    sizes that were asked for before: more than half of the rest is given back first.
    """
    left, kept = _left(), _kept_by_torch()
    if left is not None and kept > left // 2:
        torch._C._host_emptyCache()
        left, kept = _left(), _kept_by_torch()
    return None if left is None else left + kept


def _left() -> int | None:
    figures = [_free_of_the_machine()]
    for folder, limit_name, used_name in _groups():
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            figures.append(max(limit - used, 0))
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None
