"""The core, tested from C: each program of tests/core is built with one source and run."""

import pytest
from helpers.core_programs import (
    FOLDERS,
    SOURCES,
    TESTS,
    build,
    check,
    names_of,
    run,
    sanitize,
    sources_of,
)

__all__ = ["sanitize"]  # a fixture


@pytest.mark.parametrize("name", names_of("core"))
def test_core(name, tmp_path, sanitize):
    check(name, tmp_path, sanitize)


def test_a_failed_check_is_seen(tmp_path):
    source = tmp_path / "wrong.c"
    source.write_text(
        '#include "check.h"\n'
        "int\nmain(void)\n{\n"
        "    CHECK(1 + 1 == 2);\n"
        "    CHECK(1 + 1 == 3);\n"
        "    return check_report();\n}\n"
    )
    built = build(tmp_path / "wrong", [source], [])
    assert built.returncode == 0, built.stderr
    done = run(tmp_path / "wrong")
    assert done.returncode == 1
    assert done.stdout == f"{source}:6: 1 + 1 == 3\n2 checks, 1 failures\n"


def test_every_source_has_a_program():
    programs = {path for folder in FOLDERS for path in (TESTS / folder).glob("*.c")}
    assert {sources_of(name)[0] for name in SOURCES} == programs
    assert len(SOURCES) == 12
