"""Is a split call what the whole call would be? Asked of the user's own program, before an update.

The engine (C) runs the rows of one micro-batch whole, then the same rows in two parts by the
machinery that the real call uses, with updates held back, and puts everything back. What the
caller and the updates would see of the two is compared here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .._code.module_buffers import is_compiling
from . import values
from .around import Around
from .dealt import Dealt
from .diagnose import GRADIENT, Verification, advice, looks_like, tolerance
from .draws import Draws
from .graphs.bounds import bounds, of_the_batch, order_rows
from .graphs.flows import Flows, hooks
from .graphs.terms import Terms, learn_terms, note_terms
from .lengths import lengths
from .metrics import Metrics
from .numbers import Numbers
from .put_back.plain_values import Step
from .quiet import Quiet
from .residual import Products, left
from .runs import Copies, Run, Update
from .slope import COARSE, slope
from .weights import (
    Cut,
    Leaves,
    Tried,
    Weigher,
    candidates,
    confirm,
    decisive,
    facts,
    fuller,
    is_varied,
    learn,
    less_likely,
    possible,
    settled,
    undecided,
    varied,
)

__all__ = ["Proof"]

# A gradient that cancels to nothing (the bias of a key in attention) is rounding of what the
# others are made of.
_CANCELS = 0.02
_NOISE = 0.2  # what random numbers make of a loss, at most
_HALF = 2e-2  # tolerance() of half precision
_LOSS = frozenset({"result", "result[0]", "result['loss']", "result.loss"})
_SQUARED = 1e-6  # what a norm can tell that is the difference of squares, in double
_LOOSE = 2.5  # how much looser a bound of gradients is than one of losses
_SURE = 5.0  # times what rounding explains: weights so far apart would have shown
_FARTHER = 4.0  # parts may be as many times as far from the whole as it is from itself
_SHOWN = 3  # names in a message


def _alive(roots: list[Any] | None) -> list[Any]:
    return [root for ref in roots or [] if (root := ref()) is not None]


class Proof:
    """The comparison of one micro-batch with its own two parts.

    Args:
        label: name of the step.
        roots: weak references to the modules and optimizers that take part.
        params: the parameters, in the engine's order.
        entry: their gradients before the step, which accumulates on top of them.
        tried: what an earlier proof has learnt of weights.
        step: what is called, and the arguments of the call.
    """

    def __init__(
        self,
        label: str,
        roots: list[Any] | None,
        params: list[torch.Tensor],
        entry: list[torch.Tensor | None],
        tried: Tried | None,
        step: Step,
    ) -> None:
        self.label = label
        self._roots = _alive(roots)
        self._params = params
        self._entry = {i: value for i, value in enumerate(entry) if value is not None}
        self._quiet = Quiet()
        self._is_hidden = False
        self._orders = 0  # order_rows(): rows are put in order
        self._in_doubt = False  # see learn_terms()
        self._hooked = self.later = False  # a loss has a hook; a later call is verified
        self.draws = Draws()
        self.around = Around(params, step, self._roots)
        self._runs: dict[str, Run] = {}
        self._now = self._made = ""
        self._base = "whole"  # the run that others are compared with
        self._cut: Cut = []
        self._limit = self._loss_limit = 0.0
        # A loss in double precision may be one of a model in single precision.
        real = (p for p in params if p.is_floating_point())
        self._coarsest = max(real, key=tolerance, default=None)
        self._raw = self.noise = self._repeats = False
        self._worst: tuple[float, str] = (0.0, "")
        self._chance = 0.0  # what random numbers alone change, relative, and some more
        self._added: dict[int, float] = {}  # norms of what was added to gradients, by parameter
        self._by_chance: list[dict[str, Any]] = []  # results of the whole with other numbers
        # Parameters that the step itself has written to, as the whole leaves them and before.
        self._marks: list[Any] = []
        self._moved_now: list[int] = []
        self._written: dict[int, torch.Tensor] = {}
        self._unwritten: dict[int, torch.Tensor] = {}
        self.tried: Tried = dict(tried or {})  # the site's own when all has gone well
        self.unjoined: bool | str = False  # results of parts of one row could not be joined
        self._numbers = Numbers()
        self._metrics = Metrics(self._roots)
        self._is_of_results = False  # what differs, if anything
        self.volatile = False  # nothing but results differs: are they the same twice?
        self._gradients: set[str] = set()  # kinds of those that were compared

    # What the engine asks of graphs, in a proof and later.
    flows, dealt, terms = Flows, Dealt, Terms
    hooks = staticmethod(hooks)
    lengths, norms = staticmethod(lengths), staticmethod(values.norms)

    # --- what the engine calls around the runs ---

    def modules(self) -> list[torch.nn.Module]:
        return _C.modules_of(self._roots)

    def repeats(self) -> None:
        """Runs are those of whole calls, whose backwards nobody tells of: see Around.hold()."""
        self.around.hold()
        self._repeats = True
        if self._coarsest is not None:
            self._note_loss(self._coarsest)

    def quiet(self, everything: bool) -> None:
        """Dropout and norms with running statistics into eval, or every module."""
        self.noise, self._chance = False, 0.0
        self._quiet.leave()
        self._quiet.enter(self.modules(), everything)

    def overflows(self) -> bool:
        """Whether all is to run again with a smaller scale of the step's GradScaler."""
        return self._quiet.lower()

    @property
    def quieted(self) -> list[tuple[Any, ...]]:
        """Dictionary, name and value of what is to be put back; without one, the name goes."""
        return self._quiet.saved

    def start(self, run: str, cut: Cut, marks: list[int] | None = None) -> None:
        """The next run: "whole", "whole again", "parts", "raw", "one", "two"; of all
        micro-batches "whole of all", and "parts of all" where they have other rows.

        Args:
            cut: start and length of its slices.
            marks: a number for each parameter that changes when one is written to; None where
                the engine has none.
        """
        if run == "whole":
            self._runs.clear()
            self._by_chance = []
        self._base = "whole of all" if run.endswith("of all") else "whole"
        self._now = run
        self._runs[run] = Run()
        self._worst = (0.0, "")  # of a run that an error ended
        self._marks = [values.mark(p) for p in self._params] if marks is None else marks
        if run.startswith("parts"):
            self._unwritten = {i: values.host(self._params[i]) for i in self._written}
        self._raw = run in ("raw", "one", "two")
        self._cut = cut
        self._metrics.begin(run)
        self.draws.begin(cut, run == "whole")

    # --- what it sees inside one ---

    def root(self, roots: Any, gradients: tuple[Any, ...]) -> None:
        """An outermost backward begins, with tensors and the gradients that they are given."""
        run = self._runs[self._now]
        if self._now == self._base and not any(run.losses):
            self._drop_cleared()
        tensors = roots if isinstance(roots, (tuple, list)) else (roots,)
        value = math.nan
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            self._note_loss(tensor)
            self._hooked |= bool(tensor._backward_hooks)
            if len(tensors) == 1 and tensor.numel() == 1:
                value = float(tensor.detach())
        run.begin_slice()
        note_terms(run.terms[-1], roots, gradients)
        run.losses[-1].append(value)
        run.bounds[-1] += [b for t in tensors if isinstance(t, torch.Tensor) for b in bounds(t)]

    def _drop_cleared(self) -> None:
        """Gradients of the entry that the step has cleared are in none of what follows."""
        grads = ((i, self._params[i].grad) for i in self._entry)
        self._entry = {
            i: self._entry[i]
            for i, g in grads
            if g is not None and (g.is_sparse or bool(values.own(g).any()))
        }

    def _note_loss(self, tensor: torch.Tensor) -> None:
        learn(tensor, self.tried)
        both = (t for t in (tensor, self._coarsest) if t is not None)
        rounding = max(tolerance(t, self.around.is_full) for t in both)
        self._loss_limit = max(self._loss_limit, rounding)
        self._limit = max(self._limit, GRADIENT[rounding])

    def swept(self, gradients: list[torch.Tensor | None]) -> None:
        """A backward of the last micro-batch has ended: gradients as it leaves them, before the
        step unscales or clips them."""
        run = self._runs[self._now]
        if not self._raw and not (self._is_coarse and self._now in ("whole", "parts")):
            return
        present = {i: g for i, g in enumerate(gradients) if g is not None}
        run.sweeps += 1
        if self._raw or self._now == "whole":
            run.raw = {i: values.without(g, self._entry.get(i)) for i, g in present.items()}
            own = {id(self._params[i]): i for i in present if i not in self._entry}
            run.swept = Copies({key: (present[i], run.raw[i]) for key, i in own.items()})
            return
        whole = self._runs["whole"]
        if len(self._cut) == 2 and run.sweeps == whole.sweeps:
            both = (run.first.keys() & whole.raw.keys() & present.keys()) - self._entry.keys()
            terms = [
                (whole.raw[i], present[i], run.first[i], present[i].device) for i in sorted(both)
            ]
            size, text = slope(terms, run.weights)
            self._fail(size, text)

    @property
    def _is_coarse(self) -> bool:
        """Whether all gradients together tell more of weights than each of them."""
        return self._limit >= COARSE and not self.noise

    def exactly(self) -> bool:
        """What comes now is to be compared without autocast. Whether it can be."""
        single = all(p.dtype in values.WIDE for p in self._params if p.is_floating_point())
        if self._limit < GRADIENT[_HALF] or not single or self.noise or is_compiling():
            return False
        self._cast = self._limit, self._loss_limit
        self._limit = self._loss_limit = 0.0
        self.around.alone = True
        return True

    def coarsely(self) -> None:
        """The end of that."""
        self.around.alone = False
        self._limit, self._loss_limit = self._cast

    def eager(self) -> None:
        """What comes now was accumulated apart from the gradients of the entry."""
        self._entry = {}

    def parked(self, gradients: list[torch.Tensor | None]) -> None:
        """What the first part alone has given."""
        run = self._runs[self._now]
        present = {i: g for i, g in enumerate(gradients) if g is not None}
        if not run.parts:
            run.parts = {i: values.norm(g) for i, g in present.items()}
        if self._is_coarse and len(self._cut) == 2:
            run.first = {i: values.host(g) for i, g in present.items()}

    def update(
        self, target: Any, name: str, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An intercepted call that would be made for real."""
        arguments: list[tuple[str, Any]] = []
        for where, value in [
            *((f"argument {i + 1}", v) for i, v in enumerate(args)),
            *((f"{k}=", v) for k, v in kwargs.items()),
        ]:
            number = values.number(value)
            what = id(type(value)) if callable(value) else id(value)  # a closure is made anew
            arguments.append((where, what if number is None else number))
        gradients: dict[int, torch.Tensor] = {}
        if optimizer is not None:
            for at, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    number = None if key == "params" else values.number(value)
                    if number is not None:
                        arguments.append((f"param_groups[{at}][{key!r}]", number))
                for param in group["params"]:
                    if param.grad is not None:
                        gradients[id(param)] = param.grad
        self._quiet.update(target, gradients.values())
        made = Update(id(target), f"{type(target).__name__}.{name}()", arguments, gradients)
        run = self._runs[self._now]
        run.updates.append(made)
        whole = self._now == self._base
        if whole:
            made.gradients = {key: run.swept.of(key, g) for key, g in gradients.items()}
        run.seen = Copies(
            {key: (g, made.gradients[key] if whole else None) for key, g in gradients.items()}
        )
        if self._now.startswith("parts"):
            self._compare_update(len(run.updates) - 1, made)
        if not whole:
            made.gradients = {}

    def result(self, result: Any, loss: Any, rows: int, weight: float, is_sum: bool) -> None:
        """The end of a micro-batch."""
        run = self._runs[self._now]
        run.begin_slice()
        if isinstance(loss, torch.Tensor) and loss.is_floating_point():
            self._note_loss(loss)
            run.bounds[-1] += bounds(loss)
        run.rows.append(rows)
        run.weights.append(weight)
        run.is_sum = is_sum
        leaves = values.kept_leaves(result)
        if self._now.startswith("whole") or self._repeats:
            run.results = leaves
        run.each.append(leaves)
        self.draws.end_slice()

    def joined(self, result: Any) -> None:
        """What the caller would get of the parts."""
        self._runs[self._now].results = values.kept_leaves(result)

    def ended(self, marks: list[int] | None) -> None:
        """Marks at the end of a run: see `start`."""
        self._moved_now = self._moved(marks)

    def finish(self, gradients: list[torch.Tensor | None]) -> None:
        """The end of a run: gradients as the caller would have them."""
        self._metrics.end()
        run = self._runs[self._now]
        made = {i: g for i, g in enumerate(gradients) if g is not None}
        updated = {i: run.seen.find(id(self._params[i]), g) for i, g in made.items()}
        if self._now in (self._base, "whole by chance"):
            run.gradients = {i: run.seen.of(id(self._params[i]), g) for i, g in made.items()}
            run.last = {
                i for i, seen in updated.items() if seen is not None and seen[2] is not None
            }
            if self._now == self._base:
                self._written = {i: values.host(self._params[i]) for i in self._may_be_written(run)}
        elif self._now.startswith("parts"):
            whole = self._runs[self._base]
            # What was compared at the last update, and is the same since.
            same = {i for i in whole.last if updated.get(i) is not None and i not in self._entry}
            self._compare_gradients(
                {i: g for i, g in whole.gradients.items() if i not in same},
                {i: g for i, g in made.items() if i not in same},
                run,
                self._params.__getitem__,
                "",
            )
            if not self.noise:
                self._compare_written(self._moved_now)

    def _may_be_written(self, run: Run) -> list[int]:
        """Parameters that the step has written to by itself. Where it has used up its gradients
        and no update was seen, that may be any: a few rows through `.data` leave no mark."""
        used = any(run.losses) and not run.updates
        if used and not any(values.norm(g) > 0.0 for g in run.gradients.values()):
            return [i for i, param in enumerate(self._params) if param.requires_grad]
        return self._moved_now

    def _moved(self, now: list[int] | None) -> list[int]:
        """Parameters that this run has written to."""
        if now is not None:
            return [
                i for i, pair in enumerate(zip(now, self._marks, strict=True)) if len({*pair}) > 1
            ]
        marks = enumerate(zip(self._params, self._marks, strict=True))
        return [i for i, (param, mark) in marks if not values.is_same(values.mark(param), mark)]

    def _compare_written(self, moved: list[int]) -> None:
        """An update by hand: what it makes of the parameters."""
        for i in {*moved, *self._written}:
            param = self._params[i]
            if i not in self._written:
                self._fail(math.inf, f"the step writes to {self.name_of(param)} only in a part")
                continue
            gap = values.apart(self._written[i], param)
            size = values.apart(self._written[i], self._unwritten[i])
            rounding = 4 * torch.finfo(param.dtype).eps if param.is_floating_point() else 0.0
            if gap > 0.0 and not gap <= self._limit * size + rounding * values.norm(param):
                text = f"the value that the step writes to {self.name_of(param)} differs by"
                self._fail(gap / size if size else math.inf, f"{text} {gap / (size or gap):.2g}")

    # --- judging ---

    def name_of(self, param: torch.Tensor | None) -> str:
        if param is None:
            return "a parameter"
        for root in self._roots:
            if isinstance(root, torch.nn.Module):
                for name, each in root.named_parameters():
                    if each is param:
                        return f"{name} of {type(root).__name__}"
        return f"a tensor of shape {tuple(param.shape)}"

    def _fail(self, size: float, text: str) -> None:
        if size > self._worst[0]:
            self._worst = (size, text)

    def _compare_gradients(
        self,
        whole: dict[int, torch.Tensor],
        made: dict[int, torch.Tensor],
        run: Run,
        param: Callable[[int], Any],
        where: str,
    ) -> None:
        entry = {} if where else self._entry
        norms, others, gaps = {}, {}, {}
        for i in {*whole, *made}:
            if i in whole and i in made and i not in entry:
                norms[i], others[i], gaps[i] = values.sizes(whole[i], made[i])
                continue
            sizes = [
                values.added(each[i], entry.get(i)) if i in each else 0.0 for each in (whole, made)
            ]
            norms[i], others[i] = sizes
            both = i in whole and i in made
            gaps[i] = values.apart(whole[i], made[i]) if both else max(sizes)
        kinds = (
            "none" if n == 0.0 else "some" if math.isfinite(n) else "odd" for n in norms.values()
        )
        self._gradients.update(kinds)
        largest = max([*norms.values(), *others.values()], default=0.0)
        if not math.isfinite(largest):
            largest = 0.0
        wrong: list[tuple[float, int]] = []
        ratios: list[float] = []
        for i in {*whole, *made}:
            one, two, gap = norms[i], others[i], gaps[i]
            scale = max(one, two, run.parts.get(i, 0.0) if not where else 0.0)
            limit = self._limit * (scale + (self.later or _CANCELS) * largest)
            if i in entry:  # sums on top of it are rounded to it
                limit += self._limit * _CANCELS * values.norm(entry[i])
            if self.noise:
                added = self._added.get(id(param(i)), max(one, two))
                limit += self._chance * added + self._limit * largest
            if not gap <= limit:
                wrong.append((gap / (scale or 1.0), i))
            if one > 0.0 and i in made:
                ratios.append(two / one)
        if not wrong:
            return
        wrong.sort(reverse=True)
        shown = ", ".join(self.name_of(param(i)) for _, i in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        self._fail(
            wrong[0][0],
            f"the gradient of {shown}{more}{where} differs by {wrong[0][0]:.2g} of its norm"
            f"{looks_like(ratios, len(wrong))}",
        )

    def _compare_update(self, index: int, made: Update) -> None:
        whole = self._runs[self._base].updates
        if index >= len(whole) or (whole[index].target, whole[index].name) != (
            made.target,
            made.name,
        ):
            self._fail(math.inf, f"{made.name} is called in a different order")
            return
        was = whole[index]
        if len(was.arguments) != len(made.arguments):
            self._fail(math.inf, f"{made.name} gets different arguments")
            return
        limit = max(self._limit, _NOISE, self._chance) if self.noise else self._limit
        for (where, one), (_, two) in zip(was.arguments, made.arguments, strict=True):
            if type(one) is not type(two):
                self._fail(1.0, f"{where} of {made.name} has a different type")
            elif isinstance(one, float) and values.far(one, two, limit):
                self._fail(
                    abs(one - two) / max(abs(one), abs(two)),
                    f"{made.name} gets a different {where}: {two:.6g} instead of {one:.6g}",
                )
        params = {id(param): param for param in self._params}
        keys = list({*was.gradients, *made.gradients})
        order = {key: i for i, key in enumerate(keys)}
        self._compare_gradients(
            {order[k]: g for k, g in was.gradients.items()},
            {order[k]: g for k, g in made.gradients.items()},
            self._runs[self._now],
            lambda i: params.get(keys[i]),
            f" at {made.name}",
        )

    def chance(self) -> None:
        """How much of a result is chance: the whole beside itself with other numbers."""
        whole, other = self._runs["whole"], self._runs["whole by chance"]
        self.noise = True
        self._by_chance.append(other.results)
        seen = {}
        for i in {*whole.gradients, *other.gradients}:
            one, two = whole.gradients.get(i), other.gradients.get(i)
            sizes = [values.added(g, self._entry.get(i)) for g in (one, two) if g is not None]
            size = max(sizes, default=0.0)
            gap = values.apart(one, two) if one is not None and two is not None else size
            if size > 0.0 and math.isfinite(gap):
                seen[i] = size, gap
                self._added[id(self._params[i])] = size
        largest = max((size for size, _ in seen.values()), default=0.0)
        for size, gap in seen.values():
            if size > _CANCELS * largest:
                self._chance = max(self._chance, _FARTHER * gap / size)
        for one_, two_ in zip(whole.losses[:1], other.losses[:1], strict=False):
            for a, b in zip(one_, two_, strict=False):
                if a != b:
                    self._chance = max(self._chance, _FARTHER * abs(a - b) / max(abs(a), abs(b)))

    def _compare_losses(self, whole: Run, made: Run) -> None:
        """Where chance hides what gradients are: the losses, coarsely."""
        limit = max(_NOISE, self._chance)
        for at, value in enumerate(whole.losses[0] if whole.losses else []):
            parts = [each[at] if at < len(each) else math.nan for each in made.losses]
            total = sum(w * v for w, v in zip(made.weights, parts, strict=False))
            scale = max(abs(value), abs(total))
            if math.isfinite(total) and abs(value - total) > limit * scale:
                self._fail(
                    abs(value - total) / scale,
                    f"the loss of a backward() is {total:.6g} instead of {value:.6g}",
                )

    def _compare_bounds(self, whole: Run, made: Run) -> None:
        self._orders = order_rows(whole.bounds[0], made.bounds, self._orders)
        if name := of_the_batch(whole.bounds[0], made.bounds, self._loss_limit):
            self._fail(
                1.0,
                f"{name}() clips a number that is computed from all rows; for fewer rows it may "
                "be on the other side of the bound",
            )

    def _result_limit(self, value: Any) -> float:
        if self.noise:
            return _NOISE
        return values.limit(value, self._loss_limit)

    def _compare_results(self, whole: Run, made: Run) -> None:
        again = self._runs.get("whole again")
        others = [again.results] if again else self._by_chance if self.noise else []
        for place, one in whole.results.items():
            two = made.results.get(place)
            if two is None or (
                not isinstance(one, (torch.Tensor, bool)) and values.number(one) is None
            ):
                continue
            gap, limit = values.gap(one, two), self._result_limit(one)
            if self._is_joined(place, one, made, limit) or gap <= limit:
                continue
            if (
                place in _LOSS
                and values.is_rounding(one, two)
                and any(float(one) in losses for losses in whole.losses)
                and self._has_gradient()
            ):
                continue  # the loss of a backward, whose gradients are compared
            chance = max((values.gap(one, each.get(place)) for each in others), default=0.0)
            if chance > limit and (gap < math.inf or chance == math.inf):
                continue  # a time, say: the whole step does not give it twice
            if self.noise and gap <= _FARTHER * chance:
                continue
            self.volatile &= again is None and (not self._repeats or isinstance(one, float))
            what = values.shown(two, one) if gap < math.inf else values.shapes(two, one)
            self._fail(gap, f"{place} of the joined parts is {what}")
        self._compare_lengths(whole, made)

    def _compare_lengths(self, whole: Run, made: Run) -> None:
        """Lists whose elements are no rows, or rows that are chosen among all of them."""
        now = values.list_lengths(made.results)
        for place, one in values.list_lengths(whole.results).items():
            if now.get(place, one) != one:
                text = f"{place} of the joined parts has {now[place]} elements instead of {one}"
                self._fail(math.inf, text)

    def _is_joined(self, place: str, one: Any, made: Run, limit: float) -> bool:
        parts = [each.get(place) for each in made.each]
        weights = None if made.is_sum else made.weights
        if made.is_sum and place in _LOSS:  # it is added, unless it is a mean all the same
            weights = [1.0] * len(parts)
            if any(map(any, made.losses)):
                self._numbers.is_no_loss(place, one, parts)
        noted = not self.noise and self._numbers.note(
            place, one, parts, weights, made.rows, limit, self._has_gradient
        )
        return noted and (place not in _LOSS or not made.is_sum or self._has_gradient())

    @property
    def has_other_figures(self) -> bool:
        """Whether a number of the joined parts is not the whole's: without a backward."""
        made, found = self._runs["parts"], False
        for place, one in self._runs["whole"].results.items():
            two, most = made.results.get(place, one), self._result_limit(one)
            numbers = {values.number(each) for each in (one, *(e.get(place) for e in made.each))}
            if None not in numbers and len(numbers) > 1:  # not a norm: nothing was added to it
                found |= not self._is_joined(place, one, made, most) and values.gap(one, two) > most
        return found

    def all_figures(self, known: dict[str, int]) -> dict[str, int]:
        """How numbers in results are joined: what the site knows, and what was shown here."""
        return self._numbers.with_known(known, self.label)

    def _has_gradient(self) -> bool:
        """Whether the whole has one that is not 0, at its end or when it was updated."""
        whole = self._runs["whole"]
        every = [whole.gradients, *(update.gradients for update in whole.updates)]
        return any(values.norm(g) > 0.0 for found in every for g in found.values())

    def _compare_unjoined(self, whole: Run, made: Run) -> None:
        """Parts of one row that could not be joined: what has no rows must be one value."""
        if isinstance(self.unjoined, str):  # nor can the call's own, which have one row, too
            self._fail(math.inf, values.why_unjoined(self.unjoined))
        for place, one in whole.results.items():
            parts = [each.get(place) for each in made.each]
            known = isinstance(one, (str, torch.Tensor)) and getattr(one, "ndim", 1) > 0
            known = known and all(getattr(p, "shape", 0) == getattr(one, "shape", 0) for p in parts)
            if known and any(values.gap(one, p) > self._result_limit(one) for p in parts):
                self._fail(1.0, f"the parts' {place} cannot be joined: it has no rows")

    def _compare_draws(self) -> None:
        if self.draws.apart:
            self._fail(1.0, "random numbers are drawn from other values in a part")

    def _shapes(self) -> None:
        """Where results are joined wrongly, by what they are, not by their values."""
        whole, made = self._runs["whole"], self._runs["parts"]
        for place, one in whole.results.items():
            two = made.results.get(place, one)
            if isinstance(one, torch.Tensor) and one.shape != getattr(two, "shape", None):
                self._fail(math.inf, f"{place} of the joined parts is {values.shapes(two, one)}")
        if self.unjoined and not made.results and len(made.each) == 2:
            self._compare_unjoined(whole, made)

    def verdict(self) -> str | None:
        """What differs between the whole and its parts, or None."""
        if not self._now.startswith("whole"):
            self._made = self._now
        whole, made = self._runs["whole"], self._runs[self._made]
        if len(whole.updates) != len(made.updates):
            self._fail(
                math.inf,
                f"the step makes {len(made.updates)} updates instead of {len(whole.updates)}",
            )
        self._compare_draws()
        if self.noise:
            self._compare_losses(whole, made)
        self.volatile = self._worst[0] == 0.0
        if self._worst[0] == 0.0 and whole.bounds and made.bounds and not self.noise:
            self._compare_bounds(whole, made)
        self._is_of_results = self._worst[0] == 0.0
        if self._is_of_results:
            self._compare_results(whole, made)
            if self.unjoined and not made.results and len(made.each) == 2:
                self._compare_unjoined(whole, made)
        size, text = self._worst
        self._worst = (0.0, "")
        if size:
            return text
        made_of = zip(made.rows, made.weights, made.terms, strict=False)
        self._in_doubt |= learn_terms(self.tried, whole.terms[0], list(made_of))
        return None

    def coupled(self) -> str | None:
        """What differs where rows are dealt to the micro-batches in another way, or None."""
        made, want = (len(self._runs[f"{of} of all"].updates) for of in ("parts", "whole"))
        if made != want:
            self._fail(math.inf, f"the step makes {made} updates instead of {want}")
        size, text = self._worst
        self._worst, self._is_of_results = (0.0, ""), False
        how = ", where the micro-batches have other rows of the batch, or come in another order"
        return text + how if size else None

    def hidden(self, by_chance: bool) -> str | None:
        """Asked where numbers that no part can be given are drawn in eval mode, too.

        Args:
            by_chance: whether a coarse comparison has passed, which tells what they make of
                gradients.

        Returns:
            What to say of them; None where they make no difference, or parts were given all.
        """
        self.volatile = False
        told = not by_chance or self._chance > self._limit or self._results_by_chance()
        self._is_hidden = self.draws.hides and told
        if not self._is_hidden:
            return None
        return "no part can be given the random numbers that its rows have in the whole"

    def _results_by_chance(self) -> bool:
        """Whether the whole has other results with other numbers."""
        noise, self.noise = self.noise, False
        found = any(
            values.gap(one, each.get(place)) > self._result_limit(one)
            for place, one in self._runs["whole"].results.items()
            for each in self._by_chance
            if isinstance(one, (torch.Tensor, bool)) or values.number(one) is not None
        )
        self.noise = noise
        return found

    def advice(self, rules: list[Weigher], is_sum: bool) -> str:
        """What to do about the last verdict that was not None.

        Args:
            rules: weights that would make the parts the whole.
            is_sum: whether micro-batches weigh 1 now.
        """
        return advice(
            [(rule.kind, rule.text) for rule in rules if not rule.least],
            is_sum,
            self.draws.chooses,
            self._is_hidden,
            self._is_of_results,
        )

    def proven(self, whole: int, first: int, second: int) -> str:
        """The line that says so."""
        how = ""
        if not self.noise:
            self._metrics.tell(self.tried)
        if self.noise:
            how = "; a coarse comparison, because the step draws random numbers"
        elif self.draws.hides:
            how = "; exactly in eval mode alone, for no part can be given what training mode draws"
        return (
            f"proved the split of {self.label}: {whole} rows and the same rows as {first} and "
            f"{second} give the same gradients and results{how}"
        )

    @property
    def decides(self) -> bool:
        """Whether other gradients would have shown: not where all are 0, or one is not finite, or
        rows are put in an order, which shows nothing while their values are equal, or are chosen by
        chance, which may choose alike, or a sum is divided by 1, which may have been a count, or a
        loss has a hook."""
        in_doubt = self._in_doubt or self._orders or self._hooked or self.draws.chooses
        return not (in_doubt or "odd" in self._gradients or self.is_silent)

    @property
    def is_silent(self) -> bool:
        """Whether all gradients so far were 0."""
        return self._gradients == {"none"}

    # --- searching a weight ---
    fuller = staticmethod(fuller)
    confirm = staticmethod(confirm)

    def search(self, leaves: Leaves, cut: Cut) -> list[Weigher]:
        """Weights that make the gradients of two parts the gradient of both, most likely first.

        Args:
            leaves: tensors of the batch: number, name, tensor, whether it is sliced.
            cut: start and length of the two parts.
        """
        whole, one, two = (self._runs[run].raw for run in ("raw", "one", "two"))
        at = [p.device for p in self._params]
        inner = Products()
        for i in {*whole, *one, *two}:
            inner.add(*(run.get(i) for run in (whole, one, two)), device=at[i])
        terms = [(whole[i], one[i], two[i], at[i]) for i in whole if i in one and i in two]

        def fits(weigher: Weigher) -> bool:
            weights = weigher.shares(cut)
            return (
                weights is not None
                and inner.residual(*weights) <= max(self._limit, _SQUARED)
                and left(whole, one, two, weights, at) <= self._limit
                and not (self._limit >= COARSE and slope(terms, weights, apart=True)[0])
            )

        of = leaves, self.modules()
        rest = less_likely(*of, facts(self.tried), cut, inner.residual)
        every = [*possible(*of, self.tried), *(rest if self._limit < COARSE else ())]
        return list(filter(fits, every))

    def weighed(
        self,
        losses: Verification,
        verdict: tuple[bool | None, str],
        leaves: Leaves | None,
        cut: Cut,
        moved: bool,
    ) -> tuple[bool | None, str, list[Weigher]]:
        """A verdict of losses alone, with the weights that would make them equal.

        Args:
            losses: what judged.
            verdict: equal, text.
            leaves: see `search`; None where no weights are searched.
            cut: start and length of the two parts.
            moved: whether random numbers were drawn: then losses tell no weights.
        """
        self._limit = max(self._limit, _LOOSE * losses.tolerance)
        self.noise = self.noise or moved
        self._shapes()
        self._compare_draws()
        if verdict[0] is not False and self._worst[0]:
            leaves, verdict = None, (False, self._worst[1])
        self._worst = (0.0, "")
        for place, value in self._runs["whole"].results.items():
            if not self._entry and values.number(value):  # without a backward a norm is 0
                self._numbers.is_no_norm(place)
        rules = []
        for rule in possible(leaves, self.modules(), self.tried) if leaves and not moved else ():
            shares = None if verdict[0] else rule.shares(cut)
            if shares is not None and losses.fits(*shares):
                rules.append(rule)
        return (*verdict, rules)

    def place(self, *of: Any) -> int:
        """Where to look at so many rows instead of at `start`; see `varied`."""
        return varied(self.tried, *of)

    def told_apart(
        self,
        leaves: Leaves,
        rule: Weigher | None,
        start: int,
        length: int,
        first: int,
        slices: Cut,
        unit: tuple[int, int],
    ) -> tuple[int, int, int] | None:
        """Where weights that the last cut could not tell from those in use can be, or None.

        Args:
            rule: the weights in use; None for rows.
            start, length, first: the last cut, which they have passed; none where `first` is 0.
            slices: the micro-batches of the call.
            unit: see `cuts`.
        """
        used = (rule or Weigher("rows")).of(leaves)
        weighers = list(candidates(leaves, self.modules(), self.tried))
        passed = [(start, first), (start + first, length - first)] if first > 0 else []
        for key, gap in undecided(weighers, passed, used, self.tried, sums=True).items():
            self.tried[key] = math.inf if gap >= _SURE * self._limit and not self.noise else gap
        before = [(start, length)] if first > 0 else []
        where = decisive(weighers, slices, used, self.tried, unit, before, first > 0)
        if where is None:
            settled(leaves, self.tried)
        return where

    @staticmethod
    def unsettled(
        roots: list[Any] | None,
        leaves: Leaves,
        rule: Weigher | None,
        tried: Tried,
        slices: Cut,
        unit: tuple[int, int],
    ) -> bool:
        """Whether a call has what no proof has seen: labels of more than one class, or weights
        that make a difference and can be told from those in use, like a mask that was the
        same in every row so far.

        Args:
            roots: see `Proof`.
            leaves, rule, slices, unit: see `told_apart`.
            tried: what the proofs so far have learnt.
        """
        used = (rule or Weigher("rows")).of(leaves)
        if is_varied(leaves, slices, tried):
            return True
        weighers = list(candidates(leaves, _C.modules_of(_alive(roots)), tried))
        return decisive(weighers, slices, used, tried, unit) is not None
