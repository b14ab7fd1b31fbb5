"""What is not oomkit's: crashes of CPython and errors of torch without memory, by what was
refused memory (witness.py) and what came of it.

A place is the chain of functions from the one that allocates to the one that runs Python code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Known(NamedTuple):
    word: str
    place: str
    """What one of the places matches."""
    text: str
    """What the text of the error or of the death matches."""


CRASH = r"^SIG(?:SEGV|ABRT|BUS|FPE)"
INNER = r"^(?:(?! of _C\.| of _bridge\.).)*?"
"""Up to there, none of oomkit's functions: it was not ours that was refused."""
PARSED = INNER + r"(?:_PyAST_Compile|PyRun_StringFlags|Py_CompileStringObject)\b"
BROKEN = (
    r"^SystemError: .*(?:without setting an exception|with an exception set|without exception set)"
)

LISTED = [
    # compile.c and the parser, for exec(), eval() and compile(): data classes, named tuples,
    # annotations. What they had no memory for (the bytes of assemble_init(), of makecode()) is
    # given back twice: the heap is broken, and whatever comes next crashes. Or it is a syntax
    # error to them, or an error that is not set. Seen with gdb.
    Known("CPython's compiler", PARSED, CRASH),
    Known("CPython's compiler", PARSED, r"^(?:SystemError|SyntaxError|RuntimeError|exit 1)"),
    # importlib compiles a file that has no .pyc yet; or unmarshals one.
    Known("CPython crashes", INNER + r"PyMarshal_\w+", CRASH),
    # ceval.c, exception_unwind: the number of the instruction, above 256, is to be pushed as an
    # int for a `with` or `finally`; there is none, which is an exception, which unwinds to the
    # same handler.
    Known(
        "CPython hangs",
        r"^(?:_PyLong_New < )?PyLong_From\w+ < _PyEval_EvalFrameDefault$",
        r'^SIGPROF: File "(?![^"]*/oomkit/(?:\w+/)*\w+\.py)',
    ),
    # frame.c, take_ownership, of a frame that outlives its function: where the caller's frame
    # cannot be made an object, the exception that was leaving is cleared with that error.
    Known(
        "CPython's SystemError",
        r"^_PyObject_GC_NewVar < \? < (?:_PyEval_EvalFrameDefault$|_?Py\w+ <)",
        r"^SystemError: (?:<function [\w.<>]+ at \w+> returned NULL without setting an exception|"
        r"error return without exception set)",
    ),
    # codeobject.c, lineiter_next and positionsiter_next: give back the tuple that they have freed.
    Known(
        "CPython crashes",
        r"^(?:_PyLong_New < )?PyLong_FromLong < \? < _PyEval_EvalFrameDefault$",
        CRASH + r'.* File "[^"]*/(?:dis\.py", line \d+ in findlinestarts|traceback\.py", line'
        r" \d+ in _get_code_position)",
    ),
    # dictobject.c, dictiter_new: where the pair of items() cannot be made it gives back an
    # iterator that the collector does not know yet, which untracks itself. Seen with gdb.
    Known("CPython crashes", r"^_PyObject_GC_NewVar < PyTuple_(?:Pack|New) < \? <", CRASH),
    # hamt.c: setting a context variable. Python alone does it, too: some twenty of them, set.
    Known("CPython crashes", r" < PyContextVar_(?:Set|Reset) < ", CRASH),
    # importlib._bootstrap and bufferedio.c: PyThread_allocate_lock() without memory, whose error
    # is this one.
    Known(
        "CPython's RuntimeError",
        r"^PyThread_allocate_lock <",
        r"^RuntimeError: can't allocate (?:read )?lock",
    ),
    # posixmodule.c, path_converter: where __fspath__ is not found, for whatever reason, the error
    # is this one.
    Known(
        "CPython's TypeError",
        r"^_PyObject_GC_New < PyMethod_New <",
        r"^TypeError: \w+: path should be string, bytes[a-zA-Z, .]* not PosixPath$",
    ),
    # torch::PythonArgParser: a function of torch that is called for the first time, and has no
    # memory for the name of a parameter: it goes on with NULL for it, crashes when it looks a
    # name up (FunctionSignature::parse, seen with gdb), or returns with the exception set.
    Known("torch's arguments", INNER + r"torch15PythonArgParser", CRASH),
    Known("torch's arguments", INNER + r"torch15PythonArgParser", BROKEN),
    # THPCppFunction for a node: the error leaves a function that must not throw, or one that may.
    Known(
        "torch's node",
        INNER + r"functionToPyObject",
        r"^(?:SIGABRT: terminate called .*'c10::Error'; .*|RuntimeError: )Failed to allocate a"
        r" \w+ object",
    ),
    # A node's metadata, saved values and inputs, cast by pybind11, which does not look at what
    # tp_alloc() gave it (pybind11::detail::instance::allocate_layout(), seen with gdb).
    Known(
        "torch's casts",
        INNER + r" of libtorch_python\.so <",
        CRASH + r".*; in (?:(?! of _C\.| of _bridge\.)[^;])*? of libtorch_python\.so",
    ),
    # python_hook.cpp: a tensor's hooks are called from PyDict_Values(), which has no memory for
    # its list: torch asks NULL for its size. torch alone does it, with one hook and no oomkit.
    Known("torch's hooks", r"^PyList_New < PyDict_Values < \? of libtorch_python\.so", CRASH),
    # The same where torch's own handler of signals crashed in its turn and named no function.
    Known(
        "torch's casts",
        INNER + r"(?:torch3jit10toPyObject|functionToPyObject|THPCppFunction_\w+)",
        CRASH + r"(?!.* of (?:_C|_bridge)\.)",
    ),
    # torch::jit::toIValue: what cannot be seen to be of a type is of another one.
    Known(
        "torch's RuntimeError",
        INNER + r"torch3jit8toIValue",
        r"^RuntimeError: [\s\S]*Python error details: MemoryError",
    ),
    # Functions and methods of torch's that let an exception pass unseen, or say something else of
    # what they could not look up ("autograd.Function is missing boxed_grads_call attribute").
    Known(
        "torch's SystemError",
        INNER + r" of libtorch_python\.so",
        r"^SystemError: <(?:built-in )?(?:method|function) '?\w+'?(?: of (?:type|'?torch\.[\w.]+'?)"
        r" objects?)?(?: at \w+)?> returned",
    ),
    Known(
        "torch's error",
        INNER + r" of libtorch_python\.so",
        r"^(?:RuntimeError|TypeError|AttributeError): (?!.*oomkit)",
    ),
]


def listed(text: str, places: Sequence[str]) -> str:
    """A word for it, or "" where nothing tells that it is somebody else's."""
    for known in LISTED:
        if re.search(known.text, text) and any(re.search(known.place, at) for at in places):
            return known.word
    return ""
