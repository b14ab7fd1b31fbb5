"""The same random numbers for the same rows, whether they run whole or in parts.

A step that draws random numbers is compared exactly where every part can be given those that its
rows had in the whole. Draws are counted in the order in which a slice makes them: what is as
large in a part as in the whole is the same in both; a dimension that shrinks with the rows is
cut where they are. Other streams (Python's, numpy's, generators of theirs) begin again for each
part, and must end where they ended in the whole. Where that does not fit, all is drawn for one row
after the other: then each part goes on where the one before it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from .values import host

__all__ = ["Draws", "is_stream", "set_state", "state_of"]

# Operators that make nothing but random numbers, by what they are made of besides sizes: a name
# that ends in _ overwrites its first argument, one that ends in _like takes no more than its
# shape; and two that apply them, too. All others (an attention with dropout, compiled functions)
# draw anew in each part.
_MADE = frozenset(
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial "
    "native_dropout normal normal_ poisson rand rand_like randint randint_like randn randn_like "
    "randperm random_ rrelu_with_noise rrelu_with_noise_ _sample_dirichlet _standard_gamma "
    "uniform_".split()
)
_CHOICES = frozenset(["multinomial", "randint", "randint_like", "random_", "randperm"])
_DEVICES = ("cpu", "cuda")
_SEEDS = 2**62
_DRAWN = -1  # numbers by torch, beside other streams
_LIMIT, _HALF = 1e-3, 5e-2  # of probabilities in a part, relative: sums in another order


class _Kept:
    """What the whole has drawn, or what that depended on: a copy on the host."""

    __slots__ = ("first", "guessed", "taken", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = host(value)
        self.guessed = False  # a part that is smaller than its rows make it has had the first ones
        self.first: dict[int, int] = {}  # by dimension: how much of it the first part has had
        self.taken: dict[tuple[int, int], int] = {}  # and all parts before a row

    def rows(
        self, shape: torch.Size, start: int, length: int, whole: int, turned: bool
    ) -> torch.Tensor | None:
        """What `length` of `whole` rows have of it, or None where their shape does not tell.

        Args:
            turned: of several values for each row all first ones come first.
        """
        found = self.value
        if len(shape) != found.ndim:
            return None
        sizes = list(zip(shape, found.shape, strict=True))
        of_rows = [
            part == length and every == whole and (start == 0 or self.first.get(dim) != every)
            for dim, (part, every) in enumerate(sizes)
        ]
        for dim, (part, every) in enumerate(sizes):
            if start == 0:
                self.first[dim] = part
            if part == every:
                continue
            if part > every:
                return None
            at, odd = divmod(every * start, whole)
            before = self.taken.get((dim, start), every - part if start > 0 else 0)
            self.taken[dim, start + length] = before + part
            if any(of_rows) and not of_rows[dim]:  # fewer, as tokens of the longest row
                at, self.guessed = 0, True
            elif every * length != part * whole or odd:  # as many as a mask has left
                at, last = before, start + length == whole
                if at + part > every or last and at + part < every:  # or fewer
                    at, self.guessed = 0, True
            elif turned and every % whole == 0:
                found = found.unflatten(dim, (every // whole, whole))  # type: ignore[no-untyped-call]
                found = found.narrow(dim + 1, start, length).flatten(dim, dim + 1)
                continue
            found = found.narrow(dim, at, part)
        return found


@dataclasses.dataclass(slots=True)
class _Drawn:
    """What the whole has drawn at once."""

    name: str
    numbers: _Kept
    given: list[Any]  # what they depend on: tensors are _Kept


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered for each run of a proof: what the whole draws, its parts are given.

    `kept` tells whether they all were, `apart` whether some were drawn from other values there,
    `chooses` whether some are among as many as the number of rows makes: they are brought into the
    range that a part has. `hides` tells whether there are others that no part can be given.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would give up what runs below, for good."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.apart, self.chooses, self.hides = True, False, False, False
        self._several = self._halved = self._guessed = self._turned = False
        self._seeded = False  # a compiled function has drawn
        self._eager = False  # such functions run as they are written
        self._stance: Any = None
        self._first: bool | None = None  # in the first order: kept
        self._drawn: list[_Drawn] = []
        self._keys: set[tuple[Any, ...]] = set()  # what the whole has chosen among
        self._cut: list[tuple[int, int]] = []
        self._whole = (0, 0)
        self._records = self._lost = False
        self._slice = self._next = 0
        self._stream = torch.get_rng_state()
        self._others: list[Any] = []  # Python's, numpy's, and generators of theirs
        self._entered = False
        self._at: list[bytes] = []  # where streams are when a run begins
        self._before: list[bytes] = []  # the whole, these streams
        self._after: list[bytes] = []
        self._astray: set[int] = set()  # those that do not end there when they begin again ...
        self._follow: set[int] | None = None  # ... and so go on from part to part
        self._ends: dict[int, tuple[list[bytes], int]] = {}  # of the part before a row

    def begin(self, cut: list[tuple[int, int]], records: bool) -> None:
        """A run of slices (start, length).

        Args:
            records: it is the whole that later runs are given the numbers of.
        """
        self._cut, self._records, self._slice, self._next = cut, records, 0, 0
        self.kept, self.apart, self._lost = True, False, False
        self._astray.clear()
        self._stream = torch.get_rng_state()
        if records:
            self._drawn, self._whole = [], cut[0]
            self._keys.clear()
            self._ends.clear()
            self._several = self._halved = self._guessed = self.chooses = False
            self._first = None

    def end_slice(self) -> None:
        """The next slice begins: this one must have drawn as often as the whole."""
        if not self._entered:
            pass
        elif self._records:
            self._after = self._streams()
        else:
            self._judge_slice(sum(self._cut[self._slice]) == sum(self._whole))
        self._slice, self._next = self._slice + 1, 0
        if self._entered and not self._records:
            self._begin_slice()

    def _judge_slice(self, last: bool) -> None:
        streams = self._streams()
        self._ends[sum(self._cut[self._slice])] = streams, self._next
        if self._next < len(self._drawn) and (last or not self._goes_on(_DRAWN)):
            self._astray.add(_DRAWN)  # which need not matter
        for i, (before, now, after) in enumerate(
            zip(self._before, streams, self._after, strict=True)
        ):
            stays = self._at[i] if before == after else before  # what is not drawn from is left
            if now not in (stays, after) and (last or not self._goes_on(i)):
                self._lose(i)

    def _lose(self, stream: int) -> None:
        self._astray.add(stream)
        self.kept = False

    def _begin_slice(self) -> None:
        before = self._before, 0
        streams, at = before
        if self._slice < len(self._cut):
            streams, at = self._ends.get(self._cut[self._slice][0], before)
        self._next = at if self._goes_on(_DRAWN) else 0
        for i, first in enumerate(self._before):
            self._set_stream(i, streams[i] if self._goes_on(i) else first)

    def _goes_on(self, stream: int) -> bool:
        """Whether each part goes on there where the one before it has ended."""
        return self._follow is not None and stream in self._follow

    def enter(self, others: list[Any]) -> None:
        """The slices of a run begin.

        Args:
            others: streams of Python and numpy besides their modules'.
        """
        if self._records:
            numpy = sys.modules.get("numpy")
            self._others = [each for each in others if is_stream(each)]
            self._others += [random, *([numpy.random] if numpy else [])]
            self._before = self._streams()
        else:
            self._at = self._streams()
            self._begin_slice()
        if self._eager:
            self._stance = torch.compiler.set_stance("force_eager")
        self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The end of that."""
        self._entered = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._eager:
            self._stance.__exit__(None, None, None)
        if not self._records:
            for i, state in enumerate(self._at):
                self._set_stream(i, state)

    def _streams(self) -> list[bytes]:
        return [pickle.dumps(state_of(each)) for each in self._others]

    def _set_stream(self, i: int, state: bytes) -> None:
        if self._after[i] != self._before[i]:
            set_state(self._others[i], pickle.loads(state))

    @property
    def drawn_beside(self) -> bool:
        """Whether the whole has drawn from streams of Python and numpy."""
        return self._before != self._after

    def drew(self) -> bool:
        """Whether torch's CPU generator has been drawn from since, by what comes next of it."""
        then, now = torch.Generator(), torch.Generator()
        then.set_state(self._stream)
        now.set_state(torch.get_rng_state())
        return not torch.equal(torch.rand(8, generator=then), torch.rand(8, generator=now))

    @staticmethod
    def shift(streams: list[Any], times: int) -> None:
        """What is drawn next is something else: streams go back as all else does.

        Args:
            streams: what is put back besides torch's default generators: generators, and the
                modules of Python and numpy.
            times: which time this is, from 1 on.
        """
        torch.rand(7 * times)
        if torch.cuda.is_available():
            torch.rand(7 * times, device="cuda")
        for stream in streams:
            for _ in range(times):
                if isinstance(stream, torch.Generator):
                    torch.rand(7, generator=stream, device=stream.device)
                elif hasattr(stream, "random"):
                    stream.random()

    def after(self, kept: bool) -> int:
        """What is to be done where parts were not given all numbers, or differ from the whole.

        Several numbers for each row have two orders: the other one is tried once for a whole, and
        stays where it is right. Of numbers for half of the rows those of the other half may be
        made, and what goes on from part to part may be others that a row had: a difference is
        in doubt there.

        Args:
            kept: whether they were given all.

        Returns:
            0 they differ, 1 run them again, 2 let them draw their own, 3 run the whole again, too.
        """
        if not kept and self._seeded and not self._eager:
            self._eager = True
            return 3
        if self._astray and self._follow is None:
            self._follow = set(self._astray)
            return 1
        if self._several and self._first is None:
            self._turned, self._first = not self._turned, kept
            return 1
        if self._several and self._first is not None:  # in vain
            self._turned, self._several, kept = not self._turned, False, self._first
        doubt = self._follow or self._guessed or self._astray or self._halved
        if kept and (self.chooses or not doubt):
            return 0
        self.hides = True
        return 2

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # an operator of higher order, whose parts come here
        args, kwargs = _without_dropout(func, args, kwargs)
        if _is_made(func):
            name = func.overloadpacket.__name__
            if not types and _device(args, kwargs).type in _DEVICES and _draws(name, args):
                return self._draw(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given = _given(name, args)
        key = _choice(name, given)
        made: Any
        if self._records:
            made = func(*args, **kwargs)
            self._keys.add(key)
            numbers = _numbers(name, made, args)
            if type(numbers) is torch.Tensor:
                _C.exempt(lambda: self._keep(name, numbers, given))
            return made
        # How many there are to choose from, by how many rows there are: most are chosen among
        # rows, and a part has others.
        self.chooses |= key not in self._keys
        drawn = self._drawn[self._next] if self._next < len(self._drawn) else None
        if self._lost or drawn is None or drawn.name != name or not self._fits(given, drawn):
            self._lost = True
            self._lose(_DRAWN)
            return func(*args, **kwargs)
        with _unmoved(_device(args, kwargs), args, kwargs):
            made = None if name == "rrelu_with_noise_" else func(*args, **kwargs)
        numbers = _numbers(name, made, args)
        if type(numbers) is not torch.Tensor:
            return made
        self._next += 1
        same = numbers.shape == drawn.numbers.value.shape
        if same and _is_seed(given) and not self._eager:
            self._seeded = True  # a compiled function, whose numbers are its own
            return func(*args, **kwargs)
        rows = self._rows(name, drawn.numbers, numbers.shape)
        if rows is None or rows.dtype != numbers.dtype:
            self._lost = True
            self._lose(_DRAWN)
            return made
        numbers.copy_(_C.exempt(functools.partial(_in_range, name, rows, given)))
        if name == "native_dropout" and args[1] < 1.0:
            torch.mul(args[0], numbers, out=made[0]).div_(1.0 - args[1])
        elif name == "rrelu_with_noise":
            torch.mul(args[0], numbers, out=made)
        elif name == "rrelu_with_noise_":
            made = args[0].mul_(numbers)
        return made

    def _keep(self, name: str, numbers: torch.Tensor, given: list[Any]) -> None:
        self._next += 1
        self._drawn.append(_Drawn(name, _Kept(numbers), _kept(given)))

    def _rows(self, name: str, kept: _Kept, shape: torch.Size) -> torch.Tensor | None:
        start, length = self._cut[self._slice]
        first, whole = self._whole
        for part, every in zip(shape, kept.value.shape, strict=False):
            several = part != every > whole and every % whole == 0
            self._several |= several and self._first is None
            fewer = part != every < whole and abs(2 * every - whole) <= 2
            self._halved |= fewer and name != "randperm"
        found = kept.rows(shape, start - first, length, whole, self._turned)
        self._guessed |= kept.guessed
        return found

    def _fits(self, given: list[Any], drawn: _Drawn) -> bool:
        """Whether a part draws by what the whole drew by, of as many rows as it has: where values
        differ, `apart` tells."""
        if len(given) != len(drawn.given):
            return False
        for one, kept in zip(given, drawn.given, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(kept, _Kept):
                rows = self._rows(drawn.name, kept, one.shape)
                if rows is None:
                    return False
                self.apart |= not _C.exempt(functools.partial(_close, rows, one))
            elif isinstance(one, float) and isinstance(kept, float):
                self.apart |= not math.isclose(one, kept, rel_tol=_LIMIT)
            elif type(one) is int and type(kept) is int:
                self.apart |= one != kept and drawn.name not in _CHOICES
            elif isinstance(one, torch.Tensor) or one != kept:
                return False
        return True


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """What a kernel draws by itself (a fused attention, and its backward) no part can be given."""
    at = _dropout_at(func)
    if at is not None and at < len(args):
        args = (*args[:at], 0.0, *args[at + 1 :])
    if at is not None and "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return args, kwargs


@functools.cache
def _dropout_at(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def is_stream(stream: Any) -> bool:
    kinds = type(stream).__mro__
    return random.Random in kinds or any(k.__module__.startswith("numpy.random") for k in kinds)


def state_of(stream: Any) -> Any:
    if hasattr(stream, "getstate"):
        return stream.getstate()
    return stream.get_state() if hasattr(stream, "get_state") else stream.bit_generator.state


def set_state(stream: Any, state: Any) -> None:
    if hasattr(stream, "setstate"):
        stream.setstate(state)
    elif hasattr(stream, "set_state"):
        stream.set_state(state)
    else:
        stream.bit_generator.state = state


@contextlib.contextmanager
def _unmoved(device: torch.device, args: tuple[Any, ...], kwargs: Any) -> Iterator[None]:
    """Streams go back to where they are: numbers are drawn for their shape alone."""
    given = [g for g in (*args, *kwargs.values()) if isinstance(g, torch.Generator)]
    if not given:
        of_device = torch.cuda.default_generators if device.type == "cuda" else ()
        at = torch.cuda.current_device() if device.index is None and of_device else device.index
        given = [of_device[at or 0] if of_device else torch.default_generator]
    states = [g.get_state() for g in given]
    yield
    for generator, state in zip(given, states, strict=True):
        generator.set_state(state)


def _in_range(name: str, rows: torch.Tensor, given: list[Any]) -> torch.Tensor:
    """Numbers of the whole as a part may have drawn them, where it has fewer to choose from."""
    if name == "randperm":
        return rows.argsort().argsort()  # a permutation of the part: each number's rank
    low, high = 0, 0
    if name == "multinomial":
        high = given[0].shape[-1]
    elif name in ("randint", "randint_like", "random_"):
        low, high = (0, 0, *[g or 0 for g in given])[-2:]
    if high <= low or not bool((rows >= high).any()):
        return rows
    return low + (rows - low) % (high - low)


def _numbers(name: str, made: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Of what an operator returns: the mask of a dropout; of what a rrelu is given: the slopes."""
    of_slopes = name.startswith("rrelu")
    found: torch.Tensor = args[1] if of_slopes else made[1] if isinstance(made, tuple) else made
    return found


def _given(name: str, args: tuple[Any, ...]) -> list[Any]:
    """What the numbers depend on, but for how many they are."""
    by_shape = name.endswith(("_", "_like")) or name == "native_dropout"
    skipped = 2 if name.startswith("rrelu") else int(by_shape)
    return [each for each in args[skipped:] if not isinstance(each, (list, tuple))]


def _kept(given: list[Any]) -> list[Any]:
    return [_Kept(each) if isinstance(each, torch.Tensor) else each for each in given]


@functools.cache
def _is_made(func: Any) -> bool:
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    return seeded and func.overloadpacket.__name__ in _MADE


def _draws(name: str, args: tuple[Any, ...]) -> bool:
    if name.startswith("rrelu"):
        return len(args) > 4 and bool(args[4])  # as far as it trains
    return name != "native_dropout" or args[2] is not False


def _is_seed(given: list[Any]) -> bool:
    return any(type(each) is int and abs(each) >= _SEEDS for each in given)


def _choice(name: str, given: list[Any]) -> tuple[Any, ...]:
    """What it chooses among."""
    if name not in _CHOICES:
        return ()
    among = [each for each in given if type(each) is int]
    return name, *(given[0].shape[-1:] if name == "multinomial" else among)


def _device(args: tuple[Any, ...], kwargs: Any) -> torch.device:
    of_tensors = [each.device for each in args if isinstance(each, torch.Tensor)]
    return torch.device([*of_tensors, kwargs.get("device") or "cpu"][0])


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    limit = _LIMIT if one.dtype in (torch.float32, torch.float64) else _HALF
    size = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), host(two).double(), rtol=limit, atol=limit * size)
