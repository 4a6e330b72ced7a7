"""A long-term pin without a GPU: fixed buffers of io_uring, by system call.

The kernel pins them with FOLL_LONGTERM, as GPU drivers do with host memory that is registered, and
so first moves their pages out of ZONE_MOVABLE.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["LongTermPins"]

# asm-generic/unistd.h; the same numbers on x86-64
_SETUP, _REGISTER = 425, 427
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_PARAMETERS_BYTES = 120  # struct io_uring_params

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, *arguments: object) -> int:
    result = int(_libc.syscall(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class LongTermPins:
    """Ranges that are pinned now, each by a ring of its own."""

    def __init__(self) -> None:
        self._rings: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        """Raises OSError where the kernel refuses."""
        parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
        ring = _call("io_uring_setup", _SETUP, 4, parameters)
        pinned = _Range(address, nbytes)
        try:
            _call(
                "io_uring_register",
                *(_REGISTER, ring, _REGISTER_BUFFERS, ctypes.byref(pinned), 1),
            )
        except OSError:
            os.close(ring)
            raise
        self._rings[address] = ring

    def unpin(self, address: int) -> None:
        """Waits until the pages are free to move."""
        ring = self._rings.pop(address)
        _call("io_uring_register", _REGISTER, ring, _UNREGISTER_BUFFERS, None, 0)
        os.close(ring)

    @property
    def count(self) -> int:
        return len(self._rings)
