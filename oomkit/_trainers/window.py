"""The calls of one update of a trainer, kept until it is made, so that they can be run again.

An error in a backward that adds to gradients of earlier calls leaves sums that nobody can take
apart. Where the core asks, these gradients are made again from nothing: streams and buffers go
back to the first call of the window, and the calls before the failed one run again in the slices
in which they ran.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _C
from .books import Books
from .plain_state import PlainState

__all__ = ["Window"]

_LARGE = 1 << 16  # elements of a buffer that is not copied, unless it is of a normalisation
_SAME, _SAME_HALF, _ZERO = 1e-5, 4e-3, 1e-6  # of losses of one computation, run twice
_OWN = frozenset(vars(torch.nn.Module()))  # what torch keeps in a module
_LIBRARIES = ("torch.", "transformers.", "trl.", "peft.")  # whose modules keep no state of calls

_Loss = torch.Tensor | None


class _Streams:
    """Where the random streams are.

    Args:
        device: of the trainer.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._generators: list[tuple[Any, int, int]] = []
        self._device: tuple[Any, torch.Tensor] | None = None
        if device.type == "cuda":
            self._generators = [
                (each, each.initial_seed(), each.get_offset())
                for each in torch.cuda.default_generators
            ]
        elif device.type != "cpu":
            module = torch.get_device_module(device)
            self._device = module, module.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for each, seed, offset in self._generators:
            each.manual_seed(seed)
            each.set_offset(offset)
        if self._device is not None:
            module, state = self._device
            module.set_rng_state(state)


