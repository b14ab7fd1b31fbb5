"""What `protect` refuses, with the reason."""

from __future__ import annotations

from typing import Any

from .. import _C
from .books import family

__all__ = ["check"]

_AUXILIARY = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "moe_loss_weight")
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
_SORTED = ("aot", "aot_unpaired")
_IN_BACKWARD = ("lomo", "layerwise")  # in the names of transformers' optimizers


def _auxiliary(trainer: Any) -> str | None:
    """The option of a model whose routers add a loss of the whole batch."""
    config = getattr(trainer.model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if getattr(each, "output_router_logits", False):
            return next((name for name in _AUXILIARY if getattr(each, name, 0.0)), None)
    return None


def _sharded(model: Any) -> bool:
    """Whether a module of it is of one of torch's classes for sharded models."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(
        kind.__module__.startswith("torch.distributed.fsdp") and kind.__name__ in _SHARDED
        for kind in kinds
    )


def _coupled(trainer: Any, kind: str | None) -> list[str]:
    """Losses of TRL that a proof may take for one of rows, as long as the model is as it began."""
    found = []
    if kind == "KTOTrainer" and trainer.loss_type == "kto":
        found.append(
            'KTOTrainer with loss_type="kto": its loss has one KL term for the whole batch; '
            '"apo_zero_unpaired" has none'
        )
    if kind == "DPOTrainer":
        found += [
            f'loss_type="{each}": it sorts the pairs of the whole batch'
            for each in getattr(trainer, "loss_types", ())
            if each in _SORTED
        ]
    if kind == "GRPOTrainer" and getattr(trainer, "use_adaptive_entropy", False):
        found.append("use_adaptive_entropy: its coefficient changes from call to call")
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    if kind == "GRPOTrainer" and quantile < 1.0:
        found.append(f"top_entropy_quantile={quantile}: a quantile of the whole batch's tokens")
    return found


def _in_processes(trainer: Any, place: str) -> list[str]:
    """What one process could not do again without the others."""
    several = f"world_size={trainer.args.world_size}"
    if trainer.args.world_size < 2:
        return []
    if any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        return [f"{several}: its loss gathers metrics from all processes"]
    if place == "compute_loss":
        return [f'{several} at "{place}": the backward, which all processes make, comes after it']
    return []


def _reasons(trainer: Any, place: str) -> list[str]:
    args, kind = trainer.args, family(trainer)
    found = []
    if args.auto_find_batch_size:
        found.append(
            "auto_find_batch_size=True: it begins the training again with a smaller batch, and "
            "with the parameters of the first try; leave it out"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        found.append("DeepSpeed")
    if getattr(trainer, "is_fsdp_enabled", False) or _sharded(trainer.model):
        found.append("FSDP")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if getattr(parallel, "sp_enabled", False) or getattr(parallel, "cp_enabled", False):
        found.append("sequence parallelism")
    found += _in_processes(trainer, place)
    if args.n_gpu > 1:
        found.append(f"n_gpu={args.n_gpu}: DataParallel; set CUDA_VISIBLE_DEVICES to one device")
    optim = getattr(args.optim, "value", args.optim)
    if any(word in str(optim) for word in _IN_BACKWARD):
        found.append(f"optim={optim!r}: its updates are made inside the backward")
    if place == "training_step" and kind in ("GRPOTrainer", "RLOOTrainer"):
        found.append(f'at="{place}": it generates there, for groups of the batch; leave at out')
    found += _coupled(trainer, kind)
    auxiliary = _auxiliary(trainer)
    if auxiliary is not None:
        found.append(f"{auxiliary}: the auxiliary loss is one of the whole batch")
    return found


def check(trainer: Any, place: str) -> None:
    """ValueError for what cannot be protected exactly.

    Args:
        trainer: of transformers.
        place: the method that is to be protected.
    """
    found = _reasons(trainer, place)
    if found:
        raise ValueError(
            f"protect() cannot protect {type(trainer).__name__} with {found[0]}{_C.see('trainers')}"
        )
