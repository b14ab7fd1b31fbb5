"""What a bug report needs to know of a machine: `python -m oomkit env`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from .. import _C
from .._api.budget import budget

_BESIDE = ("numpy", "accelerate", "lightning", "optuna", "transformers", "triton")
_VARIABLES = ("OOMKIT_", "PYTORCH_", "CUDA_", "TORCH_", "OMP_NUM_THREADS")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _bridge() -> str:
    stats = _C.cpu_stats()
    if not stats["bridge"]:
        return "missing: no budget on the CPU, slower figures"
    return "in use" if stats["installed"] else "there, the CPU's allocator not in place yet"


def _allocator() -> dict[str, Any]:
    """The settings in effect, which are not always those of the environment."""
    if not torch.cuda.is_available():
        return {}
    try:
        return dict(torch.cuda.memory._snapshot()["allocator_settings"])
    except (KeyError, RuntimeError):  # a build or an allocator without them
        return {}


def _devices() -> Iterator[str]:
    yield "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        for index in range(torch.accelerator.device_count()):
            yield f"{accelerator.type}:{index}"


def environment(version: str) -> str:
    """Lines of `name: value`."""
    lines = [
        f"oomkit: {version}",
        f"bridge: {_bridge()}",
        f"torch: {torch.__version__}",
        f"CUDA: {torch.version.cuda or '-'}",
        f"Python: {platform.python_version()} ({sys.implementation.name})",
        f"system: {platform.platform()}",
    ]
    lines += [f"{name}: {found}" for name in _BESIDE if (found := _version(name)) is not None]
    for device in _devices():
        name = "" if device == "cpu" else f" {torch.cuda.get_device_name(device)}"
        lines.append(
            f"device {device}:{name if device.startswith('cuda') else ''} {budget(device)}"
        )
    lines += [f"allocator: {key}={value}" for key, value in sorted(_allocator().items())]
    named = sorted(k for k in os.environ if k.startswith(_VARIABLES))
    lines += [f"environment: {key}={os.environ[key]}" for key in named]
    return "\n".join(lines)
