"""Of trainers: their tests need the libraries of one of two environments each."""

from __future__ import annotations

from .mutant import Mutant

TRAINERS = [
    Mutant(
        "evaluated-tokens-by-rows",
        "an evaluated loss is a mean over the labels that count",
        "oomkit/_trainers/calls.py",
        "        return float((counts if ignored is None else counts & (labels != ignored)).sum())",
        "        return float(len(counts))",
        ("trainers/test_hf_sweep.py::test_evaluation_survives[lm]",),
    ),
    Mutant(
        "metrics-by-rows",
        "a metric of tokens is weighed by tokens",
        "oomkit/_trainers/books.py",
        "        if measure is not None:",
        "        if measure is None:",
        ("trainers/test_trl_sweep.py::test_training_survives[sft]",),
    ),
    Mutant(
        "metrics-not-folded",
        "a split call leaves one entry of each metric",
        "oomkit/_trainers/books.py",
        "        if len(parts) < 2:\n            return\n",
        "        if parts:\n            return\n",
        ("trainers/test_trl_sweep.py::test_training_survives[sft]",),
    ),
    Mutant(
        "books-not-rolled-back",
        "what a trainer notes goes back with an attempt",
        "oomkit/_trainers/calls.py",
        '            "participants": (*given, books),',
        '            "participants": given,',
        ("trainers/test_trl_sweep.py::test_training_survives[sft]",),
    ),
    Mutant(
        "margins-averaged",
        "the margin of rewards is the difference of two means",
        "oomkit/_trainers/books.py",
        '        if self._family == "KTOTrainer":\n            self._margins(parts)',
        "        if self._family is None:\n            self._margins(parts)",
        ("trainers/test_trl_sweep.py::test_training_survives[kto_apo]",),
    ),
    Mutant(
        "pairs-by-rows",
        "a part of a batch of pairs has both halves of each",
        "oomkit/_trainers/rows.py",
        "both = value[start:end], value[self.rows + start : self.rows + end]",
        "both = value[2 * start : start + end], value[start + end : 2 * end]",
        ("trainers/test_trl_sweep.py::test_training_survives[dpo]",),
    ),
    Mutant(
        "packed-rows-cut",
        "sequences that are packed into one row stay together",
        "oomkit/_trainers/rows.py",
        "    for name in _PACKED:",
        "    for name in ():",
        ("trainers/test_trl_sweep.py::test_sequences_packed_into_one_row_are_kept_whole",),
    ),
    Mutant(
        "proof-in-train-mode",
        "train() of a step does not take modules out of the eval mode of a proof",
        "oomkit/_proof/quiet.py",
        '        self._set(module, "train", lambda mode=True: module)',
        '        self._set(module, "oomkit", None)',
        ("trainers/test_hf_sweep.py::test_training_survives[classes_dropout]",),
    ),
    Mutant(
        "window-replayed-with-other-numbers",
        "calls of a window that are run again draw the random numbers that they drew",
        "csrc/undo/random.c",
        "    if (rng->cpu_state != NULL) {\n        OWNED PyObject *done =",
        "    if (0) {\n        OWNED PyObject *done =",
        ("trainers/test_hf_sweep.py::test_known_shapes_in_a_later_window_with_dropout",),
    ),
    Mutant(
        "proof-of-another-model",
        "what was proven of the model of one training is not believed of the next one's",
        "oomkit/_trainers/calls.py",
        "        if self._model is not None and self._model() is trainer.model:",
        "        if self._model is not None:",
        ("trainers/test_hf_other_models.py::test_the_proof_of_a_model_is_not_of_the_next_one",),
    ),
    Mutant(
        "sizes-not-resumed",
        "a training that is resumed begins with the sizes of its checkpoint",
        "oomkit/_trainers/kept_state.py",
        "            call.load_sizes(sizes[call.name])",
        "            call.load_sizes(call.sizes())",
        ("trainers/test_hf_protect.py::test_sizes_are_in_checkpoints_and_used_again",),
    ),
    Mutant(
        "layer-by-layer-not-refused",
        "an optimizer whose updates are made inside the backward is refused",
        "oomkit/_trainers/refusals.py",
        '_IN_BACKWARD = ("lomo", "layerwise")',
        '_IN_BACKWARD = ("lomo",)',
        ("trainers/test_hf_refused.py::test_updates_inside_the_backward",),
    ),
]

LIGHTNING = [
    Mutant(
        "last-value-logged",
        "what is logged of a split batch is its mean",
        "oomkit/_trainers/module_log.py",
        "        return _mean(values, weights)",
        "        return values[-1]",
        ("trainers/test_lightning.py::test_one_call_of_log_for_a_batch",),
    ),
    Mutant(
        "largest-value-averaged",
        "what is logged with reduce_fx=max is the largest",
        "oomkit/_trainers/module_log.py",
        "        if kind in _EXTREMES:",
        "        if kind in ():",
        ("trainers/test_lightning.py::test_validation_survives",),
    ),
    Mutant(
        "logged-again",
        "a replay that the backward begins logs nothing",
        "oomkit/_trainers/module_log.py",
        "            if not self._in_a_step():",
        "            if self._module() is not None:",
        ("trainers/test_lightning.py::test_the_backward_that_lightning_runs_survives",),
    ),
    Mutant(
        "steps-counted-in-parts",
        "Lightning counts the step of an optimizer once for a batch",
        "oomkit/_trainers/module_calls.py",
        "        if _C.current().is_last:\n            self._own[1]()",
        "        if _C.current() is not None:\n            self._own[1]()",
        ("trainers/test_lightning.py::test_training_survives[1-manual]",),
    ),
]
