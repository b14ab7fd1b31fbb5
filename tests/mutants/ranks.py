"""With several ranks."""

from __future__ import annotations

from .mutant import Mutant

ACCUMULATED = (
    "ranks/test_steps.py::"
    "test_gradients_that_stay_on_each_rank_until_a_later_backward_are_proven_and_kept"
)
VOTE = "            self.vote(AGAIN, matters.UPDATED if self.committed else matters.REDUCTION)\n"
STEPS, UPDATES, WORLD = (f"ranks/test_{name}.py" for name in ("steps", "updates", "world"))

MUTANTS = [
    Mutant(
        "reducer-not-reset",
        "an attempt that ranks begin again begins with a reducer that expects nothing",
        "oomkit/_ranks/reducer.py",
        "        self.real._reset_state()\n        self.due",
        "        self.due",
        ("ranks/test_ddp.py::test_each_place_of_a_plain_step",),
    ),
    Mutant(
        "cut-off-reductions-not-waited-for",
        "ranks that begin again wait for what they have sent of a reduction",
        "oomkit/_ranks/reducer.py",
        '        if backend.name() == "gloo":',
        '        if backend.name() == "none":',
        ("ranks/test_steps.py::test_all_wait_for_what_was_sent_of_a_reduction_that_was_cut_off",),
    ),
    Mutant(
        "hook-runs-again-from-its-begin",
        "a hook that runs once more leaves out the collectives that its rank has made",
        "oomkit/_ranks/reducer.py",
        "        self._again = self._hooked\n",
        "",
        (
            "ranks/test_steps.py::"
            "test_one_in_a_hook_with_a_state_reaches_all_and_nobody_updates[2-{}]",
        ),
    ),
    Mutant(
        "state-of-a-hook-left",
        "a hook that runs once more makes the collectives that the others make",
        "oomkit/_ranks/reducer.py",
        "        for state in self._states:\n            state.restore()\n",
        "",
        (
            "ranks/test_steps.py::"
            "test_one_in_a_hook_with_a_state_reaches_all_and_nobody_updates[2-{}]",
        ),
    ),
    Mutant(
        "hooks-see-the-reduction",
        "hooks on parameters run in the step's own backward, not in that of a reduction",
        "oomkit/_ranks/reducer.py",
        "        for hooks in found:\n            hooks.clear()\n",
        "",
        ("ranks/test_hooked.py::test_hooks_run_as_often_and_in_the_order_as_with_torch_alone",),
    ),
    Mutant(
        "changed-buffers-not-sent",
        "buffers that a normalisation in training has changed are sent before the next forward",
        "oomkit/_ranks/agreement.py",
        "        if buffers.are_known(model) and not buffers.move(model):",
        "        if buffers.are_known(model):",
        ("ranks/test_buffered.py::test_a_normalisation_in_training_is_sent_as_with_torch_alone",),
    ),
    Mutant(
        "vote-before-drain",
        "a rank that failed makes up for its part of a reduction before it votes",
        "oomkit/_ranks/agreement.py",
        f"            for reducer in self._reducers:\n                self._drain(reducer)\n{VOTE}",
        f"{VOTE}            for reducer in self._reducers:\n                self._drain(reducer)\n",
        ("ranks/test_ddp.py::test_each_place_of_a_plain_step",),
    ),
    Mutant(
        "unsharded-gradients-kept",
        "gradients of an attempt that failed are in none of the next",
        "oomkit/_ranks/sharded.py",
        "        self.take()\n        self.of.reduce_grads",
        "        self.of.reduce_grads",
        ("ranks/test_steps.py::test_gradients_of_an_attempt_that_failed_are_in_none_of_the_next",),
    ),
    Mutant(
        "earlier-gradients-lost",
        "gradients that earlier calls left on a rank are there when its attempt begins again",
        "oomkit/_ranks/sharded.py",
        "        self.not_come()\n        _C.exempt(self._give_held)\n",
        "        self.not_come()\n",
        (ACCUMULATED,),
    ),
    Mutant(
        "own-gradients-lost",
        "a rank that takes part in another one's reduction keeps its own gradients",
        "oomkit/_ranks/sharded.py",
        "            self._scatter_nothing(mask)\n        _give(held)\n",
        "            self._scatter_nothing(mask)\n",
        (ACCUMULATED,),
    ),
    Mutant(
        "rank-not-weighed",
        "a whole batch counts as much as its items are of those of all ranks",
        "csrc/module/wiring.c",
        "    &oomkit_rank_weights_rule,   /* before them too: it may refuse */\n",
        "",
        (
            "ranks/test_weighed.py::"
            "test_gradients_are_those_of_one_process_with_all_items[shared memory]",
        ),
    ),
    Mutant(
        "reduction-of-others-left-open",
        "a rank whose step raises takes part in the reduction that ranks elsewhere wait in",
        "oomkit/_ranks/agreement.py",
        "        self.world.kept = kept = reducer.post()\n",
        "        self.world.kept = kept = [[]]\n",
        (
            f"{STEPS}::test_it_reaches_ranks_of_other_machines_in_their_reduction"
            "[[2, 2]-False-True]",
        ),
    ),
    Mutant(
        "others-not-waited-for-when-they-meet",
        "no rank begins a collective before all have seen that all are of one kind",
        "oomkit/_ranks/world.py",
        "        self._all_alike(differs)\n",
        "        if differs is not None:\n            raise error(*differs)\n",
        (f"{WORLD}::test_another_world_with_the_same_store_is_an_error_on_all",),
    ),
    Mutant(
        "error-not-looked-for-in-a-collective",
        "a rank in a collective of the step's own ends by the error of one that does not come",
        "oomkit/_ranks/world.py",
        "            failed = self.others.failed()\n",
        "            failed = None\n",
        (f"{STEPS}::test_an_error_reaches_a_rank_in_a_collective_of_the_steps_own[at once-ddp]",),
    ),
    Mutant(
        "buffers-back-to-those-before-their-broadcast",
        "a part that is repeated has the buffers that all ranks have",
        "oomkit/_ranks/parts.py",
        "    _C._part_keeps(model.modules_buffers)\n",
        "",
        (f"{STEPS}::test_buffers_are_broadcast_once_for_parts_that_are_repeated",),
    ),
    Mutant(
        "collectives-made-in-a-batch-that-one-rank-splits",
        "a batch that is split for want of memory on one rank makes no collective in its parts",
        "oomkit/_ranks/parts.py",
        "        raise _C.SplitError(\n",
        "        str(\n",
        (f"{STEPS}::test_collectives_of_a_model_in_parts_are_said_and_not_repeated[backward-1]",),
    ),
    Mutant(
        "updates-not-voted-on",
        "after an update that was tight on some rank all say whether theirs has worked",
        "oomkit/_ranks/call.py",
        "        if not self.unsettled:\n            return 0\n",
        "        if True:\n            return 0\n",
        (f"{UPDATES}::test_all_take_it_back[asked for]",),
    ),
    Mutant(
        "later-updates-not-voted-on",
        "updates after a backward that follows others are voted on again",
        "oomkit/_ranks/call.py",
        'follow it on all ranks."""\n        self.settled = False\n',
        'follow it on all ranks."""\n',
        (f"{UPDATES}::test_all_take_it_back[the second of two in turn]",),
    ),
    Mutant(
        "tight-on-one-rank-alone",
        "where the update of one rank is tight all keep copies of what theirs changes",
        "csrc/ranks/agree.c",
        "    call->ranks.careful->optimizer_copy = call->ranks.careful->optimizer_parts = 1;\n",
        "    call->ranks.careful->optimizer_copy = 0;\n",
        (f"{UPDATES}::test_all_take_it_back[tight]",),
    ),
    Mutant(
        "update-kept-beside-an-error",
        "a rank that learns of another one's failed update takes its own back",
        "oomkit/_ranks/call.py",
        "        return self.lost or (self.unsettled",
        "        return (self.unsettled",
        (f"{UPDATES}::test_all_take_it_back[error between two]",),
    ),
    Mutant(
        "first-gather-not-made-up-for",
        "a rank that failed in its first gather takes part in the others' reduction",
        "oomkit/_ranks/sharded.py",
        "        for p in fresh:  # this rank failed in its first gather\n",
        "        for p in fresh[:0]:\n",
        (
            "ranks/test_steps.py::"
            "test_a_rank_that_fails_in_its_first_gather_takes_part_in_the_others_reduction",
        ),
        also=(("        for p in fresh:\n", "        for p in fresh[:0]:\n"),),
    ),
    Mutant(
        "long-mask-cut-off",
        "a mask of many parameters is told as it is",
        "oomkit/_ranks/sharded.py",
        "self.world.others.kept(told - _KEPT)",
        "self.world.others.kept(told - _KEPT) & _KEPT - 1",
        ("ranks/test_steps.py::test_a_group_may_have_any_number_of_parameters[most]",),
    ),
    Mutant(
        "stale-segment-opened",
        "memory that ranks share is of this start of this job",
        "csrc/ranks/vote.c",
        "        m->world != world || m->epoch != epoch || rank >= world) {",
        "        m->world != world || (m->epoch != epoch && world == 0) || rank >= world) {",
        ("ranks/test_vote.py::test_the_vote[plain]",),
    ),
    Mutant(
        "other-machines-not-told",
        "a rank that is missed on its machine is missed on the others",
        "oomkit/_ranks/ways.py",
        "                if self.leads and missed.rank is not None:\n",
        "                if self.leads and missed.rank is None:\n",
        (
            "ranks/test_world.py::"
            "test_a_rank_that_does_not_come_is_named_on_all_machines[2 + 2-kill-3]",
        ),
    ),
    Mutant(
        "dead-rank-waited-for",
        "a rank whose process has ended is not waited for",
        "csrc/ranks/process.c",
        "    if (state == 'Z' || state == 'X' || (started != 0 && now != started)) {",
        "    if (state == 'X' && now != started) {",
        ("ranks/test_vote.py::test_the_vote[plain]",),
    ),
    Mutant(
        "own-collective-repeated",
        "after a collective of the step's own no rank begins again",
        "oomkit/_ranks/agreement.py",
        "        self.own = name\n",
        "        self.own = str()\n",
        (
            "ranks/test_steps.py::test_a_collective_of_the_steps_own_is_made_once[0-backward]",
            "ranks/test_steps.py::test_a_collective_of_the_steps_own_is_made_once[1-backward]",
        ),
    ),
    Mutant(
        "backward-of-the-caller-not-reduced",
        "a loss that is returned is reduced by torch in the caller's backward",
        "oomkit/_ranks/reducer.py",
        "            self.real.prepare_for_backward(self._outputs)\n",
        "            pass\n",
        ("ranks/test_steps.py::test_a_loss_that_is_returned_is_torchs_affair",),
    ),
    Mutant(
        "attempts-counted-by-a-static-graph",
        "torch counts neither attempts that failed nor micro-batches where a graph is static",
        "oomkit/_ranks/reducer.py",
        "            self.real = self._fresh()\n            self.model.__dict__",
        "            self.model.__dict__",
        ("ranks/test_steps.py::test_a_static_graph_is_as_with_torch_alone",),
    ),
    Mutant(
        "used-parameters-of-a-static-graph-not-told",
        "a rank that fails in the first reduction of a static graph takes part in all of it",
        "oomkit/_ranks/reducer.py",
        "        return [self.nothing_used(), *found] if self.first else found\n",
        "        return found\n",
        ("ranks/test_steps.py::test_a_static_graph_is_as_with_torch_alone",),
    ),
    Mutant(
        "gathers-of-other-machines-not-followed",
        "who waits in a vote takes part in what ranks of other machines gather",
        "oomkit/_ranks/ways.py",
        "            if at == self._at():\n",
        "            if at == self._at() and place < 0:\n",
        (f"{STEPS}::test_it_reaches_ranks_that_share_no_memory_in_their_gathers[1 + 1]",),
    ),
    Mutant(
        "unknown-optimizer-not-voted-on",
        "the update of an optimizer that was not found is voted on once more after it",
        "csrc/accum/unknown_leaves.c",
        "OOMKIT_UPDATE_NEAR",
        "OOMKIT_UPDATE_ROOMY",
        (f"{UPDATES}::test_it_is_an_error_on_all_where_the_optimizer_is_not_found",),
    ),
    Mutant(
        "earlier-forward-still-due",
        "a backward under no_sync() reduces nothing, whatever an earlier micro-batch has run",
        "oomkit/_ranks/reducer.py",
        "        self.due = False\n\n    def backward_begins",
        "        pass\n\n    def backward_begins",
        (f"{STEPS}::test_the_backward_of_a_step_that_synchronises_is_the_same_in_micro_batches",),
    ),
    Mutant(
        "who-has-left-waited-for",
        "a rank that has left takes part in the votes of the others",
        "oomkit/_ranks/joins.py",
        "    if told.item() >= _AGREED:\n",
        "    if told.item() < 0.0:\n",
        (f"{STEPS}::test_ranks_leave_as_with_torch_alone[plain True]",),
    ),
    Mutant(
        "who-has-left-not-in-a-reduction-voted-on",
        "without shared memory a rank that has left takes part in what was voted on",
        "oomkit/_ranks/joins.py",
        "            if matter == matters.REDUCTION and not self.world.shared:\n",
        "            if matter == matters.REDUCTION and self.world.shared:\n",
        (
            f"{STEPS}::test_ranks_leave_without_shared_memory_and_on_several_machines"
            "[gloo-plain True]",
        ),
    ),
    Mutant(
        "divided-by-all-after-some-left",
        "gradients are divided by the ranks that have not left, where join() says so",
        "oomkit/_ranks/joins.py",
        "        model.reducer._set_forward_pass_work_handle("
        "self._work, model._divide_by_initial_world_size)\n",
        "",
        (f"{STEPS}::test_ranks_leave_as_with_torch_alone[plain False]",),
    ),
    Mutant(
        "who-has-left-broadcasts-whenever",
        "a rank that has left knows whether the others' next forward broadcasts buffers",
        "oomkit/_ranks/joins.py",
        "bool(matter & BROADCASTS)\n",
        "True\n",
        (f"{STEPS}::test_ranks_leave_as_with_torch_alone[no_sync, norm True]",),
    ),
    Mutant(
        "buffers-of-a-call-without-forward",
        "a call inside join() that runs no forward leaves buffers as they were",
        "oomkit/_ranks/joins.py",
        "        if not forwards:\n",
        "        if not forwards and not self._before:\n",
        (f"{STEPS}::test_ranks_leave_as_with_torch_alone[idle, norm True]",),
    ),
    Mutant(
        "begun-for-a-forward-that-does-not-come",
        "a call that is not agreed on leaves nothing begun inside join()",
        "oomkit/_ranks/joins.py",
        "            _shadow_nothing(model)\n",
        "",
        (f"{STEPS}::test_a_rank_that_has_left_before_all_have_met_is_torchs_affair[idle-first]",),
    ),
    Mutant(
        "who-has-left-gone-before-the-last-vote",
        "a rank that has left comes to the vote after a tight update, too",
        "oomkit/_ranks/joins.py",
        "                if largest < TIGHT:\n",
        "                if largest < AGAIN:\n",
        (f"{UPDATES}::test_who_has_left_takes_part_in_the_vote_after_an_update[-undone]",),
    ),
    Mutant(
        "who-has-left-awaited-in-an-update",
        "no vote follows an update that ranks make together with those that have left",
        "oomkit/_ranks/joins.py",
        "% _AGREED < _BUSY\n",
        "% _AGREED >= 0.0\n",
        (f"{UPDATES}::test_who_has_left_takes_part_in_the_vote_after_an_update[-zero]",),
    ),
    Mutant(
        "update-settled-by-its-collectives",
        "an update that makes collectives is voted on when it is over, too",
        "oomkit/_ranks/call.py",
        "            self.settled = not inside\n",
        "            self.settled = True\n",
        (f"{UPDATES}::test_an_update_that_makes_collectives_is_made_again_by_all",),
    ),
    Mutant(
        "held-round-left",
        "nobody leaves a round of a machine while its first rank may still tell of a step",
        "csrc/ranks/vote.c",
        "    return first < vote->world ? first : holder;\n",
        "    return first;\n",
        ("ranks/test_vote.py::test_the_vote[plain]",),
        also=(
            (
                " &&\n           atomic_load(&one->holds) != vote->round;\n",
                ";\n",
            ),
        ),
    ),
    Mutant(
        "gathered-is-replaced",
        "a parameter that was gathered is not one that the step has replaced",
        "csrc/undo/parameter_slots.c",
        "            if (gathered > 0) {",
        "            if (gathered > 1) {",
        (
            "ranks/test_steps.py::"
            "test_parameters_that_are_gathered_when_a_call_begins_or_ends[teacher-None]",
        ),
    ),
    Mutant(
        "gathered-on-some-ranks",
        "all ranks leave a call with the same parameters gathered: none",
        "oomkit/_ranks/sharded.py",
        "        if self._backwards > 0 or self.trouble:",
        "        if self._backwards > 10**6:",
        (
            "ranks/test_steps.py::"
            "test_parameters_that_are_gathered_when_a_call_begins_or_ends[teacher-None]",
        ),
    ),
    Mutant(
        "buckets-in-any-order",
        "the first reduction touches parameters in the order of a backward",
        "oomkit/_ranks/reducer.py",
        "            if self.finds or self.model._has_rebuilt_buckets:",
        "            if used:",
        ("ranks/test_steps.py::test_buckets_are_made_anew_in_the_order_of_a_backward",),
    ),
    Mutant(
        "errors-after-an-update-told",
        "an error after the updates of all ranks is the affair of one",
        "csrc/ranks/agree.c",
        "call->ranks.updated ? Py_True : Py_False",
        "Py_False",
        ("ranks/test_steps.py::test_an_error_after_an_update_is_nobodys_affair",),
    ),
    Mutant(
        "own-collective-leaves-others",
        "a rank that cannot begin again takes part in the reduction of the others",
        "oomkit/_ranks/agreement.py",
        "self.cannot if self._done > 0 else self.cannot_reduce, name",
        "self.cannot, name",
        (
            "ranks/test_steps.py::"
            "test_nobody_waits_for_a_step_with_a_collective_that_cannot_begin_again[after-function]",
        ),
    ),
    Mutant(
        "methods-of-a-group-unseen",
        "what a step reduces by a method of its process group nobody knows of",
        "oomkit/_ranks/world.py",
        "if type(self) is not dist.ProcessGroup or _asks_itself():",
        "if True:",
        (
            "ranks/test_steps.py::"
            "test_nobody_waits_for_a_step_with_a_collective_that_cannot_begin_again[before-method]",
        ),
    ),
    Mutant(
        "ends-under-a-collective",
        "a program that ends right after a collective leaves its threads time to free it",
        "oomkit/_ranks/world.py",
        "        time.sleep(_LEAVE)\n",
        "        pass\n",
        (
            "ranks/test_world.py"
            "::test_a_program_that_ends_at_once_after_a_collective_does_not_abort",
        ),
    ),
]
