"""On a device, as far as a scripted one tells."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "lost-context-retried",
        "an error of the runtime that comes back ends the retries",
        "csrc/python/device_error.c",
        "    again = first != 0 ? last_error() : 0;",
        "    again = 0;",
        ("device/test_recovery.py::test_a_context_that_is_lost_ends_it",),
    ),
    Mutant(
        "side-streams-not-waited-for",
        "what a side stream was given is waited for before the flush",
        "csrc/python/device_reclaim.c",
        "    if (ready && something_is_alive(now, baseline_bytes) &&",
        "    if (0 && something_is_alive(now, baseline_bytes) &&",
        ("device/test_recovery.py",),
    ),
    Mutant(
        "workspaces-of-graphs-cleared",
        "workspaces stay while a captured graph has their addresses",
        "csrc/python/device_reclaim.c",
        "    if (alive != 0) {",
        "    if (alive < 0) {",
        ("device/test_recovery.py::test_workspaces_stay_while_a_captured_graph_is_alive",),
    ),
    Mutant(
        "flush-into-a-capture",
        "a flush that was put off is not made while a graph is captured",
        "csrc/python/device_reclaim.c",
        "    if (capturing != 0) {",
        "    if (capturing < 0) {",
        ("device/test_recovery.py::test_nothing_is_freed_into_a_captured_graph",),
    ),
    Mutant(
        "child-of-a-fork-asks",
        "a forked child leaves the device of its parent alone",
        "csrc/torch/device.cpp",
        "        inherited[type] = inherited[type] || in_use[type];",
        "        inherited[type] = inherited[type] && in_use[type];",
        ("device/test_bridge_device.py::test_a_child_does_not_touch_the_device_of_its_parent",),
    ),
    Mutant(
        "device-streams-stay",
        "random streams of a device are put back",
        "csrc/python/rng.c",
        "    if (call->device.type == OOMKIT_DEVICE_CPU) {",
        "    if (call->device.type >= OOMKIT_DEVICE_CPU) {",
        ("device/test_recovery.py::test_the_devices_streams_are_where_they_were",),
    ),
    Mutant(
        "room-asked-once",
        "a device's room is asked for again: other processes come and go",
        "csrc/python/signature.c",
        "            step->seen_oom && step->calls - step->surveyed_at >= SURVEY_EVERY);",
        "            step->seen_oom && step->calls < step->surveyed_at);",
        ("device/test_figures.py::test_another_process_that_leaves_gives_its_room_back",),
    ),
    Mutant(
        "rest-of-the-device-forgotten",
        "a limit counts for no more than what the device has",
        "csrc/python/signature.c",
        "    return usable < budget ? usable : budget;",
        "    return budget != OOMKIT_UNKNOWN ? budget : usable;",
        ("device/test_figures.py::test_a_limit_is_no_more_than_what_the_device_has",),
    ),
]
