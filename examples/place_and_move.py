"""Tensors where a policy says, asked from their pages, and one that moves while it is in use.

On the simulated nodes of a published server. On a machine with CXL memory leave out the ``with``.
"""

from __future__ import annotations

import torch

import cxl_offload
from cxl_offload import Session, load_machine, use
from cxl_offload.units import format_bytes

MIB = 1 << 20


def main() -> None:
    with use(Session.simulated(load_machine("epyc9354-cxl-a"))):
        weights = cxl_offload.zeros(16 * MIB, dtype=torch.uint8, policy="cxl")
        kv = cxl_offload.zeros(24 * MIB, dtype=torch.uint8, policy="weighted:ldram=2,cxl=1@64KiB")
        for name, tensor in (("weights", weights), ("kv", kv)):
            print(f"{name}: {cxl_offload.placement_of(tensor)}")

        view = weights[: 4 * MIB].view(1024, -1)  # a view follows its tensor
        weights.fill_(7)
        address = weights.data_ptr()
        cxl_offload.move(weights, "ldram")
        print(f"moved: {cxl_offload.placement_of(view)}")
        assert weights.data_ptr() == address
        assert int(view.sum()) == 7 * view.numel()

        for name, tier in cxl_offload.stats().tiers.items():
            held, most = format_bytes(tier.current_bytes), format_bytes(tier.peak_bytes)
            print(f"tier {name}: {held} held, {most} at most")


if __name__ == "__main__":
    main()
