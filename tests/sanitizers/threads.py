"""Threads that call steps and guards at once, run out of memory, read records, move the limit.

Each thread trains a model of its own; one evaluation and its model belong to all of them. What a
call gives has to be right in each thread, whatever the others do.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import torch

import oomkit

THREADS = 3
ROUNDS = 25
TIGHT, WIDE = 60_000, 1 << 30


BEGUN = "all is imported"  # as planted.py says it


def main() -> int:
    print(BEGUN, flush=True)
    torch.set_num_threads(1)
    logging.getLogger("oomkit").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    torch.manual_seed(0)
    shared = torch.nn.Linear(16, 32, dtype=torch.float64)
    x = torch.randn(32, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = shared(x).tanh()

    @oomkit.auto_batch
    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return shared(x).tanh()

    wrong: list[str] = []
    refused = [0] * THREADS
    done = threading.Event()

    def train(number: int) -> None:
        model = torch.nn.Linear(16, 8, dtype=torch.float64)
        model(x).pow(2).mean().backward()
        wanted = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

        @oomkit.auto_batch(verify=False)
        def step(x: torch.Tensor) -> float:
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.item()

        @oomkit.auto_batch(verify=False)
        def compute_loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).pow(2).mean()

        def returned(x: torch.Tensor) -> None:
            model.zero_grad()
            compute_loss(x).backward()

        for turn in range(ROUNDS):
            with oomkit.guard(on_oom="skip", label="round") as kept:
                try:
                    (step, returned)[turn % 2](x)
                    got = [p.grad for p in model.parameters()]
                    if not all(map(torch.allclose, got, wanted)):
                        wrong.append(f"thread {number}, turn {turn}: gradients")
                    if not torch.allclose(evaluate(x), expected):
                        wrong.append(f"thread {number}, turn {turn}: evaluation")
                except torch.OutOfMemoryError:
                    refused[number] += 1
            len(kept.records), len(step.records), len(evaluate.records)

    def watch() -> None:
        while not done.is_set():
            for limit in (TIGHT, WIDE):
                used = oomkit.memory("cpu").allocated or 0
                with oomkit.limit_memory(used + limit, device="cpu"):
                    for step in oomkit._C.live_steps():
                        tuple(step.records)
                    oomkit.report()
                    done.wait(0.01)

    def checked(number: int) -> None:
        try:
            train(number)
        except BaseException as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=checked, args=(n,)) for n in range(THREADS)]
    watcher = threading.Thread(target=watch)
    for thread in (*workers, watcher):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    ooms = sum(r.ooms for r in evaluate.records)
    print(f"{THREADS * ROUNDS} rounds, {ooms} recovered in the shared step, {sum(refused)} refused")
    for line in wrong[:5]:
        print(line)
    if sum(refused) == THREADS * ROUNDS:
        print("nothing came through")
    return 1 if wrong or sum(refused) == THREADS * ROUNDS else 0


if __name__ == "__main__":
    sys.exit(main())
