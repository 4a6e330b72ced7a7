"""The tokens that a model answers prompts with, the likeliest each time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of one batch, and what ends their answers.

    Attributes
    ----------
    inputs
        Token ids and their mask, int64 ``(rows, length)``, the rows padded on the left.
    pad
        Token that fills rows that have ended; None: what the model says.
    stop
        Token that ends a row, besides those of the model; None: these alone.
    """

    inputs: Mapping[str, torch.Tensor]
    pad: int | None
    stop: int | None = None

    def answered_by(
        self, model: PreTrainedModel, tokens: int, *watched_by: StoppingCriteria
    ) -> torch.Tensor:
        """Prompts and answers of up to so many tokens; int64 ``(rows, length)``."""
        options = {} if self.stop is None else {"eos_token_id": [*_ends(model), self.stop]}
        made = model.generate(
            **{name: given.to(model.device) for name, given in self.inputs.items()},
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=self.pad,
            stopping_criteria=StoppingCriteriaList(watched_by),
            **options,
        )
        return made  # type: ignore[no-any-return]


def _ends(model: PreTrainedModel) -> list[int]:
    """Tokens that end a row of this model."""
    own = model.generation_config.eos_token_id
    if own is None:
        return []
    return [own] if isinstance(own, int) else list(own)
