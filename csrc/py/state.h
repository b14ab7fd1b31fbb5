/* Module state: every object that oomkit._C keeps, as one list. */
#ifndef OOMKIT_PY_STATE_H
#define OOMKIT_PY_STATE_H

#include "refs.h"
#include "../torch/bridge.h"

/* The end of a message: where its entry of docs/reference/errors.md is shown. `kind` is
 * a literal, the heading of the entry. In Python `_C.see(kind)`. */
#define SEE(kind) " (help: python -m oomkit explain " kind ")"

/* Of a node of a graph: what decides whether it has rows in common. */
#define OOMKIT_STATE_SAVED(X)                                                          \
    X(str_saved_dim, "_saved_dim")                                                     \
    X(str_saved_dims, "_saved_dims")                                                   \
    X(str_saved_dim0, "_saved_dim0")                                                   \
    X(str_saved_dim1, "_saved_dim1")                                                   \
    X(str_saved_dim2, "_saved_dim2")                                                   \
    X(str_saved_dimension, "_saved_dimension")                                         \
    X(str_saved_normalized_shape, "_saved_normalized_shape")                           \
    X(str_saved_sumdim, "_saved_sumdim")                                               \
    X(str_saved_reduction, "_saved_reduction")                                         \
    X(str_saved_reduce, "_saved_reduce")                                               \
    X(str_saved_mode, "_saved_mode")                                                   \
    X(str_saved_train, "_saved_train")                                                 \
    X(str_saved_training, "_saved_training")

