/* Objects with named parts among the arguments (subclasses of dict, UserDict, data
 * classes, types with a splitter): opened into nodes, and made anew from the nodes'
 * values without their __init__. */
#include "flatten.h"
#include "kinds.h"

#include <structmember.h>
#include <string.h>

/* The instance's dictionary in *dict (owned), or NULL when it has none. 0 or -1. */
static int
object_dict(PyObject *object, PyObject **dict)
{
    *dict = PyObject_GenericGetDict(object, NULL);
    if (*dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* slots only */
    } else if (!PyDict_Check(*dict)) {
        Py_CLEAR(*dict);
    }
    return 0;
}

/* --- opening --- */

/* Could the value be data, or contain some? -1 when it shows that the object is none: a
 * trainer, a configuration with a model. */
static int
value_is_data(oomkit_state *st, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    int kind;

    if (type == (PyTypeObject *)st->Tensor) {
        return 1;
    }
    if (oomkit_value_is_plain(value)) {
        return 0;
    }
    if (type == &PyDict_Type || type == &PyList_Type || type == &PyTuple_Type) {
        return PyObject_Length(value) != 0;
    }
    kind = oomkit_kind_of(st, type);
    return (kind & OOMKIT_KIND_MODEL) != 0 ? -1 : kind != OOMKIT_KIND_CLOSED;
}

/* As above, of all values. */
static int
values_are_data(oomkit_state *st, PyObject *dict)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0;
    int any = 0;

    while (any >= 0 && PyDict_Next(dict, &position, &key, &value)) {
        int each = value_is_data(st, value);
        any = each < 0 ? -1 : any | each;
    }
    return any;
}

/* An argument's node that is made now: one more child of the object at `at`. */
static int
open_child(const oomkit_flattening *f, Py_ssize_t at, PyObject *value, PyObject *key,
           int flags, int depth)
{
    if (oomkit_flatten_value(f, value, key, flags, depth + 1) < 0) {
        return -1;
    }
    f->tree->nodes[at].children++;
    return 0;
}

/* One entry; marked when it is an attribute too. */
static int
open_entry(const oomkit_flattening *f, Py_ssize_t at, PyObject *dict, PyObject *key,
           PyObject *value, int depth)
{
    PyObject *mirror = PyDict_GetItemWithError(dict, key); /* borrowed */

    if (mirror == NULL && PyErr_Occurred()) {
        return -1;
    }
    return open_child(f, at, value, key, mirror == value ? OOMKIT_NODE_MIRRORED : 0,
                      depth);
}

/* Is any attribute an entry as well? There are few of them beside a UserDict's entries,
 * and in a ModelOutput the first one is. 1, 0 or -1. */
static int
any_is_mirrored(PyObject *mapping, PyObject *dict)
{
    PyObject *name, *value; /* borrowed from dict */
    Py_ssize_t position = 0;
    int found = 0;

    while (!found && PyDict_Next(dict, &position, &name, &value)) {
        PyObject *entry = PyDict_GetItemWithError(mapping, name); /* borrowed */
        if (entry == NULL && PyErr_Occurred()) {
            return -1;
        }
        found = entry == value;
    }
    return found;
}

/* The entries of a mapping, in the order of their insertion. */
static int
open_entries(const oomkit_flattening *f, Py_ssize_t at, PyObject *mapping,
             PyObject *dict, int depth)
{
    PyObject *key, *value; /* borrowed from mapping */
    Py_ssize_t position = 0;
    int result = 0, mirrored;

    mirrored = dict == mapping || dict == NULL ? 0 : any_is_mirrored(mapping, dict);
    if (mirrored <= 0) {
        dict = NULL;
        result = mirrored;
    }
    while (result == 0 && PyDict_Next(mapping, &position, &key, &value)) {
        result = dict == NULL ? open_child(f, at, value, key, 0, depth)
                              : open_entry(f, at, dict, key, value, depth);
    }
    f->tree->nodes[at].entries = (int32_t)f->tree->nodes[at].children;
    return result;
}

/* The instance's dictionary, without what open_entries() has marked and without the
 * dictionary that the entries lie in. */
