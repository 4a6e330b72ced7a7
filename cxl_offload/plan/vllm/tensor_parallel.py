"""Several GPUs that share every layer (vLLM's ``--tensor-parallel-size``): what one of them does.

Matrices are divided by columns, then by rows, and attention by its heads, so each GPU has its part
of the weights and of the KV cache, and the hidden states are summed over all twice a layer.
Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.collectives import all_reduce_seconds
from cxl_offload.plan.gpu import MOST_GPUS
from cxl_offload.plan.model.config import ModelConfig

_SUMS_A_LAYER = 2
_ELEMENT_BYTES = 2
"""Of hidden states, which are computed in 16 bits."""


def check_gpus(model: ModelConfig, gpus: int) -> None:
    """Refuses a number of GPUs that vLLM would refuse for this model.

    Raises
    ------
    ConfigError
        Below 1 or above ``MOST_GPUS``, or heads that do not divide.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"{gpus} GPUs: 1 to {MOST_GPUS}")
    if model.heads % gpus:
        raise ConfigError(
            f"{gpus} GPUs: the {model.heads} attention heads of {model.name} do not divide by them"
        )
    if model.kv_heads % gpus and gpus % model.kv_heads:
        raise ConfigError(
            f"{gpus} GPUs: neither do the {model.kv_heads} KV heads of {model.name} divide by "
            "them, nor they by the heads"
        )


def kv_parts(model: ModelConfig, gpus: int) -> int:
    """Into how many parts the KV cache is divided; what is not divided every GPU has whole.

    Fewer KV heads than GPUs are copied, and so is a latent vector that all heads share.
    """
    if model.decoder is not None and model.decoder.latent is not None:
        return 1
    return min(gpus, model.kv_heads)


def exchange_seconds(model: ModelConfig, gpus: int, tokens: float, bytes_per_s: float) -> float:
    """Seconds in which the GPUs sum the hidden states of ``tokens`` tokens, in all layers.

    ``bytes_per_s`` is what a GPU sends to another. The logits' gathering, once a step, is left out.
    """
    nbytes = tokens * model.hidden * _ELEMENT_BYTES
    return _SUMS_A_LAYER * model.layers * all_reduce_seconds(nbytes, gpus, bytes_per_s)
