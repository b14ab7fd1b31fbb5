"""What is not oomkit's: crashes of CPython and errors of torch without memory, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

LISTED: list[tuple[str, str]] = [
    # THPCppFunction for a node: the error leaves a function that must not throw.
    (
        "torch aborts",
        r"SIGABRT: terminate called .*'c10::Error'; .*Failed to allocate a \w+ object",
    ),
    # A function of torch's own (torch._C._VariableFunctions) that lets an exception pass unseen.
    (
        "torch's SystemError",
        r"^SystemError: <built-in method \w+ of (?:type|torch\._C\._TensorMeta) object at"
        r" \w+> returned",
    ),
    # The same of a method of its tensors.
    (
        "torch's SystemError",
        r"^SystemError: <method '\w+' of 'torch\._C\.TensorBase' objects> returned",
    ),
    # The innermost functions are torch's own, down to where CPython called them. Seen with gdb:
    # pybind11::detail::instance::allocate_layout(), for make_new_instance() does not look at
    # what tp_alloc() gave it (type_caster_generic::cast, called by the getter of a saved value
    # of a node and by torch::jit::toPyObject).
    (
        "torch crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault; in"
        r" (?:(?:(?! <- )[^;])* of lib(?:torch\w*|c10)\.so(?: <- |;))+(?:CPython| ?File)",
    ),
    # torch::FunctionSignature::parse looks up the name of a parameter that there was no memory
    # for when the function was first called: PyDict_GetItem(kwargs, NULL). Seen with gdb in
    # ones_like (the trivial backward after a failure) and clone (copies of parameters).
    (
        "torch crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault; in CPython <- <unknown function> of"
        r" libtorch_python\.so <- torch::PythonArgParser::raw_parse\(",
    ),
    # The same where only Python's frames are known (they are listed without a process that has
    # torch's handler of signals).
    (
        "torch crashes",
        r'SIGSEGV: Fatal Python error: Segmentation fault;(?: in CPython;)? File "[^"]*/torch/'
        r'(?:autograd/__init__\.py", line \d+ in _make_grads|nn/parameter\.py", line \d+ in'
        r" __deepcopy__)",
    ),
    # By its source (frame.c, take_ownership, of a frame that outlives its function): where the
    # caller's frame cannot be made an object, the exception that was leaving is cleared with
    # that error.
    (
        "CPython's SystemError",
        r"^SystemError: <function [\w.]+ at \w+> returned NULL without setting an exception",
    ),
    # torch.optim.optimizer: its own class set_grad_enabled() without memory in its `finally`.
    ("torch's SystemError", r"^/[^\"]*/torch/optim/optimizer\.py:\d+ in _use_grad$"),
    # Functions of torch.nn.functional that are built in, as those of the type above.
    ("torch's SystemError", r"^SystemError: <built-in function linear> returned a result with"),
    # torch::autograd::functionToPyObject(), where its error is not one that ends the process.
    ("torch's RuntimeError", r"^RuntimeError: Failed to allocate a \w+Backward0 object$"),
    # importlib._bootstrap and bufferedio.c: PyThread_allocate_lock() without memory, whose error
    # is this one.
    ("CPython's RuntimeError", r"^RuntimeError: can't allocate (?:read )?lock"),
    # compile(): of a module that has no .pyc yet.
    ("CPython's SystemError", r"^SystemError: <built-in function compile> returned NULL"),
    # compile.c asserts or frees what it had no memory for: importing a file without a .pyc.
    ("CPython aborts", r"SIGABRT: Fatal Python error: Aborted; .*in source_to_code"),
    # The same compiler, called by exec() for the methods of a data class and by compile() for
    # an annotation that is a string: the topmost frame is theirs, no C of ours runs there.
    (
        "CPython crashes",
        r"SIG(?:ABRT|SEGV): Fatal Python error: (?:Aborted|Segmentation fault);"
        r'(?: in CPython[^;]*;)? File "[^"]*/(?:dataclasses\.py", line \d+ in _create_fn|'
        r'typing\.py", line \d+ in __init__)',
    ),
    # Where it does not crash: what the parser or the compiler has no memory for is a syntax
    # error to it, or an error that is not set.
    (
        "CPython's SyntaxError",
        r'^/[^"]*/dataclasses\.py:\d+ in _create_fn$',
    ),
    (
        "CPython's SystemError",
        r"^/[^\"]*/typing\.py:\d+ in __init__$",  # ForwardRef compiles its text
    ),
    # dictobject.c, dictiter_new, as below: seen with gdb in the items() of a named tuple's types.
    (
        "CPython crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault;(?: in CPython[^;]*;)?"
        r' File "[^"]*/typing\.py", line \d+ in _make_nmtuple',
    ),
    # codeobject.c, lineiter_next and positionsiter_next: give back the tuple that they have freed.
    (
        "CPython crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault;(?: in CPython[^;]*;)? File"
        r' "[^"]*/(?:dis\.py", line \d+ in findlinestarts|traceback\.py", line \d+ in'
        r" _get_code_position)",
    ),
    # dictobject.c, dictiter_new: where the pair of items() cannot be made it gives back an
    # iterator that the collector does not know yet, which untracks itself. Seen with gdb in a
    # `for` over items(); these modules call nothing of ours that is C.
    (
        "CPython crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault;(?: in CPython[^;]*;)?"
        r' File "[^"]*/oomkit/_hpo_\w+\.py"',
    ),
    # posixmodule.c, path_converter: where __fspath__ is not found, for whatever reason, the error
    # is this one.
    (
        "CPython's TypeError",
        r"^TypeError: \w+: path should be string, bytes[a-zA-Z, .]* not PosixPath$",
    ),
    # unmarshalling or compiling a module.
    (
        "CPython crashes",
        r"SIGSEGV: Fatal Python error: Segmentation fault;(?: in CPython[^;]*;)?"
        r' File "<frozen importlib[^;]*in get_code',
    ),
    # ceval.c, exception_unwind: the number of the instruction, above 256, is to be pushed as an
    # int for a `with` or `finally`; there is none, which is an exception, which unwinds to the
    # same handler.
    ("CPython hangs", r'SIGPROF: File "(?![^"]*/oomkit/\w+\.py)'),
]
"""(a word for it, what its text or a frame of its traceback matches)."""


def listed(text: str, where: Sequence[str] = ()) -> str:
    for word, pattern in LISTED:
        if re.search(pattern, text) or any(re.search(pattern, frame) for frame in where):
            return word
    return ""
