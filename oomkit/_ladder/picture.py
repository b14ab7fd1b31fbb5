"""What modules hold, noted shallowly: which objects stand where, and versions of tensors."""

from __future__ import annotations

import enum
import random
import sys
import types
from collections import OrderedDict, deque
from typing import Any

import torch

from .._code.spots import is_array, is_stream

_ITEMS = 256  # of a container that are noted; of a longer one its length
_OBJECTS = 4000  # noted at most
_DEPTH = 3  # a module's attributes are 1
_ARRAY_BYTES = 1 << 16
_NUMBERS = frozenset({int, float, complex, bool, str, bytes})
_CONSTANT = frozenset(
    {*_NUMBERS, type(None), type(...), range, slice, types.FunctionType, types.BuiltinFunctionType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type}
)
# Objects of these change nothing that a forward computes.
_IDLE = frozenset({"abc", "enum", "functools", "logging", "pathlib", "threading", "warnings"})
# Which hooks there are is looked at where modules are chosen.
_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "hook" in name)
_MADE_IN_PYTHON = 1 << 9

Label = tuple[Any, ...]  # names on the way, the last one last


def version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    """Where the values lie: a write through ``tensor.data = other`` leaves no version."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.data_ptr()


def own_dict(module: object) -> dict[str, Any]:
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return own


def stream_state(stream: Any) -> object:
    """Of a random generator of Python, of numpy or of torch: something that compares."""
    if isinstance(stream, random.Random):
        return stream.getstate()
    if isinstance(stream, torch.Generator):
        return stream.get_state().numpy().tobytes()
    bits = getattr(stream, "bit_generator", None)
    return repr(stream.get_state() if bits is None else bits.state)


def common_streams() -> list[object]:
    """The states of the generators that ``random`` and ``numpy.random`` share out."""
    numpy = sys.modules.get("numpy.random")
    states: list[object] = [random.getstate()]
    if numpy is not None:
        _, keys, *rest = numpy.get_state()
        states.append((keys.tobytes(), rest))
    return states


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _NUMBERS and a == b)


class _Held:
    """A container, a module's dictionary or an object's, and what is in it."""

    __slots__ = ("items", "keys", "label", "of")

    def __init__(self, of: Any, label: Label) -> None:
        self.of, self.label = of, label
        self.keys: list[Any] | None = None
        if isinstance(of, dict):
            self.keys, self.items = list(dict.keys(of)), list(dict.values(of))
        else:
            self.items = list(of)

    def difference(self, now: _Held) -> str | None:
        if self.keys == now.keys and len(self.items) == len(now.items):
            pairs = zip(self.items, now.items, strict=True)
            moved = next((i for i, (a, b) in enumerate(pairs) if not _same(a, b)), None)
            if moved is None:
                return None
            return _text((*self.label, moved if self.keys is None else self.keys[moved]))
        if self.keys is not None and now.keys is not None:
            odd = [key for key in now.keys if key not in self.keys]
            odd += [key for key in self.keys if key not in now.keys]
            return _text((*self.label, *odd[:1]))
        return _text(self.label)

    def without(self, but: type) -> Any:
        """Pass over a ``forward`` of that type; answers it, or None."""
        if self.keys is None or "forward" not in self.keys:
            return None
        at = self.keys.index("forward")
        if type(self.items[at]) is not but:
            return None
        del self.keys[at]
        return self.items.pop(at)

    def restore(self, ours: Any) -> None:
        """Put back what was here, into the same container.

        Args:
            ours: stands as ``forward``, or is None.
        """
        of = self.of
        if isinstance(of, dict):
            base = OrderedDict if isinstance(of, OrderedDict) else dict
            keys = self.keys or []
            if [key for key in base.keys(of) if ours is None or key != "forward"] != keys:
                base.clear(of)
            for key, item in zip(keys, self.items, strict=True):
                base.__setitem__(of, key, item)
            if ours is not None:
                base.__setitem__(of, "forward", ours)
        elif isinstance(of, list):
            list.__setitem__(of, slice(None), self.items)
        elif isinstance(of, (set, deque)):
            of.clear()
            of.update(self.items) if isinstance(of, set) else of.extend(self.items)


def _text(label: Label) -> str:
    first, *rest = label
    return str(first) + "".join(f".{x}" if isinstance(x, str) else f"[{x!r}]" for x in rest)


class Picture:
    """What the modules hold now. Holds it, so that no address is used again meanwhile.

    Args:
        modules: without those inside them, which are to be listed, too.
        but: a type whose objects are passed over where they stand as ``forward``.
    """

    __slots__ = ("arrays", "but", "held", "long", "streams", "tensors")

    def __init__(self, modules: list[torch.nn.Module], but: type) -> None:
        self.held: list[_Held] = []
        self.tensors: list[tuple[torch.Tensor, int, bool, int, Label]] = []
        self.arrays: list[tuple[Any, bytes, Label]] = []
        self.streams: list[tuple[Any, object, Label]] = []
        self.long: list[tuple[Any, int, Label]] = []
        self.but = but
        seen: set[int] = set()
        queue: list[tuple[Any, Label, int]] = []
        for module in modules:
            held = self.note_dict(own_dict(module), (type(module).__name__,))
            queue += self.inner(held, 1)
        while queue and len(seen) < _OBJECTS:
            value, label, depth = queue.pop()
            if isinstance(value, torch.Tensor):
                self.tensors.append(
                    (value, version(value), value.requires_grad, _address(value), label)
                )
            elif id(value) not in seen:
                seen.add(id(value))
                queue += self.note(value, label, depth)

    def note_dict(self, own: dict[str, Any], label: Label) -> _Held:
        held = _Held(own, label)
        held.without(self.but)
        self.held.append(held)
        return held

    def inner(self, held: _Held, depth: int) -> list[tuple[Any, Label, int]]:
        keys = range(len(held.items)) if held.keys is None else held.keys
        return [
            (item, (*held.label, key), depth)
            for key, item in zip(keys, held.items, strict=True)
            if type(item) not in _CONSTANT and key not in _HOOKS
        ]

    def note(self, value: Any, label: Label, depth: int) -> list[tuple[Any, Label, int]]:
        """One object that is no tensor; what is in it comes next."""
        kind = type(value)
        if isinstance(value, (torch.nn.Module, type, enum.Enum)):
            return []  # modules: those that count are in the list
        if isinstance(value, (dict, list, set, deque, tuple, frozenset)):
            if not value:
                self.long.append((value, 0, label))
                return []
            if len(value) > _ITEMS:
                self.long.append((value, len(value), label))
                return []
            held = _Held(value, label)
            self.held.append(held)
            return self.inner(held, depth + 1) if depth < _DEPTH else []
        if is_array(value):
            if value.nbytes <= _ARRAY_BYTES:
                self.arrays.append((value, value.tobytes(), label))
        elif is_stream(value):
            self.streams.append((value, stream_state(value), label))
        elif kind.__flags__ & _MADE_IN_PYTHON and depth < _DEPTH:
            own = getattr(value, "__dict__", None)
            top = str(kind.__module__).partition(".")[0]
            if isinstance(own, dict) and top not in _IDLE:
                return self.inner(self.note_dict(own, label), depth + 1)
        return []

    def moved(self, *, meanwhile: bool = False) -> str | None:
        """What has other contents by now, as far as versions and cheap looks tell.

        Args:
            meanwhile: others have run, and may have drawn random numbers.
        """
        for tensor, was, grad, address, label in self.tensors:
            if version(tensor) != was or tensor.requires_grad != grad:
                return _name(label)
            if not meanwhile and _address(tensor) != address:
                return _name(label)
        for array, data, label in self.arrays:
            if array.tobytes() != data:
                return _name(label)
        for stream, state, label in () if meanwhile else self.streams:
            if stream_state(stream) != state:
                return f"{_name(label)}, a random generator"
        for value, length, label in self.long:
            if len(value) != length:
                return _name(label)
        return None

    def difference(self, now: Picture) -> str | None:
        """What stands somewhere else, is new or gone."""
        if len(self.held) != len(now.held):
            short = {id(held.of) for held in self.held}
            odd = next((h.label for h in now.held if id(h.of) not in short), self.held[0].label)
            found: str | None = None
            for was, is_now in zip(self.held, now.held, strict=False):
                found = found or (was.difference(is_now) if was.of is is_now.of else None)
            return found or _name(odd)
        for was, is_now in zip(self.held, now.held, strict=True):
            if was.of is not is_now.of:
                return _name(was.label)
            found = was.difference(is_now)
            if found is not None:
                return found.replace("._parameters.", ".").replace("._buffers.", ".")
        return None

    def restore(self) -> list[tuple[_Held, Any]]:
        """Have everything stand where it stood; answers what undoes that, for `put_back`."""
        back = []
        for held in self.held:
            now = _Held(held.of, held.label)
            ours = now.without(self.but)
            if held.difference(now) is not None:
                back.append((held, now, ours))
        for held, _, ours in back:
            held.restore(ours)
        return [(now, ours) for _, now, ours in back]


def put_back(moved: list[tuple[_Held, Any]]) -> None:
    for held, ours in moved:
        held.restore(ours)


def _name(label: Label) -> str:
    return _text(label).replace("._parameters.", ".").replace("._buffers.", ".")
