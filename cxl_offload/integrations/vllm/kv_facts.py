"""What KV blocks of an engine depend on besides the tokens: the facts of kept blocks.

A block's key is vLLM's hash of its tokens, of all tokens before them, and of what else a request
brings (images, embeddings, salt). The rest is the same for all blocks of an engine, and is compared
once, when a store is opened. Facts known when the configuration is made are put into
``kv_connector_extra_config``, with which they reach the scheduler's process; the others, which need
the files of the model and the shape of the KV cache, are added there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.kv_read import wrong
from cxl_offload.kept import model_facts

FORMAT = "1"
"""Of the bytes of a chunk: all ranks in a row, each with the pages of its layers' tensors."""

_PICKLED = ("sha256", "xxhash")
"""vLLM's hash functions that hash what pickle makes of tokens, which Python decides."""


def _short(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:32]


def early_facts(config: Any) -> dict[str, str]:
    """What vLLM's configuration says of the blocks.

    Parameters
    ----------
    config
        vLLM's ``VllmConfig``, complete.

    Raises
    ------
    ConfigError
        One line: blocks of this engine cannot be known again after a restart.
    """
    import vllm
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    _check_keepable(config)
    algorithm = str(cache.prefix_caching_hash_algo)
    facts = {
        "vllm": str(vllm.__version__),
        "device": f"{current_platform.device_type} {current_platform.get_device_name()}",
        "model": str(model.model),
        "revision": str(model.revision),
        "options of the model": _short(model.compute_hash()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "inputs": _short(model.multimodal_config),
        "tokenizer": f"{model.tokenizer} {model.tokenizer_revision} {model.tokenizer_mode}",
        "hash": algorithm,
        "hash seed": _short(_hash_seed(algorithm)),
        "attention": str(getattr(getattr(config, "attention_config", None), "backend", None)),
        "download_dir": str(config.load_config.download_dir or ""),
    }
    if algorithm in _PICKLED:
        facts["hash"] += f", Python {sys.version_info.major}.{sys.version_info.minor}"
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None:
        facts["draft"] = str(draft.model)
        facts["draft revision"] = str(draft.revision)
        facts["options of the draft"] = _short(draft.compute_hash())
    return facts


def _check_keepable(config: Any) -> None:
    why = ""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if config.lora_config is not None:
        why = "LoRA is on: the key of a block has an adapter's name and path, not its weights"
    elif config.load_config.load_format == "dummy":
        why = "load_format is dummy: such weights are no model's"
    elif getattr(config, "weight_transfer_config", None) is not None:
        why = "weight_transfer_config changes weights while the engine runs"
    elif str(algorithm).startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        why = (
            f"prefix_caching_hash_algo is {algorithm}, whose seed is random in every process: "
            "take sha256, or set PYTHONHASHSEED"
        )
    if why:
        raise wrong("cold.persist", f"cannot be kept: {why}")


def _hash_seed(algorithm: str) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def late_facts(config: Any, early: Mapping[str, str]) -> dict[str, str]:
    """All facts, once the model is loaded and the KV cache has its shape.

    Parameters
    ----------
    config
        vLLM's ``OffloadingConfig``.
    early
        Of :func:`early_facts`.

    Raises
    ------
    ConfigError
        One line: the files of a model are not found.
    """
    parallel = config.parallel
    groups = [
        [group.group_id, group.tokens_per_block, group.layer_names] for group in config.groups
    ]
    facts = dict(early) | {
        "format": FORMAT,
        "KV dtype": str(config.model.dtype),
        "tokens per hash": str(config.cache.tokens_per_hash),
        "blocks per chunk": str(config.cache.blocks_per_chunk),
        "bytes per block and rank": str(config.worker_kv_bytes_per_block),
        "layers": _short(json.dumps(groups)),
        "ranks": (
            f"tp {parallel.tp_size}, pp {parallel.pp_size}, pcp {parallel.pcp_size}, "
            f"dcp {parallel.dcp_size}, all {parallel.world_size}"
        ),
        "layout": (
            f"{config.kv_cache_layout}, canonical {config.canonical_layout}, "
            f"replicated {config.replicated_layout}"
        ),
    }
    for name in ("model", "draft"):
        if name in early:
            revision = early["revision" if name == "model" else "draft revision"]
            folder = _folder(early[name], revision, early["download_dir"])
            try:
                found = model_facts(folder)
            except (OSError, ValueError) as error:
                raise wrong("cold.persist", f"cannot be kept: {error}") from error
            facts |= {f"{part} of the {name}": value for part, value in found.items()}
    return facts


def _folder(model: str, revision: str, download_dir: str) -> Path:
    """Where the files of a model are: its folder, or that of its snapshot in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).is_file():
        return Path(model).parent
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=None if revision == "None" else revision,
                cache_dir=download_dir or None,
                local_files_only=True,
            )
        )
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"kv_connector_extra_config: cold.persist cannot be kept: the files of {model} are not "
            f"in a folder or in the hub's cache ({line})"
        ) from error
