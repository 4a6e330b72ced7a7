"""Moving bytes between host tiers and the GPU."""

from cxl_offload.renamed import old_names
from cxl_offload.transfer.blocks import BlockCopier, cuda_kernels_path, measure_kernel_limit
from cxl_offload.transfer.engine import (
    NO_NODE,
    CopyEngine,
    CopyHandle,
    Transfer,
    prefetched,
)
from cxl_offload.transfer.host import (
    CopyRule,
    HostCopier,
    cpus_near,
    load_rules,
    measure_rules,
    save_rules,
)
from cxl_offload.transfer.link_counts import CopyLink, LinkUse, link_counts
from cxl_offload.transfer.packing import BlockPacker, PackedFormat, pack, unpack

__all__ = [
    "NO_NODE",
    "BlockCopier",
    "BlockPacker",
    "CopyEngine",
    "CopyHandle",
    "CopyLink",
    "CopyRule",
    "HostCopier",
    "LinkUse",
    "PackedFormat",
    "Transfer",
    "cpus_near",
    "cuda_kernels_path",
    "link_counts",
    "load_rules",
    "measure_kernel_limit",
    "measure_rules",
    "pack",
    "prefetched",
    "save_rules",
    "unpack",
]


__getattr__ = old_names(__name__)
