"""Moving bytes between host tiers and the GPU."""

from cxl_offload.transfer.blocks import BlockCopier, cuda_kernels_path
from cxl_offload.transfer.packing import BlockPacker, PackedFormat, pack, unpack

__all__ = [
    "BlockCopier",
    "BlockPacker",
    "PackedFormat",
    "cuda_kernels_path",
    "pack",
    "unpack",
]
