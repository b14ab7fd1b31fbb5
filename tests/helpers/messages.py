"""What a message says, without its last words: those name its entry of docs/reference/errors.md
(tests/package/test_messages.py)."""

from __future__ import annotations

import re

_SEE = re.compile(r" \(help: python -m oomkit explain [a-z-]+\)")


def message_of(error: object) -> str:
    return _SEE.sub("", str(error))
