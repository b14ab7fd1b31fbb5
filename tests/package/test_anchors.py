"""Every error, warning and note that a user can meet ends with `python -m oomkit explain KIND`.

What has no anchor is in WITHOUT, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROTOCOL = "Python's own protocol, in Python's words"
THEIRS = "repeats the text of another library, which programs compare"
CAUGHT = "is caught here, and its text becomes a part of a message with an anchor"
COMMAND = "one line of a command, which is about its arguments"
ANCHORED = "the text is made elsewhere, with its anchor"

# (file, beginning of the text, or the call where the text is made elsewhere) -> the reason.
WITHOUT = {
    ("csrc/ladder/packed.c", "one of the variables needed"): THEIRS,
    ("csrc/types/bound_type.c", "__wrapped__"): PROTOCOL,
    ("csrc/types/guard_type.c", "__exit__() expected"): PROTOCOL,
    ("csrc/types/step_type.c", "__set_name__() takes"): PROTOCOL,
    ("csrc/types/step_type.c", "%R was called while the garbage"): PROTOCOL,
    ("csrc/module/module.c", "PyErr_SetString(PyExc_KeyError, "): PROTOCOL,
    ("csrc/batch/not_found.c", "oomkit_raise(st->SplitError, "): ANCHORED,
    ("csrc/proof/judge.c", "oomkit_refuse(call, "): ANCHORED,
    ("csrc/py/errors.c", "PyErr_WarnFormat(category, "): ANCHORED,
    ("oomkit/__main__.py", "..., line"): COMMAND,
    ("oomkit/_engine/nodes.py", "_C.SplitError(ctx.why)"): ANCHORED,
    ("oomkit/_engine/store.py", "..."): CAUGHT,
    ("oomkit/_hpo/study.py", "oomkit: ..."): ANCHORED,
    ("oomkit/_ladder/recompute.py", "one of the variables needed"): THEIRS,
    ("oomkit/_ladder/values.py", "OpaqueError(value)"): CAUGHT,
    ("oomkit/_limits/cuda.py", "warnings.warn(message, "): ANCHORED,
    ("oomkit/_ranks/others.py", "_C.RankError(text)"): ANCHORED,
    ("oomkit/executable.py", "Batch size was passed into"): THEIRS,
    ("oomkit/executable.py", "No executable batch size found"): THEIRS,
    ("oomkit/lightning.py", "module ... has no attribute"): PROTOCOL,
}

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_SET = re.compile(
    r"\b(?:PyErr_SetString|PyErr_Format|PyErr_WarnEx|PyErr_WarnFormat|oomkit_raise|oomkit_warn"
    r"|oomkit_refuse|oomkit_refuse_split|oomkit_half_updated)\("
)
_NOTE = re.compile(rf'(?="oomkit: )(?:{_STRING}\s*|SEE\(\s*"[\w-]+"\s*\)\s*|[A-Z_]{{3,}}\s*)+')
_EXCEPTION = re.compile(r"^[A-Z]\w*(Error|Exception|OutOfMemory|PartialUpdate|NotOurs)$")


def of_c(text: str) -> Iterator[tuple[str, bool]]:
    """What sets an error, warns or is a note: its text, and whether it has an anchor."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    calls: list[range] = []
    for match in _SET.finditer(text):
        if text[text.rfind("\n", 0, match.start()) + 1 : match.start()] == "":
            continue  # its definition
        call = _to_its_end(text, match.start())
        calls.append(range(match.start(), match.start() + len(call)))
        literal = "".join(each[1:-1] for each in re.findall(_STRING, call))
        made_elsewhere = not literal.replace("%U", "")
        yield (" ".join(call.split()) if made_elsewhere else literal), "SEE(" in call
    for match in _NOTE.finditer(text):
        if any(match.start() in call for call in calls):
            continue
        yield match[0], "SEE(" in match[0]


def _to_its_end(text: str, start: int) -> str:
    """From a name to the parenthesis that closes its call."""
    depth = 0
    for match in re.finditer(rf"{_STRING}|[()]", text[start:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : start + match.end()]
    raise AssertionError(text[start : start + 80])


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _anchors(node: ast.AST, named: set[str]) -> bool:
    """Does it call see(), or use a name whose value does?"""
    return any(
        (isinstance(part, ast.Call) and _name(part.func) in {"see", "_see"})
        or (isinstance(part, ast.Name) and part.id in named)
        for part in ast.walk(node)
    )


def _text(node: ast.AST) -> str:
    strings = (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant))
    for part in strings:
        if isinstance(part, ast.JoinedStr):
            values = (getattr(value, "value", "") for value in part.values)
            return "".join(value if isinstance(value, str) else "..." for value in values)
        if isinstance(part.value, str):
            return part.value
    return ast.unparse(node)


def of_python(text: str) -> Iterator[tuple[str, bool]]:
    """The same of Python: exceptions that are made, warnings and notes."""
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    scopes = {child: function for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        made = _EXCEPTION.search(name) and (node.args or node.keywords)
        made = made or (isinstance(node.func, ast.Name) and name == "error")  # of _ranks
        if made or name in {"warn", "warn_explicit", "add_note"}:
            near = {
                target.id
                for part in ast.walk(tree)
                if isinstance(part, ast.Assign) and scopes.get(part) in {None, scopes.get(node)}
                for target in part.targets
                if isinstance(target, ast.Name) and _anchors(part.value, set())
            }
            yield _text(node), _anchors(node, near)


FILES = sorted([*ROOT.glob("csrc/*/*.[ch]"), *ROOT.glob("oomkit/**/*.py")])


def messages(path: Path) -> Iterator[tuple[str, bool]]:
    text = path.read_text(encoding="utf-8")
    return of_python(text) if path.suffix == ".py" else of_c(text)


def test_every_error_warning_and_note_has_an_anchor_or_a_reason() -> None:
    without, used = [], set()
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for text, anchored in messages(path):
            if anchored:
                continue
            keys = [k for k in WITHOUT if k[0] == name and (k[1] == "..." or text.startswith(k[1]))]
            used.update(keys)
            if not keys:
                without.append(f"{name}: {text}")

    assert without == []
    assert set(WITHOUT) == used  # and none that is gone


@pytest.mark.parametrize(
    ("text", "anchored"),
    [
        ('{\n    PyErr_SetString(PyExc_TypeError, "no");\n}', False),
        ('{\n    oomkit_raise(st->SplitError, "no: %s" SEE("weight"), f("(a"));\n}', True),
        ('{\n    add(error, "oomkit: told" " in two" SEE("chunks"));\n}', True),
        ('{\n    add(error, "oomkit: told" " in two");\n}', False),
    ],
)
def test_calls_of_c_are_read(text: str, anchored: bool) -> None:
    assert [found for _, found in of_c(text)] == [anchored]


@pytest.mark.parametrize(
    ("text", "anchored"),
    [
        ('raise ValueError("no")', False),
        ("raise ValueError(f\"no{_C.see('weight')}\")", True),
        ('def f():\n    end = _C.see("weight")\n    warnings.warn(f"no{end}")', True),
        (
            'def f():\n    end = _C.see("weight")\n    raise E(end)\n\n\nraise ValueError(end)',
            False,
        ),
        ('error.add_note("no")', False),
    ],
)
def test_calls_of_python_are_read(text: str, anchored: bool) -> None:
    assert [found for _, found in of_python(text)] == [anchored]
