"""The table of functions of oomkit._bridge, for ctypes."""

import ctypes

import pytest

bridge = pytest.importorskip("oomkit._bridge")

OK, EUNSUPPORTED = 0, -4
SAME, MOVED, REPLACED, NEW, GONE = range(5)
UNKNOWN = 2**64 - 1

size_t, offset_t, pointer = ctypes.c_size_t, ctypes.c_ssize_t, ctypes.c_void_p
function = ctypes.CFUNCTYPE


class Mark(ctypes.Structure):
    _fields_ = [("grad", pointer), ("version", ctypes.c_uint32)]


class Facts(ctypes.Structure):
    _fields_ = [
        ("ndim", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("shape_hash", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("has_version", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("requires_grad", ctypes.c_int32),
        ("is_strided", ctypes.c_int32),
        ("is_leaf", ctypes.c_int32),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("allocated", "limit", "peak_allocated", "allocations")
    ]


class Place(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("storage", "data", "counter")),
        *((name, ctypes.c_uint64) for name in ("bytes", "begin", "end")),
        ("version", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("device_type", "device_index", "requires_grad")),
    ]


class Keys(ctypes.Structure):
    _fields_ = [("included", ctypes.c_uint64), ("excluded", ctypes.c_uint64)]


class Modes(ctypes.Structure):
    _fields_ = [
        ("autocast", ctypes.c_uint64),
        ("grad", ctypes.c_int32),
        ("dispatch", ctypes.c_int32),
    ]


DeviceStats = ctypes.c_uint64 * 8
int_p = ctypes.POINTER(ctypes.c_int)


class Table(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("torch_major", ctypes.c_int32),
        ("torch_minor", ctypes.c_int32),
        (
            "tensor_facts",
            function(ctypes.c_int, pointer, offset_t, ctypes.c_int64, ctypes.POINTER(Facts)),
        ),
        ("versions", function(ctypes.c_int, pointer, offset_t, size_t, pointer, pointer, pointer)),
        ("grads_mark", function(ctypes.c_int, pointer, offset_t, size_t, ctypes.POINTER(Mark))),
        (
            "grads_compare",
            function(
                *(ctypes.c_int, pointer, offset_t, size_t, ctypes.POINTER(Mark), pointer),
                *(pointer, ctypes.POINTER(size_t)),
            ),
        ),
        ("grads_release", function(None, ctypes.POINTER(Mark), size_t)),
        ("bytes_get", function(ctypes.c_int, pointer, offset_t, pointer, ctypes.c_uint64)),
        ("bytes_set", function(ctypes.c_int, pointer, offset_t, pointer, ctypes.c_uint64)),
        ("sample", function(ctypes.c_uint64, pointer, offset_t)),
        ("storage_facts", function(ctypes.c_int, pointer, offset_t, ctypes.POINTER(Place))),
        ("storages_hold", function(ctypes.c_int, pointer, offset_t, size_t, pointer)),
        ("storages_release", function(None, pointer, size_t)),
        (
            "storage_bytes",
            function(ctypes.c_int, pointer, offset_t, ctypes.c_uint64, ctypes.c_uint64, pointer),
        ),
        ("tensor_alias", function(ctypes.c_int, pointer, offset_t, pointer)),
        ("form_make", function(ctypes.c_int, pointer, offset_t, ctypes.POINTER(pointer))),
        ("form_release", function(None, pointer)),
        (
            "form_versions",
            function(
                None, pointer, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32)
            ),
        ),
        ("restored_make", function(ctypes.c_int, pointer, offset_t, ctypes.POINTER(pointer))),
        ("restored_release", function(None, pointer)),
        (
            "restored_apply",
            function(ctypes.c_int, pointer, pointer, ctypes.c_uint64, pointer, offset_t),
        ),
        ("unseen_enter", function(None, ctypes.POINTER(Keys))),
        ("unseen_leave", function(None, ctypes.POINTER(Keys))),
        ("modes_get", function(ctypes.c_int, ctypes.POINTER(Modes))),
        ("modes_set", function(ctypes.c_int, ctypes.POINTER(Modes))),
        ("generator_read", function(ctypes.c_uint64, pointer, pointer, ctypes.c_uint64)),
        ("generator_same", function(ctypes.c_int, pointer, pointer, ctypes.c_uint64)),
        ("cpu_install", function(ctypes.c_int)),
        ("cpu_installed", function(ctypes.c_int)),
        ("cpu_set_limit", function(ctypes.c_int, ctypes.c_uint64)),
        ("cpu_stats", function(ctypes.c_int, ctypes.POINTER(Stats))),
        ("cpu_counted", function(ctypes.c_int, pointer, offset_t)),
        ("cpu_peak_push", function(ctypes.c_int, int_p)),
        ("cpu_peak_pop", function(ctypes.c_uint64, ctypes.c_int)),
        ("cpu_peak_read", function(ctypes.c_uint64, ctypes.c_int)),
        ("exempt_enter", function(None)),
        ("exempt_leave", function(None)),
        ("exempt_all", function(None, ctypes.c_int)),
        ("fault_arm", function(ctypes.c_int, pointer)),
        ("fault_disarm", function(None)),
        ("fault_stats", function(ctypes.c_int, pointer, pointer, pointer)),
        ("set_phase", function(ctypes.c_int, ctypes.c_int)),
        ("device_initialized", function(ctypes.c_int, ctypes.c_int)),
        (
            "device_stats",
            function(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(DeviceStats)),
        ),
        ("device_reset_peak", function(ctypes.c_int, ctypes.c_int, ctypes.c_int)),
        ("device_empty_cache", function(ctypes.c_int, ctypes.c_int)),
        ("device_expandable", function(ctypes.c_int, ctypes.c_int)),
    ]


def table():
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = pointer, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(get(bridge.api, b"oomkit._bridge.api"), ctypes.POINTER(Table)).contents


api = table()
