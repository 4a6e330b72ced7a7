"""Recorded accesses against counts made by hand."""

from __future__ import annotations

import pytest
import torch

from cxl_offload.objects import record
from cxl_offload.plan.tensor_policy import TierRate, tensor_policies


def counted(seen: object) -> dict[str, tuple[int, int]]:
    return {use.name: (use.read_bytes, use.written_bytes) for use in seen.uses()}  # type: ignore[attr-defined]


def test_reads_and_writes_are_counted_by_schema() -> None:
    a, b, c = torch.ones(8, 4), torch.ones(4, 2), torch.empty(8, 2)

    with record({"a": a, "b": b, "c": c}) as seen:
        torch.mm(a, b, out=c)
        a.mul_(2)
        c.copy_(c.clone())

    assert counted(seen) == {"a": (256, 128), "b": (32, 0), "c": (128, 128)}


def test_views_cost_nothing_until_they_are_used() -> None:
    table = torch.ones(100, 4)

    with record({"table": table}) as seen:
        part = table[10:20].t()
        before = counted(seen)
        part.sum()

    assert before == {"table": (0, 0)}
    assert counted(seen) == {"table": (160, 0)}
    assert seen.uses()[0].footprint_bytes == 1600


def test_other_tensors_and_times_outside_are_not_counted() -> None:
    a, other = torch.ones(4), torch.ones(4)
    with record({"a": a}) as seen:
        other.add_(1)
    a.add_(1)

    assert counted(seen) == {"a": (0, 0)}


def test_backward_and_optimizer_are_seen() -> None:
    layer = torch.nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    objects = {"weight": layer.weight, "states": [state["exp_avg"], state["exp_avg_sq"]]}

    with record(objects) as seen:
        layer(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    counts = counted(seen)
    assert counts["states"] == (2048, 2048)
    assert counts["weight"] == (2 * 1024, 1024)  # forward and update; inputs need no gradient
    assert {use.name: use.footprint_bytes for use in seen.uses()} == {
        "weight": 1024,
        "states": 2048,
    }


def test_memory_under_two_names_is_refused() -> None:
    a = torch.ones(4)
    with pytest.raises(ValueError, match="objects a and b share their memory"):
        record({"a": a, "b": a[1:]})


def test_recorded_step_decides_what_is_interleaved() -> None:
    cache, cold, small = torch.ones(1 << 16), torch.ones(1 << 16), torch.ones(64)
    with record({"cache": cache, "cold": cold, "small": small}) as seen:
        for _ in range(10):
            cache.sum()
        small.sum()

    made = tensor_policies(seen.uses(), [TierRate("ldram", 3e11), TierRate("cxl", 1e11)])

    assert [(each.name, each.policy) for each in made] == [
        ("cold", "preferred:ldram,cxl"),
        ("small", "preferred:ldram,cxl"),
        ("cache", "weighted:ldram=3,cxl=1"),
    ]
