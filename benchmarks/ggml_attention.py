"""llama.cpp's decode attention: ggml's flash attention on the CPU, by its C interface.

The library is the one that ``llama-cpp-python`` brings. ggml's tensors are ``(dim, seq, heads,
batch)``, the last dimension outermost, so a contiguous cache of ``(batch, heads, seq, dim)`` is
read where it lies, and nothing is copied. ggml takes the query in float32. It rounds it to the
cache's type, and sums the values of a float16 cache in float16.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import weakref
from pathlib import Path
from typing import Any

import torch

NAME = "llama.cpp"
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Source: enum ggml_type of ggml.h."""

_NODES_BYTES = 1 << 20
"""Room for ggml's descriptions of four tensors and a graph of 2,048 nodes; no data lies there."""

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_4d": (_POINTER, (_POINTER, _INT, *(4 * (ctypes.c_int64,)))),
    "ggml_flash_attn_ext": (_POINTER, (*(5 * (_POINTER,)), _FLOAT, _FLOAT, _FLOAT)),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, _INT)),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_tensor_alloc": (_INT, (_POINTER, _POINTER, _POINTER)),
    "ggml_backend_graph_compute": (_INT, (_POINTER, _POINTER)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_free": (None, (_POINTER,)),
}


def why_not(k: torch.Tensor) -> str:
    """Why it does not take part; empty where it does."""
    path = _library_path()
    if path is None:
        return "llama-cpp-python is not installed"
    if k.dtype not in TYPES:
        return f"it has no {k.dtype}"
    try:
        _library(path)
    except (AttributeError, OSError) as error:
        return f"its library has another interface: {error}"
    return ""


def _library_path() -> Path | None:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return None
    beside = Path(found.origin).parent / "lib"
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH", beside)) / "libggml.so"


def _library(path: Path) -> ctypes.CDLL:
    """Its functions, and those of the libraries that it needs."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Attention:
    """Attention of one query a head, as a graph of one node that is built once.

    Parameters
    ----------
    q
        ``(batch, heads, dim)``; copied to float32.
    k, v
        ``(batch, heads, seq, dim)``, contiguous, of one of ``TYPES``; kept and read in place.
    threads
        Of every call.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, threads: int) -> None:
        path = _library_path()
        assert path is not None
        if not (k.is_contiguous() and v.is_contiguous()):
            raise ValueError("K and V have strides of their own: ggml is given contiguous ones")
        self._ggml = ggml = _library(path)
        batch, heads, dim = q.shape
        self._out = torch.empty(batch, heads, dim, dtype=torch.float32)
        self._kept = q.float().contiguous(), k, v
        context = ggml.ggml_init(_InitParams(_NODES_BYTES, None, True))
        self._backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._buffers: list[int] = []
        shapes = ((dim, 1, heads, batch), *(2 * ((dim, k.shape[2], k.shape[1], batch),)))
        nodes = [
            self._placed(ggml.ggml_new_tensor_4d(context, TYPES[tensor.dtype], *shape), tensor)
            for tensor, shape in zip(self._kept, shapes, strict=True)
        ]
        out = ggml.ggml_flash_attn_ext(context, *nodes, None, dim**-0.5, 0.0, 0.0)
        self._graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(self._graph, self._placed(out, self._out))
        weakref.finalize(self, _free, ggml, context, self._backend, self._buffers)

    def __call__(self) -> torch.Tensor:
        """The result of ``(batch, heads, dim)`` in float32; the next call overwrites it."""
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")
        return self._out

    def _placed(self, node: int, data: torch.Tensor) -> int:
        """Makes the memory of ``data`` that of a tensor of ggml's."""
        nbytes = data.numel() * data.element_size()
        buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(data.data_ptr(), nbytes)
        self._buffers.append(buffer)
        status = self._ggml.ggml_backend_tensor_alloc(buffer, node, data.data_ptr())
        if status:
            raise RuntimeError(f"ggml_backend_tensor_alloc: status {status}")
        return node


def _free(ggml: ctypes.CDLL, context: int, backend: int, buffers: list[int]) -> None:
    for buffer in buffers:
        ggml.ggml_backend_buffer_free(buffer)
    ggml.ggml_backend_free(backend)
    ggml.ggml_free(context)


def tolerance(k: torch.Tensor) -> float:
    """By how much of the greatest result it may differ from float64.

    Each of the additions rounds, of a float16 cache in float16; errors of either sign add up as the
    root of their number.
    """
    summed = torch.float16 if k.dtype == torch.float16 else torch.float32
    own, sums = (float(torch.finfo(each).eps) for each in (k.dtype, summed))
    return 4 * own + k.shape[2] ** 0.5 * sums
