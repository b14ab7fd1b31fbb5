"""Log-probabilities of generated text that GRPO and RLOO compute without gradients.

They are made while a batch is prepared, outside of the loss: by the model as it was when it
generated, and by a reference.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _C
from . import names
from .books import Books, family
from .calls import _ONLINE, Call, _function, own

__all__ = ["Scores", "are_made_by"]

_NAME = "_get_per_token_logps_and_entropies"
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_SETTINGS = ("model", "logits_to_keep", "batch_size", "compute_entropy")


def are_made_by(trainer: Any) -> bool:
    """Whether a trainer computes them by a method of TRL's own: whose rows are independent."""
    return family(trainer) in _ONLINE and own(trainer, _NAME).__module__.startswith("trl.trainer.")


def _scores(site: Scores, trainer: Any, model: Any, inputs: Any, more: Any = None) -> Any:
    return site.method(trainer, model, **inputs, **more)


class Scores(Call):
    """Stands in a trainer's dictionary in place of the method that computes them.

    Args:
        trainer: of TRL; held weakly.
        books: of the trainer.
        options: of `auto_batch`.
        evaluation: whether they are protected in evaluation, too.
        begin: called with the trainer when a training has begun.
    """

    def __init__(
        self,
        trainer: Any,
        books: Books,
        options: Mapping[str, Any],
        evaluation: bool,
        begin: Callable[[Any], None],
    ) -> None:
        super().__init__(trainer, _NAME, books, options, evaluation, begin)
        self._signature = inspect.signature(self.method)

    def _renew(self, trainer: Any) -> None:
        super()._renew(trainer)
        self._others: Any = weakref.WeakKeyDictionary()  # steps of references

    def _make(self, name: str, evaluates: bool) -> Any:
        options = {**self._options, "batch": "inputs"}
        return _C.auto_batch(_function(self._owner(), name, _scores), **options)

    def _step_of(self, model: Any) -> Any:
        """What is proven of one model is not of another."""
        if self._model is None or self._model() is model:
            return self.step
        if model not in self._others:
            self._others[model] = self._make(self._name, evaluates=True)
        return self._others[model]

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self._owner()
        if trainer.state is not self.seen:
            self._begin(trainer)
        parts = None
        if not torch.is_grad_enabled() and (self._evaluation or trainer.model.training):
            parts = self._parts(trainer, model, *args, **kwargs)
        if parts is None:
            return self.method(trainer, model, *args, **kwargs)
        inputs, more = parts
        return self._step_of(model)(self, trainer, model, inputs, more=more)

    def _parts(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What has a row for each text, and settings; None where there is anything else."""
        try:
            given = dict(list(self._signature.bind(*args, **kwargs).arguments.items())[1:])
        except TypeError:
            return None
        del given["model"]
        inputs = {name: given.pop(name) for name in _ROWS if given.get(name) is not None}
        other = [v for name, v in given.items() if name not in _SETTINGS]
        if any(value is not None and value is not False for value in other):
            return None  # pictures, whose number is another for each row; losses of routers
        lengths = {len(v) if isinstance(v, torch.Tensor) and v.ndim else 0 for v in inputs.values()}
        return (inputs, given) if len(lengths) == 1 and 0 not in lengths else None

    # --- for oomkit.transformers ---

    @property
    def records(self) -> tuple[_C.StepRecord, ...]:
        of_others = [record for step in self._others.values() for record in step.records]
        return tuple(sorted((*super().records, *of_others), key=lambda record: record.started))

    def check(self, trainer: Any) -> None:
        """ImportError where TRL's method does not take what is cut."""
        for name in ("model", "input_ids", "attention_mask"):
            if name not in self._signature.parameters:
                raise names.missing("trl", f"{self._family}.{_NAME}({name})")
