"""Recomputation: modules that repeat keep their inputs, and compute the rest in the backward.

Each forward of a chosen module runs under ``torch.utils.checkpoint``, once, and what it saves
stays until it has returned. Then it is known whether it may be computed again: if it was a
function of its inputs, its parameters and torch's random streams, what it saved is dropped; if it
moved anything else it is kept, and that forward was a plain one. A forward never has to be
undone, and the peak is not higher: the backward of one module needs its saved tensors, too.
"""

from __future__ import annotations

import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils import checkpoint as torch_checkpoint

from .. import _C
from .._code.module_buffers import _sample, _values
from .._code.side_effects import _difference, _Function, _functions, _Scan
from .._code.spots import is_stream, streams_of
from .choice import Group, choose, global_hooks, roots_of
from .picture import Picture, common_streams, own_dict, put_back, stream_state, version
from .values import OpaqueError, put_together, result_problem, take_apart

__all__ = ["Handle", "LeftOut", "advise", "recompute_begin"]

_OPTION = 'ladder=("update", "state", "activations")'
_ADVICE = f"oomkit.auto_batch({_OPTION}) turns recomputation off"
_OFFENCES = 2  # in succession; a table that grows once is no reason
_MISSING: Any = object()
_NO_STATE = (types.FunctionType, types.ModuleType, type)
_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class _Record:
    """What is known of a module. Holds nothing of it."""

    __slots__ = ("draws", "known", "offences", "reason", "streams")

    def __init__(self) -> None:
        self.known = False  # it has run once and was looked at closely
        self.draws = False  # its code names `random` or numpy
        self.streams: list[Any] = []
        self.offences = 0
        self.reason = ""


class LeftOut:
    """Modules that are run plainly, and why: a step's memory. Keeps none of them alive."""

    def __init__(self) -> None:
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, _Record]
        self._records = weakref.WeakKeyDictionary()

    def record(self, module: torch.nn.Module) -> _Record:
        return self._records.setdefault(module, _Record())

    def add(self, module: torch.nn.Module, reason: str = "") -> None:
        record = self.record(module)
        record.offences, record.reason = _OFFENCES, reason

    def __contains__(self, module: torch.nn.Module) -> bool:
        record = self._records.get(module)
        return record is not None and record.offences >= _OFFENCES

    def __len__(self) -> int:
        return sum(record.offences >= _OFFENCES for record in self._records.values())

    def reasons(self) -> list[str]:
        """Each once: "a Block changes Block.calls"."""
        found = [
            f"a {type(module).__name__} {record.reason}"
            for module, record in self._records.items()
            if record.reason
        ]
        return list(dict.fromkeys(found))


# --- what a forward saves ---


def _top_hooks() -> _Hooks | None:
    found: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


class _Saved:
    """A tensor that a forward saves, and torch's place for it, until one of both goes.

    While it has the tensor itself it may stand in a cycle that no collector sees: a node of the
    graph, what it saves, that tensor's `grad_fn`. `drop()` or `keep()` of its keeper ends that.
    """

    __slots__ = ("__weakref__", "moved", "place", "tensor", "unpack", "version")

    def __init__(self, tensor: torch.Tensor, hooks: _Hooks, offload: _Hooks | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.moved: tuple[Any, Callable[[Any], Any]] | None = None
        self.version = version(tensor)
        self.place = hooks[0](tensor)
        self.unpack = hooks[1]
        if offload is not None:  # its memory is needed now, not when the forward has returned
            self.moved, self.tensor = (offload[0](tensor), offload[1]), None

    def get(self) -> torch.Tensor:
        if self.moved is not None:
            back: torch.Tensor = self.moved[1](self.moved[0])
            return back
        if self.tensor is None:
            found: torch.Tensor = self.unpack(self.place)
            return found
        if version(self.tensor) != self.version:  # torch looks at none that has hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at "
                f"version {version(self.tensor)}; expected version {self.version} instead"
            )
        return self.tensor

    def keep(self, below: _Hooks | None) -> None:
        """As if torch had no place for it: what the caller's own hooks make of it, or itself."""
        tensor, self.place = self.tensor, None
        if self.moved is not None:
            (self.place, self.unpack), self.moved = self.moved, None
            return
        if tensor is None or below is None:
            self.unpack = _nothing
            if tensor is not None and tensor.grad_fn is not None:
                self.tensor = tensor.detach()  # what a node saves must not lead to the node
            return
        self.place, self.unpack, self.tensor = below[0](tensor), below[1], None


