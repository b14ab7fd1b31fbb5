"""What surrounds a run of a proof: full single precision, host memory for what graphs keep, and
what it writes to, which is put back.

Autocast leaves gradients known to some per cent: `alone` leaves it out, for a second look.

TF32 (that of convolutions on CUDA by default, of products where a program asks for it) rounds to 11
bits, so that gradients are known to half a per cent: what couples rows weakly would hide in that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any

import torch

from .._code.module_buffers import is_compiling
from .put_back.kept import Kept
from .put_back.plain_values import PlainValues, Step

__all__ = ["Around"]

_set_autocast = torch.set_autocast_enabled
_KINDS = ("cuda", "cpu", "xpu", "mps")  # of devices that have autocast
_Setting = tuple[Callable[[], Any], Callable[[Any], Any], Any]


def _by_name(kind: str) -> _Setting:
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return partial(get, "cuda", kind), partial(put, "cuda", kind), "ieee"


# Torch has two ways to ask for TF32, and raises an error where the first is read after the second
# was used: what a program has set in one way is put back in that way.
_WAYS: tuple[tuple[_Setting, tuple[_Setting, ...]], ...] = (
    (
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        (_by_name("matmul"),),
    ),
    (
        (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, False),
        (_by_name("conv"), _by_name("rnn")),
    ),
)


def _set_but_here(thread: int, kind: str, enabled: bool) -> None:
    """In place of torch.set_autocast_enabled(), which torch.autocast calls."""
    _set_autocast(kind, enabled and get_ident() != thread)


class Around:
    """Around a run: `enter`, `updated`, `leave` and `put_back`; `on_host` and `on_device`; `hush`
    and `speak`.

    `is_full`: products of single precision have all its bits. Kernels of a program's own may not.
    `alone`: autocast does nothing.
    """

    __slots__ = (
        "_cast", "_held", "_host", "_hushed", "_kept", "_plain", "_saved", "alone", "is_full",
    )  # fmt: skip

    def __init__(
        self, params: list[torch.Tensor], step: Step, modules: Iterable[torch.nn.Module]
    ) -> None:
        self._kept = Kept(params)
        self._plain = PlainValues(step, modules)
        self._host = torch.autograd.graph.save_on_cpu()
        self._cast: list[str] = []  # kinds of devices for which autocast was on
        self.alone = self._held = False
        self._saved: list[tuple[Callable[[Any], Any], Any]] = []
        self.is_full = False

    def hold(self) -> None:
        """The next run leaves what no roll-back of an attempt would find to the one after it."""
        self._held = True

    def enter(self) -> None:
        self._plain.note()
        self._kept.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the first way, which the program has not taken
            self.is_full = all([self._all_bits(*ways) for ways in _WAYS])
        if self.alone:
            torch.set_autocast_enabled = partial(_set_but_here, get_ident())
            for kind in _KINDS:
                if torch.is_autocast_enabled(kind):
                    _set_autocast(kind, False)
                    self._cast.append(kind)

    def _all_bits(self, first: _Setting, second: tuple[_Setting, ...]) -> bool:
        try:
            first[0]()
        except RuntimeError:
            settings = second
        else:
            settings = (first,)
        for get, put, full in settings:
            was = get()
            if was == full:
                continue
            if is_compiling():  # it would be compiled again, for another precision
                return False
            self._saved.append((put, was))
            put(full)
        return True

    def leave(self) -> None:
        self._kept.end()
        if self.alone:
            torch.set_autocast_enabled = _set_autocast
        while self._cast:
            _set_autocast(self._cast[-1], True)
            self._cast.pop()
        if not self._saved:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while self._saved:
                put, was = self._saved[-1]
                put(was)
                self._saved.pop()

    def updated(self) -> None:
        """An update has been held back."""
        self._kept.updated()

    def put_back(self) -> None:
        """After a run, when it has been looked at."""
        if self._held:
            self._held = False
            return
        self._kept.put_back()
        self._plain.put_back()

    def on_host(self) -> None:
        """What a graph keeps goes to host memory from now on."""
        self._host.__enter__()

    def on_device(self) -> None:
        """The end of that."""
        self._host.__exit__()

    def hush(self) -> None:
        """No warning of the step's: without a graph there is one that means nothing."""
        self._hushed = warnings.catch_warnings()
        self._hushed.__enter__()
        warnings.simplefilter("ignore")

    def speak(self) -> None:
        """The end of that."""
        self._hushed.__exit__(None, None, None)
