"""Invariants of the sum: the micro-batches' gradients and results are those of the batch."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "weight-1-over-k",
        "a micro-batch counts by its rows: n_i/N, not 1/k",
        "csrc/accum/weights.c",
        "(double)call->cut->slices[i].length /\n"
        "                                                (double)weights_rows(call);",
        "1.0 / (double)call->cut->count;",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "sums-weighed",
        'with reduction="sum" every micro-batch counts as it is',
        "csrc/accum/weights.c",
        "= l->is_sum ? 1.0\n                                          : (double)",
        "= (double)",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "token-weights-equal",
        "weight= decides what a micro-batch counts: a mean over tokens is one over tokens",
        "csrc/accum/weights.c",
        "*weight = total > 0.0 ? *weight / total : 1.0 / (double)call->cut->count;",
        "*weight = 1.0 / (double)call->cut->count;",
        ("accum/test_token_weights.py::test_token_mean",),
    ),
    Mutant(
        "nothing-times-nan",
        "a micro-batch of weight 0 runs no backward: a mean over nothing is NaN",
        "csrc/hook/backward.c",
        "        backward.weight == 0.0 ? Py_NewRef(Py_None)",
        "        backward.weight < 0.0 ? Py_NewRef(Py_None)",
        ("accum/test_token_weights.py::test_a_mean_over_no_token_adds_nothing",),
    ),
    Mutant(
        "second-weight-first",
        "each backward of a step has its own weight",
        "csrc/accum/weights.c",
        "return l->group_weights[call->cut->at * l->groups + call->backward.done];",
        "return l->group_weights[call->cut->at * l->groups];",
        ("accum/test_token_weights.py::test_a_weight_for_each_backward",),
    ),
    Mutant(
        "num-items-ignored",
        "a step that is passed num_items_in_batch has a sum for its loss",
        "csrc/accum/weights.c",
        ": l->counts_items || (options->weight",
        ": (options->weight",
        ("accum/test_token_weights.py::test_num_items_means_a_sum",),
    ),
    Mutant(
        "nested-backward-weighed",
        "a backward inside a backward (reentrant checkpoint) is not weighed again",
        "csrc/hook/backward.c",
        "    if (call->backward.depth > 0 || !backward_accumulates(st, args, nargsf, kwnames)) {",
        "    if (!backward_accumulates(st, args, nargsf, kwnames)) {",
        ("engine/test_steps.py::test_split_is_the_whole_batch",),
    ),
    Mutant(
        "autograd-grad-weighed",
        "autograd.grad (a gradient penalty) is no backward of the step: it is not weighed",
        "csrc/hook/backward.c",
        "    if (call->backward.depth > 0 || !backward_accumulates(st, args, nargsf, kwnames)) {",
        "    if (call->backward.depth > 0) {",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "eager-gradients-lost",
        "parked gradients come back before the next backward, so that they add up",
        "csrc/undo/gradients.c",
        "            if (grads_set(call, i, g->parked[i]) < 0) {",
        "            if (0) {",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "nothing-parked",
        "between backward and the end of a micro-batch its gradients are out of sight: clipping "
        "sees none or all",
        "csrc/undo/gradients.c",
        "    if (call->split && (!call->is_last || call->grads.eager)) {",
        "    if (call->split && call->grads.eager) {",
        ("engine/test_steps.py::test_split_is_the_whole_batch",),
    ),
    Mutant(
        "remainder-lost",
        "the slices add up to the batch: the last one takes the rest",
        "csrc/core/slices.c",
        "        *length = rows - *start;",
        "        *length = each * multiple_of;",
        ("core/test_core.py::test_core[slices]",),
    ),
    Mutant(
        "slices-overlap",
        "each slice begins where the one before ends",
        "csrc/core/slices.c",
        "*start = (index * each + smaller(index, more)) * multiple_of;",
        "*start = index * each * multiple_of;",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "outputs-in-reverse",
        "outputs are joined in the order of the batch",
        "csrc/result/join_tensors.c",
        "PyList_SET_ITEM(list, i, Py_NewRef(values[i]));",
        "PyList_SET_ITEM(list, i, Py_NewRef(values[r->count - 1 - i]));",
        ("result/test_join_outputs.py::test_a_data_class",),
    ),
    Mutant(
        "losses-plainly-averaged",
        "the loss that is returned is the mean with the weights of its micro-batches",
        "csrc/result/join_rules.c",
        "        return r->weights[i];",
        "        return 1.0 / (double)r->count;",
        ("accum/test_weights.py::test_split_equals_whole",),
    ),
    Mutant(
        "wrong-gradient-assumed",
        "a returned loss's gradients are scaled by the gradient that really came",
        "csrc/deferred/eager.c",
        "    if (value != p->assumed) {",
        "    if (0) {",
        ("deferred/test_returned.py::test_a_call_that_is_split",),
    ),
    Mutant(
        "returned-not-added",
        "after the replay of a returned loss the caller's gradients hold what they held, plus it",
        "csrc/undo/gradients.c",
        "        if (g->entry[i] != NULL && g->entry[i] != Py_None) {",
        "        if (0) {",
        (
            "deferred/test_returned_entry.py::"
            "test_bit_for_bit_as_a_call_that_was_split_before_its_backward",
        ),
    ),
    Mutant(
        "eager-gradients-in-place",
        "while a returned loss is split the caller's gradients stay as they are",
        "csrc/undo/gradients.c",
        "    if (g->eager && !g->away && oomkit_grads_put_away(call) < 0) {",
        "    if (0) {",
        ("deferred/test_returned.py::test_gradients_of_the_caller_stay_put_while_split",),
    ),
    Mutant(
        "rows-of-another-slice",
        "a loss with a row per sample is given its own rows of the caller's gradient",
        "csrc/deferred/micro_loss.c",
        "(long long)slice->start, (long long)slice->length);\n}\n\nstatic int\nreturned_replay",
        "0LL, (long long)slice->length);\n}\n\nstatic int\nreturned_replay",
        ("deferred/test_returned.py::test_a_row_per_sample",),
    ),
    Mutant(
        "deposit-of-the-first-loss",
        "a gradient that is there when eager ones are deposited is added to, not replaced",
        "csrc/deferred/eager.c",
        "    if (gradient == Py_None) {\n        return PyObject_SetAttr(",
        "    if (1) {\n        return PyObject_SetAttr(",
        ("deferred/test_returned.py::test_the_users_own_accumulation",),
    ),
    Mutant(
        "no-autocast-in-the-replay",
        "the replay of a returned loss runs under the autocast of its call",
        "csrc/deferred/autocast.c",
        "    if (on != Py_True) {",
        "    if (1) {",
        ("deferred/test_returned_modes.py::test_autocast_has_ended_when_backward_comes",),
    ),
    Mutant(
        "forgotten-sum",
        "a sum that is treated as a mean is warned about",
        "csrc/accum/loss_value.c",
        "    is_sum = near(l->sum, whole * factor, limit);",
        "    is_sum = 0;",
        ("accum/test_forgotten_sum.py::test_a_sum_is_said",),
    ),
    Mutant(
        "coupled-samples-unsaid",
        "a loss that couples the samples of a batch is said",
        "csrc/accum/loss_value.c",
        "    if (fabs(joined - whole) <= limit * fmax(fabs(whole), l->largest)) {",
        "    if (1) {",
        (
            "accum/test_forgotten_sum.py::"
            "test_a_contrastive_loss_that_failed_in_its_backward_is_said_once",
        ),
    ),
    Mutant(
        "metric-of-the-last",
        "ReduceLROnPlateau sees the metric of the batch, not of the last micro-batch",
        "csrc/optim/scheduler_args.c",
        "    *mean = same ? first->value : *mean;",
        "    *mean = last->value;",
        ("optim/test_once_schedulers.py::test_plateau_gets_the_metric_of_the_whole_batch",),
    ),
    Mutant(
        "gradients-not-compared",
        "a split whose gradients are not those of the whole is refused before the update",
        "oomkit/_proof/judge.py",
        "        if not wrong:\n",
        "        if wrong or not wrong:\n",
        ("couplings/test_never_silent.py::test_exact_or_refused_before_the_update",),
    ),
    Mutant(
        "weights-not-projected",
        "in half precision all gradients together tell what the parts weigh",
        "oomkit/_proof/slope.py",
        "_LIMIT = 3e-3",
        "_LIMIT = 3.0",
        ("accum/test_weights_in_half_precision.py::test_weights_that_are_not_found_are_no_proof",),
    ),
    Mutant(
        "clipped-gradients-projected",
        "in half precision gradients are projected as backwards leave them",
        "oomkit/_proof/judge.py",
        "run.sweeps == whole.sweeps:",
        "run.sweeps < 0:",
        (
            "accum/test_weights_in_half_precision.py"
            "::test_gradients_are_projected_as_backwards_leave_them",
        ),
    ),
    Mutant(
        "proof-in-tf32",
        "a proof is made in full single precision",
        "oomkit/_proof/around.py",
        "            put(full)\n",
        "            put(was)\n",
        ("proof/test_rounding.py::test_a_proof_runs_in_full_precision",),
    ),
    Mutant(
        "proof-under-autocast",
        "what autocast would hide is looked at without it",
        "oomkit/_proof/judge.py",
        "        self.around.alone = True\n",
        "        self.around.alone = False\n",
        ("proof/test_rounding.py::test_what_autocast_would_hide_is_refused",),
    ),
    Mutant(
        "tf32-lost",
        "a program's TF32 is put back after a proof",
        "oomkit/_proof/around.py",
        "                put(was)\n",
        "                put\n",
        ("proof/test_rounding.py::test_a_proof_runs_in_full_precision",),
    ),
    Mutant(
        "copies-of-another-gradient",
        "a gradient that has changed since its backward is copied again",
        "oomkit/_proof/runs.py",
        "return seen if values.is_same(values.mark(gradient), seen[1]) else None",
        "return seen",
        (
            "accum/test_weights_in_half_precision.py"
            "::test_gradients_are_projected_as_backwards_leave_them",
        ),
    ),
    Mutant(
        "unshown-splits",
        "a split of which nothing can be compared, because of an error of the step, is refused",
        "csrc/proof/without_graph.c",
        "    p->raises = p->raises && verdict == NULL && !p->unfit;",
        "    p->raises = 0;",
        ("proof/test_proof_weak.py::test_what_cannot_be_compared_at_all_is_refused",),
    ),
    Mutant(
        "rows-not-dealt",
        "what couples rows of several micro-batches, or in training mode alone, is refused",
        "csrc/proof/dealt_rows.c",
        "        batch->dealt = p->dealt;",
        "        batch->dealt = NULL;",
        ("proof/test_proof_training.py::test_rows_that_are_coupled_in_training_mode_alone",),
    ),
    Mutant(
        "numbers-of-one-call",
        "where Python or numpy draw, other numbers than those of the call are compared, too",
        "csrc/proof/proof.c",
        "        p->draw = turn; ",
        "        p->draw = 0; ",
        ("proof/test_proof_training.py::test_numbers_that_choose_rows_in_another_call_alone",),
    ),
    Mutant(
        "hidden-numbers",
        "numbers that no part can be given, in eval mode too, are no proof",
        "oomkit/_proof/draws.py",
        "        self.hides = True",
        "        self.hides = False",
        (
            "proof/test_proof_draws.py::test_numbers_that_no_part_can_be_given_are_no_proof",
            "proof/test_proof_draws.py::test_random_numbers_hide_no_coupled_rows",
        ),
    ),
    Mutant(
        "weight-not-confirmed",
        "weights that the proof finds are tried at a second place before they are used",
        "csrc/proof/weights_search.c",
        "        holds = text == NULL;",
        "        holds = 1;",
        (
            "proof/test_proof_places.py::test_weights_that_hold_in_one_micro_batch_alone",
            "proof/test_proof_later.py"
            "::test_a_count_of_one_in_each_micro_batch_is_refused_before_the_update",
        ),
    ),
    Mutant(
        "counted-in-dimension-0",
        "what does not count is counted in the dimension that the argument's rows have",
        "csrc/accum/proven.c",
        "    if (dim <= 0) {",
        "    if (dim < INT64_MAX) {",
        (
            "proof/test_proof_places.py::"
            "test_labels_that_are_ignored_later_where_rows_stand_in_another_dimension",
        ),
    ),
    Mutant(
        "later-class-weights-not-seen",
        "weights of classes that no proof has seen are proven before the update",
        "csrc/hook/graph_walk.c",
        "    return type->weighs ? oomkit_hash_mix(hash, walk_weights(st, node, type)) : hash;",
        "    return hash;",
        ("accum/test_weights_found.py::test_weights_that_change",),
    ),
    Mutant(
        "earlier-class-weights-believed",
        "weights of classes that come back after others are proven again",
        "csrc/accum/proven.c",
        "    if (rule != before) {",
        "    if (0) {",
        ("accum/test_weights_found.py::test_weights_that_change",),
    ),
    Mutant(
        "later-rows-not-looked-at",
        "operations that only rows of later micro-batches have are proven before the update",
        "csrc/accum/unknown_leaves.c",
        "    if (!call->tries.may_hold && !oomkit_paths_watched(call)) {",
        "    if (!call->tries.may_hold) {",
        (
            "proof/test_proof_paths.py::"
            "test_coupled_rows_are_refused_before_the_update[in_the_last_rows-returned loss-64]",
        ),
    ),
    Mutant(
        "silent-places-count-as-proven",
        "what nothing but 0 has come to in a proof is proven when a gradient comes to it",
        "csrc/accum/proven.c",
        "        } else if (!came && proof) {",
        "        } else if (0) {",
        (
            "proof/test_proof_paths.py::"
            "test_coupled_rows_are_refused_before_the_update[mixed-whole step-64]",
        ),
    ),
    Mutant(
        "dimensions-not-told",
        "the same operation along another dimension is proven before the update",
        "csrc/hook/graph_walk.c",
        "    for (i = 0; i < type->saved_count; i++) {",
        "    for (i = 0; i < 0; i++) {",
        (
            "proof/test_proof_paths.py::"
            "test_coupled_rows_are_refused_before_the_update[along-whole step-2]",
        ),
    ),
    Mutant(
        "places-of-graphs-not-told",
        "a factor of the second of two backwards that look alike is proven when it is no longer 0",
        "csrc/accum/proven.c",
        "    return oomkit_hash_mix(place, call->cut->paths.graphs) | 1;",
        "    return place;",
        (
            "proof/test_proof_paths.py::"
            "test_a_factor_of_the_second_of_two_backwards_that_look_alike[coupled-70]",
        ),
    ),
    Mutant(
        "hooks-not-counted",
        "hooks that were registered since the last call are proven before the update",
        "csrc/accum/proven.c",
        "    if (hooks != 0 && since != 0) {",
        "    if (0) {",
        (
            "proof/test_proof_paths.py::"
            "test_coupled_rows_are_refused_before_the_update[hooked_parameter-whole step-2]",
        ),
    ),
    Mutant(
        "silent-gradients-prove",
        "gradients that are all 0 or not finite prove nothing of the next call",
        "oomkit/_proof/judge.py",
        'return not (in_doubt or "odd" in self._gradients or self.is_silent)',
        "return not in_doubt",
        (
            "proof/test_telling_gradients.py"
            "::test_weights_are_found_in_the_first_call_that_tells_them[5-nan-_sum]",
        ),
    ),
    Mutant(
        "halves-by-chance",
        "the rows that a proof looks at stand for all micro-batches",
        "csrc/proof/proof.c",
        "for (i = 0; result > 0 && !p->own && !p->moved && most > 0; i++) {",
        "for (i = 0; result > 0 && !p->own && !p->moved && most > 7; i++) {",
        (
            "proof/test_proof_chance.py"
            "::test_what_agrees_by_chance_in_some_rows_is_not_shown_by_them[positives-evaluation]",
            "proof/test_proof_chance.py"
            "::test_a_mean_over_rows_is_compared_whole_and_split_all_the_same",
        ),
    ),
    Mutant(
        "numbers-of-other-rows",
        "in a proof a part gets the random numbers of the first rows",
        "oomkit/_proof/draws.py",
        "            found = found.narrow(dim, at, part)",
        "            found = found.narrow(dim, 0, part)",
        (
            "proof/test_proof_draws.py::test_numbers_of_rows_are_those_of_the_whole[_diffusion-training]",
        ),
    ),
    Mutant(
        "rows-chosen-by-chance",
        "numbers that choose among the rows are compared coarsely",
        "oomkit/_proof/draws.py",
        "            elif type(one) is int and type(kept) is int:\n",
        "            elif type(one) is int is type(kept) and one == kept:\n",
        ("proof/test_proof_draws.py::test_the_error_says_what_is_chosen_by_chance",),
    ),
    Mutant(
        "random-numbers-hide",
        "parts that draw random numbers are compared coarsely at once",
        "csrc/proof/compare.c",
        "    if (p->numbers == OOMKIT_NUMBERS_NONE) {",
        "    if (p->numbers == OOMKIT_NUMBERS_SAME) {",
        (
            "proof/test_proof_draws.py::test_numbers_of_rows_are_those_of_the_whole[_diffusion-training]",
        ),
    ),
    Mutant(
        "chance-explains-all",
        "a coarse comparison is as wide as three quarters of a gradient",
        "oomkit/_proof/judge.py",
        "limit += self._chance * added + self._limit * largest",
        "limit += 0.75 * added + self._limit * largest",
        ("proof/test_proof_draws.py::test_a_coarse_bound_is_as_narrow_as_chance",),
    ),
    Mutant(
        "order-over-rows-proves",
        "rows in order, all of one value, prove the next call, where values differ",
        "oomkit/_proof/judge.py",
        "self._orders = order_rows(whole.bounds[0], made.bounds, self._orders)",
        "order_rows(whole.bounds[0], made.bounds, self._orders)",
        (
            "proof/test_proof_bounds.py"
            "::test_an_order_over_rows_is_not_shown_by_rows_with_equal_values[sort-4]",
        ),
    ),
    Mutant(
        "numbers-of-a-loss-not-looked-at",
        "what a loss is divided by may begin to differ between micro-batches",
        "csrc/proof/observe.c",
        "    is_new = is_new == 0 ? oomkit_terms_are_new(call) : is_new;\n",
        "",
        (
            "proof/test_proof_later.py"
            "::test_a_number_out_of_the_batch_that_changes_is_refused_before_the_update[_hard_mean-2]",
        ),
    ),
    Mutant(
        "given-gradients-not-looked-at",
        "what backward() is given may begin to differ between micro-batches",
        "oomkit/_proof/graphs/terms.py",
        "        yield at, root, gradients[at] if at < len(gradients) else None\n",
        "        yield at, root, None\n",
        (
            "proof/test_proof_later.py"
            "::test_a_gradient_given_to_a_backward_that_changes_is_refused_before_the_update[_number-2]",
        ),
    ),
    Mutant(
        "shape-of-a-loss-hides-its-numbers",
        "a loss in another shape hides what it was divided by",
        "oomkit/_proof/graphs/terms.py",
        '_OF_ONE = frozenset({"Expand", "Mean", "Select", "Sum"})\n',
        "_OF_ONE = frozenset()\n",
        (
            "proof/test_proof_later.py"
            "::test_a_number_out_of_the_batch_that_changes_is_refused_before_the_update[_hard_shaped-2]",
        ),
    ),
    Mutant(
        "changed-gradients-are-no-path",
        "a step may begin to multiply gradients by a number of its last micro-batch",
        "csrc/proof/observe.c",
        "    return now == left ? 0 : oomkit_paths_kind(call, CHANGED);\n",
        "    return 0;\n",
        (
            "proof/test_proof_later.py"
            "::test_gradients_that_the_step_begins_to_change_by_its_loss_are_refused_before_the_update"
            "[_multiplied-2]",
        ),
    ),
    Mutant(
        "norms-of-gradients-not-compared",
        "so it may where only torch knows the values of gradients, as on a device",
        "csrc/proof/observe.c",
        "    if (PyList_GET_SIZE(others) == 0) {\n",
        "    if (PyList_GET_SIZE(others) >= 0) {\n",
        (
            "proof/test_proof_later.py::test_so_they_are_where_only_torch_knows_their_values"
            "[_multiplied]",
        ),
    ),
    Mutant(
        "gaps-read-as-they-lie",
        "gradients with gaps are sampled as those that replace them, which have none",
        "csrc/torch/tensors.cpp",
        "        const bool has_gaps = !impl->is_non_overlapping_and_dense();\n",
        "        const bool has_gaps = false;\n",
        (
            "proof/test_proof_later.py::test_so_they_are_where_there_are_gaps_between_their_values"
            "[_replaced-True]",
        ),
    ),
    Mutant(
        "unscaled-gradients-not-sampled",
        "a step may begin to change gradients behind the unscaling of a scaler",
        "csrc/proof/observe.c",
        "    .update_ends = proof_update_ends,\n",
        "",
        (
            "proof/test_proof_later.py::test_so_they_are_behind_the_unscaling_of_a_scaler"
            "[_multiplied]",
        ),
    ),
    Mutant(
        "sum-over-one-is-proven",
        "a sum that is divided by 1 is proven for later calls, where 1 was max(1, n)",
        "oomkit/_proof/judge.py",
        "        self._in_doubt |= learn_terms(",
        "        learn_terms(",
        (
            "proof/test_proof_later.py"
            "::test_a_count_of_one_in_each_micro_batch_is_refused_before_the_update",
        ),
    ),
    Mutant(
        "scale-not-lowered",
        "a proof gives up where gradients overflow under a GradScaler",
        "oomkit/_proof/quiet.py",
        "        return again\n",
        "        return False\n",
        (
            "proof/test_proof_overflow.py"
            "::test_coupled_rows_are_found_where_gradients_overflow[1000000000000.0]",
        ),
    ),
    Mutant(
        "sum-for-a-mean",
        "a mean that is returned in the place of a loss that is added is not added",
        "csrc/result/join_rules.c",
        "if ((r->is_sum && !where->is_loss) ||",
        "if (r->is_sum ||",
        (
            "proof/test_proof_numbers.py"
            "::test_what_stands_for_a_loss_that_is_added_may_be_a_mean[mean-]",
        ),
    ),
    Mutant(
        "later-error-counts-as-proof",
        "a part that raises when a later call is verified leads to a proof",
        "csrc/proof/proof.c",
        "        raised = 1;\n",
        "        oomkit_proven_again(p->call);\n",
        (
            "proof/test_proof_again.py"
            "::test_rows_that_see_those_of_another_micro_batch_are_refused[3-None-False]",
        ),
    ),
    Mutant(
        "unshown-mean-unsaid",
        "a number that was 0 where it was proven is averaged with a warning",
        "csrc/result/join_rules.c",
        "unknown = summed ? NULL : mean_is_unknown(r, where);",
        "unknown = NULL;",
        (
            "proof/test_proof_numbers.py"
            "::test_a_number_that_was_0_when_proven_is_settled_by_the_next_proof[False-mean]",
        ),
    ),
    Mutant(
        "later-numbers-not-compared",
        "numbers among the results of later calls are compared",
        "csrc/proof/proof.c",
        "            differs = others == Py_True;\n",
        "            differs = 0;\n",
        (
            "proof/test_proof_numbers.py"
            "::test_a_number_that_comes_later_is_averaged_with_a_warning[total]",
        ),
    ),
    Mutant(
        "zero-beside-a-sum-is-added",
        "a number that was 0 in the place of a loss that is added is no loss",
        "oomkit/_proof/numbers.py",
        "            self._no_loss.add(place)\n",
        "            pass\n",
        (
            "proof/test_proof_numbers.py"
            "::test_a_number_that_was_0_when_proven_is_settled_by_the_next_proof[False-mean]",
        ),
    ),
    Mutant(
        "argument-of-a-product-alike",
        "a factor that becomes a tensor in the first argument of a product is seen",
        "csrc/hook/graph_walk.c",
        "(uint64_t)(frame->next < ARGUMENTS ? frame->next : ARGUMENTS)",
        "(uint64_t)0",
        (
            "proof/test_proof_again.py"
            "::test_a_factor_that_is_computed_from_a_call_on_is_refused_there[k * reg-5]",
        ),
    ),
    Mutant(
        "later-gradients-not-compared",
        "gradients are compared where a later call is verified",
        "csrc/proof/proof.c",
        "(cut && p->call->options->verify != OOMKIT_VERIFY_WARN",
        "(0 && cut",
        (
            "proof/test_proof_again.py::test_a_factor_of_elements_is_refused_where_it_is_verified[2]",
        ),
    ),
    Mutant(
        "switched-once-unseen",
        "a switch that the first micro-batch alone makes is refused",
        "csrc/undo/flags.c",
        "    if (switches_lack(call, &s->computed, 0, &which) <= 0) {",
        "    if (1) {",
        ("undo/test_switches.py::test_what_is_switched_once_stays_or_is_refused[eval-before-2]",),
    ),
    Mutant(
        "switched-once-lost",
        "what the first micro-batch alone has switched behind the update stays",
        "csrc/undo/flags.c",
        "? switches_lack(call, &s->left, 1, NULL)",
        "? 0",
        ("undo/test_switches.py::test_what_is_switched_once_stays_or_is_refused[eval-behind-2]",),
    ),
]
