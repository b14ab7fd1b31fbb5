"""limit_memory, memory, max_memory_allocated and cleanup."""

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import pytest
import torch
from helpers.messages import message_of
from helpers.own_process import run_program

import oomkit

MIB = 2**20


@pytest.fixture(autouse=True)
def unlimited():
    oomkit.limit_memory(None, device="cpu")
    yield
    oomkit.limit_memory(None, device="cpu")


def allocated():
    return oomkit.memory("cpu").allocated


def model_and_batch():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    return model, torch.randn(128, 64)


# --- the budget ---


def test_an_allocation_over_the_budget_raises_torchs_own_error():
    limit = allocated() + MIB
    with oomkit.limit_memory(limit, device="cpu"):
        used = allocated()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(4 * MIB, dtype=torch.uint8)
    assert caught.type is torch.OutOfMemoryError
    head = (
        "CPU out of memory. Tried to allocate 4.00 MiB. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4194304 bytes. The CPU memory budget is "
    )
    (message,) = caught.value.args
    assert message.startswith(head)
    assert re.fullmatch(
        rf"[\d.]+ \w+ \({limit} bytes\), of which \d+ bytes \([\d.]+ \w+\) are allocated and "
        r"[\d.]+ \w+ are free\.",
        message[len(head) :],
    )
    assert used <= limit


def test_a_request_that_fits_exactly_is_admitted_and_one_byte_more_is_not():
    with oomkit.limit_memory(allocated() + 1000, device="cpu"):
        kept = torch.empty(1000, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8)
        del kept
        torch.empty(1000, dtype=torch.uint8)


def test_a_refused_request_takes_nothing_from_the_budget():
    with oomkit.limit_memory(allocated() + MIB, device="cpu"):
        before = allocated()
        for _ in range(100):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(2 * MIB, dtype=torch.uint8)
        assert allocated() == before


def test_a_request_that_the_machine_cannot_serve_gives_its_reservation_back():
    before = allocated()
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(2**60, dtype=torch.uint8)
    assert allocated() == before


def test_tensors_without_bytes_are_not_refused():
    oomkit.limit_memory(1, device="cpu")
    assert torch.empty(0).numel() == 0


def test_a_limit_below_what_is_used_refuses_until_enough_is_freed():
    big = torch.empty(4 * MIB, dtype=torch.uint8)
    with oomkit.limit_memory(allocated() - 2 * MIB, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64)
        del big
        torch.empty(64)


def test_the_budget_holds_in_forward():
    model, batch = model_and_batch()
    with oomkit.limit_memory(allocated() + 1024, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            model(batch)


def test_the_budget_holds_in_backward():
    model, batch = model_and_batch()
    loss = model(batch).square().mean()
    with oomkit.limit_memory(allocated() + 1024, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()


def test_the_budget_holds_in_the_optimizer():
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).square().mean().backward()
    with oomkit.limit_memory(allocated() + 1024, device="cpu"):
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()


def test_the_budget_holds_in_another_thread():
    caught = []

    def work():
        try:
            torch.empty(2 * MIB, dtype=torch.uint8)
        except BaseException as error:
            caught.append(type(error))

    with oomkit.limit_memory(allocated() + MIB, device="cpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert caught == [torch.OutOfMemoryError]


def test_a_child_made_by_fork_is_unlimited():
    oomkit.limit_memory(allocated() + MIB, device="cpu")
    with warnings.catch_warnings():
        # Python warns about threads it cannot see the use of; the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.empty(8 * MIB, dtype=torch.uint8)
            status = 0 if oomkit.memory("cpu").budget is None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * MIB, dtype=torch.uint8)


def test_tensors_keep_working_when_they_are_resized_cloned_and_saved(tmp_path):
    gc.collect()  # what other tests have left
    before = allocated()
    tensor = torch.arange(1000.0)
    tensor.resize_(4000)
    tensor[1000:] = 0
    torch.save(tensor, tmp_path / "tensor.pt")
    loaded = torch.load(tmp_path / "tensor.pt")
    assert torch.equal(loaded, tensor.clone())
    del tensor, loaded
    gc.collect()
    assert allocated() == before


# --- limit_memory as a call and as a context manager ---


def test_a_plain_call_stays_in_force():
    oomkit.limit_memory("2GiB", device="cpu")
    assert oomkit.memory("cpu").budget == 2 * 2**30


def test_with_puts_the_previous_limit_back():
    oomkit.limit_memory("3GiB", device="cpu")
    with oomkit.limit_memory("2GiB", device="cpu") as outer:
        assert outer.budget == 2 * 2**30
        with oomkit.limit_memory("1GiB", device=torch.device("cpu")):
            assert oomkit.memory("cpu").budget == 2**30
        assert oomkit.memory("cpu").budget == 2 * 2**30
    assert oomkit.memory("cpu").budget == 3 * 2**30


def test_with_puts_the_previous_limit_back_after_an_error():
    with pytest.raises(KeyError):
        with oomkit.limit_memory("1GiB", device="cpu"):
            raise KeyError
    assert oomkit.memory("cpu").budget is None


def test_none_removes_the_limit():
    oomkit.limit_memory("1GiB", device="cpu")
    oomkit.limit_memory(None, device="cpu")
    assert oomkit.memory("cpu").budget is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        (" 3 kb ", 3000),
        ("0.1GiB", 107374182),
        ("4097", 4097),
        ("7 bytes", 7),
        ("8TiB", 8 * 2**40),
        (123456789, 123456789),
    ],
)
def test_budgets_are_parsed_exactly(text, size):
    assert oomkit.limit_memory(text, device="cpu").budget == size


