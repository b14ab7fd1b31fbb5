"""A world from a sentence of the grammar."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from helpers.seeds import seed_all
from torch import Tensor, nn

import oomkit

from . import pieces
from .backwards import BACKWARDS
from .grammar import Sentence
from .judge import Batch, Step, World
from .known_states import Polyak
from .pieces import CLASSES, HIDDEN, LENGTH, TOKENS, WIDE, Columns, Parts


@dataclasses.dataclass
class _Columns:
    columns: dict[str, Any]


def _columns(s: Sentence, call: int) -> Columns:
    draw = torch.Generator().manual_seed(1000 * s.seed + call)
    n = s.rows
    made: Columns
    if s.model == "tokens":
        y = torch.randint(0, CLASSES, (n, LENGTH), generator=draw)
        ends = torch.randint(2, LENGTH + 1, (n, 1), generator=draw)
        y = torch.where(torch.arange(LENGTH) < ends, y, -100)
        made = {"x": torch.randint(0, TOKENS, (n, LENGTH), generator=draw), "y": y}
    else:
        x = torch.randn(n, WIDE, generator=draw, dtype=torch.float64)
        made = {"x": x, "y": torch.randint(0, CLASSES, (n,), generator=draw)}
    made["weight"] = torch.rand(n, generator=draw, dtype=torch.float64) + 0.2
    made["advantage"] = torch.randn(n, generator=draw, dtype=torch.float64)
    mask = torch.rand(n, generator=draw) < 0.6
    mask[0] = True
    made["mask"] = mask
    made["gradient"] = torch.randn(n, CLASSES, generator=draw, dtype=torch.float64)
    if s.reduction == "sum over items":
        made["num_items_in_batch"] = (made["y"] >= 0).sum()
    return made


NEEDED = {
    "weight": ("weights of rows", "normalised weights"),
    "advantage": ("advantages", "normalised advantages"),
    "mask": ("mask", "chosen rows"),
    "gradient": ("of outputs, with rows of the batch",),
    "num_items_in_batch": ("sum over items",),
}


def _names(s: Sentence) -> tuple[str, ...]:
    more = tuple(k for k, users in NEEDED.items() if s.reduction in users or s.backward in users)
    return ("x", "y", *more)


def _packed(s: Sentence, columns: Columns) -> Batch:
    """The arguments of a call."""
    values = [columns[name] for name in _names(s)]
    named = dict(zip(_names(s), values, strict=True))
    kind = s.container
    if kind == "list of rows" and "num_items_in_batch" not in named:
        return (list(zip(*values, strict=True)),)
    return {
        "dict": lambda: (named,),
        "tuple": lambda: (tuple(values),),
        "list": lambda: (values,),
        "data class": lambda: (_Columns(named),),
        "nested": lambda: ({"inputs": {"x": values[0]}, "rest": tuple(values[1:])},),
    }.get(kind, lambda: tuple(values))()


def _read(s: Sentence, batch: Batch) -> Columns:
    names = _names(s)
    only = batch[0]
    if len(batch) > 1:
        return dict(zip(names, batch, strict=True))
    if isinstance(only, _Columns):
        return only.columns
    if isinstance(only, dict) and "inputs" in only:
        return dict(zip(names, (only["inputs"]["x"], *only["rest"]), strict=True))
    if isinstance(only, dict):
        return only
    if s.container == "list of rows" and "num_items_in_batch" not in names:
        return {
            name: torch.stack(c) for name, c in zip(names, zip(*only, strict=True), strict=True)
        }
    return dict(zip(names, only, strict=True))


def _by_norm(g: Tensor) -> Tensor:
    return g / (g.norm() + 1e-6)


ON_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves an activation's gradient": lambda g: g * 0.5,
    "normalises an activation's gradient": _by_norm,
    "clamps an activation's gradient": lambda g: g.clamp(-0.01, 0.01),
}
ON_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubles a parameter's gradient": lambda g: g * 2,
    "clamps a parameter's gradient": lambda g: g.clamp(-0.02, 0.02),
    "sign of a parameter's gradient": lambda g: g.sign(),
}
BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "before the accumulation, clamps": lambda g: g.clamp(-0.02, 0.02),
    "before the accumulation, halves": lambda g: g * 0.5,
}


def _clamp(p: Tensor) -> None:
    if p.grad is not None:
        p.grad.clamp_(-0.02, 0.02)


def _hook(s: Sentence, parts: Parts) -> None:
    """Those that are hung on once."""
    p = parts.parameters()[-2]
    if s.hook in ON_PARAMETERS:
        p.register_hook(ON_PARAMETERS[s.hook])
    elif s.hook == "of a module, by its norm":
        parts.head.register_full_backward_hook(
            lambda m, given, out: (None if given[0] is None else _by_norm(given[0]),)
        )
    elif s.hook in BEFORE:
        parts.memory.node = p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        act = BEFORE[s.hook]
        parts.memory.node.register_prehook(lambda grads: tuple(act(g) for g in grads))
    elif s.hook == "after the accumulation, clamps":
        p.register_post_accumulate_grad_hook(_clamp)


class Program:
    """A step that follows the sentence."""

    def __init__(self, s: Sentence) -> None:
        self.s = s
        seed_all(s.seed)
        self.parts = Parts(pieces.MODELS[s.model]().double(), nn.Linear(HIDDEN, CLASSES).double())
        self.average = copy.deepcopy(self.parts.head).requires_grad_(False)
        self.side: dict[str, Any] = {}
        self.object = types.SimpleNamespace(rows=None, calls=0, running=1.0)
        _hook(s, self.parts)
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        parameters, update = self.parts.parameters(), self.s.update
        self.optimizer: torch.optim.Optimizer
        if update == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02, eps=1e-2)
        elif update == "Polyak's":
            self.optimizer = Polyak(parameters)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.scheduler: Any = None
        if update == "schedule":
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        elif update == "plateau":
            make = torch.optim.lr_scheduler.ReduceLROnPlateau
            self.scheduler = make(self.optimizer, patience=0, factor=0.5, threshold=0.5)
        scales = self.s.backward == "scaler"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scales else None

    # ---- forward

    def features(self, b: Columns) -> Tensor:
        h = pieces.FEATURES[self.s.features](self.parts.body(b["x"]), self.parts)
        if self.s.hook in ON_ACTIVATIONS and h.requires_grad:
            h.register_hook(ON_ACTIVATIONS[self.s.hook])
        rows = self.side.get("rows") if self.s.beside == "rows in a dict" else self.object.rows
        if self.s.beside.startswith("rows"):
            h = h * rows.view(-1, *[1] * (h.dim() - 1))
        return h

    def loss(self, out: Tensor, h: Tensor, b: Columns) -> Tensor:
        s = self.s
        if s.row_loss:
            loss = pieces.REDUCTIONS[s.reduction](pieces.ROW_LOSSES[s.row_loss](out, b["y"]), b)
        elif s.model == "tokens":
            loss = pieces.TOKEN_LOSSES[s.reduction](out, b)
        else:
            loss = pieces.OF_FEATURES[s.reduction](out, h)
        if s.beside == "a counter of calls":
            self.object.calls += 1
            loss = loss / self.object.calls
        elif s.beside == "running loss":
            self.object.running = 0.9 * self.object.running + 0.1 * float(loss.detach())
            loss = loss / self.object.running
        return loss

    def losses(self, b: Columns) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and the loss with what is beside it."""
        h = self.features(b)
        out = self.parts.head(h)
        found = [self.loss(out, h, b)]
        penalty = pieces.PENALTIES[self.s.penalty]
        return out, found + ([penalty(self.parts, h)] if penalty is not None else [])

    # ---- the step

    def step(self, *batch: Any) -> Any:
        s, b = self.s, _read(self.s, batch)
        if s.form == "whole" and s.zero.startswith("first"):
            self.optimizer.zero_grad(set_to_none="zero" not in s.zero)
        if s.form in ("returned", "returned, halved", "backward=True"):
            return sum(self.losses(b)[1])
        out, loss = BACKWARDS[s.backward](self, b)
        norm = self.post()
        if s.form == "whole":
            self.update(loss)
        if s.form == "whole" and s.zero.startswith("last"):
            self.optimizer.zero_grad(set_to_none="zero" not in s.zero)
        return self.returned(out, loss, norm, b)

    def post(self) -> Any:
        """What is done to gradients, where there are any."""
        parameters, kind = self.parts.parameters(), self.s.post
        if kind == "clips the norm" or self.s.returned == "norm":
            most = 0.05 if kind == "clips the norm" else 1e9
            return nn.utils.clip_grad_norm_(parameters, most)
        if kind == "clips values":
            nn.utils.clip_grad_value_(parameters, 0.01)
        for p in parameters:
            if p.grad is None:
                continue
            if kind == "halves":
                p.grad.mul_(0.5)
            elif kind == "centres" and p.dim() > 1:
                p.grad.sub_(p.grad.mean(0))
            elif kind == "normalises":
                p.grad.div_(p.grad.norm() + 1e-3)
            elif kind == "decays":
                p.grad.add_(p.detach(), alpha=0.1)
        return None

    @torch.no_grad()
    def update(self, loss: Tensor) -> None:
        kind = self.s.update
        if kind.startswith("by hand"):
            for p in self.parts.parameters():
                if p.grad is not None:
                    moved = p.data if kind == "by hand" else p
                    moved.sub_(p.grad, alpha=0.05)
            return
        if kind == "none":
            return
        if kind == "rate of the loss":
            self.optimizer.param_groups[0]["lr"] = 0.05 / (1 + loss.item())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step(*([loss] if kind == "Polyak's" else []))  # type: ignore[call-overload]
        if self.scheduler is not None:
            self.scheduler.step(*([loss] if kind == "plateau" else []))
        if kind == "average always" or (kind == "average in the last" and oomkit.current().is_last):
            for old, new in zip(
                self.average.parameters(), self.parts.head.parameters(), strict=True
            ):
                old.mul_(0.8).add_(new, alpha=0.2)

    def returned(self, out: Tensor, loss: Tensor, norm: Any, b: Columns) -> Any:
        loss, out = loss.detach(), out.detach()
        right = out.argmax(-1) == b["y"]
        return {
            "number": loss.item,
            "nothing": lambda: None,
            "outputs": lambda: {"loss": loss, "out": (out, out.argmax(-1))},
            "hits": lambda: (loss, int(right.sum())),
            "share of hits": lambda: (loss, right.double().mean()),
            "norm": lambda: (loss, norm),
            "perplexity": lambda: loss.exp().item(),
            "largest": lambda: out.max().item(),
            "total": lambda: loss.item() * len(out),
            "mean of outputs": lambda: out.flatten(0, -2).mean(0),
            "list of losses": lambda: [loss, loss * 2],
        }.get(self.s.returned, lambda: loss)()

    # ---- its caller

    def drive(self, step: Step, batch: Batch) -> Any:
        s = self.s
        if s.beside.startswith("rows"):
            x = _read(s, batch)["x"]
            self.side["rows"] = self.object.rows = 1 + x.double().flatten(1).mean(1) / TOKENS
        if s.form == "whole":
            return step(*batch)
        made = step(*batch)
        if s.form.startswith("returned"):
            made = made if s.form == "returned" else made / 2
            made.backward()
        if s.form == "accumulating":
            self.object.driven = getattr(self.object, "driven", 0) + 1
        if s.form != "accumulating" or self.object.driven % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return made.detach() if isinstance(made, Tensor) else made

    def remembered(self) -> Any:
        memory = {k: v for k, v in vars(self.parts.memory).items() if k != "node"}
        return [memory, self.object.calls, self.object.running]


def world(s: Sentence) -> World:
    program = Program(s)
    options: dict[str, Any] = {"reduction": "sum"} if s.declared else {}
    if s.form == "backward=True":
        options["backward"] = True
    things = [program.parts.body, program.parts.head, program.average, program.optimizer]
    things += [t for t in (program.scheduler, program.scaler) if t is not None]
    return World(
        program.step,
        things,
        lambda call: _packed(s, _columns(s, call)),
        program.drive,
        options,
        clears=s.form == "whole" and s.zero.startswith("first"),
        remembered=program.remembered,
    )
