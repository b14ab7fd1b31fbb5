"""Programs in a process of their own, which has imported torch and nothing else.

Torch is imported once, by a server that is started at the first program; each program is a fork of
it. So is what torch itself imports at the first step of an optimizer, which takes as long again.
What must be in the environment before torch is loaded is passed as `before`: each has a server.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A program comes to the end of this file, as if it had been passed to the interpreter: what it
# raises, how it exits and what a crash says are those of any process.
_SERVER = """
import faulthandler, gc, json, os, sys
import torch, torch._dynamo

gc.collect()
gc.freeze()  # or each program goes through all of torch at its end, for most of its time

while True:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)

for name, number in (("nothing", 0), ("out", 1), ("err", 2)):
    file = os.open(asked[name], os.O_RDWR | os.O_APPEND)
    os.dup2(file, number)
    os.close(file)
faulthandler.enable()
def paths():
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
own = {os.path.abspath(path) for path in paths()}
os.environ.clear()
os.environ.update(asked["env"])
os.chdir(asked["cwd"])
sys.path[1:] = paths() + [path for path in sys.path[1:] if path not in own]
sys.argv[:] = ["-c"]
program = compile(asked["code"], "<string>", "exec")
for name in ("line", "child", "name", "number", "file", "asked", "faulthandler", "gc", "json",
             "own", "paths"):
    del globals()[name]
exec(program)
"""


@cache
def _server(*before: tuple[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict(before)},
    )
    atexit.register(server.communicate)
    return server


def run_program(
    code: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    merged: bool = False,
    **before: str,
) -> subprocess.CompletedProcess[str]:
    """What `python -c code` would give, with torch imported; merged: both outputs as stdout."""
    server = _server(*sorted(before.items()))
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        out.touch()
        err.touch()
        asked = {
            "code": code,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "nothing": os.devnull,
            "out": str(out),
            "err": str(out if merged else err),
        }
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(["python"], status, out.read_text(), err.read_text())


def run_module(
    name: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python -m name arguments` would give."""
    lines = [
        "import os, runpy, sys",
        f"sys.argv[:] = {[name, *arguments]!r}",
        "sys.path[0] = os.getcwd()",
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)",
    ]
    return run_program("\n".join(lines), env, cwd)


def run_script(
    path: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    merged: bool = False,
    **before: str,
) -> subprocess.CompletedProcess[str]:
    """What `python path arguments` would give, with oomkit on its path."""
    lines = [
        "import runpy, sys",
        f"sys.argv[:] = {[str(path), *arguments]!r}",
        f"sys.path.insert(0, {str(path.parent)!r})",
        f"runpy.run_path({str(path)!r}, run_name='__main__')",
    ]
    env = {**(os.environ if env is None else env), **before, "PYTHONPATH": str(ROOT)}
    return run_program("\n".join(lines), env, cwd, merged=merged, **before)
