"""The demo's picture: memory within the first steps of the three runs, and their losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
STEPS = 3  # as many of oomkit's are drawn
INK, SOFT, FAINT, GRID = "#1f2328", "#57606a", "#8c959f", "#dde2e7"
PLAIN, OURS, LIMIT = "#c4501b", "#1f6fb4", "#a40e26"


class Curve:
    """Samples of one run: seconds from its first step, MiB."""

    def __init__(self, path: Path) -> None:
        kept = json.loads(path.read_text())
        origin = kept["steps"][0]
        inside = [(t - origin, b / MIB) for t, b in kept["memory"] if t >= origin]
        self.times = [t for t, _ in inside]
        self.sizes = [b for _, b in inside]
        self.steps = [t - origin for t in kept["steps"]]
        self.forwards = [(t - origin, rows) for t, rows in kept["forwards"]]

    def part(self, start: float, end: float) -> tuple[list[float], list[float]]:
        kept = [i for i, t in enumerate(self.times) if start <= t <= end]
        return [self.times[i] for i in kept], [self.sizes[i] for i in kept]

    def highest(self, start: float, end: float) -> float:
        times, sizes = self.part(start, end)
        return times[sizes.index(max(sizes))] if times else start


def draw(
    folder: Path, reference: dict[str, Any], run: dict[str, Any], budget: int, difference: float
) -> None:
    """Writes demo.png, of what the runs have left in the folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {
        "font.size": 11,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(11, 5.6), dpi=150, layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(2.4, 1), wspace=0.06)
        plain = figure.add_subplot(grid[0, 0])
        ours = figure.add_subplot(grid[1, 0], sharex=plain, sharey=plain)
        curves = {k: Curve(folder / f"{k}-memory.json") for k in ("reference", "plain", "oomkit")}
        draw_plain(plain, curves, budget / MIB)
        draw_ours(ours, curves["oomkit"], run["records"], budget / MIB)
        losses = {"reference": reference["losses"], "oomkit": run["losses"]}
        draw_losses(figure.add_subplot(grid[:, 1]), losses, budget / MIB, difference)
        clock = "CPU time" if run["device"] == "cpu" else "time"
        ours.set_xlabel(f"{clock}, seconds")
        figure.savefig(folder / "demo.png")
        plt.close(figure)


def limit(axes: Any, budget: float) -> None:
    axes.axhline(budget, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 2)), zorder=1)
    where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.text(0.995, budget, f"limit {budget:.0f} MiB", color=LIMIT, **where)
    axes.set_ylabel("allocated, MiB")


def area(axes: Any, points: tuple[list[float], list[float]], colour: str) -> None:
    axes.fill_between(*points, color=colour, alpha=0.2, linewidth=0)
    axes.plot(*points, color=colour, linewidth=1.5, solid_joinstyle="round")


def refused(axes: Any, when: float, budget: float, size: float) -> None:
    """A request that did not fit any more."""
    axes.plot(
        [when], [budget], "X", color=PLAIN, markersize=size, markeredgecolor="white", zorder=5
    )


def draw_plain(axes: Any, curves: dict[str, Curve], budget: float) -> None:
    whole, plain, ours = curves["reference"], curves["plain"], curves["oomkit"]
    end = ours.steps[min(STEPS, len(ours.steps) - 1)]
    needed = max(whole.sizes)
    axes.set_title("As it is: the first step dies")
    axes.fill_between(*whole.part(0, end), color=GRID, linewidth=0, zorder=0)
    died = plain.highest(0, end)
    area(axes, plain.part(0, died), PLAIN)
    refused(axes, died, budget, 12)
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": PLAIN}
    axes.annotate(
        "torch.OutOfMemoryError",
        (died, budget),
        xytext=(16, -28),
        color=PLAIN,
        textcoords="offset points",
        bbox=box,
        zorder=6,
    )
    axes.text(
        0.995,
        0.97,
        f"grey: the same program without a limit, {needed:.0f} MiB",
        transform=axes.transAxes,
        ha="right",
        va="top",
        color=SOFT,
    )
    axes.set_xlim(-0.008 * end, end)
    axes.set_ylim(0, 1.22 * max(needed, budget))
    axes.tick_params(labelbottom=False)
    limit(axes, budget)


def draw_ours(axes: Any, curve: Curve, records: list[dict[str, Any]], budget: float) -> None:
    axes.set_title("With @oomkit.auto_batch: rolled back, split and run again")
    limit(axes, budget)
    over = 1.16 * budget
    text = {"ha": "center", "va": "bottom"}
    for number, record in enumerate(records[:STEPS]):
        start, end = curve.steps[number : number + 2]
        begun = [t for t, _ in curve.forwards if start <= t < end]
        replay = begun[-record["accumulation_steps"]]
        if record["ooms"]:
            failed = begun[record["ooms"]]
            area(axes, curve.part(start, failed), PLAIN)
            refused(axes, curve.highest(start, failed), budget, 9)
            axes.text(
                start,
                over,
                f" {record['batch_size']} rows fail,\n rolled back",
                color=PLAIN,
                va="bottom",
            )
            axes.text((failed + replay) / 2, over, "the split\nis proven", color=SOFT, **text)
            start = failed
        area(axes, curve.part(start, replay), FAINT)
        area(axes, curve.part(replay, end), OURS)
        parts = f"{record['accumulation_steps']} × {record['micro_batch_size']} rows,\none update"
        axes.text((replay + end) / 2, over, parts, color=OURS, **text)
        if number + 1 < min(STEPS, len(records)):
            axes.axvline(end, color=FAINT, linewidth=0.8, linestyle=":")
        middle = (curve.steps[number] + end) / 2
        axes.text(
            middle,
            0.99,
            f"step {number + 1}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            weight="bold",
        )


def draw_losses(
    axes: Any, losses: dict[str, list[float]], budget: float, difference: float
) -> None:
    axes.set_title("The losses are the same")
    steps = range(1, len(losses["reference"]) + 1)
    axes.plot(
        steps,
        losses["reference"],
        color=FAINT,
        linewidth=7,
        alpha=0.5,
        solid_capstyle="round",
        label="without a limit",
    )
    axes.plot(
        steps,
        losses["oomkit"],
        color=OURS,
        linewidth=1.5,
        marker="o",
        markersize=4,
        label=f"oomkit, {budget:.0f} MiB",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.locator_params(nbins=6)
    axes.legend(frameon=False, loc="upper right")
    axes.text(
        0.03,
        0.02,
        f"largest difference\n{difference:.0e} relative",
        transform=axes.transAxes,
        va="bottom",
    )
