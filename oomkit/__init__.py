"""oomkit: a training step that cannot die of out-of-memory and still computes the same thing.

>>> import oomkit
>>> @oomkit.auto_batch
... def step(x, y):
...     optimizer.zero_grad()
...     loss = loss_fn(model(x), y)
...     loss.backward()
...     optimizer.step()
...     return loss.item()
"""

from __future__ import annotations

import warnings as _warnings
from importlib.machinery import PathFinder as _PathFinder
from importlib.util import find_spec as _find_spec
from os import listdir as _listdir
from os.path import exists as _exists
from sys import modules as _modules
from sys import version_info as _version_info

from ._reports.explain import in_page as _see

try:
    import torch as _torch
except ImportError as _error:  # pragma: no cover - exercised in a subprocess without torch
    raise ImportError(
        "oomkit needs torch >= 2.11: `pip install torch`, then build the bridge for it with "
        f"`pip install --no-build-isolation .` in oomkit's sources{_see('not-built')}"
    ) from _error

if _PathFinder.find_spec("oomkit._C", __path__) is None:
    _folder = __path__[0]
    _python = ".".join(map(str, _version_info[:2]))
    from ._reports import installed as _installed

    # In the folder of the sources Python finds them before what `pip install .` has built.
    _other = _installed.hidden_by(__path__)
    if _other is None:
        raise ImportError(
            f"oomkit is not built in {_folder} for Python {_python}: "
            + (
                "run `pip install .` there (torch first; with --no-build-isolation --editable to "
                "work on it)"
                if _exists(f"{_folder}/../setup.py")
                else "install it again for this Python"
            )
            + _see("not-built")
        )
    if not _installed.use(__path__, _other):
        raise ImportError(
            f"oomkit in {_other} was installed from other sources than those in {_folder}, "
            "which Python finds first in this folder: run `pip install .` here again, or start "
            f"Python in another folder{_see('not-built')}"
        )
    __file__ = f"{_other}/__init__.py"

# All of it now: a module that is first imported between an error and its replay makes that
# one wait.
from . import _C, sinks, sizes
from . import optim as _optim
from ._code import alike as _alike
from ._code import iterators as _iterators
from ._code import module_buffers as _module_buffers
from ._code import plain_state as _plain_state
from ._code import side_effects as _side_effects
from ._code import writes as _writes
from ._engine import callables as _callables
from ._engine import closures as _closures
from ._engine import earlier as _earlier
from ._engine import keepsake as _keepsake
from ._engine import loops as _loops
from ._engine import nodes as _nodes
from ._engine import packed as _packed
from ._engine import patches as _patches
from ._engine import returned_loss as _returned_loss
from ._engine import store as _store
from ._engine import withheld as _withheld
from ._ladder import host as _host
from ._ladder import recompute as _recompute
from ._ladder import rows as _rows
from ._ladder import state as _state
from ._ladder import update as _update
from ._proof import diagnose as _diagnose
from ._proof import judge as _proof
from ._proof import replay_rows as _replay_rows
from ._ranks import agreement as _agreement
from ._ranks import parts as _parts
from ._ranks import world as _world
from ._reports import advice as _advice
from ._reports import logs as _logs

__version__ = "0.1.0"


_REBUILD = (
    "build it for your torch with `pip install --no-build-isolation .` in oomkit's sources; "
    "until then oomkit uses torch's own slower calls, without a memory budget for the CPU"
    f"{_C.see('bridge')}"
)


_minor = ".".join(_torch.__version__.split("+")[0].split(".")[:2])
# A wheel has a bridge for each minor release of torch, each in a folder of its own.
__path__.append(f"{__path__[0]}/_bridges/torch_{_minor.replace('.', '_')}")


def _why_missing(error: ImportError) -> str:
    """Why there is no bridge; what a wheel has instead is named."""
    if "oomkit._bridge" not in _modules and _find_spec("oomkit._bridge"):
        return str(error)
    folder = f"{__path__[0]}/_bridges"
    if not _exists(folder):
        return "it was built without PyTorch"
    there = [name.removeprefix("torch_").replace("_", ".") for name in _listdir(folder)]
    there.sort(key=lambda minor: [int(part) for part in minor.split(".")])
    return f"this wheel has bridges to torch {', '.join(there)}, installed is {_minor}"


def _load_bridge() -> object:
    """The bridge's capsule when it was built for the torch that is installed, else None."""
    try:
        from . import _bridge
    except ImportError as error:
        _warnings.warn(
            f"oomkit: the bridge to torch is missing ({_why_missing(error)}); {_REBUILD}",
            stacklevel=3,
        )
        return None
    if _bridge.torch_version != _minor:
        _warnings.warn(
            f"oomkit: the bridge was built for torch {_bridge.torch_version}, installed is "
            f"{_minor}; {_REBUILD}",
            stacklevel=3,
        )
        return None
    return _bridge.api


