"""What a run did: tokens, measured speed, and every byte requested against granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flexgen.opt_config import OptConfig

from cxl_offload.integrations.flexgen.places import FlexGenKind
from cxl_offload.integrations.flexgen.shares import ShareRow
from cxl_offload.objects.placement_rows import PlacementRow
from cxl_offload.renamed import old_names
from cxl_offload.sim.trace import Trace

__getattr__ = old_names(__name__)

BYPASSES = (
    "transposed copies of K and V, scores and masks inside CPU attention: PyTorch's own memory",
    "one weight at a time while it is read from its file: numpy's own memory",
    "compressed tensors while they are packed or unpacked on the accelerator: PyTorch's own memory",
)
"""Host memory of a run that no policy places."""


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
        Host memory of every kind.
    outside
        Bytes of weights and KV cache whose home is the accelerator or the disk, by home and kind.
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
    outside: Mapping[str, Mapping[FlexGenKind, int]]
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
            "placement": [{"role": row.kind, **row.to_json()} for row in self.placement],
            "outside": {home: dict(kinds) for home, kinds in self.outside.items()},
            "notes": list(self.notes),
        }
