// An allocator of a device that is not there, for the bridge to ask: its answers and
// errors are numbers that tests set. Compiled by tests/device/test_bridge_device.py.
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <cstdint>

extern "C" {
int64_t fake_ready = 0;
int64_t fake_stats_fault = 0; // 1: throws what pluggable allocators throw
int64_t fake_reset_fault = 0;
int64_t fake_empty_fault = 0; // 1: out of memory, 2: another error, 3: no c10 error
int64_t fake_calls = 0;       // to the device: everything but initialized()
int64_t fake_allocated = 0, fake_peak = 0, fake_reserved = 0, fake_retries = 0;
void
fake_put_in();
void
fake_take_out();
}

namespace {

struct FakeAllocator final : c10::DeviceAllocator {
    c10::DataPtr
    allocate(size_t) override
    {
        TORCH_CHECK(false, "the fake allocator allocates nothing");
    }

    c10::DeleterFnPtr
    raw_deleter() const override
    {
        return nullptr;
    }

    void
    copy_data(void *dest, const void *src, std::size_t count) const override
    {
        default_copy_data(dest, src, count);
    }

    bool
    initialized() override
    {
        return fake_ready != 0;
    }

    void
    emptyCache(c10::MempoolId_t) override
    {
        fake_calls++;
        if (fake_empty_fault == 1) {
            throw c10::OutOfMemoryError({"emptyCache", "fake", 1}, "out of memory");
        }
        if (fake_empty_fault == 3) {
            throw 3;
        }
        TORCH_CHECK(fake_empty_fault == 0, "a capture is underway");
    }

    void
    recordStream(const c10::DataPtr &, c10::Stream) override
    {
    }

    c10::CachingDeviceAllocator::DeviceStats
    getDeviceStats(c10::DeviceIndex) override
    {
        fake_calls++;
        TORCH_CHECK(fake_stats_fault == 0, "does not yet support getDeviceStats");
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0].current = fake_allocated;
        stats.allocated_bytes[0].peak = fake_peak;
        stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = fake_reserved;
        stats.num_alloc_retries = fake_retries;
        stats.num_ooms = 2;
        return stats;
    }

    void
    resetAccumulatedStats(c10::DeviceIndex) override
    {
    }

    void
    resetPeakStats(c10::DeviceIndex) override
    {
        fake_calls++;
        TORCH_CHECK(fake_reset_fault == 0, "does not yet support resetPeakStats");
        fake_peak = fake_allocated;
    }
};

FakeAllocator *
the_allocator()
{
    static FakeAllocator *const instance = new FakeAllocator; // torch may keep it
    return instance;
}

} // namespace

void
fake_put_in()
{
    c10::SetAllocator(c10::DeviceType::PrivateUse1, the_allocator(), 0);
}

void
fake_take_out()
{
    c10::SetAllocator(c10::DeviceType::PrivateUse1, nullptr, 0);
}
