"""What a program gives to an optimizer to run in its ``step()``: closures, and hooks."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from .. import _C


def silent_closure(closure: Callable[[], object], name: str) -> Callable[[], None]:
    """The closure, refused where it returns a loss: that would be one micro-batch's.

    Args:
        name: of the optimizer's class.
    """

    def checked() -> None:
        if closure() is not None:
            raise _C.SplitError(
                f"auto_batch cannot split this step: the closure of {name}.step() returns the "
                "loss of one micro-batch; let it return None, or decorate the forward and "
                "backward instead of the step around them"
                f"{_C.see('optimizer-closure')}"
            )

    return checked


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook of the program runs before its ``step()``, which may change gradients: a
    second run would find what the first one has left."""
    own = vars(optimizer).get("_optimizer_step_pre_hooks", {})
    hooks = [*own.values(), *_optimizer._global_optimizer_pre_hooks.values()]
    modules = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks)
    return any(module.partition(".")[0] != "oomkit" for module in modules)
