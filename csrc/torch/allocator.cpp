// The CPU budget allocator: torch's own allocator with a budget, a peak and planned
// faults in front.
//
// allocate() is called from any thread, mostly without the GIL: it takes no lock of
// ours and calls no Python. It is installed once and never taken out again, because
// blocks made by it must find it for as long as they live; the limit and the faults are
// switched by atomics.
#include "internal.h"
#include "tensor_impl.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <limits>
#include <new>
#include <string>

namespace oomkit {

Counters counters = {nullptr, nullptr, nullptr};

namespace {

// In front of every block. Its size keeps the block at torch's alignment of 64 bytes.
struct alignas(64) Header {
    uint64_t bytes; // as requested, without this header
    uint64_t magic;
    uint64_t counted; // 0 for a block of an exempt allocation
};
static_assert(sizeof(Header) == 64);

constexpr uint64_t MAGIC = 0x6f6f6d6b69742121u;
constexpr size_t LARGEST =
    static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max()) - sizeof(Header);

std::atomic<uint64_t> allocations{0};
thread_local int exempt_depth = 0;  // its address also tells threads apart
std::atomic<int> exempt_threads{0}; // > 0: all are, in which others work for this one

std::string
readable(uint64_t bytes)
{
    static constexpr const char *units[] = {"KiB", "MiB", "GiB", "TiB"};
    char text[48];
    if (bytes < 1024) {
        std::snprintf(text, sizeof text, "%" PRIu64 " bytes", bytes);
        return text;
    }
    double value = static_cast<double>(bytes) / 1024.0;
    size_t unit = 0;
    while (value >= 1024.0 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024.0;
        unit++;
    }
    std::snprintf(text, sizeof text, "%.2f %s", value, units[unit]);
    return text;
}

// The beginning is what accelerate, Lightning and torch's own users match on; do not
// reword it.
std::string
message_head(size_t nbytes)
{
    return "CPU out of memory. Tried to allocate " + readable(nbytes) +
           ". DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
           std::to_string(nbytes) + " bytes. ";
}

[[noreturn]] void
refuse(size_t nbytes, const std::string &why, uint32_t line)
{
    c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    throw c10::OutOfMemoryError({"allocate", "oomkit", line},
                                message_head(nbytes) + why);
}

[[noreturn]] void
refuse_over_budget(size_t nbytes)
{
    const uint64_t limit = oomkit_budget_limit(counters.budget);
    const uint64_t used = oomkit_budget_used(counters.budget);
    const uint64_t left = used < limit ? limit - used : 0;
    refuse(nbytes,
           "The CPU memory budget is " + readable(limit) + " (" +
               std::to_string(limit) + " bytes), of which " + std::to_string(used) +
               " bytes (" + readable(used) + ") are allocated and " + readable(left) +
               " are free.",
           __LINE__);
}

[[noreturn]] void
refuse_injected(size_t nbytes)
{
    refuse(nbytes,
           "This failure was injected by oomkit.testing.inject_oom (matching "
           "allocation " +
               std::to_string(oomkit_fault_seen(counters.fault)) + ").",
           __LINE__);
}

// Admits a counted request or throws. Returns the bytes in use with it.
uint64_t
admit(size_t nbytes)
{
    if (oomkit_fault_check(counters.fault, nbytes) != OOMKIT_OK) {
        refuse_injected(nbytes);
    }
    uint64_t used_after = 0;
    if (oomkit_budget_reserve(counters.budget, nbytes, &used_after) != OOMKIT_OK) {
        refuse_over_budget(nbytes);
    }
    return used_after;
}

// An exempt request: no budget, and only faults that are meant for it.
uint64_t
admit_own(size_t nbytes)
{
    if (oomkit_fault_check_own(counters.fault, nbytes) != OOMKIT_OK) {
        refuse_injected(nbytes);
    }
    return 0;
}

void
release_block(void *data)
{
    if (data == nullptr) {
        return;
    }
    Header *header = static_cast<Header *>(data) - 1;
    c10::profiledCPUMemoryReporter().Delete(data);
    if (header->magic != MAGIC) {
        // Not ours: somebody put this deleter on a block of torch's own.
        c10::free_cpu(data);
        return;
    }
    const uint64_t bytes = header->bytes;
    const bool counted = header->counted != 0;
    header->magic = 0;
    c10::free_cpu(header);
    if (counted) {
        oomkit_budget_release(counters.budget, bytes);
    }
}

// A block with its header filled in. Throws what torch's allocator throws.
void *
make_block(size_t nbytes, bool counted)
{
    if (nbytes > LARGEST) {
        return c10::alloc_cpu(nbytes); // throws: torch has the words for it
    }
    void *memory = c10::alloc_cpu(nbytes + sizeof(Header));
    Header *header = new (memory) Header{nbytes, MAGIC, counted ? 1u : 0u};
    void *data = header + 1;
    try {
        c10::profiledCPUMemoryReporter().New(data, nbytes);
    } catch (...) {
        c10::free_cpu(memory);
        throw;
    }
    return data;
}

struct BudgetAllocator final : c10::Allocator {
    c10::DataPtr
    allocate(size_t nbytes) override
    {
        const c10::Device cpu(c10::DeviceType::CPU);
        if (nbytes == 0) {
            return {nullptr, nullptr, &release_block, cpu};
        }
        const int *depth = &exempt_depth; // it names the thread, too
#if defined(__GNUC__)                     // which would ask for it once more: a call
        __asm__("" : "+r"(depth));
#endif
        const bool counted =
            *depth == 0 && exempt_threads.load(std::memory_order_relaxed) == 0;
        const uint64_t used_after = counted ? admit(nbytes) : admit_own(nbytes);
        void *data;
        try {
            data = make_block(nbytes, counted);
        } catch (...) {
            if (counted) {
                oomkit_budget_release(counters.budget, nbytes);
            }
            c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
            throw;
        }
        if (counted) {
            allocations.fetch_add(1, std::memory_order_relaxed);
            oomkit_peak_note(counters.peak, used_after, depth);
        }
        return {data, data, &release_block, cpu};
    }

