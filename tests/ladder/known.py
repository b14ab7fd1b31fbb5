"""Configurations of other packages' optimizers, and a small program for each."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

from oomkit._ladder.known import KNOWN

SHAPES = [(40, 64), (2048,), (24, 4, 4, 8)]

# Beside the defaults: options that add state or another way to compute.
_MORE: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("transformers.optimization", "Adafactor"): [
        {"lr": None, "warmup_init": True, "beta1": 0.9},
        {"relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    ],
    ("timm.optim", "Adafactor"): [{"lr": None}, {"betas": (0.9, 0.99), "weight_decay": 0.1}],
    ("timm.optim", "AdafactorBigVision"): [{"momentum": 0.9, "weight_decay": 0.1}],
    ("timm.optim", "AdamP"): [{"nesterov": True, "weight_decay": 0.1}],
    ("timm.optim", "AdamWLegacy"): [{"amsgrad": True}],
    ("timm.optim", "Adopt"): [{"weight_decay": 0.1, "clip_exp": 0.25}],
    ("timm.optim", "Lars"): [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    ("timm.optim", "LaProp"): [{"weight_decay": 0.1}],
    ("timm.optim", "MADGRAD"): [{"momentum": 0.0, "weight_decay": 0.1}],
    ("timm.optim", "Mars"): [{"mars_type": "lion", "optimize_1d": True, "weight_decay": 0.1}],
    ("timm.optim", "Muon"): [{"nesterov": True}, {"algo": "adamuon"}],
    ("timm.optim", "NvNovoGrad"): [{"amsgrad": True, "weight_decay": 0.1}],
    ("timm.optim", "RMSpropTF"): [{"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    ("timm.optim", "SGDP"): [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    ("timm.optim", "SGDW"): [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    ("bitsandbytes.optim", "AdEMAMix"): [{"t_alpha": 3, "t_beta3": 3}],
}
# Of timm's classes those that may be given it; three more depend on the list then.
_FOREACH = ("AdamWLegacy", "Adopt", "Lion", "NAdamW", "RMSpropTF", "SGDW")


class Config(NamedTuple):
    module: str
    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.module, self.name, *(f"{k}={v}" for k, v in self.options.items())])


def _configs() -> list[Config]:
    made = []
    for module, classes in KNOWN.items():
        for name in classes:
            for options in [{}, *_MORE.get((module, name), [])]:
                made.append(Config(module, name, options))
                if module == "timm.optim" and name in _FOREACH:
                    made.append(Config(module, name, {**options, "foreach": True}))
    return made


CONFIGS = _configs()


@functools.cache
def _declare_vision_operators() -> torch.library.Library | None:
    """What torchvision, which timm and transformers import, asks for by name.

    The wheel that package indexes have is built for CUDA: beside a torch for the CPU its library
    does not load, and its import fails for want of two operators that no optimizer uses.
    """
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def class_of(module: str, name: str) -> Any:
    """The class itself; the test is skipped where its package is not installed."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-optimizers)")
    _declare_vision_operators()
    return getattr(importlib.import_module(module), name)


class Program:
    """Three parameters in two groups, one of them without a gradient in the first step."""

    def __init__(self, config: Config) -> None:
        cls = class_of(config.module, config.name)
        generator = torch.Generator().manual_seed(7)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES
        ]
        options = {"lr": 1e-2, **config.options}
        if config == (config.module, "Adafactor", {}) and config.module != "timm.optim":
            options["relative_step"] = False
        if config.module == "bitsandbytes.optim":
            options |= {"min_8bit_size": 64}
            options |= {"momentum": 0.9} if config.name.startswith("SGD") else {}
        lr = options["lr"]
        groups = [{"params": self.params[:2]}, {"params": self.params[2:]}]
        if lr is not None:
            groups[1]["lr"] = lr / 2
        self.optimizer = cls(groups, **options)

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        used = self.params if self.optimizer.state else self.params[::2]
        loss = torch.stack([(x @ p.reshape(8, -1)).square().mean() for p in used]).sum()
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor) -> float:
        loss = self.backward(x)
        self.optimizer.step()
        return loss.item()

    def step_in_parts(self, x: torch.Tensor, most: int) -> None:
        """Without oomkit: step() once for every `most` parameters of a group."""
        self.backward(x)
        groups = self.optimizer.param_groups
        lists = [g["params"] for g in groups]
        for number, params in enumerate(lists):
            for at in range(0, len(params), most):
                for other, group in enumerate(groups):
                    group["params"] = params[at : at + most] if other == number else []
                self.optimizer.step()
        for group, params in zip(groups, lists, strict=True):
            group["params"] = params

    def picture(self) -> list[Any]:
        """All that the program has, by value."""
        optimizer = self.optimizer
        return [
            [p.detach().clone() for p in self.params],
            [None if p.grad is None else p.grad.clone() for p in self.params],
            [_values(optimizer.state.get(p, {})) for p in self.params],
            [
                _values({k: v for k, v in g.items() if k != "params"})
                for g in optimizer.param_groups
            ],
        ]


def _values(of: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in of.items()}
