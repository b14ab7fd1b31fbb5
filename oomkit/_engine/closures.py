"""Closures that are handed to an optimizer's ``step()`` in a split step."""

from __future__ import annotations

from collections.abc import Callable

from .. import _C


def silent_closure(closure: Callable[[], object], name: str) -> Callable[[], None]:
    """The closure, refused where it returns a loss: that would be one micro-batch's.

    Args:
        name: of the optimizer's class.
    """

    def checked() -> None:
        if closure() is not None:
            raise _C.SplitError(
                f"auto_batch cannot split this step: the closure of {name}.step() returns the "
                "loss of one micro-batch; let it return None, or decorate the forward and "
                "backward instead of the step around them"
                f"{_C.see('optimizer-closure')}"
            )

    return checked
