"""GRPO over several ranks: the mini-batch keeps its size, and the micro-batch finds itself.

By hand everything is halved when a rank runs out of memory, the effective batch included, and it
is another training. Here a policy that is sharded with `fully_shard` is trained as in GRPO: the
old policy samples groups of completions, a reference policy holds the new one back, rewards are
compared within their group. A rank that runs out of memory cuts its mini-batch; the others help it
with their parts of the parameters. Memory that the rollout holds is memory of others: it is there
when a step begins, and what is left is the step's. Both are printed.

    torchrun --nproc-per-node 2 examples/grpo.py            # under a minute
    torchrun --nproc-per-node 2 examples/grpo.py --plain    # the undecorated step: dies

Losses are normalised in three ways, each in a training of its own: by tokens (the mean over all of
them), by sequences (the mean over each one's tokens, then over sequences, as in GRPO) and by groups
(the mean over the tokens of each group, then over groups: each prompt counts alike, whatever is
said to it). Each is compared with the same training without a limit. Exit status 1 when they
disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import oomkit

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GROUPS, COMPLETIONS, LENGTH, VOCABULARY, WIDTH = 6, 4, 24, 48, 48  # of one rank
ROUNDS, MINI_BATCHES = 2, 2
CACHE = 2**16  # numbers that the rollout's engine keeps while the policy is updated
CLIP, KL = 0.2, 0.05
BOUND = 1e-9  # of parameters, in double precision
LOSSES = ("tokens", "sequences", "groups")

console = Console(highlight=False, quiet=RANK > 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand, self.shrink = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(1)
        past = h.cumsum(1) / count  # what came before, on average
        return x + self.shrink(F.gelu(self.expand(torch.cat([h, past], -1))))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of what follows."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


def sharded() -> Policy:
    torch.manual_seed(0)
    policy = Policy()
    for block in policy.blocks:
        fully_shard(block)
    return fully_shard(policy)


def chosen(policy: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens that were chosen, but for the first."""
    return policy(tokens[:, :-1]).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(old: nn.Module, reference: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """Completions of this rank's prompts, and what the loss needs to know of them."""
    generator = torch.Generator().manual_seed(1000 * number + RANK)
    prompts = torch.randint(VOCABULARY, (GROUPS, 1), generator=generator)
    tokens = prompts.repeat_interleave(COMPLETIONS, 0)
    for _ in range(LENGTH):
        next_ = torch.multinomial(old(tokens)[:, -1].exp(), 1, generator=generator)
        tokens = torch.cat([tokens, next_], 1)
    length = torch.randint(LENGTH // 3, LENGTH + 1, (len(tokens), 1), generator=generator)
    mask = (torch.arange(LENGTH) < length).to(torch.float64)
    reward = ((tokens[:, 1:] < VOCABULARY // 4) * mask).sum(1) / mask.sum(1)
    in_group = mask.view(GROUPS, -1).sum(1).repeat_interleave(COMPLETIONS)
    by_group = reward.view(GROUPS, COMPLETIONS)
    advantage = (by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 0.1)
    return {
        "tokens": tokens,
        "mask": mask,
        "in_group": in_group,  # a micro-batch may have a part of a group
        "old": chosen(old, tokens),
        "reference": chosen(reference, tokens),
        "advantage": advantage.flatten(),
    }


def loss_of(policy: nn.Module, batch: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    new, mask = chosen(policy, batch["tokens"]), batch["mask"]
    ratio = (new - batch["old"]).exp()
    gain = torch.minimum(
        ratio * batch["advantage"][:, None],
        ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantage"][:, None],
    )
    away = batch["reference"] - new
    each = (KL * (away.exp() - away - 1) - gain) * mask
    if kind == "tokens":
        return each.sum() / mask.sum()
    if kind == "sequences":
        return (each.sum(1) / mask.sum(1)).mean()
    return (COMPLETIONS * each.sum(1) / batch["in_group"]).mean()  # groups are of one size


Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass
class Trained:
    losses: list[float]
    parameters: list[torch.Tensor]
    step: Any
    before: int
    """Bytes that were allocated before the first rollout."""


def train(kind: str, decorate: Callable[[Step], Step], budget: int | None, rounds: int) -> Trained:
    """Rounds of rollouts and updates."""
    gc.collect()  # models of the training before
    policy, old, reference = sharded(), sharded(), sharded()
    for frozen in (old, reference):
        frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(policy, batch, kind)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    update, losses = decorate(step), []
    before = oomkit.memory("cpu").allocated or 0
    for number in range(rounds):
        rolled = rollout(old, reference, number)
        cache = torch.empty(CACHE)
        rows = len(rolled["tokens"]) // MINI_BATCHES
        for at in range(MINI_BATCHES):
            batch = {name: t[at * rows : (at + 1) * rows] for name, t in rolled.items()}
            with limited(budget):
                losses.append(float(update(batch)))
        del cache
        old.load_state_dict(policy.state_dict())
    parameters = [p.detach().full_tensor().clone() for p in policy.parameters()]
    return Trained(losses, parameters, update, before)


def limited(budget: int | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if budget is None else oomkit.limit_memory(budget, device="cpu")


def decorated(kind: str) -> Callable[[Step], Step]:
    weight = (lambda batch: batch["mask"].sum()) if kind == "tokens" else None
    return lambda step: oomkit.auto_batch(step, weight=weight, label=f"grpo by {kind}")


def budget_of(kind: str, rounds: int) -> int:
    """What most of a mini-batch needs, but not all of it."""
    step = train(kind, decorated(kind), 2**50, rounds).step
    record = max(step.records, key=lambda record: record.peak_allocated)
    return int(record.baseline + 0.75 * (record.peak_allocated - record.baseline))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without oomkit: dies")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rollouts of each training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    good = True
    for kind in options.losses:
        budget = budget_of(kind, options.rounds)
        if options.plain:
            train(kind, lambda step: step, budget, options.rounds)
            console.print("the plain program has not died: the budget is too large")
            return 1
        ours = train(kind, decorated(kind), budget, options.rounds)
        theirs = train(kind, lambda step: step, None, options.rounds)
        both = zip(ours.parameters, theirs.parameters, strict=True)
        far = max(float((a - b).abs().max()) for a, b in both)
        losses, step = ours.losses, ours.step
        first, last = step.records[0], step.records[-1]
        errors = torch.tensor(sum(record.ooms for record in step.records))
        split = torch.tensor(sum(record.accumulation_steps > 1 for record in step.records))
        dist.all_reduce(errors)
        dist.all_reduce(split)  # that a loss like this one does not fit may be known by now
        good &= far <= BOUND and int(split) > 0
        console.print(
            f"by {kind}: mini-batch {last.batch_size} per rank in micro-batches of "
            f"{last.micro_batch_size}, loss {losses[0]:+.4f} to {losses[-1]:+.4f}, "
            f"{int(errors)} OOMs; parameters {'agree' if far <= BOUND else 'DISAGREE'} with those "
            f"without a limit: {far:.1e}",
            markup=False,
            soft_wrap=True,
        )
        console.print(
            f"{ours.before / 1024:.0f} KiB before the rollout, {first.baseline / 1024:.0f} KiB "
            f"with what it holds when the first step begins, {first.peak_allocated / 1024:.0f} KiB "
            f"at its peak, within {budget / 1024:.0f} KiB",
            soft_wrap=True,
        )
        report = oomkit.report(step, group=True)
        console.print(str(report).partition("\n\n")[0], markup=False, soft_wrap=True)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
