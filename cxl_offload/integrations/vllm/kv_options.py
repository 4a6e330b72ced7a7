"""The options of ``kv_connector_extra_config``, read and checked without vLLM or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxl_offload.integrations.vllm.kv_admission import Rule
from cxl_offload.integrations.vllm.kv_plugin import TIER_TYPE
from cxl_offload.integrations.vllm.kv_read import (
    FACTS_KEY,
    check_names,
    counts_sightings,
    read_admission,
    read_bytes,
    read_count,
    read_kept,
    read_pages,
    read_placement,
    read_rate,
    read_tune_state,
    wrong,
)
from cxl_offload.integrations.vllm.kv_room import SHARED_PAGES, check_kept, check_tier
from cxl_offload.kept import takes_policy, why_not_placed
from cxl_offload.memory import Dax, Pages, Policy, Session
from cxl_offload.memory.rules import PAGES
from cxl_offload.memory.shared import SHARED_ROOT
from cxl_offload.topology import Machine
from cxl_offload.tune import NewRegions
from cxl_offload.units import format_bytes

EVICTION_POLICIES = ("lru", "arc", "cost")
"""vLLM's own two, and that of :mod:`~cxl_offload.integrations.vllm.kv_eviction`."""

PENDING_BYTES = 256 << 20
"""Of copies to the cold tier that may wait; a fraction of a second of what a CXL card writes."""

_PLACE_KEYS = ("policy", "nodes", "weights", "granule", "pages")
_OWN_KEYS = (
    *_PLACE_KEYS,
    "copy_threads",
    "cold",
    "admission",
    "prefill_tokens_per_s",
    "tune",
    "tune_state",
    FACTS_KEY,
)
_COLD_KEYS = (
    *_PLACE_KEYS,
    "bytes",
    "eviction_policy",
    "pending_bytes",
    "copy_threads",
    "persist",
    "persist_folder",
)
# What vLLM 0.32 reads from the same mapping.
_VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "cpu_bytes_to_use",
    "block_size",
    "blocks_per_chunk",
    "eviction_policy",
    "cache_policy_module_path",
    "store_threshold",
    "max_tracker_size",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
    "secondary_tiers",
    "backpressure",
)

_VLLM_TIER_KEYS = ("type", "module_path", "backpressure")
"""What vLLM itself reads of one of its ``secondary_tiers``, of any maker."""


@dataclass(frozen=True, slots=True)
class KvTier:
    """One tier of the pool.

    Attributes
    ----------
    nbytes
        For all ranks together.
    policy
        Where its pages go; None puts each rank's part near the device of that rank.
    pages
        Of the memory: ``"base"``, or ``"thp"`` where the kernel has them.
    eviction
        Name of the policy that chooses what goes when it is full.
    """

    nbytes: int
    policy: Policy | None
    pages: Pages
    eviction: str


