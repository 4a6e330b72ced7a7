"""``generate()`` begins again when memory failed and what was lost can be had again."""

from __future__ import annotations

import contextlib
import gc
import logging
import types
from typing import Any

import torch
from transformers import PreTrainedModel

from cxl_offload.errors import MemoryLostError, forget_frames, forget_locals
from cxl_offload.memory.lost import is_lost

_log = logging.getLogger(__name__)
_GENERATE = "generate"
_MOST_TIMES = 3
_KEPT_OUTSIDE = ("past_key_values", "streamer")
"""Arguments that a first attempt has changed for good: a cache of the caller's, words shown."""


def take_generate(model: PreTrainedModel, stack: contextlib.ExitStack) -> None:
    """Until the stack ends, the model's ``generate()`` is computed again where memory fails.

    Weights come from their files (:mod:`~cxl_offload.integrations.transformers.weight_files`), keys
    and values are computed again, and random numbers are those of the first attempt: the tokens are
    those of a run without a failure.
    """
    stock = getattr(type(model), _GENERATE, None)
    if stock is None or _GENERATE in vars(model):
        return

    def generate(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
        may_repeat = all(options.get(name) is None for name in _KEPT_OUTSIDE)
        random = torch.get_rng_state()
        for time in range(_MOST_TIMES):
            try:
                return stock(model, *args, **options)
            except MemoryLostError as error:
                forget_locals(error)
                if time == _MOST_TIMES - 1 or not may_repeat:
                    raise
                failed = error
            # Outside of the handler, so that nothing but `failed` has the frames.
            forget_frames(failed)
            if _stands(failed):
                raise failed
            _log.warning("generate: begun again, for %s", str(failed))
            torch.set_rng_state(random)
        raise AssertionError("the last attempt returns or raises")

    setattr(model, _GENERATE, types.MethodType(generate, model))
    stack.callback(delattr, model, _GENERATE)


def _stands(error: MemoryLostError) -> bool:
    """Whether something is still lost, once the caches of the attempt are gone."""
    gc.collect()
    return not error.losses or any(is_lost(loss.address, loss.nbytes) for loss in error.losses)
