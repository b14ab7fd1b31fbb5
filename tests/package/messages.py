"""The errors and warnings in the sources, by the kind that `SEE("kind")` or `see("kind")` names.

python tests/package/messages.py writes the texts of each kind into docs/reference/errors.md.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"
_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_C = re.compile(rf'((?:{_LITERAL}\s*)+)SEE\(\s*"([a-z-]+)"\)')
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_FIELD = re.compile(r"%(?:\.\d+)?(?:lld|llu|zd|ld|[A-Zcdsux])")


def _of_c(text: str) -> list[tuple[str, str]]:
    found = []
    for literals, kind in _C.findall(_COMMENT.sub("", text)):
        joined = "".join(each[1:-1] for each in re.findall(_LITERAL, literals))
        found.append((kind, _FIELD.sub("...", joined).replace('\\"', '"').replace("%%", "%")))
    return found


def _called(node: ast.AST) -> str | None:
    """The kind of a call of see()."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name in {"see", "_see"} and isinstance(node.args[0], ast.Constant):
            return str(node.args[0].value)
    return None


def _of_python(text: str) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        parts: list[str] = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            elif isinstance(value, ast.FormattedValue):
                kind = _called(value.value)
                parts.append("..." if kind is None else "")
                if kind is not None:
                    found.append((kind, "".join(parts)))
    return found


def messages() -> dict[str, list[str]]:
    """Texts by kind, what is filled in as three dots."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.glob("csrc/*/*.[ch]")) + sorted(ROOT.glob("oomkit/**/*.py")):
        read = _of_python if path.suffix == ".py" else _of_c
        for kind, text in read(path.read_text(encoding="utf-8")):
            if kind != "kind":
                found.setdefault(kind, set()).add(text.removeprefix("oomkit: "))
    return {kind: sorted(texts) for kind, texts in sorted(found.items())}


def block(texts: list[str]) -> str:
    return "```text\n" + "\n".join(texts) + "\n```\n"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    for kind, texts in messages().items():
        entry = re.compile(rf"(^### {kind}\n+)(?:```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
        page, count = entry.subn(lambda m, texts=texts: m[1] + block(texts), page)
        if not count:
            print(f"no entry for {kind}", file=sys.stderr)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
