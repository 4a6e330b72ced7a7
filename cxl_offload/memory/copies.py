"""Copies of one allocation on several nodes (``replicate:0,1``), by its address."""

from __future__ import annotations

import ctypes

from cxl_offload import _C

any_copies = _C.any_copies
"""Whether anything in this process has copies; one call, so that who has none pays no more."""

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def copies_at(address: int) -> tuple[_C.Allocation, ...]:
    """All copies of the allocation that holds ``address``, where it is the first of them.

    Empty for any other memory: quick, as long as nothing in this process has copies.
    """
    if not any_copies():
        return ()
    owner = _C.find_allocation(address)
    found = () if owner is None else tuple(owner.copies())
    return found if found and owner is not None and found[0].address == owner.address else ()


def restored_from_copy(address: int, nbytes: int) -> bool:
    """Writes lost bytes of one copy anew from another, where the copies are equal besides.

    Copies differ where somebody wrote the first in place; then which is right is not known, and
    nothing is written.
    """
    held = _C.find_allocation(address)
    if held is None or address + nbytes > held.address + held.nbytes:
        return False
    for other in held.copies():
        if other.address != held.address and _are_equal(held, other):
            source = other.address + address - held.address
            if not _C.losses_in(source, nbytes):
                ctypes.memmove(address, source, nbytes)
                return True
    return False


def _are_equal(one: _C.Allocation, other: _C.Allocation) -> bool:
    """Whether two copies have the same bytes wherever neither has lost any."""
    gaps = [
        (begin - copy.address, begin - copy.address + count)
        for copy in (one, other)
        for _, begin, count, _ in _C.losses_in(copy.address, copy.nbytes)
    ]
    at = 0
    for begin, end in sorted([*gaps, (one.nbytes, one.nbytes)]):
        count = begin - at
        if count > 0 and _compare(one.address + at, other.address + at, count) != 0:
            return False
        at = max(at, end)
    return True
