"""Options of weights: the ``weight_*`` keys of ``--additional-config '{"cxl_offload": {...}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cxl_offload.errors import ConfigError
from cxl_offload.files import hint
from cxl_offload.integrations.vllm.old_policies import (
    LISTED,
    policy_text,
    warn_of_old,
    whole_policy,
)
from cxl_offload.memory import Pages, known_policy
from cxl_offload.memory.rules import PAGES
from cxl_offload.objects.weight_kinds import KINDS, OUTSIDE_LAYERS, kind_of, matches
from cxl_offload.topology import Machine
from cxl_offload.tune import NewRegions

SECTION = "cxl_offload"
"""The key of ``--additional-config`` that this package reads."""

ON_DEVICE = "device"
"""In ``weight_kinds``: stays where vLLM puts it."""

_KEYS = (
    "weight_policy",
    "weight_kinds",
    "weight_pages",
    "weight_strict",
    "weight_tune",
    "weight_tune_state",
)
_OLD_KEYS = ("weight_nodes", "weight_placement")
_SAY_WHERE = ("weight_nodes", "weight_policy", "weight_placement")
_NEW = ("weight_policy",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Where weights go.

    Attributes
    ----------
    policy
        Of all kinds that ``kinds`` does not name, as text (``"bind:2"``).
    kinds
        Kind, or pattern of a parameter's name, to policy or :data:`ON_DEVICE`; the first that
        fits decides.
    pages
        ``"base"``, ``"thp"``, ``"2MiB"`` or ``"1GiB"``.
    strict
        Refuse rather than spill when a node is full or pinning moves pages.
    tune_state
        The file from which the share of new regions on the far tier is tuned; None: it is not.
    tuned_policy
        Whether ``policy`` comes from that file; otherwise the tuner only advises.
    """

    policy: str
    kinds: Mapping[str, str]
    pages: Pages = "base"
    strict: bool = True
    tune_state: Path | None = None
    tuned_policy: bool = False

    def policy_of(self, name: str) -> str | None:
        """Where a parameter goes; None: it stays on the device.

        Embeddings and the head stay there unless ``kinds`` names them, as vLLM's offload leaves
        them there too.
        """
        for rule, policy in self.kinds.items():
            if matches(rule, name):
                return None if policy == ON_DEVICE else policy
        return None if kind_of(name) in OUTSIDE_LAYERS else self.policy

    def is_named(self, name: str) -> bool:
        """Whether ``kinds`` says where a parameter goes, and not to stay."""
        rules = [rule for rule in self.kinds if matches(rule, name)]
        return bool(rules) and self.kinds[rules[0]] != ON_DEVICE

    def names_outside_layers(self) -> bool:
        """Whether parameters outside the stack of layers may be meant."""
        return any(
            policy != ON_DEVICE and (rule in OUTSIDE_LAYERS or rule not in KINDS)
            for rule, policy in self.kinds.items()
        )


def read_weight_options(
    additional_config: Mapping[str, Any] | None, machine: Machine
) -> WeightOptions | None:
    """The options of weights in what ``--additional-config`` was given.

    Returns
    -------
    WeightOptions or None
        None: the section is missing, or says nothing of weights.

    Raises
    ------
    ConfigError
        One line: an unknown key, a value of the wrong kind, a node that the machine lacks.
    """
    section = (additional_config or {}).get(SECTION)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise _refused(f"must be an object, not {section!r}")
    for key in section:
        if key not in (*_KEYS, *_OLD_KEYS):
            raise _refused(f"unknown key {key!r}; {hint(str(key), _KEYS)}")
    if not section:
        return None
    pages = section.get("weight_pages", "base")
    if pages not in PAGES:
        raise _refused(f"weight_pages {pages!r}: must be one of {', '.join(PAGES)}")
    strict = section.get("weight_strict", True)
    if not isinstance(strict, bool):
        raise _refused(f"weight_strict {strict!r}: must be true or false")
    state = _tune_state(section)
    tuned = state is not None and not any(key in section for key in _SAY_WHERE)
    if tuned and state is not None:
        policy = str(NewRegions(machine, state=state).policy())
    else:
        policy = _default_policy(section, machine)
    return WeightOptions(
        policy=policy,
        kinds=_kinds(section.get("weight_kinds", {}), machine),
        pages=cast("Pages", pages),
        strict=strict,
        tune_state=state,
        tuned_policy=tuned,
    )


