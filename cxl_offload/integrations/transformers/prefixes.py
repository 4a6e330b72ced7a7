"""The KV of prompts' beginnings, kept from one ``generate()`` to the next, and to the next process.

A prompt is divided into blocks of tokens. Those that an earlier prompt began with are read from a
store, the others are computed and written to it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.conventions import kv_shape, text_config
from cxl_offload.integrations.transformers.current_rows import CurrentRows
from cxl_offload.integrations.transformers.prefix_blocks import PrefixBlocks
from cxl_offload.integrations.transformers.prefix_facts import (
    ModelFacts,
    check_prefixes,
    root_of,
    why_not_known,
)
from cxl_offload.integrations.transformers.prefix_keys import (
    PromptRow,
    prompt_rows,
    shared_columns,
)
from cxl_offload.integrations.transformers.prefix_options import KeptPrefixes, PrefixCounts
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.kept import (
    KeptLayout,
    KeptReader,
    KeptStore,
    Placing,
    WrittenByAnotherError,
    open_or_read,
)
from cxl_offload.memory import Session
from cxl_offload.units import format_bytes

_PREFILL = "_prefill"
_PREFILL_PARAMETERS = [
    "self",
    "input_ids",
    "generation_config",
    "model_kwargs",
    "is_first_iteration",
]
_KNOWN_INPUTS = frozenset(
    {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}
)
_log = logging.getLogger(__name__)


class PrefixReuse:
    """One model's prefixes, for the length of a block.

    Parameters
    ----------
    model
        With its weights in place, before its attention is taken.
    current
        The rows that a layer computes now.

    Raises
    ------
    ConfigError
        In one line: no room for a block, another process writes blocks of something else, the file
        cannot be used.
    MemoryError
        The file system or a node has no room.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        asked: KeptPrefixes,
        placing: Placing | None,
        current: CurrentRows,
    ) -> None:
        shape = _shape(model, asked)
        self.counts = PrefixCounts()
        self._facts = ModelFacts(model, shape)
        self._tokens = asked.block_tokens
        self._current = current
        self._pid = os.getpid()
        store = _opened(asked, _layout(model, asked), self._facts.now(), placing)
        self.blocks = PrefixBlocks(store, shape, model.dtype)

    def take(self, model: PreTrainedModel, stack: contextlib.ExitStack) -> None:
        """Let ``generate()`` begin its prompts here; it has no hook for that."""
        stock: Callable[..., Any] = getattr(type(model), _PREFILL)

        def prefill(
            model: PreTrainedModel,
            input_ids: torch.Tensor,
            generation_config: Any,
            model_kwargs: dict[str, Any],
            is_first_iteration: bool = True,
        ) -> Any:
            given = (input_ids, generation_config, model_kwargs, is_first_iteration)
            return self._prefill(model, lambda: stock(model, *given), *given[:3])

        setattr(model, _PREFILL, types.MethodType(prefill, model))
        stack.callback(delattr, model, _PREFILL)

    def _prefill(
        self,
        model: PreTrainedModel,
        compute: Callable[[], Any],
        ids: torch.Tensor,
        asked: Any,
        given: dict[str, Any],
    ) -> Any:
        why = self._why_not(model, ids, asked, given)
        rows: list[PromptRow] | None = None
        if not why:
            root = root_of(self._facts.now())
            rows = prompt_rows(root, ids, given.get("attention_mask"), self._tokens)
            why = "" if rows is not None else "tokens that are hidden inside of a prompt"
        if rows is None:
            self.counts.computed[why] += 1
            return compute()
        cache, columns = given["past_key_values"], int(ids.shape[1])
        with self.blocks.found(rows) as found:
            there = shared_columns(rows, [len(each) for each in found.rows], self._tokens)
            is_hit = any(row.padding < there for row in rows)
            if is_hit:
                found.read_into(cache, rows, there, ids.device)
            del found
        first = there if is_hit else 0
        with self.blocks.writing(cache, rows, first, columns, self._current) as new:
            made = compute()
        self._count(rows, first, columns, len(new))
        return made

    def _count(self, rows: list[PromptRow], first: int, columns: int, kept: int) -> None:
        counts = self.counts
        counts.prompt_tokens += sum(columns - row.padding for row in rows)
        counts.found_tokens += sum(max(0, first - row.padding) for row in rows)
        counts.kept_blocks += kept
        counts.damaged_blocks = self.blocks.damaged

    def _why_not(
        self, model: PreTrainedModel, ids: torch.Tensor, asked: Any, given: dict[str, Any]
    ) -> str:
        """Why this prompt is computed as without a store; empty: it is not."""
        cache = given.get("past_key_values")
        if os.getpid() != self._pid:
            return "a forked child"
        if not isinstance(cache, Cache) or int(cache.get_seq_length()) > 0:
            return "a cache that holds something already, or none"
        if model.training:
            return "a model in training mode"
        if torch.is_autocast_enabled(model.device.type):
            return "autocast"
        if asked.is_assistant:
            return "drafts of an assistant"
        if asked.prefill_chunk_size is not None:
            return "prefill_chunk_size"
        if asked.output_attentions or asked.output_hidden_states:
            return "attentions or hidden states of the whole prompt are asked for"
        if ids.dim() != 2 or not ids.shape[1]:
            return "no token ids"
        for name, value in given.items():
            if name not in _KNOWN_INPUTS and value is not None and value is not False:
                return f"input {name}"
        if not _usual_positions(ids, given):
            return "positions that are not those of the tokens"
        return why_not_known(model)

    def close(self) -> None:
        """Lets another process write."""
        self.blocks.close()


