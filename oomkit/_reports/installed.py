"""An installed oomkit, where the folder of the sources hides it from `import oomkit`."""

from __future__ import annotations

import filecmp
import sys
from importlib.machinery import PathFinder
from os.path import samefile


def _is_here(entry: str, folder: str) -> bool:
    try:
        return samefile(f"{entry or '.'}/oomkit", folder)
    except OSError:
        return False


def hidden_by(package: list[str]) -> str | None:
    """The folder of a built package elsewhere on `sys.path`, or None."""
    entries = [entry for entry in sys.path if not _is_here(entry, package[0])]
    found = PathFinder.find_spec("oomkit", entries)
    if found is None or not found.submodule_search_locations:
        return None
    folder = found.submodule_search_locations[0]
    return folder if PathFinder.find_spec("oomkit._C", [folder]) is not None else None


def use(package: list[str], folder: str) -> bool:
    """From here on parts of the package come from that folder; False where it was built from
    sources with another `__init__.py`, which does not fit them."""
    if not filecmp.cmp(f"{package[0]}/__init__.py", f"{folder}/__init__.py", shallow=False):
        return False
    package[:] = [folder]
    for name in [name for name in sys.modules if name.startswith("oomkit.")]:
        del sys.modules[name]
    return True
