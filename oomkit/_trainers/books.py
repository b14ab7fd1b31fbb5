"""What a trainer notes of each call: numbers and lists of metrics, as one call leaves them."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .lines import Line, collected, joined
from .plain_state import PlainState

__all__ = ["Books", "completion_tokens", "family"]

_LOG = logging.getLogger("oomkit")

_FAMILIES = (
    "SFTTrainer",
    "DPOTrainer",
    "RewardTrainer",
    "KTOTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
)

# What metrics are means over, by trainer; those of rows need no line, but all that are known.
_CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
_TOKENS = {"entropy": "tokens"}
_MEANS: dict[str, dict[str, str]] = {
    "SFTTrainer": {**_TOKENS, "mean_token_accuracy": "tokens"},
    "DPOTrainer": {
        **_TOKENS,
        "mean_token_accuracy": "chosen tokens",
        "logits/chosen": "chosen tokens",
        "logits/rejected": "rejected tokens",
    },
    "RewardTrainer": {},
    "KTOTrainer": {
        **_TOKENS,
        "logits/chosen": "chosen tokens",
        "logits/rejected": "rejected tokens",
        "rewards/chosen": "chosen rows",
        "logps/chosen": "chosen rows",
        "rewards/rejected": "rejected rows",
        "logps/rejected": "rejected rows",
    },
    "GRPOTrainer": {
        **_TOKENS,
        "kl": "tokens",
        "cispo_clip_ratio": "tokens",
        **dict.fromkeys(_CLIPPED, "tokens"),
    },
    "RLOOTrainer": _TOKENS,
}
_OF_ROWS = frozenset(
    (
        "rewards/chosen rewards/rejected rewards/accuracies rewards/margins logps/chosen "
        "logps/rejected mean_reward accuracy margin kl vespo/phi_seq_mean policy_loss entropy_coef "
        + " ".join(_CLIPPED)
    ).split()
)
_TOTAL, _NUMBER = "num_tokens", "_total_train_tokens"  # the metric shows the trainer's number
_LISTS = ("_metrics", "_stored_metrics")
_MARGINS = "rewards/margins"  # of KTO: the difference of two means


def family(trainer: Any) -> str | None:
    """The name of TRL's class that a trainer is of, or None."""
    for each in type(trainer).__mro__:
        if each.__name__ in _FAMILIES and each.__module__.startswith("trl."):
            return each.__name__
    return None


def _extreme(name: str) -> Callable[[list[float]], float] | None:
    words = name.replace("/", "_").split("_")
    return min if "min" in words else max if "max" in words else None


def _count(mask: Any) -> float:
    return float(mask.sum())


def completion_tokens(inputs: Mapping[str, Any]) -> float:
    """Tokens of generated text that count."""
    mask = inputs["completion_mask"]
    return _count(mask * inputs["tool_mask"] if "tool_mask" in inputs else mask)


def _measures(kind: str | None, inputs: Any) -> dict[str, float]:
    """How many of each kind a part of the batch has; an own collator's may be no dictionary."""
    values: Any = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    values = inputs.values() if isinstance(inputs, Mapping) else values
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.ndim), None)
    rows = 1 if first is None else len(first)
    found = {"rows": float(rows)}
    if kind == "SFTTrainer" and "labels" in inputs:
        found["tokens"] = _count(inputs["labels"][:, 1:] != -100)
    elif kind in ("GRPOTrainer", "RLOOTrainer"):
        found["tokens"] = completion_tokens(inputs)
    elif kind in ("DPOTrainer", "KTOTrainer"):
        mask = inputs["completion_mask"][:, 1:]
        if kind == "DPOTrainer":
            good = torch.arange(rows, device=mask.device) < rows // 2
        else:
            good = torch.as_tensor(inputs["label"], dtype=torch.bool, device=mask.device)
        found |= {"tokens": _count(mask), "chosen rows": _count(good)}
        found |= {"chosen tokens": _count(mask[good]), "rejected tokens": _count(mask[~good])}
        found["rejected rows"] = rows - found["chosen rows"]
    return found


class _Part(NamedTuple):
    """What one micro-batch has noted: entries by mode and name, tokens, lines of the log.

    The inputs are its own.
    """

    inputs: Any
    entries: dict[tuple[str, str], list[Any]]
    tokens: int
    lines: list[Line]


def _entries(
    metrics: dict[str, dict[str, list[Any]]],
) -> list[tuple[tuple[str, str], list[Any]]]:
    return [((m, n), values) for m, named in metrics.items() for n, values in named.items()]