EXPECTED = "limit_memory() expected budget to be an int (bytes) or a str such as '2GiB', got "


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (True, TypeError, EXPECTED + "'bool'"),
        (1.5, TypeError, EXPECTED + "'float'"),
        ([1], TypeError, EXPECTED + "'list'"),
        ("lots", ValueError, EXPECTED + "'lots'"),
        ("2 parsecs", ValueError, EXPECTED + "'2 parsecs'"),
        ("", ValueError, EXPECTED + "''"),
        ("1e9", ValueError, EXPECTED + "'1e9'"),
        ("nan", ValueError, EXPECTED + "'nan'"),
        (0, ValueError, "limit_memory() expected a budget of at least 1 byte, got 0"),
        (-5, ValueError, "limit_memory() expected a budget of at least 1 byte, got -5"),
        ("-2GiB", ValueError, "limit_memory() expected a budget of at least 1 byte, got '-2GiB'"),
        ("0.1 B", ValueError, "limit_memory() expected a budget of at least 1 byte, got '0.1 B'"),
        (2**63, ValueError, f"limit_memory() expected a budget below 8 EiB, got {2**63}"),
    ],
)
def test_a_bad_budget_is_refused_by_name(budget, error, message):
    with pytest.raises(error) as caught:
        oomkit.limit_memory(budget, device="cpu")
    assert message_of(caught.value) == message
    assert oomkit.memory("cpu").budget is None


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(ValueError) as caught:
        oomkit.limit_memory("1GiB", device="abacus")
    assert message_of(caught.value) == "limit_memory() does not know the device 'abacus'"


def test_a_device_that_cannot_be_limited_is_refused_by_name():
    with pytest.raises(ValueError) as caught:
        oomkit.limit_memory("1GiB", device="meta:0")
    assert (
        message_of(caught.value)
        == "limit_memory() can limit 'cpu' and 'cuda' devices, got 'meta:0'"
    )


def test_a_device_of_the_wrong_type_is_refused_by_name():
    with pytest.raises(TypeError) as caught:
        oomkit.memory(1.5)
    assert message_of(caught.value) == (
        "memory() expected device to be a str, an int or a torch.device, got 'float'"
    )


def test_a_cuda_device_that_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError) as caught:
        oomkit.limit_memory("1GiB", device="cuda:99")
    assert message_of(caught.value) == "limit_memory(): there is no device 'cuda:99' here"


def test_a_limit_without_a_device_says_that_it_is_the_cpus():
    script = textwrap.dedent(
        """
        import oomkit
        oomkit.limit_memory("1GiB", device="cpu")
        print("named", flush=True)
        oomkit.limit_memory("1GiB")
        oomkit.limit_memory("2GiB")
        """
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        "named",
        "oomkit: limit_memory() limits the CPU, because there is no accelerator here; pass "
        "device='cpu' to silence this (help: python -m oomkit explain limit-memory)",
    ]


def test_without_a_bridge_the_rebuild_command_is_named():
    script = textwrap.dedent(
        """
        import sys, warnings
        sys.modules["oomkit._bridge"] = None
        warnings.simplefilter("ignore")
        import oomkit, oomkit.testing
        for attempt in (
            lambda: oomkit.limit_memory("1GiB", device="cpu"),
            lambda: oomkit.testing.inject_oom().__enter__(),
        ):
            try:
                attempt()
            except RuntimeError as error:
                print(error)
        info = oomkit.memory("cpu")
        print(info.allocated, info.peak_allocated, oomkit.max_memory_allocated("cpu"))
        """
    )
    done = run_program(script)
    lack = "oomkit._bridge, which is not there for this PyTorch; rebuild oomkit with: "
    command = "pip install --no-build-isolation . (help: python -m oomkit explain bridge)"
    assert done.stdout.splitlines() == [
        f"a CPU memory limit needs {lack}{command}",
        f"fault injection needs {lack}{command}",
        "None None None",
    ]


