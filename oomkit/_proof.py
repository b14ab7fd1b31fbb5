"""Is a split call what the whole call would be? Asked of the user's own program, before an update.

The engine (C) runs the rows of one micro-batch whole, then the same rows in two parts by the
machinery that the real call uses, with updates held back, and puts everything back. What the
caller and the updates would see of the two is compared here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ._diagnose import Verification, tolerance
from ._rows import leaves_of
from ._weights import (
    TOLD,
    Cut,
    Leaves,
    Tried,
    Weigher,
    candidates,
    cuts,
    decisive,
    pairs,
    undecided,
)

__all__ = ["Proof"]

# What the order of summation explains in a gradient, relative to its norm: a sum of n terms
# in another order differs by at most n eps of the sum of their absolute values, by sqrt(n) eps
# in practice (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). By what
# rounding explains in the loss, see _diagnose.tolerance.
_GRADIENT = {1e-9: 1e-9, 2e-5: 2e-4, 1e-3: 5e-3, 2e-2: 5e-2}
# A gradient that cancels to nothing (the bias of a key in attention) is rounding of what the
# others are made of.
_CANCELS = 0.02
_NOISE = 0.2  # what random numbers make of a loss, at most
_EXACT = 1e-9  # tolerance() of double precision
# Matrix products of other sizes are summed in another order; a result may be a difference.
_VALUE = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 5e-2,
    torch.int64: 0.1,  # an argmax may flip by rounding
    torch.int32: 0.1,
    torch.bool: 0.1,
}
_SQUARED = 1e-6  # what a norm can tell that is the difference of squares, in double
_LOOSE = 2.5  # how much looser a bound of gradients is than one of losses
_SURE = 5.0  # times what rounding explains: weights so far apart would have shown
_FARTHER = 4.0  # parts may be as many times as far from the whole as it is from itself
_SHOWN = 3  # names in a message


@dataclasses.dataclass(slots=True)
class _Update:
    """What one intercepted call was given."""

    target: int
    name: str
    arguments: list[tuple[str, Any]]
    gradients: dict[int, torch.Tensor]


class _Run:
    """What one run of the step has shown."""

    __slots__ = (
        "each",
        "gradients",
        "losses",
        "parts",
        "raw",
        "results",
        "rows",
        "updates",
        "weights",
    )

    def __init__(self) -> None:
        self.updates: list[_Update] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.raw: dict[int, torch.Tensor] = {}
        self.parts: dict[int, float] = {}  # norms of what the first part alone gave
        self.losses: list[list[float]] = []  # of each backward, by micro-batch
        self.results: dict[str, Any] = {}
        self.each: list[dict[str, Any]] = []  # results of micro-batches
        self.rows: list[int] = []
        self.weights: list[float] = []


def _norm(value: torch.Tensor) -> float:
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.to_dense()
    if not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(_dense(value.detach()), dtype=torch.float64))


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Strided and real: a complex number is two."""
    value = value if value.layout == torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _without(value: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor:
    """A host copy of what a step has added to a gradient."""
    if entry is None or entry.shape != value.shape:
        return _host(value)
    return _host(value) - entry


def _added(value: torch.Tensor, entry: torch.Tensor | None) -> float:
    """The norm of what a step has added to a gradient."""
    if entry is None:
        return _norm(value)
    size = _apart(value, entry.to(value.device))
    return size if math.isfinite(size) else _norm(value)


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of a difference; infinite where there is none."""
    if one.layout == two.layout == torch.sparse_coo:
        return _norm(one - two.to(one.device))
    one, two = _dense(one.detach()), _dense(two.detach())
    if one.shape != two.shape:
        return math.inf
    two = two.to(one.device)
    norm = float(torch.linalg.vector_norm(one - two, dtype=torch.float64))
    if norm == norm:
        return norm
    gap = torch.where(one.isnan() & two.isnan() | (one == two), 0.0, one - two)
    norm = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
    return norm if norm == norm else math.inf


def _host(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach()
    return plain.clone() if plain.device.type == "cpu" else plain.cpu()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        item = value.item()  # a scalar, or an array of one element
        return float(item) if isinstance(item, int | float) else None
    return None


def _kept(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _host(value) if value.layout == torch.strided else None
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else None
    return value


def _kept_leaves(result: Any) -> dict[str, Any]:
    """The values in a result, by place, without their graphs."""
    return {place: _kept(value) for place, value in leaves_of(result, "result", (tuple, list))}


def _gap(one: Any, two: Any) -> float:
    """How far two results are apart, relative; infinite where they cannot be compared."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape:
            return math.inf
        if not one.numel():
            return 0.0
        if not one.is_floating_point() and not one.is_complex():
            unlike = (one != two).double()
            return float(unlike.mean()) if one.ndim else float("inf") * float(unlike or 0.0)
        scale = float(torch.nan_to_num(one, posinf=0.0, neginf=0.0).abs().max())
        gap = torch.where(one == two, 0.0, (one - two).abs())
        gap = torch.where(one.isnan() & two.isnan(), 0.0, gap)
        widest = float(gap.max())
        return math.inf if widest != widest else widest / scale if scale else widest
    first, second = _number(one), _number(two)
    if isinstance(one, bool) or first is None or second is None:
        return 0.0 if one is two or one == two else math.inf
    if first == second or (first != first and second != second):
        return 0.0
    gap_ = abs(first - second) / max(abs(first), abs(second))
    return gap_ if gap_ == gap_ else math.inf


def _shown(now: Any, was: Any) -> str:
    if isinstance(now, torch.Tensor) and now.numel() > 1:
        return f"off by {_gap(was, now):.2g}"
    values = [v.item() if isinstance(v, torch.Tensor) else v for v in (now, was)]
    return " in place of ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in values)


def _shapes(now: Any, was: Any) -> str:
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor) and now.shape != was.shape:
        return f"of shape {tuple(now.shape)} in place of {tuple(was.shape)}"
    return _shown(now, was)


