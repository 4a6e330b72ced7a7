"""Moving bytes between host tiers and the GPU."""

from cxl_offload.transfer.blocks import BlockCopier, cuda_kernels_path

__all__ = ["BlockCopier", "cuda_kernels_path"]
