"""What can be placed, and where a user wants it: policies by kind of tensor."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Policy, PolicyLike, Replicate, Session, as_policy
from cxl_offload.memory.policy import refuse_copies
from cxl_offload.objects.experts import expert_numbers
from cxl_offload.objects.weight_kinds import KINDS as WEIGHT_KINDS
from cxl_offload.objects.weight_kinds import kind_of

EXPERTS = "experts:"
"""Begins kinds of some experts by number, ``experts:0-7,12``, of every layer."""

_OF_RUNS = ("kv", "activations")
KINDS = (*_OF_RUNS, "weights", *WEIGHT_KINDS)
"""``weights`` stands for every kind of weight that is not named."""


def chosen_policies(
    policies: Mapping[str, PolicyLike], session: Session, *, on_accelerator: bool = False
) -> dict[str, Policy]:
    """The policy of ``kv`` and of every kind of weight that has one.

    Raises
    ------
    ConfigError
        In one line: no policy, an unknown kind, tier or node, or copies of what CPUs do not read.
    """
    if not isinstance(session, Session):
        raise ConfigError(f"session {session!r}: give a cxl_offload.Session, or None")
    given = {kind: _checked(kind, policy, session) for kind, policy in policies.items()}
    for kind, policy in given.items() if on_accelerator else ():
        if isinstance(policy, Replicate):
            raise ConfigError(
                f"policy of {kind}: {policy}: an accelerator reads one copy only; leave it out, or "
                f"bind or interleave {kind}"
            )
    if not given and not on_accelerator:  # there, all may be on the accelerator
        raise ConfigError(f"no policy; give one for a kind of {', '.join(KINDS)}")
    of_weights = given.pop("weights", None)
    if of_weights is not None:
        given = {**dict.fromkeys(WEIGHT_KINDS, of_weights), **given}
    _check_experts(given)
    return given


def check_kept(kv_dtype: object, kinds: Container[str]) -> None:
    """Refuse a type of keys and values where none of them are kept here.

    Raises
    ------
    ConfigError
        kv has no policy.
    """
    if kv_dtype is not None and "kv" not in kinds:
        raise ConfigError(
            f"kv_dtype {kv_dtype}: the model's own cache is used, because kv has no policy; give "
            "one, such as bind:ldram, or leave kv_dtype out"
        )


def named_experts(kind: str) -> frozenset[int] | None:
    """The experts of a kind such as ``experts:0-7``; None for all other kinds.

    Raises
    ------
    ConfigError
        What follows the colon names no experts.
    """
    if not kind.startswith(EXPERTS):
        return None
    try:
        return expert_numbers(kind[len(EXPERTS) :])
    except ValueError as error:
        raise ConfigError(f"kind {kind!r}: {error}") from None


def _check_experts(given: Mapping[str, Policy]) -> None:
    seen: dict[int, str] = {}
    for kind in given:
        for number in named_experts(kind) or ():
            if number in seen:
                raise ConfigError(
                    f"expert {number} is in {seen[number]} and in {kind}; name it once"
                )
            seen[number] = kind
    if seen:
        for kind in ("experts", *dict.fromkeys(seen.values())):
            if isinstance(given.get(kind), Replicate):
                raise ConfigError(
                    f"policy of {kind}: {given[kind]} is for all experts alike; leave "
                    f"{seen[min(seen)]} out, or bind or interleave {kind}"
                )
    if seen and "experts" not in given:
        raise ConfigError(
            f"{seen[min(seen)]} needs a policy for the other experts: give one of experts or of "
            "weights"
        )


def check_kind(kind: str) -> None:
    """Refuse what is no kind; it needs neither torch nor transformers.

    Raises
    ------
    ConfigError
        Names all kinds there are.
    """
    if not isinstance(kind, str) or (kind not in KINDS and named_experts(kind) is None):
        raise ConfigError(f"kind {kind!r}: kinds are {', '.join(KINDS)}, and experts:0-7,12")


def _checked(kind: str, policy: PolicyLike, session: Session) -> Policy:
    check_kind(kind)
    try:
        made = as_policy(policy, session.machine)
        if not is_of_weights(kind):
            refuse_copies(made, kind)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy of {kind}: {error}") from None
    usable = sorted(node.id for node in session.machine.usable_nodes(include_gpu_memory=True))
    for node in getattr(made, "nodes", ()):
        if node not in usable:
            raise ConfigError(
                f"policy of {kind}: {made} names node {node}, which has no memory that this "
                f"process may use; usable nodes are {', '.join(map(str, usable))}"
            )
    return made


def is_of_weights(kind: str) -> bool:
    """Whether a kind is of weights, and not of what a run makes."""
    return kind not in _OF_RUNS


def checked_weights(kinds: Collection[str]) -> Collection[str]:
    """Refuse kinds of which a load would place none.

    Raises
    ------
    ConfigError
        None is of weights.
    """
    if not any(is_of_weights(kind) for kind in kinds):
        raise ConfigError(
            f"load: {', '.join(kinds)} has a policy, and no weights; give one of weights, or load "
            "with transformers and give this to offload()"
        )
    return kinds


def kind_of_weight(name: str, tied: Mapping[str, str]) -> str:
    """The kind of a parameter by its dotted name.

    Parameters
    ----------
    tied
        What uses the parameter besides, to its name: ``{"lm_head.weight": "embed_tokens.weight"}``
        of transformers. An embedding that is also the head is a head: that reads all of it for
        every token.
    """
    return next((kind_of(user) for user, source in tied.items() if source == name), kind_of(name))
