"""Recovery once more without the bridge: chosen tests over torch's own calls, all of them faked.

The tensors say that they are on the device; its figures are those of oomkit's allocator for the
CPU.
"""

# ruff: noqa: F401, F811 - tests and fixtures that are used by name

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.bridge_table import Stats, api

import device
from device import CUDA, EOOM, OK, Device, out_of_memory, test_own_errors, test_recovery
from device.test_own_errors import (
    test_a_flush_that_fails_otherwise_raises_what_torch_raises,
    test_a_flush_that_the_driver_had_no_memory_for_is_no_failure,
    test_a_search_waits_for_nothing_of_a_lost_context,
    test_a_sticky_last_error_ends_it,
    test_a_wait_out_of_memory_in_a_context_that_is_lost_passes,
    test_a_wait_that_finds_the_context_lost_ends_it_with_that_error,
    test_a_wait_that_runs_out_of_memory_is_no_failure,
    test_an_error_that_is_none_of_memory_stays_with_the_runtime,
    test_an_interrupt_of_the_flush_is_an_interrupt,
    test_the_last_error_of_another_thread_is_its_own,
)
from device.test_recovery import (
    test_a_call_inside_a_capture_is_the_bare_one,
    test_a_context_that_is_lost_ends_it,
    test_a_context_that_is_lost_ends_searches_too,
    test_a_flush_that_runs_out_of_memory_is_no_failure,
    test_a_full_device_is_not_taken_for_one_in_pieces,
    test_a_function_inside_a_capture_is_not_called_again,
    test_a_guard_flushes_at_its_end_and_at_the_next_begin,
    test_a_guard_inside_a_capture_puts_its_flush_off,
    test_a_sticky_error_passes_untouched,
    test_an_allocator_that_retries_twice_in_a_row_counts_as_a_failure,
    test_an_error_inside_a_capture_is_not_retried,
    test_an_error_of_a_generator_that_is_not_capturing_passes,
    test_an_error_of_the_runtime_is_cleared_before_the_retry,
    test_memory_in_pieces_is_flushed_and_the_same_plan_tried_again,
    test_memory_in_pieces_twice_is_a_size_that_does_not_fit,
    test_nothing_is_freed_into_a_captured_graph,
    test_one_flush_and_nothing_else_where_nothing_is_alive,
    test_side_streams_are_waited_for_before_the_flush_and_nothing_is_collected,
    test_workspaces_of_products_go_at_the_second_failure,
    test_workspaces_stay_while_a_captured_graph_is_alive,
)
from oomkit import _C

NUMBERS = (
    *("initialized", "empty_status", "cached", "pending", "retries_each", "retries"),
    *("empty_calls", "reset_calls", "stats_calls", "index"),
)


class Unbridged(Device):
    """What the scripted backend is with the bridge, by torch's own calls."""

    def __init__(self, backend: Any, monkeypatch: Any) -> None:
        super().__init__(backend, monkeypatch)
        self.__dict__.update(dict.fromkeys(NUMBERS, 0), initialized=1)

    def install(self, type: int = CUDA, index: int = 0, live: bool = True) -> Unbridged:
        assert api.cpu_install() == OK
        self._fake_torch(type)
        self.look_up("accelerator_get_stats", self._stats)
        self.look_up("accelerator_reset_peak", lambda index: None)
        self.look_up("accelerator_empty_cache", self._empty)
        self.backend.without_bridge(_C, True)
        return self

    def remove(self) -> None:
        self.backend.without_bridge(_C, False)
        super().remove()

    def look_up(self, field: str, value: Any) -> None:
        def counted() -> None:
            self.empty_calls += 1
            value()

        super().look_up(field, counted if field == "accelerator_empty_cache" else value)

    def _stats(self, index: int) -> Any:
        self.stats_calls += 1
        self.retries += self.retries_each
        cpu = Stats()
        assert api.cpu_stats(cpu) == OK
        allocated = cpu.allocated + self.pending
        amount = {"all": {"current": allocated, "peak": allocated}}
        reserved = allocated + self.cached
        return {
            "allocated_bytes": amount,
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
            "num_alloc_retries": self.retries,
            "num_ooms": 0,
        }

    def _empty(self) -> None:
        if self.empty_status == EOOM:
            raise out_of_memory()
        self.cached = self.pending = 0


class Placed(torch.Tensor):
    device = property(lambda self: torch.device("cuda:0"))  # type: ignore[assignment]


@pytest.fixture
def cuda(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    rows = device.ROWS.as_subclass(Placed)
    for module in (device, test_recovery, test_own_errors):
        monkeypatch.setattr(module, "ROWS", rows)
    fake = Unbridged(backend, monkeypatch).install()
    yield fake
    fake.remove()
    _C.device_budget_set(CUDA, 0, None)
