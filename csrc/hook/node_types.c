/* What is the same of all nodes of a type: looked up once for each type that is always
 * there, those of torch's own operations. */
#include "graph.h"

#define TYPES 32 /* places, of which three quarters are taken at most */

/* Those that were met; what does not fit stands in another table of them. */
struct oomkit_node_types {
    oomkit_chained next;
    unsigned count;
    oomkit_node_type places[TYPES];
};

/* The attribute of that name of nodes of this type. */
static oomkit_node_attribute
attribute_find(PyTypeObject *type, PyObject *name)
{
    oomkit_node_attribute found = {.name = name};
    PyObject *descriptor = /* borrowed from the type */
        type->tp_flags & Py_TPFLAGS_HEAPTYPE || type->tp_dict == NULL
            ? NULL
            : PyDict_GetItem(type->tp_dict, name);

    if (descriptor != NULL && Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
        const PyGetSetDef *own = ((PyGetSetDescrObject *)descriptor)->d_getset;
        found.get = own->get;
        found.closure = own->closure;
    }
    return found;
}

static void
type_fill(const oomkit_state *st, PyTypeObject *type, oomkit_node_type *into)
{
    const char *name = type->tp_name, *last = strrchr(name, '.');

    *into = (oomkit_node_type){.type = type};
    into->is_leaf = strcmp(last == NULL ? name : last + 1, "AccumulateGrad") == 0;
    /* Each graph that torch.compile has compiled is a type of its own, all of one name.
     */
    into->hash = strstr(name, "CompiledFunction") != NULL ? (uintptr_t)type : 0;
    for (; *name != '\0'; name++) {
        into->hash = (into->hash ^ (unsigned char)*name) * 0x100000001b3u;
    }
    into->edges = attribute_find(type, st->str_next_functions);
    into->variable = attribute_find(type, st->str_variable);
    into->weighs = strncmp(type->tp_name, "NllLoss", 7) == 0;
    into->weights = attribute_find(type, st->str_saved_weight);
#define HAS(field, text)                                                               \
    if (type->tp_dict != NULL && PyDict_Contains(type->tp_dict, st->field) > 0) {      \
        into->saved[into->saved_count++] = attribute_find(type, st->field);            \
    }
    OOMKIT_STATE_SAVED(HAS)
#undef HAS
}

/* The place of a type in a table, or the free one where it belongs. */
static oomkit_node_type *
types_place(struct oomkit_node_types *types, const PyTypeObject *type)
{
    size_t at = ((uintptr_t)type >> 4) % TYPES;

    while (types->places[at].type != NULL && types->places[at].type != type) {
        at = (at + 1) % TYPES;
    }
    return &types->places[at];
}

/* The place of a type in the first table that has it, or room for it. NULL without
 * memory, and without an exception. */
static oomkit_node_type *
types_find(oomkit_state *st, const PyTypeObject *type)
{
    oomkit_chained **link = &st->node_types;

    for (;;) {
        struct oomkit_node_types *types = (struct oomkit_node_types *)*link;
        oomkit_node_type *place;
        if (types == NULL) {
            types = PyMem_Calloc(1, sizeof(*types));
            if (types == NULL) {
                return NULL;
            }
            *link = &types->next;
        }
        place = types_place(types, type);
        if (place->type == type) {
            return place;
        }
        if (types->count < TYPES / 4 * 3) {
            types->count++;
            return place;
        }
        link = &types->next.next;
    }
}

const oomkit_node_type *
oomkit_node_type_of(oomkit_state *st, PyTypeObject *type, oomkit_node_type *own)
{
    oomkit_node_type *found =
        type->tp_flags & Py_TPFLAGS_HEAPTYPE ? NULL : types_find(st, type);

    found = found == NULL ? own : found;
    if (found->type != type) {
        type_fill(st, type, found);
    }
    return found;
}

PyObject *
oomkit_node_get(PyObject *node, const oomkit_node_attribute *attribute)
{
    return attribute->get != NULL ? attribute->get(node, attribute->closure)
                                  : PyObject_GetAttr(node, attribute->name);
}

int
oomkit_node_is_leaf(oomkit_state *st, PyObject *node)
{
    oomkit_node_type own = {.type = NULL};
    return oomkit_node_type_of(st, Py_TYPE(node), &own)->is_leaf;
}