def _tune_state(section: Mapping[str, Any]) -> Path | None:
    tune, state = section.get("weight_tune"), section.get("weight_tune_state")
    if tune is None and state is None:
        return None
    if tune != "step_time":
        raise _refused(f"weight_tune {tune!r}: must be 'step_time'")
    if not isinstance(state, str) or not state:
        raise _refused(
            "weight_tune needs weight_tune_state, a file: regions of weights do not move, so what "
            "is learned counts from the next start on"
        )
    return Path(state).expanduser()


def _default_policy(section: Mapping[str, Any], machine: Machine) -> str:
    given = section.get("weight_policy")
    if "weight_placement" in section or "weight_nodes" in section:
        given = _old_policy(section)
    if given is None:
        return f"preferred:{_nearest(machine)}"
    if given in LISTED:
        raise _refused(f"weight_policy {given!r} needs nodes, such as '{given}:0,2'")
    return _policy_text("weight_policy", given, machine)


def _old_policy(section: Mapping[str, Any]) -> Any:
    """What ``weight_placement``, or ``weight_nodes`` with a kind of policy, said before."""
    old = [key for key in ("weight_placement", "weight_nodes") if key in section]
    given, kind = section[old[0]], section.get("weight_policy")
    if len(old) > 1 or (old == ["weight_placement"] and kind is not None):
        raise _refused(f"weight_placement says all; leave {' and '.join(old[1:] or _NEW)} out")
    if old == ["weight_nodes"]:
        kind = "bind" if kind is None else kind
        if kind not in LISTED:
            raise _refused(
                f"weight_policy {kind!r} with weight_nodes; leave weight_nodes out, or give one "
                f"of {', '.join(LISTED)}"
            )
        try:
            given = policy_text(kind, given, name="weight_nodes")
        except ValueError as error:
            raise _refused(str(error)) from None
    warn_of_old(f'--additional-config "{SECTION}"', old, "weight_policy", given)
    return given


def _nearest(machine: Machine) -> int:
    """The node of the process, or the first with memory."""
    nodes = [node.id for node in machine.nodes if node.has_memory and node.allowed]
    return machine.initiator if machine.initiator in nodes else nodes[0]


def _kinds(given: Any, machine: Machine) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise _refused(f"weight_kinds {given!r}: must be an object of kind to policy")
    found = {}
    for rule, policy in given.items():
        if rule not in KINDS and not any(mark in rule for mark in ".*?["):
            raise _refused(
                f"weight_kinds {rule!r}: must be one of {', '.join(KINDS)}, or a pattern of "
                "parameters' names such as '*.down_proj.*'"
            )
        where = f"weight_kinds {rule!r}"
        found[rule] = ON_DEVICE if policy == ON_DEVICE else _policy_text(where, policy, machine)
    return found


def _policy_text(where: str, given: Any, machine: Machine) -> str:
    """The text of a policy, checked against the nodes of the machine."""
    if not isinstance(given, str | Mapping):
        raise _refused(f"{where} {given!r}: must be a policy as text, such as 'bind:2'")
    try:
        policy = whole_policy(given, machine)
        return str(known_policy(policy, machine, "a weight that the GPU reads"))
    except (TypeError, ValueError) as error:
        raise _refused(f"{where}: {error}") from None


def _refused(message: str) -> ConfigError:
    return ConfigError(f'--additional-config "{SECTION}": {message}')
