"""Invariants of the host: what autograd saves goes there and comes back as it was."""

from __future__ import annotations

from .mutant import Mutant

PACKED, OFFLOAD = "csrc/ladder/packed.c", "csrc/ladder/offload.c"
STORAGES = "csrc/torch/storages.cpp"
EXACT, MEMORY, TORCH, FAULTS = (
    f"ladder/test_offload_{name}.py::" for name in ("exact", "memory", "torch", "faults")
)

MUTANTS = [
    Mutant(
        "one-copy-for-all-versions",
        "bytes on the host are known by the version at which they were saved",
        PACKED,
        "           a->version == b->version && ",
        "           ",
        (f"{MEMORY}test_a_write_between_two_saves",),
    ),
    Mutant(
        "storages-by-place",
        "a storage whose memory was swapped is another one",
        PACKED,
        "a->storage == b->storage && a->data == b->data && a->counter",
        "a->storage == b->storage && a->counter",
        (f"{MEMORY}test_a_storage_with_other_memory",),
    ),
    Mutant(
        "saved-storages-not-held",
        "a storage of which there is a copy is held weakly, so that no other gets its address",
        STORAGES,
        "                c10::raw::weak_intrusive_ptr::incref(storage);\n"
        "                holds[made] = storage;",
        "                holds[made] = nullptr;",
        (f"{MEMORY}test_a_storage_that_was_swapped",),
    ),
    Mutant(
        "a-copy-for-each-save",
        "a tensor that is saved twice has one copy on the host",
        PACKED,
        "    while (found != NULL && !key_same(&found->key, key)) {",
        "    while (found != NULL) {",
        (f"{MEMORY}test_a_tensor_saved_twice_is_copied_once",),
    ),
    Mutant(
        "a-copy-for-each-view",
        "views of a storage share the copy of the storage",
        PACKED,
        "reached < key.bytes / LEAST_SHARE",
        "reached < key.bytes",
        (f"{MEMORY}test_views_of_one_storage_share_it",),
    ),
    Mutant(
        "small-views-move-all",
        "a small part of a storage goes without the rest",
        PACKED,
        "reached < key.bytes / LEAST_SHARE",
        "reached == 0",
        (f"{MEMORY}test_a_small_part_of_a_storage_goes_alone",),
    ),
    Mutant(
        "kept-storages-move",
        "storages of parameters and of the batch stay",
        PACKED,
        "        oomkit_addresses_have(&self->kept_set, facts->storage)) {",
        "        0) {",
        (f"{MEMORY}test_what_stays",),
    ),
    Mutant(
        "host-without-end",
        "no more goes to the host than was allowed",
        PACKED,
        "    if (cost > self->room_bytes || self->held_bytes > self->room_bytes - cost) {",
        "    if (0) {",
        (f"{EXACT}test_with_little_room_on_the_host",),
    ),
    Mutant(
        "writes-after-the-save-pass",
        "a saved tensor that was written to is an error, as without hooks",
        PACKED,
        "    if (now == then) {",
        "    if (1) {",
        (f"{TORCH}test_a_write_after_the_save_is_the_same_error",),
    ),
    Mutant(
        "stays-with-its-graph",
        "what is saved and stays is held without its graph",
        PACKED,
        "    if (facts == NULL ? wants == Py_False",
        "    if (1 || facts == NULL ? wants == Py_False || 1",
        (f"{MEMORY}test_an_output_does_not_hold_itself",),
    ),
    Mutant(
        "restored-copies-not-shared",
        "views that are back at a time have one copy on the device",
        PACKED,
        "    if (moved->restored != NULL) {\n        applied =",
        "    if (0) {\n        applied =",
        (f"{MEMORY}test_a_tensor_saved_twice_is_copied_once",),
    ),
    Mutant(
        "restored-copies-held",
        "a copy that is back goes with the last tensor that uses it",
        PACKED,
        "    *base = STEAL(bytes);",
        "    *base = Py_NewRef(STEAL(bytes));",
        (
            f"{MEMORY}test_a_tensor_saved_twice_is_copied_once",
            f"{EXACT}test_after_the_offload_is_gone",
        ),
    ),
    Mutant(
        "written-copies-given-again",
        "a copy that was written to is not given to another backward",
        STORAGES,
        "        if (from->counter.current_version() != from->version ||\n            stream_of",
        "        if (stream_of",
        (f"{MEMORY}test_a_copy_that_was_written_to_is_not_given_again",),
    ),
    Mutant(
        "contiguous-when-back",
        "a tensor comes back with the strides that it had",
        STORAGES,
        "into->set_sizes_and_strides(of->sizes, of->strides, of->offset - skipped);",
        "into->set_sizes_contiguous(of->sizes);",
        (f"{MEMORY}test_views_of_one_storage_share_it",),
    ),
    Mutant(
        "host-copies-in-the-budget",
        "copies on the host are outside the CPU's budget",
        OFFLOAD,
        "    EXEMPT (st) {\n        made = PyObject_Vectorcall",
        "    {\n        made = PyObject_Vectorcall",
        (f"{MEMORY}test_the_peak_of_a_deep_model",),
    ),
    Mutant(
        "no-host-is-an-error",
        "where the host has no memory, tensors stay",
        PACKED,
        "                       oomkit_exception_is_oom(self->st))) {",
        "                       0)) {",
        (f"{FAULTS}test_the_host_has_no_memory",),
    ),
    Mutant(
        "host-bytes-not-given-back",
        "the host's bytes go with the graph that needs them",
        PACKED,
        "    offload->held_bytes -= moved->counted_bytes;\n",
        "",
        (f"{EXACT}test_gradients_are_the_same",),
    ),
    Mutant(
        "transforms-meet-hooks",
        "where torch forbids hooks, an offload is no reason to fail",
        OFFLOAD,
        "    if (ours <= 0) {\n        return ours < 0 ? NULL",
        "    if (ours <= 1) {\n        return ours < 0 ? NULL",
        (f"{TORCH}test_transforms", f"{TORCH}test_where_hooks_are_forbidden_tensors_stay"),
    ),
    Mutant(
        "over-the-users-hooks",
        "hooks of the user's around the step go on",
        OFFLOAD,
        "    if (off != Py_None || top != Py_None) {",
        "    if (off != Py_None) {",
        (f"{TORCH}test_hooks_of_the_user_go_on",),
    ),
    Mutant(
        "modes-see-the-copies",
        "modes of the user's do not see what goes to the host",
        STORAGES,
        "    now.excluded_ = now.excluded_ | python;",
        "    now.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, keys->included);",
        (f"{TORCH}test_modes_see_nothing_of_it",),
    ),
    Mutant(
        "conjugated-views-move",
        "views that are read otherwise than they lie stay",
        STORAGES,
        "{DispatchKey::Conjugate, DispatchKey::Negative",
        "{DispatchKey::ZeroTensor, DispatchKey::ZeroTensor",
        (f"{TORCH}test_views_that_are_read_otherwise_stay",),
    ),
]
