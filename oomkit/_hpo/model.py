"""Predicting the peak of a trial from those of the trials before it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _C
from ..memory import _host_bytes, _parse_budget, memory
from . import study as _hpo_study
from . import values as _hpo_values

log = logging.getLogger("oomkit")

_LENGTHS = frozenset(
    (
        *("max_length", "length", "seq_len", "seq_length", "sequence_length", "block_size"),
        *("max_seq_len", "max_seq_length", "context_length"),
    )
)
_CLOSEST = 0.02  # predictions are never trusted to less than that
_RECENT = 20

Config = Mapping[str, Any]


@functools.cache
def hopeless_trial() -> type[BaseException]:
    """The TrialPruned by which a check inside an objective ends it."""

    class HopelessTrial(_hpo_study.real_optuna().TrialPruned):  # type: ignore[misc]
        hopeless = True

    return HopelessTrial


def is_hopeless(value: object) -> bool:
    return isinstance(value, BaseException) and getattr(value, "hopeless", False)


@dataclass
class _Group:
    """What is known of one model."""

    rows: list[tuple[Config, int]] = field(default_factory=list)  # configuration, peak
    errors: list[float] = field(default_factory=list)  # predicted / peak - 1, oldest first
    fits: dict[int, list[float] | None] = field(default_factory=dict)  # by number of terms


class MemoryModel:
    """MemoryModel(law=None, *, model='model', features=None, hopeless=1.25, calibrated_after=5)

    Predicts the peak of a configuration, for each model from the recorded peaks of its trials.

    Only hopeless trials are pruned: those predicted above `hopeless` times the budget, until
    enough predictions of the same model have been compared with peaks; then above what those
    predictions were wrong by (half as much again, at least 2 %, never more than `hopeless`).
    Accumulation costs no memory that grows with it: whatever the configuration says, it is 1.

    Parameters
    ----------
    law : callable, optional
        law(config) -> bytes, an estimate to begin with. Without one the peak is fitted as a
        constant plus what grows with the batch size, the length and its square.
    model : str
        The name under which configurations have their model.
    features : callable, optional
        features(config) -> numbers >= 0 that the peak is a sum of, in place of those above.
    hopeless : float
        At least 1.
    calibrated_after : int
        Predictions that have to have been compared with peaks, for each model.
    """

    def __init__(
        self,
        law: Callable[[Config], float] | None = None,
        *,
        model: str = "model",
        features: Callable[[Config], Sequence[float]] | None = None,
        hopeless: float = 1.25,
        calibrated_after: int = 5,
    ) -> None:
        if not hopeless >= 1:
            raise ValueError(
                f"MemoryModel() expected hopeless to be at least 1, got {hopeless!r}"
                f"{_C.see('options')}"
            )
        if law is not None and features is not None:
            raise ValueError(f"MemoryModel() expected law or features, got both{_C.see('options')}")
        self._law = law
        self._key = model
        self._features = features
        self._hopeless = float(hopeless)
        self._enough = max(1, int(calibrated_after))
        self._groups: dict[str, _Group] = {}

    # --- learning ---

    def fit(self, trials: Any) -> MemoryModel:
        """Learns from finished trials, or from those of a study."""
        if hasattr(trials, "get_trials"):
            trials = trials.get_trials(deepcopy=False)
        self._groups = {}
        for trial in trials:
            peak = trial.user_attrs.get("peak_memory_bytes")
            if not peak or trial.user_attrs.get("oom") or not trial.state.is_finished():
                continue  # one that ran out of memory tells a lower bound only, none nothing
            config = _measured_config(trial)
            group = self._groups.setdefault(self._name(config), _Group())
            group.rows.append((_without_accumulation(config), peak))
            predicted = trial.user_attrs.get("memory_predicted_bytes")
            if predicted is not None and "micro_batch_size" not in trial.user_attrs:
                group.errors.append(predicted / peak - 1)
        return self

    def predict(self, config: Config) -> int | None:
        """Bytes that a configuration is predicted to need; None before enough is known."""
        name, config = self._name(config), _without_accumulation(config)
        group = self._groups.get(name, _Group())
        terms = self._terms(config)
        weights = self._weights(group, len(terms))
        if weights is None:
            return None if self._law is None else round(terms[-1])
        return round(sum(w * t for w, t in zip(weights, terms, strict=True)))

    def _name(self, config: Config) -> str:
        return str(config.get(self._key, ""))

    def _terms(self, config: Config) -> list[float]:
        if self._law is not None:
            return [1.0, float(self._law(config))]
        if self._features is not None:
            return [float(value) for value in self._features(config)]
        key = _hpo_values.batch_key(config)
        batch = float(config[key]) if key is not None and _is_number(config[key]) else 1.0
        lengths = [
            float(value)
            for name, value in config.items()
            if name.replace("/", ".").rpartition(".")[2] in _LENGTHS and _is_number(value)
        ]
        if len(lengths) != 1:
            return [1.0, batch]
        return [1.0, batch, batch * lengths[0], batch * lengths[0] ** 2]

    def _terms_of_row(self, config: Config) -> list[float] | None:
        """None for a trial that was recorded with less than the law, or features, ask for."""
        try:
            return self._terms(config)
        except KeyError as error:
            log.debug("a trial without %s tells MemoryModel nothing", error)
            return None

    def _weights(self, group: _Group, count: int) -> list[float] | None:
        """Weights of the terms, or None before there are more trials than terms."""
        if count not in group.fits:
            made = [(self._terms_of_row(config), peak) for config, peak in group.rows]
            rows = [(terms, peak) for terms, peak in made if terms and len(terms) == count]
            different = {tuple(terms) for terms, _ in rows}
            enough = len(different) > count and len(rows) >= self._enough
            group.fits[count] = _solve_nonnegative(rows, count) if enough else None
        return group.fits[count]

    # --- judging ---

    def threshold(self, config: Config) -> float:
        """Times the budget above which a prediction is hopeless."""
        errors = self._groups.get(self._name(config), _Group()).errors[-_RECENT:]
        if len(errors) < self._enough:
            return self._hopeless
        margin = max(1.5 * max(abs(error) for error in errors), _CLOSEST)
        return 1 + min(margin, self._hopeless - 1)

    def error(self, model: str = "") -> dict[str, float] | None:
        """Relative errors of the predictions for a model: count, median, largest, bias."""
        errors = self._groups.get(model, _Group()).errors
        if not errors:
            return None
        sizes = sorted(abs(error) for error in errors)
        return {
            "count": len(errors),
            "median": sizes[len(sizes) // 2],
            "largest": sizes[-1],
            "bias": sum(errors) / len(errors),
        }

    def report(self) -> str:
        """A line for each model: trials, errors of the predictions, threshold."""
        lines = []
        for name, group in sorted(self._groups.items()):
            error = self.error(name)
            told = (
                "no prediction has met its peak yet"
                if error is None
                else f"{error['count']} predictions, median error {error['median']:.1%}, "
                f"largest {error['largest']:.1%}, bias {error['bias']:+.1%}"
            )
            limit = self.threshold({self._key: name})
            lines.append(
                f"{name or '(all)'}: {len(group.rows)} peaks, {told}; hopeless above "
                f"{limit:.2f} x budget"
            )
        return "\n".join(lines) or "no peaks yet"

    def check(
        self,
        trial: Any,
        config: Config | None = None,
        *,
        budget: int | str | None = None,
        prune: bool = True,
    ) -> bool:
        """check(trial, config=None, *, budget=None, prune=True) -> bool

        Call it when everything that memory depends on has been suggested, before it is built:
        prunes the trial when it is hopeless, and records the prediction in any case.
        """
        study = getattr(trial, "study", None)
        if study is not None:
            self.fit(study)
        config = _hpo_values.configuration(trial.params, config or {})
        predicted = self.predict(config)
        room = _room(budget)
        # Also before anything can be predicted: those trials are learnt from.
        trial.set_user_attr("memory_config", _hpo_values.plain(config))
        if predicted is None or not room:
            return False
        trial.set_user_attr("memory_predicted_bytes", predicted)
        limit = self.threshold(config)
        if predicted <= limit * room:
            return False
        text = (
            f"OOM predicted: {predicted / 1e9:.3f} GB, {predicted / room:.2f} x the budget of "
            f"{room / 1e9:.3f} GB (hopeless above {limit:.2f})"
        )
        trial.set_user_attr("oom_predicted", True)
        trial.set_user_attr("oom_config", _hpo_values.plain(config))
        trial.set_user_attr("memory_prediction", text)
        trial.set_user_attr("memory_budget_bytes", room)
        trial.set_user_attr(_hpo_study.ATTRIBUTE, predicted / room - 1)
        log.info("trial=%d %s", trial.number, text)
        if prune:
            raise hopeless_trial()(text)
        return True


def _room(budget: int | str | None) -> int | None:
    if budget is not None:
        return _parse_budget(budget)
    info = memory()
    if info.budget is not None:
        return info.budget
    if info.free is not None and info.reserved is not None:
        return info.free + info.reserved
    return info.total if info.total is not None else _host_bytes()


def _measured_config(trial: Any) -> dict[str, Any]:
    """The configuration whose peak was measured: with the micro-batch that was run."""
    config = dict(trial.user_attrs.get("memory_config") or trial.params)
    micro = trial.user_attrs.get("micro_batch_size")
    if micro is not None:
        config[_hpo_values.batch_key(config) or "batch_size"] = micro
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _without_accumulation(config: Config) -> dict[str, Any]:
    found = {key: 1 if _hpo_values.is_accumulation(key) else value for key, value in config.items()}
    if _hpo_values.EFFECTIVE not in found:
        return found
    key = _hpo_values.batch_key(found)
    if key is not None:
        found[_hpo_values.EFFECTIVE] = found[key]
        return found
    steps = [value for name, value in config.items() if _hpo_values.is_accumulation(name)]
    effective = found[_hpo_values.EFFECTIVE]
    if len(steps) == 1 and _is_number(effective) and _is_number(steps[0]) and steps[0] >= 1:
        found[_hpo_values.EFFECTIVE] = math.ceil(effective / steps[0])
    return found


# --- least squares, small enough for plain numbers ------------------------------------


def _solve_nonnegative(rows: list[tuple[list[float], int]], count: int) -> list[float] | None:
    """Weights >= 0 with the least relative squared errors; None where there are none.

    In plain numbers, because tensors of ours would count against a memory budget.
    """
    used = list(range(count))
    while used:
        weights = _solve(rows, used)
        negative = [i for i, weight in zip(used, weights, strict=True) if weight < 0]
        if not negative:
            found = dict(zip(used, weights, strict=True))
            return [found.get(i, 0.0) for i in range(count)]
        worst = min(zip(weights, used, strict=True))[1]
        used.remove(worst)
    return None


def _solve(rows: list[tuple[list[float], int]], used: list[int]) -> list[float]:
    """Weights of these terms by orthogonalisation; 0 for one that others make."""
    columns = [[terms[i] / peak for terms, peak in rows] for i in used]
    size = [math.sqrt(math.fsum(x * x for x in column)) or 1.0 for column in columns]
    columns = [[x / scale for x in column] for column, scale in zip(columns, size, strict=True)]
    target = [1.0] * len(rows)
    basis: list[list[float]] = []
    parts: list[list[float]] = []
    for column in columns:
        rest, part = column[:], [0.0] * len(columns)
        for _ in range(2):  # once more for what rounding left
            for j, direction in enumerate(basis):
                share = _dot(rest, direction)
                part[j] += share
                rest = [x - share * y for x, y in zip(rest, direction, strict=True)]
        length = math.sqrt(_dot(rest, rest))
        keep = length > 1e-9
        part[len(basis)] = length if keep else 0.0
        basis.append([x / length for x in rest] if keep else [0.0] * len(rest))
        parts.append(part)
    along = [_dot(target, direction) for direction in basis]
    weights = [0.0] * len(columns)
    for i in reversed(range(len(columns))):
        if parts[i][i] > 0:
            known = sum(parts[j][i] * weights[j] for j in range(i + 1, len(columns)))
            weights[i] = (along[i] - known) / parts[i][i]
    return [weight / scale for weight, scale in zip(weights, size, strict=True)]


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
