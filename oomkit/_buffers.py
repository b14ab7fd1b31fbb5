"""Buffers of a step's modules: which ones move, and whether a module's forward moves them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

_SAMPLED_FORWARDS = 64  # after so many, only versions are compared
_NORMS = torch.nn.modules.batchnorm._NormBase


def _sample(tensor: torch.Tensor) -> str:
    """Some values, for writes through ``.data``: of plain tensors on the CPU."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return ""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return ""
    try:
        flat = tensor.detach().view(-1)
        return str(flat[:: max(1, flat.numel() // 64)].tolist())
    except (RuntimeError, TypeError, ValueError):
        return ""


class TensorMark:
    """Which tensor it was, at which version; keeps nothing alive."""

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


def _is_compiling() -> bool:
    """Has torch.compile been used in this process, as far as can be seen?"""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None) or {}
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters) or any(backend is not None for backend in backends.values())


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
        self.handles: list[Any] = []
        self.where = [
            (weakref.ref(m), name)
            for m in modules
            for name, buffer in m._buffers.items()
            if isinstance(buffer, torch.Tensor) and not torch.nn.parameter.is_lazy(buffer)
        ]
        self.marks = self.now()
        self.half: torch.nn.Module | None = None  # its registration has begun
        try:
            if self.where and not _is_compiling():
                for module in modules:
                    self.register(module)
        except BaseException:
            self.remove()
            raise

    def register(self, module: torch.nn.Module) -> None:
        self.half = module
        pre = module.register_forward_pre_hook(self.edges[0], prepend=True)
        self.handles.append(pre)
        post = module.register_forward_hook(self.edges[1], always_call=True)
        self.handles.append(post)
        self.half = None

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
            # Those of the known kinds have a warning of their own.
            if what not in into and (norms or not isinstance(module, _NORMS)):
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
        hooked = bool(self.handles)
        self.remove()
        self.compare(self.outside if hooked and self.depth == 0 else self.inside, hooked)
        self.marks = {}
        return (self.outside[0] if self.outside else None), [
            f"{what} (changed{' in a forward' if hooked else ''})" for what in self.inside
        ]

    def remove(self) -> None:
        for edge in self.edges:
            edge.act = None
        for handle in self.handles:
            handle.remove()
        if self.half is not None:  # an interrupt came before its handle
            for name, table in vars(self.half).items():
                if name.startswith("_forward_") and isinstance(table, dict):
                    for key in [k for k, hook in table.items() if hook in self.edges]:
                        for other in vars(self.half).values():
                            if isinstance(other, dict):
                                other.pop(key, None)
            self.half = None
        self.handles = []