def _nothing(_: object) -> Any:
    return None


class _Keeper:
    """While a module's forward runs: what it saves goes to torch's place and stays beside it."""

    __slots__ = ("hooks", "offload", "saved", "torch_hooks")

    def __init__(self, below: _Hooks | None) -> None:
        ours = below is not None and type(below[0]).__module__ == _C.__name__
        self.offload = below if ours else None
        self.saved: list[weakref.ref[_Saved]] = []
        self.torch_hooks: _Hooks | None = None
        self.hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        self.torch_hooks = _top_hooks()  # of the checkpoint that this is the context of
        self.hooks = saved_tensors_hooks(self.pack, _Saved.get)
        self.hooks.__enter__()

    def __exit__(self, *problem: Any) -> None:
        hooks, self.hooks, self.torch_hooks = self.hooks, None, None
        if hooks is not None:
            hooks.__exit__(*problem)

    def pack(self, tensor: torch.Tensor) -> _Saved:
        assert self.torch_hooks is not None
        saved = _Saved(tensor, self.torch_hooks, self.offload)
        self.saved.append(weakref.ref(saved))
        return saved

    def drop(self) -> None:
        for ref in self.saved:
            saved = ref()
            if saved is not None:
                saved.tensor = saved.moved = None
        self.saved.clear()

    def keep(self, below: _Hooks | None) -> None:
        for ref in self.saved:
            saved = ref()
            if saved is not None:
                saved.keep(below)
        self.saved.clear()


# --- a forward, and the same again ---


class _Run:
    """A forward of a module with its arguments, and with what it found: torch calls it again."""

    __slots__ = ("backends", "child", "first", "forward", "name", "parts", "was")

    def __init__(
        self,
        child: torch.nn.Module,
        forward: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        parts: Any,
    ) -> None:
        self.child, self.forward, self.parts = child, forward, parts
        self.first: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self.was = Picture(list(child.modules()), _Forward)
        self.backends = _cur_sdpa_kernel_backends(with_priority=True)

    def __call__(self, *leaves: torch.Tensor) -> Any:
        if self.first is not None:  # the caller's own containers
            (args, kwargs), self.first = self.first, None
            return self.forward(*args, **kwargs)
        args, kwargs = put_together(self.parts, leaves)
        return self.again(args, kwargs)

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the backward: everything stands where it stood in the forward, meanwhile."""
        moved = self.was.moved(meanwhile=True)
        if moved is not None:
            raise _C.OomkitError(
                f"{moved} has changed between the forward of a {type(self.child).__name__}, which "
                f"keeps its inputs only, and its backward, which computes it again; {_ADVICE}"
                f"{_C.see('recomputation')}"
            )
        undo = self.was.restore()
        try:
            with self.attention():
                return self.forward(*args, **kwargs)
        finally:
            put_back(undo)

    def attention(self) -> AbstractContextManager[Any]:
        if _cur_sdpa_kernel_backends(with_priority=True) == self.backends:
            return nullcontext()
        return sdpa_kernel(self.backends, set_priority=True)

    def changed(self) -> str | None:
        """What the forward has changed beside its result."""
        moved = self.was.moved()
        if moved is None:
            moved = self.was.difference(Picture(list(self.child.modules()), _Forward))
        self.was.streams.clear()
        return None if moved is None else f"changes {moved}"


class _Closely:
    """A module's first forward: writes that leave no version, names of its code, generators."""

    def __init__(self, child: torch.nn.Module, leaves: list[torch.Tensor]) -> None:
        self.named = [*child.named_parameters(), *child.named_buffers()]
        self.named += [(f"its argument {i}", leaf) for i, leaf in enumerate(leaves)]
        self.samples = [_values_of(tensor) for _, tensor in self.named]
        self.functions: dict[types.CodeType, _Function] = {}
        self.streams: dict[int, Any] = {}
        for module in child.modules():
            forward = getattr(type(module), "forward", None)
            if type(forward) is types.FunctionType and not _is_of_torch(forward):
                own = {forward.__code__.co_varnames[0]: module}
                self.streams.update(streams_of(forward, [module]))
                for function in _functions(_Function(forward, own)):
                    self.functions.setdefault(function.function.__code__, function)
        self.states = {key: stream_state(stream) for key, stream in self.streams.items()}
        self.names = self.scan()

    def scan(self) -> dict[str, object]:
        """What global variables and those of enclosing functions lead to."""
        scan = _Scan(set())
        for function in self.functions.values():
            for name, value in function.names():
                if name not in function.given and not isinstance(value, _NO_STATE):
                    scan.value(name, value, 1)
        return scan.found

    def draws(self) -> bool:
        return any(
            _is_random(value)
            for function in self.functions.values()
            for _, value in function.names()
        )

    def changed(self) -> str | None:
        for (name, tensor), sample in zip(self.named, self.samples, strict=True):
            if _values_of(tensor) != sample:
                return f"changes {name}"
        for key, state in self.states.items():
            if stream_state(self.streams[key]) != state:
                return "draws from a random generator of its own"
        now = self.scan()
        for name, was in self.names.items():
            if name in now and _difference(was, now[name]) is not None:
                return f"changes {name}"
        return None


