"""`mypy --strict` over oomkit and over the examples here, with what they say of each line:

expression  # error: code          mypy finds this error here, and no other
reveal_type(expression)  # type    it is of this type

python tests/typed/check.py [MYPY]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAID = re.compile(r"^(?P<path>[^:]+):(?P<line>\d+): (?P<kind>error|note): (?P<text>.*)$")


def expected(path: Path) -> dict[int, str]:
    """What the comments of a file say, by line."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code, mark, comment = line.partition("  # ")
        if mark and ("reveal_type(" in code or comment.startswith("error: ")):
            found[number] = comment
    return found


def said(output: str) -> tuple[dict[tuple[str, int], str], list[str]]:
    """What mypy says of the examples, and of anything else."""
    found: dict[tuple[str, int], str] = {}
    others = []
    for line in output.splitlines():
        match = SAID.match(line)
        if match is None:
            continue
        text = match["text"]
        if match["path"].startswith("tests/typed/"):
            key = match["path"], int(match["line"])
            if revealed := re.fullmatch(r'Revealed type is [\'"](.*)[\'"]', text):
                found[key] = revealed[1].replace("builtins.", "")
            elif match["kind"] == "error":
                code = re.search(r"\[([\w-]+)\]$", text)
                found[key] = f"error: {code[1] if code else text}"
        elif match["kind"] == "error":
            others.append(line)
    return found, others


def differences(output: str) -> list[str]:
    found, others = said(output)
    wrong = list(others)
    wanted = {
        (f"tests/typed/{path.name}", line): text
        for path in sorted(HERE.glob("*.py"))
        if path.name != "check.py"
        for line, text in expected(path).items()
    }
    for key in sorted(found.keys() | wanted.keys()):
        if (have := found.get(key)) != (want := wanted.get(key)):
            wrong.append(f"{key[0]}:{key[1]}: expected {want}, mypy says {have}")
    return wrong


def main() -> int:
    mypy = sys.argv[1] if len(sys.argv) > 1 else "mypy"
    examples = [str(path.relative_to(ROOT)) for path in sorted(HERE.glob("*.py"))]
    done = subprocess.run(
        [mypy, "--strict", "--no-error-summary", "oomkit", *examples],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    wrong = differences(done.stdout)
    if not done.stdout and done.returncode != 0:
        wrong.append(done.stderr)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