/* Interned names: X(field, text). */
#define OOMKIT_STATE_STRINGS(X)                                                        \
    OOMKIT_STATE_SAVED(X)                                                              \
    X(str_saved_weight, "_saved_weight")                                               \
    X(str_grad, "grad")                                                                \
    X(str_step, "step")                                                                \
    X(str_update, "update")                                                            \
    X(str_unscale, "unscale_")                                                         \
    X(str_loss, "loss")                                                                \
    X(str_state, "state")                                                              \
    X(str_param_groups, "param_groups")                                                \
    X(str_params, "params")                                                            \
    X(str_parameters, "_parameters")                                                   \
    X(str_ignore_index, "ignore_index")                                                \
    X(str_global_forward_pre_hooks, "_global_forward_pre_hooks")                       \
    X(str_id, "id")                                                                    \
    X(str_buffers, "_buffers")                                                         \
    X(str_modules, "_modules")                                                         \
    X(str_dot, ".")                                                                    \
    X(str_named_modules, "named_modules")                                              \
    X(str_training, "training")                                                        \
    X(str_version, "_version")                                                         \
    X(str_cdata, "_cdata")                                                             \
    X(str_requires_grad, "requires_grad")                                              \
    X(str_is_leaf, "is_leaf")                                                          \
    X(str_grad_fn, "grad_fn")                                                          \
    X(str_detach, "detach")                                                            \
    X(str_clone, "clone")                                                              \
    X(str_copy, "copy_")                                                               \
    X(str_narrow, "narrow")                                                            \
    X(str_size, "size")                                                                \
    X(str_shape, "shape")                                                              \
    X(str_data_ptr, "data_ptr")                                                        \
    X(str_dtype, "dtype")                                                              \
    X(str_device, "device")                                                            \
    X(str_dim, "dim")                                                                  \
    X(str_backward, "backward")                                                        \
    X(str_mul, "mul")                                                                  \
    X(str_optimizer, "optimizer")                                                      \
    X(str_fields, "_fields")                                                           \
    X(str_data, "data")                                                                \
    X(str_dataclass_fields, "__dataclass_fields__")                                    \
    X(str_n_sequence_fields, "n_sequence_fields")                                      \
    X(str_name, "__name__")                                                            \
    X(str_qualname, "__qualname__")                                                    \
    X(str_module, "__module__")                                                        \
    X(str_wrapped, "__wrapped__")                                                      \
    X(str_dict, "__dict__")                                                            \
    X(str_code, "__code__")                                                            \
    X(str_error_code, "error_code")                                                    \
    X(str_inner_exception, "inner_exception")                                          \
    X(str_exceptions, "exceptions")                                                    \
    X(str_report, "report")                                                            \
    X(str_committed, "committed")                                                      \
    X(str_tb_next, "tb_next")                                                          \
    X(str_tb_frame, "tb_frame")                                                        \
    X(str_tb_lineno, "tb_lineno")                                                      \
    X(str_clear, "clear")                                                              \
    X(str_f_code, "f_code")                                                            \
    X(str_co_filename, "co_filename")                                                  \
    X(str_get_state, "get_state")                                                      \
    X(str_set_state, "set_state")                                                      \
    X(str_getstate, "getstate")                                                        \
    X(str_setstate, "setstate")                                                        \
    X(str_state_dict, "state_dict")                                                    \
    X(str_load_state_dict, "load_state_dict")                                          \
    X(str_save, "save")                                                                \
    X(str_restore, "restore")                                                          \
    X(str_warning, "warning")                                                          \
    X(str_info, "info")                                                                \
    X(str_per_optimizer_states, "_per_optimizer_states")                               \
    X(str_zero_grad, "zero_grad")                                                      \
    X(str__schedulers, "_schedulers")                                                  \
    X(str__last_lr, "_last_lr")                                                        \
    X(str_lr_lambdas, "lr_lambdas")                                                    \
    X(str__scale_fn_custom, "_scale_fn_custom")                                        \
    X(str_update_parameters, "update_parameters")                                      \
    X(str_cpu, "cpu")                                                                  \
    X(str_closure, "__closure__")                                                      \
    X(str_cell_contents, "cell_contents")                                              \
    X(str_globals, "__globals__")                                                      \
    X(str_co_names, "co_names")                                                        \
    X(str_co_consts, "co_consts")                                                      \
    X(str_func, "func")                                                                \
    X(str_call, "__call__")                                                            \
    X(str_func_attr, "__func__")                                                       \
    X(str_self_attr, "__self__")                                                       \
    X(str_doc, "__doc__")                                                              \
    X(str_args, "args")                                                                \
    X(str_keywords, "keywords")                                                        \
    X(str_forward_pre_hooks, "_forward_pre_hooks")                                     \
    X(str_forward, "forward")                                                          \
    X(str_defaults, "__defaults__")                                                    \
    X(str_kwdefaults, "__kwdefaults__")                                                \
    X(str_set_name, "__set_name__")                                                    \
    X(str_optimizer_attr, "_optimizer")                                                \
    X(str_get_offset, "get_offset")                                                    \
    X(str_set_offset, "set_offset")                                                    \
    X(str_initial_seed, "initial_seed")                                                \
    X(str_manual_seed, "manual_seed")                                                  \
    X(str_default_generators, "default_generators")                                    \
    X(str_is_capturing, "is_current_stream_capturing")                                 \
    X(str_engine_run_backward, "_engine_run_backward")                                 \
    X(str_accumulate_grad, "accumulate_grad")                                          \
    X(str_in_init_group, "._init_group")                                               \
    X(str_do_sync, "_do_sync")                                                         \
    X(str_accumulate, "accumulate")                                                    \
    X(str_accelerate_module, "accelerate.accelerator")                                 \
    X(str_accelerate_state, "accelerate.state")                                        \
    X(str_random, "random")                                                            \
    X(str_numpy, "numpy")                                                              \
    X(str_add, "add")                                                                  \
    X(str_register_prehook, "register_prehook")                                        \
    X(str_variable, "variable")                                                        \
    X(str_metadata, "metadata")                                                        \
    X(str_output_nr, "output_nr")                                                      \
    X(str_oomkit, "oomkit")                                                            \
    X(str_gradient, "gradient")                                                        \
    X(str_inputs, "inputs")                                                            \
    X(str_mul_in_place, "mul_")                                                        \
    X(str_backward_hooks, "_backward_hooks")                                           \
    X(str_retains_grad, "retains_grad")                                                \
    X(str_base, "_base")                                                               \
    X(str_numel, "numel")                                                              \
    X(str_reshape, "reshape")                                                          \
    X(str_item, "item")                                                                \
    X(str_input_metadata, "_input_metadata")                                           \
    X(str_next_functions, "next_functions")                                            \
    X(str_close, "close")                                                              \
    X(str_cpu_name, "cpu")                                                             \
    X(str_cuda_name, "cuda")                                                           \
    X(str_num_items, "num_items_in_batch")                                             \
    X(str_debug, "debug")                                                              \
    X(str_backward_pre_hooks, "_backward_pre_hooks")                                   \
    X(str_post_accumulate_hooks, "_post_accumulate_grad_hooks")                        \
    X(str_narrow_copy, "narrow_copy")                                                  \
    X(str_to, "to")                                                                    \
    X(str_len, "__len__")                                                              \
    X(str_keys, "keys")                                                                \
    X(str_abandon, "abandon")                                                          \
    X(str_enter, "__enter__")                                                          \
    X(str_exit, "__exit__")

