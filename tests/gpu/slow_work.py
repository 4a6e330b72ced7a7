"""Work that keeps a stream busy for a known while, and random bytes to recognise."""

from __future__ import annotations

import torch

# About half a second on a GPU of 2 GHz: long against everything the host does meanwhile.
BUSY_CYCLES = 1_000_000_000

MIB = 1 << 20


def keep_busy(stream: torch.cuda.Stream, cycles: int = BUSY_CYCLES) -> None:
    """Queue a kernel that only spins."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    """Ordinary CPU memory that no other seed reproduces."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