@dataclass(frozen=True, slots=True)
class ColdTier:
    """The second tier, behind the hot one.

    Attributes
    ----------
    tier
        Its memory. Its policy is None only where it is kept and the file system places its pages.
    pending_bytes
        Of copies into it that may wait; what comes on top is refused, and counted.
    copy_threads
        As of :class:`KvOptions`, on every platform: the scheduler's process copies.
    kept
        The file or device on which its chunks outlive the engine; None: they do not.
    """

    tier: KvTier
    pending_bytes: int
    copy_threads: int | None
    kept: Path | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], machine: Machine, where: str = "cold.") -> ColdTier:
        """The options of ``cold``, or of another tier named ``where``; raises as KvOptions.read."""
        check_names(config, _COLD_KEYS, where)
        if config.get("bytes") is None:
            raise wrong(f"{where}bytes", "is missing; give the bytes of the cold tier")
        kept = read_kept(config, where)
        policy = read_placement(config, machine, where)
        is_placed = kept is None or takes_policy(kept)
        if kept is not None and isinstance(policy, Dax):
            raise wrong(
                f"{where}policy",
                f"is {policy}, which is no file to persist in; leave policy out, and give the "
                f"device itself: persist '/dev/{policy.device}'",
            )
        if kept is not None and policy is not None and not is_placed:
            raise wrong(f"{where}policy", f"is {policy}: {why_not_placed(kept)}; leave it out")
        if policy is None and is_placed:
            tiers = ", ".join(tier.name for tier in machine.tiers if tier.nodes)
            raise wrong(f"{where}policy", f"is missing; name nodes, or one of the tiers: {tiers}")
        tier = KvTier(
            nbytes=read_bytes(f"{where}bytes", config["bytes"]),
            policy=policy,
            pages=read_pages(
                f"{where}pages",
                config.get("pages", "base"),
                PAGES if kept is None else SHARED_PAGES,
            ),
            eviction=_read_eviction(config, where),
        )
        pending = read_bytes(f"{where}pending_bytes", config.get("pending_bytes", PENDING_BYTES))
        threads = read_count(f"{where}copy_threads", config.get("copy_threads"))
        return cls(tier=tier, pending_bytes=pending, copy_threads=threads, kept=kept)


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What somebody asked for in ``kv_connector_extra_config``.

    Attributes
    ----------
    hot
        The tier that KV blocks are stored to and loaded from.
    copy_threads
        Threads at most that copy in each direction; None takes all CPUs of the process that are
        near. Only where vLLM runs on CPU: a GPU copies by itself.
    cold
        The tier behind it, if any.
    prefill_tokens_per_s
        How fast lost KV blocks are computed again, for the eviction policy ``cost``.
    secondary
        Tiers of this package among vLLM's own ``secondary_tiers``.
    tune_state
        The file from which the share of the pool on the far tier is tuned; None: it is not.
    tuned_policy
        Whether the hot tier's policy is what that file says; else the tuner only advises.
    admission
        Which chunks are stored.
    """

    hot: KvTier
    copy_threads: int | None
    cold: ColdTier | None
    prefill_tokens_per_s: float | None
    secondary: tuple[ColdTier, ...] = ()
    tune_state: Path | None = None
    tuned_policy: bool = False
    admission: Rule = "all"

    @classmethod
    def read(cls, config: Mapping[str, Any], machine: Machine) -> KvOptions:
        """The options in ``kv_connector_extra_config``, for this machine.

        Raises
        ------
        ConfigError
            With one line that names the option, its value and what would be right.
        """
        check_names(config, (*_OWN_KEYS, *_VLLM_KEYS), "")
        nbytes = config.get("cpu_bytes_to_use")
        if nbytes is None:
            raise wrong(
                "cpu_bytes_to_use", "is missing; give the bytes of the pool, for all ranks together"
            )
        policy = read_placement(config, machine)
        state = read_tune_state(config)
        learned = None if state is None else NewRegions(machine, state=state).policy()
        tuned = learned is not None and policy is None and config.get("policy") is None
        policy = learned if tuned else policy
        hot = KvTier(
            nbytes=read_bytes("cpu_bytes_to_use", nbytes),
            policy=policy,
            pages=read_pages("pages", config.get("pages", "base"), SHARED_PAGES),
            eviction=_read_eviction(config, ""),
        )
        options = cls(
            hot=hot,
            copy_threads=read_count("copy_threads", config.get("copy_threads")),
            cold=_read_cold(config, machine),
            prefill_tokens_per_s=read_rate(config.get("prefill_tokens_per_s")),
            secondary=_read_secondary(config, machine),
            tune_state=state,
            tuned_policy=tuned,
            admission=read_admission(config),
        )
        for name in ("blocks_per_chunk", "block_size"):  # vLLM divides by them
            read_count(name, config.get(name))
        options._check_eviction()
        return options

    def _check_eviction(self) -> None:
        tiers = [self.hot] if self.cold is None else [self.hot, self.cold.tier]
        if any(tier.eviction == "cost" for tier in tiers) and self.prefill_tokens_per_s is None:
            raise wrong(
                "prefill_tokens_per_s",
                "is missing; eviction_policy 'cost' compares what computing a chunk again takes",
            )

    def check(self, session: Session, *, shared_free_bytes: int) -> None:
        """Whether the machine has the nodes and, at this moment, the room.

        Parameters
        ----------
        shared_free_bytes
            Of :func:`~cxl_offload.memory.shared.shared_free_bytes`: the hot tier is shared memory.

        Raises
        ------
        ConfigError
            With one line that names the option and what there is.
        """
        if self.hot.nbytes > shared_free_bytes:
            raise wrong(
                "cpu_bytes_to_use",
                f"is {format_bytes(self.hot.nbytes)} and {SHARED_ROOT} has "
                f"{format_bytes(shared_free_bytes)} left; ask for less, or mount it larger (in a "
                "container: --shm-size)",
            )
        check_tier(self.hot, session, "")
        behind = [] if self.cold is None else [("cold.", self.cold)]
        behind += [(f"secondary_tiers[{n}].", each) for n, each in enumerate(self.secondary)]
        for where, cold in behind:
            if cold.kept is None or check_kept(cold.kept, cold.tier.nbytes, where):
                check_tier(cold.tier, session, where)

    @property
    def keeps(self) -> bool:
        """Whether chunks of a tier outlive the engine."""
        behind = self.secondary if self.cold is None else (self.cold, *self.secondary)
        return any(cold.kept is not None for cold in behind)


def _read_eviction(config: Mapping[str, Any], where: str) -> str:
    name = config.get("eviction_policy", "lru")
    if name not in EVICTION_POLICIES and (where or "cache_policy_module_path" not in config):
        other = "" if where else ", and others by cache_policy_module_path"
        known = ", ".join(EVICTION_POLICIES)
        raise wrong(f"{where}eviction_policy", f"is {name!r}; known are {known}{other}")
    return str(name)


def _read_cold(config: Mapping[str, Any], machine: Machine) -> ColdTier | None:
    cold = config.get("cold")
    if cold is None:
        return None
    if not isinstance(cold, Mapping):
        raise wrong("cold", f"is {cold!r}; give a mapping, such as {{'bytes': '64GiB'}}")
    if counts_sightings(config):
        raise wrong("store_threshold", "does not go with cold: vLLM's tiers do not have it")
    return ColdTier.read(cold, machine)


def _read_secondary(config: Mapping[str, Any], machine: Machine) -> tuple[ColdTier, ...]:
    """Those of vLLM's own list that this package makes; vLLM reads the others."""
    given = config.get("secondary_tiers") or []
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise wrong("secondary_tiers", f"is {given!r}; give a list of mappings")
    return tuple(
        ColdTier.read(
            {key: value for key, value in each.items() if key not in _VLLM_TIER_KEYS},
            machine,
            f"secondary_tiers[{number}].",
        )
        for number, each in enumerate(given)
        if each.get("type") == TIER_TYPE
    )
