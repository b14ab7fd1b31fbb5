"""Buffers of a step's modules: which ones move, and whether a module's forward moves them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .. import _C

_SAMPLED_FORWARDS = 64  # after so many, only versions are compared
_NORMS = torch.nn.modules.batchnorm._NormBase
_OF_SAMPLES = torch.nn.modules.instancenorm._InstanceNorm


def _sample(tensor: torch.Tensor) -> int | str:
    """Some values, for writes through ``.data``: of plain tensors on the CPU."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return ""
    return _C._tensor_sample(tensor) or _sample_by_torch(tensor)


def _sample_by_torch(tensor: torch.Tensor) -> str:
    """The same without a bridge."""
    if tensor.device.type != "cpu":
        return ""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return ""
    return _values(tensor)


def _values(tensor: torch.Tensor) -> str:
    """A function of its own: CPython 3.11 and 3.12 loop for ever where an exception passes a
    `try` far from the beginning of its function and there is no memory for that distance."""
    try:
        flat = tensor.detach().view(-1)
        return str(flat[:: max(1, flat.numel() // 64)].tolist())
    except (RuntimeError, TypeError, ValueError):
        return ""


class TensorMark:
    """Which tensor it was, at which version; keeps nothing alive."""

    __slots__ = ("ref", "sample", "version")

    def __init__(self, tensor: torch.Tensor, sample: bool = True) -> None:
        self.ref = weakref.ref(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version
        self.sample = _sample(tensor) if sample else ""

    def same(self, other: TensorMark) -> bool:
        return (
            self.ref() is other.ref()
            and self.version == other.version
            and (self.sample == other.sample or not self.sample or not other.sample)
        )


def _nothing(*_: object) -> None:
    return None


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _Edge:
    """A forward hook of ours. A copy or a pickle of a module gets one that does nothing."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def __call__(self, *_: object) -> None:
        if self.act is not None:
            self.act()

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_nothing, ()


def is_compiling() -> bool:
    """Has torch.compile been used in this process, as far as can be seen?"""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None) or {}
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters) or any(backend is not None for backend in backends.values())


def module_runs(module: torch.nn.Module, _: object) -> None:
    """A hook before the forward of a module that csrc/hook/forwards.c watches. A copy or a pickle
    of the module gets this function, too, which does nothing outside of the call that put it
    there."""
    if not torch.compiler.is_compiling():  # no call of ours fits into a graph
        _C._module_runs(module)


_Hooked = tuple[dict[int, Any], int, Any]
"""A table that has a hook of ours, its key there, and the one before it or None."""


class Buffers:
    """Which buffers move, and whether in the forward of a module or by the step itself.

    Hooks would make compiled modules compile again, or not be called: where anything is
    compiled there are none, and what moves is said and not refused.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.depth = self.forwards = 0
        self.outside: list[str] = []
        self.inside: list[str] = []
        self.edges = [_Edge(self.enter), _Edge(self.leave)]
        self.hooked: _Hooked | None = None
        self.where = [
            (weakref.ref(m), name)
            for m in modules
            for name, buffer in m._buffers.items()
            if isinstance(buffer, torch.Tensor) and not torch.nn.parameter.is_lazy(buffer)
        ]
        self.marks = self.now()
        if self.where and not is_compiling():
            self.hook(modules)

    def hook(self, modules: list[torch.nn.Module]) -> None:
        """Short, for without memory CPython enters no handler of an instruction above 256."""
        try:
            key = RemovableHandle(modules[0]._forward_hooks).id  # in no table but ours
            _C.own_hooks(1)
            for module in modules:
                self.register(module, key)
        except BaseException:
            self.remove()
            raise

    def register(self, module: torch.nn.Module, key: int) -> None:
        """As module.register_forward_pre_hook(prepend=True) and register_forward_hook(
        always_call=True), but where a hook will be is noted before it is there: an error
        or an interrupt between the two leaves none. One key serves all tables: a handle
        for each of them would be most of the time that this takes."""
        before, after = module._forward_pre_hooks, module._forward_hooks
        self.hooked = before, key, self.hooked
        before[key] = self.edges[0]
        before.move_to_end(key, last=False)  # type: ignore[attr-defined]
        always = module._forward_hooks_always_called
        self.hooked = after, key, (always, key, self.hooked)
        after[key] = self.edges[1]
        always[key] = True

    def now(self) -> dict[tuple[int, str], tuple[torch.nn.Module, TensorMark]]:
        marks = {}
        for ref, name in self.where:
            module = ref()
            buffer = None if module is None else module._buffers.get(name)
            if module is not None and isinstance(buffer, torch.Tensor):
                mark = TensorMark(buffer, self.forwards < _SAMPLED_FORWARDS)
                marks[id(module), name] = (module, mark)
        return marks

    def compare(self, into: list[str], norms: bool) -> None:
        """Those that moved since the marks, and new marks."""
        now = self.now()
        for key, (module, was) in self.marks.items():
            if key in now and was.same(now[key][1]):
                continue
            what = f"the buffer {key[1]!r} of a {type(module).__name__}"
            # Those that normalise by the batch have a warning of their own.
            known = isinstance(module, _NORMS) and not isinstance(module, _OF_SAMPLES)
            if what not in into and (norms or not known):
                into.append(what)
        self.marks = now

    def enter(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.compare(self.outside, True)
            self.forwards += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.compare(self.inside, False)

    def end(self) -> tuple[str | None, list[str]]:
        """(what the step itself moved, what moved in a forward or who knows where)."""
        hooked = self.hooked is not None
        self.remove()
        self.compare(self.outside if hooked and self.depth == 0 else self.inside, hooked)
        self.marks = {}
        return (self.outside[0] if self.outside else None), [
            f"{what} (changed{' in a forward' if hooked else ''})" for what in self.inside
        ]

    def remove(self) -> None:
        """Needs no memory, which a loop over a list, `a, b = pair` and list.pop() do."""
        self.edges[0].act = None
        self.edges[1].act = None
        while self.hooked is not None:
            self.hooked[0].pop(self.hooked[1], None)
            self.hooked = self.hooked[2]