# --- figures ---


def test_memory_counts_the_bytes_of_tensors():
    before = oomkit.memory("cpu")
    tensor = torch.empty(3 * MIB, dtype=torch.uint8)
    during = oomkit.memory("cpu")
    del tensor
    assert during.allocated == before.allocated + 3 * MIB
    assert oomkit.memory("cpu").allocated == before.allocated
    assert during.peak_allocated >= during.allocated


def test_memory_says_what_the_limit_leaves():
    oomkit.limit_memory(allocated() + 5 * MIB, device="cpu")
    info = oomkit.memory("cpu")
    assert info.free == info.budget - info.allocated == 5 * MIB
    assert info.reserved is None and info.total is None


def test_memory_info_is_immutable():
    info = oomkit.memory("cpu")
    with pytest.raises(AttributeError):
        info.allocated = 0


def test_the_maximum_of_the_run_never_falls():
    peak = oomkit.max_memory_allocated("cpu")
    size = max(peak - allocated(), 0) + MIB
    tensor = torch.empty(size, dtype=torch.uint8)
    high = oomkit.max_memory_allocated("cpu")
    assert high == allocated() > peak
    del tensor
    assert oomkit.max_memory_allocated("cpu") == high


def test_an_accelerator_that_is_not_there_has_no_figures():
    assert set(vars_of(oomkit.memory("xpu:7"))) == {None}
    assert oomkit.max_memory_allocated("xpu:7") is None


def vars_of(info):
    return [getattr(info, name) for name in info.__slots__]


def test_importing_and_asking_does_not_install_the_allocator():
    script = textwrap.dedent(
        """
        import torch, oomkit
        from oomkit import _C
        assert oomkit.memory("cpu").allocated is None
        assert not _C.cpu_stats()["installed"]
        oomkit.limit_memory("1GiB", device="cpu")
        assert _C.cpu_stats()["installed"]
        """
    )
    done = run_program(script)
    assert done.returncode == 0, done.stderr


# --- cleanup ---


def test_cleanup_lets_go_of_the_last_error_and_of_cycles(monkeypatch):
    class Thing:
        pass

    last, cycle = Thing(), Thing()
    cycle.self = cycle
    seen = weakref.ref(last), weakref.ref(cycle)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, last, raising=False)
    monkeypatch.undo()
    sys.last_value = sys.last_traceback = last
    del last, cycle
    oomkit.cleanup()
    assert [ref() for ref in seen] == [None, None]
    assert not hasattr(sys, "last_value") and not hasattr(sys, "last_traceback")


# --- CUDA ---


@pytest.mark.gpu
def test_a_cuda_limit_raises_and_is_put_back():
    torch.cuda.empty_cache()
    more = torch.cuda.get_device_properties(0).total_memory // 2  # than segments have left
    with oomkit.limit_memory("512MiB", device="cuda:0"):
        assert oomkit.memory("cuda:0").budget == 512 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(more, dtype=torch.uint8, device="cuda:0")
    assert oomkit.memory("cuda:0").budget is None
    torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda:0")


@pytest.mark.gpu
def test_cuda_figures_are_torchs():
    tensor = torch.ones(MIB, device="cuda:0")
    info = oomkit.memory("cuda:0")
    assert info.allocated == torch.cuda.memory_allocated(0)
    assert info.reserved == torch.cuda.memory_reserved(0)
    assert info.peak_allocated == torch.cuda.max_memory_allocated(0)
    assert info.peak_reserved == torch.cuda.max_memory_reserved(0)
    assert info.total == torch.cuda.mem_get_info(0)[1]
    assert oomkit.max_memory_allocated("cuda:0") >= info.peak_allocated
    del tensor


def test_a_step_that_gives_up_in_its_first_call_tells_the_budget() -> None:
    step = oomkit.auto_batch(lambda x: x.new_empty(64 * 2**20))
    used = oomkit.memory("cpu").allocated or 0
    with oomkit.limit_memory(used + 2**20, device="cpu") as limit:
        with pytest.raises(oomkit.OutOfMemory) as caught:
            step(torch.ones(2))
    assert caught.value.report is not None
    assert caught.value.report.budget == limit.budget
    assert "budget none" not in caught.value.report.text


def test_figures_for_people_name_what_is_known():
    known = oomkit.MemoryInfo(5 * MIB, None, 6 * MIB, None, 58 * MIB, None, 64 * MIB)
    assert str(known) == (
        "allocated 5.00 MiB, peak allocated 6.00 MiB, free 58.00 MiB, budget 64.00 MiB"
    )
    assert "allocated=5242880" in repr(known)  # exact
    assert str(oomkit.MemoryInfo(*[None] * 7)) == "memory unknown"