def _far(one: float, two: float, limit: float) -> bool:
    if one == two or (one != one and two != two):
        return False
    scale = max(abs(one), abs(two))
    return not abs(one - two) <= limit * scale


def _is_random(module: torch.nn.Module) -> bool:
    """Whether a module draws random numbers in training and does nothing else there."""
    name = type(module).__name__.lower()
    return (
        isinstance(module, (torch.nn.modules.dropout._DropoutNd, torch.nn.RReLU))
        or ("drop" in name or "stochasticdepth" in name)
        and next(module.children(), None) is None
    )


def _is_norm(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None
    )


def _is_batch_norm(module: torch.nn.Module) -> bool:
    """One without running statistics: those of the batch are all that it has."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is None


class _Affine:
    """A normalisation by zeros and ones in the place of one by the statistics of a batch."""

    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        mean = input.new_zeros(module.num_features)
        return torch.nn.functional.batch_norm(
            input, mean, torch.ones_like(mean), module.weight, module.bias, False, 0.0, module.eps
        )


class _Quiet:
    """Modules that would make a part differ from the whole by chance, for the length of a proof.

    `saved` is put back by the engine, too, which needs no memory for it.
    """

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: list[tuple[Any, ...]] = []

    def _set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        own = module.__dict__
        self.saved.append((own, name, *((own[name],) if name in own else ())))
        own[name] = value

    def still(self, module: torch.nn.Module) -> None:
        self._set(module, "training", False)
        # A step that begins with model.train() must not undo it.
        self._set(module, "train", lambda mode=True: module)

    def enter(self, modules: list[torch.nn.Module], everything: bool) -> None:
        for module in modules:
            if _is_batch_norm(module):
                self._set(module, "forward", _Affine(module))
            if everything or _is_random(module) or _is_norm(module):
                self.still(module)
            elif (
                isinstance(module, (torch.nn.RNNBase, torch.nn.MultiheadAttention))
                and module.dropout
            ):
                self._set(module, "dropout", 0.0)

    def leave(self) -> None:
        while self.saved:
            own, name, *value = self.saved[-1]
            if value:
                own[name] = value[0]
            else:
                own.pop(name, None)
            self.saved.pop()


def _alive(roots: list[Any] | None) -> list[Any]:
    return [root for ref in roots or [] if (root := ref()) is not None]


def _modules_of(roots: list[Any]) -> list[torch.nn.Module]:
    found = {id(m): m for r in roots if isinstance(r, torch.nn.Module) for m in r.modules()}
    return list(found.values())


class Proof:
    """The comparison of one micro-batch with its own two parts.

    Args:
        label: name of the step.
        roots: weak references to the modules and optimizers that take part.
        params: the parameters, in the engine's order.
        entry: their gradients before the step, which accumulates on top of them.
        tried: what an earlier proof has learnt of weights that are not in use.
    """

    def __init__(
        self,
        label: str,
        roots: list[Any] | None,
        params: list[torch.Tensor],
        entry: list[torch.Tensor | None],
        tried: Tried | None,
    ) -> None:
        self.label = label
        self._roots = _alive(roots)
        self._params = params
        self._entry = {i: value for i, value in enumerate(entry) if value is not None}
        self._quiet = _Quiet()
        self._stream = torch.get_rng_state()
        self._runs: dict[str, _Run] = {}
        self._now = ""
        self._host = torch.autograd.graph.save_on_cpu()
        self._limit = 0.0
        self._loss_limit = 0.0
        self._raw = False
        self.noise = False
        self._worst: tuple[float, str] = (0.0, "")
        self._made = ""
        self._chance = 0.0  # what random numbers alone change, relative
        self.tried: Tried = {} if tried is None else tried
        self.unjoined = False  # results of parts of one row could not be joined
        self.volatile = False  # nothing but results differs: are they the same twice?

    # --- what the engine calls around the runs ---

    def modules(self) -> list[torch.nn.Module]:
        return _modules_of(self._roots)

    def quiet(self, everything: bool) -> None:
        """Dropout and norms with running statistics into eval, or every module."""
        self._quiet.leave()
        self._quiet.enter(self.modules(), everything)

    @property
    def quieted(self) -> list[tuple[Any, ...]]:
        """Dictionary, name and value of what is to be put back; without one, the name goes."""
        return self._quiet.saved

    def start(self, run: str) -> None:
        """The next run: "whole", "whole again", "parts", "raw", "one", "two"."""
        if run == "whole":
            self._runs.clear()
        self._now = run
        self._runs[run] = _Run()
        self._stream = torch.get_rng_state()
        self._raw = run in ("raw", "one", "two")

    def on_host(self) -> None:
        """What a graph keeps goes to host memory from now on."""
        self._host.__enter__()

    def on_device(self) -> None:
        """The end of that."""
        self._host.__exit__()

    def drew(self) -> bool:
        """Whether the run has drawn from torch's CPU generator, by what comes next of it."""
        then, now = torch.Generator(), torch.Generator()
        then.set_state(self._stream)
        now.set_state(torch.get_rng_state())
        return not torch.equal(torch.rand(8, generator=then), torch.rand(8, generator=now))

    # --- what it sees inside one ---

    def root(self, roots: Any) -> None:
        """An outermost backward begins."""
        run = self._runs[self._now]
        tensors = roots if isinstance(roots, (tuple, list)) else (roots,)
        value = math.nan
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            self._judge_precision(tensor)
            if len(tensors) == 1 and tensor.numel() == 1:
                value = float(tensor.detach())
        while len(run.losses) <= len(run.rows):
            run.losses.append([])
        run.losses[-1].append(value)

    def _judge_precision(self, tensor: torch.Tensor) -> None:
        rounding = tolerance(tensor)
        self._loss_limit = max(self._loss_limit, rounding)
        self._limit = max(self._limit, _GRADIENT[rounding])

    def swept(self, gradients: list[torch.Tensor | None]) -> None:
        """A backward of the last micro-batch has ended; asked for where weights are searched."""
        run = self._runs[self._now]
        if self._raw:
            present = {i: g for i, g in enumerate(gradients) if g is not None}
            run.raw = {i: _without(g, self._entry.get(i)) for i, g in present.items()}

    def stashed(self) -> None:
        """What comes now was accumulated apart from the gradients of the entry."""
        self._entry = {}

    def parked(self, gradients: list[torch.Tensor | None]) -> None:
        """What the first part alone has given."""
        run = self._runs[self._now]
        if not run.parts:
            run.parts = {i: _norm(g) for i, g in enumerate(gradients) if g is not None}

    def update(
        self, target: Any, name: str, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An intercepted call that would be made for real."""
        arguments: list[tuple[str, Any]] = []
        for where, value in [
            *((f"argument {i + 1}", v) for i, v in enumerate(args)),
            *((f"{k}=", v) for k, v in kwargs.items()),
        ]:
            number = _number(value)
            what = id(type(value)) if callable(value) else id(value)  # a closure is made anew
            arguments.append((where, what if number is None else number))
        gradients: dict[int, torch.Tensor] = {}
        if optimizer is not None:
            for at, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    number = None if key == "params" else _number(value)
                    if number is not None:
                        arguments.append((f"param_groups[{at}][{key!r}]", number))
                for param in group["params"]:
                    if param.grad is not None:
                        gradients[id(param)] = param.grad
        made = _Update(id(target), f"{type(target).__name__}.{name}()", arguments, gradients)
        run = self._runs[self._now]
        run.updates.append(made)
        if self._now == "whole":
            made.gradients = {key: _host(value) for key, value in gradients.items()}
        elif self._now.startswith("parts"):
            self._compare_update(len(run.updates) - 1, made)
            made.gradients = {}
        else:
            made.gradients = {}

    def result(self, result: Any, loss: Any, rows: int, weight: float) -> None:
        """The end of a micro-batch."""
        run = self._runs[self._now]
        while len(run.losses) <= len(run.rows):
            run.losses.append([])
        if isinstance(loss, torch.Tensor) and loss.is_floating_point():
            self._judge_precision(loss)
        run.rows.append(rows)
        run.weights.append(weight)
        leaves = _kept_leaves(result)
        if self._now.startswith("whole"):
            run.results = leaves
        run.each.append(leaves)

    def joined(self, result: Any) -> None:
        """What the caller would get of the parts."""
        self._runs[self._now].results = _kept_leaves(result)

    def finish(self, gradients: list[torch.Tensor | None]) -> None:
        """The end of a run: gradients as the caller would have them."""
        run = self._runs[self._now]
        if self._now in ("whole", "whole by chance"):
            run.gradients = {i: _host(g) for i, g in enumerate(gradients) if g is not None}
        elif self._now.startswith("parts"):
            whole = self._runs["whole"]
            self._compare_gradients(
                whole.gradients,
                {i: g for i, g in enumerate(gradients) if g is not None},
                run,
                lambda i: self.name_of(self._params[i]),
                "",
            )

    # --- judging ---

    def name_of(self, param: torch.Tensor) -> str:
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
        run: _Run,
        name: Callable[[int], str],
        where: str,
    ) -> None:
        entry = {} if where else self._entry
        norms = {i: _added(g, entry.get(i)) for i, g in whole.items()}
        others = {i: _added(g, entry.get(i)) for i, g in made.items()}
        largest = max([*norms.values(), *others.values()], default=0.0)
        if not math.isfinite(largest):
            largest = 0.0
        wrong: list[tuple[float, int]] = []
        ratios: list[float] = []
        for i in {*whole, *made}:
            one, two = norms.get(i, 0.0), others.get(i, 0.0)
            gap = _apart(whole[i], made[i]) if i in whole and i in made else max(one, two)
            scale = max(one, two, run.parts.get(i, 0.0) if not where else 0.0)
            limit = self._limit * scale + self._limit * _CANCELS * largest
            if i in entry:  # sums on top of it are rounded to it
                limit += self._limit * _CANCELS * _norm(entry[i])
            if self.noise:
                gap = abs(one - two)
                limit = max(0.75, self._chance) * max(one, two) + self._limit * largest
            if not gap <= limit:
                wrong.append((gap / (scale or 1.0), i))
            if one > 0.0 and i in made:
                ratios.append(two / one)
        if not wrong:
            return
        wrong.sort(reverse=True)
        shown = ", ".join(name(i) for _, i in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        self._fail(
            wrong[0][0],
            f"the gradient of {shown}{more}{where} differs by {wrong[0][0]:.2g} of its norm"
            f"{self._looks_like(ratios, len(wrong))}",
        )

    @staticmethod
    def _looks_like(ratios: list[float], wrong: int) -> str:
        if not ratios or wrong < len(ratios):
            return ""
        mean = sum(ratios) / len(ratios)
        alike = max(abs(r - mean) for r in ratios) <= 0.02 * mean
        if not 0.0 < mean < math.inf or not alike or abs(mean - 1.0) <= 0.02:
            return ""
        return f" (all gradients are {mean:.3g} times as large)"

    def _compare_update(self, index: int, made: _Update) -> None:
        whole = self._runs["whole"].updates
        if index >= len(whole) or (whole[index].target, whole[index].name) != (
            made.target,
            made.name,
        ):
            self._fail(math.inf, f"{made.name} is called in another order")
            return
        was = whole[index]
        if len(was.arguments) != len(made.arguments):
            self._fail(math.inf, f"{made.name} gets other arguments")
            return
        limit = max(self._limit, _NOISE, self._chance) if self.noise else self._limit
        for (where, one), (_, two) in zip(was.arguments, made.arguments, strict=True):
            if type(one) is not type(two):
                self._fail(1.0, f"{where} of {made.name} is of another kind")
            elif isinstance(one, float) and _far(one, two, limit):
                self._fail(
                    abs(one - two) / max(abs(one), abs(two)),
                    f"{made.name} gets another {where}: {two:.6g} in place of {one:.6g}",
                )
        names = {id(param): param for param in self._params}
        keys = list({*was.gradients, *made.gradients})
        order = {key: i for i, key in enumerate(keys)}
        self._compare_gradients(
            {order[k]: g for k, g in was.gradients.items()},
            {order[k]: g for k, g in made.gradients.items()},
            self._runs[self._now],
            lambda i: self.name_of(names[keys[i]]) if keys[i] in names else "a parameter",
            f" at {made.name}",
        )

    def draw(self) -> None:
        """Before a run that is to have other random numbers: it goes back as all else does."""
        torch.rand(7)
        if torch.cuda.is_available():
            torch.rand(7, device="cuda")

    def chance(self) -> None:
        """How much of a result is chance: the whole beside itself with other numbers."""
        whole, other = self._runs["whole"], self._runs["whole by chance"]
        self.noise = True
        for i in {*whole.gradients, *other.gradients}:
            one, two = whole.gradients.get(i), other.gradients.get(i)
            size = max([_norm(g) for g in (one, two) if g is not None], default=0.0)
            gap = _apart(one, two) if one is not None and two is not None else size
            if size > 0.0 and math.isfinite(gap):
                self._chance = max(self._chance, gap / size)
        for one_, two_ in zip(whole.losses[:1], other.losses[:1], strict=False):
            for a, b in zip(one_, two_, strict=False):
                if a != b:
                    self._chance = max(self._chance, _FARTHER * abs(a - b) / max(abs(a), abs(b)))

    def _compare_losses(self, whole: _Run, made: _Run) -> None:
        """Where chance hides what gradients are: the losses, coarsely."""
        limit = max(_NOISE, self._chance)
        for at, value in enumerate(whole.losses[0] if whole.losses else []):
            parts = [each[at] if at < len(each) else math.nan for each in made.losses]
            total = sum(w * v for w, v in zip(made.weights, parts, strict=False))
            scale = max(abs(value), abs(total))
            if math.isfinite(total) and abs(value - total) > limit * scale:
                self._fail(
                    abs(value - total) / scale,
                    f"the loss of a backward() is {total:.6g} in place of {value:.6g}",
                )

    def _result_limit(self, value: Any) -> float:
        if self.noise:
            return _NOISE
        if isinstance(value, torch.Tensor) and value.dtype not in _VALUE:
            return 0.0
        exact = isinstance(value, float) and self._loss_limit == _EXACT
        return _VALUE[torch.float64 if exact else getattr(value, "dtype", torch.float32)]

    def _compare_results(self, whole: _Run, made: _Run) -> None:
        again = self._runs.get("whole by chance" if self.noise else "whole again")
        for place, one in whole.results.items():
            two = made.results.get(place)
            if two is None or not isinstance(one, (torch.Tensor, bool, int, float)):
                continue
            gap, limit = _gap(one, two), self._result_limit(one)
            if gap <= limit:
                continue
            chance = 0.0 if again is None else _gap(one, again.results.get(place))
            if chance > limit and (gap < math.inf or chance == math.inf):
                continue  # a time, say: the whole step does not give it twice
            self.volatile = self.volatile and again is None
            what = _shown(two, one) if gap < math.inf else _shapes(two, one)
            self._fail(gap, f"{place} of the joined parts is {what}")

    def _compare_unjoined(self, whole: _Run, made: _Run) -> None:
        """Parts of one row that could not be joined: what has no rows must be one value."""
        for place, one in whole.results.items():
            parts = [each.get(place) for each in made.each]
            if not isinstance(one, torch.Tensor) or one.ndim == 0:
                continue
            if any(not isinstance(p, torch.Tensor) or p.shape != one.shape for p in parts):
                continue
            if any(_gap(one, part) > self._result_limit(one) for part in parts):
                self._fail(1.0, f"{place} of two parts cannot be joined: neither has rows")

    def _shapes(self) -> None:
        """Where results are joined wrongly, by what they are, not by their values."""
        whole, made = self._runs["whole"], self._runs["parts"]
        for place, one in whole.results.items():
            two = made.results.get(place, one)
            if isinstance(one, torch.Tensor) and one.shape != getattr(two, "shape", None):
                self._fail(math.inf, f"{place} of the joined parts is {_shapes(two, one)}")
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
                f"the step makes {len(made.updates)} updates in place of {len(whole.updates)}",
            )
        if self.noise:
            self._compare_losses(whole, made)
        self.volatile = self._worst[0] == 0.0
        if self._worst[0] == 0.0:
            self._compare_results(whole, made)
            if self.unjoined and not made.results and len(made.each) == 2:
                self._compare_unjoined(whole, made)
        size, text = self._worst
        self._worst = (0.0, "")
        return text if size else None

    def advice(self, rules: list[Weigher], is_sum: bool) -> str:
        """What to do about the last verdict that was not None.

        Args:
            rules: weights that would make the parts the whole.
            is_sum: whether micro-batches weigh 1 now.
        """
        kinds = [rule.kind for rule in rules if rule.kind != ("sum" if is_sum else "rows")]
        if "rows" in kinds:
            return 'the loss is a mean over samples: pass reduction="mean" to auto_batch'
        if "sum" in kinds:
            return 'the loss is a sum over samples: pass reduction="sum" to auto_batch'
        if kinds and rules[-1].kind not in ("rows", "sum"):
            return f"the loss is a {rules[-1].text}: pass weight= to auto_batch"
        return (
            "a loss that couples the samples of a batch (pairs, contrastive losses, in-batch "
            "negatives, statistics of the batch) cannot be split exactly; for a mean over "
            "something other than rows (tokens, classes) pass weight= to auto_batch, for a result "
            'that is joined wrongly join=; verify="warn" splits it all the same'
        )

    def proven(self, whole: int, first: int, second: int) -> str:
        """The line that says so."""
        how = "; compared coarsely, since random numbers are drawn" if self.noise else ""
        return (
            f"proved the split of {self.label}: {whole} rows and the same rows as {first} and "
            f"{second} give the same gradients and results{how}"
        )

    # --- searching a weight ---

    def search(self, leaves: Leaves, cut: Cut) -> list[Weigher]:
        """Weights that make the gradients of two parts the gradient of both, most likely first.

        Args:
            leaves: tensors of the batch: number, name, tensor, whether it is sliced.
            cut: start and length of the two parts.
        """
        whole, one, two = (self._runs[run].raw for run in ("raw", "one", "two"))
        inner = _Products()
        for i in {*whole, *one, *two}:
            inner.add(*(run.get(i) for run in (whole, one, two)))
        found = []
        for weigher in candidates(leaves, self.modules()):
            weights = weigher.shares(cut)
            if (
                weights is not None
                and inner.residual(*weights) <= max(self._limit, _SQUARED)
                and _left(whole, one, two, *weights) <= self._limit
            ):
                found.append(weigher)
        return found

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
        if verdict[0] is not False and self._worst[0]:
            leaves, verdict = None, (False, self._worst[1])
        self._worst = (0.0, "")
        rules = []
        for rule in candidates(leaves, self.modules()) if leaves and not moved else ():
            shares = None if verdict[0] else rule.shares(cut)
            if shares is not None and losses.fits(*shares):
                rules.append(rule)
        return (*verdict, rules)

    def confirm(
        self,
        leaves: Leaves,
        rule: Weigher,
        start: int,
        length: int,
        first: int,
        slices: Cut,
        unit: tuple[int, int],
    ) -> tuple[int, int, int] | None:
        """Another place to try weights at: start, length and first part. None where they
        cannot be told from rows there.

        Args:
            rule: the weights.
            start, length, first: where they were found.
            slices: the micro-batches of the call.
            unit: see `cuts`.
        """
        rows = Weigher("rows")
        best = None
        for at, size, part in [*cuts([(start, length), *slices], unit), *pairs(slices)]:
            cut = [(at, part), (at + part, size - part)]
            mine, plain = rule.shares(cut), rows.shares(cut)
            told = mine is not None and plain is not None and abs(mine[0] - plain[0]) >= TOLD
            if rule.kind != "rows" and not told:
                continue
            if best is not None and size > max(length, *(each for _, each in slices)):
                break  # two micro-batches need not fit
            if at != start:
                return at, size, part
            if (size, part) != (length, first):
                best = best or (at, size, part)
        return best or ((start, length, first) if rule.kind in ("rows", "sum") else None)

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
        for key, gap in undecided(weighers, passed, used, self.tried).items():
            self.tried[key] = math.inf if gap >= _SURE * self._limit and not self.noise else gap
        before = [(start, length)] if first > 0 else []
        return decisive(weighers, slices, used, self.tried, unit, before)

    @staticmethod
    def unsettled(
        roots: list[Any] | None,
        leaves: Leaves,
        rule: Weigher | None,
        tried: Tried,
        slices: Cut,
        unit: tuple[int, int],
    ) -> bool:
        """Whether weights that no proof has decided make a difference to a call, and can be
        told from those in use there: a mask that was the same in every row so far.

        Args:
            roots: see `Proof`.
            leaves, rule, slices, unit: see `told_apart`.
            tried: what the proofs so far have learnt.
        """
        used = (rule or Weigher("rows")).of(leaves)
        weighers = list(candidates(leaves, _modules_of(_alive(roots)), tried))
        return decisive(weighers, slices, used, tried, unit) is not None


def _left(
    whole: dict[int, torch.Tensor],
    one: dict[int, torch.Tensor],
    two: dict[int, torch.Tensor],
    a: float,
    b: float,
) -> float:
    """The norm of whole - a first - b second, relative to the whole's."""
    left = size = 0.0
    for i in {*whole, *one, *two}:
        terms = ((1.0, whole.get(i)), (-a, one.get(i)), (-b, two.get(i)))
        flat = [by * _dense(g).double().reshape(-1) for by, g in terms if g is not None]
        left += _norm(sum(flat[1:], flat[0])) ** 2
        size += _norm(whole[i]) ** 2 if i in whole else 0.0
    return math.sqrt(left / size) if size > 0.0 else math.inf


class _Products:
    """Inner products of three sets of gradients, summed over all tensors."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums = [0.0] * 6  # ww, w1, w2, 11, 12, 22

    def add(self, *three: torch.Tensor | None) -> None:
        present = [_dense(t).double() for t in three if t is not None]
        if not present:
            return
        zero = torch.zeros_like(present[0])
        flat = [(zero if t is None else _dense(t).double()).reshape(-1) for t in three]
        at = 0
        for i in range(3):
            for j in range(i, 3):
                self.sums[at] += float(torch.dot(flat[i], flat[j]))
                at += 1

    def residual(self, a: float, b: float) -> float:
        """As _left(), at once, but for rounding."""
        ww, w1, w2, o, mixed, t = self.sums
        square = ww - 2 * a * w1 - 2 * b * w2 + a * a * o + 2 * a * b * mixed + b * b * t
        if not ww > 0.0 or not math.isfinite(square):
            return math.inf
        return math.sqrt(max(0.0, square) / ww)
