"""The file of remembered sizes: what it takes in, what it refuses, how it is written."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import message_of
from helpers.new_store import fresh

import oomkit
from oomkit import sizes
from oomkit.__main__ import main
from oomkit._engine import store as _store

KEY = _store.Key("world.step", "c0de", "cpu", "2.13.0", (4, 1000))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, and a store that knows nothing of other tests."""
    monkeypatch.setenv("OOMKIT_CACHE_DIR", str(tmp_path))
    fresh()
    yield tmp_path
    fresh()


def found(batch: int = 64, k: int = 4, signature: int = 1) -> dict[str, Any]:
    return {
        "signature": f"{signature:016x}",
        "family": "0" * 16,
        "row_bytes": 8.0,
        "batch": batch,
        "accumulation_steps": k,
        "successes": 3,
        "first_largest_ok": batch // k,
        "first_ok_room": 5000,
    }


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "function": KEY.function,
        "code": KEY.code,
        "device": KEY.device,
        "torch": KEY.torch,
        "parameters": [4, 1000],
        "budget": 9000,
        "used": int(time.time()) - 60,
        "sizes": found(),
    } | changes


def put(folder: Path, entries: Any, version: Any = 1) -> bytes:
    data = json.dumps({"oomkit_sizes": version, "entries": entries}).encode()
    (folder / "sizes.json").write_bytes(data)
    return data


def recall(budget: int | None = 9000, key: _store.Key = KEY) -> list[dict[str, Any]]:
    return _store.recall(key, budget)[1]


