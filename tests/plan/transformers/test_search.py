"""The search for transformers leaves nothing better in its own space: numbers of rows one by one,
the neighbours that ``why`` weighs, and machines with less memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.layout import layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.topology import load_machine

GIB = 1 << 30


def request(model: str, machine: str, prompt: int, generated: int, **extra: Any) -> Any:
    return TransformersRequest(
        model=load_model(model),
        machine=load_machine(machine),
        prompt=prompt,
        generated=generated,
        model_name=model,
        replay=None,
        prices=False,
        **extra,
    )


def numbers(most: int) -> Iterator[int]:
    """Few rows one by one, and more of them a fiftieth apart."""
    count = 1
    while count <= most:
        yield count
        count = max(count + 1, int(count * 1.02))
    yield most


@pytest.mark.parametrize("machine", ["zen4-3", "zen4-1", "xeon6430"])
def test_no_number_of_rows_is_faster_where_few_rows_ask_for_few_experts(machine: str) -> None:
    executor = Transformers(request("mixtral-8x7b", machine, 64, 512))
    job, hardware = executor.job, executor.hardware()
    found = executor.search(hardware)
    assert found is not None
    (layout,) = layouts(job, hardware)
    most = most_batches(job, hardware, layout)
    best = {}
    for count in numbers(most):
        program = SharesProgram(job, hardware, layout, batches=(count, count), unit_s=100.0)
        shares = program.solve()
        best[count] = math.inf if shares is None else shares.seconds
    rate = job.generated / min(best.values())
    assert found.tokens_per_s >= rate * (1 - 1e-6)
    assert found.tokens_per_s == pytest.approx(found.choice.phases.tokens_per_s, rel=0.02)
    few = SharesProgram(job, hardware, layout, batches=(1, most), unit_s=100.0).solve()
    assert few is not None
    assert job.generated / few.seconds > found.tokens_per_s  # all rows as if they asked for few


def test_working_memory_of_cpus_lies_where_the_first_node_is_full() -> None:
    """Without any local memory the plan has 4899 rows; 100 MB of it used to bring them to 8."""
    rates, homes = [], []
    for limits in ({"ldram": 0}, {"ldram": GIB // 10}, {"ldram": 16 * GIB}, {}):
        executor = Transformers(request("mixtral-8x7b", "zen4-3", 64, 512, limits=limits))
        found = executor.search(executor.hardware())
        assert found is not None
        rates.append(found.tokens_per_s)
        homes.append(found.choice.homes)
        job, hardware = executor.job, found.hardware
        assert sum(homes[-1].work) == job.work_bytes(homes[-1].rows)
        assert all(
            have <= node.usable_bytes for have, node in zip(found.host, hardware.nodes, strict=True)
        )
    assert rates == sorted(rates)
    assert homes[1].work[0] <= GIB // 10 < homes[1].work[1]
    roomy = Transformers(request("llama-2-7b", "zen4-3", 64, 512, most_batches=1))
    alone = roomy.search(roomy.hardware())
    assert alone is not None
    assert alone.choice.homes.work == (roomy.job.work_bytes(1), 0)
