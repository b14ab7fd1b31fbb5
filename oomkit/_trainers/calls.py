"""The protected methods of one trainer, each in place of the trainer's own."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _C, sizes
from .books import Books, completion_tokens, family
from .placed import Placed, placed_in
from .rows import Pairs, Whole, shapes, together, whole_because
from .window import Window

__all__ = ["Call", "calls_of", "copied", "own"]

_PAIRED = ("DPOTrainer", "RewardTrainer")
_ONLINE = ("GRPOTrainer", "RLOOTrainer")
_KEPT = 1024  # records of earlier models
_SILENT = 3  # split calls in a row whose loss is not finite, so that it proves nothing
_SUMS = ("cispo", "dapo", "vespo")  # of GRPO: divided by the tokens of the whole window


def own(trainer: Any, name: str) -> Callable[..., Any]:
    """A trainer's method as it is without oomkit, to be called with the trainer first.

    Args:
        trainer: of transformers.
        name: of the method.
    """
    there = vars(trainer).get(name)
    if isinstance(there, Placed):
        return there.method
    if there is not None:
        return lambda _trainer, *args, **kwargs: there(*args, **kwargs)
    found: Callable[..., Any] = getattr(type(trainer), name)
    return found


def copied(inputs: Any) -> Any:
    """A batch of the same tensors, of which a method may take something out."""
    made = getattr(inputs, "copy", None) if isinstance(inputs, (Mapping, list)) else None
    return inputs if made is None else made()


def _cancels(trainer: Any, family: str | None, method: Any, name: str) -> bool:
    """Whether an evaluated loss is TRL's own of advantages, whose mean is 0: rounding alone is left
    of it, which no comparison tells from another loss. How it is joined stands in a table.

    What somebody has put around the method since is no part of it.
    """
    inner = ("_compute_loss",) if name == "evaluated_loss" else ("compute_loss", "_compute_loss")
    there = [method, *(own(trainer, each) for each in inner if hasattr(trainer, each))]
    return family in _ONLINE and all(f.__module__.startswith("trl.trainer.") for f in there)


# The steps. Each trainer gets functions with a code of their own (`_function`), for sizes are
# kept by code; what takes part is found in their arguments.


def _training_step(
    site: Call,
    trainer: Any,
    model: Any,
    inputs: Any,
    num_items_in_batch: Any = None,
    more: Any = None,
) -> Any:
    return site.run(trainer, model, inputs, more, num_items_in_batch)


def _compute_loss(
    site: Call,
    trainer: Any,
    model: Any,
    inputs: Any,
    num_items_in_batch: Any = None,
    more: Any = None,
) -> Any:
    if num_items_in_batch is not None:
        more = {**more, "num_items_in_batch": num_items_in_batch}
    return site.run(trainer, model, inputs, more)


def _evaluated_loss(site: Call, trainer: Any, model: Any, inputs: Any, more: Any = None) -> Any:
    return site.run(trainer, model, inputs, more)


def _prediction_step(site: Call, trainer: Any, model: Any, inputs: Any, more: Any = None) -> Any:
    return site.run(trainer, model, inputs, more)


_STEPS: dict[str, Callable[..., Any]] = {
    "training_step": _training_step,
    "compute_loss": _compute_loss,
    "prediction_step": _prediction_step,
    "evaluated_loss": _evaluated_loss,
}


def _function(trainer: Any, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose code says what it calls: the sizes of one trainer are not those of another.

    Args:
        trainer: protected.
        name: of the method.
        step: that is copied.
    """
    called = [type(trainer), type(trainer.model), getattr(trainer, "loss_type", None), name]
    for each in ("training_step", "compute_loss", "prediction_step", "compute_loss_func"):
        code = sizes._code_of(getattr(trainer, each, None))
        called.append(None if code is None else sizes._digest(code))
    code = _code(step.__code__, str(called))
    return types.FunctionType(code, globals(), step.__name__, step.__defaults__)


@functools.lru_cache(maxsize=64)
def _code(code: types.CodeType, called: str) -> types.CodeType:
    return code.replace(co_consts=(*code.co_consts, called))


def _labels(trainer: Any, inputs: Any) -> float:
    """What the loss of an evaluated part is a mean over: labels that count, or rows."""
    if isinstance(inputs, Pairs):
        return float(inputs.rows)
    names = getattr(trainer, "label_names", None) or ["labels"]
    labels = inputs.get("shift_labels", inputs.get(names[0]))
    integers = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    if integers and labels.ndim:
        shifts = getattr(trainer, "_loss_shifts_labels", False) or family(trainer) == "SFTTrainer"
        if shifts and labels.ndim > 1 and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        config = getattr(trainer.model, "config", None)
        ignored = getattr(config, "semantic_loss_ignore_index", None)
        counts = labels != -100
        return float((counts if ignored is None else counts & (labels != ignored)).sum())
    first = next(v for v in inputs.values() if isinstance(v, torch.Tensor) and v.ndim)
    return float(len(first))


