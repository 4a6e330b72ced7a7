"""Bad options are refused before the engine starts and the model loads.

vLLM makes the spec only after the model is loaded. Its configuration is complete much earlier, in
``VllmConfig._post_init_kv_transfer_config``, which offers no hook: :func:`install_check` replaces
that method by one that calls it and then reads our options. That is a monkey patch. Where a vLLM
has no such method the spec still checks, only later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from cxl_offload.errors import ConfigError, CxlOffloadError
from cxl_offload.integrations.vllm.kv_facts import early_facts
from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.kv_read import FACTS_KEY
from cxl_offload.integrations.vllm.one_line import one_line_under_the_command
from cxl_offload.memory import current_session
from cxl_offload.memory.shared import shared_free_bytes

_logger = init_logger(f"vllm.{__name__}")
_METHOD = "_post_init_kv_transfer_config"
_SPECS = ("cxl", "CxlOffloadingSpec")


class KvOptionsError(CxlOffloadError):
    """Bad options. No ``ValueError``: vLLM's configuration would wrap the line in many others."""


def check_extra_config(config: Mapping[str, Any]) -> None:
    """Reads the options of a spec of ours.

    Raises
    ------
    KvOptionsError
        With one line. Under the command ``vllm`` that line is all that is printed.
    """
    session = current_session()
    try:
        with one_line_under_the_command():
            options = KvOptions.read(config, session.machine)
            options.check(session, shared_free_bytes=shared_free_bytes())
    except ConfigError as error:
        raise KvOptionsError(str(error)) from error


def facts_to_keep(config: Any) -> dict[str, str] | None:
    """What chunks that outlive the engine depend on; None: none outlive it.

    Raises
    ------
    KvOptionsError
        With one line, where this engine's chunks cannot be kept.
    """
    extra = config.kv_transfer_config.kv_connector_extra_config
    if not KvOptions.read(extra, current_session().machine).keeps:
        return None
    try:
        with one_line_under_the_command():
            return early_facts(config)
    except ConfigError as error:
        raise KvOptionsError(str(error)) from error


def install_check() -> None:
    """Patches vLLM's configuration; any number of times."""
    stock = getattr(VllmConfig, _METHOD, None)
    if stock is None:
        _logger.warning("this vLLM has no VllmConfig.%s: KV options are checked late", _METHOD)
        return
    if hasattr(stock, "checks_cxl_offload"):
        return

    @functools.wraps(stock)
    def checked(self: Any) -> None:
        stock(self)
        transfer = self.kv_transfer_config
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        if transfer is not None and extra.get("spec_name") in _SPECS:
            check_extra_config(extra)
            facts = facts_to_keep(self)
            if facts is not None:
                extra[FACTS_KEY] = facts

    checked.checks_cxl_offload = True  # type: ignore[attr-defined]
    setattr(VllmConfig, _METHOD, checked)
