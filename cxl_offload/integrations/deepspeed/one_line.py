"""What ends a script that knows nothing of this package: one line, and no traceback."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import deepspeed

from cxl_offload.errors import ConfigError

_CONFIGURES = "_configure_zero_optimizer"
_LAST_STAGE = 2
"""Stage 3 runs without an optimizer, for inference."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Ends the process with the line of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise SystemExit(f"cxl-offload: error: {error}") from None


def name_the_missing_optimizer() -> None:
    """Has DeepSpeed say what to do where neither script nor configuration has an optimizer.

    A plan's configuration names none: how fast a model learns is not the plan's to choose.
    """
    configure = getattr(deepspeed.DeepSpeedEngine, _CONFIGURES, None)
    if configure is None or hasattr(configure, "__wrapped__"):
        return

    @functools.wraps(configure)
    def configured(engine: Any, optimizer: Any) -> Any:
        if optimizer is None and engine.zero_optimization_stage() <= _LAST_STAGE:
            raise SystemExit(
                "cxl-offload: error: the script gives DeepSpeed no optimizer, and the "
                "configuration, such as a plan's ds_config.json, names none: give "
                "deepspeed.initialize() optimizer=, such as cxl_offload.CPUAdam("
                "model.parameters(), lr=...), or write an 'optimizer' into the configuration, for "
                "a plan under settings in its file"
            )
        return configure(engine, optimizer)

    setattr(deepspeed.DeepSpeedEngine, _CONFIGURES, configured)
