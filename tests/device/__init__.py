"""A device without a device: oomkit's C code against a scripted backend, torch's calls faked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.compiled import load_module
from helpers.seen import Seen, world

import oomkit
from oomkit import _C

HERE = Path(__file__).resolve().parent
OK, EREFUSED, EOOM, EINVAL, EUNSUPPORTED, EFAILED = 0, -1, -2, -3, -4, -5
CUDA, XPU, MPS, PRIVATE = 1, 12, 13, 20
MIB = 1 << 20


def load_backend(folder: Path) -> Any:
    return load_module(HERE / "fake_device.c", folder)


class Generator:
    """A counter-based generator as those of devices are: a seed and an offset."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0
        self.error: BaseException | None = None

    def _told(self) -> None:
        if self.error is not None:
            raise self.error

    def initial_seed(self) -> int:
        self._told()
        return self.seed

    def get_offset(self) -> int:
        self._told()
        return self.offset

    def get_state(self) -> None:
        self._told()
        raise AssertionError("a state tensor costs more than seed and offset")

    def manual_seed(self, seed: int) -> Generator:
        self.seed, self.offset = seed, 0
        return self

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self) -> int:
        world.set(self, offset=self.offset + 4)  # oomkit's rule for streams alone puts it back
        return hash((self.seed, self.offset))


class Device:
    """The installed fake: figures by name, and what was called of torch, in order."""

    def __init__(self, backend: Any, monkeypatch: Any) -> None:
        self.__dict__.update(
            backend=backend,
            monkeypatch=monkeypatch,
            events=[],
            generators=(Generator(11), Generator(12)),
            capturing=False,
            contexts=None,
            cuda_in_use=None,
            asked_of=[],
            fraction={},
            info=(60 * MIB, 100 * MIB),
            looked_up={},
            raising={},
        )

    def __getattr__(self, name: str) -> int:
        return self.backend.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            self.backend.set(name, value)

    def note(self, event: str) -> None:
        self.events.append((event, self.empty_calls))
        if event in self.raising:
            raise self.raising[event]

    def ask(self, index: int, answer: Any) -> Any:
        """What the driver, or an allocator that makes a context for it, is asked of a device."""
        self.asked_of.append(index)
        return answer

    def _cuda_in_use(self) -> bool:
        """torch.cuda's own word, which with a pluggable allocator is the only one there is."""
        return self.initialized == 1 if self.cuda_in_use is None else bool(self.cuda_in_use)

    def has_context(self, index: int) -> bool:
        return self.contexts is None or index in self.contexts

    def look_up(self, field: str, value: Any) -> None:
        before = self.backend.look_up(_C, field, value)
        self.looked_up.setdefault(field, before)

    def install(self, type: int = CUDA, index: int = 0, live: bool = True) -> Device:
        self.backend.install(_C, type, index, live)
        self._fake_torch(type)
        return self

    def remove(self) -> None:
        self.backend.uninstall()
        for field, value in self.looked_up.items():
            self.backend.look_up(_C, field, value)

    def _fake_torch(self, type: int) -> None:
        patch = self.monkeypatch.setattr
        cuda, core = torch.cuda, torch._C
        name = {CUDA: "cuda", XPU: "xpu", MPS: "mps", PRIVATE: "privateuseone"}[type]
        patch(core, "_accelerator_getAccelerator", lambda: torch.device(name))
        patch(core, "_accelerator_isAllocatorInitialized", lambda: self.initialized == 1)
        patch(cuda, "is_initialized", lambda: type == CUDA and self._cuda_in_use())
        patch(cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch(cuda, "current_device", lambda: self.index)
        patch(cuda, "default_generators", self.generators)
        patch(cuda, "_lazy_init", self._refuse_init)
        properties = SimpleNamespace(total_memory=100 * MIB, uuid="none")
        patch(cuda, "get_device_properties", lambda index: properties)
        share = self.fraction.get
        patch(
            *(cuda, "get_per_process_memory_fraction"),
            lambda index: self.ask(index, share(index, 1.0)),
        )
        patch(
            *(core, "_accelerator_getMemoryInfo"),
            lambda index: self.ask(index, self.info),
            raising=False,
        )
        patch(core, "_cuda_hasPrimaryContext", self.has_context, raising=False)
        patch(
            core, "_accelerator_synchronizeDevice", lambda index: self.note("wait"), raising=False
        )
        patch(core, "_cuda_clearCublasWorkspaces", lambda: self.note("workspaces"), raising=False)

    @staticmethod
    def _refuse_init() -> None:
        raise AssertionError("oomkit has initialised CUDA")


def out_of_memory(text: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> Exception:
    return torch.OutOfMemoryError(text)


def accelerator_error(text: str, code: int) -> Exception:
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


ROWS = torch.arange(8.0).reshape(8, 1)


class Body:
    """A step that notes the rows of its runs and fails in those that it is told to."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.sizes: Seen[int] = Seen()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(self.sizes) <= len(self.failures):
            failure = self.failures[len(self.sizes) - 1]
            if failure is not None:
                raise failure
        return x * 2


def run(body: Any, **options: Any) -> Any:
    step = oomkit.auto_batch(body, **options)
    with torch.no_grad():
        assert torch.equal(step(ROWS), ROWS * 2)
    return step
