/* The only door between plain C and libc10: one struct of function pointers.
 *
 * oomkit._bridge hands a pointer to it in a PyCapsule named OOMKIT_BRIDGE_CAPSULE.
 * Every entry is noexcept and reports by status code; nothing that is allocated on one
 * side is freed on the other, save the weak holds of gradient marks (grads_mark /
 * grads_release). No entry calls Python or needs the GIL; those of the table that
 * stands in where there is no bridge (py/plain_bridge.c) may.
 *
 * A tensor is given as its Python object seen as plain memory: `holder` + `offset` is
 * where the TensorImpl pointer lies (the offset is calibrated by oomkit._C at import
 * against `tensor._cdata`). The caller keeps the holder alive. */
#ifndef OOMKIT_TORCH_BRIDGE_H
#define OOMKIT_TORCH_BRIDGE_H

#include <stddef.h>
#include <stdint.h>

#include "../core/fault.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OOMKIT_BRIDGE_CAPSULE "oomkit._bridge.api"
#define OOMKIT_BRIDGE_VERSION 11u
#define OOMKIT_BRIDGE_UNKNOWN UINT64_MAX

/* Mark of a gradient: which tensor it was and at which version. `grad` is held weakly:
 * its address stays reserved, its storage may be freed. NULL = there was none. */
typedef struct oomkit_grad_mark {
    void *grad;
    uint32_t version;
} oomkit_grad_mark;

enum { /* what grads_compare finds, one byte per parameter */
       OOMKIT_GRAD_SAME = 0,
       OOMKIT_GRAD_MOVED = 1,    /* the same tensor at another version */
       OOMKIT_GRAD_REPLACED = 2, /* another tensor */
       OOMKIT_GRAD_NEW = 3,      /* there was none, now there is */
       OOMKIT_GRAD_GONE = 4      /* there was one, now there is none */
};

typedef struct oomkit_tensor_facts {
    int64_t ndim;
    int64_t size; /* of the dimension asked for; -1 when it has no such dimension */
    uint64_t shape_hash; /* of dtype and of all sizes but that dimension */
    uint64_t bytes;      /* numel * element size */
    uint32_t version;    /* 0 when it has none (inference tensor) */
    int32_t has_version;
    int32_t dtype;        /* c10::ScalarType */
    int32_t device_type;  /* c10::DeviceType: 0 cpu, 1 cuda ... */
    int32_t device_index; /* -1 for cpu */
    int32_t requires_grad;
    int32_t is_strided; /* plain strided layout: views can be made of it */
    int32_t is_leaf;    /* -1 where requires_grad is set: c10 cannot tell these */
} oomkit_tensor_facts;

/* Modes of a thread that torch's context managers move. */
typedef struct oomkit_thread_modes {
    uint64_t autocast; /* the dispatch keys of the autocasts that are off */
    int32_t grad;      /* are gradients recorded? */
    int32_t dispatch;  /* how many dispatch modes are active; -1: not known */
} oomkit_thread_modes;

/* Where the values of a plain strided tensor lie. Addresses are only compared. */
typedef struct oomkit_storage_facts {
    const void *storage;  /* the StorageImpl */
    const void *data;     /* its first byte */
    const void *counter;  /* that counts the tensor's versions */
    uint64_t bytes;       /* of the whole storage */
    uint64_t begin, end;  /* bytes of it that the tensor reaches */
    uint32_t version;     /* of the tensor now */
    int32_t device_type;  /* c10::DeviceType */
    int32_t device_index; /* -1 for cpu */
    int32_t requires_grad;
} oomkit_storage_facts;

/* Dispatch keys of a thread that were taken away for a while. */
typedef struct oomkit_thread_keys {
    uint64_t included, excluded;
} oomkit_thread_keys;

