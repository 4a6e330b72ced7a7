"""A model with its lengths, as FlexGen would run it, and the cuts of its weights to choose from.

Models other than OPT are grouped as FlexGen would group them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.plan.decoding.engine import STOCK, EngineRates, RowCosts
from cxl_offload.plan.flexgen.layout import (
    LEAST_SHARE,
    TensorSizes,
    WeightCut,
    WeightGroup,
    opt_groups,
    weight_cuts,
)
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.request import check_lengths
from cxl_offload.renamed import old_names

_LEAST_GAP = 3e-6
"""Percent of a group between two middles that can be cut between, far above the noise of sums."""


@dataclass(frozen=True, kw_only=True)
class FlexGenJob(TensorSizes):
    """One model with its prompt and answer lengths, as the planner needs it.

    ``params`` are those that a token meets (arithmetic).
    """

    params: float
    engine: EngineRates = STOCK

    @property
    def last_params(self) -> float:
        """None: FlexGen multiplies every token of a prompt by the head."""
        return 0.0

    @property
    def query_width(self) -> int:
        """OPT's heads are as wide as its layers together."""
        return self.width

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element between layers: half precision."""
        return 2.0

    @property
    def mean_kv_tokens(self) -> float:
        """Length of a sequence at a decode step, in the mean (FlexGen's cost model)."""
        return self.prompt + self.generated / 2

    def row_s(self, costs: RowCosts) -> float:
        """None beside what its calls take, which grow with their rows."""
        return 0.0

    def workspace_bytes(self, batches: int, gpu_batch: int) -> int:
        """Single-precision K and V that attention reads; none where it reads in place."""
        if not self.engine.workspace_bytes_per_element:
            return 0
        return self.workspace_tensors(batches) * self.workspace_tensor_bytes(gpu_batch)

    def levels(self) -> tuple[WeightCut, ...]:
        """The cuts to choose from, ascending, from nothing to everything.

        Those that would give a home less than ``LEAST_SHARE`` of the weights are left out, and
        those between middles that sums could mistake for each other.
        """
        total = self.weight_bytes
        nothing, *inner, everything = weight_cuts(self.groups)
        made = [nothing]
        for cut in inner:
            room = cut.high_percent - cut.low_percent > _LEAST_GAP
            enough = cut.bytes_below - made[-1].bytes_below >= LEAST_SHARE * total
            if room and enough and total - cut.bytes_below >= LEAST_SHARE * total:
                made.append(cut)
        return (*made, everything)


def _groups(model: ModelConfig) -> tuple[WeightGroup, ...]:
    if runs_in_flexgen(model) is not None:
        return _other_groups(model)
    return opt_groups(
        layers=model.layers, hidden=model.hidden, vocab=model.vocab, positions=model.positions
    )


def _other_groups(model: ModelConfig) -> tuple[WeightGroup, ...]:
    """Embeddings, one attention, one MLP (all experts) a layer, and the output."""
    first: list[tuple[int, ...]] = []
    last: list[tuple[int, ...]] = []
    attention: list[tuple[int, ...]] = []
    mlp: list[tuple[int, ...]] = []
    for tensor in model.tensors():
        if tensor.kind == "embedding":
            first.append(tensor.shape)
        elif tensor.count % model.layers or (tensor.count == 1 and model.layers > 1):
            last += [tensor.shape] * tensor.count
        else:
            into = mlp if tensor.kind in ("mlp", "router") else attention
            into += [tensor.shape] * (tensor.count // model.layers)
    if model.tied:
        last.append((model.vocab, model.embed_dim))
    groups = ((first, 1), (attention, model.layers), (mlp, model.layers), (last, 1))
    return tuple(WeightGroup(tuple(shapes), count) for shapes, count in groups if shapes)


def flexgen_job(
    model: ModelConfig, *, prompt: int, generated: int, engine: EngineRates = STOCK
) -> FlexGenJob:
    """A model with its lengths.

    Raises
    ------
    ValueError
        Lengths below 1 (2 generated), more tokens than the model has positions, or an encoder.
    """
    check_lengths(model, prompt, generated, least=2)
    if model.quantization is not None:
        raise ValueError(
            f"{model.name} is quantised ({model.quantization.method}), and FlexGen computes in "
            "half precision; plan with --executor vllm"
        )
    return FlexGenJob(
        groups=_groups(model),
        params=model.active_parameters,
        layers=model.layers,
        width=model.hidden,
        heads=model.heads,
        kv_width=model.kv_heads * model.head_dim,
        vocab=model.vocab,
        prompt=prompt,
        generated=generated,
        engine=engine,
    )


def runs_in_flexgen(model: ModelConfig) -> str | None:
    """Why FlexGen does not compute this model, or None where it does."""
    if model.family != "opt":
        return f"FlexGen computes OPT and Galactica only, and {model.name} is {model.family}"
    wrong = {
        "the layer norm comes after": not model.norm_first,
        f"word_embed_proj_dim is {model.embed_dim}": model.embed_dim != model.hidden,
        f"ffn_dim is {model.ffn}": model.ffn != 4 * model.hidden,
        "word embeddings are not tied": not model.tied,
        "there is no final layer norm": not model.final_norm,
        f"activation {model.activation} is not relu or gelu": (
            model.activation not in ("relu", "gelu")
        ),
    }
    reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
    return f"FlexGen does not compute {model.name}: {reasons[0]}" if reasons else None


__getattr__ = old_names(__name__)
