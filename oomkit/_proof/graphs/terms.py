"""What a loss multiplies its terms by, which a proof shows of its own rows alone.

A mean over the rows of a micro-batch divides a sum by their number, and the weight of the
micro-batch makes that the number of all rows. Where the step divides by a number that it computes
itself (hard examples, matched boxes), or multiplies by one that depends on a value of the loss,
weights fit while that number is as it was in the proof, and no argument of the step tells when it
no longer is. The graph of the loss does: its first functions keep these numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Part", "Terms", "learn_terms", "note_terms"]

# The parts of torch's disable_saved_tensors_hooks(), which takes as long as all else here.
_disabled: Any = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_disable: Any = torch._C._autograd._saved_tensors_hooks_disable
_enable: Any = torch._C._autograd._saved_tensors_hooks_enable
_MOST = 64  # terms of one loss: what has more is summed up over samples
_STEPS = 256  # functions of it
_KNOWN = 2048  # that is kept for a site
_ONES = 64  # comparisons of a sum that is divided by 1: 10 or more calls
_EQUAL = 1e-5  # relative: one element more or less of so many
_SUMS = frozenset({"Add", "Sub"})
# In each of their arguments.
_LINEAR = frozenset(
    "Add Clone Div Mul NanToNum Neg Rsub Squeeze Sub ToCopy Unsqueeze UnsafeView View".split()
)
# Of several rows these are terms.
_OF_ONE = frozenset({"Expand", "Mean", "Select", "Sum"})
_OF_STACKS = frozenset({"Mean", "Sum"})
_STACKS = frozenset({"Cat", "Stack"})
_SHAPES = frozenset({"Unsqueeze", "View"})
# What has one argument, whose elements are treated alike.
_ALIKE = _LINEAR - {"Add", "NanToNum", "Rsub", "Sub"}
# A sum over rows, whose coefficient times the weight is the same in all micro-batches, or what
# they share, like a penalty on parameters, whose coefficient is the same.
_OF_ROWS, _SHARED = 1, 2

# Where each function stands among the arguments of the one above; of a stack, how many it has, so
# that one of samples is another one where there are fewer rows.
Path = tuple[int, ...]
# The end of a path: a root whose terms are too many, or cannot be read; the largest of the weights
# that one of many elements is given.
_UNREAD, _LARGEST = -1, -2
# By term: what it is multiplied by, the same without the number of elements of a mean, and what
# it was divided by last; nan where by nothing.
Part = dict[Path, list[Any]]
_Root = tuple[int, torch.Tensor, torch.Tensor | None]  # its number, and its gradient
_Made = tuple[int, float, Part]  # rows and weight of a micro-batch, and its terms


def _number(value: Any, most: int = 64) -> Any:
    """A number, or a tensor of one element on a device, which nothing waits for; None where it has
    more elements, or dimensions than `most`, or is complex."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.ndim > most or value.is_complex():
        return None
    return value.item() if value.is_cpu else value.detach().reshape(())


def _kind(node: Any) -> str:
    """Which of torch's functions a node is; nothing for one of the program, which may be called
    `Mul`, too: torch's names end in a number."""
    kind, _, number = node.name().partition("Backward")
    return str(kind) if number.isdigit() else ""


def _saved(node: Any, name: str, *most: int) -> Any:
    """What a function has saved, where that is a number, as `_number` gives it; else None."""
    hook = getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None)
    # One of the program may give what it keeps once only, and the backward needs it. Those of
    # torch (save_on_cpu) and oomkit do not; a checkpoint is told from them by its error.
    whose = "torch" if hook is None else str(getattr(hook, "__module__", ""))
    if whose.partition(".")[0] not in ("torch", "oomkit"):
        return None
    return _number(getattr(node, f"_saved_{name}"), *most)


def _over(by: Any, number: Any) -> Any:
    if isinstance(by, torch.Tensor) or isinstance(number, torch.Tensor):
        return by / number
    return by / number if number else math.nan