static int
open_attributes(const oomkit_flattening *f, Py_ssize_t at, PyObject *mapping,
                PyObject *dict, int depth)
{
    PyObject *name, *value; /* borrowed from dict */
    Py_ssize_t position = 0;

    while (PyDict_Next(dict, &position, &name, &value)) {
        PyObject *entry = mapping ? PyDict_GetItemWithError(mapping, name) : NULL;
        if (entry == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (entry == value || (value == mapping && PyUnicode_Check(name) &&
                               PyUnicode_Compare(name, f->st->str_data) == 0)) {
            continue;
        }
        if (open_child(f, at, value, name, OOMKIT_NODE_ATTRIBUTE, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The slots of the type and of those that it comes from. */
static int
open_slots(const oomkit_flattening *f, Py_ssize_t at, PyObject *object, int depth)
{
    PyTypeObject *type = Py_TYPE(object);

    for (; type != NULL && type != &PyDict_Type; type = type->tp_base) {
        PyMemberDef *member = type->tp_members;
        for (; member != NULL && member->name != NULL; member++) {
            OWNED PyObject *value = NULL, *name = NULL;
            if (strncmp(member->name, "__", 2) == 0 ||
                (member->flags & READONLY) != 0) {
                continue;
            }
            value = PyMember_GetOne((const char *)object, member);
            if (value == NULL) {
                if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                    return -1;
                }
                PyErr_Clear(); /* a slot that was never set */
                continue;
            }
            name = PyUnicode_InternFromString(member->name);
            if (name == NULL ||
                open_child(f, at, value, name, OOMKIT_NODE_ATTRIBUTE | OOMKIT_NODE_SLOT,
                           depth) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Is the object of an argument a batch, by what is in it? */
static int
object_is_data(const oomkit_flattening *f, PyObject *object, PyObject *dict, int custom)
{
    int entries = 0, attributes = 0;

    if (PyDict_Check(object)) {
        entries = PyDict_GET_SIZE(object) > f->rules->longest
                      ? -1
                      : values_are_data(f->st, object);
    }
    if (dict != NULL && dict != object) {
        attributes = values_are_data(f->st, dict);
    }
    return entries >= 0 && attributes >= 0 &&
           (dict == NULL || entries != 0 || attributes != 0 || custom);
}

int
oomkit_flatten_object(const oomkit_flattening *f, Py_ssize_t at, PyObject *object,
                      int custom, int depth)
{
    PyObject *mapping = PyDict_Check(object) ? object : NULL; /* borrowed */
    OWNED PyObject *dict = NULL;
    uint8_t *flags = &f->tree->nodes[at].flags;

    if (object_dict(object, &dict) < 0) {
        return -1;
    }
    if (!f->rules->outputs && !object_is_data(f, object, dict, custom)) {
        return 0;
    }
    f->tree->nodes[at].kind = OOMKIT_NODE_OBJECT;
    if (dict == object) {
        *flags |= OOMKIT_NODE_OWN_DICT;
    } else if (mapping == NULL && dict != NULL &&
               PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)f->st->UserDict)) {
        mapping = PyDict_GetItemWithError(dict, f->st->str_data);
        if (mapping == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (mapping != NULL && PyDict_CheckExact(mapping) &&
            PyDict_GET_SIZE(mapping) <= f->rules->longest) {
            *flags |= OOMKIT_NODE_DATA;
        } else {
            mapping = NULL;
        }
    }
    if ((mapping != NULL && open_entries(f, at, mapping, dict, depth) < 0) ||
        (dict != NULL && dict != object &&
         open_attributes(f, at, mapping, dict, depth) < 0)) {
        return -1;
    }
    return open_slots(f, at, object, depth);
}

/* --- making one anew --- */

/* Sets the slot of this name. 0 or -1. */
static int
made_slot(PyObject *made, PyObject *name, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(made);

    for (; type != NULL; type = type->tp_base) {
        PyMemberDef *member = type->tp_members;
        for (; member != NULL && member->name != NULL; member++) {
            if (PyUnicode_CompareWithASCIIString(name, member->name) == 0) {
                return PyMember_SetOne((char *)made, member, value);
            }
        }
    }
    PyErr_Format(PyExc_RuntimeError,
                 "'%.200s' has lost its slot %R" SEE("internal-error"),
                 Py_TYPE(made)->tp_name, name);
    return -1;
}

typedef struct making {
    PyObject *made; /* borrowed, as the others */
    PyObject *dict; /* its attributes, or NULL */
    PyObject *data; /* in a UserDict: what its entries lie in */
} making;

/* One part of the new object. 0 or -1. */
static int
made_part(const making *m, const oomkit_node *child, int is_entry, PyObject *value)
{
    const PyMappingMethods *mapping =
        oomkit_output_base(Py_TYPE(m->made))->tp_as_mapping; /* of a type in C */
    int mirrored = (child->flags & OOMKIT_NODE_MIRRORED) != 0, set = 0;

    if (!is_entry && (child->flags & OOMKIT_NODE_SLOT) != 0) {
        return made_slot(m->made, child->key, value);
    }
    if (is_entry && m->data != NULL) {
        set = PyDict_SetItem(m->data, child->key, value);
    } else if (is_entry &&
               !(mirrored && value == Py_None && child->object != Py_None)) {
        set = mapping->mp_ass_subscript(m->made, child->key, value);
    }
    return set == 0 && (mirrored || !is_entry)
               ? PyDict_SetItem(m->dict, child->key, value)
               : set;
}

/* Attributes in the order of those of `like`. */
static int
made_attributes(PyObject *dict, PyObject *like)
{
    OWNED PyObject *before = NULL;
    PyObject *name, *ignored; /* borrowed from before */
    Py_ssize_t position = 0;

    if (object_dict(like, &before) < 0) {
        return -1;
    }
    while (before != NULL && PyDict_Next(before, &position, &name, &ignored)) {
        OWNED PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, name));
        if (value == NULL ? PyErr_Occurred() != NULL
                          : PyDict_DelItem(dict, name) < 0 ||
                                PyDict_SetItem(dict, name, value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* An OrderedDict may have been given another order than that of its insertions. */
static int
made_order(PyObject *made, PyObject *like)
{
    OWNED PyObject *keys = PyODict_Type.tp_iter(like);

    while (keys != NULL) {
        OWNED PyObject *key = PyIter_Next(keys), *done = NULL;
        int there;
        if (key == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        there = PyDict_Contains(made, key); /* the step may have added some */
        if (there > 0) {
            done = PyObject_CallMethod((PyObject *)&PyODict_Type, "move_to_end", "OO",
                                       made, key);
        }
        if (there < 0 || (there > 0 && done == NULL)) {
            return -1;
        }
    }
    return -1;
}

PyObject *
oomkit_object_build(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                    PyObject *const *values)
{
    const oomkit_node *node = &tree->nodes[at];
    PyTypeObject *type = Py_TYPE(node->object);
    OWNED PyObject *made =
        oomkit_output_base(type)->tp_new(type, st->empty_tuple, NULL);
    OWNED PyObject *dict = NULL, *data = NULL;
    int mixed = (node->flags & OOMKIT_NODE_DATA) != 0; /* out of their order */
    Py_ssize_t i, child;

    if (made == NULL ||
        ((node->flags & OOMKIT_NODE_OWN_DICT) != 0 &&
         PyObject_GenericSetDict(made, made, NULL) < 0) ||
        object_dict(made, &dict) < 0) {
        return NULL;
    }
    if (mixed && ((data = PyDict_New()) == NULL ||
                  PyDict_SetItem(dict, st->str_data, data) < 0)) {
        return NULL;
    }
    for (i = 0, child = at + 1; i < node->children;
         i++, child = oomkit_tree_end(tree, child)) {
        const making m = {made, dict, data};
        mixed |= (tree->nodes[child].flags & OOMKIT_NODE_MIRRORED) != 0;
        if (made_part(&m, &tree->nodes[child], i < node->entries, values[i]) < 0) {
            return NULL;
        }
    }
    if ((mixed && made_attributes(dict, node->object) < 0) ||
        (PyODict_Check(made) && made_order(made, node->object) < 0)) {
        return NULL;
    }
    return STEAL(made);
}
