"""Every block of code of the documentation runs; a command for a shell exists.

`python`  run, in the order of the page, in one namespace; a hidden preamble for each page
          (preambles/, "default" for those without one) makes models and data that are small
`diff`    the old side compiles, the new side runs
`output`  what the block before it prints and logs
`console` each line after "$ " is a command, and is run where it takes seconds (RUN); what
          stands below it is what it prints
`sh`      commands

In expected output `...` stands for anything.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import logging
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.own_process import run_script

import oomkit
from docs.test_pages import PAGES, ROOT, names

FENCE = re.compile(r"^(?P<bar>`{3,})(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=bar)$", re.M | re.S)
PREAMBLES = Path(__file__).parent / "preambles"
RUN = ("python examples/first_step.py", "python -m oomkit")
# The same where a package is installed: see ELSEWHERE. In `make test` they would take minutes.
RUN_WITH = {
    "python -W ignore examples/finetune_trainer.py": "trl",
    "python -W ignore examples/dpo.py": "trl",
    "python -W ignore examples/lightning_autobatch.py": "lightning",
    "python -W ignore examples/tune_max.py": "optuna",
}
DIRECTIVES = re.compile(r"\{[\w-]+\}")

# What a block may import that `make test` does not install, and the target that does.
ELSEWHERE = {
    "datasets": "test-trainers",
    "ignite": "test-trainers",
    "lightning": "test-trainers",
    "mlflow": "test-sinks",
    "optuna": "test-integrations",
    "prometheus_client": "test-sinks",
    "tensorboard": "test-sinks",
    "torchmetrics": "test-trainers",
    "trl": "test-trainers",
    "wandb": "test-sinks",
}
COMMANDS = {"apt-get", "cd", "git", "torchrun", "uv"}  # that are not ours


class Block(NamedTuple):
    line: int
    kind: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Block(line, match["kind"].strip(), match["text"])


def sides(diff: str) -> tuple[str, str]:
    """A program before and after a diff."""
    lines = diff.splitlines(keepends=True)
    return (
        "".join(line[1:] or "\n" for line in lines if not line.startswith("+")),
        "".join(line[1:] or "\n" for line in lines if not line.startswith("-")),
    )


def missing(code: str) -> set[str]:
    """Modules that a block imports and that are not here; each has a target that runs it."""
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    roots = {name.partition(".")[0] for name in imported}
    roots |= {name.partition(".")[2] for name in imported if name.startswith("oomkit.")}
    roots |= {"tensorboard"} if "torch.utils.tensorboard" in imported else set()
    return {root for root in roots & {*ELSEWHERE, "transformers"} if find_spec(root) is None}


def alike(expected: str, printed: str) -> None:
    """Blank space at the ends of lines aside, and `...` is anything."""
    parts = [re.escape(part) for part in expected.strip().split("...")]
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert re.fullmatch(".*".join(parts), lines, re.S), f"printed:\n{lines}"


@contextlib.contextmanager
def listening() -> Iterator[io.StringIO]:
    """What is printed, and what the log shows to somebody who has set nothing up."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    handler.setFormatter(logging.Formatter("oomkit: %(message)s"))
    handler.setLevel(logging.WARNING)
    log = logging.getLogger("oomkit")
    log.addHandler(handler)
    try:
        with contextlib.redirect_stdout(heard):
            yield heard
    finally:
        log.removeHandler(handler)


def preamble(page: Path) -> str:
    name = names(page).removeprefix("docs/").removesuffix(".md")
    own = PREAMBLES / f"{name.replace('/', '_').replace('-', '_')}.py"
    return (own if own.exists() else PREAMBLES / "default.py").read_text(encoding="utf-8")


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    attached = oomkit.sinks.attached()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for sink in oomkit.sinks.attached():
        if sink not in attached:
            oomkit.sinks.detach(sink)
            getattr(sink, "close", lambda: None)()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.no_proof
