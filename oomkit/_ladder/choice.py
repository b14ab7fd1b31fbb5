"""Which modules repeat, and which of them can be computed twice as far as can be seen."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrize import ParametrizationList

from .picture import own_dict

_FEWEST = 3  # of one class in one list
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_SPREAD = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
_SPREAD |= {"FSDPModule"}
_NORMS = torch.nn.modules.batchnorm._NormBase
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one class in one list. Keeps none of them alive."""

    count: int  # places in the list: a module may stand at several
    kind: str
    path: str
    children: list[weakref.ref[torch.nn.Module]]  # each once

    def __str__(self) -> str:
        return f"{self.count} x {self.kind} in {self.path}"


def has_hooks(table: Any) -> bool:
    """Are there hooks that are not oomkit's own? Those do not mind running twice."""
    return any(not str(type(hook).__module__).startswith("oomkit") for hook in table.values())


def global_hooks() -> bool:
    """Hooks on all modules: they would run again with every forward that is."""
    return any(has_hooks(getattr(torch_module, name)) for name in _GLOBAL_HOOKS)


def _is_compiled(function: object) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


def is_closed(module: torch.nn.Module) -> bool:
    """Is what is in it run by somebody else: a compiler, or several processes?"""
    own = own_dict(module)
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return (
        isinstance(module, torch.jit.ScriptModule)
        or (eval_frame is not None and isinstance(module, eval_frame.OptimizedModule))
        or own.get("_compiled_call_impl") is not None
        or any(kind.__name__ in _SPREAD for kind in type(module).__mro__)
        or _is_compiled(own.get("forward"))
        or _is_compiled(getattr(type(module), "forward", None))
    )


def _is_small(module: torch.nn.Module) -> bool:
    """A layer of torch's keeps little more than its input, which is kept in any case."""
    of_torch = str(type(module).__module__).startswith("torch.nn.")
    return of_torch and not module._modules and not isinstance(module, torch.nn.RNNBase)


def refusal(child: torch.nn.Module) -> str | None:
    """Why a module cannot be computed twice, as far as that shows without a call."""
    for module in child.modules():
        kind = type(module).__name__
        if is_closed(module):
            return f"{kind} is compiled, scripted or spread over processes"
        if "_hf_hook" in own_dict(module):
            return f"{kind} is moved between devices by hooks"
        if module is not child and any(has_hooks(getattr(module, name)) for name in _HOOKS):
            return f"{kind} has hooks"
        if module.training and getattr(module, "gradient_checkpointing", False) is True:
            return f"{kind} recomputes by itself"
        if isinstance(module, _NORMS) and module.training and module.running_mean is not None:
            return f"{kind} moves its buffers"
        if isinstance(module, torch.nn.RNNBase) and _draws_unseen(module):
            return f"{kind} draws its dropout from a state of cuDNN that cannot be put back"
    return None


def _draws_unseen(module: torch.nn.RNNBase) -> bool:
    """Whether a second forward would draw another dropout: cuDNN keeps a generator of its own for
    that of RNNs, of which torch shows nothing. The CPU draws from torch's."""
    draws = module.training and module.num_layers > 1 and module.dropout > 0
    return draws and any(p.device.type != "cpu" for p in module.parameters())


def roots_of(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that stand in no other one."""
    inside = {id(c) for m in modules for c in m._modules.values() if c is not None}
    seen: dict[int, torch.nn.Module] = {id(m): m for m in modules if id(m) not in inside}
    return list(seen.values())


def choose(roots: list[torch.nn.Module], left_out: Any) -> list[Group]:
    """The outermost modules that repeat.

    Args:
        left_out: modules that are not to be chosen; what is in them may be.
    """
    seen: set[int] = set()
    return [group for root in roots for group in _walk(root, type(root).__name__, left_out, seen)]


def _walk(module: torch.nn.Module, path: str, left_out: Any, seen: set[int]) -> Iterator[Group]:
    if id(module) in seen or is_closed(module):
        return
    seen.add(id(module))
    if isinstance(module, _LISTS) and not isinstance(module, ParametrizationList):
        yield from _groups(module, path, left_out, seen)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}", left_out, seen)


def _groups(module: torch.nn.Module, path: str, left_out: Any, seen: set[int]) -> Iterator[Group]:
    kinds: dict[type, list[torch.nn.Module]] = {}
    for child in module._modules.values():
        if child is not None:
            kinds.setdefault(type(child), []).append(child)
    for kind, children in kinds.items():
        if len(children) < _FEWEST or _is_small(children[0]):
            continue
        verdicts = {id(c): c in left_out or refusal(c) is not None for c in children}
        chosen = [c for c in children if id(c) not in seen and not verdicts[id(c)]]
        once = {id(c): c for c in chosen}
        seen |= set(once)
        if chosen:
            refs = [weakref.ref(c) for c in once.values()]
            yield Group(len(chosen), kind.__name__, path, refs)
