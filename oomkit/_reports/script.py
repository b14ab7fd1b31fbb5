"""An unmodified script with records: `python -m oomkit run script.py`.

Decorated steps of the script write records as ever. For one that has none, what lies between
two updates of an optimizer counts as a step: it is measured, nothing is retried. Both measure
their phases.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import _C, sinks
from ..report import report

LABEL = "between updates"
_FORWARD, _OPTIMIZER = 0, 2  # phases by number


class Updates:
    """A guard from one update of an optimizer to the next."""

    def __init__(self) -> None:
        self.guard = _C.guard(label=LABEL)
        self._open = False
        self._hooks: tuple[Any, ...] = ()
        self._before = _FORWARD

    def _update(self, *ignored: Any) -> None:
        self._before = _C.phase_set(_OPTIMIZER)

    def _next(self, *ignored: Any) -> None:
        _C.phase_set(self._before)
        if self._open:
            self._close(None)
            self._begin()

    def _begin(self) -> None:
        self.guard.__enter__()
        self._open = True

    def _close(self, error: BaseException | None) -> None:
        self._open = False
        kind = None if error is None else type(error)
        trace = None if error is None else error.__traceback__
        self.guard.__exit__(kind, error, trace)

    def __enter__(self) -> Updates:
        _C._watch_backward()
        _C.set_phases_wanted(True)
        self._hooks = (
            register_optimizer_step_pre_hook(self._update),
            register_optimizer_step_post_hook(self._next),
        )
        _C.own_hooks(len(self._hooks))
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C.set_phases_wanted(False)
        for hook in self._hooks:
            hook.remove()
        if self._open and isinstance(error, (Exception, type(None))):
            self._close(error)


def _shown(error: BaseException) -> None:
    """The traceback as Python has it, without the frames that ran the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _measured() -> list[Any]:
    return [step for step in _C.live_steps() if step.records]


def run_script(path: Path, arguments: Sequence[str], records: Path | None) -> int:
    """Runs it as Python would; the exit status is the script's. The report goes to stderr."""
    sink = None if records is None else sinks.JSONL(records)
    if sink is not None:
        sinks.attach(sink)
    sys.argv = [os.fspath(path), *arguments]
    sys.path.insert(0, os.fspath(path.resolve().parent))
    status = 0
    updates = Updates()
    try:
        with updates:
            runpy.run_path(os.fspath(path), run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:
        _shown(error)
        status = 1
        del error
    finally:
        if sink is not None:
            sinks.detach(sink)
            sink.close()
    steps = _measured()
    print(report(steps if steps else updates.guard), file=sys.stderr)
    return status
