"""The table of oomkit._bridge, called as C calls it: by its function pointers."""

import ctypes
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.bridge_table import (
    EUNSUPPORTED,
    GONE,
    MOVED,
    NEW,
    OK,
    REPLACED,
    SAME,
    DeviceStats,
    Facts,
    Mark,
    Modes,
    Stats,
    Table,
    api,
    bridge,
    pointer,
    size_t,
)
from torch.utils._python_dispatch import TorchDispatchMode

import oomkit


class Holders:
    """Tensors as the bridge takes them: places where a TensorImpl pointer lies."""

    def __init__(self, *tensors):
        self.tensors = tensors
        self.places = [pointer(tensor._cdata) for tensor in tensors]
        self.array = (pointer * len(tensors))(*(ctypes.addressof(p) for p in self.places))


class Marks:
    def __init__(self, *tensors):
        self.holders = Holders(*tensors)
        self.count = len(tensors)
        self.marks = (Mark * self.count)()
        assert api.grads_mark(self.holders.array, 0, self.count, self.marks) == OK

    def compare(self):
        states = (ctypes.c_uint8 * self.count)()
        steps = (ctypes.c_uint32 * self.count)()
        moved = size_t()
        assert (
            api.grads_compare(self.holders.array, 0, self.count, self.marks, states, steps, moved)
            == OK
        )
        assert moved.value == sum(state != SAME for state in states)
        return list(zip(states, steps, strict=True))

    def release(self):
        api.grads_release(self.marks, self.count)


def facts(tensor, dim=0):
    holders, found = Holders(tensor), Facts()
    status = api.tensor_facts(holders.array[0], 0, dim, found)
    return found if status == OK else status


def cpu_stats():
    stats = Stats()
    assert api.cpu_stats(stats) == OK
    return stats


@pytest.fixture
def parameter():
    parameter = torch.nn.Parameter(torch.ones(5))
    (parameter * 2).sum().backward()
    return parameter


# --- the module ---


def test_the_table_is_that_of_the_running_torch():
    assert bridge.torch_version == ".".join(torch.__version__.split(".")[:2])
    assert f"{api.torch_major}.{api.torch_minor}" == bridge.torch_version
    assert api.version == 11
    assert api.size == ctypes.sizeof(Table)


def test_only_the_module_entry_is_exported():
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run(
        [tool, "-D", "--defined-only", bridge.__file__], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listing.stdout.splitlines()] == ["PyInit__bridge"]


def test_without_torch_loaded_it_is_an_import_error():
    script = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('oomkit._bridge', {bridge.__file__!r})\n"
        "try:\n    u.module_from_spec(spec)\n"
        "except ImportError as error:\n    print('libc10' in str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


# --- gradient marks ---


def test_marks_of_a_gradient_that_stays(parameter):
    marks = Marks(parameter)
    assert marks.marks[0].grad == parameter.grad._cdata
    assert marks.marks[0].version == parameter.grad._version
    assert marks.compare() == [(SAME, 0)]
    marks.release()


def test_marks_see_accumulation(parameter):
    marks = Marks(parameter)
    (parameter * 3).sum().backward()
    assert marks.compare() == [(MOVED, 1)]
    (parameter * 3).sum().backward()
    assert marks.compare() == [(MOVED, 2)]
    marks.release()


def test_marks_see_gradients_that_come_go_and_are_replaced(parameter):
    fresh = torch.nn.Parameter(torch.ones(2))
    gone = torch.nn.Parameter(torch.ones(2))
    gone.grad = torch.ones(2)
    marks = Marks(parameter, fresh, gone)
    parameter.grad = parameter.grad.clone()
    fresh.grad = torch.ones(2)
    gone.grad = None
    assert marks.compare() == [(REPLACED, 0), (NEW, 0), (GONE, 0)]
    marks.release()


def test_marks_are_sound_against_address_reuse(parameter):
    reused = 0
    for _ in range(1000):
        before = parameter.grad._cdata, parameter.grad._version
        marks = Marks(parameter)
        parameter.grad = None
        (parameter * 2).sum().backward()
        reused += before == (parameter.grad._cdata, parameter.grad._version)
        assert marks.compare() == [(REPLACED, 0)]
        marks.release()
    assert reused == 0


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_modes_of_the_thread_come_back(grad, autocast):
    modes = Modes()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
        api.modes_get(modes)
        with torch.set_grad_enabled(not grad), torch.autocast("cpu", enabled=not autocast):
            api.modes_set(modes)
            assert torch.is_grad_enabled() is grad
            assert torch.is_autocast_enabled("cpu") is autocast
            assert not torch.is_autocast_enabled("cuda")
            product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
            assert product.requires_grad is grad
            assert (product.dtype is torch.bfloat16) is autocast
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_dispatch_modes_that_have_come_since_are_taken_out():
    """A mode that lacked memory to end would see all that the process does from then on."""
    modes = Modes()
    with TorchDispatchMode():
        api.modes_get(modes)
        api.modes_set(modes)
        assert modes.dispatch == 1 == torch._C._len_torch_dispatch_stack()
        for _ in range(2):
            torch._C._push_on_torch_dispatch_stack(TorchDispatchMode())
        api.modes_set(modes)
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0


def test_marks_do_not_keep_the_bytes_of_a_gradient():
    assert api.cpu_install() == OK
    big = torch.nn.Parameter(torch.ones(1000))
    big.grad = torch.ones(1000)
    before = cpu_stats().allocated
    marks = Marks(big)
    big.grad = None
    assert cpu_stats().allocated == before - 4000
    marks.release()


