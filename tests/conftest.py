"""What every test needs: seeds, one thread unless it asks for more, and no leftovers."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

# Before torch loads OpenMP: waiting threads that spin make a busy machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Convolutions take the memory that the processor's instructions ask for: tests with a budget would
# be of the machine.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# What the process has met is no summary of anything here.
os.environ.setdefault("OOMKIT_SUMMARY", "0")

import pytest
import torch
from helpers.collector import hide_modules
from helpers.sample import LEFT_OUT, mark_rest
from helpers.seeds import seed_all

import oomkit

try:
    from tqdm import tqdm
except ImportError:  # `make gpu` needs torch and pytest alone
    pass
else:
    # The thread that watches its bars wakes now and then, and is in counts of objects.
    tqdm.monitor_interval = 0


class _NoStack:
    """For each kind of device that has not begun, torch.manual_seed() keeps a text of the whole
    stack, which is deep here: a millisecond, 27,000 times."""

    @staticmethod
    def format_stack() -> list[str]:
        return []


for _module in (torch.cuda, torch.xpu, torch.mtia):
    _module.traceback = _NoStack  # type: ignore[attr-defined]

# From the first test on, as in a program that sets a limit before it makes a model: what a test
# before the first limit of a worker keeps would be outside of all later ones.
oomkit.limit_memory(None, device="cpu")

SEED = int(os.environ.get("OOMKIT_TEST_SEED", "20240607"))


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Those that were put off, and arrive between two instructions."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, seed {SEED} (OOMKIT_TEST_SEED)"


# Minutes in a row: a worker that comes to them last keeps the others waiting.
LONG = ("ranks",)


def _is_short(item: pytest.Item) -> bool:
    return item.nodeid.removeprefix("tests/").partition("/")[0] not in LONG


@pytest.hookimpl(tryfirst=True)  # before those with the mark `whole` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rest(items)
    items.sort(key=_is_short)  # the others stay in their order
    dry = os.environ.get("OOMKIT_GPU_DRY") == "1"  # those that can run on the CPU do, small
    if dry or torch.cuda.is_available() or os.environ.get("OOMKIT_REQUIRE_CUDA") == "1":
        return  # required and missing: the tests run and fail
    skip = pytest.mark.skip(reason="needs a CUDA device; OOMKIT_REQUIRE_CUDA=1 makes that fail")
    for item in items:
        if item.get_closest_marker("gpu"):  # not in keywords: a clone may stand in a folder "gpu"
            item.add_marker(skip)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash.setdefault(LEFT_OUT, []).extend(item.nodeid for item in items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported now stays: a search for garbage among it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _modules_are_not_searched_for_garbage() -> None:
    """On a device they are: of a program that hides objects oomkit gives back less."""
    if not torch.cuda.is_available():
        hide_modules()


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded() -> Iterator[None]:
    """Allocation counts repeat exactly for a fixed number of threads: one, by default."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seed_all(SEED)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _without_proof(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that count the runs of a step say so."""
    if "no_proof" not in request.keywords:
        yield
        return
    oomkit._C._prove(False)
    yield
    oomkit._C._prove(True)


@pytest.fixture(autouse=True)
def _without_the_whole_batch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of what is refused, and how, say so: else the whole batch would run."""
    if "refusals" not in request.keywords:
        yield
        return
    oomkit._C._whole_again(False)
    yield
    oomkit._C._whole_again(True)


@pytest.fixture(autouse=True)
def _as_if_nothing_was_compiled() -> Iterator[None]:
    """oomkit looks at a process that has compiled something less closely."""
    yield
    frames, utils = (sys.modules.get(f"torch._dynamo.{name}") for name in ("eval_frame", "utils"))
    if frames is not None and utils is not None and (frames.cached_backends or utils.counters):
        with warnings.catch_warnings():  # torch 2.11 imports what warns of torch.jit
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()
        frames.cached_backends.clear()
        utils.counters.clear()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No limit, no armed fault and no sizes outlive the test that they are of."""
    oomkit._C._keep_sizes(False)  # nor a step: many are of one function of the tests
    yield
    leftover = oomkit._C.fault_stats()[2]
    if leftover:
        oomkit._C.fault_disarm()
    assert not leftover, "an armed fault was left behind"
    assert oomkit.memory("cpu").budget is None, "a CPU budget was left behind"
