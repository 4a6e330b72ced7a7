"""Values that people give by name: ``NAME=VALUE``, each name once, and sizes such as ``64GiB``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from cxl_offload.errors import ConfigError
from cxl_offload.units import parse_bytes

T = TypeVar("T")


def pairs(
    option: str, texts: Iterable[str] | None, read: Callable[[str], T], *, form: str
) -> dict[str, T]:
    """What a repeatable option ``NAME=VALUE`` gives, each name once.

    Parameters
    ----------
    read
        Makes the value of its text; a ValueError refuses it.
    form
        What is expected, for messages: ``KIND=POLICY, such as kv=bind:cxl``.

    Raises
    ------
    ConfigError
        Names the option and its text.
    """
    found: dict[str, T] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {text}: expected {form}")
        if name in found:
            raise ConfigError(f"{option} {text}: {name} is given twice; each once")
        try:
            found[name] = read(value)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {error}; expected {form}") from None
    return found


def size(option: str, text: str) -> int:
    """Bytes of a size such as ``64GiB``.

    Raises
    ------
    ConfigError
        Names the option.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def limits(texts: Iterable[str] | None) -> dict[str, int]:
    """Tier to the most bytes of it, as every ``--limit TIER=SIZE`` says it.

    Raises
    ------
    ConfigError
        Names the option and its text.
    """
    form = "TIER=SIZE, such as cxl=64GiB"
    return pairs("--limit", texts, lambda text: size("--limit", text), form=form)