def _buffers(model: torch.nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Each buffer, and whether a normalisation may write to it unseen by its version."""
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for module in model.modules():
        for each in module._buffers.values():
            if each is not None:
                small = each.numel() <= _LARGE
                norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
                found[id(each)] = each, small or norm
    return list(found.values())


class _Values:
    """What the buffers of a model hold."""

    def __init__(self, buffers: Iterable[tuple[torch.Tensor, bool]]) -> None:
        self._copies, self._versions = [], []
        for each, copied in buffers:
            if copied:
                self._copies.append((each, each.detach().clone()))
            else:
                self._versions.append((each, each._version))

    def can_restore(self, buffers: Iterable[tuple[torch.Tensor, bool]]) -> bool:
        """Whether the same buffers are there, and none without a copy was written to."""
        known = {id(each) for each, _ in (*self._copies, *self._versions)}
        still = all(each._version == version for each, version in self._versions)
        return still and {id(each) for each, _ in buffers} == known

    def restore(self) -> None:
        with torch.no_grad():
            for each, copy in self._copies:
                each.copy_(copy)


class _Kept:
    """One call of the window.

    Args:
        again: makes it once more.
        streams: at its entry.
    """

    def __init__(self, again: Callable[[], Any], streams: _Streams) -> None:
        self.again, self.streams = again, streams
        self.slices: tuple[int, ...] = ()  # none: it ran whole
        self.loss: _Loss = None


def _own_state(model: torch.nn.Module) -> list[tuple[torch.nn.Module, PlainState]]:
    """Plain attributes of the user's own modules: a count of forwards, a factor that grows."""
    found = [m for m in model.modules() if not type(m).__module__.startswith(_LIBRARIES)]
    return [(module, PlainState(module, _OWN)) for module in found]


def _is_left_alone(trainer: Any) -> bool:
    """Whether nobody's code but that of known libraries runs between two calls of a window."""
    for callback in trainer.callback_handler.callbacks:
        called = type(callback).on_substep_end
        own = getattr(callback, "__dict__", {}).get("on_substep_end", called)  # no look is counted
        if not (getattr(own, "__module__", None) or "").startswith(_LIBRARIES):
            return False
    return True


class _Now:
    """Everything that calls move, to be put back when they have been made again."""

    def __init__(self, trainer: Any, books: Books) -> None:
        self._streams = _Streams(trainer.args.device)
        self._values = _Values(_buffers(trainer.model))
        self._modules = [(each, PlainState(each, _OWN)) for each in trainer.model.modules()]
        self._books, self._saved = books, books.all()

    def restore(self) -> None:
        for module, state in self._modules:
            state.restore(module)
        self._values.restore()
        self._books.back_to(self._saved)
        self._streams.restore()


def _loss(result: Any) -> _Loss:
    return result.detach() if isinstance(result, torch.Tensor) and result.numel() == 1 else None


def _is_same(one: _Loss, two: _Loss) -> bool:
    """Whether two losses are of one computation."""
    if one is None or two is None:
        return False
    limit = _SAME if one.dtype.itemsize > 2 else _SAME_HALF
    first, second = float(one), float(two)
    if first == second or first != first and second != second:
        return True
    return abs(first - second) <= limit * abs(first) + _ZERO


class Window:
    """The calls between two updates; an option of the core, which asks `can_make` and `make`.

    Args:
        trainer: held weakly.
        books: of the trainer.
    """

    def __init__(self, trainer: Any, books: Books) -> None:
        self._trainer, self._books = weakref.ref(trainer), books
        self._slices: tuple[int, ...] = ()  # of the call that has just run
        self.making = 0
        self.outer: Callable[[Any], Any] | None = None  # makes a step of prepared inputs again
        self.close()

    def close(self) -> None:
        """Nothing is kept any more."""
        self._kept: list[_Kept] = []
        self._count = self._at = 0
        self._sound = False  # the calls can be made again
        self._leaves: dict[int, tuple[torch.Tensor, int]] = {}
        self._marks: list[tuple[int, int]] = []
        self._values: _Values | None = None
        self._modules: list[tuple[torch.nn.Module, PlainState]] = []
        self._booked: Any = None  # of the books

    # --- around each call ---

    def begin(self, again: Callable[[], Any]) -> None:
        """A call of the trainer begins.

        Args:
            again: makes it once more.
        """
        trainer = self._trainer()
        if self.making or trainer is None:
            return
        if self._count == 0:
            self._sound = self._open(trainer)
        elif self._sound:
            self._sound = self._gradients() == self._marks and all(
                leaf._version == version for leaf, version in self._leaves.values()
            )
        self._at = self._count
        self._count += 1
        if not self._sound:
            self._kept.clear()
            return
        try:
            streams = _C.exempt(lambda: _Streams(trainer.args.device))
        except RuntimeError:  # out of memory; a graph is captured
            self._sound = False
            return
        self._kept.append(_Kept(again, streams))

    def begin_inside(self, prepared: Any) -> None:
        """The loss of a step is computed, of which `outer` is known.

        Args:
            prepared: what it is computed from.
        """
        if self.outer is None:
            self._sound = False  # another one, or of a step that nobody knows
            return
        outer, self.outer = self.outer, None
        self.begin(lambda: outer(prepared))

    def end(self, result: Any) -> None:
        """The call that was begun has ended.

        Args:
            result: its loss.
        """
        if self.making or self._count == 0:
            return
        trainer = self._trainer()
        steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
        accelerator = getattr(trainer, "accelerator", None)
        if self._count >= steps or getattr(accelerator, "sync_gradients", True):
            self.close()
        elif self._sound:
            kept = self._kept[-1]
            kept.loss, kept.slices = _loss(result), self._slices
            self._marks = self._gradients()

    def _open(self, trainer: Any) -> bool:
        """Whether the first call of a window finds everything from which it can be made again."""
        optimizer = getattr(trainer, "optimizer", None)
        if getattr(trainer, "current_gradient_accumulation_steps", 1) < 2 or optimizer is None:
            return False
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        if any(leaf.grad is not None for leaf in leaves) or not _is_left_alone(trainer):
            return False
        self._leaves = {id(leaf): (leaf, leaf._version) for leaf in leaves}
        try:
            self._values = _C.exempt(lambda: _Values(_buffers(trainer.model)))
            self._modules = _own_state(trainer.model)
            self._booked = self._books.all()
        except RuntimeError:  # out of memory; a tensor of inference_mode() has no version
            return False
        return True

    def _gradients(self) -> list[tuple[int, int]]:
        """Which gradients there are, and their versions."""
        return [
            (id(leaf.grad), -1 if leaf.grad is None else leaf.grad._version)
            for leaf, _ in self._leaves.values()
        ]

    # --- what the core asks and tells ---

    def ran(self, slices: tuple[int, ...]) -> None:
        """A call has run to its end.

        Args:
            slices: their rows; none where it was whole.
        """
        self._slices = slices

    def can_make(self, leaves: list[torch.Tensor]) -> bool:
        """Whether the gradients of the calls before this one can be made again.

        Args:
            leaves: that had a gradient when this one began.
        """
        trainer = self._trainer()
        if not self._sound or self._at == 0 or self._values is None or trainer is None:
            return False
        if any(id(leaf) not in self._leaves for leaf in leaves):
            return False
        return self._values.can_restore(_buffers(trainer.model))

    def make(self) -> bool | str:
        """Makes them where .grad is None everywhere; or says why not.

        Returns whether the calls ran in the micro-batches in which they had run.
        """
        trainer, at, values = self._trainer(), self._at, self._values
        assert values is not None
        now, slices = _C.exempt(lambda: _Now(trainer, self._books)), self._slices
        done, same = False, True
        self.making += 1
        try:
            _C.exempt(values.restore)
            self._books.back_to(self._booked)
            for module, state in self._modules:
                state.restore(module)
            for self._at in range(at):
                kept = self._kept[self._at]
                loss, ran = _again(kept), self._slices
                if ran == kept.slices and not _is_same(kept.loss, loss):
                    return "one of them had another loss than before"
                same &= ran == kept.slices
                kept.loss, kept.slices = loss, ran  # it may have been split further
            done = True
        finally:
            self.making -= 1
            self._at, self._slices = at, slices
            _C.exempt(now.restore)
            if not done:
                for leaf, _ in self._leaves.values():
                    leaf.grad = None
        return same


def _again(kept: _Kept) -> _Loss:
    kept.streams.restore()
    torch.clear_autocast_cache()
    before = _C._force_slices(kept.slices)
    try:
        return _loss(kept.again())
    finally:
        _C._force_slices(before)
