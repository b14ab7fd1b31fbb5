"""A copy of a step that shares no state with it: for runs of which nothing may be left.

The function is made anew over copies of what its code leads to: variables of its closure and of
its module, and those of functions of that module that it calls. Its own object is copied for a
method.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

MOST = 1024  # elements of a container that is copied


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _has_state(value: object) -> bool:
    """May a step change it? Modules, classes and plain values it cannot; long containers are
    data."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return True
    if isinstance(value, (ModuleType, type, str, bytes, int, float, bool, complex, type(None))):
        return False
    if isinstance(value, (list, set, dict, deque, tuple)):
        return len(value) <= MOST
    return hasattr(value, "__dict__") and not callable(value)


class Copies:
    """Copies of one step's surroundings; each object is copied once."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.shared: list[str] = []
        """Names of what could not be copied."""
        self._functions: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def _value(self, name: str, value: Any, module: dict[str, Any]) -> Any:
        if isinstance(value, FunctionType):
            return self.function(value) if value.__globals__ is module else value
        if isinstance(value, MethodType):
            return self.of(value)
        if not _has_state(value):
            return value
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:  # a file, a loader's process, anything
            self.shared.append(name)
            return value

    def function(self, function: FunctionType) -> FunctionType:
        """The function over copies."""
        if id(function) in self._functions:
            found: FunctionType = self._functions[id(function)]
            return found
        module = function.__globals__
        if id(module) not in self._globals:
            self._globals[id(module)] = dict(module)
        copied_globals = self._globals[id(module)]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__, copied_globals, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        self._functions[id(function)] = made
        for name in _names(function.__code__) & module.keys():
            if copied_globals[name] is module[name]:
                copied_globals[name] = self._value(name, module[name], module)
        for name, cell, old in zip(
            function.__code__.co_freevars, cells, function.__closure__ or (), strict=True
        ):
            try:
                cell.cell_contents = self._value(name, old.cell_contents, module)
            except ValueError:  # not bound yet
                continue
        return made

    def of(self, step: Any) -> Callable[..., Any]:
        """A function, a method, a module or another callable over copies."""
        if isinstance(step, FunctionType):
            return self.function(step)
        if isinstance(step, MethodType):
            own = copy.deepcopy(step.__self__, self.memo)
            function: Any = step.__func__
            return MethodType(self.function(function), own)
        made: Callable[..., Any] = copy.deepcopy(step, self.memo)
        return made
