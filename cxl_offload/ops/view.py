"""The one way of a torch tensor into a kernel: checked, then handed over as a plain view."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from cxl_offload import _C
from cxl_offload.memory.bounds import check_bounds

_Function = TypeVar("_Function", bound=Callable[..., Any])

_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", object)
"""What compiles the frames that Python runs now, or None; where torch cannot tell, never None."""


def untraced(function: _Function) -> _Function:
    """Marks a function that torch.compile runs as it is: while it traces, addresses of tensors mean
    nothing, and what is written through them is not seen.

    torch's own marks import the compiler, at once or in the first call, and take as long in every
    call as a small step; here only those pay that compile.
    """
    disabled = _disable_dynamo(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _compiler() is None else disabled(*args, **kwargs)

    with contextlib.suppress(AttributeError):  # without that an older torch warns
        frames = torch._C._dynamo.eval_frame
        skipped, ordinary = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skipped, ordinary)
        frames.set_code_exec_strategy(run.__code__, strategy)
    marked = functools.wraps(function)(run)
    marked._torchdynamo_disable = True  # type: ignore[attr-defined]  # a trace ends before it
    return cast("_Function", marked)


FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The types that kernels read and write, and their names there."""

READ_FLOATS = {
    **FLOATS,
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
"""Those and the types that some kernels read only."""

_Any = TypeVar("_Any")

_NAMES = {**READ_FLOATS, torch.int8: "int8", torch.uint8: "uint8"}

PLAIN = _C.PlainTensors(
    (torch.Tensor, torch.nn.Parameter),
    _NAMES,
    strided=torch.strided,
    table=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
)
"""Makes views of contiguous tensors of torch's own classes, and of nothing with an element that
:func:`tensor_view` would refuse."""


INCREMENT_VERSION: Callable[[list[torch.Tensor]], object] = cast("Any", torch._C)._increment_version
"""Tells autograd that tensors were written; fails for those made for inference."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    # What it holds: to_local() of a parameter makes an alias, and memory given to that is lost.
    held = getattr(tensor, "_local_tensor", None)
    if held is None:
        with torch.no_grad():
            held = tensor.to_local()
    local: torch.Tensor = held
    return local


def as_of_now(tensor: _Any) -> _Any:
    """The same tensor, which keeps its memory, shape and type whatever another thread does.

    A kernel runs without Python's lock: memory that only the tensor held would be freed under it
    when another thread gives the tensor other memory (``weight.data = new``). What is no tensor is
    returned as it is.
    """
    return cast("_Any", tensor.data) if isinstance(tensor, torch.Tensor) else tensor


def tensor_view(
    tensor: torch.Tensor,
    name: str,
    *,
    dtypes: Collection[torch.dtype] = tuple(FLOATS),
    strided: bool = False,
) -> _C.TensorView:
    """What a kernel may do with ``tensor``, or an error that says why not.

    Parameters
    ----------
    tensor
        Contiguous, in host memory, with storage of its own type. The view does not keep it alive.
    name
        What the caller calls it, for messages.
    dtypes
        The types that the kernel takes here.
    strided
        Whether the kernel takes any strides; it then checks those that it cannot.

    Raises
    ------
    TypeError
        Not a tensor, or a subclass whose bytes are not its values (a distributed, fake or
        functional tensor).
    ValueError
        Another device, layout or dtype, not contiguous, or with less memory than it says.
    """
    plain = PLAIN.view(tensor)
    if plain is not None and tensor.dtype in dtypes:
        return plain
    if type(tensor) is not torch.Tensor:
        check_class(tensor, name)
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; this kernel works on CPU tensors")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; pass a dense tensor")
    dtype = tensor.dtype
    if dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {dtype}; this kernel takes {known}")
    if tensor.is_neg():
        raise ValueError(f"{name} is a negated view; pass {name}.resolve_neg()")
    if not (strided or tensor.is_contiguous()):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; it is never copied behind your back: pass a contiguous tensor"
        )
    if torch._is_functional_tensor(tensor):
        raise TypeError(f"{name} is a functional tensor, whose memory is not its own")
    check_bounds(tensor, name)
    return _C.TensorView(tensor.data_ptr(), _NAMES[dtype], tensor.shape, tensor.stride())


def has_plain_rows(tensor: torch.Tensor, width: int) -> bool:
    """Whether a kernel may take ``tensor`` by its address alone, as contiguous rows of ``width``.

    Says no wherever :func:`tensor_view` would refuse, and where there is no element. It takes about
    a microsecond, which counts where a model calls a hundred layers a token.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in FLOATS
        and tensor.shape[-1:] == (width,)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._is_functional_tensor(tensor)
        and 0 < tensor.numel() <= _held_elements(tensor)
        and tensor.data_ptr() != 0
    )


def _held_elements(tensor: torch.Tensor) -> int:
    """How many elements the storage has from the tensor's first one on."""
    held = int(tensor.untyped_storage().nbytes())
    return held // tensor.element_size() - int(tensor.storage_offset())


def check_class(tensor: object, name: str) -> None:
    """Refuses what is no tensor, or one whose bytes are not its values (TypeError)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; pass a torch.Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, whose bytes are not its values; "
            "pass the tensor inside it, e.g. to_local()"
        )


def is_recording() -> bool:
    """Whether torch records operators (``torch.jit.trace``, ``make_fx``), which kernels are not."""
    return torch._C._is_tracing() or (
        torch._C._len_torch_dispatch_stack() > 0
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def refuse_recording(function: str) -> None:
    """Refuses to compute while torch records operators, which would not see a kernel's work.

    Raises
    ------
    RuntimeError
        Under ``torch.jit.trace`` or ``make_fx``; the message names the operator to call instead, if
        there is one.
    """
    if not is_recording():
        return
    instead = "compute it by torch's operators there"
    if function in _OPERATOR_MODULES:
        instead = (
            f"call torch.ops.cxl_offload.{function} instead, which "
            f"cxl_offload.ops.{_OPERATOR_MODULES[function]} registers"
        )
    raise RuntimeError(
        f"{function}: torch records operators here (jit.trace, make_fx), and this call would "
        f"be missing; {instead}"
    )


def refuse_derivatives(function: str, *tensors: object) -> None:
    """Refuses arguments whose derivative is wanted, backward or forward.

    Raises
    ------
    ValueError
        Names the function.
    """
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not (backward or forward):
        return
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        if backward and tensor.requires_grad:
            raise ValueError(f"{function} has no derivative; call it under torch.no_grad()")
        if forward and _tangent_of(tensor) is not None:
            raise ValueError(f"{function} has no forward derivative; call it on primal values")


def _tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    dual = cast("Any", forward_ad).unpack_dual(tensor)
    return cast("torch.Tensor | None", dual.tangent)


_OPERATOR_MODULES = {"linear": "linear_op", "decode_attention": "attention_op"}


def check_devices(function: str, first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Refuses arguments of an operator that are on several devices, meta among them.

    Raises
    ------
    ValueError
        Names both devices.
    """
    for other in others:
        if other is not None and other.device != first.device:
            raise ValueError(
                f"{function}: arguments on {first.device} and on {other.device}; all of them "
                "must be on one device"
            )


def touching(tensors: Iterable[torch.Tensor]) -> Callable[[], object]:
    """A built-in function that tells autograd that these tensors were written.

    In-place operators of torch do the same. Signals are not checked meanwhile.
    """
    written = [tensor for tensor in tensors if not tensor.is_inference()]
    return functools.partial(INCREMENT_VERSION, written)


def touch(*tensors: torch.Tensor) -> None:
    """Tells autograd that a kernel wrote these tensors."""
    touching(tensors)()
