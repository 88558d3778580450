"""The compiled coders of ``native.c``, where the installation could build them."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

FILE = Path(__file__).with_name("libpwfn.so.2")


class Model(ctypes.Structure):
    """The model of the context coder, as in ``native.c``."""

    arrays: list[NDArray[Any]]  # that it points to, so that they live as long
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("children", "squash", "stretch", "share", "levels", "paths")),
        *((name, ctypes.c_void_p) for name in ("states", "weights", "channel", "tilt", "empty", "row")),
        ("nodes", ctypes.c_int32),
        ("zero", ctypes.c_int32),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled coders, or None. A call releases Python's lock, so threads run side by side."""
    try:
        found = ctypes.CDLL(str(FILE))
    except OSError:
        warnings.warn(
            "pwfn was installed without its compiled coder, and reads and writes files a thousand times more "
            "slowly: install it again where there is a C compiler, or save files with version=1",
            stacklevel=2,
        )
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    found.pwfn_contexts.restype = ctypes.c_int32
    coding = (ctypes.POINTER(Model), pointer, count, pointer, pointer, count)
    found.pwfn_context_encode.restype, found.pwfn_context_encode.argtypes = count, coding
    found.pwfn_context_decode.restype, found.pwfn_context_decode.argtypes = None, (*coding, pointer)
    found.pwfn_ans_decode.restype = ctypes.c_int32
    found.pwfn_ans_decode.argtypes = (pointer, count, *(pointer,) * 3, count, pointer, ctypes.c_int32)
    return found


def address(array: NDArray[Any]) -> int:
    """Where an array's numbers are; it must be contiguous, and outlive the call."""
    assert array.flags.c_contiguous
    return array.ctypes.data
