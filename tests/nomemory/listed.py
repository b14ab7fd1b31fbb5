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
    # torch::FunctionSignature::parse looks up the name of a parameter that there was no memory
    # for when the function was first called: PyDict_GetItem(kwargs, NULL). Seen with gdb in
    # ones_like (the trivial backward after a failure) and clone (copies of parameters).
    (
        "torch crashes",
        r'SIGSEGV: Fatal Python error: Segmentation fault; File "[^"]*/torch/(?:autograd/__init__'
        r'\.py", line \d+ in _make_grads|nn/parameter\.py", line \d+ in __deepcopy__)',
    ),
    # By its source (frame.c, take_ownership, of a frame that outlives its function): where the
    # caller's frame cannot be made an object, the exception that was leaving is cleared with
    # that error.
    (
        "CPython's SystemError",
        r"^SystemError: <function [\w.]+ at \w+> returned NULL without setting an exception",
    ),
    # importlib._bootstrap: PyThread_allocate_lock() without memory, whose error is this one.
    ("CPython's RuntimeError", r"^RuntimeError: can't allocate lock"),
    # compile(): of a module that has no .pyc yet.
    ("CPython's SystemError", r"^SystemError: <built-in function compile> returned NULL"),
    # compile.c asserts or frees what it had no memory for: importing a file without a .pyc.
    ("CPython aborts", r"SIGABRT: Fatal Python error: Aborted; .*in source_to_code"),
    # The same compiler, called by exec() for the methods of a data class and by compile() for
    # an annotation that is a string: the topmost frame is theirs, no C of ours runs there.
    (
        "CPython crashes",
        r"SIG(?:ABRT|SEGV): Fatal Python error: (?:Aborted|Segmentation fault);"
        r' File "[^"]*/(?:dataclasses\.py", line \d+ in _create_fn|typing\.py", line \d+ in'
        r" __init__)",
    ),
    # codeobject.c, lineiter_next: gives back the tuple that it has freed.
    ("CPython crashes", r"SIGSEGV: .*in findlinestarts"),
    # dictobject.c, dictiter_new: where the pair of items() cannot be made it gives back an
    # iterator that the collector does not know yet, which untracks itself. Seen with gdb in a
    # `for` over items(); these modules call nothing of ours that is C.
    (
        "CPython crashes",
        r'SIGSEGV: Fatal Python error: Segmentation fault; File "[^"]*/oomkit/_hpo_\w+\.py"',
    ),
    # unmarshalling or compiling a module.
    (
        "CPython crashes",
        r'SIGSEGV: Fatal Python error: Segmentation fault; File "<frozen importlib[^;]*in get_code',
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