/* Our own types and exceptions, made by module.c: X(field). */
#define OOMKIT_STATE_TYPES(X)                                                          \
    X(step_type)                                                                       \
    X(step_object_type) /* the same for callables that do not bind */                  \
    X(bound_type)                                                                      \
    X(guard_type)                                                                      \
    X(chunks_type)                                                                     \
    X(guarded_type)                                                                    \
    X(guarded_object_type)                                                             \
    X(interceptor_type)                                                                \
    X(hook_type)                                                                       \
    X(backward_type)                                                                   \
    X(deferred_type)                                                                   \
    X(between_type)                                                                    \
    X(current_type)                                                                    \
    X(offload_type)                                                                    \
    X(packed_type)                                                                     \
    X(vote_type)                                                                       \
    X(record_type)                                                                     \
    X(report_type)                                                                     \
    X(summary_type)                                                                    \
    X(OomkitError)                                                                     \
    X(OutOfMemory)                                                                     \
    X(PartialUpdate)                                                                   \
    X(SplitError)                                                                      \
    X(RankError)                                                                       \
    X(OomkitWarning)

/* What oomkit uses of torch and of the standard library, looked up once by state_bind:
 * X(field, module, dotted name, required). An optional one is NULL where the installed
 * torch has no such name. */
#define OOMKIT_STATE_TORCH(X)                                                          \
    X(Tensor, "torch", "Tensor", 1)                                                    \
    X(Parameter, "torch.nn", "Parameter", 1)                                           \
    X(Module, "torch.nn", "Module", 1)                                                 \
    X(BatchNorm, "torch.nn.modules.batchnorm", "_NormBase", 1)                         \
    X(InstanceNorm, "torch.nn.modules.instancenorm", "_InstanceNorm", 0)               \
    X(Optimizer, "torch.optim", "Optimizer", 1)                                        \
    X(LBFGS, "torch.optim", "LBFGS", 1)                                                \
    X(LRScheduler, "torch.optim.lr_scheduler", "LRScheduler", 1)                       \
    X(PackedSequence, "torch.nn.utils.rnn", "PackedSequence", 1)                       \
    X(ReduceLROnPlateau, "torch.optim.lr_scheduler", "ReduceLROnPlateau", 0)           \
    X(GradScaler, "torch.amp", "GradScaler", 1)                                        \
    X(AveragedModel, "torch.optim.swa_utils", "AveragedModel", 0)                      \
    X(Generator, "torch", "Generator", 1)                                              \
    X(Size, "torch", "Size", 1)                                                        \
    X(TorchOutOfMemoryError, "torch", "OutOfMemoryError", 1)                           \
    X(AcceleratorError, "torch", "AcceleratorError", 0)                                \
    X(default_generator, "torch", "default_generator", 1)                              \
    X(torch_cat, "torch", "cat", 1)                                                    \
    X(torch_ones, "torch", "ones", 1)                                                  \
    X(torch_randn, "torch", "randn", 1)                                                \
    X(torch_empty, "torch", "empty", 1)                                                \
    X(torch_empty_like, "torch", "empty_like", 1)                                      \
    X(stream_type, "torch", "Stream", 0)                                               \
    X(stream_now, "torch._C", "_accelerator_getStream", 0)                             \
    X(uint8, "torch", "uint8", 1)                                                      \
    X(autograd_functions, "torch._C", "_autograd", 1)                                  \
    X(push_saved_hooks, "torch._C._autograd", "_push_saved_tensors_default_hooks", 0)  \
    X(pop_saved_hooks, "torch._C._autograd", "_pop_saved_tensors_default_hooks", 0)    \
    X(top_saved_hooks, "torch._C._autograd", "_top_saved_tensors_default_hooks", 0)    \
    X(saved_hooks_off, "torch._C._autograd",                                           \
      "_saved_tensors_hooks_get_disabled_error_message", 0)                            \
    X(empty_host_cache, "torch._C", "_host_emptyCache", 0)                             \
    X(torch_equal, "torch", "equal", 1)                                                \
    X(torch_as_tensor, "torch", "as_tensor", 1)                                        \
    X(get_autocast_dtype, "torch", "get_autocast_dtype", 1)                            \
    X(float16, "torch", "float16", 1)                                                  \
    X(function_modes, "torch._C", "_len_torch_function_stack", 0)                      \
    X(torch_backward, "torch.autograd", "backward", 1)                                 \
    X(GradientEdge, "torch.autograd.graph", "GradientEdge", 1)                         \
    X(foreach_copy, "torch", "_foreach_copy_", 1)                                      \
    X(is_grad_enabled, "torch", "is_grad_enabled", 1)                                  \
    X(set_grad_enabled, "torch._C", "_set_grad_enabled", 1)                            \
    X(is_inference_mode, "torch", "is_inference_mode_enabled", 1)                      \
    X(inference_guard, "torch._C", "_InferenceMode", 0)                                \
    X(is_autocast_enabled, "torch", "is_autocast_enabled", 1)                          \
    X(is_any_autocast, "torch._C", "_is_any_autocast_enabled", 0)                      \
    X(clear_autocast_cache, "torch", "clear_autocast_cache", 1)                        \
    X(autograd_module, "torch", "autograd", 1)                                         \
    X(run_backward, "torch.autograd", "_engine_run_backward", 1)                       \
    X(graph_module, "torch.autograd", "graph", 1)                                      \
    X(graph_task_id, "torch._C", "_current_graph_task_id", 0)                          \
    X(functorch_level, "torch._C._functorch", "peek_interpreter_stack", 0)             \
    X(set_eval_frame, "torch._C._dynamo.eval_frame", "set_eval_frame", 0)              \
    X(accelerator_get_stats, "torch._C", "_accelerator_getDeviceStats", 0)             \
    X(accelerator_reset_peak, "torch._C", "_accelerator_resetPeakStats", 0)            \
    X(accelerator_empty_cache, "torch._C", "_accelerator_emptyCache", 0)               \
    X(cuda_module, "torch", "cuda", 1)                                                 \
    X(cuda_graph, "torch.cuda", "CUDAGraph", 0)                                        \
    X(gc_get_objects, "gc", "get_objects", 1)                                          \
    X(gc_get_freeze_count, "gc", "get_freeze_count", 1)                                \
    X(gc_get_referrers, "gc", "get_referrers", 1)                                      \
    X(gc_collect, "gc", "collect", 1)                                                  \
    X(parameter_hook, "torch.nn.modules.module",                                       \
      "register_module_parameter_registration_hook", 1)                                \
    X(module_hook, "torch.nn.modules.module",                                          \
      "register_module_module_registration_hook", 1)                                   \
    X(buffer_hook, "torch.nn.modules.module",                                          \
      "register_module_buffer_registration_hook", 1)                                   \
    X(hooks_of_modules, "torch.nn.modules", "module", 1)                               \
    X(forward_pre_hook, "torch.nn.modules.module", "register_module_forward_pre_hook", \
      1)                                                                               \
    X(step_pre_hook, "torch.optim.optimizer", "register_optimizer_step_pre_hook", 1)   \
    X(step_post_hook, "torch.optim.optimizer", "register_optimizer_step_post_hook", 1) \
    X(deepcopy, "copy", "deepcopy", 1)                                                 \
    X(UserDict, "collections", "UserDict", 1)                                          \
    X(update_wrapper, "functools", "update_wrapper", 1)                                \
    X(partial, "functools", "partial", 1)                                              \
    X(partialmethod, "functools", "partialmethod", 1)                                  \
    X(weak_set, "weakref", "WeakSet", 1)                                               \
    X(logger, "logging", "getLogger", 1)

