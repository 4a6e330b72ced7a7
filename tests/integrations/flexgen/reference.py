"""What transformers generates: the oracle for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import OPTForCausalLM


@dataclass(frozen=True)
class Reference:
    """Tokens, prompts included, and by how much the likeliest token led the next at least."""

    tokens: np.ndarray[Any, Any]
    smallest_lead: float


def generate_with_transformers(
    folder: Path, prompts: Sequence[Sequence[int]], *, new_tokens: int
) -> Reference:
    model = OPTForCausalLM.from_pretrained(
        str(folder), dtype=torch.float16, local_files_only=True
    ).eval()
    rows = torch.tensor(prompts)
    made = model.generate(
        input_ids=rows,
        attention_mask=(rows != 1).long(),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(made.logits, 1).float().topk(2, dim=-1).values
    lead = float((best[..., 0] - best[..., 1]).min())
    return Reference(made.sequences.numpy(), lead)
