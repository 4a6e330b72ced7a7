"""Trains with the real DeepSpeed and writes down what happened: ``worker JOBS.json RESULTS.json``.

A process of its own, because DeepSpeed keeps an accelerator and a process group for its life.
Several jobs share the process, since it takes seconds to start one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

from cxl_offload import Session, load_machine, placement_of, use
from cxl_offload.integrations.deepspeed import attach, placing
from cxl_offload.integrations.deepspeed.phases import PhasedEngine
from cxl_offload.memory import current_session
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.topology.links import Gpu
from cxl_offload.tune import decisions

from .tiny import TinyModel, batches, checkpoint_bytes, config, watches_cpus

RANK = int(os.environ.get("RANK", "0"))


def train(engine: Any, steps: int, job: dict[str, Any], seed: int) -> list[str]:
    """The bits of the losses, one a micro-batch."""
    losses = []
    count = steps * job.get("accumulation", 1)
    for inputs, targets in batches(count, seed=seed, rank=RANK):
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def values(engine: Any) -> list[torch.Tensor]:
    """Every fp32 parameter and moment, through DeepSpeed's own interface."""
    found = []
    inner = engine.optimizer.optimizer
    narrow = isinstance(inner, CPUAdam) and inner.in_codes
    for param in engine.module.parameters():
        found.append(safe_get_full_fp32_param(param))
        if not narrow:  # codes are no values
            names = ("exp_avg", "exp_avg_sq")
            found += [safe_get_full_optimizer_state(param, name) for name in names]
    return [value.clone() for value in found]


def digest(engine: Any) -> str:
    """Of the bits of :func:`values`."""
    found = hashlib.sha256()
    for value in values(engine):
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def attributes(zero: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What DeepSpeed holds, read off its attributes once more, apart from the package's list."""
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    name = "fp32_partitioned_groups_flat" if stage3 else "single_partition_of_fp32_groups"
    for master in getattr(zero, name):
        yield "fp32_master", master
        yield "fp32_grad", master.grad
        states = zero.optimizer.state.get(master, {})
        for kind in ("exp_avg", "exp_avg_sq"):
            kept = (kind, f"{kind}_codes", f"{kind}_scales")
            yield from ((kind, states[key]) for key in kept if key in states)
    if stage3:
        yield "staging", zero.grad_partitions_flat_buffer
        if zero.offload_param:
            yield from (("params", flat) for flat in zero.param_groups_fp16_flat_cpu_memory)
            for param in zero.module.parameters():
                yield "params", param.ds_tensor
    else:
        yield "temp_grad", zero.temp_grad_buffer_for_cpu_offload
        staging = zero.param_buffer_of_bit16_for_cpu_offload_groups
        yield from (("staging", each) for each in staging)
        accumulated = zero.accumulated_grads_in_cpu.values()
        yield from (("grad_accumulation", each) for each in accumulated)


def pages(zero: Any) -> dict[str, dict[str, Any]]:
    """By kind: the nodes of its pages, whether this package placed them, how much is stored."""
    found: dict[str, dict[str, Any]] = {}
    for kind, value in attributes(zero):
        place = placement_of(value)
        row = found.setdefault(kind, {"nodes": [], "placed": True, "stored": True})
        row["nodes"] = sorted({*row["nodes"], *place.granted})
        row["placed"] &= place.requested is not None
        whole = value.untyped_storage().nbytes() == value.nbytes
        row["stored"] &= whole or kind == "params"
    return found


def partitioned_at_birth(job: dict[str, Any]) -> tuple[Any, Any]:
    """A model whose parameters are partitioned as they are made; both in one block."""
    scope = contextlib.nullcontext() if job.get("stock") else placing(job.get("policy"))
    with scope as placed:
        with deepspeed.zero.Init(config_dict_or_path=config(job)):
            model = TinyModel()
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config(job)
        )[0]
    return engine, None if placed is None else placed.engines[0]


def start(job: dict[str, Any]) -> tuple[Any, Any]:
    """The engine, and what the scope around it gave; None in a stock run."""
    torch.manual_seed(0)
    if job.get("zero_init"):
        return partitioned_at_birth(job)
    model = TinyModel()
    arguments: dict[str, Any] = {"model": model, "config": config(job)}
    chosen = job.get("optimizer", "DeepSpeedCPUAdam")
    if chosen == "DeepSpeedCPUAdam":
        arguments["model_parameters"] = model.parameters()
    else:
        made: Any = CPUAdam if chosen == "CPUAdam" else getattr(torch.optim, chosen)
        options: dict[str, Any] = {"state_dtype": torch.uint8} if job.get("narrow_states") else {}
        options |= job.get("options", {})
        arguments["optimizer"] = made(model.parameters(), lr=1e-2, weight_decay=0.01, **options)
    if job.get("stock"):
        return deepspeed.initialize(**arguments)[0], None
    if job.get("attach"):
        engine = deepspeed.initialize(**arguments)[0]
        return engine, attach(engine, job.get("policy"))
    with placing(job.get("policy"), **job.get("tune", {})) as placed:
        engine = deepspeed.initialize(**arguments)[0]
    return engine, placed.engines[0]