/* Everything else: X(field). */
#define OOMKIT_STATE_OTHER(X)                                                          \
    X(live_steps)    /* weakref.WeakSet of the decorated steps, for reports */         \
    X(log)           /* logging.getLogger("oomkit") */                                 \
    X(forced_slices) /* tuple of slice lengths set by testing.force_slices, or NULL */ \
    X(drain_leaf)    /* tiny leaf tensor for draining the autograd queue, */           \
    X(drain_root)    /* what is computed from it, */                                   \
    X(drain_one)     /* and a gradient of that */                                      \
    X(generator_get) /* default_generator.get_state, bound */                          \
    X(generator_set) /* default_generator.set_state, bound */                          \
    X(stream_state)  /* its state when it was last taken, or NULL */                   \
    X(stream_bytes)  /* the generator's bytes then, or NULL */                         \
    X(backward_hook) /* our callable in place of torch.autograd._engine_run_backward   \
                      */                                                               \
    X(zero_grad_hook)  /* our function in place of torch.nn.Module.zero_grad, or NULL  \
                        */                                                             \
    X(plain_zero_grad) /* torch.optim.Optimizer.zero_grad, None if patched, or NULL */ \
    X(mode_log)    /* list of (module, flag): train() and eval() while losses wait */  \
    X(outer_hook)  /* our callable in place of torch.autograd.backward */              \
    X(chunk_sites) /* dict: where a loop over chunks() is -> its step, or NULL */      \
    X(settings_seen) /* the allocator's settings when they were last read, or NULL */  \
    X(gone) /* dict: label -> capsule with the history of steps that are gone, or      \
               NULL: see summary.c */                                                  \
    X(kept) /* capsule: sizes of steps that are gone, or NULL: see kept_sizes.c */     \
    X(spare_interceptor) /* the first of those that are free, or NULL: see install.c   \
                          */                                                           \
    X(hidden_all)   /* weak references to schedulers and averaged models: see hidden.c \
                     */                                                                \
    X(buffered_all) /* weakref.WeakSet of modules with buffers, or NULL */             \
    X(modules_found) /* list of weak references to modules, or NULL: modules_of.c */   \
    X(params_alone)  /* dict: address -> weak reference, or NULL: see there */         \
    X(splitters)     /* dict: type -> (split, size, join), or NULL: see splitters.c */ \
    X(forbid_saved_hooks) /* torch._C._autograd._saved_tensors_hooks_disable, or NULL: \
                             see offload.c */                                          \
    X(forward_begins)     /* our callable as torch's hook before a forward, or NULL */ \
    X(forward_handle)     /* what torch gave for it: see stale_forward.c */            \
    X(empty_tuple)