class Call(Placed):
    """Stands in a trainer's dictionary in place of one of its methods.

    Args:
        trainer: held weakly.
        name: of the method.
        books: of the trainer.
        options: of `auto_batch`.
        evaluation: whether a `compute_loss` without gradients is protected, too.
        begin: called with the trainer when a training has begun.
    """

    def __init__(
        self,
        trainer: Any,
        name: str,
        books: Books,
        options: Mapping[str, Any],
        evaluation: bool,
        begin: Callable[[Any], None],
    ) -> None:
        super().__init__(trainer, name)
        self._family = family(trainer)
        self._paired = self._family in _PAIRED
        self._evaluation = evaluation
        self.method = own(trainer, name)
        self.books = books
        given = options.get("participants", ())
        given = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        self._options = {
            "label": f"{type(trainer).__name__}.{name}",
            "verify": None,
            **options,
            "participants": (*given, books),
            "static": ("more",),
        }
        self._begin = begin
        self.window = Window(trainer, books) if self._makes_again(trainer, given) else None
        if self.window is not None:
            self._options["_window"] = self.window
        self.seen: Any = None  # the trainer's state of this training
        self._runs = self._silent = 0  # of the trainer's method in a call; see _SILENT
        self._past: tuple[_C.StepRecord, ...] = ()
        self._renew(trainer)

    def _makes_again(self, trainer: Any, given: tuple[Any, ...]) -> bool:
        """Whether gradients of earlier calls are made again where they cannot go back.

        Args:
            trainer: of one process; of several one alone cannot make calls of all again.
            given: the user's own participants, which could not be put back to those calls.
        """
        copies = self._options.get("gradient_safety", "auto") == "copy"
        streams = self._options.get("rng", "torch") != "none"
        learns = self._name in ("training_step", "compute_loss")
        return learns and streams and not copies and not given and trainer.args.world_size < 2

    def _renew(self, trainer: Any) -> None:
        """Steps of which nothing is known."""
        self._model = None if trainer.model is None else weakref.ref(trainer.model)
        self.step = self._make(self._name, evaluates=self._name == "prediction_step")
        self._evaluated: Any = None
        self._whole: Any = None
        self._shown = False  # a split call's loss was finite

    def begins(self, trainer: Any) -> None:
        """A training begins: of another model nothing is proven, though sizes may be the same."""
        self.seen = trainer.state
        if self.window is not None:
            self.window.close()
        if self._model is not None and self._model() is trainer.model:
            return
        known = self.sizes()
        self._past = self.records[-_KEPT:]
        self._renew(trainer)
        self.load_sizes(known)

    def _make(self, name: str, evaluates: bool) -> Any:
        options = {**self._options, "batch": "inputs"}
        trainer = self._owner
        function = _function(trainer(), name, _STEPS[name])
        kind = getattr(trainer(), "loss_type", None)
        if evaluates and self._options["verify"] in (None, "warn"):
            if _cancels(trainer(), self._family, self.method, name):
                options["verify"] = False
        if self._family == "GRPOTrainer" and kind == "bnpo":
            options["weight"] = completion_tokens
        elif self._family in _ONLINE:
            options["reduction"] = "sum" if kind in _SUMS else "mean"
        elif evaluates:  # there are no gradients, from which weights could be found
            options["weight"] = lambda inputs: _labels(trainer(), inputs)
        return _C.auto_batch(function, **options)

    def run(
        self, trainer: Any, model: Any, inputs: Any, more: Mapping[str, Any], *items: Any
    ) -> Any:
        """One micro-batch, or the whole batch, by the trainer's own method."""
        self._runs += 1
        part = dict(inputs.inputs) if isinstance(inputs, (Pairs, Whole)) else inputs
        result = self.books.note(part, lambda: self.method(trainer, model, part, *items, **more))
        if isinstance(inputs, Pairs) and self._name == "prediction_step":
            return together(result, inputs.rows)
        return result

    # --- what the loop calls ---

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self._owner()
        if trainer.state is not self.seen:
            self._begin(trainer)
        names = _POSITIONAL[self._name]
        more = {**dict(zip(names, args, strict=False)), **kwargs}
        paired = self._paired and "input_ids" in inputs
        because = whole_because(inputs, paired)
        arguments: dict[str, Any] = {}
        if "num_items_in_batch" in more:
            arguments["num_items_in_batch"] = more.pop("num_items_in_batch")
        step = self.step
        if self._name == "compute_loss" and not torch.is_grad_enabled():
            if not self._evaluation:
                return self.method(trainer, model, inputs, **more, **arguments)
            if self._evaluated is None:
                self._evaluated = self._make("evaluated_loss", evaluates=True)
            step = self._evaluated
            more, arguments = {**more, **arguments}, {}
        if self.window is not None and self.window.making:  # by a step that is run again
            part = Whole(inputs) if because else Pairs(inputs) if paired else inputs
            again = self._whole if because else step
            return again(self, trainer, model, part, more=more, **arguments)
        if because is not None:
            return self._in_one(trainer, because, model, inputs, {"more": more, **arguments})
        if paired:
            inputs = Pairs(inputs)
        self.books.begin()
        self._runs = 0
        result = self._call(step, trainer, model, inputs, {"more": more, **arguments})
        self.books.end(result)
        if self._runs > 1 and step is self.step and self.is_training:
            self._count_silent(result)
        return together(result, -1) if paired else result

    def _call(self, step: Any, trainer: Any, model: Any, inputs: Any, named: dict[str, Any]) -> Any:
        """The protected step, kept in the window while that is not closed."""
        window = self.window if step is not self._evaluated else None
        if window is None:
            return step(self, trainer, model, inputs, **named)
        kept = copied(inputs)

        def again() -> Any:
            return step(self, trainer, model, copied(kept), **named)

        if self._name == "training_step":
            window.begin(again)
        else:
            window.begin_inside(kept)
        try:
            result = step(self, trainer, model, inputs, **named)
        except BaseException:
            window.close()
            raise
        if self._name == "training_step":
            window.end(result)
        return result

    def _count_silent(self, result: Any) -> None:
        """SplitError or a warning where losses of several split calls could prove nothing.

        A scaler that begins too high is none of them: gradients overflow, the loss does not.
        """
        loss, verify = result[0] if isinstance(result, tuple) else result, self._options["verify"]
        silent = isinstance(loss, torch.Tensor) and not bool(loss.isfinite().all())
        self._shown |= not silent
        if verify is False or self._shown:
            return  # a call with a loss that is a number was proven, or refused
        self._silent += 1
        if self._silent % _SILENT:
            return
        text = (
            f"auto_batch cannot split {self._options['label']} exactly: its loss was "
            f"{loss.mean():.4g} in {_SILENT} split calls in a row, so that nothing could be "
            'proven; look for the cause in a run without oomkit, or pass inexact="warn" to '
            "protect()"
            f"{_C.see('split-not-exact')}"
        )
        if verify != "warn":
            raise _C.SplitError(text)
        warnings.warn(text, _C.OomkitWarning, stacklevel=3)

    def _in_one(
        self, trainer: Any, because: str, model: Any, inputs: Any, named: dict[str, Any]
    ) -> Any:
        """A batch that has no rows to cut."""
        if self._whole is None:
            options = {**self._options, "batch": "inputs"}
            function = _function(trainer, self._name, _STEPS[self._name])
            self._whole = _C.auto_batch(function, **options)
        self.books.begin()
        try:
            result = self._call(self._whole, trainer, model, Whole(inputs), named)
        except _C.OutOfMemory as error:
            text = f"{error.args[0]}\nThe batch was kept whole, for {because}: {shapes(inputs)}"
            error.args = (text,)
            raise
        self.books.end(result)
        return result

    # --- for oomkit.transformers ---

    @property
    def name(self) -> str:
        """Of the method."""
        return self._name

    @property
    def is_training(self) -> bool:
        return self._name != "prediction_step"

    @property
    def records(self) -> tuple[_C.StepRecord, ...]:
        steps = (self.step, self._evaluated, self._whole)
        now = (record for step in steps if step is not None for record in step.records)
        return (*self._past, *now)

    def check(self, trainer: Any) -> None:
        """TypeError where the trainer's method cannot be called as transformers calls it."""
        names = {"training_step": 3, "compute_loss": 2, "prediction_step": 3}
        try:
            signature = inspect.signature(getattr(type(trainer), self._name))
            signature.bind(trainer, *range(names[self._name]))
        except TypeError:
            raise TypeError(
                f"protect() expected {type(trainer).__name__}.{self._name} to take what "
                f"transformers calls it with ({_TAKES[self._name]}), got "
                f"{self._name}{signature}"
                f"{_C.see('trainers')}"
            ) from None

    def sizes(self) -> dict[str, Any]:
        """What fits, as plain values."""
        state: dict[str, Any] = self.step.state_dict()
        return state

    def load_sizes(self, sizes: dict[str, Any]) -> None:
        self.step.load_state_dict(sizes)


_POSITIONAL = {
    "training_step": ("num_items_in_batch",),
    "compute_loss": ("return_outputs", "num_items_in_batch"),
    "prediction_step": ("prediction_loss_only", "ignore_keys"),
}
_TAKES = {
    "training_step": "model, inputs, num_items_in_batch",
    "compute_loss": "model, inputs",
    "prediction_step": "model, inputs, prediction_loss_only",
}


def calls_of(trainer: Any) -> list[Call]:
    """The protected methods of a trainer; a copy of a trainer has none."""
    return [each for each in placed_in(trainer) if isinstance(each, Call)]
