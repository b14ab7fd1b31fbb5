"""What the benchmarks on a device share: where they ran, what they train, how they report."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oomkit

RESULTS = Path(__file__).resolve().parents[2] / "results" / "gpu"
GIB = 1 << 30


@dataclass(frozen=True)
class Setup:
    """Where a script runs. Dry: on the CPU, at a size that only shows that the code works."""

    dry: bool
    output: Path

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def forget(self) -> None:
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    @contextmanager
    def limit(self, size: int | None) -> Iterator[None]:
        if size is None:
            yield
            return
        with oomkit.limit_memory(size, device=self.device):
            yield

    def held(self) -> int:
        found = oomkit.memory(self.device)
        return (found.allocated if self.dry else found.reserved) or 0


def parser(text: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--dry", action="store_true", help="on the CPU, tiny: does the code work?")
    found.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    return found


def setup_of(options: argparse.Namespace) -> Setup:
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --dry runs the code on the CPU")
    if options.dry:
        oomkit.limit_memory(None, device="cpu")  # tensors are counted from here on
    torch.zeros(1, device="cpu" if options.dry else "cuda")  # a device not in use has no figures
    return Setup(options.dry, options.output)


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def _settings() -> dict[str, Any]:
    """Of the caching allocator: as asked for, and as they are in effect."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    found: dict[str, Any] = {name: os.environ[name] for name in names if name in os.environ}
    if torch.cuda.is_initialized():
        found["backend"] = torch.cuda.get_allocator_backend()
        found["in effect"] = torch.cuda.memory._snapshot().get("allocator_settings")
    return found


def machine(setup: Setup) -> dict[str, Any]:
    found = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "oomkit": oomkit.__version__,
        "bridge": oomkit._C.cpu_stats()["bridge"],
        "processor": platform.processor() or platform.machine(),
        "dry": setup.dry,
    }
    if not setup.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "device memory": properties.total_memory,
            "cuda": torch.version.cuda or torch.version.hip,
            "driver": _driver(),
        }
    return {**found, "allocator": _settings()}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def report(setup: Setup, name: str, text: str, rows: Sequence[dict[str, Any]]) -> None:
    """NAME.md and NAME.json in the folder of the results, and the table on the terminal."""
    place = machine(setup)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"# {name}", "", " ".join((text or "").split()), ""]
    lines += [f"- {key}: {value}" for key, value in place.items()]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
    setup.output.mkdir(parents=True, exist_ok=True)
    (setup.output / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (setup.output / f"{name}.json").write_text(
        json.dumps({"name": name, "machine": place, "rows": list(rows)}, indent=1) + "\n",
        encoding="utf-8",
    )
    print("\n".join(lines), flush=True)
