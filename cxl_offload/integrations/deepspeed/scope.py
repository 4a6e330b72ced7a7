"""The one line in a training script: ``with placing(...)``, ``attach``, or a variable."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.nn.modules.module import register_module_forward_pre_hook

from cxl_offload.integrations.deepspeed.accelerator import Capture, installed
from cxl_offload.integrations.deepspeed.attached import AttachedEngine
from cxl_offload.integrations.deepspeed.checkpoints import compute_again, leave_for
from cxl_offload.integrations.deepspeed.kinds import (
    PlanOrPolicy,
    kind_policies,
    parse_request,
)
from cxl_offload.integrations.deepspeed.loading import keep_loaded_states_as
from cxl_offload.integrations.deepspeed.one_line import in_one_line, name_the_missing_optimizer
from cxl_offload.integrations.deepspeed.phases import PhasedEngine
from cxl_offload.integrations.deepspeed.store import Store
from cxl_offload.integrations.deepspeed.tuning import TunedEngine, state_of_rank
from cxl_offload.memory import Pages, Session, chosen_session, current_session
from cxl_offload.plan.environment import PLAN_VARIABLE
from cxl_offload.ranks import RankShare, share_machine
from cxl_offload.renamed import old_names, renamed_keywords
from cxl_offload.topology import Machine
from cxl_offload.tune.options import Signal, read_tuning

_LOG = logging.getLogger("cxl_offload.integrations.deepspeed")

_told_of_own: list[Callable[[], None]] = []
"""Called when a script has placed an engine by itself, though the environment has a plan."""


class Placed:
    """The engines of one ``with placing(...)`` block, there when the block is over."""

    def __init__(self) -> None:
        self.engines: list[AttachedEngine] = []

    def table(self) -> str:
        """The tables of all engines."""
        return "\n\n".join(engine.table() for engine in self.engines)


def _gpu_node(machine: Machine) -> int | None:
    """The node of the GPU that this process trains on, where the machine tells."""
    if not machine.gpus:
        return None
    if get_accelerator().device_name() == "cuda":
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):
            card = torch.cuda.get_device_properties(torch.cuda.current_device())
            domain, bus, device = card.pci_domain_id, card.pci_bus_id, card.pci_device_id  # type: ignore[attr-defined]
            return machine.gpu(f"{domain:04x}:{bus:02x}:{device:02x}.0").node
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return machine.gpus[rank % len(machine.gpus)].node


@functools.lru_cache(maxsize=1)
def _divided(group: dist.ProcessGroup) -> tuple[RankShare, Session]:
    """This rank's part of the machine, one session for all engines of the process.

    DeepSpeed asks for memory on all ranks at the same point of making an engine, between other
    calls that need every rank.
    """
    share = share_machine(group=group)
    return share, share.session()


def _session(session: Session | None) -> tuple[RankShare | None, Session]:
    """What is given, else the part of this rank, else the machine of a process that is alone."""
    if session is not None:
        return None, session
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.group.WORLD is not None:
        return _divided(dist.group.WORLD)
    return None, current_session()


def _store(request: PlanOrPolicy, session: Session | None, pages: Pages) -> Store:
    share, session = _session(session)
    policies = kind_policies(request, session.machine, gpu_node=_gpu_node(session.machine))
    pin = get_accelerator().device_name() == "cuda"
    store = Store(policies, session, pages=pages, pin=pin, share=share)
    installed().know(store)
    return store


def _store_later(
    request: PlanOrPolicy, session: Session | None, pages: Pages
) -> Callable[[], Store]:
    """A store that is made when it is first asked for; what is wrong with the request shows now.

    The node of the GPU is known only after DeepSpeed, or the script, has chosen the GPU.
    """
    session = session or chosen_session()
    kind_policies(request, (session or current_session()).machine)
    return functools.cache(lambda: _store(request, session, pages))


def _show_information() -> None:
    """In a script that knows nothing of this package the table is shown, unless it logs itself."""
    if not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())
        _LOG.setLevel(logging.INFO)


def _engines() -> list[Any]:
    """Every live engine, from the garbage collector: DeepSpeed has no list of them."""
    kind = deepspeed.DeepSpeedEngine
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _keep_little(model: Any, store: Store) -> str | None:
    """Has a model keep one tensor a layer, where the plan has it; why it cannot, or None."""
    why, offload = compute_again(model), store.offloaded_activations()
    return leave_for(model, offload) if why is None and offload is not None else why


def _attach(engine: Any, store: Store, capture: Capture) -> AttachedEngine:
    attached = AttachedEngine(engine, store, capture)
    if store.policies.checkpointing and (why := _keep_little(engine.module, store)) is not None:
        _LOG.warning("the plan counts on activation checkpointing: %s", why)
    if engine.global_rank == 0 and _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s", attached.table())
    missed = attached.missed()
    if missed:
        _LOG.warning("rank %d: not placed: %s", engine.global_rank, "; ".join(missed))
    return attached


@renamed_keywords(memory="session")
@contextlib.contextmanager
def placing(
    plan_or_policy: PlanOrPolicy = None,
    *,
    pages: Pages = "thp",
    session: Session | None = None,
    tune: Signal | None = None,
    tune_budget_bytes: int = 0,
    tune_state: str | Path | None = None,
    tune_threads: Sequence[int] = (),
) -> Iterator[Placed]:
    """Engines that ``deepspeed.initialize`` makes in the block keep their host tensors in tiers.

    Parameters
    ----------
    plan_or_policy
        None for the defaults; a plan of ``cxl-offload plan training`` or the path of its file; one
        policy; or a mapping of kinds (``kinds.KINDS``) to policies.
    pages
        See :func:`cxl_offload.empty`.
    session
        The session to allocate in. None means that of :func:`cxl_offload.use`; where the script
        chose none, this rank's part of the machine (:func:`cxl_offload.ranks.share_machine`), or
        all of it for a process that is alone.
    tune
        ``"step_time"``: the share of the optimizer's tensors on the far tier (CXL, else the other
        sockets) follows the time of the steps, see docs/tuning.md. ``"phase_time"``: forward,
        backward and optimizer have a share each, where moving between them pays. None: they stay.
    tune_budget_bytes
        Bytes that may move between two steps, in the mean; 0 only logs advice.
    tune_state
        A JSON file that lets a restart go on.
    tune_threads
        With ``tune="phase_time"``: numbers of torch's threads that each phase tries; it takes the
        fewest that are not slower. Other numbers may round otherwise. Empty: they stay.

    Yields
    ------
    Placed
        With the engines and their tables once the block is over.

    Raises
    ------
    MemoryError, PlacementError
        A node has no room; raised where DeepSpeed allocates.
    ValueError, TypeError, ConfigError
        As :func:`kinds.kind_policies`.

    Notes
    -----
    A model that is built under ``deepspeed.zero.Init`` allocates there: build it in the block too.
    """
    tuning = read_tuning(
        tune,
        machine=(session or current_session()).machine,
        budget_bytes=tune_budget_bytes,
        state=tune_state,
        threads=tune_threads,
    )
    capture = installed()
    store = _store_later(plan_or_policy, session, pages)
    before = WeakSet(_engines())
    placed = Placed()
    capture.scopes.append(store)
    try:
        yield placed
    finally:
        capture.scopes.remove(store)
    # Those of a block inside of this one are placed already, by that one.
    made = [each for each in _engines() if each not in before and not capture.follows(each)]
    for engine in made:
        attached = _attach(engine, store(), capture)
        if tuning is not None:
            followed = PhasedEngine if tuning.by_phase else TunedEngine
            own = replace(tuning, state=state_of_rank(tuning.state, engine.global_rank))
            attached.tuned = followed(engine, attached, own)
        placed.engines.append(attached)
    if made:
        for tell in _told_of_own:
            tell()


@renamed_keywords(memory="session")
def attach(
    engine: Any,
    plan_or_policy: PlanOrPolicy = None,
    *,
    pages: Pages = "thp",
    session: Session | None = None,
) -> AttachedEngine:
    """Moves the host tensors of an engine that is there already, and keeps them at their places.

    What other tensors are views of cannot be moved any more (stage 3: low-precision parameters and
    gradients); :meth:`AttachedEngine.missed` names it. Arguments as for :func:`placing`.

    Raises
    ------
    ValueError
        The engine is placed already: two would move its tensors to and fro in every step.
    """
    capture = installed()
    if capture.follows(engine):
        raise ValueError(
            "attach: this engine is placed already; call remove() of what placed it, then attach"
        )
    return _attach(engine, _store(plan_or_policy, session or chosen_session(), pages), capture)


def _tell_of_own(on_placed: Callable[[AttachedEngine | None], None] | None) -> None:
    _show_information()
    _LOG.warning(
        "%s: the script places its engine itself and keeps doing so; the plan is not used",
        PLAN_VARIABLE,
    )
    if on_placed is not None:
        on_placed(None)


def start_from_environment(
    *, on_placed: Callable[[AttachedEngine | None], None] | None = None
) -> bool:
    """Places the engines of a script that cannot be changed, as ``CXL_OFFLOAD_PLAN`` says.

    To be called before the script makes its engine; imports DeepSpeed. The engine is taken in hand
    at its first forward pass.

    Parameters
    ----------
    on_placed
        Called for every engine that then has something at a place of the request, with what
        follows it; None where the script placed it itself.

    Returns
    -------
    bool
        False, and nothing is done, where the variable is not set.

    Raises
    ------
    ConfigError, ValueError
        The variable is no plan and no policy on this machine.
    """
    text = os.environ.get(PLAN_VARIABLE)
    if text is None:
        return False
    capture = installed()
    store = _store_later(parse_request(text), None, "thp")
    capture.scopes.append(store)
    known = WeakSet(_engines())

    placed_by_script = functools.cache(functools.partial(_tell_of_own, on_placed))

    def first_forward(module: Any, inputs: Any) -> None:
        if not isinstance(module, deepspeed.DeepSpeedEngine) or module in known:
            return
        known.add(module)
        if capture.follows(module):
            placed_by_script()
            return
        _show_information()
        with in_one_line():
            attached = _attach(module, store(), capture)
        if on_placed is not None and any(row.requested for row in attached.rows()):
            on_placed(attached)

    _told_of_own.append(placed_by_script)
    register_module_forward_pre_hook(first_forward)
    keep_loaded_states_as(
        lambda engine: "" if capture.follows(engine) else store().policies.state_dtype
    )
    name_the_missing_optimizer()
    return True


__getattr__ = old_names(__name__)
