"""What a test has seen of every attempt of a step, the failed ones included.

A roll-back undoes what a failed attempt has appended to a list, so that a plain list shows
the attempts that count. The standard library's own classes are outside of what it undoes.
"""

from __future__ import annotations

from collections import UserDict, UserList, deque
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


class Seen(UserList[T]):
    """A list that nothing is taken from."""


class World(UserDict[str, Any]):
    """What happens to something outside of the process: `world.set(device, pending=1)`."""

    def set(self, target: object, **values: Any) -> None:
        # In a form that the code of a step does not show: the world does not go back with it.
        deque(map(setattr, repeat(target), values, values.values()), maxlen=0)


world = World()
