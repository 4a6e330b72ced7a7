"""What a run did: tokens, measured speed, and every byte requested against granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flexgen.opt_config import OptConfig

from cxl_offload.integrations.flexgen.places import Role
from cxl_offload.integrations.flexgen.shares import ShareRow
from cxl_offload.integrations.flexgen.store import Part, RoleUse
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import Machine

__all__ = ["BYPASSES", "FlexGenReport", "PlacementRow", "placement_rows"]

BYPASSES = (
    "transposed copies of K and V, scores and masks inside CPU attention: PyTorch's own memory",
    "one weight at a time while it is read from its file: numpy's own memory",
    "compressed tensors while they are packed or unpacked on the accelerator: PyTorch's own memory",
)
"""Host memory of a run that no policy places."""


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """Bytes of one part of one role.

    Attributes
    ----------
    role, part
        What for, and which part of a split (``host`` when it is not split).
    policy
        In words, as asked.
    requested_bytes
        At the moment there were most of them.
    granted
        Node to bytes at that moment, read from the pages.
    tiers
        The same by tier name; nodes outside every tier are left out.
    """

    role: Role
    part: str
    policy: str
    requested_bytes: int
    granted: dict[int, int]
    tiers: dict[str, int]


def placement_rows(
    use: Mapping[tuple[Role, str], RoleUse],
    parts: Mapping[Role, tuple[Part, ...]],
    machine: Machine,
) -> tuple[PlacementRow, ...]:
    """What a store counted, with the policy asked for and the machine's tiers beside it."""
    rows: list[PlacementRow] = []
    for (role, name), bytes_held in use.items():
        tiers: dict[str, int] = {}
        for node, nbytes in bytes_held.granted.items():
            tier = machine.tier_of(node)
            if tier is not None:
                tiers[tier.name] = tiers.get(tier.name, 0) + nbytes
        policy = next(part.policy for part in parts[role] if part.name == name)
        granted = dict(bytes_held.granted)
        rows.append(PlacementRow(role, name, str(policy), bytes_held.peak_bytes, granted, tiers))
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexGenReport:
    """Result of :func:`cxl_offload.integrations.flexgen.run`.

    Attributes
    ----------
    tokens
        int32 ``(rows, prompt_len + gen_len)``, prompts included.
    answers
        Text of the generated tokens of every row; empty when the request gave token ids.
    accelerator
        ``cuda`` or ``host``; with ``host`` every figure is of a CPU in a GPU's place.
    machine, simulated_placement
        Whose nodes the placement names, and whether they are simulated.
    config, parameters
        Of the model.
    prompt_len, generated_tokens
        Tokens of every prompt and, over all rows, tokens computed.
    load_seconds, prefill_seconds, decode_seconds
        Measured; decode is projected when ``projected``.
    shares
        Requested against realised percentages.
    placement
        Host memory of every role.
    outside
        Bytes of weights and KV cache whose home is the accelerator or the disk, by home and role.
    trace
        Events for replay; empty when the request did not record.
    notes
        What the reader of these figures should know besides.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    answers: tuple[str, ...]
    accelerator: Literal["cuda", "host"]
    machine: str
    simulated_placement: bool
    config: OptConfig
    parameters: int
    prompt_len: int
    gen_len: int
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    projected: bool
    shares: tuple[ShareRow, ...]
    placement: tuple[PlacementRow, ...]
    outside: Mapping[str, Mapping[Role, int]]
    trace: Trace
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.config.name)

    @property
    def rows(self) -> int:
        """Sequences generated together."""
        return int(self.tokens.shape[0])

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second, measured."""
        return self.rows * self.prompt_len / max(self.prefill_seconds, 1e-12)

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens a second after the first of every row, measured."""
        return self.rows * (self.gen_len - 1) / max(self.decode_seconds, 1e-12)

    @property
    def tokens_per_s(self) -> float:
        """All generated tokens over prefill and decode, measured."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.rows * self.gen_len / max(seconds, 1e-12)

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace, as plain data."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "accelerator": self.accelerator,
            "machine": self.machine,
            "simulated_placement": self.simulated_placement,
            "rows": self.rows,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "tokens": self.tokens.tolist(),
            "answers": list(self.answers),
            "measured": {
                "load_s": self.load_seconds,
                "prefill_s": self.prefill_seconds,
                "decode_s": self.decode_seconds,
                "decode_projected": self.projected,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "tokens_per_s": self.tokens_per_s,
            },
            "shares": [
                {
                    "kind": row.kind,
                    "home": row.home,
                    "requested_percent": row.requested_percent,
                    "realised_percent": row.realised_percent,
                }
                for row in self.shares
            ],
            "placement": [
                {
                    "role": row.role,
                    "part": row.part,
                    "policy": row.policy,
                    "requested_bytes": row.requested_bytes,
                    "granted_bytes_per_node": {str(n): b for n, b in row.granted.items()},
                    "granted_bytes_per_tier": dict(row.tiers),
                }
                for row in self.placement
            ],
            "outside": {home: dict(roles) for home, roles in self.outside.items()},
            "notes": list(self.notes),
        }
