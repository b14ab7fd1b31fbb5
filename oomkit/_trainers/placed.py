"""What stands in an object's dictionary in place of its methods; copies of the object have none."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

from .. import _C

__all__ = ["Placed", "placed_in"]

_REDUCE = "__reduce_ex__"  # what copies and pickles are made by, looked up in the object first


class Placed:
    """Stands in an object's dictionary in place of one of its methods.

    Args:
        owner: of the dictionary; held weakly.
        name: of the method.
    """

    method: Callable[..., Any]  # the object's own, to be called with the object first

    def __init__(self, owner: Any, name: str) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._name = name
        self._replaced = vars(owner).get(name)

    def put(self) -> None:
        """In place of the object's own."""
        self._set()
        copies = _copies_of(self._owner())
        if copies is None:
            copies = _Copies(self._owner())
            copies._set()
        copies.placed.append(self)

    def remove(self) -> None:
        """The object's own again."""
        self._unset()
        copies = _copies_of(self._owner())
        if copies is not None:
            copies.placed = [each for each in copies.placed if each is not self]
            if not copies.placed:
                copies._unset()

    def _set(self) -> None:
        setattr(self._owner(), self._name, self)

    def _unset(self) -> None:
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return  # somebody has put a function around it, which stays
        delattr(owner, self._name)
        if self._replaced is not None:
            setattr(owner, self._name, self._replaced)

    def __reduce__(self) -> Any:
        """In a copy of the dictionary: the method of the object's copy, without oomkit."""
        if self._replaced is None:
            return getattr, (self._owner(), self._name)
        return operator.getitem, ((self._replaced,), 0)


class _Copies(Placed):
    """In place of `__reduce_ex__`: what a copy or a pickle gets has nothing of oomkit.

    A shallow copy shares the values of the dictionary, and these do not know whose they are.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner, _REDUCE)
        self.placed: list[Placed] = []
        self._kind = type(owner).__name__

    def _is_elsewhere(self, owner: Any) -> bool:
        """Whether a dictionary of another object has this, too."""
        mine = vars(owner)
        for found in gc.get_referrers(self):
            if found is not mine and found is not owner:
                there = found if type(found) is dict else getattr(found, "__dict__", None)
                if isinstance(there, dict) and there.get(_REDUCE) is self:
                    return True
        return False

    def __call__(self, protocol: Any) -> Any:
        owner = self._owner()
        if owner is None or self._is_elsewhere(owner):
            raise TypeError(
                f"an object was given a copy of the dictionary of a {self._kind} that oomkit "
                "protects, so that oomkit cannot tell which of them is to be copied or pickled: "
                f"make copies by copy.copy(), or when the training has ended{_C.see('trainers')}"
            )
        own = self._replaced or getattr(type(owner), _REDUCE).__get__(owner)
        made = own(protocol)
        if not isinstance(made, tuple):
            return made
        callable_, arguments, *state = made
        return callable_, arguments, *map(_without, state[:1]), *state[1:]


def _without(state: Any) -> Any:
    """What an object's copy gets; in place of what is placed, what that has replaced.

    Args:
        state: a dictionary, or one and the values of slots, or what the class makes of both.
    """
    if isinstance(state, tuple):
        return tuple(map(_without, state))
    if not isinstance(state, dict):
        return state
    kept = {}
    for name, value in state.items():
        is_own = not isinstance(value, Placed)
        while isinstance(value, Placed):
            value = value._replaced
        if is_own or value is not None:
            kept[name] = value
    return kept


def _copies_of(owner: Any) -> _Copies | None:
    found = {} if owner is None else vars(owner)
    copies = found.get(_REDUCE)
    return copies if isinstance(copies, _Copies) else None


def placed_in(owner: Any) -> list[Placed]:
    """What stands in the dictionary of an object, in the order in which it was put there.

    Args:
        owner: of the dictionary.
    """
    copies = _copies_of(owner)
    return [] if copies is None else list(copies.placed)