/* What the package hands in at import, because it is Python: X(field). */
#define OOMKIT_STATE_GLUE(X)                                                           \
    X(accept_no_gradients) /* oomkit._engine.withheld: before the first split */       \
    X(is_compiling)        /* oomkit._code.module_buffers: is anything compiled? */    \
    X(module_runs)         /* the same: a hook before a module's forward */            \
    X(watch_effects) /* oomkit._code.side_effects: what else a split step changes */   \
    X(plain_places)  /* oomkit._code.plain_state: where a step stores */               \
    X(value_copies)  /* oomkit._code.alike: what lies in a place */                    \
    X(same_copies)   /* the same: is that equal? */                                    \
    X(step_iterates) /* oomkit._code.iterators: does a step take from an iterator? */  \
    X(close_match)   /* oomkit._engine.callables: "; did you mean ...?" */             \
    X(argument_problem) /* oomkit._engine.callables: a name of no parameter */         \
    X(weight_problem)   /* oomkit._engine.callables: why weight= cannot be called */   \
    X(silent_closure)   /* oomkit._engine.closures: refuses one that returns a loss */ \
    X(has_step_hooks)   /* the same: has a hook of the program's before its step()? */ \
    X(names_sum)        /* oomkit._engine.callables: does its code name a sum? */      \
    X(keepsake) /* oomkit._engine.keepsake: what an optimizer keeps beside its state   \
                 */                                                                    \
    X(parameter_writes) /* oomkit._code.writes: does a step's code write to            \
                           parameters? */                                              \
    X(watch_schedulers) /* oomkit._engine.patches: has torch tell of new ones */       \
    X(watch_hooks)      /* oomkit._engine.patches: the same of the user's hooks */     \
    X(watch_train) /* oomkit._engine.patches: has torch tell of train() and eval() */  \
    X(watch_zero_grad) /* oomkit._engine.patches: the same of zero_grad() */           \
    X(find_zero_grad) /* oomkit._engine.patches: torch's own zero_grad() of optimizers \
                       */                                                              \
    X(tell_sinks)     /* oomkit.sinks: hands a record to all sinks */                  \
    X(advise)         /* oomkit._reports.advice: what to do, by figures */             \
    X(update_needs)   /* oomkit.optim: bytes that an update needs */                   \
    X(is_independent) /* oomkit.optim: may an update go in parts? */                   \
    X(around_parts)   /* oomkit._ladder.update: step() around its parts */             \
    X(rows_possible)  /* oomkit._ladder.rows: may a parameter's update go by rows? */  \
    X(update_rows)    /* oomkit._ladder.rows: that update */                           \
    X(hosted_state)   /* oomkit._ladder.state: what is on the host */                  \
    X(hosted_tidy)    /* oomkit._ladder.state: forgets one that has nothing there */   \
    X(owns_memory)    /* oomkit._ladder.state: may a tensor's memory be exchanged? */  \
    X(host_available) /* oomkit._ladder.host: bytes of host memory to be had */        \
    X(left_out)       /* oomkit._ladder.recompute.LeftOut: modules that run once */    \
    X(recompute_begin)  /* oomkit._ladder.recompute: chooses modules */                \
    X(recompute_advise) /* oomkit._ladder.recompute: words for an error of theirs */   \
    X(refusal)    /* oomkit._engine.nodes.Refusal: results that refuse a gradient */   \
    X(lost_graph) /* the same: (tensor, leaves): its values, which refuse one */       \
    X(stand_in)   /* oomkit._engine.earlier: in front of a parameter's gradient, None  \
                   */                                                                  \
    X(split_loss) /* oomkit._engine.returned_loss: gives the loss of a split call its  \
                     node */                                                           \
    X(modes_then) /* oomkit._engine.returned_loss: enters autocast as it was */        \
    X(saved_pack) /* oomkit._engine.returned_loss: packs a saved tensor into nothing   \
                   */                                                                  \
    X(saved_unpack)   /* oomkit._engine.returned_loss: says that the graph was given   \
                         back */                                                       \
    X(tolerance)      /* oomkit._proof.diagnose: what rounding explains in a loss */   \
    X(replay_differs) /* oomkit._proof.diagnose: losses of a replay beside the call's  \
                       */                                                              \
    X(replay_rows)    /* oomkit._proof.replay_rows: the same of results with rows */   \
    X(uneven_labels)  /* oomkit._proof.diagnose: have slices unequal shares of labels? \
                       */                                                              \
    X(loop_judge)     /* oomkit._engine.loops: may a loop's body run again? */         \
    X(cut_sequence)   /* oomkit._engine.loops: rows of a list */                       \
    X(verification)   /* oomkit._proof.diagnose: the class that compares three runs */ \
    X(proof) /* oomkit._proof.judge: the class that compares a split with the whole */ \
    X(memory_place) /* oomkit.sizes: a device and a torch, by name */                  \
    X(recall_sizes) /* oomkit.sizes: what earlier runs have noted */                   \
    X(note_sizes)   /* oomkit.sizes: takes a note for later runs */                    \
    X(ranks_enter)  /* oomkit._ranks: a call in a process group begins */              \
    X(ranks_watch)  /* oomkit._ranks: collectives inside parts are to be told */       \
    X(ranks_reduce) /* oomkit._ranks: a backward in a part reduces gradients */