typedef struct oomkit_memory_stats {
    uint64_t allocated, reserved;           /* bytes now */
    uint64_t peak_allocated, peak_reserved; /* since the last reset */
    uint64_t free, total;                   /* of the device, OOMKIT_BRIDGE_UNKNOWN */
    uint64_t num_alloc_retries, num_ooms;
} oomkit_memory_stats;

typedef struct oomkit_cpu_stats {
    uint64_t allocated;      /* tensor bytes that went through our allocator */
    uint64_t limit;          /* OOMKIT_BRIDGE_UNKNOWN = none */
    uint64_t peak_allocated; /* since the allocator was installed */
    uint64_t allocations;    /* number of them */
} oomkit_cpu_stats;

typedef struct oomkit_bridge {
    uint32_t version;                 /* OOMKIT_BRIDGE_VERSION */
    uint32_t size;                    /* sizeof(oomkit_bridge) */
    int32_t torch_major, torch_minor; /* of the headers it was compiled with */

    /* --- tensors --- */
    int (*tensor_facts)(const void *holder, ptrdiff_t offset, int64_t dim,
                        oomkit_tensor_facts *facts);
    /* versions[i] of each tensor (0 for one without), whether it requires grad, and
     * which tensor its gradient is (NULL: none), to be compared alone; grads[count] is
     * the version of the first of them. Each may be NULL. */
    int (*versions)(const void *const *holders, ptrdiff_t offset, size_t count,
                    uint32_t *versions, uint8_t *requires_grad, const void **grads);
    /* Marks the gradient of each tensor; every mark must be released. */
    int (*grads_mark)(const void *const *holders, ptrdiff_t offset, size_t count,
                      oomkit_grad_mark *marks);
    /* states[i] = OOMKIT_GRAD_*; *moved = how many are not OOMKIT_GRAD_SAME. For MOVED,
     * steps[i] (steps may be NULL) is by how much the version grew. */
    int (*grads_compare)(const void *const *holders, ptrdiff_t offset, size_t count,
                         const oomkit_grad_mark *marks, uint8_t *states,
                         uint32_t *steps, size_t *moved);
    void (*grads_release)(oomkit_grad_mark *marks, size_t count);

    /* The bytes of a plain, contiguous CPU tensor, out and in again. `size` must be
     * what it has, else (and for every other tensor) OOMKIT_EUNSUPPORTED. No version is
     * bumped. */
    int (*bytes_get)(const void *holder, ptrdiff_t offset, void *bytes, uint64_t size);
    int (*bytes_set)(const void *holder, ptrdiff_t offset, const void *bytes,
                     uint64_t size);

    /* A hash of 64 values spread over a plain CPU tensor: what `.data` writes change
     * while no version does. 0 for every other tensor. */
    uint64_t (*sample)(const void *holder, ptrdiff_t offset);

    /* --- storages: NULL where there is no bridge, see oomkit_offload_possible() --- */
    /* OOMKIT_EUNSUPPORTED for what is not a plain strided tensor with a storage and a
     * version: subclasses that dispatch, sparse, nested, quantized, meta, conjugated,
     * negated, functional and inference tensors. */
    int (*storage_facts)(const void *holder, ptrdiff_t offset,
                         oomkit_storage_facts *facts);
    /* Holds the storage of each tensor weakly: its address stays taken, its memory can
     * be freed. NULL for a tensor without one. Every hold must be released. */
    int (*storages_hold)(const void *const *holders, ptrdiff_t offset, size_t count,
                         void **holds);
    void (*storages_release)(void **holds, size_t count);
    /* `target`, a plain tensor that is nobody else's, becomes the bytes [begin, end) of
     * the storage of `source`, as one dimension of its own dtype of one byte. */
    int (*storage_bytes)(const void *source, ptrdiff_t offset, uint64_t begin,
                         uint64_t end, const void *target);
    /* `target` becomes another tensor of the same values and the same versions, without
     * a graph. */
    int (*tensor_alias)(const void *source, ptrdiff_t offset, const void *target);

    /* A form is a tensor but for its values: sizes, strides, place in its storage,
     * dtype; and the counter of its versions. Every form must be released. */
    int (*form_make)(const void *holder, ptrdiff_t offset, void **form);
    void (*form_release)(void *form);
    /* The version when the form was made, and the one now. */
    void (*form_versions)(const void *form, uint32_t *then, uint32_t *now);

    /* What holds the storage of `base` (bytes that were brought back) weakly, and knows
     * its version and the stream of this thread. It must be released. */
    int (*restored_make)(const void *base, ptrdiff_t offset, void **restored);
    void (*restored_release)(void *restored);
    /* `target` gets the form, its values in the storage that was brought back, which
     * begins `begin` bytes into the old one. 1; 0 when that storage is gone, has been
     * written to since, or is another stream's; or an error. */
    int (*restored_apply)(const void *restored, const void *form, uint64_t begin,
                          const void *target, ptrdiff_t offset);

    /* --- modes of this thread --- */
    /* Likewise. Between enter and leave no mode written in Python (TorchDispatchMode)
     * sees what this thread does. */
    void (*unseen_enter)(oomkit_thread_keys *keys);
    void (*unseen_leave)(const oomkit_thread_keys *keys);
    /* Setting takes out dispatch modes that have come since: a mode that lacked memory
     * to end stays active. */
    int (*modes_get)(oomkit_thread_modes *modes);
    int (*modes_set)(const oomkit_thread_modes *modes);

    /* --- random generators of the CPU (Generator._cdata) --- */
    /* Its state as bytes that mean something to generator_same alone. How many there
     * are (none are written when that is more than `room`); 0 when it cannot be told.
     */
    uint64_t (*generator_read)(void *generator, void *bytes, uint64_t room);
    int (*generator_same)(void *generator, const void *bytes, uint64_t size);

    /* --- CPU budget allocator --- */
    int (*cpu_install)(
        void); /* idempotent; OOMKIT_EREFUSED: somebody else's is there */
    int (*cpu_installed)(void);
    int (*cpu_set_limit)(uint64_t bytes); /* OOMKIT_BRIDGE_UNKNOWN = none */
    int (*cpu_stats)(oomkit_cpu_stats *stats);
    /* Is the memory of a tensor among what is counted? 1; 0 of one that was made
     * before the allocator was there, or lies in memory of somebody else; -1 where that
     * cannot be told. */
    int (*cpu_counted)(const void *holder, ptrdiff_t offset);
    int (*cpu_peak_push)(int *window);
    uint64_t (*cpu_peak_pop)(int window);
    uint64_t (*cpu_peak_read)(int window);
    /* Allocations of this thread between enter and leave (they nest) are neither
     * counted nor refused, and fail only by a schedule that names the phase recovery.
     */
    void (*exempt_enter)(void);
    void (*exempt_leave)(void);
    /* The same of all threads; `by` is 1, then -1. */
    void (*exempt_all)(int by);

    /* --- fault injection (CPU allocator) --- */
    int (*fault_arm)(const oomkit_fault_schedule *schedule);
    void (*fault_disarm)(void);
    int (*fault_stats)(uint64_t *seen, uint64_t *fired, int *armed);
    int (*set_phase)(int phase); /* OOMKIT_PHASE_*, returns the one before */

    /* --- devices with a c10::DeviceAllocator; none of these initialises a device, and
     * in a process forked from one that had it in use there is none --- */
    int (*device_initialized)(int device_type); /* 1, 0 or OOMKIT_EUNSUPPORTED */
    int (*device_stats)(int device_type, int device_index, oomkit_memory_stats *stats);
    int (*device_reset_peak)(int device_type, int device_index);
    int (*device_empty_cache)(int device_type);
    /* Do segments of the caching allocator grow (the settings in effect, whoever made
     * them)? 1, 0 or OOMKIT_EUNSUPPORTED. */
    int (*device_expandable)(int device_type);
} oomkit_bridge;

#ifdef __cplusplus
}
#endif

#endif
