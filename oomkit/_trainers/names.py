"""Names of transformers and TRL that are used: looked up once, when a trainer is protected."""

from __future__ import annotations

import importlib.util
import operator
import sys
from typing import Any

from .. import _C
from .books import family

__all__ = ["check", "installed", "missing"]

_TESTED = "transformers 5.23.0 and TRL 1.16.0"
_OF_TRANSFORMERS = (
    "training_step",
    "compute_loss",
    "prediction_step",
    "log",
    "model",
    "accelerator",
    "add_callback",
    "remove_callback",
    "callback_handler.callbacks",
    "state.stateful_callbacks",
    "args.auto_find_batch_size",
    "args.n_gpu",
    "args.optim",
    "args.world_size",
)
_OF_PROCESSES = ("_get_num_items_in_batch", "accelerator.gather")
_OF_TRL: dict[str, tuple[str, ...]] = {
    "SFTTrainer": ("_metrics", "_total_train_tokens"),
    "DPOTrainer": ("_metrics",),
    "RewardTrainer": ("_metrics",),
    "KTOTrainer": ("_metrics", "loss_type"),
    "GRPOTrainer": ("_metrics", "loss_type", "_get_per_token_logps_and_entropies"),
    "RLOOTrainer": ("_metrics", "_get_per_token_logps_and_entropies"),
}


def installed() -> None:
    """ImportError where transformers is not installed."""
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "oomkit.transformers needs transformers: install it with "
            f"`pip install oomkit[transformers]`{_C.see('missing-package')}"
        )


def missing(library: str, name: str) -> ImportError:
    """What is raised where a library does not have a name.

    Args:
        library: as it is imported.
        name: that is not there.
    """
    version = getattr(sys.modules.get(library), "__version__", "of an unknown version")
    return ImportError(
        f"oomkit.transformers uses {name}, which {library} {version} does not have: install "
        f"{_TESTED}, which are tested{_C.see('missing-package')}"
    )


def check(trainer: Any) -> None:
    """ImportError for the first name that a trainer does not have.

    Args:
        trainer: of transformers.
    """
    kind = family(trainer)
    several = _OF_PROCESSES if getattr(trainer.args, "world_size", 1) > 1 else ()
    for library, names in (
        ("transformers", (*_OF_TRANSFORMERS, *several)),
        ("trl", _OF_TRL.get(kind or "", ())),
    ):
        for name in names:
            try:
                operator.attrgetter(name)(trainer)
            except AttributeError:
                owner = kind if library == "trl" else "Trainer"
                raise missing(library, f"{owner}.{name}") from None
