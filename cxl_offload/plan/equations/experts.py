"""How many experts of a mixture some tokens ask for."""

from __future__ import annotations


def asked_share(met: float, tokens: float) -> float:
    """Share of the experts that ``tokens`` tokens ask for together, in the mean.

    ``met`` is the share that one token asks for. As if every token chose by itself and no expert
    were liked more: any other way asks for fewer, so this charges the most.
    """
    return float(1.0 - (1.0 - met) ** tokens)
