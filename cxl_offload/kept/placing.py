"""The pages of a store on the nodes of a policy."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap

from cxl_offload.memory import Pages, Policy, Session

_logger = logging.getLogger(__name__)

_POPULATE_READ = 22
"""MADV_POPULATE_READ of linux/mman.h, which Python does not name."""


class Placing:
    """Gives the mapping of a store its pages, as a policy says.

    Parameters
    ----------
    policy
        None leaves them to the file system.
    """

    def __init__(self, session: Session, policy: Policy | None, pages: Pages) -> None:
        self.session, self.policy, self.pages = session, policy, pages

    def __call__(self, mapping: mmap.mmap, is_new: bool) -> None:
        assert self.policy is not None
        if not is_new:  # pages that are there are mapped sixteen at a time, and then looked at
            with contextlib.suppress(OSError):  # kernels before 5.14
                mapping.madvise(_POPULATE_READ)
        advice = mmap.MADV_HUGEPAGE if self.pages == "thp" else mmap.MADV_NOHUGEPAGE
        with contextlib.suppress(OSError):  # a kernel built without them has base pages only
            mapping.madvise(advice)
        nbytes = len(mapping)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        notes = self.session.place(
            address,
            nbytes,
            self.policy,
            part_bytes=nbytes,
            stride_bytes=nbytes,
            count=1,
            pages=self.pages,
        )
        for note in notes:
            _logger.warning("kept KV blocks: %s", note)