@pytest.mark.parametrize("page", PAGES, ids=names)
def test_python(
    page: Path,
    subtests: pytest.Subtests,
    nothing_stays: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "page"}
    printed = None
    made = False
    for block in blocks(page):
        old, code = sides(block.text) if block.kind == "diff" else ("", block.text)
        if block.kind not in {"python", "diff", "output"}:
            continue
        with subtests.test(f"{names(page)}:{block.line}"):
            if block.kind == "output":
                if printed is None:
                    pytest.skip("the block before it was not run")
                alike(block.text, printed)
                continue
            compile(old, "before", "exec")
            printed = None
            if absent := missing(code):
                targets = sorted({ELSEWHERE.get(name, "test") for name in absent})
                pytest.skip(f"needs {', '.join(sorted(absent))}: make {' '.join(targets)}")
            if not made:
                exec(compile(preamble(page), f"preamble of {names(page)}", "exec"), space)
                made = True
            with listening() as heard:
                exec(compile("\n" * (block.line - 1) + code, names(page), "exec"), space)
            printed = heard.getvalue()


def commands(text: str) -> Iterator[str]:
    """Of a `sh` block, comments and continued lines aside."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := line.partition("  #")[0].strip():
            if not words.startswith("#"):
                yield words


def check(command: str) -> None:
    """A command that exists, with options that do."""
    words = shlex.split(command, comments=True)
    while words and "=" in words[0]:  # variables
        words.pop(0)
    if words[0] == "uv" and words[1] == "pip":
        words.pop(0)
    if words[:3] == ["python", "-m", "pip"]:
        words = words[2:]
    if words[0] in COMMANDS:
        return
    if words[0] == "pip":
        for word, value in zip(words, [*words[1:], ""], strict=True):
            assert word != "-r" or (ROOT / value).exists(), value
            for extra in re.findall(r"oomkit\[([\w,-]+)\]", word):
                declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
                assert all(re.search(rf"^{e} = ", declared, re.M) for e in extra.split(",")), word
    elif words[:3] == ["python", "-W", "ignore"]:
        check(" ".join(["python", *words[3:]]))
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in words[1:] if "=" not in word]
        assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in targets)
    elif words[:3] == ["python", "-m", "oomkit"]:
        main = (ROOT / "oomkit" / "__main__.py").read_text(encoding="utf-8")
        assert f'"{words[3]}"' in main, command
    elif words[0] == "python" and words[1].startswith(("examples/", "benchmarks/", "tests/")):
        folder = (ROOT / words[1]).parent
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        source += "".join(path.read_text(encoding="utf-8") for path in folder.glob("*/*.py"))
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert all(f'"{flag}"' in source for flag in flags), command
    else:
        assert words[0] == "python" and words[1].endswith(".py"), command


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_shell(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "sh":
            for command in commands(block.text):
                check(command)
        elif block.kind == "console":
            parts = re.split(r"^\$ ", block.text, flags=re.M)
            assert not parts[0].strip(), "output without a command"
            for part in parts[1:]:
                command, _, expected = part.partition("\n")
                command = command.partition("  #")[0].strip()
                check(command)
                if runs_here(command):
                    alike(expected, ran(command))


def runs_here(command: str) -> bool:
    """Is its output compared?"""
    needed = [package for start, package in RUN_WITH.items() if command.startswith(start)]
    assert needed or command.startswith(RUN), f"nothing compares the output of {command}"
    return not needed or find_spec(needed[0]) is not None


@functools.cache  # several pages show the same run
def ran(command: str) -> str:
    words = shlex.split(command)[1:]
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PATH": "/usr/bin:/bin"}
    if words[0].endswith(".py"):
        path, *arguments = words
        done = run_script(
            ROOT / path, *arguments, env=env, cwd=ROOT, merged=True, OMP_NUM_THREADS="1"
        )
        return done.stdout
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_each_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    known = {"python", "diff", "output", "console", "sh"}
    others = [b for b in blocks(page) if b.kind not in known and not DIRECTIVES.match(b.kind)]
    if page.name == "errors.md":  # its texts are held to the code by test_messages.py
        others = [b for b in others if b.kind != "text"]
    assert [(b.line, b.kind) for b in others] == []
