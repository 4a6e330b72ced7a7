"""How policies of transformers say that a kind, or a share of its layers, is on the accelerator.

All of a kind: :data:`cxl_offload.plan.hardware.GPU` in place of a policy.
"""

from __future__ import annotations

import math

from cxl_offload.errors import ConfigError
from cxl_offload.plan.hardware import GPU

_SHARE = f"{GPU}:"


def shared_policy(share: float, rest: str) -> str:
    """The policy of a kind of which a share of the layers is on the accelerator.

    Parameters
    ----------
    share
        Between 0 and 1; six digits are kept.
    rest
        The policy of the other layers.
    """
    return f"{_SHARE}{share:.6g},{rest}"


def is_shared(policy: object) -> bool:
    """Whether a policy is of such a kind."""
    return isinstance(policy, str) and policy.startswith(_SHARE)


def parse_shared(policy: str) -> tuple[float, str]:
    """Share and rest of a policy that :func:`shared_policy` writes.

    Raises
    ------
    ConfigError
        The share is no number from 0 to 1, or the other layers have no policy.
    """
    text, _, rest = policy.removeprefix(_SHARE).partition(",")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(
            f"policy {policy}: {text!r} is no share of the layers; give a number from 0 to 1, such "
            f"as {_SHARE}0.25,cxl"
        )
    if not rest:
        raise ConfigError(
            f"policy {policy}: it does not say where the other layers lie; give "
            f"{_SHARE}{text},POLICY, or {GPU} for all layers"
        )
    return share, rest