def checked_prefixes(
    model: PreTrainedModel, asked: KeptPrefixes | None, kv: KvMemory, session: Session
) -> Callable[[], PrefixReuse] | None:
    """What opens the store of a model's prefixes, once its weights are in place; None: none is.

    Raises
    ------
    ConfigError
        In one line: a cache that is not in tiers or rounds what it keeps, a model whose KV cannot
        be known again, a transformers that begins prompts in another way.
    """
    if asked is None:
        return None
    if not isinstance(asked, KeptPrefixes):
        raise ConfigError(f"prefixes {asked!r}: give KeptPrefixes(bytes='8GiB'), or None")
    if "kv" not in kv.store.parts:
        raise ConfigError("prefixes need the cache in tiers; give a policy of kv")
    if kv.dtype is not None:
        raise ConfigError(
            "prefixes do not go with kv_dtype: a prompt attends to its own states before they are "
            "rounded, and to a prefix that was found after it; leave one of them out"
        )
    stock = getattr(type(model), _PREFILL, None)
    if stock is None or list(inspect.signature(stock).parameters) != _PREFILL_PARAMETERS:
        raise ConfigError(
            "this transformers begins prompts in another way than 5.19, so prefixes cannot be "
            "kept; leave them out"
        )
    check_prefixes(model)
    _layout(model, asked)
    placing = asked.placing(session, kv.store.parts["kv"][0].policy)
    return functools.partial(PrefixReuse, model, asked, placing, kv.current)


def _usual_positions(ids: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether a token's position is how many tokens are before it, however it is padded."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if positions is None:
        return mask is None
    if mask is None:
        usual = torch.arange(ids.shape[1], device=positions.device)
    elif mask.shape != ids.shape:
        return False
    else:
        usual = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return positions.shape[-1] == ids.shape[1] and bool((positions == usual).all())


def _shape(model: PreTrainedModel, asked: KeptPrefixes) -> tuple[int, int, int, int]:
    """Layers, heads, tokens and width of a block."""
    config = text_config(model)
    heads, width = kv_shape(config)
    return len(DynamicCache(config=config).layers), heads, asked.block_tokens, width


def _layout(model: PreTrainedModel, asked: KeptPrefixes) -> KeptLayout:
    block_bytes = 2 * math.prod(_shape(model, asked)) * model.dtype.itemsize
    if asked.nbytes < block_bytes:
        raise ConfigError(
            f"prefixes: bytes {format_bytes(asked.nbytes)}: a block of {asked.block_tokens} tokens "
            f"takes {format_bytes(block_bytes)}"
        )
    try:
        return KeptLayout.within(asked.nbytes, block_bytes)
    except ValueError as error:
        raise ConfigError(f"prefixes: bytes {asked.bytes!r}: {error}") from None


def _opened(
    asked: KeptPrefixes, layout: KeptLayout, facts: dict[str, str], placing: Placing | None
) -> KeptStore | KeptReader:
    name = asked.persist
    path = asked.path
    try:
        store = open_or_read(path, layout, facts, prepare=placing)
    except WrittenByAnotherError as error:
        raise ConfigError(
            f"prefixes: persist {name!r} is written by another process ({error}); take another name"
        ) from error
    except OSError as error:
        raise ConfigError(f"prefixes: {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise ConfigError(f"prefixes: bytes: {error}") from error
    if name is None:  # its memory goes with the last mapping, however this process ends
        path.unlink(missing_ok=True)
    elif isinstance(store, KeptStore):
        _log.info("%s: %d blocks of an earlier process", path, len(store.entries))
    return store
