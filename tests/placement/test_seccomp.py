"""A container's filter that refuses NUMA calls: an error that says what to grant, nothing left."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from cxl_offload.memory import Bind, Interleave, Session
from tests.placement.child import MIB, run_in_child
from tests.placement.kernel_calls import MBIND, MOVE_PAGES, SET_MEMPOLICY

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
NUMA_CALLS = {
    "mbind": MBIND,
    "set_mempolicy": SET_MEMPOLICY,
    "get_mempolicy": GET_MEMPOLICY,
    "move_pages": MOVE_PAGES,
}

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _refuse(numbers: list[int]) -> None:
    """From here on these system calls fail with EPERM, for this process and its children."""
    code = [(_LOAD_NUMBER, 0, 0, 0)]
    for index, number in enumerate(numbers):
        code.append((_JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    instructions = (_Instruction * len(code))(*(_Instruction(*line) for line in code))
    program = _Program(len(code), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)) == 0, ctypes.get_errno()


@pytest.mark.parametrize("names", [*([name] for name in NUMA_CALLS), [*NUMA_CALLS]], ids="+".join)
def test_refused_call_is_an_error_that_says_what_to_grant(names: list[str]) -> None:
    def child() -> None:
        session = Session.linux()
        _refuse([NUMA_CALLS[name] for name in names])
        for policy in (Bind((0,)), Interleave((0,))):
            with pytest.raises(OSError, match="SYS_NICE") as refused:
                session.allocate(4 * MIB, policy)
            assert refused.value.errno == errno.EPERM
            assert session.stats().mapped_bytes.current == 0
            assert not any(use.current_bytes for use in session.stats().nodes.values())

    run_in_child(child)


def test_pages_that_may_not_be_asked_are_an_error_too() -> None:
    def child() -> None:
        session = Session.linux()
        block = session.allocate(4 * MIB, Bind((0,)))
        _refuse([MOVE_PAGES])
        with pytest.raises(OSError, match="SYS_NICE"):
            block.bytes_per_node()
        with pytest.raises(OSError, match="SYS_NICE"):
            session.placement(block.address, block.nbytes)
        del block
        session.trim()
        assert session.stats().mapped_bytes.current == 0

    run_in_child(child)
