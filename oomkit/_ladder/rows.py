"""The update of one parameter, some of its rows at a time, with its state in host memory.

For optimizers that compute every element of a parameter from the same element of its gradient
and state, and from numbers: then the rows of a view are updated as they would be in the whole,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Those of torch.optim; in tests/optim/test_update_rows.py each is compared with whole updates.
ELEMENTWISE = frozenset(
    "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split()
)
# A fused kernel, and one in half precision, computes the last elements of a tensor in another way.
_EXACT = (torch.float32, torch.float64)


def rows_possible(optimizer: Any, param: torch.Tensor) -> bool:
    """Say whether the update of a parameter can be made by rows.

    Args:
        optimizer: known to treat its parameters one by one.
        param: one of them, with a gradient.
    """
    cls, grad = type(optimizer), param.grad
    return (
        cls.__name__ in ELEMENTWISE
        and getattr(torch.optim, cls.__name__, None) is cls
        and not any(group.get("fused") for group in optimizer.param_groups)
        and param.dtype in _EXACT
        and param.dim() > 0
        and param.shape[0] > 1
        and param.is_contiguous()
        and grad is not None
        and grad.layout is torch.strided
        and grad.dtype is param.dtype
        and grad.is_contiguous()
        and all(
            value.is_contiguous()
            for value in (optimizer.state.get(param) or {}).values()
            if _is_of_elements(value, param)
        )
    )


def _is_of_elements(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _piece(value: Any, param: torch.Tensor, start: int, end: int) -> Any:
    """What the view's state has: rows on its device, or a number of its own."""
    if _is_of_elements(value, param):
        return value[start:end].to(param.device)
    return value.clone() if isinstance(value, torch.Tensor) else value


def update_rows(
    optimizer: Any,
    below: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    param: torch.Tensor,
    rows: int,
    hosted: dict[int, torch.Tensor],
    host_copy: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Call ``step()`` for some rows of one parameter after the other.

    Args:
        optimizer: its groups have no other parameter but this one; they are put back by who
            calls this.
        below: the ``step`` of the class below torch's profile wrapper.
        args: of ``step()``.
        kwargs: of ``step()``.
        param: whose gradient and state are in host memory.
        rows: of one call.
        hosted: address -> tensor of state that is in host memory; new state is added.
        host_copy: a copy of a tensor in host memory, outside the budget.

    Returns:
        What the last call has returned.
    """
    group = next(g for g in optimizer.param_groups if g["params"])
    state: dict[Any, Any] = optimizer.state.get(param) or {}
    made: dict[Any, Any] = {}
    grad, result = param.grad, None
    assert grad is not None
    for start in range(0, param.shape[0], rows):
        end = min(start + rows, param.shape[0])
        view = torch.nn.Parameter(param.detach()[start:end])
        view.grad = grad[start:end].to(param.device)
        group["params"] = [view]
        if state:
            optimizer.state[view] = {k: _piece(v, param, start, end) for k, v in state.items()}
        try:
            result = below(*args, **kwargs)
        finally:
            after = optimizer.state.pop(view, {})
        for key, value in after.items():
            if not _is_of_elements(value, view):
                made[key] = value
                continue
            whole = state.get(key)
            if whole is None:
                whole = made.setdefault(key, None)
            if whole is None:
                whole = made[key] = host_copy(param)
            if whole.data_ptr() + start * whole[0].nbytes != value.data_ptr():
                whole[start:end].copy_(value)
    for key, value in made.items():
        before = state.get(key)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            before.copy_(value)
            made[key] = before
        elif _is_of_elements(value, param):
            hosted[id(value)] = value
    if state:
        state.update(made)
    elif made:
        optimizer.state[param] = made
    return result
