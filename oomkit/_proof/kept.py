"""What was proven of a step, as text for a checkpoint or for the sizes of a later run.

A proof is believed of the code that it was made with, and there until losses have been compared
once more: code that the step calls may be another by now.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .weights import Tried, Weigher

__all__ = ["figures", "noted", "recalled"]

_MOST = 200  # weights that were tried and are noted of one batch
_STRUCTURES = 8  # of batches that are kept of earlier runs
_Proven = tuple[Weigher | None, Tried, bool]


def _code(function: Any) -> str:
    from ..sizes import _code_of, _digest

    code = _code_of(function)
    return "" if code is None else _digest(code)


def noted(
    function: Any,
    proofs: list[tuple[int, Weigher | None, Tried | None, int]],
    texts: list[str] | None = None,
    numbers: dict[str, int] | None = None,
) -> str | None:
    """Text of proofs, or None where there is nothing to note.

    Args:
        function: what is decorated.
        proofs: of each structure of batches its key, the weights that were found, what is known
            of others, and whether labels were ignored.
        texts: of earlier runs; what they have of other structures stays, for the same code.
        numbers: how those in results are joined, by place.
    """
    code = _code(function)
    own = {f"{key:016x}" for key, *_ in proofs}
    entries = [
        entry
        for key, entry in _entries(texts or [], code).items()
        if key not in own and _is_ours(entry)
    ][-_STRUCTURES:]
    for key, rule, tried, labels in proofs:
        if rule is not None and rule.kind == "classes":
            continue  # its weights are a tensor of the model's
        shown = [
            [list(name), gap if math.isfinite(gap) else None] for name, gap in (tried or {}).items()
        ]
        entries.append(
            {
                "key": f"{key:016x}",
                "rule": None if rule is None else [*rule.key[:3], rule.text],
                "tried": shown[:_MOST],
                "labels": bool(labels),
            }
        )
    if not entries or not code:
        return None
    places = list({**figures(function, texts or []), **(numbers or {})}.items())[:_MOST]
    more = {"figures": dict(places)} if places else {}
    return json.dumps({"code": code, "proofs": entries, **more})


def figures(function: Any, texts: list[str]) -> dict[str, int]:
    """How numbers in results are joined, as these texts have it for this code."""
    code = _code(function)
    found: dict[str, int] = {}
    for text in texts:
        try:
            kept = json.loads(text)
            if code and kept["code"] == code:
                found.update({str(k): int(v) & 15 for k, v in kept.get("figures", {}).items()})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
    return found


def _entries(texts: list[str], code: str) -> dict[str, Any]:
    """What texts have for this code, by the keys of structures: the last one's, where many do."""
    entries: dict[str, Any] = {}
    for text in texts if code else []:
        try:
            found = json.loads(text)
            if found["code"] == code:
                entries.update({entry["key"]: entry for entry in found["proofs"]})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # a text of somebody else's: it is proven anew
    return entries


def _is_ours(entry: dict[str, Any]) -> bool:
    try:
        _proven(entry)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return True


def recalled(function: Any, texts: list[str], key: int) -> _Proven | None:
    """The proof of a structure of batches, where one of these texts has it for this code."""
    entry = _entries(texts, _code(function)).get(f"{key:016x}")
    return _proven(entry) if entry is not None and _is_ours(entry) else None


def _proven(entry: dict[str, Any]) -> _Proven:
    rule = None
    if entry["rule"] is not None:
        kind, leaf, value, text = entry["rule"]
        if not isinstance(kind, str) or kind == "classes" or type(leaf) is not int:
            raise ValueError("no weights of ours")
        rule = Weigher(kind, leaf, str(text), None, int(value))
    tried: Tried = {
        tuple(name): math.inf if gap is None else float(gap) for name, gap in entry["tried"]
    }
    return rule, tried, bool(entry["labels"])
