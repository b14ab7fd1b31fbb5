/* What is known of one shape of batch as a dict of plain values, and back. The dict may
 * come out of a file that anybody has written. */
#include "remember.h"
#include "../core/numbers.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define HEX_DIGITS 16
#define ROW_BYTES_MOST 1e15

/* --- out --- */

/* dict[name] = value; steals value, which may be NULL with an exception. 0 or -1. */
static int
dict_put(PyObject *dict, const char *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
    Py_XDECREF(value);
    return result;
}

/* Python's JSON has no unsigned 64 bit numbers elsewhere: 16 digits. */
static PyObject *
hex_new(uint64_t value)
{
    char text[HEX_DIGITS + 1];
    PyOS_snprintf(text, sizeof(text), "%016" PRIx64, value);
    return PyUnicode_FromString(text);
}

static PyObject *
number_new(int index, const oomkit_number *number)
{
    if (oomkit_number_kind_of(index) == OOMKIT_NUMBER_SHARE) {
        return PyFloat_FromDouble(number->share);
    }
    if (oomkit_number_kind_of(index) == OOMKIT_NUMBER_ROOM &&
        number->whole == OOMKIT_UNKNOWN) {
        return Py_NewRef(Py_None);
    }
    return PyLong_FromUnsignedLongLong(number->whole);
}

int
oomkit_signature_can_go(const oomkit_signature *entry)
{
    const oomkit_knowledge *known = &entry->known;
    return !known->borrowed && known->batch >= 0 &&
           (known->successes > 0 || known->failures > 0);
}

PyObject *
oomkit_signature_dict(const oomkit_signature *entry)
{
    OWNED PyObject *dict = PyDict_New();
    int i;

    if (dict == NULL || dict_put(dict, "signature", hex_new(entry->hash)) < 0 ||
        dict_put(dict, "family", hex_new(entry->family)) < 0 ||
        dict_put(dict, "row_bytes", PyFloat_FromDouble(entry->row_bytes)) < 0) {
        return NULL;
    }
    for (i = 0; i < oomkit_number_count(); i++) {
        oomkit_number number;
        oomkit_number_get(&entry->known, i, &number);
        if (!oomkit_number_is_nothing(i, &number) &&
            dict_put(dict, oomkit_number_name(i), number_new(i, &number)) < 0) {
            return NULL;
        }
    }
    return STEAL(dict);
}

/* --- in --- */

static int
parse_wrong(const char *name, const char *wanted, PyObject *got)
{
    PyErr_Format(PyExc_ValueError, "'%s' expected %s, got %R" SEE("load-state-dict"),
                 name, wanted, got);
    return -1;
}

/* 0 or -1 with ValueError. */
static int
parse_hex(const char *name, PyObject *given, uint64_t *value)
{
    const char *text = NULL;
    Py_ssize_t length = 0, i;

    if (PyUnicode_Check(given)) {
        text = PyUnicode_AsUTF8AndSize(given, &length);
        if (text == NULL) {
            return -1;
        }
    }
    for (i = 0; i < length && isxdigit((unsigned char)text[i]); i++) {
    }
    if (text == NULL || length != HEX_DIGITS || i != length) {
        return parse_wrong(name, "16 hexadecimal digits", given);
    }
    *value = strtoull(text, NULL, 16);
    return 0;
}

static int
parse_row_bytes(PyObject *given, double *value)
{
    *value = PyFloat_Check(given) ? PyFloat_AS_DOUBLE(given) : -1.0;
    if (!(*value >= 0.0 && *value <= ROW_BYTES_MOST)) {
        return parse_wrong("row_bytes", "a float from 0 to 1e15", given);
    }
    return 0;
}

static int
parse_number(int index, PyObject *given, oomkit_knowledge *known)
{
    oomkit_number number = {0, 0.0};
    oomkit_number_kind kind = oomkit_number_kind_of(index);
    int is_int = PyLong_Check(given) && !PyBool_Check(given), fits = 1;

    if (kind == OOMKIT_NUMBER_SHARE) {
        number.share = PyFloat_Check(given) ? PyFloat_AS_DOUBLE(given) : -1.0;
    } else if (kind == OOMKIT_NUMBER_ROOM && given == Py_None) {
        number.whole = OOMKIT_UNKNOWN;
    } else if (is_int) {
        number.whole = PyLong_AsUnsignedLongLong(given);
        /* UNKNOWN in digits is no room either. */
        fits = number.whole != OOMKIT_UNKNOWN;
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
                return -1;
            }
            PyErr_Clear(); /* negative, or huge: said below */
        }
    } else {
        fits = 0;
    }
    if (!fits || oomkit_number_set(known, index, &number) != OOMKIT_OK) {
        return parse_wrong(oomkit_number_name(index),
                           kind == OOMKIT_NUMBER_SHARE  ? "a float from 0 to 0.25"
                           : kind == OOMKIT_NUMBER_ROOM ? "bytes or None"
                                                        : "a whole number in range",
                           given);
    }
    return 0;
}

/* 0, or -1 with ValueError. */
static int
parse_item(const char *name, PyObject *given, oomkit_signature *entry)
{
    int i;

    if (strcmp(name, "signature") == 0) {
        return parse_hex(name, given, &entry->hash);
    }
    if (strcmp(name, "family") == 0) {
        return parse_hex(name, given, &entry->family);
    }
    if (strcmp(name, "proven") == 0) {
        return 0; /* of earlier releases: a split is proven in each process */
    }
    if (strcmp(name, "row_bytes") == 0) {
        return parse_row_bytes(given, &entry->row_bytes);
    }
    for (i = 0; i < oomkit_number_count(); i++) {
        if (strcmp(name, oomkit_number_name(i)) == 0) {
            return parse_number(i, given, &entry->known);
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "'%s' is no number that oomkit knows" SEE("load-state-dict"), name);
    return -1;
}

int
oomkit_signature_parse(PyObject *dict, oomkit_signature *entry)
{
    PyObject *key, *value; /* borrowed from dict, which runs no code meanwhile */
    Py_ssize_t position = 0;

    memset(entry, 0, sizeof(*entry));
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_ValueError,
                     "expected a dict for each shape, got %s" SEE("load-state-dict"),
                     Py_TYPE(dict)->tp_name);
        return -1;
    }
    while (PyDict_Next(dict, &position, &key, &value)) {
        const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : "";
        if (name == NULL || parse_item(name, value, entry) < 0) {
            return -1;
        }
    }
    if (entry->hash == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "'signature' is missing" SEE("load-state-dict"));
        return -1;
    }
    if (oomkit_numbers_end(&entry->known) != OOMKIT_OK) {
        OWNED PyObject *signature = hex_new(entry->hash);
        if (signature != NULL) {
            PyErr_Format(
                PyExc_ValueError,
                "the numbers of signature %U do not go together" SEE("load-state-dict"),
                signature);
        }
        return -1;
    }
    return 0;
}
