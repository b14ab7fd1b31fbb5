"""The C of oomkit as data: folders, functions, who uses whose, which header declares what."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


def _folders() -> tuple[str, ...]:
    """Of oomkit._C, in the order of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS":
            assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            return tuple(ast.literal_eval(node.value.func.value).split())
    raise AssertionError("setup.py has no FOLDERS")


PLAIN = ("core", "records")
"""C without Python, below all."""
FOLDERS = _folders()

_NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_START = re.compile(r"^([A-Za-z_]\w*)\(", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def code(text: str) -> str:
    """Without comments and literals; lines stay where they are."""
    return _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


@dataclass
class Function:
    name: str
    static: bool
    lines: int
    """From the line of its name to the closing brace."""


def _closing(text: str, at: int, pair: str) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError(f"nothing closes the {pair[0]!r} at {at}")


def functions(text: str) -> tuple[dict[str, Function], set[str]]:
    """What is defined, and the names that are only declared, in text without comments."""
    defined: dict[str, Function] = {}
    declared: set[str] = set()
    for found in _START.finditer(text):
        end = _closing(text, found.end() - 1, "()")
        rest = text[end + 1 :].lstrip()
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        if rest.startswith("{"):
            last = _closing(text, text.index("{", end), "{}")
            length = text.count("\n", found.start(), last) + 1
            defined[found.group(1)] = Function(found.group(1), "static" in before.split(), length)
        elif rest.startswith(";"):
            declared.add(found.group(1))
    return defined, declared


@dataclass
class House:
    """Files of some folders, from below."""

    folders: tuple[str, ...]
    text: dict[str, str] = field(default_factory=dict)
    """By "folder/file": without comments, and without what is included."""
    includes: dict[str, list[str]] = field(default_factory=dict)
    """By file: those of the house, as "folder/file"."""
    defined: dict[str, dict[str, Function]] = field(default_factory=dict)
    declared: dict[str, set[str]] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        folder = name.partition("/")[0]
        self.includes[name] = []
        for other in INCLUDE.findall(text):
            at = f"{folder}/{other}" if "/" not in other else other.removeprefix("../")
            if at.partition("/")[0] in self.folders:
                self.includes[name].append(at)
        plain = code(INCLUDE.sub("", text))
        self.text[name] = plain
        self.defined[name], self.declared[name] = functions(plain)

    def rank(self, name: str) -> int:
        return self.folders.index(name.partition("/")[0])

    def home(self) -> dict[str, str]:
        """Of each function that others can use, the file that defines it."""
        return {
            function.name: name
            for name, found in self.defined.items()
            for function in found.values()
            if not function.static or name.endswith(".h")
        }

    def uses(self) -> list[tuple[str, str, str]]:
        """(file, function, file of the function), for each use of another file's."""
        home = self.home()
        found = []
        for name, text in self.text.items():
            if name.endswith(".h"):
                text = "".join(_bodies(text))
            for word in sorted(set(_WORD.findall(text)) - self.defined[name].keys()):
                if home.get(word, name) != name:
                    found.append((name, word, home[word]))
        return found

    def upward(self) -> list[str]:
        """ "file function" of uses that point up."""
        return sorted(
            f"{name} {function}"
            for name, function, other in self.uses()
            if self.rank(other) > self.rank(name)
        )

    def cycles(self) -> dict[str, set[str]]:
        """Headers by what each includes, for a sort."""
        graph: dict[str, set[str]] = defaultdict(set)
        for name, others in self.includes.items():
            if name.endswith(".h"):
                graph[name] |= set(others)
        return graph


def _bodies(text: str) -> list[str]:
    """Of the functions that a header defines: what it declares are no uses."""
    found = []
    for start in _START.finditer(text):
        end = _closing(text, start.end() - 1, "()")
        if text[end + 1 :].lstrip().startswith("{"):
            brace = text.index("{", end)
            found.append(text[brace : _closing(text, brace, "{}") + 1])
    return found


def house(folders: tuple[str, ...]) -> House:
    built = House(folders)
    for folder in folders:
        for path in sorted((CSRC / folder).iterdir()):
            if path.suffix in {".c", ".h"}:
                built.add(f"{folder}/{path.name}", path.read_text(encoding="utf-8"))
    return built
