// What the files of the bridge share. Nothing outside this folder includes it.
#ifndef OOMKIT_TORCH_INTERNAL_H
#define OOMKIT_TORCH_INTERNAL_H

#include "../core/budget.h"
#include "../core/fault.h"
#include "../core/peak.h"
#include "../core/status.h"
#include "bridge.h"

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/version.h>
#endif

// libc10's C++ ABI is that of one minor release, and only these were looked at. A newer
// minor is let through: what it changed in the headers is compiled in, and oomkit._C
// compares this bridge's answers with torch's own before it uses them.
#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "oomkit needs torch 2.11 or newer"
#endif

namespace oomkit {

// Made once by allocator_init and never destroyed: blocks outlive every module.
struct Counters {
    oomkit_budget *budget;
    oomkit_peak *peak;
    oomkit_fault *fault;
};

extern Counters counters;

// OOMKIT_OK, or OOMKIT_EOOM when memory for the counters cannot be had.
int
allocator_init() noexcept;

int
cpu_install() noexcept;
int
cpu_installed() noexcept;
int
cpu_set_limit(uint64_t bytes) noexcept;
int
cpu_stats(oomkit_cpu_stats *stats) noexcept;
int
cpu_counted(const void *holder, ptrdiff_t offset) noexcept;
int
cpu_peak_push(int *window) noexcept;
uint64_t
cpu_peak_pop(int window) noexcept;
uint64_t
cpu_peak_read(int window) noexcept;
void
exempt_enter() noexcept;
void
exempt_leave() noexcept;
void
exempt_all(int by) noexcept;
int
fault_arm(const oomkit_fault_schedule *schedule) noexcept;
void
fault_disarm() noexcept;
int
fault_stats(uint64_t *seen, uint64_t *fired, int *armed) noexcept;
int
set_phase(int phase) noexcept;

int
modes_get(oomkit_thread_modes *modes) noexcept;
int
modes_set(const oomkit_thread_modes *modes) noexcept;

uint64_t
generator_read(void *generator, void *bytes, uint64_t room) noexcept;
int
generator_same(void *generator, const void *bytes, uint64_t size) noexcept;

int
tensor_facts(const void *holder, ptrdiff_t offset, int64_t dim,
             oomkit_tensor_facts *facts) noexcept;
int
versions(const void *const *holders, ptrdiff_t offset, size_t count, uint32_t *values,
         uint8_t *requires_grad, const void **grads) noexcept;
int
grads_mark(const void *const *holders, ptrdiff_t offset, size_t count,
           oomkit_grad_mark *marks) noexcept;
int
grads_compare(const void *const *holders, ptrdiff_t offset, size_t count,
              const oomkit_grad_mark *marks, uint8_t *states, uint32_t *steps,
              size_t *moved) noexcept;
void
grads_release(oomkit_grad_mark *marks, size_t count) noexcept;

int
bytes_get(const void *holder, ptrdiff_t offset, void *bytes, uint64_t size) noexcept;

int
bytes_set(const void *holder, ptrdiff_t offset, const void *bytes,
          uint64_t size) noexcept;

uint64_t
sample(const void *holder, ptrdiff_t offset) noexcept;

int
storage_facts(const void *holder, ptrdiff_t offset,
              oomkit_storage_facts *facts) noexcept;
int
storages_hold(const void *const *holders, ptrdiff_t offset, size_t count,
              void **holds) noexcept;
void
storages_release(void **holds, size_t count) noexcept;
int
storage_bytes(const void *source, ptrdiff_t offset, uint64_t begin, uint64_t end,
              const void *target) noexcept;
int
tensor_alias(const void *source, ptrdiff_t offset, const void *target) noexcept;
int
form_make(const void *holder, ptrdiff_t offset, void **form) noexcept;
void
form_release(void *form) noexcept;
void
form_versions(const void *form, uint32_t *then, uint32_t *now) noexcept;
int
restored_make(const void *base, ptrdiff_t offset, void **restored) noexcept;
void
restored_release(void *restored) noexcept;
int
restored_apply(const void *restored, const void *form, uint64_t begin,
               const void *target, ptrdiff_t offset) noexcept;
void
unseen_enter(oomkit_thread_keys *keys) noexcept;
void
unseen_leave(const oomkit_thread_keys *keys) noexcept;

// OOMKIT_OK, or OOMKIT_EOOM.
int
device_init() noexcept;
int
device_initialized(int device_type) noexcept;
int
device_stats(int device_type, int device_index, oomkit_memory_stats *stats) noexcept;
int
device_reset_peak(int device_type, int device_index) noexcept;
int
device_empty_cache(int device_type) noexcept;
int
device_expandable(int device_type) noexcept;

} // namespace oomkit

#endif