def warned(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    assert all(w.category is oomkit.OomkitWarning for w in caught)
    return [message_of(w.message) for w in caught]


# --- where, and for whom ---


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sizes.path() == tmp_path / "sizes.json"
    monkeypatch.delenv("OOMKIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert sizes.path() == Path("/x/oomkit/sizes.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by that standard
    monkeypatch.setenv("HOME", "/home/me")
    assert sizes.path() == Path("/home/me/.cache/oomkit/sizes.json")


def test_a_note_is_there_at_once_and_for_its_user_alone(folder: Path) -> None:
    _store.note(KEY, 9000, found())
    fresh()
    assert recall() == [found()]
    assert stat.S_IMODE((folder / "sizes.json").stat().st_mode) == 0o600
    assert sorted(p.name for p in folder.iterdir()) == ["sizes.json", "sizes.lock"]


def test_writes_are_few(folder: Path) -> None:
    _store.note(KEY, 9000, found())
    before = (folder / "sizes.json").stat().st_mtime_ns
    for k in range(5, 9):
        _store.note(KEY, 9000, found(k=k))
    assert (folder / "sizes.json").stat().st_mtime_ns == before
    assert recall()[0]["accumulation_steps"] == 8  # this run knows already
    _store.flush()
    fresh()
    assert recall()[0]["accumulation_steps"] == 8


@pytest.mark.parametrize("name", ["function", "code", "device", "torch", "parameters"])
def test_other_circumstances_are_others(folder: Path, name: str) -> None:
    put(folder, [entry()])
    other: Any = (4, 1001) if name == "parameters" else "other"
    fields = {n: getattr(KEY, n) for n in ("function", "code", "device", "torch", "parameters")}
    assert recall() != []
    assert recall(key=_store.Key(**{**fields, name: other})) == []


def test_the_nearest_budget_serves_where_there_is_none_of_its_own(folder: Path) -> None:
    near, far = found(k=4), found(k=2)
    put(folder, [entry(budget=8000, sizes=near), entry(budget=90000, sizes=far)])
    assert recall(9000) == [near]
    assert recall(80000) == [far]
    assert recall(8000) == [near]
    assert recall(None) == []  # what the device itself leaves is another matter


def test_a_use_is_written_once_a_day(folder: Path) -> None:
    put(folder, [entry()])
    recall()
    _store.note(KEY, 9000, {**found(), "first_bytes_1": 9, "first_rows_1": 16})
    assert not _store._pending and not (folder / "sizes.lock").exists()
    put(folder, [entry(used=int(time.time()) - 2 * 24 * 3600)])
    recall()
    _store.note(KEY, 9000, found())
    assert time.time() - json.loads((folder / "sizes.json").read_text())["entries"][0]["used"] < 60


# --- what is wrong with a file ---

BROKEN_FILES = {
    "empty": b"",
    "cut off": json.dumps({"oomkit_sizes": 1, "entries": [entry()]}).encode()[:-20],
    "bytes": bytes(range(256)),
    "not a number": b'{"oomkit_sizes": 1, "entries": [NaN]}',
    "deep": b"[" * 100000,
    "endless number": b'{"oomkit_sizes": 1, "entries": [' + b"9" * 5000 + b"]}",
    "no entries": b'{"oomkit_sizes": 1}',
}
BROKEN_ENTRIES: dict[str, Any] = {
    "a number": 3,
    "no budget": {k: v for k, v in entry().items() if k != "budget"},
    "more": entry(more=1),
    "negative use": entry(used=-1),
    "use by half": entry(used=1.5),
    "true": entry(budget=True),
    "huge budget": entry(budget=2**70),
    "parameters": entry(parameters=[1]),
    "text in parameters": entry(parameters=[1, "2"]),
    "sizes": entry(sizes=[]),
    "no signature": entry(sizes={"batch": 64, "accumulation_steps": 2}),
    "short signature": entry(sizes=found() | {"signature": "12"}),
    "odd signature": entry(sizes=found() | {"signature": "\udcff" * 16}),
    "unknown": entry(sizes=found() | {"exec": "import os"}),
    "negative": entry(sizes=found() | {"first_largest_ok": -1}),
    "huge": entry(sizes=found() | {"first_ok_room": 2**64 - 1}),
    "very huge": entry(sizes=found() | {"successes": 10**100}),
    "float": entry(sizes=found() | {"batch": 64.0}),
    "infinite": entry(sizes=found() | {"margin": 1e999}),
    "bool": entry(sizes=found() | {"late": True}),
    "margin": entry(sizes=found() | {"margin": 0.9}),
    "row bytes": entry(sizes=found() | {"row_bytes": -1.0}),
    "null": entry(sizes=found() | {"batch": None}),
    "more micro-batches than rows": entry(sizes=found() | {"accumulation_steps": 65}),
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_broken_file_is_ignored_and_kept_aside(folder: Path, kind: str) -> None:
    (folder / "sizes.json").write_bytes(BROKEN_FILES[kind])

    def act() -> None:
        assert recall() == [] and recall() == []
        _store.note(KEY, 9000, found())

    said = warned(act)
    assert len(said) == 1 and str(folder / "sizes.json") in said[0]
    fresh()
    assert warned(recall) == [] and recall() == [found()]
    assert (folder / "sizes.json.broken").read_bytes() == BROKEN_FILES[kind]


@pytest.mark.parametrize("kind", BROKEN_ENTRIES)
def test_a_broken_entry_is_ignored_the_others_are_not(folder: Path, kind: str) -> None:
    good = found(signature=2)
    text = json.dumps({"oomkit_sizes": 1, "entries": [BROKEN_ENTRIES[kind], entry(sizes=good)]})
    (folder / "sizes.json").write_text(text.replace("Infinity", "1e999"))
    said = warned(lambda: recall())
    assert len(said) == 1 and recall() == [good]
    assert [size.batch for size in sizes.list()] == [64]


OTHERS = {
    "newer": b'{"oomkit_sizes": 2, "entries": {"of": "another kind"}}',
    "older": b'{"oomkit_sizes": 0, "entries": []}',
    "odd version": b'{"oomkit_sizes": "1", "entries": []}',
    "somebody else's": b'{"colours": ["red"]}',
    "a list": b"[1, 2]",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_ours_is_left_as_it_is(folder: Path, kind: str) -> None:
    (folder / "sizes.json").write_bytes(OTHERS[kind])

    def act() -> None:
        assert _store.recall(KEY, 9000) == (None, [])
        _store.note(KEY, 9000, found())
        _store.flush()
        recall()

    said = warned(act)
    assert len(said) == 1 and "left as it is" in said[0]
    with pytest.raises(OSError, match="left as it is"):
        sizes.clear()
    fresh()
    warned(lambda: _store.note(KEY, 9000, found()))  # one that never read it
    assert (folder / "sizes.json").read_bytes() == OTHERS[kind]
    assert sorted(p.name for p in folder.iterdir()) == ["sizes.json", "sizes.lock"]


def test_another_users_file_and_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, [entry()])
    uid = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        assert "belongs to user" in warned(lambda: recall())[0]
    fresh()
    (folder / "sizes.json").unlink()
    os.mkfifo(folder / "sizes.json")
    assert "not a regular file" in warned(lambda: recall())[0]


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("OOMKIT_CACHE_DIR", str(folder / "file" / "below"))

    def act() -> None:
        for k in range(1, 5):
            _store._written_at = None
            recall()
            _store.note(KEY, 9000, found(k=k))
        _store.flush()

    assert len(warned(act)) == 1
    with warnings.catch_warnings():  # a warning that is an error ends no training either
        warnings.simplefilter("error")
        fresh()
        act()


# --- many, old, and from the future ---


def test_the_oldest_of_too_many_go(folder: Path) -> None:
    now = int(time.time())
    put(folder, [entry(used=now - i, budget=i + 1) for i in range(10_000)])
    assert len(sizes.list()) == 10_000
    _store.note(KEY, 20_000, found())
    fresh()
    budgets = {size.budget for size in sizes.list()}
    assert len(budgets) == _store.MOST_ENTRIES and {1, 999, 20_000} <= budgets
    assert 1001 not in budgets


def test_what_was_long_not_used_goes(folder: Path) -> None:
    old = int(time.time() - _store.OLDEST) - 10
    put(folder, [entry(budget=1, used=old), entry(budget=2)])
    _store.note(KEY, 3, found())
    fresh()
    assert {size.budget for size in sizes.list()} == {2, 3}


def test_a_clock_that_was_ahead(folder: Path) -> None:
    put(folder, [entry(budget=1, used=int(time.time()) + 10**9), entry(budget=2)])
    _store.note(KEY, 3, found())
    fresh()
    data = json.loads((folder / "sizes.json").read_text())
    assert all(e["used"] <= time.time() for e in data["entries"]) and len(data["entries"]) == 3


# --- several processes ---


def in_child(act: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    def writer(number: int) -> Callable[[], None]:
        def act() -> None:
            for i in range(20):
                _store.note(KEY, 1000 * (number + 1) + i, found())
                _store.flush()
            os._exit(len(_store._pending))

        return act

    children = [in_child(writer(number)) for number in range(4)]
    assert [status_of(child) for child in children] == [0] * 4
    assert len(sizes.list()) == 80


def test_a_writer_killed_half_way_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, [entry()])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        child = in_child(lambda: _store.note(KEY, 1, found()))
        assert status_of(child) == -signal.SIGKILL
    assert len(list(folder.glob("*.tmp"))) == 1
    assert recall() == [found()]
    _store.note(KEY, 2, found())  # its lock has died with it
    assert list(folder.glob("*.tmp")) == []
    assert {size.budget for size in sizes.list()} == {9000, 2}


def test_another_writer_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "PATIENCE", 0.0)
    with _store._locked(folder, 0.0) as held:
        assert held
        _store.note(KEY, 9000, found())
        assert not (folder / "sizes.json").exists()
    _store.flush()
    fresh()
    assert recall() == [found()]


def test_a_child_leaves_the_parents_notes_to_the_parent(folder: Path) -> None:
    _store.note(KEY, 1, found())
    _store.note(KEY, 2, found())  # not written yet

    def act() -> None:
        _store._written_at = None
        _store.note(KEY, 3, found())
        _store.flush()

    assert status_of(in_child(act)) == 0
    _store._cache = None
    in_file = {e["budget"] for e in json.loads((folder / "sizes.json").read_text())["entries"]}
    assert in_file == {1, 3}
    _store.flush()
    fresh()
    assert {size.budget for size in sizes.list()} == {1, 2, 3}


# --- for people ---


def test_list_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sizes.list() == () and "no sizes in" in repr(sizes.list())
    now = int(time.time())
    put(
        folder,
        [entry(), entry(function="a.b.step", budget=None, used=now - 900), entry(function="a.c")],
    )
    first = sizes.list()[0]
    assert (first.function, first.batch, first.accumulation_steps) == ("world.step", 64, 4)
    assert first.micro_batch == 16 and len(sizes.list("step")) == 2
    table = repr(sizes.list()).splitlines()
    assert table[0].startswith("function") and len(table) == 4
    assert main(["sizes", "step"]) == 0
    assert "a.b.step" in capsys.readouterr().out
    with pytest.raises(TypeError, match=r"oomkit\.sizes expected a function or its name"):
        sizes.list(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"clear\(older_than=\.\.\.\) expected a datetime"):
        sizes.clear(older_than=3)  # type: ignore[arg-type]
    assert sizes.clear("b.step", older_than=timedelta(days=1)) == 0
    assert sizes.clear(older_than=timedelta(minutes=10)) == 1
    assert main(["sizes", "--clear", "c"]) == 0
    assert "1 entry removed" in capsys.readouterr().out
    assert sizes.clear() == 1 and sizes.list() == ()
