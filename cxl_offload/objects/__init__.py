"""Tensors by name, as a program uses them: how often each is read and written.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.objects.recording import Recording, record

__all__ = ["Recording", "record"]

__getattr__, __dir__ = lazy_names(__name__, {"recording": __all__})
