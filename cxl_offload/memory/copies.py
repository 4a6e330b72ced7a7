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


def has_copies(address: int) -> bool:
    """Whether the allocation that holds ``address`` has copies or is one of them."""
    return bool(_all_of(address))


def is_later_copy(address: int) -> bool:
    """Whether it is a copy of another one that is still held."""
    return has_copies(address) and not copies_at(address)


def _all_of(address: int) -> list[_C.Allocation]:
    owner = _C.find_allocation(address) if any_copies() else None
    return [] if owner is None else owner.copies()


def restored_from_copy(address: int, nbytes: int) -> bool:
    """Writes lost bytes of a later copy anew from the first, where the two are equal besides.

    What is lost of the first is lost: torch writes in place there, and perhaps it wrote those bytes
    only, which no other copy has. Copies that differ were written by somebody; nothing is.
    """
    held = _C.find_allocation(address)
    if held is None or address + nbytes > held.address + held.nbytes:
        return False
    first, *_ = held.copies() or [held]
    source = first.address + address - held.address
    if first.address == held.address or _C.losses_in(source, nbytes) or not _are_equal(held, first):
        return False
    ctypes.memmove(address, source, nbytes)
    return True


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
