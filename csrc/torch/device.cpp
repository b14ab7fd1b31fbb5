// Memory figures of accelerators through c10::DeviceAllocator. None of these
// initialises a device: initialized() is asked first.
#include "internal.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

namespace oomkit {

namespace {

// NULL when the device type has no such allocator. Can throw: c10::GetAllocator does
// for types without any on some builds, and returns NULL on others.
c10::DeviceAllocator *
find(int device_type)
{
    const int first = static_cast<int>(c10::DeviceType::CPU) + 1;
    if (device_type < first || device_type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES) {
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

} // namespace

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
    } catch (...) {
        // Pluggable allocators have none and say so by throwing.
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

} // namespace oomkit
