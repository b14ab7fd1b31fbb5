"""Which tests run under which tool, and why each does. A line: file, what to leave out, reason."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    file: str
    why: str
    leave_out: str = ""
    """As pytest's -k has it: what takes long and passes through no other code."""


ADDRESS = [
    Part(
        "engine/test_exact.py", "every allocation of a step fails: roll-back, drop, replay", "gpt"
    ),
    Part("deferred/test_returned.py", "pending calls, which the nodes of a graph own"),
    Part("deferred/test_returned_several.py", "several of them, freed in any order"),
    Part("deferred/test_returned_nested.py", "backwards inside backwards"),
    Part("trees/test_batch_kinds.py", "taking containers apart and making them anew"),
    Part("trees/test_batch_splitters.py", "types with callables of the user's"),
    Part("result/test_join_outputs.py", "joining: the deepest recursion over objects"),
    Part("loop/test_guard.py", "clearing frames of the caller's exception"),
    Part("errors/test_drop.py", "the same for a step, with whatever hangs at the exception"),
    Part("memory/test_memory.py", "limits, peaks, figures: the bridge"),
    Part("bridge/test_inject.py", "schedules of faults: the bridge"),
    Part("undo/test_streams.py", "states of generators, held as bytes"),
    Part("python_types/test_binding_copies.py", "copies and pickles of steps"),
    Part("deferred/test_returned_threads.py", "threads: what one frees while another looks"),
]
LEAKS = [
    Part("deferred/test_returned.py", "a deferred call's parts, eager gradients, hooks of nodes"),
    Part("trees/test_batch_kinds.py", "trees of arguments"),
    Part("result/test_join_outputs.py", "joined results and what was refused"),
    Part("loop/test_guard.py", "records and texts of failures"),
    Part("undo/test_streams.py", "states of generators"),
    Part("accum/test_refuse.py", "errors on the way: what was begun and not finished"),
]
THREAD = [
    Part("deferred/test_returned_threads.py", "backwards of two threads through waiting losses"),
    Part("bridge/test_bridge.py", "the allocator, from threads without the interpreter's lock"),
]
