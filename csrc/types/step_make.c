/* Making a step: what may be decorated, what its arguments are called, its name. */
#include "binding.h"
#include "step_type.h"
#include "types.h"
#include "../engine/engine.h"

#define UNWRAP_DEPTH 16

/* What is behind a callable. */
typedef struct found_function {
    PyObject *function; /* owned: a Python function, or NULL */
    Py_ssize_t bound;   /* its leading arguments that are given already */
    int known;          /* its other arguments are those of the callable */
} found_function;

/* The next callable behind `at` (borrowed), new reference; NULL where there is none, or
 * with an exception. */
static PyObject *
make_behind(oomkit_state *st, PyObject *at, found_function *found)
{
    PyObject *inner; /* owned */

    if (PyMethod_Check(at)) {
        found->bound++;
        return Py_NewRef(PyMethod_GET_FUNCTION(at));
    }
    if (PyObject_TypeCheck(at, (PyTypeObject *)st->Module)) {
        return PyObject_GetAttr(at, st->str_forward);
    }
    if (oomkit_guarded_check(st, at)) {
        return PyObject_GetAttr(at, st->str_wrapped);
    }
    if (PyObject_TypeCheck(at, &PyStaticMethod_Type)) {
        return PyObject_GetAttr(at, st->str_func_attr);
    }
    if (PyObject_TypeCheck(at, (PyTypeObject *)st->partial)) {
        OWNED PyObject *args = PyObject_GetAttr(at, st->str_args);
        if (args == NULL) {
            return NULL;
        }
        found->bound += PyTuple_Check(args) ? PyTuple_GET_SIZE(args) : 0;
        return PyObject_GetAttr(at, st->str_func);
    }
    inner = PyType_Check(at) ? NULL
                             : PyObject_GetAttr((PyObject *)Py_TYPE(at), st->str_call);
    found->bound++;
    return inner;
}

/* Is it a step, or bound to one? 1 and *step (borrowed), or 0. */
static int
make_is_step(oomkit_state *st, PyObject *given, oomkit_step **step)
{
    if (PyMethod_Check(given)) {
        given = PyMethod_GET_FUNCTION(given);
    } else if (Py_TYPE(given) == (PyTypeObject *)st->bound_type) {
        given = oomkit_bound_step(given);
    }
    *step = oomkit_step_check(st, given) ? step_CAST(given) : NULL;
    return *step != NULL;
}

/* Looks through methods, modules, partials, guards and objects with __call__. 0, or -1
 * with TypeError where there is a step on the way. */
static int
make_find(oomkit_state *st, PyObject *func, found_function *found)
{
    OWNED PyObject *at = Py_NewRef(func);
    oomkit_step *step; /* borrowed from at */
    int depth;

    *found = (found_function){NULL, 0, 0};
    for (depth = 0; at != NULL && depth < UNWRAP_DEPTH; depth++) {
        if (PyFunction_Check(at)) {
            found->function = STEAL(at);
            found->known = 1;
            return 0;
        }
        if (make_is_step(st, at, &step)) {
            PyErr_Format(
                PyExc_TypeError,
                "auto_batch() got %R, which wraps %R, a decorated step: decorate the "
                "function once, with all options" SEE("decoration"),
                func, step);
            return -1;
        }
        Py_SETREF(at, make_behind(st, at, found));
    }
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* a callable without such attributes: nothing is known of it */
    }
    return 0;
}

/* A class would be replaced by something that is none; async def and generator
 * functions hand out their work later, and there is nothing to retry when the call
 * returns. 0 or -1. */
static int
make_refuse_kinds(PyObject *function, PyObject *func)
{
    int flags = function == NULL
                    ? 0
                    : ((PyCodeObject *)PyFunction_GET_CODE(function))->co_flags;

    if (!PyCallable_Check(func)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch() expected a callable, got %s" SEE("decoration"),
                     Py_TYPE(func)->tp_name);
        return -1;
    }
    if (PyType_Check(func)) {
        PyErr_Format(
            PyExc_TypeError,
            "auto_batch() cannot protect the class %R: decorate the method of it that "
            "is the step (its forward, its training_step)" SEE("decoration"),
            func);
        return -1;
    }
    if (flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch() cannot protect the async function %R: decorate the "
                     "synchronous step that it awaits" SEE("decoration"),
                     func);
        return -1;
    }
    if (flags & (CO_GENERATOR | CO_ITERABLE_COROUTINE)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch() cannot protect the generator function %R: decorate "
                     "the step that its loop runs" SEE("decoration"),
                     func);
        return -1;
    }
    return 0;
}

/* The function whose parameters are meant: below a decorator that takes (*args,
 * **kwargs) it is the one that functools.wraps has noted, as for inspect.signature. New
 * reference or NULL. */