def set_parameters(engine: Any) -> bool:
    """Halves every fp32 parameter; whether DeepSpeed then gives back what was set."""
    right = True
    for param in engine.module.parameters():
        value = safe_get_full_fp32_param(param) / 2
        safe_set_full_fp32_param(param, value)
        right &= torch.equal(safe_get_full_fp32_param(param), value)
    return right


def two_engines(job: dict[str, Any]) -> dict[str, Any]:
    """Of different policies, training in turns; and a request of nobody, in a block and after."""
    first, one = start(job | {"policy": "cxl"})
    with placing({"other": "rdram"}) as placed:
        inside = get_accelerator().pin_memory(torch.ones(4096))
        empty = get_accelerator().pin_empty(64, 64, dtype=torch.float32)
        like = get_accelerator().pin_empty_like(inside, dtype=torch.int8)
    outside = get_accelerator().pin_memory(torch.ones(4096))
    second, other = start(job | {"policy": "rdram"})
    losses = [train(engine, 1, job, at) for at in (1, 2) for engine in (first, second)]
    result = {
        "losses": losses,
        "first": pages(first.optimizer),
        "second": pages(second.optimizer),
        "missed": one.missed(),
        "no_engine": placed.engines,
        "inside": [sorted(placement_of(each).granted) for each in (inside, empty, like)],
        "kept": bool((inside == 1).all()) and like.dtype is torch.int8 and empty.shape == (64, 64),
        "outside": placement_of(outside).requested,
    }
    result["watched"] = [watches_cpus()]
    first.destroy()
    result["watched"] += [watches_cpus()]
    result["second_after_first_is_destroyed"] = pages(second.optimizer)
    one.release()  # a second time: nothing is left to release
    second.destroy()
    other.remove()
    result["watched"] += [watches_cpus()]
    get_accelerator().unpin_memory(inside)
    result["unpinned"] = inside.numel()
    return result


def placed_twice(job: dict[str, Any]) -> dict[str, Any]:
    """An engine in a block in a block, attached as well, and attached again once it is free."""
    with placing("rdram") as outer:
        engine, inner = start(job | {"policy": "cxl"})
    before = pages(engine.optimizer)
    try:
        attach(engine, "rdram")
        said = ""
    except ValueError as error:
        said = str(error)
    losses = train(engine, 2, job, 1)
    result = {"said": said, "outer": len(outer.engines), "losses": losses, "before": before}
    result["after"] = pages(engine.optimizer)
    inner.remove()
    attach(engine, "rdram")
    result["again"] = pages(engine.optimizer)
    engine.destroy()
    return result


def without_offload(job: dict[str, Any]) -> dict[str, Any]:
    """An engine that has nothing on the host in a block, and one without an optimizer."""
    told = []
    settings = config(job | {"optimizer": "AdamW"})  # DeepSpeed's own would be compiled first
    for stage in (0, 2):
        settings["zero_optimization"] = {"stage": stage}
        torch.manual_seed(0)
        with placing("cxl") as placed:
            model = TinyModel()
            optimizer = torch.optim.AdamW(model.parameters())
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        told.append([placed.engines[0].missed(), len(placed.engines[0].rows())])
        engine.destroy()
    return {"told": told, "held": current_session().stats().asked_bytes.current}


def inference(job: dict[str, Any]) -> dict[str, Any]:
    """Stage 3 without an optimizer, its parameters on the host; placed, and attached later."""
    settings = config(job | {"optimizer": "none"})
    del settings["zero_optimization"]["offload_optimizer"]
    made: dict[str, Any] = {"outputs": [], "rows": [], "missed": []}
    inputs, targets = next(batches(1, seed=1, rank=RANK))
    for how in ("stock", "placed", "attached"):
        torch.manual_seed(0)
        scope = placing("cxl") if how == "placed" else contextlib.nullcontext()
        with scope as placed:
            engine = deepspeed.initialize(model=TinyModel(), config=settings)[0]
        attached = placed.engines[0] if placed is not None else None
        if how == "attached":
            attached = attach(engine, "cxl")
        with torch.no_grad():
            made["outputs"].append(engine(inputs, targets).item().hex())
        if attached is not None:
            made["rows"].append([[row.kind, row.requested, row.granted] for row in attached.rows()])
            made["missed"].append(attached.missed())
        engine.destroy()
    return made


def early_elements(engine: Any) -> list[int]:
    """Grows by the elements that this package's optimizer updates before a step."""
    found: list[int] = []
    inner = getattr(engine.optimizer, "optimizer", None)
    if isinstance(inner, CPUAdam):
        stock = inner.update_parts

        def update_parts(given: Any) -> None:
            found.extend(end - begin for *_, begin, end in given)
            stock(given)

        inner.update_parts = update_parts  # type: ignore[method-assign]
    return found


