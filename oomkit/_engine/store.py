"""The file of oomkit.sizes: reading, merging, replacing. Plain values, and never pickle.

What is written replaces the file at once, so that readers need no lock; writers take one
that dies with its process, and merge with what others have written meanwhile. Any of this
may fail without harm to the training: one warning for each thing that is wrong, and it goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import _C

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
MOST_ENTRIES = 1000
MOST_BYTES = 16 * 2**20
OLDEST = 90 * 24 * 3600.0  # seconds since a run has used an entry
REFRESH = 24 * 3600  # seconds after which a use is worth a write of its own
INTERVAL = 10.0  # seconds between two writes of a run; the last one is made at its end
PATIENCE = 0.05  # seconds to wait for another writer during training
PATIENCE_AT_EXIT = 5.0

Entry = dict[str, Any]

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "function": str,
    "code": str,
    "device": str,
    "torch": str,
    "parameters": list,
    "budget": (int, type(None)),
    "used": int,
    "sizes": dict,
}


@dataclass(frozen=True, slots=True)
class Key:
    """What a step's sizes go by, but for the shape of the batch and the budget."""

    function: str
    code: str
    device: str
    torch: str
    parameters: tuple[int, int]


class NotOurs(Exception):
    """A file that is to stay as it is: newer, or somebody else's. The message says why."""


# --- state of this process ------------------------------------------------------------

_pending: dict[tuple[Any, ...], Entry] = {}
_said: set[str] = set()
_lock = threading.Lock()  # one write at a time
_cache: tuple[tuple[Any, ...], list[Entry]] | None = None
_written_at: float | None = None
_registered = False
_alone: set[str] = set()  # files that are not ours: nothing is written there

# RuntimeError: a user without a home.
_TROUBLE = (OSError, RuntimeError)


def _forget_in_child() -> None:
    """A forked child has none of the parent's notes to write, and none of its locks."""
    global _lock, _registered
    _lock = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _say(what: str, text: str) -> None:
    """One warning for each thing that is wrong. Never raises: a step may be done already."""
    if what in _said:
        return
    _said.add(what)
    try:
        warnings.warn(f"oomkit: {text}", _C.OomkitWarning, stacklevel=2)
    except _C.OomkitWarning:  # warnings are errors here, and this one must not end a run
        logging.getLogger("oomkit").warning("%s", text)


def path() -> Path:
    """Where the file is, or would be."""
    given = os.environ.get("OOMKIT_CACHE_DIR")
    if given:
        return Path(given).expanduser() / "sizes.json"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
    return base / "oomkit" / "sizes.json"


# --- reading --------------------------------------------------------------------------


def _identity(entry: Entry) -> tuple[Any, ...]:
    """Two entries of the same identity are one: the later one counts."""
    return (
        *(entry[name] for name in ("function", "code", "device", "torch")),
        *entry["parameters"],
        entry["budget"],
        entry["sizes"]["signature"],
    )


