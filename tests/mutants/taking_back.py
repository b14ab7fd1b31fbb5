"""Invariants of the roll-back: what a failed attempt moved is as it was."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "no-rng-restore",
        "torch's random stream begins the replay where it began the call",
        "csrc/undo/random.c",
        "    if (rng->cpu_state != NULL) {\n        OWNED PyObject *done =",
        "    if (0) {\n        OWNED PyObject *done =",
        ("undo/test_streams.py::test_what_is_put_back_is_where_the_stream_was",),
    ),
    Mutant(
        "no-python-random-restore",
        "Python's random stream begins the replay where it began the call",
        "csrc/undo/random.c",
        'rng_library_call("random", "setstate", rng->random_state);',
        "Py_NewRef(Py_None);",
        ("engine/test_steps.py::test_python_and_numpy_streams_are_rolled_back",),
    ),
    Mutant(
        "no-generator-restore",
        "a generator that takes part begins the replay where it began the call",
        "csrc/undo/random.c",
        "done = PyObject_CallMethodOneArg(generator, st->str_set_state, state);",
        "done = Py_NewRef(Py_None);",
        ("engine/test_steps.py::test_generator_among_the_globals_is_rolled_back",),
    ),
    Mutant(
        "modules-of-optimizers-unknown",
        "modules whose parameters an optimizer has take part: their buffers are put back",
        "csrc/members/search.c",
        "(parts->optimizer_led && oomkit_participants_add_modules(st, parts) < 0)",
        "0",
        ("members/test_unseen_code.py::"
         "test_it_goes_back_with_the_buffers[InOwnSet-optimizer-0]",),
    ),
    Mutant(
        "running-modules-unseen",
        "modules that no name leads to are seen as they run, and their buffers put back",
        "csrc/engine/whole.c",
        "(oomkit_forwards_wanted(call) && oomkit_forwards_watch(call) < 0)",
        "0",
        ("members/test_forwards.py::test_its_buffers_see_the_batch_once"
         "[around-in-place-small-first-forward-step]",),
    ),
    Mutant(
        "running-modules-forgotten",
        "they take part in the next calls, too",
        "csrc/hook/forwards.c",
        "if (forwards_join(call) < 0) {",
        "if (0) {",
        ("members/test_forwards.py::"
         "test_one_that_begins_to_run_in_a_call_that_fails_is_refused[True]",),
    ),
    Mutant(
        "new-buffers-rest",
        "a buffer that no finished call has seen is copied",
        "csrc/undo/buffers.c",
        "parts->moving[n - 1] = OOMKIT_BUFFER_NEW;",
        "parts->moving[n - 1] = OOMKIT_BUFFER_RESTS;",
        ("members/test_forwards.py::"
         "test_a_large_buffer_is_copied_until_a_call_has_ended_well[False]",),
    ),
    Mutant(
        "running-modules-marked-at-any-time",
        "buffers that are not those of the entry any more are not put back",
        "csrc/hook/forwards.c",
        "as_it_was > 0 ? forward_is_noted(call, module, note, 0) : as_it_was;",
        "1;",
        ("members/test_forwards.py::"
         "test_buffers_that_others_replace_for_a_while_are_left_alone[functional_call]",),
    ),
    Mutant(
        "late-attributes-stay",
        "what such a module has noted of its buffers goes back with them",
        "csrc/undo/buffers.c",
        "if (oomkit_late_modules_put(b->attributes) < 0) {",
        "if (0) {",
        ("members/test_forwards.py::"
         "test_what_it_notes_in_a_list_goes_back_too[0-list]",),
    ),
    Mutant(
        "late-modules-let-pass",
        "what a failed attempt did to a module that had not been seen is not known",
        "csrc/hook/forwards.c",
        "if (call->hooked.watched_late) {",
        "if (0) {",
        ("members/test_forwards.py::"
         "test_one_that_begins_to_run_in_a_call_that_fails_is_refused",),
    ),
    Mutant(
        "no-buffer-restore",
        "buffers are put back from their copies",
        "csrc/undo/buffers.c",
        "if (stuck < 0 || (!stuck && buffer_put_back(call, i) < 0)) {",
        "if (stuck < 0) {",
        ("engine/test_exact.py::test_every_allocation_failed_once[conv-whole]",),
    ),
    Mutant(
        "buffers-by-version",
        "buffers are put back whatever their versions say: a kernel that fails half-way has "
        "written and bumped none",
        "csrc/undo/buffers.c",
        "    OWNED PyObject *dict = NULL;\n",
        "    OWNED PyObject *dict = NULL;\n    uint32_t now = 0;\n"
        "    if (oomkit_tensor_version(call->st, item->tensor, &now) == 0 &&\n"
        "        now == item->version) {\n        return 0;\n    }\n",
        ("accum/test_once.py::test_statistics_of_a_norm_of_ones_own_are_rolled_back",),
    ),
    Mutant(
        "replaced-buffer-stays",
        "a buffer that was replaced by another tensor is put in its place again",
        "csrc/undo/buffers.c",
        "if (PyDict_GetItemWithError(dict, item->key) != item->tensor) {",
        "if (0) {",
        ("accum/test_once.py::test_a_buffer_that_was_replaced_is_in_its_place_again",),
    ),
    Mutant(
        "new-gradients-stay",
        "gradients that the failed attempt made are dropped",
        "csrc/undo/gradients_back.c",
        "    case OOMKIT_GRAD_NEW:\n        return grads_set(call, i, Py_None);",
        "    case OOMKIT_GRAD_NEW:\n        return 0;",
        ("engine/test_exact.py::test_every_allocation_failed_once[mlp-backward]",),
    ),
    Mutant(
        "no-gradient-restore",
        "gradients at entry are put back from their copies: no batch is added to them twice",
        "csrc/undo/gradients_back.c",
        "return grads_put_copy(call, i, state == OOMKIT_GRAD_MOVED);",
        "return 0;",
        ("accum/test_weights.py::test_gradients_before_the_step_survive_every_fault",),
    ),
    Mutant(
        "aside-in-spite-of-noise",
        "a moved gradient is set aside only where the replay draws the same random numbers",
        "csrc/undo/gradients_back.c",
        "differs = differs == 0 ? oomkit_rng_moved(call) : differs;",
        "",
        ("accum/test_weights.py::test_gradient_safety_off_raises_instead_of_guessing",),
    ),
    Mutant(
        "aside-in-spite-of-nesting",
        "a moved gradient is set aside only where no backward inside brought a part of it",
        "csrc/undo/gradients_back.c",
        "        call->st->engine_runs != call->grads.engine_runs + 1) {\n",
        "        0) {\n",
        ("undo/test_gradients_apart.py"
         "::test_a_part_that_a_backward_within_brought_is_not_taken_for_the_whole",),
    ),
    Mutant(
        "contribution-stays",
        "what a failed backward has added is taken off before the call is run again",
        "csrc/deferred/recompute.c",
        "PyObject_CallMethod(aside, \"sub_\", \"O\", gradient);",
        "Py_NewRef(gradient);",
        ("undo/test_accumulation.py::test_an_error_in_the_backward_of_a_later_call[inside-False]",),
    ),
    Mutant(
        "another-contribution",
        "what is taken off is of the failed attempt's loss",
        "csrc/deferred/recompute.c",
        "        return recompute_end(call); /* nor where either is not known: NaN */\n",
        "        ;\n",
        ("undo/test_accumulation.py"
         "::test_a_step_that_is_not_the_same_the_second_time_is_refused",),
    ),
    Mutant(
        "aside-lost",
        "gradients that were set aside come back in place of the replayed ones",
        "csrc/undo/gradients.c",
        "if (g->aside[i] != NULL && grads_set(call, i, g->aside[i]) < 0) {\n            return -1;",
        "if (0) {\n            return -1;",
        ("accum/test_weights.py::test_gradients_before_a_proven_step_are_set_aside",),
    ),
    Mutant(
        "marks-by-id",
        "a mark holds its gradient's address: another gradient that comes to lie there is told",
        "csrc/torch/tensors.cpp",
        "                c10::raw::weak_intrusive_ptr::incref(grad);\n",
        "                ;\n",
        ("bridge/test_bridge.py::test_marks_are_sound_against_address_reuse",),
        also=(("            c10::raw::weak_intrusive_ptr::decref("
               "static_cast<c10::TensorImpl *>(grad));\n", "            ;\n"),),
    ),
    Mutant(
        "versions-ignored",  # in the bridge itself its check at import would tell
        "a gradient that was added to in place is told from one that was not, by its version",
        "csrc/undo/gradients_back.c",
        "    aside = call->grads.at_entry ? grads_may_set_aside(call, states, steps) : 0;\n",
        "    for (i = 0; i < n; i++) {\n"
        "        states[i] = states[i] == OOMKIT_GRAD_MOVED ? OOMKIT_GRAD_SAME : states[i];\n"
        "    }\n"
        "    aside = call->grads.at_entry ? grads_may_set_aside(call, states, steps) : 0;\n",
        ("accum/test_weights.py::test_gradients_before_the_step_survive_every_fault",),
    ),
    Mutant(
        "versions-ignored-without-bridge",
        "the same where there is no bridge",
        "csrc/py/plain_bridge.c",
        "*step = version - mark->version;",
        "*step = 0;",
        ("bridge/test_without_bridge.py::test_recovered_equals_planned_bit_for_bit",),
    ),
    Mutant(
        "learning-rates-stay",
        "learning rates and other plain values of optimizers are put back",
        "csrc/optim/user_state.c",
        "return oomkit_hyperparams_restore(st, object, saved);",
        "return 0;",
        ("optim/test_once_updates.py::test_learning_rates_are_rolled_back_and_changed_once",),
    ),
    Mutant(
        "scaler-states-stay",
        "what a GradScaler has noted per optimizer (unscaled, infinities) is put back",
        "csrc/optim/user_state.c",
        "EACH_MEMO (mark, call->entry.owners.scalers) {",
        "EACH_MEMO (mark, NULL) {",
        ("optim/test_once_updates.py::test_a_scaler_that_had_unscaled_does_so_again",),
    ),
    Mutant(
        "attributes-stay",
        "what step() has set on an optimizer or a scheduler goes back with the rest",
        "csrc/optim/user_state.c",
        "    if (oomkit_attributes_restore(call) < 0 || owners_restore_copies(call) < 0) {",
        "    if (owners_restore_copies(call) < 0) {",
        (
            "optim/test_refused_attributes.py::"
            "test_a_refused_first_step_leaves_no_attribute_behind",
            "optim/test_refused_attributes.py::test_a_scheduler_that_fails_half_way_goes_back",
        ),
    ),
    Mutant(
        "scale-stays-lent",
        "the scale that a scaler has lent to a fused update is gone after a half done one",
        "csrc/hook/method.c",
        "            oomkit_attributes_undo(call);",
        "",
        ("optim/test_refused_attributes.py::test_a_partial_update_leaves_no_scale_behind",),
    ),
    Mutant(
        "half-made-scaler-stays",
        "a GradScaler of which only one of two tensors was made is put back",
        "csrc/optim/user_state.c",
        "return scaler_tensors_restore(object, saved);",
        "return 0;",
        ("optim/test_once_updates.py::test_every_fault_of_a_cold_scaler",),
    ),
    Mutant(
        "half-made-state-stays",
        "the state of parameters that an optimizer had begun to make is removed",
        "csrc/optim/optimizer.c",
        "    if (PyDict_Check(mark->state) &&\n"
        "        oomkit_undo_new_keys(mark->state, mark->known, mark->known_count) < 0) {",
        "    if (0) {",
        ("optim/test_optimizer_faults.py::test_sweep_of_the_update[adamw-first-step]",),
    ),
    Mutant(
        "old-state-believed",
        "state that was replaced between two calls is what is put back",
        "csrc/optim/optimizer_mark.c",
        "        if (oomkit_dict_tag((PyObject *)seen->dict) != seen->tag) {",
        "        if (seen == NULL) {",
        ("optim/test_kept_marks.py::"
         "test_state_that_was_replaced_between_calls_is_not_undone[one value]",),
    ),
    Mutant(
        "old-rate-believed",
        "a learning rate that was set between two calls is what is put back",
        "csrc/optim/groups.c",
        "            oomkit_dict_tag(group) != seen->tag) {",
        "            0) {",
        ("optim/test_kept_marks.py::"
         "test_a_rate_that_was_set_between_calls_is_the_one_that_goes_back",),
    ),
    Mutant(
        "no-optimizer-copy",
        'with optimizer_safety="copy" parameters and moments are put back from their copies',
        "csrc/optim/optimizer.c",
        "done = PyObject_CallMethodOneArg(mark->items[i].value, call->st->str_copy,\n"
        "                                         mark->copies[i]);",
        "done = Py_NewRef(Py_None);",
        ("optim/test_optimizer_faults.py::test_an_update_that_can_go_back_makes_every_fault_retryable",),
    ),
    Mutant(
        "switches-stay",
        "train() and requires_grad are as at entry when an attempt begins again",
        "csrc/undo/flags.c",
        "    if (call->entry.flags.training != NULL &&\n"
        "        flags_training(call->st, call->entry.flags.training) < 0) {",
        "    if (0) {",
        ("undo/test_switches.py::test_a_replay_begins_as_the_call_began",),
    ),
    Mutant(
        "replay-forgets-modes",
        "what a call has switched stays where no replay of its returned loss fits",
        "csrc/undo/savepoint.c",
        "     .back = oomkit_flags_back,",
        "     .back = NULL,",
        (
            "deferred/test_returned_modes.py"
            "::test_modes_that_the_call_has_left_stay_where_no_replay_fits",
        ),
    ),
    Mutant(
        "replay-counts-twice",
        "what a call did to participants counts once, its replay does nothing to them",
        "csrc/undo/savepoint.c",
        "     .back = oomkit_owners_back,",
        "     .back = NULL,",
        ("deferred/test_returned_modes.py::test_a_participant_goes_back_before_the_streams",),
    ),
    Mutant(
        "replay-stops-going-back",
        "one thing that does not go back beside a replay keeps no other from it",
        "csrc/undo/savepoint.c",
        "        if (error == NULL) { /* what comes behind it goes back all the same */",
        "        return -1;\n        if (error == NULL) {",
        (
            "deferred/test_returned_modes.py"
            "::test_one_that_does_not_go_back_keeps_no_other_from_it",
        ),
    ),
    Mutant(
        "hooks-stay",
        "hooks that a failed attempt has registered are gone when it begins again",
        "csrc/undo/hook_tables.c",
        "    if (PyObject_DelItem(table, id) < 0) {",
        "    if (0) {",
        ("undo/test_set_and_put_back.py::test_it_is_as_at_entry_when_the_step_begins_again",),
    ),
    Mutant(
        "removed-hooks-stay-away",
        "hooks that a failed attempt has removed are back when it begins again",
        "csrc/undo/hook_tables.c",
        "(missing == 1 && back && removed_back(note, table) < 0)",
        "0",
        ("undo/test_set_and_put_back.py::test_one_that_the_step_removes_first_is_back_in_its_place",),
    ),
    Mutant(
        "hooks-of-libraries-go",
        "what a library registers when a module first runs stays: it notes that elsewhere",
        "oomkit/_engine/patches.py",
        "    if top in FOREIGN or top in LIBRARIES or top in sys.stdlib_module_names:",
        "    if False:",
        (
            "undo/test_set_and_put_back.py"
            "::test_what_a_library_registers_when_a_module_first_runs_stays",
        ),
    ),
    Mutant(
        "layers-stay",
        "layers that a failed attempt has added or exchanged are as at entry",
        "oomkit/_code/plain_state.py",
        'self.mark(Spot(owner, ATTRIBUTE, "_modules", layers), BIND | CONTENT)',
        "pass",
        ("undo/test_set_and_put_back.py::test_it_is_as_at_entry_when_the_step_begins_again",),
    ),
    Mutant(
        "torchs-switches-stay",
        "a switch of torch's that a failed attempt has set is as at entry",
        "csrc/plain/place.c",
        "        return switch_write(at, value);",
        "        return 0;",
        ("undo/test_set_and_put_back.py::test_it_is_as_at_entry_when_the_step_begins_again",),
    ),
    Mutant(
        "map-keeps-what-failed",
        "what the function of a map has changed in a part that failed goes back",
        "csrc/loop/chunks.c",
        "is_new || self->plain.looked == 1 ? oomkit_plain_find(call, !is_new) : 0;",
        "0;",
        ("loop/test_map_undone.py::test_attributes_and_counters",),
    ),
    Mutant(
        "modes-of-a-part-stay",
        "train() and hooks of a part of a loop that failed go back",
        "csrc/undo/savepoint.c",
        "return current_call != NULL ? current_call : st->wiring->part_call(st);",
        "return current_call;",
        ("loop/test_map_undone.py::test_modes_and_hooks_in_the_body_of_a_loop",),
    ),
    Mutant(
        "generators-do-as-they-like",
        "a generator between the parts and the loop that does more than yield them is refused",
        "oomkit/_engine/loops.py",
        "    if told := _between(generators, held):",
        "    if told := \"\":",
        ("loop/test_chunks_misuse.py::test_an_iterator_that_has_gone_on",),
    ),
    Mutant(
        "climbs-stay",
        "what a method of an optimizer writes to parameters in a failed attempt goes back",
        "oomkit/_code/writes.py",
        "            self.optimizer(value, names)",
        "            pass",
        (
            "plain/test_written_parameters.py"
            "::test_a_failed_attempt_leaves_parameters_as_they_were_or_the_step_is_done",
        ),
    ),
    Mutant(
        "hooks-need-not-come-again",
        "a retry that has not registered again what was undone is refused",
        "csrc/undo/hook_tables.c",
        "            if (again == 0) {",
        "            if (0) {",
        ("undo/test_set_and_put_back.py::test_one_that_nobody_keeps_must_be_registered_again",),
    ),
    Mutant(
        "kept-hooks-go",
        "a hook whose handle is held stays: the step registers it once",
        "csrc/undo/hook_tables.c",
        "now = is_to_go(held, back == TAKE);",
        "now = is_to_go(held, 0);",
        ("undo/test_set_and_put_back.py::test_one_whose_handle_is_kept_out_of_sight_stays",),
    ),
    Mutant(
        "kept-hooks-run-beside",
        "a hook that stayed goes where the retry registers one in its line",
        "csrc/undo/hook_tables.c",
        "        kept_go(note, table, PyTuple_GET_ITEM(registered, 1)) < 0) {",
        "        0) {",
        (
            "undo/test_set_and_put_back.py"
            "::test_one_that_only_a_frame_of_the_failed_attempt_keeps_goes",
        ),
    ),
    Mutant(
        "a-map-holds-its-function",
        "the place of a map holds nothing that its function leads to",
        "csrc/loop/chunks.c",
        "    call->given.places = &self->plain;",
        "    call->given.places = &self->site->plain;",
        ("loop/test_map_undone.py::test_what_the_function_leads_to_is_let_go",),
    ),
    Mutant(
        "frozen-stays",
        "requires_grad of parameters is as at entry when an attempt begins again",
        "csrc/undo/flags.c",
        "    return flags_grads(call, oomkit_params_flags(call, 0), call->parts->param_count);\n}\n"
        "\n/* --- around",
        "    return 0;\n}\n\n/* --- around",
        ("undo/test_switches.py::test_a_replay_begins_as_the_call_began",),
    ),
    Mutant(
        "no-copies-of-parameters-restore",
        "what a step wrote to parameters in the first micro-batch of a refused split is put back",
        "csrc/undo/parameter_versions.c",
        "stay = oomkit_param_copies_restore(call, &first);",
        "stay = 0;",
        ("accum/test_once_changes.py::test_a_change_is_refused_by_name_and_taken_back",),
    ),
    Mutant(
        "no-slot-restore",
        "a parameter that was replaced in its module is put in its place again",
        "csrc/undo/savepoint.c",
        "    return oomkit_param_slots_restore(call);",
        "    (void)call;\n    return 0;",
        ("accum/test_once_changes.py::test_a_change_is_refused_by_name_and_taken_back",),
    ),
    Mutant(
        "roll-back-tried-once",
        "a roll-back that ran out of memory is done again",
        "csrc/undo/rollback.c",
        "#define TRIES 3",
        "#define TRIES 1",
        ("undo/test_recovery_faults.py::test_out_of_memory_while_rolling_back_is_recovered_from",),
    ),
    Mutant(
        "accumulated-count-stays",
        "what accelerate has counted in the failed attempt is taken back",
        "csrc/optim/user_state.c",
        "return accelerator_restore(object, saved);",
        "return 0;",
        ("optim/test_accelerate.py::test_out_of_memory",),
    ),
    Mutant(
        "participants-code-unread",
        "what the code of a participant changes goes back, whatever leads to it",
        "oomkit/_code/plain_state.py",
        "filter(None, (ref() for ref in modules))",
        "()",
        ("members/test_unseen_code.py::test_it_goes_back_with_the_buffers"
         "[InOwnSet-participants-2]",
         "members/test_unseen_code.py::test_from_the_second_call_on_also_of_what_has_run"
         "[InOwnSet]"),
    ),
    Mutant(
        "library-modules-unread",
        "what a library's module notes of its buffers goes back with them",
        "oomkit/_code/plain_state.py",
        'library = _top(forward) if own.get("_buffers") else ""',
        'library = ""',
        ("members/test_unseen_code.py::"
         "test_tables_of_positions_of_transformers_go_back_with_their_length[2-dynamic]",),
    ),
    Mutant(
        "built-arguments-lost",
        "what is passed in a list that is made for the call may be written to",
        "oomkit/_code/plain_state.py",
        "for symbol in items_of(arguments):",
        "for symbol in arguments:",
        ("plain/test_plain_places.py::test_what_a_call_is_given_in_a_tuple_or_list",),
    ),
    Mutant(
        "undone-buffers-may-rest",
        "a buffer that the failed attempt moved moves in its retry, too",
        "csrc/undo/undone_buffers.c",
        "one->made ? state != 1 : state != 0;",
        "one->made ? state != 1 : 1;",
        ("members/test_unseen_code.py::test_in_the_first_call_its_retry_is_refused"
         "[InOwnSet]",
         "members/test_unseen_code.py::test_a_retry_without_an_update_is_refused_too"
         "[returned]"),
    ),
    Mutant(
        "undone-buffers-checked-at-the-end",
        "that is seen before the update",
        "csrc/hook/method.c",
        "(oomkit_undone_buffers_check(call) < 0 || oomkit_hooks_check(call) < 0)) {",
        "oomkit_hooks_check(call) < 0) {",
        ("members/test_unseen_code.py::test_in_the_first_call_its_retry_is_refused"
         "[InOwnSet]",),
    ),
    Mutant(
        "made-buffers-go-on",
        "a retry does not go on with a buffer that the failed attempt made",
        "csrc/undo/undone_buffers.c",
        "one->made ? state != 1 : state != 0;",
        "one->made ? 1 : state != 0;",
        ("members/test_unseen_code.py::"
         "test_a_count_that_a_failed_attempt_has_begun_is_not_gone_on_with"
         "[NotShown-named-3]",),
    ),
    Mutant(
        "tables-count-as-moved",
        "a table that grows with its batch may rest in the retry",
        "csrc/undo/undone_buffers.c",
        ": was.size == is.size && was.shape_hash == is.shape_hash;",
        ": 1;",
        ("members/test_unseen_code.py::"
         "test_a_table_that_grows_with_its_batch_is_not_refused[True-False]",),
    ),
    Mutant(
        "undone-buffers-noted-twice",
        "what a first try has put back has not moved at the second",
        "csrc/undo/undone_buffers.c",
        "b->taken = 0;",
        "b->taken = 1;",
        ("members/test_unseen_code.py::"
         "test_what_was_put_back_at_the_first_try_has_not_moved",),
    ),
    Mutant(
        "sets-unread",
        "what objects in a set or a deque change goes back",
        "oomkit/_code/spots.py",
        "for base in (set, frozenset, deque):",
        "for base in ():",
        ("plain/test_plain_places.py::test_objects_in_a_container_that_is_looped_over",),
    ),
    Mutant(
        "long-containers-stay",
        "what runs of a proof add to containers of some thousand items goes back",
        "oomkit/_proof/put_back/plain_values.py",
        "_LONG = 1 << 16",
        "_LONG = 1 << 10",
        ("plain/test_what_proofs_put_back.py::"
         "test_what_is_kept_once_per_batch_in_long_containers[deque-3000]",),
    ),
    Mutant(
        "resized-buffers-stay",
        "a buffer that an attempt has resized goes back to its shape",
        "csrc/undo/buffers.c",
        "if (!buffer_copy_fits(call->st, copy, &facts) && facts.is_strided) {",
        "if (0) {",
        ("undo/test_rollback_rest.py::test_a_buffer_that_the_first_forward_resizes[forward]",),
    ),
    Mutant(
        "changed-groups-stay",
        "an optimizer has the groups again that it had",
        "csrc/optim/groups.c",
        "    if (groups_restore(st, optimizer, entry) < 0 ||",
        "    if (0 ||",
        ("optim/test_groups_back.py::"
         "test_a_refused_step_leaves_the_groups_as_they_were[popped-forward]",),
    ),
    Mutant(
        "refused-behind-another",
        "an update that is refused behind another one takes that back, or says that it stays",
        "csrc/engine/recover.c",
        "    if (class_ == OOMKIT_CLASS_NEVER && call->refused.raised) {",
        "    if (class_ == OOMKIT_CLASS_NEVER && call->refused.raised > 1) {",
        ("optim/test_optimizer_faults.py::test_one_that_cannot_fit_behind_another_update",),
    ),
]  # fmt: skip
