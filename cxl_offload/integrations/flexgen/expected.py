"""Decode speed of a request before it runs, from a profile of the accelerator's operators."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen.opt_config import OptConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import ACCELERATOR, DISK, HOST, ShareRow
from cxl_offload.plan.flexgen.decode_time import DecodeShape, KvHome


def decode_shape(
    request: FlexGenRun, config: OptConfig, *, prompt_len: int, shares: tuple[ShareRow, ...]
) -> DecodeShape:
    """What a request decodes, in the terms of ``plan.flexgen.decode_time``.

    Parameters
    ----------
    prompt_len
        Tokens of every prompt.
    shares
        What every home of weights and KV cache gets.

    Raises
    ------
    ConfigError
        The request uses what the equations do not cover: a disk, compression, a KV cache in
        several places, attention over a workspace, linear layers in half precision on the CPU.
    """
    weights, kv = (_by_place(shares, kind) for kind in ("weights", "kv"))
    if weights[DISK] or request.compress_weight or request.compress_cache:
        raise ConfigError("no prediction: tensors on disk or compressed are not covered")
    if request.accelerator == "host" and request.cpu_linear != "fastest":
        raise ConfigError(f"no prediction: --cpu-linear {request.cpu_linear} is not covered")
    return DecodeShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_embed_dim,
        vocabulary=config.vocab_size,
        rows=request.gpu_batch_size,
        batches=request.num_gpu_batches,
        # The first token is the prompt's; those after it attend to one more each.
        attended=prompt_len + request.gen_len / 2,
        kv=_kv_home(request, kv),
        # Host memory that is the accelerator's too is read where it is.
        host_weights=weights[HOST] / 100 if request.accelerator == "cuda" else 0.0,
    )


def _by_place(shares: tuple[ShareRow, ...], kind: str) -> Mapping[str, float]:
    """Percent on the disk, the accelerator and, all its parts together, the host."""
    percents = dict.fromkeys((ACCELERATOR, HOST, DISK), 0.0)
    for row in shares:
        if row.kind == kind:
            place = row.home if row.home in (ACCELERATOR, DISK) else HOST
            percents[place] += row.realised_percent
    return percents


def _kv_home(request: FlexGenRun, kv: Mapping[str, float]) -> KvHome:
    in_place = request.cpu_attention == "in-place"
    if request.accelerator == "host" and in_place and not kv[DISK]:
        return "host, in place"
    if not kv[HOST] and not kv[DISK] and not request.cpu_cache_compute:
        return "accelerator"
    if not kv[ACCELERATOR] and not kv[DISK]:
        if not request.cpu_cache_compute:
            return "host, loaded"
        if in_place:
            return "host, in place"
    raise ConfigError(
        f"no prediction: a KV cache {kv[ACCELERATOR]:g} % on the accelerator and {kv[HOST]:g} % on "
        "the host, or attention over a workspace, is not covered"
    )
