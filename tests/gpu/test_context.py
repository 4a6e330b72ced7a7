"""The package makes no CUDA context of its own, and works in the caller's, whichever that is.

Each test is a process of its own: a context, once there, cannot be taken back.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")

def ok(result):
    assert result == 0, result

def primary_is_active():
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    ok(cuda.cuInit(0))
    ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
    ok(cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)))
    return bool(active.value)

def current_context():
    context = ctypes.c_void_p()
    ok(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    return context.value

def context_of(address):
    context = ctypes.c_void_p()
    ok(cuda.cuPointerGetAttribute(ctypes.byref(context), 1, ctypes.c_uint64(address)))
    return context.value
"""


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", DRIVER + textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_import_and_sessions_create_no_context() -> None:
    run("""
        import cxl_offload
        import cxl_offload.memory, cxl_offload.tensor, cxl_offload.transfer
        from cxl_offload import _C
        assert not primary_is_active()
        session = cxl_offload.Session.linux()
        with cxl_offload.use(session):
            tensor = cxl_offload.empty(1 << 20)
            del tensor
        _C.open_cuda_driver().synchronize()
        cxl_offload.discover()
        assert not primary_is_active()
        assert current_context() is None
    """)


def test_pin_without_a_context_is_refused_until_there_is_one() -> None:
    run("""
        import torch, cxl_offload
        session = cxl_offload.Session.linux()
        with cxl_offload.use(session):
            try:
                cxl_offload.empty(1 << 20, pin=True)
            except ValueError as error:
                assert "no CUDA context" in str(error), error
            else:
                raise AssertionError("pinned without a context")
            assert not primary_is_active()
            assert session.stats().mapped_bytes.current == 0
            torch.zeros(1, device="cuda")
            assert cxl_offload.empty(1 << 20, pin=True).is_pinned()
    """)


def test_pin_happens_in_the_callers_current_context() -> None:
    run("""
        import torch, cxl_offload
        torch.zeros(1, device="cuda")
        primary = current_context()
        own = ctypes.c_void_p()
        ok(cuda.cuCtxCreate_v2(ctypes.byref(own), 0, 0))
        assert current_context() == own.value != primary
        session = cxl_offload.Session.linux()
        with cxl_offload.use(session):
            tensor = cxl_offload.empty(1 << 20, dtype=torch.uint8, pin=True).fill_(7)
            assert context_of(tensor.data_ptr()) == own.value
            assert current_context() == own.value
            popped = ctypes.c_void_p()
            ok(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)))
            assert current_context() == primary
            # Portable: pinned for the primary context too.
            assert tensor.is_pinned()
            assert bool((tensor.to("cuda", non_blocking=True) == 7).all())
            torch.cuda.synchronize()
            del tensor
            session.trim()
            assert session.stats().mapped_bytes.current == 0
            assert current_context() == primary
        ok(cuda.cuCtxDestroy_v2(own))
    """)


def test_memory_of_a_destroyed_context_can_still_be_dropped() -> None:
    run("""
        import torch, cxl_offload
        torch.zeros(1, device="cuda")
        own, popped = ctypes.c_void_p(), ctypes.c_void_p()
        ok(cuda.cuCtxCreate_v2(ctypes.byref(own), 0, 0))
        session = cxl_offload.Session.linux()
        with cxl_offload.use(session):
            tensor = cxl_offload.empty(1 << 20, pin=True)
            ok(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)))
            ok(cuda.cuCtxDestroy_v2(own))
            del tensor
            session.trim()
            assert session.stats().mapped_bytes.current == 0
            assert cxl_offload.empty(1 << 20, pin=True).is_pinned()
    """)


def test_pin_in_a_thread_without_a_context_uses_the_one_in_use() -> None:
    run("""
        import threading, torch, cxl_offload
        torch.zeros(1, device="cuda")
        primary, found = current_context(), []
        def work():
            assert current_context() is None
            found.append(cxl_offload.empty(1 << 20, pin=True))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found[0].is_pinned()
        assert context_of(found[0].data_ptr()) == primary
    """)


def test_exit_with_copies_in_flight_is_quiet() -> None:
    run("""
        import torch, cxl_offload
        torch.zeros(1, device="cuda")
        stream = torch.cuda.Stream()
        tensor = cxl_offload.empty(8 << 20, dtype=torch.uint8, pin=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            there = tensor.to("cuda", non_blocking=True)
        cxl_offload.record_stream(tensor, stream.cuda_stream)
        kept = cxl_offload.empty(8 << 20, dtype=torch.uint8, pin=True)
        del tensor
    """)


def test_fork_leaves_the_gpu_reading_the_parents_pages() -> None:
    """A write after a fork copies pages of ordinary memory; pinned ones must stay the parent's."""
    run("""
        import os, torch, cxl_offload
        torch.zeros(1, device="cuda")
        tensor = cxl_offload.empty(4 << 20, dtype=torch.uint8, pin=True).fill_(1)
        child = os.fork()
        if child == 0:
            same = bool((tensor == 1).all())
            os._exit(0 if same else 1)
        tensor.fill_(2)
        assert bool((tensor.to("cuda", non_blocking=True) == 2).all())
        assert os.waitpid(child, 0)[1] == 0
    """)
