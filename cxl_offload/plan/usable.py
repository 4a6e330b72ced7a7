"""What a plan leaves alone where nobody says otherwise: shares of memory, and small gains."""

from __future__ import annotations

GPU_USABLE = 0.8
"""Share of GPU memory to plan with: FlexGen's alpha_g (experimental/cost_model.py)."""

HOST_USABLE = 0.95
"""Share of host and drive capacity to plan with; the rest is left to the system, the framework's
own buffers and page tables. Assumed."""

CXL_MARGIN = 0.03
"""Gain below which a slower tier is left alone: equations are not exact to less, and published
hierarchies that differ by 3 % count as equal (Wang et al., Performance Characterization, LIO 1)."""
