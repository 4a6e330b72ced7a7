"""What every generation reports: tokens, measured speed, and where the bytes were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cxl_offload.objects.load_parts import LoadPart
from cxl_offload.objects.placement_rows import PlacementRow

_SHORTEST_S = 1e-12
"""A phase that took no measurable time still has a finite rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Tokens, measured seconds, and every byte requested against granted.

    Attributes
    ----------
    model, parameters
        Name, and elements of all weights.
    machine, simulated_placement
        Whose nodes the placement names, and whether they are simulated.
    tokens
        Integers ``(rows, prompt_len + gen_len)``, prompts included.
    answers
        Text of the generated tokens of every row; empty when the request gave token ids.
    prompt_len, gen_len
        Tokens of every prompt, and tokens generated for every row.
    load_seconds, prefill_seconds, decode_seconds
        Measured.
    load_parts
        What the load was made of, measured too: memory, reading, and the rest.
    placement
        Host memory of every kind that has a policy, at its peak.
    """

    model: str
    parameters: int
    machine: str
    simulated_placement: bool
    tokens: Any
    answers: tuple[str, ...]
    prompt_len: int
    gen_len: int
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    placement: tuple[PlacementRow, ...]
    load_parts: tuple[LoadPart, ...] = ()

    @property
    def rows(self) -> int:
        """Sequences generated together."""
        return int(self.tokens.shape[0])

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second, measured."""
        return self.rows * self.prompt_len / max(self.prefill_seconds, _SHORTEST_S)

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens a second after the first of every row, measured; 0 without such."""
        return self.rows * (self.gen_len - 1) / max(self.decode_seconds, _SHORTEST_S)

    @property
    def tokens_per_s(self) -> float:
        """All generated tokens over prefill and decode, measured."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.rows * self.gen_len / max(seconds, _SHORTEST_S)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for ``json.dumps``."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "machine": self.machine,
            "simulated_placement": self.simulated_placement,
            "rows": self.rows,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "tokens": self.tokens.tolist(),
            "answers": list(self.answers),
            "measured": {
                "load_s": self.load_seconds,
                "load_parts": [part.to_json() for part in self.load_parts],
                "prefill_s": self.prefill_seconds,
                "decode_s": self.decode_seconds,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "tokens_per_s": self.tokens_per_s,
            },
            "placement": [row.to_json() for row in self.placement],
        }
