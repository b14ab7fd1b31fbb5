"""Running a program under a sanitizer, and what its report says of our own code."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .builds import preloaded

# Frames of ours: by source where there are symbols, by library where there are none.
OURS = re.compile(r"csrc/\w+/|oomkit/_(C|bridge)\.|/plants\.c")
_BEGINS = re.compile(
    r"^(==\d+==ERROR: |WARNING: ThreadSanitizer: |Direct leak of |Indirect leak of |"
    r"\S+ runtime error: |AddressSanitizer: CHECK failed)"
)
_FRAME = re.compile(r"^\s+#\d+ ")

# Requests of more memory than there is are refused, as without a sanitizer.
OPTIONS = {
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    # The stack of an allocation by its unwind tables: Python has no frame pointers.
    "leak": {
        "ASAN_OPTIONS": "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=14"
        ":allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LSAN_OPTIONS": "report_objects=0",
    },
    "thread": {"TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1"},
}


@dataclass
class Run:
    code: int
    output: str
    reports: list[str] = field(default_factory=list)

    @property
    def ours(self) -> list[str]:
        return [report for report in self.reports if is_ours(report)]


def is_ours(report: str) -> bool:
    return any(_FRAME.match(line) and OURS.search(line) for line in report.splitlines()) or (
        "runtime error" in report.partition("\n")[0]
    )


def reports_in(text: str) -> list[str]:
    """The reports of a log, each from its first line to the next one's."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if _BEGINS.match(line):
            found.append([])
        if found:
            found[-1].append(line)
    # The head of a list of leaks is none.
    return ["\n".join(lines) for lines in found if "LeakSanitizer: detected" not in lines[0]]


def run_under(
    tool: str, command: list[str], package: Path, cwd: Path, plant: str | None = None
) -> Run:
    """`tool` is address, leak or thread; `package` the folder that has oomkit."""
    kind = "thread" if tool == "thread" else "address"
    env = {
        **os.environ,
        **OPTIONS[tool],
        "LD_PRELOAD": preloaded(kind),
        "PYTHONPATH": f"{package}:{cwd / 'tests'}",
        "PYTHONSAFEPATH": "1",
        "PYTHONMALLOC": "malloc",  # or the blocks of Python's own pools are seen, not objects
        "OMP_NUM_THREADS": "1",
        "OOMKIT_PLANT": plant or "",
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
            if name in env:
                env[name] += f":log_path={folder}/log"
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        logs = "\n".join(p.read_text(errors="replace") for p in sorted(Path(folder).glob("log*")))
    return Run(done.returncode, done.stdout, reports_in(f"{logs}\n{done.stdout}"))
