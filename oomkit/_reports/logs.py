"""What oomkit's logger prints where nobody has set up logging, and its last line.

The logger is "oomkit" ("oomkit.steps" for the sink). Where any other handler is there, on it or
above, this module prints nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from .. import _C
from ..report import _plural, format_bytes, format_seconds

log = logging.getLogger("oomkit")
SWITCH = "OOMKIT_SUMMARY"  # environment: "0" for no line at the end


def _is_alone() -> bool:
    """Would nobody else print a record of our logger?"""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler is not FALLBACK for handler in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


class Fallback(logging.Handler):
    """Warnings on stderr, with our name in front: logging's own last resort has none."""

    def emit(self, record: logging.LogRecord) -> None:
        if _is_alone():
            try:
                print(f"oomkit: {record.getMessage()}", file=sys.stderr)
            except Exception:
                self.handleError(record)


FALLBACK = Fallback(logging.WARNING)


def summary() -> list[str]:
    """A line for each label that has met an out-of-memory error."""
    lines = []
    for label, total, _ in _C.histories():
        if total.ooms:
            lines.append(
                f"{label}: {_plural(total.steps, 'step')}, {_plural(total.ooms, 'OOM')}, "
                f"{_plural(total.retries, 'retry').replace('retrys', 'retries')}, highest peak "
                f"{format_bytes(total.peak_allocated)}, time lost {format_seconds(total.time_lost)}"
            )
    return lines


def _at_exit() -> None:
    if os.environ.get(SWITCH, "1") != "0":
        for line in summary():
            log.warning("%s", line)


def set_up() -> None:
    """Once, when oomkit is imported."""
    if FALLBACK not in log.handlers:
        log.addHandler(FALLBACK)
        atexit.register(_at_exit)
