"""The core, tested from C: each program of tests/core is built with one source and run."""

import pytest
from helpers.core_programs import (
    CORE,
    NAMES,
    NEEDS,
    PROGRAMS,
    SANITIZE,
    USES_WRAP,
    WRAP,
    build,
    run,
)


@pytest.fixture(scope="module")
def sanitize(tmp_path_factory) -> list[str]:
    """The sanitizers' flags, or none where their libraries are missing or do not run."""
    folder = tmp_path_factory.mktemp("sanitize")
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    program = folder / "probe"
    if build(program, [source], SANITIZE).returncode or run(program).returncode:
        return []
    return SANITIZE


@pytest.mark.parametrize("name", NAMES)
def test_core(name, tmp_path, sanitize):
    program = tmp_path / f"test_{name}"
    sources = [PROGRAMS / f"test_{name}.c", CORE / f"{name}.c"]
    sources += [CORE / f"{needed}.c" for needed in NEEDS.get(name, [])]
    built = build(program, sources, sanitize + (WRAP if name in USES_WRAP else []))
    assert built.returncode == 0, built.stderr
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    checks, _, failures = done.stdout.splitlines()[-1].partition(" checks, ")
    assert int(checks) > 0
    assert failures == "0 failures"


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
    assert {f"test_{name}.c" for name in NAMES} == {p.name for p in PROGRAMS.glob("*.c")}
    assert len(NAMES) == 11
