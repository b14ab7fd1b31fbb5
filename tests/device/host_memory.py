"""Host memory beside the scripted device: pinned memory, copies and side streams.

All lies in the memory of the CPU, as everything of that device does: what is on "the device" is
what oomkit's budget counts. New memory is full of garbage (NaN). The device's own stream does
what it is given at once; a side stream as late as it may, when somebody waits for it. What would
go wrong on a device is noted in `faults`: a copy whose memory is gone before it has run, or was got
by the device's own stream after the side stream had waited for that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from device import Device

_EMPTY, _EMPTY_LIKE = torch.empty, torch.empty_like
_COPY, _TO = torch.Tensor.copy_, torch.Tensor.to


class HostMemory:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.pinned: list[StorageWeakRef] = []
        self.faults: list[str] = []
        self.out = self.back = self.beside = self.emptied = self.got = 0
        self.born: dict[int, int] = {}  # storages of the device: number of the allocation
        self.main, self.now = Stream(self), None
        self.now = self.main
        # May raise: of "pin", "stream", "out", "in", "wait".
        self.before: Callable[[str], None] = lambda what: None

    def install(self) -> HostMemory:
        self.device.look_up("torch_empty", self.empty)
        self.device.look_up("torch_empty_like", self.empty_like)
        self.device.look_up("empty_host_cache", self.empty_host_cache)
        self.device.look_up("stream_type", self.side_stream)
        self.device.look_up("stream_now", lambda index: self.main)
        torch.Tensor.copy_ = lambda *args, **names: self.copy(*args, **names)  # type: ignore
        torch.Tensor.to = lambda *args, **names: self.to(*args, **names)  # type: ignore
        return self

    @staticmethod
    def remove() -> None:
        del torch.Tensor.copy_, torch.Tensor.to

    def left(self) -> int:
        """How many blocks of pinned memory are in use."""
        self.pinned = [one for one in self.pinned if not one.expired()]
        return len(self.pinned)

    # --- what oomkit calls in place of torch's ---

    def made(self, tensor: torch.Tensor, device: str, pinned: bool) -> torch.Tensor:
        tensor.untyped_storage().fill_(255)
        if pinned:
            self.pinned.append(StorageWeakRef(tensor.untyped_storage()))
        elif device != "cpu":
            self.got += 1
            self.born[tensor.untyped_storage()._cdata] = self.got
        return tensor

    def empty(self, size: int, *, dtype: Any, device: str, pin_memory: bool) -> torch.Tensor:
        if pin_memory:
            self.before("pin")
        return self.made(_EMPTY(size, dtype=dtype), device, pin_memory)

    def empty_like(self, like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        if pin_memory:
            self.before("pin")
        return self.made(_EMPTY_LIKE(like), device, pin_memory)

    def empty_host_cache(self) -> None:
        self.emptied += 1

    def side_stream(self, device: str) -> Stream:
        self.before("stream")
        assert device == "cuda:0"
        return Stream(self)

    @staticmethod
    def to(tensor: torch.Tensor, *args: Any, **names: Any) -> torch.Tensor:
        """Of torch's own callers, and of what oomkit does outside every call."""
        if args and args[0] == "cuda:0":
            return tensor.clone()
        return _TO(tensor, *args, **names)

    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        place = to.untyped_storage()._cdata
        if any(one.cdata == place for one in self.pinned if not one.expired()):
            self.before("out")
            assert not non_blocking, "the host would read it before it is there"
            self.out += 1
        elif non_blocking:
            self.before("in")
            self.back += 1
            if self.now is not self.main:
                self.now.take(to, source)
                return to
        return _COPY(to, source)


class Stream:
    """The device's own, or one beside it."""

    def __init__(self, host: HostMemory) -> None:
        self.host, self.waited = host, 0
        self.later: list[Callable[[], None]] = []
        self.outer: Stream | None = None

    def take(self, to: torch.Tensor, source: torch.Tensor) -> None:
        storage, host = to.untyped_storage(), self.host
        host.beside += 1
        if host.born[storage._cdata] > self.waited:
            host.faults.append("memory was got after the side stream had waited")
        place, shape = StorageWeakRef(storage), (to.storage_offset(), to.size(), to.stride())
        dtype, value = to.dtype, source.detach()

        def run() -> None:
            found = torch.UntypedStorage._new_with_weak_ptr(place.cdata)
            if found is None:
                host.faults.append("memory was gone before the copy had run")
                return
            _COPY(_EMPTY(0, dtype=dtype).set_(found, *shape), value)

        self.later.append(run)

    def run(self) -> None:
        while self.later:
            self.later.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        self.host.before("wait")
        other.run()
        self.waited = self.host.got

    def synchronize(self) -> None:
        self.run()

    def __del__(self) -> None:
        self.run()  # a device goes on with what it was given

    def __enter__(self) -> Stream:
        self.outer, self.host.now = self.host.now, self
        return self

    def __exit__(self, *raised: object) -> None:
        self.host.now = self.outer
