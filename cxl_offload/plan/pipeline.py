"""The one way from a request to a plan, for any engine.

request -> hardware -> search -> without the tiers that bring little -> replay -> prices -> plan
"""

from __future__ import annotations

from typing import TypeVar

from cxl_offload.plan.compare import best_without_idle_tiers
from cxl_offload.plan.executor import Candidate, Executor, homes
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.prices import prices
from cxl_offload.plan.replay_check import disagreements
from cxl_offload.plan.why import reasons

T = TypeVar("T")


def make_plan(executor: Executor[T]) -> Plan:
    """The plan with the most tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need, or a limit is impossible.
    MemoryError
        Nothing fits; says what is needed and what there is.
    """
    found, cxl, copies = best_without_idle_tiers(executor)
    request, refusal = executor.request, executor.refusal()
    own = executor.own_fields(found)
    return Plan(
        kind=executor.kind,
        executor=executor.name,
        runs=refusal is None,
        advice=refusal or "",
        model=request.model.name,
        machine=found.hardware.machine,
        command=executor.command(found),
        batch=executor.batch(found),
        homes=homes(found.hardware, executor.kinds(found)),
        node_bytes=found.hardware.node_bytes(found.host),
        gpu_bytes=found.gpu_bytes,
        drive_bytes=found.drive_bytes,
        tokens_per_s=found.tokens_per_s,
        phases=executor.phases(found),
        cxl=cxl,
        prices=prices(executor, found) if request.prices else (),
        error=executor.error(),
        settings=own.settings,
        threads=own.threads,
        policies=own.policies,
        on_cpu=own.on_cpu,
        kv_dtype=own.kv_dtype,
        state_dtype=own.state_dtype,
        checkpointing=own.checkpointing,
        copies=copies,
        serving=own.serving,
        why=tuple(reasons(executor, found)) if request.why else (),
        notes=(*found.hardware.notes, *executor.notes(found), *_replayed(executor, found)),
    )


def _replayed(executor: Executor[T], found: Candidate[T]) -> list[str]:
    """What a replay of the plan's bytes disagrees on."""
    replay = executor.request.replay
    if replay is None:
        return []
    return disagreements(
        executor.equation_seconds(found), lambda: executor.replayed_seconds(found, replay)
    )