def refused_settings(job: dict[str, Any]) -> dict[str, Any]:
    """What `placing` says of the settings."""
    try:
        start(job)
    except ValueError as error:
        return {"error": str(error)}
    return {}


def refused(job: dict[str, Any]) -> dict[str, Any]:
    """A node without room: the error, and an engine that is made after it."""
    result: dict[str, Any] = {}
    try:
        start(job | {"policy": "bind:2"})
    except MemoryError as error:
        result["error"] = str(error)
    engine, attached = start(job | {"policy": {"exp_avg": "bind:1"}})
    result["losses"] = train(engine, 2, job, 1)
    result["pages"] = pages(engine.optimizer)
    result["missed"] = attached.missed()
    engine.destroy()
    return result


def run(job: dict[str, Any], session: Session) -> dict[str, Any]:
    result: dict[str, Any] = {}
    engine, attached = start(job)
    if attached is not None:
        result["at_start"] = pages(engine.optimizer)
        result["table"] = attached.table()
    if job.get("load"):
        engine.load_checkpoint(job["load"], tag="tested")
    early = early_elements(engine)
    result["losses"] = train(engine, job.get("steps", 4), job, job.get("seed", 1))
    result["early_elements"] = sum(early)
    result["digest"] = digest(engine)
    if job.get("set"):
        result["set_right"] = set_parameters(engine)
        result["losses"] += train(engine, 2, job, 2)
    if job.get("save"):
        engine.save_checkpoint(job["save"], tag="tested")
        torch.distributed.barrier()
        result["checkpoint_bytes"] = checkpoint_bytes(Path(job["save"]))
        result["after_save"] = train(engine, 2, job, 3)
        engine.load_checkpoint(job["save"], tag="tested")
        result["reloaded"] = train(engine, 2, job, 3)
    if job.get("dump") and RANK == 0:
        torch.save(values(engine), job["dump"])
    if attached is not None:
        result["pages"] = pages(engine.optimizer)
        result["rows"] = [
            [row.kind, row.nbytes, row.requested, row.granted, row.pinned, row.notes]
            for row in attached.rows()
        ]
        result["missed"] = attached.missed()
        if isinstance(attached.tuned, PhasedEngine) and attached.tuned.steps is not None:
            steps = attached.tuned.steps
            result["phases"] = {
                "shares": steps.tuner.shares,
                "granted": steps.homes.granted(),
                "threads": torch.get_num_threads(),
                "decided": [
                    one.count
                    for one in decisions()
                    if (one.framework, one.tuner, one.outcome) == ("deepspeed", "phase", "moved")
                ],
            }
            del steps  # it keeps the tensors alive
        elif attached.tuned is not None and attached.tuned.tuner is not None:
            homes = attached.tuned.tuner.homes
            result["tuned"] = {
                "decisions": attached.tuned.tuner.decisions,
                "granted": homes.granted(),
                "nbytes": homes.nbytes,
            }
            del homes  # it keeps the tensors alive
        result["held"] = session.stats().asked_bytes.current
    engine.destroy()
    result["held_after_destroy"] = session.stats().asked_bytes.current
    session.trim()
    result["mapped_after_destroy"] = session.stats().mapped_bytes.current
    return result


def half_precision_everywhere() -> None:
    """DeepSpeed refuses fp16 on CPUs without AMX for it; torch computes it on all of them."""
    current = get_accelerator()

    class HalfPrecision(type(current)):  # type: ignore[misc]
        def is_fp16_supported(self) -> bool:
            return True

    set_accelerator(HalfPrecision())


def main() -> None:
    torch.set_num_threads(1)
    half_precision_everywhere()
    deepspeed.init_distributed("gloo")
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        machine = load_machine("epyc9354-cxl-a")
        if "gpu_nodes" in job:
            names = [machine.gpus[0].name, "second"]
            cards = [
                Gpu(name=name, node=node)
                for name, node in zip(names, job["gpu_nodes"], strict=False)
            ]
            machine = replace(machine, gpus=tuple(cards))
        session = Session.simulated(machine, limits={2: job["room"]} if "room" in job else None)
        with use(session), contextlib.redirect_stdout(sys.stderr):
            match job.get("what"):
                case "two engines":
                    results.append(two_engines(job))
                case "placed twice":
                    results.append(placed_twice(job))
                case "no offload":
                    results.append(without_offload(job))
                case "inference":
                    results.append(inference(job))
                case "refused":
                    results.append(refused(job))
                case "refused settings":
                    results.append(refused_settings(job))
                case _:
                    results.append(run(job, session))
    Path(f"{sys.argv[2]}.{RANK}").write_text(json.dumps(results))
    # A collective still in flight at the end of the interpreter aborts the process (PyTorch).
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