    c10::DeleterFnPtr
    raw_deleter() const override
    {
        return &release_block;
    }

    void
    copy_data(void *dest, const void *src, std::size_t count) const override
    {
        default_copy_data(dest, src, count);
    }
};

// Never destroyed: torch keeps the pointer until the process ends.
BudgetAllocator *
the_allocator()
{
    static BudgetAllocator *const instance = new BudgetAllocator;
    return instance;
}

// A worker process made by fork has a memory of its own: the parent's number means
// nothing there, and nobody would disarm its faults.
void
after_fork_in_child()
{
    oomkit_budget_set_limit(counters.budget, OOMKIT_BUDGET_UNLIMITED);
    oomkit_fault_disarm(counters.fault);
}

} // namespace

int
allocator_init() noexcept
{
    if (counters.budget == nullptr) {
        counters.budget = oomkit_budget_create();
    }
    if (counters.peak == nullptr) {
        counters.peak = oomkit_peak_create();
    }
    if (counters.fault == nullptr) {
        counters.fault = oomkit_fault_create();
    }
    const bool complete = counters.budget != nullptr && counters.peak != nullptr &&
                          counters.fault != nullptr;
    return complete ? OOMKIT_OK : OOMKIT_EOOM;
}

int
cpu_install() noexcept
{
    static bool fork_handled = false;
    try {
        c10::Allocator *const ours = the_allocator();
        c10::Allocator *const present = c10::GetCPUAllocator();
        if (present == ours) {
            return OOMKIT_OK;
        }
        if (present != c10::GetDefaultCPUAllocator()) {
            return OOMKIT_EREFUSED;
        }
        if (!fork_handled) {
            if (pthread_atfork(nullptr, nullptr, after_fork_in_child) != 0) {
                return OOMKIT_EOOM;
            }
            fork_handled = true;
        }
        // Priority 0: a higher one would lock everybody else out for good.
        c10::SetCPUAllocator(ours, 0);
        return c10::GetCPUAllocator() == ours ? OOMKIT_OK : OOMKIT_EREFUSED;
    } catch (const std::bad_alloc &) {
        return OOMKIT_EOOM;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
cpu_installed() noexcept
{
    try {
        return c10::GetCPUAllocator() == the_allocator() ? 1 : 0;
    } catch (...) {
        return 0;
    }
}

int
cpu_set_limit(uint64_t bytes) noexcept
{
    oomkit_budget_set_limit(counters.budget, bytes);
    return OOMKIT_OK;
}

int
cpu_stats(oomkit_cpu_stats *stats) noexcept
{
    stats->allocated = oomkit_budget_used(counters.budget);
    stats->limit = oomkit_budget_limit(counters.budget);
    stats->peak_allocated = oomkit_peak_maximum(counters.peak);
    stats->allocations = allocations.load(std::memory_order_relaxed);
    return OOMKIT_OK;
}

int
cpu_counted(const void *holder, ptrdiff_t offset) noexcept
{
    try {
        const c10::TensorImpl *impl = impl_of(holder, offset);
        if (is_opaque(impl) || !impl->has_storage() || !impl->device().is_cpu()) {
            return -1;
        }
        const c10::DataPtr &block = impl->storage().data_ptr();
        if (block.get() == nullptr || block.get_deleter() != &release_block) {
            return block.get() == nullptr ? -1 : 0;
        }
        const Header *header = static_cast<const Header *>(block.get_context()) - 1;
        return header->magic == MAGIC && header->counted != 0 ? 1 : 0;
    } catch (...) {
        return -1;
    }
}

int
cpu_peak_push(int *window) noexcept
{
    return oomkit_peak_push(counters.peak, oomkit_budget_used(counters.budget),
                            &exempt_depth, window);
}

uint64_t
cpu_peak_pop(int window) noexcept
{
    return oomkit_peak_pop(counters.peak, window, &exempt_depth);
}

uint64_t
cpu_peak_read(int window) noexcept
{
    return oomkit_peak_read(counters.peak, window);
}

void
exempt_enter() noexcept
{
    exempt_depth++;
}

void
exempt_leave() noexcept
{
    exempt_depth--;
}

void
exempt_all(int by) noexcept
{
    exempt_threads.fetch_add(by, std::memory_order_relaxed);
}

int
fault_arm(const oomkit_fault_schedule *schedule) noexcept
{
    return oomkit_fault_arm(counters.fault, schedule);
}

void
fault_disarm() noexcept
{
    oomkit_fault_disarm(counters.fault);
}

int
fault_stats(uint64_t *seen, uint64_t *fired, int *armed) noexcept
{
    *seen = oomkit_fault_seen(counters.fault);
    *fired = oomkit_fault_fired(counters.fault);
    *armed = oomkit_fault_armed(counters.fault);
    return OOMKIT_OK;
}

int
set_phase(int phase) noexcept
{
    return oomkit_fault_set_phase(phase);
}

} // namespace oomkit