static PyObject *
make_named(oomkit_state *st, PyObject *function)
{
    OWNED PyObject *at = Py_NewRef(function);
    int depth;

    for (depth = 0; depth < UNWRAP_DEPTH; depth++) {
        PyCodeObject *code = (PyCodeObject *)PyFunction_GET_CODE(at); /* borrowed */
        int open = code->co_argcount == 0 && code->co_kwonlyargcount == 0 &&
                   (code->co_flags & CO_VARARGS) && (code->co_flags & CO_VARKEYWORDS);
        int has = open ? oomkit_has_attribute(at, st->str_wrapped) : 0;
        OWNED PyObject *inner = NULL;
        if (has < 0) {
            return NULL;
        }
        if (has == 0) {
            break;
        }
        inner = PyObject_GetAttr(at, st->str_wrapped);
        if (inner == NULL || !PyFunction_Check(inner)) {
            PyErr_Clear(); /* gone, or no function: its parameters are not known */
            break;
        }
        Py_SETREF(at, STEAL(inner));
    }
    return STEAL(at);
}

/* Parameter names in the order of the arguments, with "*args" and "**kwargs" in their
 * places, as oomkit_batch_find takes them. New reference or NULL. */
static PyObject *
make_parameter_names(PyObject *function, Py_ssize_t skip)
{
    PyCodeObject *code = (PyCodeObject *)PyFunction_GET_CODE(function); /* borrowed */
    OWNED PyObject *all = PyObject_GetAttrString((PyObject *)code, "co_varnames");
    OWNED PyObject *list = all ? PyList_New(0) : NULL;
    OWNED PyObject *star = list ? PyUnicode_FromString("*args") : NULL;
    OWNED PyObject *stars = star ? PyUnicode_FromString("**kwargs") : NULL;
    int first = skip < code->co_argcount ? (int)skip : code->co_argcount;
    int i;

    if (stars == NULL) {
        return NULL;
    }
    for (i = first; i < code->co_argcount + code->co_kwonlyargcount; i++) {
        if (i == code->co_argcount && code->co_flags & CO_VARARGS &&
            PyList_Append(list, star) < 0) {
            return NULL;
        }
        if (PyList_Append(list, PyTuple_GET_ITEM(all, i)) < 0) {
            return NULL;
        }
    }
    if (code->co_kwonlyargcount == 0 && code->co_flags & CO_VARARGS &&
        PyList_Append(list, star) < 0) {
        return NULL;
    }
    if (code->co_flags & CO_VARKEYWORDS && PyList_Append(list, stars) < 0) {
        return NULL;
    }
    return PyList_AsTuple(list);
}

/* 1 when the first argument will be the object that a method is bound to. */
static int
make_takes_self(PyObject *names)
{
    PyObject *first; /* borrowed */
    if (PyTuple_GET_SIZE(names) == 0) {
        return 0;
    }
    first = PyTuple_GET_ITEM(names, 0);
    return PyUnicode_CompareWithASCIIString(first, "self") == 0 ||
           PyUnicode_CompareWithASCIIString(first, "cls") == 0;
}

/* "step" of "make.<locals>.step". New reference or NULL; steals `name`. */
static PyObject *
without_locals(PyObject *name)
{
    const Py_ssize_t end = PyUnicode_GET_LENGTH(name);
    OWNED PyObject *mark = PyUnicode_FromString("<locals>.");
    OWNED PyObject *given = name;
    Py_ssize_t at =
        mark == NULL ? -2 : PyUnicode_Find(name, mark, 0, end, -1); /* the last one */

    return at == -2 ? NULL
           : at < 0 ? STEAL(given)
                    : PyUnicode_Substring(name, at + PyUnicode_GET_LENGTH(mark), end);
}

/* label=, or the qualified name of the function, of a partial's function too, or the
 * name of the object's type. */
static int
make_label(oomkit_state *st, oomkit_step *self, PyObject *function)
{
    PyObject *name; /* owned */
    int is_partial = PyObject_TypeCheck(self->func, (PyTypeObject *)st->partial);

    if (self->options.label != NULL) {
        return 0;
    }
    name = PyObject_GetAttr(is_partial && function != NULL ? function : self->func,
                            st->str_qualname);
    if (name == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* a callable object without a name */
        name = PyUnicode_FromString(Py_TYPE(self->func)->tp_name);
    }
    if (name != NULL && !PyUnicode_Check(name)) {
        Py_SETREF(name, PyObject_Str(name));
    }
    name = name == NULL ? NULL : without_locals(name);
    self->options.label = name;
    return name == NULL ? -1 : 0;
}

/* The options as they were given, but for the participants, which would be kept alive:
 * a copy of the step is made with them. 0 or -1. */
static int
make_given(oomkit_step *self, PyObject *kwargs)
{
    static const char *const held[] = {"model", "optimizer", "participants", NULL};
    int i;

    self->given = kwargs == NULL ? PyDict_New() : PyDict_Copy(kwargs);
    for (i = 0; self->given != NULL && held[i] != NULL; i++) {
        if (oomkit_item(self->given, held[i]) != NULL &&
            PyDict_DelItemString(self->given, held[i]) < 0) {
            return -1;
        }
    }
    return self->given == NULL ? -1 : 0;
}