def test_marks_released_leave_no_count_behind(parameter):
    gradient = torch.ones(5, requires_grad=True)
    other = torch.zeros(5, requires_grad=True)
    parameter.grad = gradient
    marks = [Marks(parameter) for _ in range(100)]
    parameter.grad = None
    for mark in marks[1:]:
        mark.release()
    # swap_tensors refuses a tensor that anybody holds weakly, as one mark still does.
    with pytest.raises(RuntimeError):
        torch.utils.swap_tensors(gradient, other)
    marks[0].release()
    torch.utils.swap_tensors(gradient, other)
    assert gradient.tolist() == [0.0] * 5


def test_marked_parameters_can_be_swapped(parameter):
    marks = Marks(parameter)
    other = torch.nn.Parameter(torch.zeros(5))
    torch.utils.swap_tensors(parameter, other)
    marks.release()
    assert parameter.tolist() == [0.0] * 5


def test_marks_of_tensors_that_never_had_a_gradient():
    with torch.inference_mode():
        inference = torch.ones(2)
    marks = Marks(torch.ones(3), torch.ones(3, requires_grad=True), inference)
    assert [mark.grad for mark in marks.marks] == [None] * 3
    assert marks.compare() == [(SAME, 0)] * 3
    marks.release()


# --- versions and facts ---


def test_versions():
    tensor, other = torch.ones(2), torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    tensor.add_(1).mul_(2)
    leaf = torch.ones(2, requires_grad=True)
    values, flags = (ctypes.c_uint32 * 4)(), (ctypes.c_uint8 * 4)()
    leaf.grad = torch.ones(2).add_(1)
    grads = (ctypes.c_void_p * 5)()
    holders = Holders(tensor, other, inference, leaf)
    assert api.versions(holders.array, 0, 4, values, flags, grads) == OK
    assert list(values) == [tensor._version, 0, 0, 0] == [2, 0, 0, 0]
    assert list(flags) == [0, 0, 0, 1]
    assert list(grads) == [None, None, None, leaf.grad._cdata, leaf.grad._version]
    assert api.versions(holders.array, 0, 3, values, None, grads) == OK
    assert list(grads)[:4] == [None] * 4


def test_facts_of_a_plain_tensor():
    found = facts(torch.empty(4, 3, 2, dtype=torch.float64), dim=1)
    assert (found.ndim, found.size, found.bytes) == (3, 3, 192)
    assert (found.device_type, found.device_index, found.dtype) == (0, -1, 7)
    assert (found.requires_grad, found.is_strided, found.has_version) == (0, 1, 1)


def test_facts_count_dimensions_from_the_end_and_tell_one_that_is_not_there():
    tensor = torch.empty(4, 3, 2)
    assert [facts(tensor, dim).size for dim in (-1, -3, 3, -4)] == [2, 4, -1, -1]
    assert facts(torch.tensor(1.0)).size == -1


def test_the_shape_hash_leaves_the_batch_dimension_out_and_nothing_else():
    reference = facts(torch.empty(4, 3, 2)).shape_hash
    assert facts(torch.empty(9, 3, 2)).shape_hash == reference
    others = [torch.empty(4, 2, 3), torch.empty(4, 3), torch.empty(4, 3, 2, dtype=torch.int32)]
    assert reference not in [facts(other).shape_hash for other in others]


def test_facts_of_sparse_and_inference_tensors():
    assert facts(torch.eye(3).to_sparse()).is_strided == 0
    with torch.inference_mode():
        assert facts(torch.ones(2)).has_version == 0


def test_tensors_whose_sizes_belong_to_python_are_left_to_python():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    assert facts(fake) == EUNSUPPORTED


# --- CPU counters ---


def test_exempt_allocations_are_neither_counted_nor_refused_nor_failed():
    api.cpu_install()
    before = cpu_stats()
    with oomkit.limit_memory(before.allocated + 100, device="cpu"):
        api.exempt_enter()
        api.exempt_enter()
        api.exempt_leave()
        kept = torch.empty(1000)
        api.exempt_leave()
        after = cpu_stats()
        assert (after.allocated, after.allocations) == (before.allocated, before.allocations)
        del kept
        assert cpu_stats().allocated == before.allocated
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1000)


def test_exempt_allocations_pass_an_armed_fault():
    from oomkit.testing import inject_oom

    with inject_oom(times=None) as fault:
        api.exempt_enter()
        torch.empty(1000)
        api.exempt_leave()
        assert fault.seen == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1000)


def test_peak_windows_nest():
    api.cpu_install()
    outer, inner = ctypes.c_int(), ctypes.c_int()
    base = cpu_stats().allocated
    assert api.cpu_peak_push(outer) == OK
    torch.empty(1000)
    assert api.cpu_peak_push(inner) == OK
    torch.empty(250)
    assert api.cpu_peak_read(outer) == base + 4000
    assert api.cpu_peak_pop(inner) == base + 1000
    assert api.cpu_peak_pop(outer) == base + 4000


def test_installing_twice_is_harmless():
    assert api.cpu_install() == OK
    assert api.cpu_install() == OK
    assert api.cpu_installed() == 1


# --- accelerators ---


@pytest.mark.parametrize("device_type", [-1, 0, 14, 20, 21, 1000])
def test_device_types_without_an_allocator_are_unsupported(device_type):
    stats = DeviceStats()
    assert api.device_initialized(device_type) == EUNSUPPORTED
    assert api.device_stats(device_type, 0, stats) == EUNSUPPORTED
    assert api.device_reset_peak(device_type, 0) == EUNSUPPORTED
    assert api.device_empty_cache(device_type) == EUNSUPPORTED


def test_asking_for_cuda_does_not_initialise_it():
    script = (
        "import torch, oomkit\n"
        "oomkit.memory('cuda:0'), oomkit.max_memory_allocated('cuda:0')\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