def _elements(node: Any, kind: str) -> Any:
    """Of how many elements a function makes the mean; None where it makes none."""
    if kind == "Mean":
        return node._saved_self_sym_numel
    if getattr(node, "_saved_reduction", None) != 1:
        return None
    if hasattr(node, "_raw_saved_total_weight"):
        return _saved(node, "total_weight")
    of, at = node.next_functions[0]
    return None if of is None else math.prod(of._input_metadata[at].shape)


def _factor(node: Any, kind: str, at: int, *most: int) -> Any:
    """What a function multiplies its argument by, or divides it by; None where it is not linear."""
    if kind == "Div":
        return _saved(node, "other", *most) if at == 0 else None
    if kind == "Mul":
        return _saved(node, "self" if at else "other", *most)
    return node._saved_alpha if at and kind in _SUMS else 1.0


def _is_scalar(of: Any, nr: int) -> bool:
    """Whether a value without dimensions, or that in another shape: not the one row of a small
    micro-batch."""
    if not of._input_metadata[nr].shape:
        return True
    above, at = of.next_functions[0] if _kind(of) in _SHAPES else (None, 0)
    return above is not None and not above._input_metadata[at].shape


_Below = list[tuple[Path, Any, Any]]


def _below(node: Any, kind: str) -> _Below:
    """What a linear function adds up: how the path goes on, a function, and what that is
    multiplied by, or divided by."""
    found: _Below = []
    if kind in _LINEAR:
        for at, (of, nr) in enumerate(node.next_functions):
            if of is not None and math.prod(of._input_metadata[nr].shape) == 1:
                factor = _factor(node, kind, at)
                if factor is not None:
                    found.append(((at,), of, factor))
    elif kind in _OF_ONE:
        of, nr = node.next_functions[0]
        shape = of._input_metadata[nr].shape
        if len(shape) > 1 or math.prod(shape) > _MOST:
            return found
        among = of.next_functions if kind in _OF_STACKS and _kind(of) in _STACKS else ()
        if not shape or _is_scalar(of, nr):
            found.append(((0,), of, 1.0))
        elif among and all(each is None or _is_scalar(each, nr) for each, nr in among):
            share = 1.0 / len(among) if kind == "Mean" else 1.0
            found += [
                ((-len(among) - 1, i), each, share)
                for i, (each, _) in enumerate(among)
                if each is not None
            ]
    return found


def _alike(node: Any, kind: str) -> _Below:
    """The same of one that treats all elements alike, which are not alone in a larger batch."""
    for at, (of, _) in enumerate(node.next_functions):
        factor = None if of is None else _factor(node, kind, at, 0)
        if factor is not None:
            return [((at,), of, factor)]
    return []


def _terms(root: torch.Tensor, by: Any) -> list[tuple[Path, list[Any]]]:
    """Terms of a loss that is multiplied by a number: where each is in the graph, and see `Part`.
    None where there are many."""
    found: list[tuple[Path, list[Any]]] = []
    work: list[tuple[Any, Path, list[Any], bool]] = [(root.grad_fn, (), [by, by, math.nan], False)]
    for _ in range(_STEPS):
        if not work:
            return found if len(found) <= _MOST else []
        node, path, term, has_rows = work.pop()
        kind = _kind(node)
        below: _Below = []
        if not has_rows:
            below = _below(node, kind)
        elif kind in _ALIKE:
            below = _alike(node, kind)
        one, two, over = term
        for more, of, factor in below:
            if kind == "Div":
                now = [_over(one, factor), _over(two, factor), factor]
            else:  # of a stack's mean, how many it has are elements
                now = [one * factor, two if more[0] < 0 else two * factor, over]
            work.append((of, path + more, now, has_rows))
        if below:
            continue
        elements = None if has_rows else _elements(node, kind)
        if elements is not None:
            term = [_over(one, elements), two, over]
        rows = None if has_rows or kind not in _OF_STACKS else node.next_functions[0][0]
        if rows is not None and _kind(rows) in _ALIKE:
            work.append((rows, (*path, 0), term, True))
        else:
            found.append((path, term))
    return []


def _terms_given(root: torch.Tensor, given: torch.Tensor | None) -> list[tuple[Path, list[Any]]]:
    if given is None or not root.ndim:
        return _terms(root, 1.0 if given is None else _number(given))
    # The largest weight tells what all are divided by.
    largest = _number(torch.linalg.vector_norm(given.detach(), math.inf))
    return [((_LARGEST,), [largest, largest, math.nan])]


