"""Samples of the memory in use while a training loop runs, for the picture.

A thread looks at the counters; the training step is not touched.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import oomkit

EVERY = 0.0005  # seconds
STEPS = 8  # later ones look alike


class Samples:
    """Time and bytes allocated, and where the model's forward passes and the steps began.

    On the CPU time is the process's CPU time, so that a busy machine does not stretch the
    picture.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, path: Path) -> None:
        self._model, self._device, self._path = model, device.type, path
        self._now = time.process_time if device.type == "cpu" else time.perf_counter
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._memory: list[tuple[float, int]] = []
        self._forwards: list[tuple[float, int]] = []
        self._steps: list[float] = []

    def _sample(self) -> None:
        self._memory.append((self._now(), oomkit.memory(self._device).allocated or 0))

    def _look(self) -> None:
        while not self._stop.wait(EVERY):
            self._sample()

    def _forward(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if module is self._model:
            self._forwards.append((self._now(), len(arguments[0])))

    def step(self) -> None:
        """A step begins, or the last one has ended."""
        self._steps.append(self._now())
        if len(self._steps) > STEPS:
            self._stop.set()

    def __enter__(self) -> Samples:
        self._hook = register_module_forward_pre_hook(self._forward)
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._hook.remove()
        self._sample()
        kept = {"memory": self._memory, "forwards": self._forwards, "steps": self._steps}
        self._path.write_text(json.dumps(kept) + "\n")
