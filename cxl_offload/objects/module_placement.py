"""Moves parameters and buffers of a module in place, by their names or kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from cxl_offload.memory import (
    Pages,
    Placement,
    Policy,
    PolicyLike,
    Session,
    current_session,
    known_policy,
)
from cxl_offload.objects.factories import is_plain
from cxl_offload.objects.placing_scope import span_elements
from cxl_offload.objects.weight_kinds import matches
from cxl_offload.ops.view import untraced
from cxl_offload.tensor import copy_whole, empty, placement_of


@dataclass(slots=True)
class _Chosen:
    """A tensor of a module, its names, and where it goes."""

    tensor: torch.Tensor
    policy: Policy
    names: list[str] = field(default_factory=list)


@untraced
@torch.no_grad()
def place(
    module: torch.nn.Module,
    policies: Mapping[str, PolicyLike],
    *,
    pages: Pages = "thp",
    session: Session | None = None,
) -> dict[str, Placement]:
    """Move parameters and buffers of a module where policies say, by name or by kind.

    >>> cxl_offload.place(model, {"*.experts.*": "cxl", "embedding": "bind:0"})

    Parameters
    ----------
    module
        Its tensors are on the CPU. The objects stay, so optimizers, ties and hooks hold on to them.
    policies
        Pattern of dotted names, or a kind (``attention``, ``mlp``, ``experts``, ``norm``,
        ``embedding``, ``head``, ``other``), to a policy. The first that means a name decides;
        names that none means stay where they are.
    pages
        See :func:`cxl_offload.empty`.
    session
        What allocates; None means the current session.

    Returns
    -------
    dict
        Name to placement of everything that was chosen, asked from its pages.

    Raises
    ------
    TypeError
        No module, or no mapping.
    ValueError
        Before anything moves: a rule means nothing, tied names have different policies, or a tensor
        is on another device, no plain tensor, or a view of memory that is not only its own.
    MemoryError
        A node is full; what was moved before stays at its new place, the rest where it was.

    Notes
    -----
    A tensor that is in the session's memory moves page by page, and every view of it follows; any
    other is copied, one after another, so that each is there twice only for a moment. A state dict
    that was taken before shows the old memory of those. Gradients stay where they are.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"place moves the tensors of a module, not a {type(module).__name__}")
    if not isinstance(policies, Mapping):
        raise TypeError(f"place takes pattern or kind to policy, not a {type(policies).__name__}")
    session = session or current_session()
    known = {rule: known_policy(policy, session.machine, rule) for rule, policy in policies.items()}
    chosen = _choose(module, known)
    for each in chosen:
        _check(each, session)
    _check_shared(module, chosen, session)
    for each in chosen:
        try:
            _move(each, pages, session)
        except MemoryError as error:
            raise MemoryError(f"place {each.names[0]}: {error}") from error
    return {
        name: placement_of(each.tensor, session=session) for each in chosen for name in each.names
    }


def _choose(module: torch.nn.Module, policies: Mapping[str, Policy]) -> list[_Chosen]:
    """Every tensor that a rule means, once; tied names together."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    found: dict[int, _Chosen] = {}
    unused = dict.fromkeys(policies)
    for name, tensor in named:
        rule = next((rule for rule in policies if matches(rule, name)), None)
        if rule is None:
            continue
        unused.pop(rule, None)
        each = found.setdefault(id(tensor), _Chosen(tensor, policies[rule]))
        each.names.append(name)
        if each.policy != policies[rule]:
            raise ValueError(
                f"place: {each.names[0]} and {name} are one tensor; {each.policy} and "
                f"{policies[rule]} cannot both hold"
            )
    for rule in unused:
        if not any(matches(rule, name) for name, _ in named):
            example = named[0][0] if named else "none"
            raise ValueError(
                f"place: {rule!r} means no parameter or buffer of this {type(module).__name__}; "
                f"names are such as {example}"
            )
    return list(found.values())


def _check(each: _Chosen, session: Session) -> None:
    """Refuses what cannot move without breaking what else holds its memory."""
    name, tensor = each.names[0], each.tensor
    if tensor.is_meta:
        raise ValueError(
            f"place: {name} is on meta and has no memory; make it inside of "
            "`with cxl_offload.placing(policy)`, by to_empty(device='cpu')"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"place: {name} is on {tensor.device}; only CPU tensors have a node")
    if not is_plain(tensor):
        raise ValueError(
            f"place: {name} is a {type(tensor).__name__} of layout {tensor.layout}; its values are "
            "not plain bytes: place the tensors that it is made of"
        )
    if tensor.numel() == 0 or session.find(tensor.data_ptr()) is not None:
        return
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        raise ValueError(
            f"place: {name} is shared with other processes, which would not see it move; place it "
            "in a cxl_offload.SharedRegion"
        )
    held = tensor.untyped_storage().nbytes()
    own = span_elements(tensor) * tensor.itemsize
    if held != own:
        raise ValueError(
            f"place: {name} shows {own} of the {held} bytes of a buffer that others may show too; "
            "make that buffer with cxl_offload.empty, then it moves as one"
        )


def _check_shared(module: torch.nn.Module, chosen: list[_Chosen], session: Session) -> None:
    """Refuses to part tensors that share memory, and two policies for one allocation."""
    moving = {id(each.tensor) for each in chosen}
    first: dict[int, tuple[str, int]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_plain(tensor) and tensor.numel() and session.find(tensor.data_ptr()) is None:
            other, identity = first.setdefault(tensor.untyped_storage()._cdata, (name, id(tensor)))
            if identity != id(tensor) and moving & {identity, id(tensor)}:
                raise ValueError(
                    f"place: {name} shares its memory with {other}, and would lose it; tie the "
                    "parameters themselves, or make the memory with cxl_offload.empty"
                )
    asked: dict[int, _Chosen] = {}
    for each in chosen:
        owner = session.find(each.tensor.data_ptr()) if each.tensor.numel() else None
        before = each if owner is None else asked.setdefault(owner.address, each)
        if before.policy != each.policy:
            raise ValueError(
                f"place: {before.names[0]} and {each.names[0]} are in one allocation, which moves "
                f"as one; {before.policy} and {each.policy} cannot both hold"
            )


def _move(each: _Chosen, pages: Pages, session: Session) -> None:
    tensor = each.tensor
    if tensor.numel() == 0:
        return
    owner = session.find(tensor.data_ptr())
    if owner is not None and owner.nbytes >= owner.page_bytes:
        session.move(owner, each.policy)
        return
    count = span_elements(tensor)
    base = empty(count, dtype=tensor.dtype, policy=each.policy, pages=pages, session=session)
    copy_whole(base, tensor.as_strided((count,), (1,)))
    tensor.data = base.as_strided(tensor.shape, tensor.stride())
