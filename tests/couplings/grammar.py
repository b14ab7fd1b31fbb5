"""The grammar of random programs: what may stand at each place, and how often."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from . import pieces

Names = tuple[str, ...]


@dataclass(frozen=True)
class Sentence:
    """A program, drawn from its seed."""

    seed: int
    rows: int
    container: str
    model: str
    features: str
    row_loss: str
    """Of rows; with "" the loss is `reduction` itself, of tokens or of features."""
    reduction: str
    penalty: str
    hook: str
    backward: str
    post: str
    update: str
    zero: str
    beside: str
    returned: str
    form: str
    trouble: str
    share: float
    declared: str
    """What the decorator is told of the loss."""

    def __str__(self) -> str:
        told = {k: v for k, v in asdict(self).items() if v not in ("", "none", PLAIN.get(k))}
        return ", ".join(f"{k.replace('_', ' ')}: {v}" for k, v in told.items())


PLAIN = {
    "features": "as they are",
    "row_loss": "cross entropy",
    "reduction": "mean",
    "backward": "of the sum",
    "update": "sgd",
    "zero": "first",
    "returned": "loss",
    "form": "whole",
}
"""What is drawn more often than the rest of its place."""

PLACES: dict[str, tuple[float, Names]] = {
    # The share of what is plain, and the rest.
    "container": (
        0.3,
        ("arguments", "dict", "tuple", "list", "data class", "nested", "list of rows"),
    ),
    "model": (0.3, tuple(pieces.MODELS)),
    "features": (0.84, tuple(pieces.FEATURES)),
    "row_loss": (0.5, tuple(pieces.ROW_LOSSES)),
    "reduction": (0.6, tuple(pieces.REDUCTIONS)),
    "penalty": (0.75, tuple(pieces.PENALTIES)),
    "hook": (
        0.88,
        (
            "none",
            "halves an activation's gradient",
            "normalises an activation's gradient",
            "clamps an activation's gradient",
            "doubles a parameter's gradient",
            "clamps a parameter's gradient",
            "sign of a parameter's gradient",
            "of a module, by its norm",
            "before the accumulation, clamps",
            "before the accumulation, halves",
            "after the accumulation, clamps",
        ),
    ),
    "backward": (
        0.66,
        (
            "of the sum",
            "one after the other",
            "of a list",
            "scaled, and divided by hand",
            "with a gradient of 2",
            "with inputs",
            "cut at the features",
            "of outputs, with rows of the batch",
            "gradients set by hand",
            "penalty of the input's gradient",
            "penalty of the gradient",
            "attack where there is a gradient",
            "loops over halves",
            "scaler",
        ),
    ),
    "post": (
        0.6,
        (
            "none",
            "clips the norm",
            "clips values",
            "halves",
            "centres",
            "normalises",
            "decays",
        ),
    ),
    "update": (
        0.5,
        (
            "sgd",
            "adamw",
            "by hand",
            "by hand, parameters",
            "Polyak's",
            "rate of the loss",
            "schedule",
            "plateau",
            "average in the last",
            "average always",
            "none",
        ),
    ),
    "zero": (0.5, ("first", "last", "first, to zero", "last, to zero")),
    "beside": (
        0.9,
        ("none", "rows in a dict", "rows on an object", "a counter of calls", "running loss"),
    ),
    "returned": (
        0.5,
        (
            "loss",
            "number",
            "nothing",
            "outputs",
            "hits",
            "share of hits",
            "norm",
            "perplexity",
            "largest",
            "total",
            "mean of outputs",
            "list of losses",
        ),
    ),
    "form": (0.6, ("whole", "accumulating", "returned", "returned, halved", "backward=True")),
    "trouble": (
        0.3,
        ("forward", "backward", "forward, first call", "backward, first call", "2", "3", "rows"),
    ),
    "declared": (0.93, ("", "sum")),
}

RARE = {
    "list of rows": 0.3,
    "after the accumulation, clamps": 0.3,
    "gradients set by hand": 0.3,
    "average always": 0.3,
    "spectral norm": 0.3,
}


NOT_REENTRANT = ("with inputs", "gradients set by hand", "penalty of the gradient")
SCALED = ("sgd", "adamw", "schedule", "plateau", "average in the last")


COUPLE = ("features", "reduction", "hook", "backward", "beside", "penalty", "declared", "update")
"""Places with many ways to couple: in a part of all programs nearly all of them are plain."""


def _one(draw: random.Random, place: str, calm: bool) -> str:
    share, names = PLACES[place]
    if draw.random() < (max(share, 0.93) if calm and place in COUPLE else share):
        return PLAIN.get(place, names[0])
    return draw.choices(names, [RARE.get(name, 1.0) for name in names])[0]


def sentence(seed: int) -> Sentence:
    """The same seed gives the same program."""
    draw = random.Random(f"couplings {seed}")
    calm = draw.random() < 0.35
    drawn = {place: _one(draw, place, calm) for place in PLACES}
    if drawn["model"] == "tokens":
        drawn["row_loss"] = ""
        drawn["reduction"] = draw.choice(tuple(pieces.TOKEN_LOSSES))
    elif draw.random() < 0.12:
        drawn["row_loss"] = ""
        drawn["reduction"] = draw.choice(tuple(pieces.OF_FEATURES))
    if drawn["form"] not in ("whole", "accumulating"):
        # What comes after the loss is the caller's, and after its plain backward.
        drawn["backward"], drawn["returned"] = PLAIN["backward"], "loss"
    if drawn["form"] != "whole":
        drawn["post"], drawn["update"] = "none", "sgd"
    if drawn["backward"] == "scaler" and drawn["update"] not in SCALED:
        drawn["update"] = "sgd"
    if drawn["backward"] == "scaler" and drawn["form"] != "whole":
        drawn["backward"] = PLAIN["backward"]
    if drawn["backward"].startswith("penalty of") and drawn["row_loss"] == "margin":
        drawn["row_loss"] = "smoothed"  # torch has no second derivative of the other
    if drawn["backward"] in NOT_REENTRANT and drawn["model"] == "reentrant checkpoint":
        drawn["model"] = "checkpoint"
    if drawn["update"].startswith("by hand"):
        # Inside it, without an optimizer, an error cannot be told from one of a forward.
        drawn["trouble"] = drawn["trouble"].replace("forward", "backward")
    if drawn["backward"] == "loops over halves" and drawn["beside"].startswith("rows"):
        drawn["beside"] = "none"  # a half has fewer rows than stand beside it
    if drawn["reduction"] in ("sum", "sum of tokens") and draw.random() < 0.6:
        drawn["declared"] = "sum"
    rows = draw.choices((2, 3, 4, 5, 6, 7, 8, 9), (1, 1, 2, 2, 3, 3, 4, 2))[0]
    return Sentence(seed=seed, rows=rows, share=round(draw.random(), 2), **drawn)  # type: ignore[arg-type]
