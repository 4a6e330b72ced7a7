"""What is said where a model does not fit: how much it needs, and how much there is."""

from __future__ import annotations

from collections.abc import Mapping

from cxl_offload.units import format_bytes


def rooms_in_words(rooms: Mapping[str, float]) -> str:
    """Usable bytes by home, as ``ldram 98 GiB, gpu 19.2 GiB``."""
    return ", ".join(f"{name} {format_bytes(room)}" for name, room in rooms.items())


def weights_lack_room(what: str, weight_bytes: float, rooms: Mapping[str, float]) -> str | None:
    """That no batch is small enough; None: the weights fit, and something else does not.

    Parameters
    ----------
    what
        The plan that was asked for, to begin the sentence with.
    """
    missing = weight_bytes - sum(rooms.values())
    if missing <= 0:
        return None
    return (
        f"{what}: the weights alone need {format_bytes(weight_bytes)}, {format_bytes(missing)} are "
        f"missing; usable are {rooms_in_words(rooms)}; no smaller batch helps, so take a smaller "
        "model, or more memory (--add plans with it)"
    )
