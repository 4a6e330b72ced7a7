"""How many experts of a mixture some tokens ask for."""

from __future__ import annotations


def asked_share(met: float, tokens: float) -> float:
    """Share of the experts that ``tokens`` tokens ask for together, in the mean.

    ``met`` is the share that one token asks for. As if every token chose by itself and no expert
    were liked more: any other way asks for fewer, so this charges the most.
    """
    return float(1.0 - (1.0 - met) ** tokens)


def leaves_an_expert(experts: int, per_token: int, tokens: float) -> bool:
    """Whether ``tokens`` tokens leave one of a layer's experts or more unasked, in the mean.

    Where they do not, waiting for the router saves less than the bytes of one expert, and all are
    copied to an accelerator ahead of their use; where they do, those that are asked for.
    """
    return experts * (1.0 - asked_share(per_token / experts, tokens)) >= 1.0
