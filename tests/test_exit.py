"""Nothing is printed when the interpreter ends while records are still alive."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch, oomkit

class Cycle:
    pass

step = oomkit.auto_batch(lambda x: x + 1)
step(torch.zeros(2))
cycle = Cycle()
cycle.me, cycle.records, cycle.step, cycle.here = cycle, step.records, step, oomkit.current()
sys.modules["kept"] = cycle
torch.kept = cycle
del cycle, step
"""


def test_exit_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
