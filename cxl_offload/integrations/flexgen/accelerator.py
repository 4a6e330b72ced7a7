"""The accelerator: a CUDA GPU, or ordinary memory and the CPU standing in for one.

Both record what they compute. FlexGen's arithmetic is inherited; what is overridden is said why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from flexgen import pytorch_backend as backend
from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchTensor
from torch.nn import functional

from cxl_offload.integrations.flexgen.attention import CacheInPlace, attend_in_place
from cxl_offload.integrations.flexgen.devices import SharesHostMemory, TierTensor
from cxl_offload.integrations.flexgen.recorder import Recorder

HALF_BYTES = 2


class Accelerator(TorchDevice):  # type: ignore[misc]
    """A GPU of FlexGen that records its work.

    Parameters
    ----------
    name
        torch's name of the device.
    recorder
        Gets an event for every computation.
    activation
        ``relu`` as in OPT, which is what FlexGen computes, or ``gelu`` as in Galactica.
    """

    attends_everywhere = False
    """The CPU's attention computes over the accelerator's part of a cache, too."""

    def __init__(self, name: str, recorder: Recorder, *, activation: str = "relu") -> None:
        super().__init__(name)
        self._recorder = recorder
        self._activation = activation

    def opt_output_embed(
        self, inputs: TorchTensor, w_ln: Any, b_ln: Any, w_token: Any, *rest: Any
    ) -> TorchTensor:
        """Logits of every position (FlexGen keeps the last) and the next token."""
        rows, tokens, hidden = inputs.shape
        vocab = w_token.shape[0]
        result = super().opt_output_embed(inputs, w_ln, b_ln, w_token, *rest)
        elements = hidden * vocab + rows * tokens * (hidden + vocab)
        self._record(2.0 * rows * tokens * hidden * vocab, elements)
        return result

    def mha(self, inputs: TorchTensor, *rest: Any) -> Any:
        """Attention over the prompt."""
        rows, tokens, hidden = inputs.shape
        heads = rest[11]
        result = super().mha(inputs, *rest)
        scores = rows * heads * tokens * tokens
        flops = 8.0 * rows * tokens * hidden**2 + 4.0 * rows * tokens**2 * hidden
        self._record(flops, 4 * hidden**2 + 8 * rows * tokens * hidden + 4 * scores)
        return result

    def mha_gen(self, inputs: TorchTensor, *rest: Any) -> Any:
        """Attention of one new token, over a cache on the accelerator, the host, or both."""
        rows, _, hidden = inputs.shape
        attended = rest[0].shape[1]
        k_cache, v_cache = rest[12], rest[13]
        result = super().mha_gen(inputs, *rest)
        projections = 8.0 * rows * hidden**2
        on_host = self._record_host_attention(k_cache, v_cache, attended, rows, hidden)
        here = rows - on_host
        flops = projections + 4.0 * here * hidden * attended
        self._record(flops, 4 * hidden**2 + 2 * here * attended * hidden + 8 * rows * hidden)
        return result

    def _mixed_device_attention(
        self,
        q: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        mask: torch.Tensor,
        *sizes: int,
    ) -> torch.Tensor:
        """Attention over a cache in several places; ``sizes`` end with heads and their width."""
        if isinstance(k_cache, CacheInPlace):
            return attend_in_place(
                q,
                (k_cache, v_cache),
                (k_new, v_new),
                mask,
                heads=sizes[-2],
                on_accelerator=None if self.attends_everywhere else self._attention_value,
            )
        value: torch.Tensor = super()._mixed_device_attention(
            q, k_cache, v_cache, k_new, v_new, mask, *sizes
        )
        return value

    def mlp(
        self,
        inputs: TorchTensor,
        wi: Any,
        bi: Any,
        wo: Any,
        bo: Any,
        w_ln: Any,
        b_ln: Any,
        donate: Sequence[bool],
    ) -> TorchTensor:
        """The two linear layers; FlexGen's own always has a ReLU between them."""
        rows, tokens, hidden = inputs.shape
        if self._activation == "relu":
            result = super().mlp(inputs, wi, bi, wo, bo, w_ln, b_ln, donate)
        else:
            result = self._gelu_mlp(inputs, wi, bi, wo, bo, w_ln, b_ln, donate)
        elements = 8 * hidden**2 + 10 * rows * tokens * hidden
        self._record(16.0 * rows * tokens * hidden**2, elements)
        return result

    def _gelu_mlp(
        self,
        inputs: TorchTensor,
        wi: Any,
        bi: Any,
        wo: Any,
        bo: Any,
        w_ln: Any,
        b_ln: Any,
        donate: Sequence[bool],
    ) -> TorchTensor:
        if wi.device.device_type == DeviceType.COMPRESSED:
            wi, wo = wi.device.decompress(wi), wo.device.decompress(wo)
        width = inputs.shape[-1]
        normed = functional.layer_norm(inputs.data, (width,), weight=w_ln.data, bias=b_ln.data)
        inner = functional.gelu(backend.F.linear(normed, wi.data, bias=bi.data))
        out = backend.F.linear(inner, wo.data, bias=bo.data)
        out.add_(inputs.data)
        if donate[0]:
            inputs.delete()
        return TorchTensor.create_from_torch(out, self)

    def _record(self, flops: float, elements: int) -> None:
        self._recorder.computed("gpu", flops=flops, accelerator_bytes=HALF_BYTES * int(elements))

    def _record_host_attention(
        self, k_cache: Any, v_cache: Any, attended: int, rows: int, hidden: int
    ) -> int:
        """Record the CPU's part of attention; returns how many rows that was."""
        reads, writes = host_cache_views(k_cache, v_cache, attended)
        if not reads:
            return 0
        on_host, in_place = rows, isinstance(k_cache, CacheInPlace)
        if isinstance(k_cache, tuple):
            on_host -= int(k_cache[0].shape[1] * rows // k_cache[1].shape[1])
        elif in_place:
            every = sum(piece.shape[1] for piece in k_cache.pieces)
            on_host = rows * k_cache.host_columns // every
        row_elements = on_host * hidden
        with self._recorder.on("compute"):
            # Query, key and value of the new token; then the result. All in half precision, but
            # for query and result of FlexGen's own way, which are in single.
            query = HALF_BYTES if in_place else 4
            kind = "kv" if in_place else "workspace"
            self._recorder.buffered("d2h", (query + 2 * HALF_BYTES) * row_elements, into=True)
            flops = 4.0 * row_elements * attended
            self._recorder.computed("cpu", flops=flops, read=reads, write=writes, kind=kind)
            self._recorder.buffered("h2d", query * row_elements, into=False)
        return on_host


def host_cache_views(
    k_cache: Any, v_cache: Any, attended: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What CPU attention reads and writes of the host's memory; empty when the GPU computes.

    A compressed cache is decompressed whole into the workspace, whatever of it is attended to.
    """
    if isinstance(k_cache, CacheInPlace) and k_cache.loaded:
        return (), ()
    if isinstance(k_cache, CacheInPlace):
        return (*k_cache.host_views(attended), *v_cache.host_views(attended)), ()
    if isinstance(k_cache, tuple):  # (accelerator's part, workspace with the rest)
        first = k_cache[0].shape[1]
        views = tuple(each[1].data[:attended, first:] for each in (k_cache, v_cache))
        return views, ()
    device = k_cache.device
    if device.device_type == DeviceType.CPU:
        return (k_cache.data[:attended], v_cache.data[:attended]), ()
    is_compressed = device.device_type == DeviceType.COMPRESSED
    if is_compressed and device.base_device.device_type == DeviceType.CPU:
        packed = tuple(part.data for each in (k_cache, v_cache) for part in each.data[:2])
        workspace = tuple(device.data_decompress_workspace)
        attended_part = tuple(each[:attended] for each in workspace)
        return packed + attended_part, workspace
    return (), ()


class _Resident(torch.Tensor):
    """A result that is where the accelerator computes: ``cuda()`` has nothing to move."""

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class HostAccelerator(Accelerator, SharesHostMemory):
    """Ordinary memory and the CPU in the accelerator's place, for machines without a GPU.

    To FlexGen it is a CUDA device, so it loads and stores as for a GPU, and that is what is
    recorded. What it loads from host memory is read where it lies instead, since both are the same
    memory; without ``loads_nothing`` it is copied. Attention over the cache sums in single
    precision wherever the cache is, so that a sequence gives the same tokens in every tier.
    """

    def __init__(
        self, recorder: Recorder, *, activation: str = "relu", loads_nothing: bool = True
    ) -> None:
        super().__init__("cpu", recorder, activation=activation)
        self.loads_nothing = self.attends_everywhere = loads_nothing
        self.name = "host memory and CPU as accelerator"
        self.device_type = DeviceType.CUDA

    def view_of(self, tensor: TierTensor, indices: Any) -> TorchTensor:
        """What would be loaded; recorded, and not copied."""
        data = tensor.data if indices is None else tensor.data[tuple(indices)]
        self.loaded(data)
        view = TorchTensor.create_from_torch(data, self)
        view.home = tensor  # counted as long as the view is read
        return view

    def loaded(self, data: torch.Tensor) -> None:
        """Record host memory that a GPU would load."""
        self._recorder.copied("h2d", source=data, accelerator_bytes=data.numel() * data.itemsize)

    def gathered(self, data: torch.Tensor) -> None:
        """Record memory of the accelerator that it would copy to where the loaded rest is."""
        self._recorder.copied("gpu", accelerator_bytes=2 * data.numel() * data.itemsize)

    def _attention_value(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        value: torch.Tensor = super()._attention_value(q.float(), k.float(), v.float(), *rest)
        return value.as_subclass(_Resident)

    def _mixed_device_attention(
        self,
        q: torch.Tensor,
        k_cache: Any,
        v_cache: Any,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        mask: torch.Tensor,
        *sizes: int,
    ) -> torch.Tensor:
        here = mask if isinstance(k_cache, CacheInPlace) else mask.as_subclass(_Resident)
        value = super()._mixed_device_attention(q, k_cache, v_cache, k_new, v_new, here, *sizes)
        return value.half().as_subclass(torch.Tensor)

    def synchronize(self) -> None:
        """Nothing to wait for: the CPU's work is done when it returns."""
