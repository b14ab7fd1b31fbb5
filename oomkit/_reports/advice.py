"""What to do about memory that ran out for good: one rule for each cause that figures show.

`advise` is called where a step gives up, with plain figures of the failed attempts; a rule
answers with a sentence, or with None where its cause is not this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import optim
from .._api.budget import budget as budget_of
from ..report import format_bytes
from .growth import Growth, growth_of, keeper

MOST = 3  # sentences
LARGE_SAMPLE = 4096  # bytes of a sample that can be made smaller
_MIB = 2**20

_RUNGS = {"update": 2, "state": 4, "activations": 8, "recompute": 16, "gradients": 32}


@dataclass(frozen=True)
class Figures:
    """Bytes at the last failure; None where a figure is not known."""

    attempts: Sequence[Mapping[str, Any]]
    phase: str | None  # of the last of them
    device: str
    budget: int | None  # what this process can have
    allocated: int | None
    reserved: int | None
    requested: int | None
    parameters: int  # on the device, as its figures count them
    all_gradients: int  # of every parameter that is trained
    largest_gradient: int
    state: int  # of optimizers, now
    missing_state: int  # that their next update makes
    activations: int | None
    batch: int  # the whole one, on the device
    others: int | None  # there before the step, and none of the above
    optimizers: str  # names
    row_bytes: float
    ladder: int  # rungs that are allowed, as bits
    growth: Growth | None
    whole_parameters: int  # the same with all shards, where they are sharded
    keeper: str | None  # who keeps graphs, and where
    ranks: int
    beside: int | None  # on the device, and not PyTorch's of this process

    @property
    def least(self) -> int:
        """Rows of the smallest micro-batch that was tried."""
        rows = [attempt["micro_batch_size"] for attempt in self.attempts]
        return min((n for n in rows if n), default=0)

    def allows(self, rung: str) -> bool:
        return bool(self.ladder & _RUNGS[rung])


# --- rules ----------------------------------------------------------------------------


def grows(f: Figures) -> str | None:
    """What was there before each step grows from step to step."""
    if f.growth is None or (f.budget is not None and f.growth.total < f.budget // 20):
        return None
    text = (
        f"find what keeps memory from step to step: each of the last {f.growth.steps} steps began "
        f"with {format_bytes(f.growth.each)} more allocated than the step before it"
    )
    if f.keeper is None:
        return f"{text}; keep loss.item() or loss.detach(), not losses with their graphs"
    return f"{text}; {f.keeper} keeps graphs: store loss.item() or loss.detach() there"


def parameters_and_gradients(f: Figures) -> str | None:
    """Parameters and gradients alone do not fit."""
    need = f.parameters + f.all_gradients
    if f.budget is None or f.all_gradients == 0 or need <= f.budget:
        return _one_gradient_more(f, need)
    both = (
        f"parameters ({format_bytes(f.parameters)}) and their gradients "
        f"({format_bytes(f.all_gradients)}) need {format_bytes(need)}"
        if f.parameters
        else f"the gradients of all parameters need {format_bytes(need)}"
    )
    return (
        f"{both} of {format_bytes(f.budget)}: "
        "no batch size, no rung of the ladder and no other optimizer helps; train fewer parameters "
        "(freeze some, or adapters such as LoRA), keep them in bfloat16, which halves both, or "
        "give it a larger budget"
    )


def _one_gradient_more(f: Figures, need: int) -> str | None:
    """They fit, but not beside them what a further micro-batch adds to a gradient."""
    split = bool(f.attempts) and f.attempts[-1].get("accumulation_steps", 1) > 1
    more = need + f.largest_gradient + f.batch + (f.others or 0)
    if f.budget is None or not split or f.phase != "backward" or more <= f.budget:
        return None
    if f.allows("gradients") or f.ranks > 1:
        return None  # it was tried, or is not there for several ranks
    beside = f.batch + (f.others or 0)
    return (
        f"parameters and gradients ({format_bytes(need)}) and what else was there before the step "
        f"({format_bytes(beside)}) leave no room in {format_bytes(f.budget)} for the largest "
        f"gradient of one more micro-batch ({format_bytes(f.largest_gradient)}): smaller "
        "micro-batches do not help, but the rung 'gradients' of ladder=\"auto\" does, which "
        "accumulates gradients in host memory"
    )


def optimizer_state(f: Figures) -> str | None:
    """The optimizer's state does not fit beside them."""
    state = f.state + f.missing_state
    need = f.parameters + f.all_gradients + state + (f.others or 0)
    if f.budget is None or state == 0 or need <= f.budget:
        return None
    if f.phase != "optimizer" and f.state == 0 and f.allows("state"):
        return None  # it is not there yet, and will not be on the device
    if f.parameters + f.all_gradients > f.budget:
        return None
    if need - (f.others or 0) <= f.budget and others_hold(f):
        return None  # it would fit without them
    rung = (
        "the rung 'state' of the ladder, which keeps it in host memory, did not help: it needs "
        "host memory, and an update that can be made in parts"
        if f.allows("update") and f.allows("state")
        else 'ladder=("update", "state") keeps it in host memory'
    )
    return (
        f"the state of {f.optimizers} ({format_bytes(state)}) does not fit next to parameters and "
        f"gradients ({format_bytes(f.parameters + f.all_gradients)}) in "
        f"{format_bytes(f.budget)}: {rung}; Adafactor "
        "needs a row and a column for each matrix in its place, SGD without momentum nothing"
    )


