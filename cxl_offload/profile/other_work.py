"""Other work on the CPUs while they were measured: how a profile says so, and of which paths."""

from __future__ import annotations

from cxl_offload.profile.model import PathProfile, Profile

OTHER_WORK = "other work was using the CPUs"
"""Begins the note of a path of whose windows some were not clean."""


def disturbed_paths(profile: Profile) -> tuple[PathProfile, ...]:
    """Those of which a note says so."""
    return tuple(
        path for path in profile.paths if any(note.startswith(OTHER_WORK) for note in path.notes)
    )
