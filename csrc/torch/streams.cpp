// Random generators of the CPU: has one moved?
//
// Their state as torch hands it out is a tensor of 5 KiB, made anew each time. What
// lies behind c10::GeneratorImpl in the object is that state itself, plain values
// without a pointer: compared as bytes it tells the same for a tenth of the price. It
// is never written to, and oomkit._C tries it out before it believes it.
#include "internal.h"

#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <mutex>

#if __has_include(<malloc.h>) && defined(__GLIBC__)
#include <malloc.h>
#define OOMKIT_USABLE_SIZE(pointer) malloc_usable_size(pointer)
#else
#define OOMKIT_USABLE_SIZE(pointer) 0 // there is no other way to know its size
#endif

namespace oomkit {

namespace {

// What is compared of 2.6 KiB, for all of it is not in the cache when a call begins:
// the seed and how many of the 624 words have been drawn come first, then the first
// 100 words; a normal value that is kept for the next draw comes last. A draw moves
// the number; once round, the engine makes all words anew, so that two states that are
// equal here are equal altogether but for a chance of 2^-3200.
constexpr uint64_t HEAD = 448, TAIL = 128;

const char *
behind(c10::GeneratorImpl *generator)
{
    return reinterpret_cast<const char *>(generator) + sizeof(c10::GeneratorImpl);
}

uint64_t
size_of(c10::GeneratorImpl *generator)
{
    const size_t all = OOMKIT_USABLE_SIZE(generator);
    return all > sizeof(c10::GeneratorImpl) ? all - sizeof(c10::GeneratorImpl) : 0;
}

} // namespace

uint64_t
generator_read(void *generator, void *bytes, uint64_t room) noexcept
{
    try {
        auto *impl = static_cast<c10::GeneratorImpl *>(generator);
        if (!impl->device().is_cpu()) {
            return 0;
        }
        const uint64_t size = size_of(impl);
        if (size <= room) {
            const std::scoped_lock lock(impl->mutex_);
            std::memcpy(bytes, behind(impl), size);
        }
        return size;
    } catch (...) {
        return 0;
    }
}

int
generator_same(void *generator, const void *bytes, uint64_t size) noexcept
{
    try {
        auto *impl = static_cast<c10::GeneratorImpl *>(generator);
        const std::scoped_lock lock(impl->mutex_);
        const auto *before = static_cast<const char *>(bytes);
        const char *now = behind(impl);
        if (size < HEAD + TAIL) {
            return std::memcmp(before, now, size) == 0 ? 1 : 0;
        }
        const uint64_t tail = size - TAIL;
        return std::memcmp(before, now, HEAD) == 0 &&
                       std::memcmp(before + tail, now + tail, TAIL) == 0
                   ? 1
                   : 0;
    } catch (...) {
        return 0;
    }
}

} // namespace oomkit