/* What the values of one type are to capture; see kinds.c. */
typedef struct oomkit_type_kind {
    const void *type; /* borrowed address: only compared, together with the tag */
    unsigned int tag; /* no two types ever have the same */
    uint8_t kind;
} oomkit_type_kind;

#define OOMKIT_TYPE_KINDS 32

/* What memory begins with that the state has in a chain. */
typedef struct oomkit_chained {
    struct oomkit_chained *next;
} oomkit_chained;

typedef struct oomkit_state {
#define DECLARE_STRING(field, text) PyObject *field;                  /* owned */
#define DECLARE_TORCH(field, module, name, required) PyObject *field; /* owned */
#define DECLARE(field) PyObject *field;                               /* owned */
    OOMKIT_STATE_STRINGS(DECLARE_STRING)
    OOMKIT_STATE_TYPES(DECLARE)
    OOMKIT_STATE_TORCH(DECLARE_TORCH)
    OOMKIT_STATE_OTHER(DECLARE)
    OOMKIT_STATE_GLUE(DECLARE)
#undef DECLARE
#undef DECLARE_TORCH
#undef DECLARE_STRING
    int hosted_any; /* state of some optimizer is, or was, on the host */
    int pinned_any; /* so was something in pinned memory */
    const struct oomkit_wiring *wiring; /* who is told of what: call/events.h */
    const oomkit_bridge *bridge; /* of the loaded _bridge module, or the plain one;
                                    never NULL. Static: it outlives both modules */
    const oomkit_bridge *plain_bridge; /* what stands in for it: plain_bridge.c */
    PyObject *bridge_capsule;          /* owned; NULL without a bridge */
    ptrdiff_t impl_offset;         /* of the TensorImpl pointer in a tensor's object */
    void *stream_generator;        /* of default_generator; it lives as long as torch */
    uint64_t stream_size;          /* of its bytes; 0: they cannot be read */
    uint64_t structure_generation; /* grows when a module gains a parameter or child */
    int structure_hooked;          /* our registration hooks are installed */
    uint64_t hidden_made;          /* grows with each of hidden_all, */
    Py_ssize_t hidden_few;         /* which is tidied when it has more */
    int flush_pending;       /* a guard wants the cache emptied at the next call */
    uint64_t run_peak_bytes; /* highest peak of any step so far (devices) */
    int settings_expandable; /* what was read then: 1 or 0 */
    int sinks_attached;      /* records are told */
    int phases_wanted;       /* steps made from now on measure their phases */
    uint32_t rank; /* in the default group, from 1; 0: its ranks have not met */
    struct oomkit_phase_meter *meters; /* borrowed: those that are open */
    int seen_oom;                      /* some step has run out of memory */
    int keeps_nothing;                 /* sizes go with their step: for tests */
    int refusals_end;                  /* no whole batch behind them: for tests */
    int proves_nothing;                /* as with verify=False everywhere: for tests */
    int bound;                         /* state_bind has succeeded */
    uint64_t flags_dropped;            /* reports that mode_log holds no more */
    int withheld_ready;   /* torch's helpers accept that gradients are withheld */
    int backward_patched; /* our hook is installed */
    oomkit_type_kind kinds[OOMKIT_TYPE_KINDS];
    uint64_t engine_runs;   /* of autograd that write to .grad, nested ones too */
    uint64_t own_hooks;     /* handles of torch's that were made here, in calls */
    uint64_t chunks_handed; /* parts that loops have got */
    struct oomkit_chunks *chunks_out; /* borrowed: loops that have a part now, the
                                         latest first */
    struct oomkit_participants
        *waiting; /* borrowed: those of which losses wait for their backward */
    uint64_t deferred_serial;       /* how many ever did */
    oomkit_chained *node_types;     /* owned: see node_types.c */
    struct oomkit_callers *callers; /* borrowed: backwards running as the second half
                                      of a call, on any thread */
} oomkit_state;

