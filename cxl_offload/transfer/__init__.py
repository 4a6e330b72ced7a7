"""Moving bytes between host tiers and the GPU."""

from cxl_offload.transfer.blocks import BlockCopier, cuda_kernels_path
from cxl_offload.transfer.host import (
    CopyRule,
    HostCopier,
    cpus_near,
    load_rules,
    measure_rules,
    save_rules,
)
from cxl_offload.transfer.packing import BlockPacker, PackedFormat, pack, unpack

__all__ = [
    "BlockCopier",
    "BlockPacker",
    "CopyRule",
    "HostCopier",
    "PackedFormat",
    "cpus_near",
    "cuda_kernels_path",
    "load_rules",
    "measure_rules",
    "pack",
    "save_rules",
    "unpack",
]
