"""Settings of vLLM's server that a plan takes where nobody gives others."""

from __future__ import annotations

GPU_UTILIZATION = 0.9
"""vLLM's default for ``--gpu-memory-utilization``."""

MOST_RUNNING = 256
"""Of ``--max-num-seqs``: sequences that run at once."""

KV_BLOCK_TOKENS = 16
"""vLLM's default block of the KV cache."""
