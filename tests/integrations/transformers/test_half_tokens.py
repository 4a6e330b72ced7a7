"""Tokens in half precision: those of stock, wherever they do not hang on how it rounds.

Stock's eager and sdpa attention round differently, and so does the kernel. Two roundings may agree
where a third one does not, since tokens are chosen by logits of 8 or 11 bits that are often nearly
equal. So rows are left out in which stock's own implementations disagree, or would if they erred
twice as much as they differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import FAMILIES, ONLY_EAGER, generate, make, prompts

ROWS = 96
LEAST_ROWS = {torch.bfloat16: 15, torch.float16: 65}
"""Rows that have to be left; float16 has eight times the precision of bfloat16."""

GIVEN: dict[str, Any] = {**prompts(ROWS), "max_new_tokens": 6}


@dataclass
class Made:
    """Tokens of every row, and the scores that they were chosen by, of every step."""

    tokens: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def by(cls, model: PreTrainedModel, attention: str) -> Made:
        asked = {"output_scores": True, "return_dict_in_generate": True}
        made = generate(model, attention, **GIVEN, **asked)
        return cls(made.sequences, torch.stack(made.scores, dim=1).float())

    def margins(self) -> torch.Tensor:
        best = self.scores.topk(2, dim=-1).values
        return best[..., 0] - best[..., 1]


def decided(stock: list[Made]) -> torch.Tensor:
    """Rows whose tokens are the same by all, by more than twice what their scores differ by."""
    first, *others = stock
    same = torch.stack([(each.tokens == first.tokens).all(dim=1) for each in others]).all(dim=0)
    margins = torch.stack([each.margins() for each in stock]).amin(dim=0)
    gaps = [(each.scores - first.scores).abs().amax(dim=-1) for each in others]
    return same & (margins > 2 * torch.stack(gaps).amax(dim=0)).all(dim=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", LEAST_ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_half_precision_are_those_that_stocks_attentions_agree_on(
    family: str, dtype: torch.dtype, session: Session
) -> None:
    model = make(family, dtype)
    fine = Made.by(copy.deepcopy(model).float(), "eager")
    owns = ["eager"] if family in ONLY_EAGER else ["eager", "sdpa"]
    halves = [Made.by(model, own) for own in owns]
    clear = decided([fine, *halves])
    with offload(model, {"kv": "bind:2"}, session=session) as done:
        tokens = generate(model, **GIVEN)
    assert done.calls.kernel == 5 * model.config.num_hidden_layers
    assert not done.calls.own
    assert clear.sum() >= LEAST_ROWS[dtype]
    assert torch.equal(tokens[clear], fine.tokens[clear])
    as_fine = [int((each == fine.tokens).all(dim=1).sum()) for each in (tokens, halves[0].tokens)]
    assert as_fine[0] >= 0.9 * as_fine[1]  # of all rows


def test_damaged_states_change_tokens_that_are_clear(session: Session) -> None:
    """Or the comparison above would leave out every row that could differ."""
    model = make("llama", torch.bfloat16)
    fine = Made.by(copy.deepcopy(model).float(), "eager")
    clear = decided([fine, *(Made.by(model, own) for own in ("eager", "sdpa"))])
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.layers[1].self_attn.v_proj.weight[:16] *= -1
    with offload(damaged, {"kv": "bind:2"}, session=session):
        tokens = generate(damaged, **GIVEN)
    changed = (tokens[clear] != fine.tokens[clear]).any(dim=1)
    assert changed.sum() > clear.sum() / 2
