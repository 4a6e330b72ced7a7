"""Settings of an update: named where they are no numbers, or none that float32 can hold.

The core looks at ranges that do not depend on this, such as that of a beta.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = (2 - 2**-23) * 2.0**127
_LEAST = 2.0**-149
"""Of float32, in which steps are computed."""


def number(settings: Mapping[str, Any], name: str) -> float:
    """The number of a setting, also one in a tensor.

    Raises
    ------
    TypeError, ValueError
        It is no number, is missing, or is larger than float32 can hold; in one line with its name.
        A number that is not finite is left to the core, which knows the ranges.
    """
    _check_there(settings, name)
    return _held(name, settings[name])


def flag(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a setting is on: true or false, or 1 or 0 for them.

    Raises
    ------
    TypeError, ValueError
        It is none of these, or is missing.
    """
    _check_there(settings, name)
    given = settings[name]
    if given is True or given is False:
        return given
    if isinstance(given, str | bytes) or given is None or given not in (0, 1):
        raise _not(name, given, "true or false")
    return bool(given)


def betas(settings: Mapping[str, Any]) -> tuple[float, float]:
    """The two numbers of ``betas``.

    Raises
    ------
    TypeError, ValueError
        As :func:`number`, or they are not two.
    """
    _check_there(settings, "betas")
    given = settings["betas"]
    try:
        first, second = given
    except (TypeError, ValueError):
        raise _not("betas", given, "two numbers, such as (0.9, 0.999)") from None
    return _held("beta1", first), _held("beta2", second)


def divisor_part(settings: Mapping[str, Any]) -> float:
    """``eps``: as :func:`number`, and nothing that float32 rounds to 0, which would divide by it.

    Raises
    ------
    TypeError, ValueError
        As :func:`number`.
    """
    eps = number(settings, "eps")
    if 0 < eps <= _LEAST / 2:
        raise ValueError(
            f"update: eps is {eps:g}; float32 rounds it to 0: give 0, or 1e-38 or more"
        )
    return eps


def check_held(what: str, value: float) -> None:
    """Refuses a constant of a step that float32 cannot hold.

    Parameters
    ----------
    what
        The settings that it is made of, for the message.

    Raises
    ------
    ValueError
        Parameters would become infinite.
    """
    if math.isfinite(value) and abs(value) > _LARGEST:
        raise ValueError(
            f"update: {what} is {value:g}; steps are computed in float32, which holds up to "
            f"{_LARGEST:.4g}"
        )


def _check_there(settings: Mapping[str, Any], name: str) -> None:
    if name not in settings:
        raise ValueError(f"update: {name} is missing; put it back into the group of parameters")


def _held(name: str, given: Any) -> float:
    if type(given) is float and -_LARGEST <= given <= _LARGEST:  # nearly always
        return given
    if isinstance(given, str | bytes):  # float() would read it
        raise _not(name, given, "a number")
    try:
        value = float(given)
    except OverflowError:  # a whole number beyond double
        value = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise _not(name, given, "a number") from None
    check_held(name, value)
    return value


def _not(name: str, given: Any, wanted: str) -> TypeError:
    shown = " ".join(repr(given).split())[:80]
    return TypeError(f"update: {name} is {shown}; it must be {wanted}")