def one_sample(f: Figures) -> str | None:
    """The activations of the smallest micro-batch do not fit."""
    if f.activations is None or f.phase == "optimizer" or parameters_and_gradients(f):
        return None
    need = f.activations + (f.requested or 0)
    if f.least == 0 or need < max(f.parameters, f.all_gradients, f.others or 0):
        return None
    noun = "one sample" if f.least == 1 else f"{f.least} samples"
    ways = []
    if f.row_bytes >= LARGE_SAMPLE:
        ways.append(
            f"make each sample ({format_bytes(int(f.row_bytes))}) smaller: a shorter sequence or "
            "a lower resolution"
        )
    if not f.allows("activations") or not f.allows("recompute"):
        ways.append('let the ladder help: ladder="auto"')
    else:
        ways.append("wrap the model's blocks in torch.utils.checkpoint")
    ways.append("run the forward under autocast in bfloat16")
    return (
        f"the activations of {noun} need at least {format_bytes(need)}, and no smaller "
        f"micro-batch is allowed: {'; or '.join(ways)}"
    )


def fragmented(f: Figures) -> str | None:
    """The memory was there, but in pieces."""
    if f.reserved is None or f.allocated is None or f.requested is None:
        return None
    pieces = f.reserved - f.allocated
    if pieces < f.requested or pieces < (f.budget or 0) // 10:
        return None
    return (
        f"{format_bytes(pieces)} of the reserved {format_bytes(f.reserved)} were free but in "
        f"pieces, and {format_bytes(f.requested)} were wanted in one: start with "
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
    )


