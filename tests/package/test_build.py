"""What setup.py finds, refuses and publishes."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "setup.py"
# What pip does for an isolated build: the environment's own packages are not on the path.
HIDE = """
import sys
sys.path[:] = [path for path in sys.path if not path.endswith("site-packages")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
"""


@pytest.fixture
def isolated(tmp_path: Path) -> Path:
    """A folder of packages for a Python that sees no others: setuptools."""
    found = importlib.util.find_spec("setuptools")
    assert found is not None and found.submodule_search_locations is not None
    (tmp_path / "setuptools").symlink_to(found.submodule_search_locations[0])
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return tmp_path


def python(code: str, packages: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(packages), "PATH": ""},
        capture_output=True,
        text=True,
    )


def test_the_torch_that_an_isolated_build_hides_is_found(isolated: Path) -> None:
    code = """
import importlib.util, runpy
print(importlib.util.find_spec("torch"))
print(runpy.run_path("setup.py", run_name="setup")["find_torch"]())
"""
    done = python(code, isolated)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None", str(Path(torch.__file__).parent)]


def test_a_build_without_torch_ends_with_what_to_do(isolated: Path) -> None:
    code = f"""
import runpy, site, sys
site.getsitepackages = lambda: []
sys.argv = ["setup.py", "-q", "build_ext", "-b", {str(isolated)!r}, "-t", {str(isolated)!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
    done = python(code, isolated)
    assert done.returncode == 1
    assert "this build found none" in done.stderr
    assert "pip install torch && pip install ." in done.stderr
    assert "OOMKIT_NO_BRIDGE=1" in done.stderr
    assert not list(isolated.rglob("*.o"))


def test_bridges_to_several_torches_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minor in ("2.11", "2.12"):
        (tmp_path / minor).mkdir()
        (tmp_path / minor / "version.py").write_text(f"__version__ = '{minor}.1+cu130'\n")
    monkeypatch.setenv("OOMKIT_TORCHES", f"{tmp_path / '2.11'}:{tmp_path / '2.12'}")
    monkeypatch.chdir(ROOT)

    built = runpy.run_path(str(SETUP), run_name="setup")["extensions"]()

    assert [extension.name for extension in built] == [
        "oomkit._C",
        "oomkit._bridges.torch_2_11._bridge",
        "oomkit._bridges.torch_2_12._bridge",
    ]
    assert str(tmp_path / "2.12" / "include") in built[2].extra_compile_args


@pytest.mark.parametrize(("before", "stays"), [("2_13", False), ("2_14", True), (None, False)])
def test_a_bridge_built_for_another_torch_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, stays: bool
) -> None:
    built = tmp_path / "_bridge.so"
    built.touch()
    mark = tmp_path / "build" / "oomkit._bridge.lib.torch"
    if before is not None:
        mark.parent.mkdir()
        mark.write_text(before)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.14.1+cu130'\n")
    monkeypatch.chdir(tmp_path)
    command = runpy.run_path(str(SETUP), run_name="setup")["BuildExt"](Distribution())
    monkeypatch.setattr(command, "get_ext_fullpath", lambda name: str(built))
    seen: list[bool] = []
    monkeypatch.setattr(build_ext, "build_extension", lambda *_: seen.append(built.exists()))
    command.build_temp = str(tmp_path)

    folder = str(tmp_path / "torch" / "lib")
    command.build_extension(Extension("oomkit._bridge", [], library_dirs=[folder]))

    assert seen == [stays] and mark.read_text() == "2_14"


def test_a_linker_that_takes_no_script_gets_none() -> None:
    links = runpy.run_path(str(SETUP), run_name="setup")["links"]
    assert links(["gcc", "-shared"], [])
    assert not links(["gcc", "-shared"], ["-Wl,--no-such-option"])
    assert not links(["no-such-compiler"], [])


@pytest.mark.parametrize(("flags", "level"), [("-g0", "of Python"), ("-O1 -g", "-O1")])
def test_flags_of_the_environment_leave_the_build_optimised(
    flags: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools takes $CFLAGS in place of Python's own flags, and not beside them."""
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.setenv(name, flags)
    python_says = sysconfig.get_config_var("CFLAGS").split()
    expected = [f for f in python_says if f.startswith("-O")] if level == "of Python" else [level]
    seen: list[list[str]] = []

    def build(command: build_ext) -> None:
        seen.extend([command.compiler.compiler_so, command.compiler.compiler_so_cxx])

    monkeypatch.setattr(build_ext, "build_extensions", build)
    modules = [Extension(name, []) for name in ("oomkit._C", "oomkit._bridge")]
    make = runpy.run_path(str(SETUP), run_name="setup")["BuildExt"]
    command = make(Distribution({"ext_modules": modules}))
    command.ensure_finalized()
    command.run()

    for words in seen:
        assert [word for word in words if word.startswith("-O")] == expected, words
        assert words.index(expected[0]) <= words.index(flags.split()[0])
    assert len(seen) == 2


TRAINED_SOURCE = """
#include <Python.h>

static PyObject *
half(PyObject *self, PyObject *number)
{
    (void)self;
    return PyNumber_Check(number) ? PyNumber_Rshift(number, PyLong_FromLong(1)) : NULL;
}

static PyMethodDef methods[] = {{"half", half, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef module = {.m_name = "_C", .m_methods = methods};
PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., build_ext]:
    """A build of extensions of a few lines, for a healthy call that asks for half of 12."""
    (tmp_path / "oomkit").mkdir()
    (tmp_path / "oomkit" / "__init__.py").touch()
    (tmp_path / "core.c").write_text(TRAINED_SOURCE)
    (tmp_path / "bridge.c").write_text(TRAINED_SOURCE.replace("__C(", "__bridge("))
    (tmp_path / "module").mkdir()
    training = "import oomkit._C as c; assert c.half(12) == 6"
    (tmp_path / "module" / "healthy.py").write_text(training)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOMKIT_TRAINED", "1")
    monkeypatch.setenv("OOMKIT_NO_BRIDGE", "1")
    make = runpy.run_path(str(SETUP), run_name="setup")["BuildExt"]
    monkeypatch.setitem(make.train.__globals__, "TRAINING", "module/healthy.py")

    def build(*bridges: str) -> build_ext:
        modules = [Extension("oomkit._C", ["core.c"])]
        modules += [Extension(f"oomkit._bridges.{name}._bridge", ["bridge.c"]) for name in bridges]
        command = make(Distribution({"name": "oomkit", "ext_modules": modules}))
        command.build_lib, command.build_temp = str(tmp_path / "lib"), "temp"
        command.ensure_finalized()
        return command

    return build


def test_a_trained_build_is_run_and_then_optimised_for_what_ran(
    small: Callable[..., build_ext],
) -> None:
    small().run()

    assert list(Path("temp").rglob("*.gcda"))
    (made,) = Path("lib").rglob("*.so")
    (first,) = Path("temp", "training").rglob("*.so")
    assert b"gcov" in first.read_bytes() and b"gcov" not in made.read_bytes()
    code = "import sys; sys.path.insert(0, 'lib/oomkit'); import _C; assert _C.half(12) == 6"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bridges_that_did_not_run_are_optimised_as_the_one_that_did(
    small: Callable[..., build_ext], tmp_path: Path
) -> None:
    bridges = ("torch_1_0", "torch_2_0")
    for bridge in bridges:
        (tmp_path / "oomkit" / "_bridges" / bridge).mkdir(parents=True)
    training = "import oomkit._C, oomkit._bridges.torch_2_0._bridge as b; assert b.half(12) == 6"
    (tmp_path / "module" / "healthy.py").write_text(training)

    small(*bridges).run()

    counted = [path.name for path in Path("temp").rglob("*#bridge.gcda")]
    assert sorted(name.split("#")[-2] for name in counted) == [*bridges]
    assert len(list(Path("lib").rglob("_bridge*.so"))) == 2


def test_a_trained_build_that_cannot_run_says_what_it_needs(
    small: Callable[..., build_ext],
) -> None:
    Path("module", "healthy.py").write_text("import no_such_torch")
    with pytest.raises(SystemExit, match="--no-build-isolation"):
        small().run()
    assert not list(Path("lib").rglob("*.so"))


def test_a_trained_build_needs_a_compiler_that_can_be_trained(
    small: Callable[..., build_ext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(SystemExit, match="OOMKIT_TRAINED=1 expected gcc 10 or newer.*false"):
        small().run()
    assert not list(tmp_path.rglob("*.so"))


def test_the_page_for_an_index_has_no_target_that_is_not_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    target = re.compile(r"\]\((?!https:|#)")
    assert target.search(readme), "nothing is left to take out"

    page = runpy.run_path(str(SETUP), run_name="setup")["index_page"](readme)

    assert not target.search(page)
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(page) == blocks.findall(readme)


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("a [proof](docs/explanation/proof.md) here", "a proof here"),
        ("a [site](https://example.org/x) here", "a [site](https://example.org/x) here"),
        ("![picture](docs/demo.png)\n\n*words*", "*words*"),
    ],
)
def test_links_and_pictures_of_the_page(text: str, page: str) -> None:
    assert runpy.run_path(str(SETUP), run_name="setup")["index_page"](text) == page