def _rooted(roots: Any, gradients: tuple[torch.Tensor | None, ...]) -> Iterator[_Root]:
    for at, root in enumerate(roots if isinstance(roots, (tuple, list)) else (roots,)):
        if not isinstance(root, torch.Tensor) or root.grad_fn is None:
            continue
        if root.is_complex():  # what it is multiplied by is compared as a real number
            continue
        yield at, root, gradients[at] if at < len(gradients) else None


def note_terms(part: Part, roots: Any, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """An outermost backward of a micro-batch begins.

    Args:
        part: its terms so far.
        roots: what the backward begins with.
        gradients: what the program gives each; None where it gives none.
    """
    # A short function: where not even a number can be made, a handler that is far behind the
    # beginning of one makes CPython hang (tests/nomemory). With a loop: Dynamo then skips it.
    number = len({path[0] for path in part}) if part else 0
    for at, root, given in _rooted(roots, gradients):
        found: list[tuple[Path, list[Any]]] = []
        before = _disabled()
        try:
            # A checkpoint would run again, only to give a number that it has saved.
            _disable("oomkit reads a number")
            found = _terms_given(root, given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # so that; or freed, or written to, which the backward says itself
            pass
        finally:
            if before is None:
                _enable()
            else:
                _disable(before)
        for path, term in found or [((_UNREAD,), [0.0, 0.0, math.nan])]:
            part[number, at, *path] = term


def _read(parts: list[Part]) -> None:
    """What is on devices, of which each waits once. Rows that all weigh 0 are no term."""
    waiting: dict[torch.device, list[tuple[list[Any], int]]] = {}
    for term in (term for part in parts for term in part.values()):
        for at, value in enumerate(term):
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append((term, at))
    for each in waiting.values():
        numbers = torch.stack([term[at] for term, at in each]).tolist()
        for (term, at), number in zip(each, numbers, strict=True):
            term[at] = number
    for part in parts:
        for path in [path for path, term in part.items() if path[-1] == _LARGEST and not term[0]]:
            del part[path]


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= _EQUAL * max(abs(one), abs(two))


def _are_close(values: list[float], to: float | None) -> bool:
    first = values[0] if to is None else to
    return all(abs(first - each) <= _EQUAL * max(abs(first), abs(each)) for each in values)


def _relation(path: Path, made: list[_Made], of: int, whole: float | None = None) -> int:
    """Which of the relations `of` the coefficients of a term in micro-batches have."""
    having = [(weight, part[path][0]) for _, weight, part in made if path in part]
    found = 0
    if of & _OF_ROWS and _are_close([weight * by for weight, by in having], whole):
        found |= _OF_ROWS
    if of & _SHARED and _are_close([by for _, by in having], whole):
        found |= _SHARED
    return found


def _apart(path: Path, made: list[_Made]) -> list[float]:
    """How far each micro-batch is from the middle one."""
    values = [weight * part[path][0] for _, weight, part in made]
    middle = statistics.median(values)
    return [abs(each - middle) if math.isfinite(each) else math.inf for each in values]


def _figure(relation: int, path: Path, made: list[_Made]) -> float:
    """What is the same in calls with other rows; nan where nothing is expected to be."""
    rows, part = next((rows, part) for rows, _, part in made if path in part)
    by, plain = part[path][:2]
    if relation & _SHARED:
        return float(by)
    total = sum(each[0] for each in made)
    if not all(_close(each[1], each[0] / total) for each in made):
        return math.nan
    return float(by * rows if by == plain else plain)


def _adds_nothing(path: Path, made: list[_Made], expected: int, before: float) -> bool:
    """Whether the micro-batches that lack a term would add 0 to it: `if k.any(): loss += ...` of a
    sum over rows, by what proofs have shown. A mean would be one over the rows of some."""
    is_mean = any(part[path][0] != part[path][1] for *_, part in made if path in part)
    return (
        not is_mean
        and bool(_relation(path, made, expected & _OF_ROWS))
        and _close(_figure(expected, path, made), before)
    )


def learn_terms(tried: dict[tuple[Any, ...], float], whole: Part, made: list[_Made]) -> bool:
    """A proof has shown that these parts make the whole: so their terms may be to one another.

    Args:
        tried: what the proofs of the site have learnt.
        whole: terms of the whole.
        made: its parts: rows, weight and terms of each.

    Returns:
        Whether that may be by chance: a sum that is divided by `max(1, n)`, where n is 1 at most.
    """
    _read([whole, *(part for *_, part in made)])
    for path in {*whole, *(path for *_, part in made for path in part)}:
        relation, figure = 0, math.nan
        if path in whole and all(path in part for *_, part in made):
            relation = _relation(path, made, _OF_ROWS | _SHARED, whole[path][0])
            figure = _figure(relation, path, made) if relation else math.nan
        known = tried.get(("term", path))
        if known is None and len(tried) > _KNOWN:
            continue
        if known is not None:
            relation &= int(known)
            before = tried["factor", path]
            figure = figure if _close(before, figure) else math.nan
        tried["term", path], tried["factor", path] = float(relation), figure
    if not all(each[1] == 1.0 for each in made) or all(term[2] != 1 for term in whole.values()):
        return False
    tried["ones", ()] = tried.get(("ones", ()), 0.0) + 1.0
    return tried["ones", ()] <= _ONES


class Terms:
    """Those of the micro-batches of an attempt, beside what proofs have shown."""

    __slots__ = ("_is_new", "_lacked", "_made", "_others")

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._is_new = False  # something was noted since strays() was asked
        self._lacked: set[Path] = set()  # terms that not all have, and that may tell nothing
        self._others = False  # numbers differ

    def note(
        self, roots: Any, gradients: tuple[Any, ...], at: int, rows: int, weight: float
    ) -> None:
        """An outermost backward of micro-batch `at` begins."""
        while len(self._made) <= at:
            self._made.append((rows, weight, {}))
        note_terms(self._made[at][2], roots, gradients)
        self._is_new = True

    def strays(self, tried: dict[tuple[Any, ...], float]) -> list[int]:
        """Micro-batches that have, beside the others, what no proof has shown, the oddest first.

        Args:
            tried: what the proofs of the site have learnt. That a number has changed in all
                micro-batches is noted in it, for programs may change it as they like; it is
                proven once.
        """
        if not self._is_new:
            return []
        self._is_new = False
        numbers = [at for at, each in enumerate(self._made) if each[1] != 0.0]
        counted = [self._made[at] for at in numbers]  # others are means over nothing
        _read([part for *_, part in counted])
        odd: dict[int, float] = {}
        paths = {path for *_, part in counted for path in part}
        unread = {path[:2] for path in paths if path[-1] == _UNREAD}
        for path in paths:
            expected = int(tried.get(("term", path), 0))
            if not expected or path[:2] in unread:
                continue
            before = tried["factor", path]
            if any(path not in part for *_, part in counted):
                if not _adds_nothing(path, counted, expected, before):
                    self._lacked.add(path)
                    for at in numbers:  # rows of both kinds may be in those that have it
                        odd.setdefault(at, 0.0 if path in self._made[at][2] else math.inf)
                continue
            relation = _relation(path, counted, expected)
            if not relation and path[-1] == _LARGEST:
                self._lacked.add(path)  # rows may weigh what they like
            self._others |= not relation and path[-1] != _LARGEST
            if not relation:
                odd.update(zip(numbers, _apart(path, counted), strict=True))
            if not relation or math.isnan(before):
                continue
            if not _close(_figure(relation, path, counted), before):
                tried["factor", path] = math.nan
                odd.setdefault(len(self._made) - 1, 0.0)
        return sorted(odd, key=lambda at: -odd[at])

    def settle(self, tried: dict[tuple[Any, ...], float]) -> bool:
        """All micro-batches that strays() has named were proven. Whether that explains them: it
        does where some only lack a term, which is not looked at again, and not where numbers of
        one term differ.
        """
        tried.update({("term", path): 0.0 for path in self._lacked})
        return not self._others
