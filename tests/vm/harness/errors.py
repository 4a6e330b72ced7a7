"""What can go wrong outside the tests themselves."""

from __future__ import annotations

__all__ = ["HarnessError"]


class HarnessError(Exception):
    """The machine could not be built or booted: one line with what is missing."""
