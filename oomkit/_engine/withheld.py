"""What torch's own helpers make of gradients that are withheld while a step is split.

Between a backward and the end of a micro-batch that is not the last no parameter has a
gradient. clip_grad_norm_ takes that for a norm of 0; clip_grad_value_ raises, because its
grouping of tensors does not accept an empty list.
"""

from __future__ import annotations

from typing import Any

import torch.nn.utils.clip_grad as _clip


def accept_no_gradients() -> None:
    """Let the grouping in ``torch.nn.utils.clip_grad`` answer for no tensors at all.

    Done once, before the first split of the process; grouping nothing into nothing changes no
    call that worked before. Nothing is done where torch has no such function.
    """
    grouping = getattr(_clip, "_group_tensors_by_device_and_dtype", None)
    if grouping is None or getattr(grouping, "_oomkit", False):
        return

    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return grouping(tensors, *args, **kwargs) if tensors and tensors[0] else {}

    group._oomkit = True  # type: ignore[attr-defined]
    setattr(_clip, "_group_tensors_by_device_and_dtype", group)  # noqa: B010
