"""Every body."""

from __future__ import annotations

from .body import Body
from .recovery import Recovery

BODIES: list[Body] = [
    Recovery("inside"),
    Recovery("inside", warm=True),
    Recovery("inside", phase="forward", warm=True, gradients=True),
    Recovery("inside", phase="optimizer", warm=True),
    Recovery("returned", "back", warm=True),
    Recovery("rows", "back", warm=True),
    Recovery("stash", "back", warm=True),
    Recovery("stash", "call", "forward", warm=True),
    Recovery("deferred", "back", warm=True),
    Recovery("evaluation", phase="forward", warm=True),
]