/* Are the arguments that options name parameters? 0, or -1 with TypeError. */
static int
make_check_names(oomkit_state *st, PyObject *names, PyObject *kwargs)
{
    OWNED PyObject *problem =
        kwargs == NULL
            ? PyUnicode_FromString("")
            : PyObject_CallFunctionObjArgs(st->argument_problem, names, kwargs, NULL);

    if (problem != NULL && PyUnicode_GET_LENGTH(problem) > 0) {
        PyErr_SetObject(PyExc_TypeError, problem);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Fills a new step. 0 or -1. */
static int
make_fill(oomkit_state *st, oomkit_step *self, PyObject *func, PyObject *kwargs,
          const found_function *found)
{
    OWNED PyObject *done = NULL;

    self->st = st;
    self->vectorcall = oomkit_engine_call;
    self->updates = -1;
    self->recent = self;
    self->func = Py_NewRef(func);
    self->history = oomkit_history_create(OOMKIT_RECORDS);
    if (self->history == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_options_parse(st, kwargs, &self->options) < 0 ||
        make_given(self, kwargs) < 0 || make_label(st, self, found->function) < 0) {
        return -1;
    }
    if (found->known) {
        OWNED PyObject *named = make_named(st, found->function);
        self->names = named ? make_parameter_names(named, found->bound) : NULL;
        if (self->names == NULL || make_check_names(st, self->names, kwargs) < 0) {
            return -1;
        }
        self->skip = found->bound == 0 && make_takes_self(self->names);
    }
    /* An earlier step of the same code may have left its sizes. */
    self->recall = self->seen_oom = self->options.remember || st->seen_oom;
    self->is_module = PyObject_TypeCheck(func, (PyTypeObject *)st->Module);
    self->is_forward =
        PyFunction_Check(func) &&
        PyUnicode_Compare(((PyFunctionObject *)func)->func_name, st->str_forward) == 0;
    if (oomkit_wrap_update(st, (PyObject *)self, func) < 0) {
        return -1;
    }
    done = PyObject_CallMethod(st->live_steps, "add", "O", self);
    return done == NULL ? -1 : 0;
}

PyObject *
oomkit_step_make(oomkit_state *st, PyObject *func, PyObject *kwargs)
{
    PyTypeObject *type =
        (PyTypeObject *)(oomkit_wrap_binds(func) ? st->step_type
                                                 : st->step_object_type); /* borrowed */
    oomkit_step *self = NULL;                                             /* owned */
    found_function found;

    if (make_find(st, func, &found) < 0) {
        return NULL;
    }
    if (make_refuse_kinds(found.function, func) == 0) {
        self = step_CAST(type->tp_alloc(type, 0));
        if (self != NULL && make_fill(st, self, func, kwargs, &found) < 0) {
            Py_CLEAR(self);
        }
    }
    Py_XDECREF(found.function);
    return (PyObject *)self;
}

/* Decorates what stands below the decorator, or was given. New reference or NULL. */
static PyObject *
make_decorate(oomkit_state *st, PyObject *given, void *how)
{
    PyObject *kwargs = how; /* borrowed: the options, may be NULL */
    PyObject *result = oomkit_wrap_descriptor(st, given, make_decorate, how);
    oomkit_step *step; /* borrowed from given */

    if (result != NULL || PyErr_Occurred()) {
        return result;
    }
    if (!make_is_step(st, given, &step)) {
        return oomkit_step_make(st, given, kwargs);
    }
    if (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) {
        return Py_NewRef(given); /* a cell that was run twice */
    }
    return PyErr_Format(
        PyExc_TypeError,
        "auto_batch() got options for %R, which is decorated already: give all of them "
        "at the first decoration, or decorate its __wrapped__" SEE("decoration"),
        step);
}

PyObject *
oomkit_auto_batch(PyObject *module, PyObject *args, PyObject *kwargs)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_options options;
    OWNED PyObject *self = NULL, *head = NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(args);

    if (!st->bound) {
        return oomkit_raise(
            PyExc_RuntimeError,
            "oomkit._C is not bound: import oomkit" SEE("internal-error"));
    }
    if (n > 1) {
        return oomkit_raise(
            PyExc_TypeError,
            "auto_batch() takes one positional argument, the function; got %zd" SEE(
                "options"),
            n);
    }
    if (n == 1 && PyTuple_GET_ITEM(args, 0) != Py_None) {
        return make_decorate(st, PyTuple_GET_ITEM(args, 0), kwargs);
    }
    /* Options first: what is wrong with them is said at the line that has them. */
    if (oomkit_options_parse(st, kwargs, &options) < 0) {
        oomkit_options_clear(&options);
        return NULL;
    }
    oomkit_options_clear(&options);
    self = PyObject_GetAttrString(module, "auto_batch");
    head = self ? PyTuple_Pack(1, self) : NULL;
    return head ? PyObject_Call(st->partial, head, kwargs) : NULL;
}