def _check(entry: Any, now: int) -> Entry:
    """An entry as it may be used; ValueError says what is wrong with it."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
        raise ValueError("an entry has other fields than those of this version")
    for name, kind in _FIELDS.items():
        if not isinstance(entry[name], kind) or isinstance(entry[name], bool):
            raise ValueError(f"{name!r} is {entry[name]!r:.100}")
    whole = [*entry["parameters"], entry["used"], entry["budget"] or 0]
    if len(entry["parameters"]) != 2 or not all(type(n) is int and 0 <= n < 2**60 for n in whole):
        raise ValueError("numbers of an entry are out of range")
    _C._check_sizes(entry["sizes"])
    # A clock that was ahead must not keep an entry for ever, nor outlive all others.
    return {**entry, "used": min(entry["used"], now)}


def _open(file: Path) -> bytes | None:
    """The file's bytes, None where there is none. NotOurs for what we must not touch."""
    try:
        # A pipe in its place would wait for somebody to write.
        number = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    with os.fdopen(number, "rb") as stream:
        about = os.fstat(stream.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise NotOurs("it is not a regular file")
        if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
            raise NotOurs(f"it belongs to user {about.st_uid}")
        if about.st_size > MOST_BYTES:
            raise ValueError(f"it has {about.st_size} bytes")
        return stream.read()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of ours")


def _parse(data: bytes) -> tuple[list[Entry], str]:
    """(entries, what is wrong with others). NotOurs; ValueError for what is no such file."""
    try:
        whole = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(whole, dict) or "oomkit_sizes" not in whole:
        raise NotOurs("it was not written by oomkit")
    version = whole["oomkit_sizes"]
    if type(version) is not int or version != SCHEMA:
        newer = type(version) is int and version > SCHEMA
        raise NotOurs(f"it has version {version!r:.40}, {'a later' if newer else 'not this'} one's")
    if not isinstance(whole.get("entries"), list):
        raise ValueError("it has no list of entries")
    now, found, wrong = int(time.time()), {}, ""
    for entry in whole["entries"]:
        try:
            good = _check(entry, now)
        except ValueError as error:
            wrong = wrong or str(error)
        else:
            found[_identity(good)] = good
    return list(found.values()), wrong


def _read(file: Path) -> tuple[list[Entry], str]:
    """(entries of the file, what is wrong with the rest). NotOurs and OSError leave."""
    try:
        data = _open(file)
        found, wrong = ([], "") if data is None else _parse(data)
    except ValueError as error:
        found, wrong = [], str(error)
    if wrong:
        _say(
            f"broken {file}",
            f"{file} has invalid entries, which are ignored ({wrong}); the next sizes replace the "
            f"file, and the old one is kept as {file.name}.broken"
            f"{_C.see('remembered-sizes')}",
        )
    return found, wrong


def _read_cached(file: Path) -> list[Entry]:
    """The same, once for each state of the file: every step of a program asks for it."""
    global _cache
    try:
        about = os.stat(file)
    except FileNotFoundError:
        return []
    state = (str(file), about.st_ino, about.st_size, about.st_mtime_ns)
    if _cache is None or _cache[0] != state:
        _cache = (state, _read(file)[0])
    return _cache[1]


def _leave_alone(file: Path, error: NotOurs) -> None:
    _alone.add(str(file))
    _say(
        f"alone {file}",
        f"{file} is left as it is, and no sizes are remembered: {error}; set OOMKIT_CACHE_DIR to "
        "a folder of your own, or move the file away"
        f"{_C.see('remembered-sizes')}",
    )


def _cannot(error: Exception) -> None:
    _say(
        "folder",
        f"sizes cannot be remembered ({error}); set OOMKIT_CACHE_DIR to a folder"
        f"{_C.see('remembered-sizes')}",
    )


def entries() -> list[Entry]:
    """All entries: those of the file, and over them the notes of this run."""
    found = {}
    try:
        file = path()
        found = {_identity(entry): entry for entry in _read_cached(file)}
    except NotOurs as error:
        _leave_alone(file, error)
    except _TROUBLE as error:
        _cannot(error)
    return list({**found, **_pending}.values())


def recall(key: Key, budget: int | None) -> tuple[Key | None, list[Entry]]:
    """(key for notes, or None; sizes of each shape: under this budget, else the nearest)."""
    wanted = {**asdict(key), "parameters": list(key.parameters)}
    best: dict[str, tuple[tuple[float, int], Entry]] = {}
    for entry in entries():
        other = entry["budget"]
        if (other is None) != (budget is None) or any(
            entry[name] != value for name, value in wanted.items()
        ):
            continue
        distance = 0.0 if other == budget else abs(other - budget) / max(other, budget, 1)
        rank = (distance, -entry["used"])
        shape = entry["sizes"]["signature"]
        if shape not in best or rank < best[shape][0]:
            best[shape] = (rank, entry)
    latest = sorted(best.values(), key=lambda found: -found[1]["used"])
    return (None if _alone else key), [entry["sizes"] for _, entry in latest]


# --- writing --------------------------------------------------------------------------


_BOUNDS = ("largest_ok", "smallest_failed")


def _same_plan(ours: Entry, theirs: Entry | None) -> bool:
    """Does a note say nothing that the file does not, and is the file's entry fresh?"""
    if theirs is None or ours["used"] - theirs["used"] > REFRESH:
        return False
    names = {"batch", "accumulation_steps", "late", "update_rung"}
    names |= {f"{role}_{name}" for role in ("first", "later") for name in _BOUNDS}
    return all(ours["sizes"].get(name) == theirs["sizes"].get(name) for name in names)


def note(key: Key, budget: int | None, sizes: dict[str, Any]) -> None:
    """Takes a note, to be written soon: at once when none was lately, else at exit."""
    global _registered
    entry = {
        **asdict(key),
        "parameters": list(key.parameters),
        "budget": budget,
        "used": int(time.time()),
        "sizes": sizes,
    }
    name = _identity(entry)
    if _cache is not None and name not in _pending:
        theirs = next((e for e in _cache[1] if _identity(e) == name), None)
        if _same_plan(entry, theirs):
            return
    _pending[name] = entry
    if not _registered:
        _registered = True
        atexit.register(flush)
    if _written_at is None or time.monotonic() - _written_at >= INTERVAL:
        _write(PATIENCE)


def flush() -> None:
    """Writes what has been noted and not been written."""
    if _pending:
        _write(PATIENCE_AT_EXIT)


@contextlib.contextmanager
def _locked(folder: Path, patience: float) -> Iterator[bool]:
    """Holds the writers' lock; False where others held it for too long."""
    number = os.open(folder / "sizes.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until, held = time.monotonic() + patience, False
        while not held:
            try:
                _lock_file(number)
                held = True
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(0.005)
        yield held
    finally:
        if fcntl is not None:
            # A child that was forked meanwhile holds the lock as long as we do not say so.
            fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)


def _lock_file(number: int) -> None:
    if fcntl is not None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt  # pragma: no cover - Windows

    try:
        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError from error


def _merge(old: list[Entry], new: dict[tuple[Any, ...], Entry]) -> list[Entry]:
    """The latest entries of both, as many and as old as may be."""
    now = int(time.time())
    found = {_identity(entry): entry for entry in old}
    found.update(new)
    kept = [entry for entry in found.values() if now - entry["used"] <= OLDEST]
    kept.sort(key=lambda entry: int(entry["used"]))
    return kept[-MOST_ENTRIES:]


def _replace(file: Path, found: list[Entry]) -> None:
    """Puts a new file in the place of the old one, and cleans up after writers that died."""
    for left in file.parent.glob("sizes.json.*.tmp"):  # we hold the lock: none is at work
        with contextlib.suppress(OSError):
            left.unlink()
    # Not synced to the disk, which may take long: a file that a crash of the machine leaves
    # broken is ignored.
    temporary = file.with_name(f"sizes.json.{os.getpid()}.tmp")
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(number, "w", encoding="utf-8") as stream:
        json.dump({"oomkit_sizes": SCHEMA, "entries": found}, stream, indent=0, allow_nan=False)
        stream.write("\n")
    os.replace(temporary, file)


def _update(file: Path, change: Callable[[list[Entry]], list[Entry]], patience: float) -> bool:
    """Reads, changes and replaces the file, alone. False where others are at it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(file.parent, patience) as held:
        if held:
            found, wrong = _read(file)
            if wrong:
                os.replace(file, file.with_name(f"{file.name}.broken"))
            _replace(file, change(found))
    return held


def _write(patience: float) -> None:
    """Writes what is pending; keeps it where another writer is at work. Never raises."""
    global _written_at
    if not _lock.acquire(blocking=False):
        return
    try:
        taken, done = dict(_pending), True
        _written_at = time.monotonic()
        try:
            file = path()
            done = str(file) in _alone or _update(file, lambda old: _merge(old, taken), patience)
        except NotOurs as error:
            _leave_alone(file, error)
        except _TROUBLE as error:
            _cannot(error)
        for name, entry in taken.items():
            if done and _pending.get(name) is entry:
                del _pending[name]
    finally:
        _lock.release()


def clear(wanted: Callable[[Entry], bool], age: float | None) -> int:
    """Takes entries out of the file and the notes; their number. OSError when it cannot."""
    now = int(time.time())
    gone: set[tuple[Any, ...]] = set()

    def chosen(entry: Entry) -> bool:
        return wanted(entry) and (age is None or now - entry["used"] > age)

    def change(old: list[Entry]) -> list[Entry]:
        gone.update(_identity(entry) for entry in old if chosen(entry))
        return [entry for entry in old if not chosen(entry)]

    for name in [name for name, entry in _pending.items() if chosen(entry)]:
        del _pending[name]
        gone.add(name)
    file = path()
    if not file.exists():
        return len(gone)
    try:
        done = _update(file, change, PATIENCE_AT_EXIT)
    except NotOurs as error:
        raise OSError(f"{file} is left as it is: {error}{_C.see('remembered-sizes')}") from None
    if not done:
        raise OSError(f"{file} is in use by another process{_C.see('remembered-sizes')}")
    return len(gone)
