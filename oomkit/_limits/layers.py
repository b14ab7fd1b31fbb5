"""A device's limit in two layers: what the user has set, and what reservations add up to.

In force is the least of the two. Each is changed by itself, in any order and by any thread: the
end of a `limit_memory` block undoes no reservation, nor the other way round. While there is no
reservation the user's layer is the limit itself, wherever it comes from.

All of it may be interrupted at any line and called again: what is in force is reckoned anew.
"""

from __future__ import annotations

import os
import threading

from .. import _C
from . import cuda as _limits

Key = tuple[int, int]  # c10::DeviceType and the device's number

# Reentrant: the collector may end a forgotten reservation in the middle of the next lines.
mutex = threading.RLock()
_reserved: dict[Key, dict[int, int]] = {}  # device -> id of a reservation -> its bytes
_of_user: dict[Key, int | None] = {}  # of devices in _reserved


def _forget_in_child() -> None:
    """A child has none of its parent's reservations; its limits begin anew, too."""
    global mutex
    mutex = threading.RLock()
    _reserved.clear()
    _of_user.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _get(key: Key) -> int | None:
    if key[0] == 0:
        limit: int | None = _C.cpu_stats()["limit"]
        return limit
    return _C.device_budget(*key)


def _put(key: Key, limit: int | None) -> None:
    if key[0] == 0:
        _C.cpu_set_limit(limit)
    else:
        _limits.set_limit(key[1], limit)


def _put_least(key: Key) -> None:
    limit = _of_user[key]
    sizes = list(_reserved[key].values())
    if sizes:
        limit = sum(sizes) if limit is None else min(sum(sizes), limit)
    _put(key, limit)
    if not sizes:  # last: a layer that is forgotten before is one that stays for ever
        del _reserved[key]
        del _of_user[key]


def get_user(key: Key) -> int | None:
    """The limit that is in force but for reservations."""
    with mutex:
        return _of_user[key] if key in _reserved else _get(key)


def set_user(key: Key, limit: int | None) -> None:
    if not _reserved:  # the way that needs no memory: it may end a block that is out of it
        _put(key, limit)
        return
    with mutex:
        if key not in _reserved:
            _put(key, limit)
            return
        before, _of_user[key] = _of_user[key], limit
        try:
            _put_least(key)
        except BaseException:  # refused: as if it had not been asked for
            if key in _of_user:
                _of_user[key] = before
            raise


def reserve(key: Key, who: int, size: int) -> None:
    """More for a reservation. Where it fails or is interrupted `release` takes it back."""
    with mutex:
        if key not in _reserved:
            _of_user[key] = _get(key)
            _reserved[key] = {}
        _reserved[key][who] = size
        _put_least(key)


def release(key: Key, who: int) -> None:
    """What `reserve` has done, whole or in part, is undone. May be repeated."""
    with mutex:
        if key in _reserved:
            _reserved[key].pop(who, None)
            _put_least(key)
