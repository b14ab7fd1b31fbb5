"""The package as it is installed: version, symbols, typing, imports, the ways in."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.own_process import run_program

import oomkit

ROOT = Path(__file__).resolve().parents[2]
LINKER_NAMES = {"_init", "_fini", "_edata", "_end", "__bss_start"}


def exported(listing: str) -> set[str]:
    """Names in the output of `nm -D --defined-only`, without versions ("name@@VERS")."""
    names = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip()}
    return names - LINKER_NAMES


def run(code: str) -> str:
    strict = "import warnings; warnings.simplefilter('error')\n"
    result = run_program(strict + code, cwd=Path(oomkit.__file__).parents[1])
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert oomkit.__version__ == project["version"]
    assert f"## {oomkit.__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["_C", "_bridge"])
def test_exports_nothing_but_its_init_function(name: str) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    spec = importlib.util.find_spec(f"oomkit.{name}")
    assert spec is not None and spec.origin is not None, f"oomkit.{name} is not built"

    listing = subprocess.run(
        ["nm", "-D", "--defined-only", spec.origin], capture_output=True, text=True, check=True
    ).stdout

    assert exported(listing) == {f"PyInit_{name}"}


def test_a_further_symbol_would_be_seen() -> None:
    listing = "0000000000001139 T PyInit__C\n000000000000113a W helper@@V1\n\n"

    assert exported(listing) == {"PyInit__C", "helper"}


def test_is_typed() -> None:
    folder = Path(oomkit.__file__).parent

    assert (folder / "py.typed").is_file()
    ast.parse((folder / "_C.pyi").read_text())
    ast.parse((folder / "_bridge.pyi").read_text())


def test_all_lists_what_is_there() -> None:
    assert len(oomkit.__all__) == len(set(oomkit.__all__))
    for name in oomkit.__all__:
        assert hasattr(oomkit, name), name


@pytest.mark.parametrize(
    "name",
    """auto_batch guard current is_oom_error classify cleanup limit_memory memory
    max_memory_allocated report testing OomkitError OutOfMemory PartialUpdate SplitError
    OomkitWarning""".split(),
)
def test_public_names_are_there(name: str) -> None:
    assert hasattr(oomkit, name)


def test_import_brings_torch_and_nothing_else() -> None:
    """In a new process: the server of the others has imported torch._dynamo."""
    code = """
import sys
import torch
before = set(sys.modules)
import oomkit
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"torch", "oomkit"}))
print("torch._dynamo" in set(sys.modules) - before)
"""

    command = [sys.executable, "-W", "error", "-c", code]
    root = Path(oomkit.__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.split("\n")[:2] == ["[]", "False"]


def test_import_changes_nothing_in_torch() -> None:
    code = """
import torch
state = torch.get_rng_state()
backward = torch.autograd.backward
step = torch.optim.Optimizer.step
import oomkit
from oomkit import _C
print(torch.equal(state, torch.get_rng_state()))
print(torch.autograd.backward is backward, torch.optim.Optimizer.step is step)
"""

    assert run(code).split() == ["True", "True", "True"]


def test_nothing_is_imported_between_an_error_and_its_replay() -> None:
    code = """
import sys
import collections
import torch
import oomkit
from oomkit.testing import inject_oom

model = torch.nn.Linear(4, 4)
seen = collections.UserList()

@oomkit.auto_batch
def step(x):
    seen.append({name for name in sys.modules if name.partition(".")[0] == "oomkit"})
    model(x).sum().backward()
    torch.empty(2**20)

with inject_oom(min_bytes=2**20):
    step(torch.ones(4, 4))
print(len(seen) > 3, sorted(set().union(*seen) - seen[0]))
"""

    assert run("import warnings; warnings.simplefilter('ignore')\n" + code) == "True []\n"


def test_make_help_lists_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    declared = re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    targets = {line.split()[1] for line in shown.splitlines()}
    assert targets == {name for line in declared for name in line.split()}


def test_code_of_the_readme_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)

    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
