"""Blocks that outlive the process that made them: a file with checksums, for KV caches.

A store is one file of its user on a tmpfs, a DAX mount or any file system, or lies on a Device-DAX
device: a header that says what the blocks are blocks of, an index, and the blocks. Nothing in it is
believed without a checksum, so that a process that was killed, or a machine that lost power, costs
blocks and never gives wrong ones.
"""

from cxl_offload.kept.blocks import KeptBlocks
from cxl_offload.kept.device import KeptDevice, find_device, is_device
from cxl_offload.kept.folder import (
    KeptFile,
    VerifiedFile,
    drop_kept,
    find_kept,
    find_kept_devices,
    kept_folder,
    kept_path,
    look_at,
    takes_policy,
    verify_kept,
    why_not_placed,
)
from cxl_offload.kept.layout import KeptEntry, KeptLayout
from cxl_offload.kept.model_files import model_facts
from cxl_offload.kept.opening import WrittenByAnotherError, open_or_read
from cxl_offload.kept.placing import Placing
from cxl_offload.kept.reader import KeptReader
from cxl_offload.kept.store import KeptStore

__all__ = [
    "KeptBlocks",
    "KeptDevice",
    "KeptEntry",
    "KeptFile",
    "KeptLayout",
    "KeptReader",
    "KeptStore",
    "Placing",
    "VerifiedFile",
    "WrittenByAnotherError",
    "drop_kept",
    "find_device",
    "find_kept",
    "find_kept_devices",
    "is_device",
    "kept_folder",
    "kept_path",
    "look_at",
    "model_facts",
    "open_or_read",
    "takes_policy",
    "verify_kept",
    "why_not_placed",
]
