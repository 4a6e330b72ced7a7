"""Readers of single options of ``kv_connector_extra_config``; each error is one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cxl_offload.errors import ConfigError
from cxl_offload.files import hint
from cxl_offload.integrations.vllm.kv_admission import Rule
from cxl_offload.integrations.vllm.old_policies import (
    LISTED,
    policy_text,
    warn_of_old,
    whole_policy,
)
from cxl_offload.kept import kept_folder, kept_path
from cxl_offload.memory import Pages, Policy
from cxl_offload.topology import Machine
from cxl_offload.units import whole_bytes

FACTS_KEY = "kept_facts"
"""Not an option of people: what the check of the configuration hands to the scheduler's process."""

ADMISSIONS: tuple[Rule, ...] = ("adaptive", "all")
"""Rules by which chunks are stored."""


def wrong(name: str, problem: str) -> ConfigError:
    """The error for one option."""
    return ConfigError(f"kv_connector_extra_config: {name} {problem}")


def check_names(config: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses names that mean nothing, with a guess at what was meant."""
    for name in config:
        if name not in known:
            raise wrong(f"{where}{name}", f"is no option; {hint(name, known)}")


def read_bytes(name: str, value: Any) -> int:
    """A positive number of bytes, given as a number or as a text such as ``"8GiB"``."""
    try:
        nbytes = whole_bytes(value)
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise wrong(name, f"is {value!r}; give bytes, such as 8589934592 or '8GiB'")
    return nbytes


def read_count(name: str, value: Any) -> int | None:
    """A whole number from 1, or None where it is left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(name, f"is {value!r}; give a whole number from 1")
    return value


def read_rate(value: Any) -> float | None:
    """Tokens a second, or None where they are left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong("prefill_tokens_per_s", f"is {value!r}; give tokens a second, above 0")
    return float(value)


def counts_sightings(config: Mapping[str, Any]) -> bool:
    """Whether vLLM itself stores only what it has seen several times."""
    threshold = config.get("store_threshold", 0)
    if isinstance(threshold, bool) or not isinstance(threshold, int):
        raise wrong("store_threshold", f"is {threshold!r}; give a whole number")
    return threshold >= 2


def read_admission(config: Mapping[str, Any]) -> Rule:
    """The rule that is asked for, or the one that cannot lose here."""
    rule = config.get("admission")
    if rule not in (None, *ADMISSIONS):
        raise wrong("admission", f"is {rule!r}; known are {', '.join(ADMISSIONS)}")
    has_threshold = counts_sightings(config)
    if rule == "adaptive" and has_threshold:
        raise wrong("admission", "is 'adaptive', which store_threshold is too; leave one out")
    if rule is not None:
        return cast("Rule", rule)
    # Who reads a tier that outlives or is shared by engines is not seen by the one that stores.
    cold = config.get("cold") or {}
    others = cold.get("persist") is not None or config.get("secondary_tiers")
    return "all" if others or has_threshold else "adaptive"


def read_tune_state(config: Mapping[str, Any]) -> Path | None:
    """The file that ``tune`` learns in; None without it."""
    tune, state = config.get("tune"), config.get("tune_state")
    if tune is None and state is None:
        return None
    if tune != "copy_time":
        raise wrong("tune", f"is {tune!r}; give 'copy_time', or leave tune_state out too")
    if not isinstance(state, str) or not state:
        raise wrong(
            "tune_state",
            f"is {state!r}; give a file: the pool does not move, so what is learned counts from "
            "the next start on",
        )
    return Path(state).expanduser()


def read_pages(name: str, value: Any, known: Sequence[str]) -> Pages:
    """One of the ``known`` kinds of pages."""
    if value not in known:
        raise wrong(name, f"is {value!r}; known here are {', '.join(known)}")
    return cast("Pages", value)


def read_placement(config: Mapping[str, Any], machine: Machine, where: str = "") -> Policy | None:
    """The policy that ``policy`` says: ``"weighted:0=4,2=1"``, ``{0: 4, 2: 1}``, a tier's name.

    None is ``"near"``, also the default. The old way, a kind as ``policy`` with the lists ``nodes``
    and ``weights`` and a ``granule``, warns.
    """
    policy, nodes = config.get("policy"), config.get("nodes")
    try:
        if nodes is None and policy in LISTED:
            raise ValueError(f"{policy!r} needs nodes, such as '{policy}:0,2'")
        if nodes is None and ("weights" in config or "granule" in config):
            raise ValueError("weights and granule are part of a policy: 'weighted:0=4,2=1@64KiB'")
        if nodes is not None:
            policy = _listed_policy(policy, config, where)
        return None if policy in (None, "near") else whole_policy(policy, machine)
    except (TypeError, ValueError) as error:
        raise wrong(f"{where}policy", f"is wrong: {error}") from error


def _listed_policy(policy: Any, config: Mapping[str, Any], where: str) -> str:
    nodes = config["nodes"]
    many = isinstance(nodes, Sequence) and len(nodes) > 1
    kind = policy if policy is not None else "interleave" if many else "bind"
    if kind not in LISTED:
        raise ValueError(
            f"{kind!r} with nodes; leave nodes out, or give one of {', '.join(LISTED)}"
        )
    granule = config.get("granule")
    text = policy_text(kind, nodes, weights=config.get("weights"), granule=granule)
    old = [f"{where}{name}" for name in ("nodes", "weights", "granule") if name in config]
    warn_of_old("kv_connector_extra_config", old, f"{where}policy", text)
    return text


def read_kept(config: Mapping[str, Any], where: str) -> Path | None:
    """The file of ``persist`` in ``persist_folder``, or the device that ``persist`` names.

    None where chunks end with the engine.
    """
    name, folder = config.get("persist"), config.get("persist_folder")
    if name is None:
        if folder is not None:
            raise wrong(f"{where}persist_folder", "does nothing without persist")
        return None
    if not isinstance(name, str):
        raise wrong(f"{where}persist", f"is {name!r}; give a name")
    try:
        root = kept_folder(folder)
    except ValueError:
        raise wrong(
            f"{where}persist_folder", f"is {folder!r}; give a folder that is there"
        ) from None
    try:
        return kept_path(name, root)
    except ValueError as error:
        raise wrong(f"{where}persist", f"is no name: {error}") from error
