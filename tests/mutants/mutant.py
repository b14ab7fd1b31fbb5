"""What a mutant is: one edit that breaks one invariant, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class StaleEdit(Exception):
    """The text that an edit replaces is not in the source, or more than once."""


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str
    """The invariant, as a sentence that is true of the library and false of the mutant."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Names for pytest, relative to tests/: one of them has to fail."""
    also: tuple[tuple[str, str], ...] = field(default=())
    """Further (old, new) of the same file, where one replacement would not compile or crash."""

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    def mutated(self, source: str) -> str:
        for old, new in ((self.old, self.new), *self.also):
            found = source.count(old)
            if found != 1:
                raise StaleEdit(
                    f"{self.name}: the text to replace occurs {found} times in {self.file}, "
                    f"expected once: {old!r}; adapt the edit to the source"
                )
            source = source.replace(old, new)
        return source

    def apply(self, tree: Path) -> None:
        target = tree / self.file
        target.write_text(self.mutated(target.read_text()))
