"""A folder is a layer: no #include and no import may point up; files stay readable."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from house.sources import FOLDERS, PLAIN

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "oomkit"
LONGEST = 900

C_STANDARD = {
    f"{name}.h"
    for name in (
        "assert ctype errno float inttypes limits math stdalign stdarg stdatomic stdbool "
        "stddef stdint stdio stdlib string time"
    ).split()
}
# What each folder may include beside its own headers: exact names or beginnings that end
# in a slash. Headers of C++ have neither a dot nor a slash.
ALLOWED = {
    "core": C_STANDARD,
    "records": C_STANDARD | {"../core/status.h"},
    "torch": C_STANDARD
    | {
        "Python.h",
        "malloc.h",
        "pthread.h",
        "c10/",
        "torch/headeronly/",
        "torch/version.h",
        "../core/",
    },
}
# oomkit._C: what its folders may include of each other is in tests/house.
HOUSE = C_STANDARD | {"Python.h", "structmember.h", "dlfcn.h", "pthread.h"}
HOUSE |= {"../torch/bridge.h", *(f"../{name}/" for name in (*PLAIN, *FOLDERS))}
ALLOWED |= dict.fromkeys(FOLDERS, HOUSE)
# Shared memory and the processes behind it; Linux alone has all of it.
ALLOWED["ranks"] = HOUSE | {"signal.h", "unistd.h", "linux/futex.h", "sys/syscall.h", "sys/types.h"}
ALLOWED["members"] = HOUSE | {"internal/"}  # attributes.c: where attributes lie before 3.13
EXTENSIONS = {name: {".c", ".h"} for name in ALLOWED} | {"torch": {".cpp", ".h", ".map"}}
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)

SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".c", ".h", ".cpp"})
MODULES = sorted(PACKAGE.rglob("*.py"))


def include_problems(folder: str, text: str) -> list[str]:
    """The included names that a file of this folder must not include."""
    problems = []
    for name in INCLUDE.findall(text):
        own = "/" not in name and (CSRC / folder / name).is_file()
        exact = name in ALLOWED[folder]
        below = any(name.startswith(a) for a in ALLOWED[folder] if a.endswith("/"))
        cxx = folder == "torch" and re.fullmatch(r"[a-z_]+", name) is not None
        source = not name.endswith(".h") and not cxx
        if source or not (own or exact or below or cxx):
            problems.append(name)
    return problems


def clear_problems(text: str) -> list[int]:
    """Lines with a PyErr_Clear() that nothing just above it accounts for."""
    lines = text.splitlines()
    problems = []
    for number, line in enumerate(lines):
        if not re.search(r"\bPyErr_Clear\(", line) or line.lstrip().startswith(("*", "/*")):
            continue
        near = "\n".join(lines[max(0, number - 3) : number + 1])
        if not re.search(r"PyErr_ExceptionMatches\(|/\*|\*/|//", near):
            problems.append(number + 1)
    return problems


def imports_of(
    text: str, module: str = "", modules: Collection[str] = ()
) -> tuple[set[str], set[str]]:
    """(modules of oomkit, others): what a module of oomkit imports, others by their top name.

    Args:
        text: the module's source.
        module: its name without "oomkit.".
        modules: all modules of oomkit, by which a submodule is told from a name in a package.
    """
    own: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                (own.add(rest or "__init__") if top == "oomkit" else others.add(top))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            else:
                top, _, base = (node.module or "").partition(".")
                if top != "oomkit":
                    others.add(top)
                    continue
            names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
            own |= {name if not base or name in modules else base for name in names}
    return own, others


def import_problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the imports among the modules of oomkit (name -> source)."""
    problems = []
    graph: dict[str, set[str]] = {}
    for name, text in sources.items():
        own, _ = imports_of(text, name, sources)
        package = name.partition(".")[0]
        others = {other.partition(".")[0] for other in own}
        graph.setdefault(package, set()).update(others - {package} if "." in name else others)
        upwards = own & {"__init__", "__main__"}
        # From the package itself only submodules can be meant: a name that is none comes
        # from __init__.
        upwards |= {x for x in own if x not in sources and x not in {"_C", "_bridge"}}
        if upwards and name != "__main__":
            problems.append(f"{name} imports {', '.join(sorted(upwards))}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("cycle: " + " -> ".join(error.args[1]))
    return problems


def module_of(path: Path) -> str:
    """ "_proof.judge", without "oomkit."; a package by its name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def test_includes_point_down() -> None:
    for path in SOURCES:
        folder = path.relative_to(CSRC).parts[0]
        assert include_problems(folder, path.read_text()) == [], path
        assert path.suffix in EXTENSIONS[folder], path


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        ("core", "#include <Python.h>\n", ["Python.h"]),
        ("core", '#include "../torch/bridge.h"\n', ["../torch/bridge.h"]),
        ("core", "#include <vector>\n", ["vector"]),
        ("core", '#include "../records/ring.h"\n', ["../records/ring.h"]),
        ("records", '#include "../core/plan.h"\n', ["../core/plan.h"]),
        ("torch", '#include "../py/state.h"\n', ["../py/state.h"]),
        ("torch", "#include <ATen/ATen.h>\n", ["ATen/ATen.h"]),
        ("torch", "#include <torch/extension.h>\n", ["torch/extension.h"]),
        ("engine", "#include <c10/core/Allocator.h>\n", ["c10/core/Allocator.h"]),
        ("engine", '#include "../torch/internal.h"\n', ["../torch/internal.h"]),
        ("module", '  #  include "module.c"\n', ["module.c"]),
        ("torch", '#include "../core/plan.h"\n#include <new>\n', []),
        ("core", '#include "budget.h"\n#include <stdint.h>\n', []),
    ],
)
def test_an_include_that_points_up_is_found(folder: str, text: str, expected: list[str]) -> None:
    assert include_problems(folder, text) == expected


def test_imports_point_down() -> None:
    sources = {module_of(path): path.read_text() for path in MODULES}
    assert import_problems(sources) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import oomkit\n"}, ["a imports __init__"]),
        ({"a": "from . import auto_batch\n"}, ["a imports auto_batch"]),
        ({"a": "def f():\n    from oomkit import guard\n"}, ["a imports guard"]),
        ({"a": "from . import b\n", "b": "from .a import x\n"}, ["cycle: a -> b -> a"]),
        ({"a": "from . import _C\nfrom .b import x\n", "b": "import torch\n"}, []),
        ({"__init__": "from .a import x\n", "a": "from ._C import y\n"}, []),
        ({"_p.a": "from . import b\n", "_p.b": "from ..c import x\n", "c": ""}, []),
        ({"_p.a": "from .. import auto_batch\n"}, ["_p.a imports auto_batch"]),
        (
            {"_p.a": "from ..c import x\n", "c": "from ._p import b\n", "_p.b": ""},
            ["cycle: _p -> c -> _p"],
        ),
    ],
)
def test_an_import_that_points_up_is_found(sources: dict[str, str], expected: list[str]) -> None:
    found = import_problems(sources)
    if expected and expected[0].startswith("cycle"):
        assert len(found) == 1 and found[0].startswith("cycle")
    else:
        assert found == expected


EXTRAS = {"matplotlib"}  # imported when the function that needs one is called


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.If, ast.Try))


def test_the_package_needs_torch_alone() -> None:
    """At the top: torch alone. Inside a function, when it is called: an extra, too."""
    for path in MODULES:
        tree = ast.parse(path.read_text())
        at_the_top = ast.Module([node for node in tree.body if _is_import(node)], [])
        _, others = imports_of(ast.unparse(at_the_top), module_of(path))
        assert others - set(sys.stdlib_module_names) <= {"torch"}, path
        _, anywhere = imports_of(path.read_text(), module_of(path))
        assert anywhere - set(sys.stdlib_module_names) <= {"torch"} | EXTRAS, path


def test_c_never_imports_the_package() -> None:
    for path in SOURCES:
        if path.suffix == ".c":
            assert re.search(r'PyImport_\w+\(\s*"oomkit', path.read_text()) is None, path


def test_pyerr_clear_is_accounted_for() -> None:
    for path in SOURCES:
        assert clear_problems(path.read_text()) == [], path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f();\ng();\nPyErr_Clear();\n", [3]),
        ("/* why */\nf();\ng();\nh();\nPyErr_Clear();\n", [5]),
        ("if (PyErr_ExceptionMatches(x)) {\n    PyErr_Clear();\n}\n", []),
        ("/* Never fails: the figure is optional. */\nPyErr_Clear();\n", []),
    ],
)
def test_a_bare_pyerr_clear_is_found(text: str, expected: list[int]) -> None:
    assert clear_problems(text) == expected


def test_files_stay_readable() -> None:
    for path in (*SOURCES, *MODULES):
        assert len(path.read_text().splitlines()) <= LONGEST, path


def test_there_is_something_to_read() -> None:
    folders = {path.relative_to(CSRC).parts[0] for path in SOURCES}
    assert folders == set(ALLOWED)
    assert PACKAGE / "__init__.py" in MODULES
