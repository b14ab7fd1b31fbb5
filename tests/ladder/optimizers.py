"""Configurations of torch's optimizers, and a small program for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"lr": torch.tensor(1e-2)}),
    ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Rprop", {}),
    ("ASGD", {"weight_decay": 0.1, "t0": 2}),  # its averaging begins
    ("Adafactor", {"weight_decay": 0.1}),
    ("Muon", {}),
]


class Config(NamedTuple):
    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


def _configs() -> list[Config]:
    made = []
    for name, options in _OPTIONS:
        for variant in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if name == "Muon":
                if variant != {"fused": True}:
                    continue
                variant = {}
            config = Config(name, {**options, **variant})
            try:
                make(config, [torch.nn.Parameter(torch.zeros(2, 2))])
            except (TypeError, RuntimeError, ValueError):
                continue  # it has no fused variant on the CPU, or lists take no tensor
            made.append(config)
    return made


def make(config: Config, params: list[torch.nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, config.name)
    options = {"lr": 1e-2, **config.options, **more}
    lr = options.pop("lr")
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": lr * 0.5}]
    return cls(groups if len(params) > 2 else params, lr=lr, **options)


class Program:
    """Five matrices in two groups, one of them without a gradient in the first step."""

    def __init__(
        self, config: Config, dtype: torch.dtype = torch.float32, width: int = 16, **more: Any
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.params = [
            torch.nn.Parameter(torch.randn(8, width + 4 * i, generator=generator).to(dtype))
            for i in range(5)
        ]
        self.optimizer = make(config, self.params, **more)
        # torch's fused SGD takes no momentum for some of the parameters alone.
        self.all_used = config.name == "SGD" and bool(config.options.get("fused"))

    def step(self, x: torch.Tensor) -> float:
        loss = self.backward(x)
        self.optimizer.step()
        return loss

    def backward(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        used = self.params if self.optimizer.state or self.all_used else self.params[:4]
        loss = torch.stack([(x @ p).square().mean() for p in used]).sum()
        loss.backward()
        return loss.item()

    def picture(self) -> dict[str, Any]:
        """Everything that the program has, by value."""
        return {
            "params": [p.detach().clone() for p in self.params],
            "grads": [None if p.grad is None else p.grad.clone() for p in self.params],
            "state": [
                {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in self.optimizer.state.get(p, {}).items()
                }
                for p in self.params
            ],
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
            ],
            "lists": [[id(p) for p in g["params"]] for g in self.optimizer.param_groups],
        }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


CONFIGS = _configs()