# What the engine calls that is Python; the names are those of OOMKIT_STATE_GLUE.
_capsule = _load_bridge()
_fits = _C._bind(
    _capsule,
    {
        "accept_no_gradients": _withheld.accept_no_gradients,
        "advise": _advice.advise,
        "update_needs": _optim._update_figures,
        "is_independent": _optim.is_independent,
        "around_parts": _update.around_parts,
        "rows_possible": _rows.rows_possible,
        "update_rows": _rows.update_rows,
        "hosted_state": _state.hosted_state,
        "hosted_tidy": _state.hosted_tidy,
        "owns_memory": _state.owns_memory,
        "host_available": _host.available,
        "left_out": _recompute.LeftOut,
        "recompute_begin": _recompute.recompute_begin,
        "recompute_advise": _recompute.advise,
        "refusal": _nodes.Refusal,
        "tolerance": _diagnose.tolerance,
        "replay_differs": _diagnose.replay_differs,
        "replay_rows": _replay_rows.ReplayRows,
        "uneven_labels": _diagnose.uneven_labels,
        "verification": _diagnose.Verification,
        "proof": _proof.Proof,
        "loop_judge": _loops.loop_judge,
        "cut_sequence": _loops.cut_sequence,
        "close_match": _callables.close_match,
        "argument_problem": _callables.argument_problem,
        "names_sum": _callables.names_sum,
        "tell_sinks": sinks._tell,
        "weight_problem": _callables.weight_problem,
        "is_compiling": _module_buffers.is_compiling,
        "module_runs": _module_buffers.module_runs,
        "watch_effects": _side_effects.watch,
        "parameter_writes": _writes.parameter_writes,
        "keepsake": _keepsake.keepsake,
        "silent_closure": _closures.silent_closure,
        "has_step_hooks": _closures.has_step_hooks,
        "lost_graph": _nodes.lost_graph,
        "stand_in": _earlier.stand_in,
        "plain_places": _plain_state.places,
        "value_copies": _alike.copies,
        "same_copies": _alike.same,
        "step_iterates": _iterators.iterates,
        "watch_schedulers": _patches.watch_schedulers,
        "watch_hooks": _patches.watch_hooks,
        "watch_train": _patches.watch_train,
        "watch_zero_grad": _patches.watch_zero_grad,
        "find_zero_grad": _patches.find_zero_grad,
        "split_loss": _returned_loss.split_loss,
        "modes_then": _returned_loss.modes_then,
        "saved_pack": _returned_loss.saved_pack,
        "saved_unpack": _returned_loss.saved_unpack,
        "memory_place": sizes._place,
        "recall_sizes": sizes._recall,
        "note_sizes": _store.note,
        "ranks_enter": _agreement.enter,
        "ranks_watch": _world.watch,
        "ranks_reduce": _parts.reduce,
    },
)
if _capsule is not None and not _fits:
    _warnings.warn(
        f"oomkit: the bridge does not see the tensors of torch {_torch.__version__} as they are; "
        f"{_REBUILD}",
        stacklevel=2,
    )

_C.register_splitter(
    _torch.nn.utils.rnn.PackedSequence, split=_packed.split, size=_packed.size, join=_packed.join
)

_logs.set_up()

from . import testing  # noqa: E402  (needs the bound extension)
from ._api.budget import Budget, budget  # noqa: E402
from ._api.check import Check, check  # noqa: E402
from ._api.estimate import Estimate, estimate  # noqa: E402
from ._api.map import map  # noqa: E402, A004
from ._C import (  # noqa: E402
    OomkitError,
    OomkitWarning,
    OOMReport,
    OutOfMemory,
    PartialUpdate,
    RankError,
    SplitError,
    StepRecord,
    StepSummary,
    auto_batch,
    chunks,
    classify,
    current,
    guard,
    is_oom_error,
    register_splitter,
)
from .executable import BatchSizeSearch, find_executable_batch_size  # noqa: E402
from .memory import (  # noqa: E402
    MemoryInfo,
    cleanup,
    limit_memory,
    max_memory_allocated,
    memory,
)
from .optim import register_optimizer  # noqa: E402
from .report import report, reset_report  # noqa: E402
from .reserve import Reservation, reserve  # noqa: E402

__all__ = [
    "BatchSizeSearch",
    "Budget",
    "Check",
    "Estimate",
    "MemoryInfo",
    "OOMReport",
    "OomkitError",
    "OomkitWarning",
    "OutOfMemory",
    "PartialUpdate",
    "RankError",
    "Reservation",
    "SplitError",
    "StepRecord",
    "StepSummary",
    "auto_batch",
    "budget",
    "check",
    "estimate",
    "chunks",
    "classify",
    "cleanup",
    "current",
    "find_executable_batch_size",
    "guard",
    "is_oom_error",
    "limit_memory",
    "map",
    "max_memory_allocated",
    "memory",
    "register_optimizer",
    "register_splitter",
    "report",
    "reserve",
    "reset_report",
    "sinks",
    "sizes",
    "testing",
]
