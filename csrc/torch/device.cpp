// Memory figures of accelerators through c10::DeviceAllocator. None of these
// initialises a device: initialized() is asked first.
#include "internal.h"

#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <new>

namespace oomkit {

namespace {

constexpr int DEVICE_TYPES = c10::COMPILE_TIME_MAX_DEVICE_TYPES;

// Was the device in use when this process was forked? Its allocator is there then, with
// the parent's figures, but the device must not be touched any more.
bool in_use[DEVICE_TYPES];
bool inherited[DEVICE_TYPES];

// Those that a fork can come upon. Others are not asked: c10::GetAllocator may throw.
constexpr c10::DeviceType FORKED[] = {c10::DeviceType::CUDA, c10::DeviceType::XPU,
                                      c10::DeviceType::PrivateUse1};

// NULL when the device type has no such allocator. Can throw: c10::GetAllocator does
// for types without any on some builds, and returns NULL on others.
c10::DeviceAllocator *
find(int device_type)
{
    const int first = static_cast<int>(c10::DeviceType::CPU) + 1;
    if (device_type < first || device_type >= DEVICE_TYPES || inherited[device_type]) {
        return nullptr;
    }
    c10::Allocator *const found =
        c10::GetAllocator(static_cast<c10::DeviceType>(device_type));
    return dynamic_cast<c10::DeviceAllocator *>(found);
}

// OOMKIT_OK and *allocator, ready to be asked; else OOMKIT_EUNSUPPORTED.
int
find_ready(int device_type, c10::DeviceAllocator **allocator) noexcept
{
    try {
        *allocator = find(device_type);
        const bool ready = *allocator != nullptr && (*allocator)->initialized();
        return ready ? OOMKIT_OK : OOMKIT_EUNSUPPORTED;
    } catch (...) {
        return OOMKIT_EUNSUPPORTED;
    }
}

uint64_t
bytes_of(int64_t value)
{
    return value < 0 ? 0 : static_cast<uint64_t>(value);
}

void
before_fork()
{
    for (const c10::DeviceType forked : FORKED) {
        const int type = static_cast<int>(forked);
        in_use[type] = device_initialized(type) == 1;
    }
}

void
after_fork_in_child()
{
    for (int type = 0; type < DEVICE_TYPES; type++) {
        inherited[type] = inherited[type] || in_use[type];
    }
}

} // namespace

int
device_init() noexcept
{
    static bool fork_handled = false;
    if (!fork_handled &&
        pthread_atfork(before_fork, nullptr, after_fork_in_child) != 0) {
        return OOMKIT_EOOM;
    }
    fork_handled = true;
    return OOMKIT_OK;
}

int
device_initialized(int device_type) noexcept
{
    try {
        c10::DeviceAllocator *const allocator = find(device_type);
        if (allocator == nullptr) {
            return OOMKIT_EUNSUPPORTED;
        }
        return allocator->initialized() ? 1 : 0;
    } catch (...) {
        return OOMKIT_EUNSUPPORTED;
    }
}

int
device_stats(int device_type, int device_index, oomkit_memory_stats *stats) noexcept
{
    c10::DeviceAllocator *allocator = nullptr;
    const int status = find_ready(device_type, &allocator);
    if (status != OOMKIT_OK) {
        return status;
    }
    try {
        // Returned by value: its layout must be that of the headers, which is why the
        // bridge is used with the torch minor it was compiled for and no other.
        const auto all =
            allocator->getDeviceStats(static_cast<c10::DeviceIndex>(device_index));
        constexpr auto aggregate = 0;
        stats->allocated = bytes_of(all.allocated_bytes[aggregate].current);
        stats->reserved = bytes_of(all.reserved_bytes[aggregate].current);
        stats->peak_allocated = bytes_of(all.allocated_bytes[aggregate].peak);
        stats->peak_reserved = bytes_of(all.reserved_bytes[aggregate].peak);
        stats->free = OOMKIT_BRIDGE_UNKNOWN;
        stats->total = OOMKIT_BRIDGE_UNKNOWN;
        stats->num_alloc_retries = bytes_of(all.num_alloc_retries);
        stats->num_ooms = bytes_of(all.num_ooms);
        return OOMKIT_OK;
    } catch (const std::bad_alloc &) {
        return OOMKIT_EOOM; // the host's: it says nothing of the allocator
    } catch (...) {
        // Allocators that have none say so by throwing.
        return OOMKIT_EFAILED;
    }
}

int
device_reset_peak(int device_type, int device_index) noexcept
{
    c10::DeviceAllocator *allocator = nullptr;
    const int status = find_ready(device_type, &allocator);
    if (status != OOMKIT_OK) {
        return status;
    }
    try {
        allocator->resetPeakStats(static_cast<c10::DeviceIndex>(device_index));
        return OOMKIT_OK;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
device_empty_cache(int device_type) noexcept
{
    c10::DeviceAllocator *allocator = nullptr;
    const int status = find_ready(device_type, &allocator);
    if (status != OOMKIT_OK) {
        return status;
    }
    try {
        allocator->emptyCache();
        return OOMKIT_OK;
    } catch (const c10::OutOfMemoryError &) {
        return OOMKIT_EOOM;
    } catch (...) {
        return OOMKIT_EFAILED;
    }
}

int
device_expandable(int device_type) noexcept
{
    c10::DeviceAllocator *allocator = nullptr;
    const int status = find_ready(device_type, &allocator);
    if (status != OOMKIT_OK) {
        return status;
    }
    try {
        // Reads the environment where nobody has yet, which can throw.
        using c10::CachingAllocator::AcceleratorAllocatorConfig;
        return AcceleratorAllocatorConfig::use_expandable_segments() ? 1 : 0;
    } catch (...) {
        return OOMKIT_EUNSUPPORTED;
    }
}

} // namespace oomkit
