"""The vote by itself, from C: threads and processes, under each sanitizer there is."""

import subprocess
from pathlib import Path

import pytest
from helpers.core_programs import ROOT, build, run
from helpers.sample import WHOLE, with_rest

RANKS = ROOT / "csrc" / "ranks"
SOURCES = [Path(__file__).with_name("test_vote.c"), RANKS / "vote.c", RANKS / "process.c"]
KINDS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def built(folder: Path, flags: list[str], *more: str) -> Path:
    program = folder / "test_vote"
    done = build(program, SOURCES, [f"-I{RANKS}", *flags, *more])
    assert done.returncode == 0, done.stderr
    return program


def usable(folder: Path, flags: list[str]) -> bool:
    """Are the sanitizer's libraries there, and do they run?"""
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / "probe"
    return build(program, [source], flags).returncode == 0 and run(program).returncode == 0


@pytest.mark.parametrize("kind", with_rest(["thread"], [*KINDS]))
def test_the_vote(kind: str, tmp_path: Path) -> None:
    if not usable(tmp_path, KINDS[kind]):
        pytest.skip(f"no {kind} sanitizer")

    done = run(built(tmp_path, KINDS[kind], *([] if WHOLE else ["-DROUNDS=500"])))

    assert done.returncode == 0, done.stdout + done.stderr
    checks, _, failures = done.stdout.splitlines()[-1].partition(" checks, ")
    assert int(checks) > 30 and failures == "0 failures"


@pytest.mark.whole
def test_one_word_for_two_rounds_is_seen(tmp_path: Path) -> None:
    """Who is a round ahead would overwrite what another one still reads."""
    text = (RANKS / "vote.c").read_text(encoding="utf-8")
    broken = text.replace("round & 1", "round & 0")
    assert broken != text
    (tmp_path / "vote.c").write_text(broken)
    program = tmp_path / "broken"
    sources = [SOURCES[0], tmp_path / "vote.c", SOURCES[2]]
    done: subprocess.CompletedProcess[str] = build(program, sources, [f"-I{RANKS}"])
    assert done.returncode == 0, done.stderr

    assert run(program).returncode == 1