def _values_of(tensor: torch.Tensor) -> object:
    """Some of them, on any device."""
    if tensor.device.type == "cpu":
        return _sample(tensor)
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type == "meta" or not tensor.is_contiguous():
        return ""
    return _values(tensor) if tensor.numel() else ""


def _is_of_torch(function: types.FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _is_random(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__ in ("random", "numpy", "numpy.random")
    try:  # a method of the generator that is shared out: `from random import random`
        return is_stream(object.__getattribute__(value, "__self__"))
    except AttributeError:
        return False


# --- what stands as a module's forward, for a call ---


def _plain_now() -> bool:
    """Is this a place where saved tensors are somebody else's, or nobody's?"""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._current_graph_task_id() != -1  # in a backward: computed again already
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or forward_ad._current_level >= 0
        or parametrize._cache_enabled > 0
        or torch_checkpoint._checkpoint_debug_enabled
    ):
        return True
    hooks = _top_hooks()  # a checkpoint of the user's own counts what is saved in it
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch_checkpoint.__name__


class _Forward:
    """Stands as the attribute ``forward`` of a module. A copy of the module has a plain one."""

    __slots__ = ("__weakref__", "child", "forward", "left_out", "own")

    def __init__(self, child: torch.nn.Module, own: Any, left_out: LeftOut) -> None:
        self.child, self.own, self.left_out = child, own, left_out
        self.forward: Callable[..., Any] = child.forward if own is _MISSING else own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        child = self.child
        if not child.training or not torch.is_grad_enabled() or _plain_now():
            return self.forward(*args, **kwargs)
        record = self.left_out.record(child)
        leaves: list[torch.Tensor] = []
        try:
            parts = take_apart((args, kwargs), leaves)
        except OpaqueError as opaque:
            record.reason = f"is given a {opaque.kind}"
            return self.forward(*args, **kwargs)
        if child in self.left_out:
            return self.forward(*args, **kwargs)
        return _guarded(_Run(child, self.forward, (args, kwargs), parts), leaves, record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)

    @property
    def __wrapped__(self) -> Any:
        return self.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a copy and of a pickle, too, which needs no oomkit to be loaded."""
        if self.own is not _MISSING:
            return operator.getitem, ((self.own,), 0)
        return getattr, (self.child, "forward")


def _guarded(run: _Run, leaves: list[torch.Tensor], record: _Record) -> Any:
    """The forward, with what it saves kept until it is known that it may be dropped."""
    below = _top_hooks()
    keeper = _Keeper(below)
    try:
        return _judged(run, leaves, record, keeper, below)
    except BaseException:
        keeper.drop()  # the failed forward's memory goes with it
        raise


def _judged(
    run: _Run,
    leaves: list[torch.Tensor],
    record: _Record,
    keeper: _Keeper,
    below: _Hooks | None,
) -> Any:
    versions = [version(leaf) for leaf in leaves]
    given = run.first
    closely = None if record.known else _Closely(run.child, leaves)
    common = common_streams() if closely is not None or record.draws else None
    numpy = "numpy.random" in sys.modules
    states = [stream_state(stream) for stream in record.streams]
    result = torch_checkpoint.checkpoint(
        run,
        *leaves,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (keeper, nullcontext()),
    )
    problem = result_problem(result, leaves) or run.changed()
    if problem is None:
        problem = _arguments_changed(given, run.parts, leaves, versions)
    if problem is None and common is not None:
        now = common_streams() if numpy else [random.getstate()]
        problem = None if now == common[: len(now)] else "draws from random or numpy.random"
    if problem is None and states != [stream_state(stream) for stream in record.streams]:
        problem = "draws from a random generator of its own"
    if problem is None and closely is not None:
        problem = closely.changed()
    if problem is not None:
        keeper.keep(below)
        record.reason = problem
        record.offences += 1
        return result
    keeper.drop()
    record.offences = 0
    if closely is not None:
        record.known, record.draws = True, closely.draws()
        record.streams = list(closely.streams.values())
    return result


def _arguments_changed(
    given: Any, parts: Any, leaves: list[torch.Tensor], versions: list[int]
) -> str | None:
    if versions != [version(leaf) for leaf in leaves]:
        return "changes an argument in place"
    now: list[torch.Tensor] = []
    try:
        same = take_apart(given, now) == parts and len(now) == len(leaves)
    except OpaqueError:
        same = False
    if same and all(map(operator.is_, now, leaves)):
        return None
    return "changes a container that it is given"


# --- what the engine calls ---


class Handle:
    """The modules of a step that are computed again. Keeps none of them alive between calls.

    Attributes:
        names: what was chosen, for a line of the log: "6 x Block in GPT.blocks".
        count: how many places in lists that are.
    """

    def __init__(self, roots: list[torch.nn.Module], left_out: LeftOut) -> None:
        self._roots = [weakref.ref(root) for root in roots]
        self._left_out = left_out
        self._groups: list[Group] = []
        self._worn: Any = None  # a linked list: taking it down needs no memory
        self._choose()

    def _choose(self) -> None:
        roots = [root for ref in self._roots if (root := ref()) is not None]
        self._groups = choose(roots, self._left_out)

    @property
    def names(self) -> str:
        shown = [str(group) for group in self._groups[:3]]
        if len(self._groups) > 3:
            shown.append(f"{sum(g.count for g in self._groups[3:])} more")
        return ", ".join(shown)

    @property
    def count(self) -> int:
        return sum(group.count for group in self._groups)

    def enter(self) -> None:
        """Before the function is called. Without ``leave()`` nothing is put in place twice."""
        self._choose()
        if global_hooks():
            return
        try:
            for group in self._groups:
                for ref in group.children:
                    self._wear(ref())
        except BaseException:
            self.leave()
            raise

    def _wear(self, child: torch.nn.Module | None) -> None:
        if child is None:
            return
        own = own_dict(child)
        before = own.get("forward", _MISSING)
        if type(before) is _Forward:
            return  # of another call that is under way
        forward = _Forward(child, before, self._left_out)
        self._worn = own, forward, before, self._worn
        own["forward"] = forward

    def leave(self) -> None:
        """After the function has returned or failed. Never raises, and needs no memory."""
        while self._worn is not None:
            if self._worn[0].get("forward") is self._worn[1]:
                if self._worn[2] is _MISSING:
                    self._worn[0].pop("forward", None)
                else:
                    self._worn[0]["forward"] = self._worn[2]
            self._worn = self._worn[3]


def recompute_begin(modules: Iterable[torch.nn.Module], left_out: LeftOut) -> Handle | None:
    """Choose what is computed again in the backward; None where nothing repeats.

    Args:
        modules: those that take part in the step; only those that are in no other one count.
        left_out: the step's memory of what cannot be computed twice.
    """
    handle = Handle(roots_of(list(modules)), left_out)
    return handle if handle.count else None


def advise(exception: BaseException) -> str | None:
    """What to tell the user of an error that recomputation has caused; None of any other."""
    run = None
    traceback = exception.__traceback__
    in_checkpoint = False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename == torch_checkpoint.__file__:
            in_checkpoint = in_checkpoint or code.co_name == "get_inputs"
            run = run or _run_of(traceback.tb_frame.f_locals.get("frame"))
        traceback = traceback.tb_next
    stale = in_checkpoint and "modified by an inplace operation" in str(exception)
    if not (stale or isinstance(exception, torch_checkpoint.CheckpointError)):
        return None
    what = "a module" if run is None else f"a {type(run.child).__name__}"
    how = "an input of it was changed in place after its forward" if stale else "and it differs"
    return (
        f"oomkit keeps only the inputs of {what} and computes its forward again in the backward; "
        f"{how}. {_ADVICE}."
    )


def _run_of(frame: Any) -> _Run | None:
    """Whose forward a frame of torch's checkpoint computes again."""
    function = getattr(frame, "recompute_fn", None)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
    found = cells["fn"].cell_contents if "fn" in cells else None
    return found if isinstance(found, _Run) else None
