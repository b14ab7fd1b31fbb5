"""The store of remembered sizes without what this process knows."""

from __future__ import annotations

from oomkit._engine import store as _store


def fresh() -> None:
    """As in a new process."""
    _store._pending.clear()
    _store._said.clear()
    _store._alone.clear()
    _store._cache = None
    _store._written_at = None