def others_hold(f: Figures) -> str | None:
    """Something else has the memory, on the device or in this process."""
    if f.beside is not None and f.beside > max(f.requested or 0, (f.budget or 0) // 10, 512 * _MIB):
        return (
            f"{format_bytes(f.beside)} of {f.device} are not PyTorch's of this process: see who "
            "has them (nvidia-smi), wait for them, or share with oomkit.reserve()"
        )
    known = f.parameters + f.all_gradients + f.state
    if f.growth is None and (f.others or 0) > max(f.requested or 0, known):
        return (
            f"{format_bytes(f.others)} were allocated before the step and are no parameter, "
            "gradient or state of it: free other models, cached batches, stored outputs"
        )
    return None


def many_ranks(f: Figures) -> str | None:
    """Every rank keeps everything."""
    if f.ranks < 2:
        return None
    if f.whole_parameters > f.parameters > 0:
        return (
            f"parameters are sharded, {format_bytes(f.parameters)} of "
            f"{format_bytes(f.whole_parameters)} here: shard over more ranks, and reshard after "
            "the forward"
        )
    mine = f.parameters + f.all_gradients + f.state + f.missing_state
    return (
        f"{f.ranks} ranks keep {format_bytes(mine)} of parameters, gradients and state each: "
        f"sharded (FSDP2, torch.distributed.fsdp.fully_shard) that is "
        f"{format_bytes(mine // f.ranks)} each"
    )


def large_update(f: Figures) -> str | None:
    """What the update allocates on its way does not fit."""
    if f.phase != "optimizer" or optimizer_state(f) or others_hold(f):
        return None
    return (
        f"let {f.optimizers} allocate less in an update: fused=True where it has that, "
        'foreach=False, or optimizer_safety="parts"'
    )


def anything(f: Figures) -> str | None:
    """Where no figure shows the cause."""
    if f.budget is not None:
        return f"give the step more than {format_bytes(f.budget)}, or a smaller model"
    return "free what else is on the device: other models, cached batches, stored outputs"


RULES: tuple[Callable[[Figures], str | None], ...] = (
    grows,
    parameters_and_gradients,
    optimizer_state,
    fragmented,
    others_hold,
    one_sample,
    large_update,
    many_ranks,
)


def sentences(figures: Figures) -> tuple[str, ...]:
    """What the rules say, the most telling first."""
    found = [text for rule in RULES if (text := rule(figures)) is not None]
    return tuple(found[:MOST]) or (str(anything(figures)),)


# --- figures --------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes in this process: of a sharded tensor (DTensor) its own shard."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.numel() * tensor.element_size()


def _missing_state(optimizer: Any) -> int:
    """Bytes of state that the next update makes, where the class is known."""
    try:
        return optim.first_state_bytes(optimizer)
    except Exception:  # a class of the user's: its groups may be anything
        return 0


def _ranks() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def _usable(device: str, last: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(what this process can have, what others have of the device)."""
    limit = last.get("budget_bytes")
    if device == "cpu":
        return limit, None
    try:
        found = budget_of(device)
    except (RuntimeError, ValueError, TypeError):  # a device that scripted or odd torch knows
        return limit, None
    return (found.usable if limit is None else limit), found.beside


def figures_of(facts: Mapping[str, Any]) -> Figures:
    """The figures of a call that gives up, as C has noted them."""
    attempts, holders = facts["attempts"], facts["holders"]
    last = facts["last"]
    trained = [_bytes(p) for p in facts["parameters"] if p.requires_grad]
    usable, beside = _usable(facts["device"], last)
    growth = growth_of(facts["records"])
    optimizers = facts["optimizers"]
    return Figures(
        attempts=attempts,
        phase=last["phase"],
        device=facts["device"],
        budget=usable,
        allocated=last.get("allocated_bytes"),
        reserved=last.get("reserved_bytes"),
        requested=last.get("requested_bytes"),
        parameters=holders.get("parameters", 0),
        all_gradients=sum(trained),
        largest_gradient=max(trained, default=0),
        state=holders.get("optimizer state", 0),
        missing_state=sum(map(_missing_state, optimizers)),
        activations=holders.get("activations and temporaries"),
        batch=holders.get("the batch", 0),
        others=holders.get("everything else"),
        optimizers=" and ".join(dict.fromkeys(type(o).__name__ for o in optimizers)),
        row_bytes=facts["row_bytes"],
        ladder=facts["ladder"],
        growth=growth,
        whole_parameters=sum(p.numel() * p.element_size() for p in facts["parameters"]),
        keeper=None if growth is None else keeper(facts["function"]),
        ranks=_ranks(),
        beside=beside,
    )


def advise(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What to do, in at most three sentences; `facts` are those of csrc/call/describe.c."""
    return sentences(figures_of(facts))
