/* Saved tensors on the host.
 *
 * While an offload is pushed, what autograd saves on its device goes to the host by
 * torch's hooks for saved tensors, and comes back when the backward asks for it. The
 * program stays what it is: gradients are the same bit for bit, no random number is
 * drawn and no version bumped, and a tensor that was written to after it was saved is
 * the error that it is without hooks, for which torch itself does not look then.
 *
 * Needs the bridge. "The host" of the CPU is memory outside its budget.
 *
 * offload.c has the object, its limits and torch's stack of hooks; packed.c what
 * autograd keeps in the place of a tensor. */
#ifndef OOMKIT_LADDER_OFFLOAD_H
#define OOMKIT_LADDER_OFFLOAD_H

#include "../device/device.h"

/* Can it be done at all: is the bridge there, and has this torch such hooks? */
int
oomkit_offload_possible(const oomkit_state *st);

/* Moves at most `host_bytes` at a time. `kept` is an iterable of tensors whose storages
 * stay where they are: parameters, buffers, the batch; views of them stay, too. They
 * are held weakly. New reference or NULL. Can run Python code (the iterable). */
PyObject *
oomkit_offload_new(oomkit_state *st, oomkit_device device, PyObject *kept,
                   uint64_t host_bytes);

/* From here on to the pop, what this thread saves is moved. Nothing is where hooks are
 * there already, which go on (the user's, or of an offload further out), or where torch
 * refuses them. 0 or -1. */
int
oomkit_offload_push(PyObject *offload);
/* What was moved stays so until its graph goes. Keeps an exception in flight. 0 or -1.
 */
int
oomkit_offload_pop(PyObject *offload);

/* Bytes that were moved so far, each time that they were. */
uint64_t
oomkit_offload_bytes(PyObject *offload);

/* --- for module.c --- */
extern PyType_Spec oomkit_offload_spec, oomkit_packed_spec;
extern PyMethodDef oomkit_offload_methods[];

/* --- between offload.c and packed.c --- */

typedef struct oomkit_offload {
    PyObject_HEAD
    vectorcallfunc vectorcall;   /* packs */
    oomkit_state *st;            /* borrowed from the type's module */
    const oomkit_bridge *bridge; /* borrowed: the table is never unloaded */
    oomkit_device device;
    PyObject *device_name; /* owned: str */
    PyObject *names;       /* owned: those of the arguments of torch.empty() */
    PyObject *unpack;      /* owned: the hook beside this object */
    void **kept;           /* owned: weak holds of storages */
    size_t kept_count;
    oomkit_addresses kept_set;
    struct oomkit_moved **table; /* owned; borrowed entries, each of which holds us */
    size_t mask;                 /* places of the table less one */
    Py_ssize_t count;            /* entries */
    uint64_t room_bytes;         /* most that may be held at a time */
    uint64_t held_bytes;         /* on the host now */
    uint64_t moved_bytes;        /* ever */
    int pinned;                  /* do host copies lie in pinned memory? */
    int pushed;
} oomkit_offload;

#define oomkit_offload_CAST(op) ((oomkit_offload *)(op))

/* What the hook does: what stands in the place of a tensor that is saved. New
 * reference or NULL. */
PyObject *
oomkit_pack(oomkit_offload *self, PyObject *tensor);

/* And the other hook, a function of the module: the tensor again. */
PyObject *
oomkit_unpack(PyObject *module, PyObject *packed);

/* Bytes as a tensor of one dimension, on the device or (outside the budget) on the
 * host. New reference or NULL. */
PyObject *
oomkit_offload_empty(oomkit_offload *self, uint64_t bytes, int on_host);

#endif
