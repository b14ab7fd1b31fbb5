"""What the search shows: a line for each trial, a table and a picture."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import optuna
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

MIB = 2**20
COLOURS = {
    "fits whole": "#3b6ea5",
    "fits in parts": "#2f8f5b",
    "pruned by its loss": "#999999",
    "out of memory": "#b00020",
}
PANELS = (
    ("parameters", "million parameters of the model"),
    ("tok.max_length", "tok.max_length"),
    ("train.batch_size", "train.batch_size"),
)


def outcome(trial: optuna.trial.FrozenTrial) -> str:
    """What became of a trial: a key of COLOURS, or "died"."""
    if trial.user_attrs.get("oom") or trial.user_attrs.get("oom_predicted"):
        return "out of memory"
    if trial.state.name == "PRUNED":
        return "pruned by its loss"
    if trial.state.name != "COMPLETE":
        return "died"
    return "fits in parts" if trial.user_attrs.get("oom_retries") else "fits whole"


def configuration(params: dict[str, Any]) -> str:
    text = (
        f"{params['model']}, {params['train.batch_size']} x {params['train.grad_accum']} rows of "
        f"{params['tok.max_length']} tokens"
    )
    return f"{text}, checkpointing" if params.get("grad_checkpointing") else text


def line(trial: optuna.trial.FrozenTrial) -> str:
    attributes = trial.user_attrs
    text = outcome(trial)
    if text == "out of memory":
        needed = attributes.get("memory_needed_bytes", attributes.get("memory_predicted_bytes"))
        how = "predicted" if attributes.get("oom_predicted") else "at least"
        text = f"{text} at micro-batch 1: {how} {needed / MIB:.0f} MiB" if needed else text
    else:
        if trial.values is not None:
            text += ", loss " + " / ".join(f"{value:.4g}" for value in trial.values)
        if "peak_memory_bytes" in attributes:
            text += f", peak {attributes['peak_memory_bytes'] / MIB:.0f} MiB"
        if attributes.get("oom_retries"):
            text += f", micro-batch {attributes['micro_batch_size']}"
    return f"trial {trial.number:3}: {configuration(trial.params)}: {text}"


class Bar(logging.Handler):
    """The progress of the search, with what oomkit logs beside it."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(logging.INFO)
        self.progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task("", total=total)
        self.trial = ""

    def __enter__(self) -> Bar:
        logger = logging.getLogger("oomkit")
        self.before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the bar shows it
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        logger = logging.getLogger("oomkit")
        logger.removeHandler(self)
        logger.level, logger.propagate = self.before

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.update(self.task, description=f"{self.trial} | {record.getMessage()}"[:160])

    def begun(self, trial: optuna.Trial, config: dict[str, Any]) -> None:
        self.trial = f"trial {trial.number}: {configuration(trial.params)}"
        self.progress.update(self.task, description=self.trial)

    def done(self, count: int) -> None:
        self.progress.update(self.task, completed=count)


def table(study: optuna.Study, budget: int, note: str = "") -> Table:
    trials = study.get_trials(deepcopy=False)
    counts = Counter(outcome(trial) for trial in trials if trial.state.is_finished())
    survived = sum(trial.user_attrs.get("oom_retries", 0) for trial in trials)
    shown = Table(
        title=f"budget {budget / MIB:.0f} MiB{note}", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in ("trials", "OOM", "pruned", "completed", "in parts", "OOMs survived", "died",
                 "best"):  # fmt: skip
        shown.add_column(name, justify="left" if name == "best" else "right")
    shown.add_row(
        str(counts.total()),
        str(counts["out of memory"]),
        str(counts["pruned by its loss"]),
        str(counts["fits whole"] + counts["fits in parts"]),
        str(counts["fits in parts"]),
        str(survived),
        str(counts["died"]),
        best(study),
    )
    return shown


def best(study: optuna.Study) -> str:
    found = [
        trial
        for trial in study.best_trials
        if outcome(trial) in ("fits whole", "fits in parts")
    ]  # fmt: skip
    if not found:
        return "-"
    if len(study.directions) > 1:
        return f"{len(found)} trials that none is better than in both"
    return f"trial {found[0].number}: loss {found[0].value:.4g}, {configuration(found[0].params)}"


def picture(study: optuna.Study, budget: int, file: Path) -> None:
    """Parameters of the trials against the memory that they took, with the boundary."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 3.4), sharey=True)
    trials = [t for t in study.get_trials(deepcopy=False) if outcome(t) != "died"]
    # A trial that was hopeless has made no model.
    sizes = {t.params["model"]: t.user_attrs.get("parameters") for t in trials
             if t.user_attrs.get("parameters")}  # fmt: skip
    top = budget / MIB
    for axes, (name, label) in zip(panels, PANELS, strict=True):
        for kind, colour in COLOURS.items():
            rows = [point(trial, name, sizes) for trial in trials if outcome(trial) == kind]
            rows = [(x, y) for x, y in rows if x is not None and y is not None]
            top = max([top, *(y for _, y in rows)])
            marker = "x" if kind == "out of memory" else "o"
            axes.scatter([x for x, _ in rows], [y for _, y in rows], s=26, c=colour,
                         marker=marker, label=kind, alpha=0.85)  # fmt: skip
        axes.axhline(budget / MIB, color="#b00020", linewidth=1)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(left=0)
    panels[0].set_ylabel("peak, MiB (out of memory: needed)")
    panels[0].set_ylim(0, top * 1.08)
    panels[0].text(0.02, budget / MIB, "budget", color="#b00020", va="bottom", fontsize=8,
                   transform=panels[0].get_yaxis_transform())  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(file, dpi=90)
    plt.close(figure)


def point(
    trial: optuna.trial.FrozenTrial, name: str, sizes: dict[str, int]
) -> tuple[float | None, float | None]:
    """(a parameter, MiB that the trial had or would have had), None for what is not known."""
    attributes = trial.user_attrs
    size = attributes.get("peak_memory_bytes")
    if outcome(trial) == "out of memory":
        known = [attributes.get(f"memory_{kind}_bytes") for kind in ("predicted", "needed")]
        size = max([0, *(n for n in (size, *known) if n)]) or None
    x = trial.params.get(name)
    if name == "parameters":
        count = sizes.get(trial.params["model"])
        x = None if count is None else count / 1e6
    return x, None if size is None else size / MIB