extern struct PyModuleDef oomkit_module_def;

static inline oomkit_state *
oomkit_state_of_module(PyObject *module)
{
    return (oomkit_state *)PyModule_GetState(module);
}

/* The state behind an instance of one of our heap types. Borrowed; never NULL. */
static inline oomkit_state *
oomkit_state_of_type(PyTypeObject *type)
{
    return (oomkit_state *)PyType_GetModuleState(type);
}

/* Can what only torch's own memory tells be read at all? Most need not ask: the plain
 * table answers as the bridge does of a tensor that it cannot read. */
static inline int
oomkit_has_bridge(const oomkit_state *st)
{
    return st->bridge != st->plain_bridge;
}

int
oomkit_state_init(oomkit_state *st);
int
oomkit_state_visit(oomkit_state *st, visitproc visit, void *arg);
void
oomkit_state_clear(oomkit_state *st);

/* What trying out the bridge left: memory that lacks (torch makes a SystemError of it,
 * too) and an interrupt say nothing of the bridge, and without it every step of the
 * process would be slower. -1 with one of these, else 0 without an exception. */
int
oomkit_state_passes(void);

/* Looks up everything of OOMKIT_STATE_TORCH, takes the bridge out of its capsule (or
 * None) and calibrates impl_offset. -1 with an exception, 0. Runs Python code
 * (imports). */
int
oomkit_state_bind(oomkit_state *st, PyObject *bridge_capsule);

/* hook_type.c: the function of that name of oomkit._C, as torch gets it for a hook. New
 * reference or NULL. */
PyObject *
oomkit_hook_new(const oomkit_state *st, PyObject *module, const char *name);

extern PyType_Spec oomkit_hook_spec; /* hook_type.c */

/* What every callable of ours that stands for a function begins with. */
typedef struct oomkit_callable {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *func; /* owned */
} oomkit_callable;

/* Is it a decorated step? */
static inline int
oomkit_step_check(const oomkit_state *st, const PyObject *object)
{
    return Py_TYPE(object) == (PyTypeObject *)st->step_type ||
           Py_TYPE(object) == (PyTypeObject *)st->step_object_type;
}

#endif
