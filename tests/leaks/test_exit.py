"""Nothing is printed when the interpreter ends while records are still alive.

A program whose objects are freed by the last collection (here pytest with a record among
its parameters): the record's type may be emptied before the record.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import oomkit, pytest

RECORD = oomkit.StepRecord(range(oomkit.StepRecord.n_fields))

@pytest.mark.parametrize("record", [RECORD, oomkit.current()])
def test_nothing(record): ...
"""


def test_exit_is_silent(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-c", "/dev/null", str(program)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
