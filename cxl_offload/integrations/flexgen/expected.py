"""Decode speed of a request before it runs, from a profile of the accelerator's operators."""

from __future__ import annotations

from flexgen.opt_config import OptConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import HOST, ShareRow
from cxl_offload.plan.decode_time import DecodeShape, KvHome

__all__ = ["decode_shape"]


def decode_shape(
    request: FlexGenRun, config: OptConfig, *, prompt_len: int, shares: tuple[ShareRow, ...] = ()
) -> DecodeShape:
    """What a request decodes, in the terms of :func:`cxl_offload.plan.decode_time.decode_time`.

    Parameters
    ----------
    prompt_len
        Tokens of every prompt.
    shares
        Realised ones; without them the requested percentages are taken as realised.

    Raises
    ------
    ConfigError
        The request uses what the equations do not cover: a disk, compression, a KV cache in
        several places, attention over a workspace, linear layers in half precision on the CPU.
    """
    gpu, host = request.percent[:2]
    realised = [row for row in shares if row.kind == "weights" and row.home.startswith(HOST)]
    on_host = sum(row.realised_percent for row in realised) if shares else host
    if gpu + host != 100 or request.compress_weight or request.compress_cache:
        raise ConfigError("no prediction: tensors on disk or compressed are not covered")
    if request.accelerator == "host" and request.cpu_linear != "single":
        raise ConfigError("no prediction: --cpu-linear half is not covered")
    return DecodeShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_embed_dim,
        vocabulary=config.vocab_size,
        rows=request.gpu_batch_size,
        batches=request.num_gpu_batches,
        # The first token is the prompt's; those after it attend to one more each.
        attended=prompt_len + request.gen_len / 2,
        kv=_kv_home(request),
        host_weights=on_host / 100,
    )


def _kv_home(request: FlexGenRun) -> KvHome:
    share = request.percent[2:4]
    if share == (100, 0) and not request.cpu_cache_compute:
        return "accelerator"
    if share == (0, 100) and request.attends_in_place:
        return "host, in place"
    if share == (0, 100) and not request.cpu_cache_compute:
        return "host, loaded"
    raise ConfigError(
        f"no prediction: a KV cache {share[0]:g} % on the accelerator and {share[1]:g} % on the "
        "host, or attention over a workspace, is not covered"
    )
