"""What the garbage collector looks at: not at the objects that came with modules.

A collection looks at every object of torch's, and each recovery makes some: half of the time of all
tests. What came with modules is garbage in no test, and what a test makes is seen as ever.
"""

from __future__ import annotations

import gc
import sys

_modules = 0
"""How many there were when their objects were hidden; counting these takes long."""


def hide_modules() -> None:
    global _modules
    if len(sys.modules) > _modules + 100:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


def hide_nothing() -> None:
    global _modules
    gc.unfreeze()
    _modules = 0