class Books:
    """Rolled back with an attempt; of a split call one entry of each metric is left.

    Args:
        trainer: whose books these are; held weakly.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self._family = family(trainer)
        self._parts: list[_Part] = []
        self._said: set[str] = set()

    def _metrics(self) -> dict[str, dict[str, list[Any]]]:
        """Lists of values by mode and name, as all of TRL's trainers have them."""
        for name in _LISTS:
            metrics = getattr(self._trainer(), name, None)
            if isinstance(metrics, dict) and all(isinstance(e, dict) for e in metrics.values()):
                return metrics
        return {}

    # --- a participant of the step ---

    def save(self) -> tuple[PlainState, int]:
        """What restore() puts back."""
        return PlainState(self._trainer()), len(self._parts)

    def restore(self, saved: tuple[PlainState, int]) -> None:
        """Everything as it was when `saved` was made; the same lists."""
        state, parts = saved
        state.restore(self._trainer())
        del self._parts[parts:]

    # --- around calls that are made again ---

    def all(self) -> tuple[PlainState, list[_Part]]:
        """What back_to() puts back, with what has been noted."""
        return PlainState(self._trainer()), list(self._parts)

    def back_to(self, saved: tuple[PlainState, list[_Part]]) -> None:
        """Everything as it was when `saved` was made."""
        state, self._parts = saved[0], list(saved[1])
        state.restore(self._trainer())

    # --- around each micro-batch, and around the call ---

    def note(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """run(), with what it adds to the metrics noted as one part's.

        Args:
            inputs: rows of the part.
            run: the trainer's own method.
        """
        metrics, trainer = self._metrics(), self._trainer()
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)  # the method may take labels out
        tokens = getattr(trainer, _NUMBER, 0)
        before = {at: len(values) for at, values in _entries(metrics)}
        with collected(trainer) as lines:
            result = run()
        entries = {
            at: [] if at[-1] == _TOTAL else values[before.get(at, 0) :]
            for at, values in _entries(metrics)
        }
        added = getattr(trainer, _NUMBER, 0) - tokens
        if added:
            setattr(trainer, _NUMBER, tokens)  # until the call has ended
        kept = inputs if entries or lines else {}
        self._parts.append(_Part(kept, entries, added, lines))
        return result

    def begin(self) -> None:
        """Nothing noted yet."""
        self._parts.clear()

    def end(self, result: Any = None) -> None:
        """One entry of each metric, and one line of the log, for all parts of the call.

        Args:
            result: of the call.
        """
        parts, self._parts = self._parts, []
        trainer: Any = self._trainer()
        metrics, added = self._metrics(), sum(part.tokens for part in parts)
        if added:
            setattr(trainer, _NUMBER, getattr(trainer, _NUMBER) + added)
            if "train" in metrics:
                metrics["train"][_TOTAL] = [getattr(trainer, _NUMBER)]
        measures: list[dict[str, float]] = []
        if len(parts) > 1:
            measures += [_measures(self._family, part.inputs) for part in parts]
            self._fold(metrics, parts, measures)
        scale = getattr(trainer, "current_gradient_accumulation_steps", 1)
        lines = joined(
            [part.lines for part in parts],
            lambda name, given: self._folded(name, given, measures),
            result,
            scale,
        )
        for line in lines:
            trainer.log(line.logs, *line.args, **line.kwargs)

    def _fold(
        self,
        metrics: dict[str, dict[str, list[Any]]],
        parts: list[_Part],
        measures: list[dict[str, float]],
    ) -> None:
        """One entry of each metric."""
        for mode, name in dict.fromkeys(key for part in parts for key in part.entries):
            given = [part.entries.get((mode, name), []) for part in parts]
            count = sum(map(len, given))
            if count:
                values = metrics[mode][name]
                values[len(values) - count :] = self._folded(name, given, measures)
        if self._family == "KTOTrainer":
            self._margins(parts)

    def _folded(
        self, name: str, given: list[list[Any]], measures: list[dict[str, float]]
    ) -> list[Any]:
        """One value for each that a part has noted."""
        measure = self._measure(name)
        made = []
        for at in range(max(map(len, given))):
            there = [
                (values[at], counts.get(measure, counts["rows"]))
                for values, counts in zip(given, measures, strict=True)
                if len(values) > at and not math.isnan(values[at])
            ]
            extreme, total = _extreme(name), sum(count for _, count in there)
            if extreme is not None and there:
                made.append(extreme([value for value, _ in there]))
            elif total > 0:
                made.append(sum(value * count for value, count in there) / total)
            else:
                made.append(next((values[at] for values in given if len(values) > at), math.nan))
        return made

    def _measure(self, name: str) -> str:
        trainer = self._trainer()
        measure = _MEANS.get(self._family or "", {}).get(name)
        sequences = getattr(trainer, "importance_sampling_level", "token") == "sequence"
        if name == "policy_loss" and getattr(trainer, "loss_type", None) == "bnpo":
            return "tokens"
        if measure is not None:
            return "rows" if sequences and "clip_ratio" in name else measure
        if name not in _OF_ROWS and _extreme(name) is None and name not in self._said:
            self._said.add(name)
            _LOG.info("the metric %s of a split call is a mean over its rows", name)
        return "rows"

    def _margins(self, parts: list[_Part]) -> None:
        """A difference of two means is not the mean of differences."""
        for mode, named in self._metrics().items():
            noted = {
                name
                for part in parts
                for (where, name), values in part.entries.items()
                if where == mode and values
            }
            if {"rewards/chosen", "rewards/rejected"} <= noted:
                margin = named["rewards/chosen"][-1] - named["rewards/rejected"][-1]
                named[_MARGINS][-1 if _MARGINS in noted else len(named[_MARGINS]) :] = [margin]
